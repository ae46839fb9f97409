#include "base/alloc.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/free_memory.h"
#include "base/grow.h"
#include "base/integer.h"
#include "engine/constrain.h"
#include "engine/draft_model.h"
#include "engine/draft_source.h"
#include "engine/engine_state.h"
#include "engine/model/preflight.h"
#include "engine/ops/kv_cache.h"
#include "engine/option_rows.h"

#include <sidepath/experts.h>
#include <stdio.h>
#include <string.h>

#define GPU_PAGE_TOKENS 16
/* Device memory that stays free for what the libraries and the driver allocate, as a share. */
#define GPU_RESERVE_SHARE 32
/* Sizes that were left open. The chunks hardly delay concurrent streams (docs/PERFORMANCE.md). */
#define STEP_ROWS_CPU     256
#define STEP_ROWS_GPU     2048
#define PREFILL_CHUNK_CPU 64
#define PREFILL_CHUNK_GPU 512
/* Of free host memory, for the pinned cache of packed adapters where its size is left open. */
#define PINNED_SHARE         4
#define PINNED_BYTES_DEFAULT ((size_t)16 << 30)

void sp_engine_options_default(sp_engine_options *out_options, size_t struct_bytes)
{
    sp_engine_options defaults = {.struct_bytes = sizeof defaults, .precision = SP_DTYPE_BF16};
    const sp_field_part part = sp_option_part(&defaults);

    sp_fields_set_defaults(&part, 0);
    sp_struct_default(out_options, struct_bytes, &defaults, sizeof defaults);
}

sp_module_set sp_engine_modules(const sp_geometry *geometry)
{
    const sp_model_shape *shape = sp_geometry_shape(geometry);

    if (!shape || !sp_family_find(shape->family))
        return 0;
    return sp_geometry_kind_modules(geometry, SP_SITE_LINEAR) |
           sp_geometry_kind_modules(geometry, SP_SITE_ROUTER) |
           sp_geometry_kind_modules(geometry, SP_SITE_EXPERT) |
           sp_geometry_kind_modules(geometry, SP_SITE_EMBEDDING) |
           sp_geometry_kind_modules(geometry, SP_SITE_HEAD);
}

/* ---- options ------------------------------------------------------------------------------- */

static sp_status bad_option(sp_error *error, const char *setting, const char *want)
{
    return sp_fail(error, SP_ERR_ARGUMENT, NULL, setting, -1, "%s must be %s", setting, want);
}

static sp_status check_options(const sp_engine_options *options, sp_error *error)
{
    const sp_field_part part = sp_option_part((sp_engine_options *)(uintptr_t)options);
    int32_t page = options->page_tokens;
    sp_status status;

    if (!options->model_dir)
        return bad_option(error, "model", "given");
    if (options->precision != SP_DTYPE_BF16 && options->precision != SP_DTYPE_F32)
        return bad_option(error, "precision", "bf16 or f32");
    status = sp_fields_check_ranges(&part, SP_ERR_ARGUMENT, error);
    if (status != SP_OK)
        return status;
    if ((page & (page - 1)) != 0)
        return bad_option(error, "page-tokens", "1, 2, 4, 8, 16 or 32");
    if (options->adapter_preempt_steps < options->adapter_wait_steps)
        return bad_option(error, "adapter-preempt-steps", "at least adapter-wait-steps");
    return SP_OK;
}

/* ---- opening, part by part ----------------------------------------------------------------- */

static bool on_gpu(const sp_engine *engine)
{
    return sp_device_get_kind(engine->device) == SP_DEVICE_CUDA;
}

/* "auto" takes a GPU where one can be used for this precision. */
static sp_status open_device(sp_engine *engine, sp_error *error)
{
    const char *name = engine->options.device ? engine->options.device : "cpu";
    bool automatic = strcmp(name, "auto") == 0;
    bool bf16 = engine->options.precision == SP_DTYPE_BF16;
    sp_status status;

    if (automatic) {
        status = bf16 ? sp_device_open("cuda", NULL, &engine->device, NULL) : SP_ERR_NO_DEVICE;
        if (status == SP_ERR_NO_DEVICE || status == SP_ERR_UNSUPPORTED)
            name = "cpu";
        else if (status != SP_OK)
            return sp_fail(error, status, NULL, "device", -1,
                           "a GPU is there but cannot be used (%s); set the device to cpu",
                           sp_status_text(status));
    }
    if (!engine->device) {
        status = sp_device_open(name, NULL, &engine->device, error);
        if (status != SP_OK)
            return status;
    }
    if (on_gpu(engine)) {
        if (!bf16)
            return sp_fail(error, SP_ERR_ARGUMENT, NULL, "precision", -1,
                           "precision f32 runs on the CPU only");
        if (engine->options.page_tokens != GPU_PAGE_TOKENS)
            return bad_option(error, "page-tokens", "16 on a GPU");
        engine->op_table = &sp_cuda_op_table;
    }
    return SP_OK;
}

