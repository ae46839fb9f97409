#include "pool/pack_check.h"

#include "base/error.h"
#include "pool/image.h"

#include <math.h>
#include <string.h>

/* ---- where --------------------------------------------------------------------------------- */

const char *sp_pack_site_name(const sp_adapter_site *site)
{
    if (site->module != NULL)
        return site->module;
    return site->path != NULL ? site->path : "unknown module";
}

/* Checks against the whole site, of which the layout may hold a slice. */
static sp_status check_dims(const sp_site *row, const sp_adapter_site *site, sp_error *error)
{
    if (site->a.rows == site->rank && site->a.cols == row->k_in && site->b.rows == row->n_out &&
        site->b.cols == site->rank && site->rank >= 1)
        return SP_OK;
    return sp_fail(error, SP_ERR_MISMATCH, "shape-mismatch", sp_pack_site_name(site), site->layer,
                   "layer %d: lora_A [%d, %d] and lora_B [%d, %d] of rank %d do not fit a module "
                   "of %d inputs and %d outputs",
                   (int)site->layer, (int)site->a.rows, (int)site->a.cols, (int)site->b.rows,
                   (int)site->b.cols, (int)site->rank, (int)row->k_in, (int)row->n_out);
}

/* Scale and dimensions, for a pair whose place was found. */
static sp_status check_pair(const sp_layout *layout, int32_t geometry_site,
                            const sp_adapter_site *site, sp_error *error)
{
    sp_site row = {.struct_bytes = sizeof row};

    if (!isfinite(site->scale))
        return sp_fail(error, SP_ERR_REFUSED, "non-finite", sp_pack_site_name(site), site->layer,
                       "the scale of layer %d is not finite", (int)site->layer);
    (void)sp_geometry_site_at(sp_layout_geometry(layout), geometry_site, &row, NULL);
    return check_dims(&row, site, error);
}

/* Whether the layout holds the module with this name in any layer. */
static bool holds_module(const sp_layout *layout, const char *name)
{
    const sp_geometry *geometry = sp_layout_geometry(layout);

    for (int32_t m = 0; m < sp_geometry_n_modules(geometry); m++) {
        if (strcmp(sp_geometry_module_name(geometry, m), name) == 0)
            return (sp_layout_modules(layout) >> m & 1u) != 0;
    }
    return false;
}

static sp_status locate_in_slot(const sp_layout *layout, int32_t geometry_site,
                                const sp_adapter_site *site, sp_pack_target *out_target,
                                sp_error *error)
{
    const char *name = sp_pack_site_name(site);
    int32_t index = sp_layout_find(layout, geometry_site);

    if (index < 0 && holds_module(layout, name))
        return sp_fail(error, SP_ERR_MISMATCH, "wrong-layer-kind", name, site->layer,
                       "layer %d of the base model has no %s", (int)site->layer, name);
    if (index < 0)
        return sp_fail(error, SP_ERR_REFUSED, "module-not-in-pool", name, site->layer,
                       "the adapter adapts %s, which the pool does not hold; add it to "
                       "lora-modules",
                       name);
    if (site->rank > sp_layout_rank_stride(layout))
        return sp_fail(error, SP_ERR_TOO_LARGE, "rank-exceeds-pool", name, site->layer,
                       "rank %d is above the pool's %d; raise max-lora-rank", (int)site->rank,
                       (int)sp_layout_rank_stride(layout));
    *out_target = (sp_pack_target){.site = index, .place = -1, .expert = -1};
    return check_pair(layout, geometry_site, site, error);
}

/* Why the geometry has no such router or expert. */
static const char *missing_code(const sp_layout *layout, sp_site_kind kind)
{
    if (sp_layout_n_expert_places(layout) == 0)
        return "expert-on-dense-model";
    return kind == SP_SITE_EXPERT ? "expert-out-of-range" : "wrong-layer-kind";
}

