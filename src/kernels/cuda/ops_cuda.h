/*
 * ops_cuda.h: the launchers for the base's part of a step: what engine/ops needs on a GPU beside
 * the deltas of kernels_cuda.h, whose rules hold here too. All elements are bf16 unless said so;
 * strides are in elements.
 *
 * A launch is for `rows` rows, which may be more than the step has: the rows beyond have position
 * -1, get zeros from the embedding and from attention, and are never written to the cache. Where a
 * value differs from one step to the next (tokens, positions, pages, counts) it is read on the
 * device, so a captured launch replays with the next step's. A row's bits depend on its own inputs
 * and on the keys and values up to its position, never on `rows`, the spans or the pages' numbers.
 *
 * The KV cache of a layer: a block of K pages and one of V pages. With D = sp_cuda_page_dim of the
 * head_dim, page p of kv head h is SP_CUDA_PAGE tokens * D elements at (p * kv_heads + h) *
 * SP_CUDA_PAGE * D, in atoms of 8 tokens by 64 dimensions (1 KiB), ordered [token / 8][dimension /
 * 64]; inside one, token t % 8 has 128 bytes and its 16-byte piece d is at d ^ (t % 8): the
 * 128-byte swizzle that ldmatrix and wgmma read. Elements from head_dim to D are zeros: whoever
 * writes a token writes them too.
 */
#ifndef SP_KERNELS_CUDA_OPS_CUDA_H
#define SP_KERNELS_CUDA_OPS_CUDA_H

#include "kernels/cuda/kernels_cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

#define SP_CUDA_PAGE        16 /* tokens */
#define SP_CUDA_OUTPUTS_MAX 4

/* The dimensions of a token in a page: head_dim itself where it is one of them. */
static inline int32_t sp_cuda_page_dim(int32_t head_dim)
{
    return head_dim <= 64 ? 64 : head_dim <= 128 ? 128 : 256;
}

/* The current step, in device memory at fixed addresses. A span is a run of consecutive positions
 * of one sequence; its rows are consecutive too, and spans follow each other without a gap. */
typedef struct sp_cuda_step {
    const int32_t *counts;   /* [2] rows and spans of the step */
    const int32_t *token;    /* [rows] */
    const int32_t *position; /* [rows]; -1: no row of the step */
    const int32_t *row_span; /* [rows]; -1 beyond the step's rows */
    const int32_t
        *span_row; /* [spans + 1] first row; entries after the last span repeat the rows */
    const int32_t *span_page; /* [spans] index in `pages` of the sequence's first page */
    const int32_t *pages;     /* page numbers of each sequence in order */
    int32_t rows, spans;      /* that are launched */
} sp_cuda_step;

/* y[row] = table[token[row]]; zeros where the position is -1. */
typedef struct sp_cuda_gather {
    sp_cuda_step step;
    const void *table; /* [vocab, width] */
    int32_t width;
    void *y; /* [rows, width] dense */
} sp_cuda_gather;

/* x += add where add is not NULL, rounded once; y = T(x / rms(x) * (weight + offset)), FP32 inside,
 * one rounding. y may be x. The order of the sum is fixed by width. */
typedef struct sp_cuda_norm {
    int32_t rows, width;
    void *x;            /* [rows, width] dense, as add and y */
    const void *add;    /* or NULL */
    const void *weight; /* [width] */
    float eps, offset;
    void *y;
} sp_cuda_norm;

/* A delta that was computed by itself (sp_cuda_expert_site.scales), for rows of a kernel's input,
 * which it adds first: T(fma(scale[row], delta, input)), bf16, where the scale is not 0. */
typedef struct sp_cuda_apart {
    const void *delta; /* dense, 16-byte aligned; NULL: none */
    const float *scale;
} sp_cuda_apart;

/* gate = T(silu(gate) * up), FP32 inside, one rounding. */
typedef struct sp_cuda_silu {
    int64_t n;  /* elements; a multiple of 8 */
    void *gate; /* 16-byte aligned, as up */
    const void *up;
    int32_t width;                      /* of a row, a multiple of 8; not read without deltas */
    sp_cuda_apart gate_delta, up_delta; /* both or none */
} sp_cuda_silu;

