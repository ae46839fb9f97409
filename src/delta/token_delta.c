/*
 * token_delta.c: embeddings and logits, where a table of tokens is what the adapter changes.
 *
 * Replaced rows come first: an embedding is the adapter's row instead of the served one; a logit is
 * the product with the adapter's row. Pairs follow: for lm_head as at any linear site, for
 * embed_tokens with a gathered column of A instead of x · Aᵀ, which it equals for a one-hot x.
 *
 * Work is collected into rounds of GEMMs whose outputs are written directly into y, so that a step
 * with rows of many adapters runs them together. Which rows share a round changes no bit.
 */
#include "base/error.h"
#include "base/grow.h"
#include "base/integer.h"
#include "delta/delta_state.h"
#include "kernels/cpu/gemm.h"

#define ROUND_GEMMS 32
#define ALIGN_BYTES 64

/* ---- scratch ------------------------------------------------------------------------------- */

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
    return align_up(most, ALIGN_BYTES);
}

static size_t cut(char *block, const sp_layout *layout, bool x_f32, sp_token_scratch *out)
{
    int32_t rank = sp_layout_rank_stride(layout), vocab = 0, hidden = 0;
    bool has_pairs = site_of(layout, SP_SITE_EMBEDDING) >= 0;
    size_t xa_bytes = align_up(
        SP_TOKEN_ROUND_ROWS * (size_t)rank * sp_dtype_bytes(sp_layout_dtype(layout)), ALIGN_BYTES);
    size_t scale_bytes = align_up(SP_TOKEN_ROUND_ROWS * sizeof(float), ALIGN_BYTES),
           rounded_bytes = 0;

    *out = (sp_token_scratch){0};
    if (!has_pairs && sp_layout_served(layout, SP_SITE_HEAD) == NULL)
        return 0;
    table_dims(layout, SP_SITE_HEAD, &vocab, &hidden);
    if (x_f32 && sp_layout_dtype(layout) != SP_DTYPE_F32)
        rounded_bytes =
            align_up(SP_TOKEN_ROUND_ROWS * (size_t)hidden * sizeof(uint16_t), ALIGN_BYTES);
    out->x_bytes = packed_bytes(layout, hidden > rank ? hidden : rank);
    if (block != NULL) {
        out->packed_x = block;
        out->xa = block + out->x_bytes;
        out->scale = (float *)(void *)(out->xa + xa_bytes);
        out->rounded = rounded_bytes > 0 ? (char *)out->scale + scale_bytes : NULL;
    }
    return out->x_bytes + xa_bytes + scale_bytes + rounded_bytes;
}

size_t sp_token_scratch_bytes(const sp_layout *layout, bool x_f32)
{
    sp_token_scratch scratch;

    return cut(NULL, layout, x_f32, &scratch);
}

void sp_token_scratch_cut(char *block, const sp_layout *layout, bool x_f32,
                          sp_token_scratch *out_scratch)
{
    cut(block, layout, x_f32, out_scratch);
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
    bytes = align_up(kernels->x_pack_bytes(dtype, w_type, rows, k), ALIGN_BYTES);
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
    r->x_used += align_up(
        delta->kernels->x_pack_bytes(args->x_type, args->w_type, args->rows, args->k), ALIGN_BYTES);
    r->n_rows += (int32_t)args->rows;
}

/* ---- checks -------------------------------------------------------------------------------- */

sp_token_table sp_token_table_of(const sp_layout *layout, sp_site_kind kind)
{
    sp_token_table table = {.site = sp_geometry_find_kind(sp_layout_geometry(layout), kind)};

    table.index = table.site < 0 ? -1 : sp_layout_find(layout, table.site);
    if (table.site >= 0)
        (void)table_dims(layout, kind, &table.vocab, &table.hidden);
    return table;
}

static const sp_token_table *table_of(const sp_delta *delta, sp_site_kind kind)
{
    return kind == SP_SITE_EMBEDDING ? &delta->embed : &delta->head;
}

