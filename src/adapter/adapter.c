/*
 * adapter.c: opening an adapter, and the getters of an open one.
 */
#include "adapter/files.h"
#include "adapter/intake_state.h"

#include "base/alloc.h"
#include "base/file.h"
#include "base/grow.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

void sp_adapter_options_default(sp_adapter_options *out_options, size_t struct_bytes)
{
    const sp_adapter_options defaults = {.struct_bytes = sizeof defaults,
                                         .pool_dtype = SP_DTYPE_BF16};

    sp_struct_default(out_options, struct_bytes, &defaults, sizeof defaults);
}

sp_status sp_adapter_options_read(const sp_adapter_options *options,
                                  sp_adapter_options *out_options, sp_error *error)
{
    sp_adapter_options read;
    sp_status status;

    sp_adapter_options_default(&read, sizeof read);
    status = sp_struct_read(&read, sizeof read, options, "sp_adapter_options", error);
    if (status != SP_OK)
        return status;
    if (sp_dtype_bytes(read.pool_dtype) == 0)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "pool_dtype", -1, "no such element type: %d",
                       (int)read.pool_dtype);
    if (read.rank_max < 0 || read.expert_rank_max < 0)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL,
                       read.rank_max < 0 ? "rank_max" : "expert_rank_max", -1,
                       "the largest rank that is taken is %d; it must be 0 or more",
                       (int)(read.rank_max < 0 ? read.rank_max : read.expert_rank_max));
    if ((int)read.expert_layout < 0 || read.expert_layout > SP_EXPERT_LAYOUT_SWAPPED)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "expert_layout", -1,
                       "no such layout of experts: %d", (int)read.expert_layout);
    *out_options = read;
    return SP_OK;
}

/* The last component of the resolved path; the path itself when it cannot be resolved. */
static char *folder_name(const char *path)
{
    char real[PATH_MAX];
    char *folder = NULL;
    const char *slash;
    char *name;

    if (!realpath(path, real))
        return sp_strdup(path);
    if (!sp_path_is_directory(real)) {
        folder = sp_path_folder(real);
        if (!folder)
            return NULL;
    }
    slash = strrchr(folder ? folder : real, '/');
    name = sp_strdup(slash && slash[1] != '\0' ? slash + 1 : path);
    sp_free(folder);
    return name;
}

/* ---- opening --------------------------------------------------------------------------------- */

static sp_status open_named(const char *path, const char *name, const sp_adapter_options *options,
                            sp_adapter **out_adapter, sp_error *error)
{
    sp_adapter_files files;
    sp_intake *intake;
    sp_status status = sp_adapter_files_open(path, &files, error);

    if (status != SP_OK)
        return status;
    status = sp_intake_begin(files.config, files.config_bytes,
                             &(sp_intake_origin){files.config_shown, files.note.data}, options,
                             name, &intake, error);
    if (status == SP_OK) {
        status = sp_intake_audit(intake, sp_checkpoint_at(files.checkpoint, 0),
                                 sp_checkpoint_n_tensors(files.checkpoint), error);
        if (status == SP_OK)
            status = sp_intake_read_files(intake, files.checkpoint, options->exec, error);
        if (status == SP_OK)
            status = sp_intake_finish(intake, out_adapter, error);
        sp_intake_destroy(intake);
    }
    sp_adapter_files_close(&files);
    return status;
}

sp_status sp_adapter_open(const char *path, const sp_adapter_options *options,
                          sp_adapter **out_adapter, sp_error *error)
{
    sp_adapter_options own;
    sp_status status;
    char *name;

    if (!path || !out_adapter)
        return sp_fail_null(error, path ? "out_adapter" : "path");
    status = sp_adapter_options_read(options, &own, error);
    if (status != SP_OK)
        return status;
    name = own.name ? sp_strdup(own.name) : folder_name(path);
    if (!name)
        return sp_fail_memory(error, strlen(path) + 1, "a name");
    status = open_named(path, name, &own, out_adapter, error);
    sp_free(name);
    return status;
}

