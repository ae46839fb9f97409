/*
 * chat_state.h: what an sp_chat is made of. Shared by chat.c (opening) and chat_render.c.
 */
#ifndef SP_CHAT_CHAT_STATE_H
#define SP_CHAT_CHAT_STATE_H

#include "chat/chat.h"
#include "chat/jinja/node.h"

/* The special tokens that a configuration names, as a template's variables. */
#define SP_CHAT_TOKENS 7
extern const char *const sp_chat_token_names[SP_CHAT_TOKENS];

#define SP_CHAT_TURN_ENDS_MAX 4

#define SP_CHAT_TEMPLATE_FILE    "chat_template.jinja"
#define SP_CHAT_TOOLS_FILE       "additional_chat_templates/tool_use.jinja"
#define SP_CHAT_CONFIG_FILE      "tokenizer_config.json"
#define SP_CHAT_CONFIG_BYTES_MAX ((size_t)64 << 20)

struct sp_chat {
    char *source_name;
    sp_template plain;
    sp_template with_tools;       /* body NULL: `plain` serves tools too */
    char *tokens[SP_CHAT_TOKENS]; /* texts of sp_chat_token_names; NULL where there is none */
    bool reasoning, calls;        /* the template speaks of <think>, of <tool_call> */
    bool tagged_calls;            /* of <function=NAME> */
    int32_t turn_ends[SP_CHAT_TURN_ENDS_MAX]; /* [n_turn_ends] ids that close an answer */
    int32_t n_turn_ends;
};

/* chat.c. Reads a text into one of the chat's templates; a "chat_template" of a configuration, as a
 * text or as a list of named ones, into a chat; a token's text, NULL where it has none. */
sp_status sp_chat_add_template(sp_chat *chat, sp_template *template, const char *source,
                               size_t bytes, const char *subject, sp_error *error);
sp_status sp_chat_parse_config(const json_t *value, const char *subject, const json_t *config,
                               sp_chat **out_chat, sp_error *error);
const char *sp_chat_token_text(const json_t *value);
bool sp_chat_mentions(const char *source, size_t bytes, const char *what);

/* turn_end.c: fills them in. SP_ERR_MEMORY; a template that cannot be probed has none. */
sp_status sp_chat_find_turn_ends(sp_chat *chat, const sp_engine *engine);

/* The form that the released Qwen models are trained with, written anew: for a checkpoint that
 * brings no template. */
extern const char sp_qwen_form[];

#endif
