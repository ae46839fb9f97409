/*
 * request_fields.h: the fields that completions and chat share. It takes a JSON object and gives a
 * checked struct, or an error that names the field; no I/O, so that it can be fuzzed.
 *
 * The rule for fields: one that changes the answer is served or refused by name. One that cannot
 * change it (user, metadata, ..) is taken and ignored. One that is known but not served is taken
 * while it asks for what happens anyway ("best_of": 1). null is the same as absent. Every other
 * field is `unknown-field`.
 */
#ifndef SP_SERVER_API_REQUEST_FIELDS_H
#define SP_SERVER_API_REQUEST_FIELDS_H

#include "base/json.h"

#include <sidepath/engine.h>

#define SP_CODE_UNKNOWN_FIELD     "unknown-field"
#define SP_CODE_UNSUPPORTED_FIELD "unsupported-field"
#define SP_CODE_INVALID_VALUE     "invalid-value"

#define SP_N_MAX               128
#define SP_STOP_MAX            64
#define SP_STOP_TEXT_BYTES_MAX 1024
#define SP_STOP_IDS_MAX        64 /* of the request: a chat template may add some of its own */

/* Bodies, each with fields of its own. */
typedef enum sp_field_set {
    SP_FIELDS_NONE = 0,
    SP_FIELDS_COMPLETION = 1,
    SP_FIELDS_CHAT = 2,
    SP_FIELDS_TOKENIZE = 4,
    SP_FIELDS_DETOKENIZE = 8,
    SP_FIELDS_LOAD = 16,
    SP_FIELDS_NAME = 32 /* of an adapter, to unload or to make active */
} sp_field_set;

/* Every field of the object against the rule above. */
sp_status sp_fields_check(const json_t *object, sp_field_set set, sp_error *error);

/* Whether `path` ("messages[2].role") is a field of that body, or inside of one. */
bool sp_fields_know(sp_field_set set, const char *path);

/* What a request means by a field of sampling that it leaves out. */
typedef struct sp_sampling_defaults {
    double temperature, top_p, min_p, repetition_penalty;
    int32_t top_k;
} sp_sampling_defaults;

extern const sp_sampling_defaults sp_sampling_api_defaults; /* those of OpenAI's API */

typedef struct sp_sampling_fields {
    const char *model;  /* NULL: absent. Strings are borrowed from the object. */
    int64_t max_tokens; /* -1: absent */
    int32_t n, top_k, min_tokens;
    double temperature, top_p, min_p, lora_scale;
    double presence_penalty, frequency_penalty, repetition_penalty;
    uint64_t seed; /* random when the request has none */
    bool stream, include_usage, ignore_eos, return_token_ids;
    bool usage_each;      /* "continuous_usage_stats", which "include_usage" alone makes hold */
    bool keep_special;    /* "skip_special_tokens": false */
    bool logprobs;        /* of every new token, with */
    int32_t top_logprobs; /* this many alternatives */
    sp_logit_bias *bias;  /* [n_bias], owned */
    int32_t n_bias;
    const char **stop; /* [n_stop], the array is owned */
    int32_t n_stop;
    int32_t *stop_tokens; /* [n_stop_tokens], owned */
    int32_t n_stop_tokens;
} sp_sampling_fields;

sp_status sp_sampling_fields_read(const json_t *object, sp_field_set set,
                                  const sp_sampling_defaults *defaults,
                                  sp_sampling_fields *out_fields, sp_error *error);
void sp_sampling_fields_free(sp_sampling_fields *fields);
/* Copies n further ids to stop_tokens. SP_ERR_MEMORY. */
sp_status sp_sampling_fields_add_stop_tokens(sp_sampling_fields *fields, const int32_t *tokens,
                                             int32_t n, sp_error *error);

/* A list of token ids, one at least. *out_tokens is owned by the caller (sp_free). SP_ERR_INPUT
 * with `field` as subject. */
sp_status sp_read_token_ids(const json_t *list, const char *field, int32_t **out_tokens,
                            int32_t *out_n, sp_error *error);

/* The engine's request for these fields, without adapter, prompt and seed of the choice. */
sp_request sp_sampling_fields_request(const sp_sampling_fields *fields);

#endif
