/*
 * attention_wide_sm90a.cu: attention of a query tile of 128 packed rows through wgmma, for spans of
 * more than SP_CUDA_NARROW_ROWS rows. Bound by the tensor cores and by exp2.
 *
 * Grid: at most one block per multiprocessor; each takes items of the plan in turn. Two warpgroups
 * have 64 rows each, a warp of a third fills the ring. The scores of the next tile and this tile's
 * P · V are in flight while the next tile's P is computed. The fold of the chunks is in shared
 * memory, for it is used once a chunk; o, scores, P and q fill the registers. The bits are those of
 * attention_narrow.cu: wgmma has the chain of mma.
 */
#include "kernels/cuda/attention_ring.cuh"
#include "kernels/cuda/attention_rows.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/wgmma.cuh"

#define WARPGROUPS 2 /* that compute */
#define WARPS      (WARPGROUPS * 4)
#define COMPUTE    (WARPS * SP_WARP)
#define THREADS    (COMPUTE + 128)
#define CHAINS     4
#define SCORES     (KEY_GROUPS * 4) /* of a thread */

static_assert(WARPS * 16 == ATTENTION_WIDE_ROWS, "a warp has 16 rows");

typedef struct wide_shared {
    uint64_t full[RING_SLOTS_MAX], empty[RING_SLOTS_MAX];
    item_queue queue;
} wide_shared;

