#include "base/file.h"

#include "base/alloc.h"
#include "base/confine.h"
#include "base/error.h"
#include "base/mapped.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define TEMPORARY_SUFFIX_BYTES 48

static sp_status fail_errno(sp_error *error, const char *path, const char *what)
{
    int number = errno;
    sp_status status = SP_ERR_IO;

    path = sp_path_tail(path);
    if (number == ENOENT || number == ELOOP || number == ENOTDIR || number == ENAMETOOLONG)
        status = SP_ERR_NOT_FOUND;
    if (number == EXDEV)
        return sp_fail(error, SP_ERR_INPUT, SP_CODE_UNSAFE_PATH, path, -1,
                       "%s leads out of the directory of adapters", path);
    if (number == ENXIO || number == ENODEV) /* a socket, or a device without a driver */
        return sp_fail(error, SP_ERR_INPUT, NULL, path, -1, "%s is not a regular file", path);
    return sp_fail(error, status, NULL, path, -1, "%s %s: %s", what, path, strerror(number));
}

sp_status sp_file_open(const char *path, sp_file *out_file, sp_error *error)
{
    struct stat info;
    /* O_NONBLOCK: opening a FIFO without a writer must not wait; it is refused below. */
    int fd = sp_confined_open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);

    if (fd < 0)
        return fail_errno(error, path, "cannot open");
    if (fstat(fd, &info) != 0) {
        sp_status status = fail_errno(error, path, "cannot examine");
        close(fd);
        return status;
    }
    if (!S_ISREG(info.st_mode)) {
        close(fd);
        path = sp_path_tail(path);
        return sp_fail(error, SP_ERR_INPUT, NULL, path, -1, "%s is not a regular file", path);
    }
    out_file->fd = fd;
    out_file->bytes = (uint64_t)info.st_size;
    return SP_OK;
}

void sp_file_close(sp_file *file)
{
    if (file->fd >= 0)
        close(file->fd);
    file->fd = -1;
    file->bytes = 0;
}

sp_status sp_file_read(const sp_file *file, uint64_t offset, void *out_data, size_t bytes,
                       sp_error *error)
{
    char *cursor = out_data;

    while (bytes > 0) {
        ssize_t n = pread(file->fd, cursor, bytes, (off_t)offset);

        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return sp_fail(error, SP_ERR_IO, NULL, NULL, (int64_t)offset,
                           "reading at byte %llu failed: %s", (unsigned long long)offset,
                           strerror(errno));
        if (n == 0)
            return sp_fail(error, SP_ERR_TRUNCATED, NULL, NULL, (int64_t)offset,
                           "the file ends at byte %llu, %zu bytes too early",
                           (unsigned long long)offset, bytes);
        cursor += n;
        offset += (uint64_t)n;
        bytes -= (size_t)n;
    }
    return SP_OK;
}

sp_status sp_file_read_all(const char *path, size_t bytes_max, char **out_data, size_t *out_bytes,
                           sp_error *error)
{
    sp_file file = {.fd = -1};
    sp_status status = sp_file_open(path, &file, error);
    char *data;

    if (status != SP_OK)
        return status;
    if (file.bytes > bytes_max) {
        path = sp_path_tail(path);
        status = sp_fail(error, SP_ERR_TOO_LARGE, NULL, path, -1,
                         "%s has %llu bytes; at most %zu are read", path,
                         (unsigned long long)file.bytes, bytes_max);
        goto close_file;
    }
    data = sp_malloc((size_t)file.bytes + 1);
    if (!data) {
        status = sp_fail_memory(error, (size_t)file.bytes + 1, path);
        goto close_file;
    }
    status = sp_file_read(&file, 0, data, (size_t)file.bytes, NULL);
    if (status != SP_OK) {
        if (status == SP_ERR_TRUNCATED)
            sp_fail(error, status, NULL, sp_path_tail(path), -1,
                    "%s became shorter while it was read", sp_path_tail(path));
        else
            status = fail_errno(error, path, "cannot read");
        sp_free(data);
        goto close_file;
    }
    data[file.bytes] = '\0';
    *out_data = data;
    *out_bytes = (size_t)file.bytes;
close_file:
    sp_file_close(&file);
    return status;
}

