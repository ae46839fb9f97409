#include "server/restore.h"

#include "base/alloc.h"
#include "base/error.h"
#include "base/file.h"
#include "server/driver/lora_dir.h"

#include <string.h>

#define STATE_BYTES_MAX ((size_t)64 << 20)
#define POLL_MS         50

static sp_status check_folder(const char *path, sp_error *error)
{
    char *folder = sp_path_folder(path);
    sp_status status = SP_OK;

    if (!folder)
        return sp_fail_memory(error, strlen(path), "a path");
    if (!sp_path_is_directory(folder))
        status = sp_fail(error, SP_ERR_NOT_FOUND, NULL, "state-file", -1,
                         "--state-file %s: there is no folder %s", path, folder);
    sp_free(folder);
    return status;
}

static sp_status read_state(const char *path, sp_saved_state *out_state, sp_error *error)
{
    char *bytes = NULL;
    size_t n = 0;
    sp_status status = check_folder(path, error);

    if (status != SP_OK || !sp_path_exists(path))
        return status;
    status = sp_file_read_all(path, STATE_BYTES_MAX, &bytes, &n, error);
    if (status == SP_OK)
        status = sp_saved_state_parse(bytes, n, sp_path_tail(path), out_state, error);
    sp_free(bytes);
    return status;
}

/* As a client's load of it. *out_ticket 0: it is there already. */
static sp_status begin(sp_stage *stage, const char *base, const sp_saved_adapter *saved,
                       int64_t *out_ticket, sp_error *error)
{
    sp_stage_version_info info = {.struct_bytes = sizeof info};
    sp_stage_load_options load;
    char *path;
    sp_status status;

    if (sp_stage_find(stage, saved->name, &info, NULL) == SP_OK)
        return SP_OK;
    if (!stage)
        return sp_fail(error, SP_ERR_UNSUPPORTED, NULL, "max-loras", -1,
                       "the server has no slots for adapters; raise max-loras");
    status = sp_stage_name_check(saved->name, base, error);
    if (status != SP_OK)
        return status;
    status = sp_lora_dir_resolve(saved->path, &path, error);
    if (status != SP_OK)
        return status;
    sp_stage_load_options_default(&load, sizeof load);
    load.name = saved->name;
    load.location = path;
    load.pinned = saved->pinned;
    status = sp_stage_load(stage, &load, out_ticket, error);
    sp_free(path);
    return status == SP_PENDING ? SP_OK : status;
}

/* One after the other: what is packed first is in a slot first, as it was. */
static void load_one(sp_stage *stage, const char *base, const sp_saved_adapter *saved,
                     const sp_restore_hooks *hooks)
{
    int64_t ticket = 0;
    sp_error error;
    sp_status status = begin(stage, base, saved, &ticket, &error);

    while (status == SP_OK && ticket != 0) {
        sp_status outcome = sp_stage_result(stage, ticket, NULL, &error);

        if (outcome != SP_PENDING) {
            status = outcome;
            break;
        }
        sp_stage_poll_wait(stage, POLL_MS);
    }
    if (status != SP_OK)
        hooks->refused(hooks->refused_user, saved->name, &error);
}

static bool has_active(const sp_stage *stage)
{
    sp_stage_version_info info = {.struct_bytes = sizeof info};

    for (size_t i = 0; i < sp_stage_n_versions(stage); i++)
        if (sp_stage_version_at(stage, i, &info, NULL) == SP_OK && info.active)
            return true;
    return false;
}

static void restore_active(const sp_server_settings *settings, sp_stage *stage, const char *name)
{
    sp_error error;

    if (!name || has_active(stage))
        return;
    if (sp_stage_set_active(stage, name, &error) != SP_OK)
        sp_log_line(settings->log,
                    SP_LOG_PREFIX "warning: \"%s\" was active and is not there, so requests "
                                  "without a model mean the base: %s",
                    name, error.text);
}

sp_status sp_server_restore(const sp_server_settings *settings, sp_engine *engine,
                            const sp_restore_hooks *hooks, sp_saved_state *out_state,
                            sp_error *error)
{
    sp_stage *stage = sp_engine_stage(engine);
    const char *base = sp_engine_base_name(engine);
    sp_status status;

    *out_state = (sp_saved_state){.active = NULL};
    if (!settings->state_file || settings->state_file[0] == '\0')
        return SP_OK;
    status = read_state(settings->state_file, out_state, error);
    if (status != SP_OK)
        return status;
    for (size_t i = 0; i < out_state->n_adapters; i++) {
        load_one(stage, base, &out_state->adapters[i], hooks);
        if (hooks->progress)
            hooks->progress(hooks->progress_user, "adapters", i + 1, out_state->n_adapters);
    }
    restore_active(settings, stage, out_state->active);
    return SP_OK;
}
