/*
 * Tokens to nodes, by recursive descent. Precedence is Jinja's: from loose to tight, inline if, or,
 * and, not, comparisons, + and -, ~, * / // %, **, unary signs, and what follows a value
 * (attributes, calls, filters, tests).
 */
#include "base/alloc.h"
#include "base/text.h"
#include "chat/jinja/builtins.h"
#include "chat/jinja/codes.h"
#include "chat/jinja/node.h"

#include <string.h>

typedef struct {
    sp_template *template;
    const sp_token *tokens;
    size_t at;
    size_t names_capacity;
    int depth;
    int loops;    /* around what is being read */
    int branches; /* of an `if`: what is not known there is refused when it is reached */
    const char *subject;
    sp_error *error;
    sp_status failed;
    sp_node spare; /* written to after a failure, never read */
} parser;

static sp_node *parse_expression(parser *parse);
static sp_node *parse_unary(parser *parse, bool with_filters);
static sp_node *parse_body(parser *parse, const char *const *ends);

/* --- Helpers -------------------------------------------------------------------------------- */

static const sp_token *here(const parser *parse)
{
    return &parse->tokens[parse->at];
}

/* The list ends with SP_LEX_END, which is never passed. */
static void advance(parser *parse)
{
    parse->at += here(parse)->kind != SP_LEX_END;
}

static void fail(parser *parse, bool unsupported, const char *what, const char *name, size_t bytes)
{
    if (parse->failed == SP_OK)
        parse->failed = sp_template_fail(parse->error, unsupported, parse->subject,
                                         here(parse)->line, "%s%.*s", what, (int)bytes, name);
}

static void expected(parser *parse, const char *what)
{
    fail(parse, false, "expected ", what, strlen(what));
}

static void fail_memory(parser *parse)
{
    if (parse->failed == SP_OK)
        parse->failed =
            sp_template_fail_memory(parse->error, &parse->template->arena, parse->subject);
}

/* A node that may be written to after a failure too. */
static sp_node *make(parser *parse, sp_node_kind kind)
{
    sp_node *node = sp_arena_take(&parse->template->arena, 1, sizeof *node);

    if (!node) {
        fail_memory(parse);
        return &parse->spare;
    }
    node->kind = kind;
    node->line = here(parse)->line;
    return node;
}

static sp_node *make_pair(parser *parse, sp_node_kind kind, sp_op op, sp_node *a, sp_node *b)
{
    sp_node *node = make(parse, kind);

    node->op = op;
    node->a = a;
    node->b = b;
    return node;
}

static const sp_str *make_text(parser *parse, const char *data, size_t bytes)
{
    sp_str *text = sp_arena_take(&parse->template->arena, 1, sizeof *text);

    if (!text) {
        fail_memory(parse);
        return &sp_str_empty;
    }
    *text = (sp_str){.data = data, .bytes = bytes, .literal = true};
    return text;
}

static bool is_word(const sp_token *token, const char *word)
{
    return token->kind == SP_LEX_WORD && token->bytes == strlen(word) &&
           memcmp(token->text, word, token->bytes) == 0;
}

static bool is_op(const sp_token *token, sp_op op)
{
    return token->kind == SP_LEX_OP && token->op == op;
}

static bool skip_word(parser *parse, const char *word)
{
    bool found = is_word(here(parse), word);

    parse->at += found;
    return found;
}

static bool skip_op(parser *parse, sp_op op)
{
    bool found = is_op(here(parse), op);

    parse->at += found;
    return found;
}

static void need_op(parser *parse, sp_op op, const char *text)
{
    if (!skip_op(parse, op))
        expected(parse, text);
}

static bool enter(parser *parse)
{
    if (parse->depth >= SP_TEMPLATE_DEPTH_MAX)
        fail(parse, true, "the template nests too deep", "", 0);
    parse->depth++;
    return parse->failed == SP_OK;
}

