/*
 * overlay.c: from an adapter's tables to the rows that it replaces. Two stages: every token's row
 * gets a source, by comparing the adapter's table with the served one, which reads both once; then
 * the replaced rows are copied into one block. The tables are not needed afterwards.
 */

#include "pool/overlay.h"

#include "base/alloc.h"
#include "base/error.h"
#include "base/integer.h"
#include "kernels/cpu/kernels.h"
#include "pool/image.h"

#include <math.h>
#include <string.h>

#define BLOCK 1024 /* elements converted at a time */

static const void *element_at(sp_dtype dtype, const void *data, int64_t index)
{
    return (const char *)data + index * (int64_t)sp_dtype_bytes(dtype);
}

/* ---- comparing ----------------------------------------------------------------------------- */

typedef struct table_pair {
    const sp_kernels *kernels;
    const sp_adapter_table *own;
    const sp_served_table *served;
} table_pair;

/* After conversion to the served type, bit by bit. */
static bool bits_differ(const table_pair *pair, const void *own, const void *theirs)
{
    sp_dtype own_type = pair->own->full.dtype, type = pair->served->dtype;
    int32_t hidden = pair->served->hidden;
    uint32_t converted[BLOCK]; /* of either width */

    if (own_type == type)
        return memcmp(own, theirs, (size_t)hidden * sp_dtype_bytes(type)) != 0;
    for (int32_t begin = 0; begin < hidden; begin += BLOCK) {
        int32_t n = hidden - begin < BLOCK ? hidden - begin : BLOCK;

        pair->kernels->convert(type, converted, own_type, element_at(own_type, own, begin), n);
        if (memcmp(converted, element_at(type, theirs, begin), (size_t)n * sp_dtype_bytes(type)) !=
            0)
            return true;
    }
    return false;
}

/* A difference larger than quantisation noise. A NaN never counts as noise. */
static bool values_differ(const table_pair *pair, const void *own, const void *theirs)
{
    sp_dtype own_type = pair->own->full.dtype, type = pair->served->dtype;
    int32_t hidden = pair->served->hidden;
    float a[BLOCK], b[BLOCK];

    for (int32_t begin = 0; begin < hidden; begin += BLOCK) {
        int32_t n = hidden - begin < BLOCK ? hidden - begin : BLOCK;

        pair->kernels->convert(SP_DTYPE_F32, a, own_type, element_at(own_type, own, begin), n);
        pair->kernels->convert(SP_DTYPE_F32, b, type, element_at(type, theirs, begin), n);
        for (int32_t i = 0; i < n; i++)
            if (!(fabsf(a[i] - b[i]) <= SP_OVERLAY_NOISE_MAX))
                return true;
    }
    return false;
}

static int32_t mark_different_rows(const table_pair *pair, int32_t *source)
{
    const sp_factor *full = &pair->own->full;
    const sp_served_table *served = pair->served;
    int32_t rows = full->rows < served->rows ? (int32_t)full->rows : served->rows;
    int32_t n = 0;

    for (int32_t row = 0; row < rows; row++) {
        const void *own = element_at(full->dtype, full->data, row * full->row_stride);
        const void *theirs = element_at(served->dtype, served->data, (int64_t)row * served->hidden);
        bool differs =
            served->approximate ? values_differ(pair, own, theirs) : bits_differ(pair, own, theirs);

        if (!differs)
            continue;
        source[row] = SP_ROW_OWN;
        n++;
    }
    return n;
}

/* ---- selecting ----------------------------------------------------------------------------- */

static const char *table_name(const sp_adapter_table *table)
{
    if (table->module != NULL)
        return table->module;
    return table->kind == SP_SITE_EMBEDDING ? "embed_tokens" : "lm_head";
}

static sp_status fail_shape(const sp_adapter_table *table, const char *what,
                            const sp_factor *factor, const sp_served_table *served, sp_error *error)
{
    return sp_fail(error, SP_ERR_MISMATCH, "shape-mismatch", table_name(table), -1,
                   "the %s of %s are [%d, %d]; the served table is [%d, %d]", what,
                   table_name(table), (int)factor->rows, (int)factor->cols, (int)served->rows,
                   (int)served->hidden);
}

