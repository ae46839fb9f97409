/*
 * server.c: settings, and starting and stopping the parts of this room.
 */
#include "server/server.h"

#include "base/alloc.h"
#include "base/clock.h"
#include "base/confine.h"
#include "base/error.h"
#include "base/file.h"
#include "server/api/api.h"
#include "server/api/cors.h"
#include "server/api/generation_config.h"
#include "server/driver/lora_notes.h"
#include "server/driver/peers.h"
#include "server/start_report.h"

#include <string.h>
#include <sys/random.h>
#include <time.h>

#define STOP_INTERVAL_NS 20000000 /* how often the end of the last request is looked for */
#define ABSENT(setting)  (!(setting) || (setting)[0] == '\0')

#define FIELD(member) offsetof(sp_server_settings, member)

const sp_setting sp_server_setting_rows[SP_SERVER_SETTINGS_COUNT] = {
    {"host", SP_SETTING_STRING, FIELD(host), "127.0.0.1", 0, 0, NULL, "ADDRESS",
     "the address to listen on", false},
    {"uds", SP_SETTING_STRING, FIELD(uds), "", 0, 0, NULL, "PATH",
     "a Unix socket to listen on, in place of the address and port", false},
    {"port", SP_SETTING_INT, FIELD(port), "8000", 0, 65535, NULL, "P", "0: any that is free",
     false},
    {"adapter-dir", SP_SETTING_STRING, FIELD(adapter_dir), "", 0, 0, NULL, "DIR",
     "adapters that requests may name by their folder, and clients may load", false},
    {"chat-template", SP_SETTING_STRING, FIELD(chat_template), "", 0, 0, NULL, "FILE",
     "a Jinja template for chat, or none; default: the model's own", false},
    {"generation-config", SP_SETTING_CHOICE, FIELD(generation_config), "auto", 0, 0, "auto|none",
     NULL, "take what requests leave out from the model's generation_config.json", false},
    {"adapter-routes", SP_SETTING_BOOL, FIELD(adapter_routes), "true", 0, 0, NULL, NULL,
     "let clients load, unload and activate adapters", false},
    {"cors-allow-origin", SP_SETTING_LIST, FIELD(cors_origins), NULL, 0, 0, NULL, "ORIGIN",
     "pages of https://HOST[:PORT] may call from a browser; *: any; may be repeated", false},
    {"api-key-file", SP_SETTING_STRING, FIELD(api_key_file), "", 0, 0, NULL, "FILE",
     "keys, one a line, that clients must show", false},
    {"admin-key-file", SP_SETTING_STRING, FIELD(admin_key_file), "", 0, 0, NULL, "FILE",
     "keys for loading, unloading and activating; default: the others", false},
    {"queue", SP_SETTING_INT, FIELD(queue), "256", 0, 1e6, NULL, "N",
     "answers that may wait beside those that run; more are turned away (429)", false},
    {"request-timeout", SP_SETTING_INT, FIELD(request_timeout_s), "0", 0, 1e6, NULL, "SECONDS",
     "ends a request that takes longer; 0: no limit", false},
    {"shutdown-timeout", SP_SETTING_INT, FIELD(shutdown_timeout_s), "30", 0, 1e6, NULL, "SECONDS",
     "what requests get to finish at the end", false},
    {"connections", SP_SETTING_INT, FIELD(connections), "1024", 1, 1e6, NULL, "N",
     "most open connections; idle ones make way for new ones", false},
    {"connections-per-address", SP_SETTING_INT, FIELD(connections_per_address), "0", 0, 1e6, NULL,
     "N", "most of them from one address; 0: no limit", false},
    {"idle-timeout", SP_SETTING_INT, FIELD(idle_timeout_s), "75", 1, 1e6, NULL, "SECONDS",
     "of a connection without a request", false},
    {"receive-timeout", SP_SETTING_INT, FIELD(receive_timeout_s), "60", 1, 1e6, NULL, "SECONDS",
     "for a request to come in, from its first byte on", false},
    {"send-timeout", SP_SETTING_INT, FIELD(send_timeout_s), "60", 1, 1e6, NULL, "SECONDS",
     "of a client that takes nothing of its answer", false},
    {"stream-keep-alive", SP_SETTING_INT, FIELD(keep_alive_s), "10", 0, 1e6, NULL, "SECONDS",
     "a stream that waits so long gets its headers, and a comment as often; 0: never", false},
    {"header-bytes-max", SP_SETTING_INT, FIELD(header_bytes), "32768", 1024, 1 << 24, NULL, "N",
     "of a request's headers", false},
    {"body-bytes-max", SP_SETTING_INT, FIELD(body_bytes), "8388608", 1024, 1 << 30, NULL, "N",
     "of a request's body", false},
    {"adapter-bytes-max", SP_SETTING_INT, FIELD(adapter_bytes), "1073741824", 1024, 1e12, NULL, "N",
     "of an adapter that a request brings", false},
    {"client-bytes-max", SP_SETTING_INT, FIELD(client_bytes), "536870912", 1 << 16, 1e15, NULL, "N",
     "of all that clients can fill: bodies, requests and answers under way", false},
    {"access-log", SP_SETTING_BOOL, FIELD(access_log), "true", 0, 0, NULL, NULL,
     "one JSON line a request on standard error; not for probes that are answered 200", false},
    {"log-format", SP_SETTING_CHOICE, FIELD(log_format), "plain", 0, 0, "plain|json", NULL,
     "json: every line on standard error is an object, not those of requests alone", false},
    {"weights-prefault", SP_SETTING_BOOL, FIELD(weights_prefault), "true", 0, 0, NULL, NULL,
     "read the mapped weights before the first request comes", false},
    {"state-file", SP_SETTING_STRING, FIELD(state_file), "", 0, 0, NULL, "FILE",
     "what clients have loaded, unloaded and activated is kept here over a restart", false},
    {"adapter-store", SP_SETTING_STRING, FIELD(adapter_store), "", 0, 0, NULL, "DIR",
     "adapters that requests bring are kept here over a restart; this server's alone", false},
    {"peer", SP_SETTING_LIST, FIELD(peers), NULL, 0, 0, NULL, "HOST:PORT",
     "a peer (sidepath peer) whose adapters requests may name; may be repeated", false},
    {"peer-trust-images", SP_SETTING_LIST, FIELD(trusted_peers), NULL, 0, 0, NULL, "HOST:PORT",
     "take what this peer has packed; needs a shared key; may be repeated", false},
    {"peer-key-file", SP_SETTING_STRING, FIELD(peer_key_file), "", 0, 0, NULL, "FILE",
     "the key that peers must have too, in its first line", false},
    {"peer-timeout", SP_SETTING_INT, FIELD(peer_timeout_s), "10", 1, 3600, NULL, "SECONDS",
     "of a peer that does not answer, for each part of an adapter", false},
    {"peer-devices", SP_SETTING_STRING, FIELD(peer_devices), "", 0, 0, NULL, "LIST",
     "network devices to reach peers by, as UCX_NET_DEVICES; default: its choice", false},
    {"peer-gid-index", SP_SETTING_STRING, FIELD(peer_gid_index), "", 0, 0, NULL, "N",
     "of RDMA over Ethernet, as UCX_IB_GID_INDEX; default: its choice", false},
    {"peer-transports", SP_SETTING_STRING, FIELD(peer_transports), "", 0, 0, NULL, "LIST",
     "transports to reach peers by, as UCX_TLS; default: its choice", false},
};

