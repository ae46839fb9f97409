/*
 * Models with gated delta nets in the engine: what a decode, a prefill, a scored prompt and a
 * verified draft give are the same bytes; small tensors of other types, other trunks and parts that
 * are not served; and the smallest projections alone move the answers.
 */
#include "support/engine_run.h"
#include "support/golden.h"
#include "support/long_memory.h"
#include "support/make_adapter.h"
#include "support/shell.h"
#include "support/test.h"

#include "base/alloc.h"
#include "base/half.h"

#include <jansson.h>
#include <stdio.h>
#include <string.h>

#define PROMPT 200
#define NEW    40
#define NEXT   SP_TEST_FIXTURES "/qwen3next"
#define DENSE  SP_TEST_FIXTURES "/qwen35"
#define VISION SP_TEST_FIXTURES "/qwen35moe-vl"

static sp_engine *open_engine(const char *model, sp_dtype precision, int32_t chunk,
                              const char *adapter)
{
    const sp_engine_adapter adapters[] = {{sizeof(sp_engine_adapter), "a", adapter}};
    sp_engine_options options;

    sp_engine_options_default(&options, sizeof options);
    options.model_dir = model;
    options.precision = precision;
    options.threads = 2;
    options.kv_tokens = 1024;
    options.step_rows = 256;
    options.prefill_chunk = chunk;
    options.prefix_cache = false;
    options.max_running = 4;
    return engine_run_open(&options, adapters, adapter ? 1 : 0);
}

static engine_run run_one(sp_engine *engine, bool adapted, const int32_t *tokens, int32_t n,
                          int32_t n_new, bool drafts)
{
    /* An answer of three different tokens repeats itself, so that drafts are found. */
    static const sp_logit_bias bias[] = {{11, 30.0f}, {12, 30.0f}, {13, 30.0f}};
    engine_run run = engine_run_init(adapted ? "a" : NULL, tokens, n, n_new);
    engine_run *list[] = {&run};

    run.keep_logits = true;
    run.request.ignore_eos = true;
    run.request.logit_bias = bias;
    run.request.n_logit_bias = 3;
    run.request.speculative = drafts ? SP_SPECULATIVE_ON : SP_SPECULATIVE_OFF;
    engine_run_submit(engine, &run);
    engine_run_all(engine, list, 1);
    return run;
}

/* ---- one row, one answer ------------------------------------------------------------------- */

/* Pairs of rank 64 on every linear module of the dense fixture's layers, or of rank 1 on one. */
static char *write_adapter(const char *only)
{
    static const struct {
        const char *module;
        int k_in, n_out;
        bool delta, attention;
    } modules[] = {
        {"linear_attn.in_proj_qkv", 64, 160, true, false},
        {"linear_attn.in_proj_z", 64, 96, true, false},
        {"linear_attn.in_proj_b", 64, 4, true, false},
        {"linear_attn.in_proj_a", 64, 4, true, false},
        {"linear_attn.out_proj", 96, 64, true, false},
        {"self_attn.q_proj", 64, 256, false, true},
        {"self_attn.k_proj", 64, 64, false, true},
        {"self_attn.v_proj", 64, 64, false, true},
        {"self_attn.o_proj", 128, 64, false, true},
        {"mlp.gate_proj", 64, 128, true, true},
        {"mlp.up_proj", 64, 128, true, true},
        {"mlp.down_proj", 128, 64, true, true},
    };
    make_adapter *adapter = make_adapter_create();
    int rank = only ? 1 : 64;
    char text[256];
    char *folder;

    snprintf(text, sizeof text,
             "{\"peft_type\": \"LORA\", \"r\": %d, \"lora_alpha\": %d, \"target_modules\": "
             "\"all-linear\"}",
             rank, only ? 1 : 4);
    make_adapter_config(adapter, text);
    for (int layer = 0; layer < 4; layer++)
        for (size_t m = 0; m < sizeof modules / sizeof *modules; m++) {
            char path[128];

            if (layer % 2 ? !modules[m].attention : !modules[m].delta)
                continue;
            if (only && strcmp(only, modules[m].module) != 0)
                continue;
            snprintf(path, sizeof path, "base_model.model.model.layers.%d.%s", layer,
                     modules[m].module);
            make_adapter_add_pair(adapter, path, rank, modules[m].k_in, modules[m].n_out,
                                  (uint64_t)layer * 100 + m);
        }
    folder = make_adapter_folder(adapter);
    make_adapter_destroy(adapter);
    return folder;
}

