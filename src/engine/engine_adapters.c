/*
 * engine_adapters.c: the engine's adapters: the pool and the stage that fills it, the start-up
 * adapters, loads while it runs, and the gate through which the scheduler gets slots.
 */
#include "base/alloc.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/grow.h"
#include "engine/engine_state.h"

#include <string.h>

/* What no_ffn leaves out: the FFN in every form, and the output of the linear attention. */
#define FFN_MODULES                                                                      \
    "linear_attn.out_proj,mlp.gate_proj,mlp.up_proj,mlp.down_proj,"                      \
    "mlp.shared_expert.gate_proj,mlp.shared_expert.up_proj,mlp.shared_expert.down_proj," \
    "mlp.shared_expert_gate"
#define DEFAULT_POOL_RANK 64

/* ---- opening ------------------------------------------------------------------------------- */

static sp_adapter_options adapter_options(const sp_engine *engine)
{
    sp_adapter_options options;

    sp_adapter_options_default(&options, sizeof options);
    options.geometry = engine->model.geometry;
    options.rank_max =
        engine->options.max_lora_rank ? engine->options.max_lora_rank : SP_POOL_RANK_MAX;
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
        options.modules |= sp_adapter_pair_modules(adapters[i]);
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
    options.rank = rank ? rank : DEFAULT_POOL_RANK;
    options.dtype = engine->options.precision;
    options.served_embed = &embed;
    options.served_head = &head;
    return sp_layout_create(&options, &engine->layout, error);
}

static sp_status create_delta(sp_engine *engine, sp_error *error)
{
    sp_delta_options options;
    sp_status status = SP_OK;

    sp_delta_options_default(&options, sizeof options);
    options.pool = engine->pool;
    options.exec = engine->exec;
    options.rows_max = engine->options.step_rows;
    options.cpu_isa = engine->kernels->level;
    options.no_apply = engine->options.no_apply;
    if (engine->options.no_ffn)
        status =
            sp_module_set_parse(engine->model.geometry, FFN_MODULES, &options.skip_modules, error);
    if (status != SP_OK)
        return status;
    return sp_delta_create(&options, &engine->delta, error);
}

/* Later loads are held to the pool's rank and modules by packing, to all else by the audit. */
static sp_status create_stage(sp_engine *engine, sp_error *error)
{
    sp_adapter_options audit = adapter_options(engine);
    sp_stage_options options;
    sp_status status;

    engine->disk.struct_bytes = sizeof engine->disk;
    status = sp_disk_source_create(&engine->disk, error);
    if (status != SP_OK)
        return status;
    sp_stage_options_default(&options, sizeof options);
    options.pool = engine->pool;
    options.sources = &engine->disk;
    options.n_sources = 1;
    options.audit = &audit;
    options.supported = sp_engine_modules(engine->model.geometry);
    options.host_bytes_max = engine->options.host_bytes_max;
    options.threads = engine->options.loader_threads;
    options.exec = engine->exec;
    return sp_stage_create(&options, &engine->stage, error);
}

/* Replacing a version takes the room of both; where one cannot be measured, packing says why. */
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

static sp_status create_pool(sp_engine *engine, size_t overlay_bytes, sp_error *error)
{
    sp_pool_options options;
    sp_status status;

    sp_pool_options_default(&options, sizeof options);
    options.layout = engine->layout;
    options.device = engine->device;
    options.slots = engine->options.max_loras;
    options.overlay_bytes = overlay_bytes;
    status = sp_pool_create(&options, &engine->pool, error);
    if (status == SP_OK)
        status = create_stage(engine, error);
    if (status == SP_OK)
        status = create_delta(engine, error);
    return status;
}

static sp_status check_adapter_names(const sp_engine *engine, const sp_engine_adapter *wanted,
                                     size_t n, sp_error *error)
{
    if (n > 0 && engine->options.max_loras == 0)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "max-loras", -1,
                       "%zu adapters need slots; raise max-loras above 0", n);
    for (size_t i = 0; i < n; i++) {
        sp_status status = sp_engine_name_check(wanted[i].name, engine->base_name, error);

        if (status != SP_OK)
            return status;
        for (size_t j = 0; j < i; j++)
            if (strcmp(wanted[i].name, wanted[j].name) == 0)
                return sp_fail(error, SP_ERR_INPUT, NULL, wanted[i].name, -1,
                               "the adapter name \"%s\" is given twice", wanted[i].name);
    }
    return SP_OK;
}

