/*
 * metrics.h: what the server counts, as text for Prometheus and as JSON for the status page. Owns
 * the names of the metrics and the size of what is kept; knows no threads, no HTTP and no clock.
 *
 * The engine's thread counts into one sp_metrics; whoever answers gets a copy of it. It has a
 * fixed size and is counted into without allocation: histograms, the last minute second by
 * second, and the traffic of the first SP_TRAFFIC_MAX names that made any. Later names are counted
 * as ":other", which no adapter can be called, so a client that invents adapters cannot make the
 * output grow for ever.
 *
 * Names that begin with "vllm:" are those that the Kubernetes Gateway API Inference Extension and
 * llm-d read, with the meaning that they have in vLLM. "gpu" there means a slot, on whatever
 * device, "cpu" the host cache.
 */
#ifndef SP_SERVER_METRICS_METRICS_H
#define SP_SERVER_METRICS_METRICS_H

#include "base/text.h"
#include "server/http/http.h"
#include "server/metrics/refusals.h"

#include <sidepath/engine.h>

#define SP_TRAFFIC_MAX          256
#define SP_HISTOGRAM_BOUNDS_MAX 14
#define SP_METRICS_SECONDS      60 /* of history */
#define SP_METRICS_RATE_SECONDS 10 /* that rates are taken over */
#define SP_HTTP_CODES           600

/* Histograms of seconds. */
typedef enum sp_metrics_histogram {
    SP_HISTOGRAM_QUEUE,       /* from a request's arrival to its first rows in a step */
    SP_HISTOGRAM_FIRST_TOKEN, /* from its arrival to its first token */
    SP_HISTOGRAM_INTER_TOKEN, /* between two tokens of a request */
    SP_HISTOGRAM_REQUEST,     /* from its arrival to its last token */
    SP_HISTOGRAM_STEP,
    SP_HISTOGRAM_LOAD_PAUSE,   /* by which a step was later for an adapter on its way in */
    SP_HISTOGRAM_ADAPTER_LOAD, /* from the wish to the outcome */
    SP_HISTOGRAMS
} sp_metrics_histogram;

typedef struct sp_histogram {
    uint64_t counts[SP_HISTOGRAM_BOUNDS_MAX + 1]; /* of each bucket alone; the last: beyond all */
    double sum;
} sp_histogram;

typedef struct sp_traffic {
    char name[256]; /* at most 255 bytes: the rule for adapter names */
    uint64_t requests, prompt_tokens, cached_tokens, new_tokens;
    uint64_t non_finite; /* requests that ended because logits were not finite */
} sp_traffic;

/* The last load of a name that failed; gone once it succeeds. */
#define SP_LOAD_FAILURES_MAX 32
typedef struct sp_load_failure {
    char name[256];
    const char *code; /* static */
    char text[512];   /* cut where it is longer */
    double at_s;      /* sp_clock_seconds */
} sp_load_failure;

/* What happened in one second of the clock. */
typedef struct sp_metrics_second {
    int64_t second;
    uint64_t tokens, steps;
    double step_seconds, step_seconds_max, pause_seconds;
} sp_metrics_second;

typedef struct sp_metrics {
    sp_histogram histograms[SP_HISTOGRAMS];
    sp_traffic traffic[SP_TRAFFIC_MAX + 1]; /* [n_traffic], the base's first; then ":other" last */
    int32_t n_traffic;
    sp_metrics_second seconds[SP_METRICS_SECONDS];  /* by second % SP_METRICS_SECONDS */
    sp_engine_stats last;                           /* after the last step */
    sp_load_failure failures[SP_LOAD_FAILURES_MAX]; /* [n_failures], oldest first */
    int32_t n_failures;
} sp_metrics;

/* What the server keeps beside a request for its times. Begin with all zero but `arrived`. */
typedef struct sp_request_clock {
    double arrived; /* sp_clock_seconds */
    double last_token;
} sp_request_clock;

/* Empty, with the engine's figures as they are now. */
void sp_metrics_start(sp_metrics *metrics, const char *base_name, const sp_engine_stats *stats);
/* A new event of a request; `adapter` NULL is the base. Events of prompt tokens count nothing. */
void sp_metrics_event(sp_metrics *metrics, sp_request_clock *clock, const char *adapter,
                      const sp_request_event *event, double now_s);
/* A request ended because its logits were not finite; `adapter` as above. */
void sp_metrics_non_finite(sp_metrics *metrics, const char *adapter);
/* After every step, and after every sp_stage_poll_wait. */
void sp_metrics_step(sp_metrics *metrics, const sp_engine_stats *stats, double now_s);
/* The outcome of a load, good (error NULL) or bad. */
void sp_metrics_load(sp_metrics *metrics, const char *name, double seconds, const sp_error *error,
                     double now_s);

