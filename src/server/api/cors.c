#include "server/api/cors.h"

#include "base/error.h"

#include <string.h>

#define EXPOSED "X-Request-Id, X-Adapter-Digest, X-Adapter-Generation, Retry-After"

static bool is_any(const char *origin)
{
    return strcmp(origin, "*") == 0;
}

/* scheme://host[:port], in lower case and without a path, as a browser writes it. */
static bool is_origin(const char *text)
{
    const char *host = strstr(text, "://");

    if (!host || host == text || host[3] == '\0' || strchr(host + 3, '/'))
        return false;
    for (; *text; text++)
        if (*text <= ' ' || *text == ',' || (*text >= 'A' && *text <= 'Z'))
            return false;
    return true;
}

sp_status sp_cors_check(const sp_server_settings *settings, sp_error *error)
{
    const sp_setting_list *list = &settings->cors_origins;

    for (size_t i = 0; i < list->n; i++)
        if (!is_any(list->values[i]) && !is_origin(list->values[i]))
            return sp_fail(error, SP_ERR_ARGUMENT, NULL, "cors-allow-origin", -1,
                           "--cors-allow-origin %s is neither * nor an origin as browsers write "
                           "it, such as https://chat.example.org",
                           list->values[i]);
    return SP_OK;
}

/* What the answer names: the origin itself, "*", or NULL. */
static const char *allowed(const sp_setting_list *list, const char *origin)
{
    for (size_t i = 0; i < list->n; i++) {
        if (is_any(list->values[i]))
            return "*";
        if (strcmp(list->values[i], origin) == 0)
            return origin;
    }
    return NULL;
}

bool sp_cors_add_headers(sp_call *call)
{
    const sp_setting_list *list = &call->api->settings->cors_origins;
    const char *origin = sp_exchange_header(call->exchange, "Origin");
    const char *named = origin ? allowed(list, origin) : NULL;

    /* A cache must not give the answer for one origin to another. */
    if (list->n > 0 && !(named && is_any(named)))
        sp_exchange_add_header(call->exchange, "Vary", "Origin");
    if (!named)
        return false;
    sp_exchange_add_header(call->exchange, "Access-Control-Allow-Origin", named);
    sp_exchange_add_header(call->exchange, "Access-Control-Expose-Headers", EXPOSED);
    return true;
}

bool sp_cors_answer_preflight(sp_call *call)
{
    sp_exchange *exchange = call->exchange;
    const char *wanted = sp_exchange_header(exchange, "Access-Control-Request-Headers");
    sp_text empty = {0};

    if (strcmp(sp_exchange_method(exchange), "OPTIONS") != 0 ||
        !sp_exchange_header(exchange, "Access-Control-Request-Method"))
        return false;
    sp_exchange_add_header(exchange, "Access-Control-Allow-Methods", "GET, POST, PUT");
    /* Clients send headers of their own, which nothing here reads. */
    if (wanted)
        sp_exchange_add_header(exchange, "Access-Control-Allow-Headers", wanted);
    sp_exchange_add_header(exchange, "Access-Control-Max-Age", "86400");
    sp_exchange_answer(exchange, 204, NULL, &empty);
    return true;
}
