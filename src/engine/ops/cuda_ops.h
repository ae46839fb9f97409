/*
 * cuda_ops.h: the backend of ops on a GPU: device memory for weights, activations, the KV cache and
 * the logits, at fixed addresses from creation on, and the current step. cuda_ops.c creates it;
 * cuda_weights.c places weights; cuda_step.c describes a step to the device and runs its pass,
 * eagerly or as a captured graph; cuda_rows.c, cuda_linear.c, cuda_delta_rule.c, cuda_moe.c,
 * cuda_logits.c and cuda_choice.c are the ops. Work is on the device's main stream, which forks
 * only inside a linear op, and only what reads results waits for it. The engine thread owns it.
 */
#ifndef SP_ENGINE_OPS_CUDA_OPS_H
#define SP_ENGINE_OPS_CUDA_OPS_H

#include "engine/ops/host_choice.h"
#include "engine/ops/kv_cache.h"
#include "engine/ops/ops.h"
#include "kernels/cuda/ops_cuda.h"

/* Descriptions of steps that may be in flight. */
#define SP_CUDA_TABLES 4
/* Steps of more rows run eagerly. */
#define SP_CUDA_GRAPH_ROWS 256
/* Steps of up to so many rows are bound by the weights' bytes, so a shrink beside the base's
 * product is nearly free; more rows are bound by arithmetic. */
#define SP_CUDA_SIDE_ROWS 64
/* A product folds deltas in by a pass for each adapter that the SP_CUDA_FOLD_ROWS rows of a
 * cluster have. With more passes a cluster, on average, separate expands are faster. */
#define SP_CUDA_FOLD_PASSES 3
/* With more rows separate expands are faster too: beside a long product they cost less than the
 * passes of its tiles. */
#define SP_CUDA_FOLD_ROWS_MAX 2048
/* In steps of up to so many rows the deltas of experts are computed by themselves, beside the
 * base's products, which are bound by the weights' bytes. */
#define SP_CUDA_APART_ROWS 256
/* Row counts that steps are padded to in graphs, with and without deltas. */
#define SP_CUDA_GRAPHS_MAX 64

/* Shapes of linear ops that cuBLASLt is tried on. */
#define SP_CUDA_SHAPES_MAX 16

/* A captured pass: the rows that it launches, with or without deltas. */
typedef struct sp_cuda_graph {
    int32_t rows;
    bool adapted;
    bool seen;       /* such a step has run eagerly, which prepares its kernels */
    sp_graph *graph; /* NULL until captured */
} sp_cuda_graph;

/*
 * The arrays of an sp_cuda_step as one block, on the device and in pinned memory, where the same
 * offsets hold: a step is described by one copy.
 */
typedef struct sp_cuda_tables {
    /* offsets; the counts, with that of the items, are at 0 */
    size_t token, position, row_span, span_row, span_page, rule_span, rule_item, pages;
    size_t bytes;
    int32_t pages_max; /* sum over the spans of a step */
    char *device;
    char *host[SP_CUDA_TABLES];
    sp_event *read[SP_CUDA_TABLES]; /* the copy out of each is done */
    int32_t turn;
} sp_cuda_tables;

/* Of the rows whose logits were computed last. What the host reads is in pinned memory. */
typedef struct sp_cuda_window {
    float *logits;                               /* device [window, vocab] */
    void *x;                                     /* device [window, hidden] bf16 */
    int32_t *index, *token, *bad;                /* device [window] */
    void *greedy_scratch;                        /* device */
    float *host_logits;                          /* pinned [window, vocab] */
    int32_t *host_index, *host_token, *host_bad; /* pinned [window] */
    sp_event *index_read;                        /* host_index has been copied */
    bool fetched[SP_LOGIT_ROWS_MAX];             /* the row is in host_logits */
} sp_cuda_window;

/*
 * What sample_rows reads (rows, then masks, then changes) and writes (results, then the best ids,
 * then their logits): each a block on the device and one in pinned memory, and one copy.
 */
typedef struct sp_cuda_samples {
    bool there;          /* the GPU has the kernel for this vocabulary; else the host chooses */
    int32_t changes_max; /* of a window's rows together */
    char *in, *out, *host_in, *host_out;
    int32_t n;                        /* rows of the last launch */
    int32_t n_top[SP_LOGIT_ROWS_MAX]; /* of the window's rows that it scored; -1: others */
} sp_cuda_samples;

/* The weights of one layer's experts. */
typedef struct sp_cuda_moe_layer {
    const sp_experts *experts; /* of the model */
    const void *const *table;  /* device [3, experts] -> gate, up and down of each */
} sp_cuda_moe_layer;

