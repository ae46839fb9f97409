/*
 * expand.cu: y += scale · xa · Bᵀ for a group of sites in one launch.
 *
 *     xa[row, c]  = T(planes added in index order)
 *     y[row, j]   = Ty(fmaf(scale, (float)T(xa[row, :] · B[slot][j, :]), y[row, j]))
 *
 * Grid (sum over sites of ceil(n_out / COLUMNS), tiles / tiles_per_block), 128 threads. A block
 * takes COLUMNS outputs of one site, 16 at a time the M side of the mma, against tiles of up to 8
 * rows, its N side. B goes to registers before the shrink is waited for and stays there while the
 * next tile has the same slot; deltas cross shared memory so that y moves in 16-byte pieces. Bound
 * by the bytes of B (decode) or y (prefill).
 */
#include "kernels/cuda/ptx.cuh"

#define THREADS    128
#define ROWS       SP_CUDA_TILE_ROWS
#define XA_PITCH   (SP_CUDA_RANK_MAX + 32) /* 64 bytes off a multiple of 128: no bank twice */
#define PLANES_NOW 8                       /* loads of planes in flight */

typedef struct launch_shape {
    int column_blocks[SP_CUDA_SITES_MAX + 1]; /* first block of each site */
    int tiles_bound, tiles_per_block, n_planes;
} launch_shape;

/* What a block knows of its site and of the tile at hand. */
typedef struct work {
    const uint16_t *b;
    int64_t b_stride;
    int column0, n_out, rank, row_count;
    int64_t plane_row, plane_at; /* floats of a plane's row, and this site's place in it */
} work;

/* ---- B ------------------------------------------------------------------------------------- */

/* Ranks [rank0, rank0 + 32 * S) of this warp's columns. */
template <int VEC, int M, int S>
static __device__ __forceinline__ void load_b(uint4 (&w)[M][S][2], const work &at, int rank0)
{
    int warp = threadIdx.x >> 5, g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;

#pragma unroll
    for (int j = 0; j < M; j++) {
        int column = at.column0 + (warp * M + j) * 16 + g;

#pragma unroll
        for (int s = 0; s < S; s++) {
            int k = rank0 + 32 * s + 8 * t;

            w[j][s][0] =
                load_eight<VEC>(at.b, at.b_stride, column, k, column < at.n_out ? at.rank : 0);
            w[j][s][1] = load_eight<VEC>(at.b, at.b_stride, column + 8, k,
                                         column + 8 < at.n_out ? at.rank : 0);
        }
    }
}

/* ---- xa ------------------------------------------------------------------------------------ */

static __device__ __forceinline__ void add(float4 *sum, float4 v)
{
    sum->x += v.x;
    sum->y += v.y;
    sum->z += v.z;
    sum->w += v.w;
}

/* Four neighbours of one row: the planes in index order. */
static __device__ __forceinline__ float4 sum_planes(const float *plane, int64_t plane_floats,
                                                    int n_planes)
{
    float4 sum = *(const float4 *)plane;

    for (int p = 1; p < n_planes; p += PLANES_NOW) {
        float4 v[PLANES_NOW];

#pragma unroll
        for (int i = 0; i < PLANES_NOW; i++)
            v[i] = p + i < n_planes ? *(const float4 *)(plane + (p + i) * plane_floats)
                                    : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int i = 0; i < PLANES_NOW; i++)
            if (p + i < n_planes)
                add(&sum, v[i]);
    }
    return sum;
}

/* xa of the tile's rows, T, zero beyond the rank up to a multiple of 32 and beyond the rows. */
template <int F16>
static __device__ void gather_xa(uint16_t (*xa)[XA_PITCH], const sp_cuda_group &group,
                                 const sp_cuda_tile *tile, const work &at, int n_planes)
{
    int fours = ((at.rank + 31) / 32) * 8;
    int64_t plane_floats = (int64_t)group.n_rows * at.plane_row;

    for (int i = threadIdx.x; i < ROWS * fours; i += THREADS) {
        int row = i / fours, c = i % fours * 4;
        float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);

        if (row < at.row_count && c < at.rank)
            v = sum_planes(group.planes + tile->row[row] * at.plane_row + at.plane_at + c,
                           plane_floats, n_planes);
        xa[row][c] = narrow<F16>(v.x);
        xa[row][c + 1] = c + 1 < at.rank ? narrow<F16>(v.y) : 0;
        xa[row][c + 2] = c + 2 < at.rank ? narrow<F16>(v.z) : 0;
        xa[row][c + 3] = c + 3 < at.rank ? narrow<F16>(v.w) : 0;
    }
}

