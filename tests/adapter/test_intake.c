/*
 * test_intake.c: headers first, data later: the verdict before any byte, pieces of any size, and
 * what is wrong with either.
 */
#include "adapter/toy.h"
#include "support/known_sites.h"

#include "base/alloc.h"

#include <sidepath/intake.h>

#include <math.h>
#include <string.h>

#define CONFIG "{\"r\": 2, \"lora_alpha\": 4, \"target_modules\": [\"q_proj\"]}"
#define A_NAME "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
#define B_NAME "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"

static const int64_t a_shape[] = {2, TOY_HIDDEN}, b_shape[] = {12, 2};

typedef struct content {
    float a[2 * TOY_HIDDEN], b[12 * 2];
    sp_tensor_desc descs[2]; /* B first: the intake has an order of its own */
} content;

static content make_content(void)
{
    content c;

    for (int i = 0; i < 2 * TOY_HIDDEN; i++)
        c.a[i] = (float)(i + 1) / 64;
    for (int i = 0; i < 12 * 2; i++)
        c.b[i] = (float)(i - 30) / 32;
    c.descs[0] = (sp_tensor_desc){sizeof(sp_tensor_desc), B_NAME, SP_TENSOR_F32, 2, b_shape};
    c.descs[1] = (sp_tensor_desc){sizeof(sp_tensor_desc), A_NAME, SP_TENSOR_F32, 2, a_shape};
    return c;
}

static const char *bytes_of(const content *c, size_t index)
{
    return (const char *)(index == 0 ? c->b : c->a);
}

static sp_status create(const content *c, const sp_adapter_options *options, sp_intake **out_intake,
                        sp_error *error)
{
    return sp_intake_create(CONFIG, strlen(CONFIG), c->descs, 2, options, out_intake, error);
}

/* Writes all of a wanted tensor in pieces of at most `piece` bytes. */
static sp_status fill(sp_intake *intake, size_t wanted, const content *c, size_t piece,
                      sp_error *error)
{
    sp_wanted_tensor tensor = {.struct_bytes = sizeof tensor};
    size_t at = 0, room;
    void *memory;
    sp_status status = sp_intake_wanted_at(intake, wanted, &tensor, error);

    while (status == SP_OK) {
        size_t n;

        assert_ok(sp_intake_next(intake, wanted, &memory, &room, error), error);
        if (room == 0)
            break;
        n = room < piece ? room : piece;
        memcpy(memory, bytes_of(c, tensor.index) + at, n);
        status = sp_intake_take(intake, wanted, n, error);
        at += n;
    }
    if (status == SP_OK)
        assert_int_equal(at, tensor.bytes);
    return status;
}

static sp_adapter *from_pieces(const content *c, const sp_adapter_options *options, size_t piece,
                               size_t first)
{
    sp_intake *intake;
    sp_adapter *adapter;
    sp_error error;

    assert_ok(create(c, options, &intake, &error), &error);
    assert_int_equal(sp_intake_n_wanted(intake), 2);
    assert_ok(fill(intake, first, c, piece, &error), &error);
    assert_ok(fill(intake, 1 - first, c, piece, &error), &error);
    assert_ok(sp_intake_finish(intake, &adapter, &error), &error);
    sp_intake_destroy(intake);
    return adapter;
}

/* The folder's digest, however the bytes come. */
static void pieces_of_any_size_in_any_order(void **state)
{
    static const size_t pieces[] = {4, 12, 64, 4096};
    sp_adapter_options options = toy_options();
    content c = make_content();
    make_adapter *made = make_adapter_create();
    sp_adapter *folder;
    sp_digest wanted;

    (void)state;
    make_adapter_config(made, CONFIG);
    memcpy(make_adapter_add(made, A_NAME, "F32", 2, 2, TOY_HIDDEN), c.a, sizeof c.a);
    memcpy(make_adapter_add(made, B_NAME, "F32", 2, 12, 2), c.b, sizeof c.b);
    folder = toy_opened(made, &options);
    wanted = sp_adapter_digest(folder);
    for (size_t i = 0; i < 2 * sizeof pieces / sizeof *pieces; i++) {
        sp_adapter *adapter = from_pieces(&c, &options, pieces[i / 2], i % 2);
        sp_digest digest = sp_adapter_digest(adapter);

        assert_memory_equal(&digest, &wanted, sizeof digest);
        assert_string_equal(sp_adapter_name(adapter), "adapter");
        assert_memory_equal(sp_adapter_site_at(adapter, 0)->a.data, c.a, sizeof c.a);
        sp_adapter_release(adapter);
    }
    sp_adapter_release(folder);
    make_adapter_destroy(made);
    sp_geometry_release(options.geometry);
}