/* Where the host wants to hear of refusals, they do not fail the opening. */
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

/* All are opened before the first is packed: the pool is as large as they need. */
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
    }
    if (status == SP_OK)
        status = create_layout(engine, startup->adapters, startup->n, error);
    if (status == SP_OK)
        startup->overlay_bytes = overlay_budget(engine, startup->adapters, startup->n);
    return status;
}

sp_status sp_engine_read_adapters(sp_engine *engine, const sp_engine_adapter *wanted, size_t n,
                                  sp_startup *out_startup, sp_error *error)
{
    sp_startup startup = {.wanted = wanted, .n = n};
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
    status = create_pool(engine, startup->overlay_bytes, error);
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
    sp_route_kind kind = SP_ROUTE_NAMED;

    if (!adapter)
        kind = SP_ROUTE_DEFAULT;
    else if (strcmp(adapter, engine->base_name) == 0)
        kind = SP_ROUTE_BASE;
    out_hold->struct_bytes = sizeof *out_hold;
    if (engine->stage)
        return sp_stage_hold(engine->stage, kind, adapter, out_hold, error);
    if (kind == SP_ROUTE_NAMED)
        return sp_fail(error, SP_ERR_NOT_FOUND, NULL, adapter, -1,
                       "no adapter is loaded under the name \"%s\"", adapter);
    *out_hold = (sp_hold){.struct_bytes = sizeof *out_hold, .slot = -1};
    return SP_OK;
}

static sp_status ask(void *user, sp_sequence *sequence, bool give_way)
{
    sp_engine *engine = user;

    return sp_stage_ask(engine->stage, &sequence->hold, give_way, &engine->gate_error);
}

