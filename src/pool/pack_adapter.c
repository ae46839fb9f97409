/* pack_adapter.c: an adapter object's sites and tables, as image.c and overlay.c take them. */
#include "base/alloc.h"
#include "base/error.h"
#include "pool/image.h"

#define TABLES_MAX 2

sp_module_set sp_layout_pair_modules(const sp_adapter *adapter)
{
    sp_module_set modules = 0;

    for (size_t i = 0; i < sp_adapter_n_sites(adapter); i++) {
        int32_t site = sp_adapter_site_at(adapter, i)->site;

        if (site >= 0)
            modules |= (sp_module_set)1
                       << sp_geometry_site_module(sp_adapter_geometry(adapter), site);
    }
    return modules;
}

/* The adapter's tables into a list of TABLES_MAX; returns their number. */
static size_t list_tables(const sp_adapter *adapter, sp_adapter_table *out_tables)
{
    size_t n = sp_adapter_n_tables(adapter);

    for (size_t i = 0; i < n && i < TABLES_MAX; i++)
        out_tables[i] = *sp_adapter_table_at(adapter, i);
    return n < TABLES_MAX ? n : TABLES_MAX;
}

sp_status sp_layout_measure_overlay(const sp_layout *layout, const sp_adapter *adapter,
                                    size_t *out_bytes, sp_error *error)
{
    sp_adapter_table tables[TABLES_MAX];
    size_t n;

    if (layout == NULL || adapter == NULL)
        return sp_fail_null(error, layout != NULL ? "adapter" : "layout");
    if (out_bytes == NULL)
        return sp_fail_null(error, "out_bytes");
    n = list_tables(adapter, tables);
    return sp_overlay_measure(tables, n, sp_layout_served(layout, SP_SITE_EMBEDDING),
                              sp_layout_served(layout, SP_SITE_HEAD), sp_layout_dtype(layout),
                              out_bytes, error);
}

static sp_status pack_sites(const sp_layout *layout, const sp_adapter *adapter, sp_exec *exec,
                            sp_image **out_image, sp_error *error)
{
    size_t n_sites = sp_adapter_n_sites(adapter);
    sp_digest digest = sp_adapter_digest(adapter);
    sp_adapter_site *sites = sp_calloc(
        n_sites + 1, sizeof *sites); /* at least one, since an empty block would be NULL */
    sp_status status;

    if (sites == NULL)
        return sp_fail_memory(error, n_sites * sizeof *sites, "an adapter's list of sites");
    for (size_t i = 0; i < n_sites; i++)
        sites[i] = *sp_adapter_site_at(adapter, i);
    status = sp_layout_pack_sites(layout, sites, n_sites, &digest, exec, out_image, error);
    sp_free(sites);
    return status;
}

sp_status sp_layout_pack(const sp_layout *layout, const sp_adapter *adapter, sp_exec *exec,
                         sp_image **out_image, sp_error *error)
{
    sp_adapter_table tables[TABLES_MAX];
    size_t n_tables;
    sp_image *image;
    sp_status status =
        SP_NEED(error, {"layout", layout}, {"adapter", adapter}, {"out_image", out_image});

    if (status != SP_OK)
        return status;
    n_tables = list_tables(adapter, tables);
    status = pack_sites(layout, adapter, exec, &image, error);
    if (status != SP_OK)
        return status;
    status = sp_overlay_build_for(
        sp_layout_images_for(layout), tables, n_tables, sp_layout_served(layout, SP_SITE_EMBEDDING),
        sp_layout_served(layout, SP_SITE_HEAD), sp_layout_dtype(layout), &image->overlay, error);
    if (status != SP_OK) {
        sp_image_destroy(image);
        return status;
    }
    if (image->overlay != NULL)
        image->bytes += sizeof *image->overlay + image->overlay->bytes;
    *out_image = image;
    return SP_OK;
}
