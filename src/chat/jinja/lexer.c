/*
 * A template's source to tokens. Two modes: text outside of tags, and what is inside of them. White
 * space around tags is cut here, as with trim_blocks and lstrip_blocks on, which is how chat
 * templates are written: the newline after a {% tag %} and the blanks before one that is first in
 * its line are dropped, and a '-' in a tag takes all white space on its side.
 */
#include "base/alloc.h"
#include "chat/jinja/codes.h"
#include "chat/jinja/node.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define BRACKETS_MAX SP_TEMPLATE_DEPTH_MAX

typedef struct {
    sp_arena *arena;
    char *source;
    size_t bytes, at;
    int32_t line;
    bool line_starts; /* what was read last ended with a newline */
    const char *subject;
    sp_token *tokens;
    size_t n, capacity;
    sp_error *error;
    sp_status failed;
    sp_token spare; /* written to after a failure, never read */
} lexer;

sp_status sp_template_fail(sp_error *error, bool unsupported, const char *subject, int32_t line,
                           const char *format, ...)
{
    char text[SP_ERROR_TEXT_BYTES];
    va_list arguments;

    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    return sp_fail(error, unsupported ? SP_ERR_UNSUPPORTED : SP_ERR_INPUT,
                   unsupported ? SP_CHAT_UNSUPPORTED : SP_CHAT_MALFORMED, subject, line,
                   "%s, line %d: %s", subject, line, text);
}

sp_status sp_template_fail_memory(sp_error *error, const sp_arena *arena, const char *subject)
{
    if (arena->over)
        return sp_fail(error, SP_ERR_TOO_LARGE, SP_CHAT_LIMIT, subject, -1,
                       "%s takes more than %zu bytes of memory", subject, arena->bytes_max);
    return sp_fail_memory(error, arena->bytes, subject);
}

static void fail(lexer *lex, bool unsupported, const char *why)
{
    if (lex->failed == SP_OK)
        lex->failed = sp_template_fail(lex->error, unsupported, lex->subject, lex->line, "%s", why);
}

static sp_token *add(lexer *lex, sp_token_kind kind)
{
    if (lex->n == lex->capacity) {
        size_t capacity = lex->capacity ? lex->capacity * 2 : 256;
        sp_token *tokens = sp_arena_take(lex->arena, capacity, sizeof *tokens);

        if (!tokens) {
            if (lex->failed == SP_OK)
                lex->failed = sp_template_fail_memory(lex->error, lex->arena, lex->subject);
            return &lex->spare;
        }
        if (lex->n > 0)
            memcpy(tokens, lex->tokens, lex->n * sizeof *tokens);
        lex->tokens = tokens;
        lex->capacity = capacity;
    }
    lex->tokens[lex->n] = (sp_token){.kind = kind, .line = lex->line};
    return &lex->tokens[lex->n++];
}

static void skip_to(lexer *lex, size_t end)
{
    for (; lex->at < end; lex->at++)
        lex->line += lex->source[lex->at] == '\n';
}

static bool looking_at(const lexer *lex, size_t at, const char *what)
{
    size_t n = strlen(what);

    return at + n <= lex->bytes && memcmp(lex->source + at, what, n) == 0;
}

static bool is_blank(char byte)
{
    return byte == ' ' || (byte >= '\t' && byte <= '\r');
}

/* Takes the white space of the source (blanks of ASCII: no template has others there). */
static void skip_blanks(lexer *lex)
{
    size_t at = lex->at;

    while (at < lex->bytes && is_blank(lex->source[at]))
        at++;
    skip_to(lex, at);
}

/* --- Text ---------------------------------------------------------------------------------- */

/* End of the text [begin, end) before a tag with this sign. */
static size_t cut_right(const lexer *lex, size_t begin, size_t end, char sign, bool is_print)
{
    size_t at = end;

    if (sign == '-') {
        while (at > begin && is_blank(lex->source[at - 1]))
            at--;
        return at;
    }
    if (sign == '+' || is_print)
        return end;
    while (at > begin && lex->source[at - 1] != '\n' && is_blank(lex->source[at - 1]))
        at--;
    if (at > begin ? lex->source[at - 1] == '\n' : lex->line_starts)
        return at;
    return end;
}

static void add_text(lexer *lex, size_t begin, size_t end)
{
    if (end > begin) {
        sp_token *token = add(lex, SP_LEX_TEXT);

        token->text = lex->source + begin;
        token->bytes = end - begin;
    }
}

