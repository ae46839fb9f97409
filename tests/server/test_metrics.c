/*
 * Metrics: what is counted, against events and steps written by hand; the text, line by line and
 * by promtool where it is installed; hostile names in both formats.
 */
#include "support/test.h"

#include "base/alloc.h"
#include "server/metrics/metrics.h"
#include "support/shell.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define HOSTILE "a\"b\\c\xe2\x80\xa8</script>{x=\"1\"}"

/* ---- a server's state, by hand --------------------------------------------------------------- */

typedef struct scene {
    sp_metrics *metrics;
    sp_engine_stats stats;
    sp_driver_counts counts;
    sp_listed_adapter adapters[5];
    sp_front_counts front;
    uint64_t codes[SP_HTTP_CODES];
    sp_server_refusal refusal;
    sp_server_refusals refusals;
    sp_metrics_view view;
} scene;

static void set_adapters(scene *s)
{
    s->adapters[0] = (sp_listed_adapter){.name = "tales",
                                         .state = SP_STAGE_VERSION_READY,
                                         .slot = 1,
                                         .rank = 8,
                                         .host_bytes = 100,
                                         .pinned = true,
                                         .references = 3,
                                         .running = 2,
                                         .waiting = 1,
                                         .generation = 4};
    s->adapters[1] = (sp_listed_adapter){.name = HOSTILE,
                                         .state = SP_STAGE_VERSION_HOST,
                                         .slot = -1,
                                         .rank = 64,
                                         .host_bytes = 7,
                                         .waiting = 2,
                                         .generation = 5};
    s->adapters[2] = (sp_listed_adapter){
        .name = "cold", .state = SP_STAGE_VERSION_DISK, .slot = -1, .rank = 4, .generation = 6};
    s->adapters[3] = (sp_listed_adapter){.name = "tales",
                                         .state = SP_STAGE_VERSION_DRAINING,
                                         .slot = 0,
                                         .running = 1,
                                         .host_bytes = 100,
                                         .generation = 3};
    s->adapters[4] = (sp_listed_adapter){
        .name = "a,b", .state = SP_STAGE_VERSION_READY, .slot = 2, .running = 1, .generation = 7};
}

static scene *make_scene(void)
{
    scene *s = sp_calloc(1, sizeof *s);

    s->metrics = sp_calloc(1, sizeof *s->metrics);
    s->stats = (sp_engine_stats){.waiting = 3,
                                 .running = 4,
                                 .running_max = 64,
                                 .slots = 4,
                                 .page_tokens = 16,
                                 .kv_pages = 200,
                                 .kv_pages_used = 50,
                                 .kv_pages_cached = 30,
                                 .states = 8,
                                 .states_used = 3,
                                 .state_snapshots = 20,
                                 .state_snapshots_kept = 6,
                                 .state_snapshots_written = 11,
                                 .state_bytes = 4096,
                                 .tokens = 1234567,
                                 .steps = 10};
    set_adapters(s);
    sp_metrics_start(s->metrics, "base \"q\"", &s->stats);
    s->counts = (sp_driver_counts){
        .finished_stop = 5, .waiting_for_load = 2, .loads = 9, .load_failures = 2};
    s->codes[200] = 7;
    s->codes[429] = 2;
    s->front = (sp_front_counts){.log_lines_dropped = 12, .key_reload_failures = 3};
    s->refusal = (sp_server_refusal){"bad</td>", {.code = "rank-exceeds-pool"}};
    snprintf(s->refusal.error.text, sizeof s->refusal.error.text, "in /srv/a/bad: too \"large\"");
    s->refusals = (sp_server_refusals){&s->refusal, 1};
    s->view = (sp_metrics_view){.version = "1.2.3",
                                .base_name = "base \"q\"",
                                .cpu_isa = "avx2",
                                .now_unix_s = 1700000000.25,
                                .now_s = 100.5,
                                .uptime_s = 12.5,
                                .stats = &s->stats,
                                .adapters = s->adapters,
                                .n_adapters = 5,
                                .metrics = s->metrics,
                                .counts = &s->counts,
                                .front = &s->front,
                                .http_codes = s->codes,
                                .refusals = &s->refusals};
    return s;
}

static void free_scene(scene *s)
{
    sp_free(s->metrics);
    sp_free(s);
}

static char *text_of(const scene *s)
{
    sp_text out = {0};

    sp_metrics_text(&s->view, &out);
    assert_false(out.failed);
    return out.data;
}

