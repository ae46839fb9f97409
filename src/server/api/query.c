#include "server/api/query.h"

#include "base/alloc.h"
#include "base/error.h"
#include "server/api/api.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static sp_status bad_query(sp_error *error, const char *what)
{
    return sp_fail(error, SP_ERR_INPUT, "invalid-query", NULL, -1,
                   "the query of the path is not NAME=VALUE&..: %s", what);
}

/* NULL: out of memory. */
static json_t *value_of(const char *text)
{
    char *end;
    long long number;

    if (strcmp(text, "true") == 0 || strcmp(text, "false") == 0)
        return json_boolean(text[0] == 't');
    errno = 0;
    number = strtoll(text, &end, 10);
    if (text[0] >= '0' && text[0] <= '9' && *end == '\0' && errno == 0)
        return json_integer(number);
    return json_string(text);
}

/* One NAME=VALUE [bytes]. */
static sp_status add_pair(json_t *fields, const char *pair, size_t bytes, const char *text_field,
                          sp_error *error)
{
    const char *equals = memchr(pair, '=', bytes);
    char *name = equals ? sp_strndup(pair, (size_t)(equals - pair)) : NULL;
    char *raw = equals ? sp_strndup(equals + 1, bytes - (size_t)(equals + 1 - pair)) : NULL;
    char *text = raw ? sp_path_decode(raw) : NULL;
    sp_status status = SP_OK;

    if (!equals || !*name)
        status = bad_query(error, "a name without a value");
    else if (!text)
        status = bad_query(error, "an escape that does not decode");
    else if (json_object_get(fields, name))
        status = bad_query(error, "a name twice");
    else if (json_object_set_new(fields, name,
                                 strcmp(name, text_field) == 0 ? json_string(text)
                                                               : value_of(text)) != 0)
        status = bad_query(error, "a name that is no text");
    sp_free(text);
    sp_free(raw);
    sp_free(name);
    return status;
}

sp_status sp_query_read(const char *query, const char *text_field, json_t **out_fields,
                        sp_error *error)
{
    json_t *fields = json_object();
    sp_status status = fields ? SP_OK : sp_fail_memory(error, strlen(query), "a query");

    while (status == SP_OK && *query) {
        size_t bytes = strcspn(query, "&");

        status = add_pair(fields, query, bytes, text_field, error);
        query += bytes + (query[bytes] == '&');
    }
    if (status == SP_OK)
        *out_fields = fields;
    else
        json_decref(fields);
    return status;
}
