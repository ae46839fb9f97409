/*
 * geometry.c: every site of a base model with its dimensions.
 *
 * One row of dimensions per layer, and one more in front for embed_tokens and lm_head; a site that
 * does not exist has k_in 0. This table is the only answer to "does this layer have this module?".
 */
#include "adapter/geometry.h"
#include "base/alloc.h"
#include "base/error.h"
#include "base/file.h"

#include <stdatomic.h>
#include <string.h>

#define CONFIG_BYTES_MAX ((size_t)16 << 20)
#define LAYERS_MAX       65536

typedef struct dims {
    int32_t k_in, n_out; /* both 0 where there is no such site */
} dims;

typedef dims layer_dims[SP_MODULE_COUNT];

struct sp_geometry {
    atomic_int references;
    int32_t layers, experts;
    bool has_shape;
    sp_model_shape shape;
    layer_dims *sites;    /* [layers + 1], index layer + 1 */
    sp_layer_kind *kinds; /* [layers] */
    sp_module_set modules;
};

static sp_status create(int32_t layers, int32_t experts, sp_geometry **out_geometry,
                        sp_error *error)
{
    sp_geometry *geometry = sp_calloc(1, sizeof *geometry);

    if (!geometry)
        return sp_fail_memory(error, sizeof *geometry, "a geometry");
    geometry->references = 1;
    geometry->layers = layers;
    geometry->experts = experts;
    geometry->sites = sp_calloc((size_t)layers + 1, sizeof *geometry->sites);
    geometry->kinds = sp_calloc((size_t)layers, sizeof *geometry->kinds);
    if (!geometry->sites || !geometry->kinds) {
        sp_geometry_release(geometry);
        return sp_fail_memory(error, (size_t)layers * sizeof *geometry->sites, "a geometry");
    }
    *out_geometry = geometry;
    return SP_OK;
}

static void set_site(sp_geometry *geometry, int32_t layer, sp_module module, int32_t k_in,
                     int32_t n_out)
{
    geometry->sites[layer + 1][module] = (dims){.k_in = k_in, .n_out = n_out};
    geometry->modules |= SP_MODULE_BIT(module);
}

/* ---- from a shape -------------------------------------------------------------------------- */

static void set_attention(sp_geometry *g, const sp_model_shape *s, int32_t layer)
{
    int32_t q = s->q_heads * s->head_dim;
    int32_t kv = s->kv_heads * s->head_dim;

    set_site(g, layer, SP_MODULE_Q_PROJ, s->hidden, s->gated_attention ? 2 * q : q);
    set_site(g, layer, SP_MODULE_K_PROJ, s->hidden, kv);
    set_site(g, layer, SP_MODULE_V_PROJ, s->hidden, kv);
    set_site(g, layer, SP_MODULE_O_PROJ, q, s->hidden);
}

static void set_gdn(sp_geometry *g, const sp_model_shape *s, int32_t layer)
{
    int32_t key = s->gdn_key_heads * s->gdn_key_head_dim;
    int32_t value = s->gdn_value_heads * s->gdn_value_head_dim;

    if (s->gdn_fused_inputs) {
        set_site(g, layer, SP_MODULE_GDN_IN_QKVZ, s->hidden, 2 * key + 2 * value);
        set_site(g, layer, SP_MODULE_GDN_IN_BA, s->hidden, 2 * s->gdn_value_heads);
    } else {
        set_site(g, layer, SP_MODULE_GDN_IN_QKV, s->hidden, 2 * key + value);
        set_site(g, layer, SP_MODULE_GDN_IN_Z, s->hidden, value);
        set_site(g, layer, SP_MODULE_GDN_IN_B, s->hidden, s->gdn_value_heads);
        set_site(g, layer, SP_MODULE_GDN_IN_A, s->hidden, s->gdn_value_heads);
    }
    set_site(g, layer, SP_MODULE_GDN_OUT, value, s->hidden);
}

/* gate, up, down of one width, as three modules in a row from `first`. */
static void set_ffn(sp_geometry *g, int32_t layer, sp_module first, int32_t hidden, int32_t width)
{
    set_site(g, layer, first, hidden, width);
    set_site(g, layer, (sp_module)(first + 1), hidden, width);
    set_site(g, layer, (sp_module)(first + 2), width, hidden);
}

