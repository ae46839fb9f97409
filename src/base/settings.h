/*
 * settings.h: the mechanism of all settings. Each room (or verb) with settings provides rows; one
 * table gives the flag, the environment variable, the default and the help text. There is no other
 * getenv in the program but that of the service manager's socket (cli/notify.c). Flags take
 * precedence over the environment, the environment over the default. For the main thread, at start.
 */
#ifndef SP_BASE_SETTINGS_H
#define SP_BASE_SETTINGS_H

#include <sidepath/status.h>

#include <stdbool.h>
#include <stdio.h>

typedef enum sp_setting_type {
    SP_SETTING_BOOL,   /* --name, --no-name; environment: 0 1 true false yes no on off */
    SP_SETTING_INT,    /* int64_t, within [minimum, maximum] */
    SP_SETTING_DOUBLE, /* within [minimum, maximum] */
    SP_SETTING_STRING, /* const char *, borrowed from argv or the environment */
    SP_SETTING_CHOICE, /* const char *, one of `choices` ("a|b|c") */
    SP_SETTING_LIST    /* repeatable; values collected in order in an sp_setting_list */
} sp_setting_type;

typedef struct sp_setting_list {
    const char **values; /* borrowed strings; the array is owned (sp_settings_free_lists) */
    size_t n;
    bool is_fallback; /* the default's or the environment's: the first flag replaces it */
} sp_setting_list;

typedef struct sp_setting {
    const char *name; /* "max-loras": flag --max-loras, variable SIDEPATH_MAX_LORAS */
    sp_setting_type type;
    size_t offset;            /* of the field inside the caller's struct */
    const char *default_text; /* as a user would type it; NULL: none */
    double minimum, maximum;  /* INT and DOUBLE */
    const char *choices;      /* CHOICE */
    const char *value_name;   /* "N", "DIR" in the help */
    const char *help;         /* one line */
    bool flag_only;           /* no environment variable */
} sp_setting;

/*
 * Fills `values` from defaults, environment and argv. argv[0] is skipped. "--name value" and
 * "--name=value" are both taken; "--" ends the flags. Other arguments are collected in
 * *out_positional (may be NULL: then they are an error). Unknown flags: SP_ERR_ARGUMENT, with the
 * nearest name suggested. SP_ERR_INPUT: a value of the wrong type or out of range, with its source.
 */
sp_status sp_settings_parse(const sp_setting *settings, size_t n_settings, int argc, char **argv,
                            void *values, sp_setting_list *out_positional, sp_error *error);
/* Frees the arrays of all LIST settings in `values`, and zeroes them. */
void sp_settings_free_lists(const sp_setting *settings, size_t n_settings, void *values,
                            sp_setting_list *positional);

/* One aligned line per setting with its default and environment variable. */
void sp_settings_print_help(FILE *stream, const sp_setting *settings, size_t n_settings);

#endif
