/*
 * Opening: pairs, names, types, values, limits, what has no effect, and the digest.
 */
#include "adapter/toy.h"
#include "support/hand.h"

#include <sidepath/pool.h>

#include "base/alloc.h"
#include "base/file.h"
#include "base/half.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define Q_PATH "base_model.model.model.layers.0.self_attn.q_proj"
#define V_PATH "base_model.model.model.layers.0.self_attn.v_proj"
#define K_PATH "base_model.model.model.layers.0.self_attn.k_proj"

static sp_digest digest_of(const make_adapter *adapter, const sp_adapter_options *options)
{
    sp_adapter *opened = toy_opened(adapter, options);
    sp_digest digest = sp_adapter_digest(opened);

    sp_adapter_release(opened);
    return digest;
}

static bool same_digest(sp_digest a, sp_digest b)
{
    return memcmp(a.bytes, b.bytes, sizeof a.bytes) == 0;
}

/* ---- sites ----------------------------------------------------------------------------------- */

/* Any subset of q, k, v, o: what is absent has no site. */
static void any_subset(void **state)
{
    static const struct {
        const char *path;
        int k_in, n_out;
    } modules[] = {{Q_PATH, 8, 12},
                   {K_PATH, 8, 6},
                   {V_PATH, 8, 6},
                   {"base_model.model.model.layers.0.self_attn.o_proj", 12, 8}};
    sp_adapter_options options = toy_options();

    (void)state;
    for (unsigned subset = 1; subset < 16; subset++) {
        make_adapter *adapter = make_adapter_create();
        sp_adapter *opened;
        size_t n = 0;

        for (unsigned m = 0; m < 4; m++) {
            if (subset >> m & 1)
                make_adapter_add_pair(adapter, modules[m].path, 2, modules[m].k_in,
                                      modules[m].n_out, m);
        }
        opened = toy_opened(adapter, &options);
        assert_int_equal(sp_adapter_modules(opened), subset);
        for (unsigned m = 0; m < 4; m++) {
            const sp_adapter_site *site = sp_adapter_site_at(opened, n);

            if (!(subset >> m & 1))
                continue;
            assert_string_equal(site->path, modules[m].path + strlen("base_model.model."));
            assert_int_equal(sp_geometry_find(options.geometry, site->path), site->site);
            assert_ptr_equal(sp_adapter_geometry(opened), options.geometry);
            assert_int_equal(site->a.cols, modules[m].k_in);
            assert_int_equal(site->b.rows, modules[m].n_out);
            n++;
        }
        assert_int_equal(sp_adapter_n_sites(opened), n);
        assert_null(sp_adapter_site_at(opened, n));
        sp_adapter_release(opened);
        make_adapter_destroy(adapter);
    }
    sp_geometry_release(options.geometry);
}

/* Elements after a tensor of odd size are still aligned, whatever the file's offsets. */
static void factors_are_aligned(void **state)
{
    sp_adapter_options options = toy_options();
    make_adapter *adapter = make_adapter_create();
    sp_adapter *opened;
    float *data;

    (void)state;
    make_adapter_config_with(adapter, ", \"rank_pattern\": {\"linear_attn.out_proj\": 1}");
    make_adapter_add_pair(adapter, "model.layers.1.linear_attn.out_proj", 1, 5, 8, 1);
    data =
        make_adapter_add(adapter, "model.layers.0.self_attn.q_proj.lora_A.weight", "F32", 2, 2, 8);
    data[0] = 1;
    data =
        make_adapter_add(adapter, "model.layers.0.self_attn.q_proj.lora_B.weight", "F32", 2, 12, 2);
    data[0] = 2.5f;
    opened = toy_opened(adapter, &options);
    for (size_t i = 0; i < 2; i++) {
        const sp_adapter_site *site = sp_adapter_site_at(opened, i);

        assert_int_equal((uintptr_t)site->a.data % 64, 0);
        assert_int_equal((uintptr_t)site->b.data % 64, 0);
    }
    assert_true(((const float *)sp_adapter_site_at(opened, 0)->b.data)[0] == 2.5f);
    sp_adapter_release(opened);
    make_adapter_destroy(adapter);
    sp_geometry_release(options.geometry);
}

static void references(void **state)
{
    sp_adapter_options options = toy_options();
    make_adapter *adapter = toy_adapter();
    sp_adapter *opened;

    (void)state;
    options.name = "a name";
    opened = toy_opened(adapter, &options);
    assert_string_equal(sp_adapter_name(opened), "a name");
    assert_ptr_equal(sp_adapter_retain(opened), opened);
    sp_adapter_release(opened);
    assert_int_equal(sp_adapter_n_sites(opened), 2);
    assert_int_equal(sp_adapter_rank_max(opened), 2);
    assert_int_equal(sp_adapter_n_tables(opened), 0);
    assert_null(sp_adapter_table_at(opened, 0));
    assert_int_equal(sp_layout_expert_bytes(opened, SP_DTYPE_BF16), 0);
    assert_int_equal(sp_adapter_overlay_bytes(opened), 0);
    assert_true(sp_adapter_hash_seconds(opened) > 0 && sp_adapter_hash_seconds(opened) < 60);
    sp_adapter_release(opened);
    sp_adapter_release(NULL);
    make_adapter_destroy(adapter);
    sp_geometry_release(options.geometry);
}

