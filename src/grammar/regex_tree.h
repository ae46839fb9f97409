/*
 * regex_tree.h: a regular expression as a tree. Numbers instead of pointers: a node's children
 * are a list by `next`.
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
    SP_REGEX_REPEAT    /* its only child, from `least` to `most` times; most -1: any number */
} sp_regex_kind;

typedef struct sp_regex_node {
    sp_regex_kind kind;
    int32_t first, n;          /* of a class */
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
} sp_regex_tree;

/* Ranges of a class are in order, apart from each other, and without surrogates. Errors as
 * sp_regex_add; *out_tree is the caller's to free in any case. */
sp_status sp_regex_tree_read(const char *pattern, size_t bytes, sp_regex_tree *out_tree,
                             sp_error *error);
void sp_regex_tree_free(sp_regex_tree *tree); /* zeros are allowed */

#endif
