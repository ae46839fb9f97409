/*
 * column_ring.h: the host's side of updates of device tables. A switch writes one slot's column of
 * cells from pinned memory, on the device's main stream, so it is ordered between the steps before
 * and after it and nothing blocks. Columns rotate in a ring, so that a switch may be prepared while
 * earlier ones are in flight. One thread at a time.
 */
#ifndef SP_POOL_COLUMN_RING_H
#define SP_POOL_COLUMN_RING_H

#include <sidepath/device.h>

#define SP_COLUMNS_IN_FLIGHT 4 /* switches that may be in flight before another one waits */

typedef struct sp_column_ring {
    sp_device *device; /* borrowed */
    size_t bytes;      /* of one column */
    void *columns;     /* pinned [SP_COLUMN_TURNS][bytes] */
    sp_event *done[SP_COLUMNS_IN_FLIGHT];
    int32_t next;
} sp_column_ring;

/* On failure everything is released again, and the ring may not be used. */
sp_status sp_column_ring_create(sp_device *device, size_t bytes, sp_column_ring *out_ring,
                                sp_error *error);
void sp_column_ring_destroy(sp_column_ring *ring); /* waits for switches in flight */

/* The next column, zeroed. Waits for an earlier switch if all columns are in flight. */
sp_status sp_column_ring_begin(sp_column_ring *ring, void **out_column);

/* The column of the last begin, with its current content. */
void *sp_column_ring_column(const sp_column_ring *ring);

/*
 * Enqueues the copy of `n` cells of `cell_bytes`, consecutive at `from` in the column, to cells
 * `table_stride` bytes apart at `to`. Does not block.
 */
sp_status sp_column_ring_send(const sp_column_ring *ring, void *to, size_t table_stride,
                              const void *from, size_t cell_bytes, size_t n);

/* Ends the switch: all its cells are sent, or failed. The column is reused once they have been
 * read. */
sp_status sp_column_ring_end(sp_column_ring *ring);

#endif
