/*
 * test_misuse.c, continued: the calls of a step, adapters from memory, and a stage.
 */
#include "support/misuse.h"

#include <sidepath/delta.h>
#include <sidepath/delta_pieces.h>
#include <sidepath/experts.h>
#include <sidepath/grouped.h>
#include <sidepath/partial.h>

#include <math.h>
#include <string.h>

#define w       misuse_world
#define error   misuse_error
#define FOREIGN MISUSE_FOREIGN

/* ---- delta --------------------------------------------------------------------------------- */

enum { ROWS = 2, WIDTH = 512, ROWS_MAX = 8 };

static uint16_t x[ROWS * WIDTH], y[ROWS * WIDTH];

/* The site of layer 0's q_proj, which the world's adapter adapts, and a call there. */
typedef struct scene {
    sp_delta *delta;
    sp_site site;
    sp_delta_output output;
    sp_delta_call call;
} scene;

static void scene_open(scene *s)
{
    sp_delta_options options;
    int32_t site = sp_geometry_find(w.geometry, "model.layers.0.self_attn.q_proj");

    sp_delta_options_default(&options, sizeof options);
    options.pool = w.pool;
    options.rows_max = ROWS_MAX;
    assert_ok(sp_delta_create(&options, &s->delta, &error), &error);
    s->site = (sp_site){.struct_bytes = sizeof s->site};
    assert_ok(sp_geometry_site_at(w.geometry, site, &s->site, &error), &error);
    assert_true(s->site.k_in <= WIDTH && s->site.n_out <= WIDTH);
    s->output = (sp_delta_output){sizeof s->output, site, y, WIDTH, SP_DTYPE_BF16};
    s->call = (sp_delta_call){.struct_bytes = sizeof s->call,
                              .plan = w.plan,
                              .x = x,
                              .x_stride = WIDTH,
                              .x_type = SP_DTYPE_BF16,
                              .outputs = &s->output,
                              .n_outputs = 1};
}

static void deltas(void **state)
{
    sp_delta_options options;
    sp_delta *delta = NULL;

    (void)state;
    sp_delta_options_default(&options, sizeof options);
    options.pool = w.pool;
    options.rows_max = ROWS_MAX;
    REFUSED(SP_ERR_ARGUMENT, "sp_delta_options", sp_delta_create(NULL, &delta, &error));
    REFUSED(SP_ERR_ARGUMENT, "out_delta", sp_delta_create(&options, NULL, &error));
    options.rows_max = 0;
    REFUSED(SP_ERR_ARGUMENT, "rows_max", sp_delta_create(&options, &delta, &error));
    options.rows_max = INT32_MAX;
    REFUSED(SP_ERR_ARGUMENT, "rows_max", sp_delta_create(&options, &delta, &error));
    options.rows_max = ROWS_MAX;
    options.cpu_isa = "sse1";
    REFUSED(SP_ERR_ARGUMENT, "sse1", sp_delta_create(&options, &delta, &error));
    options.cpu_isa = NULL;
    options.pool = NULL;
    REFUSED(SP_ERR_ARGUMENT, "pool", sp_delta_create(&options, &delta, &error));
    assert_null(delta);
}

/* What apply, both halves and the pieces check alike. */
static void applies(void **state)
{
    scene s;
    sp_delta_call call;

    (void)state;
    scene_open(&s);
    REFUSED(SP_ERR_ARGUMENT, "delta", sp_delta_apply(NULL, &s.call, &error));
    REFUSED(SP_ERR_ARGUMENT, "sp_delta_call", sp_delta_apply(s.delta, NULL, &error));
    call = s.call;
    call.plan = NULL;
    REFUSED(SP_ERR_ARGUMENT, "plan", sp_delta_apply(s.delta, &call, &error));
    call = s.call;
    call.x = NULL;
    REFUSED(SP_ERR_ARGUMENT, "x", sp_delta_apply(s.delta, &call, &error));
    call.x = x;
    call.x_stride = s.site.k_in - 1;
    REFUSED(SP_ERR_STRIDE, "x_stride", sp_delta_apply(s.delta, &call, &error));
    call.x_stride = WIDTH;
    call.x_type = (sp_dtype)FOREIGN;
    REFUSED(SP_ERR_ARGUMENT, "x_type", sp_delta_apply(s.delta, &call, &error));
    call.x_type = SP_DTYPE_F32;
    REFUSED(SP_ERR_UNSUPPORTED, "x_f32", sp_delta_apply(s.delta, &call, &error));
    call = s.call;
    call.n_outputs = -1;
    REFUSED(SP_ERR_ARGUMENT, "n_outputs", sp_delta_apply(s.delta, &call, &error));
    call.n_outputs = 1;
    call.outputs = NULL;
    REFUSED(SP_ERR_ARGUMENT, "outputs", sp_delta_apply(s.delta, &call, &error));
    sp_delta_destroy(s.delta);
}

