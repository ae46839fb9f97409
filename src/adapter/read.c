/*
 * read.c: the adapter's data into one block of memory, with pread, so that a file that shrinks is
 * an error and not a signal. Each piece is checked and hashed while it is still in the cache. A
 * tensor is a task, so that threads may share the work: hashing takes longer than all else.
 */
#include "adapter/audit.h"
#include "adapter/values.h"

#include "base/alloc.h"
#include "base/clock.h"
#include "base/file.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#define PIECE_BYTES ((size_t)256 << 10) /* a multiple of every element size */
#define ALIGN_BYTES 64

/* A copy of a base tensor is compared piece by piece elsewhere, and not kept. */
static bool is_kept(const sp_item *item)
{
    return item->key.role != SP_ROLE_BASE_COPY;
}

static size_t padded(uint64_t bytes)
{
    return (size_t)((bytes + ALIGN_BYTES - 1) / ALIGN_BYTES * ALIGN_BYTES);
}

/* A tensor and where it goes. */
typedef struct target {
    sp_item *item;
    char *data;
} target;

/* What the tasks of one file share. */
typedef struct read_job {
    const sp_audit *audit;
    const target *targets; /* this file's, ascending by offset */
    const sp_file *file;
    const char *path;
    atomic_ullong hash_ns;
    atomic_int failed_task; /* the first one in the file, whatever the threads; INT32_MAX: none */

    pthread_mutex_t mutex; /* of what follows, and of changes to failed_task */
    sp_status status;
    sp_error error;
} read_job;

static int by_file_offset(const void *left, const void *right)
{
    const sp_tensor *a = ((const target *)left)->item->tensor;
    const sp_tensor *b = ((const target *)right)->item->tensor;

    if (a->file != b->file)
        return a->file < b->file ? -1 : 1;
    return (a->offset_bytes > b->offset_bytes) - (a->offset_bytes < b->offset_bytes);
}

static sp_status refuse_value(const sp_audit *audit, const sp_item *item, const char *data,
                              int64_t index, sp_error *error)
{
    int64_t cols = item->tensor->dims[1];

    return sp_refuse(error, SP_REASON_NON_FINITE, item->tensor->name, index,
                     "%.200s: element %lld (row %lld, column %lld) is %g, which is not finite in "
                     "%s",
                     item->tensor->name, (long long)index, (long long)(index / cols),
                     (long long)(index % cols), (double)sp_values_at(data, item->dtype, index),
                     sp_dtype_name(audit->options->pool_dtype));
}

/* One piece: read, checked, hashed. */
static sp_status read_piece(read_job *job, const target *to, uint64_t at, size_t n, sp_sha256 *hash,
                            sp_error *error)
{
    const sp_tensor *tensor = to->item->tensor;
    size_t element_bytes = sp_dtype_bytes(to->item->dtype);
    uint64_t began_ns;
    int64_t bad;
    sp_error local;
    sp_status status = sp_file_read(job->file, tensor->offset_bytes + at, to->data + at, n, &local);

    if (status == SP_ERR_TRUNCATED)
        return sp_refuse(error, SP_REASON_TRUNCATED, tensor->name, local.position,
                         "%s shrank while %.150s was read: %s", job->path, tensor->name,
                         local.text);
    if (status != SP_OK)
        return sp_fail(error, status, NULL, job->path, local.position, "%s: %s", job->path,
                       local.text);
    bad = sp_values_find_bad(to->data + at, to->item->dtype, (int64_t)(n / element_bytes),
                             job->audit->options->pool_dtype);
    if (bad >= 0)
        return refuse_value(job->audit, to->item, to->data, (int64_t)(at / element_bytes) + bad,
                            error);
    began_ns = sp_clock_ns();
    sp_sha256_update(hash, to->data + at, n);
    atomic_fetch_add_explicit(&job->hash_ns, sp_clock_ns() - began_ns, memory_order_relaxed);
    return SP_OK;
}

static sp_status read_tensor(read_job *job, const target *to, sp_error *error)
{
    uint64_t bytes = to->item->tensor->bytes;
    sp_sha256 *hash;
    sp_status status = sp_sha256_create(&hash);

    if (status != SP_OK)
        return sp_fail_memory(error, 0, "a digest");
    for (uint64_t at = 0; at < bytes && status == SP_OK; at += PIECE_BYTES) {
        uint64_t left = bytes - at;

        status =
            read_piece(job, to, at, left < PIECE_BYTES ? (size_t)left : PIECE_BYTES, hash, error);
    }
    if (status != SP_OK) {
        sp_sha256_abandon(hash);
        return status;
    }
    sp_sha256_finish(hash, to->item->leaf);
    to->item->data = to->data;
    return SP_OK;
}

