#include "server/driver/state_file.h"

#include "base/alloc.h"
#include "base/file.h"
#include "server/driver/helper.h"

struct sp_state_file {
    sp_helper helper;
    char *path;
    sp_log *log;     /* not after the close: it is gone then */
    sp_text waiting; /* under the helper's lock, as is the next */
    bool has_waiting;
};

static void destroy(void *state)
{
    sp_state_file *file = state;

    sp_text_free(&file->waiting);
    sp_helper_destroy(&file->helper);
    sp_free(file->path);
    sp_free(file);
}

/* Without the lock, but for the line in the log. */
static void write_state(sp_state_file *file, const sp_text *text)
{
    sp_error error;

    if (sp_file_write_all(file->path, text->data, text->bytes, &error) == SP_OK)
        return;
    pthread_mutex_lock(&file->helper.lock);
    if (!file->helper.abandoned)
        sp_log_line(file->log,
                    SP_LOG_PREFIX "warning: the state was not saved, so a restart loads what it "
                                  "was before: %s",
                    error.text);
    pthread_mutex_unlock(&file->helper.lock);
}

/* What waits is written even after the close. */
static void run(void *state)
{
    sp_state_file *file = state;

    pthread_mutex_lock(&file->helper.lock);
    while (file->has_waiting || !file->helper.closed) {
        sp_text text = file->waiting;

        if (!file->has_waiting) {
            sp_helper_wait(&file->helper, 0);
            continue;
        }
        file->waiting = (sp_text){0};
        file->has_waiting = false;
        pthread_mutex_unlock(&file->helper.lock);
        write_state(file, &text);
        sp_text_free(&text);
        pthread_mutex_lock(&file->helper.lock);
    }
    pthread_mutex_unlock(&file->helper.lock);
}

sp_status sp_state_file_open(const char *path, sp_log *log, sp_state_file **out_file,
                             sp_error *error)
{
    sp_state_file *file = sp_calloc(1, sizeof *file);
    sp_status status;

    if (file)
        file->path = sp_strdup(path);
    if (!file || !file->path) {
        sp_free(file);
        return sp_fail_memory(error, sizeof *file, "the state's file");
    }
    file->log = log;
    sp_helper_init(&file->helper);
    status = sp_helper_start(&file->helper, "the state's file", run, destroy, file, error);
    if (status == SP_OK)
        *out_file = file;
    else
        destroy(file);
    return status;
}

void sp_state_file_put(sp_state_file *file, sp_text *text)
{
    pthread_mutex_lock(&file->helper.lock);
    sp_text_free(&file->waiting);
    file->waiting = *text;
    file->has_waiting = true;
    pthread_cond_signal(&file->helper.news);
    pthread_mutex_unlock(&file->helper.lock);
    *text = (sp_text){0};
}

void sp_state_file_close(sp_state_file *file)
{
    if (file)
        sp_helper_close(&file->helper);
}
