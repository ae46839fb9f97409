/* launch.cuh: what the files of this folder call of each other. Host code. */
#ifndef SP_KERNELS_CUDA_LAUNCH_CUH
#define SP_KERNELS_CUDA_LAUNCH_CUH

#include "device/cuda/current.cuh"
#include "kernels/cuda/cuda_choose.h"

/* The shrink of many rows; only where sizes and addresses are multiples of 16 bytes. NotSupported:
 * the GPU lacks the shared memory. */
cudaError_t sp_cuda_shrink_windows(int gpu, const sp_cuda_group *group, cudaStream_t stream);

/* The expand through a ring, of the choice's shape. NotSupported: the GPU, or the code that the
 * driver made for it, has none. */
cudaError_t sp_cuda_expand_ring(int gpu, const sp_cuda_group *group, sp_cuda_expand_choice choice,
                                cudaStream_t stream);

/* Settings of the kernels: more shared memory than a launch gets unasked, or more L1. gpu is the
 * current one. */
cudaError_t sp_cuda_shrink_init(void);
cudaError_t sp_cuda_shrink_windows_init(int gpu);
cudaError_t sp_cuda_expand_init(void);
cudaError_t sp_cuda_expand_ring_init(int gpu);

/* Whether the code that runs on the current GPU waits for its predecessor itself; not what was made
 * from PTX of a GPU that knows no such wait. Known from that GPU's sp_cuda_kernels_init on. */
bool sp_cuda_overlaps(void);

/* A launch that may begin while its predecessor still runs, unless `after` says otherwise. */
static inline cudaLaunchConfig_t sp_cuda_overlapping(dim3 grid, int threads, size_t shared_bytes,
                                                     cudaLaunchAttribute *overlap, bool after,
                                                     cudaStream_t stream)
{
    cudaLaunchConfig_t config = {};

    overlap->id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap->val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = grid;
    config.blockDim = dim3((unsigned)threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = overlap;
    config.numAttrs = after || !sp_cuda_overlaps() ? 0 : 1;
    return config;
}

#endif
