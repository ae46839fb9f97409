/*
 * Packing: every byte of an image computed by hand or from the sources, conversions to nearest
 * even, what is refused and with which code, and memory.
 */
#include "support/hand.h"
#include "support/test.h"

#include "base/alloc.h"
#include "base/half.h"
#include "base/hash.h"
#include "pool/image.h"

#include <malloc.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static const site_dims sites[] = {
    {0, SP_MODULE_Q_PROJ, 3, 2},
    {0, SP_MODULE_K_PROJ, 3, 1},
    {1, SP_MODULE_Q_PROJ, 3, 2},
};

static hand_pool make_pool(int32_t rank, sp_dtype dtype)
{
    return hand_pool_create(sites, 3, rank, dtype, 2);
}

static sp_status pack(const hand_pool *pool, const hand_adapter *adapter, sp_image **out_image,
                      sp_error *error)
{
    return sp_layout_pack_sites(pool->layout, adapter->sites, (size_t)adapter->n_sites,
                                &adapter->digest, NULL, out_image, error);
}

/* ---- bytes --------------------------------------------------------------------------------- */

static void every_byte_is_where_it_belongs(void **state)
{
    const float a[] = {1, 2, 3, 4, 5, 6}, b[] = {10, 20, 30, 40}; /* A [2, 3], B [2, 2] */
    hand_pool pool = make_pool(5, SP_DTYPE_F32);
    hand_adapter *adapter = hand_adapter_create(42);
    size_t bytes = sp_layout_slot_bytes(pool.layout);
    float *want = calloc(1, bytes);
    sp_image *image;

    (void)state;
    assert_non_null(want);
    hand_adapter_add_copy(adapter, &sites[2], 2, 1.5f, SP_DTYPE_F32, a, b);
    image = hand_pack(&pool, adapter);
    /* R = 8. A takes 8 × 3 × 4 = 96 → 256; B of q 2 × 8 × 4 = 64 → 256; B of k likewise. */
    assert_int_equal(bytes, 6 * 256);
    memcpy(want + 4 * 64, a, sizeof a);
    want[5 * 64 + 0] = 10;
    want[5 * 64 + 1] = 20;
    want[5 * 64 + 8] = 30; /* B's rows are R apart */
    want[5 * 64 + 9] = 40;
    assert_memory_equal(image->data, want, bytes);
    assert_int_equal((uintptr_t)image->data % 256, 0);
    assert_memory_equal(image->ranks, ((int32_t[]){0, 0, 2}), 3 * sizeof(int32_t));
    assert_memory_equal(image->scales, ((float[]){0, 0, 1.5f}), 3 * sizeof(float));
    assert_memory_equal(&image->digest, &adapter->digest, sizeof image->digest);
    assert_int_equal(image->checksum, sp_xxh3(want, bytes));
    assert_int_equal(image->bytes, bytes + 3 * 8 + sizeof(sp_image));
    sp_image_destroy(image);
    hand_adapter_destroy(adapter);
    hand_pool_destroy(&pool);
    free(want);
}

static void an_adapter_without_sites_is_all_zero(void **state)
{
    hand_pool pool = make_pool(8, SP_DTYPE_BF16);
    hand_adapter *adapter = hand_adapter_create(1);
    sp_image *image = hand_pack(&pool, adapter);
    const char *bytes = image->data;

    (void)state;
    for (size_t i = 0; i < sp_layout_slot_bytes(pool.layout); i++)
        assert_int_equal(bytes[i], 0);
    assert_memory_equal(image->ranks, ((int32_t[]){0, 0, 0}), 3 * sizeof(int32_t));
    sp_image_destroy(image);
    hand_adapter_destroy(adapter);
    hand_pool_destroy(&pool);
}

/* ---- conversion ---------------------------------------------------------------------------- */

typedef struct conversion {
    uint32_t from, to; /* bit patterns */
} conversion;