static int32_t intern(parser *parse, const char *name, size_t bytes)
{
    sp_template *template = parse->template;
    int32_t found = sp_template_name(template, name, bytes);

    if (found >= 0)
        return found;
    if ((size_t) template->n_names == parse->names_capacity) {
        size_t capacity = parse->names_capacity ? parse->names_capacity * 2 : 64;
        const sp_str **names = sp_arena_take(&template->arena, capacity, sizeof *names);

        if (!names) {
            fail_memory(parse);
            return 0;
        }
        if (template->n_names > 0)
            memcpy(names, template->names, (size_t) template->n_names * sizeof *names);
        template->names = names;
        parse->names_capacity = capacity;
    }
    template->names[template->n_names] = make_text(parse, name, bytes);
    return template->n_names++;
}

static sp_node *take_name(parser *parse)
{
    static const char *const refused[] = {"caller", "varargs", "kwargs", "self",   "super",
                                          "cycler", "joiner",  "lipsum", "gettext"};
    const sp_token *token = here(parse);
    sp_node *node = make(parse, SP_NODE_NAME);

    if (token->kind != SP_LEX_WORD) {
        expected(parse, "a name");
        return node;
    }
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++)
        if (is_word(token, refused[i]))
            fail(parse, true, "not supported: ", token->text, token->bytes);
    node->name = intern(parse, token->text, token->bytes);
    advance(parse);
    return node;
}

/* --- Values --------------------------------------------------------------------------------- */

static sp_node *constant(parser *parse, sp_value value)
{
    sp_node *node = make(parse, SP_NODE_CONSTANT);

    node->constant = value;
    return node;
}

/* Strings side by side are one. */
static sp_node *parse_string(parser *parse)
{
    const sp_token *token = here(parse);
    size_t bytes = 0, n = 0;
    char *data;

    for (; token[n].kind == SP_LEX_STRING; n++)
        bytes += token[n].bytes;
    parse->at += n;
    if (n == 1)
        return constant(parse, sp_value_text(make_text(parse, token->text, token->bytes)));
    data = sp_arena_take(&parse->template->arena, bytes + 1, 1);
    if (!data) {
        fail_memory(parse);
        return make(parse, SP_NODE_CONSTANT);
    }
    bytes = 0;
    for (size_t i = 0; i < n; i++) {
        memcpy(data + bytes, token[i].text, token[i].bytes);
        bytes += token[i].bytes;
    }
    return constant(parse, sp_value_text(make_text(parse, data, bytes)));
}

/* Items up to a closing bracket; a comma may follow the last. */
static void parse_items(parser *parse, sp_node **tail, sp_op close, const char *close_text)
{
    while (parse->failed == SP_OK && !skip_op(parse, close)) {
        *tail = parse_expression(parse);
        tail = &(*tail)->next;
        if (skip_op(parse, close))
            return;
        need_op(parse, SP_OP_COMMA, close_text);
    }
}

static sp_node *parse_list(parser *parse)
{
    sp_node *node = make(parse, SP_NODE_LIST);

    parse_items(parse, &node->a, SP_OP_BRACKET_CLOSE, "',' or ']'");
    return node;
}

static sp_node *parse_paren(parser *parse)
{
    sp_node *node, *first;

    if (skip_op(parse, SP_OP_PAREN_CLOSE)) {
        node = make(parse, SP_NODE_LIST);
        node->flag = true;
        return node;
    }
    first = parse_expression(parse);
    if (skip_op(parse, SP_OP_PAREN_CLOSE))
        return first;
    need_op(parse, SP_OP_COMMA, "',' or ')'");
    node = make(parse, SP_NODE_LIST);
    node->flag = true;
    node->a = first;
    parse_items(parse, &first->next, SP_OP_PAREN_CLOSE, "',' or ')'");
    return node;
}

