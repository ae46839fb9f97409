/*
 * tagged_call.h: a tool call written as tags, as Qwen3-Coder and Qwen3.5 do it:
 *
 *     <function=NAME>
 *     <parameter=KEY>
 *     VALUE
 *     </parameter>
 *     </function>
 *
 * A value has no quotes, so its type is what the tool's schema says of the parameter.
 */
#ifndef SP_CHAT_TAGGED_CALL_H
#define SP_CHAT_TAGGED_CALL_H

#include "base/text.h"

#include <jansson.h>

/*
 * Finds the name in `text` [bytes] and adds the arguments to *arguments as the text of a JSON
 * object. A parameter of type string, or one that the schema does not have, is a string; of any
 * other type, JSON as it is written, or a string when it is none. SP_ERR_INPUT: not such a call.
 * SP_ERR_MEMORY.
 */
sp_status sp_tagged_call_read(const char *text, size_t bytes, const json_t *tools,
                              const char **out_name, size_t *out_name_bytes, sp_text *arguments);

#endif
