/*
 * cpu_experts.c: the choice of experts, and the experts over rows that are sorted by expert.
 *
 * A *pair* is one (row, rank): row * per_token + rank, the rank-th of the experts that the row
 * chose. The pairs of a window of rows are sorted by expert; then gate and up run as GEMMs of each
 * expert over its own rows, the activation is packed on the fly, down runs likewise, and each row
 * sums its pairs by rank. A GEMM's bits do not depend on its rows, so an expert with one row and
 * one with a thousand give that row the same.
 */
#include "base/alloc.h"
#include "base/assert.h"
#include "base/clock.h"
#include "base/integer.h"
#include "engine/ops/cpu_ops.h"

#include <sidepath/experts.h>

#include <math.h>

#define PIECES_PER_THREAD 8
#define PIECE_ROWS        512 /* of a GEMM; more are split */
#define PIECE_COLUMNS_MIN 32  /* narrower pieces waste part of a level's inner tile */
#define PACK_ROWS         32  /* a multiple of every level's x_pack_rows */
/* Up to so many elements are packed by the calling thread, without waking others. */
#define PACK_ALONE_ELEMENTS (1 << 15)

/* ---- memory -------------------------------------------------------------------------------- */

static int64_t window_pairs(const sp_moe_shape *moe, int32_t rows_max)
{
    return (int64_t)min64(moe->window_rows, rows_max) * moe->per_token;
}

/* Packed x of all experts of a window, however its pairs are spread: each expert's part is rounded
 * up to whole groups of rows. */
static size_t packed_bytes(const sp_ops_options *options, int64_t k)
{
    const sp_kernels *kernels = options->kernels;
    int64_t pairs = window_pairs(&options->moe, options->rows_max), group = kernels->x_pack_rows;
    int64_t groups = pairs / group + min64(pairs, options->moe.experts);

    return (size_t)groups * kernels->x_pack_bytes(options->type, SP_DTYPE_BF16, group, k);
}

typedef struct moe_sizes {
    size_t choice, weight, pairs, begin, inner, outer, packed, gemms;
} moe_sizes;

static moe_sizes sizes_of(const sp_ops_options *options)
{
    const sp_moe_shape *moe = &options->moe;
    size_t pairs = (size_t)window_pairs(moe, options->rows_max);
    size_t chosen = (size_t)options->rows_max * (size_t)moe->per_token;
    size_t layers = (size_t)moe->layers;
    size_t in = packed_bytes(options, options->hidden), inner = packed_bytes(options, moe->inner);
    size_t element = sp_dtype_bytes(options->type), experts = (size_t)moe->experts;

    return (moe_sizes){
        .choice = layers * chosen * sizeof(int32_t),
        .weight = chosen * sizeof(float),
        .pairs = pairs * sizeof(int32_t),
        .begin = (experts + 1) * sizeof(int32_t),
        .inner = pairs * (size_t)moe->inner * element,
        .outer = pairs * (size_t)options->hidden * element,
        .packed = in > inner ? in : inner,
        .gemms = 2 * experts * sizeof(sp_gemm_args),
    };
}

size_t sp_cpu_experts_bytes(const sp_ops_options *options)
{
    moe_sizes sizes;

    if (options->moe.experts == 0)
        return 0;
    sizes = sizes_of(options);
    return sizes.choice + sizes.weight + 3 * sizes.pairs + 3 * sizes.begin + 2 * sizes.inner +
           sizes.outer + sizes.packed + sizes.gemms;
}

static void *buffer(size_t bytes, bool *failed)
{
    void *memory = sp_aligned_calloc(bytes, 64);

    *failed |= !memory;
    return memory;
}