static void outputs(void **state)
{
    scene s;
    sp_delta_output whole;

    (void)state;
    scene_open(&s);
    whole = s.output;
    s.output.y = NULL;
    REFUSED(SP_ERR_ARGUMENT, "y", sp_delta_apply(s.delta, &s.call, &error));
    s.output = whole;
    s.output.y_stride = s.site.n_out - 1;
    REFUSED(SP_ERR_STRIDE, "y_stride", sp_delta_apply(s.delta, &s.call, &error));
    s.output = whole;
    s.output.y_type = (sp_dtype)FOREIGN;
    REFUSED(SP_ERR_ARGUMENT, "y_type", sp_delta_apply(s.delta, &s.call, &error));
    s.output = whole;
    s.output.site = -1;
    REFUSED(SP_ERR_ARGUMENT, "site", sp_delta_apply(s.delta, &s.call, &error));
    s.output.site = INT32_MAX;
    REFUSED(SP_ERR_ARGUMENT, "site", sp_delta_apply(s.delta, &s.call, &error));
    s.output = whole;
    s.output.struct_bytes = 0;
    REFUSED(SP_ERR_ARGUMENT, "sp_delta_output", sp_delta_apply(s.delta, &s.call, &error));
    sp_delta_destroy(s.delta);
}

static sp_status no_product(void *user, const struct sp_cuda_group *group, bool *out_folded)
{
    (void)user;
    (void)group;
    (void)out_folded;
    fail_msg("the product of a refused call is not called");
    return SP_OK;
}

static void halves_and_pieces(void **state)
{
    sp_delta_pieces pieces = {.struct_bytes = sizeof pieces};
    sp_row_report report = {.struct_bytes = sizeof report};
    sp_device_rows rows = {.struct_bytes = sizeof rows};
    scene s;

    (void)state;
    scene_open(&s);
    REFUSED(SP_ERR_ARGUMENT, "delta", sp_delta_shrink(NULL, &s.call, &error));
    REFUSED(SP_ERR_ARGUMENT, "sp_delta_call", sp_delta_shrink(s.delta, NULL, &error));
    REFUSED(SP_ERR_ARGUMENT, "delta", sp_delta_expand(NULL, &s.call, &error));
    REFUSED(SP_ERR_ARGUMENT, "sp_delta_call", sp_delta_expand(s.delta, NULL, &error));
    REFUSED(SP_ERR_STATE, "shrink", sp_delta_expand(s.delta, &s.call, &error));
    REFUSED(SP_ERR_ARGUMENT, "delta",
            sp_delta_apply_around(NULL, &s.call, no_product, NULL, &error));
    REFUSED(SP_ERR_ARGUMENT, "sp_delta_call",
            sp_delta_apply_around(s.delta, NULL, no_product, NULL, &error));
    REFUSED(SP_ERR_ARGUMENT, "product",
            sp_delta_apply_around(s.delta, &s.call, NULL, NULL, &error));
    REFUSED(SP_ERR_ARGUMENT, "delta", sp_delta_pieces_begin(NULL, &s.call, &pieces, &error));
    REFUSED(SP_ERR_ARGUMENT, "sp_delta_call",
            sp_delta_pieces_begin(s.delta, NULL, &pieces, &error));
    REFUSED(SP_ERR_ARGUMENT, "sp_delta_pieces",
            sp_delta_pieces_begin(s.delta, &s.call, NULL, &error));
    REFUSED(SP_ERR_ARGUMENT, "delta", sp_delta_upload(NULL, w.plan, NULL, &error));
    REFUSED(SP_ERR_ARGUMENT, "plan", sp_delta_upload(s.delta, NULL, NULL, &error));
    REFUSED(SP_ERR_ARGUMENT, "delta", sp_delta_start(NULL, w.plan, NULL, &error));
    REFUSED(SP_ERR_ARGUMENT, "plan", sp_delta_start(s.delta, NULL, NULL, &error));
    REFUSED(SP_ERR_ARGUMENT, "delta", sp_plan_from_device(NULL, &rows, NULL, &error));
    REFUSED(SP_ERR_UNSUPPORTED, "GPU", sp_plan_from_device(s.delta, NULL, NULL, &error));
    REFUSED(SP_ERR_UNSUPPORTED, "GPU", sp_plan_from_device(s.delta, &rows, NULL, &error));
    REFUSED(SP_ERR_ARGUMENT, "delta", sp_delta_row_report(NULL, &report, &error));
    REFUSED(SP_ERR_UNSUPPORTED, "GPU", sp_delta_row_report(s.delta, NULL, &error));
    REFUSED(SP_ERR_UNSUPPORTED, "GPU", sp_delta_row_report(s.delta, &report, &error));
    sp_delta_destroy(s.delta);
}

