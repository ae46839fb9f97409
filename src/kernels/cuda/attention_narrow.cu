/*
 * attention_narrow.cu: attention of a query tile of 16 packed rows, for decode and verification; on
 * GPUs without the wide core, for every span.
 *
 * Grid: one block for each piece of the plan and kv head, the heads of a piece adjacent; blocks
 * beyond the plan's pieces end at once. Four warps share the 16 rows: warp w computes the scores
 * of key groups n = w mod 4 (chain w of the sums) and the columns w * D / 4 .. of o, and reads the
 * others' P through shared memory. A fifth warp fills the ring. Bound by the bytes of K and V.
 */
#include "kernels/cuda/attention_ring.cuh"
#include "kernels/cuda/attention_rows.cuh"
#include "kernels/cuda/launch.cuh"

#define ROWS    16
#define WARPS   4 /* that compute */
#define THREADS ((WARPS + 1) * SP_WARP)
#define CHAINS  4 /* of key groups; one per warp */
#define OWN     (KEY_GROUPS / CHAINS)
#define P_BYTES (ATTENTION_TILE * 2) /* of a row of P */

static_assert(WARPS == CHAINS, "a warp has one chain of the sums");

typedef struct narrow_shared {
    uint64_t full[RING_SLOTS_MAX], empty[RING_SLOTS_MAX];
    alignas(16) uint8_t p[ROWS * P_BYTES]; /* 16-byte piece c of row r at c ^ (r % 8) */
    float most[WARPS][ROWS];
    float2 sums[WARPS][SP_WARP];
} narrow_shared;

template <int D> struct narrow_state {
    static constexpr int GROUPS = D / 8 / WARPS; /* of 8 columns of o in this warp */
    uint32_t q[D / 16][4];
    float o[GROUPS][4], folded[GROUPS][4];
    row_sum chunk_a, chunk_b, sum_a, sum_b;

    /* The thread's first column of o. */
    __device__ int column(void) const
    {
        return (int)(threadIdx.x >> 5) * GROUPS * 8 + 2 * (int)(threadIdx.x & 3);
    }
};

/* The warps that compute, without the one that fills. */
static __device__ __forceinline__ void join_warps(void)
{
    meet(1, WARPS * SP_WARP);
}

/* ---- scores -------------------------------------------------------------------------------- */

/* s of the warp's key groups: group i of it is group warp + CHAINS * i of the tile. */
template <int D>
static __device__ __forceinline__ void multiply_keys(float (&s)[OWN][4],
                                                     const uint32_t (&q)[D / 16][4], key_ring *ring)
{
    using R = ring_of<D>;
    constexpr int EACH = OWN / R::PARTS;
    int warp = threadIdx.x >> 5, matrix = (threadIdx.x & 31) >> 3, row = threadIdx.x & 7;

#pragma unroll
    for (int part = 0; part < R::PARTS; part++) {
        ring_slot slot = ring_take<D>(ring);
        uint32_t from = slot.memory + warp * R::GROUP_BYTES + row * 128;

        ring_wait(slot);

#pragma unroll
        for (int k = 0; k < D / 32; k++)
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                float *to = s[part * EACH + i];
                uint4 b = load_matrices(from + CHAINS * i * R::GROUP_BYTES + k / 2 * ATOM_BYTES +
                                        ((k % 2 * 4 + matrix) ^ row) * 16);

                mma<0>(to, q[2 * k][0], q[2 * k][1], q[2 * k][2], q[2 * k][3], b.x, b.y);
                mma<0>(to, q[2 * k + 1][0], q[2 * k + 1][1], q[2 * k + 1][2], q[2 * k + 1][3], b.z,
                       b.w);
            }
        ring_release(slot);
    }
}

