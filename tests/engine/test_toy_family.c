/*
 * A family of models is one file and one row: this one has no attention, and each of its layers
 * adds a linear map of its normed input to the residual. The program defines the table of families
 * itself, so that the engine in it runs the toy and nothing else, with adapters, scheduler, cache
 * and sampling as they are.
 */
#include "support/engine_run.h"
#include "support/golden.h"
#include "support/make_adapter.h"
#include "support/test.h"

#include "base/alloc.h"
#include "engine/model/family.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { LAYERS = 2, WIDTH = 32, VOCAB = 40, ROWS = 21, RANK = 4 };

/* ---- the family ---------------------------------------------------------------------------- */

enum { RESIDUAL, HIDDEN, OUTPUT, N_ACTIVATIONS };

typedef struct layer_weights {
    sp_norm norm;
    sp_linear map;
} layer_weights;

static int32_t widths(const sp_model_shape *shape, int32_t out_widths[SP_ROWS_MAX])
{
    for (int i = 0; i < N_ACTIVATIONS; i++)
        out_widths[i] = shape->hidden;
    return N_ACTIVATIONS;
}

static void load_layer(sp_weight_loader *loader, int32_t layer, void *out_layer)
{
    const sp_model_shape *shape = sp_weight_loader_shape(loader);
    layer_weights *w = out_layer;

    sp_load_norm(loader, layer, "input_layernorm", shape->hidden, &w->norm);
    sp_load_linear(loader, layer, "mlp.down_proj", shape->hidden, shape->intermediate, false,
                   &w->map);
}

static void pass(const sp_model *model, sp_ops *ops)
{
    const layer_weights *w = model->layers;

    sp_op_embed(ops, &model->embed, RESIDUAL);
    sp_op_norm(ops, RESIDUAL, &w[0].norm, HIDDEN);
    for (int32_t layer = 0; layer < model->shape.layers; layer++) {
        const sp_projection map[] = {{&w[layer].map, OUTPUT}};
        bool last = layer + 1 == model->shape.layers;

        sp_op_linear(ops, HIDDEN, map, 1);
        sp_op_add_norm(ops, RESIDUAL, OUTPUT, last ? &model->final_norm : &w[layer + 1].norm,
                       HIDDEN);
    }
}

static const sp_family_row toy = {
    .family = SP_FAMILY_QWEN3, /* whose config.json it borrows */
    .name = "a toy",
    .layer_bytes = sizeof(layer_weights),
    .widths = widths,
    .load_layer = load_layer,
    .pass = pass,
    .final = HIDDEN,
};

const sp_family_row *const sp_families[] = {&toy, NULL};

/* ---- a checkpoint and an adapter ----------------------------------------------------------- */

static const char config[] =
    "{\"architectures\":[\"Qwen3ForCausalLM\"],\"num_hidden_layers\":2,\"hidden_size\":32,"
    "\"vocab_size\":40,\"max_position_embeddings\":64,\"rms_norm_eps\":1e-6,\"head_dim\":16,"
    "\"num_attention_heads\":2,\"num_key_value_heads\":1,\"intermediate_size\":32,"
    "\"rope_theta\":10000.0}";

static void add(make_adapter *file, const char *name, int rows, int columns, uint64_t seed)
{
    uint16_t *data = columns ? make_adapter_add(file, name, "BF16", 2, rows, columns)
                             : make_adapter_add(file, name, "BF16", 1, rows);
    sp_test_random random = {seed};

    /* BF16 of numbers from 1/4 up to 1, of both signs in matrices. */
    for (int i = 0; i < rows * (columns ? columns : 1); i++)
        data[i] = (uint16_t)(0x3e80 + sp_test_below(&random, 0x100) +
                             (columns ? 0x8000 * sp_test_below(&random, 2) : 0));
}

static char *write_base(void)
{
    char *folder = sp_test_make_directory();
    make_adapter *file = make_adapter_create();
    unsigned char *bytes;
    size_t n;

    add(file, "model.embed_tokens.weight", VOCAB, WIDTH, 1);
    add(file, "model.norm.weight", WIDTH, 0, 2);
    add(file, "lm_head.weight", VOCAB, WIDTH, 3);
    for (int layer = 0; layer < LAYERS; layer++) {
        char name[80];

        snprintf(name, sizeof name, "model.layers.%d.input_layernorm.weight", layer);
        add(file, name, WIDTH, 0, 4 + (uint64_t)layer);
        snprintf(name, sizeof name, "model.layers.%d.mlp.down_proj.weight", layer);
        add(file, name, WIDTH, WIDTH, 6 + (uint64_t)layer);
    }
    bytes = make_adapter_bytes(file, &n);
    sp_test_write_file(folder, "model.safetensors", bytes, n);
    sp_test_write_file(folder, "config.json", config, strlen(config));
    sp_free(bytes);
    make_adapter_destroy(file);
    return folder;
}

/* Rank 4, alpha 8, on the first layer. */
static char *write_adapter(void)
{
    make_adapter *file = make_adapter_create();
    char *folder;

    make_adapter_config(file, "{\"peft_type\":\"LORA\",\"r\":4,\"lora_alpha\":8,"
                              "\"target_modules\":[\"down_proj\"],\"layers_to_transform\":[0]}");
    add(file, "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight", RANK, WIDTH, 20);
    add(file, "base_model.model.model.layers.0.mlp.down_proj.lora_B.weight", WIDTH, RANK, 21);
    folder = make_adapter_folder(file);
    make_adapter_destroy(file);
    return folder;
}

