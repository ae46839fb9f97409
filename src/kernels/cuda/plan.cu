/*
 * plan.cu: seq_slot and row_scale → segments, row order and tiles, the same bytes as the host's
 * sp_plan_build_rows. One block of 1,024 threads: a counting sort by slot that keeps the rows'
 * order inside a slot. A slot or scale out of range refuses the whole plan: no tile, and
 * head->refused_row says which row. Bound by latency, one pass over the rows for each warp's turn.
 */
#include "kernels/cuda/ptx.cuh"

#define THREADS   1024
#define SCALE_MAX 16.0f

typedef struct plan_shared {
    int count[SP_CUDA_SLOTS_MAX], cursor[SP_CUDA_SLOTS_MAX]; /* rows; next place of a slot */
    int carry[3], refused, warp_sum[3][32];
} plan_shared;

/* Exclusive sums over the block's threads of three numbers at once, after what `carry` holds. */
static __device__ void scan(plan_shared *s, const int *value, int *out_before)
{
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, sum[3];

    for (int j = 0; j < 3; j++) {
        sum[j] = value[j];
        for (int d = 1; d < 32; d *= 2) {
            int other = __shfl_up_sync(~0u, sum[j], d);

            sum[j] += lane >= d ? other : 0;
        }
        if (lane == 31)
            s->warp_sum[j][warp] = sum[j];
    }
    __syncthreads();
    for (int j = 0; j < 3; j++) {
        out_before[j] = s->carry[j] + sum[j] - value[j];
        for (int w = 0; w < warp; w++)
            out_before[j] += s->warp_sum[j][w];
    }
    __syncthreads();
    if (threadIdx.x == THREADS - 1)
        for (int j = 0; j < 3; j++)
            s->carry[j] = out_before[j] + value[j];
    __syncthreads();
}

/* Reads the rows, checks them and counts each slot's. */
static __device__ void count_rows(plan_shared *s, const sp_cuda_plan &plan, int n_rows, int n_slots)
{
    for (int row = threadIdx.x; row < n_rows; row += THREADS) {
        int slot = plan.seq_slot_in != NULL ? plan.seq_slot_in[row] : 0;
        float scale = plan.row_scale_in != NULL ? plan.row_scale_in[row] : 1.0f;

        if (slot < -1 || slot >= n_slots || !(scale >= 0.0f && scale <= SCALE_MAX)) {
            atomicMin(&s->refused, row);
            continue;
        }
        slot = scale == 0.0f ? -1 : slot;
        plan.seq_slot[row] = slot;
        plan.row_scale[row] = scale;
        if (slot >= 0)
            atomicAdd(&s->count[slot], 1);
    }
    __syncthreads();
}

/* Segments, and the tiles' fields that the view shows; carry ends as (rows, segments, tiles). */
static __device__ void write_segments(plan_shared *s, const sp_cuda_plan &plan, int n_slots)
{
    for (int base = 0; base < n_slots; base += THREADS) {
        int slot = base + threadIdx.x, rows = slot < n_slots ? s->count[slot] : 0, before[3];
        int value[3] = {rows, rows > 0, (rows + SP_CUDA_TILE_ROWS - 1) / SP_CUDA_TILE_ROWS};

        scan(s, value, before);
        if (rows == 0)
            continue;
        s->cursor[slot] = before[0];
        plan.segment_slot[before[1]] = slot;
        plan.segment_begin[before[1]] = before[0];
        for (int i = 0; i < value[2]; i++) {
            int first = i * SP_CUDA_TILE_ROWS;

            plan.tile_begin[before[2] + i] = before[0] + first;
            plan.tile_rows[before[2] + i] = min(rows - first, SP_CUDA_TILE_ROWS);
            plan.tile_slot[before[2] + i] = slot;
        }
    }
    if (threadIdx.x == 0)
        plan.segment_begin[s->carry[1]] = s->carry[0];
}

