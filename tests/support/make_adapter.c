#include "support/make_adapter.h"

#include "base/alloc.h"
#include "base/half.h"

#include <stdio.h>
#include <string.h>

#define DIMS_MAX 8

typedef struct made_tensor {
    char *name;
    char dtype[16];
    int n_dims;
    int64_t dims[DIMS_MAX];
    size_t bytes;
    void *data; /* NULL for a tensor without elements */
} made_tensor;

struct make_adapter {
    char *config;
    made_tensor *tensors; /* [room] */
    int n_tensors, room;
    bool reversed;
};

static const char default_config[] =
    "{\"peft_type\": \"LORA\", \"task_type\": \"CAUSAL_LM\", \"r\": 2, \"lora_alpha\": 4, "
    "\"use_rslora\": false, \"peft_version\": \"0.21.0\"";

static void *must(void *memory)
{
    if (!memory)
        fail_msg("out of memory");
    return memory;
}

make_adapter *make_adapter_create(void)
{
    make_adapter *adapter = must(sp_calloc(1, sizeof *adapter));

    make_adapter_config_with(adapter, "");
    return adapter;
}

void make_adapter_destroy(make_adapter *adapter)
{
    for (int i = 0; i < adapter->n_tensors; i++) {
        sp_free(adapter->tensors[i].name);
        sp_free(adapter->tensors[i].data);
    }
    sp_free(adapter->tensors);
    sp_free(adapter->config);
    sp_free(adapter);
}

void make_adapter_config(make_adapter *adapter, const char *text)
{
    sp_free(adapter->config);
    adapter->config = text ? must(sp_strdup(text)) : NULL;
}

void make_adapter_config_with(make_adapter *adapter, const char *members)
{
    size_t bytes = sizeof default_config + strlen(members) + 2;

    sp_free(adapter->config);
    adapter->config = must(sp_malloc(bytes));
    snprintf(adapter->config, bytes, "%s%s}", default_config, members);
}

static size_t element_bits(const char *dtype)
{
    static const struct {
        const char *part;
        size_t bits;
    } widths[] = {{"64", 64}, {"32", 32}, {"16", 16}};

    for (size_t i = 0; i < sizeof widths / sizeof *widths; i++) {
        if (strstr(dtype, widths[i].part))
            return widths[i].bits;
    }
    return 8;
}

static void *add(make_adapter *adapter, const char *name, const char *dtype, int n_dims,
                 const int64_t *dims)
{
    made_tensor *tensor;
    size_t bits = element_bits(dtype);

    assert_true(n_dims <= DIMS_MAX);
    if (adapter->n_tensors == adapter->room) {
        adapter->room = adapter->room ? 2 * adapter->room : 64;
        adapter->tensors =
            must(sp_realloc(adapter->tensors, (size_t)adapter->room * sizeof *adapter->tensors));
    }
    tensor = &adapter->tensors[adapter->n_tensors++];
    tensor->name = must(sp_strdup(name));
    snprintf(tensor->dtype, sizeof tensor->dtype, "%s", dtype);
    tensor->n_dims = n_dims;
    for (int i = 0; i < n_dims; i++) {
        tensor->dims[i] = dims[i];
        bits *= (size_t)dims[i];
    }
    tensor->bytes = bits / 8;
    tensor->data = tensor->bytes > 0 ? must(sp_calloc(tensor->bytes, 1)) : NULL;
    return tensor->data;
}

void *make_adapter_add(make_adapter *adapter, const char *name, const char *dtype, int n_dims, ...)
{
    int64_t dims[DIMS_MAX] = {0};
    va_list arguments;

    va_start(arguments, n_dims);
    for (int i = 0; i < n_dims; i++)
        dims[i] = va_arg(arguments, int);
    va_end(arguments);
    return add(adapter, name, dtype, n_dims, dims);
}

void make_adapter_add_random(make_adapter *adapter, const char *name, int rows, int cols,
                             uint64_t seed)
{
    uint16_t *data = make_adapter_add(adapter, name, "BF16", 2, rows, cols);
    sp_test_random random = {seed};

    for (int64_t i = 0; i < (int64_t)rows * cols; i++)
        data[i] = sp_f32_to_bf16(sp_test_float(&random));
}

void make_adapter_add_pair(make_adapter *adapter, const char *path, int rank, int k_in, int n_out,
                           uint64_t seed)
{
    char name[512];

    snprintf(name, sizeof name, "%s.lora_A.weight", path);
    make_adapter_add_random(adapter, name, rank, k_in, seed);
    snprintf(name, sizeof name, "%s.lora_B.weight", path);
    make_adapter_add_random(adapter, name, n_out, rank, seed + 1000);
}

