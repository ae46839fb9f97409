/*
 * logits.c: the logits of one token list, as a safetensors file with the tensor "logits".
 */
#include "base/alloc.h"
#include "base/error.h"
#include "base/file.h"
#include "base/text.h"
#include "cli/cli.h"
#include "cli/run_settings.h"
#include "engine/request/request_table.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

typedef struct logits_settings {
    sp_run_settings run;
    const char *use, *tokens, *out;
    int64_t last;
    sp_field_flags flags;
} logits_settings;

#define FIELD(member) offsetof(logits_settings, member)

static const sp_setting own_rows[] = {
    {"use", SP_SETTING_STRING, FIELD(use), "base", 0, 0, NULL, "NAME|base", "the adapter to apply",
     true},
    {"tokens", SP_SETTING_STRING, FIELD(tokens), NULL, 0, 0, NULL, "1,2,3", "token ids", true},
    {"last", SP_SETTING_INT, FIELD(last), "0", 0, 1 << 24, NULL, "N",
     "only the last N positions; 0: all", true},
    {"out", SP_SETTING_STRING, FIELD(out), NULL, 0, 0, NULL, "FILE", "safetensors file to write",
     true},
};

#define USES       SP_OPTION_OF_ENGINE
#define N_OWN_ROWS (sizeof own_rows / sizeof own_rows[0])

/* The file under construction: header and rows in one block. */
typedef struct logits_run {
    logits_settings settings;
    sp_engine *engine;
    int32_t *tokens;
    int32_t n_tokens, first;
    char *file;
    size_t file_bytes, header_bytes;
} logits_run;

static sp_status parse_tokens(logits_run *run, sp_error *error)
{
    const char *cursor = run->settings.tokens;
    size_t n = 1;

    for (const char *c = cursor; *c; c++)
        n += *c == ',';
    run->tokens = sp_calloc(n, sizeof(int32_t));
    if (!run->tokens)
        return sp_fail_memory(error, n * sizeof(int32_t), "tokens");
    for (size_t i = 0; i < n; i++) {
        char *end;
        long id;

        errno = 0;
        id = strtol(cursor, &end, 10);
        if (end == cursor || (*end != ',' && *end != '\0') || errno || id < 0 || id > INT32_MAX)
            return sp_fail(error, SP_ERR_ARGUMENT, NULL, "tokens", (int64_t)i,
                           "--tokens: item %zu is not a token id", i);
        run->tokens[i] = (int32_t)id;
        cursor = *end ? end + 1 : end;
    }
    run->n_tokens = (int32_t)n;
    run->first = 0;
    if (run->settings.last > 0 && run->settings.last < run->n_tokens)
        run->first = run->n_tokens - (int32_t)run->settings.last;
    return SP_OK;
}

/* A safetensors file of one F32 tensor; the header is padded with blanks to 8 bytes. */
static sp_status start_file(logits_run *run, sp_error *error)
{
    int32_t rows = run->n_tokens - run->first;
    int32_t vocab = sp_engine_shape(run->engine)->vocab;
    size_t data_bytes = (size_t)rows * (size_t)vocab * sizeof(float);
    sp_text header = {0};
    uint64_t length;

    sp_text_format(&header,
                   "{\"logits\":{\"dtype\":\"F32\",\"shape\":[%d,%d],\"data_offsets\":[0,%zu]}}",
                   rows, vocab, data_bytes);
    while (header.bytes % 8 != 0 && !header.failed)
        sp_text_add(&header, " ");
    run->header_bytes = header.bytes + 8;
    run->file_bytes = run->header_bytes + data_bytes;
    run->file = header.failed ? NULL : sp_malloc(run->file_bytes);
    if (run->file) {
        length = header.bytes;
        memcpy(run->file, &length, sizeof length);
        memcpy(run->file + 8, header.data, header.bytes);
    }
    sp_text_free(&header);
    return run->file ? SP_OK : sp_fail_memory(error, run->file_bytes, "the logits");
}

