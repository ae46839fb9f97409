/*
 * Files that are cut, shrink, hang or are something else; and memory that runs out anywhere. Each
 * ends in a named error, with nothing left behind.
 */
#include "adapter/known_module.h"
#include "adapter/toy.h"

#include "adapter/intake_state.h"
#include "base/alloc.h"
#include "base/file.h"
#include "base/json.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static void write_cut(const char *folder, const char *name, const void *bytes, size_t n)
{
    sp_test_write_file(folder, name, bytes, n);
}

/* ---- cut files ------------------------------------------------------------------------------- */

static void weights_cut_at_every_byte(void **state)
{
    sp_adapter_options options = toy_options();
    make_adapter *adapter = toy_adapter();
    char *folder = make_adapter_folder(adapter);
    size_t n_bytes;
    unsigned char *bytes = make_adapter_bytes(adapter, &n_bytes);

    (void)state;
    for (size_t n = 0; n < n_bytes; n++) {
        sp_adapter *opened = NULL;
        sp_error error;

        write_cut(folder, "adapter_model.safetensors", bytes, n);
        assert_int_equal(sp_adapter_open(folder, &options, &opened, &error), SP_ERR_TRUNCATED);
        assert_string_equal(error.code, "truncated");
        assert_null(opened);
    }
    sp_free(bytes);
    sp_test_remove_tree(folder);
    sp_free(folder);
    make_adapter_destroy(adapter);
    sp_geometry_release(options.geometry);
}

static void config_cut_at_every_byte(void **state)
{
    static const char config[] = "{\"r\": 2, \"lora_alpha\": 4, \"target_modules\": [\"q_proj\"]}";
    sp_adapter_options options = toy_options();
    make_adapter *adapter = toy_adapter();
    char *folder = make_adapter_folder(adapter);

    (void)state;
    for (size_t n = 0; n < sizeof config - 1; n++) {
        sp_adapter *opened = NULL;
        sp_error error;

        write_cut(folder, "adapter_config.json", config, n);
        assert_int_equal(sp_adapter_open(folder, &options, &opened, &error), SP_ERR_REFUSED);
        assert_string_equal(error.code, "config-malformed");
        assert_null(opened);
    }
    sp_test_remove_tree(folder);
    sp_free(folder);
    make_adapter_destroy(adapter);
    sp_geometry_release(options.geometry);
}

/* A large file at each of its tensors' borders, and one byte to either side. */
static void cut_at_every_border(void **state)
{
    char path[512];
    char *folder = sp_test_make_directory();
    char *bytes;
    size_t n_bytes;
    sp_checkpoint *checkpoint;
    sp_error error;

    (void)state;
    snprintf(path, sizeof path, "%s/qwen3-tied/adapters/r64", SP_TEST_FIXTURES);
    assert_ok(sp_checkpoint_open(path, "adapter_model", &checkpoint, &error), &error);
    assert_ok(
        sp_file_read_all(sp_checkpoint_path(checkpoint, 0), 1u << 24, &bytes, &n_bytes, &error),
        &error);
    write_cut(folder, "adapter_config.json", "{\"r\": 64, \"lora_alpha\": 4}", 26);
    for (size_t i = 0; i < 3 * sp_checkpoint_n_tensors(checkpoint); i++) {
        const sp_tensor *tensor = sp_checkpoint_at(checkpoint, i / 3);
        size_t n = (size_t)tensor->offset_bytes + i % 3 - 1;
        sp_adapter_options options;
        sp_adapter *opened = NULL;

        sp_adapter_options_default(&options, sizeof options);
        write_cut(folder, "adapter_model.safetensors", bytes, n);
        assert_int_equal(sp_adapter_open(folder, &options, &opened, &error), SP_ERR_TRUNCATED);
        assert_null(opened);
    }
    sp_free(bytes);
    sp_checkpoint_destroy(checkpoint);
    sp_test_remove_tree(folder);
    sp_free(folder);
}

/* ---- other things in a file's place ---------------------------------------------------------- */

