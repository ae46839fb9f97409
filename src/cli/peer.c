/*
 * peer.c: serves a directory of adapters to other hosts. The server has a thread of its own; this
 * one waits for signals and writes the metrics. SIGTERM and SIGINT end it: clients that are cut off
 * load again from elsewhere.
 */
#include "base/alloc.h"
#include "base/clock.h"
#include "base/confine.h"
#include "base/error.h"
#include "base/file.h"
#include "cli/cli.h"
#include "cli/notify.h"
#include "cli/run_settings.h"
#include "peer/peer_client.h"
#include "peer/peer_digests.h"
#include "peer/peer_server.h"
#include "server/metrics/log.h"
#include "stage/peer_packer.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define LOG_BYTES_MAX   ((size_t)1 << 20)
#define LOG_WAIT_MS     1000 /* for the last lines, at the end */
#define METRICS_SECONDS 5    /* from one writing of the file to the next */

typedef struct peer_settings {
    sp_run_settings run; /* first: the shared rows point into it */
    const char *dir, *host, *key_file, *devices, *gid_index, *transports, *metrics_file;
    const char *pack_modules, *digest_cache;
    bool pack;
    int64_t port, memory_mib, rescan_ms, clients_max, idle_s;
} peer_settings;

#define USES        SP_OPTION_OF_ADAPTER
#define FIELD(name) offsetof(peer_settings, name)

static const sp_setting own_rows[] = {
    {"dir", SP_SETTING_STRING, FIELD(dir), NULL, 0, 0, NULL, "DIR",
     "the directory whose folders are offered, each with an adapter", false},
    {"host", SP_SETTING_STRING, FIELD(host), "127.0.0.1", 0, 0, NULL, "ADDRESS",
     "the address to listen on", false},
    {"port", SP_SETTING_INT, FIELD(port), "7480", 0, 65535, NULL, "P", "0: any that is free",
     false},
    {"peer-key-file", SP_SETTING_STRING, FIELD(key_file), "", 0, 0, NULL, "FILE",
     "the key that peers must have too, in its first line", false},
    {"peer-devices", SP_SETTING_STRING, FIELD(devices), "", 0, 0, NULL, "LIST",
     "network devices to reach peers by, as UCX_NET_DEVICES; default: its choice", false},
    {"peer-gid-index", SP_SETTING_STRING, FIELD(gid_index), "", 0, 0, NULL, "N",
     "of RDMA over Ethernet, as UCX_IB_GID_INDEX; default: its choice", false},
    {"peer-transports", SP_SETTING_STRING, FIELD(transports), "", 0, 0, NULL, "LIST",
     "transports to reach peers by, as UCX_TLS; default: its choice", false},
    {"pack", SP_SETTING_BOOL, FIELD(pack), "false", 0, 0, NULL, NULL,
     "offer packed images too, for servers of --model with the same slots; they are taken by those "
     "that trust this peer",
     false},
    {"pack-modules", SP_SETTING_STRING, FIELD(pack_modules), "", 0, 0, NULL, "LIST",
     "with --pack: the modules of those slots (q_proj,up_proj,...); empty: all linear ones", false},
    {"digest-cache", SP_SETTING_STRING, FIELD(digest_cache), "", 0, 0, NULL, "FILE",
     "digests of adapters whose files have not changed since an earlier run, which are offered "
     "before they are read; not with --pack",
     false},
    {"memory-mib", SP_SETTING_INT, FIELD(memory_mib), "4096", 1, 1 << 24, NULL, "N",
     "memory for adapters; those used last stay in it", false},
    {"rescan-ms", SP_SETTING_INT, FIELD(rescan_ms), "1000", 10, 3600000, NULL, "N",
     "from one look at the directory to the next", false},
    {"max-clients", SP_SETTING_INT, FIELD(clients_max), "64", 1, 4096, NULL, "N",
     "connections at a time; others are turned away", false},
    {"idle-seconds", SP_SETTING_INT, FIELD(idle_s), "60", 1, 86400, NULL, "N",
     "a client that requests nothing for so long is closed", false},
    {"metrics-file", SP_SETTING_STRING, FIELD(metrics_file), "", 0, 0, NULL, "FILE",
     "metrics in Prometheus' text format, rewritten every 5 seconds", false},
};
#define N_OWN (sizeof own_rows / sizeof *own_rows)

