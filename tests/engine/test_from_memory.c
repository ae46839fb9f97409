/*
 * test_from_memory.c: adapters from memory in a running engine: the bits of the folder with the
 * same content, under pressure on slots and host cache, and what is refused.
 */
#include "support/engine_run.h"
#include "support/views.h"

#include "base/alloc.h"
#include "base/file.h"

#include <stdio.h>
#include <string.h>

#define MODEL    SP_TEST_FIXTURES "/qwen3-tied"
#define ADAPTERS MODEL "/adapters/"
#define PROMPT   11
#define NEW      6

typedef struct content {
    char *config;
    size_t config_bytes;
    golden *file;
    view_list *list;
} content;

static content open_content(const char *adapter, view_form form)
{
    content c;
    char path[512];
    sp_error error;

    snprintf(path, sizeof path, ADAPTERS "%s/adapter_config.json", adapter);
    assert_ok(sp_file_read_all(path, 1u << 20, &c.config, &c.config_bytes, &error), &error);
    snprintf(path, sizeof path, "qwen3-tied/adapters/%s/adapter_model.safetensors", adapter);
    c.file = golden_open(path);
    c.list = view_list_create(c.file, form);
    return c;
}

static void close_content(content *c)
{
    view_list_destroy(c->list);
    golden_close(c->file);
    sp_free(c->config);
}

static sp_engine *open_engine(const sp_engine_adapter *adapters, size_t n)
{
    sp_engine_options options;

    sp_engine_options_default(&options, sizeof options);
    options.model_dir = MODEL;
    options.max_loras = 1;
    options.max_lora_rank = 16;
    options.overlay_bytes = (size_t)1 << 20;
    options.adapter_loading = true;
    options.threads = 2;
    return engine_run_open(&options, adapters, n);
}

static sp_status put(sp_engine *engine, const char *name, const char *adapter, view_form form,
                     sp_error *error)
{
    content c = open_content(adapter, form);
    sp_adapter *opened;
    sp_stage_load_options load;
    int64_t ticket;
    sp_status status;

    assert_ok(sp_engine_read_tensors(engine, name, c.config, c.config_bytes, c.list->views,
                                     c.list->n, &opened, error),
              error);
    close_content(&c);
    sp_stage_load_options_default(&load, sizeof load);
    load.name = name;
    load.replace = true;
    status = sp_stage_put(sp_engine_stage(engine), &load, opened, &ticket, error);
    sp_adapter_release(opened);
    while (status == SP_PENDING) {
        sp_stage_poll_wait(sp_engine_stage(engine), 10);
        status = sp_stage_result(sp_engine_stage(engine), ticket, NULL, error);
    }
    return status;
}

static engine_run run(sp_engine *engine, const char *adapter)
{
    static const int32_t prompt[PROMPT] = {5, 80, 3, 211, 490, 33, 7, 129, 64, 300, 2};
    engine_run r = engine_run_init(adapter, prompt, PROMPT, NEW);
    engine_run *runs[] = {&r};

    r.keep_logits = true;
    engine_run_submit(engine, &r);
    engine_run_all(engine, runs, 1);
    return r;
}

/* By turns through one slot, with rows that are replaced among them; an update by name, too. */
static void memory_gives_the_bits_of_the_folder(void **state)
{
    static const char *const names[] = {"plain-r8", "save-head", "tokens"};
    sp_engine *memory = open_engine(NULL, 0);
    sp_error error;

    (void)state;
    for (int round = 0; round < 2; round++) {
        for (size_t i = 0; i < 3; i++)
            assert_ok(
                put(memory, names[i], names[i], (view_form)((round + (int)i) % VIEW_FORMS), &error),
                &error);
        for (size_t i = 0; i < 3; i++) {
            char path[512];
            sp_engine_adapter folder = {.struct_bytes = sizeof folder};
            sp_engine *files;
            engine_run want, got;

            snprintf(path, sizeof path, ADAPTERS "%s", names[i]);
            folder.name = names[i];
            folder.path = path;
            files = open_engine(&folder, 1);
            want = run(files, names[i]);
            got = run(memory, names[i]);
            engine_run_assert_same(&want, &got);
            engine_run_free(&want);
            engine_run_free(&got);
            sp_engine_close(files);
        }
    }
    assert_ok(put(memory, "tokens", "plain-r8", VIEW_DENSE, &error), &error);
    {
        engine_run want = run(memory, "plain-r8"), got = run(memory, "tokens");

        engine_run_assert_same(&want, &got);
        engine_run_free(&want);
        engine_run_free(&got);
    }
    sp_engine_close(memory);
}

static void what_is_refused(void **state)
{
    sp_engine *engine = open_engine(NULL, 0);
    content c = open_content("dora", VIEW_DENSE);
    sp_adapter *adapter = NULL;
    sp_stage_load_options load;
    int64_t ticket;
    sp_error error;

    (void)state;
    assert_int_equal(sp_engine_read_tensors(engine, "x", c.config, c.config_bytes, c.list->views,
                                            c.list->n, &adapter, &error),
                     SP_ERR_REFUSED);
    assert_string_equal(error.code, "dora");
    assert_int_equal(sp_engine_read_tensors(engine, "a:b", c.config, c.config_bytes, c.list->views,
                                            c.list->n, &adapter, &error),
                     SP_ERR_INPUT);
    assert_int_equal(sp_engine_read_tensors(NULL, "x", c.config, c.config_bytes, c.list->views,
                                            c.list->n, &adapter, &error),
                     SP_ERR_ARGUMENT);
    assert_null(adapter);
    close_content(&c);
    sp_stage_load_options_default(&load, sizeof load);
    load.name = "x";
    assert_int_equal(sp_stage_put(sp_engine_stage(engine), &load, NULL, &ticket, &error),
                     SP_ERR_ARGUMENT);
    assert_int_equal(sp_stage_put(NULL, &load, NULL, &ticket, &error), SP_ERR_ARGUMENT);
    /* 4 layers of 64 inputs: q and o 128, k and v 64, gate, up and down 160 */
    assert_true(sp_engine_row_macs(engine) == 4.0 * 64 * (2 * 128 + 2 * 64 + 3 * 160));
    sp_engine_close(engine);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(memory_gives_the_bits_of_the_folder),
        cmocka_unit_test(what_is_refused),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