static const struct {
    const char *command; /* run inside the folder of a good adapter */
    const char *code;
} places[] = {
    {"rm adapter_config.json && mkfifo adapter_config.json", "config-missing"},
    {"rm adapter_config.json && mkdir adapter_config.json", "config-missing"},
    {"rm adapter_config.json && ln -s adapter_config.json adapter_config.json", "config-missing"},
    {"rm adapter_config.json && ln -s nowhere adapter_config.json", "config-missing"},
    {"rm adapter_config.json && ln -s /dev/zero adapter_config.json", "config-missing"},
    {"rm adapter_model.safetensors && mkfifo adapter_model.safetensors", "weights-missing"},
    {"rm adapter_model.safetensors && mkdir adapter_model.safetensors", "weights-missing"},
    {"rm adapter_model.safetensors && ln -s adapter_model.safetensors adapter_model.safetensors",
     "weights-missing"},
    {"rm adapter_model.safetensors && ln -s /dev/zero adapter_model.safetensors",
     "weights-missing"},
    {"rm adapter_model.safetensors && ln -s nowhere adapter_model.safetensors", "weights-missing"},
    {"mv adapter_model.safetensors adapter_model.bin", "pickle-refused"},
    {"printf 'version https://git-lfs.github.com/spec/v1\\noid sha256:00\\nsize 1\\n' > "
     "adapter_model.safetensors",
     "lfs-pointer"},
    {"printf 'PK\\003\\004xxxxxxxxxxxx' > adapter_model.safetensors", "pickle-refused"},
    {"printf '{\"weight_map\":{\"a\":\"../x\"}}' > adapter_model.safetensors.index.json && rm "
     "adapter_model.safetensors",
     "unsafe-path"},
    {"mv adapter_model.safetensors real && ln -s real adapter_model.safetensors", NULL},
    {"mkdir d && mv adapter_config.json d/c && ln -s d/c adapter_config.json", NULL},
    {"touch adapter_model.bin README.md", NULL},
};

static void other_things_in_their_place(void **state)
{
    sp_adapter_options options = toy_options();
    make_adapter *adapter = toy_adapter();

    (void)state;
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        char *folder = make_adapter_folder(adapter);
        char command[1024];
        sp_adapter *opened = NULL;
        sp_error error;
        sp_status status;

        snprintf(command, sizeof command, "cd %s && %s", folder, places[i].command);
        assert_int_equal(system(command), 0);
        status = sp_adapter_open(folder, &options, &opened, &error);
        if (places[i].code) {
            assert_int_not_equal(status, SP_OK);
            if (strcmp(error.code, places[i].code) != 0)
                fail_msg("%s: %s: %s", places[i].command, error.code, error.text);
            assert_null(opened);
        } else {
            assert_ok(status, &error);
            sp_adapter_release(opened);
        }
        sp_test_remove_tree(folder);
        sp_free(folder);
    }
    make_adapter_destroy(adapter);
    sp_geometry_release(options.geometry);
}

/* In a folder that lies deep the text still says what is wrong, and of which file. */
static void deep_folders(void **state)
{
    static const struct {
        const char *command, *code, *words;
    } cases[] = {
        {"printf '{\"r\": \"x\", \"lora_alpha\": 4}' > adapter_config.json", "bad-rank",
         "adapter_config.json: \"r\" must be an integer"},
        {"printf '{' > adapter_config.json", "config-malformed", "adapter_config.json: "},
        {"rm adapter_config.json", "config-missing", "adapter_config.json: No such file"},
        {"mkfifo f && mv f adapter_config.json", "config-missing", "is not a regular file"},
        {"rm adapter_model.safetensors", "weights-missing", "and no index of shards"},
        {"mv adapter_model.safetensors adapter_model.bin", "pickle-refused",
         "adapter_model.bin is a pickle"},
        {"printf x > adapter_model.safetensors", "truncated",
         "adapter_model.safetensors has 1 bytes"},
        {"printf '{    }    }' > adapter_model.safetensors", "header-malformed",
         "begins like a JSON text"},
        {"printf xx >> adapter_model.safetensors", "header-malformed", "2 bytes behind"},
        {"rm adapter_model.safetensors && printf '{}' > adapter_model.safetensors.index.json",
         "header-malformed", "has no \"weight_map\""},
        {"rm adapter_model.safetensors && printf '{\"weight_map\": {\"t\": \"gone\"}}' > "
         "adapter_model.safetensors.index.json",
         "weights-missing", "gone: No such file"},
    };
    sp_adapter_options options = toy_options();
    make_adapter *adapter = toy_adapter();

    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char *top = sp_test_make_directory();
        char path[1400], command[4200];
        size_t n = (size_t)snprintf(path, sizeof path, "%s", top);
        sp_adapter *opened = NULL;
        sp_error error;

        for (int level = 0; level < 6; level++)
            n += (size_t)snprintf(path + n, sizeof path - n, "/%0150d", level);
        snprintf(command, sizeof command, "mkdir -p %s", path);
        assert_int_equal(system(command), 0);
        make_adapter_write(adapter, path, 1);
        snprintf(command, sizeof command, "cd %s && %s", path, cases[i].command);
        assert_int_equal(system(command), 0);
        assert_int_not_equal(sp_adapter_open(path, &options, &opened, &error), SP_OK);
        if (strcmp(error.code, cases[i].code) != 0 || !strstr(error.text, cases[i].words))
            fail_msg("%s: %s, %s", cases[i].command, error.code, error.text);
        sp_test_remove_tree(top);
        sp_free(top);
    }
    make_adapter_destroy(adapter);
    sp_geometry_release(options.geometry);
}

