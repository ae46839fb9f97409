#include "server/driver/helper.h"

#include <time.h>

#define CLOSE_WAIT_S 1
#define NS_PER_S     1000000000L

void sp_helper_init(sp_helper *helper)
{
    pthread_condattr_t monotonic;

    *helper = (sp_helper){.closed = false};
    pthread_mutex_init(&helper->lock, NULL);
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&helper->news, &monotonic);
    pthread_cond_init(&helper->ended, &monotonic);
    pthread_condattr_destroy(&monotonic);
}

void sp_helper_destroy(sp_helper *helper)
{
    pthread_cond_destroy(&helper->ended);
    pthread_cond_destroy(&helper->news);
    pthread_mutex_destroy(&helper->lock);
}

static void *run(void *user)
{
    sp_helper *helper = user;
    bool abandoned;

    helper->run(helper->state);
    pthread_mutex_lock(&helper->lock);
    helper->has_ended = true;
    abandoned = helper->abandoned;
    pthread_cond_signal(&helper->ended);
    pthread_mutex_unlock(&helper->lock);
    if (abandoned)
        helper->destroy(helper->state);
    return NULL;
}

sp_status sp_helper_start(sp_helper *helper, const char *what, void (*run_thread)(void *state),
                          void (*destroy)(void *state), void *state, sp_error *error)
{
    helper->run = run_thread;
    helper->destroy = destroy;
    helper->state = state;
    if (pthread_create(&helper->thread, NULL, run, helper) == 0)
        return SP_OK;
    return sp_fail(error, SP_ERR_THREAD, NULL, NULL, -1, "cannot start the thread of %s", what);
}

static struct timespec from_now(int64_t ns)
{
    struct timespec until;

    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_nsec += (long)(ns % NS_PER_S);
    until.tv_sec += (time_t)(ns / NS_PER_S) + until.tv_nsec / NS_PER_S;
    until.tv_nsec %= NS_PER_S;
    return until;
}

/* Under the lock. False: it is to be abandoned. The time begins when it is not engaged any more, so
 * that one which has just left can end. */
static bool wait_for_end(sp_helper *helper)
{
    struct timespec until = from_now(CLOSE_WAIT_S * NS_PER_S);
    bool in_time = true;

    while (!helper->has_ended && (in_time || helper->engaged)) {
        if (helper->engaged) {
            pthread_cond_wait(&helper->ended, &helper->lock);
            until = from_now(CLOSE_WAIT_S * NS_PER_S);
            in_time = true;
        } else {
            in_time = pthread_cond_timedwait(&helper->ended, &helper->lock, &until) == 0;
        }
    }
    return helper->has_ended;
}

void sp_helper_close(sp_helper *helper)
{
    bool ended;

    pthread_mutex_lock(&helper->lock);
    helper->closed = true;
    pthread_cond_broadcast(&helper->news);
    ended = wait_for_end(helper);
    helper->abandoned = !ended;
    if (!ended)
        pthread_detach(helper->thread);
    pthread_mutex_unlock(&helper->lock);
    if (!ended)
        return;
    pthread_join(helper->thread, NULL);
    helper->destroy(helper->state);
}

void sp_helper_wait(sp_helper *helper, int64_t ns)
{
    struct timespec until;

    if (ns == 0) {
        pthread_cond_wait(&helper->news, &helper->lock);
        return;
    }
    until = from_now(ns);
    pthread_cond_timedwait(&helper->news, &helper->lock, &until);
}

bool sp_helper_enter(sp_helper *helper)
{
    pthread_mutex_lock(&helper->lock);
    helper->engaged = !helper->closed;
    pthread_mutex_unlock(&helper->lock);
    return helper->engaged;
}

void sp_helper_leave(sp_helper *helper)
{
    pthread_mutex_lock(&helper->lock);
    helper->engaged = false;
    pthread_cond_signal(&helper->ended);
    pthread_mutex_unlock(&helper->lock);
}
