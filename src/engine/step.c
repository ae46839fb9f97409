/*
 * step.c: one step: plan the batch, route it, run the forward pass, then compute the logits of the
 * rows that need them, window by window, and turn each into a token and an event.
 *
 * A draft's row is an ordinary row, whose logits are used as long as every choice before it in the
 * step was the draft in its place: then the row is what a step of its own would have computed.
 *
 * A step allocates nothing but the text of events, which grows to its largest size once, and what
 * keeps the experts of the tokens of a request that wants them.
 */
#include "base/alloc.h"
#include "base/clock.h"
#include "base/error.h"
#include "engine/constrain.h"
#include "engine/engine_state.h"

#include <string.h>

_Static_assert(SP_STATE_CHUNK + SP_DRAFT_TOKENS_MAX <= SP_STATE_RING,
               "an open chunk, the row after it and all drafts fit in a state's ring");

/* How long a step without anything to run waits for an adapter in progress. */
#define LOAD_WAIT_MS 10

/* The state of one step. */
typedef struct sp_step_run {
    sp_engine *engine;
    const sp_batch *call; /* what the forward pass ran */
    bool routing_taken;   /* of the call */
    sp_request_event_fn on_event;
    void *user;
    sp_status status; /* without on_event the first failure of a single request, else SP_OK */
    sp_status device; /* SP_ERR_DEVICE: the device failed while results were read */
    sp_error *error;
} step_run;

/* ---- routing ------------------------------------------------------------------------------- */

/* Without a pool all rows are the base's, and the forward pass reads no plan. */
static sp_status route(sp_engine *engine, const sp_batch *batch, sp_error *error)
{
    if (!engine->pool)
        return SP_OK;
    for (int32_t i = 0; i < batch->n_entries; i++) {
        const sp_sequence *sequence = batch->entries[i].sequence;

        engine->spans[i] = (sp_route_span){
            .struct_bytes = sizeof engine->spans[i],
            .handle = {sequence->hold.version ? sequence->hold.slot : SP_SLOT_BASE,
                       sequence->hold.generation},
            .n_rows = batch->entries[i].n_rows,
            .scale = sequence->request.lora_scale,
        };
        sp_stage_use(engine->stage, &sequence->hold, (uint64_t)batch->entries[i].n_rows);
    }
    return sp_plan_build(engine->plan, engine->pool, engine->spans, batch->n_entries, batch->n_rows,
                         error);
}

/* ---- the forward pass ---------------------------------------------------------------------- */

/* What the step does with the state of an entry's sequence; its drafts may be rejected. */
static sp_step_state state_of(sp_engine *engine, const sp_batch_entry *entry)
{
    sp_state_step step = sp_sequence_memory_begin_step(&engine->memory, &entry->sequence->memory,
                                                       entry->n_rows - entry->n_drafts);

    return (sp_step_state){
        .slot = step.slot,
        .folded = step.folded,
        .load = step.load,
        .save = step.save,
        .n_final = step.n_final,
    };
}

static sp_status run_forward(sp_engine *engine, const sp_batch *batch)
{
    sp_step step = {
        .spans = engine->step_spans,
        .n_spans = batch->n_entries,
        .n_rows = batch->n_rows,
        .plan = engine->plan,
    };

    for (int32_t i = 0; i < batch->n_entries; i++) {
        const sp_sequence *sequence = batch->entries[i].sequence;

        engine->step_spans[i] = (sp_step_span){
            .tokens = sequence->tokens + sequence->memory.n_committed,
            .pages = sequence->memory.pages,
            .position = sequence->memory.n_committed,
            .n_rows = batch->entries[i].n_rows,
            .state = state_of(engine, &batch->entries[i]),
        };
        step.routing |= sequence->routing.n_ids > 0;
    }
    return sp_family_forward(&engine->model, engine->ops, &step);
}

/* ---- experts ------------------------------------------------------------------------------- */

