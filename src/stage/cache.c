/*
 * cache.c: contents: which have an image on the host, which are in slots. Images are evicted by
 * least recent use when the budget needs room; never one that a copy reads, that is awaited in a
 * slot, that a load is landing, that no source could provide again, or that a request has started
 * with: that one could not be obtained again if its files changed.
 */
#include "base/alloc.h"
#include "base/assert.h"
#include "stage/stage_state.h"

#include <string.h>

stage_content *sp_stage_find_content(const sp_stage *stage, const sp_digest *digest)
{
    for (stage_content *c = stage->contents; c != NULL; c = c->next)
        if (memcmp(&c->digest, digest, sizeof *digest) == 0)
            return c;
    return NULL;
}

/* ---- host memory --------------------------------------------------------------------------- */

static bool can_evict(const stage_content *content)
{
    bool awaited = content->slot < 0 && (content->n_waiting > 0 || content->prefetch);

    return content->image != NULL && !content->copying && !awaited && content->n_begun == 0 &&
           content->n_landing == 0 && content->n_kept == 0;
}

void sp_stage_unreserve_image(sp_stage *stage, size_t bytes)
{
    stage->host_bytes -= bytes;
}

static void drop_image(sp_stage *stage, stage_content *content)
{
    if (content->image == NULL)
        return;
    sp_image_destroy(content->image);
    content->image = NULL;
    sp_stage_unreserve_image(stage, content->image_bytes);
}

static bool has_room(const sp_stage *stage, size_t bytes)
{
    return stage->host_bytes_max == 0 || stage->host_bytes + bytes <= stage->host_bytes_max;
}

bool sp_stage_reserve_image(sp_stage *stage, size_t bytes)
{
    while (!has_room(stage, bytes)) {
        stage_content *oldest = NULL;

        for (stage_content *c = stage->contents; c != NULL; c = c->next)
            if (can_evict(c) && (oldest == NULL || c->last_use < oldest->last_use))
                oldest = c;
        if (oldest == NULL)
            return false;
        drop_image(stage, oldest);
        stage->evictions++;
    }
    stage->host_bytes += bytes;
    return true;
}

bool sp_stage_grow_image(sp_stage *stage, const sp_image *image)
{
    return sp_stage_reserve_image(stage, sp_image_bytes(image) - stage->image_bytes);
}

/* ---- slots --------------------------------------------------------------------------------- */

sp_status sp_stage_slot_status(const sp_stage *stage)
{
    int32_t slot;

    for (int32_t i = 0; i < stage->n_slots; i++)
        sp_pool_slot_info(stage->pool, i, &stage->slot_infos[i], NULL);
    return sp_pool_pick_victim(stage->slot_infos, stage->n_slots, &slot, NULL);
}

bool sp_stage_slot_idle(const sp_stage *stage, const stage_content *content)
{
    sp_slot_info info = {.struct_bytes = sizeof info};

    return sp_pool_slot_info(stage->pool, content->slot, &info, NULL) == SP_OK &&
           info.references == 0;
}

sp_slot_handle sp_stage_handle_of(const stage_content *content)
{
    return (sp_slot_handle){content->slot, content->slot_generation};
}

void sp_stage_take_slot(sp_stage *stage, stage_content *content, sp_slot_handle handle)
{
    content->slot = handle.slot;
    content->slot_generation = handle.generation;
    stage->slot_content[handle.slot] = content;
    stage->copies++;
    (void)sp_pool_release(stage->pool, handle, NULL);
}

void sp_stage_refresh_slot(sp_stage *stage, stage_content *content)
{
    bool lost_with_slot = content->n_begun > 0 && content->image == NULL;
    bool awaited = content->fresh && content->n_waiting > 0;

    if (content->slot < 0)
        return;
    sp_pool_set_pinned(stage->pool, sp_stage_handle_of(content), content->n_pins > 0, NULL);
    sp_pool_set_awaited(stage->pool, sp_stage_handle_of(content),
                        lost_with_slot || awaited || content->keeping, NULL);
}

