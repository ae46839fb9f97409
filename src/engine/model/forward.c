#include "engine/model/forward.h"

#include "base/alloc.h"
#include "base/assert.h"
#include "base/clock.h"
#include "base/error.h"
#include "engine/model/linear_group.h"
#include "kernels/cpu/gemm.h"

#include <math.h>
#include <string.h>

/* Element-wise phases hand out so many rows per task at most; few rows go to a thread each, one
 * stays with the caller. */
#define ROWS_PER_TASK_MAX 4

/* ---- set-up -------------------------------------------------------------------------------- */

static size_t largest(size_t a, size_t b)
{
    return a > b ? a : b;
}

static int32_t q_width(const sp_model_shape *shape)
{
    return shape->q_heads * shape->head_dim;
}

static int32_t kv_width(const sp_model_shape *shape)
{
    return shape->kv_heads * shape->head_dim;
}

static size_t packed_bytes(const sp_forward *forward)
{
    const sp_model_shape *shape = &forward->model->shape;
    const sp_kernels *kernels = forward->kernels;
    int64_t rows = forward->rows_max;
    size_t bytes = kernels->x_pack_bytes(forward->type, SP_DTYPE_BF16, rows, shape->hidden);

    bytes =
        largest(bytes, kernels->x_pack_bytes(forward->type, SP_DTYPE_BF16, rows, q_width(shape)));
    return largest(bytes,
                   kernels->x_pack_bytes(forward->type, SP_DTYPE_BF16, rows, shape->intermediate));
}

/* One buffer of rows_max rows; a failure is remembered in *failed. */
static void *rows_buffer(sp_forward *forward, int64_t width, size_t element_bytes, bool *failed)
{
    size_t bytes = (size_t)forward->rows_max * (size_t)width * element_bytes;
    void *memory = sp_aligned_calloc(bytes, 64);

    if (!memory)
        *failed = true;
    forward->scratch_bytes += bytes;
    return memory;
}

static sp_status allocate(sp_forward *forward, sp_error *error)
{
    const sp_model_shape *shape = &forward->model->shape;
    size_t element = sp_dtype_bytes(forward->type);
    size_t packed = packed_bytes(forward);
    size_t logits = (size_t)SP_LOGIT_ROWS * (size_t)shape->vocab * sizeof(float);
    size_t attention;
    bool failed = false;

    forward->attention_scratch_floats = forward->kernels->attention_scratch_floats(
        shape->q_heads / shape->kv_heads, shape->head_dim);
    attention =
        forward->attention_scratch_floats * sizeof(float) * (size_t)sp_exec_threads(forward->exec);
    forward->residual = rows_buffer(forward, shape->hidden, element, &failed);
    forward->hidden = rows_buffer(forward, shape->hidden, element, &failed);
    forward->q = rows_buffer(forward, q_width(shape), element, &failed);
    forward->k = rows_buffer(forward, kv_width(shape), element, &failed);
    forward->v = rows_buffer(forward, kv_width(shape), element, &failed);
    forward->attended = rows_buffer(forward, q_width(shape), element, &failed);
    forward->gate = rows_buffer(forward, shape->intermediate, element, &failed);
    forward->up = rows_buffer(forward, shape->intermediate, element, &failed);
    forward->site_output = rows_buffer(forward, shape->hidden, element, &failed);
    forward->row_position = rows_buffer(forward, 1, sizeof(int32_t), &failed);
    forward->row_token = rows_buffer(forward, 1, sizeof(int32_t), &failed);
    forward->row_entry = rows_buffer(forward, 1, sizeof(int32_t), &failed);
    forward->items = rows_buffer(forward, 1, sizeof(sp_attention_item), &failed);
    forward->waiting = sp_calloc((size_t)sp_project_pieces_max(sp_exec_threads(forward->exec)),
                                 sizeof *forward->waiting);
    forward->strip_done = sp_calloc((size_t)sp_project_pieces_max(sp_exec_threads(forward->exec)),
                                    sizeof *forward->strip_done);
    forward->packed = sp_aligned_calloc(packed, 64);
    forward->logits = sp_aligned_calloc(logits, 64);
    forward->attention_scratch = sp_aligned_calloc(attention ? attention : 64, 64);
    forward->scratch_bytes += packed + logits + attention;
    if (failed || !forward->waiting || !forward->strip_done || !forward->packed ||
        !forward->logits || !forward->attention_scratch)
        return sp_fail(error, SP_ERR_MEMORY, NULL, "step-rows", -1,
                       "the activations of %d rows need %zu MiB; lower step-rows",
                       forward->rows_max, forward->scratch_bytes >> 20);
    return SP_OK;
}