struct sp_server {
    sp_api api;
    sp_http *http;
    sp_state_file *state_file; /* NULL: none */
};

/* ---- adapters of the start ------------------------------------------------------------------ */

sp_status sp_server_confine(const sp_server_settings *settings, sp_error *error)
{
    return ABSENT(settings->adapter_dir) ? SP_OK : sp_confine_to(settings->adapter_dir, error);
}

sp_status sp_server_open_peers(sp_server_settings *settings, int32_t loader_threads,
                               sp_error *error)
{
    const sp_peers_options options = {.addresses = (const char *const *)settings->peers.values,
                                      .n_addresses = settings->peers.n,
                                      .trusted =
                                          (const char *const *)settings->trusted_peers.values,
                                      .n_trusted = settings->trusted_peers.n,
                                      .key_file = settings->peer_key_file,
                                      .call_ms_max = (int32_t)settings->peer_timeout_s * 1000,
                                      .devices = settings->peer_devices,
                                      .gid_index = settings->peer_gid_index,
                                      .transports = settings->peer_transports,
                                      .log = settings->log};

    if (settings->peers.n == 0 && settings->trusted_peers.n == 0)
        return SP_OK;
    if (loader_threads == 0)
        return sp_fail(error, SP_ERR_INPUT, NULL, "loader-threads", -1,
                       "--peer needs --loader-threads above 0: steps must not wait for a peer");
    return sp_peers_open(&options, &settings->opened_peers, error);
}

