#include "support/packed_source.h"

#include "base/alloc.h"
#include "base/error.h"
#include "pool/image.h"

#include <string.h>

typedef struct packed_fetch {
    sp_image *image;
    sp_packed_image label;
} packed_fetch;

static sp_status describe(void *user, const sp_source_request *request,
                          sp_source_description *out_description, sp_error *error)
{
    const packed_source *source = user;
    packed_fetch *fetch = sp_calloc(1, sizeof *fetch);
    sp_status status;

    if (fetch == NULL)
        return sp_fail_memory(error, sizeof *fetch, "a fetch");
    status = source->find(source->user, request, &fetch->image, error);
    if (status != SP_OK) {
        sp_free(fetch);
        return status;
    }
    fetch->label = (sp_packed_image){.struct_bytes = sizeof fetch->label,
                                     .digest = fetch->image->digest,
                                     .fingerprint = fetch->image->fingerprint,
                                     .checksum = fetch->image->checksum,
                                     .ranks = fetch->image->ranks,
                                     .scales = fetch->image->scales,
                                     .n_sites = sp_layout_n_sites(source->layout),
                                     .rank = 4,
                                     .pairs = 1,
                                     .file_bytes = 100};
    out_description->handle = fetch;
    out_description->image = &fetch->label;
    return SP_OK;
}

static sp_status fetch_piece(void *user, const sp_source_request *request, void *handle,
                             const sp_source_piece *piece, sp_error *error)
{
    const packed_source *source = user;
    const packed_fetch *fetch = handle;

    memcpy(piece->memory, (const char *)fetch->image->data + piece->offset, piece->bytes);
    if (source->finish == NULL ||
        piece->offset + piece->bytes < sp_layout_slot_bytes(source->layout))
        return SP_OK;
    return source->finish(source->user, request, error);
}

static void release(void *user, const sp_source_request *request, void *handle)
{
    packed_fetch *fetch = handle;

    (void)user;
    (void)request;
    sp_image_destroy(fetch->image);
    sp_free(fetch);
}

sp_stage_source packed_source_table(packed_source *source)
{
    return (sp_stage_source){.struct_bytes = sizeof(sp_stage_source),
                             .user = source,
                             .describe = describe,
                             .fetch = fetch_piece,
                             .release = release,
                             .piece_bytes = 100,
                             .images_trusted = true};
}
