/*
 * values.h: the passes over every element of an adapter's tensors. Pure, and written so that a
 * compiler turns the inner loops into vector code.
 */
#ifndef SP_ADAPTER_VALUES_H
#define SP_ADAPTER_VALUES_H

#include <sidepath/status.h>

/*
 * Index of the first element of data [n] that is not finite, or that overflows when it is rounded
 * to `pool`; -1 if there is none.
 */
int64_t sp_values_find_bad(const void *data, sp_dtype dtype, int64_t n, sp_dtype pool);

/* Element `index` of data, exactly. */
float sp_values_at(const void *data, sp_dtype dtype, int64_t index);

#endif