static bool reserve_routing(sp_sequence_routing *routing, int32_t n_rows)
{
    int32_t capacity = routing->capacity > 0 ? routing->capacity : 64;
    uint16_t *grown;

    if (n_rows <= routing->capacity)
        return true;
    while (capacity < n_rows)
        capacity *= 2;
    grown = sp_realloc(routing->ids, (size_t)capacity * (size_t)routing->n_ids * sizeof *grown);
    if (!grown)
        return false;
    routing->ids = grown;
    routing->capacity = capacity;
    return true;
}

/* The experts of n rows of a sequence, the first of which is the step's `row`. */
static void keep_routing(const sp_moe_shape *moe, const sp_routing *step, int32_t row,
                         sp_sequence_routing *routing, int32_t position, int32_t n)
{
    int32_t per_token = moe->per_token;

    if (!reserve_routing(routing, position + n)) {
        routing->failed = true;
        return;
    }
    for (int32_t layer = 0; layer < moe->layers; layer++)
        for (int32_t i = 0; i < n; i++) {
            const int32_t *from =
                step->expert + ((int64_t)layer * step->rows + row + i) * per_token;
            uint16_t *to =
                routing->ids + (int64_t)(position + i) * routing->n_ids + layer * per_token;

            for (int32_t j = 0; j < per_token; j++)
                to[j] = (uint16_t)from[j];
        }
}

/* Once a call, when the pass is done in any case. */
static void take_routing(step_run *run)
{
    sp_engine *engine = run->engine;
    sp_routing routing = {.rows = 0};
    int32_t row = 0;

    for (int32_t i = 0; i < run->call->n_entries && !run->routing_taken; i++) {
        const sp_batch_entry *entry = &run->call->entries[i];
        sp_sequence *sequence = entry->sequence;

        if (sequence->routing.n_ids > 0) {
            if (!routing.expert && sp_op_read_routing(engine->ops, &routing) != SP_OK) {
                run->device = SP_ERR_DEVICE;
                return;
            }
            keep_routing(&engine->moe, &routing, row, &sequence->routing,
                         engine->step_spans[i].position, entry->n_rows);
        }
        row += entry->n_rows;
    }
    run->routing_taken = true;
}

/* ---- tokens -------------------------------------------------------------------------------- */

/* Moves `bytes` bytes of the held text to the event's text. */
static void show_held(sp_engine *engine, sp_sequence *sequence, size_t bytes)
{
    sp_text *held = &sequence->text.held;

    if (bytes == 0)
        return;
    sp_text_add_bytes(&engine->event_text, held->data, bytes);
    memmove(held->data, held->data + bytes, held->bytes - bytes);
    held->bytes -= bytes;
    sequence->text.n_shown += bytes;
}

/*
 * Appends the text that a new token completes to engine->event_text. Returns true when a stop
 * string is complete. `last`: nothing follows, so all held text is released.
 */
static bool advance_text(sp_engine *engine, sp_sequence *sequence, int32_t token, bool eos,
                         bool last)
{
    sp_text *decoded = &engine->decoded;
    bool stopped;
    size_t shown;

    sp_text_clear(&engine->event_text);
    sp_text_clear(decoded);
    if (!engine->tokenizer)
        return false;
    if (!eos)
        sp_decoder_push(&sequence->text.decoder, token, decoded);
    if (last)
        sp_decoder_flush(&sequence->text.decoder, decoded);
    if (decoded->failed)
        engine->event_text.failed = true;
    if (!sequence->text.stop || sequence->trace.new_tokens <= sequence->sampling.ends.min_tokens) {
        sp_text_add_bytes(&engine->event_text, decoded->data, decoded->bytes);
        return false;
    }
    sp_text_add_bytes(&sequence->text.held, decoded->data, decoded->bytes);
    if (sequence->text.held.failed) {
        engine->event_text.failed = true;
        return false;
    }
    stopped = sp_stop_push(sequence->text.stop, decoded->data, decoded->bytes, &shown);
    if (stopped || !last)
        show_held(engine, sequence, shown - sequence->text.n_shown);
    else
        show_held(engine, sequence, sequence->text.held.bytes);
    return stopped;
}

/* The logprob of a token and of the best ids at its place; n_top -1 where none was requested. */
typedef struct token_score {
    float logprob, processed;
    int32_t n_top;
} token_score;

