#include "checkpoint/file_reason.h"

#include <stdarg.h>

sp_status sp_refuse_file(sp_error *error, sp_file_reason reason, const char *subject,
                         int64_t position, const char *format, ...)
{
    sp_status status = SP_ERR_REFUSED;
    const char *code = NULL;
    va_list arguments;

    switch (reason) {
#define SP_FILE_REASON_CASE(symbol, number, name, its_status) \
    case symbol:                                              \
        status = its_status;                                  \
        code = name;                                          \
        break;
        SP_FILE_REASON_LIST(SP_FILE_REASON_CASE)
#undef SP_FILE_REASON_CASE
    }
    va_start(arguments, format);
    sp_fail_v(error, status, code, subject, position, format, arguments);
    va_end(arguments);
    return status;
}

sp_status sp_reason_json(const char *bytes, size_t n_bytes, const char *subject,
                         sp_file_reason malformed, int64_t position, json_t **out_root,
                         sp_error *error)
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
    return sp_refuse_file(error, duplicate ? SP_REASON_DUPLICATE_KEY : malformed, subject, position,
                          "%s", local.text);
}
