/*
 * token_delta.c: embeddings and logits, where a table of tokens is what the adapter changes.
 *
 * Replaced rows come first: an embedding is the adapter's row instead of the served one; a logit is
 * the product with the adapter's row. Pairs come behind them: for lm_head as at any linear site,
 * for embed_tokens with a gathered column of A in place of x · Aᵀ, which is what it is for a
 * one-hot x.
 *
 * Work is collected into rounds of GEMMs whose outputs go straight into y, so that a step with
 * rows of many adapters runs them together. Which rows share a round changes no bit.
 */
#include "delta/delta_state.h"
#include "kernels/gemm.h"

#define ROUND_GEMMS 32
#define ALIGN_BYTES 64

/* ---- scratch ------------------------------------------------------------------------------- */

static size_t align_up(size_t bytes)
{
    return (bytes + ALIGN_BYTES - 1) / ALIGN_BYTES * ALIGN_BYTES;
}

static int32_t site_of(const sp_layout *layout, sp_site_kind kind)
{
    return sp_layout_find(layout, sp_geometry_find_kind(sp_layout_geometry(layout), kind));
}

static bool table_dims(const sp_layout *layout, sp_site_kind kind, int32_t *out_vocab,
                       int32_t *out_hidden)
{
    const sp_geometry *geometry = sp_layout_geometry(layout);
    sp_site site = {.struct_bytes = sizeof site};

    if (sp_geometry_site_at(geometry, sp_geometry_find_kind(geometry, kind), &site, NULL) != SP_OK)
        return false;
    *out_vocab = kind == SP_SITE_EMBEDDING ? site.k_in : site.n_out;
    *out_hidden = kind == SP_SITE_EMBEDDING ? site.n_out : site.k_in;
    return true;
}

/* Bytes of the packed rows of one round, at the level and for the weights that need most. */
static size_t packed_bytes(const sp_layout *layout, int64_t k)
{
    sp_dtype dtype = sp_layout_dtype(layout);
    size_t most = 0;

    for (const char *const *level = sp_kernels_levels(); *level != NULL; level++) {
        const sp_kernels *kernels;
        size_t bytes;

        if (sp_kernels_get(*level, &kernels, NULL) != SP_OK)
            continue;
        bytes = kernels->x_pack_bytes(dtype, dtype, SP_TOKEN_ROUND_ROWS, k);
        most = bytes > most ? bytes : most;
        if (dtype != SP_DTYPE_F32)
            continue;
        bytes = kernels->x_pack_bytes(dtype, SP_DTYPE_BF16, SP_TOKEN_ROUND_ROWS, k);
        most = bytes > most ? bytes : most;
    }
    return align_up(most);
}

static size_t cut(char *block, const sp_layout *layout, sp_token_scratch *out)
{
    int32_t rank = sp_layout_rank_stride(layout), vocab = 0, hidden = 0;
    const sp_served_tables *served = sp_layout_served(layout);
    bool has_pairs = site_of(layout, SP_SITE_EMBEDDING) >= 0;
    size_t xa_bytes =
        align_up(SP_TOKEN_ROUND_ROWS * (size_t)rank * sp_dtype_bytes(sp_layout_dtype(layout)));

    *out = (sp_token_scratch){0};
    if (!has_pairs && served->head.data == NULL)
        return 0;
    table_dims(layout, SP_SITE_HEAD, &vocab, &hidden);
    out->x_bytes = packed_bytes(layout, hidden > rank ? hidden : rank);
    if (block != NULL) {
        out->packed_x = block;
        out->xa = block + out->x_bytes;
        out->scale = (float *)(void *)(out->xa + xa_bytes);
    }
    return out->x_bytes + xa_bytes + align_up(SP_TOKEN_ROUND_ROWS * sizeof(float));
}

size_t sp_token_scratch_bytes(const sp_layout *layout)
{
    sp_token_scratch scratch;

    return cut(NULL, layout, &scratch);
}

void sp_token_scratch_cut(char *block, const sp_layout *layout, sp_token_scratch *out_scratch)
{
    cut(block, layout, out_scratch);
}

/* ---- rounds -------------------------------------------------------------------------------- */

typedef struct round {
    const sp_delta *delta;
    sp_gemm_args gemms[ROUND_GEMMS];
    int32_t n_gemms, n_rows;
    size_t x_used;
} round;

static void run_round(round *r)
{
    if (r->n_gemms > 0)
        sp_gemm_run(r->delta->kernels, r->delta->exec, r->gemms, r->n_gemms);
    r->n_gemms = r->n_rows = 0;
    r->x_used = 0;
}

/*
 * Makes room for the next of `rows` rows of length k; returns how many the round takes now, at
 * least one.
 */
