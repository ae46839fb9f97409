#include "cli/run_settings.h"

#include "base/alloc.h"
#include "base/error.h"

#include <stddef.h>
#include <string.h>

#define FIELD(member) offsetof(sp_run_settings, member)

const sp_setting sp_run_setting_rows[SP_RUN_SETTINGS_COUNT] = {
    {"model", SP_SETTING_STRING, FIELD(model), NULL, 0, 0, NULL, "DIR",
     "the base model's directory", false},
    {"adapter", SP_SETTING_LIST, FIELD(adapters), NULL, 0, 0, NULL, "NAME=DIR",
     "an adapter to load under a name; may be repeated", true},
    {"device", SP_SETTING_CHOICE, FIELD(device), "auto", 0, 0, "auto|cpu|cuda", NULL,
     "where to run", false},
    {"cpu-isa", SP_SETTING_CHOICE, FIELD(cpu_isa), "auto", 0, 0, "auto|scalar|avx2|avx512|amx",
     NULL, "highest CPU instruction set to use", false},
    {"precision", SP_SETTING_CHOICE, FIELD(precision), "bf16", 0, 0, "bf16|f32", NULL,
     "bf16 to serve, f32 to check", false},
    {"threads", SP_SETTING_INT, FIELD(threads), "0", 0, 1024, NULL, "N",
     "threads; 0: as many as the process may use", false},
    {"max-loras", SP_SETTING_INT, FIELD(max_loras), "8", 0, 4096, NULL, "N", "adapter slots",
     false},
    {"max-lora-rank", SP_SETTING_INT, FIELD(max_lora_rank), "0", 0, 4096, NULL, "R",
     "rank of a slot; 0: the largest of the adapters, else 64", false},
    {"overlay-bytes", SP_SETTING_INT, FIELD(overlay_bytes), "0", 0, 1e15, NULL, "N",
     "memory for embedding and head rows that adapters replace; 0: what the adapters need", false},
    {"lora-modules", SP_SETTING_STRING, FIELD(lora_modules), "", 0, 0, NULL, "LIST",
     "modules that a slot holds (q_proj,up_proj,...); empty: those of the adapters", false},
    {"max-context", SP_SETTING_INT, FIELD(max_context), "0", 0, 1 << 24, NULL, "N",
     "tokens of one request, prompt included; 0: the model's", false},
    {"max-running", SP_SETTING_INT, FIELD(max_running), "64", 1, 4096, NULL, "N",
     "requests that run at a time", false},
    {"kv-tokens", SP_SETTING_INT, FIELD(kv_tokens), "0", 0, 1e12, NULL, "N",
     "capacity of the KV cache in tokens; 0: what the requests need; for a server max-running x "
     "max-context, or half of the memory that is left",
     false},
    {"page-tokens", SP_SETTING_INT, FIELD(page_tokens), "16", 1, 32, NULL, "N",
     "tokens of a KV page: 1, 2, 4, 8, 16 or 32", false},
    {"step-rows", SP_SETTING_INT, FIELD(step_rows), "256", 1, 65536, NULL, "N",
     "most rows of one step", false},
    {"prefill-chunk", SP_SETTING_INT, FIELD(prefill_chunk), "0", 0, 65536, NULL, "N",
     "most prompt rows of one request in one step; 0: step-rows, for a server 64", false},
    {"no-apply", SP_SETTING_BOOL, FIELD(no_apply), NULL, 0, 0, NULL, NULL,
     "measuring: keep adapters resident and skip every delta", false},
    {"no-ffn", SP_SETTING_BOOL, FIELD(no_ffn), NULL, 0, 0, NULL, NULL,
     "measuring: skip the deltas of the FFN", false},
    {"allow-partial", SP_SETTING_BOOL, FIELD(allow_partial), NULL, 0, 0, NULL, NULL,
     "apply what fits of an adapter and list what does not", false},
    {"allow-no-effect", SP_SETTING_BOOL, FIELD(allow_no_effect), NULL, 0, 0, NULL, NULL,
     "accept an adapter whose every product is zero", false},
    {"allow-unknown-fields", SP_SETTING_BOOL, FIELD(allow_unknown_fields), NULL, 0, 0, NULL, NULL,
     "accept adapter_config.json fields that are not known", false},
    {"allow-base-changing-init", SP_SETTING_BOOL, FIELD(allow_base_changing_init), NULL, 0, 0, NULL,
     NULL, "accept adapters made against a changed base (pissa, olora, ...)", false},
    {"active", SP_SETTING_STRING, FIELD(active), NULL, 0, 0, NULL, "NAME",
     "the adapter of requests that name none; default: the base", false},
    {"memory", SP_SETTING_INT, FIELD(memory_bytes), "0", 0, 1e15, NULL, "BYTES",
     "memory that may be taken; 0: what is free, cgroup limits included", false},
    {"host-cache-mib", SP_SETTING_INT, FIELD(host_cache_mib), "0", 0, 1 << 24, NULL, "N",
     "memory for packed adapters outside the slots; 0: half of what everything else leaves", false},
    {"loader-threads", SP_SETTING_INT, FIELD(loader_threads), "1", 0, 64, NULL, "N",
     "threads that load adapters beside the steps; 0: none", false},
    {"adapter-wait-steps", SP_SETTING_INT, FIELD(adapter_wait_steps), "64", 1, 1 << 24, NULL, "N",
     "steps that an adapter waits for a slot before those in slots take no new requests", false},
    {"adapter-preempt-steps", SP_SETTING_INT, FIELD(adapter_preempt_steps), "256", 1, 1 << 24, NULL,
     "N", "steps that an adapter waits for a slot before running requests make way", false},
    {"prefix-cache", SP_SETTING_BOOL, FIELD(prefix_cache), "1", 0, 0, NULL, NULL,
     "share the KV pages of equal beginnings; changes no result", false},
    {"weights-copy", SP_SETTING_BOOL, FIELD(weights_copy), NULL, 0, 0, NULL, NULL,
     "read the base weights into memory instead of mapping their files", false},
    {"served-model-name", SP_SETTING_STRING, FIELD(served_name), NULL, 0, 0, NULL, "NAME",
     "the base's name; default: its folder's", false},
};