bool sp_cpu_experts_create(sp_cpu_ops *cpu, const sp_ops_options *options)
{
    sp_cpu_experts *own = &cpu->experts;
    bool failed = false;
    moe_sizes sizes;

    own->shape = options->moe;
    if (options->moe.experts == 0)
        return true;
    SP_ASSERT(own->shape.per_token > 0 && own->shape.per_token <= own->shape.experts);
    SP_ASSERT(own->shape.window_rows > 0 && own->shape.inner > 0 && own->shape.layers > 0);
    sizes = sizes_of(options);
    own->choices = buffer(sizes.choice, &failed);
    own->weight = buffer(sizes.weight, &failed);
    own->row_pair = buffer(sizes.pairs, &failed);
    own->row_token = buffer(sizes.pairs, &failed);
    own->place = buffer(sizes.pairs, &failed);
    own->begin = buffer(sizes.begin, &failed);
    own->active = buffer(sizes.begin, &failed);
    own->first_piece = buffer(sizes.begin, &failed);
    own->gate = buffer(sizes.inner, &failed);
    own->up = buffer(sizes.inner, &failed);
    own->down = buffer(sizes.outer, &failed);
    own->packed = buffer(sizes.packed, &failed);
    own->packed_bytes = sizes.packed;
    own->gemms = buffer(sizes.gemms, &failed);
    return !failed;
}

void sp_cpu_experts_destroy(sp_cpu_ops *cpu)
{
    sp_cpu_experts *own = &cpu->experts;
    void *buffers[] = {own->choices, own->weight,      own->row_pair, own->row_token, own->place,
                       own->begin,   own->active,      own->gate,     own->up,        own->down,
                       own->packed,  own->first_piece, own->gemms};

    for (size_t i = 0; i < sizeof buffers / sizeof buffers[0]; i++)
        sp_aligned_free(buffers[i]);
}

/* ---- the choice ---------------------------------------------------------------------------- */

typedef struct route_args {
    sp_rows logits;
    bool normalised;
} route_args;

/* A NaN is above any number; nothing is above its equal, so that ties keep the lower expert. */
static bool is_above(float a, float b)
{
    return a > b || (isnan(a) && !isnan(b));
}

static void choose(const float *logits, int32_t n, int32_t per_token, int32_t *out_choice)
{
    int32_t count = 0;

    for (int32_t e = 0; e < n; e++) {
        int32_t at = count;

        if (count == per_token && !is_above(logits[e], logits[out_choice[count - 1]]))
            continue;
        if (count < per_token)
            count++;
        else
            at--;
        for (; at > 0 && is_above(logits[e], logits[out_choice[at - 1]]); at--)
            out_choice[at] = out_choice[at - 1];
        out_choice[at] = e;
    }
}

static void route_row(const sp_cpu_ops *cpu, const void *user, int32_t row)
{
    const route_args *args = user;
    const sp_cpu_experts *own = &cpu->experts;
    int32_t n = own->shape.experts, chosen = own->shape.per_token;
    float *logits = sp_cpu_row(cpu, args->logits, row);
    int32_t *choice = own->choice + (int64_t)row * chosen;
    float *weight = own->weight + (int64_t)row * chosen;
    float best, total = 0;

    choose(logits, n, chosen, choice);
    best = logits[choice[0]];
    for (int32_t i = 0; i < chosen; i++)
        weight[i] = logits[choice[i]];
    cpu->kernels->exp_weights(weight, weight, best, 1.0f, chosen);
    if (!args->normalised)
        cpu->kernels->exp_weights(logits, logits, best, 1.0f, n);
    for (int32_t i = 0; i < (args->normalised ? chosen : n); i++)
        total += args->normalised ? weight[i] : logits[i];
    for (int32_t i = 0; i < chosen; i++)
        weight[i] /= total;
}

sp_status sp_cpu_route(sp_ops *ops, sp_rows logits, bool normalised)
{
    sp_cpu_ops *cpu = (sp_cpu_ops *)ops;
    sp_cpu_experts *own = &cpu->experts;
    const route_args args = {logits, normalised};

    SP_ASSERT(cpu->types[logits] == SP_DTYPE_F32);
    SP_ASSERT(cpu->widths[logits] == own->shape.experts);
    SP_ASSERT(own->n_routed < own->shape.layers);
    own->choice = own->choices + (int64_t)own->n_routed * cpu->n_rows * own->shape.per_token;
    own->n_routed++;
    sp_cpu_each_row(cpu, route_row, &args);
    return SP_OK;
}

