#include "server/driver/weights_watch.h"

#include "base/alloc.h"
#include "server/driver/helper.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>

#define LOOK_INTERVAL_NS 500000000L

struct sp_weights_watch {
    sp_helper helper;
    sp_engine *engine;
    sp_log *log;
    atomic_int state;
    sp_error error; /* under the helper's lock */
};

static void note(sp_weights_watch *watch, const sp_error *error)
{
    bool replaced = strcmp(error->code, SP_CODE_WEIGHTS_REPLACED) == 0;
    sp_weights_state state = replaced ? SP_WEIGHTS_REPLACED : SP_WEIGHTS_CHANGED;

    pthread_mutex_lock(&watch->helper.lock);
    if (!watch->helper.closed && (int)state > atomic_load(&watch->state)) {
        watch->error = *error;
        atomic_store(&watch->state, (int)state);
        sp_log_line(watch->log, "sidepath serve: not ready any more: %s [%s]", error->text,
                    error->code);
    }
    pthread_mutex_unlock(&watch->helper.lock);
}

static void look(sp_weights_watch *watch)
{
    sp_error error;

    if (sp_engine_check_weights(watch->engine, &error) != SP_OK)
        note(watch, &error);
}

static void destroy(void *state)
{
    sp_weights_watch *watch = state;

    sp_helper_destroy(&watch->helper);
    sp_free(watch);
}

static void run(void *state)
{
    sp_weights_watch *watch = state;

    pthread_mutex_lock(&watch->helper.lock);
    while (!watch->helper.closed) {
        pthread_mutex_unlock(&watch->helper.lock);
        look(watch);
        pthread_mutex_lock(&watch->helper.lock);
        if (!watch->helper.closed)
            sp_helper_wait(&watch->helper, LOOK_INTERVAL_NS);
    }
    pthread_mutex_unlock(&watch->helper.lock);
}

sp_status sp_weights_watch_start(sp_engine *engine, sp_log *log, sp_weights_watch **out_watch,
                                 sp_error *error)
{
    sp_weights_watch *watch = sp_calloc(1, sizeof *watch);
    sp_status status;

    if (!watch)
        return sp_fail_memory(error, sizeof *watch, "the watch over the weights");
    watch->engine = engine;
    watch->log = log;
    atomic_init(&watch->state, SP_WEIGHTS_SOUND);
    sp_helper_init(&watch->helper);
    status =
        sp_helper_start(&watch->helper, "the watch over the weights", run, destroy, watch, error);
    if (status == SP_OK)
        *out_watch = watch;
    else
        destroy(watch);
    return status;
}

void sp_weights_watch_stop(sp_weights_watch *watch)
{
    if (watch)
        sp_helper_close(&watch->helper);
}

sp_weights_state sp_weights_watch_state(sp_weights_watch *watch, sp_error *out_error)
{
    sp_weights_state state;

    if (!watch)
        return SP_WEIGHTS_SOUND;
    state = (sp_weights_state)atomic_load(&watch->state);
    if (state == SP_WEIGHTS_SOUND || !out_error)
        return state;
    pthread_mutex_lock(&watch->helper.lock);
    *out_error = watch->error;
    pthread_mutex_unlock(&watch->helper.lock);
    return state;
}

void sp_weights_watch_look(sp_weights_watch *watch)
{
    if (watch && sp_engine_weights_touched(watch->engine))
        look(watch);
}
