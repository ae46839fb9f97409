/*
 * grammar.c: masks. The mask of a state is that of its stacks over a hole, which is the same
 * wherever a rule is called and made once, and what the tokens that leave the hole's rule may go on
 * with, which is found by a walk below the few places of the vocabulary where they do.
 */
#include "grammar/grammar.h"

#include "base/alloc.h"
#include "base/error.h"
#include "grammar/states.h"

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

#define WIDE_BYTES   80 /* more than can go on a character of several */
#define PREPARED_MAX 32

struct sp_grammar {
    sp_net net;
    const sp_vocabulary *vocabulary; /* borrowed */
    size_t words;
    atomic_int references;
    pthread_mutex_t lock; /* of what follows */
    sp_states states;
    uint32_t *scratch; /* [words] */
    uint64_t epoch;    /* rises whenever the states are forgotten; begins with 1 */
};

/* ---- walks --------------------------------------------------------------------------------- */

static void allow(const sp_vocabulary *vocabulary, int32_t node, uint32_t *bits)
{
    const int32_t end = vocabulary->nodes[node + 1].first_id;

    for (int32_t i = vocabulary->nodes[node].first_id; i < end; i++) {
        uint32_t id = (uint32_t)vocabulary->ids[i];

        bits[id / 32] |= 1u << (id % 32);
    }
}

/* Notes a place where tokens go on with what is in the hole. */
static bool add_leave(sp_states *states, sp_state_mask *mask, int32_t node)
{
    if (mask->n_leaves == mask->leaves_capacity) {
        int32_t capacity = mask->leaves_capacity ? mask->leaves_capacity * 2 : 16;
        int32_t *grown = sp_realloc(mask->leaves, (size_t)capacity * sizeof *grown);

        if (!grown) {
            states->failed = true;
            return false;
        }
        states->bytes += (size_t)(capacity - mask->leaves_capacity) * sizeof *grown;
        mask->leaves = grown;
        mask->leaves_capacity = capacity;
    }
    mask->leaves[mask->n_leaves++] = node;
    return true;
}

/*
 * Allows every token of nodes [begin, end) that can be read from `state`; they are what is below a
 * node of depth - 1, or all. With `mask`, the places where the hole is reached are noted.
 */
static void walk(sp_grammar *grammar, int32_t state, int32_t begin, int32_t end, uint32_t *bits,
                 sp_state_mask *mask)
{
    const sp_vocabulary *vocabulary = grammar->vocabulary;
    sp_states *states = &grammar->states;
    int32_t path[SP_VOCABULARY_TOKEN_BYTES_MAX + 1];
    int32_t base = begin < end ? vocabulary->nodes[begin].depth : 0;

    path[0] = state;
    for (int32_t i = begin; i < end && !states->failed;) {
        const sp_vocabulary_node *node = &vocabulary->nodes[i];
        int32_t depth = node->depth - base;
        int32_t next = sp_states_next(states, path[depth], node->byte);

        if (next == SP_STATE_NONE) {
            i = node->end;
            continue;
        }
        allow(vocabulary, i, bits);
        if (mask && states->states[next].hole && node->end > i + 1 && !add_leave(states, mask, i))
            return;
        path[depth + 1] = next;
        i++;
    }
}

static int32_t count_bits(const uint32_t *bits, size_t words)
{
    int32_t n = 0;

    for (size_t i = 0; i < words; i++)
        n += __builtin_popcount(bits[i]);
    return n;
}

/* Keeps the bits in the shorter of two ways. */
static bool keep_bits(sp_grammar *grammar, const uint32_t *bits, sp_state_mask *mask)
{
    size_t n = (size_t)count_bits(bits, grammar->words), at = 0;
    bool few = n < grammar->words;
    void *kept = sp_malloc((few ? n + 1 : grammar->words) * sizeof *bits);

    if (!kept) {
        grammar->states.failed = true;
        return false;
    }
    grammar->states.bytes += (few ? n + 1 : grammar->words) * sizeof *bits;
    if (!few) {
        mask->bits = memcpy(kept, bits, grammar->words * sizeof *bits);
        return true;
    }
    mask->few = kept;
    mask->n_few = (int32_t)n;
    for (size_t i = 0; at < n; i++)
        for (uint32_t rest = bits[i]; rest != 0; rest &= rest - 1)
            mask->few[at++] = (int32_t)(32 * i) + __builtin_ctz(rest);
    return true;
}

/* The tokens that a state over a hole allows; they are kept. */
static bool make_mask(sp_grammar *grammar, int32_t state)
{
    sp_states *states = &grammar->states;
    sp_state_mask mask = {.made = true};

    memset(grammar->scratch, 0, grammar->words * sizeof *grammar->scratch);
    walk(grammar, state, 0, grammar->vocabulary->n_nodes, grammar->scratch, &mask);
    if (states->failed || !keep_bits(grammar, grammar->scratch, &mask)) {
        sp_free(mask.leaves);
        return false;
    }
    states->states[state].mask = mask;
    return true;
}

