/*
 * What a base's folder holds beside what is used: a head of its own on a base that says it is tied,
 * weights that nothing uses, keys that nobody knows. On copies of a fixture whose weights get
 * further tensors; the logits of a head whose rows are the embedding's, one place on, are the
 * fixture's own, one place on, to the bit.
 */
#include "support/engine_run.h"
#include "support/test.h"

#include "base/alloc.h"
#include "base/file.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { VOCAB = 512, HIDDEN = 64, LAYERS = 4 };

static const char fixture[] = SP_TEST_FIXTURES "/qwen3-tied";

/* ---- folders ------------------------------------------------------------------------------- */

static void copy_file(const char *folder, const char *name)
{
    char *path = sp_path_join(fixture, name), *data;
    size_t bytes;
    sp_error error;

    assert_ok(sp_file_read_all(path, (size_t)1 << 24, &data, &bytes, &error), &error);
    sp_test_write_file(folder, name, data, bytes);
    sp_free(data);
    sp_free(path);
}

/* A copy of the fixture; *out_data is the file of its weights, to be added to. */
static char *copy_fixture(sp_text *out_header, sp_text *out_data)
{
    char *folder = sp_test_make_directory();
    char *path = sp_path_join(fixture, "model.safetensors"), *file;
    size_t bytes;
    uint64_t header;
    sp_error error;

    copy_file(folder, "config.json");
    assert_ok(sp_file_read_all(path, (size_t)1 << 24, &file, &bytes, &error), &error);
    memcpy(&header, file, 8);
    while (file[8 + header - 1] == ' ')
        header--;
    assert_int_equal(file[8 + header - 1], '}');
    sp_text_add_bytes(out_header, file + 8, (size_t)header - 1);
    memcpy(&header, file, 8);
    sp_text_add_bytes(out_data, file + 8 + header, bytes - 8 - (size_t)header);
    sp_free(file);
    sp_free(path);
    return folder;
}

/* One more tensor, of BF16 [rows, cols]; `values` NULL: zeroes. */
static void add_tensor(sp_text *header, sp_text *data, const char *name, int rows, int cols,
                       const uint16_t *values)
{
    size_t bytes = (size_t)rows * (size_t)cols * 2;
    char *zeroes = sp_calloc(bytes, 1);

    sp_text_format(header,
                   ",\"%s\":{\"dtype\":\"BF16\",\"shape\":[%d,%d],\"data_offsets\":[%zu,%zu]}",
                   name, rows, cols, data->bytes, data->bytes + bytes);
    sp_text_add_bytes(data, values ? (const char *)values : zeroes, bytes);
    sp_free(zeroes);
}

static void write_weights(const char *folder, sp_text *header, sp_text *data)
{
    sp_text file = {0};
    uint64_t bytes;

    sp_text_add(header, "}");
    while (header->bytes % 8 != 0)
        sp_text_add(header, " ");
    bytes = header->bytes;
    sp_text_add_bytes(&file, (const char *)&bytes, 8);
    sp_text_add_bytes(&file, header->data, header->bytes);
    sp_text_add_bytes(&file, data->data, data->bytes);
    sp_test_write_file(folder, "model.safetensors", file.data, file.bytes);
    sp_text_free(&file);
    sp_text_free(header);
    sp_text_free(data);
}

/* The fixture's embedding, its rows moved by `by`; the caller frees it. */
static uint16_t *moved_embedding(const sp_text *header, const sp_text *data, int by)
{
    const char *entry = strstr(header->data, "\"model.embed_tokens.weight\"");
    uint16_t *moved = sp_calloc(VOCAB * HIDDEN, sizeof *moved);
    unsigned long long begin;

    assert_non_null(entry);
    entry = strstr(entry, "data_offsets");
    begin = strtoull(strchr(entry, '[') + 1, NULL, 10);
    for (int row = 0; row < VOCAB; row++)
        memcpy(moved + row * HIDDEN,
               data->data + begin + (size_t)((row + by) % VOCAB) * HIDDEN * sizeof *moved,
               HIDDEN * sizeof *moved);
    return moved;
}

static sp_status open_folder(const char *folder, sp_engine **out_engine, sp_error *error)
{
    sp_engine_options options;

    sp_engine_options_default(&options, sizeof options);
    options.model_dir = folder;
    options.threads = 1;
    options.kv_tokens = 64;
    options.max_loras = 0;
    return sp_engine_open(&options, NULL, 0, out_engine, error);
}

static void end(char *folder)
{
    sp_test_remove_tree(folder);
    sp_free(folder);
}

/* ---- the head ------------------------------------------------------------------------------ */

/* Logits of one prompt; closes the engine. */
static engine_run run_prompt(sp_engine *engine)
{
    static const int32_t prompt[] = {5, 77, 300, 12};

    return engine_run_alone(engine, NULL, prompt, 4, 1, true);
}

