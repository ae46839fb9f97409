/*
 * device.h: where memory lives and who runs the work.
 *
 * sp_device hands out device memory and moves bytes; it knows nothing of numbers. sp_exec is the
 * host's gift of threads: the library starts none by itself. A host engine either makes the
 * built-in executor or passes its own thread pool as a function.
 *
 * The current CUDA device (context) of a thread is the same after every call as before it.
 *
 * After fork() the child may destroy executors and close devices that the parent made, which then
 * only frees the child's memory; sp_exec_run of the parent's executor runs on the calling thread
 * alone, and a GPU that the parent opened is refused with SP_ERR_NO_DEVICE.
 */
#ifndef SIDEPATH_DEVICE_H
#define SIDEPATH_DEVICE_H

#include <sidepath/status.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct sp_device sp_device;
typedef struct sp_exec sp_exec;

/* ---- executor ------------------------------------------------------------------------------ */

/*
 * One piece of a parallel job. `task` is in [0, n_tasks); `thread` in [0, sp_exec_threads) tells
 * which scratch to use. A task's result may depend on `task`, never on `thread`.
 */
typedef void (*sp_task_fn)(void *user, int32_t task, int32_t thread);

typedef struct sp_exec_options {
    size_t struct_bytes;
    int32_t threads; /* 0: as many as the process may run on (affinity and cgroup quota) */
    int32_t spin_us; /* how long an idle worker spins before it sleeps */
} sp_exec_options;

SP_API void sp_exec_options_default(sp_exec_options *out_options, size_t struct_bytes);

/*
 * Makes the built-in executor. The calling thread of sp_exec_run takes part as thread 0, so
 * threads = 1 starts no thread at all. *out_exec is owned by the caller (sp_exec_destroy).
 * SP_ERR_ARGUMENT: threads < 0 or > 1024, spin_us < 0, no options or place for the result.
 * SP_ERR_THREAD: a thread could not be started. SP_ERR_MEMORY.
 */
SP_API sp_status sp_exec_create(const sp_exec_options *options, sp_exec **out_exec,
                                sp_error *error);

/*
 * An executor on top of the host's own threads. `run` must call fn(fn_user, t, thread) once for
 * every t in [0, n_tasks) and return when all have returned; `thread` must be in [0, threads) and
 * no two tasks may run under one thread number at a time. Borrows `user` until sp_exec_destroy.
 * Kernels keep blocks on the stack: each thread needs 512 KiB of it. SP_ERR_ARGUMENT: threads < 1,
 * no run. SP_ERR_MEMORY.
 */
typedef void (*sp_exec_run_fn)(void *user, sp_task_fn fn, void *fn_user, int32_t n_tasks);
SP_API sp_status sp_exec_create_host(int32_t threads, sp_exec_run_fn run, void *user,
                                     sp_exec **out_exec, sp_error *error);

/* Stops and joins the workers, but not those of a parent process. NULL is allowed. Not while
 * sp_exec_run is in progress. */
SP_API void sp_exec_destroy(sp_exec *exec);

/* Number of threads, the calling one included; 1 for NULL, which is the caller alone. */
SP_API int32_t sp_exec_threads(const sp_exec *exec);

/*
 * Runs n_tasks tasks and returns when all are done. Tasks are handed out in ascending order; which
 * thread takes which is not specified. Called by one thread at a time; does not allocate; blocks.
 * NULL: the calling thread does them all, as thread 0.
 */
SP_API void sp_exec_run(sp_exec *exec, sp_task_fn fn, void *user, int32_t n_tasks);

/* ---- device -------------------------------------------------------------------------------- */

typedef enum sp_device_kind { SP_DEVICE_CPU = 0, SP_DEVICE_CUDA = 1 } sp_device_kind;

/*
 * The host's memory in place of the library's own. alloc gives `bytes` bytes on a 256-byte
 * boundary, of any content, or NULL where there are none; free takes them back, with the same
 * `bytes`. Called on any thread that calls the library, also beside each other, with whatever CUDA
 * device is current there; free may be called while work that was enqueued before the memory was
 * last used is still running, never while work that uses it is.
 */
typedef void *(*sp_device_alloc_fn)(void *user, size_t bytes);
typedef void (*sp_device_free_fn)(void *user, void *memory, size_t bytes);

