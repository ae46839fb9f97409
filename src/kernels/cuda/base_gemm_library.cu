/*
 * base_gemm_library.cu: cuBLASLt, opened at run time and never linked. Only algorithms without
 * split-K are tried, and one is used for a weight and a class of rows (up to a power of two) if,
 * tried on that weight, it has the bytes of our kernels and is faster. In a state that is free any
 * faster algorithm is used. What it refuses at a launch our kernels do.
 */
#include "kernels/cuda/base_gemm.cuh"

#include <dlfcn.h>
#include <new>

#define CANDIDATES  8
#define TRIED       4                   /* of them, for one output */
#define REPEATS     4                   /* of a timing; the fastest counts */
#define FLUSH_BYTES ((size_t)128 << 20) /* written before each, so that w is not in L2 */

/* ---- the library, declared by hand --------------------------------------------------------- */

enum {
    TRANSPOSE_A = 3,    /* CUBLASLT_MATMUL_DESC_TRANSA */
    COMPUTE_32F = 68,   /* CUBLAS_COMPUTE_32F */
    REAL_32F = 0,       /* CUDA_R_32F */
    REAL_16BF = 14,     /* CUDA_R_16BF */
    TRANSPOSED = 1,     /* CUBLAS_OP_T */
    SPLIT_K = 2,        /* CUBLASLT_ALGO_CONFIG_SPLITK_NUM */
    REDUCTION = 3,      /* CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME */
    WORKSPACE = 1,      /* CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES */
    ALIGNMENT_FIRST = 5 /* CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES; B, C, D follow */
};

typedef struct library_candidate {
    gemm_algorithm algorithm;
    size_t workspace_bytes;
    int state;
    float waves;
    int reserved[4];
} library_candidate;

static_assert(sizeof(library_candidate) == 96, "cublasLtMatmulHeuristicResult_t");

struct gemm_library {
    void *object, *handle;
    int (*create)(void **out_handle);
    int (*destroy)(void *handle);
    int (*desc_create)(void **out_desc, int compute, int scale);
    int (*desc_destroy)(void *desc);
    int (*desc_set)(void *desc, int attribute, const void *value, size_t bytes);
    int (*layout_create)(void **out_layout, int type, uint64_t rows, uint64_t columns, int64_t ld);
    int (*layout_destroy)(void *layout);
    int (*preference_create)(void **out_preference);
    int (*preference_destroy)(void *preference);
    int (*preference_set)(void *preference, int attribute, const void *value, size_t bytes);
    int (*heuristic)(void *handle, void *desc, void *a, void *b, void *c, void *d, void *preference,
                     int n, library_candidate *out, int *out_n);
    int (*config)(const gemm_algorithm *algorithm, int attribute, void *value, size_t bytes,
                  size_t *out_bytes);
    int (*matmul)(void *handle, void *desc, const void *alpha, const void *a, void *a_layout,
                  const void *b, void *b_layout, const void *beta, const void *c, void *c_layout,
                  void *d, void *d_layout, const gemm_algorithm *algorithm, void *workspace,
                  size_t workspace_bytes, cudaStream_t stream);
    void *desc; /* w transposed, FP32 sums */
};

static bool find_all(gemm_library *l)
{
    struct {
        void **to;
        const char *name;
    } all[] = {
        {(void **)&l->create, "cublasLtCreate"},
        {(void **)&l->destroy, "cublasLtDestroy"},
        {(void **)&l->desc_create, "cublasLtMatmulDescCreate"},
        {(void **)&l->desc_destroy, "cublasLtMatmulDescDestroy"},
        {(void **)&l->desc_set, "cublasLtMatmulDescSetAttribute"},
        {(void **)&l->layout_create, "cublasLtMatrixLayoutCreate"},
        {(void **)&l->layout_destroy, "cublasLtMatrixLayoutDestroy"},
        {(void **)&l->preference_create, "cublasLtMatmulPreferenceCreate"},
        {(void **)&l->preference_destroy, "cublasLtMatmulPreferenceDestroy"},
        {(void **)&l->preference_set, "cublasLtMatmulPreferenceSetAttribute"},
        {(void **)&l->heuristic, "cublasLtMatmulAlgoGetHeuristic"},
        {(void **)&l->config, "cublasLtMatmulAlgoConfigGetAttribute"},
        {(void **)&l->matmul, "cublasLtMatmul"},
    };

    for (auto &one : all) {
        *one.to = dlsym(l->object, one.name);
        if (*one.to == NULL)
            return false;
    }
    return true;
}

