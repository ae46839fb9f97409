#include "grammar/calls.h"

#include "base/error.h"

#include <string.h>

#define PARAMETER_OPEN  "<parameter="
#define PARAMETER_CLOSE "</parameter>"

static sp_status malformed(sp_error *error, const char *what)
{
    return sp_fail(error, SP_ERR_INPUT, SP_GRAMMAR_MALFORMED, NULL, -1, "%s", what);
}

static const char *text_of(const json_t *object, const char *name)
{
    const char *text = json_string_value(json_object_get(object, name));

    return text ? text : "";
}

static int32_t add_text(sp_schema_maker *maker, int32_t from, const char *text)
{
    return sp_net_literal(&maker->net, from, text, strlen(text));
}

/* ---- text before a call -------------------------------------------------------------------- */

/* Of `text` [n], of which the last `have` bytes read are a beginning: as much as after `byte`. */
static size_t matched(const char *text, size_t have, char byte)
{
    for (size_t keep = have + 1; keep > 0; keep--) {
        const char *rest = text + have + 1 - keep; /* of what was read, before the byte */

        if (text[keep - 1] == byte && memcmp(text, rest, keep - 1) == 0)
            return keep;
    }
    return 0;
}

/* Any bytes up to the first `open`, and it; the node after it. The output may end at `to` (-1: it
 * may not) before it. */
static int32_t add_free_text(sp_net_builder *net, const char *open, int32_t from, int32_t to)
{
    int32_t nodes[SP_CALLS_OPEN_BYTES_MAX + 1];
    size_t n = strlen(open);

    nodes[0] = from;
    for (size_t i = 1; i <= n; i++)
        nodes[i] = sp_net_node_add(net);
    for (size_t i = 0; i < n; i++) {
        if (to >= 0)
            sp_net_nothing(net, nodes[i], to);
        for (int byte = 0; byte < 256; byte++)
            sp_net_bytes(net, nodes[i], (uint8_t)byte, (uint8_t)byte,
                         nodes[matched(open, i, (char)byte)]);
    }
    return nodes[n];
}

/* ---- values among tags --------------------------------------------------------------------- */

/* One parameter: its schema, and where that is. */
typedef struct parameter {
    const json_t *schema;
    const char *path;
} parameter;

/*
 * Any text up to a line that begins with the closing tag; the text itself may not contain the tag.
 * `from` is the state at the start of a line.
 */
static void add_value_text(sp_net_builder *net, int32_t from, int32_t to)
{
    static const char close[] = PARAMETER_CLOSE;
    enum { N = sizeof close - 1 };
    int32_t inside[N], line[N]; /* the tag's bytes so far, in a line and at a line's beginning */

    line[0] = from;
    inside[0] = sp_net_node_add(net);
    for (int i = 1; i < N; i++) {
        line[i] = sp_net_node_add(net);
        inside[i] = sp_net_node_add(net);
    }
    for (int i = 0; i < N; i++)
        for (int byte = 1; byte < 256; byte++) {
            bool next = byte == close[i];
            int32_t other = byte == '\n' ? line[0] : byte == '<' ? inside[1] : inside[0];
            uint8_t one = (uint8_t)byte;

            sp_net_bytes(net, line[i], one, one, !next ? other : i + 1 < N ? line[i + 1] : to);
            if (!next || i + 1 < N)
                sp_net_bytes(net, inside[i], one, one, next ? inside[i + 1] : other);
        }
}

/* The end of a value's line, and the closing tag. */
static void add_close(sp_schema_maker *maker, int32_t from, int32_t to)
{
    static const char close[] = "\n" PARAMETER_CLOSE;

    sp_net_nothing(&maker->net, sp_net_text(&maker->net, from, close, sizeof close - 1), to);
}

static bool has_type(const json_t *schema, const char *name)
{
    const json_t *type = json_object_get(schema, "type");
    bool has = json_is_string(type) && strcmp(json_string_value(type), name) == 0;

    for (size_t i = 0; i < json_array_size(type); i++) {
        const char *one = json_string_value(json_array_get(type, i));

        has |= one && strcmp(one, name) == 0;
    }
    return has;
}