sp_status sp_cpu_read_routing(sp_ops *ops, sp_routing *out_routing)
{
    const sp_cpu_ops *cpu = (const sp_cpu_ops *)ops;

    SP_ASSERT(cpu->experts.n_routed == cpu->experts.shape.layers);
    *out_routing = (sp_routing){.expert = cpu->experts.choices, .rows = cpu->n_rows};
    return SP_OK;
}

/* ---- sorting ------------------------------------------------------------------------------- */

/* Sorts the pairs of rows [row, row + n_rows) by expert, those of an expert ascending. */
static void sort_pairs(sp_cpu_experts *own, int32_t row, int32_t n_rows)
{
    int32_t experts = own->shape.experts, chosen = own->shape.per_token;
    const int32_t *choice = own->choice + (int64_t)row * chosen;
    int32_t n_pairs = n_rows * chosen;

    for (int32_t e = 0; e <= experts; e++)
        own->begin[e] = 0;
    for (int32_t i = 0; i < n_pairs; i++)
        own->begin[choice[i] + 1]++;
    own->n_active = 0;
    for (int32_t e = 0; e < experts; e++) {
        if (own->begin[e + 1] > 0)
            own->active[own->n_active++] = e;
        own->begin[e + 1] += own->begin[e];
    }
    /* begin[e] walks to the end of its expert, which is where the next one begins. */
    for (int32_t i = 0; i < n_pairs; i++) {
        int32_t at = own->begin[choice[i]]++;

        own->row_pair[at] = row * chosen + i;
        own->row_token[at] = row + i / chosen;
        own->place[i] = at;
    }
    for (int32_t e = experts; e > 0; e--)
        own->begin[e] = own->begin[e - 1];
    own->begin[0] = 0;
    SP_ASSERT(own->begin[experts] == n_pairs);
}

/* ---- work in pieces ------------------------------------------------------------------------ */

/* Work over the active experts: those of one expert have consecutive numbers. */
typedef struct expert_job {
    sp_cpu_ops *cpu;
    const void *x; /* to be packed: rows of T by token, or sorted ones */
    int64_t x_stride;
    bool sorted;
    int64_t k;
    int32_t gemms;         /* of an expert */
    int64_t piece_columns; /* of a GEMM */
    int32_t strips;
    int32_t n_pieces;
} expert_job;

typedef struct expert_piece {
    int32_t active; /* index into cpu->experts.active */
    int32_t number; /* among its expert's */
} expert_piece;

static int32_t rows_of(const sp_cpu_experts *own, int32_t active)
{
    int32_t e = own->active[active];

    return own->begin[e + 1] - own->begin[e];
}

static expert_piece find_piece(const sp_cpu_experts *own, int32_t piece)
{
    int32_t low = 0, high = own->n_active - 1;

    while (low < high) {
        int32_t middle = (low + high + 1) / 2;

        if (own->first_piece[middle] <= piece)
            low = middle;
        else
            high = middle - 1;
    }
    return (expert_piece){low, piece - own->first_piece[low]};
}

/* Numbers pieces of `rows` rows, `factor` for each such block. */
static void number_pieces(expert_job *job, int32_t rows, int32_t factor)
{
    sp_cpu_experts *own = &job->cpu->experts;

    job->n_pieces = 0;
    for (int32_t a = 0; a < own->n_active; a++) {
        own->first_piece[a] = job->n_pieces;
        job->n_pieces += (int32_t)ceil_div(rows_of(own, a), rows) * factor;
    }
}

/* ---- packing ------------------------------------------------------------------------------- */

