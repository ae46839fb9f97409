/*
 * limits.c: how many connections there may be, and which are closed for others. A connection that
 * waits for an answer is never closed for another; one without a request may be.
 */
#include "base/alloc.h"
#include "base/clock.h"
#include "base/error.h"
#include "server/http/http_state.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>

#define DESCRIPTORS_SPARE 24 /* for adapters' files and the like */
#define CONNECTIONS_MIN   4
#define NOTE_INTERVAL_NS  (10ull * SP_NS_PER_S)
#define RECEIVE_PATIENCE_NS \
    (2ull * SP_NS_PER_S) /* before one that is sending is closed for others */

/* ---- addresses ----------------------------------------------------------------------------- */

static void print_address(const struct sockaddr_storage *from, char *out_client, char *out_key)
{
    struct in6_addr network;

    out_client[0] = out_key[0] = '\0';
    if (from->ss_family == AF_INET) {
        inet_ntop(AF_INET, &((const struct sockaddr_in *)(const void *)from)->sin_addr, out_client,
                  SP_CLIENT_BYTES);
        memcpy(out_key, out_client, SP_CLIENT_BYTES);
    } else if (from->ss_family == AF_INET6) {
        network = ((const struct sockaddr_in6 *)(const void *)from)->sin6_addr;
        inet_ntop(AF_INET6, &network, out_client, SP_CLIENT_BYTES);
        if (!IN6_IS_ADDR_V4MAPPED(&network))
            memset(network.s6_addr + 8, 0, 8);
        inet_ntop(AF_INET6, &network, out_key, SP_CLIENT_BYTES);
    } else if (from->ss_family == AF_UNIX) {
        memcpy(out_client, "unix", sizeof "unix");
        memcpy(out_key, "unix", sizeof "unix");
    }
}

static sp_address **bucket_of(sp_http *http, const char *key)
{
    uint32_t hash = 2166136261u;

    for (; *key; key++)
        hash = (hash ^ (unsigned char)*key) * 16777619u;
    return &http->addresses[hash % SP_ADDRESS_BUCKETS];
}

static sp_address *enter_address(sp_http *http, const char *key)
{
    sp_address **bucket = bucket_of(http, key);
    sp_address *address = *bucket;

    while (address && strcmp(address->key, key) != 0)
        address = address->next;
    if (!address) {
        address = sp_calloc(1, sizeof *address);
        if (!address)
            return NULL;
        memcpy(address->key, key, strlen(key));
        address->next = *bucket;
        *bucket = address;
    }
    address->n++;
    return address;
}

static void leave_address(sp_http *http, sp_address *address)
{
    sp_address **link = bucket_of(http, address->key);

    if (--address->n > 0)
        return;
    while (*link != address)
        link = &(*link)->next;
    *link = address->next;
    sp_free(address);
}

void sp_limits_set_idle(sp_connection *connection, bool idle)
{
    int32_t change = (int32_t)idle - (int32_t)connection->idle;

    connection->idle = idle;
    connection->address->n_idle += change;
    connection->http->counts.idle += change;
}

/* ---- saying so ----------------------------------------------------------------------------- */

void sp_limits_note(sp_http *http, sp_http_limit limit)
{
    static const char *const texts[SP_HTTP_LIMITS] = {
        [SP_LIMIT_CONNECTIONS] = "the limit of connections is reached (--connections): idle ones "
                                 "make way, and without those new requests get 503",
        [SP_LIMIT_ADDRESS] = "one address has all connections that it may have "
                             "(--connections-per-address)",
        [SP_LIMIT_DESCRIPTORS] = "the process has no descriptors left (ulimit -n): new connections "
                                 "wait",
        [SP_LIMIT_MEMORY] = "clients fill all memory that they may (--client-bytes-max): large "
                            "requests get 503",
    };
    uint64_t now_ns = sp_clock_ns();

    if (http->limited_ns[limit] != 0 && now_ns - http->limited_ns[limit] < NOTE_INTERVAL_NS)
        return;
    http->limited_ns[limit] = now_ns;
    if (http->options.handlers.limited)
        http->options.handlers.limited(http->options.handlers.user, texts[limit]);
}

/* ---- making way ---------------------------------------------------------------------------- */

/* The one that has been idle for longest, of the address with the most of those, or of this one. */
static sp_connection *find_idle(const sp_http *http, const sp_address *only)
{
    sp_connection *found = NULL;

    for (sp_connection *c = http->first; c; c = c->next) {
        if (!c->idle || (only && c->address != only))
            continue;
        if (!found || c->address->n_idle > found->address->n_idle ||
            (c->address == found->address && c->since_ns < found->since_ns))
            found = c;
    }
    return found;
}

/* One that has been sending its request for a while, where its address has more than half of all
 * connections: else one client's unfinished requests could keep everybody out. */
