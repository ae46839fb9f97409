#include "cli/run_settings.h"

#include "base/alloc.h"
#include "base/error.h"

#include <stddef.h>
#include <string.h>

#define FIELD(member) offsetof(sp_run_settings, member)

/* A shared setting that is no row of the engine's table. */
typedef struct shared_row {
    unsigned uses;
    sp_setting setting;
} shared_row;

#define ENGINE  SP_OPTION_OF_ENGINE
#define ADAPTER SP_OPTION_OF_ADAPTER
#define KERNELS SP_OPTION_OF_KERNELS

static const shared_row shared_rows[] = {
    {ENGINE | ADAPTER,
     {"model", SP_SETTING_STRING, FIELD(model), NULL, 0, 0, NULL, "DIR",
      "the base model's directory", false}},
    {ENGINE,
     {"adapter", SP_SETTING_LIST, FIELD(adapters), NULL, 0, 0, NULL, "NAME=DIR",
      "an adapter to load under a name; may be repeated", true}},
    {ENGINE,
     {"device", SP_SETTING_CHOICE, FIELD(device), "auto", 0, 0, "auto|cpu|cuda", NULL,
      "where to run; auto: on a GPU if one can be used", false}},
    {ENGINE,
     {"base-gemm", SP_SETTING_CHOICE, FIELD(base_gemm), "invariant", 0, 0, "invariant|free", NULL,
      "on a GPU; free: the base's products may depend on the number of rows", false}},
    {ENGINE | KERNELS,
     {"cpu-isa", SP_SETTING_CHOICE, FIELD(cpu_isa), "auto", 0, 0, "auto|scalar|avx2|avx512|amx",
      NULL, "highest CPU instruction set to use", false}},
    {ENGINE | ADAPTER,
     {"precision", SP_SETTING_CHOICE, FIELD(precision), "bf16", 0, 0, "bf16|f32", NULL,
      "bf16 to serve, f32 to check", false}},
    {ENGINE,
     {"lora-modules", SP_SETTING_STRING, FIELD(lora_modules), "", 0, 0, NULL, "LIST",
      "modules that a slot holds (q_proj,up_proj,...); empty: those of the adapters", false}},
    {ENGINE | ADAPTER,
     {"expert-layout", SP_SETTING_CHOICE, FIELD(expert_layout), "auto", 0, 0, "auto|linear|swapped",
      NULL, "how fused expert pairs are read where neither config nor shapes tell", false}},
    {ENGINE,
     {"active", SP_SETTING_STRING, FIELD(active), NULL, 0, 0, NULL, "NAME",
      "the adapter of requests that name none; default: the base", false}},
    {ENGINE,
     {"host-cache-mib", SP_SETTING_INT, FIELD(host_cache_mib), "0", 0, 1 << 24, NULL, "N",
      "memory for packed adapters outside the slots; 0: half of what everything else leaves",
      false}},
    {ENGINE,
     {"draft-model", SP_SETTING_STRING, FIELD(draft_model), NULL, 0, 0, NULL, "DIR",
      "a small model of the same tokenizer that drafts tokens (see speculative); changes no result",
      false}},
    {ENGINE,
     {"served-model-name", SP_SETTING_STRING, FIELD(served_name), NULL, 0, 0, NULL, "NAME",
      "the base's name; default: its folder's", false}},
    {SP_SETTING_OF_OUTPUT,
     {"json", SP_SETTING_BOOL, FIELD(json), NULL, 0, 0, NULL, NULL, "JSON on standard output",
      true}},
};
#define N_SHARED_ROWS (sizeof shared_rows / sizeof *shared_rows)

static sp_field_flag_set option_flag_set(unsigned uses)
{
    return (sp_field_flag_set){.part = sp_option_part(NULL), .forms = uses, .has_variables = true};
}

sp_setting *sp_run_settings_rows(sp_run_settings *run, unsigned uses, const sp_setting *own,
                                 size_t n_own, size_t *out_n)
{
    const sp_field_flag_set set = option_flag_set(uses);
    sp_setting *rows = sp_calloc(N_SHARED_ROWS + SP_FIELD_FLAGS_MAX + n_own, sizeof *rows);
    size_t n = 0;

    if (!rows)
        return NULL;
    for (size_t i = 0; i < N_SHARED_ROWS; i++)
        if ((shared_rows[i].uses & uses) != 0)
            rows[n++] = shared_rows[i].setting;
    n += sp_field_flags_rows(&run->flags, &set, FIELD(flags), rows + n);
    if (n_own > 0)
        memcpy(rows + n, own, n_own * sizeof *own);
    *out_n = n + n_own;
    return rows;
}

sp_status sp_run_settings_parse(sp_run_settings *run, unsigned uses, const sp_setting *rows,
                                size_t n_rows, int argc, char **argv,
                                sp_setting_list *out_positional, sp_error *error)
{
    const sp_field_flag_set set = option_flag_set(uses);
    sp_status status = sp_settings_parse(rows, n_rows, argc, argv, run, out_positional, error);

    if (status != SP_OK)
        return status;
    sp_engine_options_default(&run->options, sizeof run->options);
    status = sp_field_flags_apply(&run->flags, &set, &run->options, error);
    if (status != SP_OK)
        sp_settings_free_lists(rows, n_rows, run, out_positional);
    return status;
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

sp_expert_layout sp_run_settings_expert_layout(const sp_run_settings *settings)
{
    if (strcmp(settings->expert_layout, "linear") == 0)
        return SP_EXPERT_LAYOUT_LINEAR;
    return strcmp(settings->expert_layout, "swapped") == 0 ? SP_EXPERT_LAYOUT_SWAPPED
                                                           : SP_EXPERT_LAYOUT_AUTO;
}

static void fill_options(const sp_run_settings *settings, int64_t kv_tokens_wanted,
                         sp_engine_options *options)
{
    *options = settings->options;
    options->model_dir = settings->model;
    options->served_name = settings->served_name;
    options->draft_model = settings->draft_model;
    options->precision = strcmp(settings->precision, "f32") == 0 ? SP_DTYPE_F32 : SP_DTYPE_BF16;
    options->cpu_isa = settings->cpu_isa;
    options->device = settings->device;
    options->expert_layout = sp_run_settings_expert_layout(settings);
    options->base_gemm_free = strcmp(settings->base_gemm, "free") == 0;
    options->host_bytes_max = (size_t)settings->host_cache_mib << 20;
    if (options->kv_tokens == 0)
        options->kv_tokens = kv_tokens_wanted;
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
