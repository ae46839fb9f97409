/*
 * Every adapter of the fixtures, of every family: those that must load have exactly the sites,
 * ranks, scales and elements that the file says by PEFT's rules, worked out here by a reader of
 * its own (tests/support/golden.c, POSIX regular expressions); those that must be refused have the
 * fitting code.
 */
#include "support/golden.h"
#include "support/test.h"

#include "base/half.h"

#include <sidepath/adapter.h>

#include <jansson.h>
#include <math.h>
#include <regex.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Those that are refused, by the rule that says so; all others must load. */
static const struct {
    const char *model, *adapter, *code;
} refused[] = {
    {"llama3", "dora", "dora"},
    {"qwen2", "dora", "dora"},
    {"qwen3-bias", "bias-all", "bias"},
    {"qwen3-bias", "bias-lora-only", "bias"},
    {"qwen3-tied", "alora", "unsupported-field"},
    {"qwen3-tied", "bias-lora-only", "bias"},
    {"qwen3-tied", "dora", "dora"},
    {"qwen3-tied", "ia3", "peft-type"},
    {"qwen3-tied", "loha", "peft-type"},
    {"qwen3-tied", "lokr", "peft-type"},
    {"qwen3-tied", "lora-bias", "bias"},
    {"qwen3-tied", "pickle-bin", "pickle-refused"},
    {"qwen3-tied", "prefix", "peft-type"},
    {"smollm", "dora", "dora"},
};

static const char *expected_code(const char *model, const char *adapter)
{
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        if (strcmp(refused[i].model, model) == 0 && strcmp(refused[i].adapter, adapter) == 0)
            return refused[i].code;
    }
    return NULL;
}

/* One adapter under test, and what was read of it independently. */
typedef struct context {
    const char *model, *name;
    sp_geometry *geometry;
    sp_adapter *adapter;
    json_t *config;
    golden *file;
    size_t n_expected; /* sites found in the file */
} context;

static json_t *read_json(const char *path)
{
    json_error_t error;
    json_t *root = json_load_file(path, 0, &error);

    if (!root)
        fail_msg("%s: %s", path, error.text);
    return root;
}

/* ---- PEFT's rules, again --------------------------------------------------------------------- */

/* The value of the first key that matches "^(.*\.)?(KEY)$". */
static double by_pattern(const json_t *patterns, const char *path, double fallback)
{
    const char *key;
    json_t *value;

    json_object_foreach((json_t *)(uintptr_t)patterns, key, value)
    {
        char text[512];
        regex_t regex;
        int missed;

        snprintf(text, sizeof text, "^(.*\\.)?(%s)$", key);
        assert_int_equal(regcomp(&regex, text, REG_EXTENDED | REG_NOSUB), 0);
        missed = regexec(&regex, path, 0, NULL, 0);
        regfree(&regex);
        if (!missed)
            return json_number_value(value);
    }
    return fallback;
}

static void rank_and_scale(const context *c, const char *path, int *out_rank, float *out_scale)
{
    double r = json_number_value(json_object_get(c->config, "r"));
    double alpha = json_number_value(json_object_get(c->config, "lora_alpha"));

    r = by_pattern(json_object_get(c->config, "rank_pattern"), path, r);
    alpha = by_pattern(json_object_get(c->config, "alpha_pattern"), path, alpha);
    *out_rank = (int)r;
    *out_scale = (float)(json_is_true(json_object_get(c->config, "use_rslora")) ? alpha / sqrt(r)
                                                                                : alpha / r);
}

/* ---- comparing ------------------------------------------------------------------------------- */

static double stored(const sp_factor *factor, int row, int col)
{
    int64_t index = row * factor->row_stride + col * factor->col_stride;
    const uint16_t *half = factor->data;

    if (factor->dtype == SP_DTYPE_F32)
        return (double)((const float *)factor->data)[index];
    return (double)(factor->dtype == SP_DTYPE_BF16 ? sp_bf16_to_f32(half[index])
                                                   : sp_f16_to_f32(half[index]));
}

static const sp_adapter_site *find_site(const context *c, int layer, const char *module, int expert)
{
    for (size_t i = 0; i < sp_adapter_n_sites(c->adapter); i++) {
        const sp_adapter_site *site = sp_adapter_site_at(c->adapter, i);

        if (site->layer == layer && site->expert == expert && strcmp(site->module, module) == 0)
            return site;
    }
    fail_msg("%s/%s: no site for layer %d, %s, expert %d", c->model, c->name, layer, module,
             expert);
    return NULL;
}

