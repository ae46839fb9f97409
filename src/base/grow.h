/*
 * grow.h: public structs that grow from release to release.
 *
 * Every public struct that a caller fills or receives begins with `size_t struct_bytes`, its size
 * as the caller was compiled. Within one minor version fields are only appended, so two sizes of
 * one struct share a prefix. These functions are the only ones that look at a caller's size: a
 * function that takes a struct first reads it into one of the current size and works on that; a
 * function that returns one fills the current size and writes as much as the caller's has room for.
 *
 * A caller's struct may be shorter than the current one (an older host: missing fields get their
 * defaults) or longer (a newer host: fields unknown to this library must be zero, because a
 * silently ignored setting is worse than a refusal). struct_bytes 0 means that it was not set. Any
 * thread, on distinct structs.
 */
#ifndef SP_BASE_GROW_H
#define SP_BASE_GROW_H

#include "base/private.h"

#include <sidepath/status.h>

/* Larger sizes are considered uninitialised memory. */
#define SP_STRUCT_BYTES_MAX ((size_t)65536)

/*
 * Copies the caller's struct over *out, which holds the defaults in the current size; out's own
 * struct_bytes stays out_bytes. `name` is the struct's ("sp_pool_options"), for errors.
 * SP_ERR_ARGUMENT: from is NULL, or its struct_bytes is below sizeof(size_t) or above
 * SP_STRUCT_BYTES_MAX. SP_ERR_UNSUPPORTED: a byte beyond the current size is not zero;
 * error->position is its offset. *out is unchanged on failure.
 */
SP_PRIVATE sp_status sp_struct_read(void *out, size_t out_bytes, const void *from, const char *name,
                                    sp_error *error);

/*
 * The same for element `index` of an array: elements are as far apart as the first one's
 * struct_bytes says, and each must say the same.
 */
SP_PRIVATE sp_status sp_struct_read_at(void *out, size_t out_bytes, const void *array, size_t index,
                                       const char *name, sp_error *error);

/*
 * Writes *from, of the current size, to the caller's struct: at most struct_bytes bytes, zeros
 * where it is longer than the current size; its struct_bytes is kept. SP_ERR_ARGUMENT as for
 * sp_struct_read; nothing is written then.
 */
SP_PRIVATE sp_status sp_struct_write(void *to, const void *from, size_t from_bytes,
                                     const char *name, sp_error *error);

/*
 * The common part of every sp_X_default(out, struct_bytes): copies the defaults, truncated or
 * extended with zeros to struct_bytes, and sets out's struct_bytes. Does nothing if out is NULL or
 * sp_struct_read would not accept struct_bytes: the call that gets the struct then refuses it.
 */
SP_PRIVATE void sp_struct_default(void *out, size_t struct_bytes, const void *defaults,
                                  size_t defaults_bytes);

#endif
