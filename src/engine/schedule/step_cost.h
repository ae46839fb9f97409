/*
 * step_cost.h: what one row more costs a step, from the times of the engine's own steps.
 *
 * It owns the estimate: a line through rows and seconds of the last steps, older ones counting
 * less. It must not know clocks, requests, drafts or backends. It decides how many drafts a step
 * has, which changes no token. Pure functions; one thread at a time.
 */
#ifndef SP_ENGINE_SCHEDULE_STEP_COST_H
#define SP_ENGINE_SCHEDULE_STEP_COST_H

#include <stdbool.h>
#include <stdint.h>

#define SP_ROW_COST_UNKNOWN 0.4
#define SP_ROW_COST_MAX     0.9
#define SP_STEP_COST_STEPS  64 /* that the sums remember */

/* All zero: nothing is known. */
typedef struct sp_step_cost {
    double steps, rows, seconds; /* sums, each older step's by a factor of 1 - 1 / 64 less */
    double rows_rows, rows_seconds;
    double row_seconds; /* the slope of the line; kept where the steps have hardly another number
                           of rows than each other */
    bool known;
} sp_step_cost;

/* A step of so many rows (1 or more), none of a prompt, took so long. One that took more than twice
 * as long as it should have counts as twice. */
void sp_step_cost_note(sp_step_cost *cost, int32_t rows, double seconds);

/*
 * What a draft costs, in tokens: the time of a row more and of `seconds` (0 or more) to make it,
 * over that in which a step of n_tokens (1 or more) rows makes one of its tokens. So a draft pays
 * if it is accepted with a greater probability. Within 0 .. SP_ROW_COST_MAX; SP_ROW_COST_UNKNOWN as
 * long as nothing is known.
 */
double sp_step_cost_of_row(const sp_step_cost *cost, int32_t n_tokens, double seconds);

#endif
