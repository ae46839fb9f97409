/*
 * The families beyond the fixtures: random checkpoints with biases, linear scaling, heads of their
 * own width, layers that do not rotate and dense layers among those with experts, against a forward
 * pass in double precision that is written here from the formulas. And bases of F16 and F32, or
 * with stacked experts, against the same numbers in BF16, one by one.
 */
#include "support/engine_run.h"
#include "support/golden.h"
#include "support/make_adapter.h"
#include "support/test.h"

#include "base/alloc.h"
#include "base/half.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

enum { LAYERS = 3, HIDDEN = 48, HEADS = 3, KV_HEADS = 1, INNER = 80, VOCAB = 96, ROWS = 45 };
enum { EXPERTS = 6, CHOSEN = 3, EXPERT_INNER = 20 };

#define LOGIT_ERROR 1e-3 /* as with the fixtures */
#define EPSILON     1e-5
#define THETA       10000.0

typedef struct model_case {
    const char *label, *architecture, *fields; /* of config.json, beside the sizes */
    int head_dim;
    bool qkv_bias, o_bias, mlp_bias, tied;
    bool stays[LAYERS];
    double linear;    /* the factor of a linear scaling; 0: none */
    double llama3[3]; /* factor, low, high; 0: none */
    double original;  /* positions of llama3 */
    bool head_norms, has_experts[LAYERS], normalised;
} model_case;

static const model_case cases[] = {
    {.label = "Llama, biases, linear scaling",
     .architecture = "LlamaForCausalLM",
     .fields = ",\"attention_bias\":true,\"mlp_bias\":true,\"rope_theta\":10000.0,"
               "\"rope_scaling\":{\"type\":\"linear\",\"factor\":4.0}",
     .head_dim = 16,
     .qkv_bias = true,
     .o_bias = true,
     .mlp_bias = true,
     .linear = 4},
    {.label = "Llama, llama3 scaling",
     .architecture = "LlamaForCausalLM",
     .fields = ",\"rope_theta\":10000.0,\"rope_scaling\":{\"rope_type\":\"llama3\",\"factor\":8,"
               "\"low_freq_factor\":1,\"high_freq_factor\":4,"
               "\"original_max_position_embeddings\":60}",
     .head_dim = 16,
     .llama3 = {8, 1, 4},
     .original = 60},
    {.label = "Mistral, wide heads",
     .architecture = "MistralForCausalLM",
     .fields = ",\"head_dim\":32,\"rope_theta\":10000.0,\"sliding_window\":null",
     .head_dim = 32},
    {.label = "Qwen2",
     .architecture = "Qwen2ForCausalLM",
     .fields = ",\"rope_theta\":10000.0,\"tie_word_embeddings\":true",
     .head_dim = 16,
     .qkv_bias = true,
     .tied = true},
    {.label = "SmolLM3",
     .architecture = "SmolLM3ForCausalLM",
     .fields = ",\"rope_theta\":10000.0,\"no_rope_layers\":[1,0,1]",
     .head_dim = 16,
     .tied = true,
     .stays = {false, true, false}},
    {.label = "Qwen3-MoE, a dense layer",
     .architecture = "Qwen3MoeForCausalLM",
     .fields = ",\"head_dim\":16,\"rope_theta\":10000.0,\"num_experts\":6,"
               "\"num_experts_per_tok\":3,\"moe_intermediate_size\":20,\"norm_topk_prob\":true,"
               "\"mlp_only_layers\":[1]",
     .head_dim = 16,
     .head_norms = true,
     .has_experts = {true, false, true},
     .normalised = true},
    {.label = "Qwen3-MoE, every second layer",
     .architecture = "Qwen3MoeForCausalLM",
     .fields = ",\"head_dim\":16,\"rope_theta\":10000.0,\"num_experts\":6,"
               "\"num_experts_per_tok\":3,\"moe_intermediate_size\":20,"
               "\"decoder_sparse_step\":2,\"tie_word_embeddings\":true",
     .head_dim = 16,
     .tied = true,
     .head_norms = true,
     .has_experts = {false, true, false}},
};