static const token_score no_score = {.n_top = -1};

/* Sends an event with the text in engine->event_text. */
static void emit(step_run *run, const sp_sequence *sequence, sp_request_event event,
                 token_score score)
{
    const sp_text *text = &run->engine->event_text;

    event.struct_bytes = sizeof event;
    event.request = sequence->id;
    event.text = text->data ? text->data : "";
    event.text_bytes = text->bytes;
    event.trace = &sequence->trace;
    if (score.n_top >= 0) {
        event.logprob = score.logprob;
        event.processed_logprob = score.processed;
        event.top = run->engine->top;
        event.n_top = score.n_top;
    }
    if (event.finish != SP_FINISH_NONE && sequence->routing.n_ids > 0) {
        event.routed_experts = sequence->routing.ids;
        event.n_routed = event.position; /* the rows of the tokens before it */
    }
    if (run->on_event)
        run->on_event(run->user, &event);
}

static void finish_sequence(step_run *run, sp_sequence *sequence)
{
    run->engine->finished[run->engine->n_finished++] = sequence;
}

/* Rows are in the order of sequences, so one that has failed is the last of the list. */
static bool is_finished(const sp_engine *engine, const sp_sequence *sequence)
{
    return engine->n_finished > 0 && engine->finished[engine->n_finished - 1] == sequence;
}

/* Tells of a request that is dropped; where nobody takes events, by the step's status and error. */
static void emit_failure(step_run *run, const sp_sequence *sequence, sp_status status,
                         const sp_error *error)
{
    sp_request_event event = {
        .struct_bytes = sizeof event,
        .request = sequence->id,
        .token = -1,
        .position = sequence->n_tokens,
        .text = "",
        .finish = SP_FINISH_FAILED,
        .failure = status,
        .error = error,
        .trace = &sequence->trace,
    };

    if (run->on_event) {
        run->on_event(run->user, &event);
    } else if (run->status == SP_OK) {
        run->status = status;
        if (run->error)
            *run->error = *error;
    }
}

static void fail_sequence(step_run *run, sp_sequence *sequence, sp_status status, const char *why)
{
    sp_error error;

    sp_fail(&error, status, NULL, NULL, sequence->id, "request %lld was dropped: %s",
            (long long)sequence->id, why);
    emit_failure(run, sequence, status, &error);
    finish_sequence(run, sequence);
}

/* Where an adapter is applied it is the cause: the base's own logits are finite, or requests of the
 * base would fail too. */
static void fail_logits(step_run *run, sp_sequence *sequence, sp_status status)
{
    bool adapted = sequence->hold.version && sequence->request.lora_scale > 0.0f;
    const char *name =
        adapted ? sp_stage_version_name(sequence->hold.version) : run->engine->base_name;
    sp_error error;

    sp_fail(&error, status, adapted ? SP_ENGINE_ADAPTER_NON_FINITE : SP_ENGINE_LOGITS_NON_FINITE,
            name, sequence->id,
            "request %lld was dropped: its logits with %s \"%s\" are not finite",
            (long long)sequence->id, adapted ? "the adapter" : "the base", name);
    emit_failure(run, sequence, status, &error);
    finish_sequence(run, sequence);
}

static void note_token(sp_engine *engine, sp_sequence *sequence, int32_t token)
{
    sequence->tokens[sequence->n_tokens++] = token;
    sequence->trace.new_tokens++;
    if (sequence->trace.new_tokens == 1)
        sequence->trace.first_token = sp_clock_seconds();
    engine->stats.tokens++;
}

/* Before the token takes the place of its draft, if there is one. */
static void meet_draft(sp_engine *engine, sp_sequence *sequence, int32_t token)
{
    if (!sp_draft_meet(&sequence->draft, token, sequence->tokens + sequence->n_tokens))
        return;
    sequence->trace.accepted_tokens++;
    engine->stats.accepted_tokens++;
    engine->stats.model_accepted_tokens += sequence->draft.by == SP_DRAFT_BY_MODEL;
}

