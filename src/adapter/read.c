/*
 * read.c: the adapter's data into one block of memory, with pread, so that a file that shrinks is
 * an error and not a signal. Each piece is checked while it is still in the cache.
 */
#include "adapter/audit.h"
#include "adapter/values.h"

#include "base/alloc.h"
#include "base/file.h"

#include <stdlib.h>
#include <string.h>

#define PIECE_BYTES ((size_t)256 << 10) /* a multiple of every element size */
#define ALIGN_BYTES 64

/* A copy of a base tensor is compared piece by piece elsewhere, and not kept. */
static bool is_kept(const sp_item *item)
{
    return item->key.role != SP_ROLE_BASE_COPY;
}

static size_t padded(uint64_t bytes)
{
    return (size_t)((bytes + ALIGN_BYTES - 1) / ALIGN_BYTES * ALIGN_BYTES);
}

static int by_file_offset(const void *left, const void *right)
{
    const sp_tensor *a = (*(sp_item *const *)left)->tensor;
    const sp_tensor *b = (*(sp_item *const *)right)->tensor;

    if (a->file != b->file)
        return a->file < b->file ? -1 : 1;
    return (a->offset_bytes > b->offset_bytes) - (a->offset_bytes < b->offset_bytes);
}

static sp_status refuse_value(const sp_audit *audit, const sp_item *item, const char *data,
                              int64_t index)
{
    int64_t cols = item->tensor->dims[1];

    return sp_refuse(audit->error, SP_REASON_NON_FINITE, item->tensor->name, index,
                     "%.200s: element %lld (row %lld, column %lld) is %g, which is not finite in "
                     "%s",
                     item->tensor->name, (long long)index, (long long)(index / cols),
                     (long long)(index % cols), (double)sp_values_at(data, item->dtype, index),
                     sp_dtype_name(audit->options->pool_dtype));
}

static sp_status read_one(const sp_audit *audit, const sp_file *file, const char *path,
                          sp_item *item, char *data)
{
    const sp_tensor *tensor = item->tensor;
    size_t element_bytes = sp_dtype_bytes(item->dtype);

    for (uint64_t at = 0; at < tensor->bytes; at += PIECE_BYTES) {
        uint64_t left = tensor->bytes - at;
        size_t n = left < PIECE_BYTES ? (size_t)left : PIECE_BYTES;
        sp_error local;
        sp_status status = sp_file_read(file, tensor->offset_bytes + at, data + at, n, &local);
        int64_t bad;

        if (status == SP_ERR_TRUNCATED)
            return sp_refuse(audit->error, SP_REASON_TRUNCATED, tensor->name, local.position,
                             "%s shrank while %.150s was read: %s", path, tensor->name, local.text);
        if (status != SP_OK)
            return sp_fail(audit->error, status, NULL, path, local.position, "%s: %s", path,
                           local.text);
        bad = sp_values_find_bad(data + at, item->dtype, (int64_t)(n / element_bytes),
                                 audit->options->pool_dtype);
        if (bad >= 0)
            return refuse_value(audit, item, data, (int64_t)(at / element_bytes) + bad);
    }
    item->data = data;
    return SP_OK;
}

/* The file must be what its header was read from. */
static sp_status open_file(const sp_audit *audit, int32_t index, sp_file *out_file)
{
    const char *path = sp_checkpoint_path(audit->checkpoint, index);
    uint64_t bytes = sp_checkpoint_file_bytes(audit->checkpoint, index);
    sp_error local;
    sp_status status = sp_file_open(path, out_file, &local);

    if (status == SP_ERR_NOT_FOUND || status == SP_ERR_INPUT)
        return sp_refuse(audit->error, SP_REASON_WEIGHTS_MISSING, path, -1, "%s", local.text);
    if (status != SP_OK) {
        if (audit->error)
            *audit->error = local;
        return status;
    }
    if (out_file->bytes != bytes) {
        status = sp_refuse(audit->error, SP_REASON_TRUNCATED, path, (int64_t)out_file->bytes,
                           "%s had %llu bytes when its header was read, now %llu", path,
                           (unsigned long long)bytes, (unsigned long long)out_file->bytes);
        sp_file_close(out_file);
    }
    return status;
}

/* order [n] ascends by file and offset. */
static sp_status read_all(sp_audit *audit, sp_item **order, size_t n, char *data)
{
    sp_file file = {.fd = -1};
    int32_t open_index = -1;
    sp_status status = SP_OK;

    for (size_t i = 0; i < n && status == SP_OK; i++) {
        const sp_tensor *tensor = order[i]->tensor;

        if (tensor->file != open_index) {
            sp_file_close(&file);
            status = open_file(audit, tensor->file, &file);
            open_index = tensor->file;
        }
        if (status == SP_OK)
            status = read_one(audit, &file, sp_checkpoint_path(audit->checkpoint, tensor->file),
                              order[i], data);
        data += padded(tensor->bytes);
    }
    sp_file_close(&file);
    return status;
}

sp_status sp_audit_read(sp_audit *audit)
{
    sp_item **order = sp_malloc(audit->n_items * sizeof *order);
    size_t n = 0, bytes = 0;
    char *data;
    sp_status status;

    if (!order)
        return sp_fail_memory(audit->error, audit->n_items * sizeof *order, "a list of tensors");
    for (size_t i = 0; i < audit->n_items; i++) {
        if (!is_kept(&audit->items[i]))
            continue;
        order[n++] = &audit->items[i];
        bytes += padded(audit->items[i].tensor->bytes);
    }
    qsort(order, n, sizeof *order, by_file_offset);
    data = sp_malloc(bytes + ALIGN_BYTES);
    audit->adapter->data = data;
    if (!data)
        status = sp_fail_memory(audit->error, bytes, "the tensors of an adapter");
    else
        status = read_all(audit, order, n,
                          data + (ALIGN_BYTES - (uintptr_t)data % ALIGN_BYTES) % ALIGN_BYTES);
    sp_free(order);
    return status;
}
