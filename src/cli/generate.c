/*
 * generate.c: one batch, every request with its own adapter. All requests are checked before the
 * first token; results come in the order of the requests.
 */
#include "base/alloc.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/hash.h"
#include "cli/cli.h"
#include "cli/memory.h"
#include "cli/requests.h"
#include "cli/run_settings.h"

#include <string.h>
#include <unistd.h>

#define KV_TOKENS_MAX_BY_ITSELF 65536
#define PROGRESS_INTERVAL_S     0.2

typedef struct generate_settings {
    sp_run_settings run; /* first: the shared rows point into it */
    sp_setting_list requests;
    sp_field_flags flags;
    bool parse_special, add_special;
} generate_settings;

#define FIELD(member) offsetof(generate_settings, member)

static const sp_setting own_rows[] = {
    {"request", SP_SETTING_LIST, FIELD(requests), NULL, 0, 0, NULL, "[NAME=]PROMPT",
     "a prompt and the adapter that it uses, split at the first '='; none: the base", true},
    {"parse-special", SP_SETTING_BOOL, FIELD(parse_special), NULL, 0, 0, NULL, NULL,
     "read the text of special tokens in prompts as these tokens", true},
    {"add-special", SP_SETTING_BOOL, FIELD(add_special), "true", 0, 0, NULL, NULL,
     "put the tokens around a prompt that tokenizer.json says (as a rule one that begins it)",
     true},
};

#define USES       (SP_OPTION_OF_ENGINE | SP_SETTING_OF_OUTPUT)
#define N_OWN_ROWS (sizeof own_rows / sizeof own_rows[0])

/* One run of the verb. */
typedef struct generate_run {
    generate_settings settings;
    sp_cli_requests requests;
    sp_engine *engine;
    size_t n_finished;
    double began, first_token, last_progress;
    sp_error failed; /* of the first request that was dropped; status 0: none was */
    bool progress;
} generate_run;

static const char *adapter_shown(const sp_cli_request *request)
{
    return request->adapter ? request->adapter : "base";
}

/* ---- requests ------------------------------------------------------------------------------ */

static sp_status collect_requests(generate_run *run, sp_error *error)
{
    const generate_settings *settings = &run->settings;

    if (settings->requests.n == 0)
        return sp_cli_requests_read(&run->requests, stdin, &settings->flags, error);
    for (size_t i = 0; i < settings->requests.n; i++) {
        sp_status status = sp_cli_requests_add_flag(&run->requests, settings->requests.values[i],
                                                    &settings->flags, error);

        if (status != SP_OK)
            return status;
    }
    return SP_OK;
}

/* Room for all requests at once, as far as that is reasonable; a prompt has at most one token a
 * byte. */
static int64_t kv_tokens_wanted(const generate_run *run)
{
    int64_t page = run->settings.run.options.page_tokens;
    int64_t sum = 0, most = page;

    for (size_t i = 0; i < run->requests.n; i++) {
        const sp_cli_request *request = &run->requests.items[i];
        int64_t prompt =
            request->prompt_tokens ? request->n_prompt_tokens : (int64_t)request->prompt_bytes;
        int64_t need = prompt + request->request.max_tokens + page;

        sum += need;
        most = need > most ? need : most;
    }
    if (sum > KV_TOKENS_MAX_BY_ITSELF)
        sum = KV_TOKENS_MAX_BY_ITSELF;
    return sum > most ? sum : most;
}

static sp_status encode_prompts(generate_run *run, sp_error *error)
{
    for (size_t i = 0; i < run->requests.n; i++) {
        sp_cli_request *request = &run->requests.items[i];
        sp_status status;

        if (request->prompt_tokens || !request->prompt)
            continue;
        status = (run->settings.add_special ? sp_engine_encode_prompt : sp_engine_encode)(
            run->engine, request->prompt, request->prompt_bytes, run->settings.parse_special, 0,
            &request->prompt_tokens, &request->n_prompt_tokens, error);
        if (status != SP_OK)
            return status;
    }
    return SP_OK;
}

/* Says which request an error is about, and how to write a prompt that holds an '='. */
static void name_request(const generate_run *run, size_t index, sp_status status, sp_error *error)
{
    char text[SP_ERROR_TEXT_BYTES];
    const char *advice = "";

    if (status == SP_ERR_NOT_FOUND && run->settings.requests.n > 0)
        advice = "; a base prompt that holds '=' is written \"=PROMPT\"";
    memcpy(text, error->text, sizeof text);
    snprintf(error->text, sizeof error->text, "request %zu: %.*s%s", index,
             (int)(sizeof error->text - 96), text, advice);
}

