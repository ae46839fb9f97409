#include "support/grammar_world.h"

#include <string.h>

static const char *bytes_of(void *user, int32_t id, size_t *out_bytes)
{
    const sp_tokenizer *tokenizer = user;

    *out_bytes = 0;
    return sp_tokenizer_is_special(tokenizer, id)
               ? NULL
               : sp_tokenizer_token_bytes(tokenizer, id, out_bytes);
}

void grammar_world_open(grammar_world *world)
{
    sp_error error;

    assert_ok(sp_tokenizer_open(SP_TEST_FIXTURES "/tokenizer512", &world->tokenizer, &error),
              &error);
    assert_int_equal(sp_tokenizer_n_ids(world->tokenizer), WORLD_IDS);
    assert_ok(
        sp_vocabulary_create(WORLD_IDS, bytes_of, world->tokenizer, &world->vocabulary, &error),
        &error);
    assert_int_equal(sp_vocabulary_words(world->vocabulary), WORLD_WORDS);
}

void grammar_world_close(grammar_world *world)
{
    sp_vocabulary_destroy(world->vocabulary);
    sp_tokenizer_close(world->tokenizer);
}

sp_status grammar_world_try(const grammar_world *world, sp_grammar_kind kind, const char *text,
                            sp_grammar **out_grammar, sp_error *error)
{
    const sp_grammar_source source = {.kind = kind, .text = text, .bytes = text ? strlen(text) : 0};

    return sp_grammar_compile(world->vocabulary, &source, out_grammar, error);
}

sp_grammar *grammar_world_compile(const grammar_world *world, sp_grammar_kind kind,
                                  const char *text)
{
    sp_grammar *grammar = NULL;
    sp_error error = {0};

    if (grammar_world_try(world, kind, text, &grammar, &error) != SP_OK)
        fail_msg("%.300s: %s", text, error.text);
    return grammar;
}

static int32_t draw_token(const uint32_t *mask, sp_test_random *random)
{
    uint32_t n = 0, at;

    for (int32_t id = 0; id < WORLD_IDS; id++)
        n += world_allows(mask, id);
    if (n == 0)
        return -1;
    at = sp_test_below(random, n);
    for (int32_t id = 0; id < WORLD_IDS; id++)
        if (world_allows(mask, id) && at-- == 0)
            return id;
    return -1;
}

bool grammar_world_draw(const grammar_world *world, sp_grammar *grammar, sp_test_random *random,
                        int32_t *tokens, int32_t tokens_max, int32_t *out_n, sp_text *out_text)
{
    sp_grammar_place place = {0};
    int32_t n = 0;
    bool complete = false;

    for (; n < tokens_max; n++) {
        uint32_t mask[WORLD_WORDS];
        sp_grammar_next next;
        sp_error error;
        size_t bytes;
        const char *text;

        assert_ok(sp_grammar_follow(grammar, &place, tokens, n, mask, &next, &error), &error);
        complete = next.complete;
        if (complete && (!next.goes_on || sp_test_below(random, 4) == 0))
            break;
        tokens[n] = draw_token(mask, random);
        assert_true(tokens[n] >= 0); /* a grammar never leads where nothing can follow */
        text = sp_tokenizer_token_bytes(world->tokenizer, tokens[n], &bytes);
        sp_text_add_bytes(out_text, text, bytes);
        complete = false;
    }
    *out_n = n;
    return complete;
}
