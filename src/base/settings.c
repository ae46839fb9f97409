#include "base/settings.h"

#include "base/alloc.h"
#include "base/error.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define ENVIRONMENT_PREFIX     "SIDEPATH_"
#define ENVIRONMENT_NAME_BYTES 96
#define NAME_BYTES_MAX         64
#define HELP_COLUMN            30

static void environment_name(const sp_setting *setting, char out_name[ENVIRONMENT_NAME_BYTES])
{
    size_t n =
        (size_t)snprintf(out_name, ENVIRONMENT_NAME_BYTES, ENVIRONMENT_PREFIX "%s", setting->name);

    for (size_t i = 0; i < n && i < ENVIRONMENT_NAME_BYTES - 1; i++)
        out_name[i] = out_name[i] == '-' ? '_' : (char)toupper((unsigned char)out_name[i]);
}

static void *field_of(const sp_setting *setting, void *values)
{
    return (char *)values + setting->offset;
}

/* ---- values -------------------------------------------------------------------------------- */

static sp_status bad_value(const sp_setting *setting, const char *text, const char *source,
                           const char *want, sp_error *error)
{
    return sp_fail(error, SP_ERR_INPUT, NULL, setting->name, -1, "%s: \"%s\" is not %s", source,
                   text, want);
}

/* Whether the text is a word for yes or no, and which. */
static bool read_bool(const char *text, bool *out_value)
{
    static const char *const yes[] = {"1", "true", "yes", "on"};
    static const char *const no[] = {"0", "false", "no", "off"};

    for (size_t i = 0; i < 4; i++) {
        if (strcmp(text, yes[i]) == 0 || strcmp(text, no[i]) == 0) {
            *out_value = strcmp(text, yes[i]) == 0;
            return true;
        }
    }
    return false;
}

static sp_status set_bool(const sp_setting *setting, const char *text, const char *source,
                          void *values, sp_error *error)
{
    if (read_bool(text, field_of(setting, values)))
        return SP_OK;
    return bad_value(setting, text, source, "a yes or no (1, true, yes, on; 0, false, no, off)",
                     error);
}

static sp_status out_of_range(const sp_setting *setting, const char *text, const char *source,
                              sp_error *error)
{
    const char *format = setting->type == SP_SETTING_INT
                             ? "%s: %s is out of range; it must be from %.0f to %.0f"
                             : "%s: %s is out of range; it must be from %g to %g";

    return sp_fail(error, SP_ERR_INPUT, NULL, setting->name, -1, format, source, text,
                   setting->minimum, setting->maximum);
}

static sp_status set_int(const sp_setting *setting, const char *text, const char *source,
                         void *values, sp_error *error)
{
    char *end;
    long long number;

    errno = 0;
    number = strtoll(text, &end, 10);
    if (end == text || *end != '\0' || isspace((unsigned char)text[0]))
        return bad_value(setting, text, source, "a whole number", error);
    if (errno == ERANGE || (double)number < setting->minimum || (double)number > setting->maximum)
        return out_of_range(setting, text, source, error);
    *(int64_t *)field_of(setting, values) = number;
    return SP_OK;
}

static sp_status set_double(const sp_setting *setting, const char *text, const char *source,
                            void *values, sp_error *error)
{
    char *end;
    double number = strtod(text, &end);

    if (end == text || *end != '\0' || isspace((unsigned char)text[0]) || !isfinite(number))
        return bad_value(setting, text, source, "a number", error);
    if (number < setting->minimum || number > setting->maximum)
        return out_of_range(setting, text, source, error);
    *(double *)field_of(setting, values) = number;
    return SP_OK;
}

static sp_status set_choice(const sp_setting *setting, const char *text, const char *source,
                            void *values, sp_error *error)
{
    const char *cursor = setting->choices;
    size_t n = strlen(text);

    while (*cursor) {
        size_t length = strcspn(cursor, "|");

        if (length == n && memcmp(cursor, text, n) == 0) {
            *(const char **)field_of(setting, values) = text;
            return SP_OK;
        }
        cursor += length + (cursor[length] == '|');
    }
    return sp_fail(error, SP_ERR_INPUT, NULL, setting->name, -1, "%s: \"%s\" is not one of %s",
                   source, text, setting->choices);
}

static sp_status list_add(sp_setting_list *list, const char *value, sp_error *error)
{
    const char **grown = sp_realloc(list->values, (list->n + 1) * sizeof *grown);

    if (!grown)
        return sp_fail_memory(error, (list->n + 1) * sizeof *grown, "a list of arguments");
    grown[list->n] = value;
    list->values = grown;
    list->n++;
    return SP_OK;
}

/* The environment replaces a list's default, and the first flag either of them. */
static void drop_fallback(const sp_setting *setting, void *values)
{
    sp_setting_list *list = field_of(setting, values);

    if (setting->type == SP_SETTING_LIST && list->is_fallback)
        list->n = 0;
    if (setting->type == SP_SETTING_LIST)
        list->is_fallback = false;
}

