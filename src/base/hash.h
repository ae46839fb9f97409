/*
 * hash.h: SHA-256 (libcrypto) where collisions must be infeasible, XXH3 (libxxhash) against
 * accidents, FNV-1a for ids with prescribed values. Any thread, on distinct objects.
 */
#ifndef SP_BASE_HASH_H
#define SP_BASE_HASH_H

#include "base/private.h"

#include <sidepath/status.h>

#define SP_SHA256_BYTES 32

/* libcrypto's own context, opaque here. */
typedef struct evp_md_ctx_st sp_sha256;

sp_status sp_sha256_create(sp_sha256 **out_hash); /* SP_ERR_MEMORY */
void sp_sha256_update(sp_sha256 *hash, const void *data, size_t bytes);
void sp_sha256_finish(sp_sha256 *hash, uint8_t out_digest[SP_SHA256_BYTES]); /* also frees it */
void sp_sha256_abandon(sp_sha256 *hash);                                     /* NULL is allowed */

/* The digest of data in one call; SP_ERR_MEMORY. */
sp_status sp_sha256_of(const void *data, size_t bytes, uint8_t out_digest[SP_SHA256_BYTES]);

/* HMAC-SHA-256 (RFC 2104) of two texts, one after the other, under a key; bytes 0 are allowed.
 * SP_ERR_MEMORY. */
sp_status sp_hmac_sha256(const void *key, size_t key_bytes, const void *first, size_t first_bytes,
                         const void *second, size_t second_bytes, uint8_t out_tag[SP_SHA256_BYTES]);

/* XXH3 (64 bits) of data; bytes 0 is allowed. */
SP_PRIVATE uint64_t sp_xxh3(const void *data, size_t bytes);

/* Lower-case hex of `bytes` bytes and a NUL: out_text holds 2 * bytes + 1. */
void sp_hex(const uint8_t *data, size_t bytes, char *out_text);

#endif
