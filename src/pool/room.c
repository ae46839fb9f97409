#include "pool/room.h"

#include "pool/victim.h"

#include <string.h>

/* The idle slot that was used least recently, among those with an extent in the trial; or -1. */
static int32_t oldest_idle(const sp_room *room, const sp_slot_info *slots, int32_t n_slots)
{
    int32_t oldest = -1;

    for (int32_t i = 0; i < n_slots; i++)
        if (room->trial[i].bytes > 0 && sp_slot_is_idle(&slots[i]) &&
            (oldest < 0 || slots[i].last_use < slots[oldest].last_use))
            oldest = i;
    return oldest;
}

/* Places all as the trials are; returns the first memory without room, or -1. */
static int32_t place_all(sp_room *rooms, int32_t n_rooms, int32_t n_slots)
{
    for (int32_t i = 0; i < n_rooms; i++)
        if (rooms[i].bytes > 0 && !sp_extents_place(rooms[i].trial, n_slots, rooms[i].block_bytes,
                                                    rooms[i].bytes, &rooms[i].offset_bytes))
            return i;
    return -1;
}

bool sp_room_find(sp_room *rooms, int32_t n_rooms, const sp_slot_info *slots, int32_t n_slots)
{
    int32_t short_of;

    for (int32_t i = 0; i < n_rooms; i++)
        memcpy(rooms[i].trial, rooms[i].extents, (size_t)n_slots * sizeof *rooms[i].trial);
    while ((short_of = place_all(rooms, n_rooms, n_slots)) >= 0) {
        int32_t slot = oldest_idle(&rooms[short_of], slots, n_slots);

        if (slot < 0)
            return false;
        /* A slot that is emptied loses what it has everywhere. */
        for (int32_t i = 0; i < n_rooms; i++)
            rooms[i].trial[slot].bytes = 0;
    }
    return true;
}
