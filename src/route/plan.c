/*
 * plan.c: the plan of one step. A build first checks everything, on values that it does not keep,
 * and only then writes; so a refusal leaves the plan as it was without a second copy of it. The
 * grouping is a counting sort by slot: rows keep their order inside a slot, and the cost is
 * rows + slots, whatever the mix.
 */
#include "base/alloc.h"
#include "base/error.h"

#include <sidepath/route.h>

#include <math.h>
#include <string.h>

#define ROWS_LIMIT        (1 << 20)
#define SLOTS_LIMIT       4096
#define REQUEST_SCALE_MAX 16.0f

struct sp_plan {
    int32_t rows_max, slots_max;
    int32_t n_rows, n_routed, n_segments, n_tiles;
    /* Cut out of `block`, in this order; the lengths are in sp_plan_create. */
    int32_t *seq_slot, *row_order;
    int32_t *tile_begin, *tile_rows, *tile_slot;
    int32_t *segment_slot, *slot_cursor, *segment_begin;
    float *row_scale; /* [rows_max] */
    int32_t *block;
};

/* ---- life ---------------------------------------------------------------------------------- */

static int32_t *take(int32_t **cursor, int32_t n)
{
    int32_t *taken = *cursor;

    *cursor += n;
    return taken;
}

/* Cuts the block into the plan's arrays: five of rows_max, two of slots_max, one of one more. */
static void cut_block(sp_plan *plan)
{
    int32_t *cursor = plan->block;

    plan->seq_slot = take(&cursor, plan->rows_max);
    plan->row_order = take(&cursor, plan->rows_max);
    plan->tile_begin = take(&cursor, plan->rows_max);
    plan->tile_rows = take(&cursor, plan->rows_max);
    plan->tile_slot = take(&cursor, plan->rows_max);
    plan->segment_slot = take(&cursor, plan->slots_max);
    plan->slot_cursor = take(&cursor, plan->slots_max);
    plan->segment_begin = take(&cursor, plan->slots_max + 1);
}

sp_status sp_plan_create(int32_t rows_max, int32_t slots_max, sp_plan **out_plan)
{
    sp_plan *plan;

    if (rows_max < 1 || rows_max > ROWS_LIMIT || slots_max < 1 || slots_max > SLOTS_LIMIT ||
        out_plan == NULL)
        return SP_ERR_ARGUMENT;
    plan = sp_calloc(1, sizeof *plan);
    if (plan == NULL)
        return SP_ERR_MEMORY;
    plan->rows_max = rows_max;
    plan->slots_max = slots_max;
    plan->block = sp_calloc(5 * (size_t)rows_max + 3 * (size_t)slots_max + 1, sizeof(int32_t));
    if (plan->block == NULL)
        goto free_plan;
    cut_block(plan);
    plan->row_scale = sp_calloc((size_t)rows_max, sizeof(float));
    if (plan->row_scale == NULL)
        goto free_block;
    *out_plan = plan;
    return SP_OK;

free_block:
    sp_free(plan->block);
free_plan:
    sp_free(plan);
    return SP_ERR_MEMORY;
}

void sp_plan_destroy(sp_plan *plan)
{
    if (plan == NULL)
        return;
    sp_free(plan->row_scale);
    sp_free(plan->block);
    sp_free(plan);
}

/* ---- grouping ------------------------------------------------------------------------------ */

/* One segment for each slot that has rows; slot_cursor becomes the place of its next row. */
static void build_segments(sp_plan *plan)
{
    int32_t routed = 0;

    memset(plan->slot_cursor, 0, (size_t)plan->slots_max * sizeof *plan->slot_cursor);
    for (int32_t row = 0; row < plan->n_rows; row++)
        if (plan->seq_slot[row] >= 0)
            plan->slot_cursor[plan->seq_slot[row]]++;
    plan->n_segments = 0;
    for (int32_t slot = 0; slot < plan->slots_max; slot++) {
        int32_t rows = plan->slot_cursor[slot];

        plan->slot_cursor[slot] = routed;
        if (rows == 0)
            continue;
        plan->segment_slot[plan->n_segments] = slot;
        plan->segment_begin[plan->n_segments] = routed;
        plan->n_segments++;
        routed += rows;
    }
    plan->segment_begin[plan->n_segments] = routed;
    plan->n_routed = routed;
}