size_t sp_forward_scratch_bytes(const sp_forward_options *options)
{
    const sp_model_shape *shape = &options->model->shape;
    const sp_kernels *kernels = options->kernels;
    const sp_forward sizes = {
        .model = options->model,
        .kernels = kernels,
        .type = options->type,
        .rows_max = options->rows_max,
    };
    size_t widths = 3 * (size_t)shape->hidden + 2 * (size_t)q_width(shape) +
                    2 * (size_t)kv_width(shape) + 2 * (size_t)shape->intermediate;
    size_t row =
        widths * sp_dtype_bytes(options->type) + 3 * sizeof(int32_t) + sizeof(sp_attention_item);
    size_t logits = (size_t)SP_LOGIT_ROWS * (size_t)shape->vocab * sizeof(float);
    size_t attention =
        kernels->attention_scratch_floats(shape->q_heads / shape->kv_heads, shape->head_dim) *
        sizeof(float) * (size_t)sp_exec_threads(options->exec);

    return (size_t)options->rows_max * row + packed_bytes(&sizes) + logits + attention;
}

sp_status sp_forward_create(const sp_forward_options *options, sp_forward *out_forward,
                            sp_error *error)
{
    sp_forward forward = {
        .model = options->model,
        .kernels = options->kernels,
        .exec = options->exec,
        .cache = options->cache,
        .rope = options->rope,
        .delta = options->delta,
        .slots = options->slots,
        .type = options->type,
        .rows_max = options->rows_max,
    };
    sp_status status = allocate(&forward, error);

    SP_ASSERT(status != SP_OK || forward.scratch_bytes == sp_forward_scratch_bytes(options));
    if (status == SP_OK && forward.delta)
        status = sp_plan_create(SP_LOGIT_ROWS, forward.slots, &forward.head_plan, error);
    if (status != SP_OK) {
        sp_forward_destroy(&forward);
        return status;
    }
    *out_forward = forward;
    return SP_OK;
}

void sp_forward_destroy(sp_forward *forward)
{
    void *buffers[] = {
        forward->residual,    forward->hidden,       forward->q,         forward->k,
        forward->v,           forward->attended,     forward->gate,      forward->up,
        forward->site_output, forward->packed,       forward->logits,    forward->attention_scratch,
        forward->items,       forward->row_position, forward->row_token, forward->row_entry};

    for (size_t i = 0; i < sizeof buffers / sizeof buffers[0]; i++)
        sp_aligned_free(buffers[i]);
    sp_free(forward->waiting);
    sp_free(forward->strip_done);
    sp_plan_destroy(forward->head_plan);
    *forward = (sp_forward){0};
}

/* ---- the rows of a step -------------------------------------------------------------------- */

static void lay_out_rows(sp_forward *forward, const sp_batch *batch)
{
    int32_t row = 0;

    forward->n_items = 0;
    for (int32_t e = 0; e < batch->n_entries; e++) {
        const sp_sequence *sequence = batch->entries[e].sequence;
        int32_t n_rows = batch->entries[e].n_rows;

        for (int32_t i = 0; i < n_rows; i++) {
            int32_t position = sequence->n_computed + i;

            if (i % SP_ATTENTION_ROWS == 0)
                forward->items[forward->n_items++] = (sp_attention_item){
                    .row = row,
                    .n_rows = n_rows - i < SP_ATTENTION_ROWS ? n_rows - i : SP_ATTENTION_ROWS,
                    .first_position = position,
                    .pages = sequence->pages,
                };
            forward->row_position[row] = position;
            forward->row_token[row] = sequence->tokens[position];
            forward->row_entry[row] = e;
            row++;
        }
    }
    forward->n_rows = row;
}

static void *row_of(const sp_forward *forward, void *buffer, int32_t row, int64_t width)
{
    return (char *)buffer + (size_t)row * (size_t)width * sp_dtype_bytes(forward->type);
}

/* What the phases that run row by row need besides the step. */
typedef struct row_job {
    sp_forward *forward;
    const sp_batch *batch;
    const sp_layer_weights *weights; /* of the layer under way */
    const uint16_t *norm;
    int32_t layer;
    int32_t task_rows; /* by run_rows */
} row_job;

