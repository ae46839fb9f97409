#include "adapter/reason.h"

#include <sidepath/adapter.h>

#include <stdarg.h>
#include <stdio.h>

static const struct {
    const char *name;
    sp_status status;
} reasons[SP_REASON_COUNT] = {
#define SP_REASON_ROW(symbol, number, reason_name, reason_status) \
    [symbol] = {.name = reason_name, .status = reason_status},
    SP_REASON_LIST(SP_REASON_ROW)
#undef SP_REASON_ROW
};

const char *sp_reason_name(int32_t reason)
{
    return reason >= 0 && reason < SP_REASON_COUNT ? reasons[reason].name : NULL;
}

int32_t sp_reason_count(void)
{
    return SP_REASON_COUNT;
}

sp_status sp_reason_status(sp_reason reason)
{
    return reasons[reason].status;
}

sp_status sp_refuse(sp_error *error, sp_reason reason, const char *subject, int64_t position,
                    const char *format, ...)
{
    char text[SP_ERROR_TEXT_BYTES];
    va_list arguments;

    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    return sp_fail(error, reasons[reason].status, reasons[reason].name, subject, position, "%s",
                   text);
}

sp_status sp_reason_json(const char *bytes, size_t n_bytes, const char *subject,
                         sp_reason malformed, int64_t position, json_t **out_root, sp_error *error)
{
    sp_error local;
    bool duplicate;
    sp_status status = sp_json_parse(bytes, n_bytes, subject, NULL, &duplicate, out_root, &local);

    if (status == SP_OK)
        return SP_OK;
    if (status == SP_ERR_MEMORY) {
        if (error)
            *error = local;
        return status;
    }
    if (local.position > 0)
        position += local.position;
    return sp_refuse(error, duplicate ? SP_REASON_DUPLICATE_KEY : malformed, subject, position,
                     "%s", local.text);
}
