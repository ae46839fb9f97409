#include "server/driver/publisher.h"

#include "base/alloc.h"
#include "base/error.h"
#include "base/file.h"
#include "server/driver/publish_body.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

struct sp_publisher {
    const sp_engine *engine;
    sp_driver *driver;       /* set before the thread */
    sp_adapter_store *store; /* the thread's; NULL: nothing is kept */
    sp_log *log;
    sp_task_queue queue;
    sp_task *waiting, *last_waiting; /* the thread's: publishes in their order, by `next` */
    pthread_t thread;
    bool has_thread;
};

/* ---- shared memory ------------------------------------------------------------------------- */

static sp_status bad_bounds(const sp_shared_name *shared, uint64_t have, sp_error *error)
{
    return sp_fail(error, SP_ERR_INPUT, SP_CODE_SHARED_BOUNDS, "shm", -1,
                   "the shared memory \"%s\" has %llu bytes; %llu from byte %llu on are wanted",
                   shared->name, (unsigned long long)have, (unsigned long long)shared->bytes,
                   (unsigned long long)shared->offset);
}

static sp_status measure(int fd, sp_shared_name *shared, size_t bytes_max, sp_error *error)
{
    struct stat info;
    uint64_t have;

    if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode))
        return sp_fail(error, SP_ERR_INPUT, SP_CODE_SHARED_MISSING, "shm", -1,
                       "\"%s\" is no shared memory", shared->name);
    have = (uint64_t)info.st_size;
    if (shared->bytes == 0 && shared->offset < have)
        shared->bytes = have - shared->offset;
    if (shared->offset >= have || shared->bytes > have - shared->offset)
        return bad_bounds(shared, have, error);
    if (shared->bytes > bytes_max)
        return sp_fail(error, SP_ERR_TOO_LARGE, "body-too-large", "shm", -1,
                       "the shared memory \"%s\" is larger than the server takes "
                       "(--adapter-bytes-max)",
                       shared->name);
    return SP_OK;
}

/* Read, not mapped: what its owner does to it later, or meanwhile, cannot reach what was judged. */
static sp_status copy_from(int fd, sp_published *published, sp_error *error)
{
    const sp_shared_name *shared = &published->shared;
    sp_file file = {fd, shared->offset + shared->bytes};
    size_t bytes = (size_t)shared->bytes;
    sp_status status;

    if (!sp_budget_hold(published->budget, SP_BUDGET_BODIES, &published->held, bytes + 1))
        return sp_fail(error, SP_ERR_MEMORY, SP_CODE_MEMORY_FULL, NULL, -1,
                       "clients fill all memory that they may (--client-bytes-max); try again "
                       "later");
    if (!sp_text_reserve(&published->body, bytes))
        return sp_fail_memory(error, bytes, "an adapter");
    status = sp_file_read(&file, shared->offset, published->body.data, bytes, error);
    if (status == SP_ERR_TRUNCATED)
        return bad_bounds(shared, 0, error);
    published->body.bytes = bytes;
    return status;
}

static sp_status copy_shared(sp_published *published, sp_error *error)
{
    int fd = shm_open(published->shared.name, O_RDONLY | O_CLOEXEC, 0);
    sp_status status;

    if (fd < 0)
        return sp_fail(error, SP_ERR_INPUT, SP_CODE_SHARED_MISSING, "shm", -1,
                       "the shared memory \"%s\" cannot be opened: %s", published->shared.name,
                       strerror(errno));
    status = measure(fd, &published->shared, published->bytes_max, error);
    if (status == SP_OK)
        status = copy_from(fd, published, error);
    close(fd);
    return status;
}

/* ---- reading ------------------------------------------------------------------------------- */

static sp_status keep_content(sp_publisher *publisher, sp_lora_task *task,
                              const sp_publish_body *body, sp_error *error)
{
    sp_published *published = task->published;
    sp_status status;

    if (!publisher->store)
        return SP_OK;
    status =
        sp_adapter_store_put(publisher->store, &published->digest, body->config, body->config_bytes,
                             body->weights, body->weights_bytes, &task->path, error);
    published->stored = status == SP_OK;
    return status;
}

static sp_status read_adapter(sp_publisher *publisher, sp_lora_task *task, sp_error *error)
{
    sp_published *published = task->published;
    sp_publish_body body = {.config = NULL};
    sp_status status = sp_publish_body_read(published->content_type, published->config,
                                            published->body.data ? published->body.data : "",
                                            published->body.bytes, &body, error);

    if (status == SP_OK)
        status =
            sp_engine_read_tensors(publisher->engine, task->name, body.config, body.config_bytes,
                                   body.views, body.n_views, &published->adapter, error);
    if (status == SP_OK) {
        published->digest = sp_adapter_digest(published->adapter);
        status = keep_content(publisher, task, &body, error);
    }
    sp_publish_body_free(&body);
    return status;
}