/* y = T(y / (1 + e^-gate)) of each head, FP32 inside, one rounding. head_dim is a multiple of 8,
 * and both start on 16 bytes. */
typedef struct sp_cuda_gate_heads {
    int32_t rows, heads, head_dim;
    const void *q_gate; /* [rows, heads][2, head_dim]: q, then gate; dense */
    void *y;            /* [rows, heads, head_dim] dense */
} sp_cuda_gate_heads;

/*
 * Norm over each head, where there is one, then rotation (rotate-half over the first 2 * n_rot
 * elements), FP32 inside, one rounding: q in place, or from q_gate; k and v into the pages of a
 * layer. A value of k or v that is not finite sets fault[span] to 1 and is stored as it is.
 * head_dim is even, 2 to 256; all but the fault and the step is 16-byte aligned. Rows without a
 * position are left alone.
 */
typedef struct sp_cuda_rope {
    sp_cuda_step step;
    int32_t q_heads, kv_heads, head_dim, n_rot;
    const void *q_gate; /* [rows, q_heads, 2, head_dim] dense, of which q is read; or NULL */
    void *q;            /* [rows, q_heads, head_dim] dense; only written with q_gate */
    const void *k, *v;  /* [rows, kv_heads, head_dim] dense */
    const void *q_norm, *k_norm; /* [head_dim], or NULL */
    float q_eps, q_offset, k_eps, k_offset;
    const float *cosine, *sine; /* [positions, n_rot]; NULL: no rotation */
    void *keys, *values;        /* of the layer */
    int32_t *fault;             /* [spans] */
} sp_cuda_rope;

typedef struct sp_cuda_attention_shape {
    int32_t q_heads, kv_heads, head_dim; /* head_dim a multiple of 8, at most 256 */
    float scale;
    int32_t rows_max, spans_max, positions_max; /* of all steps; positions of a sequence */
} sp_cuda_attention_shape;

/*
 * y = causal attention of each head of q over the pages, up to the row's own position. The order of
 * summation is stated in attention.cuh. A step is one attention_plan and then an attend_rows for
 * each layer, with the same step and scratch. `wide`: some span has more than SP_CUDA_NARROW_ROWS
 * rows, which the host knows; a launch without it must not be replayed for such a step.
 */
#define SP_CUDA_NARROW_ROWS 16
typedef struct sp_cuda_attention {
    sp_cuda_attention_shape shape;
    sp_cuda_step step;
    const void *q; /* [rows, q_heads, head_dim] dense, as y */
    void *y;
    const void *keys, *values; /* of the layer */
    void *scratch;             /* sp_cuda_attention_bytes, 256-byte aligned, zeroed once */
    int32_t wide;
} sp_cuda_attention;

/* The gated delta rule of a model. k_dim and v_dim are multiples of 8 up to SP_CUDA_RULE_DIM_MAX.
 */
#define SP_CUDA_RULE_DIM_MAX  128
#define SP_CUDA_RULE_CONV_MAX 8
#define SP_CUDA_RULE_CHUNK    32 /* positions: SP_STATE_CHUNK */
#define SP_CUDA_RULE_RING     64 /* SP_STATE_RING */
typedef struct sp_cuda_rule_shape {
    int32_t k_heads, v_heads; /* v_heads is a multiple of k_heads */
    int32_t k_dim, v_dim;     /* of a head */
    int32_t conv_width;       /* 2 .. SP_CUDA_RULE_CONV_MAX */
    int32_t fused;            /* how the inputs are ordered: sp_delta_rule_call */
} sp_cuda_rule_shape;

/* A span of the step and its state: sp_step_state. */
typedef struct sp_cuda_rule_span {
    int32_t row, n_rows; /* 0 rows: no span of the step */
    int32_t position, slot, folded, load, save, n_final;
} sp_cuda_rule_span;

/* The rows of a span in one chunk; one for each chunk that has rows of the step. */
typedef struct sp_cuda_rule_item {
    int32_t span;
    int32_t border; /* the position that the chunk begins at */
} sp_cuda_rule_item;

