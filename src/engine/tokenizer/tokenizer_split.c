#include "engine/tokenizer/tokenizer_split.h"

#include "engine/tokenizer/unicode_class.h"

#include <string.h>

/*
 * The alternatives of every pattern, in the order in which a regex engine tries them:
 *
 *   1  an apostrophe and s, t, re, ve, m, ll or d in any case
 *   2  at most one character that is no letter, number or newline, then letters
 *   3  numbers
 *   4  at most one blank, then characters that are no letter, number or space, then newlines
 *   5  spaces up to the last newline of their run
 *   6  spaces that no other character follows: a run gives its last one to the next piece
 *   7  spaces
 */
const sp_split sp_splits[] = {
    {"qwen2",
     "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}"
     "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+",
     1, false},
    {"qwen3.5",
     "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?[\\p{L}\\p{M}]+|\\p{N}"
     "| ?[^\\s\\p{L}\\p{M}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+",
     1, true},
    {"three digits",
     "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}"
     "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+",
     3, false},
    {NULL, NULL, 0, false},
};

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
    unsigned word;  /* flags of a word's characters */
    unsigned other; /* flags that no character of alternative 4 has */
} scanner;

/* The character at `at`; flags and length 0 behind the end. */
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

/* A letter of ASCII in lower case. U+017F, the long s, folds to s, and is two bytes long. */
static size_t fold(const scanner *scan, size_t at, char *out_letter)
{
    const unsigned char *text = scan->text + at;

    if (at >= scan->bytes)
        return 0;
    if (text[0] == 0xc5 && text[1] == 0xbf) {
        *out_letter = 's';
        return 2;
    }
    *out_letter = (char)(text[0] >= 'A' && text[0] <= 'Z' ? text[0] + 32 : text[0]);
    return text[0] < 0x80 ? 1 : 0;
}

/* Alternative 1 behind an apostrophe: its end, or 0. */
static size_t contraction(const scanner *scan)
{
    char first = 0, second = 0;
    size_t n = fold(scan, 1, &first);
    size_t m = n ? fold(scan, 1 + n, &second) : 0;

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
    if (newline_end)
        return newline_end;
    return at == scan->bytes || last == 0 ? at : last;
}

/* Alternative 4 from `at` on, where a character of it stands. */
static size_t others(const scanner *scan, size_t at)
{
    uint32_t code;
    unsigned flags;
    size_t length;

    while ((length = look(scan, at, &code, &flags)) != 0 && !(flags & scan->other))
        at += length;
    while (at < scan->bytes && is_newline(scan->text[at]))
        at++;
    return at;
}

size_t sp_split_next(const sp_split *split, const char *text, size_t bytes)
{
    unsigned word = SP_UNICODE_LETTER | (split->marks_in_words ? SP_UNICODE_MARK : 0u);
    scanner scan = {(const unsigned char *)text, bytes, word,
                    word | SP_UNICODE_NUMBER | SP_UNICODE_SPACE};
    uint32_t code, next_code;
    unsigned flags, next_flags;
    size_t length = look(&scan, 0, &code, &flags), end;

    if (flags & word)
        return run_with(&scan, length, word, SIZE_MAX);
    if (flags & SP_UNICODE_NUMBER)
        return run_with(&scan, length, SP_UNICODE_NUMBER, split->digits_max - 1);
    if (code == '\'' && (end = contraction(&scan)) != 0)
        return end;
    look(&scan, length, &next_code, &next_flags);
    if (!is_newline(code) && (next_flags & word))
        return run_with(&scan, length, word, SIZE_MAX);
    if (!(flags & SP_UNICODE_SPACE))
        return others(&scan, 0);
    if (code == ' ' && length < bytes && !(next_flags & scan.other))
        return others(&scan, length);
    return spaces(&scan);
}
