/*
 * receipt.c: the findings of opening an adapter, as JSON and as a table. Both texts are made at
 * once, so that a receipt does not depend on its adapter.
 */
#include "adapter/audit.h"

#include "base/alloc.h"
#include "base/grow.h"
#include "base/hash.h"

#include <string.h>

struct sp_receipt {
    sp_text json, table;
    sp_text missing; /* the module kinds that the engine cannot apply, as a list of words */
    size_t n_missing;
};

/* One rank and scale of a module, and the layers that have it. */
typedef struct variant {
    int32_t rank;
    float scale;
    size_t n_sites;
    sp_text layers; /* "0-2, 5"; empty outside the layers */
    sp_text layers_json;
    int32_t first, last; /* the current run of layers; -1: none */
} variant;

/* The summary of one module kind. */
typedef struct module_summary {
    const char *name;
    size_t n_sites;
    variant *variants;
    size_t n_variants, capacity;
    const sp_adapter_table *table; /* NULL if no rows are replaced */
    int32_t rows_changed;          /* -1: not known */
} module_summary;

void sp_receipt_options_default(sp_receipt_options *out_options, size_t struct_bytes)
{
    const sp_receipt_options defaults = {.struct_bytes = sizeof defaults,
                                         .engine_modules = ~(sp_module_set)0,
                                         .slot_bytes = -1,
                                         .expert_bytes = -1};

    sp_struct_default(out_options, struct_bytes, &defaults, sizeof defaults);
}

/* ---- gathering ------------------------------------------------------------------------------- */

/* Writes the current run of layers: "3" or "3-5", and the numbers themselves for JSON. */
static void close_run(variant *v)
{
    if (v->first < 0)
        return;
    sp_text_format(&v->layers, "%s%d", v->layers.bytes > 0 ? ", " : "", v->first);
    if (v->last > v->first)
        sp_text_format(&v->layers, "-%d", v->last);
    for (int32_t layer = v->first; layer <= v->last; layer++)
        sp_text_format(&v->layers_json, "%s%d", v->layers_json.bytes > 0 ? ", " : "", layer);
    v->first = -1;
}

static void add_layer(variant *v, int32_t layer)
{
    if (layer < 0 || (v->first >= 0 && v->last == layer))
        return;
    if (v->first >= 0 && v->last + 1 == layer) {
        v->last = layer;
        return;
    }
    close_run(v);
    v->first = v->last = layer;
}

static variant *find_variant(module_summary *summary, const sp_adapter_site *site)
{
    for (size_t i = 0; i < summary->n_variants; i++) {
        variant *v = &summary->variants[i];

        if (v->rank == site->rank && memcmp(&v->scale, &site->scale, sizeof v->scale) == 0)
            return v;
    }
    if (summary->n_variants == summary->capacity) {
        size_t capacity = summary->capacity ? 2 * summary->capacity : 4;
        variant *grown = sp_realloc(summary->variants, capacity * sizeof *grown);

        if (!grown)
            return NULL;
        summary->variants = grown;
        summary->capacity = capacity;
    }
    summary->variants[summary->n_variants] =
        (variant){.rank = site->rank, .scale = site->scale, .first = -1};
    return &summary->variants[summary->n_variants++];
}

/* Names of modules are kept once: the same name is the same text. */
static bool summarize(const sp_adapter *adapter, const char *name, module_summary *out_summary)
{
    *out_summary = (module_summary){.name = name, .rows_changed = -1};
    for (size_t i = 0; i < adapter->n_sites; i++) {
        const sp_adapter_site *site = &adapter->sites[i];
        variant *v;

        if (site->module != name)
            continue;
        v = find_variant(out_summary, site);
        if (!v)
            return false;
        v->n_sites++;
        out_summary->n_sites++;
        add_layer(v, site->layer);
    }
    for (size_t i = 0; i < out_summary->n_variants; i++) {
        variant *v = &out_summary->variants[i];

        close_run(v);
        if (v->layers.failed || v->layers_json.failed)
            return false;
    }
    for (size_t i = 0; i < adapter->n_tables; i++) {
        if (adapter->tables[i].module != name)
            continue;
        out_summary->table = &adapter->tables[i];
        out_summary->rows_changed = adapter->rows_changed[i];
    }
    return true;
}

static void clear_summary(module_summary *summary)
{
    for (size_t i = 0; i < summary->n_variants; i++) {
        sp_text_free(&summary->variants[i].layers);
        sp_text_free(&summary->variants[i].layers_json);
    }
    sp_free(summary->variants);
}

/* ---- JSON ------------------------------------------------------------------------------------ */