/* How a checkpoint holds what a case describes. */
typedef struct storage {
    const char *type;
    bool stacked;     /* experts in two tensors a layer */
    const char *omit; /* a tensor that is left out */
    bool turned;      /* stacked ones have their last two dimensions swapped */
} storage;

/* ---- a checkpoint -------------------------------------------------------------------------- */

/* One tensor around `mean`; the values are numbers of BF16, whatever the type. */
static void add_tensor(make_adapter *file, sp_test_random *random, const char *type,
                       const char *name, int rows, int columns, float spread, float mean)
{
    int n = rows * (columns ? columns : 1);
    void *data = columns ? make_adapter_add(file, name, type, 2, rows, columns)
                         : make_adapter_add(file, name, type, 1, rows);

    for (int i = 0; i < n; i++) {
        float value = sp_bf16_to_f32(sp_f32_to_bf16(mean + spread * sp_test_float(random)));

        if (strcmp(type, "F32") == 0)
            ((float *)data)[i] = value;
        else
            ((uint16_t *)data)[i] =
                strcmp(type, "F16") == 0 ? sp_f32_to_f16(value) : sp_f32_to_bf16(value);
    }
}

static void add_linear(make_adapter *file, sp_test_random *random, const char *type, int layer,
                       const char *module, int outputs, int inputs, bool bias)
{
    char name[128];

    snprintf(name, sizeof name, "model.layers.%d.%s.weight", layer, module);
    add_tensor(file, random, type, name, outputs, inputs, 0.3f, 0);
    snprintf(name, sizeof name, "model.layers.%d.%s.bias", layer, module);
    if (bias)
        add_tensor(file, random, type, name, outputs, 0, 0.5f, 0);
}

static void add_norm(make_adapter *file, sp_test_random *random, const char *type, int layer,
                     const char *module, int width)
{
    char name[128];

    snprintf(name, sizeof name, "model.layers.%d.%s.weight", layer, module);
    add_tensor(file, random, type, name, width, 0, 0.3f, 1);
}

/* The numbers of one expert's maps are drawn in one order, whatever holds them. */
static void add_experts(make_adapter *file, sp_test_random *random, const storage *how, int layer)
{
    enum { ELEMENTS = EXPERT_INNER * HIDDEN };
    static const char *const maps[] = {"gate_proj", "up_proj", "down_proj"};
    make_adapter *apart = how->stacked ? make_adapter_create() : file;
    size_t bytes = ELEMENTS * (strcmp(how->type, "F32") == 0 ? 4u : 2u);
    char *gate_up = NULL, *down = NULL;
    char name[128];

    if (how->stacked) {
        snprintf(name, sizeof name, "model.layers.%d.mlp.experts.gate_up_proj", layer);
        gate_up = make_adapter_add(file, name, how->type, 3, EXPERTS,
                                   how->turned ? HIDDEN : 2 * EXPERT_INNER,
                                   how->turned ? 2 * EXPERT_INNER : HIDDEN);
        snprintf(name, sizeof name, "model.layers.%d.mlp.experts.down_proj", layer);
        down = make_adapter_add(file, name, how->type, 3, EXPERTS, HIDDEN, EXPERT_INNER);
    }
    for (int e = 0; e < EXPERTS; e++)
        for (int m = 0; m < 3; m++) {
            char *to = m < 2 ? gate_up + (size_t)(2 * e + m) * bytes : down + (size_t)e * bytes;

            snprintf(name, sizeof name, "model.layers.%d.mlp.experts.%d.%s.weight", layer, e,
                     maps[m]);
            if (how->omit && strcmp(how->omit, name) == 0)
                continue;
            add_tensor(apart, random, how->type, name, m < 2 ? EXPERT_INNER : HIDDEN,
                       m < 2 ? HIDDEN : EXPERT_INNER, 0.3f, 0);
            if (how->stacked)
                memcpy(to, make_adapter_data(apart, name, NULL), bytes);
        }
    if (how->stacked)
        make_adapter_destroy(apart);
}