/* ---- delta --------------------------------------------------------------------------------- */

template <int F16, int M, int S>
static __device__ __forceinline__ void multiply(float (&acc)[M][4], const uint4 (&w)[M][S][2],
                                                const uint16_t (*xa)[XA_PITCH], int rank0, int rank)
{
    int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;

#pragma unroll
    for (int s = 0; s < S; s++) {
        if (rank0 + 32 * s >= rank)
            break;
        uint4 v = *(const uint4 *)&xa[g][rank0 + 32 * s + 8 * t];
#pragma unroll
        for (int j = 0; j < M; j++) {
            mma<F16>(acc[j], w[j][s][0].x, w[j][s][1].x, w[j][s][0].y, w[j][s][1].y, v.x, v.y);
            mma<F16>(acc[j], w[j][s][0].z, w[j][s][1].z, w[j][s][0].w, w[j][s][1].w, v.z, v.w);
        }
    }
}

template <int F16, int VEC, int M, int S>
static __device__ __forceinline__ void make_deltas(uint16_t (*delta)[M * 64 + 8], const work &at,
                                                   uint4 (&w)[M][S][2],
                                                   const uint16_t (*xa)[XA_PITCH])
{
    int warp = threadIdx.x >> 5, g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
    float acc[M][4] = {};

    multiply<F16>(acc, w, xa, 0, at.rank);
    for (int rank0 = 32 * S; rank0 < at.rank; rank0 += 32 * S) {
        load_b<VEC>(w, at, rank0);
        multiply<F16>(acc, w, xa, rank0, at.rank);
    }
#pragma unroll
    for (int j = 0; j < M; j++) {
        int column = (warp * M + j) * 16 + g;

        delta[2 * t][column] = narrow<F16>(acc[j][0]);
        delta[2 * t + 1][column] = narrow<F16>(acc[j][1]);
        delta[2 * t][column + 8] = narrow<F16>(acc[j][2]);
        delta[2 * t + 1][column + 8] = narrow<F16>(acc[j][3]);
    }
}

/* ---- y ------------------------------------------------------------------------------------- */

template <int F16>
static __device__ __forceinline__ uint16_t fold(float scale, uint16_t delta, uint16_t y)
{
    return narrow<F16>(__fmaf_rn(scale, widen<F16>(delta), widen<F16>(y)));
}

template <int F16>
static __device__ __forceinline__ void fold_eight(void *y, const uint16_t *delta, float scale)
{
    union {
        uint4 all;
        uint16_t one[8];
    } v;

    v.all = *(const uint4 *)y;
#pragma unroll
    for (int i = 0; i < 8; i++)
        v.one[i] = fold<F16>(scale, delta[i], v.one[i]);
    *(uint4 *)y = v.all;
}

template <int F16>
static __device__ __forceinline__ void fold_one(const sp_cuda_site &site, int64_t at, float scale,
                                                uint16_t delta)
{
    if (site.y_is_f32) {
        float *y = (float *)site.y + at;

        *y = __fmaf_rn(scale, widen<F16>(delta), *y);
    } else {
        uint16_t *y = (uint16_t *)site.y + at;

        *y = fold<F16>(scale, delta, *y);
    }
}

/* Rows of scale 0 are as absent: neither read nor written. */
template <int F16, int VEC, int COLUMNS>
static __device__ __forceinline__ void fold_tile(const uint16_t (*delta)[COLUMNS + 8],
                                                 const sp_cuda_site &site, const work &at,
                                                 const sp_cuda_tile *tile, float stored)
{
#pragma unroll
    for (int e = threadIdx.x; e < ROWS * COLUMNS / 8; e += THREADS) {
        int row = e / (COLUMNS / 8), c = e % (COLUMNS / 8) * 8, column = at.column0 + c;
        float scale;
        int64_t y;

        if (row >= at.row_count || column >= at.n_out)
            continue;
        scale = (float)((double)stored * (double)tile->scale[row]);
        y = tile->row[row] * site.y_stride + column;
        if (scale == 0.0f)
            continue;
        if (VEC && !site.y_is_f32) {
            fold_eight<F16>((uint16_t *)site.y + y, &delta[row][c], scale);
            continue;
        }
        for (int i = 0; i < 8 && column + i < at.n_out; i++)
            fold_one<F16>(site, y + i, scale, delta[row][c + i]);
    }
}

