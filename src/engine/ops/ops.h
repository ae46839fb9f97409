/*
 * ops.h: the operations on the rows of a step, as a backend's table of functions. A family's
 * forward pass is written in these and names activations and weights, never threads, streams or
 * memory of the host: so the same code runs on every backend, eagerly or during graph capture.
 *
 * A backend owns its scratch, streams, the KV cache, the placed weights, the logits and the choice
 * of tokens. It must not know families, requests or schedules.
 *
 * Every op computes each row independently, or splits work in a way that changes no bit: a row's
 * result depends on its own sequence, adapter and position alone. With T (options.type) BF16
 * activations are bf16; norms, RoPE, softmax and SiLU are FP32 inside with one rounding at the end;
 * logits are FP32. With F32 nothing is rounded but to FP32.
 *
 * The first failure of an op is kept: the ops after it do nothing, and sp_op_step returns it. One
 * thread at a time calls the ops of one backend; after sp_op_step has returned they may be called
 * for its rows (logits, choose) until the next. No op allocates host memory.
 */
#ifndef SP_ENGINE_OPS_OPS_H
#define SP_ENGINE_OPS_OPS_H

#include "engine/ops/weight.h"
#include "engine/sampling/ends.h"
#include "engine/sampling/penalties.h"
#include "engine/sampling/sampler.h"
#include "engine/sampling/token_mask.h"

#include <sidepath/checkpoint.h>
#include <sidepath/delta.h>

/* The most rows whose logits are computed at a time, on any backend; ops.window is the backend's
 * own number, which bounds its logits buffer. */
#define SP_LOGIT_ROWS_MAX 128
/* Activations of a family, and linear maps in one group. */
#define SP_ROWS_MAX   24
#define SP_LINEAR_MAX 4

typedef struct sp_ops sp_ops;
typedef struct sp_op_table sp_op_table;

/* An activation: an index that the family chose, below options.n_widths. It is [rows of the step,
 * widths[index]] elements of T, or FP32 where options.fp32_rows says so, and keeps its values until
 * the next step. */
typedef int32_t sp_rows;
#define SP_ROWS_BIT(rows) ((uint32_t)1 << (rows))

/* ---- set-up -------------------------------------------------------------------------------- */

typedef struct sp_attention_shape {
    int32_t layers; /* that have keys and values */
    int32_t q_heads, kv_heads, head_dim;
    float scale; /* of q · k */
} sp_attention_shape;

typedef struct sp_rope_shape {
    double theta;
    sp_rope_scaling scaling;
    int32_t n_rot;     /* pairs per head: half of the rotated width */
    int32_t positions; /* all positions are below it */
} sp_rope_shape;

/* Of the layers that have experts; all 0 where none has. */
typedef struct sp_moe_shape {
    int32_t experts, per_token; /* 1 <= per_token <= experts */
    int32_t inner;              /* outputs of an expert's gate and up */
    int32_t window_rows;        /* rows whose experts are computed at a time: bounds the scratch and
                                   changes no bit */
    int32_t layers;             /* that have experts: calls of route in a pass, at most */
} sp_moe_shape;

/* Positions of a chunk of the gated delta rule: its borders are at the multiples of it. */
#define SP_STATE_CHUNK 32
/* Last rows of a sequence that a state keeps beside the state of a border; a power of two, so that
 * row p is in place p % SP_STATE_RING. An open chunk, the row after it and as many drafts as a step
 * may have fit in. */
#define SP_STATE_RING 64

/*
 * Of the layers with a gated delta rule; all 0 where none has. Each value head has a state S
 * [k_dim, v_dim] and uses the q and k of key head `head / (v_heads / k_heads)`.
 *
 * A state slot holds, for each layer, S as it was at one border, `folded`; and of the rows after
 * it, in the ring, k and u (below), the sums of g since the border of their chunk, and what the
 * convolution read. So no row changes S: the rows of an open chunk are added to it at once, when
 * all of them are committed ("folded"), and what was not committed is overwritten in the ring.
 */
