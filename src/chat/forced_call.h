/*
 * forced_call.h: "tool_choice" that forces a call: which tools it may be of, and the form of a call
 * that the template's own models write, as the text of a constraint. Pure functions.
 */
#ifndef SP_CHAT_FORCED_CALL_H
#define SP_CHAT_FORCED_CALL_H

#include "chat/chat.h"

/* Whether it is "required" or the name of a function. NULL is allowed. */
bool sp_forced_call_is_wanted(const json_t *tool_choice);

/*
 * For a prompt that was rendered and a choice that is wanted. SP_ERR_INPUT
 * (SP_CHAT_BAD_TOOL_CHOICE, subject "tool_choice"): there are no tools, or none of that name, or
 * the template has no form of a call that can be forced. SP_ERR_MEMORY.
 */
sp_status sp_forced_call_write(const sp_chat_prompt *prompt, const sp_chat_request *request,
                               sp_text *out_text, sp_error *error);

#endif
