/*
 * load.c: loads in progress. A load fetches an image, finds or creates its content, lands it in a
 * slot beside what is served now, and then switches the name to it. Memory that the last part needs
 * is allocated before the first starts, so that nothing can fail half-way.
 */
#include "base/alloc.h"
#include "base/clock.h"
#include "base/grow.h"
#include "stage/stage_state.h"

#include <string.h>

void sp_stage_load_options_default(sp_stage_load_options *out_options, size_t struct_bytes)
{
    const sp_stage_load_options defaults = {.struct_bytes = sizeof defaults,
                                            .source = SP_SOURCE_ANY};

    sp_struct_default(out_options, struct_bytes, &defaults, sizeof defaults);
}

/* ---- set-up -------------------------------------------------------------------------------- */

/* A settled load keeps its ticket, but its name is free again. */
stage_load *sp_stage_find_load(const sp_stage *stage, const char *name)
{
    for (stage_load *load = stage->loads; load != NULL; load = load->next)
        if (load->state != LOAD_DONE && !load->cancelled && strcmp(load->version->name, name) == 0)
            return load;
    return NULL;
}

void sp_stage_load_destroy(stage_load *load)
{
    if (load == NULL)
        return;
    sp_stage_version_destroy(load->version);
    sp_adapter_release(load->task.adapter);
    sp_stage_facts_clear(&load->task.facts);
    sp_free(load->spare);
    sp_free(load);
}

static stage_load *create_load(const sp_stage_load_options *options)
{
    stage_load *load = sp_calloc(1, sizeof *load);

    if (load == NULL)
        return NULL;
    load->spare = sp_calloc(1, sizeof *load->spare);
    load->version = sp_stage_version_create(options);
    if (load->spare == NULL || load->version == NULL) {
        sp_stage_load_destroy(load);
        return NULL;
    }
    load->replace = options->replace;
    load->pinned = options->pinned;
    load->expected_generation = options->expected_generation;
    load->by_digest = options->digest != NULL;
    if (load->by_digest)
        load->wanted = *options->digest;
    return load;
}

/* Reads the caller's options in the current size, and checks them. */
static sp_status read_options(const sp_stage *stage, const sp_stage_load_options *options,
                              sp_stage_load_options *out_options, sp_error *error)
{
    sp_status status;

    if (stage == NULL)
        return sp_fail_null(error, "stage");
    sp_stage_load_options_default(out_options, sizeof *out_options);
    status =
        sp_struct_read(out_options, sizeof *out_options, options, "sp_stage_load_options", error);
    if (status != SP_OK)
        return status;
    status = sp_stage_name_check(out_options->name, stage->base_name, error);
    if (status != SP_OK)
        return status;
    if (out_options->source < SP_SOURCE_ANY || out_options->source >= stage->n_sources)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "source", out_options->source,
                       "there is no source %d; the stage has %d", (int)out_options->source,
                       (int)stage->n_sources);
    if (out_options->location == NULL)
        out_options->location = "";
    return SP_OK;
}

/* Whether the name may be switched; checked at the start and again at the end. */
static sp_status check_name(const sp_stage *stage, const char *name, bool replace,
                            uint64_t expected_generation, sp_error *error)
{
    const sp_stage_version *current = sp_stage_current(stage, name);

    if (current != NULL && !replace)
        return sp_fail(error, SP_ERR_STATE, "name-taken", name, -1,
                       "an adapter is loaded under the name \"%s\" already", name);
    if (expected_generation != 0 && (current == NULL || current->generation != expected_generation))
        return sp_fail(error, SP_ERR_STATE, "generation-changed", name, -1,
                       "\"%s\" is at generation %llu, not at the expected %llu", name,
                       current != NULL ? (unsigned long long)current->generation : 0ULL,
                       (unsigned long long)expected_generation);
    return SP_OK;
}

static void append_load(sp_stage *stage, stage_load *load)
{
    stage_load **link = &stage->loads;

    while (*link != NULL)
        link = &(*link)->next;
    *link = load;
    load->ticket = ++stage->next_ticket;
}

