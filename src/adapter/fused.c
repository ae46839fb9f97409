/*
 * fused.c: pairs on the fused expert parameters, as PEFT's target_parameters write them.
 *
 * One pair holds all experts: A [E·r, in] has row e·r + j, B [out, E·r] has column j·E + e (some
 * trainers wrote e·r + j, and mark it). With both parameters adapted, gate_up is the inner pair
 * (experts.base_layer) and down the outer one; alone, either is the outer one, and only the config
 * or the shapes tell which. PEFT 0.18 swapped input and output of a 3-D parameter: its A reads the
 * output, and the delta is the transpose.
 */
#include "adapter/audit.h"

#include <stdio.h>
#include <string.h>

typedef struct reading {
    bool is_down, is_swapped;
} reading;

typedef struct expert_dims {
    int32_t hidden, intermediate, experts;
} expert_dims;

static bool known_dims(const sp_audit *audit, int32_t layer, expert_dims *out_dims)
{
    const sp_geometry *geometry = audit->options->geometry;
    int32_t site =
        geometry ? sp_geometry_known_site(geometry, layer, SP_MODULE_EXPERT_GATE_PROJ, 0) : -1;
    const sp_site_row *row;

    if (site < 0)
        return false;
    row = sp_geometry_row(geometry, site);
    out_dims->hidden = row->k_in;
    out_dims->intermediate = row->n_out;
    out_dims->experts = sp_geometry_experts(geometry);
    return true;
}

/* Input and output width of the parameter in this reading. */
static void widths(const expert_dims *dims, reading how, int64_t *out_in, int64_t *out_out)
{
    int64_t in = how.is_down ? dims->intermediate : dims->hidden;
    int64_t out = how.is_down ? dims->hidden : 2 * (int64_t)dims->intermediate;

    *out_in = how.is_swapped ? out : in;
    *out_out = how.is_swapped ? in : out;
}

static bool fits(const sp_pair *pair, const expert_dims *dims, reading how)
{
    int64_t in, out;

    widths(dims, how, &in, &out);
    return pair->a->tensor->dims[1] == in && pair->b->tensor->dims[0] == out;
}

/* The readings that the config leaves open, at most four. */
static int open_readings(const sp_audit *audit, const sp_pair *pair, bool has_sibling,
                         reading out_readings[4])
{
    bool gate_up = true, down = true, linear = true, swapped = true;
    int n = 0;

    if (pair->a->key.fused == SP_FUSED_INNER) {
        down = false;
    } else if (has_sibling) {
        gate_up = false;
    } else if (audit->config.lists_gate_up != audit->config.lists_down) {
        gate_up = audit->config.lists_gate_up;
        down = audit->config.lists_down;
    }
    if (audit->options->expert_layout != SP_EXPERT_LAYOUT_AUTO) {
        linear = audit->options->expert_layout == SP_EXPERT_LAYOUT_LINEAR;
        swapped = !linear;
    } else if (audit->config.orientation != SP_ORIENTATION_UNKNOWN) {
        linear = audit->config.orientation == SP_ORIENTATION_LINEAR;
        swapped = !linear;
    }
    for (int is_down = 0; is_down < 2; is_down++) {
        for (int is_swapped = 0; is_swapped < 2; is_swapped++) {
            if ((is_down ? down : gate_up) && (is_swapped ? swapped : linear))
                out_readings[n++] = (reading){is_down != 0, is_swapped != 0};
        }
    }
    return n;
}

static sp_status refuse_shapes(const sp_audit *audit, const sp_pair *pair, const expert_dims *dims,
                               reading how)
{
    int64_t in, out;

    widths(dims, how, &in, &out);
    return sp_refuse(audit->error, SP_REASON_SHAPE_MISMATCH, pair->a->tensor->name, -1,
                     "%.150s is [%lld, %lld] and its lora_B [%lld, %lld]; the base model's "
                     "experts (%d of %d by %d) want [E r, %lld] and [%lld, E r] for %s",
                     pair->a->tensor->name, (long long)pair->a->tensor->dims[0],
                     (long long)pair->a->tensor->dims[1], (long long)pair->b->tensor->dims[0],
                     (long long)pair->b->tensor->dims[1], dims->experts, dims->intermediate,
                     dims->hidden, (long long)in, (long long)out,
                     how.is_down ? "down_proj" : "gate_up_proj");
}

