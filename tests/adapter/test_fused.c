/*
 * Fused expert pairs: what each expert's delta is, in both orientations of PEFT and both orders of
 * columns, against the merge that PEFT does, written out here; and what is refused as ambiguous.
 */
#include "adapter/toy.h"
#include "support/known_sites.h"

#include "base/alloc.h"
#include "base/half.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#define EXPERTS_PATH "base_model.model.model.layers.0.mlp.experts"
#define INNER_PATH   EXPERTS_PATH ".base_layer"

/* A model of one layer with experts of any size. */
static sp_geometry *expert_geometry(int hidden, int intermediate, int experts)
{
    const site_dims sites[] = {
        {0, SP_MODULE_Q_PROJ, hidden, hidden},
        {0, SP_MODULE_EXPERT_GATE_PROJ, hidden, intermediate},
        {0, SP_MODULE_EXPERT_UP_PROJ, hidden, intermediate},
        {0, SP_MODULE_EXPERT_DOWN_PROJ, intermediate, hidden},
    };
    return known_geometry(experts, sites, 4);
}

/* The config without a version, so that the shapes must tell; members as in make_adapter. */
static void config_without_version(make_adapter *adapter, const char *more)
{
    char text[512];

    snprintf(text, sizeof text, "{\"r\": 2, \"lora_alpha\": 6%s}", more);
    make_adapter_config(adapter, text);
}

static double half_at(const uint16_t *data, int64_t index)
{
    return (double)sp_bf16_to_f32(data[index]);
}

static double factor_at(const sp_factor *factor, int row, int col)
{
    return half_at(factor->data, row * factor->row_stride + col * factor->col_stride);
}

static const sp_adapter_site *site_of(const sp_adapter *adapter, sp_module module, int expert)
{
    for (size_t i = 0; i < sp_adapter_n_sites(adapter); i++) {
        const sp_adapter_site *site = sp_adapter_site_at(adapter, i);

        if (strcmp(site->module, sp_module_name(module)) == 0 && site->expert == expert)
            return site;
    }
    fail_msg("no site of module %d, expert %d", module, expert);
    return NULL;
}

/* Element (out, in) of the delta that a site stands for, without its scale. */
static double delta_at(const sp_adapter_site *site, int out, int in)
{
    double sum = 0;

    for (int j = 0; j < site->rank; j++)
        sum += factor_at(&site->b, out, j) * factor_at(&site->a, j, in);
    return sum;
}

/* A fused parameter as a test wants it: the file's A and B, and how they are to be read. */
typedef struct parameter {
    const uint16_t *a, *b; /* A [E r, a_width], B [b_width, E r] */
    int a_width, b_width, experts, rank;
    bool swapped, grouped;
} parameter;

/*
 * PEFT's merge. A, reshaped to (E, r, a_width), and B, reshaped to (b_width, r, E), give
 * Σ_j B[o, j, e] A[e, j, i]: since 0.19 the delta of element (o, i), before of (i, o).
 */
static double merged(const parameter *p, int expert, int out, int in)
{
    int row = p->swapped ? in : out;
    int col = p->swapped ? out : in;
    double sum = 0;

    for (int j = 0; j < p->rank; j++) {
        int column = p->grouped ? expert * p->rank + j : j * p->experts + expert;

        sum += half_at(p->b, (int64_t)row * p->experts * p->rank + column) *
               half_at(p->a, (int64_t)(expert * p->rank + j) * p->a_width + col);
    }
    return sum;
}

static void compare_site(const sp_adapter *adapter, sp_module module, const parameter *p,
                         int expert, int first_out, int n_out, int n_in)
{
    const sp_adapter_site *site = site_of(adapter, module, expert);

    assert_int_equal(site->rank, p->rank);
    assert_int_equal(site->a.rows, p->rank);
    assert_int_equal(site->a.cols, n_in);
    assert_int_equal(site->b.rows, n_out);
    assert_int_equal(site->b.cols, p->rank);
    for (int out = 0; out < n_out; out++) {
        for (int in = 0; in < n_in; in++) {
            double want = merged(p, expert, first_out + out, in);

            if (fabs(delta_at(site, out, in) - want) > 1e-12)
                fail_msg("module %d, expert %d: (%d, %d) is %g, not %g", module, expert, out, in,
                         delta_at(site, out, in), want);
        }
    }
}

