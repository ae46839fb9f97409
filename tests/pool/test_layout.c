/*
 * The layout of a slot: the check values of two known hybrids, offsets computed by hand, and what
 * is refused.
 */
#include "support/known_sites.h"

#include "base/alloc.h"

#include <sidepath/pool.h>

#include <stdlib.h>
#include <string.h>

#define BIT(module) known_bit(geometry, module)

/* ---- hybrids by hand ----------------------------------------------------------------------- */

/* What decides a hybrid's linear sites; intermediate 0: no dense FFN. */
typedef struct hybrid {
    int32_t layers, full_every; /* every full_every-th layer has full attention */
    int32_t hidden, intermediate, q_width, kv_width, o_width, gdn_value;
} hybrid;

enum { SITES_PER_LAYER_MAX = 7 };

static sp_geometry *make_hybrid(const hybrid *h)
{
    site_dims *sites = calloc((size_t)h->layers * SITES_PER_LAYER_MAX, sizeof *sites);
    sp_geometry *geometry;
    size_t n = 0;

    assert_non_null(sites);
    for (int32_t layer = 0; layer < h->layers; layer++) {
        if (layer % h->full_every == h->full_every - 1) {
            sites[n++] = (site_dims){layer, SP_MODULE_Q_PROJ, h->hidden, h->q_width};
            sites[n++] = (site_dims){layer, SP_MODULE_K_PROJ, h->hidden, h->kv_width};
            sites[n++] = (site_dims){layer, SP_MODULE_V_PROJ, h->hidden, h->kv_width};
            sites[n++] = (site_dims){layer, SP_MODULE_O_PROJ, h->o_width, h->hidden};
        } else {
            sites[n++] = (site_dims){layer, SP_MODULE_GDN_OUT, h->gdn_value, h->hidden};
        }
        if (h->intermediate == 0)
            continue;
        sites[n++] = (site_dims){layer, SP_MODULE_GATE_PROJ, h->hidden, h->intermediate};
        sites[n++] = (site_dims){layer, SP_MODULE_UP_PROJ, h->hidden, h->intermediate};
        sites[n++] = (site_dims){layer, SP_MODULE_DOWN_PROJ, h->intermediate, h->hidden};
    }
    geometry = known_geometry(0, sites, n);
    free(sites);
    return geometry;
}

static void measure(sp_geometry *geometry, int32_t rank, sp_dtype dtype, size_t *slot,
                    size_t *matrices)
{
    sp_layout_options options;
    sp_error error;

    sp_layout_options_default(&options, sizeof options);
    options.geometry = geometry;
    options.rank = rank;
    options.dtype = dtype;
    assert_ok(sp_layout_measure(&options, slot, matrices, &error), &error);
}

static void known_hybrids_have_the_known_bytes(void **state)
{
    /* 24 q heads × 256, gated: q is twice as wide; 4 kv heads × 256. */
    const hybrid large = {64, 4, 5120, 17408, 2 * 24 * 256, 4 * 256, 24 * 256, 6144};
    const hybrid small = {48, 4, 2048, 0, 2 * 16 * 256, 2 * 256, 16 * 256, 4096};
    sp_geometry *geometry = make_hybrid(&large);
    size_t slot, matrices;

    (void)state;
    measure(geometry, 64, SP_DTYPE_BF16, &slot, &matrices);
    assert_int_equal(matrices, 706740224); /* 674.0 MiB */
    assert_int_equal(matrices, 674 * 1048576);
    /* Every matrix here is a multiple of 256 bytes, so alignment adds nothing. */
    assert_int_equal(slot, matrices);
    measure(geometry, 64, SP_DTYPE_F32, &slot, &matrices);
    assert_int_equal(matrices, 2 * 706740224);
    sp_geometry_release(geometry);

    geometry = make_hybrid(&small);
    measure(geometry, 16, SP_DTYPE_BF16, &slot, &matrices);
    assert_int_equal(matrices, 15335424);
    measure(geometry, 9, SP_DTYPE_BF16, &slot, &matrices);
    assert_int_equal(matrices, 15335424); /* 9 takes a stride of 16 */
    sp_geometry_release(geometry);
}

