/*
 * A request of HTTP, its head and its body in chunks: any bytes give a head whose strings lie in
 * what was parsed, or a refusal; and how they are cut into pieces changes nothing.
 */
#include "fuzz/target.h"

#include "base/alloc.h"
#include "server/http/parse.h"

#include <string.h>

#define HEAD_BYTES_MAX 4096

typedef struct outcome {
    sp_http_parse parsed;
    int status;
    size_t used, body_bytes;
    uint64_t body_sum;
} outcome;

static outcome read_body(const char *data, size_t bytes, size_t piece)
{
    outcome made = {.parsed = SP_HTTP_PARSE_MORE};
    sp_http_chunks chunks = {0};
    sp_http_refusal refusal;

    while (made.parsed == SP_HTTP_PARSE_MORE && made.used < bytes) {
        size_t n = bytes - made.used < piece ? bytes - made.used : piece;
        size_t taken = 0, n_data = 0;
        const char *found = NULL;

        made.parsed =
            sp_http_parse_chunk(&chunks, data + made.used, n, &taken, &found, &n_data, &refusal);
        if (made.parsed == SP_HTTP_PARSE_REFUSED) {
            made.status = refusal.status;
            made.used = 0; /* where in the piece it was is not said */
            return made;
        }
        FUZZ_CHECK(taken > 0 && taken <= n && n_data <= taken);
        for (size_t i = 0; i < n_data; i++)
            made.body_sum = made.body_sum * 31 + (unsigned char)found[i];
        made.body_bytes += n_data;
        made.used += taken;
    }
    return made;
}

static outcome find_head(const char *data, size_t bytes, size_t piece, size_t *out_head_bytes)
{
    outcome made = {.parsed = SP_HTTP_PARSE_MORE};
    sp_http_refusal refusal;
    size_t from = 0, n = 0;

    *out_head_bytes = 0;
    while (made.parsed == SP_HTTP_PARSE_MORE && n < bytes) {
        n = bytes - n < piece ? bytes : n + piece;
        made.parsed = sp_http_find_head(data, n, HEAD_BYTES_MAX, &from, out_head_bytes, &refusal);
    }
    if (made.parsed == SP_HTTP_PARSE_REFUSED)
        made.status = refusal.status;
    return made;
}

static void check_string(const char *text, const char *data, size_t bytes)
{
    if (*text != '\0')
        FUZZ_CHECK(text > data && text + strlen(text) < data + bytes);
}

static void check_head(const char *head_data, size_t bytes)
{
    char *data = sp_malloc(bytes); /* of its own, so that a sanitizer sees its end */
    sp_http_refusal refusal = {0};
    sp_http_head head;
    sp_http_parse parsed;

    if (!data)
        return;
    memcpy(data, head_data, bytes);
    parsed = sp_http_parse_head(data, bytes, &head, &refusal);
    FUZZ_CHECK(parsed != SP_HTTP_PARSE_MORE);
    check_string(head.path, data, bytes);
    check_string(head.query, data, bytes);
    for (int32_t i = 0; i < head.n_headers; i++) {
        check_string(head.headers[i].name, data, bytes);
        check_string(head.headers[i].value, data, bytes);
    }
    if (parsed == SP_HTTP_PARSE_DONE) {
        FUZZ_CHECK(head.method[0] != '\0' && head.path[0] != '\0');
        FUZZ_CHECK(!head.chunked || head.length == 0);
    } else {
        FUZZ_CHECK(refusal.status >= 400 && refusal.code && refusal.why);
    }
    sp_free(data);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    const char *text = (const char *)data;
    size_t head_bytes, again;
    outcome whole = find_head(text, bytes, bytes + 1, &head_bytes);
    outcome pieces = find_head(text, bytes, 1, &again);
    outcome body;

    /* Bytes after the longest head that may be are seen at once, or not yet. */
    if (bytes <= HEAD_BYTES_MAX)
        FUZZ_CHECK(whole.parsed == pieces.parsed && whole.status == pieces.status);
    FUZZ_CHECK(head_bytes <= bytes && (whole.parsed != SP_HTTP_PARSE_DONE || head_bytes == again));
    if (whole.parsed != SP_HTTP_PARSE_DONE)
        return 0;
    check_head(text, head_bytes);
    body = read_body(text + head_bytes, bytes - head_bytes, bytes + 1);
    for (size_t piece = 1; piece < 8; piece++) {
        outcome other = read_body(text + head_bytes, bytes - head_bytes, piece);

        FUZZ_CHECK(other.parsed == body.parsed && other.status == body.status);
        FUZZ_CHECK(other.used == body.used);
        if (body.parsed != SP_HTTP_PARSE_REFUSED)
            FUZZ_CHECK(other.body_bytes == body.body_bytes && other.body_sum == body.body_sum);
    }
    return 0;
}
