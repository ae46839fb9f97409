/*
 * state_file.h: writes the state of a server to a file, by a thread of its own, since a file system
 * may take its time. Each state replaces the file whole, and only the newest of those that wait is
 * written. A failure is a line in the log; the file stays as it was until the next change.
 */
#ifndef SP_SERVER_DRIVER_STATE_FILE_H
#define SP_SERVER_DRIVER_STATE_FILE_H

#include "server/metrics/log.h"

typedef struct sp_state_file sp_state_file;

/* `path` is copied, `log` borrowed. *out_file is owned by the caller. SP_ERR_MEMORY, SP_ERR_THREAD.
 */
sp_status sp_state_file_open(const char *path, sp_log *log, sp_state_file **out_file,
                             sp_error *error);
/* Any thread, never blocks: takes the text, which is what the file is to hold from now on. */
void sp_state_file_put(sp_state_file *file, sp_text *text);
/* What waits is written first; a file system that takes more than a second for it is left to the
 * end of the process. NULL is allowed. */
void sp_state_file_close(sp_state_file *file);

#endif
