/*
 * The merge loop. The pair of lowest rank is merged first, the leftmost of equal ones; a heap of
 * (rank, position) finds it, so that a piece of a megabyte is no slower per byte than a word. An
 * entry whose symbols have changed since it was pushed is recognised by its rank and dropped.
 */
#include "base/alloc.h"
#include "base/error.h"
#include "engine/tokenizer/tokenizer_parts.h"
#include "engine/tokenizer/unicode_class.h"

#include <string.h>

/* --- The table of merges ----------------------------------------------------------------- */

static uint64_t cell_of(const sp_merge_table *table, uint64_t pair)
{
    uint64_t hash = pair * UINT64_C(0x9e3779b97f4a7c15);

    return (hash ^ hash >> 32) & table->mask;
}

sp_status sp_merge_table_create(size_t n_merges, sp_merge_table *out_table, sp_error *error)
{
    size_t n_cells = 16;

    while (n_cells / 2 < n_merges)
        n_cells *= 2;
    out_table->cells = sp_malloc(n_cells * sizeof *out_table->cells);
    if (!out_table->cells)
        return sp_fail_memory(error, n_cells * sizeof *out_table->cells, "the merges");
    out_table->mask = n_cells - 1;
    for (size_t i = 0; i < n_cells; i++)
        out_table->cells[i].pair = SP_MERGE_EMPTY;
    return SP_OK;
}

void sp_merge_table_free(sp_merge_table *table)
{
    sp_free(table->cells);
    table->cells = NULL;
}

static sp_merge *find_cell(const sp_merge_table *table, uint64_t pair)
{
    uint64_t i = cell_of(table, pair);

    while (table->cells[i].pair != pair && table->cells[i].pair != SP_MERGE_EMPTY)
        i = (i + 1) & table->mask;
    return &table->cells[i];
}

bool sp_merge_table_add(sp_merge_table *table, int32_t left, int32_t right, uint32_t rank,
                        int32_t id)
{
    uint64_t pair = (uint64_t)left << 32 | (uint32_t)right;
    sp_merge *cell = find_cell(table, pair);

    if (cell->pair == pair)
        return false;
    *cell = (sp_merge){pair, rank, id};
    return true;
}

const sp_merge *sp_merge_table_find(const sp_merge_table *table, int32_t left, int32_t right)
{
    uint64_t pair = (uint64_t)left << 32 | (uint32_t)right;
    const sp_merge *cell = find_cell(table, pair);

    return cell->pair == pair ? cell : NULL;
}

/* --- Lists ------------------------------------------------------------------------------- */

sp_status sp_id_list_add(sp_id_list *list, int32_t id, sp_error *error)
{
    if (list->n == list->capacity) {
        size_t capacity = list->capacity ? list->capacity * 2 : 64;
        int32_t *ids = sp_realloc(list->ids, capacity * sizeof *ids);

        if (!ids)
            return sp_fail_memory(error, capacity * sizeof *ids, "token ids");
        list->ids = ids;
        list->capacity = capacity;
    }
    list->ids[list->n++] = id;
    return SP_OK;
}

void sp_merge_scratch_free(sp_merge_scratch *scratch)
{
    sp_free(scratch->heap);
    *scratch = (sp_merge_scratch){0};
}

/* One block holds all four arrays, the widest first. */
static sp_status scratch_reserve(sp_merge_scratch *scratch, size_t n, sp_error *error)
{
    size_t capacity = scratch->capacity ? scratch->capacity : 64;
    size_t bytes;
    uint64_t *block;

    if (n <= scratch->capacity)
        return SP_OK;
    while (capacity < n)
        capacity *= 2;
    bytes = capacity * (2 * sizeof(uint64_t) + 3 * sizeof(int32_t));
    block = sp_malloc(bytes);
    if (!block)
        return sp_fail_memory(error, bytes, "merging a piece of text");
    sp_merge_scratch_free(scratch);
    scratch->heap = block;
    scratch->id = (int32_t *)(block + 2 * capacity);
    scratch->next = scratch->id + capacity;
    scratch->previous = scratch->next + capacity;
    scratch->capacity = capacity;
    return SP_OK;
}

/* --- The loop ---------------------------------------------------------------------------- */

/*
 * A heap entry is rank << 32 | position of the left symbol, so the smallest number is the next
 * merge. It never holds more than 2n: n - 1 at first, and each of n - 1 merges takes one and adds
 * at most two.
 */
static void heap_push(uint64_t *heap, size_t *n, uint64_t entry)
{
    size_t i = (*n)++;

    while (i > 0 && heap[(i - 1) / 2] > entry) {
        heap[i] = heap[(i - 1) / 2];
        i = (i - 1) / 2;
    }
    heap[i] = entry;
}

