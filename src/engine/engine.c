#include "base/alloc.h"
#include "base/clock.h"
#include "base/error.h"
#include "engine/engine_state.h"

#include <string.h>

#define DEFAULT_POOL_RANK 64
#define ADAPTER_NAME_MAX  255
#define TOKENIZER_FILE    "tokenizer.json"
#define DEFAULT_KV_TOKENS 65536
#define DENSE_LINEAR_MODULES                                                              \
    ((1u << SP_MODULE_Q_PROJ) | (1u << SP_MODULE_K_PROJ) | (1u << SP_MODULE_V_PROJ) |     \
     (1u << SP_MODULE_O_PROJ) | (1u << SP_MODULE_GATE_PROJ) | (1u << SP_MODULE_UP_PROJ) | \
     (1u << SP_MODULE_DOWN_PROJ))

void sp_engine_options_default(sp_engine_options *out_options)
{
    *out_options = (sp_engine_options){
        .struct_bytes = sizeof *out_options,
        .precision = SP_DTYPE_BF16,
        .max_loras = 8,
        .max_running = 64,
        .kv_tokens = DEFAULT_KV_TOKENS,
        .page_tokens = 16,
        .step_rows = 256,
    };
}

sp_module_set sp_engine_modules(sp_family family)
{
    return family == SP_FAMILY_QWEN3 ? DENSE_LINEAR_MODULES : 0;
}

/* ---- names --------------------------------------------------------------------------------- */

static sp_status bad_name(sp_error *error, const char *name, const char *why)
{
    return sp_fail(error, SP_ERR_INPUT, NULL, name, -1, "the adapter name \"%s\" %s", name, why);
}

sp_status sp_engine_name_check(const char *name, const char *base_name, sp_error *error)
{
    size_t bytes = strlen(name);

    if (bytes == 0)
        return bad_name(error, name, "is empty");
    if (bytes > ADAPTER_NAME_MAX)
        return bad_name(error, name, "is longer than 255 bytes");
    if (!sp_utf8_valid(name, bytes))
        return bad_name(error, name, "is not UTF-8");
    for (size_t i = 0; i < bytes; i++)
        if ((unsigned char)name[i] < 0x20 || name[i] == 0x7f)
            return bad_name(error, name, "holds a control character");
    if (strchr(name, ':'))
        return bad_name(error, name, "holds a ':'");
    if (strcmp(name, ".") == 0 || strcmp(name, "..") == 0)
        return bad_name(error, name, "is a folder");
    if (name[0] == ' ' || name[bytes - 1] == ' ')
        return bad_name(error, name, "begins or ends with a blank");
    if (base_name && strcmp(name, base_name) == 0)
        return bad_name(error, name, "is the base model's own name");
    return SP_OK;
}

/* ---- options ------------------------------------------------------------------------------- */

static sp_status bad_option(sp_error *error, const char *flag, const char *want)
{
    return sp_fail(error, SP_ERR_ARGUMENT, NULL, flag, -1, "--%s must be %s", flag, want);
}

static sp_status check_options(const sp_engine_options *options, sp_error *error)
{
    int32_t page = options->page_tokens;

    if (!options->model_dir)
        return bad_option(error, "model", "given");
    if (options->precision != SP_DTYPE_BF16 && options->precision != SP_DTYPE_F32)
        return bad_option(error, "precision", "bf16 or f32");
    if (options->max_loras < 0 || options->max_loras > 4096)
        return bad_option(error, "max-loras", "from 0 to 4096");
    if (options->max_lora_rank < 0 || options->max_lora_rank > SP_POOL_RANK_MAX)
        return bad_option(error, "max-lora-rank", "from 0 to 4096");
    if (page < 1 || page > SP_ATTENTION_BLOCK || (page & (page - 1)) != 0)
        return bad_option(error, "page-tokens", "1, 2, 4, 8, 16 or 32");
    if (options->max_running < 1 || options->max_running > 4096)
        return bad_option(error, "max-running", "from 1 to 4096");
    if (options->step_rows < 1 || options->step_rows > 65536)
        return bad_option(error, "step-rows", "from 1 to 65536");
    if (options->prefill_chunk < 0 || options->prefill_chunk > 65536)
        return bad_option(error, "prefill-chunk", "from 0 to 65536");
    if (options->max_context < 0)
        return bad_option(error, "max-context", "0 or more");
    if (options->kv_tokens < 1 || options->kv_tokens > (int64_t)INT32_MAX / 2)
        return bad_option(error, "kv-tokens", "from 1 to 1073741823");
    return SP_OK;
}

