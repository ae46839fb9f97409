/*
 * cors.h: pages of other origins. A browser lets a page call this server only where the server
 * says that it may: --cors-allow-origin names the origins, by default there are none.
 */
#ifndef SP_SERVER_API_CORS_H
#define SP_SERVER_API_CORS_H

#include "server/api/api.h"

/* Whether the settings name origins as browsers send them. SP_ERR_ARGUMENT: one is none. */
sp_status sp_cors_check(const sp_server_settings *settings, sp_error *error);

/* Before the answer: the headers that let a page read it, where its origin may. Returns whether it
 * may. */
bool sp_cors_add_headers(sp_call *call);

/* Answers what a browser asks before a call. False: it is no such question. */
bool sp_cors_answer_preflight(sp_call *call);

#endif