/* Gives each active expert's GEMMs their part of the packed x. */
static void place_packed(expert_job *job)
{
    sp_cpu_experts *own = &job->cpu->experts;
    size_t bytes = 0;

    for (int32_t a = 0; a < own->n_active; a++) {
        for (int32_t g = 0; g < job->gemms; g++)
            own->gemms[a * job->gemms + g].packed_x = (char *)own->packed + bytes;
        bytes +=
            job->cpu->kernels->x_pack_bytes(job->cpu->type, SP_DTYPE_BF16, rows_of(own, a), job->k);
    }
    SP_ASSERT(bytes <= own->packed_bytes);
}

static void activate(const sp_cpu_ops *cpu, int64_t begin, int64_t end)
{
    const sp_cpu_experts *own = &cpu->experts;
    size_t row_bytes = (size_t)own->shape.inner * sp_dtype_bytes(cpu->type);

    for (int64_t i = begin; i < end; i++) {
        void *gate = (char *)own->gate + (size_t)i * row_bytes;

        cpu->kernels->silu_mul(cpu->type, gate, gate, (char *)own->up + (size_t)i * row_bytes,
                               own->shape.inner);
    }
}

/* Packs up to PACK_ROWS rows of an expert. Sorted rows are those of gate, which the activation
 * comes before. */
static void pack_task(void *user, int32_t task, int32_t thread)
{
    const expert_job *job = user;
    sp_cpu_ops *cpu = job->cpu;
    const sp_cpu_experts *own = &cpu->experts;
    expert_piece piece = find_piece(own, task);
    int32_t begin = own->begin[own->active[piece.active]], rows = rows_of(own, piece.active);
    int64_t first = (int64_t)piece.number * PACK_ROWS, end = min64(first + PACK_ROWS, rows);
    void *packed = (void *)(uintptr_t)own->gemms[piece.active * job->gemms].packed_x;
    const void *x = job->x;

    (void)thread;
    if (job->sorted) {
        activate(cpu, begin + first, begin + end);
        x = (const char *)x + (size_t)begin * (size_t)job->x_stride * sp_dtype_bytes(cpu->type);
    }
    cpu->kernels->x_pack(packed, cpu->type, SP_DTYPE_BF16, x, job->x_stride,
                         job->sorted ? NULL : own->row_token + begin, rows, job->k, first, end);
}

static void run_pack(expert_job *job)
{
    const sp_cpu_experts *own = &job->cpu->experts;

    place_packed(job);
    number_pieces(job, PACK_ROWS, 1);
    if (own->begin[own->shape.experts] * job->k > PACK_ALONE_ELEMENTS) {
        sp_exec_run(job->cpu->exec, pack_task, job, job->n_pieces);
        return;
    }
    for (int32_t task = 0; task < job->n_pieces; task++)
        pack_task(job, task, 0);
}

/* ---- GEMMs --------------------------------------------------------------------------------- */

static void gemm_task(void *user, int32_t task, int32_t thread)
{
    const expert_job *job = user;
    const sp_cpu_experts *own = &job->cpu->experts;
    expert_piece piece = find_piece(own, task);
    int32_t strip = piece.number % job->strips, rest = piece.number / job->strips;
    const sp_gemm_args *gemm = &own->gemms[piece.active * job->gemms + rest % job->gemms];
    int64_t column = strip * job->piece_columns, row = (int64_t)(rest / job->gemms) * PIECE_ROWS;

    (void)thread;
    job->cpu->kernels->gemm_nt(gemm, row, min64(row + PIECE_ROWS, gemm->rows), column,
                               min64(column + job->piece_columns, gemm->n));
}

/* As few strips of columns as give every thread some pieces. */
static void run_gemms(expert_job *job, int64_t n)
{
    int64_t step = max64(job->cpu->kernels->gemm_columns, PIECE_COLUMNS_MIN);
    int64_t wanted = (int64_t)sp_exec_threads(job->cpu->exec) * PIECES_PER_THREAD;

    number_pieces(job, PIECE_ROWS, job->gemms);
    job->piece_columns = round_up(ceil_div(n, max64(ceil_div(wanted, job->n_pieces), 1)), step);
    job->strips = (int32_t)ceil_div(n, job->piece_columns);
    number_pieces(job, PIECE_ROWS, job->gemms * job->strips);
    sp_exec_run(job->cpu->exec, gemm_task, job, job->n_pieces);
}

