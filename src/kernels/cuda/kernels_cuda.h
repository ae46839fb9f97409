/*
 * kernels_cuda.h: the launchers of libsidepath_cuda.so, as plain C. Numbers only: every pointer is
 * a device pointer unless it says host. A launcher only enqueues work on the stream: it does not
 * allocate, wait or read device memory, so all of them can be captured. Pointers must not be NULL
 * unless said so; any thread may call one, and work is ordered by the stream; `gpu` is the device's
 * number.
 *
 * The order of summation, fixed by k and by the row's own rank alone:
 *     xa[c]    = sum over groups of 4 chunks, in index order, of the sum of a group's chunks of
 *                512 k, in index order, of ((q0 + q1) + q2) + q3, where q_i is quarter i (128 k)
 *                of the chunk, a chain of eight mma m16n8k16 from +0;
 *     delta[j] = a chain of two mma for each 32 ranks, from +0.
 * Elements beyond k or the rank are zeros in that chain; a chunk or group beyond k is no term. A
 * launcher's choice of tiles, blocks and splits (cuda_choose.h) moves work between blocks and never
 * changes this.
 */
#ifndef SP_KERNELS_CUDA_KERNELS_CUDA_H
#define SP_KERNELS_CUDA_KERNELS_CUDA_H

#include "base/private.h"

#include <sidepath/device.h>

