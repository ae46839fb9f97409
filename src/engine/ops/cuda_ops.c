#include "engine/ops/cuda_ops.h"

#include "base/alloc.h"
#include "base/assert.h"
#include "base/error.h"
#include "device/device_cuda.h"
#include "engine/ops/rope.h"
#include "kernels/cuda/kernels_cuda.h"

sp_status sp_cuda_launched(const sp_cuda_ops *cuda, int code, const char *what)
{
    return sp_device_cuda_status(cuda->device, code, what);
}

/* ---- memory -------------------------------------------------------------------------------- */

/* Makes room for one more pointer; false: out of memory. */
static bool grow(void ***list, size_t n, size_t *io_capacity)
{
    size_t capacity = *io_capacity ? 2 * *io_capacity : 64;
    void **grown;

    if (n < *io_capacity)
        return true;
    grown = sp_realloc(*list, capacity * sizeof *grown);
    if (!grown)
        return false;
    *list = grown;
    *io_capacity = capacity;
    return true;
}

void *sp_cuda_block(sp_cuda_ops *cuda, size_t bytes, sp_status *status, sp_error *error)
{
    void *memory = NULL;

    if (*status != SP_OK)
        return NULL;
    if (!grow(&cuda->blocks, cuda->n_blocks, &cuda->blocks_capacity))
        *status = sp_fail_memory(error, sizeof(void *), "a list of device memory");
    else
        *status = sp_device_alloc(cuda->device, bytes ? bytes : 1, &memory, error);
    if (*status != SP_OK)
        return NULL;
    cuda->blocks[cuda->n_blocks++] = memory;
    return memory;
}

void *sp_cuda_pinned(sp_cuda_ops *cuda, size_t bytes, sp_status *status, sp_error *error)
{
    void *memory = NULL;

    if (*status != SP_OK)
        return NULL;
    if (!grow(&cuda->pinned, cuda->n_pinned, &cuda->pinned_capacity))
        *status = sp_fail_memory(error, sizeof(void *), "a list of pinned memory");
    else
        *status = sp_device_alloc_pinned(cuda->device, bytes ? bytes : 1, &memory, error);
    if (*status != SP_OK)
        return NULL;
    cuda->pinned[cuda->n_pinned++] = memory;
    return memory;
}

/* ---- sizes --------------------------------------------------------------------------------- */

static int32_t window_of(const sp_ops_options *options)
{
    return options->rows_max < SP_LOGIT_ROWS_MAX ? options->rows_max : SP_LOGIT_ROWS_MAX;
}

static sp_cuda_attention_shape attention_of(const sp_ops_options *options)
{
    return (sp_cuda_attention_shape){
        .q_heads = options->attention.q_heads,
        .kv_heads = options->attention.kv_heads,
        .head_dim = options->attention.head_dim,
        .scale = options->attention.scale,
        .rows_max = options->rows_max,
        .spans_max = options->spans_max,
        .positions_max = options->rope.positions,
    };
}

static sp_dtype type_of(const sp_ops_options *options, int32_t rows)
{
    return options->fp32_rows & SP_ROWS_BIT(rows) ? SP_DTYPE_F32 : SP_DTYPE_BF16;
}

static size_t rope_bytes(const sp_ops_options *options)
{
    return 2 * (size_t)options->rope.n_rot * (size_t)options->rope.positions * sizeof(float);
}

/* Of the device; pinned memory is as large as the tables and the window. */
static size_t scratch_bytes(const sp_ops_options *options)
{
    size_t window = (size_t)window_of(options);
    size_t bytes = sp_cuda_tables_bytes(options) + rope_bytes(options);
    size_t row = 0;

    for (int32_t i = 0; i < options->n_widths; i++)
        row += (size_t)options->widths[i] * sp_dtype_bytes(type_of(options, i));
    bytes += (size_t)options->rows_max * row + sp_cuda_moe_bytes(options);
    bytes += sp_cuda_rule_bytes(options);
    bytes += window * ((size_t)options->vocab * sizeof(float) +
                       (size_t)options->hidden * sizeof(uint16_t) + 3 * sizeof(int32_t));
    bytes += sp_cuda_samples_bytes(window_of(options), options->vocab, options->rope.positions);
    return bytes;
}

