/*
 * delta_rule_prefill.cu: the gated delta rule of spans of many rows, after delta_rule_prepare.cu:
 * the same sums as delta_rule.cu, in its order, with more of them at a time.
 *
 * Grid: (value heads * SPLIT, spans). A cluster of SPLIT blocks has a value head, a block half of
 * its columns of v. Half of a block's warps keep S and go from border to border: Sᵀk, r and the
 * fold. The others compute the output: Sᵀq, o and y. The first give the second S, split, and r,
 * split, through shared memory, so two phases of a chunk have a barrier each:
 *
 *     A: Sᵀk, r                 y of the chunk before, Sᵀq
 *     B: fold, S is split       o, its squares
 *
 * The barrier before A is the cluster's: with it the sums of squares of the other block are there.
 * All rows of a chunk are computed, those that it lacks too: nothing of them is stored. Bound by
 * the latency of the first warps' products, chunk after chunk.
 */
#include "kernels/cuda/bulk.cuh"
#include "kernels/cuda/delta_rule_chunk.cuh"
#include "kernels/cuda/launch.cuh"

#define SPLIT       2
#define BLOCK_WARPS (WARPS_MAX / SPLIT) /* that keep S; as many compute the output */
#define THREADS_MAX (2 * BLOCK_WARPS * SP_WARP)

/* In shared memory after the stages and r. */
typedef struct prefill_shared {
    uint4 *state;    /* [warps, k_width / 16, 2, 32] upper, lower parts of S as a left operand */
    uint4 *r;        /* [warps, 2, 2, 32] of the halves of r */
    uint32_t halves; /* the barrier of halves_sync */
} prefill_shared;

/* Sums of squares of two chunks. */
typedef struct prefill_sums {
    float of[2][WARPS_MAX][CHUNK];
} prefill_sums;

static __host__ __device__ __forceinline__ int prefill_bytes(int k_width, int width)
{
    int warps = width / 16;

    return 2 * stage_bytes(k_width, width) + warps * SP_WARP * 16 * (TILES + k_width / 8 + 4);
}

static __device__ __forceinline__ void cluster_sync(void)
{
#if __CUDA_ARCH__ >= 900
    cluster_arrive();
    cluster_wait();
#endif
}

/* __syncthreads for code of which each half of the block has its own copy. `parity` alternates,
 * from 0. */
static __device__ __forceinline__ void halves_sync(uint32_t barrier, int parity)
{
    barrier_arrive(barrier);
    barrier_wait(barrier, parity);
}

/* Stores to the same address in the shared memory of block `rank` of the cluster. */
static __device__ __forceinline__ void store_to_block(float *at, int rank, float value)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("{\n\t.reg .u32 there;\n\t"
                 "mapa.shared::cluster.u32 there, %0, %1;\n\t"
                 "st.shared::cluster.f32 [there], %2;\n\t}" ::"r"(shared_address(at)),
                 "r"(rank), "f"(value)
                 : "memory");
#endif
}

/* ---- the warps that keep S ----------------------------------------------------------------- */

template <int KT>
static __device__ __forceinline__ void give_state(const rule_state<KT> &state, uint4 *to)
{
#pragma unroll
    for (int i = 0; i < KT; i++) {
        uint32_t upper[4], lower[4];

        split_state<KT>(state, i, upper, lower);
        to[2 * i * SP_WARP] = make_uint4(upper[0], upper[1], upper[2], upper[3]);
        to[(2 * i + 1) * SP_WARP] = make_uint4(lower[0], lower[1], lower[2], lower[3]);
    }
}

/* Sᵀk, or Sᵀq, of all rows of a chunk; rows: [CHUNK, k_width + PAD]. */
template <int KT>
static __device__ __forceinline__ void multiply_rows(const uint4 *state, const uint16_t *rows,
                                                     float (&c)[TILES][4])
{
    const int stride = (KT * 16 + PAD) * 2;
    int lane = threadIdx.x & 31;
    uint32_t at =
        shared_address(rows) + ((lane >> 4) * 8 + (lane & 7)) * stride + (lane >> 3 & 1) * 16;

#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            c[t][e] = 0.0f;
#pragma unroll
    for (int i = 0; i < KT; i++) {
        uint4 b0 = load_matrices(at + i * 32), b1 = load_matrices(at + 16 * stride + i * 32);

#pragma unroll
        for (int part = 0; part < 2; part++) {
            uint4 l = state[(2 * i + part) * SP_WARP];

            mma<0>(c[0], l.x, l.y, l.z, l.w, b0.x, b0.y);
            mma<0>(c[1], l.x, l.y, l.z, l.w, b0.z, b0.w);
            mma<0>(c[2], l.x, l.y, l.z, l.w, b1.x, b1.y);
            mma<0>(c[3], l.x, l.y, l.z, l.w, b1.z, b1.w);
        }
    }
}

