/*
 * submit.c: a request is checked completely and copied, or refused without a trace.
 */
#include "base/alloc.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/grow.h"
#include "engine/constrain.h"
#include "engine/draft_model.h"
#include "engine/engine_state.h"
#include "engine/request/request_table.h"

#include <string.h>

/* ---- checks -------------------------------------------------------------------------------- */

static sp_status bad_field(sp_error *error, const char *field, const char *want)
{
    return sp_fail(error, SP_ERR_INPUT, NULL, field, -1, "%s must be %s", field, want);
}

static sp_status check_prompt(const sp_engine *engine, const sp_request *request, sp_error *error)
{
    if (request->n_tokens < 1 || !request->tokens)
        return sp_fail(error, SP_ERR_INPUT, NULL, "prompt", -1, "the prompt is empty");
    for (int32_t i = 0; i < request->n_tokens; i++)
        if (request->tokens[i] < 0 || request->tokens[i] >= engine->model.shape.vocab)
            return sp_fail(error, SP_ERR_INPUT, NULL, "prompt", i,
                           "prompt token %d is the id %d; the vocabulary has %d", i,
                           request->tokens[i], engine->model.shape.vocab);
    return SP_OK;
}

static sp_status check_length(const sp_engine *engine, const sp_request *request, sp_error *error)
{
    int64_t total = (int64_t)request->n_tokens + request->max_tokens;
    int32_t context = sp_engine_max_context(engine);

    if (request->max_tokens < 0 ||
        (request->max_tokens == 0 && !request->logits_fn && !request->prompt_logprobs))
        return bad_field(error, "max_tokens", "at least 1");
    if (total <= context)
        return SP_OK;
    return sp_fail(error, SP_ERR_TOO_LARGE, SP_ENGINE_CONTEXT_EXCEEDED, "prompt", -1,
                   "This model's maximum context length is %d tokens. However, you requested %lld "
                   "tokens (%d in the prompt, %d in the completion); shorten one of them, or raise "
                   "%s",
                   context, (long long)total, request->n_tokens, request->max_tokens,
                   context < engine->max_context ? "kv-tokens" : "max-context");
}

static sp_sample_params sample_params(const sp_request *request)
{
    return (sp_sample_params){
        .temperature = request->temperature,
        .top_k = request->top_k,
        .top_p = request->top_p,
        .min_p = request->min_p,
        .seed = request->seed,
    };
}

static sp_penalties penalties_of(const sp_request *request)
{
    return (sp_penalties){
        .presence = request->presence_penalty,
        .frequency = request->frequency_penalty,
        .repetition = request->repetition_penalty,
        .bias = request->logit_bias,
        .n_bias = request->n_logit_bias,
    };
}

static void release(const sp_engine *engine, sp_hold *hold)
{
    if (engine->stage)
        sp_stage_release(engine->stage, hold);
}

/* Resolves the adapter of a request, whose struct has the current size, and checks the rest of it.
 * *out_hold is the caller's to release; nothing is held on failure. */
static sp_status check(const sp_engine *engine, const sp_request *request, sp_hold *out_hold,
                       sp_error *error)
{
    sp_status status = sp_engine_hold(engine, request->adapter, out_hold, error);

    if (status != SP_OK)
        return status;
    status = check_prompt(engine, request, error);
    if (status == SP_OK)
        status = check_length(engine, request, error);
    if (status == SP_OK)
        status = sp_request_check(request, engine->model.shape.vocab, error);
    if (status == SP_OK && (request->scored_from < 0 || request->scored_from > request->n_tokens))
        status = bad_field(error, "scored_from", "from 0 to the number of the prompt's tokens");
    if (status == SP_OK && request->n_stop > 0 && !engine->tokenizer)
        status = bad_field(error, "stop", "left out: the model has no tokenizer.json");
    if (status == SP_OK && request->routed_experts && engine->moe.experts == 0)
        status = bad_field(error, "routed_experts", "false: the base has no experts");
    if (status == SP_OK)
        status = sp_constrain_check(engine, request, error);
    if (status != SP_OK)
        release(engine, out_hold);
    return status;
}

static sp_status read_request(const sp_engine *engine, const sp_request *from, sp_request *out,
                              sp_error *error)
{
    if (!engine)
        return sp_fail_null(error, "engine");
    sp_request_default(out, sizeof *out);
    return sp_struct_read(out, sizeof *out, from, "sp_request", error);
}

sp_status sp_engine_check(const sp_engine *engine, const sp_request *request, sp_error *error)
{
    sp_hold hold = {.struct_bytes = sizeof hold};
    sp_request own;
    sp_status status = read_request(engine, request, &own, error);

    if (status == SP_OK)
        status = check(engine, &own, &hold, error);
    if (status == SP_OK)
        release(engine, &hold);
    return status;
}