/*
 * The gated delta rule of a layer with its convolution and its norm (sp_op_delta_rule), for all
 * spans of the step; rows without a span are not written. The order of every sum is stated in
 * delta_rule.cuh. states, snapshots and scratch are laid out by delta_rule_layout.h. `wide`: some
 * span has more than SP_CUDA_NARROW_ROWS rows, as in sp_cuda_attention. A value that is not finite
 * and may reach earlier rows of its span sets fault[span] to 1.
 */
typedef struct sp_cuda_delta_rule {
    sp_cuda_rule_shape shape;
    int32_t rows, spans; /* that are launched */
    int32_t wide;
    const sp_cuda_rule_span *span; /* [spans] */
    const sp_cuda_rule_item *item; /* [*n_items] */
    const int32_t *n_items;
    const void *qkv, *z; /* dense; z is not read where the shape is fused */
    const float *b, *a;  /* dense; a is not read where the shape is fused */
    const void *conv;    /* [channels, conv_width] */
    const float *a_log;  /* [v_heads], as dt_bias */
    const float *dt_bias;
    const float *norm; /* [v_dim] */
    float eps;
    void *y;                  /* [rows, v_heads, v_dim] dense */
    void *states, *snapshots; /* of the layer in slot 0 and in snapshot 0, 256-byte aligned */
    int64_t state_stride, snapshot_stride; /* bytes from one to the next */
    void *scratch;  /* sp_cuda_rule_scratch_bytes of as many rows, 256-byte aligned */
    int32_t *fault; /* [spans] */
} sp_cuda_delta_rule;

/* One linear map of a group that shares x: y = x · wᵀ (+ bias), FP32 sums, one rounding. */
typedef struct sp_cuda_gemm_output {
    const void *w;    /* [n, k] dense, 16-byte aligned */
    const void *bias; /* [n], or NULL */
    void *y;          /* [rows, n], stride y_stride */
    int64_t y_stride;
    int32_t n;
    int32_t y_is_f32;
} sp_cuda_gemm_output;

/* Which kernel runs a GEMM. All have the same bits; tests and benches name one. WIDE is wgmma, and
 * cudaErrorNotSupported on GPUs without it; the forms from SHAPE_0 on are its tiles, one by one. */
#define SP_CUDA_GEMM_SHAPES 6
typedef enum sp_cuda_gemm_form {
    SP_CUDA_GEMM_CHOSEN = 0, /* by the rows and shapes */
    SP_CUDA_GEMM_FEW = 1,    /* streams the weights; at most SP_CUDA_GEMM_FEW_ROWS rows */
    SP_CUDA_GEMM_TILES = 2,  /* tiles of rows and outputs by mma.sync */
    SP_CUDA_GEMM_WIDE = 3,
    SP_CUDA_GEMM_SHAPE_0 = 4,
    SP_CUDA_GEMM_FORMS = SP_CUDA_GEMM_SHAPE_0 + SP_CUDA_GEMM_SHAPES
} sp_cuda_gemm_form;

#define SP_CUDA_GEMM_FEW_ROWS 64

/*
 * Every output is one FP32 chain of mma m16n8k16 in ascending k, from +0 (mma.sync, wgmma and every
 * cuBLASLt algorithm without split-K have these bits on sm_90), then bias, then the rounding:
 * whatever `rows` is and whichever kernel was chosen. k and x_stride are multiples of 8, x starts
 * on 16 bytes. The weights and biases are read before the predecessor on the stream is complete:
 * no kernel may write them.
 */
typedef struct sp_cuda_gemm {
    int32_t rows, k;
    const void *x; /* [rows, k], stride x_stride */
    int64_t x_stride;
    int32_t n_outputs;
    sp_cuda_gemm_output outputs[SP_CUDA_OUTPUTS_MAX];
    int32_t form; /* sp_cuda_gemm_form */
    /* 1: never by cuBLASLt, whose kernels neither begin before their predecessor has ended nor let
     * the next one begin. */
    int32_t own;
    /* Host memory. A group whose shrink, with `folds`, was the call before this one: its deltas
     * are folded into the outputs that are its sites', with the bytes of an expand after this
     * product. SP_CUDA_NOT_SUPPORTED, and nothing is enqueued, where sp_cuda_folds is false, the
     * group is not of BF16 or of other rows, a site has no output, such an output has a bias or
     * FP32, or the GPU or the strides do not allow it. NULL: none. */
    const sp_cuda_group *deltas;
} sp_cuda_gemm;

