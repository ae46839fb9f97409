/*
 * grouped.c: the grouped LoRA GEMM in FP16 on the CPU.
 *
 * A [in, S] and B [S, out] have the summed index as their outer one, so both sums are computed as
 * rank-one updates: a block of A's or B's rows is widened once and added, row by row, to the FP32
 * sums of a tile of at most TILE_ROWS rows. Products of two FP16 numbers are exact in FP32, so a
 * fused multiply-add and a separate one give the same bits, and every level the same answer.
 */
#include "delta/grouped_sizes.h"

#include "base/error.h"
#include "base/grow.h"
#include "base/half.h"
#include "base/integer.h"
#include "kernels/cpu/kernels.h"

#include <math.h>
#include <string.h>

#define WORKSPACE_ALIGN 256
#define TILE_ROWS       8
#define STAGE_FLOATS    8192 /* widened weights of one block: 32 KiB of stack */
#define COLUMNS         512  /* outputs of one expand task */

/* Rows of one adapter, at most TILE_ROWS. */
typedef struct grouped_tile {
    int32_t row, n_rows, adapter;
} grouped_tile;

typedef struct grouped_job {
    const sp_grouped_lora_params *params;
    const sp_kernels *kernels;
    int32_t rank_stride, n_tiles, n_columns; /* n_columns: expand tasks of one tile */
    uint16_t *xa;                            /* f16 [total_rows, rank_stride] */
    grouped_tile *tiles;                     /* [total_rows] at most */
} grouped_job;

/* ---- queries and checks -------------------------------------------------------------------- */

int32_t sp_grouped_lora_rank_stride(int32_t max_rank)
{
    if (max_rank < 1 || max_rank > SP_GROUPED_LORA_RANK_MAX)
        return 0;
    return (max_rank + 7) / 8 * 8;
}

static size_t xa_bytes(int32_t total_rows, int32_t rank_stride)
{
    return align_up((size_t)total_rows * (size_t)rank_stride * sizeof(uint16_t), WORKSPACE_ALIGN);
}

size_t sp_grouped_lora_workspace_bytes(int32_t total_rows, int32_t output_size, int32_t max_rank)
{
    int32_t rank_stride = sp_grouped_lora_rank_stride(max_rank);

    if (total_rows < 1 || total_rows > SP_GROUPED_LORA_ROWS_MAX || output_size < 1 ||
        output_size > SP_GROUPED_LORA_WIDTH_MAX || rank_stride == 0)
        return 0;
    return xa_bytes(total_rows, rank_stride) +
           align_up((size_t)total_rows * sizeof(grouped_tile), WORKSPACE_ALIGN);
}

/* A size that must be from 1 to `most`, which is what the kernels take. */
static sp_status check_size(const char *name, int32_t size, int32_t most, sp_error *error)
{
    if (size < 1)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, name, -1, "%s must be at least 1, not %d",
                       name, (int)size);
    if (size > most)
        return sp_fail(error, SP_ERR_UNSUPPORTED, NULL, name, -1,
                       "the grouped GEMM takes %s up to %d, not %d", name, (int)most, (int)size);
    return SP_OK;
}

static sp_status check_sizes(const sp_grouped_lora_params *p, sp_error *error)
{
    const struct {
        const char *name;
        int32_t size, most;
    } sizes[] = {
        {"total_rows", p->total_rows, SP_GROUPED_LORA_ROWS_MAX},
        {"input_size", p->input_size, SP_GROUPED_LORA_WIDTH_MAX},
        {"output_size", p->output_size, SP_GROUPED_LORA_WIDTH_MAX},
        {"max_rank", p->max_rank, SP_GROUPED_LORA_RANK_MAX},
        {"n_segments", p->n_segments, INT32_MAX},
        {"n_adapters", p->n_adapters, INT32_MAX},
    };

    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        sp_status status = check_size(sizes[i].name, sizes[i].size, sizes[i].most, error);

        if (status != SP_OK)
            return status;
    }
    if (p->n_segments > p->total_rows)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "n_segments", -1,
                       "%d segments cannot cover %d rows: none is empty", (int)p->n_segments,
                       (int)p->total_rows);
    return SP_OK;
}

