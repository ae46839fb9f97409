/*
 * from_tensors.c: an adapter from views of memory. A view is gathered into the dense order of a
 * file, a piece at a time, and is then treated like a file's bytes. A view on a GPU is first copied
 * to the host, as much memory as it spans.
 */
#include "adapter/intake_state.h"

#include "base/alloc.h"
#include "base/grow.h"

#include <stdlib.h>
#include <string.h>

#define PIECE_BYTES ((size_t)256 << 10)

/* A view with all defaults filled in. */
typedef struct source {
    sp_tensor_view view;
    const char *first; /* element (0, 0, …) */
    int64_t strides[SP_TENSOR_DIMS_MAX];
    uint64_t span_bytes; /* from the first element to the end of the last */
} source;

typedef struct copy_job {
    sp_intake *intake;
    const source *sources;
    sp_device *device;
} copy_job;

/* ---- checks ---------------------------------------------------------------------------------- */

static sp_status bad_view(const sp_tensor_view *view, const char *argument, const char *what,
                          sp_error *error)
{
    return sp_fail(error, SP_ERR_ARGUMENT, NULL, argument, -1, "the view of %.200s %s",
                   view->name ? view->name : "a tensor without a name", what);
}

static sp_status bad_stride(const sp_tensor_view *view, int32_t dim, int64_t stride,
                            const char *what, sp_error *error)
{
    return sp_fail(error, SP_ERR_STRIDE, "bad-stride", view->name, dim,
                   "the view of %.200s has the stride %lld in dimension %d: %s", view->name,
                   (long long)stride, (int)dim, what);
}

/* The number of a device named "cuda:N". */
static int32_t gpu_number(const sp_device *device)
{
    const char *colon = strchr(sp_device_name(device), ':');

    return colon ? (int32_t)strtol(colon + 1, NULL, 10) : 0;
}

static sp_status check_gpu(const sp_tensor_view *view, const sp_device *device, sp_error *error)
{
    if (!device || sp_device_get_kind(device) != SP_DEVICE_CUDA)
        return bad_view(view, "device_kind", "is on a GPU, and the options name none in views_on",
                        error);
    if (view->device_index == gpu_number(device))
        return SP_OK;
    return sp_fail(error, SP_ERR_ARGUMENT, NULL, "device_index", view->device_index,
                   "the view of %.200s is on GPU %d, and views_on is %s: copy it there, or open "
                   "that GPU",
                   view->name, (int)view->device_index, sp_device_name(device));
}

static sp_status check_device(const sp_tensor_view *view, const sp_device *device, sp_error *error)
{
    switch (view->device_kind) {
    case 0:
    case SP_VIEW_HOST:
    case SP_VIEW_CUDA_PINNED:
        return SP_OK;
    case SP_VIEW_CUDA:
    case SP_VIEW_CUDA_MANAGED:
        return check_gpu(view, device, error);
    default:
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "device_kind", view->device_kind,
                       "the view of %.200s is on a device of kind %d, which cannot be read",
                       view->name, (int)view->device_kind);
    }
}

/* Fills in dense strides if none are given, and computes the span. */
static sp_status resolve_strides(source *from, sp_error *error)
{
    const sp_tensor_view *view = &from->view;
    sp_dtype dtype = SP_DTYPE_F32;
    int64_t dense = 1, last = 0;

    for (int32_t i = view->n_dims - 1; i >= 0; i--) {
        int64_t stride = view->strides ? view->strides[i] : dense, reach;

        from->strides[i] = view->shape[i] > 1 ? stride : 0; /* else nothing is multiplied by it */
        if (stride < 0 || (stride == 0 && view->shape[i] > 1))
            return bad_stride(view, i, stride, "it must be above 0", error);
        if (view->shape[i] > 1 && (__builtin_mul_overflow(view->shape[i] - 1, stride, &reach) ||
                                   __builtin_add_overflow(last, reach, &last)))
            return bad_stride(view, i, stride, "it leads out of the address space", error);
        /* The audit measures a dense shape and reports its overflow. */
        if (view->shape[i] > 0 && __builtin_mul_overflow(dense, view->shape[i], &dense))
            dense = 1;
    }
    sp_tensor_type_dtype(view->type, &dtype);
    if (last > (int64_t)(INT64_MAX / 8) || view->byte_offset > (uint64_t)INT64_MAX / 2)
        return bad_stride(view, 0, from->strides[0], "it leads out of the address space", error);
    from->span_bytes = ((uint64_t)last + 1) * sp_dtype_bytes(dtype);
    return SP_OK;
}

