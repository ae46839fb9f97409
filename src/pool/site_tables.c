#include "pool/site_tables.h"

#include "base/error.h"

#define CELL_BYTES (2 * sizeof(void *) + sizeof(float) + sizeof(int32_t))

/* ---- life ---------------------------------------------------------------------------------- */

static size_t column_bytes(const sp_site_tables *tables)
{
    return sizeof(uint64_t) + (size_t)tables->n_sites * CELL_BYTES;
}

size_t sp_site_tables_device_bytes(const sp_site_tables *tables)
{
    return (size_t)tables->n_slots * column_bytes(tables);
}

sp_status sp_site_tables_create(sp_device *device, int32_t n_sites, int32_t n_slots,
                                sp_site_tables *out_tables, sp_error *error)
{
    sp_site_tables tables = {.device = device, .n_sites = n_sites, .n_slots = n_slots};
    sp_status status =
        sp_device_alloc(device, sp_site_tables_device_bytes(&tables), &tables.cells, error);

    if (status == SP_OK)
        status = sp_column_ring_create(device, column_bytes(&tables), &tables.ring, error);
    if (status == SP_OK) {
        status = sp_event_create(device, &tables.hidden, NULL);
        if (status != SP_OK)
            sp_fail(error, status, NULL, sp_device_name(device), -1,
                    "the events of the adapter pool cannot be made");
    }
    if (status != SP_OK) {
        sp_site_tables_destroy(&tables);
        return status;
    }
    *out_tables = tables;
    return SP_OK;
}

void sp_site_tables_destroy(sp_site_tables *tables)
{
    sp_column_ring_destroy(&tables->ring);
    sp_event_destroy(tables->hidden);
    sp_device_free(tables->device, tables->cells);
    *tables = (sp_site_tables){0};
}

/* ---- cells --------------------------------------------------------------------------------- */

/* The larger ones first, for their alignment; `block` has room for `slots` columns of n sites. */
static sp_site_column cut(void *block, size_t slots, size_t n)
{
    sp_site_column column = {.generation = block};

    n *= slots;
    column.a = (const void **)(void *)(column.generation + slots);
    column.b = column.a + n;
    column.scale = (float *)(void *)(column.b + n);
    column.rank = (int32_t *)(void *)(column.scale + n);
    return column;
}

static sp_site_column device_cells(const sp_site_tables *tables)
{
    return cut(tables->cells, (size_t)tables->n_slots, (size_t)tables->n_sites);
}

static sp_site_column host_column(const sp_site_tables *tables)
{
    return cut(sp_column_ring_column(&tables->ring), 1, (size_t)tables->n_sites);
}

const uint64_t *sp_site_tables_generations(const sp_site_tables *tables)
{
    return device_cells(tables).generation;
}

sp_pool_tables sp_site_tables_at(const sp_site_tables *tables, int32_t site)
{
    sp_site_column cells = device_cells(tables);
    size_t first = (size_t)site * (size_t)tables->n_slots;

    return (sp_pool_tables){
        .struct_bytes = sizeof(sp_pool_tables),
        .a = cells.a + first,
        .b = cells.b + first,
        .scale = cells.scale + first,
        .rank = cells.rank + first,
    };
}

/* ---- switches ------------------------------------------------------------------------------ */

sp_status sp_site_tables_begin(sp_site_tables *tables, sp_site_column *out_column)
{
    void *column;
    sp_status status = sp_column_ring_begin(&tables->ring, &column);

    if (status == SP_OK)
        *out_column = cut(column, 1, (size_t)tables->n_sites);
    return status;
}

static sp_status send(sp_site_tables *tables, int32_t slot, void *table, const void *column,
                      size_t cell_bytes)
{
    return sp_column_ring_send(&tables->ring, (char *)table + (size_t)slot * cell_bytes,
                               (size_t)tables->n_slots * cell_bytes, column, cell_bytes,
                               (size_t)tables->n_sites);
}

static sp_status send_generation(sp_site_tables *tables, int32_t slot, uint64_t *table,
                                 const uint64_t *generation)
{
    return sp_column_ring_send(&tables->ring, table + slot, sizeof *table, generation,
                               sizeof *table, 1);
}

sp_status sp_site_tables_show(sp_site_tables *tables, int32_t slot)
{
    sp_site_column cells = device_cells(tables), column = host_column(tables);
    sp_status ended, status = send(tables, slot, cells.a, column.a, sizeof *cells.a);

    if (status == SP_OK)
        status = send(tables, slot, cells.b, column.b, sizeof *cells.b);
    if (status == SP_OK)
        status = send(tables, slot, cells.scale, column.scale, sizeof *cells.scale);
    if (status == SP_OK)
        status = send(tables, slot, cells.rank, column.rank, sizeof *cells.rank);
    if (status == SP_OK)
        status = send_generation(tables, slot, cells.generation, column.generation);
    ended = sp_column_ring_end(&tables->ring);
    return status != SP_OK ? status : ended;
}

sp_status sp_site_tables_hide(sp_site_tables *tables, int32_t slot)
{
    sp_site_column cells = device_cells(tables), column;
    sp_status first, status = sp_site_tables_begin(tables, &column);

    if (status != SP_OK)
        return status;
    first = send_generation(tables, slot, cells.generation, column.generation);
    status = send(tables, slot, cells.rank, column.rank, sizeof *cells.rank);
    first = first != SP_OK ? first : status;
    status = send(tables, slot, cells.scale, column.scale, sizeof *cells.scale);
    first = first != SP_OK ? first : status;
    status = send(tables, slot, cells.a, column.a, sizeof *cells.a);
    first = first != SP_OK ? first : status;
    status = send(tables, slot, cells.b, column.b, sizeof *cells.b);
    first = first != SP_OK ? first : status;
    status = sp_column_ring_end(&tables->ring);
    first = first != SP_OK ? first : status;
    status = sp_event_record(tables->hidden, sp_device_main_stream(tables->device), NULL);
    return first != SP_OK ? first : status;
}