sp_setting *sp_run_settings_join(const sp_setting *own, size_t n_own, size_t *out_n)
{
    size_t n = SP_RUN_SETTINGS_COUNT + n_own;
    sp_setting *joined = sp_calloc(n, sizeof *joined);

    if (!joined)
        return NULL;
    memcpy(joined, sp_run_setting_rows, sizeof sp_run_setting_rows);
    memcpy(joined + SP_RUN_SETTINGS_COUNT, own, n_own * sizeof *own);
    *out_n = n;
    return joined;
}

/* ---- the engine ---------------------------------------------------------------------------- */

static void free_adapters(sp_engine_adapter *adapters, size_t n)
{
    for (size_t i = 0; adapters && i < n; i++)
        sp_free((void *)(uintptr_t)adapters[i].name);
    sp_free(adapters);
}

static sp_status split_adapters(const sp_setting_list *list, sp_engine_adapter **out_adapters,
                                sp_error *error)
{
    sp_engine_adapter *adapters = NULL;

    *out_adapters = NULL;
    if (list->n == 0)
        return SP_OK;
    adapters = sp_calloc(list->n, sizeof *adapters);
    if (!adapters)
        return sp_fail_memory(error, list->n * sizeof *adapters, "the list of adapters");
    for (size_t i = 0; i < list->n; i++) {
        const char *equals = strchr(list->values[i], '=');

        if (!equals || equals[1] == '\0') {
            free_adapters(adapters, list->n);
            return sp_fail(error, SP_ERR_ARGUMENT, NULL, "adapter", -1,
                           "--adapter: \"%s\" is not NAME=DIR", list->values[i]);
        }
        adapters[i].struct_bytes = sizeof adapters[i];
        adapters[i].name = sp_strndup(list->values[i], (size_t)(equals - list->values[i]));
        adapters[i].path = equals + 1;
        if (!adapters[i].name) {
            free_adapters(adapters, list->n);
            return sp_fail_memory(error, list->n, "the name of an adapter");
        }
    }
    *out_adapters = adapters;
    return SP_OK;
}

