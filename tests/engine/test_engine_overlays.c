/*
 * Replaced rows, trained tokens and pairs of embeddings and head inside the engine: one row, one
 * answer; rotation through a memory that holds few of them; adapters that replace rows by the very
 * rows that are served.
 */
#include "support/test.h"

#include "base/alloc.h"
#include "base/file.h"
#include "kernels/cpu/kernels.h"
#include "support/engine_run.h"

#include <jansson.h>
#include <stdio.h>
#include <string.h>

#define MODEL      SP_TEST_FIXTURES "/qwen3-tied"
#define ADAPTERS   MODEL "/adapters/"
#define N_ADAPTERS 7
#define N_OTHERS   12
#define PROMPT     37 /* longer than a window of logits */
#define MAX_TOKENS 10
#define VOCAB      512
#define HIDDEN     64

static const char *const names[N_ADAPTERS] = {
    "tokens", "save-embed", "save-head", "plain-r8", "save-head-embed", "embed-lora", "head-lora"};
static const char *const paths[N_ADAPTERS] = {
    ADAPTERS "tokens",          ADAPTERS "save-embed", ADAPTERS "save-head", ADAPTERS "plain-r8",
    ADAPTERS "save-head-embed", ADAPTERS "embed-lora", ADAPTERS "head-lora"};

typedef struct variant {
    const char *label;
    int32_t order, prefill_chunk, threads, step_rows, others, max_loras;
    size_t overlay_bytes;
    bool no_apply;
} variant;

/* One overlay of save-head-embed takes 2 × (512 × 64 × 2 + 2 × 2048) bytes in BF16. */
#define ONE_LARGEST ((size_t)2 * (VOCAB * HIDDEN * 2 + 2 * VOCAB * 4))

static const variant variants[] = {
    {"among 12 others", 0, 0, 2, 256, N_OTHERS, N_ADAPTERS, 0, false},
    {"other slots, among 12", 3, 0, 1, 256, N_OTHERS, N_ADAPTERS, 0, false},
    {"chunks of 1", 1, 1, 2, 256, 4, N_ADAPTERS, 0, false},
    {"chunks of 7, steps of 19", 5, 7, 2, 19, 6, N_ADAPTERS, 0, false},
    {"three slots", 2, 0, 2, 256, N_OTHERS, 3, 0, false},
};

static sp_engine *open_engine(const variant *v, sp_dtype precision, const char *only)
{
    sp_engine_adapter adapters[N_ADAPTERS];
    sp_engine_options options;
    size_t n = engine_run_turn(names, paths, N_ADAPTERS, v->order, only, adapters);

    sp_engine_options_default(&options, sizeof options);
    options.model_dir = MODEL;
    options.precision = precision;
    options.max_loras = v->max_loras;
    options.overlay_bytes = v->overlay_bytes;
    options.no_apply = v->no_apply;
    options.prefill_chunk = v->prefill_chunk;
    options.threads = v->threads;
    options.step_rows = v->step_rows;
    options.kv_tokens = 4096;
    return engine_run_open(&options, adapters, n);
}

/* Alone, in an engine that holds nothing else. */
static engine_run run_reference(const char *adapter, const int32_t *prompt, sp_dtype precision)
{
    static const variant plain = {"reference", 0, 0, 1, 256, 0, 1, 0, false};
    sp_engine *engine = open_engine(&plain, precision, adapter ? adapter : "none");
    engine_run run = engine_run_alone(engine, adapter, prompt, PROMPT, MAX_TOKENS, true);

    assert_int_equal(run.n_logits, PROMPT + MAX_TOKENS - 1);
    return run;
}

static int32_t count_ready(const sp_engine *engine)
{
    sp_stage_version_info info = {.struct_bytes = sizeof info};
    int32_t n = 0;

    for (size_t i = 0; sp_stage_version_at(sp_engine_stage(engine), i, &info, NULL) == SP_OK; i++)
        n += info.state == SP_STAGE_VERSION_READY;
    return n;
}

