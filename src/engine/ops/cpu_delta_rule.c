/*
 * cpu_delta_rule.c: the gated delta rule, in three phases of tasks. "prepare" takes rows through
 * the convolution, norms and gates, each key head of a row apart. "run" walks along a span with one
 * value head: its columns of S and its u belong to no other task. "keep" writes what later steps
 * read into the rings: not before all tasks of the first two phases have read the older rows there.
 */
#include "base/assert.h"
#include "engine/ops/cpu_ops.h"
#include "kernels/element.h"
#include "kernels/scalar_math.h"

#include <math.h>
#include <string.h>

#define CHUNK      SP_STATE_CHUNK
#define BLOCK      8 /* rows of multiply_keys */
#define WIDTH_MAX  8 /* of the convolution */
#define UNIT_EPS   1e-6f
#define TASKS_EACH 4 /* tasks of rows for each thread */

typedef struct rule_job {
    const sp_cpu_ops *cpu;
    const sp_delta_rule_call *call;
    int32_t n_tasks; /* of the phases that split rows */
} rule_job;

/* ---- scratch ------------------------------------------------------------------------------- */

/* Of one thread, FP32. In order: buffers that kernels want aligned first. */
typedef struct thread_scratch {
    float *s;     /* [k_dim, n] a state that a draft alone reads */
    float *reads; /* [2 * CHUNK, n] Sᵀk of the new rows, then Sᵀq */
    float *v;     /* [n] */
    float *o;     /* [n] */
    float *keys;  /* [2 * CHUNK, k_dim] k of the chunk's rows, then q of the new ones */
    float *dots;  /* [2 * CHUNK, CHUNK] k, then q of the new rows times k of the chunk's */
    float *decay; /* [CHUNK] */
} thread_scratch;

static size_t columns_of(const sp_delta_rule_shape *shape)
{
    return ((size_t)shape->v_dim + 15) / 16 * 16;
}

size_t sp_cpu_delta_rule_floats(const sp_delta_rule_shape *shape)
{
    size_t n = columns_of(shape), k_dim = (size_t)shape->k_dim;
    size_t floats = k_dim * n + (2 * CHUNK + 2) * n + 2 * CHUNK * k_dim + 2 * CHUNK * CHUNK + CHUNK;

    return (floats + 15) / 16 * 16;
}

static thread_scratch scratch_of(const sp_cpu_ops *cpu, int32_t thread)
{
    const sp_delta_rule_shape *shape = &cpu->states.shape;
    size_t n = columns_of(shape), k_dim = (size_t)shape->k_dim;
    thread_scratch t = {.s =
                            cpu->states.scratch + (size_t)thread * sp_cpu_delta_rule_floats(shape)};

    t.reads = t.s + k_dim * n;
    t.v = t.reads + 2 * CHUNK * n;
    t.o = t.v + n;
    t.keys = t.o + n;
    t.dots = t.keys + 2 * CHUNK * k_dim;
    t.decay = t.dots + 2 * CHUNK * CHUNK;
    return t;
}

/* ---- the inputs ---------------------------------------------------------------------------- */

/* A run of the convolution's channels: elements [from, from + n) of an input row. */
typedef struct segment {
    int32_t from, channel, n;
} segment;

/* Those of a key head: its q, its k, and v of its value heads. */
static void segments_of(const sp_delta_rule_shape *shape, int32_t k_head, segment out_segments[3])
{
    int32_t keys = shape->k_heads * shape->k_dim, k_dim = shape->k_dim;
    int32_t values = shape->v_heads / shape->k_heads * shape->v_dim;
    int32_t fused = k_head * 2 * (k_dim + values);

    out_segments[0] = (segment){0, k_head * k_dim, k_dim};
    out_segments[1] = (segment){0, keys + k_head * k_dim, k_dim};
    out_segments[2] = (segment){0, 2 * keys + k_head * values, values};
    for (int32_t i = 0; i < 3; i++)
        out_segments[i].from = shape->fused_inputs ? fused + i * k_dim : out_segments[i].channel;
}

