/*
 * metrics.c: counting. Everything here runs on the engine's thread, between and inside steps.
 */
#include "server/metrics/metrics.h"

#include <string.h>

/* Below this a step has not waited for a load: looking whether there is one takes as long. */
#define PAUSE_SECONDS_MIN 0.0001
#define OTHER             ":other"

/* ---- histograms ---------------------------------------------------------------------------- */

static const struct {
    int32_t n;
    double at[SP_HISTOGRAM_BOUNDS_MAX];
} bounds[SP_HISTOGRAMS] = {
    [SP_HISTOGRAM_QUEUE] = {12, {.001, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 10, 60}},
    [SP_HISTOGRAM_FIRST_TOKEN] = {13, {.001, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 60}},
    [SP_HISTOGRAM_INTER_TOKEN] = {12,
                                  {.001, .0025, .005, .01, .025, .05, .075, .1, .15, .25, .5, 1}},
    [SP_HISTOGRAM_REQUEST] = {12, {.05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 120, 600}},
    [SP_HISTOGRAM_STEP] = {12, {.0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5}},
    [SP_HISTOGRAM_LOAD_PAUSE] = {9, {.0005, .001, .0025, .005, .01, .025, .05, .1, .5}},
    [SP_HISTOGRAM_ADAPTER_LOAD] = {12, {.005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 60}},
};

const double *sp_metrics_bounds(sp_metrics_histogram histogram, int32_t *out_n)
{
    *out_n = bounds[histogram].n;
    return bounds[histogram].at;
}

static void observe(sp_metrics *metrics, sp_metrics_histogram which, double seconds)
{
    sp_histogram *histogram = &metrics->histograms[which];
    int32_t i = 0;

    while (i < bounds[which].n && seconds > bounds[which].at[i])
        i++;
    histogram->counts[i == bounds[which].n ? SP_HISTOGRAM_BOUNDS_MAX : i]++;
    histogram->sum += seconds;
}

uint64_t sp_metrics_count(const sp_metrics *metrics, sp_metrics_histogram which)
{
    uint64_t n = 0;

    for (int32_t i = 0; i <= SP_HISTOGRAM_BOUNDS_MAX; i++)
        n += metrics->histograms[which].counts[i];
    return n;
}

double sp_metrics_mean(const sp_metrics *metrics, sp_metrics_histogram which)
{
    uint64_t n = sp_metrics_count(metrics, which);

    return n > 0 ? metrics->histograms[which].sum / (double)n : 0;
}

/* As Prometheus works it out; beyond the last bound nothing is known but that bound. */
double sp_metrics_quantile(const sp_metrics *metrics, sp_metrics_histogram which, double share)
{
    const uint64_t *counts = metrics->histograms[which].counts;
    double rank = share * (double)sp_metrics_count(metrics, which);
    double before = 0;

    if (rank <= 0)
        return 0;
    for (int32_t i = 0; i < bounds[which].n; i++) {
        double low = i > 0 ? bounds[which].at[i - 1] : 0;

        if (before + (double)counts[i] >= rank)
            return low + (bounds[which].at[i] - low) * (rank - before) / (double)counts[i];
        before += (double)counts[i];
    }
    return bounds[which].at[bounds[which].n - 1];
}

/* ---- texts ---------------------------------------------------------------------------------- */

static void copy_text(char *out, size_t room, const char *text)
{
    size_t bytes = strlen(text);

    if (bytes >= room)
        bytes = sp_utf8_complete_bytes(text, room - 1);
    memcpy(out, text, bytes);
    out[bytes] = '\0';
}

/* ---- traffic ------------------------------------------------------------------------------- */

static int32_t find_traffic(const sp_metrics *metrics, const char *name)
{
    for (int32_t i = 0; i < metrics->n_traffic; i++)
        if (strcmp(metrics->traffic[i].name, name) == 0)
            return i;
    return -1;
}

/* The name's own place, a new one, or that of all others. */
static sp_traffic *traffic_of(sp_metrics *metrics, const char *adapter)
{
    int32_t at = adapter ? find_traffic(metrics, adapter) : 0;

    if (at >= 0)
        return &metrics->traffic[at];
    at = metrics->n_traffic;
    if (at < SP_TRAFFIC_MAX) {
        copy_text(metrics->traffic[at].name, sizeof metrics->traffic[at].name, adapter);
        metrics->n_traffic++;
    } else if (at == SP_TRAFFIC_MAX) {
        copy_text(metrics->traffic[at].name, sizeof metrics->traffic[at].name, OTHER);
        metrics->n_traffic++;
    }
    return &metrics->traffic[at < SP_TRAFFIC_MAX ? at : SP_TRAFFIC_MAX];
}

const sp_traffic *sp_metrics_traffic(const sp_metrics *metrics, const char *name)
{
    int32_t at = find_traffic(metrics, name);

    return at >= 0 ? &metrics->traffic[at] : NULL;
}

/* ---- the last minute ----------------------------------------------------------------------- */

static sp_metrics_second *second_of(sp_metrics *metrics, double now_s)
{
    int64_t second = (int64_t)now_s;
    sp_metrics_second *at = &metrics->seconds[second % SP_METRICS_SECONDS];

    if (at->second != second)
        *at = (sp_metrics_second){.second = second};
    return at;
}