void sp_stage_forget_lost_slots(sp_stage *stage)
{
    for (int32_t i = 0; i < stage->n_slots; i++) {
        stage_content *content = stage->slot_content[i];
        sp_slot_info info = {.struct_bytes = sizeof info};

        if (content == NULL || content->slot != i)
            continue;
        if (sp_pool_slot_info(stage->pool, i, &info, NULL) == SP_OK && info.state == SP_SLOT_READY)
            continue;
        content->slot = -1;
        content->fresh = false;
        stage->slot_content[i] = NULL;
    }
}

sp_status sp_stage_start_copy(sp_stage *stage, stage_content *content)
{
    stage_content *evicted;
    int32_t slot;
    sp_status status = sp_pool_check_room(stage->pool, content->image, NULL);

    /* Checked first, so that no slot is emptied for nothing. */
    if (status == SP_OK)
        status = sp_pool_load_begin(stage->pool, &slot, NULL);
    if (status < 0 && status != SP_ERR_SLOTS_PINNED)
        sp_stage_forget_lost_slots(stage);
    if (status != SP_OK)
        return status;
    evicted = stage->slot_content[slot];
    if (evicted != NULL) {
        evicted->slot = -1;
        evicted->fresh = false;
    }
    stage->slot_content[slot] = content;
    status = sp_pool_load_reserve(stage->pool, slot, content->image, NULL);
    if (status != SP_OK) {
        sp_pool_load_abort(stage->pool, slot, NULL);
        stage->slot_content[slot] = NULL;
    }
    sp_stage_forget_lost_slots(stage); /* those that lost their rows or experts to make room */
    if (status != SP_OK)
        return status;
    content->copying = true;
    content->task =
        (stage_task){.kind = TASK_COPY, .owner = content, .image = content->image, .slot = slot};
    sp_stage_submit(stage, &content->task);
    return SP_OK;
}

/* Switches the tables, unless the copy failed or nobody needs it any more. */
static sp_status finish_copy(sp_stage *stage, stage_content *content)
{
    int32_t slot = content->task.slot;
    sp_slot_handle handle;
    bool needed = content->n_versions > 0 || content->n_landing > 0;
    sp_status status = content->task.status;

    if (status == SP_OK && needed)
        status =
            sp_pool_load_commit(stage->pool, slot, content->image, &handle, &content->task.error);
    if (status == SP_OK && needed) {
        sp_stage_take_slot(stage, content, handle);
        return SP_OK;
    }
    sp_pool_load_abort(stage->pool, slot, NULL);
    stage->slot_content[slot] = NULL;
    return status != SP_OK ? status : SP_AGAIN;
}

/* It has come into a slot. */
static void use_slot(sp_stage *stage, stage_content *content)
{
    content->fresh = content->n_waiting > 0;
    stage->handovers += content->fresh;
    content->prefetch = false;
    sp_stage_unwant(stage, content);
    sp_stage_refresh_slot(stage, content);
}

void sp_stage_copied(sp_stage *stage, stage_content *content)
{
    sp_status status;

    content->copying = false;
    status = finish_copy(stage, content);
    if (status == SP_OK) {
        use_slot(stage, content);
    } else if (status < 0) {
        sp_stage_fail_content(stage, content, status, &content->task.error);
    }
    content->n_landing++; /* holds it while loads are settled */
    sp_stage_settle_landings(stage, content, status, &content->task.error);
    content->n_landing--;
    sp_stage_drop_unused(stage, content);
}

/* ---- straight into a slot -------------------------------------------------------------------- */

int32_t sp_stage_count_empty(const sp_stage *stage)
{
    int32_t n_empty = 0;

    for (int32_t i = 0; i < stage->n_slots; i++) {
        sp_slot_info info = {.struct_bytes = sizeof info};

        n_empty +=
            sp_pool_slot_info(stage->pool, i, &info, NULL) == SP_OK && info.state == SP_SLOT_EMPTY;
    }
    return n_empty;
}

