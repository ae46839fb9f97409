/*
 * cuda_moe.c: the choice of experts on a GPU, and the experts over all rows of a step at once. A
 * *pair* is one (row, rank): row * per_token + rank, the rank-th of the experts that the row chose.
 * Every array of an expert's inputs and outputs is in the order of the pairs; the rows are grouped
 * by expert in lists alone (sp_cuda_items), so nothing is moved. Pads choose no expert.
 */
#include "base/alloc.h"
#include "base/assert.h"
#include "base/error.h"
#include "engine/ops/cuda_ops.h"
#include "kernels/cuda/cuda_choose.h"

#include <sidepath/experts.h>

/* ---- memory -------------------------------------------------------------------------------- */

static int64_t pairs_of(const sp_ops_options *options)
{
    return (int64_t)options->rows_max * options->moe.per_token;
}

/* Pairs whose deltas are computed by themselves, at most. */
static size_t apart_pairs_of(const sp_ops_options *options)
{
    int64_t rows = options->rows_max < SP_CUDA_APART_ROWS ? options->rows_max : SP_CUDA_APART_ROWS;

    return options->delta != NULL ? (size_t)(rows * options->moe.per_token) : 0;
}

/* Places in the lists of all items, of whichever size suits the rows. */
static int64_t places_of(const sp_moe_shape *moe, int64_t pairs)
{
    static const int32_t sizes[] = {16, 32, 64, SP_CUDA_EXPERT_ROWS_MAX}; /* sp_cuda_expert_rows */
    int64_t most = 0;

    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        int64_t places = sp_cuda_items_bound((int32_t)pairs, moe->experts, 1, sizes[i]);

        most = places * sizes[i] > most ? places * sizes[i] : most;
    }
    return most;
}

size_t sp_cuda_moe_bytes(const sp_ops_options *options)
{
    const sp_moe_shape *moe = &options->moe;
    size_t pairs = (size_t)pairs_of(options), width = (size_t)(2 * moe->inner + options->hidden);
    size_t bytes;

    if (moe->experts == 0)
        return 0;
    bytes = pairs * ((size_t)moe->layers * sizeof(int32_t) + sizeof(float) + sizeof(sp_cuda_item));
    bytes += pairs * width * sizeof(uint16_t);
    bytes += apart_pairs_of(options) * (width * sizeof(uint16_t) + 3 * sizeof(float));
    return bytes + 2 * (size_t)places_of(moe, (int64_t)pairs) * sizeof(int32_t);
}

static sp_status create_apart(sp_cuda_ops *cuda, const sp_ops_options *options, sp_error *error)
{
    sp_cuda_moe *own = &cuda->moe;
    size_t pairs = apart_pairs_of(options), inner = pairs * (size_t)own->shape.inner;
    sp_status status = SP_OK;

    if (pairs == 0)
        return SP_OK;
    own->gate_delta = sp_cuda_block(cuda, inner * sizeof(uint16_t), &status, error);
    own->up_delta = sp_cuda_block(cuda, inner * sizeof(uint16_t), &status, error);
    own->down_delta =
        sp_cuda_block(cuda, pairs * (size_t)options->hidden * sizeof(uint16_t), &status, error);
    own->gate_scale = sp_cuda_block(cuda, pairs * sizeof *own->gate_scale, &status, error);
    own->up_scale = sp_cuda_block(cuda, pairs * sizeof *own->up_scale, &status, error);
    own->down_scale = sp_cuda_block(cuda, pairs * sizeof *own->down_scale, &status, error);
    return status;
}