static sp_status choose_by_shape(const sp_audit *audit, const sp_pair *pair, const sp_pair *sibling,
                                 const expert_dims *dims, const reading *readings, int n,
                                 reading *out_reading)
{
    int n_fitting = 0;

    for (int i = 0; i < n; i++) {
        reading other = {!readings[i].is_down, readings[i].is_swapped};

        if (!fits(pair, dims, readings[i]) || (sibling && !fits(sibling, dims, other)))
            continue;
        *out_reading = readings[i];
        n_fitting++;
    }
    if (n_fitting == 0)
        return refuse_shapes(audit, pair, dims, readings[0]);
    if (n_fitting > 1)
        return sp_refuse(audit->error, SP_REASON_AMBIGUOUS_EXPERT_LAYOUT, pair->a->tensor->name, -1,
                         "%.150s can be read in %d ways that fit the shapes; peft_version or "
                         "target_parameters in adapter_config.json, or expert-layout, would tell",
                         pair->a->tensor->name, n_fitting);
    return SP_OK;
}

static sp_status check_ranks(const sp_audit *audit, const sp_pair *pair)
{
    const int64_t rows = pair->a->tensor->dims[0];
    const int64_t cols = pair->b->tensor->dims[1];
    bool fitting =
        pair->experts > 0 ? rows == (int64_t)pair->experts * pair->rank : rows % pair->rank == 0;

    if (rows != cols)
        return sp_refuse(audit->error, SP_REASON_SHAPE_MISMATCH, pair->b->tensor->name, -1,
                         "%.150s has %lld rows, but %.150s has %lld columns", pair->a->tensor->name,
                         (long long)rows, pair->b->tensor->name, (long long)cols);
    if (!fitting && pair->experts == 0)
        return sp_refuse(audit->error, SP_REASON_RANK_MISMATCH, pair->a->tensor->name, -1,
                         "%.200s has %lld rows, no multiple of rank %d (adapter_config.json)",
                         pair->a->tensor->name, (long long)rows, pair->rank);
    if (!fitting)
        return sp_refuse(audit->error, SP_REASON_RANK_MISMATCH, pair->a->tensor->name, -1,
                         "%.200s has %lld rows; %d experts of rank %d (adapter_config.json) have "
                         "%lld",
                         pair->a->tensor->name, (long long)rows, pair->experts, pair->rank,
                         (long long)pair->experts * pair->rank);
    return SP_OK;
}

/* A host's geometry may lack an expert that the tensor has. */
static sp_status check_experts(const sp_audit *audit, const sp_pair *pair)
{
    const sp_geometry *geometry = audit->options->geometry;
    int32_t layer = pair->a->key.layer;

    for (int32_t e = 0; e < pair->experts; e++) {
        bool complete =
            pair->is_down
                ? sp_geometry_known_site(geometry, layer, SP_MODULE_EXPERT_DOWN_PROJ, e) >= 0
                : sp_geometry_known_site(geometry, layer, SP_MODULE_EXPERT_GATE_PROJ, e) >= 0 &&
                      sp_geometry_known_site(geometry, layer, SP_MODULE_EXPERT_UP_PROJ, e) >= 0;

        if (!complete)
            return sp_refuse(audit->error, SP_REASON_EXPERT_OUT_OF_RANGE, pair->a->tensor->name, e,
                             "%.200s: the geometry has %d experts, but layer %d lacks sites of "
                             "expert %d",
                             pair->a->tensor->name, pair->experts, layer, e);
    }
    return SP_OK;
}

/* Patterns are matched against the parameter's path. */
static sp_status parameter_scale(const sp_audit *audit, sp_pair *pair)
{
    const sp_module_key *key = &pair->a->key;
    size_t n = key->path_bytes;
    char path[512];

    if (key->fused == SP_FUSED_INNER)
        n -= strlen(".base_layer");
    snprintf(path, sizeof path, "%.*s.%s", (int)(n < 400 ? n : 400), key->path,
             pair->is_down ? "down_proj" : "gate_up_proj");
    return sp_peft_config_scale(&audit->config, path, strlen(path), &pair->rank, &pair->scale,
                                audit->error);
}

