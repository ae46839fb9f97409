/*
 * inspect.c: the verdict on an adapter, without a run. The receipt goes to stdout, everything else
 * to stderr; exit 0 accepted or unchecked, 1 refused or failed, 2 usage.
 */
#include "base/error.h"
#include "base/settings.h"
#include "cli/cli.h"

#include <sidepath/engine.h>
#include <sidepath/pool.h>

#include <stdio.h>
#include <string.h>

typedef struct inspect_settings {
    const char *model, *precision, *expert_layout;
    bool allow_partial, allow_no_effect, allow_unknown_fields, allow_base_changing_init;
    bool experts, json;
    int64_t rank_max, expert_rank_max;
} inspect_settings;

#define FIELD(name) offsetof(inspect_settings, name)

static const sp_setting settings[] = {
    {.name = "model",
     .type = SP_SETTING_STRING,
     .offset = FIELD(model),
     .value_name = "DIR",
     .flag_only = true,
     .help = "base model to hold the adapter against; without it the files alone are checked"},
    {.name = "allow-partial",
     .type = SP_SETTING_BOOL,
     .offset = FIELD(allow_partial),
     .default_text = "false",
     .help = "skip tensors of modules that are not served, and list them"},
    {.name = "allow-no-effect",
     .type = SP_SETTING_BOOL,
     .offset = FIELD(allow_no_effect),
     .default_text = "false",
     .help = "take an adapter that changes nothing"},
    {.name = "allow-unknown-fields",
     .type = SP_SETTING_BOOL,
     .offset = FIELD(allow_unknown_fields),
     .default_text = "false",
     .help = "ignore fields of adapter_config.json that are not known"},
    {.name = "allow-base-changing-init",
     .type = SP_SETTING_BOOL,
     .offset = FIELD(allow_base_changing_init),
     .default_text = "false",
     .help = "take PiSSA, OLoRA and the like as plain differences"},
    {.name = "experts",
     .type = SP_SETTING_BOOL,
     .offset = FIELD(experts),
     .default_text = "true",
     .help = "take adapters of router and experts"},
    {.name = "expert-layout",
     .type = SP_SETTING_CHOICE,
     .offset = FIELD(expert_layout),
     .default_text = "auto",
     .choices = "auto|linear|swapped",
     .help = "how fused expert pairs are read where neither config nor shapes tell"},
    {.name = "max-lora-rank",
     .type = SP_SETTING_INT,
     .offset = FIELD(rank_max),
     .default_text = "0",
     .minimum = 0,
     .maximum = SP_POOL_RANK_MAX,
     .value_name = "N",
     .help = "largest rank that the pool takes; 0: the adapter's own"},
    {.name = "max-lora-expert-rank",
     .type = SP_SETTING_INT,
     .offset = FIELD(expert_rank_max),
     .default_text = "64",
     .minimum = 1,
     .maximum = SP_POOL_RANK_MAX,
     .value_name = "N",
     .help = "largest rank of router and expert adapters"},
    {.name = "precision",
     .type = SP_SETTING_CHOICE,
     .offset = FIELD(precision),
     .default_text = "bf16",
     .choices = "bf16|f32",
     .help = "what the run computes in; f32 is the checking mode"},
    {.name = "json",
     .type = SP_SETTING_BOOL,
     .offset = FIELD(json),
     .default_text = "false",
     .flag_only = true,
     .help = "print one JSON object"},
};
#define N_SETTINGS (sizeof settings / sizeof *settings)

static void print_usage(FILE *stream)
{
    fprintf(stream, "usage: sidepath inspect DIR [--model DIR] [--json] …\n\n"
                    "Prints what an adapter holds and whether it would be taken. Exit status: 0 "
                    "accepted (or\nunchecked, without --model), 1 refused or failed, 2 usage. "
                    "docs/ADAPTERS.md has the codes\nof refusals, and what to do about each.\n\n");
    sp_settings_print_help(stream, settings, N_SETTINGS);
}

static sp_adapter_options adapter_options(const inspect_settings *s, sp_geometry *geometry)
{
    sp_adapter_options options;

    sp_adapter_options_default(&options, sizeof options);
    options.geometry = geometry;
    options.base_dir = s->model;
    options.rank_max = (int32_t)s->rank_max;
    if (geometry && !options.rank_max)
        options.rank_max = SP_POOL_RANK_MAX; /* no pool of the server's is larger */
    options.expert_rank_max = (int32_t)s->expert_rank_max;
    options.experts_off = !s->experts;
    options.allow_partial = s->allow_partial;
    options.allow_no_effect = s->allow_no_effect;
    options.allow_unknown_fields = s->allow_unknown_fields;
    options.allow_base_changing_init = s->allow_base_changing_init;
    options.pool_dtype = strcmp(s->precision, "f32") == 0 ? SP_DTYPE_F32 : SP_DTYPE_BF16;
    if (strcmp(s->expert_layout, "linear") == 0)
        options.expert_layout = SP_EXPERT_LAYOUT_LINEAR;
    if (strcmp(s->expert_layout, "swapped") == 0)
        options.expert_layout = SP_EXPERT_LAYOUT_SWAPPED;
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
    layout.rank = s->rank_max > 0 ? (int32_t)s->rank_max : sp_adapter_rank_max(adapter);
    layout.dtype = options->pool_dtype;
    status = sp_layout_measure(&layout, &slot_bytes, &matrix_bytes, error);
    if (status == SP_OK)
        *out_bytes = (int64_t)slot_bytes;
    return status;
}

/* Returns `verdict`, or the failure that a verdict which nobody got to read is. */
static int print_receipt(const inspect_settings *s, const sp_receipt *receipt, int verdict)
{
    sp_error error;

    if (fputs(s->json ? sp_receipt_json(receipt) : sp_receipt_table(receipt), stdout) != EOF &&
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
    if (options->geometry)
        receipt_options.engine_modules = sp_engine_modules(options->geometry);
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
 * A base that cannot be read, or is not served, leaves nothing to hold an adapter against. Under
 * --json that is a verdict too: a script reads one object whatever the reason.
 */
static int fail_base(const inspect_settings *s, const char *path, const sp_error *failure)
{
    sp_error refusal;

    if (!s->json || failure->status == SP_ERR_MEMORY)
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

    if (s->model && sp_geometry_open(s->model, &geometry, &error) != SP_OK)
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
    inspect_settings values = {0};
    sp_setting_list paths = {0};
    sp_error error;
    int exit_status = SP_EXIT_USAGE;

    if (sp_cli_wants_help(argc, argv)) {
        print_usage(stdout);
        return SP_EXIT_DONE;
    }
    if (sp_settings_parse(settings, N_SETTINGS, argc, argv, &values, &paths, &error) != SP_OK)
        sp_cli_usage("inspect", &error);
    else if (paths.n != 1)
        print_usage(stderr);
    else
        exit_status = inspect(&values, paths.values[0]);
    sp_settings_free_lists(settings, N_SETTINGS, &values, &paths);
    return exit_status;
}
