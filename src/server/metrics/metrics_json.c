/*
 * metrics_json.c: what the status page shows, as one JSON object. The page computes nothing but
 * units, so what it shows can be compared with this.
 */
#include "base/hash.h"
#include "server/metrics/metrics.h"
#include "server/metrics/plain_text.h"

#include <string.h>

static void add_string(sp_text *out, const char *before, const char *name, const char *value)
{
    sp_text_format(out, "%s\"%s\": ", before, name);
    if (value)
        sp_text_json_string(out, value, strlen(value));
    else
        sp_text_add(out, "null");
}

static void add_double(sp_text *out, const char *before, const char *name, double value)
{
    sp_text_format(out, "%s\"%s\": ", before, name);
    sp_text_json_double(out, value);
}

static void add_count(sp_text *out, const char *before, const char *name, uint64_t value)
{
    sp_text_format(out, "%s\"%s\": %llu", before, name, (unsigned long long)value);
}

static void add_bool(sp_text *out, const char *before, const char *name, bool value)
{
    sp_text_format(out, "%s\"%s\": %s", before, name, value ? "true" : "false");
}

/* ---- parts --------------------------------------------------------------------------------- */

/* Requests by how they were answered; those of pages and probes count as well. */
static void add_responses(sp_text *out, const uint64_t *codes)
{
    uint64_t ok = 0, client = 0, server = 0;

    for (int code = 0; code < SP_HTTP_CODES; code++) {
        ok += code < 400 ? codes[code] : 0;
        client += code >= 400 && code < 500 && code != 429 ? codes[code] : 0;
        server += code >= 500 ? codes[code] : 0;
    }
    add_count(out, ", \"responses\": {", "ok", ok);
    add_count(out, ", ", "turned_away", codes[429]);
    add_count(out, ", ", "client_errors", client);
    add_count(out, ", ", "server_errors", server);
    sp_text_add(out, "}");
}

static void add_latency(sp_text *out, const sp_metrics *metrics)
{
    static const struct {
        const char *name;
        sp_metrics_histogram histogram;
    } rows[] = {{"first_token", SP_HISTOGRAM_FIRST_TOKEN},
                {"inter_token", SP_HISTOGRAM_INTER_TOKEN},
                {"queue", SP_HISTOGRAM_QUEUE}};

    sp_text_add(out, ", \"latency\": {");
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        sp_text_format(out, "%s\"%s\": {", i ? ", " : "", rows[i].name);
        add_count(out, "", "count", sp_metrics_count(metrics, rows[i].histogram));
        add_double(out, ", ", "mean", sp_metrics_mean(metrics, rows[i].histogram));
        add_double(out, ", ", "p50", sp_metrics_quantile(metrics, rows[i].histogram, 0.5));
        add_double(out, ", ", "p95", sp_metrics_quantile(metrics, rows[i].histogram, 0.95));
        sp_text_add(out, "}");
    }
    sp_text_add(out, "}");
}

static void add_memory(sp_text *out, const sp_engine_stats *stats)
{
    add_count(out, ", \"memory\": {", "weights", stats->weight_bytes);
    add_count(out, ", ", "slots", stats->pool_bytes);
    add_count(out, ", ", "kv", stats->kv_bytes);
    add_count(out, ", ", "scratch", stats->scratch_bytes);
    add_count(out, ", ", "draft_model", stats->draft_model_bytes);
    add_count(out, ", ", "states", stats->state_bytes);
    add_count(out, ", ", "host_cache", stats->host_bytes);
    add_count(out, ", ", "host_cache_max", stats->host_bytes_max);
    add_count(out, ", ", "host_cache_evictions", stats->host_evictions);
    sp_text_add(out, "}");
}

