/*
 * ebnf.h: text grammars, `root ::= ...`, into rules of a network: one for each of the text's rules,
 * made deterministic as patterns are, so that repetitions of what may be empty cost nothing.
 *
 * What is read: rules `name ::= alternatives` over any number of lines, of which `root` is the
 * output; literals between double quotes, classes, `.` (any character), names, groups, `|`,
 * `* + ? {n} {n,} {n,m}`, comments from `#` to the line's end. Characters are code points. Escapes:
 * \n \r \t \b \f \v, \xHH, \uHHHH, \UHHHHHHHH, and signs for themselves. Lark's form, look-ahead,
 * exceptions and references to tokens are refused by their name.
 *
 * A rule may begin with itself where that loops (a ::= a "x" | "y"); a rule that comes back to its
 * beginning by others, or after what may be empty, is refused.
 */
#ifndef SP_GRAMMAR_EBNF_H
#define SP_GRAMMAR_EBNF_H

#include "base/text.h"
#include "grammar/regex.h"

/* Names, whether they are defined or not. */
#define SP_EBNF_RULES_MAX 4096
/* Ways in which a rule may begin: stacks of rules that are open before its first byte. */
#define SP_EBNF_WAYS_MAX 65536
/* Groups, one in another. */
#define SP_EBNF_GROUPS_MAX 64

/*
 * Adds the rules of the text; *out_rule is the number of `root`. *work (in and out) counts steps as
 * sp_regex_add does. SP_ERR_INPUT with SP_GRAMMAR_MALFORMED or SP_GRAMMAR_UNSUPPORTED, position:
 * the byte, and the text has its line and column; SP_ERR_TOO_LARGE (SP_GRAMMAR_TOO_LARGE);
 * SP_ERR_MEMORY.
 */
sp_status sp_ebnf_add(sp_net_builder *builder, const char *text, size_t bytes, int64_t *work,
                      int32_t *out_rule, sp_error *error);

/* ---- between the two files ------------------------------------------------------------------- */

typedef struct sp_ebnf_rule {
    const char *name; /* in the text: where it is defined, or else first called */
    size_t name_bytes;
    int32_t root; /* node of the tree; -1: not defined */
} sp_ebnf_rule;

typedef struct sp_ebnf {
    const char *text;
    size_t bytes;
    sp_regex_tree tree;  /* its calls name rules [n_rules] */
    sp_ebnf_rule *rules; /* owned */
    int32_t *cells;      /* owned: a hash table of names */
    int32_t n_rules, rules_capacity;
} sp_ebnf;

/* All rules are defined, and `root` is one. Errors as sp_ebnf_add; *out is the caller's to free in
 * any case. */
sp_status sp_ebnf_read(const char *text, size_t bytes, sp_ebnf *out, sp_error *error);
void sp_ebnf_free(sp_ebnf *grammar); /* zeros are allowed */
/* The number of a rule; -1: no such name. */
int32_t sp_ebnf_find(const sp_ebnf *grammar, const char *name, size_t bytes);
/* "a grammar with WHAT, at line L, column C": the place is a byte of the text. */
sp_status sp_ebnf_refuse(const sp_ebnf *grammar, const char *at, sp_status status, const char *code,
                         sp_error *error, const char *format, ...) SP_PRINTF(6, 7);

#endif
