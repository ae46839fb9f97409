/*
 * pattern.h: the regular expressions of adapter_config.json, which PEFT passes to Python's `re`.
 *
 * They are matched by PCRE2 against module paths (ASCII letters, digits, dots, underscores). Only
 * syntax that both engines interpret alike is accepted: characters, ".", classes, groups,
 * look-ahead, alternation, anchors, the usual repetitions, and the escapes \. \- \_ \/ \d \D \w \W
 * \s \S \b \B. Everything else is `unsupported-pattern`, as is a pattern whose matching takes too
 * long. One match has a limit of its own; thousands of patterns that each stay below it would still
 * take hours against thousands of paths, so the patterns of one config share one budget of steps.
 */
#ifndef SP_ADAPTER_PATTERN_H
#define SP_ADAPTER_PATTERN_H

#include <sidepath/status.h>

#include <stdbool.h>

typedef struct sp_pattern sp_pattern;

/* Steps for all matches of one config's expressions: seconds at worst, three million matches of
 * ordinary ones: 48 layers of 128 experts against a rank and an alpha for every layer. */
#define SP_PATTERN_STEPS_MAX INT64_C(1000000000)

typedef enum sp_pattern_form {
    SP_PATTERN_WHOLE,  /* the whole path: re.fullmatch(KEY, path) */
    SP_PATTERN_SUFFIX, /* the path's end, at a dot: re.match(r"(.*\.)?(KEY)$", path) */
} sp_pattern_form;

/*
 * `field` names the config's field in errors; the text is not kept. *steps_left is decremented by
 * each match and may be shared by patterns; it is borrowed for the pattern's life. NULL: only the
 * limit of one match. *out_pattern is owned by the caller. `unsupported-pattern` with the byte
 * position inside the text; SP_ERR_MEMORY.
 */
sp_status sp_pattern_create(const char *text, sp_pattern_form form, const char *field,
                            int64_t *steps_left, sp_pattern **out_pattern, sp_error *error);
void sp_pattern_destroy(sp_pattern *pattern); /* NULL is allowed */

/* Matches one path of n bytes. `unsupported-pattern` when it takes too long. Not thread-safe. */
sp_status sp_pattern_match(sp_pattern *pattern, const char *path, size_t n, bool *out_matches,
                           sp_error *error);

#endif
