#include "server/api/output_form.h"

#include "base/error.h"
#include "server/api/body_fields.h"

#include <string.h>

static sp_status bad_form(const char *field, const char *code, const char *what, sp_error *error)
{
    return sp_fail(error, SP_ERR_INPUT, code, field, -1, "field \"%s\" %s", field, what);
}

/* ---- the forms ----------------------------------------------------------------------------- */

static sp_status set_form(const char *field, sp_constraint_kind kind, const json_t *value,
                          sp_output_form *form, sp_error *error)
{
    if (form->field && form->field != field)
        return sp_fail(error, SP_ERR_INPUT, NULL, field, -1, "\"%s\" and \"%s\" exclude each other",
                       form->field, field);
    if (form->field)
        return bad_form(field, NULL, "says more than one thing of the output", error);
    *form = (sp_output_form){field, kind, value};
    return SP_OK;
}

/* A schema is an object or a boolean; vLLM takes its text as well. */
static sp_status set_schema(const char *field, const json_t *value, sp_output_form *form,
                            sp_error *error)
{
    if (!json_is_object(value) && !json_is_boolean(value) && !json_is_string(value))
        return bad_form(field, NULL, "has no schema", error);
    return set_form(field, SP_CONSTRAINT_JSON_SCHEMA, value, form, error);
}

static sp_status set_regex(const char *field, const json_t *value, sp_output_form *form,
                           sp_error *error)
{
    if (!json_is_string(value))
        return bad_form(field, NULL, "has no pattern, which is a text", error);
    return set_form(field, SP_CONSTRAINT_REGEX, value, form, error);
}

/* The text of a grammar; an empty one is none. */
static sp_status set_grammar(const char *field, const json_t *value, sp_output_form *form,
                             sp_error *error)
{
    if (!json_is_string(value))
        return bad_form(field, NULL, "has no grammar, which is a text", error);
    if (json_string_length(value) == 0)
        return SP_OK;
    return set_form(field, SP_CONSTRAINT_GRAMMAR, value, form, error);
}

static sp_status set_choice(const char *field, const json_t *value, sp_output_form *form,
                            sp_error *error)
{
    bool texts = json_array_size(value) > 0;

    for (size_t i = 0; i < json_array_size(value); i++)
        texts &= json_is_string(json_array_get(value, i));
    if (!texts)
        return bad_form(field, NULL, "has no choice, which is a list of texts", error);
    return set_form(field, SP_CONSTRAINT_CHOICE, value, form, error);
}

/* Any object, or, as llama.cpp and its clients have it, one with a schema beside the type. */
static sp_status set_object(const char *field, const json_t *schema, sp_output_form *form,
                            sp_error *error)
{
    if (schema && !json_is_null(schema))
        return set_schema(field, schema, form, error);
    return set_form(field, SP_CONSTRAINT_JSON_OBJECT, NULL, form, error);
}

/* ---- readers ------------------------------------------------------------------------------- */

static sp_output_form *form_of(void *values)
{
    return &((sp_body_fields *)values)->output;
}

sp_status sp_body_read_response_format(const sp_field *row, const json_t *value, void *values,
                                       sp_error *error)
{
    const char *type = json_string_value(json_object_get(value, "type"));
    const json_t *named = json_object_get(value, "json_schema"), *schema;

    if (type && strcmp(type, "text") == 0)
        return SP_OK;
    if (type && strcmp(type, "json_object") == 0)
        return set_object(row->name, json_object_get(value, "schema"), form_of(values), error);
    if (!type || strcmp(type, "json_schema") != 0)
        return bad_form(row->name, SP_CODE_UNSUPPORTED_FIELD,
                        "takes the types \"text\", \"json_object\" and \"json_schema\"", error);
    schema = json_object_get(named, "schema");
    if (!json_is_object(named) || !schema)
        return bad_form(row->name, NULL, "has no \"json_schema\" with a \"schema\"", error);
    return set_schema(row->name, schema, form_of(values), error);
}

/* One member of "structured_outputs". */
static sp_status read_member(const sp_field *row, const char *name, const json_t *value,
                             sp_output_form *form, sp_error *error)
{
    if (json_is_null(value) || json_is_false(value))
        return SP_OK;
    if (strcmp(name, "json") == 0)
        return set_schema(row->name, value, form, error);
    if (strcmp(name, "regex") == 0)
        return set_regex(row->name, value, form, error);
    if (strcmp(name, "choice") == 0)
        return set_choice(row->name, value, form, error);
    if (strcmp(name, "grammar") == 0)
        return set_grammar(row->name, value, form, error);
    if (strcmp(name, "json_object") == 0 && json_is_true(value))
        return set_form(row->name, SP_CONSTRAINT_JSON_OBJECT, NULL, form, error);
    return sp_fail(error, SP_ERR_INPUT, SP_CODE_UNSUPPORTED_FIELD, row->name, -1,
                   "\"structured_outputs\" takes \"json\", \"json_object\", \"regex\", "
                   "\"choice\" and \"grammar\", not \"%.100s\"",
                   name);
}

sp_status sp_body_read_structured_outputs(const sp_field *row, const json_t *value, void *values,
                                          sp_error *error)
{
    sp_status status = SP_OK;
    const char *name;
    json_t *member;

    if (!json_is_object(value))
        return bad_form(row->name, NULL, "is not an object", error);
    json_object_foreach((json_t *)(uintptr_t)value, name, member)
    {
        if (status == SP_OK)
            status = read_member(row, name, member, form_of(values), error);
    }
    return status;
}

sp_status sp_body_read_guided(const sp_field *row, const json_t *value, void *values,
                              sp_error *error)
{
    if (strcmp(row->name, "guided_json") == 0)
        return set_schema(row->name, value, form_of(values), error);
    if (strcmp(row->name, "guided_regex") == 0)
        return set_regex(row->name, value, form_of(values), error);
    if (strcmp(row->name, "guided_grammar") == 0)
        return set_grammar(row->name, value, form_of(values), error);
    return set_choice(row->name, value, form_of(values), error);
}

/* ---- text ---------------------------------------------------------------------------------- */

static int take(const char *bytes, size_t n, void *user)
{
    sp_text_add_bytes(user, bytes, n);
    return 0;
}

sp_status sp_output_form_want(const sp_output_form *form, sp_constraint_thought thought,
                              sp_wanted_output *out_wanted, sp_error *error)
{
    const char *string = json_string_value(form->value);
    sp_text text = {0};

    if (!form->field)
        return SP_OK;
    if (string)
        sp_text_add_bytes(&text, string, json_string_length(form->value));
    else if (form->value &&
             json_dump_callback(form->value, take, &text, JSON_ENCODE_ANY | JSON_COMPACT) != 0)
        text.failed = true;
    if (text.failed) {
        sp_text_free(&text);
        return sp_fail_memory(error, 0, "the form of an output");
    }
    *out_wanted = (sp_wanted_output){
        .field = form->field,
        .kind = form->kind,
        .thought = thought,
        .text = text.data,
        .bytes = text.bytes,
    };
    return SP_OK;
}