static sp_connection *find_sender(const sp_http *http)
{
    uint64_t now_ns = sp_clock_ns();
    sp_connection *found = NULL;

    for (sp_connection *c = http->first; c; c = c->next) {
        bool sends = c->state == SP_CONNECTION_BODY || (c->state == SP_CONNECTION_HEAD && !c->idle);

        if (sends && c->address->n > http->counts.connections_max / 2 &&
            now_ns - c->since_ns > RECEIVE_PATIENCE_NS && (!found || c->since_ns < found->since_ns))
            found = c;
    }
    return found;
}

static bool shed(sp_http *http, sp_connection *victim)
{
    if (!victim)
        return false;
    http->counts.shed++;
    sp_connection_close(victim);
    return true;
}

void sp_limits_shed(sp_http *http)
{
    shed(http, find_idle(http, NULL));
    sp_limits_note(http, SP_LIMIT_DESCRIPTORS);
}

/* Returns whether the new one is within the limits now. */
static bool make_room(sp_connection *added)
{
    sp_http *http = added->http;
    int32_t of_address_max = http->options.connections_per_address_max;
    bool fits = true;

    if (of_address_max > 0 && added->address->n > of_address_max) {
        sp_limits_note(http, SP_LIMIT_ADDRESS);
        fits = shed(http, find_idle(http, added->address));
    }
    if (fits && http->counts.open >= http->counts.connections_max) {
        sp_limits_note(http, SP_LIMIT_CONNECTIONS);
        fits = shed(http, find_idle(http, NULL)) || shed(http, find_sender(http));
    }
    return fits;
}

/* Those above the limit are closed for each other, the oldest first, as long as they have no
 * request. */
static bool make_room_above(sp_http *http)
{
    if (http->n_surplus < SP_HTTP_SURPLUS_MAX)
        return true;
    for (sp_connection *c = http->first; c; c = c->next)
        if (c->surplus && !c->exchange)
            return shed(http, c);
    return false;
}

/* The new one is in the list of its address, but in no other yet, so it sheds never itself. */
bool sp_limits_admit(sp_connection *added, const struct sockaddr_storage *from)
{
    sp_http *http = added->http;
    char key[SP_CLIENT_BYTES];

    print_address(from, added->client, key);
    added->address = enter_address(http, key);
    if (!added->address)
        return false;
    if (!make_room(added)) {
        if (!make_room_above(http)) {
            http->counts.turned_away++;
            leave_address(http, added->address);
            return false;
        }
        added->surplus = true;
        http->n_surplus++;
        http->counts.surplus++;
    }
    http->counts.open++;
    sp_limits_set_idle(added, true);
    return true;
}

void sp_limits_leave(sp_connection *connection)
{
    sp_http *http = connection->http;

    sp_limits_set_idle(connection, false);
    http->counts.open--;
    http->n_surplus -= connection->surplus;
    leave_address(http, connection->address);
    connection->address = NULL;
}

/* ---- descriptors --------------------------------------------------------------------------- */

static int32_t count_descriptors(void)
{
    DIR *directory = opendir("/proc/self/fd");
    int32_t n = 0;

    if (!directory)
        return DESCRIPTORS_SPARE;
    while (readdir(directory))
        n++;
    closedir(directory);
    return n;
}

/* The limit that there is once it was raised as far as is wanted and may be. */
static int64_t raise_limit(int64_t wanted)
{
    struct rlimit limit;

    if (getrlimit(RLIMIT_NOFILE, &limit) != 0)
        return wanted;
    if (limit.rlim_cur < (rlim_t)wanted) {
        struct rlimit raised = limit;

        raised.rlim_cur = limit.rlim_max < (rlim_t)wanted ? limit.rlim_max : (rlim_t)wanted;
        if (setrlimit(RLIMIT_NOFILE, &raised) == 0)
            limit = raised;
    }
    return limit.rlim_cur < (rlim_t)wanted ? (int64_t)limit.rlim_cur : wanted;
}

sp_status sp_limits_fit_descriptors(sp_http *http, sp_error *error)
{
    int64_t other = count_descriptors() + DESCRIPTORS_SPARE + SP_HTTP_SURPLUS_MAX;
    int64_t wanted = http->options.connections_max + other;
    int64_t have = raise_limit(wanted);

    http->counts.connections_max = http->options.connections_max;
    if (have >= wanted)
        return SP_OK;
    if (have - other < CONNECTIONS_MIN)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "connections", -1,
                       "the process may have %lld descriptors (ulimit -n), which leaves none for "
                       "connections: at least %lld are needed",
                       (long long)have, (long long)other + CONNECTIONS_MIN);
    http->counts.connections_max = (int32_t)(have - other);
    if (http->options.handlers.limited) {
        char text[160];

        snprintf(
            text, sizeof text,
            "the process may have %lld descriptors (ulimit -n), so --connections is %d instead "
            "of %d",
            (long long)have, http->counts.connections_max, http->options.connections_max);
        http->options.handlers.limited(http->options.handlers.user, text);
    }
    return SP_OK;
}