static bool has_elements(const sp_tensor_view *view)
{
    for (int32_t i = 0; i < view->n_dims; i++) {
        if (view->shape[i] == 0)
            return false;
    }
    return true;
}

/* Checks what sp_intake_describe does not: it checks name, type and shape. */
static sp_status check_view(source *from, const sp_device *device, sp_error *error)
{
    const sp_tensor_view *view = &from->view;
    sp_status status;

    if (!view->name)
        return bad_view(view, "name", "has no name", error);
    if (view->n_dims < 0 || view->n_dims > SP_TENSOR_DIMS_MAX || !view->shape)
        return view->n_dims == 0 || view->shape
                   ? SP_OK
                   : bad_view(view, "shape", "has dimensions and no shape", error);
    if (!view->data && has_elements(view))
        return bad_view(view, "data", "has no memory", error);
    status = check_device(view, device, error);
    if (status == SP_OK)
        status = resolve_strides(from, error);
    if (status == SP_OK && view->data)
        from->first = (const char *)view->data + view->byte_offset;
    return status;
}

/* ---- copying --------------------------------------------------------------------------------- */

/* Copies elements of 2 or 4 bytes at any address, `stride` bytes apart, to a contiguous row. */
static void gather(char *to, const char *from, int64_t stride, int64_t n, size_t element_bytes)
{
    if (stride == (int64_t)element_bytes) {
        memcpy(to, from, (size_t)n * element_bytes);
        return;
    }
    if (element_bytes == 2) {
        for (int64_t i = 0; i < n; i++)
            memcpy(to + 2 * i, from + stride * i, 2);
        return;
    }
    for (int64_t i = 0; i < n; i++)
        memcpy(to + 4 * i, from + stride * i, 4);
}

/* n elements of a matrix from element `at` of its dense order on. */
static void copy_elements(const source *from, const char *first, int64_t at, int64_t n, char *to,
                          size_t element_bytes)
{
    int64_t cols = from->view.shape[1];

    while (n > 0) {
        int64_t row = at / cols, col = at % cols;
        int64_t count = cols - col < n ? cols - col : n;
        int64_t offset = row * from->strides[0] + col * from->strides[1];

        gather(to, first + offset * (int64_t)element_bytes,
               from->strides[1] * (int64_t)element_bytes, count, element_bytes);
        to += (size_t)count * element_bytes;
        at += count;
        n -= count;
    }
}

/* Takes a whole matrix whose memory is readable from the host. */
static sp_status take_matrix(sp_intake *intake, size_t wanted, const source *from,
                             const char *first, sp_error *error)
{
    size_t element_bytes = sp_dtype_bytes(intake->landings[wanted].item->dtype), room;
    int64_t at = 0;
    void *memory;
    sp_status status = sp_intake_next(intake, wanted, &memory, &room, error);

    while (status == SP_OK && room > 0) {
        size_t n = room < PIECE_BYTES ? room : PIECE_BYTES;

        copy_elements(from, first, at, (int64_t)(n / element_bytes), memory, element_bytes);
        at += (int64_t)(n / element_bytes);
        status = sp_intake_take(intake, wanted, n, error);
        if (status == SP_OK)
            status = sp_intake_next(intake, wanted, &memory, &room, error);
    }
    return status;
}

static bool is_on_device(const sp_tensor_view *view)
{
    return view->device_kind == SP_VIEW_CUDA || view->device_kind == SP_VIEW_CUDA_MANAGED;
}