/* One constant, if it is a text that tags do not change, or null where that may be. */
static bool add_constant(sp_schema_maker *maker, const json_t *schema, const json_t *value,
                         int32_t from, int32_t to)
{
    const char *text = json_string_value(value);
    size_t bytes = json_string_length(value);
    bool null = has_type(schema, "null");

    if (json_is_null(value) && null) {
        text = "null";
        bytes = 4;
    } else if (!text || strstr(text, PARAMETER_CLOSE) || strlen(text) < bytes ||
               (null && strcmp(text, "null") == 0)) {
        return false;
    }
    add_close(maker, sp_net_text(&maker->net, from, text, bytes), to);
    return true;
}

static void add_constants(sp_schema_maker *maker, const parameter *one, const json_t *list,
                          int32_t from, int32_t to)
{
    bool any = false;

    for (size_t i = 0; i < json_array_size(list); i++)
        any |= add_constant(maker, one->schema, json_array_get(list, i), from, to);
    if (!any)
        sp_schema_refuse(maker, SP_GRAMMAR_UNSATISFIABLE, one->path, "enum",
                         "has no text that can be written between tags");
}

static void add_length(sp_schema_maker *maker, const parameter *one, int32_t from, int32_t to)
{
    static const char character[] = "[^<\\n\\x00]";
    const sp_schema_task task = {.schema = one->schema, .path = (char *)(uintptr_t)one->path};
    int64_t least = sp_schema_count(maker, &task, "minLength", 0);
    int64_t most = sp_schema_count(maker, &task, "maxLength", -1);
    int32_t rule =
        sp_schema_pattern(maker, character, sizeof character - 1, false, one->path, "maxLength");
    int32_t close = sp_net_node_add(&maker->net);

    for (int64_t i = 0; !sp_schema_failed(maker) && i < (most < 0 ? least : most); i++) {
        int32_t next = sp_net_node_add(&maker->net);

        if (i >= least)
            sp_net_nothing(&maker->net, from, close);
        sp_net_call(&maker->net, from, rule, next);
        from = next;
    }
    if (most < 0)
        sp_net_call(&maker->net, from, rule, from);
    sp_net_nothing(&maker->net, from, close);
    add_close(maker, close, to);
}

/* A value without quotes. Its schema has been looked at as any other. */
static void add_string(sp_schema_maker *maker, const parameter *one, int32_t from, int32_t to)
{
    const json_t *schema = one->schema, *constant = json_object_get(schema, "const");

    if (constant) {
        if (!add_constant(maker, schema, constant, from, to))
            sp_schema_refuse(maker, SP_GRAMMAR_UNSUPPORTED, one->path, "const",
                             "cannot be written between tags");
    } else if (json_object_get(schema, "enum")) {
        add_constants(maker, one, json_object_get(schema, "enum"), from, to);
    } else if (json_object_get(schema, "pattern")) {
        sp_schema_refuse(maker, SP_GRAMMAR_UNSUPPORTED, one->path, "pattern",
                         "is not supported where a call is written as tags");
    } else if (json_object_get(schema, "format")) {
        int32_t after = sp_net_node_add(&maker->net);

        sp_net_call(&maker->net, from,
                    sp_schema_format(maker, one->path, json_object_get(schema, "format"), false),
                    after);
        add_close(maker, after, to);
    } else if (json_object_get(schema, "minLength") || json_object_get(schema, "maxLength")) {
        add_length(maker, one, from, to);
    } else {
        add_value_text(&maker->net, from, to);
    }
}

/* ---- parameters ---------------------------------------------------------------------------- */

