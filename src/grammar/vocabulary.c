#include "grammar/vocabulary.h"

#include "base/alloc.h"
#include "base/error.h"

#include <stdlib.h>
#include <string.h>

typedef struct token {
    const char *bytes;
    uint32_t n;
    int32_t id;
} token;

/* ---- bytes --------------------------------------------------------------------------------- */

static sp_status copy_bytes(sp_vocabulary *vocabulary, sp_token_bytes_fn bytes_of, void *user)
{
    size_t total = 0, n;

    for (int32_t id = 0; id < vocabulary->n_ids; id++) {
        bytes_of(user, id, &n);
        total += n <= SP_VOCABULARY_TOKEN_BYTES_MAX ? n : 0;
    }
    vocabulary->offsets = sp_calloc((size_t)vocabulary->n_ids + 1, sizeof *vocabulary->offsets);
    vocabulary->bytes = sp_malloc(total + 1);
    if (!vocabulary->offsets || !vocabulary->bytes)
        return SP_ERR_MEMORY;
    total = 0;
    for (int32_t id = 0; id < vocabulary->n_ids; id++) {
        const char *bytes = bytes_of(user, id, &n);

        vocabulary->offsets[id] = (uint32_t)total;
        if (n == 0 || n > SP_VOCABULARY_TOKEN_BYTES_MAX)
            continue;
        memcpy(vocabulary->bytes + total, bytes, n);
        total += n;
        vocabulary->n_tokens++;
    }
    vocabulary->offsets[vocabulary->n_ids] = (uint32_t)total;
    return SP_OK;
}

static int by_bytes(const void *left, const void *right)
{
    const token *a = left, *b = right;
    int order = memcmp(a->bytes, b->bytes, a->n < b->n ? a->n : b->n);

    if (order == 0 && a->n != b->n)
        order = a->n < b->n ? -1 : 1;
    return order != 0 ? order : (a->id > b->id) - (a->id < b->id);
}

static token *sorted_tokens(const sp_vocabulary *vocabulary)
{
    token *tokens = sp_calloc((size_t)vocabulary->n_tokens + 1, sizeof *tokens);
    int32_t n = 0;

    for (int32_t id = 0; tokens && id < vocabulary->n_ids; id++) {
        uint32_t begin = vocabulary->offsets[id], end = vocabulary->offsets[id + 1];

        if (end > begin)
            tokens[n++] = (token){vocabulary->bytes + begin, end - begin, id};
    }
    if (tokens)
        qsort(tokens, (size_t)n, sizeof *tokens, by_bytes);
    return tokens;
}

/* ---- the tree ------------------------------------------------------------------------------ */

/* Bytes that a token shares with the one before it: those have their nodes already. */
static uint32_t shared(const token *tokens, int32_t i)
{
    uint32_t n = 0;

    if (i == 0)
        return 0;
    while (n < tokens[i].n && n < tokens[i - 1].n && tokens[i].bytes[n] == tokens[i - 1].bytes[n])
        n++;
    return n;
}

static int32_t count_nodes(const token *tokens, int32_t n)
{
    int64_t nodes = 0;

    for (int32_t i = 0; i < n; i++)
        nodes += tokens[i].n - shared(tokens, i);
    return nodes < INT32_MAX - 1 ? (int32_t)nodes : -1;
}

/* Tokens come sorted, so the nodes come in the order of the walk. */
static void fill(sp_vocabulary *vocabulary, const token *tokens)
{
    int32_t open[SP_VOCABULARY_TOKEN_BYTES_MAX], n = 0;
    uint32_t n_open = 0;

    for (int32_t i = 0; i < vocabulary->n_tokens; i++) {
        uint32_t common = shared(tokens, i);

        while (n_open > common)
            vocabulary->nodes[open[--n_open]].end = n;
        for (uint32_t at = common; at < tokens[i].n; at++) {
            vocabulary->nodes[n] = (sp_vocabulary_node){
                .first_id = i, .depth = (uint16_t)at, .byte = (uint8_t)tokens[i].bytes[at]};
            open[n_open++] = n++;
        }
        vocabulary->ids[i] = tokens[i].id;
    }
    while (n_open > 0)
        vocabulary->nodes[open[--n_open]].end = n;
    vocabulary->nodes[n] = (sp_vocabulary_node){.first_id = vocabulary->n_tokens};
}

static sp_status build(sp_vocabulary *vocabulary)
{
    token *tokens = sorted_tokens(vocabulary);

    if (!tokens)
        return SP_ERR_MEMORY;
    vocabulary->n_nodes = count_nodes(tokens, vocabulary->n_tokens);
    if (vocabulary->n_nodes >= 0) {
        vocabulary->nodes = sp_calloc((size_t)vocabulary->n_nodes + 1, sizeof *vocabulary->nodes);
        vocabulary->ids = sp_calloc((size_t)vocabulary->n_tokens + 1, sizeof *vocabulary->ids);
    }
    if (vocabulary->nodes && vocabulary->ids)
        fill(vocabulary, tokens);
    sp_free(tokens);
    return vocabulary->nodes && vocabulary->ids ? SP_OK : SP_ERR_MEMORY;
}

sp_status sp_vocabulary_create(int32_t n_ids, sp_token_bytes_fn bytes_of, void *user,
                               sp_vocabulary **out_vocabulary, sp_error *error)
{
    sp_vocabulary *vocabulary = sp_calloc(1, sizeof *vocabulary);
    sp_status status;

    if (!vocabulary)
        return sp_fail_memory(error, sizeof *vocabulary, "a vocabulary");
    vocabulary->n_ids = n_ids;
    status = copy_bytes(vocabulary, bytes_of, user);
    if (status == SP_OK)
        status = build(vocabulary);
    if (status != SP_OK) {
        sp_vocabulary_destroy(vocabulary);
        return sp_fail_memory(error, (size_t)n_ids * sizeof(token), "a vocabulary");
    }
    *out_vocabulary = vocabulary;
    return SP_OK;
}

void sp_vocabulary_destroy(sp_vocabulary *vocabulary)
{
    if (!vocabulary)
        return;
    sp_free(vocabulary->nodes);
    sp_free(vocabulary->ids);
    sp_free(vocabulary->offsets);
    sp_free(vocabulary->bytes);
    sp_free(vocabulary);
}
