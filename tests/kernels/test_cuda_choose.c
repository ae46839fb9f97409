/* test_cuda_choose.c: the bounds that size the CUDA launches, against segments counted one by one.
 */
#include "kernels/cuda/cuda_choose.h"
#include "support/test.h"

#include <stdlib.h>

/* Tiles and windows of rows dealt to the slots: the counting that the bounds stand for. */
static void count(const int32_t *rows_of, int32_t n_slots, int32_t window_tiles, int32_t *out_tiles,
                  int32_t *out_windows)
{
    *out_tiles = *out_windows = 0;
    for (int32_t s = 0; s < n_slots; s++) {
        int32_t tiles = rows_of[s] / 8 + (rows_of[s] % 8 != 0);

        *out_tiles += tiles;
        *out_windows += tiles / window_tiles + (tiles % window_tiles != 0);
    }
}

static void tiles_and_windows_stay_within_their_bounds(void **state)
{
    static const int32_t rows[] = {1, 7, 8, 9, 64, 257, 512, 2048, 8192};
    static const int32_t slots[] = {1, 2, 5, 16, 64, 300};
    uint32_t random = 12345;

    (void)state;
    for (int32_t i = 0; i < 9 * 6 * 40; i++) {
        int32_t n_rows = rows[i % 9], n_slots = slots[i / 9 % 6];
        int32_t window_tiles = 4 << i / 54 % 3; /* 4, 8 and 16 */
        int32_t *rows_of = calloc((size_t)n_slots, sizeof *rows_of), tiles, windows;

        for (int32_t row = 0; row < n_rows; row++) {
            random = random * 1664525u + 1013904223u;
            rows_of[(random >> 8) % (uint32_t)(i % 3 ? n_slots : (n_slots + 3) / 4)]++;
        }
        count(rows_of, n_slots, window_tiles, &tiles, &windows);
        assert_true(tiles <= sp_cuda_tiles_bound(n_rows, n_slots));
        assert_true(windows <= sp_cuda_windows_bound(n_rows, n_slots, window_tiles));
        free(rows_of);
    }
}

/* Where the bounds are reached: a row more than full tiles, and than full windows, in every slot.
 */
static void the_bounds_are_not_wasteful(void **state)
{
    (void)state;
    assert_int_equal(sp_cuda_tiles_bound(8192, 1), 1024);
    assert_int_equal(sp_cuda_tiles_bound(4 * 9, 4), 8);
    assert_int_equal(sp_cuda_tiles_bound(3, 64), 3);
    assert_int_equal(sp_cuda_windows_bound(8192, 1, 8), 128);
    assert_int_equal(sp_cuda_windows_bound(4 * 65, 4, 8), 8);
    assert_int_equal(sp_cuda_windows_bound(3, 64, 8), 3);
}

/* Multiprocessors, from the smallest GPU to one that there is not yet. */
static const int32_t gpus[] = {1, 16, 48, 84, 132, 170, 400};
#define N_GPUS ((int32_t)(sizeof gpus / sizeof gpus[0]))

static void the_measured_gpu_has_the_measured_numbers(void **state)
{
    (void)state;
    assert_int_equal(sp_cuda_scaled(SP_CUDA_WAVE, SP_CUDA_MEASURED_ON), SP_CUDA_WAVE);
    assert_int_equal(sp_cuda_scaled(SP_CUDA_WAVE, 66), SP_CUDA_WAVE / 2);
    assert_int_equal(sp_cuda_scaled(SP_CUDA_RING_WIDE, 1), 1);
}

/* What parts.cu relies on: an expand of one input adds nothing up, and any group's partials have
 * room for the one that it reads, and for its rounded sums. */
