/*
 * fork_epoch.h: whether this process is the one that created an object. After fork() a child has
 * the parent's memory but only the calling thread, and cannot use the parent's GPUs: what owns
 * threads or a GPU records the epoch at its creation and compares.
 */
#ifndef SP_BASE_FORK_EPOCH_H
#define SP_BASE_FORK_EPOCH_H

#include <stdint.h>

/* Incremented in the child of every fork() after the first call. Thread-safe. */
uint32_t sp_fork_epoch(void);

#endif
