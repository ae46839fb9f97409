#include "cli/requests.h"

#include "base/alloc.h"
#include "base/error.h"
#include "base/json.h"

#include <errno.h>
#include <string.h>

#define LINE_BYTES_MAX ((size_t)64 << 20)

/* ---- one request --------------------------------------------------------------------------- */

static void free_request(sp_cli_request *request)
{
    for (int32_t i = 0; i < request->n_stop; i++)
        sp_free(request->stop[i]);
    sp_free(request->stop);
    sp_free(request->adapter);
    sp_free(request->prompt);
    sp_free(request->prompt_tokens);
    sp_free(request->tokens);
    sp_free(request->bias);
    sp_text_free(&request->text);
    sp_text_free(&request->scores);
    sp_text_free(&request->prompt_scores);
    *request = (sp_cli_request){0};
}

void sp_cli_requests_free(sp_cli_requests *requests)
{
    for (size_t i = 0; i < requests->n; i++)
        free_request(&requests->items[i]);
    sp_free(requests->items);
    *requests = (sp_cli_requests){0};
}

static sp_status add_stop(sp_cli_request *request, const char *text, sp_error *error)
{
    size_t bytes = ((size_t)request->n_stop + 1) * sizeof(char *);
    char **grown = sp_realloc(request->stop, bytes);

    if (!grown)
        return sp_fail_memory(error, bytes, "a stop string");
    request->stop = grown;
    request->stop[request->n_stop] = sp_strdup(text);
    if (!request->stop[request->n_stop])
        return sp_fail_memory(error, strlen(text), "a stop string");
    request->n_stop++;
    return SP_OK;
}

static sp_status start_request(const sp_cli_request_defaults *defaults, sp_cli_request *request,
                               sp_error *error)
{
    *request = (sp_cli_request){
        .max_tokens = (int32_t)defaults->max_tokens,
        .top_k = (int32_t)defaults->top_k,
        .temperature = defaults->temperature,
        .top_p = defaults->top_p,
        .min_p = defaults->min_p,
        .lora_scale = defaults->lora_scale,
        .presence_penalty = defaults->presence_penalty,
        .frequency_penalty = defaults->frequency_penalty,
        .repetition_penalty = defaults->repetition_penalty,
        .logprobs = defaults->logprobs,
        .prompt_logprobs = defaults->prompt_logprobs,
        .top_logprobs = (int32_t)defaults->top_logprobs,
        .seed = (uint64_t)defaults->seed,
        .ignore_eos = defaults->ignore_eos,
    };
    for (size_t i = 0; i < defaults->stop.n; i++) {
        sp_status status = add_stop(request, defaults->stop.values[i], error);

        if (status != SP_OK)
            return status;
    }
    return SP_OK;
}

/* Takes the request over, or frees it. */
static sp_status append(sp_cli_requests *requests, sp_cli_request *request, sp_error *error)
{
    size_t capacity = requests->capacity ? requests->capacity * 2 : 16;

    if (requests->n == requests->capacity) {
        sp_cli_request *grown = sp_realloc(requests->items, capacity * sizeof *grown);

        if (!grown) {
            free_request(request);
            return sp_fail_memory(error, capacity * sizeof *grown, "the list of requests");
        }
        requests->items = grown;
        requests->capacity = capacity;
    }
    requests->items[requests->n++] = *request;
    return SP_OK;
}

static sp_status set_prompt(sp_cli_request *request, const char *text, size_t bytes,
                            sp_error *error)
{
    request->prompt = sp_strndup(text, bytes);
    request->prompt_bytes = bytes;
    return request->prompt ? SP_OK : sp_fail_memory(error, bytes, "a prompt");
}

sp_status sp_cli_requests_add_flag(sp_cli_requests *requests, const char *text,
                                   const sp_cli_request_defaults *defaults, sp_error *error)
{
    const char *equals = strchr(text, '=');
    const char *prompt = equals ? equals + 1 : text;
    sp_cli_request request;
    sp_status status = start_request(defaults, &request, error);

    if (status == SP_OK && equals && equals > text) {
        request.adapter = sp_strndup(text, (size_t)(equals - text));
        if (!request.adapter)
            status = sp_fail_memory(error, (size_t)(equals - text), "an adapter's name");
    }
    if (status == SP_OK)
        status = set_prompt(&request, prompt, strlen(prompt), error);
    if (status != SP_OK) {
        free_request(&request);
        return status;
    }
    return append(requests, &request, error);
}

