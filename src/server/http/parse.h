/*
 * parse.h: the bytes of an HTTP/1.1 request, without I/O: the head whole, a chunked body as it
 * comes. What two parsers could read differently is refused, never repaired: lines end in CR LF,
 * names are tokens, values hold no control characters, a length is digits, there is one Host.
 */
#ifndef SP_SERVER_HTTP_PARSE_H
#define SP_SERVER_HTTP_PARSE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define SP_HTTP_HEADERS_MAX 100

/* Why a request is refused, all static. */
typedef struct sp_http_refusal {
    int status;       /* 400 .. 505 */
    const char *code; /* "malformed-request" */
    const char *why;
} sp_http_refusal;

typedef struct sp_http_header {
    const char *name, *value;
} sp_http_header;

/* Strings point into the bytes that were parsed. */
typedef struct sp_http_head {
    const char *method, *path; /* "" where it was refused before that; the path without the query */
    const char *query;         /* after the '?'; "" without one */
    int32_t minor;             /* of the version: 0, or 1 for all above */
    sp_http_header headers[SP_HTTP_HEADERS_MAX];
    int32_t n_headers;
    bool chunked;
    uint64_t length; /* Content-Length; 0 without */
    bool keep_alive; /* the client wants to keep the connection */
    bool expects_continue;
} sp_http_head;

typedef enum sp_http_parse {
    SP_HTTP_PARSE_MORE, /* bytes are missing */
    SP_HTTP_PARSE_DONE,
    SP_HTTP_PARSE_REFUSED
} sp_http_parse;

/*
 * Looks for the end of a head in data [bytes]. DONE: *out_head_bytes is its length with the empty
 * line. REFUSED: it is longer than bytes_max, with 414 where not even the request's line has ended,
 * else 431. `from` (in and out, 0 at first) is where the last call gave up.
 */
sp_http_parse sp_http_find_head(const char *data, size_t bytes, size_t bytes_max, size_t *from,
                                size_t *out_head_bytes, sp_http_refusal *out_refusal);

/* Reads a head of exactly [bytes], which it cuts into strings in place. DONE or REFUSED; then
 * *out_head holds what was read before. */
sp_http_parse sp_http_parse_head(char *data, size_t bytes, sp_http_head *out_head,
                                 sp_http_refusal *out_refusal);

/* NULL: there is none. Names are compared without case. */
const char *sp_http_head_value(const sp_http_head *head, const char *name);

/* Where in a chunked body the next byte belongs. All zero at the beginning. */
typedef struct sp_http_chunks {
    int32_t state;
    uint64_t left; /* of this chunk's data */
    int32_t n_digits;
    size_t line_bytes, trailer_bytes;
} sp_http_chunks;

/*
 * Takes the next of data [bytes]: *out_taken of them were used, and the *out_bytes at *out_data
 * among them, possibly none, are the body's. DONE: that was the last. MORE: call it again with the
 * rest, if there is one.
 */
sp_http_parse sp_http_parse_chunk(sp_http_chunks *chunks, const char *data, size_t bytes,
                                  size_t *out_taken, const char **out_data, size_t *out_bytes,
                                  sp_http_refusal *out_refusal);

#endif
