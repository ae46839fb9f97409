/*
 * Whole rows: full tables, trainable tokens and copies of the base, on the tied and the untied
 * fixture (512 tokens, hidden 64), whose tables are read here by the independent reader.
 */
#include "adapter/toy.h"
#include "support/golden.h"

#include "base/alloc.h"
#include "base/half.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define VOCAB  512
#define HIDDEN 64

#define EMBED "base_model.model.model.embed_tokens"
#define HEAD  "base_model.model.lm_head"

typedef struct base {
    sp_adapter_options options;
    golden *file;
    const golden_tensor *embed, *head;
    char *directory;
} base;

static base open_base(const char *model)
{
    base opened;
    char path[512];
    sp_error error;

    snprintf(path, sizeof path, "%s/%s", SP_TEST_FIXTURES, model);
    opened.directory = sp_strdup(path);
    sp_adapter_options_default(&opened.options, sizeof opened.options);
    assert_ok(sp_geometry_open(path, &opened.options.geometry, &error), &error);
    opened.options.base_dir = opened.directory;
    snprintf(path, sizeof path, "%s/model.safetensors", model);
    opened.file = golden_open(path);
    opened.embed = golden_get(opened.file, "model.embed_tokens.weight");
    opened.head = golden_find(opened.file, "lm_head.weight");
    if (!opened.head)
        opened.head = opened.embed;
    assert_string_equal(opened.embed->dtype, "BF16");
    return opened;
}

static void close_base(base *opened)
{
    golden_close(opened->file);
    sp_geometry_release(opened->options.geometry);
    sp_free(opened->directory);
}

/* An adapter with one pair that acts, so that tables may be without effect. */
static make_adapter *with_pair(void)
{
    make_adapter *adapter = make_adapter_create();

    make_adapter_add_pair(adapter, "base_model.model.model.layers.0.self_attn.q_proj", 2, HIDDEN,
                          128, 1);
    return adapter;
}

static void store(void *data, const char *dtype, int64_t index, float value)
{
    if (strcmp(dtype, "F32") == 0)
        ((float *)data)[index] = value;
    else if (strcmp(dtype, "F16") == 0)
        ((uint16_t *)data)[index] = sp_f32_to_f16(value);
    else
        ((uint16_t *)data)[index] = sp_f32_to_bf16(value);
}

/* A copy of the base's table in this type, with `rows` rows; those past the base's hold 1. */
static void *add_table(make_adapter *adapter, const char *name, const char *dtype, int rows,
                       const golden_tensor *from)
{
    void *data = make_adapter_add(adapter, name, dtype, 2, rows, HIDDEN);

    for (int64_t i = 0; i < (int64_t)rows * HIDDEN; i++)
        store(data, dtype, i, i < from->n ? (float)golden_value(from, i) : 1.0f);
    return data;
}

/* What an overlay of `rows` rows takes: the rows in bf16, and an int32 for every token. */
static size_t overlay(size_t rows)
{
    return rows * HIDDEN * 2 + VOCAB * 4;
}

static void expect_note(const sp_adapter *adapter, const char *text)
{
    sp_receipt_options options;
    sp_receipt *receipt;

    sp_receipt_options_default(&options, sizeof options);
    assert_int_equal(sp_receipt_create(adapter, &options, &receipt, NULL), SP_OK);
    if (!strstr(sp_receipt_table(receipt), text))
        fail_msg("no note \"%s\" in: %s", text, sp_receipt_table(receipt));
    sp_receipt_destroy(receipt);
}

/* ---- full tables ----------------------------------------------------------------------------- */

static void rows_that_differ(void **state)
{
    static const char *const names[] = {HEAD ".weight", EMBED ".weight",
                                        HEAD ".modules_to_save.weight",
                                        EMBED ".token_adapter.base_layer.weight"};
    static const char *const dtypes[] = {"BF16", "F32"};
    base b = open_base("qwen3-untied");

    (void)state;
    for (int i = 0; i < 8; i++) {
        const char *name = names[i / 2], *dtype = dtypes[i % 2];
        bool head = strstr(name, "lm_head");
        make_adapter *adapter = with_pair();
        void *data = add_table(adapter, name, dtype, VOCAB, head ? b.head : b.embed);
        sp_adapter *opened;

        store(data, dtype, 3 * HIDDEN + 5, 9.0f);
        store(data, dtype, 511 * HIDDEN + 63, -7.0f);
        opened = toy_opened(adapter, &b.options);
        assert_int_equal(sp_adapter_n_tables(opened), 1);
        assert_int_equal(sp_adapter_table_at(opened, 0)->kind,
                         head ? SP_SITE_HEAD : SP_SITE_EMBEDDING);
        assert_string_equal(sp_adapter_table_at(opened, 0)->module,
                            head ? "lm_head" : "embed_tokens");
        assert_int_equal(sp_adapter_table_at(opened, 0)->full.rows, VOCAB);
        assert_null(sp_adapter_table_at(opened, 0)->trainable.data);
        assert_int_equal(sp_adapter_overlay_bytes(opened), overlay(2));
        sp_adapter_release(opened);
        make_adapter_destroy(adapter);
    }
    close_base(&b);
}

