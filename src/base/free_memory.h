/*
 * free_memory.h: how much memory this process may still take before the system reclaims or kills:
 * MemAvailable, limited by what its cgroups (v1 or v2, with their ancestors) still allow. Page
 * cache that can be dropped counts as free in both.
 */
#ifndef SP_BASE_FREE_MEMORY_H
#define SP_BASE_FREE_MEMORY_H

#include "base/private.h"

#include <stddef.h>

/*
 * Bytes that are free below the file system `root` ("" for this machine), or SIZE_MAX where
 * unknown. Reads a few small files; any thread.
 */
SP_PRIVATE size_t sp_free_memory(const char *root);

#endif