static void missing_folders(void **state)
{
    static const char *const paths[] = {"/nonexistent", "/nonexistent/", "", "/dev/null",
                                        "/nonexistent/adapter_model.safetensors"};
    sp_adapter_options options = toy_options();

    (void)state;
    for (size_t i = 0; i < sizeof paths / sizeof *paths; i++) {
        sp_adapter *opened = NULL;
        sp_error error;

        assert_int_equal(sp_adapter_open(paths[i], &options, &opened, &error), SP_ERR_NOT_FOUND);
        assert_string_equal(error.code, "config-missing");
    }
    sp_geometry_release(options.geometry);
}

/* A pickle is told apart by its name or its first bytes, and never opened as one. */
static void pickles_by_path(void **state)
{
    static const char *const names[] = {"adapter_model.bin", "model.pt", "x.pth", "x.pkl",
                                        "x.ckpt"};
    sp_adapter_options options = toy_options();
    make_adapter *adapter = toy_adapter();
    char *folder = make_adapter_folder(adapter);

    (void)state;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char path[512];
        sp_adapter *opened = NULL;
        sp_error error;

        write_cut(folder, names[i], "PK\3\4", 4);
        snprintf(path, sizeof path, "%s/%s", folder, names[i]);
        assert_int_equal(sp_adapter_open(path, &options, &opened, &error), SP_ERR_REFUSED);
        assert_string_equal(error.code, "pickle-refused");
    }
    sp_test_remove_tree(folder);
    sp_free(folder);
    make_adapter_destroy(adapter);
    sp_geometry_release(options.geometry);
}

/* ---- files that change ----------------------------------------------------------------------- */

/* Header and names are read, then the file is cut to `keep` bytes, then the data is read. */
static sp_status read_after_cut(const char *folder, off_t keep, bool remove_it, sp_error *error)
{
    sp_adapter_options options = toy_options();
    const sp_intake_origin origin = {.config_name = "config"};
    static const char config[] = "{\"r\": 2, \"lora_alpha\": 4}";
    sp_checkpoint *checkpoint;
    sp_intake *intake;
    char path[512];
    sp_status status;

    snprintf(path, sizeof path, "%s/adapter_model.safetensors", folder);
    assert_ok(sp_checkpoint_open(folder, "adapter_model", &checkpoint, error), error);
    assert_ok(sp_intake_begin(config, strlen(config), &origin, &options, "toy", &intake, error),
              error);
    assert_ok(sp_intake_audit(intake, sp_checkpoint_at(checkpoint, 0),
                              sp_checkpoint_n_tensors(checkpoint), error),
              error);
    assert_int_equal(remove_it ? unlink(path) : truncate(path, keep), 0);
    status = sp_intake_read_files(intake, checkpoint, NULL, error);
    sp_intake_destroy(intake);
    sp_checkpoint_destroy(checkpoint);
    sp_geometry_release(options.geometry);
    return status;
}

static void a_file_that_shrinks(void **state)
{
    make_adapter *adapter = toy_adapter();
    size_t blocks = sp_alloc_blocks();

    (void)state;
    for (int i = 0; i < 6; i++) {
        char *folder = make_adapter_folder(adapter);
        sp_error error;
        /* The last one has become longer: it is not the file whose header was read, either. */
        sp_status status = read_after_cut(folder, i == 5 ? 100000 : i * 150, i == 4, &error);

        assert_int_equal(status, i == 4 ? SP_ERR_NOT_FOUND : SP_ERR_TRUNCATED);
        assert_string_equal(error.code, i == 4 ? "weights-missing" : "truncated");
        sp_test_remove_tree(folder);
        sp_free(folder);
        assert_int_equal(sp_alloc_blocks(), blocks);
    }
    make_adapter_destroy(adapter);
}

