#include "peer/peer_content.h"

#include "adapter/files.h"
#include "adapter/intake_state.h"
#include "base/alloc.h"
#include "base/error.h"
#include "base/integer.h"

#include <stdlib.h>
#include <string.h>

#define BLOCK_ALIGN 4096
#define IMAGE_ALIGN 256

/* An adapter while it is read. */
typedef struct reading {
    sp_adapter_files files;
    const sp_tensor **tensors; /* [n] in the order of files and offsets */
    sp_tensor_desc *descs;     /* [n] likewise */
    uint64_t *offsets;         /* [n + 1] */
    sp_tensor_view *views;     /* [n] */
    size_t n;
    char *block;
    uint64_t block_bytes; /* allocated */
    sp_adapter *adapter;
    const sp_peer_packer *packer; /* NULL: not packed */
    void *packed;                 /* the packer's handle */
    sp_peer_image image;
    bool is_packed;
} reading;

static void end_reading(reading *r)
{
    if (r->packer)
        r->packer->done(r->packer->user, r->packed);
    sp_adapter_release(r->adapter);
    sp_aligned_free(r->block);
    sp_free(r->views);
    sp_free(r->offsets);
    sp_free(r->descs);
    sp_free(r->tensors);
    sp_adapter_files_close(&r->files);
}

static int by_file_offset(const void *left, const void *right)
{
    const sp_tensor *a = *(const sp_tensor *const *)left;
    const sp_tensor *b = *(const sp_tensor *const *)right;

    if (a->file != b->file)
        return a->file < b->file ? -1 : 1;
    return (a->offset_bytes > b->offset_bytes) - (a->offset_bytes < b->offset_bytes);
}

static sp_status list_tensors(reading *r, sp_error *error)
{
    uint64_t offset = 0;

    r->tensors = sp_calloc(r->n + 1, sizeof(sp_tensor *)); /* an empty block would be NULL */
    r->descs = sp_calloc(r->n + 1, sizeof *r->descs);
    r->offsets = sp_calloc(r->n + 1, sizeof *r->offsets);
    r->views = sp_calloc(r->n + 1, sizeof *r->views);
    if (!r->tensors || !r->descs || !r->offsets || !r->views)
        return sp_fail_memory(error, r->n * sizeof *r->views, "a list of tensors");
    for (size_t i = 0; i < r->n; i++)
        r->tensors[i] = sp_checkpoint_at(r->files.checkpoint, i);
    qsort(r->tensors, r->n, sizeof(sp_tensor *), by_file_offset);
    for (size_t i = 0; i < r->n; i++) {
        const sp_tensor *tensor = r->tensors[i];

        r->descs[i] = (sp_tensor_desc){sizeof *r->descs, tensor->name, tensor->type, tensor->n_dims,
                                       tensor->dims};
        r->offsets[i] = offset;
        offset += tensor->bytes;
    }
    r->offsets[r->n] = offset;
    return SP_OK;
}

static sp_status begin_reading(reading *r, const char *path, sp_error *error)
{
    sp_status status = sp_adapter_files_open(path, &r->files, error);

    if (status != SP_OK)
        return status;
    r->n = sp_checkpoint_n_tensors(r->files.checkpoint);
    status = list_tensors(r, error);
    if (status == SP_OK && r->offsets[r->n] > SP_PEER_DATA_BYTES_MAX)
        status = sp_fail(error, SP_ERR_TOO_LARGE, NULL, path, -1, "%s: too large for a peer", path);
    return status;
}

sp_status sp_peer_content_measure(const char *path, uint64_t *out_bytes, sp_error *error)
{
    reading r = {.n = 0};
    sp_status status = begin_reading(&r, path, error);

    if (status == SP_OK)
        *out_bytes = r.offsets[r.n];
    end_reading(&r);
    return status;
}

/* ---- bytes ----------------------------------------------------------------------------------- */