/* Heads in the pages are as wide as the kernels read them. */
static sp_attention_shape cached_shape(const sp_attention_shape *shape)
{
    sp_attention_shape cached = *shape;

    cached.head_dim = sp_cuda_page_dim(shape->head_dim);
    return cached;
}

static size_t kv_token_bytes(const sp_attention_shape *shape, sp_dtype type)
{
    const sp_attention_shape cached = cached_shape(shape);

    return sp_kv_token_bytes(&cached, type);
}

/* ---- life ---------------------------------------------------------------------------------- */

static void destroy(sp_ops *ops)
{
    sp_cuda_ops *cuda = (sp_cuda_ops *)ops;

    if (cuda->stream)
        (void)sp_stream_wait(cuda->stream, NULL);
    for (int32_t i = 0; i < cuda->n_graphs; i++)
        sp_graph_destroy(cuda->graphs[i].graph);
    sp_cuda_uploader_destroy(cuda->uploader);
    sp_cuda_tables_destroy(cuda);
    sp_cuda_moe_destroy(cuda);
    sp_event_destroy(cuda->window.index_read);
    sp_event_destroy(cuda->fork);
    sp_event_destroy(cuda->join);
    sp_stream_destroy(cuda->side);
    if (cuda->gemm)
        (void)cuda->kernels.base_gemm_close(cuda->gpu, cuda->gemm);
    sp_kv_cache_destroy(&cuda->cache);
    for (size_t i = 0; i < cuda->n_blocks; i++)
        sp_device_free(cuda->device, cuda->blocks[i]);
    for (size_t i = 0; i < cuda->n_pinned; i++)
        sp_device_free_pinned(cuda->device, cuda->pinned[i]);
    sp_free(cuda->blocks);
    sp_free(cuda->pinned);
    sp_plan_destroy(cuda->capture_plan);
    sp_plan_destroy(cuda->head_plan);
    sp_host_choice_destroy(&cuda->choice);
    sp_free(cuda);
}

static sp_status create_activations(sp_cuda_ops *cuda, const sp_ops_options *options,
                                    sp_error *error)
{
    sp_status status = SP_OK;
    size_t bytes = 0;

    for (int32_t i = 0; i < options->n_widths; i++) {
        cuda->widths[i] = options->widths[i];
        cuda->types[i] = type_of(options, i);
        cuda->rows[i] = sp_cuda_block(cuda,
                                      (size_t)options->rows_max * (size_t)options->widths[i] *
                                          sp_dtype_bytes(cuda->types[i]),
                                      &status, error);
    }
    if (status == SP_OK)
        status = sp_cuda_launched(
            cuda, cuda->kernels.attention_bytes(cuda->gpu, &cuda->attention, &bytes),
            "sizing attention");
    cuda->attention_scratch = sp_cuda_block(cuda, bytes, &status, error);
    cuda->fault =
        sp_cuda_block(cuda, (size_t)options->spans_max * sizeof *cuda->fault, &status, error);
    cuda->host_fault =
        sp_cuda_pinned(cuda, (size_t)options->spans_max * sizeof *cuda->fault, &status, error);
    cuda->ops.scratch_bytes += bytes;
    return status;
}