static sp_status take(void *user, sp_sequence *sequence)
{
    sp_engine *engine = user;

    return sp_stage_request(engine->stage, &sequence->hold, false, &engine->gate_error);
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

sp_adapter_gate sp_engine_gate(sp_engine *engine)
{
    if (!engine->stage)
        return (sp_adapter_gate){0};
    return (sp_adapter_gate){engine, ask, take, yield, can_yield, handovers};
}

/* ---- while it runs ------------------------------------------------------------------------- */

static sp_status no_slots(const sp_engine *engine, sp_error *error)
{
    if (engine->stage)
        return SP_OK;
    return sp_fail(error, SP_ERR_UNSUPPORTED, NULL, "max-loras", -1,
                   "the engine was opened without adapter slots");
}

static sp_status no_adapter(const char *name, sp_error *error)
{
    return sp_fail(error, SP_ERR_NOT_FOUND, NULL, name, -1,
                   "no adapter is loaded under the name \"%s\"", name);
}

void sp_engine_load_default(sp_engine_load *out_load, size_t struct_bytes)
{
    const sp_engine_load defaults = {.struct_bytes = sizeof defaults};

    sp_struct_default(out_load, struct_bytes, &defaults, sizeof defaults);
}

/* The caller's load in today's size, checked, as the stage's options. */
static sp_status read_load(const sp_engine *engine, const sp_engine_load *load,
                           sp_stage_load_options *out_options, sp_error *error)
{
    sp_engine_load own;
    sp_status status;

    sp_engine_load_default(&own, sizeof own);
    status = sp_struct_read(&own, sizeof own, load, "sp_engine_load", error);
    if (status == SP_OK)
        status = no_slots(engine, error);
    if (status == SP_OK)
        status = sp_engine_name_check(own.name, engine->base_name, error);
    if (status != SP_OK)
        return status;
    sp_stage_load_options_default(out_options, sizeof *out_options);
    out_options->name = own.name;
    out_options->location = own.path;
    out_options->replace = own.replace;
    out_options->expected_generation = own.expected_generation;
    out_options->pinned = own.pinned;
    return SP_OK;
}

sp_status sp_engine_load_adapter(sp_engine *engine, const sp_engine_load *load, int64_t *out_ticket,
                                 sp_error *error)
{
    sp_stage_load_options options;
    sp_status status;

    if (!engine || !out_ticket)
        return sp_fail_null(error, engine ? "out_ticket" : "engine");
    status = read_load(engine, load, &options, error);
    if (status == SP_OK && !options.location)
        status = sp_fail_null(error, "path");
    if (status != SP_OK)
        return status;
    return sp_stage_load(engine->stage, &options, out_ticket, error);
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
    status = sp_engine_name_check(name, engine->base_name, error);
    if (status != SP_OK)
        return status;
    embed = served_table(&engine->model.embed);
    head = served_table(&engine->model.head);
    options = adapter_options(engine);
    options.base_dir = NULL; /* the caller's string, which may be gone */
    options.served_embed = &embed;
    options.served_head = &head;
    options.name = name;
    return sp_adapter_from_tensors(config, config_bytes, views, n_views, &options, out_adapter,
                                   error);
}

sp_status sp_engine_put_adapter(sp_engine *engine, const sp_engine_load *load, sp_adapter *adapter,
                                int64_t *out_ticket, sp_error *error)
{
    sp_stage_load_options options;
    sp_status status;

    if (!engine)
        return sp_fail_null(error, "engine");
    status = read_load(engine, load, &options, error);
    return status == SP_OK ? sp_stage_put(engine->stage, &options, adapter, out_ticket, error)
                           : status;
}

sp_status sp_engine_load_result(sp_engine *engine, int64_t ticket, uint64_t *out_generation,
                                sp_error *error)
{
    sp_status status;

    if (!engine)
        return sp_fail_null(error, "engine");
    status = no_slots(engine, error);
    return status == SP_OK ? sp_stage_result(engine->stage, ticket, out_generation, error) : status;
}

void sp_engine_load_forget(sp_engine *engine, int64_t ticket)
{
    if (engine->stage)
        sp_stage_forget(engine->stage, ticket);
}

sp_status sp_engine_unload_adapter(sp_engine *engine, const char *name, sp_error *error)
{
    if (!engine || !name)
        return sp_fail_null(error, engine ? "name" : "engine");
    if (!engine->stage)
        return no_adapter(name, error);
    return sp_stage_unload(engine->stage, name, error);
}

sp_status sp_engine_pin_adapter(sp_engine *engine, const char *name, bool pinned, sp_error *error)
{
    if (!engine || !name)
        return sp_fail_null(error, engine ? "name" : "engine");
    if (!engine->stage)
        return no_adapter(name, error);
    return sp_stage_set_pinned(engine->stage, name, pinned, error);
}

sp_status sp_engine_set_active(sp_engine *engine, const char *name, sp_error *error)
{
    bool base;

    if (!engine)
        return sp_fail_null(error, "engine");
    base = !name || strcmp(name, engine->base_name) == 0;
    if (!engine->stage)
        return base ? SP_OK : no_adapter(name, error);
    return sp_stage_set_active(engine->stage, base ? NULL : name, error);
}

sp_status sp_engine_poll(sp_engine *engine, int32_t timeout_ms, sp_error *error)
{
    sp_status status;

    if (!engine)
        return sp_fail_null(error, "engine");
    if (!engine->stage)
        return SP_AGAIN;
    status = sp_stage_poll(engine->stage);
    if (status != SP_PENDING)
        return status;
    sp_stage_wait(engine->stage, timeout_ms);
    return sp_stage_poll(engine->stage);
}

/* ---- what is loaded ------------------------------------------------------------------------ */

const char *sp_adapter_state_name(sp_adapter_state state)
{
    return sp_version_state_name((sp_version_state)state);
}

_Static_assert((int)SP_ADAPTER_DRAINING == (int)SP_VERSION_DRAINING &&
                   (int)SP_ADAPTER_READY == (int)SP_VERSION_READY,
               "the engine's states are the stage's");

/* Multiply-adds of the base's linear layers for one row. */
static double base_row_macs(const sp_model_shape *shape)
{
    double q = (double)shape->q_heads * shape->head_dim;
    double kv = (double)shape->kv_heads * shape->head_dim;

    return (double)shape->layers * shape->hidden * (2 * q + 2 * kv + 3.0 * shape->intermediate);
}

/* Requests in one state that hold the version: a generation is never given twice. */
static int32_t count_holders(const sp_engine *engine, const sp_version_info *version,
                             sp_sequence_state state)
{
    int32_t n = 0;

    for (int32_t i = 0; i < engine->n_sequences && version->references > 0; i++) {
        const sp_sequence *sequence = engine->sequences[i];

        if (sequence->state == state && sequence->hold.version &&
            sp_version_generation(sequence->hold.version) == version->generation)
            n++;
    }
    return n;
}

static sp_engine_adapter_info info_of(const sp_engine *engine, const sp_version_info *version)
{
    return (sp_engine_adapter_info){
        .name = version->name,
        .path = version->location,
        .state = (sp_adapter_state)version->state,
        .slot = version->slot,
        .rank = version->facts->rank,
        .sites = version->facts->sites,
        .file_bytes = version->facts->file_bytes,
        .slot_bytes = sp_layout_slot_bytes(engine->layout),
        .host_bytes = version->image_bytes,
        .digest = version->digest,
        .generation = version->generation,
        .id_hash = version->id_hash,
        .pinned = version->pinned,
        .active = version->active,
        .references = version->references,
        .running = count_holders(engine, version, SP_SEQUENCE_RUNNING),
        .waiting = count_holders(engine, version, SP_SEQUENCE_WAITING),
        .last_use = version->last_use,
        .rows = version->uses,
        .load_seconds = version->load_seconds,
        .receipt = version->facts->receipt,
        .flops_ratio = version->facts->row_macs / base_row_macs(&engine->model.shape),
    };
}

size_t sp_engine_n_adapters(const sp_engine *engine)
{
    return engine->stage ? sp_stage_n_versions(engine->stage) : 0;
}

static sp_status write_info(const sp_engine *engine, const sp_version_info *version,
                            sp_engine_adapter_info *out_info, sp_error *error)
{
    const sp_engine_adapter_info info = info_of(engine, version);

    return sp_struct_write(out_info, &info, sizeof info, "sp_engine_adapter_info", error);
}

sp_status sp_engine_adapter_at(const sp_engine *engine, size_t index,
                               sp_engine_adapter_info *out_info, sp_error *error)
{
    sp_version_info version = {.struct_bytes = sizeof version};

    if (!engine)
        return sp_fail_null(error, "engine");
    if (index >= sp_engine_n_adapters(engine))
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "index", (int64_t)index,
                       "there is no adapter %zu; there are %zu", index,
                       sp_engine_n_adapters(engine));
    (void)sp_stage_version_at(engine->stage, index, &version, NULL);
    return write_info(engine, &version, out_info, error);
}

sp_status sp_engine_find_adapter(const sp_engine *engine, const char *name,
                                 sp_engine_adapter_info *out_info, sp_error *error)
{
    sp_version_info version = {.struct_bytes = sizeof version};

    if (!engine || !name)
        return sp_fail_null(error, engine ? "name" : "engine");
    if (!engine->stage || sp_stage_find(engine->stage, name, &version, NULL) != SP_OK)
        return no_adapter(name, error);
    return write_info(engine, &version, out_info, error);
}

sp_status sp_engine_request_digest(const sp_engine *engine, int64_t id, sp_digest *out_digest,
                                   sp_error *error)
{
    if (!engine || !out_digest)
        return sp_fail_null(error, engine ? "out_digest" : "engine");
    for (int32_t i = 0; i < engine->n_sequences; i++) {
        const sp_version *version = engine->sequences[i]->hold.version;

        if (engine->sequences[i]->id != id)
            continue;
        *out_digest = version ? *sp_version_digest(version) : (sp_digest){{0}};
        return SP_OK;
    }
    return sp_fail(error, SP_ERR_NOT_FOUND, NULL, "id", id, "no request %lld waits or runs",
                   (long long)id);
}
