/*
 * chat: a conversation in the form of OpenAI's API to a prompt, and generated text to a message.
 *
 * Owns: the chat template of a checkpoint and the interpreter that runs it (a subset of Jinja, see
 * docs/CHAT.md), the provenance of every byte of a prompt, and the parser of what the model says.
 * It must not know: HTTP, queues, adapters, how a step runs. It reaches the engine by
 * <sidepath/engine.h> only.
 *
 * chat.h: what the server needs. A template is read once and never changes, so any number of
 * threads may render with it. Nothing blocks, except on the files that sp_chat_open reads.
 */
#ifndef SP_CHAT_CHAT_H
#define SP_CHAT_CHAT_H

#include "base/text.h"
#include "chat/jinja/codes.h"

#include <jansson.h>
#include <sidepath/engine.h>

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Reason codes (sp_error.code), beside those of a template. */
#define SP_CHAT_NO_TEMPLATE      "chat-template-missing"
#define SP_CHAT_BAD_MESSAGES     "bad-messages"             /* the request; subject: the field */
#define SP_CHAT_BAD_CONTENT_TYPE "unsupported-content-type" /* a part that is no text */
#define SP_CHAT_BAD_TOOL_CHOICE  "unsupported-tool-choice"

/* ---- the template -------------------------------------------------------------------------- */

typedef struct sp_chat sp_chat;

/*
 * Finds the template of a checkpoint: `template_file` when it is not NULL, else
 * MODEL_DIR/chat_template.jinja, else "chat_template" of MODEL_DIR/tokenizer_config.json (a string,
 * or a list of named ones, of which "default" and "tool_use" are used). Without any of these the
 * built-in Qwen form is used, but only when `engine` (may be NULL) has a tokenizer to which
 * <|im_start|> and <|im_end|> are special tokens. *out_chat is owned by the caller.
 *
 * SP_ERR_NOT_FOUND (SP_CHAT_NO_TEMPLATE): there is none. SP_ERR_INPUT (SP_CHAT_MALFORMED): a
 * template that no interpreter would take, position is the line. SP_ERR_UNSUPPORTED
 * (SP_CHAT_UNSUPPORTED): a construct that this interpreter does not know. SP_ERR_IO,
 * SP_ERR_TOO_LARGE: the files. A server that gets any of these refuses chat and serves the rest.
 */
sp_status sp_chat_open(const char *model_dir, const char *template_file, const sp_engine *engine,
                       sp_chat **out_chat, sp_error *error);
/* The same from memory, without files; `subject` names the text in errors. `config` (may be NULL)
 * holds what tokenizer_config.json would: bos_token, eos_token and the like. */
sp_status sp_chat_parse(const char *source, size_t bytes, const char *subject, const json_t *config,
                        sp_chat **out_chat, sp_error *error);

/*
 * What the folder of an adapter says of chat, as the bytes of its files: who reads them and who
 * understands them may be different threads.
 */
typedef enum sp_chat_file {
    SP_CHAT_FILE_TEMPLATE, /* chat_template.jinja */
    SP_CHAT_FILE_TOOLS,    /* additional_chat_templates/tool_use.jinja */
    SP_CHAT_FILE_CONFIG,   /* tokenizer_config.json */
    SP_CHAT_FILE_ADDED,    /* added_tokens.json */
    SP_CHAT_FILES
} sp_chat_file;

typedef struct sp_chat_folder {
    char *bytes[SP_CHAT_FILES]; /* [n_bytes], owned; NULL: it is not there */
    size_t n_bytes[SP_CHAT_FILES];
} sp_chat_folder;

/* Zeros are allowed in the second. SP_ERR_IO, SP_ERR_INPUT, SP_ERR_TOO_LARGE: a file that is there
 * cannot be read, which its name is the subject of; *out_folder is empty then. */
sp_status sp_chat_folder_read(const char *path, sp_chat_folder *out_folder, sp_error *error);
void sp_chat_folder_free(sp_chat_folder *folder);

/*
 * The template of such a folder; *out_chat is NULL where it brings none. Tokens that it does not
 * name (bos_token and the like) are those of `base_config` (may be NULL), the base's
 * tokenizer_config.json. Errors are those of sp_chat_open, and SP_ERR_UNSUPPORTED
 * (SP_CHAT_UNSUPPORTED) for a template that writes a token which the folder adds and the engine's
 * tokenizer lacks.
 */
sp_status sp_chat_open_folder(const sp_chat_folder *folder, const json_t *base_config,
                              const sp_engine *engine, sp_chat **out_chat, sp_error *error);
void sp_chat_close(sp_chat *chat); /* NULL is allowed */

/* Where the template is from: a path, or "built-in Qwen form"; for the log. Borrowed. */
const char *sp_chat_source(const sp_chat *chat);

/*
 * The special tokens that the template writes after an answer of the assistant: a model that was
 * trained with it ends its answers so, whatever ids the checkpoint names as its ends. Borrowed,
 * [*out_n]; none where the template writes none, and none without an engine.
 */
const int32_t *sp_chat_turn_ends(const sp_chat *chat, int32_t *out_n);

/* ---- conversation to prompt ---------------------------------------------------------------- */