sp_metrics_rates sp_metrics_rates_now(const sp_metrics *metrics, double now_s)
{
    int64_t now = (int64_t)now_s; /* this second has not ended yet, so it is left out */
    sp_metrics_rates rates = {.tokens_per_s = 0};
    double step_seconds = 0;

    for (int i = 0; i < SP_METRICS_SECONDS; i++) {
        const sp_metrics_second *at = &metrics->seconds[i];

        if (at->second >= now || at->second < now - SP_METRICS_RATE_SECONDS)
            continue;
        rates.tokens_per_s += (double)at->tokens / SP_METRICS_RATE_SECONDS;
        rates.steps_per_s += (double)at->steps / SP_METRICS_RATE_SECONDS;
        rates.pause_seconds += at->pause_seconds;
        step_seconds += at->step_seconds;
        if (at->step_seconds_max > rates.step_seconds_max)
            rates.step_seconds_max = at->step_seconds_max;
    }
    if (rates.steps_per_s > 0)
        rates.step_seconds_mean = step_seconds / (rates.steps_per_s * SP_METRICS_RATE_SECONDS);
    return rates;
}

/* ---- what is counted ------------------------------------------------------------------------ */

void sp_metrics_start(sp_metrics *metrics, const char *base_name, const sp_engine_stats *stats)
{
    memset(metrics, 0, sizeof *metrics);
    for (int i = 0; i < SP_METRICS_SECONDS; i++)
        metrics->seconds[i].second = -1;
    copy_text(metrics->traffic[0].name, sizeof metrics->traffic[0].name, base_name);
    metrics->n_traffic = 1;
    metrics->last = *stats;
}

static void count_first(sp_metrics *metrics, const sp_request_clock *clock, sp_traffic *traffic,
                        const sp_request_trace *trace, double now_s)
{
    traffic->requests++;
    traffic->prompt_tokens += (uint64_t)trace->prompt_tokens;
    traffic->cached_tokens += (uint64_t)trace->cached_tokens;
    observe(metrics, SP_HISTOGRAM_QUEUE, trace->scheduled - clock->arrived);
    if (trace->new_tokens > 0)
        observe(metrics, SP_HISTOGRAM_FIRST_TOKEN, now_s - clock->arrived);
}

void sp_metrics_event(sp_metrics *metrics, sp_request_clock *clock, const char *adapter,
                      const sp_request_event *event, double now_s)
{
    sp_traffic *traffic;

    if (event->is_prompt)
        return;
    traffic = traffic_of(metrics, adapter);
    if (clock->last_token <= 0)
        count_first(metrics, clock, traffic, event->trace, now_s);
    else
        observe(metrics, SP_HISTOGRAM_INTER_TOKEN, now_s - clock->last_token);
    clock->last_token = now_s;
    if (event->token >= 0)
        traffic->new_tokens++;
    if (event->finish != SP_FINISH_NONE)
        observe(metrics, SP_HISTOGRAM_REQUEST, now_s - clock->arrived);
}

void sp_metrics_non_finite(sp_metrics *metrics, const char *adapter)
{
    traffic_of(metrics, adapter)->non_finite++;
}

void sp_metrics_step(sp_metrics *metrics, const sp_engine_stats *stats, double now_s)
{
    const sp_engine_stats *last = &metrics->last;
    sp_metrics_second *second = second_of(metrics, now_s);
    double pause = stats->load_seconds - last->load_seconds;
    double step = stats->step_seconds - last->step_seconds;

    second->tokens += stats->tokens - last->tokens;
    if (pause >= PAUSE_SECONDS_MIN) {
        observe(metrics, SP_HISTOGRAM_LOAD_PAUSE, pause);
        second->pause_seconds += pause;
    }
    if (stats->steps > last->steps) {
        observe(metrics, SP_HISTOGRAM_STEP, step);
        second->steps++;
        second->step_seconds += step;
        if (step > second->step_seconds_max)
            second->step_seconds_max = step;
    }
    metrics->last = *stats;
}

/* ---- loads --------------------------------------------------------------------------------- */

static void forget_failure(sp_metrics *metrics, const char *name)
{
    int32_t at = 0;

    while (at < metrics->n_failures && strcmp(metrics->failures[at].name, name) != 0)
        at++;
    if (at == metrics->n_failures)
        return;
    metrics->n_failures--;
    memmove(&metrics->failures[at], &metrics->failures[at + 1],
            (size_t)(metrics->n_failures - at) * sizeof metrics->failures[0]);
}

void sp_metrics_load(sp_metrics *metrics, const char *name, double seconds, const sp_error *error,
                     double now_s)
{
    sp_load_failure *failure;

    observe(metrics, SP_HISTOGRAM_ADAPTER_LOAD, seconds);
    forget_failure(metrics, name);
    if (!error)
        return;
    if (metrics->n_failures == SP_LOAD_FAILURES_MAX)
        forget_failure(metrics, metrics->failures[0].name);
    failure = &metrics->failures[metrics->n_failures++];
    copy_text(failure->name, sizeof failure->name, name);
    copy_text(failure->text, sizeof failure->text, error->text);
    failure->code = error->code ? error->code : sp_status_name(error->status);
    failure->at_s = now_s;
}
