/*
 * engine.h: the host engine: one base model (dense Qwen3 or a Llama type), many adapters, one
 * batch.
 *
 * The engine owns weights, KV pages, the scheduler and sampling. It reaches adapters only through
 * the library's public headers, so any other engine could do what it does. It must not know HTTP.
 *
 * Life of a request: submit (checked whole, or refused and nothing kept) → waits for KV pages →
 * its rows share steps with everyone else's → one event per token → finished. Between steps
 * requests join and leave. When pages run out the youngest running request is preempted: its pages
 * are freed and it is recomputed later. None of this changes a bit of its logits.
 *
 * Structs that a caller fills or receives begin with their size, struct_bytes, and only grow at
 * their end; sp_text_span, sp_logit_bias and sp_logprob stay as they are for good. An argument that
 * must not be NULL and is gives SP_ERR_ARGUMENT with its name.
 *
 * One thread calls the functions of one engine. Nothing here blocks except on computation, and on
 * file reads in sp_engine_open.
 *
 * Stability: experimental.
 */
#ifndef SIDEPATH_ENGINE_H
#define SIDEPATH_ENGINE_H

#include <sidepath/stage.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct sp_engine sp_engine;

typedef struct sp_engine_options {
    size_t struct_bytes;
    const char *model_dir;    /* a Hugging Face directory: config.json, *.safetensors, .. */
    const char *served_name;  /* the base's name; NULL: the folder's */
    sp_dtype precision;       /* BF16 to serve, F32 to check */
    const char *cpu_isa;      /* NULL or "auto", scalar, avx2, avx512, amx */
    int32_t threads;          /* 0: as many as the process may use */
    int32_t max_loras;        /* adapter slots; 0: none, the base alone */
    int32_t max_lora_rank;    /* 0: the largest of the start-up adapters, else 64 */
    size_t overlay_bytes;     /* budget of rows of embed_tokens and lm_head that adapters replace;
                                 0: what the start-up adapters need, and once more the largest
                                 of them, so that it can be replaced while it serves */
    const char *lora_modules; /* what the pool holds, as sp_module_set_parse reads it; those that
                                 the base has count. NULL: the union of the start-up adapters,
                                 else all linear ones */
    int32_t max_context;      /* tokens of one request, prompt included; 0: the model's */
    int32_t max_running;      /* requests that hold KV pages at a time */
    int64_t kv_tokens;        /* KV capacity, rounded up to pages; 0: the lesser of max_running ×
                                 max_context and half of the memory that the rest leaves */
    int32_t page_tokens;      /* tokens of a KV page; a divisor of the attention block (32) */
    int32_t step_rows;        /* most rows of one step; 0: 256 on the CPU, 2048 on a GPU */
    int32_t prefill_chunk;    /* most rows of one request in one step; 0: step_rows */
    bool no_apply, no_ffn;    /* measuring levers: adapters stay resident, deltas are skipped */
    bool allow_partial, allow_no_effect, allow_unknown_fields, allow_base_changing_init;
    bool prefix_cache;      /* requests share the KV pages of equal beginnings; changes no bit */
    bool adapter_loading;   /* adapters may be loaded later: there are slots without any at start */
    size_t host_bytes_max;  /* budget of packed adapters on the host; 0: one adapter and half of the
                               memory that everything else leaves */
    int32_t loader_threads; /* 0: loads are done by the thread that steps, between two steps */
    int32_t adapter_wait_steps;    /* see the fairness rule in scheduler.h */
    int32_t adapter_preempt_steps; /* at least adapter_wait_steps */
    /* Called for every start-up adapter that is refused, and the engine opens without it; NULL: the
     * first refusal fails the opening. Called inside sp_engine_open. */
    void (*adapter_refused)(void *user, const char *name, const sp_error *error);
    void *adapter_refused_user;
    bool weights_copy;   /* read into memory, so that nothing that happens to the files matters */
    size_t memory_bytes; /* what may be taken in all; 0: what the system says is free, the limits of
                            cgroups included */
    bool weights_prefault; /* mapped weights are read before sp_engine_open returns, so that the
                              first step does not wait for the files */
    /* Told how far sp_engine_open is, inside it: `what` is "weights" (done and total in bytes) or
     * "adapters" (a count); the last call of each has done == total. NULL: nobody. */
    void (*progress)(void *user, const char *what, size_t done, size_t total);
    void *progress_user;
    /* Where steps run: "cpu" or NULL, "cuda" (GPU 0), "cuda:N", or "auto": the first GPU, where
     * there is one that can be used and precision is BF16, else the CPU. On a GPU page_tokens is
     * 16, and memory_bytes is the device's. */
    const char *device;
    bool eager;           /* GPU: no step is captured as a graph; changes no bit */
    bool base_gemm_free;  /* GPU: the base's products may be summed in another order for another
                             number of rows: gives up that a row's bits do not depend on others */
    bool interactive;     /* a prefill_chunk of 0 is one that hardly delays concurrent requests: 64
                             rows on the CPU, 512 on a GPU */
    bool speculative;     /* for requests that leave it to the engine: tokens are drafted from their
                             own text and verified several in a step; changes no bit */
    int32_t draft_tokens; /* most drafts of one request in one step */
    bool no_batch_verify; /* measuring lever: each request with drafts has a pass of its own */
    const char *draft_model; /* directory of a small model of the same vocabulary and tokenizer,
                                which drafts where a request's own text has nothing; NULL: none */
    bool experts;            /* adapters of routers and experts are taken */
    int32_t max_lora_expert_rank;   /* the largest rank of their pairs */
    size_t expert_bytes;            /* budget of these; 0: as with overlay_bytes */
    sp_expert_layout expert_layout; /* of fused pairs where neither config nor shapes tell */
    int32_t expert_max_tokens;      /* tokens of a step whose experts are computed at a time: bounds
                                       their scratch and changes no bit */
    /* Of a model with recurrent layers; else not read. */
    size_t state_bytes;            /* budget of the states of running requests, one each; where it
                                      holds fewer than max_running, fewer run. 0: for max_running,
                                      or a quarter of the memory that the rest leaves */
    int32_t state_snapshot_tokens; /* with prefix_cache: states are kept at every so many tokens,
                                      rounded up to a multiple of 32, and where prompts and
                                      outputs end, and requests begin at one of these places;
                                      changes no bit. 0: none are */
    size_t state_snapshot_bytes;   /* budget of the states that are kept; 0: an eighth of the memory
                                      that the rest leaves */
    const sp_stage_source *sources; /* [n_sources] where adapters come from beside directories, in
                                       this order and after them; copied, what they lead to stays
                                       until sp_engine_close. With 0 loader_threads the thread that
                                       steps waits for them */
    int32_t n_sources;
} sp_engine_options;