static void *open_object(const char *path)
{
    void *object;

    if (path != NULL)
        return dlopen(path, RTLD_NOW | RTLD_LOCAL);
    object = dlopen("libcublasLt.so.13", RTLD_NOW | RTLD_LOCAL);
    return object != NULL ? object : dlopen("libcublasLt.so.12", RTLD_NOW | RTLD_LOCAL);
}

void sp_cuda_gemm_library_close(gemm_library *l)
{
    if (l == NULL)
        return;
    if (l->desc != NULL)
        (void)l->desc_destroy(l->desc);
    if (l->handle != NULL)
        (void)l->destroy(l->handle);
    if (l->object != NULL)
        (void)dlclose(l->object);
    delete l;
}

gemm_library *sp_cuda_gemm_library_open(const char *path)
{
    gemm_library *l = new (std::nothrow) gemm_library();
    int transposed = TRANSPOSED;

    if (l == NULL)
        return NULL;
    l->object = open_object(path);
    if (l->object != NULL && find_all(l) && l->create(&l->handle) == 0 &&
        l->desc_create(&l->desc, COMPUTE_32F, REAL_32F) == 0 &&
        l->desc_set(l->desc, TRANSPOSE_A, &transposed, sizeof transposed) == 0)
        return l;
    sp_cuda_gemm_library_close(l);
    return NULL;
}

/* ---- one output ---------------------------------------------------------------------------- */

/* Its matrices by columns: w [k, n], x [k, rows], y [n, rows]. */
typedef struct library_layouts {
    const gemm_library *library;
    void *w, *x, *y;
} library_layouts;

static void free_layouts(library_layouts *of)
{
    if (of->w != NULL)
        (void)of->library->layout_destroy(of->w);
    if (of->x != NULL)
        (void)of->library->layout_destroy(of->x);
    if (of->y != NULL)
        (void)of->library->layout_destroy(of->y);
}

static bool make_layouts(const gemm_library *l, const sp_cuda_gemm *gemm, int output,
                         library_layouts *out)
{
    const sp_cuda_gemm_output *of = &gemm->outputs[output];
    uint64_t k = (uint64_t)gemm->k, n = (uint64_t)of->n, rows = (uint64_t)gemm->rows;

    *out = {l, NULL, NULL, NULL};
    if (l->layout_create(&out->w, REAL_16BF, k, n, gemm->k) == 0 &&
        l->layout_create(&out->x, REAL_16BF, k, rows, gemm->x_stride) == 0 &&
        l->layout_create(&out->y, of->y_is_f32 ? REAL_32F : REAL_16BF, n, rows, of->y_stride) == 0)
        return true;
    free_layouts(out);
    return false;
}

static size_t workspace_of(const base_gemm *state)
{
    return state->free ? GEMM_WORKSPACE_BYTES : 0;
}

static bool multiply(const base_gemm *state, const sp_cuda_gemm *gemm, int output,
                     const gemm_algorithm *algorithm, cudaStream_t stream)
{
    const gemm_library *l = state->library;
    const sp_cuda_gemm_output *of = &gemm->outputs[output];
    const float one = 1.0f, zero = 0.0f;
    library_layouts layouts;
    bool done;

    if (!make_layouts(l, gemm, output, &layouts))
        return false;
    done = l->matmul(l->handle, l->desc, &one, of->w, layouts.w, gemm->x, layouts.x, &zero, of->y,
                     layouts.y, of->y, layouts.y, algorithm, state->workspace, workspace_of(state),
                     stream) == 0;
    free_layouts(&layouts);
    return done;
}

/* Algorithms that need no memory and sum each output in one piece, or any where the state is free;
 * the best first. */