static const void *z_of(const rule_job *job, int32_t row, int32_t v_head)
{
    const sp_cpu_ops *cpu = job->cpu;
    const sp_delta_rule_shape *shape = &cpu->states.shape;
    int32_t n = shape->v_heads / shape->k_heads, k_head = v_head / n;
    int32_t at = v_head * shape->v_dim;

    if (!shape->fused_inputs)
        return sp_element_at(cpu->type, sp_cpu_row(cpu, job->call->z, row), at);
    at = k_head * 2 * (shape->k_dim + n * shape->v_dim) + 2 * shape->k_dim +
         (n + v_head % n) * shape->v_dim;
    return sp_element_at(cpu->type, sp_cpu_row(cpu, job->call->qkv, row), at);
}

/* ---- prepare ------------------------------------------------------------------------------- */

static void gates_of(const rule_job *job, int32_t row, int32_t v_head)
{
    const sp_cpu_ops *cpu = job->cpu;
    const sp_delta_rule_shape *shape = &cpu->states.shape;
    const sp_delta_rule *rule = job->call->rule;
    const float *a_log = rule->a_log.placed, *dt_bias = rule->dt_bias.placed;
    const float *gates = sp_cpu_row(cpu, job->call->b, row);
    int32_t n = shape->v_heads / shape->k_heads, at = v_head / n * 2 * n + v_head % n;
    float b = gates[shape->fused_inputs ? at : v_head], a;
    int64_t to = (int64_t)row * shape->v_heads + v_head;

    if (shape->fused_inputs)
        a = gates[at + n];
    else
        a = ((const float *)sp_cpu_row(cpu, job->call->a, row))[v_head];
    cpu->states.beta[to] = sp_sigmoid_scalar(b);
    cpu->states.g[to] = -sp_exp_scalar(a_log[v_head]) * sp_softplus_scalar(a + dt_bias[v_head]);
}

/* The channels of a segment at the rows that the convolution of `row` reads: of this step, or
 * older ones from the ring. */
static void rows_read(const rule_job *job, int32_t row, const segment *run, const void **out_x)
{
    const sp_cpu_ops *cpu = job->cpu;
    const sp_step_span *span = &cpu->spans[cpu->row_span[row]];
    int32_t width = cpu->states.shape.conv_width, position = cpu->row_position[row];

    for (int32_t t = 0; t < width; t++) {
        int32_t back = width - 1 - t, place = (position - back) & (SP_STATE_RING - 1);

        if (position - back >= span->position)
            out_x[t] =
                sp_element_at(cpu->type, sp_cpu_row(cpu, job->call->qkv, row - back), run->from);
        else
            out_x[t] = sp_element_at(
                cpu->type, sp_cpu_state_inputs(cpu, span->state.slot, job->call->layer, place),
                run->channel);
    }
}

static void prepare_unit(const rule_job *job, int32_t row, int32_t k_head)
{
    const sp_cpu_ops *cpu = job->cpu;
    const sp_cpu_states *states = &cpu->states;
    const sp_delta_rule_shape *shape = &states->shape;
    const uint16_t *taps = job->call->rule->conv.placed;
    int32_t keys = shape->k_heads * shape->k_dim, values = shape->v_heads * shape->v_dim;
    int32_t n = shape->v_heads / shape->k_heads;
    int64_t key_at = (int64_t)row * keys + (int64_t)k_head * shape->k_dim;
    int64_t value_at = (int64_t)row * values + (int64_t)k_head * n * shape->v_dim;
    void *to[3] = {sp_element_at_mut(cpu->type, states->q, key_at),
                   sp_element_at_mut(cpu->type, states->k, key_at),
                   sp_element_at_mut(cpu->type, states->v, value_at)};
    segment segments[3];

    segments_of(shape, k_head, segments);
    for (int32_t i = 0; i < 3; i++) {
        const void *x[WIDTH_MAX];

        rows_read(job, row, &segments[i], x);
        cpu->kernels->conv_silu(cpu->type, to[i], x,
                                taps + (int64_t)segments[i].channel * shape->conv_width,
                                shape->conv_width, segments[i].n);
    }
    cpu->kernels->unit_norm(cpu->type, to[0], to[0], shape->k_dim, UNIT_EPS);
    cpu->kernels->unit_norm(cpu->type, to[1], to[1], shape->k_dim, UNIT_EPS);
    for (int32_t v_head = k_head * n; v_head < (k_head + 1) * n; v_head++)
        gates_of(job, row, v_head);
}

