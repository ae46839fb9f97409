/*
 * request_flags.h: the fields of a request as flags: a settings row for each row of
 * request_table.h that has the form, `top_k` as --top-k. None of them has an environment variable.
 */
#ifndef SP_CLI_REQUEST_FLAGS_H
#define SP_CLI_REQUEST_FLAGS_H

#include "base/settings.h"
#include "engine/request/request_table.h"

#define SP_REQUEST_FLAGS_MAX        32
#define SP_REQUEST_FLAG_NAME_BYTES  32
#define SP_REQUEST_FLAG_VALUE_BYTES 24

/* What the flags said, in the order of the table. The lists' arrays are owned
 * (sp_settings_free_lists). */
typedef struct sp_request_flags {
    union {
        bool truth;
        int64_t whole;
        double number;
        sp_setting_list texts;
    } values[SP_REQUEST_FLAGS_MAX];
    char names[SP_REQUEST_FLAGS_MAX][SP_REQUEST_FLAG_NAME_BYTES];
    char defaults[SP_REQUEST_FLAGS_MAX][SP_REQUEST_FLAG_VALUE_BYTES];
} sp_request_flags;

/*
 * Writes the settings rows of one form and returns their number. They borrow names and defaults
 * from *flags; `offset` is that of *flags in the struct of the verb's settings.
 */
size_t sp_request_flags_rows(sp_request_flags *flags, sp_request_form form, size_t offset,
                             sp_setting out_rows[SP_REQUEST_FLAGS_MAX]);

/* Sets the fields of *request to what the parsed flags say. SP_ERR_INPUT with the field as subject,
 * SP_ERR_MEMORY; the request owns its lists (sp_request_free_lists), after a failure too. */
sp_status sp_request_flags_apply(const sp_request_flags *flags, sp_request_form form,
                                 sp_request *request, sp_error *error);

#endif
