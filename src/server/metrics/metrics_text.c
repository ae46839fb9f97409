/*
 * metrics_text.c: the text format of Prometheus, version 0.0.4. Everything that is printed once
 * per adapter is bounded by what is loaded or by SP_TRAFFIC_MAX.
 */
#include "server/metrics/metrics.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* ---- the format ---------------------------------------------------------------------------- */

static void add_family(sp_text *out, const char *name, const char *type, const char *help)
{
    sp_text_format(out, "# HELP %s %s\n# TYPE %s %s\n", name, help, name, type);
}

/* Backslash, quote and line feed are escaped; what is no UTF-8 becomes U+FFFD. */
static void add_escaped(sp_text *out, const char *value)
{
    size_t left = strlen(value);

    while (left > 0) {
        size_t n = sp_utf8_sequence_bytes(value, left);

        if (*value == '\\' || *value == '"')
            sp_text_add(out, "\\");
        if (n == 0)
            sp_text_add(out, "\xef\xbf\xbd");
        else if (*value == '\n')
            sp_text_add(out, "\\n");
        else
            sp_text_add_bytes(out, value, n);
        n = n ? n : 1;
        value += n;
        left -= n;
    }
}

static void add_label(sp_text *out, const char *before, const char *name, const char *value)
{
    sp_text_format(out, "%s%s=\"", before, name);
    add_escaped(out, value);
    sp_text_add(out, "\"");
}

static void add_value(sp_text *out, double value)
{
    if (value >= 0 && value < 1e15 && floor(value) >= value)
        sp_text_format(out, " %.0f\n", value);
    else
        sp_text_format(out, " %.9g\n", value);
}

static void add_plain(sp_text *out, const char *name, const char *type, const char *help,
                      double value)
{
    add_family(out, name, type, help);
    sp_text_add(out, name);
    add_value(out, value);
}

static void add_counter(sp_text *out, const char *name, const char *help, uint64_t value)
{
    add_plain(out, name, "counter", help, (double)value);
}

/* One series of a family with a single label. */
static void add_labelled(sp_text *out, const char *name, const char *label, const char *value,
                         double number)
{
    sp_text_add(out, name);
    add_label(out, "{", label, value);
    sp_text_add(out, "}");
    add_value(out, number);
}

static void add_histogram(sp_text *out, const sp_metrics *metrics, sp_metrics_histogram which,
                          const char *name, const char *help)
{
    const sp_histogram *histogram = &metrics->histograms[which];
    uint64_t n = 0;
    int32_t n_bounds;
    const double *bounds = sp_metrics_bounds(which, &n_bounds);

    add_family(out, name, "histogram", help);
    for (int32_t i = 0; i < n_bounds; i++) {
        n += histogram->counts[i];
        sp_text_format(out, "%s_bucket{le=\"%g\"} %llu\n", name, bounds[i], (unsigned long long)n);
    }
    n += histogram->counts[SP_HISTOGRAM_BOUNDS_MAX];
    sp_text_format(out, "%s_bucket{le=\"+Inf\"} %llu\n%s_sum %.9g\n%s_count %llu\n", name,
                   (unsigned long long)n, name, histogram->sum, name, (unsigned long long)n);
}

/* ---- what routers read ----------------------------------------------------------------------- */

/* The labels that vLLM gives to nearly everything. */
static void add_engine(sp_text *out, const sp_metrics_view *view, const char *name)
{
    sp_text_add(out, name);
    add_label(out, "{", "model_name", view->base_name);
    sp_text_add(out, ",engine=\"0\"");
}

static void add_engine_gauge(sp_text *out, const sp_metrics_view *view, const char *name,
                             const char *help, double value)
{
    add_family(out, name, "gauge", help);
    add_engine(out, view, name);
    sp_text_add(out, "}");
    add_value(out, value);
}

static void add_cache_config(sp_text *out, const sp_metrics_view *view)
{
    add_family(out, "vllm:cache_config_info", "gauge", "The KV cache: tokens of a page, pages.");
    sp_text_add(out, "vllm:cache_config_info");
    add_label(out, "{", "model_name", view->base_name);
    sp_text_format(out, ",engine=\"0\",block_size=\"%d\",num_gpu_blocks=\"%lld\"} 1\n",
                   view->stats->page_tokens, (long long)view->stats->kv_pages);
}