/* The largest score of each row, over all warps. */
static __device__ __forceinline__ float2 find_most(const float (&s)[OWN][4], narrow_shared *shared)
{
    int warp = threadIdx.x >> 5, a = (threadIdx.x & 31) >> 2;
    float2 most = {fmaxf(s[0][0], s[0][1]), fmaxf(s[0][2], s[0][3])};

#pragma unroll
    for (int i = 1; i < OWN; i++) {
        most.x = fmaxf(most.x, fmaxf(s[i][0], s[i][1]));
        most.y = fmaxf(most.y, fmaxf(s[i][2], s[i][3]));
    }
    most.x = quad_max(most.x);
    most.y = quad_max(most.y);
    if ((threadIdx.x & 3) == 0) {
        shared->most[warp][a] = most.x;
        shared->most[warp][a + 8] = most.y;
    }
    join_warps();
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        most.x = fmaxf(most.x, shared->most[w][a]);
        most.y = fmaxf(most.y, shared->most[w][a + 8]);
    }
    return most;
}

/* s becomes P in FP32; the warp's part of P goes to shared memory as bf16. Returns the sums of its
 * chain, rows a and b. */
static __device__ __forceinline__ float2 store_probabilities(float (&s)[OWN][4], float scale,
                                                             row_scale a, row_scale b, uint8_t *p)
{
    int warp = threadIdx.x >> 5, row = (threadIdx.x & 31) >> 2, column = (threadIdx.x & 3) * 4;
    float2 sums = {0.0f, 0.0f};

#pragma unroll
    for (int i = 0; i < OWN; i++) {
        uint8_t *to = p + row * P_BYTES + (((warp + CHAINS * i) ^ (row & 7)) << 4) + column;
        float2 two;

        s[i][0] = probability(s[i][0], scale, a.offset);
        s[i][1] = probability(s[i][1], scale, a.offset);
        s[i][2] = probability(s[i][2], scale, b.offset);
        s[i][3] = probability(s[i][3], scale, b.offset);
        two = {__fadd_rn(s[i][0], s[i][1]), __fadd_rn(s[i][2], s[i][3])};
        sums.x = i == 0 ? two.x : __fadd_rn(sums.x, two.x);
        sums.y = i == 0 ? two.y : __fadd_rn(sums.y, two.y);
        *(uint32_t *)to = narrow_two<0>(s[i][0], s[i][1]);
        *(uint32_t *)(to + 8 * P_BYTES) = narrow_two<0>(s[i][2], s[i][3]);
    }
    return sums;
}

/* Scores to P in shared memory; returns how o of rows a and b is scaled. */
static __device__ __forceinline__ float2 soften(float (&s)[OWN][4], float scale, row_sum *a,
                                                row_sum *b, narrow_shared *shared)
{
    int lane = threadIdx.x & 31;
    float2 most = find_most(s, shared), c[CHAINS];
    row_scale by_a = raise_max(a, most.x, scale), by_b = raise_max(b, most.y, scale);

    shared->sums[threadIdx.x >> 5][lane] = store_probabilities(s, scale, by_a, by_b, shared->p);
    join_warps();
#pragma unroll
    for (int w = 0; w < CHAINS; w++)
        c[w] = shared->sums[w][lane];
    a->l = __fmaf_rn(a->l, by_a.sums, join_chains(c[0].x, c[1].x, c[2].x, c[3].x));
    b->l = __fmaf_rn(b->l, by_b.sums, join_chains(c[0].y, c[1].y, c[2].y, c[3].y));
    return {by_a.sums, by_b.sums};
}

/* ---- values -------------------------------------------------------------------------------- */

/* o += P · V, the warp's columns. */
template <int D>
static __device__ __forceinline__ void multiply_values(float (&o)[narrow_state<D>::GROUPS][4],
                                                       uint32_t p, key_ring *ring)
{
    using R = ring_of<D>;
    constexpr int GROUPS = narrow_state<D>::GROUPS;
    int matrix = (threadIdx.x & 31) >> 3, row = threadIdx.x & 7;
    int first = (int)(threadIdx.x >> 5) * GROUPS;

    p += (matrix % 2 * 8 + row) * P_BYTES;
#pragma unroll
    for (int part = 0; part < R::PARTS; part++) {
        ring_slot slot = ring_take<D>(ring);
        uint32_t from = slot.memory + matrix % 2 * R::GROUP_BYTES + row * 128;

        ring_wait(slot);

#pragma unroll
        for (int k = 0; k < R::PAGES; k++) {
            uint4 a = load_matrices(p + (((2 * (part * R::PAGES + k) + matrix / 2) ^ row) << 4));

#pragma unroll
            for (int n = 0; n < GROUPS; n += 2) {
                int column = first + n;
                uint4 b = load_transposed(from + k * R::PAGE_BYTES + column / 8 * ATOM_BYTES +
                                          ((column % 8 + matrix / 2) ^ row) * 16);

                mma<0>(o[n], a.x, a.y, a.z, a.w, b.x, b.y);
                mma<0>(o[n + 1], a.x, a.y, a.z, a.w, b.z, b.w);
            }
        }
        ring_release(slot);
    }
}