SP_API void sp_engine_options_default(sp_engine_options *out_options, size_t struct_bytes);

/* Reason code: a part of the engine would take more memory than is free. */
#define SP_CODE_MEMORY_SHORT "memory-short"
/* Reason code: the draft model has another vocabulary or another tokenizer. */
#define SP_CODE_DRAFT_MISMATCH "draft-model-mismatch"

typedef struct sp_engine_adapter {
    size_t struct_bytes;
    const char *name; /* 1 .. 255 bytes of UTF-8; see sp_stage_name_check */
    const char *path;
} sp_engine_adapter;

/*
 * Maps the weights (SP_ERR_IO: with weights_prefault, a part of a file could not be read), loads
 * the adapters into slots, allocates pool, KV cache and scratch. On failure
 * everything is released. *out_engine is owned by the caller (sp_engine_close). Every string is
 * copied. SP_ERR_NOT_FOUND, SP_ERR_INPUT, SP_ERR_TRUNCATED, SP_ERR_MISMATCH, SP_ERR_UNSUPPORTED for
 * the model's files and the draft model's, SP_ERR_MISMATCH with SP_CODE_DRAFT_MISMATCH where the
 * latter cannot draft for the former, what sp_adapter_open and sp_layout_pack return for an adapter
 * (with `engine-unsupported` for kinds that this engine cannot apply), SP_ERR_ARGUMENT for adapters
 * without slots and for a budget of states that does not hold one, SP_ERR_MEMORY with the setting
 * to lower. More adapters than slots is fine: the rest wait in the host cache. What all of it will
 * take (weights, slots, replaced rows, scratch, host cache, recurrent states, KV cache) is compared
 * with the free memory before any of it is allocated: SP_ERR_MEMORY with the code
 * SP_CODE_MEMORY_SHORT, needed and free in the text and the setting to change as the subject.
 */
