/*
 * delta_rule.cuh: what the two kernels of the gated delta rule share, and the order of its sums.
 *
 * Within a chunk of 32 positions, S is the state at its border and i, j are its rows. With
 *
 *     A_ij = beta_i · e^(G_i - G_j) · (k_i · k_j), j < i      P_ij = e^(G_i - G_j) · (q_i · k_j)
 *     T    = (1 + A)⁻¹                                        M    = P · T
 *     r_i  = beta_i · (v_i - e^(G_i) · Sᵀk_i)
 *
 * the rule of ops.h is u = T r, o = k_dim^-½ · (e^(G_i) · Sᵀq_i + M r), and S changes once a chunk.
 * T and M do not depend on S, and row i of both on the rows up to i alone. So the first kernel
 * (delta_rule_prepare.cu) computes them for all chunks at once, and the second one (delta_rule.cu)
 * goes through a span's chunks with S in registers. No entry of T is larger than 1: it is an entry
 * of a product of contractions, -beta_i · k_iᵀ (Π e^g (1 - beta k kᵀ)) k_j.
 *
 * Every sum has one order, whichever rows are in the step, so a row has the same bits in any:
 *
 *     k_i · k_j, q_i · k_j   mma m16n8k16 over ascending k_dim, from +0
 *     G_i                    ascending, from the border on
 *     T_ic                   one fused step for each j < i, ascending; then T is *split*: upper +
 *                            lower, two bf16, which is its value from here on
 *     M_ic                   the same for each j <= i, split too
 *     Sᵀk_i, Sᵀq_i           mma over ascending k_dim, S split: of 16 at a time the upper, then the
 *                            lower parts
 *     M r, T r               mma over j in two halves, of which a row of the first 16 has one: r
 *                            upper · M upper, r lower · M upper, r upper · M lower
 *     fold                   S · e^(G_last), then mma over j in two halves: of u · e^(G_last - G_j)
 *                            the upper, then the lower parts
 *
 * A column of an mma depends on nothing in the others (measured on sm_90: its place in a tile does
 * not matter either). Split values have 16 bits or more of FP32's 24; S itself is FP32.
 */
#ifndef SP_KERNELS_CUDA_DELTA_RULE_CUH
#define SP_KERNELS_CUDA_DELTA_RULE_CUH

#include "kernels/cuda/delta_rule_layout.h"
#include "kernels/cuda/ptx.cuh"

#define CHUNK SP_CUDA_RULE_CHUNK
#define RING  SP_CUDA_RULE_RING
#define TILES (CHUNK / 8) /* of 8 rows, the width of an mma */

static_assert(CHUNK == SP_WARP, "a lane has a row of the chunk");
static_assert(RING % CHUNK == 0, "the places of a chunk are adjacent");

/* What a launch is given: by value, so the kernels read it as constants. */
typedef struct rule_args {
    sp_cuda_delta_rule d;
    sp_cuda_rule_layout l;
    uint16_t *q, *k, *v; /* of the scratch */
    uint16_t *matrices;
    float2 *gates; /* G, beta */
    int *ready;    /* [rows, k_heads]: whether all this is there of the chunk that has its first row
                      of the step here; NULL: the second kernel waits for the first one's end */
} rule_args;

/* Launch the first kernel, and the second one's forms: for prefill, by wgmma or without it, and for
 * few rows. cudaErrorNotSupported where they have none. The others set attributes, once per GPU;
 * gpu is the current one. */
cudaError_t sp_cuda_rule_prepare(const rule_args *args, cudaStream_t stream);
cudaError_t sp_cuda_rule_prepare_apart(int gpu, const rule_args *args, int stays,
                                       cudaStream_t stream);
cudaError_t sp_cuda_rule_walk(int gpu, const rule_args *args, cudaStream_t stream);
cudaError_t sp_cuda_rule_prefill(const rule_args *args, cudaStream_t stream);
cudaError_t sp_cuda_rule_few(int gpu, const rule_args *args, cudaStream_t stream);
cudaError_t sp_cuda_rule_prepare_init(int gpu);
cudaError_t sp_cuda_rule_walk_init(int gpu);
cudaError_t sp_cuda_rule_prefill_init(void);
cudaError_t sp_cuda_rule_few_init(void);

/* Blocks of the first kernel that go on beside so many of the second one's, for
 * sp_cuda_rule_prepare_apart; 0: it has no such form. */
