/*
 * tiny_llama MODEL_DIR ADAPTER...: a whole engine for models of the Llama type, written against the
 * public headers alone. It describes its model by hand, loads the adapters (folders of
 * MODEL_DIR/adapters), and runs the prompts of MODEL_DIR/prompts.json with the base and with every
 * adapter, all in one batch. The logits are compared with MODEL_DIR/golden, and then against those
 * of each sequence alone, which must have the same bits: every sum here runs in an order that does
 * not depend on the batch, and so do the library's.
 *
 * In reading order: the model's numbers and weights, its sites, the adapters, one forward pass over
 * the rows of a batch, the comparison. All numbers are float; no sequence is continued, so there is
 * no KV cache.
 */
#include <sidepath/checkpoint.h>
#include <sidepath/delta.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LAYERS_MAX = 8, ADAPTERS_MAX = 12, PROMPTS = 3, PATH_BYTES = 512, MEMORIES_MAX = 2048 };
#define TOLERANCE 1e-4

/* The linear modules of a layer. Those with one group read the same x. */
enum { Q, K, V, O, GATE, UP, DOWN, N_LINEAR };
static const struct {
    const char *name;
    int32_t group;
} linears[N_LINEAR] = {
    [Q] = {"self_attn.q_proj", 0},  [K] = {"self_attn.k_proj", 0}, [V] = {"self_attn.v_proj", 0},
    [O] = {"self_attn.o_proj", -1}, [GATE] = {"mlp.gate_proj", 1}, [UP] = {"mlp.up_proj", 1},
    [DOWN] = {"mlp.down_proj", -1},
};

typedef struct linear {
    float *weight; /* [n_out, k_in] */
    float *bias;   /* [n_out], or NULL */
    int32_t k_in, n_out;
} linear;

typedef struct model {
    int32_t layers, hidden, heads, kv_heads, head_dim, inner, vocab;
    float eps;
    float *frequencies;         /* [head_dim / 2] of the rotation, radians per position */
    float *embed, *head, *norm; /* [vocab, hidden] twice, [hidden] */
    sp_served_table served_embed, served_head; /* as stored; adapters may replace rows of them */
    linear linear[LAYERS_MAX][N_LINEAR];
    float *norm_in[LAYERS_MAX], *norm_post[LAYERS_MAX];
} model;

/* Rows of a step: sequences one after another, each from position 0. */
typedef struct batch {
    int32_t n_rows, n_sequences;
    int32_t *tokens;                                   /* [n_rows] */
    int32_t begin[PROMPTS * (ADAPTERS_MAX + 1) + 1];   /* first row of each sequence */
    sp_route_span spans[PROMPTS * (ADAPTERS_MAX + 1)]; /* its adapter */
} batch;

typedef struct host {
    model model;
    sp_geometry *geometry;
    sp_device *device;
    sp_exec *exec;
    sp_pool *pool;
    sp_delta *delta;
    sp_plan *plan;
    int32_t n_adapters;
    sp_adapter *adapters[ADAPTERS_MAX];
} host;

static void *memories[MEMORIES_MAX];
static int n_memories;
static sp_error error;

static void check(sp_status status)
{
    if (status == SP_OK)
        return;
    fprintf(stderr, "%s: %s: %s (%s)\n", sp_status_name(status), error.code, error.text,
            error.subject);
    exit(1);
}

/* Zeroed memory that lives as long as the program; main frees all of it. */
static void *allocate(int64_t n, size_t bytes)
{
    void *memory = calloc((size_t)n + 1, bytes);

    if (memory == NULL || n_memories == MEMORIES_MAX)
        exit(1);
    return memories[n_memories++] = memory;
}

/* ---- the model's numbers and weights ------------------------------------------------------- */

static char *read_text(const char *directory, const char *name)
{
    char path[PATH_BYTES], *text = allocate(1 << 16, 1);
    FILE *file;

    snprintf(path, sizeof path, "%s/%s", directory, name);
    file = fopen(path, "rb");
    if (file == NULL || fread(text, 1, 1 << 16, file) == 0) {
        fprintf(stderr, "%s: cannot be read\n", path);
        exit(1);
    }
    fclose(file);
    return text;
}