static sp_status set_value(const sp_setting *setting, const char *text, const char *source,
                           void *values, sp_error *error)
{
    switch (setting->type) {
    case SP_SETTING_BOOL:
        return set_bool(setting, text, source, values, error);
    case SP_SETTING_INT:
        return set_int(setting, text, source, values, error);
    case SP_SETTING_DOUBLE:
        return set_double(setting, text, source, values, error);
    case SP_SETTING_STRING:
        *(const char **)field_of(setting, values) = text;
        return SP_OK;
    case SP_SETTING_CHOICE:
        return set_choice(setting, text, source, values, error);
    case SP_SETTING_LIST:
        return list_add(field_of(setting, values), text, error);
    }
    return SP_ERR_ARGUMENT;
}

static void clear_value(const sp_setting *setting, void *values)
{
    switch (setting->type) {
    case SP_SETTING_BOOL:
        *(bool *)field_of(setting, values) = false;
        break;
    case SP_SETTING_INT:
        *(int64_t *)field_of(setting, values) = 0;
        break;
    case SP_SETTING_DOUBLE:
        *(double *)field_of(setting, values) = 0;
        break;
    case SP_SETTING_STRING:
    case SP_SETTING_CHOICE:
        *(const char **)field_of(setting, values) = NULL;
        break;
    case SP_SETTING_LIST:
        *(sp_setting_list *)field_of(setting, values) = (sp_setting_list){0};
        break;
    }
}

/* Sets the value used unless a flag is given. */
static sp_status set_fallback(const sp_setting *setting, const char *text, const char *source,
                              void *values, sp_error *error)
{
    sp_status status;

    drop_fallback(setting, values);
    status = set_value(setting, text, source, values, error);
    if (status == SP_OK && setting->type == SP_SETTING_LIST)
        ((sp_setting_list *)field_of(setting, values))->is_fallback = true;
    return status;
}

static sp_status set_defaults(const sp_setting *settings, size_t n_settings, void *values,
                              sp_error *error)
{
    sp_status status = SP_OK;

    for (size_t i = 0; i < n_settings; i++)
        clear_value(&settings[i], values);
    for (size_t i = 0; i < n_settings && status == SP_OK; i++) {
        const sp_setting *setting = &settings[i];
        char name[ENVIRONMENT_NAME_BYTES];
        const char *text = NULL;

        if (setting->default_text)
            status = set_fallback(setting, setting->default_text, "default", values, error);
        if (!setting->flag_only) {
            environment_name(setting, name);
            text = getenv(name);
        }
        if (text && status == SP_OK)
            status = set_fallback(setting, text, name, values, error);
    }
    return status;
}

/* The value's placeholder in the help: "N", "auto|cpu"; nothing for a switch. */
static const char *value_in_help(const sp_setting *setting)
{
    if (setting->type == SP_SETTING_BOOL)
        return "";
    if (setting->choices)
        return setting->choices;
    return setting->value_name ? setting->value_name : "VALUE";
}

/* ---- flags --------------------------------------------------------------------------------- */

/* Levenshtein distance of two short names. */
static size_t edit_distance(const char *a, size_t a_bytes, const char *b)
{
    size_t row[NAME_BYTES_MAX + 1];
    size_t b_bytes = strlen(b);

    if (a_bytes > NAME_BYTES_MAX || b_bytes > NAME_BYTES_MAX)
        return SIZE_MAX;
    for (size_t j = 0; j <= b_bytes; j++)
        row[j] = j;
    for (size_t i = 1; i <= a_bytes; i++) {
        size_t diagonal = row[0];

        row[0] = i;
        for (size_t j = 1; j <= b_bytes; j++) {
            size_t replace = diagonal + (a[i - 1] != b[j - 1]);
            size_t shorter = row[j] < row[j - 1] ? row[j] : row[j - 1];

            diagonal = row[j];
            row[j] = replace < shorter + 1 ? replace : shorter + 1;
        }
    }
    return row[b_bytes];
}

static sp_status unknown_flag(const sp_setting *settings, size_t n_settings, const char *name,
                              size_t name_bytes, sp_error *error)
{
    const char *nearest = NULL;
    size_t best = name_bytes / 2 + 1;

    for (size_t i = 0; i < n_settings; i++) {
        size_t distance = edit_distance(name, name_bytes, settings[i].name);

        if (distance < best) {
            best = distance;
            nearest = settings[i].name;
        }
    }
    if (nearest)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, name, -1,
                       "unknown flag --%.*s; did you mean --%s?", (int)name_bytes, name, nearest);
    return sp_fail(error, SP_ERR_ARGUMENT, NULL, name, -1, "unknown flag --%.*s; try --help",
                   (int)name_bytes, name);
}

static const sp_setting *find_setting(const sp_setting *settings, size_t n_settings,
                                      const char *name, size_t name_bytes)
{
    for (size_t i = 0; i < n_settings; i++)
        if (strlen(settings[i].name) == name_bytes &&
            memcmp(settings[i].name, name, name_bytes) == 0)
            return &settings[i];
    return NULL;
}

