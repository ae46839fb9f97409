/* peer_address.c: addresses of peers as text and as the system has them. */
#include "base/error.h"
#include "peer/peer_transport.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static sp_status bad_address(const char *text, sp_error *error)
{
    return sp_fail(error, SP_ERR_INPUT, "peer-address", text, -1,
                   "\"%s\" is no HOST:PORT with a port of 1 to 65535", text);
}

static bool read_port(const char *text, int *out_port)
{
    long port = 0;
    size_t n = strlen(text);

    if (n == 0 || n > 5 || strspn(text, "0123456789") != n)
        return false;
    for (size_t i = 0; i < n; i++)
        port = 10 * port + (text[i] - '0');
    *out_port = (int)port;
    return port >= 1 && port <= 65535;
}

sp_status sp_peer_address_split(const char *text, char *out_host, size_t host_bytes, int *out_port,
                                sp_error *error)
{
    const char *colon = strrchr(text, ':');
    bool v6 = text[0] == '[';
    const char *host = v6 ? text + 1 : text;
    size_t n;

    if (!colon || colon == text || !read_port(colon + 1, out_port))
        return bad_address(text, error);
    n = (size_t)(colon - host);
    if (v6) {
        if (n < 2 || colon[-1] != ']')
            return bad_address(text, error);
        n--;
    } else if (memchr(host, ':', n)) {
        return bad_address(text, error);
    }
    if (n == 0 || n >= host_bytes)
        return bad_address(text, error);
    memcpy(out_host, host, n);
    out_host[n] = '\0';
    return SP_OK;
}

sp_status sp_peer_address_resolve(const char *host, int port, sp_peer_address *out_address,
                                  sp_error *error)
{
    const struct addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM};
    struct addrinfo *found = NULL;
    char service[16];
    int code;

    snprintf(service, sizeof service, "%d", port);
    code = getaddrinfo(host, service, &hints, &found);
    if (code != 0)
        return sp_fail(error, SP_ERR_PEER_UNREACHABLE, "peer-unreachable", host, -1, "%s: %s", host,
                       gai_strerror(code));
    memset(out_address, 0, sizeof *out_address);
    memcpy(&out_address->socket, found->ai_addr, found->ai_addrlen);
    out_address->n_bytes = found->ai_addrlen;
    freeaddrinfo(found);
    return SP_OK;
}

void sp_peer_address_text(const sp_peer_address *address, char *out_text)
{
    char host[INET6_ADDRSTRLEN] = "?";

    if (address->socket.ss_family == AF_INET) {
        const struct sockaddr_in *v4 = (const struct sockaddr_in *)&address->socket;

        (void)inet_ntop(AF_INET, &v4->sin_addr, host, sizeof host);
        snprintf(out_text, SP_PEER_ADDRESS_BYTES, "%s:%d", host, ntohs(v4->sin_port));
    } else {
        const struct sockaddr_in6 *v6 = (const struct sockaddr_in6 *)&address->socket;

        (void)inet_ntop(AF_INET6, &v6->sin6_addr, host, sizeof host);
        snprintf(out_text, SP_PEER_ADDRESS_BYTES, "[%s]:%d", host, ntohs(v6->sin6_port));
    }
}

bool sp_peer_address_is_loopback(const sp_peer_address *address)
{
    if (address->socket.ss_family == AF_INET) {
        const struct sockaddr_in *v4 = (const struct sockaddr_in *)&address->socket;

        return (ntohl(v4->sin_addr.s_addr) >> 24) == 127;
    }
    return address->socket.ss_family == AF_INET6 &&
           IN6_IS_ADDR_LOOPBACK(&((const struct sockaddr_in6 *)&address->socket)->sin6_addr);
}

/* The bytes of an address without its port; *out_n is 0 for a family that is not known. */
static const void *host_of(const struct sockaddr *address, size_t *out_n)
{
    if (address->sa_family == AF_INET) {
        *out_n = sizeof(struct in_addr);
        return &((const struct sockaddr_in *)(const void *)address)->sin_addr;
    }
    *out_n = address->sa_family == AF_INET6 ? sizeof(struct in6_addr) : 0;
    return &((const struct sockaddr_in6 *)(const void *)address)->sin6_addr;
}

static bool is_same_host(const struct sockaddr *a, const struct sockaddr *b)
{
    size_t n, other_n;
    const void *host = host_of(a, &n), *other = host_of(b, &other_n);

    return n > 0 && n == other_n && memcmp(host, other, n) == 0;
}

bool sp_peer_address_is_same(const sp_peer_address *a, const sp_peer_address *b)
{
    return is_same_host((const struct sockaddr *)&a->socket, (const struct sockaddr *)&b->socket);
}

bool sp_peer_address_device(const sp_peer_address *address, char *out_name)
{
    struct ifaddrs *all = NULL, *at;

    if (getifaddrs(&all) != 0)
        return false;
    for (at = all; at; at = at->ifa_next)
        if (at->ifa_addr && is_same_host(at->ifa_addr, (const struct sockaddr *)&address->socket))
            break;
    if (at) {
        snprintf(out_name, SP_PEER_DEVICE_BYTES, "%s", at->ifa_name);
        out_name[strcspn(out_name, ":")] = '\0'; /* "eth0:1" is a name of an address of eth0 */
    }
    freeifaddrs(all);
    return at != NULL;
}

/* A socket of datagrams sends nothing when it is connected, and has its own address then. */
bool sp_peer_address_local(const sp_peer_address *peer, sp_peer_address *out_local)
{
    int fd = socket(peer->socket.ss_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    bool found;

    if (fd < 0)
        return false;
    memset(out_local, 0, sizeof *out_local);
    out_local->n_bytes = sizeof out_local->socket;
    found = connect(fd, (const struct sockaddr *)&peer->socket, peer->n_bytes) == 0 &&
            getsockname(fd, (struct sockaddr *)&out_local->socket, &out_local->n_bytes) == 0;
    close(fd);
    return found;
}
