/*
 * device_cuda.c: a GPU as a device, through the shared object that contains the CUDA code. The
 * object is opened at run time and stays open for the life of the process: an initialised CUDA
 * runtime cannot be unloaded safely.
 *
 * Two streams: the main one runs the steps and the table switches between them, the copy stream
 * copies images concurrently. A copy first waits for the work on the main stream, so that it cannot
 * overtake a step that still reads the slot.
 */
#include "device/device_cuda.h"

#include "base/alloc.h"
#include "base/error.h"
#include "device/device_ops.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#define OBJECT_NAME      "libsidepath_cuda.so.0"
#define MAJOR_MIN        8
#define PATH_BYTES       4096
#define CUDA_MEMORY      2
#define CUDA_NOT_STARTED 3
#define CUDA_NOT_DONE    600

typedef struct cuda_device {
    sp_device base;
    int gpu;
    int32_t multiprocessors;
    const sp_cuda_object_table *object;
    sp_cuda_device_entries call;
    void *copy_stream;
    void *main_tail; /* event: what copies wait for */
} cuda_device;

static cuda_device *cuda_of(const sp_device *device)
{
    return (cuda_device *)device;
}

/* ---- status -------------------------------------------------------------------------------- */

/* No driver, an old one, no GPU of that number, a busy one, or one that this build has no code
 * for. */
static bool means_no_device(int code)
{
    static const int codes[] = {3, 34, 35, 36, 46, 47, 100, 101, 209, 222, 223, 802, 803, 804};

    for (size_t i = 0; i < sizeof codes / sizeof codes[0]; i++)
        if (codes[i] == code)
            return true;
    return false;
}

static sp_status status_of(int code)
{
    if (code == 0)
        return SP_OK;
    if (code == CUDA_NOT_DONE)
        return SP_PENDING;
    if (code == CUDA_MEMORY)
        return SP_ERR_MEMORY;
    return means_no_device(code) ? SP_ERR_NO_DEVICE : SP_ERR_DEVICE;
}

sp_status sp_device_cuda_status(sp_device *device, int code, const char *what)
{
    cuda_device *cuda = cuda_of(device);
    sp_status status = status_of(code);
    char words[SP_ERROR_TEXT_BYTES];

    if (status == SP_OK || status == SP_PENDING)
        return status;
    cuda->call.error_text(code, words, sizeof words);
    (void)pthread_mutex_lock(&device->mutex);
    (void)snprintf(device->error_text, sizeof device->error_text, "%s: %.400s", what, words);
    (void)pthread_mutex_unlock(&device->mutex);
    return status;
}

/* A fork's child cannot use the GPU that its parent opened: CUDA would fail, or worse. */
#define CALL(device, what, name, ...)                                                          \
    sp_device_cuda_status(device,                                                              \
                          sp_device_is_parents(device)                                         \
                              ? CUDA_NOT_STARTED                                               \
                              : cuda_of(device)->call.name(cuda_of(device)->gpu, __VA_ARGS__), \
                          what)

/* ---- entries ------------------------------------------------------------------------------- */

static sp_cuda_fn find_entry(const sp_cuda_object_table *object, const char *name)
{
    for (int32_t i = 0; i < object->n_entries; i++)
        if (strcmp(object->entries[i].name, name) == 0)
            return object->entries[i].fn;
    return NULL;
}

sp_cuda_fn sp_device_cuda_find(const sp_device *device, const char *name)
{
    return device->ops->kind == SP_DEVICE_CUDA ? find_entry(cuda_of(device)->object, name) : NULL;
}

int sp_device_cuda_index(const sp_device *device)
{
    return cuda_of(device)->gpu;
}

int32_t sp_device_cuda_multiprocessors(const sp_device *device)
{
    return cuda_of(device)->multiprocessors;
}

static sp_status fail_entry(const char *name, sp_error *error)
{
    return sp_fail(error, SP_ERR_UNSUPPORTED, "missing-kernel", name, -1,
                   "the CUDA library lacks this entry; it belongs to another build");
}

