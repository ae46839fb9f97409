/*
 * pack_avx512.c: packs x into tiles, 16 rows at a time, without an intermediate copy.
 */
#include "kernels/cpu/levels.h"
#include "kernels/cpu/transpose_avx512.h"

void sp_pack_tiles_avx512(void *to, const uint16_t *const *lines, int64_t c, int64_t tiles)
{
    const float *pairs[16];
    float *out = to;

    for (int r = 0; r < 16; r++)
        pairs[r] = (const void *)(lines[r] + c);
    for (int64_t at = 0; at < 16 * tiles; at += 4, out += 64) {
        __m512 value[4];

        sp_transpose_16x4(pairs, at, value);
        SP_UNROLL
        for (int p = 0; p < 4; p++)
            _mm512_storeu_ps(out + 16 * p, value[p]);
    }
}
