/*
 * cpu_ops.h: the backend of ops on the CPU: the memory of all activations, which is allocated once
 * for rows_max rows, and the current step. cpu_ops.c creates it and prepares a step; cpu_rows.c,
 * cpu_linear.c, cpu_attention.c, cpu_delta_rule.c, cpu_experts.c and cpu_logits.c are the ops. The
 * thread that calls the ops owns it; tasks on the executor's threads read it and write only their
 * own parts.
 */
#ifndef SP_ENGINE_OPS_CPU_OPS_H
#define SP_ENGINE_OPS_CPU_OPS_H

#include "engine/ops/host_choice.h"
#include "engine/ops/kv_cache.h"
#include "engine/ops/ops.h"
#include "engine/ops/rope.h"
#include "kernels/cpu/kernels.h"

#include <stdatomic.h>

/* A run of at most SP_ATTENTION_ROWS consecutive rows of one sequence: the unit of attention. */
#define SP_ATTENTION_ROWS 32
typedef struct sp_attention_item {
    int32_t row, n_rows, first_position;
    const int32_t *pages;
} sp_attention_item;

/* Rows whose logits are computed at a time. */
#define SP_CPU_WINDOW 32

/* The experts' own memory (cpu_experts.c); all NULL without experts. */
typedef struct sp_cpu_experts {
    sp_moe_shape shape;
    int32_t *choices; /* [layers, rows of the step, per_token]; memory for rows_max rows */
    int32_t *choice;  /* [rows of the step, per_token] of the layer that was routed last: experts
                         of each row, in descending order of its logits */
    int32_t n_routed; /* layers of the step that were routed */
    float *weight;    /* [rows_max, per_token], of the same layer */

    /* Of one window: its pairs sorted by expert. */
    int32_t *begin;     /* [experts + 1] pairs of expert e: begin[e] .. begin[e + 1] - 1 */
    int32_t *row_pair;  /* [pairs] row of the step * per_token + rank */
    int32_t *row_token; /* [pairs] row of the step */
    int32_t *place;     /* [rows of the window, per_token] where each pair went */
    int32_t *active;    /* [n_active] experts that have pairs, ascending */
    int32_t n_active;
    void *gate, *up; /* [pairs, inner] of T */
    void *down;      /* [pairs, hidden] of T */
    void *packed;
    size_t packed_bytes;
    sp_gemm_args *gemms;  /* [2 * n_active] */
    int32_t *first_piece; /* [n_active] of the current job */
} sp_cpu_experts;

/*
 * The states of recurrent layers (cpu_states.c), and a step's rows on their way through the gated
 * delta rule (cpu_delta_rule.c); all 0 and NULL without such layers.
 *
 * A slot has a part for each layer, and a layer a part for each head: S [k_dim, n] FP32, where n is
 * v_dim rounded up to a multiple of 16 whose last columns are zero, and the rings of the last
 * SP_STATE_RING rows: u [ring, n] and G [ring], FP32, of each value head; k [ring, k_dim] of T of
 * each key head; and the convolution's inputs [ring, channels] of T. A snapshot has S, and inputs
 * [conv_width - 1, channels].
 */
typedef struct sp_cpu_states {
    sp_delta_rule_shape shape;
    int32_t channels, n; /* of the convolution; columns of S */
    char *slots, *snapshots;

    void *q, *k, *v; /* [rows_max] rows of T, of k_heads * k_dim, the same, and v_heads * v_dim */
    float *beta, *g; /* [rows_max, v_heads] */
    float *scratch;  /* sp_cpu_delta_rule_floats for each thread */
} sp_cpu_states;

typedef struct sp_cpu_ops {
    sp_ops ops; /* first */
    /* borrowed */
    const sp_kernels *kernels;
    sp_exec *exec;
    sp_delta *delta; /* NULL: the base alone */

    sp_dtype type; /* T */
    int32_t rows_max, hidden, vocab;
    int32_t widths[SP_ROWS_MAX];
    sp_dtype types[SP_ROWS_MAX]; /* T or FP32 */
    sp_attention_shape attention;
    sp_kv_cache cache;
    sp_rope rope;

    void *rows[SP_ROWS_MAX]; /* [rows_max, widths[i]] of types[i], row-major without padding */
    void *packed;            /* x of the current GEMM, packed */
    float *attention_scratch;
    size_t attention_scratch_floats; /* per thread */
    int32_t *deferred;      /* [sp_cpu_linear_pieces_max] of cpu_linear.c, as is the next */
    atomic_int *strip_done; /* completed pieces of each strip of columns */
    sp_cpu_experts experts;
    sp_cpu_states states;

    float *logits;      /* [SP_CPU_WINDOW, vocab] of the last window */
    void *logit_rows;   /* [SP_CPU_WINDOW, hidden] of T: their x, for the deltas */
    sp_plan *head_plan; /* of the window; NULL without delta */
    sp_host_choice choice;

    /* of the current step */
    const sp_plan *plan;
    const sp_step_span *spans;
    int32_t n_spans, n_rows;
    int32_t *row_position; /* [rows_max], as are the next four */
    int32_t *row_token;
    int32_t *row_span;         /* its number in `spans` */
    const int32_t **row_pages; /* of the row's sequence */
    sp_attention_item *items;
    int32_t n_items;
} sp_cpu_ops;

