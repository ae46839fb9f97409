/*
 * multipart.c: a body is cut at its delimiters, CR LF, two hyphens and the boundary, the first of
 * which has no line before it; what is between two of them is one part: headers, an empty line and
 * data, which may be any bytes.
 */
#include "server/http/multipart.h"

#include "base/error.h"

#include <string.h>
#include <strings.h>

#define DELIMITER_BYTES (SP_BOUNDARY_BYTES + 4)

/* ---- the boundary -------------------------------------------------------------------------- */

static bool is_boundary_char(char c)
{
    return (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') ||
           (c != '\0' && strchr("'()+_,-./:=?", c) != NULL);
}

static const char *skip_blanks(const char *text)
{
    return text + strspn(text, " \t");
}

/* The value of a parameter at *text, quoted or not, without escapes. False: it has no end, or does
 * not fit. */
static bool read_value(const char **text, char *out, size_t out_bytes)
{
    bool quoted = **text == '"';
    const char *from = *text + quoted;
    size_t bytes = strcspn(from, quoted ? "\"" : " \t;");

    if ((quoted && from[bytes] != '"') || bytes == 0 || bytes >= out_bytes)
        return false;
    memcpy(out, from, bytes);
    out[bytes] = '\0';
    *text = from + bytes + quoted;
    return true;
}

/* `text` is what follows a type: "; name=value; ..". Other parameters than `wanted` are skipped. */
static bool find_parameter(const char *text, const char *wanted, char *out, size_t out_bytes)
{
    size_t wanted_bytes = strlen(wanted);
    bool found = false;

    for (text = skip_blanks(text); *text == ';'; text = skip_blanks(text)) {
        char skipped[SP_MULTIPART_HEADER_BYTES];
        size_t name_bytes;
        const char *name;
        bool is_wanted;

        name = skip_blanks(text + 1);
        name_bytes = strcspn(name, "= \t;\"");
        is_wanted = name_bytes == wanted_bytes && strncasecmp(name, wanted, name_bytes) == 0;
        if (name_bytes == 0 || name[name_bytes] != '=' || (is_wanted && found))
            return false;
        text = name + name_bytes + 1;
        if (!read_value(&text, is_wanted ? out : skipped, is_wanted ? out_bytes : sizeof skipped))
            return false;
        found |= is_wanted;
    }
    return found && *text == '\0';
}

bool sp_multipart_boundary(const char *content_type, char out_boundary[SP_BOUNDARY_BYTES])
{
    size_t type_bytes = sizeof SP_MULTIPART_TYPE - 1;

    if (!content_type || strncasecmp(content_type, SP_MULTIPART_TYPE, type_bytes) != 0 ||
        !find_parameter(content_type + type_bytes, "boundary", out_boundary, SP_BOUNDARY_BYTES))
        return false;
    for (const char *c = out_boundary; *c; c++)
        if (!is_boundary_char(*c))
            return false;
    return true;
}

/* ---- parts --------------------------------------------------------------------------------- */

typedef struct cursor {
    const char *body;
    size_t at, bytes;
    sp_error *error;
} cursor;

static sp_status malformed(const cursor *c, size_t at, const char *what)
{
    return sp_fail(c->error, SP_ERR_INPUT, SP_CODE_MULTIPART, "body", (int64_t)at,
                   "the body is no multipart/form-data: %s (byte %zu)", what, at);
}

static bool has_prefix(const cursor *c, const char *text)
{
    size_t bytes = strlen(text);

    return c->bytes - c->at >= bytes && memcmp(c->body + c->at, text, bytes) == 0;
}

/* One header line [bytes] without its end. */
static sp_status read_header(cursor *c, const char *line, size_t bytes, sp_multipart_part *part)
{
    static const char disposition[] = "content-disposition:";
    static const char encoding[] = "content-transfer-encoding:";
    char text[SP_MULTIPART_HEADER_BYTES + 1];
    const char *value;

    if (memchr(line, '\0', bytes) || memchr(line, '\r', bytes) || memchr(line, '\n', bytes))
        return malformed(c, c->at, "a control character in a part's header");
    memcpy(text, line, bytes);
    text[bytes] = '\0';
    if (strncasecmp(text, encoding, sizeof encoding - 1) == 0 &&
        strcasecmp(skip_blanks(text + sizeof encoding - 1), "binary") != 0)
        return malformed(c, c->at, "a part with a transfer encoding");
    if (strncasecmp(text, disposition, sizeof disposition - 1) != 0)
        return SP_OK;
    value = skip_blanks(text + sizeof disposition - 1);
    if (part->name[0] || strncasecmp(value, "form-data", 9) != 0 ||
        !find_parameter(value + 9, "name", part->name, sizeof part->name))
        return malformed(c, c->at, "a part whose Content-Disposition does not name it");
    return SP_OK;
}

/* From the first header to the end of the empty line. */
static sp_status read_headers(cursor *c, sp_multipart_part *part)
{
    size_t end =
        c->bytes - c->at < SP_MULTIPART_HEADER_BYTES ? c->bytes : c->at + SP_MULTIPART_HEADER_BYTES;

    while (!has_prefix(c, "\r\n")) {
        const char *line = c->body + c->at;
        const char *stop = memmem(line, end - c->at, "\r\n", 2);
        sp_status status;

        if (!stop)
            return malformed(c, c->at, "a part's headers have no end, or are too long");
        status = read_header(c, line, (size_t)(stop - line), part);
        if (status != SP_OK)
            return status;
        c->at += (size_t)(stop - line) + 2;
    }
    c->at += 2;
    return part->name[0] ? SP_OK : malformed(c, c->at, "a part without a name");
}

static sp_status check_name(const cursor *c, const sp_multipart_part *parts, int32_t n,
                            const char *name)
{
    for (int32_t i = 0; i < n; i++)
        if (strcmp(parts[i].name, name) == 0)
            return malformed(c, c->at, "two parts have the same name");
    return SP_OK;
}

static sp_status read_part(cursor *c, const char *delimiter, sp_multipart_part *parts, int32_t n)
{
    sp_multipart_part part = {.bytes = 0};
    const char *stop;
    sp_status status = n < SP_MULTIPART_PARTS_MAX ? SP_OK : malformed(c, c->at, "too many parts");

    if (status == SP_OK)
        status = read_headers(c, &part);
    if (status == SP_OK)
        status = check_name(c, parts, n, part.name);
    if (status != SP_OK)
        return status;
    part.data = c->body + c->at;
    stop = memmem(part.data, c->bytes - c->at, delimiter, strlen(delimiter));
    if (!stop)
        return malformed(c, c->at, "the last part has no end");
    part.bytes = (size_t)(stop - part.data);
    c->at += part.bytes + strlen(delimiter);
    parts[n] = part;
    return SP_OK;
}

sp_status sp_multipart_parse(const char *body, size_t bytes, const char *boundary,
                             sp_multipart_part *out_parts, int32_t *out_n, sp_error *error)
{
    cursor c = {body, 0, bytes, error};
    char delimiter[DELIMITER_BYTES] = "\r\n--";
    int32_t n = 0;

    strncat(delimiter, boundary, SP_BOUNDARY_BYTES - 1);
    if (!has_prefix(&c, delimiter + 2))
        return malformed(&c, 0, "it does not begin with its boundary");
    c.at = strlen(delimiter) - 2;
    while (!has_prefix(&c, "--")) {
        sp_status status;

        if (!has_prefix(&c, "\r\n"))
            return malformed(&c, c.at, "a boundary that does not end its line");
        c.at += 2;
        status = read_part(&c, delimiter, out_parts, n);
        if (status != SP_OK)
            return status;
        n++;
    }
    c.at += 2;
    if (c.at != bytes && !(has_prefix(&c, "\r\n") && c.at + 2 == bytes))
        return malformed(&c, c.at, "bytes after its end");
    *out_n = n;
    return SP_OK;
}
