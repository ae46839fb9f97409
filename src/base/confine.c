#include "base/confine.h"

#include "base/alloc.h"
#include "base/error.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/openat2.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static char *root;
static int root_fd = -1;

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

sp_status sp_confine_to(const char *directory, sp_error *error)
{
    if (root_fd >= 0)
        close(root_fd);
    root_fd = -1;
    sp_free(root);
    root = NULL;
    if (!directory)
        return SP_OK;
    root_fd = open(directory, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (root_fd < 0)
        return sp_fail(error, errno == ENOENT ? SP_ERR_NOT_FOUND : SP_ERR_INPUT, NULL, directory,
                       -1, "%s: %s", directory, strerror(errno));
    root = real_path(directory);
    if (!root)
        return sp_fail_memory(error, PATH_MAX, directory);
    if (strcmp(root, "/") != 0)
        return SP_OK;
    sp_confine_to(NULL, NULL);
    return sp_fail(error, SP_ERR_INPUT, NULL, directory, -1,
                   "%s is the root of the file system, which confines nothing", directory);
}

const char *sp_confine_directory(void)
{
    return root;
}

bool sp_is_confined(const char *path, const char **out_relative)
{
    size_t bytes = root ? strlen(root) : 0;

    if (bytes == 0 || strncmp(path, root, bytes) != 0 || path[bytes] != '/')
        return false;
    while (path[bytes] == '/')
        bytes++;
    if (out_relative)
        *out_relative = path[bytes] ? path + bytes : ".";
    return true;
}

/* A link may lead anywhere, so it counts as one that leads out. O_PATH with O_NOFOLLOW opens the
 * link itself. */
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

/* Where the system has no openat2: part by part, and every link is refused. */
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

int sp_confined_open(const char *path, int flags)
{
    struct open_how how = {
        .flags = (unsigned)flags | O_CLOEXEC,
        .resolve = RESOLVE_BENEATH | RESOLVE_NO_MAGICLINKS,
    };
    const char *relative;
    long fd;

    if (!sp_is_confined(path, &relative))
        return open(path, flags | O_CLOEXEC);
    fd = syscall(SYS_openat2, root_fd, relative, &how, sizeof how);
    if (fd < 0 && (errno == ENOSYS || errno == EPERM))
        return open_by_parts(relative, flags);
    return (int)fd;
}
