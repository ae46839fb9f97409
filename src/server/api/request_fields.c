#include "server/api/request_fields.h"

#include "base/alloc.h"
#include "base/error.h"
#include "base/text.h"

#include <string.h>
#include <sys/random.h>

/* ---- the rule for fields ------------------------------------------------------------------- */

typedef enum field_rule_kind {
    SERVED,
    IGNORED,    /* cannot change the answer */
    ONLY_FALSE, /* not served; taken while it asks for nothing */
    ONLY_TRUE,  /* what happens anyway */
    ONLY_ONE,   /* 1 */
    ONLY_EMPTY, /* "", [] or {} */
    ONLY_TEXT   /* {"type": "text"} */
} field_rule_kind;

typedef struct field_rule {
    const char *name;
    unsigned sets;
    field_rule_kind kind;
} field_rule;

#define COMPLETION SP_FIELDS_COMPLETION
#define CHAT       SP_FIELDS_CHAT
#define BOTH       (COMPLETION | CHAT)
#define TOKENIZE   SP_FIELDS_TOKENIZE
#define DETOKENIZE SP_FIELDS_DETOKENIZE
#define LOAD       SP_FIELDS_LOAD
#define NAME       SP_FIELDS_NAME

static const field_rule rules[] = {
    {"model", BOTH | TOKENIZE | DETOKENIZE, SERVED},
    {"prompt", COMPLETION | TOKENIZE, SERVED},
    {"messages", CHAT | TOKENIZE, SERVED},
    {"tokens", DETOKENIZE, SERVED},
    {"max_tokens", BOTH, SERVED},
    {"max_completion_tokens", CHAT, SERVED},
    {"n", BOTH, SERVED},
    {"stream", BOTH, SERVED},
    {"stream_options", BOTH, SERVED},
    {"stop", BOTH, SERVED},
    {"stop_token_ids", BOTH, SERVED},
    {"min_tokens", BOTH, SERVED},
    {"skip_special_tokens", BOTH, SERVED},
    {"seed", BOTH, SERVED},
    {"temperature", BOTH, SERVED},
    {"top_p", BOTH, SERVED},
    {"top_k", BOTH, SERVED},
    {"min_p", BOTH, SERVED},
    {"presence_penalty", BOTH, SERVED},
    {"frequency_penalty", BOTH, SERVED},
    {"repetition_penalty", BOTH, SERVED},
    {"ignore_eos", BOTH, SERVED},
    {"lora_scale", BOTH, SERVED},
    {"return_token_ids", BOTH, SERVED},
    {"echo", COMPLETION, SERVED},
    {"parse_special", COMPLETION | TOKENIZE, SERVED},
    {"tools", CHAT | TOKENIZE, SERVED},
    {"tool_choice", CHAT | TOKENIZE, SERVED},
    {"chat_template_kwargs", CHAT | TOKENIZE, SERVED},
    {"add_generation_prompt", CHAT | TOKENIZE, SERVED},
    {"continue_final_message", CHAT | TOKENIZE, SERVED},
    {"return_token_strs", TOKENIZE, SERVED},
    {"logprobs", BOTH, SERVED},
    {"top_logprobs", CHAT, SERVED},
    {"logit_bias", BOTH, SERVED},
    {"lora_name", LOAD | NAME, SERVED},
    {"lora_path", LOAD, SERVED},
    {"load_inplace", LOAD, SERVED},
    {"pinned", LOAD, SERVED},
    {"expected_generation", LOAD, SERVED},
    {"lora_int_id", LOAD | NAME, IGNORED}, /* an id of vLLM's own */
    {"user", BOTH, IGNORED},
    {"metadata", BOTH, IGNORED},
    {"store", BOTH, IGNORED},
    {"service_tier", BOTH, IGNORED},
    {"safety_identifier", BOTH, IGNORED},
    {"prompt_cache_key", BOTH, IGNORED},
    {"request_id", BOTH, IGNORED},
    {"priority", BOTH, IGNORED},
    {"best_of", COMPLETION, SERVED},
    {"suffix", COMPLETION, ONLY_EMPTY},
    {"add_special_tokens", COMPLETION | TOKENIZE, SERVED},
    {"add_special_tokens", CHAT, ONLY_FALSE}, /* the template writes them */
    {"spaces_between_special_tokens", BOTH, ONLY_TRUE},
    {"include_stop_str_in_output", BOTH, ONLY_FALSE},
    {"use_beam_search", BOTH, ONLY_FALSE},
    {"length_penalty", BOTH, ONLY_ONE},
    {"bad_words", BOTH, ONLY_EMPTY},
    {"response_format", BOTH, ONLY_TEXT},
    {"functions", CHAT, ONLY_EMPTY},
    {"modalities", CHAT, IGNORED},
    {"parallel_tool_calls", CHAT, SERVED},
    {"echo", CHAT, ONLY_FALSE},
    {"include_reasoning", CHAT, ONLY_TRUE},
    {"prediction", CHAT, IGNORED},
    {"return_tokens_as_token_ids", BOTH, ONLY_FALSE},
    {"chat_template", CHAT | TOKENIZE, ONLY_EMPTY},
    {"documents", CHAT, ONLY_EMPTY},
};

