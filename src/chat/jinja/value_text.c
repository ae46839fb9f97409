/* Texts with their provenance: building, cutting, searching. */
#include "chat/jinja/builtins.h"
#include "chat/jinja/value.h"

#include <string.h>
#include <utf8proc.h>

const sp_str sp_str_empty = {.data = "", .bytes = 0};

/* --- Building ------------------------------------------------------------------------------- */

/* Room for `n` more bytes. */
static bool reserve(sp_render *render, sp_build *build, size_t n)
{
    size_t capacity = build->capacity ? build->capacity : 64;
    char *data;
    uint8_t *own;

    if (n <= build->capacity - build->bytes)
        return true;
    while (capacity - build->bytes < n)
        capacity *= 2;
    data = sp_render_take(render, capacity, 1);
    own = sp_render_take(render, capacity, 1);
    if (!data || !own)
        return false;
    if (build->bytes > 0) {
        memcpy(data, build->data, build->bytes);
        memcpy(own, build->own, build->bytes);
    }
    build->data = data;
    build->own = own;
    build->capacity = capacity;
    return true;
}

void sp_build_add_slice(sp_render *render, sp_build *build, const sp_str *text, size_t begin,
                        size_t end)
{
    size_t n = end - begin;

    if (n == 0 || !sp_render_spend(render, n / 64) || !reserve(render, build, n))
        return;
    memcpy(build->data + build->bytes, text->data + begin, n);
    if (text->own) {
        memcpy(build->own + build->bytes, text->own + begin, n);
        build->has_own = build->has_data = true;
    } else {
        memset(build->own + build->bytes, text->literal, n);
        build->has_own |= text->literal;
        build->has_data |= !text->literal;
    }
    build->bytes += n;
}

void sp_build_add(sp_render *render, sp_build *build, const sp_str *text)
{
    sp_build_add_slice(render, build, text, 0, text->bytes);
}

void sp_build_add_data(sp_render *render, sp_build *build, const char *data, size_t bytes)
{
    const sp_str text = {.data = data, .bytes = bytes};

    sp_build_add(render, build, &text);
}

const sp_str *sp_build_finish(sp_render *render, const sp_build *build)
{
    sp_str *text = build->bytes > 0 ? sp_render_take(render, 1, sizeof *text) : NULL;

    if (!text)
        return &sp_str_empty;
    text->data = build->data;
    text->bytes = build->bytes;
    text->literal = build->has_own && !build->has_data;
    text->own = build->has_own && build->has_data ? build->own : NULL;
    return text;
}

const sp_str *sp_str_slice(sp_render *render, const sp_str *text, size_t begin, size_t end)
{
    sp_str *slice;

    if (begin == 0 && end == text->bytes)
        return text;
    slice = begin < end ? sp_render_take(render, 1, sizeof *slice) : NULL;
    if (!slice)
        return &sp_str_empty;
    *slice = (sp_str){.data = text->data + begin,
                      .bytes = end - begin,
                      .own = text->own ? text->own + begin : NULL,
                      .literal = text->literal,
                      .safe = text->safe};
    return slice;
}

const sp_str *sp_str_join(sp_render *render, const sp_str *left, const sp_str *right)
{
    sp_build build = {0};

    if (left->bytes == 0 || right->bytes == 0)
        return left->bytes == 0 ? right : left;
    if (!reserve(render, &build, left->bytes + right->bytes))
        return &sp_str_empty;
    sp_build_add(render, &build, left);
    sp_build_add(render, &build, right);
    return sp_build_finish(render, &build);
}

/* --- Reading -------------------------------------------------------------------------------- */

bool sp_str_equal(const sp_str *text, const char *data, size_t bytes)
{
    return text->bytes == bytes && (bytes == 0 || memcmp(text->data, data, bytes) == 0);
}

bool sp_str_is(const sp_str *text, const char *string)
{
    return sp_str_equal(text, string, strlen(string));
}

static bool is_inner_byte(char byte)
{
    return ((unsigned char)byte & 0xc0) == 0x80;
}

size_t sp_str_length(const sp_str *text)
{
    size_t n = 0;

    for (size_t i = 0; i < text->bytes; i++)
        n += !is_inner_byte(text->data[i]);
    return n;
}

size_t sp_str_character(const sp_str *text, size_t at)
{
    size_t n = 1;

    while (at + n < text->bytes && is_inner_byte(text->data[at + n]))
        n++;
    return n;
}

size_t sp_str_find(const sp_str *text, const sp_str *needle, size_t from)
{
    const char *found;

    if (from > text->bytes || needle->bytes > text->bytes - from)
        return SIZE_MAX;
    found = memmem(text->data + from, text->bytes - from, needle->data, needle->bytes);
    return found ? (size_t)(found - text->data) : SIZE_MAX;
}