void sp_server_close_peers(sp_server_settings *settings)
{
    sp_peers_close(settings->opened_peers);
    settings->opened_peers = NULL;
}

/* ---- start --------------------------------------------------------------------------------- */

/* Puts those of the files in the place of those in force, which are closed. */
static sp_status open_keys(sp_api *api, sp_error *error)
{
    const sp_server_settings *settings = api->settings;
    sp_keys *api_keys = NULL, *admin_keys = NULL, *before;
    sp_status status = SP_OK;

    if (!ABSENT(settings->api_key_file))
        status = sp_keys_open(settings->api_key_file, &api_keys, error);
    if (status == SP_OK && !ABSENT(settings->admin_key_file))
        status = sp_keys_open(settings->admin_key_file, &admin_keys, error);
    if (status == SP_OK) {
        pthread_mutex_lock(&api->keys_lock);
        before = api->api_keys;
        api->api_keys = api_keys;
        api_keys = before;
        before = api->admin_keys;
        api->admin_keys = admin_keys;
        admin_keys = before;
        pthread_mutex_unlock(&api->keys_lock);
    }
    sp_keys_close(api_keys);
    sp_keys_close(admin_keys);
    return status;
}

sp_status sp_server_reload_keys(sp_server *server, sp_error *error)
{
    sp_status status = open_keys(&server->api, error);

    atomic_fetch_add(
        status == SP_OK ? &server->api.n_key_reloads : &server->api.n_key_reload_failures, 1);
    return status;
}

/*
 * A base without a template serves everything else, and chat says why it does not; the log has
 * it too. One whose template is broken is not what its makers meant: the server does not start,
 * unless it is told to go without.
 */
static sp_status open_chat(sp_api *api, sp_error *error)
{
    const sp_server_settings *settings = api->settings;
    const char *file = ABSENT(settings->chat_template) ? NULL : settings->chat_template;
    sp_status status;

    if (file && strcmp(file, "none") == 0)
        status = sp_fail(&api->chat_error, SP_ERR_NOT_FOUND, SP_CHAT_NO_TEMPLATE, NULL, -1,
                         "the server was started with --chat-template none");
    else
        status = sp_chat_open(settings->model_dir, file, api->engine, &api->chat, &api->chat_error);
    if (status == SP_OK) {
        sp_log_line(settings->log, "sidepath serve: chat by %s", sp_chat_source(api->chat));
        return SP_OK;
    }
    api->chat = NULL;
    if (status == SP_ERR_NOT_FOUND && strcmp(api->chat_error.code, SP_CHAT_NO_TEMPLATE) == 0) {
        sp_log_line(settings->log, "sidepath serve: no chat: %s [%s]", api->chat_error.text,
                    api->chat_error.code);
        return SP_OK;
    }
    return sp_fail(error, SP_ERR_INPUT, api->chat_error.code, "chat-template", -1,
                   "%s; --chat-template FILE takes another template, none serves without chat",
                   api->chat_error.text);
}

#define TOKENIZER_CONFIG_BYTES_MAX  ((size_t)64 << 20)
#define GENERATION_CONFIG_BYTES_MAX ((size_t)1 << 20)

static void log_generation_config(const sp_api *api, sp_text *applied, const sp_text *unused)
{
    if (applied->bytes == 0)
        sp_text_add(applied, "nothing");
    sp_log_line(api->settings->log,
                "sidepath serve: generation_config.json gives requests that leave them out: %s%s%s",
                applied->data, unused->bytes > 0 ? "; not used: " : "",
                unused->bytes > 0 ? unused->data : "");
}

