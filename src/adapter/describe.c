/*
 * describe.c: an intake from a caller's tensor descriptions: they must satisfy what a file's header
 * must, and are sorted as it is.
 */
#include "adapter/intake_state.h"
#include "checkpoint/tensor.h"

#include "base/alloc.h"
#include "base/grow.h"
#include "base/text.h"

#include <stdlib.h>
#include <string.h>

/* A tensor and its index in the caller's list. */
typedef struct entry {
    sp_tensor tensor;
    size_t index;
} entry;

static int by_name(const void *left, const void *right)
{
    return strcmp(((const entry *)left)->tensor.name, ((const entry *)right)->tensor.name);
}

static sp_status read_desc(const sp_tensor_desc *descs, size_t index, sp_tensor_desc *out_desc,
                           sp_error *error)
{
    sp_status status;

    *out_desc = (sp_tensor_desc){.struct_bytes = sizeof *out_desc};
    status = sp_struct_read_at(out_desc, sizeof *out_desc, descs, index, "sp_tensor_desc", error);
    if (status == SP_OK && !out_desc->name)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "name", (int64_t)index,
                       "tensor %zu has no name", index);
    if (status == SP_OK && out_desc->n_dims > 0 && !out_desc->shape)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "shape", (int64_t)index,
                       "tensor %zu has no shape", index);
    return status;
}

static sp_status malformed(const char *name, const char *what, sp_error *error)
{
    return sp_refuse(error, SP_REASON_HEADER_MALFORMED, name, -1, "tensor %.200s: %s", name, what);
}

static sp_status check_name(const char *name, sp_error *error)
{
    for (const char *c = name; *c != '\0'; c++) {
        if ((unsigned char)*c < 0x20)
            return malformed(name, "a control character in its name", error);
    }
    return sp_utf8_valid(name, strlen(name)) ? SP_OK
                                             : malformed(name, "its name is not UTF-8", error);
}

static sp_status fill_tensor(const sp_tensor_desc *desc, sp_tensor *tensor, sp_error *error)
{
    sp_status status = check_name(desc->name, error);

    if (status != SP_OK)
        return status;
    if (!sp_tensor_type_name(desc->type))
        return sp_refuse(error, SP_REASON_UNSUPPORTED_DTYPE, desc->name, -1,
                         "tensor %.200s has the unknown type %d", desc->name, (int)desc->type);
    if (desc->n_dims < 0 || desc->n_dims > SP_TENSOR_DIMS_MAX)
        return malformed(desc->name, "its dimensions are not 0 to 8", error);
    tensor->struct_bytes = sizeof *tensor;
    tensor->type = desc->type;
    tensor->n_dims = desc->n_dims;
    for (int32_t i = 0; i < desc->n_dims; i++) {
        if (desc->shape[i] < 0)
            return malformed(desc->name, "a dimension is negative", error);
        tensor->dims[i] = desc->shape[i];
    }
    if (!sp_tensor_measure(tensor, &tensor->bytes))
        return malformed(desc->name, "a shape whose size is no number of bytes", error);
    return SP_OK;
}

/* entries [n]: their names still point into the caller's list. */
static sp_status read_descs(const sp_tensor_desc *descs, size_t n, entry *entries,
                            size_t *out_name_bytes, sp_error *error)
{
    *out_name_bytes = 0;
    for (size_t i = 0; i < n; i++) {
        sp_tensor_desc desc;
        sp_status status = read_desc(descs, i, &desc, error);

        if (status == SP_OK)
            status = fill_tensor(&desc, &entries[i].tensor, error);
        if (status != SP_OK)
            return status;
        entries[i].tensor.name = desc.name;
        entries[i].index = i;
        *out_name_bytes += strlen(desc.name) + 1;
    }
    qsort(entries, n, sizeof *entries, by_name);
    for (size_t i = 1; i < n; i++) {
        if (by_name(&entries[i - 1], &entries[i]) == 0)
            return sp_refuse(error, SP_REASON_DUPLICATE_KEY, entries[i].tensor.name, -1,
                             "tensor %.200s is given twice", entries[i].tensor.name);
    }
    return SP_OK;
}

/* The sorted entries as the intake's own list. */
static sp_status keep_list(sp_intake *intake, const entry *entries, size_t n, size_t name_bytes,
                           sp_error *error)
{
    char *name;

    intake->list = sp_calloc(
        n + 1, sizeof *intake->list); /* at least one, since an empty block would be NULL */
    intake->order = sp_calloc(n + 1, sizeof *intake->order);
    intake->names = name = sp_malloc(name_bytes + 1);
    if (!intake->list || !intake->order || !intake->names)
        return sp_fail_memory(error, n * sizeof *intake->list + name_bytes, "a list of tensors");
    for (size_t i = 0; i < n; i++) {
        size_t bytes = strlen(entries[i].tensor.name) + 1;

        memcpy(name, entries[i].tensor.name, bytes);
        intake->list[i] = entries[i].tensor;
        intake->list[i].name = name;
        intake->order[i] = entries[i].index;
        name += bytes;
    }
    return SP_OK;
}

static sp_status take_list(sp_intake *intake, const sp_tensor_desc *descs, size_t n,
                           sp_error *error)
{
    entry *entries =
        sp_calloc(n + 1, sizeof *entries); /* at least one, since an empty block would be NULL */
    size_t name_bytes;
    sp_status status;

    if (!entries)
        return sp_fail_memory(error, n * sizeof *entries, "a list of tensors");
    status = read_descs(descs, n, entries, &name_bytes, error);
    if (status == SP_OK)
        status = keep_list(intake, entries, n, name_bytes, error);
    sp_free(entries);
    return status;
}

sp_status sp_intake_describe(const char *config, size_t config_bytes,
                             const sp_intake_origin *origin, const sp_tensor_desc *tensors,
                             size_t n_tensors, const sp_adapter_options *options,
                             sp_intake **out_intake, sp_error *error)
{
    sp_intake *intake;
    sp_status status;

    if (!config)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "config", -1, "no config is given");
    if (!tensors && n_tensors > 0)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "tensors", -1, "no tensors are given");
    if (!out_intake)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "out_intake", -1, "no result is given");
    if (n_tensors > INT32_MAX)
        return sp_fail(error, SP_ERR_TOO_LARGE, NULL, "n_tensors", -1,
                       "%zu tensors; no adapter has more than %d", n_tensors, INT32_MAX);
    status = sp_intake_begin(config, config_bytes, origin, options, "adapter", &intake, error);
    if (status != SP_OK)
        return status;
    status = take_list(intake, tensors, n_tensors, error);
    if (status == SP_OK)
        status = sp_intake_audit(intake, intake->list, n_tensors, error);
    if (status != SP_OK) {
        sp_intake_destroy(intake);
        return status;
    }
    *out_intake = intake;
    return SP_OK;
}

sp_status sp_intake_create(const char *config, size_t config_bytes, const sp_tensor_desc *tensors,
                           size_t n_tensors, const sp_adapter_options *options,
                           sp_intake **out_intake, sp_error *error)
{
    static const sp_intake_origin origin = {.config_name = "adapter_config.json"};

    return sp_intake_describe(config, config_bytes, &origin, tensors, n_tensors, options,
                              out_intake, error);
}