static void build_order(sp_plan *plan)
{
    for (int32_t row = 0; row < plan->n_rows; row++) {
        int32_t slot = plan->seq_slot[row];

        if (slot >= 0)
            plan->row_order[plan->slot_cursor[slot]++] = row;
    }
}

static void build_tiles(sp_plan *plan)
{
    plan->n_tiles = 0;
    for (int32_t segment = 0; segment < plan->n_segments; segment++) {
        int32_t end = plan->segment_begin[segment + 1];

        for (int32_t row = plan->segment_begin[segment]; row < end; row += SP_TILE_ROWS) {
            plan->tile_begin[plan->n_tiles] = row;
            plan->tile_rows[plan->n_tiles] = end - row < SP_TILE_ROWS ? end - row : SP_TILE_ROWS;
            plan->tile_slot[plan->n_tiles] = plan->segment_slot[segment];
            plan->n_tiles++;
        }
    }
}

static void group(sp_plan *plan, int32_t n_rows)
{
    plan->n_rows = n_rows;
    build_segments(plan);
    build_order(plan);
    build_tiles(plan);
}

/* A scale of 0 is the base, exactly: the row takes no slot, so nothing can touch it. */
static void set_row(sp_plan *plan, int32_t row, int32_t slot, float scale)
{
    plan->seq_slot[row] = scale == 0.0f ? SP_SLOT_BASE : slot;
    plan->row_scale[row] = scale;
}

/* ---- checks and builds --------------------------------------------------------------------- */

static sp_status check_scale(float scale, const char *subject, int32_t index, sp_error *error)
{
    if (isfinite(scale) && scale >= 0.0f && scale <= REQUEST_SCALE_MAX)
        return SP_OK;
    return sp_fail(error, SP_ERR_ARGUMENT, NULL, subject, index,
                   "the request scale must be a finite number from 0 to %g",
                   (double)REQUEST_SCALE_MAX);
}

static sp_status check_slot(int32_t slot, int32_t n_slots, const char *subject, int32_t index,
                            sp_error *error)
{
    if (slot >= SP_SLOT_BASE && slot < n_slots)
        return SP_OK;
    return sp_fail(error, SP_ERR_ARGUMENT, NULL, subject, index,
                   "slot %d is out of range: there are %d slots (-1 is the base)", (int)slot,
                   (int)n_slots);
}

/*
 * The slot must serve the version that the span's request holds. A draining slot does so for the
 * requests that began with it: they finish on it.
 */
static sp_status check_version(const sp_pool *pool, const sp_route_span *span, int32_t index,
                               sp_error *error)
{
    sp_slot_info info;
    sp_status status = sp_pool_slot_info(pool, span->slot, &info);

    if (status != SP_OK)
        return sp_fail(error, status, NULL, "span", index, "the pool has no slot %d",
                       (int)span->slot);
    if (info.state != SP_SLOT_READY && info.state != SP_SLOT_DRAINING)
        return sp_fail(error, SP_ERR_STATE, NULL, "span", index, "slot %d is not ready",
                       (int)span->slot);
    if (info.generation != span->generation)
        return sp_fail(error, SP_ERR_STATE, NULL, "span", index,
                       "slot %d holds generation %llu, the request was resolved to %llu",
                       (int)span->slot, (unsigned long long)info.generation,
                       (unsigned long long)span->generation);
    if (info.references < 1)
        return sp_fail(error, SP_ERR_STATE, NULL, "span", index,
                       "no request holds a reference to slot %d", (int)span->slot);
    return SP_OK;
}

