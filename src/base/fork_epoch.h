/*
 * fork_epoch.h: whether this process is the one in which an object was made. After fork() a child
 * has the parent's memory but only the thread that called it, and no use of the parent's GPUs: what
 * owns threads or a GPU keeps the epoch of its making and compares.
 */
#ifndef SP_BASE_FORK_EPOCH_H
#define SP_BASE_FORK_EPOCH_H

#include <stdint.h>

/* Rises by one in the child of every fork() after the first call. Thread-safe. */
uint32_t sp_fork_epoch(void);

#endif
