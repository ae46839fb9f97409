#ifndef SP_SERVER_METRICS_REFUSALS_H
#define SP_SERVER_METRICS_REFUSALS_H

#include <sidepath/status.h>

#include <stddef.h>

/* An adapter of the start that was refused; the server starts without it and says so. */
typedef struct sp_server_refusal {
    char *name;
    sp_error error;
} sp_server_refusal;

/* Keeps a refusal for sp_server_start: an `adapter_refused` hook, `user` a list of these. */
typedef struct sp_server_refusals {
    sp_server_refusal *items; /* [n] */
    size_t n;
} sp_server_refusals;
void sp_server_keep_refusal(void *user, const char *name, const sp_error *error);
void sp_server_refusals_free(sp_server_refusals *refusals);

#endif