/* An empty block would be NULL. */
static uint64_t block_bytes_of(uint64_t bytes)
{
    return bytes > 0 ? bytes : 1;
}

static sp_status allocate(reading *r, uint64_t bytes, sp_error *error)
{
    r->block_bytes = block_bytes_of(bytes);
    r->block = sp_aligned_malloc((size_t)r->block_bytes, BLOCK_ALIGN);
    return r->block ? SP_OK : sp_fail_memory(error, (size_t)bytes, "an adapter");
}

static sp_status read_tensors(reading *r, sp_error *error)
{
    sp_file file = {.fd = -1};
    int32_t index = -1;
    sp_status status = SP_OK;

    for (size_t i = 0; i < r->n && status == SP_OK; i++) {
        const sp_tensor *tensor = r->tensors[i];

        if (tensor->file != index) {
            sp_file_close(&file);
            index = tensor->file;
            status = sp_adapter_file_open(r->files.checkpoint, index, &file, error);
        }
        if (status == SP_OK && tensor->bytes > 0)
            status = sp_adapter_file_read(r->files.checkpoint, &file, tensor, 0,
                                          r->block + r->offsets[i], (size_t)tensor->bytes, error);
    }
    sp_file_close(&file);
    return status;
}

/* The digest is of the very bytes that are served: the files may change meanwhile. */
static sp_status audit(reading *r, const char *name, const sp_adapter_options *options,
                       sp_error *error)
{
    sp_adapter_options named = *options;

    named.name = name;
    for (size_t i = 0; i < r->n; i++)
        r->views[i] = (sp_tensor_view){.struct_bytes = sizeof *r->views,
                                       .name = r->descs[i].name,
                                       .data = r->block + r->offsets[i],
                                       .type = r->descs[i].type,
                                       .n_dims = r->descs[i].n_dims,
                                       .shape = r->descs[i].shape};
    return sp_adapter_from_tensors(r->files.config, r->files.config_bytes, r->views, r->n, &named,
                                   &r->adapter, error);
}

/* The image after the tensors, in a block for both. Without memory for it there is none. */
static void append_image(reading *r, const sp_peer_packer *packer)
{
    uint64_t at = align_up((size_t)r->offsets[r->n], IMAGE_ALIGN);
    const void *bytes = NULL;
    char *both;

    if (!packer ||
        packer->pack(packer->user, r->adapter, &r->image, &bytes, &r->packed, NULL) != SP_OK)
        return;
    r->packer = packer;
    both = sp_aligned_malloc((size_t)(at + r->image.bytes), BLOCK_ALIGN);
    if (both) {
        memcpy(both, r->block, (size_t)r->offsets[r->n]);
        memset(both + r->offsets[r->n], 0, (size_t)(at - r->offsets[r->n]));
        memcpy(both + at, bytes, (size_t)r->image.bytes);
        sp_aligned_free(r->block);
        r->block = both;
        r->block_bytes = at + r->image.bytes;
        r->is_packed = true;
    }
}

/* ---- the content ----------------------------------------------------------------------------- */

static sp_status describe(reading *r, sp_peer_content *content, sp_error *error)
{
    const sp_peer_manifest manifest = {
        .name = content->name,
        .digest = content->digest,
        .config = r->files.config,
        .config_bytes = r->files.config_bytes,
        .tensors = r->descs,
        .offsets = r->offsets,
        .n_tensors = r->n,
        .data_bytes = r->offsets[r->n],
        .image = r->is_packed ? &r->image : NULL,
    };

    sp_peer_manifest_encode(&manifest, &content->manifest);
    if (content->manifest.failed)
        return sp_fail_memory(error, content->manifest.bytes, "a manifest");
    if (content->manifest.bytes > SP_PEER_MANIFEST_BYTES_MAX)
        return sp_fail(error, SP_ERR_TOO_LARGE, "peer-manifest-too-large", content->name, -1,
                       "\"%s\" has a manifest of %zu bytes; peers take at most %llu", content->name,
                       content->manifest.bytes, (unsigned long long)SP_PEER_MANIFEST_BYTES_MAX);
    return SP_OK;
}