/* Whether a version before this one has put the name into the list: one may still be draining. */
static bool is_listed(const sp_metrics_view *view, size_t index, bool running)
{
    const sp_listed_adapter *adapter = &view->adapters[index];

    for (size_t i = 0; i < index; i++) {
        const sp_listed_adapter *other = &view->adapters[i];

        if ((running ? other->running : other->waiting) > 0 &&
            strcmp(other->name, adapter->name) == 0)
            return true;
    }
    return false;
}

/* A name that holds a comma would be read as two and is left out; lora_adapter_loaded has it. */
static const char *add_name(sp_text *out, const char *before, const char *name)
{
    if (strchr(name, ','))
        return before;
    sp_text_add(out, before);
    add_escaped(out, name);
    return ",";
}

/* Names of adapters with requests, with commas between them. */
static void add_names(sp_text *out, const sp_metrics_view *view, bool running)
{
    const char *before = "";

    for (size_t i = 0; i < view->n_adapters; i++) {
        const sp_listed_adapter *adapter = &view->adapters[i];

        if ((running ? adapter->running : adapter->waiting) > 0 && !is_listed(view, i, running))
            before = add_name(out, before, adapter->name);
    }
    /* The engine has no version of these yet, so they are not among the others. */
    for (size_t i = 0; i < view->n_awaited && !running; i++)
        before = add_name(out, before, view->awaited[i]);
}

static void add_lora_requests(sp_text *out, const sp_metrics_view *view)
{
    add_family(out, "vllm:lora_requests_info", "gauge",
               "Adapters with running and with waiting requests; the value is the time of this "
               "answer.");
    sp_text_format(out, "vllm:lora_requests_info{max_lora=\"%d\",running_lora_adapters=\"",
                   view->stats->slots);
    add_names(out, view, true);
    sp_text_add(out, "\",waiting_lora_adapters=\"");
    add_names(out, view, false);
    sp_text_format(out, "\"} %.3f\n", view->now_unix_s);
}

/* A version whose name was removed, or refers to another by now, can serve no new request. */
static bool is_loaded(const sp_listed_adapter *adapter, bool *out_in_slot)
{
    *out_in_slot = adapter->state == SP_STAGE_VERSION_READY;
    return *out_in_slot || (adapter->state != SP_STAGE_VERSION_DRAINING && adapter->host_bytes > 0);
}

static void add_residency(sp_text *out, const sp_metrics_view *view)
{
    int32_t n_slots = 0, n_host = 0;
    bool in_slot;

    add_family(out, "vllm:lora_adapter_loaded", "gauge",
               "1 for each adapter in a slot (level gpu) or in the host cache only (level cpu).");
    for (size_t i = 0; i < view->n_adapters; i++) {
        const sp_listed_adapter *adapter = &view->adapters[i];

        if (!is_loaded(adapter, &in_slot))
            continue;
        n_slots += in_slot;
        n_host += adapter->host_bytes > 0;
        add_engine(out, view, "vllm:lora_adapter_loaded");
        add_label(out, ",", "adapter_name", adapter->name);
        sp_text_format(out, ",level=\"%s\",pinned=\"%s\",rank=\"%d\"} 1\n", in_slot ? "gpu" : "cpu",
                       adapter->pinned ? "true" : "false", adapter->rank);
    }
    add_engine_gauge(out, view, "vllm:num_gpu_loaded_lora_adapters", "Adapters in slots.", n_slots);
    add_engine_gauge(out, view, "vllm:num_cpu_loaded_lora_adapters",
                     "Adapters in the host cache, those in slots included.", n_host);
    add_engine_gauge(out, view, "vllm:max_gpu_lora_adapters", "Slots for adapters.",
                     view->stats->slots);
}

