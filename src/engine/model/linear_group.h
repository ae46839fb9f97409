/*
 * linear_group.h: base projections that share their input, with the side paths of the rows'
 * adapters.
 *
 * The side paths ride on the base: their shrinks are the first tasks of the base GEMM's parallel
 * job, and the last piece of a strip of columns is followed, on the same thread and while its
 * outputs are in the cache, by the expand of the same columns. So a step with adapters has no more
 * barriers than one without. Bits do not change: the kernels are those of sp_gemm_run and
 * sp_delta_apply.
 */
#ifndef SP_ENGINE_MODEL_LINEAR_GROUP_H
#define SP_ENGINE_MODEL_LINEAR_GROUP_H

#include "engine/model/forward.h"

#define SP_PROJECTIONS_MAX 3

typedef struct sp_projection {
    int32_t site;           /* in the model's geometry */
    const uint16_t *weight; /* [n, k] bf16 */
    const uint16_t *bias;   /* [n] bf16, or NULL */
    void *y;                /* [n_rows, n] of the forward's type */
    int32_t n;
} sp_projection;

/* Room for the pieces that have to wait, for sp_forward.waiting. */
int32_t sp_project_pieces_max(int32_t threads);

/* y = x · Wᵀ (+ bias) for 1 .. SP_PROJECTIONS_MAX projections that share x [n_rows, k], then their
 * deltas. Fails like sp_delta_apply. */
sp_status sp_project(sp_forward *forward, const void *x, int32_t k,
                     const sp_projection *projections, int32_t n_projections);

#endif