typedef struct sp_device_options {
    size_t struct_bytes;
    const char *library; /* the path of the CUDA side, which is a shared object of its own; NULL:
                            libsidepath_cuda.so.0 beside the library that holds these functions,
                            then on the loader's path. Not used for "cpu" */
    /* For all that the library allocates on this device: memory of the device, and host memory that
     * it reaches at full speed. A pair or neither; NULL: the library's own. `user` is borrowed
     * until sp_device_close. */
    void *user;
    sp_device_alloc_fn alloc;
    sp_device_free_fn free;
    sp_device_alloc_fn alloc_pinned;
    sp_device_free_fn free_pinned;
} sp_device_options;

SP_API void sp_device_options_default(sp_device_options *out_options, size_t struct_bytes);

/*
 * "cpu" (the host's memory), "cuda" (GPU number 0) or "cuda:N". options NULL: the defaults.
 * *out_device is owned by the caller (sp_device_close).
 * SP_ERR_ARGUMENT: another name, half a pair of functions. SP_ERR_NO_DEVICE: the shared object
 * (`no-cuda-library`), the driver or the GPU is missing, too old or busy; the text says which.
 * SP_ERR_UNSUPPORTED with `missing-kernel`: the shared object is of another version or lacks an
 * entry; the text names it. SP_ERR_MEMORY.
 */
SP_API sp_status sp_device_open(const char *name, const sp_device_options *options,
                                sp_device **out_device, sp_error *error);

/* NULL is allowed. Waits for the work of all its streams, those of the host included, and frees
 * what was allocated through it and is left; all that borrows it must be gone. */
SP_API void sp_device_close(sp_device *device);

/* "cpu" or "cuda:0". Lives as long as the device. */
SP_API const char *sp_device_name(const sp_device *device);
SP_API sp_device_kind sp_device_get_kind(const sp_device *device);

/* The backend's own words for the last call that failed with SP_ERR_DEVICE, or "". */
SP_API const char *sp_device_error_text(const sp_device *device);

/* Bytes free now and in all. SP_ERR_UNSUPPORTED where the system does not say. */
SP_API sp_status sp_device_memory(const sp_device *device, size_t *out_free, size_t *out_total,
                                  sp_error *error);

/*
 * `bytes` bytes, zeroed, aligned to at least 256. Owned by the caller (sp_device_free, after the
 * work that uses them). SP_ERR_ARGUMENT: bytes = 0; the host's function gave memory that is not
 * aligned. SP_ERR_MEMORY: the text says how much was wanted.
 */
SP_API sp_status sp_device_alloc(sp_device *device, size_t bytes, void **out_memory,
                                 sp_error *error);
SP_API void sp_device_free(sp_device *device, void *memory); /* NULL is allowed */

/* Bytes now allocated by sp_device_alloc. A load and unload pair must bring it back. */
SP_API size_t sp_device_allocated_bytes(const sp_device *device);

/*
 * Host memory that the device reaches at full speed. Owned by the caller (sp_device_free_pinned).
 * sp_device_pin does the same to memory that the caller already has, until sp_device_unpin.
 */
SP_API sp_status sp_device_alloc_pinned(sp_device *device, size_t bytes, void **out_memory,
                                        sp_error *error);
SP_API void sp_device_free_pinned(sp_device *device, void *memory); /* NULL is allowed */
SP_API sp_status sp_device_pin(sp_device *device, void *memory, size_t bytes, sp_error *error);
SP_API void sp_device_unpin(sp_device *device, void *memory);

/*
 * Host to device and device to host; complete when the call returns. Ranges must not overlap. They
 * begin after the work that the main stream holds at the call, and run beside what it gets later;
 * they wait for no other stream.
 */
SP_API sp_status sp_device_write(sp_device *device, void *device_memory, const void *host_memory,
                                 size_t bytes, sp_error *error);
SP_API sp_status sp_device_read(sp_device *device, void *host_memory, const void *device_memory,
                                size_t bytes, sp_error *error);
SP_API sp_status sp_device_zero(sp_device *device, void *device_memory, size_t bytes,
                                sp_error *error);

/*
 * `height` pieces of `width` bytes, `device_stride` and `host_stride` bytes apart: one column of a
 * row-major table. On the main stream, between the steps before and after; complete on return.
 */
