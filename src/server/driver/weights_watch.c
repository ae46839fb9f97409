#include "server/driver/weights_watch.h"

#include "base/alloc.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>
#include <time.h>

#define LOOK_INTERVAL_NS 500000000L
#define NS_PER_S         1000000000L
#define STOP_WAIT_S      1

struct sp_weights_watch {
    sp_engine *engine;
    sp_log *log;
    pthread_t thread;
    atomic_int state;
    pthread_mutex_t lock; /* guards all fields below */
    pthread_cond_t news;  /* stopping, or ended */
    sp_error error;
    bool stopping, has_ended;
    bool abandoned; /* the thread frees it, should it ever get so far */
};

static void note(sp_weights_watch *watch, const sp_error *error)
{
    bool replaced = strcmp(error->code, SP_CODE_WEIGHTS_REPLACED) == 0;
    sp_weights_state state = replaced ? SP_WEIGHTS_REPLACED : SP_WEIGHTS_CHANGED;

    pthread_mutex_lock(&watch->lock);
    if (!watch->stopping && (int)state > atomic_load(&watch->state)) {
        watch->error = *error;
        atomic_store(&watch->state, (int)state);
        sp_log_line(watch->log, "sidepath serve: not ready any more: %s [%s]", error->text,
                    error->code);
    }
    pthread_mutex_unlock(&watch->lock);
}

static void look(sp_weights_watch *watch)
{
    sp_error error;

    if (sp_engine_check_weights(watch->engine, &error) != SP_OK)
        note(watch, &error);
}

static void wait_until(sp_weights_watch *watch, long nanoseconds)
{
    struct timespec until;

    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_nsec += nanoseconds;
    until.tv_sec += until.tv_nsec / NS_PER_S;
    until.tv_nsec %= NS_PER_S;
    pthread_cond_timedwait(&watch->news, &watch->lock, &until);
}

static void destroy(sp_weights_watch *watch)
{
    pthread_cond_destroy(&watch->news);
    pthread_mutex_destroy(&watch->lock);
    sp_free(watch);
}

static void *run(void *user)
{
    sp_weights_watch *watch = user;
    bool abandoned;

    pthread_mutex_lock(&watch->lock);
    while (!watch->stopping) {
        pthread_mutex_unlock(&watch->lock);
        look(watch);
        pthread_mutex_lock(&watch->lock);
        if (!watch->stopping)
            wait_until(watch, LOOK_INTERVAL_NS);
    }
    watch->has_ended = true;
    abandoned = watch->abandoned;
    pthread_cond_signal(&watch->news);
    pthread_mutex_unlock(&watch->lock);
    if (abandoned)
        destroy(watch);
    return NULL;
}

sp_status sp_weights_watch_start(sp_engine *engine, sp_log *log, sp_weights_watch **out_watch,
                                 sp_error *error)
{
    sp_weights_watch *watch = sp_calloc(1, sizeof *watch);
    pthread_condattr_t monotonic;

    if (!watch)
        return sp_fail_memory(error, sizeof *watch, "the watch over the weights");
    watch->engine = engine;
    watch->log = log;
    atomic_init(&watch->state, SP_WEIGHTS_SOUND);
    pthread_mutex_init(&watch->lock, NULL);
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&watch->news, &monotonic);
    pthread_condattr_destroy(&monotonic);
    if (pthread_create(&watch->thread, NULL, run, watch) != 0) {
        destroy(watch);
        return sp_fail(error, SP_ERR_THREAD, NULL, NULL, -1,
                       "cannot start the watch over the weights");
    }
    *out_watch = watch;
    return SP_OK;
}

void sp_weights_watch_stop(sp_weights_watch *watch)
{
    struct timespec until;
    bool ended;

    if (!watch)
        return;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += STOP_WAIT_S;
    pthread_mutex_lock(&watch->lock);
    watch->stopping = true;
    pthread_cond_signal(&watch->news);
    while (!watch->has_ended && pthread_cond_timedwait(&watch->news, &watch->lock, &until) == 0)
        continue;
    ended = watch->has_ended;
    watch->abandoned = !ended;
    if (!ended)
        pthread_detach(watch->thread);
    pthread_mutex_unlock(&watch->lock);
    if (!ended)
        return;
    pthread_join(watch->thread, NULL);
    destroy(watch);
}

sp_weights_state sp_weights_watch_state(sp_weights_watch *watch, sp_error *out_error)
{
    sp_weights_state state;

    if (!watch)
        return SP_WEIGHTS_SOUND;
    state = (sp_weights_state)atomic_load(&watch->state);
    if (state == SP_WEIGHTS_SOUND || !out_error)
        return state;
    pthread_mutex_lock(&watch->lock);
    *out_error = watch->error;
    pthread_mutex_unlock(&watch->lock);
    return state;
}

void sp_weights_watch_look(sp_weights_watch *watch)
{
    if (watch && sp_engine_weights_touched(watch->engine))
        look(watch);
}
