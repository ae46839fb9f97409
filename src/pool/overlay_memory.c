#include "pool/overlay_memory.h"

#include "base/alloc.h"
#include "base/error.h"

/* One slot's cells: a column of the tables, which are stored in this order, [n_slots] each. */
typedef struct module_pointers {
    const void *rows, *map, *ids;
} module_pointers;

typedef struct module_numbers {
    int32_t n, row_type;
} module_numbers;

enum { EMBED, HEAD, MODULES };

typedef struct overlay_column {
    module_pointers pointers[MODULES];
    module_numbers numbers[MODULES]; /* a cell is valid when n is not 0 */
} overlay_column;

#define POINTERS (sizeof(module_pointers) / sizeof(void *) * MODULES)
#define NUMBERS  (sizeof(module_numbers) / sizeof(int32_t) * MODULES)

/* ---- life ---------------------------------------------------------------------------------- */

static char *pointer_table(const sp_overlay_memory *memory, size_t index)
{
    return (char *)memory->cells + index * (size_t)memory->n_slots * sizeof(void *);
}

static char *number_table(const sp_overlay_memory *memory, size_t index)
{
    return pointer_table(memory, POINTERS) + index * (size_t)memory->n_slots * sizeof(int32_t);
}

static sp_pool_overlays tables_of(const sp_overlay_memory *memory, int module)
{
    size_t pointer = (size_t)module * POINTERS / MODULES;
    size_t number = (size_t)module * NUMBERS / MODULES;

    return (sp_pool_overlays){
        .struct_bytes = sizeof(sp_pool_overlays),
        .rows = (const void *const *)(void *)pointer_table(memory, pointer),
        .map = (const int32_t *const *)(void *)pointer_table(memory, pointer + 1),
        .ids = (const int32_t *const *)(void *)pointer_table(memory, pointer + 2),
        .n = (const int32_t *)(void *)number_table(memory, number),
        .row_type = (const int32_t *)(void *)number_table(memory, number + 1),
    };
}

static size_t cells_bytes(const sp_overlay_memory *memory)
{
    return (size_t)memory->n_slots * sizeof(overlay_column);
}

static sp_status allocate_device(sp_overlay_memory *memory, sp_error *error)
{
    void *block;
    sp_status status = sp_device_alloc(memory->device, memory->bytes, &block, NULL);

    if (status != SP_OK)
        return sp_fail(error, SP_ERR_MEMORY, NULL, "overlay-bytes", -1,
                       "the replaced rows of adapters need %.1f MiB, which %s does not have; lower "
                       "overlay-bytes",
                       (double)memory->bytes / 0x1p20, sp_device_name(memory->device));
    memory->memory = block;
    status = sp_device_alloc(memory->device, cells_bytes(memory), &memory->cells, error);
    if (status == SP_OK)
        status =
            sp_column_ring_create(memory->device, sizeof(overlay_column), &memory->ring, error);
    if (status != SP_OK)
        return status;
    memory->embed = tables_of(memory, EMBED);
    memory->head = tables_of(memory, HEAD);
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
    sp_column_ring_destroy(&memory->ring);
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
                          overlay->data, overlay->bytes, NULL);
}

static sp_status send_pointers(sp_overlay_memory *memory, int32_t slot,
                               const overlay_column *column)
{
    return sp_column_ring_send(
        &memory->ring, pointer_table(memory, 0) + (size_t)slot * sizeof(void *),
        (size_t)memory->n_slots * sizeof(void *), column->pointers, sizeof(void *), POINTERS);
}

static sp_status send_numbers(sp_overlay_memory *memory, int32_t slot, const overlay_column *column)
{
    return sp_column_ring_send(
        &memory->ring, number_table(memory, 0) + (size_t)slot * sizeof(int32_t),
        (size_t)memory->n_slots * sizeof(int32_t), column->numbers, sizeof(int32_t), NUMBERS);
}

static void fill_part(const sp_overlay_memory *memory, int32_t slot, const sp_overlay_part *part,
                      int module, overlay_column *column)
{
    const char *data = memory->memory + memory->extents[slot].offset_bytes;

    if (part->n == 0)
        return;
    column->pointers[module] =
        (module_pointers){data + part->rows_offset_bytes, data + part->map_offset_bytes,
                          data + part->ids_offset_bytes};
    column->numbers[module] = (module_numbers){part->n, (int32_t)part->dtype};
}

sp_status sp_overlay_memory_show(sp_overlay_memory *memory, int32_t slot, const sp_overlay *overlay)
{
    sp_overlay_shown shown = {.embed = overlay->embed.n > 0, .head = overlay->head.n > 0};
    void *begun;
    overlay_column *column;
    sp_status ended, status = sp_column_ring_begin(&memory->ring, &begun);

    if (status != SP_OK)
        return status;
    /* Recorded first: a show that fails half-way must be hidden as well. */
    memory->shown[slot] = shown;
    memory->embed.n_slots += shown.embed;
    memory->head.n_slots += shown.head;
    column = begun;
    fill_part(memory, slot, &overlay->embed, EMBED, column);
    fill_part(memory, slot, &overlay->head, HEAD, column);
    status = send_pointers(memory, slot, column);
    if (status == SP_OK)
        status = send_numbers(memory, slot, column);
    ended = sp_column_ring_end(&memory->ring);
    return status != SP_OK ? status : ended;
}

sp_status sp_overlay_memory_hide(sp_overlay_memory *memory, int32_t slot)
{
    sp_overlay_shown shown = memory->shown[slot];
    void *column;
    sp_status first, status;

    if (!shown.embed && !shown.head && !shown.stale)
        return SP_OK;
    memory->embed.n_slots -= shown.embed;
    memory->head.n_slots -= shown.head;
    memory->shown[slot] = (sp_overlay_shown){.stale = true};
    status = sp_column_ring_begin(&memory->ring, &column);
    if (status != SP_OK)
        return status;
    first = send_numbers(memory, slot, column);
    status = send_pointers(memory, slot, column);
    first = first != SP_OK ? first : status;
    status = sp_column_ring_end(&memory->ring);
    first = first != SP_OK ? first : status;
    memory->shown[slot].stale = first != SP_OK;
    return first;
}
