/*
 * moe_rows.c: rows of a mixture-of-experts layer into work items of one (slot, expert): two stable
 * counting sorts, by slot and then by expert, so the time is linear in rows, slots and experts.
 */
#include "base/error.h"
#include "base/grow.h"

#include <sidepath/moe_rows.h>

#define PAIRS_MAX   (1 << 30)
#define EXPERTS_MAX (1 << 20)
#define SLOTS_MAX   4096

/* ---- checks -------------------------------------------------------------------------------- */

static int32_t first_wrong(const int32_t *begin, int32_t n, int32_t n_rows)
{
    if (begin[0] != 0)
        return 0;
    for (int32_t i = 1; i <= n; i++)
        if (begin[i] < begin[i - 1] || begin[i] > n_rows)
            return i;
    return -1;
}

static sp_status out_of_range(const char *name, int64_t value, int64_t low, int64_t high,
                              sp_error *error)
{
    return sp_fail(error, SP_ERR_ARGUMENT, NULL, name, -1,
                   "%s is %lld, it must be from %lld to %lld", name, (long long)value,
                   (long long)low, (long long)high);
}

sp_status sp_moe_prefix_check(const int32_t *begin, int32_t n, int32_t n_rows, sp_error *error)
{
    int32_t wrong;

    if (begin == NULL)
        return sp_fail_null(error, "begin");
    if (n < 0 || n_rows < 0)
        return out_of_range(n < 0 ? "n" : "n_rows", n < 0 ? n : n_rows, 0, INT32_MAX, error);
    wrong = first_wrong(begin, n, n_rows);
    if (wrong < 0)
        return SP_OK;
    return sp_fail(error, SP_ERR_INPUT, "bad-expert-rows", "expert_begin", wrong,
                   "element %d of the prefix sums is %d; they begin at 0, never fall and end at %d "
                   "at most",
                   (int)wrong, (int)begin[wrong], (int)n_rows);
}

/* Reads and checks all but the arrays' content. */
static sp_status read_rows(const sp_moe_rows *from, sp_moe_rows *out, sp_error *error)
{
    sp_status status;

    *out = (sp_moe_rows){.struct_bytes = sizeof *out};
    status = sp_struct_read(out, sizeof *out, from, "sp_moe_rows", error);
    if (status != SP_OK)
        return status;
    if (out->n_experts < 1 || out->n_experts > EXPERTS_MAX)
        return out_of_range("n_experts", out->n_experts, 1, EXPERTS_MAX, error);
    if (out->top_k < 1 || out->top_k > out->n_experts)
        return out_of_range("top_k", out->top_k, 1, out->n_experts, error);
    if (out->n_tokens < 0 || out->n_tokens > PAIRS_MAX / out->top_k)
        return out_of_range("n_tokens", out->n_tokens, 0, PAIRS_MAX / out->top_k, error);
    return SP_OK;
}

static sp_status check_form(const sp_moe_rows *rows, sp_error *error)
{
    bool sorted = rows->row_pair != NULL || rows->expert_begin != NULL;

    if (sorted && rows->expert != NULL)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "expert", -1,
                       "expert is of the gather form, row_pair and expert_begin of the sorted one: "
                       "give one form");
    if (!sorted && rows->expert == NULL)
        return sp_fail_null(error, "expert");
    if (!sorted)
        return SP_OK;
    if (rows->row_pair == NULL || rows->expert_begin == NULL)
        return sp_fail_null(error, rows->row_pair == NULL ? "row_pair" : "expert_begin");
    if (rows->n_rows < 0 || rows->n_rows > PAIRS_MAX)
        return out_of_range("n_rows", rows->n_rows, 0, PAIRS_MAX, error);
    return SP_OK;
}

/* ---- row maps ------------------------------------------------------------------------------ */

int32_t sp_moe_row_adapter_build(const int32_t *stream_begin, const int32_t *stream_slot,
                                 int32_t n_streams, int32_t n_rows, int32_t *out_row_slot)
{
    int32_t n_routed = 0;

    if (out_row_slot == NULL)
        return 0;
    for (int32_t row = 0; row < n_rows; row++)
        out_row_slot[row] = SP_SLOT_BASE;
    if (stream_begin == NULL || stream_slot == NULL || n_streams < 0 || n_rows < 0 ||
        first_wrong(stream_begin, n_streams, n_rows) >= 0)
        return 0;
    for (int32_t stream = 0; stream < n_streams; stream++) {
        if (stream_slot[stream] < 0)
            continue;
        for (int32_t row = stream_begin[stream]; row < stream_begin[stream + 1]; row++)
            out_row_slot[row] = stream_slot[stream];
        n_routed += stream_begin[stream + 1] - stream_begin[stream];
    }
    return n_routed;
}

