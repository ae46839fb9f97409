#include "engine/constrain.h"

#include "base/alloc.h"
#include "base/error.h"
#include "base/grow.h"
#include "engine/sampling/token_mask.h"
#include "grammar/compile.h"

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

struct sp_constrain {
    pthread_mutex_t lock; /* of the making of: */
    sp_vocabulary *vocabulary;
    uint32_t *masks; /* [window of ops][words]; the engine thread's */
};

struct sp_constraint {
    atomic_int references;
    sp_grammar *grammar;
    const sp_constrain *of; /* the engine's */
};

/* ---- life ---------------------------------------------------------------------------------- */

sp_status sp_constrain_open(sp_engine *engine)
{
    engine->constrain = sp_calloc(1, sizeof *engine->constrain);
    if (!engine->constrain)
        return SP_ERR_MEMORY;
    pthread_mutex_init(&engine->constrain->lock, NULL);
    return SP_OK;
}

void sp_constrain_close(sp_engine *engine)
{
    if (!engine->constrain)
        return;
    sp_vocabulary_destroy(engine->constrain->vocabulary);
    sp_free(engine->constrain->masks);
    pthread_mutex_destroy(&engine->constrain->lock);
    sp_free(engine->constrain);
    engine->constrain = NULL;
}

/* The bytes that a token adds to the text: a special one adds none. */
static const char *bytes_of(void *user, int32_t id, size_t *out_bytes)
{
    const sp_tokenizer *tokenizer = user;

    *out_bytes = 0;
    if (sp_tokenizer_is_special(tokenizer, id))
        return NULL;
    return sp_tokenizer_token_bytes(tokenizer, id, out_bytes);
}

/* Made once, by whoever asks first. */
static sp_status vocabulary_of(const sp_engine *engine, const sp_vocabulary **out_vocabulary,
                               sp_error *error)
{
    sp_constrain *constrain = engine->constrain;
    sp_status status = SP_OK;

    if (!engine->tokenizer)
        return sp_fail(error, SP_ERR_NOT_FOUND, SP_ENGINE_NO_TOKENIZER, NULL, -1,
                       "the model has no tokenizer.json, so its output cannot be constrained");
    pthread_mutex_lock(&constrain->lock);
    if (!constrain->vocabulary)
        status = sp_vocabulary_create(engine->model.shape.vocab, bytes_of, engine->tokenizer,
                                      &constrain->vocabulary, error);
    *out_vocabulary = constrain->vocabulary;
    pthread_mutex_unlock(&constrain->lock);
    return status;
}

/* ---- constraints --------------------------------------------------------------------------- */

void sp_constraint_options_default(sp_constraint_options *out_options, size_t struct_bytes)
{
    const sp_constraint_options defaults = {.struct_bytes = sizeof defaults};

    sp_struct_default(out_options, struct_bytes, &defaults, sizeof defaults);
}

static sp_status check_options(const sp_constraint_options *options, sp_error *error)
{
    if ((int)options->kind < 0 || options->kind > SP_CONSTRAINT_GRAMMAR)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "kind", -1, "the kind %d is none",
                       (int)options->kind);
    if ((int)options->thought < 0 || options->thought > SP_CONSTRAINT_THINKS)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "thought", -1, "the thought %d is none",
                       (int)options->thought);
    if (!options->text && options->text_bytes > 0)
        return sp_fail_null(error, "text");
    return SP_OK;
}

static sp_status compile(const sp_engine *engine, const sp_constraint_options *options,
                         sp_constraint *constraint, sp_error *error)
{
    const sp_grammar_source source = {
        .kind = (sp_grammar_kind)options->kind,
        .thought = (sp_grammar_thought)options->thought,
        .text = options->text ? options->text : "",
        .bytes = options->text_bytes,
    };
    const sp_vocabulary *vocabulary = NULL;
    sp_status status = vocabulary_of(engine, &vocabulary, error);

    if (status == SP_OK)
        status = sp_grammar_compile(vocabulary, &source, &constraint->grammar, error);
    return status;
}

sp_status sp_engine_compile(const sp_engine *engine, const sp_constraint_options *options,
                            sp_constraint **out_constraint, sp_error *error)
{
    sp_constraint_options own;
    sp_constraint *constraint;
    sp_status status = SP_NEED(error, {"engine", engine}, {"out_constraint", out_constraint});

    if (status != SP_OK)
        return status;
    sp_constraint_options_default(&own, sizeof own);
    status = sp_struct_read(&own, sizeof own, options, "sp_constraint_options", error);
    if (status == SP_OK)
        status = check_options(&own, error);
    if (status != SP_OK)
        return status;
    constraint = sp_calloc(1, sizeof *constraint);
    if (!constraint)
        return sp_fail_memory(error, sizeof *constraint, "a constraint");
    atomic_init(&constraint->references, 1);
    constraint->of = engine->constrain;
    status = compile(engine, &own, constraint, error);
    if (status != SP_OK)
        sp_constraint_release(constraint);
    else
        *out_constraint = constraint;
    return status;
}

void sp_constraint_retain(sp_constraint *constraint)
{
    if (constraint)
        atomic_fetch_add(&constraint->references, 1);
}

void sp_constraint_release(sp_constraint *constraint)
{
    if (!constraint || atomic_fetch_sub(&constraint->references, 1) != 1)
        return;
    sp_grammar_release(constraint->grammar);
    sp_free(constraint);
}

