#include "pool/overlay_memory.h"

#include "base/alloc.h"
#include "base/error.h"

/* Bytes of one slot's cells in the tables of one module. */
#define CELL_BYTES (3 * sizeof(void *) + 2 * sizeof(int32_t))

/* ---- life ---------------------------------------------------------------------------------- */

/* Cuts the tables of one module out of device memory; pointers first, for their alignment. */
static sp_pool_overlays cut_tables(char *cells, int32_t n_slots)
{
    size_t n = (size_t)n_slots;

    return (sp_pool_overlays){
        .rows = (const void *const *)(void *)cells,
        .map = (const int32_t *const *)(void *)(cells + n * sizeof(void *)),
        .ids = (const int32_t *const *)(void *)(cells + 2 * n * sizeof(void *)),
        .n = (const int32_t *)(void *)(cells + 3 * n * sizeof(void *)),
        .row_type = (const int32_t *)(void *)(cells + n * (3 * sizeof(void *) + sizeof(int32_t))),
    };
}

static size_t cells_bytes(const sp_overlay_memory *memory)
{
    return 2 * (size_t)memory->n_slots * CELL_BYTES;
}

static sp_status allocate_device(sp_overlay_memory *memory, sp_error *error)
{
    void *block;
    sp_status status = sp_device_alloc(memory->device, memory->bytes, &block, NULL);

    if (status != SP_OK)
        return sp_fail(error, SP_ERR_MEMORY, NULL, "--overlay-bytes", -1,
                       "the replaced rows of adapters need %.1f MiB, which %s does not have; lower "
                       "--overlay-bytes",
                       (double)memory->bytes / 0x1p20, sp_device_name(memory->device));
    memory->memory = block;
    status = sp_device_alloc(memory->device, cells_bytes(memory), &memory->cells, error);
    if (status != SP_OK)
        return status;
    memory->embed = cut_tables(memory->cells, memory->n_slots);
    memory->head = cut_tables((char *)memory->cells + cells_bytes(memory) / 2, memory->n_slots);
    return SP_OK;
}

sp_status sp_overlay_memory_create(sp_device *device, int32_t n_slots, size_t bytes,
                                   sp_overlay_memory *out_memory, sp_error *error)
{
    sp_overlay_memory memory = {.device = device, .n_slots = n_slots, .bytes = bytes};
    sp_status status = SP_OK;

    memory.extents = sp_calloc((size_t)n_slots, sizeof *memory.extents);
    memory.trial = sp_calloc((size_t)n_slots, sizeof *memory.trial);
    memory.shown = sp_calloc((size_t)n_slots, sizeof *memory.shown);
    if (!memory.extents || !memory.trial || !memory.shown)
        status = sp_fail_memory(error, (size_t)n_slots * sizeof *memory.extents,
                                "the extents of a pool");
    if (status == SP_OK && bytes > 0)
        status = allocate_device(&memory, error);
    if (status != SP_OK) {
        sp_overlay_memory_destroy(&memory);
        return status;
    }
    *out_memory = memory;
    return SP_OK;
}

void sp_overlay_memory_destroy(sp_overlay_memory *memory)
{
    sp_device_free(memory->device, memory->cells);
    sp_device_free(memory->device, memory->memory);
    sp_free(memory->shown);
    sp_free(memory->trial);
    sp_free(memory->extents);
    *memory = (sp_overlay_memory){0};
}

size_t sp_overlay_memory_device_bytes(const sp_overlay_memory *memory)
{
    return memory->bytes > 0 ? memory->bytes + cells_bytes(memory) : 0;
}

/* ---- contents ------------------------------------------------------------------------------ */

sp_status sp_overlay_memory_write(sp_overlay_memory *memory, int32_t slot,
                                  const sp_overlay *overlay, sp_stream *stream)
{
    return sp_stream_copy(stream, memory->memory + memory->extents[slot].offset_bytes,
                          overlay->data, overlay->bytes);
}

/* The cells of one slot and module. n is what makes them count. */
typedef struct overlay_cells {
    const void *rows, *map, *ids;
    int32_t n, row_type;
} overlay_cells;

static sp_status write_cell(sp_overlay_memory *memory, const void *table, int32_t slot,
                            const void *value, size_t bytes)
{
    size_t offset = (size_t)((const char *)table - (const char *)memory->cells);

    return sp_device_write(memory->device, (char *)memory->cells + offset + (size_t)slot * bytes,
                           value, bytes);
}

static sp_status write_cells(sp_overlay_memory *memory, const sp_pool_overlays *tables,
                             int32_t slot, const overlay_cells *cells)
{
    sp_status status = SP_OK;

    if (cells->n == 0)
        status = write_cell(memory, tables->n, slot, &cells->n, sizeof cells->n);
    if (status == SP_OK)
        status = write_cell(memory, tables->rows, slot, &cells->rows, sizeof cells->rows);
    if (status == SP_OK)
        status = write_cell(memory, tables->map, slot, &cells->map, sizeof cells->map);
    if (status == SP_OK)
        status = write_cell(memory, tables->ids, slot, &cells->ids, sizeof cells->ids);
    if (status == SP_OK)
        status =
            write_cell(memory, tables->row_type, slot, &cells->row_type, sizeof cells->row_type);
    if (status == SP_OK && cells->n != 0)
        status = write_cell(memory, tables->n, slot, &cells->n, sizeof cells->n);
    return status;
}

static sp_status show_part(sp_overlay_memory *memory, const sp_pool_overlays *tables, int32_t slot,
                           const sp_overlay_part *part)
{
    const char *data = memory->memory + memory->extents[slot].offset_bytes;
    overlay_cells cells = {
        .rows = data + part->rows_offset_bytes,
        .map = data + part->map_offset_bytes,
        .ids = data + part->ids_offset_bytes,
        .n = part->n,
        .row_type = (int32_t)part->dtype,
    };

    return part->n > 0 ? write_cells(memory, tables, slot, &cells) : SP_OK;
}

sp_status sp_overlay_memory_show(sp_overlay_memory *memory, int32_t slot, const sp_overlay *overlay)
{
    sp_overlay_shown shown = {overlay->embed.n > 0, overlay->head.n > 0};
    sp_status status;

    /* Known before it is done: what fails half-way must be hidden as well. */
    memory->shown[slot] = shown;
    memory->embed.n_slots += shown.embed;
    memory->head.n_slots += shown.head;
    status = show_part(memory, &memory->embed, slot, &overlay->embed);
    if (status == SP_OK)
        status = show_part(memory, &memory->head, slot, &overlay->head);
    return status;
}

sp_status sp_overlay_memory_hide(sp_overlay_memory *memory, int32_t slot)
{
    const overlay_cells absent = {0};
    sp_overlay_shown shown = memory->shown[slot];
    sp_status first = SP_OK, second = SP_OK;

    if (shown.embed)
        first = write_cells(memory, &memory->embed, slot, &absent);
    if (shown.head)
        second = write_cells(memory, &memory->head, slot, &absent);
    memory->embed.n_slots -= shown.embed;
    memory->head.n_slots -= shown.head;
    memory->shown[slot] = (sp_overlay_shown){false, false};
    return first != SP_OK ? first : second;
}