int sp_cuda_rule_stays(int gpu, const rule_args *args, int blocks);

/* Blocks of sp_cuda_rule_walk, each of which has a multiprocessor; 0 where it is not supported. */
int sp_cuda_rule_walk_blocks(int gpu, const rule_args *args);

/* The rows of a span in the chunk at `border`: [old, first) were in earlier steps, [first, end) are
 * in this one; counted from the border, 0 .. CHUNK. */
typedef struct chunk_rows {
    int first, end;
} chunk_rows;

static __device__ __forceinline__ chunk_rows rows_of_chunk(const sp_cuda_rule_span &span,
                                                           int border)
{
    return {max(0, min(CHUNK, span.position - border)),
            min(CHUNK, span.position + span.n_rows - border)};
}

static __device__ __forceinline__ char *slot_of(const sp_cuda_delta_rule &d, int slot)
{
    return (char *)d.states + slot * d.state_stride;
}

static __device__ __forceinline__ char *snapshot_of(const sp_cuda_delta_rule &d, int snapshot)
{
    return (char *)d.snapshots + snapshot * d.snapshot_stride;
}

static __device__ __forceinline__ int place_of(int position)
{
    return position & (RING - 1);
}

static __device__ __forceinline__ int64_t ready_index(const rule_args &a, int row, int k_head)
{
    return (int64_t)row * a.d.shape.k_heads + k_head;
}

/* All earlier writes of the block, which a barrier has ordered before this, are visible to whoever
 * loads what this stores. */
static __device__ __forceinline__ void store_ready(int *ready)
{
    __threadfence();
    *(volatile int *)ready = 1;
}

static __device__ __forceinline__ int load_ready(const int *ready)
{
    int value = *(const volatile int *)ready;

    __threadfence();
    return value;
}

/* Orders writes to memory, by this thread or seen by it, before tensor copies that read them. */
static __device__ __forceinline__ void before_tensor_copies(void)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.global;" ::: "memory");
#endif
}

/* Elements of a row of qkv from its start to those of a key head's q, k and of a value head's v. */
static __device__ __forceinline__ int q_offset(const rule_args &a, int k_head)
{
    const sp_cuda_rule_shape &s = a.d.shape;

    return s.fused ? k_head * (2 * s.k_dim + 2 * a.l.per_key * s.v_dim) : k_head * s.k_dim;
}

static __device__ __forceinline__ int k_offset(const rule_args &a, int k_head)
{
    const sp_cuda_rule_shape &s = a.d.shape;

    return q_offset(a, k_head) + (s.fused ? s.k_dim : s.k_heads * s.k_dim);
}

static __device__ __forceinline__ int v_offset(const rule_args &a, int v_head)
{
    const sp_cuda_rule_shape &s = a.d.shape;
    int k_head = v_head / a.l.per_key, own = v_head - k_head * a.l.per_key;

    if (s.fused)
        return q_offset(a, k_head) + 2 * s.k_dim + own * s.v_dim;
    return 2 * s.k_heads * s.k_dim + v_head * s.v_dim;
}

/* The channels of the convolution. */
static __device__ __forceinline__ int q_channel(const rule_args &a, int k_head)
{
    return k_head * a.d.shape.k_dim;
}

static __device__ __forceinline__ int k_channel(const rule_args &a, int k_head)
{
    return (a.d.shape.k_heads + k_head) * a.d.shape.k_dim;
}

static __device__ __forceinline__ int v_channel(const rule_args &a, int v_head)
{
    return 2 * a.d.shape.k_heads * a.d.shape.k_dim + v_head * a.d.shape.v_dim;
}

/* e^x by the hardware's approximation; 0 for x of -inf. */
static __device__ __forceinline__ float power_of_e(float x)
{
    float y;

    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.44269504f));
    return y;
}

/* x below -87.3 gives -0 (x * 0). */
static __device__ __forceinline__ float silu(float x)
{
    float inverse;

    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.0f + power_of_e(-x)));
    return x * inverse;
}

/* Two values, each as upper + lower. */
typedef struct split_two {
    uint32_t upper, lower;
} split_two;

static __device__ __forceinline__ split_two split(float x, float y)
{
    split_two s;
    float2 upper;

    s.upper = narrow_two<0>(x, y);
    upper = widen_two<0>(s.upper);
    s.lower = narrow_two<0>(x - upper.x, y - upper.y);
    return s;
}

#endif
