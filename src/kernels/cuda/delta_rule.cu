/*
 * delta_rule.cu: the gated delta rule of the spans of a step, after delta_rule_prepare.cu, and the
 * norm of its output: the form for shapes and GPUs that delta_rule_prefill.cu and delta_rule_few.cu
 * do not take.
 *
 * Grid: (value heads, spans). A block has a value head and goes through the chunks of its span in
 * order. S is read once, and is written only where the slot's border moves. A step of one row
 * computes a tile of 8.
 *
 * What the chunk's rows need is copied to shared memory one chunk ahead. S, and r of rows of
 * earlier steps, are loaded before the predecessor is complete: nothing in this step wrote them.
 * After the last chunk the rows that are still open go to the ring. In a wide step k must not, as a
 * block of another value head may still read it: keep_kernel does it, later. Bound by the bytes of
 * S.
 */
#include "kernels/cuda/delta_rule_chunk.cuh"
#include "kernels/cuda/launch.cuh"

/* r of all threads, and two stages. */
static int shared_bytes(int k_width, int v_width)
{
    return TILES * v_width / 16 * SP_WARP * 16 + 2 * stage_bytes(k_width, v_width);
}

/* ---- a chunk ------------------------------------------------------------------------------- */

/* Sᵀk and Sᵀq of the 8 rows from 8 * tile on. */
template <int KT>
static __device__ __forceinline__ void multiply_tile(const rule_state<KT> &state,
                                                     const chunk_stage &s, int tile,
                                                     float (&of_k)[4], float (&of_q)[4])
{
    const int stride = (KT * 16 + PAD) * 2;
    int lane = threadIdx.x & 31;
    uint32_t from = shared_address(lane < 16 ? s.k : s.q) + (8 * tile + (lane & 7)) * stride +
                    (lane >> 3 & 1) * 16;

#pragma unroll
    for (int e = 0; e < 4; e++)
        of_k[e] = of_q[e] = 0.0f;
#pragma unroll
    for (int i = 0; i < KT; i++) {
        uint32_t upper[4], lower[4];
        uint4 right = load_matrices(from + i * 32);

        split_state<KT>(state, i, upper, lower);
        mma<0>(of_k, upper[0], upper[1], upper[2], upper[3], right.x, right.y);
        mma<0>(of_q, upper[0], upper[1], upper[2], upper[3], right.z, right.w);
        mma<0>(of_k, lower[0], lower[1], lower[2], lower[3], right.x, right.y);
        mma<0>(of_q, lower[0], lower[1], lower[2], lower[3], right.z, right.w);
    }
}

/* A tile from Sᵀk to y, where it has new rows. All warps come here together. */
template <int TILE, int KT>
static __device__ __forceinline__ void compute_tile(const rule_args &a, const rule_place &p,
                                                    const chunk_stage &s,
                                                    const rule_state<KT> &state, int border,
                                                    chunk_rows rows, float (*sums)[CHUNK],
                                                    const rule_r &r)
{
    float of_k[4], of_q[4], o[4], z[4];
    rule_parts parts[2];

    if (8 * TILE + 8 <= rows.first || 8 * TILE >= rows.end)
        return;
    multiply_tile<KT>(state, s, TILE, of_k, of_q);
    if (!find_r(p, s, TILE, rows, of_k, r))
        a.d.fault[p.index] = 1;
    parts[0] = split_r(r, 0);
    if (TILE >= 2)
        parts[1] = split_r(r, 1);
    find_o<TILE>(a, s, parts, of_q, o, sums[threadIdx.x >> 5]);
    __syncthreads();
    load_columns(p, s.z, TILE, z);
    store_y(a, p, TILE, border, rows, inverse_of(a, {8 * TILE, 8 * TILE + 8}, sums), z, o);
}

