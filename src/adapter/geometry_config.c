/*
 * geometry_config.c: the sites of a model that config.json describes, by the table of known
 * modules: the embedding and the head first, then the layers, modules in the table's order.
 */
#include "adapter/geometry.h"
#include "base/alloc.h"
#include "base/error.h"
#include "base/file.h"
#include "checkpoint/config_keys.h"
#include "checkpoint/own_head.h"

#include <stdio.h>
#include <string.h>

#define CONFIG_BYTES_MAX ((size_t)16 << 20)

typedef struct dims {
    int32_t k_in, n_out; /* both 0 where the layer has no such module */
} dims;

/* ---- one layer ----------------------------------------------------------------------------- */

static void set_attention(const sp_model_shape *s, dims *sites)
{
    int32_t q = s->q_heads * s->head_dim;
    int32_t kv = s->kv_heads * s->head_dim;

    sites[SP_MODULE_Q_PROJ] = (dims){s->hidden, s->gated_attention ? 2 * q : q};
    sites[SP_MODULE_K_PROJ] = (dims){s->hidden, kv};
    sites[SP_MODULE_V_PROJ] = (dims){s->hidden, kv};
    sites[SP_MODULE_O_PROJ] = (dims){q, s->hidden};
}

static void set_gdn(const sp_model_shape *s, dims *sites)
{
    int32_t key = s->gdn_key_heads * s->gdn_key_head_dim;
    int32_t value = s->gdn_value_heads * s->gdn_value_head_dim;

    if (s->gdn_fused_inputs) {
        sites[SP_MODULE_GDN_IN_QKVZ] = (dims){s->hidden, 2 * key + 2 * value};
        sites[SP_MODULE_GDN_IN_BA] = (dims){s->hidden, 2 * s->gdn_value_heads};
    } else {
        sites[SP_MODULE_GDN_IN_QKV] = (dims){s->hidden, 2 * key + value};
        sites[SP_MODULE_GDN_IN_Z] = (dims){s->hidden, value};
        sites[SP_MODULE_GDN_IN_B] = (dims){s->hidden, s->gdn_value_heads};
        sites[SP_MODULE_GDN_IN_A] = (dims){s->hidden, s->gdn_value_heads};
    }
    sites[SP_MODULE_GDN_OUT] = (dims){value, s->hidden};
}

/* gate, up and down of one width, as three consecutive modules from `first`. */
static void set_ffn(dims *sites, sp_module first, int32_t hidden, int32_t width)
{
    sites[first] = sites[first + 1] = (dims){hidden, width};
    sites[first + 2] = (dims){width, hidden};
}

static void set_moe(const sp_model_shape *s, dims *sites)
{
    sites[SP_MODULE_ROUTER] = (dims){s->hidden, s->experts};
    set_ffn(sites, SP_MODULE_EXPERT_GATE_PROJ, s->hidden, s->expert_intermediate);
    if (s->shared_expert_intermediate > 0) {
        set_ffn(sites, SP_MODULE_SHARED_GATE_PROJ, s->hidden, s->shared_expert_intermediate);
        sites[SP_MODULE_SHARED_EXPERT_GATE] = (dims){s->hidden, 1};
    }
}

/* Adds one site, or all experts' of the module. */
static sp_status add_module(sp_geometry *geometry, int32_t layer, sp_module module, dims size,
                            sp_error *error)
{
    static const char experts[] = "mlp.experts.";
    const sp_known_module *known = &sp_known_modules[module];
    bool is_expert = known->kind == SP_SITE_EXPERT;
    int32_t n = is_expert ? sp_geometry_shape(geometry)->experts : 1;
    char path[128];
    sp_site site = {.struct_bytes = sizeof site,
                    .path = path,
                    .module = known->name,
                    .kind = known->kind,
                    .layer = layer,
                    .k_in = size.k_in,
                    .n_out = size.n_out,
                    .group = known->group,
                    .tied = module == SP_MODULE_LM_HEAD &&
                            sp_geometry_shape(geometry)->tied_embeddings};
    sp_status status = SP_OK;

    for (int32_t e = 0; e < n && status == SP_OK; e++) {
        site.expert = is_expert ? e : -1;
        if (is_expert)
            snprintf(path, sizeof path, "model.layers.%d.%s%d.%s", layer, experts, e,
                     known->name + strlen(experts));
        else if (layer >= 0)
            snprintf(path, sizeof path, "model.layers.%d.%s", layer, known->name);
        else
            snprintf(path, sizeof path, "%s%s", module == SP_MODULE_LM_HEAD ? "" : "model.",
                     known->name);
        status = sp_geometry_add(geometry, &site, 0, error);
    }
    return status;
}

static sp_status add_layer(sp_geometry *geometry, int32_t layer, const dims *sites, sp_error *error)
{
    sp_status status = SP_OK;

    for (int32_t m = 0; m < SP_MODULE_COUNT && status == SP_OK; m++) {
        if (sites[m].k_in > 0)
            status = add_module(geometry, layer, (sp_module)m, sites[m], error);
    }
    return status;
}

/* ---- the whole ----------------------------------------------------------------------------- */