static sp_node *parse_map(parser *parse)
{
    sp_node *node = make(parse, SP_NODE_MAP), **tail = &node->a;

    while (parse->failed == SP_OK && !skip_op(parse, SP_OP_BRACE_CLOSE)) {
        *tail = parse_expression(parse);
        need_op(parse, SP_OP_COLON, "':'");
        (*tail)->next = parse_expression(parse);
        tail = &(*tail)->next->next;
        if (skip_op(parse, SP_OP_BRACE_CLOSE))
            break;
        need_op(parse, SP_OP_COMMA, "',' or '}'");
    }
    return node;
}

static bool word_constant(const sp_token *token, sp_value *out_value)
{
    if (is_word(token, "true") || is_word(token, "True"))
        *out_value = sp_value_bool(true);
    else if (is_word(token, "false") || is_word(token, "False"))
        *out_value = sp_value_bool(false);
    else if (is_word(token, "none") || is_word(token, "None"))
        *out_value = sp_value_none();
    else
        return false;
    return true;
}

static sp_node *parse_primary(parser *parse)
{
    const sp_token *token = here(parse);
    sp_value value;

    switch (token->kind) {
    case SP_LEX_WORD:
        if (!word_constant(token, &value))
            return take_name(parse);
        advance(parse);
        return constant(parse, value);
    case SP_LEX_STRING:
        return parse_string(parse);
    case SP_LEX_NUMBER:
        advance(parse);
        return constant(parse,
                        token->is_real ? sp_value_real(token->real) : sp_value_int(token->integer));
    default:
        if (skip_op(parse, SP_OP_PAREN_OPEN))
            return parse_paren(parse);
        if (skip_op(parse, SP_OP_BRACKET_OPEN))
            return parse_list(parse);
        if (skip_op(parse, SP_OP_BRACE_OPEN))
            return parse_map(parse);
        expected(parse, "an expression");
        return make(parse, SP_NODE_CONSTANT);
    }
}

/* --- What follows a value -------------------------------------------------------------------- */

/* After an opening parenthesis. */
static sp_node *parse_arguments(parser *parse)
{
    sp_node *first = NULL, **tail = &first;

    while (parse->failed == SP_OK && !skip_op(parse, SP_OP_PAREN_CLOSE)) {
        const sp_token *token = here(parse);
        sp_node *argument = make(parse, SP_NODE_ARGUMENT);

        if (is_op(token, SP_OP_MULTIPLY) || is_op(token, SP_OP_POWER))
            fail(parse, true, "unpacked arguments (*)", "", 0);
        if (token->kind == SP_LEX_WORD && is_op(token + 1, SP_OP_ASSIGN)) {
            argument->constant = sp_value_text(make_text(parse, token->text, token->bytes));
            parse->at += 2;
        }
        argument->a = parse_expression(parse);
        *tail = argument;
        tail = &argument->next;
        if (skip_op(parse, SP_OP_PAREN_CLOSE))
            break;
        need_op(parse, SP_OP_COMMA, "',' or ')'");
    }
    return first;
}

static sp_node *parse_attribute(parser *parse, sp_node *object)
{
    const sp_token *token = here(parse);
    sp_node *node = make(parse, SP_NODE_ATTRIBUTE);

    node->a = object;
    if (token->kind == SP_LEX_NUMBER && !token->is_real) {
        node->kind = SP_NODE_ITEM;
        node->b = constant(parse, sp_value_int(token->integer));
    } else if (token->kind == SP_LEX_WORD) {
        node->constant = sp_value_text(make_text(parse, token->text, token->bytes));
    } else {
        expected(parse, "a name behind '.'");
    }
    advance(parse);
    return node;
}

/* One border of a slice, which may be left out. */
static sp_node *slice_border(parser *parse)
{
    if (is_op(here(parse), SP_OP_COLON) || is_op(here(parse), SP_OP_BRACKET_CLOSE))
        return NULL;
    return parse_expression(parse);
}

static sp_node *parse_subscript(parser *parse, sp_node *object)
{
    sp_node *node = make(parse, SP_NODE_ITEM);

    node->a = object;
    node->b = slice_border(parse);
    if (skip_op(parse, SP_OP_COLON)) {
        node->kind = SP_NODE_SLICE;
        node->c = slice_border(parse);
        if (skip_op(parse, SP_OP_COLON))
            node->d = slice_border(parse);
    } else if (!node->b) {
        expected(parse, "an index");
    }
    need_op(parse, SP_OP_BRACKET_CLOSE, "']'");
    return node;
}

