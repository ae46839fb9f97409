/* Filters, as Jinja defines them; tojson as transformers does (JSON as it is, no HTML escapes). */
#include "chat/jinja/builtins.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static sp_value text_of(const sp_str *text)
{
    return sp_value_text(text);
}

/* A text argument, or `otherwise` when it was not given. */
static const sp_str *text_or(sp_render *render, const sp_value *argument, const sp_str *otherwise)
{
    return sp_given(argument) ? sp_value_str(render, argument) : otherwise;
}

static bool truth_or(const sp_value *argument, bool otherwise)
{
    return sp_given(argument) ? sp_value_truth(argument) : otherwise;
}

/* --- Texts ---------------------------------------------------------------------------------- */

static sp_value filter_trim(sp_render *render, const sp_value *operand, const sp_value *arguments)
{
    const sp_str *text = sp_value_str(render, operand);
    size_t begin, end;

    sp_str_strip(text, text_or(render, &arguments[0], NULL), true, true, &begin, &end);
    return text_of(sp_str_slice(render, text, begin, end));
}

static sp_value filter_lower(sp_render *render, const sp_value *operand, const sp_value *arguments)
{
    (void)arguments;
    return text_of(sp_str_case(render, sp_value_str(render, operand), SP_CASE_LOWER));
}

static sp_value filter_upper(sp_render *render, const sp_value *operand, const sp_value *arguments)
{
    (void)arguments;
    return text_of(sp_str_case(render, sp_value_str(render, operand), SP_CASE_UPPER));
}

static sp_value filter_capitalize(sp_render *render, const sp_value *operand,
                                  const sp_value *arguments)
{
    (void)arguments;
    return text_of(sp_str_case(render, sp_value_str(render, operand), SP_CASE_CAPITALIZE));
}

/* Unlike str.title(): a word starts after white space, hyphens and opening brackets only. */
static sp_value filter_title(sp_render *render, const sp_value *operand, const sp_value *arguments)
{
    const sp_str *text = sp_value_str(render, operand);
    sp_build build = {0};
    size_t begin = 0;

    (void)arguments;
    for (size_t at = 1; at <= text->bytes && sp_render_spend(render, 1); at++) {
        bool border =
            at == text->bytes ||
            ((text->data[at - 1] != '\0' && strchr("-({[< \t\n\v\f\r", text->data[at - 1])));

        if (!border)
            continue;
        sp_build_add(
            render, &build,
            sp_str_case(render, sp_str_slice(render, text, begin, at), SP_CASE_CAPITALIZE));
        begin = at;
    }
    return text_of(sp_build_finish(render, &build));
}

static sp_value filter_replace(sp_render *render, const sp_value *operand,
                               const sp_value *arguments)
{
    int64_t count = -1;

    if (!sp_given(&arguments[0]) || !sp_given(&arguments[1]))
        sp_render_fail(render, "replace needs two texts");
    if (sp_given(&arguments[2]) && arguments[2].kind != SP_VALUE_NONE &&
        !sp_value_integer(&arguments[2], &count))
        sp_render_fail(render, "replace: the count is no integer");
    return text_of(sp_str_replace(render, sp_value_str(render, operand),
                                  sp_value_str(render, &arguments[0]),
                                  sp_value_str(render, &arguments[1]), count));
}

static const sp_str *blanks(sp_render *render, int64_t n)
{
    sp_build build = {0};

    if (n > 1000)
        sp_render_fail(render, "an indentation of more than 1000");
    for (int64_t i = 0; i < n && sp_render_spend(render, 1); i++)
        sp_build_add_data(render, &build, " ", 1);
    return sp_build_finish(render, &build);
}

static const sp_str *indentation(sp_render *render, const sp_value *argument, int64_t otherwise)
{
    int64_t width = otherwise;

    if (sp_given(argument) && argument->kind == SP_VALUE_TEXT)
        return argument->as.text;
    if (sp_given(argument) && !sp_value_integer(argument, &width))
        sp_render_fail(render, "the indentation is neither a text nor an integer");
    return blanks(render, width);
}

