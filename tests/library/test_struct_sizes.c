/*
 * Every struct that grows, in the sizes of an older and of a newer host, at the end of a page that
 * nothing may be read or written beyond: one row for each struct, with a call that takes it, one
 * that gives it, or its default function. check_library.py holds the rows against the headers.
 */
#include "support/library_world.h"
#include "support/test.h"

#include <sidepath/allocator.h>
#include <sidepath/delta.h>
#include <sidepath/delta_pieces.h>
#include <sidepath/experts.h>
#include <sidepath/grouped.h>
#include <sidepath/partial.h>

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define FOREIGN                  0xAA
#define FIELD_BYTES(type, field) sizeof(((type *)NULL)->field)

enum { LIST = 2, BYTES_MAX = 4096, MORE = 8, VOCAB = 512 };

static library_world world;

/* Memory of `bytes` bytes that ends where a page does; its end is never aligned less than 8. */
typedef struct edge {
    char *pages, *at;
    size_t pages_bytes;
} edge;

static edge edge_make(size_t bytes)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    size_t data = (bytes + page - 1) / page * page;
    edge made = {.pages_bytes = data + page};

    made.pages =
        mmap(NULL, made.pages_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_true(made.pages != MAP_FAILED);
    assert_int_equal(mprotect(made.pages + data, page, PROT_NONE), 0);
    made.at = made.pages + data - bytes;
    memset(made.at, FOREIGN, bytes);
    return made;
}

static void edge_free(edge *made)
{
    munmap(made->pages, made->pages_bytes);
}

/* ---- structs that the library reads -------------------------------------------------------- */

typedef struct taken {
    const char *name;
    size_t bytes, last, last_bytes; /* today's size; the last field */
    sp_status without;              /* what comes of a struct that lacks this field */
    int n;                          /* elements of a list, one after the other */
    void (*fill)(void *list);
    sp_status (*call)(const void *list, sp_error *error);
} taken;

#define TAKEN(type, last, without, n, fill, call)                                                  \
    {                                                                                              \
#type, sizeof(type), offsetof(type, last), FIELD_BYTES(type, last), without, n, fill, call \
    }

static void fill_exec(void *at)
{
    sp_exec_options_default(at, sizeof(sp_exec_options));
    ((sp_exec_options *)at)->threads = 1;
}

static sp_status take_exec(const void *at, sp_error *error)
{
    sp_exec *exec = NULL;
    sp_status status = sp_exec_create(at, &exec, error);

    sp_exec_destroy(exec);
    return status;
}

static void fill_device(void *at)
{
    sp_device_options_default(at, sizeof(sp_device_options));
}

static sp_status take_device(const void *at, sp_error *error)
{
    sp_device *device = NULL;
    sp_status status = sp_device_open("cpu", at, &device, error);

    sp_device_close(device);
    return status;
}

static void fill_sites(void *at)
{
    sp_site *sites = at;

    for (int i = 0; i < LIST; i++) {
        sp_site_default(&sites[i], sizeof sites[i]);
        sites[i].path = i ? "model.layers.1.mlp.fc" : "model.layers.0.mlp.fc";
        sites[i].layer = i;
        sites[i].k_in = sites[i].n_out = 8;
    }
}

static sp_status take_sites(const void *at, sp_error *error)
{
    sp_geometry *geometry = NULL;
    sp_status status = sp_geometry_create(at, LIST, &geometry, error);

    if (status == SP_OK)
        assert_int_equal(sp_geometry_find(geometry, "model.layers.1.mlp.fc"), 1);
    sp_geometry_release(geometry);
    return status;
}

static void fill_adapter(void *at)
{
    sp_adapter_options_default(at, sizeof(sp_adapter_options));
    ((sp_adapter_options *)at)->geometry = world.geometry;
}

static sp_status take_adapter(const void *at, sp_error *error)
{
    sp_adapter *adapter = NULL;
    sp_status status = sp_adapter_open(LIBRARY_WORLD_ADAPTER, at, &adapter, error);

    sp_adapter_release(adapter);
    return status;
}

static void fill_receipt(void *at)
{
    sp_receipt_options_default(at, sizeof(sp_receipt_options));
}

static sp_status take_receipt(const void *at, sp_error *error)
{
    sp_receipt *receipt = NULL;
    sp_status status = sp_receipt_create(world.adapter, at, &receipt, error);

    sp_receipt_destroy(receipt);
    return status;
}

static void fill_layout(void *at)
{
    sp_layout_options_default(at, sizeof(sp_layout_options));
    ((sp_layout_options *)at)->geometry = world.geometry;
    ((sp_layout_options *)at)->rank = 8;
}

static sp_status take_layout(const void *at, sp_error *error)
{
    sp_layout *layout = NULL;
    sp_status status = sp_layout_create(at, &layout, error);

    sp_layout_release(layout);
    return status;
}

static sp_status take_layout_to_measure(const void *at, sp_error *error)
{
    size_t slot_bytes, matrix_bytes;

    return sp_layout_measure(at, &slot_bytes, &matrix_bytes, error);
}

