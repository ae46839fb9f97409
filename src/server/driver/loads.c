/*
 * loads.c: adapters on the engine's thread: requested loads, loads that requests wait for, and the
 * names that were unloaded. One load per name is in progress at a time, its look-up included:
 * requests join it, and further loads follow it, one by one, so that each gets the answer that it
 * would have got alone.
 */
#include "base/alloc.h"
#include "base/clock.h"
#include "base/error.h"
#include "server/driver/driver_state.h"

#include <string.h>

#define NS_PER_S 1000000000u

/* ---- hidden names -------------------------------------------------------------------------- */

static size_t find_hidden(const sp_driver *driver, const char *name)
{
    size_t i = 0;

    while (i < driver->n_hidden && strcmp(driver->hidden[i], name) != 0)
        i++;
    return i;
}

static void show(sp_driver *driver, const char *name)
{
    size_t i = find_hidden(driver, name);

    if (i == driver->n_hidden)
        return;
    sp_free(driver->hidden[i]);
    driver->hidden[i] = driver->hidden[--driver->n_hidden];
    driver->adapters_changed = true;
}

bool sp_driver_hide(sp_driver *driver, const char *name)
{
    char **grown;

    if (find_hidden(driver, name) < driver->n_hidden)
        return true;
    grown = sp_realloc(driver->hidden, (driver->n_hidden + 1) * sizeof *grown);
    if (!grown)
        return false;
    driver->hidden = grown;
    grown[driver->n_hidden] = sp_strdup(name);
    if (!grown[driver->n_hidden])
        return false;
    driver->n_hidden++;
    return true;
}

/* ---- names that were saved and are not there ------------------------------------------------ */

/* A client has decided about the name. Returns whether it was missing. */
static bool drop_missing(sp_driver *driver, const char *name)
{
    sp_saved_state *restored = driver->options.restored;
    sp_saved_adapter *missing = sp_saved_state_missing(restored, name);

    if (!missing)
        return false;
    missing->missing = false;
    if (restored->active_missing && strcmp(restored->active, name) == 0)
        restored->active_missing = false;
    driver->adapters_changed = true;
    return true;
}

/* ---- the list of loads --------------------------------------------------------------------- */

static sp_pending_load *find_load(const sp_driver *driver, const char *name)
{
    sp_pending_load *load = driver->loads;

    while (load && strcmp(load->name, name) != 0)
        load = load->next;
    return load;
}

static sp_pending_load *add_load(sp_driver *driver, const char *name)
{
    sp_pending_load *load = sp_calloc(1, sizeof *load);

    if (!load)
        return NULL;
    load->name = sp_strdup(name);
    if (!load->name) {
        sp_free(load);
        return NULL;
    }
    load->began_ns = sp_clock_ns();
    load->next = driver->loads;
    driver->loads = load;
    driver->n_loads++;
    return load;
}

static void set_looking(sp_driver *driver, sp_pending_load *load, bool looking)
{
    driver->n_looking += (int32_t)looking - (int32_t)load->looking;
    load->looking = looking;
}

static void remove_load(sp_driver *driver, sp_pending_load *load)
{
    sp_pending_load **link = &driver->loads;

    set_looking(driver, load, false);
    while (*link != load)
        link = &(*link)->next;
    *link = load->next;
    driver->n_loads--;
    sp_lora_entry_destroy(load->entry);
    sp_free(load->name);
    sp_free(load);
}

/* Whether it is worth looking up the name in the file system. */
static bool may_have_folder(const sp_driver *driver, const char *name)
{
    return driver->options.may_have_folder && find_hidden(driver, name) == driver->n_hidden &&
           driver->options.may_have_folder(driver->options.look_up_user, name);
}

/* Whether a peer has the name: it can be loaded without a look-up. */
static bool is_at_peer(const sp_driver *driver, const char *name)
{
    return find_hidden(driver, name) == driver->n_hidden &&
           sp_peers_have(driver->options.peers, name);
}

/* Sends a task to the look-up, which brings it back. Takes its reference. */
static void look_up(sp_driver *driver, sp_lora_task *task)
{
    task->look_up = task->path ? SP_LOOK_UP_PATH : SP_LOOK_UP_NAME;
    driver->options.look_up(driver->options.look_up_user, task);
    sp_task_release(&task->task);
}

/* The folder of a name that is missing is the one that was saved with it. */
static bool look_up_name(sp_driver *driver, const char *name)
{
    const sp_saved_adapter *missing = sp_saved_state_missing(driver->options.restored, name);
    sp_lora_task *task =
        sp_lora_task_create(SP_TASK_FOLDER, name, missing ? missing->location : NULL);

    if (task)
        look_up(driver, task);
    return task != NULL;
}