static void choose_sizes(sp_engine_options *options, bool gpu)
{
    options->state_snapshot_tokens =
        (int32_t)round_up(options->state_snapshot_tokens, SP_STATE_CHUNK);
    if (options->step_rows == 0)
        options->step_rows = gpu ? STEP_ROWS_GPU : STEP_ROWS_CPU;
    if (options->prefill_chunk == 0 && options->interactive)
        options->prefill_chunk = gpu ? PREFILL_CHUNK_GPU : PREFILL_CHUNK_CPU;
}

static sp_status open_host(sp_engine *engine, sp_error *error)
{
    sp_exec_options exec_options;
    sp_status status = sp_kernels_get(engine->options.cpu_isa, &engine->kernels, error);

    if (status != SP_OK)
        return status;
    sp_exec_options_default(&exec_options, sizeof exec_options);
    exec_options.threads = engine->options.threads;
    status = sp_exec_create(&exec_options, &engine->exec, error);
    if (status == SP_OK)
        status = open_device(engine, error);
    if (status == SP_OK)
        choose_sizes(&engine->options, on_gpu(engine));
    return status;
}

static void note_tokenizer(sp_engine *engine)
{
    const int32_t n = sp_tokenizer_n_dropped(engine->tokenizer);

    if (n > 0)
        snprintf(engine->tokenizer_note, sizeof engine->tokenizer_note,
                 SP_TOKENIZER_FILE
                 ": %d of the 256 bytes have no token and are dropped from texts, as "
                 "the reference tokenizer does",
                 n);
}

static sp_status open_tokenizer(sp_engine *engine, sp_error *error)
{
    char *path = sp_path_join(engine->options.model_dir, SP_TOKENIZER_FILE);
    sp_status status = SP_OK;

    if (!path)
        return sp_fail_memory(error, sizeof SP_TOKENIZER_FILE, "a path");
    if (sp_path_exists(path)) {
        status = sp_tokenizer_open(engine->options.model_dir, &engine->tokenizer, error);
        if (status == SP_OK && sp_tokenizer_n_ids(engine->tokenizer) > engine->model.shape.vocab)
            status = sp_fail(error, SP_ERR_MISMATCH, NULL, "vocab_size", -1,
                             "%s has %d ids, but config.json's vocab_size is %d", path,
                             sp_tokenizer_n_ids(engine->tokenizer), engine->model.shape.vocab);
    }
    sp_free(path);
    if (status == SP_OK && engine->tokenizer)
        note_tokenizer(engine);
    return status;
}

static sp_load_progress progress_of(const sp_engine *engine)
{
    return (sp_load_progress){engine->options.progress, engine->options.progress_user};
}

static sp_status open_model(sp_engine *engine, size_t free_bytes, sp_error *error)
{
    const sp_model_shape *shape = &engine->model.shape;
    sp_error why;
    sp_status status = sp_model_open(engine->options.model_dir, engine->options.weights_copy,
                                     free_bytes, progress_of(engine), &engine->model, error);

    if (status != SP_OK)
        return status;
    engine->moe = sp_family_moe(&engine->model, engine->options.expert_max_tokens);
    if (shape->experts > 0 && !engine->op_table->experts)
        return sp_fail(error, SP_ERR_UNSUPPORTED, NULL, "device", -1,
                       "models with experts run on the CPU only; set the device to cpu");
    if (engine->options.served_name &&
        sp_stage_name_check(engine->options.served_name, NULL, &why) != SP_OK)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "served-model-name", -1,
                       "served-model-name: %s", why.text);
    engine->base_name =
        sp_strdup(engine->options.served_name ? engine->options.served_name : engine->model.name);
    if (!engine->base_name)
        return sp_fail_memory(error, 1, "the model's name");
    if (engine->options.max_context > shape->max_positions)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "max-context", -1,
                       "max-context %d is beyond the model's %d positions",
                       engine->options.max_context, shape->max_positions);
    engine->max_context =
        engine->options.max_context ? engine->options.max_context : shape->max_positions;
    if (sp_constrain_open(engine) != SP_OK)
        return sp_fail_memory(error, 1, "constraints");
    return open_tokenizer(engine, error);
}

/* ---- buffers ------------------------------------------------------------------------------- */