/* One bit of one element is a different row; rounding to the served type is not. */
static void smallest_difference(void **state)
{
    base b = open_base("qwen3-untied");
    make_adapter *adapter = with_pair();
    uint16_t *data = add_table(adapter, HEAD ".weight", "BF16", VOCAB, b.head);
    sp_adapter *opened;
    float *wide;

    (void)state;
    data[77 * HIDDEN] ^= 1;
    opened = toy_opened(adapter, &b.options);
    assert_int_equal(sp_adapter_overlay_bytes(opened), overlay(1));
    sp_adapter_release(opened);
    make_adapter_destroy(adapter);
    adapter = with_pair();
    wide = add_table(adapter, HEAD ".weight", "F32", VOCAB, b.head);
    for (int64_t i = 0; i < VOCAB * HIDDEN; i++)
        wide[i] = sp_f32_from_bits(sp_f32_bits(wide[i]) | 0x1234); /* rounds back to the base */
    opened = toy_opened(adapter, &b.options);
    assert_int_equal(sp_adapter_overlay_bytes(opened), 0);
    sp_adapter_release(opened);
    make_adapter_destroy(adapter);
    close_base(&b);
}

/* A table equal to the base beside a pair that acts is taken; alone it has no effect. */
static void equal_tables(void **state)
{
    base b = open_base("qwen3-tied");
    make_adapter *adapter = with_pair();
    sp_adapter *opened;

    (void)state;
    add_table(adapter, EMBED ".weight", "BF16", VOCAB, b.embed);
    opened = toy_opened(adapter, &b.options);
    assert_int_equal(sp_adapter_overlay_bytes(opened), 0);
    expect_note(opened, "the table of embed_tokens equals the base model's");
    sp_adapter_release(opened);
    make_adapter_destroy(adapter);
    adapter = make_adapter_create();
    add_table(adapter, EMBED ".weight", "BF16", VOCAB, b.embed);
    toy_refused(adapter, &b.options, "no-effect", NULL, NULL, "the base's own table");
    b.options.allow_no_effect = true;
    sp_adapter_release(toy_opened(adapter, &b.options));
    make_adapter_destroy(adapter);
    close_base(&b);
}

/* The tokenizer's rows on a base whose table is padded: those there are count, the others stay. */
static void fewer_rows(void **state)
{
    base b = open_base("qwen3-tied");
    make_adapter *adapter = with_pair();
    sp_adapter *opened;
    uint16_t *data;

    (void)state;
    data = add_table(adapter, EMBED ".weight", "BF16", VOCAB - 2, b.embed);
    opened = toy_opened(adapter, &b.options);
    assert_int_equal(sp_adapter_overlay_bytes(opened), 0);
    expect_note(opened, "the table of embed_tokens equals the base model's");
    expect_note(opened,
                "the table of embed_tokens has 510 rows; the base model's 2 beyond them stay");
    sp_adapter_release(opened);
    data[509 * HIDDEN + 3] ^= 1;
    data[0] ^= 1;
    opened = toy_opened(adapter, &b.options);
    assert_int_equal(sp_adapter_overlay_bytes(opened), overlay(2));
    expect_note(opened, "2 of 512 rows of embed_tokens differ from the base model's");
    sp_adapter_release(opened);
    make_adapter_destroy(adapter);
    close_base(&b);
}

static void table_shapes(void **state)
{
    static const struct {
        int rows, cols;
        bool taken;
    } cases[] = {{VOCAB, HIDDEN, true}, {VOCAB + 8, HIDDEN, true},  {VOCAB - 1, HIDDEN, true},
                 {1, HIDDEN, true},     {VOCAB, HIDDEN + 1, false}, {HIDDEN, VOCAB, false}};
    base b = open_base("qwen3-tied");

    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        make_adapter *adapter = with_pair();

        make_adapter_add_random(adapter, EMBED ".weight", cases[i].rows, cases[i].cols, 4);
        if (cases[i].taken)
            sp_adapter_release(toy_opened(adapter, &b.options));
        else
            toy_refused(adapter, &b.options, "shape-mismatch", EMBED ".weight", "[512, 64]",
                        "a table");
        make_adapter_destroy(adapter);
    }
    close_base(&b);
}

/* A table of a wrong shape is refused by its header: its data, here of 256 GiB, is not read. */
static void wrong_shapes_are_not_read(void **state)
{
    static const char config[] = "{\"r\": 2, \"lora_alpha\": 4}";
    static const char header[] = "{\"" EMBED ".weight\": {\"dtype\": \"BF16\", \"shape\": "
                                 "[1073741824, 128], \"data_offsets\": [0, 274877906944]}}";
    uint64_t length = sizeof header - 1;
    base b = open_base("qwen3-tied");
    char *folder = sp_test_make_directory();
    char bytes[8 + sizeof header], path[512];
    sp_adapter *opened = NULL;
    sp_error error;

    (void)state;
    memcpy(bytes, &length, 8); /* little-endian, as all that is served */
    memcpy(bytes + 8, header, sizeof header - 1);
    sp_test_write_file(folder, "adapter_config.json", config, sizeof config - 1);
    sp_test_write_file(folder, "adapter_model.safetensors", bytes, 8 + sizeof header - 1);
    snprintf(path, sizeof path, "%s/adapter_model.safetensors", folder);
    if (truncate(path, (off_t)(8 + sizeof header - 1) + 274877906944) != 0) {
        sp_test_remove_tree(folder);
        skip(); /* a file system without holes, or without room for them */
    }
    assert_int_equal(sp_adapter_open(folder, &b.options, &opened, &error), SP_ERR_MISMATCH);
    assert_string_equal(error.code, "shape-mismatch");
    assert_non_null(strstr(error.text, "[1073741824, 128]"));
    sp_test_remove_tree(folder);
    sp_free(folder);
    close_base(&b);
}

