/*
 * known_sites.h: geometries by hand with the names of the known families, written as short rows:
 * layer, module, inputs, outputs.
 */
#ifndef SP_TEST_SUPPORT_KNOWN_SITES_H
#define SP_TEST_SUPPORT_KNOWN_SITES_H

#include "adapter/known_module.h"
#include "support/test.h"

typedef struct site_dims {
    int32_t layer;
    sp_module module;
    int32_t k_in, n_out; /* of one expert, for all of them */
} site_dims;

#define KNOWN_PATH_BYTES 96

/* "model.layers.3.self_attn.q_proj", "model.embed_tokens", "lm_head"; expert -1: none. */
void known_path(int32_t layer, sp_module module, int32_t expert, char out_path[KNOWN_PATH_BYTES]);

/* Rows ascend by layer, module and expert, whatever the order of `sites`. Asserts that it works. */
sp_geometry *known_geometry(int32_t experts, const site_dims *sites, size_t n_sites);

/* The same without the assertion. */
sp_status known_geometry_create(int32_t experts, const site_dims *sites, size_t n_sites,
                                sp_geometry **out_geometry, sp_error *error);

/* The number of the site, of expert 0 where it is an expert's; -1: there is none. */
int32_t known_site(const sp_geometry *geometry, int32_t layer, sp_module module);

/* The bit of the module in sets of this geometry; 0: it has none of that name. */
sp_module_set known_bit(const sp_geometry *geometry, sp_module module);

/* Whether the layer has the module, and its dimensions; outputs may be NULL. */
bool known_dims(const sp_geometry *geometry, int32_t layer, sp_module module, int32_t *out_k_in,
                int32_t *out_n_out);

#endif
