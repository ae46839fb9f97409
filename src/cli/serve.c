/*
 * serve.c: opens the engine, starts the server, and waits for signals. The first SIGTERM or SIGINT
 * lets running requests finish, a second one does not. SIGHUP reads the key files again.
 *
 * From the first line on all of standard error goes through the log, which never blocks.
 */
#include "base/alloc.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/mapped.h"
#include "cli/cli.h"
#include "cli/notify.h"
#include "cli/progress.h"
#include "cli/run_settings.h"
#include "server/driver/driver.h"
#include "server/restore.h"

#include <errno.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define LOG_BYTES_MAX ((size_t)1 << 20)
#define LOG_WAIT_MS   1000 /* for the last lines, at the end */
#define CLOSE_WAIT_MS 2000 /* for adapters that are being read, at the end */
#define CLOSE_POLL_MS 50

typedef struct serve_settings {
    sp_run_settings run; /* first: the shared rows point into it */
    sp_server_settings server;
} serve_settings;

#define USES SP_OPTION_OF_ENGINE

static sp_setting *create_rows(serve_settings *settings, size_t *out_n)
{
    sp_setting own[SP_SERVER_SETTINGS_COUNT];

    memcpy(own, sp_server_setting_rows, sizeof own);
    for (size_t i = 0; i < SP_SERVER_SETTINGS_COUNT; i++)
        own[i].offset += offsetof(serve_settings, server);
    return sp_run_settings_rows(&settings->run, USES, own, SP_SERVER_SETTINGS_COUNT, out_n);
}

/* ---- signals ------------------------------------------------------------------------------- */

static sigset_t ending_signals(void)
{
    sigset_t set;

    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGINT);
    return set;
}

static bool signal_is_pending(void)
{
    const struct timespec now = {0, 0};
    sigset_t set = ending_signals();

    return sigtimedwait(&set, NULL, &now) > 0;
}

static void reload_keys(sp_server *server, const sp_server_settings *settings)
{
    sp_error error;

    if (sp_server_reload_keys(server, &error) == SP_OK)
        sp_log_line(settings->log, "sidepath serve: SIGHUP: %s",
                    settings->api_key_file[0] || settings->admin_key_file[0]
                        ? "the key files were read again"
                        : "there are no key files to read again");
    else
        sp_log_line(settings->log, "sidepath serve: SIGHUP: the keys stay as they were: %s",
                    error.text);
}

/* Returns on a signal that ends the server. */
static void wait_for_end(sp_server *server, const sp_server_settings *settings)
{
    sigset_t set = ending_signals();
    int number;

    sigaddset(&set, SIGHUP);
    for (;;) {
        number = sigwaitinfo(&set, NULL);
        if (number == SIGHUP)
            reload_keys(server, settings);
        else if (number > 0 || errno != EINTR)
            return;
    }
}

/* ---- serving ------------------------------------------------------------------------------- */

typedef struct refusal_notes {
    sp_server_refusals kept;
    sp_log *log;
} refusal_notes;

static void report_refused(void *user, const char *name, const sp_error *error)
{
    refusal_notes *notes = user;

    sp_log_line(notes->log, "sidepath serve: adapter \"%s\" is left out: %s [%s]", name,
                error->text, error->code ? error->code : "");
    sp_server_keep_refusal(&notes->kept, name, error);
}

static sp_status serve_until_signal(const serve_settings *settings, sp_engine *engine,
                                    const sp_server_refusals *refusals, sp_saved_state *restored,
                                    sp_adapter_store *store, sp_error *error)
{
    sp_log *log = settings->server.log;
    sp_server *server;
    sp_status status = sp_server_start(&settings->server, engine, refusals, restored, store,
                                       settings->run.options.max_running, &server, error);

    if (status != SP_OK)
        return status;
    sp_notify(SP_NOTIFY_READY);
    wait_for_end(server, &settings->server);
    sp_notify(SP_NOTIFY_STOPPING);
    sp_log_line(log, "sidepath serve: finishing; a second signal ends at once");
    if (sp_server_stop(server, signal_is_pending))
        sp_log_line(log, "sidepath serve: every request was finished");
    else
        sp_log_line(log, "sidepath serve: requests were cut off");
    return SP_OK;
}

static bool is_reading(const sp_stage *stage)
{
    sp_stage_stats stats = {.struct_bytes = sizeof stats};

    return stage && sp_stage_get_stats(stage, &stats, NULL) == SP_OK && stats.n_in_flight > 0;
}

/*
 * A loader that waits for a file system that does not answer cannot be joined: after two seconds,
 * or a signal, the engine is left to the end of the process. False: it is.
 */
static bool close_engine(sp_engine *engine, sp_log *log)
{
    sp_stage *stage = engine ? sp_engine_stage(engine) : NULL;
    uint64_t until_ns = sp_clock_ns() + CLOSE_WAIT_MS * (uint64_t)1000000;

    while (is_reading(stage)) {
        if (sp_clock_ns() < until_ns && !signal_is_pending()) {
            sp_stage_poll_wait(stage, CLOSE_POLL_MS);
            continue;
        }
        sp_log_line(log, "sidepath serve: adapters are still being read; they are left");
        return false;
    }
    sp_engine_close(engine);
    return true;
}

