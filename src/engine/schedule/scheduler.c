#include "engine/schedule/scheduler.h"

#include "base/alloc.h"
#include "base/assert.h"

#include <string.h>

/* ---- ordered lists of sequences ------------------------------------------------------------ */

static void insert_by_id(sp_sequence **list, int32_t *n, sp_sequence *sequence)
{
    int32_t at = *n;

    while (at > 0 && list[at - 1]->id > sequence->id) {
        list[at] = list[at - 1];
        at--;
    }
    SP_ASSERT(at == 0 || list[at - 1]->id < sequence->id);
    list[at] = sequence;
    (*n)++;
}

/* Removes the sequence from the list; false where it is not in it. */
static bool take_out(sp_sequence **list, int32_t *n, const sp_sequence *sequence)
{
    for (int32_t i = 0; i < *n; i++) {
        if (list[i] != sequence)
            continue;
        memmove(&list[i], &list[i + 1], (size_t)(*n - i - 1) * sizeof *list);
        (*n)--;
        return true;
    }
    return false;
}

/* ---- set-up -------------------------------------------------------------------------------- */

sp_status sp_scheduler_create(const sp_scheduler_options *options, sp_scheduler *out_scheduler)
{
    sp_scheduler scheduler = {.options = *options};
    size_t n = (size_t)options->max_running;

    scheduler.running = sp_calloc(n, sizeof(sp_sequence *));
    scheduler.batch.entries = sp_calloc(n, sizeof(sp_batch_entry));
    scheduler.draft_calls = sp_calloc(n, sizeof(sp_draft_call));
    if (!scheduler.running || !scheduler.batch.entries || !scheduler.draft_calls) {
        sp_scheduler_destroy(&scheduler);
        return SP_ERR_MEMORY;
    }
    *out_scheduler = scheduler;
    return SP_OK;
}

void sp_scheduler_destroy(sp_scheduler *scheduler)
{
    sp_free(scheduler->batch.entries);
    sp_free(scheduler->draft_calls);
    sp_free(scheduler->running);
    sp_free(scheduler->waiting);
    *scheduler = (sp_scheduler){0};
}

/* Reserves room for every sequence, so that a preemption never allocates. */
static sp_status reserve_waiting(sp_scheduler *scheduler)
{
    int32_t need = scheduler->n_waiting + scheduler->n_running + 1;
    int32_t capacity = scheduler->waiting_capacity ? scheduler->waiting_capacity : 16;
    sp_sequence **grown;

    if (need <= scheduler->waiting_capacity)
        return SP_OK;
    while (capacity < need)
        capacity *= 2;
    grown = sp_realloc(scheduler->waiting, (size_t)capacity * sizeof *grown);
    if (!grown)
        return SP_ERR_MEMORY;
    scheduler->waiting = grown;
    scheduler->waiting_capacity = capacity;
    return SP_OK;
}

sp_status sp_scheduler_add(sp_scheduler *scheduler, sp_sequence *sequence)
{
    sp_status status = reserve_waiting(scheduler);

    if (status != SP_OK)
        return status;
    sequence->queue.state = SP_SEQUENCE_WAITING;
    insert_by_id(scheduler->waiting, &scheduler->n_waiting, sequence);
    return SP_OK;
}

/* Of the sequence's keys and values, and the draft model's. */
static void release_memory(const sp_scheduler *scheduler, sp_sequence *sequence)
{
    const sp_draft_model_calls *model = &scheduler->options.model;

    sp_sequence_memory_release(scheduler->options.memory, &sequence->memory);
    if (model->release)
        model->release(model->user, sequence);
}

void sp_scheduler_remove(sp_scheduler *scheduler, sp_sequence *sequence)
{
    if (!take_out(scheduler->running, &scheduler->n_running, sequence))
        take_out(scheduler->waiting, &scheduler->n_waiting, sequence);
    release_memory(scheduler, sequence);
}

/* ---- pauses -------------------------------------------------------------------------------- */

void sp_scheduler_set_paused(sp_sequence *sequence, bool paused)
{
    sequence->queue.paused = paused;
}

bool sp_scheduler_is_waiting(const sp_scheduler *scheduler)
{
    for (int32_t i = 0; i < scheduler->n_waiting; i++)
        if (!scheduler->waiting[i]->queue.paused)
            return true;
    return scheduler->starved;
}

static sp_sequence *youngest_paused(const sp_scheduler *scheduler)
{
    for (int32_t i = scheduler->n_running - 1; i >= 0; i--)
        if (scheduler->running[i]->queue.paused)
            return scheduler->running[i];
    return NULL;
}