/* ---- JSON lines ---------------------------------------------------------------------------- */

static const char *const json_fields[] = {
    "adapter",
    "prompt",
    "prompt_tokens",
    "max_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "repetition_penalty",
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
    "seed",
    "stop",
    "ignore_eos",
    "lora_scale",
};

static sp_status check_fields(json_t *object, sp_error *error)
{
    const char *key;
    json_t *value;

    json_object_foreach(object, key, value)
    {
        bool known = false;

        for (size_t i = 0; i < sizeof json_fields / sizeof json_fields[0]; i++)
            known = known || strcmp(key, json_fields[i]) == 0;
        if (!known)
            return sp_fail(error, SP_ERR_INPUT, NULL, key, -1, "unknown field \"%s\"", key);
    }
    return SP_OK;
}

static sp_status read_tokens(const json_t *array, sp_cli_request *request, sp_error *error)
{
    size_t n = json_array_size(array);

    if (!json_is_array(array) || n == 0 || n > INT32_MAX)
        return sp_fail(error, SP_ERR_INPUT, NULL, "prompt_tokens", -1,
                       "field \"prompt_tokens\" is not a list of at least one id");
    request->prompt_tokens = sp_calloc(n, sizeof(int32_t));
    if (!request->prompt_tokens)
        return sp_fail_memory(error, n * sizeof(int32_t), "a prompt");
    request->n_prompt_tokens = (int32_t)n;
    for (size_t i = 0; i < n; i++) {
        const json_t *id = json_array_get(array, i);

        if (!json_is_integer(id) || json_integer_value(id) < 0 ||
            json_integer_value(id) > INT32_MAX)
            return sp_fail(error, SP_ERR_INPUT, NULL, "prompt_tokens", (int64_t)i,
                           "prompt_tokens[%zu] is not an id", i);
        request->prompt_tokens[i] = (int32_t)json_integer_value(id);
    }
    return SP_OK;
}

static sp_status read_prompt(const json_t *object, sp_cli_request *request, sp_error *error)
{
    const json_t *tokens = json_object_get(object, "prompt_tokens");
    const json_t *prompt = json_object_get(object, "prompt");

    if ((tokens != NULL) == (prompt != NULL))
        return sp_fail(error, SP_ERR_INPUT, NULL, "prompt", -1,
                       "give either \"prompt\" or \"prompt_tokens\"");
    if (tokens)
        return read_tokens(tokens, request, error);
    if (!json_is_string(prompt))
        return sp_fail(error, SP_ERR_INPUT, NULL, "prompt", -1, "field \"prompt\" is not a string");
    return set_prompt(request, json_string_value(prompt), json_string_length(prompt), error);
}

static sp_status read_stop(const json_t *object, sp_cli_request *request, sp_error *error)
{
    const json_t *stop = json_object_get(object, "stop");
    size_t n = json_is_array(stop) ? json_array_size(stop) : 1;

    if (!stop || json_is_null(stop))
        return SP_OK;
    for (int32_t i = 0; i < request->n_stop; i++)
        sp_free(request->stop[i]);
    request->n_stop = 0;
    for (size_t i = 0; i < n; i++) {
        const json_t *item = json_is_array(stop) ? json_array_get(stop, i) : stop;
        sp_status status;

        if (!json_is_string(item))
            return sp_fail(error, SP_ERR_INPUT, NULL, "stop", -1,
                           "field \"stop\" is neither a string nor a list of strings");
        status = add_stop(request, json_string_value(item), error);
        if (status != SP_OK)
            return status;
    }
    return SP_OK;
}

static sp_status read_number(const json_t *object, const char *field, double *value,
                             sp_error *error)
{
    return sp_json_double(object, field, false, *value, NULL, value, error);
}

static sp_status read_int32(const json_t *object, const char *field, int64_t minimum,
                            int32_t *value, sp_error *error)
{
    int64_t number;
    sp_status status =
        sp_json_int(object, field, false, minimum, INT32_MAX, *value, NULL, &number, error);

    if (status == SP_OK)
        *value = (int32_t)number;
    return status;
}

static sp_status read_flag(const json_t *object, const char *field, bool *value, sp_error *error)
{
    return sp_json_bool(object, field, false, *value, NULL, value, error);
}