static sp_status check_table(const sp_adapter_table *table, const sp_served_table *served,
                             sp_error *error)
{
    if (!served || !served->data || served->rows < 1 || served->hidden < 1)
        return sp_fail(error, SP_ERR_UNSUPPORTED, "engine-unsupported", table_name(table), -1,
                       "replaced rows of %s cannot be held: the table is not served",
                       table_name(table));
    if (table->full.data && (table->full.rows < 1 || table->full.cols != served->hidden))
        return fail_shape(table, "rows", &table->full, served, error);
    if (table->trainable.data && table->trainable.cols != served->hidden)
        return fail_shape(table, "trainable rows", &table->trainable, served, error);
    if (table->n_ids != (table->trainable.data ? table->trainable.rows : 0))
        return sp_fail(error, SP_ERR_REFUSED, "bad-token-index", table_name(table), -1,
                       "%d trainable tokens of %s are listed for %d rows", (int)table->n_ids,
                       table_name(table), (int)table->trainable.rows);
    return SP_OK;
}

static sp_status bad_token(const sp_adapter_table *table, int32_t index, const char *why,
                           sp_error *error)
{
    return sp_fail(error, SP_ERR_REFUSED, "bad-token-index", table_name(table), index,
                   "trainable token %d of %s %s", (int)table->token_ids[index], table_name(table),
                   why);
}

static sp_status mark_trainable(const sp_adapter_table *table, const sp_served_table *served,
                                int32_t *source, int32_t *out_dropped, sp_error *error)
{
    int32_t own_rows = table->full.data ? table->full.rows : served->rows;
    int32_t rows = table->rows ? table->rows : own_rows;

    for (int32_t i = 0; i < table->n_ids; i++) {
        int32_t id = table->token_ids[i];

        if (id < 0 || id >= rows)
            return bad_token(table, i, "is not among the adapter's rows", error);
        if (id >= served->rows)
            ++*out_dropped;
        else if (source[id] >= 0)
            return bad_token(table, i, "is listed twice", error);
        else
            source[id] = i;
    }
    return SP_OK;
}

sp_status sp_overlay_select(const sp_adapter_table *table, const sp_served_table *served,
                            int32_t *out_source, sp_overlay_counts *out_counts, sp_error *error)
{
    table_pair pair = {.own = table, .served = served};
    sp_overlay_counts counts = {0};
    sp_status status = SP_NEED(error, {"table", table}, {"served", served},
                               {"out_source", out_source}, {"out_counts", out_counts});

    if (status == SP_OK)
        status = check_table(table, served, error);
    if (status == SP_OK)
        status = sp_kernels_get(NULL, &pair.kernels, error);
    if (status != SP_OK)
        return status;
    for (int32_t row = 0; row < served->rows; row++)
        out_source[row] = SP_ROW_SERVED;
    if (table->full.data) {
        counts.different = mark_different_rows(&pair, out_source);
        if (table->full.rows > served->rows)
            counts.dropped_rows = table->full.rows - served->rows;
    }
    status = mark_trainable(table, served, out_source, &counts.dropped_ids, error);
    if (status != SP_OK)
        return status;
    for (int32_t row = 0; row < served->rows; row++)
        counts.overridden += out_source[row] != SP_ROW_SERVED;
    *out_counts = counts;
    return SP_OK;
}

/* ---- one module's part --------------------------------------------------------------------- */

/* A part while it is built. */
typedef struct part_plan {
    const sp_adapter_table *table; /* NULL: the adapter has none */
    const sp_served_table *served;
    int32_t *source; /* [served->rows], owned */
    sp_overlay_part part;
} part_plan;

static const void *source_row(const part_plan *plan, int32_t id, sp_dtype *out_dtype)
{
    int32_t source = plan->source[id];
    const sp_factor *factor = source == SP_ROW_OWN ? &plan->table->full : &plan->table->trainable;
    int64_t row = source == SP_ROW_OWN ? id : source;

    *out_dtype = factor->dtype;
    return element_at(factor->dtype, factor->data, row * factor->row_stride);
}