/* ---- memory -------------------------------------------------------------------------------- */

/* Rows whose logits or experts are needed must be computed: the last one, and those that the
 * request reads. */
static int32_t reusable_tokens(const sp_sequence *sequence)
{
    int32_t n = sequence->n_tokens - 1;

    if (sequence->request.logits_fn && sequence->request.logits_from < n)
        n = sequence->request.logits_from > 0 ? sequence->request.logits_from : 0;
    if (sp_sequence_scores(sequence, sequence->sampling.n_scored) &&
        sequence->sampling.n_scored < n)
        n = sequence->sampling.n_scored;
    if (sequence->routing.n_ids > 0 && sequence->routing.n_rows < n)
        n = sequence->routing.n_rows;
    return n;
}

static void resume(sp_scheduler *scheduler, sp_sequence *sequence)
{
    int32_t n = sp_sequence_memory_resume(scheduler->options.memory, &sequence->memory,
                                          sequence->tokens, reusable_tokens(sequence));

    if (sequence->trace.preemptions == 0)
        sequence->trace.cached_tokens = n;
}

void sp_scheduler_advance(sp_scheduler *scheduler, sp_sequence *sequence, int32_t n_rows)
{
    sp_sequence_memory *memory = scheduler->options.memory;

    if (!sp_sequence_memory_commit(memory, &sequence->memory, sequence->tokens, n_rows))
        sp_sequence_memory_resume(memory, &sequence->memory, sequence->tokens,
                                  reusable_tokens(sequence));
}

/* ---- one step ------------------------------------------------------------------------------ */

static void drop_entry(sp_batch *batch, const sp_sequence *sequence)
{
    for (int32_t i = 0; i < batch->n_entries; i++) {
        if (batch->entries[i].sequence != sequence)
            continue;
        batch->n_rows -= batch->entries[i].n_rows;
        memmove(&batch->entries[i], &batch->entries[i + 1],
                (size_t)(batch->n_entries - i - 1) * sizeof batch->entries[0]);
        batch->n_entries--;
        return;
    }
}

static void give_slot_back(sp_scheduler *scheduler, sp_sequence *sequence)
{
    if (scheduler->options.gate.yield)
        scheduler->options.gate.yield(scheduler->options.gate.user, sequence);
}

static void preempt(sp_scheduler *scheduler, sp_sequence *victim)
{
    drop_entry(&scheduler->batch, victim);
    take_out(scheduler->running, &scheduler->n_running, victim);
    release_memory(scheduler, victim);
    give_slot_back(scheduler, victim);
    victim->trace.preemptions++;
    victim->queue.state = SP_SEQUENCE_WAITING;
    SP_ASSERT(scheduler->n_waiting < scheduler->waiting_capacity);
    SP_ASSERT(victim->memory.n_pages == 0);
    insert_by_id(scheduler->waiting, &scheduler->n_waiting, victim);
    scheduler->preemptions++;
}

/*
 * Reserves `want` (1 or more) more rows of a running sequence and returns how many rows fit: less
 * when memory is short, 0 when it must skip this step.
 */
static int32_t reserve_rows(sp_scheduler *scheduler, sp_sequence *sequence, int32_t want)
{
    for (;;) {
        sp_sequence *youngest = scheduler->running[scheduler->n_running - 1];
        int32_t n = sp_sequence_memory_reserve(scheduler->options.memory, &sequence->memory, want);

        if (n > 0 || youngest == sequence)
            return n;
        preempt(scheduler, youngest);
    }
}

static void add_entry(sp_batch *batch, sp_sequence *sequence, int32_t n_rows)
{
    int32_t at = batch->n_entries;

    while (at > 0 && batch->entries[at - 1].sequence->id > sequence->id) {
        batch->entries[at] = batch->entries[at - 1];
        at--;
    }
    SP_ASSERT(n_rows > 0);
    SP_ASSERT(sequence->queue.state == SP_SEQUENCE_RUNNING);
    batch->entries[at] = (sp_batch_entry){.sequence = sequence, .n_rows = n_rows};
    batch->n_entries++;
    batch->n_rows += n_rows;
}

static void schedule(sp_scheduler *scheduler, sp_sequence *sequence)
{
    int32_t rows = sp_sequence_pending(sequence);
    int32_t budget = scheduler->options.step_rows - scheduler->batch.n_rows;

    if (rows > scheduler->options.prefill_chunk)
        rows = scheduler->options.prefill_chunk;
    if (rows > budget)
        rows = budget;
    if (rows > 0) {
        rows = reserve_rows(scheduler, sequence, rows);
        scheduler->starved |= rows <= 0 && youngest_paused(scheduler) != NULL;
    }
    SP_ASSERT(scheduler->batch.n_entries < scheduler->n_running || rows <= 0);
    if (rows > 0)
        add_entry(&scheduler->batch, sequence, rows);
    SP_ASSERT(scheduler->batch.n_rows <= scheduler->options.step_rows);
}

