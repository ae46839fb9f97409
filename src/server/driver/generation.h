/*
 * generation.h: one request for text on its way through the engine: its choices (every prompt
 * n times), and the bounded outbox of what they have produced and the reader has not taken yet.
 *
 * The engine's thread never waits for a reader. It appends to the outbox; a reader takes all of it
 * at once. An outbox that would grow past its bound means a client that does not read: the
 * generation is dropped, with `slow-reader`, and its choices leave the batch.
 */
#ifndef SP_SERVER_DRIVER_GENERATION_H
#define SP_SERVER_DRIVER_GENERATION_H

#include "base/text.h"
#include "server/driver/lora_chat.h"
#include "server/driver/task.h"
#include "server/http/budget.h"
#include "server/metrics/metrics.h"

#include <sidepath/engine.h>

#define SP_OUTBOX_BYTES_MAX ((size_t)1 << 20)

/* With SP_AGAIN: the generation was not begun, because it was made by what is not so any more. */
#define SP_CODE_MAKE_AGAIN "make-again"

typedef struct sp_choice {
    sp_request request;     /* its pointers point into what `owned` keeps */
    int64_t id;             /* the engine's; 0: not submitted, or finished */
    sp_request_clock clock; /* the engine's thread only */
} sp_choice;

/* What every output of a generation has to be (sp_constraint_options); compiler.h makes it one. */
typedef struct sp_wanted_output {
    const char *field; /* of the request that says so, static; NULL: nothing is wanted */
    sp_constraint_kind kind;
    sp_constraint_thought thought;
    char *text; /* [bytes] owned (sp_free) */
    size_t bytes;
} sp_wanted_output;

/* The version of its adapter that a request insists on; another one is no answer to it. */
typedef struct sp_version_wish {
    bool has_digest;
    sp_digest digest;
    uint64_t min_generation; /* 0: any */
} sp_version_wish;

typedef struct sp_generation {
    sp_task task; /* done: every choice has ended, or none was ever taken */
    /* Filled before the push. */
    sp_choice *choices; /* [n_choices], owned */
    int32_t n_choices;
    char *adapter;  /* the name for the engine; NULL: what is active, else the base */
    bool wake_each; /* the reader wants every token, not just the end */
    /* What it was made by (NULL: the base's alone). The driver admits it only if its adapter says
     * so still; else it ends with SP_CODE_MAKE_AGAIN, and this is what to make it by. */
    sp_lora_chat *chat;
    sp_wanted_output wanted;
    sp_version_wish wanted_version;
    bool asks; /* nothing was made, for want of knowing; its choices have no prompt */
    /* What the requests' pointers point into; released with the generation. */
    void *owned;
    void (*release_owned)(void *owned);
    uint64_t received_ns;      /* sp_clock_ns when the request was read */
    sp_budget *budget;         /* borrowed, may be NULL: of the next two */
    size_t request_held;       /* of the prompts, as long as it lives */
    size_t outbox_held;        /* under the task's lock */
    sp_constraint *constraint; /* one reference, for all choices; the compiler's, before the push */
    /* Under the task's lock. */
    sp_text outbox;
    size_t outbox_routed; /* bytes of it that are experts of tokens, which do not count as unread */
    sp_digest digest;     /* of what serves it; all zero: the base, or not taken yet */
    char *served;         /* the adapter that serves it; NULL: the base */
    uint64_t version;     /* its generation; 0: the base */
    /* The engine's thread only. */
    int32_t n_left;    /* choices that run */
    bool overflowed;   /* its outbox was full once, */
    bool no_room;      /* or the budget of all clients was */
    sp_status failure; /* not SP_OK: the engine has dropped a choice of it, because of: */
    sp_error error;
    bool touched; /* in the list of those to wake */
} sp_generation;

/* NULL: out of memory. The name is copied. */
sp_generation *sp_generation_create(int32_t n_choices, const char *adapter);

/* One token in the outbox; its best alternatives, the experts of its choice's tokens and its text
 * follow it there. */
typedef struct sp_produced {
    int32_t choice, token; /* token -1: none */
    sp_finish finish;
    uint32_t text_bytes;
    float logprob; /* where it was requested */
    float processed_logprob;
    int32_t n_top;         /* alternatives */
    int32_t cached_tokens; /* of the prompt; with the finish only, as are the next three */
    int32_t drafted_tokens, accepted_tokens, verify_steps;
    uint32_t routed_bytes; /* likewise: of the experts */
    bool is_prompt;        /* a token of the prompt, for its logprob */
} sp_produced;

/* The prompts and what the engine keeps of them count from here on. False: there is no room. */
bool sp_generation_hold(sp_generation *generation, sp_budget *budget);

/* The engine's side. False: the outbox is full, or memory is short; nothing was added. Where it is
 * the budget that is used up, no_room says so. */
bool sp_generation_add(sp_generation *generation, const sp_produced *produced,
                       const sp_logprob *top, const uint16_t *routed, const char *text);

/* The reader's side: moves all that is there to *out_taken (cleared first). Returns whether the
 * generation was done when it was taken: then this was the last of it. */
bool sp_generation_take(sp_generation *generation, sp_text *out_taken);
/* Walks what was taken. NULL at its end. What it returns is borrowed from `taken`. */
const sp_produced *sp_produced_next(const sp_text *taken, size_t *cursor);
const sp_logprob *sp_produced_top(const sp_produced *produced);  /* [n_top] */
const uint16_t *sp_produced_routed(const sp_produced *produced); /* [routed_bytes / 2] */
const char *sp_produced_text(const sp_produced *produced);       /* [text_bytes] */

#endif