static uint32_t code_at(const char *text, size_t bytes)
{
    const unsigned char *in = (const unsigned char *)text;

    if (bytes == 1)
        return in[0];
    if (bytes == 2)
        return (uint32_t)(in[0] & 31) << 6 | (in[1] & 63u);
    if (bytes == 3)
        return (uint32_t)(in[0] & 15) << 12 | (uint32_t)(in[1] & 63) << 6 | (in[2] & 63u);
    return (uint32_t)(in[0] & 7) << 18 | (uint32_t)(in[1] & 63) << 12 |
           (uint32_t)(in[2] & 63) << 6 | (in[3] & 63u);
}

bool sp_code_is_space(uint32_t code)
{
    return (code >= 9 && code <= 13) || (code >= 0x1c && code <= 0x20) || code == 0x85 ||
           code == 0xa0 || code == 0x1680 || (code >= 0x2000 && code <= 0x200a) || code == 0x2028 ||
           code == 0x2029 || code == 0x202f || code == 0x205f || code == 0x3000;
}

/* Whether strip() with these characters takes the one at [at, at + n). */
static bool strips(const sp_str *text, size_t at, size_t n, const sp_str *characters)
{
    const sp_str one = {.data = text->data + at, .bytes = n};

    if (!characters)
        return sp_code_is_space(code_at(text->data + at, n));
    return sp_str_find(characters, &one, 0) != SIZE_MAX;
}

void sp_str_strip(const sp_str *text, const sp_str *characters, bool left, bool right,
                  size_t *out_begin, size_t *out_end)
{
    size_t begin = 0, end = text->bytes, n, at;

    while (left && begin < end) {
        n = sp_str_character(text, begin);
        if (!strips(text, begin, n, characters))
            break;
        begin += n;
    }
    while (right && begin < end) {
        for (at = end - 1; at > begin && is_inner_byte(text->data[at]); at--)
            ;
        if (!strips(text, at, end - at, characters))
            break;
        end = at;
    }
    *out_begin = begin;
    *out_end = end;
}

/* Text that is marked as safe may be cut, compared and printed; to change it in another way would
 * take the escaping of HTML, for which no prompt has a use. */
static void refuse_safe(sp_render *render, const sp_str *text)
{
    if (text->safe)
        sp_render_unsupported(render, "changing a text behind the filter safe");
}

/* --- Changing ------------------------------------------------------------------------------- */

const sp_str *sp_str_replace(sp_render *render, const sp_str *text, const sp_str *old,
                             const sp_str *new, int64_t count)
{
    sp_build build = {0};
    size_t at = 0, found;

    refuse_safe(render, text);
    sp_render_spend(render, text->bytes / 64);
    while (count != 0 && sp_render_spend(render, 1)) {
        /* An empty text is found before every character, and once more at the end. */
        found = sp_str_find(text, old, at);
        if (found == SIZE_MAX)
            break;
        sp_build_add_slice(render, &build, text, at, found);
        sp_build_add(render, &build, new);
        at = found + old->bytes;
        count -= count > 0;
        if (old->bytes > 0)
            continue;
        if (at >= text->bytes)
            return sp_build_finish(render, &build);
        found = at + sp_str_character(text, at);
        sp_build_add_slice(render, &build, text, at, found);
        at = found;
    }
    if (at == 0)
        return text;
    sp_build_add_slice(render, &build, text, at, text->bytes);
    return sp_build_finish(render, &build);
}

/* Bytes of a line border at `at`, or 0. */
static size_t border_at(const sp_str *text, size_t at)
{
    size_t n = sp_str_character(text, at);
    uint32_t code = code_at(text->data + at, n);

    if (code == '\r' && at + 1 < text->bytes && text->data[at + 1] == '\n')
        return 2;
    if ((code >= 10 && code <= 13) || (code >= 0x1c && code <= 0x1e) || code == 0x85 ||
        code == 0x2028 || code == 0x2029)
        return n;
    return 0;
}

sp_value sp_str_lines(sp_render *render, const sp_str *text)
{
    sp_items items = {0};
    size_t begin = 0, at = 0, n;

    while (at < text->bytes) {
        n = border_at(text, at);
        if (n == 0) {
            at += sp_str_character(text, at);
            continue;
        }
        if (!sp_render_spend(render, 1 + (at - begin) / 64))
            break;
        sp_items_add(render, &items, sp_value_text(sp_str_slice(render, text, begin, at)));
        at += n;
        begin = at;
    }
    if (begin < text->bytes)
        sp_items_add(render, &items, sp_value_text(sp_str_slice(render, text, begin, text->bytes)));
    return sp_items_list(render, &items, false);
}