/* Once open, an adapter needs its files no more. */
static void a_folder_that_goes(void **state)
{
    sp_adapter_options options = toy_options();
    make_adapter *adapter = toy_adapter();
    sp_adapter *opened = toy_opened(adapter, &options); /* the folder is gone by now */
    const sp_adapter_site *site = sp_adapter_site_at(opened, 0);
    const uint16_t *want = make_adapter_data(
        adapter, "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", NULL);

    (void)state;
    assert_memory_equal(site->a.data, want, 2 * 8 * sizeof *want);
    sp_adapter_release(opened);
    make_adapter_destroy(adapter);
    sp_geometry_release(options.geometry);
}

/* ---- many and long names --------------------------------------------------------------------- */

static void names_out_of_the_ordinary(void **state)
{
    static char name[70000];
    sp_adapter_options options = toy_options();
    make_adapter *adapter = toy_adapter();

    (void)state;
    memset(name, 'n', 65536);
    make_adapter_add(adapter, name, "F32", 2, 1, 1);
    toy_refused(adapter, &options, "not-peft-key", NULL, "nnn", "64 KB");
    make_adapter_destroy(adapter);
    adapter = toy_adapter();
    make_adapter_add(adapter, "model.layers.0.\xff\xfe.lora_A.weight", "F32", 2, 1, 1);
    toy_refused(adapter, &options, "header-malformed", NULL, "UTF-8", "not UTF-8");
    make_adapter_destroy(adapter);
    adapter = toy_adapter();
    make_adapter_add(adapter, "model.layers.0\\u0000.self_attn.q_proj.lora_A.weight", "F32", 2, 1,
                     1);
    toy_refused(adapter, &options, "header-malformed", NULL, NULL, "a NUL");
    make_adapter_destroy(adapter);
    adapter = toy_adapter();
    make_adapter_add(adapter, "model.layers.0.self_attn.q_proj.lora_A.\xf0\x9f\x92\xa9.weight",
                     "F32", 2, 2, 8);
    toy_refused(adapter, &options, "mixed-adapter-names", NULL, NULL, "another adapter's name");
    make_adapter_destroy(adapter);
    sp_geometry_release(options.geometry);
}

/* 100,000 tensors are opened whole, and one of them that has no partner is found. */
static void a_hundred_thousand_tensors(void **state)
{
    enum { LAYERS = 50, EXPERTS = 1000 };
    make_adapter *adapter = make_adapter_create();
    sp_adapter_options options;
    sp_adapter *opened;
    char path[128];

    (void)state;
    sp_adapter_options_default(&options, sizeof options);
    make_adapter_config(adapter, "{\"r\": 1, \"lora_alpha\": 1}");
    for (int layer = 0; layer < LAYERS; layer++) {
        for (int expert = 0; expert < EXPERTS; expert++) {
            snprintf(path, sizeof path, "model.layers.%d.mlp.experts.%d.up_proj", layer, expert);
            make_adapter_add_pair(adapter, path, 1, 1, 1, 1);
        }
    }
    opened = toy_opened(adapter, &options);
    assert_int_equal(sp_adapter_n_sites(opened), LAYERS * EXPERTS);
    assert_int_equal(sp_adapter_site_at(opened, 49999)->expert, EXPERTS - 1);
    sp_adapter_release(opened);
    make_adapter_add_random(adapter, "model.layers.7.mlp.experts.1000.up_proj.lora_A.weight", 1, 1,
                            1);
    toy_refused(adapter, &options, "unpaired-tensor",
                "model.layers.7.mlp.experts.1000.up_proj.lora_A.weight", NULL, "100,001 tensors");
    make_adapter_destroy(adapter);
}

/* ---- memory that runs out -------------------------------------------------------------------- */

static make_adapter *rich_adapter(void)
{
    make_adapter *adapter = toy_adapter();

    make_adapter_config_with(
        adapter, ", \"rank_pattern\": {\"(q|v)_proj\": 2, \"nothing.*\": 3}, \"target_modules\": "
                 "[\"q_proj\", \"v_proj\", \"embed_tokens\"], \"exclude_modules\": \".*o_proj\", "
                 "\"trainable_token_indices\": [3, 1], \"fan_in_fan_out\": true");
    make_adapter_add_pair(adapter, "base_model.model.model.layers.0.mlp.experts", 8, 3, 8, 5);
    make_adapter_add_random(adapter, "model.embed_tokens.lora_embedding_A", 2, 16, 6);
    make_adapter_add_random(adapter, "model.embed_tokens.lora_embedding_B", 8, 2, 7);
    make_adapter_add_random(adapter, "model.embed_tokens.token_adapter.trainable_tokens_delta", 2,
                            8, 8);
    make_adapter_add_random(adapter, "lm_head.base_layer.weight", 16, 8, 9);
    return adapter;
}

