/*
 * current.cuh: the calling thread's current CUDA context, which is the host's: every entry makes
 * the GPU's own current for as long as it runs and puts back what was there, a context of the
 * driver's or none included. cudaSetDevice alone could not: it knows devices only, and to put back
 * a thread's default it would make a context on GPU 0.
 */
#ifndef SP_DEVICE_CUDA_CURRENT_CUH
#define SP_DEVICE_CUDA_CURRENT_CUH

#include <cuda_runtime.h>

#define SP_CUDA_GPUS_MAX 64

/* Finds the GPU's primary context; before any other entry for it. Host code, as all here. */
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