template <int KT>
static __device__ __forceinline__ void compute_rows(const rule_args &a, const rule_place &p,
                                                    const chunk_stage &s,
                                                    const rule_state<KT> &state, int border,
                                                    float (*sums)[CHUNK], const rule_r &r)
{
    const chunk_rows rows = rows_of_chunk(p.span, border);

    compute_tile<0, KT>(a, p, s, state, border, rows, sums, r);
    compute_tile<1, KT>(a, p, s, state, border, rows, sums, r);
    compute_tile<2, KT>(a, p, s, state, border, rows, sums, r);
    compute_tile<3, KT>(a, p, s, state, border, rows, sums, r);
    if (border >= p.keep)
        store_r(a, p, border, rows, r);
}

/* ---- kernels ------------------------------------------------------------------------------- */

/* KT: k_width / 16. */
template <int KT>
__global__ void __launch_bounds__(WARPS_MAX *SP_WARP, 2)
    rule_kernel(const __grid_constant__ rule_args a)
{
    extern __shared__ __align__(16) char memory[];
    __shared__ float sums[WARPS_MAX][CHUNK];
    __shared__ rule_place p; /* not in registers, of which S takes half */
    const rule_r r = {(float4 *)memory + threadIdx.x, (int)blockDim.x};
    char *stages = memory + TILES * blockDim.x * sizeof(float4);
    rule_state<KT> state;
    int border;

    release_successor();
    if (threadIdx.x == 0)
        p = find_place(a, blockIdx.x, 0, a.l.v_width);
    __syncthreads();
    border = p.span.load >= 0 ? p.span.position : p.span.folded;
    if (p.span.n_rows == 0) {
        wait_predecessor();
        return;
    }
    load_state<KT>(a, p, &state);
    load_r(a, p, border, r);
    wait_predecessor();
    copy_chunk(a, p, stages, border);
    for (;; border += CHUNK) {
        const chunk_stage s = find_stage(a, p.width, stages, border);
        const chunk_rows rows = rows_of_chunk(p.span, border);

        if (border == p.keep && p.changes)
            store_state<KT>(a, p, state, slot_of(a.d, p.span.slot));
        if (border == p.span.position && p.span.save >= 0) {
            store_state<KT>(a, p, state, snapshot_of(a.d, p.span.save));
            save_inputs(a, p);
        }
        if (border >= p.end)
            break;
        copy_wait<0>();
        __syncthreads();
        copy_chunk(a, p, stages, border + CHUNK);
        if (rows.end > rows.first)
            compute_rows<KT>(a, p, s, state, border, sums, r);
        if (rows.end == CHUNK && (border + CHUNK < p.end || border + CHUNK <= p.keep))
            fold<KT>(s, r, &state);
        load_r(a, p, border + CHUNK, r);
    }
    keep_inputs(a, p);
    keep_matrices(a, p);
    if (!a.d.wide && p.head == p.k_head * a.l.per_key)
        keep_keys(a, p.span, p.keep, p.k_head);
}

/* Grid: (key heads, spans). */
__global__ void __launch_bounds__(128) keep_kernel(const __grid_constant__ rule_args a)
{
    const sp_cuda_rule_span span = a.d.span[blockIdx.y];

    release_successor();
    wait_predecessor();
    if (span.n_rows > 0)
        keep_keys(a, span, border_to_keep(span), blockIdx.x);
}

/* ---- launch -------------------------------------------------------------------------------- */

template <int KT> static cudaError_t launch(const rule_args *a, cudaStream_t stream)
{
    dim3 grid((unsigned)a->d.shape.v_heads, (unsigned)a->d.spans);
    size_t bytes = (size_t)shared_bytes(a->l.k_width, a->l.v_width);
    cudaLaunchAttribute overlap;
    cudaLaunchConfig_t config =
        sp_cuda_overlapping(grid, a->l.v_width / 16 * SP_WARP, bytes, &overlap, false, stream);

    return cudaLaunchKernelEx(&config, rule_kernel<KT>, *a);
}

static cudaError_t launch_width(const rule_args *a, cudaStream_t stream)
{
    switch (a->l.k_width) {
    case 32:
        return launch<2>(a, stream);
    case 64:
        return launch<4>(a, stream);
    default:
        return launch<8>(a, stream);
    }
}

