/*
 * expert_memory.h: the pool's expert memory: one block on the device at a fixed address, with a
 * byte budget, divided into extents, at most one per slot; the cells of every slot, which say where
 * in its extent each expert's factors are; and the small tables through which kernels find both. It
 * has no slot states: pool.c decides when an extent is taken, shown, hidden and freed. Engine
 * thread only, but for write, which a loader thread may call.
 *
 * A slot's cells are as large as all experts of the model (740 KB for 256 in 40 layers), so a
 * switch does not touch them: write copies them with the factors, while the slot is invisible, and
 * show sets one pointer for each place that the adapter adapts.
 *
 * Invariant: a slot's pointers are set only while its extent is taken and written. They change
 * between two steps, without blocking (column_ring.h). Routers are in the site tables (pool.c),
 * with factors in the extent.
 */
#ifndef SP_POOL_EXPERT_MEMORY_H
#define SP_POOL_EXPERT_MEMORY_H

#include "pool/column_ring.h"
#include "pool/expert_image.h"
#include "pool/extents.h"

#include <sidepath/pool.h>

/* What a slot's pointers are. */
typedef enum sp_experts_shown {
    SP_EXPERTS_HIDDEN = 0,
    SP_EXPERTS_SHOWN = 1,
    SP_EXPERTS_STALE = 2 /* a hide has failed: some may still be set, though none counts */
} sp_experts_shown;

typedef struct sp_expert_memory {
    sp_device *device; /* borrowed */
    int32_t n_slots, n_places, n_experts;
    size_t bytes;            /* the budget; 0: no block, no tables */
    char *memory;            /* device [bytes] */
    sp_extent *extents;      /* [n_slots] */
    sp_extent *trial;        /* [n_slots] scratch of the search for room */
    sp_experts_shown *shown; /* [n_slots] */
    int32_t n_shown;
    char *cells; /* device [n_slots][n_places][n_experts] of sp_expert_cell */
    void *table; /* device pointers: cells [n_places][n_slots], factors [n_slots] */
    sp_column_ring ring;
    sp_pool_experts *views; /* [n_places] */
} sp_expert_memory;

/* Device bytes of cells and tables for so many slots. */
size_t sp_expert_memory_table_bytes(const sp_layout *layout, int32_t n_slots);

/* bytes 0, or a layout that takes no experts: no block. SP_ERR_MEMORY names the setting to lower.
 * On failure everything is released again. */
sp_status sp_expert_memory_create(sp_device *device, const sp_layout *layout, int32_t n_slots,
                                  size_t bytes, sp_expert_memory *out_memory, sp_error *error);
/* Waits for copies and switches in flight. A zeroed one is allowed. */
void sp_expert_memory_destroy(sp_expert_memory *memory);

/* Device bytes in use, tables included. */
size_t sp_expert_memory_device_bytes(const sp_expert_memory *memory);

/* Where the slot's extent begins, on the device. */
char *sp_expert_memory_at(const sp_expert_memory *memory, int32_t slot);

/* Enqueues the copies into the slot's extent, which has the image's size, and its cells. Does not
 * block. */
sp_status sp_expert_memory_write(sp_expert_memory *memory, int32_t slot,
                                 const sp_expert_image *image, sp_stream *stream);

/* show sets the slot's pointers; hide clears them, if any may be set, and continues after a failed
 * table. What a failed hide leaves is cleared by the next hide, or overwritten by the next show.
 * Neither blocks. */
sp_status sp_expert_memory_show(sp_expert_memory *memory, int32_t slot,
                                const sp_expert_image *image);
sp_status sp_expert_memory_hide(sp_expert_memory *memory, int32_t slot);

#endif