static sp_status check_usage(const sp_run_settings *settings, sp_error *error)
{
    bool f32 = strcmp(settings->precision, "f32") == 0;

    if (!settings->model)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "model", -1, "--model DIR is required");
    if (strcmp(settings->device, "cuda") == 0 && f32)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "precision", -1,
                       "--precision f32 runs on the CPU only; leave out --device cuda");
    return SP_OK;
}

static void fill_options(const sp_run_settings *settings, int64_t kv_tokens_wanted,
                         sp_engine_options *options)
{
    sp_engine_options_default(options, sizeof *options);
    options->model_dir = settings->model;
    options->served_name = settings->served_name;
    options->precision = strcmp(settings->precision, "f32") == 0 ? SP_DTYPE_F32 : SP_DTYPE_BF16;
    options->cpu_isa = settings->cpu_isa;
    options->threads = (int32_t)settings->threads;
    options->max_loras = (int32_t)settings->max_loras;
    options->max_lora_rank = (int32_t)settings->max_lora_rank;
    options->overlay_bytes = (size_t)settings->overlay_bytes;
    options->max_context = (int32_t)settings->max_context;
    options->max_running = (int32_t)settings->max_running;
    options->kv_tokens = settings->kv_tokens > 0 ? settings->kv_tokens : kv_tokens_wanted;
    options->page_tokens = (int32_t)settings->page_tokens;
    options->step_rows = (int32_t)settings->step_rows;
    options->prefill_chunk = (int32_t)settings->prefill_chunk;
    options->host_bytes_max = (size_t)settings->host_cache_mib << 20;
    options->memory_bytes = (size_t)settings->memory_bytes;
    options->loader_threads = (int32_t)settings->loader_threads;
    options->adapter_wait_steps = (int32_t)settings->adapter_wait_steps;
    options->adapter_preempt_steps = (int32_t)settings->adapter_preempt_steps;
    options->prefix_cache = settings->prefix_cache;
    options->adapter_loading = settings->adapter_loading;
    options->adapter_refused = settings->adapter_refused;
    options->adapter_refused_user = settings->adapter_refused_user;
    options->no_apply = settings->no_apply;
    options->no_ffn = settings->no_ffn;
    options->allow_partial = settings->allow_partial;
    options->allow_no_effect = settings->allow_no_effect;
    options->allow_unknown_fields = settings->allow_unknown_fields;
    options->weights_copy = settings->weights_copy;
    options->allow_base_changing_init = settings->allow_base_changing_init;
}

static sp_status set_active(const sp_engine *engine, const char *name, sp_error *error)
{
    sp_stage *stage = sp_engine_stage(engine);

    if (stage)
        return sp_stage_set_active(stage, name, error);
    if (strcmp(name, sp_engine_base_name(engine)) == 0)
        return SP_OK;
    return sp_fail(error, SP_ERR_NOT_FOUND, NULL, name, -1,
                   "no adapter is loaded under the name \"%s\"", name);
}

sp_status sp_run_settings_open(const sp_run_settings *settings, int64_t kv_tokens_wanted,
                               sp_engine **out_engine, bool *out_usage, sp_error *error)
{
    sp_engine_options options;
    sp_engine_adapter *adapters;
    sp_module_set modules;
    sp_status status = check_usage(settings, error);

    *out_usage = true;
    if (status != SP_OK)
        return status;
    status = split_adapters(&settings->adapters, &adapters, error);
    if (status != SP_OK)
        return status;
    fill_options(settings, kv_tokens_wanted, &options);
    if (settings->lora_modules[0]) {
        options.lora_modules = settings->lora_modules;
        status = sp_module_set_parse(NULL, settings->lora_modules, &modules, error);
    }
    if (status != SP_OK)
        goto free_list;
    *out_usage = false;
    if (strcmp(settings->device, "cuda") == 0) {
        status = sp_fail(error, SP_ERR_NO_DEVICE, NULL, "device", -1,
                         "this build has no CUDA engine; use --device cpu");
        goto free_list;
    }
    status = sp_engine_open(&options, adapters, settings->adapters.n, out_engine, error);
    if (status == SP_OK && settings->active) {
        status = set_active(*out_engine, settings->active, error);
        if (status != SP_OK) {
            sp_engine_close(*out_engine);
            *out_engine = NULL;
        }
    }
free_list:
    free_adapters(adapters, settings->adapters.n);
    return status;
}