/* ---- a small slot by hand ------------------------------------------------------------------ */

static const site_dims small_sites[] = {
    /* Out of order on purpose. */
    {1, SP_MODULE_DOWN_PROJ, 40, 24}, {0, SP_MODULE_V_PROJ, 24, 10},
    {0, SP_MODULE_Q_PROJ, 24, 5},     {-1, SP_MODULE_LM_HEAD, 24, 100},
    {1, SP_MODULE_Q_PROJ, 24, 5},     {-1, SP_MODULE_EMBED_TOKENS, 100, 24},
    {1, SP_MODULE_ROUTER, 24, 4},     {1, SP_MODULE_EXPERT_UP_PROJ, 24, 6},
};
enum { SMALL_SITES = sizeof small_sites / sizeof *small_sites };

static sp_geometry *make_small(void)
{
    return known_geometry(4, small_sites, SMALL_SITES);
}

static sp_layout_options small_options(sp_geometry *geometry)
{
    sp_layout_options options;

    sp_layout_options_default(&options, sizeof options);
    options.geometry = geometry;
    options.rank = 6;
    return options;
}

typedef struct wanted_site {
    site_dims dims;
    size_t a_offset_bytes, b_offset_bytes;
} wanted_site;

static void expect_site(const sp_layout *layout, int32_t index, wanted_site want)
{
    const sp_geometry *geometry = sp_layout_geometry(layout);
    const sp_layout_site *site = sp_layout_site_at(layout, index);

    assert_non_null(site);
    assert_int_equal(site->site, known_site(geometry, want.dims.layer, want.dims.module));
    assert_int_equal(site->layer, want.dims.layer);
    assert_int_equal(site->kind, sp_known_modules[want.dims.module].kind);
    assert_string_equal(sp_geometry_module_name(geometry, site->module),
                        sp_module_name(want.dims.module));
    assert_int_equal(site->k_in, want.dims.k_in);
    assert_int_equal(site->n_out, want.dims.n_out);
    assert_int_equal(site->a_offset_bytes, want.a_offset_bytes);
    assert_int_equal(site->b_offset_bytes, want.b_offset_bytes);
    assert_int_equal(sp_layout_find(layout, site->site), index);
}