static void take_token(step_run *run, sp_sequence *sequence, int32_t token, token_score score)
{
    sp_engine *engine = run->engine;
    bool eos = sp_ends_has(&sequence->sampling.ends, token);
    bool full = sequence->n_tokens + 1 - sequence->request.n_prompt >= sequence->request.max_tokens;
    bool over;
    sp_finish finish = SP_FINISH_NONE;

    meet_draft(engine, sequence, token);
    note_token(engine, sequence, token);
    over = eos || sp_constrain_is_over(sequence);
    if (advance_text(engine, sequence, token, eos, over || full) || over)
        finish = SP_FINISH_STOP;
    else if (full)
        finish = SP_FINISH_LENGTH;
    if (engine->event_text.failed) {
        fail_sequence(run, sequence, SP_ERR_MEMORY, "out of memory for its text");
        return;
    }
    emit(run, sequence,
         (sp_request_event){.token = token, .position = sequence->n_tokens - 1, .finish = finish},
         score);
    if (finish != SP_FINISH_NONE)
        finish_sequence(run, sequence);
}

/* ---- logits -------------------------------------------------------------------------------- */

/* Whether a token is to be chosen after a position: the last one, or that of a draft. */
static bool wants_token(const sp_sequence *sequence, int32_t position)
{
    return position >= sequence->n_tokens - 1 &&
           position + 1 - sequence->request.n_prompt < sequence->request.max_tokens;
}

/* The logprob of `token` by the raw logits of a row of the window; the best ids go to
 * engine->top. */
static sp_status score_token(sp_engine *engine, const sp_sequence *sequence, int32_t index,
                             int32_t token, token_score *out_score)
{
    int32_t vocab = engine->model.shape.vocab;

    out_score->n_top =
        sequence->request.top_logprobs < vocab ? sequence->request.top_logprobs : vocab;
    return sp_op_score(engine->ops, index, token, sequence->request.top_logprobs,
                       &out_score->logprob, engine->top);
}

void sp_processed_free(sp_processed *processed)
{
    sp_aligned_free(processed->scratch);
    sp_aligned_free(processed->logits);
    *processed = (sp_processed){0};
}

/* The row's logits with what the request changes, as a choice sees them. */
static const float *process_logits(sp_engine *engine, const sp_sequence *sequence, int32_t index,
                                   int32_t n_tokens)
{
    const sp_sequence_sampling *sampling = &sequence->sampling;
    const uint32_t *mask = engine->choices[index].mask;
    int32_t vocab = engine->model.shape.vocab;
    int32_t n_given = sequence->request.n_given < n_tokens ? sequence->request.n_given : n_tokens;
    float *logits = engine->processed.logits;

    memcpy(logits, sp_op_read_logits(engine->ops, index), (size_t)vocab * sizeof *logits);
    if (n_tokens - n_given < sampling->ends.min_tokens)
        sp_ends_forbid(&sampling->ends, logits);
    if (sampling->adjusted)
        sp_penalties_apply(&sampling->penalties, sequence->tokens, n_given, n_tokens,
                           engine->processed.scratch, logits);
    if (mask)
        sp_token_mask_apply(mask, vocab, logits);
    return logits;
}

/* The logprob of the token after the first n_tokens in the distribution that it is drawn from. */
static sp_status score_processed(sp_engine *engine, const sp_sequence *sequence, int32_t index,
                                 int32_t n_tokens, int32_t token, token_score *score)
{
    const float *logits;

    if (!sequence->request.processed_logprobs)
        return SP_OK;
    logits = process_logits(engine, sequence, index, n_tokens);
    return sp_sample_logprob(engine->kernels, logits, engine->model.shape.vocab,
                             &sequence->sampling.params, engine->processed.scratch, token,
                             &score->processed, NULL);
}

/* The token after the position is one of the prompt, and its logprob was requested. */
static sp_status score_prompt(step_run *run, sp_sequence *sequence, int32_t index, int32_t position)
{
    int32_t token = sequence->tokens[position + 1];
    token_score score = no_score;
    sp_status status = score_token(run->engine, sequence, index, token, &score);

    if (status == SP_OK)
        status = score_processed(run->engine, sequence, index, position + 1, token, &score);
    if (status != SP_OK)
        return status;
    sequence->sampling.n_scored = position + 1;
    sp_text_clear(&run->engine->event_text);
    emit(run, sequence,
         (sp_request_event){.token = token, .position = position + 1, .is_prompt = true}, score);
    return SP_OK;
}