static void wrong_calls(void **state)
{
    sp_adapter_options options = toy_options();
    sp_adapter *opened = NULL;
    sp_error error;

    (void)state;
    assert_int_equal(sp_adapter_open(NULL, &options, &opened, &error), SP_ERR_ARGUMENT);
    assert_int_equal(sp_adapter_open(".", NULL, &opened, &error), SP_ERR_ARGUMENT);
    assert_int_equal(sp_adapter_open(".", &options, NULL, &error), SP_ERR_ARGUMENT);
    options.pool_dtype = (sp_dtype)9;
    assert_int_equal(sp_adapter_open(".", &options, &opened, &error), SP_ERR_ARGUMENT);
    options.pool_dtype = SP_DTYPE_BF16;
    options.struct_bytes = 0;
    assert_int_equal(sp_adapter_open(".", &options, &opened, &error), SP_ERR_ARGUMENT);
    assert_null(opened);
    sp_geometry_release(options.geometry);
}

/* ---- pairs and names ------------------------------------------------------------------------- */

/* One more tensor beside a good pair, or a changed one: name, shape, code, a word of the text. */
static const struct {
    const char *name;
    int rows, cols;
    const char *code, *word;
} extra_tensors[] = {
    {K_PATH ".lora_A.weight", 2, 8, "unpaired-tensor", "lora_B"},
    {K_PATH ".lora_B.weight", 6, 2, "unpaired-tensor", "lora_A"},
    {"model.layers.0.self_attn.q_proj.lora_A.weight", 2, 8, "duplicate-tensor", "same place"},
    {K_PATH ".lora_A.default.weight", 2, 8, "mixed-adapter-names", "default"},
    {K_PATH ".lora_magnitude_vector", 6, 1, "dora", "lora_magnitude_vector"},
    {K_PATH ".bias", 6, 1, "bias", ".bias"},
    {K_PATH ".lora_B.bias", 6, 1, "bias", "lora_B.bias"},
    {K_PATH ".extra_key", 6, 1, "unrecognized-tensor", "extra_key"},
    {"extra_key", 6, 1, "not-peft-key", "extra_key"},
    {"base_model.model.score.weight", 6, 1, "unrecognized-tensor", "score.weight"},
    {"base_model.model.mtp.layers.0.self_attn.k_proj.lora_A.weight", 2, 8, "unknown-prefix",
     "mtp."},
    {"base_model.model.model.layers.0.self_attn.kk_proj.lora_A.weight", 2, 8, "unsupported-module",
     "kk_proj"},
    {"base_model.model.model.layers.2.self_attn.k_proj.lora_A.weight", 2, 8, "layer-out-of-range",
     "2 layers"},
    {"base_model.model.model.layers.1.self_attn.k_proj.lora_A.weight", 2, 8, "wrong-layer-kind",
     "have it: 0"},
    {"base_model.model.model.layers.x.self_attn.k_proj.lora_A.weight", 2, 8,
     "malformed-layer-index", "no number"},
    {"base_model.model.model.layers.0.mlp.experts.x.up_proj.lora_A.weight", 2, 8,
     "malformed-expert-index", "no number"},
    {"base_model.model.model.layers.0.mlp.experts.4.up_proj.lora_A.weight", 2, 8,
     "expert-out-of-range", "4 experts"},
    {"base_model.model.model.layers.0.mlp.experts.base_layer.lora_A.weight", 8, 8,
     "unpaired-tensor", "lora_B"},
};

static void one_more_tensor(void **state)
{
    sp_adapter_options options = toy_options();

    (void)state;
    for (size_t i = 0; i < sizeof extra_tensors / sizeof *extra_tensors; i++) {
        make_adapter *adapter = toy_adapter();

        make_adapter_add_random(adapter, extra_tensors[i].name, extra_tensors[i].rows,
                                extra_tensors[i].cols, 9);
        toy_refused(adapter, &options, extra_tensors[i].code, NULL, extra_tensors[i].word,
                    extra_tensors[i].name);
        make_adapter_destroy(adapter);
    }
    sp_geometry_release(options.geometry);
}

/* allow_partial turns three codes into skipped tensors, and leaves every other as it is. */
static void what_partial_relaxes(void **state)
{
    sp_adapter_options options = toy_options();

    (void)state;
    options.allow_partial = true;
    for (size_t i = 0; i < sizeof extra_tensors / sizeof *extra_tensors; i++) {
        const char *code = extra_tensors[i].code;
        make_adapter *adapter = toy_adapter();

        make_adapter_add_random(adapter, extra_tensors[i].name, extra_tensors[i].rows,
                                extra_tensors[i].cols, 9);
        if (strcmp(code, "unsupported-module") == 0 || strcmp(code, "unknown-prefix") == 0)
            sp_adapter_release(toy_opened(adapter, &options));
        else
            toy_refused(adapter, &options, code, NULL, NULL, extra_tensors[i].name);
        make_adapter_destroy(adapter);
    }
    sp_geometry_release(options.geometry);
}