/* ---- before any byte ------------------------------------------------------------------------- */

static void refused(const content *c, const char *config, const sp_adapter_options *options,
                    sp_status status, const char *code)
{
    sp_intake *intake = NULL;
    sp_error error;

    assert_int_equal(
        sp_intake_create(config, strlen(config), c->descs, 2, options, &intake, &error), status);
    assert_string_equal(error.code, code);
    assert_null(intake);
}

static void headers_alone_are_refused(void **state)
{
    static const int64_t wide[] = {2, TOY_HIDDEN + 1};
    static const char rank_4[] = "{\"r\": 4, \"lora_alpha\": 4, \"target_modules\": [\"q_proj\"]}";
    static const char more[] =
        "{\"r\": 2, \"lora_alpha\": 4, \"target_modules\": [\"q_proj\", \"k_proj\"]}";
    sp_adapter_options options = toy_options();
    content c = make_content();
    const sp_tensor_desc good = c.descs[1];
    size_t bytes = sp_alloc_bytes();

    (void)state;
    refused(&c, "{", &options, SP_ERR_REFUSED, "config-malformed");
    refused(&c, rank_4, &options, SP_ERR_REFUSED, "rank-mismatch");
    refused(&c, more, &options, SP_ERR_REFUSED, "unmatched-target");
    c.descs[1].shape = wide;
    refused(&c, CONFIG, &options, SP_ERR_MISMATCH, "shape-mismatch");
    c.descs[1] = good;
    c.descs[1].name = "base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight";
    refused(&c, CONFIG, &options, SP_ERR_MISMATCH, "layer-out-of-range");
    c.descs[1].name = B_NAME;
    refused(&c, CONFIG, &options, SP_ERR_REFUSED, "duplicate-key");
    c.descs[1] = good;
    c.descs[1].shape = NULL;
    refused(&c, CONFIG, &options, SP_ERR_ARGUMENT, "");
    c.descs[1] = good;
    c.descs[1].struct_bytes = sizeof(size_t); /* an older host's, of a single field: no name */
    refused(&c, CONFIG, &options, SP_ERR_ARGUMENT, "");
    c.descs[1] = good;
    options.rank_max = 1;
    refused(&c, CONFIG, &options, SP_ERR_TOO_LARGE, "rank-exceeds-pool");
    options.rank_max = 0;
    options.pool_dtype = (sp_dtype)9;
    refused(&c, CONFIG, &options, SP_ERR_ARGUMENT, "");
    options.struct_bytes = 0;
    refused(&c, CONFIG, &options, SP_ERR_ARGUMENT, "");
    assert_int_equal(sp_alloc_bytes(), bytes);
    sp_geometry_release(options.geometry);
}

static void calls_without_what_they_need(void **state)
{
    sp_adapter_options options = toy_options();
    content c = make_content();
    sp_intake *intake = NULL;
    sp_error error;

    (void)state;
    assert_int_equal(sp_intake_create(NULL, 0, c.descs, 2, &options, &intake, &error),
                     SP_ERR_ARGUMENT);
    assert_int_equal(sp_intake_create(CONFIG, 5, NULL, 2, &options, &intake, &error),
                     SP_ERR_ARGUMENT);
    assert_int_equal(
        sp_intake_create(CONFIG, strlen(CONFIG), c.descs, SIZE_MAX, &options, &intake, &error),
        SP_ERR_TOO_LARGE);
    assert_string_equal(error.subject, "n_tensors");
    assert_int_equal(sp_intake_create(CONFIG, 5, c.descs, 2, NULL, &intake, &error),
                     SP_ERR_ARGUMENT);
    assert_int_equal(sp_intake_create(CONFIG, 5, c.descs, 2, &options, NULL, &error),
                     SP_ERR_ARGUMENT);
    assert_null(intake);
    sp_intake_destroy(NULL);
    sp_geometry_release(options.geometry);
}

/* ---- data ------------------------------------------------------------------------------------ */