template <int KT>
static __device__ __forceinline__ void advance_rows(const rule_args &a, const rule_place &p,
                                                    const chunk_stage &s, const uint4 *state,
                                                    int border, const rule_r &r, uint4 *to)
{
    const chunk_rows rows = rows_of_chunk(p.span, border);
    float of_k[TILES][4];
    bool finite = true;

    multiply_rows<KT>(state, s.k, of_k);
#pragma unroll
    for (int t = 0; t < TILES; t++)
        finite = find_r(p, s, t, rows, of_k[t], r) && finite;
    if (!finite)
        a.d.fault[p.index] = 1;
    if (border >= p.keep)
        store_r(a, p, border, rows, r);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const rule_parts parts = split_r(r, half);
        const uint32_t *x = parts.upper, *y = parts.lower;

        to[2 * half * SP_WARP] = make_uint4(x[0], x[1], x[2], x[3]);
        to[(2 * half + 1) * SP_WARP] = make_uint4(y[0], y[1], y[2], y[3]);
    }
}

/* ---- the warps of the output --------------------------------------------------------------- */

/* A chunk whose y waits for the sums of the other block. */
typedef struct open_rows {
    float o[TILES][4], z[TILES][4];
    chunk_rows rows; /* none: rows.end is 0 */
    int border;
} open_rows;

static __device__ __forceinline__ rule_parts take_parts(const uint4 *from)
{
    uint4 x = from[0], y = from[SP_WARP];

    return {{x.x, x.y, x.z, x.w}, {y.x, y.y, y.z, y.w}};
}

/* o of the rows, from Sᵀq in it; the sums of squares go to both blocks. */
static __device__ __forceinline__ void find_rows(const rule_args &a, const rule_place &p,
                                                 const chunk_stage &s, const uint4 *r,
                                                 float (*sums)[CHUNK], open_rows *open)
{
    const rule_parts parts[2] = {take_parts(r), take_parts(r + 2 * SP_WARP)};
    int lane = threadIdx.x & 31;
    float *own = sums[(p.column + own_columns(p)) / 16];

    find_o<0>(a, s, parts, open->o[0], open->o[0], own);
    find_o<1>(a, s, parts, open->o[1], open->o[1], own);
    find_o<2>(a, s, parts, open->o[2], open->o[2], own);
    find_o<3>(a, s, parts, open->o[3], open->o[3], own);
#pragma unroll
    for (int t = 0; t < TILES; t++)
        load_columns(p, s.z, t, open->z[t]);
    __syncwarp();
    store_to_block(own + lane, p.column == 0 ? 1 : 0, own[lane]);
}

static __device__ __forceinline__ void finish_rows(const rule_args &a, const rule_place &p,
                                                   const prefill_sums &sums, const open_rows &open)
{
    float inverse;

    if (open.rows.end == 0)
        return;
    inverse = inverse_of(a, open.rows, sums.of[open.border / CHUNK & 1]);
#pragma unroll
    for (int t = 0; t < TILES; t++)
        store_y(a, p, t, open.border, open.rows, inverse, open.z[t], open.o[t]);
}

/* ---- kernel -------------------------------------------------------------------------------- */

/* One of the block's two halves, through all chunks. All threads of the cluster come to the same
 * barriers. */
