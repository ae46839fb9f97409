#include "base/text.h"

#include "base/alloc.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char replacement[] = "\xef\xbf\xbd"; /* U+FFFD */

void sp_text_free(sp_text *text)
{
    sp_free(text->data);
    *text = (sp_text){0};
}

void sp_text_clear(sp_text *text)
{
    text->bytes = 0;
    text->failed = false;
    if (text->data)
        text->data[0] = '\0';
}

static bool reserve(sp_text *text, size_t more)
{
    size_t capacity = text->capacity ? text->capacity : 64;
    char *grown;

    if (text->failed)
        return false;
    while (capacity - text->bytes <= more) {
        if (capacity > SIZE_MAX / 2) {
            text->failed = true;
            return false;
        }
        capacity *= 2;
    }
    if (capacity == text->capacity)
        return true;
    grown = sp_realloc(text->data, capacity);
    if (!grown) {
        text->failed = true;
        return false;
    }
    text->data = grown;
    text->capacity = capacity;
    return true;
}

bool sp_text_reserve(sp_text *text, size_t bytes)
{
    char *grown;

    if (bytes == SIZE_MAX)
        return false;
    if (text->capacity > bytes)
        return true;
    grown = sp_realloc(text->data, bytes + 1);
    if (!grown)
        return false;
    grown[text->bytes] = '\0';
    text->data = grown;
    text->capacity = bytes + 1;
    return true;
}

void sp_text_add_bytes(sp_text *text, const char *data, size_t bytes)
{
    if (!reserve(text, bytes))
        return;
    if (bytes > 0)
        memcpy(text->data + text->bytes, data, bytes);
    text->bytes += bytes;
    text->data[text->bytes] = '\0';
}

void sp_text_add(sp_text *text, const char *string)
{
    sp_text_add_bytes(text, string, strlen(string));
}

void sp_text_format(sp_text *text, const char *format, ...)
{
    va_list arguments;
    int n;

    va_start(arguments, format);
    n = vsnprintf(NULL, 0, format, arguments);
    va_end(arguments);
    if (n < 0 || !reserve(text, (size_t)n)) {
        text->failed = true;
        return;
    }
    va_start(arguments, format);
    vsnprintf(text->data + text->bytes, (size_t)n + 1, format, arguments);
    va_end(arguments);
    text->bytes += (size_t)n;
}

/* Length of the sequence that starts with this byte; 0 if it cannot start one. */
static size_t utf8_lead_bytes(unsigned char lead)
{
    if (lead < 0x80)
        return 1;
    if (lead < 0xc2 || lead > 0xf4)
        return 0;
    return lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
}

/* Table 3-7 of the Unicode Standard: overlong forms, surrogates and code points above U+10FFFF are
 * recognised by the second byte. */
static bool utf8_second_fits(unsigned char lead, unsigned char second)
{
    unsigned char low = lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : 0x80;
    unsigned char high = lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : 0xbf;

    return second >= low && second <= high;
}

size_t sp_utf8_sequence_bytes(const char *data, size_t bytes)
{
    const unsigned char *cursor = (const unsigned char *)data;
    size_t n = bytes > 0 ? utf8_lead_bytes(cursor[0]) : 0;

    if (n > bytes || (n > 1 && !utf8_second_fits(cursor[0], cursor[1])))
        return 0;
    for (size_t i = 2; i < n; i++)
        if ((cursor[i] & 0xc0) != 0x80)
            return 0;
    return n;
}

static void add_escaped(sp_text *text, unsigned char c)
{
    switch (c) {
    case '"':
        sp_text_add(text, "\\\"");
        break;
    case '\\':
        sp_text_add(text, "\\\\");
        break;
    case '\n':
        sp_text_add(text, "\\n");
        break;
    case '\r':
        sp_text_add(text, "\\r");
        break;
    case '\t':
        sp_text_add(text, "\\t");
        break;
    default:
        sp_text_format(text, "\\u%04x", c);
    }
}

void sp_text_json_string(sp_text *text, const char *data, size_t bytes)
{
    size_t i = 0;

    sp_text_add(text, "\"");
    while (i < bytes) {
        size_t n = sp_utf8_sequence_bytes(data + i, bytes - i);
        unsigned char c = (unsigned char)data[i];

        if (n == 0) {
            sp_text_add(text, replacement);
            n = 1;
        } else if (c < 0x20 || c == '"' || c == '\\' || c == 0x7f) {
            add_escaped(text, c);
        } else {
            sp_text_add_bytes(text, data + i, n);
        }
        i += n;
    }
    sp_text_add(text, "\"");
}

void sp_text_json_double(sp_text *text, double value)
{
    char digits[40];

    if (!isfinite(value)) {
        sp_text_add(text, "null");
        return;
    }
    for (int precision = 6; precision <= 17; precision++) {
        snprintf(digits, sizeof digits, "%.*g", precision, value);
        if (strtod(digits, NULL) == value)
            break;
    }
    sp_text_add(text, digits);
}

size_t sp_utf8_complete_bytes(const char *data, size_t bytes)
{
    const unsigned char *end = (const unsigned char *)data + bytes;
    size_t back = 1;

    while (back < 4 && back < bytes && (end[-(ptrdiff_t)back] & 0xc0) == 0x80)
        back++;
    if (back > bytes || back >= utf8_lead_bytes(end[-(ptrdiff_t)back]))
        return bytes;
    if (back > 1 && !utf8_second_fits(end[-(ptrdiff_t)back], end[1 - (ptrdiff_t)back]))
        return bytes;
    return bytes - back;
}

bool sp_utf8_valid(const char *data, size_t bytes)
{
    size_t i = 0;

    while (i < bytes) {
        size_t n = sp_utf8_sequence_bytes(data + i, bytes - i);

        if (n == 0)
            return false;
        i += n;
    }
    return true;
}

/* C0, DEL, and C1 in its two-byte form: a terminal would interpret them. */
static bool is_control(const char *text, size_t sequence_bytes)
{
    unsigned char c = (unsigned char)text[0];

    if (sequence_bytes == 2)
        return c == 0xc2 && (unsigned char)text[1] < 0xa0;
    return c < 0x20 || c == 0x7f;
}

void sp_make_printable(char *text)
{
    size_t bytes = sp_utf8_complete_bytes(text, strlen(text));
    size_t i = 0;

    text[bytes] = '\0';
    while (i < bytes) {
        size_t n = sp_utf8_sequence_bytes(text + i, bytes - i);

        if (n == 0 || is_control(text + i, n)) {
            n = n > 0 ? n : 1;
            memset(text + i, '?', n);
        }
        i += n;
    }
}

void sp_text_add_printable(sp_text *text, const char *string)
{
    size_t at = text->bytes;

    sp_text_add(text, string);
    if (text->failed)
        return;
    sp_make_printable(text->data + at);
    text->bytes = at + strlen(text->data + at);
}
