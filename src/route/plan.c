/*
 * plan.c: the plan of one step. A build first checks everything, on values that it does not keep,
 * and only then writes; so a refusal leaves the plan as it was without a second copy of it. The
 * grouping is a counting sort by slot: rows keep their order inside a slot, and the cost is
 * rows + slots, whatever the mix.
 *
 * The plan remembers what it was built on: the pool, its change number, and the generation of each
 * slot that it routes to. While the pool's change number is the same, every handle is still valid;
 * otherwise each segment's is checked again.
 */
#include "route/plan_rows.h"

#include "base/alloc.h"
#include "base/assert.h"
#include "base/error.h"
#include "base/grow.h"

#include <sidepath/route.h>

#include <math.h>
#include <stdatomic.h>
#include <string.h>

#define ROWS_LIMIT        (1 << 20)
#define SLOTS_LIMIT       4096
#define REQUEST_SCALE_MAX 16.0f

struct sp_plan {
    int32_t rows_max, slots_max;
    sp_plan_view view;   /* its counts, and the arrays below */
    const sp_pool *pool; /* compared, never read; NULL: a plan of rows alone, or none */
    uint64_t pool_changes;
    /* Parts of `block`, in this order; the lengths are in sp_plan_create. */
    int32_t *seq_slot, *row_order;
    int32_t *tile_begin, *tile_rows, *tile_slot;
    int32_t *segment_slot, *slot_cursor, *segment_begin;
    float *row_scale;          /* [rows_max] */
    uint64_t *slot_generation; /* [slots_max] where the slot has a segment */
    int32_t *block;
};

/* ---- life ---------------------------------------------------------------------------------- */

static int32_t *take(int32_t **cursor, int32_t n)
{
    int32_t *taken = *cursor;

    *cursor += n;
    return taken;
}

/* Carves the block into the plan's arrays: five of rows_max, two of slots_max, one of slots_max +
 * 1. */
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
    SP_ASSERT(cursor - plan->block ==
              5 * (int64_t)plan->rows_max + 3 * (int64_t)plan->slots_max + 1);
}

static void fill_view(sp_plan *plan)
{
    plan->view = (sp_plan_view){
        .struct_bytes = sizeof plan->view,
        .seq_slot = plan->seq_slot,
        .row_scale = plan->row_scale,
        .row_order = plan->row_order,
        .segment_begin = plan->segment_begin,
        .segment_slot = plan->segment_slot,
        .tile_begin = plan->tile_begin,
        .tile_rows = plan->tile_rows,
        .tile_slot = plan->tile_slot,
    };
}

static sp_status check_sizes(int32_t rows_max, int32_t slots_max, sp_error *error)
{
    if (rows_max < 1 || rows_max > ROWS_LIMIT)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "rows_max", -1,
                       "a plan must have from 1 to %d rows, not %d", ROWS_LIMIT, (int)rows_max);
    if (slots_max < 1 || slots_max > SLOTS_LIMIT)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "slots_max", -1,
                       "a plan must have from 1 to %d slots, not %d", SLOTS_LIMIT, (int)slots_max);
    return SP_OK;
}

sp_status sp_plan_create(int32_t rows_max, int32_t slots_max, sp_plan **out_plan, sp_error *error)
{
    size_t rows = (size_t)rows_max, slots = (size_t)slots_max;
    sp_status status = check_sizes(rows_max, slots_max, error);
    sp_plan *plan;

    if (status != SP_OK)
        return status;
    if (out_plan == NULL)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "out_plan", -1, "out_plan is NULL");
    plan = sp_calloc(1, sizeof *plan);
    if (plan == NULL)
        return sp_fail_memory(error, sizeof *plan, "a plan");
    plan->rows_max = rows_max;
    plan->slots_max = slots_max;
    plan->block = sp_calloc(5 * rows + 3 * slots + 1, sizeof *plan->block);
    plan->row_scale = sp_calloc(rows, sizeof *plan->row_scale);
    plan->slot_generation = sp_calloc(slots, sizeof *plan->slot_generation);
    if (plan->block == NULL || plan->row_scale == NULL || plan->slot_generation == NULL) {
        sp_plan_destroy(plan);
        return sp_fail_memory(error, (6 * rows + 5 * slots) * sizeof *plan->block,
                              "the arrays of a plan");
    }
    cut_block(plan);
    fill_view(plan);
    *out_plan = plan;
    return SP_OK;
}

