/*
 * chat_state.h: what an sp_chat is made of. Shared by chat.c (opening) and chat_render.c.
 */
#ifndef SP_CHAT_CHAT_STATE_H
#define SP_CHAT_CHAT_STATE_H

#include "chat/chat.h"
#include "chat/node.h"

/* The special tokens that a configuration names, as a template's variables. */
#define SP_CHAT_TOKENS 7
extern const char *const sp_chat_token_names[SP_CHAT_TOKENS];

struct sp_chat {
    char *source_name;
    sp_template plain;
    sp_template with_tools;       /* body NULL: `plain` serves tools too */
    char *tokens[SP_CHAT_TOKENS]; /* texts of sp_chat_token_names; NULL where there is none */
    bool reasoning, calls;        /* the template speaks of <think>, of <tool_call> */
    bool tagged_calls;            /* of <function=NAME> */
};

/* The form that the released Qwen models are trained with, written anew: for a checkpoint that
 * brings no template. */
extern const char sp_qwen_form[];

#endif