/* Adds a fused pair for the parameter whose linear reading has these widths. */
static parameter add_fused(make_adapter *adapter, const char *path, int experts, int rank, int in,
                           int out, bool swapped, uint64_t seed)
{
    parameter p = {.a_width = swapped ? out : in,
                   .b_width = swapped ? in : out,
                   .experts = experts,
                   .rank = rank,
                   .swapped = swapped};
    char name[256];

    make_adapter_add_pair(adapter, path, experts * rank, p.a_width, p.b_width, seed);
    snprintf(name, sizeof name, "%s.lora_A.weight", path);
    p.a = make_adapter_data(adapter, name, NULL);
    snprintf(name, sizeof name, "%s.lora_B.weight", path);
    p.b = make_adapter_data(adapter, name, NULL);
    return p;
}

/* Both parameters, in every orientation and order of columns, told by version and marker. */
static void both_parameters(void **state)
{
    static const int E = 4, H = 8, I = 3;
    sp_adapter_options options = toy_options();

    (void)state;
    sp_geometry_release(options.geometry);
    options.geometry = expert_geometry(H, I, E);
    for (int form = 0; form < 4; form++) {
        bool swapped = form & 1, grouped = form & 2;
        make_adapter *adapter = make_adapter_create();
        parameter gate_up = add_fused(adapter, INNER_PATH, E, 2, H, 2 * I, swapped, 1);
        parameter down = add_fused(adapter, EXPERTS_PATH, E, 2, I, H, swapped, 2);
        sp_adapter *opened;
        char config[256];

        snprintf(config, sizeof config,
                 "{\"r\": 2, \"lora_alpha\": 6, \"peft_version\": \"%s\", \"lora_B_layout\": "
                 "\"%s\"}",
                 swapped ? "0.18.1" : "0.19.0", grouped ? "grouped_by_expert" : "rank_major");
        make_adapter_config(adapter, config);
        gate_up.grouped = down.grouped = grouped;
        opened = toy_opened(adapter, &options);
        assert_int_equal(sp_adapter_n_sites(opened), 3 * E);
        for (int e = 0; e < E; e++) {
            compare_site(opened, SP_MODULE_EXPERT_GATE_PROJ, &gate_up, e, 0, I, H);
            compare_site(opened, SP_MODULE_EXPERT_UP_PROJ, &gate_up, e, I, I, H);
            compare_site(opened, SP_MODULE_EXPERT_DOWN_PROJ, &down, e, 0, H, I);
            assert_true(site_of(opened, SP_MODULE_EXPERT_DOWN_PROJ, e)->scale == 3.0f);
        }
        sp_adapter_release(opened);
        make_adapter_destroy(adapter);
    }
    sp_geometry_release(options.geometry);
}

/* One parameter alone, without a version: the shapes tell which, and in which orientation. */
static void one_parameter_by_shape(void **state)
{
    static const int E = 2, H = 8, I = 3;
    sp_adapter_options options = toy_options();

    (void)state;
    sp_geometry_release(options.geometry);
    options.geometry = expert_geometry(H, I, E);
    for (int form = 0; form < 4; form++) {
        bool swapped = form & 1, is_down = form & 2;
        make_adapter *adapter = make_adapter_create();
        parameter p = add_fused(adapter, EXPERTS_PATH, E, 2, is_down ? I : H, is_down ? H : 2 * I,
                                swapped, 5);
        sp_adapter *opened;

        config_without_version(adapter, "");
        opened = toy_opened(adapter, &options);
        assert_int_equal(sp_adapter_n_sites(opened), is_down ? E : 2 * E);
        for (int e = 0; e < E; e++) {
            if (is_down) {
                compare_site(opened, SP_MODULE_EXPERT_DOWN_PROJ, &p, e, 0, H, I);
                continue;
            }
            compare_site(opened, SP_MODULE_EXPERT_GATE_PROJ, &p, e, 0, I, H);
            compare_site(opened, SP_MODULE_EXPERT_UP_PROJ, &p, e, I, I, H);
        }
        sp_adapter_release(opened);
        make_adapter_destroy(adapter);
    }
    sp_geometry_release(options.geometry);
}