static bool is_exact(const sp_kernels *kernels, sp_dtype dtype, sp_dtype from, const void *row,
                     int32_t hidden)
{
    uint16_t halves[BLOCK];
    float a[BLOCK], b[BLOCK];

    if (from == dtype)
        return true;
    for (int32_t begin = 0; begin < hidden; begin += BLOCK) {
        int32_t n = hidden - begin < BLOCK ? hidden - begin : BLOCK;

        kernels->convert(SP_DTYPE_F32, a, from, element_at(from, row, begin), n);
        kernels->convert(dtype, halves, SP_DTYPE_F32, a, n);
        kernels->convert(SP_DTYPE_F32, b, dtype, halves, n);
        if (memcmp(a, b, (size_t)n * sizeof *a) != 0)
            return false;
    }
    return true;
}

/*
 * The type of the rows. A GEMM sums BF16 weights in another order than F32 ones, so in the checking
 * mode rows that are exactly BF16 stay BF16, like the served table's.
 */
static sp_dtype rows_dtype(const sp_kernels *kernels, const part_plan *plan, sp_dtype pool)
{
    if (pool != SP_DTYPE_F32 || plan->served->dtype != SP_DTYPE_BF16)
        return pool;
    for (int32_t id = 0; id < plan->served->rows; id++) {
        sp_dtype from;
        const void *row;

        if (plan->source[id] == SP_ROW_SERVED)
            continue;
        row = source_row(plan, id, &from);
        if (!is_exact(kernels, SP_DTYPE_BF16, from, row, plan->served->hidden))
            return pool;
    }
    return SP_DTYPE_BF16;
}

/* Assigns the part's offsets, from *io_bytes on. */
static void place_part(part_plan *plan, size_t *io_bytes)
{
    sp_overlay_part *part = &plan->part;
    size_t row_bytes = (size_t)part->hidden * sp_dtype_bytes(part->dtype);

    part->rows_offset_bytes = *io_bytes;
    part->map_offset_bytes =
        part->rows_offset_bytes + align_up((size_t)part->n * row_bytes, SP_POOL_ALIGN_BYTES);
    part->ids_offset_bytes = part->map_offset_bytes +
                             align_up((size_t)part->vocab * sizeof(int32_t), SP_POOL_ALIGN_BYTES);
    *io_bytes =
        part->ids_offset_bytes + align_up((size_t)part->n * sizeof(int32_t), SP_POOL_ALIGN_BYTES);
}

static sp_status plan_part(part_plan *plan, sp_dtype pool, size_t *io_bytes, sp_error *error)
{
    const sp_served_table *served = plan->served;
    const sp_kernels *kernels;
    sp_overlay_counts counts;
    sp_status status = check_table(plan->table, served, error);

    if (status == SP_OK)
        status = sp_kernels_get(NULL, &kernels, error);
    if (status != SP_OK)
        return status;
    plan->source = sp_malloc((size_t)served->rows * sizeof *plan->source);
    if (!plan->source)
        return sp_fail_memory(error, (size_t)served->rows * sizeof *plan->source,
                              "the rows that an adapter replaces");
    status = sp_overlay_select(plan->table, served, plan->source, &counts, error);
    if (status != SP_OK || counts.overridden == 0)
        return status;
    plan->part = (sp_overlay_part){
        .n = counts.overridden,
        .vocab = served->rows,
        .hidden = served->hidden,
        .dtype = rows_dtype(kernels, plan, pool),
    };
    place_part(plan, io_bytes);
    return SP_OK;
}

/* The bytes between the pieces are zeroed, so that equal adapters give equal images. */
static void zero_tail(char *piece, size_t bytes)
{
    memset(piece + bytes, 0, align_up(bytes, SP_POOL_ALIGN_BYTES) - bytes);
}