static uint64_t heap_pop(uint64_t *heap, size_t *n)
{
    uint64_t top = heap[0], last = heap[--*n];
    size_t i = 0;

    for (;;) {
        size_t child = 2 * i + 1;

        if (child >= *n)
            break;
        if (child + 1 < *n && heap[child + 1] < heap[child])
            child++;
        if (heap[child] >= last)
            break;
        heap[i] = heap[child];
        i = child;
    }
    heap[i] = last;
    return top;
}

/* The merge of the symbol at `at` with the one after it, or NULL. -1 ends the list; a symbol that
 * was merged into another has the id -1. */
static const sp_merge *merge_at(const sp_tokenizer *tokenizer, const sp_merge_scratch *scratch,
                                int32_t at)
{
    if (at < 0 || scratch->id[at] < 0 || scratch->next[at] < 0)
        return NULL;
    return sp_merge_table_find(&tokenizer->merges, scratch->id[at], scratch->id[scratch->next[at]]);
}

static void push_at(const sp_tokenizer *tokenizer, sp_merge_scratch *scratch, size_t *n_heap,
                    int32_t at)
{
    const sp_merge *merge = merge_at(tokenizer, scratch, at);

    if (merge)
        heap_push(scratch->heap, n_heap, (uint64_t)merge->rank << 32 | (uint32_t)at);
}

/* Merges the symbol at `at` with the one after it. */
static void join(sp_merge_scratch *scratch, int32_t at, int32_t id)
{
    int32_t gone = scratch->next[at];
    int32_t after = scratch->next[gone];

    scratch->id[at] = id;
    scratch->id[gone] = -1;
    scratch->next[at] = after;
    if (after >= 0)
        scratch->previous[after] = at;
}

/* Appends a symbol to the n that are there. */
static void add_symbol(sp_merge_scratch *scratch, size_t n, int32_t id)
{
    scratch->id[n] = id;
    scratch->next[n] = (int32_t)n + 1;
    scratch->previous[n] = (int32_t)n - 1;
}

/* A symbol for each byte that has a token; returns their number. */
static size_t start_bytes(const sp_tokenizer *tokenizer, const char *piece, size_t bytes,
                          sp_merge_scratch *scratch)
{
    size_t n = 0;

    for (size_t i = 0; i < bytes; i++) {
        int32_t id = tokenizer->byte_id[(unsigned char)piece[i]];

        if (id >= 0)
            add_symbol(scratch, n++, id);
    }
    return n;
}

/* A symbol for each character, or for each of its bytes where it has no token. */
static size_t start_characters(const sp_tokenizer *tokenizer, const char *piece, size_t bytes,
                               sp_merge_scratch *scratch)
{
    size_t n = 0;
    uint32_t code;

    for (size_t at = 0; at < bytes;) {
        size_t length = sp_utf8_read((const unsigned char *)piece + at, &code);
        int32_t id = sp_piece_table_find(tokenizer, piece + at, length);

        if (id >= 0)
            add_symbol(scratch, n++, id);
        else
            for (size_t i = 0; i < length; i++)
                add_symbol(scratch, n++, tokenizer->byte_id[(unsigned char)piece[at + i]]);
        at += length;
    }
    return n;
}

sp_status sp_merge_piece(const sp_tokenizer *tokenizer, const char *piece, size_t bytes,
                         sp_merge_scratch *scratch, sp_id_list *list, sp_error *error)
{
    size_t n_heap = 0, n;
    sp_status status = scratch_reserve(scratch, bytes, error);

    if (status != SP_OK)
        return status;
    n = tokenizer->metaspace ? start_characters(tokenizer, piece, bytes, scratch)
                             : start_bytes(tokenizer, piece, bytes, scratch);
    if (n == 0)
        return SP_OK;
    scratch->next[n - 1] = -1;
    for (size_t i = 0; i + 1 < n; i++)
        push_at(tokenizer, scratch, &n_heap, (int32_t)i);
    while (n_heap > 0) {
        uint64_t entry = heap_pop(scratch->heap, &n_heap);
        int32_t at = (int32_t)(entry & 0xffffffffu);
        const sp_merge *merge = merge_at(tokenizer, scratch, at);

        if (!merge || merge->rank != entry >> 32)
            continue;
        join(scratch, at, merge->id);
        push_at(tokenizer, scratch, &n_heap, scratch->previous[at]);
        push_at(tokenizer, scratch, &n_heap, at);
    }
    for (int32_t i = 0; i >= 0 && status == SP_OK; i = scratch->next[i])
        status = sp_id_list_add(list, scratch->id[i], error);
    return status;
}