static inline void *sp_cpu_row(const sp_cpu_ops *cpu, sp_rows rows, int32_t row)
{
    return (char *)cpu->rows[rows] +
           (size_t)row * (size_t)cpu->widths[rows] * sp_dtype_bytes(cpu->types[rows]);
}

/* Runs fn for all rows of the step, on all threads of the executor where there are enough rows; fn
 * must write nothing but its own row. Returns after the last row. */
typedef void (*sp_cpu_row_fn)(const sp_cpu_ops *cpu, const void *args, int32_t row);
void sp_cpu_each_row(const sp_cpu_ops *cpu, sp_cpu_row_fn fn, const void *args);

/* ---- the entries of the table -------------------------------------------------------------- */

sp_status sp_cpu_embed(sp_ops *ops, const sp_weight *table, sp_rows y);
sp_status sp_cpu_norm(sp_ops *ops, sp_rows x, const sp_norm *norm, sp_rows y);
sp_status sp_cpu_add_norm(sp_ops *ops, sp_rows sum, sp_rows x, const sp_norm *norm, sp_rows y);
sp_status sp_cpu_silu_mul(sp_ops *ops, sp_rows gate, sp_rows up);

/*
 * The side paths share the base GEMM's parallel job: their shrinks are its first tasks, and the
 * last piece of a strip of columns is followed, on the same thread and while its outputs are in the
 * cache, by the expand of the same columns. So a step with adapters has no more barriers than one
 * without. Bits do not change: the kernels are those of sp_gemm_run and sp_delta_apply.
 */
sp_status sp_cpu_linear(sp_ops *ops, sp_rows x, const sp_projection *projections, int32_t n);
/* The capacity of sp_cpu_ops.deferred: the most pieces of a GEMM on `threads` threads. */
int32_t sp_cpu_linear_pieces_max(int32_t threads);

sp_status sp_cpu_rope_and_cache(sp_ops *ops, const sp_rope_call *call);
sp_status sp_cpu_attention(sp_ops *ops, sp_rows q, int32_t layer, sp_rows y);
sp_status sp_cpu_gate_heads(sp_ops *ops, sp_rows y, sp_rows q_gate);

sp_status sp_cpu_delta_rule(sp_ops *ops, const sp_delta_rule_call *call);
/* Floats of scratch of one thread. */
size_t sp_cpu_delta_rule_floats(const sp_delta_rule_shape *shape);

/* Of cpu->states; nothing without recurrent layers. `states`: bytes of the slots and snapshots.
 * create: SP_ERR_MEMORY names the setting to lower. */
size_t sp_cpu_state_bytes(const sp_delta_rule_shape *shape, sp_dtype type);
size_t sp_cpu_snapshot_bytes(const sp_delta_rule_shape *shape, sp_dtype type);
size_t sp_cpu_states_scratch_bytes(const sp_ops_options *options);
sp_status sp_cpu_states_create(sp_cpu_ops *cpu, const sp_ops_options *options, sp_error *error);
void sp_cpu_states_destroy(sp_cpu_ops *cpu);

/* Where a layer's part of a slot or snapshot has what the comment of sp_cpu_states lists; `place`
 * is a position modulo SP_STATE_RING, or in a snapshot a row of its inputs. */
float *sp_cpu_state_s(const sp_cpu_ops *cpu, int32_t slot, int32_t layer, int32_t v_head);
float *sp_cpu_state_u(const sp_cpu_ops *cpu, int32_t slot, int32_t layer, int32_t v_head,
                      int32_t place);
float *sp_cpu_state_g(const sp_cpu_ops *cpu, int32_t slot, int32_t layer, int32_t v_head);
void *sp_cpu_state_k(const sp_cpu_ops *cpu, int32_t slot, int32_t layer, int32_t k_head,
                     int32_t place);
void *sp_cpu_state_inputs(const sp_cpu_ops *cpu, int32_t slot, int32_t layer, int32_t place);
float *sp_cpu_snapshot_s(const sp_cpu_ops *cpu, int32_t snapshot, int32_t layer, int32_t v_head);
void *sp_cpu_snapshot_inputs(const sp_cpu_ops *cpu, int32_t snapshot, int32_t layer, int32_t row);

sp_status sp_cpu_route(sp_ops *ops, sp_rows logits, bool normalised);
sp_status sp_cpu_read_routing(sp_ops *ops, sp_routing *out_routing);
sp_status sp_cpu_experts_run(sp_ops *ops, sp_rows x, const sp_experts *experts, sp_rows y);
sp_status sp_cpu_add_gated(sp_ops *ops, sp_rows y, sp_rows x, sp_rows gate);
/* The memory of cpu->experts; nothing without experts. create: false without memory. */
size_t sp_cpu_experts_bytes(const sp_ops_options *options);
bool sp_cpu_experts_create(sp_cpu_ops *cpu, const sp_ops_options *options);
void sp_cpu_experts_destroy(sp_cpu_ops *cpu);

sp_status sp_cpu_faults(sp_ops *ops, bool *out_faults, int32_t n_spans);
sp_status sp_cpu_logits(sp_ops *ops, sp_rows x, const sp_weight *head, const int32_t *rows,
                        int32_t n_rows);
void sp_cpu_choose(sp_ops *ops, sp_choice *choices, int32_t n);
sp_status sp_cpu_score(sp_ops *ops, int32_t index, int32_t token, int32_t n_top, float *out_logprob,
                       sp_logprob *out_top);
const float *sp_cpu_read_logits(sp_ops *ops, int32_t index);

#endif