/* ---- opening, part by part ----------------------------------------------------------------- */

static sp_status open_host(sp_engine *engine, sp_error *error)
{
    sp_exec_options exec_options;
    sp_status status = sp_kernels_get(engine->options.cpu_isa, &engine->kernels, error);

    if (status != SP_OK)
        return status;
    sp_exec_options_default(&exec_options);
    exec_options.threads = engine->options.threads;
    status = sp_exec_create(&exec_options, &engine->exec);
    if (status != SP_OK)
        return sp_fail(error, status, NULL, "threads", -1, "cannot start %d threads: %s",
                       engine->options.threads, sp_status_text(status));
    status = sp_device_open_cpu(&engine->device);
    if (status != SP_OK)
        return sp_fail(error, status, NULL, NULL, -1, "cannot open the CPU as a device");
    return SP_OK;
}

static sp_status open_tokenizer(sp_engine *engine, sp_error *error)
{
    char *path = sp_path_join(engine->options.model_dir, TOKENIZER_FILE);
    sp_status status = SP_OK;

    if (!path)
        return sp_fail_memory(error, sizeof TOKENIZER_FILE, "a path");
    if (sp_path_exists(path)) {
        status = sp_tokenizer_open(engine->options.model_dir, &engine->tokenizer, error);
        if (status == SP_OK && sp_tokenizer_n_ids(engine->tokenizer) > engine->model.shape.vocab)
            status = sp_fail(error, SP_ERR_MISMATCH, NULL, "vocab_size", -1,
                             "%s has %d ids, but config.json's vocab_size is %d", path,
                             sp_tokenizer_n_ids(engine->tokenizer), engine->model.shape.vocab);
    }
    sp_free(path);
    return status;
}

static sp_status open_model(sp_engine *engine, sp_error *error)
{
    const sp_model_shape *shape = &engine->model.shape;
    sp_status status = sp_model_open(engine->options.model_dir, &engine->model, error);

    if (status != SP_OK)
        return status;
    engine->base_name =
        sp_strdup(engine->options.served_name ? engine->options.served_name : engine->model.name);
    if (!engine->base_name)
        return sp_fail_memory(error, 1, "the model's name");
    if (engine->options.max_context > shape->max_positions)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "max-context", -1,
                       "--max-context %d is beyond the model's %d positions",
                       engine->options.max_context, shape->max_positions);
    engine->max_context =
        engine->options.max_context ? engine->options.max_context : shape->max_positions;
    if (sp_rope_create(shape->rope_theta, shape->head_dim / 2, engine->max_context,
                       &engine->rope) != SP_OK)
        return sp_fail(error, SP_ERR_MEMORY, NULL, "max-context", -1,
                       "out of memory for the rotary tables of %d positions; lower --max-context",
                       engine->max_context);
    return open_tokenizer(engine, error);
}

/* ---- adapters ------------------------------------------------------------------------------ */

