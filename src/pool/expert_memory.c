#include "pool/expert_memory.h"

#include "base/alloc.h"
#include "base/error.h"
#include "pool/image.h"

/* ---- life ---------------------------------------------------------------------------------- */

/* A slot's column of pointers: cells of each place, then factors. */
static size_t column_pointers(const sp_expert_memory *memory)
{
    return (size_t)memory->n_places + 1;
}

static size_t slot_cells_bytes(const sp_expert_memory *memory)
{
    return (size_t)memory->n_places * (size_t)memory->n_experts * sizeof(sp_expert_cell);
}

static size_t table_bytes(const sp_expert_memory *memory)
{
    return (size_t)memory->n_slots * column_pointers(memory) * sizeof(void *);
}

static sp_expert_memory sized(const sp_layout *layout, int32_t n_slots)
{
    return (sp_expert_memory){
        .n_slots = n_slots,
        .n_places = sp_layout_n_expert_places(layout),
        .n_experts = sp_geometry_experts(sp_layout_geometry(layout)),
    };
}

size_t sp_expert_memory_table_bytes(const sp_layout *layout, int32_t n_slots)
{
    sp_expert_memory memory = sized(layout, n_slots);

    return (size_t)n_slots * slot_cells_bytes(&memory) + table_bytes(&memory);
}

size_t sp_layout_expert_table_bytes(const sp_layout *layout, int32_t slots)
{
    bool none = layout == NULL || (sp_layout_n_expert_places(layout) == 0 &&
                                   sp_layout_n_sites(layout) == sp_layout_n_slot_sites(layout));

    if (none || slots < 1)
        return 0;
    return sp_expert_memory_table_bytes(layout, slots);
}

static void fill_views(sp_expert_memory *memory)
{
    const void **table = memory->table;
    const void **factors = table + (size_t)memory->n_places * (size_t)memory->n_slots;

    for (int32_t place = 0; place < memory->n_places; place++) {
        const void *cells = table + (size_t)place * (size_t)memory->n_slots;

        memory->views[place] = (sp_pool_experts){
            .struct_bytes = sizeof *memory->views, .cells = cells, .factors = factors};
    }
}

static sp_status allocate_device(sp_expert_memory *memory, sp_error *error)
{
    void *block = NULL;
    size_t cells_bytes = (size_t)memory->n_slots * slot_cells_bytes(memory);
    sp_status status = sp_device_alloc(memory->device, memory->bytes, &block, NULL);

    if (status != SP_OK)
        return sp_fail(error, SP_ERR_MEMORY, NULL, "expert-bytes", -1,
                       "the experts of adapters need %.1f MiB, which %s does not have; lower "
                       "expert-bytes",
                       (double)memory->bytes / 0x1p20, sp_device_name(memory->device));
    memory->memory = block;
    if (cells_bytes > 0) {
        status = sp_device_alloc(memory->device, cells_bytes, &block, error);
        if (status != SP_OK)
            return status;
        memory->cells = block;
    }
    status = sp_device_alloc(memory->device, table_bytes(memory), &memory->table, error);
    if (status != SP_OK)
        return status;
    status = sp_column_ring_create(memory->device, column_pointers(memory) * sizeof(void *),
                                   &memory->ring, error);
    if (status == SP_OK)
        fill_views(memory);
    return status;
}

sp_status sp_expert_memory_create(sp_device *device, const sp_layout *layout, int32_t n_slots,
                                  size_t bytes, sp_expert_memory *out_memory, sp_error *error)
{
    sp_expert_memory memory = sized(layout, n_slots);
    sp_status status = SP_OK;

    memory.device = device;
    memory.bytes = bytes;
    memory.extents = sp_calloc((size_t)n_slots, sizeof *memory.extents);
    memory.trial = sp_calloc((size_t)n_slots, sizeof *memory.trial);
    memory.shown = sp_calloc((size_t)n_slots, sizeof *memory.shown);
    memory.views = sp_calloc((size_t)memory.n_places + 1, sizeof *memory.views);
    if (memory.extents == NULL || memory.trial == NULL || memory.shown == NULL ||
        memory.views == NULL)
        status = sp_fail_memory(error, (size_t)n_slots * sizeof *memory.extents,
                                "the extents of a pool's experts");
    if (status == SP_OK && bytes > 0)
        status = allocate_device(&memory, error);
    if (status != SP_OK) {
        sp_expert_memory_destroy(&memory);
        return status;
    }
    *out_memory = memory;
    return SP_OK;
}