template <int KT, bool KEEPS>
static __device__ __forceinline__ void run(const rule_args &a, const rule_place &p, char *stages,
                                           const rule_r &r, const prefill_shared &shared,
                                           prefill_sums *sums)
{
    int warp = own_columns(p) / 16, lane = threadIdx.x & 31;
    int border = p.span.load >= 0 ? p.span.position : p.span.folded;
    uint4 *own_state = shared.state + warp * KT * 2 * SP_WARP + lane;
    uint4 *own_r = shared.r + warp * 4 * SP_WARP + lane;
    rule_state<KT> state;
    open_rows open;
    int parity = 0;

    open.rows.end = 0;
    if (KEEPS) {
        load_state<KT>(a, p, &state);
        load_r(a, p, border, r);
        give_state<KT>(state, own_state);
    }
    wait_predecessor();
    copy_chunk(a, p, stages, border);
    for (;; border += CHUNK) {
        const chunk_stage s = find_stage(a, p.width, stages, border);
        const chunk_rows rows = rows_of_chunk(p.span, border);
        bool is_new = rows.end > rows.first;

        if (KEEPS && border == p.keep && p.changes)
            store_state<KT>(a, p, state, slot_of(a.d, p.span.slot));
        if (border == p.span.position && p.span.save >= 0) {
            if (KEEPS)
                store_state<KT>(a, p, state, snapshot_of(a.d, p.span.save));
            if (p.column == 0)
                save_inputs(a, p);
        }
        copy_wait<0>();
        cluster_sync();
        if (!KEEPS)
            finish_rows(a, p, *sums, open);
        if (border >= p.end)
            break;
        copy_chunk(a, p, stages, border + CHUNK);
        if (is_new && KEEPS)
            advance_rows<KT>(a, p, s, own_state, border, r, own_r);
        else if (is_new)
            multiply_rows<KT>(own_state, s.q, open.o);
        halves_sync(shared.halves, parity);
        parity ^= 1;
        open.rows = is_new ? rows : chunk_rows{0, 0};
        open.border = border;
        if (!KEEPS && is_new)
            find_rows(a, p, s, own_r, sums->of[border / CHUNK & 1], &open);
        if (KEEPS && rows.end == CHUNK && (border + CHUNK < p.end || border + CHUNK <= p.keep)) {
            fold<KT>(s, r, &state);
            give_state<KT>(state, own_state);
        }
        if (KEEPS)
            load_r(a, p, border + CHUNK, r);
    }
}

/* KT: k_width / 16. */
template <int KT>
__global__ void __launch_bounds__(THREADS_MAX, 1)
    prefill_kernel(const __grid_constant__ rule_args a)
{
    extern __shared__ __align__(16) char memory[];
    __shared__ rule_place p;
    __shared__ prefill_sums sums;
    __shared__ uint64_t halves;
    int width = a.l.v_width / SPLIT, half = width / 16 * SP_WARP;
    char *stages = memory + half * TILES * sizeof(float4);
    const rule_r r = {(float4 *)memory + threadIdx.x % half, half};
    prefill_shared shared;

    release_successor();
    shared.halves = shared_address(&halves);
    if (threadIdx.x == 0) {
        p = find_place(a, blockIdx.x / SPLIT, (int)(blockIdx.x % SPLIT) * width, width);
        barrier_init(shared.halves, (int)blockDim.x);
    }
    __syncthreads();
    shared.state = (uint4 *)(stages + 2 * stage_bytes(KT * 16, width));
    shared.r = shared.state + half * 2 * KT;
    if (p.span.n_rows == 0) {
        wait_predecessor();
        return;
    }
    if ((int)threadIdx.x < half)
        run<KT, true>(a, p, stages, r, shared, &sums);
    else
        run<KT, false>(a, p, stages, r, shared, &sums);
    if (p.column == 0) {
        keep_inputs(a, p);
        keep_matrices(a, p);
    }
}

/* ---- launch -------------------------------------------------------------------------------- */

template <int KT> static cudaError_t launch(const rule_args *a, cudaStream_t stream)
{
    int width = a->l.v_width / SPLIT;
    cudaLaunchAttribute attributes[2];
    cudaLaunchConfig_t config =
        sp_cuda_overlapping(dim3((unsigned)(a->d.shape.v_heads * SPLIT), (unsigned)a->d.spans),
                            2 * width / 16 * SP_WARP, (size_t)prefill_bytes(KT * 16, width),
                            &attributes[1], false, stream);

    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim.x = SPLIT;
    attributes[0].val.clusterDim.y = 1;
    attributes[0].val.clusterDim.z = 1;
    config.attrs = attributes;
    config.numAttrs = 1 + config.numAttrs;
    return cudaLaunchKernelEx(&config, prefill_kernel<KT>, *a);
}

cudaError_t sp_cuda_rule_prefill(const rule_args *a, cudaStream_t stream)
{
    /* Code without clusters, or an odd number of tiles of v. */
    if (!sp_cuda_overlaps() || a->l.v_width % (16 * SPLIT) != 0)
        return cudaErrorNotSupported;
    switch (a->l.k_width) {
    case 32:
        return launch<2>(a, stream);
    case 64:
        return launch<4>(a, stream);
    default:
        return launch<8>(a, stream);
    }
}

template <int KT> static cudaError_t allow(cudaError_t before)
{
    return before != cudaSuccess
               ? before
               : cudaFuncSetAttribute(prefill_kernel<KT>,
                                      cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      prefill_bytes(KT * 16, SP_CUDA_RULE_DIM_MAX / SPLIT));
}

cudaError_t sp_cuda_rule_prefill_init(void)
{
    return allow<2>(allow<4>(allow<8>(cudaSuccess)));
}