/* Its output cannot go on in its grammar. */
static void fail_constrained(step_run *run, sp_sequence *sequence, int32_t index, sp_status status)
{
    sp_error why = {.position = -1}, error;

    (void)sp_constrain_mask(run->engine, sequence, sequence->n_tokens, index, &status, &why);
    sp_fail(&error, status, why.code, NULL, sequence->id, "request %lld was dropped: %s",
            (long long)sequence->id, why.text);
    emit_failure(run, sequence, status, &error);
    finish_sequence(run, sequence);
}

sp_choice sp_engine_choice(const sp_sequence *sequence, int32_t n_tokens)
{
    return (sp_choice){
        .sampling = &sequence->sampling.params,
        .penalties = &sequence->sampling.penalties,
        .ends = &sequence->sampling.ends,
        .tokens = sequence->tokens,
        .n_prompt = sequence->request.n_prompt,
        .n_tokens = n_tokens,
        .adjusted = sequence->sampling.adjusted,
        .given = -1,
        .n_top = -1,
    };
}

/* What is wanted of a row of the window: a token, its score, or that of one that is given. */
static sp_choice wanted_choice(const sp_sequence *sequence, int32_t position)
{
    bool scores = sp_sequence_scores(sequence, position);
    bool chooses = wants_token(sequence, position);

    sp_choice choice = sp_engine_choice(sequence, position + 1);

    if (!chooses)
        choice.sampling = NULL;
    if (scores)
        choice.given = sequence->tokens[position + 1];
    if (scores || (chooses && sequence->request.logprobs))
        choice.n_top = sequence->request.top_logprobs;
    return choice;
}

static void choose_tokens(sp_engine *engine)
{
    for (int32_t i = 0; i < engine->n_logit_rows; i++) {
        const sp_logit_row *row = &engine->logit_rows[i];

        engine->choices[i] = wanted_choice(row->sequence, row->position);
    }
    sp_constrain_window(engine);
    sp_op_choose(engine->ops, engine->choices, engine->n_logit_rows);
}

static sp_status use_token(step_run *run, sp_sequence *sequence, int32_t index)
{
    const sp_choice *choice = &run->engine->choices[index];
    token_score score = no_score;
    sp_status status = choice->status;

    if (status == SP_OK && sequence->request.logprobs)
        status = score_token(run->engine, sequence, index, choice->token, &score);
    if (status == SP_OK && sequence->request.logprobs)
        status =
            score_processed(run->engine, sequence, index, choice->n_tokens, choice->token, &score);
    if (status == SP_OK)
        take_token(run, sequence, choice->token, score);
    return status;
}

/* Uses row `index` of the window. */
static void use_logits(step_run *run, int32_t index)
{
    sp_engine *engine = run->engine;
    sp_sequence *sequence = engine->logit_rows[index].sequence;
    int32_t position = engine->logit_rows[index].position;
    sp_status status = SP_OK;

    if (is_finished(engine, sequence) || sequence->draft.rejected)
        return;
    if (sequence->routing.failed) {
        fail_sequence(run, sequence, SP_ERR_MEMORY, "out of memory for its experts");
        return;
    }
    sequence->draft.n_used += position == sequence->n_tokens - 1;
    if (sequence->request.logits_fn && position >= sequence->request.logits_from)
        sequence->request.logits_fn(sequence->request.logits_user, position,
                                    sp_op_read_logits(engine->ops, index),
                                    engine->model.shape.vocab);
    if (sp_sequence_scores(sequence, position)) {
        status = score_prompt(run, sequence, index, position);
    } else if (engine->choices[index].constrained != SP_OK) {
        fail_constrained(run, sequence, index, engine->choices[index].constrained);
    } else if (engine->choices[index].sampling) {
        status = use_token(run, sequence, index);
    } else if (position == sequence->n_tokens - 1) {
        sp_text_clear(&engine->event_text);
        emit(run, sequence,
             (sp_request_event){.token = -1, .position = position + 1, .finish = SP_FINISH_LENGTH},
             no_score);
        finish_sequence(run, sequence);
    }
    if (status != SP_OK && engine->ops->status != SP_ERR_DEVICE)
        fail_logits(run, sequence, status);
}