static void partial_sums(void **state)
{
    float sums[ROWS * WIDTH];
    sp_delta_partial partial = {.struct_bytes = sizeof partial,
                                .xa = sums,
                                .xa_stride = WIDTH,
                                .y = y,
                                .y_stride = WIDTH,
                                .y_type = SP_DTYPE_BF16};
    sp_delta_partial_call call = {.struct_bytes = sizeof call,
                                  .plan = w.plan,
                                  .x = x,
                                  .x_stride = WIDTH,
                                  .x_type = SP_DTYPE_BF16,
                                  .sites = &partial,
                                  .n_sites = 1};
    scene s;

    (void)state;
    scene_open(&s);
    partial.site = s.output.site;
    REFUSED(SP_ERR_ARGUMENT, "delta", sp_delta_shrink_partial(NULL, &call, &error));
    REFUSED(SP_ERR_ARGUMENT, "sp_delta_partial_call",
            sp_delta_shrink_partial(s.delta, NULL, &error));
    REFUSED(SP_ERR_ARGUMENT, "delta", sp_delta_expand_from(NULL, &call, &error));
    REFUSED(SP_ERR_ARGUMENT, "sp_delta_partial_call", sp_delta_expand_from(s.delta, NULL, &error));
    call.x_stride = 1;
    REFUSED(SP_ERR_STRIDE, "x_stride", sp_delta_shrink_partial(s.delta, &call, &error));
    call.x_stride = WIDTH;
    partial.xa_stride = 1;
    REFUSED(SP_ERR_STRIDE, "xa_stride", sp_delta_shrink_partial(s.delta, &call, &error));
    partial.xa_stride = WIDTH;
    partial.xa = NULL;
    REFUSED(SP_ERR_ARGUMENT, "xa", sp_delta_shrink_partial(s.delta, &call, &error));
    partial.xa = sums;
    partial.site = -1;
    REFUSED(SP_ERR_ARGUMENT, "site", sp_delta_shrink_partial(s.delta, &call, &error));
    sp_delta_destroy(s.delta);
}

/* ---- experts ------------------------------------------------------------------------------- */

static void moe_rows(void **state)
{
    static const int32_t chosen[4] = {1, 0, 2, 1}, slots[2] = {0, -1}, falling[3] = {0, 3, 2};
    int32_t begin[4], pairs[4], n_items = 0, scratch[16], order[4];
    sp_moe_item items[4];
    sp_moe_rows rows = {.struct_bytes = sizeof rows, .n_tokens = 2, .top_k = 2, .n_experts = 3};
    sp_moe_items call = {.struct_bytes = sizeof call,
                         .rows = &rows,
                         .token_slot = slots,
                         .n_slots = 1,
                         .item_rows_max = 8,
                         .n_rows = 4,
                         .scratch = scratch,
                         .row_order = order,
                         .items = items};

    (void)state;
    rows.expert = chosen;
    REFUSED(SP_ERR_ARGUMENT, "begin", sp_moe_prefix_check(NULL, 2, 4, &error));
    REFUSED(SP_ERR_ARGUMENT, "n", sp_moe_prefix_check(falling, -1, 4, &error));
    REFUSED(SP_ERR_ARGUMENT, "n_rows", sp_moe_prefix_check(falling, 2, -1, &error));
    REFUSED(SP_ERR_INPUT, "expert_begin", sp_moe_prefix_check(falling, 2, 4, &error));
    REFUSED(SP_ERR_ARGUMENT, "sp_moe_rows", sp_moe_rows_sort(NULL, begin, pairs, &error));
    REFUSED(SP_ERR_ARGUMENT, "out_expert_begin", sp_moe_rows_sort(&rows, NULL, pairs, &error));
    REFUSED(SP_ERR_ARGUMENT, "out_row_pair", sp_moe_rows_sort(&rows, begin, NULL, &error));
    REFUSED(SP_ERR_ARGUMENT, "sp_moe_items", sp_moe_items_build(NULL, &n_items, &error));
    REFUSED(SP_ERR_ARGUMENT, "out_n_items", sp_moe_items_build(&call, NULL, &error));
    call.row_begin = 1;
    REFUSED(SP_ERR_ARGUMENT, "n_rows", sp_moe_items_build(&call, &n_items, &error));
    call.row_begin = 0;
    rows.top_k = 4;
    REFUSED(SP_ERR_ARGUMENT, "top_k", sp_moe_rows_sort(&rows, begin, pairs, &error));
    rows.top_k = 2;
    rows.row_pair = chosen;
    REFUSED(SP_ERR_ARGUMENT, "expert", sp_moe_items_build(&call, &n_items, &error));
    rows.expert = NULL;
    REFUSED(SP_ERR_ARGUMENT, "expert_begin", sp_moe_items_build(&call, &n_items, &error));
    rows.row_pair = NULL;
    REFUSED(SP_ERR_ARGUMENT, "expert", sp_moe_items_build(&call, &n_items, &error));
}

