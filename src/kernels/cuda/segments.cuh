/*
 * segments.cuh: windows of tiles that share a slot. A window of arbitrary adjacent tiles would
 * contain two slots at each segment boundary, and its block would run twice as long as the others.
 */
#ifndef SP_KERNELS_CUDA_SEGMENTS_CUH
#define SP_KERNELS_CUDA_SEGMENTS_CUH

#include "kernels/cuda/ptx.cuh"

typedef struct tile_run {
    int first, n; /* tiles; n 0: no such window */
} tile_run;

static __device__ __forceinline__ int parts(int n, int of)
{
    return (n + of - 1) / of;
}

/* Exclusive prefix sum over the lanes. */
static __device__ __forceinline__ int sum_below(int own)
{
    int sum = own;

#pragma unroll
    for (int d = 1; d < SP_WARP; d *= 2) {
        int other = __shfl_up_sync(~0u, sum, d);

        sum += (int)(threadIdx.x & 31) >= d ? other : 0;
    }
    return sum - own;
}

/* Windows in all; each warp counts them for itself. */
template <int WINDOW_TILES>
static __device__ __forceinline__ int count_windows(const sp_cuda_plan &plan)
{
    int windows = 0;

    for (int s = threadIdx.x & 31; s < plan.head->n_segments; s += SP_WARP)
        windows +=
            parts(parts(plan.segment_begin[s + 1] - plan.segment_begin[s], SP_CUDA_TILE_ROWS),
                  WINDOW_TILES);
    return __reduce_add_sync(~0u, windows);
}

/*
 * Tiles of window `number`; each warp computes it for itself. A lane takes n_segments / 32
 * consecutive segments. The records that the next loads need are prefetched: window `number` starts
 * at tile number * WINDOW_TILES at the latest.
 */
template <int WINDOW_TILES>
static __device__ __forceinline__ tile_run find_window(const sp_cuda_plan &plan, int n_slots,
                                                       int tiles_bound, int number)
{
    int lane = threadIdx.x & 31, last = min((number + 1) * WINDOW_TILES, tiles_bound) - 1;
    int each, begin, end, tiles = 0, windows = 0, tile0, window0;
    tile_run found = {0, 0};
    unsigned has;

    prefetch_l2(&plan.segment_begin[min(lane * 8, n_slots)]);
    prefetch_l2(&plan.tiles[max(last - lane, 0)]);
    each = parts(plan.head->n_segments, SP_WARP);
    begin = min(lane * each, plan.head->n_segments);
    end = min(begin + each, plan.head->n_segments);
    for (int s = begin; s < end; s++) {
        int own = parts(plan.segment_begin[s + 1] - plan.segment_begin[s], SP_CUDA_TILE_ROWS);

        tiles += own;
        windows += parts(own, WINDOW_TILES);
    }
    tile0 = sum_below(tiles);
    window0 = sum_below(windows);
    has = __ballot_sync(~0u, number >= window0 && number < window0 + windows);
    if (has == 0)
        return found;
    for (int s = begin; s < end; s++) {
        int own = parts(plan.segment_begin[s + 1] - plan.segment_begin[s], SP_CUDA_TILE_ROWS);
        int own_windows = parts(own, WINDOW_TILES), at = number - window0;

        if (at >= 0 && at < own_windows)
            found = {tile0 + at * WINDOW_TILES, min(WINDOW_TILES, own - at * WINDOW_TILES)};
        tile0 += own;
        window0 += own_windows;
    }
    found.first = __shfl_sync(~0u, found.first, __ffs((int)has) - 1);
    found.n = __shfl_sync(~0u, found.n, __ffs((int)has) - 1);
    return found;
}

#endif
