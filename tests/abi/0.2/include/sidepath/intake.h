/*
 * intake.h: adapters that do not come from files of this host.
 *
 * Part of the adapter room. An adapter is a config and a list of tensors, wherever their bytes are.
 * sp_adapter_from_tensors takes them from memory in one call. An sp_intake takes them in two parts,
 * for a caller that wants the verdict before it moves gigabytes: from config and descriptions every
 * check is made that needs no data; then the bytes of each wanted tensor are written to where the
 * intake says, in pieces, and checked and hashed as they come; the result is the same
 * sp_adapter that sp_adapter_open makes of files with this content, with the same digest and
 * receipt.
 *
 * Stability: experimental.
 */
#ifndef SIDEPATH_INTAKE_H
#define SIDEPATH_INTAKE_H

#include <sidepath/adapter.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- from memory --------------------------------------------------------------------------- */

/* Where a view's bytes are; the numbers are DLPack's. */
typedef enum sp_view_device {
    SP_VIEW_HOST = 1,         /* kDLCPU */
    SP_VIEW_CUDA = 2,         /* kDLCUDA */
    SP_VIEW_CUDA_PINNED = 3,  /* kDLCUDAHost: read as host memory */
    SP_VIEW_CUDA_MANAGED = 13 /* kDLCUDAManaged: read through the device */
} sp_view_device;

/* One tensor in memory that its owner lends, as DLPack describes it. */
typedef struct sp_tensor_view {
    size_t struct_bytes;
    const char *name;       /* as PEFT's files have it, with or without "base_model.model." */
    const void *data;       /* element (0, 0, …) is byte_offset bytes further */
    sp_tensor_type type;    /* F32, BF16 or F16 */
    int32_t n_dims;         /* 0 .. SP_TENSOR_DIMS_MAX */
    const int64_t *shape;   /* [n_dims] */
    const int64_t *strides; /* [n_dims] elements from one index to the next, each above 0 where the
                               dimension is above 1; NULL: dense, row-major */
    uint64_t byte_offset;
    int32_t device_kind;  /* an sp_view_device; 0 is SP_VIEW_HOST */
    int32_t device_index; /* of the GPU; it must be that of options->views_on */
} sp_tensor_view;

/*
 * An adapter from the text of its adapter_config.json and its tensors: the audit, digest and
 * receipt of sp_adapter_open on a folder with the same content (without options->name it is named
 * "adapter"). Views may be strided, transposed and of any alignment; those on a GPU are copied to
 * the host first: what writes them must be over, or on that device's main stream. config
 * [config_bytes] and views [n_views] are borrowed until return, and so are the bytes that they
 * show, which must not change meanwhile: everything that is kept is copied. *out_adapter holds one
 * reference, owned by the caller. Thread-safe on distinct adapters; blocks for as long as copying
 * and hashing take, and on the GPU where views are there. Refusals as sp_adapter_open;
 * `header-malformed` and `duplicate-key` for descriptions that no file could have. SP_ERR_ARGUMENT:
 * NULL, a number out of range, a view without memory or on a device that options->views_on is not.
 * SP_ERR_STRIDE with `bad-stride`: a stride that is negative, or 0 in a dimension above 1, or leads
 * out of the address space; error->position is its dimension. SP_ERR_TOO_LARGE: 2^31 views or more.
 * SP_ERR_MEMORY, SP_ERR_DEVICE.
 */
SP_API sp_status sp_adapter_from_tensors(const char *config, size_t config_bytes,
                                         const sp_tensor_view *views, size_t n_views,
                                         const sp_adapter_options *options,
                                         sp_adapter **out_adapter, sp_error *error);

/* ---- headers first, data later ------------------------------------------------------------- */

/* One tensor as it is stored, before any of its bytes. */
typedef struct sp_tensor_desc {
    size_t struct_bytes;
    const char *name;
    sp_tensor_type type;
    int32_t n_dims;
    const int64_t *shape; /* [n_dims] */
} sp_tensor_desc;

typedef struct sp_intake sp_intake;

/*
 * The audit of all that needs no data. config [config_bytes] and tensors [n_tensors] are borrowed
 * until return; of the options the geometry is retained, and the data of the served tables borrowed
 * until sp_intake_finish or sp_intake_destroy. Allocates the memory that the tensors will be in.
 * *out_intake is owned by the caller. Blocks only where options->base_dir is read.
 * Statuses as sp_adapter_from_tensors, but those that are about data.
 */
SP_API sp_status sp_intake_create(const char *config, size_t config_bytes,
                                  const sp_tensor_desc *tensors, size_t n_tensors,
                                  const sp_adapter_options *options, sp_intake **out_intake,
                                  sp_error *error);
SP_API void sp_intake_destroy(sp_intake *intake); /* NULL is allowed */

/* The wanted tensors: those whose data is needed. What is ignored or skipped is not among them. */
SP_API size_t sp_intake_n_wanted(const sp_intake *intake);

typedef struct sp_wanted_tensor {
    size_t struct_bytes;
    size_t index;   /* in the list that the intake was made from */
    uint64_t bytes; /* of its data: dense, row-major, little-endian */
} sp_wanted_tensor;

/* SP_ERR_ARGUMENT: past the last, or no struct. */
SP_API sp_status sp_intake_wanted_at(const sp_intake *intake, size_t wanted,
                                     sp_wanted_tensor *out_tensor, sp_error *error);

/*
 * Where the next bytes of a wanted tensor go, and how many may be written there before
 * sp_intake_take; 0 where all have been taken. Pieces come in order, a whole number of elements
 * each. Different tensors may be filled by different threads at the same time.
 * SP_ERR_ARGUMENT: no such tensor, NULL.
 */
SP_API sp_status sp_intake_next(sp_intake *intake, size_t wanted, void **out_memory,
                                size_t *out_bytes, sp_error *error);

/*
 * Takes n_bytes that have been written there: values are checked, copies of the base compared, and
 * all of it is hashed. SP_ERR_ARGUMENT: more than there is room for, or no whole number of
 * elements; nothing was taken. SP_ERR_REFUSED with `non-finite`, SP_ERR_MISMATCH with
 * `base-copy-differs`, SP_ERR_MEMORY: the intake is of no use any more, and SP_ERR_STATE is what
 * further pieces of this tensor get.
 */
SP_API sp_status sp_intake_take(sp_intake *intake, size_t wanted, size_t n_bytes, sp_error *error);

/*
 * The checks that need all of the data, and the adapter, which holds one reference, owned by the
 * caller. The intake is empty afterwards, whatever came out. SP_ERR_TRUNCATED with `truncated`: a
 * tensor lacks bytes. SP_ERR_STATE: it was finished before. Refusals such as `no-effect`.
 */
SP_API sp_status sp_intake_finish(sp_intake *intake, sp_adapter **out_adapter, sp_error *error);

#ifdef __cplusplus
}
#endif
#endif