/* The patterns are matched with the parameter's path: gate_up at twice the rank, as PEFT writes. */
static void patterns_of_parameters(void **state)
{
    sp_adapter_options options = toy_options();
    make_adapter *adapter = make_adapter_create();
    sp_adapter *opened;

    (void)state;
    make_adapter_config_with(adapter, ", \"rank_pattern\": {\".*\\\\.gate_up_proj\": 4}, "
                                      "\"alpha_pattern\": {\".*\\\\.gate_up_proj\": 6}");
    add_fused(adapter, INNER_PATH, TOY_EXPERTS, 4, TOY_HIDDEN, 2 * TOY_INTERMEDIATE, false, 1);
    add_fused(adapter, EXPERTS_PATH, TOY_EXPERTS, 2, TOY_INTERMEDIATE, TOY_HIDDEN, false, 2);
    opened = toy_opened(adapter, &options);
    assert_int_equal(site_of(opened, SP_MODULE_EXPERT_GATE_PROJ, 3)->rank, 4);
    assert_true(site_of(opened, SP_MODULE_EXPERT_GATE_PROJ, 3)->scale == 1.5f);
    assert_int_equal(site_of(opened, SP_MODULE_EXPERT_DOWN_PROJ, 3)->rank, 2);
    assert_true(site_of(opened, SP_MODULE_EXPERT_DOWN_PROJ, 3)->scale == 2.0f);
    sp_adapter_release(opened);
    make_adapter_destroy(adapter);
    sp_geometry_release(options.geometry);
}

/* Names of the modules that a fused parameter holds are found in it. */
static void names_of_fused_modules(void **state)
{
    static const struct {
        const char *members, *lacking;
    } cases[] = {
        {", \"target_modules\": [\"gate_proj\", \"up_proj\", \"down_proj\"]", NULL},
        {", \"target_modules\": [\"experts.gate_up_proj\", \"experts.down_proj\"]", NULL},
        {", \"target_modules\": [\"up_proj\", \"q_proj\"]", "q_proj"},
    };
    sp_adapter_options options = toy_options();
    make_adapter *adapter = make_adapter_create();

    (void)state;
    add_fused(adapter, INNER_PATH, TOY_EXPERTS, 2, TOY_HIDDEN, 2 * TOY_INTERMEDIATE, false, 1);
    add_fused(adapter, EXPERTS_PATH, TOY_EXPERTS, 2, TOY_INTERMEDIATE, TOY_HIDDEN, false, 2);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        make_adapter_config_with(adapter, cases[i].members);
        if (cases[i].lacking)
            toy_refused(adapter, &options, "unmatched-target", cases[i].lacking, NULL,
                        cases[i].members);
        else
            sp_adapter_release(toy_opened(adapter, &options));
    }
    make_adapter_destroy(adapter);
    sp_geometry_release(options.geometry);
}

/* The router that target_parameters names goes by the parameter's path, else by the module's. */
static void router_by_its_path(void **state)
{
    static const struct {
        const char *members;
        float scale;
    } cases[] = {
        {", \"target_parameters\": [\"gate.weight\"], \"alpha_pattern\": {\"mlp.gate.weight\": 3}",
         1.5f},
        {", \"target_parameters\": [\"mlp.gate.weight\"], \"alpha_pattern\": {\"mlp.gate\": 3}", 2},
        {", \"target_modules\": [\"gate\"], \"alpha_pattern\": {\"mlp.gate\": 3}", 1.5f},
        {", \"target_modules\": [\"gate\"], \"alpha_pattern\": {\"mlp.gate.weight\": 3}", 2},
    };
    sp_adapter_options options = toy_options();
    make_adapter *adapter = make_adapter_create();

    (void)state;
    make_adapter_add_pair(adapter, "base_model.model.model.layers.0.mlp.gate", 2, 8, 4, 4);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        sp_adapter *opened;

        make_adapter_config_with(adapter, cases[i].members);
        opened = toy_opened(adapter, &options);
        assert_true(sp_adapter_site_at(opened, 0)->scale == cases[i].scale);
        sp_adapter_release(opened);
    }
    make_adapter_destroy(adapter);
    sp_geometry_release(options.geometry);
}