static int find_candidates(const base_gemm *state, const sp_cuda_gemm *gemm, int output,
                           library_candidate *out)
{
    const gemm_library *l = state->library;
    const uint32_t alignment = 16;
    const size_t workspace_bytes = workspace_of(state);
    library_layouts layouts;
    void *preference = NULL;
    int found = 0, kept = 0;

    if (!make_layouts(l, gemm, output, &layouts))
        return 0;
    if (l->preference_create(&preference) == 0) {
        for (int i = 0; i < 4; i++)
            (void)l->preference_set(preference, ALIGNMENT_FIRST + i, &alignment, sizeof alignment);
        (void)l->preference_set(preference, WORKSPACE, &workspace_bytes, sizeof workspace_bytes);
        if (l->heuristic(l->handle, l->desc, layouts.w, layouts.x, layouts.y, layouts.y, preference,
                         CANDIDATES, out, &found) != 0)
            found = 0;
        (void)l->preference_destroy(preference);
    }
    free_layouts(&layouts);
    for (int i = 0; i < found; i++) {
        int splits = 1;
        uint32_t reduction = 0;
        size_t got;

        (void)l->config(&out[i].algorithm, SPLIT_K, &splits, sizeof splits, &got);
        (void)l->config(&out[i].algorithm, REDUCTION, &reduction, sizeof reduction, &got);
        if (out[i].state == 0 && out[i].workspace_bytes <= workspace_bytes &&
            (state->free || (splits <= 1 && reduction == 0)))
            out[kept++] = out[i];
    }
    return kept;
}

/* ---- trials -------------------------------------------------------------------------------- */

__global__ void fill_x(uint16_t *x, int64_t n)
{
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n;
         i += (int64_t)gridDim.x * blockDim.x) {
        uint32_t h = (uint32_t)i * 2654435761u;

        h = (h ^ (h >> 15)) * 2246822519u;
        x[i] = narrow<0>((float)((h ^ (h >> 13)) & 0xffff) / 32768.0f - 1.0f);
    }
}

__global__ void count_differing(const uint16_t *a, const uint16_t *b, int64_t n, int *count)
{
    int differ = 0;

    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n;
         i += (int64_t)gridDim.x * blockDim.x)
        differ += a[i] != b[i];
    if (differ > 0)
        atomicAdd(count, differ);
}

/* Two forms of one GEMM that write to memory of their own. */
typedef struct gemm_trial {
    const base_gemm *state;
    sp_cuda_gemm ours, other; /* the same but for y */
    int *differ;              /* in device memory */
    void *flush;              /* FLUSH_BYTES */
    cudaStream_t stream;
    cudaEvent_t from, to;
    char *memory;
} gemm_trial;

static size_t rounded(size_t bytes)
{
    return (bytes + 255) / 256 * 256;
}

static size_t output_bytes(const sp_cuda_gemm_output *of, int rows)
{
    return (size_t)rows * (size_t)of->n * (of->y_is_f32 ? 4 : 2);
}

static void close_trial(gemm_trial *t)
{
    (void)cudaFree(t->memory);
    (void)cudaFree(t->flush);
    if (t->from != NULL)
        (void)cudaEventDestroy(t->from);
    if (t->to != NULL)
        (void)cudaEventDestroy(t->to);
    if (t->stream != NULL)
        (void)cudaStreamDestroy(t->stream);
}