static sp_status read_generation_config(sp_api *api, const char *path, sp_error *error)
{
    sp_text applied = {0}, unused = {0};
    json_t *root = NULL;
    sp_status status = sp_json_read_object(path, GENERATION_CONFIG_BYTES_MAX,
                                           SP_CODE_GENERATION_CONFIG, &root, error);

    if (status == SP_OK)
        status = sp_generation_config_take(root, &api->sampling, &applied, &unused, error);
    if (status == SP_OK)
        log_generation_config(api, &applied, &unused);
    json_decref(root);
    sp_text_free(&unused);
    sp_text_free(&applied);
    return status;
}

static sp_status open_generation_config(sp_api *api, sp_error *error)
{
    char *path;
    sp_status status = SP_OK;

    api->sampling = sp_request_left_out(SP_LEFT_OUT_API);
    if (strcmp(api->settings->generation_config, "none") == 0)
        return SP_OK;
    path = sp_path_join(api->settings->model_dir, "generation_config.json");
    if (!path)
        return sp_fail_memory(error, 1, "a path");
    if (sp_path_exists(path))
        status = read_generation_config(api, path, error);
    sp_free(path);
    return status;
}

/* For clients that ask; a server whose model has none, or a broken one, serves everything else. */
static void open_tokenizer_config(sp_api *api)
{
    char *path = sp_path_join(api->settings->model_dir, "tokenizer_config.json");

    if (path && sp_path_exists(path) &&
        sp_json_read_object(path, TOKENIZER_CONFIG_BYTES_MAX, NULL, &api->tokenizer_config, NULL) !=
            SP_OK)
        api->tokenizer_config = NULL;
    sp_free(path);
}

static sp_status start_http(sp_server *server, sp_error *error)
{
    const sp_server_settings *settings = server->api.settings;
    sp_http_options options = {
        .host = settings->host,
        .port = (int32_t)settings->port,
        .unix_path = ABSENT(settings->uds) ? NULL : settings->uds,
        .connections_max = (int32_t)settings->connections,
        .connections_per_address_max = (int32_t)settings->connections_per_address,
        .idle_timeout_s = (int32_t)settings->idle_timeout_s,
        .receive_timeout_s = (int32_t)settings->receive_timeout_s,
        .send_timeout_s = (int32_t)settings->send_timeout_s,
        .header_bytes_max = (size_t)settings->header_bytes,
        .body_bytes_max = (size_t)settings->body_bytes,
        .budget = &server->api.budget,
        .handlers = sp_api_handlers(&server->api),
    };

    return sp_http_start(&options, &server->http, error);
}

/* A task comes out of the look-up, on its thread, with the reference that it was given. */
static void pass_task(void *user, sp_lora_task *task)
{
    const sp_api *api = user;
    sp_error error;
    sp_status status = sp_driver_adapter(api->driver, task, &error);

    if (status != SP_OK)
        sp_task_finish(&task->task, status, &error);
    sp_task_release(&task->task);
}

static void log_skipped(void *user, const char *name, const char *why)
{
    const sp_api *api = user;
    char *shown = sp_strdup(name);

    if (shown)
        sp_make_printable(shown);
    sp_log_line(api->settings->log, "sidepath serve: \"%s\" in --adapter-dir is skipped: %s",
                shown ? shown : "", why);
    sp_free(shown);
}

static void log_found(void *user, size_t n)
{
    const sp_api *api = user;

    sp_log_line(api->settings->log, SP_LOG_PREFIX "%zu adapters in --adapter-dir", n);
}

static bool may_have_folder(void *user, const char *name)
{
    return sp_api_may_have_folder(user, name);
}

static void look_up(void *user, sp_lora_task *task)
{
    const sp_api *api = user;

    sp_lora_dir_look_up(api->dir, task);
}

static sp_status understand(void *user, const sp_lora_files *files, sp_lora_chat **out_chat,
                            sp_error *error)
{
    const sp_api *api = user;

    return sp_lora_chat_make(files, &api->lora_base, out_chat, error);
}