/* ---- run ----------------------------------------------------------------------------------- */

/* A value head on its way along a span. */
typedef struct head_run {
    const rule_job *job;
    const sp_step_span *span;
    int32_t first_row; /* of the span, in the step */
    int32_t v_head, k_head;
    float *s;    /* the state at the border of the current chunk: the slot's, or scratch */
    bool drafts; /* it is scratch */
    thread_scratch scratch;
} head_run;

static float *u_of(const head_run *run, int32_t border)
{
    return sp_cpu_state_u(run->job->cpu, run->span->state.slot, run->job->call->layer, run->v_head,
                          border & (SP_STATE_RING - 1));
}

static float *g_of(const head_run *run, int32_t border)
{
    return sp_cpu_state_g(run->job->cpu, run->span->state.slot, run->job->call->layer,
                          run->v_head) +
           (border & (SP_STATE_RING - 1));
}

/* k of the rows border .. border + n - 1, in FP32: of this step, or from the ring. */
static void load_keys(const head_run *run, int32_t border, int32_t n)
{
    const sp_cpu_ops *cpu = run->job->cpu;
    const sp_delta_rule_shape *shape = &cpu->states.shape;
    int32_t position = run->span->position, old = position - border;
    int64_t keys = (int64_t)shape->k_heads * shape->k_dim;

    old = old < 0 ? 0 : old > n ? n : old;
    if (old > 0)
        cpu->kernels->convert(SP_DTYPE_F32, run->scratch.keys, cpu->type,
                              sp_cpu_state_k(cpu, run->span->state.slot, run->job->call->layer,
                                             run->k_head, border & (SP_STATE_RING - 1)),
                              (int64_t)old * shape->k_dim);
    for (int32_t i = old; i < n; i++) {
        int64_t row = run->first_row + border + i - position;

        cpu->kernels->convert(
            SP_DTYPE_F32, run->scratch.keys + (int64_t)i * shape->k_dim, cpu->type,
            sp_element_at(cpu->type, cpu->states.k, row * keys + run->k_head * shape->k_dim),
            shape->k_dim);
    }
}

/* Adds the chunk at `border`, whose keys are loaded, to the current state. */
static void fold(const head_run *run, int32_t border)
{
    const sp_cpu_ops *cpu = run->job->cpu;
    const float *g = g_of(run, border), last = g[CHUNK - 1];
    float whole, zero = 0.0f;

    /* e^(last - g) */
    cpu->kernels->exp_weights(run->scratch.decay, g, last, -1.0f, CHUNK);
    cpu->kernels->exp_weights(&whole, &last, zero, 1.0f, 1);
    cpu->kernels->state_fold(run->s, whole, run->scratch.keys, run->scratch.decay,
                             u_of(run, border), CHUNK, cpu->states.shape.k_dim, cpu->states.n);
}

