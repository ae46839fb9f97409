/*
 * delta.h: y += scale * (x · Aᵀ) · Bᵀ, every row with its own adapter.
 *
 * This room owns: applying a plan at a group of sites that share x, its scratch, and the
 * single-adapter form. It must not know: models, files, requests.
 *
 * Rounding points, everywhere the same (T is the pool's type, bf16 in serving):
 *     x     = T(x)              where x is FP32 and T is not: as if the caller had rounded it
 *     xa    = T(Σ x·A)          FP32 accumulation from +0, the backend's fixed order
 *     delta = T(Σ xa·B)
 *     y     = Ty(fmaf(scale, (float)delta, (float)y))
 * T(·) rounds to nearest even. An FP32 y takes the fma without the last rounding; with T = F32
 * nothing is rounded before it. Rows with slot -1, rank 0 or an effective scale of 0 are neither
 * read nor written.
 *
 * One set of calls for both backends. On the CPU a call has done its work when it returns. On a GPU
 * x, y, tokens and logits are device memory, and a call only enqueues, on `stream` (NULL: the
 * device's main stream; a host's own is wrapped by sp_stream_wrap); all but sp_delta_upload may be
 * captured. No call but create and destroy allocates, locks or logs. Calls of one delta share its
 * scratch and belong to one thread at a time; where they are on several streams, the host orders
 * these with events. Which streams a rewritten slot waits for is said in device.h.
 *
 * Every call that takes a plan refuses, with SP_ERR_STATE and nothing written, one that was built
 * over another pool than the delta's, and one whose versions were released or replaced since it was
 * built (sp_plan_check). Every refusal says in *error which argument it is about, what it was and
 * what was expected, and nothing has been written or enqueued then.
 */
#ifndef SIDEPATH_DELTA_H
#define SIDEPATH_DELTA_H

#include <sidepath/route.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct sp_delta sp_delta;

typedef struct sp_delta_options {
    size_t struct_bytes;
    sp_pool *pool;       /* borrowed until sp_delta_destroy */
    sp_exec *exec;       /* borrowed until sp_delta_destroy; NULL: the caller alone. Not used on a
                            GPU */
    int32_t rows_max;    /* the largest plan */
    const char *cpu_isa; /* NULL or "auto": the best level; else scalar, avx2, avx512, amx */
    bool x_f32;    /* x may be FP32 where the pool is not; takes scratch for its rounded rows */
    bool no_apply; /* measuring lever: every delta is skipped */
    sp_module_set skip_modules; /* measuring lever: the deltas of these are skipped */
    int32_t expert_rows_max;    /* (token, k) rows of a window of sidepath/experts.h, up to
                                   SP_DELTA_EXPERT_ROWS_MAX */
} sp_delta_options;

#define SP_DELTA_EXPERT_ROWS_MAX (1 << 20)

SP_API void sp_delta_options_default(sp_delta_options *out_options, size_t struct_bytes);

/* Scratch bytes that sp_delta_create will take on the host, but for those of experts
 * (sp_delta_experts_workspace_bytes); fixed for its whole life. 0 for sizes out of range. */
SP_API size_t sp_delta_workspace_bytes(const sp_layout *layout, int32_t rows_max, bool x_f32);

/* The same on the pool's device, where that is a GPU: plan and scratch, at fixed addresses; but for
 * those of experts (sp_delta_experts_device_bytes). 0 for a pool in host memory and for rows_max
 * out of range. */
SP_API size_t sp_delta_device_bytes(const sp_pool *pool, int32_t rows_max, bool x_f32);

/*
 * Runs where the pool's memory is. *out_delta is owned by the caller (sp_delta_destroy, before the
 * pool). SP_ERR_ARGUMENT: options out of range, no pool. SP_ERR_MEMORY. On a GPU SP_ERR_UNSUPPORTED
 * with `engine-unsupported`, naming what has no kernels there: an f32 pool, ranks above 512, more
 * than 65536 rows. SP_ERR_UNSUPPORTED: a cpu_isa that this machine lacks.
 */
SP_API sp_status sp_delta_create(const sp_delta_options *options, sp_delta **out_delta,
                                 sp_error *error);
