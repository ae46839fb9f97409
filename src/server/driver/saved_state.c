#include "server/driver/saved_state.h"

#include "base/alloc.h"
#include "base/confine.h"
#include "base/error.h"
#include "base/json.h"

#include <string.h>

#define MARK    "state_of_sidepath"
#define VERSION 1

/* ---- reading ------------------------------------------------------------------------------- */

static sp_status invalid(sp_error *error, const char *subject, const char *why)
{
    return sp_fail(error, SP_ERR_INPUT, SP_CODE_STATE_FILE, "state-file", -1,
                   "%s %s; it is left as it is", subject, why);
}

static sp_status no_memory(sp_error *error)
{
    return sp_fail_memory(error, 1, "the saved state");
}

static sp_status check_version(const json_t *root, const char *subject, sp_error *error)
{
    const json_t *version = json_object_get(root, MARK);

    if (!json_is_integer(version))
        return invalid(error, subject, "is no state of a sidepath server: no \"" MARK "\"");
    if (json_integer_value(version) != VERSION)
        return invalid(error, subject, "was written by another version of sidepath");
    return SP_OK;
}

static sp_status take_adapter(const json_t *entry, const char *subject, sp_saved_state *state,
                              sp_error *error)
{
    sp_saved_adapter *adapter = &state->adapters[state->n_adapters];
    const char *name = json_string_value(json_object_get(entry, "name"));
    const char *path = json_string_value(json_object_get(entry, "path"));
    const json_t *pinned = json_object_get(entry, "pinned");

    if (!name || !path || (pinned && !json_is_boolean(pinned)))
        return invalid(error, subject, "has an adapter without \"name\" or \"path\"");
    state->n_adapters++;
    adapter->name = sp_strdup(name);
    adapter->path = sp_strdup(path);
    adapter->pinned = json_is_true(pinned);
    return adapter->name && adapter->path ? SP_OK : no_memory(error);
}

static sp_status take_adapters(const json_t *list, const char *subject, sp_saved_state *state,
                               sp_error *error)
{
    sp_status status = SP_OK;
    size_t i;
    json_t *entry;

    if (!json_is_array(list))
        return invalid(error, subject, "has no list \"adapters\"");
    state->adapters = sp_calloc(json_array_size(list) + 1, sizeof *state->adapters);
    if (!state->adapters)
        return no_memory(error);
    json_array_foreach(list, i, entry)
    {
        if (status == SP_OK)
            status = take_adapter(entry, subject, state, error);
    }
    return status;
}

static sp_status take_unloaded(const json_t *list, const char *subject, sp_saved_state *state,
                               sp_error *error)
{
    size_t i;
    json_t *entry;

    if (!list)
        return SP_OK;
    if (!json_is_array(list))
        return invalid(error, subject, "has an \"unloaded\" that is no list");
    state->unloaded = sp_calloc(json_array_size(list) + 1, sizeof *state->unloaded);
    if (!state->unloaded)
        return no_memory(error);
    json_array_foreach(list, i, entry)
    {
        if (!json_is_string(entry))
            return invalid(error, subject, "has an \"unloaded\" with something else than names");
        state->unloaded[i] = sp_strdup(json_string_value(entry));
        if (!state->unloaded[i])
            return no_memory(error);
        state->n_unloaded++;
    }
    return SP_OK;
}

static sp_status take_root(const json_t *root, const char *subject, sp_saved_state *state,
                           sp_error *error)
{
    const json_t *active = json_object_get(root, "active");
    sp_status status = check_version(root, subject, error);

    if (status == SP_OK && active && !json_is_null(active) && !json_is_string(active))
        status = invalid(error, subject, "has an \"active\" that is no name");
    if (status == SP_OK && json_is_string(active)) {
        state->active = sp_strdup(json_string_value(active));
        if (!state->active)
            status = no_memory(error);
    }
    if (status == SP_OK)
        status = take_adapters(json_object_get(root, "adapters"), subject, state, error);
    if (status == SP_OK)
        status = take_unloaded(json_object_get(root, "unloaded"), subject, state, error);
    return status;
}

