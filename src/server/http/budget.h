/*
 * budget.h: one number of bytes for all that clients can fill: bodies on their way in, requests
 * that wait or run, answers that have not been read yet. Who wants more than is left is turned
 * away; the last shares are kept for what is small or has begun, so that large bodies cannot lock
 * out all others. Functions may be called by any thread.
 */
#ifndef SP_SERVER_HTTP_BUDGET_H
#define SP_SERVER_HTTP_BUDGET_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>

/* The code of what is turned away, with 503. */
#define SP_CODE_MEMORY_FULL "client-memory-full"

#define SP_BUDGET_SMALL_BODY ((size_t)1 << 16)

typedef enum sp_budget_kind {
    SP_BUDGET_BODIES,   /* up to 6/8 of all; those of at most SP_BUDGET_SMALL_BODY bytes 7/8 */
    SP_BUDGET_REQUESTS, /* up to 7/8 */
    SP_BUDGET_ANSWERS,  /* up to all */
    SP_BUDGET_KINDS
} sp_budget_kind;

typedef struct sp_budget {
    size_t bytes_max;
    atomic_size_t total, used[SP_BUDGET_KINDS];
    atomic_ullong refused;
} sp_budget;

void sp_budget_open(sp_budget *budget, size_t bytes_max);

/*
 * *held, which belongs to one body, request or answer, becomes `bytes`. False: there is no room for
 * more, and nothing has changed; less is always taken. A NULL budget has room for all.
 */
bool sp_budget_hold(sp_budget *budget, sp_budget_kind kind, size_t *held, size_t bytes);

#endif
