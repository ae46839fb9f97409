/*
 * sites.c: from checked pairs to the adapter's sites, in order, and whether they have any effect.
 */
#include "adapter/audit.h"
#include "adapter/values.h"

#include "base/alloc.h"
#include "base/half.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static sp_factor factor_of(const sp_item *item)
{
    return (sp_factor){.data = item->data,
                       .dtype = item->dtype,
                       .rows = (int32_t)item->tensor->dims[0],
                       .cols = (int32_t)item->tensor->dims[1],
                       .row_stride = item->tensor->dims[1],
                       .col_stride = 1};
}

static int by_site(const void *left, const void *right)
{
    const sp_adapter_site *a = left;
    const sp_adapter_site *b = right;

    return (a->site > b->site) - (a->site < b->site);
}

static size_t n_sites_of(const sp_pair *pair)
{
    return pair->a->key.fused == SP_FUSED_NONE ? 1 : sp_fused_n_sites(pair);
}

static void fill_sites(const sp_audit *audit, const sp_pair *pair, sp_adapter_site *out_sites)
{
    const sp_geometry *geometry = audit->options->geometry;
    const sp_module_key *key = &pair->a->key;

    if (key->fused != SP_FUSED_NONE) {
        sp_fused_sites(audit, pair, out_sites);
        return;
    }
    *out_sites = (sp_adapter_site){.struct_bytes = sizeof *out_sites,
                                   .site = key->site,
                                   .layer = key->layer,
                                   .expert = key->expert,
                                   .kind = key->kind,
                                   .rank = pair->rank,
                                   .scale = pair->scale,
                                   .a = factor_of(pair->a),
                                   .b = factor_of(pair->b)};
    if (geometry) {
        const sp_site_row *row = sp_geometry_row(geometry, key->site);

        out_sites->path = sp_geometry_path(geometry, row);
        out_sites->module = sp_geometry_module_name(geometry, row->module);
    } else {
        out_sites->module = sp_module_name(key->module);
    }
}

/* Without a geometry paths come from the file: copies them into one block of the adapter. */
static sp_status keep_paths(const sp_audit *audit)
{
    sp_adapter *adapter = audit->adapter;
    size_t bytes = 0, n = 0;
    char *at;

    for (size_t i = 0; i < audit->n_pairs; i++)
        bytes += audit->pairs[i].a->key.path_bytes + 1;
    adapter->paths = at = sp_malloc(bytes);
    if (!at)
        return sp_fail_memory(audit->error, bytes, "the paths of sites");
    for (size_t i = 0; i < audit->n_pairs; i++) {
        const sp_module_key *key = &audit->pairs[i].a->key;

        if (n_sites_of(&audit->pairs[i]) == 0)
            continue; /* fused: how many experts is not known */
        memcpy(at, key->path, key->path_bytes);
        at[key->path_bytes] = '\0';
        adapter->sites[n++].path = at;
        at += key->path_bytes + 1;
    }
    return SP_OK;
}

/* Refuses an expert that occurs by itself and again in a fused pair. */
static sp_status check_twins(const sp_audit *audit)
{
    const sp_adapter_site *sites = audit->adapter->sites;

    for (size_t i = 1; i < audit->adapter->n_sites; i++) {
        if (by_site(&sites[i - 1], &sites[i]) == 0)
            return sp_refuse(audit->error, SP_REASON_DUPLICATE_TENSOR, sites[i].module,
                             sites[i].layer, "layer %d, %.100s, expert %d is adapted by two pairs",
                             sites[i].layer, sites[i].module, sites[i].expert);
    }
    return SP_OK;
}