static sp_status cache_full(const sp_stage *stage, sp_error *error)
{
    return sp_fail(error, SP_POOL_FULL, "host-cache-full", "host-cache-mib", -1,
                   "the host cache of %zu bytes is full of adapters in use; try again, or raise "
                   "host-cache-mib",
                   stage->host_bytes_max);
}

/* The load's image is reserved unless it will not make one. */
static sp_status begin_load(sp_stage *stage, const sp_stage_load_options *options, bool makes_image,
                            stage_load **out_load, sp_error *error)
{
    stage_load *load;
    sp_status status;

    if (sp_stage_find_load(stage, options->name) != NULL)
        return sp_fail(error, SP_BUSY, NULL, options->name, -1,
                       "a load under the name \"%s\" is going on", options->name);
    status =
        check_name(stage, options->name, options->replace, options->expected_generation, error);
    if (status != SP_OK)
        return status;
    load = create_load(options);
    if (load == NULL)
        return sp_fail_memory(error, sizeof *load, "a load");
    if (makes_image && !sp_stage_reserve_image(stage, stage->image_bytes)) {
        sp_stage_load_destroy(load);
        return cache_full(stage, error);
    }
    *out_load = load;
    return SP_OK;
}

/* Of a load that is in the list, with what its image needs reserved. */
static void submit_load(sp_stage *stage, stage_load *load)
{
    load->state = LOAD_FETCHING;
    load->task.kind = TASK_LOAD;
    load->task.owner = load;
    load->task.id = ++stage->next_fetch;
    load->task.name = load->version->name;
    load->task.location = load->version->location;
    load->task.digest = load->by_digest ? &load->wanted : NULL;
    load->task.may_land = load->task.adapter == NULL && sp_stage_may_land(stage);
    stage->fetches++;
    sp_stage_submit(stage, &load->task);
}

/* ---- settling ------------------------------------------------------------------------------ */

static void remove_load(sp_stage *stage, stage_load *load)
{
    stage_load **link = &stage->loads;

    while (*link != load)
        link = &(*link)->next;
    *link = load->next;
    sp_stage_load_destroy(load);
}

/* Records the outcome and frees what was prepared and not used. The load stays in the list. */
static void settle(sp_stage *stage, stage_load *load, sp_status status, const sp_error *error)
{
    stage_content *content = load->content;

    load->state = LOAD_DONE;
    load->status = status;
    if (status != SP_OK && error != NULL)
        load->error = *error;
    load->content = NULL;
    sp_stage_version_destroy(load->version);
    load->version = NULL;
    sp_free(load->spare);
    load->spare = NULL;
    if (content != NULL) {
        content->n_landing--;
        sp_stage_drop_unused(stage, content);
    }
}

/* Switches the name to the new version; pins and DEFAULT belong to the name. */
static void commit(sp_stage *stage, stage_load *load)
{
    sp_stage_version *version = load->version;
    sp_stage_version *old = sp_stage_current(stage, version->name);

    load->version = NULL;
    load->generation = version->generation = ++stage->generation;
    version->content = load->content;
    version->content->n_versions++;
    version->content->n_kept += version->kept;
    version->content->last_use = version->last_use = ++stage->clock;
    version->load_seconds = load->task.seconds;
    sp_stage_append_version(stage, version);
    sp_stage_pin_version(stage, version, load->pinned || (old != NULL && old->pinned));
    if (old != NULL) {
        if (stage->active == old)
            stage->active = version;
        sp_stage_detach(stage, old);
    }
    settle(stage, load, SP_OK, NULL);
}

static sp_status check_load(const sp_stage *stage, const stage_load *load, sp_error *error)
{
    if (load->cancelled)
        return sp_fail(error, SP_ERR_STATE, "load-cancelled", load->version->name, -1,
                       "\"%s\" was unloaded while it was being loaded", load->version->name);
    return check_name(stage, load->version->name, load->replace, load->expected_generation, error);
}

/* ---- one content, several loads -------------------------------------------------------------- */

/* Whether what `other` is fetching is what `load` would fetch, from where it would. */
static bool would_fetch(const stage_load *other, const sp_digest *digest, int32_t source,
                        const char *location)
{
    return other->by_digest && memcmp(&other->wanted, digest, sizeof *digest) == 0 &&
           other->version->source == source && strcmp(other->version->location, location) == 0;
}