static void assert_line(const char *text, const char *line)
{
    size_t bytes = strlen(line);
    const char *at = strstr(text, line);

    while (at && ((at > text && at[-1] != '\n') || at[bytes] != '\n'))
        at = strstr(at + 1, line);
    if (!at)
        fail_msg("no line \"%s\"", line);
}

/* ---- counting -------------------------------------------------------------------------------- */

static void send_token(scene *s, sp_request_clock *clock, const char *adapter,
                       const sp_request_trace *trace, double now, sp_finish finish)
{
    sp_request_event event = {.token = 5, .finish = finish, .trace = trace};

    sp_metrics_event(s->metrics, clock, adapter, &event, now);
}

static void test_events(void **state)
{
    scene *s = make_scene();
    sp_request_clock clock = {.arrived = 10.0}, base_clock = {.arrived = 10.0};
    sp_request_trace trace = {.scheduled = 10.3, .prompt_tokens = 30, .cached_tokens = 16};
    sp_request_event prompt = {.token = 5, .is_prompt = true, .trace = &trace};
    const sp_traffic *traffic;
    char *text;

    (void)state;
    sp_metrics_event(s->metrics, &clock, "tales", &prompt, 10.4);
    assert_null(sp_metrics_traffic(s->metrics, "tales"));
    trace.new_tokens = 1;
    send_token(s, &clock, "tales", &trace, 10.7, SP_FINISH_NONE);
    send_token(s, &clock, "tales", &trace, 10.702, SP_FINISH_NONE);
    send_token(s, &clock, "tales", &trace, 13.0, SP_FINISH_STOP);
    send_token(s, &base_clock, NULL, &trace, 10.9, SP_FINISH_LENGTH);
    traffic = sp_metrics_traffic(s->metrics, "tales");
    assert_non_null(traffic);
    assert_int_equal(traffic->requests, 1);
    assert_int_equal(traffic->prompt_tokens, 30);
    assert_int_equal(traffic->cached_tokens, 16);
    assert_int_equal(traffic->new_tokens, 3);
    assert_int_equal(traffic->non_finite, 0);
    sp_metrics_non_finite(s->metrics, "tales");
    sp_metrics_non_finite(s->metrics, NULL);
    assert_int_equal(traffic->non_finite, 1);
    text = text_of(s);
    assert_line(text, "sidepath_adapter_generated_tokens_total{adapter=\"tales\"} 3");
    assert_line(text, "sidepath_adapter_generated_tokens_total{adapter=\"base \\\"q\\\"\"} 1");
    /* Queue 0.3 s twice; first tokens at 0.7 and 0.9 s; gaps of 2 ms and 2.298 s. */
    assert_line(text, "sidepath_queue_seconds_bucket{le=\"0.25\"} 0");
    assert_line(text, "sidepath_queue_seconds_bucket{le=\"0.5\"} 2");
    assert_line(text, "sidepath_time_to_first_token_seconds_bucket{le=\"0.5\"} 0");
    assert_line(text, "sidepath_time_to_first_token_seconds_bucket{le=\"1\"} 2");
    assert_line(text, "sidepath_time_to_first_token_seconds_sum 1.6");
    assert_line(text, "sidepath_inter_token_seconds_bucket{le=\"0.001\"} 0");
    assert_line(text, "sidepath_inter_token_seconds_bucket{le=\"0.0025\"} 1");
    assert_line(text, "sidepath_inter_token_seconds_bucket{le=\"1\"} 1");
    assert_line(text, "sidepath_inter_token_seconds_bucket{le=\"+Inf\"} 2");
    assert_line(text, "sidepath_inter_token_seconds_count 2");
    assert_line(text, "sidepath_request_seconds_bucket{le=\"1\"} 1");
    assert_line(text, "sidepath_request_seconds_count 2");
    sp_free(text);
    free_scene(s);
}

