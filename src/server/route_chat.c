/*
 * route_chat.c: POST /v1/chat/completions.
 */
#include "server/api.h"

void sp_route_chat(sp_call *call)
{
    sp_call_refuse(call, 501, NULL, NULL, "chat-not-served",
                   "this build serves no chat; use /v1/completions");
}