/* After the bytes of a closing tag: what its sign, or the trimming of blocks, takes besides. */
static void close_tag(lexer *lex, size_t end, char sign, bool is_print)
{
    skip_to(lex, end);
    if (sign == '-')
        skip_blanks(lex);
    else if (sign != '+' && !is_print && looking_at(lex, lex->at, "\n"))
        skip_to(lex, lex->at + 1);
    lex->line_starts = lex->at > 0 && lex->source[lex->at - 1] == '\n';
}

/* The next "{{", "{%" or "{#", or the end. */
static size_t find_tag(const lexer *lex)
{
    for (size_t at = lex->at; at + 1 < lex->bytes; at++)
        if (lex->source[at] == '{' && strchr("{%#", lex->source[at + 1]) &&
            lex->source[at + 1] != '\0')
            return at;
    return lex->bytes;
}

static char sign_at(const lexer *lex, size_t at)
{
    return at < lex->bytes && (lex->source[at] == '-' || lex->source[at] == '+') ? lex->source[at]
                                                                                 : '\0';
}

static void lex_comment(lexer *lex)
{
    const char *end = NULL;
    size_t at;
    char sign;

    for (at = lex->at; at + 1 < lex->bytes && !end; at++)
        if (looking_at(lex, at, "#}"))
            end = lex->source + at;
    if (!end) {
        fail(lex, false, "a comment that does not end");
        return;
    }
    at = (size_t)(end - lex->source);
    sign = at > lex->at ? sign_at(lex, at - 1) : '\0';
    close_tag(lex, at + 2, sign, false);
}

/* Where a tag with only this word ends, or 0: "raw %}". */
static size_t word_tag_end(const lexer *lex, size_t at, const char *word, char *out_sign)
{
    while (at < lex->bytes && is_blank(lex->source[at]))
        at++;
    if (!looking_at(lex, at, word))
        return 0;
    at += strlen(word);
    while (at < lex->bytes && is_blank(lex->source[at]))
        at++;
    *out_sign = sign_at(lex, at);
    at += *out_sign != '\0';
    return looking_at(lex, at, "%}") ? at + 2 : 0;
}

/* After "{% raw %}": text up to "{% endraw %}". */
static void lex_raw(lexer *lex, size_t end, char sign)
{
    size_t begin, at, close;
    char inner, outer;

    skip_to(lex, end);
    if (sign == '-')
        skip_blanks(lex);
    begin = lex->at;
    lex->line_starts = false;
    for (at = begin; at < lex->bytes; at++) {
        if (!looking_at(lex, at, "{%"))
            continue;
        inner = sign_at(lex, at + 2);
        close = word_tag_end(lex, at + 2 + (inner != '\0'), "endraw", &outer);
        if (close) {
            add_text(lex, begin, cut_right(lex, begin, at, inner, false));
            close_tag(lex, close, outer, false);
            return;
        }
    }
    fail(lex, false, "{% raw %} without {% endraw %}");
}

/* --- Inside of a tag ------------------------------------------------------------------------ */

static bool is_word_byte(char byte)
{
    return byte == '_' || (byte >= 'a' && byte <= 'z') || (byte >= 'A' && byte <= 'Z');
}

static bool is_digit(char byte)
{
    return byte >= '0' && byte <= '9';
}

static void lex_word(lexer *lex)
{
    size_t begin = lex->at, at = begin;
    sp_token *token = add(lex, SP_LEX_WORD);

    while (at < lex->bytes && (is_word_byte(lex->source[at]) || is_digit(lex->source[at])))
        at++;
    token->text = lex->source + begin;
    token->bytes = at - begin;
    lex->at = at;
}

static void lex_number(lexer *lex)
{
    sp_token *token = add(lex, SP_LEX_NUMBER);
    const char *text = lex->source + lex->at;
    size_t n = strspn(text, "0123456789");
    char next = text[n];

    if (next == '.' && is_digit(text[n + 1])) {
        token->is_real = true;
        n += 1 + strspn(text + n + 1, "0123456789");
        next = text[n];
    }
    if (is_word_byte(next) || (text[0] == '0' && n > 1 && !token->is_real)) {
        fail(lex, true, "a number that is no plain decimal one");
        return;
    }
    if (token->is_real)
        token->real = strtod(text, NULL);
    else if (n > 18)
        fail(lex, true, "an integer of more than 18 digits");
    else
        token->integer = strtoll(text, NULL, 10);
    lex->at += n;
}

