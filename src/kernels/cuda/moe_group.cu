/*
 * moe_group.cu: rows of a mixture-of-experts layer → items, as kernels_cuda.h defines them.
 *
 * Grid: a block for each expert, which finds its own rows: in the gather form it reads the experts
 * of all rows, in the sorted one it has them in a piece. A thread has consecutive rows and keeps in
 * a register which of them are the expert's. The block counts its rows of each slot, takes room for
 * their items, and places the rows in ascending order: at once where there is one slot, else
 * through a list that one warp goes through. Blocks share nothing but two counters, so that one
 * launch does it all. Bound by latency.
 *
 * It does not release its successor: whatever runs after the kernel that follows it may read the
 * items without a wait.
 */
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/ptx.cuh"

#define THREADS 512
#define WARPS   (THREADS / SP_WARP)
#define EACH    64 /* rows of a thread in a strip, at most: a bit for each */
#define STRIP   (THREADS * EACH)
#define AT_ONCE 8    /* rows whose loads are in flight together */
#define LIST    2048 /* rows that are placed together */

typedef struct group_shared {
    int warp_sum[WARPS];
    int first; /* item of this expert */
    int row[LIST], token[LIST], slot[LIST];
} group_shared;

/* Consecutive rows of a thread. */
typedef struct group_part {
    int begin, end;
} group_part;

/* In shared memory after group_shared, for each slot: the rows that are there, then those that were
 * placed; its first item. */
typedef struct slot_memory {
    int *rows, *first;
} slot_memory;

/* A row's token, or -1: the row is not this expert's. Rows from `begin` to `end` are in question.
 */
static __device__ __forceinline__ int token_of(const sp_cuda_group_rows &g, int row, int begin,
                                               int end)
{
    int pair;

    if (row < begin || row >= end)
        return -1;
    if (g.expert != NULL)
        return g.expert[row] == (int)blockIdx.x ? row / g.top_k : -1;
    pair = g.row_pair[row];
    return pair >= 0 && pair < g.n_tokens * g.top_k ? pair / g.top_k : -1;
}

/* Its slot, or -1. */
static __device__ __forceinline__ int slot_of(const sp_cuda_group_rows &g, int token)
{
    int slot;

    if (token < 0)
        return -1;
    slot = g.token_slot != NULL ? g.token_slot[token] : 0;
    return slot < g.n_slots ? slot : -1;
}

/* The rows where this expert's may be; none where the prefix sums are wrong. */
static __device__ __forceinline__ int2 find_rows(const sp_cuda_group_rows &g)
{
    int2 rows = make_int2(g.row_begin, g.row_begin + g.n_rows);
    int wrong = 0;

    if (g.expert != NULL)
        return rows;
    for (int e = (int)threadIdx.x; e < g.n_experts; e += THREADS)
        wrong |= g.expert_begin[e] > g.expert_begin[e + 1] || g.expert_begin[e + 1] > g.all_rows ||
                 (e == 0 && g.expert_begin[0] != 0);
    if (__syncthreads_or(wrong))
        return make_int2(0, 0);
    rows.x = max(rows.x, g.expert_begin[blockIdx.x]);
    rows.y = min(rows.y, g.expert_begin[blockIdx.x + 1]);
    return rows;
}

/* The sum over the threads before this one, and over all of them. */
static __device__ __forceinline__ int2 sum_before(group_shared *s, int own)
{
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, sum = own, before = 0, all = 0;

#pragma unroll
    for (int d = 1; d < SP_WARP; d *= 2) {
        int other = __shfl_up_sync(~0u, sum, d);

        sum += lane >= d ? other : 0;
    }
    __syncthreads();
    if (lane == 31)
        s->warp_sum[warp] = sum;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < WARPS; i++) {
        before += i < warp ? s->warp_sum[i] : 0;
        all += s->warp_sum[i];
    }
    return make_int2(before + sum - own, all);
}

/* This thread's part of the strip that begins at row `strip`. */
static __device__ __forceinline__ group_part part_of(int strip, int end)
{
    int rows = min(end - strip, STRIP), each = (rows + THREADS - 1) / THREADS;
    int begin = strip + (int)threadIdx.x * each;

    return {begin, min(begin + each, strip + rows)};
}

