#include "pool/victim.h"

#include "base/error.h"
#include "base/grow.h"

bool sp_slot_is_idle(const sp_slot_info *slot)
{
    return slot->state == SP_SLOT_READY && !slot->pinned && !slot->awaited && slot->references == 0;
}

sp_status sp_pool_pick_victim(const sp_slot_info *slots, int32_t n_slots, int32_t *out_slot,
                              sp_error *error)
{
    int32_t victim = -1, n_pinned = 0;
    uint64_t oldest_use = 0;

    if (slots == NULL || out_slot == NULL)
        return sp_fail_null(error, slots != NULL ? "out_slot" : "slots");
    if (n_slots < 1)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "n_slots", n_slots,
                       "n_slots is %d; there must be one at least", (int)n_slots);
    for (int32_t i = 0; i < n_slots; i++) {
        sp_slot_info slot = {.struct_bytes = sizeof slot};
        sp_status status =
            sp_struct_read_at(&slot, sizeof slot, slots, (size_t)i, "sp_slot_info", error);

        if (status != SP_OK)
            return status;
        if ((int)slot.state < 0 || slot.state > SP_SLOT_DRAINING)
            return sp_fail(error, SP_ERR_ARGUMENT, NULL, "slots", i,
                           "the state of slot %d is %d, which no slot has", (int)i,
                           (int)slot.state);
        if (slot.state == SP_SLOT_EMPTY) {
            *out_slot = i;
            return SP_OK;
        }
        n_pinned += slot.pinned;
        if (sp_slot_is_idle(&slot) && (victim < 0 || slot.last_use < oldest_use)) {
            victim = i;
            oldest_use = slot.last_use;
        }
    }
    if (n_pinned == n_slots)
        return sp_fail(error, SP_ERR_SLOTS_PINNED, NULL, "slots", -1, "all %d slots are pinned",
                       (int)n_slots);
    if (victim < 0)
        return sp_fail(error, SP_POOL_FULL, NULL, "slots", -1, "all %d slots are in use",
                       (int)n_slots);
    *out_slot = victim;
    return SP_OK;
}
