/*
 * regex_tree.h: a regular expression as a tree. Numbers instead of pointers: a node's children
 * are a list by `next`. A pattern is one tree; the rules of a text grammar share one.
 */
#ifndef SP_GRAMMAR_REGEX_TREE_H
#define SP_GRAMMAR_REGEX_TREE_H

#include <sidepath/status.h>

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define SP_CODE_POINT_MAX 0x10ffff

typedef enum sp_regex_kind {
    SP_REGEX_CLASS,    /* one character of ranges [first, first + n) */
    SP_REGEX_SEQUENCE, /* its children, one after another; none: the empty text */
    SP_REGEX_CHOICE,   /* one of its children, which are sequences */
    SP_REGEX_REPEAT,   /* its only child, from `least` to `most` times; most -1: any number */
    SP_REGEX_CALL      /* the rule `first` of a network; in no pattern */
} sp_regex_kind;

typedef struct sp_regex_node {
    sp_regex_kind kind;
    int32_t first, n;          /* of a class; of a call, `first` */
    int32_t child, last, next; /* -1: none */
    int32_t least, most;
    bool from_start, to_end; /* a sequence of the outermost choice: it had `^`, `$` */
} sp_regex_node;

typedef struct sp_code_range {
    int32_t low, high;
} sp_code_range;

typedef struct sp_regex_tree {
    sp_regex_node *nodes;  /* owned; node `root` is a choice */
    sp_code_range *ranges; /* owned */
    int32_t n_nodes, nodes_capacity, n_ranges, ranges_capacity;
    int32_t root;
    bool failed; /* out of memory: what is added from then on is not there */
} sp_regex_tree;

/* Ranges of a class are in order, apart from each other, and without surrogates. Errors as
 * sp_regex_add; *out_tree is the caller's to free in any case. */
sp_status sp_regex_tree_read(const char *pattern, size_t bytes, sp_regex_tree *out_tree,
                             sp_error *error);
void sp_regex_tree_free(sp_regex_tree *tree); /* zeros are allowed */

/* ---- for readers of other forms -------------------------------------------------------------- */

int32_t sp_regex_node_add(sp_regex_tree *tree, sp_regex_kind kind); /* 0 after a failure */
void sp_regex_child_add(sp_regex_tree *tree, int32_t parent, int32_t child);
int32_t sp_regex_repeat_add(sp_regex_tree *tree, int32_t item, int32_t least, int32_t most);
void sp_regex_range_add(sp_regex_tree *tree, int32_t low, int32_t high);
/* A class of the ranges that were added since there were `first`, or of all other characters. */
int32_t sp_regex_class_add(sp_regex_tree *tree, int32_t first, bool inverted);
/* The code point at *at, which is before `end`, and moves past it; -1: no UTF-8. */
int32_t sp_regex_code_point(const char **at, const char *end);
/* The value of a digit; -1: it is none. */
int32_t sp_regex_hex_digit(char c);

#endif
