/*
 * engine_adapters.c: the engine's adapters: the pool and the stage that fills it, the start-up
 * adapters, loads while it runs, and the gate through which the scheduler gets slots.
 */
#include "base/alloc.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/grow.h"
#include "base/integer.h"
#include "engine/engine_state.h"
#include "engine/option_rows.h"

#include <string.h>

/* ---- opening ------------------------------------------------------------------------------- */

static sp_adapter_options adapter_options(const sp_engine *engine)
{
    sp_adapter_options options;

    sp_adapter_options_default(&options, sizeof options);
    options.geometry = engine->model.geometry;
    options.rank_max =
        engine->options.max_lora_rank ? engine->options.max_lora_rank : SP_POOL_RANK_MAX;
    options.expert_rank_max = engine->options.max_lora_expert_rank;
    options.experts_off = !engine->options.experts;
    options.expert_layout = engine->options.expert_layout;
    options.pool_dtype = engine->options.precision;
    options.base_dir = engine->options.model_dir;
    options.allow_partial = engine->options.allow_partial;
    options.allow_no_effect = engine->options.allow_no_effect;
    options.allow_unknown_fields = engine->options.allow_unknown_fields;
    options.allow_base_changing_init = engine->options.allow_base_changing_init;
    return options;
}

static sp_status open_adapter(const sp_engine *engine, const sp_engine_adapter *wanted,
                              sp_adapter **out_adapter, sp_error *error)
{
    sp_adapter_options options = adapter_options(engine);
    sp_adapter *adapter;
    sp_status status;

    options.name = wanted->name;
    options.exec = engine->exec;
    status = sp_adapter_open(wanted->path, &options, &adapter, error);
    if (status != SP_OK)
        return status;
    status = sp_adapter_check_modules(adapter, sp_engine_modules(engine->model.geometry), error);
    if (status != SP_OK) {
        sp_adapter_release(adapter);
        return status;
    }
    *out_adapter = adapter;
    return SP_OK;
}

static sp_served_table served_table(const sp_weight *table)
{
    return (sp_served_table){
        .struct_bytes = sizeof(sp_served_table),
        .data = table->host,
        .dtype = table->type,
        .rows = table->rows,
        .hidden = table->columns,
    };
}

static sp_status create_layout(sp_engine *engine, sp_adapter *const *adapters, size_t n,
                               sp_error *error)
{
    const sp_served_table embed = served_table(&engine->model.embed);
    const sp_served_table head = served_table(&engine->model.head);
    sp_layout_options options;
    int32_t rank = 0;
    sp_status status;

    sp_layout_options_default(&options, sizeof options);
    for (size_t i = 0; i < n; i++) {
        if (!adapters[i])
            continue;
        options.modules |= sp_layout_pair_modules(adapters[i]);
        if (sp_adapter_rank_max(adapters[i]) > rank)
            rank = sp_adapter_rank_max(adapters[i]);
    }
    if (engine->options.lora_modules) {
        status = sp_module_set_parse(engine->model.geometry, engine->options.lora_modules,
                                     &options.modules, error);
        if (status != SP_OK)
            return status;
        options.modules &= sp_geometry_modules(engine->model.geometry);
        if (!options.modules)
            return sp_fail(error, SP_ERR_ARGUMENT, NULL, "lora-modules", -1,
                           "lora-modules names nothing that the base model has");
    }
    if (engine->options.max_lora_rank)
        rank = engine->options.max_lora_rank;
    options.geometry = engine->model.geometry;
    options.rank = rank ? rank : SP_POOL_RANK_DEFAULT;
    if (engine->options.experts && engine->model.shape.experts > 0)
        options.expert_rank = engine->options.max_lora_expert_rank;
    options.dtype = engine->options.precision;
    options.served_embed = &embed;
    options.served_head = &head;
    return sp_layout_create(&options, &engine->layout, error);
}

/* What no_ffn excludes: the FFN in every form but for the router, and the output of the linear
 * attention. */
static sp_module_set ffn_modules(const sp_geometry *geometry)
{
    sp_module_set routers = sp_geometry_kind_modules(geometry, SP_SITE_ROUTER), modules = 0;

    for (int32_t m = 0; m < sp_geometry_n_modules(geometry); m++) {
        const char *name = sp_geometry_module_name(geometry, m);

        if (strncmp(name, "mlp.", 4) == 0 || strcmp(name, "linear_attn.out_proj") == 0)
            modules |= (sp_module_set)1 << m;
    }
    return modules & ~routers;
}