/* The number after "key":, or `otherwise`. Enough for the files of the fixtures. */
static double number(const char *json, const char *key, double otherwise)
{
    char quoted[64];
    const char *found;

    snprintf(quoted, sizeof quoted, "\"%s\":", key);
    found = strstr(json, quoted);
    return found != NULL ? strtod(found + strlen(quoted), NULL) : otherwise;
}

/* n elements of a tensor as stored; NULL where the file has none of that name. */
static void *read_tensor(const sp_checkpoint *checkpoint, const char *name, sp_tensor_type type,
                         int64_t n)
{
    const sp_tensor *tensor = sp_checkpoint_find(checkpoint, name);
    size_t bytes = (size_t)n * (type == SP_TENSOR_F32 ? 4 : 2);
    void *data = allocate(n, 4);
    FILE *file;

    if (tensor == NULL)
        return NULL;
    file = fopen(sp_checkpoint_path(checkpoint, tensor->file), "rb");
    if (tensor->type != type || tensor->bytes != bytes || file == NULL ||
        fseek(file, (long)tensor->offset_bytes, SEEK_SET) != 0 ||
        fread(data, 1, bytes, file) != bytes) {
        fprintf(stderr, "%s: not %lld numbers of %s\n", name, (long long)n,
                sp_tensor_type_name(type));
        exit(1);
    }
    fclose(file);
    return data;
}

/* BF16 to float. */
static float *widen(const uint16_t *bf16, int64_t n)
{
    float *out = allocate(n, sizeof *out);

    for (int64_t i = 0; i < n; i++) {
        uint32_t bits = (uint32_t)bf16[i] << 16;

        memcpy(&out[i], &bits, sizeof bits);
    }
    return out;
}

/* The weight `name` of a layer (-1: of none) as floats, or NULL where the model has none. */
static float *read_weight(const sp_checkpoint *checkpoint, int32_t layer, const char *module,
                          const char *what, int64_t n)
{
    char name[PATH_BYTES];
    uint16_t *stored;

    snprintf(name, sizeof name, "model.layers.%d.%s.%s", (int)layer, module, what);
    stored = read_tensor(checkpoint, layer < 0 ? module : name, SP_TENSOR_BF16, n);
    return stored != NULL ? widen(stored, n) : NULL;
}

/* theta^(-2i/d), in the llama3 form divided by `factor` where the wave is long, and blended. */
static float *make_frequencies(const char *json, int32_t head_dim)
{
    float *out = allocate(head_dim / 2, sizeof *out);
    double theta = number(json, "rope_theta", 10000), factor = number(json, "factor", 1);
    double low = number(json, "low_freq_factor", 1), high = number(json, "high_freq_factor", 4);
    double positions = number(json, "original_max_position_embeddings", 8192);

    for (int32_t i = 0; i < head_dim / 2; i++) {
        double f = pow(theta, -2.0 * i / head_dim), waves = positions * f / (2 * acos(-1.0));
        double share = fmin(fmax((waves - low) / (high - low), 0), 1);

        out[i] = (float)(f * share + f / factor * (1 - share));
    }
    return out;
}

static void read_layer(model *m, const sp_checkpoint *checkpoint, int32_t layer)
{
    int32_t q = m->heads * m->head_dim, kv = m->kv_heads * m->head_dim;
    const int32_t k_in[] = {m->hidden, m->hidden, m->hidden, q, m->hidden, m->hidden, m->inner};
    const int32_t n_out[] = {q, kv, kv, m->hidden, m->inner, m->inner, m->hidden};

    for (int i = 0; i < N_LINEAR; i++) {
        linear *l = &m->linear[layer][i];

        l->k_in = k_in[i];
        l->n_out = n_out[i];
        l->weight =
            read_weight(checkpoint, layer, linears[i].name, "weight", (int64_t)l->k_in * l->n_out);
        l->bias = read_weight(checkpoint, layer, linears[i].name, "bias", l->n_out);
    }
    m->norm_in[layer] = read_weight(checkpoint, layer, "input_layernorm", "weight", m->hidden);
    m->norm_post[layer] =
        read_weight(checkpoint, layer, "post_attention_layernorm", "weight", m->hidden);
}

