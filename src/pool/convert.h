/*
 * convert.h: stored tensors into the pool's element type, row by row, with a stride of the pool's.
 * Any thread; nothing allocates.
 */
#ifndef SP_POOL_CONVERT_H
#define SP_POOL_CONVERT_H

#include "kernels/cpu/kernels.h"

#include <sidepath/adapter.h>

typedef struct sp_converter {
    const sp_kernels *kernels;
    sp_dtype dtype; /* of what is written */
} sp_converter;

/*
 * Converts the factor's rows to `to`, `stride` elements apart, with zeros after each up to the
 * next. Returns the first element that overflowed, in row-major order, or -1.
 */
int64_t sp_convert_factor(const sp_converter *converter, char *to, int32_t stride,
                          const sp_factor *factor);

#endif
