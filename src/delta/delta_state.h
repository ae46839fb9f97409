/*
 * delta_state.h: what an sp_delta is made of, and the checks that its calls share. For delta.c
 * (linear sites), pieces.c (the same in halves and pieces), delta_step.c (the start of a step) and
 * token_delta.c (embeddings and head). Pointers may not be NULL unless said so, and all calls are
 * the engine thread's.
 */
#ifndef SP_DELTA_DELTA_STATE_H
#define SP_DELTA_DELTA_STATE_H

#include "delta/delta_cuda.h"
#include "delta/shrink_expand.h"

#include <sidepath/experts.h>

static_assert(SP_LORA_GROUP_MAX == SP_DELTA_GROUP_MAX, "one round of the CPU takes a half's sites");
static_assert(SP_CUDA_SITES_MAX == SP_DELTA_GROUP_MAX, "and so does one launch");

/* Rows per round of token_delta.c. */
#define SP_TOKEN_ROUND_ROWS 64

/* Scratch of token_delta.c, part of the delta's block. Empty where the pool has no token tables.
 */
typedef struct sp_token_scratch {
    size_t x_bytes; /* of packed_x: SP_TOKEN_ROUND_ROWS rows, at any level */
    char *packed_x;
    char *xa;      /* [SP_TOKEN_ROUND_ROWS, R] of the pool's type */
    float *scale;  /* [SP_TOKEN_ROUND_ROWS] */
    char *rounded; /* [SP_TOKEN_ROUND_ROWS, hidden] of the pool's type: an FP32 x; or NULL */
} sp_token_scratch;

/* A shrink that is waiting for its expand. */
typedef struct sp_delta_half {
    bool open;
    bool whole; /* CPU: too large for one round, so the expand does all the work, from `call` */
    int32_t n_outputs;
    int32_t sites[SP_DELTA_GROUP_MAX];
    uint64_t build; /* of the plan, which may be rebuilt at the same address */
    sp_delta_call call;
} sp_delta_half;

/* The rows of a layer's experts that are grouped now: those of one window. */
typedef struct sp_expert_window {
    int32_t begin; /* its first row; -1: none is grouped */
    int32_t n_items;
    sp_moe_item *items;     /* [rows_max] */
    int32_t *order, *token; /* [rows_max] rows of the items, and their tokens */
    int32_t *scratch;       /* [sp_moe_items_scratch] */
} sp_expert_window;

/* experts.c: the rows of the last begin. */
typedef struct sp_delta_experts {
    bool open;
    int32_t rows_max; /* of a window */
    void *block;      /* holds the scratch and the window's lists; NULL: the pool has no experts */
    sp_lora_scratch scratch;
    sp_expert_window window;
    sp_moe_rows rows;
    const sp_plan *plan; /* borrowed until the last apply */
    const sp_plan_view *view;
    uint64_t build; /* of the plan */
} sp_delta_experts;

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
    void *block;           /* holds the scratch */
    sp_lora_scratch scratch;
    sp_token_scratch token_scratch;
    sp_delta_gpu *gpu; /* NULL on the CPU; else kernels, block and the scratches are NULL */
    /* The group in progress, in pieces or halves. */
    sp_lora_job pieces;
    int32_t piece_target[SP_LORA_GROUP_MAX]; /* of each output; -1: it has no delta */
    sp_delta_half half;
    sp_delta_experts experts;
};

/* ---- checks -------------------------------------------------------------------------------- */

/* Returns SP_ERR_ARGUMENT: the argument or field `name` is NULL. error may be NULL, as in all
 * functions here. */
sp_status sp_delta_missing(const char *name, sp_error *error);

/*
 * The rows of a call: those of its plan, which is checked, or for plan NULL those of the last
 * sp_plan_from_device; *out_view is NULL then.
 */
sp_status sp_delta_rows_of(const sp_delta *delta, const sp_plan *plan,
                           const sp_plan_view **out_view, int32_t *out_rows, sp_error *error);

/* SP_ERR_ARGUMENT, SP_ERR_UNSUPPORTED: x_type cannot be used with this pool. */
sp_status sp_delta_check_x_type(const sp_delta *delta, sp_dtype x_type, sp_error *error);

/* SP_ERR_ARGUMENT, naming the field: a stride below the row's width. */
sp_status sp_delta_check_stride(const char *name, int64_t stride, int64_t width, sp_error *error);

/* A group's call, read and checked. */
typedef struct sp_delta_group {
    sp_delta_call call; /* in the current size; outputs are read one by one */
    const sp_plan_view *view;
    int32_t n_rows;
    int32_t k_in; /* 0: the pool holds none of the sites */
} sp_delta_group;

/* Reads and checks a caller's call. with_x: x will be read, so it is checked too. */
sp_status sp_delta_read_group(const sp_delta *delta, const sp_delta_call *call, bool with_x,
                              sp_delta_group *out_group, sp_error *error);

/* Output `index` of a group from sp_delta_read_group. */
sp_delta_output sp_delta_output_at(const sp_delta_group *group, int32_t index);

/* ---- linear sites -------------------------------------------------------------------------- */

/* The layout index of a site whose delta is applied, or -1. */
int32_t sp_delta_site_of(const sp_delta *delta, int32_t site);

/* Applies a group from sp_delta_read_group. Blocks on the CPU; enqueues on a GPU. */
sp_status sp_delta_apply_group(sp_delta *delta, const sp_delta_group *group, sp_error *error);

/*
 * Collects the group's round in delta->pieces and splits it into pieces; false: it does not fit
 * into one round. CPU only, at most SP_LORA_GROUP_MAX outputs.
 */
bool sp_delta_begin_round(sp_delta *delta, const sp_delta_group *group);

/* Drops the group in progress, if any. */
void sp_delta_end_round(sp_delta *delta);

/* ---- experts ------------------------------------------------------------------------------- */

/* The scratch of windows of so many rows; none where the pool has no experts. */
sp_status sp_delta_experts_create(sp_delta *delta, int32_t rows_max, sp_error *error);
void sp_delta_experts_destroy(sp_delta *delta);

/* ---- tokens -------------------------------------------------------------------------------- */

/* The table of `kind` (embedding or head) in a layout. */
sp_token_table sp_token_table_of(const sp_layout *layout, sp_site_kind kind);

/* Bytes for sp_token_scratch_cut, a multiple of 64. */
size_t sp_token_scratch_bytes(const sp_layout *layout, bool x_f32);
/* Carves up `block`, which may be NULL where the size is 0. */
void sp_token_scratch_cut(char *block, const sp_layout *layout, bool x_f32,
                          sp_token_scratch *out_scratch);

#endif
