/*
 * admission.c: the queue for slots, and its progress. Contents that someone waits for are in one
 * queue, first come, first served; each fetches its image as soon as the host cache has room, and
 * takes a slot as soon as the pool has a victim and nobody before it could use it.
 */
#include "base/alloc.h"
#include "stage/stage_state.h"

/* ---- the queue ----------------------------------------------------------------------------- */

void sp_stage_want(sp_stage *stage, stage_content *content)
{
    stage_content **link = &stage->wants;

    if (content->wanted || content->slot >= 0)
        return;
    while (*link != NULL)
        link = &(*link)->want_next;
    content->wanted = true;
    content->want_next = NULL;
    *link = content;
}

void sp_stage_unwant(sp_stage *stage, stage_content *content)
{
    stage_content **link = &stage->wants;

    if (!content->wanted)
        return;
    while (*link != content)
        link = &(*link)->want_next;
    *link = content->want_next;
    content->wanted = false;
    content->budget_blocked = false;
}

void sp_stage_fail_content(sp_stage *stage, stage_content *content, sp_status status,
                           const sp_error *error)
{
    content->prefetch = false;
    sp_stage_unwant(stage, content);
    if (content->n_waiting == 0)
        return;
    content->failed = status;
    content->failure = *error;
}

/* ---- requests ------------------------------------------------------------------------------ */

static void start_waiting(sp_stage *stage, sp_hold *hold)
{
    stage_content *content = hold->version->content;

    if (!hold->waiting) {
        hold->waiting = true;
        content->n_waiting++;
    }
    sp_stage_want(stage, content);
}

static void stop_waiting(sp_stage *stage, sp_hold *hold)
{
    stage_content *content = hold->version->content;

    if (!hold->waiting)
        return;
    hold->waiting = false;
    if (--content->n_waiting > 0)
        return;
    content->failed = SP_OK;
    content->fresh = false;
    if (!content->prefetch)
        sp_stage_unwant(stage, content);
    sp_stage_refresh_slot(stage, content);
}

static sp_status take_slot(sp_stage *stage, sp_hold *hold)
{
    stage_content *content = hold->version->content;
    sp_slot_handle handle = sp_stage_handle_of(content);
    sp_status status = sp_pool_acquire(stage->pool, handle, NULL);

    if (status != SP_OK)
        return status;
    hold->slot = handle.slot;
    hold->generation = handle.generation;
    hold->version->n_in_slot++;
    if (!hold->begun) {
        hold->begun = true;
        content->n_begun++;
    }
    content->fresh = false;
    stop_waiting(stage, hold);
    sp_stage_refresh_slot(stage, content);
    return SP_OK;
}

static sp_status wait_status(sp_stage *stage, const stage_content *content)
{
    sp_status status;

    if (content->copying || content->fetching)
        return SP_PENDING;
    if (content->image == NULL)
        return content->budget_blocked ? SP_BUSY : SP_PENDING;
    status = sp_stage_slot_status(stage);
    if (status == SP_OK)
        status = sp_pool_check_room(stage->pool, content->image, NULL);
    return status == SP_OK ? SP_PENDING : status;
}

static bool fetch_blocked(const sp_stage *stage)
{
    for (const stage_content *c = stage->wants; c != NULL; c = c->want_next)
        if (c->budget_blocked)
            return true;
    return false;
}

/*
 * Not if that would help nobody: the content is pinned, or not yet used by those it was loaded for.
 * And a request that has started gives memory back only by ending: where its slot holds the only
 * copy, or others wait for room in the host cache, it continues.
 */
static bool should_give_way(const sp_stage *stage, const stage_content *content,
                            const sp_hold *hold)
{
    if (content->fresh || content->n_pins > 0)
        return false;
    return !(hold->begun && (content->image == NULL || fetch_blocked(stage)));
}