/* Shapes of q_proj's A and B, where [2, 8] and [12, 2] fit. */
static const struct {
    int a[2], b[2];
    const char *code, *word;
} shapes[] = {
    {{2, 8}, {12, 2}, NULL, NULL},
    {{2, 9}, {12, 2}, "shape-mismatch", "[2, 9]"},
    {{2, 8}, {13, 2}, "shape-mismatch", "[13, 2]"},
    {{2, 8}, {12, 3}, "shape-mismatch", "rank 3"},
    {{3, 8}, {12, 3}, "rank-mismatch", "rank 2"},
    {{8, 2}, {2, 12}, "shape-mismatch", "[2, 8]"},   /* both transposed */
    {{12, 2}, {2, 8}, "shape-mismatch", "[2, 8]"},   /* A and B swapped */
    {{2, 16}, {24, 2}, "shape-mismatch", "[2, 16]"}, /* another hidden size */
};

static void shapes_of_a_pair(void **state)
{
    sp_adapter_options options = toy_options();

    (void)state;
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        make_adapter *adapter = make_adapter_create();
        char what[64];

        make_adapter_add_random(adapter, Q_PATH ".lora_A.weight", shapes[i].a[0], shapes[i].a[1],
                                1);
        make_adapter_add_random(adapter, Q_PATH ".lora_B.weight", shapes[i].b[0], shapes[i].b[1],
                                2);
        snprintf(what, sizeof what, "shapes %zu", i);
        options.allow_partial = i % 2; /* makes no difference */
        if (shapes[i].code)
            toy_refused(adapter, &options, shapes[i].code, NULL, shapes[i].word, what);
        else
            sp_adapter_release(toy_opened(adapter, &options));
        make_adapter_destroy(adapter);
    }
    sp_geometry_release(options.geometry);
}

static void dimensions_and_sizes(void **state)
{
    sp_adapter_options options = toy_options();
    make_adapter *adapter;

    (void)state;
    adapter = make_adapter_create();
    toy_refused(adapter, &options, "empty-adapter", NULL, "no tensors", "no tensors");
    make_adapter_add(adapter, Q_PATH ".lora_A.weight", "F32", 2, 0, 8);
    toy_refused(adapter, &options, "empty-adapter", Q_PATH ".lora_A.weight", "[0, 8]", "size 0");
    make_adapter_destroy(adapter);
    adapter = make_adapter_create();
    make_adapter_add(adapter, Q_PATH ".lora_A.weight", "F32", 1, 16);
    toy_refused(adapter, &options, "shape-mismatch", NULL, "[16]", "one dimension");
    make_adapter_destroy(adapter);
    adapter = make_adapter_create();
    make_adapter_add(adapter, Q_PATH ".lora_A.weight", "F32", 0);
    toy_refused(adapter, &options, "shape-mismatch", NULL, "0 dimensions", "a scalar");
    make_adapter_destroy(adapter);
    sp_geometry_release(options.geometry);
}

/* ---- partial --------------------------------------------------------------------------------- */

static void allow_partial(void **state)
{
    sp_adapter_options options = toy_options();
    make_adapter *adapter = toy_adapter();
    sp_adapter *opened;

    (void)state;
    options.allow_partial = true;
    make_adapter_add_pair(adapter, "base_model.model.model.visual.blocks.0.attn.qkv", 2, 5, 5, 3);
    make_adapter_add_pair(adapter, "base_model.model.mtp.layers.0.self_attn.q_proj", 2, 5, 5, 4);
    make_adapter_add_pair(adapter, "base_model.model.model.layers.0.self_attn.rel_pos", 2, 5, 5, 5);
    opened = toy_opened(adapter, &options);
    assert_int_equal(sp_adapter_n_sites(opened), 2);
    sp_adapter_release(opened);
    /* Nothing else is relaxed. */
    make_adapter_add_pair(adapter, "base_model.model.model.layers.5.self_attn.q_proj", 2, 8, 12, 6);
    toy_refused(adapter, &options, "layer-out-of-range", NULL, NULL, "layer 5");
    make_adapter_destroy(adapter);
    /* When nothing is left, it is a refusal. */
    adapter = make_adapter_create();
    make_adapter_add_pair(adapter, "base_model.model.mtp.layers.0.self_attn.q_proj", 2, 5, 5, 4);
    toy_refused(adapter, &options, "empty-adapter", NULL, "none can be applied", "mtp only");
    make_adapter_destroy(adapter);
    sp_geometry_release(options.geometry);
}

/* ---- values ---------------------------------------------------------------------------------- */

