/*
 * schema_number.c: numbers between two bounds, as patterns of their digits.
 */
#include "grammar/schema.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#define INTEGER_MAX INT64_C(999999999999999999) /* 18 digits */
#define BOUND_MAX   999999999 /* of a number with a fraction: with it 15 digits, which are exact */
#define FRACTION    "(\\.[0-9]{1,6})?"
#define FRACTION_ABOVE                                                                    \
    "\\.([1-9][0-9]{0,5}|0[1-9][0-9]{0,4}|00[1-9][0-9]{0,3}|000[1-9][0-9]{0,2}|0000[1-9]" \
    "[0-9]?|00000[1-9])"
#define FRACTION_NONE "(\\.0{1,6})?"

typedef struct bound {
    double value;
    bool there, exclusive;
} bound;

/* ---- digits -------------------------------------------------------------------------------- */

static bool is_all(const char *digits, int n, char digit)
{
    for (int i = 0; i < n; i++)
        if (digits[i] != digit)
            return false;
    return true;
}

/* The n digits from low to high, as texts. */
static void add_digits(sp_text *out, const char *low, const char *high, int n)
{
    static const char nines[] = "99999999999999999999", zeros[] = "00000000000000000000";

    if (n == 0)
        return;
    if (is_all(low, n, '0') && is_all(high, n, '9')) {
        sp_text_format(out, "[0-9]{%d}", n);
        return;
    }
    if (*low == *high) {
        sp_text_format(out, "%c", *low);
        add_digits(out, low + 1, high + 1, n - 1);
        return;
    }
    sp_text_format(out, "(%c", *low);
    add_digits(out, low + 1, nines, n - 1);
    if (*high - *low > 1)
        sp_text_format(out, "|[%c-%c][0-9]{%d}", *low + 1, *high - 1, n - 1);
    sp_text_format(out, "|%c", *high);
    add_digits(out, zeros, high + 1, n - 1);
    sp_text_add(out, ")");
}

/* A choice of the whole numbers low .. high, 0 <= low <= high. */
static void add_whole(sp_text *out, int64_t low, int64_t high)
{
    int64_t power = 1, first = 0;
    bool any = false;

    sp_text_add(out, "(");
    for (int n = 1; n <= 18; n++, first = power) {
        char from[24], to[24];
        int64_t last = power * 10 - 1;

        power *= 10;
        if (high < first || low > last)
            continue;
        snprintf(from, sizeof from, "%lld", (long long)(low > first ? low : first));
        snprintf(to, sizeof to, "%lld", (long long)(high < last ? high : last));
        sp_text_add(out, any ? "|" : "");
        add_digits(out, from, to, n);
        any = true;
    }
    sp_text_add(out, ")");
}

/* ---- whole numbers ------------------------------------------------------------------------- */

/* The smallest whole number that a lower bound allows, and the largest of an upper one. */
static int64_t least_of(const bound *low)
{
    double least = low->exclusive ? floor(low->value) + 1 : ceil(low->value);

    return !low->there || least < -(double)INTEGER_MAX ? -INTEGER_MAX
           : least > (double)INTEGER_MAX               ? INT64_MAX
                                                       : (int64_t)least;
}

static int64_t most_of(const bound *high)
{
    double most = high->exclusive ? ceil(high->value) - 1 : floor(high->value);

    return !high->there || most > (double)INTEGER_MAX ? INTEGER_MAX
           : most < -(double)INTEGER_MAX              ? INT64_MIN
                                                      : (int64_t)most;
}

/* False: there is none. */
static bool add_integers(sp_text *out, const bound *low, const bound *high)
{
    int64_t least = least_of(low), most = most_of(high);
    bool negative = least < 0;

    if (least > most)
        return false;
    if (negative) {
        sp_text_add(out, "-");
        add_whole(out, most < 0 ? -most : 1, -least);
    }
    if (most < 0)
        return true;
    sp_text_add(out, negative && most >= 0 ? "|" : "");
    add_whole(out, least > 0 ? least : 0, most);
    return true;
}

/* ---- numbers with a fraction ----------------------------------------------------------------- */