static sp_status refuse_unsupported(const sp_adapter *adapter, const char *name,
                                    sp_module_set missing, sp_error *error)
{
    for (int32_t m = 0; m < SP_MODULE_COUNT; m++)
        if (missing & (1u << m))
            return sp_fail(error, SP_ERR_UNSUPPORTED, "engine-unsupported",
                           sp_module_name((sp_module)m), -1,
                           "adapter %s adapts %s, which this build's engine cannot apply yet", name,
                           sp_module_name((sp_module)m));
    (void)adapter;
    return sp_fail(error, SP_ERR_UNSUPPORTED, "engine-unsupported", name, -1,
                   "adapter %s replaces whole rows of a table, which this build's engine cannot "
                   "apply yet",
                   name);
}

static sp_status open_adapter(const sp_engine *engine, const sp_engine_adapter *wanted,
                              sp_adapter **out_adapter, sp_error *error)
{
    sp_module_set supported = sp_engine_modules(engine->model.shape.family);
    sp_adapter_options options;
    sp_adapter *adapter;
    sp_module_set missing;
    sp_status status;

    sp_adapter_options_default(&options);
    options.geometry = engine->model.geometry;
    options.name = wanted->name;
    options.rank_max = engine->options.max_lora_rank;
    options.pool_dtype = engine->options.precision;
    options.base_dir = engine->options.model_dir;
    options.allow_partial = engine->options.allow_partial;
    options.allow_no_effect = engine->options.allow_no_effect;
    options.allow_unknown_fields = engine->options.allow_unknown_fields;
    options.allow_base_changing_init = engine->options.allow_base_changing_init;
    status = sp_adapter_open(wanted->path, &options, &adapter, error);
    if (status != SP_OK)
        return status;
    missing = sp_adapter_modules(adapter) & ~supported;
    if (missing || sp_adapter_n_tables(adapter) > 0) {
        status = refuse_unsupported(adapter, wanted->name, missing, error);
        sp_adapter_release(adapter);
        return status;
    }
    *out_adapter = adapter;
    return SP_OK;
}

static size_t stored_bytes(const sp_adapter *adapter)
{
    size_t bytes = 0;

    for (size_t i = 0; i < sp_adapter_n_sites(adapter); i++) {
        const sp_adapter_site *site = sp_adapter_site_at(adapter, i);

        bytes += (size_t)site->a.rows * (size_t)site->a.cols * sp_dtype_bytes(site->a.dtype);
        bytes += (size_t)site->b.rows * (size_t)site->b.cols * sp_dtype_bytes(site->b.dtype);
    }
    return bytes;
}

/* Multiply-adds of the adapter's sites for one row, over those of the base's linear layers. */
static double flops_ratio(const sp_model_shape *shape, const sp_adapter *adapter)
{
    double hidden = shape->hidden;
    double q = (double)shape->q_heads * shape->head_dim;
    double kv = (double)shape->kv_heads * shape->head_dim;
    double base = shape->layers * hidden * (2 * q + 2 * kv + 3.0 * shape->intermediate);
    double added = 0;

    for (size_t i = 0; i < sp_adapter_n_sites(adapter); i++) {
        const sp_adapter_site *site = sp_adapter_site_at(adapter, i);

        added += (double)site->rank * ((double)site->a.cols + (double)site->b.rows);
    }
    return added / base;
}

/* Packs one adapter into a slot, where it stays: it is pinned by a reference of the engine. */
static sp_status make_resident(sp_engine *engine, const sp_adapter *adapter, sp_resident *resident,
                               sp_error *error)
{
    sp_image *image;
    sp_status status = sp_layout_pack(engine->layout, adapter, &image, error);

    if (status != SP_OK)
        return status;
    status = sp_pool_load(engine->pool, image, &resident->slot, &resident->generation, error);
    sp_image_destroy(image);
    if (status != SP_OK)
        return status;
    status = sp_pool_set_pinned(engine->pool, resident->slot, true);
    resident->rank = sp_adapter_rank_max(adapter);
    resident->sites = (int32_t)sp_adapter_n_sites(adapter);
    resident->file_bytes = stored_bytes(adapter);
    resident->digest = sp_adapter_digest(adapter);
    resident->flops_ratio = flops_ratio(&engine->model.shape, adapter);
    return status;
}

