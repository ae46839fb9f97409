/*
 * delta_rule_layout.h: the memory of the gated delta rule on a GPU, for host and device: what a
 * state slot, a snapshot and the scratch of a step hold for one layer, as offsets in bytes. Sizes
 * are those of ops_cuda.h; T is bf16.
 *
 * S of a value head is in the order in which the warps keep it: for each 16 columns of v and each 8
 * rows of k, 4 floats of every lane, as mma m16n8 places them in a tile [v, k]. Columns and rows up
 * to the tiles' sizes are zeros.
 */
#ifndef SP_KERNELS_CUDA_DELTA_RULE_LAYOUT_H
#define SP_KERNELS_CUDA_DELTA_RULE_LAYOUT_H

#include "kernels/cuda/ops_cuda.h"
#include "kernels/effective_scale.h"

#define SP_CUDA_RULE_ALIGN 256

typedef struct sp_cuda_rule_layout {
    int32_t k_width;            /* k_dim and zeros: 32, 64 or 128 */
    int32_t v_width;            /* v_dim and zeros: a multiple of 16 */
    int32_t per_key;            /* value heads of a key head */
    int32_t channels;           /* of the convolution */
    int32_t qkv_width, b_width; /* of a row */
    /* of a slot; places in the ring are positions modulo SP_CUDA_RULE_RING */
    int64_t ring_r;    /* FP32 [v_heads, ring, v_width] */
    int64_t ring_t;    /* T [v_heads, ring, 2, chunk]: upper, lower parts */
    int64_t ring_g;    /* FP32 [v_heads, ring] */
    int64_t ring_k;    /* T [k_heads, ring, k_width] */
    int64_t ring_conv; /* T [ring, channels] */
    int64_t state_bytes;
    /* of a snapshot, which begins with S like a slot */
    int64_t conv; /* T [conv_width - 1, channels], the last one before the border last */
    int64_t snapshot_bytes;
    /* bytes of a row in each array of the scratch; they follow each other in this order */
    int64_t q_row;      /* T [k_heads, k_width], k too */
    int64_t v_row;      /* T [v_heads, v_dim] */
    int64_t matrix_row; /* T [v_heads, 4, chunk]: upper and lower parts of a row of T and of M */
    int64_t gate_row;   /* FP32 [v_heads, 2]: G, beta */
    int64_t ready_row;  /* int32 [k_heads]: whether the rest is there */
} sp_cuda_rule_layout;

SP_HOST_AND_DEVICE int64_t sp_cuda_rule_align(int64_t bytes)
{
    return (bytes + SP_CUDA_RULE_ALIGN - 1) / SP_CUDA_RULE_ALIGN * SP_CUDA_RULE_ALIGN;
}

SP_HOST_AND_DEVICE sp_cuda_rule_layout sp_cuda_rule_lay_out(sp_cuda_rule_shape s)
{
    int64_t ring = SP_CUDA_RULE_RING, chunk = SP_CUDA_RULE_CHUNK, state;
    sp_cuda_rule_layout l;

    l.k_width = s.k_dim <= 32 ? 32 : s.k_dim <= 64 ? 64 : 128;
    l.v_width = (s.v_dim + 15) / 16 * 16;
    l.per_key = s.v_heads / s.k_heads;
    l.channels = 2 * s.k_heads * s.k_dim + s.v_heads * s.v_dim;
    l.qkv_width = l.channels + (s.fused ? s.v_heads * s.v_dim : 0);
    l.b_width = s.fused ? 2 * s.v_heads : s.v_heads;
    state = sp_cuda_rule_align((int64_t)s.v_heads * l.v_width * l.k_width * 4);
    l.ring_r = state;
    l.ring_t = l.ring_r + sp_cuda_rule_align(s.v_heads * ring * l.v_width * 4);
    l.ring_g = l.ring_t + sp_cuda_rule_align(s.v_heads * ring * chunk * 4);
    l.ring_k = l.ring_g + sp_cuda_rule_align(s.v_heads * ring * 4);
    l.ring_conv = l.ring_k + sp_cuda_rule_align(s.k_heads * ring * l.k_width * 2);
    l.state_bytes = l.ring_conv + sp_cuda_rule_align(ring * l.channels * 2);
    l.conv = state;
    l.snapshot_bytes = state + sp_cuda_rule_align((int64_t)(s.conv_width - 1) * l.channels * 2);
    l.q_row = (int64_t)s.k_heads * l.k_width * 2;
    l.v_row = (int64_t)s.v_heads * s.v_dim * 2;
    l.matrix_row = s.v_heads * chunk * 8;
    l.gate_row = (int64_t)s.v_heads * 8;
    l.ready_row = (int64_t)s.k_heads * 4;
    return l;
}

/* Scratch of a step of so many rows. */
static inline int64_t sp_cuda_rule_scratch_bytes(sp_cuda_rule_shape shape, int32_t rows)
{
    const sp_cuda_rule_layout l = sp_cuda_rule_lay_out(shape);

    return 2 * sp_cuda_rule_align(rows * l.q_row) + sp_cuda_rule_align(rows * l.v_row) +
           sp_cuda_rule_align(rows * l.matrix_row) + sp_cuda_rule_align(rows * l.gate_row) +
           sp_cuda_rule_align(rows * l.ready_row);
}

#endif