/* Asks for the tile's y while the shrink still runs. */
template <int COLUMNS>
static __device__ __forceinline__ void prefetch_y(const sp_cuda_site &site, const work &at,
                                                  const sp_cuda_tile *tile)
{
    int line = 64 / (site.y_is_f32 ? 4 : 2), row = threadIdx.x >> 4;
    int column = at.column0 + (threadIdx.x & 15) * line;

    if (row < at.row_count && column < at.n_out && (int)(threadIdx.x & 15) * line < COLUMNS)
        prefetch_l2((const char *)site.y +
                    (tile->row[row] * site.y_stride + column) * (site.y_is_f32 ? 4 : 2));
}

/* ---- kernel -------------------------------------------------------------------------------- */

static __device__ __forceinline__ int site_of(const launch_shape &shape, int n_sites)
{
    int site = 0;

    while (site + 1 < n_sites && (int)blockIdx.x >= shape.column_blocks[site + 1])
        site++;
    return site;
}

/* Rank and stored scale of the slot, all slots asked for at once where they fit. */
typedef struct slot_cell {
    int rank;
    float scale;
} slot_cell;

static __device__ __forceinline__ slot_cell cell_mine(const sp_cuda_site &site, int n_slots)
{
    bool have = n_slots <= THREADS && (int)threadIdx.x < n_slots;

    return {have && site.rank != NULL ? site.rank[threadIdx.x] : site.one_rank,
            have && site.scale != NULL ? site.scale[threadIdx.x] : site.one_scale};
}

static __device__ __forceinline__ slot_cell cell_of(const sp_cuda_site &site, int slot, int n_slots,
                                                    slot_cell mine, slot_cell *shared)
{
    if (n_slots > THREADS)
        return {site.rank != NULL ? site.rank[slot] : site.one_rank,
                site.scale != NULL ? site.scale[slot] : site.one_scale};
    if ((int)threadIdx.x == slot)
        *shared = mine;
    __syncthreads();
    return *shared;
}

template <int F16, int VEC, int COLUMNS, int S>
__global__ void __launch_bounds__(THREADS)
    expand_kernel(const __grid_constant__ sp_cuda_group group,
                  const __grid_constant__ launch_shape shape)
{
    int index = site_of(shape, group.n_sites), slot = -1;
    const sp_cuda_site &site = group.sites[index];
    int first = blockIdx.y * shape.tiles_per_block;
    int last = min(first + shape.tiles_per_block, shape.tiles_bound);
    slot_cell mine = cell_mine(site, group.n_slots), cell = {0, 0.0f};
    work at = {};
    bool waited = false;
    uint4 w[COLUMNS / 64][S][2];
    __shared__ __align__(16) uint16_t xa[ROWS][XA_PITCH];
    __shared__ __align__(16) uint16_t delta[ROWS][COLUMNS + 8];
    __shared__ slot_cell shared;

    release_successor();
    at.b_stride = site.b_stride;
    at.column0 = ((int)blockIdx.x - shape.column_blocks[index]) * COLUMNS;
    at.n_out = site.n_out;
    at.plane_row = (int64_t)group.rank_stride * group.n_sites;
    at.plane_at = (int64_t)index * group.rank_stride;
    for (int i = first; i < last; i++) {
        const sp_cuda_tile *tile = &group.plan.tiles[i];
        int tile_slot = tile->slot;

        at.row_count = tile->count;
        if (at.row_count == 0)
            break;
        __syncthreads(); /* xa, delta and the cell are of the tile before until here */
        if (tile_slot != slot) {
            cell = cell_of(site, tile_slot, group.n_slots, mine, &shared);
            at.rank = cell.rank;
            at.b = (const uint16_t *)site.b + tile_slot * site.b_slot_stride;
        }
        if (at.rank == 0 || cell.scale == 0.0f) {
            slot = tile_slot;
            continue;
        }
        if (tile_slot != slot || at.rank > 32 * S)
            load_b<VEC>(w, at, 0);
        slot = tile_slot;
        prefetch_y<COLUMNS>(site, at, tile);
        if (!waited)
            wait_predecessor();
        waited = true;
        gather_xa<F16>(xa, group, tile, at, shape.n_planes);
        __syncthreads();
        make_deltas<F16, VEC, COLUMNS / 64, S>(delta, at, w, xa);
        __syncthreads();
        fold_tile<F16, VEC, COLUMNS>(delta, site, at, tile, cell.scale);
    }
    if (!waited && blockIdx.x == 0 && blockIdx.y == 0)
        wait_predecessor();
}