static void experts(void **state)
{
    static const int32_t chosen[ROWS] = {0, 0};
    sp_moe_rows rows = {.struct_bytes = sizeof rows,
                        .n_tokens = ROWS,
                        .top_k = 1,
                        .n_experts = 1,
                        .expert = chosen};
    sp_delta_experts_call call = {.struct_bytes = sizeof call, .x = x, .x_stride = WIDTH};
    scene s;

    (void)state;
    scene_open(&s);
    call.outputs = &s.output;
    call.n_outputs = 1;
    REFUSED(SP_ERR_ARGUMENT, "delta", sp_delta_experts_begin(NULL, w.plan, &rows, NULL, &error));
    REFUSED(SP_ERR_ARGUMENT, "plan", sp_delta_experts_begin(s.delta, NULL, &rows, NULL, &error));
    REFUSED(SP_ERR_ARGUMENT, "sp_moe_rows",
            sp_delta_experts_begin(s.delta, w.plan, NULL, NULL, &error));
    REFUSED(SP_ERR_ARGUMENT, "n_experts",
            sp_delta_experts_begin(s.delta, w.plan, &rows, NULL, &error));
    REFUSED(SP_ERR_ARGUMENT, "delta", sp_delta_experts_apply(NULL, &call, &error));
    REFUSED(SP_ERR_ARGUMENT, "sp_delta_experts_call",
            sp_delta_experts_apply(s.delta, NULL, &error));
    REFUSED(SP_ERR_STATE, "rows", sp_delta_experts_apply(s.delta, &call, &error));
    sp_delta_destroy(s.delta);
}

static void tokens(void **state)
{
    const int32_t ids[ROWS] = {1, 2};
    sp_delta_embed_call embed = {
        .struct_bytes = sizeof embed, .plan = w.plan, .tokens = ids, .y = y, .y_stride = WIDTH};
    sp_delta_head_call head = {.struct_bytes = sizeof head,
                               .plan = w.plan,
                               .x = x,
                               .x_stride = WIDTH,
                               .x_type = SP_DTYPE_BF16,
                               .logits = y,
                               .logits_stride = 1,
                               .logits_type = SP_DTYPE_BF16};
    scene s;

    (void)state;
    scene_open(&s);
    REFUSED(SP_ERR_ARGUMENT, "delta", sp_delta_embed(NULL, &embed, &error));
    REFUSED(SP_ERR_ARGUMENT, "sp_delta_embed_call", sp_delta_embed(s.delta, NULL, &error));
    embed.tokens = NULL;
    REFUSED(SP_ERR_ARGUMENT, "tokens", sp_delta_embed(s.delta, &embed, &error));
    embed.tokens = ids;
    embed.y = NULL;
    REFUSED(SP_ERR_ARGUMENT, "y", sp_delta_embed(s.delta, &embed, &error));
    embed.y = y;
    embed.y_stride = 1;
    REFUSED(SP_ERR_STRIDE, "y_stride", sp_delta_embed(s.delta, &embed, &error));
    REFUSED(SP_ERR_ARGUMENT, "delta", sp_delta_head(NULL, &head, &error));
    REFUSED(SP_ERR_ARGUMENT, "sp_delta_head_call", sp_delta_head(s.delta, NULL, &error));
    REFUSED(SP_ERR_STRIDE, "logits_stride", sp_delta_head(s.delta, &head, &error));
    head.logits = NULL;
    REFUSED(SP_ERR_ARGUMENT, "logits", sp_delta_head(s.delta, &head, &error));
    head.logits = y;
    head.x = NULL;
    REFUSED(SP_ERR_ARGUMENT, "x", sp_delta_head(s.delta, &head, &error));
    sp_delta_destroy(s.delta);
}