static sp_status check_requests(const generate_run *run, sp_error *error)
{
    for (size_t i = 0; i < run->requests.n; i++) {
        sp_request view = sp_cli_request_view(&run->requests.items[i]);
        sp_status status = sp_engine_check(run->engine, &view, error);

        if (status != SP_OK) {
            name_request(run, i, status, error);
            return status;
        }
    }
    return SP_OK;
}

static sp_status submit_requests(generate_run *run, sp_error *error)
{
    for (size_t i = 0; i < run->requests.n; i++) {
        sp_cli_request *request = &run->requests.items[i];
        sp_request view = sp_cli_request_view(request);
        sp_status status;

        request->tokens = sp_calloc((size_t)request->request.max_tokens + 1, sizeof(int32_t));
        if (!request->tokens)
            return sp_fail_memory(error, (size_t)request->request.max_tokens * sizeof(int32_t),
                                  "tokens");
        status = sp_engine_submit(run->engine, &view, &request->id, error);
        if (status != SP_OK)
            return status;
    }
    return SP_OK;
}

/* ---- running ------------------------------------------------------------------------------- */

static void add_logprob(sp_text *out, int32_t token, float logprob)
{
    sp_text_format(out, "{\"token\": %d, \"logprob\": %.9g", token, (double)logprob);
}

/* One item of a list; %.9g reads back as the same float. */
static void add_score(sp_text *out, const sp_request_event *event)
{
    if (out->bytes > 0)
        sp_text_add(out, ", ");
    add_logprob(out, event->token, event->logprob);
    sp_text_add(out, ", \"top\": [");
    for (int32_t i = 0; i < event->n_top; i++) {
        sp_text_add(out, i ? ", " : "");
        add_logprob(out, event->top[i].token, event->top[i].logprob);
        sp_text_add(out, "}");
    }
    sp_text_add(out, "]}");
}

/* [[[expert, ..], a list for each layer], ..] of each token, without the outer brackets. */
static void add_routing(sp_text *out, const sp_engine *engine, const sp_request_event *event)
{
    int32_t layers, per_token;
    const uint16_t *id = event->routed_experts;

    sp_engine_routing(engine, &layers, &per_token);
    for (int32_t row = 0; row < event->n_routed; row++) {
        sp_text_add(out, row ? "], [" : "[");
        for (int32_t i = 0; i < layers * per_token; i++, id++) {
            if (i % per_token == 0)
                sp_text_add(out, i ? "], [" : "[");
            sp_text_format(out, i % per_token ? ", %d" : "%d", *id);
        }
        sp_text_add(out, "]");
    }
    sp_text_add(out, event->n_routed > 0 ? "]" : "");
}

static void on_event(void *user, const sp_request_event *event)
{
    generate_run *run = user;
    /* Ids are assigned in order, from 1, to one batch. */
    sp_cli_request *request = &run->requests.items[event->request - run->requests.items[0].id];

    if (event->finish == SP_FINISH_FAILED && run->failed.status == SP_OK)
        run->failed = *event->error;
    if (event->is_prompt) {
        add_score(&request->prompt_scores, event);
        return;
    }
    if (request->request.logprobs)
        add_score(&request->scores, event);
    if (run->first_token == 0)
        run->first_token = sp_clock_seconds();
    if (event->token >= 0)
        request->tokens[request->n_tokens++] = event->token;
    sp_text_add_bytes(&request->text, event->text, event->text_bytes);
    request->finish = event->finish;
    add_routing(&request->routed, run->engine, event);
    if (event->finish != SP_FINISH_NONE)
        run->n_finished++;
}

static void show_progress(generate_run *run, bool last)
{
    sp_engine_stats stats = {.struct_bytes = sizeof stats};
    double now = sp_clock_seconds();

    if (!run->progress || (!last && now - run->last_progress < PROGRESS_INTERVAL_S))
        return;
    run->last_progress = now;
    sp_engine_get_stats(run->engine, &stats, NULL);
    fprintf(stderr, "\r%zu of %zu requests done, %llu tokens, %.1f tokens/s ", run->n_finished,
            run->requests.n, (unsigned long long)stats.tokens,
            stats.step_seconds > 0 ? (double)stats.tokens / stats.step_seconds : 0.0);
    if (last)
        fputs("\r\033[K", stderr);
    fflush(stderr);
}

