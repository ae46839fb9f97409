#include "server/restore.h"

#include "base/alloc.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/file.h"
#include "server/driver/driver.h"
#include "server/driver/lora_dir.h"

#include <string.h>

#define STATE_BYTES_MAX   ((size_t)64 << 20)
#define POLL_MS           50
#define LOAD_SECONDS      60u /* what one adapter gets, */
#define NEXT_LOAD_SECONDS 5u  /* and after one that did not come, each other */
#define NS_PER_S          1000000000u

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
static sp_status begin(sp_stage *stage, const char *base, sp_saved_adapter *saved,
                       int64_t *out_ticket, sp_error *error)
{
    sp_stage_version_info info = {.struct_bytes = sizeof info};
    sp_stage_load_options load;
    sp_status status;

    if (sp_stage_find(stage, saved->name, &info, NULL) == SP_OK)
        return SP_OK;
    if (!stage)
        return sp_fail(error, SP_ERR_UNSUPPORTED, NULL, "max-loras", -1,
                       "the server has no slots for adapters; raise max-loras");
    status = sp_stage_name_check(saved->name, base, error);
    if (status == SP_OK)
        status = sp_lora_dir_resolve(saved->path, &saved->location, error);
    if (status != SP_OK)
        return status;
    sp_stage_load_options_default(&load, sizeof load);
    load.name = saved->name;
    load.location = saved->location;
    load.pinned = saved->pinned;
    status = sp_stage_load(stage, &load, out_ticket, error);
    return status == SP_PENDING ? SP_OK : status;
}

/* It is cancelled, so that it does not come in later, when nobody expects it. */
static sp_status give_up(sp_stage *stage, const char *name, int64_t ticket, uint64_t seconds,
                         sp_error *error)
{
    sp_stage_unload(stage, name, NULL);
    sp_stage_forget(stage, ticket);
    return sp_fail(error, SP_ERR_IO, SP_CODE_LOAD_TIMEOUT, name, -1,
                   "its files were not read within %llu seconds", (unsigned long long)seconds);
}

static sp_status shutting_down(sp_error *error)
{
    return sp_fail(error, SP_ERR_STATE, SP_CODE_SHUTTING_DOWN, NULL, -1,
                   "the server was told to end while it read the adapters that were kept");
}

static sp_status await(sp_stage *stage, const char *name, int64_t ticket, uint64_t seconds,
                       const sp_restore_hooks *hooks, sp_error *error)
{
    uint64_t until_ns = sp_clock_ns() + seconds * NS_PER_S;

    for (;;) {
        sp_status outcome = sp_stage_result(stage, ticket, NULL, error);

        if (outcome != SP_PENDING)
            return outcome;
        if (hooks->hurry && hooks->hurry())
            return shutting_down(error);
        if (sp_clock_ns() >= until_ns)
            return give_up(stage, name, ticket, seconds, error);
        sp_stage_poll_wait(stage, POLL_MS);
    }
}

static bool has_code(const sp_error *error, const char *code)
{
    return error->code && strcmp(error->code, code) == 0;
}

/* One after the other: what is packed first is in a slot first, as it was. A file system that has
 * let one wait in vain is not given as long again. */
static sp_status load_all(sp_stage *stage, const char *base, sp_saved_state *state,
                          const sp_restore_hooks *hooks, sp_error *error)
{
    uint64_t seconds = LOAD_SECONDS;

    for (size_t i = 0; i < state->n_adapters; i++) {
        sp_saved_adapter *saved = &state->adapters[i];
        int64_t ticket = 0;
        sp_error why = {0};
        sp_status status = begin(stage, base, saved, &ticket, &why);

        if (status == SP_OK && ticket != 0)
            status = await(stage, saved->name, ticket, seconds, hooks, &why);
        if (has_code(&why, SP_CODE_SHUTTING_DOWN))
            return shutting_down(error);
        if (has_code(&why, SP_CODE_LOAD_TIMEOUT))
            seconds = NEXT_LOAD_SECONDS;
        saved->missing = status != SP_OK;
        if (saved->missing)
            hooks->refused(hooks->refused_user, saved->name, &why);
        if (hooks->progress)
            hooks->progress(hooks->progress_user, "adapters", i + 1, state->n_adapters);
    }
    return SP_OK;
}

