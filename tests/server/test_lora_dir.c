/*
 * The directory of adapters: which names and paths of a request may mean something in it, what its
 * thread finds there, and that a path that leads out is refused by the handle too.
 */
#include "support/test.h"

#include "base/alloc.h"
#include "base/confine.h"
#include "base/file.h"
#include "server/driver/lora_dir.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define CONFIG "adapter_config.json"

static char *top, *inside;

static void make_folder(const char *parent, const char *name, bool is_adapter)
{
    char *path = sp_path_join(parent, name);

    assert_int_equal(mkdir(path, 0700), 0);
    if (is_adapter) {
        sp_test_write_file(path, CONFIG, "{}", 2);
        sp_test_write_file(path, "chat_template.jinja", "own", 3);
    }
    sp_free(path);
}

static int set_up(void **state)
{
    char *link;
    sp_error error;

    (void)state;
    top = sp_test_make_directory();
    make_folder(top, "inside", false);
    make_folder(top, "outside", true);
    inside = sp_path_join(top, "inside");
    make_folder(inside, "good", true);
    make_folder(inside, "empty", false);
    link = sp_path_join(inside, "link");
    assert_int_equal(symlink("../outside", link), 0);
    sp_free(link);
    assert_ok(sp_confine_to(inside, &error), &error);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    assert_int_equal(sp_confine_to(NULL, NULL), SP_OK);
    sp_test_remove_tree(top);
    sp_free(inside);
    sp_free(top);
    return 0;
}

static void test_names(void **state)
{
    (void)state;
    assert_true(sp_lora_dir_may_hold("good", "base"));
    assert_true(sp_lora_dir_may_hold("not there", "base")); /* nobody has looked */
    assert_false(sp_lora_dir_may_hold("base", "base"));
    assert_false(sp_lora_dir_may_hold(".", "base"));
    assert_false(sp_lora_dir_may_hold("..", "base"));
    assert_false(sp_lora_dir_may_hold(".hidden", "base"));
    assert_false(sp_lora_dir_may_hold("a/b", "base"));
    assert_false(sp_lora_dir_may_hold("a:b", "base"));
    assert_false(sp_lora_dir_may_hold("", "base"));
    assert_false(sp_lora_dir_may_hold("a\nb", "base"));
}

static void check_resolved(const char *path, const char *relative)
{
    char *got = NULL;
    const char *rest;
    sp_error error;

    assert_ok(sp_lora_dir_resolve(path, &got, &error), &error);
    assert_true(sp_is_confined(got, &rest));
    assert_string_equal(rest, relative);
    sp_free(got);
}

static void check_leads_out(const char *path)
{
    char *got = NULL;
    sp_error error;

    assert_int_equal(sp_lora_dir_resolve(path, &got, &error), SP_ERR_INPUT);
    assert_string_equal(error.code, SP_CODE_UNSAFE_PATH);
    assert_string_equal(error.subject, "lora_path");
    assert_null(got);
}

static void test_paths(void **state)
{
    char *absolute = sp_path_join(inside, "good"), *outside = sp_path_join(top, "outside");
    char *got = NULL;
    sp_error error;

    (void)state;
    check_resolved("good", "good");
    check_resolved("deep/er", "deep/er");
    check_resolved(absolute, "good");
    check_leads_out(outside);
    check_leads_out("/etc");
    check_leads_out(top);
    assert_int_equal(sp_lora_dir_resolve("", &got, &error), SP_ERR_INPUT);
    assert_string_equal(error.subject, "lora_path");
    sp_free(absolute);
    sp_free(outside);
}

static void test_no_directory(void **state)
{
    char *got = NULL;
    sp_error error;

    (void)state;
    assert_int_equal(sp_confine_to(NULL, NULL), SP_OK);
    assert_false(sp_lora_dir_may_hold("good", "base"));
    assert_int_equal(sp_lora_dir_resolve("good", &got, &error), SP_ERR_UNSUPPORTED);
    assert_ok(sp_confine_to(inside, &error), &error);
    sp_lora_dir_list(NULL, NULL, NULL); /* holds none */
}