static void fill_served(void *at)
{
    static const uint16_t table[2 * 8];

    *(sp_served_table *)at = (sp_served_table){.struct_bytes = sizeof(sp_served_table),
                                               .data = table,
                                               .dtype = SP_DTYPE_BF16,
                                               .rows = 2,
                                               .hidden = 8};
}

static sp_status take_served(const void *at, sp_error *error)
{
    sp_layout_options options;

    fill_layout(&options);
    options.served_head = at;
    return take_layout(&options, error);
}

static void fill_slices(void *at)
{
    const char *const paths[LIST] = {"model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"};

    for (int i = 0; i < LIST; i++)
        ((sp_site_slice *)at)[i] =
            (sp_site_slice){.struct_bytes = sizeof(sp_site_slice),
                            .site = sp_geometry_find(world.geometry, paths[i]),
                            .row_end = 8};
}

static sp_status take_slices(const void *at, sp_error *error)
{
    sp_layout_options options;

    fill_layout(&options);
    options.slices = at;
    options.n_slices = LIST;
    return take_layout(&options, error);
}

static void fill_pool(void *at)
{
    sp_pool_options_default(at, sizeof(sp_pool_options));
    ((sp_pool_options *)at)->layout = world.layout;
    ((sp_pool_options *)at)->device = world.device;
    ((sp_pool_options *)at)->slots = 1;
}

static sp_status take_pool(const void *at, sp_error *error)
{
    sp_pool *pool = NULL;
    sp_status status = sp_pool_create(at, &pool, error);

    sp_pool_destroy(pool);
    return status;
}

static void fill_slots(void *at)
{
    for (int i = 0; i < LIST; i++)
        ((sp_slot_info *)at)[i] =
            (sp_slot_info){.struct_bytes = sizeof(sp_slot_info), .pinned = i == 0};
    ((sp_slot_info *)at)[0].state = SP_SLOT_READY;
}

static sp_status take_slots(const void *at, sp_error *error)
{
    int32_t slot = -1;
    sp_status status = sp_pool_pick_victim(at, LIST, &slot, error);

    if (status == SP_OK)
        assert_int_equal(slot, 1);
    return status;
}

static void fill_spans(void *at)
{
    for (int i = 0; i < LIST; i++)
        ((sp_route_span *)at)[i] = (sp_route_span){.struct_bytes = sizeof(sp_route_span),
                                                   .handle = world.handle,
                                                   .n_rows = 1 + i,
                                                   .scale = 0};
}

static sp_status take_spans(const void *at, sp_error *error)
{
    sp_plan *plan = NULL;
    sp_status status;

    assert_ok(sp_plan_create(8, 2, &plan, error), error);
    status = sp_plan_build(plan, world.pool, at, LIST, 0, error);
    if (status == SP_OK)
        assert_int_equal(sp_plan_get(plan)->n_rows, 3);
    sp_plan_destroy(plan);
    return status;
}

static void fill_engine(void *at)
{
    sp_engine_options_default(at, sizeof(sp_engine_options));
    ((sp_engine_options *)at)->model_dir = LIBRARY_WORLD_MODEL;
    ((sp_engine_options *)at)->threads = 1;
    ((sp_engine_options *)at)->kv_tokens = 64;
}

static sp_status take_engine(const void *at, sp_error *error)
{
    sp_engine *engine = NULL;
    sp_status status = sp_engine_open(at, NULL, 0, &engine, error);

    sp_engine_close(engine);
    return status;
}

static void fill_engine_adapters(void *at)
{
    for (int i = 0; i < LIST; i++)
        ((sp_engine_adapter *)at)[i] = (sp_engine_adapter){
            sizeof(sp_engine_adapter), i ? "second" : "first", LIBRARY_WORLD_ADAPTER};
}

static sp_status take_engine_adapters(const void *at, sp_error *error)
{
    sp_engine_options options;
    sp_engine *engine = NULL;
    sp_status status;

    fill_engine(&options);
    status = sp_engine_open(&options, at, LIST, &engine, error);
    if (status == SP_OK)
        assert_int_equal(sp_stage_n_versions(sp_engine_stage(engine)), LIST);
    sp_engine_close(engine);
    return status;
}

static void fill_request(void *at)
{
    static const int32_t prompt[] = {1, 2, 3};

    sp_request_default(at, sizeof(sp_request));
    ((sp_request *)at)->tokens = prompt;
    ((sp_request *)at)->n_tokens = 3;
    ((sp_request *)at)->max_tokens = 1;
}

static void fill_constraint(void *at)
{
    sp_constraint_options_default(at, sizeof(sp_constraint_options));
    ((sp_constraint_options *)at)->kind = SP_CONSTRAINT_REGEX;
    ((sp_constraint_options *)at)->text = "ab?";
    ((sp_constraint_options *)at)->text_bytes = 3;
}

/* This world's model has no tokenizer: a struct that was understood gets as far as that. */
static sp_status take_constraint(const void *at, sp_error *error)
{
    sp_constraint *constraint = NULL;
    sp_status status = sp_engine_compile(world.engine, at, &constraint, error);

    sp_constraint_release(constraint);
    return status == SP_ERR_NOT_FOUND ? SP_OK : status;
}

