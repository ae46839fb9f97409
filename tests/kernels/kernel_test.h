/*
 * kernel_test.h: the common shape of a kernel test. Each test runs once per level, by name; a level
 * that the machine lacks is reported as skipped. Buffers carry guard zones on both sides: NaN
 * patterns that an over-read would drag into a result and that an over-write would change; a
 * sanitizer is told that they are out of bounds.
 */
#ifndef SP_TESTS_KERNEL_TEST_H
#define SP_TESTS_KERNEL_TEST_H

#include "kernels/cpu/kernels.h"
#include "kernels/element.h"
#include "support/test.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#if defined(__SANITIZE_ADDRESS__)
#define KERNEL_TEST_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define KERNEL_TEST_ASAN 1
#endif
#endif
#ifdef KERNEL_TEST_ASAN
#include <sanitizer/asan_interface.h>
#define GUARD_CLOSE(memory, bytes) ASAN_POISON_MEMORY_REGION(memory, bytes)
#define GUARD_OPEN(memory, bytes)  ASAN_UNPOISON_MEMORY_REGION(memory, bytes)
#else
#define GUARD_CLOSE(memory, bytes) ((void)(memory), (void)(bytes))
#define GUARD_OPEN(memory, bytes)  ((void)(memory), (void)(bytes))
#endif

/* One entry per level for the list of tests: its name tells which level was skipped. */
#define FOR_EACH_LEVEL(f)                                                                         \
    {#f "/scalar", f, NULL, NULL, (void *)"scalar"}, {#f "/avx2", f, NULL, NULL, (void *)"avx2"}, \
        {#f "/avx512", f, NULL, NULL, (void *)"avx512"},                                          \
    {                                                                                             \
#f "/amx", f, NULL, NULL, (void *)"amx"                                                   \
    }

/* The table of this test's level, or the test ends as skipped. */
static inline const sp_kernels *kernels_or_skip(void **state)
{
    const sp_kernels *kernels = NULL;
    const char *level = *state;

    if (sp_kernels_get(level, &kernels, NULL) != SP_OK) {
        print_message("skipped: this machine or build lacks level %s\n", level);
        skip();
    }
    assert_string_equal(kernels->level, level);
    return kernels;
}

/* ---- guarded buffers ----------------------------------------------------------------------- */

#define GUARD_BYTES ((size_t)256)
#define GUARD_BYTE  0xff /* bf16, f16 and f32 of such bytes are all NaN */

typedef struct guarded {
    unsigned char *block, *data;
    size_t bytes;
} guarded;

/* `bytes` bytes, all poison, `offset` bytes off a 64-byte boundary. */
static inline guarded guarded_new(size_t bytes, size_t offset)
{
    guarded buffer = {.bytes = bytes};
    size_t total = (2 * GUARD_BYTES + bytes + offset + 64) / 64 * 64;

    buffer.block = aligned_alloc(64, total);
    assert_non_null(buffer.block);
    memset(buffer.block, GUARD_BYTE, total);
    buffer.data = buffer.block + GUARD_BYTES + offset;
    GUARD_CLOSE(buffer.data - GUARD_BYTES, GUARD_BYTES);
    GUARD_CLOSE(buffer.data + bytes, GUARD_BYTES);
    return buffer;
}

static inline void guarded_check(const guarded *buffer)
{
    GUARD_OPEN(buffer->data - GUARD_BYTES, GUARD_BYTES);
    GUARD_OPEN(buffer->data + buffer->bytes, GUARD_BYTES);
    for (size_t i = 0; i < GUARD_BYTES; i++)
        if (buffer->data[-1 - (ptrdiff_t)i] != GUARD_BYTE ||
            buffer->data[buffer->bytes + i] != GUARD_BYTE)
            fail_msg("a byte %zu outside of a buffer was written", i);
    GUARD_CLOSE(buffer->data - GUARD_BYTES, GUARD_BYTES);
    GUARD_CLOSE(buffer->data + buffer->bytes, GUARD_BYTES);
}

static inline void guarded_free(guarded *buffer)
{
    guarded_check(buffer);
    GUARD_OPEN(buffer->data - GUARD_BYTES, 2 * GUARD_BYTES + buffer->bytes);
    free(buffer->block);
    *buffer = (guarded){0};
}

static inline size_t type_bytes(sp_dtype type)
{
    return type == SP_DTYPE_F32 ? 4 : 2;
}

/* ---- values -------------------------------------------------------------------------------- */

/* Random values in (-size, size) in rows × columns of a matrix; what lies between rows stays. */
static inline void fill_matrix(sp_test_random *random, sp_dtype type, void *data, int64_t rows,
                               int64_t columns, int64_t stride, float size)
{
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < columns; j++)
            sp_element_store(type, data, i * stride + j, sp_test_float(random) * size);
}

/* Half a unit in the last place of `type` at `value`: the error of one rounding. */
static inline double half_ulp(sp_dtype type, double value)
{
    static const int digits[] = {[SP_DTYPE_F32] = 24, [SP_DTYPE_BF16] = 8, [SP_DTYPE_F16] = 11};
    static const int smallest[] = {
        [SP_DTYPE_F32] = -126, [SP_DTYPE_BF16] = -126, [SP_DTYPE_F16] = -14};
    int exponent = value == 0.0 ? smallest[type] : ilogb(value);

    if (exponent < smallest[type])
        exponent = smallest[type];
    /* A value just below a power of two may round up to it: allow for its unit. */
    return ldexp(0.5, exponent + 1 - digits[type] + 1);
}

static inline void check_close(double got, double expected, double bound, const char *what,
                               int64_t i, int64_t j)
{
    if (!(fabs(got - expected) <= bound))
        fail_msg("%s at %lld, %lld: got %.9g, expected %.9g, bound %.3g", what, (long long)i,
                 (long long)j, got, expected, bound);
}

#endif