static void assert_same_logits(const engine_run *a, const engine_run *b, int32_t rows)
{
    assert_true(a->n_logits >= rows && b->n_logits >= rows);
    assert_memory_equal(a->logits, b->logits, (size_t)rows * (size_t)a->vocab * sizeof(float));
}

/* A greedy answer by decode; then its tokens as a prompt, and the same answer with drafts. */
static void check_ways(const char *model, sp_dtype precision, const char *adapter)
{
    static const int32_t chunks[] = {0, 1, 7, 64};
    sp_test_random random = {19};
    int32_t tokens[PROMPT + NEW];
    uint64_t rejected = 0, accepted = 0;
    engine_run decoded;
    sp_engine *engine = open_engine(model, precision, 0, adapter);

    engine_run_fill_prompt(&random, tokens, PROMPT, 500);
    decoded = run_one(engine, adapter != NULL, tokens, PROMPT, NEW, false);
    sp_engine_close(engine);
    memcpy(tokens + PROMPT, decoded.tokens, NEW * sizeof *tokens);
    for (size_t i = 0; i < sizeof chunks / sizeof *chunks; i++) {
        sp_engine_stats stats = {.struct_bytes = sizeof stats};
        engine_run prefilled, verified;

        engine = open_engine(model, precision, chunks[i], adapter);
        prefilled = run_one(engine, adapter != NULL, tokens, PROMPT + NEW - 1, 1, false);
        assert_same_logits(&decoded, &prefilled, PROMPT + NEW - 1);
        verified = run_one(engine, adapter != NULL, tokens, PROMPT, NEW, true);
        engine_run_assert_same(&decoded, &verified);
        sp_engine_get_stats(engine, &stats, NULL);
        rejected += stats.drafted_tokens - stats.accepted_tokens;
        accepted += stats.accepted_tokens;
        engine_run_free(&prefilled);
        engine_run_free(&verified);
        sp_engine_close(engine);
    }
    assert_true(rejected > 0 && accepted > 0);
    engine_run_free(&decoded);
}

static void decode_prefill_and_verify_agree(void **state)
{
    char *wide = write_adapter(NULL), *dense = long_memory_copy(DENSE);
    char *next = long_memory_copy(NEXT), *vision = long_memory_copy(VISION);
    char *const folders[] = {wide, dense, next, vision};

    (void)state;
    check_ways(dense, SP_DTYPE_BF16, wide);
    check_ways(dense, SP_DTYPE_F32, NULL);
    check_ways(next, SP_DTYPE_BF16, NEXT "/adapters/all-linear");
    check_ways(vision, SP_DTYPE_BF16, VISION "/adapters/gdn-in");
    for (size_t i = 0; i < sizeof folders / sizeof *folders; i++) {
        sp_test_remove_tree(folders[i]);
        sp_free(folders[i]);
    }
}

/* in_proj_a and in_proj_b have as few outputs as there are value heads. The first row of a sequence
 * has no state that could decay. */
static void the_smallest_projections_move_decode(void **state)
{
    static const char *const modules[] = {"linear_attn.in_proj_a", "linear_attn.in_proj_b"};
    const int32_t prompt[] = {5, 77, 300, 12, 9};

    (void)state;
    for (int i = 0; i < 2; i++) {
        char *folder = write_adapter(modules[i]);
        sp_engine *engine = open_engine(DENSE, SP_DTYPE_BF16, 0, folder);
        engine_run base = run_one(engine, false, prompt, 5, 3, false);
        engine_run adapted = run_one(engine, true, prompt, 5, 3, false);

        if (i == 0)
            assert_memory_equal(base.logits, adapted.logits, (size_t)base.vocab * sizeof(float));
        for (int32_t row = 1; row < 7; row++)
            assert_memory_not_equal(base.logits + row * base.vocab,
                                    adapted.logits + row * base.vocab,
                                    (size_t)base.vocab * sizeof(float));
        engine_run_free(&base);
        engine_run_free(&adapted);
        sp_engine_close(engine);
        sp_test_remove_tree(folder);
        sp_free(folder);
    }
}

/* ---- checkpoints --------------------------------------------------------------------------- */

static bool is_small(const char *name)
{
    static const char *const ends[] = {".A_log", ".dt_bias", "norm.weight"};
    bool small = false;

    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++) {
        size_t n = strlen(name), length = strlen(ends[i]);

        small |= n >= length && strcmp(name + n - length, ends[i]) == 0;
    }
    return small;
}

