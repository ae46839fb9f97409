/* base_gemm.cuh: what the kernels of the base's GEMMs share: the state, the outputs as one range of
 * tiles, and how a sum becomes an output. */
#ifndef SP_KERNELS_CUDA_BASE_GEMM_CUH
#define SP_KERNELS_CUDA_BASE_GEMM_CUH

#include "device/cuda/current.cuh"
#include "kernels/cuda/bulk.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/ops_cuda.h"

/* cublasLtMatmulAlgo_t. */
typedef struct gemm_algorithm {
    uint64_t data[8];
} gemm_algorithm;

/* Classes of rows: 1, 2, 3..4, 5..8 and so on up to SP_CUDA_ROWS_MAX. */
#define GEMM_CLASSES 17

/* Where cuBLASLt is used for a weight, and which algorithm for each class and output. */
typedef struct gemm_choice {
    struct gemm_choice *next;
    sp_cuda_gemm like;
    bool library[GEMM_CLASSES];
    gemm_algorithm algorithms[GEMM_CLASSES][SP_CUDA_OUTPUTS_MAX];
} gemm_choice;

typedef struct gemm_library gemm_library;

#define GEMM_FOLDS 2 /* tiles, the last ones, that have a form which folds deltas in */

typedef struct base_gemm {
    int multiprocessors;
    int shared_bytes; /* that a block may have */
    void *encode;     /* cuTensorMapEncodeTiled where the GPU runs base_gemm_sm90a.cu, else NULL */
    int clusters[SP_CUDA_GEMM_SHAPES]; /* that run at once, for each of its tiles */
    int folds[GEMM_FOLDS];             /* the same of those that fold deltas in */
    gemm_library *library;             /* NULL: none */
    gemm_choice *choices;
    bool free;       /* any algorithm of cuBLASLt, whatever its bytes */
    void *workspace; /* of those, GEMM_WORKSPACE_BYTES; NULL: none */
} base_gemm;

#define GEMM_WORKSPACE_BYTES ((size_t)32 << 20)

/* Set the kernels' attributes; gpu is the current one. */
cudaError_t sp_cuda_gemm_few_init(int shared_bytes);
cudaError_t sp_cuda_gemm_tiles_init(int shared_bytes);
cudaError_t sp_cuda_gemm_wide_init(int gpu, base_gemm *state);

/* Only enqueue; gpu is the current one. */
cudaError_t sp_cuda_gemm_few(const base_gemm *state, const sp_cuda_gemm *gemm, cudaStream_t stream);
cudaError_t sp_cuda_gemm_tiles(const base_gemm *state, const sp_cuda_gemm *gemm,
                               cudaStream_t stream);
/* In tiles of a kind, -1: the best. cudaErrorNotSupported: the GPU, or the build, has no wgmma. */
cudaError_t sp_cuda_gemm_wide(const base_gemm *state, int kind, const sp_cuda_gemm *gemm,
                              cudaStream_t stream);

/* With gemm->deltas folded in; cudaErrorNotSupported: these rows, ranks or addresses cannot be. */
cudaError_t sp_cuda_gemm_fold_init(base_gemm *state);
cudaError_t sp_cuda_gemm_folding(const base_gemm *state, const sp_cuda_gemm *gemm,
                                 cudaStream_t stream);

/* By the best of the kernels here. */
cudaError_t sp_cuda_gemm_own(const base_gemm *state, const sp_cuda_gemm *gemm, cudaStream_t stream);

/* cuBLASLt, or NULL; tries it on a weight; enqueues a GEMM, or false: it is not used for this one,
 * or refuses it. */
gemm_library *sp_cuda_gemm_library_open(const char *path);
void sp_cuda_gemm_library_close(gemm_library *library);
cudaError_t sp_cuda_gemm_library_learn(base_gemm *state, const sp_cuda_gemm *like, int rows_max,
                                       sp_cuda_gemm_report *report);
bool sp_cuda_gemm_by_library(const base_gemm *state, const sp_cuda_gemm *gemm, cudaStream_t stream);

/* The outputs cut into tiles of so many columns, one output after the other. */
typedef struct gemm_columns {
    int end[SP_CUDA_OUTPUTS_MAX]; /* tiles up to the end of each output */
    int tiles;
} gemm_columns;

static inline gemm_columns columns_of(const sp_cuda_gemm *gemm, int width)
{
    gemm_columns columns = {};

    for (int i = 0; i < SP_CUDA_OUTPUTS_MAX; i++) {
        if (i < gemm->n_outputs)
            columns.tiles += sp_cuda_ceil(gemm->outputs[i].n, width);
        columns.end[i] = columns.tiles;
    }
    return columns;
}

/* The output that a tile belongs to, and the tile's number there. */
typedef struct gemm_place {
    int output, tile;
} gemm_place;

static __device__ __forceinline__ gemm_place place_of(const gemm_columns &columns, int tile)
{
    gemm_place place = {0, tile};

#pragma unroll
    for (int i = 0; i < SP_CUDA_OUTPUTS_MAX - 1; i++)
        if (tile >= columns.end[i])
            place = {i + 1, tile - columns.end[i]};
    return place;
}

static __device__ __forceinline__ float with_bias(const sp_cuda_gemm_output &out, int n, float sum)
{
    return out.bias != NULL ? sum + widen<0>(((const uint16_t *)out.bias)[n]) : sum;
}

static __device__ __forceinline__ void store_output(const sp_cuda_gemm_output &out, int row, int n,
                                                    float sum)
{
    int64_t at = row * out.y_stride + n;
    float value = with_bias(out, n, sum);

    if (out.y_is_f32)
        ((float *)out.y)[at] = value;
    else
        ((uint16_t *)out.y)[at] = narrow<0>(value);
}

/* Whether two adjacent outputs, of which the first has an even column, may be stored at once. */
static __device__ __forceinline__ bool stores_pairs(const sp_cuda_gemm_output &out)
{
    return out.y_stride % 2 == 0 && (uintptr_t)out.y % (out.y_is_f32 ? 8 : 4) == 0;
}

/* Two adjacent outputs of a row; `pairs`: stores_pairs. */
static __device__ __forceinline__ void store_two(const sp_cuda_gemm_output &out, bool pairs,
                                                 int row, int n, float low, float high)
{
    int64_t at = row * out.y_stride + n;

    if (pairs && n + 1 < out.n) {
        low = with_bias(out, n, low);
        high = with_bias(out, n + 1, high);
        if (out.y_is_f32)
            *(float2 *)((float *)out.y + at) = make_float2(low, high);
        else
            *(uint32_t *)((uint16_t *)out.y + at) = narrow_two<0>(low, high);
        return;
    }
    if (n < out.n)
        store_output(out, row, n, low);
    if (n + 1 < out.n)
        store_output(out, row, n + 1, high);
}

#endif