typedef struct sp_delta_rule_shape {
    int32_t layers;
    int32_t k_heads, v_heads; /* v_heads is a multiple of k_heads */
    int32_t k_dim, v_dim;     /* of a head */
    int32_t conv_width;       /* 2 .. 8 rows that the convolution reads, the last its own */
    bool fused_inputs;        /* sp_delta_rule_call */
    int32_t slots, snapshots; /* of states, and of kept ones at page borders */
} sp_delta_rule_shape;

/* All objects are borrowed for the backend's life, the arrays until it has been created. */
typedef struct sp_ops_options {
    sp_device *device;
    const sp_kernels *kernels; /* of the host */
    sp_exec *exec;
    sp_delta *delta;      /* NULL: the base alone */
    sp_delta *head_delta; /* over the same pool, of SP_LOGIT_ROWS_MAX rows, for the plan of the
                             logits; on a GPU alone */
    int32_t slots;        /* of the delta's pool */
    sp_dtype type;        /* T */
    int32_t rows_max, spans_max; /* of a step */
    int32_t hidden, vocab;
    const int32_t *widths; /* [n_widths] of the activations; 1 .. SP_ROWS_MAX of them */
    int32_t n_widths;
    uint32_t fp32_rows; /* SP_ROWS_BIT of the activations that are FP32 whatever T is: the outputs
                           of linear maps that route and add_gated read */
    sp_attention_shape attention;
    sp_moe_shape moe;
    sp_delta_rule_shape delta_rule;
    sp_rope_shape rope;
    int32_t kv_pages, page_tokens;
    bool kv_resident; /* all pages are touched at creation, else when they are used */
    bool eager;       /* no step is captured */
    bool free_gemm;   /* the base's GEMMs may sum in another order for another number of rows */
} sp_ops_options;

struct sp_ops {
    const sp_op_table *table;
    sp_status status;               /* the first failure of the current step */
    int32_t window;                 /* rows of a call of sp_op_logits: 1 .. SP_LOGIT_ROWS_MAX */
    uint64_t captures;              /* passes that were captured as graphs */
    size_t scratch_bytes, kv_bytes; /* allocated */
    size_t state_bytes;             /* allocated for states and snapshots */
    double delta_seconds;           /* sum over the deltas that ran apart from the base's GEMMs */
};

/* ---- a step -------------------------------------------------------------------------------- */

/*
 * The recurrent state of a sequence in a step; not read where no layer has one. Before its rows,
 * the state is made the zeros of position 0, or read from a snapshot; then every chunk that ends at
 * or before the span's position is folded, and with `save` the result is kept (the position is a
 * border then, and the state has no rows after it). The chunks that end within the next n_final
 * rows are folded as well. A row after that border, which a draft alone can be, is computed as if
 * its chunk had been folded, but the slot's S is as it was.
 */
typedef struct sp_step_state {
    int32_t slot;
    int32_t folded;  /* the border that the slot's S is at; with a position of 0 it is 0 */
    int32_t load;    /* a snapshot at the span's position, which becomes the slot's; -1: none */
    int32_t save;    /* the snapshot to write; -1: none */
    int32_t n_final; /* first rows that will be committed whatever the step chooses; 0: none */
} sp_step_state;

/* n_rows consecutive positions of one sequence. */
typedef struct sp_step_span {
    const int32_t *tokens; /* [n_rows] */
    const int32_t *pages;  /* of the sequence in order, up to that of the last row */
    int32_t position, n_rows;
    sp_step_state state;
} sp_step_span;

/* The border that the slot's S is at after the span's step. */
static inline int32_t sp_step_state_folded(const sp_step_span *span)
{
    return (span->position + span->state.n_final) / SP_STATE_CHUNK * SP_STATE_CHUNK;
}

/* Rows are numbered across the spans. Borrowed until the next step. */
typedef struct sp_step {
    const sp_step_span *spans;
    int32_t n_spans, n_rows;
    const sp_plan *plan; /* of the same rows; not read without a delta */
    bool routing;        /* sp_op_read_routing will be called */
} sp_step;

/* The experts that the rows of a step chose, in host memory. */
typedef struct sp_routing {
    const int32_t *expert; /* [moe.layers, rows, moe.per_token], a layer for each call of route */
    int32_t rows;          /* those of the step come first, pads may follow */
} sp_routing;