/* ---- the thread ---------------------------------------------------------------------------- */

/* What came out of it; `lock` guards all. */
typedef struct outcome {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    sp_lora_task *passed; /* a reference */
    char skipped[512];
} outcome;

static void on_done(void *user, sp_lora_task *task)
{
    outcome *out = user;

    pthread_mutex_lock(&out->lock);
    out->passed = task;
    pthread_cond_signal(&out->changed);
    pthread_mutex_unlock(&out->lock);
}

static void destroy_chat(sp_lora_chat *chat)
{
    sp_free(chat);
}

/* Every folder says something: that it was looked at. */
static sp_status understand(void *user, const sp_lora_files *files, sp_lora_chat **out_chat,
                            sp_error *error)
{
    (void)user;
    (void)error;
    assert_null(files->generation_config);
    assert_memory_equal(files->chat.bytes[SP_CHAT_FILE_TEMPLATE], "own", 4);
    *out_chat = sp_calloc(1, sizeof **out_chat);
    atomic_init(&(*out_chat)->references, 1);
    (*out_chat)->destroy = destroy_chat;
    return SP_OK;
}

static void on_skipped(void *user, const char *name, const char *why)
{
    outcome *out = user;
    size_t n;

    pthread_mutex_lock(&out->lock);
    n = strlen(out->skipped);
    snprintf(out->skipped + n, sizeof out->skipped - n, "%s:%.24s;", name, why);
    pthread_mutex_unlock(&out->lock);
}

/* The task that passed; the caller releases it. */
static sp_lora_task *wait_passed(outcome *out)
{
    sp_lora_task *task;

    pthread_mutex_lock(&out->lock);
    while (!out->passed)
        pthread_cond_wait(&out->changed, &out->lock);
    task = out->passed;
    out->passed = NULL;
    pthread_mutex_unlock(&out->lock);
    return task;
}

static void count_good(void *user, const char *name)
{
    int *n = user;

    assert_string_equal(name, "good");
    ++*n;
}

static void look_up_name(sp_lora_dir *dir, outcome *out, const char *name, bool there)
{
    sp_lora_task *task = sp_lora_task_create_list(name), *passed;

    assert_non_null(task);
    sp_lora_dir_look_up(dir, task);
    passed = wait_passed(out);
    assert_ptr_equal(passed, task);
    assert_true(task->looked_up);
    assert_true((task->path != NULL) == there);
    assert_true((task->chat != NULL) == there);
    sp_task_release(&passed->task);
    sp_task_release(&task->task);
}

static void on_found(void *user, size_t n)
{
    (void)user;
    assert_int_equal(n, 1);
}

static void test_look_ups(void **state)
{
    outcome out = {.passed = NULL};
    sp_lora_dir_hooks hooks;
    sp_lora_dir *dir;
    sp_lora_task *task, *passed;
    sp_error error;
    int n = 0;

    (void)state;
    pthread_mutex_init(&out.lock, NULL);
    pthread_cond_init(&out.changed, NULL);
    hooks = (sp_lora_dir_hooks){&out, on_done, understand, on_skipped, on_found};
    assert_ok(sp_lora_dir_open("base", &hooks, &dir, &error), &error);
    look_up_name(dir, &out, "good", true);
    look_up_name(dir, &out, "empty", false);
    look_up_name(dir, &out, "gone", false);
    look_up_name(dir, &out, "link", false); /* its folder is outside */
    task = sp_lora_task_create_list(NULL);
    sp_lora_dir_look_up(dir, task); /* it passes after a scan */
    passed = wait_passed(&out);
    sp_lora_dir_list(dir, count_good, &n);
    assert_int_equal(n, 1);
    sp_task_release(&passed->task);
    sp_task_release(&task->task);
    sp_lora_dir_close(dir);
    assert_non_null(strstr(out.skipped, "empty:"));
    assert_non_null(strstr(out.skipped, "link:"));
    assert_null(strstr(out.skipped, "good:"));
    pthread_cond_destroy(&out.changed);
    pthread_mutex_destroy(&out.lock);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_names, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_paths, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_no_directory, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_look_ups, set_up, tear_down),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