static sp_status check_spans(const sp_plan *plan, const sp_pool *pool, const sp_route_span *spans,
                             int32_t n_spans, int32_t *out_rows, sp_error *error)
{
    int32_t n_slots = sp_pool_slots(pool), rows = 0;
    sp_status status;

    if (n_slots > plan->slots_max)
        n_slots = plan->slots_max;
    for (int32_t i = 0; i < n_spans; i++) {
        const sp_route_span *span = &spans[i];

        if (span->n_rows < 1)
            return sp_fail(error, SP_ERR_ARGUMENT, NULL, "span", i, "the span has no rows");
        if (span->n_rows > plan->rows_max - rows)
            return sp_fail(error, SP_ERR_ARGUMENT, NULL, "span", i,
                           "the spans have more than the plan's %d rows", (int)plan->rows_max);
        rows += span->n_rows;
        status = check_scale(span->scale, "span", i, error);
        if (status == SP_OK)
            status = check_slot(span->slot, n_slots, "span", i, error);
        if (status == SP_OK && span->slot != SP_SLOT_BASE)
            status = check_version(pool, span, i, error);
        if (status != SP_OK)
            return status;
    }
    *out_rows = rows;
    return SP_OK;
}

sp_status sp_plan_build(sp_plan *plan, const sp_pool *pool, const sp_route_span *spans,
                        int32_t n_spans, int32_t padded_rows, sp_error *error)
{
    int32_t rows, row = 0;
    sp_status status;

    if (plan == NULL || pool == NULL || n_spans < 0 || (spans == NULL && n_spans > 0))
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, NULL, -1, "plan, pool or spans are missing");
    if (padded_rows < 0 || padded_rows > plan->rows_max)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "padded_rows", -1,
                       "%d padded rows, the plan has room for %d", (int)padded_rows,
                       (int)plan->rows_max);
    status = check_spans(plan, pool, spans, n_spans, &rows, error);
    if (status != SP_OK)
        return status;
    for (int32_t i = 0; i < n_spans; i++)
        for (int32_t end = row + spans[i].n_rows; row < end; row++)
            set_row(plan, row, spans[i].slot, spans[i].scale);
    for (; row < padded_rows; row++)
        set_row(plan, row, SP_SLOT_BASE, 1.0f);
    group(plan, row);
    return SP_OK;
}

sp_status sp_plan_build_rows(sp_plan *plan, const int32_t *seq_slot, const float *row_scale,
                             int32_t n_rows, int32_t n_slots, sp_error *error)
{
    sp_status status = SP_OK;

    if (plan == NULL || n_rows < 0 || (seq_slot == NULL && n_rows > 0))
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, NULL, -1, "plan or seq_slot is missing");
    if (n_rows > plan->rows_max)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "n_rows", -1,
                       "%d rows, the plan has room for %d", (int)n_rows, (int)plan->rows_max);
    if (n_slots < 0 || n_slots > plan->slots_max)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "n_slots", -1,
                       "%d slots, the plan has room for %d", (int)n_slots, (int)plan->slots_max);
    for (int32_t row = 0; row < n_rows && status == SP_OK; row++) {
        status = check_slot(seq_slot[row], n_slots, "row", row, error);
        if (status == SP_OK && row_scale != NULL)
            status = check_scale(row_scale[row], "row", row, error);
    }
    if (status != SP_OK)
        return status;
    for (int32_t row = 0; row < n_rows; row++)
        set_row(plan, row, seq_slot[row], row_scale != NULL ? row_scale[row] : 1.0f);
    group(plan, n_rows);
    return SP_OK;
}

sp_plan_view sp_plan_get(const sp_plan *plan)
{
    return (sp_plan_view){
        .n_rows = plan->n_rows,
        .seq_slot = plan->seq_slot,
        .row_scale = plan->row_scale,
        .n_routed = plan->n_routed,
        .row_order = plan->row_order,
        .n_segments = plan->n_segments,
        .segment_begin = plan->segment_begin,
        .segment_slot = plan->segment_slot,
        .n_tiles = plan->n_tiles,
        .tile_begin = plan->tile_begin,
        .tile_rows = plan->tile_rows,
        .tile_slot = plan->tile_slot,
    };
}
