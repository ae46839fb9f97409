/*
 * image.h: what an image is made of, and packing from a plain list of sites, the part of
 * sp_layout_pack that knows no adapter object.
 */
#ifndef SP_POOL_IMAGE_H
#define SP_POOL_IMAGE_H

#include "pool/overlay.h"

#include <sidepath/pool.h>

/* What the tables need beside the bytes: [n_sites] each, rank 0 = this site is not adapted. */
struct sp_image {
    void *data;               /* [slot_bytes], 256-byte aligned */
    int32_t *ranks;           /* [n_sites] */
    float *scales;            /* [n_sites] stored (effective) scale of each site */
    sp_digest digest;         /* the adapter's */
    sp_digest fingerprint;    /* the layout's */
    uint64_t checksum;        /* XXH3 of data; no trust in it */
    size_t bytes;             /* host bytes that the image takes, its arrays and overlay included */
    sp_overlay *overlay;      /* rows that it replaces; owned, NULL: none */
    sp_device *pinned;        /* whose pinned memory data is, or NULL */
    const void *embed, *head; /* data of the layout's served tables, compared and never read */
};

/* Whether it is what the layout's pools take: packed for one with this fingerprint and, where it
 * replaces rows, against the same tables, whose content the fingerprint does not have. */
bool sp_image_is_for(const sp_image *image, const sp_layout *layout);

/* The fingerprint of a layout whose sites are all in place. SP_ERR_MEMORY. */
sp_status sp_layout_hash(const sp_layout *layout, sp_digest *out_fingerprint, sp_error *error);

/*
 * As sp_layout_pack. SP_ERR_MISMATCH with `shape-mismatch`: a factor whose dimensions are not the
 * layout's. SP_ERR_REFUSED with `duplicate-tensor`: one site twice; with `non-finite`: a finite
 * value that the pool's dtype cannot hold, or a scale that is not finite.
 */
sp_status sp_layout_pack_sites(const sp_layout *layout, const sp_adapter_site *sites,
                               size_t n_sites, const sp_digest *digest, sp_exec *exec,
                               sp_image **out_image, sp_error *error);

/* Whether packing will find a place for this site: what it returns else, without its data. */
sp_status sp_layout_check_site(const sp_layout *layout, const sp_adapter_site *site,
                               sp_error *error);

/*
 * An image of this layout that adapts nothing yet; its bytes are not set. Owned by the caller.
 * SP_ERR_MEMORY.
 */
sp_status sp_image_create(const sp_layout *layout, sp_image **out_image, sp_error *error);

/* What somebody says of the bytes that have been written into an image: [n_sites] each. */
typedef struct sp_image_label {
    const int32_t *ranks;
    const float *scales;
    sp_digest digest;
    uint64_t checksum;
} sp_image_label;

/*
 * Makes it an image of an adapter. SP_ERR_REFUSED with `bad-image`: a rank beyond the layout's, a
 * scale that is not finite, or bytes of another checksum; nothing was changed.
 */
sp_status sp_image_seal(sp_image *image, const sp_layout *layout, const sp_image_label *label,
                        sp_error *error);

/* Host bytes that every image of this layout takes, its arrays included, without an overlay. */
size_t sp_layout_image_bytes(const sp_layout *layout);

/*
 * Memory for an image's bytes, 256-byte aligned: pinned where `device` is a GPU, and then
 * *out_pinned is the device. NULL, and the CPU: the host's own. Returns NULL where there is none.
 */
void *sp_image_memory_create(sp_device *device, size_t bytes, sp_device **out_pinned);
void sp_image_memory_destroy(void *memory, sp_device *pinned); /* NULL is allowed */

/* As sp_overlay_build, in memory for the images of `device`. */
sp_status sp_overlay_build_for(sp_device *device, const sp_adapter_table *tables, size_t n_tables,
                               const sp_served_table *embed, const sp_served_table *head,
                               sp_dtype dtype, sp_overlay **out_overlay, sp_error *error);

#endif
