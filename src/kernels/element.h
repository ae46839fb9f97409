/* element.h: one element of a tensor of any type, as FP32. For reference code and tails. */
#ifndef SP_KERNELS_ELEMENT_H
#define SP_KERNELS_ELEMENT_H

#include "base/half.h"

#include <sidepath/status.h>

static inline float sp_element_load(sp_dtype type, const void *data, int64_t index)
{
    if (type == SP_DTYPE_BF16)
        return sp_bf16_to_f32(((const uint16_t *)data)[index]);
    if (type == SP_DTYPE_F16)
        return sp_f16_to_f32(((const uint16_t *)data)[index]);
    return ((const float *)data)[index];
}

static inline void sp_element_store(sp_dtype type, void *data, int64_t index, float value)
{
    if (type == SP_DTYPE_BF16)
        ((uint16_t *)data)[index] = sp_f32_to_bf16(value);
    else if (type == SP_DTYPE_F16)
        ((uint16_t *)data)[index] = sp_f32_to_f16(value);
    else
        ((float *)data)[index] = value;
}

/* The value after one rounding to `type`. */
static inline float sp_element_round(sp_dtype type, float value)
{
    if (type == SP_DTYPE_BF16)
        return sp_bf16_to_f32(sp_f32_to_bf16(value));
    if (type == SP_DTYPE_F16)
        return sp_f16_to_f32(sp_f32_to_f16(value));
    return value;
}

static inline const void *sp_element_at(sp_dtype type, const void *data, int64_t index)
{
    return (const char *)data + index * (type == SP_DTYPE_F32 ? 4 : 2);
}

static inline void *sp_element_at_mut(sp_dtype type, void *data, int64_t index)
{
    return (char *)data + index * (type == SP_DTYPE_F32 ? 4 : 2);
}

#endif
