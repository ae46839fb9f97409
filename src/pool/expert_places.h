/*
 * expert_places.h: the expert modules of a layout: one place for each module of each layer, for
 * all of its experts. What an adapter has there is sparse and is no matter of the
 * layout.
 */
#ifndef SP_POOL_EXPERT_PLACES_H
#define SP_POOL_EXPERT_PLACES_H

#include <sidepath/pool.h>

typedef struct sp_expert_places {
    int32_t n;
    sp_expert_place *places; /* [n] by layer and module, as the geometry's rows first name them */
    int32_t *of_site;        /* [the geometry's sites] index of a place; -1: no expert's. NULL where
                                n is 0 */
} sp_expert_places;

/* SP_ERR_UNSUPPORTED: experts of one place whose dimensions differ. SP_ERR_MEMORY. On failure there
 * is nothing to destroy. */
sp_status sp_expert_places_create(const sp_geometry *geometry, sp_expert_places *out_places,
                                  sp_error *error);
void sp_expert_places_destroy(sp_expert_places *places); /* a zeroed one is allowed */

#endif