static void run_variant(const variant *v, const engine_run *references,
                        const int32_t (*prompts)[PROMPT], sp_dtype precision,
                        sp_test_random *random)
{
    sp_engine *engine = open_engine(v, precision, NULL);
    engine_run runs[N_ADAPTERS + 1 + N_OTHERS];
    engine_run *list[N_ADAPTERS + 1 + N_OTHERS];
    int32_t others[N_OTHERS][PROMPT];
    int32_t n = 0;

    /* Every adapter and the base, each among others. */
    for (int32_t i = 0; i < N_ADAPTERS + 1 + v->others; i++, n++) {
        const char *adapter = NULL;

        if (i <= N_ADAPTERS) {
            runs[n] =
                engine_run_init(i < N_ADAPTERS ? names[i] : NULL, prompts[i], PROMPT, MAX_TOKENS);
            runs[n].keep_logits = true;
        } else {
            uint32_t other = sp_test_below(random, N_ADAPTERS + 1);
            int32_t *tokens = others[i - N_ADAPTERS - 1];
            int32_t length = 1 + (int32_t)sp_test_below(random, PROMPT);

            adapter = other < N_ADAPTERS ? names[other] : NULL;
            engine_run_fill_prompt(random, tokens, length, VOCAB);
            runs[n] = engine_run_init(adapter, tokens, length, 1 + (int32_t)(other * 3));
        }
        runs[n].request.ignore_eos = true;
        list[n] = &runs[n];
    }
    if (v->overlay_bytes) /* enough slots, and not enough room beside them */
        assert_true(count_ready(engine) < N_ADAPTERS);
    else
        assert_int_equal(count_ready(engine), v->max_loras);
    for (int32_t i = 0; i < n; i++)
        engine_run_submit(engine, list[n - 1 - i]);
    engine_run_all(engine, list, (size_t)n);
    for (int32_t i = 0; i <= N_ADAPTERS; i++)
        engine_run_assert_same(&references[i], &runs[i]);
    for (int32_t i = 0; i < n; i++)
        engine_run_free(&runs[i]);
    sp_engine_close(engine);
}

static void check_precision(sp_dtype precision)
{
    const variant small = {"room for one",
                           0,
                           0,
                           2,
                           256,
                           N_OTHERS,
                           N_ADAPTERS,
                           ONE_LARGEST * (precision == SP_DTYPE_F32 ? 2 : 1),
                           false};
    int32_t prompts[N_ADAPTERS + 1][PROMPT];
    engine_run references[N_ADAPTERS + 1];
    sp_test_random random = {23};
    size_t blocks;

    for (int32_t a = 0; a <= N_ADAPTERS; a++) {
        engine_run_fill_prompt(&random, prompts[a], PROMPT, VOCAB);
        references[a] = run_reference(a < N_ADAPTERS ? names[a] : NULL, prompts[a], precision);
    }
    blocks = sp_alloc_blocks();
    for (size_t i = 0; i < sizeof variants / sizeof variants[0]; i++)
        run_variant(&variants[i], references, (const int32_t(*)[PROMPT])prompts, precision,
                    &random);
    run_variant(&small, references, (const int32_t(*)[PROMPT])prompts, precision, &random);
    assert_int_equal(sp_alloc_blocks(), blocks);
    for (int32_t a = 0; a <= N_ADAPTERS; a++)
        engine_run_free(&references[a]);
}

static void alone_is_mixed_in_bf16(void **state)
{
    (void)state;
    check_precision(SP_DTYPE_BF16);
}

static void alone_is_mixed_in_f32(void **state)
{
    (void)state;
    check_precision(SP_DTYPE_F32);
}

static void an_overlay_beyond_the_budget_is_refused(void **state)
{
    sp_engine_adapter adapter = {sizeof(sp_engine_adapter), "head", ADAPTERS "save-head"};
    sp_engine_options options;
    sp_engine *engine = NULL;
    sp_error error = {0};
    size_t blocks = sp_alloc_blocks();

    (void)state;
    sp_engine_options_default(&options, sizeof options);
    options.model_dir = MODEL;
    options.threads = 1;
    options.overlay_bytes = 4096;
    assert_int_equal(sp_engine_open(&options, &adapter, 1, &engine, &error), SP_ERR_TOO_LARGE);
    assert_string_equal(error.code, "overlay-too-large");
    assert_null(engine);
    assert_int_equal(sp_alloc_blocks(), blocks);
}

static void check_is_base(const variant *v, float scale, const engine_run *base,
                          const int32_t *prompt)
{
    sp_engine *engine = open_engine(v, SP_DTYPE_BF16, NULL);

    for (int32_t a = 0; a < N_ADAPTERS; a++) {
        engine_run run = engine_run_init(names[a], prompt, PROMPT, MAX_TOKENS);
        engine_run *list[1] = {&run};

        run.keep_logits = true;
        run.request.ignore_eos = true;
        run.request.lora_scale = scale;
        engine_run_submit(engine, &run);
        engine_run_all(engine, list, 1);
        engine_run_assert_same(base, &run);
        engine_run_free(&run);
    }
    sp_engine_close(engine);
}