static sp_node *parse_postfix(parser *parse, sp_node *node)
{
    while (parse->failed == SP_OK) {
        if (skip_op(parse, SP_OP_DOT)) {
            node = parse_attribute(parse, node);
        } else if (skip_op(parse, SP_OP_BRACKET_OPEN)) {
            node = parse_subscript(parse, node);
        } else if (skip_op(parse, SP_OP_PAREN_OPEN)) {
            sp_node *call = make_pair(parse, SP_NODE_CALL, SP_OP_NONE, node, NULL);

            call->b = parse_arguments(parse);
            node = call;
        } else {
            break;
        }
    }
    return node;
}

/* A filter or test whose name is the next token. As in Jinja, one that is not known is no error
 * until it is reached, if that depends on a condition. */
static void note_unknown(parser *parse, sp_node *node, const char *what)
{
    const sp_token *token = here(parse);

    if (node->which >= 0)
        return;
    if (parse->branches == 0)
        fail(parse, true, what, token->text, token->bytes);
    node->constant = sp_value_text(make_text(parse, token->text, token->bytes));
}

/* After '|'. */
static sp_node *parse_filter(parser *parse, sp_node *operand)
{
    const sp_token *token = here(parse);
    sp_node *node = make_pair(parse, SP_NODE_FILTER, SP_OP_NONE, operand, NULL);

    if (token->kind != SP_LEX_WORD) {
        expected(parse, "the name of a filter");
        return node;
    }
    node->which = sp_filter_find(token->text, token->bytes);
    note_unknown(parse, node, "no such filter: ");
    advance(parse);
    if (skip_op(parse, SP_OP_PAREN_OPEN))
        node->b = parse_arguments(parse);
    return node;
}

/* A test's single argument may be without parentheses: "is divisibleby 3". */
static bool starts_argument(const sp_token *token)
{
    static const sp_op ops[] = {SP_OP_BRACKET_OPEN, SP_OP_BRACE_OPEN};

    if (token->kind == SP_LEX_WORD)
        return !is_word(token, "else") && !is_word(token, "or") && !is_word(token, "and") &&
               !is_word(token, "is") && !is_word(token, "if") && !is_word(token, "in") &&
               !is_word(token, "not");
    return token->kind == SP_LEX_STRING || token->kind == SP_LEX_NUMBER || is_op(token, ops[0]) ||
           is_op(token, ops[1]);
}

/* After "is". */
static sp_node *parse_test(parser *parse, sp_node *operand)
{
    bool negated = skip_word(parse, "not");
    const sp_token *token = here(parse);
    sp_node *node = make_pair(parse, SP_NODE_TEST, SP_OP_NONE, operand, NULL);

    if (token->kind != SP_LEX_WORD) {
        expected(parse, "the name of a test");
        return node;
    }
    node->which = sp_test_find(token->text, token->bytes);
    note_unknown(parse, node, "no such test: ");
    advance(parse);
    if (skip_op(parse, SP_OP_PAREN_OPEN)) {
        node->b = parse_arguments(parse);
    } else if (starts_argument(here(parse))) {
        node->b = make(parse, SP_NODE_ARGUMENT);
        node->b->a = parse_postfix(parse, parse_primary(parse));
    }
    return negated ? make_pair(parse, SP_NODE_NOT, SP_OP_NONE, node, NULL) : node;
}

static sp_node *parse_filters(parser *parse, sp_node *node)
{
    while (parse->failed == SP_OK) {
        if (skip_op(parse, SP_OP_PIPE))
            node = parse_filter(parse, node);
        else if (skip_word(parse, "is"))
            node = parse_test(parse, node);
        else if (skip_op(parse, SP_OP_PAREN_OPEN)) { /* calls what a filter gave */
            node = make_pair(parse, SP_NODE_CALL, SP_OP_NONE, node, NULL);
            node->b = parse_arguments(parse);
        } else {
            break;
        }
    }
    return node;
}

