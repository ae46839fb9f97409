#include "server/api/adapter_wish.h"

#include "base/alloc.h"
#include "base/error.h"

#include <stdio.h>
#include <string.h>

#define SHARED_NAME_BYTES_MAX 250

static sp_status read_digest(const json_t *fields, bool brings, sp_adapter_wish *wish,
                             sp_error *error)
{
    const json_t *value = json_object_get(fields, "adapter_digest");
    sp_status status;

    if (!value || json_is_null(value))
        return SP_OK;
    if (brings || wish->has_shared)
        return sp_fail(error, SP_ERR_INPUT, NULL, "adapter_digest", -1,
                       "the adapter comes with the request: \"adapter_digest\" must be left out");
    status = sp_digest_field_read("adapter_digest", value, &wish->digest, error);
    wish->has_digest = status == SP_OK;
    return status;
}

sp_status sp_adapter_wish_read(const json_t *fields, sp_field_set set, bool brings, bool from_peers,
                               sp_adapter_wish *out_wish, sp_error *error)
{
    sp_adapter_wish *wish = out_wish;
    sp_status status = sp_body_fields_check(fields, set, error);

    *wish = (sp_adapter_wish){.has_shared = json_is_object(json_object_get(fields, "shm"))};
    if (status == SP_OK && set != SP_FIELDS_PUBLISH)
        status = sp_json_string(fields, "lora_name", true, NULL, &wish->name, error);
    if (status == SP_OK && set == SP_FIELDS_LOAD)
        status = sp_json_string(fields, "lora_path", !brings && !wish->has_shared && !from_peers,
                                NULL, &wish->path, error);
    if (status == SP_OK && set == SP_FIELDS_LOAD)
        status = read_digest(fields, brings, wish, error);
    if (status == SP_OK && wish->path && (brings || wish->has_shared))
        status = sp_fail(error, SP_ERR_INPUT, NULL, "lora_path", -1,
                         "the adapter comes with the request: \"lora_path\" must be left out");
    if (status == SP_OK)
        status = sp_json_bool(fields, "load_inplace", false, false, NULL, &wish->replace, error);
    if (status == SP_OK)
        status = sp_json_bool(fields, "pinned", false, false, NULL, &wish->pinned, error);
    wish->unpinned = json_is_false(json_object_get(fields, "pinned"));
    if (status == SP_OK)
        status = sp_json_int(fields, "expected_generation", false, 0, INT64_MAX, 0, NULL,
                             &wish->expected_generation, error);
    return status;
}

static bool is_shared_name(const char *name)
{
    size_t bytes = strlen(name);

    name += *name == '/';
    return *name != '\0' && *name != '.' && bytes <= SHARED_NAME_BYTES_MAX && !strchr(name, '/');
}

/* With the one slash that it begins with. NULL: out of memory. */
static char *shared_name(const char *name)
{
    size_t bytes = strlen(name) + 2;
    char *copy = sp_malloc(bytes);

    if (copy)
        snprintf(copy, bytes, "/%s", name + (*name == '/'));
    return copy;
}

static sp_status read_shared(const json_t *shared, sp_shared_name *out_shared, sp_error *error)
{
    const char *name, *field;
    json_t *value;
    int64_t offset = 0, bytes = 0;
    sp_status status = SP_OK;

    json_object_foreach((json_t *)(uintptr_t)shared, field, value)
    {
        if (strcmp(field, "name") != 0 && strcmp(field, "offset") != 0 &&
            strcmp(field, "bytes") != 0)
            return sp_fail(error, SP_ERR_INPUT, SP_CODE_UNKNOWN_FIELD, "shm", -1,
                           "\"shm\" takes \"name\", \"offset\" and \"bytes\", not \"%.100s\"",
                           field);
    }
    status = sp_json_string(shared, "name", true, NULL, &name, error);
    if (status == SP_OK)
        status = sp_json_int(shared, "offset", false, 0, INT64_MAX / 2, 0, NULL, &offset, error);
    if (status == SP_OK)
        status = sp_json_int(shared, "bytes", false, 1, INT64_MAX / 2, 0, NULL, &bytes, error);
    if (status == SP_OK && !is_shared_name(name))
        status = sp_fail(error, SP_ERR_INPUT, NULL, "name", -1,
                         "\"name\" must be the name of POSIX shared memory, without a "
                         "folder");
    if (status != SP_OK) { /* its subject is a member of the field */
        snprintf(error->subject, sizeof error->subject, "shm");
        return status;
    }
    *out_shared = (sp_shared_name){shared_name(name), (uint64_t)offset, (uint64_t)bytes};
    return out_shared->name ? SP_OK : sp_fail_memory(error, strlen(name), "a name");
}

sp_status sp_adapter_wish_read_shared(const json_t *fields, sp_published *published,
                                      sp_error *error)
{
    const json_t *shared = json_object_get(fields, "shm");
    const json_t *config = json_object_get(fields, "config");

    if (!json_is_object(shared))
        return sp_fail(error, SP_ERR_INPUT, NULL, "shm", -1,
                       "field \"shm\" must be an object with the \"name\" of shared memory");
    if (config && !json_is_null(config)) {
        if (!json_is_object(config))
            return sp_fail(error, SP_ERR_INPUT, NULL, "config", -1,
                           "field \"config\" is not an object");
        published->config = json_dumps(config, 0);
        if (!published->config)
            return sp_fail_memory(error, 1, "a config");
    }
    return read_shared(shared, &published->shared, error);
}

sp_lora_task *sp_adapter_wish_task(const sp_adapter_wish *wish, const char *path)
{
    sp_lora_task *task = sp_lora_task_create(SP_TASK_LOAD, wish->name, path);

    if (task) {
        task->replace = wish->replace;
        task->pinned = wish->pinned;
        task->unpinned = wish->unpinned;
        task->expected_generation = (uint64_t)wish->expected_generation;
        task->by_digest = wish->has_digest;
        task->wanted = wish->digest;
    }
    return task;
}
