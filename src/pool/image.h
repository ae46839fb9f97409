/*
 * image.h: the contents of an image, and packing from a plain list of sites, the part of
 * sp_layout_pack that needs no adapter object. Pointers may not be NULL unless said so. Any thread,
 * on distinct images; layouts are read only.
 */
#ifndef SP_POOL_IMAGE_H
#define SP_POOL_IMAGE_H

#include "pool/overlay.h"

#include <sidepath/pool.h>

/* What the tables need besides the bytes: [n_sites] each, rank 0 = this site is not adapted. */
struct sp_image {
    void *data;            /* [slot_bytes], 256-byte aligned */
    int32_t *ranks;        /* [n_sites] */
    float *scales;         /* [n_sites] stored (effective) scale of each site */
    sp_digest digest;      /* of the adapter */
    sp_digest fingerprint; /* of the layout */
    uint64_t checksum;     /* XXH3 of data; detects accidents, not attacks */
    size_t bytes;          /* host bytes that the image occupies, arrays and overlay included */
    sp_overlay *overlay;   /* rows that the adapter replaces; owned, NULL: none */
    struct sp_expert_image *experts; /* router and expert pairs; owned, NULL: none */
    sp_device *pinned;               /* whose pinned memory data is, or NULL */
    const void *embed, *head; /* addresses of the layout's served tables, compared and never read */
    uint64_t opening; /* not 0: data is a slot's, borrowed, which was opened under this number */
    bool sealed;      /* of such an image: its bytes are what it says */
};

/* Whether pools of this layout accept the image: it was packed for a layout with this fingerprint
 * and, where it replaces rows, against the same served tables, whose content the fingerprint does
 * not cover. */
bool sp_image_is_for(const sp_image *image, const sp_layout *layout);

/* Computes the fingerprint of a layout whose sites are all placed. SP_ERR_MEMORY. */
sp_status sp_layout_hash(const sp_layout *layout, sp_digest *out_fingerprint, sp_error *error);

/* Sites that have a place in the slot: those before the routers. */
int32_t sp_layout_n_slot_sites(const sp_layout *layout);

/*
 * Like sp_layout_pack. exec NULL: on the calling thread. SP_ERR_MISMATCH with `shape-mismatch`: a
 * factor whose dimensions are not the layout's. SP_ERR_REFUSED with `duplicate-tensor`: one site
 * twice; with `non-finite`: a finite value that the pool's dtype cannot hold, or a scale that is
 * not finite.
 */
sp_status sp_layout_pack_sites(const sp_layout *layout, const sp_adapter_site *sites,
                               size_t n_sites, const sp_digest *digest, sp_exec *exec,
                               sp_image **out_image, sp_error *error);

/* Whether packing will accept this site: the status it would return otherwise. Needs no tensor
 * data. */
sp_status sp_layout_check_site(const sp_layout *layout, const sp_adapter_site *site,
                               sp_error *error);

/*
 * Creates an image of this layout that adapts nothing yet; its bytes are undefined. Owned by the
 * caller. SP_ERR_MEMORY.
 */
sp_status sp_image_create(const sp_layout *layout, sp_image **out_image, sp_error *error);

/* The same with data [slot_bytes] of a slot, which is borrowed as long as `opening` lasts. */
sp_status sp_image_create_over(const sp_layout *layout, void *data, uint64_t opening,
                               sp_image **out_image, sp_error *error);

/* An image with bytes of its own; `from` is sealed and has no experts and no overlay.
 * SP_ERR_MEMORY.
 */
sp_status sp_image_copy(const sp_layout *layout, const sp_image *from, sp_image **out_image,
                        sp_error *error);

/* What a source states about the bytes it has written into an image: [n_sites] each. */
typedef struct sp_image_label {
    const int32_t *ranks;
    const float *scales;
    sp_digest digest;
    uint64_t checksum;
} sp_image_label;

/*
 * Adds router and expert pairs with `bytes` of factors to an image that has none; their bytes are
 * undefined as well. SP_ERR_REFUSED with `bad-image`: no size that such pairs have, or a layout
 * that takes none. SP_ERR_MEMORY.
 */
sp_status sp_image_add_experts(sp_image *image, const sp_layout *layout, size_t bytes,
                               sp_error *error);

/*
 * Completes an image with its label; *out_n_pairs is how many pairs it has, those of routers and
 * experts among them. SP_ERR_REFUSED with `bad-image`: a rank beyond the layout's, a scale that is
 * not finite, bytes with another checksum, or pairs of routers and experts that contradict the
 * label or their own size; the image is to be destroyed then.
 */
sp_status sp_image_seal(sp_image *image, const sp_layout *layout, const sp_image_label *label,
                        int32_t *out_n_pairs, sp_error *error);

/*
 * The digest that binds an image to its adapter and its layout: SHA-256 over the label without its
 * checksum, the layout's fingerprint, the bytes of `data` [slot_bytes] and, where there are any,
 * those of `experts` (NULL: none). SP_ERR_MEMORY.
 */
sp_status sp_image_bind(const sp_layout *layout, const sp_image_label *label, const void *data,
                        const struct sp_expert_image *experts, sp_digest *out_seal,
                        sp_error *error);

/*
 * Completes an image whose bytes are here: sp_image_seal, then whether it has all its pairs, then
 * sp_image_bind where there is a seal. SP_ERR_REFUSED with `other-layout` and `bad-image`;
 * SP_ERR_PEER_CONTENT with `peer-content`; SP_ERR_MEMORY. The lists of `packed` may be NULL.
 */
sp_status sp_image_take(sp_image *image, const sp_layout *layout, const sp_packed_image *packed,
                        sp_error *error);

/* Whether a pool could take so many bytes of routers and experts. SP_ERR_TOO_LARGE with
 * `experts-too-large`. Any thread. */
sp_status sp_pool_check_experts(const sp_pool *pool, size_t bytes, sp_error *error);

/* Host bytes of an image of this layout, its arrays included, without an overlay. */
size_t sp_layout_image_bytes(const sp_layout *layout);

/*
 * Memory for an image's bytes, 256-byte aligned: pinned if `device` is a GPU, and then *out_pinned
 * is the device; pageable if it is NULL or the CPU. Freed by sp_image_memory_destroy. Returns NULL
 * when out of memory.
 */
void *sp_image_memory_create(sp_device *device, size_t bytes, sp_device **out_pinned);
void sp_image_memory_destroy(void *memory, sp_device *pinned); /* NULL is allowed */

/* Like sp_overlay_build, in memory for images of `device`. */
sp_status sp_overlay_build_for(sp_device *device, const sp_adapter_table *tables, size_t n_tables,
                               const sp_served_table *embed, const sp_served_table *head,
                               sp_dtype dtype, sp_overlay **out_overlay, sp_error *error);

#endif
