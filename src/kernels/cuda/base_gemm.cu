/*
 * base_gemm.cu: which kernel runs a GEMM of the base, and the state that the choice needs. The
 * choice depends on the shapes and the launched rows alone, and no choice changes a bit.
 */
#include "kernels/cuda/base_gemm.cuh"

#include <new>

static cudaError_t fill_state(int gpu, base_gemm *state)
{
    cudaError_t code =
        cudaDeviceGetAttribute(&state->multiprocessors, cudaDevAttrMultiProcessorCount, gpu);

    if (code == cudaSuccess)
        code = cudaDeviceGetAttribute(&state->shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin,
                                      gpu);
    if (code == cudaSuccess)
        code = sp_cuda_gemm_few_init(state->shared_bytes);
    if (code == cudaSuccess)
        code = sp_cuda_gemm_tiles_init(state->shared_bytes);
    if (code == cudaSuccess)
        code = sp_cuda_gemm_wide_init(gpu, state);
    return code == cudaSuccess ? sp_cuda_gemm_fold_init(state) : code;
}

extern "C" int sp_cuda_base_gemm_close(int gpu, void *state)
{
    base_gemm *open = (base_gemm *)state;
    sp_cuda_current current(gpu);

    while (open->choices != NULL) {
        gemm_choice *choice = open->choices;

        open->choices = choice->next;
        delete choice;
    }
    sp_cuda_gemm_library_close(open->library);
    if (current.code == cudaSuccess)
        (void)cudaFree(open->workspace);
    delete open;
    return (int)current.code;
}

extern "C" int sp_cuda_base_gemm_open(int gpu, void **out_state)
{
    sp_cuda_current current(gpu);
    cudaError_t code = current.code;
    base_gemm *state;

    if (code != cudaSuccess)
        return (int)code;
    state = new (std::nothrow) base_gemm();
    if (state == NULL)
        return (int)cudaErrorMemoryAllocation;
    code = fill_state(gpu, state);
    if (code != cudaSuccess) {
        delete state;
        return (int)code;
    }
    *out_state = state;
    return (int)cudaSuccess;
}

extern "C" int sp_cuda_base_gemm_library(int gpu, void *state, const char *path, int *out_found)
{
    base_gemm *open = (base_gemm *)state;
    sp_cuda_current current(gpu);

    if (current.code == cudaSuccess && open->library == NULL)
        open->library = sp_cuda_gemm_library_open(path);
    *out_found = open->library != NULL;
    return (int)current.code;
}

extern "C" int sp_cuda_base_gemm_free(int gpu, void *state)
{
    base_gemm *open = (base_gemm *)state;
    sp_cuda_current current(gpu);
    cudaError_t code = current.code;

    if (code == cudaSuccess && open->workspace == NULL)
        code = cudaMalloc(&open->workspace, GEMM_WORKSPACE_BYTES);
    open->free = code == cudaSuccess;
    return (int)code;
}

static bool is_aligned(const sp_cuda_gemm *gemm)
{
    bool aligned = gemm->k % 8 == 0 && gemm->x_stride % 8 == 0 && (uintptr_t)gemm->x % 16 == 0;

    for (int i = 0; i < gemm->n_outputs; i++)
        aligned = aligned && (uintptr_t)gemm->outputs[i].w % 16 == 0;
    return aligned;
}

extern "C" int sp_cuda_base_gemm_learn(int gpu, void *state, const sp_cuda_gemm *like,
                                       int32_t rows_max, sp_cuda_gemm_report *out_report)
{
    base_gemm *open = (base_gemm *)state;
    sp_cuda_gemm_report report = {};
    sp_cuda_current current(gpu);
    cudaError_t code = current.code;

    if (code == cudaSuccess && open->library != NULL)
        code = sp_cuda_gemm_library_learn(open, like, rows_max, &report);
    if (code == cudaSuccess)
        *out_report = report;
    return (int)code;
}

/* Up to so many rows, and from so many groups of 16 columns for each multiprocessor on, the kernel
 * for few rows streams the weights faster than wgmma (H200). */
#define STREAM_ROWS   16
#define STREAM_GROUPS 8

static int choose(const base_gemm *state, const sp_cuda_gemm *gemm)
{
    bool streams = gemm->rows <= STREAM_ROWS &&
                   columns_of(gemm, 16).tiles >= STREAM_GROUPS * state->multiprocessors;

    if (state->encode != NULL)
        return streams ? SP_CUDA_GEMM_FEW : SP_CUDA_GEMM_WIDE;
    return gemm->rows <= SP_CUDA_GEMM_FEW_ROWS ? SP_CUDA_GEMM_FEW : SP_CUDA_GEMM_TILES;
}

cudaError_t sp_cuda_gemm_own(const base_gemm *state, const sp_cuda_gemm *gemm, cudaStream_t stream)
{
    int form = gemm->form == SP_CUDA_GEMM_CHOSEN ? choose(state, gemm) : gemm->form;

    if (form == SP_CUDA_GEMM_FEW)
        return sp_cuda_gemm_few(state, gemm, stream);
    if (form == SP_CUDA_GEMM_TILES)
        return sp_cuda_gemm_tiles(state, gemm, stream);
    return sp_cuda_gemm_wide(state, form - SP_CUDA_GEMM_SHAPE_0, gemm, stream);
}

extern "C" int sp_cuda_base_gemm(int gpu, const void *state, const sp_cuda_gemm *gemm, void *stream)
{
    const base_gemm *open = (const base_gemm *)state;
    sp_cuda_current current(gpu);
    cudaError_t code = current.code;

    if (code != cudaSuccess || gemm->rows == 0)
        return (int)code;
    if (!is_aligned(gemm) || gemm->form < 0 || gemm->form >= SP_CUDA_GEMM_FORMS ||
        (gemm->form == SP_CUDA_GEMM_FEW && gemm->rows > SP_CUDA_GEMM_FEW_ROWS))
        return (int)cudaErrorInvalidValue;
    if (gemm->deltas != NULL) {
        code = sp_cuda_gemm_folding(open, gemm, (cudaStream_t)stream);
        return (int)(code == cudaSuccess ? cudaGetLastError() : code);
    }
    if (gemm->form == SP_CUDA_GEMM_CHOSEN && !gemm->own &&
        sp_cuda_gemm_by_library(open, gemm, (cudaStream_t)stream))
        return (int)cudaSuccess;
    code = sp_cuda_gemm_own(open, gemm, (cudaStream_t)stream);
    return (int)(code == cudaSuccess ? cudaGetLastError() : code);
}