static int32_t make_room(round *r, sp_dtype w_type, int32_t rows, int32_t k)
{
    const sp_kernels *kernels = r->delta->kernels;
    sp_dtype dtype = sp_layout_dtype(r->delta->layout);
    size_t bytes;

    rows = rows < SP_TOKEN_ROUND_ROWS ? rows : SP_TOKEN_ROUND_ROWS;
    bytes = align_up(kernels->x_pack_bytes(dtype, w_type, rows, k));
    if (r->n_gemms == ROUND_GEMMS || r->n_rows + rows > SP_TOKEN_ROUND_ROWS ||
        r->x_used + bytes > r->delta->token_scratch.x_bytes)
        run_round(r);
    return rows;
}

/* Packs the rows of `args` from x and adds it; make_room has said that it fits. */
static void add_gemm(round *r, const sp_gemm_args *args, const void *x, int64_t x_stride,
                     const int32_t *x_index)
{
    const sp_delta *delta = r->delta;
    sp_gemm_args *gemm = &r->gemms[r->n_gemms++];
    char *packed = delta->token_scratch.packed_x + r->x_used;

    *gemm = *args;
    gemm->packed_x = packed;
    sp_gemm_pack(delta->kernels, delta->exec, packed, args->x_type, args->w_type, x, x_stride,
                 x_index, args->rows, args->k);
    r->x_used +=
        align_up(delta->kernels->x_pack_bytes(args->x_type, args->w_type, args->rows, args->k));
    r->n_rows += (int32_t)args->rows;
}

/* ---- checks -------------------------------------------------------------------------------- */

bool sp_delta_has_tokens(const sp_delta *delta, sp_site_kind kind)
{
    const sp_pool_overlays *tables = sp_pool_overlays_of(delta->pool, kind);
    /* What is captured for a GPU must serve what the slots hold later. */
    bool replaced = delta->gpu != NULL ? tables->n != NULL : tables->n_slots > 0;

    return !delta->no_apply && (site_of(delta->layout, kind) >= 0 || replaced);
}

/* ---- embeddings ---------------------------------------------------------------------------- */

typedef struct embed_job {
    sp_delta *delta;
    sp_plan_view view;
    const int32_t *tokens;
    int32_t vocab, hidden;
    void *y; /* [n_rows, hidden], stride y_stride elements */
    int64_t y_stride;
} embed_job;

static void override_embeddings(const embed_job *job)
{
    const sp_pool_overlays *tables = sp_pool_overlays_of(job->delta->pool, SP_SITE_EMBEDDING);
    sp_override_args args = {
        .rows = tables->rows,
        .map = tables->map,
        .row_type = tables->row_type,
        .row_slot = job->view.seq_slot,
        .token = job->tokens,
        .width = job->hidden,
        .type = sp_layout_dtype(job->delta->layout),
        .y = job->y,
        .y_stride = job->y_stride,
    };

    if (tables->n_slots > 0)
        job->delta->kernels->override_rows(&args, 0, job->view.n_rows);
}

/* scale · B · A[:, token] for `rows` rows of one slot, whose rank is not 0. */
static void add_embed_rows(const embed_job *job, round *r, const sp_pool_tables *tables,
                           int32_t slot, const int32_t *row_order, int32_t rows)
{
    const sp_delta *delta = job->delta;
    sp_dtype dtype = sp_layout_dtype(delta->layout);
    int32_t stride = sp_layout_rank_stride(delta->layout), rank = tables->rank[slot];
    char *xa = delta->token_scratch.xa + (size_t)r->n_rows * (size_t)stride * sp_dtype_bytes(dtype);
    float *scale = delta->token_scratch.scale + r->n_rows;
    sp_gemm_args args = {
        .x_type = dtype,
        .w_type = dtype,
        .y_type = dtype,
        .delta_type = dtype,
        .epilogue = SP_EPILOGUE_FOLD,
        .rows = rows,
        .n = job->hidden,
        .k = rank,
        .w = tables->b[slot],
        .w_stride = stride,
        .y = job->y,
        .y_stride = job->y_stride,
        .row_index = row_order,
        .scale = scale,
    };

    delta->kernels->gather_columns(dtype, xa, stride, tables->a[slot], job->vocab, rank,
                                   job->tokens, row_order, rows);
    for (int32_t i = 0; i < rows; i++)
        scale[i] = sp_effective_scale(tables->scale[slot], job->view.row_scale[row_order[i]]);
    add_gemm(r, &args, xa, stride, NULL);
}

static void apply_embed_pairs(const embed_job *job)
{
    const sp_delta *delta = job->delta;
    int32_t site = site_of(delta->layout, SP_SITE_EMBEDDING);
    round r = {.delta = delta};
    const sp_pool_tables *tables = sp_pool_tables_at(delta->pool, site);

    if (tables == NULL)
        return;
    for (int32_t s = 0; s < job->view.n_segments; s++) {
        int32_t slot = job->view.segment_slot[s], end = job->view.segment_begin[s + 1];

        for (int32_t i = job->view.segment_begin[s]; tables->rank[slot] > 0 && i < end;) {
            int32_t rows =
                make_room(&r, sp_layout_dtype(delta->layout), end - i, tables->rank[slot]);

            add_embed_rows(job, &r, tables, slot, job->view.row_order + i, rows);
            i += rows;
        }
    }
    run_round(&r);
}