static const char *given(const char *text)
{
    return text && text[0] ? text : NULL;
}

static void print_usage(FILE *stream, const sp_setting *rows, size_t n_rows)
{
    fprintf(stream, "usage: sidepath peer --dir DIR [--port P] [--host ADDRESS] "
                    "[--peer-key-file FILE] …\n\n"
                    "Serves the adapters in a directory to other hosts, whose servers name it as a "
                    "peer. The\nnetwork is to be a trusted one: docs/PEERS.md says what the key "
                    "protects, and what it does\nnot.\n\n");
    sp_settings_print_help(stream, rows, n_rows);
}

/* ---- serving --------------------------------------------------------------------------------- */

static void log_line(void *user, const char *line)
{
    sp_log_line(user, "sidepath peer: %s", line);
}

static void *run_server(void *server)
{
    sp_peer_server_run(server);
    return NULL;
}

static void write_metrics(const peer_settings *settings, sp_peer_server *server, sp_log *log)
{
    sp_text text = {0};
    sp_error error;

    if (!given(settings->metrics_file))
        return;
    sp_peer_server_metrics(server, &text);
    if (!text.failed &&
        sp_file_write_all(settings->metrics_file, text.data, text.bytes, &error) != SP_OK)
        sp_log_line(log, "sidepath peer: the metrics cannot be written: %s", error.text);
    sp_text_free(&text);
}

static void wait_for_end(const peer_settings *settings, sp_peer_server *server, sp_log *log,
                         const sigset_t *ending)
{
    const struct timespec step = {.tv_sec = METRICS_SECONDS};

    do
        write_metrics(settings, server, log);
    while (sigtimedwait(ending, NULL, &step) < 0 && (errno == EAGAIN || errno == EINTR));
}

static sp_status serve(const peer_settings *settings, sp_peer_server *server, sp_log *log,
                       const sigset_t *ending, sp_error *error)
{
    pthread_t thread;
    int code = pthread_create(&thread, NULL, run_server, server);

    if (code != 0)
        return sp_fail(error, SP_ERR_THREAD, NULL, NULL, -1, "a thread to serve on: %s",
                       strerror(code));
    sp_log_line(log, "sidepath peer: listening on %s%s", sp_peer_server_address(server),
                given(settings->key_file) ? "" : ", for everybody who reaches it: there is no key");
    sp_notify(SP_NOTIFY_READY);
    wait_for_end(settings, server, log, ending);
    sp_notify(SP_NOTIFY_STOPPING);
    sp_peer_server_stop(server);
    (void)pthread_join(thread, NULL);
    return SP_OK;
}

static sp_adapter_options audit_of(const peer_settings *s, sp_geometry *geometry)
{
    sp_adapter_options audit;

    sp_adapter_options_default(&audit, sizeof audit);
    audit.geometry = geometry;
    audit.rank_max = s->run.options.max_lora_rank;
    if (geometry && !audit.rank_max)
        audit.rank_max = SP_POOL_RANK_MAX; /* no pool of a server's is larger */
    audit.expert_rank_max = s->run.options.max_lora_expert_rank;
    audit.experts_off = !s->run.options.experts;
    audit.base_dir = s->run.model;
    audit.allow_partial = s->run.options.allow_partial;
    audit.allow_no_effect = s->run.options.allow_no_effect;
    audit.allow_unknown_fields = s->run.options.allow_unknown_fields;
    audit.allow_base_changing_init = s->run.options.allow_base_changing_init;
    audit.pool_dtype = strcmp(s->run.precision, "f32") == 0 ? SP_DTYPE_F32 : SP_DTYPE_BF16;
    audit.expert_layout = sp_run_settings_expert_layout(&s->run);
    return audit;
}