static sp_status create_scheduler(sp_engine *engine, sp_error *error)
{
    int32_t page_tokens = engine->options.page_tokens;
    int32_t n_pages = (int32_t)((engine->options.kv_tokens + page_tokens - 1) / page_tokens);
    bool recurrent = sp_family_delta_rule(&engine->model, 0, 0).layers > 0;
    sp_sequence_memory_options memory = {
        .n_pages = n_pages,
        .page_tokens = page_tokens,
        .prefix_cache = engine->options.prefix_cache,
        .n_states = recurrent ? engine->n_states : 0,
        .state_chunk = SP_STATE_CHUNK,
        .n_snapshots = recurrent ? engine->n_snapshots : 0,
        .snapshot_tokens = engine->options.state_snapshot_tokens,
    };
    sp_scheduler_options options = {
        .memory = &engine->memory,
        .max_running = engine->options.max_running,
        .step_rows = engine->options.step_rows,
        .prefill_chunk = engine->options.prefill_chunk ? engine->options.prefill_chunk
                                                       : engine->options.step_rows,
        .adapter_wait_steps = (uint64_t)engine->options.adapter_wait_steps,
        .adapter_preempt_steps = (uint64_t)engine->options.adapter_preempt_steps,
        .gate = sp_engine_gate(engine),
        .step_cost = &engine->step_cost,
        .model = sp_draft_model_scheduled(engine),
    };

    if (sp_sequence_memory_create(&memory, &engine->memory) != SP_OK ||
        sp_scheduler_create(&options, &engine->scheduler) != SP_OK)
        return sp_fail_memory(error, (size_t)n_pages * sizeof(int32_t), "the list of KV pages");
    return SP_OK;
}

/* All positions are within the cache, so the rotary tables end there. */
sp_ops_options sp_engine_ops_options(sp_engine *engine, const sp_model *model,
                                     const sp_sequence_memory *memory, int32_t max_positions,
                                     int32_t widths[SP_ROWS_MAX])
{
    const sp_model_shape *shape = &model->shape;
    int64_t kv_tokens = sp_sequence_memory_capacity(memory);

    return (sp_ops_options){
        .device = engine->device,
        .kernels = engine->kernels,
        .exec = engine->exec,
        .delta = engine->delta,
        .head_delta = engine->head_delta,
        .slots = engine->options.max_loras > 0 ? engine->options.max_loras : 1,
        .type = engine->options.precision,
        .rows_max = engine->options.step_rows,
        .spans_max = engine->options.max_running,
        .hidden = shape->hidden,
        .vocab = shape->vocab,
        .n_widths = model->family->widths(shape, widths),
        .widths = widths,
        .fp32_rows = model->family->fp32_rows,
        .attention = sp_family_attention(model),
        .moe = sp_family_moe(model, engine->options.expert_max_tokens),
        .delta_rule =
            sp_family_delta_rule(model, memory->options.n_states, memory->options.n_snapshots),
        .rope = {.theta = shape->rope_theta,
                 .scaling = shape->rope_scaling,
                 .n_rot = sp_family_rotated_pairs(shape),
                 .positions = (int32_t)min64(kv_tokens, max_positions)},
        .kv_pages = memory->options.n_pages,
        .page_tokens = engine->options.page_tokens,
        .kv_resident = !engine->kv_left_open,
        .eager = engine->options.eager,
        .free_gemm = engine->options.base_gemm_free,
    };
}

static sp_ops_options ops_options(sp_engine *engine, int32_t widths[SP_ROWS_MAX])
{
    return sp_engine_ops_options(engine, &engine->model, &engine->memory, engine->max_context,
                                 widths);
}

static sp_status create_step_buffers(sp_engine *engine, sp_error *error)
{
    size_t running = (size_t)engine->options.max_running;
    int32_t widths[SP_ROWS_MAX];
    sp_ops_options options = ops_options(engine, widths);
    sp_status status;

    engine->spans = sp_calloc(running, sizeof *engine->spans);
    engine->step_spans = sp_calloc(running, sizeof *engine->step_spans);
    engine->finished = sp_calloc(running, sizeof(sp_sequence *));
    engine->faults = sp_calloc(running, sizeof *engine->faults);
    if (!engine->spans || !engine->step_spans || !engine->finished || !engine->faults)
        return sp_fail_memory(error, running * sizeof *engine->spans, "the plan of a step");
    status = sp_plan_create(engine->options.step_rows, options.slots, &engine->plan, error);
    if (status == SP_OK)
        status = sp_ops_create(engine->op_table, &options, &engine->ops, error);
    if (status != SP_OK)
        return status;
    status = sp_model_place(&engine->model, engine->ops,
                            on_gpu(engine) ? progress_of(engine) : (sp_load_progress){0}, error);
    if (status != SP_OK)
        return status;
    status = sp_family_prepare(&engine->model, engine->ops);
    return status == SP_OK ? SP_OK
                           : sp_fail(error, status, NULL, "device", -1, "%.400s",
                                     sp_device_error_text(engine->device));
}