static sp_status run_batch(generate_run *run, sp_error *error)
{
    sp_status status = encode_prompts(run, error);

    if (status == SP_OK)
        status = check_requests(run, error);
    if (status == SP_OK)
        status = submit_requests(run, error);
    while (status == SP_OK) {
        status = sp_engine_step(run->engine, on_event, run, error);
        if (status == SP_OK && run->failed.status != SP_OK) {
            status = run->failed.status;
            *error = run->failed;
        }
        show_progress(run, false);
    }
    show_progress(run, true);
    for (size_t i = 0; i < run->requests.n && status == SP_AGAIN; i++) {
        const sp_cli_request *request = &run->requests.items[i];

        if (request->text.failed || request->scores.failed || request->prompt_scores.failed ||
            request->routed.failed)
            return sp_fail_memory(error, request->text.bytes, "a text");
    }
    return status == SP_AGAIN ? SP_OK : status;
}

/* ---- output -------------------------------------------------------------------------------- */

static const char *finish_name(sp_finish finish)
{
    return finish == SP_FINISH_STOP ? "stop" : "length";
}

static void add_tokens(sp_text *out, const char *field, const int32_t *tokens, int32_t n)
{
    sp_text_format(out, ", \"%s\": [", field);
    for (int32_t i = 0; i < n; i++)
        sp_text_format(out, "%s%d", i ? ", " : "", tokens[i]);
    sp_text_add(out, "]");
}

static void add_result_json(sp_text *out, const sp_cli_request *request, size_t index)
{
    sp_text_format(out, "{\"index\": %zu, \"adapter\": ", index);
    if (request->adapter)
        sp_text_json_string(out, request->adapter, strlen(request->adapter));
    else
        sp_text_add(out, "null");
    add_tokens(out, "prompt_tokens", request->prompt_tokens, request->n_prompt_tokens);
    add_tokens(out, "tokens", request->tokens, request->n_tokens);
    sp_text_add(out, ", \"text\": ");
    sp_text_json_string(out, request->text.data ? request->text.data : "", request->text.bytes);
    sp_text_format(out, ", \"finish_reason\": \"%s\"", finish_name(request->finish));
    if (request->request.logprobs)
        sp_text_format(out, ", \"logprobs\": [%s]", request->scores.data);
    if (request->request.prompt_logprobs) /* the first token has none */
        sp_text_format(out, ", \"prompt_logprobs\": [null%s%s]",
                       request->prompt_scores.data ? ", " : "",
                       request->prompt_scores.data ? request->prompt_scores.data : "");
    if (request->request.routed_experts)
        sp_text_format(out, ", \"routed_experts\": [%s]",
                       request->routed.data ? request->routed.data : "");
    sp_text_add(out, "}\n");
}

static void add_number(sp_text *out, const char *field, double value)
{
    sp_text_format(out, "\"%s\": ", field);
    sp_text_json_double(out, value);
    sp_text_add(out, ", ");
}

static void add_adapters_json(sp_text *out, const sp_engine *engine)
{
    const sp_stage *stage = sp_engine_stage(engine);

    sp_text_add(out, "\"adapters\": [");
    for (size_t i = 0; i < sp_stage_n_versions(stage); i++) {
        sp_stage_version_info info = {.struct_bytes = sizeof info};
        char digest[2 * SP_DIGEST_BYTES + 1];

        sp_stage_version_at(stage, i, &info, NULL);
        sp_hex(info.digest.bytes, SP_DIGEST_BYTES, digest);
        sp_text_add(out, i ? ", {\"name\": " : "{\"name\": ");
        sp_text_json_string(out, info.name, strlen(info.name));
        sp_text_format(out,
                       ", \"slot\": %d, \"rank\": %d, \"sites\": %d, \"slot_bytes\": %zu, "
                       "\"rows\": %llu, \"digest\": \"%s\"",
                       info.slot, info.facts->rank, info.facts->sites, info.slot_bytes,
                       (unsigned long long)info.uses, digest);
        sp_text_add(out, ", ");
        add_number(out, "load_seconds", info.load_seconds);
        sp_text_add(out, "\"flops_ratio\": ");
        sp_text_json_double(out, info.facts->row_macs / sp_engine_row_macs(engine));
        sp_text_add(out, "}");
    }
    sp_text_add(out, "]");
}

