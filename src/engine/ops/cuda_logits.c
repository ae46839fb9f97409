/* cuda_logits.c: the logits of a window of rows, and copies of rows on the host. */
#include "base/assert.h"
#include "engine/ops/cuda_ops.h"

#include <string.h>

/* ---- logits -------------------------------------------------------------------------------- */

/* Applies the rows' adapters to their logits. */
static sp_status adapt(sp_cuda_ops *cuda, const int32_t *rows, int32_t n_rows)
{
    const sp_delta_head_call call = {
        .struct_bytes = sizeof call,
        .plan = cuda->head_plan,
        .x = cuda->window.x,
        .x_stride = cuda->hidden,
        .x_type = SP_DTYPE_BF16,
        .logits = cuda->window.logits,
        .logits_stride = cuda->vocab,
        .logits_type = SP_DTYPE_F32,
        .stream = cuda->stream,
    };
    sp_status status = sp_plan_select(cuda->head_plan, cuda->plan, rows, n_rows, NULL);

    if (status == SP_OK)
        status = sp_delta_upload(cuda->head_delta, cuda->head_plan, cuda->stream, NULL);
    if (status == SP_OK)
        status = sp_delta_start(cuda->head_delta, cuda->head_plan, cuda->stream, NULL);
    return status == SP_OK ? sp_delta_head(cuda->head_delta, &call, NULL) : status;
}

/* The hidden states of the rows, one after the other. */
static sp_status pick(sp_cuda_ops *cuda, sp_rows x, const int32_t *rows, int32_t n_rows)
{
    sp_cuda_window *window = &cuda->window;
    const sp_cuda_pick call = {
        .rows = n_rows,
        .width = cuda->hidden,
        .index = window->index,
        .x = cuda->rows[x],
        .x_stride = cuda->widths[x],
        .to = window->x,
    };
    size_t bytes = (size_t)n_rows * sizeof *rows;
    sp_status status = sp_event_wait(window->index_read, NULL);

    if (status != SP_OK)
        return status;
    memcpy(window->host_index, rows, bytes);
    status = sp_stream_copy(cuda->stream, window->index, window->host_index, bytes, NULL);
    if (status == SP_OK)
        status = sp_event_record(window->index_read, cuda->stream, NULL);
    if (status != SP_OK)
        return status;
    return sp_cuda_launched(cuda, cuda->kernels.pick_rows(cuda->gpu, &call, cuda->native),
                            "gathering hidden states");
}

sp_status sp_cuda_op_logits(sp_ops *ops, sp_rows x, const sp_weight *head, const int32_t *rows,
                            int32_t n_rows)
{
    sp_cuda_ops *cuda = (sp_cuda_ops *)ops;
    const sp_cuda_gemm gemm = {
        .rows = n_rows,
        .k = head->columns,
        .x = cuda->window.x,
        .x_stride = cuda->hidden,
        .n_outputs = 1,
        .outputs[0] = {.w = head->placed,
                       .y = cuda->window.logits,
                       .y_stride = cuda->vocab,
                       .n = head->rows,
                       .y_is_f32 = 1},
    };
    sp_status status;

    SP_ASSERT(n_rows > 0 && n_rows <= ops->window);
    SP_ASSERT(head->rows == cuda->vocab && head->columns == cuda->hidden);
    memset(cuda->window.fetched, 0, sizeof cuda->window.fetched);
    memset(cuda->samples.n_top, -1, sizeof cuda->samples.n_top);
    status = pick(cuda, x, rows, n_rows);
    if (status == SP_OK)
        status = sp_cuda_launched(
            cuda, cuda->kernels.base_gemm(cuda->gpu, cuda->gemm, &gemm, cuda->native), "the head");
    if (status != SP_OK || !cuda->adapted || !sp_delta_has_tokens(cuda->delta, SP_SITE_HEAD))
        return status;
    return adapt(cuda, rows, n_rows);
}

/* ---- rows on the host ---------------------------------------------------------------------- */

sp_status sp_cuda_fetch_logits(sp_cuda_ops *cuda, int32_t index)
{
    size_t offset = (size_t)index * (size_t)cuda->vocab;
    sp_status status = SP_OK;

    if (!cuda->window.fetched[index])
        status =
            sp_stream_copy(cuda->stream, cuda->window.host_logits + offset,
                           cuda->window.logits + offset, (size_t)cuda->vocab * sizeof(float), NULL);
    cuda->window.fetched[index] = status == SP_OK;
    return status;
}

/* After a failure of the device: a row that no rule takes for finite. */
static void poison(sp_cuda_ops *cuda, int32_t index)
{
    memset(cuda->window.host_logits + (size_t)index * (size_t)cuda->vocab, 0xff,
           (size_t)cuda->vocab * sizeof(float));
    cuda->window.fetched[index] = true;
}

const float *sp_cuda_op_read_logits(sp_ops *ops, int32_t index)
{
    sp_cuda_ops *cuda = (sp_cuda_ops *)ops;
    bool there = cuda->window.fetched[index];

    if (!there && (sp_cuda_fetch_logits(cuda, index) != SP_OK ||
                   sp_stream_wait(cuda->stream, NULL) != SP_OK)) {
        ops->status = SP_ERR_DEVICE;
        poison(cuda, index);
    }
    return cuda->window.host_logits + (size_t)index * (size_t)cuda->vocab;
}
