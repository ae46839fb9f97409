/*
 * pack_check.h: where a layout has room for a pair of an adapter, or why it has none; and the one
 * failure that the threads of a packing report.
 */
#ifndef SP_POOL_PACK_CHECK_H
#define SP_POOL_PACK_CHECK_H

#include <sidepath/pool.h>

#include <pthread.h>

/* Where a pair goes. */
typedef struct sp_pack_target {
    int32_t site; /* index in the layout: of a slot's site, or of a router; -1: an expert */
    int32_t place, expert; /* of an expert */
    bool apart;            /* a router or an expert: in the expert memory */
} sp_pack_target;

/*
 * By the pair's path: the adapter may have been opened with another geometry, or with none.
 * SP_ERR_REFUSED with `module-not-in-pool`, `experts-disabled`, `non-finite` (its scale);
 * SP_ERR_MISMATCH with `wrong-layer-kind`, `expert-out-of-range`, `shape-mismatch`;
 * SP_ERR_TOO_LARGE with `rank-exceeds-pool`, `expert-rank-exceeds-cap`.
 */
sp_status sp_pack_locate(const sp_layout *layout, const sp_adapter_site *site,
                         sp_pack_target *out_target, sp_error *error);

/* The module of a pair, for errors. */
const char *sp_pack_site_name(const sp_adapter_site *site);

/* SP_ERR_REFUSED with `duplicate-tensor`: the pair's place is taken by another one. */
sp_status sp_pack_twice(const sp_adapter_site *site, sp_error *error);

/* The failure of the lowest order, so that threads do not decide what is reported. */
typedef struct sp_pack_failure {
    pthread_mutex_t mutex; /* guards the fields below */
    int64_t order;         /* INT64_MAX: none */
    sp_status status;
    sp_error error;
} sp_pack_failure;

void sp_pack_failure_start(sp_pack_failure *failure);
/* A value of one factor, `letter` A or B, whose element `index` the pool's type cannot hold. */
void sp_pack_failure_overflow(sp_pack_failure *failure, int64_t order, const sp_adapter_site *site,
                              char letter, int64_t index, sp_dtype dtype);
/* The status of all, with its error; ends the use. */
sp_status sp_pack_failure_end(sp_pack_failure *failure, sp_error *error);

#endif
