/* integer.h: integer helpers for splitting work. Arguments must not be negative, step not 0, and no
 * sum may overflow. */
#ifndef SP_BASE_INTEGER_H
#define SP_BASE_INTEGER_H

#include <stddef.h>
#include <stdint.h>

static inline int64_t min64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static inline int64_t max64(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

static inline int64_t ceil_div(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

/* Rounds up to a multiple of `step`. */
static inline int64_t round_up(int64_t a, int64_t step)
{
    return ceil_div(a, step) * step;
}

/* The next multiple of `boundary` bytes, a power of two. */
static inline size_t align_up(size_t bytes, size_t boundary)
{
    return (bytes + boundary - 1) & ~(boundary - 1);
}

#endif