static void read_model(model *m, const char *directory)
{
    char *json = read_text(directory, "config.json");
    sp_checkpoint *checkpoint;
    sp_served_table table = {.struct_bytes = sizeof table, .dtype = SP_DTYPE_BF16};
    int64_t n;

    m->layers = (int32_t)number(json, "num_hidden_layers", 0);
    m->hidden = table.hidden = (int32_t)number(json, "hidden_size", 0);
    m->vocab = table.rows = (int32_t)number(json, "vocab_size", 0);
    m->inner = (int32_t)number(json, "intermediate_size", 0);
    m->heads = (int32_t)number(json, "num_attention_heads", 1);
    m->kv_heads = (int32_t)number(json, "num_key_value_heads", m->heads);
    m->head_dim = (int32_t)number(json, "head_dim", m->hidden / m->heads);
    m->eps = (float)number(json, "rms_norm_eps", 1e-6);
    m->frequencies = make_frequencies(json, m->head_dim);
    if (m->layers < 1 || m->layers > LAYERS_MAX)
        exit(1);
    check(sp_checkpoint_open(directory, "model", &checkpoint, &error));
    for (int32_t layer = 0; layer < m->layers; layer++)
        read_layer(m, checkpoint, layer);
    n = (int64_t)m->vocab * m->hidden;
    m->norm = read_weight(checkpoint, -1, "model.norm.weight", "", m->hidden);
    m->served_embed = m->served_head = table;
    m->served_embed.data = read_tensor(checkpoint, "model.embed_tokens.weight", SP_TENSOR_BF16, n);
    m->served_head.data = read_tensor(checkpoint, "lm_head.weight", SP_TENSOR_BF16, n);
    if (m->served_head.data == NULL) /* a tied head */
        m->served_head.data = m->served_embed.data;
    m->embed = widen(m->served_embed.data, n);
    m->head = widen(m->served_head.data, n);
    sp_checkpoint_destroy(checkpoint);
}

/* ---- the library's view of the model --------------------------------------------------------- */

/* Number of a linear module's site: the embedding and the head are the first two. */
static int32_t site_of(int32_t layer, int i)
{
    return 2 + layer * N_LINEAR + i;
}

/* The sites of the model by hand: every place where an adapter can land, with its dimensions. */
static void describe(host *h)
{
    const model *m = &h->model;
    static char paths[LAYERS_MAX][N_LINEAR][64];
    sp_site sites[LAYERS_MAX * N_LINEAR + 2];
    size_t n = 2 + (size_t)(m->layers * N_LINEAR);

    for (size_t i = 0; i < n; i++)
        sp_site_default(&sites[i], sizeof sites[i]);
    sites[0].path = "model.embed_tokens";
    sites[0].kind = SP_SITE_EMBEDDING;
    sites[1].path = "lm_head";
    sites[1].kind = SP_SITE_HEAD;
    sites[1].tied = m->served_head.data == m->served_embed.data;
    sites[0].k_in = sites[1].n_out = m->vocab;
    sites[0].n_out = sites[1].k_in = m->hidden;
    for (int32_t layer = 0; layer < m->layers; layer++)
        for (int i = 0; i < N_LINEAR; i++) {
            sp_site *site = &sites[site_of(layer, i)];

            snprintf(paths[layer][i], sizeof paths[layer][i], "model.layers.%d.%s", (int)layer,
                     linears[i].name);
            site->path = paths[layer][i];
            site->layer = layer;
            site->group = linears[i].group;
            site->k_in = m->linear[layer][i].k_in;
            site->n_out = m->linear[layer][i].n_out;
        }
    check(sp_geometry_create(sites, n, &h->geometry, &error));
}