/* What a server of this base serves of one table. An image holds no rows of it, so nothing reads
 * `data`: the layout's fingerprint has its size and type. */
static sp_served_table table_of(const sp_geometry *geometry, const void *data)
{
    const sp_model_shape *shape = sp_geometry_shape(geometry);

    return (sp_served_table){.struct_bytes = sizeof(sp_served_table),
                             .data = data,
                             .dtype = SP_DTYPE_BF16,
                             .rows = shape->vocab,
                             .hidden = shape->hidden};
}

/* The layout of a server that is started with the same flags and no adapters. */
static sp_status open_layout(const peer_settings *settings, sp_geometry *geometry,
                             sp_layout **out_layout, sp_error *error)
{
    const sp_engine_options *run = &settings->run.options;
    const sp_model_shape *shape;
    sp_served_table embed, head;
    sp_layout_options options;
    sp_status status = SP_OK;

    if (!settings->pack)
        return SP_OK;
    if (!geometry)
        return sp_fail(error, SP_ERR_INPUT, NULL, "pack", -1,
                       "--pack needs --model: images are packed for the slots of one base");
    shape = sp_geometry_shape(geometry);
    embed = table_of(geometry, shape);
    /* A tied head is the same memory, and only a tied one. */
    head = table_of(geometry, shape->tied_embeddings ? (const void *)shape : &shape->vocab);
    sp_layout_options_default(&options, sizeof options);
    options.geometry = geometry;
    options.rank = run->max_lora_rank ? run->max_lora_rank : SP_POOL_RANK_DEFAULT;
    if (run->experts && sp_geometry_shape(geometry)->experts > 0)
        options.expert_rank = run->max_lora_expert_rank;
    options.served_embed = &embed;
    options.served_head = &head;
    if (given(settings->pack_modules)) {
        status = sp_module_set_parse(geometry, settings->pack_modules, &options.modules, error);
        options.modules &= sp_geometry_modules(geometry);
    }
    return status == SP_OK ? sp_layout_create(&options, out_layout, error) : status;
}

/* What decides, beside its files, whether an adapter is offered, and with which digest. */
static sp_status open_digests(const peer_settings *settings, sp_log *log,
                              sp_peer_digests **out_digests, sp_error *error)
{
    const sp_engine_options *run = &settings->run.options;
    char note[SP_PEER_DIGESTS_NOTE_BYTES];
    sp_text audit_settings = {0};
    sp_status status;

    if (!given(settings->digest_cache))
        return SP_OK;
    if (settings->pack)
        return sp_fail(error, SP_ERR_INPUT, NULL, "digest-cache", -1,
                       "--digest-cache and --pack exclude each other: an image needs the data");
    sp_text_format(&audit_settings, "%s rank=%d/%d experts=%d precision=%s layout=%d",
                   sp_library_version_text(), (int)run->max_lora_rank,
                   (int)run->max_lora_expert_rank, (int)run->experts, settings->run.precision,
                   (int)sp_run_settings_expert_layout(&settings->run));
    sp_text_format(&audit_settings, " allowed=%d%d%d%d", run->allow_partial, run->allow_no_effect,
                   run->allow_unknown_fields, run->allow_base_changing_init);
    status = audit_settings.failed
                 ? sp_fail_memory(error, audit_settings.bytes, "settings")
                 : sp_peer_digests_open(settings->digest_cache, audit_settings.data,
                                        settings->run.model, out_digests, note, error);
    sp_text_free(&audit_settings);
    if (status == SP_OK && note[0] != '\0')
        sp_log_line(log, "sidepath peer: the digest cache is not used: %s", note);
    return status;
}

