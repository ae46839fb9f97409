/*
 * slice.h: which part of each site a layout holds, as its options say it.
 */
#ifndef SP_POOL_SLICE_H
#define SP_POOL_SLICE_H

#include <sidepath/pool.h>

/* A part of a site's B and A: rows of B, columns of A. */
typedef struct sp_site_part {
    int32_t row_begin, n_out;
    int32_t col_begin, k_in;
    const int32_t *row_map; /* [n_out] the row of the whole that each row is; NULL: row_begin + i */
} sp_site_part;

/*
 * Checks a layout's slices, with the statuses of sp_layout_create; error->position is the slice's
 * index. `modules` are those that the layout holds.
 */
sp_status sp_slices_check(const sp_layout_options *options, sp_module_set modules, sp_error *error);

/*
 * The part of a site according to options that have been checked. Sites must be passed in ascending
 * order; *io_next starts at 0. row_map belongs to the caller.
 */
sp_site_part sp_slices_part(const sp_layout_options *options, int32_t site, const sp_site *row,
                            size_t *io_next);

#endif
