#include "engine/draft_model.h"

#include "base/alloc.h"
#include "base/assert.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/file.h"
#include "base/integer.h"
#include "engine/constrain.h"

#include <stdio.h>
#include <string.h>

#define PASS_WEIGHT (1.0 / 16) /* of the last pass in the time that a draft takes */

/* ---- opening ------------------------------------------------------------------------------- */

static sp_status mismatch(sp_error *error, const char *path, const char *what)
{
    return sp_fail(error, SP_ERR_MISMATCH, SP_CODE_DRAFT_MISMATCH, "draft-model", -1,
                   "the draft model %s cannot draft for this base: %s", path, what);
}

static sp_status check_shape(const sp_engine *engine, const sp_model *model, sp_error *error)
{
    char what[96];

    if (model->shape.experts > 0)
        return sp_fail(error, SP_ERR_UNSUPPORTED, "engine-unsupported", "draft-model", -1,
                       "the draft model %s has experts (%s); take a dense one",
                       engine->options.draft_model, model->family->name);
    if (model->shape.vocab == engine->model.shape.vocab)
        return SP_OK;
    snprintf(what, sizeof what, "its vocabulary has %d ids, the base's %d", model->shape.vocab,
             engine->model.shape.vocab);
    return mismatch(error, engine->options.draft_model, what);
}

static bool same_token(const sp_tokenizer *a, const sp_tokenizer *b, int32_t id)
{
    size_t a_bytes = 0, b_bytes = 0;
    const char *a_text = sp_tokenizer_token_bytes(a, id, &a_bytes);
    const char *b_text = sp_tokenizer_token_bytes(b, id, &b_bytes);

    return a_bytes == b_bytes && (a_bytes == 0 || memcmp(a_text, b_text, a_bytes) == 0) &&
           sp_tokenizer_is_special(a, id) == sp_tokenizer_is_special(b, id);
}

static sp_status compare_tokens(const sp_engine *engine, const sp_tokenizer *other, sp_error *error)
{
    int32_t own_ids = sp_tokenizer_n_ids(engine->tokenizer), other_ids = sp_tokenizer_n_ids(other);
    int32_t n = own_ids < other_ids ? own_ids : other_ids;
    char what[96];

    for (int32_t id = 0; id < n; id++) {
        if (same_token(engine->tokenizer, other, id))
            continue;
        snprintf(what, sizeof what, "the token %d has another text there", id);
        return mismatch(error, engine->options.draft_model, what);
    }
    return own_ids == other_ids ? SP_OK
                                : mismatch(error, engine->options.draft_model,
                                           "its tokenizer has another number of tokens");
}

/* Two models without a tokenizer.json are taken at their vocabularies' word. */
static sp_status check_tokenizer(const sp_engine *engine, sp_error *error)
{
    const char *path = engine->options.draft_model;
    char *file = sp_path_join(path, SP_TOKENIZER_FILE);
    sp_tokenizer *other = NULL;
    bool exists;
    sp_status status = SP_OK;

    if (!file)
        return sp_fail_memory(error, strlen(path), "a path");
    exists = sp_path_exists(file);
    sp_free(file);
    if (exists != (engine->tokenizer != NULL))
        return mismatch(error, path,
                        exists ? "it has a tokenizer.json and the base has none"
                               : "it has no tokenizer.json");
    if (!exists)
        return SP_OK;
    status = sp_tokenizer_open(path, &other, error);
    if (status == SP_OK)
        status = compare_tokens(engine, other, error);
    sp_tokenizer_close(other);
    return status;
}

static sp_status open_files(const sp_engine *engine, size_t free_bytes, sp_model *out_model,
                            sp_error *error)
{
    const sp_load_progress nobody = {.tell = NULL};
    sp_error why = {.position = -1};
    sp_status status = sp_model_open(engine->options.draft_model, engine->options.weights_copy,
                                     free_bytes, nobody, out_model, &why);

    if (status != SP_OK)
        return sp_fail(error, status, why.code, why.subject, why.position,
                       "the draft model: %.900s", why.text);
    status = check_shape(engine, out_model, error);
    if (status == SP_OK)
        status = check_tokenizer(engine, error);
    return status;
}

