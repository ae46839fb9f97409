#include "pool/victim.h"

bool sp_slot_is_idle(const sp_slot_info *slot)
{
    return slot->state == SP_SLOT_READY && !slot->pinned && !slot->awaited && slot->references == 0;
}

sp_status sp_pool_pick_victim(const sp_slot_info *slots, int32_t n_slots, int32_t *out_slot)
{
    int32_t victim = -1, n_pinned = 0;

    if (slots == NULL || n_slots < 1 || out_slot == NULL)
        return SP_ERR_ARGUMENT;
    for (int32_t i = 0; i < n_slots; i++) {
        if (slots[i].state == SP_SLOT_EMPTY) {
            *out_slot = i;
            return SP_OK;
        }
        n_pinned += slots[i].pinned;
        if (sp_slot_is_idle(&slots[i]) &&
            (victim < 0 || slots[i].last_use < slots[victim].last_use))
            victim = i;
    }
    if (n_pinned == n_slots)
        return SP_ERR_SLOTS_PINNED;
    if (victim < 0)
        return SP_POOL_FULL;
    *out_slot = victim;
    return SP_OK;
}
