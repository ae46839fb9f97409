/*
 * Layouts that hold a part of each site: the bytes of an image against those of an adapter that is
 * cut by hand, what decides the fingerprint, and which slices are refused.
 */
#include "pool/image.h"
#include "support/hand.h"

#include "base/alloc.h"

#include <string.h>

enum { K = 11, N = 9, RANK = 3, R = 8 };

static const site_dims dims[] = {
    {-1, SP_MODULE_EMBED_TOKENS, 20, K},
    {-1, SP_MODULE_LM_HEAD, K, 20},
    {0, SP_MODULE_Q_PROJ, K, N},
    {0, SP_MODULE_O_PROJ, N, K},
};
enum { Q = 2, O = 3, N_SITES = 4 };

static sp_site_slice slice_of(int32_t site, int32_t row_begin, int32_t row_end, int32_t col_begin,
                              int32_t col_end, const int32_t *row_map)
{
    return (sp_site_slice){.struct_bytes = sizeof(sp_site_slice),
                           .site = site,
                           .row_begin = row_begin,
                           .row_end = row_end,
                           .col_begin = col_begin,
                           .col_end = col_end,
                           .row_map = row_map};
}

static sp_layout_options options_for(sp_geometry *geometry, const sp_site_slice *slices, size_t n)
{
    sp_layout_options options;

    sp_layout_options_default(&options, sizeof options);
    options.geometry = geometry;
    options.rank = R;
    options.dtype = SP_DTYPE_F32;
    options.slices = slices;
    options.n_slices = n;
    return options;
}

static sp_layout *make_layout(sp_geometry *geometry, const sp_site_slice *slices, size_t n)
{
    const sp_layout_options options = options_for(geometry, slices, n);
    sp_layout *layout = NULL;
    sp_error error;

    assert_ok(sp_layout_create(&options, &layout, &error), &error);
    return layout;
}

/* ---- places and bytes ---------------------------------------------------------------------- */

static void a_part_has_its_own_dimensions(void **state)
{
    sp_geometry *geometry = known_geometry(0, dims, N_SITES);
    const sp_site_slice slices[] = {slice_of(Q, 2, 7, 0, 0, NULL), slice_of(O, 0, 0, 4, 9, NULL)};
    const sp_layout_options options = options_for(geometry, slices, 2);
    sp_layout *layout = make_layout(geometry, slices, 2);
    const sp_layout_site *q = sp_layout_site_at(layout, sp_layout_find(layout, Q));
    const sp_layout_site *o = sp_layout_site_at(layout, sp_layout_find(layout, O));
    size_t slot_bytes, matrix_bytes;

    (void)state;
    assert_int_equal(q->k_in, K);
    assert_int_equal(q->n_out, 5);
    assert_int_equal(q->row_begin, 2);
    assert_int_equal(q->col_begin, 0);
    assert_int_equal(o->k_in, 5);
    assert_int_equal(o->n_out, K);
    assert_int_equal(o->row_begin, 0);
    assert_int_equal(o->col_begin, 4);
    /* R × (11 + 5) and R × (5 + 11) floats; the matrices take 352, 160, 160 and 352 bytes. */
    assert_ok(sp_layout_measure(&options, &slot_bytes, &matrix_bytes, NULL), NULL);
    assert_int_equal(matrix_bytes, 2 * R * 16 * 4);
    assert_int_equal(slot_bytes, 512 + 256 + 256 + 512);
    assert_int_equal(sp_layout_slot_bytes(layout), slot_bytes);
    sp_layout_release(layout);
    sp_geometry_release(geometry);
}

/* The adapter of the whole, and rows and columns of it as factors of their own. */
typedef struct factors {
    float a[RANK * K], b[N * RANK]; /* of q */
    float a_part[RANK * K], b_part[N * RANK];
} factors;

