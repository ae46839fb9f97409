/*
 * draft.h: guesses of a sequence's next tokens, which one step verifies together.
 *
 * It owns how drafts are found in the sequence's own tokens (prompt lookup), and how many the next
 * step verifies, by how many of the last of the same drafter were accepted. It must not know
 * logits, sampling, memory or adapters: a draft is accepted where the sequence's own choice is the
 * same token, so a source of drafts changes how fast tokens come and no token. Pure functions; any
 * thread.
 */
#ifndef SP_ENGINE_SCHEDULE_DRAFT_H
#define SP_ENGINE_SCHEDULE_DRAFT_H

#include <stdbool.h>
#include <stdint.h>

#define SP_DRAFT_TOKENS_MAX  32
#define SP_DRAFT_PAUSE_MAX   64 /* steps */
#define SP_DRAFT_PAUSE_MIN   4  /* where a row costs nothing */
#define SP_DRAFT_PAUSE_COST  28 /* more of them where it costs a token */
#define SP_DRAFT_MEMORY      8
#define SP_DRAFT_MISSES_MAX  8
#define SP_DRAFT_UNTRIED     0.9   /* the share that is assumed before any was met */
#define SP_LOOKUP_TOKENS_MAX 16384 /* the last ones, which bounds the time of a look-up */
#define SP_LOOKUP_MATCH_MIN  2
#define SP_LOOKUP_MATCH_MAX  8

/* Who drafts. */
typedef enum sp_drafter {
    SP_DRAFT_BY_LOOKUP, /* or by the source that a test has set */
    SP_DRAFT_BY_MODEL,
    SP_DRAFTERS
} sp_drafter;

/* How well one of them drafts for a sequence. */
typedef struct sp_draft_share {
    int32_t hits, met;
    int32_t misses;            /* steps since a draft was accepted */
    int32_t pause, pause_last; /* steps without drafts: those to come, and those after the last
                                  miss; 0: none since a draft was accepted */
} sp_draft_share;

/*
 * The drafts of one sequence. All zero: it has none. For each drafter the share of its drafts that
 * is accepted is estimated from the last ones that a choice has met, (hits + 1) / (met + 1), and
 * both are halved when SP_DRAFT_MEMORY were met. A step has as many drafts, up to `longest`, as are
 * likely to be accepted with a probability that is no less than what a draft costs (step_cost.h).
 * Where not even the first is, and it was not accepted either, or after SP_DRAFT_MISSES_MAX steps
 * without one that was, the drafter pauses and then tries again: for 4 + 28 * cost steps, then for
 * twice as many each time, up to SP_DRAFT_PAUSE_MAX, until a draft is accepted again. So a text
 * that cannot be guessed costs a row in 65 steps.
 */
typedef struct sp_draft {
    int32_t longest; /* most drafts of a step; 0: none */
    sp_draft_share shares[SP_DRAFTERS];
    sp_drafter by; /* of the current step's */
    /* Of the current step: drafts that no choice has met yet, those that were chosen, rows whose
     * logits counted, and whether another token was chosen, after which no row counts. */
    int32_t n_left, n_accepted, n_used;
    bool rejected;
} sp_draft;

/* At most `longest` (0 .. SP_DRAFT_TOKENS_MAX) drafts in a step. */
sp_draft sp_draft_create(int32_t longest);

/* Drafts of `by` that the next step should verify, where each costs `cost` (0 .. 1) tokens; 0:
 * none. */
int32_t sp_draft_wanted(const sp_draft *draft, sp_drafter by, double cost);

/* A step verifies n (0 or more) drafts of `by`. */
void sp_draft_begin(sp_draft *draft, sp_drafter by, int32_t n);

/* The next token was chosen; `guess` is the draft in its place, read where one is left. Returns
 * whether it was accepted. */
bool sp_draft_meet(sp_draft *draft, int32_t token, const int32_t *guess);

/* The step is over; it had n_drafts, each of which cost `cost`. */
void sp_draft_end(sp_draft *draft, int32_t n_drafts, double cost);

/*
 * Prompt lookup: finds the last place where the longest run of tokens that ends the sequence, from
 * SP_LOOKUP_MATCH_MIN to SP_LOOKUP_MATCH_MAX of them, has occurred before, and copies what followed
 * it, over its own drafts where the text repeats itself. Writes at most n_max (0 or more) tokens
 * to tokens[n_tokens ..] and returns how many. Reads the last SP_LOOKUP_TOKENS_MAX tokens.
 */
int32_t sp_draft_lookup(int32_t *tokens, int32_t n_tokens, int32_t n_max);

#endif
