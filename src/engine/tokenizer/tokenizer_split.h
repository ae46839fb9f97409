/*
 * tokenizer_split.h: the pre-tokenizer. A text falls into pieces, and merges never cross a border.
 * One hand-written scanner stands for a small family of regular expressions; its oracle in the
 * tests is a real regex engine.
 */
#ifndef SP_ENGINE_TOKENIZER_TOKENIZER_SPLIT_H
#define SP_ENGINE_TOKENIZER_TOKENIZER_SPLIT_H

#include <stdbool.h>
#include <stddef.h>

typedef struct sp_split {
    const char *name;
    const char *pattern; /* exactly as it stands in the file */
    unsigned digits_max; /* numbers in one piece */
    bool marks_in_words; /* combining marks count as letters inside a word */
} sp_split;

extern const sp_split sp_splits[]; /* ends with a NULL name */

/* The split of this pattern, or NULL. */
const sp_split *sp_split_find(const char *pattern);

/* Bytes of the first piece of a UTF-8 text of bytes >= 1. */
size_t sp_split_next(const sp_split *split, const char *text, size_t bytes);

#endif
