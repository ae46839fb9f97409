#include "base/error.h"

#include "base/text.h"

#include <stdio.h>
#include <string.h>

const char *sp_status_text(sp_status status)
{
    switch (status) {
#define SP_STATUS_CASE(name, number, text) \
    case name:                             \
        return text;
        SP_STATUS_LIST(SP_STATUS_CASE)
#undef SP_STATUS_CASE
    }
    return "unknown status";
}

const char *sp_status_name(sp_status status)
{
    switch (status) {
#define SP_STATUS_CASE(name, number, text) \
    case name:                             \
        return #name;
        SP_STATUS_LIST(SP_STATUS_CASE)
#undef SP_STATUS_CASE
    }
    return "SP_UNKNOWN";
}

size_t sp_dtype_bytes(sp_dtype dtype)
{
    switch (dtype) {
    case SP_DTYPE_F32:
        return 4;
    case SP_DTYPE_BF16:
    case SP_DTYPE_F16:
        return 2;
    }
    return 0;
}

const char *sp_dtype_name(sp_dtype dtype)
{
    switch (dtype) {
    case SP_DTYPE_F32:
        return "f32";
    case SP_DTYPE_BF16:
        return "bf16";
    case SP_DTYPE_F16:
        return "f16";
    }
    return "unknown";
}

sp_status sp_fail_v(sp_error *error, sp_status status, const char *code, const char *subject,
                    int64_t position, const char *format, va_list arguments)
{
    if (!error)
        return status;
    memset(error, 0, sizeof *error);
    error->status = status;
    error->code = code ? code : "";
    error->position = position;
    if (subject) {
        snprintf(error->subject, sizeof error->subject, "%s", subject);
        sp_make_printable(error->subject);
    }
    vsnprintf(error->text, sizeof error->text, format, arguments);
    sp_make_printable(error->text);
    return status;
}

sp_status sp_fail(sp_error *error, sp_status status, const char *code, const char *subject,
                  int64_t position, const char *format, ...)
{
    va_list arguments;

    va_start(arguments, format);
    sp_fail_v(error, status, code, subject, position, format, arguments);
    va_end(arguments);
    return status;
}

sp_status sp_fail_null(sp_error *error, const char *name)
{
    return sp_fail(error, SP_ERR_ARGUMENT, NULL, name, -1, "the argument %s is NULL", name);
}

sp_status sp_need(sp_error *error, const sp_argument *arguments, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (!arguments[i].pointer)
            return sp_fail_null(error, arguments[i].name);
    return SP_OK;
}

sp_status sp_fail_memory(sp_error *error, size_t bytes, const char *what)
{
    return sp_fail(error, SP_ERR_MEMORY, NULL, NULL, -1, "out of memory: %zu bytes for %s", bytes,
                   what);
}