sp_status sp_stage_ask(sp_stage *stage, sp_hold *hold, bool give_way, sp_error *error)
{
    stage_content *content;
    sp_status status = SP_NEED(error, {"stage", stage}, {"hold", hold});

    if (status != SP_OK)
        return status;
    if (hold->version == NULL || hold->slot >= 0)
        return SP_OK;
    content = hold->version->content;
    if (content->failed != SP_OK) {
        status = content->failed;
        if (error != NULL)
            *error = content->failure;
        stop_waiting(stage, hold);
        return status;
    }
    if (content->slot >= 0)
        return give_way && should_give_way(stage, content, hold) ? SP_AGAIN : SP_OK;
    start_waiting(stage, hold);
    status = wait_status(stage, content);
    if (status == SP_ERR_SLOTS_PINNED) {
        stop_waiting(stage, hold);
        return sp_fail(error, status, NULL, hold->version->name, -1,
                       "every adapter slot is pinned, so \"%s\" cannot be served; unpin one or "
                       "raise max-loras",
                       hold->version->name);
    }
    return status;
}

sp_status sp_stage_request(sp_stage *stage, sp_hold *hold, bool give_way, sp_error *error)
{
    sp_status status = sp_stage_ask(stage, hold, give_way, error);

    if (status != SP_OK || hold->version == NULL || hold->slot >= 0)
        return status;
    status = take_slot(stage, hold);
    if (status != SP_OK)
        return sp_fail(error, status, NULL, hold->version->name, -1,
                       "the slot of \"%s\" cannot be used", hold->version->name);
    return SP_OK;
}

void sp_stage_yield(sp_stage *stage, sp_hold *hold)
{
    if (hold->version == NULL)
        return;
    stop_waiting(stage, hold);
    if (hold->slot < 0)
        return;
    sp_pool_release(stage->pool, (sp_slot_handle){hold->slot, hold->generation}, NULL);
    hold->slot = -1;
    hold->generation = 0;
    hold->version->n_in_slot--;
    sp_stage_refresh_slot(stage, hold->version->content);
}

bool sp_stage_can_yield(const sp_stage *stage, const sp_hold *hold)
{
    (void)stage;
    return hold->version != NULL && hold->slot >= 0 && hold->version->content->image != NULL &&
           hold->version->content->n_pins == 0;
}

void sp_stage_use(sp_stage *stage, const sp_hold *hold, uint64_t amount)
{
    if (hold->version == NULL)
        return;
    hold->version->uses += amount;
    hold->version->last_use = hold->version->content->last_use = ++stage->clock;
    if (hold->slot >= 0)
        sp_pool_touch(stage->pool, (sp_slot_handle){hold->slot, hold->generation});
}

/* ---- fetching again ------------------------------------------------------------------------ */

static void free_fetch_strings(stage_content *content)
{
    sp_free(content->fetch_name);
    sp_free(content->fetch_location);
    content->fetch_name = content->fetch_location = NULL;
}

/* A version from a source, which knows where the bytes came from; preferably a current one.
 */
static const sp_stage_version *origin_of(const sp_stage *stage, const stage_content *content)
{
    const sp_stage_version *origin = NULL;

    for (const sp_stage_version *v = stage->versions; v != NULL; v = v->next)
        if (v->content == content && !v->kept && (origin == NULL || origin->detached))
            origin = v;
    return origin;
}

void sp_stage_ask_sources(const sp_stage *stage, stage_task *task, int32_t source)
{
    task->source = source == SP_SOURCE_ANY ? 0 : source;
    task->source_last = source == SP_SOURCE_ANY ? stage->n_sources - 1 : source;
}

static sp_status start_fetch(sp_stage *stage, stage_content *content)
{
    const sp_stage_version *origin = origin_of(stage, content);

    content->fetch_name = sp_strdup(origin->name);
    content->fetch_location = sp_strdup(origin->location);
    if (content->fetch_name == NULL || content->fetch_location == NULL) {
        free_fetch_strings(content);
        return SP_ERR_MEMORY;
    }
    content->fetching = true;
    content->task = (stage_task){
        .kind = TASK_REFETCH,
        .owner = content,
        .id = ++stage->next_fetch,
        .name = content->fetch_name,
        .location = content->fetch_location,
        .digest = &content->digest,
    };
    sp_stage_ask_sources(stage, &content->task, origin->source);
    stage->fetches++;
    sp_stage_submit(stage, &content->task);
    return SP_OK;
}