SP_API sp_status sp_engine_open(const sp_engine_options *options, const sp_engine_adapter *adapters,
                                size_t n_adapters, sp_engine **out_engine, sp_error *error);
SP_API void sp_engine_close(sp_engine *engine); /* NULL is allowed; drops running requests */

/* The modules whose deltas this engine can apply in a base of this geometry; what
 * `sidepath inspect` holds adapters to. */
SP_API sp_module_set sp_engine_modules(const sp_geometry *geometry);

SP_API const sp_model_shape *sp_engine_shape(const sp_engine *engine);
/*
 * What the base's folder holds beside what is used, a sentence each: keys of config.json, weights,
 * a head of its own on a base that says it is tied, what was converted; and bytes that its
 * tokenizer drops. For a log. Borrowed; NULL from the number of notes on.
 */
SP_API const char *sp_engine_note(const sp_engine *engine, size_t index);
SP_API const char *sp_engine_base_name(const sp_engine *engine); /* the model folder's name */
/* Tokens of one request, prompt included: the context, or what the KV cache holds. */
SP_API int32_t sp_engine_max_context(const sp_engine *engine);
/* The layers of the base that have experts, in their order the second dimension of routed_experts,
 * and the experts that each routes a token to, the third; 0 and 0: it has none. Either output may
 * be NULL. Any thread. */
SP_API void sp_engine_routing(const sp_engine *engine, int32_t *out_layers, int32_t *out_per_token);
SP_API const char *sp_engine_cpu_isa(const sp_engine *engine); /* the level in use */
/* "cpu" or "cuda:0": where steps run. Lives as long as the engine. */
SP_API const char *sp_engine_device(const sp_engine *engine);

/* ---- text ---------------------------------------------------------------------------------- */

/* These may be called by any thread at any time: what they read never changes. */

/*
 * Text to ids, raw: no template and nothing put around it; the text of special tokens is plain text
 * unless parse_special. *out_tokens is owned by the caller (sp_engine_free). SP_ERR_NOT_FOUND: the
 * model has no tokenizer.json ("tokenizer-missing"). SP_ERR_INPUT: the text is not UTF-8.
 * SP_ERR_TOO_LARGE with the code "too-many-tokens", or "context_length_exceeded" where max_tokens
 * is sp_engine_max_context: there are more than max_tokens (0: no limit); a text that is far too
 * long costs little, which is what a server needs that takes texts from anyone.
 */
SP_API sp_status sp_engine_encode(const sp_engine *engine, const char *text, size_t bytes,
                                  bool parse_special, int32_t max_tokens, int32_t **out_tokens,
                                  int32_t *out_n_tokens, sp_error *error);

/*
 * The same, with the tokens that the file's post-processor puts around a text: the one that begins
 * it, where the model has one. This is what a completion's prompt becomes. The prompt of a chat is
 * not: its template writes them.
 */
SP_API sp_status sp_engine_encode_prompt(const sp_engine *engine, const char *text, size_t bytes,
                                         bool parse_special, int32_t max_tokens,
                                         int32_t **out_tokens, int32_t *out_n_tokens,
                                         sp_error *error);

