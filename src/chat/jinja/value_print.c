/* Values as text: what Python's str() and json.dumps() write. */
#include "base/text.h"
#include "chat/jinja/value.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

static void add(sp_render *render, sp_build *build, const char *text)
{
    sp_build_add_data(render, build, text, strlen(text));
}

/* --- Numbers -------------------------------------------------------------------------------- */

/* The fewest significant digits that read back as `real`, as d.ddde+xx. */
static void shortest(double real, char *out, size_t bytes)
{
    for (int digits = 0; digits <= 16; digits++) {
        snprintf(out, bytes, "%.*e", digits, real);
        if (strtod(out, NULL) == real)
            return;
    }
}

/* As Python's repr of a float: plain between 1e-4 and 1e16, else with an exponent. */
static void print_real(double real, char *out, size_t bytes)
{
    char digits[40], mantissa[40];
    int exponent, n_digits;
    char *mark;

    if (isnan(real) || isinf(real)) {
        snprintf(out, bytes, "%s", isnan(real) ? "nan" : real < 0 ? "-inf" : "inf");
        return;
    }
    shortest(real, digits, sizeof digits);
    mark = strchr(digits, 'e');
    exponent = (int)strtol(mark + 1, NULL, 10);
    snprintf(mantissa, sizeof mantissa, "%.*s", (int)(mark - digits), digits);
    n_digits = (int)strlen(mantissa) - (mantissa[0] == '-') - (strchr(mantissa, '.') != NULL);
    if (exponent < -4 || exponent >= 16)
        snprintf(out, bytes, "%se%c%02d", mantissa, exponent < 0 ? '-' : '+', abs(exponent));
    else
        snprintf(out, bytes, "%.*f", n_digits - 1 - exponent > 1 ? n_digits - 1 - exponent : 1,
                 real);
}

static void add_number(sp_render *render, sp_build *build, const sp_value *value)
{
    char text[64];

    if (value->kind == SP_VALUE_INT)
        snprintf(text, sizeof text, "%lld", (long long)value->as.integer);
    else
        print_real(value->as.real, text, sizeof text);
    add(render, build, text);
}

/* --- Python --------------------------------------------------------------------------------- */

static void add_repr(sp_render *render, sp_build *build, const sp_value *value);

static bool is_printable(uint32_t code)
{
    switch (utf8proc_category((utf8proc_int32_t)code)) {
    case UTF8PROC_CATEGORY_CN:
    case UTF8PROC_CATEGORY_CC:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_CS:
    case UTF8PROC_CATEGORY_CO:
    case UTF8PROC_CATEGORY_ZL:
    case UTF8PROC_CATEGORY_ZP:
    case UTF8PROC_CATEGORY_ZS:
        return code == ' ';
    default:
        return true;
    }
}

/* One character of a string's repr. */
static void add_repr_character(sp_render *render, sp_build *build, const sp_str *text, size_t at,
                               size_t n, char quote)
{
    static const char from[] = "\n\r\t\\", to[] = "nrt\\";
    char first = text->data[at], escape[16];
    const char *simple = first ? strchr(from, first) : NULL;
    utf8proc_int32_t code = 0;

    utf8proc_iterate((const utf8proc_uint8_t *)text->data + at, (utf8proc_ssize_t)n, &code);
    if (simple || first == quote) {
        snprintf(escape, sizeof escape, "\\%c", simple ? to[simple - from] : quote);
        add(render, build, escape);
    } else if (is_printable((uint32_t)code)) {
        sp_build_add_slice(render, build, text, at, at + n);
    } else {
        snprintf(escape, sizeof escape,
                 code < 0x100     ? "\\x%02x"
                 : code < 0x10000 ? "\\u%04x"
                                  : "\\U%08x",
                 (unsigned)code);
        add(render, build, escape);
    }
}

