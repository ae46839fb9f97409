/* victim.h: which slots may lose their adapter. The policy itself is sp_pool_pick_victim. */
#ifndef SP_POOL_VICTIM_H
#define SP_POOL_VICTIM_H

#include <sidepath/pool.h>

/* READY, not pinned, not awaited, not referenced. */
bool sp_slot_is_idle(const sp_slot_info *slot);

#endif