/* What base_gemm_learn found of one weight. */
typedef struct sp_cuda_gemm_report {
    int32_t n_classes; /* of rows */
    int32_t n_library; /* for which cuBLASLt is used */
    int32_t n_differ;  /* algorithms of it whose bytes differ from ours: left out unless free */
} sp_cuda_gemm_report;

/* to[i] = x[index[i]], `width` elements; index in device memory, -1: zeros. */
typedef struct sp_cuda_pick {
    int32_t rows, width;
    const int32_t *index; /* [rows] */
    const void *x;        /* stride x_stride */
    int64_t x_stride;
    void *to; /* [rows, width] dense */
} sp_cuda_pick;

/* Bytes of scratch for the greedy choice of so many rows. */
#define SP_CUDA_GREEDY_ROW_BYTES 16
static inline size_t sp_cuda_greedy_bytes(int32_t rows)
{
    return (size_t)rows * SP_CUDA_GREEDY_ROW_BYTES;
}

/* The id of the largest logit, the lower of equal ones: as sp_sample_greedy; -1 where `bad` is not
 * -1. At most 65535 rows. */
typedef struct sp_cuda_greedy {
    int32_t rows, vocab;
    const float *logits; /* stride stride */
    int64_t stride;
    int32_t *token; /* [rows] */
    int32_t *bad;   /* [rows] the first id whose logit is NaN or +inf, -1: none; -2: all are -inf */
    void *scratch;  /* sp_cuda_greedy_bytes(rows), zeroed once */
} sp_cuda_greedy;

/*
 * A token for each row as sp_sample, sp_ends_forbid, sp_penalties_apply and sp_token_mask_apply
 * define it, and what its logprob takes, in one launch. choose_rules.h has the numbers, which the
 * host may compute too: weights have the bits of the CPU's scalar level, sums are exact. Logprobs
 * are of the logits before the changes, and the same whether the token was chosen or given: the
 * host gives `best` and sp_choose_sum of `mass` to sp_logprob_of.
 */
#define SP_CUDA_CHANGE_BIAS    (-1)
#define SP_CUDA_CHANGE_FORBIDS (-2)
#define SP_CUDA_SAMPLE_CHOOSES (-1)
#define SP_CUDA_SAMPLE_NO_ROW  (-2)
#define SP_CUDA_SAMPLE_TOP_MAX 32

/* One token whose logit is changed; each once in a row's list. */
typedef struct sp_cuda_sample_change {
    int32_t token;
    int32_t count; /* in the output; 0: in the prompt alone; SP_CUDA_CHANGE_BIAS, _FORBIDS */
    float bias;    /* added first; 0: none */
} sp_cuda_sample_change;

typedef struct sp_cuda_sample_row {
    uint64_t random; /* 64 bits of the position's number: sp_sample_uniform's in the upper 53 */
    double top_p;    /* 1: all */
    float inverse;   /* 1 / temperature; 0: the best token */
    float min_p;
    int32_t top_k; /* 0: all */
    float repetition, frequency, presence;
    int32_t first_change, n_changes; /* in `changes` */
    int32_t given;                   /* a token to score, SP_CUDA_SAMPLE_CHOOSES or _NO_ROW */
    int32_t n_top;                   /* best ids to tell; -1: no logprob either, and mass is 0 */
    int32_t mask; /* 1 and up: the number of its mask in `masks`; 0: all ids may be chosen */
} sp_cuda_sample_row;

typedef struct sp_cuda_sample_result {
    uint64_t mass; /* of all logits, in units of 2^-45 of the best one's */
    float best;    /* logit */
    float logit;   /* of the token */
    int32_t token; /* -1 where `bad` is not -1 */
    int32_t bad;   /* as in sp_cuda_greedy */
} sp_cuda_sample_result;

