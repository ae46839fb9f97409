/* planes.cuh: what the shrink left, added in the order of kernels_cuda.h. */
#ifndef SP_KERNELS_CUDA_PLANES_CUH
#define SP_KERNELS_CUDA_PLANES_CUH

#include "kernels/cuda/ptx.cuh"

#define PLANES_NOW 4 /* loads of planes in flight */

typedef struct planes_shape {
    int n_planes, group_planes; /* in all, and of one group of chunks */
} planes_shape;

static inline planes_shape planes_of(const sp_cuda_group *group)
{
    sp_cuda_shrink_choice shrink = sp_cuda_choose_shrink(group->n_rows, group->n_slots, group->k_in,
                                                         group->rank_stride, group->n_sites);

    return {shrink.n_planes, SP_CUDA_GROUP_CHUNKS / shrink.plane_chunks};
}

static __device__ __forceinline__ void add(float4 *sum, float4 v)
{
    sum->x += v.x;
    sum->y += v.y;
    sum->z += v.z;
    sum->w += v.w;
}

/* Four neighbours of one row in all planes, by one thread. */
static __device__ __forceinline__ float4 sum_alone(const float *plane, int64_t plane_floats,
                                                   planes_shape shape)
{
    float4 sum, group = *(const float4 *)plane;
    int mask = shape.group_planes - 1;

    for (int base = 1; base < shape.n_planes; base += PLANES_NOW) {
        float4 v[PLANES_NOW];

#pragma unroll
        for (int i = 0; i < PLANES_NOW; i++)
            if (base + i < shape.n_planes) {
                plane += plane_floats;
                v[i] = *(const float4 *)plane;
            }
#pragma unroll
        for (int i = 0; i < PLANES_NOW; i++) {
            if (base + i >= shape.n_planes)
                break;
            if (((base + i) & mask) != 0) {
                add(&group, v[i]);
                continue;
            }
            if (base + i == shape.group_planes)
                sum = group;
            else
                add(&sum, group);
            group = v[i];
        }
    }
    if (shape.n_planes <= shape.group_planes)
        return group;
    add(&sum, group);
    return sum;
}

/* The same of N pieces side by side, AHEAD planes at a time; NULL: none, and zeros. */
template <int N, int AHEAD>
static __device__ __forceinline__ void sum_several(float4 (&sum)[N], const float *const (&plane)[N],
                                                   int64_t plane_floats, planes_shape shape)
{
    int mask = shape.group_planes - 1;
    float4 group[N] = {};

#pragma unroll AHEAD
    for (int p = 0; p < shape.n_planes; p++) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);

            if (plane[i] != NULL)
                v = *(const float4 *)(plane[i] + p * plane_floats);
            if ((p & mask) != 0) {
                add(&group[i], v);
                continue;
            }
            if (p == shape.group_planes)
                sum[i] = group[i];
            else if (p > 0)
                add(&sum[i], group[i]);
            group[i] = v;
        }
    }
#pragma unroll
    for (int i = 0; i < N; i++)
        if (shape.n_planes <= shape.group_planes)
            sum[i] = group[i];
        else
            add(&sum[i], group[i]);
}

#endif