/* Whether the content is here, or somebody is bringing it; *out_content: it is here. */
static bool is_coming(const sp_stage *stage, const sp_digest *digest, int32_t source,
                      const char *location, stage_content **out_content)
{
    stage_content *content = sp_stage_find_content(stage, digest);

    *out_content = NULL;
    if (content != NULL && (content->image != NULL || content->slot >= 0)) {
        *out_content = content;
        return true;
    }
    if (content != NULL && content->fetching)
        return true;
    for (const stage_load *load = stage->loads; load != NULL; load = load->next)
        if (load->state == LOAD_FETCHING && !load->cancelled &&
            would_fetch(load, digest, source, location))
            return true;
    return false;
}

static void begin_landing(sp_stage *stage, stage_load *load, stage_content *content)
{
    load->content = content;
    content->n_landing++;
    content->last_use = ++stage->clock;
    load->state = LOAD_LANDING;
}

/* A load that nobody brings the content for any more does it. */
static void fetch_after_all(sp_stage *stage, stage_load *load)
{
    sp_error error;

    if (!sp_stage_reserve_image(stage, stage->image_bytes)) {
        settle(stage, load, cache_full(stage, &error), &error);
        return;
    }
    sp_stage_ask_sources(stage, &load->task, load->version->source);
    submit_load(stage, load);
}

static bool step_following(sp_stage *stage, stage_load *load)
{
    const sp_stage_version *version = load->version;
    stage_content *content;
    sp_error error;
    sp_status status = check_load(stage, load, &error);
    bool coming;

    if (status != SP_OK) {
        settle(stage, load, status, &error);
        return true;
    }
    coming = is_coming(stage, &load->wanted, version->source, version->location, &content);
    if (coming && content == NULL)
        return false;
    if (content != NULL)
        begin_landing(stage, load, content);
    else
        fetch_after_all(stage, load);
    return true;
}

/* What a fetch failed with is what those that followed it would get. */
static void settle_followers(sp_stage *stage, const stage_load *failed)
{
    for (stage_load *load = stage->loads; load != NULL; load = load->next)
        if (load->state == LOAD_FOLLOWING && failed->by_digest &&
            would_fetch(load, &failed->wanted, failed->version->source, failed->version->location))
            settle(stage, load, failed->task.status, &failed->task.error);
}

/* ---- starting -------------------------------------------------------------------------------- */

sp_status sp_stage_load(sp_stage *stage, const sp_stage_load_options *options, int64_t *out_ticket,
                        sp_error *error)
{
    sp_stage_load_options own;
    stage_content *content = NULL;
    bool follows = false;
    stage_load *load;
    sp_status status = read_options(stage, options, &own, error);

    if (status == SP_OK && out_ticket == NULL)
        status = sp_fail_null(error, "out_ticket");
    if (status == SP_OK && stage->n_sources == 0)
        status = sp_fail(error, SP_ERR_ARGUMENT, NULL, "source", -1,
                         "the stage has no source to load from");
    if (status == SP_OK && own.digest != NULL)
        follows = is_coming(stage, own.digest, own.source, own.location, &content);
    if (status == SP_OK)
        status = begin_load(stage, &own, !follows, &load, error);
    if (status != SP_OK)
        return status;
    append_load(stage, load);
    *out_ticket = load->ticket;
    sp_stage_ask_sources(stage, &load->task, own.source);
    if (content != NULL)
        begin_landing(stage, load, content);
    else if (follows)
        load->state = LOAD_FOLLOWING;
    else
        submit_load(stage, load);
    return SP_PENDING;
}

/* Module sets belong to one geometry, so an adapter of another one cannot be checked against
 * them. */
static sp_status check_geometry(const sp_stage *stage, const sp_adapter *adapter, sp_error *error)
{
    if (sp_adapter_geometry(adapter) == sp_layout_geometry(stage->layout))
        return SP_OK;
    return sp_fail(error, SP_ERR_ARGUMENT, "other-geometry", "adapter", -1,
                   "the adapter %.100s was opened against another geometry than that of the pool's "
                   "layout, or none: give that one in the options of opening it",
                   sp_adapter_name(adapter));
}