/* Of the prompts that began to run. */
static void add_prefix(sp_text *out, const sp_metrics *metrics)
{
    uint64_t prompt = 0, cached = 0;

    for (int32_t i = 0; i < metrics->n_traffic; i++) {
        prompt += metrics->traffic[i].prompt_tokens;
        cached += metrics->traffic[i].cached_tokens;
    }
    add_count(out, ", \"prefix\": {", "prompt_tokens", prompt);
    add_count(out, ", ", "cached_tokens", cached);
    add_double(out, ", ", "hit_rate", prompt > 0 ? (double)cached / (double)prompt : 0);
    sp_text_add(out, "}");
}

/* Those whose adapter is read for the first time are not the engine's yet, but they wait. */
static void add_load(sp_text *out, const sp_metrics_view *view)
{
    const sp_engine_stats *stats = view->stats;

    sp_text_format(
        out,
        ", \"queue\": {\"waiting\": %d, \"running\": %d, \"running_max\": %d, "
        "\"for_slot\": %d, \"for_load\": %d, \"for_pages\": %d, \"for_batch\": %d}"
        ", \"kv\": {\"pages\": %lld, \"used\": %lld, \"cached\": %lld, "
        "\"page_tokens\": %d}"
        ", \"states\": {\"states\": %d, \"used\": %d, \"snapshots\": %d, \"kept\": %d}",
        stats->waiting + view->counts->waiting_for_load, stats->running, stats->running_max,
        stats->waiting_slot, stats->waiting_load + view->counts->waiting_for_load,
        stats->waiting_pages, stats->waiting_batch, (long long)stats->kv_pages,
        (long long)stats->kv_pages_used, (long long)stats->kv_pages_cached, stats->page_tokens,
        stats->states, stats->states_used, stats->state_snapshots, stats->state_snapshots_kept);
}

static void add_rates(sp_text *out, const sp_metrics *metrics, double now_s)
{
    sp_metrics_rates rates = sp_metrics_rates_now(metrics, now_s);

    sp_text_add(out, ", \"rates\": {");
    add_double(out, "", "tokens_per_second", rates.tokens_per_s);
    add_double(out, ", ", "steps_per_second", rates.steps_per_s);
    add_double(out, ", ", "step_seconds_mean", rates.step_seconds_mean);
    add_double(out, ", ", "step_seconds_max", rates.step_seconds_max);
    add_double(out, ", ", "load_pause_seconds", rates.pause_seconds);
    sp_text_format(out, ", \"over_seconds\": %d}", SP_METRICS_RATE_SECONDS);
}

static const sp_metrics_second *find_second(const sp_metrics *metrics, int64_t second)
{
    const sp_metrics_second *at =
        second >= 0 ? &metrics->seconds[second % SP_METRICS_SECONDS] : NULL;

    return at && at->second == second ? at : NULL;
}

/* The whole seconds of the last minute, oldest first; 0 where nothing happened, null where there
 * was no server yet. */
static void add_history(sp_text *out, const sp_metrics *metrics, double now_s, double uptime_s)
{
    static const char *const names[] = {"tokens", "step_seconds_max", "load_pause_seconds"};

    sp_text_add(out, ", \"history\": {");
    for (int which = 0; which < 3; which++) {
        sp_text_format(out, "%s\"%s\": [", which ? ", " : "", names[which]);
        for (int back = SP_METRICS_SECONDS - 1; back > 0; back--) {
            const sp_metrics_second *at = find_second(metrics, (int64_t)now_s - back);
            double value = 0;

            if (at && which == 0)
                value = (double)at->tokens;
            else if (at)
                value = which == 1 ? at->step_seconds_max : at->pause_seconds;
            sp_text_add(out, back < SP_METRICS_SECONDS - 1 ? ", " : "");
            if ((int64_t)now_s - back <= (int64_t)(now_s - uptime_s))
                sp_text_add(out, "null");
            else
                sp_text_json_double(out, value);
        }
        sp_text_add(out, "]");
    }
    sp_text_add(out, "}");
}

