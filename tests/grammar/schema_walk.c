/*
 * schema_walk.c: reads lines {"schema": ..} or {"grammar": text} and writes for each a line:
 * {"outputs": [texts]} with outputs drawn from the grammar that ended by themselves, {"n_cut": N}
 * of those that did not; with "texts" in the line, {"has": [bool]} as well: whether each is in the
 * grammar, and {"left_out"}: whether it had more alternatives than are kept; or {"code": ..,
 * "text": ..} of a refusal. schema_walk OUTPUTS TOKENS_MAX SEED
 */
#include "support/grammar_world.h"

#include "base/json.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static json_t *draw(const grammar_world *world, sp_grammar *grammar, sp_test_random *random,
                    int n_outputs, int32_t tokens_max)
{
    json_t *outputs = json_array();
    int32_t *tokens = calloc((size_t)tokens_max + 1, sizeof *tokens), n, n_cut = 0;

    for (int i = 0; i < n_outputs; i++) {
        sp_text text = {0};

        if (grammar_world_draw(world, grammar, random, tokens, tokens_max, &n, &text))
            json_array_append_new(outputs, json_stringn(text.data ? text.data : "", text.bytes));
        else
            n_cut++;
        sp_text_free(&text);
    }
    free(tokens);
    return json_pack("{s:o, s:i}", "outputs", outputs, "n_cut", n_cut);
}

static json_t *ask(sp_grammar *grammar, const json_t *texts)
{
    json_t *has = json_array();

    for (size_t i = 0; i < json_array_size(texts); i++) {
        const json_t *text = json_array_get(texts, i);

        json_array_append_new(has, json_boolean(sp_grammar_has(grammar, json_string_value(text),
                                                               json_string_length(text))));
    }
    return has;
}

static json_t *answer(const grammar_world *world, const json_t *line, sp_test_random *random,
                      int n_outputs, int32_t tokens_max)
{
    const char *rules = json_string_value(json_object_get(line, "grammar"));
    char *schema = json_dumps(json_object_get(line, "schema"), JSON_ENCODE_ANY | JSON_COMPACT);
    sp_grammar *grammar;
    sp_error error;
    json_t *made;

    if (grammar_world_try(world, rules ? SP_GRAMMAR_EBNF : SP_GRAMMAR_JSON_SCHEMA,
                          rules ? rules : schema, &grammar, &error) != SP_OK) {
        made = json_pack("{s:s, s:s}", "code", error.code, "text", error.text);
    } else {
        made = draw(world, grammar, random, n_outputs, tokens_max);
        json_object_set_new(made, "has", ask(grammar, json_object_get(line, "texts")));
        json_object_set_new(made, "left_out", json_boolean(sp_grammar_left_out(grammar)));
        sp_grammar_release(grammar);
    }
    free(schema);
    return made;
}

int main(int argc, char **argv)
{
    static char buffer[1 << 20];
    sp_test_random random;
    grammar_world world;

    if (argc != 4)
        return 2;
    random.state = strtoull(argv[3], NULL, 10);
    grammar_world_open(&world);
    while (fgets(buffer, sizeof buffer, stdin)) {
        json_t *line = json_loads(buffer, 0, NULL);
        json_t *made = answer(&world, line, &random, (int)strtol(argv[1], NULL, 10),
                              (int32_t)strtol(argv[2], NULL, 10));

        json_dumpf(made, stdout, JSON_COMPACT);
        putchar('\n');
        json_decref(made);
        json_decref(line);
    }
    grammar_world_close(&world);
    return 0;
}