static void add_repr_text(sp_render *render, sp_build *build, const sp_str *text)
{
    bool single = text->bytes > 0 && memchr(text->data, '\'', text->bytes);
    bool twofold = text->bytes > 0 && memchr(text->data, '"', text->bytes);
    const char quote[2] = {single && !twofold ? '"' : '\'', '\0'};

    add(render, build, quote);
    for (size_t at = 0, n; at < text->bytes && sp_render_spend(render, 1); at += n) {
        n = sp_str_character(text, at);
        add_repr_character(render, build, text, at, n, quote[0]);
    }
    add(render, build, quote);
}

static void add_repr_list(sp_render *render, sp_build *build, const sp_list *list)
{
    add(render, build, list->tuple ? "(" : "[");
    for (size_t i = 0; i < list->n && render->failed == SP_OK; i++) {
        if (i > 0)
            add(render, build, ", ");
        add_repr(render, build, &list->items[i]);
    }
    add(render, build, !list->tuple ? "]" : list->n == 1 ? ",)" : ")");
}

static void add_repr_map(sp_render *render, sp_build *build, const sp_map *map)
{
    add(render, build, "{");
    for (size_t i = 0; i < map->n && render->failed == SP_OK; i++) {
        if (i > 0)
            add(render, build, ", ");
        add_repr_text(render, build, map->keys[i]);
        add(render, build, ": ");
        add_repr(render, build, &map->values[i]);
    }
    add(render, build, "}");
}

static void add_repr(sp_render *render, sp_build *build, const sp_value *value)
{
    if (!sp_render_enter(render))
        return;
    switch (value->kind) {
    case SP_VALUE_UNDEFINED:
        add(render, build, "Undefined");
        break;
    case SP_VALUE_NONE:
        add(render, build, "None");
        break;
    case SP_VALUE_BOOL:
        add(render, build, value->as.truth ? "True" : "False");
        break;
    case SP_VALUE_INT:
    case SP_VALUE_REAL:
        add_number(render, build, value);
        break;
    case SP_VALUE_TEXT:
        add_repr_text(render, build, value->as.text);
        break;
    case SP_VALUE_LIST:
        add_repr_list(render, build, value->as.list);
        break;
    case SP_VALUE_MAP:
        add_repr_map(render, build, value->as.map);
        break;
    default:
        sp_render_unsupported(render, "printing %s", sp_value_kind_name(value));
    }
    render->depth--;
}

const sp_str *sp_value_str(sp_render *render, const sp_value *value)
{
    sp_build build = {0};

    if (value->kind == SP_VALUE_TEXT)
        return value->as.text;
    if (value->kind == SP_VALUE_UNDEFINED)
        return &sp_str_empty;
    add_repr(render, &build, value);
    return sp_build_finish(render, &build);
}

/* --- JSON ----------------------------------------------------------------------------------- */

static void add_json(sp_render *render, sp_build *build, const sp_value *value,
                     const sp_json_style *style, size_t level);

static void add_json_escape(sp_render *render, sp_build *build, uint32_t code)
{
    static const char from[] = "\"\\\n\r\t\b\f", to[] = "\"\\nrtbf";
    const char *simple = code > 0 && code < 0x80 ? strchr(from, (int)code) : NULL;
    char text[16];

    if (simple)
        snprintf(text, sizeof text, "\\%c", to[simple - from]);
    else if (code < 0x10000)
        snprintf(text, sizeof text, "\\u%04x", (unsigned)code);
    else
        snprintf(text, sizeof text, "\\u%04x\\u%04x", (unsigned)(0xd800 + ((code - 0x10000) >> 10)),
                 (unsigned)(0xdc00 + ((code - 0x10000) & 0x3ff)));
    add(render, build, text);
}

static void add_json_text(sp_render *render, sp_build *build, const sp_str *text, bool ensure_ascii)
{
    size_t begin = 0, at = 0, n;

    add(render, build, "\"");
    while (at < text->bytes && render->failed == SP_OK) {
        unsigned char first = (unsigned char)text->data[at];
        utf8proc_int32_t code = first;

        n = sp_str_character(text, at);
        if (first >= 0x20 && first != '"' && first != '\\' && !(ensure_ascii && first >= 0x7f)) {
            at += n;
            continue;
        }
        if (n > 1)
            utf8proc_iterate((const utf8proc_uint8_t *)text->data + at, (utf8proc_ssize_t)n, &code);
        sp_build_add_slice(render, build, text, begin, at);
        add_json_escape(render, build, (uint32_t)code);
        at += n;
        begin = at;
    }
    sp_build_add_slice(render, build, text, begin, text->bytes);
    add(render, build, "\"");
}