static void set_bits(void *data, const char *dtype, int64_t index, uint32_t bits)
{
    if (strcmp(dtype, "F32") == 0)
        ((uint32_t *)data)[index] = bits;
    else
        ((uint16_t *)data)[index] = (uint16_t)bits;
}

/* One element of A of k_proj in this type. The limit of BF16 is half a step below 2^128. */
static const struct {
    const char *dtype;
    uint32_t bits;
    sp_dtype pool;
    bool taken;
} values[] = {
    {"F32", 0x7f800000, SP_DTYPE_BF16, false}, /* infinity */
    {"F32", 0xff800000, SP_DTYPE_F32, false},
    {"F32", 0x7fc00000, SP_DTYPE_F32, false}, /* NaN */
    {"F32", 0x7f800001, SP_DTYPE_BF16, false},
    {"F32", 0x7f7fffff, SP_DTYPE_BF16, false}, /* the largest F32 */
    {"F32", 0x7f7f8000, SP_DTYPE_BF16, false},
    {"F32", 0xff7f8000, SP_DTYPE_BF16, false},
    {"F32", 0x7f7f7fff, SP_DTYPE_BF16, true},
    {"F32", 0x7f7fffff, SP_DTYPE_F32, true},
    {"F32", 0x477ff000, SP_DTYPE_F16, false}, /* 65520 */
    {"F32", 0x477fefff, SP_DTYPE_F16, true},
    {"F32", 0x00000001, SP_DTYPE_BF16, true}, /* the smallest */
    {"F32", 0x80000000, SP_DTYPE_BF16, true}, /* -0 */
    {"BF16", 0x7f80, SP_DTYPE_BF16, false},
    {"BF16", 0xffc0, SP_DTYPE_BF16, false},
    {"BF16", 0x7f7f, SP_DTYPE_BF16, true},
    {"BF16", 0x4780, SP_DTYPE_F16, false}, /* 65536 */
    {"BF16", 0x477f, SP_DTYPE_F16, true},
    {"F16", 0x7c00, SP_DTYPE_BF16, false},
    {"F16", 0xfe00, SP_DTYPE_BF16, false},
    {"F16", 0x7bff, SP_DTYPE_BF16, true},
};

static void non_finite_values(void **state)
{
    /* Every place in two blocks of the search and its tail, in steps that are no multiple. */
    static const int places[] = {0, 1, 255, 256, 300, 511, 512, 519, 527};
    sp_adapter_options options = toy_options();
    const char *name = "base_model.model.model.layers.0.self_attn.o_proj.lora_A.weight";

    (void)state;
    for (size_t i = 0; i < sizeof values / sizeof *values; i++) {
        for (size_t p = 0; p < sizeof places / sizeof *places; p++) {
            make_adapter *adapter = toy_adapter();
            sp_adapter *opened = NULL;
            sp_error error;
            void *data;

            make_adapter_config_with(adapter, ", \"rank_pattern\": {\"o_proj\": 44}");
            data = make_adapter_add(adapter, name, values[i].dtype, 2, 44, 12);
            set_bits(data, values[i].dtype, places[p], values[i].bits);
            make_adapter_add(adapter,
                             "base_model.model.model.layers.0.self_attn.o_proj.lora_B.weight",
                             values[i].dtype, 2, 8, 44);
            options.pool_dtype = values[i].pool;
            if (values[i].taken) {
                assert_ok(toy_open(adapter, &options, &opened, &error), &error);
                sp_adapter_release(opened);
            } else {
                assert_int_equal(toy_open(adapter, &options, &opened, &error), SP_ERR_REFUSED);
                assert_string_equal(error.code, "non-finite");
                assert_string_equal(error.subject, name);
                assert_int_equal(error.position, places[p]);
            }
            make_adapter_destroy(adapter);
        }
    }
    sp_geometry_release(options.geometry);
}

static void other_types(void **state)
{
    static const char *const types[] = {"F64", "I64", "I32", "I16",     "I8",      "U8", "BOOL",
                                        "C64", "U32", "U64", "F8_E4M3", "F8_E5M2", "U16"};
    sp_adapter_options options = toy_options();

    (void)state;
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        make_adapter *adapter = make_adapter_create();

        make_adapter_add(adapter, Q_PATH ".lora_A.weight", types[i], 2, 2, 8);
        make_adapter_add_random(adapter, Q_PATH ".lora_B.weight", 12, 2, 1);
        options.allow_partial = i % 2; /* makes no difference */
        toy_refused(adapter, &options, "unsupported-dtype", Q_PATH ".lora_A.weight", NULL,
                    types[i]);
        make_adapter_destroy(adapter);
    }
    sp_geometry_release(options.geometry);
}

/* ---- no effect ------------------------------------------------------------------------------- */