SP_API sp_status sp_device_write_column(sp_device *device, void *device_memory,
                                        size_t device_stride, const void *host_memory,
                                        size_t host_stride, size_t width, size_t height,
                                        sp_error *error);

/* ---- streams, events, graphs --------------------------------------------------------------- */

/*
 * A stream runs its work in order. Every device has a main stream, borrowed from it, on which the
 * steps run unless the host names another. On the CPU a stream does everything at once.
 * SP_ERR_ARGUMENT: an object or place that is missing. SP_ERR_DEVICE with the backend's words.
 * SP_ERR_MEMORY.
 *
 * Steps on several streams: a pool rewrites a slot, and switches its tables, in order with the
 * main stream and with every stream that was created or wrapped on its device: the rewrite begins
 * after all that these streams hold at that call, and what they get later sees the new tables. So a
 * slot is never written under a step that reads it, whichever of them the step was enqueued on.
 * Steps on a stream that the library does not know are the host's to order. Loading, unloading,
 * creating and wrapping are not possible while one of these streams is being captured.
 */
typedef struct sp_stream sp_stream;
typedef struct sp_event sp_event;
typedef struct sp_graph sp_graph;

SP_API sp_stream *sp_device_main_stream(sp_device *device);

/* *out_stream is owned by the caller (sp_stream_destroy, before the device is closed). */
SP_API sp_status sp_stream_create(sp_device *device, sp_stream **out_stream, sp_error *error);

/*
 * The host's own stream (a cudaStream_t of this GPU; NULL: the legacy default stream), for all
 * calls that take one. The stream stays the host's, and must live until sp_stream_destroy of
 * *out_stream, which leaves it as it is. On the CPU the handle must be NULL.
 */
SP_API sp_status sp_stream_wrap(sp_device *device, void *native, sp_stream **out_stream,
                                sp_error *error);

/* Not the main stream; NULL is allowed. Does not wait for its work. */
SP_API void sp_stream_destroy(sp_stream *stream);
SP_API sp_status sp_stream_wait(sp_stream *stream, sp_error *error);

/* The backend's handle (a cudaStream_t), for hosts that launch work of their own; NULL on the
 * CPU. */
SP_API void *sp_stream_native(const sp_stream *stream);

/* Between any two memories of host and device, in the stream's order; the host's should be pinned
 * and must stay until the copy is done. */
SP_API sp_status sp_stream_copy(sp_stream *stream, void *to, const void *from, size_t bytes,
                                sp_error *error);
SP_API sp_status sp_stream_zero(sp_stream *stream, void *to, size_t bytes, sp_error *error);

/* The same of `height` pieces of `width` bytes, whose begins are the strides apart.
 * SP_ERR_STRIDE: a stride smaller than the width. */
SP_API sp_status sp_stream_copy_column(sp_stream *stream, void *to, size_t to_stride,
                                       const void *from, size_t from_stride, size_t width,
                                       size_t height, sp_error *error);
SP_API sp_status sp_stream_wait_event(sp_stream *stream, const sp_event *event, sp_error *error);

SP_API sp_status sp_event_create(sp_device *device, sp_event **out_event, sp_error *error);
SP_API void sp_event_destroy(sp_event *event); /* NULL is allowed */
SP_API sp_status sp_event_record(sp_event *event, sp_stream *stream, sp_error *error);
/* SP_OK or SP_PENDING. */
SP_API sp_status sp_event_query(const sp_event *event, sp_error *error);
SP_API sp_status sp_event_wait(const sp_event *event, sp_error *error);
SP_API sp_status sp_event_seconds(const sp_event *from, const sp_event *to, double *out_seconds,
                                  sp_error *error);

/*
 * Between begin and end the stream's work is recorded, not run; launch runs all of it again.
 * SP_ERR_UNSUPPORTED on the CPU. A call that cannot be captured fails there and at the end. A host
 * may as well capture a wrapped stream with calls of its own.
 */
SP_API sp_status sp_graph_begin(sp_stream *stream, sp_error *error);
SP_API sp_status sp_graph_end(sp_stream *stream, sp_graph **out_graph, sp_error *error);
SP_API sp_status sp_graph_launch(sp_graph *graph, sp_stream *stream, sp_error *error);
SP_API void sp_graph_destroy(sp_graph *graph); /* NULL is allowed */

#ifdef __cplusplus
}
#endif
#endif
