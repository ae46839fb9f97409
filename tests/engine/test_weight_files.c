/* The files of the base weights: what happens to them under an engine is found and named. */
#include "support/test.h"

#include "base/alloc.h"
#include "base/file.h"
#include "engine/model/weight_files.h"
#include "support/engine_run.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define SOURCE     SP_TEST_FIXTURES "/qwen3-tied"
#define BYTES_MAX  ((size_t)1 << 20)
#define FILE_BYTES 514352 /* of the fixture's model.safetensors */

typedef struct scene {
    char *directory, *weights;
    sp_engine *engine;
} scene;

static void copy_file(const char *directory, const char *name)
{
    char *path = sp_path_join(SOURCE, name), *data;
    size_t bytes;
    sp_error error;

    assert_ok(sp_file_read_all(path, BYTES_MAX, &data, &bytes, &error), &error);
    sp_test_write_file(directory, name, data, bytes);
    sp_free(data);
    sp_free(path);
}

static scene make_scene(bool copy)
{
    scene made = {.directory = sp_test_make_directory()};
    sp_engine_options options;

    copy_file(made.directory, "config.json");
    copy_file(made.directory, "model.safetensors");
    made.weights = sp_path_join(made.directory, "model.safetensors");
    sp_engine_options_default(&options, sizeof options);
    options.model_dir = made.directory;
    options.max_loras = 0;
    options.kv_tokens = 64;
    options.max_context = 64;
    options.threads = 1;
    options.weights_copy = copy;
    made.engine = engine_run_open(&options, NULL, 0);
    assert_false(sp_engine_weights_touched(made.engine));
    assert_int_equal(sp_engine_check_weights(made.engine, NULL), SP_OK);
    return made;
}

static void free_scene(scene *made)
{
    sp_engine_close(made->engine);
    sp_test_remove_tree(made->directory);
    sp_free(made->directory);
    sp_free(made->weights);
}

static void assert_found(scene *made, sp_status status, const char *code)
{
    sp_error error;

    assert_true(sp_engine_weights_touched(made->engine));
    assert_int_equal(sp_engine_check_weights(made->engine, &error), status);
    assert_string_equal(error.code, code);
    assert_non_null(strstr(error.text, "model.safetensors"));
    assert_string_equal(error.subject, made->weights);
}

static void test_shorter_and_longer(void **state)
{
    scene made = make_scene(false);

    (void)state;
    assert_int_equal(truncate(made.weights, 1000), 0);
    assert_found(&made, SP_ERR_TRUNCATED, SP_CODE_WEIGHTS_CHANGED);
    assert_false(sp_engine_weights_touched(made.engine)); /* said once */
    assert_int_equal(truncate(made.weights, FILE_BYTES + 1), 0);
    assert_found(&made, SP_ERR_INPUT, SP_CODE_WEIGHTS_CHANGED);
    free_scene(&made);
}

static void test_written_in_place(void **state)
{
    scene made = make_scene(false);
    int fd = open(made.weights, O_WRONLY | O_CLOEXEC);

    (void)state;
    assert_int_equal(pwrite(fd, "x", 1, 400000), 1);
    close(fd);
    assert_found(&made, SP_ERR_INPUT, SP_CODE_WEIGHTS_CHANGED);
    free_scene(&made);
}

static void test_replaced_and_removed(void **state)
{
    scene made = make_scene(false);
    char *other = sp_path_join(made.directory, "other");

    (void)state;
    sp_test_write_file(made.directory, "other", "x", 1);
    assert_int_equal(rename(other, made.weights), 0);
    assert_found(&made, SP_ERR_STATE, SP_CODE_WEIGHTS_REPLACED);
    assert_int_equal(unlink(made.weights), 0);
    assert_int_equal(sp_engine_check_weights(made.engine, NULL), SP_ERR_STATE);
    sp_free(other);
    free_scene(&made);
}

/* Other files of the folder, and reading, are nobody's business. */
static void test_other_files(void **state)
{
    scene made = make_scene(false);
    char *data;
    size_t bytes;
    sp_error error;

    (void)state;
    sp_test_write_file(made.directory, "notes", "x", 1);
    assert_ok(sp_file_read_all(made.weights, BYTES_MAX, &data, &bytes, &error), &error);
    assert_int_equal(bytes, FILE_BYTES);
    sp_free(data);
    assert_false(sp_engine_weights_touched(made.engine));
    assert_int_equal(sp_engine_check_weights(made.engine, NULL), SP_OK);
    assert_int_equal(sp_engine_check_weights(NULL, &error), SP_ERR_ARGUMENT);
    assert_false(sp_engine_weights_touched(NULL));
    free_scene(&made);
}

