/*
 * make_checkpoint: writes a random Qwen3, Qwen3-MoE or Qwen3.5 checkpoint of any shape, as Hugging
 * Face lays one out, and random PEFT LoRA adapters for it. For benchmarks and tests that need real
 * sizes but no real weights: the same arguments give the same bytes.
 *
 * A tensor is described first and filled while it is written, so that gigabytes need a megabyte of
 * memory. config.json comes last: a folder without it is unfinished, and is refused by readers.
 */
#include "base/alloc.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/file.h"
#include "base/half.h"
#include "base/settings.h"
#include "base/text.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* --- Settings ---------------------------------------------------------------------------- */

typedef struct {
    const char *preset, *tokenizer, *dtype;
    int64_t hidden, layers, heads, kv_heads, head_dim, intermediate, vocab;
    int64_t experts, chosen, expert_intermediate;
    int64_t eos, seed, shards, adapters, rank, trained;
    bool tied, untied, adapters_only, help;
} options;

#define NUMBER(flag, field, low, high, default_value, text)                                \
    {                                                                                      \
        .name = flag, .type = SP_SETTING_INT, .offset = offsetof(options, field),          \
        .default_text = default_value, .minimum = low, .maximum = high, .value_name = "N", \
        .help = text, .flag_only = true                                                    \
    }
#define SWITCH(flag, field, text)                                                  \
    {                                                                              \
        .name = flag, .type = SP_SETTING_BOOL, .offset = offsetof(options, field), \
        .default_text = "false", .help = text, .flag_only = true                   \
    }

static const sp_setting settings[] = {
    {.name = "preset",
     .type = SP_SETTING_CHOICE,
     .offset = offsetof(options, preset),
     .default_text = "tiny",
     .choices = "tiny|tiny-moe|tiny-hybrid|0.6b|1.7b|4b|8b|30b-a3b|27b-hybrid",
     .help = "shape to start from; the flags below change it",
     .flag_only = true},
    NUMBER("hidden", hidden, 0, 1 << 16, "0", "hidden size (0: the preset's, also below)"),
    NUMBER("layers", layers, 0, 512, "0", "layers"),
    NUMBER("heads", heads, 0, 1024, "0", "query heads"),
    NUMBER("kv-heads", kv_heads, 0, 1024, "0", "key and value heads"),
    NUMBER("head-dim", head_dim, 0, 1024, "0", "elements of a head"),
    NUMBER("intermediate", intermediate, 0, 1 << 18, "0", "FFN width"),
    NUMBER("experts", experts, 0, 1024, "0", "experts of a layer, where the preset has any"),
    NUMBER("experts-per-token", chosen, 0, 1024, "0", "experts that a token goes through"),
    NUMBER("expert-intermediate", expert_intermediate, 0, 1 << 18, "0", "width of an expert"),
    NUMBER("vocab", vocab, 0, 1 << 22, "0", "vocabulary"),
    SWITCH("tied", tied, "the head is the embedding"),
    SWITCH("untied", untied, "the head has weights of its own"),
    NUMBER("eos", eos, -1, 1 << 22, "-1", "end-of-text id (-1: the last of the vocabulary)"),
    NUMBER("shards", shards, 1, 999, "1", "files that the weights are spread over"),
    {.name = "tokenizer",
     .type = SP_SETTING_STRING,
     .offset = offsetof(options, tokenizer),
     .value_name = "FILE",
     .help = "tokenizer.json to copy",
     .flag_only = true},
    NUMBER("adapters", adapters, 0, 10000, "0", "adapters to write into DIR/adapters/aN"),
    NUMBER("rank", rank, 1, 4096, "16", "their rank; alpha is twice that"),
    NUMBER("trained-tokens", trained, 0, 1 << 20, "0",
           "tokens whose embedding rows they replace, spread over the vocabulary"),
    {.name = "dtype",
     .type = SP_SETTING_CHOICE,
     .offset = offsetof(options, dtype),
     .default_text = "f32",
     .choices = "f32|bf16|f16",
     .help = "their element type; the checkpoint is bf16",
     .flag_only = true},
    NUMBER("seed", seed, 0, INT32_MAX, "0", "another seed, other weights"),
    SWITCH("adapters-only", adapters_only, "config.json and the adapters, without the weights"),
    SWITCH("help", help, "this text"),
};
#define N_SETTINGS (sizeof settings / sizeof *settings)

typedef struct {
    const char *name;
    int64_t hidden, layers, heads, kv_heads, head_dim, intermediate, vocab;
    bool tied;
    int64_t experts, chosen, expert_intermediate; /* 0: a dense model */
    int64_t key_heads, value_heads, delta_dim;    /* of gated delta nets; 0: it has none */
} shape;