/* sp_task_fn. Tensors behind a failed one are left; those before it may fail earlier still. */
static void read_task(void *user, int32_t task, int32_t thread)
{
    read_job *job = user;
    sp_error error;
    sp_status status;

    (void)thread;
    if (task > atomic_load(&job->failed_task))
        return;
    status = read_tensor(job, &job->targets[task], &error);
    if (status == SP_OK)
        return;
    pthread_mutex_lock(&job->mutex);
    if (task < atomic_load(&job->failed_task)) {
        atomic_store(&job->failed_task, task);
        job->status = status;
        job->error = error;
    }
    pthread_mutex_unlock(&job->mutex);
}

/* The file must be what its header was read from. */
static sp_status open_file(const sp_audit *audit, int32_t index, sp_file *out_file)
{
    const char *path = sp_checkpoint_path(audit->checkpoint, index);
    uint64_t bytes = sp_checkpoint_file_bytes(audit->checkpoint, index);
    sp_error local;
    sp_status status = sp_file_open(path, out_file, &local);

    if (status == SP_ERR_NOT_FOUND || status == SP_ERR_INPUT)
        return sp_refuse(audit->error, SP_REASON_WEIGHTS_MISSING, sp_path_tail(path), -1, "%s",
                         local.text);
    if (status != SP_OK) {
        if (audit->error)
            *audit->error = local;
        return status;
    }
    if (out_file->bytes != bytes) {
        path = sp_path_tail(path);
        status = sp_refuse(audit->error, SP_REASON_TRUNCATED, path, (int64_t)out_file->bytes,
                           "%s had %llu bytes when its header was read, now %llu", path,
                           (unsigned long long)bytes, (unsigned long long)out_file->bytes);
        sp_file_close(out_file);
    }
    return status;
}

/* The n targets that lie in one file. */
static sp_status read_file(sp_audit *audit, const target *targets, int32_t n)
{
    int32_t index = targets[0].item->tensor->file;
    sp_file file;
    read_job job = {.audit = audit,
                    .targets = targets,
                    .file = &file,
                    .path = sp_path_tail(sp_checkpoint_path(audit->checkpoint, index)),
                    .failed_task = INT32_MAX};
    sp_status status = open_file(audit, index, &file);

    if (status != SP_OK)
        return status;
    pthread_mutex_init(&job.mutex, NULL);
    sp_exec_run(audit->options->exec, read_task, &job, n);
    pthread_mutex_destroy(&job.mutex);
    sp_file_close(&file);
    audit->adapter->hash_seconds += (double)atomic_load(&job.hash_ns) * 1e-9;
    if (job.status != SP_OK && audit->error)
        *audit->error = job.error;
    return job.status;
}

/* targets [n] ascend by file and offset. */
static sp_status read_all(sp_audit *audit, const target *targets, size_t n)
{
    sp_status status = SP_OK;

    for (size_t begin = 0, end; begin < n && status == SP_OK; begin = end) {
        int32_t file = targets[begin].item->tensor->file;

        for (end = begin; end < n && targets[end].item->tensor->file == file;)
            end++;
        status = read_file(audit, targets + begin, (int32_t)(end - begin));
    }
    return status;
}

static sp_status allocate_data(sp_audit *audit, target *targets, size_t n)
{
    size_t bytes = 0;
    char *data;

    for (size_t i = 0; i < n; i++)
        bytes += padded(targets[i].item->tensor->bytes);
    data = sp_aligned_malloc(bytes + ALIGN_BYTES, ALIGN_BYTES); /* never an empty block */
    if (!data)
        return sp_fail_memory(audit->error, bytes, "the tensors of an adapter");
    audit->adapter->data = data;
    for (size_t i = 0; i < n; i++) {
        targets[i].data = data;
        data += padded(targets[i].item->tensor->bytes);
    }
    return SP_OK;
}

sp_status sp_audit_read(sp_audit *audit)
{
    target *targets = sp_malloc(audit->n_items * sizeof *targets);
    size_t n = 0;
    sp_status status;

    if (!targets)
        return sp_fail_memory(audit->error, audit->n_items * sizeof *targets, "a list of tensors");
    for (size_t i = 0; i < audit->n_items; i++) {
        if (is_kept(&audit->items[i]))
            targets[n++].item = &audit->items[i];
    }
    qsort(targets, n, sizeof *targets, by_file_offset);
    status = allocate_data(audit, targets, n);
    if (status == SP_OK)
        status = read_all(audit, targets, n);
    sp_free(targets);
    return status;
}