/* Runs a phase over all rows, in at least two tasks for each thread where there are as many. */
static void run_rows(row_job *job, sp_task_fn fn)
{
    int32_t rows = job->forward->n_rows, threads = sp_exec_threads(job->forward->exec);
    int32_t share = rows / (2 * threads);

    job->task_rows = share < 1 ? 1 : share < ROWS_PER_TASK_MAX ? share : ROWS_PER_TASK_MAX;
    sp_exec_run(job->forward->exec, fn, job, (rows + job->task_rows - 1) / job->task_rows);
}

static int32_t task_end(const row_job *job, int32_t task)
{
    int32_t end = (task + 1) * job->task_rows;

    return end < job->forward->n_rows ? end : job->forward->n_rows;
}

static float norm_offset(const sp_model_shape *shape)
{
    return shape->zero_centred_norms ? 1.0f : 0.0f;
}

static void norm_row(const row_job *job, int32_t row)
{
    const sp_forward *forward = job->forward;
    const sp_model_shape *shape = &forward->model->shape;

    forward->kernels->rmsnorm(forward->type, row_of(forward, forward->hidden, row, shape->hidden),
                              row_of(forward, forward->residual, row, shape->hidden), job->norm,
                              norm_offset(shape), shape->hidden, shape->rms_norm_eps);
}

static void gather_row(const row_job *job, int32_t row)
{
    const sp_forward *forward = job->forward;
    int64_t hidden = forward->model->shape.hidden;

    forward->kernels->convert(
        forward->type, row_of(forward, forward->residual, row, hidden), SP_DTYPE_BF16,
        forward->model->embed + (size_t)forward->row_token[row] * (size_t)hidden, hidden);
}

/* residual = embedding of the token; hidden = norm(residual). */
static void embed_task(void *user, int32_t task, int32_t thread)
{
    const row_job *job = user;

    (void)thread;
    for (int32_t row = task * job->task_rows; row < task_end(job, task); row++) {
        gather_row(job, row);
        norm_row(job, row);
    }
}

/* The same in two halves, for a step in which adapters come between them. */
static void gather_task(void *user, int32_t task, int32_t thread)
{
    const row_job *job = user;

    (void)thread;
    for (int32_t row = task * job->task_rows; row < task_end(job, task); row++)
        gather_row(job, row);
}

static void norm_task(void *user, int32_t task, int32_t thread)
{
    const row_job *job = user;

    (void)thread;
    for (int32_t row = task * job->task_rows; row < task_end(job, task); row++)
        norm_row(job, row);
}

/* residual += site_output; hidden = norm(residual). */
static void add_and_norm_task(void *user, int32_t task, int32_t thread)
{
    const row_job *job = user;
    sp_forward *forward = job->forward;
    int64_t hidden = forward->model->shape.hidden;

    (void)thread;
    for (int32_t row = task * job->task_rows; row < task_end(job, task); row++) {
        forward->kernels->add(forward->type, row_of(forward, forward->residual, row, hidden),
                              row_of(forward, forward->site_output, row, hidden), hidden);
        norm_row(job, row);
    }
}

static void silu_task(void *user, int32_t task, int32_t thread)
{
    const row_job *job = user;
    sp_forward *forward = job->forward;
    int64_t width = forward->model->shape.intermediate;

    (void)thread;
    for (int32_t row = task * job->task_rows; row < task_end(job, task); row++) {
        void *gate = row_of(forward, forward->gate, row, width);

        forward->kernels->silu_mul(forward->type, gate, gate,
                                   row_of(forward, forward->up, row, width), width);
    }
}

/* ---- attention ----------------------------------------------------------------------------- */

/* Copies one head vector of a row into the cache. */
static void store_head(const sp_forward *forward, void *block, const void *vector, int32_t page,
                       int32_t head, int32_t token_in_page)
{
    memcpy((char *)block + sp_kv_cache_offset(forward->cache, page, head, token_in_page), vector,
           (size_t)forward->model->shape.head_dim * sp_dtype_bytes(forward->type));
}