static void set_moe(sp_geometry *g, const sp_model_shape *s, int32_t layer)
{
    set_site(g, layer, SP_MODULE_ROUTER, s->hidden, s->experts);
    set_ffn(g, layer, SP_MODULE_EXPERT_GATE_PROJ, s->hidden, s->expert_intermediate);
    if (s->shared_expert_intermediate > 0) {
        set_ffn(g, layer, SP_MODULE_SHARED_GATE_PROJ, s->hidden, s->shared_expert_intermediate);
        set_site(g, layer, SP_MODULE_SHARED_EXPERT_GATE, s->hidden, 1);
    }
}

static void set_all(sp_geometry *g, const sp_model_shape *s, const sp_layer_plan *layers)
{
    set_site(g, -1, SP_MODULE_EMBED_TOKENS, s->vocab, s->hidden);
    set_site(g, -1, SP_MODULE_LM_HEAD, s->hidden, s->vocab);
    for (int32_t layer = 0; layer < s->layers; layer++) {
        g->kinds[layer] = layers[layer].kind;
        if (layers[layer].kind == SP_LAYER_FULL_ATTENTION)
            set_attention(g, s, layer);
        else
            set_gdn(g, s, layer);
        if (layers[layer].moe)
            set_moe(g, s, layer);
        else
            set_ffn(g, layer, SP_MODULE_GATE_PROJ, s->hidden, s->intermediate);
    }
}

static sp_status from_config(const json_t *config, sp_geometry **out_geometry, sp_error *error)
{
    sp_model_shape shape;
    sp_layer_plan *layers;
    sp_geometry *geometry;
    sp_status status = sp_model_shape_read(config, &shape, &layers, error);

    if (status != SP_OK)
        return status;
    status = create(shape.layers, shape.experts, &geometry, error);
    if (status == SP_OK) {
        geometry->shape = shape;
        geometry->has_shape = true;
        set_all(geometry, &shape, layers);
        *out_geometry = geometry;
    }
    sp_free(layers);
    return status;
}

sp_status sp_geometry_parse(const char *bytes, size_t n_bytes, sp_geometry **out_geometry,
                            sp_error *error)
{
    json_t *config;
    sp_status status;

    if (!bytes || !out_geometry)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, NULL, -1, "no text or no result given");
    status = sp_json_parse(bytes, n_bytes, "config.json", NULL, NULL, &config, error);
    if (status != SP_OK)
        return status;
    status = from_config(config, out_geometry, error);
    json_decref(config);
    return status;
}

sp_status sp_geometry_open(const char *path, sp_geometry **out_geometry, sp_error *error)
{
    json_t *config;
    char *joined = NULL;
    sp_status status;

    if (!path || !out_geometry)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, NULL, -1, "no path or no result given");
    if (sp_path_is_directory(path)) {
        joined = sp_path_join(path, "config.json");
        if (!joined)
            return sp_fail_memory(error, strlen(path), "a path");
        path = joined;
    }
    status = sp_json_read_object(path, CONFIG_BYTES_MAX, NULL, &config, error);
    if (status == SP_OK) {
        status = from_config(config, out_geometry, error);
        json_decref(config);
    }
    sp_free(joined);
    return status;
}

/* ---- by hand ------------------------------------------------------------------------------- */

static sp_status check_site(const sp_geometry *geometry, const sp_site_dims *site, size_t index,
                            sp_error *error)
{
    const char *name = sp_module_name(site->module);
    bool outside = site->module == SP_MODULE_EMBED_TOKENS || site->module == SP_MODULE_LM_HEAD;

    if (!name)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, NULL, (int64_t)index,
                       "site %zu: there is no module %d", index, (int)site->module);
    if (outside ? site->layer != -1 : site->layer < 0 || site->layer >= geometry->layers)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, name, (int64_t)index,
                       "site %zu: %s cannot be in layer %d of %d", index, name, site->layer,
                       geometry->layers);
    if (site->k_in < 1 || site->n_out < 1)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, name, (int64_t)index,
                       "site %zu: %s of layer %d is %d by %d", index, name, site->layer,
                       site->n_out, site->k_in);
    if ((SP_MODULES_EXPERTS & SP_MODULE_BIT(site->module)) && geometry->experts < 1)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, name, (int64_t)index,
                       "site %zu: %s in a model without experts", index, name);
    if (sp_geometry_site(geometry, site->layer, site->module, NULL, NULL))
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, name, (int64_t)index,
                       "site %zu: %s of layer %d is given twice", index, name, site->layer);
    return SP_OK;
}