static void singles(void **state)
{
    sp_delta_single_options options;
    sp_delta_single_args args = {.struct_bytes = sizeof args,
                                 .rows = 1,
                                 .k_in = 8,
                                 .n_out = 8,
                                 .rank = 8,
                                 .dtype = SP_DTYPE_BF16,
                                 .x_type = SP_DTYPE_BF16,
                                 .y_type = SP_DTYPE_BF16,
                                 .x = x,
                                 .a = x,
                                 .b = x,
                                 .y = y,
                                 .x_stride = 8,
                                 .a_stride = 8,
                                 .b_stride = 8,
                                 .y_stride = 8,
                                 .scale = 1};
    sp_delta_single_args whole = args;
    sp_delta_single *single = NULL;

    (void)state;
    sp_delta_single_options_default(&options, sizeof options);
    options.rows_max = options.k_in_max = options.rank_max = 8;
    REFUSED(SP_ERR_ARGUMENT, "sp_delta_single_options",
            sp_delta_single_create(NULL, &single, &error));
    REFUSED(SP_ERR_ARGUMENT, "out_single", sp_delta_single_create(&options, NULL, &error));
    options.rank_max = 0;
    REFUSED(SP_ERR_ARGUMENT, "rank_max", sp_delta_single_create(&options, &single, &error));
    options.rank_max = 8;
    assert_null(single);
    assert_ok(sp_delta_single_create(&options, &single, &error), &error);
    REFUSED(SP_ERR_ARGUMENT, "single", sp_delta_single_apply(NULL, &args, &error));
    REFUSED(SP_ERR_ARGUMENT, "sp_delta_single_args", sp_delta_single_apply(single, NULL, &error));
    args.rows = 9;
    REFUSED(SP_ERR_ARGUMENT, "rows", sp_delta_single_apply(single, &args, &error));
    args = whole;
    args.k_in = -1;
    REFUSED(SP_ERR_ARGUMENT, "k_in", sp_delta_single_apply(single, &args, &error));
    args = whole;
    args.x = NULL;
    REFUSED(SP_ERR_ARGUMENT, "x", sp_delta_single_apply(single, &args, &error));
    args = whole;
    args.a_stride = 7;
    REFUSED(SP_ERR_STRIDE, "a_stride", sp_delta_single_apply(single, &args, &error));
    args = whole;
    args.scale = NAN;
    REFUSED(SP_ERR_ARGUMENT, "scale", sp_delta_single_apply(single, &args, &error));
    args = whole;
    args.dtype = (sp_dtype)FOREIGN;
    REFUSED(SP_ERR_ARGUMENT, "dtype", sp_delta_single_apply(single, &args, &error));
    sp_delta_single_destroy(single);
}

static void grouped(void **state)
{
    sp_grouped_lora_params params = {.struct_bytes = sizeof params};
    sp_grouped_lora *made = NULL;

    (void)state;
    REFUSED(SP_ERR_ARGUMENT, "sp_grouped_lora_params", sp_grouped_lora_check(NULL, &error));
    REFUSED(SP_ERR_ARGUMENT, "total_rows", sp_grouped_lora_check(&params, &error));
    REFUSED(SP_ERR_ARGUMENT, "sp_grouped_lora_params",
            sp_grouped_lora_gemm(NULL, NULL, NULL, &error));
    REFUSED(SP_ERR_ARGUMENT, "total_rows", sp_grouped_lora_gemm(&params, NULL, NULL, &error));
    params.struct_bytes = 0;
    REFUSED(SP_ERR_ARGUMENT, "sp_grouped_lora_params", sp_grouped_lora_check(&params, &error));
    REFUSED(SP_ERR_ARGUMENT, "device", sp_grouped_lora_create(NULL, &made, &error));
    REFUSED(SP_ERR_ARGUMENT, "out_grouped", sp_grouped_lora_create(w.device, NULL, &error));
    REFUSED(SP_ERR_UNSUPPORTED, "GPU", sp_grouped_lora_create(w.device, &made, &error));
    assert_null(made);
    REFUSED(SP_ERR_ARGUMENT, "grouped", sp_grouped_lora_launch(NULL, &params, NULL, &error));
    REFUSED(SP_ERR_ARGUMENT, "grouped", sp_grouped_lora_check_device(NULL, &params, NULL, &error));
}

/* ---- adapters from memory ------------------------------------------------------------------ */

static const char config[] = "{\"peft_type\": \"LORA\", \"r\": 8, \"lora_alpha\": 8}";

static void views(void **state)
{
    const int64_t shape[2] = {8, WIDTH};
    sp_tensor_view view = {.struct_bytes = sizeof view,
                           .name = "model.layers.0.self_attn.q_proj.lora_A.weight",
                           .data = x,
                           .type = SP_TENSOR_BF16,
                           .n_dims = 2,
                           .shape = shape};
    sp_tensor_view whole = view;
    size_t bytes = sizeof config - 1;
    sp_adapter_options options;
    sp_adapter *adapter = NULL;

    (void)state;
    sp_adapter_options_default(&options, sizeof options);
    REFUSED(SP_ERR_ARGUMENT, "config",
            sp_adapter_from_tensors(NULL, bytes, &view, 1, &options, &adapter, &error));
    REFUSED(SP_ERR_ARGUMENT, "views",
            sp_adapter_from_tensors(config, bytes, NULL, 1, &options, &adapter, &error));
    REFUSED(SP_ERR_ARGUMENT, "sp_adapter_options",
            sp_adapter_from_tensors(config, bytes, &view, 1, NULL, &adapter, &error));
    REFUSED(SP_ERR_ARGUMENT, "out_adapter",
            sp_adapter_from_tensors(config, bytes, &view, 1, &options, NULL, &error));
    view.data = NULL;
    REFUSED(SP_ERR_ARGUMENT, "lora_A",
            sp_adapter_from_tensors(config, bytes, &view, 1, &options, &adapter, &error));
    view = whole;
    view.shape = NULL;
    REFUSED(SP_ERR_ARGUMENT, "shape",
            sp_adapter_from_tensors(config, bytes, &view, 1, &options, &adapter, &error));
    view = whole;
    view.n_dims = -1;
    REFUSED(SP_ERR_REFUSED, "dimensions",
            sp_adapter_from_tensors(config, bytes, &view, 1, &options, &adapter, &error));
    view = whole;
    view.name = NULL;
    REFUSED(SP_ERR_ARGUMENT, "name",
            sp_adapter_from_tensors(config, bytes, &view, 1, &options, &adapter, &error));
    view = whole;
    view.device_kind = FOREIGN;
    REFUSED(SP_ERR_ARGUMENT, "device",
            sp_adapter_from_tensors(config, bytes, &view, 1, &options, &adapter, &error));
    assert_null(adapter);
}