#ifdef __cplusplus
extern "C" {
#endif

#define SP_CUDA_SITES_MAX 4
#define SP_CUDA_RANK_MAX  512
#define SP_CUDA_ROWS_MAX  65536
#define SP_CUDA_SLOTS_MAX 4096
#define SP_CUDA_TILE_ROWS 8

/* Everything that the kernels need of one tile in one record: a decode step is a chain of dependent
 * loads. */
typedef struct sp_cuda_tile {
    int32_t slot;
    int32_t count; /* rows in use; 0: no tile */
    int32_t pad[2];
    int32_t row[SP_CUDA_TILE_ROWS];
    float scale[SP_CUDA_TILE_ROWS]; /* request scale of each row */
} sp_cuda_tile;

typedef struct sp_cuda_plan_head {
    int32_t n_rows, n_routed, n_segments, n_tiles;
    int32_t refused_row; /* the first row with a slot or scale out of range, or -1 */
    int32_t pad[3];
} sp_cuda_plan_head;

/* The plan on the device, at fixed addresses; arrays as in sp_plan_view. */
typedef struct sp_cuda_plan {
    const int32_t *seq_slot_in; /* [n_rows] as the host wrote it; NULL: all rows in slot 0 */
    const float *row_scale_in;  /* [n_rows], or NULL: all 1 */
    sp_cuda_plan_head *head;
    int32_t *seq_slot, *row_order, *segment_begin, *segment_slot;
    float *row_scale;
    int32_t *tile_begin, *tile_rows, *tile_slot;
    sp_cuda_tile *tiles; /* [sp_cuda_tiles_bound], the rest with count 0 */
} sp_cuda_plan;

/* One output of a group. The factors of slot s are at `a + s * a_slot_stride` and so on. */
typedef struct sp_cuda_site {
    const void *a;                        /* [rank, k_in], stride a_stride elements */
    const void *b;                        /* [n_out, rank], stride b_stride elements */
    int64_t a_slot_stride, b_slot_stride; /* elements */
    int64_t a_stride, b_stride;
    const int32_t *rank; /* [slots] own rank, 0 = absent; NULL: one_rank */
    const float *scale;  /* [slots] stored scale; NULL: one_scale */
    int32_t one_rank;
    float one_scale;
    void *y; /* [n_rows, n_out], stride y_stride elements */
    int64_t y_stride;
    int32_t n_out;
    int32_t y_is_f32; /* else of the group's type */
} sp_cuda_site;

typedef struct sp_cuda_group {
    int32_t type; /* sp_dtype: BF16 or F16 */
    int32_t n_rows, n_slots, n_sites;
    int32_t k_in;
    int32_t rank_stride;     /* no own rank is larger; a multiple of 8 */
    int32_t multiprocessors; /* of the GPU; the same for shrink and expand */
    int32_t after_plan;      /* the kernel before this one on the stream is the plan's */
    int32_t keep_sums;       /* of a shrink: take_parts follows it */
    /* Of a shrink: the next launch is a product that may fold these deltas in (sp_cuda_gemm.deltas)
     * and reads x before it waits for its predecessor, so it starts only when x is complete. */
    int32_t folds;
    const void *x; /* [n_rows, k_in], stride x_stride elements */
    int64_t x_stride;
    sp_cuda_plan plan;
    float *partials; /* sp_cuda_partials_bytes */
    sp_cuda_site sites[SP_CUDA_SITES_MAX];
} sp_cuda_group;

/*
 * xa of a group's sites between shrink and expand. take_parts follows a shrink of the group and
 * writes its sums, each as stated above; a site without ranks (rank NULL, one_rank 0) gets zeros.
 * give_parts stores such sums, possibly of several groups added up, as the single partial of a
 * group with k_in 1, for an expand of that group.
 */
typedef struct sp_cuda_parts {
    float *xa[SP_CUDA_SITES_MAX]; /* [n_rows, rank_stride], stride xa_stride elements */
    int64_t xa_stride[SP_CUDA_SITES_MAX];
} sp_cuda_parts;

/*
 * The grouped GEMM in FP16, shapes and checks as in sidepath/grouped.h, of which this is the same
 * with a stride. It has its own order of summation, fixed by k and the adapter's own rank: warp w
 * of 16 sums the slices of 32 k with the numbers w, w + 16, ... in a chain of two mma m16n8k16
 * each, the 16 sums are added in order; delta is a chain of one mma for each 16 ranks.
 */
typedef struct sp_cuda_grouped {
    const void *input;               /* f16 [total_rows, input_size] */
    const void *lora_a, *lora_b;     /* f16 [n_adapters, input_size, S], [n_adapters, S, out] */
    void *output;                    /* f16 [total_rows, output_size] */
    void *xa;                        /* f16 [total_rows, S] scratch */
    const int32_t *segment_offsets;  /* [n_segments + 1] */
    const int32_t *segment_adapters; /* [n_segments] */
    const int32_t *ranks;            /* [n_adapters] */
    const float *scales;             /* [n_adapters] */
    int32_t total_rows, input_size, output_size;
    int32_t rank_stride; /* S */
    int32_t max_rank, n_segments, n_adapters;
} sp_cuda_grouped;

/* What the check found first: which array (0: nothing), at which index. */
typedef enum sp_cuda_grouped_fault {
    SP_CUDA_GROUPED_FINE = 0,
    SP_CUDA_GROUPED_OFFSETS = 1,
    SP_CUDA_GROUPED_ADAPTERS = 2,
    SP_CUDA_GROUPED_RANKS = 3,
    SP_CUDA_GROUPED_SCALES = 4
} sp_cuda_grouped_fault;

typedef struct sp_cuda_grouped_report {
    int32_t fault, index;
} sp_cuda_grouped_report;

/* Rows of embed_tokens that slots replace, and pairs of embed_tokens. tokens.cu has the formulas.
 */
typedef struct sp_cuda_embed {
    int32_t type; /* sp_dtype of everything: BF16 or F16 */
    int32_t n_rows, vocab, hidden;
    const int32_t *tokens, *seq_slot; /* [n_rows] */
    const float *row_scale;           /* [n_rows] */
    const void *const *rows;          /* [slots] -> [n, hidden] */
    const int32_t *const *map;        /* [slots] -> [vocab]; NULL: no slot replaces rows */
    const void *a, *b;                /* of slot 0: [R, vocab], [hidden, R] */
    int64_t slot_stride;              /* elements */
    int32_t rank_stride;              /* R */
    const int32_t *rank;              /* [slots]; NULL: no pairs */
    const float *scale;               /* [slots] */
    void *y;                          /* [n_rows, hidden], stride y_stride elements */
    int64_t y_stride;
} sp_cuda_embed;

/* Logits of the tokens that slots replace. */
typedef struct sp_cuda_head {
    int32_t type; /* sp_dtype of x and the rows: BF16 or F16 */
    int32_t n_rows, n_slots, vocab, hidden;
    const void *x; /* [n_rows, hidden], stride x_stride elements */
    int64_t x_stride;
    const sp_cuda_tile *tiles;
    const void *const *rows;   /* [slots] -> [n, hidden], on 256-byte boundaries */
    const int32_t *const *ids; /* [slots] -> [n] */
    const int32_t *n;          /* [slots] */
    void *logits;              /* [n_rows, vocab], stride logits_stride elements */
    int64_t logits_stride;
    int32_t logits_is_f32; /* else of `type` */
} sp_cuda_head;

/* FP32 rows, rounded to nearest even. */
typedef struct sp_cuda_round {
    int32_t type; /* sp_dtype of `to`: BF16 or F16 */
    int32_t n_rows, k;
    const float *x; /* [n_rows, k], stride x_stride elements */
    int64_t x_stride;
    void *to; /* [n_rows, k], dense */
} sp_cuda_round;

/* Why a row is refused; the numbers are those of sp_row_refusal. */
typedef enum sp_cuda_refusal {
    SP_CUDA_ROW_FINE = 0,
    SP_CUDA_ROW_SLOT = 1,  /* no such slot */
    SP_CUDA_ROW_SCALE = 2, /* not finite, or outside 0 .. 16 */
    SP_CUDA_ROW_EMPTY = 3, /* the slot shows no version */
    SP_CUDA_ROW_STALE = 4  /* it shows another one */
} sp_cuda_refusal;

typedef struct sp_cuda_row_report {
    uint64_t step; /* incremented by every check */
    int32_t n_rows, n_refused;
    int32_t first_row; /* of the refused ones, or -1 */
    int32_t reason;    /* its sp_cuda_refusal */
} sp_cuda_row_report;

/*
 * Rows whose versions were chosen on the device. A valid row is copied to seq_slot and row_scale, a
 * refused one becomes a row of the base; refused rows are counted.
 */
typedef struct sp_cuda_rows {
    int32_t n_rows, n_slots;
    const int32_t *slot;        /* [n_rows], -1: the base */
    const uint64_t *generation; /* [n_rows]; not read for the base */
    const float *scale;         /* [n_rows], or NULL: all 1 */
    const uint64_t *shown;      /* [n_slots] generation that the slot's tables show; 0: none */
    int32_t *seq_slot;          /* [n_rows] */
    float *row_scale;           /* [n_rows] */
    sp_cuda_row_report *report;
} sp_cuda_rows;

/*
 * Rows of experts, grouped by group_experts: an item is up to item_rows rows of one expert and one
 * slot, in ascending order. Item i has its rows, their tokens and the request's scales from
 * i * item_rows on. Which item comes first is not stated: no bit depends on it.
 */
typedef struct sp_cuda_item {
    int32_t slot, expert, count, pad;
} sp_cuda_item;

typedef struct sp_cuda_items {
    int32_t *counts;      /* [4], zeroed once: [0] items; the rest is the grouping's own */
    sp_cuda_item *item;   /* [sp_cuda_items_bound], 16-byte aligned */
    int32_t *row, *token; /* [sp_cuda_items_bound * item_rows] */
    float *scale;         /* the same, or NULL */
    int32_t item_rows;    /* 8 to 192, a multiple of 8 */
    int32_t bound;        /* sp_cuda_items_bound, of the most rows that are grouped */
} sp_cuda_items;

#define SP_CUDA_EXPERTS_MAX 1024

/*
 * The items of rows row_begin .. row_begin + n_rows - 1, in one of the forms of
 * sidepath/moe_rows.h. What has no slot or no expert there has no item, as rows that are no pair;
 * prefix sums that are none give no items.
 */
typedef struct sp_cuda_group_rows {
    int32_t n_tokens, top_k, n_experts, n_slots;
    const int32_t *expert;                  /* [n_tokens * top_k]; NULL: the sorted form */
    const int32_t *row_pair, *expert_begin; /* [all_rows], [n_experts + 1] */
    int32_t all_rows;                       /* of the form */
    int32_t row_begin, n_rows;
    const int32_t *token_slot; /* [n_tokens]; NULL: all tokens have slot 0 */
    const float *token_scale;  /* [n_tokens]; not read without items.scale */
    sp_cuda_items items;
} sp_cuda_group_rows;

/* One expert of a module in a slot: its factors are so many units of 256 bytes from the slot's. A
 * [S, k_in], B [n_out, S], S the rank rounded up to 8, pads zero. Rank 0: none. */
typedef struct sp_cuda_expert_cell {
    uint32_t a, b;
    int32_t rank;
    float scale;
} sp_cuda_expert_cell;

/* One output of an expert delta: the experts of a module, or, cells NULL, a router, whose factors
 * are those of the slot alone, B with rows S apart. */
typedef struct sp_cuda_expert_site {
    const sp_cuda_expert_cell *const *cells; /* [slots] -> [experts]; NULL in it: none */
    const void *const *factors;              /* [slots] what offsets count from */
    const void *const *a, *const *b;         /* [slots], as rank and scale: of a router */
    const int32_t *rank;
    const float *scale;
    void *y; /* [rows, n_out], stride y_stride elements */
    int64_t y_stride;
    int32_t n_out;
    int32_t y_is_f32; /* else of the group's type */
    float *scales;    /* [rows]: a delta by itself; NULL: added to y */
} sp_cuda_expert_site;

/*
 * y += scale · xa · Bᵀ, xa = x · Aᵀ, for modules that share x, in one launch, by the order above.
 * `after_group`: the kernel before this one on the stream wrote the items or tiles. Where the sites
 * have `scales`, as all or none of a launch have, y = T(xa · Bᵀ), of the group's type, and the
 * row's scale goes there, so that y + scale · delta by one fused step has the same bits; rows that
 * have no delta or the scale 0 have neither written: clear_scales is launched before.
 */
typedef struct sp_cuda_expert_delta {
    int32_t type; /* sp_dtype: BF16 or F16 */
    int32_t k_in, n_sites;
    int32_t rank_max; /* no rank is larger; at most SP_CUDA_RANK_MAX */
    int32_t multiprocessors, after_group;
    int32_t x_by_token; /* row t of x is token t's, else row i is row i's */
    const void *x;      /* stride x_stride elements */
    int64_t x_stride;
    sp_cuda_items items; /* of SP_CUDA_ITEM_FEW, _SOME or _MANY rows */
    /* Instead of items, for routers: the plan's, whose rows are tokens. */
    const sp_cuda_tile *tiles; /* NULL: items */
    const sp_cuda_plan_head *head;
    sp_cuda_expert_site sites[SP_CUDA_SITES_MAX];
} sp_cuda_expert_delta;

/* Zeros in n floats of each array. */
typedef struct sp_cuda_clear {
    int32_t n_arrays;
    int64_t n;
    float *array[SP_CUDA_SITES_MAX];
} sp_cuda_clear;

/* name, arguments. All return a cudaError_t as int. */
#define SP_CUDA_KERNEL_LIST(X)                                                                     \
    X(plan_rows,                                                                                   \
      (int gpu, const sp_cuda_plan *plan, int32_t n_rows, int32_t n_slots, void *stream))          \
    X(shrink, (int gpu, const sp_cuda_group *group, void *stream))                                 \
    X(expand, (int gpu, const sp_cuda_group *group, void *stream))                                 \
    X(take_parts, (int gpu, const sp_cuda_group *group, const sp_cuda_parts *parts, void *stream)) \
    X(give_parts, (int gpu, const sp_cuda_group *group, const sp_cuda_parts *parts, void *stream)) \
    X(grouped_gemm, (int gpu, const sp_cuda_grouped *grouped, void *stream))                       \
    X(grouped_check,                                                                               \
      (int gpu, const sp_cuda_grouped *grouped, sp_cuda_grouped_report *report, void *stream))     \
    X(embed_rows, (int gpu, const sp_cuda_embed *embed, void *stream))                             \
    X(head_rows, (int gpu, const sp_cuda_head *head, void *stream))                                \
    X(round_rows, (int gpu, const sp_cuda_round *round, void *stream))                             \
    X(check_rows, (int gpu, const sp_cuda_rows *rows, void *stream))                               \
    X(group_experts, (int gpu, const sp_cuda_group_rows *rows, void *stream))                      \
    X(add_experts, (int gpu, const sp_cuda_expert_delta *delta, void *stream))                     \
    X(clear_scales, (int gpu, const sp_cuda_clear *clear, void *stream))                           \
    X(kernels_init, (int gpu))

typedef struct sp_cuda_kernels {
#define SP_CUDA_MEMBER(name, arguments) int(*name) arguments;
    SP_CUDA_KERNEL_LIST(SP_CUDA_MEMBER)
#undef SP_CUDA_MEMBER
} sp_cuda_kernels;

/*
 * Resolves every launcher of the object that `device` came from and prepares the kernels on it.
 * SP_ERR_UNSUPPORTED with `missing-kernel` names one that is not there.
 */
SP_PRIVATE sp_status sp_kernels_cuda_get(sp_device *device, sp_cuda_kernels *out_kernels,
                                         sp_error *error);

#ifdef __cplusplus
}
#endif
#endif