int32_t sp_engine_expert_rows(const sp_engine *engine)
{
    int64_t tokens = min64(engine->options.expert_max_tokens, engine->options.step_rows);
    int64_t rows = tokens * max64(engine->model.shape.experts_per_token, 1);

    return (int32_t)min64(max64(rows, 1), SP_DELTA_EXPERT_ROWS_MAX);
}

/* On a GPU the rows of the logits have a plan of their own. */
static sp_status create_deltas(sp_engine *engine, sp_error *error)
{
    sp_delta_options options;
    sp_status status;

    sp_delta_options_default(&options, sizeof options);
    options.pool = engine->pool;
    options.exec = engine->exec;
    options.rows_max = engine->options.step_rows;
    options.cpu_isa = engine->kernels->level;
    options.no_apply = engine->options.no_apply;
    options.expert_rows_max = sp_engine_expert_rows(engine);
    if (engine->options.no_ffn)
        options.skip_modules = ffn_modules(engine->model.geometry);
    status = sp_delta_create(&options, &engine->delta, error);
    if (status != SP_OK || sp_device_get_kind(engine->device) == SP_DEVICE_CPU)
        return status;
    options.rows_max = SP_LOGIT_ROWS_MAX;
    options.expert_rows_max = 1; /* the head has none */
    return sp_delta_create(&options, &engine->head_delta, error);
}

/* The directories first, then what the options bring. Owned by the caller (sp_free). */
static sp_status list_sources(sp_engine *engine, sp_stage_source **out_sources, sp_error *error)
{
    const sp_engine_options *options = &engine->options;
    size_t n = options->n_sources > 0 ? (size_t)options->n_sources : 0;
    sp_stage_source *sources = sp_calloc(n + 1, sizeof *sources); /* never an empty block */
    sp_status status;

    if (!sources)
        return sp_fail_memory(error, (n + 1) * sizeof *sources, "the sources of adapters");
    engine->disk.struct_bytes = sizeof engine->disk;
    status = sp_disk_source_create(&engine->disk, error);
    sources[0] = engine->disk;
    for (size_t i = 0; i < n && status == SP_OK; i++) {
        sources[i + 1].struct_bytes = sizeof *sources;
        status = sp_struct_read_at(&sources[i + 1], sizeof *sources, options->sources, i,
                                   "sp_stage_source", error);
        sources[i + 1].struct_bytes = sizeof *sources;
    }
    if (status == SP_OK)
        *out_sources = sources;
    else
        sp_free(sources);
    return status;
}

/* Later loads are checked against the pool's rank and modules by packing, all else by the audit. */
static sp_status create_stage(sp_engine *engine, sp_error *error)
{
    sp_adapter_options audit = adapter_options(engine);
    sp_stage_source *sources = NULL;
    sp_stage_options options;
    sp_status status = list_sources(engine, &sources, error);

    if (status != SP_OK)
        return status;
    sp_stage_options_default(&options, sizeof options);
    options.pool = engine->pool;
    options.sources = sources;
    options.n_sources = 1 + engine->options.n_sources;
    options.audit = &audit;
    options.supported = sp_engine_modules(engine->model.geometry);
    options.host_bytes_max = engine->options.host_bytes_max;
    options.threads = engine->options.loader_threads;
    options.exec = engine->exec;
    options.base_name = engine->base_name;
    status = sp_stage_create(&options, &engine->stage, error);
    sp_free(sources);
    return status;
}

/* Replacing a version needs memory for both; where one cannot be measured, packing reports why. */
static size_t overlay_budget(const sp_engine *engine, sp_adapter *const *adapters, size_t n)
{
    size_t sum = 0, largest = 0;

    if (engine->options.overlay_bytes)
        return engine->options.overlay_bytes;
    for (size_t i = 0; i < n; i++) {
        size_t bytes = 0;

        if (!adapters[i] || sp_adapter_n_tables(adapters[i]) == 0 ||
            sp_layout_measure_overlay(engine->layout, adapters[i], &bytes, NULL) != SP_OK)
            continue;
        sum += bytes;
        largest = bytes > largest ? bytes : largest;
    }
    return sum + largest;
}

