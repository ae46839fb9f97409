#include "server/logprob_text.h"

#include <string.h>

static void add_token(sp_text *out, const sp_engine *engine, int32_t token)
{
    size_t bytes;
    const char *text = sp_engine_token_bytes(engine, token, &bytes);

    sp_text_json_string(out, text ? text : "", bytes);
}

/* Characters, each broken byte counted as one. */
static int64_t count_characters(const sp_engine *engine, int32_t token)
{
    size_t bytes;
    const char *text = sp_engine_token_bytes(engine, token, &bytes);
    int64_t n = 0;

    for (size_t at = 0; at < bytes; n++) {
        size_t step = sp_utf8_sequence_bytes(text + at, bytes - at);

        at += step ? step : 1;
    }
    return n;
}

/* ---- completions --------------------------------------------------------------------------- */

static bool same_text(const sp_engine *engine, int32_t a, int32_t b)
{
    size_t a_bytes, b_bytes;
    const char *a_text = sp_engine_token_bytes(engine, a, &a_bytes);
    const char *b_text = sp_engine_token_bytes(engine, b, &b_bytes);

    return a_bytes == b_bytes && (a_bytes == 0 || memcmp(a_text, b_text, a_bytes) == 0);
}

/* Bytes that are no characters all look alike in an object's keys: the best of them stays. */
static bool is_repeated(const sp_engine *engine, const sp_logprob *top, int32_t index)
{
    size_t bytes;
    const char *text = sp_engine_token_bytes(engine, top[index].token, &bytes);
    bool broken = !sp_utf8_valid(text ? text : "", bytes);

    for (int32_t i = 0; i < index; i++) {
        size_t other_bytes;
        const char *other = sp_engine_token_bytes(engine, top[i].token, &other_bytes);

        if (same_text(engine, top[i].token, top[index].token) ||
            (broken && !sp_utf8_valid(other ? other : "", other_bytes)))
            return true;
    }
    return false;
}

static void add_pair(sp_text *out, const sp_engine *engine, int32_t token, float logprob,
                     bool first)
{
    sp_text_add(out, first ? "" : ", ");
    add_token(out, engine, token);
    sp_text_add(out, ": ");
    sp_text_json_double(out, (double)logprob);
}

static void add_top(sp_text *out, const sp_engine *engine, const sp_produced *produced)
{
    const sp_logprob *top = sp_produced_top(produced);
    bool has_own = false, first = true;

    sp_text_add(out, "{");
    for (int32_t i = 0; i < produced->n_top; i++) {
        if (is_repeated(engine, top, i))
            continue;
        add_pair(out, engine, top[i].token, top[i].logprob, first);
        has_own |= same_text(engine, top[i].token, produced->token);
        first = false;
    }
    if (!has_own)
        add_pair(out, engine, produced->token, produced->logprob, first);
    sp_text_add(out, "}");
}

void sp_logprob_lists_add(sp_logprob_lists *lists, const sp_engine *engine,
                          const sp_produced *produced, bool unknown)
{
    const char *separator = lists->n++ > 0 ? ", " : "";

    sp_text_add(&lists->tokens, separator);
    add_token(&lists->tokens, engine, produced->token);
    sp_text_add(&lists->values, separator);
    sp_text_add(&lists->tops, separator);
    if (unknown) {
        sp_text_add(&lists->values, "null");
        sp_text_add(&lists->tops, "null");
    } else {
        sp_text_json_double(&lists->values, (double)produced->logprob);
        add_top(&lists->tops, engine, produced);
    }
    sp_text_format(&lists->offsets, "%s%lld", separator, (long long)lists->offset);
    lists->offset += count_characters(engine, produced->token);
}

static void add_list(sp_text *out, const char *before, sp_text *list)
{
    sp_text_add(out, before);
    sp_text_add_bytes(out, list->data ? list->data : "", list->bytes);
    out->failed |= list->failed;
    sp_text_clear(list);
}

void sp_logprob_lists_write(sp_logprob_lists *lists, sp_text *out)
{
    if (lists->n == 0) {
        sp_text_add(out, "null");
        return;
    }
    add_list(out, "{\"tokens\": [", &lists->tokens);
    add_list(out, "], \"token_logprobs\": [", &lists->values);
    add_list(out, "], \"top_logprobs\": [", &lists->tops);
    add_list(out, "], \"text_offset\": [", &lists->offsets);
    sp_text_add(out, "]}");
    lists->n = 0;
}

void sp_logprob_lists_free(sp_logprob_lists *lists)
{
    sp_text_free(&lists->tokens);
    sp_text_free(&lists->values);
    sp_text_free(&lists->tops);
    sp_text_free(&lists->offsets);
}

/* ---- chat ---------------------------------------------------------------------------------- */

static void add_chat_token(sp_text *out, const sp_engine *engine, int32_t token, float logprob)
{
    size_t bytes;
    const char *text = sp_engine_token_bytes(engine, token, &bytes);

    sp_text_add(out, "{\"token\": ");
    add_token(out, engine, token);
    sp_text_add(out, ", \"logprob\": ");
    sp_text_json_double(out, (double)logprob);
    sp_text_add(out, ", \"bytes\": [");
    for (size_t i = 0; i < bytes; i++)
        sp_text_format(out, i ? ", %u" : "%u", (unsigned)(unsigned char)text[i]);
    sp_text_add(out, "]");
}

void sp_logprob_chat_add(sp_text *out, const sp_engine *engine, const sp_produced *produced)
{
    const sp_logprob *top = sp_produced_top(produced);

    add_chat_token(out, engine, produced->token, produced->logprob);
    sp_text_add(out, ", \"top_logprobs\": [");
    for (int32_t i = 0; i < produced->n_top; i++) {
        sp_text_add(out, i ? ", " : "");
        add_chat_token(out, engine, top[i].token, top[i].logprob);
        sp_text_add(out, "}");
    }
    sp_text_add(out, "]}");
}
