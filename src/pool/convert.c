/* convert.c: runs of contiguous elements through the level's kernel; views with strides of their
 * own through a small stage in FP32, which holds every stored type exactly. */
#include "pool/convert.h"

#include "adapter/values.h"
#include "base/half.h"

#include <math.h>
#include <string.h>

#define CHUNK_ELEMENTS 8192 /* converted and checked while in the first-level cache */
#define STAGE_FLOATS   256

/* Elements as FP32, exactly. Stored tensors may be at any byte address. */
static void load_floats(sp_dtype dtype, const char *from, int64_t stride, int32_t n, float *out)
{
    uint16_t half;

    switch (dtype) {
    case SP_DTYPE_F32:
        for (int32_t i = 0; i < n; i++)
            memcpy(&out[i], from + 4 * stride * i, 4);
        break;
    case SP_DTYPE_BF16:
        for (int32_t i = 0; i < n; i++) {
            memcpy(&half, from + 2 * stride * i, 2);
            out[i] = sp_bf16_to_f32(half);
        }
        break;
    case SP_DTYPE_F16:
        for (int32_t i = 0; i < n; i++) {
            memcpy(&half, from + 2 * stride * i, 2);
            out[i] = sp_f16_to_f32(half);
        }
        break;
    }
}

/* The first of n converted elements that was finite before conversion and no longer is; n if there
 * is none. */
static int64_t first_overflow(sp_dtype to_type, const void *to, sp_dtype from_type,
                              const void *from, int64_t n)
{
    int64_t i = sp_values_find_bad(to, to_type, n, to_type);

    for (; i >= 0 && i < n; i++) {
        if (!isfinite(sp_values_at(to, to_type, i)) && isfinite(sp_values_at(from, from_type, i)))
            return i;
    }
    return n;
}

/* n contiguous elements, aligned to their type; returns the first that overflowed, or n. */
static int64_t convert_run(const sp_converter *converter, char *to, sp_dtype from_type,
                           const char *from, int64_t n)
{
    int64_t to_bytes = (int64_t)sp_dtype_bytes(converter->dtype);
    int64_t from_bytes = (int64_t)sp_dtype_bytes(from_type);

    for (int64_t begin = 0; begin < n; begin += CHUNK_ELEMENTS) {
        int64_t count = n - begin < CHUNK_ELEMENTS ? n - begin : CHUNK_ELEMENTS;
        int64_t bad;

        converter->kernels->convert(converter->dtype, to + begin * to_bytes, from_type,
                                    from + begin * from_bytes, count);
        if (from_type == converter->dtype || converter->dtype == SP_DTYPE_F32)
            continue; /* nothing can overflow */
        bad = first_overflow(converter->dtype, to + begin * to_bytes, from_type,
                             from + begin * from_bytes, count);
        if (bad < count)
            return begin + bad;
    }
    return n;
}

/* One row of a view with strides of its own, or of data that is not aligned. */
static int64_t convert_strided_row(const sp_converter *converter, char *to, const sp_factor *factor,
                                   const char *from)
{
    int64_t from_bytes = (int64_t)sp_dtype_bytes(factor->dtype);
    int32_t n = factor->cols;
    float stage[STAGE_FLOATS];

    for (int32_t begin = 0; begin < n; begin += STAGE_FLOATS) {
        int32_t count = n - begin < STAGE_FLOATS ? n - begin : STAGE_FLOATS;
        int64_t bad;

        load_floats(factor->dtype, from + begin * factor->col_stride * from_bytes,
                    factor->col_stride, count, stage);
        bad = convert_run(converter, to + (size_t)begin * sp_dtype_bytes(converter->dtype),
                          SP_DTYPE_F32, (const char *)stage, count);
        if (bad < count)
            return begin + bad;
    }
    return n;
}

int64_t sp_convert_factor(const sp_converter *converter, char *to, int32_t stride,
                          const sp_factor *factor)
{
    size_t from_bytes = sp_dtype_bytes(factor->dtype), to_bytes = sp_dtype_bytes(converter->dtype);
    const char *from = factor->data;
    int64_t cols = factor->cols;
    bool plain = factor->col_stride == 1 && (uintptr_t)from % from_bytes == 0;

    if (plain && factor->row_stride == cols && stride == cols) {
        int64_t n = factor->rows * cols;
        int64_t bad = convert_run(converter, to, factor->dtype, from, n);

        return bad < n ? bad : -1;
    }
    for (int32_t row = 0; row < factor->rows; row++) {
        int64_t bad = plain ? convert_run(converter, to, factor->dtype, from, cols)
                            : convert_strided_row(converter, to, factor, from);

        if (bad < cols)
            return row * cols + bad;
        memset(to + (size_t)cols * to_bytes, 0, (size_t)(stride - cols) * to_bytes);
        to += (size_t)stride * to_bytes;
        from += factor->row_stride * (int64_t)from_bytes;
    }
    return -1;
}