template <int D> struct wide_of {
    static constexpr int FOLD_BYTES = COMPUTE * D / 8 * (int)sizeof(float4);
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

template <int D> struct wide_state {
    uint32_t q[D / 16][4], p[KEY_GROUPS / 2][4];
    float s[SCORES], o[D / 8][4];
    row_sum chunk_a, chunk_b, sum_a, sum_b;
    float2 by;      /* how o of rows a and b is scaled */
    float4 *folded; /* the thread's, group n of columns at n * COMPUTE */
};

/* ---- products ------------------------------------------------------------------------------ */

template <int D>
static __device__ __forceinline__ void multiply_keys(wide_state<D> &t, uint32_t keys)
{
#pragma unroll
    for (int k = 0; k < D / 16; k++)
        wgmma_registers<ATTENTION_TILE, 0>::multiply(
            t.s, t.q[k],
            operand_of(keys + k / 4 * ATOM_BYTES + k % 4 * 32, 16, ring_of<D>::GROUP_BYTES), k > 0);
    wgmma_commit();
}

/* fresh: o has nothing of the chunk yet. */
template <int D>
static __device__ __forceinline__ void multiply_values(wide_state<D> &t, uint32_t values,
                                                       bool fresh)
{
#pragma unroll
    for (int k = 0; k < KEY_GROUPS / 2; k++)
        wgmma_registers<D, 1>::multiply(
            &t.o[0][0], t.p[k],
            operand_of(values + k * ring_of<D>::PAGE_BYTES, ATOM_BYTES, ring_of<D>::GROUP_BYTES),
            !fresh || k > 0);
    wgmma_commit();
}

/* ---- scores -------------------------------------------------------------------------------- */

/* The largest scores of rows a and b: four chains, for the latency of one would show. */
static __device__ __forceinline__ float2 find_most(const float (&s)[SCORES])
{
    float a[CHAINS], b[CHAINS];

#pragma unroll
    for (int n = 0; n < KEY_GROUPS; n++) {
        float most_a = fmaxf(s[4 * n], s[4 * n + 1]), most_b = fmaxf(s[4 * n + 2], s[4 * n + 3]);

        a[n % CHAINS] = n < CHAINS ? most_a : fmaxf(a[n % CHAINS], most_a);
        b[n % CHAINS] = n < CHAINS ? most_b : fmaxf(b[n % CHAINS], most_b);
    }
    return {quad_max(fmaxf(fmaxf(a[0], a[1]), fmaxf(a[2], a[3]))),
            quad_max(fmaxf(fmaxf(b[0], b[1]), fmaxf(b[2], b[3])))};
}

/* Scores to P, in place. */
template <int D> static __device__ __forceinline__ void soften(wide_state<D> &t, float scale)
{
    float2 most = find_most(t.s);
    row_scale a = raise_max(&t.chunk_a, most.x, scale), b = raise_max(&t.chunk_b, most.y, scale);
    float sums_a[CHAINS], sums_b[CHAINS];

#pragma unroll
    for (int n = 0; n < KEY_GROUPS; n++) {
        float *s = t.s + 4 * n, two_a, two_b;

        s[0] = probability(s[0], scale, a.offset);
        s[1] = probability(s[1], scale, a.offset);
        s[2] = probability(s[2], scale, b.offset);
        s[3] = probability(s[3], scale, b.offset);
        two_a = __fadd_rn(s[0], s[1]);
        two_b = __fadd_rn(s[2], s[3]);
        sums_a[n % CHAINS] = n < CHAINS ? two_a : __fadd_rn(sums_a[n % CHAINS], two_a);
        sums_b[n % CHAINS] = n < CHAINS ? two_b : __fadd_rn(sums_b[n % CHAINS], two_b);
    }
    t.chunk_a.l =
        __fmaf_rn(t.chunk_a.l, a.sums, join_chains(sums_a[0], sums_a[1], sums_a[2], sums_a[3]));
    t.chunk_b.l =
        __fmaf_rn(t.chunk_b.l, b.sums, join_chains(sums_b[0], sums_b[1], sums_b[2], sums_b[3]));
    t.by = {a.sums, b.sums};
}

/* Masks and softens the scores of a tile. `live`: the warp has rows. */
template <int D>
static __device__ __forceinline__ void finish_scores(wide_state<D> &t, int tile, float scale,
                                                     int lowest, const row_pair &rows, bool live)
{
    int key = tile * ATTENTION_TILE + 2 * (int)(threadIdx.x & 3);

    if (!live)
        return;
    if (tile * ATTENTION_TILE + ATTENTION_TILE - 1 > lowest)
#pragma unroll
        for (int n = 0; n < KEY_GROUPS; n++)
            mask(t.s + 4 * n, key + 8 * n, rows.position_a, rows.position_b);
    soften(t, scale);
}

template <int D> static __device__ __forceinline__ void pack_probabilities(wide_state<D> &t)
{
#pragma unroll
    for (int n = 0; n < KEY_GROUPS; n++) {
        t.p[n / 2][n % 2 * 2] = narrow_two<0>(t.s[4 * n], t.s[4 * n + 1]);
        t.p[n / 2][n % 2 * 2 + 1] = narrow_two<0>(t.s[4 * n + 2], t.s[4 * n + 3]);
    }
}

/* ---- chunks -------------------------------------------------------------------------------- */

template <int D>
static __device__ __forceinline__ void fold_chunk(wide_state<D> &t, row_sum a, row_sum b,
                                                  float scale)
{
    fold_scale by_a = fold_rows(&t.sum_a, a, scale), by_b = fold_rows(&t.sum_b, b, scale);

#pragma unroll
    for (int n = 0; n < D / 8; n++) {
        float4 f = t.folded[n * COMPUTE];

        t.folded[n * COMPUTE] = make_float4(
            fold(f.x, by_a.sum, t.o[n][0], by_a.chunk), fold(f.y, by_a.sum, t.o[n][1], by_a.chunk),
            fold(f.z, by_b.sum, t.o[n][2], by_b.chunk), fold(f.w, by_b.sum, t.o[n][3], by_b.chunk));
    }
}

/* Ends the chunk whose last tile is `tile`, of which a and b are the sums: a piece from the first
 * key on folds its chunks, another hands each of them out. */
template <int D>
static __device__ __forceinline__ void close_chunk(wide_state<D> &t, const attention_args &args,
                                                   const attention_piece &piece, int64_t partial,
                                                   int tile, row_sum a, row_sum b,
                                                   const row_pair &rows)
{
    a.l = quad_sum(a.l);
    b.l = quad_sum(b.l);
    if (piece.tile == 0)
        fold_chunk(t, a, b, args.scale);
    else
        store_partial<D>(args.core[1], partial + (tile - piece.tile) / CHUNK_TILES * rows.n, t.o, a,
                         b, rows, 2 * (int)(threadIdx.x & 3));
}

template <int D>
static __device__ __forceinline__ void store_result(wide_state<D> &t, const attention_args &args,
                                                    const attention_piece &piece, int head,
                                                    int64_t partial, const row_pair &rows)
{
    int column = 2 * (int)(threadIdx.x & 3);

#pragma unroll
    for (int n = 0; n < D / 8; n++)
        *(float4 *)t.o[n] = t.folded[n * COMPUTE];
    if (piece.partial < 0)
        store_rows(args, piece, head, t.o, t.sum_a, t.sum_b, rows, column);
    else
        store_partial<D>(args.core[1], partial, t.o, t.sum_a, t.sum_b, rows, column);
}

/* ---- kernel -------------------------------------------------------------------------------- */

template <int D>
static __device__ __forceinline__ void begin(wide_state<D> &t, const attention_args &args,
                                             const attention_piece &piece, int head,
                                             const row_pair &rows, float4 *folded)
{
    load_queries<D>(t.q, args, piece, head, rows);
    t.chunk_a = t.chunk_b = t.sum_a = t.sum_b = {-INFINITY, 0.0f};
    t.folded = folded + threadIdx.x;
#pragma unroll
    for (int n = 0; n < D / 8; n++)
        t.folded[n * COMPUTE] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
}

template <int D>
static __device__ __forceinline__ void attend(const attention_args &args,
                                              const attention_piece &piece, int head,
                                              key_ring *ring, float4 *folded)
{
    int first = (int)(threadIdx.x >> 5) * 16;
    row_pair rows = rows_of(piece, args.group, first);
    int64_t partial = piece.partial + (int64_t)head * piece.stride;
    int lowest = piece.position + min(first / args.group, piece.rows - 1);
    bool live = first < rows.n, fresh = true;
    ring_slot keys = ring_take<D>(ring);
    wide_state<D> t;

    begin(t, args, piece, head, rows, folded);
    ring_wait(keys);
    wgmma_fence();
    multiply_keys(t, keys.memory);
    wgmma_wait<0>();
    wgmma_arrived<SCORES>(t.s);
    barrier_arrive(keys.empty);
    finish_scores(t, piece.tile, args.scale, lowest, rows, live);
    for (int tile = piece.tile;; tile++) {
        bool more = tile + 1 < piece.tile_end, edge = !more || (tile + 1) % CHUNK_TILES == 0;
        ring_slot values = ring_take<D>(ring);
        row_sum a = t.chunk_a, b = t.chunk_b;

        pack_probabilities(t);
        if (!fresh)
            scale_rows(t.o, t.by);
        if (more) {
            keys = ring_take<D>(ring);
            ring_wait(values);
            ring_wait(keys);
            wgmma_fence();
            multiply_keys(t, keys.memory);
            multiply_values(t, values.memory, fresh);
            wgmma_wait<1>();
            wgmma_arrived<SCORES>(t.s);
            barrier_arrive(keys.empty);
            if (edge)
                t.chunk_a = t.chunk_b = {-INFINITY, 0.0f};
            finish_scores(t, tile + 1, args.scale, lowest, rows, live);
        } else {
            ring_wait(values);
            wgmma_fence();
            multiply_values(t, values.memory, fresh);
        }
        wgmma_wait<0>();
        wgmma_arrived<D / 2>(&t.o[0][0]);
        barrier_arrive(values.empty);
        if (edge)
            close_chunk(t, args, piece, partial, tile, a, b, rows);
        fresh = edge;
        if (!more)
            break;
    }
    if (piece.tile == 0)
        store_result(t, args, piece, head, partial, rows);
}

template <int D>
static __device__ __forceinline__ void attend_items(const attention_args &args, key_ring *ring,
                                                    item_queue *queue, float4 *folded)
{
    attention_piece piece;

    for (int n = 0, head; (head = queue_take(queue, n, &piece)) >= 0; n++)
        attend<D>(args, piece, head, ring, folded);
}

#endif

template <int D>
__global__ void __launch_bounds__(THREADS, 1)
    attention_wide_kernel(const __grid_constant__ attention_args args, int slots)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ uint8_t memory[];
    __shared__ wide_shared shared;
    int warp = __shfl_sync(~0u, (int)threadIdx.x >> 5, 0);
    uint32_t start = (shared_address(memory) + ATOM_BYTES - 1) & ~(ATOM_BYTES - 1);
    key_ring ring = {start, shared_address(shared.full), shared_address(shared.empty), slots, 0, 0};

    if (threadIdx.x == 0) {
        queue_init(&shared.queue, WARPS);
        ring_init(ring, WARPS);
    }
    __syncthreads();
    wait_predecessor();
    release_successor();
    if (warp >= WARPS) {
        registers_down_to<24>();
        if (warp == WARPS)
            fill_items<D>(&ring, &shared.queue, args, args.core[1]);
    } else {
        registers_up_to<240>();
        attend_items<D>(
            args, &ring, &shared.queue,
            (float4 *)(memory + (start - shared_address(memory)) + slots * ring_of<D>::SLOT_BYTES));
    }
#endif
}