sp_status sp_moe_rows_sort(const sp_moe_rows *rows, int32_t *out_expert_begin,
                           int32_t *out_row_pair, sp_error *error)
{
    sp_moe_rows own;
    sp_status status = read_rows(rows, &own, error);
    int32_t n_pairs;

    if (status == SP_OK)
        status = SP_NEED(error, {"expert", own.expert}, {"out_expert_begin", out_expert_begin},
                         {"out_row_pair", out_row_pair});
    if (status != SP_OK)
        return status;
    n_pairs = own.n_tokens * own.top_k;
    for (int32_t e = 0; e <= own.n_experts; e++)
        out_expert_begin[e] = 0;
    for (int32_t pair = 0; pair < n_pairs; pair++)
        if (own.expert[pair] >= 0 && own.expert[pair] < own.n_experts)
            out_expert_begin[own.expert[pair] + 1]++;
    for (int32_t e = 0; e < own.n_experts; e++)
        out_expert_begin[e + 1] += out_expert_begin[e];
    /* Each begin rises to the next one's while its pairs are placed, and is moved back after. */
    for (int32_t pair = 0; pair < n_pairs; pair++)
        if (own.expert[pair] >= 0 && own.expert[pair] < own.n_experts)
            out_row_pair[out_expert_begin[own.expert[pair]]++] = pair;
    for (int32_t e = own.n_experts; e > 0; e--)
        out_expert_begin[e] = out_expert_begin[e - 1];
    out_expert_begin[0] = 0;
    return SP_OK;
}

/* ---- work items ---------------------------------------------------------------------------- */

size_t sp_moe_items_scratch(int32_t n_rows, int32_t n_slots, int32_t n_experts)
{
    if (n_rows < 0 || n_rows > PAIRS_MAX || n_slots < 1 || n_slots > SLOTS_MAX || n_experts < 1 ||
        n_experts > EXPERTS_MAX)
        return 0;
    return 2 * (size_t)n_rows + (size_t)(n_slots > n_experts ? n_slots : n_experts) + 1;
}

/* The parts of the scratch. */
typedef struct work_space {
    int32_t *expert;  /* [n_rows] of each row of the window; -1: no work */
    int32_t *by_slot; /* [n_rows] rows of the window that have work */
    int32_t *count;   /* [max(slots, experts) + 1] */
} work_space;

static int32_t rows_of(const sp_moe_rows *rows)
{
    return rows->expert != NULL ? rows->n_tokens * rows->top_k : rows->n_rows;
}

static int32_t pair_of(const sp_moe_rows *rows, int32_t row)
{
    return rows->expert != NULL ? row : rows->row_pair[row];
}

static int32_t slot_of(const sp_moe_items *call, const sp_moe_rows *rows, int32_t row)
{
    return call->token_slot[pair_of(rows, row) / rows->top_k];
}

static bool has_slot(const sp_moe_items *call, const sp_moe_rows *rows, int32_t row)
{
    int32_t slot = slot_of(call, rows, row);

    return slot >= 0 && slot < call->n_slots;
}

/* Expert of each row of the window, -1 where it has no work. */
static sp_status find_experts(const sp_moe_items *call, const sp_moe_rows *rows, work_space *space,
                              sp_error *error)
{
    int32_t n_pairs = rows->n_tokens * rows->top_k, expert = 0;

    for (int32_t i = 0; i < call->n_rows; i++) {
        int32_t row = call->row_begin + i;

        if (rows->expert != NULL) {
            expert = rows->expert[row];
        } else {
            while (expert < rows->n_experts && rows->expert_begin[expert + 1] <= row)
                expert++;
            if (expert < rows->n_experts &&
                (rows->row_pair[row] < 0 || rows->row_pair[row] >= n_pairs))
                return sp_fail(error, SP_ERR_INPUT, "bad-expert-rows", "row_pair", row,
                               "row %d is pair %d, there are pairs 0 to %d", (int)row,
                               (int)rows->row_pair[row], (int)n_pairs - 1);
        }
        space->expert[i] =
            expert >= 0 && expert < rows->n_experts && has_slot(call, rows, row) ? expert : -1;
    }
    return SP_OK;
}