void *make_adapter_data(make_adapter *adapter, const char *name, size_t *out_bytes)
{
    for (int i = 0; i < adapter->n_tensors; i++) {
        if (strcmp(adapter->tensors[i].name, name) != 0)
            continue;
        if (out_bytes)
            *out_bytes = adapter->tensors[i].bytes;
        return adapter->tensors[i].data;
    }
    fail_msg("no tensor %s was made", name);
    return NULL;
}

void make_adapter_reverse(make_adapter *adapter)
{
    adapter->reversed = !adapter->reversed;
}

/* ---- the file -------------------------------------------------------------------------------- */

static const made_tensor *tensor_at(const make_adapter *adapter, int i)
{
    return &adapter->tensors[adapter->reversed ? adapter->n_tensors - 1 - i : i];
}

static size_t write_entry(char *out, size_t bytes, const made_tensor *tensor, size_t offset,
                          bool first)
{
    size_t at = (size_t)snprintf(out, bytes, "%s\"%s\":{\"dtype\":\"%s\",\"shape\":[",
                                 first ? "" : ",", tensor->name, tensor->dtype);

    for (int i = 0; i < tensor->n_dims; i++)
        at += (size_t)snprintf(out + at, bytes - at, "%s%lld", i > 0 ? "," : "",
                               (long long)tensor->dims[i]);
    at += (size_t)snprintf(out + at, bytes - at, "],\"data_offsets\":[%zu,%zu]}", offset,
                           offset + tensor->bytes);
    return at;
}

/* The tensors [first, last) of the order, as one file. */
static unsigned char *file_of(const make_adapter *adapter, int first, int last, size_t *out_bytes)
{
    size_t header_max = 64, data_bytes = 0, at = 0, offset = 0;
    unsigned char *file;
    char *header;

    for (int i = first; i < last; i++) {
        header_max += strlen(tensor_at(adapter, i)->name) + 256;
        data_bytes += tensor_at(adapter, i)->bytes;
    }
    header = must(sp_malloc(header_max));
    at = (size_t)snprintf(header, header_max, "{\"__metadata__\":{\"format\":\"pt\"}");
    for (int i = first; i < last; i++) {
        at += write_entry(header + at, header_max - at, tensor_at(adapter, i), offset, false);
        offset += tensor_at(adapter, i)->bytes;
    }
    at += (size_t)snprintf(header + at, header_max - at, "}");
    file = must(sp_malloc(8 + at + data_bytes));
    for (int i = 0; i < 8; i++)
        file[i] = (unsigned char)((uint64_t)at >> (8 * i));
    memcpy(file + 8, header, at);
    *out_bytes = 8 + at;
    for (int i = first; i < last; i++) {
        const made_tensor *tensor = tensor_at(adapter, i);

        if (tensor->bytes > 0)
            memcpy(file + *out_bytes, tensor->data, tensor->bytes);
        *out_bytes += tensor->bytes;
    }
    sp_free(header);
    return file;
}

unsigned char *make_adapter_bytes(const make_adapter *adapter, size_t *out_bytes)
{
    return file_of(adapter, 0, adapter->n_tensors, out_bytes);
}

static void write_shards(const make_adapter *adapter, const char *directory, int shards)
{
    size_t bytes = 64;
    size_t at;
    char *index;

    for (int i = 0; i < adapter->n_tensors; i++)
        bytes += strlen(tensor_at(adapter, i)->name) + 64;
    index = must(sp_malloc(bytes));
    at = (size_t)snprintf(index, bytes, "{\"weight_map\":{");
    for (int s = 0; s < shards; s++) {
        int first = adapter->n_tensors * s / shards;
        int last = adapter->n_tensors * (s + 1) / shards;
        size_t file_bytes;
        unsigned char *file = file_of(adapter, first, last, &file_bytes);
        char name[64];

        snprintf(name, sizeof name, "adapter_model-%d.safetensors", s);
        sp_test_write_file(directory, name, file, file_bytes);
        sp_free(file);
        for (int i = first; i < last; i++)
            at += (size_t)snprintf(index + at, bytes - at, "%s\"%s\":\"%s\"", i > 0 ? "," : "",
                                   tensor_at(adapter, i)->name, name);
    }
    at += (size_t)snprintf(index + at, bytes - at, "}}");
    sp_test_write_file(directory, "adapter_model.safetensors.index.json", index, at);
    sp_free(index);
}

void make_adapter_write(const make_adapter *adapter, const char *directory, int shards)
{
    size_t bytes;
    unsigned char *file;

    if (adapter->config)
        sp_test_write_file(directory, "adapter_config.json", adapter->config,
                           strlen(adapter->config));
    if (shards > 1) {
        write_shards(adapter, directory, shards);
        return;
    }
    file = make_adapter_bytes(adapter, &bytes);
    sp_test_write_file(directory, "adapter_model.safetensors", file, bytes);
    sp_free(file);
}

char *make_adapter_folder(const make_adapter *adapter)
{
    char *directory = sp_test_make_directory();

    make_adapter_write(adapter, directory, 1);
    return directory;
}