static void add_ffn(make_adapter *file, sp_test_random *random, const model_case *c,
                    const storage *how, int layer)
{
    if (c->has_experts[layer]) {
        add_linear(file, random, how->type, layer, "mlp.gate", EXPERTS, HIDDEN, false);
        add_experts(file, random, how, layer);
        return;
    }
    add_linear(file, random, how->type, layer, "mlp.gate_proj", INNER, HIDDEN, c->mlp_bias);
    add_linear(file, random, how->type, layer, "mlp.up_proj", INNER, HIDDEN, c->mlp_bias);
    add_linear(file, random, how->type, layer, "mlp.down_proj", HIDDEN, INNER, c->mlp_bias);
}

static void write_config(const model_case *c, const char *folder)
{
    char text[1024];
    int n = snprintf(text, sizeof text,
                     "{\"architectures\":[\"%s\"],\"num_hidden_layers\":%d,\"hidden_size\":%d,"
                     "\"num_attention_heads\":%d,\"num_key_value_heads\":%d,"
                     "\"intermediate_size\":%d,\"vocab_size\":%d,\"max_position_embeddings\":256,"
                     "\"rms_norm_eps\":1e-5%s}",
                     c->architecture, LAYERS, HIDDEN, HEADS, KV_HEADS, INNER, VOCAB, c->fields);

    sp_test_write_file(folder, "config.json", text, (size_t)n);
}

/* The folder of a checkpoint; the caller removes and frees it. */
static char *write_stored(const model_case *c, const storage *how)
{
    const char *type = how->type;
    char *folder = sp_test_make_directory();
    make_adapter *file = make_adapter_create();
    sp_test_random random = {2026};
    int q = HEADS * c->head_dim, kv = KV_HEADS * c->head_dim;
    unsigned char *bytes;
    size_t n;

    add_tensor(file, &random, type, "model.embed_tokens.weight", VOCAB, HIDDEN, 0.5f, 0);
    add_tensor(file, &random, type, "model.norm.weight", HIDDEN, 0, 0.3f, 1);
    if (!c->tied)
        add_tensor(file, &random, type, "lm_head.weight", VOCAB, HIDDEN, 0.4f, 0);
    for (int layer = 0; layer < LAYERS; layer++) {
        add_norm(file, &random, type, layer, "input_layernorm", HIDDEN);
        add_linear(file, &random, type, layer, "self_attn.q_proj", q, HIDDEN, c->qkv_bias);
        add_linear(file, &random, type, layer, "self_attn.k_proj", kv, HIDDEN, c->qkv_bias);
        add_linear(file, &random, type, layer, "self_attn.v_proj", kv, HIDDEN, c->qkv_bias);
        add_linear(file, &random, type, layer, "self_attn.o_proj", HIDDEN, q, c->o_bias);
        if (c->head_norms) {
            add_norm(file, &random, type, layer, "self_attn.q_norm", c->head_dim);
            add_norm(file, &random, type, layer, "self_attn.k_norm", c->head_dim);
        }
        add_norm(file, &random, type, layer, "post_attention_layernorm", HIDDEN);
        add_ffn(file, &random, c, how, layer);
    }
    bytes = make_adapter_bytes(file, &n);
    sp_test_write_file(folder, "model.safetensors", bytes, n);
    write_config(c, folder);
    sp_free(bytes);
    make_adapter_destroy(file);
    return folder;
}

static char *write_model(const model_case *c, const char *type)
{
    const storage how = {.type = type};

    return write_stored(c, &how);
}

static void remove_model(char *folder)
{
    sp_test_remove_tree(folder);
    sp_free(folder);
}

/* ---- the pass in double -------------------------------------------------------------------- */

typedef struct reference {
    const model_case *model;
    const golden *weights;
    bool never_rotates; /* a fault, to see that the comparison notices it */
} reference;

