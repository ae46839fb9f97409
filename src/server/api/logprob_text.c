#include "server/api/logprob_text.h"

#include <string.h>

static void add_token(sp_text *out, const sp_engine *engine, int32_t token)
{
    size_t bytes;
    const char *text = sp_engine_token_bytes(engine, token, &bytes);

    sp_text_json_string(out, text ? text : "", bytes);
}

int64_t sp_count_characters(const char *text, size_t bytes)
{
    int64_t n = 0;

    for (size_t i = 0; i < bytes; i++)
        n += ((unsigned char)text[i] & 0xc0) != 0x80; /* not the rest of one */
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

/* Bytes that are no characters all look alike in JSON. */
static bool looks_alike(const sp_engine *engine, int32_t a, int32_t b)
{
    size_t a_bytes, b_bytes;
    const char *a_text = sp_engine_token_bytes(engine, a, &a_bytes);
    const char *b_text = sp_engine_token_bytes(engine, b, &b_bytes);

    return same_text(engine, a, b) || (!sp_utf8_valid(a_text ? a_text : "", a_bytes) &&
                                       !sp_utf8_valid(b_text ? b_text : "", b_bytes));
}

/* Whether the text of top[index] is the key of another member: of the token itself, or of a better
 * one. */
static bool is_taken(const sp_engine *engine, const sp_produced *produced, int32_t index)
{
    const sp_logprob *top = sp_produced_top(produced);
    int32_t token = top[index].token;

    if (token == produced->token)
        return false;
    if (looks_alike(engine, token, produced->token))
        return true;
    for (int32_t i = 0; i < index; i++)
        if (looks_alike(engine, token, top[i].token))
            return true;
    return false;
}

static void add_pair(sp_text *out, const sp_engine *engine, sp_logprob pair, bool by_id, bool first)
{
    sp_text_add(out, first ? "" : ", ");
    if (by_id)
        sp_text_format(out, "\"token_id:%d\"", pair.token);
    else
        add_token(out, engine, pair.token);
    sp_text_add(out, ": ");
    sp_text_json_double(out, (double)pair.logprob);
}

static void add_top(sp_text *out, const sp_engine *engine, const sp_produced *produced)
{
    const sp_logprob *top = sp_produced_top(produced);
    const sp_logprob own = {produced->token, produced->logprob};
    bool has_own = false;

    sp_text_add(out, "{");
    for (int32_t i = 0; i < produced->n_top; i++) {
        add_pair(out, engine, top[i], is_taken(engine, produced, i), i == 0);
        has_own |= top[i].token == own.token;
    }
    if (!has_own)
        add_pair(out, engine, own, false, produced->n_top == 0);
    sp_text_add(out, "}");
}

void sp_logprob_lists_add(sp_logprob_lists *lists, const sp_engine *engine,
                          const sp_produced *produced, bool unknown, bool hidden)
{
    const char *separator = lists->n++ > 0 ? ", " : "";
    size_t bytes;
    const char *text = sp_engine_token_bytes(engine, produced->token, &bytes);

    sp_text_add(&lists->tokens, separator);
    add_token(&lists->tokens, engine, produced->token);
    sp_text_add(&lists->values, separator);
    sp_text_add(&lists->tops, separator);
    sp_text_add(&lists->processed, separator);
    if (unknown) {
        sp_text_add(&lists->values, "null");
        sp_text_add(&lists->processed, "null");
        sp_text_add(&lists->tops, "null");
    } else {
        sp_text_json_double(&lists->values, (double)produced->logprob);
        sp_text_json_double(&lists->processed, (double)produced->processed_logprob);
        add_top(&lists->tops, engine, produced);
    }
    sp_text_add_bytes(&lists->offsets, (const char *)&lists->offset, sizeof lists->offset);
    if (!hidden)
        lists->offset += sp_count_characters(text, bytes);
}

static void add_offsets(sp_logprob_lists *lists, int64_t most, sp_text *out)
{
    sp_text_add(out, "], \"text_offset\": [");
    for (size_t at = 0; at < lists->offsets.bytes; at += sizeof(int64_t)) {
        int64_t offset;

        memcpy(&offset, lists->offsets.data + at, sizeof offset);
        sp_text_format(out, at ? ", %lld" : "%lld", (long long)(offset < most ? offset : most));
    }
    out->failed |= lists->offsets.failed;
    sp_text_clear(&lists->offsets);
}

static void add_list(sp_text *out, const char *before, sp_text *list)
{
    sp_text_add(out, before);
    sp_text_add_bytes(out, list->data ? list->data : "", list->bytes);
    out->failed |= list->failed;
    sp_text_clear(list);
}

void sp_logprob_lists_write(sp_logprob_lists *lists, int64_t characters, sp_text *out)
{
    if (lists->n == 0) {
        sp_text_add(out, "null");
        return;
    }
    add_list(out, "{\"tokens\": [", &lists->tokens);
    add_list(out, "], \"token_logprobs\": [", &lists->values);
    if (lists->with_processed)
        add_list(out, "], \"processed_logprobs\": [", &lists->processed);
    sp_text_clear(&lists->processed);
    add_list(out, "], \"top_logprobs\": [", &lists->tops);
    add_offsets(lists, characters, out);
    sp_text_add(out, "]}");
    lists->n = 0;
}

size_t sp_logprob_lists_bytes(const sp_logprob_lists *lists)
{
    return lists->tokens.capacity + lists->values.capacity + lists->tops.capacity +
           lists->processed.capacity + lists->offsets.capacity;
}

void sp_logprob_lists_free(sp_logprob_lists *lists)
{
    sp_text_free(&lists->tokens);
    sp_text_free(&lists->values);
    sp_text_free(&lists->tops);
    sp_text_free(&lists->processed);
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

void sp_logprob_chat_add(sp_text *out, const sp_engine *engine, const sp_produced *produced,
                         bool with_processed)
{
    const sp_logprob *top = sp_produced_top(produced);

    add_chat_token(out, engine, produced->token, produced->logprob);
    if (with_processed) {
        sp_text_add(out, ", \"processed_logprob\": ");
        sp_text_json_double(out, (double)produced->processed_logprob);
    }
    sp_text_add(out, ", \"top_logprobs\": [");
    for (int32_t i = 0; i < produced->n_top; i++) {
        sp_text_add(out, i ? ", " : "");
        add_chat_token(out, engine, top[i].token, top[i].logprob);
        sp_text_add(out, "}");
    }
    sp_text_add(out, "]}");
}