/* Bytes [begin, end) of a text. */
typedef struct sp_text_span {
    size_t begin, end;
} sp_text_span;

/*
 * The same, where a special token is one only if all of its text is in one of `spans`, which ascend
 * and do not touch. Apart from that a span changes nothing: the text is normalised, split and
 * merged as one. SP_ERR_ARGUMENT: the spans are not in order or leave the text.
 */
SP_API sp_status sp_engine_encode_spans(const sp_engine *engine, const char *text, size_t bytes,
                                        const sp_text_span *spans, size_t n_spans,
                                        int32_t max_tokens, int32_t **out_tokens,
                                        int32_t *out_n_tokens, sp_error *error);
/*
 * Ids to text, as a text of its own: a blank that the tokenizer puts in front of every text is
 * dropped. Bytes that are no UTF-8 become U+FFFD, ids that the tokenizer does not have add
 * nothing; with skip_special neither do special tokens. *out_text is owned by the caller
 * (sp_engine_free). SP_ERR_NOT_FOUND: no tokenizer.json.
 */
SP_API sp_status sp_engine_decode(const sp_engine *engine, const int32_t *tokens, int32_t n_tokens,
                                  bool skip_special, char **out_text, size_t *out_bytes,
                                  sp_error *error);
/* The bytes of one token, borrowed; they need not be whole characters. NULL and 0: an id without
 * text, or no tokenizer. */
SP_API const char *sp_engine_token_bytes(const sp_engine *engine, int32_t token, size_t *out_bytes);
/* Whether a token is a special one of the tokenizer, whose text an answer does not show. */
SP_API bool sp_engine_token_is_special(const sp_engine *engine, int32_t token);
SP_API void sp_engine_free(void *memory);

/* ---- constrained output -------------------------------------------------------------------- */

/* What an output has to be, compiled for one engine; docs/GRAMMAR.md has the details. */
typedef struct sp_constraint sp_constraint;

typedef enum sp_constraint_kind {
    SP_CONSTRAINT_JSON_OBJECT, /* any JSON object; no text */
    SP_CONSTRAINT_JSON_SCHEMA, /* text: a JSON Schema, as JSON */
    SP_CONSTRAINT_REGEX,       /* text: a pattern for the whole output */
    SP_CONSTRAINT_CHOICE,      /* text: a JSON list of texts */
    SP_CONSTRAINT_CALLS,       /* text: {"begin", "middle", "end", "between": the texts around a
                                  tool's name and its arguments, "many": whether more than one call
                                  may come, "tools": [{"name", "parameters": a schema or null,
                                  "any": whether its arguments are any text}], "tagged": whether
                                  arguments are <parameter=NAME> tags and not JSON, "free": the text
                                  that begins a call, which then may come after any text, or never}
                                */
    SP_CONSTRAINT_GRAMMAR      /* text: rules, name ::= ..., of which root is the whole output */
} sp_constraint_kind;

/* Whether reasoning, which nothing constrains, comes before what the constraint is about. */
typedef enum sp_constraint_thought {
    SP_CONSTRAINT_NO_THOUGHT,
    SP_CONSTRAINT_MAY_THINK, /* the output may begin with <think> */
    SP_CONSTRAINT_THINKS     /* the prompt ends inside of <think> */
} sp_constraint_thought;

typedef struct sp_constraint_options {
    size_t struct_bytes;
    sp_constraint_kind kind;
    sp_constraint_thought thought;
    const char *text; /* [text_bytes] UTF-8, borrowed until return; may be NULL with 0 */
    size_t text_bytes;
} sp_constraint_options;

/* A JSON object, without a thought. */
SP_API void sp_constraint_options_default(sp_constraint_options *out_options, size_t struct_bytes);

/*
 * Reads only what never changes in an engine: any thread, beside steps, which it does not hold up;
 * it takes up to some tenths of a second. *out_constraint is one reference, the caller's, to be
 * released before the engine is closed; any number of requests may share it. SP_ERR_INPUT with
 * "grammar-malformed", "grammar-unsupported" (a keyword, by its place) or "grammar-unsatisfiable",
 * SP_ERR_TOO_LARGE with "grammar-too-large"; SP_ERR_NOT_FOUND: the model has no tokenizer.json.
 */
