/*
 * ebnf_read.c: the text of a grammar into trees.
 */
#include "grammar/ebnf.h"

#include "base/alloc.h"
#include "base/error.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define CELLS         (4 * SP_EBNF_RULES_MAX)
#define SURROGATE_LOW 0xd800
#define SURROGATE_END 0xdfff

typedef struct reader {
    sp_ebnf *grammar;
    const char *at, *end;
    sp_status status;
    sp_error *error;
    int groups;
} reader;

/* ---- failures ------------------------------------------------------------------------------ */

sp_status sp_ebnf_refuse(const sp_ebnf *grammar, const char *at, sp_status status, const char *code,
                         sp_error *error, const char *format, ...)
{
    int64_t line = 1, column = 1;
    char what[160];
    va_list arguments;

    for (const char *c = grammar->text; c < at; c++) {
        column = *c == '\n' ? 1 : column + (((unsigned char)*c & 0xc0) != 0x80);
        line += *c == '\n';
    }
    va_start(arguments, format);
    vsnprintf(what, sizeof what, format, arguments);
    va_end(arguments);
    return sp_fail(error, status, code, NULL, at - grammar->text,
                   "a grammar with %s, at line %lld, column %lld", what, (long long)line,
                   (long long)column);
}

static void refuse_at(reader *in, const char *at, const char *code, const char *what)
{
    sp_status status = strcmp(code, SP_GRAMMAR_TOO_LARGE) == 0 ? SP_ERR_TOO_LARGE : SP_ERR_INPUT;

    if (in->status == SP_OK)
        in->status = sp_ebnf_refuse(in->grammar, at, status, code, in->error, "%s", what);
}

static void malformed(reader *in, const char *what)
{
    refuse_at(in, in->at, SP_GRAMMAR_MALFORMED, what);
}

static void unsupported(reader *in, const char *what)
{
    refuse_at(in, in->at, SP_GRAMMAR_UNSUPPORTED, what);
}

static void keep_failure(reader *in)
{
    if (in->grammar->tree.failed && in->status == SP_OK)
        in->status = sp_fail_memory(in->error, 0, "a grammar");
}

/* ---- names --------------------------------------------------------------------------------- */

static bool is_letter(char c)
{
    return ((c | 0x20) >= 'a' && (c | 0x20) <= 'z') || (c >= '0' && c <= '9') || c == '_';
}

/* The end of a name; a dot belongs to it where it goes on after that. */
static const char *name_end(const char *at, const char *end)
{
    if (at == end || !is_letter(*at))
        return at;
    while (at < end &&
           (is_letter(*at) || *at == '-' || (*at == '.' && end - at > 1 && is_letter(at[1]))))
        at++;
    return at;
}

static uint32_t cell_of(const sp_ebnf *grammar, const char *name, size_t bytes)
{
    uint32_t at = 2166136261u;

    for (size_t i = 0; i < bytes; i++)
        at = (at ^ (unsigned char)name[i]) * 16777619u;
    for (at %= CELLS; grammar->cells[at] >= 0; at = (at + 1) % CELLS) {
        const sp_ebnf_rule *rule = &grammar->rules[grammar->cells[at]];

        if (rule->name_bytes == bytes && memcmp(rule->name, name, bytes) == 0)
            break;
    }
    return at;
}

int32_t sp_ebnf_find(const sp_ebnf *grammar, const char *name, size_t bytes)
{
    return grammar->cells[cell_of(grammar, name, bytes)];
}

static bool reserve_rule(reader *in)
{
    sp_ebnf *grammar = in->grammar;
    int32_t capacity = grammar->rules_capacity ? grammar->rules_capacity * 2 : 32;
    sp_ebnf_rule *grown;

    if (grammar->n_rules == SP_EBNF_RULES_MAX)
        refuse_at(in, in->at, SP_GRAMMAR_TOO_LARGE, "more than 4096 rules");
    if (in->status != SP_OK || grammar->n_rules < grammar->rules_capacity)
        return in->status == SP_OK;
    grown = sp_realloc(grammar->rules, (size_t)capacity * sizeof *grown);
    if (!grown) {
        in->status = sp_fail_memory(in->error, 0, "a grammar");
        return false;
    }
    grammar->rules = grown;
    grammar->rules_capacity = capacity;
    return true;
}

/* The rule of a name, which is added where it is new; -1 after a failure. */
static int32_t rule_named(reader *in, const char *name, size_t bytes)
{
    sp_ebnf *grammar = in->grammar;
    uint32_t cell = cell_of(grammar, name, bytes);

    if (grammar->cells[cell] >= 0)
        return grammar->cells[cell];
    if (!reserve_rule(in))
        return -1;
    grammar->rules[grammar->n_rules] = (sp_ebnf_rule){name, bytes, -1};
    grammar->cells[cell] = grammar->n_rules;
    return grammar->n_rules++;
}