/* Of a hybrid: every so many layers one has attention; rows that the convolution reads. */
#define ATTENTION_INTERVAL 4
#define CONV_WIDTH         4

static const shape shapes[] = {
    {"tiny", 64, 2, 4, 2, 32, 160, 512, true, 0, 0, 0, 0, 0, 0},
    {"tiny-moe", 64, 2, 4, 2, 32, 160, 512, false, 8, 2, 48, 0, 0, 0},
    {"tiny-hybrid", 64, 4, 4, 2, 32, 160, 512, false, 0, 0, 0, 2, 6, 16},
    {"0.6b", 1024, 28, 16, 8, 128, 3072, 151936, true, 0, 0, 0, 0, 0, 0},
    {"1.7b", 2048, 28, 16, 8, 128, 6144, 151936, true, 0, 0, 0, 0, 0, 0},
    {"4b", 2560, 36, 32, 8, 128, 9728, 151936, true, 0, 0, 0, 0, 0, 0},
    {"8b", 4096, 36, 32, 8, 128, 12288, 151936, false, 0, 0, 0, 0, 0, 0},
    {"30b-a3b", 2048, 48, 32, 4, 128, 6144, 151936, false, 128, 8, 768, 0, 0, 0},
    {"27b-hybrid", 5120, 64, 24, 4, 256, 17408, 248320, false, 0, 0, 0, 16, 48, 128},
};

static sp_status choose_shape(const options *opt, shape *out_shape, sp_error *error)
{
    const shape *preset = shapes;
    int64_t *const fields[] = {&out_shape->hidden,   &out_shape->layers,
                               &out_shape->heads,    &out_shape->kv_heads,
                               &out_shape->head_dim, &out_shape->intermediate,
                               &out_shape->vocab,    &out_shape->experts,
                               &out_shape->chosen,   &out_shape->expert_intermediate};
    const int64_t given[] = {
        opt->hidden,       opt->layers, opt->heads,   opt->kv_heads, opt->head_dim,
        opt->intermediate, opt->vocab,  opt->experts, opt->chosen,   opt->expert_intermediate};

    while (strcmp(preset->name, opt->preset) != 0)
        preset++;
    *out_shape = *preset;
    for (size_t i = 0; i < sizeof given / sizeof *given; i++)
        if (given[i] > 0)
            *fields[i] = given[i];
    if (opt->tied && opt->untied)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "tied", -1, "both --tied and --untied");
    out_shape->tied = opt->tied || (preset->tied && !opt->untied);
    if (out_shape->heads % out_shape->kv_heads != 0 || out_shape->head_dim % 2 != 0)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "heads", -1,
                       "the heads must be a multiple of the kv heads, and a head even");
    if (preset->experts == 0 && opt->experts + opt->chosen + opt->expert_intermediate > 0)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "experts", -1, "the preset %s has no experts",
                       preset->name);
    if (out_shape->chosen > out_shape->experts)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "experts-per-token", -1,
                       "more experts a token than experts");
    if (out_shape->value_heads > 0 && out_shape->layers < ATTENTION_INTERVAL)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "layers", -1,
                       "a hybrid has at least %d layers: the last of them has attention",
                       ATTENTION_INTERVAL);
    if (opt->eos >= out_shape->vocab)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "eos", -1, "the id is not in the vocabulary");
    return SP_OK;
}

/* --- Tensors ----------------------------------------------------------------------------- */

typedef struct {
    char name[112];
    int64_t rows, columns; /* [rows, columns], or [columns] when rows is 0 */
    double centre, deviation;
    sp_dtype dtype;
    bool is_conv; /* its shape is [rows, 1, columns] */
} tensor;

typedef struct {
    tensor *items;
    size_t n, capacity;
    bool failed;
} tensor_list;

static int64_t tensor_elements(const tensor *t)
{
    return (t->rows ? t->rows : 1) * t->columns;
}

static uint64_t tensor_bytes(const tensor *t)
{
    return (uint64_t)tensor_elements(t) * sp_dtype_bytes(t->dtype);
}

