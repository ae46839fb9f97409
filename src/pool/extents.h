/*
 * extents.h: allocation of extents of different sizes in a block of memory, best fit. Pure: the
 * list of taken extents is the whole state.
 */
#ifndef SP_POOL_EXTENTS_H
#define SP_POOL_EXTENTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* A piece of the block; bytes 0: none. */
typedef struct sp_extent {
    size_t offset_bytes, bytes;
} sp_extent;

/*
 * Finds `bytes` (at least 1) free bytes in a block of `block_bytes` beside the extents of `taken`
 * [n], which do not overlap and may be in any order. Best fit: the start of the smallest gap that
 * is large enough, of equal ones the lowest; so a block that is filled and emptied in any order
 * fragments little. Returns false if no gap is large enough.
 */
bool sp_extents_place(const sp_extent *taken, int32_t n, size_t block_bytes, size_t bytes,
                      size_t *out_offset_bytes);

/* Whether two extents have a byte in common. */
bool sp_extents_overlap(const sp_extent *a, const sp_extent *b);

#endif