static sp_value filter_indent(sp_render *render, const sp_value *operand, const sp_value *arguments)
{
    const sp_str newline = {.data = "\n", .bytes = 1};
    const sp_str *indent = indentation(render, &arguments[0], 4);
    bool first = truth_or(&arguments[1], false), blank = truth_or(&arguments[2], false);
    sp_value lines =
        sp_str_lines(render, sp_str_join(render, sp_value_str(render, operand), &newline));
    sp_list list = sp_value_items(render, &lines);
    sp_build build = {0};

    for (size_t i = 0; i < list.n; i++) {
        const sp_str *line = list.items[i].as.text;

        if (i > 0)
            sp_build_add(render, &build, &newline);
        if (i == 0 ? first : (blank || line->bytes > 0))
            sp_build_add(render, &build, indent);
        sp_build_add(render, &build, line);
    }
    return text_of(sp_build_finish(render, &build));
}

static sp_value filter_string(sp_render *render, const sp_value *operand, const sp_value *arguments)
{
    (void)arguments;
    return text_of(sp_value_str(render, operand));
}

static sp_value filter_tojson(sp_render *render, const sp_value *operand, const sp_value *arguments)
{
    static const sp_str comma = {.data = ",", .bytes = 1}, comma_blank = {.data = ", ", .bytes = 2},
                        colon = {.data = ": ", .bytes = 2};
    sp_json_style style = {.ensure_ascii = truth_or(&arguments[0], false),
                           .sort_keys = truth_or(&arguments[3], false),
                           .key_separator = &colon};
    sp_build build = {0};

    if (sp_given(&arguments[1]) && arguments[1].kind != SP_VALUE_NONE)
        style.indent = indentation(render, &arguments[1], 0);
    style.item_separator = style.indent ? &comma : &comma_blank;
    if (sp_given(&arguments[2]) && arguments[2].kind != SP_VALUE_NONE) {
        sp_list pair = sp_value_items(render, &arguments[2]);

        if (pair.n != 2) {
            sp_render_fail(render, "tojson: separators are two texts");
            return sp_value_undefined(NULL);
        }
        style.item_separator = sp_value_str(render, &pair.items[0]);
        style.key_separator = sp_value_str(render, &pair.items[1]);
    }
    sp_value_to_json(render, &build, operand, &style);
    return text_of(sp_build_finish(render, &build));
}

/* --- Numbers -------------------------------------------------------------------------------- */

/* A text as a plain number: what int() and float() take, but for names of infinities. */
static bool read_number(sp_render *render, const sp_value *value, double *out_real,
                        int64_t *out_integer, bool *out_is_integer)
{
    const sp_str *text = value->as.text;
    size_t begin, end, n;
    char *copy, *stop;

    sp_str_strip(text, NULL, true, true, &begin, &end);
    n = end - begin;
    copy = n > 0 && n < 64 ? sp_render_take(render, n + 1, 1) : NULL;
    if (!copy)
        return false;
    memcpy(copy, text->data + begin, n);
    if (strspn(copy, "0123456789+-.eE") != n)
        return false;
    *out_real = strtod(copy, &stop);
    if (*stop != '\0' || !isfinite(*out_real))
        return false;
    *out_is_integer = strspn(copy, "0123456789+-") == n && fabs(*out_real) < 1e18;
    *out_integer = *out_is_integer ? strtoll(copy, NULL, 10) : 0;
    return true;
}

static sp_value filter_int(sp_render *render, const sp_value *operand, const sp_value *arguments)
{
    sp_value otherwise = sp_given(&arguments[0]) ? arguments[0] : sp_value_int(0);
    double real = NAN;
    int64_t integer = 0;
    bool is_integer = false;

    if (sp_given(&arguments[1]))
        sp_render_unsupported(render, "int with a base");
    if (sp_value_integer(operand, &integer))
        return sp_value_int(integer);
    if (operand->kind == SP_VALUE_REAL)
        real = operand->as.real;
    else if (operand->kind != SP_VALUE_TEXT ||
             !read_number(render, operand, &real, &integer, &is_integer))
        return otherwise;
    if (is_integer)
        return sp_value_int(integer);
    return fabs(real) < 9e18 ? sp_value_int((int64_t)real) : otherwise;
}

static sp_value filter_float(sp_render *render, const sp_value *operand, const sp_value *arguments)
{
    double real = 0.0;
    int64_t integer;
    bool is_integer;

    if (sp_value_is_number(operand))
        return sp_value_real(sp_value_number(operand));
    if (operand->kind == SP_VALUE_TEXT &&
        read_number(render, operand, &real, &integer, &is_integer))
        return sp_value_real(real);
    return sp_given(&arguments[0]) ? arguments[0] : sp_value_real(0.0);
}