static sp_status check_pointers(const sp_grouped_lora_params *p, sp_error *error)
{
    const struct {
        const char *name;
        const void *pointer;
    } pointers[] = {
        {"input", p->input},
        {"lora_a", p->lora_a},
        {"lora_b", p->lora_b},
        {"output", p->output},
        {"workspace", p->workspace},
        {"segment_offsets", p->segment_offsets},
        {"segment_adapters", p->segment_adapters},
        {"ranks", p->ranks},
        {"scales", p->scales},
    };
    size_t need = sp_grouped_lora_workspace_bytes(p->total_rows, p->output_size, p->max_rank);

    for (size_t i = 0; i < sizeof pointers / sizeof *pointers; i++)
        if (pointers[i].pointer == NULL)
            return sp_fail(error, SP_ERR_ARGUMENT, NULL, pointers[i].name, -1, "%s is NULL",
                           pointers[i].name);
    if ((uintptr_t)p->workspace % WORKSPACE_ALIGN != 0 || p->workspace_bytes < need)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "workspace", -1,
                       "the workspace must have %zu bytes on a %d-byte boundary, it has %zu at %p",
                       need, WORKSPACE_ALIGN, p->workspace_bytes, p->workspace);
    return SP_OK;
}

sp_status sp_grouped_read_params(const sp_grouped_lora_params *params,
                                 sp_grouped_lora_params *out_params, sp_error *error)
{
    sp_status status;

    *out_params = (sp_grouped_lora_params){.struct_bytes = sizeof *out_params};
    status =
        sp_struct_read(out_params, sizeof *out_params, params, "sp_grouped_lora_params", error);
    if (status == SP_OK)
        status = check_sizes(out_params, error);
    return status == SP_OK ? check_pointers(out_params, error) : status;
}

static sp_status check_segments(const sp_grouped_lora_params *p, sp_error *error)
{
    if (p->segment_offsets[0] != 0)
        return sp_fail(error, SP_ERR_INPUT, NULL, "segment_offsets", 0,
                       "the first segment must begin at row 0");
    for (int32_t g = 0; g < p->n_segments; g++) {
        if (p->segment_offsets[g + 1] <= p->segment_offsets[g])
            return sp_fail(error, SP_ERR_INPUT, NULL, "segment_offsets", g + 1,
                           "offsets must rise strictly: %d after %d",
                           (int)p->segment_offsets[g + 1], (int)p->segment_offsets[g]);
        if (p->segment_adapters[g] < 0 || p->segment_adapters[g] >= p->n_adapters)
            return sp_fail(error, SP_ERR_INPUT, NULL, "segment_adapters", g,
                           "adapter %d is none of %d", (int)p->segment_adapters[g],
                           (int)p->n_adapters);
    }
    if (p->segment_offsets[p->n_segments] != p->total_rows)
        return sp_fail(error, SP_ERR_INPUT, NULL, "segment_offsets", p->n_segments,
                       "the segments end at row %d of %d", (int)p->segment_offsets[p->n_segments],
                       (int)p->total_rows);
    return SP_OK;
}

static sp_status check_metadata(const sp_grouped_lora_params *p, sp_error *error)
{
    sp_status status = check_segments(p, error);

    if (status != SP_OK)
        return status;
    for (int32_t a = 0; a < p->n_adapters; a++) {
        if (p->ranks[a] < 0 || p->ranks[a] > p->max_rank)
            return sp_fail(error, SP_ERR_INPUT, NULL, "ranks", a, "rank %d is not in 0 .. %d",
                           (int)p->ranks[a], (int)p->max_rank);
        if (!isfinite(p->scales[a]))
            return sp_fail(error, SP_ERR_INPUT, NULL, "scales", a, "the scale is not finite");
    }
    return SP_OK;
}

sp_status sp_grouped_lora_check(const sp_grouped_lora_params *params, sp_error *error)
{
    sp_grouped_lora_params own;
    sp_status status = sp_grouped_read_params(params, &own, error);

    return status == SP_OK ? check_metadata(&own, error) : status;
}

/* ---- arithmetic ---------------------------------------------------------------------------- */

static void widen(const grouped_job *job, float *to, const uint16_t *from, int64_t n)
{
    job->kernels->convert(SP_DTYPE_F32, to, SP_DTYPE_F16, from, n);
}

/* sums [j] += x * w [j] */
static void add_product(float *sums, float x, const float *w, int32_t n)
{
    for (int32_t j = 0; j < n; j++)
        sums[j] += x * w[j];
}