sp_status sp_draft_model_open(sp_engine *engine, size_t free_bytes, sp_error *error)
{
    if (!engine->options.draft_model)
        return SP_OK;
    engine->draft_model = sp_calloc(1, sizeof *engine->draft_model);
    if (!engine->draft_model)
        return sp_fail_memory(error, sizeof *engine->draft_model, "the draft model");
    engine->draft_model->model.files.notify = -1;
    return open_files(engine, free_bytes, &engine->draft_model->model, error);
}

/* ---- memory -------------------------------------------------------------------------------- */

static bool is_recurrent(const sp_draft_model *draft)
{
    return sp_family_delta_rule(&draft->model, 0, 0).layers > 0;
}

static sp_ops_options options_of(sp_engine *engine, int32_t widths[SP_ROWS_MAX])
{
    const sp_draft_model *draft = engine->draft_model;
    sp_ops_options options =
        sp_engine_ops_options(engine, &draft->model, &draft->memory, draft->positions, widths);

    options.delta = NULL;
    options.head_delta = NULL;
    return options;
}

static int32_t positions_of(const sp_engine *engine)
{
    int32_t most = engine->draft_model->model.shape.max_positions;

    return engine->max_context < most ? engine->max_context : most;
}

void sp_draft_model_add_needs(sp_engine *engine, sp_memory_needs *needs)
{
    sp_draft_model *draft = engine->draft_model;
    int32_t widths[SP_ROWS_MAX];
    sp_attention_shape attention;
    sp_delta_rule_shape rule;
    sp_ops_options options;

    if (!draft)
        return;
    draft->positions = positions_of(engine);
    attention = sp_family_attention(&draft->model);
    rule = sp_family_delta_rule(&draft->model, 1, 1);
    options = options_of(engine, widths);
    options.rope.positions = draft->positions;
    needs->draft = draft->model.needed_bytes + sp_ops_scratch_bytes(engine->op_table, &options) +
                   2 * (size_t)sp_family_rotated_pairs(&draft->model.shape) *
                       (size_t)draft->positions * sizeof(float);
    needs->kv_token +=
        sp_ops_kv_token_bytes(engine->op_table, &attention, engine->options.precision);
    needs->state += sp_ops_state_bytes(engine->op_table, &rule, engine->options.precision);
    needs->snapshot += sp_ops_snapshot_bytes(engine->op_table, &rule, engine->options.precision);
}

static bool create_arrays(sp_draft_model *draft, size_t n)
{
    draft->draftings = sp_calloc(n, sizeof *draft->draftings);
    draft->spans = sp_calloc(n, sizeof *draft->spans);
    draft->span_of = sp_calloc(n, sizeof(sp_drafting *));
    return draft->draftings && draft->spans && draft->span_of;
}

sp_status sp_draft_model_start(sp_engine *engine, sp_error *error)
{
    sp_draft_model *draft = engine->draft_model;
    const sp_load_progress nobody = {.tell = NULL};
    sp_sequence_memory_options memory = engine->memory.options;
    int32_t widths[SP_ROWS_MAX];
    sp_ops_options options;
    sp_status status;

    if (!draft)
        return SP_OK;
    memory.n_states = is_recurrent(draft) ? engine->n_states : 0;
    memory.n_snapshots = is_recurrent(draft) ? engine->n_snapshots : 0;
    if (sp_sequence_memory_create(&memory, &draft->memory) != SP_OK ||
        !create_arrays(draft, (size_t)engine->options.max_running))
        return sp_fail_memory(error, (size_t)engine->memory.options.n_pages * sizeof(int32_t),
                              "the draft model's KV pages");
    options = options_of(engine, widths);
    status = sp_ops_create(engine->op_table, &options, &draft->ops, error);
    if (status == SP_OK)
        status = sp_model_place(&draft->model, draft->ops, nobody, error);
    if (status != SP_OK)
        return status;
    status = sp_family_prepare(&draft->model, draft->ops);
    return status == SP_OK ? SP_OK
                           : sp_fail(error, status, NULL, "device", -1, "the draft model: %.400s",
                                     sp_device_error_text(engine->device));
}

