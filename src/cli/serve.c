/*
 * serve.c: opens the engine, starts the server, and waits for a signal. The first SIGTERM or
 * SIGINT lets running requests finish, a second one does not.
 */
#include "base/alloc.h"
#include "base/error.h"
#include "cli/cli.h"
#include "cli/run_settings.h"
#include "server/server.h"

#include <errno.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#define KV_TOKENS_BY_ITSELF 65536

typedef struct serve_settings {
    sp_run_settings run; /* first: the shared rows point into it */
    sp_server_settings server;
} serve_settings;

static sp_setting *create_rows(size_t *out_n)
{
    sp_setting own[SP_SERVER_SETTINGS_COUNT];

    memcpy(own, sp_server_setting_rows, sizeof own);
    for (size_t i = 0; i < SP_SERVER_SETTINGS_COUNT; i++)
        own[i].offset += offsetof(serve_settings, server);
    return sp_run_settings_join(own, SP_SERVER_SETTINGS_COUNT, out_n);
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

static void wait_for_signal(void)
{
    sigset_t set = ending_signals();
    int number;

    do {
        number = sigwaitinfo(&set, NULL);
    } while (number < 0 && errno == EINTR);
}

/* ---- serving ------------------------------------------------------------------------------- */

static void report_refused(void *user, const char *name, const sp_error *error)
{
    fprintf(stderr, "sidepath serve: adapter \"%s\" is left out: %s [%s]\n", name, error->text,
            error->code ? error->code : "");
    sp_server_keep_refusal(user, name, error);
}

static int serve_until_signal(const serve_settings *settings, sp_engine *engine,
                              const sp_server_refusals *refusals)
{
    sp_server *server;
    sp_error error;
    size_t n_adapters = sp_engine_n_adapters(engine); /* while the engine is still ours */
    sp_status status = sp_server_start(&settings->server, engine, refusals,
                                       (int32_t)settings->run.max_running, &server, &error);

    if (status != SP_OK)
        return sp_cli_fail("serve", &error);
    fprintf(stderr, "sidepath serve: %s, %zu adapters, at http://%s\n", sp_engine_base_name(engine),
            n_adapters, sp_server_address(server));
    wait_for_signal();
    fputs("sidepath serve: finishing; a second signal ends at once\n", stderr);
    if (sp_server_stop(server, signal_is_pending))
        fputs("sidepath serve: every request was finished\n", stderr);
    else
        fputs("sidepath serve: requests were cut off\n", stderr);
    return SP_EXIT_DONE;
}

static int run_verb(serve_settings *settings)
{
    sp_server_refusals refusals = {.items = NULL};
    sigset_t ending = ending_signals();
    sp_engine *engine = NULL;
    sp_error error = {0};
    bool usage = true;
    sp_status status = sp_server_confine(&settings->server, &error);
    int code;

    /* Before any thread starts: they inherit it. */
    sigprocmask(SIG_BLOCK, &ending, NULL);
    signal(SIGPIPE, SIG_IGN);
    settings->server.model_dir = settings->run.model;
    settings->run.adapter_loading = true;
    settings->run.adapter_refused = report_refused;
    settings->run.adapter_refused_user = &refusals;
    if (status == SP_OK)
        status = sp_run_settings_open(&settings->run, KV_TOKENS_BY_ITSELF, &engine, &usage, &error);
    if (status == SP_OK)
        code = serve_until_signal(settings, engine, &refusals);
    else
        code = usage ? sp_cli_usage("serve", &error) : sp_cli_fail("serve", &error);
    sp_engine_close(engine);
    sp_server_refusals_free(&refusals);
    return code;
}

int sp_cli_serve(int argc, char **argv)
{
    serve_settings settings = {.run = {.model = NULL}};
    sp_error error;
    size_t n_rows;
    sp_setting *rows = create_rows(&n_rows);
    int code = SP_EXIT_DONE;

    if (!rows)
        return SP_EXIT_FAILED;
    if (sp_cli_wants_help(argc, argv)) {
        puts("usage: sidepath serve --model DIR [--adapter NAME=DIR]... [--adapter-dir DIR] "
             "[--port P] ...\n");
        sp_settings_print_help(stdout, rows, n_rows);
    } else if (sp_settings_parse(rows, n_rows, argc, argv, &settings, NULL, &error) != SP_OK) {
        code = sp_cli_usage("serve", &error);
    } else {
        code = run_verb(&settings);
        sp_settings_free_lists(rows, n_rows, &settings, NULL);
    }
    sp_free(rows);
    return code;
}
