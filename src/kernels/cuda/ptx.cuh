/* ptx.cuh: PTX instructions without a CUDA C++ intrinsic, and the loads built on them. */
#ifndef SP_KERNELS_CUDA_PTX_CUH
#define SP_KERNELS_CUDA_PTX_CUH

#include "kernels/cuda/cuda_choose.h"
#include "kernels/effective_scale.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#define SP_WARP 32

/* 16 bytes of weights, read once by this block, so without allocation in L1. */
static __device__ __forceinline__ uint4 load_weights(const void *from)
{
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3},[%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from));
    return v;
}

/* The same; zeros, without a load, if !valid. */
static __device__ __forceinline__ uint4 load_weights_if(const void *from, bool valid)
{
    uint4 v;
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\n"
                 "mov.u32 %0, 0;\nmov.u32 %1, 0;\nmov.u32 %2, 0;\nmov.u32 %3, 0;\n"
                 "@p ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];\n}"
                 : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
                 : "l"(from), "r"((uint32_t)valid));
    return v;
}

/* Prefetches a line to L2. Only a hint: a later load cannot return a stale value because of it. */
static __device__ __forceinline__ void prefetch_l2(const void *at)
{
    asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
}

/* Waits until the predecessor is complete. Before it a kernel may overlap its predecessor and must
 * not read what that one writes. */
static __device__ __forceinline__ void wait_predecessor(void)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

static __device__ __forceinline__ void release_successor(void)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

/* Blocks until `threads` threads, in whole warps, have come to this named barrier of the block, by
 * meet or by arrive_at_meeting; what they wrote before is visible then. Barrier 0 is __syncthreads.
 * A warp's lanes come together: __syncwarp goes before it where they may be apart. */
static __device__ __forceinline__ void meet(int barrier, int threads)
{
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

/* Comes to a named barrier, as meet, without blocking. */
static __device__ __forceinline__ void arrive_at_meeting(int barrier, int threads)
{
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

/* The two halves of a cluster barrier. `arrive` does not block; `wait` returns when all blocks of
 * the cluster have arrived, and what they wrote before is visible then. */
static __device__ __forceinline__ void cluster_arrive(void)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

static __device__ __forceinline__ void cluster_wait(void)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

/* Loads block `rank`'s value at this address of distributed shared memory. */
static __device__ __forceinline__ int load_of_block(const int *at, int rank)
{
    int value = 0;
#if __CUDA_ARCH__ >= 900
    asm volatile("{\n\t.reg .u32 there;\n\t"
                 "mapa.shared::cluster.u32 there, %1, %2;\n\t"
                 "ld.shared::cluster.s32 %0, [there];\n\t}"
                 : "=r"(value)
                 : "r"((uint32_t)__cvta_generic_to_shared(at)), "r"(rank)
                 : "memory");
#endif
    return value;
}

/* The same of four floats, 16-byte aligned. */
static __device__ __forceinline__ float4 load_floats_of_block(const float *at, int rank)
{
    float4 v = {0.0f, 0.0f, 0.0f, 0.0f};
#if __CUDA_ARCH__ >= 900
    asm volatile("{\n\t.reg .u32 there;\n\t"
                 "mapa.shared::cluster.u32 there, %4, %5;\n\t"
                 "ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [there];\n\t}"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"((uint32_t)__cvta_generic_to_shared(at)), "r"(rank)
                 : "memory");
#endif
    return v;
}

/* The shared-memory address that PTX instructions take. */
static __device__ __forceinline__ uint32_t shared_address(const void *at)
{
    return (uint32_t)__cvta_generic_to_shared(at);
}

/* Copies 16 bytes from global to shared memory (cp.async). */
static __device__ __forceinline__ void copy_async(uint32_t to, const void *from)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

/* The same; if !valid, writes zeros and reads nothing. */
static __device__ __forceinline__ void copy_async_if(uint32_t to, const void *from, bool valid)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "r"(valid ? 16 : 0)
                 : "memory");
}

/* 16 bytes of y. Its address is read from shared memory, so the compiler could not know that it is
 * global. */
static __device__ __forceinline__ uint4 load_global(const void *from)
{
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0,%1,%2,%3},[%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from));
    return v;
}

/* 16 bytes that the predecessor may have written, so through the coherent path; zeros, without a
 * load, if !valid. */
static __device__ __forceinline__ uint4 load_global_if(const void *from, bool valid)
{
    uint4 v;
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\n"
                 "mov.u32 %0, 0;\nmov.u32 %1, 0;\nmov.u32 %2, 0;\nmov.u32 %3, 0;\n"
                 "@p ld.global.v4.u32 {%0,%1,%2,%3}, [%4];\n}"
                 : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
                 : "l"(from), "r"((uint32_t)valid));
    return v;
}