static sp_status take_request(const void *at, sp_error *error)
{
    int64_t id = 0;
    sp_status status = sp_engine_check(world.engine, at, error);

    if (status == SP_OK)
        status = sp_engine_submit(world.engine, at, &id, error);
    if (status == SP_OK)
        assert_ok(sp_engine_cancel(world.engine, id, error), error);
    return status;
}

/* ---- delta --------------------------------------------------------------------------------- */

enum { WIDTH = 512 };
static sp_delta *pieces_delta; /* one for all sizes: the struct holds an address of its */

static uint16_t rows[4 * WIDTH]; /* room for two rows of FP32 */

static void fill_delta(void *at)
{
    sp_delta_options_default(at, sizeof(sp_delta_options));
    ((sp_delta_options *)at)->pool = world.pool;
    ((sp_delta_options *)at)->rows_max = 8;
}

static sp_status take_delta(const void *at, sp_error *error)
{
    sp_delta *delta = NULL;
    sp_status status = sp_delta_create(at, &delta, error);

    sp_delta_destroy(delta);
    return status;
}

static sp_delta *whole_delta(void)
{
    sp_delta_options options;
    sp_delta *delta = NULL;

    fill_delta(&options);
    assert_ok(sp_delta_create(&options, &delta, NULL), NULL);
    return delta;
}

static void fill_outputs(void *at)
{
    const char *const names[LIST] = {"model.layers.0.self_attn.k_proj",
                                     "model.layers.0.self_attn.v_proj"};

    for (int i = 0; i < LIST; i++)
        ((sp_delta_output *)at)[i] =
            (sp_delta_output){sizeof(sp_delta_output), sp_geometry_find(world.geometry, names[i]),
                              rows, WIDTH, SP_DTYPE_BF16};
}

static void fill_call(void *at)
{
    static sp_delta_output outputs[LIST];

    fill_outputs(outputs);
    *(sp_delta_call *)at = (sp_delta_call){.struct_bytes = sizeof(sp_delta_call),
                                           .plan = world.plan,
                                           .x = rows,
                                           .x_stride = WIDTH,
                                           .x_type = SP_DTYPE_BF16,
                                           .outputs = outputs,
                                           .n_outputs = 1};
}

static sp_status take_call(const void *at, sp_error *error)
{
    sp_delta *delta = whole_delta();
    sp_status status = sp_delta_apply(delta, at, error);

    if (status == SP_OK)
        status = sp_delta_shrink(delta, at, error);
    if (status == SP_OK)
        status = sp_delta_expand(delta, at, error);
    sp_delta_destroy(delta);
    return status;
}

static sp_status take_outputs(const void *at, sp_error *error)
{
    sp_delta *delta = whole_delta();
    sp_delta_call call;
    sp_status status;

    fill_call(&call);
    call.outputs = at;
    call.n_outputs = LIST;
    status = sp_delta_apply(delta, &call, error);
    sp_delta_destroy(delta);
    return status;
}

static float sums[2 * WIDTH];

static void fill_partials(void *at)
{
    const char *const paths[LIST] = {"model.layers.0.self_attn.k_proj",
                                     "model.layers.0.self_attn.v_proj"};

    for (int i = 0; i < LIST; i++)
        ((sp_delta_partial *)at)[i] =
            (sp_delta_partial){.struct_bytes = sizeof(sp_delta_partial),
                               .site = sp_geometry_find(world.geometry, paths[i]),
                               .xa = sums,
                               .xa_stride = WIDTH,
                               .y = rows,
                               .y_stride = WIDTH,
                               .y_type = SP_DTYPE_F32};
}

static void fill_partial_call(void *at)
{
    static sp_delta_partial sites[LIST];

    fill_partials(sites);
    *(sp_delta_partial_call *)at =
        (sp_delta_partial_call){.struct_bytes = sizeof(sp_delta_partial_call),
                                .plan = world.plan,
                                .x = rows,
                                .x_stride = WIDTH,
                                .x_type = SP_DTYPE_BF16,
                                .sites = sites,
                                .n_sites = 1};
}

static sp_status take_partial_call(const void *at, sp_error *error)
{
    sp_delta *delta = whole_delta();
    sp_status status = sp_delta_shrink_partial(delta, at, error);

    if (status == SP_OK)
        status = sp_delta_expand_from(delta, at, error);
    sp_delta_destroy(delta);
    return status;
}

static sp_status take_partials(const void *at, sp_error *error)
{
    sp_delta_partial_call call;

    fill_partial_call(&call);
    call.sites = at;
    call.n_sites = LIST;
    return take_partial_call(&call, error);
}

static const int32_t chosen[4] = {1, 0, 2, 1};

static void fill_moe_rows(void *at)
{
    *(sp_moe_rows *)at = (sp_moe_rows){
        .struct_bytes = sizeof(sp_moe_rows),
        .n_tokens = 2,
        .top_k = 2,
        .n_experts = 3,
        .expert = chosen,
    };
}

static sp_status take_moe_rows(const void *at, sp_error *error)
{
    int32_t begin[4], pairs[4];

    return sp_moe_rows_sort(at, begin, pairs, error);
}