static void json_text(sp_text *out, const char *text)
{
    if (text && *text)
        sp_text_json_string(out, text, strlen(text));
    else
        sp_text_add(out, "null");
}

static void json_rank_scale(sp_text *out, int32_t rank, float scale)
{
    sp_text_format(out, "\"rank\": %d, \"scale\": ", rank);
    sp_text_json_double(out, (double)scale);
}

static void json_module(sp_text *out, const module_summary *summary)
{
    const variant *only = summary->n_variants == 1 ? summary->variants : NULL;

    json_text(out, summary->name);
    sp_text_format(out, ": {\"sites\": %zu, ", summary->n_sites);
    if (only)
        json_rank_scale(out, only->rank, only->scale);
    else
        sp_text_add(out, "\"rank\": null, \"scale\": null");
    sp_text_add(out, ", \"variants\": [");
    for (size_t i = 0; i < summary->n_variants; i++) {
        const variant *v = &summary->variants[i];

        sp_text_add(out, i > 0 ? ", {" : "{");
        json_rank_scale(out, v->rank, v->scale);
        sp_text_format(out, ", \"sites\": %zu, \"layers\": [%s]}", v->n_sites,
                       v->layers_json.bytes > 0 ? v->layers_json.data : "");
    }
    sp_text_add(out, "]");
    if (summary->table && summary->rows_changed >= 0)
        sp_text_format(out, ", \"rows\": %d", summary->rows_changed);
    else if (summary->table)
        sp_text_add(out, ", \"rows\": null");
    sp_text_add(out, "}");
}

/* The texts of a list, in pairs for the list of ignored tensors. */
static void json_remarks(sp_text *out, const sp_remarks *remarks, bool pairs)
{
    const char *text = remarks->text.data;

    for (size_t i = 0; i < remarks->n; i++) {
        sp_text_add(out, i > 0 ? ", " : "");
        if (pairs) {
            sp_text_add(out, "{\"tensor\": ");
            json_text(out, text);
            text += strlen(text) + 1;
            sp_text_add(out, ", \"reason\": ");
        }
        json_text(out, text);
        text += strlen(text) + 1;
        sp_text_add(out, pairs ? "}" : "");
    }
}

static void hex_digest(const sp_adapter *adapter, char out_text[2 * SP_DIGEST_BYTES + 1])
{
    out_text[0] = '\0';
    if (adapter->has_digest)
        sp_hex(adapter->digest.bytes, SP_DIGEST_BYTES, out_text);
}

/* The largest rank, of experts and router too. */
static int32_t largest_rank(const sp_adapter *adapter)
{
    int32_t rank = 0;

    for (size_t i = 0; i < adapter->n_sites; i++)
        rank = adapter->sites[i].rank > rank ? adapter->sites[i].rank : rank;
    return rank;
}

static void json_cost(sp_text *out, const sp_adapter *adapter)
{
    if (!adapter->geometry) {
        sp_text_add(out, ", \"rank\": null, \"row_macs\": null");
        return;
    }
    sp_text_format(out, ", \"rank\": %d, \"row_macs\": ", largest_rank(adapter));
    sp_text_json_double(out, sp_adapter_row_macs(adapter));
}

static void json_head(sp_text *out, const sp_adapter *adapter, const sp_receipt_options *options)
{
    char digest[2 * SP_DIGEST_BYTES + 1];

    hex_digest(adapter, digest);
    sp_text_format(out,
                   "{\"verdict\": \"%s\", \"code\": null, \"message\": null, \"tensor\": null, "
                   "\"digest\": ",
                   adapter->geometry ? "accepted" : "unchecked");
    json_text(out, digest);
    if (adapter->geometry)
        sp_text_format(out, ", \"sites\": %zu", adapter->n_sites);
    else
        sp_text_add(out, ", \"sites\": null");
    if (adapter->geometry && options->slot_bytes >= 0)
        sp_text_format(out, ", \"slot_bytes\": %lld", (long long)options->slot_bytes);
    else
        sp_text_add(out, ", \"slot_bytes\": null");
    if (adapter->geometry && options->expert_bytes >= 0)
        sp_text_format(out, ", \"expert_bytes\": %lld", (long long)options->expert_bytes);
    else
        sp_text_add(out, ", \"expert_bytes\": null");
    json_cost(out, adapter);
    sp_text_add(out, ", \"modules\": {");
}