static sp_value filter_abs(sp_render *render, const sp_value *operand, const sp_value *arguments)
{
    int64_t integer;

    (void)arguments;
    if (sp_value_integer(operand, &integer))
        return sp_value_int(integer < 0 && integer > INT64_MIN ? -integer : integer);
    if (operand->kind == SP_VALUE_REAL)
        return sp_value_real(fabs(operand->as.real));
    sp_render_fail(render, "abs of %s", sp_value_kind_name(operand));
    return sp_value_undefined(NULL);
}

/* --- Values --------------------------------------------------------------------------------- */

static sp_value filter_safe(sp_render *render, const sp_value *operand, const sp_value *arguments)
{
    sp_str *text = sp_render_take(render, 1, sizeof *text);

    (void)arguments;
    if (!text)
        return sp_value_undefined(NULL);
    *text = *sp_value_str(render, operand);
    text->safe = true;
    return sp_value_text(text);
}

static sp_value filter_default(sp_render *render, const sp_value *operand,
                               const sp_value *arguments)
{
    bool absent = operand->kind == SP_VALUE_UNDEFINED ||
                  (truth_or(&arguments[1], false) && !sp_value_truth(operand));

    (void)render;
    if (!absent)
        return *operand;
    return sp_given(&arguments[0]) ? arguments[0] : sp_value_text(&sp_str_empty);
}

static sp_value filter_length(sp_render *render, const sp_value *operand, const sp_value *arguments)
{
    (void)arguments;
    switch (operand->kind) {
    case SP_VALUE_UNDEFINED:
        return sp_value_int(0);
    case SP_VALUE_TEXT:
        sp_render_spend(render, operand->as.text->bytes / 64);
        return sp_value_int((int64_t)sp_str_length(operand->as.text));
    case SP_VALUE_LIST:
        return sp_value_int((int64_t)operand->as.list->n);
    case SP_VALUE_MAP:
        return sp_value_int((int64_t)operand->as.map->n);
    default:
        sp_render_fail(render, "%s has no length", sp_value_kind_name(operand));
        return sp_value_undefined(NULL);
    }
}

static sp_value filter_list(sp_render *render, const sp_value *operand, const sp_value *arguments)
{
    sp_list list = sp_value_items(render, operand);

    (void)arguments;
    return sp_value_list(render, list.items, list.n, false);
}

static sp_value filter_items(sp_render *render, const sp_value *operand, const sp_value *arguments)
{
    sp_items items = {0};

    (void)arguments;
    if (operand->kind == SP_VALUE_UNDEFINED)
        return sp_items_list(render, &items, false);
    if (operand->kind != SP_VALUE_MAP) {
        sp_render_fail(render, "items of %s", sp_value_kind_name(operand));
        return sp_value_undefined(NULL);
    }
    for (size_t i = 0; i < operand->as.map->n && sp_render_spend(render, 1); i++) {
        sp_value pair[2] = {sp_value_text(operand->as.map->keys[i]), operand->as.map->values[i]};

        sp_items_add(render, &items, sp_value_list(render, pair, 2, true));
    }
    return sp_items_list(render, &items, false);
}

static sp_value filter_first(sp_render *render, const sp_value *operand, const sp_value *arguments)
{
    sp_list list = sp_value_items(render, operand);

    (void)arguments;
    return list.n > 0 ? list.items[0] : sp_value_undefined(NULL);
}

static sp_value filter_last(sp_render *render, const sp_value *operand, const sp_value *arguments)
{
    sp_list list = sp_value_items(render, operand);

    (void)arguments;
    return list.n > 0 ? list.items[list.n - 1] : sp_value_undefined(NULL);
}

static sp_value filter_reverse(sp_render *render, const sp_value *operand,
                               const sp_value *arguments)
{
    sp_list list;
    sp_items items = {0};

    (void)arguments;
    if (operand->kind == SP_VALUE_TEXT)
        return text_of(sp_str_reversed(render, operand->as.text));
    list = sp_value_items(render, operand);
    for (size_t i = list.n; i > 0 && sp_render_spend(render, 1); i--)
        sp_items_add(render, &items, list.items[i - 1]);
    return sp_items_list(render, &items, false);
}