sp_status sp_cuda_moe_create(sp_cuda_ops *cuda, const sp_ops_options *options, sp_error *error)
{
    sp_cuda_moe *own = &cuda->moe;
    const sp_moe_shape *moe = &options->moe;
    size_t pairs = (size_t)pairs_of(options);
    size_t places = (size_t)places_of(moe, (int64_t)pairs) * sizeof(int32_t);
    sp_status status = SP_OK;

    own->shape = *moe;
    if (moe->experts == 0)
        return SP_OK;
    if (moe->experts > SP_CUDA_EXPERTS_MAX || moe->per_token > SP_CUDA_TOP_MAX ||
        pairs >= SP_CUDA_ROWS_MAX)
        return sp_fail(
            error, SP_ERR_UNSUPPORTED, "engine-unsupported", "experts", -1,
            "a GPU takes up to %d experts, %d of them for a token, and fewer than %d for "
            "the rows of a step: lower step-rows",
            SP_CUDA_EXPERTS_MAX, SP_CUDA_TOP_MAX, SP_CUDA_ROWS_MAX);
    own->choices =
        sp_cuda_block(cuda, (size_t)moe->layers * pairs * sizeof *own->choices, &status, error);
    own->host_choices =
        sp_cuda_pinned(cuda, (size_t)moe->layers * pairs * sizeof *own->choices, &status, error);
    own->weight = sp_cuda_block(cuda, pairs * sizeof *own->weight, &status, error);
    own->gate = sp_cuda_block(cuda, pairs * (size_t)moe->inner * sizeof(uint16_t), &status, error);
    own->up = sp_cuda_block(cuda, pairs * (size_t)moe->inner * sizeof(uint16_t), &status, error);
    own->down =
        sp_cuda_block(cuda, pairs * (size_t)options->hidden * sizeof(uint16_t), &status, error);
    own->items.counts = sp_cuda_block(cuda, 4 * sizeof(int32_t), &status, error);
    own->items.item = sp_cuda_block(cuda, pairs * sizeof *own->items.item, &status, error);
    own->items.row = sp_cuda_block(cuda, places, &status, error);
    own->items.token = sp_cuda_block(cuda, places, &status, error);
    if (status == SP_OK)
        status = create_apart(cuda, options, error);
    if (status == SP_OK)
        status = sp_device_zero(cuda->device, own->items.counts, 4 * sizeof(int32_t), error);
    return status;
}

void sp_cuda_moe_destroy(sp_cuda_ops *cuda)
{
    sp_free(cuda->moe.layers);
}

/* ---- weights ------------------------------------------------------------------------------- */

static void fill_table(const void **table, const sp_linear *maps, int32_t n)
{
    for (int32_t e = 0; e < n; e++)
        table[e] = maps[e].weight.placed;
}

static sp_status add_layer(sp_cuda_ops *cuda, const sp_experts *experts)
{
    sp_cuda_moe *own = &cuda->moe;
    size_t n = (size_t)experts->n;
    sp_status status = SP_OK;
    void *device = sp_cuda_block(cuda, 3 * n * sizeof(void *), &status, NULL);
    const void **table;
    void *grown;

    if (status != SP_OK)
        return status;
    grown = sp_realloc(own->layers, (size_t)(own->n_layers + 1) * sizeof *own->layers);
    table = sp_calloc(3 * n, sizeof *table);
    if (!grown || !table) {
        own->layers = grown ? grown : own->layers;
        sp_free(table);
        return SP_ERR_MEMORY;
    }
    own->layers = grown;
    fill_table(table, experts->gate, experts->n);
    fill_table(table + n, experts->up, experts->n);
    fill_table(table + 2 * n, experts->down, experts->n);
    status = sp_device_write(cuda->device, device, table, 3 * n * sizeof *table, NULL);
    sp_free(table);
    if (status == SP_OK)
        own->layers[own->n_layers++] = (sp_cuda_moe_layer){experts, device};
    return status;
}

sp_status sp_cuda_learn_experts(sp_ops *ops, sp_rows x, const sp_experts *experts, sp_rows y)
{
    sp_cuda_ops *cuda = (sp_cuda_ops *)ops;

    (void)x;
    (void)y;
    SP_ASSERT(experts->n == cuda->moe.shape.experts);
    return add_layer(cuda, experts);
}