static void one_input_is_one_partial(void **state)
{
    static const int32_t rows[] = {1, 64, 256, 257, 2048, 65536};
    static const int32_t ranks[] = {8, 24, 64, 512};

    (void)state;
    for (int32_t i = 0; i < 6 * 4 * 4 * N_GPUS; i++) {
        int32_t n_rows = rows[i % 6], rank = ranks[i / 6 % 4], sites = i / 24 % 4 + 1;
        int32_t gpu = gpus[i / 96];
        size_t elements = (size_t)n_rows * (size_t)rank * (size_t)sites;
        size_t partial = elements * (sp_cuda_rounds_xa(n_rows, rank) ? 6 : 4);

        for (int32_t slots = 1; slots <= 64; slots *= 4) {
            assert_int_equal(sp_cuda_choose_shrink(gpu, n_rows, slots, 1, rank, sites).n_partials,
                             1);
            assert_int_equal(sp_cuda_partials_bytes(gpu, n_rows, slots, 1, rank, sites), partial);
            assert_true(sp_cuda_partials_bytes(gpu, n_rows, slots, 8, rank, sites) >= partial);
            assert_true(sp_cuda_partials_bytes(gpu, n_rows, slots, 5128, rank, sites) >= partial);
        }
    }
}

/* Every chunk in one partial, every partial in one block, and shapes that there are kernels for. */
static void partials_cover_k_and_blocks_cover_partials(void **state)
{
    static const int32_t rows[] = {1, 64, 256, 257, 512, 2048, 8192, 65536};
    static const int32_t ks[] = {8, 512, 520, 2560, 4096, 12288, 25600};
    static const int32_t ranks[] = {8, 16, 24, 64, 128, 512};

    (void)state;
    for (int32_t i = 0; i < 8 * 7 * 6 * 4 * N_GPUS; i++) {
        int32_t n_rows = rows[i % 8], k = ks[i / 8 % 7], rank = ranks[i / 56 % 6];
        int32_t sites = i / 336 % 4 + 1, chunks = (k + 511) / 512, gpu = gpus[i / 1344];
        sp_cuda_shrink_choice choice = sp_cuda_choose_shrink(gpu, n_rows, 16, k, rank, sites);
        int32_t window = choice.window_tiles;

        assert_true(choice.partial_chunks == 1 || choice.partial_chunks == 4);
        assert_true(choice.n_partials * choice.partial_chunks >= chunks);
        assert_true((choice.n_partials - 1) * choice.partial_chunks < chunks);
        assert_in_range(choice.block_partials, 1, choice.n_partials);
        assert_int_equal(window == 1, n_rows <= 256);
        assert_true(window == 1 || window == 4 || window == 8 || window == 16);
        assert_in_range(choice.rank_warps, 1, window == 1 ? 1 : window == 16 ? 2 : 3);
    }
}

/* Large ranks of many rows: the forms whose clusters round, whatever the sizes. */
static void large_ranks_take_the_forms_that_there_are(void **state)
{
    static const int32_t rows[] = {257, 300, 512, 2048, 8192, 65536};
    static const int32_t ranks[] = {64, 72, 128, 512};

    (void)state;
    assert_false(sp_cuda_rounds_xa(256, 512));
    assert_false(sp_cuda_rounds_xa(257, 56));
    for (int32_t i = 0; i < 6 * 4 * 4 * N_GPUS; i++) {
        int32_t n_rows = rows[i % 6], rank = ranks[i / 6 % 4], sites = i / 24 % 4 + 1;
        sp_cuda_shrink_choice choice =
            sp_cuda_choose_shrink(gpus[i / 96], n_rows, 4, 4096, rank, sites);

        assert_true(sp_cuda_rounds_xa(n_rows, rank));
        assert_true(choice.window_tiles == 8 || choice.window_tiles == 16);
        assert_in_range(choice.rank_warps, 1, 2);
        assert_int_equal(choice.block_partials, 1);
    }
}

/* The ring of the expand is for many rows and for much of B, whatever the slots hold; its stages
 * are whole groups of 32 columns. */
