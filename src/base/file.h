/*
 * file.h: reading files. Directories, FIFOs and devices are refused before a byte is read, so that
 * nothing blocks on them. Adapters are read with pread (a file that shrinks is an error); base
 * weights are mapped (mapped.h).
 */
#ifndef SP_BASE_FILE_H
#define SP_BASE_FILE_H

#include "base/private.h"

#include <sidepath/status.h>

typedef struct sp_file {
    int fd; /* -1 when closed */
    uint64_t bytes;
} sp_file;

/*
 * Opens a regular file for reading. SP_ERR_NOT_FOUND: missing, a dangling link or a link loop, or
 * something in its path is no directory. SP_ERR_INPUT: not a regular file. SP_ERR_IO: no
 * permission and the like. `subject` of the error is the path (sp_path_tail).
 */
SP_PRIVATE sp_status sp_file_open(const char *path, sp_file *out_file, sp_error *error);
/* Closes the file and sets fd to -1; a closed one is allowed. */
SP_PRIVATE void sp_file_close(sp_file *file);

/* Exactly `bytes` bytes at `offset`, or SP_ERR_TRUNCATED (it shrank) or SP_ERR_IO. */
SP_PRIVATE sp_status sp_file_read(const sp_file *file, uint64_t offset, void *out_data,
                                  size_t bytes, sp_error *error);

/*
 * Reads the whole file, followed by a NUL that is not counted. SP_ERR_TOO_LARGE above bytes_max.
 * *out_data is owned by the caller (sp_free).
 */
SP_PRIVATE sp_status sp_file_read_all(const char *path, size_t bytes_max, char **out_data,
                                      size_t *out_bytes, sp_error *error);

/* Read-only private mapping; unmapped by sp_file_unmap. An empty file maps to NULL and 0. */
typedef struct sp_mapping {
    const void *data;
    size_t bytes;
    int32_t entry; /* of base/mapped.h */
} sp_mapping;
/* The statuses of sp_file_open; SP_ERR_IO: it cannot be mapped. */
SP_PRIVATE sp_status sp_file_map(const char *path, sp_mapping *out_mapping, sp_error *error);
SP_PRIVATE void sp_file_unmap(sp_mapping *mapping);

/*
 * Writes `path` atomically, a power failure included: to a temporary file beside it, which is
 * synced, then a rename. SP_ERR_INPUT: `path` exists and is not a regular file (a device, a
 * directory); it is not changed. SP_ERR_NOT_FOUND: its directory is missing. SP_ERR_IO: no
 * permission, no space and the like.
 */
sp_status sp_file_write_all(const char *path, const void *data, size_t bytes, sp_error *error);

/* Whether `path` exists and is a directory. Blocks on the file system; any thread. */
SP_PRIVATE int sp_path_is_directory(const char *path);
SP_PRIVATE int sp_path_exists(const char *path);

/*
 * What a longer text shows of a path: all of it, or if it exceeds SP_PATH_SHOWN_BYTES the last
 * components that fit. Points into `path`.
 */
#define SP_PATH_SHOWN_BYTES 200
SP_PRIVATE const char *sp_path_tail(const char *path);

/* The folder of a file's path, "." for a bare name. Owned by the caller; NULL: out of memory. */
char *sp_path_folder(const char *path);

/* "dir/name" (no second slash after a trailing one). Owned by the caller; NULL: out of memory. */
SP_PRIVATE char *sp_path_join(const char *directory, const char *name);

#endif
