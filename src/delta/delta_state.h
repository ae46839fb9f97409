/*
 * delta_state.h: what an sp_delta is made of, and the checks that its calls share. For delta.c
 * (linear sites), pieces.c (the same in halves and pieces), delta_step.c (what begins a step) and
 * token_delta.c (embeddings and head).
 */
#ifndef SP_DELTA_DELTA_STATE_H
#define SP_DELTA_DELTA_STATE_H

#include "delta/delta_cuda.h"
#include "delta/shrink_expand.h"

#include <sidepath/delta.h>

static_assert(SP_LORA_GROUP_MAX == SP_DELTA_GROUP_MAX, "one round of the CPU takes a half's sites");
static_assert(SP_CUDA_SITES_MAX == SP_DELTA_GROUP_MAX, "and so does one launch");

/* Rows of one round of token_delta.c. */
#define SP_TOKEN_ROUND_ROWS 64

/* Scratch of token_delta.c, cut out of the delta's block. Empty where the pool has no use for it.
 */
typedef struct sp_token_scratch {
    size_t x_bytes; /* of packed_x: SP_TOKEN_ROUND_ROWS rows, at any level */
    char *packed_x;
    char *xa;      /* [SP_TOKEN_ROUND_ROWS, R] of the pool's type */
    float *scale;  /* [SP_TOKEN_ROUND_ROWS] */
    char *rounded; /* [SP_TOKEN_ROUND_ROWS, hidden] of the pool's type: an FP32 x; or NULL */
} sp_token_scratch;

/* A shrink whose expand is to come. */
typedef struct sp_delta_half {
    bool open;
    bool whole; /* CPU: more than one round takes, so the expand does all of it, from `call` */
    int32_t n_outputs;
    int32_t sites[SP_DELTA_GROUP_MAX];
    uint64_t build; /* of the plan, which may be built anew under the same address */
    sp_delta_call call;
} sp_delta_half;

struct sp_delta {
    sp_pool *pool;
    const sp_layout *layout;
    sp_exec *exec;
    const sp_kernels *kernels;
    int32_t rows_max;
    int32_t n_sites; /* of the geometry */
    sp_token_table embed, head;
    bool x_f32, no_apply;
    sp_module_set skipped; /* by skip_modules */
    void *block;           /* what scratch is cut out of */
    sp_lora_scratch scratch;
    sp_token_scratch token_scratch;
    sp_delta_gpu *gpu; /* NULL on the CPU; else kernels, block and the scratches are NULL */
    /* The group under way in pieces or halves. */
    sp_lora_job pieces;
    int32_t piece_target[SP_LORA_GROUP_MAX]; /* of each output; -1: it has no delta */
    sp_delta_half half;
};

/* ---- checks -------------------------------------------------------------------------------- */

/* SP_ERR_ARGUMENT: the argument or field `name` is NULL. */
sp_status sp_delta_missing(const char *name, sp_error *error);

/*
 * The rows that a call is about: of its plan, which is checked, or where that is NULL of the last
 * sp_plan_from_device. *out_view is NULL then.
 */
sp_status sp_delta_rows_of(const sp_delta *delta, const sp_plan *plan,
                           const sp_plan_view **out_view, int32_t *out_rows, sp_error *error);

/* SP_ERR_ARGUMENT, SP_ERR_UNSUPPORTED: no type of x for this pool. */
sp_status sp_delta_check_x_type(const sp_delta *delta, sp_dtype x_type, sp_error *error);

sp_status sp_delta_check_stride(const char *name, int64_t stride, int64_t width, sp_error *error);

/* A group's call, read and checked. */
typedef struct sp_delta_group {
    sp_delta_call call; /* in today's size; outputs are read one by one */
    const sp_plan_view *view;
    int32_t n_rows;
    int32_t k_in; /* 0: the pool holds none of the sites */
} sp_delta_group;

/* with_x: x is read, so it is checked. */
sp_status sp_delta_read_group(const sp_delta *delta, const sp_delta_call *call, bool with_x,
                              sp_delta_group *out_group, sp_error *error);

/* Output `index` of a group that was read. */
sp_delta_output sp_delta_output_at(const sp_delta_group *group, int32_t index);

/* ---- linear sites -------------------------------------------------------------------------- */

/* The layout's index of a site that has a delta to apply, or -1. */
int32_t sp_delta_site_of(const sp_delta *delta, int32_t site);

/* Applies a group that was read. */
sp_status sp_delta_apply_group(sp_delta *delta, const sp_delta_group *group, sp_error *error);

/*
 * The group's round in delta->pieces, up to its pieces; false: it does not fit. At most
 * SP_LORA_GROUP_MAX outputs, on the CPU.
 */
bool sp_delta_begin_round(sp_delta *delta, const sp_delta_group *group);

/* Whatever was under way in pieces or halves is no more. */
void sp_delta_end_round(sp_delta *delta);

/* ---- tokens -------------------------------------------------------------------------------- */

sp_token_table sp_token_table_of(const sp_layout *layout, sp_site_kind kind);

/* Bytes for sp_token_scratch_cut, a multiple of 64. */
size_t sp_token_scratch_bytes(const sp_layout *layout, bool x_f32);
void sp_token_scratch_cut(char *block, const sp_layout *layout, bool x_f32,
                          sp_token_scratch *out_scratch);

#endif
