/*
 * current.cuh: the calling thread's current CUDA context belongs to the host: every entry makes the
 * GPU's primary context current while it runs and then restores the previous one, even a driver API
 * context or none. cudaSetDevice alone could not: it selects devices only, and restoring a thread's
 * default would create a context on GPU 0.
 */
#ifndef SP_DEVICE_CUDA_CURRENT_CUH
#define SP_DEVICE_CUDA_CURRENT_CUH

#include <cuda_runtime.h>

#define SP_CUDA_GPUS_MAX 64

/* Finds the GPU's primary context; call it before any other entry for that GPU. Host code, as all
 * here. */
cudaError_t sp_cuda_current_init(int gpu);

class sp_cuda_current
{
  public:
    explicit sp_cuda_current(int gpu);
    ~sp_cuda_current();
    sp_cuda_current(const sp_cuda_current &) = delete;
    sp_cuda_current &operator=(const sp_cuda_current &) = delete;

    cudaError_t code; /* cudaSuccess: the GPU is current */

  private:
    void *before;
    bool changed;
};

#endif
