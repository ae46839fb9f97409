/* name.c: which names adapters may have. */
#include "base/error.h"
#include "base/text.h"

#include <sidepath/stage.h>

#include <string.h>

#define ADAPTER_NAME_MAX 255

static sp_status bad_name(sp_error *error, const char *name, const char *why)
{
    return sp_fail(error, SP_ERR_INPUT, NULL, name, -1, "the adapter name \"%s\" %s", name, why);
}

sp_status sp_stage_name_check(const char *name, const char *base_name, sp_error *error)
{
    size_t bytes;

    if (!name)
        return sp_fail_null(error, "name");
    bytes = strlen(name);
    if (bytes == 0)
        return bad_name(error, name, "is empty");
    if (bytes > ADAPTER_NAME_MAX)
        return bad_name(error, name, "is longer than 255 bytes");
    if (!sp_utf8_valid(name, bytes))
        return bad_name(error, name, "is not UTF-8");
    for (size_t i = 0; i < bytes; i++)
        if ((unsigned char)name[i] < 0x20 || name[i] == 0x7f)
            return bad_name(error, name, "holds a control character");
    if (strchr(name, ':'))
        return bad_name(error, name, "holds a ':'");
    if (strcmp(name, ".") == 0 || strcmp(name, "..") == 0)
        return bad_name(error, name, "is a folder");
    if (name[0] == ' ' || name[bytes - 1] == ' ')
        return bad_name(error, name, "begins or ends with a blank");
    if (base_name && strcmp(name, base_name) == 0)
        return bad_name(error, name, "is the base model's own name");
    return SP_OK;
}
