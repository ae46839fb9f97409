/*
 * allocator.h: the host's functions in place of malloc, for everything that the library allocates
 * in host memory. (Memory of a device, pinned memory too, is given in sp_device_options.) What
 * other libraries that this one uses allocate for themselves (JSON, hashes, the C library) does
 * not come here.
 */
#ifndef SIDEPATH_ALLOCATOR_H
#define SIDEPATH_ALLOCATOR_H

#include <sidepath/status.h>

#ifdef __cplusplus
extern "C" {
#endif

/*
 * alloc gives `bytes` bytes on a boundary of `align_bytes` (a power of two, 16 or more), of any
 * content, or NULL where there are none: the call that needs them then fails with SP_ERR_MEMORY.
 * free takes them back, with the same two numbers. Called on any thread that calls the library,
 * also beside each other.
 */
typedef struct sp_host_allocator {
    size_t struct_bytes;
    void *user; /* borrowed until another allocator is set */
    void *(*alloc)(void *user, size_t bytes, size_t align_bytes);
    void (*free)(void *user, void *memory, size_t bytes, size_t align_bytes);
} sp_host_allocator;

/*
 * For the whole process, before the library has allocated anything or after all of it was given
 * back; allocator NULL: malloc again. The struct is copied. No other thread may be in the library.
 * SP_ERR_ARGUMENT: a function is missing. SP_ERR_STATE: the library holds memory now; the text
 * says how many blocks.
 */
SP_API sp_status sp_host_allocator_set(const sp_host_allocator *allocator, sp_error *error);

#ifdef __cplusplus
}
#endif
#endif
