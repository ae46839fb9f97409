/*
 * route_text.c: POST /tokenize and /detokenize, for clients that count or cut tokens. `model` is
 * held to the names that the server knows, as on every other route.
 */
#include "base/alloc.h"
#include "base/error.h"
#include "server/completion_request.h"

#include "server/api.h"

#include <string.h>

#define CONTEXTS_MAX 8 /* of a text to be counted */

/* The answer waits here while the engine's thread is asked about the model's name. */
typedef struct text_state {
    sp_text body;
    char *adapter;
} text_state;

static void destroy(void *state)
{
    text_state *text = state;

    sp_text_free(&text->body);
    sp_free(text->adapter);
    sp_free(text);
}

static void answer(sp_call *call)
{
    text_state *state = call->state;
    const sp_adapter_task *task = (sp_adapter_task *)(void *)call->task;
    const sp_snapshot *snapshot = &task->snapshot;
    bool hidden, known;

    if (!sp_task_is_done(call->task))
        return;
    if (task->task.status != SP_OK) {
        sp_call_fail(call, task->task.status, &task->task.error);
        return;
    }
    hidden = sp_snapshot_is_hidden(snapshot, state->adapter);
    known = sp_snapshot_find(snapshot, state->adapter) || (task->path && !hidden);
    if (known)
        sp_call_answer_json(call, &state->body);
    else if (!hidden && !task->looked_up && sp_api_may_have_folder(call->api, state->adapter))
        sp_call_wait_adapter(call, sp_adapter_task_create_list(state->adapter), answer);
    else
        sp_call_refuse(call, 404, NULL, "model", "model_not_found", "there is no model \"%.255s\"",
                       state->adapter);
}

/* Takes *text. The base needs no question. */
static void answer_for_model(sp_call *call, const json_t *body, sp_text *text)
{
    const char *model = json_string_value(json_object_get(body, "model"));
    const char *adapter = sp_api_model(call->api, model);
    text_state *state;

    if (!adapter || strcmp(adapter, sp_engine_base_name(call->api->engine)) == 0) {
        sp_call_answer_json(call, text);
        return;
    }
    state = sp_calloc(1, sizeof *state);
    if (state) {
        *state = (text_state){*text, sp_strdup(adapter)};
        call->state = state;
        call->free_state = destroy;
        call->model = sp_strdup(model);
    }
    if (state && state->adapter) {
        sp_call_wait_adapter(call, sp_adapter_task_create(SP_TASK_LIST, NULL, NULL), answer);
        return;
    }
    if (!state)
        sp_text_free(text);
    sp_call_refuse(call, 503, NULL, NULL, "out-of-memory", "out of memory");
}

static sp_status check_fields(const json_t *body, const char *const *known, sp_error *error)
{
    const char *name;
    const char *unused;
    json_t *value;

    json_object_foreach((json_t *)(uintptr_t)body, name, value)
    {
        size_t i = 0;

        while (known[i] && strcmp(known[i], name) != 0)
            i++;
        if (!known[i] && !json_is_null(value))
            return sp_fail(error, SP_ERR_INPUT, SP_CODE_UNKNOWN_FIELD, name, -1,
                           "the field \"%.100s\" is not known", name);
    }
    return sp_json_string(body, "model", false, NULL, &unused, error);
}

/* ---- to ids -------------------------------------------------------------------------------- */

static void add_tokens(sp_text *out, const sp_engine *engine, const int32_t *tokens, int32_t n)
{
    sp_text_format(out, "{\"count\": %d, \"max_model_len\": %d, \"tokens\": [", n,
                   sp_engine_max_context(engine));
    for (int32_t i = 0; i < n; i++)
        sp_text_format(out, "%s%d", i ? ", " : "", tokens[i]);
    sp_text_add(out, "]");
}

