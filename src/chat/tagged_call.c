#include "chat/tagged_call.h"

#include "base/json.h"

#include <string.h>

typedef struct {
    const char *at, *end;
} cursor;

typedef struct {
    const char *data;
    size_t bytes;
} piece;

static void skip_blanks(cursor *in)
{
    while (in->at < in->end && strchr(" \t\r\n", *in->at) && *in->at != '\0')
        in->at++;
}

static bool skip(cursor *in, const char *tag)
{
    size_t n = strlen(tag);

    if ((size_t)(in->end - in->at) < n || memcmp(in->at, tag, n) != 0)
        return false;
    in->at += n;
    return true;
}

/* Takes what is before `tag`, and the tag. */
static bool up_to(cursor *in, const char *tag, piece *out)
{
    const char *found = memmem(in->at, (size_t)(in->end - in->at), tag, strlen(tag));

    if (!found)
        return false;
    *out = (piece){in->at, (size_t)(found - in->at)};
    in->at = found + strlen(tag);
    return true;
}

static bool is_piece(const piece *text, const char *string)
{
    return string && strlen(string) == text->bytes && memcmp(text->data, string, text->bytes) == 0;
}

/* Whether a tag holds a name and nothing after it, such as an attribute. */
static bool is_name(const piece *text)
{
    for (size_t i = 0; i < text->bytes; i++)
        if (text->data[i] == '\0' || strchr(" \t\r\n\"'=<", text->data[i]))
            return false;
    return text->bytes > 0;
}

/* --- Types ---------------------------------------------------------------------------------- */

/* The schema of a parameter, or NULL. */
static const json_t *schema_of(const json_t *tools, const piece *name, const piece *key)
{
    const json_t *properties = NULL;
    const char *property;
    size_t i;
    json_t *tool, *schema;

    json_array_foreach((json_t *)tools, i, tool)
    {
        const json_t *function = json_object_get(tool, "function");

        if (is_piece(name, json_string_value(json_object_get(function, "name"))))
            properties = json_object_get(json_object_get(function, "parameters"), "properties");
    }
    json_object_foreach((json_t *)properties, property,
                        schema) if (is_piece(key, property)) return schema;
    return NULL;
}

static bool type_has(const json_t *type, const char *name)
{
    const char *only = json_string_value(type);
    size_t i;
    json_t *one;

    json_array_foreach((json_t *)type, i,
                       one) if (json_is_string(one) &&
                                strcmp(json_string_value(one), name) == 0) return true;
    return only && strcmp(only, name) == 0;
}

/* Whether a value is to be read as JSON. */
static bool wants_json(const json_t *schema, const piece *value)
{
    const json_t *type = json_object_get(schema, "type");

    if (!schema)
        return false;
    if (type_has(type, "string"))
        return type_has(type, "null") && is_piece(value, "null");
    return true;
}

/* Adds a value; words of Python that models write for JSON's are taken as these. */
static sp_status add_value(sp_text *out, const json_t *schema, const piece *value)
{
    static const char *const words[][2] = {{"True", "true"}, {"False", "false"}, {"None", "null"}};
    json_t *root = NULL;
    sp_status status;

    if (wants_json(schema, value)) {
        for (size_t i = 0; i < sizeof words / sizeof *words; i++)
            if (is_piece(value, words[i][0])) {
                sp_text_add(out, words[i][1]);
                return SP_OK;
            }
        status = sp_json_parse(value->data, value->bytes, "parameter", NULL, NULL, &root, NULL);
        json_decref(root);
        if (status == SP_OK)
            sp_text_add_bytes(out, value->data, value->bytes);
        if (status != SP_ERR_INPUT)
            return status;
    }
    sp_text_json_string(out, value->data, value->bytes);
    return SP_OK;
}

/* --- The call ------------------------------------------------------------------------------- */

/* The newlines inside of a parameter's tags are the tags'. */
static void trim(piece *value)
{
    if (value->bytes > 0 && value->data[0] == '\n') {
        value->data++;
        value->bytes--;
    }
    if (value->bytes > 0 && value->data[value->bytes - 1] == '\n')
        value->bytes--;
}

/* After "<parameter=". */
static sp_status add_parameter(cursor *in, const json_t *tools, const piece *name, sp_text *out)
{
    piece key, value;
    const json_t *schema;

    if (!up_to(in, ">", &key) || !up_to(in, "</parameter>", &value))
        return SP_ERR_INPUT;
    schema = schema_of(tools, name, &key);
    if (!schema && !is_name(&key)) /* a schema may name a parameter as it likes */
        return SP_ERR_INPUT;
    trim(&value);
    sp_text_json_string(out, key.data, key.bytes);
    sp_text_add(out, ": ");
    return add_value(out, schema, &value);
}

/* What was built is JSON, and no parameter came twice. */
static sp_status check(const sp_text *arguments)
{
    json_t *root = NULL;
    sp_status status;

    if (arguments->failed)
        return SP_ERR_MEMORY;
    status = sp_json_parse(arguments->data, arguments->bytes, "arguments", NULL, NULL, &root, NULL);
    json_decref(root);
    return status;
}

sp_status sp_tagged_call_read(const char *text, size_t bytes, const json_t *tools,
                              const char **out_name, size_t *out_name_bytes, sp_text *arguments)
{
    cursor in = {text, text + bytes};
    piece name;
    sp_status status = SP_OK;

    skip_blanks(&in);
    if (!skip(&in, "<function=") || !up_to(&in, ">", &name) || !is_name(&name))
        return SP_ERR_INPUT;
    sp_text_add(arguments, "{");
    for (skip_blanks(&in); status == SP_OK && skip(&in, "<parameter="); skip_blanks(&in)) {
        if (arguments->bytes > 1)
            sp_text_add(arguments, ", ");
        status = add_parameter(&in, tools, &name, arguments);
    }
    sp_text_add(arguments, "}");
    if (status == SP_OK && !skip(&in, "</function>"))
        status = SP_ERR_INPUT;
    skip_blanks(&in);
    if (status == SP_OK && in.at != in.end)
        status = SP_ERR_INPUT;
    if (status != SP_OK)
        return status;
    *out_name = name.data;
    *out_name_bytes = name.bytes;
    return check(arguments);
}