/* A forward pass: calls ops for the rows of the step. Its control flow does not depend on the
 * step's content, so that its launches can be captured once and replayed. */
typedef void (*sp_pass_fn)(void *user, sp_ops *ops);

/* ---- arguments ----------------------------------------------------------------------------- */

typedef struct sp_projection {
    const sp_linear *linear;
    sp_rows y;
} sp_projection;

typedef struct sp_rope_call {
    sp_rows q, k, v;                /* [q_heads, head_dim] and twice [kv_heads, head_dim] a row */
    bool gated;                     /* q is written only, and read from */
    sp_rows q_gate;                 /* [q_heads][q: head_dim][gate: head_dim] */
    const sp_norm *q_norm, *k_norm; /* over each head, before the rotation; NULL: none */
    bool unrotated;                 /* q and k are not rotated; such a layer has no norms */
    int32_t layer;                  /* of the cache: 0 .. attention.layers - 1 */
} sp_rope_call;

/* The weights of a gated delta rule. C channels: those of q, k and v. */
typedef struct sp_delta_rule {
    sp_weight conv;           /* [C, conv_width] BF16; the last column is the row's own */
    sp_weight a_log, dt_bias; /* [v_heads] FP32 */
    sp_norm norm;             /* [v_dim] FP32; its offset is 0 */
} sp_delta_rule;

/*
 * The inputs are outputs of linear maps of one group. K = k_heads * k_dim, V = v_heads * v_dim, and
 * n = v_heads / k_heads. Without fused_inputs: qkv is [q: K][k: K][v: V], and z [V]. With it: qkv
 * has for each key head [q: k_dim][k: k_dim][v: n * v_dim][z: n * v_dim], b for each key head [b:
 * n] [a: n], and z and a are not read. The channels of the convolution are those of q, k and v,
 * each in order of heads, in both forms.
 */
typedef struct sp_delta_rule_call {
    sp_rows qkv, z; /* of T */
    sp_rows b, a;   /* [v_heads] each, FP32; with fused_inputs b is [2 * v_heads] */
    const sp_delta_rule *rule;
    int32_t layer; /* 0 .. delta_rule.layers - 1 */
    sp_rows y;     /* [V] of T */
} sp_delta_rule_call;

/* The parameters and the result of one row's choice. Pointers are borrowed during the call. */
typedef struct sp_choice {
    const sp_sample_params *sampling; /* NULL: no token for this row */
    const sp_penalties *penalties;
    const sp_ends *ends;
    const int32_t *tokens; /* [n_tokens] the first n_prompt are the prompt */
    int32_t n_prompt, n_tokens;
    bool adjusted;        /* bias, penalties or a mask change the logits */
    const uint32_t *mask; /* a bit for each id that may be chosen; NULL: all may */
    int32_t given;        /* without sampling: the token that will be scored; -1: none */
    int32_t n_top; /* best ids beside the score of the token, chosen or given; -1: no score */
    sp_status constrained; /* the engine's: why there can be no mask; such a row has no sampling */
    sp_status status;      /* out: SP_OK, or why there is no token, as sp_sample returns it */
    int32_t token;         /* out */
} sp_choice;

/* ---- the table ----------------------------------------------------------------------------- */

struct sp_op_table {
    size_t (*scratch_bytes)(const sp_ops_options *options);
    size_t (*kv_token_bytes)(const sp_attention_shape *shape, sp_dtype type);
    size_t (*state_bytes)(const sp_delta_rule_shape *shape, sp_dtype type);
    size_t (*snapshot_bytes)(const sp_delta_rule_shape *shape, sp_dtype type);
    sp_status (*create)(const sp_ops_options *options, sp_ops **out_ops, sp_error *error);
    void (*destroy)(sp_ops *ops);
    sp_status (*place)(sp_ops *ops, sp_weight *weight, sp_error *error);
    sp_status (*prepare)(sp_ops *ops, sp_pass_fn pass, void *user, const sp_weight *head);
    sp_status (*step)(sp_ops *ops, const sp_step *step, sp_pass_fn pass, void *user);

