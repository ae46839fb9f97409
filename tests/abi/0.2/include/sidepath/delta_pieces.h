/*
 * delta_pieces.h: sp_delta_apply taken apart, for a host that runs it inside its base GEMM: in
 * pieces on the CPU, beside the jobs of its own, so that a side path costs no barrier and y is
 * folded while it is in a cache; on a GPU around the launch of a product that may fold the deltas
 * in itself. The bits are those of sp_delta_apply.
 */
#ifndef SIDEPATH_DELTA_PIECES_H
#define SIDEPATH_DELTA_PIECES_H

#include <sidepath/delta.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct sp_delta_pieces {
    size_t struct_bytes;
    bool fits;
    int32_t pack, shrink; /* how many; both 0: no row has a delta here */
    /* x as the kernels of the delta's level pack it, after the pack pieces, where one adapter has
     * all rows and x is of the pool's type: a host whose base GEMM is of that level, over all these
     * rows, need not pack x again. The delta's, until the next begin. Else NULL. */
    const void *packed_x;
} sp_delta_pieces;

/*
 * Checks and plans like sp_delta_apply and writes nothing but *out_pieces. Where it says `fits`,
 * the host runs sp_delta_pieces_pack for every pack piece, then, after a barrier,
 * sp_delta_pieces_shrink for every shrink piece, and sp_delta_pieces_expand once for every column
 * of every output, when the base has written that column in all rows. Pieces run on any thread and
 * in any order; shrink pieces do not wait for anything, so expands that come after them find them
 * done, sooner or later. Where it does not fit (more rows or outputs than one round of scratch
 * takes; a GPU), or fails, nothing is begun. One group is in progress at a time; the next begin, or
 * any other call, ends it. x, outputs' y and the plan are borrowed until then.
 */
SP_API sp_status sp_delta_pieces_begin(sp_delta *delta, const sp_delta_call *call,
                                       sp_delta_pieces *out_pieces, sp_error *error);

/* piece: 0 .. pieces.pack - 1, and 0 .. pieces.shrink - 1. */
SP_API void sp_delta_pieces_pack(sp_delta *delta, int32_t piece);
SP_API void sp_delta_pieces_shrink(sp_delta *delta, int32_t piece);

/* The columns of a piece begin at a multiple of this. */
#define SP_DELTA_COLUMN_STEP 16

/* Columns [column_begin, column_end) of outputs[output], all rows. False: a shrink that it needs
 * has not returned, nothing was done, call again. */
SP_API bool sp_delta_pieces_expand(sp_delta *delta, int32_t output, int64_t column_begin,
                                   int64_t column_end);

/* ---- around a product ---------------------------------------------------------------------- */

struct sp_cuda_group; /* opaque, no part of the ABI: kernels of the library's own build read it */

/*
 * Enqueues the base's product, of the call's x into its outputs, on the call's stream; called once,
 * by the calling thread, or not at all where the call is refused. `group` not NULL: the launch
 * before it on the stream is a shrink of these sites; a product that also adds their deltas to y,
 * with the bits of an expand, sets *out_folded (false before), and no expand follows. Any other
 * product ignores the group. NULL: there is nothing to fold, and *out_folded is not read.
 */
typedef sp_status (*sp_delta_product_fn)(void *user, const struct sp_cuda_group *group,
                                         bool *out_folded);

/*
 * sp_delta_apply with the product of the base inside. Where the deltas may be folded in (a GPU,
 * many rows, small ranks) that is the shrink, the product and, unless it folded them, the expand,
 * on one stream; else the product, then the apply. What `product` returns, if not SP_OK, is
 * returned; else as sp_delta_apply. SP_ERR_ARGUMENT: more outputs than SP_DELTA_GROUP_MAX, no
 * product.
 */
SP_API sp_status sp_delta_apply_around(sp_delta *delta, const sp_delta_call *call,
                                       sp_delta_product_fn product, void *user, sp_error *error);

#ifdef __cplusplus
}
#endif
#endif