void sp_expert_memory_destroy(sp_expert_memory *memory)
{
    sp_column_ring_destroy(&memory->ring);
    sp_device_free(memory->device, memory->table);
    sp_device_free(memory->device, memory->cells);
    sp_device_free(memory->device, memory->memory);
    sp_free(memory->views);
    sp_free(memory->shown);
    sp_free(memory->trial);
    sp_free(memory->extents);
    *memory = (sp_expert_memory){0};
}

size_t sp_expert_memory_device_bytes(const sp_expert_memory *memory)
{
    return memory->bytes > 0 ? memory->bytes + (size_t)memory->n_slots * slot_cells_bytes(memory) +
                                   table_bytes(memory)
                             : 0;
}

/* ---- contents ------------------------------------------------------------------------------ */

char *sp_expert_memory_at(const sp_expert_memory *memory, int32_t slot)
{
    return memory->memory + memory->extents[slot].offset_bytes;
}

static char *cells_at(const sp_expert_memory *memory, int32_t slot)
{
    return memory->cells + (size_t)slot * slot_cells_bytes(memory);
}

sp_status sp_expert_memory_write(sp_expert_memory *memory, int32_t slot,
                                 const sp_expert_image *image, sp_stream *stream)
{
    sp_status status =
        sp_stream_copy(stream, sp_expert_memory_at(memory, slot), image->data, image->bytes, NULL);

    if (status == SP_OK && slot_cells_bytes(memory) > 0)
        status = sp_stream_copy(stream, cells_at(memory, slot), image->cells,
                                slot_cells_bytes(memory), NULL);
    return status;
}

static sp_status send_cells(sp_expert_memory *memory, int32_t slot, const void *const *column)
{
    if (memory->n_places == 0)
        return SP_OK;
    return sp_column_ring_send(&memory->ring, (void **)memory->table + slot,
                               (size_t)memory->n_slots * sizeof(void *), column, sizeof(void *),
                               (size_t)memory->n_places);
}

static sp_status send_factors(sp_expert_memory *memory, int32_t slot, const void *const *column)
{
    size_t at = (size_t)memory->n_places * (size_t)memory->n_slots + (size_t)slot;

    return sp_column_ring_send(&memory->ring, (void **)memory->table + at, sizeof(void *),
                               column + memory->n_places, sizeof(void *), 1);
}

static void set_shown(sp_expert_memory *memory, int32_t slot, sp_experts_shown shown)
{
    memory->n_shown += (shown == SP_EXPERTS_SHOWN) - (memory->shown[slot] == SP_EXPERTS_SHOWN);
    memory->shown[slot] = shown;
}

/* The pointers to cells come last: they make the others valid. */
sp_status sp_expert_memory_show(sp_expert_memory *memory, int32_t slot,
                                const sp_expert_image *image)
{
    void *begun;
    const void **column;
    sp_status ended, status = sp_column_ring_begin(&memory->ring, &begun);

    if (status != SP_OK)
        return status;
    /* Recorded first: a show that fails half-way must be hidden as well. */
    set_shown(memory, slot, SP_EXPERTS_SHOWN);
    column = begun;
    for (int32_t place = 0; place < memory->n_places; place++)
        if (image->present[place])
            column[place] = cells_at(memory, slot) +
                            (size_t)place * (size_t)memory->n_experts * sizeof(sp_expert_cell);
    column[memory->n_places] = sp_expert_memory_at(memory, slot);
    status = send_factors(memory, slot, column);
    if (status == SP_OK)
        status = send_cells(memory, slot, column);
    ended = sp_column_ring_end(&memory->ring);
    return status != SP_OK ? status : ended;
}

sp_status sp_expert_memory_hide(sp_expert_memory *memory, int32_t slot)
{
    void *column;
    sp_status first, status;

    if (memory->shown[slot] == SP_EXPERTS_HIDDEN)
        return SP_OK;
    set_shown(memory, slot, SP_EXPERTS_STALE);
    status = sp_column_ring_begin(&memory->ring, &column);
    if (status != SP_OK)
        return status;
    first = send_cells(memory, slot, column);
    status = send_factors(memory, slot, column);
    first = first != SP_OK ? first : status;
    status = sp_column_ring_end(&memory->ring);
    first = first != SP_OK ? first : status;
    if (first == SP_OK)
        set_shown(memory, slot, SP_EXPERTS_HIDDEN);
    return first;
}