/* [experts] of gate, then of up, then of down, on the device. */
static const void *const *table_of(const sp_cuda_ops *cuda, const sp_experts *experts)
{
    for (int32_t i = 0; i < cuda->moe.n_layers; i++)
        if (cuda->moe.layers[i].experts == experts)
            return cuda->moe.layers[i].table;
    SP_ASSERT(false && "a layer that the pass did not have when it was read");
    return NULL;
}

/* ---- the side stream ----------------------------------------------------------------------- */

/* What the side stream does from here on comes after what the main one has done so far. */
static sp_status fork_side(const sp_cuda_ops *cuda)
{
    sp_status status = sp_event_record(cuda->fork, cuda->stream, NULL);

    return status == SP_OK ? sp_stream_wait_event(cuda->side, cuda->fork, NULL) : status;
}

static sp_status join_side(const sp_cuda_ops *cuda)
{
    sp_status status = sp_event_record(cuda->join, cuda->side, NULL);

    return status == SP_OK ? sp_stream_wait_event(cuda->stream, cuda->join, NULL) : status;
}

/* Whether deltas are computed by themselves on the side stream, and folded by what reads the base's
 * products; else they follow these. */
static bool is_apart(const sp_cuda_ops *cuda)
{
    return cuda->adapted && cuda->step.rows <= SP_CUDA_APART_ROWS;
}

/* Groups the rows for the deltas, there. */
static sp_status begin_deltas(sp_cuda_ops *cuda)
{
    const sp_moe_rows rows = {
        .struct_bytes = sizeof rows,
        .n_tokens = cuda->step.rows,
        .top_k = cuda->moe.shape.per_token,
        .n_experts = cuda->moe.shape.experts,
        .expert = cuda->moe.expert,
    };
    sp_status status = cuda->adapted ? fork_side(cuda) : SP_OK;

    if (status != SP_OK || !cuda->adapted)
        return status;
    return sp_delta_experts_begin(cuda->delta, cuda->plan, &rows, cuda->side, NULL);
}

/* ---- the choice ---------------------------------------------------------------------------- */

sp_status sp_cuda_op_route(sp_ops *ops, sp_rows logits, bool normalised)
{
    sp_cuda_ops *cuda = (sp_cuda_ops *)ops;
    sp_cuda_moe *own = &cuda->moe;
    int64_t layer_pairs = (int64_t)cuda->step.rows * own->shape.per_token;
    int32_t *chosen = own->choices + own->n_routed * layer_pairs;
    const sp_cuda_route route = {
        .rows = cuda->step.rows,
        .experts = own->shape.experts,
        .top_k = own->shape.per_token,
        .normalised = normalised,
        .logits = cuda->rows[logits],
        .stride = cuda->widths[logits],
        .position = cuda->step.position,
        .expert = chosen,
        .weight = own->weight,
    };
    int32_t pairs = route.rows * route.top_k;
    sp_cuda_group_rows group = {
        .n_tokens = route.rows,
        .top_k = route.top_k,
        .n_experts = route.experts,
        .n_slots = 1,
        .expert = chosen,
        .all_rows = pairs,
        .n_rows = pairs,
    };
    sp_status status;

    SP_ASSERT(cuda->types[logits] == SP_DTYPE_F32);
    SP_ASSERT(cuda->widths[logits] == own->shape.experts);
    SP_ASSERT(own->n_routed < own->shape.layers);
    own->expert = chosen;
    own->n_routed++;
    own->items.item_rows = sp_cuda_expert_rows(pairs, route.experts);
    own->items.bound = sp_cuda_items_bound(pairs, route.experts, 1, own->items.item_rows);
    group.items = own->items;
    status = sp_cuda_launched(cuda, cuda->kernels.route_rows(cuda->gpu, &route, cuda->native),
                              "choosing experts");
    if (status == SP_OK)
        status = begin_deltas(cuda);
    if (status != SP_OK)
        return status;
    return sp_cuda_launched(cuda, cuda->shared.group_experts(cuda->gpu, &group, cuda->native),
                            "grouping rows by expert");
}

