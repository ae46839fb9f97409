#include "engine/sampling/stop.h"

#include "base/alloc.h"
#include "base/error.h"

#include <string.h>

/*
 * Each string is matched on its own (Knuth, Morris, Pratt): `matched` is the length of its longest
 * prefix that the text ends with, which is exactly what must be held back for it.
 */
typedef struct {
    const char *text;
    size_t bytes;
    size_t *border; /* [bytes] longest proper prefix of text[0 .. i] that is also its suffix */
    size_t matched;
} pattern;

struct sp_stop {
    pattern *patterns;
    size_t n;
    size_t n_text; /* bytes seen */
    size_t shown;
    bool found;
};

/* The length matched after one more byte; the pattern was not complete before. */
static size_t advance(const pattern *p, size_t matched, char byte)
{
    while (matched > 0 && p->text[matched] != byte)
        matched = p->border[matched - 1];
    return p->text[matched] == byte ? matched + 1 : 0;
}

static void fill_borders(pattern *p)
{
    p->border[0] = 0;
    for (size_t i = 1; i < p->bytes; i++)
        p->border[i] = advance(p, p->border[i - 1], p->text[i]);
}

static sp_status check_strings(const size_t *bytes, size_t n, size_t *out_total, sp_error *error)
{
    size_t total = 0;

    if (n > SP_STOP_STRINGS_MAX)
        return sp_fail(error, SP_ERR_INPUT, NULL, "stop", (int64_t)n,
                       "%zu stop strings; at most %d are watched", n, SP_STOP_STRINGS_MAX);
    for (size_t i = 0; i < n; i++) {
        if (bytes[i] == 0)
            return sp_fail(error, SP_ERR_INPUT, NULL, "stop", (int64_t)i,
                           "stop string %zu is empty", i);
        total += bytes[i];
    }
    *out_total = total;
    return SP_OK;
}

/* One block: the watch, its patterns, their border tables, their text. */
sp_status sp_stop_create(const char *const *strings, const size_t *bytes, size_t n,
                         sp_stop **out_stop, sp_error *error)
{
    size_t total = 0, size;
    sp_stop *stop;
    size_t *border;
    char *text;
    sp_status status = check_strings(bytes, n, &total, error);

    if (status != SP_OK)
        return status;
    size = sizeof *stop + n * sizeof(pattern) + total * (sizeof *border + 1);
    stop = sp_calloc(1, size);
    if (!stop)
        return sp_fail_memory(error, size, "stop strings");
    stop->patterns = (pattern *)(stop + 1);
    stop->n = n;
    border = (size_t *)(stop->patterns + n);
    text = (char *)(border + total);
    for (size_t i = 0; i < n; i++) {
        memcpy(text, strings[i], bytes[i]);
        stop->patterns[i] = (pattern){text, bytes[i], border, 0};
        fill_borders(&stop->patterns[i]);
        text += bytes[i];
        border += bytes[i];
    }
    *out_stop = stop;
    return SP_OK;
}

void sp_stop_destroy(sp_stop *stop)
{
    sp_free(stop);
}

/* Advances every pattern by one byte; true when one is complete. *out_held: the longest match. */
static bool push_byte(sp_stop *stop, char byte, size_t *out_held)
{
    size_t held = 0, complete = 0;

    for (size_t i = 0; i < stop->n; i++) {
        pattern *p = &stop->patterns[i];

        p->matched = advance(p, p->matched, byte);
        if (p->matched > held)
            held = p->matched;
        if (p->matched == p->bytes && p->bytes > complete)
            complete = p->bytes;
    }
    *out_held = complete ? complete : held;
    return complete > 0;
}

bool sp_stop_push(sp_stop *stop, const char *part, size_t bytes, size_t *out_shown)
{
    size_t held = stop->n_text - stop->shown;

    for (size_t i = 0; i < bytes && !stop->found; i++) {
        stop->n_text++;
        stop->found = push_byte(stop, part[i], &held);
    }
    stop->shown = stop->n_text - held;
    *out_shown = stop->shown;
    return stop->found;
}