static void intakes(void **state)
{
    const int64_t shape[2] = {8, WIDTH};
    sp_tensor_desc tensors[2] = {
        {sizeof tensors[0], "model.layers.0.self_attn.q_proj.lora_A.weight", SP_TENSOR_BF16, 2,
         shape},
        {sizeof tensors[0], "model.layers.0.self_attn.q_proj.lora_B.weight", SP_TENSOR_BF16, 2,
         (const int64_t[]){WIDTH, 8}}};
    sp_wanted_tensor wanted = {.struct_bytes = sizeof wanted};
    size_t bytes = sizeof config - 1, room;
    sp_adapter_options options;
    sp_adapter *adapter = NULL;
    sp_intake *intake = NULL;
    void *memory;

    (void)state;
    sp_adapter_options_default(&options, sizeof options);
    REFUSED(SP_ERR_ARGUMENT, "config",
            sp_intake_create(NULL, bytes, tensors, 2, &options, &intake, &error));
    REFUSED(SP_ERR_ARGUMENT, "tensors",
            sp_intake_create(config, bytes, NULL, 2, &options, &intake, &error));
    REFUSED(SP_ERR_ARGUMENT, "sp_adapter_options",
            sp_intake_create(config, bytes, tensors, 2, NULL, &intake, &error));
    REFUSED(SP_ERR_ARGUMENT, "out_intake",
            sp_intake_create(config, bytes, tensors, 2, &options, NULL, &error));
    assert_null(intake);
    assert_ok(sp_intake_create(config, bytes, tensors, 2, &options, &intake, &error), &error);
    REFUSED(SP_ERR_ARGUMENT, "intake", sp_intake_wanted_at(NULL, 0, &wanted, &error));
    REFUSED(SP_ERR_ARGUMENT, "sp_wanted_tensor", sp_intake_wanted_at(intake, 0, NULL, &error));
    REFUSED(SP_ERR_ARGUMENT, "2", sp_intake_wanted_at(intake, 2, &wanted, &error));
    REFUSED(SP_ERR_ARGUMENT, "intake", sp_intake_next(NULL, 0, &memory, &room, &error));
    REFUSED(SP_ERR_ARGUMENT, "out_memory", sp_intake_next(intake, 0, NULL, &room, &error));
    REFUSED(SP_ERR_ARGUMENT, "out_bytes", sp_intake_next(intake, 0, &memory, NULL, &error));
    REFUSED(SP_ERR_ARGUMENT, "2", sp_intake_next(intake, 2, &memory, &room, &error));
    REFUSED(SP_ERR_ARGUMENT, "intake", sp_intake_take(NULL, 0, 2, &error));
    REFUSED(SP_ERR_ARGUMENT, "2", sp_intake_take(intake, 2, 2, &error));
    REFUSED(SP_ERR_ARGUMENT, "bytes", sp_intake_take(intake, 0, SIZE_MAX, &error));
    REFUSED(SP_ERR_ARGUMENT, "intake", sp_intake_finish(NULL, &adapter, &error));
    REFUSED(SP_ERR_ARGUMENT, "out_adapter", sp_intake_finish(intake, NULL, &error));
    REFUSED(SP_ERR_TRUNCATED, "lora_", sp_intake_finish(intake, &adapter, &error));
    REFUSED(SP_ERR_STATE, "finished", sp_intake_finish(intake, &adapter, &error));
    sp_intake_destroy(intake);
    assert_null(adapter);
}

/* ---- stage --------------------------------------------------------------------------------- */

/* A stage over a pool of its own. */
typedef struct depot {
    sp_pool *pool;
    sp_stage_source disk;
    sp_stage_options options;
    sp_stage *stage;
} depot;