static void test_steps_and_rates(void **state)
{
    scene *s = make_scene();
    sp_metrics_rates rates;
    char *text;

    (void)state;
    /* Ten seconds with two steps a second, 31 ms and 9 ms, 8 tokens each; one pause of 20 ms. */
    for (int i = 0; i < 20; i++) {
        s->stats.steps++;
        s->stats.tokens += 8;
        s->stats.step_seconds += i % 2 ? 0.009 : 0.031;
        s->stats.load_seconds += i == 6 ? 0.020 : 0.00001;
        sp_metrics_step(s->metrics, &s->stats, 90.25 + i * 0.5);
    }
    rates = sp_metrics_rates_now(s->metrics, 100.5);
    assert_true(rates.tokens_per_s > 15.999 && rates.tokens_per_s < 16.001);
    assert_true(rates.step_seconds_mean > 0.0199 && rates.step_seconds_mean < 0.0201);
    assert_true(rates.step_seconds_max > 0.0309 && rates.step_seconds_max < 0.0311);
    assert_true(rates.pause_seconds > 0.0199 && rates.pause_seconds < 0.0201);
    rates = sp_metrics_rates_now(s->metrics, 105.0); /* five of these seconds are left */
    assert_true(rates.tokens_per_s > 7.999 && rates.tokens_per_s < 8.001);
    rates = sp_metrics_rates_now(s->metrics, 700.0);
    assert_true(rates.tokens_per_s <= 0 && rates.step_seconds_max <= 0);
    /* Time that passes without a step is no step. */
    sp_metrics_step(s->metrics, &s->stats, 100.9);
    text = text_of(s);
    assert_line(text, "sidepath_step_seconds_count 20");
    assert_line(text, "sidepath_step_seconds_bucket{le=\"0.01\"} 10");
    assert_line(text, "sidepath_load_pause_seconds_count 1");
    assert_line(text, "sidepath_load_pause_seconds_bucket{le=\"0.01\"} 0");
    assert_line(text, "sidepath_load_pause_seconds_bucket{le=\"0.025\"} 1");
    assert_line(text, "sidepath_generated_tokens_total 1234727");
    sp_free(text);
    free_scene(s);
}

/* Names that clients invent make the output grow up to a bound, and nothing is lost. */
static void test_bounded(void **state)
{
    scene *s = make_scene();
    sp_request_trace trace = {.new_tokens = 1};
    char *text, *at;
    int n = 0;

    (void)state;
    for (int i = 0; i < 1000; i++) {
        sp_request_clock clock = {.arrived = 1};
        char name[300];

        snprintf(name, sizeof name, "adapter %d", i);
        send_token(s, &clock, name, &trace, 2, SP_FINISH_STOP);
    }
    text = text_of(s);
    for (at = text; (at = strstr(at, "\nsidepath_adapter_requests_total{")) != NULL; at++)
        n++;
    assert_int_equal(n, SP_TRAFFIC_MAX + 1);
    /* The base, 255 names, and the 745 others. */
    assert_line(text, "sidepath_adapter_requests_total{adapter=\":other\"} 745");
    sp_free(text);
    free_scene(s);
}

/* ---- text ------------------------------------------------------------------------------------ */

static void test_router_metrics(void **state)
{
    static const char *const lines[] = {
        "vllm:num_requests_waiting{model_name=\"base \\\"q\\\"\",engine=\"0\"} 5",
        "vllm:num_requests_running{model_name=\"base \\\"q\\\"\",engine=\"0\"} 4",
        "vllm:kv_cache_usage_perc{model_name=\"base \\\"q\\\"\",engine=\"0\"} 0.25",
        "vllm:cache_config_info{model_name=\"base \\\"q\\\"\",engine=\"0\",block_size=\"16\","
        "num_gpu_blocks=\"200\"} 1",
        /* Once for both versions; the name with a comma is left out. */
        "vllm:lora_requests_info{max_lora=\"4\",running_lora_adapters=\"tales\","
        "waiting_lora_adapters=\"tales,a\\\"b\\\\c\xe2\x80\xa8</script>{x=\\\"1\\\"}\"} "
        "1700000000.250",
        "vllm:lora_adapter_loaded{model_name=\"base "
        "\\\"q\\\"\",engine=\"0\",adapter_name=\"tales\","
        "level=\"gpu\",pinned=\"true\",rank=\"8\"} 1",
        "vllm:lora_adapter_loaded{model_name=\"base \\\"q\\\"\",engine=\"0\",adapter_name=\"a,b\","
        "level=\"gpu\",pinned=\"false\",rank=\"0\"} 1",
        "vllm:num_gpu_loaded_lora_adapters{model_name=\"base \\\"q\\\"\",engine=\"0\"} 2",
        "vllm:num_cpu_loaded_lora_adapters{model_name=\"base \\\"q\\\"\",engine=\"0\"} 2",
        "vllm:max_gpu_lora_adapters{model_name=\"base \\\"q\\\"\",engine=\"0\"} 4",
        "sidepath_kv_pages{state=\"free\"} 120",
        "sidepath_states{state=\"used\"} 3",
        "sidepath_states{state=\"free\"} 5",
        "sidepath_state_snapshots{state=\"cached\"} 6",
        "sidepath_state_snapshots{state=\"free\"} 14",
        "sidepath_state_snapshots_written_total 11",
        "sidepath_memory_bytes{kind=\"states\"} 4096",
        "sidepath_adapter_loads_total{outcome=\"ok\"} 7",
        "sidepath_http_responses_total{code=\"429\"} 2",
        "sidepath_log_lines_dropped_total 12",
        "sidepath_key_reloads_total{outcome=\"ok\"} 0",
        "sidepath_key_reloads_total{outcome=\"failed\"} 3",
    };
    scene *s = make_scene();
    char *text = text_of(s);

    (void)state;
    for (size_t i = 0; i < sizeof lines / sizeof lines[0]; i++)
        assert_line(text, lines[i]);
    assert_null(strstr(text, "adapter_name=\"cold\""));
    sp_free(text);
    /* Names that are read for the first time come last, with the same rule for commas. */
    s->view.awaited = (const char *const[]){"new", "x,y", "newer"};
    s->view.n_awaited = 3;
    s->view.adapters = s->adapters + 1;
    s->view.n_adapters = 1;
    text = text_of(s);
    assert_line(
        text, "vllm:lora_requests_info{max_lora=\"4\",running_lora_adapters=\"\","
              "waiting_lora_adapters=\"a\\\"b\\\\c\xe2\x80\xa8</script>{x=\\\"1\\\"},new,newer\"} "
              "1700000000.250");
    sp_free(text);
    s->view.n_awaited = 0;
    /* No adapter at all: the lists are there, and empty. */
    s->view.n_adapters = 0;
    s->stats.slots = 0;
    text = text_of(s);
    assert_line(text, "vllm:lora_requests_info{max_lora=\"0\",running_lora_adapters=\"\","
                      "waiting_lora_adapters=\"\"} 1700000000.250");
    sp_free(text);
    free_scene(s);
}