static sp_status no_slots(sp_error *error)
{
    return sp_fail(error, SP_ERR_UNSUPPORTED, NULL, "max-loras", -1,
                   "the engine was opened without adapter slots");
}

static sp_status no_adapter(const char *name, sp_error *error)
{
    return sp_fail(error, SP_ERR_NOT_FOUND, NULL, name, -1,
                   "no adapter is loaded under the name \"%s\"", name);
}

/* An engine without slots has the base alone. */
static sp_status set_active(const sp_driver *driver, const char *name, sp_error *error)
{
    sp_stage *stage = sp_engine_stage(driver->engine);

    sp_status status = name ? SP_ERR_NOT_FOUND : SP_OK;

    if (stage)
        status = sp_stage_set_active(stage, name, error);
    else if (name)
        status = no_adapter(name, error);
    if (status != SP_OK)
        return status;
    sp_lora_chats_set_active(driver->options.chats, name);
    if (driver->options.restored)
        driver->options.restored->active_missing = false;
    return SP_OK;
}

/* False: out of memory. */
static bool list_in_use(const sp_driver *driver, sp_lora_task *task)
{
    const sp_stage *stage = sp_engine_stage(driver->engine);
    size_t n = sp_stage_n_versions(stage);

    task->in_use = sp_calloc(n + 1, sizeof *task->in_use);
    for (size_t i = 0; task->in_use && i < n; i++) {
        sp_stage_version_info info = {.struct_bytes = sizeof info};

        if (sp_stage_version_at(stage, i, &info, NULL) == SP_OK)
            task->in_use[task->n_in_use++] = info.digest;
    }
    return task->in_use != NULL;
}

/* Tells the asking side, or the keeper first where there is one; takes the caller's reference.
 * Short of memory for the list, what is in use cannot be told from what is not: nothing is tidied.
 */
static void tell_outcome(sp_driver *driver, sp_lora_task *task, sp_status status,
                         const sp_error *error)
{
    bool is_kept = task->task.kind == SP_TASK_LOAD || task->task.kind == SP_TASK_UNLOAD;
    bool passed = false;

    if (driver->options.keep && is_kept) {
        task->outcome = status;
        task->outcome_error = error ? *error : (sp_error){0};
        task->is_decided = true;
        list_in_use(driver, task);
        passed = driver->options.keep(driver->options.keep_user, task);
    }
    if (!passed)
        sp_task_finish(&task->task, status, error);
    sp_task_release(&task->task);
}

static void finish_task(sp_driver *driver, sp_lora_task *task, sp_status status,
                        const sp_error *error)
{
    sp_stage_version_info info = {.struct_bytes = sizeof info};

    if (status >= 0 && task->name &&
        sp_stage_find(sp_engine_stage(driver->engine), task->name, &info, NULL) == SP_OK) {
        task->generation = info.generation;
        task->digest = info.digest;
        if (task->published && info.facts->receipt)
            task->published->receipt = sp_strdup(info.facts->receipt);
    }
    tell_outcome(driver, task, status, error);
}

/* ---- requests that wait for an adapter ------------------------------------------------------ */

static void begin_load(sp_driver *driver, sp_pending_load *load, sp_lora_task *looked_up);

static void add_waiter(sp_driver *driver, sp_pending_load *load, sp_generation *generation)
{
    sp_task **link = &load->waiters;

    while (*link)
        link = &(*link)->next;
    generation->task.next = NULL;
    *link = &generation->task;
    driver->counts.waiting_for_load++;
}

bool sp_driver_load_for(sp_driver *driver, sp_generation *generation, const sp_error *unknown)
{
    sp_lora_task nowhere = {.path = NULL}; /* what a look-up finds of a name without a folder */
    sp_pending_load *load;
    bool may_have;

    if (!generation->adapter || find_hidden(driver, generation->adapter) < driver->n_hidden)
        return false;
    load = find_load(driver, generation->adapter);
    if (load) {
        add_waiter(driver, load, generation);
        return true;
    }
    may_have = may_have_folder(driver, generation->adapter);
    if (!may_have && !is_at_peer(driver, generation->adapter))
        return false;
    load = add_load(driver, generation->adapter);
    if (!load)
        return false;
    set_looking(driver, load, true);
    load->unknown = *unknown;
    if (may_have && !look_up_name(driver, load->name)) {
        remove_load(driver, load);
        return false;
    }
    add_waiter(driver, load, generation);
    if (!may_have)
        begin_load(driver, load, &nowhere);
    return true;
}