/* ---- blanks -------------------------------------------------------------------------------- */

static const char *after_blanks(const char *at, const char *end)
{
    bool comment = false;

    for (; at < end; at++) {
        comment = *at == '#' || (comment && *at != '\n');
        if (!comment && *at != ' ' && *at != '\t' && *at != '\n' && *at != '\r')
            break;
    }
    return at;
}

static void skip(reader *in)
{
    in->at = after_blanks(in->at, in->end);
}

/* Whether a name that is next is that of another rule, and not a part of this one. */
static bool at_head(const reader *in)
{
    const char *end = name_end(in->at, in->end);

    if (end == in->at)
        return false;
    end = after_blanks(end, in->end);
    return end < in->end && (*end == ':' || *end == '=');
}

/* ---- characters ---------------------------------------------------------------------------- */

static int32_t read_hex(reader *in, int digits)
{
    int64_t value = 0;

    for (int i = 0; i < digits; i++) {
        int32_t digit = in->at < in->end ? sp_regex_hex_digit(*in->at) : -1;

        if (digit < 0) {
            malformed(in, "an escape that is cut short");
            return 0;
        }
        value = value * 16 + digit;
        in->at++;
    }
    if (value > SP_CODE_POINT_MAX)
        malformed(in, "an escape that is no character");
    return value > SP_CODE_POINT_MAX ? 0 : (int32_t)value;
}

/* After the backslash. */
static int32_t read_escape(reader *in)
{
    static const char letters[] = "nrtbfv", values[] = "\n\r\t\b\f\v";
    char c = in->at < in->end ? *in->at : '\0';
    const char *found = c != '\0' ? strchr(letters, c) : NULL;

    if (found || ((unsigned char)c < 0x80 && c > ' ' && c != '_' && !is_letter(c))) {
        in->at++;
        return found ? values[found - letters] : c;
    }
    if (c == 'x' || c == 'u' || c == 'U') {
        in->at++;
        return read_hex(in, c == 'x' ? 2 : c == 'u' ? 4 : 8);
    }
    if (in->at == in->end)
        malformed(in, "a backslash at its end");
    else
        unsupported(in, "an escape that is not known here");
    return 0;
}

static int32_t read_character(reader *in)
{
    const char *at = in->at;
    int32_t character;

    if (*at == '\\') {
        in->at++;
        return read_escape(in);
    }
    character = sp_regex_code_point(&in->at, in->end);
    if (character < 0)
        refuse_at(in, at, SP_GRAMMAR_MALFORMED, "bytes that are no UTF-8");
    return character < 0 ? 0 : character;
}

/* ---- atoms --------------------------------------------------------------------------------- */

static int32_t read_choice(reader *in);

static int32_t add_node(reader *in, sp_regex_kind kind)
{
    int32_t node = sp_regex_node_add(&in->grammar->tree, kind);

    keep_failure(in);
    return node;
}

static void add_child(reader *in, int32_t parent, int32_t child)
{
    if (in->status == SP_OK)
        sp_regex_child_add(&in->grammar->tree, parent, child);
}

static int32_t add_class(reader *in, int32_t first, bool inverted)
{
    int32_t node = sp_regex_class_add(&in->grammar->tree, first, inverted);

    keep_failure(in);
    return node;
}

/* After the quote. */
static int32_t read_literal(reader *in)
{
    sp_regex_tree *tree = &in->grammar->tree;
    const char *begin = in->at - 1;
    int32_t node = add_node(in, SP_REGEX_SEQUENCE);

    while (in->status == SP_OK && in->at < in->end && *in->at != '"') {
        const char *at = in->at;
        int32_t character = read_character(in), first = tree->n_ranges;

        if (character >= SURROGATE_LOW && character <= SURROGATE_END)
            refuse_at(in, at, SP_GRAMMAR_MALFORMED, "half of a surrogate pair");
        sp_regex_range_add(tree, character, character);
        add_child(in, node, add_class(in, first, false));
    }
    if (in->at == in->end)
        refuse_at(in, begin, SP_GRAMMAR_MALFORMED, "a literal without its end");
    in->at++;
    return node;
}

static void read_class_range(reader *in)
{
    const char *at = in->at;
    int32_t low = read_character(in), high = low;

    if (in->end - in->at > 1 && in->at[0] == '-' && in->at[1] != ']') {
        in->at++;
        high = read_character(in);
        if (high < low)
            refuse_at(in, at, SP_GRAMMAR_MALFORMED, "a range that is in no order");
    }
    sp_regex_range_add(&in->grammar->tree, low, high);
}

