#include "base/confine.h"

#include "base/alloc.h"
#include "base/error.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/openat2.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define LINKS_MAX 40 /* on the way to a file, as the system has it */

static char *root;
static char *given; /* the same as it was named, made absolute; for comparing texts alone */
static int root_fd = -1;
static int cache_fd = -1;    /* the repository that the directory is a snapshot of; -1: of none */
static const char *in_cache; /* the end of `root` below it */

/* realpath with a buffer of ours: its own would come from another allocator. */
static char *real_path(const char *path)
{
    char *buffer = sp_malloc(PATH_MAX);
    char *copy = NULL;

    if (buffer && realpath(path, buffer))
        copy = sp_strdup(buffer);
    sp_free(buffer);
    return copy;
}

static bool make_absolute(const char *path, char *out_path, size_t bytes)
{
    size_t n = 0;

    if (path[0] != '/') {
        if (!getcwd(out_path, bytes))
            return false;
        n = strlen(out_path);
    }
    return snprintf(out_path + n, bytes - n, "%s%s", n > 0 ? "/" : "", path) < (int)(bytes - n);
}

/* The cache of Hugging Face: models--NAME/snapshots/REVISION holds links into models--NAME/blobs.
 */
static void find_cache(void)
{
    static const char snapshots[] = "/snapshots";
    const char *repository = strstr(root, "/models--");
    const char *end = repository ? strchr(repository + 1, '/') : NULL;
    size_t n = sizeof snapshots - 1;
    char path[PATH_MAX];

    if (!end || strncmp(end, snapshots, n) != 0 || (end[n] != '/' && end[n] != '\0'))
        return;
    snprintf(path, sizeof path, "%.*s", (int)(end - root), root);
    cache_fd = open(path, O_PATH | O_DIRECTORY | O_CLOEXEC);
    in_cache = end + 1;
}

static void end_confinement(void)
{
    if (root_fd >= 0)
        close(root_fd);
    if (cache_fd >= 0)
        close(cache_fd);
    root_fd = cache_fd = -1;
    in_cache = NULL;
    sp_free(root);
    sp_free(given);
    root = given = NULL;
}

