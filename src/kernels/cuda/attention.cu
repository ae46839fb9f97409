/*
 * attention.cu: the launchers of paged attention: the plan (attention_plan.cu), then for each layer
 * a core (attention_narrow.cu) and the merge of what was split (attention_merge.cu).
 *
 * The scratch holds a page of zeros, which is never written, and for each core the plan and the
 * partial results; it is cut by the shape alone, whereas the grids depend on what is launched.
 */
#include "device/cuda/current.cuh"
#include "kernels/cuda/attention.cuh"

#define PARTIAL_BYTES                                                                     \
    (64 << 20)           /* of a core, at most: longer pieces are taken before it is more \
                          */
#define PIECES_EACH   2  /* for each block that runs at the same time, by splitting */
#define MERGE_BLOCKS  16 /* per multiprocessor */
#define POSITIONS_MAX (4096 * ATTENTION_CHUNK)

/* Query tiles of so many rows in so many spans. */
static int tiles_of(int rows, int spans, int tile)
{
    spans = spans < rows ? spans : rows;
    return spans + (rows - spans) / tile;
}

static int pieces_of(const attention_core *core, int rows, int spans, int kv_heads)
{
    return tiles_of(rows, spans, core->rows) + PIECES_EACH * core->blocks / kv_heads + 1;
}

static int partial_rows_of(const attention_core *core, const sp_cuda_attention_shape *shape)
{
    int64_t row_bytes =
        sp_cuda_page_dim(shape->head_dim) * (int64_t)sizeof(float) + (int64_t)sizeof(float2);
    int64_t chunks = shape->positions_max / ATTENTION_CHUNK + 2;
    int64_t all = tiles_of(shape->rows_max, shape->spans_max, core->rows) * chunks *
                  core->tile_rows * shape->kv_heads;

    return (int)(all < PARTIAL_BYTES / row_bytes ? all : PARTIAL_BYTES / row_bytes);
}

/* Takes `bytes` of the scratch from *at on. */
static char *take(size_t *at, size_t bytes, char *scratch)
{
    char *part = scratch + *at;

    *at += (bytes + 255) / 256 * 256;
    return part;
}

static void lay_out_core(attention_core *core, const sp_cuda_attention_shape *shape, size_t *at,
                         char *scratch)
{
    size_t tiles = (size_t)tiles_of(shape->rows_max, shape->spans_max, core->rows);
    size_t pieces = (size_t)pieces_of(core, shape->rows_max, shape->spans_max, shape->kv_heads);
    size_t partials = (size_t)core->partial_rows;

    core->counts = (attention_counts *)take(at, sizeof(attention_counts), scratch);
    core->pieces = (attention_piece *)take(at, pieces * sizeof(attention_piece), scratch);
    core->splits = (attention_split *)take(at, tiles * sizeof(attention_split), scratch);
    core->split_rows = (int2 *)take(at, (size_t)shape->rows_max * sizeof(int2), scratch);
    core->partial_m = (float2 *)take(at, partials * sizeof(float2), scratch);
    core->partial_o = (float *)take(
        at, partials * (size_t)sp_cuda_page_dim(shape->head_dim) * sizeof(float), scratch);
}

static bool is_valid(const sp_cuda_attention_shape *s)
{
    return s->kv_heads > 0 && s->q_heads > 0 && s->q_heads % s->kv_heads == 0 &&
           s->q_heads / s->kv_heads <= SP_CUDA_NARROW_ROWS && s->head_dim > 0 &&
           s->head_dim <= 256 && s->head_dim % 8 == 0 && s->rows_max > 0 &&
           s->rows_max <= SP_CUDA_ROWS_MAX && s->spans_max > 0 && s->positions_max > 0 &&
           s->positions_max <= POSITIONS_MAX;
}