static void test_bad_bytes(void **state)
{
    scene *s = make_scene();
    char *text;

    (void)state;
    s->view.base_name = "x\xff\ny";
    text = text_of(s);
    assert_line(text,
                "vllm:max_gpu_lora_adapters{model_name=\"x\xef\xbf\xbd\\ny\",engine=\"0\"} 4");
    sp_free(text);
    free_scene(s);
}

/* promtool reads all of it; the only thing that it may say is that a name has a colon. */
static void test_promtool(void **state)
{
    scene *s = make_scene();
    sp_request_trace trace = {.new_tokens = 1};
    sp_request_clock clock = {.arrived = 1};
    char *text, *line, *directory, command[512];
    FILE *out;

    (void)state;
    if (system("promtool --version >/dev/null 2>&1") != 0) {
        print_message("skipped: promtool (package prometheus) is not installed\n");
        free_scene(s);
        skip();
        return;
    }
    send_token(s, &clock, HOSTILE, &trace, 2, SP_FINISH_STOP);
    text = text_of(s);
    directory = sp_test_make_directory();
    sp_test_write_file(directory, "metrics", text, strlen(text));
    snprintf(command, sizeof command, "promtool check metrics < %s/metrics 2>&1", directory);
    out = popen(command, "r");
    assert_non_null(out);
    line = sp_calloc(1, 4096);
    while (fgets(line, 4096, out))
        if (strncmp(line, "vllm:", 5) != 0 || !strstr(line, "should not contain ':'"))
            fail_msg("promtool says: %s", line);
    pclose(out);
    sp_free(line);
    sp_test_remove_tree(directory);
    sp_free(directory);
    sp_free(text);
    free_scene(s);
}

/* ---- JSON ------------------------------------------------------------------------------------ */

static json_int_t integer_at(const json_t *object, const char *field)
{
    const json_t *value = json_object_get(object, field);

    assert_true(json_is_integer(value));
    return json_integer_value(value);
}

