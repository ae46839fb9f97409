/*
 * name_rule.h: a field of adapter_config.json that says which modules are meant: by their names, by
 * one regular expression, or as "all-linear".
 *
 * A name means every path that it ends at a dot, as PEFT reads it. The trunk in front of the layers
 * is left aside on both sides, so that a list of full paths means the same under each prefix that a
 * file may have. Names are looked up, not gone through: a config may list as many as a file has
 * modules, and a hostile one many more.
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

/* Fills `sorted` from `names`, which are there already. SP_ERR_MEMORY, which says `field`. */
sp_status sp_name_rule_sort(sp_name_rule *rule, const char *field, sp_error *error);
void sp_name_rule_clear(sp_name_rule *rule);

/* Whether the rule fits the path: a whole match, or (for names) the path's end at a dot. */
sp_status sp_name_rule_match(const sp_name_rule *rule, const char *path, size_t n,
                             bool *out_matches, sp_error *error);

/* Sets marks [n_sorted] of the names that fit the path. */
void sp_name_rule_mark(const sp_name_rule *rule, const char *path, size_t n, bool *marks);

/* The place of a listed name in `sorted`; n_sorted for an empty one, which fits nothing. */
size_t sp_name_rule_index(const sp_name_rule *rule, const char *name);

#endif
