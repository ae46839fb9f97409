#include "engine/ops/cpu_ops.h"

#include "base/alloc.h"
#include "base/assert.h"
#include "base/error.h"

/* ---- sizes --------------------------------------------------------------------------------- */

static size_t largest(size_t a, size_t b)
{
    return a > b ? a : b;
}

typedef struct scratch_sizes {
    size_t row; /* of a row's activations and of the step's description of it */
    size_t packed, logits, logit_rows, attention, choice;
    size_t attention_floats; /* of one thread */
} scratch_sizes;

static sp_dtype type_of(const sp_ops_options *options, int32_t rows)
{
    return options->fp32_rows & SP_ROWS_BIT(rows) ? SP_DTYPE_F32 : options->type;
}

static scratch_sizes sizes_of(const sp_ops_options *options)
{
    const sp_attention_shape *attention = &options->attention;
    const sp_kernels *kernels = options->kernels;
    size_t element = sp_dtype_bytes(options->type);
    size_t vocab_row = (size_t)options->vocab * sizeof(float);
    int32_t threads = sp_exec_threads(options->exec);
    scratch_sizes sizes = {
        .row = 3 * sizeof(int32_t) + sizeof(int32_t *) + sizeof(sp_attention_item),
        .logits = SP_CPU_WINDOW * vocab_row,
        .logit_rows = SP_CPU_WINDOW * (size_t)options->hidden * element,
        .choice = sp_host_choice_bytes(options, SP_CPU_WINDOW),
        .attention_floats = kernels->attention_scratch_floats(
            attention->q_heads / attention->kv_heads, attention->head_dim),
    };

    for (int32_t i = 0; i < options->n_widths; i++) {
        sizes.row += (size_t)options->widths[i] * sp_dtype_bytes(type_of(options, i));
        sizes.packed =
            largest(sizes.packed, kernels->x_pack_bytes(options->type, SP_DTYPE_BF16,
                                                        options->rows_max, options->widths[i]));
    }
    sizes.attention = sizes.attention_floats * sizeof(float) * (size_t)threads;
    return sizes;
}

static size_t scratch_bytes(const sp_ops_options *options)
{
    scratch_sizes sizes = sizes_of(options);

    return (size_t)options->rows_max * sizes.row + sizes.packed + sizes.logits + sizes.logit_rows +
           sizes.attention + sizes.choice + sp_cpu_experts_bytes(options) +
           sp_cpu_states_scratch_bytes(options);
}

/* ---- life ---------------------------------------------------------------------------------- */

static void destroy(sp_ops *ops)
{
    sp_cpu_ops *cpu = (sp_cpu_ops *)ops;
    void *buffers[] = {cpu->packed,
                       cpu->attention_scratch,
                       cpu->logits,
                       cpu->logit_rows,
                       cpu->row_position,
                       cpu->row_token,
                       cpu->row_span,
                       cpu->items,
                       (void *)(uintptr_t)cpu->row_pages};

    for (size_t i = 0; i < sizeof buffers / sizeof buffers[0]; i++)
        sp_aligned_free(buffers[i]);
    for (size_t i = 0; i < SP_ROWS_MAX; i++)
        sp_aligned_free(cpu->rows[i]);
    sp_free(cpu->deferred);
    sp_free(cpu->strip_done);
    sp_cpu_experts_destroy(cpu);
    sp_cpu_states_destroy(cpu);
    sp_host_choice_destroy(&cpu->choice);
    sp_plan_destroy(cpu->head_plan);
    sp_kv_cache_destroy(&cpu->cache);
    sp_rope_destroy(&cpu->rope);
    sp_free(cpu);
}

/* NULL and *failed = true without memory. */
static void *buffer(size_t bytes, bool *failed)
{
    void *memory = sp_aligned_calloc(bytes ? bytes : 64, 64);

    if (!memory)
        *failed = true;
    return memory;
}

static sp_status allocate(sp_cpu_ops *cpu, const sp_ops_options *options, sp_error *error)
{
    scratch_sizes sizes = sizes_of(options);
    size_t rows = (size_t)cpu->rows_max;
    size_t pieces = (size_t)sp_cpu_linear_pieces_max(sp_exec_threads(cpu->exec));
    bool failed = false;

    cpu->attention_scratch_floats = sizes.attention_floats;
    for (int32_t i = 0; i < options->n_widths; i++) {
        size_t row_bytes = (size_t)options->widths[i] * sp_dtype_bytes(type_of(options, i));

        cpu->widths[i] = options->widths[i];
        cpu->types[i] = type_of(options, i);
        cpu->rows[i] = buffer(rows * row_bytes, &failed);
    }
    cpu->row_position = buffer(rows * sizeof *cpu->row_position, &failed);
    cpu->row_token = buffer(rows * sizeof *cpu->row_token, &failed);
    cpu->row_span = buffer(rows * sizeof *cpu->row_span, &failed);
    cpu->row_pages = buffer(rows * sizeof *cpu->row_pages, &failed);
    cpu->items = buffer(rows * sizeof *cpu->items, &failed);
    cpu->packed = buffer(sizes.packed, &failed);
    cpu->attention_scratch = buffer(sizes.attention, &failed);
    cpu->logits = buffer(sizes.logits, &failed);
    cpu->logit_rows = buffer(sizes.logit_rows, &failed);
    failed |= !sp_host_choice_create(options, SP_CPU_WINDOW, &cpu->choice);
    failed |= !sp_cpu_experts_create(cpu, options);
    cpu->deferred = sp_calloc(pieces, sizeof *cpu->deferred);
    cpu->strip_done = sp_calloc(pieces, sizeof *cpu->strip_done);
    cpu->ops.scratch_bytes = scratch_bytes(options);
    if (failed || !cpu->deferred || !cpu->strip_done)
        return sp_fail(error, SP_ERR_MEMORY, NULL, "step-rows", -1,
                       "the activations of %d rows need %zu MiB; lower step-rows", cpu->rows_max,
                       cpu->ops.scratch_bytes >> 20);
    return SP_OK;
}

