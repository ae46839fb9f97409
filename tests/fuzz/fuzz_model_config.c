/*
 * config.json of a base model: any bytes give a geometry whose every dimension can be used, or an
 * error that names a field.
 */
#include "fuzz/target.h"

#include <sidepath/adapter.h>

static void check_geometry(const sp_geometry *geometry)
{
    const sp_model_shape *shape = sp_geometry_shape(geometry);
    int32_t layers = sp_geometry_layers(geometry);
    sp_module_set seen = 0;

    FUZZ_CHECK(layers >= 1 && layers == shape->layers);
    FUZZ_CHECK(shape->q_heads % shape->kv_heads == 0 && shape->head_dim >= 1);
    for (int32_t i = 0; i < sp_geometry_n_sites(geometry); i++) {
        sp_site site = {.struct_bytes = sizeof site};

        FUZZ_CHECK(sp_geometry_site_at(geometry, i, &site, NULL) == SP_OK);
        FUZZ_CHECK(site.k_in >= 1 && site.n_out >= 1 && site.layer < layers);
        FUZZ_CHECK(sp_geometry_find(geometry, site.path) == i);
        seen |= (sp_module_set)1 << sp_geometry_site_module(geometry, i);
    }
    FUZZ_CHECK(seen == sp_geometry_modules(geometry));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    sp_geometry *geometry = NULL;
    sp_error error;
    sp_status status = sp_geometry_parse((const char *)data, bytes, &geometry, &error);

    if (status == SP_OK) {
        check_geometry(geometry);
        sp_geometry_release(geometry);
        return 0;
    }
    FUZZ_CHECK(status == SP_ERR_INPUT || status == SP_ERR_UNSUPPORTED);
    FUZZ_CHECK(geometry == NULL && error.subject[0] != '\0' && error.text[0] != '\0');
    return 0;
}
