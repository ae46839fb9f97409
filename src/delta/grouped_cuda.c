/* grouped_cuda.c: the grouped LoRA GEMM on a GPU. Everything here is checks and one launcher. */
#include "base/alloc.h"
#include "base/error.h"
#include "delta/grouped_sizes.h"
#include "device/device_cuda.h"
#include "device/step_streams.h"
#include "kernels/cuda/kernels_cuda.h"

struct sp_grouped_lora {
    sp_device *device;
    int gpu;
    sp_cuda_kernels kernels;
    sp_cuda_grouped_report *report; /* device */
};

sp_status sp_grouped_lora_create(sp_device *device, sp_grouped_lora **out_grouped, sp_error *error)
{
    sp_grouped_lora *grouped;
    void *report = NULL;
    sp_status status;

    if (device == NULL || out_grouped == NULL)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, device == NULL ? "device" : "out_grouped", -1,
                       "%s is NULL", device == NULL ? "device" : "out_grouped");
    if (sp_device_get_kind(device) != SP_DEVICE_CUDA)
        return sp_fail(error, SP_ERR_UNSUPPORTED, NULL, sp_device_name(device), -1,
                       "this form of the grouped GEMM runs on a GPU; use sp_grouped_lora_gemm");
    grouped = sp_calloc(1, sizeof *grouped);
    if (grouped == NULL)
        return sp_fail_memory(error, sizeof *grouped, "the grouped GEMM");
    grouped->device = device;
    grouped->gpu = sp_device_cuda_index(device);
    status = sp_kernels_cuda_get(device, &grouped->kernels, error);
    if (status == SP_OK)
        status = sp_device_alloc(device, sizeof *grouped->report, &report, error);
    if (status != SP_OK) {
        sp_free(grouped);
        return status;
    }
    grouped->report = report;
    *out_grouped = grouped;
    return SP_OK;
}

void sp_grouped_lora_destroy(sp_grouped_lora *grouped)
{
    if (grouped == NULL)
        return;
    (void)sp_device_wait_all(grouped->device, NULL);
    sp_device_free(grouped->device, grouped->report);
    sp_free(grouped);
}

static sp_cuda_grouped to_kernel(const sp_grouped_lora_params *p)
{
    return (sp_cuda_grouped){
        .input = p->input,
        .lora_a = p->lora_a,
        .lora_b = p->lora_b,
        .output = p->output,
        .xa = p->workspace,
        .segment_offsets = p->segment_offsets,
        .segment_adapters = p->segment_adapters,
        .ranks = p->ranks,
        .scales = p->scales,
        .total_rows = p->total_rows,
        .input_size = p->input_size,
        .output_size = p->output_size,
        .rank_stride = sp_grouped_lora_rank_stride(p->max_rank),
        .max_rank = p->max_rank,
        .n_segments = p->n_segments,
        .n_adapters = p->n_adapters,
    };
}

static sp_status fail_device(const sp_grouped_lora *grouped, sp_status status, sp_error *error)
{
    return sp_fail(error, status, NULL, sp_device_name(grouped->device), -1, "%.400s",
                   sp_device_error_text(grouped->device));
}

static sp_status read_call(const sp_grouped_lora *grouped, const sp_grouped_lora_params *params,
                           sp_grouped_lora_params *out_params, sp_error *error)
{
    if (grouped == NULL)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "grouped", -1, "grouped is NULL");
    return sp_grouped_read_params(params, out_params, error);
}

sp_status sp_grouped_lora_launch(sp_grouped_lora *grouped, const sp_grouped_lora_params *params,
                                 sp_stream *stream, sp_error *error)
{
    sp_grouped_lora_params own;
    sp_status status = read_call(grouped, params, &own, error);
    sp_cuda_grouped g;

    if (status != SP_OK)
        return status;
    if (stream == NULL)
        stream = sp_device_main_stream(grouped->device);
    g = to_kernel(&own);
    status = sp_device_cuda_status(
        grouped->device, grouped->kernels.grouped_gemm(grouped->gpu, &g, sp_stream_native(stream)),
        "launching the grouped GEMM");
    return status == SP_OK ? SP_OK : fail_device(grouped, status, error);
}

/* The error text for what the device found; the values stay on the device. */
static sp_status fail_metadata(const sp_cuda_grouped_report *report, sp_error *error)
{
    static const struct {
        const char *subject, *text;
    } faults[] = {
        [SP_CUDA_GROUPED_OFFSETS] = {"segment_offsets",
                                     "offsets must begin at 0, rise strictly and end at the rows"},
        [SP_CUDA_GROUPED_ADAPTERS] = {"segment_adapters", "the adapter is none of them"},
        [SP_CUDA_GROUPED_RANKS] = {"ranks", "the rank is out of range"},
        [SP_CUDA_GROUPED_SCALES] = {"scales", "the scale is not finite"},
    };

    if (report->fault < SP_CUDA_GROUPED_OFFSETS || report->fault > SP_CUDA_GROUPED_SCALES)
        return SP_OK;
    return sp_fail(error, SP_ERR_INPUT, NULL, faults[report->fault].subject, report->index, "%s",
                   faults[report->fault].text);
}

sp_status sp_grouped_lora_check_device(sp_grouped_lora *grouped,
                                       const sp_grouped_lora_params *params, sp_stream *stream,
                                       sp_error *error)
{
    sp_grouped_lora_params own;
    sp_status status = read_call(grouped, params, &own, error);
    sp_cuda_grouped_report report;
    sp_cuda_grouped g;

    if (status != SP_OK)
        return status;
    if (stream == NULL)
        stream = sp_device_main_stream(grouped->device);
    g = to_kernel(&own);
    status = sp_device_cuda_status(
        grouped->device,
        grouped->kernels.grouped_check(grouped->gpu, &g, grouped->report, sp_stream_native(stream)),
        "checking the grouped GEMM's metadata");
    if (status != SP_OK)
        return fail_device(grouped, status, error);
    status = sp_stream_wait(stream, error);
    if (status == SP_OK)
        status = sp_device_read(grouped->device, &report, grouped->report, sizeof report, error);
    return status == SP_OK ? fail_metadata(&report, error) : status;
}