static SP_PRINTF(7, 8) void add_tensor(tensor_list *list, int64_t rows, int64_t columns,
                                       double centre, double deviation, sp_dtype dtype,
                                       const char *format, ...)
{
    va_list arguments;
    tensor *t;

    if (list->n == list->capacity && !list->failed) {
        size_t capacity = list->capacity ? 2 * list->capacity : 64;
        tensor *grown = sp_realloc(list->items, capacity * sizeof *grown);

        list->failed = grown == NULL;
        if (grown) {
            list->items = grown;
            list->capacity = capacity;
        }
    }
    if (list->failed)
        return;
    t = &list->items[list->n++];
    *t = (tensor){"", rows, columns, centre, deviation, dtype, false};
    va_start(arguments, format);
    vsnprintf(t->name, sizeof t->name, format, arguments);
    va_end(arguments);
}

static bool is_recurrent(const shape *s, int64_t layer)
{
    return s->value_heads > 0 && (layer + 1) % ATTENTION_INTERVAL != 0;
}

/* The channels of a gated delta net's convolution. */
static int64_t channels_of(const shape *s)
{
    return (2 * s->key_heads + s->value_heads) * s->delta_dim;
}

/* The linear modules of a layer: those of its mixer, and three, or with experts a router and three
 * an expert. */
typedef struct {
    const char *name; /* of an expert's: what follows its number */
    int64_t n_out, k_in;
    int64_t expert; /* -1: none */
    bool is_residual;
} linear;

static int64_t n_mixers(const shape *s, int64_t layer)
{
    return is_recurrent(s, layer) ? 5 : 4;
}

static int64_t n_linears(const shape *s, int64_t layer)
{
    return n_mixers(s, layer) + (s->experts > 0 ? 1 + 3 * s->experts : 3);
}

/* q_proj of a hybrid has a gate beside each head. */
static linear mixer_at(const shape *s, int64_t layer, int64_t index)
{
    int64_t q = s->heads * s->head_dim, kv = s->kv_heads * s->head_dim;
    int64_t values = s->value_heads * s->delta_dim, gated = s->value_heads > 0 ? 2 : 1;
    const linear attention[] = {{"self_attn.q_proj", gated * q, s->hidden, -1, false},
                                {"self_attn.k_proj", kv, s->hidden, -1, false},
                                {"self_attn.v_proj", kv, s->hidden, -1, false},
                                {"self_attn.o_proj", s->hidden, q, -1, true}};
    const linear delta[] = {{"linear_attn.in_proj_qkv", channels_of(s), s->hidden, -1, false},
                            {"linear_attn.in_proj_z", values, s->hidden, -1, false},
                            {"linear_attn.in_proj_b", s->value_heads, s->hidden, -1, false},
                            {"linear_attn.in_proj_a", s->value_heads, s->hidden, -1, false},
                            {"linear_attn.out_proj", s->hidden, values, -1, true}};

    return is_recurrent(s, layer) ? delta[index] : attention[index];
}

/* gate, up or down: n 0 .. 2. */
static linear ffn_linear(const char *const *names, int n, int64_t hidden, int64_t inner,
                         int64_t expert)
{
    bool down = n == 2;

    return (linear){names[n], down ? hidden : inner, down ? inner : hidden, expert, down};
}

