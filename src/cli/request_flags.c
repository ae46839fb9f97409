#include "cli/request_flags.h"

#include "base/assert.h"

#include <string.h>

static sp_setting_type setting_type(sp_field_type type)
{
    switch (type) {
    case SP_FIELD_BOOL:
    case SP_FIELD_NOT:
        return SP_SETTING_BOOL;
    case SP_FIELD_INT:
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
    SP_ASSERT(strlen(field) < SP_REQUEST_FLAG_NAME_BYTES);
    snprintf(out_name, SP_REQUEST_FLAG_NAME_BYTES, "%s", field);
    for (; *out_name; out_name++)
        if (*out_name == '_')
            *out_name = '-';
}

/* A switch that is off and a list that is empty have no default to show. */
static const char *write_default(const sp_field *row, char *out_text)
{
    double number = row->defaults[SP_LEFT_OUT_GENERATE];

    if (row->type == SP_FIELD_TEXTS)
        return NULL;
    if (row->type == SP_FIELD_BOOL || row->type == SP_FIELD_NOT)
        return number > 0 ? "true" : NULL;
    snprintf(out_text, SP_REQUEST_FLAG_VALUE_BYTES, "%.10g", number);
    return out_text;
}

size_t sp_request_flags_rows(sp_request_flags *flags, sp_request_form form, size_t offset,
                             sp_setting out_rows[SP_REQUEST_FLAGS_MAX])
{
    size_t n = 0;

    for (size_t i = 0; i < sp_n_request_rows && n < SP_REQUEST_FLAGS_MAX; i++) {
        const sp_field *row = &sp_request_rows[i];

        if ((row->forms & form) == 0)
            continue;
        write_name(row->name, flags->names[n]);
        out_rows[n] = (sp_setting){
            .name = flags->names[n],
            .type = setting_type(row->type),
            .offset = offset + offsetof(sp_request_flags, values) + n * sizeof flags->values[0],
            .default_text = write_default(row, flags->defaults[n]),
            .minimum = row->minimum,
            .maximum = row->maximum,
            .value_name = row->value_name,
            .help = row->help,
            .flag_only = true,
        };
        n++;
    }
    return n;
}

static sp_status apply_row(const sp_request_flags *flags, size_t i, const sp_field *row,
                           sp_request *request, sp_error *error)
{
    const sp_setting_list *texts;

    switch (row->type) {
    case SP_FIELD_BOOL:
    case SP_FIELD_NOT:
        return sp_field_set_number(row, flags->values[i].truth, request, error);
    case SP_FIELD_INT:
        return sp_field_set_number(row, (double)flags->values[i].whole, request, error);
    case SP_FIELD_SEED: /* all of its bits */
        *(uint64_t *)(void *)((char *)request + row->offset) = (uint64_t)flags->values[i].whole;
        return SP_OK;
    case SP_FIELD_TEXTS:
        texts = &flags->values[i].texts;
        return sp_field_set_texts(row, texts->values, texts->n, request, error);
    default:
        return sp_field_set_number(row, flags->values[i].number, request, error);
    }
}

sp_status sp_request_flags_apply(const sp_request_flags *flags, sp_request_form form,
                                 sp_request *request, sp_error *error)
{
    sp_status status = SP_OK;
    size_t n = 0;

    for (size_t i = 0; i < sp_n_request_rows && n < SP_REQUEST_FLAGS_MAX; i++) {
        if ((sp_request_rows[i].forms & form) == 0)
            continue;
        status = apply_row(flags, n++, &sp_request_rows[i], request, error);
        if (status != SP_OK)
            return status;
    }
    return status;
}