    sp_status (*embed)(sp_ops *ops, const sp_weight *table, sp_rows y);
    sp_status (*norm)(sp_ops *ops, sp_rows x, const sp_norm *norm, sp_rows y);
    sp_status (*add_norm)(sp_ops *ops, sp_rows sum, sp_rows x, const sp_norm *norm, sp_rows y);
    sp_status (*linear)(sp_ops *ops, sp_rows x, const sp_projection *projections, int32_t n);
    sp_status (*rope_and_cache)(sp_ops *ops, const sp_rope_call *call);
    sp_status (*attention)(sp_ops *ops, sp_rows q, int32_t layer, sp_rows y);
    sp_status (*gate_heads)(sp_ops *ops, sp_rows y, sp_rows q_gate);
    sp_status (*delta_rule)(sp_ops *ops, const sp_delta_rule_call *call);
    sp_status (*silu_mul)(sp_ops *ops, sp_rows gate, sp_rows up);
    sp_status (*route)(sp_ops *ops, sp_rows logits, bool normalised);
    sp_status (*experts)(sp_ops *ops, sp_rows x, const sp_experts *experts, sp_rows y);
    sp_status (*add_gated)(sp_ops *ops, sp_rows y, sp_rows x, sp_rows gate);

    sp_status (*faults)(sp_ops *ops, bool *out_faults, int32_t n_spans);
    sp_status (*read_routing)(sp_ops *ops, sp_routing *out_routing);
    sp_status (*logits)(sp_ops *ops, sp_rows x, const sp_weight *head, const int32_t *rows,
                        int32_t n_rows);
    void (*choose)(sp_ops *ops, sp_choice *choices, int32_t n);
    sp_status (*score)(sp_ops *ops, int32_t index, int32_t token, int32_t n_top, float *out_logprob,
                       sp_logprob *out_top);
    const float *(*read_logits)(sp_ops *ops, int32_t index);
};

extern const sp_op_table sp_cpu_op_table, sp_cuda_op_table;

/* ---- life ---------------------------------------------------------------------------------- */

/* Bytes that sp_ops_create allocates beside the KV cache and the rotary tables; device, delta and
 * the sizes of the cache may still be unset (NULL and 0). Any thread. */
static inline size_t sp_ops_scratch_bytes(const sp_op_table *table, const sp_ops_options *options)
{
    return table->scratch_bytes(options);
}

/* Bytes of one token's keys and values in all layers that have them. Any thread. */
static inline size_t sp_ops_kv_token_bytes(const sp_op_table *table,
                                           const sp_attention_shape *shape, sp_dtype type)
{
    return table->kv_token_bytes(shape, type);
}

/* Bytes of one state slot, and of one snapshot, of all layers together. Any thread. */
static inline size_t sp_ops_state_bytes(const sp_op_table *table, const sp_delta_rule_shape *shape,
                                        sp_dtype type)
{
    return shape->layers > 0 ? table->state_bytes(shape, type) : 0;
}

static inline size_t sp_ops_snapshot_bytes(const sp_op_table *table,
                                           const sp_delta_rule_shape *shape, sp_dtype type)
{
    return shape->layers > 0 ? table->snapshot_bytes(shape, type) : 0;
}

/* *out_ops is owned by the caller (sp_ops_destroy). SP_ERR_MEMORY names the setting to lower as
 * subject. */
static inline sp_status sp_ops_create(const sp_op_table *table, const sp_ops_options *options,
                                      sp_ops **out_ops, sp_error *error)
{
    return table->create(options, out_ops, error);
}

static inline void sp_ops_destroy(sp_ops *ops) /* NULL is allowed */
{
    if (ops)
        ops->table->destroy(ops);
}

/* Places a weight in memory that the backend reads: sets weight->placed. Nothing where weight->host
 * is NULL. The backend owns what it placed until it is destroyed; the model's bytes are borrowed as
 * long. SP_ERR_MEMORY. */
static inline sp_status sp_op_place(sp_ops *ops, sp_weight *weight, sp_error *error)
{
    return weight->host ? ops->table->place(ops, weight, error) : SP_OK;
}

/* Lets the backend look at the pass and the head, all of whose weights are placed, and choose how
 * it will compute them. Nothing is computed. SP_ERR_DEVICE. */