sp_status sp_stage_put(sp_stage *stage, const sp_stage_load_options *options, sp_adapter *adapter,
                       int64_t *out_ticket, sp_error *error)
{
    sp_stage_load_options own;
    stage_load *load;
    sp_status status = read_options(stage, options, &own, error);

    if (status == SP_OK && (adapter == NULL || out_ticket == NULL))
        status = sp_fail_null(error, adapter ? "out_ticket" : "adapter");
    if (status == SP_OK)
        status = check_geometry(stage, adapter, error);
    if (status == SP_OK)
        status = sp_adapter_check_modules(adapter, stage->supported, error);
    if (status == SP_OK)
        status = begin_load(stage, &own, true, &load, error);
    if (status != SP_OK)
        return status;
    load->by_digest = false;
    load->version->kept = stage->n_sources == 0 || own.location[0] == '\0';
    load->task.adapter = sp_adapter_retain(adapter);
    append_load(stage, load);
    submit_load(stage, load);
    *out_ticket = load->ticket;
    return SP_PENDING;
}

/* ---- landing ------------------------------------------------------------------------------- */

static sp_status no_slot(sp_status status, const stage_load *load, sp_error *error)
{
    return sp_fail(error, status, NULL, load->version->name, -1,
                   status == SP_POOL_FULL
                       ? "no slot is free for \"%s\" now; try again, or raise max-loras"
                       : "every slot is pinned, none can be had for \"%s\"; unpin one or raise "
                         "max-loras",
                   load->version->name);
}

/* Whether the old version holds the only available slot, and nobody reads it. */
static bool may_take_place(const sp_stage *stage, const sp_stage_version *old)
{
    return old->references == 0 && old->content->n_versions == 1 && old->content->n_landing == 0 &&
           sp_stage_slot_idle(stage, old->content);
}

/* No slot: a new name waits on the host, a replacement needs one unless the old is idle. */
static void land_without_slot(sp_stage *stage, stage_load *load, sp_stage_version *old,
                              sp_status why)
{
    stage_content *content = load->content;
    sp_error error;

    if (old != NULL && old->content->slot >= 0) {
        if (!may_take_place(stage, old)) {
            no_slot(why, load, &error);
            settle(stage, load, why, &error);
            return;
        }
        content->prefetch = true;
        commit(stage, load);
        sp_stage_want(stage, content);
        return;
    }
    if (load->pinned || (old != NULL && old->pinned)) {
        no_slot(why, load, &error);
        settle(stage, load, why, &error);
        return;
    }
    commit(stage, load);
}

/* One attempt at progress; true if something changed. */
static bool step_landing(sp_stage *stage, stage_load *load)
{
    sp_stage_version *old = sp_stage_current(stage, load->version->name);
    stage_content *content = load->content;
    sp_error error;
    sp_status status = check_load(stage, load, &error);

    if (status != SP_OK) {
        settle(stage, load, status, &error);
        return true;
    }
    if (content->copying || content->fetching)
        return false;
    if (content->slot >= 0 || content->image == NULL) {
        commit(stage, load);
        return true;
    }
    /* The old version's slot is no victim: it serves until the new one is in place. */
    if (old != NULL && old->content->slot >= 0)
        sp_pool_set_awaited(stage->pool, sp_stage_handle_of(old->content), true, NULL);
    status = sp_stage_start_copy(stage, content);
    if (old != NULL)
        sp_stage_refresh_slot(stage, old->content);
    if (status == SP_OK)
        return true;
    if (status == SP_POOL_FULL || status == SP_ERR_SLOTS_PINNED) {
        land_without_slot(stage, load, old, status);
        return true;
    }
    sp_fail(&error, status, NULL, load->version->name, -1, "taking a slot failed: %s",
            sp_status_text(status));
    settle(stage, load, status, &error);
    return true;
}

static void forget_settled(sp_stage *stage)
{
    stage_load *next;

    for (stage_load *load = stage->loads; load != NULL; load = next) {
        next = load->next;
        if (load->state == LOAD_DONE && load->forgotten)
            remove_load(stage, load);
    }
}

bool sp_stage_step_landings(sp_stage *stage)
{
    bool changed = false;

    for (stage_load *load = stage->loads; load != NULL; load = load->next) {
        if (load->state == LOAD_FOLLOWING && step_following(stage, load))
            changed = true;
        if (load->state == LOAD_LANDING && step_landing(stage, load))
            changed = true;
    }
    forget_settled(stage);
    return changed;
}