static void on_loaded(void *user, const char *name, const char *receipt, const sp_lora_chat *chat)
{
    sp_lora_notes_log(user, name, receipt, chat);
}

/* What one of the start says of chat, from its files; while there is nobody else to wait. */
static sp_status take_chat(const sp_api *api, const sp_stage_version_info *info, sp_error *error)
{
    sp_lora_files files;
    sp_lora_entry *entry = NULL;
    sp_lora_chat *chat = NULL;
    sp_status status = sp_lora_files_read(info->location, &files, error);

    if (status != SP_OK)
        return status;
    status = sp_lora_chat_make(&files, &api->lora_base, &chat, error);
    sp_lora_files_free(&files);
    if (status == SP_OK)
        entry = sp_lora_entry_create(info->name, chat);
    if (status == SP_OK && !entry)
        status = sp_fail_memory(error, 1, "what an adapter says of chat");
    if (status == SP_OK) {
        sp_lora_notes_log(api->settings->log, info->name, info->facts->receipt, chat);
        sp_lora_chats_put(api->chats, entry);
        if (info->active)
            sp_lora_chats_set_active(api->chats, info->name);
    } else {
        sp_lora_chat_release(chat);
    }
    return status;
}

/* Those that the engine was opened with; while it is still ours. */
static sp_status open_lora_chats(sp_api *api, const sp_engine *engine, sp_error *error)
{
    const sp_stage *stage = sp_engine_stage(engine);
    sp_status status = SP_OK;

    api->lora_base =
        (sp_lora_chat_base){engine, api->tokenizer_config, !ABSENT(api->settings->chat_template)};
    api->chats = sp_lora_chats_create(sp_engine_base_name(engine));
    if (!api->chats)
        return sp_fail_memory(error, 1, "the table of adapters");
    for (size_t i = 0; i < sp_stage_n_versions(stage) && status == SP_OK; i++) {
        sp_stage_version_info info = {.struct_bytes = sizeof info};

        if (sp_stage_version_at(stage, i, &info, NULL) == SP_OK)
            status = take_chat(api, &info, error);
    }
    return status;
}

static void log_notes_of_base(const sp_engine *engine, sp_log *log)
{
    const char *note;

    for (size_t i = 0; (note = sp_engine_note(engine, i)) != NULL; i++)
        sp_log_line(log, "sidepath serve: the base: %s", note);
}

/* What the engine's thread and those beside it need, and what the log says of it. */
static sp_status open_parts(sp_server *server, sp_engine *engine, sp_error *error)
{
    const sp_server_settings *settings = server->api.settings;
    sp_status status = sp_cors_check(settings, error);

    if (status == SP_OK)
        status = open_keys(&server->api, error);
    if (status == SP_OK)
        status = sp_weights_watch_start(engine, settings->log, &server->api.weights, error);
    if (status == SP_OK)
        status = open_chat(&server->api, error);
    if (status == SP_OK)
        status = open_generation_config(&server->api, error);
    open_tokenizer_config(&server->api);
    if (status == SP_OK && !ABSENT(settings->state_file))
        status =
            sp_state_file_open(settings->state_file, settings->log, &server->state_file, error);
    if (status == SP_OK) {
        log_notes_of_base(engine, settings->log);
        status = open_lora_chats(&server->api, engine, error);
    }
    return status;
}

