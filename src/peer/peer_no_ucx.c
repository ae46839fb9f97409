/* peer_no_ucx.c: client and server of a build without UCX, which refuse by name. */
#include "base/error.h"
#include "peer/peer_client.h"
#include "peer/peer_server.h"

#include <string.h>

static const char missing[] = "this build has no UCX (libucx-dev was missing when it was built)";

bool sp_peer_is_built(const char **out_why)
{
    if (out_why)
        *out_why = missing;
    return false;
}

static sp_status refuse(const char *subject, sp_error *error)
{
    return sp_fail(error, SP_ERR_UNSUPPORTED, "no-ucx", subject, -1, "%s", missing);
}

sp_status sp_peer_client_create(const sp_peer_client_options *options, sp_peer_calls *out_calls,
                                sp_error *error)
{
    (void)out_calls;
    return refuse(options->address, error);
}

bool sp_peer_client_sees_device(const sp_peer_calls *calls)
{
    (void)calls;
    return false;
}

void sp_peer_client_count(const sp_peer_calls *calls, sp_peer_client_counts *out_counts)
{
    (void)calls;
    memset(out_counts, 0, sizeof *out_counts);
}

sp_status sp_peer_server_create(const sp_peer_server_options *options, sp_peer_server **out_server,
                                sp_error *error)
{
    (void)out_server;
    return refuse(options->directory, error);
}

/* There is no server, so nothing below is called with one. */

void sp_peer_server_destroy(sp_peer_server *server)
{
    (void)server;
}

const char *sp_peer_server_address(const sp_peer_server *server)
{
    (void)server;
    return "";
}

void sp_peer_server_run(sp_peer_server *server)
{
    (void)server;
}

void sp_peer_server_stop(sp_peer_server *server)
{
    (void)server;
}

void sp_peer_server_count(sp_peer_server *server, sp_peer_server_counts *out_counts)
{
    (void)server;
    memset(out_counts, 0, sizeof *out_counts);
}

void sp_peer_server_metrics(sp_peer_server *server, sp_text *out_text)
{
    (void)server;
    (void)out_text;
}