/* The state at the beginning of the span. */
static void begin_state(head_run *run)
{
    const sp_cpu_ops *cpu = run->job->cpu;
    const sp_step_span *span = run->span;
    int32_t layer = run->job->call->layer;
    size_t bytes = (size_t)cpu->states.shape.k_dim * (size_t)cpu->states.n * sizeof *run->s;

    run->s = sp_cpu_state_s(cpu, span->state.slot, layer, run->v_head);
    if (span->state.load >= 0)
        memcpy(run->s, sp_cpu_snapshot_s(cpu, span->state.load, layer, run->v_head), bytes);
    else if (span->position == 0)
        memset(run->s, 0, bytes);
    else
        for (int32_t border = span->state.folded; border + CHUNK <= span->position;
             border += CHUNK) {
            load_keys(run, border, CHUNK);
            fold(run, border);
        }
    if (span->state.save >= 0)
        memcpy(sp_cpu_snapshot_s(cpu, span->state.save, layer, run->v_head), run->s, bytes);
}

/* Row `i` of the chunk at `border`, the `r`th of the new ones. */
static void run_row(const head_run *run, int32_t border, int32_t i, int32_t r, int32_t rows)
{
    const sp_cpu_ops *cpu = run->job->cpu;
    const sp_cpu_states *states = &cpu->states;
    const sp_delta_rule_shape *shape = &states->shape;
    const thread_scratch *t = &run->scratch;
    const sp_norm *norm = &run->job->call->rule->norm;
    int32_t row = run->first_row + border + i - run->span->position;
    int64_t gate = (int64_t)row * shape->v_heads + run->v_head;
    int64_t value = gate * shape->v_dim;
    float *g = g_of(run, border), *wk = t->dots + r * CHUNK, *wq = t->dots + (rows + r) * CHUNK;
    float from_border, zero = 0.0f;
    sp_delta_row_args args = {
        .i = i,
        .n = states->n,
        .u = u_of(run, border),
        .o = t->o,
        .v = t->v,
        .sk = t->reads + (int64_t)r * states->n,
        .sq = t->reads + (int64_t)(rows + r) * states->n,
        .wk = wk,
        .wq = wq,
        .beta = states->beta[gate],
        .scale = (float)(1.0 / sqrt((double)shape->k_dim)),
    };

    g[i] = i > 0 ? g[i - 1] + states->g[gate] : states->g[gate];
    cpu->kernels->exp_weights(&from_border, &g[i], zero, 1.0f, 1);
    cpu->kernels->exp_weights(t->decay, g, g[i], -1.0f, i + 1); /* e^(g[i] - g) */
    for (int32_t j = 0; j <= i; j++) {
        wk[j] *= t->decay[j];
        wq[j] *= t->decay[j];
    }
    args.decay = from_border;
    cpu->kernels->convert(SP_DTYPE_F32, t->v, cpu->type, sp_element_at(cpu->type, states->v, value),
                          shape->v_dim);
    cpu->kernels->delta_row(&args);
    cpu->kernels->rmsnorm_gated(
        cpu->type,
        sp_element_at_mut(cpu->type, sp_cpu_row(cpu, run->job->call->y, row),
                          (int64_t)run->v_head * shape->v_dim),
        t->o, norm->weight.placed, z_of(run->job, row, run->v_head), shape->v_dim, norm->eps);
}

/* k and q of the new rows times k of the chunk's rows up to their own: of many rows, by blocks, so
 * that little is computed that nobody reads. */
static void multiply_keys(const sp_cpu_ops *cpu, const thread_scratch *t, const float *new_keys,
                          int32_t first, int32_t rows)
{
    int64_t k_dim = cpu->states.shape.k_dim;

    if (rows <= BLOCK) {
        cpu->kernels->dots(t->dots, CHUNK, new_keys, t->keys, 2 * (int64_t)rows, first + rows,
                           k_dim);
        return;
    }
    for (int32_t r = 0; r < rows; r += BLOCK) {
        int32_t n = rows - r < BLOCK ? rows - r : BLOCK;

        for (int32_t half = 0; half < 2; half++)
            cpu->kernels->dots(t->dots + (half * rows + r) * CHUNK, CHUNK,
                               new_keys + (half * rows + r) * k_dim, t->keys, n, first + r + n,
                               k_dim);
    }
}

