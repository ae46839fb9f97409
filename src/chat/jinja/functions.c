/* Arguments, and the functions that every template can call. */
#include "chat/jinja/builtins.h"

#include <string.h>
#include <time.h>

const sp_str sp_not_given = {.data = "an argument that was not given", .bytes = 30};

bool sp_given(const sp_value *value)
{
    return value->kind != SP_VALUE_UNDEFINED || value->as.why != &sp_not_given;
}

static int parameter_of(const char *const *parameters, const sp_str *name)
{
    for (int i = 0; i < SP_PARAMETERS_MAX && parameters[i]; i++)
        if (sp_str_is(name, parameters[i]))
            return i;
    return -1;
}

bool sp_args_sort(sp_render *render, const char *callee, const char *const *parameters,
                  const sp_args *args, sp_value *out)
{
    size_t n = 0;

    while (n < SP_PARAMETERS_MAX && parameters[n])
        n++;
    if (args->n > n)
        sp_render_fail(render, "%s takes at most %zu arguments", callee, n);
    for (size_t i = 0; i < SP_PARAMETERS_MAX; i++)
        out[i] = i < args->n && i < n ? args->positional[i] : sp_value_undefined(&sp_not_given);
    for (size_t i = 0; i < args->n_keywords && render->failed == SP_OK; i++) {
        int at = parameter_of(parameters, args->keywords[i]);

        if (at < 0)
            sp_render_unsupported(render, "%s(%.*s=)", callee, SP_STR_SHOWN(args->keywords[i]));
        else if (sp_given(&out[at]))
            sp_render_fail(render, "%s got %s twice", callee, parameters[at]);
        else
            out[at] = args->keyword_values[i];
    }
    return render->failed == SP_OK;
}

/* --- Functions ------------------------------------------------------------------------------ */

static bool range_argument(sp_render *render, const sp_value *value, int64_t *out)
{
    if (sp_value_integer(value, out) && *out < ((int64_t)1 << 40) && *out > -((int64_t)1 << 40))
        return true;
    sp_render_fail(render, "range needs integers of a reasonable size");
    return false;
}

static sp_value call_range(sp_render *render, const sp_args *args)
{
    int64_t begin = 0, end = 0, step = 1;
    sp_items items = {0};

    if (args->n_keywords > 0 || args->n < 1 || args->n > 3)
        sp_render_fail(render, "range takes 1 to 3 arguments");
    else if (args->n == 1)
        range_argument(render, &args->positional[0], &end);
    else if (range_argument(render, &args->positional[0], &begin) &&
             range_argument(render, &args->positional[1], &end) && args->n == 3)
        range_argument(render, &args->positional[2], &step);
    if (step == 0)
        sp_render_fail(render, "range with a step of 0");
    if (render->failed != SP_OK)
        return sp_value_undefined(NULL);
    for (; step > 0 ? begin < end : begin > end; begin += step) {
        if (!sp_render_spend(render, 1))
            break;
        sp_items_add(render, &items, sp_value_int(begin));
    }
    return sp_items_list(render, &items, false);
}

/* A mapping of the keywords, on top of a mapping that may be given. */
static sp_map *map_of(sp_render *render, const sp_args *args)
{
    sp_map *map = sp_map_create(render, args->n_keywords + 4);

    if (args->n > 1 || (args->n == 1 && args->positional[0].kind != SP_VALUE_MAP)) {
        sp_render_unsupported(render, "dict or namespace of anything but one mapping");
        return NULL;
    }
    for (size_t i = 0; args->n == 1 && i < args->positional[0].as.map->n; i++)
        sp_map_set(render, map, args->positional[0].as.map->keys[i],
                   args->positional[0].as.map->values[i]);
    for (size_t i = 0; i < args->n_keywords; i++)
        sp_map_set(render, map, args->keywords[i], args->keyword_values[i]);
    return map;
}

static sp_value call_dict(sp_render *render, const sp_args *args)
{
    sp_map *map = map_of(render, args);

    return map ? (sp_value){.kind = SP_VALUE_MAP, .as.map = map} : sp_value_undefined(NULL);
}

static sp_value call_namespace(sp_render *render, const sp_args *args)
{
    sp_map *map = map_of(render, args);

    return map ? (sp_value){.kind = SP_VALUE_NAMESPACE, .as.map = map} : sp_value_undefined(NULL);
}

static sp_value call_raise_exception(sp_render *render, const sp_args *args)
{
    if (args->n == 1 && args->n_keywords == 0)
        sp_render_raise(render, sp_value_str(render, &args->positional[0]));
    else
        sp_render_fail(render, "raise_exception takes one argument");
    return sp_value_undefined(NULL);
}

/* The directives that mean the same in C and in Python, in the C locale. */
static bool known_format(const char *format)
{
    for (; *format; format++)
        if (*format == '%' && (*++format == '\0' || !strchr("aAbBcdHIjmMpSUwWxXyY%", *format)))
            return false;
    return true;
}

static sp_value call_strftime_now(sp_render *render, const sp_args *args)
{
    const sp_str *format;
    char text[256], *copy;
    time_t now = (time_t)render->unix_seconds;
    struct tm parts;

    if (args->n != 1 || args->positional[0].kind != SP_VALUE_TEXT) {
        sp_render_fail(render, "strftime_now takes one string");
        return sp_value_undefined(NULL);
    }
    format = args->positional[0].as.text;
    copy = sp_render_take(render, format->bytes + 1, 1);
    if (!copy || format->bytes == 0)
        return sp_value_text(&sp_str_empty);
    memcpy(copy, format->data, format->bytes);
    if (format->bytes >= 128 || !known_format(copy) || !gmtime_r(&now, &parts)) {
        sp_render_unsupported(render, "strftime_now(\"%.*s\")", SP_STR_SHOWN(format));
        return sp_value_undefined(NULL);
    }
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
    return sp_value_data(render, text, strftime(text, sizeof text, copy, &parts));
#pragma GCC diagnostic pop
}

static const struct {
    const char *name;
    sp_value (*call)(sp_render *render, const sp_args *args);
} functions[] = {
    {"range", call_range},
    {"dict", call_dict},
    {"namespace", call_namespace},
    {"raise_exception", call_raise_exception},
    {"strftime_now", call_strftime_now},
};

int32_t sp_function_find(const char *name, size_t bytes)
{
    const sp_str text = {.data = name, .bytes = bytes};

    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++)
        if (sp_str_is(&text, functions[i].name))
            return (int32_t)i;
    return -1;
}

sp_value sp_function_call(sp_render *render, int32_t which, const sp_args *args)
{
    return functions[which].call(render, args);
}
