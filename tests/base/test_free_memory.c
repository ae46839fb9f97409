/*
 * free_memory: what is free by /proc and by the limits of cgroups, on made-up trees whose sums are
 * done by hand here, and on this machine.
 */
#include "base/free_memory.h"

#include "base/alloc.h"
#include "support/test.h"

#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

static char *root;

/* root/path with that text; folders on the way are made. */
static void put(const char *path, const char *text)
{
    char full[4096];
    FILE *file;

    snprintf(full, sizeof full, "%s/%s", root, path);
    for (char *at = strchr(full + strlen(root) + 1, '/'); at; at = strchr(at + 1, '/')) {
        *at = '\0';
        mkdir(full, 0755);
        *at = '/';
    }
    file = fopen(full, "w");
    assert_non_null(file);
    assert_true(fputs(text, file) >= 0);
    assert_int_equal(fclose(file), 0);
}

static int make_root(void **state)
{
    (void)state;
    root = sp_test_make_directory();
    put("proc/meminfo", "MemTotal:       8388608 kB\nMemFree:         100000 kB\n"
                        "MemAvailable:   4194304 kB\n");
    return 0;
}

static int drop_root(void **state)
{
    (void)state;
    sp_test_remove_tree(root);
    sp_free(root);
    return 0;
}

static void available_without_cgroups(void **state)
{
    (void)state;
    assert_int_equal(sp_free_memory(root), (size_t)4 << 30);
}

static void nothing_is_known_without_proc(void **state)
{
    (void)state;
    assert_true(sp_free_memory("/nowhere/at/all") == SIZE_MAX);
}

/* 2 GiB less 1536 MiB in use, of which 500 + 12 MiB are cache: 1 GiB. */
static void version_2_by_its_limit(void **state)
{
    (void)state;
    put("proc/self/cgroup", "0::/a/b\n");
    put("sys/fs/cgroup/a/b/memory.max", "2147483648\n");
    put("sys/fs/cgroup/a/b/memory.current", "1610612736\n");
    put("sys/fs/cgroup/a/b/memory.stat",
        "anon 5\ninactive_file 524288000\nactive_file 12582912\ninactive_file_x 9\n");
    assert_int_equal(sp_free_memory(root), (size_t)1 << 30);
}

static void an_ancestor_with_less_counts(void **state)
{
    (void)state;
    put("proc/self/cgroup", "0::/a/b\n");
    put("sys/fs/cgroup/a/b/memory.max", "max\n");
    put("sys/fs/cgroup/a/b/memory.current", "1610612736\n");
    put("sys/fs/cgroup/a/memory.max", "1073741824\n");
    put("sys/fs/cgroup/a/memory.current", "1000000000\n");
    assert_int_equal(sp_free_memory(root), 73741824);
}

/* A path of the host that the container does not have: the mount's root is the group. */
static void version_1_in_a_container(void **state)
{
    (void)state;
    put("proc/self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/docker/0123\n1:name=systemd:/\n");
    put("sys/fs/cgroup/memory/memory.limit_in_bytes", "1073741824\n");
    put("sys/fs/cgroup/memory/memory.usage_in_bytes", "805306368\n");
    put("sys/fs/cgroup/memory/memory.stat",
        "inactive_file 1\ntotal_inactive_file 268435456\ntotal_active_file 0\n");
    assert_int_equal(sp_free_memory(root), (size_t)512 << 20);
}

static void version_1_without_a_limit(void **state)
{
    (void)state;
    put("proc/self/cgroup", "4:memory:/x\n");
    put("sys/fs/cgroup/memory/x/memory.limit_in_bytes", "9223372036854771712\n");
    put("sys/fs/cgroup/memory/x/memory.usage_in_bytes", "805306368\n");
    assert_int_equal(sp_free_memory(root), (size_t)4 << 30);
}

static void more_in_use_than_the_limit_leaves_none(void **state)
{
    (void)state;
    put("proc/self/cgroup", "0::/\n");
    put("sys/fs/cgroup/memory.max", "1000\n");
    put("sys/fs/cgroup/memory.current", "2000\n");
    assert_int_equal(sp_free_memory(root), 0);
}

static void this_machine_has_some(void **state)
{
    (void)state;
    assert_true(sp_free_memory("") > (size_t)1 << 20);
    assert_true(sp_free_memory("") < (size_t)1 << 50);
}

int main(void)
{
#define IN_TREE(test) cmocka_unit_test_setup_teardown(test, make_root, drop_root)
    const struct CMUnitTest tests[] = {
        IN_TREE(available_without_cgroups),
        IN_TREE(version_2_by_its_limit),
        IN_TREE(an_ancestor_with_less_counts),
        IN_TREE(version_1_in_a_container),
        IN_TREE(version_1_without_a_limit),
        IN_TREE(more_in_use_than_the_limit_leaves_none),
        cmocka_unit_test(nothing_is_known_without_proc),
        cmocka_unit_test(this_machine_has_some),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
