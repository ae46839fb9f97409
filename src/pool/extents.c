#include "pool/extents.h"

/* The free bytes from `begin` on; 0 when it is inside an extent. */
static size_t gap_at(const sp_extent *taken, int32_t n, size_t block_bytes, size_t begin)
{
    size_t end = block_bytes;

    for (int32_t i = 0; i < n; i++) {
        if (taken[i].bytes == 0)
            continue;
        if (begin >= taken[i].offset_bytes && begin - taken[i].offset_bytes < taken[i].bytes)
            return 0;
        if (taken[i].offset_bytes >= begin && taken[i].offset_bytes < end)
            end = taken[i].offset_bytes;
    }
    return end > begin ? end - begin : 0;
}

bool sp_extents_place(const sp_extent *taken, int32_t n, size_t block_bytes, size_t bytes,
                      size_t *out_offset_bytes)
{
    size_t best_gap = 0, best = 0;

    /* A gap starts at the block's start or at an extent's end. */
    for (int32_t i = -1; i < n; i++) {
        size_t begin = i < 0 ? 0 : taken[i].offset_bytes + taken[i].bytes;
        size_t gap = i >= 0 && taken[i].bytes == 0 ? 0 : gap_at(taken, n, block_bytes, begin);

        if (gap < bytes || gap == 0)
            continue;
        if (best_gap == 0 || gap < best_gap || (gap == best_gap && begin < best)) {
            best_gap = gap;
            best = begin;
        }
    }
    if (best_gap == 0)
        return false;
    *out_offset_bytes = best;
    return true;
}

bool sp_extents_overlap(const sp_extent *a, const sp_extent *b)
{
    return a->bytes > 0 && b->bytes > 0 && a->offset_bytes < b->offset_bytes + b->bytes &&
           b->offset_bytes < a->offset_bytes + a->bytes;
}