static void twice_the_same_table(void **state)
{
    base b = open_base("qwen3-tied");
    make_adapter *adapter = with_pair();

    (void)state;
    make_adapter_add_random(adapter, EMBED ".weight", VOCAB, HIDDEN, 4);
    make_adapter_add_random(adapter, EMBED ".token_adapter.base_layer.weight", VOCAB, HIDDEN, 4);
    toy_refused(adapter, &b.options, "duplicate-tensor", NULL, "token_adapter", "two tables");
    make_adapter_destroy(adapter);
    close_base(&b);
}

/* ---- trainable tokens ------------------------------------------------------------------------ */

#define TOKENS(module) module ".token_adapter.trainable_tokens_delta"

static void tokens_keep_their_order(void **state)
{
    static const int32_t ids[] = {300, 3, 511, 0};
    base b = open_base("qwen3-untied");
    make_adapter *adapter = with_pair();
    const sp_adapter_table *table;
    sp_adapter *opened;

    (void)state;
    make_adapter_config_with(adapter, ", \"trainable_token_indices\": [300, 3, 511, 0]");
    make_adapter_add_random(adapter, TOKENS(EMBED), 4, HIDDEN, 4);
    opened = toy_opened(adapter, &b.options);
    assert_int_equal(sp_adapter_n_tables(opened), 1); /* untied: the head keeps its rows */
    table = sp_adapter_table_at(opened, 0);
    assert_null(table->full.data);
    assert_int_equal(table->trainable.rows, 4);
    assert_int_equal(table->n_ids, 4);
    assert_memory_equal(table->token_ids, ids, sizeof ids);
    assert_int_equal(sp_adapter_overlay_bytes(opened), overlay(4));
    sp_adapter_release(opened);
    make_adapter_destroy(adapter);
    close_base(&b);
}

/* On a tied base the head's rows move too, unless it has tokens of its own. */
static void tied_tokens(void **state)
{
    base b = open_base("qwen3-tied");
    make_adapter *adapter = with_pair();
    sp_adapter *opened;

    (void)state;
    make_adapter_config_with(adapter, ", \"trainable_token_indices\": [7, 5]");
    make_adapter_add_random(adapter, TOKENS(EMBED), 2, HIDDEN, 4);
    opened = toy_opened(adapter, &b.options);
    assert_int_equal(sp_adapter_n_tables(opened), 2);
    assert_ptr_equal(sp_adapter_table_at(opened, 1)->trainable.data,
                     sp_adapter_table_at(opened, 0)->trainable.data);
    assert_int_equal(sp_adapter_table_at(opened, 1)->token_ids[0], 7);
    assert_int_equal(sp_adapter_overlay_bytes(opened), 2 * overlay(2));
    sp_adapter_release(opened);
    make_adapter_config_with(adapter, ", \"trainable_token_indices\": {\"embed_tokens\": [7, 5], "
                                      "\"lm_head\": [9]}");
    make_adapter_add_random(adapter, TOKENS(HEAD), 1, HIDDEN, 5);
    opened = toy_opened(adapter, &b.options);
    assert_int_equal(sp_adapter_table_at(opened, 1)->n_ids, 1);
    assert_int_equal(sp_adapter_table_at(opened, 1)->token_ids[0], 9);
    sp_adapter_release(opened);
    make_adapter_destroy(adapter);
    close_base(&b);
}

/* The base's sites as a host writes them by hand, with a head that is tied or not. */
static sp_geometry *by_hand(const base *b, bool tied)
{
    int32_t n = sp_geometry_n_sites(b->options.geometry);
    sp_site *sites = sp_calloc((size_t)n, sizeof *sites);
    sp_geometry *geometry;
    sp_error error;

    for (int32_t i = 0; i < n; i++) {
        sites[i].struct_bytes = sizeof sites[i];
        assert_ok(sp_geometry_site_at(b->options.geometry, i, &sites[i], &error), &error);
        assert_int_equal(sites[i].tied, sites[i].kind == SP_SITE_HEAD); /* as config.json says */
        sites[i].tied = tied && sites[i].kind == SP_SITE_HEAD;
    }
    assert_ok(sp_geometry_create(sites, (size_t)n, &geometry, &error), &error);
    assert_null(sp_geometry_shape(geometry));
    sp_free(sites);
    return geometry;
}

