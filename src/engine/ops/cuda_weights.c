/*
 * cuda_weights.c: base weights on their way to a GPU: out of the model's files through pinned
 * memory, one piece being read while the one before is being copied.
 */
#include "base/alloc.h"
#include "base/error.h"
#include "engine/ops/cuda_ops.h"

#include <string.h>

#define PIECE_BYTES ((size_t)16 << 20)
#define PIECES      2

typedef struct sp_cuda_uploader {
    sp_device *device;
    void *piece[PIECES]; /* pinned */
    sp_event *sent[PIECES];
    int32_t turn;
} sp_cuda_uploader;

void sp_cuda_uploader_destroy(sp_cuda_uploader *uploader)
{
    if (!uploader)
        return;
    for (int i = 0; i < PIECES; i++) {
        if (uploader->sent[i])
            (void)sp_event_wait(uploader->sent[i], NULL);
        sp_event_destroy(uploader->sent[i]);
        if (uploader->piece[i])
            sp_device_free_pinned(uploader->device, uploader->piece[i]);
    }
    sp_free(uploader);
}

static sp_status create_uploader(sp_cuda_ops *cuda, sp_error *error)
{
    sp_cuda_uploader *uploader = sp_calloc(1, sizeof *uploader);
    sp_status status = SP_OK;

    if (!uploader)
        return sp_fail_memory(error, sizeof *uploader, "placing weights");
    uploader->device = cuda->device;
    cuda->uploader = uploader;
    for (int i = 0; i < PIECES && status == SP_OK; i++) {
        status = sp_device_alloc_pinned(cuda->device, PIECE_BYTES, &uploader->piece[i], error);
        if (status == SP_OK)
            status = sp_event_create(cuda->device, &uploader->sent[i], error);
    }
    return status;
}

static sp_status send(sp_cuda_ops *cuda, char *to, const char *from, size_t bytes, sp_error *error)
{
    sp_cuda_uploader *uploader = cuda->uploader;

    for (size_t done = 0; done < bytes; done += PIECE_BYTES) {
        size_t n = bytes - done < PIECE_BYTES ? bytes - done : PIECE_BYTES;
        sp_event *sent = uploader->sent[uploader->turn];
        void *piece = uploader->piece[uploader->turn];
        sp_status status = sp_event_wait(sent, error);

        if (status != SP_OK)
            return status;
        memcpy(piece, from + done, n);
        status = sp_stream_copy(cuda->stream, to + done, piece, n, error);
        if (status == SP_OK)
            status = sp_event_record(sent, cuda->stream, error);
        if (status != SP_OK)
            return status;
        uploader->turn = (uploader->turn + 1) % PIECES;
    }
    return SP_OK;
}

sp_status sp_cuda_op_place(sp_ops *ops, sp_weight *weight, sp_error *error)
{
    sp_cuda_ops *cuda = (sp_cuda_ops *)ops;
    size_t columns = weight->columns > 0 ? (size_t)weight->columns : 1;
    size_t bytes = (size_t)weight->rows * columns * sp_dtype_bytes(weight->type);
    sp_status status = cuda->uploader ? SP_OK : create_uploader(cuda, error);
    void *memory = sp_cuda_block(cuda, bytes, &status, error);

    if (status == SP_OK)
        status = send(cuda, memory, weight->host, bytes, error);
    if (status == SP_OK)
        weight->placed = memory;
    return status;
}