static sp_node *parse_unary(parser *parse, bool with_filters)
{
    sp_node *node;

    if (!enter(parse)) {
        parse->depth--;
        return make(parse, SP_NODE_CONSTANT);
    }
    if (skip_op(parse, SP_OP_SUBTRACT))
        node = make_pair(parse, SP_NODE_NEGATE, SP_OP_NONE, parse_unary(parse, false), NULL);
    else if (skip_op(parse, SP_OP_ADD))
        node = make_pair(parse, SP_NODE_PLUS, SP_OP_NONE, parse_unary(parse, false), NULL);
    else
        node = parse_primary(parse);
    node = parse_postfix(parse, node);
    if (with_filters)
        node = parse_filters(parse, node);
    parse->depth--;
    return node;
}

/* --- Operators -------------------------------------------------------------------------------- */

/* Levels of operators that take two values, loose to tight. */
static const sp_op binary_levels[][5] = {
    {SP_OP_ADD, SP_OP_SUBTRACT},
    {SP_OP_JOIN},
    {SP_OP_MULTIPLY, SP_OP_DIVIDE, SP_OP_FLOOR_DIVIDE, SP_OP_MODULO},
    {SP_OP_POWER},
};
#define N_BINARY_LEVELS (sizeof binary_levels / sizeof *binary_levels)

static bool op_of_level(const sp_token *token, size_t level)
{
    for (size_t i = 0; binary_levels[level][i] != SP_OP_NONE; i++)
        if (is_op(token, binary_levels[level][i]))
            return true;
    return false;
}

static sp_node *parse_binary(parser *parse, size_t level)
{
    sp_node *left;

    if (level == N_BINARY_LEVELS)
        return parse_unary(parse, true);
    left = parse_binary(parse, level + 1);
    while (parse->failed == SP_OK && op_of_level(here(parse), level)) {
        sp_op op = here(parse)->op;

        advance(parse);
        left = make_pair(parse, SP_NODE_BINARY, op, left, parse_binary(parse, level + 1));
    }
    return left;
}

static sp_op take_comparison(parser *parse)
{
    const sp_token *token = here(parse);

    if (token->kind == SP_LEX_OP && token->op >= SP_OP_EQUAL && token->op <= SP_OP_GREATER_EQUAL) {
        advance(parse);
        return token->op;
    }
    if (skip_word(parse, "in"))
        return SP_OP_IN;
    if (is_word(token, "not") && is_word(token + 1, "in")) {
        parse->at += 2;
        return SP_OP_NOT_IN;
    }
    return SP_OP_NONE;
}

static sp_node *parse_compare(parser *parse)
{
    sp_node *first = parse_binary(parse, 0), *node = NULL, **tail = NULL;
    sp_op op;

    while (parse->failed == SP_OK && (op = take_comparison(parse)) != SP_OP_NONE) {
        if (!node) {
            node = make_pair(parse, SP_NODE_COMPARE, SP_OP_NONE, first, NULL);
            tail = &node->b;
        }
        *tail = make_pair(parse, SP_NODE_OPERAND, op, parse_binary(parse, 0), NULL);
        tail = &(*tail)->next;
    }
    return node ? node : first;
}

static sp_node *parse_not(parser *parse)
{
    sp_node *node;

    if (!is_word(here(parse), "not"))
        return parse_compare(parse);
    if (!enter(parse)) {
        parse->depth--;
        return make(parse, SP_NODE_CONSTANT);
    }
    advance(parse);
    node = make_pair(parse, SP_NODE_NOT, SP_OP_NONE, parse_not(parse), NULL);
    parse->depth--;
    return node;
}

static sp_node *parse_and(parser *parse)
{
    sp_node *left = parse_not(parse);

    while (parse->failed == SP_OK && skip_word(parse, "and"))
        left = make_pair(parse, SP_NODE_AND, SP_OP_NONE, left, parse_not(parse));
    return left;
}