/* ---- chunks and results -------------------------------------------------------------------- */

template <int D> static __device__ __forceinline__ void fold_chunk(narrow_state<D> *t, float scale)
{
    fold_scale a = fold_rows(&t->sum_a, t->chunk_a, scale);
    fold_scale b = fold_rows(&t->sum_b, t->chunk_b, scale);

#pragma unroll
    for (int n = 0; n < t->GROUPS; n++) {
        t->folded[n][0] = fold(t->folded[n][0], a.sum, t->o[n][0], a.chunk);
        t->folded[n][1] = fold(t->folded[n][1], a.sum, t->o[n][1], a.chunk);
        t->folded[n][2] = fold(t->folded[n][2], b.sum, t->o[n][2], b.chunk);
        t->folded[n][3] = fold(t->folded[n][3], b.sum, t->o[n][3], b.chunk);
    }
}

/* Ends the chunk whose last tile is `tile`: a piece from the first key on folds its chunks, another
 * hands each of them out. */
template <int D>
static __device__ __forceinline__ void close_chunk(narrow_state<D> *t, const attention_args &args,
                                                   const attention_piece &piece, int64_t partial,
                                                   int tile, const row_pair &rows)
{
    t->chunk_a.l = quad_sum(t->chunk_a.l);
    t->chunk_b.l = quad_sum(t->chunk_b.l);
    if (piece.tile == 0)
        fold_chunk<D>(t, args.scale);
    else
        store_partial<D>(args.core[0], partial + (tile - piece.tile) / CHUNK_TILES * rows.n, t->o,
                         t->chunk_a, t->chunk_b, rows, t->column());
    t->chunk_a = t->chunk_b = {-INFINITY, 0.0f};
    zero_rows(t->o);
}

/* ---- kernel -------------------------------------------------------------------------------- */

template <int D>
static __device__ __forceinline__ void attend(const attention_args &args,
                                              const attention_piece &piece, int head,
                                              key_ring *ring, narrow_shared *shared)
{
    row_pair rows = rows_of(piece, args.group, 0);
    int64_t partial = piece.partial + (int64_t)head * piece.stride;
    int column = (int)(threadIdx.x >> 5) * 8 + 2 * (int)(threadIdx.x & 3);
    narrow_state<D> t;

    load_queries<D>(t.q, args, piece, head, rows);
    t.chunk_a = t.chunk_b = t.sum_a = t.sum_b = {-INFINITY, 0.0f};
    zero_rows(t.o);
    zero_rows(t.folded);
    for (int tile = piece.tile; tile < piece.tile_end; tile++) {
        float s[OWN][4] = {};
        float2 by;

        multiply_keys<D>(s, t.q, ring);
        if (tile * ATTENTION_TILE + ATTENTION_TILE - 1 > piece.position)
#pragma unroll
            for (int i = 0; i < OWN; i++)
                mask(s[i], tile * ATTENTION_TILE + CHAINS * 8 * i + column, rows.position_a,
                     rows.position_b);
        by = soften(s, args.scale, &t.chunk_a, &t.chunk_b, shared);
        scale_rows(t.o, by);
        multiply_values<D>(t.o, shared_address(shared->p), ring);
        if (tile + 1 == piece.tile_end || (tile + 1) % CHUNK_TILES == 0)
            close_chunk<D>(&t, args, piece, partial, tile, rows);
    }
    if (piece.partial < 0)
        store_rows(args, piece, head, t.folded, t.sum_a, t.sum_b, rows, t.column());
    else if (piece.tile == 0)
        store_partial<D>(args.core[0], partial, t.folded, t.sum_a, t.sum_b, rows, t.column());
}