/* Fused pairs give sites only if the base's number of experts is known. */
static void remark_uncounted(const sp_audit *audit)
{
    const sp_pair *first = NULL;
    size_t n = 0;

    for (size_t i = 0; i < audit->n_pairs; i++) {
        const sp_pair *pair = &audit->pairs[i];

        if (pair->a->key.fused == SP_FUSED_NONE || pair->experts > 0)
            continue;
        if (n++ == 0)
            first = pair;
    }
    if (n > 0)
        sp_remark(&audit->adapter->notes,
                  "%zu fused expert pairs (the first: rank %d, scale %.7g) are not listed: their "
                  "number of experts is not known without a base model",
                  n, first->rank, (double)first->scale);
}

static void add_modules(const sp_audit *audit, const sp_pair *pair)
{
    static const sp_module experts[] = {SP_MODULE_EXPERT_GATE_PROJ, SP_MODULE_EXPERT_UP_PROJ};
    sp_adapter *adapter = audit->adapter;
    sp_module_key key = pair->a->key;

    if (key.fused == SP_FUSED_NONE) {
        adapter->modules |= sp_audit_module_bit(adapter, &key);
        return;
    }
    for (int i = 0; i < (pair->is_down ? 1 : 2) && pair->experts > 0; i++) {
        sp_module module = pair->is_down ? SP_MODULE_EXPERT_DOWN_PROJ : experts[i];

        key.site = sp_geometry_known_site(adapter->geometry, key.layer, module, 0);
        adapter->modules |= sp_audit_module_bit(adapter, &key);
    }
}

sp_status sp_audit_sites(sp_audit *audit)
{
    sp_adapter *adapter = audit->adapter;
    size_t n = 0;

    for (size_t i = 0; i < audit->n_pairs; i++)
        n += n_sites_of(&audit->pairs[i]);
    remark_uncounted(audit);
    if (n == 0)
        return SP_OK;
    adapter->sites = sp_calloc(n, sizeof *adapter->sites);
    if (!adapter->sites)
        return sp_fail_memory(audit->error, n * sizeof *adapter->sites, "the sites");
    for (size_t i = 0; i < audit->n_pairs; i++) {
        fill_sites(audit, &audit->pairs[i], adapter->sites + adapter->n_sites);
        adapter->n_sites += n_sites_of(&audit->pairs[i]);
    }
    for (size_t i = 0; i < audit->n_pairs; i++)
        add_modules(audit, &audit->pairs[i]);
    if (!adapter->geometry)
        return keep_paths(audit); /* the pairs' order is the sites' */
    qsort(adapter->sites, n, sizeof *adapter->sites, by_site);
    return check_twins(audit);
}

/* ---- does it do anything? -------------------------------------------------------------------- */

double sp_factor_value(const sp_factor *factor, int64_t row, int64_t col, sp_dtype pool)
{
    float value = sp_values_at(factor->data, factor->dtype,
                               row * factor->row_stride + col * factor->col_stride);

    if (pool == SP_DTYPE_BF16)
        value = sp_bf16_to_f32(sp_f32_to_bf16(value));
    if (pool == SP_DTYPE_F16)
        value = sp_f16_to_f32(sp_f32_to_f16(value));
    return (double)value;
}

/*
 * Whether one element of B·A is certainly not zero, whatever the rounding. Products of two FP32
 * numbers are exact in double; adding them is not.
 */
static bool surely_not_zero(const sp_adapter_site *site, int64_t row, int64_t col, sp_dtype pool)
{
    double sum = 0, size = 0;

    for (int32_t j = 0; j < site->rank; j++) {
        double product =
            sp_factor_value(&site->b, row, j, pool) * sp_factor_value(&site->a, j, col, pool);

        sum += product;
        size += fabs(product);
    }
    return fabs(sum) > size * site->rank * 0x1p-50;
}

/* Trained factors are found non-zero at the first element. */
static bool quick_look(const sp_adapter_site *site, sp_dtype pool)
{
    for (int32_t i = 0; i < 8; i++) {
        int64_t row = (int64_t)i * (site->b.rows - 1) / 7;
        int64_t col = (int64_t)i * (site->a.cols - 1) / 7;

        if (surely_not_zero(site, row, col, pool))
            return true;
    }
    return false;
}

