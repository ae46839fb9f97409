/* single.c: the delta of one adapter on plain pointers, through the same job as the routed form. */
#include "base/alloc.h"
#include "base/error.h"
#include "delta/lora_job.h"
#include "delta/single_check.h"

#include <math.h>

#define SCRATCH_ALIGN 256

sp_status sp_delta_single_check(const sp_delta_single *args, sp_error *error)
{
    if (args == NULL || args->rows < 0 || args->rank < 0 || args->k_in < 1 || args->n_out < 1)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, NULL, -1, "a dimension is out of its range");
    if (sp_dtype_bytes(args->dtype) == 0 ||
        (args->y_type != args->dtype && args->y_type != SP_DTYPE_F32))
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "y_type", -1,
                       "y must be of x's type or f32, not %s for %s", sp_dtype_name(args->y_type),
                       sp_dtype_name(args->dtype));
    if (!isfinite(args->scale))
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "scale", -1, "the scale is not finite");
    if (args->x == NULL || args->y == NULL ||
        (args->rank > 0 && (args->a == NULL || args->b == NULL)))
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, NULL, -1, "a tensor is missing");
    if (args->x_stride < args->k_in || args->y_stride < args->n_out ||
        args->a_stride < args->k_in || args->b_stride < args->rank)
        return sp_fail(error, SP_ERR_STRIDE, "bad-stride", NULL, -1,
                       "a row stride is smaller than the row");
    return SP_OK;
}

sp_status sp_delta_apply_single(const sp_delta_single *args, sp_exec *exec, const char *cpu_isa,
                                sp_error *error)
{
    sp_lora_scratch scratch;
    sp_lora_pair pair;
    sp_lora_job job;
    size_t scratch_bytes;
    void *block;
    sp_status status = sp_delta_single_check(args, error);

    if (status == SP_OK && exec == NULL)
        status = sp_fail(error, SP_ERR_ARGUMENT, NULL, NULL, -1, "the executor is missing");
    job = (sp_lora_job){.exec = exec, .scratch = &scratch, .n_targets = 1};
    if (status == SP_OK)
        status = sp_kernels_get(cpu_isa, &job.kernels, error);
    if (status != SP_OK || args->rows == 0 || args->rank == 0 || args->scale == 0.0f)
        return status;
    scratch_bytes = sp_lora_scratch_bytes(args->dtype, args->k_in, args->rank, args->rows);
    block = sp_aligned_calloc(scratch_bytes, SCRATCH_ALIGN);
    if (block == NULL)
        return sp_fail_memory(error, scratch_bytes, "the delta's scratch");
    sp_lora_scratch_cut(block, args->dtype, args->k_in, args->rank, args->rows, &scratch);
    job.dtype = args->dtype;
    job.k_in = args->k_in;
    job.rank_max = args->rank;
    job.x = args->x;
    job.x_stride = args->x_stride;
    job.targets[0] = (sp_lora_target){args->y, args->y_stride, args->y_type, args->n_out};
    pair =
        (sp_lora_pair){args->a, args->b, args->a_stride, args->b_stride, args->rank, args->scale};
    sp_lora_job_add(&job, NULL, args->rows, NULL, &pair);
    sp_lora_job_finish(&job);
    sp_aligned_free(block);
    return SP_OK;
}