static __device__ __forceinline__ void store_global(void *to, uint4 v)
{
    asm volatile("st.global.v4.u32 [%0],{%1,%2,%3,%4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z),
                 "r"(v.w));
}

/* Only if valid. */
static __device__ __forceinline__ void store_global_if(void *to, uint4 v, bool valid)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\n"
                 "@p st.global.v4.u32 [%0], {%1,%2,%3,%4};\n}" ::"l"(to),
                 "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"((uint32_t)valid));
}

static __device__ __forceinline__ void copy_commit(void)
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Waits until at most N of this thread's committed groups are in flight. */
template <int N> static __device__ __forceinline__ void copy_wait(void)
{
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

/* Transposes an 8 x 8 matrix of 16-bit elements of which thread 4 i + j holds (i, 2 j) and (i, 2 j
 * + 1). */
static __device__ __forceinline__ uint32_t transpose(uint32_t two)
{
    uint32_t out;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(two));
    return out;
}

/* mma and conversions for one element type. F16: 0 is bf16, 1 is f16. */
template <int F16>
static __device__ __forceinline__ void mma(float *c, uint32_t a0, uint32_t a1, uint32_t a2,
                                           uint32_t a3, uint32_t b0, uint32_t b1)
{
    if (F16)
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                     "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    else
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                     "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/* 0, which the compiler does not know. A copy of registers into the order that mma takes is made
 * again for each use, each time after the mma before it; a xor with this zero is made once. */
static __device__ __forceinline__ uint32_t unknown_zero(const sp_cuda_group &group)
{
    return (uint32_t)group.n_rows >> 24; /* SP_CUDA_ROWS_MAX is less */
}

static __device__ __forceinline__ uint4 keep_four(uint32_t x, uint32_t y, uint32_t z, uint32_t w,
                                                  uint32_t zero)
{
    return make_uint4(x ^ zero, y ^ zero, z ^ zero, w ^ zero);
}

/* Rows of 16-byte vectors to mma operands of their M side: of each two, the operands of the first
 * and of the second mma, whose k are the vectors' first and second halves. */
template <int N> static __device__ __forceinline__ void pair_rows(uint4 (&v)[N], uint32_t zero)
{
#pragma unroll
    for (int j = 0; j < N; j += 2) {
        uint4 u = v[j], w = v[j + 1];

        v[j] = keep_four(u.x, w.x, u.y, w.y, zero);
        v[j + 1] = keep_four(u.z, w.z, u.w, w.w, zero);
    }
}

template <int F16> static __device__ __forceinline__ float widen(uint16_t bits)
{
    return F16 ? __half2float(__ushort_as_half(bits))
               : __bfloat162float(__ushort_as_bfloat16(bits));
}

template <int F16> static __device__ __forceinline__ uint16_t narrow(float value)
{
    return F16 ? __half_as_ushort(__float2half_rn(value))
               : __bfloat16_as_ushort(__float2bfloat16_rn(value));
}

/* Two adjacent elements at once, the first in the low half. */
template <int F16> static __device__ __forceinline__ float2 widen_two(uint32_t bits)
{
    if (F16)
        return {widen<F16>((uint16_t)bits), widen<F16>((uint16_t)(bits >> 16))};
    return {__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u)};
}

template <int F16> static __device__ __forceinline__ uint32_t narrow_two(float low, float high)
{
    uint32_t out;

    if (F16)
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    else
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    return out;
}

/*
 * Eight elements of a row of weights from element k on; those at and beyond k_end are zeros. With
 * VEC they are one 16-byte load: k, k_end and the address are multiples of 8 elements.
 */
template <int VEC>
static __device__ __forceinline__ uint4 load_eight(const uint16_t *row, int k, int k_end)
{
    union {
        uint4 all;
        uint16_t one[8];
    } v;

    v.all = make_uint4(0, 0, 0, 0);
    if (VEC) {
        if (k < k_end)
            v.all = load_weights(row + k);
        return v.all;
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
        if (k + i < k_end)
            v.one[i] = row[k + i];
    return v.all;
}

/* The same for a row that the predecessor may have written, so through the coherent path. */
template <int VEC>
static __device__ __forceinline__ uint4 load_eight_of_row(const uint16_t *from, int k, int k_end)
{
    union {
        uint4 all;
        uint16_t one[8];
    } v;

    v.all = make_uint4(0, 0, 0, 0);
    if (VEC) {
        if (k < k_end)
            v.all = *(const uint4 *)(from + k);
        return v.all;
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
        if (k + i < k_end)
            v.one[i] = from[k + i];
    return v.all;
}

#endif