/* After "[". */
static int32_t read_class(reader *in)
{
    const char *begin = in->at - 1;
    int32_t first = in->grammar->tree.n_ranges;
    bool inverted = in->at < in->end && *in->at == '^';

    in->at += inverted;
    if (in->at < in->end && *in->at == ']')
        refuse_at(in, begin, SP_GRAMMAR_MALFORMED, "an empty class");
    while (in->status == SP_OK && in->at < in->end && *in->at != ']')
        read_class_range(in);
    if (in->at == in->end)
        refuse_at(in, begin, SP_GRAMMAR_MALFORMED, "a class without its end");
    in->at++;
    return in->status == SP_OK ? add_class(in, first, inverted) : 0;
}

static int32_t any_character(reader *in)
{
    return add_class(in, in->grammar->tree.n_ranges, true);
}

/* After "(". */
static int32_t read_group(reader *in)
{
    const char *begin = in->at - 1;
    int32_t node;

    if (in->at < in->end && (*in->at == '=' || *in->at == '?' || *in->at == '!'))
        refuse_at(in, begin, SP_GRAMMAR_UNSUPPORTED, "look-ahead");
    if (++in->groups > SP_EBNF_GROUPS_MAX)
        refuse_at(in, begin, SP_GRAMMAR_TOO_LARGE, "more than 64 groups in one another");
    node = in->status == SP_OK ? read_choice(in) : 0;
    in->groups--;
    if (in->status == SP_OK && (in->at == in->end || *in->at != ')'))
        refuse_at(in, begin, SP_GRAMMAR_MALFORMED, "a group without its end");
    in->at++;
    return node;
}

/* What some grammars call like functions. */
static bool is_macro(const char *name, size_t bytes)
{
    static const char *const names[] = {"TagDispatch", "TokenTagDispatch", "Token", "ExcludeToken"};

    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strlen(names[i]) == bytes && memcmp(names[i], name, bytes) == 0)
            return true;
    return false;
}

static int32_t read_call(reader *in)
{
    const char *name = in->at;
    int32_t rule, node;

    in->at = name_end(name, in->end);
    if (in->at < in->end && *in->at == '(' && is_macro(name, (size_t)(in->at - name))) {
        refuse_at(in, name, SP_GRAMMAR_UNSUPPORTED, "a call of a macro (TagDispatch, Token)");
        return 0;
    }
    rule = rule_named(in, name, (size_t)(in->at - name));
    node = add_node(in, SP_REGEX_CALL);
    if (in->status == SP_OK)
        in->grammar->tree.nodes[node].first = rule;
    return node;
}

/* What other forms of grammars have. */
static void refuse_sign(reader *in)
{
    switch (*in->at) {
    case '<':
    case '!':
        unsupported(in, "a reference to a token");
        return;
    case '/':
        unsupported(in, "a pattern between slashes, as Lark has it");
        return;
    case '%':
        unsupported(in, "a directive, as Lark has it");
        return;
    case '~':
        unsupported(in, "a repetition by ~, as Lark has it");
        return;
    case '\'':
        unsupported(in, "a literal between single quotes");
        return;
    case '-':
        unsupported(in, "an exception by -");
        return;
    case '*':
    case '+':
    case '?':
    case '{':
        malformed(in, "a repetition of nothing");
        return;
    default:
        malformed(in, "a sign that means nothing here");
    }
}

static int32_t read_atom(reader *in)
{
    if (is_letter(*in->at))
        return read_call(in);
    switch (*in->at) {
    case '"':
        in->at++;
        return read_literal(in);
    case '[':
        in->at++;
        return read_class(in);
    case '(':
        in->at++;
        return read_group(in);
    case '.':
        in->at++;
        return any_character(in);
    default:
        refuse_sign(in);
        return 0;
    }
}

/* ---- expressions --------------------------------------------------------------------------- */

static int32_t read_number(reader *in)
{
    const char *begin;
    int32_t number = 0;

    skip(in);
    begin = in->at;
    while (in->at < in->end && *in->at >= '0' && *in->at <= '9' && number <= SP_REGEX_REPEAT_MAX)
        number = number * 10 + (*in->at++ - '0');
    if (in->at == begin)
        malformed(in, "braces without a number");
    if (number > SP_REGEX_REPEAT_MAX)
        refuse_at(in, begin, SP_GRAMMAR_TOO_LARGE, "a count above 2000");
    skip(in);
    return number;
}

/* After "{". */
static void read_counts(reader *in, int32_t *least, int32_t *most)
{
    const char *begin = in->at - 1;

    *least = *most = read_number(in);
    if (in->at < in->end && *in->at == ',') {
        in->at++;
        skip(in);
        *most = in->at < in->end && *in->at == '}' ? -1 : read_number(in);
    }
    if (in->at == in->end || *in->at != '}')
        malformed(in, "braces that are no count");
    in->at++;
    if (*most >= 0 && *most < *least)
        refuse_at(in, begin, SP_GRAMMAR_MALFORMED, "a count that is in no order");
}