/* Numbers of 0 or more between two whole bounds; false: there is none. */
static bool add_magnitudes(sp_text *out, bound low, bound high)
{
    int64_t least = (int64_t)low.value, most = high.there ? (int64_t)high.value : BOUND_MAX + 1;
    int64_t first = least + low.exclusive;
    bool any = false;

    if (least > most || (least == most && (low.exclusive || high.exclusive)))
        return false;
    if (first <= most - 1) {
        add_whole(out, first, most - 1);
        sp_text_add(out, FRACTION);
        any = true;
    }
    if (low.exclusive && least < most) {
        sp_text_add(out, any ? "|" : "");
        add_whole(out, least, least);
        sp_text_add(out, FRACTION_ABOVE);
        any = true;
    }
    if (high.there && !high.exclusive) {
        sp_text_add(out, any ? "|" : "");
        add_whole(out, most, most);
        sp_text_add(out, FRACTION_NONE);
        any = true;
    }
    return any;
}

static bool add_numbers(sp_text *out, const bound *low, const bound *high)
{
    static const bound zero = {.value = 0, .there = true};
    bool any = false;

    if (!low->there || low->value < 0) {
        bound from =
            high->there && high->value <= 0 ? (bound){-high->value, true, high->exclusive} : zero;

        sp_text_add(out, "(-(");
        any = add_magnitudes(out, from, (bound){-low->value, low->there, low->exclusive});
        sp_text_add(out, "))");
        if (!any)
            sp_text_clear(out);
    }
    if (!high->there || high->value >= 0) {
        sp_text positive = {0};

        if (add_magnitudes(&positive, low->there && low->value >= 0 ? *low : zero, *high)) {
            sp_text_format(out, "%s(%s)", any ? "|" : "", positive.data ? positive.data : "");
            any = true;
        }
        out->failed |= positive.failed;
        sp_text_free(&positive);
    }
    return any;
}

/* ---- bounds -------------------------------------------------------------------------------- */

/* One bound out of two keywords: the narrower one, the exclusive one of equal ones. `sign` 1: a
 * lower one, -1: an upper one. */
static bound read_bound(sp_schema_maker *maker, const sp_schema_task *task, const char *inclusive,
                        const char *exclusive, int sign)
{
    const char *const keywords[2] = {inclusive, exclusive};
    bound found = {0};

    for (int i = 0; i < 2; i++) {
        const json_t *value = json_object_get(task->schema, keywords[i]);
        double number = json_number_value(value);

        if (!value)
            continue;
        if (!json_is_number(value))
            sp_schema_refuse(maker, SP_GRAMMAR_MALFORMED, task->path, keywords[i],
                             "is not a number");
        else if (!found.there || sign * number >= sign * found.value)
            found = (bound){number, true, i == 1};
    }
    return found;
}

static void check_whole(sp_schema_maker *maker, const sp_schema_task *task, const bound *one,
                        const char *keyword)
{
    if (one->there && (floor(one->value) < one->value || fabs(one->value) > BOUND_MAX))
        sp_schema_refuse(maker, SP_GRAMMAR_UNSUPPORTED, task->path, keyword,
                         "of a number must be whole and at most %d in size", BOUND_MAX);
}

void sp_schema_add_number(sp_schema_maker *maker, const sp_schema_task *task, bool whole,
                          int32_t start, int32_t end)
{
    bound low = read_bound(maker, task, "minimum", "exclusiveMinimum", 1);
    bound high = read_bound(maker, task, "maximum", "exclusiveMaximum", -1);
    sp_text pattern = {0};
    bool any;

    if (!low.there && !high.there) {
        sp_net_call(&maker->net, start,
                    sp_json_rule(maker, whole ? SP_JSON_INTEGER : SP_JSON_NUMBER), end);
        return;
    }
    if (!whole) {
        check_whole(maker, task, &low, low.exclusive ? "exclusiveMinimum" : "minimum");
        check_whole(maker, task, &high, high.exclusive ? "exclusiveMaximum" : "maximum");
    }
    if (sp_schema_failed(maker))
        return;
    any = whole ? add_integers(&pattern, &low, &high) : add_numbers(&pattern, &low, &high);
    if (pattern.failed)
        sp_schema_no_memory(maker);
    else if (any)
        sp_net_call(&maker->net, start,
                    sp_schema_pattern(maker, pattern.data, pattern.bytes, false, task->path, NULL),
                    end);
    sp_text_free(&pattern);
}