/* Adds q_proj with A and B of F32 given element by element (others 0). */
static make_adapter *with_factors(const float *a_row0, const float *a_row1, const float *b_row,
                                  int b_at)
{
    make_adapter *adapter = make_adapter_create();
    float *a = make_adapter_add(adapter, Q_PATH ".lora_A.weight", "F32", 2, 2, 8);
    float *b = make_adapter_add(adapter, Q_PATH ".lora_B.weight", "F32", 2, 12, 2);

    memcpy(a, a_row0, 8 * sizeof *a);
    memcpy(a + 8, a_row1, 8 * sizeof *a);
    memcpy(b + 2 * b_at, b_row, 2 * sizeof *b);
    return adapter;
}

static const struct {
    float a0[8], a1[8], b[2];
    bool taken;
    const char *what;
} products[] = {
    {{1}, {1}, {0, 0}, false, "B is zero"},
    {{0}, {0}, {1, 1}, false, "A is zero"},
    {{0, 3}, {0}, {0, 1}, false, "each rank has a zero side"},
    {{1, 2, 3}, {1, 2, 3}, {1, -1}, false, "two ranks cancel each other"},
    {{0.1f, 2, 3}, {0.3f, 6, 9}, {3, -1}, true, "nearly cancelling, but 0.1 is no third of 0.3"},
    {{0.25f, 2, 3}, {0.75f, 6, 9}, {3, -1}, false, "cancelling with different factors"},
    {{0, 0, 0, 0, 0, 1e-30f}, {0}, {1e-10f, 0}, true, "one tiny element in the middle"},
    {{1e-41f}, {0}, {1, 0}, false, "rounds to zero in bf16"},
    {{1e-30f, 1}, {-1e-30f, 1}, {1, 1}, true, "one element cancels, one does not"},
};

static void effects(void **state)
{
    sp_adapter_options options = toy_options();

    (void)state;
    for (size_t i = 0; i < sizeof products / sizeof *products; i++) {
        for (int at = 0; at < 12; at += 5) {
            make_adapter *adapter = with_factors(products[i].a0, products[i].a1, products[i].b, at);

            options.allow_no_effect = false;
            if (!products[i].taken)
                toy_refused(adapter, &options, "no-effect", NULL, NULL, products[i].what);
            options.allow_no_effect = !products[i].taken;
            sp_adapter_release(toy_opened(adapter, &options));
            make_adapter_destroy(adapter);
        }
    }
    sp_geometry_release(options.geometry);
}

/* A zero pair beside one that acts is taken. */
static void one_zero_pair(void **state)
{
    sp_adapter_options options = toy_options();
    make_adapter *adapter = toy_adapter();
    sp_adapter *opened;

    (void)state;
    make_adapter_add(adapter, K_PATH ".lora_A.weight", "F32", 2, 2, 8);
    make_adapter_add(adapter, K_PATH ".lora_B.weight", "F32", 2, 6, 2);
    opened = toy_opened(adapter, &options);
    assert_int_equal(sp_adapter_n_sites(opened), 3);
    sp_adapter_release(opened);
    make_adapter_destroy(adapter);
    sp_geometry_release(options.geometry);
}

/* ---- limits ---------------------------------------------------------------------------------- */

static void limits(void **state)
{
    sp_adapter_options options = toy_options();
    make_adapter *adapter = toy_adapter();

    (void)state;
    options.rank_max = 2;
    sp_adapter_release(toy_opened(adapter, &options));
    options.rank_max = 1;
    toy_refused(adapter, &options, "rank-exceeds-pool", Q_PATH ".lora_A.weight", "max-lora-rank",
                "rank 2 in 1");
    options.rank_max = 2;
    make_adapter_config_with(adapter, ", \"rank_pattern\": {\"up_proj\": 3}");
    make_adapter_add_pair(adapter, "model.layers.0.mlp.experts.1.up_proj", 3, 8, 3, 7);
    options.expert_rank_max = 3;
    sp_adapter_release(toy_opened(adapter, &options));
    options.expert_rank_max = 2;
    toy_refused(adapter, &options, "expert-rank-exceeds-cap", NULL, "max-lora-expert-rank",
                "expert rank 3 in 2");
    options.expert_rank_max = 0;
    options.experts_off = true;
    toy_refused(adapter, &options, "experts-disabled", NULL, "experts", "experts off");
    make_adapter_destroy(adapter);
    adapter = make_adapter_create();
    make_adapter_add_pair(adapter, "model.layers.1.mlp.gate", 2, 8, 4, 7);
    toy_refused(adapter, &options, "experts-disabled", NULL, NULL, "router off");
    options.experts_off = false;
    options.expert_rank_max = 1;
    toy_refused(adapter, &options, "expert-rank-exceeds-cap", NULL, NULL, "router rank 2 in 1");
    options.expert_rank_max = 2;
    options.rank_max = 1; /* is not the router's */
    sp_adapter_release(toy_opened(adapter, &options));
    make_adapter_destroy(adapter);
    sp_geometry_release(options.geometry);
}

