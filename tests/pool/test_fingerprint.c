/*
 * test_fingerprint.c: which layouts are one, and that a pool takes the images of its own only.
 */
#include "base/hash.h"
#include "support/hand.h"

#include <string.h>

static const site_dims dims[] = {
    {0, SP_MODULE_Q_PROJ, 6, 5},
    {1, SP_MODULE_Q_PROJ, 6, 5},
};
/* A slot of as many bytes as the above. */
static const site_dims turned[] = {
    {0, SP_MODULE_Q_PROJ, 5, 6},
    {1, SP_MODULE_Q_PROJ, 5, 6},
};

static sp_digest fingerprint_of(const site_dims *sites, size_t n, int32_t rank, sp_dtype dtype,
                                const sp_served_table *embed)
{
    sp_layout_options options;
    sp_geometry *geometry;
    sp_layout *layout;
    sp_digest fingerprint;
    sp_error error;

    geometry = known_geometry(0, sites, n);
    sp_layout_options_default(&options, sizeof options);
    options.geometry = geometry;
    options.rank = rank;
    options.dtype = dtype;
    options.served_embed = embed;
    assert_ok(sp_layout_create(&options, &layout, &error), &error);
    fingerprint = sp_layout_fingerprint(layout);
    sp_layout_release(layout);
    sp_geometry_release(geometry);
    return fingerprint;
}

static bool same(const sp_digest *a, const sp_digest *b)
{
    return memcmp(a, b, sizeof *a) == 0;
}

/*
 * hashlib.sha256 over "sidepath layout 1\0", 8, "bf16\0", 1024, 2, and for each site its path
 * "model.layers.N.self_attn.q_proj\0", 6, 5 and its offsets 0, 256 and 512, 768; then two tables
 * that are absent.
 */
static void it_is_the_hash_of_its_record(void **state)
{
    char text[2 * SP_DIGEST_BYTES + 1];
    sp_digest fingerprint = fingerprint_of(dims, 2, 8, SP_DTYPE_BF16, NULL);

    (void)state;
    sp_hex(fingerprint.bytes, sizeof fingerprint.bytes, text);
    assert_string_equal(text, "192098b544a6e090725e6ff8dbc1abb5da23b8832e9845c352cf9af07a5c66ba");
}

static void what_changes_an_image_changes_it(void **state)
{
    const uint16_t data[1] = {0};
    const sp_served_table served = {sizeof served, data, SP_DTYPE_BF16, 7, 6, false};
    const sp_digest base = fingerprint_of(dims, 2, 8, SP_DTYPE_BF16, NULL);
    const sp_digest rank_5 = fingerprint_of(dims, 2, 5, SP_DTYPE_BF16, NULL);
    const sp_digest others[] = {
        fingerprint_of(dims, 1, 8, SP_DTYPE_BF16, NULL),
        fingerprint_of(turned, 2, 8, SP_DTYPE_BF16, NULL),
        fingerprint_of(dims, 2, 16, SP_DTYPE_BF16, NULL),
        fingerprint_of(dims, 2, 8, SP_DTYPE_F16, NULL),
        fingerprint_of(dims, 2, 8, SP_DTYPE_BF16, &served),
    };

    (void)state;
    assert_true(same(&base, &rank_5)); /* both have matrices of rank 8 */
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        assert_false(same(&base, &others[i]));
        for (size_t k = 0; k < i; k++)
            assert_false(same(&others[k], &others[i]));
    }
}

/* Of the same size to the byte, and yet another layout's. */
static void a_pool_takes_images_of_its_own_layout_only(void **state)
{
    hand_pool pool = hand_pool_create(dims, 2, 8, SP_DTYPE_BF16, 1);
    hand_pool other = hand_pool_create(turned, 2, 8, SP_DTYPE_BF16, 1);
    hand_adapter *adapter = hand_adapter_create(1);
    sp_image *image = hand_pack(&other, adapter), *own = hand_pack(&pool, adapter);
    sp_digest fingerprint = sp_image_fingerprint(image), digest = sp_image_digest(image);
    sp_digest of_layout = sp_layout_fingerprint(other.layout);
    sp_error error;
    int32_t slot;

    (void)state;
    assert_true(same(&fingerprint, &of_layout));
    assert_true(same(&digest, &adapter->digest));
    assert_int_equal(sp_image_bytes(image), sp_image_bytes(own));
    assert_int_equal(sp_image_overlay_bytes(image), 0);
    assert_true(sp_image_checksum(image) == sp_image_checksum(own)); /* both are all zero */
    assert_ok(sp_pool_load_begin(pool.pool, &slot, NULL), NULL);
    assert_int_equal(sp_pool_load_write(pool.pool, slot, image, &error), SP_ERR_ARGUMENT);
    assert_string_equal(error.code, "other-layout");
    assert_ok(sp_pool_load_write(pool.pool, slot, own, &error), &error);
    assert_ok(sp_pool_load_abort(pool.pool, slot, NULL), NULL);
    sp_image_destroy(own);
    sp_image_destroy(image);
    hand_adapter_destroy(adapter);
    hand_pool_destroy(&other);
    hand_pool_destroy(&pool);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(it_is_the_hash_of_its_record),
        cmocka_unit_test(what_changes_an_image_changes_it),
        cmocka_unit_test(a_pool_takes_images_of_its_own_layout_only),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
