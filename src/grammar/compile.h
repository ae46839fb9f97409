/*
 * compile.h: what a client requests, compiled into a grammar. Bounded in time and memory, whatever
 * is asked; it may take some tenths of a second, so it belongs on a thread that nobody waits for.
 *
 * A schema is compiled to a part of what it allows, never to more: every text of the grammar is
 * JSON and valid under the schema, members come in the schema's order, and blanks are few. A
 * keyword that is not enforced is refused by its name, with its path. docs/GRAMMAR.md has the list.
 */
#ifndef SP_GRAMMAR_COMPILE_H
#define SP_GRAMMAR_COMPILE_H

#include "grammar/grammar.h"

#define SP_GRAMMAR_TEXT_BYTES_MAX ((size_t)256 << 10)

typedef enum sp_grammar_kind {
    SP_GRAMMAR_JSON_OBJECT, /* any JSON object; no text */
    SP_GRAMMAR_JSON_SCHEMA, /* text: a JSON Schema */
    SP_GRAMMAR_REGEX,       /* text: a pattern for the whole output */
    SP_GRAMMAR_CHOICE,      /* text: a JSON list of texts */
    SP_GRAMMAR_CALLS, /* text: {"begin", "middle", "end", "between": texts around a tool's name
                       and its arguments, "many": whether more than one call may come,
                       "tools": [{"name", "parameters": a schema or null, "any": whether its
                       arguments are any text}], "tagged": whether arguments are <parameter=NAME>
                       tags and not JSON, "free": the text that begins a call, which then may come
                       after any text, or never} */
    SP_GRAMMAR_EBNF   /* text: rules, name ::= ... */
} sp_grammar_kind;

/* Whether reasoning comes before what the grammar is about. */
typedef enum sp_grammar_thought {
    SP_GRAMMAR_NO_THOUGHT,
    SP_GRAMMAR_MAY_THINK, /* the output may begin with <think> */
    SP_GRAMMAR_THINKS     /* the output begins inside of <think> */
} sp_grammar_thought;

typedef struct sp_grammar_source {
    sp_grammar_kind kind;
    sp_grammar_thought thought;
    const char *text; /* UTF-8 */
    size_t bytes;
} sp_grammar_source;

/*
 * One reference to *out_grammar, the caller's; `vocabulary` is borrowed as long as it lives.
 * SP_ERR_INPUT with SP_GRAMMAR_MALFORMED, SP_GRAMMAR_UNSUPPORTED or SP_GRAMMAR_UNSATISFIABLE;
 * SP_ERR_TOO_LARGE with SP_GRAMMAR_TOO_LARGE: subject is the place in a schema
 * ("#/properties/a/uniqueItems"), where it has one. SP_ERR_MEMORY.
 */
sp_status sp_grammar_compile(const sp_vocabulary *vocabulary, const sp_grammar_source *source,
                             sp_grammar **out_grammar, sp_error *error);

#endif