/* A part of a path that is an index. */
static bool path_index(const sp_str *part, int64_t *out_index)
{
    *out_index = 0;
    for (size_t i = 0; i < part->bytes; i++) {
        if (part->data[i] < '0' || part->data[i] > '9' || i == 9)
            return false;
        *out_index = *out_index * 10 + (part->data[i] - '0');
    }
    return part->bytes > 0;
}

/* An attribute by its path, "function.name"; what is not there is undefined. */
static sp_value by_path(sp_render *render, sp_value value, const sp_value *path)
{
    size_t begin = 0, end;
    const sp_str dot = {.data = ".", .bytes = 1}, *text;

    if (path->kind != SP_VALUE_TEXT)
        return sp_value_item(render, &value, path);
    for (text = path->as.text; render->failed == SP_OK; begin = end + 1) {
        sp_value part;
        int64_t index;

        end = sp_str_find(text, &dot, begin);
        part =
            sp_value_text(sp_str_slice(render, text, begin, end == SIZE_MAX ? text->bytes : end));
        if (path_index(part.as.text, &index))
            part = sp_value_int(index);
        value = sp_value_item(render, &value, &part);
        if (end == SIZE_MAX)
            break;
    }
    return value;
}

static sp_value filter_join(sp_render *render, const sp_value *operand, const sp_value *arguments)
{
    const sp_str *between = text_or(render, &arguments[0], &sp_str_empty);
    sp_list list = sp_value_items(render, operand);
    sp_build build = {0};

    for (size_t i = 0; i < list.n && sp_render_spend(render, 1); i++) {
        sp_value item = list.items[i];

        if (sp_given(&arguments[1]) && arguments[1].kind != SP_VALUE_NONE)
            item = by_path(render, item, &arguments[1]);
        if (i > 0)
            sp_build_add(render, &build, between);
        sp_build_add(render, &build, sp_value_str(render, &item));
    }
    return text_of(sp_build_finish(render, &build));
}

/* --- Order ---------------------------------------------------------------------------------- */

static sp_value sort_key(sp_render *render, const sp_value *item, const sp_value *path,
                         bool case_sensitive)
{
    sp_value key = *item;

    if (sp_given(path) && path->kind != SP_VALUE_NONE)
        key = by_path(render, key, path);
    if (key.kind == SP_VALUE_TEXT && !case_sensitive)
        return text_of(sp_str_case(render, key.as.text, SP_CASE_LOWER));
    return key;
}

/* Stable, by insertion: the lists of a conversation are short, and every comparison is a step. */
static sp_value sorted(sp_render *render, const sp_list *list, const sp_value *path,
                       bool case_sensitive, bool reverse)
{
    sp_value *items = sp_render_take(render, list->n, sizeof *items);
    sp_value *keys = sp_render_take(render, list->n, sizeof *keys);

    for (size_t i = 0; items && keys && i < list->n; i++) {
        sp_value key = sort_key(render, &list->items[i], path, case_sensitive);
        size_t at = i;

        for (; at > 0 && sp_render_spend(render, 1); at--) {
            int order = sp_value_order(render, &keys[at - 1], &key);

            if (reverse ? order >= 0 : order <= 0)
                break;
            items[at] = items[at - 1];
            keys[at] = keys[at - 1];
        }
        items[at] = list->items[i];
        keys[at] = key;
    }
    return items && keys ? sp_value_list(render, items, list->n, false) : sp_value_undefined(NULL);
}

static sp_value filter_sort(sp_render *render, const sp_value *operand, const sp_value *arguments)
{
    sp_list list = sp_value_items(render, operand);

    return sorted(render, &list, &arguments[2], truth_or(&arguments[1], false),
                  truth_or(&arguments[0], false));
}

static sp_value filter_dictsort(sp_render *render, const sp_value *operand,
                                const sp_value *arguments)
{
    sp_value items = filter_items(render, operand, arguments);
    sp_list list = sp_value_items(render, &items);
    bool by_value = sp_given(&arguments[1]) && arguments[1].kind == SP_VALUE_TEXT &&
                    sp_str_is(arguments[1].as.text, "value");
    const sp_value path = sp_value_int(by_value);

    return sorted(render, &list, &path, truth_or(&arguments[0], false),
                  truth_or(&arguments[2], false));
}