static void copy_mask(const sp_grammar *grammar, const sp_state_mask *mask, uint32_t *bits)
{
    if (mask->bits) {
        memcpy(bits, mask->bits, grammar->words * sizeof *bits);
        return;
    }
    memset(bits, 0, grammar->words * sizeof *bits);
    for (int32_t i = 0; i < mask->n_few; i++)
        bits[mask->few[i] / 32] |= 1u << (mask->few[i] % 32);
}

static void fill_mask(sp_grammar *grammar, int32_t state, uint32_t *bits)
{
    sp_states *states = &grammar->states;
    int32_t inner = sp_states_inner(states, state), outside;

    if (states->failed || (!states->states[inner].mask.made && !make_mask(grammar, inner)))
        return;
    copy_mask(grammar, &states->states[inner].mask, bits);
    if (inner == state || states->states[inner].mask.n_leaves == 0)
        return;
    outside = sp_states_of_stack(states, states->states[state].below);
    for (int32_t i = 0; i < states->states[inner].mask.n_leaves; i++) {
        int32_t node = states->states[inner].mask.leaves[i];

        if (outside != SP_STATE_NONE)
            walk(grammar, outside, node + 1, grammar->vocabulary->nodes[node].end, bits, NULL);
    }
}

/* Whether so many bytes can follow that making its mask takes time. */
static bool is_wide(const sp_net *net, const sp_net_node *node)
{
    int n = 0;

    for (int32_t i = 0; i < node->n_edges; i++) {
        const sp_net_edge *edge = &net->edges[node->first_edge + i];

        n += edge->rule == SP_NET_BYTES ? edge->high - edge->low + 1 : 0;
    }
    return n >= WIDE_BYTES;
}

/* Makes the masks that take the longest before anybody waits for one: inside of strings. */
static void prepare(sp_grammar *grammar)
{
    sp_states *states = &grammar->states;
    int32_t n = 0;

    for (int32_t i = 0; i < grammar->net.n_nodes && n < PREPARED_MAX && !states->failed; i++) {
        const sp_net_node *node = &grammar->net.nodes[i];
        int32_t state;

        if (!node->has_bytes || node->height > SP_NET_HEIGHT_MAX || !is_wide(&grammar->net, node))
            continue;
        state = sp_states_at_node(states, i);
        if (state != SP_STATE_NONE && !states->states[state].mask.made)
            make_mask(grammar, state);
        n++;
    }
}

/* ---- places -------------------------------------------------------------------------------- */

static bool forget(sp_grammar *grammar)
{
    grammar->epoch++;
    return sp_states_clear(&grammar->states) == SP_OK;
}

/* The state after a token's bytes, or SP_STATE_NONE. */
static int32_t after_token(sp_grammar *grammar, int32_t state, int32_t token)
{
    const sp_vocabulary *vocabulary = grammar->vocabulary;
    uint32_t begin, end;

    if (token < 0 || token >= vocabulary->n_ids)
        return SP_STATE_NONE;
    begin = vocabulary->offsets[token];
    end = vocabulary->offsets[token + 1];
    if (begin == end)
        return SP_STATE_NONE;
    for (; begin < end && state != SP_STATE_NONE; begin++)
        state = sp_states_next(&grammar->states, state, (uint8_t)vocabulary->bytes[begin]);
    return state;
}

/* Sets the place after n_tokens. Returns the index of the token that does not fit, else -1. */
static int32_t move(sp_grammar *grammar, sp_grammar_place *place, const int32_t *tokens,
                    int32_t n_tokens)
{
    if (place->epoch != grammar->epoch || place->n_tokens > n_tokens)
        *place =
            (sp_grammar_place){.epoch = grammar->epoch, .state = sp_states_start(&grammar->states)};
    for (; place->n_tokens < n_tokens && place->state != SP_STATE_NONE; place->n_tokens++) {
        int32_t state = after_token(grammar, place->state, tokens[place->n_tokens]);

        if (state == SP_STATE_NONE)
            return place->n_tokens;
        place->state = state;
    }
    return place->state == SP_STATE_NONE ? 0 : -1;
}

static sp_status follow(sp_grammar *grammar, sp_grammar_place *place, const int32_t *tokens,
                        int32_t n_tokens, uint32_t *mask, sp_grammar_next *out_next,
                        sp_error *error)
{
    sp_states *states = &grammar->states;
    int32_t wrong = -1;

    if (states->failed || states->bytes > SP_GRAMMAR_STATES_BYTES_MAX)
        states->failed = !forget(grammar);
    if (!states->failed)
        wrong = move(grammar, place, tokens, n_tokens);
    if (!states->failed && wrong < 0 && mask)
        fill_mask(grammar, place->state, mask);
    if (states->failed) {
        *place = (sp_grammar_place){0};
        return sp_fail_memory(error, states->bytes, "the states of a grammar");
    }
    if (wrong >= 0) {
        *place = (sp_grammar_place){0};
        return sp_fail(error, SP_ERR_STATE, SP_GRAMMAR_LEFT, NULL, wrong,
                       "token %d of the output is not in its grammar", wrong);
    }
    *out_next = (sp_grammar_next){states->states[place->state].complete,
                                  sp_states_goes_on(states, place->state)};
    return SP_OK;
}