/* sp_intake_fill_fn. Every wanted tensor has two dimensions: the audit saw to it. */
static sp_status copy_tensor(void *user, size_t wanted, sp_error *error)
{
    const copy_job *job = user;
    sp_wanted_tensor tensor = {.struct_bytes = sizeof tensor};
    const source *from;
    char *staged;
    sp_error local;
    sp_status status = sp_intake_wanted_at(job->intake, wanted, &tensor, error);

    if (status != SP_OK)
        return status;
    from = &job->sources[tensor.index];
    if (!is_on_device(&from->view))
        return take_matrix(job->intake, wanted, from, from->first, error);
    staged = sp_malloc((size_t)from->span_bytes);
    if (!staged)
        return sp_fail_memory(error, (size_t)from->span_bytes, "a view of device memory");
    status = sp_device_read(job->device, staged, from->first, (size_t)from->span_bytes, &local);
    if (status != SP_OK)
        sp_fail(error, status, NULL, from->view.name, -1,
                "the view of %.200s could not be copied: %s", from->view.name, local.text);
    else
        status = take_matrix(job->intake, wanted, from, staged, error);
    sp_free(staged);
    return status;
}

/* ---- all of it ------------------------------------------------------------------------------- */

/* sources and descs [n] of the caller's views. */
static sp_status read_views(const sp_tensor_view *views, size_t n, const sp_device *device,
                            source *sources, sp_tensor_desc *descs, sp_error *error)
{
    for (size_t i = 0; i < n; i++) {
        source *from = &sources[i];
        sp_status status;

        from->view.struct_bytes = sizeof from->view;
        status =
            sp_struct_read_at(&from->view, sizeof from->view, views, i, "sp_tensor_view", error);
        if (status == SP_OK)
            status = check_view(from, device, error);
        if (status != SP_OK)
            return status;
        descs[i] = (sp_tensor_desc){sizeof *descs, from->view.name, from->view.type,
                                    from->view.n_dims, from->view.shape};
    }
    return SP_OK;
}

/* Whether a view is on a GPU, whose memory only the calling thread copies. */
static bool any_on_device(const source *sources, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if (is_on_device(&sources[i].view))
            return true;
    }
    return false;
}

static sp_status open_views(const char *config, size_t config_bytes, const source *sources,
                            const sp_tensor_desc *descs, size_t n,
                            const sp_adapter_options *options, sp_adapter **out_adapter,
                            sp_error *error)
{
    copy_job job = {.sources = sources, .device = options->views_on};
    sp_exec *exec = any_on_device(sources, n) ? NULL : options->exec;
    sp_status status =
        sp_intake_create(config, config_bytes, descs, n, options, &job.intake, error);

    if (status != SP_OK)
        return status;
    status = sp_intake_run(exec, copy_tensor, &job, job.intake->n_landings, error);
    if (status == SP_OK)
        status = sp_intake_finish(job.intake, out_adapter, error);
    sp_intake_destroy(job.intake);
    return status;
}

sp_status sp_adapter_from_tensors(const char *config, size_t config_bytes,
                                  const sp_tensor_view *views, size_t n_views,
                                  const sp_adapter_options *options, sp_adapter **out_adapter,
                                  sp_error *error)
{
    sp_adapter_options own;
    source *sources;
    sp_tensor_desc *descs;
    sp_status status;

    if (!out_adapter || !config || (!views && n_views > 0))
        return sp_fail(error, SP_ERR_ARGUMENT, NULL,
                       !config        ? "config"
                       : !out_adapter ? "out_adapter"
                                      : "views",
                       -1, "it is NULL");
    if (n_views > INT32_MAX)
        return sp_fail(error, SP_ERR_TOO_LARGE, NULL, "n_views", -1,
                       "%zu views; no adapter has more than %d tensors", n_views, INT32_MAX);
    status = sp_adapter_options_read(options, &own, error);
    if (status != SP_OK)
        return status;
    sources = sp_calloc(n_views + 1,
                        sizeof *sources); /* at least one, since an empty block would be NULL */
    descs = sp_calloc(n_views + 1, sizeof *descs);
    if (sources && descs)
        status = read_views(views, n_views, own.views_on, sources, descs, error);
    else
        status = sp_fail_memory(error, n_views * sizeof *sources, "a list of views");
    if (status == SP_OK)
        status =
            open_views(config, config_bytes, sources, descs, n_views, &own, out_adapter, error);
    sp_free(sources);
    sp_free(descs);
    return status;
}
