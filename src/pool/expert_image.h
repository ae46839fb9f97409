/*
 * expert_image.h: the router and expert pairs of an adapter, packed: the bytes of its extent in the
 * pool's expert memory, and the cells by which kernels find each pair there. Sparse: an adapter
 * takes room for the pairs that it has. Offsets are from the extent's start, so the bytes are the
 * same wherever it is.
 *
 * Pairs follow each other in the adapter's order, A [S, k_in] then B [n_out, S], S = the rank
 * rounded up to 8, each on a boundary of SP_POOL_ALIGN_BYTES; pads are zero. Two neighbouring
 * modules of a layer (gate, up) whose A is one and the same view of the file share it.
 */
#ifndef SP_POOL_EXPERT_IMAGE_H
#define SP_POOL_EXPERT_IMAGE_H

#include "pool/convert.h"

#include <sidepath/pool.h>

/* Immutable. */
typedef struct sp_expert_image {
    void *data;              /* [bytes], 256-byte aligned, then cells and routers: [block_bytes] */
    size_t bytes;            /* of the factors; a multiple of 256 */
    sp_expert_cell *cells;   /* [n_places][n_experts], after the factors in data's block */
    sp_expert_cell *routers; /* [n_routers] in the layout's order, after the cells */
    bool *present;           /* [n_places] whether any expert of the place is adapted */
    int32_t n_places, n_experts, n_routers;
    size_t block_bytes;
    size_t host_bytes; /* all that it takes on the host */
    sp_device *pinned; /* whose pinned memory the block is, or NULL */
} sp_expert_image;

/* The rank rounded up: the stride of a pair's B in the expert memory. */
int32_t sp_expert_rank_stride(int32_t rank);

/* Bytes of the cells of one slot. */
size_t sp_expert_cells_bytes(const sp_layout *layout);

/*
 * Packs those of the sites that are routers' or experts'; there is one at least. All of them have
 * passed sp_pack_locate. exec NULL: on the calling thread. *out_image is owned by the caller.
 * SP_ERR_REFUSED with `duplicate-tensor`, `non-finite`; SP_ERR_TOO_LARGE: more than cells can
 * address; SP_ERR_MEMORY.
 */
sp_status sp_expert_image_build(const sp_layout *layout, const sp_converter *converter,
                                const sp_adapter_site *sites, size_t n_sites, sp_exec *exec,
                                sp_expert_image **out_image, sp_error *error);
void sp_expert_image_destroy(sp_expert_image *image); /* NULL is allowed */

/*
 * An image for `bytes` of factors that were packed elsewhere: the caller writes data
 * [block_bytes], undefined until then, and has it checked. *out_image is owned by the caller.
 * SP_ERR_REFUSED with `bad-image`: no size that pairs have, or a layout that takes none.
 * SP_ERR_MEMORY.
 */
sp_status sp_expert_image_create(const sp_layout *layout, size_t bytes, sp_expert_image **out_image,
                                 sp_error *error);

/*
 * Whether kernels may follow the cells: each is either all 0, or has a rank up to the layout's, a
 * finite scale, and factors within `bytes`. Sets `present`; *out_n_pairs counts routers and
 * experts. SP_ERR_REFUSED with `bad-image`.
 */
sp_status sp_expert_image_check(sp_expert_image *image, const sp_layout *layout,
                                int32_t *out_n_pairs, sp_error *error);

#endif
