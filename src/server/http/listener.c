/*
 * listener.c: the socket that clients come to.
 */
#include "base/error.h"
#include "server/http/http_state.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static sp_status cannot_listen(const sp_http_options *options, sp_error *error)
{
    return sp_fail(error, SP_ERR_IO, NULL, "port", -1, "cannot listen on %s port %d: %s",
                   options->host, options->port, strerror(errno));
}

static void print_bound(const struct sockaddr_storage *bound, char *out_text, size_t bytes)
{
    char host[SP_CLIENT_BYTES] = "";

    if (bound->ss_family == AF_INET6) {
        const struct sockaddr_in6 *six = (const struct sockaddr_in6 *)(const void *)bound;

        inet_ntop(AF_INET6, &six->sin6_addr, host, sizeof host);
        snprintf(out_text, bytes, "[%s]:%u", host, ntohs(six->sin6_port));
    } else {
        const struct sockaddr_in *four = (const struct sockaddr_in *)(const void *)bound;

        inet_ntop(AF_INET, &four->sin_addr, host, sizeof host);
        snprintf(out_text, bytes, "%s:%u", host, ntohs(four->sin_port));
    }
}

static sp_status listen_on(sp_http *http, const struct addrinfo *found, sp_error *error)
{
    struct sockaddr_storage bound = {0};
    socklen_t bytes = sizeof bound;
    int one = 1;

    http->listener = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (http->listener < 0)
        return cannot_listen(&http->options, error);
    setsockopt(http->listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(http->listener, found->ai_addr, found->ai_addrlen) != 0 ||
        listen(http->listener, SOMAXCONN) != 0 ||
        getsockname(http->listener, (struct sockaddr *)&bound, &bytes) != 0)
        return cannot_listen(&http->options, error);
    print_bound(&bound, http->address, sizeof http->address);
    return SP_OK;
}

/* ---- a Unix socket --------------------------------------------------------------------------- */

static sp_status cannot_bind(const sp_http_options *options, const char *why, sp_error *error)
{
    return sp_fail(error, SP_ERR_IO, NULL, "uds", -1, "cannot listen on --uds %s: %s",
                   options->unix_path, why);
}

/* A socket that nobody listens on is what a server left that was killed. */
static void remove_stale(const struct sockaddr_un *address)
{
    struct stat info;
    int probe;

    if (lstat(address->sun_path, &info) != 0 || !S_ISSOCK(info.st_mode))
        return;
    probe = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (probe < 0)
        return;
    if (connect(probe, (const struct sockaddr *)address, sizeof *address) != 0 &&
        errno == ECONNREFUSED)
        unlink(address->sun_path);
    close(probe);
}

static sp_status listen_on_unix(sp_http *http, sp_error *error)
{
    const sp_http_options *options = &http->options;
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    struct stat info;

    if (strlen(options->unix_path) >= sizeof address.sun_path)
        return cannot_bind(options, "the path is too long for a socket", error);
    memcpy(address.sun_path, options->unix_path, strlen(options->unix_path));
    remove_stale(&address);
    http->listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (http->listener < 0 ||
        bind(http->listener, (const struct sockaddr *)&address, sizeof address) != 0)
        return cannot_bind(options, strerror(errno), error);
    if (lstat(address.sun_path, &info) == 0) {
        http->unix_device = info.st_dev;
        http->unix_inode = info.st_ino;
    }
    if (listen(http->listener, SOMAXCONN) != 0)
        return cannot_bind(options, strerror(errno), error);
    snprintf(http->address, sizeof http->address, "unix:%s", options->unix_path);
    return SP_OK;
}

static void remove_unix(const sp_http *http)
{
    struct stat info;

    if (http->unix_inode != 0 && lstat(http->options.unix_path, &info) == 0 &&
        info.st_ino == http->unix_inode && info.st_dev == http->unix_device)
        unlink(http->options.unix_path);
}

/* ---- either ---------------------------------------------------------------------------------- */

void sp_http_close_listener(sp_http *http)
{
    if (http->listener < 0)
        return;
    remove_unix(http);
    close(http->listener);
    http->listener = -1;
}

sp_status sp_http_listen(sp_http *http, sp_error *error)
{
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE | AI_NUMERICSERV};
    struct addrinfo *found = NULL;
    char port[16];
    sp_status status;

    if (http->options.unix_path)
        return listen_on_unix(http, error);
    snprintf(port, sizeof port, "%d", http->options.port);
    if (getaddrinfo(http->options.host, port, &hints, &found) != 0 || !found)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "host", -1,
                       "there is no address for --host %s", http->options.host);
    status = listen_on(http, found, error);
    freeaddrinfo(found);
    return status;
}