SP_API void sp_delta_destroy(sp_delta *delta); /* NULL is allowed; waits for its work */

/* ---- a step -------------------------------------------------------------------------------- */

/*
 * A step begins with these two; on the CPU they only check. upload sends the plan's rows to the
 * device, after what the stream holds, and is not to be captured; start enqueues the node that
 * makes segments and tiles of what is there, and may be. So a captured graph holds start and the
 * applies; before each replay the host builds its plan and uploads it on a stream that the replay
 * follows. A plan of fewer rows than were captured leaves the others to the base.
 * SP_ERR_ARGUMENT: no plan, or one of more than rows_max rows. SP_ERR_DEVICE.
 */
SP_API sp_status sp_delta_upload(sp_delta *delta, const sp_plan *plan, sp_stream *stream,
                                 sp_error *error);
SP_API sp_status sp_delta_start(sp_delta *delta, const sp_plan *plan, sp_stream *stream,
                                sp_error *error);

/* One output of a group. */
typedef struct sp_delta_output {
    size_t struct_bytes; /* the same in all outputs of a call */
    int32_t site;        /* its index in the geometry */
    void *y;             /* [n_rows, n_out], accumulated in place */
    int64_t y_stride;    /* elements between rows, >= n_out */
    sp_dtype y_type;     /* the pool's dtype, or F32 */
} sp_delta_output;

/* Sites that share x: q,k,v; gate,up; a router and the shared expert's inputs. Everything is
 * borrowed for the call. */
typedef struct sp_delta_call {
    size_t struct_bytes;
    const sp_plan *plan;            /* NULL: the rows of the last sp_plan_from_device */
    const void *x;                  /* [n_rows, k_in] */
    int64_t x_stride;               /* elements between rows, >= k_in */
    sp_dtype x_type;                /* the pool's dtype, or F32 (options.x_f32) */
    const sp_delta_output *outputs; /* [n_outputs] */
    int32_t n_outputs;
    sp_stream *stream; /* GPU: NULL is the main one. Not used on the CPU */
} sp_delta_call;

/*
 * Applies the plan's deltas at the sites. Sites that the pool does not hold, or that no row's
 * adapter has, cost nothing. On a GPU two launches for each four sites that the pool holds; one
 * more where x is rounded first, where large ranks need one that rounds between the two, and where
 * many rows have y of both types. What is routed was uploaded and started before.
 * SP_ERR_STRIDE: x_stride < k_in or y_stride < n_out. SP_ERR_ARGUMENT: an x or y type that is
 * neither the pool's nor F32, a site that the geometry has not, that takes tokens or that is an
 * expert's (sidepath/experts.h), outputs whose k_in differ, a plan of more than rows_max rows.
 * SP_ERR_UNSUPPORTED: an FP32 x without x_f32; with `engine-unsupported`: a router on a GPU whose
 * library has no kernel for it.
 * SP_ERR_STATE, GPU: another plan than was started, or one that was built anew since.
 * SP_ERR_DEVICE.
 */
SP_API sp_status sp_delta_apply(sp_delta *delta, const sp_delta_call *call, sp_error *error);

/* The most outputs that the halves below take, of those that the pool holds. */
#define SP_DELTA_GROUP_MAX 4

/*
 * The halves of an apply, with the same bits, for a host that runs the shrink beside its base GEMM:
 * the same plan and sites in both; x is read by the shrink, and must stay as it is until the expand
 * has returned or, on a GPU, is done; y is read and written by the expand alone. One shrink is in
 * progress at a time, and any other call of this delta ends it. As sp_delta_apply; SP_ERR_ARGUMENT:
 * more outputs than SP_DELTA_GROUP_MAX; SP_ERR_STATE, expand: no shrink of these sites is in
 * progress.
 */
SP_API sp_status sp_delta_shrink(sp_delta *delta, const sp_delta_call *call, sp_error *error);
SP_API sp_status sp_delta_expand(sp_delta *delta, const sp_delta_call *call, sp_error *error);

/* ---- embeddings and logits ----------------------------------------------------------------- */

