/*
 * driver.h: the one thread that owns the engine. Everything else reaches the engine by tasks: the
 * driver takes them between two steps, runs the batch, puts what it produces into outboxes and
 * wakes readers. It waits only for the engine.
 *
 * It also loads an adapter that a request names and the engine does not know yet, when the name has
 * a folder: the request waits for the look-up and the load, all others continue. A name that was
 * unloaded stays unknown until it is loaded again by name.
 *
 * It must not know: HTTP, JSON, file layouts.
 */
#ifndef SP_SERVER_DRIVER_DRIVER_H
#define SP_SERVER_DRIVER_DRIVER_H

#include "server/driver/generation.h"
#include "server/driver/lora_task.h"
#include "server/driver/peers.h"
#include "server/driver/saved_state.h"
#include "server/driver/state_file.h"
#include "server/driver/weights_watch.h"

typedef struct sp_driver sp_driver;

typedef struct sp_driver_options {
    sp_engine *engine;      /* borrowed; nobody else may call it until sp_driver_stop */
    int32_t in_flight_max;  /* choices that run or wait; more are turned away */
    int32_t request_time_s; /* a generation that takes longer is ended; 0: no limit */
    /* Whether a name could have a folder, without looking; and the look-up, which brings the task
     * back by sp_driver_adapter. NULL: there are no folders. */
    bool (*may_have_folder)(void *user, const char *name);
    void (*look_up)(void *user, sp_lora_task *task);
    void *look_up_user;
    /* Borrowed: what loaded adapters say of chat. It holds those that the engine has at the start,
     * and is the driver's to change from then on. */
    sp_lora_chats *chats;
    sp_weights_watch *weights; /* borrowed, may be NULL: nothing is answered once they changed */
    /* Called on the engine's thread for every loaded adapter, with its receipt and what it
     * says of chat (both may be NULL), all borrowed; must not block. NULL: not called. */
    void (*loaded)(void *user, const char *name, const char *receipt, const sp_lora_chat *chat);
    void *loaded_user;
    /* Gets a load or an unload with its outcome in place of the asking side, which it then tells:
     * what outlives the server is to follow it. The engine's thread; must not block; takes a
     * reference. False: it is told at once. NULL: nothing is kept. */
    bool (*keep)(void *user, sp_lora_task *task);
    void *keep_user;
    sp_peers *peers; /* borrowed: names that may be loaded from them; NULL: none */
    /* Borrowed: what adapters are after every change of them. NULL: nobody keeps it. */
    sp_state_file *state_file;
    /* Borrowed: the names that a server before this one has unloaded, and what of its adapters is
     * missing, which the driver keeps up to date. NULL: none. */
    sp_saved_state *restored;
} sp_driver_options;

/* Reason codes of outcomes that only the server has. */
#define SP_CODE_SLOW_READER     "slow-reader"
#define SP_CODE_REQUEST_TIMEOUT "request-timeout"
#define SP_CODE_SHUTTING_DOWN   "shutting-down"
#define SP_CODE_DEVICE_FAILED   "device-failed"
#define SP_CODE_QUEUE_FULL      "queue-full"
#define SP_CODE_OTHER_VERSION   "other-version"

/* Those of the engine for logits that are not finite: nothing that a client could mend. */
#define SP_CODE_ADAPTER_NON_FINITE "adapter-non-finite"
#define SP_CODE_LOGITS_NON_FINITE  "logits-non-finite"
#define SP_CODE_NO_TOKENIZER       "tokenizer-missing"
bool sp_is_non_finite(const sp_error *error);

/* Starts the engine's thread, which owns the engine until sp_driver_stop. *out_driver is owned by
 * the caller. SP_ERR_MEMORY, SP_ERR_THREAD. */
sp_status sp_driver_start(const sp_driver_options *options, sp_driver **out_driver,
                          sp_error *error);
/* Ends what still runs with `shutting-down` and joins the thread; the engine is the caller's again.
 * The other functions may still be called: they refuse. NULL is allowed. */
void sp_driver_stop(sp_driver *driver);
void sp_driver_destroy(sp_driver *driver); /* after the stop; NULL is allowed */

/*
 * Any thread. SP_AGAIN with `queue-full`: too much is in flight, come back later. SP_ERR_TOO_LARGE:
 * more choices than may ever be in flight. SP_ERR_STATE with `shutting-down`.
 */
sp_status sp_driver_generate(sp_driver *driver, sp_generation *generation, sp_error *error);
/* Any thread. SP_ERR_STATE with `shutting-down`. */
sp_status sp_driver_adapter(sp_driver *driver, sp_lora_task *task, sp_error *error);
/* Any thread: detaches, and takes a generation out of the batch before the next step. */
void sp_driver_cancel(sp_driver *driver, sp_task *task);
/* Whether a step has failed with SP_ERR_DEVICE: every later one will. Any thread. */
bool sp_driver_device_failed(sp_driver *driver);

#endif
