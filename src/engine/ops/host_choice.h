/*
 * host_choice.h: tokens from logits in host memory, on the executor's threads. Every backend that
 * has a row's logits on the host uses this; the numbers are those of the CPU's sampler, or exact
 * ones (exact_choice.h) where a GPU chooses tokens too.
 */
#ifndef SP_ENGINE_OPS_HOST_CHOICE_H
#define SP_ENGINE_OPS_HOST_CHOICE_H

#include "engine/ops/ops.h"

typedef struct sp_host_choice {
    const sp_kernels *kernels; /* borrowed, as is exec */
    sp_exec *exec;
    int32_t vocab, window;
    int32_t places; /* rows whose tokens are chosen concurrently */
    bool exact;     /* false after create */
    size_t sample_bytes;
    char *sample_scratch;   /* [places][sample_bytes] */
    float *adjusted_logits; /* [places, vocab] rows with bias and penalties */
} sp_host_choice;

/* Bytes that create allocates. */
size_t sp_host_choice_bytes(const sp_ops_options *options, int32_t window);

/* False: out of memory. The owner destroys it in either case. */
bool sp_host_choice_create(const sp_ops_options *options, int32_t window,
                           sp_host_choice *out_choice);
/* An all-zero struct is fine. */
void sp_host_choice_destroy(sp_host_choice *choice);

/* Scratch of sp_sample_scratch_bytes for a task of a job of at most `window` tasks: that of its
 * thread, or of the task where there are fewer tasks. */
char *sp_host_choice_scratch(const sp_host_choice *choice, int32_t task, int32_t thread);

/* As sp_op_choose: choices [n] of rows 0 .. n - 1 of logits [n, vocab], n at most `window`. */
void sp_host_choose(const sp_host_choice *choice, const float *logits, sp_choice *choices,
                    int32_t n);

#endif
