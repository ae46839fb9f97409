/*
 * server: HTTP, the OpenAI API, the adapter API, metrics, the status page, keys.
 *
 * The room turns requests into tasks for one thread that owns the engine, and what that thread
 * produces into answers. It must not know: tensors, kernels, slots, how an adapter is stored.
 *
 *     http.h, connection.c            connections and time-outs; no JSON. Beside it: parse.c (bytes
 *                               to a head and a body, without I/O, fuzzed), exchange.c (a
 *                               request and its answer), limits.c (which ones are closed),
 *                               listener.c
 *     budget.c                  the memory that clients can fill
 *     routes.c                  which path and method means which handler; keys; the access log
 *     cors.c                    pages of other origins
 *     api.h, api.c              what handlers share: a call, errors as JSON, waiting for a task
 *     completion_request.c, chat_request.c, body_fields.c, body_rows.c, generation_config.c
 *                               bytes to a checked request, without I/O (fuzzed)
 *     route_completions.c, route_chat.c, chat_answer.c, reply.c, logprob_text.c
 *                               a request through the engine, and its answer
 *     route_models.c, route_text.c, route_adapters.c, route_status.c   the other routes
 *     lora_dir.c, keys.c     what clients may load, and who may ask
 *     lora_chat.c, lora_chats.c   what an adapter's folder says of requests: template, ends
 *     multipart.c, publish_body.c, publisher.c, route_publish.c   adapters that come in requests
 *     lora_notes.c           what receipts note, into the log
 *     helper.c               a thread for work that the file system may hold up
 *     log.c                     lines to standard error, without blocking
 *     task.h, generation.h, lora_task.h      what crosses between the two threads
 *     driver.c, loads.c  the engine's thread
 *     peers.c                   the peers that adapters come from, and the names that they serve
 *     weights_watch.c           whether the base's weights are what they were
 *     saved_state.c, state_file.c, adapter_store.c, restore.c   what outlives a restart
 *     start_report.c            what the log says of a start
 *     server.c                  all of it joined, started and stopped
 *
 * Threads: the HTTP thread (parses, tokenises, writes), the log's, the engine's thread, and those
 * that engine and stage have themselves. The HTTP thread never waits
 * for the engine, nor the engine for a client.
 */
#ifndef SP_SERVER_SERVER_H
#define SP_SERVER_SERVER_H

#include "base/settings.h"
#include "server/metrics/log.h"
#include "server/metrics/refusals.h"

#include <sidepath/engine.h>

typedef struct sp_server sp_server;
typedef struct sp_saved_state sp_saved_state;     /* driver/saved_state.h */
typedef struct sp_adapter_store sp_adapter_store; /* driver/adapter_store.h */
typedef struct sp_peers sp_peers;                 /* driver/peers.h */

/* What `sidepath serve` adds to the settings of every verb that runs a model. */
typedef struct sp_server_settings {
    const char *model_dir;  /* set by the verb, no flag: where the chat template is */
    sp_log *log;            /* likewise, borrowed; NULL: nothing is logged */
    sp_peers *opened_peers; /* no flag: of sp_server_open_peers; NULL: none */
    const char *host, *uds, *adapter_dir, *api_key_file, *admin_key_file, *chat_template,
        *generation_config;
    sp_setting_list cors_origins, peers, trusted_peers;
    const char *peer_key_file, *peer_devices, *peer_gid_index, *peer_transports;
    int64_t peer_timeout_s;
    int64_t port, connections, connections_per_address, header_bytes, body_bytes, adapter_bytes,
        client_bytes, queue, keep_alive_s, idle_timeout_s, receive_timeout_s, send_timeout_s,
        request_timeout_s, shutdown_timeout_s;
    const char *state_file, *adapter_store, *log_format;
    bool adapter_routes, access_log, weights_prefault;
} sp_server_settings;

#define SP_SERVER_SETTINGS_COUNT 35
/* Rows whose offsets count from the beginning of an sp_server_settings. */
extern const sp_setting sp_server_setting_rows[SP_SERVER_SETTINGS_COUNT];

/*
 * Confines adapters to --adapter-dir; before sp_engine_open, which reads some of them. SP_OK too
 * when there is none.
 */
sp_status sp_server_confine(const sp_server_settings *settings, sp_error *error);

/*
 * Opens the peers of the settings, before sp_engine_open, which takes their sources; closed after
 * the engine. Without any nothing happens. What sp_peers_open returns.
 */
sp_status sp_server_open_peers(sp_server_settings *settings, int32_t loader_threads,
                               sp_error *error);
void sp_server_close_peers(sp_server_settings *settings); /* twice is harmless */

/*
 * Starts serving. The engine is the server's until sp_server_stop; the settings' strings and the
 * refusals are borrowed until then. `restored` (may be NULL) is what sp_server_restore has read,
 * borrowed until then too, as is `store` (may be NULL). SP_ERR_ARGUMENT, SP_ERR_IO, SP_ERR_INPUT: a
 * setting, named. *out_server is owned by the caller.
 */
sp_status sp_server_start(const sp_server_settings *settings, sp_engine *engine,
                          const sp_server_refusals *refusals, sp_saved_state *restored,
                          sp_adapter_store *store, int32_t running_max, sp_server **out_server,
                          sp_error *error);
/*
 * Reads the key files again, for any thread but one at a time: both are taken or none, and the old
 * keys stay in force where one cannot be read, with its error. SP_OK too without key files.
 */
sp_status sp_server_reload_keys(sp_server *server, sp_error *error);
/*
 * Takes no more requests, lets those that run finish for the shutdown time-out, ends the rest and
 * frees all but the engine. Returns whether all finished. `hurry` (may be NULL) is asked ten times
 * a second; true ends the waiting.
 */
bool sp_server_stop(sp_server *server, bool (*hurry)(void));

#endif
