#include "server/http/budget.h"

void sp_budget_open(sp_budget *budget, size_t bytes_max)
{
    budget->bytes_max = bytes_max;
    atomic_init(&budget->total, 0);
    atomic_init(&budget->refused, 0);
    for (int kind = 0; kind < SP_BUDGET_KINDS; kind++)
        atomic_init(&budget->used[kind], 0);
}

static size_t share(const sp_budget *budget, sp_budget_kind kind, size_t bytes)
{
    size_t eighth = budget->bytes_max / 8;

    switch (kind) {
    case SP_BUDGET_BODIES:
        return bytes > SP_BUDGET_SMALL_BODY ? 6 * eighth : 7 * eighth;
    case SP_BUDGET_REQUESTS:
        return 7 * eighth;
    case SP_BUDGET_ANSWERS:
    case SP_BUDGET_KINDS:
        break;
    }
    return budget->bytes_max;
}

bool sp_budget_hold(sp_budget *budget, sp_budget_kind kind, size_t *held, size_t bytes)
{
    size_t more = bytes > *held ? bytes - *held : 0;
    size_t less = *held - (bytes - more);
    size_t most, before;

    if (!budget)
        return true;
    atomic_fetch_sub(&budget->used[kind], less);
    atomic_fetch_sub(&budget->total, less);
    if (more > 0) {
        most = share(budget, kind, bytes);
        before = atomic_fetch_add(&budget->total, more);
        if (before > most || more > most - before) {
            atomic_fetch_sub(&budget->total, more);
            atomic_fetch_add(&budget->refused, 1);
            return false;
        }
        atomic_fetch_add(&budget->used[kind], more);
    }
    *held = bytes;
    return true;
}