static void offsets_are_those_computed_by_hand(void **state)
{
    sp_geometry *geometry = make_small();
    sp_layout_options options = small_options(geometry);
    sp_layout *layout = NULL;
    const sp_expert_place *place;
    size_t slot, matrices;
    int32_t first;
    sp_error error;

    (void)state;
    assert_ok(sp_layout_create(&options, &layout, &error), &error);
    sp_geometry_release(geometry); /* the layout keeps it, so that it can be asked below */
    assert_int_equal(sp_layout_rank_stride(layout), 8);
    assert_int_equal(sp_layout_dtype(layout), SP_DTYPE_BF16);
    assert_int_equal(sp_layout_modules(layout),
                     BIT(SP_MODULE_Q_PROJ) | BIT(SP_MODULE_V_PROJ) | BIT(SP_MODULE_DOWN_PROJ));
    assert_int_equal(sp_layout_n_sites(layout), 5); /* four in the slot, and the router */
    /* A of q: 8 × 24 × 2 = 384 → 512. B: 5 × 8 × 2 = 80 → 256. B of v: 160 → 256. */
    expect_site(layout, 0, (wanted_site){{0, SP_MODULE_Q_PROJ, 24, 5}, 0, 512});
    expect_site(layout, 1, (wanted_site){{0, SP_MODULE_V_PROJ, 24, 10}, 768, 1280});
    expect_site(layout, 2, (wanted_site){{1, SP_MODULE_Q_PROJ, 24, 5}, 1536, 2048});
    /* A of down: 8 × 40 × 2 = 640 → 768; B: 24 × 8 × 2 = 384 → 512. */
    expect_site(layout, 3, (wanted_site){{1, SP_MODULE_DOWN_PROJ, 40, 24}, 2304, 3072});
    assert_int_equal(sp_layout_slot_bytes(layout), 3584);
    assert_ok(sp_layout_measure(&options, &slot, &matrices, &error), &error);
    assert_int_equal(slot, 3584);
    assert_int_equal(matrices, 384 + 80 + 384 + 160 + 384 + 80 + 640 + 384);
    assert_ok(sp_layout_measure(&options, NULL, NULL, &error), &error);

    assert_int_equal(sp_layout_find(layout, known_site(geometry, -1, SP_MODULE_LM_HEAD)), -1);
    assert_int_equal(sp_layout_find(layout, known_site(geometry, 1, SP_MODULE_ROUTER)), 4);
    assert_true(sp_layout_site_at(layout, 4)->apart);
    assert_int_equal(sp_layout_expert_rank(layout), 64);
    assert_int_equal(sp_layout_n_expert_places(layout), 1);
    place = sp_layout_expert_place_at(layout, 0);
    assert_int_equal(place->layer, 1);
    assert_string_equal(sp_geometry_module_name(geometry, place->module), "mlp.experts.up_proj");
    assert_int_equal(place->k_in, 24);
    assert_int_equal(place->n_out, 6);
    assert_null(sp_layout_expert_place_at(layout, 1));
    assert_null(sp_layout_expert_place_at(layout, -1));
    first = known_site(geometry, 1, SP_MODULE_EXPERT_UP_PROJ);
    for (int32_t expert = 0; expert < 4; expert++)
        assert_int_equal(sp_layout_find_expert_place(layout, first + expert), 0);
    assert_int_equal(sp_layout_find_expert_place(layout, first - 1), -1);
    assert_int_equal(sp_layout_find_expert_place(layout, -1), -1);
    assert_int_equal(sp_layout_find(layout, -1), -1);
    assert_int_equal(sp_layout_find(layout, sp_geometry_n_sites(geometry)), -1);
    assert_null(sp_layout_site_at(layout, -1));
    assert_null(sp_layout_site_at(layout, 5));
    sp_layout_release(layout);
}

/* Slots hold neither routers nor experts: named beside others they change nothing, alone they stand
 * for no choice. */
static void routers_and_experts_are_no_matter_of_the_slots(void **state)
{
    sp_geometry *geometry = make_small();
    sp_layout_options options = small_options(geometry);
    size_t all, one, bytes;

    (void)state;
    assert_ok(sp_layout_measure(&options, &all, NULL, NULL), NULL);
    options.modules = BIT(SP_MODULE_ROUTER) | BIT(SP_MODULE_EXPERT_UP_PROJ);
    assert_ok(sp_layout_measure(&options, &bytes, NULL, NULL), NULL);
    assert_int_equal(bytes, all);
    options.modules = BIT(SP_MODULE_Q_PROJ);
    assert_ok(sp_layout_measure(&options, &one, NULL, NULL), NULL);
    options.modules |= BIT(SP_MODULE_ROUTER) | BIT(SP_MODULE_EXPERT_UP_PROJ);
    assert_ok(sp_layout_measure(&options, &bytes, NULL, NULL), NULL);
    assert_int_equal(bytes, one);
    assert_true(one < all);
    sp_geometry_release(geometry);
}