void sp_stage_settle_landings(sp_stage *stage, stage_content *content, sp_status status,
                              const sp_error *error)
{
    for (stage_load *load = stage->loads; load != NULL; load = load->next) {
        if (load->state != LOAD_LANDING || load->content != content)
            continue;
        if (status == SP_OK)
            step_landing(stage, load);
        else if (status < 0)
            settle(stage, load, status, error);
    }
}

/* The content of this digest: one that is there already, or the load's spare. */
static stage_content *content_of(sp_stage *stage, stage_load *load, sp_digest digest)
{
    stage_content *content = sp_stage_find_content(stage, &digest);

    if (content == NULL) {
        content = load->spare;
        load->spare = NULL;
        content->digest = digest;
        content->slot = -1;
        content->next = stage->contents;
        stage->contents = content;
    }
    sp_stage_facts_clear(&content->facts);
    content->facts = load->task.facts;
    load->task.facts = (sp_stage_facts){.struct_bytes = sizeof load->task.facts};
    return content;
}

static stage_content *content_for(sp_stage *stage, stage_load *load, sp_image *image)
{
    stage_content *content = content_of(stage, load, sp_image_digest(image));

    if (content->image == NULL) {
        content->image = image;
        content->image_bytes = sp_image_bytes(image);
        sp_stage_refresh_slot(stage, content);
    } else {
        sp_stage_unreserve_image(stage, sp_image_bytes(image));
        sp_image_destroy(image);
    }
    return content;
}

/* What came straight into a slot: shown there, unless the same content is in one already. */
static sp_status show_landed(sp_stage *stage, stage_load *load, stage_content **out_content,
                             sp_error *error)
{
    sp_digest digest = sp_image_digest(load->task.landing);
    stage_content *content = content_of(stage, load, digest);
    sp_status status = SP_OK;

    content->n_landing++; /* holds it meanwhile */
    if (content->slot < 0 && !content->copying) {
        status = sp_stage_show_landed(stage, content, &load->task, error);
    } else {
        sp_stage_close_slot(stage, &load->task);
        sp_stage_unreserve_image(stage, stage->image_bytes);
    }
    content->n_landing--;
    if (status != SP_OK)
        sp_stage_drop_unused(stage, content);
    *out_content = content;
    return status;
}

/* Ends the load of an image that fits no slot, or not into the host cache now. */
static sp_status check_size(sp_stage *stage, const sp_image *image, sp_error *error)
{
    sp_status status = sp_pool_check_room(stage->pool, image, error);

    if (status < 0)
        return status;
    if (stage->host_bytes_max != 0 && sp_image_bytes(image) > stage->host_bytes_max)
        return sp_fail(error, SP_ERR_BUDGET, NULL, "host-cache-mib", -1,
                       "the host cache of %zu bytes does not hold this adapter's %zu; raise "
                       "host-cache-mib",
                       stage->host_bytes_max, sp_image_bytes(image));
    return sp_stage_grow_image(stage, image) ? SP_OK : cache_full(stage, error);
}

/* Its packed image is described: gives it a slot's memory where there is one, and resubmits it. */
static void fetch_on(sp_stage *stage, stage_load *load)
{
    if (!load->cancelled)
        sp_stage_open_slot(stage, &load->task);
    sp_stage_submit(stage, &load->task);
}

void sp_stage_load_fetched(sp_stage *stage, stage_load *load)
{
    sp_image *image = load->task.image;
    sp_error error = load->task.error;
    sp_status status = load->task.status;
    bool landed = load->task.landed;
    stage_content *content = NULL;

    if (load->task.open != NULL) {
        fetch_on(stage, load);
        return;
    }
    sp_adapter_release(load->task.adapter);
    load->task.adapter = NULL;
    if (!landed)
        sp_stage_close_slot(stage, &load->task);
    if (status == SP_OK) {
        status = check_load(stage, load, &error);
        if (status == SP_OK && landed)
            status = show_landed(stage, load, &content, &error);
        else if (status == SP_OK)
            status = check_size(stage, image, &error);
        if (status != SP_OK)
            sp_image_destroy(image);
    }
    if (status != SP_OK) {
        sp_stage_close_slot(stage, &load->task);
        sp_stage_unreserve_image(stage, stage->image_bytes);
        if (load->task.status != SP_OK && !load->cancelled)
            settle_followers(stage, load);
        settle(stage, load, status, &error);
        return;
    }
    begin_landing(stage, load, landed ? content : content_for(stage, load, image));
}