/* lora_scale 0 is the base, exactly, replaced rows included; so is no_apply. */
static void scale_0_and_no_apply_are_the_base(void **state)
{
    static const variant plain = {"scale 0", 0, 0, 2, 256, 0, N_ADAPTERS, 0, false};
    static const variant lever = {"no_apply", 0, 0, 2, 256, 0, N_ADAPTERS, 0, true};
    sp_test_random random = {31};
    int32_t prompt[PROMPT];
    engine_run base;

    (void)state;
    engine_run_fill_prompt(&random, prompt, PROMPT, VOCAB);
    base = run_reference(NULL, prompt, SP_DTYPE_BF16);
    check_is_base(&plain, 0.0f, &base, prompt);
    check_is_base(&lever, 1.0f, &base, prompt);
    for (int32_t a = 0; a < N_ADAPTERS; a++) {
        engine_run adapted = run_reference(names[a], prompt, SP_DTYPE_BF16);

        assert_memory_not_equal(adapted.logits, base.logits, PROMPT * VOCAB * sizeof(float));
        engine_run_free(&adapted);
    }
    engine_run_free(&base);
}

/* ---- adapters that replace rows by what is served -------------------------------------------- */

/* A safetensors file in memory. */
typedef struct tensor_file {
    char *bytes;
    size_t n_bytes, data_offset;
    json_t *header;
} tensor_file;

static tensor_file read_tensors(const char *path)
{
    tensor_file file = {0};
    sp_file handle;
    sp_error error;
    uint64_t header_bytes;

    assert_ok(sp_file_open(path, &handle, &error), &error);
    file.n_bytes = (size_t)handle.bytes;
    file.bytes = sp_malloc(file.n_bytes);
    assert_non_null(file.bytes);
    assert_ok(sp_file_read(&handle, 0, file.bytes, file.n_bytes, &error), &error);
    sp_file_close(&handle);
    memcpy(&header_bytes, file.bytes, 8);
    file.data_offset = 8 + (size_t)header_bytes;
    file.header = json_loadb(file.bytes + 8, (size_t)header_bytes, 0, NULL);
    assert_non_null(file.header);
    return file;
}

static void free_tensors(tensor_file *file)
{
    json_decref(file->header);
    sp_free(file->bytes);
}

static const char *tensor_data(const tensor_file *file, const char *name)
{
    json_t *offsets = json_object_get(json_object_get(file->header, name), "data_offsets");

    assert_non_null(offsets);
    return file->bytes + file->data_offset + json_integer_value(json_array_get(offsets, 0));
}

/* Writes plain-r8 with one more tensor [rows, HIDDEN] of BF16, and its config with two fields set.
 */
static char *write_adapter(const char *tensor, const void *data, int32_t rows,
                           const char *const *modules_to_save, const int32_t *ids, int32_t n_ids)
{
    tensor_file plain = read_tensors(ADAPTERS "plain-r8/adapter_model.safetensors");
    json_t *config = json_load_file(ADAPTERS "plain-r8/adapter_config.json", 0, NULL);
    size_t own = plain.n_bytes - plain.data_offset, added = (size_t)rows * HIDDEN * 2;
    json_t *entry = json_pack("{s:s, s:[i,i], s:[I,I]}", "dtype", "BF16", "shape", rows, HIDDEN,
                              "data_offsets", (json_int_t)own, (json_int_t)(own + added));
    char *directory = sp_test_make_directory(), *header, *bytes;
    uint64_t header_bytes;

    json_object_set_new(plain.header, tensor, entry);
    header = json_dumps(plain.header, JSON_COMPACT);
    header_bytes = strlen(header);
    bytes = sp_malloc(8 + header_bytes + own + added);
    assert_non_null(bytes);
    memcpy(bytes, &header_bytes, 8);
    memcpy(bytes + 8, header, header_bytes);
    memcpy(bytes + 8 + header_bytes, plain.bytes + plain.data_offset, own);
    memcpy(bytes + 8 + header_bytes + own, data, added);
    sp_test_write_file(directory, "adapter_model.safetensors", bytes,
                       8 + header_bytes + own + added);
    sp_free(bytes);
    free(header);
    for (; modules_to_save && *modules_to_save; modules_to_save++)
        json_object_set_new(config, "modules_to_save", json_pack("[s]", *modules_to_save));
    if (ids) {
        json_t *list = json_array();

        for (int32_t i = 0; i < n_ids; i++)
            json_array_append_new(list, json_integer(ids[i]));
        json_object_set_new(config, "trainable_token_indices", list);
    }
    header = json_dumps(config, 0);
    sp_test_write_file(directory, "adapter_config.json", header, strlen(header));
    free(header);
    json_decref(config);
    free_tensors(&plain);
    return directory;
}

