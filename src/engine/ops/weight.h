/*
 * weight.h: base weights as arguments of ops: type, shape and pointers. The model that mapped,
 * copied or converted a weight owns its bytes (model.h); the backend that it was placed on decides
 * where its kernels read it.
 */
#ifndef SP_ENGINE_OPS_WEIGHT_H
#define SP_ENGINE_OPS_WEIGHT_H

#include <sidepath/status.h>

#include <stdint.h>

/* A quantised type would add its scales as two members after `host`. */
typedef struct sp_weight {
    sp_dtype type;
    int32_t rows, columns; /* [rows, columns] row-major without padding; a vector has 0 columns */
    const void *host;      /* borrowed from the model; NULL: the model has no such weight */
    const void *placed;    /* where ops read it; NULL until sp_op_place */
} sp_weight;

/* y = x / rms(x) * (weight + offset). */
typedef struct sp_norm {
    sp_weight weight; /* [width] BF16, or FP32 where an op says so */
    float eps, offset;
} sp_norm;

/* y = x · weightᵀ (+ bias), and the side path of the row's adapter at `site`. */
typedef struct sp_linear {
    sp_weight weight; /* [outputs, inputs] */
    sp_weight bias;   /* [outputs]; host is NULL without a bias */
    int32_t site;     /* in the model's geometry */
} sp_linear;

/* The experts of a layer: e(x) = down_e(silu(gate_e(x)) * up_e(x)). None has a bias. */
typedef struct sp_experts {
    int32_t n;
    sp_linear *gate, *up, *down; /* [n] each: [inner, hidden] [inner, hidden] [hidden, inner] */
} sp_experts;

#endif