static void flush_logits(step_run *run)
{
    sp_engine *engine = run->engine;
    int32_t rows[SP_LOGIT_ROWS_MAX] = {0};
    int32_t n = engine->n_logit_rows;
    sp_status status;

    if (n == 0)
        return;
    for (int32_t i = 0; i < n; i++)
        rows[i] = engine->logit_rows[i].row;
    status = sp_family_logits(&engine->model, engine->ops, rows, n);
    if (status == SP_OK) {
        choose_tokens(engine);
        status = engine->ops->status;
    }
    if (status == SP_OK)
        take_routing(run);
    if (status == SP_ERR_DEVICE || run->device != SP_OK)
        n = 0;
    for (int32_t i = 0; i < n && status != SP_OK; i++) {
        sp_sequence *sequence = engine->logit_rows[i].sequence;

        if (!is_finished(engine, sequence))
            fail_sequence(run, sequence, status, "its logits could not be adapted");
    }
    for (int32_t i = 0; i < n && status == SP_OK; i++)
        use_logits(run, i);
    engine->n_logit_rows = 0;
    if (engine->ops->status == SP_ERR_DEVICE)
        run->device = SP_ERR_DEVICE;
}

/* Whether the row's logits are needed: for a token, a logprob, a callback, or a prefill's end;
 * those of drafts, until one before them is rejected. */
static bool wants_logits(const sp_sequence *sequence, int32_t position)
{
    if (sequence->draft.rejected)
        return false;
    return position >= sequence->n_tokens - 1 || sp_sequence_scores(sequence, position) ||
           (sequence->request.logits_fn && position >= sequence->request.logits_from);
}

static void take_logits(step_run *run, const sp_batch *batch)
{
    sp_engine *engine = run->engine;
    int32_t row = 0;

    for (int32_t e = 0; e < batch->n_entries && run->device == SP_OK; e++) {
        sp_sequence *sequence = batch->entries[e].sequence;

        for (int32_t i = 0; i < batch->entries[e].n_rows; i++, row++) {
            int32_t position = engine->step_spans[e].position + i;

            if (!wants_logits(sequence, position))
                continue;
            engine->logit_rows[engine->n_logit_rows++] =
                (sp_logit_row){.row = row, .position = position, .sequence = sequence};
            if (engine->n_logit_rows == engine->ops->window)
                flush_logits(run);
        }
    }
    flush_logits(run);
}

static bool has_ended(const sp_engine *engine, const sp_sequence *sequence)
{
    for (int32_t i = 0; i < engine->n_finished; i++)
        if (engine->finished[i] == sequence)
            return true;
    return false;
}

static void read_faults(step_run *run, const sp_batch *batch)
{
    sp_engine *engine = run->engine;

    memset(engine->faults, 0, (size_t)batch->n_entries * sizeof *engine->faults);
    if (run->device == SP_OK &&
        sp_op_faults(engine->ops, engine->faults, batch->n_entries) == SP_ERR_DEVICE)
        run->device = SP_ERR_DEVICE;
}

/* Before logits are used: keys or values that are not finite may be a draft's, and have reached the
 * request's own rows. None of the rows counts, and the next step computes its own alone. */
static void reject_faulty_drafts(step_run *run, const sp_batch *batch)
{
    int32_t n_drafts = 0;

    for (int32_t i = 0; i < batch->n_entries; i++)
        n_drafts += batch->entries[i].n_drafts;
    if (n_drafts == 0)
        return;
    read_faults(run, batch);
    for (int32_t i = 0; i < batch->n_entries; i++)
        if (run->engine->faults[i] && batch->entries[i].n_drafts > 0)
            batch->entries[i].sequence->draft.rejected = true;
}