static sp_status create_rope(sp_cpu_ops *cpu, const sp_rope_shape *shape, sp_error *error)
{
    if (sp_rope_create(shape, &cpu->rope) != SP_OK)
        return sp_fail(error, SP_ERR_MEMORY, NULL, "max-context", -1,
                       "out of memory for the rotary tables of %d positions; lower max-context",
                       shape->positions);
    cpu->ops.scratch_bytes += cpu->rope.bytes;
    return SP_OK;
}

static sp_status create(const sp_ops_options *options, sp_ops **out_ops, sp_error *error)
{
    sp_cpu_ops *cpu = sp_calloc(1, sizeof *cpu);
    sp_status status;

    SP_ASSERT(options->n_widths > 0 && options->n_widths <= SP_ROWS_MAX);
    SP_ASSERT(options->rows_max > 0 && options->attention.kv_heads > 0);
    if (!cpu)
        return sp_fail_memory(error, sizeof *cpu, "the operations of a step");
    cpu->ops.table = &sp_cpu_op_table;
    cpu->ops.window = SP_CPU_WINDOW;
    cpu->kernels = options->kernels;
    cpu->exec = options->exec;
    cpu->delta = options->delta;
    cpu->type = options->type;
    cpu->rows_max = options->rows_max;
    cpu->hidden = options->hidden;
    cpu->vocab = options->vocab;
    cpu->attention = options->attention;
    status =
        sp_kv_cache_create(options->device, &options->attention, options->type, options->kv_pages,
                           options->page_tokens, options->kv_resident, &cpu->cache, error);
    cpu->ops.kv_bytes = cpu->cache.bytes;
    if (status == SP_OK)
        status = allocate(cpu, options, error);
    if (status == SP_OK)
        status = sp_cpu_states_create(cpu, options, error);
    if (status == SP_OK)
        status = create_rope(cpu, &options->rope, error);
    if (status == SP_OK && cpu->delta)
        status = sp_plan_create(SP_CPU_WINDOW, options->slots, &cpu->head_plan, error);
    if (status != SP_OK) {
        destroy(&cpu->ops);
        return status;
    }
    *out_ops = &cpu->ops;
    return SP_OK;
}

/* The kernels read weights in the model's own memory. */
static sp_status place(sp_ops *ops, sp_weight *weight, sp_error *error)
{
    (void)ops;
    (void)error;
    weight->placed = weight->host;
    return SP_OK;
}

/* ---- a step -------------------------------------------------------------------------------- */

static void lay_out(sp_cpu_ops *cpu, const sp_step *step)
{
    int32_t row = 0;

    cpu->n_items = 0;
    for (int32_t s = 0; s < step->n_spans; s++) {
        const sp_step_span *span = &step->spans[s];

        for (int32_t i = 0; i < span->n_rows; i++, row++) {
            int32_t left = span->n_rows - i;

            if (i % SP_ATTENTION_ROWS == 0)
                cpu->items[cpu->n_items++] = (sp_attention_item){
                    .row = row,
                    .n_rows = left < SP_ATTENTION_ROWS ? left : SP_ATTENTION_ROWS,
                    .first_position = span->position + i,
                    .pages = span->pages,
                };
            cpu->row_position[row] = span->position + i;
            cpu->row_token[row] = span->tokens[i];
            cpu->row_span[row] = s;
            cpu->row_pages[row] = span->pages;
        }
    }
    cpu->spans = step->spans;
    cpu->n_spans = step->n_spans;
    cpu->n_rows = row;
}

static sp_status run_step(sp_ops *ops, const sp_step *step, sp_pass_fn pass, void *user)
{
    sp_cpu_ops *cpu = (sp_cpu_ops *)ops;

    SP_ASSERT(step->n_rows <= cpu->rows_max);
    lay_out(cpu, step);
    SP_ASSERT(cpu->n_rows == step->n_rows);
    cpu->plan = step->plan;
    cpu->experts.n_routed = 0;
    pass(user, ops);
    return ops->status;
}

const sp_op_table sp_cpu_op_table = {
    .scratch_bytes = scratch_bytes,
    .kv_token_bytes = sp_kv_token_bytes,
    .state_bytes = sp_cpu_state_bytes,
    .snapshot_bytes = sp_cpu_snapshot_bytes,
    .create = create,
    .destroy = destroy,
    .place = place,
    .step = run_step,
    .embed = sp_cpu_embed,
    .norm = sp_cpu_norm,
    .add_norm = sp_cpu_add_norm,
    .linear = sp_cpu_linear,
    .rope_and_cache = sp_cpu_rope_and_cache,
    .attention = sp_cpu_attention,
    .gate_heads = sp_cpu_gate_heads,
    .delta_rule = sp_cpu_delta_rule,
    .silu_mul = sp_cpu_silu_mul,
    .route = sp_cpu_route,
    .experts = sp_cpu_experts_run,
    .add_gated = sp_cpu_add_gated,
    .faults = sp_cpu_faults,
    .read_routing = sp_cpu_read_routing,
    .logits = sp_cpu_logits,
    .choose = sp_cpu_choose,
    .score = sp_cpu_score,
    .read_logits = sp_cpu_read_logits,
};