static linear linear_at(const shape *s, int64_t layer, int64_t index)
{
    static const char *const dense[] = {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"};
    static const char *const expert[] = {"gate_proj", "up_proj", "down_proj"};
    int64_t mixers = n_mixers(s, layer), place = index - mixers;

    if (place < 0)
        return mixer_at(s, layer, index);
    if (s->experts == 0)
        return ffn_linear(dense, (int)place, s->hidden, s->intermediate, -1);
    if (place == 0)
        return (linear){"mlp.gate", s->experts, s->hidden, -1, false};
    return ffn_linear(expert, (int)((place - 1) % 3), s->hidden, s->expert_intermediate,
                      (place - 1) / 3);
}

/* "model.layers.N.<module>". */
static void name_linear(char out_path[80], int64_t layer, const linear *l)
{
    if (l->expert < 0)
        snprintf(out_path, 80, "model.layers.%" PRId64 ".%s", layer, l->name);
    else
        snprintf(out_path, 80, "model.layers.%" PRId64 ".mlp.experts.%" PRId64 ".%s", layer,
                 l->expert, l->name);
}

/* What a gated delta net has beside its linear maps, in the types that real files have. */
static void list_delta(const shape *s, int64_t layer, tensor_list *list)
{
    add_tensor(list, channels_of(s), CONV_WIDTH, 0, 0.4, SP_DTYPE_BF16,
               "model.layers.%" PRId64 ".linear_attn.conv1d.weight", layer);
    if (!list->failed)
        list->items[list->n - 1].is_conv = true;
    add_tensor(list, 0, s->value_heads, 0, 0.5, SP_DTYPE_F32,
               "model.layers.%" PRId64 ".linear_attn.A_log", layer);
    add_tensor(list, 0, s->value_heads, 0, 0.5, SP_DTYPE_BF16,
               "model.layers.%" PRId64 ".linear_attn.dt_bias", layer);
    add_tensor(list, 0, s->delta_dim, 1, 0.1, SP_DTYPE_F32,
               "model.layers.%" PRId64 ".linear_attn.norm.weight", layer);
}

/* The norms of a hybrid multiply by 1 + w. */
static void list_norms(const shape *s, int64_t layer, tensor_list *list)
{
    static const char *const hidden_norms[] = {"input_layernorm", "post_attention_layernorm"};
    static const char *const head_norms[] = {"self_attn.q_norm", "self_attn.k_norm"};
    double centre = s->value_heads > 0 ? 0 : 1;

    for (int i = 0; i < 2; i++) {
        add_tensor(list, 0, s->hidden, centre, 0.1, SP_DTYPE_BF16,
                   "model.layers.%" PRId64 ".%s.weight", layer, hidden_norms[i]);
        if (!is_recurrent(s, layer))
            add_tensor(list, 0, s->head_dim, centre, 0.1, SP_DTYPE_BF16,
                       "model.layers.%" PRId64 ".%s.weight", layer, head_norms[i]);
    }
}

/*
 * Deviations that keep activations near 1 and logits near 2, as a trained model's: 1 / sqrt(k) for
 * a product, less where it is added to the residual.
 */
static void list_model(const shape *s, tensor_list *list)
{
    double residual = 1 / sqrt(2.0 * (double)s->layers), head = 2 / sqrt((double)s->hidden);

    add_tensor(list, s->vocab, s->hidden, 0, head, SP_DTYPE_BF16, "model.embed_tokens.weight");
    for (int64_t layer = 0; layer < s->layers; layer++) {
        list_norms(s, layer, list);
        if (is_recurrent(s, layer))
            list_delta(s, layer, list);
        for (int64_t i = 0; i < n_linears(s, layer); i++) {
            linear l = linear_at(s, layer, i);
            char path[80];

            name_linear(path, layer, &l);
            add_tensor(list, l.n_out, l.k_in, 0,
                       (l.is_residual ? residual : 1) / sqrt((double)l.k_in), SP_DTYPE_BF16,
                       "%s.weight", path);
        }
    }
    add_tensor(list, 0, s->hidden, s->value_heads > 0 ? 0 : 1, 0.1, SP_DTYPE_BF16,
               "model.norm.weight");
    if (!s->tied)
        add_tensor(list, s->vocab, s->hidden, 0, head, SP_DTYPE_BF16, "lm_head.weight");
}

/* With scale 2 a delta of about a fifth of the base's output. */
static void list_adapter(const shape *s, int64_t rank, int64_t trained, sp_dtype dtype,
                         tensor_list *list)
{
    for (int64_t layer = 0; layer < s->layers; layer++)
        for (int64_t i = 0; i < n_linears(s, layer); i++) {
            linear l = linear_at(s, layer, i);
            char path[80];

            name_linear(path, layer, &l);
            add_tensor(list, rank, l.k_in, 0, 1 / sqrt((double)l.k_in), dtype,
                       "base_model.model.%s.lora_A.weight", path);
            add_tensor(list, l.n_out, rank, 0, 0.1 / sqrt((double)rank), dtype,
                       "base_model.model.%s.lora_B.weight", path);
        }
    if (trained > 0)
        add_tensor(list, trained, s->hidden, 0, 2 / sqrt((double)s->hidden), dtype,
                   "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta");
}

/* --- Values ------------------------------------------------------------------------------ */

#define CHUNK_ELEMENTS (1 << 18)

static uint64_t mix(uint64_t x)
{
    x += UINT64_C(0x9e3779b97f4a7c15);
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return x ^ x >> 31;
}

/*
 * Elements [first, first + n) of a tensor: uniform with its centre and deviation, four 16-bit
 * numbers from each hash of (tensor, place). first is a multiple of 4.
 */
static void fill(const tensor *t, uint64_t stream, int64_t first, int64_t n, void *out)
{
    float step = (float)(t->deviation * sqrt(12.0) / 65536);
    float low = (float)(t->centre - 32767.5 * (double)step);
    uint64_t word = 0;

    for (int64_t i = 0; i < n; i++) {
        float value;

        if (i % 4 == 0)
            word = mix(stream + (uint64_t)((first + i) / 4));
        value = low + step * (float)(word >> (16 * (i % 4)) & 0xffff);
        if (t->dtype == SP_DTYPE_F32)
            ((float *)out)[i] = value;
        else
            ((uint16_t *)out)[i] =
                t->dtype == SP_DTYPE_BF16 ? sp_f32_to_bf16(value) : sp_f32_to_f16(value);
    }
}

/* --- Files ------------------------------------------------------------------------------- */

typedef struct {
    const char *directory;
    void *chunk; /* CHUNK_ELEMENTS floats */
    uint64_t seed, bytes_done, bytes_all;
    double started_s;
    bool progress;
} writer;

static void show_progress(const writer *w, bool last)
{
    double seconds = sp_clock_seconds() - w->started_s;

    if (w->progress || last)
        fprintf(stderr, "%s%.1f of %.1f MB, %.0f MB/s%s", w->progress ? "\r" : "",
                (double)w->bytes_done / 1e6, (double)w->bytes_all / 1e6,
                seconds > 0 ? (double)w->bytes_done / 1e6 / seconds : 0.0, last ? "\n" : "  ");
}

static sp_status io_failed(const char *path, sp_error *error)
{
    return sp_fail(error, SP_ERR_IO, NULL, path, -1, "%s: %s", path, strerror(errno));
}

static const char *dtype_in_header(sp_dtype dtype)
{
    return dtype == SP_DTYPE_F32 ? "F32" : dtype == SP_DTYPE_BF16 ? "BF16" : "F16";
}

static void format_header(const tensor *items, size_t n, sp_text *header)
{
    uint64_t offset = 0;

    sp_text_add(header, "{\"__metadata__\":{\"format\":\"pt\"}");
    for (size_t i = 0; i < n; i++) {
        sp_text_format(header, ",\"%s\":{\"dtype\":\"%s\",\"shape\":[", items[i].name,
                       dtype_in_header(items[i].dtype));
        if (items[i].rows)
            sp_text_format(header, "%" PRId64 ",%s", items[i].rows, items[i].is_conv ? "1," : "");
        sp_text_format(header, "%" PRId64 "],\"data_offsets\":[%" PRIu64 ",%" PRIu64 "]}",
                       items[i].columns, offset, offset + tensor_bytes(&items[i]));
        offset += tensor_bytes(&items[i]);
    }
    sp_text_add(header, "}");
    while (header->bytes % 8 != 0)
        sp_text_add(header, " ");
}

static sp_status write_header(FILE *file, const char *path, const tensor *items, size_t n,
                              sp_error *error)
{
    sp_text header = {0};
    unsigned char length[8];
    sp_status status = SP_OK;

    format_header(items, n, &header);
    for (int i = 0; i < 8; i++)
        length[i] = (unsigned char)((uint64_t)header.bytes >> (8 * i));
    if (header.failed)
        status = sp_fail_memory(error, header.bytes, "a header");
    else if (fwrite(length, 8, 1, file) != 1 || fwrite(header.data, header.bytes, 1, file) != 1)
        status = io_failed(path, error);
    sp_text_free(&header);
    return status;
}

static sp_status write_data(writer *w, FILE *file, const char *path, const tensor *t,
                            sp_error *error)
{
    uint64_t stream = w->seed;
    int64_t n = tensor_elements(t);

    for (const char *c = t->name; *c; c++) /* other tensors, other numbers */
        stream = mix(stream ^ (unsigned char)*c);
    for (int64_t first = 0; first < n; first += CHUNK_ELEMENTS) {
        int64_t m = n - first < CHUNK_ELEMENTS ? n - first : CHUNK_ELEMENTS;
        size_t bytes = (size_t)m * sp_dtype_bytes(t->dtype);

        fill(t, stream, first, m, w->chunk);
        if (fwrite(w->chunk, bytes, 1, file) != 1)
            return io_failed(path, error);
        w->bytes_done += bytes;
    }
    show_progress(w, false);
    return SP_OK;
}

static sp_status write_tensors(writer *w, const char *name, const tensor *items, size_t n,
                               sp_error *error)
{
    char *path = sp_path_join(w->directory, name);
    sp_status status = SP_OK;
    FILE *file;

    if (!path)
        return sp_fail_memory(error, strlen(name), "a file name");
    file = fopen(path, "wb");
    if (!file) {
        status = io_failed(path, error);
        goto free_path;
    }
    status = write_header(file, path, items, n, error);
    for (size_t i = 0; i < n && status == SP_OK; i++)
        status = write_data(w, file, path, &items[i], error);
    if (fclose(file) != 0 && status == SP_OK)
        status = io_failed(path, error);
free_path:
    sp_free(path);
    return status;
}

static sp_status write_text(const char *directory, const char *name, sp_text *text, sp_error *error)
{
    char *path = sp_path_join(directory, name);
    sp_status status;

    if (!path || text->failed)
        status = sp_fail_memory(error, text->bytes, name);
    else
        status = sp_file_write_all(path, text->data, text->bytes, error);
    sp_free(path);
    sp_text_free(text);
    return status;
}

static sp_status make_directory(const char *path, sp_error *error)
{
    if (mkdir(path, 0777) != 0 && errno != EEXIST)
        return io_failed(path, error);
    return SP_OK;
}

/* --- The checkpoint ---------------------------------------------------------------------- */

static uint64_t list_bytes(const tensor_list *list)
{
    uint64_t bytes = 0;

    for (size_t i = 0; i < list->n; i++)
        bytes += tensor_bytes(&list->items[i]);
    return bytes;
}

/* Spreads the tensors in order, each shard up to its share of the bytes but at least one tensor. */
static sp_status write_shards(writer *w, const tensor_list *list, int64_t n_shards, sp_error *error)
{
    uint64_t all = list_bytes(list), taken = 0;
    sp_text index = {0};
    size_t from = 0;
    sp_status status = SP_OK;

    sp_text_format(&index, "{\"metadata\":{\"total_size\":%" PRIu64 "},\"weight_map\":{", all);
    for (int64_t shard = 1; shard <= n_shards && status == SP_OK; shard++) {
        size_t to = from, left = (size_t)(n_shards - shard);
        char name[64];

        snprintf(name, sizeof name, "model-%05" PRId64 "-of-%05" PRId64 ".safetensors", shard,
                 n_shards);
        while (to + left < list->n &&
               (to == from || left == 0 || taken < all / (uint64_t)n_shards * (uint64_t)shard)) {
            sp_text_format(&index, "%s\"%s\":\"%s\"", to ? "," : "", list->items[to].name, name);
            taken += tensor_bytes(&list->items[to++]);
        }
        status = write_tensors(w, name, list->items + from, to - from, error);
        from = to;
    }
    sp_text_add(&index, "}}\n");
    if (status != SP_OK) {
        sp_text_free(&index);
        return status;
    }
    return write_text(w->directory, "model.safetensors.index.json", &index, error);
}

static sp_status write_config(const writer *w, const shape *s, int64_t eos, sp_error *error)
{
    sp_text text = {0};
    sp_status status;

    sp_text_format(&text,
                   "{\n  \"eos_token_id\": %" PRId64 ",\n  \"pad_token_id\": %" PRId64 "\n}\n", eos,
                   eos);
    status = write_text(w->directory, "generation_config.json", &text, error);
    if (status != SP_OK)
        return status;
    sp_text_format(&text,
                   "{\n  \"architectures\": [\"%s\"],\n  \"model_type\": \"%s\",\n"
                   "  \"attention_bias\": false,\n  \"hidden_act\": \"silu\",\n"
                   "  \"hidden_size\": %" PRId64 ",\n  \"num_hidden_layers\": %" PRId64 ",\n"
                   "  \"num_attention_heads\": %" PRId64 ",\n  \"num_key_value_heads\": %" PRId64
                   ",\n  \"head_dim\": %" PRId64 ",\n  \"intermediate_size\": %" PRId64 ",\n"
                   "  \"vocab_size\": %" PRId64 ",\n  \"tie_word_embeddings\": %s,\n",
                   s->value_heads > 0 ? "Qwen3_5ForCausalLM"
                   : s->experts > 0   ? "Qwen3MoeForCausalLM"
                                      : "Qwen3ForCausalLM",
                   s->value_heads > 0 ? "qwen3_5_text"
                   : s->experts > 0   ? "qwen3_moe"
                                      : "qwen3",
                   s->hidden, s->layers, s->heads, s->kv_heads, s->head_dim, s->intermediate,
                   s->vocab, s->tied ? "true" : "false");
    if (s->experts > 0)
        sp_text_format(&text,
                       "  \"num_experts\": %" PRId64 ",\n  \"num_experts_per_tok\": %" PRId64
                       ",\n  \"moe_intermediate_size\": %" PRId64 ",\n"
                       "  \"norm_topk_prob\": true,\n  \"decoder_sparse_step\": 1,\n"
                       "  \"mlp_only_layers\": [],\n",
                       s->experts, s->chosen, s->expert_intermediate);
    if (s->value_heads > 0)
        sp_text_format(&text,
                       "  \"full_attention_interval\": %d,\n"
                       "  \"linear_num_key_heads\": %" PRId64 ",\n"
                       "  \"linear_num_value_heads\": %" PRId64 ",\n"
                       "  \"linear_key_head_dim\": %" PRId64 ",\n"
                       "  \"linear_value_head_dim\": %" PRId64 ",\n"
                       "  \"linear_conv_kernel_dim\": %d,\n"
                       "  \"partial_rotary_factor\": 0.25,\n",
                       ATTENTION_INTERVAL, s->key_heads, s->value_heads, s->delta_dim, s->delta_dim,
                       CONV_WIDTH);
    sp_text_format(&text,
                   "  \"max_position_embeddings\": 40960,\n  \"rms_norm_eps\": 1e-06,\n"
                   "  \"rope_theta\": 1000000,\n  \"rope_scaling\": null,\n"
                   "  \"sliding_window\": null,\n  \"use_sliding_window\": false,\n"
                   "  \"torch_dtype\": \"bfloat16\",\n  \"eos_token_id\": %" PRId64 "\n}\n",
                   eos);
    return write_text(w->directory, "config.json", &text, error);
}

static sp_status copy_tokenizer(const writer *w, const char *from, sp_error *error)
{
    sp_text text = {0};
    char *bytes;
    size_t n_bytes;
    sp_status status = sp_file_read_all(from, (size_t)128 << 20, &bytes, &n_bytes, error);

    if (status != SP_OK)
        return status;
    sp_text_add_bytes(&text, bytes, n_bytes);
    sp_free(bytes);
    return write_text(w->directory, "tokenizer.json", &text, error);
}

/* --- Adapters ---------------------------------------------------------------------------- */

/* "null", or a list of tokens as far apart as the vocabulary allows. */
static void add_token_list(sp_text *text, int64_t vocab, int64_t trained)
{
    if (trained == 0)
        sp_text_add(text, "null");
    for (int64_t i = 0; i < trained; i++)
        sp_text_format(text, "%s%" PRId64, i == 0 ? "[" : ", ", i * vocab / trained);
    if (trained > 0)
        sp_text_add(text, "]");
}

static sp_status write_adapter_config(const writer *w, const shape *s, int64_t rank,
                                      int64_t trained, sp_error *error)
{
    sp_text text = {0};

    sp_text_format(&text,
                   "{\n  \"peft_type\": \"LORA\",\n  \"task_type\": \"CAUSAL_LM\",\n"
                   "  \"r\": %" PRId64 ",\n  \"lora_alpha\": %" PRId64 ",\n"
                   "  \"use_rslora\": false,\n  \"use_dora\": false,\n  \"bias\": \"none\",\n"
                   "  \"fan_in_fan_out\": false,\n  \"inference_mode\": true,\n"
                   "  \"rank_pattern\": {},\n  \"alpha_pattern\": {},\n"
                   "  \"modules_to_save\": null,\n  \"base_model_name_or_path\": null,\n"
                   "  \"target_modules\": [\"q_proj\", \"k_proj\", \"v_proj\", \"o_proj\", "
                   "%s%s\"gate_proj\", \"up_proj\", \"down_proj\"],\n"
                   "  \"trainable_token_indices\": ",
                   rank, 2 * rank, s->experts > 0 ? "\"gate\", " : "",
                   s->value_heads > 0 ? "\"in_proj_qkv\", \"in_proj_z\", \"in_proj_b\", "
                                        "\"in_proj_a\", \"out_proj\", "
                                      : "");
    add_token_list(&text, s->vocab, trained);
    sp_text_add(&text, "\n}\n");
    return write_text(w->directory, "adapter_config.json", &text, error);
}

static sp_status write_adapter(writer *w, const shape *s, const tensor_list *list, int64_t number,
                               const options *opt, const char *folder, sp_error *error)
{
    writer adapter = *w;
    char name[32], *directory;
    sp_status status;

    snprintf(name, sizeof name, "a%" PRId64, number);
    directory = sp_path_join(folder, name);
    if (!directory)
        return sp_fail_memory(error, sizeof name, "a file name");
    adapter.directory = directory;
    adapter.seed = mix(w->seed + 1 + (uint64_t)number);
    status = make_directory(directory, error);
    if (status == SP_OK)
        status = write_tensors(&adapter, "adapter_model.safetensors", list->items, list->n, error);
    if (status == SP_OK)
        status = write_adapter_config(&adapter, s, opt->rank, opt->trained, error);
    w->bytes_done = adapter.bytes_done;
    sp_free(directory);
    return status;
}

static sp_status write_adapters(writer *w, const shape *s, const tensor_list *list,
                                const options *opt, sp_error *error)
{
    char *folder;
    sp_status status;

    if (opt->adapters == 0)
        return SP_OK;
    folder = sp_path_join(w->directory, "adapters");
    if (!folder)
        return sp_fail_memory(error, strlen(w->directory), "a file name");
    status = make_directory(folder, error);
    for (int64_t i = 0; i < opt->adapters && status == SP_OK; i++)
        status = write_adapter(w, s, list, i, opt, folder, error);
    sp_free(folder);
    return status;
}

/* --- All of it --------------------------------------------------------------------------- */

static sp_dtype dtype_of(const options *opt)
{
    return strcmp(opt->dtype, "f32") == 0    ? SP_DTYPE_F32
           : strcmp(opt->dtype, "bf16") == 0 ? SP_DTYPE_BF16
                                             : SP_DTYPE_F16;
}

static sp_status write_files(writer *w, const options *opt, const shape *s,
                             const tensor_list *model, const tensor_list *adapter, sp_error *error)
{
    char *config = sp_path_join(w->directory, "config.json");
    sp_status status = make_directory(w->directory, error);

    if (!config)
        return sp_fail_memory(error, strlen(w->directory), "a file name");
    if (status == SP_OK && sp_path_exists(config))
        status = sp_fail(error, SP_ERR_INPUT, NULL, config, -1,
                         "%s is there already: choose another directory", config);
    sp_free(config);
    if (status == SP_OK && opt->tokenizer)
        status = copy_tokenizer(w, opt->tokenizer, error);
    if (status == SP_OK && !opt->adapters_only)
        status = opt->shards > 1
                     ? write_shards(w, model, opt->shards, error)
                     : write_tensors(w, "model.safetensors", model->items, model->n, error);
    if (status == SP_OK)
        status = write_adapters(w, s, adapter, opt, error);
    if (status == SP_OK)
        status = write_config(w, s, opt->eos < 0 ? s->vocab - 1 : opt->eos, error);
    return status;
}

static sp_status make(const options *opt, const char *directory, sp_error *error)
{
    writer w = {.directory = directory, .seed = mix((uint64_t)opt->seed), .progress = isatty(2)};
    tensor_list model = {0}, adapter = {0};
    shape s;
    sp_status status = choose_shape(opt, &s, error);

    if (status != SP_OK)
        return status;
    list_model(&s, &model);
    list_adapter(&s, opt->rank, opt->trained, dtype_of(opt), &adapter);
    w.chunk = sp_malloc(CHUNK_ELEMENTS * sizeof(float));
    w.bytes_all = (opt->adapters_only ? 0 : list_bytes(&model)) +
                  (uint64_t)opt->adapters * list_bytes(&adapter);
    w.started_s = sp_clock_seconds();
    if (!w.chunk || model.failed || adapter.failed)
        status = sp_fail_memory(error, CHUNK_ELEMENTS * sizeof(float), "writing");
    else if ((size_t)opt->shards > model.n)
        status = sp_fail(error, SP_ERR_ARGUMENT, NULL, "shards", -1, "only %zu tensors", model.n);
    else
        status = write_files(&w, opt, &s, &model, &adapter, error);
    if (status == SP_OK)
        show_progress(&w, true);
    sp_free(w.chunk);
    sp_free(model.items);
    sp_free(adapter.items);
    return status;
}

int main(int argc, char **argv)
{
    options opt = {0};
    sp_setting_list positional = {0};
    sp_error error = {0};
    sp_status status =
        sp_settings_parse(settings, N_SETTINGS, argc, argv, &opt, &positional, &error);
    int exit_status = 0;

    if (status == SP_OK && opt.help) {
        printf(
            "usage: make_checkpoint [flags] DIR\n"
            "Writes a random Qwen3, Qwen3-MoE or Qwen3.5 checkpoint into DIR, and adapters for it."
            "\n\n");
        sp_settings_print_help(stdout, settings, N_SETTINGS);
    } else if (status == SP_OK && positional.n != 1) {
        fprintf(stderr, "make_checkpoint: one directory is needed; try --help\n");
        exit_status = 2;
    } else {
        if (status == SP_OK)
            status = make(&opt, positional.values[0], &error);
        if (status != SP_OK) {
            fprintf(stderr, "make_checkpoint: %s\n", error.text);
            exit_status = status == SP_ERR_ARGUMENT ? 2 : 1;
        }
    }
    sp_settings_free_lists(settings, N_SETTINGS, &opt, &positional);
    return exit_status;
}