/*
 * Whether sp_delta_embed (SP_SITE_EMBEDDING) or sp_delta_head (SP_SITE_HEAD) has anything to do
 * now: an adapter in some slot replaces rows of the table, or the pool holds the site's pairs. A
 * host may leave the call out otherwise.
 * On a GPU: whether it may ever have, so that a captured graph holds the call.
 */
SP_API bool sp_delta_has_tokens(const sp_delta *delta, sp_site_kind kind);

typedef struct sp_delta_embed_call {
    size_t struct_bytes;
    const sp_plan *plan;   /* NULL: the rows of the last sp_plan_from_device */
    const int32_t *tokens; /* [n_rows] */
    void *y;               /* [n_rows, hidden] of the pool's dtype */
    int64_t y_stride;      /* elements between rows, >= hidden */
    sp_stream *stream;
} sp_delta_embed_call;

/*
 * After the gather of the embeddings, before any scale of theirs: rows whose token their adapter
 * replaces become the adapter's row, whatever the request's scale (but 0, which is the base); then
 * scale * B · A[:, token] is added where the adapter has a pair, with the rounding points above.
 * SP_ERR_STRIDE: y_stride < hidden. SP_ERR_ARGUMENT: a token outside the vocabulary in a routed
 * row (on a GPU, where tokens are device memory, such a row stays as it is), a plan of more than
 * rows_max rows, no table in the geometry. SP_ERR_STATE as sp_delta_apply.
 */
SP_API sp_status sp_delta_embed(sp_delta *delta, const sp_delta_embed_call *call, sp_error *error);

typedef struct sp_delta_head_call {
    size_t struct_bytes;
    const sp_plan *plan;   /* of these rows; NULL: the rows of the last sp_plan_from_device */
    const void *x;         /* [n_rows, hidden], what the head read */
    int64_t x_stride;      /* elements between rows, >= hidden */
    sp_dtype x_type;       /* the pool's dtype, or F32 (options.x_f32) */
    void *logits;          /* [n_rows, vocab] */
    int64_t logits_stride; /* elements between rows, >= vocab */
    sp_dtype logits_type;  /* F32, or the pool's dtype */
    sp_stream *stream;
} sp_delta_head_call;

/*
 * After the head's GEMM, before any soft-cap: the logits of tokens that the row's adapter replaces
 * are computed again, as products with its rows in the order of the GEMM, rounded once where they
 * are not FP32; then the delta of lm_head is added. The plan is of these rows, which need not be
 * those of the step: sp_plan_select makes it. Refuses like sp_delta_embed and sp_delta_apply.
 * On a GPU what was uploaded and started must be the plan of these rows: where they are not those
 * of the step, a second sp_delta over the same pool has a second plan.
 */
SP_API sp_status sp_delta_head(sp_delta *delta, const sp_delta_head_call *call, sp_error *error);

/* ---- rows that the device chose ------------------------------------------------------------ */

/* Why a row was refused. */
typedef enum sp_row_refusal {
    SP_ROW_FINE = 0,
    SP_ROW_NO_SLOT = 1, /* the slot is out of range */
    SP_ROW_SCALE = 2,   /* the request scale is not finite, or outside 0 .. 16 */
    SP_ROW_EMPTY = 3,   /* the slot shows no version: empty or being loaded */
    SP_ROW_STALE = 4    /* the slot shows another version */
} sp_row_refusal;

/* Device memory, read when the device gets there. */
typedef struct sp_device_rows {
    size_t struct_bytes;
    int32_t n_rows;             /* 0 .. rows_max */
    const int32_t *slot;        /* [n_rows] slot of each row's handle, or SP_SLOT_BASE */
    const uint64_t *generation; /* [n_rows] its generation; not read where slot is SP_SLOT_BASE */
    const float *row_scale;     /* [n_rows] request scales, or NULL: all 1 */
} sp_device_rows;