/* A bit for each row of the part that is this expert's and has a slot. */
static __device__ __forceinline__ uint64_t find_own(const sp_cuda_group_rows &g, group_part part,
                                                    int2 rows)
{
    uint64_t own = 0;

#pragma unroll 1
    for (int at = part.begin; at < part.end; at += AT_ONCE) {
        int token[AT_ONCE];

#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            token[i] = at + i < part.end ? token_of(g, at + i, rows.x, rows.y) : -1;
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            if (token[i] >= 0 && slot_of(g, token[i]) >= 0)
                own |= (uint64_t)1 << (at + i - part.begin);
    }
    return own;
}

/* Takes the lowest of the part's rows that are left. */
static __device__ __forceinline__ int take_row(group_part part, uint64_t *left)
{
    int at = __ffsll((long long)*left) - 1;

    *left &= *left - 1;
    return part.begin + at;
}

/* Counts the rows of each slot; returns those of the first strip. */
static __device__ __forceinline__ uint64_t count_rows(const sp_cuda_group_rows &g,
                                                      const slot_memory &slots, int2 rows)
{
    uint64_t first = 0;

#pragma unroll 1
    for (int strip = rows.x; strip < rows.y; strip += STRIP) {
        group_part part = part_of(strip, rows.y);
        uint64_t own = find_own(g, part, rows), left = own;

        if (strip == rows.x)
            first = own;
        while (left != 0)
            atomicAdd(&slots.rows[slot_of(g, token_of(g, take_row(part, &left), rows.x, rows.y))],
                      1);
    }
    __syncthreads();
    return first;
}

/* Numbers this expert's items by slot and writes their heads; returns how many there are. */
static __device__ __forceinline__ int make_items(const sp_cuda_group_rows &g, group_shared *s,
                                                 const slot_memory &slots)
{
    int items = 0;

#pragma unroll 1
    for (int base = 0; base < g.n_slots; base += THREADS) {
        int slot = base + (int)threadIdx.x, own = 0;
        int2 sum;

        if (slot < g.n_slots)
            own = (slots.rows[slot] + g.items.item_rows - 1) / g.items.item_rows;
        sum = sum_before(s, own);
        if (slot < g.n_slots)
            slots.first[slot] = items + sum.x;
        items += sum.y;
    }
    if (threadIdx.x == 0 && items > 0)
        s->first = atomicAdd(&g.items.counts[1], items);
    __syncthreads();
#pragma unroll 1
    for (int slot = (int)threadIdx.x; items > 0 && slot < g.n_slots; slot += THREADS) {
        int rows = slots.rows[slot], first = s->first + slots.first[slot];

        slots.first[slot] = first;
        slots.rows[slot] = 0;
#pragma unroll 1
        for (int i = 0; i * g.items.item_rows < rows; i++)
            g.items.item[first + i] = {slot, (int)blockIdx.x,
                                       min(rows - i * g.items.item_rows, g.items.item_rows), 0};
    }
    __syncthreads();
    return items;
}

/* Row `row` is number `number` of those of its slot. */
static __device__ __forceinline__ void place_row(const sp_cuda_group_rows &g,
                                                 const slot_memory &slots, int row, int token,
                                                 int slot, int number)
{
    int item = slots.first[slot] + number / g.items.item_rows;
    int64_t at = (int64_t)item * g.items.item_rows + number % g.items.item_rows;

    g.items.row[at] = row;
    g.items.token[at] = token;
    if (g.items.scale != NULL)
        g.items.scale[at] = g.token_scale[token];
}

/* Places the n rows of the list; one warp, 32 at a time. */
static __device__ __forceinline__ void place_list(const sp_cuda_group_rows &g,
                                                  const group_shared *s, const slot_memory &slots,
                                                  int n)
{
    int lane = threadIdx.x & 31;

#pragma unroll 1
    for (int i = lane; i < (n + 31) / 32 * 32; i += SP_WARP) {
        bool valid = i < n;
        int slot = valid ? s->slot[i] : -1, number;
        unsigned peers = __match_any_sync(~0u, slot);

        number = valid ? slots.rows[slot] + __popc(peers & ((1u << lane) - 1)) : 0;
        __syncwarp();
        if (valid && lane == __ffs((int)peers) - 1)
            slots.rows[slot] += __popc(peers);
        __syncwarp();
        if (valid)
            place_row(g, slots, s->row[i], s->token[i], slot, number);
    }
}