static sp_status add_all(sp_geometry *geometry, const sp_model_shape *s,
                         const sp_layer_plan *layers, sp_error *error)
{
    const dims outside[SP_MODULE_COUNT] = {
        [SP_MODULE_EMBED_TOKENS] = {s->vocab, s->hidden},
        [SP_MODULE_LM_HEAD] = {s->hidden, s->vocab},
    };
    sp_status status = add_layer(geometry, -1, outside, error);

    for (int32_t layer = 0; layer < s->layers && status == SP_OK; layer++) {
        dims sites[SP_MODULE_COUNT] = {{0, 0}};

        if (layers[layer].kind == SP_LAYER_LINEAR_ATTENTION)
            set_gdn(s, sites);
        else
            set_attention(s, sites);
        if (layers[layer].moe)
            set_moe(s, sites);
        else
            set_ffn(sites, SP_MODULE_GATE_PROJ, s->hidden, s->intermediate);
        status = add_layer(geometry, layer, sites, error);
    }
    return status == SP_OK ? sp_geometry_finish(geometry, s->layers, error) : status;
}

static sp_layer_kind *kinds_of(const sp_layer_plan *layers, int32_t n)
{
    sp_layer_kind *kinds = sp_calloc((size_t)n, sizeof *kinds);

    for (int32_t i = 0; kinds && i < n; i++)
        kinds[i] = layers[i].kind;
    return kinds;
}

/* Bounds experts times layers: an absurd number would allocate millions of rows. */
static sp_status check_size(const sp_model_shape *shape, sp_error *error)
{
    int64_t sites = (int64_t)shape->layers * (3 * (int64_t)shape->experts + SP_MODULE_COUNT);

    if (sites <= SP_SITES_MAX)
        return SP_OK;
    return sp_fail(error, SP_ERR_UNSUPPORTED, NULL, "num_experts", -1,
                   "config.json: %d layers of %d experts are more than %d sites", shape->layers,
                   shape->experts, SP_SITES_MAX);
}

static sp_status from_shape(const sp_model_shape *shape, const sp_layer_plan *layers,
                            sp_geometry **out_geometry, sp_error *error)
{
    sp_layer_kind *kinds;
    sp_geometry *geometry;
    sp_status status = check_size(shape, error);

    if (status == SP_OK)
        status = sp_geometry_start(true, &geometry, error);
    if (status != SP_OK)
        return status;
    kinds = kinds_of(layers, shape->layers);
    if (!kinds) {
        sp_geometry_release(geometry);
        return sp_fail_memory(error, (size_t)shape->layers * sizeof *kinds, "a geometry");
    }
    sp_geometry_set_shape(geometry, shape, kinds);
    status = add_all(geometry, shape, layers, error);
    if (status != SP_OK) {
        sp_geometry_release(geometry);
        return status;
    }
    *out_geometry = geometry;
    return SP_OK;
}

static sp_status add_notes(sp_geometry *geometry, const char *unused, bool own_head,
                           sp_error *error)
{
    sp_text note = {0};
    sp_status status = SP_OK;

    if (unused) {
        sp_text_format(&note, "config.json: not used: %s", unused);
        status = note.failed ? sp_fail_memory(error, 1, "a note")
                             : sp_geometry_add_note(geometry, note.data, error);
    }
    if (own_head && status == SP_OK)
        status = sp_geometry_add_note(geometry,
                                      "lm_head.weight is not the embedding, so it is the head, "
                                      "though config.json says tie_word_embeddings",
                                      error);
    sp_text_free(&note);
    return status;
}

/* `directory`: where the checkpoint is; NULL: nowhere. */
static sp_status from_config(const json_t *config, const char *directory,
                             sp_geometry **out_geometry, sp_error *error)
{
    sp_geometry *geometry = NULL;
    sp_model_shape shape;
    sp_layer_plan *layers;
    sp_text unused = {0};
    bool own_head = false;
    sp_status status = sp_model_shape_read(config, &shape, &layers, error);

    if (status != SP_OK)
        return status;
    status = sp_config_keys_check(config, &unused, error);
    if (status == SP_OK && shape.tied_embeddings && directory)
        status = sp_has_own_head(directory, &own_head, error);
    shape.tied_embeddings &= !own_head;
    if (status == SP_OK)
        status = from_shape(&shape, layers, &geometry, error);
    if (status == SP_OK)
        status = add_notes(geometry, unused.bytes > 0 ? unused.data : NULL, own_head, error);
    sp_text_free(&unused);
    sp_free(layers);
    if (status == SP_OK)
        *out_geometry = geometry;
    else if (geometry)
        sp_geometry_release(geometry);
    return status;
}

sp_status sp_geometry_parse(const char *bytes, size_t n_bytes, sp_geometry **out_geometry,
                            sp_error *error)
{
    json_t *config;
    sp_status status;

    if (!bytes || !out_geometry)
        return sp_fail_null(error, bytes ? "out_geometry" : "bytes");
    status = sp_json_parse(bytes, n_bytes, "config.json", NULL, NULL, &config, error);
    if (status != SP_OK)
        return status;
    status = from_config(config, NULL, out_geometry, error);
    json_decref(config);
    return status;
}

sp_status sp_geometry_open(const char *path, sp_geometry **out_geometry, sp_error *error)
{
    const char *directory = NULL;
    json_t *config;
    char *joined = NULL;
    sp_status status;

    if (!path || !out_geometry)
        return sp_fail_null(error, path ? "out_geometry" : "path");
    if (sp_path_is_directory(path)) {
        joined = sp_path_join(path, "config.json");
        if (!joined)
            return sp_fail_memory(error, strlen(path), "a path");
        directory = path;
        path = joined;
    }
    status = sp_json_read_object(path, CONFIG_BYTES_MAX, NULL, &config, error);
    if (status == SP_OK) {
        status = from_config(config, directory, out_geometry, error);
        json_decref(config);
    }
    sp_free(joined);
    return status;
}