/* ---- launch -------------------------------------------------------------------------------- */

template <int F16, int VEC, int COLUMNS, int S>
static cudaError_t launch(const sp_cuda_group *group, int tiles_per_block, cudaStream_t stream)
{
    launch_shape shape = {};
    cudaLaunchAttribute overlap;
    cudaLaunchConfig_t config = {};

    for (int i = 0; i < group->n_sites; i++)
        shape.column_blocks[i + 1] =
            shape.column_blocks[i] + (group->sites[i].n_out + COLUMNS - 1) / COLUMNS;
    shape.tiles_bound = sp_cuda_tiles_bound(group->n_rows, group->n_slots);
    shape.tiles_per_block = tiles_per_block;
    shape.n_planes = sp_cuda_choose_shrink(group->n_rows, group->n_slots, group->k_in,
                                           group->rank_stride, group->n_sites)
                         .n_planes;
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = dim3((unsigned)shape.column_blocks[group->n_sites],
                          (unsigned)((shape.tiles_bound + tiles_per_block - 1) / tiles_per_block));
    config.blockDim = dim3(THREADS);
    config.stream = stream;
    config.attrs = &overlap;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, expand_kernel<F16, VEC, COLUMNS, S>, *group, shape);
}

template <int F16, int VEC>
static cudaError_t launch_chosen(const sp_cuda_group *group, cudaStream_t stream)
{
    sp_cuda_expand_choice choice;
    int total = 0, tiles;

    for (int i = 0; i < group->n_sites; i++)
        total += group->sites[i].n_out;
    choice = sp_cuda_choose_expand(group->n_rows, group->n_slots, total, group->rank_stride);
    tiles = choice.tiles_per_block;
    /* Odd sizes and addresses: one shape. */
    if constexpr (!VEC)
        return launch<F16, VEC, 128, 1>(group, tiles, stream);
    else if (choice.ranks == 32)
        return choice.columns == 256 ? launch<F16, VEC, 256, 1>(group, tiles, stream)
                                     : launch<F16, VEC, 128, 1>(group, tiles, stream);
    else if (choice.ranks == 64)
        return choice.columns == 256 ? launch<F16, VEC, 256, 2>(group, tiles, stream)
                                     : launch<F16, VEC, 128, 2>(group, tiles, stream);
    else
        return launch<F16, VEC, 128, 4>(group, tiles, stream);
}

static bool aligned(const void *memory, int64_t stride)
{
    return (uintptr_t)memory % 16 == 0 && stride % 8 == 0;
}

static bool vectors(const sp_cuda_group *group)
{
    bool all = true;

    for (int i = 0; i < group->n_sites; i++) {
        const sp_cuda_site *site = &group->sites[i];

        all = all && site->n_out % 8 == 0;
        if (!site->y_is_f32)
            all = all && aligned(site->y, site->y_stride);
        all = all && aligned(site->b, site->b_stride) && site->b_slot_stride % 8 == 0 &&
              (site->rank != NULL || site->one_rank % 8 == 0);
    }
    return all;
}

extern "C" int sp_cuda_expand(int gpu, const sp_cuda_group *group, void *stream)
{
    cudaStream_t on = (cudaStream_t)stream;
    bool vec = vectors(group);
    cudaError_t code = cudaSetDevice(gpu);

    if (code != cudaSuccess || group->n_rows == 0)
        return (int)code;
    if (group->type == SP_DTYPE_F16)
        return (int)(vec ? launch_chosen<1, 1>(group, on) : launch_chosen<1, 0>(group, on));
    return (int)(vec ? launch_chosen<0, 1>(group, on) : launch_chosen<0, 0>(group, on));
}
