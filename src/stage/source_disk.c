/* source_disk.c: adapters from directories. Only reads its own state, so loaders share it. */
#include "base/alloc.h"
#include "base/error.h"

#include <sidepath/stage.h>

typedef struct disk_source {
    sp_adapter_options options; /* strings owned, geometry retained */
    char *base_dir;
    sp_module_set supported;
} disk_source;

sp_status sp_adapter_check_modules(const sp_adapter *adapter, sp_module_set supported,
                                   sp_error *error)
{
    sp_module_set missing = sp_adapter_modules(adapter) & ~supported;

    const char *name;

    if (missing == 0)
        return SP_OK;
    name = sp_geometry_module_name(sp_adapter_geometry(adapter), __builtin_ctzll(missing));
    return sp_fail(error, SP_ERR_UNSUPPORTED, "engine-unsupported", name, -1,
                   "adapter %s adapts %s, which this build's engine cannot apply yet",
                   sp_adapter_name(adapter), name);
}

static size_t factor_bytes(const sp_factor *factor)
{
    return (size_t)factor->rows * (size_t)factor->cols * sp_dtype_bytes(factor->dtype);
}

static sp_status copy_receipt(const sp_adapter *adapter, char **out_json, sp_error *error)
{
    sp_receipt_options options;
    sp_receipt *receipt;
    sp_status status;

    sp_receipt_options_default(&options, sizeof options);
    status = sp_receipt_create(adapter, &options, &receipt, error);
    if (status != SP_OK)
        return status;
    *out_json = sp_strdup(sp_receipt_json(receipt));
    sp_receipt_destroy(receipt);
    return *out_json != NULL ? SP_OK : sp_fail_memory(error, 1, "a receipt");
}

sp_status sp_adapter_facts_of(const sp_adapter *adapter, sp_adapter_facts *out_facts,
                              sp_error *error)
{
    sp_adapter_facts facts = {
        .rank = sp_adapter_rank_max(adapter),
        .sites = (int32_t)sp_adapter_n_sites(adapter),
    };
    sp_status status = copy_receipt(adapter, &facts.receipt, error);

    if (status != SP_OK)
        return status;

    for (size_t i = 0; i < sp_adapter_n_sites(adapter); i++) {
        const sp_adapter_site *site = sp_adapter_site_at(adapter, i);

        /* One column of A is all that a token reads. */
        int32_t inputs = site->kind == SP_SITE_EMBEDDING ? 0 : site->a.cols;

        facts.file_bytes += factor_bytes(&site->a) + factor_bytes(&site->b);
        facts.row_macs += (double)site->rank * ((double)inputs + (double)site->b.rows);
    }
    for (size_t i = 0; i < sp_adapter_n_tables(adapter); i++) {
        const sp_adapter_table *table = sp_adapter_table_at(adapter, i);

        facts.file_bytes += factor_bytes(&table->full) + factor_bytes(&table->trainable);
    }
    *out_facts = facts;
    return SP_OK;
}

void sp_adapter_facts_clear(sp_adapter_facts *facts)
{
    sp_free(facts->receipt);
    *facts = (sp_adapter_facts){0};
}

static sp_status fetch(void *user, const char *name, const char *location, const sp_layout *layout,
                       sp_image **out_image, sp_adapter_facts *out_facts, sp_error *error)
{
    const disk_source *disk = user;
    sp_adapter_options options = disk->options;
    sp_adapter_facts facts = {0};
    sp_adapter *adapter;
    sp_status status;

    options.name = name;
    status = sp_adapter_open(location, &options, &adapter, error);
    if (status != SP_OK)
        return status;
    status = sp_adapter_check_modules(adapter, disk->supported, error);
    if (status == SP_OK)
        status = sp_adapter_facts_of(adapter, &facts, error);
    if (status == SP_OK)
        status = sp_layout_pack(layout, adapter, NULL, out_image, error);
    if (status == SP_OK)
        *out_facts = facts;
    else
        sp_adapter_facts_clear(&facts);
    sp_adapter_release(adapter);
    return status;
}

sp_status sp_disk_source_create(const sp_adapter_options *options, sp_module_set supported,
                                sp_stage_source *out_source)
{
    disk_source *disk = sp_calloc(1, sizeof *disk);

    if (disk == NULL)
        return SP_ERR_MEMORY;
    disk->options = *options;
    disk->options.exec = NULL; /* which loader threads could not share */
    disk->supported = supported;
    if (options->base_dir != NULL) {
        disk->base_dir = sp_strdup(options->base_dir);
        if (disk->base_dir == NULL) {
            sp_free(disk);
            return SP_ERR_MEMORY;
        }
    }
    disk->options.base_dir = disk->base_dir;
    if (options->geometry != NULL)
        sp_geometry_retain(options->geometry);
    *out_source = (sp_stage_source){disk, fetch};
    return SP_OK;
}

void sp_disk_source_destroy(sp_stage_source *source)
{
    disk_source *disk = source->user;

    if (disk == NULL)
        return;
    sp_geometry_release(disk->options.geometry);
    sp_free(disk->base_dir);
    sp_free(disk);
    *source = (sp_stage_source){NULL, NULL};
}
