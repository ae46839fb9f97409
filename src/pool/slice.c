/*
 * slice.c: slices of sites. They are listed in the order of sites, so that a site given twice is
 * next to itself, and a layout is built in one walk over both lists.
 */
#include "pool/slice.h"

#include "base/error.h"
#include "base/grow.h"

static sp_status read_slice(const sp_layout_options *options, size_t index, sp_site_slice *out,
                            sp_error *error)
{
    *out = (sp_site_slice){.struct_bytes = sizeof *out};
    return sp_struct_read_at(out, sizeof *out, options->slices, index, "sp_site_slice", error);
}

static sp_status bad_range(const sp_site *row, size_t index, const char *what, int32_t begin,
                           int32_t end, int32_t n, sp_error *error)
{
    return sp_fail(error, SP_ERR_ARGUMENT, "bad-slice", row->path, (int64_t)index,
                   "slice %zu: %s %d to %d are no range of the site's %d", index, what, (int)begin,
                   (int)end, (int)n);
}

static bool is_range(int32_t begin, int32_t end, int32_t n)
{
    return (begin == 0 && end == 0) || (begin >= 0 && begin < end && end <= n);
}

/* Checks the slice's site, which must come after the previous slice's. */
static sp_status check_site(const sp_layout_options *options, sp_module_set modules, size_t index,
                            int32_t site, int32_t before, sp_site *row, sp_error *error)
{
    if (site < 0 || site >= sp_geometry_n_sites(options->geometry))
        return sp_fail(error, SP_ERR_ARGUMENT, "bad-slice", "slices", (int64_t)index,
                       "slice %zu is of site %d, which the geometry does not have", index,
                       (int)site);
    (void)sp_geometry_site_at(options->geometry, site, row, NULL);
    if (site <= before)
        return sp_fail(error, SP_ERR_ARGUMENT, "bad-slice", row->path, (int64_t)index,
                       "slice %zu is of site %d, the one before it of %d: sites must ascend", index,
                       (int)site, (int)before);
    if ((modules >> sp_geometry_site_module(options->geometry, site) & 1u) == 0)
        return sp_fail(error, SP_ERR_ARGUMENT, "module-not-in-pool", row->path, (int64_t)index,
                       "slice %zu is of %s, which the layout does not hold", index, row->module);
    if (row->kind != SP_SITE_LINEAR)
        return sp_fail(error, SP_ERR_UNSUPPORTED, "slice-unsupported", row->path, (int64_t)index,
                       "slice %zu is of %s: only linear sites can be cut, embeddings and heads are "
                       "held whole",
                       index, row->module);
    return SP_OK;
}

static sp_status check_row_map(const sp_site_slice *slice, const sp_site *row, size_t index,
                               sp_error *error)
{
    int32_t n = slice->row_end == 0 ? row->n_out : slice->row_end - slice->row_begin;

    for (int32_t i = 0; slice->row_map != NULL && i < n; i++)
        if (slice->row_map[i] < 0 || slice->row_map[i] >= row->n_out)
            return sp_fail(error, SP_ERR_ARGUMENT, "bad-slice", row->path, (int64_t)index,
                           "slice %zu: row_map[%d] is %d, the site's rows are 0 to %d", index,
                           (int)i, (int)slice->row_map[i], (int)row->n_out - 1);
    return SP_OK;
}

sp_status sp_slices_check(const sp_layout_options *options, sp_module_set modules, sp_error *error)
{
    int32_t before = -1;

    if (options->n_slices > 0 && options->slices == NULL)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "slices", -1,
                       "there are %zu slices, but slices is NULL", options->n_slices);
    for (size_t i = 0; i < options->n_slices; i++) {
        sp_site row = {.struct_bytes = sizeof row};
        sp_site_slice slice;
        sp_status status = read_slice(options, i, &slice, error);

        if (status == SP_OK)
            status = check_site(options, modules, i, slice.site, before, &row, error);
        if (status != SP_OK)
            return status;
        if (!is_range(slice.row_begin, slice.row_end, row.n_out))
            return bad_range(&row, i, "rows", slice.row_begin, slice.row_end, row.n_out, error);
        if (!is_range(slice.col_begin, slice.col_end, row.k_in))
            return bad_range(&row, i, "columns", slice.col_begin, slice.col_end, row.k_in, error);
        status = check_row_map(&slice, &row, i, error);
        if (status != SP_OK)
            return status;
        before = slice.site;
    }
    return SP_OK;
}

sp_site_part sp_slices_part(const sp_layout_options *options, int32_t site, const sp_site *row,
                            size_t *io_next)
{
    sp_site_part part = {.n_out = row->n_out, .k_in = row->k_in};

    while (*io_next < options->n_slices) {
        sp_site_slice slice;

        (void)read_slice(options, *io_next, &slice, NULL);
        if (slice.site > site)
            break;
        ++*io_next;
        if (slice.site < site)
            continue;
        if (slice.row_end > 0) {
            part.row_begin = slice.row_begin;
            part.n_out = slice.row_end - slice.row_begin;
        }
        if (slice.col_end > 0) {
            part.col_begin = slice.col_begin;
            part.k_in = slice.col_end - slice.col_begin;
        }
        part.row_map = slice.row_map;
    }
    return part;
}
