/*
 * reply.h: what the engine's thread produces for one generation, on its way into an answer: a
 * whole JSON body, or a stream of server-sent events. The form (completions, chat) says what a
 * token looks like; this file takes tokens out of the outbox, counts them, and knows the end.
 */
#ifndef SP_SERVER_API_REPLY_H
#define SP_SERVER_API_REPLY_H

#include "server/api/api.h"

#include <stdatomic.h>

typedef struct sp_reply sp_reply;

typedef struct sp_reply_form {
    const char *object, *stream_object; /* "text_completion" */
    const char *id_prefix;              /* "cmpl-" */
    const char *error_event; /* the name of an event that is an error; NULL: it has none */
    /*
     * Makes the generation that its request means to an adapter that says `lora` of itself (NULL:
     * the base's), which it refers to from then on. May be called again: what was made before is
     * dropped. *out_generation is the caller's.
     */
    sp_status (*make)(sp_reply *reply, sp_lora_chat *lora, sp_generation **out_generation,
                      sp_error *error);
    /* Streaming only: what comes before the first token, and after the last. May be NULL. */
    void (*begin)(sp_reply *reply);
    void (*end)(sp_reply *reply);
    /* One token of a choice; in a stream it adds events to reply->out. */
    void (*produced)(sp_reply *reply, const sp_produced *produced);
    /* Not streaming: the members of "choices". */
    void (*add_choices)(sp_reply *reply);
    /* Members of the answer beside "choices", or of a stream's first event: each begins with a
     * comma. May be NULL. */
    void (*add_members)(sp_reply *reply);
    /* Not NULL: the form's answers have nothing of the above around them. It writes a whole one to
     * reply->out; in a stream `begin`, `produced` and `end` write all events themselves. */
    void (*whole)(sp_reply *reply);
    /* The memory of what is kept for the end. */
    size_t (*kept_bytes)(const sp_reply *reply);
    void (*destroy)(sp_reply *reply); /* frees the form's own struct, the reply in it included */
} sp_reply_form;

struct sp_reply {
    const sp_reply_form *form;
    atomic_int references; /* the call's and the generation's: a client may go at any time */
    sp_call *call;
    sp_generation *generation; /* the call's task */
    const char *model;         /* as the request names it; NULL: it does not. Borrowed. */
    sp_version_wish wanted_version;
    bool stream, include_usage;
    bool usage_each;  /* with include_usage: in each event, as far as it has come */
    bool has_members; /* they were in an event */
    int64_t prompt_tokens, generated_tokens, cached_tokens;
    int64_t drafted_tokens, accepted_tokens, verify_steps; /* of the choices that have ended */
    int32_t choices_per_prompt; /* they share one prompt, which counts once */
    sp_text head;               /* the members that every object of the answer begins with */
    sp_text taken, out;
    size_t out_sent;
    sp_budget *budget;
    size_t held;      /* of the budget, for all of these and what the form keeps */
    uint64_t sent_ns; /* of a stream: the last event or comment */
    bool begun;       /* the stream's first event is written */
    bool ended, no_room;
};

/*
 * The reply becomes the call's state, makes its generation and waits for it. `asks`: the request
 * has to know what its adapter says before it can be made, else it begins with a guess where the
 * adapter is not loaded. The form's struct begins with the sp_reply.
 */
void sp_reply_start(sp_reply *reply, sp_call *call, bool asks);
/* What every form's destroy begins with. */
void sp_reply_free_parts(sp_reply *reply);

/* An event around the members of "choices" that are added in between. */
void sp_reply_event_begin(sp_reply *reply);
void sp_reply_event_end(sp_reply *reply);

/* The model's name as answers give it; after the first token is there. Borrowed. */
const char *sp_reply_model(const sp_reply *reply);

/* `, "adapter_digest": .., "adapter_generation": ..`; after the first token is there. */
void sp_reply_add_version(const sp_reply *reply, sp_text *out);

/* `, "FIELD": [..]` */
void sp_reply_add_ids(sp_text *out, const char *field, const int32_t *tokens, int32_t n);

/* `, "routed_experts": [[[..], ..], ..]`: of each token in each layer the experts, out of the
 * engine's [n_bytes / 2] ids; null: there are none, where the answer was aborted. */
void sp_reply_add_routing(const sp_reply *reply, sp_text *out, const void *routed, size_t bytes);

/* "stop", "length", "abort" with quotes, or null. */
const char *sp_finish_json(sp_finish finish);

#endif
