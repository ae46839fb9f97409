/*
 * lone_rows.h: what the levels share for many GEMMs of one row each (gemm_nt_lone): the prefetch of
 * weights that are short runs of memory, too short for the hardware's prefetcher.
 */
#ifndef SP_KERNELS_CPU_LONE_ROWS_H
#define SP_KERNELS_CPU_LONE_ROWS_H

#include "base/integer.h"
#include "kernels/cpu/vector_avx2.h"

#ifndef SP_LONE_AHEAD
#define SP_LONE_AHEAD 4 /* GEMMs whose weights are prefetched before those that are used */
#endif
#define SP_LONE_FETCHED    4096 /* bytes of a GEMM at most: what fits into a cache */
#define SP_LONE_LINE_BYTES 64

/* Prefetches the weight rows [j, j + n). Inlined, because compilers take a function that does
 * nothing else for one without effect. */
SP_INLINE void sp_prefetch_weights(const sp_gemm_args *args, int64_t j, int64_t n)
{
    const int64_t element = (int64_t)sp_dtype_bytes(args->w_type);
    int64_t stride = args->w_stride * element, bytes = args->k * element;
    const char *w = (const char *)args->w + j * stride;
    int64_t rows = n, left = SP_LONE_FETCHED;

    if (stride < bytes + SP_LONE_LINE_BYTES) { /* hardly any gaps */
        bytes = min64(n * stride, SP_LONE_FETCHED);
        rows = 1;
    }
    for (int64_t c = 0; c < rows && left > 0; c++, left -= bytes)
        for (int64_t at = 0; at < bytes; at += SP_LONE_LINE_BYTES)
            _mm_prefetch(w + c * stride + at, _MM_HINT_T1);
}

/* Prefetches for the GEMM that is `i` of `count`: before the first of them several. */
SP_INLINE void sp_prefetch_ahead(const sp_gemm_args *const *gemms, int32_t i, int32_t count,
                                 int64_t j, int64_t n)
{
    for (int32_t g = i == 0 ? 0 : i + SP_LONE_AHEAD; g <= i + SP_LONE_AHEAD && g < count; g++)
        sp_prefetch_weights(gemms[g], j, n);
}

#endif
