/*
 * peer_key.c: the shared key: proofs when a connection begins, and the tags of its messages.
 */
#include "base/error.h"
#include "base/file.h"
#include "base/hash.h"
#include "peer/peer_wire.h"

#include "base/alloc.h"

#include <string.h>
#include <sys/stat.h>

/* What a key is used for is part of what is hashed, so one use is no answer for another. */
static const char *const labels[] = {
    [SP_PEER_SIDE_CLIENT] = "sidepath peer client 1",
    [SP_PEER_SIDE_SERVER] = "sidepath peer server 1",
};
static const char connection_label[] = "sidepath peer connection 1";

static sp_status take_line(const char *path, const char *text, size_t n_bytes, sp_peer_key *out_key,
                           sp_error *error)
{
    size_t n = 0;

    while (n < n_bytes && text[n] != '\n' && text[n] != '\r')
        n++;
    if (n < SP_PEER_KEY_BYTES_MIN || n > SP_PEER_KEY_BYTES_MAX)
        return sp_fail(error, SP_ERR_INPUT, "peer-key", path, -1,
                       "%s: a key is a line of %d to %d bytes, and this one has %zu",
                       sp_path_tail(path), SP_PEER_KEY_BYTES_MIN, SP_PEER_KEY_BYTES_MAX, n);
    memcpy(out_key->bytes, text, n);
    out_key->n_bytes = n;
    return SP_OK;
}

sp_status sp_peer_key_read(const char *path, sp_peer_key *out_key, sp_error *error)
{
    struct stat info;
    char *text;
    size_t n_bytes;
    sp_status status;

    if (stat(path, &info) == 0 && S_ISREG(info.st_mode) && (info.st_mode & 077) != 0)
        return sp_fail(error, SP_ERR_INPUT, "peer-key", path, -1,
                       "%s: others may read or change this key: chmod 600", sp_path_tail(path));
    status = sp_file_read_all(path, SP_PEER_KEY_BYTES_MAX + 2, &text, &n_bytes, error);
    if (status != SP_OK)
        return status;
    status = take_line(path, text, n_bytes, out_key, error);
    memset(text, 0, n_bytes);
    sp_free(text);
    return status;
}

static sp_status hash_nonces(const sp_peer_key *key, const char *label,
                             const uint8_t client_nonce[SP_PEER_NONCE_BYTES],
                             const uint8_t server_nonce[SP_PEER_NONCE_BYTES],
                             uint8_t out_tag[SP_SHA256_BYTES])
{
    uint8_t nonces[2 * SP_PEER_NONCE_BYTES];

    memcpy(nonces, client_nonce, SP_PEER_NONCE_BYTES);
    memcpy(nonces + SP_PEER_NONCE_BYTES, server_nonce, SP_PEER_NONCE_BYTES);
    return sp_hmac_sha256(key->bytes, key->n_bytes, label, strlen(label) + 1, nonces, sizeof nonces,
                          out_tag);
}

sp_status sp_peer_prove(const sp_peer_key *key, sp_peer_side side,
                        const uint8_t client_nonce[SP_PEER_NONCE_BYTES],
                        const uint8_t server_nonce[SP_PEER_NONCE_BYTES],
                        uint8_t out_proof[SP_PEER_PROOF_BYTES])
{
    return hash_nonces(key, labels[side], client_nonce, server_nonce, out_proof);
}

sp_status sp_peer_connection_key(const sp_peer_key *key,
                                 const uint8_t client_nonce[SP_PEER_NONCE_BYTES],
                                 const uint8_t server_nonce[SP_PEER_NONCE_BYTES],
                                 sp_peer_key *out_key)
{
    memset(out_key, 0, sizeof *out_key);
    if (key->n_bytes == 0)
        return SP_OK;
    out_key->n_bytes = SP_SHA256_BYTES;
    return hash_nonces(key, connection_label, client_nonce, server_nonce, out_key->bytes);
}

static sp_status make_tag(const sp_peer_key *key, const sp_peer_header *header, const void *body,
                          uint8_t out_tag[SP_PEER_TAG_BYTES])
{
    uint8_t bytes[SP_PEER_HEADER_BYTES];
    size_t n_body = header->kind == SP_PEER_DATA ? 0 : (size_t)header->body_bytes;

    memset(out_tag, 0, SP_PEER_TAG_BYTES);
    if (key->n_bytes == 0)
        return SP_OK;
    sp_peer_header_encode(header, bytes);
    return sp_hmac_sha256(key->bytes, key->n_bytes, bytes, sizeof bytes - SP_PEER_TAG_BYTES, body,
                          n_body, out_tag);
}

sp_status sp_peer_sign(const sp_peer_key *connection_key, sp_peer_header *header, const void *body)
{
    return make_tag(connection_key, header, body, header->tag);
}

bool sp_peer_is_signed(const sp_peer_key *connection_key, const sp_peer_header *header,
                       const void *body)
{
    uint8_t tag[SP_PEER_TAG_BYTES];

    return make_tag(connection_key, header, body, tag) == SP_OK &&
           sp_peer_equal(tag, header->tag, sizeof tag);
}

bool sp_peer_equal(const uint8_t *a, const uint8_t *b, size_t n_bytes)
{
    unsigned difference = 0;

    for (size_t i = 0; i < n_bytes; i++)
        difference |= (unsigned)(a[i] ^ b[i]);
    return difference == 0;
}
