/*
 * tokenizer_split.h: the pre-tokenizer. It splits a text into pieces; merges never cross a border.
 * Three hand-written scanners implement three families of regular expressions; their oracle in the
 * tests is a real regex engine. All pure; any thread.
 */
#ifndef SP_ENGINE_TOKENIZER_TOKENIZER_SPLIT_H
#define SP_ENGINE_TOKENIZER_TOKENIZER_SPLIT_H

#include <stdbool.h>
#include <stddef.h>

typedef enum sp_split_family {
    SP_SPLIT_WORDS, /* contractions, words with the character before them: Qwen, Llama 3 */
    SP_SPLIT_CASES, /* words are split where the case rises: Mistral's tekken */
    SP_SPLIT_BLANKS /* the split of ByteLevel itself (use_regex): GPT-2, SmolLM2 */
} sp_split_family;

typedef struct sp_split {
    const char *name;
    const char *pattern; /* exactly as in the file; of SP_SPLIT_BLANKS, the equivalent of
                            ByteLevel, alone or after Digits */
    sp_split_family family;
    unsigned digits_max; /* numbers in one piece */
    bool marks_in_words; /* combining marks count as letters inside a word */
} sp_split;

extern const sp_split sp_splits[]; /* ends with a NULL name */

/* The split of this pattern, or NULL. */
const sp_split *sp_split_find(const char *pattern);
/* The split of ByteLevel with use_regex, after Digits (individual_digits) or alone. */
const sp_split *sp_split_byte_level(bool after_digits);

/* Bytes of the first piece of a UTF-8 text of bytes >= 1. */
size_t sp_split_next(const sp_split *split, const char *text, size_t bytes);

#endif
