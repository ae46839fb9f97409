/*
 * Open slots: bytes that were packed elsewhere go straight into a slot's memory. Nothing of them is
 * seen before the commit; what is not what it says it is, is refused and can be tried again; an
 * abort leaves the slot as free as it was; and no image outlives its opening.
 */
#include "base/alloc.h"
#include "base/hash.h"
#include "pool/image.h"
#include "support/hand.h"
#include "support/test.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { SLOTS = 3, SITES = 2 };

static const site_dims dims[SITES] = {
    {0, SP_MODULE_Q_PROJ, 6, 5},
    {1, SP_MODULE_Q_PROJ, 6, 5},
};

typedef struct fixture {
    hand_pool hand;
    sp_pool *pool;
    size_t bytes;
    sp_image *image; /* as it was packed elsewhere */
    sp_digest seal;
    sp_packed_image packed;
} fixture;

static int setup(void **state)
{
    static fixture f;
    sp_test_random random = {7};
    hand_adapter *adapter = hand_adapter_create(100);
    sp_error error;

    f.hand = hand_pool_create(dims, SITES, 8, SP_DTYPE_BF16, SLOTS);
    f.pool = f.hand.pool;
    f.bytes = sp_layout_slot_bytes(f.hand.layout);
    for (int32_t site = 0; site < SITES; site++)
        hand_adapter_add(adapter, &dims[site], 3, 0.5f, SP_DTYPE_BF16, &random);
    f.image = hand_pack(&f.hand, adapter);
    hand_adapter_destroy(adapter);
    f.packed = (sp_packed_image){.struct_bytes = sizeof f.packed,
                                 .digest = sp_image_digest(f.image),
                                 .fingerprint = sp_image_fingerprint(f.image),
                                 .checksum = sp_image_checksum(f.image),
                                 .ranks = f.image->ranks,
                                 .scales = f.image->scales,
                                 .n_sites = SITES,
                                 .rank = 3,
                                 .pairs = SITES,
                                 .seal = &f.seal};
    assert_ok(sp_image_bind(f.hand.layout,
                            &(sp_image_label){f.image->ranks, f.image->scales, f.packed.digest, 0},
                            f.image->data, NULL, &f.seal, &error),
              &error);
    *state = &f;
    return 0;
}

static int teardown(void **state)
{
    fixture *f = *state;

    sp_image_destroy(f->image);
    hand_pool_destroy(&f->hand);
    return 0;
}

/* A LOADING slot, opened. */
static int32_t open_slot(const fixture *f, sp_image **out_image, void **out_memory)
{
    int32_t slot = -1;
    sp_error error;

    assert_ok(sp_pool_load_begin(f->pool, &slot, &error), &error);
    assert_ok(sp_pool_load_open(f->pool, slot, out_image, out_memory, &error), &error);
    return slot;
}

static void expect_invisible(const fixture *f, int32_t slot)
{
    for (int32_t i = 0; i < SITES; i++) {
        const sp_pool_tables *tables = sp_pool_tables_at(f->pool, i);

        assert_null(tables->a[slot]);
        assert_int_equal(tables->rank[slot], 0);
    }
}

static void bytes_land_and_are_seen_after_the_commit(void **state)
{
    fixture *f = *state;
    sp_slot_handle handle = {-1, 0};
    sp_image *image;
    void *memory;
    int32_t slot = open_slot(f, &image, &memory);
    sp_slot_info info;
    sp_error error;

    assert_int_equal((uintptr_t)memory % SP_POOL_ALIGN_BYTES, 0);
    assert_true(sp_image_bytes(image) < f->bytes); /* none of its own */
    memcpy(memory, f->image->data, f->bytes);
    expect_invisible(f, slot);
    assert_int_equal(sp_pool_load_commit(f->pool, slot, image, &handle, &error), SP_ERR_STATE);
    assert_ok(sp_pool_load_seal(f->pool, slot, image, &f->packed, &error), &error);
    expect_invisible(f, slot);
    assert_ok(sp_pool_load_commit(f->pool, slot, image, &handle, &error), &error);
    sp_image_destroy(image); /* the slot's bytes stay */
    assert_int_equal(handle.slot, slot);
    for (int32_t i = 0; i < SITES; i++) {
        const sp_pool_tables *tables = sp_pool_tables_at(f->pool, i);
        const sp_layout_site *site = sp_layout_site_at(f->hand.layout, i);

        assert_ptr_equal(tables->a[slot], (char *)memory + site->a_offset_bytes);
        assert_ptr_equal(tables->b[slot], (char *)memory + site->b_offset_bytes);
        assert_int_equal(tables->rank[slot], 3);
        assert_true(tables->scale[slot] == 0.5f);
    }
    assert_memory_equal(memory, f->image->data, f->bytes);
    info = hand_slot_info(f->pool, slot);
    assert_memory_equal(&info.digest, &f->packed.digest, sizeof info.digest);
    assert_ok(sp_pool_release(f->pool, handle, &error), &error);
}