static sp_node *parse_or(parser *parse)
{
    sp_node *left = parse_and(parse);

    while (parse->failed == SP_OK && skip_word(parse, "or"))
        left = make_pair(parse, SP_NODE_OR, SP_OP_NONE, left, parse_and(parse));
    return left;
}

static sp_node *parse_expression(parser *parse)
{
    sp_node *node;

    if (!enter(parse)) {
        parse->depth--;
        return make(parse, SP_NODE_CONSTANT);
    }
    node = parse_or(parse);
    while (parse->failed == SP_OK && skip_word(parse, "if")) {
        sp_node *choice = make(parse, SP_NODE_CHOICE);

        choice->b = node;
        choice->a = parse_or(parse);
        if (skip_word(parse, "else"))
            choice->c = parse_expression(parse);
        node = choice;
    }
    parse->depth--;
    return node;
}

/* Expressions with commas between them are a tuple. */
static sp_node *parse_tuple(parser *parse, sp_node *(*one)(parser *parse))
{
    sp_node *first = one(parse), *node, **tail;

    if (!is_op(here(parse), SP_OP_COMMA))
        return first;
    node = make(parse, SP_NODE_LIST);
    node->flag = true;
    node->a = first;
    tail = &first->next;
    while (parse->failed == SP_OK && skip_op(parse, SP_OP_COMMA)) {
        if (here(parse)->kind == SP_LEX_TAG_END || here(parse)->kind == SP_LEX_PRINT_END ||
            is_op(here(parse), SP_OP_ASSIGN))
            break;
        *tail = one(parse);
        tail = &(*tail)->next;
    }
    return node;
}

/* --- Statements ------------------------------------------------------------------------------ */

static void need_tag_end(parser *parse)
{
    if (here(parse)->kind != SP_LEX_TAG_END)
        expected(parse, "the end of the tag");
    advance(parse);
}

/* Reads "{% word %}" after a body that ended there. */
static void need_end(parser *parse, const char *word)
{
    if (!skip_word(parse, word))
        expected(parse, word);
    need_tag_end(parse);
}

static sp_node *parse_if(parser *parse)
{
    static const char *const ends[] = {"elif", "else", "endif", NULL};
    static const char *const last_end[] = {"endif", NULL};
    sp_node *first = make(parse, SP_NODE_IF), *node = first;

    parse->branches++;
    for (;;) {
        node->a = parse_tuple(parse, parse_or);
        need_tag_end(parse);
        node->b = parse_body(parse, ends);
        if (!skip_word(parse, "elif"))
            break;
        node->c = make(parse, SP_NODE_IF);
        node = node->c;
    }
    if (skip_word(parse, "else")) {
        need_tag_end(parse);
        node->c = parse_body(parse, last_end);
    }
    parse->branches--;
    need_end(parse, "endif");
    return first;
}

static sp_node *parse_for(parser *parse)
{
    static const char *const ends[] = {"else", "endfor", NULL};
    static const char *const last_end[] = {"endfor", NULL};
    sp_node *node = make(parse, SP_NODE_FOR);

    node->a = parse_tuple(parse, take_name);
    if (!skip_word(parse, "in"))
        expected(parse, "'in'");
    node->b = parse_tuple(parse, parse_or);
    if (skip_word(parse, "if"))
        node->e = parse_expression(parse);
    if (is_word(here(parse), "recursive"))
        fail(parse, true, "a recursive loop", "", 0);
    need_tag_end(parse);
    parse->loops++;
    node->c = parse_body(parse, ends);
    parse->loops--;
    if (skip_word(parse, "else")) {
        need_tag_end(parse);
        node->d = parse_body(parse, last_end);
    }
    need_end(parse, "endfor");
    return node;
}

/* A name, or an attribute of a namespace. */
static sp_node *parse_target(parser *parse)
{
    sp_node *name = take_name(parse);

    return skip_op(parse, SP_OP_DOT) ? parse_attribute(parse, name) : name;
}