typedef struct sp_chat_request {
    size_t struct_bytes;
    const json_t *messages;    /* array; a content is a string, null, or a list of text parts, which
                                  are joined by newlines; the role "developer" is "system" */
    const json_t *tools;       /* array, null or NULL; calls of those with "strict" are valid */
    const json_t *tool_choice; /* NULL, null, "none" (tools are left out), "auto", "required" (a
                                  call is forced) or {"type": "function", "function": {"name"}} (a
                                  call of this tool is); else refused */
    bool one_call;             /* of a call that is forced: it is the only one */
    const json_t *template_kwargs; /* object, null or NULL: further variables of the template, such
                                      as {"enable_thinking": false} */
    const char *effort;            /* "none" and "minimal" leave thoughts out where the template has
                                      "enable_thinking"; the variable "reasoning_effort". NULL: none
                                      of both. What template_kwargs says of them counts. */
    bool add_generation_prompt;    /* the default, unless continue_final_message */
    bool continue_final_message;   /* the prompt ends inside the last message */
    int64_t unix_seconds;          /* "now" of strftime_now, which is UTC */
} sp_chat_request;

/* Everything else is NULL or off; add_generation_prompt is on. */
void sp_chat_request_default(sp_chat_request *out_request);

typedef struct sp_chat_prompt {
    sp_text text;
    sp_text_span *spans; /* [n_spans] written by the template itself, ascending, not adjacent */
    size_t n_spans, spans_capacity;
    bool thinking;  /* the prompt ends inside <think>: the answer starts as reasoning */
    bool fresh;     /* and right after that tag: a newline still belongs to the tag */
    bool reasoning; /* the template knows <think>: an answer may begin with it */
    bool tools;     /* the template knows <tool_call>, and the request has tools */
    sp_constraint_thought thought; /* that may come before the answer itself */
    sp_text forced; /* where calls are held to their tools: the text of an SP_CONSTRAINT_CALLS; else
                       data NULL */
    bool may_call;  /* and no call is forced: some tools are strict */
    json_t *tagged_tools; /* owned: the tools, where the template has calls written as tags
                             (<function=NAME>) and not as JSON; else NULL */
} sp_chat_prompt;

/*
 * Runs the template. Set on success only; release with sp_chat_prompt_free. SP_ERR_INPUT with
 * SP_CHAT_BAD_MESSAGES, SP_CHAT_BAD_CONTENT_TYPE, SP_CHAT_BAD_TOOL_CHOICE (subject is the field,
 * "messages[2].content[0].type"), SP_CHAT_RAISED (the text is the template's) or SP_CHAT_FAILED;
 * SP_ERR_UNSUPPORTED with SP_CHAT_UNSUPPORTED; SP_ERR_TOO_LARGE with SP_CHAT_LIMIT. All of these
 * are about this request: 400 in HTTP.
 */
sp_status sp_chat_render(const sp_chat *chat, const sp_chat_request *request,
                         sp_chat_prompt *out_prompt, sp_error *error);
/* Zeros are allowed. */
void sp_chat_prompt_free(sp_chat_prompt *prompt);

/*
 * The prompt's ids. A special token is one only where the template wrote all of its text: what a
 * message, a tool or a variable holds is plain text, and so is a token of which the template wrote
 * one half. Otherwise the ids are those of the whole text. sp_engine_free releases *out_tokens.
 * SP_ERR_TOO_LARGE with "messages" as subject: they are more than max_tokens, found out early.
 */
sp_status sp_chat_tokenize(const sp_engine *engine, const sp_chat_prompt *prompt,
                           int32_t max_tokens, int32_t **out_tokens, int32_t *out_n_tokens,
                           sp_error *error);

/* ---- generated text to message ------------------------------------------------------------- */

typedef enum sp_chat_delta_kind {
    SP_CHAT_CONTENT,
    SP_CHAT_REASONING,     /* "reasoning_content" */
    SP_CHAT_TOOL_CALL,     /* a call begins: `text` is the function's name, `call` its index */
    SP_CHAT_TOOL_ARGUMENTS /* more of the arguments (JSON text) of call `call` */
} sp_chat_delta_kind;

typedef struct sp_chat_delta {
    sp_chat_delta_kind kind;
    int32_t call;     /* 0, 1, ..; of SP_CHAT_TOOL_* only */
    const char *text; /* borrowed until the call returns; not NUL-terminated */
    size_t bytes;
} sp_chat_delta;

typedef void (*sp_chat_delta_fn)(void *user, const sp_chat_delta *delta);

/*
 * A streaming parser: what comes does not depend on how the text is cut. Content and reasoning come
 * as they are written, but for the beginning of a tag, which is held back until it is one or is
 * not, and white space at the beginning, which an opening <think> takes with it. A call comes when
 * it is complete, so that one whose JSON is broken comes as content, tags and all. The newlines
 * that the Qwen form writes around its tags belong to the tags; every other byte comes once, in
 * order.
 */
typedef struct sp_chat_parser sp_chat_parser;

/* For the answer to `prompt`, whose text is not read. `user` is passed to `fn`. */
sp_status sp_chat_parser_create(const sp_chat_prompt *prompt, sp_chat_delta_fn fn, void *user,
                                sp_chat_parser **out_parser, sp_error *error);
/* `text` is whole characters; `fn` is called inside, zero or more times. SP_ERR_MEMORY. */
sp_status sp_chat_parser_push(sp_chat_parser *parser, const char *text, size_t bytes,
                              sp_error *error);
/* The answer has ended: what was held back comes. A parser takes nothing after this. */
sp_status sp_chat_parser_finish(sp_chat_parser *parser, sp_error *error);
int32_t sp_chat_parser_n_calls(const sp_chat_parser *parser); /* > 0: finish_reason tool_calls */
void sp_chat_parser_free(sp_chat_parser *parser);             /* NULL is allowed */

#endif
