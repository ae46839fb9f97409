#include "server/driver/compiler.h"

#include "base/alloc.h"
#include "base/error.h"
#include "base/hash.h"

#include <string.h>

/* Bounds of the cache: entries, and memory of texts and constraints. What is in use stays with its
 * requests when it leaves. */
#define ENTRIES_MAX 64
#define BYTES_MAX   ((size_t)256 << 20)

typedef struct entry {
    uint64_t hash, used; /* of the text; the count of look-ups at the last use */
    sp_constraint_kind kind;
    sp_constraint_thought thought;
    char *text; /* [bytes] owned */
    size_t bytes;
    sp_constraint *constraint; /* one reference */
} entry;

struct sp_compiler {
    const sp_engine *engine;
    sp_driver *driver;
    sp_task_queue queue;
    pthread_t thread;
    entry entries[ENTRIES_MAX]; /* the thread's, as are the next two */
    int32_t n_entries;
    uint64_t n_uses;
};

/* ---- the cache ----------------------------------------------------------------------------- */

static void drop_entry(sp_compiler *compiler, int32_t index)
{
    sp_constraint_release(compiler->entries[index].constraint);
    sp_free(compiler->entries[index].text);
    compiler->entries[index] = compiler->entries[--compiler->n_entries];
}

static int32_t oldest(const sp_compiler *compiler)
{
    int32_t found = 0;

    for (int32_t i = 1; i < compiler->n_entries; i++)
        if (compiler->entries[i].used < compiler->entries[found].used)
            found = i;
    return found;
}

static size_t cached_bytes(const sp_compiler *compiler)
{
    size_t bytes = 0;

    for (int32_t i = 0; i < compiler->n_entries; i++)
        bytes += compiler->entries[i].bytes + sp_constraint_bytes(compiler->entries[i].constraint);
    return bytes;
}

static sp_constraint *find(sp_compiler *compiler, const sp_wanted_output *wanted, uint64_t hash)
{
    for (int32_t i = 0; i < compiler->n_entries; i++) {
        entry *at = &compiler->entries[i];

        if (at->hash == hash && at->kind == wanted->kind && at->thought == wanted->thought &&
            at->bytes == wanted->bytes &&
            (at->bytes == 0 || memcmp(at->text, wanted->text, at->bytes) == 0)) {
            at->used = ++compiler->n_uses;
            sp_constraint_retain(at->constraint);
            return at->constraint;
        }
    }
    return NULL;
}

/* Where there is no memory for it, it is not kept. */
static void keep(sp_compiler *compiler, const sp_wanted_output *wanted, uint64_t hash,
                 sp_constraint *constraint)
{
    char *text = sp_malloc(wanted->bytes + 1);

    if (!text)
        return;
    memcpy(text, wanted->text ? wanted->text : "", wanted->bytes);
    while (compiler->n_entries > 0 &&
           (compiler->n_entries == ENTRIES_MAX || cached_bytes(compiler) > BYTES_MAX))
        drop_entry(compiler, oldest(compiler));
    sp_constraint_retain(constraint);
    compiler->entries[compiler->n_entries++] = (entry){.hash = hash,
                                                       .used = ++compiler->n_uses,
                                                       .kind = wanted->kind,
                                                       .thought = wanted->thought,
                                                       .text = text,
                                                       .bytes = wanted->bytes,
                                                       .constraint = constraint};
}

/* ---- the thread ---------------------------------------------------------------------------- */

static sp_status compile(sp_compiler *compiler, const sp_wanted_output *wanted,
                         sp_constraint **out_constraint, sp_error *error)
{
    uint64_t hash = sp_xxh3(wanted->text, wanted->bytes);
    sp_constraint_options options;
    sp_status status;

    *out_constraint = find(compiler, wanted, hash);
    if (*out_constraint)
        return SP_OK;
    sp_constraint_options_default(&options, sizeof options);
    options.kind = wanted->kind;
    options.thought = wanted->thought;
    options.text = wanted->text;
    options.text_bytes = wanted->bytes;
    status = sp_engine_compile(compiler->engine, &options, out_constraint, error);
    if (status == SP_OK)
        keep(compiler, wanted, hash, *out_constraint);
    return status;
}

/* The field is the subject: the place inside of it is in the text. */
static void name_field(const sp_wanted_output *wanted, sp_error *error)
{
    const sp_error why = *error;

    sp_fail(error, why.status, why.code, wanted->field, why.position, "%s: %s", wanted->field,
            why.text);
}

static void pass_on(sp_compiler *compiler, sp_generation *generation)
{
    sp_error error;
    sp_status status = SP_OK;

    if (!generation->constraint && !atomic_load(&generation->task.cancelled)) {
        status = compile(compiler, &generation->wanted, &generation->constraint, &error);
        if (status != SP_OK)
            name_field(&generation->wanted, &error);
    }
    for (int32_t i = 0; i < generation->n_choices; i++)
        generation->choices[i].request.constraint = generation->constraint;
    if (status == SP_OK)
        status = sp_driver_generate(compiler->driver, generation, &error);
    if (status != SP_OK)
        sp_task_finish(&generation->task, status, &error);
}

static void *run(void *user)
{
    sp_compiler *compiler = user;
    bool closed = false;

    while (!closed) {
        sp_task *task = sp_task_queue_take(&compiler->queue, -1, &closed);

        while (task) {
            sp_task *next = task->next;

            pass_on(compiler, (sp_generation *)(void *)task);
            sp_task_release(task);
            task = next;
        }
    }
    return NULL;
}

/* ---- life ---------------------------------------------------------------------------------- */

sp_status sp_compiler_start(const sp_engine *engine, sp_driver *driver, sp_compiler **out_compiler,
                            sp_error *error)
{
    sp_compiler *compiler = sp_calloc(1, sizeof *compiler);

    if (!compiler)
        return sp_fail_memory(error, sizeof *compiler, "the compiler of schemas");
    compiler->engine = engine;
    compiler->driver = driver;
    sp_task_queue_open(&compiler->queue);
    if (pthread_create(&compiler->thread, NULL, run, compiler) != 0) {
        sp_task_queue_destroy(&compiler->queue);
        sp_free(compiler);
        return sp_fail(error, SP_ERR_THREAD, NULL, NULL, -1,
                       "cannot start the thread of the compiler of schemas");
    }
    *out_compiler = compiler;
    return SP_OK;
}

void sp_compiler_stop(sp_compiler *compiler)
{
    if (!compiler)
        return;
    sp_task_queue_close(&compiler->queue);
    pthread_join(compiler->thread, NULL);
    while (compiler->n_entries > 0)
        drop_entry(compiler, 0);
    sp_task_queue_destroy(&compiler->queue);
    sp_free(compiler);
}

sp_status sp_compiler_generate(sp_compiler *compiler, sp_generation *generation, sp_error *error)
{
    if (!generation->wanted.field || generation->asks)
        return sp_driver_generate(compiler->driver, generation, error);
    if (sp_task_queue_push(&compiler->queue, &generation->task))
        return SP_OK;
    return sp_fail(error, SP_ERR_STATE, SP_CODE_SHUTTING_DOWN, NULL, -1,
                   "the server is shutting down");
}
