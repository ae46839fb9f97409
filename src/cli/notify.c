#include "cli/notify.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

void sp_notify(const char *state)
{
    const char *path = getenv("NOTIFY_SOCKET");
    const struct timeval patience = {.tv_sec = 1};
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    size_t bytes = path ? strlen(path) : 0;
    int fd;

    if (bytes < 2 || bytes > sizeof address.sun_path || (path[0] != '/' && path[0] != '@'))
        return;
    memcpy(address.sun_path, path, bytes);
    if (path[0] == '@')
        address.sun_path[0] = '\0'; /* an abstract name */
    fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return;
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
    (void)sendto(fd, state, strlen(state), MSG_NOSIGNAL, (const struct sockaddr *)&address,
                 (socklen_t)(offsetof(struct sockaddr_un, sun_path) + bytes));
    close(fd);
}
