/* rope.h: the rotary tables: cosine and sine of every position, FP32. */
#ifndef SP_ENGINE_OPS_ROPE_H
#define SP_ENGINE_OPS_ROPE_H

#include "engine/ops/ops.h"

typedef struct sp_rope {
    float *cosine, *sine; /* [positions, n_rot] */
    int32_t positions, n_rot;
    size_t bytes;
} sp_rope;

/* Frequencies are rounded to FP32, as the reference implementation stores them, before and after
 * scaling; angles are computed in double. *out_rope is owned by the caller. SP_ERR_MEMORY. */
sp_status sp_rope_create(const sp_rope_shape *shape, sp_rope *out_rope);
/* An all-zero struct is fine. */
void sp_rope_destroy(sp_rope *rope);

#endif