static void pieces_that_do_not_fit(void **state)
{
    sp_adapter_options options = toy_options();
    content c = make_content();
    sp_wanted_tensor tensor = {.struct_bytes = sizeof tensor};
    sp_intake *intake;
    sp_adapter *adapter = NULL;
    size_t room;
    void *memory;
    sp_error error;

    (void)state;
    assert_ok(create(&c, &options, &intake, &error), &error);
    assert_int_equal(sp_intake_wanted_at(intake, 2, &tensor, &error), SP_ERR_ARGUMENT);
    assert_int_equal(sp_intake_next(intake, 2, &memory, &room, &error), SP_ERR_ARGUMENT);
    assert_int_equal(sp_intake_next(intake, 0, NULL, &room, &error), SP_ERR_ARGUMENT);
    assert_int_equal(sp_intake_take(intake, 2, 4, &error), SP_ERR_ARGUMENT);
    assert_ok(sp_intake_next(intake, 0, &memory, &room, &error), &error);
    memcpy(memory, c.a, sizeof c.a); /* A is before B by name */
    assert_int_equal(room, sizeof c.a);
    assert_int_equal(sp_intake_take(intake, 0, sizeof c.a + 4, &error), SP_ERR_ARGUMENT);
    assert_int_equal(sp_intake_take(intake, 0, 6, &error), SP_ERR_ARGUMENT);
    assert_ok(sp_intake_take(intake, 0, 0, &error), &error);
    assert_ok(sp_intake_take(intake, 0, sizeof c.a, &error), &error);
    assert_int_equal(sp_intake_take(intake, 0, 4, &error), SP_ERR_ARGUMENT);
    assert_ok(sp_intake_next(intake, 1, &memory, &room, &error), &error);
    memcpy(memory, c.b, 40);
    assert_ok(sp_intake_take(intake, 1, 40, &error), &error);
    assert_int_equal(sp_intake_finish(intake, NULL, &error), SP_ERR_ARGUMENT);
    assert_int_equal(sp_intake_finish(intake, &adapter, &error), SP_ERR_TRUNCATED);
    assert_string_equal(error.code, "truncated");
    assert_string_equal(error.subject, B_NAME);
    assert_int_equal(error.position, 40);
    assert_int_equal(sp_intake_finish(intake, &adapter, &error), SP_ERR_STATE);
    assert_null(adapter);
    sp_intake_destroy(intake);
    sp_geometry_release(options.geometry);
}

static void a_value_that_is_not_finite_ends_its_tensor(void **state)
{
    sp_adapter_options options = toy_options();
    content c = make_content();
    sp_intake *intake;
    sp_adapter *adapter = NULL;
    sp_error error;

    (void)state;
    c.b[17] = INFINITY;
    assert_ok(create(&c, &options, &intake, &error), &error);
    assert_int_equal(fill(intake, 1, &c, 8, &error), SP_ERR_REFUSED);
    assert_string_equal(error.code, "non-finite");
    assert_int_equal(error.position, 17);
    assert_int_equal(sp_intake_take(intake, 1, 4, &error), SP_ERR_STATE);
    assert_ok(fill(intake, 0, &c, 8, &error), &error);
    assert_int_equal(sp_intake_finish(intake, &adapter, &error), SP_ERR_TRUNCATED);
    assert_null(adapter);
    sp_intake_destroy(intake);
    sp_geometry_release(options.geometry);
}

/* What only all of the data shows. */
static void an_adapter_without_effect(void **state)
{
    sp_adapter_options options = toy_options();
    content c = make_content();
    sp_intake *intake;
    sp_adapter *adapter = NULL;
    sp_error error;

    (void)state;
    memset(c.b, 0, sizeof c.b);
    assert_ok(create(&c, &options, &intake, &error), &error);
    assert_ok(fill(intake, 0, &c, 64, &error), &error);
    assert_ok(fill(intake, 1, &c, 64, &error), &error);
    assert_int_equal(sp_intake_finish(intake, &adapter, &error), SP_ERR_REFUSED);
    assert_string_equal(error.code, "no-effect");
    assert_null(adapter);
    sp_intake_destroy(intake);
    sp_geometry_release(options.geometry);
}

/* ---- copies of the base ---------------------------------------------------------------------- */

enum { ROWS = 20000, COLS = 32, BAD = 600000 }; /* 2.4 windows of F32 */