static void fill_moe_items(void *at)
{
    static const int32_t slots[2] = {0, 1};
    static int32_t scratch[16], order[4];
    static sp_moe_item items[4];
    static sp_moe_rows moe;

    fill_moe_rows(&moe);
    *(sp_moe_items *)at = (sp_moe_items){
        .struct_bytes = sizeof(sp_moe_items),
        .rows = &moe,
        .token_slot = slots,
        .n_slots = 2,
        .item_rows_max = SP_TILE_ROWS,
        .n_rows = 4,
        .scratch = scratch,
        .row_order = order,
        .items = items,
    };
}

static sp_status take_moe_items(const void *at, sp_error *error)
{
    int32_t n_items;

    return sp_moe_items_build(at, &n_items, error);
}

static void fill_experts_call(void *at)
{
    static sp_delta_output outputs[LIST];

    fill_outputs(outputs);
    *(sp_delta_experts_call *)at = (sp_delta_experts_call){
        .struct_bytes = sizeof(sp_delta_experts_call),
        .x = rows,
        .x_stride = WIDTH,
        .x_type = SP_DTYPE_BF16,
        .outputs = outputs,
        .n_outputs = 1,
    };
}

/* The world's model has no experts, so no rows can have been begun: what is read comes first. */
static sp_status take_experts_call(const void *at, sp_error *error)
{
    sp_delta *delta = whole_delta();
    sp_status status = sp_delta_experts_apply(delta, at, error);

    sp_delta_destroy(delta);
    return status == SP_ERR_STATE ? SP_OK : status;
}

static void fill_embed(void *at)
{
    static const int32_t tokens[2] = {1, 2};

    *(sp_delta_embed_call *)at = (sp_delta_embed_call){.struct_bytes = sizeof(sp_delta_embed_call),
                                                       .plan = world.plan,
                                                       .tokens = tokens,
                                                       .y = rows,
                                                       .y_stride = WIDTH};
}

static sp_status take_embed(const void *at, sp_error *error)
{
    sp_delta *delta = whole_delta();
    sp_status status = sp_delta_embed(delta, at, error);

    sp_delta_destroy(delta);
    return status;
}

static void fill_head(void *at)
{
    static float logits[2 * VOCAB];

    *(sp_delta_head_call *)at = (sp_delta_head_call){.struct_bytes = sizeof(sp_delta_head_call),
                                                     .plan = world.plan,
                                                     .x = rows,
                                                     .x_stride = WIDTH,
                                                     .x_type = SP_DTYPE_BF16,
                                                     .logits = logits,
                                                     .logits_stride = VOCAB};
}

static sp_status take_head(const void *at, sp_error *error)
{
    sp_delta *delta = whole_delta();
    sp_status status = sp_delta_head(delta, at, error);

    sp_delta_destroy(delta);
    return status;
}

static void fill_single(void *at)
{
    sp_delta_single_options *options = at;

    sp_delta_single_options_default(options, sizeof *options);
    options->rows_max = options->k_in_max = options->rank_max = 8;
}

static sp_status take_single(const void *at, sp_error *error)
{
    sp_delta_single *single = NULL;
    sp_status status = sp_delta_single_create(at, &single, error);

    sp_delta_single_destroy(single);
    return status;
}

static void fill_single_args(void *at)
{
    sp_delta_single_args args = {.struct_bytes = sizeof args, .scale = 1};

    args.rows = args.k_in = args.n_out = args.rank = 8;
    args.dtype = args.x_type = args.y_type = SP_DTYPE_BF16;
    args.x = args.a = args.b = rows;
    args.y = rows + WIDTH;
    args.x_stride = args.a_stride = args.b_stride = args.y_stride = 8;
    memcpy(at, &args, sizeof args);
}

static sp_status take_single_args(const void *at, sp_error *error)
{
    sp_delta_single_options options;
    sp_delta_single *single = NULL;
    sp_status status;

    fill_single(&options);
    assert_ok(sp_delta_single_create(&options, &single, error), error);
    status = sp_delta_single_apply(single, at, error);
    sp_delta_single_destroy(single);
    return status;
}

static void fill_grouped(void *at)
{
    static const int32_t offsets[] = {0, 1}, adapters[] = {0}, ranks[] = {0};
    static const float scales[] = {1};
    static _Alignas(256) char workspace[4096];
    sp_grouped_lora_params params = {.struct_bytes = sizeof params,
                                     .input = rows,
                                     .lora_a = rows,
                                     .lora_b = rows,
                                     .output = rows + WIDTH,
                                     .workspace = workspace,
                                     .workspace_bytes = sizeof workspace,
                                     .segment_offsets = offsets,
                                     .segment_adapters = adapters,
                                     .ranks = ranks,
                                     .scales = scales,
                                     .total_rows = 1,
                                     .input_size = 8,
                                     .output_size = 8,
                                     .max_rank = 8,
                                     .n_segments = 1,
                                     .n_adapters = 1};

    memcpy(at, &params, sizeof params);
}

static sp_status take_grouped(const void *at, sp_error *error)
{
    return sp_grouped_lora_gemm(at, NULL, NULL, error);
}

/* ---- stage --------------------------------------------------------------------------------- */

/* A stage over a pool of its own, and the disk. */
typedef struct depot {
    sp_pool *pool;
    sp_stage_source disk;
    sp_stage *stage;
} depot;