static sp_status create_window(sp_cuda_ops *cuda, const sp_ops_options *options, sp_error *error)
{
    sp_cuda_window *window = &cuda->window;
    size_t rows = (size_t)cuda->ops.window, index = rows * sizeof(int32_t);
    size_t logits = rows * (size_t)cuda->vocab * sizeof(float);
    sp_status status = SP_OK;

    window->logits = sp_cuda_block(cuda, logits, &status, error);
    window->x = sp_cuda_block(cuda, rows * (size_t)cuda->hidden * sizeof(uint16_t), &status, error);
    window->index = sp_cuda_block(cuda, index, &status, error);
    window->token = sp_cuda_block(cuda, index, &status, error);
    window->bad = sp_cuda_block(cuda, index, &status, error);
    window->greedy_scratch =
        sp_cuda_block(cuda, sp_cuda_greedy_bytes(cuda->ops.window), &status, error);
    window->host_logits = sp_cuda_pinned(cuda, logits, &status, error);
    window->host_index = sp_cuda_pinned(cuda, index, &status, error);
    window->host_token = sp_cuda_pinned(cuda, index, &status, error);
    window->host_bad = sp_cuda_pinned(cuda, index, &status, error);
    if (status == SP_OK)
        status = sp_event_create(cuda->device, &window->index_read, error);
    if (status == SP_OK && !sp_host_choice_create(options, cuda->ops.window, &cuda->choice))
        status = sp_fail_memory(error, sp_host_choice_bytes(options, cuda->ops.window),
                                "choosing tokens");
    cuda->choice.exact = true;
    return status == SP_OK ? sp_cuda_samples_create(cuda, error) : status;
}

static sp_status create_rope(sp_cuda_ops *cuda, const sp_rope_shape *shape, sp_error *error)
{
    sp_rope rope;
    sp_status status = sp_rope_create(shape, &rope);

    if (status != SP_OK)
        return sp_fail(error, SP_ERR_MEMORY, NULL, "max-context", -1,
                       "out of memory for the rotary tables of %d positions; lower max-context",
                       shape->positions);
    cuda->n_rot = rope.n_rot;
    cuda->cosine = sp_cuda_block(cuda, rope.bytes, &status, error);
    cuda->sine = cuda->cosine + (rope.sine - rope.cosine);
    if (status == SP_OK)
        status = sp_device_write(cuda->device, cuda->cosine, rope.cosine, rope.bytes, error);
    sp_rope_destroy(&rope);
    return status;
}

static sp_status create_plans(sp_cuda_ops *cuda, const sp_ops_options *options, sp_error *error)
{
    sp_status status = SP_OK;

    if (!cuda->delta)
        return SP_OK;
    SP_ASSERT(cuda->head_delta);
    status = sp_stream_create(cuda->device, &cuda->side, error);
    if (status == SP_OK)
        status = sp_event_create(cuda->device, &cuda->fork, error);
    if (status == SP_OK)
        status = sp_event_create(cuda->device, &cuda->join, error);
    if (status == SP_OK)
        status = sp_plan_create(cuda->ops.window, options->slots, &cuda->head_plan, error);
    return status == SP_OK
               ? sp_plan_create(SP_CUDA_GRAPH_ROWS, options->slots, &cuda->capture_plan, error)
               : status;
}

static sp_status check_options(const sp_ops_options *options, sp_error *error)
{
    if (options->type != SP_DTYPE_BF16)
        return sp_fail(error, SP_ERR_UNSUPPORTED, "engine-unsupported", "precision", -1,
                       "a GPU runs bf16 only; f32 runs on the CPU");
    if (options->page_tokens != SP_CUDA_PAGE)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "page-tokens", -1,
                       "page-tokens must be %d on a GPU", SP_CUDA_PAGE);
    return SP_OK;
}

