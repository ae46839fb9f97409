#include "server/driver/generation.h"

#include "base/alloc.h"

#include <string.h>

#define RECORD_ALIGN ((size_t) _Alignof(sp_produced))

static void destroy(sp_task *task)
{
    sp_generation *generation = (sp_generation *)(void *)task;

    if (generation->release_owned)
        generation->release_owned(generation->owned);
    sp_text_free(&generation->outbox);
    sp_budget_hold(generation->budget, SP_BUDGET_ANSWERS, &generation->outbox_held, 0);
    sp_budget_hold(generation->budget, SP_BUDGET_REQUESTS, &generation->request_held, 0);
    sp_lora_chat_release(generation->chat);
    sp_constraint_release(generation->constraint);
    sp_free(generation->wanted.text);
    sp_free(generation->adapter);
    sp_free(generation->served);
    sp_free(generation->choices);
    sp_free(generation);
}

sp_generation *sp_generation_create(int32_t n_choices, const char *adapter)
{
    sp_generation *generation = sp_calloc(1, sizeof *generation);

    if (!generation)
        return NULL;
    sp_task_start(&generation->task, SP_TASK_GENERATE, destroy);
    generation->choices = sp_calloc((size_t)n_choices, sizeof *generation->choices);
    generation->n_choices = n_choices;
    if (adapter)
        generation->adapter = sp_strdup(adapter);
    if (!generation->choices || (adapter && !generation->adapter)) {
        sp_task_release(&generation->task);
        return NULL;
    }
    return generation;
}

static size_t padding(size_t bytes)
{
    return (RECORD_ALIGN - bytes % RECORD_ALIGN) % RECORD_ALIGN;
}

static size_t record_bytes(const sp_produced *produced)
{
    size_t bytes = sizeof *produced + (size_t)produced->n_top * sizeof(sp_logprob) +
                   produced->routed_bytes + produced->text_bytes;

    return bytes + padding(bytes);
}

/* The prompt of a choice as it was read and as the engine keeps it: two ids of 4 bytes a token. */
bool sp_generation_hold(sp_generation *generation, sp_budget *budget)
{
    size_t bytes = sizeof *generation + generation->wanted.bytes;

    for (int32_t i = 0; i < generation->n_choices; i++)
        bytes += sizeof generation->choices[i] +
                 2 * sizeof(int32_t) * (size_t)generation->choices[i].request.n_tokens;
    generation->budget = budget;
    return sp_budget_hold(budget, SP_BUDGET_REQUESTS, &generation->request_held, bytes);
}

bool sp_generation_add(sp_generation *generation, const sp_produced *produced,
                       const sp_logprob *top, const uint16_t *routed, const char *text)
{
    static const char zeros[RECORD_ALIGN];
    sp_text *outbox = &generation->outbox;
    size_t end;
    bool added;

    pthread_mutex_lock(&generation->task.lock);
    end = outbox->bytes + record_bytes(produced);
    /* The experts come at once, with the end, however fast the client reads. */
    if (end - generation->outbox_routed - produced->routed_bytes <= SP_OUTBOX_BYTES_MAX) {
        sp_text_add_bytes(outbox, (const char *)produced, sizeof *produced);
        sp_text_add_bytes(outbox, (const char *)top, (size_t)produced->n_top * sizeof *top);
        sp_text_add_bytes(outbox, (const char *)routed, produced->routed_bytes);
        sp_text_add_bytes(outbox, text, produced->text_bytes);
        sp_text_add_bytes(outbox, zeros, end - outbox->bytes);
    }
    added = !outbox->failed && outbox->bytes == end;
    generation->no_room = !sp_budget_hold(generation->budget, SP_BUDGET_ANSWERS,
                                          &generation->outbox_held, outbox->capacity);
    if (added && generation->no_room) {
        outbox->bytes = end - record_bytes(produced);
        added = false;
    }
    if (added)
        generation->outbox_routed += produced->routed_bytes;
    pthread_mutex_unlock(&generation->task.lock);
    return added;
}

bool sp_generation_take(sp_generation *generation, sp_text *out_taken)
{
    sp_text empty;
    bool done;

    sp_text_clear(out_taken);
    empty = *out_taken;
    pthread_mutex_lock(&generation->task.lock);
    *out_taken = generation->outbox;
    generation->outbox = empty;
    generation->outbox_routed = 0;
    /* What was taken counts as the reader's from here on. */
    sp_budget_hold(generation->budget, SP_BUDGET_ANSWERS, &generation->outbox_held, empty.capacity);
    done = generation->task.done;
    pthread_mutex_unlock(&generation->task.lock);
    return done;
}

const sp_produced *sp_produced_next(const sp_text *taken, size_t *cursor)
{
    const sp_produced *produced;

    if (*cursor + sizeof *produced > taken->bytes)
        return NULL;
    produced = (const sp_produced *)(const void *)(taken->data + *cursor);
    *cursor += record_bytes(produced);
    return produced;
}

const sp_logprob *sp_produced_top(const sp_produced *produced)
{
    return (const sp_logprob *)(const void *)(produced + 1);
}

const uint16_t *sp_produced_routed(const sp_produced *produced)
{
    return (const uint16_t *)(const void *)(sp_produced_top(produced) + produced->n_top);
}

const char *sp_produced_text(const sp_produced *produced)
{
    return (const char *)sp_produced_routed(produced) + produced->routed_bytes;
}
