#include "adapter/values.h"

#include "base/half.h"

/* Elements per pass: small enough for the first-level cache, and a constant trip count. */
#define BLOCK 256

/*
 * Magnitudes from here on are refused. For F32 rounded to BF16 that is where the next exponent is
 * rounded up to, half a unit below 2^128; to F16, 65520.
 */
static int32_t limit_f32(sp_dtype pool)
{
    return pool == SP_DTYPE_BF16 ? 0x7f7f8000 : pool == SP_DTYPE_F16 ? 0x477ff000 : 0x7f800000;
}

static int16_t limit_16(sp_dtype dtype, sp_dtype pool)
{
    if (dtype == SP_DTYPE_F16)
        return 0x7c00;
    return pool == SP_DTYPE_F16 ? 0x4780 : 0x7f80;
}

static int32_t any_bad_32(const int32_t *bits, int32_t limit)
{
    int32_t bad = 0;

    for (int i = 0; i < BLOCK; i++)
        bad |= -((bits[i] & 0x7fffffff) >= limit);
    return bad;
}

static int16_t any_bad_16(const int16_t *bits, int16_t limit)
{
    int16_t bad = 0;

    for (int i = 0; i < BLOCK; i++)
        bad = (int16_t)(bad | -((int16_t)(bits[i] & 0x7fff) >= limit));
    return bad;
}

static int64_t find_bad_32(const int32_t *bits, int64_t n, int32_t limit)
{
    int64_t i = 0;

    while (i + BLOCK <= n && !any_bad_32(bits + i, limit))
        i += BLOCK;
    for (; i < n; i++) {
        if ((bits[i] & 0x7fffffff) >= limit)
            return i;
    }
    return -1;
}

static int64_t find_bad_16(const int16_t *bits, int64_t n, int16_t limit)
{
    int64_t i = 0;

    while (i + BLOCK <= n && !any_bad_16(bits + i, limit))
        i += BLOCK;
    for (; i < n; i++) {
        if ((int16_t)(bits[i] & 0x7fff) >= limit)
            return i;
    }
    return -1;
}

int64_t sp_values_find_bad(const void *data, sp_dtype dtype, int64_t n, sp_dtype pool)
{
    if (dtype == SP_DTYPE_F32)
        return find_bad_32(data, n, limit_f32(pool));
    return find_bad_16(data, n, limit_16(dtype, pool));
}

float sp_values_at(const void *data, sp_dtype dtype, int64_t index)
{
    switch (dtype) {
    case SP_DTYPE_F32:
        return ((const float *)data)[index];
    case SP_DTYPE_BF16:
        return sp_bf16_to_f32(((const uint16_t *)data)[index]);
    case SP_DTYPE_F16:
        return sp_f16_to_f32(((const uint16_t *)data)[index]);
    }
    return 0;
}
