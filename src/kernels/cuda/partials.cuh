/* partials.cuh: sums the shrink's split-K partials in the order of kernels_cuda.h, and where the
 * rounded sums are. */
#ifndef SP_KERNELS_CUDA_PARTIALS_CUH
#define SP_KERNELS_CUDA_PARTIALS_CUH

#include "kernels/cuda/ptx.cuh"

#define PARTIALS_NOW 4 /* loads of partials in flight */

typedef struct partials_shape {
    int n_partials, group_partials; /* in all, and per group of chunks */
} partials_shape;

static inline partials_shape partials_of(const sp_cuda_group *group)
{
    sp_cuda_shrink_choice shrink =
        sp_cuda_choose_shrink(group->multiprocessors, group->n_rows, group->n_slots, group->k_in,
                              group->rank_stride, group->n_sites);

    return {shrink.n_partials, SP_CUDA_GROUP_CHUNKS / shrink.partial_chunks};
}

/* The rounded xa, after the partials; NULL: it is not rounded before the expand. */
static inline uint16_t *rounded_of(const sp_cuda_group *group)
{
    int64_t partial =
        (int64_t)group->n_rows * sp_cuda_partial_columns(group->rank_stride, group->n_sites);

    return sp_cuda_rounds_xa(group->n_rows, group->rank_stride)
               ? (uint16_t *)(group->partials + partials_of(group).n_partials * partial)
               : NULL;
}

static __device__ __forceinline__ void add(float4 *sum, float4 v)
{
    sum->x += v.x;
    sum->y += v.y;
    sum->z += v.z;
    sum->w += v.w;
}

/* Four adjacent elements of one row, summed over all partials by one thread. */
static __device__ __forceinline__ float4 sum_alone(const float *partial, int64_t partial_floats,
                                                   partials_shape shape)
{
    float4 sum, group = *(const float4 *)partial;
    int mask = shape.group_partials - 1;

    for (int base = 1; base < shape.n_partials; base += PARTIALS_NOW) {
        float4 v[PARTIALS_NOW];

#pragma unroll
        for (int i = 0; i < PARTIALS_NOW; i++)
            if (base + i < shape.n_partials) {
                partial += partial_floats;
                v[i] = *(const float4 *)partial;
            }
#pragma unroll
        for (int i = 0; i < PARTIALS_NOW; i++) {
            if (base + i >= shape.n_partials)
                break;
            if (((base + i) & mask) != 0) {
                add(&group, v[i]);
                continue;
            }
            if (base + i == shape.group_partials)
                sum = group;
            else
                add(&sum, group);
            group = v[i];
        }
    }
    if (shape.n_partials <= shape.group_partials)
        return group;
    add(&sum, group);
    return sum;
}

/* The same for N elements side by side, AHEAD partials at a time; a NULL pointer gives zeros. */
template <int N, int AHEAD>
static __device__ __forceinline__ void sum_several(float4 (&sum)[N],
                                                   const float *const (&partial)[N],
                                                   int64_t partial_floats, partials_shape shape)
{
    int mask = shape.group_partials - 1;
    float4 group[N] = {};

#pragma unroll AHEAD
    for (int p = 0; p < shape.n_partials; p++) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);

            if (partial[i] != NULL)
                v = *(const float4 *)(partial[i] + p * partial_floats);
            if ((p & mask) != 0) {
                add(&group[i], v);
                continue;
            }
            if (p == shape.group_partials)
                sum[i] = group[i];
            else if (p > 0)
                add(&sum[i], group[i]);
            group[i] = v;
        }
    }
#pragma unroll
    for (int i = 0; i < N; i++)
        if (shape.n_partials <= shape.group_partials)
            sum[i] = group[i];
        else
            add(&sum[i], group[i]);
}

#endif