/* Without a config.json it is the head's row that says whether the head is tied. */
static void tied_by_hand(void **state)
{
    base b = open_base("qwen3-tied");
    make_adapter *tokens = with_pair(), *head = with_pair();

    (void)state;
    make_adapter_config_with(tokens, ", \"trainable_token_indices\": [7, 5]");
    make_adapter_add_random(tokens, TOKENS(EMBED), 2, HIDDEN, 4);
    make_adapter_add_random(head, HEAD ".weight", VOCAB, HIDDEN, 3);
    for (int tied = 0; tied < 2; tied++) {
        sp_adapter_options options = b.options;
        sp_adapter *opened;

        options.geometry = by_hand(&b, tied);
        opened = toy_opened(tokens, &options);
        assert_int_equal(sp_adapter_n_tables(opened), 1 + tied);
        sp_adapter_release(opened);
        if (!tied) /* the checkpoint has no table of that name */
            toy_refused(head, &options, "base-unavailable", NULL, "lm_head", "an untied head");
        else
            sp_adapter_release(toy_opened(head, &options));
        sp_geometry_release(options.geometry);
    }
    make_adapter_destroy(tokens);
    make_adapter_destroy(head);
    close_base(&b);
}

/*
 * ensure_weight_tying on a tied base: both tables are there, or the file lost one. Without it, and
 * on an untied base, each side stands alone.
 */
static void tables_trained_as_one(void **state)
{
    static const char *const names[] = {EMBED ".weight", HEAD ".weight"};
    static const char *const lacking[] = {"lm_head", "embed_tokens"};
    static const char *const models[] = {"qwen3-tied", "qwen3-untied"};

    (void)state;
    for (int i = 0; i < 8; i++) {
        bool untied = i & 1, tying = i & 2;
        int side = i / 4;
        base b = open_base(models[untied]);
        make_adapter *adapter = with_pair();
        sp_adapter *opened;

        make_adapter_config_with(adapter, tying ? ", \"ensure_weight_tying\": true" : "");
        make_adapter_add_random(adapter, names[side], VOCAB, HIDDEN, 3);
        if (tying && !untied) {
            toy_refused(adapter, &b.options, "unmatched-target", lacking[side],
                        "ensure_weight_tying", names[side]);
            b.options.allow_partial = true;
            opened = toy_opened(adapter, &b.options);
            expect_note(opened, "ensure_weight_tying is true, but the file has no table for");
            sp_adapter_release(opened);
            b.options.allow_partial = false;
            make_adapter_add_random(adapter, names[!side], VOCAB, HIDDEN, 3);
        }
        opened = toy_opened(adapter, &b.options);
        assert_int_equal(sp_adapter_n_tables(opened), tying && !untied ? 2 : 1);
        sp_adapter_release(opened);
        make_adapter_destroy(adapter);
        close_base(&b);
    }
}

/* A trainer that puts a listed head into a table instead of a pair has given what it listed. */
static void a_listed_module_as_a_table(void **state)
{
    static const char *const names[] = {HEAD ".weight", HEAD ".base_layer.weight"};
    base b = open_base("qwen3-untied");

    (void)state;
    for (int i = 0; i < 2; i++) {
        make_adapter *adapter = with_pair();

        make_adapter_config_with(adapter, ", \"target_modules\": [\"q_proj\", \"lm_head\"]");
        add_table(adapter, names[i], "BF16", VOCAB, b.head);
        if (i == 0)
            sp_adapter_release(toy_opened(adapter, &b.options));
        else /* a copy of the base is nothing that was trained */
            toy_refused(adapter, &b.options, "unmatched-target", "lm_head", NULL, "a copy");
        make_adapter_destroy(adapter);
    }
    close_base(&b);
}

/* PEFT names all of them or none: a pair with an adapter's name beside tokens without one. */
static void tokens_of_another_name(void **state)
{
    base b = open_base("qwen3-tied");
    make_adapter *adapter = make_adapter_create();

    (void)state;
    make_adapter_config_with(adapter, ", \"trainable_token_indices\": [7, 5]");
    make_adapter_add_random(adapter, "model.layers.0.self_attn.k_proj.lora_A.x.weight", 2, HIDDEN,
                            1);
    make_adapter_add_random(adapter, "model.layers.0.self_attn.k_proj.lora_B.x.weight", 64, 2, 2);
    make_adapter_add_random(adapter, TOKENS(EMBED), 2, HIDDEN, 4);
    toy_refused(adapter, &b.options, "mixed-adapter-names", NULL, "\"x\"", "tokens without a name");
    make_adapter_destroy(adapter);
    close_base(&b);
}

/* Trainable tokens move both sides of a tied base by themselves: one table is enough for them. */
static void tied_tokens_with_their_table(void **state)
{
    base b = open_base("qwen3-tied");
    make_adapter *adapter = with_pair();
    sp_adapter *opened;

    (void)state;
    make_adapter_config_with(adapter, ", \"ensure_weight_tying\": true, "
                                      "\"trainable_token_indices\": [7, 5]");
    add_table(adapter, EMBED ".token_adapter.base_layer.weight", "BF16", VOCAB, b.embed);
    make_adapter_add_random(adapter, TOKENS(EMBED), 2, HIDDEN, 4);
    opened = toy_opened(adapter, &b.options);
    assert_int_equal(sp_adapter_n_tables(opened), 2);
    sp_adapter_release(opened);
    make_adapter_destroy(adapter);
    close_base(&b);
}