/* Opens and prints the receipt; SP_ERR_MEMORY from either. */
static sp_status open_and_print(const char *folder, const sp_adapter_options *options)
{
    sp_receipt_options receipt_options;
    sp_receipt *receipt = NULL;
    sp_adapter *opened = NULL;
    sp_status status = sp_adapter_open(folder, options, &opened, NULL);

    if (status != SP_OK) {
        assert_null(opened);
        return status;
    }
    sp_receipt_options_default(&receipt_options, sizeof receipt_options);
    receipt_options.engine_modules = 1u << SP_MODULE_Q_PROJ;
    status = sp_receipt_create(opened, &receipt_options, &receipt, NULL);
    sp_receipt_destroy(receipt);
    sp_adapter_release(opened);
    return status;
}

static void every_allocation_fails(const char *folder, const sp_adapter_options *options)
{
    size_t blocks;

    /* The JSON library allocates through the same counter, so that its failures count too. */
    sp_json_own_memory(true);
    assert_int_equal(open_and_print(folder, options), SP_OK);
    blocks = sp_alloc_blocks();
    for (int64_t n = 0;; n++) {
        sp_status status;

        sp_alloc_fail_after(n);
        status = open_and_print(folder, options);
        if (!sp_alloc_failed()) {
            sp_alloc_fail_after(-1);
            assert_int_equal(status, SP_OK);
            assert_true(n > 100);
            break;
        }
        sp_alloc_fail_after(-1);
        if (status != SP_ERR_MEMORY)
            fail_msg("allocation %lld: %s", (long long)n, sp_status_name(status));
        if (sp_alloc_blocks() != blocks)
            fail_msg("allocation %lld leaves something behind", (long long)n);
    }
    assert_int_equal(sp_alloc_blocks(), blocks);
    sp_json_own_memory(false);
}

static void allocation_failures(void **state)
{
    sp_adapter_options options;
    make_adapter *adapter = rich_adapter();
    char *folder = make_adapter_folder(adapter);

    (void)state;
    sp_adapter_options_default(&options, sizeof options);
    every_allocation_fails(folder, &options);
    sp_test_remove_tree(folder);
    sp_free(folder);
    make_adapter_destroy(adapter);
}

/* The same for fused experts, which a geometry turns into sites. */
static void allocation_failures_of_experts(void **state)
{
    sp_adapter_options options = toy_options();
    make_adapter *adapter = toy_adapter();
    char *folder;

    (void)state;
    make_adapter_add_pair(adapter, "base_model.model.model.layers.0.mlp.experts", 8, 3, 8, 5);
    folder = make_adapter_folder(adapter);
    every_allocation_fails(folder, &options);
    sp_test_remove_tree(folder);
    sp_free(folder);
    make_adapter_destroy(adapter);
    sp_geometry_release(options.geometry);
}

/* The same with a base whose table is mapped and compared. */
static void allocation_failures_with_a_base(void **state)
{
    sp_adapter_options options;
    sp_error error;

    (void)state;
    sp_adapter_options_default(&options, sizeof options);
    assert_ok(sp_geometry_open(SP_TEST_FIXTURES "/qwen3-tied", &options.geometry, &error), &error);
    options.base_dir = SP_TEST_FIXTURES "/qwen3-tied";
    every_allocation_fails(SP_TEST_FIXTURES "/qwen3-tied/adapters/embed-lora", &options);
    sp_geometry_release(options.geometry);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(weights_cut_at_every_byte),
        cmocka_unit_test(config_cut_at_every_byte),
        cmocka_unit_test(cut_at_every_border),
        cmocka_unit_test(other_things_in_their_place),
        cmocka_unit_test(deep_folders),
        cmocka_unit_test(missing_folders),
        cmocka_unit_test(pickles_by_path),
        cmocka_unit_test(a_file_that_shrinks),
        cmocka_unit_test(a_folder_that_goes),
        cmocka_unit_test(names_out_of_the_ordinary),
        cmocka_unit_test(a_hundred_thousand_tensors),
        cmocka_unit_test(allocation_failures),
        cmocka_unit_test(allocation_failures_of_experts),
        cmocka_unit_test(allocation_failures_with_a_base),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