static void add_copy(make_adapter *file, const golden_tensor *t, const char *name, bool wide)
{
    const int d[] = {(int)t->shape[0], (int)t->shape[1], (int)t->shape[2]};
    const char *type = wide ? "F32" : t->dtype;
    void *to = t->n_dims == 1   ? make_adapter_add(file, name, type, 1, d[0])
               : t->n_dims == 2 ? make_adapter_add(file, name, type, 2, d[0], d[1])
                                : make_adapter_add(file, name, type, 3, d[0], d[1], d[2]);

    for (int64_t i = 0; wide && i < t->n; i++)
        ((float *)to)[i] = sp_bf16_to_f32(((const uint16_t *)t->data)[i]);
    if (!wide)
        memcpy(to, t->data, t->bytes);
}

/* Stacked experts, one by one; false: it is another tensor. */
static bool add_experts(make_adapter *file, const golden_tensor *t, const char *name)
{
    static const char *const parts[2][2] = {{"down", NULL}, {"gate", "up"}};
    const char *end = strstr(name, ".mlp.experts.");
    int fused = end && strcmp(end, ".mlp.experts.gate_up_proj") == 0;
    int rows = (int)t->shape[1] / (1 + fused), columns = (int)t->shape[2];
    size_t bytes = (size_t)rows * (size_t)columns * sizeof(uint16_t);
    const char *from = t->data;

    if (!end || t->n_dims != 3)
        return false;
    assert_string_equal(t->dtype, "BF16");
    for (int e = 0; e < (int)t->shape[0]; e++)
        for (int p = 0; p <= fused; p++, from += bytes) {
            char single[256];

            snprintf(single, sizeof single, "%.*s.mlp.experts.%d.%s_proj.weight", (int)(end - name),
                     name, e, parts[fused][p]);
            memcpy(make_adapter_add(file, single, t->dtype, 2, rows, columns), from, bytes);
        }
    return true;
}

/* The text part of the vision checkpoint under "model." with its small tensors in FP32, its experts
 * one by one, and an MTP layer. What ends with `nudged` is changed by less than BF16 can tell. */
static void write_text_weights(const char *folder, const char *nudged)
{
    static const char trunk[] = "model.language_model.";
    golden *from = golden_open("qwen35moe-vl/model.safetensors");
    make_adapter *file = make_adapter_create();
    unsigned char *bytes;
    size_t n;

    for (size_t i = 0; i < from->n_tensors; i++) {
        const golden_tensor *t = &from->tensors[i];
        char name[192];

        if (strncmp(t->name, "model.visual.", 13) == 0)
            continue;
        if (strncmp(t->name, trunk, sizeof trunk - 1) == 0)
            snprintf(name, sizeof name, "model.%s", t->name + sizeof trunk - 1);
        else
            snprintf(name, sizeof name, "%s", t->name);
        if (add_experts(file, t, name))
            continue;
        add_copy(file, t, name, is_small(name));
        if (nudged && strstr(name, nudged))
            for (int64_t j = 0; j < t->n; j++)
                ((float *)make_adapter_data(file, name, NULL))[j] *= 1.0f + 0x1p-10f;
    }
    make_adapter_add(file, "mtp.layers.0.mlp.up_proj.weight", "BF16", 2, 4, 4);
    bytes = make_adapter_bytes(file, &n);
    sp_test_write_file(folder, "model.safetensors", bytes, n);
    sp_free(bytes);
    make_adapter_destroy(file);
    golden_close(from);
}

static void write_json(const char *folder, const json_t *root)
{
    char *text = json_dumps(root, 0);

    assert_non_null(text);
    sp_test_write_file(folder, "config.json", text, strlen(text));
    free(text);
}

static json_t *read_config(const char *model)
{
    char path[512];
    json_t *root;

    snprintf(path, sizeof path, "%s/config.json", model);
    root = json_load_file(path, 0, NULL);
    assert_non_null(root);
    return root;
}

/* The configuration of the text-only class. */
static void write_text_config(const char *folder)
{
    json_t *root = read_config(VISION), *text = json_object_get(root, "text_config");

    json_object_set_new(text, "architectures", json_pack("[s]", "Qwen3_5MoeForCausalLM"));
    write_json(folder, text);
    json_decref(root);
}

static bool has_note(const sp_engine *engine, const char *words)
{
    const char *note;
    bool found = false;

    for (size_t i = 0; (note = sp_engine_note(engine, i)); i++)
        found |= strstr(note, words) != NULL;
    return found;
}