static void refetched(sp_stage *stage, stage_content *content)
{
    stage_task *task = &content->task;

    content->fetching = false;
    if (task->status == SP_OK && content->image == NULL) {
        content->image = task->image;
        task->image = NULL;
        sp_stage_refresh_slot(stage, content);
    } else {
        sp_stage_unreserve_image(stage, content->image_bytes);
    }
    sp_image_destroy(task->image);
    task->image = NULL;
    sp_stage_facts_clear(&task->facts); /* the content keeps its facts */
    if (task->status != SP_OK && content->image == NULL)
        sp_stage_fail_content(stage, content, task->status, &task->error);
    free_fetch_strings(content);
    sp_stage_drop_unused(stage, content);
}

/* ---- progress ------------------------------------------------------------------------------ */

static void take_back(sp_stage *stage, stage_task *task)
{
    stage->n_in_flight--;
    switch (task->kind) {
    case TASK_LOAD:
        sp_stage_load_fetched(stage, task->owner);
        break;
    case TASK_REFETCH:
        refetched(stage, task->owner);
        break;
    case TASK_COPY:
        sp_stage_copied(stage, task->owner);
        break;
    case TASK_KEEP:
        sp_stage_kept(stage, task->owner);
        break;
    }
}

static void fail_short(sp_stage *stage, stage_content *content, sp_status status)
{
    sp_error error;

    sp_fail(&error, status, NULL, NULL, -1, "bringing an adapter into a slot failed: %s",
            sp_status_text(status));
    sp_stage_fail_content(stage, content, status, &error);
}

/* What those at the front of the queue could not get: nobody after them may take it. */
typedef struct shortage {
    bool host, slots, room; /* room: in one of the pool's second memories */
} shortage;

static sp_status start_wanted_copy(sp_stage *stage, stage_content *content, shortage *lacking)
{
    bool needs_room =
        sp_image_overlay_bytes(content->image) > 0 || sp_image_expert_bytes(content->image) > 0;
    sp_status status;

    if (lacking->slots || (needs_room && lacking->room))
        return SP_POOL_FULL;
    if (needs_room && sp_pool_check_room(stage->pool, content->image, NULL) == SP_POOL_FULL) {
        lacking->room = true;
        return SP_POOL_FULL;
    }
    status = sp_stage_start_copy(stage, content);
    if (status == SP_POOL_FULL || status == SP_ERR_SLOTS_PINNED) {
        lacking->slots = true;
        return SP_POOL_FULL;
    }
    return status;
}

/* Serves one content of the queue; returns true if something changed. */
static bool serve_want(sp_stage *stage, stage_content *content, shortage *lacking)
{
    sp_status status;

    if (content->copying || content->fetching)
        return false;
    if (content->image == NULL) {
        content->budget_blocked =
            lacking->host || !sp_stage_reserve_image(stage, content->image_bytes);
        if (content->budget_blocked) {
            lacking->host = true;
            return false;
        }
        status = start_fetch(stage, content);
        if (status != SP_OK)
            sp_stage_unreserve_image(stage, content->image_bytes);
    } else {
        status = start_wanted_copy(stage, content, lacking);
        if (status == SP_POOL_FULL)
            return false;
    }
    if (status != SP_OK)
        fail_short(stage, content, status);
    return true;
}

static bool serve_wants(sp_stage *stage)
{
    shortage lacking = {false, false, false};
    bool changed = false;
    stage_content *next;

    for (stage_content *c = stage->wants; c != NULL; c = next) {
        next = c->want_next;
        if (serve_want(stage, c, &lacking))
            changed = true;
    }
    return changed;
}

sp_status sp_stage_poll_wait(sp_stage *stage, int32_t timeout_ms)
{
    sp_status status = stage != NULL ? sp_stage_poll(stage) : SP_AGAIN;

    if (status != SP_PENDING)
        return status;
    sp_stage_wait(stage, timeout_ms);
    return sp_stage_poll(stage);
}

sp_status sp_stage_poll(sp_stage *stage)
{
    bool changed = false;
    stage_task *next;

    if (stage == NULL)
        return SP_ERR_ARGUMENT;
    sp_stage_check_deadlines(stage);
    sp_stage_run_one(stage);
    for (stage_task *task = sp_stage_take_done(stage); task != NULL; task = next) {
        next = task->next;
        take_back(stage, task);
        changed = true;
    }
    if (serve_wants(stage))
        changed = true;
    if (sp_stage_step_landings(stage))
        changed = true;
    if (changed)
        return SP_OK;
    return stage->n_in_flight > 0 || stage->wants != NULL ? SP_PENDING : SP_AGAIN;
}