/* ---- memory -------------------------------------------------------------------------------- */

static size_t scratch_bytes(sp_engine *engine)
{
    int32_t widths[SP_ROWS_MAX];
    sp_ops_options options = ops_options(engine, widths);
    size_t bytes;

    options.rope.positions = engine->max_context;
    bytes = sp_ops_scratch_bytes(engine->op_table, &options);
    if (on_gpu(engine))
        return bytes;
    /* the tables of sines and cosines */
    bytes += 2 * (size_t)sp_family_rotated_pairs(&engine->model.shape) *
             (size_t)engine->max_context * sizeof(float);
    if (engine->layout)
        bytes += sp_delta_workspace_bytes(engine->layout, engine->options.step_rows, false) +
                 sp_delta_experts_workspace_bytes(engine->layout, engine->options.max_loras,
                                                  sp_engine_expert_rows(engine), false);
    return bytes;
}

/* A border of the states is the end of a page, because page_tokens divides SP_STATE_CHUNK. */
static void add_recurrent_needs(const sp_engine *engine, sp_memory_needs *needs)
{
    const sp_engine_options *options = &engine->options;
    sp_delta_rule_shape rule = sp_family_delta_rule(&engine->model, 1, 1);
    int32_t apart = options->state_snapshot_tokens / 4; /* as sequence_memory.h says */

    needs->state = sp_ops_state_bytes(engine->op_table, &rule, options->precision);
    needs->state_budget = options->state_bytes;
    needs->snapshot = sp_ops_snapshot_bytes(engine->op_table, &rule, options->precision);
    needs->snapshot_budget = options->state_snapshot_bytes;
    if (options->prefix_cache && options->state_snapshot_tokens > 0)
        needs->snapshot_tokens = apart > SP_STATE_CHUNK ? apart : SP_STATE_CHUNK;
}

static sp_memory_needs needs_of(sp_engine *engine, const sp_startup *startup)
{
    sp_attention_shape attention = sp_family_attention(&engine->model);
    sp_memory_needs needs = {
        .weights = engine->model.needed_bytes,
        .overlay = startup->overlay_bytes,
        .experts = startup->expert_bytes,
        .scratch = scratch_bytes(engine),
        .host_cache = engine->options.host_bytes_max,
        .kv_token = sp_ops_kv_token_bytes(engine->op_table, &attention, engine->options.precision),
        .kv_tokens = engine->options.kv_tokens,
        .max_running = engine->options.max_running,
        .max_context = engine->max_context,
        .page_tokens = engine->options.page_tokens,
    };

    if (engine->layout) {
        needs.slot = sp_layout_slot_bytes(engine->layout);
        needs.slots = engine->options.max_loras;
        needs.experts += sp_layout_expert_table_bytes(engine->layout, needs.slots);
    }
    add_recurrent_needs(engine, &needs);
    sp_draft_model_add_needs(engine, &needs);
    return needs;
}

/* Packed adapters in pinned memory of the host, beside a GPU. */
static sp_status share_host(sp_engine *engine, size_t slot, size_t free_bytes, sp_error *error)
{
    size_t *wanted = &engine->options.host_bytes_max;
    size_t share = free_bytes / PINNED_SHARE;

    if (*wanted > free_bytes)
        return sp_fail(error, SP_ERR_MEMORY, SP_CODE_MEMORY_SHORT, "host-cache-mib", -1,
                       "the packed adapters beside the slots: %zu MiB needed, %zu MiB of host "
                       "memory free; lower host-cache-mib",
                       *wanted >> 20, free_bytes >> 20);
    if (*wanted == 0 && free_bytes != SIZE_MAX)
        *wanted = slot + (share < PINNED_BYTES_DEFAULT ? share : PINNED_BYTES_DEFAULT);
    return SP_OK;
}

/* A GPU's memory has no other user: the KV cache may take all but a reserve. */
static sp_status divide_gpu(sp_engine *engine, sp_memory_needs *needs, size_t host_free,
                            sp_memory_shares *out_shares, sp_error *error)
{
    size_t device_free = 0, total = 0;
    sp_status status = sp_device_memory(engine->device, &device_free, &total, error);

    if (status != SP_OK)
        return status;
    if (engine->options.memory_bytes > 0 && engine->options.memory_bytes < device_free)
        device_free = engine->options.memory_bytes;
    needs->kv_reserve = total / GPU_RESERVE_SHARE;
    needs->host_cache = 0;
    status = sp_memory_preflight(needs, device_free, out_shares, error);
    if (status == SP_OK)
        status = share_host(engine, needs->slot, host_free, error);
    out_shares->host_cache = engine->options.host_bytes_max;
    return status;
}

