/* test_cpus.c: quotas read from made-up cgroup trees, version 2 and 1. */
#include "device/cpus.h"

#include "base/alloc.h"
#include "base/file.h"
#include "support/test.h"

#include <string.h>
#include <sys/stat.h>

static char *root;

static int make_root(void **state)
{
    (void)state;
    root = sp_test_make_directory();
    return root ? 0 : -1;
}

static int remove_root(void **state)
{
    (void)state;
    sp_test_remove_tree(root);
    sp_free(root);
    root = NULL;
    return 0;
}

/* Writes root/group/name. */
static void write_limit(const char *group, const char *name, const char *text)
{
    char *directory = sp_path_join(root, group);

    assert_non_null(directory);
    sp_test_write_file(directory, name, text, strlen(text));
    sp_free(directory);
}

static void make_group(const char *group)
{
    char *directory = sp_path_join(root, group);

    assert_non_null(directory);
    assert_int_equal(mkdir(directory, 0700), 0);
    sp_free(directory);
}

static void v2_takes_the_smallest_ancestor(void **state)
{
    (void)state;
    make_group("a");
    make_group("a/b");
    make_group("a/b/c");
    write_limit("a", "cpu.max", "350000 100000\n");
    write_limit("a/b", "cpu.max", "600000 100000\n");
    write_limit("a/b/c", "cpu.max", "max 100000\n");
    assert_int_equal(sp_cpus_quota("0::/a/b/c\n", root), 3);
    assert_int_equal(sp_cpus_quota("0::/a\n", root), 3);
    assert_int_equal(sp_cpus_quota("0::/\n", root), INT32_MAX);
    write_limit("a/b/c", "cpu.max", "50000 100000\n"); /* half a processor is still one */
    assert_int_equal(sp_cpus_quota("0::/a/b/c\n", root), 1);
}

static void v2_reads_the_root_of_a_namespace(void **state)
{
    (void)state;
    write_limit("", "cpu.max", "200000 100000\n");
    assert_int_equal(sp_cpus_quota("0::/\n", root), 2);
    assert_int_equal(sp_cpus_quota("0::/gone\n", root), 2);
}

static void v1_needs_the_cpu_controller(void **state)
{
    (void)state;
    make_group("cpu");
    make_group("cpu/job");
    write_limit("cpu/job", "cpu.cfs_quota_us", "400000\n");
    write_limit("cpu/job", "cpu.cfs_period_us", "100000\n");
    assert_int_equal(sp_cpus_quota("5:cpu,cpuacct:/job\n3:memory:/other\n", root), 4);
    assert_int_equal(sp_cpus_quota("5:cpuset:/job\n3:cpuacct:/job\n", root), INT32_MAX);
    write_limit("cpu/job", "cpu.cfs_quota_us", "-1\n");
    assert_int_equal(sp_cpus_quota("5:cpu,cpuacct:/job\n", root), INT32_MAX);
}

static void nonsense_is_no_limit(void **state)
{
    (void)state;
    assert_int_equal(sp_cpus_quota("", root), INT32_MAX);
    assert_int_equal(sp_cpus_quota("no colons\n:\n::\n", root), INT32_MAX);
    write_limit("", "cpu.max", "many few\n");
    assert_int_equal(sp_cpus_quota("0::/\n", root), INT32_MAX);
    write_limit("", "cpu.max", "100000 0\n");
    assert_int_equal(sp_cpus_quota("0::/\n", root), INT32_MAX);
    write_limit("", "cpu.max", "1e300 1\n");
    assert_int_equal(sp_cpus_quota("0::/\n", root), INT32_MAX);
}

static void this_machine_has_at_least_one(void **state)
{
    (void)state;
    assert_true(sp_cpus_usable() >= 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(v2_takes_the_smallest_ancestor, make_root, remove_root),
        cmocka_unit_test_setup_teardown(v2_reads_the_root_of_a_namespace, make_root, remove_root),
        cmocka_unit_test_setup_teardown(v1_needs_the_cpu_controller, make_root, remove_root),
        cmocka_unit_test_setup_teardown(nonsense_is_no_limit, make_root, remove_root),
        cmocka_unit_test(this_machine_has_at_least_one),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