static const field_rule *find_rule(const char *name, size_t bytes, sp_field_set set)
{
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++)
        if ((rules[i].sets & (unsigned)set) != 0 && strncmp(rules[i].name, name, bytes) == 0 &&
            rules[i].name[bytes] == '\0')
            return &rules[i];
    return NULL;
}

bool sp_fields_know(sp_field_set set, const char *path)
{
    return find_rule(path, strcspn(path, ".["), set) != NULL;
}

static bool is_number(const json_t *value, double number)
{
    double given = json_number_value(value);

    return json_is_number(value) && given >= number && given <= number;
}

static bool is_empty(const json_t *value)
{
    if (json_is_string(value))
        return json_string_length(value) == 0;
    return (json_is_array(value) && json_array_size(value) == 0) ||
           (json_is_object(value) && json_object_size(value) == 0);
}

static bool asks_nothing(const json_t *value, field_rule_kind kind)
{
    const char *type;

    switch (kind) {
    case SERVED:
    case IGNORED:
        return true;
    case ONLY_FALSE:
        return json_is_false(value);
    case ONLY_TRUE:
        return json_is_true(value);
    case ONLY_ONE:
        return is_number(value, 1);
    case ONLY_EMPTY:
        return is_empty(value);
    case ONLY_TEXT:
        type = json_string_value(json_object_get(value, "type"));
        return type && strcmp(type, "text") == 0;
    }
    return false;
}

sp_status sp_fields_check(const json_t *object, sp_field_set set, sp_error *error)
{
    const char *name;
    json_t *value;

    json_object_foreach((json_t *)(uintptr_t)object, name, value)
    {
        const field_rule *rule = find_rule(name, strlen(name), set);

        if (json_is_null(value))
            continue;
        if (!rule)
            return sp_fail(error, SP_ERR_INPUT, SP_CODE_UNKNOWN_FIELD, name, -1,
                           "the field \"%.100s\" is not known", name);
        if (!asks_nothing(value, rule->kind))
            return sp_fail(error, SP_ERR_INPUT, SP_CODE_UNSUPPORTED_FIELD, name, -1,
                           "the field \"%.100s\" is not supported with this value", name);
    }
    return SP_OK;
}

/* ---- lists of ids ---------------------------------------------------------------------------- */

