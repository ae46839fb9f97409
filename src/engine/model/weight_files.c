#include "engine/model/weight_files.h"

#include "base/alloc.h"
#include "base/assert.h"
#include "base/error.h"
#include "base/mapped.h"

#include <sidepath/engine.h>

#include <errno.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/mman.h>
#include <unistd.h>

#define ALIGN_BYTES 64
#define PIECE_BYTES ((size_t)16 << 20) /* between two words of progress */

/* What is told of the progress. */
typedef struct reading {
    sp_load_progress progress;
    size_t done, total;
} reading;

static void tell(reading *state, size_t bytes)
{
    state->done += bytes;
    if (state->progress.tell)
        state->progress.tell(state->progress.user, "weights", state->done, state->total);
}

/* ---- opening ------------------------------------------------------------------------------- */

static sp_status copy_file(sp_weight_file *file, reading *state, sp_error *error)
{
    char *data = sp_aligned_malloc(file->bytes, ALIGN_BYTES);
    sp_status status = SP_OK;

    if (!data && file->bytes > 0)
        return sp_fail(error, SP_ERR_MEMORY, NULL, file->path, -1,
                       "no memory for the %zu bytes of %s; without weights_copy they are mapped",
                       file->bytes, sp_path_tail(file->path));
    file->data = data;
    for (size_t at = 0; at < file->bytes && status == SP_OK;) {
        size_t n = file->bytes - at < PIECE_BYTES ? file->bytes - at : PIECE_BYTES;

        status = sp_file_read(&file->file, at, data + at, n, error);
        at += n;
        tell(state, n);
    }
    return status;
}

static sp_status map_file(sp_weight_file *file, sp_error *error)
{
    sp_status status = sp_file_map(file->path, &file->mapping, error);

    if (status != SP_OK)
        return status;
    file->data = file->mapping.data;
    if (file->mapping.bytes >= file->bytes)
        return SP_OK;
    return sp_fail(error, SP_ERR_TRUNCATED, "truncated", file->path, -1,
                   "%s shrank while it was opened", file->path);
}

/* `copying` NULL: it is mapped. */
static sp_status open_file(const sp_checkpoint *checkpoint, int32_t index, reading *copying,
                           sp_weight_file *out_file, sp_error *error)
{
    const char *path = sp_checkpoint_path(checkpoint, index);
    sp_status status;

    out_file->path = sp_strdup(path);
    out_file->bytes = sp_checkpoint_file_bytes(checkpoint, index);
    if (!out_file->path)
        return sp_fail_memory(error, strlen(path), "a path");
    status = sp_file_open(path, &out_file->file, error);
    if (status != SP_OK)
        return status;
    if (fstat(out_file->file.fd, &out_file->seen) != 0)
        return sp_fail(error, SP_ERR_IO, NULL, path, -1, "cannot examine %s", path);
    status = copying ? copy_file(out_file, copying, error) : map_file(out_file, error);
    if (copying)
        sp_file_close(&out_file->file);
    return status;
}

/* Where no inotify instance is left, changes are found by sp_weight_files_check alone. */
static void watch_files(sp_weight_files *files)
{
    files->notify = inotify_init1(IN_NONBLOCK | IN_CLOEXEC);
    for (size_t i = 0; i < files->n && files->notify >= 0; i++)
        inotify_add_watch(files->notify, files->files[i].path,
                          IN_MODIFY | IN_ATTRIB | IN_MOVE_SELF | IN_DELETE_SELF);
}

sp_status sp_weight_files_open(const sp_checkpoint *checkpoint, bool copy,
                               sp_load_progress progress, sp_weight_files *out_files,
                               sp_error *error)
{
    sp_weight_files files = {.notify = -1, .copied = copy};
    reading copying = {.progress = progress};
    int32_t n = sp_checkpoint_n_files(checkpoint);
    sp_status status = SP_OK;

    files.files = sp_calloc((size_t)n, sizeof *files.files);
    if (!files.files)
        return sp_fail_memory(error, (size_t)n * sizeof *files.files, "the files of the weights");
    for (int32_t i = 0; i < n; i++) {
        files.files[i].file.fd = -1;
        copying.total += sp_checkpoint_file_bytes(checkpoint, i);
    }
    files.n = (size_t)n;
    for (int32_t i = 0; i < n && status == SP_OK; i++)
        status = open_file(checkpoint, i, copy ? &copying : NULL, &files.files[i], error);
    if (status != SP_OK) {
        sp_weight_files_close(&files);
        return status;
    }
    if (!copy)
        watch_files(&files);
    *out_files = files;
    return SP_OK;
}

void sp_weight_files_close(sp_weight_files *files)
{
    for (size_t i = 0; i < files->n; i++) {
        sp_weight_file *file = &files->files[i];

        if (files->copied)
            sp_aligned_free((void *)(uintptr_t)file->data);
        sp_file_unmap(&file->mapping);
        sp_file_close(&file->file);
        sp_free(file->path);
        sp_free(file->used);
    }
    if (files->files && files->notify >= 0)
        close(files->notify);
    sp_free(files->files);
    *files = (sp_weight_files){.notify = -1};
}

/* ---- reading ahead ------------------------------------------------------------------------- */