/*
 * An adapter whose vocabulary is larger than the tied base's: its new tokens are dropped from the
 * head's rows as from the embedding's, and noted; a token beyond its own rows is an error.
 */
static void tied_tokens_beyond_the_vocabulary(void **state)
{
    base b = open_base("qwen3-tied");
    make_adapter *adapter = with_pair();
    sp_adapter *opened;

    (void)state;
    add_table(adapter, EMBED ".token_adapter.base_layer.weight", "BF16", VOCAB + 8, b.embed);
    make_adapter_add_random(adapter, TOKENS(EMBED), 2, HIDDEN, 4);
    make_adapter_config_with(adapter, ", \"trainable_token_indices\": [7, 519]");
    opened = toy_opened(adapter, &b.options);
    assert_int_equal(sp_adapter_n_tables(opened), 2);
    for (size_t i = 0; i < 2; i++) {
        assert_int_equal(sp_adapter_table_at(opened, i)->n_ids, 2);
        assert_int_equal(sp_adapter_table_at(opened, i)->rows, VOCAB + 8);
    }
    assert_int_equal(sp_adapter_overlay_bytes(opened), 2 * overlay(1));
    expect_note(opened, "1 trainable tokens of lm_head are beyond the served vocabulary");
    expect_note(opened, "8 rows of embed_tokens are beyond the served vocabulary");
    sp_adapter_release(opened);
    make_adapter_config_with(adapter, ", \"trainable_token_indices\": [7, 520]");
    toy_refused(adapter, &b.options, "bad-token-index", NULL, "520", "beyond its own rows");
    make_adapter_destroy(adapter);
    close_base(&b);
}

/* The union of rows that differ and trainable ids. */
static void tokens_and_a_table(void **state)
{
    base b = open_base("qwen3-untied");
    make_adapter *adapter = with_pair();
    uint16_t *data =
        add_table(adapter, EMBED ".token_adapter.base_layer.weight", "BF16", VOCAB, b.embed);
    sp_adapter *opened;

    (void)state;
    data[10 * HIDDEN] ^= 1;
    data[20 * HIDDEN] ^= 1;
    make_adapter_config_with(adapter, ", \"trainable_token_indices\": [20, 30, 40]");
    make_adapter_add_random(adapter, TOKENS(EMBED), 3, HIDDEN, 4);
    opened = toy_opened(adapter, &b.options);
    assert_int_equal(sp_adapter_overlay_bytes(opened), overlay(4)); /* 10, 20, 30, 40 */
    sp_adapter_release(opened);
    make_adapter_destroy(adapter);
    close_base(&b);
}

static const struct {
    const char *members;
    int rows, cols;   /* of embed's delta; 0: none */
    int table_rows;   /* of a full table; 0: none */
    const char *code; /* NULL: taken */
    size_t n_overridden;
} token_cases[] = {
    {", \"trainable_token_indices\": [1, 2]", 2, HIDDEN, 0, NULL, 2},
    {", \"trainable_token_indices\": [1, 2]", 3, HIDDEN, 0, "bad-token-index", 0},
    {", \"trainable_token_indices\": [1, 2]", 0, 0, 0, "bad-token-index", 0},
    {"", 2, HIDDEN, 0, "bad-token-index", 0},
    {", \"trainable_token_indices\": {\"lm_head\": [1, 2]}", 2, HIDDEN, 0, "bad-token-index", 0},
    {", \"trainable_token_indices\": [1, 512]", 2, HIDDEN, 0, "bad-token-index", 0},
    {", \"trainable_token_indices\": [1, 519]", 2, HIDDEN, VOCAB + 8, NULL, 512},
    {", \"trainable_token_indices\": [1, 520]", 2, HIDDEN, VOCAB + 8, "bad-token-index", 0},
    {", \"trainable_token_indices\": [1, 2]", 2, HIDDEN + 1, 0, "shape-mismatch", 0},
};

static void token_lists(void **state)
{
    base b = open_base("qwen3-untied");

    (void)state;
    for (size_t i = 0; i < sizeof token_cases / sizeof *token_cases; i++) {
        make_adapter *adapter = with_pair();

        make_adapter_config_with(adapter, token_cases[i].members);
        if (token_cases[i].rows > 0)
            make_adapter_add_random(adapter, TOKENS(EMBED), token_cases[i].rows,
                                    token_cases[i].cols, 4);
        if (token_cases[i].table_rows > 0)
            make_adapter_add_random(adapter, EMBED ".weight", token_cases[i].table_rows, HIDDEN, 5);
        if (token_cases[i].code) {
            toy_refused(adapter, &b.options, token_cases[i].code, NULL, NULL,
                        token_cases[i].members);
        } else {
            sp_adapter *opened = toy_opened(adapter, &b.options);

            assert_int_equal(sp_adapter_overlay_bytes(opened),
                             overlay(token_cases[i].n_overridden));
            sp_adapter_release(opened);
        }
        make_adapter_destroy(adapter);
    }
    close_base(&b);
}

