/*
 * delta_cuda_state.h: what an sp_delta_gpu is made of, and the steps that its files share:
 * delta_cuda.c (linear sites and tokens) and experts_cuda.c (experts and routers). All calls are
 * the engine thread's.
 */
#ifndef SP_DELTA_DELTA_CUDA_STATE_H
#define SP_DELTA_DELTA_CUDA_STATE_H

#include "delta/delta_cuda.h"

/* The grouped rows of a layer's experts. */
typedef struct sp_expert_items {
    void *block;      /* device memory of all the arrays; NULL: the pool has no experts */
    int32_t rows_max; /* of a window */
    sp_cuda_items items;
    void *rounded;           /* rows of an FP32 x; NULL: x is never FP32 */
    sp_cuda_group_rows rows; /* of the last begin */
    int32_t grouped;         /* first row of the window that is grouped now, or -1 */
    void *native;            /* the stream that last wrote or read the items, and whether it */
    bool after_group;        /* wrote them */
} sp_expert_items;

struct sp_delta_gpu {
    sp_pool *pool;
    sp_device *device;
    int number; /* of the GPU */
    int32_t multiprocessors;
    sp_cuda_kernels kernels;
    sp_stream *main_stream;
    int32_t rows_max, n_slots, rank_stride, type;
    int64_t slot_elements;
    void *block; /* device memory that holds the scratch */
    sp_cuda_scratch scratch;
    sp_cuda_row_report *report; /* device */
    /* Uploads rotate over pinned buffers of seq_slot and row_scale, rows_max each, with an event
     * for each that records when it has been read. The report, as the host reads it, follows
     * them. */
    char *staging;
    sp_cuda_row_report *report_read;
    sp_event *uploaded[SP_CUDA_UPLOADS];
    int32_t turn;
    int32_t rows_set; /* rows of seq_slot_in that may hold something other than -1 */
    int32_t
        device_rows; /* the most rows that ever came from device memory: a graph may write them */
    int32_t rows_started;   /* of the plan node that was enqueued last, or -1 */
    uint64_t build_started; /* the build of its plan; 0: rows chosen on the device */
    bool from_device;       /* its rows came from device memory */
    void *plan_native;      /* the native stream that it was enqueued on */
    bool after_plan;        /* it is that stream's last kernel, as far as known here */
    sp_expert_items experts;
};

/* The native stream of a call; NULL: the main one. */
void *sp_delta_gpu_native(const sp_delta_gpu *gpu, const sp_stream *stream);

/* The status of a launch, with the backend's error text. */
sp_status sp_delta_gpu_launched(const sp_delta_gpu *gpu, int code, const char *what,
                                sp_error *error);

/* Records that a kernel follows the plan's. */
void sp_delta_gpu_record(sp_delta_gpu *gpu, const void *native);

/* Adds the deltas of a router after its logits; x of the call is read. */
sp_status sp_delta_gpu_add_router(sp_delta_gpu *gpu, const sp_delta_gpu_call *call, int32_t index,
                                  sp_error *error);

void sp_delta_gpu_experts_destroy(sp_delta_gpu *gpu);

#endif