template <int D>
__global__ void __launch_bounds__(THREADS, D > 128 ? 1 : 2)
    attention_narrow_kernel(const __grid_constant__ attention_args args, int slots)
{
    extern __shared__ uint8_t memory[];
    __shared__ narrow_shared shared;
    int kv_heads = args.a.shape.kv_heads, head = (int)blockIdx.x % kv_heads;
    key_ring ring = {(shared_address(memory) + ATOM_BYTES - 1) & ~(ATOM_BYTES - 1),
                     shared_address(shared.full),
                     shared_address(shared.empty),
                     slots,
                     0,
                     0};

    if (threadIdx.x == 0)
        ring_init(ring, WARPS);
    __syncthreads();
    wait_predecessor();
    release_successor();
    if ((int)blockIdx.x >= args.core[0].counts->pieces * kv_heads)
        return;
    attention_piece piece = args.core[0].pieces[blockIdx.x / kv_heads];

    if (threadIdx.x >> 5 == WARPS)
        fill_ring<D>(&ring, source_of<D>(args, piece, head), piece.tile, piece.tile_end);
    else
        attend<D>(args, piece, head, &ring, &shared);
}

/* ---- launch -------------------------------------------------------------------------------- */

typedef void narrow_fn(const attention_args args, int slots);

static narrow_fn *kernel_of(int page_dim)
{
    return page_dim == 64    ? attention_narrow_kernel<64>
           : page_dim == 128 ? attention_narrow_kernel<128>
                             : attention_narrow_kernel<256>;
}

static int slot_bytes_of(int page_dim)
{
    return page_dim == 64    ? ring_of<64>::SLOT_BYTES
           : page_dim == 128 ? ring_of<128>::SLOT_BYTES
                             : ring_of<256>::SLOT_BYTES;
}

/* One or two blocks per multiprocessor; two only where each then has three slots, and registers
 * enough. */
attention_shape sp_cuda_attention_narrow_shape(int gpu, int page_dim, int per_processor)
{
    const int other = (int)sizeof(narrow_shared) + 2 * ATOM_BYTES; /* and the system's 1 KiB */
    int processors = 0, of_block = 0, of_all = 0, slot = slot_bytes_of(page_dim), slots;
    attention_shape shape = {};

    (void)cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, gpu);
    (void)cudaDeviceGetAttribute(&of_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, gpu);
    (void)cudaDeviceGetAttribute(&of_all, cudaDevAttrMaxSharedMemoryPerMultiprocessor, gpu);
    slots = (of_all / 2 - other) / slot;
    if (slots < 3 || page_dim > 128 || per_processor < 2) {
        per_processor = 1;
        slots = (of_block - other) / slot;
    }
    shape.slots = slots < RING_SLOTS_MAX ? slots : RING_SLOTS_MAX;
    shape.processors = processors;
    shape.blocks = per_processor * processors;
    shape.shared_bytes = (size_t)shape.slots * (size_t)slot + ATOM_BYTES;
    return shape;
}

cudaError_t sp_cuda_attention_narrow(const attention_args *args, const attention_shape *shape,
                                     cudaStream_t stream)
{
    int blocks = args->core[0].pieces_max * args->a.shape.kv_heads;
    cudaLaunchAttribute overlap;
    cudaLaunchConfig_t config = sp_cuda_overlapping(dim3((unsigned)blocks), THREADS,
                                                    shape->shared_bytes, &overlap, false, stream);

    return cudaLaunchKernelEx(&config, kernel_of(sp_cuda_page_dim(args->a.shape.head_dim)), *args,
                              shape->slots);
}

cudaError_t sp_cuda_attention_narrow_init(int gpu)
{
    cudaError_t code = cudaSuccess;

    for (int dim = 64; dim <= 256 && code == cudaSuccess; dim *= 2) {
        attention_shape shape = sp_cuda_attention_narrow_shape(gpu, dim, 1);

        if (shape.slots > 0)
            code = cudaFuncSetAttribute(kernel_of(dim), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        (int)shape.shared_bytes);
    }
    return code;
}