static void depot_close(depot *d)
{
    sp_stage_destroy(d->stage);
    sp_disk_source_destroy(&d->disk);
    sp_pool_destroy(d->pool);
}

static depot depot_open(void)
{
    sp_pool_options options;
    depot d = {.disk = {.struct_bytes = sizeof d.disk}};

    fill_pool(&options);
    assert_ok(sp_pool_create(&options, &d.pool, NULL), NULL);
    assert_ok(sp_disk_source_create(&d.disk, NULL), NULL);
    return d;
}

static depot open_depot; /* what the rows below are about; its pool is empty */

static void fill_stage(void *at)
{
    sp_stage_options_default(at, sizeof(sp_stage_options));
    ((sp_stage_options *)at)->pool = open_depot.pool;
    ((sp_stage_options *)at)->sources = &open_depot.disk;
    ((sp_stage_options *)at)->n_sources = 1;
}

static sp_status take_stage(const void *at, sp_error *error)
{
    sp_stage *stage = NULL;
    sp_status status = sp_stage_create(at, &stage, error);

    sp_stage_destroy(stage);
    return status;
}

static sp_stage *whole_stage(void)
{
    sp_stage_options options;
    sp_stage *stage = NULL;

    fill_stage(&options);
    assert_ok(sp_stage_create(&options, &stage, NULL), NULL);
    return stage;
}

static void fill_sources(void *at)
{
    for (int i = 0; i < LIST; i++)
        ((sp_stage_source *)at)[i] = open_depot.disk;
}

static sp_status take_sources(const void *at, sp_error *error)
{
    sp_stage_options options;

    fill_stage(&options);
    options.sources = at;
    options.n_sources = LIST;
    return take_stage(&options, error);
}

static void fill_stage_load(void *at)
{
    sp_stage_load_options_default(at, sizeof(sp_stage_load_options));
    ((sp_stage_load_options *)at)->name = "a";
    ((sp_stage_load_options *)at)->location = LIBRARY_WORLD_ADAPTER;
}

static sp_status take_stage_load(const void *at, sp_error *error)
{
    sp_stage *stage = whole_stage();
    sp_status status = sp_stage_add(stage, at, world.adapter, error);

    sp_stage_destroy(stage);
    return status;
}

/* ---- adapters from memory ------------------------------------------------------------------ */

static const char config[] = "{\"peft_type\": \"LORA\", \"r\": 8, \"lora_alpha\": 8}";
static const int64_t a_shape[2] = {8, 16}, b_shape[2] = {16, 8};
static const char *const names[LIST] = {"model.layers.0.mlp.down_proj.lora_A.weight",
                                        "model.layers.0.mlp.down_proj.lora_B.weight"};

static void fill_views(void *at)
{
    static uint16_t ones[8 * 16];

    for (int i = 0; i < 8 * 16; i++)
        ones[i] = 0x3f80; /* 1 in bf16 */
    for (int i = 0; i < LIST; i++)
        ((sp_tensor_view *)at)[i] = (sp_tensor_view){.struct_bytes = sizeof(sp_tensor_view),
                                                     .name = names[i],
                                                     .data = ones,
                                                     .type = SP_TENSOR_BF16,
                                                     .n_dims = 2,
                                                     .shape = i ? b_shape : a_shape};
}

static sp_status take_views(const void *at, sp_error *error)
{
    sp_adapter_options options;
    sp_adapter *adapter = NULL;
    sp_status status;

    sp_adapter_options_default(&options, sizeof options);
    options.allow_unknown_fields = true;
    status =
        sp_adapter_from_tensors(config, sizeof config - 1, at, LIST, &options, &adapter, error);
    sp_adapter_release(adapter);
    return status;
}

static void fill_descs(void *at)
{
    for (int i = 0; i < LIST; i++)
        ((sp_tensor_desc *)at)[i] = (sp_tensor_desc){sizeof(sp_tensor_desc), names[i],
                                                     SP_TENSOR_BF16, 2, i ? b_shape : a_shape};
}

static sp_status take_descs(const void *at, sp_error *error)
{
    sp_adapter_options options;
    sp_intake *intake = NULL;
    sp_status status;

    sp_adapter_options_default(&options, sizeof options);
    status = sp_intake_create(config, sizeof config - 1, at, LIST, &options, &intake, error);
    sp_intake_destroy(intake);
    return status;
}

