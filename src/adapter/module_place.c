/*
 * module_place.c: checks the place in a tensor's name against a model: by the table's numbers, or
 * by path in a model with other names. For a missing place it determines the reason: another trunk,
 * layer or expert.
 */
#include "adapter/module_key.h"
#include "adapter/reason.h"

#include <stdio.h>
#include <string.h>

/* ---- refusals ------------------------------------------------------------------------------ */

/* "0-2, 4": the layers that have the module. */
static void list_layers(const sp_geometry *geometry, int32_t module, char *out_text, size_t bytes)
{
    int32_t expert = sp_geometry_module_row(geometry, module)->kind == SP_SITE_EXPERT ? 0 : -1;
    size_t at = 0;
    int32_t n = sp_geometry_layers(geometry);

    out_text[0] = '\0';
    for (int32_t first = 0; first < n; first++) {
        int32_t last = first;

        if (sp_geometry_find_place(geometry, first, module, expert) < 0)
            continue;
        while (last + 1 < n && sp_geometry_find_place(geometry, last + 1, module, expert) >= 0)
            last++;
        if (at + 32 > bytes) {
            snprintf(out_text + at, bytes - at, " …");
            return;
        }
        at += (size_t)snprintf(out_text + at, bytes - at, "%s%d", at > 0 ? ", " : "", first);
        if (last > first)
            at += (size_t)snprintf(out_text + at, bytes - at, "-%d", last);
        first = last;
    }
}

static sp_status refuse_layer_kind(const sp_geometry *geometry, int32_t layer, int32_t module,
                                   const char *name, sp_error *error)
{
    const char *module_name = sp_geometry_module_name(geometry, module);
    char layers[160];

    list_layers(geometry, module, layers, sizeof layers);
    return sp_refuse(error, SP_REASON_WRONG_LAYER_KIND, name, layer,
                     "%.200s: layer %d has no %.100s; the layers that have it: %s", name, layer,
                     module_name, layers);
}

static sp_status refuse_layer(const sp_geometry *geometry, int32_t layer, const char *name,
                              sp_error *error)
{
    return sp_refuse(error, SP_REASON_LAYER_OUT_OF_RANGE, name, layer,
                     "%.200s: layer %d; the base model has %d layers", name, layer,
                     sp_geometry_layers(geometry));
}

static sp_status refuse_expert(const sp_geometry *geometry, int32_t expert, const char *name,
                               sp_error *error)
{
    return sp_refuse(error, SP_REASON_EXPERT_OUT_OF_RANGE, name, expert,
                     "%.200s: expert %d; the base model has %d experts", name, expert,
                     sp_geometry_experts(geometry));
}

/* ---- the table's names --------------------------------------------------------------------- */

static sp_status refuse_place(const sp_geometry *geometry, const sp_module_key *key,
                              const char *name, sp_error *error)
{
    bool moe_only = key->kind == SP_SITE_ROUTER || key->kind == SP_SITE_EXPERT;
    const char *module_name = sp_module_name(key->module);

    if (moe_only && sp_geometry_experts(geometry) == 0)
        return sp_refuse(error, SP_REASON_EXPERT_ON_DENSE_MODEL, name, -1,
                         "%.200s: the base model has no experts", name);
    if (!sp_geometry_has_known(geometry, key->module))
        return sp_refuse(error, SP_REASON_UNSUPPORTED_MODULE, name, -1,
                         "%.200s: no layer of the base model has %s; allow-partial leaves it out",
                         name, module_name);
    return refuse_layer_kind(geometry, key->layer,
                             sp_geometry_module_index(geometry, module_name, strlen(module_name)),
                             name, error);
}

sp_status sp_module_key_check(const sp_geometry *geometry, sp_module_key *key, const char *name,
                              sp_error *error)
{
    int32_t site;

    if (key->layer >= sp_geometry_layers(geometry))
        return refuse_layer(geometry, key->layer, name, error);
    if (sp_geometry_known_site(geometry, key->layer, key->module, -1) < 0)
        return refuse_place(geometry, key, name, error);
    site = sp_geometry_known_site(geometry, key->layer, key->module, key->expert);
    if (site < 0)
        return refuse_expert(geometry, key->expert, name, error);
    if (key->fused == SP_FUSED_NONE)
        key->site = site;
    return SP_OK;
}

/* ---- any other names ----------------------------------------------------------------------- */

/* A path cut at the number of a layer, where what follows is a module of the geometry. */
typedef struct cut {
    size_t trunk_bytes;
    int32_t layer, expert, module;
} cut;

