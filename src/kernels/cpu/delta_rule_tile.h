/*
 * delta_rule_tile.h: the products of the gated delta rule on registers, for one vector length. The
 * file that includes it defines LANES, vec and its operations, and the tiles: ROWS × VECTORS sums
 * for many rows, and FEW_VECTORS for one or two, as in decode, which is bound by reading the state.
 *
 * Every sum is a chain of fused steps of its own, in ascending order, so that neither the tile nor
 * the vector length changes a bit.
 */
#ifndef SP_KERNELS_CPU_DELTA_RULE_TILE_H
#define SP_KERNELS_CPU_DELTA_RULE_TILE_H

/* ---- y = x · s ----------------------------------------------------------------------------- */

SP_INLINE void read_tile(int rows, int vectors, float *y, const float *x, const float *s, int64_t k,
                         int64_t n)
{
    vec sums[ROWS][FEW_VECTORS];

    SP_UNROLL
    for (int r = 0; r < rows; r++) {
        SP_UNROLL
        for (int c = 0; c < vectors; c++)
            sums[r][c] = vec_zero();
    }
    for (int64_t d = 0; d < k; d++) {
        vec value[ROWS];

        SP_UNROLL
        for (int r = 0; r < rows; r++)
            value[r] = vec_set1(x[r * k + d]);
        SP_UNROLL
        for (int c = 0; c < vectors; c++) {
            vec line = vec_load(s + d * n + c * LANES);

            SP_UNROLL
            for (int r = 0; r < rows; r++)
                sums[r][c] = vec_fma(value[r], line, sums[r][c]);
        }
    }
    SP_UNROLL
    for (int r = 0; r < rows; r++) {
        SP_UNROLL
        for (int c = 0; c < vectors; c++)
            vec_store(y + r * n + c * LANES, sums[r][c]);
    }
}

/* All columns of `rows` rows; `vectors` at a time, then one by one. */
SP_INLINE void read_rows(int rows, int vectors, float *y, const float *x, const float *s, int64_t k,
                         int64_t n)
{
    int64_t j = 0;

    for (; j + vectors * LANES <= n; j += vectors * LANES)
        read_tile(rows, vectors, y + j, x, s + j, k, n);
    for (; j < n; j += LANES)
        read_tile(rows, 1, y + j, x, s + j, k, n);
}

static void state_read(float *y, const float *x, const float *s, int64_t rows, int64_t k, int64_t n)
{
    int64_t r = 0;

    for (; r + ROWS <= rows; r += ROWS)
        read_rows(ROWS, VECTORS, y + r * n, x + r * k, s, k, n);
    for (; r + 2 <= rows; r += 2)
        read_rows(2, FEW_VECTORS, y + r * n, x + r * k, s, k, n);
    for (; r < rows; r++)
        read_rows(1, FEW_VECTORS, y + r * n, x + r * k, s, k, n);
}

/* ---- s = decay * s + xᵀ · (weights * u) ---------------------------------------------------- */

/* `lines` lines of s from d on, `vectors` vectors of each. */
SP_INLINE void fold_tile(int lines, int vectors, float *s, float decay, const float *x,
                         const float *weights, const float *u, int64_t rows, int64_t k, int64_t n)
{
    vec sums[ROWS][VECTORS];

    SP_UNROLL
    for (int d = 0; d < lines; d++) {
        SP_UNROLL
        for (int c = 0; c < vectors; c++)
            sums[d][c] = vec_mul(vec_set1(decay), vec_load(s + d * n + c * LANES));
    }
    for (int64_t r = 0; r < rows; r++) {
        vec weight = vec_set1(weights[r]);
        vec scaled[VECTORS];

        SP_UNROLL
        for (int c = 0; c < vectors; c++)
            scaled[c] = vec_mul(weight, vec_load(u + r * n + c * LANES));
        SP_UNROLL
        for (int d = 0; d < lines; d++) {
            vec value = vec_set1(x[r * k + d]);

            SP_UNROLL
            for (int c = 0; c < vectors; c++)
                sums[d][c] = vec_fma(value, scaled[c], sums[d][c]);
        }
    }
    SP_UNROLL
    for (int d = 0; d < lines; d++) {
        SP_UNROLL
        for (int c = 0; c < vectors; c++)
            vec_store(s + d * n + c * LANES, sums[d][c]);
    }
}

SP_INLINE void fold_lines(int lines, float *s, float decay, const float *x, const float *weights,
                          const float *u, int64_t rows, int64_t k, int64_t n)
{
    int64_t j = 0;

    for (; j + VECTORS * LANES <= n; j += VECTORS * LANES)
        fold_tile(lines, VECTORS, s + j, decay, x, weights, u + j, rows, k, n);
    for (; j < n; j += LANES)
        fold_tile(lines, 1, s + j, decay, x, weights, u + j, rows, k, n);
}

static void state_fold(float *s, float decay, const float *x, const float *weights, const float *u,
                       int64_t rows, int64_t k, int64_t n)
{
    int64_t d = 0;

    for (; d + ROWS <= k; d += ROWS)
        fold_lines(ROWS, s + d * n, decay, x + d, weights, u, rows, k, n);
    for (; d < k; d++)
        fold_lines(1, s + d * n, decay, x + d, weights, u, rows, k, n);
}

/* ---- u and o of a row ---------------------------------------------------------------------- */

SP_INLINE void row_tile(int vectors, const sp_delta_row_args *a, int64_t j)
{
    vec rest[VECTORS], out[VECTORS], decay = vec_set1(a->decay);
    float *u = a->u + a->i * a->n;

    SP_UNROLL
    for (int c = 0; c < vectors; c++) {
        int64_t at = j + c * LANES;

        rest[c] = vec_fnma(decay, vec_load(a->sk + at), vec_load(a->v + at));
        out[c] = vec_mul(decay, vec_load(a->sq + at));
    }
    for (int64_t r = 0; r < a->i; r++) {
        vec wk = vec_set1(a->wk[r]), wq = vec_set1(a->wq[r]);

        SP_UNROLL
        for (int c = 0; c < vectors; c++) {
            vec earlier = vec_load(a->u + r * a->n + j + c * LANES);

            rest[c] = vec_fnma(wk, earlier, rest[c]);
            out[c] = vec_fma(wq, earlier, out[c]);
        }
    }
    SP_UNROLL
    for (int c = 0; c < vectors; c++) {
        int64_t at = j + c * LANES;

        rest[c] = vec_mul(vec_set1(a->beta), rest[c]);
        vec_store(u + at, rest[c]);
        out[c] = vec_fma(vec_set1(a->wq[a->i]), rest[c], out[c]);
        vec_store(a->o + at, vec_mul(vec_set1(a->scale), out[c]));
    }
}

static void delta_row(const sp_delta_row_args *args)
{
    int64_t j = 0;

    for (; j + VECTORS * LANES <= args->n; j += VECTORS * LANES)
        row_tile(VECTORS, args, j);
    for (; j < args->n; j += LANES)
        row_tile(1, args, j);
}

#endif
