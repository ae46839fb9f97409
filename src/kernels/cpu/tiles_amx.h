/*
 * tiles_amx.h: the few tile instructions that gemm_amx.c uses, under names of our own, so that the
 * same code runs on a machine without them: with SP_TILES_EMULATED a tile is an array, and the
 * product is the instruction's arithmetic written out (see tile_dot), bit for bit. Tests use that
 * to run the level's logic anywhere, and to compare it with the hardware where there is one.
 */
#ifndef SP_KERNELS_CPU_TILES_AMX_H
#define SP_KERNELS_CPU_TILES_AMX_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define TILE_ROWS  16
#define TILE_BYTES 64 /* of a row */

#define FLUSH_SUBNORMALS 0x8040u /* of inputs and of results, in MXCSR */

/* Shapes: one for the weights and the sums, one for x, which always has all rows. */
typedef struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_config;

_Static_assert(sizeof(tile_config) == 64, "as the instruction reads it");

/* Tiles 0 to 3 are sums, 4 and 5 weights, of `rows` rows each; 6 and 7 x, of 16. */
static inline tile_config tile_config_of(int64_t rows)
{
    tile_config config = {.palette = 1};

    for (int t = 0; t < 8; t++) {
        config.row_bytes[t] = TILE_BYTES;
        config.rows[t] = t < 6 ? (uint8_t)rows : TILE_ROWS;
    }
    return config;
}

#ifndef SP_TILES_EMULATED

/*
 * Compilers model the memory that these instructions access loosely, gcc 12 not at all: without a
 * barrier it may keep in registers what they should read.
 */
#define tile_barrier() __asm__ volatile("" ::: "memory")

/* The numbers of tiles are part of the instruction: macros, not functions. */
#define tile_configure(config)    \
    do {                          \
        tile_barrier();           \
        _tile_loadconfig(config); \
    } while (0)
#define tile_load(t, from, stride)              \
    do {                                        \
        tile_barrier();                         \
        _tile_loadd(t, from, (size_t)(stride)); \
    } while (0)
#define tile_store(t, to, stride)              \
    do {                                       \
        _tile_stored(t, to, (size_t)(stride)); \
        tile_barrier();                        \
    } while (0)
#define tile_release()             _tile_release()
#define tile_zero(t)               _tile_zero(t)
#define tile_dot(sums, weights, x) _tile_dpbf16ps(sums, weights, x)

#else

#include "base/half.h"

static _Thread_local struct {
    tile_config config;
    uint32_t tiles[8][TILE_ROWS][TILE_BYTES / 4];
} emulated;

static inline void tile_configure(const tile_config *config)
{
    memset(&emulated, 0, sizeof emulated);
    emulated.config = *config;
}

static inline void tile_release(void)
{
    memset(&emulated, 0, sizeof emulated);
}

static inline void tile_zero(int t)
{
    memset(emulated.tiles[t], 0, sizeof emulated.tiles[t]);
}

static inline void tile_load(int t, const void *memory, int64_t stride)
{
    for (int r = 0; r < emulated.config.rows[t]; r++)
        memcpy(emulated.tiles[t][r], (const char *)memory + r * stride, TILE_BYTES);
}

static inline void tile_store(int t, void *memory, int64_t stride)
{
    for (int r = 0; r < emulated.config.rows[t]; r++)
        memcpy((char *)memory + r * stride, emulated.tiles[t][r], TILE_BYTES);
}

/* acc + (even chain + odd chain), under flushed subnormals as the instruction has them. */
static __attribute__((noinline)) float tile_sum(float acc, const uint32_t *weights,
                                                const uint32_t (*x)[TILE_BYTES / 4], int column)
{
    __m128 even = _mm_setzero_ps(), odd = _mm_setzero_ps();

    for (int p = 0; p < TILE_BYTES / 4; p++) {
        uint32_t w = weights[p], v = x[p][column];

        even = _mm_fmadd_ss(_mm_set_ss(sp_f32_from_bits(w << 16)),
                            _mm_set_ss(sp_f32_from_bits(v << 16)), even);
        odd = _mm_fmadd_ss(_mm_set_ss(sp_f32_from_bits(w & 0xffff0000u)),
                           _mm_set_ss(sp_f32_from_bits(v & 0xffff0000u)), odd);
    }
    return _mm_cvtss_f32(_mm_add_ss(_mm_set_ss(acc), _mm_add_ss(even, odd)));
}

/*
 * sums[i][j] += Σ over 16 pairs weights[i][pair] · x[pair][j]: the low halves in one chain of
 * fused steps from 0, the high halves in another, their sum added to what was there.
 */
static inline void tile_dot(int sums, int weights, int x)
{
    const uint32_t(*columns)[TILE_BYTES / 4] =
        (const uint32_t(*)[TILE_BYTES / 4]) emulated.tiles[x];
    unsigned mode = _mm_getcsr();

    _mm_setcsr(mode | FLUSH_SUBNORMALS);
    for (int i = 0; i < emulated.config.rows[sums]; i++)
        for (int j = 0; j < TILE_ROWS; j++) {
            uint32_t *sum = &emulated.tiles[sums][i][j];

            *sum = sp_f32_bits(
                tile_sum(sp_f32_from_bits(*sum), emulated.tiles[weights][i], columns, j));
        }
    _mm_setcsr(mode);
}

#endif
#endif