sp_status sp_read_token_ids(const json_t *list, const char *field, int32_t **out_tokens,
                            int32_t *out_n, sp_error *error)
{
    size_t n = json_array_size(list);
    int32_t *tokens;

    if (n == 0)
        return sp_fail(error, SP_ERR_INPUT, NULL, field, -1, "field \"%s\" is empty", field);
    tokens = sp_calloc(n, sizeof *tokens);
    if (!tokens)
        return sp_fail_memory(error, n * sizeof *tokens, "a prompt");
    for (size_t i = 0; i < n; i++) {
        const json_t *id = json_array_get(list, i);
        json_int_t value = json_integer_value(id);

        if (!json_is_integer(id) || value < 0 || value > INT32_MAX) {
            sp_free(tokens);
            return sp_fail(error, SP_ERR_INPUT, NULL, field, (int64_t)i,
                           "field \"%s\": element %zu is not a token id", field, i);
        }
        tokens[i] = (int32_t)value;
    }
    *out_tokens = tokens;
    *out_n = (int32_t)n;
    return SP_OK;
}

/* ---- reading ------------------------------------------------------------------------------- */

static sp_status read_int(const json_t *object, const char *field, int64_t minimum, int64_t maximum,
                          int64_t fallback, int32_t *out_value, sp_error *error)
{
    int64_t value = fallback;
    sp_status status =
        sp_json_int(object, field, false, minimum, maximum, fallback, NULL, &value, error);

    if (status == SP_OK)
        *out_value = (int32_t)value;
    return status;
}

typedef struct double_field {
    const char *name;
    double minimum, maximum;
    size_t offset;
} double_field;

#define DOUBLE(field, minimum, maximum)                               \
    {                                                                 \
#field, minimum, maximum, offsetof(sp_sampling_fields, field) \
    }

/* *fields holds what those mean that are left out. */
static sp_status read_doubles(const json_t *object, sp_sampling_fields *fields, sp_error *error)
{
    static const double_field table[] = {
        DOUBLE(temperature, 0, 1000),
        DOUBLE(top_p, 0, 1),
        DOUBLE(min_p, 0, 1),
        DOUBLE(lora_scale, 0, 16),
        DOUBLE(presence_penalty, -2, 2),
        DOUBLE(frequency_penalty, -2, 2),
        DOUBLE(repetition_penalty, 0.01, 100),
    };

    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        double *field = (double *)(void *)((char *)fields + table[i].offset);
        double value = *field;
        sp_status status = sp_json_double(object, table[i].name, false, value, NULL, &value, error);

        if (status != SP_OK)
            return status;
        if (!(value >= table[i].minimum && value <= table[i].maximum))
            return sp_fail(error, SP_ERR_INPUT, NULL, table[i].name, -1,
                           "field \"%s\" must be from %g to %g", table[i].name, table[i].minimum,
                           table[i].maximum);
        *field = value;
    }
    return SP_OK;
}

static sp_status read_bools(const json_t *object, sp_sampling_fields *fields, sp_error *error)
{
    bool skip_special = true;
    sp_status status = sp_json_bool(object, "stream", false, false, NULL, &fields->stream, error);

    if (status == SP_OK)
        status =
            sp_json_bool(object, "skip_special_tokens", false, true, NULL, &skip_special, error);
    fields->keep_special = !skip_special;
    if (status == SP_OK)
        status = sp_json_bool(object, "ignore_eos", false, false, NULL, &fields->ignore_eos, error);
    if (status == SP_OK)
        status = sp_json_bool(object, "return_token_ids", false, false, NULL,
                              &fields->return_token_ids, error);
    return status;
}