static const taken all_taken[] = {
    TAKEN(sp_exec_options, spin_us, SP_OK, 1, fill_exec, take_exec),
    TAKEN(sp_device_options, free_pinned, SP_OK, 1, fill_device, take_device),
    TAKEN(sp_site, tied, SP_OK, LIST, fill_sites, take_sites),
    TAKEN(sp_adapter_options, views_on, SP_OK, 1, fill_adapter, take_adapter),
    TAKEN(sp_receipt_options, expert_bytes, SP_OK, 1, fill_receipt, take_receipt),
    TAKEN(sp_layout_options, expert_rank, SP_OK, 1, fill_layout, take_layout),
    TAKEN(sp_layout_options, expert_rank, SP_OK, 1, fill_layout, take_layout_to_measure),
    TAKEN(sp_served_table, approximate, SP_OK, 1, fill_served, take_served),
    TAKEN(sp_site_slice, row_map, SP_OK, LIST, fill_slices, take_slices),
    TAKEN(sp_pool_options, expert_bytes, SP_OK, 1, fill_pool, take_pool),
    TAKEN(sp_slot_info, digest, SP_OK, LIST, fill_slots, take_slots),
    TAKEN(sp_route_span, scale, SP_OK, LIST, fill_spans, take_spans),
    TAKEN(sp_engine_options, n_sources, SP_OK, 1, fill_engine, take_engine),
    TAKEN(sp_engine_adapter, path, SP_ERR_ARGUMENT, LIST, fill_engine_adapters,
          take_engine_adapters),
    TAKEN(sp_request, processed_logprobs, SP_OK, 1, fill_request, take_request),
    TAKEN(sp_constraint_options, text_bytes, SP_OK, 1, fill_constraint, take_constraint),
    TAKEN(sp_delta_options, expert_rows_max, SP_OK, 1, fill_delta, take_delta),
    TAKEN(sp_delta_call, stream, SP_OK, 1, fill_call, take_call),
    TAKEN(sp_delta_output, y_type, SP_OK, LIST, fill_outputs, take_outputs),
    TAKEN(sp_delta_partial, y_type, SP_OK, LIST, fill_partials, take_partials),
    TAKEN(sp_delta_partial_call, stream, SP_OK, 1, fill_partial_call, take_partial_call),
    TAKEN(sp_moe_rows, n_rows, SP_OK, 1, fill_moe_rows, take_moe_rows),
    TAKEN(sp_moe_items, items, SP_ERR_ARGUMENT, 1, fill_moe_items, take_moe_items),
    TAKEN(sp_delta_experts_call, scales, SP_OK, 1, fill_experts_call, take_experts_call),
    TAKEN(sp_delta_embed_call, stream, SP_OK, 1, fill_embed, take_embed),
    TAKEN(sp_delta_head_call, stream, SP_OK, 1, fill_head, take_head),
    TAKEN(sp_delta_single_options, x_f32, SP_OK, 1, fill_single, take_single),
    TAKEN(sp_delta_single_args, stream, SP_OK, 1, fill_single_args, take_single_args),
    TAKEN(sp_grouped_lora_params, n_adapters, SP_ERR_ARGUMENT, 1, fill_grouped, take_grouped),
    TAKEN(sp_stage_options, call_ms_max, SP_OK, 1, fill_stage, take_stage),
    TAKEN(sp_stage_source, images_trusted, SP_OK, LIST, fill_sources, take_sources),
    TAKEN(sp_stage_load_options, digest, SP_OK, 1, fill_stage_load, take_stage_load),
    TAKEN(sp_tensor_view, device_index, SP_OK, LIST, fill_views, take_views),
    TAKEN(sp_tensor_desc, shape, SP_ERR_ARGUMENT, LIST, fill_descs, take_descs),
};

/* The list as a host has it whose struct has `bytes` bytes: what today's has beyond is cut off,
 * what it lacks is zero but for the last byte of the last element. */
static sp_status take_in_size(const taken *row, size_t bytes, char last_byte, sp_error *error)
{
    size_t common = bytes < row->bytes ? bytes : row->bytes;
    char today[BYTES_MAX];
    edge host = edge_make(bytes * (size_t)row->n);
    sp_status status;

    assert_true(row->bytes * (size_t)row->n <= sizeof today);
    row->fill(today);
    memset(host.at, 0, bytes * (size_t)row->n);
    for (int i = 0; i < row->n; i++) {
        char *element = host.at + bytes * (size_t)i;

        memcpy(element, today + row->bytes * (size_t)i, common);
        memcpy(element, &bytes, sizeof bytes);
    }
    if (last_byte)
        host.at[bytes * (size_t)row->n - 1] = last_byte;
    *error = (sp_error){0};
    status = row->call(host.at, error);
    edge_free(&host);
    return status;
}

static void check_refused_size(const taken *row, size_t written)
{
    char today[BYTES_MAX];
    sp_error error = {0};

    row->fill(today);
    memcpy(today, &written, sizeof written);
    assert_int_equal(row->call(today, &error), SP_ERR_ARGUMENT);
    assert_non_null(strstr(error.text, row->name));
}

static void hosts_of_other_ages_are_understood(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof all_taken / sizeof all_taken[0]; i++) {
        const taken *row = &all_taken[i];
        sp_error error;

        print_message("%s\n", row->name);
        assert_true(row->bytes - row->last - row->last_bytes < sizeof(size_t)); /* the last */
        assert_int_equal(take_in_size(row, row->last, 0, &error), row->without);
        assert_ok(take_in_size(row, row->bytes, 0, &error), &error);
        assert_ok(take_in_size(row, row->bytes + MORE, 0, &error), &error);
        assert_int_equal(take_in_size(row, row->bytes + MORE, 1, &error), SP_ERR_UNSUPPORTED);
        assert_non_null(strstr(error.text, row->name));
        check_refused_size(row, 0);
        check_refused_size(row, 7);
        check_refused_size(row, (size_t)1 << 20);
    }
}

/* ---- the process's allocator, while the library holds nothing ------------------------------ */

