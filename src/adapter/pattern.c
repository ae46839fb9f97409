#include "adapter/pattern.h"

#include "adapter/reason.h"
#include "base/alloc.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <stdio.h>
#include <string.h>

#define TEXT_BYTES_MAX 16384
#define REPEAT_MAX     1000
/*
 * Steps of one match. Ordinary patterns take some tens, one that begins with ".*" two or three
 * hundred on the path of an expert; one that needs more is tried again with STEPS_FACTOR times as
 * many. A match is charged what its tries were allowed, at most about four times what it took.
 */
#define MATCH_STEPS_FIRST 320
#define STEPS_FACTOR      2
#define MATCH_STEPS_MAX   200000
#define DEPTH_MAX         64

struct sp_pattern {
    sp_pattern_form form;
    char *text;                 /* a copy, for errors and plain matching */
    bool plain;                 /* characters and "." only: compared directly */
    const char *field;          /* static storage */
    int64_t *steps_left;        /* borrowed; NULL: no limit besides that of one match */
    pcre2_general_context *own; /* this and the rest: NULL for a plain one */
    pcre2_match_context *limits;
    pcre2_code *code;
    pcre2_match_data *result;
};

/* ---- the syntax of patterns
 * ------------------------------------------------------------------- */

/* The state of the syntax check. */
typedef struct scan {
    const char *text;
    size_t at;
    int depth;
    bool repeatable; /* the last item can be repeated */
    bool look[DEPTH_MAX];
    const char *fault;
} scan;

static bool fail(scan *s, const char *fault)
{
    s->fault = fault;
    return false;
}

static bool is_plain_byte(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
           (c != '\0' && strchr("_-/:,;=@#%&~<>!\"' ", c));
}

/* An escape, at the backslash. `in_class`: \b would be a backspace there. */
static bool scan_escape(scan *s, bool in_class)
{
    char c = s->text[s->at + 1];

    if (c == '\0' || !strchr(".-_/dDwWsSbB[](){}*+?|^$\\", c))
        return fail(s, "an escape that is not supported");
    if ((c == 'b' || c == 'B') && in_class)
        return fail(s, "an escape that is not supported in a class");
    s->repeatable = c != 'b' && c != 'B';
    s->at += 2;
    return true;
}

static bool scan_class(scan *s)
{
    s->at++;
    if (s->text[s->at] == '^')
        s->at++;
    if (s->text[s->at] == ']')
        return fail(s, "an empty class");
    while (s->text[s->at] != ']') {
        char c = s->text[s->at];
        bool twice = c != '\0' && s->text[s->at + 1] == c;

        if (c == '\0')
            return fail(s, "a class that does not end");
        if (c == '\\') {
            if (!scan_escape(s, true))
                return false;
            continue;
        }
        if (!is_plain_byte(c) && !strchr(".*+?()|$", c))
            return fail(s, "a character that is not supported in a class");
        if (twice && strchr("-&~|", c))
            return fail(s, "a doubled operator in a class");
        s->at++;
    }
    s->at++;
    s->repeatable = true;
    return true;
}

/* Digits, at least one; false when there are none or the number is too large. */
static bool scan_number(scan *s, int *out_number)
{
    int number = 0;
    size_t start = s->at;

    while (s->text[s->at] >= '0' && s->text[s->at] <= '9') {
        number = number * 10 + (s->text[s->at++] - '0');
        if (number > REPEAT_MAX)
            return false;
    }
    *out_number = number;
    return s->at > start;
}

/* "*", "+", "?", "{m}", "{m,}", "{m,n}", each followed by a "?" if lazy. */
static bool scan_repetition(scan *s)
{
    if (!s->repeatable)
        return fail(s, "a repetition of nothing, or of a repetition");
    if (s->text[s->at] == '{') {
        int low, high;

        s->at++;
        if (!scan_number(s, &low))
            return fail(s, "a repetition that is not supported");
        if (s->text[s->at] == ',') {
            s->at++;
            if (s->text[s->at] != '}' && (!scan_number(s, &high) || high < low))
                return fail(s, "a repetition that is not supported");
        }
        if (s->text[s->at] != '}')
            return fail(s, "a repetition that is not supported");
    }
    s->at++;
    if (s->text[s->at] == '?')
        s->at++;
    s->repeatable = false;
    return true;
}

