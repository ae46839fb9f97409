#include "base/grow.h"

#include "base/error.h"

#include <stdbool.h>
#include <string.h>

static bool is_size(size_t bytes)
{
    return bytes >= sizeof(size_t) && bytes <= SP_STRUCT_BYTES_MAX;
}

static size_t size_of(const void *object)
{
    size_t bytes;

    memcpy(&bytes, object, sizeof bytes);
    return bytes;
}

static sp_status check_size(const void *object, const char *name, sp_error *error)
{
    if (!object)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, name, -1, "no %s is given", name);
    if (!is_size(size_of(object)))
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, name, 0,
                       "struct_bytes of %s is %zu: it must be sizeof(%s)", name, size_of(object),
                       name);
    return SP_OK;
}

/* The first byte beyond `known` that is not zero, or `bytes`. */
static size_t first_unknown(const unsigned char *object, size_t known, size_t bytes)
{
    while (known < bytes && object[known] == 0)
        known++;
    return known;
}

sp_status sp_struct_read(void *out, size_t out_bytes, const void *from, const char *name,
                         sp_error *error)
{
    sp_status status = check_size(from, name, error);
    size_t bytes, unknown;

    if (status != SP_OK)
        return status;
    bytes = size_of(from);
    unknown = bytes;
    if (bytes > out_bytes) {
        unknown = first_unknown(from, out_bytes, bytes);
        if (unknown < bytes)
            return sp_fail(error, SP_ERR_UNSUPPORTED, NULL, name, (int64_t)unknown,
                           "%s has a field at byte %zu that this library, which is older than the "
                           "headers, does not know; leave it zero or use a newer library",
                           name, unknown);
        bytes = out_bytes;
    }
    memcpy((char *)out + sizeof bytes, (const char *)from + sizeof bytes, bytes - sizeof bytes);
    return SP_OK;
}

sp_status sp_struct_read_at(void *out, size_t out_bytes, const void *array, size_t index,
                            const char *name, sp_error *error)
{
    sp_status status = check_size(array, name, error);
    const char *element;

    if (status != SP_OK)
        return status;
    element = (const char *)array + index * size_of(array);
    if (size_of(element) != size_of(array))
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, name, (int64_t)index,
                       "struct_bytes of %s %zu is %zu, of the first one %zu: they must be equal",
                       name, index, size_of(element), size_of(array));
    return sp_struct_read(out, out_bytes, element, name, error);
}

sp_status sp_struct_write(void *to, const void *from, size_t from_bytes, const char *name,
                          sp_error *error)
{
    sp_status status = check_size(to, name, error);
    size_t bytes;

    if (status != SP_OK)
        return status;
    bytes = size_of(to);
    sp_struct_default(to, bytes, from, from_bytes);
    return SP_OK;
}

void sp_struct_default(void *out, size_t struct_bytes, const void *defaults, size_t defaults_bytes)
{
    size_t known = struct_bytes < defaults_bytes ? struct_bytes : defaults_bytes;

    if (!out || !is_size(struct_bytes))
        return;
    memset(out, 0, struct_bytes);
    memcpy(out, defaults, known);
    memcpy(out, &struct_bytes, sizeof struct_bytes);
}