sp_status sp_file_map(const char *path, sp_mapping *out_mapping, sp_error *error)
{
    sp_file file = {.fd = -1};
    sp_status status = sp_file_open(path, &file, error);
    void *data = NULL;

    if (status != SP_OK)
        return status;
    if (file.bytes > 0) {
        data = mmap(NULL, (size_t)file.bytes, PROT_READ, MAP_PRIVATE, file.fd, 0);
        if (data == MAP_FAILED) {
            status = fail_errno(error, path, "cannot map");
            goto close_file;
        }
    }
    out_mapping->data = data;
    out_mapping->bytes = (size_t)file.bytes;
    out_mapping->entry = sp_mapped_add(data, (size_t)file.bytes, path);
close_file:
    sp_file_close(&file);
    return status;
}

void sp_file_unmap(sp_mapping *mapping)
{
    if (mapping->data) {
        sp_mapped_remove(mapping->entry);
        munmap((void *)(uintptr_t)mapping->data, mapping->bytes);
    }
    mapping->data = NULL;
    mapping->bytes = 0;
    mapping->entry = -1;
}

static int write_fully(int fd, const char *data, size_t bytes)
{
    while (bytes > 0) {
        ssize_t n = write(fd, data, bytes);

        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return -1;
        data += n;
        bytes -= (size_t)n;
    }
    return 0;
}

/*
 * A new file beside `path`, whose name goes to `out_name` (with room for TEMPORARY_SUFFIX_BYTES
 * more than the path). Not mkstemp: the mode is the one that the caller's umask gives any file.
 */
static int open_temporary(const char *path, char *out_name)
{
    static atomic_uint counter;
    size_t path_bytes = strlen(path);
    int fd;

    do {
        snprintf(out_name, path_bytes + TEMPORARY_SUFFIX_BYTES, "%s.%ld-%u", path, (long)getpid(),
                 atomic_fetch_add(&counter, 1));
        fd = open(out_name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    } while (fd < 0 && errno == EEXIST);
    return fd;
}

sp_status sp_file_write_all(const char *path, const void *data, size_t bytes, sp_error *error)
{
    size_t name_bytes = strlen(path) + TEMPORARY_SUFFIX_BYTES;
    char *temporary;
    struct stat info;
    sp_status status = SP_OK;
    int fd;

    if (stat(path, &info) == 0 && !S_ISREG(info.st_mode))
        return sp_fail(error, SP_ERR_INPUT, NULL, path, -1,
                       "%s exists and is not a regular file; it is left as it is", path);
    temporary = sp_malloc(name_bytes);
    if (!temporary)
        return sp_fail_memory(error, name_bytes, "a file name");
    fd = open_temporary(path, temporary);
    if (fd < 0) {
        status = fail_errno(error, path, "cannot create a file beside");
        goto free_name;
    }
    if (write_fully(fd, data, bytes) != 0 || fsync(fd) != 0) {
        status = fail_errno(error, path, "cannot write");
        close(fd);
        goto remove_temporary;
    }
    if (close(fd) == 0 && rename(temporary, path) == 0)
        goto free_name;
    status = fail_errno(error, path, "cannot write");
remove_temporary:
    unlink(temporary);
free_name:
    sp_free(temporary);
    return status;
}

/* On a confined path a link that leads out counts as missing. */
static int examine(const char *path, struct stat *out_info)
{
    int fd, result;

    if (!sp_confine_directory())
        return stat(path, out_info);
    fd = sp_confined_open(path, O_PATH);
    if (fd < 0)
        return -1;
    result = fstat(fd, out_info);
    close(fd);
    return result;
}

int sp_path_is_directory(const char *path)
{
    struct stat info;

    return examine(path, &info) == 0 && S_ISDIR(info.st_mode);
}

int sp_path_exists(const char *path)
{
    struct stat info;

    return examine(path, &info) == 0;
}

const char *sp_path_tail(const char *path)
{
    size_t n = strlen(path);
    const char *tail = n > SP_PATH_SHOWN_BYTES ? path + n - SP_PATH_SHOWN_BYTES : path;
    const char *slash = tail > path ? strchr(tail, '/') : NULL;

    return slash && slash[1] != '\0' ? slash + 1 : tail;
}

char *sp_path_folder(const char *path)
{
    const char *slash = strrchr(path, '/');

    if (!slash)
        return sp_strdup(".");
    return sp_strndup(path, slash > path ? (size_t)(slash - path) : 1);
}

char *sp_path_join(const char *directory, const char *name)
{
    size_t n = strlen(directory);
    size_t bytes = n + strlen(name) + 2;
    const char *slash = n > 0 && directory[n - 1] != '/' ? "/" : "";
    char *path = sp_malloc(bytes);

    if (path)
        snprintf(path, bytes, "%s%s%s", directory, slash, name);
    return path;
}