static void add_token_texts(sp_text *out, const sp_engine *engine, const int32_t *tokens, int32_t n)
{
    sp_text_add(out, ", \"token_strs\": [");
    for (int32_t i = 0; i < n; i++) {
        char *text = NULL;
        size_t bytes = 0;

        sp_text_add(out, i ? ", " : "");
        if (sp_engine_decode(engine, &tokens[i], 1, false, &text, &bytes, NULL) != SP_OK)
            out->failed = true;
        else
            sp_text_json_string(out, text, bytes);
        sp_engine_free(text);
    }
    sp_text_add(out, "]");
}

/* Texts to be cut are longer than the context, but all of this runs on a thread that has other
 * clients. */
static int32_t tokens_max(const sp_engine *engine)
{
    int32_t context = sp_engine_max_context(engine);

    return context > INT32_MAX / CONTEXTS_MAX ? INT32_MAX : context * CONTEXTS_MAX;
}

static sp_status tokenize(const sp_call *call, const json_t *body, sp_text *out, sp_error *error)
{
    static const char *const known[] = {
        "model", "prompt", "parse_special", "add_special_tokens", "return_token_strs", NULL};
    const sp_engine *engine = call->api->engine;
    const char *prompt;
    bool parse_special = false, texts = false;
    int32_t *tokens = NULL;
    int32_t n = 0;
    sp_status status = check_fields(body, known, error);

    if (status == SP_OK)
        status = sp_json_string(body, "prompt", true, NULL, &prompt, error);
    if (status == SP_OK)
        status = sp_json_bool(body, "parse_special", false, false, NULL, &parse_special, error);
    if (status == SP_OK)
        status = sp_json_bool(body, "return_token_strs", false, false, NULL, &texts, error);
    if (status == SP_OK)
        status =
            sp_engine_encode(engine, prompt, json_string_length(json_object_get(body, "prompt")),
                             parse_special, tokens_max(engine), &tokens, &n, error);
    if (status != SP_OK)
        return status;
    add_tokens(out, engine, tokens, n);
    if (texts)
        add_token_texts(out, engine, tokens, n);
    sp_text_add(out, "}\n");
    sp_engine_free(tokens);
    return SP_OK;
}

/* ---- to text ------------------------------------------------------------------------------- */

static sp_status detokenize(const sp_call *call, const json_t *body, sp_text *out, sp_error *error)
{
    static const char *const known[] = {"model", "tokens", NULL};
    const json_t *list = json_object_get(body, "tokens");
    int32_t *tokens = NULL;
    int32_t n = 0;
    char *text = NULL;
    size_t bytes = 0;
    sp_status status = check_fields(body, known, error);

    if (status == SP_OK && !json_is_array(list))
        status = sp_fail(error, SP_ERR_INPUT, NULL, "tokens", -1,
                         "field \"tokens\" must be a list of token ids");
    if (status == SP_OK && json_array_size(list) > 0)
        status = sp_read_token_ids(list, "tokens", &tokens, &n, error);
    if (status == SP_OK)
        status = sp_engine_decode(call->api->engine, tokens, n, false, &text, &bytes, error);
    sp_free(tokens);
    if (status != SP_OK)
        return status;
    sp_text_add(out, "{\"prompt\": ");
    sp_text_json_string(out, text, bytes);
    sp_text_add(out, "}\n");
    sp_engine_free(text);
    return SP_OK;
}

typedef sp_status (*convert_fn)(const sp_call *call, const json_t *body, sp_text *out,
                                sp_error *error);

static void convert(sp_call *call, convert_fn function)
{
    json_t *body = sp_call_body(call);
    sp_text out = {0};
    sp_error error;
    sp_status status;

    if (!body)
        return;
    status = function(call, body, &out, &error);
    if (status == SP_OK)
        answer_for_model(call, body, &out);
    else
        sp_call_fail(call, status, &error);
    json_decref(body);
}

void sp_route_tokenize(sp_call *call)
{
    convert(call, tokenize);
}

void sp_route_detokenize(sp_call *call)
{
    convert(call, detokenize);
}