static void cut(factors *f, const int32_t *rows, int32_t n_rows, int32_t col_begin, int32_t n_cols)
{
    for (int32_t r = 0; r < RANK; r++)
        for (int32_t c = 0; c < n_cols; c++)
            f->a_part[r * n_cols + c] = f->a[r * K + col_begin + c];
    for (int32_t i = 0; i < n_rows; i++)
        memcpy(&f->b_part[i * RANK], &f->b[rows[i] * RANK], RANK * sizeof(float));
}

/* Packs the whole into a layout with the slice, and the part into one of the part's dimensions. */
static void check_cut(const sp_site_slice *slice, const int32_t *rows, int32_t n_rows,
                      int32_t n_cols)
{
    const site_dims whole = {0, SP_MODULE_Q_PROJ, K, N},
                    part = {0, SP_MODULE_Q_PROJ, n_cols, n_rows};
    sp_geometry *geometry = known_geometry(0, &whole, 1), *of_part = known_geometry(0, &part, 1);
    sp_layout *sliced = make_layout(geometry, slice, 1), *plain = make_layout(of_part, NULL, 0);
    hand_pool sliced_pool = {.geometry = geometry, .layout = sliced};
    hand_pool plain_pool = {.geometry = of_part, .layout = plain};
    hand_adapter *adapter = hand_adapter_create(5), *by_hand = hand_adapter_create(6);
    sp_test_random random = {11};
    sp_image *image, *expected;
    factors f;

    for (int32_t i = 0; i < RANK * K; i++)
        f.a[i] = sp_test_float(&random);
    for (int32_t i = 0; i < N * RANK; i++)
        f.b[i] = sp_test_float(&random);
    cut(&f, rows, n_rows, slice->col_begin, n_cols);
    hand_adapter_add_copy(adapter, &whole, RANK, 0.5f, SP_DTYPE_F32, f.a, f.b);
    hand_adapter_add_copy(by_hand, &part, RANK, 0.5f, SP_DTYPE_F32, f.a_part, f.b_part);
    image = hand_pack(&sliced_pool, adapter);
    expected = hand_pack(&plain_pool, by_hand);
    assert_int_equal(sp_layout_slot_bytes(sliced), sp_layout_slot_bytes(plain));
    assert_memory_equal(image->data, expected->data, sp_layout_slot_bytes(plain));
    assert_int_equal(image->ranks[0], RANK);
    assert_memory_equal(&image->digest, &adapter->digest, sizeof adapter->digest);
    sp_image_destroy(expected);
    sp_image_destroy(image);
    hand_adapter_destroy(by_hand);
    hand_adapter_destroy(adapter);
    sp_layout_release(plain);
    sp_layout_release(sliced);
    sp_geometry_release(of_part);
    sp_geometry_release(geometry);
}

static void an_image_is_cut_from_the_whole_adapter(void **state)
{
    static const int32_t turned[] = {8, 0, 7, 1, 6, 2, 5, 3, 4}, some[] = {5, 5, 0, 8};
    sp_site_slice rows = slice_of(0, 2, 7, 0, 0, NULL);
    sp_site_slice columns = slice_of(0, 0, 0, 3, 11, NULL);
    sp_site_slice both = slice_of(0, 8, 9, 0, 1, NULL);
    sp_site_slice permuted = slice_of(0, 0, 0, 0, 0, turned);
    sp_site_slice part_of_permuted = slice_of(0, 3, 7, 2, 9, some);

    (void)state;
    check_cut(&rows, (const int32_t[]){2, 3, 4, 5, 6}, 5, K);
    check_cut(&columns, (const int32_t[]){0, 1, 2, 3, 4, 5, 6, 7, 8}, N, 8);
    check_cut(&both, (const int32_t[]){8}, 1, 1);
    check_cut(&permuted, turned, N, K);
    check_cut(&part_of_permuted, some, 4, 7);
}

