/*
 * progress.h: how far a start is: a bar at a terminal, elsewhere a line now and then of what takes
 * long.
 */
#ifndef SP_CLI_PROGRESS_H
#define SP_CLI_PROGRESS_H

#include "server/metrics/log.h"

#include <stdbool.h>

typedef struct sp_progress {
    sp_log *log; /* borrowed */
    bool is_bar;
    const char *what; /* in progress; NULL: nothing */
    double began_s, shown_s;
} sp_progress;

/* `fd` is where the log goes. */
sp_progress sp_progress_begin(sp_log *log, int fd);
/* For sp_engine_options; `user` is the sp_progress. */
void sp_progress_tell(void *user, const char *what, size_t done, size_t total);

/* "[#####     ]  52 %  3.1 of 6.0 GiB"; `in_bytes`, or counts. `out` has room for
 * SP_PROGRESS_BYTES. */
#define SP_PROGRESS_BYTES 96
void sp_progress_format(size_t done, size_t total, bool in_bytes, char *out);

#endif