/* Before any large allocation; chooses the sizes that were left open. */
static sp_status preflight(sp_engine *engine, const sp_startup *startup, size_t free_bytes,
                           sp_error *error)
{
    sp_memory_needs needs = needs_of(engine, startup);
    sp_memory_shares shares;
    sp_status status = on_gpu(engine) ? divide_gpu(engine, &needs, free_bytes, &shares, error)
                                      : sp_memory_preflight(&needs, free_bytes, &shares, error);

    if (status != SP_OK)
        return status;
    engine->kv_left_open = engine->options.kv_tokens == 0;
    engine->options.kv_tokens = shares.kv_tokens;
    engine->options.host_bytes_max = shares.host_cache;
    engine->n_states = shares.states;
    engine->n_snapshots = shares.snapshots;
    return SP_OK;
}

/* After the preflight: what is read here fits. */
static sp_status prefault(sp_engine *engine, sp_error *error)
{
    double began = sp_clock_seconds();
    sp_status status = sp_weight_files_prefault(&engine->model.files, progress_of(engine), error);

    if (status == SP_OK && engine->draft_model)
        status =
            sp_weight_files_prefault(&engine->draft_model->model.files, progress_of(engine), error);
    engine->stats.prefault_seconds = sp_clock_seconds() - began;
    return status;
}

static size_t left_of(size_t free_bytes, size_t needed)
{
    if (free_bytes == SIZE_MAX) /* unknown */
        return SIZE_MAX;
    return free_bytes > needed ? free_bytes - needed : 0;
}

static sp_status open_all(sp_engine *engine, const sp_engine_adapter *adapters, size_t n_adapters,
                          sp_error *error)
{
    sp_startup startup = {0};
    size_t free_bytes;
    double began;
    sp_status status = open_host(engine, error);

    if (status != SP_OK)
        return status;
    free_bytes = engine->options.memory_bytes && !on_gpu(engine) ? engine->options.memory_bytes
                                                                 : sp_free_memory("");

    status = open_model(engine, free_bytes, error);
    if (status == SP_OK)
        status =
            sp_draft_model_open(engine, left_of(free_bytes, engine->model.needed_bytes), error);
    began = sp_clock_seconds();
    if (status == SP_OK)
        status = sp_engine_read_adapters(engine, adapters, n_adapters,
                                         left_of(free_bytes, engine->model.needed_bytes), &startup,
                                         error);
    if (status == SP_OK)
        status = preflight(engine, &startup, free_bytes, error);
    if (status == SP_OK && engine->options.weights_prefault && !on_gpu(engine))
        status = prefault(engine, error);
    if (status == SP_OK)
        status = sp_engine_start_adapters(engine, &startup, error);
    sp_startup_free(&startup);
    engine->stats.adapter_seconds = sp_clock_seconds() - began;
    if (status == SP_OK)
        status = create_scheduler(engine, error);
    if (status == SP_OK)
        status = create_step_buffers(engine, error);
    if (status == SP_OK)
        status = sp_draft_model_start(engine, error);
    return status;
}

/* A copy of the list with structs of the current size; *out_own is NULL for an empty one. */
static sp_status read_adapters(const sp_engine_adapter *adapters, size_t n,
                               sp_engine_adapter **out_own, sp_error *error)
{
    sp_engine_adapter *own;

    *out_own = NULL;
    if (n == 0)
        return SP_OK;
    own = sp_calloc(n, sizeof *own);
    if (!own)
        return sp_fail_memory(error, n * sizeof *own, "the list of adapters");
    for (size_t i = 0; i < n; i++) {
        sp_status status =
            sp_struct_read_at(&own[i], sizeof own[i], adapters, i, "sp_engine_adapter", error);

        if (status == SP_OK && (!own[i].name || !own[i].path))
            status = sp_fail_null(error, own[i].name ? "adapters.path" : "adapters.name");
        if (status != SP_OK) {
            sp_free(own);
            return status;
        }
    }
    *out_own = own;
    return SP_OK;
}