static void add_times_json(sp_text *out, const generate_run *run, const sp_engine_stats *stats)
{
    double seconds = stats->step_seconds > 0 ? stats->step_seconds : 1e-9;

    sp_text_add(out, "\"times\": {");
    add_number(out, "open_seconds", stats->open_seconds);
    add_number(out, "adapter_seconds", stats->adapter_seconds);
    add_number(out, "first_token_seconds", run->first_token - run->began);
    add_number(out, "delta_seconds", stats->delta_seconds);
    sp_text_add(out, "\"step_seconds\": ");
    sp_text_json_double(out, stats->step_seconds);
    sp_text_add(out, "}, \"rates\": {");
    add_number(out, "rows_per_second", (double)stats->rows / seconds);
    sp_text_add(out, "\"tokens_per_second\": ");
    sp_text_json_double(out, (double)stats->tokens / seconds);
    sp_text_add(out, "}, ");
}

static void add_summary_json(sp_text *out, const generate_run *run)
{
    sp_process_memory memory = sp_process_memory_now();
    sp_engine_stats stats = {.struct_bytes = sizeof stats};

    sp_engine_get_stats(run->engine, &stats, NULL);
    sp_text_format(
        out,
        "{\"summary\": {\"requests\": %zu, \"tokens\": %llu, \"steps\": %llu, "
        "\"rows\": %llu, \"prefill_rows\": %llu, \"decode_rows\": %llu, "
        "\"drafted_tokens\": %llu, \"accepted_tokens\": %llu, \"verify_steps\": %llu, "
        "\"model_drafted_tokens\": %llu, \"model_accepted_tokens\": %llu, "
        "\"preemptions\": %llu, \"kv_pages_used_max\": %lld, \"cpu_isa\": \"%s\", "
        "\"precision\": \"%s\", ",
        run->requests.n, (unsigned long long)stats.tokens, (unsigned long long)stats.steps,
        (unsigned long long)stats.rows, (unsigned long long)stats.prefill_rows,
        (unsigned long long)stats.decode_rows, (unsigned long long)stats.drafted_tokens,
        (unsigned long long)stats.accepted_tokens, (unsigned long long)stats.verify_steps,
        (unsigned long long)stats.model_drafted_tokens,
        (unsigned long long)stats.model_accepted_tokens, (unsigned long long)stats.preemptions,
        (long long)stats.kv_pages_used_max, sp_engine_cpu_isa(run->engine),
        run->settings.run.precision);
    add_times_json(out, run, &stats);
    sp_text_format(out,
                   "\"memory\": {\"weight_bytes\": %zu, \"pool_bytes\": %zu, \"kv_bytes\": %zu, "
                   "\"state_bytes\": %zu, \"scratch_bytes\": %zu, \"resident_bytes\": %zu, "
                   "\"resident_weight_bytes\": %zu, \"resident_beyond_weights_bytes\": %zu}, ",
                   stats.weight_bytes, stats.pool_bytes, stats.kv_bytes, stats.state_bytes,
                   stats.scratch_bytes, memory.resident_bytes, memory.weights_bytes,
                   memory.beyond_weights_bytes);
    add_adapters_json(out, run->engine);
    sp_text_add(out, "}}\n");
}

static void add_result_text(sp_text *out, const sp_cli_request *request, size_t index)
{
    sp_text_format(out, "[%zu] %s: %d prompt tokens, %d new, %s\n", index, adapter_shown(request),
                   request->n_prompt_tokens, request->n_tokens, finish_name(request->finish));
    if (request->prompt)
        sp_text_add_bytes(out, request->prompt, request->prompt_bytes);
    sp_text_add_bytes(out, request->text.data ? request->text.data : "", request->text.bytes);
    sp_text_add(out, "\n\n");
}