static void add_totals(sp_text *out, const sp_metrics_view *view)
{
    const sp_engine_stats *stats = view->stats;
    const sp_driver_counts *counts = view->counts;

    add_count(out, ", \"totals\": {", "generated_tokens", stats->tokens);
    add_count(out, ", ", "steps", stats->steps);
    add_count(out, ", ", "prefill_rows", stats->prefill_rows);
    add_count(out, ", ", "prefix_tokens", stats->prefix_tokens);
    add_count(out, ", ", "drafted_tokens", stats->drafted_tokens);
    add_count(out, ", ", "accepted_tokens", stats->accepted_tokens);
    add_count(out, ", ", "preemptions", stats->preemptions);
    add_count(out, ", ", "slot_copies", stats->adapter_copies);
    add_double(out, ", ", "load_pause_seconds", stats->load_seconds);
    add_count(out, ", ", "finished", counts->finished_stop + counts->finished_length);
    add_count(out, ", ", "cancelled", counts->cancelled);
    add_count(out, ", ", "failed", counts->failed);
    add_count(out, ", ", "refused", counts->refused);
    sp_text_add(out, "}");
}

/* Names of one content share a slot: the first of them represents it, the others are counted. */
static void add_slot(sp_text *out, const sp_metrics_view *view, int32_t slot)
{
    const sp_listed_adapter *first = NULL;
    int32_t running = 0, n = 0;

    for (size_t i = 0; i < view->n_adapters; i++) {
        const sp_listed_adapter *adapter = &view->adapters[i];

        if (adapter->slot != slot)
            continue;
        if (!first || (first->state == SP_STAGE_VERSION_DRAINING && first->state != adapter->state))
            first = adapter;
        running += adapter->running;
        n++;
    }
    sp_text_format(out, "{\"slot\": %d", slot);
    add_string(out, ", ", "adapter", first ? first->name : NULL);
    add_string(out, ", ", "state", first ? sp_stage_version_state_name(first->state) : "empty");
    sp_text_format(out, ", \"names\": %d, \"running\": %d}", n, running);
}

static void add_slots(sp_text *out, const sp_metrics_view *view)
{
    sp_text_add(out, ", \"slots\": [");
    for (int32_t slot = 0; slot < view->stats->slots; slot++) {
        sp_text_add(out, slot ? ", " : "");
        add_slot(out, view, slot);
    }
    sp_text_add(out, "]");
}

static void add_traffic(sp_text *out, const sp_metrics *metrics, const char *name)
{
    const sp_traffic *traffic = sp_metrics_traffic(metrics, name);

    add_count(out, ", ", "requests", traffic ? traffic->requests : 0);
    add_count(out, ", ", "generated_tokens", traffic ? traffic->new_tokens : 0);
}

static void add_adapter(sp_text *out, const sp_metrics_view *view, const sp_listed_adapter *adapter)
{
    char digest[2 * SP_DIGEST_BYTES + 1];

    sp_hex(adapter->digest.bytes, SP_DIGEST_BYTES, digest);
    add_string(out, "{", "name", adapter->name);
    add_string(out, ", ", "state", sp_stage_version_state_name(adapter->state));
    sp_text_format(out, ", \"slot\": %d, \"rank\": %d", adapter->slot, adapter->rank);
    add_bool(out, ", ", "pinned", adapter->pinned);
    add_bool(out, ", ", "active", adapter->active);
    sp_text_format(out, ", \"running\": %d, \"waiting\": %d", adapter->running, adapter->waiting);
    add_count(out, ", ", "generation", adapter->generation);
    add_string(out, ", ", "digest", digest);
    add_traffic(out, view->metrics, adapter->name);
    sp_text_add(out, "}");
}