SP_API sp_status sp_engine_compile(const sp_engine *engine, const sp_constraint_options *options,
                                   sp_constraint **out_constraint, sp_error *error);
/* Any thread; NULL is allowed in all of these. */
SP_API void sp_constraint_retain(sp_constraint *constraint);
SP_API void sp_constraint_release(sp_constraint *constraint);
/* Memory that it holds now; it grows with use, within a limit. */
SP_API size_t sp_constraint_bytes(const sp_constraint *constraint);

/* ---- requests ------------------------------------------------------------------------------ */

/* One row of logits: `position` is the index of the token that it follows. Borrowed until return.
 * Called inside sp_engine_step, in ascending position; after a preemption the positions come once
 * more, with the same bytes. */
typedef void (*sp_logits_fn)(void *user, int32_t position, const float *logits, int32_t vocab);

#define SP_LOGIT_BIAS_MAX   1024
#define SP_TOP_LOGPROBS_MAX 20
#define SP_STOP_TOKENS_MAX  128
#define SP_LOGPROB_MIN      (-9999.0) /* what is smaller is given as this: all are finite */

typedef struct sp_logit_bias {
    int32_t token;
    float bias; /* -100 .. 100, added to the token's logit */
} sp_logit_bias;

typedef struct sp_logprob {
    int32_t token;
    float logprob; /* natural logarithm */
} sp_logprob;

/* Whether tokens of a request are drafted. */
typedef enum sp_speculative {
    SP_SPECULATIVE_DEFAULT = 0, /* as the engine's option says */
    SP_SPECULATIVE_ON,
    SP_SPECULATIVE_OFF
} sp_speculative;

typedef struct sp_request {
    size_t struct_bytes;
    const char *adapter;   /* its name, or the base's; NULL: the active adapter, else the base */
    float lora_scale;      /* multiplies the stored scale; 0 .. 16, 0 = base, exactly */
    const int32_t *tokens; /* the prompt, at least one id below the vocabulary */
    int32_t n_tokens;
    int32_t max_tokens; /* at least 1; 0, prefill only, with logits_fn or prompt_logprobs */
    double temperature; /* 0: greedy */
    int32_t top_k;      /* 0 or -1: off */
    double top_p;       /* 1: off */
    double min_p;       /* 0: off */
    uint64_t seed;
    double presence_penalty;   /* -2 .. 2, of ids that are in the output; 0: off */
    double frequency_penalty;  /* -2 .. 2, for each time that an id is in the output; 0: off */
    double repetition_penalty; /* 0.01 .. 100, divides or multiplies the logits of ids that are in
                                  the prompt or the output; 1: off */
    const sp_logit_bias *logit_bias; /* [n_logit_bias], at most SP_LOGIT_BIAS_MAX, each id once */
    int32_t n_logit_bias;
    /* Logprobs are the log-softmax of the model's own logits (an adapter's included), before bias,
     * penalties, temperature and filters. */
    bool logprobs;           /* of every new token */
    bool prompt_logprobs;    /* of every token of the prompt but the first */
    int32_t top_logprobs;    /* 0 .. SP_TOP_LOGPROBS_MAX of the best ids beside each of these */
    bool ignore_eos;         /* the model's own end-of-text ids do not stop it */
    const char *const *stop; /* at most 64 strings of 1 to 1,024 bytes; one that is the text of a
                                special token means that token, too */
    int32_t n_stop;
    sp_logits_fn logits_fn; /* called for every position from logits_from on; may be NULL */
    void *logits_user;
    int32_t logits_from;
    const int32_t *stop_tokens; /* [n_stop_tokens] ids that end the text, ignore_eos or not */
    int32_t n_stop_tokens;      /* at most SP_STOP_TOKENS_MAX */
    int32_t min_tokens;         /* before so many new tokens no id that ends the text is chosen, and
                                   no stop string is looked for; at most max_tokens */
    bool keep_special;          /* the text of special tokens is part of the text; that of a token
                                   that ends it is not */
    sp_constraint *constraint;  /* the output is in its grammar, and ends when it is complete and
                                   nothing can follow; before that an end is chosen only where it
                                   is complete. NULL: none. The engine takes a reference. */
    sp_speculative speculative; /* changes no token and no logprob */
    int32_t scored_from; /* with prompt_logprobs: the first token of the prompt that has one, which
                            belongs with those after it to the output where processed_logprobs count
                            it; up to n_tokens. 0: the second */
    bool processed_logprobs; /* with logprobs or prompt_logprobs: beside each also that of the
                                distribution that the token is drawn from: after bias, penalties and
                                mask, at the temperature, of what the filters keep. Greedy: after
                                the first three. Costs a pass over the vocabulary for each */
    bool routed_experts;     /* the last event has the experts of each token; the prompt is then not
                                read from the prefix cache. For a base with experts alone */
} sp_request;