size_t sp_constraint_bytes(const sp_constraint *constraint)
{
    return constraint ? sizeof *constraint + sp_grammar_memory(constraint->grammar) : 0;
}

/* ---- requests ------------------------------------------------------------------------------ */

sp_status sp_constrain_check(const sp_engine *engine, const sp_request *request, sp_error *error)
{
    if (!request->constraint || request->constraint->of == engine->constrain)
        return SP_OK;
    return sp_fail(error, SP_ERR_ARGUMENT, NULL, "constraint", -1,
                   "the constraint was compiled for another engine");
}

sp_status sp_constrain_begin(const sp_engine *engine, const sp_request *request,
                             sp_sequence_constraint *constraint)
{
    sp_constrain *constrain = engine->constrain;

    if (!request->constraint)
        return SP_OK;
    if (!constrain->masks)
        constrain->masks =
            sp_calloc((size_t)engine->ops->window * sp_token_mask_words(engine->model.shape.vocab),
                      sizeof(uint32_t));
    if (!constrain->masks)
        return SP_ERR_MEMORY;
    constraint->grammar = request->constraint->grammar;
    sp_grammar_retain(constraint->grammar);
    return SP_OK;
}

void sp_constrain_end(sp_sequence_constraint *constraint)
{
    sp_grammar_release(constraint->grammar);
    constraint->grammar = NULL;
}

/* ---- steps --------------------------------------------------------------------------------- */

/* The place stays where it is for drafts, which may be other tokens later. */
static sp_status follow(sp_sequence *sequence, int32_t n_tokens, uint32_t *mask,
                        sp_grammar_next *out_next, sp_error *error)
{
    int32_t n_prompt = sequence->request.n_prompt;
    sp_grammar_place ahead = sequence->constraint.place;
    bool drafted = n_tokens > sequence->n_tokens;

    return sp_grammar_follow(
        sequence->constraint.grammar, drafted ? &ahead : &sequence->constraint.place,
        sequence->tokens + n_prompt, n_tokens - n_prompt, mask, out_next, error);
}

const uint32_t *sp_constrain_mask(sp_engine *engine, sp_sequence *sequence, int32_t n_tokens,
                                  int32_t index, sp_status *out_status, sp_error *out_error)
{
    const sp_ends *ends = &sequence->sampling.ends;
    size_t words = sp_token_mask_words(engine->model.shape.vocab);
    sp_grammar_next next;
    uint32_t *mask, any = 0;

    *out_status = SP_OK;
    if (!sequence->constraint.grammar)
        return NULL;
    mask = engine->constrain->masks + (size_t)index * words;
    *out_status = follow(sequence, n_tokens, mask, &next, out_error);
    if (*out_status != SP_OK)
        return NULL;
    for (int32_t i = 0; i < ends->n; i++)
        sp_token_mask_set(mask, ends->tokens[i], next.complete);
    for (size_t i = 0; i < words; i++)
        any |= mask[i];
    if (any)
        return mask;
    *out_status = sp_fail(out_error, SP_ERR_STATE, SP_GRAMMAR_STUCK, NULL, sequence->id,
                          "no token can follow in the grammar of its output");
    return NULL;
}

static void constrain_row(sp_engine *engine, int32_t index)
{
    sp_choice *choice = &engine->choices[index];

    choice->mask = sp_constrain_mask(engine, engine->logit_rows[index].sequence, choice->n_tokens,
                                     index, &choice->constrained, NULL);
    if (choice->mask)
        choice->adjusted = true;
    else
        choice->sampling = NULL;
}

/* The grammars of a window, and which of them its rows have. */
typedef struct constrain_job {
    sp_engine *engine;
    const sp_grammar *grammars[SP_LOGIT_ROWS_MAX];
    int32_t n_grammars;
    int32_t grammar_of[SP_LOGIT_ROWS_MAX]; /* -1: none, or no token is to be chosen */
} constrain_job;

/* Rows of one sequence have one grammar, so its place is one thread's. */
static void constrain_task(void *user, int32_t task, int32_t thread)
{
    const constrain_job *job = user;

    (void)thread;
    for (int32_t i = 0; i < job->engine->n_logit_rows; i++)
        if (job->grammar_of[i] == task)
            constrain_row(job->engine, i);
}

void sp_constrain_window(sp_engine *engine)
{
    constrain_job job = {.engine = engine};

    for (int32_t i = 0; i < engine->n_logit_rows; i++) {
        const sp_grammar *grammar = engine->logit_rows[i].sequence->constraint.grammar;
        int32_t at = 0;

        job.grammar_of[i] = -1;
        if (!grammar || !engine->choices[i].sampling)
            continue;
        while (at < job.n_grammars && job.grammars[at] != grammar)
            at++;
        job.grammars[at] = grammar;
        job.n_grammars += at == job.n_grammars;
        job.grammar_of[i] = at;
    }
    if (job.n_grammars > 0)
        sp_exec_run(engine->exec, constrain_task, &job, job.n_grammars);
}

bool sp_constrain_is_over(sp_sequence *sequence)
{
    sp_grammar_next next;

    return sequence->constraint.grammar &&
           follow(sequence, sequence->n_tokens, NULL, &next, NULL) == SP_OK && !next.goes_on;
}
