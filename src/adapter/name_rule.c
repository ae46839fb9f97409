#include "adapter/name_rule.h"

#include "base/alloc.h"
#include "base/error.h"

#include <stdlib.h>
#include <string.h>

static bool begins_with(const char *text, size_t n, const char *beginning)
{
    size_t length = strlen(beginning);

    return n >= length && memcmp(text, beginning, length) == 0;
}

/* Bytes of the trunk before the layers, the embedding or the head; 0 if there is none. */
static size_t trunk_bytes(const char *path, size_t n)
{
    static const char model[] = "model.", language_model[] = "language_model.";
    size_t at = 0;
    bool known;

    for (;;) {
        if (begins_with(path + at, n - at, model))
            at += sizeof model - 1;
        else if (begins_with(path + at, n - at, language_model))
            at += sizeof language_model - 1;
        else
            break;
    }
    known = begins_with(path + at, n - at, "layers.") ||
            (n - at == strlen("embed_tokens") && begins_with(path + at, n - at, "embed_tokens")) ||
            (n - at == strlen("lm_head") && begins_with(path + at, n - at, "lm_head"));
    return known ? at : 0;
}

static int by_text(const void *left, const void *right)
{
    return strcmp(*(const char *const *)left, *(const char *const *)right);
}

sp_status sp_name_rule_sort(sp_name_rule *rule, const char *field, sp_error *error)
{
    size_t n = 0;

    if (rule->n == 0)
        return SP_OK;
    rule->sorted = sp_calloc(rule->n, sizeof *rule->sorted);
    if (!rule->sorted)
        return sp_fail_memory(error, rule->n * sizeof *rule->sorted, field);
    for (size_t i = 0; i < rule->n; i++) {
        const char *name = rule->names[i];

        if (*name != '\0')
            rule->sorted[n++] = name + trunk_bytes(name, strlen(name));
    }
    if (n > 0)
        qsort(rule->sorted, n, sizeof *rule->sorted, by_text);
    for (size_t i = 0; i < n; i++) {
        if (rule->n_sorted == 0 || strcmp(rule->sorted[rule->n_sorted - 1], rule->sorted[i]) != 0)
            rule->sorted[rule->n_sorted++] = rule->sorted[i];
    }
    return SP_OK;
}

void sp_name_rule_clear(sp_name_rule *rule)
{
    sp_free(rule->names);
    sp_free(rule->sorted);
    sp_pattern_destroy(rule->regex);
    *rule = (sp_name_rule){0};
}

/* Index of exactly this text of n bytes; n_sorted if it is not listed. */
static size_t find_text(const sp_name_rule *rule, const char *text, size_t n)
{
    size_t low = 0, high = rule->n_sorted;

    while (low < high) {
        size_t middle = low + (high - low) / 2;
        const char *name = rule->sorted[middle];
        int order = strncmp(name, text, n);

        if (order == 0 && name[n] == '\0')
            return middle;
        if (order < 0)
            low = middle + 1;
        else
            high = middle; /* `text` is a prefix of a longer name, or sorts before it */
    }
    return rule->n_sorted;
}

/* Index of the first name, from *at on, that is a suffix of the path after a dot; *at moves past
 * it. */
static size_t next_name(const sp_name_rule *rule, const char *path, size_t n, size_t *at)
{
    while (*at < n) {
        const char *dot = memchr(path + *at, '.', n - *at);
        size_t found = find_text(rule, path + *at, n - *at);

        *at = dot ? (size_t)(dot - path) + 1 : n;
        if (found < rule->n_sorted)
            return found;
    }
    return rule->n_sorted;
}

sp_status sp_name_rule_match(const sp_name_rule *rule, const char *path, size_t n,
                             bool *out_matches, sp_error *error)
{
    size_t at = trunk_bytes(path, n);

    if (rule->regex)
        return sp_pattern_match(rule->regex, path, n, out_matches, error);
    *out_matches = next_name(rule, path, n, &at) < rule->n_sorted;
    return SP_OK;
}

void sp_name_rule_mark(const sp_name_rule *rule, const char *path, size_t n, bool *marks)
{
    size_t at = trunk_bytes(path, n);

    while (at < n) {
        size_t found = next_name(rule, path, n, &at);

        if (found < rule->n_sorted)
            marks[found] = true;
    }
}

size_t sp_name_rule_index(const sp_name_rule *rule, const char *name)
{
    size_t n = strlen(name);
    size_t at = trunk_bytes(name, n);

    return n > 0 ? find_text(rule, name + at, n - at) : rule->n_sorted;
}
