/*
 * log.h: asynchronous lines to standard error. Callers append a line to a buffer and continue; a
 * thread of the log writes it. When standard error is not read the buffer fills, and later lines
 * are dropped and counted: logging delays no request and no signal.
 */
#ifndef SP_SERVER_METRICS_LOG_H
#define SP_SERVER_METRICS_LOG_H

#include "base/error.h"
#include "base/text.h"

typedef struct sp_log sp_log;

#define SP_LOG_PREFIX "sidepath serve: " /* of plain lines */

/*
 * Writes to `fd`, which is borrowed; at most bytes_max bytes wait. *out_log is owned by the caller
 * (sp_log_close). SP_ERR_MEMORY, SP_ERR_THREAD.
 */
sp_status sp_log_open(int fd, size_t bytes_max, sp_log **out_log, sp_error *error);

/* Any thread, never blocks: whole lines, each with its line feed, are taken all or none. A NULL log
 * takes nothing. */
void sp_log_add(sp_log *log, const char *lines, size_t bytes);
/* The same for one line that is made here, without its line feed. Where the log is JSON it becomes
 * an object, the line without SP_LOG_PREFIX its "message". */
void sp_log_line(sp_log *log, const char *format, ...) SP_PRINTF(2, 3);

/* Before other threads have it: every line is a JSON object. */
void sp_log_use_json(sp_log *log);
bool sp_log_is_json(const sp_log *log); /* false for NULL */
/* "{"time": "2026-01-31T12:00:00.000Z"", with which the line's object begins. */
void sp_log_begin_object(sp_text *out);

/* Any thread: lines that were dropped since it was opened. */
uint64_t sp_log_dropped(sp_log *log);

/* Gives what waits wait_ms_max to be written and frees all; where the file still takes nothing
 * then, its thread and buffer are left to the end of the process. NULL is allowed. */
void sp_log_close(sp_log *log, int32_t wait_ms_max);

#endif