SP_API void sp_request_default(sp_request *out_request, size_t struct_bytes);

typedef enum sp_finish {
    SP_FINISH_NONE = 0,
    SP_FINISH_STOP,
    SP_FINISH_LENGTH,
    SP_FINISH_FAILED, /* it was dropped; the event's error says why */
    SP_FINISH_ABORT   /* for hosts, of a request that they have cancelled: no event has it */
} sp_finish;

/* What has become of a request so far. Times are sp_clock_seconds (CLOCK_MONOTONIC); 0: not yet. */
typedef struct sp_request_trace {
    size_t struct_bytes;
    double submitted, scheduled, first_token; /* the second: its first rows were in a step */
    int32_t prompt_tokens, cached_tokens;     /* of the prompt; found in the prefix cache when the
                                                 request first ran */
    int32_t new_tokens, preemptions;
    int32_t drafted_tokens, accepted_tokens, verify_steps; /* the last: steps that had drafts */
} sp_request_trace;

/*
 * One new token of a request; the last one carries the reason. With prompt_logprobs, before these,
 * one event for each token of the prompt but the first, in order, each once: is_prompt.
 */
typedef struct sp_request_event {
    size_t struct_bytes; /* what the library fills */
    int64_t request;
    int32_t token;    /* -1 for a request that ends without one (max_tokens 0, or it failed) */
    int32_t position; /* of the token, counted from the beginning of the prompt */
    bool is_prompt;   /* a token of the prompt, with its logprob and without text */
    const char *text; /* new text, whole UTF-8 sequences; held back where it could begin a
                         stop string; borrowed until return */
    size_t text_bytes;
    sp_finish finish;
    sp_status failure;     /* SP_OK, or with SP_FINISH_FAILED why; error is borrowed until return */
    const sp_error *error; /* NULL unless it failed */
    /* Where they were requested; else n_top is 0. Borrowed until return. */
    float logprob;
    const sp_logprob *top; /* [n_top] best first, the lower of equal ids first */
    int32_t n_top;
    const sp_request_trace *trace; /* borrowed until return */
    float processed_logprob;       /* with processed_logprobs */
    /* With routed_experts, in the last event of a request that did not fail; else NULL and 0: the
     * experts that the first n_routed tokens, the prompt's first, were routed to as inputs. The
     * last new token never was one, so it has none; without new tokens n_routed is n_tokens.
     * [n_routed, layers, per token], as sp_engine_routing has these: in each layer the largest
     * logit first. Borrowed until return. */
    const uint16_t *routed_experts;
    int32_t n_routed;
} sp_request_event;

typedef void (*sp_request_event_fn)(void *user, const sp_request_event *event);