static sp_status locate_apart(const sp_layout *layout, int32_t geometry_site,
                              const sp_adapter_site *site, sp_pack_target *out_target,
                              sp_error *error)
{
    const char *name = sp_pack_site_name(site);
    sp_site row = {.struct_bytes = sizeof row};
    sp_pack_target target = {.site = -1, .place = -1, .expert = -1, .apart = true};

    if (sp_layout_expert_rank(layout) == 0)
        return sp_fail(error, SP_ERR_REFUSED, "experts-disabled", name, site->layer,
                       "adapters of router and experts are switched off (experts)");
    if (geometry_site < 0)
        return sp_fail(error, SP_ERR_MISMATCH, missing_code(layout, site->kind), name, site->layer,
                       "layer %d of the base model has no %s", (int)site->layer,
                       site->path != NULL ? site->path : name);
    (void)sp_geometry_site_at(sp_layout_geometry(layout), geometry_site, &row, NULL);
    if (row.kind == SP_SITE_ROUTER) {
        target.site = sp_layout_find(layout, geometry_site);
    } else {
        target.place = sp_layout_find_expert_place(layout, geometry_site);
        target.expert = row.expert;
    }
    if (site->rank > sp_layout_expert_rank(layout))
        return sp_fail(error, SP_ERR_TOO_LARGE, "expert-rank-exceeds-cap", name, site->layer,
                       "rank %d is above the experts' %d; raise max-lora-expert-rank",
                       (int)site->rank, (int)sp_layout_expert_rank(layout));
    *out_target = target;
    return check_pair(layout, geometry_site, site, error);
}

sp_status sp_pack_locate(const sp_layout *layout, const sp_adapter_site *site,
                         sp_pack_target *out_target, sp_error *error)
{
    int32_t geometry_site = sp_geometry_find(sp_layout_geometry(layout), site->path);
    sp_site row = {.struct_bytes = sizeof row, .kind = site->kind};

    if (geometry_site >= 0)
        (void)sp_geometry_site_at(sp_layout_geometry(layout), geometry_site, &row, NULL);
    if (row.kind == SP_SITE_ROUTER || row.kind == SP_SITE_EXPERT)
        return locate_apart(layout, geometry_site, site, out_target, error);
    return locate_in_slot(layout, geometry_site, site, out_target, error);
}

sp_status sp_layout_check_site(const sp_layout *layout, const sp_adapter_site *site,
                               sp_error *error)
{
    sp_pack_target target;

    return sp_pack_locate(layout, site, &target, error);
}

sp_status sp_pack_twice(const sp_adapter_site *site, sp_error *error)
{
    return sp_fail(error, SP_ERR_REFUSED, "duplicate-tensor", sp_pack_site_name(site), site->layer,
                   "layer %d has this module twice", (int)site->layer);
}

/* ---- failures ------------------------------------------------------------------------------ */

void sp_pack_failure_start(sp_pack_failure *failure)
{
    *failure = (sp_pack_failure){.order = INT64_MAX};
    pthread_mutex_init(&failure->mutex, NULL);
}

void sp_pack_failure_overflow(sp_pack_failure *failure, int64_t order, const sp_adapter_site *site,
                              char letter, int64_t index, sp_dtype dtype)
{
    const sp_factor *factor = letter == 'A' ? &site->a : &site->b;

    pthread_mutex_lock(&failure->mutex);
    if (order < failure->order) {
        failure->order = order;
        failure->status =
            sp_fail(&failure->error, SP_ERR_REFUSED, "non-finite", sp_pack_site_name(site), index,
                    "lora_%c [%d, %d] is too large for %s", letter, (int)(index / factor->cols),
                    (int)(index % factor->cols), sp_dtype_name(dtype));
    }
    pthread_mutex_unlock(&failure->mutex);
}

sp_status sp_pack_failure_end(sp_pack_failure *failure, sp_error *error)
{
    pthread_mutex_destroy(&failure->mutex);
    if (failure->status != SP_OK && error != NULL)
        *error = failure->error;
    return failure->status;
}