static const int64_t head_a[] = {1, COLS}, head_b[] = {ROWS, 1}, head[] = {ROWS, COLS};
static const sp_tensor_desc head_descs[] = {
    {sizeof *head_descs, "base_model.model.lm_head.base_layer.weight", SP_TENSOR_F32, 2, head},
    {sizeof *head_descs, "base_model.model.lm_head.lora_A.weight", SP_TENSOR_F32, 2, head_a},
    {sizeof *head_descs, "base_model.model.lm_head.lora_B.weight", SP_TENSOR_F32, 2, head_b},
};

static sp_intake *head_intake(const float *table)
{
    static const char config[] = "{\"r\": 1, \"lora_alpha\": 4}";
    const site_dims sites[] = {{-1, SP_MODULE_LM_HEAD, COLS, ROWS}};
    const sp_served_table served = {sizeof served, table, SP_DTYPE_F32, ROWS, COLS, false};
    sp_adapter_options options;
    sp_intake *intake;
    sp_error error;

    sp_adapter_options_default(&options, sizeof options);
    options.geometry = known_geometry(0, sites, 1);
    options.served_head = &served;
    assert_ok(sp_intake_create(config, strlen(config), head_descs, 3, &options, &intake, &error),
              &error);
    sp_geometry_release(options.geometry); /* the intake has its own reference */
    assert_int_equal(sp_intake_n_wanted(intake), 3);
    return intake;
}

/* All rooms filled from the table, one element of the copy spoilt unless `bad` is -1. */
static sp_status fill_rooms(sp_intake *intake, size_t wanted, const float *table, int64_t bad,
                            int32_t *out_rooms, sp_error *error)
{
    sp_wanted_tensor tensor = {.struct_bytes = sizeof tensor};
    size_t at = 0, room;
    void *memory;
    sp_status status = SP_OK;

    assert_ok(sp_intake_wanted_at(intake, wanted, &tensor, error), error);
    for (*out_rooms = 0; status == SP_OK; ++*out_rooms) {
        assert_ok(sp_intake_next(intake, wanted, &memory, &room, error), error);
        if (room == 0)
            break;
        memcpy(memory, (const char *)table + at, room);
        if (bad >= 0 && tensor.index == 0 && (size_t)bad * 4 >= at && (size_t)bad * 4 < at + room)
            ((float *)memory)[(size_t)bad - at / 4] += 1;
        at += room;
        status = sp_intake_take(intake, wanted, room, error);
    }
    return status;
}

/* A copy of the base's head comes through a window, and is compared as it comes. */
static void copies_of_the_base_are_compared_as_they_come(void **state)
{
    float *table = sp_calloc((size_t)ROWS * COLS, sizeof *table);
    sp_adapter *adapter;
    sp_intake *intake;
    int32_t rooms[3];
    sp_error error;

    (void)state;
    assert_non_null(table);
    for (int i = 0; i < ROWS * COLS; i++)
        table[i] = (float)(i % 1001) / 16;
    intake = head_intake(table);
    for (size_t i = 0; i < 3; i++)
        assert_ok(fill_rooms(intake, i, table, -1, &rooms[i], &error), &error);
    assert_int_equal(rooms[0] + rooms[1] + rooms[2], 3 + 1 + 1);
    assert_ok(sp_intake_finish(intake, &adapter, &error), &error);
    sp_adapter_release(adapter);
    sp_intake_destroy(intake);
    intake = head_intake(table);
    for (size_t i = 0; i < 3; i++) {
        sp_status status = fill_rooms(intake, i, table, BAD, &rooms[i], &error);

        if (status == SP_OK)
            continue;
        assert_int_equal(status, SP_ERR_MISMATCH);
        assert_string_equal(error.code, "base-copy-differs");
        assert_int_equal(error.position, BAD);
        rooms[i] = -1;
    }
    assert_int_equal(sp_intake_finish(intake, &adapter, &error), SP_ERR_TRUNCATED);
    sp_intake_destroy(intake);
    sp_free(table);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pieces_of_any_size_in_any_order),
        cmocka_unit_test(headers_alone_are_refused),
        cmocka_unit_test(calls_without_what_they_need),
        cmocka_unit_test(pieces_that_do_not_fit),
        cmocka_unit_test(a_value_that_is_not_finite_ends_its_tensor),
        cmocka_unit_test(an_adapter_without_effect),
        cmocka_unit_test(copies_of_the_base_are_compared_as_they_come),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