static bool scan_open(scan *s)
{
    bool look = false;

    if (s->depth >= DEPTH_MAX)
        return fail(s, "groups nested too deeply");
    s->at++;
    if (s->text[s->at] == '?') {
        char kind = s->text[s->at + 1];

        if (kind != ':' && kind != '=' && kind != '!')
            return fail(s, "a group of a kind that is not supported");
        look = kind != ':';
        s->at += 2;
    }
    s->look[s->depth++] = look;
    s->repeatable = false;
    return true;
}

static bool scan_close(scan *s)
{
    if (s->depth == 0)
        return fail(s, "a parenthesis that was not opened");
    s->repeatable = !s->look[--s->depth];
    s->at++;
    return true;
}

static bool scan_one(scan *s)
{
    char c = s->text[s->at];

    switch (c) {
    case '\\':
        return scan_escape(s, false);
    case '[':
        return scan_class(s);
    case '(':
        return scan_open(s);
    case ')':
        return scan_close(s);
    case '*':
    case '+':
    case '?':
    case '{':
        return scan_repetition(s);
    case '|':
    case '^':
    case '$':
        s->repeatable = false;
        s->at++;
        return true;
    default:
        if (c != '.' && !is_plain_byte(c))
            return fail(s, "a character that is not supported");
        s->repeatable = true;
        s->at++;
        return true;
    }
}

static sp_status check_text(const char *text, const char *field, sp_error *error)
{
    scan s = {.text = text};

    if (strlen(text) > TEXT_BYTES_MAX)
        return sp_refuse(error, SP_REASON_UNSUPPORTED_PATTERN, field, TEXT_BYTES_MAX,
                         "a pattern of %s is longer than %d bytes", field, TEXT_BYTES_MAX);
    while (text[s.at] != '\0' && scan_one(&s))
        ;
    if (!s.fault && s.depth > 0)
        s.fault = "a parenthesis that is not closed";
    if (s.fault)
        return sp_refuse(error, SP_REASON_UNSUPPORTED_PATTERN, field, (int64_t)s.at,
                         "the pattern \"%.150s\" of %s has %s (byte %zu)", text, field, s.fault,
                         s.at);
    return SP_OK;
}

/* ---- compiling ------------------------------------------------------------------------------- */

static void *allocate(PCRE2_SIZE bytes, void *user)
{
    (void)user;
    return sp_malloc(bytes);
}

static void deallocate(void *memory, void *user)
{
    (void)user;
    sp_free(memory);
}

static bool is_plain(const char *text)
{
    for (const char *c = text; *c != '\0'; c++) {
        if (*c != '.' && !is_plain_byte(*c))
            return false;
    }
    return *text != '\0';
}

static sp_status compile_text(sp_pattern *pattern, const char *text, sp_error *error)
{
    pcre2_compile_context *context = pcre2_compile_context_create(pattern->own);
    int code = 0;
    PCRE2_SIZE at = 0;

    if (context)
        pattern->code = pcre2_compile((PCRE2_SPTR)text, PCRE2_ZERO_TERMINATED, PCRE2_NEVER_UTF,
                                      &code, &at, context);
    pcre2_compile_context_free(context);
    if (!context || (!pattern->code && code == PCRE2_ERROR_HEAP_FAILED))
        return sp_fail_memory(error, strlen(text), "a pattern");
    if (!pattern->code && code == PCRE2_ERROR_NOMEMORY)
        return sp_fail_memory(error, strlen(text), "a pattern");
    if (!pattern->code)
        return sp_refuse(error, SP_REASON_UNSUPPORTED_PATTERN, pattern->field, (int64_t)at,
                         "the pattern \"%.150s\" of %s cannot be read (code %d)", pattern->text,
                         pattern->field, code);
    return SP_OK;
}

static sp_status compile(sp_pattern *pattern, sp_error *error)
{
    bool whole = pattern->form == SP_PATTERN_WHOLE;
    size_t bytes = strlen(pattern->text) + sizeof "\\A(?:.*\\.)?(?:)\\z";
    char *text = sp_malloc(bytes);
    sp_status status;

    if (!text)
        return sp_fail_memory(error, bytes, "a pattern");
    snprintf(text, bytes, "\\A%s(?:%s)\\z", whole ? "" : "(?:.*\\.)?", pattern->text);
    pattern->own = pcre2_general_context_create(allocate, deallocate, NULL);
    if (!pattern->own) {
        sp_free(text);
        return sp_fail_memory(error, bytes, "a pattern");
    }
    status = compile_text(pattern, text, error);
    sp_free(text);
    if (status != SP_OK)
        return status;
    pattern->limits = pcre2_match_context_create(pattern->own);
    pattern->result = pcre2_match_data_create(1, pattern->own);
    if (!pattern->limits || !pattern->result)
        return sp_fail_memory(error, bytes, "a pattern");
    return SP_OK;
}