static void add_router_metrics(sp_text *out, const sp_metrics_view *view)
{
    const sp_engine_stats *stats = view->stats;

    add_engine_gauge(out, view, "vllm:num_requests_waiting",
                     "Requests that wait to be run, for KV pages or an adapter.",
                     stats->waiting + view->counts->waiting_for_load);
    add_engine_gauge(out, view, "vllm:num_requests_running", "Requests in the batch.",
                     stats->running);
    add_engine_gauge(out, view, "vllm:kv_cache_usage_perc",
                     "Share of the KV pages that requests hold, 0 to 1.",
                     stats->kv_pages ? (double)stats->kv_pages_used / (double)stats->kv_pages : 0);
    add_cache_config(out, view);
    add_lora_requests(out, view);
    add_residency(out, view);
}

/* ---- our own --------------------------------------------------------------------------------- */

static void add_totals(sp_text *out, const sp_engine_stats *stats)
{
    add_counter(out, "sidepath_steps_total", "Steps of the batch.", stats->steps);
    add_family(out, "sidepath_step_rows_total", "counter", "Rows that steps have computed.");
    add_labelled(out, "sidepath_step_rows_total", "kind", "prefill", (double)stats->prefill_rows);
    add_labelled(out, "sidepath_step_rows_total", "kind", "decode", (double)stats->decode_rows);
    add_counter(out, "sidepath_generated_tokens_total", "New tokens.", stats->tokens);
    add_counter(out, "sidepath_prefix_cache_tokens_total",
                "Tokens that the prefix cache has saved from being computed.",
                stats->prefix_tokens);
    add_counter(out, "sidepath_drafted_tokens_total", "Draft tokens that steps have verified.",
                stats->drafted_tokens);
    add_counter(out, "sidepath_accepted_tokens_total", "Drafts that were the next token.",
                stats->accepted_tokens);
    add_counter(out, "sidepath_verify_steps_total",
                "Steps of a request that had drafts; those of several in one step count each.",
                stats->verify_steps);
    add_counter(out, "sidepath_draft_model_tokens_total", "Drafts of the draft model.",
                stats->model_drafted_tokens);
    add_counter(out, "sidepath_draft_model_accepted_tokens_total",
                "Drafts of the draft model that were the next token.",
                stats->model_accepted_tokens);
    add_plain(out, "sidepath_draft_model_seconds_total", "counter",
              "Time that the draft model took.", stats->draft_seconds);
    add_counter(out, "sidepath_preemptions_total",
                "Requests that gave their KV pages back and were computed again.",
                stats->preemptions);
    add_counter(out, "sidepath_rotations_total",
                "Slots emptied by preemption, for adapters that had waited too long.",
                stats->rotations);
    add_plain(out, "sidepath_delta_seconds_total", "counter",
              "Time in deltas that ran apart from the base's GEMMs.", stats->delta_seconds);
    add_plain(out, "sidepath_load_pauses_seconds_total", "counter",
              "Time that steps were held up by adapters on their way in.", stats->load_seconds);
}

static void add_adapter_totals(sp_text *out, const sp_metrics_view *view)
{
    const sp_engine_stats *stats = view->stats;

    add_counter(out, "sidepath_adapter_reads_total", "Adapters read and packed.",
                stats->adapter_reads);
    add_counter(out, "sidepath_adapter_slot_copies_total", "Adapters copied into a slot.",
                stats->adapter_copies);
    add_counter(out, "sidepath_host_cache_evictions_total",
                "Packed adapters dropped from the host cache for want of room.",
                stats->host_evictions);
    add_plain(out, "sidepath_host_cache_bytes", "gauge", "Packed adapters in the host cache.",
              (double)stats->host_bytes);
    add_family(out, "sidepath_adapter_loads_total", "counter", "Loads that were asked for.");
    add_labelled(out, "sidepath_adapter_loads_total", "outcome", "ok",
                 (double)(view->counts->loads - view->counts->load_failures));
    add_labelled(out, "sidepath_adapter_loads_total", "outcome", "failed",
                 (double)view->counts->load_failures);
    add_plain(out, "sidepath_requests_waiting_for_load", "gauge",
              "Requests whose adapter is read for the first time.",
              (double)view->counts->waiting_for_load);
    add_plain(out, "sidepath_host_cache_bytes_max", "gauge", "What the host cache may hold.",
              (double)stats->host_bytes_max);
    add_family(out, "sidepath_requests_waiting", "gauge",
               "Requests that wait, by what for, in the last step that could take one in.");
    add_labelled(out, "sidepath_requests_waiting", "reason", "slot", stats->waiting_slot);
    add_labelled(out, "sidepath_requests_waiting", "reason", "load", stats->waiting_load);
    add_labelled(out, "sidepath_requests_waiting", "reason", "pages", stats->waiting_pages);
    add_labelled(out, "sidepath_requests_waiting", "reason", "batch", stats->waiting_batch);
    add_plain(out, "sidepath_step_seconds_max_while_loading", "gauge",
              "The longest step beside a load.", view->counts->step_seconds_max_while_loading);
    add_counter(out, "sidepath_adapter_unloads_total", "Adapters unloaded by name.",
                view->counts->unloads);
    add_plain(out, "sidepath_adapters_refused_at_start", "gauge",
              "Adapters of the start that the server runs without.", (double)view->refusals->n);
}