static sp_status resolve(const sp_cuda_object_table *object, sp_cuda_device_entries *out_entries,
                         sp_error *error)
{
#define SP_CUDA_RESOLVE(name, arguments)                             \
    out_entries->name = (int(*) arguments)find_entry(object, #name); \
    if (!out_entries->name)                                          \
        return fail_entry(#name, error);
    SP_CUDA_DEVICE_LIST(SP_CUDA_RESOLVE)
#undef SP_CUDA_RESOLVE
    return SP_OK;
}

/* The folder of the library or program that this function is in, with the object's name. */
static const char *beside_us(char *path, size_t bytes)
{
    static const char here = 0;
    const char *slash;
    Dl_info info;

    if (dladdr(&here, &info) == 0 || !info.dli_fname)
        return NULL;
    slash = strrchr(info.dli_fname, '/');
    if (!slash || (size_t)(slash - info.dli_fname) + sizeof OBJECT_NAME + 1 > bytes)
        return NULL;
    (void)snprintf(path, bytes, "%.*s/%s", (int)(slash - info.dli_fname), info.dli_fname,
                   OBJECT_NAME);
    return path;
}

static sp_status open_object(const char *library, const sp_cuda_object_table **out_object,
                             sp_error *error)
{
    const sp_cuda_object_table *object;
    char path[PATH_BYTES];
    void *handle = NULL;

    if (library)
        handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    else if (beside_us(path, sizeof path))
        handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!handle && !library)
        handle = dlopen(OBJECT_NAME, RTLD_NOW | RTLD_LOCAL);
    if (!handle) {
        const char *words = dlerror();

        return sp_fail(error, SP_ERR_NO_DEVICE, "no-cuda-library", library ? library : OBJECT_NAME,
                       -1, "the CUDA library cannot be opened: %.300s", words ? words : "");
    }
    object = dlsym(handle, "sp_cuda_object");
    if (!object || object->version != SP_CUDA_VERSION)
        return sp_fail(error, SP_ERR_UNSUPPORTED, "missing-kernel", "sp_cuda_object", -1,
                       "the CUDA library is of another version");
    *out_object = object;
    return SP_OK;
}

/* ---- memory and copies --------------------------------------------------------------------- */

static sp_status cuda_memory(const sp_device *device, size_t *out_free, size_t *out_total)
{
    return CALL((sp_device *)device, "asking for free memory", memory, out_free, out_total);
}

static void cuda_free(sp_device *device, void *memory)
{
    (void)CALL(device, "freeing device memory", release, memory);
}

static sp_status fail_alloc(sp_device *device, sp_status status, size_t bytes, sp_error *error)
{
    return sp_fail(error, status, NULL, device->name, -1, "%.1f MiB on %s: %.380s",
                   (double)bytes / 0x1p20, device->name, device->error_text);
}

static sp_status cuda_zero(sp_device *device, void *to, size_t bytes);

static sp_status cuda_alloc(sp_device *device, size_t bytes, void **out_memory, sp_error *error)
{
    void *memory = NULL;
    sp_status status = CALL(device, "allocating device memory", alloc, &memory, bytes);

    if (status != SP_OK)
        return fail_alloc(device, status, bytes, error);
    status = cuda_zero(device, memory, bytes);
    if (status != SP_OK) {
        cuda_free(device, memory);
        return fail_alloc(device, status, bytes, error);
    }
    *out_memory = memory;
    return SP_OK;
}

static sp_status cuda_alloc_pinned(sp_device *device, size_t bytes, void **out_memory,
                                   sp_error *error)
{
    sp_status status = CALL(device, "allocating pinned memory", alloc_pinned, out_memory, bytes);

    return status == SP_OK ? SP_OK : fail_alloc(device, status, bytes, error);
}

static void cuda_free_pinned(sp_device *device, void *memory)
{
    (void)CALL(device, "freeing pinned memory", release_pinned, memory);
}

static sp_status cuda_pin(sp_device *device, void *memory, size_t bytes)
{
    return CALL(device, "pinning memory", pin, memory, bytes);
}

static void cuda_unpin(sp_device *device, void *memory)
{
    (void)CALL(device, "unpinning memory", unpin, memory);
}

/* Makes the copy stream wait for the work now on the main stream. */
static sp_status follow_main(sp_device *device)
{
    cuda_device *cuda = cuda_of(device);
    sp_status status = CALL(device, "marking the main stream", event_record, cuda->main_tail,
                            device->main_stream.handle);

    if (status != SP_OK)
        return status;
    return CALL(device, "ordering the copy stream", stream_wait_event, cuda->copy_stream,
                cuda->main_tail);
}

static sp_status wait_copy(sp_device *device)
{
    return CALL(device, "waiting for a copy", stream_wait, cuda_of(device)->copy_stream);
}

static sp_status cuda_write(sp_device *device, void *to, const void *from, size_t bytes)
{
    sp_status status = follow_main(device);

    if (status == SP_OK)
        status = CALL(device, "copying", copy, to, from, bytes, cuda_of(device)->copy_stream);
    return status == SP_OK ? wait_copy(device) : status;
}

static sp_status cuda_zero(sp_device *device, void *to, size_t bytes)
{
    sp_status status = follow_main(device);

    if (status == SP_OK)
        status = CALL(device, "zeroing", zero, to, bytes, cuda_of(device)->copy_stream);
    return status == SP_OK ? wait_copy(device) : status;
}

/* ---- streams, events, graphs --------------------------------------------------------------- */

static sp_status cuda_stream_create(sp_device *device, void **out_handle)
{
    return CALL(device, "creating a stream", stream_create, out_handle);
}

static void cuda_stream_destroy(sp_device *device, void *handle)
{
    (void)CALL(device, "destroying a stream", stream_destroy, handle);
}

static sp_status cuda_stream_wait(sp_device *device, void *handle)
{
    return CALL(device, "waiting for a stream", stream_wait, handle);
}

static sp_status cuda_stream_copy(sp_device *device, void *handle, void *to, const void *from,
                                  size_t bytes)
{
    return CALL(device, "copying on a stream", copy, to, from, bytes, handle);
}

static sp_status cuda_stream_zero(sp_device *device, void *handle, void *to, size_t bytes)
{
    return CALL(device, "zeroing on a stream", zero, to, bytes, handle);
}

static sp_status cuda_stream_copy_column(sp_device *device, void *handle, void *to,
                                         size_t to_stride, const void *from, size_t from_stride,
                                         size_t width, size_t height)
{
    return CALL(device, "copying a column", copy_column, to, to_stride, from, from_stride, width,
                height, handle);
}

static sp_status cuda_stream_wait_event(sp_device *device, void *stream, void *event)
{
    return CALL(device, "ordering streams", stream_wait_event, stream, event);
}

static sp_status cuda_event_create(sp_device *device, void **out_handle)
{
    return CALL(device, "creating an event", event_create, out_handle);
}

static void cuda_event_destroy(sp_device *device, void *handle)
{
    (void)CALL(device, "destroying an event", event_destroy, handle);
}

static sp_status cuda_event_record(sp_device *device, void *event, void *stream)
{
    return CALL(device, "recording an event", event_record, event, stream);
}

static sp_status cuda_event_query(sp_device *device, void *event)
{
    return CALL(device, "asking an event", event_query, event);
}

static sp_status cuda_event_wait(sp_device *device, void *event)
{
    return CALL(device, "waiting for an event", event_wait, event);
}

static sp_status cuda_event_seconds(sp_device *device, void *from, void *to, double *out_seconds)
{
    float ms = 0.0f;
    sp_status status = CALL(device, "timing events", event_elapsed, from, to, &ms);

    if (status == SP_OK)
        *out_seconds = (double)ms * 1e-3;
    return status;
}

static sp_status cuda_graph_begin(sp_device *device, void *stream)
{
    return CALL(device, "beginning a capture", graph_begin, stream);
}

static sp_status cuda_graph_end(sp_device *device, void *stream, void **out_graph)
{
    return CALL(device, "ending a capture", graph_end, stream, out_graph);
}

static sp_status cuda_graph_launch(sp_device *device, void *graph, void *stream)
{
    return CALL(device, "launching a graph", graph_launch, graph, stream);
}

static void cuda_graph_destroy(sp_device *device, void *graph)
{
    (void)CALL(device, "destroying a graph", graph_destroy, graph);
}

/* ---- life ---------------------------------------------------------------------------------- */

static void cuda_close(sp_device *device)
{
    cuda_device *cuda = cuda_of(device);

    if (device->main_stream.handle)
        (void)cuda_stream_wait(device, device->main_stream.handle);
    if (cuda->main_tail)
        cuda_event_destroy(device, cuda->main_tail);
    if (cuda->copy_stream)
        cuda_stream_destroy(device, cuda->copy_stream);
    if (device->main_stream.handle)
        cuda_stream_destroy(device, device->main_stream.handle);
    sp_device_release(device);
    sp_free(cuda);
}

static const sp_device_ops cuda_ops = {
    .kind = SP_DEVICE_CUDA,
    .close = cuda_close,
    .memory = cuda_memory,
    .alloc = cuda_alloc,
    .free = cuda_free,
    .alloc_pinned = cuda_alloc_pinned,
    .free_pinned = cuda_free_pinned,
    .pin = cuda_pin,
    .unpin = cuda_unpin,
    .write = cuda_write,
    .read = cuda_write, /* the direction is in the addresses */
    .zero = cuda_zero,
    .stream_create = cuda_stream_create,
    .stream_destroy = cuda_stream_destroy,
    .stream_wait = cuda_stream_wait,
    .stream_copy = cuda_stream_copy,
    .stream_zero = cuda_stream_zero,
    .stream_copy_column = cuda_stream_copy_column,
    .event_create = cuda_event_create,
    .event_destroy = cuda_event_destroy,
    .event_record = cuda_event_record,
    .event_query = cuda_event_query,
    .event_wait = cuda_event_wait,
    .event_seconds = cuda_event_seconds,
    .stream_wait_event = cuda_stream_wait_event,
    .graph_begin = cuda_graph_begin,
    .graph_end = cuda_graph_end,
    .graph_launch = cuda_graph_launch,
    .graph_destroy = cuda_graph_destroy,
};

static sp_status fail_no_device(sp_device *device, const char *what, int code, sp_error *error)
{
    sp_status status = sp_device_cuda_status(device, code, what);

    return sp_fail(error, status, NULL, device->name, -1, "no usable device: %.400s",
                   device->error_text);
}

/* Finds the GPU and its streams. */
static sp_status start_gpu(cuda_device *cuda, sp_error *error)
{
    sp_device *device = &cuda->base;
    int count = 0, major = 0, minor = 0, multiprocessors = 0;
    int code = cuda->call.device_count(&count);
    sp_status status;

    if (code != 0)
        return fail_no_device(device, "counting the GPUs", code, error);
    if (cuda->gpu >= count)
        return sp_fail(error, SP_ERR_NO_DEVICE, NULL, device->name, -1,
                       "no usable device: there are %d GPUs, the first is number 0", count);
    code = cuda->call.device_open(cuda->gpu, &major, &minor, &multiprocessors);
    cuda->multiprocessors = (int32_t)multiprocessors;
    if (code != 0)
        return fail_no_device(device, "opening the GPU", code, error);
    if (major < MAJOR_MIN)
        return sp_fail(error, SP_ERR_NO_DEVICE, NULL, device->name, -1,
                       "no usable device: the GPU is of compute capability %d.%d, the kernels "
                       "need %d.0",
                       major, minor, MAJOR_MIN);
    status = cuda_stream_create(device, &device->main_stream.handle);
    if (status == SP_OK)
        status = cuda_stream_create(device, &cuda->copy_stream);
    if (status == SP_OK)
        status = cuda_event_create(device, &cuda->main_tail);
    if (status != SP_OK)
        sp_fail(error, status, NULL, device->name, -1, "%.400s", device->error_text);
    return status;
}

sp_status sp_device_open_cuda(int32_t index, const sp_device_options *options,
                              sp_device **out_device, sp_error *error)
{
    const sp_cuda_object_table *object = NULL;
    char name[SP_DEVICE_NAME_BYTES];
    cuda_device *cuda;
    sp_status status;

    status = open_object(options->library, &object, error);
    if (status != SP_OK)
        return status;
    cuda = sp_calloc(1, sizeof *cuda);
    if (!cuda)
        return sp_fail_memory(error, sizeof *cuda, "a device");
    (void)snprintf(name, sizeof name, "cuda:%d", (int)index);
    sp_device_init(&cuda->base, &cuda_ops, name, options);
    cuda->gpu = (int)index;
    cuda->object = object;
    status = resolve(object, &cuda->call, error);
    if (status == SP_OK)
        status = start_gpu(cuda, error);
    if (status != SP_OK) {
        cuda_close(&cuda->base);
        return status;
    }
    *out_device = &cuda->base;
    return SP_OK;
}
