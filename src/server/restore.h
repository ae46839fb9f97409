/*
 * restore.h: what --state-file names comes back before the server starts.
 */
#ifndef SP_SERVER_RESTORE_H
#define SP_SERVER_RESTORE_H

#include "server/driver/adapter_store.h"
#include "server/driver/saved_state.h"
#include "server/server.h"

/* Who is told of a name that does not come back, and how many have been looked at. */
typedef struct sp_restore_hooks {
    void (*refused)(void *user, const char *name, const sp_error *error);
    void *refused_user;
    void (*progress)(void *user, const char *what, size_t done, size_t total); /* may be NULL */
    void *progress_user;
    bool (*hurry)(void); /* asked twenty times a second, may be NULL: true ends it */
} sp_restore_hooks;

/* The code of an adapter that did not come in time. */
#define SP_CODE_LOAD_TIMEOUT "load-timeout"

/*
 * Reads the file and loads what it names, in its order, into an engine that nobody else has yet;
 * waits for the loads. A name that is loaded already stays what it is, and so does an active
 * adapter. One that cannot be loaded, or takes longer than a minute (five seconds once another one
 * has), is told to `refused` and `missing` in the state, and the others go on. A file that is not
 * there is an empty state. SP_ERR_STATE with SP_CODE_SHUTTING_DOWN: `hurry` said so.
 * SP_ERR_NOT_FOUND: its folder is missing. SP_ERR_IO, SP_ERR_TOO_LARGE and
 * those of sp_saved_state_parse: the file cannot be read; nothing was loaded. *out_state is owned
 * by the caller.
 */
sp_status sp_server_restore(const sp_server_settings *settings, sp_engine *engine,
                            const sp_restore_hooks *hooks, sp_saved_state *out_state,
                            sp_error *error);

/*
 * Before the other: loads what the store's names mean, in their order, each compared with the
 * digest that it was stored under. A name that is loaded already stays what it is, with a line in
 * the log. One that is not to be had is told to `refused`, with `store-digest` where its files are
 * others, and stays in the store. SP_ERR_STATE with SP_CODE_SHUTTING_DOWN: `hurry` said so.
 */
sp_status sp_server_restore_store(const sp_server_settings *settings, sp_engine *engine,
                                  const sp_restore_hooks *hooks, const sp_adapter_store *store,
                                  sp_error *error);

#endif