static inline sp_status sp_op_prepare(sp_ops *ops, sp_pass_fn pass, void *user,
                                      const sp_weight *head)
{
    ops->status = SP_OK;
    return ops->table->prepare ? ops->table->prepare(ops, pass, user, head) : SP_OK;
}

/* ---- ops ----------------------------------------------------------------------------------- */

#define SP_OP(ops, call)                        \
    do {                                        \
        if ((ops)->status == SP_OK)             \
            (ops)->status = (ops)->table->call; \
    } while (0)

/* Runs the pass over the rows of the step, or replays its captured graph. Engine thread. Returns
 * the first failure of its ops: what sp_delta_apply returns, which a checked plan rules out; a
 * device's error. */
static inline sp_status sp_op_step(sp_ops *ops, const sp_step *step, sp_pass_fn pass, void *user)
{
    ops->status = SP_OK;
    SP_OP(ops, step(ops, step, pass, user));
    return ops->status;
}

/* y = the rows of `table` [vocab, width] at the tokens, or the adapters' replacements. */
static inline void sp_op_embed(sp_ops *ops, const sp_weight *table, sp_rows y)
{
    SP_OP(ops, embed(ops, table, y));
}

/* y = norm(x); y may be x. */
static inline void sp_op_norm(sp_ops *ops, sp_rows x, const sp_norm *norm, sp_rows y)
{
    SP_OP(ops, norm(ops, x, norm, y));
}

/* sum += x; y = norm(sum). */
static inline void sp_op_add_norm(sp_ops *ops, sp_rows sum, sp_rows x, const sp_norm *norm,
                                  sp_rows y)
{
    SP_OP(ops, add_norm(ops, sum, x, norm, y));
}

/* n linear maps, 1 .. SP_LINEAR_MAX, that share x, with the side paths of the rows' adapters. Every
 * y is an activation of its own, and not x; x is of T. */
static inline void sp_op_linear(sp_ops *ops, sp_rows x, const sp_projection *projections, int32_t n)
{
    SP_OP(ops, linear(ops, x, projections, n));
}

/* q = rope(norm(q)), k = rope(norm(k)); k and v are written to the cache at each row's position. A
 * call may omit the norms, or norms and rotation. */
static inline void sp_op_rope_and_cache(sp_ops *ops, const sp_rope_call *call)
{
    SP_OP(ops, rope_and_cache(ops, call));
}

/* y = causal attention of each head of q over the cache, up to the row's own position. */
static inline void sp_op_attention(sp_ops *ops, sp_rows q, int32_t layer, sp_rows y)
{
    SP_OP(ops, attention(ops, q, layer, y));
}

/* y [q_heads, head_dim] *= sigmoid(gate) of the same head, with one rounding. */
static inline void sp_op_gate_heads(sp_ops *ops, sp_rows y, sp_rows q_gate)
{
    SP_OP(ops, gate_heads(ops, y, q_gate));
}

/*
 * The gated delta rule of a layer, with its causal convolution before and its gated norm after it.
 * For each row and value head, in FP32:
 *
 *     q, k, v = silu(conv(qkv)), rounded to T; q and k are then divided by their norms
 *               (x / sqrt(Σ x² + 1e-6)) and rounded to T
 *     beta    = sigmoid(b)
 *     g       = -exp(a_log) * softplus(a + dt_bias)
 *     G_i     = g summed from the border of row i's chunk, in ascending order
 *     u_i     = beta_i * (v_i - exp(G_i) * Sᵀk_i - Σ_{j<i} exp(G_i - G_j) * (k_i · k_j) * u_j)
 *     o_i     = k_dim^-½ * (exp(G_i) * Sᵀq_i + Σ_{j<=i} exp(G_i - G_j) * (q_i · k_j) * u_j)
 *     y_i     = norm(o_i) * silu(z_i), rounded to T
 *     fold:   S = exp(G_last) * S + Σ_j exp(G_last - G_j) * k_j u_jᵀ
 *
 * where S is the state at the border of the row's chunk and j are the chunk's rows. This is the
 * recurrence S = exp(g) S + k uᵀ, summed by chunks whose borders are at absolute positions: so a
 * row's bits do not depend on how its sequence was cut into steps.
 */
