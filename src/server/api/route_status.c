/*
 * route_status.c: whether the server lives, whether it takes requests, which version it is.
 */
#include "server/api/api.h"

void sp_handle_health(sp_call *call)
{
    sp_text body = {0};

    sp_text_format(&body, "{\"status\": \"ok\", \"chat\": %s}\n",
                   call->api->chat ? "true" : "false");
    sp_call_answer_json(call, &body);
}

/* Not ready while it shuts down, once the device has failed or the weights' files are not what they
 * were. A full queue
 * is no reason: it is answered with 429, and a server that is taken out of rotation then would only
 * move the load to the next. */
void sp_handle_ready(sp_call *call)
{
    sp_error error;

    if (sp_weights_watch_state(call->api->weights, &error) != SP_WEIGHTS_SOUND)
        sp_call_fail(call, error.status, &error);
    else if (sp_driver_device_failed(call->api->driver))
        sp_call_refuse(call, 503, NULL, NULL, SP_CODE_DEVICE_FAILED,
                       "the device failed and does not recover; start the server anew");
    else if (atomic_load(&call->api->draining))
        sp_call_refuse(call, 503, NULL, NULL, SP_CODE_SHUTTING_DOWN, "the server is shutting down");
    else
        sp_handle_health(call);
}

void sp_handle_version(sp_call *call)
{
    sp_text body = {0};

    sp_text_format(&body, "{\"version\": \"%s\"}\n", sp_library_version_text());
    sp_call_answer_json(call, &body);
}
