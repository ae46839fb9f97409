/*
 * helper.h: a thread for work that the file system may hold up, so that nobody who serves has to
 * wait for it. The end of the process does not wait for it either: a thread that is still busy a
 * second after the close is abandoned, and frees its own state should it ever get so far.
 */
#ifndef SP_SERVER_DRIVER_HELPER_H
#define SP_SERVER_DRIVER_HELPER_H

#include "base/error.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

/* The owner's state begins with it, or holds it. */
typedef struct sp_helper {
    pthread_mutex_t lock; /* the owner's too: of what its thread and others share */
    pthread_cond_t news;  /* the owner signals it when there is work */
    bool closed;          /* under the lock: `run` has to return */
    /* The rest is helper.c's. */
    pthread_t thread;
    pthread_cond_t ended;
    void (*run)(void *state);
    void (*destroy)(void *state);
    void *state;
    bool has_ended, abandoned, engaged;
} sp_helper;

/* Lock and condition, before the owner fills the rest of its state; without a start,
 * sp_helper_destroy undoes it. */
void sp_helper_init(sp_helper *helper);
void sp_helper_destroy(sp_helper *helper);

/*
 * `run` is the thread: it works until `closed`. `destroy` frees `state`, sp_helper_destroy
 * included. `what` names the thread in the error, SP_ERR_THREAD; `state` is the caller's then.
 */
sp_status sp_helper_start(sp_helper *helper, const char *what, void (*run)(void *state),
                          void (*destroy)(void *state), void *state, sp_error *error);
/* Ends the thread, or abandons it, and frees the state, at the latest when the thread ends. */
void sp_helper_close(sp_helper *helper);

/* Under the lock, on the thread: waits for news. `ns` 0: for as long as it takes. */
void sp_helper_wait(sp_helper *helper, int64_t ns);
/*
 * On the thread, without the lock: what is between the two is waited for, however long it takes,
 * so it may use what its owner frees after the close, and must not wait for the file system. False:
 * it is closed, and there is nothing to leave.
 */
bool sp_helper_enter(sp_helper *helper);
void sp_helper_leave(sp_helper *helper);

#endif
