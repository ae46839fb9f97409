/*
 * device_ops.h: the functions of a backend of sp_device. device.c lists the blocks, counts bytes
 * and checks arguments; a backend only allocates, copies and orders.
 */
#ifndef SP_DEVICE_DEVICE_OPS_H
#define SP_DEVICE_DEVICE_OPS_H

#include <sidepath/device.h>

#include <pthread.h>
#include <stdbool.h>

#define SP_DEVICE_NAME_BYTES  16
#define SP_DEVICE_ALIGN_BYTES 256 /* of every block */

typedef struct sp_device_block sp_device_block;

/* Streams, events and graphs are the backend's own handles; NULL on the CPU. */
typedef struct sp_device_ops {
    sp_device_kind kind;
    void (*close)(sp_device *device); /* frees what open created, the struct included */
    sp_status (*memory)(const sp_device *device, size_t *out_free, size_t *out_total);
    sp_status (*alloc)(sp_device *device, size_t bytes, void **out_memory, sp_error *error);
    void (*free)(sp_device *device, void *memory);
    sp_status (*alloc_pinned)(sp_device *device, size_t bytes, void **out_memory, sp_error *error);
    void (*free_pinned)(sp_device *device, void *memory);
    sp_status (*pin)(sp_device *device, void *memory, size_t bytes);
    void (*unpin)(sp_device *device, void *memory);
    sp_status (*write)(sp_device *device, void *to, const void *from, size_t bytes);
    sp_status (*read)(sp_device *device, void *to, const void *from, size_t bytes);
    sp_status (*zero)(sp_device *device, void *to, size_t bytes);
    sp_status (*stream_create)(sp_device *device, void **out_handle);
    void (*stream_destroy)(sp_device *device, void *handle);
    sp_status (*stream_wait)(sp_device *device, void *handle);
    sp_status (*stream_copy)(sp_device *device, void *handle, void *to, const void *from,
                             size_t bytes);
    sp_status (*stream_zero)(sp_device *device, void *handle, void *to, size_t bytes);
    sp_status (*stream_copy_column)(sp_device *device, void *handle, void *to, size_t to_stride,
                                    const void *from, size_t from_stride, size_t width,
                                    size_t height);
    sp_status (*event_create)(sp_device *device, void **out_handle);
    void (*event_destroy)(sp_device *device, void *handle);
    sp_status (*event_record)(sp_device *device, void *event, void *stream);
    sp_status (*event_query)(sp_device *device, void *event);
    sp_status (*event_wait)(sp_device *device, void *event);
    sp_status (*event_seconds)(sp_device *device, void *from, void *to, double *out_seconds);
    sp_status (*stream_wait_event)(sp_device *device, void *stream, void *event);
    sp_status (*graph_begin)(sp_device *device, void *stream);
    sp_status (*graph_end)(sp_device *device, void *stream, void **out_graph);
    sp_status (*graph_launch)(sp_device *device, void *graph, void *stream);
    void (*graph_destroy)(sp_device *device, void *graph);
} sp_device_ops;

struct sp_stream {
    sp_device *device;
    void *handle;
    bool borrowed;   /* the handle belongs to the host */
    sp_stream *next; /* of the streams on which steps may run */
};

struct sp_event {
    sp_device *device;
    void *handle;
};

struct sp_graph {
    sp_device *device;
    void *handle;
};

/* The first member of every backend's own struct. */
struct sp_device {
    const sp_device_ops *ops;
    char name[SP_DEVICE_NAME_BYTES];
    char error_text[SP_ERROR_TEXT_BYTES]; /* of the last failure; under the mutex */
    pthread_mutex_t mutex; /* loader threads allocate concurrently with the engine's */
    sp_device_block *blocks;
    size_t bytes;
    sp_stream main_stream;
    uint32_t epoch;            /* of the process that opened it */
    sp_device_options options; /* the host's functions; library is not kept */
    sp_stream *streams;        /* created or wrapped, without those of sp_stream_create_apart */
    void *order;               /* event; created with the first of them */
    pthread_mutex_t order_mutex;
};

/* Initialises the common part; the backend's struct must be zeroed. */
void sp_device_init(sp_device *device, const sp_device_ops *ops, const char *name,
                    const sp_device_options *options);
/* Frees all remaining blocks, and the mutexes. */
void sp_device_release(sp_device *device);

/* Whether this process is a child of the one that opened the device. */
bool sp_device_is_parents(const sp_device *device);

/* Locks the device's mutex. Does nothing in a fork's child: a thread of the parent may have held it
 * at the fork, and a child that closes the device has one thread. */
void sp_device_lock(sp_device *device);
/* The counterpart of sp_device_lock, with the same exception. */
void sp_device_unlock(sp_device *device);

/* Returns SP_ERR_ARGUMENT: the argument `name` is NULL. */
sp_status sp_device_missing(const char *name, sp_error *error);
/* Passes on what a backend returned; fills *error for a failure, with the backend's text or the
 * status's own. */
sp_status sp_device_told(const sp_device *device, sp_status status, sp_error *error);

/* The backends' parts of sp_device_open; the options are in the current size. */
sp_status sp_device_open_cpu(const sp_device_options *options, sp_device **out_device,
                             sp_error *error);
sp_status sp_device_open_cuda(int32_t index, const sp_device_options *options,
                              sp_device **out_device, sp_error *error);

#endif