sp_status sp_grammar_follow(sp_grammar *grammar, sp_grammar_place *place, const int32_t *tokens,
                            int32_t n_tokens, uint32_t *mask, sp_grammar_next *out_next,
                            sp_error *error)
{
    sp_status status;

    pthread_mutex_lock(&grammar->lock);
    status = follow(grammar, place, tokens, n_tokens, mask, out_next, error);
    pthread_mutex_unlock(&grammar->lock);
    return status;
}

bool sp_grammar_has(sp_grammar *grammar, const char *text, size_t bytes)
{
    sp_states *states = &grammar->states;
    int32_t state;
    bool has;

    pthread_mutex_lock(&grammar->lock);
    if (states->failed || states->bytes > SP_GRAMMAR_STATES_BYTES_MAX)
        states->failed = !forget(grammar);
    state = states->failed ? SP_STATE_NONE : sp_states_start(states);
    for (size_t i = 0; i < bytes && state != SP_STATE_NONE; i++)
        state = sp_states_next(states, state, (uint8_t)text[i]);
    has = state != SP_STATE_NONE && states->states[state].complete;
    pthread_mutex_unlock(&grammar->lock);
    return has;
}

/* ---- life ---------------------------------------------------------------------------------- */

/* The first mask; with it the states that most outputs begin with. */
static sp_status check_first(sp_grammar *grammar, sp_error *error)
{
    uint32_t *mask = sp_calloc(grammar->words, sizeof *mask), any = 0;
    sp_grammar_place place = {0};
    sp_grammar_next next;
    sp_status status;

    if (!mask)
        return sp_fail_memory(error, grammar->words * sizeof *mask, "a mask");
    status = sp_grammar_follow(grammar, &place, NULL, 0, mask, &next, error);
    for (size_t i = 0; i < grammar->words; i++)
        any |= mask[i];
    sp_free(mask);
    if (status != SP_OK || any != 0)
        return status;
    return sp_fail(error, SP_ERR_INPUT, SP_GRAMMAR_UNSATISFIABLE, NULL, -1,
                   "no token of the model can begin a text of it");
}

sp_status sp_grammar_create(sp_net *net, const sp_vocabulary *vocabulary, sp_grammar **out_grammar,
                            sp_error *error)
{
    sp_grammar *grammar = sp_calloc(1, sizeof *grammar);
    sp_status status;

    if (!grammar) {
        sp_net_free(net);
        return sp_fail_memory(error, sizeof *grammar, "a grammar");
    }
    grammar->net = *net;
    *net = (sp_net){0};
    grammar->vocabulary = vocabulary;
    grammar->words = sp_vocabulary_words(vocabulary);
    grammar->epoch = 1;
    atomic_init(&grammar->references, 1);
    pthread_mutex_init(&grammar->lock, NULL);
    grammar->scratch = sp_calloc(grammar->words, sizeof *grammar->scratch);
    status = sp_states_create(&grammar->net, &grammar->states);
    if (!grammar->scratch)
        status = SP_ERR_MEMORY;
    if (status != SP_OK)
        sp_fail_memory(error, sizeof grammar->states, "the states of a grammar");
    if (status == SP_OK)
        status = check_first(grammar, error);
    if (status == SP_OK)
        prepare(grammar);
    if (status != SP_OK) {
        sp_grammar_release(grammar);
        return status;
    }
    *out_grammar = grammar;
    return SP_OK;
}

void sp_grammar_retain(sp_grammar *grammar)
{
    atomic_fetch_add(&grammar->references, 1);
}

void sp_grammar_release(sp_grammar *grammar)
{
    if (!grammar || atomic_fetch_sub(&grammar->references, 1) != 1)
        return;
    sp_states_free(&grammar->states);
    sp_free(grammar->scratch);
    sp_net_free(&grammar->net);
    pthread_mutex_destroy(&grammar->lock);
    sp_free(grammar);
}

size_t sp_grammar_memory(sp_grammar *grammar)
{
    size_t bytes;

    pthread_mutex_lock(&grammar->lock);
    bytes = sp_net_memory(&grammar->net) + grammar->states.bytes + sizeof *grammar;
    pthread_mutex_unlock(&grammar->lock);
    return bytes;
}

bool sp_grammar_left_out(sp_grammar *grammar)
{
    bool left_out;

    pthread_mutex_lock(&grammar->lock);
    left_out = grammar->states.left_out;
    pthread_mutex_unlock(&grammar->lock);
    return left_out;
}
