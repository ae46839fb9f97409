/*
 * source_disk.c: adapters from directories. Every fetch has files of its own, so loaders share
 * nothing.
 */
#include "adapter/files.h"
#include "base/alloc.h"
#include "base/error.h"
#include "base/grow.h"

#include <sidepath/stage.h>

#include <stdlib.h>

/* One adapter that is being read. */
typedef struct disk_adapter {
    sp_adapter_files files;
    sp_tensor_desc *descs;     /* [n] in the order of files and offsets */
    const sp_tensor **tensors; /* [n] likewise */
    sp_file file;              /* the one that was read last */
    int32_t file_index;        /* -1: none */
} disk_adapter;

static void close_adapter(disk_adapter *adapter)
{
    if (adapter->file_index >= 0)
        sp_file_close(&adapter->file);
    sp_adapter_files_close(&adapter->files);
    sp_free(adapter->tensors);
    sp_free(adapter->descs);
    sp_free(adapter);
}

static int by_file_offset(const void *left, const void *right)
{
    const sp_tensor *a = *(const sp_tensor *const *)left;
    const sp_tensor *b = *(const sp_tensor *const *)right;

    if (a->file != b->file)
        return a->file < b->file ? -1 : 1;
    return (a->offset_bytes > b->offset_bytes) - (a->offset_bytes < b->offset_bytes);
}

static sp_status list_tensors(disk_adapter *adapter, size_t n, sp_error *error)
{
    adapter->tensors = sp_calloc(
        n + 1, sizeof(sp_tensor *)); /* at least one, since an empty block would be NULL */
    adapter->descs = sp_calloc(n + 1, sizeof *adapter->descs);
    if (adapter->tensors == NULL || adapter->descs == NULL)
        return sp_fail_memory(error, n * sizeof *adapter->descs, "a list of tensors");
    for (size_t i = 0; i < n; i++)
        adapter->tensors[i] = sp_checkpoint_at(adapter->files.checkpoint, i);
    qsort(adapter->tensors, n, sizeof(sp_tensor *), by_file_offset);
    for (size_t i = 0; i < n; i++) {
        const sp_tensor *tensor = adapter->tensors[i];

        adapter->descs[i] = (sp_tensor_desc){sizeof *adapter->descs, tensor->name, tensor->type,
                                             tensor->n_dims, tensor->dims};
    }
    return SP_OK;
}

static sp_status describe(void *user, const sp_source_request *request,
                          sp_source_description *out_description, sp_error *error)
{
    disk_adapter *adapter;
    size_t n;
    sp_status status;

    (void)user;
    if (request->location[0] == '\0')
        return sp_fail(error, SP_ERR_NOT_FOUND, NULL, request->name, -1,
                       "no directory was given for \"%s\"", request->name);
    adapter = sp_calloc(1, sizeof *adapter);
    if (adapter == NULL)
        return sp_fail_memory(error, sizeof *adapter, "an adapter");
    adapter->file_index = -1;
    status = sp_adapter_files_open(request->location, &adapter->files, error);
    n = status == SP_OK ? sp_checkpoint_n_tensors(adapter->files.checkpoint) : 0;
    if (status == SP_OK)
        status = list_tensors(adapter, n, error);
    if (status != SP_OK) {
        close_adapter(adapter);
        return status;
    }
    out_description->handle = adapter;
    out_description->config = adapter->files.config;
    out_description->config_bytes = adapter->files.config_bytes;
    out_description->config_name = adapter->files.config_shown;
    out_description->note = adapter->files.note.data;
    out_description->tensors = adapter->descs;
    out_description->n_tensors = n;
    return SP_OK;
}

static sp_status fetch(void *user, const sp_source_request *request, void *handle,
                       const sp_source_piece *piece, sp_error *error)
{
    disk_adapter *adapter = handle;
    const sp_tensor *tensor = adapter->tensors[piece->part];
    sp_status status = SP_OK;

    (void)user;
    (void)request;
    if (adapter->file_index != tensor->file) {
        if (adapter->file_index >= 0)
            sp_file_close(&adapter->file);
        adapter->file_index = -1;
        status =
            sp_adapter_file_open(adapter->files.checkpoint, tensor->file, &adapter->file, error);
    }
    if (status != SP_OK)
        return status;
    adapter->file_index = tensor->file;
    return sp_adapter_file_read(adapter->files.checkpoint, &adapter->file, tensor, piece->offset,
                                piece->memory, piece->bytes, error);
}

static void release(void *user, const sp_source_request *request, void *handle)
{
    (void)user;
    (void)request;
    close_adapter(handle);
}

sp_status sp_disk_source_create(sp_stage_source *out_source, sp_error *error)
{
    const sp_stage_source source = {
        .struct_bytes = sizeof source, .describe = describe, .fetch = fetch, .release = release};

    return sp_struct_write(out_source, &source, sizeof source, "sp_stage_source", error);
}

void sp_disk_source_destroy(sp_stage_source *source)
{
    source->describe = NULL;
    source->fetch = NULL;
    source->release = NULL;
}
