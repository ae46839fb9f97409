/*
 * stop.h: stop strings in a text that arrives in parts. Tells how much of it may be shown: text
 * that could still become a stop string is held back, and nothing from a stop string on is ever
 * shown.
 *
 * The stop string that is complete first ends the text, at its own beginning; of several that are
 * complete at the same byte the longest. So the answer does not depend on how the text was cut into
 * parts. One watch belongs to one request, and is used by one thread at a time.
 */
#ifndef SP_ENGINE_SAMPLING_STOP_H
#define SP_ENGINE_SAMPLING_STOP_H

#include <sidepath/status.h>

#include <stdbool.h>
#include <stddef.h>

#define SP_STOP_STRINGS_MAX 64

typedef struct sp_stop sp_stop;

/*
 * Copies n strings of bytes[i] bytes each; with n = 0 no text ever matches. *out_stop is owned by
 * the caller. SP_ERR_INPUT: an empty string or more than SP_STOP_STRINGS_MAX. SP_ERR_MEMORY.
 */
sp_status sp_stop_create(const char *const *strings, const size_t *bytes, size_t n,
                         sp_stop **out_stop, sp_error *error);
void sp_stop_destroy(sp_stop *stop); /* NULL is allowed */

/*
 * Takes the next part of the text. True: a stop string is complete, and *out_shown is where it
 * begins; later parts have no effect. False: *out_shown bytes from the start of the text cannot be
 * part of a stop string any more. *out_shown never decreases; `bytes` may be 0. Where text and stop
 * strings are whole UTF-8 characters, it is a border between two. Time in proportion to bytes times
 * strings; does not allocate.
 */
bool sp_stop_push(sp_stop *stop, const char *part, size_t bytes, size_t *out_shown);

#endif