static void test_json(void **state)
{
    scene *s = make_scene();
    sp_text out = {0};
    const json_t *slots, *adapters, *refused;
    json_t *root;

    (void)state;
    s->stats.steps++;
    s->stats.tokens += 40;
    s->stats.step_seconds += 0.5;
    sp_metrics_step(s->metrics, &s->stats, 98.5);
    sp_metrics_json(&s->view, &out);
    root = json_loadb(out.data, out.bytes, JSON_REJECT_DUPLICATES, NULL);
    assert_non_null(root);
    assert_string_equal(json_string_value(json_object_get(json_object_get(root, "base"), "name")),
                        "base \"q\"");
    assert_int_equal(integer_at(json_object_get(root, "queue"), "waiting"), 5);
    assert_int_equal(integer_at(json_object_get(root, "kv"), "used"), 50);
    assert_int_equal(integer_at(json_object_get(root, "states"), "used"), 3);
    assert_int_equal(integer_at(json_object_get(root, "states"), "kept"), 6);
    assert_int_equal(integer_at(json_object_get(root, "memory"), "states"), 4096);
    assert_true(json_number_value(
                    json_object_get(json_object_get(root, "rates"), "tokens_per_second")) > 3.99);
    assert_int_equal(json_array_size(json_object_get(json_object_get(root, "history"), "tokens")),
                     SP_METRICS_SECONDS - 1);
    assert_true(json_number_value(json_array_get(
                    json_object_get(json_object_get(root, "history"), "tokens"), 57)) > 39);
    slots = json_object_get(root, "slots");
    assert_int_equal(json_array_size(slots), 4);
    assert_string_equal(json_string_value(json_object_get(json_array_get(slots, 0), "state")),
                        "draining");
    assert_string_equal(json_string_value(json_object_get(json_array_get(slots, 2), "adapter")),
                        "a,b");
    assert_true(json_is_null(json_object_get(json_array_get(slots, 3), "adapter")));
    assert_int_equal(integer_at(json_array_get(slots, 2), "running"), 1);
    assert_int_equal(integer_at(json_array_get(slots, 2), "names"), 1);
    adapters = json_object_get(root, "adapters");
    assert_int_equal(json_array_size(adapters), 5);
    assert_string_equal(json_string_value(json_object_get(json_array_get(adapters, 1), "name")),
                        HOSTILE);
    refused = json_array_get(json_object_get(root, "refused"), 0);
    assert_string_equal(json_string_value(json_object_get(refused, "name")), "bad</td>");
    assert_string_equal(json_string_value(json_object_get(refused, "code")), "rank-exceeds-pool");
    assert_string_equal(json_string_value(json_object_get(refused, "message")),
                        "in bad: too \"large\"");
    json_decref(root);
    sp_text_free(&out);
    free_scene(s);
}

static void assert_close(double got, double want, double most)
{
    if (fabs(got - want) > most)
        fail_msg("%.17g, not %.17g", got, want);
}

/* 4 in (0.01, 0.025], 4 in (0.1, 0.25], 2 beyond all: by hand, as histogram_quantile does it. */
static void test_quantiles(void **state)
{
    scene *s = make_scene();
    sp_histogram *queue = &s->metrics->histograms[SP_HISTOGRAM_QUEUE];

    (void)state;
    assert_close(sp_metrics_quantile(s->metrics, SP_HISTOGRAM_QUEUE, 0.5), 0, 1e-12);
    assert_close(sp_metrics_mean(s->metrics, SP_HISTOGRAM_QUEUE), 0, 1e-12);
    queue->counts[3] = 4;
    queue->counts[6] = 4;
    queue->counts[SP_HISTOGRAM_BOUNDS_MAX] = 2;
    queue->sum = 200;
    assert_int_equal(sp_metrics_count(s->metrics, SP_HISTOGRAM_QUEUE), 10);
    assert_close(sp_metrics_mean(s->metrics, SP_HISTOGRAM_QUEUE), 20, 1e-9);
    assert_close(sp_metrics_quantile(s->metrics, SP_HISTOGRAM_QUEUE, 0.2), 0.0175, 1e-9);
    assert_close(sp_metrics_quantile(s->metrics, SP_HISTOGRAM_QUEUE, 0.5), 0.1375, 1e-9);
    assert_close(sp_metrics_quantile(s->metrics, SP_HISTOGRAM_QUEUE, 0.95), 60, 1e-9);
    free_scene(s);
}