/* Packs k_proj with A = the three values as rank 1 and looks at A's first elements. */
static void expect_conversions(sp_dtype from, sp_dtype to, const conversion values[3])
{
    hand_pool pool = make_pool(8, to);
    hand_adapter *adapter = hand_adapter_create(1);
    uint32_t words[3];
    uint16_t halves[3];
    const uint16_t zero_halves[1] = {0};
    const float zero = 0;
    sp_image *image;

    for (int i = 0; i < 3; i++) {
        words[i] = values[i].from;
        halves[i] = (uint16_t)values[i].from;
    }
    hand_adapter_add_copy(adapter, &sites[1], 1, 1.0f, from,
                          from == SP_DTYPE_F32 ? (void *)words : (void *)halves,
                          from == SP_DTYPE_F32 ? (const void *)&zero : (const void *)zero_halves);
    image = hand_pack(&pool, adapter);
    for (int i = 0; i < 3; i++) {
        const sp_layout_site *site = sp_layout_site_at(pool.layout, 1);
        const char *data = (const char *)image->data + site->a_offset_bytes;
        uint32_t got =
            to == SP_DTYPE_F32 ? ((const uint32_t *)data)[i] : ((const uint16_t *)data)[i];

        assert_int_equal(got, values[i].to);
    }
    sp_image_destroy(image);
    hand_adapter_destroy(adapter);
    hand_pool_destroy(&pool);
}

static void conversion_is_to_nearest_even(void **state)
{
    (void)state;
    /* F32 → BF16 drops 16 bits: a tie to even below and above, and just over a tie. */
    expect_conversions(
        SP_DTYPE_F32, SP_DTYPE_BF16,
        (conversion[]){{0x3f808000, 0x3f80}, {0x3f818000, 0x3f82}, {0xbf808001, 0xbf81}});
    /* F16 → BF16: 1 + 2^-7 fits; 1 + 2^-8 is a tie (to 1); 1 + 3·2^-8 a tie (to 1 + 2^-6). */
    expect_conversions(SP_DTYPE_F16, SP_DTYPE_BF16,
                       (conversion[]){{0x3c08, 0x3f81}, {0x3c04, 0x3f80}, {0x3c0c, 0x3f82}});
    /* The smallest F16, 2^-24, is a normal BF16 and F32. */
    expect_conversions(SP_DTYPE_F16, SP_DTYPE_BF16,
                       (conversion[]){{0x0001, 0x3380}, {0x8001, 0xb380}, {0x8000, 0x8000}});
    expect_conversions(SP_DTYPE_F16, SP_DTYPE_F32,
                       (conversion[]){{0x3c01, 0x3f802000}, {0xfbff, 0xc77fe000}, {1, 0x33800000}});
    /* F32 → F16: 65519.996 is the last below infinity; 2^-25 is a tie to 0; 1.5·2^-25 rounds up. */
    expect_conversions(SP_DTYPE_F32, SP_DTYPE_F16,
                       (conversion[]){{0x477fefff, 0x7bff}, {0x33000000, 0}, {0x33400000, 1}});
    expect_conversions(SP_DTYPE_BF16, SP_DTYPE_F16,
                       (conversion[]){{0x3f81, 0x3c08}, {0xc000, 0xc000}, {0x3380, 0x0001}});
    /* The pool's own type is copied verbatim, the sign of zero included. */
    expect_conversions(SP_DTYPE_BF16, SP_DTYPE_BF16,
                       (conversion[]){{0x8000, 0x8000}, {0x7f7f, 0x7f7f}, {0x0001, 0x0001}});
    expect_conversions(SP_DTYPE_F32, SP_DTYPE_F32,
                       (conversion[]){{0x80000000, 0x80000000}, {1, 1}, {0x7f7fffff, 0x7f7fffff}});
}

/* Bits of one element as half.h rounds them one by one. */
static uint32_t converted(sp_dtype to, sp_dtype from, uint32_t bits)
{
    float value = from == SP_DTYPE_F32    ? sp_f32_from_bits(bits)
                  : from == SP_DTYPE_BF16 ? sp_bf16_to_f32((uint16_t)bits)
                                          : sp_f16_to_f32((uint16_t)bits);

    if (to == from)
        return bits;
    return to == SP_DTYPE_F32    ? sp_f32_bits(value)
           : to == SP_DTYPE_BF16 ? sp_f32_to_bf16(value)
                                 : sp_f32_to_f16(value);
}

