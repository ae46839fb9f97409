/*
 * keys.h: the keys that clients must show ("Authorization: Bearer KEY"). A file has one key per
 * line; empty lines and lines that start with '#' are ignored. Only digests are kept, and all of
 * them are compared in constant time.
 */
#ifndef SP_SERVER_API_KEYS_H
#define SP_SERVER_API_KEYS_H

#include <sidepath/status.h>

#include <stdbool.h>

typedef struct sp_keys sp_keys;

/* SP_ERR_INPUT: no key in the file. What sp_file_read_all returns. */
sp_status sp_keys_open(const char *path, sp_keys **out_keys, sp_error *error);
void sp_keys_close(sp_keys *keys); /* NULL is allowed */

/* Whether the value of an Authorization header (NULL: there is none) shows one of the keys. */
bool sp_keys_accept(const sp_keys *keys, const char *authorization);

#endif