/* The experts' own memory (cuda_moe.c); all NULL without experts. */
typedef struct sp_cuda_moe {
    sp_moe_shape shape;
    int32_t *choices;       /* [layers, launched rows, per_token] of the step, in memory for
                               rows_max rows; -1: a pad's */
    int32_t *host_choices;  /* the same, pinned, where the step says `routing` */
    int32_t *expert;        /* in `choices`, of the layer that was routed last */
    int32_t n_routed;       /* layers of the pass that were routed */
    float *weight;          /* [rows_max, per_token] */
    void *gate, *up, *down; /* bf16 [rows_max * per_token, inner], [.., hidden] by pair */
    /* Deltas of the three by themselves and the scale of each row, of SP_CUDA_APART_ROWS rows at
     * most; NULL without deltas. */
    void *gate_delta, *up_delta, *down_delta;
    float *gate_scale, *up_scale, *down_scale;
    sp_cuda_items items;       /* of the last route */
    sp_cuda_moe_layer *layers; /* [n_layers] */
    int32_t n_layers;
} sp_cuda_moe;

/* Recurrent states (cuda_delta_rule.c); all 0 and NULL without a gated delta rule. */
typedef struct sp_cuda_rule {
    int32_t layers;
    sp_cuda_rule_shape shape;
    int64_t state_bytes, snapshot_bytes; /* of one slot and one snapshot, all layers */
    char *states, *snapshots;            /* device */
    void *scratch;                       /* device; of a layer */
    /* of the current step, in its tables */
    const sp_cuda_rule_span *span;
    const sp_cuda_rule_item *item;
    const int32_t *n_items;
} sp_cuda_rule;

typedef struct sp_cuda_ops {
    sp_ops ops; /* first */
    /* borrowed */
    sp_device *device;
    sp_delta *delta, *head_delta; /* NULL: the base alone */
    sp_stream *stream;

    sp_stream *side; /* shrinks of few rows, the grouping for the deltas of experts, and those of
                        few rows, run there, beside the base's product */
    sp_event *fork, *join;
    int gpu;
    void *native; /* of the stream */
    sp_cuda_ops_kernels kernels;
    sp_cuda_kernels shared;                  /* those that the deltas use too */
    void *gemm;                              /* of kernels.base_gemm_open */
    sp_cuda_gemm learnt[SP_CUDA_SHAPES_MAX]; /* [n_learnt] shapes that cuBLASLt was tried on */
    int32_t n_learnt;

    int32_t rows_max, spans_max, hidden, vocab;
    int32_t widths[SP_ROWS_MAX];
    sp_dtype types[SP_ROWS_MAX]; /* BF16 or F32 */
    sp_cuda_attention_shape attention;
    sp_kv_cache cache;
    int32_t n_rot;
    float *cosine, *sine;    /* [positions, n_rot] */
    void *rows[SP_ROWS_MAX]; /* [rows_max, widths[i]] of types[i], row-major without padding */
    void *attention_scratch;
    int32_t *fault, *host_fault; /* [spans_max] of the step; the latter pinned */
    void **blocks;               /* [n_blocks] device memory: of all the above, and the weights */
    size_t n_blocks, blocks_capacity;
    void **pinned; /* [n_pinned] */
    size_t n_pinned, pinned_capacity;
    struct sp_cuda_uploader *uploader; /* of weights; NULL before the first and after the last */

    /* of the current step */
    sp_cuda_tables tables;
    sp_cuda_step step;   /* with the rows and spans that are launched */
    bool wide, adapted;  /* some span is wide; some row has an adapter */
    bool folds;          /* the base's products fold the deltas in */
    int64_t n_folded;    /* of all steps, products that did */
    const sp_plan *plan; /* of the rows that are launched */

    bool eager, free_gemm;
    sp_plan *capture_plan; /* of as many rows as a graph launches; NULL without delta */
    sp_cuda_graph graphs[SP_CUDA_GRAPHS_MAX];
    int32_t n_graphs;

    sp_cuda_moe moe;
    sp_cuda_rule rule;
    sp_cuda_window window;
    sp_cuda_samples samples;
    sp_plan *head_plan; /* of the window; NULL without delta */
    sp_host_choice choice;
} sp_cuda_ops;

/* The status of a launch; `what` is said where it failed. */
sp_status sp_cuda_launched(const sp_cuda_ops *cuda, int code, const char *what);

/* Zeroed memory that lives as long as the backend; NULL after a failure, with *status and *error
 * set, and where *status is set already. */
void *sp_cuda_block(sp_cuda_ops *cuda, size_t bytes, sp_status *status, sp_error *error);
void *sp_cuda_pinned(sp_cuda_ops *cuda, size_t bytes, sp_status *status, sp_error *error);

/* ---- the entries of the table -------------------------------------------------------------- */

sp_status sp_cuda_op_place(sp_ops *ops, sp_weight *weight, sp_error *error);
void sp_cuda_uploader_destroy(struct sp_cuda_uploader *uploader); /* NULL is allowed */

