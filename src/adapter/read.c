/*
 * read.c: an adapter's data from its files, with pread, so that a file that shrinks is an error and
 * not a signal. Each piece is checked and hashed while it is in the cache. Each tensor is a task,
 * so that threads can share the work: hashing takes most of the time.
 */
#include "adapter/files.h"
#include "adapter/intake_state.h"

#include "base/alloc.h"

#include <stdlib.h>

#define PIECE_BYTES ((size_t)256 << 10) /* a multiple of every element size */

/* What the tasks of one file share. */
typedef struct read_job {
    sp_intake *intake;
    const size_t *wanted; /* this file's, ascending by offset */
    const sp_checkpoint *checkpoint;
    const sp_file *file;
} read_job;

/* A needed tensor: its number in the intake, and its header entry. */
typedef struct target {
    size_t wanted;
    const sp_tensor *tensor;
} target;

static int by_file_offset(const void *left, const void *right)
{
    const sp_tensor *a = ((const target *)left)->tensor;
    const sp_tensor *b = ((const target *)right)->tensor;

    if (a->file != b->file)
        return a->file < b->file ? -1 : 1;
    return (a->offset_bytes > b->offset_bytes) - (a->offset_bytes < b->offset_bytes);
}

static const sp_tensor *tensor_of(const sp_intake *intake, size_t wanted)
{
    return intake->landings[wanted].item->tensor;
}

/* sp_intake_fill_fn */
static sp_status read_tensor(void *user, size_t i, sp_error *error)
{
    const read_job *job = user;
    size_t wanted = job->wanted[i], room;
    const sp_tensor *tensor = tensor_of(job->intake, wanted);
    uint64_t at = 0;
    void *memory;
    sp_status status = sp_intake_next(job->intake, wanted, &memory, &room, error);

    while (status == SP_OK && room > 0) {
        size_t n = room < PIECE_BYTES ? room : PIECE_BYTES;

        status = sp_adapter_file_read(job->checkpoint, job->file, tensor, at, memory, n, error);
        if (status == SP_OK)
            status = sp_intake_take(job->intake, wanted, n, error);
        at += n;
        if (status == SP_OK)
            status = sp_intake_next(job->intake, wanted, &memory, &room, error);
    }
    return status;
}

/* The n tensors of one file. */
static sp_status read_file(sp_intake *intake, const sp_checkpoint *checkpoint, const size_t *wanted,
                           size_t n, sp_exec *exec, sp_error *error)
{
    sp_file file;
    read_job job = {intake, wanted, checkpoint, &file};
    sp_status status =
        sp_adapter_file_open(checkpoint, tensor_of(intake, wanted[0])->file, &file, error);

    if (status != SP_OK)
        return status;
    status = sp_intake_run(exec, read_tensor, &job, n, error);
    sp_file_close(&file);
    return status;
}

/* wanted [n] ascend by file and offset. */
static sp_status read_all(sp_intake *intake, const sp_checkpoint *checkpoint, const size_t *wanted,
                          size_t n, sp_exec *exec, sp_error *error)
{
    sp_status status = SP_OK;

    for (size_t begin = 0, end; begin < n && status == SP_OK; begin = end) {
        int32_t file = tensor_of(intake, wanted[begin])->file;

        for (end = begin; end < n && tensor_of(intake, wanted[end])->file == file;)
            end++;
        status = read_file(intake, checkpoint, wanted + begin, end - begin, exec, error);
    }
    return status;
}

sp_status sp_intake_read_files(sp_intake *intake, const sp_checkpoint *checkpoint, sp_exec *exec,
                               sp_error *error)
{
    size_t n = intake->n_landings;
    target *targets =
        sp_malloc((n + 1) * sizeof *targets); /* at least one, since an empty block would be NULL */
    size_t *wanted = sp_malloc((n + 1) * sizeof *wanted);
    sp_status status = SP_OK;

    if (targets && wanted) {
        for (size_t i = 0; i < n; i++)
            targets[i] = (target){i, tensor_of(intake, i)};
        qsort(targets, n, sizeof *targets, by_file_offset);
        for (size_t i = 0; i < n; i++)
            wanted[i] = targets[i].wanted;
        status = read_all(intake, checkpoint, wanted, n, exec, error);
    } else {
        status = sp_fail_memory(error, n * sizeof *targets, "a list of tensors");
    }
    sp_free(targets);
    sp_free(wanted);
    return status;
}