sp_status sp_delta_embed(sp_delta *delta, const sp_plan *plan, const int32_t *tokens, void *y,
                         int64_t y_stride)
{
    embed_job job = {.delta = delta, .tokens = tokens, .y = y, .y_stride = y_stride};
    sp_status status;

    if (tokens == NULL || y == NULL)
        return SP_ERR_ARGUMENT;
    status = sp_delta_check_plan(delta, plan);
    if (status != SP_OK)
        return status;
    if (!sp_delta_has_tokens(delta, SP_SITE_EMBEDDING))
        return SP_OK;
    job.view = *sp_plan_get(plan);
    if (!table_dims(delta->layout, SP_SITE_EMBEDDING, &job.vocab, &job.hidden))
        return SP_ERR_ARGUMENT;
    if (y_stride < job.hidden)
        return SP_ERR_STRIDE;
    if (delta->gpu != NULL)
        return sp_delta_gpu_embed(delta->gpu, job.view.n_rows, tokens, job.vocab, job.hidden, y,
                                  y_stride);
    for (int32_t i = 0; i < job.view.n_rows; i++)
        if (job.view.seq_slot[i] >= 0 && (tokens[i] < 0 || tokens[i] >= job.vocab))
            return SP_ERR_ARGUMENT;
    if (job.view.n_segments == 0)
        return SP_OK;
    override_embeddings(&job);
    apply_embed_pairs(&job);
    return SP_OK;
}

/* ---- logits -------------------------------------------------------------------------------- */

typedef struct head_job {
    sp_delta *delta;
    sp_plan_view view;
    int32_t vocab, hidden;
    const void *x; /* [n_rows, hidden], stride x_stride elements */
    int64_t x_stride;
    float *logits; /* [n_rows, vocab], stride logits_stride elements */
    int64_t logits_stride;
} head_job;

/* The logits of the slot's replaced tokens, for the `rows` rows that row_order names. */
static void add_head_rows(const head_job *job, round *r, const sp_pool_overlays *tables,
                          int32_t slot, const int32_t *row_order, int32_t rows)
{
    sp_gemm_args args = {
        .x_type = sp_layout_dtype(job->delta->layout),
        .w_type = (sp_dtype)tables->row_type[slot],
        .y_type = SP_DTYPE_F32,
        .epilogue = SP_EPILOGUE_STORE,
        .rows = rows,
        .n = tables->n[slot],
        .k = job->hidden,
        .w = tables->rows[slot],
        .w_stride = job->hidden,
        .y = job->logits,
        .y_stride = job->logits_stride,
        .row_index = row_order,
        .column_index = tables->ids[slot],
    };

    add_gemm(r, &args, job->x, job->x_stride, row_order);
}

static void override_logits(const head_job *job)
{
    const sp_pool_overlays *tables = sp_pool_overlays_of(job->delta->pool, SP_SITE_HEAD);
    round r = {.delta = job->delta};

    if (tables->n_slots == 0)
        return;
    for (int32_t s = 0; s < job->view.n_segments; s++) {
        int32_t slot = job->view.segment_slot[s], end = job->view.segment_begin[s + 1];

        for (int32_t i = job->view.segment_begin[s]; tables->n[slot] > 0 && i < end;) {
            int32_t rows = make_room(&r, (sp_dtype)tables->row_type[slot], end - i, job->hidden);

            add_head_rows(job, &r, tables, slot, job->view.row_order + i, rows);
            i += rows;
        }
    }
    run_round(&r);
}

sp_status sp_delta_head(sp_delta *delta, const sp_plan *plan, const void *x, int64_t x_stride,
                        float *logits, int64_t logits_stride)
{
    head_job job = {.delta = delta,
                    .x = x,
                    .x_stride = x_stride,
                    .logits = logits,
                    .logits_stride = logits_stride};
    sp_delta_output output = {-1, logits, logits_stride, SP_DTYPE_F32};
    sp_status status;

    if (x == NULL || logits == NULL)
        return SP_ERR_ARGUMENT;
    status = sp_delta_check_plan(delta, plan);
    if (status != SP_OK)
        return status;
    if (!sp_delta_has_tokens(delta, SP_SITE_HEAD))
        return SP_OK;
    output.site = delta->head_site;
    job.view = *sp_plan_get(plan);
    if (!table_dims(delta->layout, SP_SITE_HEAD, &job.vocab, &job.hidden))
        return SP_ERR_ARGUMENT;
    if (x_stride < job.hidden || logits_stride < job.vocab)
        return SP_ERR_STRIDE;
    if (delta->gpu == NULL) {
        override_logits(&job);
    } else {
        status = sp_delta_gpu_head(delta->gpu, job.view.n_rows, x, x_stride, job.vocab, job.hidden,
                                   logits, logits_stride);
        if (status != SP_OK)
            return status;
    }
    return sp_delta_apply(delta, plan, x, x_stride, &output, 1);
}
