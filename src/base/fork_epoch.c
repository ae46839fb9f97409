#include "base/fork_epoch.h"

#include <pthread.h>
#include <stdatomic.h>

static atomic_uint epoch;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void begin_child(void)
{
    (void)atomic_fetch_add(&epoch, 1);
}

static void watch_forks(void)
{
    (void)pthread_atfork(NULL, NULL, begin_child);
}

uint32_t sp_fork_epoch(void)
{
    (void)pthread_once(&once, watch_forks);
    return atomic_load_explicit(&epoch, memory_order_relaxed);
}