static sp_node *parse_set(parser *parse)
{
    static const char *const ends[] = {"endset", NULL};
    sp_node *node = make(parse, SP_NODE_SET);

    node->a = parse_tuple(parse, parse_target);
    if (skip_op(parse, SP_OP_ASSIGN)) {
        node->b = parse_tuple(parse, parse_expression);
        need_tag_end(parse);
        return node;
    }
    node->kind = SP_NODE_SET_BLOCK;
    if (node->a->kind == SP_NODE_LIST)
        expected(parse, "one name for a block");
    if (is_op(here(parse), SP_OP_PIPE))
        node->c = parse_filters(parse, make(parse, SP_NODE_CAPTURED));
    need_tag_end(parse);
    node->b = parse_body(parse, ends);
    need_end(parse, "endset");
    return node;
}

static void parse_parameters(parser *parse, sp_node **tail)
{
    need_op(parse, SP_OP_PAREN_OPEN, "'('");
    while (parse->failed == SP_OK && !skip_op(parse, SP_OP_PAREN_CLOSE)) {
        sp_node *parameter = take_name(parse);

        if (skip_op(parse, SP_OP_ASSIGN))
            parameter->b = parse_expression(parse);
        *tail = parameter;
        tail = &parameter->next;
        if (skip_op(parse, SP_OP_PAREN_CLOSE))
            break;
        need_op(parse, SP_OP_COMMA, "',' or ')'");
    }
}

static sp_node *parse_macro(parser *parse)
{
    static const char *const ends[] = {"endmacro", NULL};
    sp_node *node = make(parse, SP_NODE_MACRO);
    int loops = parse->loops;

    node->name = take_name(parse)->name;
    parse_parameters(parse, &node->a);
    need_tag_end(parse);
    parse->loops = 0;
    node->b = parse_body(parse, ends);
    parse->loops = loops;
    if (!skip_word(parse, "endmacro"))
        expected(parse, "endmacro");
    if (here(parse)->kind == SP_LEX_WORD) /* the macro's name again */
        advance(parse);
    need_tag_end(parse);
    return node;
}

/* What the answers of a training text are marked with: the body alone. */
static sp_node *parse_generation(parser *parse)
{
    static const char *const ends[] = {"endgeneration", NULL};
    sp_node *node = make(parse, SP_NODE_SCOPE);

    need_tag_end(parse);
    node->a = parse_body(parse, ends);
    need_end(parse, "endgeneration");
    return node;
}

static sp_node *parse_jump(parser *parse, sp_node_kind kind)
{
    sp_node *node = make(parse, kind);

    if (parse->loops == 0)
        expected(parse, "a loop around break or continue");
    need_tag_end(parse);
    return node;
}

static sp_node *parse_tag(parser *parse)
{
    static const char *const known[] = {"block",     "extends", "include",    "import", "from",
                                        "call",      "filter",  "with",       "do",     "trans",
                                        "pluralize", "debug",   "autoescape", NULL};
    const sp_token *token = here(parse);

    if (skip_word(parse, "if"))
        return parse_if(parse);
    if (skip_word(parse, "for"))
        return parse_for(parse);
    if (skip_word(parse, "set"))
        return parse_set(parse);
    if (skip_word(parse, "macro"))
        return parse_macro(parse);
    if (skip_word(parse, "generation"))
        return parse_generation(parse);
    if (skip_word(parse, "break"))
        return parse_jump(parse, SP_NODE_BREAK);
    if (skip_word(parse, "continue"))
        return parse_jump(parse, SP_NODE_CONTINUE);
    for (size_t i = 0; known[i]; i++)
        if (is_word(token, known[i]))
            fail(parse, true, "the tag is not supported: ", token->text, token->bytes);
    if (token->kind == SP_LEX_WORD)
        fail(parse, false, "unexpected tag: ", token->text, token->bytes);
    expected(parse, "the name of a tag");
    return make(parse, SP_NODE_TEXT);
}

