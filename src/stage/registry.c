/*
 * registry.c: names and versions. A version is either current, when its name refers to it, or
 * detached, when it lives as long as requests hold it.
 */
#include "base/alloc.h"
#include "base/grow.h"
#include "stage/stage_state.h"

#include <string.h>

/* ---- versions ------------------------------------------------------------------------------ */

sp_stage_version *sp_stage_current(const sp_stage *stage, const char *name)
{
    uint64_t hash = sp_stage_id_hash(name, 0);

    for (sp_stage_version *v = stage->versions; v != NULL; v = v->next)
        if (!v->detached && v->name_hash == hash && strcmp(v->name, name) == 0)
            return v;
    return NULL;
}

sp_stage_version *sp_stage_version_create(const sp_stage_load_options *options)
{
    sp_stage_version *version = sp_calloc(1, sizeof *version);

    if (version == NULL)
        return NULL;
    version->name = sp_strdup(options->name);
    version->location = sp_strdup(options->location);
    version->source = options->source;
    if (version->name == NULL || version->location == NULL) {
        sp_stage_version_destroy(version);
        return NULL;
    }
    version->name_hash = sp_stage_id_hash(version->name, 0);
    return version;
}

void sp_stage_version_destroy(sp_stage_version *version)
{
    if (version == NULL)
        return;
    sp_free(version->location);
    sp_free(version->name);
    sp_free(version);
}

void sp_stage_append_version(sp_stage *stage, sp_stage_version *version)
{
    sp_stage_version **link = &stage->versions;

    while (*link != NULL)
        link = &(*link)->next;
    version->next = NULL;
    *link = version;
}

static void remove_version(sp_stage *stage, sp_stage_version *version)
{
    stage_content *content = version->content;
    sp_stage_version **link = &stage->versions;
    bool kept = version->kept;

    while (*link != version)
        link = &(*link)->next;
    *link = version->next;
    sp_stage_version_destroy(version);
    content->n_versions--;
    content->n_kept -= kept;
    sp_stage_drop_unused(stage, content);
}

void sp_stage_pin_version(sp_stage *stage, sp_stage_version *version, bool pinned)
{
    if (version->pinned == pinned)
        return;
    version->pinned = pinned;
    version->content->n_pins += pinned ? 1 : -1;
    sp_stage_refresh_slot(stage, version->content);
}

void sp_stage_detach(sp_stage *stage, sp_stage_version *version)
{
    sp_stage_pin_version(stage, version, false);
    version->detached = true;
    if (stage->active == version)
        stage->active = NULL;
    if (version->references == 0)
        remove_version(stage, version);
}

const sp_digest *sp_stage_version_digest(const sp_stage_version *version)
{
    return &version->content->digest;
}

const char *sp_stage_version_name(const sp_stage_version *version)
{
    return version->name;
}

uint64_t sp_stage_version_generation(const sp_stage_version *version)
{
    return version->generation;
}

/* ---- names --------------------------------------------------------------------------------- */

bool sp_stage_is_base_name(const sp_stage *stage, const char *name)
{
    return name != NULL && stage->base_name != NULL && strcmp(name, stage->base_name) == 0;
}

static sp_status no_such_name(const char *name, sp_error *error)
{
    return sp_fail(error, SP_ERR_NOT_FOUND, NULL, name, -1,
                   "no adapter is loaded under the name \"%s\"", name);
}

sp_status sp_stage_unload(sp_stage *stage, const char *name, sp_error *error)
{
    sp_status status = SP_NEED(error, {"stage", stage}, {"name", name});
    sp_stage_version *version;
    stage_load *load;
    bool held;

    if (status != SP_OK)
        return status;
    version = sp_stage_current(stage, name);
    load = sp_stage_find_load(stage, name);
    if (version == NULL && load == NULL)
        return no_such_name(name, error);
    if (version != NULL && version->pinned)
        return sp_fail(error, SP_ERR_STATE, "pinned", name, -1,
                       "the adapter \"%s\" is pinned; unpin it before unloading it", name);
    if (load != NULL) {
        load->cancelled = true;
        if (load->state == LOAD_FETCHING)
            sp_stage_cancel(stage, &load->task);
    }
    if (version == NULL)
        return SP_OK;
    held = version->references > 0;
    sp_stage_detach(stage, version);
    return held ? SP_BUSY : SP_OK;
}

sp_status sp_stage_set_pinned(sp_stage *stage, const char *name, bool pinned, sp_error *error)
{
    sp_status status = SP_NEED(error, {"stage", stage}, {"name", name});
    sp_stage_version *version;

    if (status != SP_OK)
        return status;
    version = sp_stage_current(stage, name);
    if (version == NULL)
        return no_such_name(name, error);
    if (!pinned || version->content->slot >= 0 || version->content->copying) {
        sp_stage_pin_version(stage, version, pinned);
        return version->content->slot >= 0 || !pinned ? SP_OK : SP_PENDING;
    }
    status = sp_stage_slot_status(stage);
    if (status != SP_OK)
        return sp_fail(error, status, NULL, name, -1, "no slot can be given to \"%s\" now: %s",
                       name, sp_status_text(status));
    sp_stage_pin_version(stage, version, true);
    version->content->prefetch = true;
    sp_stage_want(stage, version->content);
    return SP_PENDING;
}

