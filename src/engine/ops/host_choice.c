#include "engine/ops/host_choice.h"

#include "base/alloc.h"
#include "base/assert.h"
#include "engine/ops/exact_choice.h"

#include <string.h>

static int32_t places_of(const sp_ops_options *options, int32_t window)
{
    int32_t threads = sp_exec_threads(options->exec);

    return threads < window ? threads : window;
}

static size_t adjusted_bytes(const sp_ops_options *options, int32_t window)
{
    return (size_t)places_of(options, window) * (size_t)options->vocab * sizeof(float);
}

static size_t scratch_bytes(const sp_ops_options *options, int32_t window)
{
    return (size_t)places_of(options, window) * sp_sample_scratch_bytes(options->vocab);
}

size_t sp_host_choice_bytes(const sp_ops_options *options, int32_t window)
{
    return adjusted_bytes(options, window) + scratch_bytes(options, window);
}

bool sp_host_choice_create(const sp_ops_options *options, int32_t window,
                           sp_host_choice *out_choice)
{
    *out_choice = (sp_host_choice){
        .kernels = options->kernels,
        .exec = options->exec,
        .vocab = options->vocab,
        .window = window,
        .places = places_of(options, window),
        .sample_bytes = sp_sample_scratch_bytes(options->vocab),
        .sample_scratch = sp_aligned_calloc(scratch_bytes(options, window), 64),
        .adjusted_logits = sp_aligned_calloc(adjusted_bytes(options, window), 64),
    };
    return out_choice->sample_scratch && out_choice->adjusted_logits;
}

void sp_host_choice_destroy(sp_host_choice *choice)
{
    sp_aligned_free(choice->sample_scratch);
    sp_aligned_free(choice->adjusted_logits);
    *choice = (sp_host_choice){0};
}

/* ---- tokens -------------------------------------------------------------------------------- */

typedef struct choose_job {
    const sp_host_choice *choice;
    const float *logits;
    sp_choice *choices;
} choose_job;

static int32_t place_of(const sp_host_choice *choice, int32_t task, int32_t thread)
{
    int32_t place = sp_exec_threads(choice->exec) > choice->window ? task : thread;

    SP_ASSERT(place < choice->places);
    return place;
}

char *sp_host_choice_scratch(const sp_host_choice *choice, int32_t task, int32_t thread)
{
    return choice->sample_scratch + (size_t)place_of(choice, task, thread) * choice->sample_bytes;
}

/* The row with the request's bias, penalties and mask: a copy where it has any, else the row
 * itself. */
static const float *adjust(const sp_host_choice *host, const sp_choice *choice, const float *logits,
                           float *adjusted, char *scratch)
{
    bool may_end = choice->n_tokens - choice->n_prompt >= choice->ends->min_tokens;

    if (!choice->adjusted && may_end)
        return logits;
    memcpy(adjusted, logits, (size_t)host->vocab * sizeof *adjusted);
    if (!may_end)
        sp_ends_forbid(choice->ends, adjusted);
    sp_penalties_apply(choice->penalties, choice->tokens, choice->n_prompt, choice->n_tokens,
                       (int32_t *)(void *)scratch, adjusted);
    if (choice->mask)
        sp_token_mask_apply(choice->mask, host->vocab, adjusted);
    return adjusted;
}

/* A GPU looks at the row before what changes it. */
static sp_status sample_exactly(const sp_host_choice *host, const sp_choice *choice,
                                const float *logits, const float *adjusted, char *scratch,
                                int32_t *out_token)
{
    sp_status status =
        adjusted != logits ? sp_sample_greedy(logits, host->vocab, out_token, NULL) : SP_OK;

    if (status != SP_OK)
        return status;
    return sp_exact_sample(adjusted, host->vocab, choice->sampling,
                           (uint64_t)(choice->n_tokens - choice->n_prompt), scratch, out_token);
}

/* One row's token. The vocabulary is large: rows are processed in parallel. */
static void choose_task(void *user, int32_t task, int32_t thread)
{
    const choose_job *job = user;
    const sp_host_choice *host = job->choice;
    sp_choice *choice = &job->choices[task];
    const float *logits = job->logits + (size_t)task * (size_t)host->vocab, *adjusted;
    char *scratch = sp_host_choice_scratch(host, task, thread);
    int32_t place = place_of(host, task, thread);

    if (!choice->sampling)
        return;
    adjusted = adjust(host, choice, logits,
                      host->adjusted_logits + (size_t)place * (size_t)host->vocab, scratch);
    choice->status = host->exact
                         ? sample_exactly(host, choice, logits, adjusted, scratch, &choice->token)
                         : sp_sample(host->kernels, adjusted, host->vocab, choice->sampling,
                                     (uint64_t)(choice->n_tokens - choice->n_prompt), scratch,
                                     &choice->token, NULL);
}

void sp_host_choose(const sp_host_choice *choice, const float *logits, sp_choice *choices,
                    int32_t n)
{
    choose_job job = {.choice = choice, .logits = logits, .choices = choices};

    SP_ASSERT(n <= choice->window);
    sp_exec_run(choice->exec, choose_task, &job, n);
}
