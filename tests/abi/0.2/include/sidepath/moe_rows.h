/*
 * moe_rows.h: the rows of a mixture-of-experts layer: which adapter and which expert each has, and
 * how they are grouped for the expert deltas of experts.h.
 *
 * Part of the route room: numbers of rows, slots and experts, never x or y. Everything here is a
 * pure function of host memory: what a host may use to sort its rows, and what the kernels of a
 * GPU, which compute the same from device memory, are checked against. Malformed input gives a
 * named error or no work, never a crash. Nothing allocates.
 *
 * A *pair* is one (token, k): the k-th of the top_k experts that the router chose for a token; its
 * number is token * top_k + k. A layer's expert GEMMs and deltas run over rows, each of which is a
 * pair, in one of two forms:
 *
 *     gather (decode)    row i is pair i; expert[i] says its expert
 *     sorted (prefill)   row i is pair row_pair[i]; the rows of expert e are
 *                        expert_begin[e] .. expert_begin[e + 1] - 1
 *
 * Both give the same bits.
 */
#ifndef SIDEPATH_MOE_ROWS_H
#define SIDEPATH_MOE_ROWS_H

#include <sidepath/route.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The rows of one layer in one step. Arrays are borrowed; for a delta on a GPU they are device
 * memory. */
typedef struct sp_moe_rows {
    size_t struct_bytes;
    int32_t n_tokens;  /* rows of the step, pads included */
    int32_t top_k;     /* >= 1 */
    int32_t n_experts; /* >= 1 */
    /* Gather form; NULL in the sorted one. [n_tokens * top_k]; a number outside 0 .. n_experts - 1
     * is a row without a delta. */
    const int32_t *expert;
    /* Sorted form; NULL in the gather one. [n_rows], each a pair; rows may be missing, as those of
     * pads. Rows at and after expert_begin[n_experts] have no delta. */
    const int32_t *row_pair;
    const int32_t *expert_begin; /* [n_experts + 1] from 0, never falling, to n_rows at most */
    int32_t n_rows;              /* sorted: elements of row_pair; gather: not read */
} sp_moe_rows;

/*
 * Slot of each packed row: stream s has rows stream_begin[s] .. stream_begin[s + 1] - 1 and the
 * adapter of slot stream_slot[s], or SP_SLOT_BASE; all other rows up to n_rows are pads and get
 * SP_SLOT_BASE. Returns the number of rows with a slot. Spans that do not begin at 0, fall or end
 * beyond n_rows, and NULL arrays, give 0 and SP_SLOT_BASE everywhere: no work.
 * stream_begin: [n_streams + 1]; out_row_slot: [n_rows], NULL: none is written.
 */
SP_API int32_t sp_moe_row_adapter_build(const int32_t *stream_begin, const int32_t *stream_slot,
                                        int32_t n_streams, int32_t n_rows, int32_t *out_row_slot);

/*
 * Whether begin [n + 1] is a prefix sum over n_rows rows: from 0, never falling, to n_rows at most.
 * SP_ERR_INPUT with `bad-expert-rows` and the first wrong index as position. SP_ERR_ARGUMENT: NULL,
 * n or n_rows below 0.
 */
SP_API sp_status sp_moe_prefix_check(const int32_t *begin, int32_t n, int32_t n_rows,
                                     sp_error *error);

/*
 * The sorted form of the gather one: pairs by expert, ascending within one expert; pairs whose
 * expert is out of range are left out. out_expert_begin: [n_experts + 1]; out_row_pair:
 * [n_tokens * top_k], of which expert_begin[n_experts] are written. Does not read row_pair and
 * expert_begin of `rows`. SP_ERR_ARGUMENT: NULL, a count out of range, more than 2^30 pairs.
 */
SP_API sp_status sp_moe_rows_sort(const sp_moe_rows *rows, int32_t *out_expert_begin,
                                  int32_t *out_row_pair, sp_error *error);

/* Some rows of one (slot, expert). Frozen: it will not grow. */
typedef struct sp_moe_item {
    int32_t slot, expert;
    int32_t begin, n_rows; /* in the row order */
} sp_moe_item;

/* Elements of scratch that sp_moe_items_build needs for so many rows; 0 for counts out of range. */
SP_API size_t sp_moe_items_scratch(int32_t n_rows, int32_t n_slots, int32_t n_experts);

/* The rows of a window, and where its work items go. All is borrowed. */
typedef struct sp_moe_items {
    size_t struct_bytes;
    const sp_moe_rows *rows;
    const int32_t *token_slot; /* [rows->n_tokens] as a plan's seq_slot: a number outside
                                  0 .. n_slots - 1 is the base's */
    int32_t n_slots;
    int32_t item_rows_max;     /* >= 1; SP_TILE_ROWS for the kernels of a GPU */
    int32_t row_begin, n_rows; /* the window */
    int32_t *scratch;          /* [sp_moe_items_scratch] */
    int32_t *row_order;        /* [n_rows] out: row numbers, those of an item one after the other */
    sp_moe_item *items;        /* [n_rows] out, as many as there are */
} sp_moe_items;

/*
 * The work items of rows [row_begin, row_begin + n_rows): all rows with a slot and an expert, by
 * expert, then by slot, then by row, ascending. *out_n_items is 0 where there are none.
 * SP_ERR_ARGUMENT: NULL, a count out of range, a window outside the rows. SP_ERR_INPUT with
 * `bad-expert-rows`: prefix sums that sp_moe_prefix_check refuses, or a row_pair that is no pair
 * (position: the row); row_order and items are not specified then.
 */
SP_API sp_status sp_moe_items_build(const sp_moe_items *call, int32_t *out_n_items,
                                    sp_error *error);

#ifdef __cplusplus
}
#endif
#endif