sp_status sp_stage_set_active(sp_stage *stage, const char *name, sp_error *error)
{
    sp_stage_version *version;

    if (stage == NULL)
        return sp_fail_null(error, "stage");
    if (sp_stage_is_base_name(stage, name))
        name = NULL;
    version = name != NULL ? sp_stage_current(stage, name) : NULL;
    if (name != NULL && version == NULL)
        return no_such_name(name, error);
    stage->active = version;
    return SP_OK;
}

/* ---- holding ------------------------------------------------------------------------------- */

sp_status sp_stage_hold(sp_stage *stage, sp_hold_kind kind, const char *name, sp_hold *out_hold,
                        sp_error *error)
{
    sp_hold hold = {.struct_bytes = sizeof hold, .slot = -1};
    sp_stage_version *version = NULL;
    sp_status status;

    if (stage == NULL)
        return sp_fail_null(error, "stage");
    if ((int)kind < 0 || kind > SP_HOLD_DEFAULT)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "kind", -1, "no such kind of hold: %d",
                       (int)kind);
    if (kind == SP_HOLD_NAMED && name == NULL)
        return sp_fail_null(error, "name");
    if (kind == SP_HOLD_DEFAULT)
        version = stage->active;
    if (kind == SP_HOLD_NAMED && !sp_stage_is_base_name(stage, name)) {
        version = sp_stage_current(stage, name);
        if (version == NULL)
            return no_such_name(name, error);
    }
    hold.version = version;
    status = sp_struct_write(out_hold, &hold, sizeof hold, "sp_hold", error);
    if (status != SP_OK)
        return status;
    if (version != NULL) {
        version->references++;
        version->last_use = ++stage->clock;
        version->content->last_use = stage->clock;
    }
    return SP_OK;
}

void sp_stage_release(sp_stage *stage, sp_hold *hold)
{
    sp_stage_version *version = hold->version;

    if (version == NULL)
        return;
    sp_stage_yield(stage, hold);
    if (hold->begun) {
        version->content->n_begun--;
        sp_stage_refresh_slot(stage, version->content);
    }
    hold->version = NULL;
    hold->begun = false;
    version->references--;
    if (version->references == 0 && version->detached)
        remove_version(stage, version);
}

/* ---- list ---------------------------------------------------------------------------------- */

const char *sp_stage_version_state_name(sp_stage_version_state state)
{
    static const char *const names[] = {"disk", "host", "loading", "ready", "draining"};

    return (size_t)state < sizeof names / sizeof names[0] ? names[state] : "unknown";
}

static sp_stage_version_state state_of(const sp_stage_version *version)
{
    const stage_content *content = version->content;

    if (version->detached)
        return SP_STAGE_VERSION_DRAINING;
    if (content->slot >= 0)
        return SP_STAGE_VERSION_READY;
    if (content->copying || content->fetching)
        return SP_STAGE_VERSION_LOADING;
    return content->image != NULL ? SP_STAGE_VERSION_HOST : SP_STAGE_VERSION_DISK;
}

static sp_stage_version_info info_of(const sp_stage *stage, const sp_stage_version *version)
{
    const stage_content *content = version->content;

    return (sp_stage_version_info){
        .struct_bytes = sizeof(sp_stage_version_info),
        .name = version->name,
        .location = version->location,
        .state = state_of(version),
        .slot = content->slot,
        .pinned = version->pinned,
        .active = version == stage->active,
        .references = version->references,
        .in_slot = version->n_in_slot,
        .generation = version->generation,
        .id_hash = sp_stage_id_hash(version->name, version->generation),
        .last_use = version->last_use,
        .uses = version->uses,
        .digest = content->digest,
        .facts = &content->facts,
        .image_bytes = content->image != NULL ? content->image_bytes : 0,
        .slot_bytes = sp_layout_slot_bytes(stage->layout),
        .load_seconds = version->load_seconds,
    };
}

size_t sp_stage_n_versions(const sp_stage *stage)
{
    size_t n = 0;

    for (const sp_stage_version *v = stage ? stage->versions : NULL; v != NULL; v = v->next)
        n++;
    return n;
}

static sp_status write_info(const sp_stage *stage, const sp_stage_version *version,
                            sp_stage_version_info *out_info, sp_error *error)
{
    sp_stage_version_info info = info_of(stage, version);

    return sp_struct_write(out_info, &info, sizeof info, "sp_stage_version_info", error);
}

sp_status sp_stage_version_at(const sp_stage *stage, size_t index, sp_stage_version_info *out_info,
                              sp_error *error)
{
    const sp_stage_version *version;

    if (stage == NULL)
        return sp_fail_null(error, "stage");
    version = stage->versions;
    for (size_t i = 0; version != NULL && i < index; i++)
        version = version->next;
    if (version == NULL)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "index", (int64_t)index,
                       "there is no version %zu; there are %zu", index, sp_stage_n_versions(stage));
    return write_info(stage, version, out_info, error);
}

sp_status sp_stage_find(const sp_stage *stage, const char *name, sp_stage_version_info *out_info,
                        sp_error *error)
{
    sp_status status = SP_NEED(error, {"stage", stage}, {"name", name});
    const sp_stage_version *version;

    if (status != SP_OK)
        return status;
    version = sp_stage_current(stage, name);
    if (version == NULL)
        return no_such_name(name, error);
    return write_info(stage, version, out_info, error);
}
