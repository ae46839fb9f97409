/*
 * kernel_cases.h: every case of the kernel fixtures, for a backend that is given as a function: the
 * single form on delta.safetensors, the routed form on routed.safetensors.
 *
 * Against y_staged, whose rounding points are ours, an element may differ where an FP32 sum lands
 * on the other side of a rounding border than the FP64 one did: by one unit in the last place of y
 * or, where y is the small difference of y0 and the scaled delta, of the delta. The share is
 * printed, and held by staged_share_max.
 */
#ifndef SP_TEST_SUPPORT_KERNEL_CASES_H
#define SP_TEST_SUPPORT_KERNEL_CASES_H

#include "support/golden.h"
#include "support/hand.h"

typedef struct single_case {
    const char *name;
    const golden_tensor *x, *a, *b, *y0, *y_ref, *y_staged;
    float scale;
} single_case;

typedef struct routed_case {
    const char *name;
    const golden_tensor *x, *y0, *slots, *y_ref;
    int32_t n_rows, n_slots, k_in, n_out;
    sp_dtype dtype;
    hand_pool pool;
} routed_case;

sp_dtype kernel_case_dtype(const golden_tensor *tensor);

/* The tensor's values as `dtype`, owned by the caller; exact when it is its own type or F32. */
void *kernel_case_values(const golden_tensor *tensor, sp_dtype dtype);

/*
 * The case with operands of `dtype` and a y of `y_type` that begins as y0; returns y, [rows] of
 * y0's stride, owned by the caller.
 */
typedef void *(*single_run_fn)(void *user, const single_case *c, sp_dtype dtype, sp_dtype y_type);

/* All 43 cases in their own type with y of it and of F32; as_f32: in F32, too. */
void kernel_cases_check_single(const char *what, single_run_fn run, void *user, bool as_f32);

/* The same with the case's adapters in the slots of a pool, whose row stride of y is n_out. */
typedef void *(*routed_run_fn)(void *user, const routed_case *c, sp_dtype y_type);

/* All 8 cases; device NULL: the CPU. */
void kernel_cases_check_routed(sp_device *device, routed_run_fn run, void *user);

#endif
