/*
 * plan_rows.h: a plan of rows alone, without a pool. It groups rows as any plan does, as the
 * reference for tests of the device's grouping; sp_delta refuses it.
 */
#ifndef SP_ROUTE_PLAN_ROWS_H
#define SP_ROUTE_PLAN_ROWS_H

#include <sidepath/route.h>

/*
 * Builds from seq_slot [n_rows], each below n_slots or SP_SLOT_BASE. Engine thread; plan and
 * seq_slot may not be NULL. row_scale may be NULL (all 1); its values are request scales, checked
 * like a span's. On any refusal (SP_ERR_ARGUMENT) the plan is as it was; error->position is the
 * row.
 */
sp_status sp_plan_build_rows(sp_plan *plan, const int32_t *seq_slot, const float *row_scale,
                             int32_t n_rows, int32_t n_slots, sp_error *error);

#endif
