/*
 * inspect.c: the verdict on an adapter, without a run. The receipt goes to stdout, everything else
 * to stderr; exit 0 accepted or unchecked, 1 refused or failed, 2 usage.
 */
#include "base/alloc.h"
#include "base/error.h"
#include "cli/cli.h"
#include "cli/run_settings.h"

#include <sidepath/engine.h>
#include <sidepath/pool.h>

#include <stdio.h>
#include <string.h>

typedef struct inspect_settings {
    sp_run_settings run;
} inspect_settings;

#define USES (SP_OPTION_OF_ADAPTER | SP_SETTING_OF_OUTPUT)

/* The files alone are checked unless the command line itself names a model. */
static sp_setting *create_rows(inspect_settings *values, size_t *out_n)
{
    sp_setting *rows = sp_run_settings_rows(&values->run, USES, NULL, 0, out_n);

    for (size_t i = 0; rows && i < *out_n; i++)
        rows[i].flag_only |= strcmp(rows[i].name, "model") == 0;
    return rows;
}

static void print_usage(FILE *stream, const sp_setting *rows, size_t n_rows)
{
    fprintf(stream, "usage: sidepath inspect DIR [--model DIR] [--json] …\n\n"
                    "Prints what an adapter holds and whether it would be taken. Exit status: 0 "
                    "accepted (or\nunchecked, without --model), 1 refused or failed, 2 usage. "
                    "docs/ADAPTERS.md has the codes\nof refusals, and what to do about each.\n\n");
    sp_settings_print_help(stream, rows, n_rows);
}

static sp_adapter_options adapter_options(const inspect_settings *s, sp_geometry *geometry)
{
    sp_adapter_options options;

    sp_adapter_options_default(&options, sizeof options);
    options.geometry = geometry;
    options.base_dir = s->run.model;
    options.rank_max = s->run.options.max_lora_rank;
    if (geometry && !options.rank_max)
        options.rank_max = SP_POOL_RANK_MAX; /* no pool of the server's is larger */
    options.expert_rank_max = s->run.options.max_lora_expert_rank;
    options.experts_off = !s->run.options.experts;
    options.allow_partial = s->run.options.allow_partial;
    options.allow_no_effect = s->run.options.allow_no_effect;
    options.allow_unknown_fields = s->run.options.allow_unknown_fields;
    options.allow_base_changing_init = s->run.options.allow_base_changing_init;
    options.pool_dtype = strcmp(s->run.precision, "f32") == 0 ? SP_DTYPE_F32 : SP_DTYPE_BF16;
    options.expert_layout = sp_run_settings_expert_layout(&s->run);
    return options;
}

/* A slot of a pool that holds this adapter alone: its own linear modules at its own rank. */
static sp_status measure_slot(const inspect_settings *s, const sp_adapter *adapter,
                              const sp_adapter_options *options, int64_t *out_bytes,
                              sp_error *error)
{
    sp_module_set linear;
    sp_layout_options layout;
    size_t slot_bytes, matrix_bytes;
    sp_status status;

    *out_bytes = options->geometry ? 0 : -1;
    if (!options->geometry)
        return SP_OK;
    linear =
        sp_adapter_modules(adapter) & sp_geometry_kind_modules(options->geometry, SP_SITE_LINEAR);
    if (!linear)
        return SP_OK;
    sp_layout_options_default(&layout, sizeof layout);
    layout.geometry = options->geometry;
    layout.modules = linear;
    layout.rank = s->run.options.max_lora_rank > 0 ? s->run.options.max_lora_rank
                                                   : sp_adapter_rank_max(adapter);
    layout.dtype = options->pool_dtype;
    status = sp_layout_measure(&layout, &slot_bytes, &matrix_bytes, error);
    if (status == SP_OK)
        *out_bytes = (int64_t)slot_bytes;
    return status;
}

