/*
 * gpu_batch.h: a batch of scene rows in device memory, between guards, for tests of sp_delta on a
 * GPU. Buffers keep their addresses for the batch's life, so that a graph may hold them. All that
 * is no row of the batch is poison, and is checked when the batch is read.
 */
#ifndef SP_TESTS_CUDA_GPU_BATCH_H
#define SP_TESTS_CUDA_GPU_BATCH_H

#include "cuda/gpu_main.h"
#include "support/delta_scene.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define GUARD_BYTES 1024
#define POISON      0xa5

typedef struct gpu_buffer {
    char *device, *host; /* GUARD_BYTES, bytes, GUARD_BYTES */
    size_t bytes;
} gpu_buffer;

typedef struct gpu_batch {
    delta_rig *rig;
    sp_device *device;
    sp_plan *plan;
    sp_stream *stream;               /* NULL: the main one */
    int32_t rows_max, n_rows, n_set; /* rows of the plan; of which the batch gave n_set */
    gpu_buffer x, y[SCENE_SITES_MAX];
    sp_delta_output outputs[SCENE_SITES_MAX];
} gpu_batch;

static inline gpu_buffer gpu_buffer_make(sp_device *device, size_t bytes)
{
    gpu_buffer buffer = {.bytes = bytes};
    void *memory = NULL;
    sp_error error;

    assert_ok(sp_device_alloc(device, bytes + 2 * GUARD_BYTES, &memory, &error), &error);
    buffer.device = memory;
    buffer.host = malloc(bytes + 2 * GUARD_BYTES);
    assert_non_null(buffer.host);
    return buffer;
}

static inline void gpu_buffer_free(sp_device *device, gpu_buffer *buffer)
{
    sp_device_free(device, buffer->device);
    free(buffer->host);
}

/* `bytes` of data, poison all around. */
static inline void gpu_buffer_write(sp_device *device, gpu_buffer *buffer, const void *data,
                                    size_t bytes)
{
    memset(buffer->host, POISON, buffer->bytes + 2 * GUARD_BYTES);
    memcpy(buffer->host + GUARD_BYTES, data, bytes);
    assert_ok(sp_device_write(device, buffer->device, buffer->host, buffer->bytes + 2 * GUARD_BYTES,
                              NULL),
              NULL);
}

/* The data, behind the guard, of which all after `bytes` must still be poison. */
static inline char *gpu_buffer_read(sp_device *device, gpu_buffer *buffer, size_t bytes)
{
    size_t all = buffer->bytes + 2 * GUARD_BYTES;

    memset(buffer->host, 0, all);
    assert_ok(sp_device_read(device, buffer->host, buffer->device, all, NULL), NULL);
    for (size_t i = 0; i < all; i++)
        if ((i < GUARD_BYTES || i >= GUARD_BYTES + bytes) &&
            (unsigned char)buffer->host[i] != POISON)
            fail_msg("byte %zu of %zu was written outside the rows", i, all);
    return buffer->host + GUARD_BYTES;
}

static inline gpu_batch gpu_batch_make(delta_rig *rig, int32_t rows_max)
{
    const delta_scene *scene = rig->scene;
    gpu_batch batch = {.rig = rig, .device = rig->pool.device, .rows_max = rows_max};
    size_t element = sp_dtype_bytes(scene_x_type(scene));
    void *y[SCENE_SITES_MAX];

    assert_ok(sp_plan_create(rows_max, rig->n_slots, &batch.plan, NULL), NULL);
    batch.x = gpu_buffer_make(batch.device, (size_t)rows_max * (size_t)scene->x_stride * element);
    for (int32_t i = 0; i < scene->n_sites; i++) {
        batch.y[i] = gpu_buffer_make(batch.device, (size_t)rows_max * scene_y_row_bytes(scene, i));
        y[i] = batch.y[i].device + GUARD_BYTES;
    }
    rig_outputs(rig, y, batch.outputs);
    return batch;
}

static inline void gpu_batch_free(gpu_batch *batch)
{
    sp_plan_destroy(batch->plan);
    gpu_buffer_free(batch->device, &batch->x);
    for (int32_t i = 0; i < batch->rig->scene->n_sites; i++)
        gpu_buffer_free(batch->device, &batch->y[i]);
}

/* x and y of gathered rows, which are freed. The plan stays. */
static inline void gpu_batch_fill(gpu_batch *batch, rig_batch *host, int32_t n_rows)
{
    const delta_scene *scene = batch->rig->scene;
    size_t x_bytes = (size_t)scene->x_stride * sp_dtype_bytes(scene_x_type(scene));

    gpu_buffer_write(batch->device, &batch->x, host->x, (size_t)n_rows * x_bytes);
    for (int32_t i = 0; i < scene->n_sites; i++) {
        gpu_buffer_write(batch->device, &batch->y[i], host->y[i],
                         (size_t)n_rows * scene_y_row_bytes(scene, i));
        free(host->y[i]);
    }
    batch->n_set = n_rows;
    rig_batch_free(host);
}

/* The rows, and up to padded_rows pads of the base behind them, whose x and y are poison. */
static inline void gpu_batch_set(gpu_batch *batch, const int32_t *rows, int32_t n_rows,
                                 int32_t padded_rows)
{
    rig_batch host = rig_gather(batch->rig, rows, n_rows);
    int32_t n = n_rows > padded_rows ? n_rows : padded_rows;
    int32_t *slots = malloc((size_t)n * sizeof *slots);
    float *scales = malloc((size_t)n * sizeof *scales);

    assert_true(slots != NULL && scales != NULL && n <= batch->rows_max);
    for (int32_t i = 0; i < n; i++) {
        slots[i] = i < n_rows ? host.seq_slot[i] : SP_SLOT_BASE;
        scales[i] = i < n_rows ? host.row_scale[i] : 1.0f;
    }
    hand_plan_rows(batch->plan, batch->rig->pool.pool, slots, scales, n);
    gpu_batch_fill(batch, &host, n_rows);
    batch->n_rows = n;
    free(slots);
    free(scales);
}

static inline const void *gpu_batch_x(const gpu_batch *batch)
{
    return batch->x.device + GUARD_BYTES;
}

/* Its call, on its stream. */
static inline sp_delta_call gpu_batch_call(const gpu_batch *batch)
{
    sp_delta_call call = rig_call(batch->rig, batch->plan, gpu_batch_x(batch), batch->outputs);

    call.stream = batch->stream;
    return call;
}

/* What a step enqueues; what a graph of it holds. */
static inline void gpu_batch_enqueue(gpu_batch *batch)
{
    sp_delta_call call = gpu_batch_call(batch);
    sp_error error;

    assert_ok(sp_delta_start(batch->rig->delta, batch->plan, batch->stream, &error), &error);
    assert_ok(sp_delta_apply(batch->rig->delta, &call, &error), &error);
}

static inline void gpu_batch_run(gpu_batch *batch)
{
    sp_error error;

    assert_ok(sp_delta_upload(batch->rig->delta, batch->plan, batch->stream, &error), &error);
    gpu_batch_enqueue(batch);
    if (batch->stream != NULL) /* reads follow the main one */
        assert_ok(sp_stream_wait(batch->stream, &error), &error);
}

/* Output i of the rows, with their pads; lives until the next read of it. */
static inline char *gpu_batch_read(gpu_batch *batch, int32_t i)
{
    return gpu_buffer_read(batch->device, &batch->y[i],
                           (size_t)batch->n_set * scene_y_row_bytes(batch->rig->scene, i));
}

#endif