/* Places the rows of a strip through the list, LIST at a time. */
static __device__ __forceinline__ void place_strip(const sp_cuda_group_rows &g, group_shared *s,
                                                   const slot_memory &slots, group_part part,
                                                   uint64_t own, int2 rows)
{
    int2 sum = sum_before(s, __popcll(own));

#pragma unroll 1
    for (int base = 0; base < sum.y; base += LIST) {
        for (; own != 0 && sum.x < base + LIST; sum.x++) {
            int row = take_row(part, &own), token = token_of(g, row, rows.x, rows.y);

            s->row[sum.x - base] = row;
            s->token[sum.x - base] = token;
            s->slot[sum.x - base] = slot_of(g, token);
        }
        __syncthreads();
        if (threadIdx.x < SP_WARP)
            place_list(g, s, slots, min(sum.y - base, LIST));
        __syncthreads();
    }
}

/* With one slot a row's number is that of the expert's rows before it; `before`: in other strips.
 * Returns the strip's. */
static __device__ __forceinline__ int place_directly(const sp_cuda_group_rows &g, group_shared *s,
                                                     const slot_memory &slots, group_part part,
                                                     uint64_t own, int2 rows, int before)
{
    int2 sum = sum_before(s, __popcll(own));

    for (int number = before + sum.x; own != 0; number++) {
        int row = take_row(part, &own);

        place_row(g, slots, row, token_of(g, row, rows.x, rows.y), 0, number);
    }
    return sum.y;
}

static __device__ __forceinline__ void place_rows(const sp_cuda_group_rows &g, group_shared *s,
                                                  const slot_memory &slots, int2 rows,
                                                  uint64_t first)
{
    int before = 0;

#pragma unroll 1
    for (int strip = rows.x; strip < rows.y; strip += STRIP) {
        group_part part = part_of(strip, rows.y);
        uint64_t own = strip == rows.x ? first : find_own(g, part, rows);

        if (g.n_slots == 1)
            before += place_directly(g, s, slots, part, own, rows, before);
        else
            place_strip(g, s, slots, part, own, rows);
    }
}

/* The last block to be done tells the number of items and clears the counters. */
static __device__ __forceinline__ void finish(const sp_cuda_group_rows &g)
{
    __syncthreads();
    if (threadIdx.x != 0)
        return;
    __threadfence();
    if (atomicAdd(&g.items.counts[2], 1) + 1 < (int)gridDim.x)
        return;
    __threadfence();
    g.items.counts[0] = atomicExch(&g.items.counts[1], 0);
    g.items.counts[2] = 0;
}

__global__ void __launch_bounds__(THREADS, 1)
    group_kernel(const __grid_constant__ sp_cuda_group_rows g)
{
    extern __shared__ __align__(16) char memory[];
    group_shared *s = (group_shared *)memory;
    slot_memory slots;
    uint64_t first;
    int2 rows;

    slots.rows = (int *)(s + 1);
    slots.first = slots.rows + g.n_slots;
    for (int slot = (int)threadIdx.x; slot < g.n_slots; slot += THREADS)
        slots.rows[slot] = 0;
    wait_predecessor();
    __syncthreads();
    rows = find_rows(g);
    first = count_rows(g, slots, rows);
    if (make_items(g, s, slots) > 0)
        place_rows(g, s, slots, rows, first);
    finish(g);
}

static size_t shared_of(int32_t n_slots)
{
    return sizeof(group_shared) + 2 * (size_t)n_slots * sizeof(int);
}

cudaError_t sp_cuda_group_init(void)
{
    return cudaFuncSetAttribute(group_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                (int)shared_of(SP_CUDA_SLOTS_MAX));
}

extern "C" int sp_cuda_group_experts(int gpu, const sp_cuda_group_rows *rows, void *stream)
{
    sp_cuda_current current(gpu);
    cudaLaunchAttribute overlap;
    cudaLaunchConfig_t config;

    if (current.code != cudaSuccess)
        return (int)current.code;
    if (rows->n_experts < 1 || rows->n_experts > SP_CUDA_EXPERTS_MAX || rows->n_slots < 1 ||
        rows->n_slots > SP_CUDA_SLOTS_MAX || rows->items.item_rows < 8 ||
        rows->items.bound < sp_cuda_items_bound(rows->n_rows, rows->n_experts, rows->n_slots,
                                                rows->items.item_rows))
        return (int)cudaErrorInvalidValue;
    config = sp_cuda_overlapping(dim3((unsigned)rows->n_experts), THREADS, shared_of(rows->n_slots),
                                 &overlap, false, (cudaStream_t)stream);
    return (int)cudaLaunchKernelEx(&config, group_kernel, *rows);
}
