/* current.cu: see current.cuh. The driver's two functions are looked up at run time, since nothing
 * here links to libcuda. */
#include "device/cuda/current.cuh"

#include <cuda.h>

#include <atomic>

#define DRIVER_VERSION 12000 /* the ABI version requested for the functions, which are older */

typedef CUresult(CUDAAPI *get_current_fn)(CUcontext *);
typedef CUresult(CUDAAPI *set_current_fn)(CUcontext);

/* Each opened GPU writes the same values. */
static std::atomic<get_current_fn> get_current;
static std::atomic<set_current_fn> set_current;
static std::atomic<CUcontext> primary[SP_CUDA_GPUS_MAX];

static cudaError_t find_driver(const char *name, void **out_fn)
{
    cudaDriverEntryPointQueryResult found;
    cudaError_t code =
        cudaGetDriverEntryPointByVersion(name, out_fn, DRIVER_VERSION, cudaEnableDefault, &found);

    if (code == cudaSuccess && found != cudaDriverEntryPointSuccess)
        code = cudaErrorInsufficientDriver;
    return code;
}

cudaError_t sp_cuda_current_init(int gpu)
{
    void *get = NULL, *set = NULL;
    CUcontext before = NULL, own = NULL;
    cudaError_t code;

    if (gpu < 0 || gpu >= SP_CUDA_GPUS_MAX)
        return cudaErrorInvalidDevice;
    code = find_driver("cuCtxGetCurrent", &get);
    if (code == cudaSuccess)
        code = find_driver("cuCtxSetCurrent", &set);
    if (code != cudaSuccess)
        return code;
    get_current = (get_current_fn)get;
    set_current = (set_current_fn)set;
    if (get_current.load()(&before) != CUDA_SUCCESS)
        before = NULL; /* the driver was never used */
    code = cudaSetDevice(gpu);
    if (code == cudaSuccess)
        code = cudaFree(NULL); /* creates the context: a busy or too old GPU fails here */
    if (code == cudaSuccess && get_current.load()(&own) == CUDA_SUCCESS)
        primary[gpu] = own;
    if (own != before)
        (void)set_current.load()(before);
    return code == cudaSuccess && own == NULL ? cudaErrorInitializationError : code;
}

sp_cuda_current::sp_cuda_current(int gpu) : code(cudaSuccess), before(NULL), changed(false)
{
    CUcontext own = gpu >= 0 && gpu < SP_CUDA_GPUS_MAX ? primary[gpu].load() : NULL, now = NULL;

    if (own == NULL || get_current.load()(&now) != CUDA_SUCCESS) {
        code = cudaErrorInitializationError;
        return;
    }
    before = now;
    if (now == own)
        return;
    changed = set_current.load()(own) == CUDA_SUCCESS;
    code = changed ? cudaSuccess : cudaErrorInitializationError;
}

sp_cuda_current::~sp_cuda_current()
{
    if (changed)
        (void)set_current.load()((CUcontext)before);
}