static sp_status create_server(const peer_settings *settings, sp_geometry *geometry,
                               const sp_layout *layout, sp_peer_digests *digests, sp_log *log,
                               sp_peer_server **out_server, sp_error *error)
{
    const sp_peer_packer packer = sp_peer_packer_for(layout);
    const sp_adapter_options audit = audit_of(settings, geometry);
    sp_peer_key key = {.n_bytes = 0};
    const sp_peer_server_options options = {
        .directory = sp_confine_directory(),
        .audit = &audit,
        .packer = layout ? &packer : NULL,
        .digests = digests,
        .host = settings->host,
        .port = (int)settings->port,
        .key = &key,
        .devices = given(settings->devices),
        .gid_index = given(settings->gid_index),
        .transports = given(settings->transports),
        .memory_bytes = (uint64_t)settings->memory_mib << 20,
        .rescan_ms = (uint64_t)settings->rescan_ms,
        .idle_ms = (uint64_t)settings->idle_s * 1000,
        .clients_max = (int32_t)settings->clients_max,
        .log = log_line,
        .user = log,
    };
    sp_status status = SP_OK;

    if (given(settings->key_file))
        status = sp_peer_key_read(settings->key_file, &key, error);
    if (status == SP_OK)
        status = sp_peer_server_create(&options, out_server, error);
    memset(&key, 0, sizeof key);
    return status;
}

static sp_status open_and_serve(const peer_settings *settings, sp_log *log, const sigset_t *ending,
                                sp_error *error)
{
    sp_geometry *geometry = NULL;
    sp_layout *layout = NULL;
    sp_peer_digests *digests = NULL;
    sp_peer_server *server = NULL;
    sp_status status = open_digests(settings, log, &digests, error);

    if (status == SP_OK && settings->run.model)
        status = sp_geometry_open(settings->run.model, &geometry, error);
    if (status == SP_OK && settings->run.model)
        sp_peer_digests_check_base(digests, settings->run.model);
    if (status == SP_OK)
        status = open_layout(settings, geometry, &layout, error);
    /* From here on no path leads out of the directory. */
    if (status == SP_OK)
        status = sp_confine_to(settings->dir, error);
    if (status == SP_OK)
        status = create_server(settings, geometry, layout, digests, log, &server, error);
    if (status == SP_OK)
        status = serve(settings, server, log, ending, error);
    sp_peer_server_destroy(server);
    sp_peer_digests_close(digests);
    sp_layout_release(layout);
    sp_geometry_release(geometry);
    return status;
}

static int run_verb(const peer_settings *settings)
{
    sp_log *log = NULL;
    sigset_t ending, before;
    sp_error error = {0};
    sp_status status;

    if (!given(settings->dir)) {
        sp_fail(&error, SP_ERR_ARGUMENT, NULL, "dir", -1, "--dir is missing");
        return sp_cli_usage("peer", &error);
    }
    /* Before any thread starts: they inherit it. */
    sigemptyset(&ending);
    sigaddset(&ending, SIGTERM);
    sigaddset(&ending, SIGINT);
    sigprocmask(SIG_BLOCK, &ending, &before);
    signal(SIGPIPE, SIG_IGN);
    status = sp_log_open(STDERR_FILENO, LOG_BYTES_MAX, &log, &error);
    if (status == SP_OK)
        status = open_and_serve(settings, log, &ending, &error);
    sp_log_close(log, LOG_WAIT_MS);
    sigprocmask(SIG_SETMASK, &before, NULL);
    return status == SP_OK ? SP_EXIT_DONE : sp_cli_fail("peer", &error);
}

int sp_cli_peer(int argc, char **argv)
{
    peer_settings settings = {.run = {.model = NULL}};
    size_t n_rows;
    sp_setting *rows = sp_run_settings_rows(&settings.run, USES, own_rows, N_OWN, &n_rows);
    sp_error error;
    int code = SP_EXIT_DONE;

    if (!rows)
        return SP_EXIT_FAILED;
    if (sp_cli_wants_help(argc, argv)) {
        print_usage(stdout, rows, n_rows);
    } else if (sp_run_settings_parse(&settings.run, USES, rows, n_rows, argc, argv, NULL, &error) !=
               SP_OK) {
        code = sp_cli_usage("peer", &error);
    } else {
        code = run_verb(&settings);
        sp_settings_free_lists(rows, n_rows, &settings, NULL);
    }
    sp_free(rows);
    return code;
}