static void head_and_embeddings_come_first_when_asked_for(void **state)
{
    sp_geometry *geometry = make_small();
    sp_layout_options options = small_options(geometry);
    sp_layout *layout = NULL;
    sp_error error;

    (void)state;
    options.modules = BIT(SP_MODULE_LM_HEAD) | BIT(SP_MODULE_V_PROJ) | BIT(SP_MODULE_EMBED_TOKENS);
    options.dtype = SP_DTYPE_F32;
    assert_ok(sp_layout_create(&options, &layout, &error), &error);
    /* embed A: 8 × 100 × 4 = 3200 → 3328, B: 24 × 8 × 4 = 768; head A: 768, B: 3200 → 3328. */
    expect_site(layout, 0, (wanted_site){{-1, SP_MODULE_EMBED_TOKENS, 100, 24}, 0, 3328});
    expect_site(layout, 1, (wanted_site){{-1, SP_MODULE_LM_HEAD, 24, 100}, 4096, 4864});
    expect_site(layout, 2, (wanted_site){{0, SP_MODULE_V_PROJ, 24, 10}, 8192, 8960});
    sp_layout_release(layout);
    sp_geometry_release(geometry);
}

/* ---- refusals and memory ------------------------------------------------------------------- */

static void refuse(sp_layout_options options, sp_status status, const char *subject)
{
    sp_layout *layout = NULL;
    sp_error error = {.status = SP_OK};

    assert_int_equal(sp_layout_create(&options, &layout, &error), status);
    assert_int_equal(error.status, status);
    assert_string_equal(error.subject, subject);
    assert_null(layout);
    assert_int_equal(sp_layout_measure(&options, NULL, NULL, NULL), status);
}

static void bad_options_are_refused_by_name(void **state)
{
    sp_geometry *geometry = make_small();
    const sp_layout_options good = small_options(geometry);
    sp_layout_options options = good;

    (void)state;
    options.rank = 0;
    refuse(options, SP_ERR_ARGUMENT, "max-lora-rank");
    options.rank = SP_POOL_RANK_MAX + 1;
    refuse(options, SP_ERR_ARGUMENT, "max-lora-rank");
    options = good;
    options.modules = BIT(SP_MODULE_Q_PROJ) | BIT(SP_MODULE_O_PROJ);
    refuse(options, SP_ERR_ARGUMENT, "self_attn.o_proj");
    options.modules = (sp_module_set)1 << 63;
    refuse(options, SP_ERR_ARGUMENT, "modules");
    options = good;
    options.expert_rank = -1;
    refuse(options, SP_ERR_ARGUMENT, "max-lora-expert-rank");
    options.expert_rank = SP_POOL_RANK_MAX + 1;
    refuse(options, SP_ERR_ARGUMENT, "max-lora-expert-rank");
    options = good;
    options.dtype = (sp_dtype)7;
    refuse(options, SP_ERR_ARGUMENT, "");
    options = good;
    options.struct_bytes = 0;
    refuse(options, SP_ERR_ARGUMENT, "sp_layout_options");
    options = good;
    options.geometry = NULL;
    refuse(options, SP_ERR_ARGUMENT, "sp_layout_options");
    sp_geometry_release(geometry);
}

static void a_slot_beyond_the_address_space_is_refused(void **state)
{
    /* Each of 2^18 sites: 4096 × (2^31 - 1) × 4 × 2 bytes, nearly 2^46; with more than 2^18 of
     * them, beyond 2^64. */
    enum { LAYERS = 1 << 16, MODULES = 5 };
    site_dims *sites = calloc(LAYERS * MODULES, sizeof *sites);
    sp_geometry *geometry;
    sp_layout_options options;

    (void)state;
    assert_non_null(sites);
    for (int32_t i = 0; i < LAYERS * MODULES; i++)
        sites[i] = (site_dims){i / MODULES, (sp_module)(i % MODULES), INT32_MAX, INT32_MAX};
    geometry = known_geometry(0, sites, LAYERS * MODULES);
    options = small_options(geometry);
    options.rank = SP_POOL_RANK_MAX;
    options.dtype = SP_DTYPE_F32;
    refuse(options, SP_ERR_TOO_LARGE, "max-lora-rank");
    sp_geometry_release(geometry);
    free(sites);
}