/* A copy runs on, with the same tokens, whatever becomes of its file. */
static void test_a_copy(void **state)
{
    const int32_t prompt[] = {1, 2, 3};
    scene mapped = make_scene(false), copied = make_scene(true);
    engine_run want = engine_run_init(NULL, prompt, 3, 8),
               got = engine_run_init(NULL, prompt, 3, 8);
    engine_run *one = &want, *other = &got;

    (void)state;
    assert_int_equal(truncate(copied.weights, 0), 0);
    assert_false(sp_engine_weights_touched(copied.engine));
    assert_int_equal(sp_engine_check_weights(copied.engine, NULL), SP_OK);
    engine_run_submit(mapped.engine, &want);
    engine_run_all(mapped.engine, &one, 1);
    engine_run_submit(copied.engine, &got);
    engine_run_all(copied.engine, &other, 1);
    assert_int_equal(got.n_tokens, want.n_tokens);
    assert_true(want.n_tokens > 0);
    assert_memory_equal(got.tokens, want.tokens, (size_t)want.n_tokens * sizeof *want.tokens);
    engine_run_free(&want);
    engine_run_free(&got);
    free_scene(&mapped);
    free_scene(&copied);
}

/* ---- reading ahead ------------------------------------------------------------------------- */

typedef struct told {
    int n_calls;
    size_t done, total;
} told;

static void hear(void *user, const char *what, size_t done, size_t total)
{
    told *all = user;

    assert_string_equal(what, "weights");
    assert_true(done > all->done && done <= total);
    assert_true(all->n_calls == 0 || total == all->total);
    *all = (told){all->n_calls + 1, done, total};
}

/* Bytes of the mapping that this process has in its page tables. */
static size_t mapped_bytes(const char *path)
{
    FILE *maps = fopen("/proc/self/smaps", "r");
    char line[1024];
    bool here = false;
    size_t kib, sum = 0;

    assert_non_null(maps);
    while (fgets(line, sizeof line, maps)) {
        if (strchr(line, '-') && strchr(line, '/'))
            here = strstr(line, path) != NULL;
        if (here && sscanf(line, "Rss: %zu kB", &kib) == 1)
            sum += kib << 10;
    }
    fclose(maps);
    return sum;
}

static sp_engine *open_prefaulted(const scene *made, bool prefault, bool copy, told *out_told)
{
    sp_engine_options options;

    sp_engine_options_default(&options, sizeof options);
    options.model_dir = made->directory;
    options.max_loras = 0;
    options.kv_tokens = options.max_context = 64;
    options.threads = 1;
    options.weights_copy = copy;
    options.weights_prefault = prefault;
    options.progress = hear;
    options.progress_user = out_told;
    return engine_run_open(&options, NULL, 0);
}

/* All that is used is there when the engine is open; of a copy the whole file counts. */
static void test_prefault(void **state)
{
    scene made = make_scene(false);
    told mapped = {0}, copied = {0}, none = {0};
    sp_engine_stats stats = {.struct_bytes = sizeof stats};
    sp_engine *engine;
    size_t before; /* the kernel may map more than was read */

    (void)state;
    sp_engine_close(made.engine);
    made.engine = open_prefaulted(&made, false, false, &none);
    before = mapped_bytes(made.weights);
    assert_int_equal(none.n_calls, 0);
    assert_int_equal(sp_engine_get_stats(made.engine, &stats, NULL), SP_OK);
    assert_true(stats.prefault_seconds <= 0);
    engine = open_prefaulted(&made, true, false, &mapped);
    assert_int_equal(sp_engine_get_stats(engine, &stats, NULL), SP_OK);
    assert_true(mapped_bytes(made.weights) >= before + stats.weight_bytes);
    assert_int_equal(mapped.done, mapped.total);
    assert_int_equal(mapped.total, stats.weight_bytes);
    assert_true(stats.prefault_seconds > 0);
    sp_engine_close(engine);
    sp_engine_close(open_prefaulted(&made, true, true, &copied));
    assert_int_equal(copied.done, FILE_BYTES);
    assert_int_equal(copied.total, FILE_BYTES);
    free_scene(&made);
}

/* A file that becomes shorter between its opening and its reading is an error with its name. */
static void test_prefault_of_a_shorter_file(void **state)
{
    scene made = make_scene(false);
    sp_checkpoint *checkpoint;
    sp_weight_files files;
    sp_error error;

    (void)state;
    assert_ok(sp_checkpoint_open(made.directory, "model", &checkpoint, &error), &error);
    assert_ok(
        sp_weight_files_open(checkpoint, false, (sp_load_progress){NULL, NULL}, &files, &error),
        &error);
    assert_true(sp_weight_files_use(&files, 0, 400000, 1000));
    assert_ok(sp_weight_files_prefault(&files, (sp_load_progress){NULL, NULL}, &error), &error);
    assert_int_equal(truncate(made.weights, 1000), 0);
    assert_int_equal(sp_weight_files_prefault(&files, (sp_load_progress){NULL, NULL}, &error),
                     SP_ERR_IO);
    assert_non_null(strstr(error.text, "model.safetensors"));
    assert_string_equal(error.subject, made.weights);
    assert_int_equal(error.position, 400000);
    sp_weight_files_close(&files);
    sp_checkpoint_destroy(checkpoint);
    free_scene(&made);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_shorter_and_longer),
        cmocka_unit_test(test_written_in_place),
        cmocka_unit_test(test_replaced_and_removed),
        cmocka_unit_test(test_other_files),
        cmocka_unit_test(test_a_copy),
        cmocka_unit_test(test_prefault),
        cmocka_unit_test(test_prefault_of_a_shorter_file),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
