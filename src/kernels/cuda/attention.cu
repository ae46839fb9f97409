/*
 * attention.cu: the launchers of paged attention: the plan (attention_plan.cu), then for each layer
 * a core (attention_narrow.cu) and the merge of what was split (attention_merge.cu).
 *
 * The scratch holds a page of zeros, which is never written, and for each core the plan and the
 * partial results; it is cut by the shape alone, whereas the grids depend on what is launched.
 */
#include "device/cuda/current.cuh"
#include "kernels/cuda/attention.cuh"
#include "kernels/cuda/launch.cuh"

#define PARTIAL_BYTES (64 << 20) /* of a core, at most; pieces that need more are not split */
#define MERGE_BLOCKS  16         /* per multiprocessor */
#define POSITIONS_MAX (4096 * ATTENTION_CHUNK)

/* How much faster a block of the narrow core is alone than as one of many: the latter share the
 * memory's bandwidth. Of one block per multiprocessor, and of two. */
#define SPEED_ONE 1.2f
#define SPEED_TWO 1.6f

/* Query tiles of so many rows in so many spans. */
static int tiles_of(int rows, int spans, int tile)
{
    spans = spans < rows ? spans : rows;
    return spans + (rows - spans) / tile;
}

/* Room for a piece to each block that runs at the same time, or to half of them beside the tiles;
 * the grid of the narrow core is as large, so it counts no rows that are the wide one's. */
static int pieces_of(const attention_core *core, int rows, int spans, int kv_heads)
{
    int least = (core->blocks + kv_heads - 1) / kv_heads, tiles;

    if (core->span_max < INT32_MAX && spans < rows / core->span_max)
        rows = spans * core->span_max;
    tiles = tiles_of(rows, spans, core->rows) + core->blocks / 2 / kv_heads;
    return tiles > least ? tiles : least;
}

/* What there is room for: as many on every step, whichever way the narrow core runs. The wide
 * core's blocks take items in turn, so its splits are bound by this alone. */