void sp_plan_destroy(sp_plan *plan)
{
    if (plan == NULL)
        return;
    sp_free(plan->slot_generation);
    sp_free(plan->row_scale);
    sp_free(plan->block);
    sp_free(plan);
}

/* ---- grouping ------------------------------------------------------------------------------ */

/* One segment for each slot that has rows; slot_cursor becomes the index of its next row. */
static void build_segments(sp_plan *plan)
{
    int32_t routed = 0;

    memset(plan->slot_cursor, 0, (size_t)plan->slots_max * sizeof *plan->slot_cursor);
    for (int32_t row = 0; row < plan->view.n_rows; row++)
        if (plan->seq_slot[row] >= 0)
            plan->slot_cursor[plan->seq_slot[row]]++;
    plan->view.n_segments = 0;
    for (int32_t slot = 0; slot < plan->slots_max; slot++) {
        int32_t rows = plan->slot_cursor[slot];

        plan->slot_cursor[slot] = routed;
        if (rows == 0)
            continue;
        plan->segment_slot[plan->view.n_segments] = slot;
        plan->segment_begin[plan->view.n_segments] = routed;
        plan->view.n_segments++;
        routed += rows;
    }
    plan->segment_begin[plan->view.n_segments] = routed;
    plan->view.n_routed = routed;
    SP_ASSERT(routed <= plan->view.n_rows);
    SP_ASSERT(plan->view.n_segments <= plan->slots_max && plan->view.n_segments <= routed);
}

static void build_order(sp_plan *plan)
{
    for (int32_t row = 0; row < plan->view.n_rows; row++) {
        int32_t slot = plan->seq_slot[row];

        if (slot < 0)
            continue;
        SP_ASSERT(plan->slot_cursor[slot] < plan->view.n_routed);
        plan->row_order[plan->slot_cursor[slot]++] = row;
    }
    /* Each slot's cursor is now at the start of the next segment. */
    for (int32_t i = 0; i < plan->view.n_segments; i++)
        SP_ASSERT(plan->slot_cursor[plan->segment_slot[i]] == plan->segment_begin[i + 1]);
}

static void build_tiles(sp_plan *plan)
{
    plan->view.n_tiles = 0;
    for (int32_t segment = 0; segment < plan->view.n_segments; segment++) {
        int32_t end = plan->segment_begin[segment + 1];

        for (int32_t row = plan->segment_begin[segment]; row < end; row += SP_TILE_ROWS) {
            plan->tile_begin[plan->view.n_tiles] = row;
            plan->tile_rows[plan->view.n_tiles] =
                end - row < SP_TILE_ROWS ? end - row : SP_TILE_ROWS;
            plan->tile_slot[plan->view.n_tiles] = plan->segment_slot[segment];
            plan->view.n_tiles++;
        }
    }
    SP_ASSERT(plan->view.n_tiles <= plan->view.n_routed);
    SP_ASSERT(plan->view.n_tiles >= plan->view.n_segments);
}

/* Numbers the builds of all plans, so that a plan created at the address of another one is not
 * mistaken for it. */
static atomic_uint_fast64_t last_build;

/* Groups the rows, once they are set. */
static void group(sp_plan *plan, const sp_pool *pool, uint64_t pool_changes, int32_t n_rows)
{
    plan->pool = pool;
    plan->pool_changes = pool_changes;
    plan->view.n_rows = n_rows;
    plan->view.build = atomic_fetch_add_explicit(&last_build, 1, memory_order_relaxed) + 1;
    build_segments(plan);
    build_order(plan);
    build_tiles(plan);
}

