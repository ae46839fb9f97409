#include "server/driver/state_file.h"

#include "base/alloc.h"
#include "base/file.h"

#include <pthread.h>
#include <string.h>
#include <time.h>

#define CLOSE_WAIT_S 1

struct sp_state_file {
    char *path;
    sp_log *log; /* not after the close: it is gone then */
    pthread_t thread;
    pthread_mutex_t lock; /* of all below */
    pthread_cond_t filled, ended;
    sp_text waiting;
    bool has_waiting, closed, has_ended;
    bool abandoned; /* the thread frees it, should it ever get so far */
};

static void destroy(sp_state_file *file)
{
    sp_text_free(&file->waiting);
    pthread_cond_destroy(&file->filled);
    pthread_cond_destroy(&file->ended);
    pthread_mutex_destroy(&file->lock);
    sp_free(file->path);
    sp_free(file);
}

/* Without the lock, but for the line in the log. */
static void write_state(sp_state_file *file, const sp_text *text)
{
    sp_error error;

    if (sp_file_write_all(file->path, text->data, text->bytes, &error) == SP_OK)
        return;
    pthread_mutex_lock(&file->lock);
    if (!file->abandoned)
        sp_log_line(file->log,
                    SP_LOG_PREFIX "warning: the state was not saved, so a restart loads what it "
                                  "was before: %s",
                    error.text);
    pthread_mutex_unlock(&file->lock);
}

static void *run(void *user)
{
    sp_state_file *file = user;
    bool abandoned;

    pthread_mutex_lock(&file->lock);
    while (file->has_waiting || !file->closed) {
        sp_text text = file->waiting;

        if (!file->has_waiting) {
            pthread_cond_wait(&file->filled, &file->lock);
            continue;
        }
        file->waiting = (sp_text){0};
        file->has_waiting = false;
        pthread_mutex_unlock(&file->lock);
        write_state(file, &text);
        sp_text_free(&text);
        pthread_mutex_lock(&file->lock);
    }
    file->has_ended = true;
    abandoned = file->abandoned;
    pthread_cond_signal(&file->ended);
    pthread_mutex_unlock(&file->lock);
    if (abandoned)
        destroy(file);
    return NULL;
}

sp_status sp_state_file_open(const char *path, sp_log *log, sp_state_file **out_file,
                             sp_error *error)
{
    sp_state_file *file = sp_calloc(1, sizeof *file);
    pthread_condattr_t monotonic;

    if (file)
        file->path = sp_strdup(path);
    if (!file || !file->path) {
        sp_free(file);
        return sp_fail_memory(error, sizeof *file, "the state's file");
    }
    file->log = log;
    pthread_mutex_init(&file->lock, NULL);
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&file->filled, NULL);
    pthread_cond_init(&file->ended, &monotonic);
    pthread_condattr_destroy(&monotonic);
    if (pthread_create(&file->thread, NULL, run, file) != 0) {
        destroy(file);
        return sp_fail(error, SP_ERR_THREAD, NULL, NULL, -1,
                       "cannot start the thread of the state's file");
    }
    *out_file = file;
    return SP_OK;
}

void sp_state_file_put(sp_state_file *file, sp_text *text)
{
    pthread_mutex_lock(&file->lock);
    sp_text_free(&file->waiting);
    file->waiting = *text;
    file->has_waiting = true;
    pthread_cond_signal(&file->filled);
    pthread_mutex_unlock(&file->lock);
    *text = (sp_text){0};
}

void sp_state_file_close(sp_state_file *file)
{
    struct timespec until;
    bool ended;

    if (!file)
        return;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += CLOSE_WAIT_S;
    pthread_mutex_lock(&file->lock);
    file->closed = true;
    pthread_cond_signal(&file->filled);
    while (!file->has_ended && pthread_cond_timedwait(&file->ended, &file->lock, &until) == 0)
        continue;
    ended = file->has_ended;
    file->abandoned = !ended;
    if (!ended)
        pthread_detach(file->thread);
    pthread_mutex_unlock(&file->lock);
    if (!ended)
        return;
    pthread_join(file->thread, NULL);
    destroy(file);
}