static void write_part(const part_plan *plan, char *data)
{
    const sp_overlay_part *part = &plan->part;
    size_t row_bytes = (size_t)part->hidden * sp_dtype_bytes(part->dtype);
    char *rows = data + part->rows_offset_bytes;
    int32_t *map = (int32_t *)(void *)(data + part->map_offset_bytes);
    int32_t *ids = (int32_t *)(void *)(data + part->ids_offset_bytes);
    const sp_kernels *kernels;
    int32_t n = 0;

    if (part->n == 0 || sp_kernels_get(NULL, &kernels, NULL) != SP_OK)
        return;
    for (int32_t id = 0; id < part->vocab; id++) {
        sp_dtype from;
        const void *row;

        map[id] = -1;
        if (plan->source[id] == SP_ROW_SERVED)
            continue;
        row = source_row(plan, id, &from);
        kernels->convert(part->dtype, rows + (size_t)n * row_bytes, from, row, part->hidden);
        map[id] = n;
        ids[n++] = id;
    }
    zero_tail(rows, (size_t)n * row_bytes);
    zero_tail((char *)map, (size_t)part->vocab * sizeof *map);
    zero_tail((char *)ids, (size_t)n * sizeof *ids);
}

/* ---- the whole ----------------------------------------------------------------------------- */

typedef struct overlay_plan {
    part_plan embed, head;
    size_t bytes;
} overlay_plan;

static void free_plan(overlay_plan *plan)
{
    sp_free(plan->embed.source);
    sp_free(plan->head.source);
}

static sp_status make_plan(const sp_adapter_table *tables, size_t n_tables,
                           const sp_served_table *embed, const sp_served_table *head,
                           sp_dtype dtype, overlay_plan *out_plan, sp_error *error)
{
    sp_status status = SP_OK;

    *out_plan = (overlay_plan){.embed.served = embed, .head.served = head};
    for (size_t i = 0; i < n_tables && status == SP_OK; i++) {
        part_plan *part = tables[i].kind == SP_SITE_EMBEDDING ? &out_plan->embed : &out_plan->head;

        if (part->table)
            status = sp_fail(error, SP_ERR_REFUSED, "duplicate-tensor", table_name(&tables[i]), -1,
                             "%s has two tables in one adapter", table_name(&tables[i]));
        part->table = &tables[i];
        if (status == SP_OK)
            status = plan_part(part, dtype, &out_plan->bytes, error);
    }
    if (status != SP_OK)
        free_plan(out_plan);
    return status;
}

sp_status sp_overlay_measure(const sp_adapter_table *tables, size_t n_tables,
                             const sp_served_table *embed, const sp_served_table *head,
                             sp_dtype dtype, size_t *out_bytes, sp_error *error)
{
    overlay_plan plan;
    sp_status status = make_plan(tables, n_tables, embed, head, dtype, &plan, error);

    if (status != SP_OK)
        return status;
    *out_bytes = plan.bytes;
    free_plan(&plan);
    return SP_OK;
}

sp_status sp_overlay_build_for(sp_device *device, const sp_adapter_table *tables, size_t n_tables,
                               const sp_served_table *embed, const sp_served_table *head,
                               sp_dtype dtype, sp_overlay **out_overlay, sp_error *error)
{
    overlay_plan plan;
    sp_overlay *overlay = NULL;
    sp_status status = make_plan(tables, n_tables, embed, head, dtype, &plan, error);

    if (status != SP_OK)
        return status;
    if (plan.bytes > 0) {
        overlay = sp_calloc(1, sizeof *overlay);
        if (overlay)
            overlay->data = sp_image_memory_create(device, plan.bytes, &overlay->pinned);
        if (!overlay || !overlay->data) {
            status = sp_fail_memory(error, plan.bytes, "the rows that an adapter replaces");
            goto free_overlay;
        }
        overlay->bytes = plan.bytes;
        overlay->embed = plan.embed.part;
        overlay->head = plan.head.part;
        write_part(&plan.embed, overlay->data);
        write_part(&plan.head, overlay->data);
    }
    free_plan(&plan);
    *out_overlay = overlay;
    return SP_OK;

free_overlay:
    sp_free(overlay);
    free_plan(&plan);
    return status;
}

sp_status sp_overlay_build(const sp_adapter_table *tables, size_t n_tables,
                           const sp_served_table *embed, const sp_served_table *head,
                           sp_dtype dtype, sp_overlay **out_overlay, sp_error *error)
{
    return sp_overlay_build_for(NULL, tables, n_tables, embed, head, dtype, out_overlay, error);
}

void sp_overlay_destroy(sp_overlay *overlay)
{
    if (!overlay)
        return;
    sp_image_memory_destroy(overlay->data, overlay->pinned);
    sp_free(overlay);
}
