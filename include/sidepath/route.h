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
} sp_plan_view;

/* SP_ERR_ARGUMENT: rows_max outside 1 .. 2^20, slots_max outside 1 .. 4096. */
SP_API sp_status sp_plan_create(int32_t rows_max, int32_t slots_max, sp_plan **out_plan);
SP_API void sp_plan_destroy(sp_plan *plan);

/* One run of consecutive rows of one request. */
typedef struct sp_route_span {
    int32_t n_rows;      /* >= 1 */
    int32_t slot;        /* or SP_SLOT_BASE */
    uint64_t generation; /* of the version that the request holds; ignored for the base */
    float scale;         /* request scale, finite, 0 .. 16; 0 means base, exactly */
} sp_route_span;

/*
 * Builds the plan of one step from spans in row order; rows beyond the last span up to
 * padded_rows are pads (slot -1); a padded_rows below the spans' sum adds none. Pure: on any
 * refusal the plan is as it was, and error->position is the span's index.
 * SP_ERR_ARGUMENT: more than rows_max rows, an empty span, a scale out of range, a slot out of
 * range. SP_ERR_STATE: a slot that is neither READY nor DRAINING (requests that hold a draining
 * version finish on it), holds another generation, or that no request references. Does not
 * allocate.
 */
SP_API sp_status sp_plan_build(sp_plan *plan, const sp_pool *pool, const sp_route_span *spans,
                               int32_t n_spans, int32_t padded_rows, sp_error *error);

/*
 * The same without a pool, from seq_slot directly: for hosts that keep their own slots, and the
 * oracle of the device's version. row_scale may be NULL (all 1); its values are request scales,
 * checked like a span's. On any refusal the plan is as it was; error->position is the row.
 */
SP_API sp_status sp_plan_build_rows(sp_plan *plan, const int32_t *seq_slot, const float *row_scale,
                                    int32_t n_rows, int32_t n_slots, sp_error *error);

SP_API sp_plan_view sp_plan_get(const sp_plan *plan);

#ifdef __cplusplus
}
#endif
#endif