/* The rows of one expert from `first` on times one of its weights, into the same rows of y. */
static sp_gemm_args gemm_of(const sp_cpu_ops *cpu, int32_t active, const sp_linear *map, void *y)
{
    const sp_cpu_experts *own = &cpu->experts;
    const sp_weight *weight = &map->weight;
    size_t row_bytes = (size_t)weight->rows * sp_dtype_bytes(cpu->type);

    return (sp_gemm_args){
        .x_type = cpu->type,
        .w_type = weight->type,
        .y_type = cpu->type,
        .epilogue = SP_EPILOGUE_STORE,
        .rows = rows_of(own, active),
        .n = weight->rows,
        .k = weight->columns,
        .w = weight->placed,
        .w_stride = weight->columns,
        .y = (char *)y + (size_t)own->begin[own->active[active]] * row_bytes,
        .y_stride = weight->rows,
    };
}

static void run_gate_and_up(sp_cpu_ops *cpu, sp_rows x, const sp_experts *experts)
{
    sp_cpu_experts *own = &cpu->experts;
    expert_job job = {
        .cpu = cpu, .x = cpu->rows[x], .x_stride = cpu->widths[x], .k = cpu->widths[x], .gemms = 2};

    for (int32_t a = 0; a < own->n_active; a++) {
        int32_t e = own->active[a];

        own->gemms[2 * a] = gemm_of(cpu, a, &experts->gate[e], own->gate);
        own->gemms[2 * a + 1] = gemm_of(cpu, a, &experts->up[e], own->up);
    }
    run_pack(&job);
    run_gemms(&job, own->shape.inner);
}

static void run_down(sp_cpu_ops *cpu, const sp_experts *experts)
{
    sp_cpu_experts *own = &cpu->experts;
    expert_job job = {.cpu = cpu,
                      .x = own->gate,
                      .x_stride = own->shape.inner,
                      .sorted = true,
                      .k = own->shape.inner,
                      .gemms = 1};

    for (int32_t a = 0; a < own->n_active; a++)
        own->gemms[a] = gemm_of(cpu, a, &experts->down[own->active[a]], own->down);
    run_pack(&job);
    run_gemms(&job, cpu->hidden);
}

/* ---- side paths ---------------------------------------------------------------------------- */

/* The pairs of the window, for the deltas after it. */
static sp_status begin_delta(const sp_cpu_ops *cpu)
{
    const sp_cpu_experts *own = &cpu->experts;
    const sp_moe_rows rows = {.struct_bytes = sizeof rows,
                              .n_tokens = cpu->n_rows,
                              .top_k = own->shape.per_token,
                              .n_experts = own->shape.experts,
                              .row_pair = own->row_pair,
                              .expert_begin = own->begin,
                              .n_rows = own->begin[own->shape.experts]};

    return cpu->delta ? sp_delta_experts_begin(cpu->delta, cpu->plan, &rows, NULL, NULL) : SP_OK;
}

static sp_status apply_delta(sp_cpu_ops *cpu, const void *x, int64_t x_stride, sp_expert_x x_rows,
                             const sp_delta_output *outputs, int32_t n)
{
    const sp_delta_experts_call call = {.struct_bytes = sizeof call,
                                        .x = x,
                                        .x_stride = x_stride,
                                        .x_type = cpu->type,
                                        .x_rows = x_rows,
                                        .outputs = outputs,
                                        .n_outputs = n};
    double began;
    sp_status status;

    if (!cpu->delta)
        return SP_OK;
    began = sp_clock_seconds();
    status = sp_delta_experts_apply(cpu->delta, &call, NULL);
    cpu->ops.delta_seconds += sp_clock_seconds() - began;
    return status;
}

static sp_delta_output output_of(const sp_cpu_ops *cpu, const sp_linear *map, void *y)
{
    return (sp_delta_output){.struct_bytes = sizeof(sp_delta_output),
                             .site = map->site,
                             .y = y,
                             .y_stride = map->weight.rows,
                             .y_type = cpu->type};
}