static sp_value filter_unique(sp_render *render, const sp_value *operand, const sp_value *arguments)
{
    sp_list list = sp_value_items(render, operand);
    sp_items keys = {0}, items = {0};

    for (size_t i = 0; i < list.n && render->failed == SP_OK; i++) {
        sp_value key =
            sort_key(render, &list.items[i], &arguments[1], truth_or(&arguments[0], false));
        bool seen = false;

        for (size_t k = 0; k < keys.n && !seen && sp_render_spend(render, 1); k++)
            seen = sp_value_equal(render, &keys.items[k], &key);
        if (seen)
            continue;
        sp_items_add(render, &keys, key);
        sp_items_add(render, &items, list.items[i]);
    }
    return sp_items_list(render, &items, false);
}

/* The item of which none is below (`sign` 1) or above (-1); the first of equal ones. */
static sp_value extreme(sp_render *render, const sp_value *operand, const sp_value *arguments,
                        int sign)
{
    sp_list list = sp_value_items(render, operand);
    sp_value best = sp_value_undefined(NULL), best_key = best;

    for (size_t i = 0; i < list.n && render->failed == SP_OK; i++) {
        sp_value key =
            sort_key(render, &list.items[i], &arguments[1], truth_or(&arguments[0], false));

        if (i > 0 && sp_value_order(render, &key, &best_key) * sign >= 0)
            continue;
        best = list.items[i];
        best_key = key;
    }
    return best;
}

static sp_value filter_min(sp_render *render, const sp_value *operand, const sp_value *arguments)
{
    return extreme(render, operand, arguments, 1);
}

static sp_value filter_max(sp_render *render, const sp_value *operand, const sp_value *arguments)
{
    return extreme(render, operand, arguments, -1);
}

/* --- Mapping -------------------------------------------------------------------------------- */

static const sp_value *keyword(const sp_args *args, const char *name)
{
    for (size_t i = 0; i < args->n_keywords; i++)
        if (sp_str_is(args->keywords[i], name))
            return &args->keyword_values[i];
    return NULL;
}

static int32_t named(sp_render *render, const sp_value *name,
                     int32_t (*find)(const char *text, size_t bytes), const char *what)
{
    int32_t which =
        name->kind == SP_VALUE_TEXT ? find(name->as.text->data, name->as.text->bytes) : -1;

    if (which < 0)
        sp_render_unsupported(render, "%s that is not known: %.*s", what,
                              SP_STR_SHOWN(sp_value_str(render, name)));
    return which;
}

/* What is falsy, such as none, has nothing to map or to choose from. */
static sp_list items_or_none(sp_render *render, const sp_value *operand)
{
    return sp_value_truth(operand) ? sp_value_items(render, operand) : (sp_list){0};
}

/* map("upper"), map("replace", "a", "b"), map(attribute="name", default="") */
static sp_value mapper_map(sp_render *render, const sp_value *operand, const sp_args *args)
{
    sp_list list = items_or_none(render, operand);
    const sp_value *path = keyword(args, "attribute"), *otherwise = keyword(args, "default");
    sp_args rest = *args;
    sp_items items = {0};
    int32_t which = -1;

    if (args->n == 0 && !path)
        sp_render_fail(render, "map needs a filter or an attribute");
    if (!path && args->n > 0) {
        which = named(render, &args->positional[0], sp_filter_find, "a filter");
        rest.positional++;
        rest.n--;
    }
    for (size_t i = 0; i < list.n && sp_render_enter(render); i++) {
        sp_value item = path ? by_path(render, list.items[i], path)
                             : sp_filter_call(render, which, &list.items[i], &rest);

        if (path && otherwise && item.kind == SP_VALUE_UNDEFINED)
            item = *otherwise;
        sp_items_add(render, &items, item);
        render->depth--;
    }
    return sp_items_list(render, &items, false);
}