/* q, k: per-head norm and RoPE; k and v go to the cache. */
static void rope_task(void *user, int32_t task, int32_t thread)
{
    const row_job *job = user;
    sp_forward *forward = job->forward;
    const sp_model_shape *shape = &forward->model->shape;
    const sp_kernels *kernels = forward->kernels;
    int32_t d = shape->head_dim;
    int32_t page_tokens = forward->cache->page_tokens;
    void *keys = sp_kv_cache_keys(forward->cache, job->layer);
    void *values = sp_kv_cache_values(forward->cache, job->layer);
    float offset = norm_offset(shape);

    (void)thread;
    for (int32_t row = task * job->task_rows; row < task_end(job, task); row++) {
        const sp_sequence *sequence = job->batch->entries[forward->row_entry[row]].sequence;
        int32_t position = forward->row_position[row];
        int32_t page = sequence->pages[position / page_tokens];
        const float *cosine =
            forward->rope->cosine + (size_t)position * (size_t)forward->rope->n_rot;
        const float *sine = forward->rope->sine + (size_t)position * (size_t)forward->rope->n_rot;

        for (int32_t h = 0; h < shape->q_heads; h++)
            kernels->rmsnorm_rope(forward->type,
                                  row_of(forward, forward->q, row * shape->q_heads + h, d),
                                  job->weights->q_norm, offset, d, shape->rms_norm_eps, cosine,
                                  sine, forward->rope->n_rot);
        for (int32_t h = 0; h < shape->kv_heads; h++) {
            void *k = row_of(forward, forward->k, row * shape->kv_heads + h, d);
            void *v = row_of(forward, forward->v, row * shape->kv_heads + h, d);

            kernels->rmsnorm_rope(forward->type, k, job->weights->k_norm, offset, d,
                                  shape->rms_norm_eps, cosine, sine, forward->rope->n_rot);
            store_head(forward, keys, k, page, h, position % page_tokens);
            store_head(forward, values, v, page, h, position % page_tokens);
        }
    }
}

/* One kv head of one attention item. */
static void attention_task(void *user, int32_t task, int32_t thread)
{
    const row_job *job = user;
    sp_forward *forward = job->forward;
    const sp_model_shape *shape = &forward->model->shape;
    const sp_attention_item *item = &forward->items[task / shape->kv_heads];
    int32_t kv_head = task % shape->kv_heads;
    int32_t group = shape->q_heads / shape->kv_heads;
    int32_t first_head = item->row * shape->q_heads + kv_head * group;
    sp_attention_args args = {
        .type = forward->type,
        .n_rows = item->n_rows,
        .first_position = item->first_position,
        .group = group,
        .head_dim = shape->head_dim,
        .kv_heads = shape->kv_heads,
        .kv_head = kv_head,
        .page_tokens = forward->cache->page_tokens,
        .scale = (float)(1.0 / sqrt((double)shape->head_dim)),
        .q = row_of(forward, forward->q, first_head, shape->head_dim),
        .q_stride = q_width(shape),
        .out = row_of(forward, forward->attended, first_head, shape->head_dim),
        .out_stride = q_width(shape),
        .k_cache = sp_kv_cache_keys(forward->cache, job->layer),
        .v_cache = sp_kv_cache_values(forward->cache, job->layer),
        .pages = item->pages,
        .scratch = forward->attention_scratch + (size_t)thread * forward->attention_scratch_floats,
    };

    forward->kernels->attention(&args);
}

static sp_status attention_block(row_job *job)
{
    sp_forward *forward = job->forward;
    const sp_model_shape *shape = &forward->model->shape;
    const sp_layer_weights *w = job->weights;
    const sp_projection inputs[] = {
        {w->sites.q, w->q, w->q_bias, forward->q, q_width(shape)},
        {w->sites.k, w->k, w->k_bias, forward->k, kv_width(shape)},
        {w->sites.v, w->v, w->v_bias, forward->v, kv_width(shape)},
    };
    const sp_projection output = {w->sites.o, w->o, w->o_bias, forward->site_output, shape->hidden};
    sp_status status = sp_project(forward, forward->hidden, shape->hidden, inputs, 3);

    if (status != SP_OK)
        return status;
    run_rows(job, rope_task);
    sp_exec_run(forward->exec, attention_task, job, forward->n_items * shape->kv_heads);
    return sp_project(forward, forward->attended, q_width(shape), &output, 1);
}

static sp_status ffn_block(row_job *job)
{
    sp_forward *forward = job->forward;
    const sp_model_shape *shape = &forward->model->shape;
    const sp_layer_weights *w = job->weights;
    const sp_projection inputs[] = {
        {w->sites.gate, w->gate, NULL, forward->gate, shape->intermediate},
        {w->sites.up, w->up, NULL, forward->up, shape->intermediate},
    };
    const sp_projection output = {w->sites.down, w->down, NULL, forward->site_output,
                                  shape->hidden};
    sp_status status = sp_project(forward, forward->hidden, shape->hidden, inputs, 2);

    if (status != SP_OK)
        return status;
    run_rows(job, silu_task);
    return sp_project(forward, forward->gate, shape->intermediate, &output, 1);
}