static size_t put_code(char *out, uint32_t code)
{
    if (code < 0x80) {
        out[0] = (char)code;
        return 1;
    }
    if (code < 0x800) {
        out[0] = (char)(0xc0 | code >> 6);
        out[1] = (char)(0x80 | (code & 63));
        return 2;
    }
    if (code < 0x10000) {
        out[0] = (char)(0xe0 | code >> 12);
        out[1] = (char)(0x80 | (code >> 6 & 63));
        out[2] = (char)(0x80 | (code & 63));
        return 3;
    }
    out[0] = (char)(0xf0 | code >> 18);
    out[1] = (char)(0x80 | (code >> 12 & 63));
    out[2] = (char)(0x80 | (code >> 6 & 63));
    out[3] = (char)(0x80 | (code & 63));
    return 4;
}

/* "\x41", "\u00e9", "\U0001f600": `n` hexadecimal digits at `at`. */
static size_t put_hex(lexer *lex, size_t at, size_t n, char *out)
{
    uint32_t code = 0;

    for (size_t i = 0; i < n; i++) {
        const char *digits = "0123456789abcdef", *found = NULL;
        char byte = at + i < lex->bytes ? lex->source[at + i] : '\0';

        if (byte >= 'A' && byte <= 'F')
            byte = (char)(byte + 32);
        found = byte ? strchr(digits, byte) : NULL;
        if (!found) {
            fail(lex, false, "an escape with too few hexadecimal digits");
            return 0;
        }
        code = code << 4 | (uint32_t)(found - digits);
    }
    if (code > 0x10ffff || (code >= 0xd800 && code < 0xe000) || code == 0) {
        fail(lex, true, "an escape that is no character, or NUL");
        return 0;
    }
    return put_code(out, code);
}

/* The escape after a backslash at `at`. Returns its length, and writes to `out` what it means,
 * which is never longer. */
static size_t lex_escape(lexer *lex, size_t at, char *out, size_t *out_n)
{
    static const char from[] = "ntrabfv\\'\"", to[] = "\n\t\r\a\b\f\v\\'\"";
    char byte = at < lex->bytes ? lex->source[at] : '\0';
    const char *simple = byte ? strchr(from, byte) : NULL;
    size_t digits = byte == 'x' ? 2 : byte == 'u' ? 4 : byte == 'U' ? 8 : 0;

    if (simple) {
        out[0] = to[simple - from];
        *out_n = 1;
        return 1;
    }
    if (digits) {
        *out_n = put_hex(lex, at + 1, digits, out);
        return 1 + digits;
    }
    if (byte == '\n') {
        *out_n = 0;
        return 1;
    }
    if (is_digit(byte) || byte == 'N')
        fail(lex, true, "an octal or named escape in a string");
    out[0] = '\\'; /* an unknown escape stays as it is */
    *out_n = 1;
    return 0;
}

static void lex_string(lexer *lex)
{
    char quote = lex->source[lex->at];
    size_t at = lex->at + 1, n = 0, n_escape;
    sp_token *token = add(lex, SP_LEX_STRING);
    const char *end;
    char *text;

    for (end = lex->source + at; *end != quote; end += *end == '\\' ? 2 : 1)
        if (end >= lex->source + lex->bytes || (*end == '\\' && end[1] == '\0')) {
            fail(lex, false, "a string that does not end");
            return;
        }
    text = sp_arena_take(lex->arena, (size_t)(end - lex->source) - at + 4, 1);
    if (!text) {
        lex->failed = sp_template_fail_memory(lex->error, lex->arena, lex->subject);
        return;
    }
    while (at < (size_t)(end - lex->source) && lex->failed == SP_OK) {
        if (lex->source[at] != '\\') {
            text[n++] = lex->source[at++];
            continue;
        }
        at += 1 + lex_escape(lex, at + 1, text + n, &n_escape);
        n += n_escape;
    }
    token->text = text;
    token->bytes = n;
    skip_to(lex, (size_t)(end - lex->source) + 1);
}

static const struct {
    const char *text;
    sp_op op;
} operators[] = {
    /* longer ones first */
    {"//", SP_OP_FLOOR_DIVIDE}, {"**", SP_OP_POWER},        {"==", SP_OP_EQUAL},
    {"!=", SP_OP_UNEQUAL},      {"<=", SP_OP_LESS_EQUAL},   {">=", SP_OP_GREATER_EQUAL},
    {"+", SP_OP_ADD},           {"-", SP_OP_SUBTRACT},      {"*", SP_OP_MULTIPLY},
    {"/", SP_OP_DIVIDE},        {"%", SP_OP_MODULO},        {"~", SP_OP_JOIN},
    {"<", SP_OP_LESS},          {">", SP_OP_GREATER},       {".", SP_OP_DOT},
    {",", SP_OP_COMMA},         {":", SP_OP_COLON},         {"|", SP_OP_PIPE},
    {"=", SP_OP_ASSIGN},        {"(", SP_OP_PAREN_OPEN},    {")", SP_OP_PAREN_CLOSE},
    {"[", SP_OP_BRACKET_OPEN},  {"]", SP_OP_BRACKET_CLOSE}, {"{", SP_OP_BRACE_OPEN},
    {"}", SP_OP_BRACE_CLOSE},
};