/* Where element (row, col) of a wanted factor lies in its tensor. */
typedef struct map {
    const golden_tensor *tensor;
    int64_t first, row_step, col_step;
    int rows, cols;
} map;

static void compare_factor(const context *c, const sp_factor *got, const map *want)
{
    assert_int_equal(got->rows, want->rows);
    assert_int_equal(got->cols, want->cols);
    assert_int_equal((uintptr_t)got->data % sp_dtype_bytes(got->dtype), 0);
    for (int i = 0; i < want->rows; i++) {
        for (int j = 0; j < want->cols; j++) {
            double value =
                golden_value(want->tensor, want->first + i * want->row_step + j * want->col_step);

            if (stored(got, i, j) != value)
                fail_msg("%s/%s: %s: element (%d, %d) is %g, not %g", c->model, c->name,
                         want->tensor->name, i, j, stored(got, i, j), value);
        }
    }
}

static void expect_site(context *c, int layer, const char *module, int expert, const char *path,
                        const map *a, const map *b)
{
    const sp_adapter_site *site = find_site(c, layer, module, expert);
    int rank;
    float scale;

    rank_and_scale(c, path, &rank, &scale);
    assert_int_equal(site->rank, rank);
    assert_true(site->scale == scale);
    compare_factor(c, &site->a, a);
    compare_factor(c, &site->b, b);
    c->n_expected++;
}

/* ---- what the file says ---------------------------------------------------------------------- */

static map whole(const golden_tensor *tensor)
{
    return (map){.tensor = tensor,
                 .row_step = tensor->shape[1],
                 .col_step = 1,
                 .rows = (int)tensor->shape[0],
                 .cols = (int)tensor->shape[1]};
}

static bool lists(const context *c, const char *parameter)
{
    const json_t *list = json_object_get(c->config, "target_parameters");

    for (size_t i = 0; i < json_array_size(list); i++) {
        if (strstr(json_string_value(json_array_get(list, i)), parameter))
            return true;
    }
    return false;
}

/* The fixtures' README: row e*r + j of A, column j*E + e of B; the first half of gate_up is gate.
 */
static void expect_fused(context *c, int layer, const char *trunk, const golden_tensor *a,
                         const golden_tensor *b, bool is_down)
{
    int experts = sp_geometry_experts(c->geometry);
    int rank = (int)a->shape[0] / experts;
    int half = is_down ? (int)b->shape[0] : (int)b->shape[0] / 2;
    char path[640];

    snprintf(path, sizeof path, "%s.%s", trunk, is_down ? "down_proj" : "gate_up_proj");
    for (int e = 0; e < experts; e++) {
        map want_a = {a, (int64_t)e * rank * a->shape[1], a->shape[1], 1, rank, (int)a->shape[1]};
        map want_b = {b, e, b->shape[1], experts, half, rank};

        if (is_down) {
            expect_site(c, layer, "mlp.experts.down_proj", e, path, &want_a, &want_b);
            continue;
        }
        expect_site(c, layer, "mlp.experts.gate_proj", e, path, &want_a, &want_b);
        want_b.first += half * b->shape[1];
        expect_site(c, layer, "mlp.experts.up_proj", e, path, &want_a, &want_b);
    }
}

static void expect_experts(context *c, int layer, const char *path, const golden_tensor *a,
                           const golden_tensor *b)
{
    const char *inner = strstr(path, ".base_layer");
    char trunk[512];
    bool is_down;

    snprintf(trunk, sizeof trunk, "%.*s", (int)(inner ? inner - path : (long)strlen(path)), path);
    if (inner)
        is_down = false;
    else if (golden_find(c->file, "base_model.model.%s.base_layer.lora_A.weight", path))
        is_down = true;
    else
        is_down = lists(c, "down_proj");
    expect_fused(c, layer, trunk, a, b, is_down);
}

/* The name without the parts that are not the module's path. */
static bool split_name(const char *name, const char *ending, char *out_path, size_t bytes)
{
    size_t n = strlen(name), length = strlen(ending);
    const char *start = strncmp(name, "base_model.model.", 17) == 0 ? name + 17 : name;

    if (n < length || strcmp(name + n - length, ending) != 0)
        return false;
    snprintf(out_path, bytes, "%.*s", (int)(name + n - length - start), start);
    return true;
}

