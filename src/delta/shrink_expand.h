/*
 * shrink_expand.h: side paths as rounds of tasks. A job collects work items, a few rows of one
 * adapter each, until its scratch is full, and then runs them together as one round: one parallel
 * loop packs x, one shrinks all items, one expands and folds all of them. So a step with sixteen
 * rows of sixteen adapters pays for three barriers, not for three times sixteen. Where there are
 * many more items than threads a round is one loop over items: each is packed, shrunk and expanded
 * by one thread, out of its own cache and without barriers in between.
 *
 * How rows are split into items and rounds, and tasks over threads, never changes a bit: every
 * kernel's output depends only on its own rows. Pointers may not be NULL unless said so; a job
 * belongs to one thread, except for the tasks of a round in pieces.
 */
#ifndef SP_DELTA_SHRINK_EXPAND_H
#define SP_DELTA_SHRINK_EXPAND_H

#include "kernels/cpu/kernels.h"

#include <stdatomic.h>
#include <stdbool.h>

#define SP_LORA_GROUP_MAX  4   /* outputs that one job folds from one x */
#define SP_LORA_ROUND_ROWS 512 /* rows of one round */

/* One adapter's factors at one site. rank 0 or scale 0: absent. */
typedef struct sp_lora_pair {
    const void *a; /* [rank, k_in], stride a_stride elements */
    const void *b; /* [n_out, rank], stride b_stride elements */
    int64_t a_stride, b_stride;
    int32_t rank;
    float scale;
} sp_lora_pair;

/* One output of the group. */
typedef struct sp_lora_target {
    void *y; /* [rows, n_out], stride y_stride elements */
    int64_t y_stride;
    sp_dtype y_type;
    int32_t n_out;
    float *xa; /* [rows, rank_max] FP32, stride xa_stride elements; see sp_lora_half. Else NULL */
    int64_t xa_stride;
} sp_lora_target;

/*
 * Which half of a job runs. In a whole job, xa is rounded to the job's type as it is computed. A
 * shrink stores the unrounded sums in the targets' xa, as many columns as the row's own rank; an
 * expand reads xa from there (possibly summed over several jobs) and rounds it then.
 */
typedef enum sp_lora_half {
    SP_LORA_WHOLE = 0,
    SP_LORA_SHRINK = 1,
    SP_LORA_EXPAND = 2
} sp_lora_half;

/* How the outputs of one GEMM are split into tasks. */
typedef struct sp_lora_split {
    int64_t rows, columns; /* per task */
    int32_t column_tasks, n_tasks;
} sp_lora_split;

/* The work of one (item, output): two GEMMs and the packing between them. */
typedef struct sp_lora_work {
    sp_gemm_args shrink, expand; /* shrink.rows 0: another output of the item has the same xa */
    int32_t target;
    void *packed_xa; /* what expand reads */
    sp_lora_split shrink_split, expand_split;
    atomic_int pending; /* shrink tasks that are not done */
} sp_lora_work;

/* A few rows of one adapter; `rows` of packed x, shared by the item's outputs. */
typedef struct sp_lora_item {
    void *packed_x;
    const void *x;            /* row 0 of the matrix that row_index refers to */
    const int32_t *row_index; /* [rows], or NULL: consecutive rows from x */
    const int32_t *y_index;   /* [rows] of y, or NULL: consecutive ones */
    int32_t rows;
    int32_t first;               /* its first row in the round */
    int32_t first_work, n_works; /* its outputs */
} sp_lora_item;

/*
 * Scratch of a job, in one block whose address never changes. The budgets bound a round; one item
 * of round_rows rows always fits into an empty round.
 */
typedef struct sp_lora_scratch {
    int32_t round_rows;
    size_t x_bytes, xa_bytes; /* budgets of the packed forms */
    char *packed_x;           /* [x_bytes] */
    char *packed_xa;          /* [xa_bytes] */
    char *xa;                 /* [SP_LORA_GROUP_MAX][round_rows, rank_max] of the job's type */
    char *rounded;       /* [round_rows, k_max] of the job's type: rows of an FP32 x; or NULL */
    float *scale;        /* [SP_LORA_GROUP_MAX][round_rows] */
    sp_lora_work *works; /* [SP_LORA_GROUP_MAX * round_rows] */
    sp_lora_item *items; /* [round_rows] */
    /* Numbers of the first task of each item and work, ascending. */
    int32_t *first_pack, *first_shrink, *first_expand;
    /* In pieces, what a piece reads of a target. */
    atomic_int *unready;          /* [SP_LORA_GROUP_MAX] works whose packed_xa is not complete */
    const sp_gemm_args **expands; /* [SP_LORA_GROUP_MAX][round_rows] those of one row first */
} sp_lora_scratch;