/* ---- the store ------------------------------------------------------------------------------- */

/* Of the version that has just come in. */
static sp_status check_digest(sp_stage *stage, const sp_stored_adapter *stored, sp_error *error)
{
    sp_stage_version_info info = {.struct_bytes = sizeof info};
    sp_status status = sp_stage_find(stage, stored->name, &info, error);

    if (status != SP_OK || memcmp(&info.digest, &stored->digest, sizeof info.digest) == 0)
        return status;
    sp_stage_set_pinned(stage, stored->name, false, NULL);
    sp_stage_unload(stage, stored->name, NULL);
    return sp_fail(error, SP_ERR_MISMATCH, SP_CODE_STORE_DIGEST, stored->name, -1,
                   "the files of \"%s\" in --adapter-store are not those that were stored",
                   stored->name);
}

static sp_status load_stored(sp_stage *stage, const char *base, const sp_stored_adapter *stored,
                             const sp_restore_hooks *hooks, sp_error *error)
{
    sp_stage_load_options load;
    int64_t ticket;
    sp_status status = sp_stage_name_check(stored->name, base, error);

    if (status == SP_OK && !stage)
        status = sp_fail(error, SP_ERR_UNSUPPORTED, NULL, "max-loras", -1,
                         "the server has no slots for adapters; raise max-loras");
    if (status != SP_OK)
        return status;
    sp_stage_load_options_default(&load, sizeof load);
    load.name = stored->name;
    load.location = stored->folder;
    load.pinned = stored->pinned;
    status = sp_stage_load(stage, &load, &ticket, error);
    if (status == SP_PENDING)
        status = await(stage, stored->name, ticket, LOAD_SECONDS, hooks, error);
    return status == SP_OK ? check_digest(stage, stored, error) : status;
}

sp_status sp_server_restore_store(const sp_server_settings *settings, sp_engine *engine,
                                  const sp_restore_hooks *hooks, const sp_adapter_store *store,
                                  sp_error *error)
{
    sp_stage *stage = sp_engine_stage(engine);
    sp_stage_version_info info = {.struct_bytes = sizeof info};

    for (size_t i = 0; i < sp_adapter_store_n(store); i++) {
        const sp_stored_adapter *stored = sp_adapter_store_at(store, i);
        sp_error why = {0};

        if (sp_stage_find(stage, stored->name, &info, NULL) == SP_OK)
            sp_log_line(settings->log,
                        SP_LOG_PREFIX "warning: \"%s\" of --adapter is served, not the one in "
                                      "--adapter-store",
                        stored->name);
        else if (load_stored(stage, sp_engine_base_name(engine), stored, hooks, &why) != SP_OK &&
                 !has_code(&why, SP_CODE_SHUTTING_DOWN))
            hooks->refused(hooks->refused_user, stored->name, &why);
        if (has_code(&why, SP_CODE_SHUTTING_DOWN))
            return shutting_down(error);
        if (hooks->progress)
            hooks->progress(hooks->progress_user, "adapters", i + 1, sp_adapter_store_n(store));
    }
    return SP_OK;
}

/* ---- the active one -------------------------------------------------------------------------- */

static bool has_active(const sp_stage *stage)
{
    sp_stage_version_info info = {.struct_bytes = sizeof info};

    for (size_t i = 0; i < sp_stage_n_versions(stage); i++)
        if (sp_stage_version_at(stage, i, &info, NULL) == SP_OK && info.active)
            return true;
    return false;
}

static void restore_active(const sp_server_settings *settings, sp_stage *stage,
                           sp_saved_state *state)
{
    sp_error error;

    if (!state->active || has_active(stage) ||
        sp_stage_set_active(stage, state->active, &error) == SP_OK)
        return;
    state->active_missing = true;
    sp_log_line(settings->log,
                SP_LOG_PREFIX "warning: \"%s\" was active and is not there, so requests "
                              "without a model mean the base: %s",
                state->active, error.text);
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
    status = load_all(stage, base, out_state, hooks, error);
    if (status == SP_OK)
        restore_active(settings, stage, out_state);
    return status;
}