static void depot_open(depot *d)
{
    sp_pool_options pool_options;

    sp_pool_options_default(&pool_options, sizeof pool_options);
    pool_options.layout = w.layout;
    pool_options.device = w.device;
    pool_options.slots = 1;
    assert_ok(sp_pool_create(&pool_options, &d->pool, &error), &error);
    d->disk = (sp_stage_source){.struct_bytes = sizeof d->disk};
    assert_ok(sp_disk_source_create(&d->disk, &error), &error);
    sp_stage_options_default(&d->options, sizeof d->options);
    d->options.pool = d->pool;
    d->options.sources = &d->disk;
    d->options.n_sources = 1;
    assert_ok(sp_stage_create(&d->options, &d->stage, &error), &error);
}

static void depot_close(depot *d)
{
    sp_stage_destroy(d->stage);
    sp_disk_source_destroy(&d->disk);
    sp_pool_destroy(d->pool);
}

static void stages(void **state)
{
    sp_stage *stage = NULL;
    depot d;
    sp_stage_options options;

    (void)state;
    depot_open(&d);
    options = d.options;
    REFUSED(SP_ERR_ARGUMENT, "sp_stage_source", sp_disk_source_create(NULL, &error));
    REFUSED(SP_ERR_ARGUMENT, "adapter", sp_adapter_check_modules(NULL, 0, &error));
    REFUSED(SP_ERR_ARGUMENT, "sp_stage_options", sp_stage_create(NULL, &stage, &error));
    REFUSED(SP_ERR_ARGUMENT, "out_stage", sp_stage_create(&options, NULL, &error));
    options.threads = 65;
    REFUSED(SP_ERR_ARGUMENT, "threads", sp_stage_create(&options, &stage, &error));
    options.threads = -1;
    REFUSED(SP_ERR_ARGUMENT, "threads", sp_stage_create(&options, &stage, &error));
    options.threads = 0;
    options.n_sources = -1;
    REFUSED(SP_ERR_ARGUMENT, "sources", sp_stage_create(&options, &stage, &error));
    options.n_sources = 1;
    options.sources = NULL;
    REFUSED(SP_ERR_ARGUMENT, "source", sp_stage_create(&options, &stage, &error));
    options.sources = &d.disk;
    options.pool = NULL;
    REFUSED(SP_ERR_ARGUMENT, "pool", sp_stage_create(&options, &stage, &error));
    assert_null(stage);
    depot_close(&d);
}

static void stage_loads(void **state)
{
    sp_stage_load_options load;
    uint64_t generation;
    int64_t ticket = -3;
    depot d;

    (void)state;
    depot_open(&d);
    sp_stage_load_options_default(&load, sizeof load);
    load.name = "a";
    load.location = LIBRARY_WORLD_ADAPTER;
    REFUSED(SP_ERR_ARGUMENT, "stage", sp_stage_load(NULL, &load, &ticket, &error));
    REFUSED(SP_ERR_ARGUMENT, "sp_stage_load_options",
            sp_stage_load(d.stage, NULL, &ticket, &error));
    REFUSED(SP_ERR_ARGUMENT, "out_ticket", sp_stage_load(d.stage, &load, NULL, &error));
    REFUSED(SP_ERR_ARGUMENT, "stage", sp_stage_put(NULL, &load, w.adapter, &ticket, &error));
    REFUSED(SP_ERR_ARGUMENT, "sp_stage_load_options",
            sp_stage_put(d.stage, NULL, w.adapter, &ticket, &error));
    REFUSED(SP_ERR_ARGUMENT, "adapter", sp_stage_put(d.stage, &load, NULL, &ticket, &error));
    REFUSED(SP_ERR_ARGUMENT, "out_ticket", sp_stage_put(d.stage, &load, w.adapter, NULL, &error));
    REFUSED(SP_ERR_ARGUMENT, "stage", sp_stage_add(NULL, &load, w.adapter, &error));
    REFUSED(SP_ERR_ARGUMENT, "sp_stage_load_options",
            sp_stage_add(d.stage, NULL, w.adapter, &error));
    REFUSED(SP_ERR_ARGUMENT, "adapter", sp_stage_add(d.stage, &load, NULL, &error));
    load.name = NULL;
    REFUSED(SP_ERR_ARGUMENT, "name", sp_stage_load(d.stage, &load, &ticket, &error));
    load.name = "a";
    load.source = 1;
    REFUSED(SP_ERR_ARGUMENT, "source", sp_stage_load(d.stage, &load, &ticket, &error));
    load.source = -2;
    REFUSED(SP_ERR_ARGUMENT, "source", sp_stage_load(d.stage, &load, &ticket, &error));
    assert_int_equal(ticket, -3);
    REFUSED(SP_ERR_ARGUMENT, "stage", sp_stage_result(NULL, 1, &generation, &error));
    REFUSED(SP_ERR_NOT_FOUND, "99", sp_stage_result(d.stage, 99, &generation, &error));
    REFUSED(SP_ERR_ARGUMENT, "stage", sp_stage_unload(NULL, "a", &error));
    REFUSED(SP_ERR_ARGUMENT, "name", sp_stage_unload(d.stage, NULL, &error));
    REFUSED(SP_ERR_NOT_FOUND, "none", sp_stage_unload(d.stage, "none", &error));
    REFUSED(SP_ERR_ARGUMENT, "stage", sp_stage_set_pinned(NULL, "a", true, &error));
    REFUSED(SP_ERR_ARGUMENT, "name", sp_stage_set_pinned(d.stage, NULL, true, &error));
    REFUSED(SP_ERR_NOT_FOUND, "none", sp_stage_set_pinned(d.stage, "none", true, &error));
    REFUSED(SP_ERR_ARGUMENT, "stage", sp_stage_set_active(NULL, "a", &error));
    REFUSED(SP_ERR_NOT_FOUND, "none", sp_stage_set_active(d.stage, "none", &error));
    depot_close(&d);
}