static void add_adapters(sp_text *out, const sp_metrics_view *view)
{
    sp_text_add(out, ", \"adapters\": [");
    for (size_t i = 0; i < view->n_adapters; i++) {
        sp_text_add(out, i ? ", " : "");
        add_adapter(out, view, &view->adapters[i]);
    }
    sp_text_add(out, "], \"refused\": [");
    for (size_t i = 0; i < view->refusals->n; i++) {
        const sp_server_refusal *refusal = &view->refusals->items[i];

        add_string(out, i ? ", {" : "{", "name", refusal->name);
        add_string(out, ", ", "code",
                   refusal->error.code ? refusal->error.code
                                       : sp_status_name(refusal->error.status));
        sp_text_add(out, ", \"message\": ");
        sp_text_json_without_paths(out, refusal->error.text);
        sp_text_add(out, "}");
    }
    sp_text_add(out, "]");
}

/* Loads that failed, newest first. */
static void add_load_failures(sp_text *out, const sp_metrics_view *view)
{
    const sp_metrics *metrics = view->metrics;

    sp_text_add(out, ", \"load_failures\": [");
    for (int32_t i = metrics->n_failures - 1; i >= 0; i--) {
        const sp_load_failure *failure = &metrics->failures[i];

        add_string(out, i < metrics->n_failures - 1 ? ", {" : "{", "name", failure->name);
        add_string(out, ", ", "code", failure->code);
        sp_text_add(out, ", \"message\": ");
        sp_text_json_without_paths(out, failure->text);
        add_double(out, ", ", "seconds_ago", view->now_s - failure->at_s);
        sp_text_add(out, "}");
    }
    sp_text_add(out, "]");
}

static bool is_among(const char *const *names, size_t n, const char *name)
{
    for (size_t i = 0; i < n; i++)
        if (strcmp(names[i], name) == 0)
            return true;
    return false;
}

/* What requests may name and nothing has loaded yet, or what was unloaded. */
static void add_folders(sp_text *out, const sp_metrics_view *view)
{
    bool first = true;

    sp_text_add(out, ", \"folders\": [");
    for (size_t i = 0; i < view->n_folders; i++) {
        bool loaded = false;

        for (size_t a = 0; a < view->n_adapters && !loaded; a++)
            loaded = strcmp(view->adapters[a].name, view->folders[i]) == 0;
        if (loaded)
            continue;
        add_string(out, first ? "{" : ", {", "name", view->folders[i]);
        add_bool(out, ", ", "unloaded",
                 is_among(view->unloaded, view->n_unloaded, view->folders[i]));
        add_traffic(out, view->metrics, view->folders[i]);
        sp_text_add(out, "}");
        first = false;
    }
    sp_text_add(out, "]");
}

/* What is in the queue and the batch for no adapter. */
static void add_base_load(sp_text *out, const sp_metrics_view *view)
{
    int32_t running = view->stats->running, waiting = view->stats->waiting;

    for (size_t i = 0; i < view->n_adapters; i++) {
        running -= view->adapters[i].running;
        waiting -= view->adapters[i].waiting;
    }
    sp_text_format(out, ", \"running\": %d, \"waiting\": %d", running, waiting);
}

void sp_metrics_json(const sp_metrics_view *view, sp_text *out)
{
    add_string(out, "{", "version", view->version);
    add_string(out, ", ", "cpu_isa", view->cpu_isa);
    add_double(out, ", ", "uptime_seconds", view->uptime_s);
    add_bool(out, ", ", "draining", view->draining);
    add_string(out, ", \"base\": {", "name", view->base_name);
    add_base_load(out, view);
    add_traffic(out, view->metrics, view->base_name);
    sp_text_add(out, "}");
    add_load(out, view);
    add_rates(out, view->metrics, view->now_s);
    add_history(out, view->metrics, view->now_s, view->uptime_s);
    add_totals(out, view);
    add_responses(out, view->http_codes);
    add_latency(out, view->metrics);
    add_memory(out, view->stats);
    add_prefix(out, view->metrics);
    add_slots(out, view);
    add_adapters(out, view);
    add_load_failures(out, view);
    add_folders(out, view);
    sp_text_add(out, "}\n");
}
