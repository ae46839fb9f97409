/*
 * route_publish.h: adapters that requests bring along: by PUT, and by vLLM's route of loads.
 */
#ifndef SP_SERVER_API_ROUTE_PUBLISH_H
#define SP_SERVER_API_ROUTE_PUBLISH_H

#include "server/api/adapter_wish.h"
#include "server/api/api.h"

/* From the headers: whether the call's body is an adapter, not JSON about one. */
bool sp_call_brings_adapter(const sp_call *call);
/* Then the body may be as long as adapters are; otherwise nothing changes. */
void sp_call_allow_adapter(sp_call *call);

/*
 * Begins the load of what the call brings, or of the shared memory that `fields` name, and waits
 * for it. SP_OK: the call will be answered. Other statuses are the caller's to answer with;
 * SP_ERR_UNSUPPORTED with `shm-other-host`: a client elsewhere cannot mean memory of this host.
 */
sp_status sp_call_publish(sp_call *call, const sp_adapter_wish *wish, const json_t *fields,
                          void (*resume)(sp_call *call), sp_error *error);
/* X-Adapter-Digest and X-Adapter-Generation of a load that has succeeded. */
void sp_call_add_version(sp_call *call, const sp_lora_task *task);

#endif
