/*
 * Options of an engine: each number is refused just outside of its row's range, by name and before
 * a file is opened, and taken at its borders; what sp_engine_options_default gives is what the
 * rows, and engine.h, say.
 */
#include "support/test.h"

#include "engine/option_rows.h"

#include <stdio.h>
#include <string.h>

/* An engine of a folder that is not there: what passes the check of the options is not found. */
static sp_status open_nowhere(const sp_engine_options *options, sp_error *error)
{
    sp_engine *engine = NULL;
    sp_status status = sp_engine_open(options, NULL, 0, &engine, error);

    assert_null(engine);
    return status;
}

static sp_engine_options good(void)
{
    sp_engine_options options;

    sp_engine_options_default(&options, sizeof options);
    options.model_dir = "/nowhere";
    return options;
}

/* Stores the number whatever the row's range is. */
static void store(const sp_field *row, double number, sp_engine_options *options)
{
    void *member = (char *)options + row->offset;

    if (row->type == SP_FIELD_INT)
        *(int32_t *)member = (int32_t)number;
    else if (row->type == SP_FIELD_INT64)
        *(int64_t *)member = (int64_t)number;
    else
        *(size_t *)member = (size_t)number;
}

static void check_number(const sp_field *row)
{
    sp_engine_options options = good();
    sp_error error;

    options.adapter_wait_steps = 1; /* which its twin must not be below */
    options.adapter_preempt_steps = 1 << 24;
    store(row, row->minimum, &options);
    assert_int_equal(open_nowhere(&options, &error), SP_ERR_NOT_FOUND);
    if (strcmp(row->name, "page-tokens") != 0 && strcmp(row->name, "adapter-wait-steps") != 0) {
        store(row, row->maximum, &options);
        assert_int_equal(open_nowhere(&options, &error), SP_ERR_NOT_FOUND);
    }
    store(row, row->maximum + 1, &options);
    assert_int_equal(open_nowhere(&options, &error), SP_ERR_ARGUMENT);
    assert_string_equal(error.subject, row->name);
    if (row->type == SP_FIELD_SIZE) /* it has no negative numbers */
        return;
    store(row, row->minimum - 1, &options);
    assert_int_equal(open_nowhere(&options, &error), SP_ERR_ARGUMENT);
    assert_string_equal(error.subject, row->name);
}

static void test_ranges(void **state)
{
    size_t n = 0;

    (void)state;
    for (size_t i = 0; i < sp_n_option_rows; i++) {
        const sp_field *row = &sp_option_rows[i];

        if (row->type == SP_FIELD_BOOL)
            continue;
        check_number(row);
        n++;
    }
    assert_true(n >= 14);
}

static void test_beside_ranges(void **state)
{
    sp_engine_options options = good();
    sp_error error;

    (void)state;
    options.page_tokens = 12;
    assert_int_equal(open_nowhere(&options, &error), SP_ERR_ARGUMENT);
    assert_string_equal(error.subject, "page-tokens");
    assert_non_null(strstr(error.text, "1, 2, 4, 8, 16 or 32"));
    options = good();
    options.adapter_preempt_steps = options.adapter_wait_steps - 1;
    assert_int_equal(open_nowhere(&options, &error), SP_ERR_ARGUMENT);
    assert_string_equal(error.subject, "adapter-preempt-steps");
}

static void test_defaults(void **state)
{
    sp_engine_options options;

    (void)state;
    sp_engine_options_default(&options, sizeof options);
    assert_int_equal(options.struct_bytes, sizeof options);
    assert_int_equal(options.precision, SP_DTYPE_BF16);
    assert_true(options.max_loras == 8 && options.max_running == 64 && options.page_tokens == 16);
    assert_true(options.step_rows == 0 && options.loader_threads == 1 && options.prefix_cache);
    assert_true(options.adapter_wait_steps == 64 && options.adapter_preempt_steps == 256);
    assert_true(options.threads == 0 && options.max_lora_rank == 0 && options.overlay_bytes == 0);
    assert_true(options.max_context == 0 && options.kv_tokens == 0 && options.prefill_chunk == 0);
    assert_true(options.memory_bytes == 0 && options.host_bytes_max == 0);
    assert_false(options.no_apply || options.no_ffn || options.weights_copy ||
                 options.adapter_loading);
    assert_true(options.draft_tokens == 4);
    assert_true(options.experts && options.max_lora_expert_rank == 64 && options.expert_bytes == 0);
    assert_true(options.expert_max_tokens == 4096);
    assert_true(options.state_bytes == 0 && options.state_snapshot_bytes == 0);
    assert_int_equal(options.state_snapshot_tokens, 512);
    assert_false(options.speculative || options.no_batch_verify);
    assert_false(options.allow_partial || options.allow_no_effect || options.allow_unknown_fields ||
                 options.allow_base_changing_init);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ranges),
        cmocka_unit_test(test_beside_ranges),
        cmocka_unit_test(test_defaults),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
