#include "server/api/body_translation.h"

#include "base/error.h"
#include "engine/request/field.h"

#include <string.h>

sp_translation sp_translation_start(sp_error *error)
{
    sp_translation to = {.chat = json_object(), .messages = json_array(), .error = error};

    sp_translation_set(&to, to.chat, "messages", to.messages);
    return to;
}

sp_status sp_translation_end(sp_translation *to, json_t **out_chat)
{
    if (to->status != SP_OK)
        json_decref(to->chat);
    else
        *out_chat = to->chat;
    return to->status;
}

void sp_translation_refuse(sp_translation *to, const char *code, const char *field, const char *why)
{
    if (to->status == SP_OK)
        to->status =
            sp_fail(to->error, SP_ERR_INPUT, code, field, -1, "field \"%s\" %s", field, why);
}

void sp_translation_set(sp_translation *to, json_t *object, const char *name, json_t *value)
{
    if (to->status != SP_OK)
        json_decref(value);
    else if (json_object_set_new(object, name, value) != 0)
        to->status = sp_fail_memory(to->error, 0, "a request");
}

void sp_translation_append(sp_translation *to, json_t *list, json_t *value)
{
    if (to->status != SP_OK)
        json_decref(value);
    else if (json_array_append_new(list, value) != 0)
        to->status = sp_fail_memory(to->error, 0, "a request");
}

bool sp_translation_says_nothing(const json_t *value)
{
    return json_is_null(value) || json_is_false(value) ||
           (json_is_integer(value) && json_integer_value(value) == 0);
}

const sp_translated_field *sp_translation_find(const sp_translated_field *fields, size_t n,
                                               const char *name)
{
    for (size_t i = 0; i < n; i++)
        if (strcmp(fields[i].name, name) == 0)
            return &fields[i];
    return NULL;
}

void sp_translation_add(sp_translation *to, const sp_translated_field *field, const char *name,
                        json_t *value)
{
    if (!field)
        sp_translation_set(to, to->chat, name, json_incref(value));
    else if (field->use == SP_TRANSLATED_RENAMED)
        sp_translation_set(to, to->chat, field->renamed, json_incref(value));
    else if (field->use == SP_TRANSLATED_REFUSED && !sp_translation_says_nothing(value))
        sp_translation_refuse(to, SP_CODE_UNSUPPORTED_FIELD, name, "is not supported here");
}