/* Packs k_in elements as a row of A, by one thread and by two, and holds each against half.h. */
static void expect_row(sp_exec *exec, sp_dtype from, sp_dtype to, const uint32_t *bits, int32_t k)
{
    const site_dims dims = {0, SP_MODULE_O_PROJ, k, 1};
    hand_pool pool = hand_pool_create(&dims, 1, 8, to, 1);
    hand_adapter *adapter = hand_adapter_create(1);
    void *row = malloc(4 * (size_t)k);
    const uint32_t zero = 0;
    sp_image *image;
    sp_error error;

    assert_non_null(row);
    for (int32_t i = 0; i < k; i++) {
        if (from == SP_DTYPE_F32)
            ((uint32_t *)row)[i] = bits[i];
        else
            ((uint16_t *)row)[i] = (uint16_t)bits[i];
    }
    hand_adapter_add_copy(adapter, &dims, 1, 1.0f, from, row, &zero);
    assert_ok(sp_layout_pack_sites(pool.layout, adapter->sites, 1, &adapter->digest, exec, &image,
                                   &error),
              &error);
    for (int32_t i = 0; i < k; i++) {
        uint32_t got = to == SP_DTYPE_F32 ? ((const uint32_t *)image->data)[i]
                                          : ((const uint16_t *)image->data)[i];

        if (got != converted(to, from, bits[i]))
            fail_msg("%s to %s: %08x gives %08x", sp_dtype_name(from), sp_dtype_name(to), bits[i],
                     got);
    }
    sp_image_destroy(image);
    free(row);
    hand_adapter_destroy(adapter);
    hand_pool_destroy(&pool);
}

/* Would be refused: a finite value that the pool's type cannot hold. */
static bool overflows(sp_dtype to, sp_dtype from, uint32_t bits)
{
    uint32_t given = converted(SP_DTYPE_F32, from, bits);
    uint32_t got = converted(SP_DTYPE_F32, to, converted(to, from, bits));

    return isfinite(sp_f32_from_bits(given)) && !isfinite(sp_f32_from_bits(got));
}

/* Every pattern of both 16-bit types, NaN and infinities among them, to every type. */
static void every_half(void **state)
{
    static const sp_dtype types[] = {SP_DTYPE_BF16, SP_DTYPE_F16, SP_DTYPE_F32};
    static uint32_t bits[65536];

    (void)state;
    for (int from = 0; from < 2; from++) {
        for (int to = 0; to < 3; to++) {
            int32_t n = 0;

            for (uint32_t b = 0; b < 65536; b++)
                if (!overflows(types[to], types[from], b))
                    bits[n++] = b;
            assert_true(n > 36000);
            expect_row(NULL, types[from], types[to], bits, n);
        }
    }
}

/* FP32 around each border of the 16-bit types, and random bits of every kind. */
static void floats_at_every_border(void **state)
{
    static const uint32_t borders[] = {0x00000000, 0x00000001, 0x007fffff, 0x00800000, 0x33000000,
                                       0x33000001, 0x387fc000, 0x38800000, 0x477fefff, 0x47800000,
                                       0x7f7f7fff, 0x7f800000, 0x7f800001, 0x7fbfffff, 0x7fc00000,
                                       0x7fffffff, 0x3f808000, 0x3f818000, 0x3f807fff, 0x3f808001};
    static const sp_dtype types[] = {SP_DTYPE_BF16, SP_DTYPE_F16, SP_DTYPE_F32};
    enum { N = 100000 };
    static uint32_t bits[N];
    sp_test_random random = {17};
    sp_exec *exec = hand_exec(2);

    (void)state;
    for (int to = 0; to < 3; to++) {
        int32_t n = 0;

        while (n < N) {
            uint32_t border = borders[sp_test_below(&random, sizeof borders / sizeof *borders)];
            uint32_t b = (uint32_t)sp_test_next(&random);

            if (n % 2)
                b = (border + sp_test_below(&random, 5) - 2) ^ (b & 0x80000000u);
            if (!overflows(types[to], SP_DTYPE_F32, b))
                bits[n++] = b;
        }
        expect_row(exec, SP_DTYPE_F32, types[to], bits, N);
    }
    sp_exec_destroy(exec);
}

