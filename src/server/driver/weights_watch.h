/*
 * weights_watch.h: whether the base's weights are what they were when they were mapped. A thread of
 * its own looks at the files twice a second, since a file system may take its time; the engine's
 * thread looks once more before it lets tokens out of a step in which a file was written to.
 */
#ifndef SP_SERVER_DRIVER_WEIGHTS_WATCH_H
#define SP_SERVER_DRIVER_WEIGHTS_WATCH_H

#include "server/metrics/log.h"

#include <sidepath/engine.h>

typedef struct sp_weights_watch sp_weights_watch;

typedef enum sp_weights_state {
    SP_WEIGHTS_SOUND,
    SP_WEIGHTS_REPLACED, /* the server should be started anew; its answers are right */
    SP_WEIGHTS_CHANGED   /* they would not be: nothing is answered any more */
} sp_weights_state;

/* `engine` and `log` are borrowed. *out_watch is owned by the caller. SP_ERR_MEMORY, SP_ERR_THREAD.
 */
sp_status sp_weights_watch_start(sp_engine *engine, sp_log *log, sp_weights_watch **out_watch,
                                 sp_error *error);
/* A thread that waits for the file system is abandoned until the process ends. NULL is allowed. */
void sp_weights_watch_stop(sp_weights_watch *watch);

/* Any thread, no file system. *out_error (may be NULL) says what is wrong and in which file. It
 * never becomes sound again. A NULL watch is sound. */
sp_weights_state sp_weights_watch_state(sp_weights_watch *watch, sp_error *out_error);
/* The engine's thread: looks at the files, but only if one was touched since. */
void sp_weights_watch_look(sp_weights_watch *watch);

#endif