static sp_status bad_bias(const char *key, const char *why, sp_error *error)
{
    return sp_fail(error, SP_ERR_INPUT, NULL, "logit_bias", -1, "logit_bias: \"%s\" %s", key, why);
}

/* The ids are keys, so they are texts: digits alone, as in the OpenAI API. */
static sp_status read_bias_item(const char *key, const json_t *value, sp_logit_bias *out_bias,
                                sp_error *error)
{
    size_t digits = strspn(key, "0123456789");
    int64_t token = 0;

    if (digits == 0 || digits > 9 || key[digits] != '\0' || (key[0] == '0' && digits > 1))
        return bad_bias(key, "is not an id", error);
    if (!json_is_number(value))
        return bad_bias(key, "has no number for a value", error);
    for (size_t i = 0; i < digits; i++)
        token = token * 10 + (key[i] - '0');
    *out_bias = (sp_logit_bias){(int32_t)token, (float)json_number_value(value)};
    return SP_OK;
}

static sp_status read_bias(json_t *object, sp_cli_request *request, sp_error *error)
{
    json_t *map = json_object_get(object, "logit_bias");
    size_t n = json_object_size(map);
    const char *key;
    json_t *value;

    if (!map || json_is_null(map))
        return SP_OK;
    if (!json_is_object(map) || n > SP_LOGIT_BIAS_MAX)
        return sp_fail(error, SP_ERR_INPUT, NULL, "logit_bias", -1,
                       "field \"logit_bias\" is not an object with at most %d ids",
                       SP_LOGIT_BIAS_MAX);
    if (n == 0)
        return SP_OK;
    request->bias = sp_calloc(n, sizeof *request->bias);
    if (!request->bias)
        return sp_fail_memory(error, n * sizeof *request->bias, "logit_bias");
    json_object_foreach(map, key, value)
    {
        sp_status status = read_bias_item(key, value, &request->bias[request->n_bias++], error);

        if (status != SP_OK)
            return status;
    }
    return SP_OK;
}

static sp_status read_penalties(json_t *object, sp_cli_request *request, sp_error *error)
{
    sp_status status = read_number(object, "presence_penalty", &request->presence_penalty, error);

    if (status == SP_OK)
        status = read_number(object, "frequency_penalty", &request->frequency_penalty, error);
    if (status == SP_OK)
        status = read_number(object, "repetition_penalty", &request->repetition_penalty, error);
    return status == SP_OK ? read_bias(object, request, error) : status;
}

static sp_status read_logprobs(const json_t *object, sp_cli_request *request, sp_error *error)
{
    sp_status status = read_flag(object, "logprobs", &request->logprobs, error);

    if (status == SP_OK)
        status = read_flag(object, "prompt_logprobs", &request->prompt_logprobs, error);
    if (status == SP_OK)
        status = read_int32(object, "top_logprobs", 0, &request->top_logprobs, error);
    return status;
}

static sp_status read_sampling(const json_t *object, sp_cli_request *request, sp_error *error)
{
    int64_t seed;
    sp_status status = read_int32(object, "max_tokens", 0, &request->max_tokens, error);

    if (status == SP_OK)
        status = read_int32(object, "top_k", 0, &request->top_k, error);
    if (status == SP_OK)
        status = read_number(object, "temperature", &request->temperature, error);
    if (status == SP_OK)
        status = read_number(object, "top_p", &request->top_p, error);
    if (status == SP_OK)
        status = read_number(object, "min_p", &request->min_p, error);
    if (status == SP_OK)
        status = read_number(object, "lora_scale", &request->lora_scale, error);
    if (status == SP_OK)
        status = read_flag(object, "ignore_eos", &request->ignore_eos, error);
    if (status == SP_OK)
        status = sp_json_int(object, "seed", false, INT64_MIN, INT64_MAX, (int64_t)request->seed,
                             NULL, &seed, error);
    if (status == SP_OK)
        request->seed = (uint64_t)seed;
    return status;
}

