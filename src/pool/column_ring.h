/*
 * column_ring.h: the host's side of switches of device tables. A switch writes one slot's column of
 * cells out of pinned memory, on the device's main stream, so it falls between the steps before and
 * after it and nobody waits for it. A few columns go by turns, so that a switch may be prepared
 * while earlier ones are under way.
 */
#ifndef SP_POOL_COLUMN_RING_H
#define SP_POOL_COLUMN_RING_H

#include <sidepath/device.h>

#define SP_COLUMN_TURNS 4 /* switches that may be under way before a further one waits */

typedef struct sp_column_ring {
    sp_device *device; /* borrowed */
    size_t bytes;      /* of one column */
    void *columns;     /* pinned [SP_COLUMN_TURNS][bytes] */
    sp_event *done[SP_COLUMN_TURNS];
    int32_t turn;
} sp_column_ring;

/* On failure nothing is left behind. */
sp_status sp_column_ring_create(sp_device *device, size_t bytes, sp_column_ring *out_ring,
                                sp_error *error);
void sp_column_ring_destroy(sp_column_ring *ring); /* waits for its switches */

/* The column of this turn, zeroed. Waits for an earlier switch, if need be. */
sp_status sp_column_ring_begin(sp_column_ring *ring, void **out_column);

/* The same column, as it is. */
void *sp_column_ring_column(const sp_column_ring *ring);

/*
 * Enqueues `n` cells of `cell_bytes`, `table_stride` bytes apart at `to`, out of consecutive ones
 * at `from` in the column.
 */
sp_status sp_column_ring_send(const sp_column_ring *ring, void *to, size_t table_stride,
                              const void *from, size_t cell_bytes, size_t n);

/* All cells are sent, or failed: the column may be filled again when they have been read. */
sp_status sp_column_ring_end(sp_column_ring *ring);

#endif