static int capacity_of(const attention_core *core, const sp_cuda_attention_shape *shape)
{
    return tiles_of(shape->rows_max, shape->spans_max, core->rows) +
           4 * core->processors / shape->kv_heads + 1;
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
    size_t pieces = (size_t)capacity_of(core, shape);
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

/* How the cores run; wide has slots 0 where the narrow one takes every span. */
typedef struct attention_cores {
    attention_shape narrow, wide;
} attention_cores;

static void set_core(attention_args *args, int number, int tile_rows, const attention_shape *how,
                     float speed)
{
    attention_core *core = &args->core[number];

    core->tile_rows = tile_rows;
    core->rows = tile_rows / args->group;
    core->span_min = number == 0 ? 1 : SP_CUDA_NARROW_ROWS + 1;
    core->span_max = number == 0 && args->n_cores > 1 ? SP_CUDA_NARROW_ROWS : INT32_MAX;
    core->blocks = how->blocks;
    core->processors = how->processors;
    core->speed = speed;
    core->pieces_max =
        number > 0 ? capacity_of(core, &args->a.shape)
                   : pieces_of(core, args->a.step.rows, args->a.step.spans, args->a.shape.kv_heads);
    core->partial_rows = partial_rows_of(core, &args->a.shape);
}

/* Two blocks per multiprocessor, or one with more bytes in flight where the query tiles are about
 * as many as the multiprocessors. */
static void set_narrow(int gpu, attention_args *args, attention_shape *out)
{
    const sp_cuda_attention *a = &args->a;
    int dim = sp_cuda_page_dim(a->shape.head_dim);
    attention_shape one = sp_cuda_attention_narrow_shape(gpu, dim, 1);
    int items = a->shape.kv_heads *
                tiles_of(a->step.rows, a->step.spans, SP_CUDA_NARROW_ROWS / args->group);
    bool deep = items > one.blocks / 2 && items <= one.blocks;

    *out = deep ? one : sp_cuda_attention_narrow_shape(gpu, dim, 2);
    set_core(args, 0, SP_CUDA_NARROW_ROWS, out, out->blocks > one.blocks ? SPEED_TWO : SPEED_ONE);
}

/* Everything but the scratch's pointers. */
static cudaError_t make_args(int gpu, const sp_cuda_attention *a, attention_args *out,
                             attention_cores *out_cores)
{
    int dim = sp_cuda_page_dim(a->shape.head_dim);

    if (!is_valid(&a->shape) || a->step.rows > a->shape.rows_max ||
        a->step.spans > a->shape.spans_max)
        return cudaErrorInvalidValue;
    *out = {};
    out_cores->wide = sp_cuda_attention_wide_shape(gpu, dim);
    out->a = *a;
    out->group = a->shape.q_heads / a->shape.kv_heads;
    out->scale = (float)(1.4426950408889634 * (double)a->shape.scale);
    out->n_cores = a->wide && out_cores->wide.slots > 0 ? 2 : 1;
    set_narrow(gpu, out, &out_cores->narrow);
    if (out_cores->wide.slots > 0)
        set_core(out, 1, ATTENTION_WIDE_ROWS, &out_cores->wide, 1.0f);
    if (out_cores->narrow.slots == 0)
        return cudaErrorNotSupported;
    return cudaSuccess;
}

/* Cuts the scratch; returns its bytes. */
static size_t lay_out(attention_args *args, const attention_cores *cores, char *scratch)
{
    const sp_cuda_attention *a = &args->a;
    size_t at = 0, page = SP_CUDA_PAGE * 2 * (size_t)sp_cuda_page_dim(a->shape.head_dim);

    args->zeros = take(&at, page, scratch);
    for (int i = 0; i < (cores->wide.slots > 0 ? 2 : 1); i++)
        lay_out_core(&args->core[i], &a->shape, &at, scratch);
    return at;
}

extern "C" int sp_cuda_attention_bytes(int gpu, const sp_cuda_attention_shape *shape,
                                       size_t *out_bytes)
{
    sp_cuda_current current(gpu);
    cudaError_t code = current.code;
    sp_cuda_attention a = {};
    attention_args args;
    attention_cores cores;

    a.shape = *shape;
    if (code == cudaSuccess)
        code = make_args(gpu, &a, &args, &cores);
    *out_bytes = code == cudaSuccess ? lay_out(&args, &cores, NULL) : 0;
    return (int)code;
}

extern "C" int sp_cuda_attention_plan(int gpu, const sp_cuda_attention *a, void *stream)
{
    sp_cuda_current current(gpu);
    cudaError_t code = current.code;
    attention_args args;
    attention_cores cores;

    if (code == cudaSuccess)
        code = make_args(gpu, a, &args, &cores);
    if (code != cudaSuccess || a->step.rows == 0)
        return (int)code;
    (void)lay_out(&args, &cores, (char *)a->scratch);
    return (int)sp_cuda_attention_make_plan(&args, (cudaStream_t)stream);
}

static cudaError_t merge(const attention_args *args, int gpu, cudaStream_t stream)
{
    int rows = args->a.step.rows * args->a.shape.q_heads, most = 0;
    cudaError_t code = cudaDeviceGetAttribute(&most, cudaDevAttrMultiProcessorCount, gpu);

    if (code != cudaSuccess)
        return code;
    most *= MERGE_BLOCKS;
    return sp_cuda_attention_merge(args, rows < most ? rows : most, stream);
}

extern "C" int sp_cuda_attend_rows(int gpu, const sp_cuda_attention *a, void *stream)
{
    sp_cuda_current current(gpu);
    cudaError_t code = current.code;
    attention_args args;
    attention_cores cores;

    if (code == cudaSuccess)
        code = make_args(gpu, a, &args, &cores);
    if (code != cudaSuccess || a->step.rows == 0)
        return (int)code;
    (void)lay_out(&args, &cores, (char *)a->scratch);
    code = sp_cuda_attention_narrow(&args, &cores.narrow, (cudaStream_t)stream);
    if (code == cudaSuccess && args.n_cores > 1)
        code = sp_cuda_attention_wide(&args, &cores.wide, (cudaStream_t)stream);
    return (int)(code == cudaSuccess ? merge(&args, gpu, (cudaStream_t)stream) : code);
}

cudaError_t sp_cuda_attention_init(int gpu)
{
    cudaError_t code = sp_cuda_attention_narrow_init(gpu);

    return code == cudaSuccess ? sp_cuda_attention_wide_init(gpu) : code;
}