static sp_status create_pool(sp_engine *engine, sp_adapter *const *adapters, size_t n,
                             sp_error *error)
{
    sp_layout_options layout_options;
    sp_pool_options pool_options;
    sp_delta_options delta_options;
    sp_status status;
    int32_t rank = 0;

    sp_layout_options_default(&layout_options);
    for (size_t i = 0; i < n; i++) {
        layout_options.modules |= sp_adapter_modules(adapters[i]);
        if (sp_adapter_rank_max(adapters[i]) > rank)
            rank = sp_adapter_rank_max(adapters[i]);
    }
    if (engine->options.lora_modules)
        layout_options.modules = engine->options.lora_modules;
    if (engine->options.max_lora_rank)
        rank = engine->options.max_lora_rank;
    layout_options.geometry = engine->model.geometry;
    layout_options.rank = rank ? rank : DEFAULT_POOL_RANK;
    layout_options.dtype = engine->options.precision;
    status = sp_layout_create(&layout_options, &engine->layout, error);
    if (status != SP_OK)
        return status;
    sp_pool_options_default(&pool_options);
    pool_options.layout = engine->layout;
    pool_options.device = engine->device;
    pool_options.slots = engine->options.max_loras;
    status = sp_pool_create(&pool_options, &engine->pool, error);
    if (status != SP_OK)
        return status;
    sp_delta_options_default(&delta_options);
    delta_options.pool = engine->pool;
    delta_options.exec = engine->exec;
    delta_options.rows_max = engine->options.step_rows;
    delta_options.cpu_isa = engine->kernels->level;
    delta_options.no_apply = engine->options.no_apply;
    delta_options.no_ffn = engine->options.no_ffn;
    return sp_delta_create(&delta_options, &engine->delta, error);
}

static sp_status check_adapter_names(const sp_engine *engine, const sp_engine_adapter *wanted,
                                     size_t n, sp_error *error)
{
    if (n > (size_t)engine->options.max_loras)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "max-loras", -1,
                       "%zu adapters need %zu slots; raise --max-loras above %d", n, n,
                       engine->options.max_loras);
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

static sp_status load_adapters(sp_engine *engine, const sp_engine_adapter *wanted, size_t n,
                               sp_error *error)
{
    sp_adapter **adapters;
    sp_status status = check_adapter_names(engine, wanted, n, error);

    if (status != SP_OK || n == 0)
        return status;
    adapters = sp_calloc(n, sizeof(sp_adapter *));
    engine->residents = sp_calloc(n, sizeof *engine->residents);
    if (!adapters || !engine->residents) {
        status = sp_fail_memory(error, n * sizeof *engine->residents, "the list of adapters");
        goto free_list;
    }
    engine->n_residents = n;
    for (size_t i = 0; i < n && status == SP_OK; i++) {
        double began = sp_clock_seconds();

        status = open_adapter(engine, &wanted[i], &adapters[i], error);
        engine->residents[i].load_seconds = sp_clock_seconds() - began;
    }
    if (status == SP_OK)
        status = create_pool(engine, adapters, n, error);
    for (size_t i = 0; i < n && status == SP_OK; i++) {
        double began = sp_clock_seconds();

        engine->residents[i].name = sp_strdup(wanted[i].name);
        if (!engine->residents[i].name)
            status = sp_fail_memory(error, strlen(wanted[i].name), "the name of an adapter");
        else
            status = make_resident(engine, adapters[i], &engine->residents[i], error);
        engine->residents[i].load_seconds += sp_clock_seconds() - began;
    }
    for (size_t i = 0; i < n; i++)
        sp_adapter_release(adapters[i]);
free_list:
    sp_free(adapters);
    return status;
}

/* ---- buffers ------------------------------------------------------------------------------- */

