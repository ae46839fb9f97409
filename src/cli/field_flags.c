#include "cli/field_flags.h"

#include "base/assert.h"
#include "engine/request/request_table.h"

#include <string.h>

static sp_setting_type setting_type(sp_field_type type)
{
    switch (type) {
    case SP_FIELD_BOOL:
    case SP_FIELD_NOT:
        return SP_SETTING_BOOL;
    case SP_FIELD_INT:
    case SP_FIELD_INT64:
    case SP_FIELD_SIZE:
    case SP_FIELD_SEED:
        return SP_SETTING_INT;
    case SP_FIELD_TEXTS:
        return SP_SETTING_LIST;
    default:
        SP_ASSERT(type == SP_FIELD_FLOAT || type == SP_FIELD_DOUBLE);
        return SP_SETTING_DOUBLE;
    }
}

/* "top_k" as "top-k". */
static void write_name(const char *field, char *out_name)
{
    SP_ASSERT(strlen(field) < SP_FIELD_FLAG_NAME_BYTES);
    snprintf(out_name, SP_FIELD_FLAG_NAME_BYTES, "%s", field);
    for (; *out_name; out_name++)
        if (*out_name == '_')
            *out_name = '-';
}

/* A switch that is off and a list that is empty have no default to show. */
static const char *write_default(const sp_field *row, size_t left_out, char *out_text)
{
    double number = row->defaults[left_out];

    if (row->type == SP_FIELD_TEXTS)
        return NULL;
    if (row->type == SP_FIELD_BOOL || row->type == SP_FIELD_NOT)
        return number > 0 ? "true" : NULL;
    snprintf(out_text, SP_FIELD_FLAG_VALUE_BYTES, "%.10g", number);
    return out_text;
}

size_t sp_field_flags_rows(sp_field_flags *flags, const sp_field_flag_set *set, size_t offset,
                           sp_setting out_rows[SP_FIELD_FLAGS_MAX])
{
    size_t n = 0;

    for (size_t i = 0; i < set->part.n; i++) {
        const sp_field *row = &set->part.rows[i];

        if ((row->forms & set->forms) == 0)
            continue;
        SP_ASSERT(n < SP_FIELD_FLAGS_MAX);
        write_name(row->name, flags->names[n]);
        out_rows[n] = (sp_setting){
            .name = flags->names[n],
            .type = setting_type(row->type),
            .offset = offset + offsetof(sp_field_flags, values) + n * sizeof flags->values[0],
            .default_text = write_default(row, set->left_out, flags->defaults[n]),
            .minimum = row->minimum,
            .maximum = row->maximum,
            .value_name = row->value_name,
            .help = row->help,
            .flag_only = !set->has_variables,
        };
        n++;
    }
    return n;
}

static sp_status apply_row(const sp_field_flags *flags, size_t i, const sp_field *row, void *values,
                           sp_error *error)
{
    const sp_setting_list *texts;

    switch (row->type) {
    case SP_FIELD_BOOL:
    case SP_FIELD_NOT:
        return sp_field_set_number(row, flags->values[i].truth, values, error);
    case SP_FIELD_INT:
    case SP_FIELD_INT64:
    case SP_FIELD_SIZE:
        return sp_field_set_number(row, (double)flags->values[i].whole, values, error);
    case SP_FIELD_SEED: /* all of its bits */
        *(uint64_t *)(void *)((char *)values + row->offset) = (uint64_t)flags->values[i].whole;
        return SP_OK;
    case SP_FIELD_TEXTS:
        texts = &flags->values[i].texts;
        return sp_field_set_texts(row, texts->values, texts->n, values, error);
    default:
        return sp_field_set_number(row, flags->values[i].number, values, error);
    }
}

sp_status sp_field_flags_apply(const sp_field_flags *flags, const sp_field_flag_set *set,
                               void *values, sp_error *error)
{
    sp_status status = SP_OK;
    size_t n = 0;

    for (size_t i = 0; i < set->part.n && status == SP_OK; i++)
        if ((set->part.rows[i].forms & set->forms) != 0)
            status = apply_row(flags, n++, &set->part.rows[i], values, error);
    return status;
}

sp_field_flag_set sp_request_flag_set(unsigned form)
{
    return (sp_field_flag_set){
        .part = sp_request_part(NULL), .forms = form, .left_out = SP_LEFT_OUT_GENERATE};
}