/* Everything but the scratch's pointers; out_shape is the narrow core's. */
static cudaError_t make_args(int gpu, const sp_cuda_attention *a, attention_args *out,
                             attention_shape *out_shape)
{
    attention_core *core = &out->core[0];

    if (!is_valid(&a->shape))
        return cudaErrorInvalidValue;
    *out_shape = sp_cuda_attention_narrow_shape(gpu, sp_cuda_page_dim(a->shape.head_dim));
    if (out_shape->threads == 0)
        return cudaErrorNotSupported;
    *out = {};
    out->a = *a;
    out->group = a->shape.q_heads / a->shape.kv_heads;
    out->scale = (float)(1.4426950408889634 * (double)a->shape.scale);
    out->n_cores = 1;
    core->tile_rows = SP_CUDA_NARROW_ROWS;
    core->rows = core->tile_rows / out->group;
    core->span_min = 1;
    core->span_max = INT32_MAX;
    core->blocks = out_shape->blocks;
    core->partial_rows = partial_rows_of(core, &a->shape);
    return cudaSuccess;
}

/* Cuts the scratch; returns its bytes. */
static size_t lay_out(attention_args *args, char *scratch)
{
    const sp_cuda_attention *a = &args->a;
    size_t at = 0, page = SP_CUDA_PAGE * 2 * (size_t)sp_cuda_page_dim(a->shape.head_dim);

    args->zeros = take(&at, page, scratch);
    lay_out_core(&args->core[0], &a->shape, &at, scratch);
    args->core[0].pieces_max =
        pieces_of(&args->core[0], a->step.rows, a->step.spans, a->shape.kv_heads);
    return at;
}

static bool fits(const sp_cuda_attention *a)
{
    return a->step.rows <= a->shape.rows_max && a->step.spans <= a->shape.spans_max;
}

extern "C" int sp_cuda_attention_bytes(int gpu, const sp_cuda_attention_shape *shape,
                                       size_t *out_bytes)
{
    sp_cuda_current current(gpu);
    cudaError_t code = current.code;
    sp_cuda_attention a = {};
    attention_args args;
    attention_shape how;

    a.shape = *shape;
    if (code == cudaSuccess)
        code = make_args(gpu, &a, &args, &how);
    *out_bytes = code == cudaSuccess ? lay_out(&args, NULL) : 0;
    return (int)code;
}

extern "C" int sp_cuda_attention_plan(int gpu, const sp_cuda_attention *a, void *stream)
{
    sp_cuda_current current(gpu);
    cudaError_t code = current.code;
    attention_args args;
    attention_shape how;

    if (code == cudaSuccess)
        code = fits(a) ? make_args(gpu, a, &args, &how) : cudaErrorInvalidValue;
    if (code != cudaSuccess || a->step.rows == 0)
        return (int)code;
    (void)lay_out(&args, (char *)a->scratch);
    return (int)sp_cuda_attention_make_plan(&args, (cudaStream_t)stream);
}

extern "C" int sp_cuda_attend_rows(int gpu, const sp_cuda_attention *a, void *stream)
{
    sp_cuda_current current(gpu);
    cudaError_t code = current.code;
    int processors = 0, rows;
    attention_args args;
    attention_shape how;

    if (code == cudaSuccess)
        code = fits(a) ? make_args(gpu, a, &args, &how) : cudaErrorInvalidValue;
    if (code == cudaSuccess)
        code = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, gpu);
    if (code != cudaSuccess || a->step.rows == 0)
        return (int)code;
    (void)lay_out(&args, (char *)a->scratch);
    code = sp_cuda_attention_narrow(&args, &how, args.core[0].pieces_max * a->shape.kv_heads,
                                    (cudaStream_t)stream);
    if (code != cudaSuccess)
        return (int)code;
    rows = a->step.rows * a->shape.q_heads;
    processors *= MERGE_BLOCKS;
    return (int)sp_cuda_attention_merge(&args, rows < processors ? rows : processors,
                                        (cudaStream_t)stream);
}