/* Returns `verdict`, or failure if it could not be printed. */
static int print_receipt(const inspect_settings *s, const sp_receipt *receipt, int verdict)
{
    sp_error error;

    if (fputs(s->run.json ? sp_receipt_json(receipt) : sp_receipt_table(receipt), stdout) != EOF &&
        fflush(stdout) == 0)
        return verdict;
    sp_fail(&error, SP_ERR_IO, NULL, "stdout", -1, "cannot write to standard output");
    return sp_cli_fail("inspect", &error);
}

static int print_accepted(const inspect_settings *s, const sp_adapter *adapter,
                          const sp_adapter_options *options)
{
    sp_receipt_options receipt_options;
    sp_receipt *receipt;
    sp_error error;
    int exit_status;

    sp_receipt_options_default(&receipt_options, sizeof receipt_options);
    if (options->geometry) {
        receipt_options.engine_modules = sp_engine_modules(options->geometry);
        receipt_options.expert_bytes =
            (int64_t)sp_layout_expert_bytes(adapter, options->pool_dtype);
    }
    if (measure_slot(s, adapter, options, &receipt_options.slot_bytes, &error) != SP_OK ||
        sp_receipt_create(adapter, &receipt_options, &receipt, &error) != SP_OK)
        return sp_cli_fail("inspect", &error);
    exit_status = print_receipt(s, receipt, SP_EXIT_DONE);
    sp_receipt_destroy(receipt);
    return exit_status;
}

/* A failure without a code (out of memory, a disk that fails) is no verdict on the adapter. */
static int print_refused(const inspect_settings *s, const char *path, const sp_error *refusal)
{
    sp_receipt *receipt;
    sp_error error;
    int exit_status;

    if (refusal->code[0] == '\0')
        return sp_cli_fail("inspect", refusal);
    if (sp_receipt_create_refused(path, refusal, &receipt, &error) != SP_OK)
        return sp_cli_fail("inspect", &error);
    exit_status = print_receipt(s, receipt, SP_EXIT_FAILED);
    sp_receipt_destroy(receipt);
    return exit_status;
}

/*
 * A base that cannot be read, or is not served, leaves nothing to check an adapter against. Under
 * --json that is a verdict too: a script reads one object whatever the reason.
 */
static int fail_base(const inspect_settings *s, const char *path, const sp_error *failure)
{
    sp_error refusal;

    if (!s->run.json || failure->status == SP_ERR_MEMORY)
        return sp_cli_fail("inspect", failure);
    sp_fail(&refusal, SP_ERR_REFUSED, "base-unavailable", NULL, -1, "%s", failure->text);
    return print_refused(s, path, &refusal);
}

static int inspect(const inspect_settings *s, const char *path)
{
    sp_geometry *geometry = NULL;
    sp_adapter_options options;
    sp_adapter *adapter;
    sp_error error;
    int exit_status;

    if (s->run.model && sp_geometry_open(s->run.model, &geometry, &error) != SP_OK)
        return fail_base(s, path, &error);
    options = adapter_options(s, geometry);
    if (sp_adapter_open(path, &options, &adapter, &error) == SP_OK) {
        exit_status = print_accepted(s, adapter, &options);
        sp_adapter_release(adapter);
    } else {
        exit_status = print_refused(s, path, &error);
    }
    sp_geometry_release(geometry);
    return exit_status;
}

int sp_cli_inspect(int argc, char **argv)
{
    inspect_settings values = {.run = {0}};
    sp_setting_list paths = {0};
    size_t n_rows;
    sp_setting *rows = create_rows(&values, &n_rows);
    sp_error error;
    int exit_status = SP_EXIT_USAGE;

    if (!rows)
        return SP_EXIT_FAILED;
    if (sp_cli_wants_help(argc, argv)) {
        print_usage(stdout, rows, n_rows);
        exit_status = SP_EXIT_DONE;
    } else if (sp_run_settings_parse(&values.run, USES, rows, n_rows, argc, argv, &paths, &error) !=
               SP_OK) {
        sp_cli_usage("inspect", &error);
    } else {
        if (paths.n != 1)
            print_usage(stderr, rows, n_rows);
        else
            exit_status = inspect(&values, paths.values[0]);
        sp_settings_free_lists(rows, n_rows, &values, &paths);
    }
    sp_free(rows);
    return exit_status;
}
