/* cpu_states.c: the memory of recurrent states and their snapshots, and of a step's rows in the
 * gated delta rule. */
#include "base/alloc.h"
#include "base/assert.h"
#include "base/error.h"
#include "engine/ops/cpu_ops.h"

#define ALIGNMENT 64 /* of each part; sizes are multiples of it */

static size_t aligned(size_t bytes)
{
    return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

/* ---- sizes --------------------------------------------------------------------------------- */

/* Bytes of one head's or one row's part; see sp_cpu_states. */
typedef struct part_sizes {
    size_t s, u, g, k; /* of a head */
    size_t inputs;     /* of a row */
    size_t layer, snapshot_layer;
} part_sizes;

static int32_t columns_of(const sp_delta_rule_shape *shape)
{
    return (shape->v_dim + 15) / 16 * 16;
}

static int32_t channels_of(const sp_delta_rule_shape *shape)
{
    return 2 * shape->k_heads * shape->k_dim + shape->v_heads * shape->v_dim;
}

static part_sizes sizes_of(const sp_delta_rule_shape *shape, sp_dtype type)
{
    size_t n = (size_t)columns_of(shape), k_dim = (size_t)shape->k_dim;
    size_t k_heads = (size_t)shape->k_heads, v_heads = (size_t)shape->v_heads;
    part_sizes sizes = {
        .s = k_dim * n * sizeof(float),
        .u = SP_STATE_RING * n * sizeof(float),
        .g = SP_STATE_RING * sizeof(float),
        .k = aligned(SP_STATE_RING * k_dim * sp_dtype_bytes(type)),
        .inputs = aligned((size_t)channels_of(shape) * sp_dtype_bytes(type)),
    };

    sizes.layer =
        v_heads * (sizes.s + sizes.u + sizes.g) + k_heads * sizes.k + SP_STATE_RING * sizes.inputs;
    sizes.snapshot_layer = v_heads * sizes.s + (size_t)(shape->conv_width - 1) * sizes.inputs;
    return sizes;
}

size_t sp_cpu_state_bytes(const sp_delta_rule_shape *shape, sp_dtype type)
{
    return (size_t)shape->layers * sizes_of(shape, type).layer;
}

size_t sp_cpu_snapshot_bytes(const sp_delta_rule_shape *shape, sp_dtype type)
{
    return (size_t)shape->layers * sizes_of(shape, type).snapshot_layer;
}

/* Of one row of a step: q, k, v, beta and g. */
static size_t row_bytes(const sp_delta_rule_shape *shape, sp_dtype type)
{
    return (size_t)channels_of(shape) * sp_dtype_bytes(type) +
           2 * (size_t)shape->v_heads * sizeof(float);
}

size_t sp_cpu_states_scratch_bytes(const sp_ops_options *options)
{
    const sp_delta_rule_shape *shape = &options->delta_rule;
    size_t threads = (size_t)sp_exec_threads(options->exec);

    if (shape->layers == 0)
        return 0;
    return (size_t)options->rows_max * row_bytes(shape, options->type) +
           threads * sp_cpu_delta_rule_floats(shape) * sizeof(float);
}

/* ---- life ---------------------------------------------------------------------------------- */

/* `n` states or snapshots, zeroed; false without memory. They come into memory as they are used:
 * there may be many more than requests. */
static bool create_states(int32_t n, size_t bytes, char **out_states)
{
    *out_states = n > 0 ? sp_aligned_calloc((size_t)n * bytes, ALIGNMENT) : NULL;
    return n == 0 || *out_states;
}

static bool create_scratch(sp_cpu_ops *cpu, const sp_ops_options *options)
{
    const sp_delta_rule_shape *shape = &options->delta_rule;
    sp_cpu_states *states = &cpu->states;
    size_t rows = (size_t)options->rows_max, element = sp_dtype_bytes(options->type);
    size_t keys = rows * (size_t)(shape->k_heads * shape->k_dim) * element;
    size_t gates = rows * (size_t)shape->v_heads * sizeof(float);

    states->q = sp_aligned_calloc(keys, ALIGNMENT);
    states->k = sp_aligned_calloc(keys, ALIGNMENT);
    states->v =
        sp_aligned_calloc(rows * (size_t)(shape->v_heads * shape->v_dim) * element, ALIGNMENT);
    states->beta = sp_aligned_calloc(gates, ALIGNMENT);
    states->g = sp_aligned_calloc(gates, ALIGNMENT);
    states->scratch = sp_aligned_calloc((size_t)sp_exec_threads(options->exec) *
                                            sp_cpu_delta_rule_floats(shape) * sizeof(float),
                                        ALIGNMENT);
    return states->q && states->k && states->v && states->beta && states->g && states->scratch;
}

sp_status sp_cpu_states_create(sp_cpu_ops *cpu, const sp_ops_options *options, sp_error *error)
{
    const sp_delta_rule_shape *shape = &options->delta_rule;
    sp_cpu_states *states = &cpu->states;
    size_t state, snapshot;

    if (shape->layers == 0)
        return SP_OK;
    SP_ASSERT(shape->v_heads % shape->k_heads == 0);
    SP_ASSERT(shape->conv_width >= 2 && shape->conv_width <= 8);
    states->shape = *shape;
    states->channels = channels_of(shape);
    states->n = columns_of(shape);
    state = sp_cpu_state_bytes(shape, options->type);
    snapshot = sp_cpu_snapshot_bytes(shape, options->type);
    if (!create_states(shape->slots, state, &states->slots))
        return sp_fail(error, SP_ERR_MEMORY, NULL, "state-bytes", -1,
                       "the recurrent states of %d sequences need %zu MiB; lower state-bytes or "
                       "max-running",
                       shape->slots, (size_t)shape->slots * state >> 20);
    if (!create_states(shape->snapshots, snapshot, &states->snapshots))
        return sp_fail(error, SP_ERR_MEMORY, NULL, "state-snapshot-bytes", -1,
                       "%d snapshots of recurrent states need %zu MiB; lower "
                       "state-snapshot-bytes",
                       shape->snapshots, (size_t)shape->snapshots * snapshot >> 20);
    cpu->ops.state_bytes = (size_t)shape->slots * state + (size_t)shape->snapshots * snapshot;
    if (!create_scratch(cpu, options))
        return sp_fail(error, SP_ERR_MEMORY, NULL, "step-rows", -1,
                       "the linear attention of %d rows needs %zu MiB; lower step-rows",
                       options->rows_max, sp_cpu_states_scratch_bytes(options) >> 20);
    return SP_OK;
}

void sp_cpu_states_destroy(sp_cpu_ops *cpu)
{
    sp_cpu_states *states = &cpu->states;

    sp_aligned_free(states->slots);
    sp_aligned_free(states->snapshots);
    sp_aligned_free(states->q);
    sp_aligned_free(states->k);
    sp_aligned_free(states->v);
    sp_aligned_free(states->beta);
    sp_aligned_free(states->g);
    sp_aligned_free(states->scratch);
}

/* ---- places -------------------------------------------------------------------------------- */

static char *layer_of(const sp_cpu_states *states, const part_sizes *sizes, int32_t slot,
                      int32_t layer)
{
    SP_ASSERT(slot >= 0 && slot < states->shape.slots);
    SP_ASSERT(layer >= 0 && layer < states->shape.layers);
    return states->slots +
           ((size_t)slot * (size_t)states->shape.layers + (size_t)layer) * sizes->layer;
}

float *sp_cpu_state_s(const sp_cpu_ops *cpu, int32_t slot, int32_t layer, int32_t v_head)
{
    const part_sizes sizes = sizes_of(&cpu->states.shape, cpu->type);

    return (float *)(void *)(layer_of(&cpu->states, &sizes, slot, layer) +
                             (size_t)v_head * sizes.s);
}

float *sp_cpu_state_u(const sp_cpu_ops *cpu, int32_t slot, int32_t layer, int32_t v_head,
                      int32_t place)
{
    const part_sizes sizes = sizes_of(&cpu->states.shape, cpu->type);
    char *at = layer_of(&cpu->states, &sizes, slot, layer) +
               (size_t)cpu->states.shape.v_heads * sizes.s + (size_t)v_head * sizes.u;

    return (float *)(void *)at + (size_t)place * (size_t)cpu->states.n;
}

float *sp_cpu_state_g(const sp_cpu_ops *cpu, int32_t slot, int32_t layer, int32_t v_head)
{
    const part_sizes sizes = sizes_of(&cpu->states.shape, cpu->type);
    size_t v_heads = (size_t)cpu->states.shape.v_heads;

    return (float *)(void *)(layer_of(&cpu->states, &sizes, slot, layer) +
                             v_heads * (sizes.s + sizes.u) + (size_t)v_head * sizes.g);
}

/* What the key heads have, and the inputs, are after what the value heads have. */
static char *after_v_heads(const sp_cpu_ops *cpu, const part_sizes *sizes, int32_t slot,
                           int32_t layer)
{
    return layer_of(&cpu->states, sizes, slot, layer) +
           (size_t)cpu->states.shape.v_heads * (sizes->s + sizes->u + sizes->g);
}

void *sp_cpu_state_k(const sp_cpu_ops *cpu, int32_t slot, int32_t layer, int32_t k_head,
                     int32_t place)
{
    const part_sizes sizes = sizes_of(&cpu->states.shape, cpu->type);

    return after_v_heads(cpu, &sizes, slot, layer) + (size_t)k_head * sizes.k +
           (size_t)place * (size_t)cpu->states.shape.k_dim * sp_dtype_bytes(cpu->type);
}

void *sp_cpu_state_inputs(const sp_cpu_ops *cpu, int32_t slot, int32_t layer, int32_t place)
{
    const part_sizes sizes = sizes_of(&cpu->states.shape, cpu->type);

    return after_v_heads(cpu, &sizes, slot, layer) + (size_t)cpu->states.shape.k_heads * sizes.k +
           (size_t)place * sizes.inputs;
}

static char *snapshot_layer_of(const sp_cpu_states *states, const part_sizes *sizes,
                               int32_t snapshot, int32_t layer)
{
    SP_ASSERT(snapshot >= 0 && snapshot < states->shape.snapshots);
    return states->snapshots + ((size_t)snapshot * (size_t)states->shape.layers + (size_t)layer) *
                                   sizes->snapshot_layer;
}

float *sp_cpu_snapshot_s(const sp_cpu_ops *cpu, int32_t snapshot, int32_t layer, int32_t v_head)
{
    const part_sizes sizes = sizes_of(&cpu->states.shape, cpu->type);

    return (float *)(void *)(snapshot_layer_of(&cpu->states, &sizes, snapshot, layer) +
                             (size_t)v_head * sizes.s);
}

void *sp_cpu_snapshot_inputs(const sp_cpu_ops *cpu, int32_t snapshot, int32_t layer, int32_t row)
{
    const part_sizes sizes = sizes_of(&cpu->states.shape, cpu->type);

    return snapshot_layer_of(&cpu->states, &sizes, snapshot, layer) +
           (size_t)cpu->states.shape.v_heads * sizes.s + (size_t)row * sizes.inputs;
}