static size_t expert_budget(const sp_engine *engine, sp_adapter *const *adapters, size_t n)
{
    size_t sum = 0, largest = 0;

    if (engine->options.expert_bytes)
        return engine->options.expert_bytes;
    for (size_t i = 0; i < n; i++) {
        size_t bytes =
            adapters[i] ? sp_layout_expert_bytes(adapters[i], engine->options.precision) : 0;

        sum += bytes;
        largest = bytes > largest ? bytes : largest;
    }
    return sum + largest;
}

static sp_status create_pool(sp_engine *engine, const sp_startup *startup, sp_error *error)
{
    sp_pool_options options;
    sp_status status;

    sp_pool_options_default(&options, sizeof options);
    options.layout = engine->layout;
    options.device = engine->device;
    options.slots = engine->options.max_loras;
    options.overlay_bytes = startup->overlay_bytes;
    options.expert_bytes = startup->expert_bytes;
    status = sp_pool_create(&options, &engine->pool, error);
    if (status == SP_OK)
        status = create_stage(engine, error);
    if (status == SP_OK)
        status = create_deltas(engine, error);
    return status;
}

static sp_status check_adapter_names(const sp_engine *engine, const sp_engine_adapter *wanted,
                                     size_t n, sp_error *error)
{
    if (n > 0 && engine->options.max_loras == 0)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "max-loras", -1,
                       "%zu adapters need slots; raise max-loras above 0", n);
    for (size_t i = 0; i < n; i++) {
        sp_status status = sp_stage_name_check(wanted[i].name, engine->base_name, error);

        if (status != SP_OK)
            return status;
        for (size_t j = 0; j < i; j++)
            if (strcmp(wanted[i].name, wanted[j].name) == 0)
                return sp_fail(error, SP_ERR_INPUT, NULL, wanted[i].name, -1,
                               "the adapter name \"%s\" is given twice", wanted[i].name);
    }
    return SP_OK;
}

/* Where the host has a callback for refusals, they do not fail the opening. */
static sp_status refused(const sp_engine *engine, const char *name, sp_status status,
                         const sp_error *why, sp_error *error)
{
    if (engine->options.adapter_refused) {
        engine->options.adapter_refused(engine->options.adapter_refused_user, name, why);
        return SP_OK;
    }
    if (error)
        *error = *why;
    return status;
}

static sp_status add_adapter(sp_engine *engine, const sp_engine_adapter *wanted,
                             const sp_adapter *adapter, double seconds, sp_error *error)
{
    sp_stage_load_options options;
    sp_error why;
    sp_status status;

    sp_stage_load_options_default(&options, sizeof options);
    options.name = wanted->name;
    options.location = wanted->path;
    options.spent_seconds = seconds;
    status = sp_stage_add(engine->stage, &options, adapter, &why);
    return status == SP_OK ? SP_OK : refused(engine, wanted->name, status, &why, error);
}

static size_t factor_bytes(const sp_factor *factor)
{
    return (size_t)factor->rows * (size_t)factor->cols * sp_dtype_bytes(factor->dtype);
}

static size_t tensor_bytes(const sp_adapter *adapter)
{
    size_t sum = 0;

    for (size_t i = 0; i < sp_adapter_n_sites(adapter); i++) {
        const sp_adapter_site *site = sp_adapter_site_at(adapter, i);

        sum += factor_bytes(&site->a) + factor_bytes(&site->b);
    }
    for (size_t i = 0; i < sp_adapter_n_tables(adapter); i++) {
        const sp_adapter_table *table = sp_adapter_table_at(adapter, i);

        sum += table->full.data ? factor_bytes(&table->full) : 0;
        sum += table->trainable.data ? factor_bytes(&table->trainable) : 0;
    }
    return sum;
}