static void json_tail(sp_receipt *receipt, const sp_adapter *adapter)
{
    sp_text *out = &receipt->json;
    const char *word = receipt->missing.data;

    sp_text_add(out, "}, \"ignored\": [");
    json_remarks(out, &adapter->ignored, true);
    sp_text_add(out, "], \"engine_missing\": [");
    for (size_t i = 0; i < receipt->n_missing; i++, word += strlen(word) + 1) {
        sp_text_add(out, i > 0 ? ", " : "");
        json_text(out, word);
    }
    sp_text_add(out, "], \"notes\": [");
    json_remarks(out, &adapter->notes, false);
    sp_text_add(out, "]}\n");
}

/* ---- the table ------------------------------------------------------------------------------- */

/* Names and notes come from untrusted files: none may start a line of its own. */
static void table_line(sp_text *out, const char *before, const char *foreign, const char *behind)
{
    sp_text_add(out, before);
    sp_text_add_printable(out, foreign);
    sp_text_add(out, behind);
}

static void table_head(sp_text *out, const sp_adapter *adapter, const sp_receipt_options *options)
{
    char digest[2 * SP_DIGEST_BYTES + 1];

    hex_digest(adapter, digest);
    table_line(out, "adapter  ", adapter->name, "\n");
    sp_text_format(out, "verdict  %s\n",
                   adapter->geometry ? "accepted" : "unchecked (no base model to hold it against)");
    if (adapter->modules & ~options->engine_modules)
        sp_text_add(out, "engine   cannot apply all of it yet (see below): engine-unsupported\n");
    if (digest[0] != '\0')
        sp_text_format(out, "digest   %s\n", digest);
    if (adapter->geometry)
        sp_text_format(out, "sites    %zu\n", adapter->n_sites);
    if (adapter->geometry && options->slot_bytes >= 0)
        sp_text_format(out, "slot     %lld bytes\n", (long long)options->slot_bytes);
    if (adapter->geometry)
        sp_text_format(out, "cost     %.0f multiply-adds a row\n", sp_adapter_row_macs(adapter));
    if (adapter->geometry && options->expert_bytes > 0)
        sp_text_format(out, "experts  %lld bytes\n", (long long)options->expert_bytes);
    if (adapter->overlay_bytes > 0)
        sp_text_format(out, "rows     %zu bytes\n", adapter->overlay_bytes);
    sp_text_format(out, "\n%-28s %6s %6s %12s  %s\n", "module", "sites", "rank", "scale", "layers");
}

static void table_module(sp_text *out, const module_summary *summary)
{
    for (size_t i = 0; i < summary->n_variants; i++) {
        const variant *v = &summary->variants[i];

        sp_text_format(out, "%-28s %6zu %6d %12.7g  %s\n", summary->name, v->n_sites, v->rank,
                       (double)v->scale, v->layers.bytes > 0 ? v->layers.data : "-");
    }
    if (summary->table && summary->rows_changed >= 0)
        sp_text_format(out, "%-28s %d rows replaced\n", summary->name, summary->rows_changed);
    else if (summary->table)
        sp_text_format(out, "%-28s rows replaced\n", summary->name);
}

static void table_tail(sp_receipt *receipt, const sp_adapter *adapter)
{
    sp_text *out = &receipt->table;
    const char *text = adapter->ignored.text.data;

    if (adapter->ignored.n > 0)
        sp_text_add(out, "\nignored\n");
    for (size_t i = 0; i < adapter->ignored.n; i++) {
        const char *reason = text + strlen(text) + 1;

        table_line(out, "  ", text, ": ");
        sp_text_format(out, "%s\n", reason);
        text = reason + strlen(reason) + 1;
    }
    text = receipt->missing.data;
    if (receipt->n_missing > 0)
        sp_text_add(out, "\nnot yet applied by this engine\n");
    for (size_t i = 0; i < receipt->n_missing; i++, text += strlen(text) + 1)
        sp_text_format(out, "  %s\n", text);
    text = adapter->notes.text.data;
    if (adapter->notes.n > 0)
        sp_text_add(out, "\nnotes\n");
    for (size_t i = 0; i < adapter->notes.n; i++, text += strlen(text) + 1)
        table_line(out, "  ", text, "\n");
}

/* ---- the whole ------------------------------------------------------------------------------- */

static void add_missing(sp_receipt *receipt, const char *name)
{
    sp_text_add_bytes(&receipt->missing, name, strlen(name) + 1);
    receipt->n_missing++;
}