sp_status sp_engine_open(const sp_engine_options *options, const sp_engine_adapter *adapters,
                         size_t n_adapters, sp_engine **out_engine, sp_error *error)
{
    double began = sp_clock_seconds();
    sp_engine_options own;
    sp_engine_adapter *own_adapters = NULL;
    sp_engine *engine;
    sp_status status;

    if (!out_engine)
        return sp_fail_null(error, "out_engine");
    sp_engine_options_default(&own, sizeof own);
    status = sp_struct_read(&own, sizeof own, options, "sp_engine_options", error);
    if (status == SP_OK)
        status = check_options(&own, error);
    if (status == SP_OK)
        status = read_adapters(adapters, n_adapters, &own_adapters, error);
    if (status != SP_OK)
        return status;
    engine = sp_calloc(1, sizeof *engine);
    if (!engine) {
        sp_free(own_adapters);
        return sp_fail_memory(error, sizeof *engine, "the engine");
    }
    engine->options = own;
    engine->op_table = &sp_cpu_op_table;
    engine->next_id = 1;
    status = open_all(engine, own_adapters, n_adapters, error);
    sp_free(own_adapters);
    if (status != SP_OK) {
        sp_engine_close(engine);
        return status;
    }
    engine->options.model_dir = NULL;
    engine->options.draft_model = NULL;
    engine->options.served_name = NULL;
    engine->options.cpu_isa = NULL;
    engine->options.device = NULL;
    engine->options.adapter_refused = NULL;
    engine->options.progress = NULL;
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
    sp_processed_free(&engine->processed);
    sp_text_free(&engine->decoded);
    sp_draft_model_close(engine);
    sp_ops_destroy(engine->ops);
    sp_free(engine->finished);
    sp_free(engine->faults);
    sp_free(engine->step_spans);
    sp_free(engine->spans);
    sp_scheduler_destroy(&engine->scheduler);
    sp_sequence_memory_destroy(&engine->memory);
    sp_plan_destroy(engine->plan);
    sp_engine_close_adapters(engine);
    sp_constrain_close(engine);
    sp_tokenizer_close(engine->tokenizer);
    sp_model_close(&engine->model);
    sp_device_close(engine->device);
    sp_exec_destroy(engine->exec);
    sp_free(engine->base_name);
    sp_free(engine);
}

/* ---- properties ---------------------------------------------------------------------------- */

const sp_model_shape *sp_engine_shape(const sp_engine *engine)
{
    return &engine->model.shape;
}

const char *sp_engine_note(const sp_engine *engine, size_t index)
{
    const char *const own[] = {engine->model.unused, engine->model.converted,
                               engine->tokenizer_note[0] ? engine->tokenizer_note : NULL};
    size_t n = 0;

    while (sp_geometry_note(engine->model.geometry, n))
        n++;
    if (index < n)
        return sp_geometry_note(engine->model.geometry, index);
    for (size_t i = 0; i < sizeof own / sizeof own[0]; i++)
        if (own[i] && n++ == index)
            return own[i];
    return NULL;
}

const char *sp_engine_base_name(const sp_engine *engine)
{
    return engine->base_name;
}

int32_t sp_engine_max_context(const sp_engine *engine)
{
    int64_t capacity = sp_sequence_memory_capacity(&engine->memory);

    return capacity < engine->max_context ? (int32_t)capacity : engine->max_context;
}

void sp_engine_routing(const sp_engine *engine, int32_t *out_layers, int32_t *out_per_token)
{
    if (out_layers)
        *out_layers = engine ? engine->moe.layers : 0;
    if (out_per_token)
        *out_per_token = engine ? engine->moe.per_token : 0;
}

const char *sp_engine_cpu_isa(const sp_engine *engine)
{
    return engine->kernels->level;
}

const char *sp_engine_device(const sp_engine *engine)
{
    return sp_device_name(engine->device);
}

static size_t delta_bytes(const sp_engine *engine)
{
    int32_t rows = engine->options.step_rows;
    size_t bytes;

    if (!engine->layout)
        return 0;
    if (on_gpu(engine))
        return sp_delta_device_bytes(engine->pool, rows, false) +
               sp_delta_experts_device_bytes(engine->pool, rows, sp_engine_expert_rows(engine),
                                             false) +
               sp_delta_device_bytes(engine->pool, SP_LOGIT_ROWS_MAX, false) +
               sp_delta_experts_device_bytes(engine->pool, SP_LOGIT_ROWS_MAX, 1, false);
    bytes = sp_delta_workspace_bytes(engine->layout, rows, false);
    if (sp_pool_experts_at(engine->pool, 0))
        bytes += sp_delta_experts_workspace_bytes(engine->layout, engine->options.max_loras,
                                                  sp_engine_expert_rows(engine), false);
    return bytes;
}

