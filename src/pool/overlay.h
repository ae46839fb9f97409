/*
 * overlay.h: whole rows of embed_tokens and lm_head that an adapter replaces.
 *
 * An adapter that was trained with modules_to_save or with trainable tokens
 * carries rows that take the place of the served table's, for its own requests only. Here its
 * tables, as stored, are compared with the served ones: which rows differ, where each comes from,
 * and a compact image of them: the rows, a map from token to row, and the tokens in order. The
 * image is part of sp_image and is placed in an extent of the pool's overlay memory, under the same
 * version as the slot.
 *
 * Everything here is pure: no files, no work on a device. Thread-safe on distinct objects. Pointers
 * may not be NULL unless said so.
 */
#ifndef SP_POOL_OVERLAY_H
#define SP_POOL_OVERLAY_H

#include <sidepath/adapter.h>
#include <sidepath/device.h>

/* Where a token's row comes from: the i-th row of the trainable tensor, or one of these. */
#define SP_ROW_SERVED (-1) /* not replaced */
#define SP_ROW_OWN    (-2) /* the adapter's full table, the row of this token */

typedef struct sp_overlay_counts {
    int32_t overridden;   /* rows that are replaced */
    int32_t different;    /* rows of the full table that differ from the served ones */
    int32_t dropped_rows; /* rows of the full table beyond the served vocabulary */
    int32_t dropped_ids;  /* trainable tokens beyond it but inside the adapter's own rows */
} sp_overlay_counts;

/*
 * Determines the source of every row, out_source [served->rows]. Rows of the full table are
 * compared after conversion to the served type: any differing bit counts, or, where the served
 * table is approximate, a difference above SP_OVERLAY_NOISE_MAX. A trainable token always takes its
 * trained row, whether or not the full table or that row differs. SP_ERR_MISMATCH with
 * `shape-mismatch`: another hidden size, or no rows. A full table with fewer rows than served
 * replaces those it has. SP_ERR_REFUSED with `bad-token-index` and its position: a token that is
 * negative, listed twice or not among the adapter's rows; a count of tokens that is not the count
 * of trainable rows. Outputs are set only on success; out_source is undefined otherwise.
 */
sp_status sp_overlay_select(const sp_adapter_table *table, const sp_served_table *served,
                            int32_t *out_source, sp_overlay_counts *out_counts, sp_error *error);

/* One module's part of an overlay. n 0: nothing is replaced there, and it has no bytes. */
typedef struct sp_overlay_part {
    int32_t n;
    int32_t vocab, hidden;
    sp_dtype dtype;           /* of the rows */
    size_t rows_offset_bytes; /* [n, hidden] */
    size_t map_offset_bytes;  /* int32 [vocab]: number of the token's row, or -1 */
    size_t ids_offset_bytes;  /* int32 [n]: the tokens, ascending */
} sp_overlay_part;

/* Owns its data. */
typedef struct sp_overlay {
    void *data;   /* [bytes], 256-byte aligned */
    size_t bytes; /* a multiple of 256 */
    sp_overlay_part embed, head;
    sp_device *pinned; /* whose pinned memory data is, or NULL */
} sp_overlay;

/*
 * Builds the overlay of up to two tables (of different modules). Rows are converted to `dtype`,
 * the pool's, nearest even; with an F32 pool and a BF16 served table they stay BF16 where that is
 * exact, so that a row equal to the served one gives the served one's bits. *out_overlay is owned
 * by the caller (sp_overlay_destroy), and NULL when no row is replaced. SP_ERR_UNSUPPORTED with
 * `engine-unsupported`: a table of a module that is not served (NULL). What sp_overlay_select
 * returns. SP_ERR_MEMORY.
 */
sp_status sp_overlay_build(const sp_adapter_table *tables, size_t n_tables,
                           const sp_served_table *embed, const sp_served_table *head,
                           sp_dtype dtype, sp_overlay **out_overlay, sp_error *error);

/* The bytes that sp_overlay_build would take, 0 when no row is replaced. */
sp_status sp_overlay_measure(const sp_adapter_table *tables, size_t n_tables,
                             const sp_served_table *embed, const sp_served_table *head,
                             sp_dtype dtype, size_t *out_bytes, sp_error *error);

void sp_overlay_destroy(sp_overlay *overlay); /* NULL is allowed */

#endif
