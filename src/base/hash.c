#include "base/hash.h"

#include <openssl/evp.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

sp_status sp_sha256_create(sp_sha256 **out_hash)
{
    EVP_MD_CTX *context = EVP_MD_CTX_new();

    if (!context)
        return SP_ERR_MEMORY;
    if (EVP_DigestInit_ex(context, EVP_sha256(), NULL) != 1) {
        EVP_MD_CTX_free(context);
        return SP_ERR_MEMORY;
    }
    *out_hash = context;
    return SP_OK;
}

void sp_sha256_update(sp_sha256 *hash, const void *data, size_t bytes)
{
    EVP_DigestUpdate(hash, data, bytes);
}

void sp_sha256_finish(sp_sha256 *hash, uint8_t out_digest[SP_SHA256_BYTES])
{
    EVP_DigestFinal_ex(hash, out_digest, NULL);
    EVP_MD_CTX_free(hash);
}

void sp_sha256_abandon(sp_sha256 *hash)
{
    EVP_MD_CTX_free(hash);
}

sp_status sp_sha256_of(const void *data, size_t bytes, uint8_t out_digest[SP_SHA256_BYTES])
{
    sp_sha256 *hash;
    sp_status status = sp_sha256_create(&hash);

    if (status != SP_OK)
        return status;
    sp_sha256_update(hash, data, bytes);
    sp_sha256_finish(hash, out_digest);
    return SP_OK;
}

#define HMAC_BLOCK_BYTES 64

/* One of the two hashes of an HMAC: of the key, each byte changed by `mask`, and two texts. */
static sp_status hash_with_key(const uint8_t key[HMAC_BLOCK_BYTES], uint8_t mask, const void *first,
                               size_t first_bytes, const void *second, size_t second_bytes,
                               uint8_t out_digest[SP_SHA256_BYTES])
{
    uint8_t block[HMAC_BLOCK_BYTES];
    sp_sha256 *hash;
    sp_status status = sp_sha256_create(&hash);

    if (status != SP_OK)
        return status;
    for (size_t i = 0; i < sizeof block; i++)
        block[i] = key[i] ^ mask;
    sp_sha256_update(hash, block, sizeof block);
    sp_sha256_update(hash, first, first_bytes);
    sp_sha256_update(hash, second, second_bytes);
    sp_sha256_finish(hash, out_digest);
    return SP_OK;
}

sp_status sp_hmac_sha256(const void *key, size_t key_bytes, const void *first, size_t first_bytes,
                         const void *second, size_t second_bytes, uint8_t out_tag[SP_SHA256_BYTES])
{
    uint8_t block[HMAC_BLOCK_BYTES] = {0};
    uint8_t inner[SP_SHA256_BYTES];
    sp_status status = SP_OK;

    if (key_bytes > sizeof block)
        status = sp_sha256_of(key, key_bytes, block);
    else if (key_bytes > 0)
        memcpy(block, key, key_bytes);
    if (status == SP_OK)
        status = hash_with_key(block, 0x36, first, first_bytes, second, second_bytes, inner);
    if (status == SP_OK)
        status = hash_with_key(block, 0x5c, inner, sizeof inner, NULL, 0, out_tag);
    return status;
}

uint64_t sp_xxh3(const void *data, size_t bytes)
{
    return XXH3_64bits(data, bytes);
}

void sp_hex(const uint8_t *data, size_t bytes, char *out_text)
{
    static const char digits[] = "0123456789abcdef";

    for (size_t i = 0; i < bytes; i++) {
        out_text[2 * i] = digits[data[i] >> 4];
        out_text[2 * i + 1] = digits[data[i] & 15];
    }
    out_text[2 * bytes] = '\0';
}
