#include "grammar/compile.h"

#include "base/error.h"
#include "base/json.h"
#include "grammar/calls.h"
#include "grammar/ebnf.h"
#include "grammar/regex.h"
#include "grammar/schema.h"

#include <string.h>

#define THINK_OPEN  "<think>"
#define THINK_CLOSE "</think>"

/* ---- forms --------------------------------------------------------------------------------- */

static sp_status malformed(sp_error *error, const char *what)
{
    return sp_fail(error, SP_ERR_INPUT, SP_GRAMMAR_MALFORMED, NULL, -1, "%s", what);
}

static sp_status parse(const sp_grammar_source *source, const char *what, json_t **out_root,
                       sp_error *error)
{
    return sp_json_parse(source->text, source->bytes, what, SP_GRAMMAR_MALFORMED, NULL, out_root,
                         error);
}

static sp_status make_schema(sp_schema_maker *maker, const sp_grammar_source *source, int32_t from,
                             int32_t to, sp_error *error)
{
    json_t *root = NULL;
    sp_status status = parse(source, "the schema", &root, error);

    if (status != SP_OK)
        return status;
    sp_net_call(&maker->net, from, sp_schema_rule(maker, root, "#"), to);
    status = sp_schema_make_all(maker, root);
    json_decref(root);
    return status;
}

static sp_status make_choice(sp_schema_maker *maker, const sp_grammar_source *source, int32_t from,
                             int32_t to, sp_error *error)
{
    json_t *root = NULL;
    sp_status status = parse(source, "the choice", &root, error);

    for (size_t i = 0; status == SP_OK && i < json_array_size(root); i++) {
        const json_t *one = json_array_get(root, i);

        if (!json_is_string(one))
            status = malformed(error, "a choice is not a list of texts");
        else
            sp_net_nothing(
                &maker->net,
                sp_net_literal(&maker->net, from, json_string_value(one), json_string_length(one)),
                to);
    }
    if (status == SP_OK && json_array_size(root) == 0)
        status = malformed(error, "a choice is not a list of texts");
    json_decref(root);
    return status;
}

static sp_status make_calls(sp_schema_maker *maker, const sp_grammar_source *source, int32_t from,
                            int32_t to, sp_error *error)
{
    json_t *root = NULL;
    sp_status status = parse(source, "the tools", &root, error);

    if (status == SP_OK)
        status = sp_calls_make(maker, root, from, to, error);
    json_decref(root);
    return status;
}

static sp_status make_pattern(sp_schema_maker *maker, const sp_grammar_source *source, int32_t from,
                              int32_t to, sp_error *error)
{
    int32_t rule;
    sp_status status = sp_regex_add(&maker->net, source->text, source->bytes, SP_REGEX_WHOLE,
                                    &maker->pattern_steps, &rule, error);

    if (status == SP_OK)
        sp_net_call(&maker->net, from, rule, to);
    return status;
}

static sp_status make_rules(sp_schema_maker *maker, const sp_grammar_source *source, int32_t from,
                            int32_t to, sp_error *error)
{
    int32_t rule;
    sp_status status =
        sp_ebnf_add(&maker->net, source->text, source->bytes, &maker->pattern_steps, &rule, error);

    if (status == SP_OK)
        sp_net_call(&maker->net, from, rule, to);
    return status;
}

static sp_status make(sp_schema_maker *maker, const sp_grammar_source *source, int32_t from,
                      int32_t to, sp_error *error)
{
    switch (source->kind) {
    case SP_GRAMMAR_JSON_OBJECT:
        sp_net_call(&maker->net, from, sp_json_rule(maker, SP_JSON_OBJECT), to);
        return maker->status;
    case SP_GRAMMAR_JSON_SCHEMA:
        return make_schema(maker, source, from, to, error);
    case SP_GRAMMAR_REGEX:
        return make_pattern(maker, source, from, to, error);
    case SP_GRAMMAR_CHOICE:
        return make_choice(maker, source, from, to, error);
    case SP_GRAMMAR_CALLS:
        return make_calls(maker, source, from, to, error);
    case SP_GRAMMAR_EBNF:
        return make_rules(maker, source, from, to, error);
    }
    return malformed(error, "this kind of a grammar is not known");
}

/* ---- thoughts ------------------------------------------------------------------------------ */

/* Any bytes from `at` up to the first </think>, and the newlines after it; the node after them. */
static int32_t add_thought(sp_net_builder *net, int32_t at)
{
    static const char close[] = THINK_CLOSE;
    int32_t nodes[sizeof close], after, newline;

    nodes[0] = at;
    for (size_t i = 1; i < sizeof close; i++)
        nodes[i] = sp_net_node_add(net);
    for (size_t i = 0; i + 1 < sizeof close; i++)
        for (int byte = 0; byte < 256; byte++) {
            int32_t to = byte == close[i] ? nodes[i + 1] : byte == '<' ? nodes[1] : nodes[0];

            sp_net_bytes(net, nodes[i], (uint8_t)byte, (uint8_t)byte, to);
        }
    after = sp_net_node_add(net);
    newline = sp_net_text(net, nodes[sizeof close - 1], "\n", 1);
    sp_net_nothing(net, nodes[sizeof close - 1], after);
    sp_net_nothing(net, newline, after);
    sp_net_bytes(net, newline, '\n', '\n', after);
    return after;
}

/* The node at which the grammar itself begins. */
static int32_t add_beginning(sp_net_builder *net, sp_grammar_thought thought, int32_t start)
{
    int32_t begin = sp_net_node_add(net);

    if (thought != SP_GRAMMAR_THINKS)
        sp_net_nothing(net, start, begin);
    if (thought == SP_GRAMMAR_MAY_THINK)
        start = sp_net_text(net, start, THINK_OPEN, strlen(THINK_OPEN));
    if (thought != SP_GRAMMAR_NO_THOUGHT) {
        int32_t rule = sp_net_rule(net);

        sp_net_end(net, add_thought(net, sp_net_start(net, rule)));
        sp_net_call(net, start, rule, begin);
    }
    return begin;
}

sp_status sp_grammar_compile(const sp_vocabulary *vocabulary, const sp_grammar_source *source,
                             sp_grammar **out_grammar, sp_error *error)
{
    sp_schema_maker maker = sp_schema_maker_start(error);
    int32_t start, end;
    sp_status status;
    sp_net net;

    if (source->bytes > SP_GRAMMAR_TEXT_BYTES_MAX)
        return sp_fail(error, SP_ERR_TOO_LARGE, SP_GRAMMAR_TOO_LARGE, NULL, -1,
                       "%zu bytes of a schema, pattern or grammar; at most %zu are read",
                       source->bytes, SP_GRAMMAR_TEXT_BYTES_MAX);
    start = sp_net_start(&maker.net, sp_net_rule(&maker.net));
    end = sp_net_node_add(&maker.net);
    sp_net_end(&maker.net, end);
    start = add_beginning(&maker.net, source->thought, start);
    status = make(&maker, source, start, end, error);
    if (status == SP_OK)
        status = sp_net_finish(&maker.net, &net, error);
    sp_schema_maker_free(&maker);
    if (status != SP_OK)
        return status;
    return sp_grammar_create(&net, vocabulary, out_grammar, error);
}
