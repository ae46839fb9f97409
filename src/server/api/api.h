/*
 * api.h: what the handlers of all routes share. A call is one exchange inside a handler. A handler
 * answers, or gives a task to the driver and waits: then its `resume` runs on the HTTP thread
 * whenever the task has news. Everything here runs on the HTTP thread; pointers may not be NULL
 * unless said so.
 */
#ifndef SP_SERVER_API_API_H
#define SP_SERVER_API_API_H

#include "base/json.h"
#include "chat/chat.h"
#include "server/api/body_fields.h"
#include "server/api/keys.h"
#include "server/driver/compiler.h"
#include "server/driver/driver.h"
#include "server/driver/lora_dir.h"
#include "server/driver/publisher.h"
#include "server/http/http.h"
#include "server/server.h"

#define SP_JSON_TYPE "application/json"
#define SP_TEXT_TYPE "text/plain; charset=utf-8"
/* Of texts of a client that go into the log, with their NUL. */
#define SP_LOGGED_BYTES 65

typedef struct sp_api {
    const sp_server_settings *settings;
    const sp_server_refusals *refusals;
    const sp_engine *engine; /* for what never changes: text, shape, the base's name */
    sp_driver *driver;
    sp_compiler *compiler;   /* before the driver, of generations */
    sp_publisher *publisher; /* before the driver, of adapters that come in requests */
    sp_lora_dir *dir;        /* NULL: there is none */
    sp_lora_chats *chats;    /* of loaded adapters */
    sp_lora_chat_base lora_base;
    sp_weights_watch *weights;
    sp_budget budget;          /* of all that clients can fill */
    pthread_mutex_t keys_lock; /* guards the keys, which may be replaced while requests arrive */
    sp_keys *api_keys, *admin_keys; /* NULL: none are required */
    atomic_ullong n_key_reloads, n_key_reload_failures;
    sp_chat *chat;            /* NULL: the model has no usable template, because of */
    sp_error chat_error;      /* this */
    sp_request sampling;      /* of requests that leave these fields out */
    json_t *tokenizer_config; /* tokenizer_config.json; NULL: the model has none */
    int64_t started_s;        /* Unix time */
    uint64_t started_ns;      /* sp_clock_ns */
    uint64_t instance;        /* random: makes ids of answers unique over restarts */
    atomic_ullong n_calls;
    uint64_t http_codes[SP_HTTP_CODES]; /* the HTTP thread's: answers by status */
    atomic_bool draining;
} sp_api;

typedef enum sp_access {
    SP_ACCESS_PROBE, /* open, and not in the access log where it is answered with 200 */
    SP_ACCESS_OPEN,
    SP_ACCESS_USER,
    SP_ACCESS_ADMIN
} sp_access;

typedef struct sp_call sp_call;

typedef struct sp_endpoint {
    const char *method, *path;
    /* Not NULL: what is between `path` and this end of it, decoded, is call->argument. */
    const char *end;
    sp_access access;
    sp_field_set fields; /* of its body */
    void (*handle)(sp_call *call);
} sp_endpoint;

struct sp_call {
    sp_api *api;
    sp_exchange *exchange;
    const sp_endpoint *route; /* NULL: no route fits */
    uint64_t number, began_ns;
    char *argument;
    char *model;                 /* as the request names it, for the log; NULL: not yet, or none */
    const char *code;            /* of the error that was answered, for the log; static */
    char param[SP_LOGGED_BYTES]; /* the field of that error, likewise; "": none */
    char id[SP_LOGGED_BYTES];    /* the end of the answer's id, and X-Request-Id */
    char request_id[SP_LOGGED_BYTES]; /* X-Request-Id as the client sent it; "": it did not */
    sp_task *task;                    /* what it waits for: a reference, released with the call */
    void (*resume)(sp_call *call);
    void *state; /* the handler's, freed by free_state */
    void (*free_state)(void *state);
    int64_t prompt_tokens, generated_tokens; /* for the log; -1: none */
};

/* routes.c: the handlers for sp_http_options; user is the sp_api. */
sp_http_handlers sp_api_handlers(sp_api *api);

