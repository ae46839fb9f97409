/* single_cuda.h: the GPU's half of an sp_delta_single; single.c has checked all arguments. One
 * thread at a time. */
#ifndef SP_DELTA_SINGLE_CUDA_H
#define SP_DELTA_SINGLE_CUDA_H

#include "kernels/cuda/kernels_cuda.h"

#include <sidepath/delta.h>

typedef struct sp_single_gpu sp_single_gpu;

/* SP_ERR_UNSUPPORTED: what the kernels do not support. *out_gpu is owned by the caller. */
sp_status sp_single_gpu_create(const sp_delta_single_options *options, sp_single_gpu **out_gpu,
                               sp_error *error);
void sp_single_gpu_destroy(sp_single_gpu *gpu); /* NULL is allowed; waits for its work */

/* Enqueues the plan, shrink and expand on the call's stream (NULL: the main one). */
sp_status sp_single_gpu_apply(sp_single_gpu *gpu, const sp_delta_single_args *args,
                              sp_error *error);

#endif
