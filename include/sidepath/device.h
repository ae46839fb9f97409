/*
 * device.h: where memory lives and who runs the work.
 *
 * sp_device hands out device memory and moves bytes; it knows nothing of numbers. sp_exec is the
 * host's gift of threads: the library starts none by itself. A host engine either makes the
 * built-in executor or passes its own thread pool as a table of functions.
 *
 * Stability: sp_exec stable; sp_device experimental until the CUDA device stands.
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

SP_API void sp_exec_options_default(sp_exec_options *out_options);

/*
 * Makes the built-in executor. The calling thread of sp_exec_run takes part as thread 0, so
 * threads = 1 starts no thread at all. *out_exec is owned by the caller (sp_exec_destroy).
 * SP_ERR_ARGUMENT: threads < 0 or > 1024. SP_ERR_THREAD: a thread could not be started.
 * SP_ERR_MEMORY.
 */
SP_API sp_status sp_exec_create(const sp_exec_options *options, sp_exec **out_exec);

/*
 * An executor on top of the host's own threads. `run` must call fn(fn_user, t, thread) once for
 * every t in [0, n_tasks) and return when all have returned; `thread` must be in [0, threads) and
 * no two tasks may run under one thread number at a time. Borrows `user` until sp_exec_destroy.
 */
typedef void (*sp_exec_run_fn)(void *user, sp_task_fn fn, void *fn_user, int32_t n_tasks);
SP_API sp_status sp_exec_create_host(int32_t threads, sp_exec_run_fn run, void *user,
                                     sp_exec **out_exec);

/* Stops and joins the workers. NULL is allowed. Not while sp_exec_run is in progress. */
SP_API void sp_exec_destroy(sp_exec *exec);

/* Number of threads, the calling one included; at least 1. */
SP_API int32_t sp_exec_threads(const sp_exec *exec);

/*
 * Runs n_tasks tasks and returns when all are done. Tasks are handed out in ascending order; which
 * thread takes which is not specified. Called by one thread at a time; does not allocate; blocks.
 */
SP_API void sp_exec_run(sp_exec *exec, sp_task_fn fn, void *user, int32_t n_tasks);

/* ---- device -------------------------------------------------------------------------------- */

/* The host's memory as a device. *out_device is owned by the caller (sp_device_close). */
SP_API sp_status sp_device_open_cpu(sp_device **out_device);
SP_API void sp_device_close(sp_device *device);

/* "cpu", later "cuda:0". Lives as long as the device. */
SP_API const char *sp_device_name(const sp_device *device);

/*
 * `bytes` bytes, zeroed, aligned to at least 256. Owned by the caller (sp_device_free).
 * SP_ERR_ARGUMENT: bytes = 0. SP_ERR_MEMORY: the text says how much was asked for.
 */
SP_API sp_status sp_device_alloc(sp_device *device, size_t bytes, void **out_memory,
                                 sp_error *error);
SP_API void sp_device_free(sp_device *device, void *memory);

/* Bytes now allocated through this device. A load and unload pair must bring it back. */
SP_API size_t sp_device_allocated_bytes(const sp_device *device);

/* Host to device and device to host; complete when the call returns. Ranges must not overlap. */
SP_API sp_status sp_device_write(sp_device *device, void *device_memory, const void *host_memory,
                                 size_t bytes);
SP_API sp_status sp_device_read(sp_device *device, void *host_memory, const void *device_memory,
                                size_t bytes);
SP_API sp_status sp_device_zero(sp_device *device, void *device_memory, size_t bytes);

#ifdef __cplusplus
}
#endif
#endif
