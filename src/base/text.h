/*
 * text.h: a growable text, and JSON output without a DOM. An allocation failure is remembered and
 * reported once at the end, so that callers need no check per call. One thread per text; pointers
 * may not be NULL unless said so.
 */
#ifndef SP_BASE_TEXT_H
#define SP_BASE_TEXT_H

#include "base/error.h"
#include "base/private.h"

#include <stdbool.h>

typedef struct sp_text {
    char *data; /* NUL-terminated once anything was added; NULL before */
    size_t bytes, capacity;
    bool failed;
} sp_text;

/* Frees the memory and zeroes the text; a zeroed text is allowed. */
SP_PRIVATE void sp_text_free(sp_text *text);
SP_PRIVATE void sp_text_clear(sp_text *text); /* keeps the memory, resets a failure */
/* Makes room for exactly `bytes` bytes in all and a NUL, unless there is more. False: no memory,
 * and nothing has changed. */
bool sp_text_reserve(sp_text *text, size_t bytes);
SP_PRIVATE void sp_text_add(sp_text *text, const char *string);
/* Appends `bytes` bytes; 0 is allowed, and then data may be NULL. */
SP_PRIVATE void sp_text_add_bytes(sp_text *text, const char *data, size_t bytes);
/* Appends formatted text, as printf does. */
SP_PRIVATE void sp_text_format(sp_text *text, const char *format, ...) SP_PRINTF(2, 3);

/* Adds untrusted text for a terminal, as sp_make_printable leaves it. */
SP_PRIVATE void sp_text_add_printable(sp_text *text, const char *string);

/* A JSON string with quotes; bytes that are not UTF-8 become U+FFFD. */
SP_PRIVATE void sp_text_json_string(sp_text *text, const char *data, size_t bytes);
/* A JSON number that reads back as the same double; null for NaN and infinities. */
void sp_text_json_double(sp_text *text, double value);

/* Length of the well-formed UTF-8 sequence at data (1 to 4), or 0: malformed, truncated, or bytes =
 * 0. */
SP_PRIVATE size_t sp_utf8_sequence_bytes(const char *data, size_t bytes);
/*
 * Length of the longest prefix that does not end inside a UTF-8 sequence: what is left over, at
 * most 3 bytes, may still become a character when more bytes come.
 */
size_t sp_utf8_complete_bytes(const char *data, size_t bytes);
/* Whether all of data is well-formed UTF-8; bytes 0 is. */
SP_PRIVATE bool sp_utf8_valid(const char *data, size_t bytes);

/*
 * Makes untrusted text printable in place: control characters (line ends too) and bytes that are
 * not UTF-8 become '?', and a sequence truncated by the end of the text is dropped.
 */
void sp_make_printable(char *text);

#endif