/*
 * In place of upload and start, on a GPU, where the rows' versions are in device memory: enqueues a
 * kernel that holds each row against what the pool's slots show at that point of the stream, then
 * the plan's node; may be captured. A row that is refused is the base's: no call touches its y. How
 * many were, the first of them and why can be read later (sp_delta_row_report). The calls of the
 * step are made with plan NULL. On the device nobody counts references: what a row names must be
 * held until the step is done, or it is refused once its slot was emptied or loaded anew, in the
 * order of the streams.
 * SP_ERR_UNSUPPORTED: not a GPU. SP_ERR_ARGUMENT: a missing array, n_rows out of range.
 * SP_ERR_DEVICE.
 */
SP_API sp_status sp_plan_from_device(sp_delta *delta, const sp_device_rows *rows, sp_stream *stream,
                                     sp_error *error);

typedef struct sp_row_report {
    size_t struct_bytes;
    uint64_t step; /* rises by one with every such step, replays included; 0: none is done */
    int32_t n_rows, n_refused;
    int32_t first_row;     /* of the refused ones, or -1 */
    sp_row_refusal reason; /* of the first */
} sp_row_report;

/*
 * What the last step of sp_plan_from_device said that is done; the host waits for the stream, or
 * for an event after the step, before. SP_ERR_UNSUPPORTED: not a GPU.
 */
SP_API sp_status sp_delta_row_report(const sp_delta *delta, sp_row_report *out_report,
                                     sp_error *error);

/* ---- one adapter on plain pointers --------------------------------------------------------- */

/* For hosts without a pool: scratch, and on a GPU kernels, for calls of up to these sizes. */
typedef struct sp_delta_single sp_delta_single;

typedef struct sp_delta_single_options {
    size_t struct_bytes;
    sp_device *device;   /* borrowed until sp_delta_single_destroy; NULL: the CPU */
    sp_exec *exec;       /* borrowed likewise; NULL: the caller alone. Not used on a GPU */
    const char *cpu_isa; /* as in sp_delta_options */
    int32_t rows_max, k_in_max, rank_max; /* CPU: up to 2^20, 2^20, 4096; GPU: 65536, 2^20, 512 */
    bool x_f32;                           /* x may be FP32 where A and B are not */
} sp_delta_single_options;

SP_API void sp_delta_single_options_default(sp_delta_single_options *out_options,
                                            size_t struct_bytes);

/* *out_single is owned by the caller. SP_ERR_ARGUMENT: a size out of range. SP_ERR_UNSUPPORTED: a
 * cpu_isa that this machine lacks. SP_ERR_MEMORY, SP_ERR_DEVICE. */
SP_API sp_status sp_delta_single_create(const sp_delta_single_options *options,
                                        sp_delta_single **out_single, sp_error *error);
SP_API void sp_delta_single_destroy(sp_delta_single *single); /* NULL is allowed */

/* Pointers are the device's. */
typedef struct sp_delta_single_args {
    size_t struct_bytes;
    int32_t rows, k_in, n_out, rank;
    sp_dtype dtype;  /* of a and b: any on the CPU, BF16 or F16 on a GPU */
    sp_dtype x_type; /* dtype, or F32 (options.x_f32) */
    sp_dtype y_type; /* dtype, or F32 */
    const void *x;   /* [rows, k_in] */
    const void *a;   /* [rank, k_in] */
    const void *b;   /* [n_out, rank] */
    void *y;         /* [rows, n_out], accumulated in place */
    int64_t x_stride, a_stride, b_stride, y_stride; /* elements between rows */
    float scale;                                    /* finite */
    sp_stream *stream;                              /* GPU: NULL is the main one */
} sp_delta_single_args;

/*
 * The bits of the routed form. Does not allocate; on a GPU it only enqueues and may be captured.
 * Calls of one object share its scratch: one at a time, on one stream.
 * SP_ERR_ARGUMENT: a size below 0 or beyond what was prepared for, a missing tensor, a type, a
 * scale that is not finite. SP_ERR_STRIDE: a stride smaller than its row. SP_ERR_UNSUPPORTED: F32
 * factors on a GPU, an FP32 x without x_f32. SP_ERR_DEVICE.
 */
SP_API sp_status sp_delta_single_apply(sp_delta_single *single, const sp_delta_single_args *args,
                                       sp_error *error);

#ifdef __cplusplus
}
#endif
#endif