/* ---- launch -------------------------------------------------------------------------------- */

/* Whether this object has the kernels for the GPU at hand. */
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
__device__ int attention_wide_is_built = 1;
#else
__device__ int attention_wide_is_built = 0;
#endif

typedef void wide_fn(const attention_args args, int slots);

static wide_fn *kernel_of(int page_dim)
{
    return page_dim == 64 ? attention_wide_kernel<64> : attention_wide_kernel<128>;
}

static int slot_bytes_of(int page_dim)
{
    return page_dim == 64 ? ring_of<64>::SLOT_BYTES : ring_of<128>::SLOT_BYTES;
}

static int fold_bytes_of(int page_dim)
{
    return page_dim == 64 ? wide_of<64>::FOLD_BYTES : wide_of<128>::FOLD_BYTES;
}

/* Of each GPU; written at its init, before any launch on it. */
static bool built[SP_CUDA_GPUS_MAX];

attention_shape sp_cuda_attention_wide_shape(int gpu, int page_dim)
{
    const int other = (int)sizeof(wide_shared) + ATOM_BYTES;
    int processors = 0, bytes = 0, slots;
    attention_shape shape = {};

    if (gpu >= SP_CUDA_GPUS_MAX || !built[gpu] || page_dim > 128)
        return shape;
    (void)cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, gpu);
    (void)cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, gpu);
    slots = (bytes - other - fold_bytes_of(page_dim)) / slot_bytes_of(page_dim);
    slots = slots < RING_SLOTS_MAX ? slots : RING_SLOTS_MAX;
    if (slots < 3) /* two are read at a time */
        return shape;
    shape.slots = slots;
    shape.processors = processors;
    shape.blocks = processors;
    shape.shared_bytes =
        (size_t)(slots * slot_bytes_of(page_dim) + fold_bytes_of(page_dim) + ATOM_BYTES);
    return shape;
}

cudaError_t sp_cuda_attention_wide(const attention_args *args, const attention_shape *shape,
                                   cudaStream_t stream)
{
    cudaLaunchAttribute overlap;
    cudaLaunchConfig_t config = sp_cuda_overlapping(dim3((unsigned)shape->blocks), THREADS,
                                                    shape->shared_bytes, &overlap, false, stream);

    return cudaLaunchKernelEx(&config, kernel_of(sp_cuda_page_dim(args->a.shape.head_dim)), *args,
                              shape->slots);
}

cudaError_t sp_cuda_attention_wide_init(int gpu)
{
    int is_built = 0;
    cudaError_t code = cudaMemcpyFromSymbol(&is_built, attention_wide_is_built, sizeof is_built);

    if (code != cudaSuccess || gpu >= SP_CUDA_GPUS_MAX)
        return code;
    built[gpu] = is_built != 0;
    for (int dim = 64; dim <= 128 && code == cudaSuccess; dim *= 2) {
        attention_shape shape = sp_cuda_attention_wide_shape(gpu, dim);

        if (shape.slots > 0)
            code = cudaFuncSetAttribute(kernel_of(dim), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        (int)shape.shared_bytes);
    }
    return code;
}