/* rsLoRA on attention and experts: one function, of the per-expert rank. */
static void rslora_everywhere(void **state)
{
    sp_adapter_options options = toy_options();
    make_adapter *adapter = make_adapter_create();
    sp_adapter *opened;

    (void)state;
    make_adapter_config(adapter, "{\"r\": 4, \"lora_alpha\": 6, \"use_rslora\": true, "
                                 "\"peft_version\": \"0.21.0\"}");
    add_fused(adapter, INNER_PATH, TOY_EXPERTS, 4, TOY_HIDDEN, 2 * TOY_INTERMEDIATE, false, 1);
    add_fused(adapter, EXPERTS_PATH, TOY_EXPERTS, 4, TOY_INTERMEDIATE, TOY_HIDDEN, false, 2);
    make_adapter_add_pair(adapter, "base_model.model.model.layers.0.self_attn.q_proj", 4, 8, 12, 3);
    make_adapter_add_pair(adapter, "base_model.model.model.layers.0.mlp.gate", 4, 8, 4, 4);
    opened = toy_opened(adapter, &options);
    for (size_t i = 0; i < sp_adapter_n_sites(opened); i++)
        assert_true(sp_adapter_site_at(opened, i)->scale == 3.0f);
    sp_adapter_release(opened);
    make_adapter_destroy(adapter);
    sp_geometry_release(options.geometry);
}

/* ---- what the shapes cannot tell ------------------------------------------------------------- */

/* gate_up alone at hidden = 2 · intermediate, and down alone at hidden = intermediate. */
static void ambiguous_shapes(void **state)
{
    static const struct {
        int intermediate, in, out;
    } cases[] = {{4, 8, 8}, {8, 8, 8}};
    sp_adapter_options options = toy_options();

    (void)state;
    for (int i = 0; i < 2; i++) {
        make_adapter *adapter = make_adapter_create();

        sp_geometry_release(options.geometry);
        options.geometry = expert_geometry(8, cases[i].intermediate, 2);
        options.expert_layout = SP_EXPERT_LAYOUT_AUTO;
        add_fused(adapter, EXPERTS_PATH, 2, 2, cases[i].in, cases[i].out, false, 5);
        config_without_version(adapter, "");
        toy_refused(adapter, &options, "ambiguous-expert-layout", EXPERTS_PATH ".lora_A.weight",
                    "2 ways", "no version");
        config_without_version(adapter, ", \"peft_version\": \"0.19.0.dev0\"");
        toy_refused(adapter, &options, "ambiguous-expert-layout", NULL, NULL, "a development one");
        config_without_version(adapter, ", \"peft_version\": \"0.19.0rc1\"");
        toy_refused(adapter, &options, "ambiguous-expert-layout", NULL, NULL, "a candidate");
        config_without_version(adapter, ", \"peft_version\": \"0.21.0\"");
        sp_adapter_release(toy_opened(adapter, &options));
        config_without_version(adapter, "");
        options.expert_layout = SP_EXPERT_LAYOUT_SWAPPED;
        sp_adapter_release(toy_opened(adapter, &options));
        options.expert_layout = SP_EXPERT_LAYOUT_LINEAR;
        sp_adapter_release(toy_opened(adapter, &options));
        make_adapter_destroy(adapter);
    }
    sp_geometry_release(options.geometry);
}

