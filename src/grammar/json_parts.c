/*
 * json_parts.c: the parts of JSON that need no schema. Numbers have so many digits that every
 * reader takes them; an escape by number is no half of a pair and not U+0000.
 */
#include "grammar/regex.h"
#include "grammar/schema.h"

#include <string.h>

#define HEX "[0-9a-fA-F]"
#define UNICODE_ESCAPE                                                     \
    "u([1-9a-cA-CefEF]" HEX "{3}|0[1-9a-fA-F]" HEX "{2}|00[1-9a-fA-F]" HEX \
    "|000[1-9a-fA-F]|[dD][0-7]" HEX "{2}|[dD][89abAB]" HEX "{2}\\\\u[dD][c-fC-F]" HEX "{2})"
#define PLAIN "[^\"\\\\\\x00-\\x1f]"

static const char *const patterns[SP_JSON_PARTS] = {
    [SP_JSON_BLANK] = "( |\\n {0,16})?",
    [SP_JSON_STRING] = "\"(" PLAIN "|\\\\([\"\\\\/bfnrt]|" UNICODE_ESCAPE "))*\"",
    [SP_JSON_CHARACTER] = PLAIN "|\\\\[\"\\\\/bfnrt]",
    [SP_JSON_NAME_REST] = PLAIN "*\"",
    [SP_JSON_INTEGER] = "-?(0|[1-9][0-9]{0,17})",
    [SP_JSON_NUMBER] = "-?(0|[1-9][0-9]{0,14})(\\.[0-9]{1,15})?([eE][+-]?[0-9]{1,2})?",
};

/* The same where values stand between tags, which "</" could end: there it is "<\/". */
#define UNTAGGED "[^\"\\\\<\\x00-\\x1f]"
#define ESCAPE   "\\\\([\"\\\\/bfnrt]|" UNICODE_ESCAPE ")"

static const char *const tagged_patterns[SP_JSON_PARTS] = {
    [SP_JSON_STRING] = "\"(" UNTAGGED "|<+[^\"\\\\</\\x00-\\x1f]|<*" ESCAPE ")*<*\"",
    [SP_JSON_CHARACTER] = UNTAGGED "|\\\\[\"\\\\/bfnrt]",
    [SP_JSON_NAME_REST] = UNTAGGED "*\"",
};

/* Between two brackets: any number of items, with commas between. `item_end` follows the items,
 * which begin at `item`. */
static void add_brackets(sp_schema_maker *maker, int32_t start, const char brackets[2],
                         int32_t item, int32_t item_end)
{
    sp_net_builder *net = &maker->net;
    int32_t blank = sp_json_rule(maker, SP_JSON_BLANK);
    int32_t open = sp_net_text(net, start, &brackets[0], 1), first = sp_net_node_add(net);
    int32_t close = sp_net_node_add(net), comma = sp_net_text(net, item_end, ",", 1);

    sp_net_call(net, open, blank, first);
    sp_net_nothing(net, first, item);
    sp_net_nothing(net, first, close);
    sp_net_call(net, item_end, blank, close);
    sp_net_call(net, comma, blank, item);
    sp_net_end(net, sp_net_text(net, close, &brackets[1], 1));
}

static void add_array(sp_schema_maker *maker, int32_t start)
{
    sp_net_builder *net = &maker->net;
    int32_t item = sp_net_node_add(net), item_end = sp_net_node_add(net);

    sp_net_call(net, item, sp_json_rule(maker, SP_JSON_VALUE), item_end);
    add_brackets(maker, start, "[]", item, item_end);
}

static void add_object(sp_schema_maker *maker, int32_t start)
{
    sp_net_builder *net = &maker->net;
    int32_t item = sp_net_node_add(net), item_end = sp_net_node_add(net);
    int32_t named = sp_net_node_add(net), value = sp_net_node_add(net);

    sp_net_call(net, item, sp_json_rule(maker, SP_JSON_STRING), named);
    sp_net_call(net, sp_net_text(net, named, ":", 1), sp_json_rule(maker, SP_JSON_BLANK), value);
    sp_net_call(net, value, sp_json_rule(maker, SP_JSON_VALUE), item_end);
    add_brackets(maker, start, "{}", item, item_end);
}

static void add_value(sp_schema_maker *maker, int32_t start)
{
    static const char *const words[] = {"true", "false", "null"};
    static const sp_json_part parts[] = {SP_JSON_STRING, SP_JSON_NUMBER, SP_JSON_OBJECT,
                                         SP_JSON_ARRAY};
    sp_net_builder *net = &maker->net;
    int32_t end = sp_net_node_add(net);

    sp_net_end(net, end);
    for (int i = 0; i < 3; i++)
        sp_net_nothing(net, sp_net_text(net, start, words[i], strlen(words[i])), end);
    for (int i = 0; i < 4; i++)
        sp_net_call(net, start, sp_json_rule(maker, parts[i]), end);
}

int32_t sp_json_rule(sp_schema_maker *maker, sp_json_part part)
{
    const char *pattern = maker->tagged ? tagged_patterns[part] : NULL;
    int32_t rule;

    if (maker->parts[part] > 0 || sp_schema_failed(maker))
        return maker->parts[part] > 0 ? maker->parts[part] - 1 : 0;
    pattern = pattern ? pattern : patterns[part];
    if (pattern) {
        rule = sp_schema_pattern(maker, pattern, strlen(pattern), false, "#", NULL);
        maker->parts[part] = rule + 1;
        return rule;
    }
    /* The number comes first: these three are made of each other. */
    rule = sp_net_rule(&maker->net);
    maker->parts[part] = rule + 1;
    if (part == SP_JSON_VALUE)
        add_value(maker, sp_net_start(&maker->net, rule));
    else if (part == SP_JSON_OBJECT)
        add_object(maker, sp_net_start(&maker->net, rule));
    else
        add_array(maker, sp_net_start(&maker->net, rule));
    return rule;
}
