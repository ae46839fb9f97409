/*
 * files.h: the two files of an adapter's folder, located and checked; reads the weights' headers
 * and none of their data. Any thread, on distinct objects.
 */
#ifndef SP_ADAPTER_FILES_H
#define SP_ADAPTER_FILES_H

#include "base/file.h"
#include "base/text.h"

#include <sidepath/checkpoint.h>

typedef struct sp_adapter_files {
    char *config_path;
    const char *config_shown; /* its name in texts; points into config_path */
    char *config;             /* [config_bytes] and a NUL */
    size_t config_bytes;
    sp_text note; /* for the receipt, one per line; empty: none */
    sp_checkpoint *checkpoint;
} sp_adapter_files;

/*
 * `path` is the folder, or the tensor file itself with the config beside it. Blocks on file reads.
 * Codes as sp_adapter_open: `config-missing`, `config-malformed` where it is too large,
 * `pickle-refused` and what sp_checkpoint_open returns. *out_files is owned by the caller on
 * success (sp_adapter_files_close).
 */
sp_status sp_adapter_files_open(const char *path, sp_adapter_files *out_files, sp_error *error);
void sp_adapter_files_close(sp_adapter_files *files); /* may be called twice */

/*
 * Opens one of the checkpoint's files for reading data: it must be the file that its header was
 * read from, else `truncated` or `weights-missing`.
 */
sp_status sp_adapter_file_open(const sp_checkpoint *checkpoint, int32_t index, sp_file *out_file,
                               sp_error *error);
/* Reads n bytes of a tensor in it, from byte `at` on; `truncated` where the file shrank. */
sp_status sp_adapter_file_read(const sp_checkpoint *checkpoint, const sp_file *file,
                               const sp_tensor *tensor, uint64_t at, void *memory, size_t n,
                               sp_error *error);

#endif