/* Rows first .. first + rows - 1 of the chunk at `border`. */
static void run_rows(const head_run *run, int32_t border, int32_t first, int32_t rows)
{
    const sp_cpu_ops *cpu = run->job->cpu;
    const sp_delta_rule_shape *shape = &cpu->states.shape;
    const thread_scratch *t = &run->scratch;
    int64_t keys = (int64_t)shape->k_heads * shape->k_dim, k_dim = shape->k_dim;
    float *new_keys = t->keys + first * k_dim;

    load_keys(run, border, first + rows);
    for (int32_t r = 0; r < rows; r++) {
        int64_t row = run->first_row + border + first + r - run->span->position;

        cpu->kernels->convert(
            SP_DTYPE_F32, new_keys + (rows + r) * k_dim, cpu->type,
            sp_element_at(cpu->type, cpu->states.q, row * keys + run->k_head * k_dim), k_dim);
    }
    cpu->kernels->state_read(t->reads, new_keys, run->s, 2 * (int64_t)rows, k_dim, cpu->states.n);
    multiply_keys(cpu, t, new_keys, first, rows);
    for (int32_t r = 0; r < rows; r++)
        run_row(run, border, first + r, r, rows);
}

/* The chunk at `border` is complete: its state becomes that of the next. */
static void end_chunk(head_run *run, int32_t border, bool more)
{
    const sp_cpu_ops *cpu = run->job->cpu;
    bool final = border + CHUNK <= sp_step_state_folded(run->span);

    if (!final && !more)
        return;
    if (!final && !run->drafts) {
        memcpy(run->scratch.s, run->s,
               (size_t)cpu->states.shape.k_dim * (size_t)cpu->states.n * sizeof *run->s);
        run->s = run->scratch.s;
        run->drafts = true;
    }
    fold(run, border);
}

static void run_task(void *user, int32_t task, int32_t thread)
{
    const rule_job *job = user;
    int32_t v_heads = job->cpu->states.shape.v_heads;
    const sp_step_span *span = &job->cpu->spans[task / v_heads];
    int32_t per_key = v_heads / job->cpu->states.shape.k_heads;
    head_run run = {.job = job,
                    .span = span,
                    .v_head = task % v_heads,
                    .k_head = task % v_heads / per_key,
                    .scratch = scratch_of(job->cpu, thread)};

    for (const sp_step_span *before = job->cpu->spans; before < span; before++)
        run.first_row += before->n_rows;
    begin_state(&run);
    for (int32_t i = 0; i < span->n_rows;) {
        int32_t first = (span->position + i) % CHUNK, border = span->position + i - first;
        int32_t rows = span->n_rows - i < CHUNK - first ? span->n_rows - i : CHUNK - first;

        run_rows(&run, border, first, rows);
        i += rows;
        if (first + rows == CHUNK)
            end_chunk(&run, border, i < span->n_rows);
    }
}

/* ---- keep ---------------------------------------------------------------------------------- */

/* The last rows of a span, as many as a ring has. */
static void keep_unit(const rule_job *job, int32_t row, int32_t k_head)
{
    const sp_cpu_ops *cpu = job->cpu;
    const sp_delta_rule_shape *shape = &cpu->states.shape;
    const sp_step_span *span = &cpu->spans[cpu->row_span[row]];
    int32_t position = cpu->row_position[row], place = position & (SP_STATE_RING - 1);
    int64_t key = ((int64_t)row * shape->k_heads + k_head) * shape->k_dim;
    char *inputs;
    segment segments[3];

    if (position < span->position + span->n_rows - SP_STATE_RING)
        return;
    inputs = sp_cpu_state_inputs(cpu, span->state.slot, job->call->layer, place);
    segments_of(shape, k_head, segments);
    for (int32_t i = 0; i < 3; i++)
        memcpy(sp_element_at_mut(cpu->type, inputs, segments[i].channel),
               sp_element_at(cpu->type, sp_cpu_row(cpu, job->call->qkv, row), segments[i].from),
               (size_t)segments[i].n * sp_dtype_bytes(cpu->type));
    memcpy(sp_cpu_state_k(cpu, span->state.slot, job->call->layer, k_head, place),
           sp_element_at(cpu->type, cpu->states.k, key),
           (size_t)shape->k_dim * sp_dtype_bytes(cpu->type));
}