static inline void sp_op_delta_rule(sp_ops *ops, const sp_delta_rule_call *call)
{
    SP_OP(ops, delta_rule(ops, call));
}

/* gate = silu(gate) * up. */
static inline void sp_op_silu_mul(sp_ops *ops, sp_rows gate, sp_rows up)
{
    SP_OP(ops, silu_mul(ops, gate, up));
}

/*
 * Chooses moe.per_token experts for each row from its router's logits [experts], FP32, which are
 * used up: the largest, in descending order, ties by ascending number; a NaN is larger than any
 * number, so that its row fails instead of going elsewhere. An expert's weight is its softmax over
 * all experts, or with `normalised` over the chosen ones. The weights stay with the backend until
 * the next route, the choice until the next step.
 */
static inline void sp_op_route(sp_ops *ops, sp_rows logits, bool normalised)
{
    SP_OP(ops, route(ops, logits, normalised));
}

/* y = Σ weight_j * e_j(x) over the row's experts in the order of their choice, in FP32 by one fused
 * step each from +0, with one rounding at the end. Sites of experts have their side paths: gate's
 * and up's before the activation, down's before the sum. What an expert computes for a row does not
 * depend on its other rows. x and y are of T and not the same. */
static inline void sp_op_experts(sp_ops *ops, sp_rows x, const sp_experts *experts, sp_rows y)
{
    SP_OP(ops, experts(ops, x, experts, y));
}

/* y += sigmoid(gate) * x, by one fused step with one rounding; gate is FP32 [1]. */
static inline void sp_op_add_gated(sp_ops *ops, sp_rows y, sp_rows x, sp_rows gate)
{
    SP_OP(ops, add_gated(ops, y, x, gate));
}

/* ---- after the pass ------------------------------------------------------------------------ */

/* Whether keys or values of each of the n_spans spans of the last step are not finite, so that they
 * may have reached other rows of their span, and must not be kept. A backend in which they reach
 * later rows alone says no. Waits for the step. Fails like sp_op_step. */
static inline sp_status sp_op_faults(sp_ops *ops, bool *out_faults, int32_t n_spans)
{
    SP_OP(ops, faults(ops, out_faults, n_spans));
    return ops->status;
}

/* The experts that the rows of the last step were routed to; borrowed until the next step, which
 * said `routing`. Waits for the step. Fails like sp_op_step. */
static inline sp_status sp_op_read_routing(sp_ops *ops, sp_routing *out_routing)
{
    SP_OP(ops, read_routing(ops, out_routing));
    return ops->status;
}

/* The logits of n_rows, 1 .. ops->window, rows of the last step, by row number: head [vocab,
 * hidden] times x of each, with their adapters' deltas and replaced rows. They are kept until the
 * next call; the three functions below take a row's index in `rows`. Fails like sp_op_step. */
static inline sp_status sp_op_logits(sp_ops *ops, sp_rows x, const sp_weight *head,
                                     const int32_t *rows, int32_t n_rows)
{
    ops->status = SP_OK;
    SP_OP(ops, logits(ops, x, head, rows, n_rows));
    return ops->status;
}

/* Chooses a token for each of the first n rows of the window whose choice has sampling; n = 0 does
 * nothing. Failures are each choice's status. A backend may work out the scores that the choices
 * announce at the same time; others cost a wait each. */
static inline void sp_op_choose(sp_ops *ops, sp_choice *choices, int32_t n)
{
    ops->table->choose(ops, choices, n);
}

/* The logprob of a token and the n_top (0 or more) best into out_top [n_top], as sp_logprobs, of
 * the logits without bias and penalties. */
static inline sp_status sp_op_score(sp_ops *ops, int32_t index, int32_t token, int32_t n_top,
                                    float *out_logprob, sp_logprob *out_top)
{
    return ops->table->score(ops, index, token, n_top, out_logprob, out_top);
}

/* The row's logits [vocab] in host memory; borrowed until the next call of this backend. */
static inline const float *sp_op_read_logits(sp_ops *ops, int32_t index)
{
    return ops->table->read_logits(ops, index);
}

#undef SP_OP

#endif
