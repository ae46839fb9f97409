/*
 * cuda_choice.c: tokens and logprobs from the logits of a window. What the rows want is described
 * by one copy, answered by one launch, and read by one copy and one wait. Where all tokens are the
 * best ones and nothing is scored, a smaller launch finds them. Rows that the kernel cannot take
 * are copied to the host, where exact_choice.h has the same numbers.
 */
#include "base/assert.h"
#include "engine/ops/cuda_ops.h"
#include "engine/ops/exact_choice.h"
#include "kernels/cuda/choose_rules.h"

#include <string.h>

/* Changes that a window has room for; a row that finds none is the host's. */
#define CHANGES_MAX (1 << 20)

/* ---- memory -------------------------------------------------------------------------------- */

static size_t mask_bytes(int32_t vocab)
{
    return sp_token_mask_words(vocab) * sizeof(uint32_t);
}

/* Each row may change the ids of all its tokens and as many others as a request may list. */
static int32_t changes_max(int32_t window, int32_t positions)
{
    int64_t most = (int64_t)window * ((int64_t)positions + 2 * SP_LOGIT_BIAS_MAX);

    return most < CHANGES_MAX ? (int32_t)most : CHANGES_MAX;
}

static size_t in_bytes(int32_t window, int32_t vocab, int32_t changes)
{
    return (size_t)window * (sizeof(sp_cuda_sample_row) + mask_bytes(vocab)) +
           (size_t)changes * sizeof(sp_cuda_sample_change);
}

static size_t out_bytes(int32_t rows, bool top)
{
    size_t tops = SP_CUDA_SAMPLE_TOP_MAX * (sizeof(int32_t) + sizeof(float));

    return (size_t)rows * (sizeof(sp_cuda_sample_result) + (top ? tops : 0));
}

size_t sp_cuda_samples_bytes(int32_t window, int32_t vocab, int32_t positions)
{
    return in_bytes(window, vocab, changes_max(window, positions)) + out_bytes(window, true);
}

sp_status sp_cuda_samples_create(sp_cuda_ops *cuda, sp_error *error)
{
    const sp_cuda_sample none = {.vocab = cuda->vocab};
    sp_cuda_samples *samples = &cuda->samples;
    int32_t window = cuda->ops.window;
    size_t in, out = out_bytes(window, true);
    sp_status status = SP_OK;
    int code = SP_CUDA_NOT_SUPPORTED;

    if (cuda->vocab <= SP_CUDA_SAMPLE_VOCAB_MAX)
        code = cuda->kernels.sample_rows(cuda->gpu, &none, cuda->native);
    samples->there = code == 0;
    if (code == SP_CUDA_NOT_SUPPORTED)
        return SP_OK;
    samples->changes_max = changes_max(window, cuda->attention.positions_max);
    in = in_bytes(window, cuda->vocab, samples->changes_max);
    status = sp_cuda_launched(cuda, code, "preparing the choice of tokens");
    samples->in = sp_cuda_block(cuda, in, &status, error);
    samples->host_in = sp_cuda_pinned(cuda, in, &status, error);
    samples->out = sp_cuda_block(cuda, out, &status, error);
    samples->host_out = sp_cuda_pinned(cuda, out, &status, error);
    return status;
}

static const sp_cuda_sample_result *results(const char *block)
{
    return (const sp_cuda_sample_result *)(const void *)block;
}

static int32_t *top_tokens(char *block, int32_t rows)
{
    return (int32_t *)(void *)(block + out_bytes(rows, false));
}

static float *top_logits(char *block, int32_t rows)
{
    return (float *)(void *)(top_tokens(block, rows) + (size_t)rows * SP_CUDA_SAMPLE_TOP_MAX);
}

/* ---- what is wanted ------------------------------------------------------------------------ */

typedef enum choice_place {
    PLACE_NOWHERE = 0, /* nothing is wanted of the row */
    PLACE_DEVICE = 1,
    PLACE_HOST = 2
} choice_place;

/* One window's choices. */
typedef struct choice_run {
    sp_cuda_ops *cuda;
    sp_choice *choices; /* [n] */
    int32_t n;
    choice_place places[SP_LOGIT_ROWS_MAX];
    bool any[3];      /* rows with each place */
    bool greedy, top; /* the device's rows are all best tokens and not scored; any best ids */
    /* in samples.host_in */
    sp_cuda_sample_row *rows; /* [n] */
    uint32_t *masks;
    sp_cuda_sample_change *changes;
    int32_t n_masks, n_changes;
} choice_run;

static bool may_end(const sp_choice *choice)
{
    return choice->n_tokens - choice->n_prompt >= choice->ends->min_tokens;
}