static sp_status read_stream_options(const json_t *object, sp_sampling_fields *fields,
                                     sp_error *error)
{
    const json_t *options = json_object_get(object, "stream_options");
    const char *name;
    json_t *value;

    if (!options || json_is_null(options))
        return SP_OK;
    if (!json_is_object(options))
        return sp_fail(error, SP_ERR_INPUT, NULL, "stream_options", -1,
                       "field \"stream_options\" is not an object");
    if (!fields->stream)
        return sp_fail(error, SP_ERR_INPUT, NULL, "stream_options", -1,
                       "\"stream_options\" needs \"stream\": true");
    json_object_foreach((json_t *)(uintptr_t)options, name, value)
    {
        bool *known = strcmp(name, "include_usage") == 0            ? &fields->include_usage
                      : strcmp(name, "continuous_usage_stats") == 0 ? &fields->usage_each
                                                                    : NULL;

        if (known && json_is_boolean(value))
            *known = json_is_true(value);
        else if (known || (!json_is_null(value) && !json_is_false(value)))
            return sp_fail(error, SP_ERR_INPUT, SP_CODE_UNSUPPORTED_FIELD, "stream_options", -1,
                           "\"stream_options\" takes \"include_usage\" and "
                           "\"continuous_usage_stats\": true or false, not \"%.100s\"",
                           name);
    }
    fields->usage_each &= fields->include_usage;
    return SP_OK;
}

static sp_status bad_stop(sp_error *error)
{
    return sp_fail(error, SP_ERR_INPUT, NULL, "stop", -1,
                   "field \"stop\" must be a text or a list of at most %d, each of 1 to %d bytes",
                   SP_STOP_MAX, SP_STOP_TEXT_BYTES_MAX);
}

static bool is_stop(const json_t *value)
{
    size_t bytes = json_string_length(value);

    return json_is_string(value) && bytes >= 1 && bytes <= SP_STOP_TEXT_BYTES_MAX;
}

static sp_status read_stop(const json_t *object, sp_sampling_fields *fields, sp_error *error)
{
    const json_t *stop = json_object_get(object, "stop");
    size_t n = json_is_array(stop) ? json_array_size(stop) : 1;

    if (!stop || json_is_null(stop) || n == 0)
        return SP_OK;
    if (n > SP_STOP_MAX)
        return bad_stop(error);
    fields->stop = sp_calloc(n, sizeof *fields->stop);
    if (!fields->stop)
        return sp_fail_memory(error, n * sizeof *fields->stop, "stop texts");
    for (size_t i = 0; i < n; i++) {
        const json_t *text = json_is_array(stop) ? json_array_get(stop, i) : stop;

        if (!is_stop(text))
            return bad_stop(error);
        fields->stop[i] = json_string_value(text);
        fields->n_stop = (int32_t)i + 1;
    }
    return SP_OK;
}

sp_status sp_sampling_fields_add_stop_tokens(sp_sampling_fields *fields, const int32_t *tokens,
                                             int32_t n, sp_error *error)
{
    size_t bytes = ((size_t)fields->n_stop_tokens + (size_t)n) * sizeof *tokens;
    int32_t *grown;

    if (n == 0)
        return SP_OK;
    grown = sp_realloc(fields->stop_tokens, bytes);
    if (!grown)
        return sp_fail_memory(error, bytes, "stop_token_ids");
    memcpy(grown + fields->n_stop_tokens, tokens, (size_t)n * sizeof *tokens);
    fields->stop_tokens = grown;
    fields->n_stop_tokens += n;
    return SP_OK;
}

/* The engine judges the ids. */
static sp_status read_stop_tokens(const json_t *object, sp_sampling_fields *fields, sp_error *error)
{
    const json_t *list = json_object_get(object, "stop_token_ids");

    if (!list || json_is_null(list) || (json_is_array(list) && json_array_size(list) == 0))
        return SP_OK;
    if (!json_is_array(list) || json_array_size(list) > SP_STOP_IDS_MAX)
        return sp_fail(error, SP_ERR_INPUT, NULL, "stop_token_ids", -1,
                       "field \"stop_token_ids\" must be a list of at most %d token ids",
                       SP_STOP_IDS_MAX);
    return sp_read_token_ids(list, "stop_token_ids", &fields->stop_tokens, &fields->n_stop_tokens,
                             error);
}