void sp_draft_model_close(sp_engine *engine)
{
    sp_draft_model *draft = engine->draft_model;

    if (!draft)
        return;
    sp_ops_destroy(draft->ops);
    sp_sequence_memory_destroy(&draft->memory);
    sp_model_close(&draft->model);
    sp_free(draft->draftings);
    sp_free(draft->spans);
    sp_free(draft->span_of);
    sp_free(draft);
    engine->draft_model = NULL;
}

size_t sp_draft_model_bytes(const sp_engine *engine)
{
    const sp_draft_model *draft = engine->draft_model;

    return draft ? draft->model.weight_bytes + draft->ops->kv_bytes + draft->ops->state_bytes +
                       draft->ops->scratch_bytes
                 : 0;
}

sp_status sp_draft_model_begin(const sp_engine *engine, int32_t n_tokens_max,
                               sp_draft_trail *out_trail)
{
    if (!engine->draft_model)
        return SP_OK;
    return sp_held_memory_create(&engine->draft_model->memory, n_tokens_max, &out_trail->memory);
}

/* ---- what is computed of a sequence -------------------------------------------------------- */

/* Commits the rows of the last drafting whose tokens are the sequence's now, but for its last one:
 * its row is computed again where it was a draft that the engine had no room to verify. A state
 * cannot go back over rows that were its sequence's: where none of its tokens has come since, as
 * after a step that failed, no row counts. */
static void commit_rows(sp_draft_model *draft, sp_sequence *sequence)
{
    sp_draft_trail *trail = &sequence->trail;
    int32_t first = trail->memory.n_committed, end = first + trail->n_rows;
    int32_t last = sequence->n_tokens - 1, n = trail->n_tokens;

    end = end < last ? end : last;
    n = n < end ? n : end;
    while (n < end && trail->fed[n - trail->n_tokens] == sequence->tokens[n])
        n++;
    n -= first;
    if (trail->memory.state.in_step && n < trail->memory.state.n_final)
        n = 0;
    sp_sequence_memory_commit(&draft->memory, &trail->memory, sequence->tokens, n);
    trail->n_rows = 0;
    SP_ASSERT(trail->memory.n_committed < sequence->n_tokens);
}

static void settle(sp_draft_model *draft, sp_sequence *sequence)
{
    sp_held_memory *memory = &sequence->trail.memory;

    if (sequence->trail.n_rows > 0)
        commit_rows(draft, sequence);
    if (memory->n_pages > 0)
        return;
    sp_sequence_memory_release(&draft->memory, memory);
    sp_sequence_memory_resume(&draft->memory, memory, sequence->tokens, sequence->n_tokens - 1);
}

/* The most drafts, of n, after n_tokens tokens. Each row of a draft begins with folding the chunks
 * before it, which a state cannot undo: the last one whose logits are read is before the border. */
static int32_t limit_drafts(const sp_draft_model *draft, int32_t n_tokens, int32_t n)
{
    int32_t chunk = draft->memory.options.state_chunk, most = draft->positions - n_tokens + 1;

    if (draft->memory.options.n_states > 0 && chunk - n_tokens % chunk + 1 < most)
        most = chunk - n_tokens % chunk + 1;
    return n < most ? n : most;
}

/* Reserves what the sequence needs for its drafts, or for the next part of what it lacks. */
static sp_drafting begin_drafting(const sp_engine *engine, sp_draft_call *call, int32_t rows_max)
{
    sp_draft_model *draft = engine->draft_model;
    sp_held_memory *memory = &call->sequence->trail.memory;
    int32_t n_tokens = call->sequence->n_tokens;
    int32_t pending = n_tokens - memory->n_committed, n;
    int32_t n_drafts = limit_drafts(draft, n_tokens, call->n_max);
    sp_drafting d = {.call = call, .n_rows = pending < rows_max ? pending : rows_max};

    SP_ASSERT(pending > 0 && call->n_max > 0);
    if (n_drafts <= 0)
        return (sp_drafting){.call = call};
    if (d.n_rows == pending)
        d.n_wanted = n_drafts;
    n = sp_sequence_memory_reserve(&draft->memory, memory,
                                   d.n_rows + (d.n_wanted > 0 ? d.n_wanted - 1 : 0));
    if (n < d.n_rows)
        d = (sp_drafting){.call = call, .n_rows = n};
    else if (d.n_wanted > 0)
        d.n_wanted = n - d.n_rows + 1;
    if (d.n_rows > 0)
        d.state = sp_sequence_memory_begin_step(&draft->memory, memory, d.n_rows);
    return d;
}