static void *host_alloc(void *user, size_t bytes, size_t align_bytes)
{
    (void)user;
    return aligned_alloc(align_bytes, (bytes + align_bytes - 1) / align_bytes * align_bytes);
}

static void host_free(void *user, void *memory, size_t bytes, size_t align_bytes)
{
    (void)user;
    (void)bytes;
    (void)align_bytes;
    free(memory);
}

static void fill_allocator(void *at)
{
    *(sp_host_allocator *)at =
        (sp_host_allocator){sizeof(sp_host_allocator), NULL, host_alloc, host_free};
}

static sp_status take_allocator(const void *at, sp_error *error)
{
    sp_status status = sp_host_allocator_set(at, error);

    assert_ok(sp_host_allocator_set(NULL, NULL), NULL);
    return status;
}

static void hosts_allocators_of_other_ages(void **state)
{
    const taken row =
        TAKEN(sp_host_allocator, free, SP_ERR_ARGUMENT, 1, fill_allocator, take_allocator);
    sp_error error;

    (void)state;
    assert_int_equal(take_in_size(&row, row.last, 0, &error), row.without);
    assert_ok(take_in_size(&row, row.bytes, 0, &error), &error);
    assert_ok(take_in_size(&row, row.bytes + MORE, 0, &error), &error);
    assert_int_equal(take_in_size(&row, row.bytes + MORE, 1, &error), SP_ERR_UNSUPPORTED);
    check_refused_size(&row, 0);
}

/* ---- structs that the library writes ------------------------------------------------------- */

typedef struct given {
    const char *name;
    size_t bytes, last;
    size_t shown, shown_bytes; /* a field that is compared: between fields anything may be */
    sp_status (*call)(void *out, sp_error *error);
} given;

#define GIVEN(type, shown, last, call)                                    \
    {                                                                     \
#type, sizeof(type), offsetof(type, last), offsetof(type, shown), \
            FIELD_BYTES(type, shown), call                                \
    }

static sp_status give_site(void *out, sp_error *error)
{
    return sp_geometry_site_at(world.geometry, 2, out, error);
}

static sp_status give_slot(void *out, sp_error *error)
{
    return sp_pool_slot_info(world.pool, world.handle.slot, out, error);
}

static sp_status give_stats(void *out, sp_error *error)
{
    return sp_engine_get_stats(world.engine, out, error);
}

static sp_status give_pieces(void *out, sp_error *error)
{
    sp_delta_call call;

    if (pieces_delta == NULL)
        pieces_delta = whole_delta();
    fill_call(&call);
    return sp_delta_pieces_begin(pieces_delta, &call, out, error);
}

/* The list of one stage with one adapter. */
static sp_stage *given_stage(void)
{
    sp_stage_load_options load;

    if (open_depot.stage == NULL) {
        open_depot.stage = whole_stage();
        fill_stage_load(&load);
        assert_ok(sp_stage_add(open_depot.stage, &load, world.adapter, NULL), NULL);
    }
    return open_depot.stage;
}

static sp_status give_version_at(void *out, sp_error *error)
{
    return sp_stage_version_at(given_stage(), 0, out, error);
}

static sp_status give_version_of(void *out, sp_error *error)
{
    return sp_stage_find(given_stage(), "a", out, error);
}

static sp_status give_stage_stats(void *out, sp_error *error)
{
    return sp_stage_get_stats(given_stage(), out, error);
}

static sp_status give_hold(void *out, sp_error *error)
{
    return sp_stage_hold(given_stage(), SP_HOLD_BASE, NULL, out, error);
}

static sp_status give_wanted(void *out, sp_error *error)
{
    sp_adapter_options options;
    sp_tensor_desc descs[LIST];
    sp_intake *intake = NULL;
    sp_status status;

    fill_descs(descs);
    sp_adapter_options_default(&options, sizeof options);
    assert_ok(sp_intake_create(config, sizeof config - 1, descs, LIST, &options, &intake, error),
              error);
    status = sp_intake_wanted_at(intake, 0, out, error);
    sp_intake_destroy(intake);
    return status;
}

static const given all_given[] = {
    GIVEN(sp_stage_version_info, generation, load_seconds, give_version_at),
    GIVEN(sp_stage_version_info, generation, load_seconds, give_version_of),
    GIVEN(sp_hold, slot, begun, give_hold),
    GIVEN(sp_stage_stats, host_bytes, landed, give_stage_stats),
    GIVEN(sp_wanted_tensor, index, bytes, give_wanted),
    GIVEN(sp_delta_pieces, shrink, packed_x, give_pieces),
    GIVEN(sp_site, path, tied, give_site),
    GIVEN(sp_slot_info, generation, digest, give_slot),
    GIVEN(sp_engine_stats, kv_bytes, state_bytes, give_stats),
};

/* What is given to a host whose struct has `bytes` bytes: today's content as far as there is room,
 * its own size, and zeroes in what today's lacks. */
static void check_given(const given *row, const char *today, size_t bytes)
{
    size_t common = bytes < row->bytes ? bytes : row->bytes;
    edge host = edge_make(bytes);
    sp_error error;

    memcpy(host.at, &bytes, sizeof bytes);
    assert_ok(row->call(host.at, &error), &error);
    assert_memory_equal(host.at, &bytes, sizeof bytes);
    assert_memory_equal(host.at + row->shown, today + row->shown, row->shown_bytes);
    for (size_t i = common; i < bytes; i++)
        assert_int_equal(host.at[i], 0);
    edge_free(&host);
}