static sp_adapter *open_adapter(const host *h, const char *directory, const char *name)
{
    char path[PATH_BYTES];
    sp_adapter_options options;
    sp_adapter *adapter;

    snprintf(path, sizeof path, "%s/adapters/%s", directory, name);
    sp_adapter_options_default(&options, sizeof options);
    options.geometry = h->geometry;
    options.pool_dtype = SP_DTYPE_F32;
    options.served_embed = &h->model.served_embed; /* copies are compared with these */
    options.served_head = &h->model.served_head;
    check(sp_adapter_open(path, &options, &adapter, &error));
    return adapter;
}

/* A pool with a slot for every adapter, which holds what they need and no more. */
static void make_pool(host *h)
{
    sp_layout_options layout;
    sp_pool_options pool;
    size_t bytes;

    sp_layout_options_default(&layout, sizeof layout);
    layout.geometry = h->geometry;
    layout.dtype = SP_DTYPE_F32;
    layout.served_embed = &h->model.served_embed;
    layout.served_head = &h->model.served_head;
    layout.rank = 1;
    for (int32_t i = 0; i < h->n_adapters; i++) {
        int32_t rank = sp_adapter_rank_max(h->adapters[i]);

        layout.rank = rank > layout.rank ? rank : layout.rank;
        layout.modules |= sp_layout_pair_modules(h->adapters[i]);
    }
    sp_pool_options_default(&pool, sizeof pool);
    check(sp_layout_create(&layout, &pool.layout, &error));
    pool.device = h->device;
    pool.slots = h->n_adapters;
    for (int32_t i = 0; i < h->n_adapters; i++) {
        check(sp_layout_measure_overlay(pool.layout, h->adapters[i], &bytes, &error));
        pool.overlay_bytes += bytes;
    }
    check(sp_pool_create(&pool, &h->pool, &error));
    sp_layout_release(pool.layout); /* the pool keeps it */
}

/* Adapters to slots; what a span needs to route rows to one. */
static sp_route_span load(host *h, const sp_adapter *adapter)
{
    sp_route_span span = {.struct_bytes = sizeof span, .scale = 1};
    sp_image *image;

    check(sp_layout_pack(sp_pool_layout(h->pool), adapter, h->exec, &image, &error));
    check(sp_pool_load(h->pool, image, &span.handle, &error)); /* held until close_host */
    sp_image_destroy(image);
    return span;
}

static void make_delta(host *h, int32_t rows_max)
{
    sp_delta_options options;

    sp_delta_options_default(&options, sizeof options);
    options.pool = h->pool;
    options.exec = h->exec;
    options.rows_max = rows_max;
    check(sp_delta_create(&options, &h->delta, &error));
    check(sp_plan_create(rows_max, h->n_adapters, &h->plan, &error));
}

/* ---- one forward pass ---------------------------------------------------------------------- */

/* y [n_rows, n_out] = x [n_rows, k_in] · weightᵀ + bias; every sum in ascending k. */
static void gemm(const float *x, int32_t n_rows, const linear *l, float *y)
{
    for (int32_t row = 0; row < n_rows; row++)
        for (int32_t n = 0; n < l->n_out; n++) {
            float sum = 0;

            for (int32_t k = 0; k < l->k_in; k++)
                sum += x[(int64_t)row * l->k_in + k] * l->weight[(int64_t)n * l->k_in + k];
            y[(int64_t)row * l->n_out + n] = l->bias != NULL ? sum + l->bias[n] : sum;
        }
}

/* Linear modules [first, first + n) of a layer, which read one x: base GEMMs, then all deltas. */
static void linear_group(host *h, int32_t n_rows, int32_t layer, int first, int n, const float *x,
                         float *const *y)
{
    const linear *l = &h->model.linear[layer][first];
    sp_delta_output outputs[3];
    const sp_delta_call call = {
        .struct_bytes = sizeof call,
        .plan = h->plan,
        .x = x,
        .x_stride = l->k_in,
        .x_type = SP_DTYPE_F32,
        .outputs = outputs,
        .n_outputs = n,
    };

    for (int i = 0; i < n; i++) {
        gemm(x, n_rows, &l[i], y[i]);
        outputs[i] = (sp_delta_output){.struct_bytes = sizeof *outputs,
                                       .site = site_of(layer, first + i),
                                       .y = y[i],
                                       .y_stride = l[i].n_out,
                                       .y_type = SP_DTYPE_F32};
    }
    check(sp_delta_apply(h->delta, &call, &error));
}