/* ---- the same in double -------------------------------------------------------------------- */

static void norm(const golden_tensor *w, const double *x, double *y)
{
    double square = 0;

    for (int i = 0; i < WIDTH; i++)
        square += x[i] * x[i];
    for (int i = 0; i < WIDTH; i++)
        y[i] = x[i] / sqrt(square / WIDTH + 1e-6) * golden_value(w, i);
}

/* y[n] += factor * w [n, k] · x[k]. */
static void add_product(const golden_tensor *w, double factor, const double *x, int k, double *y,
                        int n)
{
    for (int j = 0; j < n; j++)
        for (int i = 0; i < k; i++)
            y[j] += factor * golden_value(w, (int64_t)j * k + i) * x[i];
}

/* A row depends on its own token alone: there is no attention. */
static void expect_row(const golden *base, const golden *adapter, int32_t token, double *logits)
{
    static const char pair[] = "base_model.model.model.layers.0.mlp.down_proj.lora_%s.weight";
    const golden_tensor *embed = golden_get(base, "model.embed_tokens.weight");
    double residual[WIDTH], x[WIDTH];

    for (int i = 0; i < WIDTH; i++)
        residual[i] = golden_value(embed, (int64_t)token * WIDTH + i);
    for (int layer = 0; layer < LAYERS; layer++) {
        double low[RANK] = {0};

        norm(golden_get(base, "model.layers.%d.input_layernorm.weight", layer), residual, x);
        add_product(golden_get(base, "model.layers.%d.mlp.down_proj.weight", layer), 1, x, WIDTH,
                    residual, WIDTH);
        if (!adapter || layer > 0)
            continue;
        add_product(golden_get(adapter, pair, "A"), 1, x, WIDTH, low, RANK);
        add_product(golden_get(adapter, pair, "B"), 2, low, RANK, residual, WIDTH);
    }
    norm(golden_get(base, "model.norm.weight"), residual, x);
    memset(logits, 0, VOCAB * sizeof *logits);
    add_product(golden_get(base, "lm_head.weight"), 1, x, WIDTH, logits, VOCAB);
}

static void check_run(const engine_run *run, const golden *base, const golden *adapter)
{
    double worst = 0;

    assert_int_equal(run->n_logits, ROWS);
    for (int row = 0; row < ROWS; row++) {
        double expected[VOCAB];

        expect_row(base, adapter, run->request.tokens[row], expected);
        for (int j = 0; j < VOCAB; j++) {
            double error = fabs((double)run->logits[row * VOCAB + j] - expected[j]);

            if (!(error <= worst))
                worst = error;
        }
    }
    assert_true(worst <= 1e-3);
}

static golden *open_weights(const char *folder, const char *name)
{
    char path[600];

    snprintf(path, sizeof path, "%s/%s.safetensors", folder, name);
    return golden_open(path);
}

static void a_family_is_one_row(void **state)
{
    char *base_dir = write_base(), *adapter_dir = write_adapter();
    golden *base = open_weights(base_dir, "model");
    golden *pair = open_weights(adapter_dir, "adapter_model");
    const sp_engine_adapter adapter = {sizeof adapter, "a", adapter_dir};
    sp_test_random random = {3};
    int32_t prompt[ROWS];
    engine_run runs[2], *list[2] = {&runs[0], &runs[1]};
    sp_engine_options options;
    sp_engine *engine;

    (void)state;
    sp_engine_options_default(&options, sizeof options);
    options.model_dir = base_dir;
    options.precision = SP_DTYPE_F32;
    options.threads = 2;
    options.kv_tokens = 128;
    options.step_rows = 16;
    engine = engine_run_open(&options, &adapter, 1);
    engine_run_fill_prompt(&random, prompt, ROWS, VOCAB);
    for (int i = 0; i < 2; i++) {
        runs[i] = engine_run_init(i ? "a" : NULL, prompt, ROWS, 1);
        runs[i].keep_logits = true;
        engine_run_submit(engine, &runs[i]);
    }
    engine_run_all(engine, list, 2);
    check_run(&runs[0], base, NULL);
    check_run(&runs[1], base, pair);
    assert_memory_not_equal(runs[0].logits, runs[1].logits, VOCAB * sizeof(float));
    for (int i = 0; i < 2; i++)
        engine_run_free(&runs[i]);
    sp_engine_close(engine);
    golden_close(pair);
    golden_close(base);
    sp_test_remove_tree(adapter_dir);
    sp_test_remove_tree(base_dir);
    sp_free(adapter_dir);
    sp_free(base_dir);
}

/* What the table lacks is refused, and the refusal says what it has. */
static void other_families_are_refused(void **state)
{
    sp_engine_options options;
    sp_engine *engine;
    sp_error error;

    (void)state;
    sp_engine_options_default(&options, sizeof options);
    options.model_dir = SP_TEST_FIXTURES "/smollm";
    assert_int_equal(sp_engine_open(&options, NULL, 0, &engine, &error), SP_ERR_UNSUPPORTED);
    assert_string_equal(error.subject, "architectures");
    assert_non_null(strstr(error.text, "this engine runs a toy only"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_family_is_one_row),
        cmocka_unit_test(other_families_are_refused),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
