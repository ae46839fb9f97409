/* launch.cuh: the host functions that the files of this folder share. */
#ifndef SP_KERNELS_CUDA_LAUNCH_CUH
#define SP_KERNELS_CUDA_LAUNCH_CUH

#include "device/cuda/current.cuh"
#include "kernels/cuda/cuda_choose.h"

/* The shrink for many rows; sizes and addresses must be multiples of 16 bytes. *out_rounded: it
 * leaves the rounded xa, and no partials. cudaErrorNotSupported: the GPU lacks the shared memory.
 * gpu is the current one. */
cudaError_t sp_cuda_shrink_windows(int gpu, const sp_cuda_group *group, cudaStream_t stream,
                                   bool *out_rounded);

/* The sums of a group's partials, rounded, after them in memory, once they are complete
 * (sp_cuda_rounds_xa). */
cudaError_t sp_cuda_round_xa(const sp_cuda_group *group, cudaStream_t stream);

/* The expand for many rows at large ranks, from a rounded xa; 16-bit y, sizes and addresses must be
 * multiples of 16 bytes. cudaErrorNotSupported: the GPU lacks the shared memory. gpu is the current
 * one. */
cudaError_t sp_cuda_expand_wide(int gpu, const sp_cuda_group *group, cudaStream_t stream);

/* The same through wgmma. cudaErrorNotSupported: no bf16, or the GPU or the build has none. */
cudaError_t sp_cuda_expand_wide_sm90a(int gpu, const sp_cuda_group *group, cudaStream_t stream);

/* The expand through the ring, in the choice's shape. cudaErrorNotSupported: the GPU, or the code
 * that the driver compiled for it, has none. gpu is the current one. */
cudaError_t sp_cuda_expand_ring(int gpu, const sp_cuda_group *group, sp_cuda_expand_choice choice,
                                cudaStream_t stream);

/* The deltas of experts through a ring. cudaErrorNotSupported: it takes no such items, ranks, sizes
 * or alignments, or the GPU has too little shared memory. gpu is the current one. */
cudaError_t sp_cuda_expert_ring(int gpu, const sp_cuda_expert_delta *delta, cudaStream_t stream);

/* The deltas of experts by themselves (sp_cuda_expert_site.scales), in small blocks that share a
 * multiprocessor with those of a GEMM. */
cudaError_t sp_cuda_expert_apart(const sp_cuda_expert_delta *delta, cudaStream_t stream);

/* The GEMMs of experts through wgmma, for items of SP_CUDA_EXPERT_ROWS_MAX rows.
 * cudaErrorNotSupported: other items, or the GPU or the build has none. gpu is the current one. */
cudaError_t sp_cuda_expert_gemm_wide(int gpu, const struct sp_cuda_expert_gemm *gemm,
                                     cudaStream_t stream);

/* Sets the kernels' attributes: more shared memory than the default, or more L1. Once per GPU,
 * before its first launch; gpu is the current one. */
cudaError_t sp_cuda_shrink_init(void);
cudaError_t sp_cuda_shrink_windows_init(int gpu);
cudaError_t sp_cuda_expand_init(void);
cudaError_t sp_cuda_expand_ring_init(int gpu);
cudaError_t sp_cuda_expand_wide_init(int gpu);
cudaError_t sp_cuda_expand_wide_sm90a_init(int gpu);
cudaError_t sp_cuda_attention_init(int gpu);
cudaError_t sp_cuda_choose_init(int gpu);
cudaError_t sp_cuda_group_init(void);
cudaError_t sp_cuda_expert_init(void);
cudaError_t sp_cuda_expert_ring_init(int gpu);
cudaError_t sp_cuda_expert_apart_init(void);
cudaError_t sp_cuda_expert_gemm_init(int gpu);
cudaError_t sp_cuda_expert_gemm_wide_init(int gpu);
cudaError_t sp_cuda_rule_init(int gpu);

/* Whether the code for the current GPU contains griddepcontrol.wait, so launches may overlap; code
 * built from PTX before sm_90 does not. Valid after sp_cuda_kernels_init on that GPU. */
bool sp_cuda_overlaps(void);

/* A launch that may start while its predecessor still runs (programmatic dependent launch), unless
 * `after`. `overlap` must outlive the launch. */
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
