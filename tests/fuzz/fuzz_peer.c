/*
 * What a peer or its client sends: any bytes are a header, a manifest or a listing, or are refused.
 * A header that was taken encodes to the bytes that it came from; a manifest that was taken has
 * tensors that follow each other, and encodes to a text that decodes to the same.
 *
 * The first byte says which: 0, a header; 1, a manifest; else a listing.
 */
#include "fuzz/target.h"

#include "base/alloc.h"
#include "peer/peer_wire.h"

#include <string.h>

static void check_failure(sp_status status, const sp_error *error)
{
    FUZZ_CHECK(status == SP_ERR_PEER_PROTOCOL || status == SP_ERR_TOO_LARGE ||
               status == SP_ERR_MEMORY);
    FUZZ_CHECK(error->status == status && error->text[0] != '\0');
    FUZZ_CHECK(status == SP_ERR_MEMORY || error->code[0] != '\0');
}

static void check_header(const uint8_t *data, size_t n)
{
    uint8_t again[SP_PEER_HEADER_BYTES];
    sp_peer_header header;
    sp_error error = {0};
    sp_status status = sp_peer_header_decode(data, n, "peer", &header, &error);

    if (status != SP_OK) {
        check_failure(status, &error);
        return;
    }
    FUZZ_CHECK(n == SP_PEER_HEADER_BYTES && header.body_bytes <= SP_PEER_MANIFEST_BYTES_MAX);
    FUZZ_CHECK(header.bytes <= SP_PEER_PIECE_BYTES_MAX);
    sp_peer_header_encode(&header, again);
    FUZZ_CHECK(memcmp(again, data, n) == 0);
}

static void check_tensors(const sp_peer_manifest *m)
{
    for (size_t i = 0; i < m->n_tensors; i++) {
        uint64_t elements = 1;

        FUZZ_CHECK(m->offsets[i] <= m->offsets[i + 1]);
        for (int32_t d = 0; d < m->tensors[i].n_dims; d++) {
            FUZZ_CHECK(m->tensors[i].shape[d] >= 0);
            elements *= (uint64_t)m->tensors[i].shape[d];
        }
        FUZZ_CHECK((elements == 0) == (m->offsets[i] == m->offsets[i + 1]));
    }
    FUZZ_CHECK(m->offsets[0] == 0 && m->offsets[m->n_tensors] == m->data_bytes);
    FUZZ_CHECK(m->config[m->config_bytes] == '\0');
}

static void check_manifest(const char *data, size_t n)
{
    sp_peer_manifest m, again;
    sp_text first = {0}, second = {0};
    sp_error error = {0};
    sp_status status = sp_peer_manifest_decode(data, n, &m, &error);

    if (status != SP_OK) {
        check_failure(status, &error);
        return;
    }
    check_tensors(&m);
    sp_peer_manifest_encode(&m, &first);
    if (!first.failed &&
        sp_peer_manifest_decode(first.data, first.bytes, &again, &error) == SP_OK) {
        sp_peer_manifest_encode(&again, &second);
        FUZZ_CHECK(second.failed ||
                   (first.bytes == second.bytes && strcmp(first.data, second.data) == 0));
        sp_peer_manifest_free(&again);
    } else {
        FUZZ_CHECK(first.failed || error.status == SP_ERR_MEMORY ||
                   first.bytes > SP_PEER_MANIFEST_BYTES_MAX);
    }
    sp_text_free(&first);
    sp_text_free(&second);
    sp_peer_manifest_free(&m);
}

static void check_listing(const char *data, size_t n)
{
    sp_peer_listing listing;
    sp_error error = {0};
    sp_status status = sp_peer_listing_decode(data, n, &listing, &error);

    if (status != SP_OK) {
        check_failure(status, &error);
        return;
    }
    for (size_t i = 1; i < listing.n_adapters; i++)
        FUZZ_CHECK(strcmp(listing.adapters[i - 1].name, listing.adapters[i].name) < 0);
    sp_peer_listing_free(&listing);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    char *copy;

    if (bytes == 0)
        return 0;
    copy = sp_malloc(bytes); /* of its own, so that a sanitizer sees its end */
    if (!copy)
        return 0;
    memcpy(copy, data + 1, bytes - 1);
    if (data[0] == 0)
        check_header((const uint8_t *)copy, bytes - 1);
    else if (data[0] == 1)
        check_manifest(copy, bytes - 1);
    else
        check_listing(copy, bytes - 1);
    sp_free(copy);
    return 0;
}
