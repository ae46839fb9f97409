/*
 * The built-in template. It gives, byte for byte, what the released Qwen3 templates give: system
 * text and tools in one turn, reasoning kept after the last question only, results of tools as one
 * turn of the user, and the empty thought that switches thinking off. tests/chat compares.
 */
#include "chat/chat_state.h"

#define SYSTEM_TURN                                                                        \
    "{%- set system = messages[0].content if messages[0].role == 'system' else none -%}\n" \
    "{%- if tools -%}\n"                                                                   \
    "{{ '<|im_start|>system\\n' ~ (system ~ '\\n\\n' if system is not none) }}"            \
    "{{ '# Tools\\n\\nYou may call one or more functions to assist with the user query."   \
    "\\n\\nYou are provided with function signatures within <tools></tools> XML tags:"     \
    "\\n<tools>' }}"                                                                       \
    "{%- for tool in tools %}{{ '\\n' ~ tool|tojson }}{% endfor -%}"                       \
    "{{ '\\n</tools>\\n\\nFor each function call, return a json object with function "     \
    "name and arguments within <tool_call></tool_call> XML tags:\\n<tool_call>\\n"         \
    "{\"name\": <function-name>, \"arguments\": <args-json-object>}\\n</tool_call>"        \
    "<|im_end|>\\n' }}\n"                                                                  \
    "{%- elif system is not none -%}\n"                                                    \
    "{{ '<|im_start|>system\\n' ~ system ~ '<|im_end|>\\n' }}\n"                           \
    "{%- endif -%}\n"

/* What a tool answered may come as a user's message, which is then no question. */
#define LAST_QUESTION                                                            \
    "{%- set question = namespace(index=messages|length - 1, found=false) -%}\n" \
    "{%- for message in messages|reverse -%}\n"                                  \
    "{%- if message.role == 'user' and not question.found and not "              \
    "(message.content.startswith('<tool_response>') and "                        \
    "message.content.endswith('</tool_response>')) -%}\n"                        \
    "{%- set question.found = true -%}\n"                                        \
    "{%- set question.index = loop.revindex0 -%}\n"                              \
    "{%- endif -%}\n"                                                            \
    "{%- endfor -%}\n"

/* Reasoning that is in the content, as a client may send it back, is taken out of it. */
#define ASSISTANT_TURN                                                        \
    "{%- set text = message.content -%}\n"                                    \
    "{%- set thought = message.reasoning_content|default(none) -%}\n"         \
    "{%- if thought is none and '</think>' in text -%}\n"                     \
    "{%- set thought = (text.split('</think>')|first).rstrip('\\n')"          \
    ".split('<think>')[-1].lstrip('\\n') -%}\n"                               \
    "{%- set text = text.split('</think>')[-1].lstrip('\\n') -%}\n"           \
    "{%- endif -%}\n"                                                         \
    "{{ '<|im_start|>assistant\\n' }}\n"                                      \
    "{%- if loop.index0 > question.index and (loop.last or thought) -%}\n"    \
    "{{ '<think>\\n' ~ (thought or '').strip('\\n') ~ '\\n</think>\\n\\n' ~ " \
    "text.lstrip('\\n') }}\n"                                                 \
    "{%- else -%}\n"                                                          \
    "{{ text }}\n"                                                            \
    "{%- endif -%}\n"                                                         \
    "{%- for call in message.tool_calls or [] -%}\n"                          \
    "{%- set function = call.function or call -%}\n"                          \
    "{{ ('\\n' if text or not loop.first) ~ '<tool_call>\\n{\"name\": \"' ~ " \
    "function.name ~ '\", \"arguments\": ' }}\n"                              \
    "{{- function.arguments if function.arguments is string else "            \
    "function.arguments|tojson }}\n"                                          \
    "{{- '}\\n</tool_call>' }}\n"                                             \
    "{%- endfor -%}\n"                                                        \
    "{{ '<|im_end|>\\n' }}\n"

/* Results that follow each other share a turn. */
#define TOOL_TURN                                                                \
    "{{ '<|im_start|>user' if loop.first or loop.previtem.role != 'tool' }}\n"   \
    "{{- '\\n<tool_response>\\n' ~ message.content ~ '\\n</tool_response>' }}\n" \
    "{{- '<|im_end|>\\n' if loop.last or loop.nextitem.role != 'tool' }}\n"

const char sp_qwen_form[] = SYSTEM_TURN LAST_QUESTION
    "{%- for message in messages -%}\n"
    "{%- if message.role == 'user' or (message.role == 'system' and not loop.first) -%}\n"
    "{{ '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' }}\n"
    "{%- elif message.role == 'assistant' -%}\n" ASSISTANT_TURN
    "{%- elif message.role == 'tool' -%}\n" TOOL_TURN "{%- endif -%}\n"
    "{%- endfor -%}\n"
    "{%- if add_generation_prompt -%}\n"
    "{{ '<|im_start|>assistant\\n' }}\n"
    "{{- '<think>\\n\\n</think>\\n\\n' if enable_thinking is defined and "
    "enable_thinking is false }}\n"
    "{%- endif -%}\n";
