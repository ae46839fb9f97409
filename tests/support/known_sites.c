#include "support/known_sites.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char experts_dot[] = "mlp.experts.";

void known_path(int32_t layer, sp_module module, int32_t expert, char out_path[KNOWN_PATH_BYTES])
{
    const char *name = sp_module_name(module);

    if (expert >= 0)
        snprintf(out_path, KNOWN_PATH_BYTES, "model.layers.%d.%s%d.%s", layer, experts_dot, expert,
                 name + strlen(experts_dot));
    else if (layer >= 0)
        snprintf(out_path, KNOWN_PATH_BYTES, "model.layers.%d.%s", layer, name);
    else
        snprintf(out_path, KNOWN_PATH_BYTES, "%s%s",
                 module == SP_MODULE_EMBED_TOKENS ? "model." : "", name);
}

static int by_place(const void *left, const void *right)
{
    const site_dims *a = left;
    const site_dims *b = right;

    if (a->layer != b->layer)
        return a->layer < b->layer ? -1 : 1;
    return (a->module > b->module) - (a->module < b->module);
}

static bool is_expert(sp_module module)
{
    return sp_known_modules[module].kind == SP_SITE_EXPERT;
}

sp_status known_geometry_create(int32_t experts, const site_dims *sites, size_t n_sites,
                                sp_geometry **out_geometry, sp_error *error)
{
    site_dims *sorted = malloc(n_sites * sizeof *sorted);
    size_t rows_max = n_sites * (size_t)(experts > 0 ? experts : 1), n = 0;
    sp_site *rows = calloc(rows_max, sizeof *rows);
    char(*paths)[KNOWN_PATH_BYTES] = malloc(rows_max * sizeof *paths);
    sp_status status;

    assert_true(sorted != NULL && rows != NULL && paths != NULL);
    memcpy(sorted, sites, n_sites * sizeof *sorted);
    qsort(sorted, n_sites, sizeof *sorted, by_place);
    for (size_t i = 0; i < n_sites; i++) {
        sp_module module = sorted[i].module;

        for (int32_t e = 0; e < (is_expert(module) ? experts : 1); e++) {
            int32_t expert = is_expert(module) ? e : -1;

            known_path(sorted[i].layer, module, expert, paths[n]);
            rows[n] = (sp_site){.struct_bytes = sizeof rows[n],
                                .path = paths[n],
                                .kind = sp_known_modules[module].kind,
                                .layer = sorted[i].layer,
                                .expert = expert,
                                .k_in = sorted[i].k_in,
                                .n_out = sorted[i].n_out,
                                .group = -1};
            n++;
        }
    }
    status = sp_geometry_create(rows, n, out_geometry, error);
    free(paths);
    free(rows);
    free(sorted);
    return status;
}

sp_geometry *known_geometry(int32_t experts, const site_dims *sites, size_t n_sites)
{
    sp_geometry *geometry = NULL;
    sp_error error;

    assert_ok(known_geometry_create(experts, sites, n_sites, &geometry, &error), &error);
    return geometry;
}

int32_t known_site(const sp_geometry *geometry, int32_t layer, sp_module module)
{
    return sp_geometry_find_module(
        geometry, layer, sp_module_name(module),
        module >= 0 && module < SP_MODULE_COUNT && is_expert(module) ? 0 : -1);
}

sp_module_set known_bit(const sp_geometry *geometry, sp_module module)
{
    for (int32_t m = 0; m < sp_geometry_n_modules(geometry); m++) {
        if (strcmp(sp_geometry_module_name(geometry, m), sp_module_name(module)) == 0)
            return (sp_module_set)1 << m;
    }
    return 0;
}

bool known_dims(const sp_geometry *geometry, int32_t layer, sp_module module, int32_t *out_k_in,
                int32_t *out_n_out)
{
    sp_site site = {.struct_bytes = sizeof site};

    if (sp_geometry_site_at(geometry, known_site(geometry, layer, module), &site, NULL) != SP_OK)
        return false;
    if (out_k_in)
        *out_k_in = site.k_in;
    if (out_n_out)
        *out_n_out = site.n_out;
    return true;
}