static void add_outcomes(sp_text *out, const sp_driver_counts *counts)
{
    const char *name = "sidepath_requests_total";

    add_family(out, name, "counter", "Requests that have ended, by how.");
    add_labelled(out, name, "outcome", "stop", (double)counts->finished_stop);
    add_labelled(out, name, "outcome", "length", (double)counts->finished_length);
    add_labelled(out, name, "outcome", "cancelled", (double)counts->cancelled);
    add_labelled(out, name, "outcome", "failed", (double)counts->failed);
    add_labelled(out, name, "outcome", "refused", (double)counts->refused);
    add_labelled(out, name, "outcome", "slow_reader", (double)counts->slow_readers);
}

static void add_states(sp_text *out, const sp_engine_stats *stats)
{
    const char *name = "sidepath_states";

    add_family(out, name, "gauge", "Recurrent states for requests that run.");
    add_labelled(out, name, "state", "used", (double)stats->states_used);
    add_labelled(out, name, "state", "free", (double)(stats->states - stats->states_used));
    name = "sidepath_state_snapshots";
    add_family(out, name, "gauge", "Recurrent states that the prefix cache keeps.");
    add_labelled(out, name, "state", "cached", (double)stats->state_snapshots_kept);
    add_labelled(out, name, "state", "free",
                 (double)(stats->state_snapshots - stats->state_snapshots_kept));
    add_counter(out, "sidepath_state_snapshots_written_total",
                "Recurrent states that were kept for the prefix cache.",
                stats->state_snapshots_written);
}

static void add_memory(sp_text *out, const sp_engine_stats *stats)
{
    const char *name = "sidepath_kv_pages";

    add_family(out, name, "gauge", "Pages of the KV cache.");
    add_labelled(out, name, "state", "used", (double)stats->kv_pages_used);
    add_labelled(out, name, "state", "cached", (double)stats->kv_pages_cached);
    add_labelled(out, name, "state", "free",
                 (double)(stats->kv_pages - stats->kv_pages_used - stats->kv_pages_cached));
    add_states(out, stats);
    name = "sidepath_memory_bytes";
    add_family(out, name, "gauge", "Memory by what it is for; weights are mapped from files.");
    add_labelled(out, name, "kind", "weights", (double)stats->weight_bytes);
    add_labelled(out, name, "kind", "slots", (double)stats->pool_bytes);
    add_labelled(out, name, "kind", "kv", (double)stats->kv_bytes);
    add_labelled(out, name, "kind", "scratch", (double)stats->scratch_bytes);
    add_labelled(out, name, "kind", "draft_model", (double)stats->draft_model_bytes);
    add_labelled(out, name, "kind", "states", (double)stats->state_bytes);
}

typedef uint64_t (*traffic_fn)(const sp_traffic *traffic);

static uint64_t requests_of(const sp_traffic *traffic)
{
    return traffic->requests;
}

static uint64_t prompt_tokens_of(const sp_traffic *traffic)
{
    return traffic->prompt_tokens;
}

static uint64_t cached_tokens_of(const sp_traffic *traffic)
{
    return traffic->cached_tokens;
}

