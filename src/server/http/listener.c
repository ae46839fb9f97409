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

sp_status sp_http_listen(sp_http *http, sp_error *error)
{
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE | AI_NUMERICSERV};
    struct addrinfo *found = NULL;
    char port[16];
    sp_status status;

    snprintf(port, sizeof port, "%d", http->options.port);
    if (getaddrinfo(http->options.host, port, &hints, &found) != 0 || !found)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "host", -1,
                       "there is no address for --host %s", http->options.host);
    status = listen_on(http, found, error);
    freeaddrinfo(found);
    return status;
}