/* The version and the flag lead to different deltas of the same file. */
static void orientation_matters(void **state)
{
    sp_adapter_options options = toy_options();
    make_adapter *adapter = make_adapter_create();
    parameter p = add_fused(adapter, EXPERTS_PATH, 2, 2, 8, 8, false, 5);
    sp_digest digests[2];

    (void)state;
    sp_geometry_release(options.geometry);
    options.geometry = expert_geometry(8, 8, 2);
    for (int swapped = 0; swapped < 2; swapped++) {
        sp_adapter *opened;

        config_without_version(adapter, swapped ? ", \"peft_version\": \"0.18.0\""
                                                : ", \"peft_version\": \"1.0.0\"");
        p.swapped = swapped;
        opened = toy_opened(adapter, &options);
        for (int e = 0; e < 2; e++)
            compare_site(opened, SP_MODULE_EXPERT_DOWN_PROJ, &p, e, 0, 8, 8);
        digests[swapped] = sp_adapter_digest(opened);
        sp_adapter_release(opened);
    }
    assert_memory_not_equal(digests[0].bytes, digests[1].bytes, SP_DIGEST_BYTES);
    make_adapter_destroy(adapter);
    sp_geometry_release(options.geometry);
}

/* The same file with and without the marker of the other order of columns: another delta. */
static void order_of_columns_is_in_the_digest(void **state)
{
    sp_adapter_options options = toy_options();
    make_adapter *adapter = make_adapter_create();
    sp_digest digests[2];

    (void)state;
    add_fused(adapter, EXPERTS_PATH, TOY_EXPERTS, 2, 3, 8, false, 5);
    for (int grouped = 0; grouped < 2; grouped++) {
        sp_adapter *opened;

        make_adapter_config_with(adapter, grouped ? ", \"target_parameters\": [\"down_proj\"], "
                                                    "\"lora_B_layout\": \"grouped_by_expert\""
                                                  : ", \"target_parameters\": [\"down_proj\"]");
        opened = toy_opened(adapter, &options);
        digests[grouped] = sp_adapter_digest(opened);
        sp_adapter_release(opened);
    }
    assert_memory_not_equal(digests[0].bytes, digests[1].bytes, SP_DIGEST_BYTES);
    make_adapter_destroy(adapter);
    sp_geometry_release(options.geometry);
}

/* ---- refusals -------------------------------------------------------------------------------- */

static void refused(void **state)
{
    sp_adapter_options options = toy_options();
    make_adapter *adapter;

    (void)state;
    /* Only the inner one of two nested pairs. */
    adapter = make_adapter_create();
    add_fused(adapter, INNER_PATH, TOY_EXPERTS, 2, 8, 6, false, 1);
    toy_refused(adapter, &options, "unpaired-tensor", INNER_PATH ".lora_A.weight", NULL, "inner");
    make_adapter_destroy(adapter);
    /* The config promises both, the file has one. */
    adapter = make_adapter_create();
    make_adapter_config_with(adapter, ", \"target_parameters\": [\"mlp.experts.gate_up_proj\", "
                                      "\"mlp.experts.down_proj\"]");
    add_fused(adapter, EXPERTS_PATH, TOY_EXPERTS, 2, 3, 8, false, 1);
    toy_refused(adapter, &options, "unmatched-target", "mlp.experts.gate_up_proj", NULL, "outer");
    options.allow_partial = true;
    sp_adapter_release(toy_opened(adapter, &options));
    options.allow_partial = false;
    make_adapter_destroy(adapter);
    /* It says gate_up, the shapes say down. */
    adapter = make_adapter_create();
    make_adapter_config_with(adapter, ", \"target_parameters\": [\"gate_up_proj\"]");
    add_fused(adapter, EXPERTS_PATH, TOY_EXPERTS, 2, 3, 8, false, 1);
    toy_refused(adapter, &options, "shape-mismatch", NULL, "gate_up_proj", "said gate_up");
    make_adapter_destroy(adapter);
    /* Experts of another number, another size. */
    adapter = make_adapter_create();
    add_fused(adapter, EXPERTS_PATH, TOY_EXPERTS + 1, 2, 3, 8, false, 1);
    toy_refused(adapter, &options, "rank-mismatch", NULL, "10 rows", "5 experts");
    make_adapter_destroy(adapter);
    adapter = make_adapter_create();
    add_fused(adapter, EXPERTS_PATH, TOY_EXPERTS, 2, 5, 8, false, 1);
    toy_refused(adapter, &options, "shape-mismatch", NULL, "[8, 5]", "intermediate 5");
    make_adapter_destroy(adapter);
    /* One expert inside a fused pair and by itself. */
    adapter = make_adapter_create();
    add_fused(adapter, EXPERTS_PATH, TOY_EXPERTS, 2, 3, 8, false, 1);
    make_adapter_add_pair(adapter, EXPERTS_PATH ".2.down_proj", 2, 3, 8, 4);
    toy_refused(adapter, &options, "duplicate-tensor", NULL, "expert 2", "expert 2 twice");
    make_adapter_destroy(adapter);
    sp_geometry_release(options.geometry);
}