bool sp_delta_has_tokens(const sp_delta *delta, sp_site_kind kind)
{
    const sp_pool_overlays *tables = sp_pool_overlays_of(delta->pool, kind);
    /* What is captured for a GPU must work for whatever the slots hold later. */
    bool replaced = delta->gpu != NULL ? tables->n != NULL : tables->n_slots > 0;

    return !delta->no_apply && (table_of(delta, kind)->index >= 0 || replaced);
}

static sp_status check_table(const sp_delta *delta, sp_site_kind kind, sp_error *error)
{
    const char *name = kind == SP_SITE_EMBEDDING ? "embedding" : "head";

    if (table_of(delta, kind)->site >= 0)
        return SP_OK;
    return sp_fail(error, SP_ERR_ARGUMENT, NULL, "delta", -1, "the geometry has no %s", name);
}

/* ---- embeddings ---------------------------------------------------------------------------- */

typedef struct embed_job {
    const sp_delta *delta;
    const sp_plan_view *view;
    sp_delta_embed_call call; /* the caller's, in the current size */
} embed_job;

static void override_embeddings(const embed_job *job)
{
    const sp_pool_overlays *tables = sp_pool_overlays_of(job->delta->pool, SP_SITE_EMBEDDING);
    sp_override_args args = {
        .rows = tables->rows,
        .map = tables->map,
        .row_type = tables->row_type,
        .row_slot = job->view->seq_slot,
        .token = job->call.tokens,
        .width = job->delta->embed.hidden,
        .type = sp_layout_dtype(job->delta->layout),
        .y = job->call.y,
        .y_stride = job->call.y_stride,
    };

    if (tables->n_slots > 0)
        job->delta->kernels->override_rows(&args, 0, job->view->n_rows);
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
        .n = delta->embed.hidden,
        .k = rank,
        .w = tables->b[slot],
        .w_stride = stride,
        .y = job->call.y,
        .y_stride = job->call.y_stride,
        .row_index = row_order,
        .scale = scale,
    };

    delta->kernels->gather_columns(dtype, xa, stride, tables->a[slot], delta->embed.vocab, rank,
                                   job->call.tokens, row_order, rows);
    for (int32_t i = 0; i < rows; i++)
        scale[i] = sp_effective_scale(tables->scale[slot], job->view->row_scale[row_order[i]]);
    add_gemm(r, &args, xa, stride, NULL);
}

static void apply_embed_pairs(const embed_job *job)
{
    const sp_delta *delta = job->delta;
    const sp_pool_tables *tables = sp_pool_tables_at(delta->pool, delta->embed.index);
    const sp_plan_view *view = job->view;
    round r = {.delta = delta};

    if (tables == NULL)
        return;
    for (int32_t s = 0; s < view->n_segments; s++) {
        int32_t slot = view->segment_slot[s], end = view->segment_begin[s + 1];

        for (int32_t i = view->segment_begin[s]; tables->rank[slot] > 0 && i < end;) {
            int32_t rows =
                make_room(&r, sp_layout_dtype(delta->layout), end - i, tables->rank[slot]);

            add_embed_rows(job, &r, tables, slot, view->row_order + i, rows);
            i += rows;
        }
    }
    run_round(&r);
}

static sp_status check_tokens(const embed_job *job, sp_error *error)
{
    int32_t vocab = job->delta->embed.vocab;

    for (int32_t i = 0; i < job->view->n_rows; i++) {
        int32_t token = job->call.tokens[i];

        if (job->view->seq_slot[i] >= 0 && (token < 0 || token >= vocab))
            return sp_fail(error, SP_ERR_ARGUMENT, NULL, "tokens", i,
                           "token %d of row %d is outside the vocabulary of %d", (int)token, (int)i,
                           (int)vocab);
    }
    return SP_OK;
}