sp_status sp_pattern_create(const char *text, sp_pattern_form form, const char *field,
                            int64_t *steps_left, sp_pattern **out_pattern, sp_error *error)
{
    sp_pattern *pattern;
    sp_status status = check_text(text, field, error);

    if (status != SP_OK)
        return status;
    pattern = sp_calloc(1, sizeof *pattern);
    if (!pattern)
        return sp_fail_memory(error, sizeof *pattern, "a pattern");
    pattern->form = form;
    pattern->field = field;
    pattern->steps_left = steps_left;
    pattern->plain = is_plain(text);
    pattern->text = sp_strdup(text);
    if (!pattern->text)
        status = sp_fail_memory(error, strlen(text) + 1, "a pattern");
    else if (!pattern->plain)
        status = compile(pattern, error);
    if (status != SP_OK) {
        sp_pattern_destroy(pattern);
        return status;
    }
    *out_pattern = pattern;
    return SP_OK;
}

void sp_pattern_destroy(sp_pattern *pattern)
{
    if (!pattern)
        return;
    pcre2_match_data_free(pattern->result);
    pcre2_match_context_free(pattern->limits);
    pcre2_code_free(pattern->code);
    pcre2_general_context_free(pattern->own);
    sp_free(pattern->text);
    sp_free(pattern);
}

/* ---- matching -------------------------------------------------------------------------------- */

/* Characters and dots, where a dot matches any character; compared from the end. */
static bool match_plain(const sp_pattern *pattern, const char *path, size_t n)
{
    size_t length = strlen(pattern->text);
    const char *tail = path + n - length;

    if (length > n || (length < n && pattern->form == SP_PATTERN_WHOLE))
        return false;
    if (length < n && tail[-1] != '.')
        return false;
    for (size_t i = length; i-- > 0;) {
        if (pattern->text[i] != '.' && pattern->text[i] != tail[i])
            return false;
    }
    return true;
}

/* The result of pcre2_match within the limits; PCRE2_ERROR_MATCHLIMIT beyond them. */
static int match_within_limits(sp_pattern *pattern, const char *path, size_t n)
{
    uint32_t steps = MATCH_STEPS_FIRST;

    for (;;) {
        int code;

        if (pattern->steps_left && *pattern->steps_left <= 0)
            return PCRE2_ERROR_MATCHLIMIT;
        pcre2_set_match_limit(pattern->limits, steps);
        code =
            pcre2_match(pattern->code, (PCRE2_SPTR)path, n, 0, 0, pattern->result, pattern->limits);
        if (pattern->steps_left)
            *pattern->steps_left -= steps;
        if (code != PCRE2_ERROR_MATCHLIMIT || steps == MATCH_STEPS_MAX)
            return code;
        steps = steps < MATCH_STEPS_MAX / STEPS_FACTOR ? steps * STEPS_FACTOR : MATCH_STEPS_MAX;
    }
}

sp_status sp_pattern_match(sp_pattern *pattern, const char *path, size_t n, bool *out_matches,
                           sp_error *error)
{
    int code;

    if (pattern->plain) {
        *out_matches = match_plain(pattern, path, n);
        return SP_OK;
    }
    code = match_within_limits(pattern, path, n);
    if (code == PCRE2_ERROR_NOMEMORY)
        return sp_fail_memory(error, n, "matching a pattern");
    if (code < 0 && code != PCRE2_ERROR_NOMATCH)
        return sp_refuse(error, SP_REASON_UNSUPPORTED_PATTERN, pattern->field, -1,
                         "the pattern \"%.150s\" of %s takes too long to match%s", pattern->text,
                         pattern->field,
                         pattern->steps_left && *pattern->steps_left <= 0
                             ? " together with the config's other patterns"
                             : "");
    *out_matches = code >= 0;
    return SP_OK;
}
