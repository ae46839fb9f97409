/*
 * room.h: room in the pool's second memories for one adapter: in all of them at once, or in none.
 * Pure but for the scratch.
 */
#ifndef SP_POOL_ROOM_H
#define SP_POOL_ROOM_H

#include "pool/extents.h"

#include <sidepath/pool.h>

/* What the adapter needs of one memory. */
typedef struct sp_room {
    const sp_extent *extents; /* [n_slots] that are taken */
    sp_extent *trial;         /* [n_slots] scratch */
    size_t block_bytes;       /* of the memory */
    size_t bytes;             /* needed; 0: nothing */
    size_t offset_bytes;      /* out, where bytes is not 0 */
} sp_room;

/*
 * Finds an extent in each memory. Where there is no room, slots that are idle count as free, least
 * recently used first and no more than are needed: those that an extent overlaps must be emptied
 * before it is taken. False: there is no room in one of them whatever is emptied.
 */
bool sp_room_find(sp_room *rooms, int32_t n_rooms, const sp_slot_info *slots, int32_t n_slots);

#endif
