/*
 * device_cuda.h: the interface between the library and libsidepath_cuda.so. That object exports one
 * symbol, sp_cuda_object: a version and a list of named functions. Each room lists what it needs of
 * it here (device) or in kernels/kernels_cuda.h, with the same lines on both sides; the library
 * resolves every entry when it opens the object, so that a missing one is named.
 *
 * Entries return a cudaError_t as int (0 is success) and take the number of the GPU first.
 */
#ifndef SP_DEVICE_DEVICE_CUDA_H
#define SP_DEVICE_DEVICE_CUDA_H

#include "base/private.h"

#include <sidepath/device.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Incremented with every change of an entry's arguments, or of a struct that one takes. */
#define SP_CUDA_VERSION 5

typedef void (*sp_cuda_fn)(void);

typedef struct sp_cuda_entry {
    const char *name;
    sp_cuda_fn fn;
} sp_cuda_entry;

typedef struct sp_cuda_object_table {
    int32_t version;
    int32_t n_entries;
    const sp_cuda_entry *entries;
} sp_cuda_object_table;

/* name, arguments. All return int. */
#define SP_CUDA_DEVICE_LIST(X)                                                                 \
    X(device_count, (int *out_count))                                                          \
    X(device_open, (int gpu, int *out_major, int *out_minor, int *out_multiprocessors))        \
    X(memory, (int gpu, size_t *out_free, size_t *out_total))                                  \
    X(alloc, (int gpu, void **out_memory, size_t bytes))                                       \
    X(release, (int gpu, void *memory))                                                        \
    X(alloc_pinned, (int gpu, void **out_memory, size_t bytes))                                \
    X(release_pinned, (int gpu, void *memory))                                                 \
    X(pin, (int gpu, void *memory, size_t bytes))                                              \
    X(unpin, (int gpu, void *memory))                                                          \
    X(stream_create, (int gpu, void **out_stream))                                             \
    X(stream_destroy, (int gpu, void *stream))                                                 \
    X(stream_wait, (int gpu, void *stream))                                                    \
    X(stream_wait_event, (int gpu, void *stream, void *event))                                 \
    X(copy, (int gpu, void *to, const void *from, size_t bytes, void *stream))                 \
    X(copy_column, (int gpu, void *to, size_t to_stride, const void *from, size_t from_stride, \
                    size_t width, size_t height, void *stream))                                \
    X(zero, (int gpu, void *to, size_t bytes, void *stream))                                   \
    X(event_create, (int gpu, void **out_event))                                               \
    X(event_destroy, (int gpu, void *event))                                                   \
    X(event_record, (int gpu, void *event, void *stream))                                      \
    X(event_query, (int gpu, void *event))                                                     \
    X(event_wait, (int gpu, void *event))                                                      \
    X(event_elapsed, (int gpu, void *from, void *to, float *out_ms))                           \
    X(graph_begin, (int gpu, void *stream))                                                    \
    X(graph_end, (int gpu, void *stream, void **out_graph))                                    \
    X(graph_launch, (int gpu, void *graph, void *stream))                                      \
    X(graph_destroy, (int gpu, void *graph))                                                   \
    X(error_text, (int code, char *out_text, size_t bytes))

typedef struct sp_cuda_device_entries {
#define SP_CUDA_MEMBER(name, arguments) int(*name) arguments;
    SP_CUDA_DEVICE_LIST(SP_CUDA_MEMBER)
#undef SP_CUDA_MEMBER
} sp_cuda_device_entries;

/* One of the entries of the object that this CUDA device was opened from, or NULL. */
sp_cuda_fn sp_device_cuda_find(const sp_device *device, const char *name);

/* The number of the GPU, for calls of entries. */
SP_PRIVATE int sp_device_cuda_index(const sp_device *device);

/* How many multiprocessors the GPU has. */
int32_t sp_device_cuda_multiprocessors(const sp_device *device);

/* The status of a cudaError_t; keeps its text for sp_device_error_text. */
SP_PRIVATE sp_status sp_device_cuda_status(sp_device *device, int code, const char *what);

#ifdef __cplusplus
}
#endif
#endif