/*
 * Checks the request whole and queues it. Everything is copied. *out_id is positive and never
 * reused. SP_ERR_NOT_FOUND with the adapter's name; SP_ERR_INPUT: an empty prompt, an id outside
 * the vocabulary, a parameter out of range (named); SP_ERR_TOO_LARGE with
 * "context_length_exceeded": prompt and max_tokens exceed the context or the whole KV cache, with
 * the numbers and the setting; SP_ERR_MEMORY.
 */
SP_API sp_status sp_engine_submit(sp_engine *engine, const sp_request *request, int64_t *out_id,
                                  sp_error *error);

/* The checks of sp_engine_submit alone. */
SP_API sp_status sp_engine_check(const sp_engine *engine, const sp_request *request,
                                 sp_error *error);

/* Drops a request at once and frees its pages and its adapter reference. SP_ERR_NOT_FOUND: none
 * waits or runs under this id. */
SP_API sp_status sp_engine_cancel(sp_engine *engine, int64_t id, sp_error *error);

/*
 * A paused request stays where it is: one that runs keeps its pages and its slot and has no rows in
 * steps, one that waits is not taken in. One that runs makes way where others lack its pages or its
 * place, and is computed again later; that changes no token. SP_ERR_NOT_FOUND as above.
 */
SP_API sp_status sp_engine_set_paused(sp_engine *engine, int64_t id, bool paused, sp_error *error);

/*
 * One step of the batch: every running request advances by one token or one prefill chunk, and by
 * one token more for each draft that is accepted. Events
 * come in the order of submission. SP_AGAIN: nothing is waiting or running that is not paused. A
 * step in which all requests wait for adapters on their way has no rows and waits for them, 10 ms
 * at most. A request that cannot go on is dropped and ends with an event, SP_FINISH_FAILED; where
 * its logits are not finite the code is "adapter-non-finite" with the adapter as subject, or
 * "logits-non-finite" for the base; the others go on, and the step succeeds. Without on_event,
 * where nobody else would be told, status and error are those of the first that was dropped. Any
 * other error is the step's own: no request was dropped, and the next call tries again.
 */
SP_API sp_status sp_engine_step(sp_engine *engine, sp_request_event_fn on_event, void *user,
                                sp_error *error);

typedef struct sp_engine_stats {
    size_t struct_bytes;
    uint64_t steps, rows, prefill_rows, decode_rows, tokens, preemptions;
    uint64_t rotations;   /* slots that waiting adapters got by preemption */
    double step_seconds;  /* sum over steps */
    double delta_seconds; /* of it, in deltas that ran apart from the base's GEMMs: those of
                             embeddings, head and large batches */
    int32_t waiting, running, running_max;
    int32_t slots, page_tokens;
    int64_t kv_pages, kv_pages_used, kv_pages_used_max;
    int64_t kv_pages_cached; /* not in use, kept for the prefix cache */
    uint64_t prefix_tokens;  /* tokens that the prefix cache has saved from being computed */
    double load_seconds;     /* sum of the time that steps were held up by adapters coming in */
    uint64_t adapter_reads;  /* adapters read and packed: from files, or from another source */
    uint64_t adapter_copies; /* images copied into slots */
    uint64_t host_evictions; /* images dropped from the host cache for want of budget */
    size_t host_bytes;       /* images in the host cache */
    size_t weight_bytes;     /* mapped, not copied */
    size_t pool_bytes, kv_bytes, scratch_bytes;
    double open_seconds, adapter_seconds; /* of sp_engine_open; the adapters' share */
    double prefault_seconds;              /* likewise: weights_prefault's; 0: it was off */
    int32_t threads;                      /* that steps run on */
    int32_t slot_rank;                    /* that a slot has room for; 0 without slots */
    sp_dtype precision;                   /* of activations and of the KV cache */
    /* Of the waiting requests, in the last step that could take one in: those that wait for a slot
     * that others hold, for their adapter on its way, for KV pages or a recurrent state, for room
     * in the batch. */
    int32_t waiting_slot, waiting_load, waiting_pages, waiting_batch;
    size_t host_bytes_max; /* the host cache's budget */
    uint64_t captures;     /* GPU: passes that were captured as graphs */
    size_t device_bytes;   /* GPU: allocated there, all in all */
    uint64_t drafted_tokens, accepted_tokens;
    uint64_t verify_steps; /* of single requests; with those of others in one step each counts */
    uint64_t model_drafted_tokens, model_accepted_tokens; /* of these, the draft model's */
    double draft_seconds;                                 /* that it took */
    size_t draft_model_bytes; /* its weights, KV cache and scratch; 0: there is none */
    /* Of a model with recurrent layers, else 0: states of requests that run, and snapshots of them
     * that the prefix cache keeps. */
    int32_t states, states_used, states_used_max;
    int32_t state_snapshots, state_snapshots_kept;
    uint64_t state_snapshots_written;
    size_t state_bytes; /* of both, allocated */
} sp_engine_stats;

