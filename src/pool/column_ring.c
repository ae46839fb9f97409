#include "pool/column_ring.h"

#include "base/error.h"

#include <string.h>

sp_status sp_column_ring_create(sp_device *device, size_t bytes, sp_column_ring *out_ring,
                                sp_error *error)
{
    sp_column_ring ring = {.device = device, .bytes = bytes};
    sp_status status =
        sp_device_alloc_pinned(device, SP_COLUMNS_IN_FLIGHT * bytes, &ring.columns, error);

    if (status != SP_OK)
        return status;
    for (int i = 0; i < SP_COLUMNS_IN_FLIGHT && status == SP_OK; i++)
        status = sp_event_create(device, &ring.done[i], NULL);
    if (status != SP_OK) {
        sp_column_ring_destroy(&ring);
        return sp_fail(error, status, NULL, sp_device_name(device), -1,
                       "the events of the adapter pool cannot be made");
    }
    *out_ring = ring;
    return SP_OK;
}

void sp_column_ring_destroy(sp_column_ring *ring)
{
    if (ring->device == NULL)
        return;
    (void)sp_stream_wait(sp_device_main_stream(ring->device), NULL);
    for (int i = 0; i < SP_COLUMNS_IN_FLIGHT; i++)
        sp_event_destroy(ring->done[i]);
    sp_device_free_pinned(ring->device, ring->columns);
    *ring = (sp_column_ring){0};
}

sp_status sp_column_ring_begin(sp_column_ring *ring, void **out_column)
{
    sp_status status = sp_event_wait(ring->done[ring->next], NULL);

    if (status != SP_OK)
        return status;
    *out_column = sp_column_ring_column(ring);
    memset(*out_column, 0, ring->bytes);
    return SP_OK;
}

void *sp_column_ring_column(const sp_column_ring *ring)
{
    return (char *)ring->columns + (size_t)ring->next * ring->bytes;
}

sp_status sp_column_ring_send(const sp_column_ring *ring, void *to, size_t table_stride,
                              const void *from, size_t cell_bytes, size_t n)
{
    return sp_stream_copy_column(sp_device_main_stream(ring->device), to, table_stride, from,
                                 cell_bytes, cell_bytes, n, NULL);
}

sp_status sp_column_ring_end(sp_column_ring *ring)
{
    sp_status status =
        sp_event_record(ring->done[ring->next], sp_device_main_stream(ring->device), NULL);

    ring->next = (ring->next + 1) % SP_COLUMNS_IN_FLIGHT;
    return status;
}