static void release_waiters(sp_driver *driver, sp_task *waiters, sp_status status,
                            const sp_error *error)
{
    while (waiters) {
        sp_generation *generation = (sp_generation *)(void *)waiters;

        waiters = waiters->next;
        driver->counts.waiting_for_load--;
        if (atomic_load(&generation->task.cancelled)) {
            driver->counts.cancelled++;
            sp_driver_refuse(driver, generation, SP_ERR_STATE, NULL);
        } else if (status < 0 || status == SP_POOL_FULL) {
            sp_driver_refuse(driver, generation, status, error);
        } else {
            sp_driver_admit(driver, generation);
        }
    }
}

void sp_driver_drop_late_waiters(sp_driver *driver, uint64_t before_ns, const sp_error *error)
{
    for (sp_pending_load *load = driver->loads; load; load = load->next) {
        sp_task **link = &load->waiters;

        while (*link) {
            sp_generation *generation = (sp_generation *)(void *)*link;

            if (generation->received_ns >= before_ns) {
                link = &(*link)->next;
                continue;
            }
            *link = (*link)->next;
            driver->counts.waiting_for_load--;
            sp_driver_refuse(driver, generation, SP_ERR_STATE, error);
        }
    }
}

void sp_driver_drop_cancelled_waiters(sp_driver *driver)
{
    for (sp_pending_load *load = driver->loads; load; load = load->next) {
        sp_task **link = &load->waiters;

        while (*link) {
            sp_task *task = *link;

            if (!atomic_load(&task->cancelled)) {
                link = &task->next;
                continue;
            }
            *link = task->next;
            driver->counts.waiting_for_load--;
            driver->counts.cancelled++;
            sp_driver_refuse(driver, (sp_generation *)(void *)task, SP_ERR_STATE, NULL);
        }
    }
}

int32_t sp_driver_abort_waiters(sp_driver *driver, const char *adapter)
{
    sp_pending_load *load = find_load(driver, adapter);
    sp_task *waiters = load ? load->waiters : NULL;
    int32_t n = 0;

    if (load)
        load->waiters = NULL;
    while (waiters) {
        sp_generation *generation = (sp_generation *)(void *)waiters;

        waiters = waiters->next;
        driver->counts.waiting_for_load--;
        n += generation->n_choices;
        sp_driver_abort_unbegun(driver, generation);
    }
    return n;
}

/* ---- outcomes ------------------------------------------------------------------------------ */

/* Those that came while the load was in progress, in their order. */
static void run_later(sp_driver *driver, sp_task *later)
{
    while (later) {
        sp_lora_task *task = (sp_lora_task *)(void *)later;

        later = later->next;
        sp_driver_run_lora_task(driver, task);
    }
}

/* It is there again, by its folder or another. What is active stays so until a client says. */
static void end_missing(sp_driver *driver, const char *name)
{
    sp_saved_adapter *missing = sp_saved_state_missing(driver->options.restored, name);

    if (missing)
        missing->missing = false;
}

static void tell_loaded(const sp_driver *driver, const char *name)
{
    sp_stage_version_info info = {.struct_bytes = sizeof info};
    sp_lora_chat *chat;

    if (!driver->options.loaded ||
        sp_stage_find(sp_engine_stage(driver->engine), name, &info, NULL) != SP_OK)
        return;
    sp_lora_chats_find(driver->options.chats, name, &chat);
    driver->options.loaded(driver->options.loaded_user, name, info.facts->receipt, chat);
    sp_lora_chat_release(chat);
}

static void end_load(sp_driver *driver, sp_pending_load *load, sp_status status, sp_error *error)
{
    sp_lora_task *task = load->task;
    sp_task *waiters = load->waiters, *later = load->later;

    if (!load->looking) {
        driver->counts.loads++;
        driver->counts.load_failures += status != SP_OK;
        sp_metrics_load(&driver->metrics, load->name,
                        (double)(sp_clock_ns() - load->began_ns) / NS_PER_S,
                        status == SP_OK ? NULL : error, sp_clock_seconds());
    }
    if (status == SP_OK) {
        driver->adapters_changed = true;
        sp_lora_chats_put(driver->options.chats, load->entry);
        load->entry = NULL;
        show(driver, load->name);
        end_missing(driver, load->name);
        tell_loaded(driver, load->name);
    }
    if (task && task->task.kind == SP_TASK_ACTIVATE && status == SP_OK)
        status = set_active(driver, task->name, error);
    if (task && task->unpinned && status == SP_OK)
        status = sp_stage_set_pinned(sp_engine_stage(driver->engine), task->name, false, error);
    remove_load(driver, load);
    if (task)
        finish_task(driver, task, status, error);
    release_waiters(driver, waiters, status, error);
    run_later(driver, later);
}