/*
 * Schedules the running sequences of one kind in order. A preemption takes sequences from the end
 * of the list only, after the one that is being served, so the index stays right.
 */
static void schedule_running(sp_scheduler *scheduler, bool decode)
{
    for (int32_t i = 0; i < scheduler->n_running; i++) {
        sp_sequence *sequence = scheduler->running[i];

        if (!sequence->queue.paused && (sp_sequence_pending(sequence) == 1) == decode)
            schedule(scheduler, sequence);
    }
}

/* ---- adapters ------------------------------------------------------------------------------ */

/* Whether the sequence could get its slot now: SP_OK; a positive status: it waits, and the reason
 * is recorded; negative: it can never run. */
static sp_status ask(sp_scheduler *scheduler, sp_sequence *sequence, bool give_way, sp_error *error)
{
    const sp_slot_gate *gate = &scheduler->options.gate;
    sp_status status = gate->ask ? gate->ask(gate->user, sequence, give_way, error) : SP_OK;

    if (status > 0 && status != SP_POOL_FULL && status != SP_BUSY)
        scheduler->waits[status == SP_AGAIN ? SP_WAIT_SLOT : SP_WAIT_LOAD]++;
    if (status != SP_POOL_FULL && status != SP_BUSY)
        return status;
    scheduler->waits[SP_WAIT_SLOT]++;
    if (++sequence->queue.slot_wait > scheduler->slot_wait) {
        scheduler->slot_wait = sequence->queue.slot_wait;
        scheduler->slot_wait_full = status == SP_POOL_FULL;
    }
    return status;
}

/* The wait as fairness counts it: a slot that has just changed hands must not do so again. */
static uint64_t fair_wait(const sp_scheduler *scheduler)
{
    uint64_t since = scheduler->step - scheduler->handover_step;

    return scheduler->slot_wait < since ? scheduler->slot_wait : since;
}

static void watch_handovers(sp_scheduler *scheduler)
{
    const sp_slot_gate *gate = &scheduler->options.gate;
    uint64_t handovers = gate->handovers ? gate->handovers(gate->user) : 0;

    scheduler->step++;
    if (handovers == scheduler->handovers)
        return;
    scheduler->handovers = handovers;
    scheduler->handover_step = scheduler->step;
}

/* Whether all holders of the sequence's slot have yielded a token since they were admitted. */
static bool slot_has_yielded(const sp_scheduler *scheduler, const sp_sequence *sequence)
{
    for (int32_t i = 0; i < scheduler->n_running; i++) {
        const sp_sequence *other = scheduler->running[i];

        if (other->hold.slot == sequence->hold.slot && !other->queue.paused &&
            other->n_tokens <= other->queue.n_tokens_admitted)
            return false;
    }
    return true;
}

static const sp_sequence *longest_in_slot(const sp_scheduler *scheduler)
{
    const sp_slot_gate *gate = &scheduler->options.gate;
    const sp_sequence *longest = NULL;

    for (int32_t i = 0; i < scheduler->n_running; i++) {
        const sp_sequence *sequence = scheduler->running[i];

        if (gate->can_yield(gate->user, sequence) && slot_has_yielded(scheduler, sequence) &&
            (!longest || sequence->queue.admitted_step < longest->queue.admitted_step))
            longest = sequence;
    }
    return longest;
}

/* Preempts the sequences of one slot for those that have waited too long. */
static void rotate(sp_scheduler *scheduler)
{
    const sp_sequence *longest;
    int32_t slot;

    if (!scheduler->options.gate.can_yield || !scheduler->slot_wait_full ||
        fair_wait(scheduler) < scheduler->options.adapter_preempt_steps)
        return;
    longest = longest_in_slot(scheduler);
    if (!longest)
        return;
    slot = longest->hold.slot;
    for (int32_t i = scheduler->n_running - 1; i >= 0; i--)
        if (scheduler->running[i]->hold.slot == slot)
            preempt(scheduler, scheduler->running[i]);
    scheduler->rotations++;
    scheduler->handover_step = scheduler->step;
}

/* ---- admission ----------------------------------------------------------------------------- */