/* Completions give a number of alternatives, chat a yes and a number. */
static sp_status read_logprobs(const json_t *object, sp_field_set set, sp_sampling_fields *fields,
                               sp_error *error)
{
    const json_t *value = json_object_get(object, "logprobs");
    sp_status status;

    if (set == SP_FIELDS_COMPLETION) {
        fields->logprobs = value && !json_is_null(value);
        return read_int(object, "logprobs", 0, SP_TOP_LOGPROBS_MAX, 0, &fields->top_logprobs,
                        error);
    }
    status = sp_json_bool(object, "logprobs", false, false, NULL, &fields->logprobs, error);
    if (status == SP_OK)
        status = read_int(object, "top_logprobs", 0, SP_TOP_LOGPROBS_MAX, 0, &fields->top_logprobs,
                          error);
    if (status == SP_OK && fields->top_logprobs > 0 && !fields->logprobs)
        return sp_fail(error, SP_ERR_INPUT, NULL, "top_logprobs", -1,
                       "\"top_logprobs\" needs \"logprobs\": true");
    return status;
}

static bool read_id(const char *text, int32_t *out_id)
{
    int64_t id = 0;

    if (text[0] == '\0' || strlen(text) > 9)
        return false;
    for (; *text; text++) {
        if (*text < '0' || *text > '9')
            return false;
        id = id * 10 + (*text - '0');
    }
    *out_id = (int32_t)id;
    return true;
}

/* {"ID": BIAS}; the engine judges ids and ranges. */
static sp_status read_bias(const json_t *object, sp_sampling_fields *fields, sp_error *error)
{
    const json_t *map = json_object_get(object, "logit_bias");
    const char *id;
    json_t *bias;

    if (!map || json_is_null(map))
        return SP_OK;
    if (!json_is_object(map) || json_object_size(map) > SP_LOGIT_BIAS_MAX)
        return sp_fail(error, SP_ERR_INPUT, NULL, "logit_bias", -1,
                       "field \"logit_bias\" must be an object of at most %d members",
                       SP_LOGIT_BIAS_MAX);
    fields->bias = sp_calloc(json_object_size(map) + 1, sizeof *fields->bias);
    if (!fields->bias)
        return sp_fail_memory(error, sizeof *fields->bias, "logit_bias");
    json_object_foreach((json_t *)(uintptr_t)map, id, bias)
    {
        sp_logit_bias *entry = &fields->bias[fields->n_bias++];

        if (!read_id(id, &entry->token) || !json_is_number(bias))
            return sp_fail(error, SP_ERR_INPUT, NULL, "logit_bias", -1,
                           "field \"logit_bias\": \"%.40s\" is not a token id with a number", id);
        entry->bias = (float)json_number_value(bias);
    }
    return SP_OK;
}

static sp_status read_seed(const json_t *object, sp_sampling_fields *fields, sp_error *error)
{
    const json_t *seed = json_object_get(object, "seed");
    int64_t value = 0;
    sp_status status;

    if (!seed || json_is_null(seed)) {
        /* A seed that could be guessed is no harm: it only must not repeat. */
        if (getrandom(&fields->seed, sizeof fields->seed, GRND_NONBLOCK) < 0)
            fields->seed = (uint64_t)(uintptr_t)fields;
        return SP_OK;
    }
    status = sp_json_int(object, "seed", true, INT64_MIN, INT64_MAX, 0, NULL, &value, error);
    fields->seed = (uint64_t)value;
    return status;
}

/* max_completion_tokens is the newer name of max_tokens; both must not disagree. */
static sp_status read_max_tokens(const json_t *object, sp_sampling_fields *fields, sp_error *error)
{
    int64_t older = -1, newer = -1;
    sp_status status =
        sp_json_int(object, "max_tokens", false, 0, INT32_MAX, -1, NULL, &older, error);

    if (status == SP_OK)
        status = sp_json_int(object, "max_completion_tokens", false, 0, INT32_MAX, -1, NULL, &newer,
                             error);
    if (status == SP_OK && older >= 0 && newer >= 0 && older != newer)
        return sp_fail(error, SP_ERR_INPUT, NULL, "max_tokens", -1,
                       "\"max_tokens\" and \"max_completion_tokens\" differ");
    fields->max_tokens = newer >= 0 ? newer : older;
    return status;
}