void sp_driver_poll_loads(sp_driver *driver)
{
    sp_pending_load *next;

    for (sp_pending_load *load = driver->loads; load; load = next) {
        sp_error error = {0};
        sp_status status = SP_PENDING;

        next = load->next;
        if (!load->looking)
            status = sp_stage_result(sp_engine_stage(driver->engine), load->ticket, NULL, &error);
        if (status != SP_PENDING)
            end_load(driver, load, status, &error);
    }
}

void sp_driver_end_loads(sp_driver *driver)
{
    sp_error error;

    sp_fail(&error, SP_ERR_STATE, SP_CODE_SHUTTING_DOWN, NULL, -1, "the server is shutting down");
    while (driver->loads) {
        sp_pending_load *load = driver->loads;

        while (load->later) {
            sp_task *later = load->later;

            load->later = later->next;
            sp_task_finish(later, SP_ERR_STATE, &error);
            sp_task_release(later);
        }
        if (!load->looking)
            sp_stage_forget(sp_engine_stage(driver->engine), load->ticket);
        end_load(driver, load, SP_ERR_STATE, &error);
    }
}

/* ---- tasks --------------------------------------------------------------------------------- */

static sp_status start_load(sp_stage *stage, const sp_stage_load_options *wanted,
                            sp_published *published, int64_t *out_ticket, sp_error *error)
{
    sp_status status;

    if (!stage)
        return no_slots(error);
    if (!published)
        return sp_stage_load(stage, wanted, out_ticket, error);
    status = sp_stage_put(stage, wanted, published->adapter, out_ticket, error);
    sp_adapter_release(published->adapter); /* the stage has its own reference */
    published->adapter = NULL;
    return status;
}

/* The load begins, whoever wanted it, with what `looked_up` found; where it cannot, it ends. */
static void begin_load(sp_driver *driver, sp_pending_load *load, sp_lora_task *looked_up)
{
    const sp_lora_task *task = load->task;
    const sp_saved_adapter *missing = sp_saved_state_missing(driver->options.restored, load->name);
    sp_stage *stage = sp_engine_stage(driver->engine);
    sp_stage_load_options wanted;
    sp_error error = looked_up->look_up_error;
    sp_status status = error.status;

    sp_stage_load_options_default(&wanted, sizeof wanted);
    wanted.name = load->name;
    wanted.location = looked_up->path;
    wanted.digest = looked_up->by_digest ? &looked_up->wanted : NULL;
    if (!task)
        wanted.pinned = missing && missing->pinned;
    if (task) {
        wanted.replace = task->replace;
        wanted.expected_generation = task->expected_generation;
        wanted.pinned = task->pinned;
    }
    load->entry = sp_lora_entry_create(load->name, looked_up->chat);
    if (load->entry)
        looked_up->chat = NULL; /* it has the reference */
    else if (status == SP_OK)
        status = sp_fail_memory(&error, 1, "what an adapter says of chat");
    if (status == SP_OK)
        status = start_load(stage, &wanted, looked_up->published, &load->ticket, &error);
    if (status == SP_PENDING) {
        set_looking(driver, load, false);
        return;
    }
    set_looking(driver, load, true); /* it is not counted, and nothing has to be undone */
    end_load(driver, load, status, &error);
}

static void run_load(sp_driver *driver, sp_lora_task *task)
{
    sp_pending_load *load = find_load(driver, task->name);
    sp_error error = {0};

    if (load) {
        sp_task **link = &load->later;

        while (*link)
            link = &(*link)->next;
        task->task.next = NULL;
        *link = &task->task;
        return;
    }
    load = add_load(driver, task->name);
    if (!load) {
        finish_task(driver, task, sp_fail_memory(&error, sizeof *load, "a load"), &error);
        return;
    }
    load->task = task;
    begin_load(driver, load, task);
}

/* A load's folder was looked for; or an unloaded name's, which is only hidden where it has one. */
static void take_folder(sp_driver *driver, sp_lora_task *task)
{
    sp_pending_load *load = find_load(driver, task->name);

    bool at_peer = !task->path && is_at_peer(driver, task->name);

    if (load && load->looking && (task->path || at_peer)) {
        begin_load(driver, load, task);
    } else if (load && load->looking) {
        sp_error unknown = load->unknown; /* the load is freed before its waiters are told */

        end_load(driver, load, SP_ERR_NOT_FOUND, &unknown);
    } else if (!load && !task->path && !sp_peers_have(driver->options.peers, task->name)) {
        show(driver, task->name);
    }
    sp_task_release(&task->task);
}

