/* clock.h: monotonic time. Nothing that decides a token may read it. */
#ifndef SP_BASE_CLOCK_H
#define SP_BASE_CLOCK_H

#include <stdint.h>

uint64_t sp_clock_ns(void);
double sp_clock_seconds(void);

#endif