bool sp_weight_files_use(sp_weight_files *files, int32_t index, uint64_t offset, size_t bytes)
{
    sp_weight_file *file = &files->files[index];

    SP_ASSERT(offset + bytes <= file->bytes);
    if (file->n_used == file->used_capacity) {
        size_t capacity = file->used_capacity ? 2 * file->used_capacity : 64;
        sp_weight_range *grown = sp_realloc(file->used, capacity * sizeof *grown);

        if (!grown)
            return false;
        file->used = grown;
        file->used_capacity = capacity;
    }
    file->used[file->n_used++] = (sp_weight_range){offset, offset + bytes};
    return true;
}

/* One byte of each page; on a system that has no call for it. */
static void touch_pages(const char *data, size_t bytes, size_t page)
{
    volatile const char *at = data;

    for (size_t i = 0; i < bytes; i += page)
        (void)at[i];
}

/* Whole pages, as the kernel wants them. 0, or errno. */
static int populate(const char *data, size_t bytes)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    size_t before = (size_t)((uintptr_t)data & (page - 1));
    void *begin = (void *)(uintptr_t)(data - before);

    if (madvise(begin, bytes + before, MADV_POPULATE_READ) == 0)
        return 0;
    if (errno != EINVAL && errno != ENOSYS)
        return errno;
    touch_pages(data - before, bytes + before, page);
    return 0;
}

static sp_status prefault_range(const sp_weight_file *file, sp_weight_range range, reading *state,
                                sp_error *error)
{
    for (size_t at = range.begin; at < range.end;) {
        size_t n = range.end - at < PIECE_BYTES ? range.end - at : PIECE_BYTES;
        int failure = populate(file->data + at, n);

        if (failure != 0)
            return sp_fail(
                error, SP_ERR_IO, NULL, file->path, (int64_t)at,
                "%s cannot be read at byte %zu: it became shorter, or its disk fails (%s)",
                sp_path_tail(file->path), at, strerror(failure));
        at += n;
        tell(state, n);
    }
    return SP_OK;
}

sp_status sp_weight_files_prefault(const sp_weight_files *files, sp_load_progress progress,
                                   sp_error *error)
{
    reading state = {.progress = progress};
    sp_status status = SP_OK;

    if (files->copied)
        return SP_OK;
    for (size_t i = 0; i < files->n; i++)
        for (size_t r = 0; r < files->files[i].n_used; r++)
            state.total += files->files[i].used[r].end - files->files[i].used[r].begin;
    for (size_t i = 0; i < files->n; i++)
        for (size_t r = 0; r < files->files[i].n_used && status == SP_OK; r++)
            status = prefault_range(&files->files[i], files->files[i].used[r], &state, error);
    return status;
}

/* ---- watching ------------------------------------------------------------------------------ */

bool sp_weight_files_touched(const sp_weight_files *files)
{
    _Alignas(struct inotify_event) char events[4096];
    bool touched = false;

    for (size_t i = 0; i < files->n; i++)
        touched |= sp_mapped_has_faulted(files->files[i].mapping.entry);
    while (files->notify >= 0 && read(files->notify, events, sizeof events) > 0)
        touched = true;
    return touched;
}

static bool is_same_file(const struct stat *a, const struct stat *b)
{
    return a->st_ino == b->st_ino && a->st_dev == b->st_dev;
}

static bool has_same_time(const struct stat *a, const struct stat *b)
{
    return a->st_mtim.tv_sec == b->st_mtim.tv_sec && a->st_mtim.tv_nsec == b->st_mtim.tv_nsec;
}

static sp_status check_file(const sp_weight_file *file, sp_error *error)
{
    const char *shown = sp_path_tail(file->path);
    struct stat now;

    if (fstat(file->file.fd, &now) != 0)
        return SP_OK; /* unknown; the next check may tell */
    if (now.st_size < file->seen.st_size)
        return sp_fail(error, SP_ERR_TRUNCATED, SP_CODE_WEIGHTS_CHANGED, file->path, now.st_size,
                       "%s has %lld bytes now, and had %lld when it was mapped", shown,
                       (long long)now.st_size, (long long)file->seen.st_size);
    if (sp_mapped_has_faulted(file->mapping.entry))
        return sp_fail(error, SP_ERR_IO, SP_CODE_WEIGHTS_CHANGED, file->path, -1,
                       "a part of %s could not be read when it was needed", shown);
    if (now.st_size != file->seen.st_size || !has_same_time(&now, &file->seen))
        return sp_fail(error, SP_ERR_INPUT, SP_CODE_WEIGHTS_CHANGED, file->path, -1,
                       "%s was written to since it was mapped", shown);
    return SP_OK;
}

static sp_status check_path(const sp_weight_file *file, sp_error *error)
{
    struct stat now;

    if (stat(file->path, &now) == 0 && is_same_file(&now, &file->seen))
        return SP_OK;
    return sp_fail(error, SP_ERR_STATE, SP_CODE_WEIGHTS_REPLACED, file->path, -1,
                   "%s was replaced or removed; what was mapped is used on",
                   sp_path_tail(file->path));
}

/* Reports the changes that spoil answers first. */
sp_status sp_weight_files_check(const sp_weight_files *files, sp_error *error)
{
    sp_status status = SP_OK;

    if (files->copied)
        return SP_OK;
    for (size_t i = 0; i < files->n && status == SP_OK; i++)
        status = check_file(&files->files[i], error);
    for (size_t i = 0; i < files->n && status == SP_OK; i++)
        status = check_path(&files->files[i], error);
    return status;
}