sp_status sp_cuda_fetch_routing(const sp_cuda_ops *cuda)
{
    const sp_cuda_moe *own = &cuda->moe;
    size_t pairs = (size_t)cuda->step.rows * (size_t)own->shape.per_token;

    return sp_stream_copy(cuda->stream, own->host_choices, own->choices,
                          (size_t)own->shape.layers * pairs * sizeof *own->choices, NULL);
}

sp_status sp_cuda_op_read_routing(sp_ops *ops, sp_routing *out_routing)
{
    const sp_cuda_ops *cuda = (const sp_cuda_ops *)ops;
    sp_status status = sp_stream_wait(cuda->stream, NULL);

    if (status == SP_OK)
        *out_routing = (sp_routing){.expert = cuda->moe.host_choices, .rows = cuda->step.rows};
    return status;
}

/* ---- the experts --------------------------------------------------------------------------- */

static sp_cuda_expert_output output_of(const void *const *table, void *y, int32_t n)
{
    return (sp_cuda_expert_output){.w = table, .y = y, .y_stride = n, .n = n};
}

static sp_status run_gemm(const sp_cuda_ops *cuda, const sp_cuda_expert_gemm *gemm)
{
    return sp_cuda_launched(cuda, cuda->kernels.multiply_experts(cuda->gpu, gemm, cuda->native),
                            "the experts' products");
}

static sp_delta_output delta_output(const sp_linear *map, void *y)
{
    return (sp_delta_output){
        .struct_bytes = sizeof(sp_delta_output),
        .site = map->site,
        .y = y,
        .y_stride = map->weight.rows,
        .y_type = SP_DTYPE_BF16,
    };
}

/* Adds them to the outputs, or with `scales` computes them by themselves, on the side stream. */
static sp_status apply_deltas(sp_cuda_ops *cuda, const void *x, int32_t k, sp_expert_x x_rows,
                              const sp_delta_output *outputs, int32_t n, float *const *scales)
{
    const sp_delta_experts_call call = {
        .struct_bytes = sizeof call,
        .x = x,
        .x_stride = k,
        .x_type = SP_DTYPE_BF16,
        .x_rows = x_rows,
        .outputs = outputs,
        .n_outputs = n,
        .stream = scales != NULL ? cuda->side : cuda->stream,
        .scales = scales,
    };

    return sp_delta_experts_apply(cuda->delta, &call, NULL);
}

/* The deltas of gate and up; with `apart` by themselves. */
static sp_status add_gate_and_up(sp_cuda_ops *cuda, sp_rows x, const sp_experts *experts,
                                 bool apart)
{
    const sp_cuda_moe *own = &cuda->moe;
    const sp_delta_output outputs[] = {
        delta_output(experts->gate, apart ? own->gate_delta : own->gate),
        delta_output(experts->up, apart ? own->up_delta : own->up)};
    float *const scales[] = {own->gate_scale, own->up_scale};

    return apply_deltas(cuda, cuda->rows[x], cuda->widths[x], SP_EXPERT_X_TOKEN, outputs, 2,
                        apart ? scales : NULL);
}

static sp_status add_down(sp_cuda_ops *cuda, const sp_experts *experts, bool apart)
{
    const sp_cuda_moe *own = &cuda->moe;
    const sp_delta_output output = delta_output(experts->down, apart ? own->down_delta : own->down);
    float *const scales[] = {own->down_scale};

    return apply_deltas(cuda, own->gate, own->shape.inner, SP_EXPERT_X_ROW, &output, 1,
                        apart ? scales : NULL);
}

