/*
 * overlay_memory.h: the pool's overlay memory: one block on the device at a fixed address, with a
 * byte budget, divided into extents, at most one per slot; and the tables through which kernels
 * find them. It has no slot states: pool.c decides when an extent is taken, shown, hidden and
 * freed. Engine thread only, but for write, which a loader thread may call.
 *
 * Invariant: a slot's cells are set only while its extent is taken and written. They change between
 * two steps, without blocking (column_ring.h).
 */
#ifndef SP_POOL_OVERLAY_MEMORY_H
#define SP_POOL_OVERLAY_MEMORY_H

#include "pool/column_ring.h"
#include "pool/extents.h"
#include "pool/overlay.h"

#include <sidepath/pool.h>

/* Which tables a slot's cells are set in. */
typedef struct sp_overlay_shown {
    bool embed, head;
    bool stale; /* a hide has failed: cells may still be set, though none counts as shown */
} sp_overlay_shown;

typedef struct sp_overlay_memory {
    sp_device *device; /* borrowed */
    int32_t n_slots;
    size_t bytes;            /* the budget; 0: no block, no tables */
    char *memory;            /* device [bytes] */
    sp_extent *extents;      /* [n_slots] */
    sp_extent *trial;        /* [n_slots] scratch of the search for room */
    sp_overlay_shown *shown; /* [n_slots] */
    void *cells;             /* device memory of the tables; pointers of both modules first */
    sp_column_ring ring;
    sp_pool_overlays embed, head;
} sp_overlay_memory;

/* SP_ERR_MEMORY names the setting to lower. On failure everything is released again. */
sp_status sp_overlay_memory_create(sp_device *device, int32_t n_slots, size_t bytes,
                                   sp_overlay_memory *out_memory, sp_error *error);
/* Waits for copies and switches in flight. A zeroed one is allowed. */
void sp_overlay_memory_destroy(sp_overlay_memory *memory);

/* Device bytes in use, tables included. */
size_t sp_overlay_memory_device_bytes(const sp_overlay_memory *memory);

/* Enqueues the copy into the slot's extent, which has the overlay's size. Does not block. */
sp_status sp_overlay_memory_write(sp_overlay_memory *memory, int32_t slot,
                                  const sp_overlay *overlay, sp_stream *stream);

/* show sets the slot's cells; hide clears them, if any may be set, and continues after a failed
 * table. What a failed hide leaves is cleared by the next hide, or overwritten by the next show.
 * Neither blocks. */
sp_status sp_overlay_memory_show(sp_overlay_memory *memory, int32_t slot,
                                 const sp_overlay *overlay);
sp_status sp_overlay_memory_hide(sp_overlay_memory *memory, int32_t slot);

#endif