static bool write_modules(sp_receipt *receipt, const sp_adapter *adapter,
                          const sp_receipt_options *options)
{
    bool first = true;

    for (int32_t module = 0; module < sp_geometry_n_modules(adapter->geometry); module++) {
        const char *name = sp_geometry_module_name(adapter->geometry, module);
        module_summary summary;
        bool gathered;

        if (!(adapter->modules >> module & 1))
            continue;
        gathered = summarize(adapter, name, &summary);
        if (gathered) {
            sp_text_add(&receipt->json, first ? "" : ", ");
            json_module(&receipt->json, &summary);
            table_module(&receipt->table, &summary);
            if (!(options->engine_modules >> module & 1))
                add_missing(receipt, name);
            first = false;
        }
        clear_summary(&summary);
        if (!gathered)
            return false;
    }
    return true;
}

static sp_status finish(sp_receipt *receipt, bool complete, sp_receipt **out_receipt,
                        sp_error *error)
{
    if (!complete || receipt->json.failed || receipt->table.failed || receipt->missing.failed) {
        sp_receipt_destroy(receipt);
        return sp_fail_memory(error, 0, "a receipt");
    }
    *out_receipt = receipt;
    return SP_OK;
}

sp_status sp_receipt_create(const sp_adapter *adapter, const sp_receipt_options *options,
                            sp_receipt **out_receipt, sp_error *error)
{
    sp_receipt_options own;
    sp_receipt *receipt;
    sp_status status;
    bool complete;

    if (!adapter || !out_receipt)
        return sp_fail_null(error, adapter ? "out_receipt" : "adapter");
    sp_receipt_options_default(&own, sizeof own);
    status = sp_struct_read(&own, sizeof own, options, "sp_receipt_options", error);
    if (status != SP_OK)
        return status;
    receipt = sp_calloc(1, sizeof *receipt);
    if (!receipt)
        return sp_fail_memory(error, sizeof *receipt, "a receipt");
    json_head(&receipt->json, adapter, &own);
    table_head(&receipt->table, adapter, &own);
    complete = write_modules(receipt, adapter, &own) && !receipt->missing.failed;
    if (complete) {
        json_tail(receipt, adapter);
        table_tail(receipt, adapter);
    }
    return finish(receipt, complete, out_receipt, error);
}

sp_status sp_receipt_create_refused(const char *name, const sp_error *refusal,
                                    sp_receipt **out_receipt, sp_error *error)
{
    sp_receipt *receipt;
    sp_status status;

    status = SP_NEED(error, {"name", name}, {"refusal", refusal}, {"out_receipt", out_receipt});
    if (status != SP_OK)
        return status;
    receipt = sp_calloc(1, sizeof *receipt);
    if (!receipt)
        return sp_fail_memory(error, sizeof *receipt, "a receipt");
    sp_text_add(&receipt->json, "{\"verdict\": \"refused\", \"code\": ");
    json_text(&receipt->json, refusal->code);
    sp_text_add(&receipt->json, ", \"message\": ");
    json_text(&receipt->json, refusal->text);
    sp_text_add(&receipt->json, ", \"tensor\": ");
    json_text(&receipt->json, refusal->subject);
    sp_text_add(
        &receipt->json,
        ", \"digest\": null, \"sites\": null, \"slot_bytes\": null, \"expert_bytes\": null, "
        "\"rank\": null, "
        "\"row_macs\": null, \"modules\": {}, "
        "\"ignored\": [], \"engine_missing\": [], \"notes\": []}\n");
    table_line(&receipt->table, "adapter  ", name, "\n");
    sp_text_format(&receipt->table, "verdict  refused: %s\n",
                   refusal->code[0] != '\0' ? refusal->code : sp_status_text(refusal->status));
    if (refusal->subject[0] != '\0')
        sp_text_format(&receipt->table, "about    %s\n", refusal->subject);
    sp_text_format(&receipt->table, "because  %s\n", refusal->text);
    return finish(receipt, true, out_receipt, error);
}

void sp_receipt_destroy(sp_receipt *receipt)
{
    if (!receipt)
        return;
    sp_text_free(&receipt->json);
    sp_text_free(&receipt->table);
    sp_text_free(&receipt->missing);
    sp_free(receipt);
}

const char *sp_receipt_json(const sp_receipt *receipt)
{
    return receipt->json.data;
}

const char *sp_receipt_table(const sp_receipt *receipt)
{
    return receipt->table.data;
}

bool sp_receipt_is_servable(const sp_receipt *receipt, sp_error *error)
{
    if (receipt->n_missing == 0)
        return true;
    sp_refuse(error, SP_REASON_ENGINE_UNSUPPORTED, receipt->missing.data, -1,
              "the adapter changes %s%s, which this engine cannot apply yet; it is not applied in "
              "part",
              receipt->missing.data, receipt->n_missing > 1 ? " and more" : "");
    return false;
}