/* What the engine's thread knows beside the engine itself, since it began. */
typedef struct sp_driver_counts {
    uint64_t refused, finished_stop, finished_length, cancelled, failed, slow_readers;
    uint64_t loads, load_failures, unloads;
    double step_seconds_max_while_loading; /* the longest step beside a load */
    int32_t waiting_for_load;              /* generations whose adapter is on its way from disk */
} sp_driver_counts;

/* What the HTTP thread and the log have counted since they began. */
typedef struct sp_front_counts {
    uint64_t log_lines_dropped;
    uint64_t key_reloads, key_reload_failures;
    bool weights_changed; /* or replaced */
    sp_http_counts http;
    size_t client_bytes[SP_BUDGET_KINDS], client_bytes_max;
    uint64_t client_bytes_refused;
} sp_front_counts;

/* One version of an adapter as the stage lists it. */
typedef struct sp_listed_adapter {
    const char *name, *path;
    const char *receipt; /* in JSON; NULL: not requested, or there is none */
    sp_stage_version_state state;
    int32_t slot; /* -1: none now */
    int32_t rank, sites;
    size_t file_bytes, slot_bytes;
    size_t host_bytes; /* what its image takes in the host cache now */
    sp_digest digest;
    uint64_t generation;
    bool pinned, active;
    bool held;                /* its requests are paused */
    int32_t references;       /* requests that hold it: */
    int32_t running, waiting; /* those that hold its slot, and those that wait */
    uint64_t rows;            /* that steps have routed to it */
    double load_seconds;
} sp_listed_adapter;

/* One peer that adapters come from. */
typedef struct sp_listed_peer {
    const char *address;
    uint64_t reached;    /* 1: by the last list of its names; else 0 */
    uint64_t n_adapters; /* in the last list that came */
    uint64_t manifests, images, images_passed, failures, bytes; /* as sp_peer_source_counts */
} sp_listed_peer;

/* All that an answer is made of; everything is borrowed. */
typedef struct sp_metrics_view {
    const char *version, *base_name, *cpu_isa;
    double now_unix_s, now_s; /* of the wall clock, and sp_clock_seconds */
    double uptime_s;
    bool draining;
    const sp_engine_stats *stats;
    const sp_listed_adapter *adapters; /* [n_adapters] */
    size_t n_adapters;
    const char *const *awaited; /* [n_awaited] names that requests wait for, not yet read */
    size_t n_awaited;
    const sp_metrics *metrics;
    const sp_driver_counts *counts;
    const sp_front_counts *front;
    const uint64_t *http_codes;         /* [SP_HTTP_CODES] answers by status */
    const sp_server_refusals *refusals; /* adapters of the start that it runs without */
    const char *const *folders;         /* [n_folders] of --adapter-dir, by the last scan */
    size_t n_folders;
    const char *const *unloaded; /* [n_unloaded] folders that requests cannot name */
    size_t n_unloaded;
    const sp_listed_peer *peers; /* [n_peers] */
    size_t n_peers;
} sp_metrics_view;

#define SP_METRICS_TYPE "text/plain; version=0.0.4; charset=utf-8"

/* Text format 0.0.4. */
void sp_metrics_text(const sp_metrics_view *view, sp_text *out);

/* Means over the last SP_METRICS_RATE_SECONDS whole seconds. */
typedef struct sp_metrics_rates {
    double tokens_per_s, steps_per_s;
    double step_seconds_mean, step_seconds_max, pause_seconds; /* the last: in all */
} sp_metrics_rates;

sp_metrics_rates sp_metrics_rates_now(const sp_metrics *metrics, double now_s);

/* The bounds of a histogram, ascending, without the last, which is infinite. */
const double *sp_metrics_bounds(sp_metrics_histogram histogram, int32_t *out_n);
/* Observations, their mean, and what so many of them (0 to 1) did not exceed, taken to be spread
 * evenly in the bucket that it falls into; 0 where there are none. */
uint64_t sp_metrics_count(const sp_metrics *metrics, sp_metrics_histogram histogram);
double sp_metrics_mean(const sp_metrics *metrics, sp_metrics_histogram histogram);
double sp_metrics_quantile(const sp_metrics *metrics, sp_metrics_histogram histogram, double share);
/* What was counted for a name; NULL: nothing, or it is among the others. */
const sp_traffic *sp_metrics_traffic(const sp_metrics *metrics, const char *name);

/* What the status page shows. */
void sp_metrics_json(const sp_metrics_view *view, sp_text *out);

#endif
