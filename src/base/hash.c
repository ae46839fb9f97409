#include "base/hash.h"

#include <openssl/evp.h>

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