static sp_status read_embed(const sp_delta *delta, const sp_delta_embed_call *call, embed_job *job,
                            int32_t *out_rows, sp_error *error)
{
    sp_status status;

    job->call = (sp_delta_embed_call){.struct_bytes = sizeof job->call};
    status = sp_struct_read(&job->call, sizeof job->call, call, "sp_delta_embed_call", error);
    if (status == SP_OK)
        status = sp_delta_rows_of(delta, job->call.plan, &job->view, out_rows, error);
    if (status == SP_OK && (job->call.tokens == NULL || job->call.y == NULL))
        status = sp_delta_missing(job->call.tokens == NULL ? "tokens" : "y", error);
    if (status == SP_OK)
        status = check_table(delta, SP_SITE_EMBEDDING, error);
    if (status != SP_OK)
        return status;
    return sp_delta_check_stride("y_stride", job->call.y_stride, delta->embed.hidden, error);
}

sp_status sp_delta_embed(sp_delta *delta, const sp_delta_embed_call *call, sp_error *error)
{
    embed_job job = {.delta = delta};
    int32_t n_rows = 0;
    sp_status status = read_embed(delta, call, &job, &n_rows, error);

    if (status != SP_OK)
        return status;
    sp_delta_end_round(delta);
    if (!sp_delta_has_tokens(delta, SP_SITE_EMBEDDING))
        return SP_OK;
    if (delta->gpu != NULL) {
        status = sp_delta_gpu_check_step(delta->gpu, job.view, error);
        return status == SP_OK
                   ? sp_delta_gpu_embed(delta->gpu, n_rows, &delta->embed, &job.call, error)
                   : status;
    }
    status = check_tokens(&job, error);
    if (status != SP_OK || job.view->n_segments == 0)
        return status;
    override_embeddings(&job);
    apply_embed_pairs(&job);
    return SP_OK;
}

/* ---- logits -------------------------------------------------------------------------------- */

typedef struct head_job {
    const sp_delta *delta;
    const sp_plan_view *view;
    sp_delta_head_call call; /* the caller's, in the current size */
} head_job;

/* The rows of an FP32 x that row_order names, in the pool's type. */
static const char *round_head_rows(const head_job *job, const round *r, const int32_t *row_order,
                                   int32_t rows)
{
    const sp_delta *delta = job->delta;
    sp_dtype dtype = sp_layout_dtype(delta->layout);
    size_t row_bytes = (size_t)delta->head.hidden * sp_dtype_bytes(dtype);
    char *rounded = delta->token_scratch.rounded + (size_t)r->n_rows * row_bytes;

    for (int32_t i = 0; i < rows; i++)
        delta->kernels->convert(dtype, rounded + (size_t)i * row_bytes, SP_DTYPE_F32,
                                (const float *)job->call.x + row_order[i] * job->call.x_stride,
                                delta->head.hidden);
    return rounded;
}

/* The logits of the slot's replaced tokens, for the `rows` rows that row_order names. */
static void add_head_rows(const head_job *job, round *r, const sp_pool_overlays *tables,
                          int32_t slot, const int32_t *row_order, int32_t rows)
{
    int32_t hidden = job->delta->head.hidden;
    sp_gemm_args args = {
        .x_type = sp_layout_dtype(job->delta->layout),
        .w_type = (sp_dtype)tables->row_type[slot],
        .y_type = job->call.logits_type,
        .epilogue = SP_EPILOGUE_STORE,
        .rows = rows,
        .n = tables->n[slot],
        .k = hidden,
        .w = tables->rows[slot],
        .w_stride = hidden,
        .y = job->call.logits,
        .y_stride = job->call.logits_stride,
        .row_index = row_order,
        .column_index = tables->ids[slot],
    };

    if (job->call.x_type == args.x_type)
        add_gemm(r, &args, job->call.x, job->call.x_stride, row_order);
    else
        add_gemm(r, &args, round_head_rows(job, r, row_order, rows), hidden, NULL);
}