/* y[row] = x[row] · weightᵀ + bias, of a module ("layers.0.mlp.up_proj"). */
static void linear(const reference *r, const char *module, const double *x, int k, double *y, int n)
{
    const golden_tensor *w = golden_get(r->weights, "model.%s.weight", module);
    const golden_tensor *bias = golden_find(r->weights, "model.%s.bias", module);

    for (int row = 0; row < ROWS; row++)
        for (int j = 0; j < n; j++) {
            double sum = bias ? golden_value(bias, j) : 0;

            for (int i = 0; i < k; i++)
                sum += x[row * k + i] * golden_value(w, (int64_t)j * k + i);
            y[row * n + j] = sum;
        }
}

/* n vectors of `width`. */
static void norm_vectors(const reference *r, const char *module, const double *x, double *y, int n,
                         int width)
{
    const golden_tensor *w = golden_get(r->weights, "model.%s.weight", module);

    for (int v = 0; v < n; v++) {
        double square = 0;

        for (int i = 0; i < width; i++)
            square += x[v * width + i] * x[v * width + i];
        for (int i = 0; i < width; i++)
            y[v * width + i] =
                x[v * width + i] / sqrt(square / width + EPSILON) * golden_value(w, i);
    }
}

static void norm(const reference *r, const char *module, const double *x, double *y)
{
    norm_vectors(r, module, x, y, ROWS, HIDDEN);
}

static double frequency(const model_case *c, int pair)
{
    double f = pow(THETA, -2.0 * pair / c->head_dim);
    double turns = c->original * f / (2 * acos(-1)); /* in the original context */
    double s;

    if (c->linear > 0)
        return f / c->linear;
    if (!(c->llama3[0] > 0))
        return f;
    s = (turns - c->llama3[1]) / (c->llama3[2] - c->llama3[1]);
    s = s < 0 ? 0 : s > 1 ? 1 : s;
    return f / c->llama3[0] + s * (f - f / c->llama3[0]);
}

static void rotate(const model_case *c, double *x, int heads)
{
    int d = c->head_dim;

    for (int row = 0; row < ROWS; row++)
        for (int h = 0; h < heads; h++)
            for (int i = 0; i < d / 2; i++) {
                double *a = &x[(row * heads + h) * d + i], *b = a + d / 2, was = *a;
                double angle = row * frequency(c, i);

                *a = was * cos(angle) - *b * sin(angle);
                *b = *b * cos(angle) + was * sin(angle);
            }
}

/* One head of one row. */
static void attend(int d, const double *q, const double *k, const double *v, int row, double *out)
{
    double weights[ROWS], largest = -1e300, total = 0;

    for (int t = 0; t <= row; t++) {
        weights[t] = 0;
        for (int i = 0; i < d; i++)
            weights[t] += q[i] * k[t * KV_HEADS * d + i] / sqrt(d);
        largest = fmax(largest, weights[t]);
    }
    for (int t = 0; t <= row; t++)
        total += weights[t] = exp(weights[t] - largest);
    for (int i = 0; i < d; i++) {
        out[i] = 0;
        for (int t = 0; t <= row; t++)
            out[i] += weights[t] / total * v[t * KV_HEADS * d + i];
    }
}

/* y = the FFN that the weights of `prefix` are: "layers.0.mlp" or "layers.0.mlp.experts.3". */
static void run_ffn(const reference *r, const char *prefix, int inner, const double *x, double *y)
{
    static double gate[ROWS * 128], up[ROWS * 128];
    char name[96];

    snprintf(name, sizeof name, "%s.gate_proj", prefix);
    linear(r, name, x, HIDDEN, gate, inner);
    snprintf(name, sizeof name, "%s.up_proj", prefix);
    linear(r, name, x, HIDDEN, up, inner);
    for (int i = 0; i < ROWS * inner; i++)
        gate[i] = gate[i] / (1 + exp(-gate[i])) * up[i];
    snprintf(name, sizeof name, "%s.down_proj", prefix);
    linear(r, name, gate, inner, y, HIDDEN);
}

/* The weight of each expert for a row; 0: it was not chosen. */
static void weigh(const reference *r, const double *logits, double *weights)
{
    double total = 0;

    for (int e = 0; e < EXPERTS; e++) {
        int above = 0;

        for (int other = 0; other < EXPERTS; other++)
            above += logits[other] > logits[e];
        weights[e] = above < CHOSEN ? exp(logits[e]) : 0;
        total += above < CHOSEN || !r->model->normalised ? exp(logits[e]) : 0;
    }
    for (int e = 0; e < EXPERTS; e++)
        weights[e] /= total;
}