static void rms_norm(const model *m, const float *x, int32_t n_rows, const float *weight, float *y)
{
    for (int32_t row = 0; row < n_rows; row++, x += m->hidden, y += m->hidden) {
        float squares = 0, factor;

        for (int32_t i = 0; i < m->hidden; i++)
            squares += x[i] * x[i];
        factor = 1 / sqrtf(squares / (float)m->hidden + m->eps);
        for (int32_t i = 0; i < m->hidden; i++)
            y[i] = x[i] * factor * weight[i];
    }
}

/* Turns the two halves of every head against each other, by the row's position. */
static void rotate(const model *m, float *x, int32_t n_heads, int32_t position)
{
    int32_t half = m->head_dim / 2;

    for (int32_t head = 0; head < n_heads; head++, x += m->head_dim)
        for (int32_t i = 0; i < half; i++) {
            double angle = (double)m->frequencies[i] * position;
            float c = (float)cos(angle), s = (float)sin(angle), a = x[i], b = x[i + half];

            x[i] = a * c - b * s;
            x[i + half] = b * c + a * s;
        }
}

/* One row and head against positions 0 .. last of its sequence; k and v are at position 0. */
static void attend(const model *m, const float *q, const float *k, const float *v, int32_t last,
                   float *scores, float *out)
{
    int32_t stride = m->kv_heads * m->head_dim;
    float largest = -INFINITY, sum = 0;

    for (int32_t j = 0; j <= last; j++) {
        scores[j] = 0;
        for (int32_t i = 0; i < m->head_dim; i++)
            scores[j] += q[i] * k[j * stride + i];
        scores[j] /= sqrtf((float)m->head_dim);
        largest = fmaxf(largest, scores[j]);
    }
    for (int32_t j = 0; j <= last; j++)
        sum += scores[j] = expf(scores[j] - largest);
    for (int32_t i = 0; i < m->head_dim; i++) {
        out[i] = 0;
        for (int32_t j = 0; j <= last; j++)
            out[i] += scores[j] / sum * v[j * stride + i];
    }
}

static void attention(const model *m, const batch *b, float *q, float *k, const float *v, float *y)
{
    int32_t d = m->head_dim, q_width = m->heads * d, kv_width = m->kv_heads * d;
    float *scores = allocate(b->n_rows, sizeof *scores);

    for (int32_t s = 0; s < b->n_sequences; s++)
        for (int32_t begin = b->begin[s], row = begin; row < b->begin[s + 1]; row++) {
            rotate(m, q + row * q_width, m->heads, row - begin);
            rotate(m, k + row * kv_width, m->kv_heads, row - begin);
            for (int32_t head = 0; head < m->heads; head++) {
                int32_t kv = begin * kv_width + head / (m->heads / m->kv_heads) * d;

                attend(m, q + row * q_width + head * d, k + kv, v + kv, row - begin, scores,
                       y + row * q_width + head * d);
            }
        }
}

/* x [n_rows, hidden] through one layer; t are temporaries [n_rows, the widest]. */
static void run_layer(host *h, const batch *b, int32_t layer, float *x, float *const t[5])
{
    const model *m = &h->model;
    int32_t n = b->n_rows;

    rms_norm(m, x, n, m->norm_in[layer], t[0]);
    linear_group(h, n, layer, Q, 3, t[0], (float *[]){t[1], t[2], t[3]});
    attention(m, b, t[1], t[2], t[3], t[4]);
    linear_group(h, n, layer, O, 1, t[4], (float *[]){t[0]});
    for (int32_t i = 0; i < n * m->hidden; i++)
        x[i] += t[0][i];
    rms_norm(m, x, n, m->norm_post[layer], t[0]);
    linear_group(h, n, layer, GATE, 2, t[0], (float *[]){t[1], t[2]});
    for (int32_t i = 0; i < n * m->inner; i++)
        t[1][i] = t[1][i] / (1 + expf(-t[1][i])) * t[2][i];
    linear_group(h, n, layer, DOWN, 1, t[1], (float *[]){t[0]});
    for (int32_t i = 0; i < n * m->hidden; i++)
        x[i] += t[0][i];
}

