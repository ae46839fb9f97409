#include "server/api/generation_config.h"

#include "base/error.h"

#include <string.h>

static bool is_one_of(const char *name, const char *const *names)
{
    for (; *names; names++)
        if (strcmp(name, *names) == 0)
            return true;
    return false;
}

/* The engine's, the tokenizer's, or about what transformers returns. */
static bool says_nothing(const char *name)
{
    static const char *const names[] = {
        "transformers_version", "eos_token_id",        "pad_token_id",
        "bos_token_id",         "use_cache",           "output_attentions",
        "output_scores",        "output_logits",       "output_hidden_states",
        "cache_implementation", "cache_config",        "return_dict_in_generate",
        "trust_remote_code",    "return_legacy_cache", NULL};

    return name[0] == '_' || is_one_of(name, names);
}

static void add_name(sp_text *out, const char *name, const json_t *value)
{
    sp_text_add(out, out->bytes > 0 ? ", " : "");
    sp_text_add_printable(out, name);
    if (json_is_number(value))
        sp_text_format(out, " %g", json_number_value(value));
}

sp_status sp_generation_config_take(const json_t *root, sp_request *defaults, sp_text *applied,
                                    sp_text *unused, sp_error *error)
{
    const sp_field_part part = sp_request_part(NULL);
    json_t *fields = json_object();
    sp_request read = *defaults;
    sp_error why = {.text = ""};
    sp_status status = fields ? SP_OK : SP_ERR_MEMORY;
    const char *name;
    json_t *value;

    json_object_foreach((json_t *)(uintptr_t)root, name, value)
    {
        bool takes = sp_field_find(&part, name, strlen(name), SP_FORM_CONFIG) != NULL;

        if (json_is_null(value) || says_nothing(name) || status != SP_OK)
            continue;
        if (takes && json_object_set(fields, name, value) != 0)
            status = SP_ERR_MEMORY;
        add_name(takes ? applied : unused, name, takes ? value : NULL);
    }
    if (status == SP_OK)
        status = sp_request_read(fields, SP_FORM_CONFIG, NULL, 0, &read, &why);
    json_decref(fields);
    if (status == SP_ERR_MEMORY || applied->failed || unused->failed)
        return sp_fail_memory(error, sizeof read, "generation_config.json");
    if (status != SP_OK)
        return sp_fail(error, status, SP_CODE_GENERATION_CONFIG, why.subject, -1,
                       "generation_config.json: %s; --generation-config none starts without it",
                       why.text);
    *defaults = read;
    return SP_OK;
}