/* The four that keep some items: by a test of the item, or of an attribute of it. */
static sp_value keep(sp_render *render, const sp_value *operand, const sp_args *args,
                     bool by_attribute, bool wanted)
{
    sp_list list = items_or_none(render, operand);
    sp_args rest = *args;
    sp_items items = {0};
    int32_t which = -1;
    size_t n_named = by_attribute ? 1 : 0;

    if (args->n < n_named) {
        sp_render_fail(render, "an attribute's name is missing");
        return sp_value_undefined(NULL);
    }
    if (args->n > n_named) {
        which = named(render, &args->positional[n_named], sp_test_find, "a test");
        rest.positional += n_named + 1;
        rest.n -= n_named + 1;
    }
    for (size_t i = 0; i < list.n && sp_render_spend(render, 1); i++) {
        sp_value item =
            by_attribute ? by_path(render, list.items[i], &args->positional[0]) : list.items[i];
        bool is = which >= 0 ? sp_test_call(render, which, &item, &rest) : sp_value_truth(&item);

        if (is == wanted)
            sp_items_add(render, &items, list.items[i]);
    }
    return sp_items_list(render, &items, false);
}

static sp_value mapper_select(sp_render *render, const sp_value *operand, const sp_args *args)
{
    return keep(render, operand, args, false, true);
}

static sp_value mapper_reject(sp_render *render, const sp_value *operand, const sp_args *args)
{
    return keep(render, operand, args, false, false);
}

static sp_value mapper_selectattr(sp_render *render, const sp_value *operand, const sp_args *args)
{
    return keep(render, operand, args, true, true);
}

static sp_value mapper_rejectattr(sp_render *render, const sp_value *operand, const sp_args *args)
{
    return keep(render, operand, args, true, false);
}

/* --- The tables ----------------------------------------------------------------------------- */

static const sp_filter filters[] = {
    {"abs", filter_abs, {0}},
    {"capitalize", filter_capitalize, {0}},
    {"count", filter_length, {0}},
    {"d", filter_default, {"default_value", "boolean"}},
    {"default", filter_default, {"default_value", "boolean"}},
    {"dictsort", filter_dictsort, {"case_sensitive", "by", "reverse"}},
    {"first", filter_first, {0}},
    {"float", filter_float, {"default"}},
    {"indent", filter_indent, {"width", "first", "blank"}},
    {"int", filter_int, {"default", "base"}},
    {"items", filter_items, {0}},
    {"join", filter_join, {"d", "attribute"}},
    {"last", filter_last, {0}},
    {"length", filter_length, {0}},
    {"list", filter_list, {0}},
    {"lower", filter_lower, {0}},
    {"max", filter_max, {"case_sensitive", "attribute"}},
    {"min", filter_min, {"case_sensitive", "attribute"}},
    {"replace", filter_replace, {"old", "new", "count"}},
    {"reverse", filter_reverse, {0}},
    {"safe", filter_safe, {0}},
    {"sort", filter_sort, {"reverse", "case_sensitive", "attribute"}},
    {"string", filter_string, {0}},
    {"title", filter_title, {0}},
    {"tojson", filter_tojson, {"ensure_ascii", "indent", "separators", "sort_keys"}},
    {"trim", filter_trim, {"chars"}},
    {"unique", filter_unique, {"case_sensitive", "attribute"}},
    {"upper", filter_upper, {0}},
};
#define N_FILTERS (int32_t)(sizeof filters / sizeof *filters)

static const sp_mapper mappers[] = {
    {"map", mapper_map},       {"reject", mapper_reject},         {"rejectattr", mapper_rejectattr},
    {"select", mapper_select}, {"selectattr", mapper_selectattr},
};
#define N_MAPPERS (int32_t)(sizeof mappers / sizeof *mappers)

static const char *filter_name(int32_t which)
{
    return which < N_FILTERS ? filters[which].name : mappers[which - N_FILTERS].name;
}

int32_t sp_filter_find(const char *name, size_t bytes)
{
    const sp_str text = {.data = name, .bytes = bytes};

    for (int32_t i = 0; i < N_FILTERS + N_MAPPERS; i++)
        if (sp_str_is(&text, filter_name(i)))
            return i;
    return -1;
}

sp_value sp_filter_call(sp_render *render, int32_t which, const sp_value *operand,
                        const sp_args *args)
{
    sp_value arguments[SP_PARAMETERS_MAX];

    if (render->failed != SP_OK || which < 0)
        return sp_value_undefined(NULL);
    if (which >= N_FILTERS)
        return mappers[which - N_FILTERS].call(render, operand, args);
    if (!sp_args_sort(render, filters[which].name, filters[which].parameters, args, arguments))
        return sp_value_undefined(NULL);
    return filters[which].call(render, operand, arguments);
}