static void the_ring_takes_the_large_steps(void **state)
{
    static const int32_t small[][4] = {/* rows, slots, steps of 128 columns, pool's rank */
                                       {1, 1, 48, 16},    {32, 8, 192, 16},   {64, 16, 192, 64},
                                       {64, 64, 48, 64},  {8192, 4, 192, 72}, {8192, 16, 192, 64},
                                       {8192, 16, 48, 64}};
    static const int32_t large[][4] = {
        {256, 256, 32, 16}, {64, 64, 192, 8}, {257, 1, 1, 16}, {8192, 16, 48, 56}};

    (void)state;
    for (size_t i = 0; i < sizeof small / sizeof small[0]; i++)
        assert_int_equal(sp_cuda_choose_expand(SP_CUDA_MEASURED_ON, small[i][0], small[i][1],
                                               small[i][2], small[i][3])
                             .ring_columns,
                         0);
    for (size_t i = 0; i < sizeof large / sizeof large[0]; i++) {
        sp_cuda_expand_choice choice = sp_cuda_choose_expand(SP_CUDA_MEASURED_ON, large[i][0],
                                                             large[i][1], large[i][2], large[i][3]);

        assert_true(choice.ring_columns > 0 && choice.ring_columns % 32 == 0);
        assert_true(choice.ring_tiles >= 1 && choice.ring_tiles <= SP_CUDA_WINDOW_TILES);
        assert_true(choice.steps > 0); /* for a GPU without the ring */
    }
}

/* The expand of large ranks goes through wgmma where that was measured to be faster. */
static void large_ranks_go_by_wgmma_where_it_pays(void **state)
{
    static const int32_t slow[][5] = {/* rows, slots, sites, chunks of 64 columns, pool's rank */
                                      {2048, 4, 1, 64, 64}, {2048, 16, 2, 384, 64},
                                      {512, 4, 3, 96, 64},  {4095, 16, 1, 64, 72},
                                      {512, 4, 3, 96, 128}, {257, 1, 2, 8, 512}};
    static const int32_t fast[][5] = {
        {8192, 4, 3, 96, 64}, {4096, 1, 1, 64, 64},  {512, 16, 2, 384, 64}, {2048, 32, 1, 64, 64},
        {512, 4, 1, 64, 128}, {512, 4, 2, 384, 128}, {2048, 4, 3, 96, 128}, {2048, 4, 2, 2, 512}};

    (void)state;
    for (size_t i = 0; i < sizeof slow / sizeof slow[0]; i++)
        assert_false(sp_cuda_expands_by_wgmma(SP_CUDA_MEASURED_ON, slow[i][0], slow[i][1],
                                              slow[i][2], slow[i][3], slow[i][4]));
    for (size_t i = 0; i < sizeof fast / sizeof fast[0]; i++)
        assert_true(sp_cuda_expands_by_wgmma(SP_CUDA_MEASURED_ON, fast[i][0], fast[i][1],
                                             fast[i][2], fast[i][3], fast[i][4]));
}

/* Blocks of the expand in decode come to about one wave, with two steps in flight; few blocks stay
 * as they are. */
static void blocks_of_decode_fit_a_wave(void **state)
{
    static const int32_t cases[][6] = {/* rows, slots, steps of 128 columns, rank, ahead, steps */
                                       {1, 1, 48, 16, 1, 1},    {32, 8, 32, 16, 1, 1},
                                       {64, 16, 48, 16, 2, 2},  {64, 64, 32, 16, 2, 4},
                                       {64, 16, 192, 16, 2, 8}, {256, 64, 32, 16, 2, 4},
                                       {64, 64, 48, 16, 2, 8},  {64, 16, 48, 64, 2, 4},
                                       {64, 64, 32, 64, 2, 8},  {64, 16, 48, 128, 1, 1}};

    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        sp_cuda_expand_choice choice = sp_cuda_choose_expand(SP_CUDA_MEASURED_ON, cases[i][0],
                                                             cases[i][1], cases[i][2], cases[i][3]);

        assert_int_equal(choice.steps_ahead, cases[i][4]);
        assert_int_equal(choice.steps, cases[i][5]);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tiles_and_windows_stay_within_their_bounds),
        cmocka_unit_test(the_bounds_are_not_wasteful),
        cmocka_unit_test(the_measured_gpu_has_the_measured_numbers),
        cmocka_unit_test(one_input_is_one_partial),
        cmocka_unit_test(partials_cover_k_and_blocks_cover_partials),
        cmocka_unit_test(large_ranks_take_the_forms_that_there_are),
        cmocka_unit_test(the_ring_takes_the_large_steps),
        cmocka_unit_test(large_ranks_go_by_wgmma_where_it_pays),
        cmocka_unit_test(blocks_of_decode_fit_a_wave),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