const sp_sampling_defaults sp_sampling_api_defaults = {
    .temperature = 1, .top_p = 1, .min_p = 0, .repetition_penalty = 1, .top_k = 0};

sp_status sp_sampling_fields_read(const json_t *object, sp_field_set set,
                                  const sp_sampling_defaults *defaults,
                                  sp_sampling_fields *out_fields, sp_error *error)
{
    sp_sampling_fields *fields = out_fields;
    sp_status status;

    *fields = (sp_sampling_fields){.max_tokens = -1,
                                   .temperature = defaults->temperature,
                                   .top_p = defaults->top_p,
                                   .min_p = defaults->min_p,
                                   .lora_scale = 1,
                                   .repetition_penalty = defaults->repetition_penalty};
    status = sp_json_string(object, "model", false, NULL, &fields->model, error);
    if (status == SP_OK)
        status = read_max_tokens(object, fields, error);
    if (status == SP_OK)
        status = read_int(object, "n", 1, SP_N_MAX, 1, &fields->n, error);
    if (status == SP_OK)
        status = read_int(object, "min_tokens", 0, INT32_MAX, 0, &fields->min_tokens, error);
    if (status == SP_OK)
        status = read_int(object, "top_k", -1, INT32_MAX, defaults->top_k, &fields->top_k, error);
    if (status == SP_OK)
        status = read_doubles(object, fields, error);
    if (status == SP_OK)
        status = read_bools(object, fields, error);
    if (status == SP_OK)
        status = read_stream_options(object, fields, error);
    if (status == SP_OK)
        status = read_logprobs(object, set, fields, error);
    if (status == SP_OK)
        status = read_bias(object, fields, error);
    if (status == SP_OK)
        status = read_seed(object, fields, error);
    if (status == SP_OK)
        status = read_stop(object, fields, error);
    if (status == SP_OK)
        status = read_stop_tokens(object, fields, error);
    if (status != SP_OK)
        sp_sampling_fields_free(fields);
    return status;
}

void sp_sampling_fields_free(sp_sampling_fields *fields)
{
    sp_free(fields->bias);
    fields->bias = NULL;
    fields->n_bias = 0;
    sp_free(fields->stop);
    fields->stop = NULL;
    fields->n_stop = 0;
    sp_free(fields->stop_tokens);
    fields->stop_tokens = NULL;
    fields->n_stop_tokens = 0;
}

sp_request sp_sampling_fields_request(const sp_sampling_fields *fields)
{
    sp_request request;

    sp_request_default(&request, sizeof request);
    request.lora_scale = (float)fields->lora_scale;
    request.max_tokens = (int32_t)fields->max_tokens;
    request.temperature = fields->temperature;
    request.top_k = fields->top_k > 0 ? fields->top_k : 0;
    request.top_p = fields->top_p;
    request.min_p = fields->min_p;
    request.presence_penalty = fields->presence_penalty;
    request.frequency_penalty = fields->frequency_penalty;
    request.repetition_penalty = fields->repetition_penalty;
    request.logit_bias = fields->bias;
    request.n_logit_bias = fields->n_bias;
    request.logprobs = fields->logprobs;
    request.top_logprobs = fields->top_logprobs;
    request.ignore_eos = fields->ignore_eos;
    request.stop = fields->stop;
    request.n_stop = fields->n_stop;
    request.stop_tokens = fields->stop_tokens;
    request.n_stop_tokens = fields->n_stop_tokens;
    request.min_tokens = fields->min_tokens;
    request.keep_special = fields->keep_special;
    return request;
}