/* One element too large, at every place around the borders of what is converted at a time. */
static void overflow_is_found_wherever_it_is(void **state)
{
    enum { K = 8192 + 300 };
    const site_dims dims = {0, SP_MODULE_O_PROJ, K, 1};
    hand_pool pool = hand_pool_create(&dims, 1, 8, SP_DTYPE_BF16, 1);
    hand_adapter *adapter = hand_adapter_create(1);
    float *row = calloc(K, sizeof *row);
    const float zero = 0;
    sp_adapter_site *site;

    (void)state;
    assert_non_null(row);
    site = hand_adapter_add_copy(adapter, &dims, 1, 1.0f, SP_DTYPE_F32, row, &zero);
    for (int32_t at = 0; at < K; at += at < 300 || at >= 8150 ? 1 : 97) {
        sp_image *image = NULL;
        sp_error error;

        ((float *)(uintptr_t)site->a.data)[at] = at % 2 ? -3.4e38f : 3.4e38f;
        ((float *)(uintptr_t)site->a.data)[K - 1] = 3.4e38f; /* the first one counts */
        assert_int_equal(pack(&pool, adapter, &image, &error), SP_ERR_REFUSED);
        assert_string_equal(error.code, "non-finite");
        assert_int_equal(error.position, at);
        ((float *)(uintptr_t)site->a.data)[at] = 0;
    }
    free(row);
    hand_adapter_destroy(adapter);
    hand_pool_destroy(&pool);
}

/* The first place that overflows is named, and the bytes are the same, whoever helps. */
static void threads_change_nothing(void **state)
{
    hand_pool pool = make_pool(8, SP_DTYPE_BF16);
    hand_adapter *adapter = hand_adapter_create(1);
    sp_test_random random = {3};
    sp_exec *exec = hand_exec(3);
    sp_image *alone = NULL, *helped = NULL;
    sp_error error;

    (void)state;
    for (int i = 0; i < 3; i++)
        hand_adapter_add(adapter, &sites[i], 4, 1.0f, SP_DTYPE_F32, &random);
    for (int round = 0; round < 50; round++) {
        assert_ok(pack(&pool, adapter, &alone, &error), &error);
        assert_ok(sp_layout_pack_sites(pool.layout, adapter->sites, 3, &adapter->digest, exec,
                                       &helped, &error),
                  &error);
        assert_memory_equal(alone->data, helped->data, sp_layout_slot_bytes(pool.layout));
        sp_image_destroy(alone);
        sp_image_destroy(helped);
    }
    for (int i = 2; i >= 0; i--) {
        ((float *)(uintptr_t)adapter->sites[i].b.data)[i] = 3.4e38f;
        for (int round = 0; round < 50; round++) {
            assert_int_equal(sp_layout_pack_sites(pool.layout, adapter->sites, 3, &adapter->digest,
                                                  exec, &helped, &error),
                             SP_ERR_REFUSED);
            assert_int_equal(error.position, i);
        }
    }
    sp_exec_destroy(exec);
    hand_adapter_destroy(adapter);
    hand_pool_destroy(&pool);
}

/* Long rows cross the conversion's staging buffer; strided and unaligned views are read right. */
static void long_strided_and_unaligned_rows(void **state)
{
    enum { K = 777, N = 5, RANK = 2 };
    const site_dims dims = {0, SP_MODULE_O_PROJ, K, N};
    hand_pool pool = hand_pool_create(&dims, 1, 8, SP_DTYPE_BF16, 1);
    hand_adapter *plain = hand_adapter_create(1), *view = hand_adapter_create(1);
    sp_test_random random = {4};
    const sp_adapter_site *from = hand_adapter_add(plain, &dims, RANK, 1.0f, SP_DTYPE_F32, &random);
    sp_adapter_site *to = hand_adapter_add(view, &dims, RANK, 1.0f, SP_DTYPE_F32, &random);
    char *a = malloc(4 * (size_t)K * RANK + 1), *b = malloc(4 * (size_t)N * RANK * 3 + 1);
    sp_factor own_a = to->a, own_b = to->b;
    sp_image *images[2];

    (void)state;
    assert_non_null(a);
    assert_non_null(b);
    for (int32_t k = 0; k < K; k++) /* A stored transposed, from an odd address */
        for (int32_t j = 0; j < RANK; j++)
            memcpy(a + 1 + 4 * (k * RANK + j), (const float *)from->a.data + j * K + k, 4);
    for (int32_t n = 0; n < N; n++) /* every third column of a wider B */
        for (int32_t j = 0; j < RANK; j++)
            memcpy(b + 1 + 4 * (n * RANK * 3 + j * 3), (const float *)from->b.data + n * RANK + j,
                   4);
    to->a = (sp_factor){a + 1, SP_DTYPE_F32, RANK, K, 1, RANK};
    to->b = (sp_factor){b + 1, SP_DTYPE_F32, N, RANK, RANK * 3, 3};
    images[0] = hand_pack(&pool, plain);
    images[1] = hand_pack(&pool, view);
    assert_memory_equal(images[0]->data, images[1]->data, sp_layout_slot_bytes(pool.layout));
    assert_int_equal(images[0]->checksum, images[1]->checksum);
    for (int32_t k = 0; k < K; k += 100)
        assert_true(fabs(hand_load(SP_DTYPE_BF16, images[0]->data, K + k) -
                         (double)((const float *)from->a.data)[K + k]) <= 0x1p-9);
    sp_image_destroy(images[0]);
    sp_image_destroy(images[1]);
    free(a);
    free(b);
    to->a = own_a;
    to->b = own_b;
    hand_adapter_destroy(plain);
    hand_adapter_destroy(view);
    hand_pool_destroy(&pool);
}