/* Takes one flag at argv[*index], with its value where it needs one, and moves *index past it. */
static sp_status take_flag(const sp_setting *settings, size_t n_settings, int argc, char **argv,
                           int *index, void *values, sp_error *error)
{
    const char *name = argv[*index] + 2;
    const char *equals = strchr(name, '=');
    size_t name_bytes = equals ? (size_t)(equals - name) : strlen(name);
    const sp_setting *setting = find_setting(settings, n_settings, name, name_bytes);
    char source[NAME_BYTES_MAX + 4];

    if (!setting && name_bytes > 3 && memcmp(name, "no-", 3) == 0 && !equals) {
        setting = find_setting(settings, n_settings, name + 3, name_bytes - 3);
        if (setting && setting->type == SP_SETTING_BOOL) {
            (*index)++;
            return set_value(setting, "false", argv[*index - 1], values, error);
        }
        setting = NULL;
    }
    if (!setting)
        return unknown_flag(settings, n_settings, name, name_bytes, error);
    snprintf(source, sizeof source, "--%s", setting->name);
    drop_fallback(setting, values);
    (*index)++;
    if (equals)
        return set_value(setting, equals + 1, source, values, error);
    if (setting->type == SP_SETTING_BOOL)
        return set_value(setting, "true", source, values, error);
    if (*index >= argc)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, setting->name, -1, "%s needs a value (%s)",
                       source, value_in_help(setting));
    (*index)++;
    return set_value(setting, argv[*index - 1], source, values, error);
}

sp_status sp_settings_parse(const sp_setting *settings, size_t n_settings, int argc, char **argv,
                            void *values, sp_setting_list *out_positional, sp_error *error)
{
    bool flags_ended = false;
    sp_status status;

    if (out_positional)
        *out_positional = (sp_setting_list){0};
    status = set_defaults(settings, n_settings, values, error);
    for (int i = 1; i < argc && status == SP_OK;) {
        if (!flags_ended && strcmp(argv[i], "--") == 0) {
            flags_ended = true;
            i++;
        } else if (!flags_ended && strncmp(argv[i], "--", 2) == 0) {
            status = take_flag(settings, n_settings, argc, argv, &i, values, error);
        } else if (!flags_ended && argv[i][0] == '-' && argv[i][1] != '\0') {
            status = sp_fail(error, SP_ERR_ARGUMENT, NULL, argv[i], -1,
                             "unknown flag %s; flags have two dashes (try --help)", argv[i]);
        } else if (!out_positional) {
            status = sp_fail(error, SP_ERR_ARGUMENT, NULL, argv[i], -1,
                             "unexpected argument \"%s\"; try --help", argv[i]);
        } else {
            status = list_add(out_positional, argv[i], error);
            i++;
        }
    }
    if (status != SP_OK)
        sp_settings_free_lists(settings, n_settings, values, out_positional);
    return status;
}

void sp_settings_free_lists(const sp_setting *settings, size_t n_settings, void *values,
                            sp_setting_list *positional)
{
    for (size_t i = 0; i < n_settings; i++) {
        sp_setting_list *list;

        if (settings[i].type != SP_SETTING_LIST)
            continue;
        list = field_of(&settings[i], values);
        sp_free(list->values);
        *list = (sp_setting_list){0};
    }
    if (positional) {
        sp_free(positional->values);
        *positional = (sp_setting_list){0};
    }
}

/* ---- help ---------------------------------------------------------------------------------- */

/* The default as shown in the help, with one spelling for booleans; "" if there is none. */
static const char *default_in_help(const sp_setting *setting)
{
    bool on;

    if (!setting->default_text)
        return "";
    if (setting->type != SP_SETTING_BOOL || !read_bool(setting->default_text, &on))
        return setting->default_text;
    return on ? "true" : "false";
}

void sp_settings_print_help(FILE *stream, const sp_setting *settings, size_t n_settings)
{
    for (size_t i = 0; i < n_settings; i++) {
        const sp_setting *setting = &settings[i];
        const char *shown = default_in_help(setting);
        bool on = setting->type == SP_SETTING_BOOL && strcmp(shown, "true") == 0;
        char name[ENVIRONMENT_NAME_BYTES];
        const char *value = value_in_help(setting);
        int n = fprintf(stream, "  --%s%s%s%s", on ? "[no-]" : "", setting->name, *value ? " " : "",
                        value);

        if (n >= HELP_COLUMN) { /* a long choice: the help starts on a line of its own */
            fputc('\n', stream);
            n = 0;
        }
        fprintf(stream, "%*s%s", HELP_COLUMN - n, "", setting->help);
        if (*shown)
            fprintf(stream, " [%s]", shown);
        if (!setting->flag_only) {
            environment_name(setting, name);
            fprintf(stream, " (%s)", name);
        }
        fputc('\n', stream);
    }
}
