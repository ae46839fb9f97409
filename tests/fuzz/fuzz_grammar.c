/*
 * Schemas, patterns and text grammars: any text gives a grammar within its limits, or an error with
 * a code that is printable text; and a grammar never leads to a place where nothing can follow. The
 * first byte says what the rest is: letters, a text grammar.
 */
#include "fuzz/target.h"

#include "base/alloc.h"
#include "base/text.h"
#include "grammar/compile.h"

#include <string.h>

enum { IDS = 256, WORDS = IDS / 32, TOKENS_MAX = 48 };

static const char *byte_of(void *user, int32_t id, size_t *out_bytes)
{
    char *bytes = user;

    bytes[0] = (char)id;
    *out_bytes = 1;
    return bytes;
}

/* One output: at each step the id that `turn` reaches among those that are allowed. */
static void draw(sp_grammar *grammar, size_t turn)
{
    int32_t tokens[TOKENS_MAX];
    sp_grammar_place place = {0};

    for (int32_t n = 0; n < TOKENS_MAX; n++) {
        uint32_t mask[WORDS];
        sp_grammar_next next;
        int32_t allowed[IDS], n_allowed = 0;

        FUZZ_CHECK(sp_grammar_follow(grammar, &place, tokens, n, mask, &next, NULL) == SP_OK);
        for (int32_t id = 0; id < IDS; id++)
            if (mask[id / 32] >> (id % 32) & 1)
                allowed[n_allowed++] = id;
        FUZZ_CHECK(next.goes_on == (n_allowed > 0));
        FUZZ_CHECK(next.complete || n_allowed > 0);
        if (n_allowed == 0)
            return;
        turn = turn * 2654435761u + (size_t)n;
        tokens[n] = allowed[turn % (size_t)n_allowed];
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    size_t before = sp_alloc_bytes();
    sp_grammar_source source = {0};
    sp_vocabulary *vocabulary;
    sp_grammar *grammar = NULL;
    sp_error error;
    char buffer[1];

    if (bytes == 0)
        return 0;
    source.kind = data[0] >= 'A' ? SP_GRAMMAR_EBNF : (sp_grammar_kind)(data[0] % 5);
    source.thought = (sp_grammar_thought)(data[0] / 5 % 3);
    source.text = (const char *)data + 1;
    source.bytes = bytes - 1;
    FUZZ_CHECK(sp_vocabulary_create(IDS, byte_of, buffer, &vocabulary, NULL) == SP_OK);
    if (sp_grammar_compile(vocabulary, &source, &grammar, &error) == SP_OK) {
        for (size_t turn = 1; turn <= 2; turn++)
            draw(grammar, turn);
    } else {
        FUZZ_CHECK(error.code != NULL && error.text[0] != '\0');
        FUZZ_CHECK(sp_utf8_valid(error.text, strlen(error.text)));
    }
    sp_grammar_release(grammar);
    sp_vocabulary_destroy(vocabulary);
    FUZZ_CHECK(sp_alloc_bytes() == before);
    return 0;
}