static const sp_module_set gdn_modules =
    (SP_MODULE_BIT(SP_MODULE_GDN_OUT) << 1) - SP_MODULE_BIT(SP_MODULE_GDN_IN_QKVZ);

sp_status sp_geometry_create(int32_t layers, int32_t experts, const sp_site_dims *sites,
                             size_t n_sites, sp_geometry **out_geometry, sp_error *error)
{
    sp_geometry *geometry;
    sp_status status;

    if (layers < 1 || layers > LAYERS_MAX || experts < 0 || (!sites && n_sites > 0) ||
        !out_geometry)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, NULL, -1,
                       "a geometry of %d layers and %d experts cannot be", layers, experts);
    status = create(layers, experts, &geometry, error);
    if (status != SP_OK)
        return status;
    for (size_t i = 0; i < n_sites; i++) {
        status = check_site(geometry, &sites[i], i, error);
        if (status != SP_OK) {
            sp_geometry_release(geometry);
            return status;
        }
        set_site(geometry, sites[i].layer, sites[i].module, sites[i].k_in, sites[i].n_out);
    }
    for (int32_t layer = 0; layer < layers; layer++) {
        if (sp_geometry_layer_modules(geometry, layer) & gdn_modules)
            geometry->kinds[layer] = SP_LAYER_LINEAR_ATTENTION;
    }
    *out_geometry = geometry;
    return SP_OK;
}

/* ---- asking -------------------------------------------------------------------------------- */

sp_geometry *sp_geometry_retain(sp_geometry *geometry)
{
    atomic_fetch_add_explicit(&geometry->references, 1, memory_order_relaxed);
    return geometry;
}

void sp_geometry_release(sp_geometry *geometry)
{
    if (!geometry || atomic_fetch_sub_explicit(&geometry->references, 1, memory_order_acq_rel) != 1)
        return;
    sp_free(geometry->sites);
    sp_free(geometry->kinds);
    sp_free(geometry);
}

int32_t sp_geometry_layers(const sp_geometry *geometry)
{
    return geometry->layers;
}

int32_t sp_geometry_experts(const sp_geometry *geometry)
{
    return geometry->experts;
}

const sp_model_shape *sp_geometry_shape(const sp_geometry *geometry)
{
    return geometry->has_shape ? &geometry->shape : NULL;
}

sp_layer_kind sp_geometry_layer_kind(const sp_geometry *geometry, int32_t layer)
{
    if (layer < 0 || layer >= geometry->layers)
        return SP_LAYER_FULL_ATTENTION;
    return geometry->kinds[layer];
}

bool sp_geometry_site(const sp_geometry *geometry, int32_t layer, sp_module module,
                      int32_t *out_k_in, int32_t *out_n_out)
{
    const dims *site;

    if (layer < -1 || layer >= geometry->layers || (int)module < 0 || module >= SP_MODULE_COUNT)
        return false;
    site = &geometry->sites[layer + 1][module];
    if (site->k_in == 0)
        return false;
    if (out_k_in)
        *out_k_in = site->k_in;
    if (out_n_out)
        *out_n_out = site->n_out;
    return true;
}

sp_module_set sp_geometry_layer_modules(const sp_geometry *geometry, int32_t layer)
{
    sp_module_set set = 0;

    for (int32_t module = 0; module < SP_MODULE_COUNT; module++) {
        if (sp_geometry_site(geometry, layer, (sp_module)module, NULL, NULL))
            set |= SP_MODULE_BIT(module);
    }
    return set;
}

sp_module_set sp_geometry_modules(const sp_geometry *geometry)
{
    return geometry->modules;
}
