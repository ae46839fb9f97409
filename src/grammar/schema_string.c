/*
 * schema_string.c: strings: any, of a pattern, of a format, of a length.
 */
#include "grammar/schema.h"

#include <string.h>

#define YEAR_FROM_1 "(000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
#define DAY                                                                                   \
    "((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]" \
    "|1[0-9]|2[0-8]))"
#define TIME                                                                             \
    "([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):" \
    "[0-5][0-9])"
#define BYTE  "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
#define LABEL "[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"

/* A part of each format, as patterns for the whole string. */
static const struct {
    const char *name, *pattern;
} formats[] = {
    {"date", "^" YEAR_FROM_1 "-" DAY "$"},
    {"time", "^" TIME "$"},
    {"date-time", "^" YEAR_FROM_1 "-" DAY "T" TIME "$"},
    {"duration", "^P([0-9]{1,6}D(T[0-9]{1,6}H)?|T([0-9]{1,6}H)?([0-9]{1,6}M)?[0-9]{1,6}S)$"},
    {"email", "^[a-zA-Z0-9_+-]{1,32}(\\.[a-zA-Z0-9_+-]{1,16}){0,2}@[a-zA-Z0-9]([a-zA-Z0-9-]{0,30}"
              "[a-zA-Z0-9])?(\\.[a-zA-Z0-9]([a-zA-Z0-9-]{0,14}[a-zA-Z0-9])?){1,3}$"},
    {"hostname", "^" LABEL "(\\." LABEL "){0,2}$"},
    {"ipv4", "^" BYTE "(\\." BYTE "){3}$"},
    {"uuid", "^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$"},
    {"uri", "^https?://[a-zA-Z0-9]([a-zA-Z0-9-]{0,30}[a-zA-Z0-9])?(\\.[a-zA-Z0-9]([a-zA-Z0-9-]"
            "{0,30}[a-zA-Z0-9])?){0,4}(:[1-9][0-9]{1,3})?(/[a-zA-Z0-9._~-]{0,64}){0,8}$"},
};

int32_t sp_schema_format(sp_schema_maker *maker, const char *path, const json_t *format,
                         bool in_string)
{
    const char *name = json_string_value(format);

    for (size_t i = 0; name && i < sizeof formats / sizeof *formats; i++)
        if (strcmp(formats[i].name, name) == 0)
            return sp_schema_pattern(maker, formats[i].pattern, strlen(formats[i].pattern),
                                     in_string, path, "format");
    sp_schema_refuse(maker, name ? SP_GRAMMAR_UNSUPPORTED : SP_GRAMMAR_MALFORMED, path, "format",
                     "\"%.60s\" is not supported", name ? name : "");
    return 0;
}

static int32_t pattern_rule(sp_schema_maker *maker, const sp_schema_task *task,
                            const json_t *pattern)
{
    if (!json_is_string(pattern)) {
        sp_schema_refuse(maker, SP_GRAMMAR_MALFORMED, task->path, "pattern", "is not a string");
        return 0;
    }
    return sp_schema_pattern(maker, json_string_value(pattern), json_string_length(pattern), true,
                             task->path, "pattern");
}

/* From `least` to `most` characters (-1: any number) between quotes. */
static void add_length(sp_schema_maker *maker, int64_t least, int64_t most, int32_t start,
                       int32_t end)
{
    sp_net_builder *net = &maker->net;
    int32_t character = sp_json_rule(maker, SP_JSON_CHARACTER);
    int32_t at = sp_net_text(net, start, "\"", 1), quote = sp_net_node_add(net);

    for (int64_t i = 0; !sp_schema_failed(maker) && i < (most < 0 ? least : most); i++) {
        int32_t next = sp_net_node_add(net);

        if (i >= least)
            sp_net_nothing(net, at, quote);
        sp_net_call(net, at, character, next);
        at = next;
    }
    if (most < 0)
        sp_net_call(net, at, character, at);
    if (most < 0 || most >= least)
        sp_net_nothing(net, at, quote);
    sp_net_bytes(net, quote, '"', '"', end);
}

void sp_schema_add_string(sp_schema_maker *maker, const sp_schema_task *task, int32_t start,
                          int32_t end)
{
    const json_t *pattern = json_object_get(task->schema, "pattern");
    const json_t *format = json_object_get(task->schema, "format");
    int64_t least = sp_schema_count(maker, task, "minLength", 0);
    int64_t most = sp_schema_count(maker, task, "maxLength", -1);
    bool length = least > 0 || most >= 0;

    if ((pattern != NULL) + (format != NULL) + length > 1)
        sp_schema_refuse(maker, SP_GRAMMAR_UNSUPPORTED, task->path, pattern ? "pattern" : "format",
                         "together with another keyword for strings is not supported");
    if (sp_schema_failed(maker))
        return;
    if (pattern)
        sp_net_call(&maker->net, start, pattern_rule(maker, task, pattern), end);
    else if (format)
        sp_net_call(&maker->net, start, sp_schema_format(maker, task->path, format, true), end);
    else if (length)
        add_length(maker, least, most, start, end);
    else
        sp_net_call(&maker->net, start, sp_json_rule(maker, SP_JSON_STRING), end);
}
