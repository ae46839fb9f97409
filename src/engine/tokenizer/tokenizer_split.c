#include "engine/tokenizer/tokenizer_split.h"

#include "engine/tokenizer/unicode_class.h"

#include <limits.h>
#include <stdint.h>
#include <string.h>

/*
 * The alternatives of the words family, in the order in which a regex engine tries them:
 *
 *   1  an apostrophe and s, t, re, ve, m, ll or d in any case
 *   2  at most one character other than a letter, number or newline, then letters
 *   3  numbers
 *   4  at most one blank, then characters other than letters, numbers and spaces, then newlines
 *   5  spaces up to the last newline of their run
 *   6  spaces that no other character follows: a run gives its last one to the next piece
 *   7  spaces
 *
 * The cases family has no 1, and two forms of 2 (see cased_word); newlines and slashes end 4. The
 * blanks family has 1 in lower case, a blank as the only character before letters or numbers, no
 * newlines in 4 and no 5. There, a number that Digits cut off ends a run of spaces as the end of
 * the text does, so that the whole run is one piece.
 */
const sp_split sp_splits[] = {
    {"qwen2",
     "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}"
     "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+",
     SP_SPLIT_WORDS, 1, false},
    {"qwen3.5",
     "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?[\\p{L}\\p{M}]+|\\p{N}"
     "| ?[^\\s\\p{L}\\p{M}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+",
     SP_SPLIT_WORDS, 1, true},
    {"llama3",
     "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}"
     "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+",
     SP_SPLIT_WORDS, 3, false},
    {"tekken",
     "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]*[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]+"
     "|[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]+[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]*"
     "|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+",
     SP_SPLIT_CASES, 1, false},
    {"gpt2", "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+",
     SP_SPLIT_BLANKS, UINT_MAX, false},
    {"smollm2",
     "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+|\\s+(?![^\\s\\p{N}])|\\s+",
     SP_SPLIT_BLANKS, 1, false},
    {NULL, NULL, SP_SPLIT_WORDS, 0, false},
};

const sp_split *sp_split_byte_level(bool after_digits)
{
    const sp_split *split = sp_splits;

    while (split->family != SP_SPLIT_BLANKS || (split->digits_max == 1) != after_digits)
        split++;
    return split;
}

const sp_split *sp_split_find(const char *pattern)
{
    for (const sp_split *split = sp_splits; split->name; split++)
        if (strcmp(split->pattern, pattern) == 0)
            return split;
    return NULL;
}

typedef struct {
    const unsigned char *text;
    size_t bytes;
    unsigned word;   /* flags of a word's characters */
    unsigned other;  /* flags that no character of alternative 4 has */
    bool newlines;   /* they end alternative 4, and there is a 5 */
    bool slashes;    /* so do slashes */
    bool digits_end; /* a number ends a run of spaces as the end of the text does */
} scanner;

/* The character at `at`; flags and length are 0 after the end. */
static size_t look(const scanner *scan, size_t at, uint32_t *out_code, unsigned *out_flags)
{
    size_t length;

    *out_code = 0;
    *out_flags = 0;
    if (at >= scan->bytes)
        return 0;
    length = sp_utf8_read(scan->text + at, out_code);
    *out_flags = sp_unicode_class(*out_code);
    return length;
}

static bool is_newline(uint32_t code)
{
    return code == '\r' || code == '\n';
}

/* End of the run of characters that have one of `flags`, from `at` on. */
static size_t run_with(const scanner *scan, size_t at, unsigned flags, size_t n_max)
{
    uint32_t code;
    unsigned found;

    for (size_t n = 0; n < n_max; n++) {
        size_t length = look(scan, at, &code, &found);

        if (!(found & flags))
            break;
        at += length;
    }
    return at;
}

/* A letter of ASCII, in lower case where case does not matter. U+017F, the long s, folds to s, and
 * is two bytes long. */
static size_t fold(const scanner *scan, size_t at, bool any_case, char *out_letter)
{
    const unsigned char *text = scan->text + at;

    if (at >= scan->bytes)
        return 0;
    *out_letter = (char)text[0];
    if (!any_case)
        return text[0] < 0x80 ? 1 : 0;
    if (text[0] == 0xc5 && text[1] == 0xbf) {
        *out_letter = 's';
        return 2;
    }
    *out_letter = (char)(text[0] >= 'A' && text[0] <= 'Z' ? text[0] + 32 : text[0]);
    return text[0] < 0x80 ? 1 : 0;
}

/* Alternative 1 after an apostrophe: its end, or 0. */
static size_t contraction(const scanner *scan, bool any_case)
{
    char first = 0, second = 0;
    size_t n = fold(scan, 1, any_case, &first);
    size_t m = n ? fold(scan, 1 + n, any_case, &second) : 0;

    if (first == 's' || first == 't' || first == 'm' || first == 'd')
        return 1 + n;
    if (m && ((first == 'r' && second == 'e') || (first == 'v' && second == 'e') ||
              (first == 'l' && second == 'l')))
        return 1 + n + m;
    return 0;
}

/* Alternatives 5 to 7, for a run of spaces from the start. */
static size_t spaces(const scanner *scan)
{
    size_t at = 0, last = 0, newline_end = 0;
    uint32_t code;
    unsigned flags;

    for (;;) {
        size_t length = look(scan, at, &code, &flags);

        if (!(flags & SP_UNICODE_SPACE))
            break;
        last = at;
        at += length;
        if (is_newline(code))
            newline_end = at;
    }
    if (newline_end && scan->newlines)
        return newline_end;
    if (at == scan->bytes || (scan->digits_end && (flags & SP_UNICODE_NUMBER)))
        return at;
    return last == 0 ? at : last;
}