/* Keeps count of brackets; the parser finds out whether they match. */
static void lex_operator(lexer *lex, int *depth)
{
    for (size_t i = 0; i < sizeof operators / sizeof *operators; i++) {
        if (!looking_at(lex, lex->at, operators[i].text))
            continue;
        add(lex, SP_LEX_OP)->op = operators[i].op;
        lex->at += strlen(operators[i].text);
        if (strchr("([{", *operators[i].text) && ++*depth > BRACKETS_MAX)
            fail(lex, true, "brackets are nested too deep");
        if (strchr(")]}", *operators[i].text) && --*depth < 0)
            fail(lex, false, "a bracket is closed that was not opened");
        return;
    }
    fail(lex, (unsigned char)lex->source[lex->at] >= 0x80, "an unexpected character in a tag");
}

/* The end of a tag at `at`: its bytes, or 0. */
static size_t tag_end(const lexer *lex, bool is_print, char *out_sign)
{
    const char *end = is_print ? "}}" : "%}";
    char sign = sign_at(lex, lex->at);

    *out_sign = '\0';
    if (looking_at(lex, lex->at, end))
        return 2;
    if (!sign || (is_print && sign == '+') || !looking_at(lex, lex->at + 1, end))
        return 0;
    *out_sign = sign;
    return 3;
}

static void lex_inside(lexer *lex, bool is_print)
{
    int depth = 0;
    char sign;
    size_t n;

    while (lex->failed == SP_OK) {
        skip_blanks(lex);
        if (lex->at >= lex->bytes) {
            fail(lex, false, "a tag that does not end");
            return;
        }
        if (depth == 0 && (n = tag_end(lex, is_print, &sign)) != 0) {
            add(lex, is_print ? SP_LEX_PRINT_END : SP_LEX_TAG_END);
            close_tag(lex, lex->at + n, sign, is_print);
            return;
        }
        if (is_word_byte(lex->source[lex->at]))
            lex_word(lex);
        else if (is_digit(lex->source[lex->at]))
            lex_number(lex);
        else if (lex->source[lex->at] == '"' || lex->source[lex->at] == '\'')
            lex_string(lex);
        else
            lex_operator(lex, &depth);
    }
}

/* --- All of it ------------------------------------------------------------------------------ */

static size_t unify_newlines(char *source, size_t bytes)
{
    size_t n = 0;

    for (size_t i = 0; i < bytes; i++) {
        if (source[i] == '\r') {
            source[n++] = '\n';
            i += i + 1 < bytes && source[i + 1] == '\n';
        } else {
            source[n++] = source[i];
        }
    }
    if (n > 0 && source[n - 1] == '\n') /* the last newline of a file is not the template's */
        n--;
    source[n] = '\0';
    return n;
}

/* A tag and the text before it. */
static void lex_tag(lexer *lex)
{
    size_t begin = lex->at, tag = find_tag(lex), raw_end;
    char kind = tag < lex->bytes ? lex->source[tag + 1] : '\0', sign, raw_sign;

    if (!kind) {
        add_text(lex, begin, tag);
        skip_to(lex, tag);
        return;
    }
    sign = sign_at(lex, tag + 2);
    add_text(lex, begin, cut_right(lex, begin, tag, sign, kind == '{'));
    skip_to(lex, tag + 2 + (sign != '\0'));
    if (kind == '#') {
        lex_comment(lex);
        return;
    }
    if (kind == '%' && (raw_end = word_tag_end(lex, lex->at, "raw", &raw_sign)) != 0) {
        lex_raw(lex, raw_end, raw_sign);
        return;
    }
    add(lex, kind == '{' ? SP_LEX_PRINT_BEGIN : SP_LEX_TAG_BEGIN);
    lex_inside(lex, kind == '{');
}

sp_status sp_template_lex(sp_arena *arena, char *source, size_t bytes, const char *subject,
                          sp_token_list *out_list, sp_error *error)
{
    lexer lex = {.arena = arena,
                 .source = source,
                 .bytes = unify_newlines(source, bytes),
                 .line = 1,
                 .line_starts = true,
                 .subject = subject,
                 .error = error};

    while (lex.at < lex.bytes && lex.failed == SP_OK)
        lex_tag(&lex);
    add(&lex, SP_LEX_END);
    *out_list = (sp_token_list){lex.tokens, lex.n};
    return lex.failed;
}
