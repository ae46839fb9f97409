/*
 * bulk.cuh: PTX wrappers for shared memory: mbarriers and ldmatrix, and, from sm_90 on, bulk copies
 * (cp.async.bulk) from global memory, of which mbarriers track the completion, and stmatrix.
 * Addresses and sizes of bulk copies are multiples of 16 bytes. Barriers are shared-memory
 * addresses.
 */
#ifndef SP_KERNELS_CUDA_BULK_CUH
#define SP_KERNELS_CUDA_BULK_CUH

#include "kernels/cuda/ptx.cuh"

static __device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals)
                 : "memory");
}

static __device__ __forceinline__ void barrier_arrive(uint32_t barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/* Arrives once all of this thread's earlier copy_async are complete. */
static __device__ __forceinline__ void barrier_arrive_after_copies(uint32_t barrier)
{
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

#if __CUDA_ARCH__ >= 900
#define WAIT "try_wait" /* suspends the thread for a while */
#else
#define WAIT "test_wait"
#endif

/* Blocks until the phase of this parity has completed. */
static __device__ __forceinline__ void barrier_wait(uint32_t barrier, int parity)
{
    uint32_t done;

    do
        asm volatile("{ .reg .pred p;\n"
                     "mbarrier." WAIT ".parity.shared::cta.b64 p, [%1], %2;\n"
                     "selp.u32 %0, 1, 0, p; }"
                     : "=r"(done)
                     : "r"(barrier), "r"(parity)
                     : "memory");
    while (!done);
}

#undef WAIT

static __device__ __forceinline__ uint4 load_shared(uint32_t from)
{
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(from));
    return v;
}

/* The same into *v, which stays as it is if !valid. */
static __device__ __forceinline__ void load_shared_if(uint4 *v, uint32_t from, bool valid)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\n"
                 "@p ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];\n}"
                 : "+r"(v->x), "+r"(v->y), "+r"(v->z), "+r"(v->w)
                 : "r"(from), "r"((uint32_t)valid));
}

static __device__ __forceinline__ void store_shared(uint32_t to, uint4 v)
{
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z),
                 "r"(v.w)
                 : "memory");
}

/* Only if valid. */
static __device__ __forceinline__ void store_shared_if(uint32_t to, uint4 v, bool valid)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\n"
                 "@p st.shared.v4.u32 [%0], {%1,%2,%3,%4};\n}" ::"r"(to),
                 "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"((uint32_t)valid)
                 : "memory");
}

/* Four 8 x 8 matrices of 16-bit elements: thread 4 i + j holds (i, 2 j) and (i, 2 j + 1). Lane l
 * has the address of row l % 8 of matrix l / 8. All 32 lanes call it together. */
static __device__ __forceinline__ uint4 load_matrices(uint32_t from)
{
    uint4 v;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(from));
    return v;
}

/* Four 8 x 8 matrices of 16-bit elements, transposed: thread 4 i + j holds (2 j, i) and (2 j + 1,
 * i). Lane l has the address of row l % 8 of matrix l / 8. All 32 lanes call it together. */
static __device__ __forceinline__ uint4 load_transposed(uint32_t from)
{
    uint4 v;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(from));
    return v;
}

#if __CUDA_ARCH__ >= 900

/* Makes the initialised barriers visible to bulk copies. */
static __device__ __forceinline__ void barrier_init_done(void)
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

/* The current phase also waits for so many bytes of bulk copies (expect_tx). Does not arrive. */
static __device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes)
{
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier),
                 "r"(bytes)
                 : "memory");
}

/* Bulk copies go through the async proxy: orders earlier writes to shared memory, by a thread or by
 * copy_async, before this thread's next bulk copy. */
static __device__ __forceinline__ void copies_before_bulk(void)
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

static __device__ __forceinline__ void bulk_load(uint32_t to, const void *from, uint32_t bytes,
                                                 uint32_t barrier)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

static __device__ __forceinline__ void store_transposed(uint32_t to, uint4 v)
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(to),
                 "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w));
}

#endif
#endif
