#include "device/cpus.h"

#include <sched.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PATH_BYTES       4096
#define MEMBERSHIP_BYTES 16384
#define CPUS_MAX         4096

static bool read_text(const char *path, char *out_text, size_t bytes)
{
    FILE *file = fopen(path, "re");
    size_t got;

    if (!file)
        return false;
    got = fread(out_text, 1, bytes - 1, file);
    out_text[got] = '\0';
    (void)fclose(file);
    return got > 0;
}

/* Whole processors of quota / period; no limit when either is not a positive number. */
static int32_t whole_cpus(double quota, double period)
{
    double cpus;

    if (!(quota > 0.0) || !(period > 0.0))
        return INT32_MAX;
    cpus = quota / period;
    if (cpus >= (double)INT32_MAX)
        return INT32_MAX;
    return cpus < 1.0 ? 1 : (int32_t)cpus;
}

/* cpu.max holds "QUOTA PERIOD" or "max PERIOD". */
static int32_t quota_of_v2(const char *directory)
{
    char path[PATH_BYTES + 32], text[128], *end;
    double quota, period;

    (void)snprintf(path, sizeof path, "%s/cpu.max", directory);
    if (!read_text(path, text, sizeof text))
        return INT32_MAX;
    quota = strtod(text, &end);
    if (end == text)
        return INT32_MAX;
    period = strtod(end, NULL);
    return whole_cpus(quota, period);
}

static int32_t quota_of_v1(const char *directory)
{
    char path[PATH_BYTES + 32], quota[64], period[64];

    (void)snprintf(path, sizeof path, "%s/cpu.cfs_quota_us", directory);
    if (!read_text(path, quota, sizeof quota))
        return INT32_MAX;
    (void)snprintf(path, sizeof path, "%s/cpu.cfs_period_us", directory);
    if (!read_text(path, period, sizeof period))
        return INT32_MAX;
    return whole_cpus(strtod(quota, NULL), strtod(period, NULL));
}

/* The limits of `group` and of all its ancestors up to `mount` itself; the smallest counts. */
static int32_t smallest_up_to_mount(const char *mount, const char *group,
                                    int32_t (*quota_of)(const char *))
{
    char path[PATH_BYTES];
    size_t mount_bytes = strlen(mount);
    int32_t smallest = INT32_MAX;

    if (snprintf(path, sizeof path, "%s%s", mount, group) >= (int)sizeof path)
        return INT32_MAX;
    for (;;) {
        int32_t cpus = quota_of(path);
        char *slash;

        if (cpus < smallest)
            smallest = cpus;
        slash = strrchr(path, '/');
        if (!slash || (size_t)(slash - path) < mount_bytes)
            return smallest;
        *slash = '\0';
    }
}

/* Whether the comma-separated list of version 1 controllers names "cpu". */
static bool lists_cpu(const char *controllers, size_t bytes)
{
    const char *end = controllers + bytes;

    while (controllers < end) {
        const char *comma = memchr(controllers, ',', (size_t)(end - controllers));
        size_t length = (size_t)((comma ? comma : end) - controllers);

        if (length == 3 && memcmp(controllers, "cpu", 3) == 0)
            return true;
        controllers += length + 1;
    }
    return false;
}

/* One line of /proc/self/cgroup: ID:CONTROLLERS:PATH; version 2 has no controllers. */
static int32_t quota_of_line(char *line, const char *root)
{
    char mount[PATH_BYTES];
    char *controllers = strchr(line, ':');
    char *group = controllers ? strchr(controllers + 1, ':') : NULL;
    int32_t cpus, other;

    if (!group)
        return INT32_MAX;
    controllers++;
    if (controllers == group)
        return smallest_up_to_mount(root, group + 1, quota_of_v2);
    if (!lists_cpu(controllers, (size_t)(group - controllers)))
        return INT32_MAX;
    (void)snprintf(mount, sizeof mount, "%s/cpu", root);
    cpus = smallest_up_to_mount(mount, group + 1, quota_of_v1);
    (void)snprintf(mount, sizeof mount, "%s/cpu,cpuacct", root);
    other = smallest_up_to_mount(mount, group + 1, quota_of_v1);
    return cpus < other ? cpus : other;
}

int32_t sp_cpus_quota(const char *membership, const char *root)
{
    char text[MEMBERSHIP_BYTES];
    char *line, *rest = NULL;
    int32_t smallest = INT32_MAX;

    (void)snprintf(text, sizeof text, "%s", membership);
    for (line = strtok_r(text, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
        int32_t cpus = quota_of_line(line, root);

        if (cpus < smallest)
            smallest = cpus;
    }
    return smallest;
}

static int32_t affinity_cpus(void)
{
    size_t bytes = CPU_ALLOC_SIZE(CPUS_MAX);
    cpu_set_t *set = CPU_ALLOC(CPUS_MAX);
    int count = 1;

    if (!set)
        return 1;
    CPU_ZERO_S(bytes, set);
    if (sched_getaffinity(0, bytes, set) == 0)
        count = CPU_COUNT_S(bytes, set);
    CPU_FREE(set);
    return count < 1 ? 1 : (int32_t)count;
}

int32_t sp_cpus_usable(void)
{
    char membership[MEMBERSHIP_BYTES];
    int32_t cpus = affinity_cpus();
    int32_t quota = INT32_MAX;

    if (read_text("/proc/self/cgroup", membership, sizeof membership))
        quota = sp_cpus_quota(membership, "/sys/fs/cgroup");
    return cpus < quota ? cpus : quota;
}
