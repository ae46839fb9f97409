#include "engine/schedule/step_cost.h"

#include "base/assert.h"

#define KEPT         (1 - 1.0 / SP_STEP_COST_STEPS)
#define OUTLIER      2.0
#define SPREAD_LEAST 1.0 /* squared rows, summed: below it noise would be a slope */

/* Of a step of so many rows, by the line. */
static double seconds_of(const sp_step_cost *cost, double rows)
{
    return (cost->seconds + cost->row_seconds * (rows * cost->steps - cost->rows)) / cost->steps;
}

static void find_slope(sp_step_cost *cost)
{
    double spread = cost->rows_rows - cost->rows * cost->rows / cost->steps;
    double slope = cost->rows_seconds - cost->rows * cost->seconds / cost->steps;

    if (spread < SPREAD_LEAST)
        return;
    cost->row_seconds = slope > 0 ? slope / spread : 0;
    cost->known = true;
}

void sp_step_cost_note(sp_step_cost *cost, int32_t rows, double seconds)
{
    double most = cost->steps >= 1 ? OUTLIER * seconds_of(cost, rows) : 0, r = rows;

    SP_ASSERT(rows > 0 && seconds >= 0);
    if (most > 0 && seconds > most)
        seconds = most;
    cost->steps = cost->steps * KEPT + 1;
    cost->rows = cost->rows * KEPT + r;
    cost->seconds = cost->seconds * KEPT + seconds;
    cost->rows_rows = cost->rows_rows * KEPT + r * r;
    cost->rows_seconds = cost->rows_seconds * KEPT + r * seconds;
    find_slope(cost);
}

double sp_step_cost_of_row(const sp_step_cost *cost, int32_t n_tokens, double seconds)
{
    double step, row;

    SP_ASSERT(n_tokens > 0 && seconds >= 0);
    if (!cost->known)
        return SP_ROW_COST_UNKNOWN;
    step = seconds_of(cost, n_tokens);
    row = (cost->row_seconds + seconds) * n_tokens;
    return row < SP_ROW_COST_MAX * step ? row / step : SP_ROW_COST_MAX;
}