/* A scale of 0 is the base, exactly: the row takes no slot, so nothing can touch it. */
static void set_row(sp_plan *plan, int32_t row, int32_t slot, float scale)
{
    SP_ASSERT(row >= 0 && row < plan->rows_max);
    SP_ASSERT(slot >= SP_SLOT_BASE && slot < plan->slots_max);
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
    return sp_fail(error, SP_ERR_ARGUMENT, "slot-out-of-range", subject, index,
                   "slot %d is out of range: there are %d slots (-1 is the base)", (int)slot,
                   (int)n_slots);
}

/* Checks that the span's version may run; an error names the span. */
static sp_status check_version(const sp_pool *pool, sp_slot_handle handle, int32_t index,
                               sp_error *error)
{
    sp_status status = sp_pool_check_handle(pool, handle, NULL);
    sp_error why;

    if (status == SP_OK)
        return SP_OK;
    (void)sp_pool_check_handle(pool, handle, &why);
    return sp_fail(error, status, why.code, "span", index, "span %d cannot be routed: %s",
                   (int)index, why.text);
}

void sp_route_span_default(sp_route_span *out_span, size_t struct_bytes)
{
    const sp_route_span defaults = {
        .struct_bytes = sizeof defaults,
        .handle = {.slot = SP_SLOT_BASE},
        .n_rows = 1,
        .scale = 1.0f,
    };

    sp_struct_default(out_span, struct_bytes, &defaults, sizeof defaults);
}

static sp_status read_span(const sp_route_span *spans, int32_t index, sp_route_span *out,
                           sp_error *error)
{
    sp_route_span_default(out, sizeof *out);
    return sp_struct_read_at(out, sizeof *out, spans, (size_t)index, "sp_route_span", error);
}

static sp_status check_span(const sp_plan *plan, const sp_pool *pool, const sp_route_span *span,
                            int32_t index, int32_t rows_before, sp_error *error)
{
    int32_t n_slots = sp_pool_slots(pool);
    sp_status status;

    if (span->n_rows < 1)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "span", index, "the span has no rows");
    if (span->n_rows > plan->rows_max - rows_before)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "span", index,
                       "the spans have more than the plan's %d rows", (int)plan->rows_max);
    status = check_scale(span->scale, "span", index, error);
    if (status == SP_OK)
        status =
            check_slot(span->handle.slot, n_slots < plan->slots_max ? n_slots : plan->slots_max,
                       "span", index, error);
    if (status == SP_OK && span->handle.slot != SP_SLOT_BASE)
        status = check_version(pool, span->handle, index, error);
    return status;
}

static sp_status check_spans(const sp_plan *plan, const sp_pool *pool, const sp_route_span *spans,
                             int32_t n_spans, sp_error *error)
{
    int32_t rows = 0;

    for (int32_t i = 0; i < n_spans; i++) {
        sp_route_span span;
        sp_status status = read_span(spans, i, &span, error);

        if (status == SP_OK)
            status = check_span(plan, pool, &span, i, rows, error);
        if (status != SP_OK)
            return status;
        rows += span.n_rows;
    }
    return SP_OK;
}

static void set_span(sp_plan *plan, int32_t first_row, const sp_route_span *span)
{
    for (int32_t i = 0; i < span->n_rows; i++)
        set_row(plan, first_row + i, span->handle.slot, span->scale);
    if (span->handle.slot != SP_SLOT_BASE)
        plan->slot_generation[span->handle.slot] = span->handle.generation;
}