typedef struct sp_cuda_sample {
    int32_t rows, vocab; /* vocab at most SP_CUDA_SAMPLE_VOCAB_MAX, n_top too */
    const float *logits; /* stride stride */
    int64_t stride;
    const sp_cuda_sample_row *row; /* [rows] */
    const sp_cuda_sample_change *changes;
    const uint32_t *masks;         /* of (vocab + 31) / 32 words each: a bit for each id */
    sp_cuda_sample_result *result; /* [rows] */
    int32_t *top_token;            /* [rows, SP_CUDA_SAMPLE_TOP_MAX], best first */
    float *top_logit;              /* the same */
} sp_cuda_sample;

#define SP_CUDA_SAMPLE_VOCAB_MAX 400000

/*
 * The choice of experts: the top_k largest logits of each row, descending, ties by ascending
 * number, a NaN above all. An expert's weight is e^(logit - best) over the sum of those of all
 * experts, or with `normalised` of the chosen ones, in their order, FP32. A row without a position
 * has the expert -1 and the weight 0.
 */
#define SP_CUDA_TOP_MAX 32
typedef struct sp_cuda_route {
    int32_t rows, experts, top_k; /* 1 <= top_k <= experts, SP_CUDA_TOP_MAX */
    int32_t normalised;
    const float *logits; /* [rows, experts], stride stride */
    int64_t stride;
    const int32_t *position; /* [rows], or NULL: all have one */
    int32_t *expert;         /* [rows, top_k], as weight */
    float *weight;
} sp_cuda_route;

/* One linear map of the experts: y[row] = x[row] · w[expert]ᵀ. */
typedef struct sp_cuda_expert_output {
    const void *const *w; /* [experts] -> [n, k] dense, 16-byte aligned */
    void *y;              /* row of the items, stride y_stride */
    int64_t y_stride;
    int32_t n;
} sp_cuda_expert_output;

/*
 * Maps of each row by its own expert, for up to two maps that share x, by the order of sp_cuda_gemm
 * and with its bits, whatever the number of rows that the expert has. Rows without an item are not
 * written. items: of one slot, with sp_cuda_expert_rows rows or any other number that it may give.
 */
#define SP_CUDA_EXPERT_OUTPUTS_MAX 2
typedef struct sp_cuda_expert_gemm {
    int32_t k;          /* a multiple of 8, as x_stride */
    int32_t x_by_token; /* row t of x is token t's, else row i is row i's */
    const void *x;      /* 16-byte aligned */
    int64_t x_stride;
    sp_cuda_items items;
    int32_t n_outputs;
    sp_cuda_expert_output outputs[SP_CUDA_EXPERT_OUTPUTS_MAX];
} sp_cuda_expert_gemm;

/* The rows of an item that suits so many rows (pairs) of so many experts: 16, 32, 64 or 192. */
#define SP_CUDA_EXPERT_ROWS_MAX 192
static inline int32_t sp_cuda_expert_rows(int64_t n_rows, int32_t n_experts)
{
    int64_t each = n_rows / n_experts;

    return each <= 8 ? 16 : each <= 20 ? 32 : each <= 48 ? 64 : SP_CUDA_EXPERT_ROWS_MAX;
}

/* y[row] = T(Σ weight[row, k] * x[row * top_k + k]), fused steps from +0 in ascending k; experts of
 * -1 are left out. */
typedef struct sp_cuda_expert_sum {
    int32_t rows, top_k, width;
    const int32_t *expert; /* [rows, top_k], as weight */
    const float *weight;
    const void *x;       /* [rows * top_k, width] dense */
    void *y;             /* [rows, width] dense */
    sp_cuda_apart delta; /* of x; width is a multiple of 8 then, and x and y start on 16 bytes */
} sp_cuda_expert_sum;

/* y = T(fma(1 / (1 + e^-gate), x, y)), a gate for each row. */
typedef struct sp_cuda_add_gated {
    int32_t rows, width;
    const float *gate; /* [rows], stride gate_stride */
    int64_t gate_stride;
    const void *x; /* [rows, width] dense, as y */
    void *y;
} sp_cuda_add_gated;

