#include "support/field_docs.h"

#include "server/api/body_fields.h"

#include <stdio.h>
#include <string.h>

#define BOTH       (SP_FIELDS_COMPLETION | SP_FIELDS_CHAT)
#define TEXT_BYTES 256

static bool is_number(const sp_field *row)
{
    return row->type == SP_FIELD_INT || row->type == SP_FIELD_FLOAT || row->type == SP_FIELD_DOUBLE;
}

/* What a row says without being served. */
static const char *only_value(sp_field_type type)
{
    switch (type) {
    case SP_FIELD_ONLY_FALSE:
        return "false";
    case SP_FIELD_ONLY_TRUE:
        return "true";
    case SP_FIELD_ONLY_ONE:
        return "1";
    case SP_FIELD_ONLY_EMPTY:
        return "";
    default:
        return NULL;
    }
}

static bool has_default(const sp_field *row)
{
    return is_number(row) || row->type == SP_FIELD_BOOL || row->type == SP_FIELD_NOT;
}

static bool is_in_table(const sp_field *row)
{
    return (row->forms & BOTH) != 0 && (row->left_out || has_default(row));
}

/* "| `top_p` | both | 1 |" */
static void write_begin(const sp_field *row, char out_text[TEXT_BYTES])
{
    unsigned both = row->forms & BOTH;
    const char *in = both == BOTH ? "both" : both == SP_FIELDS_CHAT ? "chat" : "completions";
    double number = row->defaults[SP_LEFT_OUT_API];
    char text[32];

    if (is_number(row))
        snprintf(text, sizeof text, "%g", number);
    else
        snprintf(text, sizeof text, "%s", number > 0 ? "true" : "false");
    snprintf(out_text, TEXT_BYTES, "| `%s` | %s | %s |", row->name, in,
             row->left_out ? row->left_out : text);
}

/* The range as the documents have it; "" where it says nothing. */
static void write_range(const sp_field *row, char out_text[TEXT_BYTES])
{
    int most = (int)row->maximum;

    out_text[0] = '\0';
    if (is_number(row) && row->maximum < INT32_MAX)
        snprintf(out_text, TEXT_BYTES, "%g to %g", row->minimum, row->maximum);
    else if (row->count_offset != 0 && most >= 1000)
        snprintf(out_text, TEXT_BYTES, "at most %d,%03d", most / 1000, most % 1000);
    else if (row->count_offset != 0)
        snprintf(out_text, TEXT_BYTES, "at most %d", most);
}

/* Whether the line at `at` holds `part`. */
static bool line_has(const char *at, const char *part)
{
    const char *found = strstr(at, part);

    return found && found < at + strcspn(at, "\n");
}

/* The line that begins so; NULL: none. */
static const char *find_line(const char *text, const char *begin)
{
    for (const char *at = strstr(text, begin); at; at = strstr(at + 1, begin))
        if (at == text || at[-1] == '\n')
            return at;
    return NULL;
}

static void check_table_row(const char *text, const sp_field *row, sp_text *problems)
{
    char begin[TEXT_BYTES], range[TEXT_BYTES];
    const char *line;

    write_begin(row, begin);
    write_range(row, range);
    line = find_line(text, begin);
    if (!line || !line_has(line, range))
        sp_text_format(problems, "%s %s\n", begin, range);
}

static void check_rest(const char *text, const sp_field *row, sp_text *problems)
{
    const char *value = only_value(row->type);
    const char *line =
        find_line(text, row->type == SP_FIELD_IGNORED ? "Taken and ignored" : "Taken only as");
    char name[TEXT_BYTES];

    snprintf(name, sizeof name, value && *value ? "`%s` %s" : "`%s`", row->name, value);
    if (!line || !line_has(line, name))
        sp_text_format(problems, "%s is not in the line of its kind\n", name);
}

static void check_part(const char *text, const sp_field_part *part, sp_text *problems)
{
    for (size_t i = 0; i < part->n; i++) {
        const sp_field *row = &part->rows[i];

        if (is_in_table(row))
            check_table_row(text, row, problems);
        else if ((row->forms & BOTH) != 0)
            check_rest(text, row, problems);
    }
}

/* Every row of the table is one of ours. */
static void check_known(const char *text, const sp_field_part *parts, sp_text *problems)
{
    const char *at = find_line(text, "| field | in | default |");

    for (at = at ? strstr(at, "\n| `") : NULL; at; at = strstr(at + 1, "\n| `")) {
        size_t bytes = strcspn(at + 4, "`");

        if (!strncmp(at + 4 + bytes, "` | ", 4) &&
            (line_has(at + 1, "| both |") || line_has(at + 1, "| chat |") ||
             line_has(at + 1, "| completions |")) &&
            !sp_field_find(&parts[0], at + 4, bytes, BOTH) &&
            !sp_field_find(&parts[1], at + 4, bytes, BOTH))
            sp_text_format(problems, "%.*s is no field\n", (int)bytes, at + 4);
    }
}

void sp_field_docs_http(const char *text, sp_text *out_problems)
{
    const sp_field_part parts[] = {sp_request_part(NULL), {sp_body_rows, sp_n_body_rows, NULL}};

    check_part(text, &parts[0], out_problems);
    check_part(text, &parts[1], out_problems);
    check_known(text, parts, out_problems);
}

/* A copy with "-" for the minus sign of typography. */
static void copy_line(const char *at, char *out_line, size_t bytes)
{
    size_t n = 0;

    while (*at && *at != '\n' && n + 1 < bytes) {
        bool minus = strncmp(at, "\xe2\x88\x92", 3) == 0;

        out_line[n++] = minus ? '-' : *at;
        at += minus ? 3 : 1;
    }
    out_line[n] = '\0';
}

void sp_field_docs_sampling(const char *text, sp_text *out_problems)
{
    const sp_field_part part = sp_request_part(NULL);
    size_t n = 0;

    for (const char *at = strstr(text, " | `"); at; at = strstr(at + 1, " | `")) {
        const sp_field *row =
            sp_field_find(&part, at + 4, strcspn(at + 4, "`"), SP_FORM_COMPLETION);
        char line[1024], range[TEXT_BYTES];

        copy_line(at, line, sizeof line);
        if (row)
            write_range(row, range);
        if (!row || !strstr(line, range))
            sp_text_format(out_problems, "%s\n", line);
        n++;
    }
    if (n < 9)
        sp_text_format(out_problems, "the table has %zu rows\n", n);
}