static sp_status start_parts(sp_server *server, sp_engine *engine, sp_saved_state *restored,
                             sp_adapter_store *store, int32_t running_max, sp_error *error)
{
    const sp_server_settings *settings = server->api.settings;
    sp_driver_options driver = {
        .engine = engine,
        .in_flight_max = running_max + (int32_t)settings->queue,
        .request_time_s = (int32_t)settings->request_timeout_s,
        .may_have_folder = may_have_folder,
        .look_up = look_up,
        .look_up_user = &server->api,
        .loaded = on_loaded,
        .loaded_user = settings->log,
        .restored = restored,
        .peers = settings->opened_peers,
    };
    const sp_lora_dir_hooks hooks = {&server->api, pass_task, understand, log_skipped, log_found};
    sp_start_facts facts;
    sp_status status = open_parts(server, engine, error);

    driver.weights = server->api.weights;
    driver.chats = server->api.chats;
    driver.state_file = server->state_file;
    facts = sp_start_facts_take(engine); /* while it is still ours */
    if (status == SP_OK)
        status = sp_publisher_create(engine, store, settings->log, &server->api.publisher, error);
    driver.keep = sp_publisher_keep;
    driver.keep_user = server->api.publisher;
    if (status == SP_OK)
        status = sp_driver_start(&driver, &server->api.driver, error);
    if (status == SP_OK)
        status = sp_compiler_start(engine, server->api.driver, &server->api.compiler, error);
    if (status == SP_OK)
        status = sp_publisher_start(server->api.publisher, server->api.driver, error);
    if (status == SP_OK && !ABSENT(settings->adapter_dir))
        status = sp_lora_dir_open(sp_engine_base_name(engine), &hooks, &server->api.dir, error);
    if (status == SP_OK)
        status = start_http(server, error);
    if (status == SP_OK)
        sp_start_report_log(&facts, &server->api, sp_http_address(server->http));
    return status;
}

sp_status sp_server_start(const sp_server_settings *settings, sp_engine *engine,
                          const sp_server_refusals *refusals, sp_saved_state *restored,
                          sp_adapter_store *store, int32_t running_max, sp_server **out_server,
                          sp_error *error)
{
    sp_server *server = sp_calloc(1, sizeof *server);
    sp_status status;

    if (!server)
        return sp_fail_memory(error, sizeof *server, "the server");
    pthread_mutex_init(&server->api.keys_lock, NULL);
    sp_budget_open(&server->api.budget, (size_t)settings->client_bytes);
    server->api.settings = settings;
    server->api.refusals = refusals;
    server->api.engine = engine;
    server->api.started_s = time(NULL);
    server->api.started_ns = sp_clock_ns();
    if (getrandom(&server->api.instance, sizeof server->api.instance, GRND_NONBLOCK) < 0)
        server->api.instance = server->api.started_ns;
    status = start_parts(server, engine, restored, store, running_max, error);
    if (status != SP_OK) {
        sp_server_stop(server, NULL);
        return status;
    }
    *out_server = server;
    return SP_OK;
}

/* ---- stop ---------------------------------------------------------------------------------- */

/* Only work in progress is waited for. */
static bool wait_for_exchanges(const sp_server *server, bool (*hurry)(void))
{
    uint64_t until_ns =
        sp_clock_ns() + (uint64_t)server->api.settings->shutdown_timeout_s * 1000000000u;
    const struct timespec pause = {0, STOP_INTERVAL_NS};

    while (sp_http_n_working(server->http) > 0) {
        if (sp_clock_ns() >= until_ns || (hurry && hurry()))
            return false;
        nanosleep(&pause, NULL);
    }
    return true;
}

bool sp_server_stop(sp_server *server, bool (*hurry)(void))
{
    static const sp_http_refusal unfinished = {503, SP_CODE_SHUTTING_DOWN,
                                               "the server is shutting down"};
    bool finished = true;

    if (server->http) {
        atomic_store(&server->api.draining, true);
        sp_http_quiesce(server->http);
        finished = wait_for_exchanges(server, hurry);
    }
    /* Those that are left see the driver's end first, and can still say so. */
    sp_driver_stop(server->api.driver);
    if (!finished) {
        const struct timespec pause = {0, 10 * STOP_INTERVAL_NS};

        nanosleep(&pause, NULL);
    }
    sp_http_stop(server->http, &unfinished);
    sp_compiler_stop(server->api.compiler);
    sp_publisher_stop(server->api.publisher);
    sp_lora_dir_close(server->api.dir);
    sp_weights_watch_stop(server->api.weights);
    sp_driver_destroy(server->api.driver);
    sp_publisher_destroy(server->api.publisher);
    sp_lora_chats_destroy(server->api.chats);
    sp_state_file_close(server->state_file);
    sp_chat_close(server->api.chat);
    json_decref(server->api.tokenizer_config);
    sp_keys_close(server->api.api_keys);
    sp_keys_close(server->api.admin_keys);
    pthread_mutex_destroy(&server->api.keys_lock);
    sp_free(server);
    return finished;
}
