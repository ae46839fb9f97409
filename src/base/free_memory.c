#include "base/free_memory.h"

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PATH_BYTES 4096

/* The files of one version of cgroups. */
typedef struct cgroup_files {
    const char *mount;
    const char *limit, *usage;
    const char *inactive, *active; /* fields of memory.stat: file pages that can be dropped */
} cgroup_files;

static const cgroup_files VERSION_1 = {
    "/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
    "total_inactive_file",   "total_active_file",
};
static const cgroup_files VERSION_2 = {
    "/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file", "active_file",
};
static const cgroup_files VERSION_2_BESIDE_1 = {
    "/sys/fs/cgroup/unified", "memory.max", "memory.current", "inactive_file", "active_file",
};

static size_t smaller(size_t a, size_t b)
{
    return a < b ? a : b;
}

/* The number after `field` at the beginning of a line of a file, or of the first line where `field`
 * is empty; `otherwise` where there is none ("max"). */
static size_t read_field(const char *path, const char *field, size_t otherwise)
{
    char line[256];
    size_t n = strlen(field), found = otherwise;
    FILE *file = fopen(path, "re");

    if (!file)
        return otherwise;
    while (found == otherwise && fgets(line, sizeof line, file)) {
        const char *number = line + n;
        char *end;
        unsigned long long value;

        if (strncmp(line, field, n) != 0 || (n > 0 && strchr(": ", line[n]) == NULL))
            continue;
        value = strtoull(number + strspn(number, ": "), &end, 10);
        if (end != number + strspn(number, ": "))
            found = value > SIZE_MAX ? SIZE_MAX : (size_t)value;
        else if (n == 0)
            break;
    }
    fclose(file);
    return found;
}

static size_t read_at(const char *folder, const char *name, const char *field, size_t otherwise)
{
    char path[PATH_BYTES];
    int n = snprintf(path, sizeof path, "%s/%s", folder, name);

    return n < 0 || (size_t)n >= sizeof path ? otherwise : read_field(path, field, otherwise);
}

/* Bytes free under one group's own limit. */
static size_t group_free(const char *folder, const cgroup_files *files)
{
    size_t limit = read_at(folder, files->limit, "", SIZE_MAX);
    size_t used = read_at(folder, files->usage, "", 0);
    size_t cached = read_at(folder, "memory.stat", files->inactive, 0) +
                    read_at(folder, "memory.stat", files->active, 0);

    if (limit == SIZE_MAX)
        return SIZE_MAX;
    used -= smaller(used, cached);
    return limit - smaller(limit, used);
}

/* The least that is free in a group and its ancestors. A path from outside a container ends at the
 * mount's own root, which is then the container's group. */
static size_t groups_free(const char *root, const cgroup_files *files, const char *group)
{
    char folder[PATH_BYTES];
    size_t left = SIZE_MAX, mount_bytes = strlen(root) + strlen(files->mount);
    int n = snprintf(folder, sizeof folder, "%s%s%s", root, files->mount, group);

    if (n < 0 || (size_t)n >= sizeof folder)
        return SIZE_MAX;
    for (;;) {
        char *slash;

        left = smaller(left, group_free(folder, files));
        slash = strrchr(folder, '/');
        if (!slash || (size_t)(slash - folder) < mount_bytes)
            return left;
        *slash = '\0';
    }
}

/* Whether a comma-separated list of controllers names memory. */
static bool names_memory(const char *controllers)
{
    for (const char *at = controllers; *at;) {
        size_t n = strcspn(at, ",");

        if (n == strlen("memory") && strncmp(at, "memory", n) == 0)
            return true;
        at += n + (at[n] == ',');
    }
    return false;
}

/* A line of /proc/self/cgroup is "ID:CONTROLLERS:PATH"; version 2 has no controllers. */
static size_t line_free(const char *root, char *line)
{
    char *controllers = strchr(line, ':');
    char *group = controllers ? strchr(controllers + 1, ':') : NULL;

    if (!group)
        return SIZE_MAX;
    *group++ = '\0';
    controllers++;
    group[strcspn(group, "\n")] = '\0';
    if (*controllers == '\0')
        return smaller(groups_free(root, &VERSION_2, group),
                       groups_free(root, &VERSION_2_BESIDE_1, group));
    return names_memory(controllers) ? groups_free(root, &VERSION_1, group) : SIZE_MAX;
}

size_t sp_free_memory(const char *root)
{
    char line[PATH_BYTES], path[PATH_BYTES];
    size_t left = SIZE_MAX, available_kib;
    FILE *groups;

    available_kib = read_at(root, "proc/meminfo", "MemAvailable", SIZE_MAX);
    if (available_kib < SIZE_MAX >> 10)
        left = available_kib << 10;
    if ((size_t)snprintf(path, sizeof path, "%s/proc/self/cgroup", root) >= sizeof path)
        return left;
    groups = fopen(path, "re");
    while (groups && fgets(line, sizeof line, groups))
        left = smaller(left, line_free(root, line));
    if (groups)
        fclose(groups);
    return left;
}