/* The logits [n_rows, vocab] of a batch, owned by the caller. */
static float *forward(host *h, const batch *b)
{
    const model *m = &h->model;
    const linear head = {m->head, NULL, m->hidden, m->vocab};
    int64_t width = m->hidden + m->inner + m->heads * m->head_dim, n = b->n_rows;
    float *x = allocate(n * m->hidden, sizeof *x), *logits = allocate(n * m->vocab, sizeof *x),
          *t[5];
    const sp_delta_embed_call embed = {.struct_bytes = sizeof embed,
                                       .plan = h->plan,
                                       .tokens = b->tokens,
                                       .y = x,
                                       .y_stride = m->hidden};
    sp_delta_head_call head_call = {.struct_bytes = sizeof head_call,
                                    .plan = h->plan,
                                    .x_stride = m->hidden,
                                    .x_type = SP_DTYPE_F32,
                                    .logits = logits,
                                    .logits_stride = m->vocab,
                                    .logits_type = SP_DTYPE_F32};

    for (int i = 0; i < 5; i++)
        t[i] = allocate(n * width, sizeof *x);
    check(sp_plan_build(h->plan, h->pool, b->spans, b->n_sequences, b->n_rows, &error));
    for (int64_t row = 0; row < n; row++)
        memcpy(x + row * m->hidden, m->embed + (int64_t)b->tokens[row] * m->hidden,
               (size_t)m->hidden * sizeof *x);
    check(sp_delta_embed(h->delta, &embed, &error));
    for (int32_t layer = 0; layer < m->layers; layer++)
        run_layer(h, b, layer, x, t);
    rms_norm(m, x, b->n_rows, m->norm, t[0]);
    gemm(t[0], b->n_rows, &head, logits);
    head_call.x = t[0];
    check(sp_delta_head(h->delta, &head_call, &error));
    return logits;
}

/* ---- the comparison ------------------------------------------------------------------------ */

static void add_sequence(batch *b, const int32_t *tokens, int32_t n, sp_route_span span)
{
    memcpy(b->tokens + b->n_rows, tokens, (size_t)n * sizeof *tokens);
    span.n_rows = n;
    b->spans[b->n_sequences++] = span;
    b->begin[b->n_sequences] = b->n_rows += n;
}

/* The largest difference between the last rows of logits [n_rows, vocab] and the golden's. */
static double compare(const host *h, const char *directory, const char *name, int prompt,
                      const float *logits, int32_t n_rows)
{
    static const char *tensors[PROMPTS] = {"logits_p0", "logits_p1", "logits_p2_last4"};
    char path[PATH_BYTES];
    sp_checkpoint *golden;
    const float *expected;
    int64_t n = (prompt == 2 ? 4 : n_rows) * h->model.vocab;
    double worst = 0;

    snprintf(path, sizeof path, "%s/golden/%s.safetensors", directory, name);
    check(sp_checkpoint_open_file(path, &golden, &error));
    expected = read_tensor(golden, tensors[prompt], SP_TENSOR_F32, n);
    logits += (int64_t)n_rows * h->model.vocab - n;
    for (int64_t i = 0; i < n; i++)
        worst = fmax(worst, fabs((double)logits[i] - (double)expected[i]));
    sp_checkpoint_destroy(golden);
    return worst;
}