static void take_logits(void *user, int32_t position, const float *logits, int32_t vocab)
{
    logits_run *run = user;
    size_t row_bytes = (size_t)vocab * sizeof(float);

    memcpy(run->file + run->header_bytes + (size_t)(position - run->first) * row_bytes, logits,
           row_bytes);
}

static sp_status compute(logits_run *run, sp_error *error)
{
    const sp_field_flag_set set = sp_request_flag_set(SP_FORM_LOGITS_FLAGS);
    sp_request request;
    sp_status status;
    int64_t id;

    sp_request_default(&request, sizeof request);
    status = sp_field_flags_apply(&run->settings.flags, &set, &request, error);
    if (status != SP_OK)
        return status;
    request.adapter = strcmp(run->settings.use, "base") == 0 ? NULL : run->settings.use;
    request.tokens = run->tokens;
    request.n_tokens = run->n_tokens;
    request.max_tokens = 0;
    request.logits_fn = take_logits;
    request.logits_user = run;
    request.logits_from = run->first;
    status = sp_engine_submit(run->engine, &request, &id, error);
    while (status == SP_OK)
        status = sp_engine_step(run->engine, NULL, NULL, error);
    return status == SP_AGAIN ? SP_OK : status;
}

static int run_verb(logits_run *run)
{
    sp_error error = {0};
    bool usage = true;
    sp_status status;

    if (!run->settings.tokens || !run->settings.out) {
        sp_fail(&error, SP_ERR_ARGUMENT, NULL, NULL, -1, "--tokens and --out are required");
        return sp_cli_usage("logits", &error);
    }
    status = parse_tokens(run, &error);
    if (status == SP_OK)
        status =
            sp_run_settings_open(&run->settings.run, run->n_tokens, &run->engine, &usage, &error);
    if (status != SP_OK)
        return usage ? sp_cli_usage("logits", &error) : sp_cli_fail("logits", &error);
    status = start_file(run, &error);
    if (status == SP_OK)
        status = compute(run, &error);
    if (status == SP_OK)
        status = sp_file_write_all(run->settings.out, run->file, run->file_bytes, &error);
    return status == SP_OK ? SP_EXIT_DONE : sp_cli_fail("logits", &error);
}

static sp_setting *create_rows(logits_settings *settings, size_t *out_n)
{
    const sp_field_flag_set set = sp_request_flag_set(SP_FORM_LOGITS_FLAGS);
    sp_setting own[SP_FIELD_FLAGS_MAX + N_OWN_ROWS];
    size_t n = sp_field_flags_rows(&settings->flags, &set, FIELD(flags), own);

    memcpy(own + n, own_rows, sizeof own_rows);
    return sp_run_settings_rows(&settings->run, USES, own, n + N_OWN_ROWS, out_n);
}

int sp_cli_logits(int argc, char **argv)
{
    logits_run run = {0};
    sp_error error;
    size_t n_rows;
    sp_setting *rows = create_rows(&run.settings, &n_rows);
    int code = SP_EXIT_DONE;

    if (!rows)
        return SP_EXIT_FAILED;
    if (sp_cli_wants_help(argc, argv)) {
        puts("usage: sidepath logits --model DIR [--adapter NAME=DIR]... --use NAME|base "
             "--tokens 1,2,3 [--last N] --out FILE\n");
        sp_settings_print_help(stdout, rows, n_rows);
    } else if (sp_run_settings_parse(&run.settings.run, USES, rows, n_rows, argc, argv, NULL,
                                     &error) != SP_OK) {
        code = sp_cli_usage("logits", &error);
    } else {
        code = run_verb(&run);
        sp_settings_free_lists(rows, n_rows, &run.settings, NULL);
    }
    sp_engine_close(run.engine);
    sp_free(run.file);
    sp_free(run.tokens);
    sp_free(rows);
    return code;
}