static sp_engine_stats stats_of(const sp_engine *engine)
{
    const sp_sequence_memory *memory = &engine->memory;
    sp_engine_stats stats = engine->stats;

    stats.delta_seconds = engine->ops->delta_seconds;
    stats.preemptions = engine->scheduler.preemptions;
    stats.rotations = engine->scheduler.rotations;
    stats.waiting = engine->scheduler.n_waiting;
    stats.waiting_slot = engine->scheduler.waits[SP_WAIT_SLOT];
    stats.waiting_load = engine->scheduler.waits[SP_WAIT_LOAD];
    stats.waiting_pages = engine->scheduler.waits[SP_WAIT_PAGES];
    stats.waiting_batch = engine->scheduler.waits[SP_WAIT_BATCH];
    stats.running = engine->scheduler.n_running;
    stats.running_max = engine->options.max_running;
    stats.slots = engine->pool ? engine->options.max_loras : 0;
    stats.slot_rank = engine->pool ? sp_layout_rank_stride(engine->layout) : 0;
    stats.threads = sp_exec_threads(engine->exec);
    stats.precision = engine->options.precision;
    stats.page_tokens = engine->options.page_tokens;
    stats.kv_pages = memory->options.n_pages;
    stats.kv_pages_used = memory->options.n_pages - sp_sequence_memory_available(memory);
    stats.kv_pages_cached = sp_sequence_memory_evictable(memory);
    stats.prefix_tokens = memory->resumed_tokens;
    stats.kv_pages_used_max = sp_sequence_memory_used_max(memory);
    stats.weight_bytes = engine->model.weight_bytes;
    stats.pool_bytes = engine->pool ? sp_pool_device_bytes(engine->pool) : 0;
    stats.kv_bytes = engine->ops->kv_bytes;
    stats.scratch_bytes = engine->ops->scratch_bytes;
    stats.captures = engine->ops->captures;
    stats.device_bytes = on_gpu(engine) ? sp_device_allocated_bytes(engine->device) : 0;
    stats.scratch_bytes += delta_bytes(engine);
    stats.draft_model_bytes = sp_draft_model_bytes(engine);
    stats.states = memory->states.n_states;
    stats.states_used = memory->states.n_states - memory->states.n_free_states;
    stats.states_used_max = memory->states.used_max;
    stats.state_snapshots = memory->states.n_snapshots;
    stats.state_snapshots_kept = sp_state_slots_n_kept(&memory->states);
    stats.state_snapshots_written = memory->states.n_written;
    stats.state_bytes = engine->ops->state_bytes;
    if (engine->stage) {
        sp_stage_stats stage = {.struct_bytes = sizeof stage};

        (void)sp_stage_get_stats(engine->stage, &stage, NULL);
        stats.adapter_reads = stage.fetches;
        stats.adapter_copies = stage.copies;
        stats.host_evictions = stage.evictions;
        stats.host_bytes = stage.host_bytes;
        stats.host_bytes_max = engine->options.host_bytes_max;
    }
    return stats;
}

void sp_engine_set_draft_source(sp_engine *engine, sp_draft_source source)
{
    engine->scheduler.options.drafts = source;
}

void sp_engine_set_untimed(sp_engine *engine)
{
    engine->step_cost = (sp_step_cost){.known = false};
    engine->untimed = true;
}

bool sp_engine_weights_touched(const sp_engine *engine)
{
    return engine && sp_weight_files_touched(&engine->model.files);
}

sp_status sp_engine_check_weights(const sp_engine *engine, sp_error *error)
{
    if (!engine)
        return sp_fail_null(error, "engine");
    return sp_weight_files_check(&engine->model.files, error);
}

sp_status sp_engine_get_stats(const sp_engine *engine, sp_engine_stats *out_stats, sp_error *error)
{
    sp_engine_stats stats;

    if (!engine)
        return sp_fail_null(error, "engine");
    stats = stats_of(engine);
    return sp_struct_write(out_stats, &stats, sizeof stats, "sp_engine_stats", error);
}

static sp_status need_tokenizer(const sp_engine *engine, sp_error *error)
{
    if (engine->tokenizer)
        return SP_OK;
    return sp_fail(error, SP_ERR_NOT_FOUND, SP_ENGINE_NO_TOKENIZER, SP_TOKENIZER_FILE, -1,
                   "the model %s has no " SP_TOKENIZER_FILE "; give token ids instead",
                   engine->base_name);
}