/* ---- sequences ----------------------------------------------------------------------------- */

static void destroy_sequence(sp_sequence *sequence)
{
    sp_stop_destroy(sequence->text.stop);
    sp_constrain_end(&sequence->constraint);
    sp_ends_destroy(&sequence->sampling.ends);
    sp_text_free(&sequence->text.held);
    sp_held_memory_destroy(&sequence->memory);
    sp_held_memory_destroy(&sequence->trail.memory);
    sp_free(sequence->sampling.bias);
    sp_free(sequence->routing.ids);
    sp_free(sequence->tokens);
    sp_free(sequence);
}

/* False when out of memory; the strings themselves were checked before. */
static bool create_stop(const sp_request *request, sp_stop **out_stop)
{
    size_t bytes[SP_STOP_STRINGS_MAX];

    if (request->n_stop == 0)
        return true;
    for (int32_t i = 0; i < request->n_stop; i++)
        bytes[i] = strlen(request->stop[i]);
    return sp_stop_create(request->stop, bytes, (size_t)request->n_stop, out_stop, NULL) == SP_OK;
}

static sp_sequence_request keep_request(const sp_request *request)
{
    return (sp_sequence_request){
        .n_prompt = request->n_tokens,
        .max_tokens = request->max_tokens,
        .lora_scale = request->lora_scale,
        .logprobs = request->logprobs,
        .prompt_logprobs = request->prompt_logprobs,
        .processed_logprobs = request->processed_logprobs,
        .top_logprobs = request->top_logprobs,
        .n_given = request->scored_from > 0 && request->prompt_logprobs ? request->scored_from
                                                                        : request->n_tokens,
        .logits_fn = request->logits_fn,
        .logits_user = request->logits_user,
        .logits_from = request->logits_from,
    };
}

/* False when out of memory. */
static bool copy_sampling(const sp_request *request, sp_sequence_sampling *sampling)
{
    size_t n = (size_t)request->n_logit_bias;

    sampling->params = sample_params(request);
    sampling->penalties = penalties_of(request);
    sampling->adjusted = sp_penalties_any(&sampling->penalties);
    if (n == 0)
        return true;
    sampling->bias = sp_calloc(n, sizeof *sampling->bias);
    sampling->penalties.bias = sampling->bias;
    if (sampling->bias)
        memcpy(sampling->bias, request->logit_bias, n * sizeof *sampling->bias);
    return sampling->bias != NULL;
}

static bool drafts_for(const sp_engine *engine, const sp_request *request)
{
    if (request->speculative == SP_SPECULATIVE_DEFAULT)
        return engine->options.speculative;
    return request->speculative == SP_SPECULATIVE_ON;
}

static sp_status create_sequence(const sp_engine *engine, const sp_request *request,
                                 sp_sequence **out_sequence)
{
    int32_t total = request->n_tokens + request->max_tokens;
    sp_sequence *sequence = sp_calloc(1, sizeof *sequence);

    if (!sequence)
        return SP_ERR_MEMORY;
    sequence->tokens = sp_calloc((size_t)total, sizeof(int32_t));
    if (!sequence->tokens ||
        sp_held_memory_create(&engine->memory, total, &sequence->memory) != SP_OK ||
        (drafts_for(engine, request) &&
         sp_draft_model_begin(engine, total, &sequence->trail) != SP_OK) ||
        !create_stop(request, &sequence->text.stop) ||
        !copy_sampling(request, &sequence->sampling) ||
        sp_ends_create(request, &engine->model.shape, engine->tokenizer,
                       &sequence->sampling.ends) != SP_OK ||
        sp_constrain_begin(engine, request, &sequence->constraint) != SP_OK) {
        destroy_sequence(sequence);
        return SP_ERR_MEMORY;
    }
    memcpy(sequence->tokens, request->tokens, (size_t)request->n_tokens * sizeof(int32_t));
    sequence->n_tokens = request->n_tokens;
    sequence->request = keep_request(request);
    if (request->routed_experts)
        sequence->routing.n_ids = engine->moe.layers * engine->moe.per_token;
    if (request->scored_from > 1)
        sequence->sampling.n_scored = request->scored_from - 1;
    if (drafts_for(engine, request))
        sequence->draft = sp_draft_create(engine->options.draft_tokens);
    sequence->trace.struct_bytes = sizeof sequence->trace;
    sequence->trace.submitted = sp_clock_seconds();
    sequence->trace.prompt_tokens = request->n_tokens;
    if (engine->tokenizer)
        sequence->text.decoder = sp_decoder_continue(engine->tokenizer, !request->keep_special,
                                                     request->tokens, (size_t)request->n_tokens);
    *out_sequence = sequence;
    return SP_OK;
}