/* ---- refusals ------------------------------------------------------------------------------ */

static void refuse(const hand_pool *pool, const hand_adapter *adapter, sp_status status,
                   const char *code, const char *subject)
{
    size_t before = sp_alloc_bytes();
    sp_image *image = NULL;
    sp_error error = {.status = SP_OK, .code = ""};

    assert_int_equal(pack(pool, adapter, &image, &error), status);
    assert_int_equal(error.status, status);
    assert_string_equal(error.code, code);
    assert_string_equal(error.subject, subject);
    assert_null(image);
    assert_int_equal(sp_alloc_bytes(), before);
}

/* The site at another place, whose path is kept in `path`. */
static void move(sp_adapter_site *site, char path[KNOWN_PATH_BYTES], int32_t layer,
                 sp_module module, int32_t expert)
{
    known_path(layer, module, expert, path);
    site->path = path;
    site->module = sp_module_name(module);
    site->kind = sp_known_modules[module].kind;
    site->layer = layer;
    site->expert = expert;
}

static void sites_that_do_not_fit_are_refused_by_name(void **state)
{
    hand_pool pool = make_pool(3, SP_DTYPE_F32); /* R = 8 */
    hand_adapter *adapter = hand_adapter_create(1);
    sp_test_random random = {1};
    sp_adapter_site good, *site;
    char path[KNOWN_PATH_BYTES];

    (void)state;
    site = hand_adapter_add(adapter, &sites[0], 8, 1.0f, SP_DTYPE_F32, &random);
    good = *site;
    move(site, path, 0, SP_MODULE_O_PROJ, -1);
    refuse(&pool, adapter, SP_ERR_REFUSED, "module-not-in-pool", "self_attn.o_proj");
    move(site, path, 0, SP_MODULE_ROUTER, -1);
    refuse(&pool, adapter, SP_ERR_MISMATCH, "expert-on-dense-model", "mlp.gate");
    move(site, path, 0, SP_MODULE_EXPERT_GATE_PROJ, 3);
    refuse(&pool, adapter, SP_ERR_MISMATCH, "expert-on-dense-model", "mlp.experts.gate_proj");
    *site = good;
    move(site, path, 1, SP_MODULE_K_PROJ, -1); /* layer 0 has one, layer 1 has none */
    refuse(&pool, adapter, SP_ERR_MISMATCH, "wrong-layer-kind", "self_attn.k_proj");
    *site = good;
    site->rank = site->a.rows = site->b.cols = 9;
    refuse(&pool, adapter, SP_ERR_TOO_LARGE, "rank-exceeds-pool", "self_attn.q_proj");
    *site = good;
    site->a.cols = 4;
    refuse(&pool, adapter, SP_ERR_MISMATCH, "shape-mismatch", "self_attn.q_proj");
    *site = good;
    site->b.rows = 3;
    refuse(&pool, adapter, SP_ERR_MISMATCH, "shape-mismatch", "self_attn.q_proj");
    *site = good;
    site->rank = 7;
    refuse(&pool, adapter, SP_ERR_MISMATCH, "shape-mismatch", "self_attn.q_proj");
    *site = good;
    site->rank = site->a.rows = site->b.cols = 0;
    refuse(&pool, adapter, SP_ERR_MISMATCH, "shape-mismatch", "self_attn.q_proj");
    *site = good;
    site->scale = NAN;
    refuse(&pool, adapter, SP_ERR_REFUSED, "non-finite", "self_attn.q_proj");
    *site = good;
    hand_adapter_add(adapter, &sites[0], 1, 1.0f, SP_DTYPE_F32, &random);
    refuse(&pool, adapter, SP_ERR_REFUSED, "duplicate-tensor", "self_attn.q_proj");
    hand_adapter_destroy(adapter);
    hand_pool_destroy(&pool);
}

