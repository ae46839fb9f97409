#include "adapter/reason.h"

#include <sidepath/adapter.h>

#include <stdarg.h>

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

sp_status sp_reason_status(int32_t reason)
{
    return reasons[reason].status;
}

sp_status sp_refuse(sp_error *error, int32_t reason, const char *subject, int64_t position,
                    const char *format, ...)
{
    va_list arguments;

    va_start(arguments, format);
    sp_fail_v(error, reasons[reason].status, reasons[reason].name, subject, position, format,
              arguments);
    va_end(arguments);
    return reasons[reason].status;
}