#define PRIME ((UINT64_C(1) << 61) - 1)

__extension__ typedef unsigned __int128 wide;

static uint64_t times(uint64_t a, uint64_t b)
{
    wide product = (wide)a * b;
    uint64_t sum = (uint64_t)(product & PRIME) + (uint64_t)(product >> 61);

    return sum >= PRIME ? sum - PRIME : sum;
}

static uint64_t plus(uint64_t a, uint64_t b)
{
    uint64_t sum = a + b;

    return sum >= PRIME ? sum - PRIME : sum;
}

/* A float as an element of the field of PRIME elements: ±m · 2^e, where 2^61 = 1. */
static uint64_t residue(double value)
{
    int exponent;
    int64_t mantissa = (int64_t)ldexp(frexp(fabs(value), &exponent), 24);
    uint64_t shifted = times((uint64_t)mantissa, UINT64_C(1) << ((exponent - 24 + 61 * 8) % 61));

    return value < 0 && shifted != 0 ? PRIME - shifted : shifted;
}

/* SplitMix64: a pseudo-random number for each column, the same in every run. */
static uint64_t some_number(uint64_t index)
{
    uint64_t z = (index + 1) * UINT64_C(0x9e3779b97f4a7c15);

    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return (z ^ (z >> 31)) % PRIME;
}

/*
 * Whether B·A is zero: B·(A·v) for a vector v, in exact arithmetic modulo a prime, so that factors
 * that cancel are detected in the time of reading them once. A zero product gives zero; a non-zero
 * one gives zero with probability 2^-60.
 */
static sp_status product_is_zero(const sp_adapter_site *site, sp_dtype pool, bool *out_zero,
                                 sp_error *error)
{
    uint64_t *av = sp_calloc((size_t)site->rank, sizeof *av);

    if (!av)
        return sp_fail_memory(error, (size_t)site->rank * sizeof *av, "a column of ranks");
    for (int32_t j = 0; j < site->rank; j++) {
        for (int32_t k = 0; k < site->a.cols; k++)
            av[j] = plus(av[j], times(residue(sp_factor_value(&site->a, j, k, pool)),
                                      some_number((uint64_t)k)));
    }
    *out_zero = true;
    for (int32_t n = 0; n < site->b.rows && *out_zero; n++) {
        uint64_t sum = 0;

        for (int32_t j = 0; j < site->rank; j++)
            sum = plus(sum, times(residue(sp_factor_value(&site->b, n, j, pool)), av[j]));
        *out_zero = sum == 0;
    }
    sp_free(av);
    return SP_OK;
}

sp_status sp_sites_have_effect(const sp_adapter *adapter, sp_dtype pool, bool *out_effect,
                               sp_error *error)
{
    *out_effect = true;
    for (size_t i = 0; i < adapter->n_sites; i++) {
        if (quick_look(&adapter->sites[i], pool))
            return SP_OK;
    }
    for (size_t i = 0; i < adapter->n_sites; i++) {
        bool zero = true;
        sp_status status = product_is_zero(&adapter->sites[i], pool, &zero, error);

        if (status != SP_OK || !zero)
            return status;
    }
    *out_effect = false;
    return SP_OK;
}

sp_status sp_audit_effect(sp_audit *audit, bool has_rows)
{
    const sp_adapter *adapter = audit->adapter;
    bool effect;
    sp_status status;

    if (has_rows || audit->options->allow_no_effect)
        return SP_OK;
    if (adapter->n_sites == 0 && audit->n_pairs > 0)
        return SP_OK; /* fused pairs without a geometry: not known */
    status = sp_sites_have_effect(adapter, audit->options->pool_dtype, &effect, audit->error);
    if (status != SP_OK || effect)
        return status;
    return sp_refuse(audit->error, SP_REASON_NO_EFFECT, NULL, -1,
                     "every product B·A is zero and no row is replaced: the adapter would change "
                     "nothing; allow-no-effect takes it");
}