/* Bytes of router and experts: ranks rounded up to 8, matrices from 256-byte boundaries. */
static void expert_bytes(void **state)
{
    sp_adapter_options options = toy_options();
    make_adapter *adapter = make_adapter_create();
    sp_adapter *opened;

    (void)state;
    make_adapter_add_pair(adapter, "model.layers.1.mlp.gate", 2, 8, 4, 7);
    make_adapter_add_pair(adapter, "model.layers.0.mlp.experts.3.down_proj", 2, 3, 8, 7);
    make_adapter_add_pair(adapter, "model.layers.0.self_attn.q_proj", 2, 8, 12, 7);
    opened = toy_opened(adapter, &options);
    /* Each of the four matrices has at most 8 * 8 elements of 2 bytes. */
    assert_int_equal(sp_layout_expert_bytes(opened, SP_DTYPE_BF16), 4 * 256);
    assert_int_equal(sp_layout_expert_bytes(opened, SP_DTYPE_F32), 4 * 256);
    sp_adapter_release(opened);
    make_adapter_destroy(adapter);
    /* Rank 41 takes 48: A [48, 3] in 512 bytes, where 41 rows would go into 256; B [8, 48]. */
    adapter = make_adapter_create();
    make_adapter_config(adapter, "{\"r\": 41, \"lora_alpha\": 4}");
    make_adapter_add_pair(adapter, "model.layers.0.mlp.experts.3.down_proj", 41, 3, 8, 7);
    opened = toy_opened(adapter, &options);
    assert_int_equal(sp_layout_expert_bytes(opened, SP_DTYPE_BF16), 512 + 768);
    sp_adapter_release(opened);
    make_adapter_destroy(adapter);
    sp_geometry_release(options.geometry);
}

/* ---- paths ----------------------------------------------------------------------------------- */

static void forms_of_a_path(void **state)
{
    static const char *const forms[] = {"%s", "%s/", "%s/.", "%s//adapter_model.safetensors",
                                        "%s/adapter_model.safetensors"};
    sp_adapter_options options = toy_options();
    make_adapter *adapter = toy_adapter();
    char *folder = make_adapter_folder(adapter);
    char here[PATH_MAX];

    (void)state;
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++) {
        char path[PATH_MAX];
        sp_adapter *opened;
        sp_error error;

        snprintf(path, sizeof path, forms[i], folder);
        assert_ok(sp_adapter_open(path, &options, &opened, &error), &error);
        assert_string_equal(sp_adapter_name(opened), strrchr(folder, '/') + 1);
        sp_adapter_release(opened);
    }
    assert_non_null(getcwd(here, sizeof here));
    assert_int_equal(chdir(folder), 0);
    for (int i = 0; i < 2; i++) {
        sp_adapter *opened;
        sp_error error;

        assert_ok(sp_adapter_open(i ? "adapter_model.safetensors" : ".", &options, &opened, &error),
                  &error);
        assert_string_equal(sp_adapter_name(opened), strrchr(folder, '/') + 1);
        sp_adapter_release(opened);
    }
    assert_int_equal(chdir(here), 0);
    sp_test_remove_tree(folder);
    sp_free(folder);
    make_adapter_destroy(adapter);
    sp_geometry_release(options.geometry);
}

/* ---- digest ---------------------------------------------------------------------------------- */

static make_adapter *under_prefix(const char *prefix, const char *name)
{
    static const char *const modules[] = {"q_proj", "v_proj"};
    make_adapter *adapter = make_adapter_create();
    make_adapter *original = toy_adapter();

    for (int i = 0; i < 4; i++) {
        char from[256], to[256];
        char factor = i % 2 ? 'B' : 'A';
        size_t bytes;
        void *data;

        snprintf(from, sizeof from, "base_model.model.model.layers.0.self_attn.%s.lora_%c.weight",
                 modules[i / 2], factor);
        snprintf(to, sizeof to, "%slayers.0.self_attn.%s.lora_%c%s.weight", prefix, modules[i / 2],
                 factor, name);
        data = make_adapter_data(original, from, &bytes);
        if (factor == 'A')
            memcpy(make_adapter_add(adapter, to, "BF16", 2, 2, 8), data, bytes);
        else
            memcpy(make_adapter_add(adapter, to, "BF16", 2, i / 2 ? 6 : 12, 2), data, bytes);
    }
    make_adapter_destroy(original);
    return adapter;
}

static void equal_content_has_one_digest(void **state)
{
    static const char *const prefixes[] = {"",
                                           "model.",
                                           "model.language_model.",
                                           "language_model.model.",
                                           "base_model.model.",
                                           "base_model.model.model.",
                                           "base_model.model.model.language_model.",
                                           "base_model.model.language_model.model."};
    sp_adapter_options options = toy_options();
    make_adapter *adapter = toy_adapter();
    sp_digest digest = digest_of(adapter, &options);

    (void)state;
    for (size_t i = 0; i < sizeof prefixes / sizeof *prefixes; i++) {
        make_adapter *same = under_prefix(prefixes[i], i % 2 ? ".default" : "");

        assert_true(same_digest(digest_of(same, &options), digest));
        make_adapter_reverse(same);
        assert_true(same_digest(digest_of(same, &options), digest));
        make_adapter_destroy(same);
    }
    make_adapter_config_with(adapter, ", \"base_model_name_or_path\": \"another\", \"revision\": "
                                      "\"x\", \"target_modules\": [\"v_proj\", \"q_proj\"], "
                                      "\"alpha_pattern\": {\"k_proj\": 9}");
    assert_true(same_digest(digest_of(adapter, &options), digest));
    make_adapter_destroy(adapter);
    sp_geometry_release(options.geometry);
}