static void run_experts(const reference *r, int layer, const double *x, double *y)
{
    static double logits[ROWS * EXPERTS], weights[ROWS * EXPERTS], part[ROWS * HIDDEN];
    char name[64];

    snprintf(name, sizeof name, "layers.%d.mlp.gate", layer);
    linear(r, name, x, HIDDEN, logits, EXPERTS);
    for (int row = 0; row < ROWS; row++)
        weigh(r, &logits[row * EXPERTS], &weights[row * EXPERTS]);
    memset(y, 0, ROWS * HIDDEN * sizeof *y);
    for (int e = 0; e < EXPERTS; e++) {
        snprintf(name, sizeof name, "layers.%d.mlp.experts.%d", layer, e);
        run_ffn(r, name, EXPERT_INNER, x, part);
        for (int i = 0; i < ROWS * HIDDEN; i++)
            y[i] += weights[i / HIDDEN * EXPERTS + e] * part[i];
    }
}

static void run_layer(const reference *r, int layer, double *residual)
{
    static double x[ROWS * 128], q[ROWS * 128], k[ROWS * 128], v[ROWS * 128], y[ROWS * 128];
    const model_case *c = r->model;
    int d = c->head_dim;
    char name[64];

#define MODULE(text) (snprintf(name, sizeof name, "layers.%d." text, layer), name)
    norm(r, MODULE("input_layernorm"), residual, x);
    linear(r, MODULE("self_attn.q_proj"), x, HIDDEN, q, HEADS * d);
    linear(r, MODULE("self_attn.k_proj"), x, HIDDEN, k, KV_HEADS * d);
    linear(r, MODULE("self_attn.v_proj"), x, HIDDEN, v, KV_HEADS * d);
    if (c->head_norms) {
        norm_vectors(r, MODULE("self_attn.q_norm"), q, q, ROWS * HEADS, d);
        norm_vectors(r, MODULE("self_attn.k_norm"), k, k, ROWS * KV_HEADS, d);
    }
    if (!c->stays[layer] && !r->never_rotates) {
        rotate(c, q, HEADS);
        rotate(c, k, KV_HEADS);
    }
    for (int row = 0; row < ROWS; row++)
        for (int h = 0; h < HEADS; h++)
            attend(d, &q[(row * HEADS + h) * d], k, v, row, &x[(row * HEADS + h) * d]);
    linear(r, MODULE("self_attn.o_proj"), x, HEADS * d, y, HIDDEN);
    for (int i = 0; i < ROWS * HIDDEN; i++)
        residual[i] += y[i];
    norm(r, MODULE("post_attention_layernorm"), residual, x);
    if (c->has_experts[layer])
        run_experts(r, layer, x, y);
    else
        run_ffn(r, MODULE("mlp"), INNER, x, y);
    for (int i = 0; i < ROWS * HIDDEN; i++)
        residual[i] += y[i];
#undef MODULE
}

static void run_reference(const reference *r, const int32_t *tokens, double *out_logits)
{
    static double residual[ROWS * HIDDEN], x[ROWS * HIDDEN];
    const golden_tensor *embed = golden_get(r->weights, "model.embed_tokens.weight");
    const golden_tensor *head = r->model->tied ? embed : golden_get(r->weights, "lm_head.weight");

    for (int row = 0; row < ROWS; row++)
        for (int i = 0; i < HIDDEN; i++)
            residual[row * HIDDEN + i] = golden_value(embed, (int64_t)tokens[row] * HIDDEN + i);
    for (int layer = 0; layer < LAYERS; layer++)
        run_layer(r, layer, residual);
    norm(r, "norm", residual, x);
    for (int row = 0; row < ROWS; row++)
        for (int j = 0; j < VOCAB; j++) {
            double sum = 0;

            for (int i = 0; i < HIDDEN; i++)
                sum += x[row * HIDDEN + i] * golden_value(head, (int64_t)j * HIDDEN + i);
            out_logits[row * VOCAB + j] = sum;
        }
}