/* The warps take turns, so that rows stay ascending inside a slot. */
static __device__ void write_order(plan_shared *s, const sp_cuda_plan &plan, int n_rows)
{
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;

    for (int base = 0; base < n_rows; base += THREADS) {
        int row = base + threadIdx.x, slot = row < n_rows ? plan.seq_slot[row] : -1;
        unsigned peers = __match_any_sync(~0u, slot);

        for (int turn = 0; turn < 32 && base + turn * SP_WARP < n_rows; turn++) {
            int at = 0;

            if (warp == turn && slot >= 0) {
                at = s->cursor[slot] + __popc(peers & ((1u << lane) - 1));
                plan.row_order[at] = row;
                __syncwarp(__activemask());
                if (lane == __ffs(peers) - 1)
                    s->cursor[slot] += __popc(peers);
            }
            __syncthreads();
        }
    }
}

/* The records that the kernels read; count 0 after the last. */
static __device__ void write_tiles(const sp_cuda_plan &plan, int n_tiles, int tiles_bound)
{
    for (int i = threadIdx.x; i < tiles_bound * SP_CUDA_TILE_ROWS; i += THREADS) {
        sp_cuda_tile *tile = &plan.tiles[i / SP_CUDA_TILE_ROWS];
        int index = i / SP_CUDA_TILE_ROWS, j = i % SP_CUDA_TILE_ROWS;
        int count = index < n_tiles ? plan.tile_rows[index] : 0;
        int row = j < count ? plan.row_order[plan.tile_begin[index] + j] : 0;

        if (j == 0) {
            tile->slot = index < n_tiles ? plan.tile_slot[index] : 0;
            tile->count = count;
            tile->pad[0] = tile->pad[1] = 0;
        }
        tile->row[j] = row;
        tile->scale[j] = j < count ? plan.row_scale[row] : 0.0f;
    }
}

__global__ void __launch_bounds__(THREADS)
    plan_kernel(const sp_cuda_plan plan, int n_rows, int n_slots, int tiles_bound)
{
    __shared__ plan_shared s;

    for (int slot = threadIdx.x; slot < n_slots; slot += THREADS)
        s.count[slot] = 0;
    if (threadIdx.x < 3)
        s.carry[threadIdx.x] = 0;
    if (threadIdx.x == 0)
        s.refused = n_rows;
    __syncthreads();
    count_rows(&s, plan, n_rows, n_slots);
    if (s.refused == n_rows) {
        write_segments(&s, plan, n_slots);
        __syncthreads();
        write_order(&s, plan, n_rows);
    }
    __syncthreads();
    write_tiles(plan, s.carry[2], tiles_bound);
    if (threadIdx.x == 0)
        *plan.head = {
            n_rows,   s.carry[0], s.carry[1], s.carry[2], s.refused < n_rows ? s.refused : -1,
            {0, 0, 0}};
}

extern "C" int sp_cuda_plan_rows(int gpu, const sp_cuda_plan *plan, int32_t n_rows, int32_t n_slots,
                                 void *stream)
{
    cudaError_t code = cudaSetDevice(gpu);

    if (code != cudaSuccess)
        return (int)code;
    if (n_rows < 0 || n_rows > SP_CUDA_ROWS_MAX || n_slots < 1 || n_slots > SP_CUDA_SLOTS_MAX)
        return (int)cudaErrorInvalidValue;
    plan_kernel<<<1, THREADS, 0, (cudaStream_t)stream>>>(*plan, n_rows, n_slots,
                                                         sp_cuda_tiles_bound(n_rows, n_slots));
    return (int)cudaGetLastError();
}

extern "C" int sp_cuda_kernels_init(int gpu)
{
    cudaFuncAttributes attributes;
    cudaError_t code = cudaSetDevice(gpu);

    /* Loads this object's code: a GPU that the build has none for fails here, not in a step. */
    if (code == cudaSuccess)
        code = cudaFuncGetAttributes(&attributes, plan_kernel);
    return (int)code;
}