/* A request whose keys or values are not finite is told before it has a token to fail at. */
static void take_faults(step_run *run, const sp_batch *batch)
{
    const sp_engine *engine = run->engine;

    read_faults(run, batch);
    for (int32_t i = 0; i < batch->n_entries && run->device == SP_OK; i++)
        if (engine->faults[i] && batch->entries[i].n_drafts == 0 &&
            !has_ended(engine, batch->entries[i].sequence))
            fail_logits(run, batch->entries[i].sequence, SP_ERR_INPUT);
}

/* ---- the step ------------------------------------------------------------------------------ */

static void count_rows(sp_engine *engine, const sp_batch_entry *entry)
{
    sp_request_trace *trace = &entry->sequence->trace;

    if (sp_sequence_pending(entry->sequence) == 1)
        engine->stats.decode_rows++;
    else
        engine->stats.prefill_rows += (uint64_t)(entry->n_rows - entry->n_drafts);
    if (entry->n_drafts == 0)
        return;
    trace->drafted_tokens += entry->n_drafts;
    trace->verify_steps++;
    engine->stats.drafted_tokens += (uint64_t)entry->n_drafts;
    if (entry->sequence->draft.by == SP_DRAFT_BY_MODEL)
        engine->stats.model_drafted_tokens += (uint64_t)entry->n_drafts;
    engine->stats.verify_steps++;
}

static void count_step(sp_engine *engine, const sp_batch *batch, double began)
{
    engine->stats.steps++;
    engine->stats.rows += (uint64_t)batch->n_rows;
    for (int32_t i = 0; i < batch->n_entries; i++) {
        sp_request_trace *trace = &batch->entries[i].sequence->trace;

        if (trace->scheduled <= 0)
            trace->scheduled = began;
        count_rows(engine, &batch->entries[i]);
    }
}

/* Its adapter is not available any more; the others continue. */
void sp_engine_refused(void *user, sp_sequence *sequence, const sp_error *error)
{
    sp_engine *engine = user;
    sp_error told;

    sp_fail(&told, error->status, error->code, error->subject, sequence->id,
            "request %lld was dropped: %s", (long long)sequence->id, error->text);
    emit_failure(engine->run, sequence, error->status, &told);
    sp_engine_drop(engine, sequence);
}

/* Nothing runs: there are no requests, or all wait for adapters in progress. */
static sp_status run_nothing(const step_run *run)
{
    sp_engine *engine = run->engine;
    double began;

    if (run->status != SP_OK)
        return run->status;
    if (!sp_scheduler_is_waiting(&engine->scheduler))
        return SP_AGAIN;
    began = sp_clock_seconds();
    sp_stage_wait(engine->stage, LOAD_WAIT_MS);
    engine->stats.load_seconds += sp_clock_seconds() - began;
    return SP_OK;
}

/* A device says more than its status. */
static void fail_step(const sp_engine *engine, sp_status status, sp_error *error)
{
    const char *words = status == SP_ERR_DEVICE ? sp_device_error_text(engine->device) : "";

    sp_fail(error, status, NULL, NULL, -1, "a step failed: %s%s%.300s", sp_status_text(status),
            words[0] ? ": " : "", words);
}

/* None of the rows from an entry on counts; the next step plans them again. */
static void roll_back(sp_engine *engine, const sp_batch *batch, int32_t first)
{
    for (int32_t i = first; i < batch->n_entries; i++)
        sp_scheduler_advance(&engine->scheduler, batch->entries[i].sequence, 0);
}

/*
 * Commits the rows whose logits a run without drafts would have computed: of the drafts' rows those
 * that were used. Where keys or values are not finite none counts, and a sequence that had drafts
 * goes on without any; nor where a request has failed before the choice that its drafts follow.
 */
