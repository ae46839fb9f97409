/*
 * kernels_scalar.c: the reference of every entry but gemm_nt and those of the gated delta rule, in
 * portable C. Sums run in 8
 * lanes, like the vector levels, so that a compiler may use vectors without changing a bit.
 */
#include "kernels/cpu/levels.h"
#include "kernels/element.h"
#include "kernels/scalar_math.h"

#include <math.h>
#include <string.h>

#define LANES 8

static float reduce(const float *v)
{
    return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
}

/* ---- norms, RoPE, elementwise -------------------------------------------------------------- */

static float inverse_rms(sp_dtype type, const void *x, int64_t n, float eps)
{
    float lanes[LANES] = {0};

    for (int64_t i = 0; i < n; i++) {
        float value = sp_element_load(type, x, i);

        lanes[i % LANES] += value * value;
    }
    return 1.0f / sqrtf(reduce(lanes) / (float)n + eps);
}

static void rmsnorm(sp_dtype type, void *y, const void *x, const uint16_t *w, float w_offset,
                    int64_t n, float eps)
{
    float inverse = inverse_rms(type, x, n, eps);

    for (int64_t i = 0; i < n; i++) {
        float weight = sp_bf16_to_f32(w[i]) + w_offset;

        sp_element_store(type, y, i, sp_element_load(type, x, i) * inverse * weight);
    }
}

static void rmsnorm_rope(sp_dtype type, void *x, const uint16_t *w, float w_offset, int64_t n,
                         float eps, const float *cosine, const float *sine, int64_t n_rot)
{
    float inverse = inverse_rms(type, x, n, eps);

    for (int64_t i = 0; i < n_rot; i++) {
        int64_t j = i + n_rot;
        float a = sp_element_load(type, x, i) * inverse * (sp_bf16_to_f32(w[i]) + w_offset);
        float b = sp_element_load(type, x, j) * inverse * (sp_bf16_to_f32(w[j]) + w_offset);

        sp_element_store(type, x, i, a * cosine[i] - b * sine[i]);
        sp_element_store(type, x, j, b * cosine[i] + a * sine[i]);
    }
    for (int64_t i = 2 * n_rot; i < n; i++) {
        float weight = sp_bf16_to_f32(w[i]) + w_offset;

        sp_element_store(type, x, i, sp_element_load(type, x, i) * inverse * weight);
    }
}

static void rope(sp_dtype type, void *x, const float *cosine, const float *sine, int64_t n_rot)
{
    for (int64_t i = 0; i < n_rot; i++) {
        float a = sp_element_load(type, x, i), b = sp_element_load(type, x, i + n_rot);

        sp_element_store(type, x, i, a * cosine[i] - b * sine[i]);
        sp_element_store(type, x, i + n_rot, b * cosine[i] + a * sine[i]);
    }
}

static void exp_weights(float *weights, const float *logits, float best, float inverse, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        weights[i] = sp_exp_scalar((logits[i] - best) * inverse);
}

static void silu_mul(sp_dtype type, void *out, const void *gate, const void *up, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        float g = sp_element_load(type, gate, i);
        float silu = g / (1.0f + sp_exp_scalar(-g));

        sp_element_store(type, out, i, silu * sp_element_load(type, up, i));
    }
}

static void add(sp_dtype type, void *y, const void *x, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        sp_element_store(type, y, i, sp_element_load(type, y, i) + sp_element_load(type, x, i));
}

static void add_scaled(sp_dtype type, void *y, const void *x, float scale, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        sp_element_store(type, y, i,
                         fmaf(scale, sp_element_load(type, x, i), sp_element_load(type, y, i)));
}

static void weighted_sum(sp_dtype type, void *y, const void *x, int64_t x_stride,
                         const int32_t *row_index, const float *weights, int64_t rows, int64_t n)
{
    for (int64_t j = 0; j < n; j++) {
        float sum = 0.0f;

        for (int64_t i = 0; i < rows; i++)
            sum = fmaf(weights[i], sp_element_load(type, x, row_index[i] * x_stride + j), sum);
        sp_element_store(type, y, j, sum);
    }
}

static void convert(sp_dtype to_type, void *to, sp_dtype from_type, const void *from, int64_t n)
{
    if (to_type == from_type) {
        memcpy(to, from, (size_t)n * sp_dtype_bytes(to_type));
        return;
    }
    for (int64_t i = 0; i < n; i++)
        sp_element_store(to_type, to, i, sp_element_load(from_type, from, i));
}

/* ---- attention ----------------------------------------------------------------------------- */

/* Offset of token `token` of the sequence in k_cache or v_cache, in elements. */
static int64_t cache_offset(const sp_attention_args *args, int64_t token)
{
    int64_t page = args->pages[token / args->page_tokens];
    int64_t slot = (page * args->kv_heads + args->kv_head) * args->page_tokens;

    return (slot + token % args->page_tokens) * args->head_dim;
}

static float dot(sp_dtype type, const float *q, const void *k, int64_t n)
{
    float lanes[LANES] = {0};

    for (int64_t i = 0; i < n; i++)
        lanes[i % LANES] += q[i] * sp_element_load(type, k, i);
    return reduce(lanes);
}