static void shards_are_read_as_one(void **state)
{
    sp_adapter_options options = toy_options();
    make_adapter *adapter = toy_adapter();
    sp_digest digest = digest_of(adapter, &options);

    (void)state;
    for (int shards = 2; shards <= 4; shards++) {
        char *folder = sp_test_make_directory();
        sp_adapter *opened;
        sp_error error;

        make_adapter_write(adapter, folder, shards);
        assert_ok(sp_adapter_open(folder, &options, &opened, &error), &error);
        assert_true(same_digest(sp_adapter_digest(opened), digest));
        sp_adapter_release(opened);
        sp_test_remove_tree(folder);
        sp_free(folder);
    }
    make_adapter_destroy(adapter);
    sp_geometry_release(options.geometry);
}

/* Each stored bit, the scale, the type and the place count. */
static void different_content_has_another(void **state)
{
    static const char *const names[] = {Q_PATH ".lora_A.weight", Q_PATH ".lora_B.weight",
                                        V_PATH ".lora_A.weight", V_PATH ".lora_B.weight"};
    sp_adapter_options options = toy_options();
    make_adapter *adapter = toy_adapter();
    sp_digest digest = digest_of(adapter, &options);

    (void)state;
    for (size_t t = 0; t < 4; t++) {
        size_t bytes;
        unsigned char *data = make_adapter_data(adapter, names[t], &bytes);

        for (size_t bit = 0; bit < 8 * bytes; bit += 5) {
            if (bit % 16 >= 7 && bit % 16 <= 14)
                continue; /* the exponent, which could become that of infinity */
            data[bit / 8] ^= (unsigned char)(1u << bit % 8);
            assert_false(same_digest(digest_of(adapter, &options), digest));
            data[bit / 8] ^= (unsigned char)(1u << bit % 8);
        }
    }
    assert_true(same_digest(digest_of(adapter, &options), digest));
    make_adapter_config(adapter, "{\"r\": 2, \"lora_alpha\": 5}");
    assert_false(same_digest(digest_of(adapter, &options), digest));
    make_adapter_config(adapter,
                        "{\"r\": 2, \"lora_alpha\": 4, \"alpha_pattern\": {\"v_proj\": 5}}");
    assert_false(same_digest(digest_of(adapter, &options), digest));
    make_adapter_destroy(adapter);
    sp_geometry_release(options.geometry);
}

/* The same tensors at k_proj instead of v_proj, and the same numbers as F32, are others. */
static void place_and_type_count(void **state)
{
    sp_adapter_options options = toy_options();
    make_adapter *adapters[3];
    sp_digest digests[3];

    (void)state;
    for (int i = 0; i < 3; i++) {
        adapters[i] = make_adapter_create();
        if (i < 2) {
            make_adapter_add_pair(adapters[i], i == 0 ? V_PATH : K_PATH, 2, 8, 6, 3);
            continue;
        }
        for (int factor = 0; factor < 2; factor++) {
            const char *name = factor ? V_PATH ".lora_B.weight" : V_PATH ".lora_A.weight";
            size_t bytes;
            const uint16_t *from = make_adapter_data(adapters[0], name, &bytes);
            float *to = factor ? make_adapter_add(adapters[i], name, "F32", 2, 6, 2)
                               : make_adapter_add(adapters[i], name, "F32", 2, 2, 8);

            for (size_t e = 0; e < bytes / 2; e++)
                to[e] = sp_bf16_to_f32(from[e]);
        }
    }
    for (int i = 0; i < 3; i++)
        digests[i] = digest_of(adapters[i], &options);
    assert_false(same_digest(digests[0], digests[1]));
    assert_false(same_digest(digests[0], digests[2]));
    for (int i = 0; i < 3; i++)
        make_adapter_destroy(adapters[i]);
    sp_geometry_release(options.geometry);
}