/* The order of the list is content: other ids give another digest. */
static void ids_are_in_the_digest(void **state)
{
    static const char *const lists[] = {", \"trainable_token_indices\": [1, 2]",
                                        ", \"trainable_token_indices\": [2, 1]",
                                        ", \"trainable_token_indices\": {\"lm_head\": [1, 2]}",
                                        ", \"trainable_token_indices\": {\"lm_head\": [2, 1]}"};
    base b = open_base("qwen3-untied");
    sp_digest digests[4];

    (void)state;
    for (int i = 0; i < 4; i++) {
        make_adapter *adapter = with_pair();
        sp_adapter *opened;

        make_adapter_config_with(adapter, lists[i]);
        make_adapter_add_random(adapter, i < 2 ? TOKENS(EMBED) : TOKENS(HEAD), 2, HIDDEN, 4);
        opened = toy_opened(adapter, &b.options);
        digests[i] = sp_adapter_digest(opened);
        sp_adapter_release(opened);
        make_adapter_destroy(adapter);
        for (int other = 0; other < i; other++)
            assert_memory_not_equal(digests[i].bytes, digests[other].bytes, SP_DIGEST_BYTES);
    }
    close_base(&b);
}

/* ---- copies of the base ---------------------------------------------------------------------- */

static void copies(void **state)
{
    static const char *const dtypes[] = {"BF16", "F32", "F16"};
    base b = open_base("qwen3-tied");

    (void)state;
    for (int i = 0; i < 6; i++) {
        const char *dtype = dtypes[i % 3];
        const char *name = i < 3 ? HEAD ".base_layer.weight" : EMBED ".base_layer.weight";
        make_adapter *adapter = with_pair();
        void *data;
        sp_adapter *opened;

        if (i < 3)
            make_adapter_add_pair(adapter, HEAD, 2, HIDDEN, VOCAB, 8);
        data = add_table(adapter, name, dtype, VOCAB, b.embed);
        opened = toy_opened(adapter, &b.options);
        assert_int_equal(sp_adapter_n_sites(opened), i < 3 ? 2 : 1);
        assert_int_equal(sp_adapter_n_tables(opened), 0);
        sp_adapter_release(opened);
        store(data, dtype, 200 * HIDDEN + 7, 3.5f);
        toy_refused(adapter, &b.options, "base-copy-differs", name, "row 200", "altered");
        make_adapter_destroy(adapter);
    }
    close_base(&b);
}

/* A copy may hold more than the base does: what rounds to the base's element is a copy of it. */
static void copies_of_higher_precision(void **state)
{
    base b = open_base("qwen3-tied");
    make_adapter *adapter = with_pair();
    float *data;

    (void)state;
    make_adapter_add_pair(adapter, HEAD, 2, HIDDEN, VOCAB, 8);
    data = add_table(adapter, HEAD ".base_layer.weight", "F32", VOCAB, b.embed);
    for (int i = 0; i < VOCAB * HIDDEN; i++) /* below half a step of BF16 */
        data[i] = sp_f32_from_bits(sp_f32_bits(data[i]) + 0x7ffe);
    sp_adapter_release(toy_opened(adapter, &b.options));
    data[300 * HIDDEN + 1] = sp_f32_from_bits(sp_f32_bits(data[300 * HIDDEN + 1]) + 0x10);
    toy_refused(adapter, &b.options, "base-copy-differs", NULL, "row 300", "above half a step");
    make_adapter_destroy(adapter);
    close_base(&b);
}

/* What is ignored is not in the digest. */
static void a_copy_leaves_the_digest(void **state)
{
    base b = open_base("qwen3-tied");
    make_adapter *adapter = with_pair();
    sp_digest digests[2];

    (void)state;
    for (int i = 0; i < 2; i++) {
        sp_adapter *opened = toy_opened(adapter, &b.options);

        digests[i] = sp_adapter_digest(opened);
        sp_adapter_release(opened);
        if (i == 0)
            add_table(adapter, HEAD ".base_layer.weight", "BF16", VOCAB, b.head);
    }
    assert_memory_equal(digests[0].bytes, digests[1].bytes, SP_DIGEST_BYTES);
    make_adapter_destroy(adapter);
    close_base(&b);
}

/* A copy made with the tokenizer's ids, of a base whose table is padded beyond them. */
static void copies_of_fewer_rows(void **state)
{
    static const char *const names[] = {HEAD ".base_layer.weight", EMBED ".base_layer.weight"};
    base b = open_base("qwen3-tied");

    (void)state;
    for (int i = 0; i < 4; i++) {
        const char *dtype = i < 2 ? "BF16" : "F32";
        make_adapter *adapter = with_pair();
        void *data = add_table(adapter, names[i % 2], dtype, VOCAB - 2, b.embed);
        sp_adapter *opened = toy_opened(adapter, &b.options);

        assert_int_equal(sp_adapter_n_sites(opened), 1);
        assert_int_equal(sp_adapter_n_tables(opened), 0);
        sp_adapter_release(opened);
        store(data, dtype, (VOCAB - 3) * HIDDEN, 3.5f);
        toy_refused(adapter, &b.options, "base-copy-differs", names[i % 2], "row 509", "altered");
        make_adapter_destroy(adapter);
    }
    close_base(&b);
}

