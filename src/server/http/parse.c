#include "server/http/parse.h"

#include <string.h>
#include <strings.h>

#define METHOD_BYTES_MAX     32
#define CHUNK_DIGITS_MAX     15 /* of a size: below 2^60 */
#define CHUNK_LINE_BYTES_MAX 256
#define TRAILER_BYTES_MAX    8192

/* ---- characters ---------------------------------------------------------------------------- */

static bool is_token_byte(char c)
{
    return (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') ||
           (c != '\0' && strchr("!#$%&'*+-.^_`|~", c) != NULL);
}

static bool is_token(const char *text)
{
    if (*text == '\0')
        return false;
    while (is_token_byte(*text))
        text++;
    return *text == '\0';
}

static bool is_control(char c)
{
    return ((unsigned char)c < 0x20 && c != '\t') || c == 0x7f;
}

static bool has_control(const char *text)
{
    while (*text && !is_control(*text))
        text++;
    return *text != '\0';
}

static sp_http_parse refuse(sp_http_refusal *out, int status, const char *code, const char *why)
{
    *out = (sp_http_refusal){status, code, why};
    return SP_HTTP_PARSE_REFUSED;
}

static sp_http_parse malformed(sp_http_refusal *out, const char *why)
{
    return refuse(out, 400, "malformed-request", why);
}

/* ---- the end of a head ---------------------------------------------------------------------- */

sp_http_parse sp_http_find_head(const char *data, size_t bytes, size_t bytes_max, size_t *from,
                                size_t *out_head_bytes, sp_http_refusal *out_refusal)
{
    size_t begin = *from > 3 ? *from - 3 : 0;
    const char *end = bytes > begin ? memmem(data + begin, bytes - begin, "\r\n\r\n", 4) : NULL;

    *from = bytes;
    if (end && (size_t)(end - data) + 4 <= bytes_max) {
        *out_head_bytes = (size_t)(end - data) + 4;
        return SP_HTTP_PARSE_DONE;
    }
    if (!end && bytes < bytes_max)
        return SP_HTTP_PARSE_MORE;
    if (memchr(data, '\n', bytes < bytes_max ? bytes : bytes_max) == NULL)
        return refuse(out_refusal, 414, "uri-too-long",
                      "the request's line is longer than the server takes (--header-bytes-max)");
    return refuse(out_refusal, 431, "headers-too-large",
                  "the headers are larger than the server takes (--header-bytes-max)");
}

/* ---- the request's line ---------------------------------------------------------------------- */

/* "http://host/path?query" is "/path" and "query" too. */
static sp_http_parse read_target(char *target, sp_http_head *head, sp_http_refusal *out_refusal)
{
    if (strncasecmp(target, "http://", 7) == 0 || strncasecmp(target, "https://", 8) == 0) {
        char *slash = strchr(strstr(target, "//") + 2, '/');

        if (!slash)
            return malformed(out_refusal, "the request's target has no path");
        target = slash;
    }
    if (*target != '/' && strcmp(target, "*") != 0)
        return malformed(out_refusal, "the request's target is no path");
    head->path = target;
    target += strcspn(target, "?");
    head->query = *target ? target + 1 : target;
    *target = '\0';
    return SP_HTTP_PARSE_DONE;
}

static sp_http_parse read_version(const char *version, sp_http_head *head,
                                  sp_http_refusal *out_refusal)
{
    bool formed = strncmp(version, "HTTP/", 5) == 0 && version[5] >= '0' && version[5] <= '9' &&
                  version[6] == '.' && version[7] >= '0' && version[7] <= '9' && version[8] == '\0';

    if (!formed)
        return malformed(out_refusal, "the request's line is not METHOD TARGET HTTP/1.1");
    if (version[5] != '1')
        return refuse(out_refusal, 505, "http-version", "the server speaks HTTP/1.1");
    head->minor = version[7] > '0';
    head->keep_alive = head->minor > 0;
    return SP_HTTP_PARSE_DONE;
}

static sp_http_parse read_request_line(char *line, sp_http_head *head, sp_http_refusal *out_refusal)
{
    char *target = strchr(line, ' ');
    char *version = target ? strchr(target + 1, ' ') : NULL;
    sp_http_parse parsed;

    if (!version || has_control(line) || strchr(line, '\t'))
        return malformed(out_refusal, "the request's line is not METHOD TARGET HTTP/1.1");
    *target++ = '\0';
    *version++ = '\0';
    if (!is_token(line) || strlen(line) > METHOD_BYTES_MAX)
        return malformed(out_refusal, "the request's method is no token");
    head->method = line;
    parsed = read_target(target, head, out_refusal);
    return parsed == SP_HTTP_PARSE_DONE ? read_version(version, head, out_refusal) : parsed;
}

/* ---- headers ------------------------------------------------------------------------------- */

/* What the headers say together; a sum of them is judged at the end. */
typedef struct framing {
    int32_t n_lengths, n_encodings, n_hosts;
    bool bad_length, bad_encoding, huge, bad_expectation;
} framing;

/* Digits only: a sign, a list or a blank inside is another reading waiting to happen. */
static void read_length(const char *value, sp_http_head *head, framing *seen)
{
    seen->n_lengths++;
    seen->bad_length |= *value == '\0';
    for (; *value; value++) {
        seen->bad_length |= *value < '0' || *value > '9';
        seen->huge |= head->length > UINT64_MAX / 10 - 1;
        if (!seen->huge && !seen->bad_length)
            head->length = head->length * 10 + (uint64_t)(*value - '0');
    }
}

/* Whether a list with commas holds the word. */
static bool lists(const char *value, const char *word)
{
    size_t bytes = strlen(word);

    while (*value) {
        size_t blank = strspn(value, " \t,"), n = strcspn(value + blank, " \t,");

        value += blank;
        if (n == bytes && strncasecmp(value, word, bytes) == 0)
            return true;
        value += n;
    }
    return false;
}

static void note_header(const char *name, const char *value, sp_http_head *head, framing *seen)
{
    if (strcasecmp(name, "Content-Length") == 0) {
        read_length(value, head, seen);
    } else if (strcasecmp(name, "Transfer-Encoding") == 0) {
        seen->n_encodings++;
        head->chunked = strcasecmp(value, "chunked") == 0;
        seen->bad_encoding |= !head->chunked || head->minor == 0;
    } else if (strcasecmp(name, "Host") == 0) {
        seen->n_hosts++;
    } else if (strcasecmp(name, "Connection") == 0) {
        head->keep_alive =
            (head->keep_alive || lists(value, "keep-alive")) && !lists(value, "close");
    } else if (strcasecmp(name, "Expect") == 0 && head->minor > 0) {
        head->expects_continue = strcasecmp(value, "100-continue") == 0;
        seen->bad_expectation |= !head->expects_continue;
    }
}

static sp_http_parse read_header(char *line, sp_http_head *head, framing *seen,
                                 sp_http_refusal *out_refusal)
{
    char *colon = strchr(line, ':');
    char *value, *end;

    if (has_control(line))
        return malformed(out_refusal, "a header holds a control character");
    if (colon)
        *colon = '\0';
    if (!colon || !is_token(line))
        return malformed(out_refusal, "the name of a header is no token");
    if (head->n_headers == SP_HTTP_HEADERS_MAX)
        return refuse(out_refusal, 431, "headers-too-large", "there are more than 100 headers");
    value = colon + 1 + strspn(colon + 1, " \t");
    end = value + strlen(value);
    while (end > value && (end[-1] == ' ' || end[-1] == '\t'))
        *--end = '\0';
    head->headers[head->n_headers++] = (sp_http_header){line, value};
    note_header(line, value, head, seen);
    return SP_HTTP_PARSE_DONE;
}

static sp_http_parse judge(const sp_http_head *head, const framing *seen,
                           sp_http_refusal *out_refusal)
{
    if (seen->n_hosts > 1)
        return malformed(out_refusal, "more than one Host header");
    if (seen->n_hosts == 0 && head->minor > 0)
        return malformed(out_refusal, "the Host header is missing");
    if (seen->n_lengths > 1 || seen->bad_length)
        return malformed(out_refusal, "Content-Length is not one whole number");
    if (seen->n_encodings > 1 || seen->bad_encoding)
        return malformed(out_refusal, "a Transfer-Encoding other than chunked");
    if (seen->n_encodings == 1 && seen->n_lengths > 0)
        return malformed(out_refusal, "both Content-Length and Transfer-Encoding");
    if (seen->huge)
        return refuse(out_refusal, 413, "body-too-large",
                      "the body is larger than the server takes (--body-bytes-max)");
    if (seen->bad_expectation)
        return refuse(out_refusal, 417, "expectation-failed",
                      "an Expect header other than 100-continue");
    return SP_HTTP_PARSE_DONE;
}

/* Cuts the next line off; NULL: it does not end in CR LF, or holds a NUL, CR or LF of its own. */
static char *next_line(char **cursor, const char *end)
{
    char *line = *cursor;
    char *feed = memchr(line, '\n', (size_t)(end - line));

    if (!feed || feed == line || feed[-1] != '\r')
        return NULL;
    *cursor = feed + 1;
    feed[-1] = '\0';
    return strlen(line) == (size_t)(feed - 1 - line) && !strchr(line, '\r') ? line : NULL;
}

sp_http_parse sp_http_parse_head(char *data, size_t bytes, sp_http_head *out_head,
                                 sp_http_refusal *out_refusal)
{
    const char *end = data + bytes;
    sp_http_parse parsed = SP_HTTP_PARSE_DONE;
    framing seen = {0};
    bool first = true;
    char *line;

    *out_head = (sp_http_head){.method = "", .path = "", .query = ""};
    while (parsed == SP_HTTP_PARSE_DONE) {
        line = next_line(&data, end);
        if (!line)
            return malformed(out_refusal, "a line of the head does not end as it should");
        if (*line == '\0' && !first)
            return judge(out_head, &seen, out_refusal);
        parsed = first ? read_request_line(line, out_head, out_refusal)
                       : read_header(line, out_head, &seen, out_refusal);
        first = false;
    }
    return parsed;
}

const char *sp_http_head_value(const sp_http_head *head, const char *name)
{
    for (int32_t i = 0; i < head->n_headers; i++)
        if (strcasecmp(head->headers[i].name, name) == 0)
            return head->headers[i].value;
    return NULL;
}

/* ---- chunked bodies ------------------------------------------------------------------------ */

enum {
    CHUNK_SIZE,
    CHUNK_EXTENSION,
    CHUNK_SIZE_END,
    CHUNK_DATA,
    CHUNK_DATA_CR,
    CHUNK_DATA_LF,
    TRAILER_BEGIN,
    TRAILER_LINE,
    TRAILER_LINE_END,
    TRAILER_END
};

static int hex_digit(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    if (c >= 'a' && c <= 'f')
        return c - 'a' + 10;
    return c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

/* A chunk's first line: its size in hex, and extensions that mean nothing here. */
static bool take_size_byte(sp_http_chunks *chunks, char c)
{
    int digit = hex_digit(c);

    if (++chunks->line_bytes > CHUNK_LINE_BYTES_MAX)
        return false;
    if (chunks->state == CHUNK_SIZE_END) {
        chunks->state = chunks->left > 0 ? CHUNK_DATA : TRAILER_BEGIN;
        return c == '\n';
    }
    if (chunks->state == CHUNK_SIZE && digit >= 0) {
        chunks->left = chunks->left * 16 + (uint64_t)digit;
        return ++chunks->n_digits <= CHUNK_DIGITS_MAX;
    }
    if (chunks->n_digits == 0)
        return false;
    if (c == '\r') {
        chunks->state = CHUNK_SIZE_END;
        return true;
    }
    if (chunks->state == CHUNK_SIZE && c != ';')
        return false;
    chunks->state = CHUNK_EXTENSION;
    return !is_control(c);
}

/* Trailers are discarded: they may not change what was checked. */
static bool take_trailer_byte(sp_http_chunks *chunks, char c)
{
    if (++chunks->trailer_bytes > TRAILER_BYTES_MAX)
        return false;
    switch (chunks->state) {
    case TRAILER_BEGIN:
        chunks->state = c == '\r' ? TRAILER_END : TRAILER_LINE;
        return c == '\r' || is_token_byte(c);
    case TRAILER_LINE:
        if (c == '\r')
            chunks->state = TRAILER_LINE_END;
        return c == '\r' || !is_control(c);
    default:
        chunks->state = TRAILER_BEGIN;
        return c == '\n';
    }
}

static bool take_byte(sp_http_chunks *chunks, char c)
{
    switch (chunks->state) {
    case CHUNK_SIZE:
    case CHUNK_EXTENSION:
    case CHUNK_SIZE_END:
        return take_size_byte(chunks, c);
    case CHUNK_DATA_CR:
        chunks->state = CHUNK_DATA_LF;
        return c == '\r';
    case CHUNK_DATA_LF:
        *chunks = (sp_http_chunks){.state = CHUNK_SIZE};
        return c == '\n';
    default:
        return take_trailer_byte(chunks, c);
    }
}

sp_http_parse sp_http_parse_chunk(sp_http_chunks *chunks, const char *data, size_t bytes,
                                  size_t *out_taken, const char **out_data, size_t *out_bytes,
                                  sp_http_refusal *out_refusal)
{
    size_t i = 0;

    *out_bytes = 0;
    *out_data = data;
    while (i < bytes && chunks->state != CHUNK_DATA) {
        bool last = chunks->state == TRAILER_END;

        if (last ? data[i] != '\n' : !take_byte(chunks, data[i]))
            return malformed(out_refusal, "the chunks of the body are malformed");
        i++;
        if (last) {
            *out_taken = i;
            return SP_HTTP_PARSE_DONE;
        }
    }
    if (i < bytes) {
        *out_data = data + i;
        *out_bytes = bytes - i < chunks->left ? bytes - i : (size_t)chunks->left;
        chunks->left -= *out_bytes;
        i += *out_bytes;
        if (chunks->left == 0)
            chunks->state = CHUNK_DATA_CR;
    }
    *out_taken = i;
    return SP_HTTP_PARSE_MORE;
}