static sp_status reserve_sequences(sp_engine *engine)
{
    int32_t capacity = engine->sequences_capacity ? engine->sequences_capacity * 2 : 16;
    sp_sequence **grown;

    if (engine->n_sequences < engine->sequences_capacity)
        return SP_OK;
    grown = sp_realloc(engine->sequences, (size_t)capacity * sizeof *grown);
    if (!grown)
        return SP_ERR_MEMORY;
    engine->sequences = grown;
    engine->sequences_capacity = capacity;
    return SP_OK;
}

/* The first request that wants processed logprobs brings the memory for them. */
static sp_status reserve_processed(sp_engine *engine, const sp_request *request)
{
    size_t vocab = (size_t)engine->model.shape.vocab;

    if (!request->processed_logprobs || engine->processed.logits)
        return SP_OK;
    engine->processed.scratch = sp_aligned_calloc(sp_sample_scratch_bytes((int32_t)vocab), 64);
    engine->processed.logits = sp_aligned_calloc(vocab * sizeof(float), 64);
    if (engine->processed.logits && engine->processed.scratch)
        return SP_OK;
    sp_processed_free(&engine->processed);
    return SP_ERR_MEMORY;
}

/* A scale of 0 is the base, exactly, so it shares the base's pages. */
static sp_prefix_key key_of(const sp_sequence *sequence)
{
    sp_prefix_key key = {.scale = 0.0f};

    if (!sequence->hold.version || sequence->request.lora_scale <= 0.0f)
        return key;
    key.digest = *sp_stage_version_digest(sequence->hold.version);
    key.scale = sequence->request.lora_scale;
    return key;
}

sp_status sp_engine_submit(sp_engine *engine, const sp_request *request, int64_t *out_id,
                           sp_error *error)
{
    sp_hold hold = {.struct_bytes = sizeof hold};
    sp_sequence *sequence;
    sp_request own;
    sp_status status;

    if (!out_id)
        return sp_fail_null(error, "out_id");
    status = read_request(engine, request, &own, error);
    /* Resolved once: later changes of the name do not affect this request. */
    if (status == SP_OK)
        status = check(engine, &own, &hold, error);
    if (status != SP_OK)
        return status;
    if (reserve_processed(engine, &own) != SP_OK || reserve_sequences(engine) != SP_OK ||
        create_sequence(engine, &own, &sequence) != SP_OK) {
        release(engine, &hold);
        return sp_fail_memory(error, (size_t)own.n_tokens * sizeof(int32_t), "a request");
    }
    sequence->id = engine->next_id;
    status = sp_scheduler_add(&engine->scheduler, sequence);
    if (status != SP_OK) {
        release(engine, &hold);
        destroy_sequence(sequence);
        return sp_fail_memory(error, sizeof *sequence, "the queue");
    }
    sequence->hold = hold;
    sequence->memory.key = key_of(sequence);
    sequence->memory.n_prompt = sequence->trail.memory.n_prompt = sequence->request.n_prompt;
    engine->sequences[engine->n_sequences++] = sequence;
    engine->next_id++;
    *out_id = sequence->id;
    return SP_OK;
}

void sp_engine_drop(sp_engine *engine, sp_sequence *sequence)
{
    for (int32_t i = 0; i < engine->n_sequences; i++) {
        if (engine->sequences[i] != sequence)
            continue;
        memmove(&engine->sequences[i], &engine->sequences[i + 1],
                (size_t)(engine->n_sequences - i - 1) * sizeof(sp_sequence *));
        engine->n_sequences--;
        break;
    }
    sp_scheduler_remove(&engine->scheduler, sequence);
    if (engine->stage)
        sp_stage_release(engine->stage, &sequence->hold);
    destroy_sequence(sequence);
}

sp_status sp_engine_set_paused(sp_engine *engine, int64_t id, bool paused, sp_error *error)
{
    if (!engine)
        return sp_fail_null(error, "engine");
    for (int32_t i = 0; i < engine->n_sequences; i++) {
        if (engine->sequences[i]->id == id) {
            sp_scheduler_set_paused(engine->sequences[i], paused);
            return SP_OK;
        }
    }
    return sp_fail(error, SP_ERR_NOT_FOUND, NULL, "id", id, "no request %lld waits or runs",
                   (long long)id);
}

sp_status sp_engine_cancel(sp_engine *engine, int64_t id, sp_error *error)
{
    if (!engine)
        return sp_fail_null(error, "engine");
    for (int32_t i = 0; i < engine->n_sequences; i++) {
        if (engine->sequences[i]->id == id) {
            sp_engine_drop(engine, engine->sequences[i]);
            return SP_OK;
        }
    }
    return sp_fail(error, SP_ERR_NOT_FOUND, NULL, "id", id, "no request %lld waits or runs",
                   (long long)id);
}
