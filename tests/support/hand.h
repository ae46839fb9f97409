/*
 * hand.h: geometries, adapters and pools made by hand, for tests that need them without files.
 * Everything asserts that it worked.
 */
#ifndef SP_TEST_SUPPORT_HAND_H
#define SP_TEST_SUPPORT_HAND_H

#include "support/known_sites.h"
#include "support/test.h"

#include <sidepath/route.h>

/* Writes `value` to element `index` of a tensor of this type, rounded to nearest even. */
void hand_store(sp_dtype dtype, void *tensor, int64_t index, double value);
/* The element's exact value. */
double hand_load(sp_dtype dtype, const void *tensor, int64_t index);

/* A list of sites with the factors' memory, as an opened adapter would hold them. */
typedef struct hand_adapter {
    sp_adapter_site *sites;
    char **paths; /* [n_sites], owned */
    int32_t n_sites;
    sp_digest digest;
} hand_adapter;

/* An adapter without sites yet, whose digest is made from `identity`. */
hand_adapter *hand_adapter_create(uint64_t identity);
void hand_adapter_destroy(hand_adapter *adapter);

/* Adds a site with random factors of this type; returns it (valid until the next is added). */
sp_adapter_site *hand_adapter_add(hand_adapter *adapter, const site_dims *dims, int32_t rank,
                                  float scale, sp_dtype dtype, sp_test_random *random);
/* Adds a site with a copy of these factors: a [rank, k_in], b [n_out, rank]. */
sp_adapter_site *hand_adapter_add_copy(hand_adapter *adapter, const site_dims *dims, int32_t rank,
                                       float scale, sp_dtype dtype, const void *a, const void *b);

/* A geometry, its layout and a pool. */
typedef struct hand_pool {
    sp_geometry *geometry;
    sp_layout *layout;
    sp_device *device;
    sp_pool *pool;
    bool borrowed; /* the device */
} hand_pool;

hand_pool hand_pool_create(const site_dims *sites, size_t n_sites, int32_t rank, sp_dtype dtype,
                           int32_t slots);
/* Of a geometry with all sites, the pool holds the modules of the first n_held. */
hand_pool hand_pool_create_part(const site_dims *sites, size_t n_sites, size_t n_held, int32_t rank,
                                sp_dtype dtype, int32_t slots);
/* Of parts of the sites; slices' sites count in `sites`. */
hand_pool hand_pool_create_sliced(const site_dims *sites, size_t n_sites, int32_t rank,
                                  sp_dtype dtype, int32_t slots, const sp_site_slice *slices,
                                  size_t n_slices);
/* On this device, borrowed; images lie in memory pinned for it. The above opens the CPU. */
hand_pool hand_pool_create_on(sp_device *device, const site_dims *sites, size_t n_sites,
                              int32_t rank, sp_dtype dtype, int32_t slots);
hand_pool hand_pool_create_sliced_on(sp_device *device, const site_dims *sites, size_t n_sites,
                                     int32_t rank, sp_dtype dtype, int32_t slots,
                                     const sp_site_slice *slices, size_t n_slices);
void hand_pool_destroy(hand_pool *pool);

sp_image *hand_pack(const hand_pool *pool, const hand_adapter *adapter);
/* Packs and loads; returns the version, held once. */
sp_slot_handle hand_load_adapter(const hand_pool *pool, const hand_adapter *adapter);

/* What the slot holds now: no reference more. */
sp_slot_handle hand_handle(const sp_pool *pool, int32_t slot);
sp_slot_info hand_slot_info(const sp_pool *pool, int32_t slot);

/* Releases the version and drains it, so that its slot is EMPTY. */
void hand_unload(sp_pool *pool, sp_slot_handle handle);

/* Builds the plan with a span for each row, of what its slot holds now (-1: the base). row_scale
 * NULL: all 1. */
void hand_plan_rows(sp_plan *plan, const sp_pool *pool, const int32_t *seq_slot,
                    const float *row_scale, int32_t n_rows);

/* An executor of this many threads. */
sp_exec *hand_exec(int32_t threads);

#endif
