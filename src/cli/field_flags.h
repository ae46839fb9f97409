/*
 * field_flags.h: rows of a table of fields as flags: a settings row for each, `top_k` as --top-k.
 */
#ifndef SP_CLI_FIELD_FLAGS_H
#define SP_CLI_FIELD_FLAGS_H

#include "base/settings.h"
#include "engine/request/field.h"

#define SP_FIELD_FLAGS_MAX        48
#define SP_FIELD_FLAG_NAME_BYTES  32
#define SP_FIELD_FLAG_VALUE_BYTES 24

/* What the flags said, in the order of the table. The lists' arrays are owned
 * (sp_settings_free_lists). */
typedef struct sp_field_flags {
    union {
        bool truth;
        int64_t whole;
        double number;
        sp_setting_list texts;
    } values[SP_FIELD_FLAGS_MAX];
    char names[SP_FIELD_FLAGS_MAX][SP_FIELD_FLAG_NAME_BYTES];
    char defaults[SP_FIELD_FLAGS_MAX][SP_FIELD_FLAG_VALUE_BYTES];
} sp_field_flags;

/* Which rows of which table are flags, and how. */
typedef struct sp_field_flag_set {
    sp_field_part part; /* the values are not looked at */
    unsigned forms;     /* rows that have one of these; all others keep their values */
    size_t left_out;    /* whose defaults the flags have */
    bool has_variables; /* an environment variable each */
} sp_field_flag_set;

/*
 * Writes the settings rows of a set and returns their number. They borrow names and defaults from
 * *flags; `offset` is that of *flags in the struct of the verb's settings.
 */
size_t sp_field_flags_rows(sp_field_flags *flags, const sp_field_flag_set *set, size_t offset,
                           sp_setting out_rows[SP_FIELD_FLAGS_MAX]);

/* Sets the members of *values that the set has to what the parsed flags say. SP_ERR_INPUT with the
 * field as subject, SP_ERR_MEMORY; *values owns its lists (sp_fields_free), after a failure too. */
sp_status sp_field_flags_apply(const sp_field_flags *flags, const sp_field_flag_set *set,
                               void *values, sp_error *error);

/* The flags of a request: of `generate` (SP_FORM_FLAGS) or `logits` (SP_FORM_LOGITS_FLAGS). */
sp_field_flag_set sp_request_flag_set(unsigned form);

#endif