/* ---- the comparison ------------------------------------------------------------------------ */

static engine_run run_engine(const char *folder, sp_dtype precision, const int32_t *tokens,
                             const char *note)
{
    sp_engine_options options;
    sp_engine *engine;

    sp_engine_options_default(&options, sizeof options);
    options.model_dir = folder;
    options.precision = precision;
    options.threads = 2;
    options.max_loras = 0;
    options.kv_tokens = 256;
    options.prefill_chunk = 19;
    engine = engine_run_open(&options, NULL, 0);
    if (note)
        assert_string_equal(sp_engine_note(engine, 0), note);
    else
        assert_null(sp_engine_note(engine, 0));
    return engine_run_alone(engine, NULL, tokens, ROWS, 1, true);
}

static double largest_error(const engine_run *run, const double *expected)
{
    double worst = 0;

    assert_int_equal(run->n_logits, ROWS);
    for (int i = 0; i < ROWS * VOCAB; i++) {
        double error = fabs((double)run->logits[i] - expected[i]);

        if (!(error <= worst))
            worst = error;
    }
    return worst;
}

static void fill_prompt(int32_t *tokens)
{
    sp_test_random random = {5};

    engine_run_fill_prompt(&random, tokens, ROWS, VOCAB);
}

static void logits_match_double(void **state)
{
    static double expected[ROWS * VOCAB];
    int32_t tokens[ROWS];

    (void)state;
    fill_prompt(tokens);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char *folder = write_model(&cases[i], "BF16"), path[600];
        engine_run run = run_engine(folder, SP_DTYPE_F32, tokens, NULL);
        reference r = {.model = &cases[i]};
        golden *weights;
        double error;

        snprintf(path, sizeof path, "%s/model.safetensors", folder);
        r.weights = weights = golden_open(path);
        run_reference(&r, tokens, expected);
        error = largest_error(&run, expected);
        print_message("%s: largest error %.2g\n", cases[i].label, error);
        assert_true(error <= LOGIT_ERROR);
        r.never_rotates = true;
        run_reference(&r, tokens, expected);
        assert_true(largest_error(&run, expected) > 100 * LOGIT_ERROR);
        golden_close(weights);
        engine_run_free(&run);
        remove_model(folder);
    }
}

/* ---- types --------------------------------------------------------------------------------- */

/* The weights are numbers of BF16 that F32 has exactly, and F16 but for the smallest. */
static void other_types_are_converted(void **state)
{
    static const char *const types[] = {"F32", "F16"};
    static const char *const notes[] = {"weights converted to BF16: 29 of F32, 0 of F16",
                                        "weights converted to BF16: 0 of F32, 29 of F16"};
    const model_case *c = &cases[4]; /* 2 tensors, and 9 in each of 3 layers */
    int32_t tokens[ROWS];

    (void)state;
    fill_prompt(tokens);
    for (int p = 0; p < 2; p++) {
        sp_dtype precision = p ? SP_DTYPE_F32 : SP_DTYPE_BF16;
        char *folder = write_model(c, "BF16");
        engine_run plain = run_engine(folder, precision, tokens, NULL);

        for (int t = 0; t < 2; t++) {
            char *other = write_model(c, types[t]);
            engine_run run = run_engine(other, precision, tokens, notes[t]);
            double worst = 0;

            for (int i = 0; i < ROWS * VOCAB; i++)
                worst = fmax(worst, fabs((double)run.logits[i] - (double)plain.logits[i]));
            if (t == 0)
                engine_run_assert_same(&plain, &run);
            assert_true(worst <= (precision == SP_DTYPE_F32 ? LOGIT_ERROR : 0.1));
            engine_run_free(&run);
            remove_model(other);
        }
        engine_run_free(&plain);
        remove_model(folder);
    }
}

