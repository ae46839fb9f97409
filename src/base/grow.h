/*
 * grow.h: public structs that grow from release to release.
 *
 * Every public struct that a caller fills or receives begins with `size_t struct_bytes`, its size
 * as the caller was compiled. Fields are only ever appended within one minor version, so two sizes
 * of one struct share a prefix. These functions are the only ones that look at a caller's size: a
 * function that takes a struct reads it into one of today's size first and works on that; a
 * function that gives one fills today's and writes what the caller has room for.
 *
 * A caller's struct may be shorter than today's (an older host: what it lacks has its default) or
 * longer (a newer host: what this library does not know must be zero, because a setting that is
 * silently ignored is worse than a refusal). struct_bytes 0 means that nobody set it.
 */
#ifndef SP_BASE_GROW_H
#define SP_BASE_GROW_H

#include "base/private.h"

#include <sidepath/status.h>

/* Larger sizes are taken for uninitialised memory. */
#define SP_STRUCT_BYTES_MAX ((size_t)65536)

/*
 * Copies the caller's struct over *out, which holds the defaults in today's size; out's own
 * struct_bytes stays out_bytes. `name` is the struct's ("sp_pool_options"), for errors.
 * SP_ERR_ARGUMENT: from is NULL, or its struct_bytes is below sizeof(size_t) or above
 * SP_STRUCT_BYTES_MAX. SP_ERR_UNSUPPORTED: a byte beyond today's size is not zero;
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
 * Writes *from, of today's size, to the caller's struct: no more bytes than its struct_bytes says,
 * zeroes where it is longer than today's; struct_bytes itself stays the caller's.
 * SP_ERR_ARGUMENT as for sp_struct_read; nothing is written then.
 */
SP_PRIVATE sp_status sp_struct_write(void *to, const void *from, size_t from_bytes,
                                     const char *name, sp_error *error);

/*
 * What every sp_X_default(out, struct_bytes) does: the defaults, cut or extended with zeroes to
 * struct_bytes, which becomes the struct's own. Nothing happens where out is NULL or struct_bytes
 * is no size that sp_struct_read takes: the call that is given the struct refuses it then.
 */
SP_PRIVATE void sp_struct_default(void *out, size_t struct_bytes, const void *defaults,
                                  size_t defaults_bytes);

#endif