/* The element is named by its place in the whole adapter, which is what its author can look at. */
static void expect_overflow(const sp_site_slice *slice, int32_t a_index, int32_t b_index,
                            const char *place)
{
    const site_dims whole = {0, SP_MODULE_Q_PROJ, K, N};
    sp_geometry *geometry = known_geometry(0, &whole, 1);
    sp_layout_options options = options_for(geometry, slice, 1);
    hand_adapter *adapter = hand_adapter_create(7);
    float a[RANK * K] = {0}, b[N * RANK] = {0};
    sp_digest digest = {{0}};
    sp_layout *layout = NULL;
    sp_image *image = NULL;
    sp_error error;

    if (a_index >= 0)
        a[a_index] = 1e38f;
    if (b_index >= 0)
        b[b_index] = 1e38f;
    options.dtype = SP_DTYPE_F16;
    assert_ok(sp_layout_create(&options, &layout, &error), &error);
    hand_adapter_add_copy(adapter, &whole, RANK, 0.5f, SP_DTYPE_F32, a, b);
    assert_int_equal(sp_layout_pack_sites(layout, adapter->sites, 1, &digest, NULL, &image, &error),
                     SP_ERR_REFUSED);
    assert_string_equal(error.code, "non-finite");
    assert_int_equal(error.position, a_index >= 0 ? a_index : b_index);
    assert_non_null(strstr(error.text, place));
    assert_null(image);
    hand_adapter_destroy(adapter);
    sp_layout_release(layout);
    sp_geometry_release(geometry);
}

static void an_overflow_is_placed_in_the_whole(void **state)
{
    static const int32_t some[] = {5, 8, 0};
    const sp_site_slice columns = slice_of(0, 0, 0, 3, 9, NULL),
                        rows = slice_of(0, 2, 7, 0, 0, NULL),
                        mapped = slice_of(0, 0, 3, 0, 0, some);

    (void)state;
    expect_overflow(&columns, 1 * K + 4, -1, "lora_A [1, 4]");
    expect_overflow(&columns, 2 * K + 8, -1, "lora_A [2, 8]");
    expect_overflow(&rows, -1, 5 * RANK + 2, "lora_B [5, 2]");
    expect_overflow(&mapped, -1, 8 * RANK + 1, "lora_B [8, 1]");
}

/* The map is copied: the host's may go. */
static void a_row_map_is_the_layouts_own(void **state)
{
    const site_dims whole = {0, SP_MODULE_Q_PROJ, K, N};
    sp_geometry *geometry = known_geometry(0, &whole, 1);
    int32_t map[N] = {8, 7, 6, 5, 4, 3, 2, 1, 0};
    size_t bytes = sp_alloc_bytes();
    sp_site_slice slice = slice_of(0, 0, 0, 0, 0, map);
    sp_layout *layout = make_layout(geometry, &slice, 1);

    (void)state;
    memset(map, 0, sizeof map);
    for (int32_t i = 0; i < N; i++)
        assert_int_equal(sp_layout_site_at(layout, 0)->row_map[i], N - 1 - i);
    sp_layout_release(layout);
    assert_int_equal(sp_alloc_bytes(), bytes);
    sp_geometry_release(geometry);
}

static void creation_survives_every_failed_allocation(void **state)
{
    const site_dims whole = {0, SP_MODULE_Q_PROJ, K, N};
    sp_geometry *geometry = known_geometry(0, &whole, 1);
    static const int32_t map[N] = {0};
    size_t bytes = sp_alloc_bytes();
    sp_site_slice slice = slice_of(0, 0, 0, 0, 0, map);
    const sp_layout_options options = options_for(geometry, &slice, 1);
    sp_layout *layout = NULL;

    (void)state;
    for (int64_t n = 0; layout == NULL; n++) {
        sp_error error;
        sp_status status;

        sp_alloc_fail_after(n);
        status = sp_layout_create(&options, &layout, &error);
        if (status != SP_OK) {
            assert_int_equal(status, SP_ERR_MEMORY);
            assert_int_equal(sp_alloc_bytes(), bytes);
        }
    }
    sp_alloc_fail_after(-1);
    sp_layout_release(layout);
    sp_geometry_release(geometry);
}

/* ---- fingerprints -------------------------------------------------------------------------- */