/* What the scratch is sized for: every site up to k_max inputs and rank_max, at any level. */
typedef struct sp_lora_sizes {
    sp_dtype dtype;
    int32_t k_max, rank_max, rows_max;
    bool x_f32; /* x may be FP32 where dtype is not */
} sp_lora_sizes;

/* Bytes of the scratch for these sizes. */
size_t sp_lora_scratch_bytes(const sp_lora_sizes *sizes);

/* Carves up `block` (256-byte aligned), of sp_lora_scratch_bytes bytes for the same sizes. */
void sp_lora_scratch_cut(void *block, const sp_lora_sizes *sizes, sp_lora_scratch *out_scratch);

typedef struct sp_lora_job {
    /* Set by the caller. */
    const sp_kernels *kernels;
    sp_exec *exec;
    const sp_lora_scratch *scratch;
    sp_dtype dtype;  /* of A, B and xa, and of x when it is multiplied */
    sp_dtype x_type; /* dtype, or F32: then x is rounded to dtype first */
    int32_t k_in, rank_max;
    const void *x; /* [rows, k_in] of x_type, stride x_stride elements */
    int64_t x_stride;
    int32_t n_targets; /* 1 .. SP_LORA_GROUP_MAX */
    sp_lora_target targets[SP_LORA_GROUP_MAX];
    bool in_pieces;        /* the caller runs the only round, piece by piece */
    int32_t item_rows_max; /* sp_lora_job_expect: of an item that one thread runs; 0: all share */
    sp_lora_half half;
    /* The round so far. Must be zeros at the start. */
    int32_t n_rows, n_items, n_works;
    size_t x_used, xa_used;
    int32_t n_pack_tasks, n_shrink_tasks, n_expand_tasks;
    int64_t pack_rows; /* of one packing task */
    /* In pieces: how many expands each target has, and how many of them have one row. */
    int32_t n_expands[SP_LORA_GROUP_MAX], n_lone[SP_LORA_GROUP_MAX];
    bool too_large; /* in_pieces, and the rows do not fit into one round */
} sp_lora_job;

/* Rows of one adapter, by number; the lists live until sp_lora_job_finish. */
typedef struct sp_lora_rows {
    int32_t n;
    const int32_t *order;       /* [n] rows of y; NULL: 0 .. n - 1 */
    const int32_t *x_order;     /* [n] row of x of each; NULL: order */
    const int32_t *scale_order; /* [n] element of row_scale of each; NULL: order */
    const float *row_scale;     /* request scales; NULL: all 1 */
} sp_lora_rows;

/* So many calls of add may follow: chooses whether a thread runs items alone. For a whole job, not
 * in pieces, before the first of them. */
void sp_lora_job_expect(sp_lora_job *job, int32_t n_items);

/* Adds them; pairs is [n_targets]. Runs rounds as they fill. */
void sp_lora_job_add(sp_lora_job *job, const sp_lora_rows *rows, const sp_lora_pair *pairs);

/* Runs the last round. exec NULL: everything on the calling thread. */
void sp_lora_job_finish(sp_lora_job *job);

/*
 * The round in pieces (see in_pieces), in place of sp_lora_job_finish. Cutting sets n_pack_tasks
 * and n_shrink_tasks. All packing comes before all shrinking; pieces of one kind run in any order,
 * on any threads.
 */
void sp_lora_job_cut(sp_lora_job *job);
/* The packed form of rows 0 .. rows, where the round consists of exactly them as one item, in
 * order; else NULL. */
const void *sp_lora_job_packed_x(const sp_lora_job *job, int32_t rows);
/* Runs one packing or one shrink task of the round. */
void sp_lora_job_pack(sp_lora_job *job, int32_t task);
void sp_lora_job_shrink(sp_lora_job *job, int32_t task);
/* Folds columns [begin, end) of one target, all rows; returns false and does nothing while an xa
 * that it needs is not complete. */
bool sp_lora_job_expand(sp_lora_job *job, int32_t target, int64_t column_begin, int64_t column_end);

/*
 * The round in two phases, after the rows were added with in_pieces: all packing and shrinking; all
 * expands. Between them an output of the routed form, whose rows are named by row_order, may get
 * another y.
 */
void sp_lora_job_run_shrinks(sp_lora_job *job);
/* Gives target `target` another y for the expands to come. */
void sp_lora_job_set_y(sp_lora_job *job, int32_t target, void *y, int64_t y_stride,
                       sp_dtype y_type);
void sp_lora_job_run_expands(sp_lora_job *job);

#endif