bool sp_stage_may_land(const sp_stage *stage)
{
    return sp_device_get_kind(sp_pool_device(stage->pool)) == SP_DEVICE_CPU &&
           sp_stage_count_empty(stage) >= 2;
}

void sp_stage_open_slot(sp_stage *stage, stage_task *task)
{
    void *memory;

    if (task->landing != NULL || !sp_stage_may_land(stage) ||
        sp_pool_load_begin(stage->pool, &task->slot, NULL) != SP_OK)
        return;
    SP_ASSERT(stage->slot_content[task->slot] == NULL);
    if (sp_pool_load_open(stage->pool, task->slot, &task->landing, &memory, NULL) != SP_OK)
        sp_pool_load_abort(stage->pool, task->slot, NULL);
}

void sp_stage_close_slot(sp_stage *stage, stage_task *task)
{
    if (task->landing == NULL)
        return;
    sp_image_destroy(task->landing);
    task->landing = NULL;
    task->landed = false;
    sp_pool_load_abort(stage->pool, task->slot, NULL);
}

/* The slot is as good a source as any, and is not given up before it has been read. */
static void start_keeping(sp_stage *stage, stage_content *content, sp_image *landed)
{
    content->keeping = true;
    content->image_bytes = stage->image_bytes;
    content->task = (stage_task){.kind = TASK_KEEP, .owner = content, .landing = landed};
    sp_stage_submit(stage, &content->task);
}

sp_status sp_stage_show_landed(sp_stage *stage, stage_content *content, stage_task *task,
                               sp_error *error)
{
    sp_image *landed = task->landing;
    sp_slot_handle handle;
    sp_status status;

    SP_ASSERT(content->slot < 0 && !content->copying && !content->keeping);
    status = sp_pool_load_commit(stage->pool, task->slot, landed, &handle, error);
    if (status != SP_OK) {
        sp_stage_close_slot(stage, task);
        return status;
    }
    task->landing = NULL;
    sp_stage_take_slot(stage, content, handle);
    stage->landed++;
    if (content->image == NULL && !content->fetching) {
        start_keeping(stage, content, landed);
    } else {
        sp_image_destroy(landed);
        sp_stage_unreserve_image(stage, stage->image_bytes);
    }
    use_slot(stage, content);
    return SP_OK;
}

void sp_stage_kept(sp_stage *stage, stage_content *content)
{
    stage_task *task = &content->task;

    content->keeping = false;
    sp_image_destroy(task->landing);
    task->landing = NULL;
    if (task->status == SP_OK && content->image == NULL) {
        content->image = task->image;
        content->image_bytes = stage->image_bytes;
    } else { /* a load has brought one meanwhile, or it can be fetched again */
        sp_image_destroy(task->image);
        sp_stage_unreserve_image(stage, stage->image_bytes);
    }
    task->image = NULL;
    sp_stage_refresh_slot(stage, content);
    sp_stage_drop_unused(stage, content);
}

/* ---- the end ------------------------------------------------------------------------------- */

void sp_stage_drop_unused(sp_stage *stage, stage_content *content)
{
    stage_content **link = &stage->contents;

    if (content->n_versions > 0 || content->n_landing > 0 || content->copying ||
        content->fetching || content->keeping)
        return;
    sp_stage_unwant(stage, content);
    if (content->slot >= 0) {
        sp_pool_set_pinned(stage->pool, sp_stage_handle_of(content), false, NULL);
        sp_pool_drain(stage->pool, sp_stage_handle_of(content), NULL);
        stage->slot_content[content->slot] = NULL;
    }
    drop_image(stage, content);
    while (*link != content)
        link = &(*link)->next;
    *link = content->next;
    sp_stage_facts_clear(&content->facts);
    sp_stage_facts_clear(&content->task.facts);
    sp_free(content);
}