/* Layouts of one size that would give other images of one adapter have other fingerprints. */
static void a_slice_is_part_of_the_fingerprint(void **state)
{
    const site_dims whole = {0, SP_MODULE_Q_PROJ, K, N}, part = {0, SP_MODULE_Q_PROJ, K, 4};
    static const int32_t map[] = {1, 2, 3, 4}, other_map[] = {1, 2, 4, 3};
    sp_geometry *geometry = known_geometry(0, &whole, 1), *small = known_geometry(0, &part, 1);
    const sp_site_slice slices[] = {
        slice_of(0, 0, 4, 0, 0, NULL),     slice_of(0, 5, 9, 0, 0, NULL),
        slice_of(0, 0, 4, 0, 0, map),      slice_of(0, 0, 4, 0, 0, other_map),
        slice_of(0, 0, 4, 0, K - 1, NULL), slice_of(0, 0, 4, 1, K, NULL)};
    const sp_site_slice all = slice_of(0, 0, 9, 0, 11, NULL);
    sp_layout *layouts[7], *plain = make_layout(geometry, NULL, 0);
    sp_layout *same = make_layout(geometry, &all, 1);
    sp_digest digests[7], plain_digest = sp_layout_fingerprint(plain);
    sp_digest same_digest = sp_layout_fingerprint(same);

    (void)state;
    layouts[6] = make_layout(small, NULL, 0);
    for (int i = 0; i < 7; i++) {
        if (i < 6)
            layouts[i] = make_layout(geometry, &slices[i], 1);
        digests[i] = sp_layout_fingerprint(layouts[i]);
        for (int k = 0; k < i; k++)
            assert_memory_not_equal(&digests[i], &digests[k], sizeof digests[i]);
    }
    assert_memory_equal(&plain_digest, &same_digest, sizeof plain_digest); /* it is the whole */
    for (int i = 0; i < 7; i++)
        sp_layout_release(layouts[i]);
    sp_layout_release(same);
    sp_layout_release(plain);
    sp_geometry_release(small);
    sp_geometry_release(geometry);
}

/* ---- refusals ------------------------------------------------------------------------------ */

typedef struct refusal {
    const char *what;
    sp_site_slice slice;
    sp_status status;
    const char *code;
} refusal;

static void bad_slices_are_refused_by_name(void **state)
{
    static const int32_t beyond[] = {0, 1, 2, 3, 4, 5, 6, 7, K}, below[] = {0, -1};
    const refusal refusals[] = {
        {"no such site", slice_of(N_SITES, 0, 0, 0, 0, NULL), SP_ERR_ARGUMENT, "bad-slice"},
        {"a negative site", slice_of(-1, 0, 0, 0, 0, NULL), SP_ERR_ARGUMENT, "bad-slice"},
        {"the site before", slice_of(Q, 0, 0, 0, 0, NULL), SP_ERR_ARGUMENT, "bad-slice"},
        {"no rows", slice_of(O, 3, 3, 0, 0, NULL), SP_ERR_ARGUMENT, "bad-slice"},
        {"rows backwards", slice_of(O, 3, 2, 0, 0, NULL), SP_ERR_ARGUMENT, "bad-slice"},
        {"rows beyond", slice_of(O, 3, K + 1, 0, 0, NULL), SP_ERR_ARGUMENT, "bad-slice"},
        {"rows below", slice_of(O, -1, 2, 0, 0, NULL), SP_ERR_ARGUMENT, "bad-slice"},
        {"no columns", slice_of(O, 0, 0, 4, 4, NULL), SP_ERR_ARGUMENT, "bad-slice"},
        {"columns beyond", slice_of(O, 0, 0, 0, N + 1, NULL), SP_ERR_ARGUMENT, "bad-slice"},
        {"columns below", slice_of(O, 0, 0, INT32_MIN, 2, NULL), SP_ERR_ARGUMENT, "bad-slice"},
        {"a row beyond", slice_of(O, 0, 9, 0, 0, beyond), SP_ERR_ARGUMENT, "bad-slice"},
        {"a row below", slice_of(O, 0, 2, 0, 0, below), SP_ERR_ARGUMENT, "bad-slice"},
    };
    sp_geometry *geometry = known_geometry(0, dims, N_SITES);

    (void)state;
    for (size_t i = 0; i < sizeof refusals / sizeof refusals[0]; i++) {
        const sp_site_slice slices[] = {slice_of(Q, 0, 9, 0, 0, NULL), refusals[i].slice};
        sp_layout_options options = options_for(geometry, slices, 2);
        sp_layout *layout = NULL;
        sp_error error = {.code = ""};
        sp_status status;

        status = sp_layout_create(&options, &layout, &error);
        if (status != refusals[i].status || strcmp(error.code, refusals[i].code) != 0)
            fail_msg("%s: %s, %s", refusals[i].what, sp_status_name(status), error.code);
        assert_int_equal(error.position, 1);
        assert_null(layout);
        assert_int_equal(sp_layout_measure(&options, NULL, NULL, NULL), refusals[i].status);
    }
    sp_geometry_release(geometry);
}