static void other_trunks_types_and_experts_give_the_same_bits(void **state)
{
    const int32_t prompt[] = {3, 4, 500, 60, 7, 8, 9, 10, 11};
    char *folder = sp_test_make_directory();
    sp_engine *vision, *text;
    engine_run a, b;

    (void)state;
    write_text_weights(folder, NULL);
    write_text_config(folder);
    vision = open_engine(VISION, SP_DTYPE_BF16, 0, VISION "/adapters/all-linear");
    text = open_engine(folder, SP_DTYPE_BF16, 0, VISION "/adapters/all-linear");
    assert_true(has_note(vision, "weights that nothing uses: model.visual."));
    assert_true(has_note(text, "weights that nothing uses: mtp.layers.0.mlp.up_proj.weight"));
    assert_true(has_note(text, "weights converted to BF16: 11 of F32")); /* norms of H and heads */
    a = run_one(vision, true, prompt, 9, 12, false);
    b = run_one(text, true, prompt, 9, 12, false);
    engine_run_assert_same(&a, &b);
    engine_run_free(&a);
    engine_run_free(&b);
    sp_engine_close(vision);
    sp_engine_close(text);
    sp_test_remove_tree(folder);
    sp_free(folder);
}

/* A_log, dt_bias and the gated norm are read as they are: a change of FP32 changes the answers. */
static void small_tensors_keep_their_bits(void **state)
{
    static const char *const names[] = {".A_log", ".dt_bias", "linear_attn.norm"};
    const int32_t prompt[] = {3, 4, 500};
    sp_engine *engine = open_engine(VISION, SP_DTYPE_F32, 0, NULL);
    engine_run plain = run_one(engine, false, prompt, 3, 1, false);

    (void)state;
    sp_engine_close(engine);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char *folder = sp_test_make_directory();
        engine_run nudged;

        write_text_weights(folder, names[i]);
        write_text_config(folder);
        engine = open_engine(folder, SP_DTYPE_F32, 0, NULL);
        nudged = run_one(engine, false, prompt, 3, 1, false);
        assert_memory_not_equal(plain.logits + 2 * plain.vocab, nudged.logits + 2 * plain.vocab,
                                (size_t)plain.vocab * sizeof(float));
        engine_run_free(&nudged);
        sp_engine_close(engine);
        sp_test_remove_tree(folder);
        sp_free(folder);
    }
    engine_run_free(&plain);
}

static void assert_refused(const char *model, sp_status want, const char *subject)
{
    sp_engine_options options;
    sp_engine *engine = NULL;
    sp_error error = {0};

    sp_engine_options_default(&options, sizeof options);
    options.model_dir = model;
    assert_int_equal(sp_engine_open(&options, NULL, 0, &engine, &error), want);
    assert_null(engine);
    if (strcmp(error.subject, subject) != 0)
        fail_msg("subject %s: %s", error.subject, error.text);
}

/* `value` is stolen. */
static void check_config(const char *field, json_t *value, sp_status want, const char *subject)
{
    char *folder = shell_copy_directory(DENSE);
    json_t *root = read_config(DENSE);

    json_object_set_new(root, field, value);
    write_json(folder, root);
    json_decref(root);
    assert_refused(folder, want, subject);
    sp_test_remove_tree(folder);
    sp_free(folder);
}

static void what_is_not_served_is_refused_by_name(void **state)
{
    json_t *linear = json_array();

    (void)state;
    for (int i = 0; i < 4; i++)
        json_array_append_new(linear, json_string("linear_attention"));
    check_config("layer_types", linear, SP_ERR_UNSUPPORTED, "layer_types");
    check_config("linear_conv_kernel_dim", json_integer(9), SP_ERR_UNSUPPORTED,
                 "linear_conv_kernel_dim");
    check_config("linear_conv_kernel_dim", json_integer(1), SP_ERR_UNSUPPORTED,
                 "linear_conv_kernel_dim");
    check_config("linear_conv_kernel_dim", json_integer(3), SP_ERR_MISMATCH,
                 "model.layers.0.linear_attn.conv1d.weight");
    check_config("linear_value_head_dim", json_integer(32), SP_ERR_MISMATCH,
                 "model.layers.0.linear_attn.in_proj_qkv.weight");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(decode_prefill_and_verify_agree),
        cmocka_unit_test(the_smallest_projections_move_decode),
        cmocka_unit_test(other_trunks_types_and_experts_give_the_same_bits),
        cmocka_unit_test(small_tensors_keep_their_bits),
        cmocka_unit_test(what_is_not_served_is_refused_by_name),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
