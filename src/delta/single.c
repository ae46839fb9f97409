/*
 * single.c: the delta of one adapter on plain pointers, for hosts without a pool: the same job as
 * the routed form on the CPU, the same kernels on a GPU (single_cuda.c).
 */
#include "base/alloc.h"
#include "base/error.h"
#include "base/grow.h"
#include "delta/shrink_expand.h"
#include "delta/single_cuda.h"

#include <sidepath/delta.h>

#include <math.h>

#define SCRATCH_ALIGN 256
#define SIZE_LIMIT    (1 << 20) /* of rows and inputs */
#define RANK_LIMIT    4096
#define DTYPES        3

struct sp_delta_single {
    sp_delta_single_options options;
    const sp_kernels *kernels;
    void *block;
    sp_lora_scratch scratch[DTYPES]; /* by sp_dtype, all of the same block */
    sp_single_gpu *gpu;              /* NULL on the CPU; else all but options is NULL */
};

/* ---- life ---------------------------------------------------------------------------------- */

void sp_delta_single_options_default(sp_delta_single_options *out_options, size_t struct_bytes)
{
    const sp_delta_single_options defaults = {
        .struct_bytes = sizeof defaults, .rows_max = 512, .k_in_max = 8192, .rank_max = 64};

    sp_struct_default(out_options, struct_bytes, &defaults, sizeof defaults);
}

static sp_status check_size(const char *name, int32_t size, int32_t limit, sp_error *error)
{
    if (size >= 1 && size <= limit)
        return SP_OK;
    return sp_fail(error, SP_ERR_ARGUMENT, NULL, name, -1, "%s must be from 1 to %d, not %d", name,
                   (int)limit, (int)size);
}

static bool is_gpu(const sp_delta_single_options *options)
{
    return options->device != NULL && sp_device_get_kind(options->device) == SP_DEVICE_CUDA;
}

static sp_status check_options(const sp_delta_single_options *options, sp_error *error)
{
    bool gpu = is_gpu(options);
    sp_status status =
        check_size("rows_max", options->rows_max, gpu ? SP_CUDA_ROWS_MAX : SIZE_LIMIT, error);

    if (status == SP_OK)
        status = check_size("k_in_max", options->k_in_max, SIZE_LIMIT, error);
    if (status == SP_OK)
        status =
            check_size("rank_max", options->rank_max, gpu ? SP_CUDA_RANK_MAX : RANK_LIMIT, error);
    return status;
}

static sp_lora_sizes sizes_of(const sp_delta_single_options *options, sp_dtype dtype)
{
    return (sp_lora_sizes){
        .dtype = dtype,
        .k_max = options->k_in_max,
        .rank_max = options->rank_max,
        .rows_max = options->rows_max,
        .x_f32 = options->x_f32,
    };
}

static sp_status create_scratch(sp_delta_single *single, sp_error *error)
{
    size_t bytes = 0;
    sp_status status = sp_kernels_get(single->options.cpu_isa, &single->kernels, error);

    if (status != SP_OK)
        return status;
    for (int dtype = 0; dtype < DTYPES; dtype++) {
        sp_lora_sizes sizes = sizes_of(&single->options, (sp_dtype)dtype);
        size_t own = sp_lora_scratch_bytes(&sizes);

        bytes = own > bytes ? own : bytes;
    }
    single->block = sp_aligned_calloc(bytes, SCRATCH_ALIGN);
    if (single->block == NULL)
        return sp_fail_memory(error, bytes, "the delta's scratch");
    for (int dtype = 0; dtype < DTYPES; dtype++) {
        sp_lora_sizes sizes = sizes_of(&single->options, (sp_dtype)dtype);

        sp_lora_scratch_cut(single->block, &sizes, &single->scratch[dtype]);
    }
    return SP_OK;
}

sp_status sp_delta_single_create(const sp_delta_single_options *options,
                                 sp_delta_single **out_single, sp_error *error)
{
    sp_delta_single_options own;
    sp_delta_single *single;
    sp_status status;

    if (out_single == NULL)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "out_single", -1, "out_single is NULL");
    sp_delta_single_options_default(&own, sizeof own);
    status = sp_struct_read(&own, sizeof own, options, "sp_delta_single_options", error);
    if (status == SP_OK)
        status = check_options(&own, error);
    if (status != SP_OK)
        return status;
    single = sp_calloc(1, sizeof *single);
    if (single == NULL)
        return sp_fail_memory(error, sizeof *single, "the delta");
    single->options = own;
    status = is_gpu(&own) ? sp_single_gpu_create(&own, &single->gpu, error)
                          : create_scratch(single, error);
    if (status != SP_OK) {
        sp_free(single);
        return status;
    }
    *out_single = single;
    return SP_OK;
}

void sp_delta_single_destroy(sp_delta_single *single)
{
    if (single == NULL)
        return;
    sp_single_gpu_destroy(single->gpu);
    sp_aligned_free(single->block);
    sp_free(single);
}

/* ---- checks -------------------------------------------------------------------------------- */