static void publish(sp_publisher *publisher, sp_lora_task *task)
{
    sp_published *published = task->published;
    sp_error error;
    sp_status status = SP_OK;

    if (published->shared.name)
        status = copy_shared(published, &error);
    if (status == SP_OK)
        status = read_adapter(publisher, task, &error);
    sp_published_drop_body(published);
    if (status == SP_OK)
        status = sp_driver_adapter(publisher->driver, task, &error);
    if (status == SP_OK)
        return;
    if (published->stored)
        sp_adapter_store_settle(publisher->store, &published->digest);
    sp_task_finish(&task->task, status, &error);
}

/* ---- outcomes ------------------------------------------------------------------------------ */

/* What the name means from now on. */
static sp_status record(sp_publisher *publisher, const sp_lora_task *task, sp_error *error)
{
    const sp_published *published = task->task.kind == SP_TASK_LOAD ? task->published : NULL;

    if (task->outcome < 0 || task->outcome == SP_POOL_FULL)
        return SP_OK; /* nothing has changed */
    return sp_adapter_store_record(publisher->store, task->name,
                                   published ? &published->digest : NULL, task->pinned, error);
}

/* The version serves already where it could not be recorded: the next start has the one before. */
static void decide(sp_publisher *publisher, sp_lora_task *task)
{
    const sp_error *told = &task->outcome_error;
    sp_error error;
    sp_status status = record(publisher, task, &error);

    if (task->published && task->published->stored)
        sp_adapter_store_settle(publisher->store, &task->published->digest);
    if (task->in_use)
        sp_adapter_store_tidy(publisher->store, task->in_use, task->n_in_use);
    if (status != SP_OK) {
        sp_log_line(publisher->log, SP_LOG_PREFIX "warning: \"%s\" was not recorded: %s",
                    task->name, error.text);
        told = &error;
    }
    sp_task_finish(&task->task, status == SP_OK ? task->outcome : status, told);
}

static void append_waiting(sp_publisher *publisher, sp_task *task)
{
    task->next = NULL;
    if (publisher->waiting)
        publisher->last_waiting->next = task;
    else
        publisher->waiting = task;
    publisher->last_waiting = task;
}

/* Outcomes first: somebody waits for them, and they are short. */
static void take(sp_publisher *publisher, bool *out_closed)
{
    sp_task *task = sp_task_queue_take(&publisher->queue, publisher->waiting ? 0 : -1, out_closed);

    while (task) {
        sp_lora_task *adapter = (sp_lora_task *)(void *)task;
        sp_task *next = task->next;

        if (adapter->is_decided) {
            decide(publisher, adapter);
            sp_task_release(task);
        } else {
            append_waiting(publisher, task);
        }
        task = next;
    }
}

static void *run(void *user)
{
    sp_publisher *publisher = user;
    bool closed = false;

    while (!closed || publisher->waiting) {
        sp_task *task;

        take(publisher, &closed);
        task = publisher->waiting;
        if (!task)
            continue;
        publisher->waiting = task->next;
        publish(publisher, (sp_lora_task *)(void *)task);
        sp_task_release(task);
    }
    return NULL;
}

/* ---- life ---------------------------------------------------------------------------------- */

sp_status sp_publisher_create(const sp_engine *engine, sp_adapter_store *store, sp_log *log,
                              sp_publisher **out_publisher, sp_error *error)
{
    sp_publisher *publisher = sp_calloc(1, sizeof *publisher);

    if (!publisher)
        return sp_fail_memory(error, sizeof *publisher, "the reader of published adapters");
    publisher->engine = engine;
    publisher->store = store;
    publisher->log = log;
    sp_task_queue_open(&publisher->queue);
    *out_publisher = publisher;
    return SP_OK;
}

sp_status sp_publisher_start(sp_publisher *publisher, sp_driver *driver, sp_error *error)
{
    publisher->driver = driver;
    if (pthread_create(&publisher->thread, NULL, run, publisher) != 0)
        return sp_fail(error, SP_ERR_THREAD, NULL, NULL, -1,
                       "cannot start the thread that reads published adapters");
    publisher->has_thread = true;
    return SP_OK;
}

void sp_publisher_stop(sp_publisher *publisher)
{
    if (!publisher || !publisher->has_thread)
        return;
    sp_task_queue_close(&publisher->queue);
    pthread_join(publisher->thread, NULL);
    publisher->has_thread = false;
}

void sp_publisher_destroy(sp_publisher *publisher)
{
    if (!publisher)
        return;
    sp_task_queue_destroy(&publisher->queue);
    sp_free(publisher);
}

bool sp_publisher_keep(void *user, sp_lora_task *task)
{
    sp_publisher *publisher = user;

    if (!publisher->store)
        return false;
    return sp_task_queue_push(&publisher->queue, &task->task);
}

sp_status sp_publisher_publish(sp_publisher *publisher, sp_lora_task *task, sp_error *error)
{
    if (sp_task_queue_push(&publisher->queue, &task->task))
        return SP_OK;
    return sp_fail(error, SP_ERR_STATE, SP_CODE_SHUTTING_DOWN, NULL, -1,
                   "the server is shutting down");
}