/* ---- outcomes ------------------------------------------------------------------------------ */

static stage_load *load_of(const sp_stage *stage, int64_t ticket)
{
    for (stage_load *load = stage->loads; load != NULL; load = load->next)
        if (load->ticket == ticket && !load->forgotten)
            return load;
    return NULL;
}

sp_status sp_stage_result(sp_stage *stage, int64_t ticket, uint64_t *out_generation,
                          sp_error *error)
{
    stage_load *load;
    sp_status status;

    if (stage == NULL)
        return sp_fail_null(error, "stage");
    load = load_of(stage, ticket);
    if (load == NULL)
        return sp_fail(error, SP_ERR_NOT_FOUND, NULL, NULL, ticket, "there is no load %lld",
                       (long long)ticket);
    if (load->state != LOAD_DONE)
        return SP_PENDING;
    status = load->status;
    if (status == SP_OK && out_generation != NULL)
        *out_generation = load->generation;
    if (status != SP_OK && error != NULL)
        *error = load->error;
    remove_load(stage, load);
    return status;
}

void sp_stage_forget(sp_stage *stage, int64_t ticket)
{
    stage_load *load = load_of(stage, ticket);

    if (load == NULL)
        return;
    load->forgotten = true;
    if (load->state == LOAD_DONE)
        remove_load(stage, load);
}

/* ---- at start ------------------------------------------------------------------------------ */

/* Copies on the calling thread, into an EMPTY slot only: start-up adapters do not evict each
 * other. */
static sp_status fill_slot(sp_stage *stage, stage_content *content, sp_error *error)
{
    sp_slot_handle handle;
    sp_status status;

    if (content->slot >= 0 || content->copying || sp_stage_count_empty(stage) == 0)
        return SP_OK;
    status = sp_pool_load(stage->pool, content->image, &handle, error);
    if (status == SP_POOL_FULL)
        return SP_OK; /* it stays on the host until there is room for its replaced rows */
    sp_stage_forget_lost_slots(stage);
    if (status != SP_OK)
        return status;
    sp_stage_take_slot(stage, content, handle);
    return SP_OK;
}

sp_status sp_stage_add(sp_stage *stage, const sp_stage_load_options *options,
                       const sp_adapter *adapter, sp_error *error)
{
    sp_stage_load_options own;
    stage_load *load;
    sp_error failure;
    sp_status status = read_options(stage, options, &own, error);

    if (status == SP_OK && adapter == NULL)
        status = sp_fail_null(error, "adapter");
    if (status == SP_OK)
        status = check_geometry(stage, adapter, error);
    if (status == SP_OK)
        status = begin_load(stage, &own, true, &load, error);
    if (status != SP_OK)
        return status;
    load->by_digest = false;
    append_load(stage, load);
    load->version->kept = stage->n_sources == 0 || own.location[0] == '\0';
    load->task.seconds = own.spent_seconds - sp_clock_seconds();
    load->task.status =
        sp_stage_facts_of(stage->layout, adapter, &load->task.facts, &load->task.error);
    if (load->task.status == SP_OK)
        load->task.status = sp_layout_pack(stage->layout, adapter, stage->exec, &load->task.image,
                                           &load->task.error);
    load->task.seconds += sp_clock_seconds();
    sp_stage_load_fetched(stage, load);
    if (load->state == LOAD_LANDING) {
        status = fill_slot(stage, load->content, &failure);
        if (status == SP_OK && load->pinned && load->content->slot < 0) {
            status = sp_stage_slot_status(stage);
            status = no_slot(status == SP_OK ? SP_POOL_FULL : status, load, &failure);
        }
        if (status == SP_OK)
            commit(stage, load);
        else
            settle(stage, load, status, &failure);
    }
    return sp_stage_result(stage, load->ticket, NULL, error);
}