static void what_cannot_be_cut_is_refused_by_name(void **state)
{
    sp_geometry *geometry = known_geometry(0, dims, N_SITES);
    sp_site_slice slice = slice_of(0, 0, 1, 0, 0, NULL);
    sp_layout_options options = options_for(geometry, &slice, 1);
    sp_layout *layout = NULL;
    sp_error error;

    (void)state;
    assert_int_equal(sp_layout_create(&options, &layout, &error), SP_ERR_ARGUMENT);
    assert_string_equal(error.code, "module-not-in-pool"); /* linear sites only, by default */
    options.modules = sp_geometry_modules(geometry);
    for (slice.site = 0; slice.site < Q; slice.site++) {
        assert_int_equal(sp_layout_create(&options, &layout, &error), SP_ERR_UNSUPPORTED);
        assert_string_equal(error.code, "slice-unsupported");
    }
    options.slices = NULL;
    assert_int_equal(sp_layout_create(&options, &layout, &error), SP_ERR_ARGUMENT);
    assert_string_equal(error.subject, "slices");
    options.slices = &slice;
    slice.struct_bytes = 0;
    assert_int_equal(sp_layout_create(&options, &layout, &error), SP_ERR_ARGUMENT);
    assert_string_equal(error.subject, "sp_site_slice");
    assert_null(layout);
    sp_geometry_release(geometry);
}

/* The adapter is held against the whole site, not against the slice. */
static void an_adapter_of_the_slices_shape_is_refused(void **state)
{
    const site_dims whole = {0, SP_MODULE_Q_PROJ, K, N}, part = {0, SP_MODULE_Q_PROJ, K, 4};
    sp_geometry *geometry = known_geometry(0, &whole, 1);
    const sp_site_slice slice = slice_of(0, 0, 4, 0, 0, NULL);
    sp_layout *layout = make_layout(geometry, &slice, 1);
    hand_adapter *adapter = hand_adapter_create(7);
    sp_test_random random = {3};
    sp_image *image = NULL;
    sp_error error;

    (void)state;
    hand_adapter_add(adapter, &part, RANK, 1.0f, SP_DTYPE_F32, &random);
    assert_int_equal(
        sp_layout_pack_sites(layout, adapter->sites, 1, &adapter->digest, NULL, &image, &error),
        SP_ERR_MISMATCH);
    assert_string_equal(error.code, "shape-mismatch");
    assert_null(image);
    hand_adapter_destroy(adapter);
    sp_layout_release(layout);
    sp_geometry_release(geometry);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_part_has_its_own_dimensions),
        cmocka_unit_test(an_image_is_cut_from_the_whole_adapter),
        cmocka_unit_test(an_overflow_is_placed_in_the_whole),
        cmocka_unit_test(a_row_map_is_the_layouts_own),
        cmocka_unit_test(creation_survives_every_failed_allocation),
        cmocka_unit_test(a_slice_is_part_of_the_fingerprint),
        cmocka_unit_test(bad_slices_are_refused_by_name),
        cmocka_unit_test(what_cannot_be_cut_is_refused_by_name),
        cmocka_unit_test(an_adapter_of_the_slices_shape_is_refused),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
