/*
 * status.h: the one return type of Sidepath, and the record that explains a failure.
 *
 * Every fallible call returns sp_status. Zero is success; a positive value means "not yet, try
 * again, nothing is broken"; a negative value is a failure, in ranges by what is broken. Numbers
 * are stable: they are never reused or renumbered.
 *
 * Stability: stable.
 */
#ifndef SIDEPATH_STATUS_H
#define SIDEPATH_STATUS_H

#include <sidepath/version.h>

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/*
 * name, number, text.
 *   1 ..   99  not yet (retry later; nothing changed)
 *  -1 ..  -99  the call is wrong (a bug in the caller)
 * -100 .. -199  the input is wrong (a file, a request, a configuration)
 * -200 .. -299  a resource is missing (memory, slots, threads, the disk)
 * -300 .. -399  a peer is wrong
 * -400 .. -499  a device is wrong
 */
#define SP_STATUS_LIST(X)                                                     \
    X(SP_OK, 0, "ok")                                                         \
    X(SP_PENDING, 1, "started, not finished")                                 \
    X(SP_AGAIN, 2, "nothing to do now, ask again")                            \
    X(SP_BUSY, 3, "still in use, ends after this call")                       \
    X(SP_POOL_FULL, 4, "no adapter slot is free now")                         \
    X(SP_ERR_ARGUMENT, -1, "an argument is out of its range")                 \
    X(SP_ERR_STATE, -2, "the object is not in a state that allows this call") \
    X(SP_ERR_STRIDE, -3, "a stride is smaller than the row that it spans")    \
    X(SP_ERR_UNSUPPORTED, -4, "this build or device cannot do that")          \
    X(SP_ERR_INPUT, -100, "the input is not valid")                           \
    X(SP_ERR_NOT_FOUND, -101, "no such file, name or object")                 \
    X(SP_ERR_TRUNCATED, -102, "the input ends too early")                     \
    X(SP_ERR_REFUSED, -103, "the adapter is refused")                         \
    X(SP_ERR_MISMATCH, -104, "the input does not fit the base model")         \
    X(SP_ERR_TOO_LARGE, -105, "the input exceeds a limit")                    \
    X(SP_ERR_MEMORY, -200, "out of memory")                                   \
    X(SP_ERR_IO, -201, "reading or writing failed")                           \
    X(SP_ERR_SLOTS_PINNED, -202, "every adapter slot is pinned")              \
    X(SP_ERR_BUDGET, -203, "a configured memory budget is too small")         \
    X(SP_ERR_THREAD, -204, "a thread could not be started")                   \
    X(SP_ERR_PEER_UNREACHABLE, -300, "a peer cannot be reached")              \
    X(SP_ERR_PEER_TIMEOUT, -301, "a peer did not answer in time")             \
    X(SP_ERR_PEER_LOST, -302, "a peer went away while it was answering")      \
    X(SP_ERR_PEER_PROTOCOL, -303, "a peer broke the protocol")                \
    X(SP_ERR_PEER_REFUSED, -304, "a peer refuses to answer")                  \
    X(SP_ERR_PEER_CONTENT, -305, "a peer sent other bytes than it promised")  \
    X(SP_ERR_DEVICE, -400, "the device failed")                               \
    X(SP_ERR_NO_DEVICE, -401, "no usable device")

typedef enum sp_status {
#define SP_STATUS_ENUM(name, number, text) name = number,
    SP_STATUS_LIST(SP_STATUS_ENUM)
#undef SP_STATUS_ENUM
} sp_status;

/* Bytes of the buffers inside sp_error, the closing NUL included. */
#define SP_ERROR_TEXT_BYTES    512
#define SP_ERROR_SUBJECT_BYTES 256

/*
 * What went wrong, filled by the function that first knew it and passed on by the others. A caller
 * may pass NULL wherever an `sp_error *` is expected. The record owns nothing and needs no release;
 * it is written only on failure.
 */
typedef struct sp_error {
    sp_status status;
    const char *code; /* stable reason code such as "shape-mismatch", or "" (static storage) */
    char subject[SP_ERROR_SUBJECT_BYTES]; /* tensor, field, file or setting that it is about, or ""
                                           */
    int64_t position;                     /* byte or element index in the subject, -1 if none */
    char text[SP_ERROR_TEXT_BYTES];       /* one sentence for a person, with what to do next */
} sp_error;

/* The constant text of a status ("out of memory"); "unknown status" for a foreign number. */
SP_API const char *sp_status_text(sp_status status);

/* The enumerator's own name ("SP_ERR_MEMORY"), for logs and tests. */
SP_API const char *sp_status_name(sp_status status);

/* Element types of tensors, pools and activations. The numbers are stable. */
typedef enum sp_dtype { SP_DTYPE_F32 = 0, SP_DTYPE_BF16 = 1, SP_DTYPE_F16 = 2 } sp_dtype;

/* Bytes of one element (4 or 2); 0 for a foreign number. */
SP_API size_t sp_dtype_bytes(sp_dtype dtype);

/* "f32", "bf16" or "f16". */
SP_API const char *sp_dtype_name(sp_dtype dtype);

#ifdef __cplusplus
}
#endif
#endif