static void check_head(int by, const char *note)
{
    sp_text header = {0}, data = {0};
    char *folder = copy_fixture(&header, &data);
    uint16_t *head = moved_embedding(&header, &data, by);
    sp_engine *plain, *engine;
    engine_run want, got;
    sp_error error;

    add_tensor(&header, &data, "lm_head.weight", VOCAB, HIDDEN, head);
    write_weights(folder, &header, &data);
    assert_ok(open_folder(fixture, &plain, &error), &error);
    assert_null(sp_engine_note(plain, 0));
    assert_ok(open_folder(folder, &engine, &error), &error);
    if (note)
        assert_non_null(strstr(sp_engine_note(engine, 0), note));
    assert_null(sp_engine_note(engine, note != NULL));
    assert_int_equal(sp_engine_shape(engine)->tied_embeddings, by == 0);
    want = run_prompt(plain);
    got = run_prompt(engine);
    assert_int_equal(got.n_logits, want.n_logits);
    assert_true(want.n_logits > 0);
    for (int32_t i = 0; i < want.n_logits; i++)
        for (int token = 0; token < VOCAB; token++)
            assert_memory_equal(&got.logits[i * VOCAB + token],
                                &want.logits[i * VOCAB + (token + by) % VOCAB], sizeof(float));
    engine_run_free(&want);
    engine_run_free(&got);
    sp_free(head);
    end(folder);
}

static void test_own_head(void **state)
{
    (void)state;
    check_head(1, "lm_head.weight is not the embedding");
    check_head(0, NULL); /* a copy: nothing to say */
}

/* ---- weights ------------------------------------------------------------------------------- */

static char *folder_with(const char *const *names, size_t n)
{
    sp_text header = {0}, data = {0};
    char *folder = copy_fixture(&header, &data);

    for (size_t i = 0; i < n; i++)
        add_tensor(&header, &data, names[i], 2, 3, NULL);
    write_weights(folder, &header, &data);
    return folder;
}

static void test_unused(void **state)
{
    static const char *const some[] = {"model.visual.patch.weight", "mtp.layers.0.norm.weight",
                                       "model.layers.0.self_attn.rotary_emb.inv_freq"};
    static const char *const many[] = {"a", "b", "c", "d", "e", "f", "model.layers.4.x"};
    sp_engine *engine;
    sp_error error;
    char *folder = folder_with(some, 3);

    (void)state;
    assert_ok(open_folder(folder, &engine, &error), &error);
    assert_string_equal(
        sp_engine_note(engine, 0),
        "weights that nothing uses: model.visual.patch.weight, mtp.layers.0.norm.weight");
    assert_null(sp_engine_note(engine, 1));
    sp_engine_close(engine);
    end(folder);
    folder = folder_with(many, 7);
    assert_ok(open_folder(folder, &engine, &error), &error);
    assert_string_equal(sp_engine_note(engine, 0),
                        "weights that nothing uses: a, b, c, d, e and 2 more");
    sp_engine_close(engine);
    end(folder);
}

static void test_not_applied(void **state)
{
    static const char *const names[] = {
        "model.layers.0.mlp.gate_proj.bias", "model.layers.3.self_attn.q_proj.bias",
        "model.layers.1.mlp.up_proj.weight_scale_inv", "lm_head.bias", "model.norm.bias"};

    (void)state;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char *folder = folder_with(&names[i], 1);
        sp_engine *engine = NULL;
        size_t bytes = sp_alloc_bytes();
        sp_error error;

        assert_int_equal(open_folder(folder, &engine, &error), SP_ERR_UNSUPPORTED);
        assert_string_equal(error.code, "unused-weight");
        assert_string_equal(error.subject, names[i]);
        assert_null(engine);
        assert_int_equal(sp_alloc_bytes(), bytes);
        end(folder);
    }
}

static void test_keys(void **state)
{
    char *folder = sp_test_make_directory(), *config;
    sp_text changed = {0};
    sp_engine *engine;
    size_t bytes;
    sp_error error;

    (void)state;
    copy_file(folder, "model.safetensors");
    assert_ok(sp_file_read_all(SP_TEST_FIXTURES "/qwen3-tied/config.json", 1 << 20, &config, &bytes,
                               &error),
              &error);
    sp_text_add(&changed, "{\"new_thing\": 5, \"another\": [1],");
    sp_text_add(&changed, strchr(config, '{') + 1);
    sp_test_write_file(folder, "config.json", changed.data, changed.bytes);
    assert_ok(open_folder(folder, &engine, &error), &error);
    assert_string_equal(sp_engine_note(engine, 0), "config.json: not used: new_thing, another");
    sp_engine_close(engine);
    sp_text_clear(&changed);
    sp_text_add(&changed, "{\"logit_scale\": 0.5,");
    sp_text_add(&changed, strchr(config, '{') + 1);
    sp_test_write_file(folder, "config.json", changed.data, changed.bytes);
    assert_int_equal(open_folder(folder, &engine, &error), SP_ERR_UNSUPPORTED);
    assert_string_equal(error.subject, "logit_scale");
    sp_text_free(&changed);
    sp_free(config);
    end(folder);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_own_head),
        cmocka_unit_test(test_unused),
        cmocka_unit_test(test_not_applied),
        cmocka_unit_test(test_keys),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