/* Whether the largest logit decides, and it alone is wanted. */
static bool is_greedy(const sp_choice *choice)
{
    return choice->sampling && choice->sampling->temperature < SP_TEMPERATURE_MIN &&
           !choice->adjusted && may_end(choice) && choice->n_top < 0;
}

/* The most changes of a row. */
static int64_t most_changes(const sp_choice *choice)
{
    const sp_penalties *penalties = choice->penalties;
    int64_t n = may_end(choice) ? 0 : choice->ends->n;

    if (!choice->adjusted)
        return n;
    return n + penalties->n_bias + choice->n_tokens -
           sp_penalties_first(penalties, choice->n_prompt, choice->n_tokens);
}

/* Describes a row but for its mask and changes, for which it keeps room. */
static void describe_row(choice_run *run, int32_t index)
{
    const sp_choice *choice = &run->choices[index];
    sp_cuda_sample_row row = {.given = choice->given, .top_p = 1};

    if (choice->sampling) {
        row = sp_exact_row(choice->sampling, (uint64_t)(choice->n_tokens - choice->n_prompt));
        row.repetition = (float)choice->penalties->repetition;
        row.frequency = (float)choice->penalties->frequency;
        row.presence = (float)choice->penalties->presence;
        row.first_change = run->n_changes;
        row.mask = choice->mask ? ++run->n_masks : 0;
        run->n_changes += (int32_t)most_changes(choice);
    }
    row.n_top = choice->n_top;
    run->rows[index] = row;
}

static choice_place place_of(const choice_run *run, const sp_choice *choice)
{
    const sp_cuda_samples *samples = &run->cuda->samples;

    if (!choice->sampling && choice->given < 0)
        return PLACE_NOWHERE;
    if (!samples->there)
        return is_greedy(choice) ? PLACE_DEVICE : PLACE_HOST;
    if (choice->n_top > SP_CUDA_SAMPLE_TOP_MAX ||
        (choice->sampling && most_changes(choice) > samples->changes_max - run->n_changes))
        return PLACE_HOST;
    return PLACE_DEVICE;
}

static void place_rows(choice_run *run)
{
    const sp_cuda_samples *samples = &run->cuda->samples;

    run->greedy = true;
    run->rows = (sp_cuda_sample_row *)(void *)samples->host_in;
    for (int32_t i = 0; i < run->n; i++) {
        const sp_choice *choice = &run->choices[i];

        run->places[i] = place_of(run, choice);
        run->any[run->places[i]] = true;
        if (run->places[i] == PLACE_DEVICE) {
            run->greedy &= is_greedy(choice);
            run->top |= choice->n_top > 0;
        }
        if (samples->there && run->places[i] == PLACE_DEVICE)
            describe_row(run, i);
        else if (samples->there)
            run->rows[i] = (sp_cuda_sample_row){.given = SP_CUDA_SAMPLE_NO_ROW};
    }
    if (!samples->there)
        return;
    run->masks = (uint32_t *)(void *)(run->rows + run->n);
    run->changes =
        (sp_cuda_sample_change *)(void *)((char *)run->masks +
                                          (size_t)run->n_masks * mask_bytes(run->cuda->vocab));
}

/* ---- changes ------------------------------------------------------------------------------- */

#define NO_CHANGE (-1)

/* A row's list, and where each id is in it; the latter holds anything for ids that the row does
 * not have. */
typedef struct change_list {
    sp_cuda_sample_change *items;
    int32_t n;
    int32_t *at; /* [vocab] */
} change_list;

static sp_cuda_sample_change *change_of(change_list *list, int32_t token)
{
    if (list->at[token] == NO_CHANGE) {
        list->at[token] = list->n++;
        list->items[list->at[token]] =
            (sp_cuda_sample_change){.token = token, .count = SP_CUDA_CHANGE_BIAS};
    }
    return &list->items[list->at[token]];
}

static void forget(change_list *list, const sp_choice *choice, int32_t first)
{
    for (int32_t i = first; i < choice->n_tokens; i++)
        list->at[choice->tokens[i]] = NO_CHANGE;
    for (int32_t i = 0; i < choice->penalties->n_bias; i++)
        list->at[choice->penalties->bias[i].token] = NO_CHANGE;
    for (int32_t i = 0; i < choice->ends->n; i++)
        list->at[choice->ends->tokens[i]] = NO_CHANGE;
}