/* ---- the pass ------------------------------------------------------------------------------ */

static sp_status embed_block(row_job *job)
{
    sp_forward *forward = job->forward;
    const sp_delta_embed_call call = {
        .struct_bytes = sizeof call,
        .plan = forward->plan,
        .tokens = forward->row_token,
        .y = forward->residual,
        .y_stride = forward->model->shape.hidden,
    };
    double began;
    sp_status status;

    if (!forward->delta || !sp_delta_has_tokens(forward->delta, SP_SITE_EMBEDDING)) {
        run_rows(job, embed_task);
        return SP_OK;
    }
    run_rows(job, gather_task);
    began = sp_clock_seconds();
    status = sp_delta_embed(forward->delta, &call, NULL);
    forward->delta_seconds += sp_clock_seconds() - began;
    run_rows(job, norm_task);
    return status;
}

sp_status sp_forward_run(sp_forward *forward, const sp_batch *batch, const sp_plan *plan)
{
    const sp_model *model = forward->model;
    row_job job = {.forward = forward, .batch = batch, .norm = model->layers[0].input_norm};
    sp_status status;

    forward->plan = plan;
    lay_out_rows(forward, batch);
    status = embed_block(&job);
    if (status != SP_OK)
        return status;
    for (int32_t layer = 0; layer < model->shape.layers; layer++) {
        job.layer = layer;
        job.weights = &model->layers[layer];
        status = attention_block(&job);
        if (status != SP_OK)
            return status;
        job.norm = job.weights->post_norm;
        run_rows(&job, add_and_norm_task);
        status = ffn_block(&job);
        if (status != SP_OK)
            return status;
        job.norm = layer + 1 < model->shape.layers ? model->layers[layer + 1].input_norm
                                                   : model->final_norm;
        run_rows(&job, add_and_norm_task);
    }
    return SP_OK;
}

/* What the rows' adapters do to their logits. `site_output` is free after a pass. */
static sp_status adapt_logits(sp_forward *forward, const int32_t *rows, int32_t n_rows)
{
    int64_t hidden = forward->model->shape.hidden;
    size_t row_bytes = (size_t)hidden * sp_dtype_bytes(forward->type);
    const sp_delta_head_call call = {
        .struct_bytes = sizeof call,
        .plan = forward->head_plan,
        .x = forward->site_output,
        .x_stride = hidden,
        .x_type = forward->type,
        .logits = forward->logits,
        .logits_stride = forward->model->shape.vocab,
        .logits_type = SP_DTYPE_F32,
    };
    sp_status status = sp_plan_select(forward->head_plan, forward->plan, rows, n_rows, NULL);

    if (status != SP_OK)
        return status;
    for (int32_t i = 0; i < n_rows; i++)
        memcpy(row_of(forward, forward->site_output, i, hidden),
               row_of(forward, forward->hidden, rows[i], hidden), row_bytes);
    return sp_delta_head(forward->delta, &call, NULL);
}

sp_status sp_forward_logits(sp_forward *forward, const int32_t *rows, int32_t n_rows)
{
    double began;
    sp_status status;
    const sp_model_shape *shape = &forward->model->shape;
    sp_gemm_args args = {
        .packed_x = forward->packed,
        .x_type = forward->type,
        .w_type = SP_DTYPE_BF16,
        .y_type = SP_DTYPE_F32,
        .epilogue = SP_EPILOGUE_STORE,
        .rows = n_rows,
        .n = shape->vocab,
        .k = shape->hidden,
        .w = forward->model->head,
        .w_stride = shape->hidden,
        .y = forward->logits,
        .y_stride = shape->vocab,
    };

    sp_gemm_pack(forward->kernels, forward->exec, forward->packed, forward->type, SP_DTYPE_BF16,
                 forward->hidden, shape->hidden, rows, n_rows, shape->hidden);
    sp_gemm_run(forward->kernels, forward->exec, &args, 1);
    if (!forward->delta || !sp_delta_has_tokens(forward->delta, SP_SITE_HEAD))
        return SP_OK;
    began = sp_clock_seconds();
    status = adapt_logits(forward, rows, n_rows);
    forward->delta_seconds += sp_clock_seconds() - began;
    return status;
}