/* `<parameter=NAME>`, a value of the schema (NULL: any text), `</parameter>`, each in a line. */
static void add_parameter(sp_schema_maker *maker, const char *name, const json_t *schema,
                          int32_t from, int32_t to)
{
    sp_net_builder *net = &maker->net;
    int32_t at = sp_net_text(net, from, PARAMETER_OPEN, strlen(PARAMETER_OPEN));
    int32_t close = sp_net_node_add(net);
    sp_text path = {0};

    at = sp_net_text(net, at, name, strlen(name));
    at = sp_net_text(net, at, ">\n", 2);
    sp_schema_path(&path, "#", "properties", name);
    if (strpbrk(name, "<>\n"))
        sp_schema_refuse(maker, SP_GRAMMAR_UNSUPPORTED, path.data ? path.data : "#", NULL,
                         "a parameter of this name cannot be written as a tag");
    if (!schema) {
        add_value_text(net, at, close);
    } else {
        const parameter one = {schema, path.data ? path.data : "#"};
        int32_t rule = sp_schema_rule(maker, schema, one.path), after = sp_net_node_add(net);

        if (has_type(schema, "string")) {
            add_string(maker, &one, at, close);
        } else {
            sp_net_call(net, at, rule, after);
            add_close(maker, after, close);
        }
    }
    sp_net_nothing(net, sp_net_text(net, close, "\n", 1), to);
    sp_text_free(&path);
}

static bool is_required(const json_t *required, const char *name)
{
    for (size_t i = 0; i < json_array_size(required); i++) {
        const char *one = json_string_value(json_array_get(required, i));

        if (one && strcmp(one, name) == 0)
            return true;
    }
    return false;
}

/* What tags keep to of a schema of parameters; the rest of its keywords would not be. */
static void check_parameters(sp_schema_maker *maker, const json_t *parameters)
{
    static const char *const kept[] = {
        "type",  "properties",  "required", "$defs",    "definitions", "additionalProperties",
        "title", "description", "$schema",  "$comment", "default",     "examples"};
    const char *name;
    json_t *value;

    json_object_foreach((json_t *)(uintptr_t)parameters, name, value)
    {
        bool is_kept = strncmp(name, "x-", 2) == 0;

        for (size_t i = 0; i < sizeof kept / sizeof *kept; i++)
            is_kept |= strcmp(name, kept[i]) == 0;
        if (!is_kept)
            sp_schema_refuse(maker, SP_GRAMMAR_UNSUPPORTED, "#", name,
                             "is not supported where a call is written as tags");
    }
}

/* Members that are required come with a text of any kind where nothing is said of them. */
static int32_t add_unnamed(sp_schema_maker *maker, const json_t *parameters, int32_t at)
{
    const json_t *required = json_object_get(parameters, "required");
    const json_t *properties = json_object_get(parameters, "properties");

    for (size_t i = 0; i < json_array_size(required) && !sp_schema_failed(maker); i++) {
        const char *name = json_string_value(json_array_get(required, i));
        int32_t next;

        if (!name || json_object_get(properties, name))
            continue;
        if (json_is_object(json_object_get(parameters, "additionalProperties")))
            sp_schema_refuse(maker, SP_GRAMMAR_UNSUPPORTED, "#", "additionalProperties",
                             "is not supported where a call is written as tags");
        next = sp_net_node_add(&maker->net);
        add_parameter(maker, name, NULL, at, next);
        at = next;
    }
    return at;
}

/* The parameters in the schema's order; without a schema there are none. */
static int32_t add_parameters(sp_schema_maker *maker, const json_t *parameters, int32_t at)
{
    json_t *properties = json_object_get(parameters, "properties"), *schema;
    const char *name;

    check_parameters(maker, parameters);
    json_object_foreach(properties, name, schema)
    {
        int32_t next = sp_net_node_add(&maker->net);

        if (sp_schema_failed(maker))
            return at;
        add_parameter(maker, name, schema, at, next);
        if (!is_required(json_object_get(parameters, "required"), name))
            sp_net_nothing(&maker->net, at, next);
        at = next;
    }
    return add_unnamed(maker, parameters, at);
}

/* ---- calls --------------------------------------------------------------------------------- */

