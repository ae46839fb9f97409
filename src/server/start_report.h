/*
 * start_report.h: what the log says of a start: a few plain lines, or one object where the log is
 * JSON.
 */
#ifndef SP_SERVER_START_REPORT_H
#define SP_SERVER_START_REPORT_H

#include "server/api/api.h"

/* What only the engine's owner may ask it. */
typedef struct sp_start_facts {
    sp_engine_stats stats;
    size_t n_adapters;
} sp_start_facts;

sp_start_facts sp_start_facts_take(const sp_engine *engine);

/* `address` is where it listens; a plain report's last line ends with it. */
void sp_start_report_log(const sp_start_facts *facts, const sp_api *api, const char *address);

/* Whether `host` is reached from this machine alone. */
bool sp_host_is_local(const char *host);

#endif