static sp_status create_content(reading *r, const char *name, const sp_digest *digest, int32_t rank,
                                sp_peer_content *out_content, sp_error *error)
{
    sp_peer_content content = {
        .name = sp_strdup(name),
        .digest = *digest,
        .data_bytes = r->offsets[r->n],
        .image_bytes = r->is_packed ? r->image.bytes : 0,
        .block_bytes = r->block_bytes,
        .rank = rank,
    };
    sp_status status;

    content.image_offset = content.block_bytes - content.image_bytes;
    status = content.name ? describe(r, &content, error) : sp_fail_memory(error, 0, name);
    if (status != SP_OK) {
        sp_peer_content_free(&content);
        return status;
    }
    *out_content = content;
    return SP_OK;
}

static sp_status create_read(reading *r, const char *name, sp_peer_content *out_content,
                             sp_error *error)
{
    sp_digest digest = sp_adapter_digest(r->adapter);

    return create_content(r, name, &digest, sp_adapter_rank_max(r->adapter), out_content, error);
}

/* The audit of headers; *out_rank is the largest. */
static sp_status audit_headers(const reading *r, const char *name,
                               const sp_adapter_options *options, int32_t *out_rank,
                               sp_error *error)
{
    const sp_intake_origin origin = {"adapter_config.json", NULL};
    sp_adapter_options named = *options;
    sp_intake *intake;
    sp_status status;

    named.name = name;
    status = sp_intake_describe(r->files.config, r->files.config_bytes, &origin, r->descs, r->n,
                                &named, &intake, error);
    if (status != SP_OK)
        return status;
    *out_rank = sp_adapter_rank_max(sp_intake_adapter(intake));
    sp_intake_destroy(intake);
    return SP_OK;
}

sp_status sp_peer_content_describe(const char *path, const char *name,
                                   const sp_adapter_options *options, const sp_digest *digest,
                                   sp_peer_content *out_content, sp_error *error)
{
    reading r = {.n = 0};
    int32_t rank = 0;
    sp_status status = begin_reading(&r, path, error);

    if (status == SP_OK)
        status = audit_headers(&r, name, options, &rank, error);
    if (status == SP_OK) {
        r.block_bytes = block_bytes_of(r.offsets[r.n]);
        status = create_content(&r, name, digest, rank, out_content, error);
    }
    end_reading(&r);
    return status;
}

sp_status sp_peer_content_read(const char *path, const char *name,
                               const sp_adapter_options *options, const sp_peer_packer *packer,
                               sp_peer_content *out_content, void **out_block, sp_error *error)
{
    reading r = {.n = 0};
    sp_status status = begin_reading(&r, path, error);

    if (status == SP_OK)
        status = allocate(&r, r.offsets[r.n], error);
    if (status == SP_OK)
        status = read_tensors(&r, error);
    if (status == SP_OK)
        status = audit(&r, name, options, error);
    if (status == SP_OK)
        append_image(&r, packer);
    if (status == SP_OK)
        status = create_read(&r, name, out_content, error);
    if (status == SP_OK) {
        *out_block = r.block;
        r.block = NULL;
    }
    end_reading(&r);
    return status;
}

void sp_peer_content_free(sp_peer_content *content)
{
    sp_text_free(&content->manifest);
    sp_free(content->name);
    memset(content, 0, sizeof *content);
}

bool sp_peer_content_find(const sp_peer_content *content, sp_peer_part part, uint64_t offset,
                          uint64_t bytes, uint64_t *out_at)
{
    bool is_image = part == SP_PEER_PART_IMAGE;
    uint64_t all = is_image ? content->image_bytes : content->data_bytes;

    if (bytes == 0 || bytes > all || offset > all - bytes)
        return false;
    *out_at = (is_image ? content->image_offset : 0) + offset;
    return true;
}