static sp_status run_gate_and_up(sp_cuda_ops *cuda, sp_rows x, const sp_experts *experts,
                                 const void *const *table)
{
    const sp_cuda_moe *own = &cuda->moe;
    const sp_cuda_expert_gemm gemm = {
        .k = cuda->widths[x],
        .x_by_token = 1,
        .x = cuda->rows[x],
        .x_stride = cuda->widths[x],
        .items = own->items,
        .n_outputs = 2,
        .outputs = {output_of(table, own->gate, own->shape.inner),
                    output_of(table + experts->n, own->up, own->shape.inner)},
    };
    sp_cuda_silu silu = {
        .n = (int64_t)cuda->step.rows * own->shape.per_token * own->shape.inner,
        .gate = own->gate,
        .up = own->up,
        .width = own->shape.inner,
    };
    bool apart = is_apart(cuda);
    sp_status status = apart ? add_gate_and_up(cuda, x, experts, true) : SP_OK;

    if (status == SP_OK)
        status = run_gemm(cuda, &gemm);
    if (status == SP_OK && cuda->adapted)
        status = join_side(cuda);
    if (status == SP_OK && cuda->adapted && !apart)
        status = add_gate_and_up(cuda, x, experts, false);
    if (status != SP_OK)
        return status;
    if (apart) {
        silu.gate_delta = (sp_cuda_apart){own->gate_delta, own->gate_scale};
        silu.up_delta = (sp_cuda_apart){own->up_delta, own->up_scale};
    }
    return sp_cuda_launched(cuda, cuda->kernels.silu_mul(cuda->gpu, &silu, cuda->native),
                            "the experts' activation");
}

static sp_status run_down(sp_cuda_ops *cuda, const sp_experts *experts, const void *const *table)
{
    const sp_cuda_moe *own = &cuda->moe;
    const sp_cuda_expert_gemm gemm = {
        .k = own->shape.inner,
        .x = own->gate,
        .x_stride = own->shape.inner,
        .items = own->items,
        .n_outputs = 1,
        .outputs = {output_of(table + 2 * (size_t)experts->n, own->down, cuda->hidden)},
    };
    bool apart = is_apart(cuda);
    sp_status status = apart ? fork_side(cuda) : SP_OK;

    if (status == SP_OK && apart)
        status = add_down(cuda, experts, true);
    if (status == SP_OK)
        status = run_gemm(cuda, &gemm);
    if (status == SP_OK && apart)
        return join_side(cuda);
    return status == SP_OK && cuda->adapted ? add_down(cuda, experts, false) : status;
}

sp_status sp_cuda_op_experts(sp_ops *ops, sp_rows x, const sp_experts *experts, sp_rows y)
{
    sp_cuda_ops *cuda = (sp_cuda_ops *)ops;
    const sp_cuda_moe *own = &cuda->moe;
    const void *const *table = table_of(cuda, experts);
    sp_cuda_expert_sum sum = {
        .rows = cuda->step.rows,
        .top_k = own->shape.per_token,
        .width = cuda->hidden,
        .expert = own->expert,
        .weight = own->weight,
        .x = own->down,
        .y = cuda->rows[y],
    };
    sp_status status;

    SP_ASSERT(x != y && cuda->widths[x] == cuda->hidden && cuda->widths[y] == cuda->hidden);
    status = run_gate_and_up(cuda, x, experts, table);
    if (status == SP_OK)
        status = run_down(cuda, experts, table);
    if (status != SP_OK)
        return status;
    if (is_apart(cuda))
        sum.delta = (sp_cuda_apart){own->down_delta, own->down_scale};
    return sp_cuda_launched(cuda, cuda->kernels.sum_experts(cuda->gpu, &sum, cuda->native),
                            "the sum over experts");
}

/* ---- the shared expert --------------------------------------------------------------------- */

sp_status sp_cuda_op_add_gated(sp_ops *ops, sp_rows y, sp_rows x, sp_rows gate)
{
    sp_cuda_ops *cuda = (sp_cuda_ops *)ops;
    const sp_cuda_add_gated call = {
        .rows = cuda->step.rows,
        .width = cuda->widths[y],
        .gate = cuda->rows[gate],
        .gate_stride = cuda->widths[gate],
        .x = cuda->rows[x],
        .y = cuda->rows[y],
    };

    SP_ASSERT(cuda->types[gate] == SP_DTYPE_F32 && cuda->widths[x] == cuda->widths[y]);
    return sp_cuda_launched(cuda, cuda->kernels.add_gated_rows(cuda->gpu, &call, cuda->native),
                            "the shared expert's gate");
}