sp_status sp_plan_build(sp_plan *plan, const sp_pool *pool, const sp_route_span *spans,
                        int32_t n_spans, int32_t padded_rows, sp_error *error)
{
    int32_t row = 0;
    sp_status status;

    if (plan == NULL || pool == NULL)
        return sp_fail_null(error, plan != NULL ? "pool" : "plan");
    if (n_spans < 0)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "n_spans", -1,
                       "n_spans is %d; it must be 0 or more", (int)n_spans);
    if (spans == NULL && n_spans > 0)
        return sp_fail_null(error, "spans");
    if (padded_rows < 0 || padded_rows > plan->rows_max)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "padded_rows", -1,
                       "%d padded rows, the plan has room for %d", (int)padded_rows,
                       (int)plan->rows_max);
    status = check_spans(plan, pool, spans, n_spans, error);
    if (status != SP_OK)
        return status;
    for (int32_t i = 0; i < n_spans; i++) {
        sp_route_span span;

        (void)read_span(spans, i, &span, NULL);
        set_span(plan, row, &span);
        row += span.n_rows;
    }
    for (; row < padded_rows; row++)
        set_row(plan, row, SP_SLOT_BASE, 1.0f);
    group(plan, pool, sp_pool_changes(pool), row);
    return SP_OK;
}

/* ---- from another plan --------------------------------------------------------------------- */

static sp_status check_selection(const sp_plan *plan, const sp_plan *from, const int32_t *rows,
                                 int32_t n_rows, sp_error *error)
{
    if (plan == NULL || from == NULL)
        return sp_fail_null(error, plan != NULL ? "from" : "plan");
    if (plan == from)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "from", -1, "plan and from are the same");
    if (n_rows < 0 || n_rows > plan->rows_max)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "n_rows", -1,
                       "%d rows, the plan has room for %d", (int)n_rows, (int)plan->rows_max);
    if (rows == NULL && n_rows > 0)
        return sp_fail_null(error, "rows");
    for (int32_t i = 0; i < n_rows; i++) {
        if (rows[i] < 0 || rows[i] >= from->view.n_rows)
            return sp_fail(error, SP_ERR_ARGUMENT, NULL, "rows", i,
                           "there is no row %d: the other plan has %d", (int)rows[i],
                           (int)from->view.n_rows);
        if (from->seq_slot[rows[i]] >= plan->slots_max)
            return sp_fail(error, SP_ERR_ARGUMENT, "slot-out-of-range", "rows", i,
                           "row %d is of slot %d, the plan has room for %d slots", (int)rows[i],
                           (int)from->seq_slot[rows[i]], (int)plan->slots_max);
    }
    return SP_OK;
}

sp_status sp_plan_select(sp_plan *plan, const sp_plan *from, const int32_t *rows, int32_t n_rows,
                         sp_error *error)
{
    sp_status status = check_selection(plan, from, rows, n_rows, error);

    if (status != SP_OK)
        return status;
    for (int32_t i = 0; i < n_rows; i++) {
        int32_t slot = from->seq_slot[rows[i]];

        set_row(plan, i, slot, from->row_scale[rows[i]]);
        if (slot != SP_SLOT_BASE)
            plan->slot_generation[slot] = from->slot_generation[slot];
    }
    group(plan, from->pool, from->pool_changes, n_rows);
    return SP_OK;
}

/* ---- rows alone ---------------------------------------------------------------------------- */

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
    group(plan, NULL, 0, n_rows);
    return SP_OK;
}

/* ---- use ----------------------------------------------------------------------------------- */

sp_status sp_plan_check(const sp_plan *plan, const sp_pool *pool, sp_error *error)
{
    if (plan == NULL || pool == NULL)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, NULL, -1, "plan or pool is missing");
    if (plan->pool != pool)
        return sp_fail(error, SP_ERR_STATE, "plan-of-another-pool", "plan", -1,
                       "the plan was built over another pool, or not at all");
    if (plan->pool_changes == sp_pool_changes(pool))
        return SP_OK;
    for (int32_t i = 0; i < plan->view.n_segments; i++) {
        int32_t slot = plan->segment_slot[i];
        sp_slot_handle handle = {slot, plan->slot_generation[slot]};
        sp_status status = sp_pool_check_handle(pool, handle, NULL);
        sp_error why;

        if (status == SP_OK)
            continue;
        (void)sp_pool_check_handle(pool, handle, &why);
        return sp_fail(error, status, why.code, "plan", slot, "the plan must be built again: %s",
                       why.text);
    }
    return SP_OK;
}

const sp_plan_view *sp_plan_get(const sp_plan *plan)
{
    return &plan->view;
}
