#include <sidepath/stage.h>

#define FNV_OFFSET UINT64_C(0xcbf29ce484222325)
#define FNV_PRIME  UINT64_C(0x100000001b3)

uint64_t sp_stage_id_hash(const char *name, uint64_t generation)
{
    uint64_t hash = FNV_OFFSET;

    for (const char *c = name; *c != '\0'; c++)
        hash = (hash ^ (uint8_t)*c) * FNV_PRIME;
    for (int32_t i = 0; i < 8 && generation != 0; i++)
        hash = (hash ^ (uint8_t)(generation >> (8 * i))) * FNV_PRIME;
    return hash != 0 ? hash : 1;
}
