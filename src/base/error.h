/*
 * base: what every room needs, independent of LoRA, models and devices: status and error text,
 * allocation, 16-bit floats, files, clock, hashes, JSON reading, text building, settings.
 *
 * error.h: filling an sp_error. The function that first knows a failure calls sp_fail; all callers
 * pass the status on unchanged.
 */
#ifndef SP_BASE_ERROR_H
#define SP_BASE_ERROR_H

#include "base/private.h"

#include <sidepath/status.h>

#include <stdarg.h>

#if defined(__GNUC__)
#define SP_PRINTF(format_index, first_argument) \
    __attribute__((format(printf, format_index, first_argument)))
#else
#define SP_PRINTF(format_index, first_argument)
#endif

/*
 * Fills *error (which may be NULL) and returns `status`, so that callers write
 * `return sp_fail(...)`. `code` is a static string or NULL; `subject` may be NULL and is truncated
 * at a UTF-8 boundary. Control characters and bytes that are not UTF-8 become '?' in subject and
 * text. Neither `subject` nor an argument of the format may point into *error.
 */
SP_PRIVATE sp_status sp_fail(sp_error *error, sp_status status, const char *code,
                             const char *subject, int64_t position, const char *format, ...)
    SP_PRINTF(6, 7);

/* The same with the format's arguments as a list. */
SP_PRIVATE sp_status sp_fail_v(sp_error *error, sp_status status, const char *code,
                               const char *subject, int64_t position, const char *format,
                               va_list arguments) SP_PRINTF(6, 0);

/* SP_ERR_ARGUMENT: the argument `name`, the error's subject, is NULL. */
SP_PRIVATE sp_status sp_fail_null(sp_error *error, const char *name);

/* An argument and its name. */
typedef struct sp_argument {
    const char *name;
    const void *pointer;
} sp_argument;

/* sp_fail_null of the first that is NULL, else SP_OK: SP_NEED(error, {"pool", pool}, ...). */
SP_PRIVATE sp_status sp_need(sp_error *error, const sp_argument *arguments, size_t n);
#define SP_NEED(error, ...)                            \
    sp_need(error, (const sp_argument[]){__VA_ARGS__}, \
            sizeof((const sp_argument[]){__VA_ARGS__}) / sizeof(sp_argument))

/* SP_ERR_MEMORY with the bytes that were requested and what they were for. */
SP_PRIVATE sp_status sp_fail_memory(sp_error *error, size_t bytes, const char *what);

#endif
