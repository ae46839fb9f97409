/* single_cuda.c: the delta of one adapter on plain device pointers. All rows are of slot 0. */
#include "delta/single_cuda.h"

#include "base/alloc.h"
#include "base/error.h"
#include "delta/delta_cuda.h"
#include "device/device_cuda.h"
#include "device/step_streams.h"
#include "kernels/cuda/cuda_choose.h"

struct sp_single_gpu {
    sp_device *device;
    int number; /* of the GPU */
    sp_cuda_kernels kernels;
    int32_t rank_stride; /* the same for every call, so that the partials fit whatever the rank */
    void *block;
    sp_cuda_scratch scratch;
};

static size_t partials_bytes(const sp_delta_single_options *options, int32_t rank_stride)
{
    int32_t multiprocessors = sp_device_cuda_multiprocessors(options->device);
    size_t most = 0;

    for (int32_t rows = 1; rows <= options->rows_max; rows++)
        for (int32_t chunk = 1; chunk <= sp_cuda_chunks(options->k_in_max); chunk++) {
            size_t bytes = sp_cuda_partials_bytes(multiprocessors, rows, 1, chunk * SP_CUDA_CHUNK_K,
                                                  rank_stride, 1);

            most = bytes > most ? bytes : most;
        }
    return most;
}

sp_status sp_single_gpu_create(const sp_delta_single_options *options, sp_single_gpu **out_gpu,
                               sp_error *error)
{
    sp_single_gpu *gpu = sp_calloc(1, sizeof *gpu);
    sp_cuda_scratch_sizes sizes = {.rows_max = options->rows_max, .n_slots = 1};
    sp_status status;

    if (gpu == NULL)
        return sp_fail_memory(error, sizeof *gpu, "the delta");
    gpu->device = options->device;
    gpu->number = sp_device_cuda_index(options->device);
    gpu->rank_stride = (options->rank_max + 7) / 8 * 8;
    sizes.partials_bytes = partials_bytes(options, gpu->rank_stride);
    if (options->x_f32)
        sizes.rounded_bytes =
            (size_t)options->rows_max * (size_t)options->k_in_max * sizeof(uint16_t);
    status = sp_kernels_cuda_get(gpu->device, &gpu->kernels, error);
    if (status == SP_OK)
        status = sp_device_alloc(gpu->device, sp_cuda_scratch_cut(NULL, &sizes).bytes, &gpu->block,
                                 error);
    if (status != SP_OK) {
        sp_free(gpu);
        return status;
    }
    gpu->scratch = sp_cuda_scratch_cut(gpu->block, &sizes);
    gpu->scratch.plan.seq_slot_in = NULL; /* all rows in slot 0, with scale 1 */
    gpu->scratch.plan.row_scale_in = NULL;
    *out_gpu = gpu;
    return SP_OK;
}

void sp_single_gpu_destroy(sp_single_gpu *gpu)
{
    if (gpu == NULL)
        return;
    (void)sp_device_wait_all(gpu->device, NULL);
    sp_device_free(gpu->device, gpu->block);
    sp_free(gpu);
}

static sp_cuda_group to_group(const sp_single_gpu *gpu, const sp_delta_single_args *args)
{
    bool rounds = args->x_type != args->dtype;
    sp_cuda_group group = {
        .type = (int32_t)args->dtype,
        .n_rows = args->rows,
        .n_slots = 1,
        .n_sites = 1,
        .k_in = args->k_in,
        .rank_stride = gpu->rank_stride,
        .multiprocessors = sp_device_cuda_multiprocessors(gpu->device),
        .after_plan = 1,
        .x = rounds ? gpu->scratch.rounded : args->x,
        .x_stride = rounds ? args->k_in : args->x_stride,
        .plan = gpu->scratch.plan,
        .partials = gpu->scratch.partials,
    };

    group.sites[0] = (sp_cuda_site){
        .a = args->a,
        .b = args->b,
        .a_stride = args->a_stride,
        .b_stride = args->b_stride,
        .one_rank = args->rank,
        .one_scale = args->scale,
        .y = args->y,
        .y_stride = args->y_stride,
        .n_out = args->n_out,
        .y_is_f32 = args->y_type == SP_DTYPE_F32,
    };
    return group;
}

static int round_x(const sp_single_gpu *gpu, const sp_delta_single_args *args, void *native)
{
    const sp_cuda_round round = {
        .type = (int32_t)args->dtype,
        .n_rows = args->rows,
        .k = args->k_in,
        .x = args->x,
        .x_stride = args->x_stride,
        .to = gpu->scratch.rounded,
    };

    return gpu->kernels.round_rows(gpu->number, &round, native);
}

sp_status sp_single_gpu_apply(sp_single_gpu *gpu, const sp_delta_single_args *args, sp_error *error)
{
    sp_stream *stream = args->stream != NULL ? args->stream : sp_device_main_stream(gpu->device);
    void *native = sp_stream_native(stream);
    sp_cuda_group group = to_group(gpu, args);
    int code = gpu->kernels.plan_rows(gpu->number, &group.plan, args->rows, 1, native);
    sp_status status;

    if (code == 0 && args->x_type != args->dtype)
        code = round_x(gpu, args, native);
    if (code == 0)
        code = gpu->kernels.shrink(gpu->number, &group, native);
    if (code == 0)
        code = gpu->kernels.expand(gpu->number, &group, native);
    status = sp_device_cuda_status(gpu->device, code, "launching a delta");
    if (status != SP_OK)
        return sp_fail(error, status, NULL, sp_device_name(gpu->device), -1, "%.400s",
                       sp_device_error_text(gpu->device));
    return SP_OK;
}