sp_status sp_audit_fused(sp_audit *audit, sp_pair *pair, const sp_pair *sibling)
{
    reading readings[4];
    reading chosen;
    expert_dims dims;
    int n = open_readings(audit, pair, sibling != NULL, readings);
    sp_status status;

    chosen = readings[0];
    pair->is_settled = n == 1;
    if (known_dims(audit, pair->a->key.layer, &dims)) {
        status = choose_by_shape(audit, pair, sibling, &dims, readings, n, &chosen);
        if (status != SP_OK)
            return status;
        pair->is_settled = true;
        pair->experts = dims.experts;
    }
    pair->is_down = chosen.is_down;
    pair->is_swapped = chosen.is_swapped;
    status = check_experts(audit, pair);
    if (status == SP_OK)
        status = parameter_scale(audit, pair);
    return status == SP_OK ? check_ranks(audit, pair) : status;
}

/* ---- views ----------------------------------------------------------------------------------- */

size_t sp_fused_n_sites(const sp_pair *pair)
{
    return (size_t)pair->experts * (pair->is_down ? 1 : 2);
}

static const void *element_at(const sp_item *item, int64_t index)
{
    return (const char *)item->data + index * (int64_t)sp_dtype_bytes(item->dtype);
}

/* Row e·r + j of the file's A, as a [rank, width] matrix. */
static sp_factor view_of_rows(const sp_pair *pair, int32_t expert)
{
    int64_t width = pair->a->tensor->dims[1];

    return (sp_factor){.data = element_at(pair->a, (int64_t)expert * pair->rank * width),
                       .dtype = pair->a->dtype,
                       .rows = pair->rank,
                       .cols = (int32_t)width,
                       .row_stride = width,
                       .col_stride = 1};
}

/* The expert's columns of the file's B, as a [width, rank] matrix. */
static sp_factor view_of_columns(const sp_audit *audit, const sp_pair *pair, int32_t expert)
{
    bool grouped = audit->config.columns == SP_COLUMNS_GROUPED_BY_EXPERT;

    return (sp_factor){.data = element_at(pair->b, grouped ? (int64_t)expert * pair->rank : expert),
                       .dtype = pair->b->dtype,
                       .rows = (int32_t)pair->b->tensor->dims[0],
                       .cols = pair->rank,
                       .row_stride = pair->b->tensor->dims[1],
                       .col_stride = grouped ? 1 : pair->experts};
}

static sp_factor transposed(sp_factor factor)
{
    return (sp_factor){.data = factor.data,
                       .dtype = factor.dtype,
                       .rows = factor.cols,
                       .cols = factor.rows,
                       .row_stride = factor.col_stride,
                       .col_stride = factor.row_stride};
}

/* `rows` rows from `first` on. */
static sp_factor slice(sp_factor factor, int32_t first, int32_t rows)
{
    factor.data = (const char *)factor.data +
                  first * factor.row_stride * (int64_t)sp_dtype_bytes(factor.dtype);
    factor.rows = rows;
    return factor;
}

/* Sets a site's fields from its row in the geometry. */
static void set_place(const sp_geometry *geometry, sp_module module, sp_adapter_site *site)
{
    const sp_site_row *row;

    site->site = sp_geometry_known_site(geometry, site->layer, module, site->expert);
    row = sp_geometry_row(geometry, site->site);
    site->path = sp_geometry_path(geometry, row);
    site->module = sp_geometry_module_name(geometry, row->module);
}

void sp_fused_sites(const sp_audit *audit, const sp_pair *pair, sp_adapter_site *out_sites)
{
    const sp_geometry *geometry = audit->options->geometry;

    for (int32_t e = 0; e < pair->experts; e++) {
        sp_factor a = view_of_rows(pair, e);
        sp_factor b = view_of_columns(audit, pair, e);
        sp_adapter_site site = {.struct_bytes = sizeof site,
                                .layer = pair->a->key.layer,
                                .expert = e,
                                .kind = SP_SITE_EXPERT,
                                .rank = pair->rank,
                                .scale = pair->scale};

        site.a = pair->is_swapped ? transposed(b) : a;
        b = pair->is_swapped ? transposed(a) : b;
        if (pair->is_down) {
            set_place(geometry, SP_MODULE_EXPERT_DOWN_PROJ, &site);
            site.b = b;
            *out_sites++ = site;
            continue;
        }
        set_place(geometry, SP_MODULE_EXPERT_GATE_PROJ, &site);
        site.b = slice(b, 0, b.rows / 2);
        *out_sites++ = site;
        set_place(geometry, SP_MODULE_EXPERT_UP_PROJ, &site);
        site.b = slice(b, b.rows / 2, b.rows / 2);
        *out_sites++ = site;
    }
}