/* Adds the reason for the limit, which the tokenizer does not know. */
static void name_context(const sp_engine *engine, int32_t max_tokens, sp_error *error)
{
    int32_t context = sp_engine_max_context(engine);

    if (!error || !error->code || strcmp(error->code, SP_TOKENIZER_TOO_MANY) != 0)
        return;
    if (max_tokens == context)
        sp_fail(error, SP_ERR_TOO_LARGE, SP_ENGINE_CONTEXT_EXCEEDED, "prompt", -1,
                "This model's maximum context length is %d tokens. However, your prompt has more "
                "than %d tokens; shorten it, or raise max-context or kv-tokens",
                context, context);
    else
        sp_fail(error, SP_ERR_TOO_LARGE, SP_TOKENIZER_TOO_MANY, "prompt", -1,
                "the text has more than %d tokens, the most that are taken; the context is %d "
                "(max-context, kv-tokens)",
                max_tokens, context);
}

/* Special tokens are parsed in `spans` alone; add_special: with the post-processor's tokens. */
static sp_status encode(const sp_engine *engine, const char *text, size_t bytes,
                        const sp_text_span *spans, size_t n_spans, bool add_special,
                        int32_t max_tokens, int32_t **out_tokens, int32_t *out_n_tokens,
                        sp_error *error)
{
    size_t n_max = max_tokens > 0 ? (size_t)max_tokens : SIZE_MAX;
    size_t n = 0;
    sp_status status;

    if (!engine || (!text && bytes > 0) || (!spans && n_spans > 0))
        return sp_fail_null(error, !engine ? "engine" : text || bytes == 0 ? "spans" : "text");
    if (!out_tokens || !out_n_tokens)
        return sp_fail_null(error, out_tokens ? "out_n_tokens" : "out_tokens");
    status = need_tokenizer(engine, error);
    if (status == SP_OK)
        status = sp_tokenizer_encode_spans(engine->tokenizer, text, bytes, spans, n_spans,
                                           add_special, n_max, out_tokens, &n, error);
    if (status == SP_OK)
        *out_n_tokens = (int32_t)n;
    else
        name_context(engine, max_tokens, error);
    return status;
}

sp_status sp_engine_encode_spans(const sp_engine *engine, const char *text, size_t bytes,
                                 const sp_text_span *spans, size_t n_spans, int32_t max_tokens,
                                 int32_t **out_tokens, int32_t *out_n_tokens, sp_error *error)
{
    return encode(engine, text, bytes, spans, n_spans, false, max_tokens, out_tokens, out_n_tokens,
                  error);
}

sp_status sp_engine_encode(const sp_engine *engine, const char *text, size_t bytes,
                           bool parse_special, int32_t max_tokens, int32_t **out_tokens,
                           int32_t *out_n_tokens, sp_error *error)
{
    const sp_text_span all = {0, bytes};

    return encode(engine, text, bytes, &all, parse_special && bytes > 0, false, max_tokens,
                  out_tokens, out_n_tokens, error);
}

sp_status sp_engine_encode_prompt(const sp_engine *engine, const char *text, size_t bytes,
                                  bool parse_special, int32_t max_tokens, int32_t **out_tokens,
                                  int32_t *out_n_tokens, sp_error *error)
{
    const sp_text_span all = {0, bytes};

    return encode(engine, text, bytes, &all, parse_special && bytes > 0, true, max_tokens,
                  out_tokens, out_n_tokens, error);
}

sp_status sp_engine_decode(const sp_engine *engine, const int32_t *tokens, int32_t n_tokens,
                           bool skip_special, char **out_text, size_t *out_bytes, sp_error *error)
{
    sp_text text = {0};
    sp_status status;

    if (!engine || (!tokens && n_tokens > 0))
        return sp_fail_null(error, engine ? "tokens" : "engine");
    if (!out_text || !out_bytes)
        return sp_fail_null(error, out_text ? "out_bytes" : "out_text");
    if (n_tokens < 0)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "n_tokens", -1,
                       "n_tokens is %d; it must be 0 or more", n_tokens);
    status = need_tokenizer(engine, error);
    if (status != SP_OK)
        return status;
    sp_text_add(&text, "");
    sp_tokenizer_decode(engine->tokenizer, tokens, (size_t)n_tokens, skip_special, &text);
    if (text.failed) {
        sp_text_free(&text);
        return sp_fail_memory(error, (size_t)n_tokens, "a text");
    }
    *out_text = text.data;
    *out_bytes = text.bytes;
    return SP_OK;
}

const char *sp_engine_token_bytes(const sp_engine *engine, int32_t token, size_t *out_bytes)
{
    *out_bytes = 0;
    return engine->tokenizer ? sp_tokenizer_token_bytes(engine->tokenizer, token, out_bytes) : NULL;
}

bool sp_engine_token_is_special(const sp_engine *engine, int32_t token)
{
    return engine->tokenizer && sp_tokenizer_is_special(engine->tokenizer, token);
}

void sp_engine_free(void *memory)
{
    sp_free(memory);
}