static void expect_pair(context *c, const char *path, const golden_tensor *a,
                        const golden_tensor *b)
{
    const char *layers = strstr(path, "layers.");
    int layer = -1, expert = -1;
    const char *module;
    map want_a = whole(a), want_b = whole(b);
    char text[512];
    char *end;

    if (!layers) {
        module = strstr(path, "lm_head") ? "lm_head" : "embed_tokens";
        expect_site(c, -1, module, -1, path, &want_a, &want_b);
        return;
    }
    layer = (int)strtol(layers + 7, &end, 10);
    module = end + 1;
    if (strncmp(module, "mlp.experts", 11) == 0 &&
        (module[11] == '\0' || strcmp(module + 11, ".base_layer") == 0)) {
        expect_experts(c, layer, path, a, b);
        return;
    }
    if (strncmp(module, "mlp.experts.", 12) == 0) {
        expert = (int)strtol(module + 12, &end, 10);
        snprintf(text, sizeof text, "mlp.experts%s", end);
        module = text;
    }
    expect_site(c, layer, module, expert, path, &want_a, &want_b);
}

static void expect_pairs(context *c)
{
    for (size_t i = 0; i < c->file->n_tensors; i++) {
        const golden_tensor *a = &c->file->tensors[i];
        char path[512];

        if (split_name(a->name, ".lora_A.weight", path, sizeof path))
            expect_pair(
                c, path, a,
                golden_get(c->file, "%.*slora_B.weight", (int)(strlen(a->name) - 13), a->name));
        if (split_name(a->name, ".lora_embedding_A", path, sizeof path))
            expect_pair(
                c, path, a,
                golden_get(c->file, "%.*slora_embedding_B", (int)(strlen(a->name) - 16), a->name));
    }
}

/* ---- tables ---------------------------------------------------------------------------------- */

static void expect_table_factor(const context *c, const sp_factor *got, const golden_tensor *want)
{
    map everything;

    if (!want) {
        assert_null(got->data);
        return;
    }
    everything = whole(want);
    compare_factor(c, got, &everything);
}

static const golden_tensor *find_ending(const context *c, const char *ending)
{
    for (size_t i = 0; i < c->file->n_tensors; i++) {
        char path[512];

        if (split_name(c->file->tensors[i].name, ending, path, sizeof path))
            return &c->file->tensors[i];
    }
    return NULL;
}

static const json_t *token_list(const context *c, const char *module)
{
    const json_t *value = json_object_get(c->config, "trainable_token_indices");

    if (json_is_object(value))
        return json_object_get(value, module);
    return strcmp(module, "embed_tokens") == 0 ? value : NULL;
}

static size_t expect_table(const context *c, const char *module, size_t index)
{
    bool tied = sp_geometry_shape(c->geometry)->tied_embeddings;
    const sp_adapter_table *table = sp_adapter_table_at(c->adapter, index);
    char full[128], tokens[128];
    const golden_tensor *want_full, *want_tokens;
    const json_t *ids;

    snprintf(full, sizeof full, "%s.weight", module);
    snprintf(tokens, sizeof tokens, "%s.token_adapter.trainable_tokens_delta", module);
    want_full = find_ending(c, full);
    want_tokens = find_ending(c, tokens);
    ids = token_list(c, module);
    /* With tied embeddings the head's rows move with the trainable tokens. */
    if (!want_tokens && tied && strcmp(module, "lm_head") == 0) {
        want_tokens = find_ending(c, "embed_tokens.token_adapter.trainable_tokens_delta");
        ids = token_list(c, "embed_tokens");
    }
    if (!want_full && !want_tokens)
        return 0;
    assert_non_null(table);
    assert_string_equal(table->module, module);
    expect_table_factor(c, &table->full, want_full);
    expect_table_factor(c, &table->trainable, want_tokens);
    assert_int_equal(table->n_ids, want_tokens ? json_array_size(ids) : 0);
    for (int32_t i = 0; i < table->n_ids; i++)
        assert_int_equal(table->token_ids[i], json_integer_value(json_array_get(ids, (size_t)i)));
    return 1;
}

static void expect_tables(const context *c)
{
    size_t n = expect_table(c, "embed_tokens", 0);

    n += expect_table(c, "lm_head", n);
    assert_int_equal(sp_adapter_n_tables(c->adapter), n);
}