sp_status sp_saved_state_parse(const char *bytes, size_t n_bytes, const char *subject,
                               sp_saved_state *out_state, sp_error *error)
{
    json_t *root = NULL;
    sp_error why = {0};
    sp_status status;

    *out_state = (sp_saved_state){.active = NULL};
    if (n_bytes == 0)
        return SP_OK;
    status = sp_json_parse(bytes, n_bytes, subject, SP_CODE_STATE_FILE, NULL, &root, &why);
    if (status == SP_ERR_INPUT)
        return invalid(error, subject, "is not JSON");
    if (status != SP_OK)
        return no_memory(error);
    status = take_root(root, subject, out_state, error);
    json_decref(root);
    if (status != SP_OK)
        sp_saved_state_free(out_state);
    return status;
}

void sp_saved_state_free(sp_saved_state *state)
{
    for (size_t i = 0; i < state->n_adapters; i++) {
        sp_free(state->adapters[i].name);
        sp_free(state->adapters[i].path);
        sp_free(state->adapters[i].location);
    }
    for (size_t i = 0; i < state->n_unloaded; i++)
        sp_free(state->unloaded[i]);
    sp_free(state->adapters);
    sp_free(state->unloaded);
    sp_free(state->active);
    *state = (sp_saved_state){.active = NULL};
}

sp_saved_adapter *sp_saved_state_missing(const sp_saved_state *state, const char *name)
{
    for (size_t i = 0; state && i < state->n_adapters; i++)
        if (state->adapters[i].missing && strcmp(state->adapters[i].name, name) == 0)
            return &state->adapters[i];
    return NULL;
}

/* ---- writing ------------------------------------------------------------------------------- */

static void add_string(sp_text *out, const char *before, const char *value)
{
    sp_text_add(out, before);
    sp_text_json_string(out, value, strlen(value));
}

static void add_entry(sp_text *out, const char *name, const char *path, bool pinned, bool *first)
{
    add_string(out, *first ? "\n  {\"name\": " : ",\n  {\"name\": ", name);
    add_string(out, ", \"path\": ", path);
    sp_text_format(out, ", \"pinned\": %s}", pinned ? "true" : "false");
    *first = false;
}

/* What came from elsewhere, by --adapter or from memory, is not the file's to keep. */
static void add_adapter(sp_text *out, const sp_stage_version_info *info, bool *first)
{
    const char *path;

    if (info->state != SP_STAGE_VERSION_DRAINING && info->location &&
        sp_is_confined(info->location, &path))
        add_entry(out, info->name, path, info->pinned, first);
}

static void add_active(const sp_stage *stage, const sp_saved_state *before, sp_text *out)
{
    sp_stage_version_info info = {.struct_bytes = sizeof info};

    for (size_t i = 0; i < sp_stage_n_versions(stage); i++) {
        if (sp_stage_version_at(stage, i, &info, NULL) != SP_OK || !info.active)
            continue;
        add_string(out, ", \"active\": ", info.name);
        return;
    }
    if (before && before->active_missing)
        add_string(out, ", \"active\": ", before->active);
    else
        sp_text_add(out, ", \"active\": null");
}

void sp_saved_state_write(const sp_stage *stage, const sp_saved_state *before,
                          char *const *unloaded, size_t n_unloaded, sp_text *out)
{
    sp_stage_version_info info = {.struct_bytes = sizeof info};
    bool first = true;

    sp_text_format(out, "{\"" MARK "\": %d", VERSION);
    add_active(stage, before, out);
    sp_text_add(out, ", \"adapters\": [");
    for (size_t i = 0; i < sp_stage_n_versions(stage); i++)
        if (sp_stage_version_at(stage, i, &info, NULL) == SP_OK)
            add_adapter(out, &info, &first);
    for (size_t i = 0; before && i < before->n_adapters; i++)
        if (before->adapters[i].missing)
            add_entry(out, before->adapters[i].name, before->adapters[i].path,
                      before->adapters[i].pinned, &first);
    sp_text_add(out, "], \"unloaded\": [");
    for (size_t i = 0; i < n_unloaded; i++)
        add_string(out, i ? ", " : "", unloaded[i]);
    sp_text_add(out, "]}\n");
}