/* What sp_ends_forbid and sp_penalties_apply do to the row. */
static void list_changes(change_list *list, const sp_choice *choice)
{
    const sp_penalties *penalties = choice->penalties;
    int32_t first = sp_penalties_first(penalties, choice->n_prompt, choice->n_tokens);

    forget(list, choice, first);
    for (int32_t i = 0; i < choice->ends->n && !may_end(choice); i++)
        change_of(list, choice->ends->tokens[i])->count = SP_CUDA_CHANGE_FORBIDS;
    for (int32_t i = 0; i < penalties->n_bias && choice->adjusted; i++)
        change_of(list, penalties->bias[i].token)->bias = penalties->bias[i].bias;
    for (int32_t i = first; i < choice->n_tokens && choice->adjusted; i++) {
        sp_cuda_sample_change *change = change_of(list, choice->tokens[i]);

        if (change->count == SP_CUDA_CHANGE_FORBIDS)
            continue;
        change->count = change->count == SP_CUDA_CHANGE_BIAS ? 0 : change->count;
        change->count += i >= choice->n_prompt;
    }
}

static void fill_task(void *user, int32_t task, int32_t thread)
{
    const choice_run *run = user;
    const sp_choice *choice = &run->choices[task];
    const sp_host_choice *host = &run->cuda->choice;
    size_t words = sp_token_mask_words(host->vocab);
    sp_cuda_sample_row *row = &run->rows[task];
    change_list list = {.items = run->changes + row->first_change};

    if (run->places[task] != PLACE_DEVICE || !choice->sampling)
        return;
    if (row->mask > 0)
        memcpy(run->masks + (size_t)(row->mask - 1) * words, choice->mask,
               words * sizeof(uint32_t));
    if (most_changes(choice) == 0)
        return;
    list.at = (int32_t *)(void *)sp_host_choice_scratch(host, task, thread);
    list_changes(&list, choice);
    row->n_changes = list.n;
}

/* Counting may take long: a request's tokens are counted anew. What is left of the room that was
 * kept is not sent. */
static void fill_rows(choice_run *run)
{
    int32_t n = 0;

    if (run->n_masks + run->n_changes == 0)
        return;
    sp_exec_run(run->cuda->choice.exec, fill_task, run, run->n);
    for (int32_t i = 0; i < run->n; i++) {
        sp_cuda_sample_row *row = &run->rows[i];

        if (row->n_changes == 0)
            continue;
        memmove(run->changes + n, run->changes + row->first_change,
                (size_t)row->n_changes * sizeof *run->changes);
        row->first_change = n;
        n += row->n_changes;
    }
    run->n_changes = n;
}

/* ---- launches ------------------------------------------------------------------------------ */

static sp_status launch_greedy(const choice_run *run)
{
    sp_cuda_ops *cuda = run->cuda;
    sp_cuda_window *window = &cuda->window;
    const sp_cuda_greedy greedy = {
        .rows = run->n,
        .vocab = cuda->vocab,
        .logits = window->logits,
        .stride = cuda->vocab,
        .token = window->token,
        .bad = window->bad,
        .scratch = window->greedy_scratch,
    };
    size_t bytes = (size_t)run->n * sizeof *window->token;
    sp_status status = sp_cuda_launched(
        cuda, cuda->kernels.greedy_rows(cuda->gpu, &greedy, cuda->native), "choosing tokens");

    if (status == SP_OK)
        status = sp_stream_copy(cuda->stream, window->host_token, window->token, bytes, NULL);
    if (status == SP_OK)
        status = sp_stream_copy(cuda->stream, window->host_bad, window->bad, bytes, NULL);
    return status;
}

/* The address in the block on the device of what is in the pinned one. */
static const void *on_device(const sp_cuda_samples *samples, const void *host)
{
    return samples->in + ((const char *)host - samples->host_in);
}

static sp_status launch_sample(choice_run *run)
{
    sp_cuda_ops *cuda = run->cuda;
    sp_cuda_samples *samples = &cuda->samples;
    sp_cuda_sample sample = {
        .rows = run->n,
        .vocab = cuda->vocab,
        .logits = cuda->window.logits,
        .stride = cuda->vocab,
        .row = on_device(samples, run->rows),
        .changes = on_device(samples, run->changes),
        .masks = on_device(samples, run->masks),
        .result = (sp_cuda_sample_result *)(void *)samples->out,
        .top_token = top_tokens(samples->out, run->n),
        .top_logit = top_logits(samples->out, run->n),
    };
    sp_status status;

    fill_rows(run);
    samples->n = run->n;
    status =
        sp_stream_copy(cuda->stream, samples->in, samples->host_in,
                       (size_t)((char *)(run->changes + run->n_changes) - samples->host_in), NULL);
    if (status == SP_OK)
        status = sp_cuda_launched(cuda, cuda->kernels.sample_rows(cuda->gpu, &sample, cuda->native),
                                  "choosing tokens");
    if (status == SP_OK)
        status = sp_stream_copy(cuda->stream, samples->host_out, samples->out,
                                out_bytes(run->n, run->top), NULL);
    return status;
}