/* count[key + 1] of each key into the begins of the keys. */
static void sum_up(int32_t *count, int32_t n)
{
    for (int32_t i = 0; i < n; i++)
        count[i + 1] += count[i];
}

static void clear(int32_t *count, int32_t n)
{
    for (int32_t i = 0; i <= n; i++)
        count[i] = 0;
}

/* Two stable sorts; returns the number of rows with work. */
static int32_t sort_window(const sp_moe_items *call, const sp_moe_rows *rows, work_space *space)
{
    int32_t n = 0;

    clear(space->count, call->n_slots);
    for (int32_t i = 0; i < call->n_rows; i++) {
        if (space->expert[i] < 0)
            continue;
        space->count[slot_of(call, rows, call->row_begin + i) + 1]++;
        n++;
    }
    sum_up(space->count, call->n_slots);
    for (int32_t i = 0; i < call->n_rows; i++)
        if (space->expert[i] >= 0)
            space->by_slot[space->count[slot_of(call, rows, call->row_begin + i)]++] = i;
    clear(space->count, rows->n_experts);
    for (int32_t i = 0; i < n; i++)
        space->count[space->expert[space->by_slot[i]] + 1]++;
    sum_up(space->count, rows->n_experts);
    for (int32_t i = 0; i < n; i++)
        call->row_order[space->count[space->expert[space->by_slot[i]]]++] =
            call->row_begin + space->by_slot[i];
    return n;
}

/* Runs of rows with one slot and expert. */
static int32_t cut_items(const sp_moe_items *call, const sp_moe_rows *rows, const work_space *space,
                         int32_t n)
{
    int32_t n_items = 0;

    for (int32_t i = 0; i < n; i++) {
        int32_t row = call->row_order[i], slot = slot_of(call, rows, row);
        int32_t expert = space->expert[row - call->row_begin];
        sp_moe_item *last = n_items > 0 ? &call->items[n_items - 1] : NULL;

        if (last != NULL && last->slot == slot && last->expert == expert &&
            last->n_rows < call->item_rows_max)
            last->n_rows++;
        else
            call->items[n_items++] =
                (sp_moe_item){.slot = slot, .expert = expert, .begin = i, .n_rows = 1};
    }
    return n_items;
}

static sp_status read_items(const sp_moe_items *from, sp_moe_items *out, sp_moe_rows *out_rows,
                            sp_error *error)
{
    sp_status status;

    *out = (sp_moe_items){.struct_bytes = sizeof *out};
    status = sp_struct_read(out, sizeof *out, from, "sp_moe_items", error);
    if (status == SP_OK)
        status = read_rows(out->rows, out_rows, error);
    if (status == SP_OK)
        status = check_form(out_rows, error);
    if (status == SP_OK && out_rows->expert_begin != NULL)
        status = sp_moe_prefix_check(out_rows->expert_begin, out_rows->n_experts, out_rows->n_rows,
                                     error);
    if (status == SP_OK)
        status = SP_NEED(error, {"token_slot", out->token_slot}, {"scratch", out->scratch},
                         {"row_order", out->row_order}, {"items", out->items});
    if (status != SP_OK)
        return status;
    if (out->n_slots < 1 || out->n_slots > SLOTS_MAX)
        return out_of_range("n_slots", out->n_slots, 1, SLOTS_MAX, error);
    if (out->item_rows_max < 1)
        return out_of_range("item_rows_max", out->item_rows_max, 1, INT32_MAX, error);
    if (out->row_begin < 0 || out->row_begin > rows_of(out_rows))
        return out_of_range("row_begin", out->row_begin, 0, rows_of(out_rows), error);
    if (out->n_rows < 0 || out->n_rows > rows_of(out_rows) - out->row_begin)
        return out_of_range("n_rows", out->n_rows, 0, rows_of(out_rows) - out->row_begin, error);
    return SP_OK;
}

sp_status sp_moe_items_build(const sp_moe_items *call, int32_t *out_n_items, sp_error *error)
{
    sp_moe_items own;
    sp_moe_rows rows;
    work_space space;
    sp_status status = read_items(call, &own, &rows, error);

    if (status == SP_OK && out_n_items == NULL)
        status = sp_fail_null(error, "out_n_items");
    if (status != SP_OK)
        return status;
    space = (work_space){own.scratch, own.scratch + own.n_rows, own.scratch + 2 * own.n_rows};
    status = find_experts(&own, &rows, &space, error);
    if (status == SP_OK)
        *out_n_items = cut_items(&own, &rows, &space, sort_window(&own, &rows, &space));
    return status;
}