const sp_str *sp_str_reversed(sp_render *render, const sp_str *text)
{
    sp_build build = {0};
    size_t end = text->bytes, at;

    refuse_safe(render, text);
    while (end > 0 && sp_render_spend(render, 1)) {
        for (at = end - 1; at > 0 && is_inner_byte(text->data[at]); at--)
            ;
        sp_build_add_slice(render, &build, text, at, end);
        end = at;
    }
    return sp_build_finish(render, &build);
}

/* --- Case ----------------------------------------------------------------------------------- */

/* Characters that no change of case touches, whatever the table: those of scripts without cases,
 * digits, signs, combining marks. A rough set of whole ranges; the others are not guessed.
 */
static const uint32_t caseless[][2] = {
    {0x80, 0xa9},       {0xab, 0xb4},       {0xb6, 0xb9},       {0xbb, 0xbf},     {0xd7, 0xd7},
    {0xf7, 0xf7},       {0x300, 0x344},     {0x346, 0x36f},     {0x5d0, 0x5ea},   {0x600, 0x6ff},
    {0x900, 0xdff},     {0xe00, 0xeff},     {0x2000, 0x206f},   {0x20a0, 0x20bf}, {0x2190, 0x245f},
    {0x2500, 0x2bff},   {0x3000, 0x9fff},   {0xac00, 0xd7a3},   {0xfe00, 0xfe0f}, {0xff00, 0xff20},
    {0x1f000, 0x1f0ff}, {0x1f300, 0x1faff}, {0x20000, 0x2ffff},
};

/* Letters of Latin, Greek and Cyrillic, of which each has one letter of the other case at most,
 * which is also its letter at the beginning of a word. */
static const uint32_t simple[][2] = {
    {'A', 'Z'},     {'a', 'z'},     {0xc0, 0xd6},   {0xd8, 0xde},   {0xe0, 0xf6},   {0xf8, 0x12f},
    {0x131, 0x148}, {0x14a, 0x1ba}, {0x1cd, 0x1ef}, {0x1f4, 0x24f}, {0x386, 0x38f}, {0x391, 0x3a1},
    {0x3a4, 0x3af}, {0x3b1, 0x3cf}, {0x400, 0x481}, {0x48a, 0x52f},
};

static bool in_ranges(uint32_t code, const uint32_t (*ranges)[2], size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (code >= ranges[i][0] && code <= ranges[i][1])
            return true;
    return false;
}

static bool is_letter(uint32_t code)
{
    return in_ranges(code, simple, sizeof simple / sizeof *simple) &&
           (code < 0x80 ||
            utf8proc_toupper((utf8proc_int32_t)code) != utf8proc_tolower((utf8proc_int32_t)code));
}

/* One letter in another case, with the provenance of the one at [at, at + n). */
static void add_cased(sp_render *render, sp_build *build, const sp_str *text, size_t at, size_t n,
                      bool upper)
{
    utf8proc_int32_t code = (utf8proc_int32_t)code_at(text->data + at, n);
    utf8proc_uint8_t bytes[4];
    sp_str one = {.data = (const char *)bytes,
                  .literal = text->own ? text->own[at] : text->literal};

    code = upper ? utf8proc_toupper(code) : utf8proc_tolower(code);
    one.bytes = (size_t)utf8proc_encode_char(code, bytes);
    sp_build_add(render, build, &one);
}

const sp_str *sp_str_case(sp_render *render, const sp_str *text, int which)
{
    sp_build build = {0};
    bool behind_letter = false;

    refuse_safe(render, text);
    sp_render_spend(render, text->bytes / 8);
    for (size_t at = 0, n; at < text->bytes && render->failed == SP_OK; at += n) {
        uint32_t code = code_at(text->data + at, n = sp_str_character(text, at));
        bool letter = is_letter(code);
        bool upper = which == SP_CASE_UPPER || (which == SP_CASE_TITLE && !behind_letter) ||
                     (which == SP_CASE_CAPITALIZE && at == 0);

        if (letter)
            add_cased(render, &build, text, at, n, upper);
        else if (code < 0x80 || in_ranges(code, caseless, sizeof caseless / sizeof *caseless))
            sp_build_add_slice(render, &build, text, at, at + n);
        else
            sp_render_unsupported(render, "another case for \"%.*s\"", (int)n, text->data + at);
        behind_letter = letter;
    }
    return sp_build_finish(render, &build);
}