/* The module named by [begin, end), with or without an expert's number; or -1. */
static int32_t module_after(const sp_geometry *geometry, const char *begin, const char *end,
                            int32_t *out_expert)
{
    int32_t module = sp_geometry_module_index(geometry, begin, (size_t)(end - begin));

    *out_expert = -1;
    if (module >= 0)
        return module;
    for (const char *at = begin; at < end;) {
        const char *dot = memchr(at, '.', (size_t)(end - at));
        int32_t number = dot ? sp_path_number(at, (size_t)(dot - at)) : -1;
        char text[SP_SITE_PATH_BYTES_MAX];

        if (!dot)
            return -1;
        if (number >= 0 && (size_t)(end - begin) < sizeof text) {
            int n = snprintf(text, sizeof text, "%.*s%.*s", (int)(at - begin), begin,
                             (int)(end - dot - 1), dot + 1);

            module = sp_geometry_module_index(geometry, text, (size_t)n);
            *out_expert = number;
            if (module >= 0 && sp_geometry_module_row(geometry, module)->kind == SP_SITE_EXPERT)
                return module;
        }
        at = dot + 1;
    }
    return -1;
}

/*
 * Finds the word before which the trunk ends: a number, or what was meant as one (layer -1), with a
 * module of the geometry after it.
 */
static bool cut_path(const sp_geometry *geometry, const char *path, size_t n, cut *out_cut)
{
    const char *end = path + n;

    for (const char *at = path; at < end;) {
        const char *dot = memchr(at, '.', (size_t)(end - at));

        if (!dot)
            return false;
        if (dot > at && (strchr("+-0123456789", *at))) {
            out_cut->layer = sp_path_number(at, (size_t)(dot - at));
            out_cut->module = module_after(geometry, dot + 1, end, &out_cut->expert);
            out_cut->trunk_bytes = (size_t)(at - path);
            if (out_cut->module >= 0)
                return true;
        }
        at = dot + 1;
    }
    return false;
}

/*
 * True when the module's first site has what the core has before its layer's number. Only the first
 * is checked: a file may have a million names under another trunk.
 */
static bool has_trunk(const sp_geometry *geometry, const char *core, const cut *c)
{
    const sp_module_row *module = sp_geometry_module_row(geometry, c->module);
    const sp_site_row *row = sp_geometry_row(geometry, module->first);
    const char *own = sp_geometry_path(geometry, row) + row->core_at;
    const char *number = own + c->trunk_bytes;

    return row->core_bytes > c->trunk_bytes && memcmp(own, core, c->trunk_bytes) == 0 &&
           sp_path_number(number, strcspn(number, ".")) == row->layer;
}

static sp_status refuse_cut(const sp_geometry *geometry, const sp_module_key *key, const char *core,
                            const cut *c, const char *name, sp_error *error)
{
    if (!has_trunk(geometry, core, c))
        return sp_refuse_prefix(name, key->path, key->path_bytes, error);
    if (c->layer < 0)
        return sp_refuse(error, SP_REASON_MALFORMED_LAYER_INDEX, name,
                         (int64_t)(core + c->trunk_bytes - name),
                         "%.200s: \"%.*s\" is no number of a layer", name,
                         (int)strcspn(core + c->trunk_bytes, "."), core + c->trunk_bytes);
    if (!sp_geometry_has_layer(geometry, c->layer))
        return refuse_layer(geometry, c->layer, name, error);
    if (c->expert >= 0 && sp_geometry_find_place(geometry, c->layer, c->module, 0) >= 0)
        return refuse_expert(geometry, c->expert, name, error);
    return refuse_layer_kind(geometry, c->layer, c->module, name, error);
}

/* True when the last word is a module outside the layers, which the geometry has under another
 * trunk. */
static bool ends_in_outside(const sp_geometry *geometry, const char *path, size_t n)
{
    size_t begin = n;
    int32_t module;

    while (begin > 0 && path[begin - 1] != '.')
        begin--;
    module = sp_geometry_module_index(geometry, path + begin, n - begin);
    return begin > 0 && module >= 0 && sp_geometry_find_place(geometry, -1, module, -1) >= 0;
}

static sp_status refuse_path(const sp_geometry *geometry, const sp_module_key *key,
                             const char *core, size_t n, const char *name, sp_error *error)
{
    cut c;

    if (sp_path_is_wrapped(key->path, key->path_bytes))
        return sp_refuse_prefix(name, key->path, key->path_bytes, error);
    if (cut_path(geometry, core, n, &c))
        return refuse_cut(geometry, key, core, &c, name, error);
    if (ends_in_outside(geometry, core, n))
        return sp_refuse_prefix(name, key->path, key->path_bytes, error);
    return sp_refuse(error, SP_REASON_UNSUPPORTED_MODULE, name, (int64_t)(core - name),
                     "%.200s: \"%.*s\" is no module of the base model; allow-partial leaves it "
                     "out",
                     name, (int)(n < 100 ? n : 100), core);
}

sp_status sp_module_key_find(const sp_geometry *geometry, sp_module_key *key, const char *name,
                             sp_error *error)
{
    size_t trunk = sp_path_trunk_bytes(key->path, key->path_bytes);
    const char *core = key->path + trunk;
    size_t n = key->path_bytes - trunk;
    int32_t site = sp_geometry_find_core(geometry, core, n);
    const sp_site_row *row;

    if (site < 0)
        return refuse_path(geometry, key, core, n, name, error);
    row = sp_geometry_row(geometry, site);
    key->site = site;
    key->layer = row->layer;
    key->expert = row->expert;
    key->module = row->known;
    key->kind = sp_geometry_kind(geometry, row);
    return SP_OK;
}