static uint64_t new_tokens_of(const sp_traffic *traffic)
{
    return traffic->new_tokens;
}

static uint64_t non_finite_of(const sp_traffic *traffic)
{
    return traffic->non_finite;
}

static void add_traffic(sp_text *out, const sp_metrics *metrics)
{
    static const struct {
        const char *name, *help;
        traffic_fn value;
    } families[] = {
        {"sidepath_adapter_requests_total", "Requests that began to answer.", requests_of},
        {"sidepath_adapter_prompt_tokens_total", "Tokens of their prompts.", prompt_tokens_of},
        {"sidepath_adapter_cached_tokens_total", "Those that the prefix cache had.",
         cached_tokens_of},
        {"sidepath_adapter_generated_tokens_total", "Their new tokens.", new_tokens_of},
        {"sidepath_adapter_non_finite_total", "Requests that logits which are not finite ended.",
         non_finite_of},
    };

    for (size_t f = 0; f < sizeof families / sizeof families[0]; f++) {
        add_family(out, families[f].name, "counter", families[f].help);
        for (int32_t i = 0; i < metrics->n_traffic; i++)
            add_labelled(out, families[f].name, "adapter", metrics->traffic[i].name,
                         (double)families[f].value(&metrics->traffic[i]));
    }
}

static void add_http(sp_text *out, const uint64_t *codes)
{
    add_family(out, "sidepath_http_responses_total", "counter", "Answers by status.");
    for (int code = 100; code < SP_HTTP_CODES; code++) {
        char text[12];

        if (codes[code] == 0 && code != 200)
            continue;
        snprintf(text, sizeof text, "%d", code);
        add_labelled(out, "sidepath_http_responses_total", "code", text, (double)codes[code]);
    }
}

static void add_connections(sp_text *out, const sp_http_counts *http)
{
    const char *name = "sidepath_connections";

    add_family(out, name, "gauge", "Open connections.");
    add_labelled(out, name, "state", "idle", http->idle);
    add_labelled(out, name, "state", "busy", http->open - http->idle);
    add_plain(out, "sidepath_connections_max", "gauge", "Connections that there may be.",
              http->connections_max);
    name = "sidepath_connections_ended_total";
    add_family(out, name, "counter", "Connections that the server has ended, by reason.");
    add_labelled(out, name, "reason", "shed", (double)http->shed);
    add_labelled(out, name, "reason", "timeout", (double)http->timed_out);
    add_labelled(out, name, "reason", "turned_away", (double)http->turned_away);
    add_counter(out, "sidepath_connections_surplus_total",
                "Connections above the limit, for what has to answer always.", http->surplus);
}

static void add_client_bytes(sp_text *out, const sp_front_counts *front)
{
    const char *name = "sidepath_client_bytes";

    add_family(out, name, "gauge", "Memory that clients fill, by what with.");
    add_labelled(out, name, "kind", "bodies", (double)front->client_bytes[SP_BUDGET_BODIES]);
    add_labelled(out, name, "kind", "requests", (double)front->client_bytes[SP_BUDGET_REQUESTS]);
    add_labelled(out, name, "kind", "answers", (double)front->client_bytes[SP_BUDGET_ANSWERS]);
    add_plain(out, "sidepath_client_bytes_max", "gauge", "Memory that clients may fill.",
              (double)front->client_bytes_max);
    add_counter(out, "sidepath_client_bytes_refused_total",
                "Times that a client wanted more than was left.", front->client_bytes_refused);
}

static void add_front(sp_text *out, const sp_front_counts *front)
{
    add_plain(out, "sidepath_weights_changed", "gauge",
              "1 once a file of the weights is not what it was when it was mapped.",
              front->weights_changed);
    add_connections(out, &front->http);
    add_client_bytes(out, front);
    add_counter(out, "sidepath_log_lines_dropped_total",
                "Lines of the log that were dropped because nobody read it.",
                front->log_lines_dropped);
    add_family(out, "sidepath_key_reloads_total", "counter", "Key files read again, by outcome.");
    add_labelled(out, "sidepath_key_reloads_total", "outcome", "ok", (double)front->key_reloads);
    add_labelled(out, "sidepath_key_reloads_total", "outcome", "failed",
                 (double)front->key_reload_failures);
}