/* x and both outputs for `rows` rows. */
static cudaError_t open_trial(const base_gemm *state, const sp_cuda_gemm *like, int rows,
                              gemm_trial *t)
{
    size_t x_bytes = rounded((size_t)rows * (size_t)like->k * 2), bytes = x_bytes + 256;
    cudaError_t code = cudaStreamCreateWithFlags(&t->stream, cudaStreamNonBlocking);
    char *at;

    for (int i = 0; i < like->n_outputs; i++)
        bytes += 2 * rounded(output_bytes(&like->outputs[i], rows));
    code = code == cudaSuccess ? cudaEventCreate(&t->from) : code;
    code = code == cudaSuccess ? cudaEventCreate(&t->to) : code;
    code = code == cudaSuccess ? cudaMalloc((void **)&t->memory, bytes) : code;
    code = code == cudaSuccess ? cudaMalloc(&t->flush, FLUSH_BYTES) : code;
    if (code != cudaSuccess)
        return code;
    t->state = state;
    t->differ = (int *)t->memory;
    t->ours = *like;
    t->ours.x = t->memory + 256;
    t->ours.x_stride = like->k;
    t->ours.form = SP_CUDA_GEMM_CHOSEN;
    at = t->memory + 256 + x_bytes;
    t->other = t->ours;
    for (int i = 0; i < like->n_outputs; i++) {
        t->ours.outputs[i].y_stride = t->other.outputs[i].y_stride = like->outputs[i].n;
        t->ours.outputs[i].y = at;
        t->other.outputs[i].y = at + rounded(output_bytes(&like->outputs[i], rows));
        at += 2 * rounded(output_bytes(&like->outputs[i], rows));
    }
    fill_x<<<1024, 256, 0, t->stream>>>((uint16_t *)t->ours.x, (int64_t)rows * like->k);
    return cudaGetLastError();
}

/* Whether an algorithm writes the bytes that ours wrote for so many rows. */
static bool has_our_bytes(gemm_trial *t, int output, const gemm_algorithm *algorithm, int rows)
{
    const sp_cuda_gemm_output *ours = &t->ours.outputs[output];
    size_t bytes = output_bytes(ours, rows);
    int differ = 1;

    t->other.rows = rows;
    if (cudaMemsetAsync(t->other.outputs[output].y, 0xff, bytes, t->stream) != cudaSuccess ||
        cudaMemsetAsync(t->differ, 0, sizeof differ, t->stream) != cudaSuccess ||
        !multiply(t->state, &t->other, output, algorithm, t->stream))
        return false;
    count_differing<<<1024, 256, 0, t->stream>>>((const uint16_t *)ours->y,
                                                 (const uint16_t *)t->other.outputs[output].y,
                                                 (int64_t)(bytes / 2), t->differ);
    if (cudaMemcpyAsync(&differ, t->differ, sizeof differ, cudaMemcpyDeviceToHost, t->stream) !=
            cudaSuccess ||
        cudaStreamSynchronize(t->stream) != cudaSuccess)
        return false;
    return differ == 0;
}

/* Outputs [from, to) by the library; NULL algorithms: all by ours. */
static bool run_once(gemm_trial *t, const gemm_algorithm *algorithms, int from, int to)
{
    bool done = true;

    if (algorithms == NULL)
        return sp_cuda_gemm_own(t->state, &t->ours, t->stream) == cudaSuccess;
    for (int i = from; i < to; i++)
        done = done && multiply(t->state, &t->other, i, &algorithms[i], t->stream);
    return done;
}

/* The fastest of a few, with cold weights. */
static float milliseconds(gemm_trial *t, const gemm_algorithm *algorithms, int from, int to)
{
    float best = 1e30f, ms;

    for (int i = 0; i < REPEATS; i++) {
        if (cudaMemsetAsync(t->flush, i, FLUSH_BYTES, t->stream) != cudaSuccess ||
            cudaEventRecord(t->from, t->stream) != cudaSuccess ||
            !run_once(t, algorithms, from, to) ||
            cudaEventRecord(t->to, t->stream) != cudaSuccess ||
            cudaEventSynchronize(t->to) != cudaSuccess ||
            cudaEventElapsedTime(&ms, t->from, t->to) != cudaSuccess)
            return 1e30f;
        best = ms < best ? ms : best;
    }
    return best;
}

/* Our bytes for so many rows, and for about half of them, in a launch of fewer. */
static bool may_use(gemm_trial *t, int output, const gemm_algorithm *algorithm, int rows,
                    sp_cuda_gemm_report *report)
{
    bool same = has_our_bytes(t, output, algorithm, rows) &&
                has_our_bytes(t, output, algorithm, rows / 2 + 1);

    report->n_differ += !same;
    t->other.rows = rows;
    return same || t->state->free;
}