/* Learns which products of the pass and the head cuBLASLt computes faster with the same bytes. */
sp_status sp_cuda_op_prepare(sp_ops *ops, sp_pass_fn pass, void *user, const sp_weight *head);

sp_status sp_cuda_op_step(sp_ops *ops, const sp_step *step, sp_pass_fn pass, void *user);
/* Memory for the descriptions of steps. */
sp_status sp_cuda_tables_create(sp_cuda_ops *cuda, sp_error *error);
void sp_cuda_tables_destroy(sp_cuda_ops *cuda);
size_t sp_cuda_tables_bytes(const sp_ops_options *options);

sp_status sp_cuda_op_embed(sp_ops *ops, const sp_weight *table, sp_rows y);
sp_status sp_cuda_op_norm(sp_ops *ops, sp_rows x, const sp_norm *norm, sp_rows y);
sp_status sp_cuda_op_add_norm(sp_ops *ops, sp_rows sum, sp_rows x, const sp_norm *norm, sp_rows y);
sp_status sp_cuda_op_silu_mul(sp_ops *ops, sp_rows gate, sp_rows up);
/* The products of a linear op, of so many rows. */
sp_cuda_gemm sp_cuda_gemm_of(const sp_cuda_ops *cuda, sp_rows x, const sp_projection *projections,
                             int32_t n, int32_t rows);
sp_status sp_cuda_op_linear(sp_ops *ops, sp_rows x, const sp_projection *projections, int32_t n);
sp_status sp_cuda_op_rope_and_cache(sp_ops *ops, const sp_rope_call *call);
sp_status sp_cuda_op_attention(sp_ops *ops, sp_rows q, int32_t layer, sp_rows y);

sp_status sp_cuda_op_gate_heads(sp_ops *ops, sp_rows y, sp_rows q_gate);

sp_status sp_cuda_op_delta_rule(sp_ops *ops, const sp_delta_rule_call *call);
size_t sp_cuda_state_bytes(const sp_delta_rule_shape *shape, sp_dtype type);
size_t sp_cuda_snapshot_bytes(const sp_delta_rule_shape *shape, sp_dtype type);
/* The memory of cuda->rule beside states and snapshots; nothing without a gated delta rule. */
size_t sp_cuda_rule_bytes(const sp_ops_options *options);
sp_status sp_cuda_rule_create(sp_cuda_ops *cuda, const sp_ops_options *options, sp_error *error);
/* The most items of a step. */
int32_t sp_cuda_rule_items(int32_t rows, int32_t spans);
/* The step's spans and their chunks; returns the number of the latter. */
int32_t sp_cuda_rule_describe(const sp_step *step, sp_cuda_rule_span *out_spans,
                              sp_cuda_rule_item *out_items);

sp_status sp_cuda_op_route(sp_ops *ops, sp_rows logits, bool normalised);
/* Enqueues the copy of the step's choices to the host, after the pass. */
sp_status sp_cuda_fetch_routing(const sp_cuda_ops *cuda);
sp_status sp_cuda_op_read_routing(sp_ops *ops, sp_routing *out_routing);
sp_status sp_cuda_op_experts(sp_ops *ops, sp_rows x, const sp_experts *experts, sp_rows y);
sp_status sp_cuda_op_add_gated(sp_ops *ops, sp_rows y, sp_rows x, sp_rows gate);
/* As experts, before the first step: notes the layer's weights. */
sp_status sp_cuda_learn_experts(sp_ops *ops, sp_rows x, const sp_experts *experts, sp_rows y);
/* The memory of cuda->moe; nothing without experts. */
size_t sp_cuda_moe_bytes(const sp_ops_options *options);
sp_status sp_cuda_moe_create(sp_cuda_ops *cuda, const sp_ops_options *options, sp_error *error);
void sp_cuda_moe_destroy(sp_cuda_ops *cuda);

sp_status sp_cuda_op_faults(sp_ops *ops, bool *out_faults, int32_t n_spans);
sp_status sp_cuda_op_logits(sp_ops *ops, sp_rows x, const sp_weight *head, const int32_t *rows,
                            int32_t n_rows);
/* Enqueues the copy of a row of logits that the host lacks. */
sp_status sp_cuda_fetch_logits(sp_cuda_ops *cuda, int32_t index);
/* Memory for choosing tokens. */
sp_status sp_cuda_samples_create(sp_cuda_ops *cuda, sp_error *error);
size_t sp_cuda_samples_bytes(int32_t window, int32_t vocab, int32_t positions);
void sp_cuda_op_choose(sp_ops *ops, sp_choice *choices, int32_t n);
sp_status sp_cuda_op_score(sp_ops *ops, int32_t index, int32_t token, int32_t n_top,
                           float *out_logprob, sp_logprob *out_top);
const float *sp_cuda_op_read_logits(sp_ops *ops, int32_t index);

#endif