static void a_value_that_the_pool_cannot_hold_is_refused(void **state)
{
    const float huge[] = {1, 2, 3.4e38f}, large[] = {1, 65520.0f, 1}, b[] = {1};
    hand_pool bf16 = make_pool(8, SP_DTYPE_BF16), f16 = make_pool(8, SP_DTYPE_F16);
    hand_adapter *adapter = hand_adapter_create(1);
    sp_image *image = NULL;
    sp_error error;

    (void)state;
    hand_adapter_add_copy(adapter, &sites[1], 1, 1.0f, SP_DTYPE_F32, huge, b);
    refuse(&bf16, adapter, SP_ERR_REFUSED, "non-finite", "self_attn.k_proj");
    assert_int_equal(pack(&bf16, adapter, &image, &error), SP_ERR_REFUSED);
    assert_int_equal(error.position, 2);
    hand_adapter_destroy(adapter);
    adapter = hand_adapter_create(1);
    hand_adapter_add_copy(adapter, &sites[1], 1, 1.0f, SP_DTYPE_F32, large, b);
    refuse(&f16, adapter, SP_ERR_REFUSED, "non-finite", "self_attn.k_proj");
    assert_int_equal(pack(&bf16, adapter, &image, &error), SP_OK);
    sp_image_destroy(image);
    sp_image_destroy(NULL);
    hand_adapter_destroy(adapter);
    hand_pool_destroy(&bf16);
    hand_pool_destroy(&f16);
}

static void every_failed_allocation_is_survived(void **state)
{
    hand_pool pool = make_pool(8, SP_DTYPE_BF16);
    hand_adapter *adapter = hand_adapter_create(1);
    sp_test_random random = {1};
    size_t before = sp_alloc_bytes();
    sp_image *image = NULL;
    sp_error error;
    int64_t n = 0;

    (void)state;
    hand_adapter_add(adapter, &sites[0], 8, 1.0f, SP_DTYPE_F32, &random);
    for (;; n++) {
        sp_alloc_fail_after(n);
        if (pack(&pool, adapter, &image, &error) == SP_OK)
            break;
        assert_true(sp_alloc_failed());
        assert_int_equal(error.status, SP_ERR_MEMORY);
        assert_null(image);
        assert_int_equal(sp_alloc_bytes(), before);
    }
    sp_alloc_fail_after(-1);
    assert_int_equal(n, 5);
    sp_image_destroy(image);
    assert_int_equal(sp_alloc_bytes(), before);
    hand_adapter_destroy(adapter);
    hand_pool_destroy(&pool);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_byte_is_where_it_belongs),
        cmocka_unit_test(an_adapter_without_sites_is_all_zero),
        cmocka_unit_test(conversion_is_to_nearest_even),
        cmocka_unit_test(every_half),
        cmocka_unit_test(floats_at_every_border),
        cmocka_unit_test(overflow_is_found_wherever_it_is),
        cmocka_unit_test(threads_change_nothing),
        cmocka_unit_test(long_strided_and_unaligned_rows),
        cmocka_unit_test(sites_that_do_not_fit_are_refused_by_name),
        cmocka_unit_test(a_value_that_the_pool_cannot_hold_is_refused),
        cmocka_unit_test(every_failed_allocation_is_survived),
    };

    (void)mallopt(M_PERTURB, 0x5a); /* what packing does not write shows */
    return cmocka_run_group_tests(tests, NULL, NULL);
}
