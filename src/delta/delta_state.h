/*
 * delta_state.h: what an sp_delta is made of. Shared by delta.c (linear sites) and token_delta.c
 * (embeddings and head).
 */
#ifndef SP_DELTA_DELTA_STATE_H
#define SP_DELTA_DELTA_STATE_H

#include "delta/delta_cuda.h"
#include "delta/lora_job.h"

#include <sidepath/delta.h>

/* Rows of one round of token_delta.c. */
#define SP_TOKEN_ROUND_ROWS 64

/* Scratch of token_delta.c, cut out of the delta's block. Empty where the pool has no use for it.
 */
typedef struct sp_token_scratch {
    size_t x_bytes; /* of packed_x: SP_TOKEN_ROUND_ROWS rows, at any level */
    char *packed_x;
    char *xa;     /* [SP_TOKEN_ROUND_ROWS, R] of the pool's type */
    float *scale; /* [SP_TOKEN_ROUND_ROWS] */
} sp_token_scratch;

struct sp_delta {
    sp_pool *pool;
    const sp_layout *layout;
    sp_exec *exec;
    const sp_kernels *kernels;
    int32_t rows_max;
    bool no_apply;
    int32_t n_sites, embed_site, head_site; /* of the geometry; -1: none */
    sp_module_set skipped;
    void *block; /* what scratch is cut out of */
    sp_lora_scratch scratch;
    sp_token_scratch token_scratch;
    sp_delta_gpu *gpu; /* NULL on the CPU; else kernels, block and the scratches are NULL */
    /* The group under way in pieces. */
    sp_lora_job pieces;
    int32_t piece_target[SP_LORA_GROUP_MAX]; /* of each output; -1: it has no delta */
};

/* SP_ERR_ARGUMENT: no delta, no plan, or one of more than rows_max rows. What sp_plan_check says.
 */
sp_status sp_delta_check_plan(const sp_delta *delta, const sp_plan *plan);

/* Bytes for sp_token_scratch_cut, a multiple of 64. */
size_t sp_token_scratch_bytes(const sp_layout *layout);
void sp_token_scratch_cut(char *block, const sp_layout *layout, sp_token_scratch *out_scratch);

#endif
