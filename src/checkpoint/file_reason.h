/*
 * file_reason.h: the reason codes of files that cannot be read. The adapter room's table continues
 * this one (adapter/reason.h); their numbers form one sequence, are stable, and are never reused.
 *
 *   X(symbol, number, name, status that goes with it)
 */
#ifndef SP_CHECKPOINT_FILE_REASON_H
#define SP_CHECKPOINT_FILE_REASON_H

#include "base/error.h"
#include "base/json.h"

#define SP_FILE_REASON_LIST(X)                                              \
    X(SP_REASON_CONFIG_MISSING, 0, "config-missing", SP_ERR_NOT_FOUND)      \
    X(SP_REASON_CONFIG_MALFORMED, 1, "config-malformed", SP_ERR_REFUSED)    \
    X(SP_REASON_WEIGHTS_MISSING, 2, "weights-missing", SP_ERR_NOT_FOUND)    \
    X(SP_REASON_UNSAFE_PATH, 3, "unsafe-path", SP_ERR_REFUSED)              \
    X(SP_REASON_HEADER_MALFORMED, 4, "header-malformed", SP_ERR_REFUSED)    \
    X(SP_REASON_HEADER_OVERLAP, 5, "header-overlap", SP_ERR_REFUSED)        \
    X(SP_REASON_TRUNCATED, 6, "truncated", SP_ERR_TRUNCATED)                \
    X(SP_REASON_DUPLICATE_KEY, 7, "duplicate-key", SP_ERR_REFUSED)          \
    X(SP_REASON_LFS_POINTER, 8, "lfs-pointer", SP_ERR_REFUSED)              \
    X(SP_REASON_PICKLE_REFUSED, 9, "pickle-refused", SP_ERR_REFUSED)        \
    X(SP_REASON_UNSUPPORTED_DTYPE, 10, "unsupported-dtype", SP_ERR_REFUSED) \
    X(SP_REASON_NON_FINITE, 11, "non-finite", SP_ERR_REFUSED)               \
    X(SP_REASON_DUPLICATE_TENSOR, 41, "duplicate-tensor", SP_ERR_REFUSED)

typedef enum sp_file_reason {
#define SP_FILE_REASON_ENUM(symbol, number, name, status) symbol = number,
    SP_FILE_REASON_LIST(SP_FILE_REASON_ENUM)
#undef SP_FILE_REASON_ENUM
} sp_file_reason;

/* Fills *error with the code's name and status, and returns that status. See sp_fail. */
sp_status sp_refuse_file(sp_error *error, sp_file_reason reason, const char *subject,
                         int64_t position, const char *format, ...) SP_PRINTF(5, 6);

/*
 * sp_json_parse with reason codes: `duplicate-key` for a key that occurs twice, `malformed` for
 * every other fault of the text. `position` is added to the byte positions that are reported.
 */
sp_status sp_reason_json(const char *bytes, size_t n_bytes, const char *subject,
                         sp_file_reason malformed, int64_t position, json_t **out_root,
                         sp_error *error);

#endif