/* xa of one tile: k ascends in blocks whose rows of A are widened together. */
static void shrink_task(void *user, int32_t task, int32_t thread)
{
    const grouped_job *job = user;
    const sp_grouped_lora_params *p = job->params;
    const grouped_tile *tile = &job->tiles[task];
    int32_t rank = p->ranks[tile->adapter], stride = job->rank_stride, in = p->input_size;
    int32_t block = STAGE_FLOATS / stride;
    const uint16_t *a = (const uint16_t *)p->lora_a +
                        (size_t)tile->adapter * (size_t)in * (size_t)stride; /* [in, stride] */
    float weights[STAGE_FLOATS], sums[TILE_ROWS][SP_GROUPED_LORA_RANK_MAX] = {{0}};

    (void)thread;
    for (int32_t k0 = 0; k0 < in; k0 += block) {
        int32_t count = in - k0 < block ? in - k0 : block;

        widen(job, weights, a + (size_t)k0 * (size_t)stride, (int64_t)count * stride);
        for (int32_t i = 0; i < tile->n_rows; i++) {
            const uint16_t *x =
                (const uint16_t *)p->input + (size_t)(tile->row + i) * (size_t)in + k0;

            for (int32_t k = 0; k < count; k++)
                add_product(sums[i], sp_f16_to_f32(x[k]), weights + k * stride, rank);
        }
    }
    for (int32_t i = 0; i < tile->n_rows; i++)
        for (int32_t j = 0; j < rank; j++)
            job->xa[(size_t)(tile->row + i) * (size_t)stride + (size_t)j] =
                sp_f32_to_f16(sums[i][j]);
}

static void fold_row(uint16_t *y, const float *sums, float scale, int32_t n)
{
    for (int32_t c = 0; c < n; c++) {
        float delta = sp_f16_to_f32(sp_f32_to_f16(sums[c]));

        y[c] = sp_f32_to_f16(fmaf(scale, delta, sp_f16_to_f32(y[c])));
    }
}

/* COLUMNS outputs of one tile. */
static void expand_task(void *user, int32_t task, int32_t thread)
{
    const grouped_job *job = user;
    const sp_grouped_lora_params *p = job->params;
    const grouped_tile *tile = &job->tiles[task / job->n_columns];
    int32_t column = task % job->n_columns * COLUMNS, out = p->output_size;
    int32_t n = out - column < COLUMNS ? out - column : COLUMNS;
    size_t stride = (size_t)job->rank_stride;
    const uint16_t *b = (const uint16_t *)p->lora_b + (size_t)tile->adapter * stride * (size_t)out +
                        column; /* [stride, out] */
    float weights[COLUMNS], sums[TILE_ROWS][COLUMNS] = {{0}};

    (void)thread;
    for (int32_t j = 0; j < p->ranks[tile->adapter]; j++) {
        widen(job, weights, b + (size_t)j * (size_t)out, n);
        for (int32_t i = 0; i < tile->n_rows; i++) {
            uint16_t xa = job->xa[(size_t)(tile->row + i) * stride + (size_t)j];

            add_product(sums[i], sp_f16_to_f32(xa), weights, n);
        }
    }
    for (int32_t i = 0; i < tile->n_rows; i++)
        fold_row((uint16_t *)p->output + (size_t)(tile->row + i) * (size_t)out + column, sums[i],
                 p->scales[tile->adapter], n);
}

/* ---- the call ------------------------------------------------------------------------------ */

static void cut_tiles(grouped_job *job)
{
    const sp_grouped_lora_params *p = job->params;

    job->n_tiles = 0;
    for (int32_t g = 0; g < p->n_segments; g++) {
        int32_t adapter = p->segment_adapters[g], end = p->segment_offsets[g + 1];

        if (p->ranks[adapter] == 0 || p->scales[adapter] == 0.0f)
            continue;
        for (int32_t row = p->segment_offsets[g]; row < end; row += TILE_ROWS)
            job->tiles[job->n_tiles++] =
                (grouped_tile){row, end - row < TILE_ROWS ? end - row : TILE_ROWS, adapter};
    }
}

sp_status sp_grouped_lora_gemm(const sp_grouped_lora_params *params, sp_exec *exec,
                               const char *cpu_isa, sp_error *error)
{
    sp_grouped_lora_params own;
    grouped_job job = {.params = &own};
    sp_status status = sp_grouped_read_params(params, &own, error);

    if (status == SP_OK)
        status = check_metadata(&own, error);
    if (status == SP_OK)
        status = sp_kernels_get(cpu_isa, &job.kernels, error);
    if (status != SP_OK)
        return status;
    job.rank_stride = sp_grouped_lora_rank_stride(own.max_rank);
    job.n_columns = (own.output_size + COLUMNS - 1) / COLUMNS;
    job.xa = own.workspace;
    job.tiles =
        (grouped_tile *)(void *)((char *)own.workspace + xa_bytes(own.total_rows, job.rank_stride));
    cut_tiles(&job);
    if (job.n_tiles == 0)
        return SP_OK;
    sp_exec_run(exec, shrink_task, &job, job.n_tiles);
    sp_exec_run(exec, expand_task, &job, job.n_tiles * job.n_columns);
    return SP_OK;
}