static void stage_requests(void **state)
{
    sp_hold hold = {.struct_bytes = sizeof hold};
    sp_stage_version_info info = {.struct_bytes = sizeof info};
    sp_stage_stats stats = {.struct_bytes = sizeof stats};
    sp_stage_load_options load;
    depot d;

    (void)state;
    depot_open(&d);
    REFUSED(SP_ERR_ARGUMENT, "stage", sp_stage_hold(NULL, SP_HOLD_BASE, NULL, &hold, &error));
    REFUSED(SP_ERR_ARGUMENT, "name", sp_stage_hold(d.stage, SP_HOLD_NAMED, NULL, &hold, &error));
    REFUSED(SP_ERR_NOT_FOUND, "none", sp_stage_hold(d.stage, SP_HOLD_NAMED, "none", &hold, &error));
    REFUSED(SP_ERR_ARGUMENT, "kind",
            sp_stage_hold(d.stage, (sp_hold_kind)FOREIGN, "a", &hold, &error));
    REFUSED(SP_ERR_ARGUMENT, "sp_hold", sp_stage_hold(d.stage, SP_HOLD_BASE, NULL, NULL, &error));
    REFUSED(SP_ERR_ARGUMENT, "stage", sp_stage_request(NULL, &hold, false, &error));
    REFUSED(SP_ERR_ARGUMENT, "hold", sp_stage_request(d.stage, NULL, false, &error));
    REFUSED(SP_ERR_ARGUMENT, "stage", sp_stage_ask(NULL, &hold, false, &error));
    REFUSED(SP_ERR_ARGUMENT, "hold", sp_stage_ask(d.stage, NULL, false, &error));
    assert_int_equal(sp_stage_poll(NULL), SP_ERR_ARGUMENT);
    assert_int_equal(sp_stage_poll_wait(NULL, 0), SP_AGAIN);
    assert_int_equal(sp_stage_n_versions(NULL), 0);
    REFUSED(SP_ERR_ARGUMENT, "stage", sp_stage_version_at(NULL, 0, &info, &error));
    REFUSED(SP_ERR_ARGUMENT, "index", sp_stage_version_at(d.stage, 0, &info, &error));
    sp_stage_load_options_default(&load, sizeof load);
    load.name = "a";
    load.location = LIBRARY_WORLD_ADAPTER;
    assert_ok(sp_stage_add(d.stage, &load, w.adapter, &error), &error);
    REFUSED(SP_ERR_ARGUMENT, "sp_stage_version_info",
            sp_stage_version_at(d.stage, 0, NULL, &error));
    REFUSED(SP_ERR_ARGUMENT, "sp_stage_version_info", sp_stage_find(d.stage, "a", NULL, &error));
    REFUSED(SP_ERR_ARGUMENT, "stage", sp_stage_find(NULL, "a", &info, &error));
    REFUSED(SP_ERR_ARGUMENT, "name", sp_stage_find(d.stage, NULL, &info, &error));
    REFUSED(SP_ERR_NOT_FOUND, "none", sp_stage_find(d.stage, "none", &info, &error));
    REFUSED(SP_ERR_ARGUMENT, "stage", sp_stage_get_stats(NULL, &stats, &error));
    REFUSED(SP_ERR_ARGUMENT, "sp_stage_stats", sp_stage_get_stats(d.stage, NULL, &error));
    depot_close(&d);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        MISUSE(deltas),         MISUSE(applies),
        MISUSE(outputs),        MISUSE(halves_and_pieces),
        MISUSE(partial_sums),   MISUSE(moe_rows),
        MISUSE(experts),        MISUSE(tokens),
        MISUSE(singles),        MISUSE(grouped),
        MISUSE(views),          MISUSE(intakes),
        MISUSE(stages),         MISUSE(stage_loads),
        MISUSE(stage_requests),
    };
    return cmocka_run_group_tests(tests, misuse_open_world, misuse_close_world);
}
