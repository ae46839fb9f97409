/*
 * body_rows.c: the table, and nothing else. The order is the order of reading: "stream" comes
 * before what needs it.
 */
#include "server/api/body_fields.h"

#define COMPLETION SP_FIELDS_COMPLETION
#define CHAT       SP_FIELDS_CHAT
#define BOTH       (COMPLETION | CHAT)
#define TOKENIZE   SP_FIELDS_TOKENIZE
#define DETOKENIZE SP_FIELDS_DETOKENIZE
#define LOAD       SP_FIELDS_LOAD
#define NAME       SP_FIELDS_NAME

#define AT(member)         offsetof(sp_body_fields, member)
#define API_DEFAULT(value) .defaults = {[SP_LEFT_OUT_API] = (value)}
/* A row that says no more than where a field is known. */
#define KNOWN(field, in, how)                         \
    {                                                 \
        .name = (field), .type = (how), .forms = (in) \
    }

const sp_field sp_body_rows[] = {
    {.name = "model",
     .type = SP_FIELD_STRING,
     .forms = BOTH | TOKENIZE | DETOKENIZE,
     .offset = AT(model),
     .left_out = "the active adapter, else the base"},
    {.name = "prompt",
     .type = SP_FIELD_ELSEWHERE,
     .forms = COMPLETION | TOKENIZE,
     .left_out = "needed"},
    {.name = "messages",
     .type = SP_FIELD_ELSEWHERE,
     .forms = CHAT | TOKENIZE,
     .left_out = "needed"},
    {.name = "max_completion_tokens",
     .type = SP_FIELD_INT,
     .forms = CHAT,
     .offset = AT(newer_max_tokens),
     .maximum = INT32_MAX,
     .left_out = "absent"},
    {.name = "n",
     .type = SP_FIELD_INT,
     .forms = BOTH,
     .offset = AT(n),
     .minimum = 1,
     .maximum = SP_N_MAX,
     API_DEFAULT(1)},
    {.name = "best_of",
     .type = SP_FIELD_INT,
     .forms = COMPLETION,
     .offset = AT(best_of),
     .minimum = 1,
     .maximum = SP_N_MAX,
     .left_out = "`n`"},
    {.name = "return_token_ids",
     .type = SP_FIELD_BOOL,
     .forms = BOTH,
     .offset = AT(return_token_ids)},
    {.name = "echo", .type = SP_FIELD_BOOL, .forms = COMPLETION, .offset = AT(echo)},
    {.name = "parse_special",
     .type = SP_FIELD_BOOL,
     .forms = COMPLETION | TOKENIZE,
     .offset = AT(parse_special)},
    {.name = "add_special_tokens",
     .type = SP_FIELD_BOOL,
     .forms = COMPLETION | TOKENIZE,
     .offset = AT(add_special_tokens),
     API_DEFAULT(1)},
    {.name = "stream", .type = SP_FIELD_BOOL, .forms = BOTH, .offset = AT(stream)},
    {.name = "stream_options",
     .type = SP_FIELD_OWN,
     .forms = BOTH,
     .left_out = "null",
     .read = sp_body_read_stream_options},
    {.name = "tools", .type = SP_FIELD_ELSEWHERE, .forms = CHAT | TOKENIZE, .left_out = "null"},
    {.name = "tool_choice",
     .type = SP_FIELD_ELSEWHERE,
     .forms = CHAT | TOKENIZE,
     .left_out = "\"auto\""},
    {.name = "parallel_tool_calls",
     .type = SP_FIELD_NOT,
     .forms = CHAT,
     .offset = AT(one_call),
     API_DEFAULT(1)},
    {.name = "chat_template_kwargs",
     .type = SP_FIELD_ELSEWHERE,
     .forms = CHAT | TOKENIZE,
     .left_out = "{}"},
    {.name = "add_generation_prompt",
     .type = SP_FIELD_ELSEWHERE,
     .forms = CHAT | TOKENIZE,
     .left_out = "true"},
    {.name = "continue_final_message",
     .type = SP_FIELD_ELSEWHERE,
     .forms = CHAT | TOKENIZE,
     .left_out = "false"},
    KNOWN("tokens", DETOKENIZE, SP_FIELD_ELSEWHERE),
    KNOWN("return_token_strs", TOKENIZE, SP_FIELD_ELSEWHERE),
    KNOWN("lora_name", LOAD | NAME, SP_FIELD_ELSEWHERE),
    KNOWN("lora_path", LOAD, SP_FIELD_ELSEWHERE),
    KNOWN("load_inplace", LOAD, SP_FIELD_ELSEWHERE),
    KNOWN("pinned", LOAD, SP_FIELD_ELSEWHERE),
    KNOWN("expected_generation", LOAD, SP_FIELD_ELSEWHERE),
    KNOWN("lora_int_id", LOAD | NAME, SP_FIELD_IGNORED), /* an id of vLLM's own */
    KNOWN("user", BOTH, SP_FIELD_IGNORED),
    KNOWN("metadata", BOTH, SP_FIELD_IGNORED),
    KNOWN("store", BOTH, SP_FIELD_IGNORED),
    KNOWN("service_tier", BOTH, SP_FIELD_IGNORED),
    KNOWN("safety_identifier", BOTH, SP_FIELD_IGNORED),
    KNOWN("prompt_cache_key", BOTH, SP_FIELD_IGNORED),
    KNOWN("request_id", BOTH, SP_FIELD_IGNORED),
    KNOWN("priority", BOTH, SP_FIELD_IGNORED),
    KNOWN("modalities", CHAT, SP_FIELD_IGNORED),
    KNOWN("prediction", CHAT, SP_FIELD_IGNORED),
    KNOWN("use_beam_search", BOTH, SP_FIELD_ONLY_FALSE),
    KNOWN("length_penalty", BOTH, SP_FIELD_ONLY_ONE),
    KNOWN("add_special_tokens", CHAT, SP_FIELD_ONLY_FALSE), /* the template writes them */
    KNOWN("spaces_between_special_tokens", BOTH, SP_FIELD_ONLY_TRUE),
    KNOWN("include_stop_str_in_output", BOTH, SP_FIELD_ONLY_FALSE),
    KNOWN("return_tokens_as_token_ids", BOTH, SP_FIELD_ONLY_FALSE),
    KNOWN("bad_words", BOTH, SP_FIELD_ONLY_EMPTY),
    {.name = "response_format",
     .type = SP_FIELD_OWN,
     .forms = BOTH,
     .read = sp_body_read_response_format},
    KNOWN("suffix", COMPLETION, SP_FIELD_ONLY_EMPTY),
    KNOWN("echo", CHAT, SP_FIELD_ONLY_FALSE),
    KNOWN("include_reasoning", CHAT, SP_FIELD_ONLY_TRUE),
    KNOWN("functions", CHAT, SP_FIELD_ONLY_EMPTY),
    KNOWN("documents", CHAT, SP_FIELD_ONLY_EMPTY),
    KNOWN("chat_template", CHAT | TOKENIZE, SP_FIELD_ONLY_EMPTY),
};
const size_t sp_n_body_rows = sizeof sp_body_rows / sizeof *sp_body_rows;
