/* single_cuda.c: the delta of one adapter on plain device pointers. All rows are of slot 0. */
#include "base/alloc.h"
#include "base/error.h"
#include "delta/delta_cuda.h"
#include "delta/single_check.h"
#include "device/device_cuda.h"
#include "kernels/cuda_choose.h"

#define K_IN_MAX (1 << 20)

struct sp_delta_solo {
    sp_device *device;
    int gpu;
    sp_cuda_kernels kernels;
    int32_t rows_max, k_in_max, rank_max;
    int32_t rank_stride; /* of every call, so that the planes fit whatever the rank */
    void *block;
    sp_cuda_scratch scratch;
};

static size_t planes_bytes(const sp_delta_solo *solo)
{
    size_t most = 0;

    for (int32_t rows = 1; rows <= solo->rows_max; rows++)
        for (int32_t chunk = 1; chunk <= sp_cuda_chunks(solo->k_in_max); chunk++) {
            size_t bytes =
                sp_cuda_planes_bytes(rows, 1, chunk * SP_CUDA_CHUNK_K, solo->rank_stride, 1);

            most = bytes > most ? bytes : most;
        }
    return most;
}

static sp_status check_create(sp_device *device, int32_t rows_max, int32_t k_in_max,
                              int32_t rank_max, sp_delta_solo **out_solo, sp_error *error)
{
    if (device == NULL || out_solo == NULL || rows_max < 1 || rows_max > SP_CUDA_ROWS_MAX ||
        k_in_max < 1 || k_in_max > K_IN_MAX || rank_max < 1 || rank_max > SP_CUDA_RANK_MAX)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, NULL, -1,
                       "%d rows of %d inputs at rank %d are out of range", (int)rows_max,
                       (int)k_in_max, (int)rank_max);
    if (sp_device_get_kind(device) != SP_DEVICE_CUDA)
        return sp_fail(error, SP_ERR_UNSUPPORTED, NULL, sp_device_name(device), -1,
                       "this form runs on a GPU; use sp_delta_apply_single");
    return SP_OK;
}

sp_status sp_delta_solo_create(sp_device *device, int32_t rows_max, int32_t k_in_max,
                               int32_t rank_max, sp_delta_solo **out_solo, sp_error *error)
{
    sp_status status = check_create(device, rows_max, k_in_max, rank_max, out_solo, error);
    sp_delta_solo *solo;
    size_t planes;

    if (status != SP_OK)
        return status;
    solo = sp_calloc(1, sizeof *solo);
    if (solo == NULL)
        return sp_fail_memory(error, sizeof *solo, "the delta");
    solo->device = device;
    solo->gpu = sp_device_cuda_index(device);
    solo->rows_max = rows_max;
    solo->k_in_max = k_in_max;
    solo->rank_max = rank_max;
    solo->rank_stride = (rank_max + 7) / 8 * 8;
    planes = planes_bytes(solo);
    status = sp_kernels_cuda_get(device, &solo->kernels, error);
    if (status == SP_OK)
        status = sp_device_alloc(device, sp_cuda_scratch_cut(NULL, rows_max, 1, planes).bytes,
                                 &solo->block, error);
    if (status != SP_OK) {
        sp_free(solo);
        return status;
    }
    solo->scratch = sp_cuda_scratch_cut(solo->block, rows_max, 1, planes);
    solo->scratch.plan.seq_slot_in = NULL; /* all rows in slot 0, with scale 1 */
    solo->scratch.plan.row_scale_in = NULL;
    *out_solo = solo;
    return SP_OK;
}

void sp_delta_solo_destroy(sp_delta_solo *solo)
{
    if (solo == NULL)
        return;
    (void)sp_stream_wait(sp_device_main_stream(solo->device), NULL);
    sp_device_free(solo->device, solo->block);
    sp_free(solo);
}

static sp_status check_call(const sp_delta_solo *solo, const sp_delta_single *args, sp_error *error)
{
    sp_status status = sp_delta_single_check(args, error);

    if (status != SP_OK)
        return status;
    if (solo == NULL || args->rows > solo->rows_max || args->k_in > solo->k_in_max ||
        args->rank > solo->rank_max)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, NULL, -1,
                       "%d rows of %d inputs at rank %d are more than was prepared for",
                       (int)args->rows, (int)args->k_in, (int)args->rank);
    if (args->dtype == SP_DTYPE_F32)
        return sp_fail(error, SP_ERR_UNSUPPORTED, "engine-unsupported", "f32", -1,
                       "the CUDA kernels take bf16 and f16, not f32");
    return SP_OK;
}

static sp_cuda_group to_group(const sp_delta_solo *solo, const sp_delta_single *args)
{
    sp_cuda_group group = {
        .type = (int32_t)args->dtype,
        .n_rows = args->rows,
        .n_slots = 1,
        .n_sites = 1,
        .k_in = args->k_in,
        .rank_stride = solo->rank_stride,
        .after_plan = 1,
        .x = args->x,
        .x_stride = args->x_stride,
        .plan = solo->scratch.plan,
        .planes = solo->scratch.planes,
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

sp_status sp_delta_solo_apply(sp_delta_solo *solo, const sp_delta_single *args, sp_stream *stream,
                              sp_error *error)
{
    sp_status status = check_call(solo, args, error);
    sp_cuda_group group;
    void *native;
    int code;

    if (status != SP_OK || args->rows == 0 || args->rank == 0 || args->scale == 0.0f)
        return status;
    native = sp_stream_native(stream != NULL ? stream : sp_device_main_stream(solo->device));
    group = to_group(solo, args);
    code = solo->kernels.plan_rows(solo->gpu, &group.plan, args->rows, 1, native);
    if (code == 0)
        code = solo->kernels.shrink(solo->gpu, &group, native);
    if (code == 0)
        code = solo->kernels.expand(solo->gpu, &group, native);
    status = sp_device_cuda_status(solo->device, code, "launching a delta");
    if (status != SP_OK)
        return sp_fail(error, status, NULL, sp_device_name(solo->device), -1, "%.400s",
                       sp_device_error_text(solo->device));
    return SP_OK;
}