/* One way of not being what it says. */
typedef struct wrong {
    int what;
    sp_status status;
    const char *code;
} wrong;

enum {
    BYTE,
    BYTE_AND_SUM,
    PAD,
    RANK,
    HUGE_RANK,
    SCALE,
    NOT_FINITE,
    DIGEST,
    LAYOUT,
    N_SITES,
    NO_LISTS,
    PAIRS,
    EXPERTS
};

static const wrong wrongs[] = {
    {BYTE, SP_ERR_REFUSED, "bad-image"},        {BYTE_AND_SUM, SP_ERR_PEER_CONTENT, "peer-content"},
    {PAD, SP_ERR_PEER_CONTENT, "peer-content"}, {RANK, SP_ERR_PEER_CONTENT, "peer-content"},
    {HUGE_RANK, SP_ERR_REFUSED, "bad-image"},   {SCALE, SP_ERR_PEER_CONTENT, "peer-content"},
    {NOT_FINITE, SP_ERR_REFUSED, "bad-image"},  {DIGEST, SP_ERR_PEER_CONTENT, "peer-content"},
    {LAYOUT, SP_ERR_REFUSED, "other-layout"},   {N_SITES, SP_ERR_REFUSED, "other-layout"},
    {NO_LISTS, SP_ERR_REFUSED, "bad-image"},    {PAIRS, SP_ERR_REFUSED, "bad-image"},
    {EXPERTS, SP_ERR_REFUSED, "bad-image"},
};

static void spoil(const fixture *f, int what, sp_packed_image *packed, char *memory, int32_t *ranks,
                  float *scales)
{
    if (what == BYTE || what == BYTE_AND_SUM)
        memory[0] ^= 1;
    if (what == PAD) /* the last bytes are zeros of the last B */
        memory[f->bytes - 1] ^= 1;
    if (what == BYTE_AND_SUM || what == PAD)
        packed->checksum = sp_xxh3(memory, f->bytes);
    ranks[0] = what == RANK ? 2 : what == HUGE_RANK ? 9 : ranks[0];
    scales[1] = what == SCALE ? 2.0f : what == NOT_FINITE ? INFINITY : scales[1];
    packed->digest.bytes[3] ^= what == DIGEST;
    packed->fingerprint.bytes[3] ^= what == LAYOUT;
    packed->n_sites -= what == N_SITES;
    if (what == NO_LISTS)
        packed->ranks = NULL;
    packed->pairs += what == PAIRS;
    packed->expert_bytes = what == EXPERTS ? 256 : 0;
}

/* Refused by name; the slot is as it was, and the right bytes still come in. */
static void what_is_wrong_is_refused_and_can_be_tried_again(void **state)
{
    fixture *f = *state;
    sp_slot_handle handle = {-1, 0};
    sp_image *image;
    void *memory;
    int32_t slot = open_slot(f, &image, &memory);
    sp_error error;

    for (size_t i = 0; i < sizeof wrongs / sizeof *wrongs; i++) {
        sp_packed_image packed = f->packed;
        int32_t ranks[SITES] = {3, 3};
        float scales[SITES] = {0.5f, 0.5f};

        packed.ranks = ranks;
        packed.scales = scales;
        memcpy(memory, f->image->data, f->bytes);
        spoil(f, wrongs[i].what, &packed, memory, ranks, scales);
        assert_int_equal(sp_pool_load_seal(f->pool, slot, image, &packed, &error),
                         wrongs[i].status);
        assert_string_equal(error.code, wrongs[i].code);
        assert_int_equal(sp_pool_load_commit(f->pool, slot, image, &handle, &error), SP_ERR_STATE);
        expect_invisible(f, slot);
        assert_int_equal(hand_slot_info(f->pool, slot).state, SP_SLOT_LOADING);
    }
    memcpy(memory, f->image->data, f->bytes);
    assert_ok(sp_pool_load_seal(f->pool, slot, image, &f->packed, &error), &error);
    assert_ok(sp_pool_load_commit(f->pool, slot, image, &handle, &error), &error);
    assert_ok(sp_pool_release(f->pool, handle, &error), &error);
    sp_image_destroy(image);
}

static void an_abort_leaves_a_free_slot(void **state)
{
    fixture *f = *state;

    for (int sealed = 0; sealed < 2; sealed++) {
        sp_slot_handle handle = {-1, 0};
        sp_image *image;
        void *memory;
        int32_t slot = open_slot(f, &image, &memory);
        sp_error error;

        memcpy(memory, f->image->data, f->bytes);
        if (sealed)
            assert_ok(sp_pool_load_seal(f->pool, slot, image, &f->packed, &error), &error);
        assert_ok(sp_pool_load_abort(f->pool, slot, &error), &error);
        assert_int_equal(hand_slot_info(f->pool, slot).state, SP_SLOT_EMPTY);
        expect_invisible(f, slot);
        for (size_t i = 0; i < f->bytes; i++)
            assert_int_equal(((char *)memory)[i], 0);
        assert_int_equal(sp_pool_load_commit(f->pool, slot, image, &handle, &error), SP_ERR_STATE);
        sp_image_destroy(image);
        assert_ok(sp_pool_load(f->pool, f->image, &handle, &error), &error);
        assert_int_equal(handle.slot, slot);
        assert_ok(sp_pool_release(f->pool, handle, &error), &error);
        assert_ok(sp_pool_drain(f->pool, handle, &error), &error);
    }
}

