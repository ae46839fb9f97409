#include "engine/ops/rope.h"

#include "base/alloc.h"

#include <math.h>

sp_status sp_rope_create(double theta, int32_t n_rot, int32_t positions, sp_rope *out_rope)
{
    size_t n = (size_t)n_rot * (size_t)positions;
    float *tables = sp_calloc(2 * n, sizeof *tables);

    if (!tables)
        return SP_ERR_MEMORY;
    for (int32_t i = 0; i < n_rot; i++) {
        float frequency = (float)(1.0 / pow(theta, (double)i / (double)n_rot));

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
