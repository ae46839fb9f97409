/*
 * weight_files.h: the files of the base weights: mapped and watched, or copied into memory. A
 * change of a mapped file would change answers, so it is detected.
 */
#ifndef SP_ENGINE_MODEL_WEIGHT_FILES_H
#define SP_ENGINE_MODEL_WEIGHT_FILES_H

#include "base/file.h"

#include <sidepath/checkpoint.h>

#include <stdbool.h>
#include <sys/stat.h>

typedef struct sp_weight_range {
    size_t begin, end; /* bytes of the file */
} sp_weight_range;

typedef struct sp_weight_file {
    const char *data;
    size_t bytes;
    sp_weight_range *used; /* [n_used] what the model reads of it */
    size_t n_used, used_capacity;
    char *path;
    sp_mapping mapping; /* empty where it was copied */
    sp_file file;       /* open as long as it is mapped */
    struct stat seen;   /* its state before it was mapped */
} sp_weight_file;

/* Who is told how far reading is; see sp_engine_options. `tell` NULL: nobody. */
typedef struct sp_load_progress {
    void (*tell)(void *user, const char *what, size_t done, size_t total);
    void *user;
} sp_load_progress;

typedef struct sp_weight_files {
    sp_weight_file *files; /* [n] */
    size_t n;
    int notify; /* inotify descriptor; -1: none */
    bool copied;
} sp_weight_files;

/*
 * Maps or copies the checkpoint's files; of copies `progress` is told, "weights" and bytes.
 * SP_ERR_TRUNCATED: one is shorter than its header says. SP_ERR_MEMORY: for copies, with the
 * setting. Else what sp_file_open and sp_file_read return. *out_files is owned by the caller, and
 * unchanged after a failure.
 */
sp_status sp_weight_files_open(const sp_checkpoint *checkpoint, bool copy,
                               sp_load_progress progress, sp_weight_files *out_files,
                               sp_error *error);
/* An all-zero struct is fine. */
void sp_weight_files_close(sp_weight_files *files);

/* Notes that the model reads these bytes of a file, all of them inside it. False: out of memory. */
bool sp_weight_files_use(sp_weight_files *files, int32_t file, uint64_t offset, size_t bytes);

/*
 * Brings what is used of mapped files into memory, piece by piece. Copied files are there already.
 * SP_ERR_IO: a part of a file cannot be read, or is gone.
 */
sp_status sp_weight_files_prefault(const sp_weight_files *files, sp_load_progress progress,
                                   sp_error *error);

/* As sp_engine_weights_touched and sp_engine_check_weights. */
bool sp_weight_files_touched(const sp_weight_files *files);
sp_status sp_weight_files_check(const sp_weight_files *files, sp_error *error);

#endif