typedef struct peer_family {
    const char *name, *type, *help;
    size_t offset; /* of a number in sp_listed_peer */
} peer_family;

static const peer_family peer_families[] = {
    {"sidepath_peer_up", "gauge", "1 while the peer answered when it was last asked for its names.",
     offsetof(sp_listed_peer, reached)},
    {"sidepath_peer_adapters", "gauge", "Adapters that the peer had when it last answered.",
     offsetof(sp_listed_peer, n_adapters)},
    {"sidepath_peer_manifests_total", "counter", "Adapters that the peer has described.",
     offsetof(sp_listed_peer, manifests)},
    {"sidepath_peer_failures_total", "counter", "Calls to the peer that failed.",
     offsetof(sp_listed_peer, failures)},
    {"sidepath_peer_bytes_total", "counter", "Bytes of adapters that came from the peer.",
     offsetof(sp_listed_peer, bytes)},
    {"sidepath_peer_images_taken_total", "counter", "Packed images of the peer that were taken.",
     offsetof(sp_listed_peer, images)},
    {"sidepath_peer_images_passed_over_total", "counter",
     "Packed images that the peer offered in vain: not trusted, or of another layout.",
     offsetof(sp_listed_peer, images_passed)},
};

/* Nothing without peers. */
static void add_peers(sp_text *out, const sp_metrics_view *view)
{
    for (size_t f = 0; view->n_peers > 0 && f < sizeof peer_families / sizeof *peer_families; f++) {
        const peer_family *family = &peer_families[f];

        add_family(out, family->name, family->type, family->help);
        for (size_t i = 0; i < view->n_peers; i++) {
            const char *peer = (const char *)&view->peers[i];
            uint64_t value;

            memcpy(&value, peer + family->offset, sizeof value);
            add_labelled(out, family->name, "peer", view->peers[i].address, (double)value);
        }
    }
}

static void add_histograms(sp_text *out, const sp_metrics *metrics)
{
    add_histogram(out, metrics, SP_HISTOGRAM_QUEUE, "sidepath_queue_seconds",
                  "From a request's arrival to its first rows in a step.");
    add_histogram(out, metrics, SP_HISTOGRAM_FIRST_TOKEN, "sidepath_time_to_first_token_seconds",
                  "From a request's arrival to its first token.");
    add_histogram(out, metrics, SP_HISTOGRAM_INTER_TOKEN, "sidepath_inter_token_seconds",
                  "Between two tokens of one request.");
    add_histogram(out, metrics, SP_HISTOGRAM_REQUEST, "sidepath_request_seconds",
                  "From a request's arrival to its last token.");
    add_histogram(out, metrics, SP_HISTOGRAM_STEP, "sidepath_step_seconds",
                  "One step of the batch.");
    add_histogram(out, metrics, SP_HISTOGRAM_LOAD_PAUSE, "sidepath_load_pause_seconds",
                  "By which a step was later for an adapter on its way in, if at all.");
    add_histogram(out, metrics, SP_HISTOGRAM_ADAPTER_LOAD, "sidepath_adapter_load_seconds",
                  "From the wish to load an adapter to its outcome.");
}

void sp_metrics_text(const sp_metrics_view *view, sp_text *out)
{
    add_router_metrics(out, view);
    add_family(out, "sidepath_build_info", "gauge", "The version and the level of instructions.");
    sp_text_add(out, "sidepath_build_info");
    add_label(out, "{", "version", view->version);
    add_label(out, ",", "cpu_isa", view->cpu_isa);
    sp_text_add(out, "} 1\n");
    add_plain(out, "sidepath_uptime_seconds", "gauge", "Since the server began.", view->uptime_s);
    add_totals(out, view->stats);
    add_adapter_totals(out, view);
    add_outcomes(out, view->counts);
    add_memory(out, view->stats);
    add_traffic(out, view->metrics);
    add_http(out, view->http_codes);
    add_front(out, view->front);
    add_peers(out, view);
    add_histograms(out, view->metrics);
}
