/* cpu_attention.c: keys and values into the cache, and attention over it. */
#include "base/assert.h"
#include "engine/ops/cpu_ops.h"

#include <string.h>

/* ---- RoPE and the cache -------------------------------------------------------------------- */

/* One head of a row: element [row, head] of an activation. */
static void *head_of(const sp_cpu_ops *cpu, sp_rows rows, int32_t row, int32_t head)
{
    return (char *)sp_cpu_row(cpu, rows, row) +
           (size_t)head * (size_t)cpu->attention.head_dim * sp_dtype_bytes(cpu->type);
}

static void rotate(const sp_cpu_ops *cpu, const sp_norm *norm, void *head, int32_t position)
{
    const sp_rope *rope = &cpu->rope;
    const float *cosine = rope->cosine + (size_t)position * (size_t)rope->n_rot;
    const float *sine = rope->sine + (size_t)position * (size_t)rope->n_rot;

    if (norm)
        cpu->kernels->rmsnorm_rope(cpu->type, head, norm->weight.placed, norm->offset,
                                   cpu->attention.head_dim, norm->eps, cosine, sine, rope->n_rot);
    else
        cpu->kernels->rope(cpu->type, head, cosine, sine, rope->n_rot);
}

/* Copies one head vector of a row into the cache. */
static void store_head(const sp_cpu_ops *cpu, void *block, const void *vector, int32_t page,
                       int32_t head, int32_t token_in_page)
{
    memcpy((char *)block + sp_kv_cache_offset(&cpu->cache, page, head, token_in_page), vector,
           (size_t)cpu->attention.head_dim * sp_dtype_bytes(cpu->type));
}

static void rope_row(const sp_cpu_ops *cpu, const void *user, int32_t row)
{
    const sp_rope_call *call = user;
    int32_t page_tokens = cpu->cache.page_tokens;
    int32_t position = cpu->row_position[row];
    int32_t page = cpu->row_pages[row][position / page_tokens];
    void *keys = sp_kv_cache_keys(&cpu->cache, call->layer);
    void *values = sp_kv_cache_values(&cpu->cache, call->layer);
    size_t head_bytes = (size_t)cpu->attention.head_dim * sp_dtype_bytes(cpu->type);

    for (int32_t h = 0; h < cpu->attention.q_heads; h++) {
        void *q = head_of(cpu, call->q, row, h);

        if (call->gated)
            memcpy(q, head_of(cpu, call->q_gate, row, 2 * h), head_bytes);
        if (!call->unrotated)
            rotate(cpu, call->q_norm, q, position);
    }
    for (int32_t h = 0; h < cpu->attention.kv_heads; h++) {
        void *k = head_of(cpu, call->k, row, h);

        if (!call->unrotated)
            rotate(cpu, call->k_norm, k, position);
        store_head(cpu, keys, k, page, h, position % page_tokens);
        store_head(cpu, values, head_of(cpu, call->v, row, h), page, h, position % page_tokens);
    }
}

sp_status sp_cpu_rope_and_cache(sp_ops *ops, const sp_rope_call *call)
{
    SP_ASSERT(!call->unrotated || (!call->q_norm && !call->k_norm));
    sp_cpu_each_row((sp_cpu_ops *)ops, rope_row, call);
    return SP_OK;
}

/* Attention reads no key beyond a row's own. */
sp_status sp_cpu_faults(sp_ops *ops, bool *out_faults, int32_t n_spans)
{
    (void)ops;
    memset(out_faults, 0, (size_t)n_spans * sizeof *out_faults);
    return SP_OK;
}

/* ---- attention ----------------------------------------------------------------------------- */

typedef struct attention_job {
    const sp_cpu_ops *cpu;
    sp_rows q, y;
    int32_t layer;
} attention_job;

/* The task of one kv head of one attention item. */
static void attention_task(void *user, int32_t task, int32_t thread)
{
    const attention_job *job = user;
    const sp_cpu_ops *cpu = job->cpu;
    const sp_attention_shape *shape = &cpu->attention;
    const sp_attention_item *item = &cpu->items[task / shape->kv_heads];
    int32_t kv_head = task % shape->kv_heads;
    int32_t group = shape->q_heads / shape->kv_heads;
    sp_attention_args args = {
        .type = cpu->type,
        .n_rows = item->n_rows,
        .first_position = item->first_position,
        .group = group,
        .head_dim = shape->head_dim,
        .kv_heads = shape->kv_heads,
        .kv_head = kv_head,
        .page_tokens = cpu->cache.page_tokens,
        .scale = shape->scale,
        .q = head_of(cpu, job->q, item->row, kv_head * group),
        .q_stride = cpu->widths[job->q],
        .out = head_of(cpu, job->y, item->row, kv_head * group),
        .out_stride = cpu->widths[job->y],
        .k_cache = sp_kv_cache_keys(&cpu->cache, job->layer),
        .v_cache = sp_kv_cache_values(&cpu->cache, job->layer),
        .pages = item->pages,
        .scratch = cpu->attention_scratch + (size_t)thread * cpu->attention_scratch_floats,
    };

    cpu->kernels->attention(&args);
}

sp_status sp_cpu_attention(sp_ops *ops, sp_rows q, int32_t layer, sp_rows y)
{
    sp_cpu_ops *cpu = (sp_cpu_ops *)ops;
    attention_job job = {.cpu = cpu, .q = q, .y = y, .layer = layer};

    sp_exec_run(cpu->exec, attention_task, &job, cpu->n_items * cpu->attention.kv_heads);
    return SP_OK;
}

/* ---- the gate of the output ---------------------------------------------------------------- */

typedef struct gate_args {
    sp_rows y, q_gate;
} gate_args;

static void gate_row(const sp_cpu_ops *cpu, const void *user, int32_t row)
{
    const gate_args *args = user;

    for (int32_t h = 0; h < cpu->attention.q_heads; h++)
        cpu->kernels->sigmoid_mul(cpu->type, head_of(cpu, args->y, row, h),
                                  head_of(cpu, args->q_gate, row, 2 * h + 1),
                                  cpu->attention.head_dim);
}

sp_status sp_cpu_gate_heads(sp_ops *ops, sp_rows y, sp_rows q_gate)
{
    const gate_args args = {y, q_gate};

    sp_cpu_each_row((sp_cpu_ops *)ops, gate_row, &args);
    return SP_OK;
}