/* Of adapters with equal bytes: what else is in the digest tells them apart, each by itself. */
static void equal_bytes_elsewhere(void **state)
{
    static const struct {
        const char *path[2];
        const char *dtype[2];
        int rank[2]; /* the same bytes in other shapes */
    } cases[] = {
        {{"model.layers.0.mlp.gate", "model.layers.1.mlp.gate"}, {"BF16", "BF16"}, {2, 2}},
        {{"model.layers.0.mlp.experts.0.up_proj", "model.layers.0.mlp.experts.1.up_proj"},
         {"BF16", "BF16"},
         {2, 2}},
        {{"model.layers.0.mlp.gate", "model.layers.0.mlp.gate"}, {"BF16", "F16"}, {2, 2}},
        {{"model.layers.0.mlp.gate", "model.layers.0.mlp.gate"}, {"BF16", "BF16"}, {2, 4}},
    };
    sp_adapter_options options;

    (void)state;
    sp_adapter_options_default(&options,
                               sizeof options); /* no geometry, which would hold one of them only */
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        sp_digest digests[2];

        for (int side = 0; side < 2; side++) {
            make_adapter *adapter = make_adapter_create();
            int rank = cases[i].rank[side];
            char name[128], config[128];

            snprintf(config, sizeof config, "{\"r\": %d, \"lora_alpha\": %d}", rank, 2 * rank);
            make_adapter_config(adapter, config);
            for (int factor = 0; factor < 2; factor++) {
                uint16_t *data;

                snprintf(name, sizeof name, "%s.lora_%c.weight", cases[i].path[side], "AB"[factor]);
                data = make_adapter_add(adapter, name, cases[i].dtype[side], 2,
                                        factor ? 8 / rank : rank, factor ? rank : 16 / rank);
                for (int e = 0; e < (factor ? 8 : 16); e++)
                    data[e] = (uint16_t)(0x3c00 + e);
            }
            digests[side] = digest_of(adapter, &options);
            make_adapter_destroy(adapter);
        }
        if (same_digest(digests[0], digests[1]))
            fail_msg("case %zu: one digest for two adapters", i);
    }
}

/* Helpers change neither the digest nor which refusal is reported: the first in the file. */
static void threads_change_nothing(void **state)
{
    static const char *const names[] = {V_PATH ".lora_B.weight", V_PATH ".lora_A.weight",
                                        Q_PATH ".lora_B.weight", Q_PATH ".lora_A.weight"};
    sp_adapter_options options = toy_options();
    make_adapter *adapter = toy_adapter();
    sp_digest digest = digest_of(adapter, &options);

    (void)state;
    options.exec = hand_exec(3);
    for (int round = 0; round < 30; round++)
        assert_true(same_digest(digest_of(adapter, &options), digest));
    for (int i = 0; i < 4; i++) {
        size_t bytes;
        uint16_t *data = make_adapter_data(adapter, names[i], &bytes);

        data[i] = 0x7fc0;
        for (int round = 0; round < 30; round++)
            toy_refused(adapter, &options, "non-finite", names[i], "not finite", names[i]);
    }
    sp_exec_destroy(options.exec);
    make_adapter_destroy(adapter);
    sp_geometry_release(options.geometry);
}

/* Without a geometry the files alone are checked. */
static void without_a_model(void **state)
{
    sp_adapter_options options = toy_options();
    make_adapter *adapter = toy_adapter();
    sp_digest digest = digest_of(adapter, &options);
    sp_adapter *opened;

    (void)state;
    sp_geometry_release(options.geometry);
    options.geometry = NULL;
    opened = toy_opened(adapter, &options);
    assert_int_equal(sp_adapter_n_sites(opened), 2);
    assert_true(same_digest(sp_adapter_digest(opened), digest));
    sp_adapter_release(opened);
    make_adapter_add_pair(adapter, "model.layers.70.mlp.experts.9.up_proj", 2, 5, 7, 3);
    opened = toy_opened(adapter, &options);
    assert_int_equal(sp_adapter_n_sites(opened), 3);
    sp_adapter_release(opened);
    make_adapter_add_pair(adapter, "model.layers.70.mlp.experts.8.up_proj", 3, 5, 7, 3);
    toy_refused(adapter, &options, "rank-mismatch", NULL, NULL, "rank 3");
    make_adapter_destroy(adapter);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(any_subset),
        cmocka_unit_test(factors_are_aligned),
        cmocka_unit_test(references),
        cmocka_unit_test(wrong_calls),
        cmocka_unit_test(one_more_tensor),
        cmocka_unit_test(what_partial_relaxes),
        cmocka_unit_test(shapes_of_a_pair),
        cmocka_unit_test(dimensions_and_sizes),
        cmocka_unit_test(allow_partial),
        cmocka_unit_test(non_finite_values),
        cmocka_unit_test(other_types),
        cmocka_unit_test(effects),
        cmocka_unit_test(one_zero_pair),
        cmocka_unit_test(limits),
        cmocka_unit_test(expert_bytes),
        cmocka_unit_test(forms_of_a_path),
        cmocka_unit_test(equal_content_has_one_digest),
        cmocka_unit_test(shards_are_read_as_one),
        cmocka_unit_test(different_content_has_another),
        cmocka_unit_test(place_and_type_count),
        cmocka_unit_test(equal_bytes_elsewhere),
        cmocka_unit_test(threads_change_nothing),
        cmocka_unit_test(without_a_model),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