/* The tool's name, as JSON has it between quotes or as it is. */
static int32_t add_name(sp_schema_maker *maker, const char *name, int32_t at)
{
    sp_text escaped = {0};

    if (maker->tagged)
        return add_text(maker, at, name);
    sp_text_json_string(&escaped, name, strlen(name));
    if (escaped.failed)
        sp_schema_no_memory(maker);
    else
        at = sp_net_literal(&maker->net, at, escaped.data + 1, escaped.bytes - 2);
    sp_text_free(&escaped);
    return at;
}

/* A tool's arguments, and what ends the call; the node after that. */
static int32_t add_arguments(sp_schema_maker *maker, const json_t *calls, const json_t *tool,
                             int32_t at)
{
    const json_t *parameters = json_object_get(tool, "parameters");
    const char *end = text_of(calls, "end");
    int32_t rule, after;

    if (json_is_true(json_object_get(tool, "any")))
        return add_free_text(&maker->net, end, at, -1);
    rule = json_is_object(parameters) ? sp_schema_rule(maker, parameters, "#")
                                      : sp_json_rule(maker, SP_JSON_OBJECT);
    if (maker->tagged)
        return add_text(maker, add_parameters(maker, parameters, at), end);
    after = sp_net_node_add(&maker->net);
    sp_net_call(&maker->net, at, rule, after);
    return add_text(maker, after, end);
}

/* One tool's call: what is before its arguments is shared with tools of a similar name. Its
 * parameters are a document of their own, to which its references belong. */
static sp_status add_tool(sp_schema_maker *maker, const json_t *calls, const json_t *tool,
                          const char *begin, int32_t from, int32_t to, sp_error *error)
{
    const char *name = json_string_value(json_object_get(tool, "name"));
    int32_t at = add_text(maker, from, begin);
    sp_status status;

    if (!name)
        return malformed(error, "a tool has no name");
    at = add_text(maker, add_name(maker, name, at), text_of(calls, "middle"));
    at = add_arguments(maker, calls, tool, at);
    status = sp_schema_make_all(maker, json_object_get(tool, "parameters"));
    if (status == SP_OK)
        sp_net_nothing(&maker->net, at, to);
    return status;
}

/* `free`, where it is there, is what all calls begin with; text up to an end has to have one. */
static sp_status check(const json_t *calls, const char *free, sp_error *error)
{
    size_t n = free ? strlen(free) : 1, n_end = strlen(text_of(calls, "end"));

    if (n == 0 || n > SP_CALLS_OPEN_BYTES_MAX ||
        (free && strncmp(text_of(calls, "begin"), free, n) != 0))
        return malformed(error, "calls among other text do not begin with its end");
    if (n_end == 0 || n_end > SP_CALLS_OPEN_BYTES_MAX)
        return malformed(error, "calls have no end, or a long one");
    return SP_OK;
}

sp_status sp_calls_make(sp_schema_maker *maker, const json_t *calls, int32_t from, int32_t to,
                        sp_error *error)
{
    sp_net_builder *net = &maker->net;
    int32_t after = sp_net_node_add(net), begun = from;
    const json_t *tools = json_object_get(calls, "tools");
    const char *free = json_string_value(json_object_get(calls, "free"));
    const char *begin = text_of(calls, "begin");
    sp_status status = check(calls, free, error);

    if (status != SP_OK)
        return status;
    maker->tagged = json_is_true(json_object_get(calls, "tagged"));
    if (free) {
        begun = add_free_text(net, free, from, to);
        begin += strlen(free);
    }
    for (size_t i = 0; status == SP_OK && i < json_array_size(tools); i++)
        status = add_tool(maker, calls, json_array_get(tools, i), begin, begun, after, error);
    if (status == SP_OK && json_is_true(json_object_get(calls, "many")))
        sp_net_nothing(net, free ? after : add_text(maker, after, text_of(calls, "between")), from);
    sp_net_nothing(net, after, to);
    return status;
}