static sp_status open_peers(serve_settings *settings, sp_error *error)
{
    sp_engine_options *options = &settings->run.options;
    sp_status status = sp_server_open_peers(&settings->server, options->loader_threads, error);

    if (status == SP_OK && settings->server.opened_peers)
        options->sources = sp_peers_sources(settings->server.opened_peers, &options->n_sources);
    return status;
}

/* *out_usage: a failure is one of the command line. */
static sp_status open_and_serve(serve_settings *settings, bool *out_usage, sp_error *error)
{
    refusal_notes notes = {.log = settings->server.log};
    sp_progress progress = sp_progress_begin(settings->server.log, STDERR_FILENO);
    const sp_restore_hooks hooks = {report_refused, &notes, sp_progress_tell, &progress,
                                    signal_is_pending};
    sp_saved_state restored = {.active = NULL};
    sp_adapter_store *store = NULL;
    sp_engine *engine = NULL;
    sp_status status = sp_server_confine(&settings->server, error);

    *out_usage = true;
    settings->server.model_dir = settings->run.model;
    settings->run.options.adapter_loading = true;
    settings->run.options.interactive = true;
    settings->run.options.adapter_refused = report_refused;
    settings->run.options.adapter_refused_user = &notes;
    settings->run.options.weights_prefault = settings->server.weights_prefault;
    settings->run.options.progress = sp_progress_tell;
    settings->run.options.progress_user = &progress;
    if (status == SP_OK && settings->server.adapter_store[0])
        status = sp_adapter_store_open(settings->server.adapter_store, &store, error);
    if (status == SP_OK)
        status = open_peers(settings, error);
    if (status == SP_OK)
        status = sp_run_settings_open(&settings->run, 0, &engine, out_usage, error);
    if (status == SP_OK && store)
        status = sp_server_restore_store(&settings->server, engine, &hooks, store, error);
    if (status == SP_OK)
        status = sp_server_restore(&settings->server, engine, &hooks, &restored, error);
    if (status == SP_ERR_STATE && strcmp(error->code, SP_CODE_SHUTTING_DOWN) == 0) {
        sp_log_line(settings->server.log, "sidepath serve: %s", error->text);
        status = SP_OK;
    } else if (status == SP_OK) {
        status = serve_until_signal(settings, engine, &notes.kept, &restored, store, error);
    }
    if (close_engine(engine, settings->server.log))
        sp_server_close_peers(&settings->server);
    sp_adapter_store_close(store);
    sp_saved_state_free(&restored);
    sp_server_refusals_free(&notes.kept);
    return status;
}

static int run_verb(serve_settings *settings)
{
    sigset_t blocked = ending_signals(), before;
    sp_error error = {0};
    bool usage = false;
    sp_status status;

    /* Before any thread starts: they inherit it. */
    sigaddset(&blocked, SIGHUP);
    sigprocmask(SIG_BLOCK, &blocked, &before);
    signal(SIGPIPE, SIG_IGN);
    sp_mapped_handle_faults(SP_FAULT_SURVIVES);
    status = sp_log_open(STDERR_FILENO, LOG_BYTES_MAX, &settings->server.log, &error);
    if (status == SP_OK && strcmp(settings->server.log_format, "json") == 0)
        sp_log_use_json(settings->server.log);
    if (status == SP_OK)
        status = open_and_serve(settings, &usage, &error);
    sp_log_close(settings->server.log, LOG_WAIT_MS);
    if (status == SP_OK)
        return SP_EXIT_DONE;
    /* What is written without the log may block, so signals end the program again. */
    sigprocmask(SIG_SETMASK, &before, NULL);
    return usage ? sp_cli_usage("serve", &error) : sp_cli_fail("serve", &error);
}

int sp_cli_serve(int argc, char **argv)
{
    serve_settings settings = {.run = {.model = NULL}};
    sp_error error;
    size_t n_rows;
    sp_setting *rows = create_rows(&settings, &n_rows);
    int code = SP_EXIT_DONE;

    if (!rows)
        return SP_EXIT_FAILED;
    if (sp_cli_wants_help(argc, argv)) {
        puts("usage: sidepath serve --model DIR [--adapter NAME=DIR]... [--adapter-dir DIR] "
             "[--port P] ...\n");
        sp_settings_print_help(stdout, rows, n_rows);
    } else if (sp_run_settings_parse(&settings.run, USES, rows, n_rows, argc, argv, NULL, &error) !=
               SP_OK) {
        code = sp_cli_usage("serve", &error);
    } else {
        code = run_verb(&settings);
        sp_settings_free_lists(rows, n_rows, &settings, NULL);
    }
    sp_free(rows);
    return code;
}
