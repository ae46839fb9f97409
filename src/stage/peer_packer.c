#include "stage/peer_packer.h"

#include "base/alloc.h"
#include "pool/image.h"
#include "stage/stage_state.h"

/* What an image's description points to. */
typedef struct packing {
    sp_image *image;
    sp_stage_facts facts;
} packing;

static void done(void *user, void *handle)
{
    packing *packed = handle;

    (void)user;
    sp_image_destroy(packed->image);
    sp_stage_facts_clear(&packed->facts);
    sp_free(packed);
}

static sp_status check_holds_all(const sp_adapter *adapter, sp_error *error)
{
    bool holds = sp_adapter_n_tables(adapter) == 0;

    for (size_t i = 0; i < sp_adapter_n_sites(adapter) && holds; i++) {
        sp_site_kind kind = sp_adapter_site_at(adapter, i)->kind;

        holds = kind != SP_SITE_ROUTER && kind != SP_SITE_EXPERT;
    }
    if (holds)
        return SP_OK;
    return sp_fail(error, SP_ERR_UNSUPPORTED, NULL, sp_adapter_name(adapter), -1,
                   "%s has rows, routers or experts, which are no part of an image",
                   sp_adapter_name(adapter));
}

static sp_status describe(const sp_layout *layout, const packing *packed, sp_peer_image *out_image,
                          sp_error *error)
{
    const sp_image *image = packed->image;
    const sp_image_label label = {image->ranks, image->scales, image->digest, image->checksum};

    *out_image = (sp_peer_image){
        .bytes = sp_layout_slot_bytes(layout),
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
    return sp_image_bind(layout, &label, image->data, &out_image->seal, error);
}

static sp_status pack(void *user, const sp_adapter *adapter, sp_peer_image *out_image,
                      const void **out_bytes, void **out_handle, sp_error *error)
{
    const sp_layout *layout = user;
    sp_status status = check_holds_all(adapter, error);
    packing *packed;

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
    if (status != SP_OK) {
        done(user, packed);
        return status;
    }
    *out_bytes = packed->image->data;
    *out_handle = packed;
    return SP_OK;
}

sp_peer_packer sp_peer_packer_for(const sp_layout *layout)
{
    return (sp_peer_packer){(void *)(uintptr_t)layout, pack, done};
}