static sp_status read_object(json_t *object, sp_cli_request *request, sp_error *error)
{
    const char *adapter;
    sp_status status = check_fields(object, error);

    if (status == SP_OK)
        status = sp_json_string(object, "adapter", false, NULL, &adapter, error);
    if (status == SP_OK && adapter) {
        request->adapter = sp_strdup(adapter);
        if (!request->adapter)
            status = sp_fail_memory(error, strlen(adapter), "an adapter's name");
    }
    if (status == SP_OK)
        status = read_prompt(object, request, error);
    if (status == SP_OK)
        status = read_stop(object, request, error);
    if (status == SP_OK)
        status = read_sampling(object, request, error);
    if (status == SP_OK)
        status = read_penalties(object, request, error);
    if (status == SP_OK)
        status = read_logprobs(object, request, error);
    return status;
}

/* Puts "line N: " before the text of an error. */
static void name_line(sp_error *error, size_t line)
{
    char text[SP_ERROR_TEXT_BYTES];

    if (!error)
        return;
    memcpy(text, error->text, sizeof text);
    snprintf(error->text, sizeof error->text, "line %zu: %.*s", line,
             (int)(sizeof error->text - 32), text);
}

sp_status sp_cli_requests_add_json(sp_cli_requests *requests, const char *bytes, size_t n_bytes,
                                   size_t line, const sp_cli_request_defaults *defaults,
                                   sp_error *error)
{
    sp_cli_request request = {0};
    json_t *root;
    sp_status status = sp_json_parse(bytes, n_bytes, "request", NULL, NULL, &root, error);

    if (status == SP_OK) {
        status = start_request(defaults, &request, error);
        if (status == SP_OK && !json_is_object(root))
            status =
                sp_fail(error, SP_ERR_INPUT, NULL, "request", -1, "a request is a JSON object");
        if (status == SP_OK)
            status = read_object(root, &request, error);
        json_decref(root);
    }
    if (status != SP_OK) {
        free_request(&request);
        name_line(error, line);
        return status;
    }
    return append(requests, &request, error);
}

static bool is_blank(const char *bytes, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (!strchr(" \t\r\n", bytes[i]))
            return false;
    return true;
}

sp_status sp_cli_requests_read(sp_cli_requests *requests, FILE *stream,
                               const sp_cli_request_defaults *defaults, sp_error *error)
{
    sp_text line = {0};
    sp_status status = SP_OK;
    size_t number = 0;
    int c;

    while (status == SP_OK) {
        sp_text_clear(&line);
        while ((c = getc(stream)) != EOF && c != '\n' && line.bytes < LINE_BYTES_MAX) {
            char byte = (char)c;

            sp_text_add_bytes(&line, &byte, 1);
        }
        number++;
        if (line.failed)
            status = sp_fail_memory(error, line.bytes, "a line of standard input");
        else if (line.bytes >= LINE_BYTES_MAX)
            status = sp_fail(error, SP_ERR_TOO_LARGE, NULL, "request", -1,
                             "line %zu is longer than 64 MiB", number);
        else if (line.bytes > 0 && !is_blank(line.data, line.bytes))
            status =
                sp_cli_requests_add_json(requests, line.data, line.bytes, number, defaults, error);
        if (c == EOF)
            break;
    }
    if (status == SP_OK && ferror(stream))
        status = sp_fail(error, SP_ERR_IO, NULL, "stdin", -1, "reading standard input failed: %s",
                         strerror(errno));
    sp_text_free(&line);
    return status;
}

sp_request sp_cli_request_view(const sp_cli_request *request)
{
    sp_request view;

    sp_request_default(&view, sizeof view);
    view.adapter = request->adapter;
    view.lora_scale = (float)request->lora_scale;
    view.tokens = request->prompt_tokens;
    view.n_tokens = request->n_prompt_tokens;
    view.max_tokens = request->max_tokens;
    view.temperature = request->temperature;
    view.top_k = request->top_k;
    view.top_p = request->top_p;
    view.min_p = request->min_p;
    view.seed = request->seed;
    view.presence_penalty = request->presence_penalty;
    view.frequency_penalty = request->frequency_penalty;
    view.repetition_penalty = request->repetition_penalty;
    view.logit_bias = request->bias;
    view.n_logit_bias = request->n_bias;
    view.logprobs = request->logprobs;
    view.prompt_logprobs = request->prompt_logprobs;
    view.top_logprobs = request->top_logprobs;
    view.ignore_eos = request->ignore_eos;
    view.stop = (const char *const *)request->stop;
    view.n_stop = request->n_stop;
    return view;
}
