#include "server/start_report.h"

#include <stdio.h>
#include <string.h>

#define MIB (1024.0 * 1024.0)

sp_start_facts sp_start_facts_take(const sp_engine *engine)
{
    sp_start_facts facts = {.stats.struct_bytes = sizeof facts.stats};

    sp_engine_get_stats(engine, &facts.stats, NULL);
    facts.n_adapters = sp_stage_n_versions(sp_engine_stage(engine));
    return facts;
}

bool sp_host_is_local(const char *host)
{
    return strncmp(host, "127.", 4) == 0 || strcmp(host, "::1") == 0 ||
           strcmp(host, "localhost") == 0;
}

/* What both forms are made of. */
typedef struct report {
    const sp_engine_stats *stats;
    const sp_server_settings *settings;
    const char *base, *family, *precision, *level, *template_source, *address;
    long long kv_tokens, context;
    size_t n_adapters, n_refused;
    bool keys, admin_keys;
} report;

static report report_of(const sp_start_facts *facts, const sp_api *api, const char *address)
{
    const char *family = sp_family_name(sp_engine_shape(api->engine)->family);

    return (report){
        .stats = &facts->stats,
        .settings = api->settings,
        .base = sp_engine_base_name(api->engine),
        .family = family ? family : "custom",
        .precision = facts->stats.precision == SP_DTYPE_F32 ? "f32" : "bf16",
        .level = sp_engine_cpu_isa(api->engine),
        .template_source = api->chat ? sp_chat_source(api->chat) : NULL,
        .address = address,
        .kv_tokens = (long long)facts->stats.kv_pages * facts->stats.page_tokens,
        .context = sp_engine_max_context(api->engine),
        .n_adapters = facts->n_adapters,
        .n_refused = api->refusals->n,
        .keys = api->api_keys != NULL,
        .admin_keys = api->admin_keys != NULL,
    };
}

static const char *keys_in_words(const report *r)
{
    if (r->keys && r->admin_keys)
        return "keys are asked for, others for changing adapters";
    if (r->keys)
        return "keys are asked for";
    return r->admin_keys ? "keys are asked for to change adapters, and for nothing else"
                         : "no keys are asked for";
}

/* Whether anybody who reaches the port may do what --api-key-file is there to guard. */
static bool is_exposed(const report *r)
{
    return !r->keys && strncmp(r->address, "unix:", 5) != 0 && !sp_host_is_local(r->settings->host);
}

/* ---- plain --------------------------------------------------------------------------------- */

static void log_plain(const report *r, sp_log *log)
{
    const sp_engine_stats *stats = r->stats;

    sp_log_line(log,
                SP_LOG_PREFIX "version %s; %s is %s in %s, %.1f MiB of weights, %lld tokens "
                              "of context; open after %.2f s",
                sp_library_version_text(), r->base, r->family, r->precision,
                (double)stats->weight_bytes / MIB, r->context, stats->open_seconds);
    sp_log_line(log,
                SP_LOG_PREFIX "%s on %d threads; %d slots of rank %d (%.1f MiB); KV cache of "
                              "%lld tokens (%.1f MiB); %d requests run, %lld wait",
                r->level, stats->threads, stats->slots, stats->slot_rank,
                (double)stats->pool_bytes / MIB, r->kv_tokens, (double)stats->kv_bytes / MIB,
                stats->running_max, (long long)r->settings->queue);
    if (stats->states > 0)
        sp_log_line(log,
                    SP_LOG_PREFIX "recurrent states of %d requests and %d snapshots (%.1f MiB)",
                    stats->states, stats->state_snapshots, (double)stats->state_bytes / MIB);
    sp_log_line(log, SP_LOG_PREFIX "%s; adapters %s", keys_in_words(r),
                r->settings->adapter_routes ? "can be loaded and unloaded over HTTP"
                                            : "cannot be changed over HTTP");
    if (is_exposed(r))
        sp_log_line(log,
                    SP_LOG_PREFIX "warning: %s is not this machine alone, and without "
                                  "--api-key-file whoever reaches the port can send requests%s",
                    r->settings->host,
                    r->settings->adapter_routes && !r->admin_keys ? " and change adapters" : "");
    sp_log_line(log, SP_LOG_PREFIX "%s, %zu adapters, at http://%s", r->base, r->n_adapters,
                r->address);
}

/* ---- JSON ---------------------------------------------------------------------------------- */

static void add_string(sp_text *out, const char *name, const char *value)
{
    sp_text_format(out, ", \"%s\": ", name);
    if (value)
        sp_text_json_string(out, value, strlen(value));
    else
        sp_text_add(out, "null");
}

static void add_count(sp_text *out, const char *name, long long value)
{
    sp_text_format(out, ", \"%s\": %lld", name, value);
}

static void add_bool(sp_text *out, const char *name, bool value)
{
    sp_text_format(out, ", \"%s\": %s", name, value ? "true" : "false");
}

static void log_json(const report *r, sp_log *log)
{
    const sp_engine_stats *stats = r->stats;
    sp_text line = {0};

    sp_log_begin_object(&line);
    add_string(&line, "event", "start");
    add_string(&line, "version", sp_library_version_text());
    add_string(&line, "model", r->base);
    add_string(&line, "family", r->family);
    add_string(&line, "precision", r->precision);
    add_count(&line, "weight_bytes", (long long)stats->weight_bytes);
    add_count(&line, "context_tokens", r->context);
    sp_text_add(&line, ", \"open_seconds\": ");
    sp_text_json_double(&line, stats->open_seconds);
    add_string(&line, "cpu_isa", r->level);
    add_count(&line, "threads", stats->threads);
    add_count(&line, "slots", stats->slots);
    add_count(&line, "slot_rank", stats->slot_rank);
    add_count(&line, "pool_bytes", (long long)stats->pool_bytes);
    add_count(&line, "kv_tokens", r->kv_tokens);
    add_count(&line, "kv_bytes", (long long)stats->kv_bytes);
    add_count(&line, "states", stats->states);
    add_count(&line, "state_snapshots", stats->state_snapshots);
    add_count(&line, "state_bytes", (long long)stats->state_bytes);
    add_count(&line, "max_running", stats->running_max);
    add_count(&line, "queue", r->settings->queue);
    add_string(&line, "chat_template", r->template_source);
    add_bool(&line, "keys", r->keys);
    add_bool(&line, "admin_keys", r->admin_keys);
    add_bool(&line, "adapter_routes", r->settings->adapter_routes);
    add_count(&line, "adapters", (long long)r->n_adapters);
    add_count(&line, "adapters_refused", (long long)r->n_refused);
    add_bool(&line, "exposed", is_exposed(r));
    add_string(&line, "address", r->address);
    sp_text_add(&line, "}\n");
    if (!line.failed)
        sp_log_add(log, line.data, line.bytes);
    sp_text_free(&line);
}

void sp_start_report_log(const sp_start_facts *facts, const sp_api *api, const char *address)
{
    report made = report_of(facts, api, address);

    if (sp_log_is_json(api->settings->log))
        log_json(&made, api->settings->log);
    else
        log_plain(&made, api->settings->log);
}