static sp_status create_cache(sp_engine *engine, sp_error *error)
{
    int32_t page_tokens = engine->options.page_tokens;
    int32_t n_pages = (int32_t)((engine->options.kv_tokens + page_tokens - 1) / page_tokens);
    sp_scheduler_options options = {
        .max_running = engine->options.max_running,
        .step_rows = engine->options.step_rows,
        .prefill_chunk = engine->options.prefill_chunk ? engine->options.prefill_chunk
                                                       : engine->options.step_rows,
        .page_tokens = page_tokens,
        .n_pages = n_pages,
    };
    sp_status status =
        sp_kv_cache_create(engine->device, &engine->model.shape, engine->options.precision, n_pages,
                           page_tokens, &engine->cache, error);

    if (status != SP_OK)
        return status;
    if (sp_scheduler_create(&options, &engine->scheduler) != SP_OK)
        return sp_fail_memory(error, (size_t)n_pages * sizeof(int32_t), "the list of KV pages");
    return SP_OK;
}

static sp_status create_step_buffers(sp_engine *engine, sp_error *error)
{
    size_t running = (size_t)engine->options.max_running;
    int32_t slots = engine->options.max_loras > 0 ? engine->options.max_loras : 1;
    sp_forward_options options = {
        .model = &engine->model,
        .kernels = engine->kernels,
        .exec = engine->exec,
        .cache = &engine->cache,
        .rope = &engine->rope,
        .delta = engine->delta,
        .type = engine->options.precision,
        .rows_max = engine->options.step_rows,
    };

    engine->spans = sp_calloc(running, sizeof *engine->spans);
    engine->finished = sp_calloc(running, sizeof(sp_sequence *));
    engine->sample_scratch = sp_malloc(sp_sample_scratch_bytes(engine->model.shape.vocab));
    if (!engine->spans || !engine->finished || !engine->sample_scratch ||
        sp_plan_create(engine->options.step_rows, slots, &engine->plan) != SP_OK)
        return sp_fail_memory(error, running * sizeof *engine->spans, "the plan of a step");
    return sp_forward_create(&options, &engine->forward, error);
}

static sp_status open_all(sp_engine *engine, const sp_engine_adapter *adapters, size_t n_adapters,
                          sp_error *error)
{
    double began;
    sp_status status = open_host(engine, error);

    if (status == SP_OK)
        status = open_model(engine, error);
    began = sp_clock_seconds();
    if (status == SP_OK)
        status = load_adapters(engine, adapters, n_adapters, error);
    engine->stats.adapter_seconds = sp_clock_seconds() - began;
    if (status == SP_OK)
        status = create_cache(engine, error);
    if (status == SP_OK)
        status = create_step_buffers(engine, error);
    return status;
}

sp_status sp_engine_open(const sp_engine_options *options, const sp_engine_adapter *adapters,
                         size_t n_adapters, sp_engine **out_engine, sp_error *error)
{
    double began = sp_clock_seconds();
    sp_engine *engine;
    sp_status status = check_options(options, error);

    if (status != SP_OK)
        return status;
    engine = sp_calloc(1, sizeof *engine);
    if (!engine)
        return sp_fail_memory(error, sizeof *engine, "the engine");
    engine->options = *options;
    engine->next_id = 1;
    status = open_all(engine, adapters, n_adapters, error);
    if (status != SP_OK) {
        sp_engine_close(engine);
        return status;
    }
    engine->options.model_dir = NULL;
    engine->options.served_name = NULL;
    engine->options.cpu_isa = NULL;
    engine->stats.open_seconds = sp_clock_seconds() - began;
    *out_engine = engine;
    return SP_OK;
}