/* A failure is kept until the name loads, once for each name, the oldest making room. */
static void test_load_failures(void **state)
{
    scene *s = make_scene();
    sp_metrics *m = s->metrics;
    sp_error error = {.code = "no-effect", .status = SP_ERR_INPUT};
    char name[16];

    (void)state;
    snprintf(error.text, sizeof error.text, "every product is zero");
    sp_metrics_load(m, "a", 0.1, &error, 10);
    sp_metrics_load(m, "b", 0.1, &error, 11);
    sp_metrics_load(m, "a", 0.1, &error, 12);
    assert_int_equal(m->n_failures, 2);
    assert_string_equal(m->failures[0].name, "b");
    assert_string_equal(m->failures[1].name, "a");
    assert_string_equal(m->failures[1].text, "every product is zero");
    assert_close(m->failures[1].at_s, 12, 1e-12);
    sp_metrics_load(m, "b", 0.1, NULL, 13);
    sp_metrics_load(m, "c", 0.1, NULL, 13);
    assert_int_equal(m->n_failures, 1);
    error.code = NULL;
    for (int i = 0; i < SP_LOAD_FAILURES_MAX; i++) {
        snprintf(name, sizeof name, "n%d", i);
        sp_metrics_load(m, name, 0.1, &error, 14);
    }
    assert_int_equal(m->n_failures, SP_LOAD_FAILURES_MAX);
    assert_string_equal(m->failures[0].name, "n0");
    assert_string_equal(m->failures[0].code, sp_status_name(SP_ERR_INPUT));
    free_scene(s);
}

static json_t *json_of(scene *s)
{
    sp_text out = {0};
    json_t *root;

    sp_metrics_json(&s->view, &out);
    root = json_loadb(out.data, out.bytes, JSON_REJECT_DUPLICATES, NULL);
    assert_non_null(root);
    sp_text_free(&out);
    return root;
}

/* Why requests wait, how they were answered, what is on disk, what failed; and a history that
 * begins with the server: it started at 88.0, now is 100.5. */
static void test_json_for_operators(void **state)
{
    static const char *const folders[] = {"tales", "fresh", "gone"}, *const unloaded[] = {"gone"};
    sp_error error = {.code = "truncated"};
    scene *s = make_scene();
    const json_t *part;
    json_t *root;

    (void)state;
    s->stats.waiting_slot = 1;
    s->stats.waiting_load = 2;
    s->stats.host_bytes = 10;
    s->stats.host_bytes_max = 40;
    s->codes[404] = 3;
    s->codes[503] = 4;
    s->metrics->traffic[0].prompt_tokens = 8;
    s->metrics->traffic[0].cached_tokens = 2;
    s->view.folders = folders;
    s->view.n_folders = 3;
    s->view.unloaded = unloaded;
    s->view.n_unloaded = 1;
    snprintf(error.text, sizeof error.text, "/srv/x/a.safetensors ends early");
    sp_metrics_load(s->metrics, "fresh", 0.5, &error, 90);
    root = json_of(s);
    part = json_object_get(root, "queue");
    assert_int_equal(integer_at(part, "for_slot"), 1);
    assert_int_equal(integer_at(part, "for_load"), 4); /* 2 are not the engine's yet */
    part = json_object_get(root, "responses");
    assert_int_equal(integer_at(part, "ok"), 7);
    assert_int_equal(integer_at(part, "turned_away"), 2);
    assert_int_equal(integer_at(part, "client_errors"), 3);
    assert_int_equal(integer_at(part, "server_errors"), 4);
    assert_int_equal(integer_at(json_object_get(root, "memory"), "host_cache_max"), 40);
    assert_close(json_number_value(json_object_get(json_object_get(root, "prefix"), "hit_rate")),
                 0.25, 1e-12);
    part = json_object_get(root, "folders");
    assert_int_equal(json_array_size(part), 2);
    assert_true(json_is_false(json_object_get(json_array_get(part, 0), "unloaded")));
    assert_true(json_is_true(json_object_get(json_array_get(part, 1), "unloaded")));
    part = json_array_get(json_object_get(root, "load_failures"), 0);
    assert_string_equal(json_string_value(json_object_get(part, "message")),
                        "a.safetensors ends early");
    assert_close(json_number_value(json_object_get(part, "seconds_ago")), 10.5, 1e-9);
    part = json_object_get(json_object_get(root, "history"), "tokens"); /* 41 .. 99 */
    assert_true(json_is_null(json_array_get(part, 88 - 41)));
    assert_true(json_is_real(json_array_get(part, 89 - 41)) ||
                json_is_integer(json_array_get(part, 89 - 41)));
    json_decref(root);
    free_scene(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_quantiles),          cmocka_unit_test(test_load_failures),
        cmocka_unit_test(test_json_for_operators), cmocka_unit_test(test_events),
        cmocka_unit_test(test_steps_and_rates),    cmocka_unit_test(test_bounded),
        cmocka_unit_test(test_router_metrics),     cmocka_unit_test(test_bad_bytes),
        cmocka_unit_test(test_promtool),           cmocka_unit_test(test_json),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
