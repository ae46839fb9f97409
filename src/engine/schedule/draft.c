#include "engine/schedule/draft.h"

#include "base/assert.h"

static int32_t min_of(int32_t a, int32_t b)
{
    return a < b ? a : b;
}

/* ---- how many ------------------------------------------------------------------------------ */

sp_draft sp_draft_create(int32_t longest)
{
    SP_ASSERT(longest >= 0 && longest <= SP_DRAFT_TOKENS_MAX);
    return (sp_draft){.longest = longest};
}

static double value_of(const sp_draft_share *share)
{
    return share->met > 0 ? (share->hits + 1.0) / (share->met + 1.0) : SP_DRAFT_UNTRIED;
}

int32_t sp_draft_wanted(const sp_draft *draft, sp_drafter by, double cost)
{
    const sp_draft_share *share = &draft->shares[by];
    double each = value_of(share), all = each * each;
    int32_t n = 1;

    if (draft->longest == 0 || share->pause > 0)
        return 0;
    for (; n < draft->longest && all >= cost; n++)
        all *= each;
    return n;
}

void sp_draft_begin(sp_draft *draft, sp_drafter by, int32_t n)
{
    SP_ASSERT(n >= 0 && n <= draft->longest);
    draft->by = by;
    draft->n_left = n;
    draft->n_accepted = 0;
    draft->n_used = 0;
    draft->rejected = false;
}

bool sp_draft_meet(sp_draft *draft, int32_t token, const int32_t *guess)
{
    if (draft->n_left == 0)
        return false;
    draft->rejected = *guess != token;
    draft->n_left = draft->rejected ? 0 : draft->n_left - 1;
    draft->n_accepted += !draft->rejected;
    return !draft->rejected;
}

static void note_met(sp_draft_share *share, int32_t hits, int32_t met)
{
    share->hits += hits;
    share->met += met;
    while (share->met >= SP_DRAFT_MEMORY) {
        share->hits /= 2;
        share->met /= 2;
    }
}

static int32_t next_pause(const sp_draft_share *share, double cost)
{
    int32_t first = SP_DRAFT_PAUSE_MIN + (int32_t)(SP_DRAFT_PAUSE_COST * cost);

    if (share->pause_last == 0)
        return first;
    return min_of(2 * share->pause_last, SP_DRAFT_PAUSE_MAX);
}

void sp_draft_end(sp_draft *draft, int32_t n_drafts, double cost)
{
    sp_draft_share *share = &draft->shares[draft->by];

    for (int32_t i = 0; i < SP_DRAFTERS; i++)
        draft->shares[i].pause -= draft->shares[i].pause > 0;
    if (n_drafts == 0)
        return;
    note_met(share, draft->n_accepted, draft->n_accepted + draft->rejected);
    share->misses = draft->n_accepted > 0 ? 0 : min_of(share->misses + 1, SP_DRAFT_MISSES_MAX);
    if (draft->n_accepted > 0)
        share->pause_last = 0;
    else if (draft->rejected && (value_of(share) < cost || share->misses == SP_DRAFT_MISSES_MAX))
        share->pause = share->pause_last = next_pause(share, cost);
}

/* ---- prompt lookup ------------------------------------------------------------------------- */

/* How many tokens before `end` equal those before n_tokens, up to SP_LOOKUP_MATCH_MAX. */
static int32_t match_before(const int32_t *tokens, int32_t end, int32_t n_tokens)
{
    int32_t most = min_of(end, SP_LOOKUP_MATCH_MAX), n = 0;

    while (n < most && tokens[end - 1 - n] == tokens[n_tokens - 1 - n])
        n++;
    return n;
}

int32_t sp_draft_lookup(int32_t *tokens, int32_t n_tokens, int32_t n_max)
{
    int32_t first = n_tokens > SP_LOOKUP_TOKENS_MAX ? n_tokens - SP_LOOKUP_TOKENS_MAX : 1;
    int32_t best = SP_LOOKUP_MATCH_MIN - 1, from = -1;

    for (int32_t end = n_tokens - 1; end >= first && best < SP_LOOKUP_MATCH_MAX; end--) {
        int32_t n = match_before(tokens, end, n_tokens);

        if (n > best) {
            best = n;
            from = end;
        }
    }
    if (from < 0)
        return 0;
    for (int32_t i = 0; i < n_max; i++)
        tokens[n_tokens + i] = tokens[from + i];
    return n_max;
}