static void expect_elsewhere(sp_status status, const sp_error *error)
{
    assert_int_equal(status, SP_ERR_ARGUMENT);
    assert_string_equal(error->code, "image-elsewhere");
}

static void an_image_belongs_to_its_opening(void **state)
{
    fixture *f = *state;
    sp_slot_handle handle = {-1, 0};
    sp_image *first, *second, *again;
    void *memory, *other;
    int32_t slot = open_slot(f, &first, &memory), slot2 = open_slot(f, &second, &other);
    sp_error error;

    memcpy(memory, f->image->data, f->bytes);
    memcpy(other, f->image->data, f->bytes);
    assert_true(slot != slot2 && memory != other);
    expect_elsewhere(sp_pool_load_seal(f->pool, slot2, first, &f->packed, &error), &error);
    expect_elsewhere(sp_pool_load(f->pool, first, &handle, &error), &error);
    assert_ok(sp_pool_load_seal(f->pool, slot, first, &f->packed, &error), &error);
    expect_elsewhere(sp_pool_load_commit(f->pool, slot2, first, &handle, &error), &error);
    expect_elsewhere(sp_pool_load_reserve(f->pool, slot2, first, &error), &error);
    /* One with bytes of its own is written, not sealed; one of a slot is sealed, not written. */
    expect_elsewhere(sp_pool_load_seal(f->pool, slot2, f->image, &f->packed, &error), &error);
    assert_int_equal(sp_pool_load_write(f->pool, slot, first, &error), SP_ERR_ARGUMENT);
    /* Another opening, and another image, end the one before. */
    assert_ok(sp_pool_load_open(f->pool, slot, &again, &memory, &error), &error);
    expect_elsewhere(sp_pool_load_commit(f->pool, slot, first, &handle, &error), &error);
    assert_int_equal(sp_pool_load_commit(f->pool, slot, again, &handle, &error), SP_ERR_STATE);
    assert_ok(sp_pool_load_write(f->pool, slot2, f->image, &error), &error);
    expect_elsewhere(sp_pool_load_seal(f->pool, slot2, second, &f->packed, &error), &error);
    assert_ok(sp_pool_load_commit(f->pool, slot2, f->image, &handle, &error), &error);
    assert_ok(sp_pool_release(f->pool, handle, &error), &error);
    assert_ok(sp_pool_load_seal(f->pool, slot, again, &f->packed, &error), &error);
    assert_ok(sp_pool_load_commit(f->pool, slot, again, &handle, &error), &error);
    assert_int_equal(sp_pool_load_open(f->pool, slot, &again, &memory, &error), SP_ERR_STATE);
    assert_ok(sp_pool_release(f->pool, handle, &error), &error);
    /* The slot is loaded anew; an image of before does not get in. */
    assert_ok(sp_pool_drain(f->pool, handle, &error), &error);
    assert_ok(sp_pool_load_begin(f->pool, &slot, &error), &error);
    expect_elsewhere(sp_pool_load_commit(f->pool, slot, again, &handle, &error), &error);
    assert_ok(sp_pool_load_abort(f->pool, slot, &error), &error);
    sp_image_destroy(first);
    sp_image_destroy(second);
    sp_image_destroy(again);
}

static void out_of_memory_leaves_the_slot_loading(void **state)
{
    fixture *f = *state;
    size_t before = sp_alloc_bytes();
    sp_image *image;
    void *memory;
    int32_t slot;
    sp_error error;

    assert_ok(sp_pool_load_begin(f->pool, &slot, &error), &error);
    for (int64_t n = 0;; n++) {
        sp_alloc_fail_after(n);
        if (sp_pool_load_open(f->pool, slot, &image, &memory, &error) == SP_OK)
            break;
        assert_int_equal(error.status, SP_ERR_MEMORY);
        assert_int_equal(sp_alloc_bytes(), before);
        assert_int_equal(hand_slot_info(f->pool, slot).state, SP_SLOT_LOADING);
        assert_true(n < 3); /* the image and its two lists */
    }
    sp_alloc_fail_after(-1);
    sp_image_destroy(image);
    assert_ok(sp_pool_load_abort(f->pool, slot, &error), &error);
}

#define WITH_POOL(test) cmocka_unit_test_setup_teardown(test, setup, teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        WITH_POOL(bytes_land_and_are_seen_after_the_commit),
        WITH_POOL(what_is_wrong_is_refused_and_can_be_tried_again),
        WITH_POOL(an_abort_leaves_a_free_slot),
        WITH_POOL(an_image_belongs_to_its_opening),
        WITH_POOL(out_of_memory_leaves_the_slot_loading),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
