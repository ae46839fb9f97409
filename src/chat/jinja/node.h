/*
 * node.h: a parsed template. Shared by lexer.c, parser.c and the files that run it.
 *
 * A template is a list of statements; statements and expressions are nodes of one struct, whose
 * fields a..d mean what the list of kinds says. All of it lives in one arena and never changes.
 */
#ifndef SP_CHAT_JINJA_NODE_H
#define SP_CHAT_JINJA_NODE_H

#include "base/error.h"
#include "chat/jinja/arena.h"
#include "chat/jinja/value.h"

#include <stdint.h>

/* Limits of a template; the largest known ones have 15 KB and nest 12 deep. */
#define SP_TEMPLATE_BYTES_MAX ((size_t)1 << 20)
#define SP_TEMPLATE_DEPTH_MAX 100

typedef enum sp_node_kind {
    /* statements, chained by `next` */
    SP_NODE_TEXT,      /* constant */
    SP_NODE_PRINT,     /* a: expression */
    SP_NODE_IF,        /* a: condition; b: body; c: else */
    SP_NODE_FOR,       /* a: target; b: iterable; c: body; d: else; e: condition or NULL */
    SP_NODE_SET,       /* a: target; b: expression */
    SP_NODE_SET_BLOCK, /* a: target; b: body; c: filters around SP_NODE_CAPTURED, or NULL */
    SP_NODE_SCOPE,     /* a: body, whose variables end with it */
    SP_NODE_MACRO,     /* name; a: parameters (SP_NODE_NAME, b: default); b: body */
    SP_NODE_BREAK,
    SP_NODE_CONTINUE,
    /* expressions */
    SP_NODE_CONSTANT,  /* constant */
    SP_NODE_CAPTURED,  /* the text of the block that is being set */
    SP_NODE_NAME,      /* name */
    SP_NODE_LIST,      /* a: items; flag: a tuple */
    SP_NODE_MAP,       /* a: key, value, key, value .. */
    SP_NODE_ATTRIBUTE, /* a: object; constant: its name */
    SP_NODE_ITEM,      /* a: object; b: index */
    SP_NODE_SLICE,     /* a: object; b, c, d: begin, end, step or NULL */
    SP_NODE_CALL,      /* a: callee; b: arguments */
    SP_NODE_ARGUMENT,  /* a: value; constant: keyword, or undefined */
    SP_NODE_FILTER,    /* a: operand; which; b: arguments */
    SP_NODE_TEST,      /* a: operand; which; b: arguments */
    SP_NODE_NOT,       /* a */
    SP_NODE_NEGATE,    /* a */
    SP_NODE_PLUS,      /* a, unary */
    SP_NODE_AND,       /* a, b */
    SP_NODE_OR,        /* a, b */
    SP_NODE_CHOICE,    /* a: condition; b: then; c: else or NULL */
    SP_NODE_BINARY,    /* a, b; op */
    SP_NODE_COMPARE,   /* a: first; b: SP_NODE_OPERAND .. */
    SP_NODE_OPERAND,   /* a; op */
} sp_node_kind;

typedef enum sp_op {
    SP_OP_NONE,
    SP_OP_ADD,
    SP_OP_SUBTRACT,
    SP_OP_MULTIPLY,
    SP_OP_DIVIDE,
    SP_OP_FLOOR_DIVIDE,
    SP_OP_MODULO,
    SP_OP_POWER,
    SP_OP_JOIN, /* ~ */
    SP_OP_EQUAL,
    SP_OP_UNEQUAL,
    SP_OP_LESS,
    SP_OP_LESS_EQUAL,
    SP_OP_GREATER,
    SP_OP_GREATER_EQUAL,
    SP_OP_IN,
    SP_OP_NOT_IN,
    /* of the lexer only */
    SP_OP_DOT,
    SP_OP_COMMA,
    SP_OP_COLON,
    SP_OP_PIPE,
    SP_OP_ASSIGN,
    SP_OP_PAREN_OPEN,
    SP_OP_PAREN_CLOSE,
    SP_OP_BRACKET_OPEN,
    SP_OP_BRACKET_CLOSE,
    SP_OP_BRACE_OPEN,
    SP_OP_BRACE_CLOSE,
} sp_op;

struct sp_node {
    sp_node_kind kind;
    int32_t line;
    int32_t name;  /* index of a variable's name */
    int32_t which; /* index of a filter or test */
    sp_op op;
    bool flag;
    sp_node *a, *b, *c, *d, *e, *next;
    sp_value constant;
};

typedef struct sp_template {
    sp_arena arena;
    sp_node *body;
    const sp_str **names; /* [n_names] of all variables */
    int32_t n_names;
    int32_t loop_name; /* of "loop" */
} sp_template;

/*
 * `source` is copied. SP_ERR_INPUT (SP_CHAT_MALFORMED), SP_ERR_UNSUPPORTED (SP_CHAT_UNSUPPORTED):
 * position is the line, the text names the construct. On failure everything is released.
 */
sp_status sp_template_parse(const char *source, size_t bytes, const char *subject,
                            sp_template *out_template, sp_error *error);
/* Frees the template and all its nodes. A zeroed one is allowed. */
void sp_template_free(sp_template *template);

/* The index of a variable's name, or -1 when the template never says it. */
int32_t sp_template_name(const sp_template *template, const char *name, size_t bytes);

/* --- lexer.c ---------------------------------------------------------------------- */

typedef enum sp_token_kind {
    SP_LEX_END,
    SP_LEX_TEXT, /* outside of tags */
    SP_LEX_PRINT_BEGIN,
    SP_LEX_PRINT_END,
    SP_LEX_TAG_BEGIN,
    SP_LEX_TAG_END,
    SP_LEX_WORD,
    SP_LEX_STRING, /* text: with its escapes resolved */
    SP_LEX_NUMBER, /* integer, or real with `is_real` */
    SP_LEX_OP,
} sp_token_kind;

typedef struct sp_token {
    sp_token_kind kind;
    sp_op op;
    int32_t line;
    bool is_real;
    const char *text;
    size_t bytes;
    int64_t integer;
    double real;
} sp_token;

typedef struct sp_token_list {
    sp_token *tokens;
    size_t n;
} sp_token_list;

/* `source` is in the arena, NUL-terminated, and is changed: newlines become \n. */
sp_status sp_template_lex(sp_arena *arena, char *source, size_t bytes, const char *subject,
                          sp_token_list *out_list, sp_error *error);

/* Fills *error for a line of a template. */
sp_status sp_template_fail(sp_error *error, bool unsupported, const char *subject, int32_t line,
                           const char *format, ...) SP_PRINTF(5, 6);
sp_status sp_template_fail_memory(sp_error *error, const sp_arena *arena, const char *subject);

#endif
