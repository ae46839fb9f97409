/* rope.h: the rotary tables: cosine and sine of every position, FP32. */
#ifndef SP_ENGINE_OPS_ROPE_H
#define SP_ENGINE_OPS_ROPE_H

#include <sidepath/status.h>

typedef struct sp_rope {
    float *cosine, *sine; /* [positions, n_rot] */
    int32_t positions, n_rot;
    size_t bytes;
} sp_rope;

/* n_rot: pairs per head (half of the rotated width). Frequencies are rounded to FP32 once, as the
 * reference implementation stores them; angles are taken in double. SP_ERR_MEMORY. */
sp_status sp_rope_create(double theta, int32_t n_rot, int32_t positions, sp_rope *out_rope);
void sp_rope_destroy(sp_rope *rope);

#endif
