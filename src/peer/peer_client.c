#include "peer/peer_client.h"

#include "base/error.h"

#include <string.h>

bool sp_peer_is_built(const char **out_why)
{
    if (out_why)
        *out_why = "this build has no UCX";
    return false;
}

sp_status sp_peer_client_create(const sp_peer_client_options *options, sp_peer_calls *out_calls,
                                sp_error *error)
{
    (void)out_calls;
    return sp_fail(error, SP_ERR_UNSUPPORTED, "no-ucx", options->address, -1,
                   "%s cannot be reached: this build has no UCX", options->address);
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