/* ---- the choice ---------------------------------------------------------------------------- */

static void take_token(choice_run *run, int32_t index)
{
    const sp_cuda_ops *cuda = run->cuda;
    const sp_cuda_sample_result *result = &results(cuda->samples.host_out)[index];
    int32_t bad = run->greedy ? cuda->window.host_bad[index] : result->bad;
    int32_t token = run->greedy ? cuda->window.host_token[index] : result->token;
    sp_choice *choice = &run->choices[index];

    choice->status = bad == -1 ? SP_OK : SP_ERR_INPUT;
    if (choice->status == SP_OK)
        choice->token = token;
}

static void choose_on_host(choice_run *run)
{
    sp_choice choices[SP_LOGIT_ROWS_MAX];

    for (int32_t i = 0; i < run->n; i++) {
        choices[i] = run->choices[i];
        if (run->places[i] != PLACE_HOST)
            choices[i].sampling = NULL;
    }
    sp_host_choose(&run->cuda->choice, run->cuda->window.host_logits, choices, run->n);
    for (int32_t i = 0; i < run->n; i++)
        if (run->places[i] == PLACE_HOST) {
            run->choices[i].status = choices[i].status;
            run->choices[i].token = choices[i].token;
        }
}

static void take_results(choice_run *run)
{
    for (int32_t i = 0; i < run->n; i++) {
        if (run->places[i] != PLACE_DEVICE)
            continue;
        if (run->choices[i].sampling)
            take_token(run, i);
        if (!run->greedy)
            run->cuda->samples.n_top[i] = run->choices[i].n_top;
    }
    if (run->any[PLACE_HOST])
        choose_on_host(run);
}

static sp_status choose(choice_run *run)
{
    sp_cuda_ops *cuda = run->cuda;
    sp_status status = SP_OK;

    place_rows(run);
    if (run->any[PLACE_DEVICE])
        status = run->greedy ? launch_greedy(run) : launch_sample(run);
    for (int32_t i = 0; i < run->n && status == SP_OK; i++)
        if (run->places[i] == PLACE_HOST)
            status = sp_cuda_fetch_logits(cuda, i);
    if (status == SP_OK && (run->any[PLACE_DEVICE] || run->any[PLACE_HOST]))
        status = sp_stream_wait(cuda->stream, NULL);
    if (status == SP_OK)
        take_results(run);
    return status;
}

/* After a failure nothing may write what the next window is described in. */
void sp_cuda_op_choose(sp_ops *ops, sp_choice *choices, int32_t n)
{
    sp_cuda_ops *cuda = (sp_cuda_ops *)ops;
    choice_run run = {.cuda = cuda, .choices = choices, .n = n};
    sp_status status = choose(&run);

    if (status == SP_OK)
        return;
    (void)sp_stream_wait(cuda->stream, NULL);
    ops->status = status;
    for (int32_t i = 0; i < n; i++)
        choices[i].status = status;
}

/* ---- scores -------------------------------------------------------------------------------- */

/* What the last launch found about a row. */
static void take_score(const sp_cuda_ops *cuda, int32_t index, int32_t n_top, float *out_logprob,
                       sp_logprob *out_top)
{
    const sp_cuda_samples *samples = &cuda->samples;
    const sp_cuda_sample_result *result = &results(samples->host_out)[index];
    const int32_t *ids = top_tokens(samples->host_out, samples->n);
    const float *logits = top_logits(samples->host_out, samples->n);
    double sum = sp_choose_sum(result->mass);

    for (int32_t i = 0; i < n_top && i < cuda->vocab; i++) {
        int32_t at = index * SP_CUDA_SAMPLE_TOP_MAX + i;

        out_top[i] =
            (sp_logprob){.token = ids[at], .logprob = sp_logprob_of(logits[at], result->best, sum)};
    }
    *out_logprob = sp_logprob_of(result->logit, result->best, sum);
}

sp_status sp_cuda_op_score(sp_ops *ops, int32_t index, int32_t token, int32_t n_top,
                           float *out_logprob, sp_logprob *out_top)
{
    const sp_cuda_ops *cuda = (const sp_cuda_ops *)ops;
    const sp_cuda_samples *samples = &cuda->samples;

    if (samples->n_top[index] < n_top || results(samples->host_out)[index].token != token)
        return sp_exact_logprobs(sp_cuda_op_read_logits(ops, index), cuda->vocab, token, n_top,
                                 out_logprob, out_top);
    take_score(cuda, index, n_top, out_logprob, out_top);
    return SP_OK;
}
