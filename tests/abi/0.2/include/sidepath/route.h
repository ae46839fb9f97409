/*
 * route.h: requests in, the plan of one step out.
 *
 * This room owns: row → slot, row scales, the grouping of rows by adapter (segments), tiles of at
 * most SP_TILE_ROWS rows, and the checks that refuse a plan before anything runs. It must not
 * know: numbers (it never touches x or y), names, files.
 *
 * A plan's arrays are at fixed addresses for its whole life, sized for rows_max, so that a
 * captured graph replays correctly after any change of adapters. Building is a pure host function
 * that changes nothing when it refuses.
 *
 * A plan names versions, by the handles that loading gave, never bare slots. It remembers the pool
 * and the versions that it was built on: sp_delta refuses it over another pool, and once one of
 * them was released or its slot loaded anew. One thread uses a plan at a time, the pool's.
 *
 * Stability: stable.
 */
#ifndef SIDEPATH_ROUTE_H
#define SIDEPATH_ROUTE_H

#include <sidepath/pool.h>

#ifdef __cplusplus
extern "C" {
#endif

#define SP_SLOT_BASE (-1) /* a row that no adapter touches: the base, or a pad */
#define SP_TILE_ROWS 8

/*
 * The effective scale, in the one function that computes it: (float)((double)stored * request).
 */
SP_API float sp_effective_scale(float stored_scale, float request_scale);

typedef struct sp_plan sp_plan;

/* What the kernels read. All arrays are owned by the plan, at fixed addresses. */
typedef struct sp_plan_view {
    size_t struct_bytes;
    int32_t n_rows;           /* rows of the step, pads included */
    const int32_t *seq_slot;  /* [n_rows] slot of each row, or SP_SLOT_BASE */
    const float *row_scale;   /* [n_rows] request scale of each row, 1 by default */
    int32_t n_routed;         /* rows with a slot */
    const int32_t *row_order; /* [n_routed] row numbers, by slot, rows ascending inside a slot */
    int32_t n_segments;
    const int32_t *segment_begin; /* [n_segments + 1] offsets into row_order */
    const int32_t *segment_slot;  /* [n_segments] ascending, each slot once */
    int32_t n_tiles;
    const int32_t *tile_begin; /* [n_tiles] offsets into row_order */
    const int32_t *tile_rows;  /* [n_tiles] 1 .. SP_TILE_ROWS, all of one slot */
    const int32_t *tile_slot;  /* [n_tiles] */
    uint64_t build;            /* another number after every build, of all plans; 0: none yet */
} sp_plan_view;

/* A plan of no rows. SP_ERR_ARGUMENT: rows_max outside 1 .. 2^20, slots_max outside 1 .. 4096.
 * SP_ERR_MEMORY. */
SP_API sp_status sp_plan_create(int32_t rows_max, int32_t slots_max, sp_plan **out_plan,
                                sp_error *error);
SP_API void sp_plan_destroy(sp_plan *plan); /* NULL is allowed */

/* One run of consecutive rows of one request. */
typedef struct sp_route_span {
    size_t struct_bytes;
    sp_slot_handle handle; /* that the request holds; slot SP_SLOT_BASE: the base, and then its
                              generation is ignored */
    int32_t n_rows;        /* >= 1 */
    float scale;           /* request scale, finite, 0 .. 16; 0 means base, exactly */
} sp_route_span;

/* One row of the base, with scale 1: a span that sets its handle alone runs its adapter. */
SP_API void sp_route_span_default(sp_route_span *out_span, size_t struct_bytes);

/*
 * Builds the plan of one step from spans in row order, each with the struct_bytes of the first;
 * rows beyond the last span up to padded_rows are pads (slot -1); a padded_rows below the spans'
 * sum adds none. Pure: on any refusal the plan is as it was, and error->position is the span's
 * index. Does not allocate.
 * SP_ERR_ARGUMENT: more than rows_max rows, an empty span, a scale out of range; with
 * `slot-out-of-range`: a slot that the pool or the plan has not. SP_ERR_STATE with `slot-empty`,
 * `slot-loading`, `handle-stale` (the slot holds another version), `handle-released` (nobody holds
 * it). A DRAINING version that is still held is routed.
 */
SP_API sp_status sp_plan_build(sp_plan *plan, const sp_pool *pool, const sp_route_span *spans,
                               int32_t n_spans, int32_t padded_rows, sp_error *error);

/*
 * The plan of some rows of another one, in any order, a row several times where wanted: row i is
 * row rows[i] of `from`. For the head, whose rows need not be those of the step. Does not allocate;
 * on any refusal the plan is as it was. Whether the versions are still held is asked when the plan
 * is used. SP_ERR_ARGUMENT: more than rows_max rows, a row that `from` has not, slots beyond the
 * plan's, plan and from are the same.
 */
SP_API sp_status sp_plan_select(sp_plan *plan, const sp_plan *from, const int32_t *rows,
                                int32_t n_rows, sp_error *error);

/*
 * Whether the plan may run over this pool now; what sp_delta asks in every call, at the cost of two
 * comparisons where nothing has changed. SP_ERR_STATE with `plan-of-another-pool` (also: never
 * built), or with what sp_plan_build says of a handle: it must be built again.
 */
SP_API sp_status sp_plan_check(const sp_plan *plan, const sp_pool *pool, sp_error *error);

/* The plan's own, as long as it lives; the next build changes it. */
SP_API const sp_plan_view *sp_plan_get(const sp_plan *plan);

#ifdef __cplusplus
}
#endif
#endif
