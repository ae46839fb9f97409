/*
 * chat_answer.h: what was generated for a chat, taken apart by the chat room, as messages or as
 * the deltas of a stream.
 */
#ifndef SP_SERVER_API_CHAT_ANSWER_H
#define SP_SERVER_API_CHAT_ANSWER_H

#include "server/api/chat_request.h"
#include "server/api/reply.h"

typedef struct sp_chat_answer sp_chat_answer;

/* One choice. In a stream its texts are empty except for what goes into the next event. */
typedef struct sp_chat_choice {
    sp_chat_answer *answer;
    sp_chat_parser *parser;
    sp_text content, reasoning, calls; /* calls: members of "tool_calls", the last one open */
    sp_text logprobs, token_ids;
    sp_text routed; /* 16-bit ids of experts, with the end */
    sp_finish finish;
} sp_chat_choice;

struct sp_chat_answer {
    sp_reply reply; /* first */
    sp_chat_completion_request request;
    sp_chat_prompt prompt; /* its flags; the text is freed once it is tokenised */
    int32_t *tokens;
    int32_t n_tokens;
    sp_chat_choice *choices; /* [request.fields.n] */
    /* What takes the deltas of a choice, its user; NULL: the messages of this file. */
    sp_chat_delta_fn take_delta;
};

extern const sp_reply_form sp_chat_answer_form;

/* route_chat.c: the form's `make`. */
sp_status sp_chat_answer_make(sp_reply *reply, sp_lora_chat *lora, sp_generation **out_generation,
                              sp_error *error);
/* Drops prompt, tokens and choices: they are made anew. */
void sp_chat_answer_clear(sp_chat_answer *answer);
/* As many as the request wants; after the prompt is known. */
sp_status sp_chat_answer_add_choices(sp_chat_answer *answer, sp_error *error);

#endif