/* The item, with the repetition after it, where one is. */
static int32_t read_repetition(reader *in, int32_t item)
{
    char c = in->at < in->end ? *in->at : '\0';
    int32_t least = c == '+', most = c == '?' ? 1 : -1;

    if (in->status != SP_OK || (c != '*' && c != '+' && c != '?' && c != '{'))
        return item;
    in->at++;
    if (c == '{')
        read_counts(in, &least, &most);
    if (in->status == SP_OK)
        item = sp_regex_repeat_add(&in->grammar->tree, item, least, most);
    keep_failure(in);
    return item;
}

static int32_t read_sequence(reader *in)
{
    int32_t node = add_node(in, SP_REGEX_SEQUENCE);

    skip(in);
    while (in->status == SP_OK && in->at < in->end && *in->at != '|' && *in->at != ')' &&
           !at_head(in)) {
        int32_t item = read_atom(in);

        if (in->status == SP_OK)
            skip(in);
        add_child(in, node, read_repetition(in, item));
        if (in->status == SP_OK)
            skip(in);
    }
    return node;
}

static int32_t read_choice(reader *in)
{
    int32_t node = add_node(in, SP_REGEX_CHOICE);

    add_child(in, node, read_sequence(in));
    while (in->status == SP_OK && in->at < in->end && *in->at == '|') {
        in->at++;
        add_child(in, node, read_sequence(in));
    }
    return node;
}

/* ---- rules --------------------------------------------------------------------------------- */

static void read_assignment(reader *in)
{
    skip(in);
    if (in->end - in->at >= 3 && memcmp(in->at, "::=", 3) == 0)
        in->at += 3;
    else if (in->at < in->end && *in->at == ':' && (in->end - in->at < 2 || in->at[1] != '='))
        unsupported(in, "a rule by \":\", as Lark has it; here it is name ::= ...");
    else
        malformed(in, "a name without \"::=\" after it");
}

static void read_rule(reader *in)
{
    const char *name = in->at;
    int32_t rule, root;

    in->at = name_end(name, in->end);
    if (in->at == name) {
        if (strchr("?!%/", *name) && *name != '\0')
            unsupported(in, "Lark's form; a rule here is name ::= ...");
        else
            malformed(in, *name == ')' ? "a bracket that closes nothing" : "no name of a rule");
        return;
    }
    rule = rule_named(in, name, (size_t)(in->at - name));
    if (in->status == SP_OK && in->grammar->rules[rule].root >= 0)
        refuse_at(in, name, SP_GRAMMAR_MALFORMED, "a rule that is defined twice");
    if (in->status == SP_OK)
        read_assignment(in);
    root = in->status == SP_OK ? read_choice(in) : 0;
    if (in->status != SP_OK)
        return;
    in->grammar->rules[rule] = (sp_ebnf_rule){name, in->grammar->rules[rule].name_bytes, root};
}

static sp_status check_names(const sp_ebnf *grammar, sp_error *error)
{
    for (int32_t i = 0; i < grammar->n_rules; i++) {
        const sp_ebnf_rule *rule = &grammar->rules[i];
        int shown = rule->name_bytes < 60 ? (int)rule->name_bytes : 60;

        if (rule->root >= 0)
            continue;
        return sp_ebnf_refuse(grammar, rule->name, SP_ERR_INPUT, SP_GRAMMAR_MALFORMED, error,
                              "the rule %.*s, which is not defined", shown, rule->name);
    }
    if (sp_ebnf_find(grammar, "root", 4) < 0)
        return sp_ebnf_refuse(grammar, grammar->text, SP_ERR_INPUT, SP_GRAMMAR_MALFORMED, error,
                              "no rule root");
    return SP_OK;
}

sp_status sp_ebnf_read(const char *text, size_t bytes, sp_ebnf *out, sp_error *error)
{
    static const char empty[] = "";
    reader in = {.grammar = out, .error = error};

    text = text ? text : empty;
    *out = (sp_ebnf){.text = text, .bytes = bytes};
    in.at = text;
    in.end = text + bytes;
    out->cells = sp_malloc(CELLS * sizeof *out->cells);
    if (!out->cells)
        return sp_fail_memory(error, CELLS * sizeof *out->cells, "a grammar");
    memset(out->cells, 0xff, CELLS * sizeof *out->cells);
    for (skip(&in); in.status == SP_OK && in.at < in.end;)
        read_rule(&in);
    return in.status == SP_OK ? check_names(out, error) : in.status;
}

void sp_ebnf_free(sp_ebnf *grammar)
{
    sp_regex_tree_free(&grammar->tree);
    sp_free(grammar->rules);
    sp_free(grammar->cells);
    *grammar = (sp_ebnf){0};
}
