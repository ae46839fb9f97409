#include "engine/ops/host_choice.h"

#include "base/alloc.h"
#include "base/assert.h"

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

/* The row with the request's bias, penalties and mask: a copy where it has any, else the row
 * itself. */
static const float *adjust(const sp_host_choice *host, const sp_choice *choice, const float *logits,
                           int32_t place)
{
    float *adjusted = host->adjusted_logits + (size_t)place * (size_t)host->vocab;
    char *scratch = host->sample_scratch + (size_t)place * host->sample_bytes;
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

/* One row's token. The vocabulary is large: rows are processed in parallel, each in the scratch of
 * its thread, or of its task where there are fewer tasks. */
static void choose_task(void *user, int32_t task, int32_t thread)
{
    const choose_job *job = user;
    const sp_host_choice *host = job->choice;
    sp_choice *choice = &job->choices[task];
    int32_t place = sp_exec_threads(host->exec) > host->window ? task : thread;

    SP_ASSERT(place < host->places);
    if (choice->sampling)
        choice->status = sp_sample(
            host->kernels,
            adjust(host, choice, job->logits + (size_t)task * (size_t)host->vocab, place),
            host->vocab, choice->sampling, (uint64_t)(choice->n_tokens - choice->n_prompt),
            host->sample_scratch + (size_t)place * host->sample_bytes, &choice->token, NULL);
}

void sp_host_choose(const sp_host_choice *choice, const float *logits, sp_choice *choices,
                    int32_t n)
{
    choose_job job = {.choice = choice, .logits = logits, .choices = choices};

    SP_ASSERT(n <= choice->window);
    sp_exec_run(choice->exec, choose_task, &job, n);
}