/* A pin keeps an adapter from making way for others, not from being unloaded by name. */
static sp_status unload(sp_driver *driver, const char *name, sp_error *error)
{
    sp_stage *stage = sp_engine_stage(driver->engine);
    sp_stage_version_info info = {.struct_bytes = sizeof info};
    sp_status status;

    if (!stage)
        return no_adapter(name, error);
    if (sp_stage_find(stage, name, &info, NULL) == SP_OK && info.pinned)
        sp_stage_set_pinned(stage, name, false, NULL);
    status = sp_stage_unload(stage, name, error);
    if (status >= 0) {
        sp_lora_chats_remove(driver->options.chats, name);
        sp_driver_end_hold(driver, name);
    }
    return status;
}

/* A name whose folder exists is known unless it was unloaded. It is hidden at once; that there is
 * no folder, so that nothing needs hiding, is found out later. */
static void run_unload(sp_driver *driver, sp_lora_task *task)
{
    bool may = may_have_folder(driver, task->name), at_peer = is_at_peer(driver, task->name);
    sp_error error = {0};
    sp_status status = unload(driver, task->name, &error);

    if (status == SP_ERR_NOT_FOUND && may && !at_peer && !task->looked_up) {
        look_up(driver, task);
        return;
    }
    if (status == SP_ERR_NOT_FOUND && (at_peer || (may && task->path)))
        status = SP_OK;
    if ((status >= 0 || status == SP_ERR_NOT_FOUND) && drop_missing(driver, task->name))
        status = SP_OK;
    if (status >= 0 && (may || at_peer) && !sp_driver_hide(driver, task->name))
        status = sp_fail_memory(&error, sizeof(char *), "a name");
    if (status >= 0 && may && !task->looked_up)
        look_up_name(driver, task->name);
    driver->counts.unloads += status >= 0;
    driver->adapters_changed |= status >= 0;
    tell_outcome(driver, task, status, &error);
}

static void run_activate(sp_driver *driver, sp_lora_task *task)
{
    sp_error error = {0};
    sp_status status = set_active(driver, task->name, &error);
    bool may = status == SP_ERR_NOT_FOUND && may_have_folder(driver, task->name);
    bool at_peer = status == SP_ERR_NOT_FOUND && is_at_peer(driver, task->name);

    if (may && !task->looked_up)
        look_up(driver, task);
    else if ((may && task->path) || at_peer)
        run_load(driver, task);
    else
        finish_task(driver, task, status, &error);
    driver->adapters_changed |= status == SP_OK;
}

static void run_list(sp_driver *driver, sp_lora_task *task)
{
    sp_error error = {0};
    sp_status status = sp_snapshot_take(
        driver->engine, &driver->counts, task->with_metrics ? &driver->metrics : NULL,
        task->with_receipts, driver->hidden, driver->n_hidden, &task->snapshot);

    for (size_t i = 0; i < task->snapshot.n_adapters && status == SP_OK; i++)
        task->snapshot.adapters[i].held =
            sp_driver_is_held(driver, task->snapshot.adapters[i].name);
    for (const sp_pending_load *load = driver->loads; load && status == SP_OK; load = load->next)
        if (load->waiters && !load->looking &&
            !sp_snapshot_add_awaited(&task->snapshot, load->name))
            status = SP_ERR_MEMORY;
    if (status != SP_OK)
        sp_fail_memory(&error, sizeof(sp_snapshot), "a list of adapters");
    sp_task_finish(&task->task, status, &error);
    sp_task_release(&task->task);
}

void sp_driver_run_lora_task(sp_driver *driver, sp_lora_task *task)
{
    switch (task->task.kind) {
    case SP_TASK_LOAD:
        run_load(driver, task);
        break;
    case SP_TASK_UNLOAD:
        run_unload(driver, task);
        break;
    case SP_TASK_ACTIVATE:
        run_activate(driver, task);
        break;
    case SP_TASK_FOLDER:
        take_folder(driver, task);
        break;
    case SP_TASK_ABORT:
    case SP_TASK_HOLD:
    case SP_TASK_RESUME:
        sp_driver_run_hold_task(driver, task);
        break;
    case SP_TASK_LIST:
    case SP_TASK_GENERATE:
        run_list(driver, task);
        break;
    }
}