static sp_status check_sizes(const sp_delta_single *single, const sp_delta_single_args *args,
                             sp_error *error)
{
    const struct {
        const char *name;
        int32_t size, least, most;
    } sizes[] = {
        {"rows", args->rows, 0, single->options.rows_max},
        {"k_in", args->k_in, 1, single->options.k_in_max},
        {"n_out", args->n_out, 1, INT32_MAX},
        {"rank", args->rank, 0, single->options.rank_max},
    };

    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        if (sizes[i].size < sizes[i].least || sizes[i].size > sizes[i].most)
            return sp_fail(error, SP_ERR_ARGUMENT, NULL, sizes[i].name, -1,
                           "%s is %d, it must be from %d to %d, which was prepared for",
                           sizes[i].name, (int)sizes[i].size, (int)sizes[i].least,
                           (int)sizes[i].most);
    return SP_OK;
}

static sp_status check_types(const sp_delta_single *single, const sp_delta_single_args *args,
                             sp_error *error)
{
    if (sp_dtype_bytes(args->dtype) == 0)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "dtype", -1, "dtype %d is none",
                       (int)args->dtype);
    if (single->gpu != NULL && args->dtype == SP_DTYPE_F32)
        return sp_fail(error, SP_ERR_UNSUPPORTED, "engine-unsupported", "f32", -1,
                       "the CUDA kernels take bf16 and f16, not f32");
    if (args->y_type != args->dtype && args->y_type != SP_DTYPE_F32)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "y_type", -1,
                       "y_type is %d, it must be %s as dtype, or f32", (int)args->y_type,
                       sp_dtype_name(args->dtype));
    if (args->x_type != args->dtype && args->x_type != SP_DTYPE_F32)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "x_type", -1,
                       "x_type is %d, it must be %s as dtype, or f32", (int)args->x_type,
                       sp_dtype_name(args->dtype));
    if (args->x_type != args->dtype && !single->options.x_f32)
        return sp_fail(error, SP_ERR_UNSUPPORTED, NULL, "x_type", -1,
                       "x is f32 and the factors %s: set x_f32 in sp_delta_single_options",
                       sp_dtype_name(args->dtype));
    return SP_OK;
}

static sp_status check_tensors(const sp_delta_single_args *args, sp_error *error)
{
    const struct {
        const char *name, *stride_name;
        const void *tensor;
        int64_t stride, width;
        bool needed;
    } tensors[] = {
        {"x", "x_stride", args->x, args->x_stride, args->k_in, true},
        {"y", "y_stride", args->y, args->y_stride, args->n_out, true},
        {"a", "a_stride", args->a, args->a_stride, args->k_in, args->rank > 0},
        {"b", "b_stride", args->b, args->b_stride, args->rank, args->rank > 0},
    };

    for (size_t i = 0; i < sizeof tensors / sizeof *tensors; i++) {
        if (!tensors[i].needed)
            continue;
        if (tensors[i].tensor == NULL)
            return sp_fail(error, SP_ERR_ARGUMENT, NULL, tensors[i].name, -1, "%s is NULL",
                           tensors[i].name);
        if (tensors[i].stride < tensors[i].width)
            return sp_fail(error, SP_ERR_STRIDE, "bad-stride", tensors[i].stride_name, -1,
                           "%s is %lld, a row has %lld elements", tensors[i].stride_name,
                           (long long)tensors[i].stride, (long long)tensors[i].width);
    }
    if (!isfinite(args->scale))
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "scale", -1, "the scale is not finite");
    return SP_OK;
}

static sp_status read_args(const sp_delta_single *single, const sp_delta_single_args *from,
                           sp_delta_single_args *out, sp_error *error)
{
    sp_status status;

    if (single == NULL)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "single", -1, "single is NULL");
    *out = (sp_delta_single_args){.struct_bytes = sizeof *out};
    status = sp_struct_read(out, sizeof *out, from, "sp_delta_single_args", error);
    if (status == SP_OK)
        status = check_sizes(single, out, error);
    if (status == SP_OK)
        status = check_types(single, out, error);
    return status == SP_OK ? check_tensors(out, error) : status;
}

/* ---- applying ------------------------------------------------------------------------------ */

static void apply_on_cpu(const sp_delta_single *single, const sp_delta_single_args *args)
{
    const sp_lora_pair pair = {args->a,        args->b,    args->a_stride,
                               args->b_stride, args->rank, args->scale};
    sp_lora_job job = {
        .kernels = single->kernels,
        .exec = single->options.exec,
        .scratch = &single->scratch[args->dtype],
        .dtype = args->dtype,
        .x_type = args->x_type,
        .k_in = args->k_in,
        .rank_max = args->rank,
        .x = args->x,
        .x_stride = args->x_stride,
        .n_targets = 1,
        .targets[0] = {.y = args->y,
                       .y_stride = args->y_stride,
                       .y_type = args->y_type,
                       .n_out = args->n_out},
    };

    sp_lora_job_add(&job, &(sp_lora_rows){.n = args->rows}, &pair);
    sp_lora_job_finish(&job);
}

sp_status sp_delta_single_apply(sp_delta_single *single, const sp_delta_single_args *args,
                                sp_error *error)
{
    sp_delta_single_args own;
    sp_status status = read_args(single, args, &own, error);

    if (status != SP_OK || own.rows == 0 || own.rank == 0 || own.scale == 0.0f)
        return status;
    if (single->gpu != NULL)
        return sp_single_gpu_apply(single->gpu, &own, error);
    apply_on_cpu(single, &own);
    return SP_OK;
}
