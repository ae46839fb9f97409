/*
 * grouped.h: the grouped LoRA GEMM in FP16, for hosts that bring their adapters in their own
 * packed form and have no pool:
 *
 *     output[rows of g] += scale[a] * (input[rows of g] · A[a]) · B[a],   a = adapter of segment g
 *
 * A and B are transposed against PEFT's: A [in, S], B [S, out], S = max rank rounded up to 8.
 *
 * Rounding: xa = f16(Σ), delta = f16(Σ), y = f16(fmaf(scale, delta, y)), sums in FP32 from +0, on
 * the CPU in index order, on CUDA in another that is fixed by the input size and the adapter's
 * rank. An output depends on its own row, adapter and scale, and on nothing else.
 * Weights outside an adapter's own rank are ignored and may be NaN. A segment whose adapter has
 * rank 0 or scale 0 is neither read nor written.
 */
#ifndef SIDEPATH_GROUPED_H
#define SIDEPATH_GROUPED_H

#include <sidepath/device.h>

#ifdef __cplusplus
extern "C" {
#endif

#define SP_GROUPED_LORA_RANK_MAX  512
#define SP_GROUPED_LORA_ROWS_MAX  (1 << 18)
#define SP_GROUPED_LORA_WIDTH_MAX (1 << 20) /* of input and output */

/*
 * All tensors are FP16, dense and row-major; nothing is kept after the call. Every pointer is a
 * host pointer, or, for the calls of sp_grouped_lora, a pointer of its device.
 */
typedef struct sp_grouped_lora_params {
    size_t struct_bytes;
    const void *input;  /* [total_rows, input_size] */
    const void *lora_a; /* [n_adapters, input_size, S] */
    const void *lora_b; /* [n_adapters, S, output_size] */
    void *output;       /* [total_rows, output_size], accumulated in place */
    void *workspace;    /* at least sp_grouped_lora_workspace_bytes, 256-byte aligned */
    size_t workspace_bytes;
    const int32_t *segment_offsets;  /* [n_segments + 1] from 0 to total_rows, strictly rising */
    const int32_t *segment_adapters; /* [n_segments] in [0, n_adapters) */
    const int32_t *ranks;            /* [n_adapters] in [0, max_rank] */
    const float *scales;             /* [n_adapters], finite */
    int32_t total_rows, input_size, output_size;
    int32_t max_rank, n_segments, n_adapters;
} sp_grouped_lora_params;

/* S, the rank stride of A and B; 0 for a rank below 1 or above SP_GROUPED_LORA_RANK_MAX. */
SP_API int32_t sp_grouped_lora_rank_stride(int32_t max_rank);

/* Bytes of the workspace, the space for metadata included; 0 for sizes out of range. */
SP_API size_t sp_grouped_lora_workspace_bytes(int32_t total_rows, int32_t output_size,
                                              int32_t max_rank);

/*
 * The checks that sp_grouped_lora_gemm makes first, alone. Pure.
 * SP_ERR_UNSUPPORTED: more rows, a wider input or output or a higher rank than the limits above;
 * error->subject names which. SP_ERR_ARGUMENT: a size below 1, more segments than rows, a pointer
 * missing, a workspace that is too small or not aligned. SP_ERR_INPUT: offsets, adapters, ranks or
 * scales that are not as said above; error->subject names the array and error->position the index.
 */
SP_API sp_status sp_grouped_lora_check(const sp_grouped_lora_params *params, sp_error *error);

/*
 * Runs on the CPU, on the executor's threads (NULL: the caller alone); returns when the output is
 * written. Writes nothing when the checks fail. Does not allocate. cpu_isa as in sp_delta_options;
 * SP_ERR_UNSUPPORTED where this machine lacks the level.
 */
SP_API sp_status sp_grouped_lora_gemm(const sp_grouped_lora_params *params, sp_exec *exec,
                                      const char *cpu_isa, sp_error *error);

/* ---- on CUDA ------------------------------------------------------------------------------- */

/* The kernels of one GPU, and the memory in which a check reports. */
typedef struct sp_grouped_lora sp_grouped_lora;

/*
 * Before any launch or capture. *out_grouped is owned by the caller; borrows the device until
 * sp_grouped_lora_destroy. SP_ERR_UNSUPPORTED: a device that is no GPU, a library without these
 * kernels. SP_ERR_MEMORY, SP_ERR_DEVICE.
 */
SP_API sp_status sp_grouped_lora_create(sp_device *device, sp_grouped_lora **out_grouped,
                                        sp_error *error);
SP_API void sp_grouped_lora_destroy(sp_grouped_lora *grouped); /* NULL is allowed */

/*
 * Enqueues the GEMM on the stream (NULL: the device's main one; a host's own is wrapped by
 * sp_stream_wrap); may be captured. Does not allocate, wait or read device memory: of the metadata
 * only sizes and the presence of pointers are checked (SP_ERR_ARGUMENT and SP_ERR_UNSUPPORTED as
 * above). Offsets, adapters and ranks out of range touch nothing
 * outside the tensors; what they compute is not specified.
 */
SP_API sp_status sp_grouped_lora_launch(sp_grouped_lora *grouped,
                                        const sp_grouped_lora_params *params, sp_stream *stream,
                                        sp_error *error);

/*
 * The checks of sp_grouped_lora_check, with the same errors, on metadata in device memory, after
 * the work that the stream (NULL: the main one) holds, for which the call waits; not during a
 * capture.
 */
SP_API sp_status sp_grouped_lora_check_device(sp_grouped_lora *grouped,
                                              const sp_grouped_lora_params *params,
                                              sp_stream *stream, sp_error *error);

#ifdef __cplusplus
}
#endif
#endif