static engine_run run_adapter(const char *path, const char *isa, sp_dtype precision,
                              const int32_t *prompt)
{
    sp_engine_adapter adapter = {sizeof(sp_engine_adapter), "it", path};
    engine_run run = engine_run_init("it", prompt, PROMPT, MAX_TOKENS);
    engine_run *list[1] = {&run};
    sp_engine_options options;
    sp_engine *engine;

    sp_engine_options_default(&options, sizeof options);
    options.model_dir = MODEL;
    options.precision = precision;
    options.cpu_isa = isa;
    options.threads = 2;
    options.kv_tokens = 4096;
    engine = engine_run_open(&options, &adapter, 1);
    run.keep_logits = true;
    run.request.ignore_eos = true;
    engine_run_submit(engine, &run);
    engine_run_all(engine, list, 1);
    sp_engine_close(engine);
    return run;
}

static void check_same_as_plain(const char *directory)
{
    static const sp_dtype precisions[] = {SP_DTYPE_BF16, SP_DTYPE_F32};
    sp_test_random random = {37};
    int32_t prompt[PROMPT];

    engine_run_fill_prompt(&random, prompt, PROMPT, VOCAB);
    prompt[3] = 17; /* one of the trained tokens below */
    for (const char *const *level = sp_kernels_levels(); *level; level++)
        for (int p = 0; p < 2; p++) {
            engine_run plain = run_adapter(ADAPTERS "plain-r8", *level, precisions[p], prompt);
            engine_run run = run_adapter(directory, *level, precisions[p], prompt);

            engine_run_assert_same(&plain, &run);
            engine_run_free(&plain);
            engine_run_free(&run);
        }
}

/* The whole table, equal to the served one: accepted, and nothing is replaced. */
static void a_table_equal_to_the_served_one_changes_no_bit(void **state)
{
    static const char *const saved[] = {"embed_tokens", NULL};
    tensor_file model = read_tensors(MODEL "/model.safetensors");
    char *directory =
        write_adapter("base_model.model.model.embed_tokens.weight",
                      tensor_data(&model, "model.embed_tokens.weight"), VOCAB, saved, NULL, 0);

    (void)state;
    check_same_as_plain(directory);
    sp_test_remove_tree(directory);
    sp_free(directory);
    free_tensors(&model);
}

/*
 * Trained tokens that were trained to what they were: their rows are replaced, on both sides, and
 * their logits computed again, by a kernel whose sums run as the head's do.
 */
static void a_replacement_equal_to_the_served_row_changes_no_bit(void **state)
{
    static const int32_t ids[] = {17, 500, 3, 255, 256};
    tensor_file model = read_tensors(MODEL "/model.safetensors");
    const char *table = tensor_data(&model, "model.embed_tokens.weight");
    char rows[5 * HIDDEN * 2];
    char *directory;

    (void)state;
    for (int32_t i = 0; i < 5; i++)
        memcpy(rows + i * HIDDEN * 2, table + ids[i] * HIDDEN * 2, HIDDEN * 2);
    directory =
        write_adapter("base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta",
                      rows, 5, NULL, ids, 5);
    check_same_as_plain(directory);
    sp_test_remove_tree(directory);
    sp_free(directory);
    free_tensors(&model);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(alone_is_mixed_in_bf16),
        cmocka_unit_test(alone_is_mixed_in_f32),
        cmocka_unit_test(an_overlay_beyond_the_budget_is_refused),
        cmocka_unit_test(scale_0_and_no_apply_are_the_base),
        cmocka_unit_test(a_table_equal_to_the_served_one_changes_no_bit),
        cmocka_unit_test(a_replacement_equal_to_the_served_row_changes_no_bit),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