/* The tensors of the start's adapters stay until all are packed: no more of them than fit. */
static sp_status take_memory(sp_startup *startup, const sp_adapter *adapter, sp_error *error)
{
    size_t bytes = tensor_bytes(adapter);

    if (startup->free_bytes == SIZE_MAX)
        return SP_OK;
    if (bytes > startup->free_bytes)
        return sp_fail(error, SP_ERR_MEMORY, SP_CODE_MEMORY_SHORT, "adapter", -1,
                       "the adapters of the start: %zu MiB needed for \"%s\", %zu MiB free; start "
                       "with fewer and load the others later",
                       (bytes >> 20) + 1, sp_adapter_name(adapter), startup->free_bytes >> 20);
    startup->free_bytes -= bytes;
    return SP_OK;
}

/* All are opened before the first is packed: their needs determine the size of the pool. */
static sp_status open_startup(sp_engine *engine, sp_startup *startup, sp_error *error)
{
    sp_status status = SP_OK;

    for (size_t i = 0; i < startup->n && status == SP_OK; i++) {
        sp_error why;

        startup->seconds[i] = -sp_clock_seconds();
        status = open_adapter(engine, &startup->wanted[i], &startup->adapters[i], &why);
        startup->seconds[i] += sp_clock_seconds();
        if (status != SP_OK)
            status = refused(engine, startup->wanted[i].name, status, &why, error);
        else
            status = take_memory(startup, startup->adapters[i], error);
        if (engine->options.progress)
            engine->options.progress(engine->options.progress_user, "adapters", i + 1, startup->n);
    }
    if (status == SP_OK)
        status = create_layout(engine, startup->adapters, startup->n, error);
    if (status == SP_OK) {
        startup->overlay_bytes = overlay_budget(engine, startup->adapters, startup->n);
        startup->expert_bytes = expert_budget(engine, startup->adapters, startup->n);
    }
    return status;
}

sp_status sp_engine_read_adapters(sp_engine *engine, const sp_engine_adapter *wanted, size_t n,
                                  size_t free_bytes, sp_startup *out_startup, sp_error *error)
{
    sp_startup startup = {.wanted = wanted, .n = n, .free_bytes = free_bytes};
    sp_status status = check_adapter_names(engine, wanted, n, error);

    if (status != SP_OK)
        return status;
    *out_startup = (sp_startup){0};
    if (engine->options.max_loras == 0 || (n == 0 && !engine->options.adapter_loading))
        return SP_OK;
    startup.adapters = sp_calloc(n + 1, sizeof(sp_adapter *)); /* never an empty block */
    startup.seconds = sp_calloc(n + 1, sizeof *startup.seconds);
    if (startup.adapters && startup.seconds)
        status = open_startup(engine, &startup, error);
    else
        status = sp_fail_memory(error, n * sizeof(sp_adapter *), "the list of adapters");
    if (status == SP_OK)
        *out_startup = startup;
    else
        sp_startup_free(&startup);
    return status;
}

sp_status sp_engine_start_adapters(sp_engine *engine, const sp_startup *startup, sp_error *error)
{
    sp_status status;

    if (!engine->layout)
        return SP_OK;
    status = create_pool(engine, startup, error);
    for (size_t i = 0; i < startup->n && status == SP_OK; i++)
        if (startup->adapters[i])
            status = add_adapter(engine, &startup->wanted[i], startup->adapters[i],
                                 startup->seconds[i], error);
    return status;
}

void sp_startup_free(sp_startup *startup)
{
    for (size_t i = 0; startup->adapters && i < startup->n; i++)
        sp_adapter_release(startup->adapters[i]);
    sp_free(startup->seconds);
    sp_free(startup->adapters);
    *startup = (sp_startup){0};
}

void sp_engine_close_adapters(sp_engine *engine)
{
    sp_delta_destroy(engine->head_delta);
    sp_delta_destroy(engine->delta);
    sp_stage_destroy(engine->stage);
    sp_disk_source_destroy(&engine->disk);
    sp_pool_destroy(engine->pool);
    sp_layout_release(engine->layout);
}

/* ---- requests ------------------------------------------------------------------------------ */

sp_status sp_engine_hold(const sp_engine *engine, const char *adapter, sp_hold *out_hold,
                         sp_error *error)
{
    out_hold->struct_bytes = sizeof *out_hold;
    if (engine->stage)
        return sp_stage_hold(engine->stage, adapter ? SP_HOLD_NAMED : SP_HOLD_DEFAULT, adapter,
                             out_hold, error);
    if (adapter && strcmp(adapter, engine->base_name) != 0)
        return sp_fail(error, SP_ERR_NOT_FOUND, NULL, adapter, -1,
                       "no adapter is loaded under the name \"%s\"", adapter);
    *out_hold = (sp_hold){.struct_bytes = sizeof *out_hold, .slot = -1};
    return SP_OK;
}