static cudaError_t launch_wide(int gpu, const rule_args *a, cudaStream_t stream)
{
    dim3 grid((unsigned)a->d.shape.k_heads, (unsigned)a->d.spans);
    cudaLaunchAttribute overlap;
    cudaLaunchConfig_t config = sp_cuda_overlapping(grid, 128, 0, &overlap, false, stream);
    cudaError_t code = sp_cuda_rule_walk(gpu, a, stream);

    if (code == cudaErrorNotSupported)
        code = sp_cuda_rule_prefill(a, stream);
    if (code == cudaErrorNotSupported)
        code = launch_width(a, stream);
    return code == cudaSuccess ? cudaLaunchKernelEx(&config, keep_kernel, *a) : code;
}

static cudaError_t prepare(int gpu, rule_args *a, cudaStream_t stream)
{
    int blocks = a->d.wide ? sp_cuda_rule_walk_blocks(gpu, a) : 0;
    int stays = blocks > 0 ? sp_cuda_rule_stays(gpu, a, blocks) : 0;

    if (stays > 0)
        return sp_cuda_rule_prepare_apart(gpu, a, stays, stream);
    a->ready = NULL;
    return sp_cuda_rule_prepare(a, stream);
}

static bool is_possible(const sp_cuda_delta_rule &d)
{
    const sp_cuda_rule_shape &s = d.shape;

    return s.k_heads > 0 && s.v_heads % s.k_heads == 0 && s.k_dim > 0 && s.v_dim > 0 &&
           s.k_dim % 8 == 0 && s.v_dim % 8 == 0 && s.k_dim <= SP_CUDA_RULE_DIM_MAX &&
           s.v_dim <= SP_CUDA_RULE_DIM_MAX && s.conv_width >= 2 &&
           s.conv_width <= SP_CUDA_RULE_CONV_MAX && d.spans <= 65535;
}

extern "C" int sp_cuda_delta_rule_rows(int gpu, const sp_cuda_delta_rule *rule, void *stream)
{
    rule_args a = {*rule, sp_cuda_rule_lay_out(rule->shape)};
    char *scratch = (char *)rule->scratch;
    sp_cuda_current current(gpu);
    cudaError_t code = current.code;

    if (code != cudaSuccess || rule->rows == 0)
        return (int)code;
    if (!is_possible(*rule))
        return (int)cudaErrorInvalidValue;
    a.q = (uint16_t *)scratch;
    a.k = (uint16_t *)(scratch += sp_cuda_rule_align(rule->rows * a.l.q_row));
    a.v = (uint16_t *)(scratch += sp_cuda_rule_align(rule->rows * a.l.q_row));
    a.matrices = (uint16_t *)(scratch += sp_cuda_rule_align(rule->rows * a.l.v_row));
    a.gates = (float2 *)(scratch += sp_cuda_rule_align(rule->rows * a.l.matrix_row));
    a.ready = (int *)(scratch + sp_cuda_rule_align(rule->rows * a.l.gate_row));
    code = prepare(gpu, &a, (cudaStream_t)stream);
    if (code != cudaSuccess)
        return (int)code;
    if (rule->wide)
        return (int)launch_wide(gpu, &a, (cudaStream_t)stream);
    code = sp_cuda_rule_few(gpu, &a, (cudaStream_t)stream);
    if (code == cudaErrorNotSupported)
        code = launch_width(&a, (cudaStream_t)stream);
    return (int)code;
}

template <int KT> static cudaError_t allow(cudaError_t before)
{
    return before != cudaSuccess
               ? before
               : cudaFuncSetAttribute(rule_kernel<KT>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      shared_bytes(KT * 16, SP_CUDA_RULE_DIM_MAX));
}

cudaError_t sp_cuda_rule_init(int gpu)
{
    cudaError_t code = sp_cuda_rule_prepare_init(gpu);

    code = code == cudaSuccess ? sp_cuda_rule_prefill_init() : code;
    code = code == cudaSuccess ? sp_cuda_rule_walk_init(gpu) : code;
    code = code == cudaSuccess ? sp_cuda_rule_few_init() : code;
    return allow<2>(allow<4>(allow<8>(code)));
}
