/*
 * forced_call.h: calls that are held to their tools: of a "tool_choice" that forces a call, and of
 * tools with "strict" that the model may call or not. Which tools that are, and the form of a call
 * that the template's own models write, as the text of a constraint. Pure functions.
 */
#ifndef SP_CHAT_FORCED_CALL_H
#define SP_CHAT_FORCED_CALL_H

#include "chat/chat.h"

/* Whether it is "required" or the name of a function. NULL is allowed. */
bool sp_forced_call_is_wanted(const json_t *tool_choice);

/* Whether a call is left to the model and one of the tools is "strict". */
bool sp_strict_call_is_wanted(const sp_chat_request *request);

/*
 * For a prompt that was rendered and a choice that is wanted. SP_ERR_INPUT
 * (SP_CHAT_BAD_TOOL_CHOICE, subject "tool_choice"): there are no tools, or none of that name, or
 * the template has no calls. SP_ERR_MEMORY.
 */
sp_status sp_forced_call_write(const sp_chat_prompt *prompt, const sp_chat_request *request,
                               sp_text *out_text, sp_error *error);

/* Text of any kind, in which calls of the tools are in the template's form, and those of strict
 * ones are valid; nothing is written where the template has no calls. SP_ERR_MEMORY. */
sp_status sp_strict_call_write(const sp_chat_prompt *prompt, const sp_chat_request *request,
                               sp_text *out_text, sp_error *error);

#endif