static void add_line(sp_render *render, sp_build *build, const sp_json_style *style, size_t level)
{
    if (!style->indent)
        return;
    add(render, build, "\n");
    for (size_t i = 0; i < level; i++)
        sp_build_add(render, build, style->indent);
}

static void add_json_list(sp_render *render, sp_build *build, const sp_list *list,
                          const sp_json_style *style, size_t level)
{
    add(render, build, "[");
    for (size_t i = 0; i < list->n && render->failed == SP_OK; i++) {
        if (i > 0)
            sp_build_add(render, build, style->item_separator);
        add_line(render, build, style, level + 1);
        add_json(render, build, &list->items[i], style, level + 1);
    }
    if (list->n > 0)
        add_line(render, build, style, level);
    add(render, build, "]");
}

/* The order in which a map's entries are written. */
static size_t *order_of(sp_render *render, const sp_map *map, bool sorted)
{
    size_t *order = sp_render_take(render, map->n, sizeof *order);

    for (size_t i = 0; order && i < map->n; i++) {
        size_t at = i;

        for (; sorted && at > 0; at--) {
            sp_value left = sp_value_text(map->keys[order[at - 1]]);
            sp_value right = sp_value_text(map->keys[i]);

            if (!sp_render_spend(render, 1) || sp_value_order(render, &left, &right) <= 0)
                break;
            order[at] = order[at - 1];
        }
        order[at] = i;
    }
    return order;
}

static void add_json_map(sp_render *render, sp_build *build, const sp_map *map,
                         const sp_json_style *style, size_t level)
{
    size_t *order = order_of(render, map, style->sort_keys);

    add(render, build, "{");
    for (size_t i = 0; order && i < map->n && render->failed == SP_OK; i++) {
        if (i > 0)
            sp_build_add(render, build, style->item_separator);
        add_line(render, build, style, level + 1);
        add_json_text(render, build, map->keys[order[i]], style->ensure_ascii);
        sp_build_add(render, build, style->key_separator);
        add_json(render, build, &map->values[order[i]], style, level + 1);
    }
    if (map->n > 0)
        add_line(render, build, style, level);
    add(render, build, "}");
}

static void add_json(sp_render *render, sp_build *build, const sp_value *value,
                     const sp_json_style *style, size_t level)
{
    if (!sp_render_enter(render))
        return;
    switch (value->kind) {
    case SP_VALUE_NONE:
        add(render, build, "null");
        break;
    case SP_VALUE_BOOL:
        add(render, build, value->as.truth ? "true" : "false");
        break;
    case SP_VALUE_REAL:
        if (isnan(value->as.real) || isinf(value->as.real)) {
            add(render, build,
                isnan(value->as.real) ? "NaN"
                : value->as.real < 0  ? "-Infinity"
                                      : "Infinity");
            break;
        }
        add_number(render, build, value);
        break;
    case SP_VALUE_INT:
        add_number(render, build, value);
        break;
    case SP_VALUE_TEXT:
        add_json_text(render, build, value->as.text, style->ensure_ascii);
        break;
    case SP_VALUE_LIST:
        add_json_list(render, build, value->as.list, style, level);
        break;
    case SP_VALUE_MAP:
        add_json_map(render, build, value->as.map, style, level);
        break;
    default:
        sp_render_fail(render, "%s cannot be written as JSON", sp_value_kind_name(value));
    }
    render->depth--;
}

void sp_value_to_json(sp_render *render, sp_build *build, const sp_value *value,
                      const sp_json_style *style)
{
    add_json(render, build, value, style, 0);
}