/* A and B of one pair disagree about E · r. */
static void rows_and_columns_differ(void **state)
{
    sp_adapter_options options = toy_options();
    make_adapter *adapter = make_adapter_create();

    (void)state;
    make_adapter_add_random(adapter, EXPERTS_PATH ".lora_A.weight", 8, 3, 1);
    make_adapter_add_random(adapter, EXPERTS_PATH ".lora_B.weight", 8, 12, 2);
    toy_refused(adapter, &options, "shape-mismatch", EXPERTS_PATH ".lora_B.weight", "12 columns",
                "8 against 12");
    make_adapter_destroy(adapter);
    sp_geometry_release(options.geometry);
}

/* Any experts of a per-expert file: absent means no delta. */
static void some_experts_only(void **state)
{
    sp_adapter_options options = toy_options();
    make_adapter *adapter = make_adapter_create();
    sp_adapter *opened;

    (void)state;
    make_adapter_add_pair(adapter, EXPERTS_PATH ".3.up_proj", 2, 8, 3, 1);
    make_adapter_add_pair(adapter, EXPERTS_PATH ".0.down_proj", 2, 3, 8, 2);
    opened = toy_opened(adapter, &options);
    assert_int_equal(sp_adapter_n_sites(opened), 2);
    assert_int_equal(sp_adapter_site_at(opened, 0)->expert, 3);
    assert_int_equal(sp_adapter_site_at(opened, 1)->expert, 0);
    assert_int_equal(sp_adapter_rank_max(opened), 0);
    sp_adapter_release(opened);
    make_adapter_destroy(adapter);
    sp_geometry_release(options.geometry);
}

/* Without a model a fused pair is checked as far as the files go, and gives no sites. */
static void without_a_model(void **state)
{
    sp_adapter_options options = toy_options();
    make_adapter *adapter = make_adapter_create();
    sp_adapter *opened;

    (void)state;
    sp_geometry_release(options.geometry);
    options.geometry = NULL;
    add_fused(adapter, EXPERTS_PATH, 3, 2, 3, 8, false, 1);
    opened = toy_opened(adapter, &options);
    assert_int_equal(sp_adapter_n_sites(opened), 0);
    sp_adapter_release(opened);
    make_adapter_config(adapter, "{\"r\": 5, \"lora_alpha\": 6}");
    toy_refused(adapter, &options, "rank-mismatch", NULL, "6 rows", "rank 5 into 6 rows");
    make_adapter_destroy(adapter);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(both_parameters),
        cmocka_unit_test(one_parameter_by_shape),
        cmocka_unit_test(patterns_of_parameters),
        cmocka_unit_test(names_of_fused_modules),
        cmocka_unit_test(router_by_its_path),
        cmocka_unit_test(rslora_everywhere),
        cmocka_unit_test(ambiguous_shapes),
        cmocka_unit_test(orientation_matters),
        cmocka_unit_test(order_of_columns_is_in_the_digest),
        cmocka_unit_test(refused),
        cmocka_unit_test(rows_and_columns_differ),
        cmocka_unit_test(some_experts_only),
        cmocka_unit_test(without_a_model),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