/* Reads prompts.json's first PROMPTS lists: tokens [lengths summed], lengths [PROMPTS]. */
static int32_t *read_prompts(const char *directory, int32_t *lengths)
{
    char *json = read_text(directory, "prompts.json"), *at = strstr(json, "[[");
    int32_t *tokens = allocate(1 << 15, sizeof *tokens), n = 0;

    if (at == NULL)
        exit(1);
    for (int prompt = 0; prompt < PROMPTS; prompt++) {
        int32_t begin = n;

        at = strchr(at + 1, '[');
        while (at != NULL && *at != ']')
            tokens[n++] = (int32_t)strtol(at + 1, &at, 10);
        lengths[prompt] = n - begin;
    }
    return tokens;
}

/* Every prompt with every adapter in one batch, against the goldens and against itself alone. */
static int run(host *h, const char *directory, char **names, const sp_route_span *routes)
{
    int32_t lengths[PROMPTS], *prompts = read_prompts(directory, lengths), failed = 0;
    batch all = {.tokens = allocate(1 << 15, sizeof(int32_t))};
    float *together, *alone;

    for (int32_t a = 0; a <= h->n_adapters; a++)
        for (int32_t p = 0, begin = 0; p < PROMPTS; begin += lengths[p++])
            add_sequence(&all, prompts + begin, lengths[p], routes[a]);
    make_delta(h, all.n_rows);
    together = forward(h, &all);
    for (int32_t s = 0; s < all.n_sequences; s++) {
        const char *name = s < PROMPTS ? "base" : names[s / PROMPTS - 1];
        int32_t n = all.begin[s + 1] - all.begin[s], prompt = s % PROMPTS;
        const float *logits = together + (int64_t)all.begin[s] * h->model.vocab;
        batch one = {.tokens = allocate(n, sizeof(int32_t))};
        double worst = compare(h, directory, name, prompt, logits, n);
        int same;

        add_sequence(&one, all.tokens + all.begin[s], n, routes[s / PROMPTS]);
        alone = forward(h, &one);
        same = memcmp(alone, logits, (size_t)(n * h->model.vocab) * sizeof *logits) == 0;
        failed += worst > TOLERANCE || !same;
        printf("%-16s prompt %d: %.1e from the golden, %s alone\n", name, prompt, worst,
               same ? "the same bits" : "OTHER BITS");
    }
    return failed;
}

/* Users before what they use; sp_pool_release gives back what `load` took. */
static void close_host(host *h, const sp_route_span *routes)
{
    sp_plan_destroy(h->plan);
    sp_delta_destroy(h->delta);
    for (int32_t i = 0; i < h->n_adapters; i++) {
        check(sp_pool_release(h->pool, routes[1 + i].handle, &error));
        sp_adapter_release(h->adapters[i]);
    }
    sp_pool_destroy(h->pool);
    sp_geometry_release(h->geometry);
    sp_exec_destroy(h->exec);
    sp_device_close(h->device);
    while (n_memories > 0)
        free(memories[--n_memories]);
}

int main(int argc, char **argv)
{
    sp_route_span routes[1 + ADAPTERS_MAX] = {{sizeof routes[0], {.slot = SP_SLOT_BASE}, 0, 1}};
    sp_exec_options threads;
    host h = {.n_adapters = argc - 2};
    int failed;

    if (argc < 3 || h.n_adapters > ADAPTERS_MAX) {
        fprintf(stderr, "usage: tiny_llama MODEL_DIR ADAPTER...\n");
        return 2;
    }
    read_model(&h.model, argv[1]);
    describe(&h);
    for (int32_t i = 0; i < h.n_adapters; i++)
        h.adapters[i] = open_adapter(&h, argv[1], argv[2 + i]);
    check(sp_device_open("cpu", NULL, &h.device, &error));
    sp_exec_options_default(&threads, sizeof threads);
    check(sp_exec_create(&threads, &h.exec, &error));
    make_pool(&h);
    for (int32_t i = 0; i < h.n_adapters; i++)
        routes[1 + i] = load(&h, h.adapters[i]);
    failed = run(&h, argv[1], argv + 2, routes);
    close_host(&h, routes);
    return failed > 0;
}