sp_status sp_confine_to(const char *directory, sp_error *error)
{
    char path[PATH_MAX];

    end_confinement();
    if (!directory)
        return SP_OK;
    root_fd = open(directory, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (root_fd < 0)
        return sp_fail(error, errno == ENOENT ? SP_ERR_NOT_FOUND : SP_ERR_INPUT, NULL, directory,
                       -1, "%s: %s", directory, strerror(errno));
    root = real_path(directory);
    given = sp_strdup(make_absolute(directory, path, sizeof path) ? path : "");
    if (!root || !given) {
        end_confinement();
        return sp_fail_memory(error, PATH_MAX, directory);
    }
    for (size_t n = strlen(given); n > 0 && given[n - 1] == '/'; n--)
        given[n - 1] = '\0';
    if (strcmp(root, "/") != 0) {
        find_cache();
        return SP_OK;
    }
    end_confinement();
    return sp_fail(error, SP_ERR_INPUT, NULL, directory, -1,
                   "%s is the root of the file system, which confines nothing", directory);
}

const char *sp_confine_directory(void)
{
    return root;
}

static bool is_below(const char *path, const char *directory, const char **out_relative)
{
    size_t bytes = directory ? strlen(directory) : 0;

    if (bytes == 0 || strncmp(path, directory, bytes) != 0 || path[bytes] != '/')
        return false;
    while (path[bytes] == '/')
        bytes++;
    if (out_relative)
        *out_relative = path[bytes] ? path + bytes : ".";
    return true;
}

bool sp_is_confined(const char *path, const char **out_relative)
{
    return is_below(path, root, out_relative) || is_below(path, given, out_relative);
}

/* ---- the directory by other names ------------------------------------------------------------ */

/* The rest of a path that is walked part by part, links included. */
typedef struct walk {
    int at; /* where it has come */
    int32_t n_links;
    char rest[PATH_MAX];
} walk;

static bool is_root(int fd)
{
    struct stat there, here;

    return fstat(root_fd, &there) == 0 && fstat(fd, &here) == 0 && there.st_dev == here.st_dev &&
           there.st_ino == here.st_ino;
}

/* Puts what a link holds before the rest. */
static bool follow(walk *on, int link)
{
    char target[PATH_MAX];
    char rest[PATH_MAX];
    ssize_t n = readlinkat(link, "", target, sizeof target - 1);

    if (n <= 0 || ++on->n_links > LINKS_MAX)
        return false;
    target[n] = '\0';
    memcpy(rest, on->rest, sizeof rest);
    return snprintf(on->rest, sizeof on->rest, "%s/%s", target, rest) < (int)sizeof on->rest;
}

static void step_to(walk *on, int next)
{
    if (on->at >= 0)
        close(on->at);
    on->at = next;
}

/* Walks one part of the rest. False: it ends here. */
static bool walk_part(walk *on)
{
    const char *part = on->rest + strspn(on->rest, "/");
    size_t n = strcspn(part, "/");
    char name[NAME_MAX + 1];
    struct stat info;
    int next;

    if (on->rest[0] == '/')
        step_to(on, open("/", O_PATH | O_DIRECTORY | O_CLOEXEC));
    if (on->at < 0 || n == 0 || n > NAME_MAX)
        return false;
    memcpy(name, part, n);
    name[n] = '\0';
    part += n + strspn(part + n, "/");
    memmove(on->rest, part, strlen(part) + 1);
    next = openat(on->at, name, O_PATH | O_NOFOLLOW | O_CLOEXEC);
    if (next < 0 || fstat(next, &info) != 0 || !S_ISLNK(info.st_mode)) {
        step_to(on, next);
        return next >= 0;
    }
    if (!follow(on, next)) {
        close(next);
        return false;
    }
    close(next);
    return true;
}

/*
 * Whether the way to `path` comes through the directory, whatever it is called there and whatever
 * links lead to it. *out_relative, [PATH_MAX] bytes: the way from there.
 */
static bool find_inside(const char *path, char *out_relative)
{
    walk on = {.at = -1};
    bool found = false;

    if (root_fd < 0 || !make_absolute(path, on.rest, sizeof on.rest))
        return false;
    while (!found && walk_part(&on))
        found = is_root(on.at);
    if (on.at >= 0)
        close(on.at);
    if (found)
        memcpy(out_relative, on.rest[0] ? on.rest : ".", strlen(on.rest) + (on.rest[0] ? 1 : 2));
    return found;
}

/* ---- opening --------------------------------------------------------------------------------- */

/* A link may lead anywhere, so it is treated as leading out. O_PATH with O_NOFOLLOW opens the link
 * itself. */
static int refuse_link(int fd)
{
    struct stat info;

    if (fd < 0 && errno == ELOOP)
        errno = EXDEV;
    if (fd < 0 || (fstat(fd, &info) == 0 && !S_ISLNK(info.st_mode)))
        return fd;
    close(fd);
    errno = EXDEV;
    return -1;
}

/* Without openat2: opens component by component, and refuses every link. */
static int open_by_parts(const char *relative, int flags)
{
    int fd = fcntl(root_fd, F_DUPFD_CLOEXEC, 0);

    while (fd >= 0) {
        size_t n = strcspn(relative, "/");
        bool last = relative[n + strspn(relative + n, "/")] == '\0';
        char part[NAME_MAX + 1];
        int next;

        if (n > NAME_MAX || (n == 2 && relative[0] == '.' && relative[1] == '.')) {
            close(fd);
            errno = n > NAME_MAX ? ENAMETOOLONG : EXDEV;
            return -1;
        }
        memcpy(part, relative, n);
        part[n] = '\0';
        next = openat(fd, part, (last ? flags : O_PATH | O_DIRECTORY) | O_NOFOLLOW | O_CLOEXEC);
        close(fd);
        if (last)
            return refuse_link(next);
        fd = next;
        relative += n + strspn(relative + n, "/");
    }
    return -1;
}

static long open_beneath(int directory, const char *relative, int flags)
{
    struct open_how how = {
        .flags = (unsigned)flags | O_CLOEXEC,
        .resolve = RESOLVE_BENEATH | RESOLVE_NO_MAGICLINKS,
    };

    return syscall(SYS_openat2, directory, relative, &how, sizeof how);
}

static bool leads_up(const char *relative)
{
    for (const char *part = relative; *part; part += strspn(part, "/")) {
        size_t n = strcspn(part, "/");

        if (n == 2 && part[0] == '.' && part[1] == '.')
            return true;
        part += n;
    }
    return false;
}

/* The links of a snapshot lead out of it, and stay in its repository's part of the cache. */
static long open_in_cache(const char *relative, int flags)
{
    char path[PATH_MAX];

    if (snprintf(path, sizeof path, "%s/%s", in_cache, relative) < (int)sizeof path)
        return open_beneath(cache_fd, path, flags);
    errno = ENAMETOOLONG;
    return -1;
}

int sp_confined_open(const char *path, int flags)
{
    char found[PATH_MAX];
    const char *relative = found;
    long fd;

    if (!sp_is_confined(path, &relative) && !find_inside(path, found))
        return open(path, flags | O_CLOEXEC);
    fd = open_beneath(root_fd, relative, flags);
    if (fd < 0 && errno == EXDEV && cache_fd >= 0 && !leads_up(relative))
        fd = open_in_cache(relative, flags);
    if (fd < 0 && (errno == ENOSYS || errno == EPERM))
        return open_by_parts(relative, flags);
    return (int)fd;
}