/* ---- an open adapter ------------------------------------------------------------------------- */

sp_adapter *sp_adapter_retain(sp_adapter *adapter)
{
    atomic_fetch_add_explicit(&adapter->references, 1, memory_order_relaxed);
    return adapter;
}

void sp_adapter_release(sp_adapter *adapter)
{
    if (!adapter || atomic_fetch_sub_explicit(&adapter->references, 1, memory_order_acq_rel) != 1)
        return;
    sp_free(adapter->name);
    sp_aligned_free(adapter->data);
    sp_free(adapter->sites);
    sp_free(adapter->paths);
    sp_free(adapter->token_ids[0]);
    sp_free(adapter->token_ids[1]);
    sp_text_free(&adapter->notes.text);
    sp_text_free(&adapter->ignored.text);
    sp_geometry_release(adapter->geometry);
    sp_free(adapter);
}

const char *sp_adapter_name(const sp_adapter *adapter)
{
    return adapter->name;
}

sp_digest sp_adapter_digest(const sp_adapter *adapter)
{
    return adapter->digest;
}

size_t sp_adapter_n_sites(const sp_adapter *adapter)
{
    return adapter->n_sites;
}

const sp_adapter_site *sp_adapter_site_at(const sp_adapter *adapter, size_t index)
{
    return index < adapter->n_sites ? &adapter->sites[index] : NULL;
}

int32_t sp_adapter_rank_max(const sp_adapter *adapter)
{
    return adapter->rank_max;
}

sp_module_set sp_adapter_modules(const sp_adapter *adapter)
{
    return adapter->modules;
}

/* The share of a layer's experts that a row goes through. */
static double expert_share(const sp_geometry *geometry)
{
    const sp_model_shape *shape = geometry ? sp_geometry_shape(geometry) : NULL;

    return shape && shape->experts > 0 ? (double)shape->experts_per_token / shape->experts : 1;
}

double sp_adapter_row_macs(const sp_adapter *adapter)
{
    double of_all = 0, of_experts = 0;

    for (size_t i = 0; adapter && i < adapter->n_sites; i++) {
        const sp_adapter_site *site = &adapter->sites[i];
        /* One column of A is all that a token reads. */
        int32_t inputs = site->kind == SP_SITE_EMBEDDING ? 0 : site->a.cols;
        double macs = (double)site->rank * ((double)inputs + (double)site->b.rows);

        if (site->kind == SP_SITE_EXPERT)
            of_experts += macs;
        else
            of_all += macs;
    }
    return adapter ? of_all + of_experts * expert_share(adapter->geometry) : 0;
}

sp_geometry *sp_adapter_geometry(const sp_adapter *adapter)
{
    return adapter->geometry;
}

size_t sp_adapter_n_tables(const sp_adapter *adapter)
{
    return adapter->n_tables;
}

const sp_adapter_table *sp_adapter_table_at(const sp_adapter *adapter, size_t index)
{
    return index < adapter->n_tables ? &adapter->tables[index] : NULL;
}

size_t sp_adapter_overlay_bytes(const sp_adapter *adapter)
{
    return adapter->overlay_bytes;
}

double sp_adapter_hash_seconds(const sp_adapter *adapter)
{
    return adapter->hash_seconds;
}

sp_status sp_adapter_check_modules(const sp_adapter *adapter, sp_module_set supported,
                                   sp_error *error)
{
    sp_module_set missing;
    const char *name;

    if (adapter == NULL)
        return sp_fail_null(error, "adapter");
    missing = sp_adapter_modules(adapter) & ~supported;
    if (missing == 0)
        return SP_OK;
    name = sp_geometry_module_name(sp_adapter_geometry(adapter), __builtin_ctzll(missing));
    return sp_fail(error, SP_ERR_UNSUPPORTED, "engine-unsupported", name, -1,
                   "adapter %s adapts %s, which this build's engine cannot apply yet",
                   sp_adapter_name(adapter), name);
}
