/*
 * name_rule.h: a field of adapter_config.json that says which modules are meant: by their names, by
 * one regular expression, or as "all-linear".
 *
 * A name matches every path of which it is a suffix after a dot, as in PEFT. The trunk before the
 * layers is ignored on both sides, so that a list of full paths means the same under each prefix
 * that a file may have. Names are looked up, not scanned: a config may list as many as a file has
 * modules, and a hostile one many more. One thread at a time per rule, because of its pattern.
 */
#ifndef SP_ADAPTER_NAME_RULE_H
#define SP_ADAPTER_NAME_RULE_H

#include "adapter/pattern.h"

#include <stddef.h>

typedef struct sp_name_rule {
    const char **names; /* [n], as listed; borrowed from the config's JSON */
    size_t n;
    const char **sorted; /* [n_sorted]: without their trunks, ascending, each once */
    size_t n_sorted;
    sp_pattern *regex; /* NULL: names */
    bool all_linear;
    bool given;
} sp_name_rule;

/* Fills `sorted` from `names`. SP_ERR_MEMORY, which names `field`. */
sp_status sp_name_rule_sort(sp_name_rule *rule, const char *field, sp_error *error);
/* Frees what the rule owns and zeroes it. Zeros are allowed. */
void sp_name_rule_clear(sp_name_rule *rule);

/* Whether the rule matches the path: all of it, or (for names) a suffix of it after a dot. */
sp_status sp_name_rule_match(const sp_name_rule *rule, const char *path, size_t n,
                             bool *out_matches, sp_error *error);

/* Sets marks [n_sorted] of the names that match the path. */
void sp_name_rule_mark(const sp_name_rule *rule, const char *path, size_t n, bool *marks);

/* The index of a listed name in `sorted`; n_sorted for an empty one, which matches nothing. */
size_t sp_name_rule_index(const sp_name_rule *rule, const char *name);

#endif