/* After a failure nothing is known of the rows. */
static void forget_rows(sp_draft_model *draft, const sp_drafting *d)
{
    sp_sequence_memory_rollback(&draft->memory, &d->call->sequence->trail.memory);
    d->call->n_drafts = 0;
}

static void keep_trail(const sp_drafting *d)
{
    sp_sequence *sequence = d->call->sequence;
    sp_draft_trail *trail = &sequence->trail;
    int32_t n_fed = d->call->n_drafts > 0 ? d->call->n_drafts - 1 : 0;

    trail->n_rows = d->n_rows + n_fed;
    trail->n_tokens = sequence->n_tokens;
    memcpy(trail->fed, sequence->tokens + sequence->n_tokens, (size_t)n_fed * sizeof *trail->fed);
}

/* ---- passes -------------------------------------------------------------------------------- */

/* What a pass does with the state: the first folds over the sequence's tokens, which count; the
 * rows of drafts after them are before the next border. */
static sp_step_state state_of(const sp_drafting *d, int32_t pass)
{
    sp_step_state state = {
        .slot = d->state.slot,
        .folded = d->state.folded,
        .load = d->state.load,
        .save = d->state.save,
        .n_final = d->state.n_final,
    };

    if (pass == 0)
        return state;
    state.folded = d->call->sequence->n_tokens / SP_STATE_CHUNK * SP_STATE_CHUNK;
    state.load = state.save = -1;
    state.n_final = 0;
    return state;
}

/* Adds the rows of the pass number `pass` to it; false: the sequence has none. */
static bool add_span(sp_draft_model *draft, int32_t at, sp_drafting *d, int32_t pass)
{
    const sp_sequence *sequence = d->call->sequence;
    int32_t position =
        pass == 0 ? sequence->trail.memory.n_committed : sequence->n_tokens + pass - 1;

    if (pass == 0 ? d->n_rows == 0 : d->call->n_drafts < pass || d->n_wanted <= pass)
        return false;
    draft->spans[at] = (sp_step_span){
        .tokens = sequence->tokens + position,
        .pages = sequence->trail.memory.pages,
        .position = position,
        .n_rows = pass == 0 ? d->n_rows : 1,
        .state = state_of(d, pass),
    };
    draft->span_of[at] = d;
    return true;
}

/* The drafts of the first n rows of the window, which are those of `of`. */
static sp_status choose(sp_draft_model *draft, sp_drafting *const *of, int32_t n)
{
    sp_status status = SP_OK;

    if (n > 0)
        status = sp_family_logits(&draft->model, draft->ops, draft->rows, n);
    if (n > 0 && status == SP_OK) {
        sp_op_choose(draft->ops, draft->choices, n);
        status = draft->ops->status;
    }
    for (int32_t i = 0; i < n && status == SP_OK; i++) {
        sp_sequence *sequence = of[i]->call->sequence;

        if (draft->choices[i].sampling && draft->choices[i].status == SP_OK)
            sequence->tokens[sequence->n_tokens + of[i]->call->n_drafts++] =
                draft->choices[i].token;
    }
    return status;
}

/* As the engine's own of the token after the first n_tokens; where the grammar ends, nothing is
 * chosen. The masks are the engine's, which needs them later. */
static sp_choice wanted_choice(sp_engine *engine, sp_sequence *sequence, int32_t n_tokens,
                               int32_t index)
{
    sp_choice choice = sp_engine_choice(sequence, n_tokens);

    choice.mask = sp_constrain_mask(engine, sequence, n_tokens, index, &choice.constrained, NULL);
    choice.adjusted |= choice.mask != NULL;
    if (choice.constrained != SP_OK)
        choice.sampling = NULL;
    return choice;
}