static void advance(sp_engine *engine, const sp_batch *batch)
{
    for (int32_t i = 0; i < batch->n_entries; i++) {
        const sp_batch_entry *entry = &batch->entries[i];
        int32_t n_rows = entry->n_rows, n_used = entry->sequence->draft.n_used;

        if (engine->faults[i] || (entry->n_drafts > 0 && n_used == 0))
            n_rows = 0;
        else if (entry->n_drafts > 0)
            n_rows += n_used - entry->n_drafts - 1;
        sp_scheduler_advance(&engine->scheduler, entry->sequence, n_rows);
        if (entry->sequence->routing.n_rows < entry->sequence->memory.n_committed)
            entry->sequence->routing.n_rows = entry->sequence->memory.n_committed;
        sp_draft_end(&entry->sequence->draft, entry->n_drafts,
                     engine->scheduler.draft_costs[entry->sequence->draft.by]);
        if (engine->faults[i])
            entry->sequence->draft = sp_draft_create(0);
    }
}

/* The entries from `first` on that run in one call: all, or with no_batch_verify a verifying one
 * alone, and those between two such. */
static sp_batch next_call(const sp_engine *engine, const sp_batch *batch, int32_t first)
{
    sp_batch call = {.entries = batch->entries + first};

    for (int32_t i = first; i < batch->n_entries; i++) {
        bool alone = engine->options.no_batch_verify && batch->entries[i].n_drafts > 0;

        if (alone && call.n_entries > 0)
            break;
        call.n_entries++;
        call.n_rows += batch->entries[i].n_rows;
        if (alone)
            break;
    }
    return call;
}

static sp_status run_call(step_run *run, const sp_batch *batch, double began, sp_error *error)
{
    sp_engine *engine = run->engine;
    sp_status status = route(engine, batch, error);

    if (status != SP_OK)
        return status;
    status = run_forward(engine, batch);
    if (status != SP_OK) {
        fail_step(engine, status, error);
        return status;
    }
    count_step(engine, batch, began);
    engine->n_logit_rows = 0;
    run->call = batch;
    run->routing_taken = false;
    reject_faulty_drafts(run, batch);
    take_logits(run, batch);
    if (run->device == SP_OK)
        take_routing(run);
    take_faults(run, batch);
    if (run->device != SP_OK)
        fail_step(engine, run->device, error);
    else
        advance(engine, batch);
    return run->device;
}

static sp_status run_batch(step_run *run, const sp_batch *batch, double began, sp_error *error)
{
    sp_engine *engine = run->engine;
    sp_status status = SP_OK;
    int32_t done = 0;

    engine->n_finished = 0;
    while (done < batch->n_entries && status == SP_OK) {
        sp_batch call = next_call(engine, batch, done);

        status = run_call(run, &call, began, error);
        if (status == SP_OK)
            done += call.n_entries;
    }
    roll_back(engine, batch, done);
    for (int32_t i = 0; i < engine->n_finished; i++)
        sp_engine_drop(engine, engine->finished[i]);
    return status;
}

/* Steps with rows of prompts are of another kind: few of their rows have logits. */
static void note_cost(sp_engine *engine, const sp_batch *batch, double began)
{
    for (int32_t i = 0; i < batch->n_entries; i++)
        if (batch->entries[i].n_rows - batch->entries[i].n_drafts > 1)
            return;
    if (!engine->untimed)
        sp_step_cost_note(&engine->step_cost, batch->n_rows, sp_clock_seconds() - began);
}

sp_status sp_engine_step(sp_engine *engine, sp_request_event_fn on_event, void *user,
                         sp_error *error)
{
    step_run run = {
        .engine = engine, .on_event = on_event, .user = user, .status = SP_OK, .error = error};
    double began = sp_clock_seconds(), planned;
    const sp_batch *batch;
    sp_status status;

    if (!engine)
        return sp_fail_null(error, "engine");
    if (engine->stage) {
        sp_stage_poll(engine->stage);
        engine->stats.load_seconds += sp_clock_seconds() - began;
    }
    engine->run = &run;
    batch = sp_scheduler_plan(&engine->scheduler);
    engine->run = NULL;
    if (batch->n_entries == 0)
        return run_nothing(&run);
    planned = sp_clock_seconds();
    status = run_batch(&run, batch, began, error);
    if (status != SP_OK)
        return status;
    note_cost(engine, batch, planned);
    engine->stats.step_seconds += sp_clock_seconds() - began;
    return run.status;
}
