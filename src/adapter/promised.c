/*
 * promised.c: places that target_modules covers in the base and that the file lacks: layers that
 * were not saved, modules that were left out of some. That may be intended, so they are notes;
 * targets.c handles names without any tensor.
 */
#include "adapter/audit.h"

#include "base/alloc.h"

#include <stdio.h>
#include <string.h>

#define LIST_BYTES 160

/* Facts about places, by site number; all experts of a layer are represented by the first. */
typedef struct places {
    const sp_audit *audit;
    const sp_geometry *geometry;
    bool *in_file; /* [sites] */
    bool *lacking; /* [sites] covered but not in the file */
    bool *layers;  /* [layers] to be listed */
    bool *used;    /* [layers] the file has a tensor in it */
    bool in_some_layer[SP_MODULES_MAX];
} places;

/* ---- what the file has ----------------------------------------------------------------------- */

static void mark_place(places *p, int32_t site)
{
    const sp_site_row *row = sp_geometry_row(p->geometry, site);

    if (row && row->expert > 0) {
        site = sp_geometry_find_place(p->geometry, row->layer, row->module, 0);
        row = sp_geometry_row(p->geometry, site);
    }
    if (!row || row->layer < 0)
        return;
    p->in_file[site] = true;
    p->used[row->layer] = true;
    p->in_some_layer[row->module] = true;
}

static void mark_file(places *p)
{
    for (size_t i = 0; i < p->audit->n_pairs; i++) {
        const sp_pair *pair = &p->audit->pairs[i];
        const sp_module_key *key = &pair->a->key;
        sp_module first = pair->is_down ? SP_MODULE_EXPERT_DOWN_PROJ : SP_MODULE_EXPERT_GATE_PROJ;
        sp_module last = pair->is_down ? SP_MODULE_EXPERT_DOWN_PROJ : SP_MODULE_EXPERT_UP_PROJ;

        if (key->fused == SP_FUSED_NONE) {
            mark_place(p, key->site);
            continue;
        }
        for (int32_t module = (int32_t)first; module <= (int32_t)last; module++)
            mark_place(p, sp_geometry_known_site(p->geometry, key->layer, (sp_module)module, 0));
    }
}

/* ---- what the config covers ------------------------------------------------------------------ */

/*
 * A listed name without any tensor is not reported again. Of what an expression or "all-linear"
 * covers only linear modules are expected: router and experts are parameters in some versions of a
 * model.
 */
static bool is_expected(const places *p, const sp_site_row *row)
{
    const sp_name_rule *rule = &p->audit->config.target_modules;
    bool linear = sp_geometry_kind(p->geometry, row) == SP_SITE_LINEAR;

    if (row->layer < 0 || row->expert > 0 || (rule->all_linear && !linear))
        return false;
    return p->in_some_layer[row->module] || (linear && rule->n == 0);
}

static sp_status is_covered(const places *p, const sp_site_row *row, bool *out_covered,
                            sp_error *error)
{
    const sp_peft_config *config = &p->audit->config;
    const char *path = sp_geometry_path(p->geometry, row);
    size_t n = strlen(path);
    bool excluded = false;
    sp_status status = SP_OK;

    *out_covered = config->target_modules.all_linear;
    if (!*out_covered)
        status = sp_name_rule_match(&config->target_modules, path, n, out_covered, error);
    if (status == SP_OK && *out_covered)
        status = sp_name_rule_match(&config->exclude_modules, path, n, &excluded, error);
    *out_covered = *out_covered && !excluded && sp_peft_config_layer_listed(config, path, n);
    return status;
}

static sp_status find_lacking(places *p, sp_error *error)
{
    sp_status status = SP_OK;

    for (int32_t i = 0; i < sp_geometry_n_sites(p->geometry) && status == SP_OK; i++) {
        const sp_site_row *row = sp_geometry_row(p->geometry, i);

        if (!p->in_file[i] && is_expected(p, row))
            status = is_covered(p, row, &p->lacking[i], error);
    }
    return status;
}

