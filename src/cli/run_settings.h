/*
 * run_settings.h: the settings that every verb that runs a model shares, and the engine that they
 * describe.
 */
#ifndef SP_CLI_RUN_SETTINGS_H
#define SP_CLI_RUN_SETTINGS_H

#include "base/settings.h"

#include <sidepath/engine.h>

typedef struct sp_run_settings {
    const char *model;
    sp_setting_list adapters; /* NAME=DIR */
    const char *device, *cpu_isa, *precision, *lora_modules, *served_name, *active;
    int64_t threads, max_loras, max_lora_rank, overlay_bytes, max_context, max_running, kv_tokens,
        step_rows, prefill_chunk, page_tokens, host_cache_mib, loader_threads, adapter_wait_steps,
        adapter_preempt_steps, memory_bytes;
    bool no_apply, no_ffn, allow_partial, allow_no_effect, allow_unknown_fields,
        allow_base_changing_init, prefix_cache, weights_copy;
    /* Set by the verb, no flags: adapters may be loaded later; who hears of start-up adapters that
     * are refused, see sp_engine_options. */
    bool adapter_loading;
    void (*adapter_refused)(void *user, const char *name, const sp_error *error);
    void *adapter_refused_user;
} sp_run_settings;

/* Rows for a struct whose first member is an sp_run_settings. */
#define SP_RUN_SETTINGS_COUNT 31
extern const sp_setting sp_run_setting_rows[SP_RUN_SETTINGS_COUNT];

/* Joins the shared rows and a verb's own into one table; the caller frees it with sp_free. */
sp_setting *sp_run_settings_join(const sp_setting *own, size_t n_own, size_t *out_n);

/*
 * Opens the engine that the settings describe. kv_tokens 0 means `kv_tokens_wanted`,
 * and 0 there leaves it to the engine. *out_usage is
 * set when the failure lies in the command line itself.
 */
sp_status sp_run_settings_open(const sp_run_settings *settings, int64_t kv_tokens_wanted,
                               sp_engine **out_engine, bool *out_usage, sp_error *error);

#endif