static sp_status adapt_gate_and_up(sp_cpu_ops *cpu, sp_rows x, const sp_experts *experts)
{
    const sp_delta_output outputs[] = {output_of(cpu, &experts->gate[0], cpu->experts.gate),
                                       output_of(cpu, &experts->up[0], cpu->experts.up)};

    return apply_delta(cpu, cpu->rows[x], cpu->widths[x], SP_EXPERT_X_TOKEN, outputs, 2);
}

static sp_status adapt_down(sp_cpu_ops *cpu, const sp_experts *experts)
{
    const sp_delta_output output = output_of(cpu, &experts->down[0], cpu->experts.down);

    return apply_delta(cpu, cpu->experts.gate, cpu->experts.shape.inner, SP_EXPERT_X_ROW, &output,
                       1);
}

/* ---- sums ---------------------------------------------------------------------------------- */

typedef struct sum_args {
    sp_rows y;
    int32_t row, n_rows; /* of the window */
} sum_args;

static void sum_row(const sp_cpu_ops *cpu, const void *user, int32_t row)
{
    const sum_args *args = user;
    const sp_cpu_experts *own = &cpu->experts;
    int64_t chosen = own->shape.per_token;

    if (row < args->row || row >= args->row + args->n_rows)
        return;
    cpu->kernels->weighted_sum(cpu->type, sp_cpu_row(cpu, args->y, row), own->down, cpu->hidden,
                               own->place + (row - args->row) * chosen, own->weight + row * chosen,
                               chosen, cpu->hidden);
}

sp_status sp_cpu_experts_run(sp_ops *ops, sp_rows x, const sp_experts *experts, sp_rows y)
{
    sp_cpu_ops *cpu = (sp_cpu_ops *)ops;
    sp_cpu_experts *own = &cpu->experts;

    SP_ASSERT(x != y && experts->n == own->shape.experts);
    SP_ASSERT(cpu->widths[x] == cpu->hidden && cpu->widths[y] == cpu->hidden);
    for (int32_t row = 0; row < cpu->n_rows; row += own->shape.window_rows) {
        const sum_args sum = {y, row, (int32_t)min64(own->shape.window_rows, cpu->n_rows - row)};

        sp_status status;

        sort_pairs(own, row, sum.n_rows);
        status = begin_delta(cpu);
        run_gate_and_up(cpu, x, experts);
        if (status == SP_OK)
            status = adapt_gate_and_up(cpu, x, experts);
        run_down(cpu, experts);
        if (status == SP_OK)
            status = adapt_down(cpu, experts);
        if (status != SP_OK)
            return status;
        sp_cpu_each_row(cpu, sum_row, &sum);
    }
    return SP_OK;
}

/* ---- the shared expert --------------------------------------------------------------------- */

typedef struct gated_args {
    sp_rows y, x, gate;
} gated_args;

static void gated_row(const sp_cpu_ops *cpu, const void *user, int32_t row)
{
    const gated_args *args = user;
    float power = -*(const float *)sp_cpu_row(cpu, args->gate, row);

    cpu->kernels->exp_weights(&power, &power, 0.0f, 1.0f, 1);
    power = 1.0f / (1.0f + power);
    cpu->kernels->add_scaled(cpu->type, sp_cpu_row(cpu, args->y, row),
                             sp_cpu_row(cpu, args->x, row), power, cpu->widths[args->y]);
}

sp_status sp_cpu_add_gated(sp_ops *ops, sp_rows y, sp_rows x, sp_rows gate)
{
    sp_cpu_ops *cpu = (sp_cpu_ops *)ops;
    const gated_args args = {y, x, gate};

    SP_ASSERT(cpu->types[gate] == SP_DTYPE_F32 && cpu->widths[gate] == 1);
    SP_ASSERT(cpu->widths[x] == cpu->widths[y]);
    sp_cpu_each_row(cpu, gated_row, &args);
    return SP_OK;
}