static void print_summary_text(const generate_run *run)
{
    sp_engine_stats stats = {.struct_bytes = sizeof stats};

    sp_engine_get_stats(run->engine, &stats, NULL);
    fprintf(stderr,
            "%llu tokens in %llu steps, %.1f tokens/s; first token after %.0f ms; %d adapters "
            "loaded in %.0f ms\n",
            (unsigned long long)stats.tokens, (unsigned long long)stats.steps,
            stats.step_seconds > 0 ? (double)stats.tokens / stats.step_seconds : 0.0,
            (run->first_token - run->began) * 1e3,
            (int)sp_stage_n_versions(sp_engine_stage(run->engine)), stats.adapter_seconds * 1e3);
}

/* Everything is put together first, so that a failure prints nothing. */
static sp_status print_results(const generate_run *run, sp_error *error)
{
    sp_text out = {0};
    sp_status status = SP_OK;

    for (size_t i = 0; i < run->requests.n; i++) {
        if (run->settings.run.json)
            add_result_json(&out, &run->requests.items[i], i);
        else
            add_result_text(&out, &run->requests.items[i], i);
    }
    if (run->settings.run.json)
        add_summary_json(&out, run);
    if (out.failed)
        status = sp_fail_memory(error, out.bytes, "the output");
    else if (fwrite(out.data, 1, out.bytes, stdout) != out.bytes || fflush(stdout) != 0)
        status = sp_fail(error, SP_ERR_IO, NULL, "stdout", -1, "cannot write to standard output");
    sp_text_free(&out);
    if (status == SP_OK && !run->settings.run.json)
        print_summary_text(run);
    return status;
}

/* ---- the verb ------------------------------------------------------------------------------ */

static sp_setting *create_rows(generate_settings *settings, size_t *out_n)
{
    const sp_field_flag_set set = sp_request_flag_set(SP_FORM_FLAGS);
    sp_setting own[SP_FIELD_FLAGS_MAX + N_OWN_ROWS];
    size_t n = sp_field_flags_rows(&settings->flags, &set, FIELD(flags), own);

    memcpy(own + n, own_rows, sizeof own_rows);
    return sp_run_settings_rows(&settings->run, USES, own, n + N_OWN_ROWS, out_n);
}

static void print_help(const sp_setting *rows, size_t n_rows)
{
    puts("usage: sidepath generate --model DIR [--adapter NAME=DIR]... "
         "[--request '[NAME=]PROMPT']... [FLAGS]\n\n"
         "Runs all requests as one batch, each with its own adapter. With --json one object a\n"
         "request comes out, then a summary. Without --request, standard input holds one JSON\n"
         "object a line, of:\n");
    sp_cli_requests_print_fields(stdout);
    puts("");
    sp_settings_print_help(stdout, rows, n_rows);
}

static int run_verb(generate_run *run)
{
    sp_error error = {0};
    bool usage = false;
    sp_status status = collect_requests(run, &error);

    if (status == SP_OK && run->requests.n == 0) {
        sp_fail(&error, SP_ERR_ARGUMENT, NULL, "request", -1,
                "there is no request; give --request or JSON lines on standard input");
        return sp_cli_usage("generate", &error);
    }
    if (status == SP_OK)
        status = sp_run_settings_open(&run->settings.run, kv_tokens_wanted(run), &run->engine,
                                      &usage, &error);
    if (status != SP_OK)
        return usage ? sp_cli_usage("generate", &error) : sp_cli_fail("generate", &error);
    status = run_batch(run, &error);
    if (status == SP_OK)
        status = print_results(run, &error);
    return status == SP_OK ? SP_EXIT_DONE : sp_cli_fail("generate", &error);
}

int sp_cli_generate(int argc, char **argv)
{
    generate_run run = {.began = sp_clock_seconds(), .progress = isatty(STDERR_FILENO) == 1};
    sp_error error;
    size_t n_rows;
    sp_setting *rows = create_rows(&run.settings, &n_rows);
    int code = SP_EXIT_DONE;

    if (!rows)
        return SP_EXIT_FAILED;
    if (sp_cli_wants_help(argc, argv)) {
        print_help(rows, n_rows);
    } else if (sp_run_settings_parse(&run.settings.run, USES, rows, n_rows, argc, argv, NULL,
                                     &error) != SP_OK) {
        code = sp_cli_usage("generate", &error);
    } else {
        code = run_verb(&run);
        sp_settings_free_lists(rows, n_rows, &run.settings, NULL);
    }
    sp_engine_close(run.engine);
    sp_cli_requests_free(&run.requests);
    sp_free(rows);
    return code;
}