/* ---- answers ------------------------------------------------------------------------------- */

/* 200 with JSON. Takes the text; one that ran out of memory becomes an error. */
void sp_call_answer_json(sp_call *call, sp_text *body);
void sp_call_answer_text(sp_call *call, int status, const char *content_type, sp_text *body);

/* {"error": {"message", "type", "param", "code"}}; `param`, a field of the body, may be NULL. For
 * routes of Anthropic's API with {"type": "error"} around it, and their names of types. */
void sp_call_refuse(sp_call *call, int status, const char *type, const char *param,
                    const char *code, const char *format, ...) SP_PRINTF(6, 7);
/* The same for what a function of the library returned, "not yet" included. An error without a
 * code gets that of its status; a subject that is no field of the body is no `param`. */
void sp_call_fail(sp_call *call, sp_status status, const sp_error *error);
/* The status that an error is answered with. */
int sp_http_status_of(sp_status status, const sp_error *error);
/* The error object alone, as an event in a stream that has started. */
void sp_error_json(const sp_call *call, sp_text *out, sp_status status, const sp_error *error);

/* ---- requests ------------------------------------------------------------------------------ */

/*
 * The body as a JSON object, owned by the caller (json_decref); or NULL, and the call is answered.
 */
json_t *sp_call_body(sp_call *call);

/* Gives the task to the driver, by way of its look-up, and waits for it. Takes the caller's
 * reference; a task that was waited for before is released. */
void sp_call_wait_lora(sp_call *call, sp_lora_task *task, void (*resume)(sp_call *call));
/* The same by way of the publisher, for a task with an adapter in it. */
void sp_call_wait_published(sp_call *call, sp_lora_task *task, void (*resume)(sp_call *call));
/* The same for a generation, whose reference it takes. On failure the call is not answered: there
 * may be an answer in progress. */
sp_status sp_call_wait_generation(sp_call *call, sp_generation *generation,
                                  void (*resume)(sp_call *call), sp_error *error);

/*
 * What `model` means for the engine: NULL for no name at all (the active adapter), else a part of
 * `model`: after the base's name and ':' where it starts with these.
 */
const char *sp_api_model(const sp_api *api, const char *model);
/*
 * The template for requests of an adapter that says `lora` of itself (NULL: the base's). *out_chat
 * is borrowed. The adapter's own cannot be used: its code. SP_ERR_NOT_FOUND with api->chat_error's:
 * there is none.
 */
sp_status sp_api_chat(const sp_api *api, const sp_lora_chat *lora, const sp_chat **out_chat,
                      sp_error *error);
/* Whether the name could have a folder in --adapter-dir, without looking. */
bool sp_api_may_have_folder(const sp_api *api, const char *name);

/* A part of a path without its percent escapes; NULL for bad ones, NUL, or bad UTF-8. */
char *sp_path_decode(const char *path);

/* ---- handlers ------------------------------------------------------------------------------ */

void sp_handle_completions(sp_call *call);
void sp_handle_chat(sp_call *call);
void sp_handle_responses(sp_call *call);
void sp_handle_messages(sp_call *call);
void sp_handle_count_tokens(sp_call *call);
void sp_handle_models(sp_call *call);
void sp_handle_model(sp_call *call);
void sp_handle_tokenize(sp_call *call);
void sp_handle_detokenize(sp_call *call);
void sp_handle_tokenizer_info(sp_call *call);
void sp_handle_load(sp_call *call);
void sp_handle_score(sp_call *call);
void sp_handle_publish(sp_call *call);
void sp_handle_versions(sp_call *call);
void sp_handle_abort(sp_call *call);
void sp_handle_hold(sp_call *call);
void sp_handle_resume(sp_call *call);
void sp_handle_unload(sp_call *call);
void sp_handle_active(sp_call *call);
void sp_handle_adapters(sp_call *call);
void sp_handle_health(sp_call *call);
void sp_handle_ready(sp_call *call);
void sp_handle_version(sp_call *call);
void sp_handle_metrics(sp_call *call);
void sp_handle_status(sp_call *call);
void sp_handle_page(sp_call *call);

#endif