static sp_status ask(void *user, sp_sequence *sequence, bool give_way, sp_error *error)
{
    sp_engine *engine = user;

    return sp_stage_ask(engine->stage, &sequence->hold, give_way, error);
}

static sp_status take(void *user, sp_sequence *sequence, sp_error *error)
{
    sp_engine *engine = user;

    return sp_stage_request(engine->stage, &sequence->hold, false, error);
}

static void yield(void *user, sp_sequence *sequence)
{
    sp_engine *engine = user;

    sp_stage_yield(engine->stage, &sequence->hold);
}

static bool can_yield(void *user, const sp_sequence *sequence)
{
    sp_engine *engine = user;

    return sp_stage_can_yield(engine->stage, &sequence->hold);
}

static uint64_t handovers(void *user)
{
    sp_engine *engine = user;
    sp_stage_stats stats = {.struct_bytes = sizeof stats};

    (void)sp_stage_get_stats(engine->stage, &stats, NULL);
    return stats.handovers;
}

sp_slot_gate sp_engine_gate(sp_engine *engine)
{
    if (!engine->stage)
        return (sp_slot_gate){0};
    return (sp_slot_gate){engine, ask, take, sp_engine_refused, yield, can_yield, handovers};
}

/* ---- while it runs ------------------------------------------------------------------------- */

sp_stage *sp_engine_stage(const sp_engine *engine)
{
    return engine ? engine->stage : NULL;
}

sp_status sp_engine_read_tensors(const sp_engine *engine, const char *name, const char *config,
                                 size_t config_bytes, const sp_tensor_view *views, size_t n_views,
                                 sp_adapter **out_adapter, sp_error *error)
{
    sp_adapter_options options;
    sp_served_table embed, head;
    sp_status status;

    if (!engine)
        return sp_fail_null(error, "engine");
    status = sp_stage_name_check(name, engine->base_name, error);
    if (status != SP_OK)
        return status;
    embed = served_table(&engine->model.embed);
    head = served_table(&engine->model.head);
    options = adapter_options(engine);
    options.base_dir = NULL; /* the caller's string, which may have been freed */
    options.served_embed = &embed;
    options.served_head = &head;
    options.name = name;
    return sp_adapter_from_tensors(config, config_bytes, views, n_views, &options, out_adapter,
                                   error);
}

/* Every place of the layers that an adapter could adapt; of the experts as many as a token is
 * routed to. */
double sp_engine_row_macs(const sp_engine *engine)
{
    const sp_geometry *geometry = engine->model.geometry;
    const sp_model_shape *shape = &engine->model.shape;
    double of_all = 0, of_experts = 0;

    for (int32_t i = 0; i < sp_geometry_n_sites(geometry); i++) {
        sp_site site = {.struct_bytes = sizeof site};

        if (sp_geometry_site_at(geometry, i, &site, NULL) != SP_OK || site.layer < 0)
            continue;
        if (site.kind == SP_SITE_EXPERT)
            of_experts += (double)site.k_in * site.n_out;
        else
            of_all += (double)site.k_in * site.n_out;
    }
    return shape->experts > 0 ? of_all + of_experts * shape->experts_per_token / shape->experts
                              : of_all;
}

sp_status sp_engine_request_adapter(const sp_engine *engine, int64_t id, const char **out_name,
                                    sp_digest *out_digest, sp_error *error)
{
    if (!engine)
        return sp_fail_null(error, "engine");
    for (int32_t i = 0; i < engine->n_sequences; i++) {
        const sp_stage_version *version = engine->sequences[i]->hold.version;

        if (engine->sequences[i]->id != id)
            continue;
        if (out_name)
            *out_name = version ? sp_stage_version_name(version) : NULL;
        if (out_digest)
            *out_digest = version ? *sp_stage_version_digest(version) : (sp_digest){{0}};
        return SP_OK;
    }
    return sp_fail(error, SP_ERR_NOT_FOUND, NULL, "id", id, "no request %lld waits or runs",
                   (long long)id);
}