/* ---- the op -------------------------------------------------------------------------------- */

/* The inputs of the rows before a span that is at the beginning of its sequence or of what is
 * recomputed, and those that belong to a snapshot. */
static void move_inputs(const sp_cpu_ops *cpu, const sp_step_span *span, int32_t layer)
{
    const sp_step_state *state = &span->state;
    int32_t before = cpu->states.shape.conv_width - 1;
    size_t bytes = (size_t)cpu->states.channels * sp_dtype_bytes(cpu->type);

    SP_ASSERT(state->save < 0 || span->position % CHUNK == 0);
    SP_ASSERT(span->position - state->folded < SP_STATE_RING || state->load >= 0);
    SP_ASSERT(span->position + span->n_rows - sp_step_state_folded(span) <= SP_STATE_RING);
    for (int32_t i = 0; i < before; i++) {
        int32_t place = (span->position - before + i) & (SP_STATE_RING - 1);
        void *inputs = sp_cpu_state_inputs(cpu, state->slot, layer, place);

        if (state->load >= 0)
            memcpy(inputs, sp_cpu_snapshot_inputs(cpu, state->load, layer, i), bytes);
        else if (span->position == 0)
            memset(inputs, 0, bytes);
        if (state->save >= 0)
            memcpy(sp_cpu_snapshot_inputs(cpu, state->save, layer, i), inputs, bytes);
    }
}

static void units(const rule_job *job, int32_t task,
                  void (*fn)(const rule_job *job, int32_t row, int32_t k_head))
{
    int32_t k_heads = job->cpu->states.shape.k_heads;
    int64_t n = (int64_t)job->cpu->n_rows * k_heads;
    int64_t begin = n * task / job->n_tasks, end = n * (task + 1) / job->n_tasks;

    for (int64_t unit = begin; unit < end; unit++)
        fn(job, (int32_t)(unit / k_heads), (int32_t)(unit % k_heads));
}

static void prepare_task(void *user, int32_t task, int32_t thread)
{
    (void)thread;
    units(user, task, prepare_unit);
}

static void keep_task(void *user, int32_t task, int32_t thread)
{
    (void)thread;
    units(user, task, keep_unit);
}

sp_status sp_cpu_delta_rule(sp_ops *ops, const sp_delta_rule_call *call)
{
    sp_cpu_ops *cpu = (sp_cpu_ops *)ops;
    const sp_delta_rule_shape *shape = &cpu->states.shape;
    int64_t n_units = (int64_t)cpu->n_rows * shape->k_heads;
    int64_t n_tasks = (int64_t)TASKS_EACH * sp_exec_threads(cpu->exec);
    rule_job job = {.cpu = cpu, .call = call};

    SP_ASSERT(call->layer >= 0 && call->layer < shape->layers);
    SP_ASSERT(cpu->widths[call->y] == shape->v_heads * shape->v_dim);
    job.n_tasks = (int32_t)(n_units < n_tasks ? n_units : n_tasks);
    for (int32_t s = 0; s < cpu->n_spans; s++)
        move_inputs(cpu, &cpu->spans[s], call->layer);
    sp_exec_run(cpu->exec, prepare_task, &job, job.n_tasks);
    sp_exec_run(cpu->exec, run_task, &job, cpu->n_spans * shape->v_heads);
    if (cpu->n_rows > 1)
        sp_exec_run(cpu->exec, keep_task, &job, job.n_tasks);
    else
        for (int32_t task = 0; task < job.n_tasks; task++)
            keep_task(&job, task, 0);
    return SP_OK;
}
