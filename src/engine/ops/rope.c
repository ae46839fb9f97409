#include "engine/ops/rope.h"

#include "base/alloc.h"

#include <math.h>

#define PI 3.14159265358979323846

/*
 * LLAMA3: with w = 2 pi / f the length of a wave and L = original_positions, a frequency is kept
 * where w < L / high, divided by factor where w > L / low, and blended between:
 * (1 - s) * f / factor + s * f with s = (L / w - low) / (high - low).
 */
static double scale_llama3(const sp_rope_scaling *scaling, double frequency)
{
    double wave = 2 * PI / frequency;
    double waves = (double)scaling->original_positions / wave;
    double low = scaling->low_freq_factor, high = scaling->high_freq_factor;
    double blend;

    if (waves > high)
        return frequency;
    if (waves < low)
        return frequency / scaling->factor;
    blend = (waves - low) / (high - low);
    return (1 - blend) * frequency / scaling->factor + blend * frequency;
}

/* Radians a position of pair i of n_rot. */
static float frequency_of(const sp_rope_shape *shape, int32_t i)
{
    float plain = (float)(1.0 / pow(shape->theta, (double)i / (double)shape->n_rot));

    switch (shape->scaling.kind) {
    case SP_ROPE_PLAIN:
        break;
    case SP_ROPE_LINEAR:
        return (float)((double)plain / shape->scaling.factor);
    case SP_ROPE_LLAMA3:
        return (float)scale_llama3(&shape->scaling, (double)plain);
    }
    return plain;
}

sp_status sp_rope_create(const sp_rope_shape *shape, sp_rope *out_rope)
{
    int32_t n_rot = shape->n_rot, positions = shape->positions;
    size_t n = (size_t)n_rot * (size_t)positions;
    float *tables = sp_calloc(2 * n, sizeof *tables);

    if (!tables)
        return SP_ERR_MEMORY;
    for (int32_t i = 0; i < n_rot; i++) {
        float frequency = frequency_of(shape, i);

        for (int32_t p = 0; p < positions; p++) {
            double angle = (double)p * (double)frequency;
            size_t at = (size_t)p * (size_t)n_rot + (size_t)i;

            tables[at] = (float)cos(angle);
            tables[n + at] = (float)sin(angle);
        }
    }
    *out_rope = (sp_rope){
        .cosine = tables,
        .sine = tables + n,
        .positions = positions,
        .n_rot = n_rot,
        .bytes = 2 * n * sizeof *tables,
    };
    return SP_OK;
}

void sp_rope_destroy(sp_rope *rope)
{
    sp_free(rope->cosine);
    *rope = (sp_rope){0};
}