/* Alternative 4 from `at` on, at a character of it. */
static size_t others(const scanner *scan, size_t at)
{
    uint32_t code;
    unsigned flags;
    size_t length;

    while ((length = look(scan, at, &code, &flags)) != 0 && !(flags & scan->other))
        at += length;
    while (scan->newlines && at < scan->bytes &&
           (is_newline(scan->text[at]) || (scan->slashes && scan->text[at] == '/')))
        at++;
    return at;
}

/* --- The families ------------------------------------------------------------------------ */

static size_t next_word(const sp_split *split, const scanner *scan)
{
    uint32_t code, next_code;
    unsigned flags, next_flags;
    size_t length = look(scan, 0, &code, &flags), end;

    if (flags & scan->word)
        return run_with(scan, length, scan->word, SIZE_MAX);
    if (flags & SP_UNICODE_NUMBER)
        return run_with(scan, length, SP_UNICODE_NUMBER, split->digits_max - 1);
    if (code == '\'' && (end = contraction(scan, true)) != 0)
        return end;
    look(scan, length, &next_code, &next_flags);
    if (!is_newline(code) && (next_flags & scan->word))
        return run_with(scan, length, scan->word, SIZE_MAX);
    if (!(flags & SP_UNICODE_SPACE))
        return others(scan, 0);
    if (code == ' ' && length < scan->bytes && !(next_flags & scan->other))
        return others(scan, length);
    return spaces(scan);
}

/*
 * A word from `at` on, or 0: letters above lower case, then at least one below upper case. Letters
 * without case, and marks, are both. What a regex engine finds by backtracking: where no lower case
 * follows the first run, its last letter that is both ends the word. *out_upper is where the run
 * ends, `at` for none.
 */
static size_t cased_word(const scanner *scan, size_t at, size_t *out_upper)
{
    size_t both_end = 0;
    uint32_t code;
    unsigned flags;

    for (;;) {
        size_t length = look(scan, at, &code, &flags);

        if (!(flags & (SP_UNICODE_LETTER | SP_UNICODE_MARK)) || (flags & SP_UNICODE_LOWER))
            break;
        at += length;
        if (!(flags & SP_UNICODE_UPPER))
            both_end = at;
    }
    *out_upper = at;
    if (!(flags & SP_UNICODE_LOWER))
        return both_end;
    for (;;) {
        size_t length = look(scan, at, &code, &flags);

        if (!(flags & (SP_UNICODE_LETTER | SP_UNICODE_MARK)) || (flags & SP_UNICODE_UPPER))
            return at;
        at += length;
    }
}

/* A number is one piece, and no newline begins a word. */
static size_t next_cased(const scanner *scan)
{
    uint32_t code, next_code;
    unsigned flags, next_flags;
    size_t length = look(scan, 0, &code, &flags), end, upper = 0, own_upper = 0;
    bool may_precede = !(flags & (SP_UNICODE_LETTER | SP_UNICODE_NUMBER)) && !is_newline(code);

    if (flags & SP_UNICODE_NUMBER)
        return length;
    if (may_precede && (end = cased_word(scan, length, &upper)) != 0)
        return end;
    if ((flags & (SP_UNICODE_LETTER | SP_UNICODE_MARK)) &&
        (end = cased_word(scan, 0, &own_upper)) != 0)
        return end;
    if (may_precede && upper > length)
        return upper;
    if (own_upper > 0)
        return own_upper;
    if (!(flags & SP_UNICODE_SPACE))
        return others(scan, 0);
    look(scan, length, &next_code, &next_flags);
    if (code == ' ' && length < scan->bytes && !(next_flags & scan->other))
        return others(scan, length);
    return spaces(scan);
}

static size_t next_blank(const sp_split *split, const scanner *scan)
{
    uint32_t code;
    unsigned flags;
    size_t length = look(scan, 0, &code, &flags), begin = 0, end;

    if (code == '\'' && (end = contraction(scan, false)) != 0)
        return end;
    if (code == ' ') { /* one blank may precede a word */
        begin = length;
        length = look(scan, begin, &code, &flags);
    }
    if (flags & SP_UNICODE_LETTER)
        return run_with(scan, begin, SP_UNICODE_LETTER, SIZE_MAX);
    if ((flags & SP_UNICODE_NUMBER) && (begin == 0 || !scan->digits_end))
        return run_with(scan, begin, SP_UNICODE_NUMBER, split->digits_max);
    if (length > 0 && !(flags & scan->other))
        return others(scan, begin);
    return spaces(scan);
}

size_t sp_split_next(const sp_split *split, const char *text, size_t bytes)
{
    const unsigned word = SP_UNICODE_LETTER | (split->marks_in_words ? SP_UNICODE_MARK : 0u);
    const bool blanks = split->family == SP_SPLIT_BLANKS;
    const scanner scan = {.text = (const unsigned char *)text,
                          .bytes = bytes,
                          .word = word,
                          .other = word | SP_UNICODE_NUMBER | SP_UNICODE_SPACE,
                          .newlines = !blanks,
                          .slashes = split->family == SP_SPLIT_CASES,
                          .digits_end = blanks && split->digits_max == 1};

    switch (split->family) {
    case SP_SPLIT_CASES:
        return next_cased(&scan);
    case SP_SPLIT_BLANKS:
        return next_blank(split, &scan);
    case SP_SPLIT_WORDS:
        break;
    }
    return next_word(split, &scan);
}