static sp_status start_running(sp_scheduler *scheduler, sp_sequence *sequence, sp_error *error)
{
    const sp_slot_gate *gate = &scheduler->options.gate;
    sp_status status = gate->take ? gate->take(gate->user, sequence, error) : SP_OK;

    if (status != SP_OK)
        return status;
    take_out(scheduler->waiting, &scheduler->n_waiting, sequence);
    sequence->queue.state = SP_SEQUENCE_RUNNING;
    sequence->queue.slot_wait = 0;
    sequence->queue.admitted_step = scheduler->step;
    sequence->queue.n_tokens_admitted = sequence->n_tokens;
    SP_ASSERT(scheduler->n_running < scheduler->options.max_running);
    SP_ASSERT(sequence->memory.n_pages == 0);
    insert_by_id(scheduler->running, &scheduler->n_running, sequence);
    resume(scheduler, sequence);
    schedule(scheduler, sequence);
    return SP_OK;
}

/* What a sequence lacks to run, in rows and in memory; SP_WAITS: nothing. */
static sp_wait missing_room(const sp_scheduler *scheduler, const sp_sequence *sequence)
{
    if (scheduler->n_running == 0)
        return SP_WAITS;
    if (scheduler->n_running >= scheduler->options.max_running ||
        scheduler->batch.n_rows >= scheduler->options.step_rows)
        return SP_WAIT_BATCH;
    return sp_sequence_memory_has_room(scheduler->options.memory, sequence->n_tokens + 1)
               ? SP_WAITS
               : SP_WAIT_PAGES;
}

/* Whether a paused sequence holds what is lacking. */
static bool lacks_what_is_held(const sp_scheduler *scheduler, sp_wait lacking)
{
    bool is_full = scheduler->n_running >= scheduler->options.max_running;

    return (lacking == SP_WAIT_PAGES || (lacking == SP_WAIT_BATCH && is_full)) &&
           youngest_paused(scheduler) != NULL;
}

/*
 * In order, except for those whose adapter is not in a slot. Once one finds no room, none after it
 * is admitted; they still query the gate, so that their adapters are loaded meanwhile.
 */
static void admit(sp_scheduler *scheduler)
{
    bool give_way = fair_wait(scheduler) >= scheduler->options.adapter_wait_steps;
    sp_wait lacking = SP_WAITS; /* by the first that found no room */
    int32_t at = 0;

    scheduler->slot_wait = 0;
    memset(scheduler->waits, 0, sizeof scheduler->waits);
    while (at < scheduler->n_waiting) {
        sp_sequence *sequence = scheduler->waiting[at];
        sp_error error;
        sp_status status;

        if (sequence->queue.paused) {
            at++;
            continue;
        }
        status = ask(scheduler, sequence, give_way, &error);
        if (status == SP_OK && lacking == SP_WAITS) {
            lacking = missing_room(scheduler, sequence);
            scheduler->starved |= lacks_what_is_held(scheduler, lacking);
        }
        if (status == SP_OK && lacking != SP_WAITS)
            scheduler->waits[lacking]++;
        if (status == SP_OK && lacking == SP_WAITS)
            status = start_running(scheduler, sequence, &error);
        else
            at += status >= 0;
        if (status < 0)
            scheduler->options.gate.refused(scheduler->options.gate.user, sequence, &error);
    }
}

/* ---- drafts -------------------------------------------------------------------------------- */

/* The most drafts of an entry by a drafter: what its sequence wants, `rows` that are left in the
 * step, and one token less than it may still get, because the last row yields one without a draft.
 */
static int32_t drafts_max(const sp_scheduler *scheduler, const sp_batch_entry *entry, sp_drafter by,
                          int32_t rows)
{
    const sp_sequence *sequence = entry->sequence;
    int32_t most = sp_draft_wanted(&sequence->draft, by, scheduler->draft_costs[by]);
    int32_t tokens =
        sequence->request.n_prompt + sequence->request.max_tokens - 1 - sequence->n_tokens;

    if (entry->n_rows < sp_sequence_pending(sequence))
        return 0;
    most = most < rows ? most : rows;
    return most < tokens ? most : tokens;
}

static int32_t rows_left(const sp_scheduler *scheduler)
{
    return scheduler->options.step_rows - scheduler->batch.n_rows;
}

static int32_t propose(const sp_draft_source *source, sp_sequence *sequence, int32_t n_max)
{
    if (source->propose)
        return source->propose(source->user, sequence, n_max,
                               sequence->tokens + sequence->n_tokens);
    return sp_draft_lookup(sequence->tokens, sequence->n_tokens, n_max);
}