static void override_logits(const head_job *job)
{
    const sp_pool_overlays *tables = sp_pool_overlays_of(job->delta->pool, SP_SITE_HEAD);
    const sp_plan_view *view = job->view;
    round r = {.delta = job->delta};

    if (tables->n_slots == 0)
        return;
    for (int32_t s = 0; s < view->n_segments; s++) {
        int32_t slot = view->segment_slot[s], end = view->segment_begin[s + 1];

        for (int32_t i = view->segment_begin[s]; tables->n[slot] > 0 && i < end;) {
            int32_t rows =
                make_room(&r, (sp_dtype)tables->row_type[slot], end - i, job->delta->head.hidden);

            add_head_rows(job, &r, tables, slot, view->row_order + i, rows);
            i += rows;
        }
    }
    run_round(&r);
}

static sp_status check_head(const sp_delta *delta, const sp_delta_head_call *call, sp_error *error)
{
    sp_dtype dtype = sp_layout_dtype(delta->layout);
    sp_status status;

    if (call->x == NULL || call->logits == NULL)
        return sp_delta_missing(call->x == NULL ? "x" : "logits", error);
    status = sp_delta_check_x_type(delta, call->x_type, error);
    if (status == SP_OK && call->logits_type != SP_DTYPE_F32 && call->logits_type != dtype)
        status = sp_fail(error, SP_ERR_ARGUMENT, NULL, "logits_type", (int64_t)call->logits_type,
                         "logits_type is %d, it must be f32 or %s as the pool's",
                         (int)call->logits_type, sp_dtype_name(dtype));
    if (status == SP_OK)
        status = check_table(delta, SP_SITE_HEAD, error);
    if (status == SP_OK)
        status = sp_delta_check_stride("x_stride", call->x_stride, delta->head.hidden, error);
    if (status == SP_OK)
        status =
            sp_delta_check_stride("logits_stride", call->logits_stride, delta->head.vocab, error);
    return status;
}

/* The pair of the head, as at any linear site. */
static sp_status apply_head_pair(sp_delta *delta, const head_job *job, int32_t n_rows,
                                 sp_error *error)
{
    const sp_delta_output output = {sizeof output, delta->head.site, job->call.logits,
                                    job->call.logits_stride, job->call.logits_type};
    const sp_delta_group group = {
        .call = {.struct_bytes = sizeof group.call,
                 .plan = job->call.plan,
                 .x = job->call.x,
                 .x_stride = job->call.x_stride,
                 .x_type = job->call.x_type,
                 .outputs = &output,
                 .n_outputs = 1,
                 .stream = job->call.stream},
        .view = job->view,
        .n_rows = n_rows,
        .k_in = delta->head.index < 0 ? 0 : delta->head.hidden,
    };

    return sp_delta_apply_group(delta, &group, error);
}

sp_status sp_delta_head(sp_delta *delta, const sp_delta_head_call *call, sp_error *error)
{
    head_job job = {.delta = delta, .call = {.struct_bytes = sizeof job.call}};
    int32_t n_rows = 0;
    sp_status status =
        sp_struct_read(&job.call, sizeof job.call, call, "sp_delta_head_call", error);

    if (status == SP_OK)
        status = sp_delta_rows_of(delta, job.call.plan, &job.view, &n_rows, error);
    if (status == SP_OK)
        status = check_head(delta, &job.call, error);
    if (status != SP_OK || !sp_delta_has_tokens(delta, SP_SITE_HEAD))
        return status;
    if (delta->gpu == NULL) {
        override_logits(&job);
    } else {
        status = sp_delta_gpu_check_step(delta->gpu, job.view, error);
        if (status == SP_OK)
            status = sp_delta_gpu_head(delta->gpu, n_rows, &delta->head, &job.call, error);
        if (status != SP_OK)
            return status;
    }
    return apply_head_pair(delta, &job, n_rows, error);
}