/* Copies take memory that mapped weights do not: they are held against what may be taken. */
static void converted_weights_are_held_against_memory(void **state)
{
    char *folder = write_model(&cases[4], "F32");
    size_t bytes = sp_alloc_bytes();
    char weights[1024];
    struct stat file;
    sp_engine_options options;
    sp_engine *engine;
    sp_error error;

    (void)state;
    sp_engine_options_default(&options, sizeof options);
    options.model_dir = folder;
    options.threads = 1;
    options.max_loras = 0;
    options.memory_bytes = 1000;
    assert_int_equal(sp_engine_open(&options, NULL, 0, &engine, &error), SP_ERR_MEMORY);
    assert_string_equal(error.subject, "model");
    assert_int_equal(sp_alloc_bytes(), bytes);
    /* A copied file stays beside the BF16 that is made of it: 4 + 2 bytes a number. */
    snprintf(weights, sizeof weights, "%s/model.safetensors", folder);
    assert_int_equal(stat(weights, &file), 0);
    options.weights_copy = true;
    options.memory_bytes = (size_t)file.st_size + (size_t)file.st_size / 4;
    assert_int_equal(sp_engine_open(&options, NULL, 0, &engine, &error), SP_ERR_MEMORY);
    assert_string_equal(error.subject, "model");
    assert_int_equal(sp_alloc_bytes(), bytes);
    remove_model(folder);
}

/* ---- how experts are stored ---------------------------------------------------------------- */

static const model_case *moe_case(void)
{
    return &cases[5];
}

static void stacked_experts_are_the_same(void **state)
{
    static const struct {
        storage how;
        const char *note;
    } forms[] = {
        {{.type = "BF16", .stacked = true}, NULL},
        {{.type = "F32"}, "weights converted to BF16: 68 of F32, 0 of F16"},
        {{.type = "F32", .stacked = true}, "weights converted to BF16: 36 of F32, 0 of F16"}};
    int32_t tokens[ROWS];

    (void)state;
    fill_prompt(tokens);
    for (int p = 0; p < 2; p++) {
        sp_dtype precision = p ? SP_DTYPE_F32 : SP_DTYPE_BF16;
        char *folder = write_model(moe_case(), "BF16");
        engine_run plain = run_engine(folder, precision, tokens, NULL);

        for (size_t f = 0; f < sizeof forms / sizeof *forms; f++) {
            char *other = write_stored(moe_case(), &forms[f].how);
            engine_run run = run_engine(other, precision, tokens, forms[f].note);

            engine_run_assert_same(&plain, &run);
            engine_run_free(&run);
            remove_model(other);
        }
        engine_run_free(&plain);
        remove_model(folder);
    }
}

static void check_refused(const storage *how, sp_status status, const char *subject)
{
    char *folder = write_stored(moe_case(), how);
    size_t bytes = sp_alloc_bytes();
    sp_engine_options options;
    sp_engine *engine;
    sp_error error;

    sp_engine_options_default(&options, sizeof options);
    options.model_dir = folder;
    options.threads = 1;
    assert_int_equal(sp_engine_open(&options, NULL, 0, &engine, &error), status);
    assert_string_equal(error.subject, subject);
    assert_int_equal(sp_alloc_bytes(), bytes);
    remove_model(folder);
}

static void experts_that_do_not_fit_are_refused(void **state)
{
    const storage missing = {.type = "BF16", .omit = "model.layers.2.mlp.experts.4.up_proj.weight"};
    const storage turned = {.type = "BF16", .stacked = true, .turned = true};
    const storage type = {.type = "I16"};

    (void)state;
    check_refused(&missing, SP_ERR_NOT_FOUND, missing.omit);
    check_refused(&turned, SP_ERR_MISMATCH, "model.layers.0.mlp.experts.gate_up_proj");
    check_refused(&type, SP_ERR_UNSUPPORTED, "model.embed_tokens.weight");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(logits_match_double),
        cmocka_unit_test(other_types_are_converted),
        cmocka_unit_test(converted_weights_are_held_against_memory),
        cmocka_unit_test(stacked_experts_are_the_same),
        cmocka_unit_test(experts_that_do_not_fit_are_refused),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