/* Fills the caller's struct, whose struct_bytes is set. SP_ERR_ARGUMENT: a size that none has. */
SP_API sp_status sp_engine_get_stats(const sp_engine *engine, sp_engine_stats *out_stats,
                                     sp_error *error);

/* ---- the files of the weights -------------------------------------------------------------- */

/* Reason codes: what is mapped has changed, so that answers would be wrong; and the files are
 * others now, while what was mapped is as it was. */
#define SP_CODE_WEIGHTS_CHANGED  "weights-changed"
#define SP_CODE_WEIGHTS_REPLACED "weights-replaced"

/*
 * Whether something may have happened to a file of the weights since the last call: then
 * sp_engine_check_weights says what. It never waits for the file system, and sees what is written
 * on this machine before the next step can read it; what another machine writes only a check finds.
 */
SP_API bool sp_engine_weights_touched(const sp_engine *engine);
/*
 * Looks at the files of the weights: SP_OK, SP_ERR_STATE with SP_CODE_WEIGHTS_REPLACED, or with
 * SP_CODE_WEIGHTS_CHANGED: SP_ERR_TRUNCATED, SP_ERR_INPUT (it was written to), SP_ERR_IO (a part of
 * it could not be read). error->subject is the file. With weights_copy always SP_OK. Any thread; it
 * may wait for the file system.
 */
SP_API sp_status sp_engine_check_weights(const sp_engine *engine, sp_error *error);

/* ---- adapters while it runs ---------------------------------------------------------------- */

/*
 * Its stage: adapters are loaded, unloaded, pinned, made active and listed there, between two
 * steps; a load ends between two steps too, and no step waits for it. stage.h has the whole story.
 * Borrowed; NULL: the engine was opened without slots (max_loras 0), or without adapters and
 * without adapter_loading. Requests are held and given slots by the engine alone.
 */
SP_API sp_stage *sp_engine_stage(const sp_engine *engine);

/*
 * An adapter for sp_stage_put from memory, judged as the engine judges those of files; else as
 * sp_adapter_from_tensors. Reads only what never changes in an engine: any thread, beside steps,
 * which it does not hold up.
 */
SP_API sp_status sp_engine_read_tensors(const sp_engine *engine, const char *name,
                                        const char *config, size_t config_bytes,
                                        const sp_tensor_view *views, size_t n_views,
                                        sp_adapter **out_adapter, sp_error *error);

/*
 * Multiply-adds of the base's linear layers for one row: what the row_macs of an adapter's facts
 * are compared with.
 */
SP_API double sp_engine_row_macs(const sp_engine *engine);

/*
 * The version that a request holds, as it was resolved at submission: its name, borrowed until the
 * request ends, and its digest. The base: NULL and all zero. Either output may be NULL.
 * SP_ERR_NOT_FOUND: no request waits or runs under this id.
 */
SP_API sp_status sp_engine_request_adapter(const sp_engine *engine, int64_t id,
                                           const char **out_name, sp_digest *out_digest,
                                           sp_error *error);

#ifdef __cplusplus
}
#endif
#endif