/*
 * name, arguments. All return a cudaError_t as int.
 *
 * base_gemm_open: what the GEMMs of one GPU need to know, in host memory.
 * base_gemm_library: opens cuBLASLt for them: `path` (host text), or NULL for libcublasLt.so.13 or
 * .12 of the loader; *out_found is 0 where there is none. It is used where base_gemm_learn says so.
 * base_gemm_learn: tries it on a weight, whose values are read, for all classes of rows up to
 * rows_max; where its bytes are ours and it is faster it will be used. Allocates, waits; x and y of
 * `like` are not used.
 * base_gemm_free: from here on base_gemm_learn takes any algorithm that is faster, split-K too,
 * whatever its bytes: a row's bits then depend on the rows beside it, and GEMMs share a workspace,
 * so they must follow each other on one stream.
 * All three before the launches that they are for: base_gemm only reads the state, so threads and
 * streams may share it then. attention_bytes only computes. sample_rows:
 * SP_CUDA_NOT_SUPPORTED where the GPU has no clusters or too little shared memory; with 0 rows it
 * says only that.
 */
#define SP_CUDA_NOT_SUPPORTED 801 /* cudaErrorNotSupported */
#define SP_CUDA_OPS_LIST(X)                                                                \
    X(attention_bytes, (int gpu, const sp_cuda_attention_shape *shape, size_t *out_bytes)) \
    X(attention_plan, (int gpu, const sp_cuda_attention *attention, void *stream))         \
    X(attend_rows, (int gpu, const sp_cuda_attention *attention, void *stream))            \
    X(gather_rows, (int gpu, const sp_cuda_gather *gather, void *stream))                  \
    X(norm_rows, (int gpu, const sp_cuda_norm *norm, void *stream))                        \
    X(silu_mul, (int gpu, const sp_cuda_silu *silu, void *stream))                         \
    X(rope_rows, (int gpu, const sp_cuda_rope *rope, void *stream))                        \
    X(gate_head_rows, (int gpu, const sp_cuda_gate_heads *gate, void *stream))             \
    X(delta_rule_rows, (int gpu, const sp_cuda_delta_rule *rule, void *stream))            \
    X(pick_rows, (int gpu, const sp_cuda_pick *pick, void *stream))                        \
    X(greedy_rows, (int gpu, const sp_cuda_greedy *greedy, void *stream))                  \
    X(sample_rows, (int gpu, const sp_cuda_sample *sample, void *stream))                  \
    X(route_rows, (int gpu, const sp_cuda_route *route, void *stream))                     \
    X(multiply_experts, (int gpu, const sp_cuda_expert_gemm *gemm, void *stream))          \
    X(sum_experts, (int gpu, const sp_cuda_expert_sum *sum, void *stream))                 \
    X(add_gated_rows, (int gpu, const sp_cuda_add_gated *gated, void *stream))             \
    X(base_gemm_open, (int gpu, void **out_state))                                         \
    X(base_gemm_library, (int gpu, void *state, const char *path, int *out_found))         \
    X(base_gemm_free, (int gpu, void *state))                                              \
    X(base_gemm_learn, (int gpu, void *state, const sp_cuda_gemm *like, int32_t rows_max,  \
                        sp_cuda_gemm_report *out_report))                                  \
    X(base_gemm_close, (int gpu, void *state))                                             \
    X(base_gemm, (int gpu, const void *state, const sp_cuda_gemm *gemm, void *stream))

typedef struct sp_cuda_ops_kernels {
#define SP_CUDA_MEMBER(name, arguments) int(*name) arguments;
    SP_CUDA_OPS_LIST(SP_CUDA_MEMBER)
#undef SP_CUDA_MEMBER
} sp_cuda_ops_kernels;

/* Resolves them like sp_kernels_cuda_get, which is called first: it prepares the GPU. */
SP_PRIVATE sp_status sp_ops_cuda_get(sp_device *device, sp_cuda_ops_kernels *out_kernels,
                                     sp_error *error);

#ifdef __cplusplus
}
#endif
#endif