/* ---- each adapter ---------------------------------------------------------------------------- */

static sp_status open_adapter(const char *model, const char *folder, const char *name,
                              sp_geometry *geometry, sp_adapter **out_adapter, sp_error *error)
{
    sp_adapter_options options;
    char base[512], path[640];

    snprintf(base, sizeof base, "%s/%s", SP_TEST_FIXTURES, model);
    snprintf(path, sizeof path, "%s/%s/%s", base, folder, name);
    sp_adapter_options_default(&options, sizeof options);
    options.geometry = geometry;
    options.base_dir = base;
    return sp_adapter_open(path, &options, out_adapter, error);
}

static void sites_ascend(const sp_adapter *adapter)
{
    for (size_t i = 1; i < sp_adapter_n_sites(adapter); i++) {
        const sp_adapter_site *a = sp_adapter_site_at(adapter, i - 1);
        const sp_adapter_site *b = sp_adapter_site_at(adapter, i);

        assert_true(a->site < b->site);
        assert_true(a->layer <= b->layer);
        assert_true(strcmp(a->module, b->module) != 0 || a->layer < b->layer ||
                    a->expert < b->expert);
    }
}

static void check_loaded(context *c)
{
    char path[640];

    snprintf(path, sizeof path, "%s/%s/adapters/%s/adapter_config.json", SP_TEST_FIXTURES, c->model,
             c->name);
    c->config = read_json(path);
    snprintf(path, sizeof path, "%s/adapters/%s/adapter_model.safetensors", c->model, c->name);
    c->file = golden_open(path);
    assert_string_equal(sp_adapter_name(c->adapter), c->name);
    expect_pairs(c);
    assert_int_equal(sp_adapter_n_sites(c->adapter), c->n_expected);
    sites_ascend(c->adapter);
    expect_tables(c);
    golden_close(c->file);
    json_decref(c->config);
}

static void check_adapter(const char *model, const char *name, const char *expect,
                          sp_geometry *geometry)
{
    context c = {.model = model, .name = name, .geometry = geometry};
    const char *code = expected_code(model, name);
    sp_error error;
    sp_status status = open_adapter(model, "adapters", name, geometry, &c.adapter, &error);

    if (code) {
        assert_string_not_equal(expect, "load");
        assert_int_not_equal(status, SP_OK);
        assert_string_equal(error.code, code);
        assert_null(c.adapter);
        return;
    }
    assert_string_not_equal(expect, "reject");
    assert_ok(status, &error);
    check_loaded(&c);
    sp_adapter_release(c.adapter);
}

static void every_adapter(void **state)
{
    json_t *index = read_json(SP_TEST_FIXTURES "/index.json");
    const char *model;
    json_t *entry;
    size_t n = 0;

    (void)state;
    json_object_foreach(json_object_get(index, "models"), model, entry)
    {
        char path[512];
        sp_geometry *geometry;
        sp_error error;
        const char *name;
        json_t *adapter;

        snprintf(path, sizeof path, "%s/%s", SP_TEST_FIXTURES, model);
        assert_ok(sp_geometry_open(path, &geometry, &error), &error);
        json_object_foreach(json_object_get(entry, "adapters"), name, adapter)
        {
            check_adapter(model, name, json_string_value(json_object_get(adapter, "expect")),
                          geometry);
            n++;
        }
        sp_geometry_release(geometry);
    }
    assert_int_equal(n, 150);
    json_decref(index);
}

/* ---- malformed ones -------------------------------------------------------------------------- */