/* Sets out[i] for each output to the fastest of its candidates; false: one has none. */
static bool find_algorithms(gemm_trial *t, int rows, gemm_algorithm *out,
                            sp_cuda_gemm_report *report)
{
    for (int i = 0; i < t->ours.n_outputs; i++) {
        library_candidate candidates[CANDIDATES];
        gemm_algorithm best;
        float least = 1e30f;
        int n;

        t->other.rows = rows;
        n = min(TRIED, find_candidates(t->state, &t->other, i, candidates));
        for (int at = 0; at < n; at++) {
            float ms;

            if (!may_use(t, i, &candidates[at].algorithm, rows, report))
                continue;
            out[i] = candidates[at].algorithm;
            ms = milliseconds(t, out, i, i + 1);
            if (ms < least) {
                least = ms;
                best = out[i];
            }
        }
        if (least == 1e30f)
            return false;
        out[i] = best;
    }
    return true;
}

/* A class of rows: up to `rows`. */
static bool try_class(gemm_trial *t, int rows, gemm_algorithm *algorithms,
                      sp_cuda_gemm_report *report)
{
    t->ours.rows = rows;
    report->n_classes++;
    if (sp_cuda_gemm_own(t->state, &t->ours, t->stream) != cudaSuccess ||
        !find_algorithms(t, rows, algorithms, report))
        return false;
    return milliseconds(t, algorithms, 0, t->other.n_outputs) < milliseconds(t, NULL, 0, 0);
}

cudaError_t sp_cuda_gemm_library_learn(base_gemm *state, const sp_cuda_gemm *like, int rows_max,
                                       sp_cuda_gemm_report *report)
{
    gemm_trial trial = {};
    gemm_choice *choice = new (std::nothrow) gemm_choice();
    cudaError_t code;

    if (choice == NULL)
        return cudaErrorMemoryAllocation;
    choice->like = *like;
    code = open_trial(state, like, rows_max, &trial);
    for (int c = 0; c < GEMM_CLASSES && code == cudaSuccess; c++) {
        if (c > 0 && rows_max <= 1 << (c - 1))
            break;
        choice->library[c] =
            try_class(&trial, min(rows_max, 1 << c), choice->algorithms[c], report);
        report->n_library += choice->library[c];
        code = cudaGetLastError();
    }
    close_trial(&trial);
    if (code != cudaSuccess) {
        delete choice;
        return code;
    }
    choice->next = state->choices;
    state->choices = choice;
    return cudaSuccess;
}

/* ---- launch -------------------------------------------------------------------------------- */

static bool is_like(const sp_cuda_gemm *a, const sp_cuda_gemm *b)
{
    bool like = a->k == b->k && a->n_outputs == b->n_outputs;

    for (int i = 0; like && i < a->n_outputs; i++)
        like =
            a->outputs[i].n == b->outputs[i].n && a->outputs[i].y_is_f32 == b->outputs[i].y_is_f32;
    return like;
}

/* The algorithms were tried with pointers and strides of 16 bytes, which they may rely on. */
static bool suits_library(const sp_cuda_gemm *gemm)
{
    bool suits = true;

    for (int i = 0; i < gemm->n_outputs; i++) {
        const sp_cuda_gemm_output *of = &gemm->outputs[i];
        int element = of->y_is_f32 ? 4 : 2;

        suits = suits && of->bias == NULL && (uintptr_t)of->y % 16 == 0 &&
                of->y_stride * element % 16 == 0;
    }
    return suits;
}

bool sp_cuda_gemm_by_library(const base_gemm *state, const sp_cuda_gemm *gemm, cudaStream_t stream)
{
    const gemm_choice *choice = state->choices;
    int c = 0;

    while (choice != NULL && !is_like(&choice->like, gemm))
        choice = choice->next;
    while (c < GEMM_CLASSES && gemm->rows > 1 << c)
        c++;
    if (choice == NULL || c == GEMM_CLASSES || !choice->library[c] || !suits_library(gemm))
        return false;
    for (int i = 0; i < gemm->n_outputs; i++)
        if (!multiply(state, gemm, i, &choice->algorithms[c][i], stream))
            return false;
    return true;
}