/* ---- the notes ------------------------------------------------------------------------------- */

/* "0-2, 4" of the layers that are marked, which are unmarked; the number of them. */
static int32_t take_layers(places *p, char out_text[LIST_BYTES])
{
    int32_t n_layers = sp_geometry_layers(p->geometry), n = 0;
    size_t at = 0;

    for (int32_t first = 0; first < n_layers; first++) {
        int32_t last = first;

        if (!p->layers[first])
            continue;
        while (last + 1 < n_layers && p->layers[last + 1])
            last++;
        n += last - first + 1;
        if (at + 40 < LIST_BYTES) {
            at +=
                (size_t)snprintf(out_text + at, LIST_BYTES - at, "%s%d", at > 0 ? ", " : "", first);
            if (last > first)
                at += (size_t)snprintf(out_text + at, LIST_BYTES - at, "-%d", last);
        } else if (out_text[at - 1] != '.') {
            at += (size_t)snprintf(out_text + at, LIST_BYTES - at, ", ..");
        }
        first = last;
    }
    memset(p->layers, 0, (size_t)n_layers * sizeof *p->layers);
    return n;
}

static void remark_layers(places *p)
{
    char list[LIST_BYTES];
    int32_t n;

    for (int32_t i = 0; i < sp_geometry_n_sites(p->geometry); i++) {
        const sp_site_row *row = sp_geometry_row(p->geometry, i);

        if (p->lacking[i] && !p->used[row->layer])
            p->layers[row->layer] = true;
    }
    n = take_layers(p, list);
    if (n > 0)
        sp_remark(&p->audit->adapter->notes,
                  "the file has no tensor for layer%s %s, which target_modules covers",
                  n > 1 ? "s" : "", list);
}

/* In layers of which the file has something. */
static void remark_module(places *p, int32_t module)
{
    char list[LIST_BYTES];
    int32_t n;

    for (int32_t i = 0; i < sp_geometry_n_sites(p->geometry); i++) {
        const sp_site_row *row = sp_geometry_row(p->geometry, i);

        if (p->lacking[i] && row->module == module && p->used[row->layer])
            p->layers[row->layer] = true;
    }
    n = take_layers(p, list);
    if (n > 0)
        sp_remark(&p->audit->adapter->notes,
                  "the file has no %.100s for layer%s %s, which target_modules covers",
                  sp_geometry_module_name(p->geometry, module), n > 1 ? "s" : "", list);
}

static void remark_all(places *p)
{
    bool modules[SP_MODULES_MAX] = {false};

    for (int32_t i = 0; i < sp_geometry_n_sites(p->geometry); i++) {
        if (p->lacking[i])
            modules[sp_geometry_row(p->geometry, i)->module] = true;
    }
    remark_layers(p);
    for (int32_t module = 0; module < SP_MODULES_MAX; module++) {
        if (modules[module])
            remark_module(p, module);
    }
}

sp_status sp_audit_promised(sp_audit *audit)
{
    const sp_geometry *geometry = audit->options->geometry;
    int64_t steps_left = audit->config.steps_left;
    places p = {.audit = audit, .geometry = geometry};
    size_t n_sites, n_layers, bytes;
    sp_error local;

    if (!geometry || !audit->config.target_modules.given || audit->n_pairs == 0)
        return SP_OK;
    n_sites = (size_t)sp_geometry_n_sites(geometry);
    n_layers = (size_t)sp_geometry_layers(geometry);
    bytes = 2 * (n_sites + n_layers) * sizeof *p.in_file;
    p.in_file = sp_calloc(1, bytes);
    if (!p.in_file)
        return sp_fail_memory(audit->error, bytes, "the places of target_modules");
    p.lacking = p.in_file + n_sites;
    p.layers = p.lacking + n_sites;
    p.used = p.layers + n_layers;
    mark_file(&p);
    if (find_lacking(&p, &local) == SP_OK) /* a note is not worth a refusal */
        remark_all(&p);
    audit->config.steps_left = steps_left;
    sp_free(p.in_file);
    return SP_OK;
}