static void copies_of_other_shapes(void **state)
{
    base b = open_base("qwen3-tied");
    make_adapter *adapter = with_pair();

    (void)state;
    add_table(adapter, HEAD ".base_layer.weight", "BF16", VOCAB + 1, b.embed);
    toy_refused(adapter, &b.options, "base-copy-differs", NULL, "[512, 64]", "a row more");
    make_adapter_destroy(adapter);
    adapter = with_pair();
    make_adapter_add_random(adapter, HEAD ".base_layer.weight", VOCAB, HIDDEN - 1, 2);
    toy_refused(adapter, &b.options, "base-copy-differs", NULL, "[512, 64]", "a column less");
    make_adapter_destroy(adapter);
    adapter = make_adapter_create();
    add_table(adapter, HEAD ".base_layer.weight", "BF16", VOCAB, b.embed);
    toy_refused(adapter, &b.options, "empty-adapter", NULL, "nothing to apply", "a copy alone");
    make_adapter_destroy(adapter);
    close_base(&b);
}

/* ---- copies of the base's bias --------------------------------------------------------------- */

#define BIAS HEAD ".base_layer.bias"

/* A base's folder with a head and, where n_bias > 0, its bias: F16 elements 1/4, 2/4, 3/4 .. */
static char *head_with_bias(int n_bias)
{
    make_adapter *made = make_adapter_create();
    char *folder = sp_test_make_directory();
    unsigned char *bytes;
    uint16_t *bias;
    size_t n;

    make_adapter_add_random(made, "lm_head.weight", TOY_VOCAB, TOY_HIDDEN, 7);
    if (n_bias > 0) {
        bias = make_adapter_add(made, "lm_head.bias", "F16", 1, n_bias);
        for (int i = 0; i < n_bias; i++)
            bias[i] = sp_f32_to_f16((float)(i + 1) / 4);
    }
    bytes = make_adapter_bytes(made, &n);
    sp_test_write_file(folder, "model.safetensors", bytes, n);
    sp_free(bytes);
    make_adapter_destroy(made);
    return folder;
}

static void forget_folder(char *folder)
{
    sp_test_remove_tree(folder);
    sp_free(folder);
}

/* A pair of the head, and n elements of the copied bias as PEFT keeps it. */
static make_adapter *with_bias(const char *dtype, int n)
{
    make_adapter *adapter = make_adapter_create();
    void *data;

    make_adapter_add_pair(adapter, HEAD, 2, TOY_HIDDEN, TOY_VOCAB, 8);
    data = make_adapter_add(adapter, BIAS, dtype, 1, n);
    for (int i = 0; i < n; i++)
        store(data, dtype, i, (float)(i + 1) / 4);
    make_adapter_config_with(adapter, ", \"bias\": \"none\"");
    return adapter;
}

static void equal_biases(void **state)
{
    static const char *const dtypes[] = {"F16", "F32", "BF16"};
    sp_adapter_options options = toy_options();
    char *folder = head_with_bias(TOY_VOCAB);
    make_adapter *plain = make_adapter_create();
    sp_adapter *opened;
    sp_digest digest;

    (void)state;
    make_adapter_add_pair(plain, HEAD, 2, TOY_HIDDEN, TOY_VOCAB, 8);
    opened = toy_opened(plain, &options);
    digest = sp_adapter_digest(opened);
    sp_adapter_release(opened);
    make_adapter_destroy(plain);
    options.base_dir = folder;
    for (int i = 0; i < 4; i++) {
        make_adapter *adapter = with_bias(dtypes[i % 3], i < 3 ? TOY_VOCAB : TOY_VOCAB - 2);
        sp_digest own;

        opened = toy_opened(adapter, &options);
        assert_int_equal(sp_adapter_n_sites(opened), 1);
        assert_int_equal(sp_adapter_n_tables(opened), 0);
        own = sp_adapter_digest(opened);
        assert_memory_equal(own.bytes, digest.bytes, SP_DIGEST_BYTES);
        expect_note(opened, BIAS);
        expect_note(opened, "a copy of the base model's own bias");
        sp_adapter_release(opened);
        store(make_adapter_data(adapter, BIAS, NULL), dtypes[i % 3], 9, 3.5f);
        toy_refused(adapter, &options, "base-copy-differs", BIAS, "bias (first in row 9)", "9");
        make_adapter_destroy(adapter);
    }
    forget_folder(folder);
    sp_geometry_release(options.geometry);
}