/* The next draft of each span whose sequence has all of its tokens computed. */
static sp_status choose_drafts(sp_engine *engine, int32_t n_spans)
{
    sp_draft_model *draft = engine->draft_model;
    sp_drafting *of[SP_LOGIT_ROWS_MAX];
    int32_t row = 0, n = 0;
    sp_status status = SP_OK;

    for (int32_t s = 0; s < n_spans && status == SP_OK; s++) {
        sp_drafting *d = draft->span_of[s];

        row += draft->spans[s].n_rows;
        if (d->n_wanted == 0)
            continue;
        draft->rows[n] = row - 1;
        draft->choices[n] = wanted_choice(engine, d->call->sequence,
                                          draft->spans[s].position + draft->spans[s].n_rows, n);
        of[n++] = d;
        if (n < draft->ops->window)
            continue;
        status = choose(draft, of, n);
        n = 0;
    }
    return status == SP_OK ? choose(draft, of, n) : status;
}

static void note_pass(sp_draft_model *draft, int32_t n_spans, double seconds)
{
    double each = seconds / n_spans;

    if (draft->draft_seconds <= 0)
        draft->draft_seconds = each;
    draft->draft_seconds += PASS_WEIGHT * (each - draft->draft_seconds);
}

/* SP_AGAIN: no sequence had a row for it. */
static sp_status run_pass(sp_engine *engine, int32_t n_draftings, int32_t pass)
{
    sp_draft_model *draft = engine->draft_model;
    sp_step step = {.spans = draft->spans};
    double began = sp_clock_seconds();
    sp_status status;

    for (int32_t i = 0; i < n_draftings; i++) {
        if (!add_span(draft, step.n_spans, &draft->draftings[i], pass))
            continue;
        step.n_rows += draft->spans[step.n_spans++].n_rows;
    }
    if (step.n_spans == 0)
        return SP_AGAIN;
    status = sp_family_forward(&draft->model, draft->ops, &step);
    if (status == SP_OK)
        status = choose_drafts(engine, step.n_spans);
    if (status == SP_OK && pass > 0)
        note_pass(draft, step.n_spans, sp_clock_seconds() - began);
    return status;
}

/* ---- what the scheduler asks --------------------------------------------------------------- */

static void propose(void *user, sp_draft_call *calls, int32_t n)
{
    sp_engine *engine = user;
    sp_draft_model *draft = engine->draft_model;
    int32_t rows = engine->options.step_rows, chunk = engine->scheduler.options.prefill_chunk;
    double began = sp_clock_seconds();
    sp_status status = SP_OK;

    for (int32_t i = 0; i < n; i++) {
        int32_t most = rows - (n - i - 1); /* one is left for each of the others */

        settle(draft, calls[i].sequence);
        draft->draftings[i] = begin_drafting(engine, &calls[i], most < chunk ? most : chunk);
        rows -= draft->draftings[i].n_rows;
    }
    for (int32_t pass = 0; status == SP_OK; pass++)
        status = run_pass(engine, n, pass);
    for (int32_t i = 0; i < n; i++) {
        if (status == SP_AGAIN)
            keep_trail(&draft->draftings[i]);
        else
            forget_rows(draft, &draft->draftings[i]);
    }
    engine->stats.draft_seconds += sp_clock_seconds() - began;
}

static void release(void *user, sp_sequence *sequence)
{
    sp_engine *engine = user;

    sp_sequence_memory_release(&engine->draft_model->memory, &sequence->trail.memory);
    sequence->trail.n_rows = 0;
}

static double seconds_of_draft(void *user)
{
    const sp_engine *engine = user;

    return engine->untimed ? 0 : engine->draft_model->draft_seconds;
}

sp_draft_model_calls sp_draft_model_scheduled(sp_engine *engine)
{
    if (!engine->draft_model)
        return (sp_draft_model_calls){.user = NULL};
    return (sp_draft_model_calls){engine, propose, release, seconds_of_draft};
}
