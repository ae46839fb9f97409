/* pack_adapter.c: an adapter object as the list of sites that image.c packs. */
#include "base/alloc.h"
#include "base/error.h"
#include "pool/image.h"

sp_status sp_layout_pack(const sp_layout *layout, const sp_adapter *adapter, sp_image **out_image,
                         sp_error *error)
{
    size_t n_sites = sp_adapter_n_sites(adapter);
    sp_digest digest = sp_adapter_digest(adapter);
    sp_adapter_site *sites;
    sp_status status;

    if (sp_adapter_n_tables(adapter) > 0)
        return sp_fail(error, SP_ERR_UNSUPPORTED, "engine-unsupported",
                       sp_module_name(sp_adapter_table_at(adapter, 0)->module), -1,
                       "replaced rows of embed_tokens or lm_head cannot be held by this pool");
    sites = sp_calloc(n_sites + 1, sizeof *sites); /* never an empty block */
    if (sites == NULL)
        return sp_fail_memory(error, n_sites * sizeof *sites, "an adapter's list of sites");
    for (size_t i = 0; i < n_sites; i++)
        sites[i] = *sp_adapter_site_at(adapter, i);
    status = sp_layout_pack_sites(layout, sites, n_sites, &digest, out_image, error);
    sp_free(sites);
    return status;
}