static void hosts_of_other_ages_are_given_what_they_know(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof all_given / sizeof all_given[0]; i++) {
        const given *row = &all_given[i];
        const size_t refused[] = {0, 7, (size_t)1 << 20};
        char today[BYTES_MAX], untouched[BYTES_MAX];
        sp_error error;

        print_message("%s\n", row->name);
        assert_true(row->bytes <= sizeof today);
        memset(today, FOREIGN, sizeof today);
        memcpy(today, &row->bytes, sizeof row->bytes);
        assert_ok(row->call(today, &error), &error);
        check_given(row, today, row->last);
        check_given(row, today, row->bytes);
        check_given(row, today, row->bytes + MORE);
        for (size_t r = 0; r < sizeof refused / sizeof refused[0]; r++) {
            memset(today, FOREIGN, sizeof today);
            memcpy(today, &refused[r], sizeof refused[r]);
            memcpy(untouched, today, sizeof today);
            assert_int_equal(row->call(today, &error), SP_ERR_ARGUMENT);
            assert_non_null(strstr(error.text, row->name));
            assert_memory_equal(today, untouched, sizeof today);
        }
    }
}

/* ---- defaults ------------------------------------------------------------------------------ */

typedef struct defaults {
    size_t bytes, last;
    void (*call)(void *out, size_t struct_bytes);
} defaults;

#define DEFAULT(type)                                     \
    static void type##_of(void *out, size_t struct_bytes) \
    {                                                     \
        type##_default(out, struct_bytes);                \
    }

DEFAULT(sp_exec_options)
DEFAULT(sp_device_options)
DEFAULT(sp_site)
DEFAULT(sp_adapter_options)
DEFAULT(sp_receipt_options)
DEFAULT(sp_layout_options)
DEFAULT(sp_pool_options)
DEFAULT(sp_route_span)
DEFAULT(sp_delta_options)
DEFAULT(sp_delta_single_options)
DEFAULT(sp_stage_options)
DEFAULT(sp_stage_load_options)
DEFAULT(sp_engine_options)
DEFAULT(sp_request)
DEFAULT(sp_constraint_options)

#define DEFAULTS(type, last)                          \
    {                                                 \
        sizeof(type), offsetof(type, last), type##_of \
    }

static const defaults all_defaults[] = {
    DEFAULTS(sp_stage_options, call_ms_max),
    DEFAULTS(sp_stage_load_options, digest),
    DEFAULTS(sp_delta_options, expert_rows_max),
    DEFAULTS(sp_delta_single_options, x_f32),
    DEFAULTS(sp_exec_options, spin_us),
    DEFAULTS(sp_device_options, free_pinned),
    DEFAULTS(sp_site, tied),
    DEFAULTS(sp_adapter_options, views_on),
    DEFAULTS(sp_receipt_options, expert_bytes),
    DEFAULTS(sp_layout_options, expert_rank),
    DEFAULTS(sp_pool_options, expert_bytes),
    DEFAULTS(sp_route_span, scale),
    DEFAULTS(sp_engine_options, n_sources),
    DEFAULTS(sp_request, processed_logprobs),
    DEFAULTS(sp_constraint_options, text_bytes),
};

static void defaults_are_cut_to_the_hosts_size(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof all_defaults / sizeof all_defaults[0]; i++) {
        const defaults *row = &all_defaults[i];
        const size_t sizes[] = {row->last, row->bytes, row->bytes + MORE};
        char today[BYTES_MAX];

        row->call(today, row->bytes);
        for (int s = 0; s < 3; s++) {
            size_t common = sizes[s] < row->bytes ? sizes[s] : row->bytes;
            edge host = edge_make(sizes[s]);

            row->call(host.at, sizes[s]);
            assert_memory_equal(host.at, &sizes[s], sizeof sizes[s]);
            assert_memory_equal(host.at + sizeof(size_t), today + sizeof(size_t),
                                common - sizeof(size_t));
            for (size_t b = common; b < sizes[s]; b++)
                assert_int_equal(host.at[b], 0);
            edge_free(&host);
        }
        row->call(NULL, row->bytes);
    }
}

static int open_world(void **state)
{
    (void)state;
    library_world_open(&world);
    open_depot = depot_open();
    return 0;
}

static int close_world(void **state)
{
    (void)state;
    sp_delta_destroy(pieces_delta);
    depot_close(&open_depot);
    library_world_close(&world);
    return 0;
}

int main(void)
{
    const struct CMUnitTest alone[] = {
        cmocka_unit_test(hosts_allocators_of_other_ages),
        cmocka_unit_test(defaults_are_cut_to_the_hosts_size),
    };
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(hosts_of_other_ages_are_understood),
        cmocka_unit_test(hosts_of_other_ages_are_given_what_they_know),
    };
    int failed = cmocka_run_group_tests_name("without objects", alone, NULL, NULL);

    return failed + cmocka_run_group_tests_name("structs", tests, open_world, close_world);
}
