/*
 * site_tables.h: the device tables through which kernels find a slot's factors: a, b, scale and
 * rank, [n_sites][n_slots] each, at fixed addresses. A slot's cells are a column; a switch writes
 * four columns of cells between two steps (column_ring.h).
 *
 * It has no slot states: pool.c decides when a slot is shown and hidden. Engine thread only; show
 * and hide do not block.
 */
#ifndef SP_POOL_SITE_TABLES_H
#define SP_POOL_SITE_TABLES_H

#include "pool/column_ring.h"

#include <sidepath/pool.h>

/* One slot's cells, [n_sites] each, and its version. */
typedef struct sp_site_column {
    uint64_t *generation; /* [1]; 0: the slot shows none */
    const void **a, **b;
    float *scale;
    int32_t *rank; /* 0: absent, and then the other cells are 0 too */
} sp_site_column;

typedef struct sp_site_tables {
    sp_device *device; /* borrowed */
    int32_t n_sites, n_slots;
    void *cells; /* device memory: generation, a, b, scale, rank */
    sp_column_ring ring;
    sp_event *hidden; /* recorded after the last step that could read what was hidden last */
} sp_site_tables;

/* On failure everything is released again. */
sp_status sp_site_tables_create(sp_device *device, int32_t n_sites, int32_t n_slots,
                                sp_site_tables *out_tables, sp_error *error);
void sp_site_tables_destroy(sp_site_tables *tables); /* waits for switches in flight */

/* Device bytes of all tables. */
size_t sp_site_tables_device_bytes(const sp_site_tables *tables);
/* The four tables of layout site `index`, each [n_slots], device addresses. */
sp_pool_tables sp_site_tables_at(const sp_site_tables *tables, int32_t site);

/* The column that the next show or hide sends, zeroed. Waits for an earlier switch if all columns
 * are in flight. */
sp_status sp_site_tables_begin(sp_site_tables *tables, sp_site_column *out_column);

/* [n_slots] on the device: the version that each slot shows, 0: none. */
const uint64_t *sp_site_tables_generations(const sp_site_tables *tables);

/* Sends the column. The rank makes a cell valid and the generation admits rows from device memory:
 * they are written last. */
sp_status sp_site_tables_show(sp_site_tables *tables, int32_t slot);

/* Makes every cell of the slot absent, generation and rank first; continues after a failure.
 * `hidden` is then recorded after all steps so far. */
sp_status sp_site_tables_hide(sp_site_tables *tables, int32_t slot);

#endif