/* The running softmax of one query: out = sum / total so far, relative to the largest score. */
typedef struct attention_state {
    float largest, total;
    float *q, *sum; /* [head_dim] each, in scratch */
} attention_state;

/* Adds keys [begin, begin + count), count <= SP_ATTENTION_BLOCK. */
static void attend_block(const sp_attention_args *args, attention_state *state, int64_t begin,
                         int64_t count)
{
    float p[SP_ATTENTION_BLOCK] = {0};
    float largest = state->largest, rescale, lanes[LANES] = {0};

    for (int64_t t = 0; t < count; t++) {
        const void *k = sp_element_at(args->type, args->k_cache, cache_offset(args, begin + t));

        p[t] = dot(args->type, state->q, k, args->head_dim) * args->scale;
        largest = p[t] > largest ? p[t] : largest;
    }
    for (int64_t t = 0; t < count; t++) {
        p[t] = sp_exp_scalar(p[t] - largest);
        lanes[t % LANES] += p[t];
    }
    rescale = sp_exp_scalar(state->largest - largest);
    state->total = state->total * rescale + reduce(lanes);
    state->largest = largest;
    for (int64_t i = 0; i < args->head_dim; i++)
        state->sum[i] *= rescale;
    for (int64_t t = 0; t < count; t++) {
        const void *v = sp_element_at(args->type, args->v_cache, cache_offset(args, begin + t));

        for (int64_t i = 0; i < args->head_dim; i++)
            state->sum[i] += p[t] * sp_element_load(args->type, v, i);
    }
}

static void attend_query(const sp_attention_args *args, int32_t row, int32_t head)
{
    attention_state state = {-INFINITY, 0.0f, args->scratch, args->scratch + args->head_dim};
    int64_t offset = (int64_t)head * args->head_dim;
    int64_t keys = (int64_t)args->first_position + row + 1;

    for (int64_t i = 0; i < args->head_dim; i++) {
        state.q[i] = sp_element_load(args->type, args->q, row * args->q_stride + offset + i);
        state.sum[i] = 0.0f;
    }
    for (int64_t begin = 0; begin < keys; begin += SP_ATTENTION_BLOCK) {
        int64_t left = keys - begin;

        attend_block(args, &state, begin, left < SP_ATTENTION_BLOCK ? left : SP_ATTENTION_BLOCK);
    }
    for (int64_t i = 0; i < args->head_dim; i++)
        sp_element_store(args->type, args->out, row * args->out_stride + offset + i,
                         state.sum[i] / state.total);
}

static void attention(const sp_attention_args *args)
{
    for (int32_t row = 0; row < args->n_rows; row++)
        for (int32_t head = 0; head < args->group; head++)
            attend_query(args, row, head);
}

static size_t attention_scratch_floats(int32_t group, int32_t head_dim)
{
    (void)group;
    return 2 * (size_t)head_dim;
}

/* ---- token tables -------------------------------------------------------------------------- */

static void override_rows(const sp_override_args *args, int64_t row_begin, int64_t row_end)
{
    for (int64_t i = row_begin; i < row_end; i++) {
        int32_t slot = args->row_slot[i];
        const int32_t *map = slot >= 0 ? args->map[slot] : NULL;
        void *y = sp_element_at_mut(args->type, args->y, i * args->y_stride);
        sp_dtype from_type;
        const void *from;

        if (!map || map[args->token[i]] < 0)
            continue;
        from_type = (sp_dtype)args->row_type[slot];
        from = sp_element_at(from_type, args->rows[slot], map[args->token[i]] * args->width);
        for (int64_t j = 0; j < args->width; j++)
            sp_element_store(args->type, y, j, sp_element_load(from_type, from, j));
    }
}

static void gather_columns(sp_dtype type, void *to, int64_t to_stride, const void *a,
                           int64_t a_stride, int64_t rank, const int32_t *column,
                           const int32_t *row_index, int64_t rows)
{
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < rank; j++)
            memcpy(sp_element_at_mut(type, to, i * to_stride + j),
                   sp_element_at(type, a, j * a_stride + column[row_index[i]]),
                   sp_dtype_bytes(type));
}

void sp_kernels_fill_scalar(sp_kernels *kernels)
{
    *kernels = (sp_kernels){
        .level = kernels->level,
        .x_pack_bytes = sp_x_pack_bytes_scalar,
        .x_pack = sp_x_pack_scalar,
        .x_pack_rows = 1,
        .gemm_nt = sp_gemm_nt_scalar,
        .gemm_nt_lone = sp_gemm_nt_lone_scalar,
        .gemm_rows = 1,
        .gemm_columns = 4,
        .rmsnorm = rmsnorm,
        .rmsnorm_rope = rmsnorm_rope,
        .rope = rope,
        .silu_mul = silu_mul,
        .exp_weights = exp_weights,
        .add = add,
        .add_scaled = add_scaled,
        .weighted_sum = weighted_sum,
        .attention = attention,
        .attention_scratch_floats = attention_scratch_floats,
        .convert = convert,
        .override_rows = override_rows,
        .gather_columns = gather_columns,
    };
    sp_kernels_fill_delta_rule_scalar(kernels);
}