static bool at_end(const parser *parse, const char *const *ends)
{
    const sp_token *token = here(parse);

    for (size_t i = 0; ends && token->kind == SP_LEX_TAG_BEGIN && ends[i]; i++)
        if (is_word(token + 1, ends[i]))
            return true;
    return false;
}

static sp_node *parse_statement(parser *parse)
{
    const sp_token *token = here(parse);
    sp_node *node;

    advance(parse);
    switch (token->kind) {
    case SP_LEX_TEXT:
        node = make(parse, SP_NODE_TEXT);
        node->constant = sp_value_text(make_text(parse, token->text, token->bytes));
        return node;
    case SP_LEX_PRINT_BEGIN:
        node = make(parse, SP_NODE_PRINT);
        node->a = parse_tuple(parse, parse_expression);
        if (here(parse)->kind != SP_LEX_PRINT_END)
            expected(parse, "the end of the expression");
        advance(parse);
        return node;
    default:
        return parse_tag(parse);
    }
}

/* Statements up to one of the tags `ends`, whose name is then the next token; NULL: to the end. */
static sp_node *parse_body(parser *parse, const char *const *ends)
{
    sp_node *first = NULL, **tail = &first;

    if (!enter(parse)) {
        parse->depth--;
        return NULL;
    }
    while (parse->failed == SP_OK && !at_end(parse, ends)) {
        if (here(parse)->kind == SP_LEX_END) {
            if (ends)
                expected(parse, ends[0]);
            break;
        }
        *tail = parse_statement(parse);
        tail = &(*tail)->next;
    }
    if (ends && parse->failed == SP_OK)
        advance(parse); /* "{%" */
    parse->depth--;
    return first;
}

/* --- All of it -------------------------------------------------------------------------------- */

int32_t sp_template_name(const sp_template *template, const char *name, size_t bytes)
{
    for (int32_t i = 0; i < template->n_names; i++)
        if (sp_str_equal(template->names[i], name, bytes))
            return i;
    return -1;
}

static sp_status check_source(const char *source, size_t bytes, const char *subject,
                              sp_error *error)
{
    if (bytes > SP_TEMPLATE_BYTES_MAX)
        return sp_fail(error, SP_ERR_TOO_LARGE, SP_CHAT_LIMIT, subject, -1,
                       "%s has %zu bytes; at most %zu", subject, bytes, SP_TEMPLATE_BYTES_MAX);
    if (!sp_utf8_valid(source, bytes) || (bytes > 0 && memchr(source, '\0', bytes)))
        return sp_fail(error, SP_ERR_INPUT, SP_CHAT_MALFORMED, subject, -1,
                       "%s is not UTF-8, or has a NUL in it", subject);
    return SP_OK;
}

sp_status sp_template_parse(const char *source, size_t bytes, const char *subject,
                            sp_template *out_template, sp_error *error)
{
    sp_template *template = out_template;
    parser parse = {.template = template, .subject = subject, .error = error};
    sp_token_list list;
    char *copy;
    sp_status status = check_source(source, bytes, subject, error);

    *template = (sp_template){0};
    if (status != SP_OK)
        return status;
    sp_arena_start(&template->arena, 256 * SP_TEMPLATE_BYTES_MAX);
    copy = sp_arena_take(&template->arena, bytes + 1, 1);
    if (!copy) {
        status = sp_template_fail_memory(error, &template->arena, subject);
    } else {
        memcpy(copy, source, bytes);
        status = sp_template_lex(&template->arena, copy, bytes, subject, &list, error);
    }
    if (status == SP_OK) {
        parse.tokens = list.tokens;
        template->body = parse_body(&parse, NULL);
        template->loop_name = intern(&parse, "loop", 4);
        status = parse.failed;
    }
    if (status != SP_OK)
        sp_template_free(template);
    return status;
}

void sp_template_free(sp_template *template)
{
    sp_arena_free(&template->arena);
    *template = (sp_template){0};
}