static sp_status create_parts(sp_cuda_ops *cuda, const sp_ops_options *options, sp_error *error)
{
    const sp_attention_shape cached = cached_shape(&options->attention);
    /* Resolving these prepares the GPU for all kernels. */
    sp_status status = sp_kernels_cuda_get(cuda->device, &cuda->shared, error);

    if (status == SP_OK)
        status = sp_ops_cuda_get(cuda->device, &cuda->kernels, error);
    if (status == SP_OK)
        status = sp_cuda_launched(cuda, cuda->kernels.base_gemm_open(cuda->gpu, &cuda->gemm),
                                  "opening the base's GEMMs");
    if (status == SP_OK)
        status = create_activations(cuda, options, error);
    if (status == SP_OK)
        status = sp_cuda_moe_create(cuda, options, error);
    if (status == SP_OK)
        status = sp_cuda_rule_create(cuda, options, error);
    if (status == SP_OK)
        status = create_window(cuda, options, error);
    if (status == SP_OK)
        status = create_rope(cuda, &options->rope, error);
    if (status == SP_OK)
        status = sp_cuda_tables_create(cuda, error);
    if (status == SP_OK)
        status = create_plans(cuda, options, error);
    if (status == SP_OK)
        status = sp_kv_cache_create(cuda->device, &cached, options->type, options->kv_pages,
                                    options->page_tokens, false, &cuda->cache, error);
    cuda->ops.kv_bytes = cuda->cache.bytes;
    return status;
}

static sp_status create(const sp_ops_options *options, sp_ops **out_ops, sp_error *error)
{
    sp_status status = check_options(options, error);
    sp_cuda_ops *cuda;

    SP_ASSERT(options->n_widths > 0 && options->n_widths <= SP_ROWS_MAX);
    SP_ASSERT(options->rows_max > 0 && options->spans_max > 0);
    if (status != SP_OK)
        return status;
    cuda = sp_calloc(1, sizeof *cuda);
    if (!cuda)
        return sp_fail_memory(error, sizeof *cuda, "the operations of a step");
    cuda->ops.table = &sp_cuda_op_table;
    cuda->ops.window = window_of(options);
    cuda->ops.scratch_bytes = scratch_bytes(options);
    cuda->device = options->device;
    cuda->gpu = sp_device_cuda_index(options->device);
    cuda->stream = sp_device_main_stream(options->device);
    cuda->native = sp_stream_native(cuda->stream);
    cuda->delta = options->delta;
    cuda->head_delta = options->head_delta;
    cuda->rows_max = options->rows_max;
    cuda->spans_max = options->spans_max;
    cuda->hidden = options->hidden;
    cuda->vocab = options->vocab;
    cuda->eager = options->eager;
    cuda->free_gemm = options->free_gemm;
    cuda->attention = attention_of(options);
    status = create_parts(cuda, options, error);
    if (status != SP_OK) {
        destroy(&cuda->ops);
        return status;
    }
    *out_ops = &cuda->ops;
    return SP_OK;
}

const sp_op_table sp_cuda_op_table = {
    .scratch_bytes = scratch_bytes,
    .kv_token_bytes = kv_token_bytes,
    .state_bytes = sp_cuda_state_bytes,
    .snapshot_bytes = sp_cuda_snapshot_bytes,
    .create = create,
    .destroy = destroy,
    .place = sp_cuda_op_place,
    .prepare = sp_cuda_op_prepare,
    .step = sp_cuda_op_step,
    .embed = sp_cuda_op_embed,
    .norm = sp_cuda_op_norm,
    .add_norm = sp_cuda_op_add_norm,
    .linear = sp_cuda_op_linear,
    .rope_and_cache = sp_cuda_op_rope_and_cache,
    .attention = sp_cuda_op_attention,
    .gate_heads = sp_cuda_op_gate_heads,
    .delta_rule = sp_cuda_op_delta_rule,
    .silu_mul = sp_cuda_op_silu_mul,
    .route = sp_cuda_op_route,
    .experts = sp_cuda_op_experts,
    .add_gated = sp_cuda_op_add_gated,
    .faults = sp_cuda_op_faults,
    .read_routing = sp_cuda_op_read_routing,
    .logits = sp_cuda_op_logits,
    .choose = sp_cuda_op_choose,
    .score = sp_cuda_op_score,
    .read_logits = sp_cuda_op_read_logits,
};
