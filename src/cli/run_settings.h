/*
 * run_settings.h: the settings that verbs share, one row each, and the engine that they describe.
 * A verb says which of them it takes, and adds the rows that are its alone.
 */
#ifndef SP_CLI_RUN_SETTINGS_H
#define SP_CLI_RUN_SETTINGS_H

#include "base/settings.h"
#include "cli/field_flags.h"
#include "engine/option_rows.h"

/* Which of the shared settings a verb takes: bits of sp_option_of, and one more. */
#define SP_SETTING_OF_OUTPUT 8 /* --json */

typedef struct sp_run_settings {
    const char *model;
    sp_setting_list adapters; /* NAME=DIR */
    const char *device, *cpu_isa, *precision, *lora_modules, *served_name, *active, *base_gemm;
    const char *draft_model, *expert_layout;
    int64_t host_cache_mib;
    bool json;
    sp_field_flags flags;      /* of the options that are rows of engine/option_rows.h */
    sp_engine_options options; /* what these say; the verb may change it until the engine opens, and
                                  sets what has no flag: adapter_loading, adapter_refused */
} sp_run_settings;

/*
 * The rows that a verb takes: the shared ones that concern `uses`, and its own, for a struct whose
 * first member is *run. They borrow from *run; the caller frees the table with sp_free. NULL: out
 * of memory.
 */
sp_setting *sp_run_settings_rows(sp_run_settings *run, unsigned uses, const sp_setting *own,
                                 size_t n_own, size_t *out_n);

/* sp_settings_parse into a struct that begins with *run, whose options it fills. */
sp_status sp_run_settings_parse(sp_run_settings *run, unsigned uses, const sp_setting *rows,
                                size_t n_rows, int argc, char **argv,
                                sp_setting_list *out_positional, sp_error *error);

/* What --expert-layout says. */
sp_expert_layout sp_run_settings_expert_layout(const sp_run_settings *settings);

/*
 * Opens the engine that the settings describe. kv_tokens 0 means `kv_tokens_wanted`, and 0 there
 * leaves it to the engine. *out_usage is set when the failure is in the command line itself.
 */
sp_status sp_run_settings_open(const sp_run_settings *settings, int64_t kv_tokens_wanted,
                               sp_engine **out_engine, bool *out_usage, sp_error *error);

#endif
