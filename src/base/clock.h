/* clock.h: monotonic time. Nothing that decides a token may read it. */
#ifndef SP_BASE_CLOCK_H
#define SP_BASE_CLOCK_H

#include "base/private.h"

#include <stdint.h>

/* Nanoseconds of the monotonic clock. Any thread. */
uint64_t sp_clock_ns(void);
/* The same in seconds. */
SP_PRIVATE double sp_clock_seconds(void);

#endif