/* By the tokens that the step makes without drafts. */
static void find_costs(sp_scheduler *scheduler)
{
    const sp_step_cost nothing = {.known = false}, *cost = scheduler->options.step_cost;
    const sp_draft_model_calls *model = &scheduler->options.model;
    double seconds = model->seconds ? model->seconds(model->user) : 0;
    int32_t n_tokens = 0;

    for (int32_t i = 0; i < scheduler->batch.n_entries; i++) {
        const sp_batch_entry *entry = &scheduler->batch.entries[i];

        n_tokens += entry->n_rows == sp_sequence_pending(entry->sequence);
    }
    n_tokens = n_tokens > 0 ? n_tokens : 1;
    cost = cost ? cost : &nothing;
    scheduler->draft_costs[SP_DRAFT_BY_LOOKUP] = sp_step_cost_of_row(cost, n_tokens, 0);
    scheduler->draft_costs[SP_DRAFT_BY_MODEL] = sp_step_cost_of_row(cost, n_tokens, seconds);
}

/* The entry's sequence has n (0 or more) drafts after its tokens: they are rows as far as there is
 * memory. */
static void take_drafts(sp_scheduler *scheduler, sp_batch_entry *entry, sp_drafter by, int32_t n)
{
    sp_sequence *sequence = entry->sequence;

    SP_ASSERT(entry->n_drafts == 0);
    if (n > 0) {
        n = sp_sequence_memory_reserve(scheduler->options.memory, &sequence->memory,
                                       entry->n_rows + n) -
            entry->n_rows;
        SP_ASSERT(n >= 0);
        entry->n_drafts = n;
        entry->n_rows += n;
        scheduler->batch.n_rows += n;
    }
    sp_draft_begin(&sequence->draft, by, n);
}

static void look_up(sp_scheduler *scheduler, sp_batch_entry *entry)
{
    int32_t most = drafts_max(scheduler, entry, SP_DRAFT_BY_LOOKUP, rows_left(scheduler));
    int32_t n = most > 0 ? propose(&scheduler->options.drafts, entry->sequence, most) : 0;

    SP_ASSERT(n <= most || n == 0);
    take_drafts(scheduler, entry, SP_DRAFT_BY_LOOKUP, n);
}

/* Drafts of the model for the entries that have none, in one call. */
static void ask_model(sp_scheduler *scheduler)
{
    const sp_draft_model_calls *model = &scheduler->options.model;
    sp_batch *batch = &scheduler->batch;
    sp_draft_call *calls = scheduler->draft_calls;
    int32_t rows = rows_left(scheduler), n = 0;

    for (int32_t i = 0; i < batch->n_entries; i++) {
        const sp_batch_entry *entry = &batch->entries[i];
        int32_t most = drafts_max(scheduler, entry, SP_DRAFT_BY_MODEL, rows);

        if (entry->n_drafts > 0 || most <= 0)
            continue;
        calls[n++] = (sp_draft_call){.sequence = entry->sequence, .n_max = most};
        rows -= most;
    }
    if (n == 0)
        return;
    model->propose(model->user, calls, n);
    for (int32_t i = 0, at = 0; i < n; i++) {
        while (batch->entries[at].sequence != calls[i].sequence)
            at++;
        SP_ASSERT(calls[i].n_drafts <= calls[i].n_max);
        take_drafts(scheduler, &batch->entries[at], SP_DRAFT_BY_MODEL, calls[i].n_drafts);
    }
}

static void add_drafts(sp_scheduler *scheduler)
{
    find_costs(scheduler);
    for (int32_t i = 0; i < scheduler->batch.n_entries; i++)
        look_up(scheduler, &scheduler->batch.entries[i]);
    if (scheduler->options.model.propose && !scheduler->options.drafts.propose)
        ask_model(scheduler);
}

const sp_batch *sp_scheduler_plan(sp_scheduler *scheduler)
{
    sp_sequence *paused = scheduler->starved ? youngest_paused(scheduler) : NULL;
    uint64_t preemptions;

    scheduler->batch.n_entries = 0;
    scheduler->batch.n_rows = 0;
    scheduler->starved = false;
    if (paused)
        preempt(scheduler, paused);
    preemptions = scheduler->preemptions;
    watch_handovers(scheduler);
    rotate(scheduler);
    schedule_running(scheduler, true);
    schedule_running(scheduler, false);
    /* A sequence that was preempted in this step is not admitted again at once: others took its
     * pages. */
    if (scheduler->preemptions == preemptions)
        admit(scheduler);
    add_drafts(scheduler);
    return &scheduler->batch;
}