static void a_geometry_without_linear_modules_is_refused(void **state)
{
    sp_geometry *geometry = known_geometry(0, &small_sites[3], 1);

    (void)state;
    refuse(small_options(geometry), SP_ERR_ARGUMENT, "modules");
    sp_geometry_release(geometry);
}

static void every_failed_allocation_is_survived(void **state)
{
    size_t before = sp_alloc_bytes(), after_geometry;
    sp_geometry *geometry = make_small();
    sp_layout_options options = small_options(geometry);
    sp_layout *layout = NULL;
    sp_error error;
    int64_t n = 0;

    (void)state;
    after_geometry = sp_alloc_bytes();
    for (;; n++) {
        sp_alloc_fail_after(n);
        if (sp_layout_create(&options, &layout, &error) == SP_OK)
            break;
        assert_true(sp_alloc_failed());
        assert_int_equal(error.status, SP_ERR_MEMORY);
        assert_null(layout);
        assert_int_equal(sp_alloc_bytes(), after_geometry);
    }
    sp_alloc_fail_after(-1);
    assert_int_equal(n, 6);
    sp_layout_retain(layout);
    sp_layout_release(layout);
    assert_int_equal(sp_layout_n_sites(layout), 5); /* one reference is left */
    sp_layout_release(layout);
    sp_layout_release(NULL);
    sp_geometry_release(geometry);
    assert_int_equal(sp_alloc_bytes(), before);
}

/* One memory for both tables is what a tied head is; the geometry must say so. */
static void one_table_for_both_sides_is_a_tied_head(void **state)
{
    sp_site rows[] = {{.path = "model.embed_tokens", .kind = SP_SITE_EMBEDDING},
                      {.path = "lm_head", .kind = SP_SITE_HEAD},
                      {.path = "model.layers.0.self_attn.q_proj", .kind = SP_SITE_LINEAR}};
    static const float data[2][4 * 4];
    sp_served_table embed = {sizeof embed, data[0], SP_DTYPE_F32, 4, 4, false}, head = embed;
    sp_layout *layout = NULL;
    sp_error error;

    (void)state;
    for (int i = 0; i < 3; i++) {
        rows[i].struct_bytes = sizeof rows[i];
        rows[i].layer = i == 2 ? 0 : -1;
        rows[i].expert = rows[i].group = -1;
        rows[i].k_in = rows[i].n_out = 4;
    }
    for (int i = 0; i < 4; i++) {
        sp_layout_options options;
        bool is_same = i & 1, is_tied = i & 2;

        rows[1].tied = is_tied;
        head.data = data[!is_same];
        sp_layout_options_default(&options, sizeof options);
        assert_ok(sp_geometry_create(rows, 3, &options.geometry, &error), &error);
        options.rank = 8;
        options.served_embed = &embed;
        options.served_head = &head;
        if (is_same && !is_tied) {
            assert_int_equal(sp_layout_create(&options, &layout, &error), SP_ERR_ARGUMENT);
            assert_string_equal(error.subject, "served_head");
            assert_non_null(strstr(error.text, "lm_head"));
            assert_null(layout);
        } else {
            assert_ok(sp_layout_create(&options, &layout, &error), &error);
            sp_layout_release(layout);
            layout = NULL;
        }
        sp_geometry_release(options.geometry);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_table_for_both_sides_is_a_tied_head),
        cmocka_unit_test(known_hybrids_have_the_known_bytes),
        cmocka_unit_test(offsets_are_those_computed_by_hand),
        cmocka_unit_test(routers_and_experts_are_no_matter_of_the_slots),
        cmocka_unit_test(head_and_embeddings_come_first_when_asked_for),
        cmocka_unit_test(bad_options_are_refused_by_name),
        cmocka_unit_test(a_slot_beyond_the_address_space_is_refused),
        cmocka_unit_test(a_geometry_without_linear_modules_is_refused),
        cmocka_unit_test(every_failed_allocation_is_survived),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