/* The code, and a word that the text must have. NULL: loads exactly, as the rules allow. */
static const struct {
    const char *name, *code, *word;
} malformed[] = {
    {"missing-lora-b", "unpaired-tensor", "lora_B"},
    {"missing-lora-a", "unpaired-tensor", "lora_A"},
    {"bad-in-features", "shape-mismatch", "[4, 64]"},
    {"bad-out-features", "shape-mismatch", "[128, 4]"},
    {"a-b-rank-differ", "shape-mismatch", "rank 2"},
    {"three-dims", "shape-mismatch", "3 dimensions"},
    {"layer-out-of-range", "layer-out-of-range", "layer 99"},
    {"unknown-module", "unsupported-module", "self_attn.qq_proj"},
    {"unknown-suffix", "unrecognized-tensor", "lora_C.weight"},
    {"no-prefix", NULL, NULL},
    {"int-dtype", "unsupported-dtype", "I16"},
    {"nan-value", "non-finite", "nan"},
    {"empty", "empty-adapter", "no tensors"},
    {"truncated-data", "truncated", "8168"},
    {"truncated-header", "truncated", "inside its header"},
    {"seven-bytes", "truncated", "7 bytes"},
    {"zero-bytes", "truncated", "0 bytes"},
    {"header-length-huge", "header-malformed", "9223372036854775807"},
    {"header-length-past-end", "truncated", "inside its header"},
    {"header-not-json", "header-malformed", "brace"},
    {"offset-past-end", "header-malformed", "beyond the file"},
    {"offset-reversed", "header-malformed", "end before they begin"},
    {"offset-negative", "header-malformed", "data_offsets"},
    {"offset-size-mismatch", "header-malformed", "1024 bytes"},
    {"shape-overflow", "header-malformed", "shape"},
    {"duplicate-key", "duplicate-key", "twice"},
    {"config-rank-too-big", "rank-mismatch", "rank 8"},
    {"config-r-zero", "bad-rank", "\"r\""},
    {"config-r-negative", "bad-rank", "\"r\""},
    {"config-r-string", "bad-rank", "\"r\""},
    {"config-no-r", "bad-rank", "missing"},
    {"config-no-alpha", "bad-alpha", "missing"},
    {"config-no-peft-type", NULL, NULL},
    {"config-peft-type-unknown", "peft-type", "FOO"},
    {"config-not-json", "config-malformed", "byte"},
    {"config-empty", "config-malformed", "byte"},
    {"config-missing", "config-missing", "adapter_config.json"},
    {"weights-missing", "weights-missing", "adapter_model.safetensors"},
};

static void every_malformed_adapter(void **state)
{
    json_t *index = read_json(SP_TEST_FIXTURES "/qwen3-tied/malformed/index.json");
    sp_geometry *geometry;
    sp_error error;

    (void)state;
    assert_int_equal(json_object_size(index), sizeof malformed / sizeof *malformed);
    assert_ok(sp_geometry_open(SP_TEST_FIXTURES "/qwen3-tied", &geometry, &error), &error);
    for (size_t i = 0; i < sizeof malformed / sizeof *malformed; i++) {
        sp_adapter *adapter = NULL;
        sp_status status;

        assert_non_null(json_object_get(index, malformed[i].name));
        status =
            open_adapter("qwen3-tied", "malformed", malformed[i].name, geometry, &adapter, &error);
        if (!malformed[i].code) {
            assert_ok(status, &error);
            assert_int_equal(sp_adapter_n_sites(adapter), 8);
            sp_adapter_release(adapter);
            continue;
        }
        if (status == SP_OK || strcmp(error.code, malformed[i].code) != 0 ||
            !strstr(error.text, malformed[i].word))
            fail_msg("%s: %s: %s", malformed[i].name, error.code, error.text);
        assert_null(adapter);
    }
    sp_geometry_release(geometry);
    json_decref(index);
}

/* The demo's adapters: 6 layers, seven modules, scale 2, ranks 16, 16 and 8. */
static void demo_adapters(void **state)
{
    static const struct {
        const char *name;
        int rank;
    } adapters[] = {{"scripture", 16}, {"csource", 16}, {"sqldoc", 8}};
    sp_geometry *geometry;
    sp_error error;

    (void)state;
    assert_ok(sp_geometry_open(SP_TEST_DEMO "/base", &geometry, &error), &error);
    for (size_t i = 0; i < 3; i++) {
        sp_adapter_options options;
        sp_adapter *adapter;
        char path[512];

        sp_adapter_options_default(&options, sizeof options);
        options.geometry = geometry;
        snprintf(path, sizeof path, "%s/adapters/%s/", SP_TEST_DEMO, adapters[i].name);
        assert_ok(sp_adapter_open(path, &options, &adapter, &error), &error);
        assert_string_equal(sp_adapter_name(adapter), adapters[i].name);
        assert_int_equal(sp_adapter_n_sites(adapter), 42);
        assert_int_equal(sp_adapter_rank_max(adapter), adapters[i].rank);
        assert_int_equal(sp_adapter_modules(adapter), 0x380f);
        sp_adapter_release(adapter);
    }
    sp_geometry_release(geometry);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_adapter),
        cmocka_unit_test(every_malformed_adapter),
        cmocka_unit_test(demo_adapters),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
