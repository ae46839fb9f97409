#include "stage/peer_packer.h"

#include "adapter/audit.h"
#include "base/alloc.h"
#include "base/error.h"
#include "pool/expert_image.h"
#include "pool/image.h"
#include "stage/stage_state.h"

#include <string.h>

/* What an image's description points to. */
typedef struct packing {
    sp_image *image;
    char *joined; /* the slot's bytes and the experts'; NULL: it has none */
    sp_stage_facts facts;
} packing;

static void done(void *user, void *handle)
{
    packing *packed = handle;

    (void)user;
    sp_aligned_free(packed->joined);
    sp_image_destroy(packed->image);
    sp_stage_facts_clear(&packed->facts);
    sp_free(packed);
}

static sp_status check_holds_all(const sp_adapter *adapter, sp_error *error)
{
    if (sp_adapter_n_tables(adapter) == 0)
        return SP_OK;
    return sp_fail(error, SP_ERR_UNSUPPORTED, NULL, sp_adapter_name(adapter), -1,
                   "%s replaces rows, which are no part of an image", sp_adapter_name(adapter));
}

/* Only values show it, so whether it is allowed is decided where the tensors are read. */
static sp_status check_effect(const sp_layout *layout, const sp_adapter *adapter, sp_error *error)
{
    bool effect = true;
    sp_status status = sp_sites_have_effect(adapter, sp_layout_dtype(layout), &effect, error);

    if (status != SP_OK || effect)
        return status;
    return sp_fail(error, SP_ERR_UNSUPPORTED, NULL, sp_adapter_name(adapter), -1,
                   "%s changes nothing: its image is not offered", sp_adapter_name(adapter));
}

/* Peers send an image from one block. */
static sp_status join(const sp_layout *layout, packing *packed, sp_error *error)
{
    const sp_expert_image *experts = packed->image->experts;
    size_t bytes = sp_layout_slot_bytes(layout);

    if (experts == NULL)
        return SP_OK;
    packed->joined = sp_aligned_malloc(bytes + experts->block_bytes, SP_POOL_ALIGN_BYTES);
    if (packed->joined == NULL)
        return sp_fail_memory(error, bytes + experts->block_bytes, "an image for peers");
    memcpy(packed->joined, packed->image->data, bytes);
    memcpy(packed->joined + bytes, experts->data, experts->block_bytes);
    return SP_OK;
}

static sp_status describe(const sp_layout *layout, const packing *packed, sp_peer_image *out_image,
                          sp_error *error)
{
    const sp_image *image = packed->image;
    const sp_expert_image *experts = image->experts;
    const sp_image_label label = {image->ranks, image->scales, image->digest, image->checksum};

    *out_image = (sp_peer_image){
        .bytes = sp_layout_slot_bytes(layout) + (experts != NULL ? experts->block_bytes : 0),
        .expert_bytes = experts != NULL ? experts->bytes : 0,
        .fingerprint = image->fingerprint,
        .checksum = image->checksum,
        .n_sites = sp_layout_n_sites(layout),
        .ranks = image->ranks,
        .scales = image->scales,
        .rank = packed->facts.rank,
        .pairs = packed->facts.sites,
        .file_bytes = packed->facts.file_bytes,
        .row_macs = packed->facts.row_macs,
        .receipt = (char *)(uintptr_t)packed->facts.receipt,
    };
    return sp_image_bind(layout, &label, image->data, experts, &out_image->seal, error);
}

static sp_status pack(void *user, const sp_adapter *adapter, sp_peer_image *out_image,
                      const void **out_bytes, void **out_handle, sp_error *error)
{
    const sp_layout *layout = user;
    sp_status status = check_holds_all(adapter, error);
    packing *packed;

    if (status == SP_OK)
        status = check_effect(layout, adapter, error);
    if (status != SP_OK)
        return status;
    packed = sp_calloc(1, sizeof *packed);
    if (packed == NULL)
        return sp_fail_memory(error, sizeof *packed, "an image for peers");
    packed->facts.struct_bytes = sizeof packed->facts;
    status = sp_layout_pack(layout, adapter, NULL, &packed->image, error);
    if (status == SP_OK)
        status = sp_stage_facts_of(layout, adapter, &packed->facts, error);
    if (status == SP_OK)
        status = describe(layout, packed, out_image, error);
    if (status == SP_OK)
        status = join(layout, packed, error);
    if (status != SP_OK) {
        done(user, packed);
        return status;
    }
    *out_bytes = packed->joined != NULL ? packed->joined : packed->image->data;
    *out_handle = packed;
    return SP_OK;
}

sp_peer_packer sp_peer_packer_for(const sp_layout *layout)
{
    return (sp_peer_packer){(void *)(uintptr_t)layout, pack, done};
}
