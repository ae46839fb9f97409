/*
 * regex.h: regular expressions into rules of a network. Backtracking is nowhere: a pattern
 * becomes an automaton with one node for each byte sequence that has been read, made here, so that
 * a token costs what its bytes cost. A pattern that would need too many nodes is refused.
 *
 * What is read: literals, `.`, classes, groups, `|`, `* + ? {n} {n,} {n,m}` (also with a `?` after
 * it, which changes nothing here), \d \w \s \D \W \S, the escapes of control characters, \xHH,
 * \uHHHH, `^` at the beginning and `$` at the end of a whole alternative. Everything else (back
 * references, look-around, \b, names of groups, flags, properties) is refused by its name.
 * Characters are code points; \d, \w and \s are those of ASCII.
 */
#ifndef SP_GRAMMAR_REGEX_H
#define SP_GRAMMAR_REGEX_H

#include "grammar/network.h"
#include "grammar/regex_tree.h"

#define SP_REGEX_BYTES_MAX  4096
#define SP_REGEX_REPEAT_MAX 2000
/* Of one pattern, and steps that making them may take over all patterns of a grammar. */
#define SP_REGEX_NODES_MAX 8192
#define SP_REGEX_WORK_MAX  (20 * 1000 * 1000)

typedef enum sp_regex_form {
    SP_REGEX_WHOLE,  /* the text itself, from its beginning to its end */
    SP_REGEX_STRING, /* the content of a JSON string that has a match in it somewhere, with its
                          quotes: what JSON must escape is escaped */
} sp_regex_form;

/*
 * Adds a rule for the pattern; *out_rule is its number. *work (in and out) counts the steps.
 * SP_ERR_INPUT with SP_GRAMMAR_MALFORMED or SP_GRAMMAR_UNSUPPORTED, position: the byte;
 * SP_ERR_TOO_LARGE (SP_GRAMMAR_TOO_LARGE); SP_ERR_MEMORY.
 */
sp_status sp_regex_add(sp_net_builder *builder, const char *pattern, size_t bytes,
                       sp_regex_form form, int64_t *work, int32_t *out_rule, sp_error *error);

/*
 * Fills a rule that has its start alone with what node `root` of a tree matches, whose calls name
 * rules of the same builder. Where the rule begins with a call of itself (a: a "x" | "y") it loops
 * instead; where it begins so in any other way, the call remains. SP_ERR_TOO_LARGE, SP_ERR_MEMORY,
 * both without a text.
 */
sp_status sp_regex_fill(sp_net_builder *builder, const sp_regex_tree *tree, int32_t root,
                        int32_t rule, int64_t *work);

#endif
