/*
 * holds.c: one adapter's requests, and nobody else's: aborted, held, resumed. A hold belongs to the
 * name: it is for every version of it, and for requests that come later, until the name is resumed
 * or unloaded.
 */
#include "base/alloc.h"
#include "base/error.h"
#include "server/driver/driver_state.h"

#include <string.h>

static size_t find_held(const sp_driver *driver, const char *adapter)
{
    size_t i = 0;

    while (i < driver->n_held && strcmp(driver->held[i], adapter) != 0)
        i++;
    return i;
}

bool sp_driver_is_held(const sp_driver *driver, const char *adapter)
{
    return adapter && find_held(driver, adapter) < driver->n_held;
}

/* False: out of memory. */
static bool add_held(sp_driver *driver, const char *adapter)
{
    char **grown;

    if (sp_driver_is_held(driver, adapter))
        return true;
    grown = sp_realloc(driver->held, (driver->n_held + 1) * sizeof *grown);
    if (!grown)
        return false;
    driver->held = grown;
    grown[driver->n_held] = sp_strdup(adapter);
    if (!grown[driver->n_held])
        return false;
    driver->n_held++;
    return true;
}

static void remove_held(sp_driver *driver, const char *adapter)
{
    size_t i = find_held(driver, adapter);

    if (i == driver->n_held)
        return;
    sp_free(driver->held[i]);
    driver->held[i] = driver->held[--driver->n_held];
}

void sp_driver_end_hold(sp_driver *driver, const char *adapter)
{
    if (!sp_driver_is_held(driver, adapter))
        return;
    remove_held(driver, adapter);
    sp_driver_set_paused(driver, adapter, false);
}

void sp_driver_free_holds(sp_driver *driver)
{
    for (size_t i = 0; i < driver->n_held; i++)
        sp_free(driver->held[i]);
    sp_free(driver->held);
}

static sp_status run(sp_driver *driver, sp_lora_task *task, sp_error *error)
{
    switch (task->task.kind) {
    case SP_TASK_ABORT:
        task->n_requests =
            sp_driver_abort(driver, task->name) + sp_driver_abort_waiters(driver, task->name);
        return SP_OK;
    case SP_TASK_HOLD:
        if (!add_held(driver, task->name))
            return sp_fail_memory(error, sizeof(char *), "a name");
        task->n_requests = sp_driver_set_paused(driver, task->name, true);
        return SP_OK;
    default:
        remove_held(driver, task->name);
        task->n_requests = sp_driver_set_paused(driver, task->name, false);
        return SP_OK;
    }
}

/* A name that is loaded, or that requests wait for. */
static bool is_known(const sp_driver *driver, const char *adapter)
{
    sp_stage_version_info info = {.struct_bytes = sizeof info};

    for (const sp_pending_load *load = driver->loads; load; load = load->next)
        if (strcmp(load->name, adapter) == 0)
            return true;
    return sp_stage_find(sp_engine_stage(driver->engine), adapter, &info, NULL) == SP_OK;
}

void sp_driver_run_hold_task(sp_driver *driver, sp_lora_task *task)
{
    sp_error error = {0};
    sp_status status;

    if (is_known(driver, task->name))
        status = run(driver, task, &error);
    else
        status = sp_fail(&error, SP_ERR_NOT_FOUND, NULL, task->name, -1,
                         "no adapter is loaded under the name \"%s\"", task->name);
    sp_task_finish(&task->task, status, &error);
    sp_task_release(&task->task);
}