static void biases_without_a_witness(void **state)
{
    sp_adapter_options options = toy_options(), none;
    char *without = head_with_bias(0), *folder = head_with_bias(TOY_VOCAB);
    make_adapter *adapter = with_bias("F16", TOY_VOCAB);
    sp_adapter *opened;

    (void)state;
    toy_refused(adapter, &options, "base-unavailable", "lm_head", "not given", "no base");
    options.base_dir = without;
    toy_refused(adapter, &options, "base-copy-differs", BIAS, "has not", "no bias");
    sp_adapter_options_default(&none, sizeof none);
    opened = toy_opened(adapter, &none);
    expect_note(opened, "a copy of the base's bias, not compared");
    sp_adapter_release(opened);
    make_adapter_destroy(adapter);
    options.base_dir = folder;
    adapter = with_bias("F16", TOY_VOCAB + 1);
    toy_refused(adapter, &options, "base-copy-differs", BIAS, "[17]", "an element more");
    make_adapter_destroy(adapter);
    adapter = toy_adapter();
    make_adapter_add_random(adapter, BIAS, 1, TOY_VOCAB, 1);
    toy_refused(adapter, &options, "shape-mismatch", BIAS, "must have one", "two dimensions");
    make_adapter_destroy(adapter);
    adapter = make_adapter_create();
    make_adapter_add(adapter, BIAS, "F16", 1, TOY_VOCAB);
    toy_refused(adapter, &options, "empty-adapter", NULL, "nothing to apply", "a copy alone");
    make_adapter_destroy(adapter);
    forget_folder(folder);
    forget_folder(without);
    sp_geometry_release(options.geometry);
}

/* A bias that is no copy beside a table's pair was trained. */
static void trained_biases(void **state)
{
    static const char *const names[] = {
        HEAD ".bias", "base_model.model.model.layers.0.self_attn.q_proj.base_layer.bias"};
    sp_adapter_options options = toy_options();

    (void)state;
    for (int i = 0; i < 2; i++) {
        make_adapter *adapter = toy_adapter();

        make_adapter_add(adapter, names[i], "F16", 1, TOY_VOCAB);
        toy_refused(adapter, &options, "bias", names[i], NULL, names[i]);
        make_adapter_destroy(adapter);
    }
    sp_geometry_release(options.geometry);
}

/* ---- the base's side ------------------------------------------------------------------------- */

static void base_unavailable(void **state)
{
    base b = open_base("qwen3-tied");
    make_adapter *adapter = with_pair();

    (void)state;
    make_adapter_add_random(adapter, EMBED ".weight", VOCAB, HIDDEN, 2);
    b.options.base_dir = NULL;
    toy_refused(adapter, &b.options, "base-unavailable", "embed_tokens", "not given", "no base");
    b.options.base_dir = "/nonexistent";
    toy_refused(adapter, &b.options, "base-unavailable", NULL, "cannot be read", "no folder");
    b.options.base_dir = SP_TEST_FIXTURES "/qwen3-bias";
    toy_refused(adapter, &b.options, "base-unavailable", NULL, "shape", "another base");
    make_adapter_destroy(adapter);
    close_base(&b);
}

/* Without a model tables are taken as they are, and copies are not compared. */
static void without_a_model(void **state)
{
    base b = open_base("qwen3-tied");
    make_adapter *adapter = make_adapter_create();
    sp_adapter_options options;
    sp_adapter *opened;

    (void)state;
    sp_adapter_options_default(&options, sizeof options);
    make_adapter_add_random(adapter, EMBED ".weight", 10, 5, 2);
    make_adapter_add_random(adapter, HEAD ".base_layer.weight", 10, 5, 2);
    opened = toy_opened(adapter, &options);
    assert_int_equal(sp_adapter_n_tables(opened), 1);
    assert_int_equal(sp_adapter_overlay_bytes(opened), 0);
    sp_adapter_release(opened);
    make_adapter_destroy(adapter);
    close_base(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_that_differ),
        cmocka_unit_test(smallest_difference),
        cmocka_unit_test(equal_tables),
        cmocka_unit_test(fewer_rows),
        cmocka_unit_test(table_shapes),
        cmocka_unit_test(wrong_shapes_are_not_read),
        cmocka_unit_test(twice_the_same_table),
        cmocka_unit_test(tokens_keep_their_order),
        cmocka_unit_test(tables_trained_as_one),
        cmocka_unit_test(tied_tokens_with_their_table),
        cmocka_unit_test(tokens_of_another_name),
        cmocka_unit_test(a_listed_module_as_a_table),
        cmocka_unit_test(tied_tokens),
        cmocka_unit_test(tied_by_hand),
        cmocka_unit_test(tied_tokens_beyond_the_vocabulary),
        cmocka_unit_test(tokens_and_a_table),
        cmocka_unit_test(token_lists),
        cmocka_unit_test(ids_are_in_the_digest),
        cmocka_unit_test(copies),
        cmocka_unit_test(copies_of_higher_precision),
        cmocka_unit_test(a_copy_leaves_the_digest),
        cmocka_unit_test(copies_of_fewer_rows),
        cmocka_unit_test(copies_of_other_shapes),
        cmocka_unit_test(equal_biases),
        cmocka_unit_test(biases_without_a_witness),
        cmocka_unit_test(trained_biases),
        cmocka_unit_test(base_unavailable),
        cmocka_unit_test(without_a_model),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