void sp_engine_close(sp_engine *engine)
{
    if (!engine)
        return;
    while (engine->n_sequences > 0)
        sp_engine_drop(engine, engine->sequences[engine->n_sequences - 1]);
    sp_free(engine->sequences);
    sp_text_free(&engine->event_text);
    sp_text_free(&engine->decoded);
    sp_forward_destroy(&engine->forward);
    sp_free(engine->sample_scratch);
    sp_free(engine->finished);
    sp_free(engine->spans);
    sp_scheduler_destroy(&engine->scheduler);
    sp_kv_cache_destroy(&engine->cache);
    sp_plan_destroy(engine->plan);
    sp_delta_destroy(engine->delta);
    sp_pool_destroy(engine->pool);
    sp_layout_release(engine->layout);
    for (size_t i = 0; i < engine->n_residents; i++)
        sp_free(engine->residents[i].name);
    sp_free(engine->residents);
    sp_tokenizer_close(engine->tokenizer);
    sp_rope_destroy(&engine->rope);
    sp_model_close(&engine->model);
    sp_device_close(engine->device);
    sp_exec_destroy(engine->exec);
    sp_free(engine->base_name);
    sp_free(engine);
}

/* ---- what it is ---------------------------------------------------------------------------- */

const sp_model_shape *sp_engine_shape(const sp_engine *engine)
{
    return &engine->model.shape;
}

const char *sp_engine_base_name(const sp_engine *engine)
{
    return engine->base_name;
}

const char *sp_engine_cpu_isa(const sp_engine *engine)
{
    return engine->kernels->level;
}

void sp_engine_get_stats(const sp_engine *engine, sp_engine_stats *out_stats)
{
    const sp_pages *pages = &engine->scheduler.pages;

    *out_stats = engine->stats;
    out_stats->delta_seconds = engine->forward.delta_seconds;
    out_stats->preemptions = engine->scheduler.preemptions;
    out_stats->waiting = engine->scheduler.n_waiting;
    out_stats->running = engine->scheduler.n_running;
    out_stats->kv_pages = pages->n_pages;
    out_stats->kv_pages_used = pages->n_pages - pages->n_free;
    out_stats->kv_pages_used_max = pages->used_max;
    out_stats->weight_bytes = engine->model.weight_bytes;
    out_stats->pool_bytes = engine->pool ? sp_pool_device_bytes(engine->pool) : 0;
    out_stats->kv_bytes = engine->cache.bytes;
    out_stats->scratch_bytes = engine->forward.scratch_bytes + engine->rope.bytes;
    if (engine->layout)
        out_stats->scratch_bytes +=
            sp_delta_workspace_bytes(engine->layout, engine->options.step_rows);
}

size_t sp_engine_n_adapters(const sp_engine *engine)
{
    return engine->n_residents;
}

sp_status sp_engine_adapter_at(const sp_engine *engine, size_t index,
                               sp_engine_adapter_info *out_info)
{
    const sp_resident *resident;

    if (index >= engine->n_residents)
        return SP_ERR_ARGUMENT;
    resident = &engine->residents[index];
    *out_info = (sp_engine_adapter_info){
        .name = resident->name,
        .slot = resident->slot,
        .rank = resident->rank,
        .sites = resident->sites,
        .file_bytes = resident->file_bytes,
        .digest = resident->digest,
        .rows = resident->rows,
        .slot_bytes = sp_layout_slot_bytes(engine->layout),
        .load_seconds = resident->load_seconds,
        .flops_ratio = resident->flops_ratio,
    };
    return SP_OK;
}

sp_status sp_engine_encode(const sp_engine *engine, const char *text, size_t bytes,
                           bool parse_special, int32_t **out_tokens, int32_t *out_n_tokens,
                           sp_error *error)
{
    size_t n = 0;
    sp_status status;

    if (!engine->tokenizer)
        return sp_fail(error, SP_ERR_NOT_FOUND, NULL, TOKENIZER_FILE, -1,
                       "the model %s has no " TOKENIZER_FILE "; give token ids instead",
                       engine->base_name);
    status =
        sp_tokenizer_encode(engine->tokenizer, text, bytes, parse_special, out_tokens, &n, error);
    if (status == SP_OK)
        *out_n_tokens = (int32_t)n;
    return status;
}

void sp_engine_free(void *memory)
{
    sp_free(memory);
}
