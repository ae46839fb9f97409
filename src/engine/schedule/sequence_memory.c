#include "engine/schedule/sequence_memory.h"

#include "base/alloc.h"
#include "base/assert.h"

/* ---- set-up -------------------------------------------------------------------------------- */

sp_status sp_sequence_memory_create(const sp_sequence_memory_options *options,
                                    sp_sequence_memory *out_memory)
{
    sp_sequence_memory memory = {.options = *options};

    if (sp_pages_create(options->n_pages, &memory.pages) != SP_OK ||
        (options->prefix_cache &&
         sp_prefix_create(options->n_pages, options->page_tokens, &memory.prefix) != SP_OK)) {
        sp_sequence_memory_destroy(&memory);
        return SP_ERR_MEMORY;
    }
    *out_memory = memory;
    return SP_OK;
}

void sp_sequence_memory_destroy(sp_sequence_memory *memory)
{
    SP_ASSERT(sp_sequence_memory_available(memory) == memory->pages.n_pages);
    sp_prefix_destroy(&memory->prefix);
    sp_pages_destroy(&memory->pages);
    *memory = (sp_sequence_memory){0};
}

sp_status sp_held_memory_create(const sp_sequence_memory *memory, int32_t n_tokens_max,
                                sp_held_memory *out_held)
{
    sp_held_memory held = {.pages_max = sp_pages_for(n_tokens_max, memory->options.page_tokens)};

    held.pages = sp_calloc((size_t)held.pages_max, sizeof *held.pages);
    if (!held.pages)
        return SP_ERR_MEMORY;
    *out_held = held;
    return SP_OK;
}

void sp_held_memory_destroy(sp_held_memory *held)
{
    SP_ASSERT(held->n_pages == 0);
    sp_free(held->pages);
    *held = (sp_held_memory){0};
}

/* ---- pages --------------------------------------------------------------------------------- */

/* A page for a sequence to write into, or -1. */
static int32_t take_page(sp_sequence_memory *memory)
{
    int32_t page = sp_pages_take(&memory->pages);

    if (page >= 0)
        return page;
    page = sp_pages_evict(&memory->pages);
    if (page >= 0)
        sp_prefix_remove(&memory->prefix, page);
    return page;
}

/* From the last to the first, so that a page becomes idle before the one that it follows. */
static void give_pages_back(sp_sequence_memory *memory, sp_held_memory *held, int32_t n_kept)
{
    while (held->n_pages > n_kept)
        sp_pages_give(&memory->pages, held->pages[--held->n_pages]);
}

int32_t sp_sequence_memory_reserve(sp_sequence_memory *memory, sp_held_memory *held, int32_t n_rows)
{
    int32_t page_tokens = memory->options.page_tokens;
    int32_t n_pages = sp_pages_for(held->n_committed + n_rows, page_tokens);
    int32_t page = 0;

    SP_ASSERT(n_rows >= 0 && n_pages <= held->pages_max);
    sp_sequence_memory_rollback(memory, held);
    while (held->n_pages < n_pages && (page = take_page(memory)) >= 0)
        held->pages[held->n_pages++] = page;
    held->n_reserved = held->n_committed + n_rows;
    if (held->n_reserved > held->n_pages * page_tokens)
        held->n_reserved = held->n_pages * page_tokens;
    SP_ASSERT(held->n_reserved >= held->n_committed);
    SP_ASSERT(sp_sequence_memory_may_write(memory, held));
    return held->n_reserved - held->n_committed;
}

void sp_sequence_memory_rollback(sp_sequence_memory *memory, sp_held_memory *held)
{
    SP_ASSERT(held->n_committed <= held->n_reserved);
    give_pages_back(memory, held, sp_pages_for(held->n_committed, memory->options.page_tokens));
    held->n_reserved = held->n_committed;
}

void sp_sequence_memory_release(sp_sequence_memory *memory, sp_held_memory *held)
{
    give_pages_back(memory, held, 0);
    held->n_committed = held->n_reserved = held->n_known = 0;
    SP_ASSERT(sp_sequence_memory_is_consistent(memory));
}

/* ---- known pages --------------------------------------------------------------------------- */

static const int32_t *next_block(const sp_sequence_memory *memory, const sp_held_memory *held,
                                 const int32_t *tokens)
{
    return tokens + (size_t)held->n_known * (size_t)memory->options.page_tokens;
}

/* Advances over its next page, `page`, which has the next of its tokens and is in the table. */
static void pass_known(const sp_sequence_memory *memory, sp_held_memory *held,
                       const int32_t *tokens, int32_t page)
{
    SP_ASSERT(sp_pages_is_known(&memory->pages, page));
    held->place =
        sp_prefix_after(&memory->prefix, held->place, page, next_block(memory, held, tokens));
    held->n_known++;
}

int32_t sp_sequence_memory_resume(sp_sequence_memory *memory, sp_held_memory *held,
                                  const int32_t *tokens, int32_t n_tokens)
{
    int32_t n_blocks = n_tokens / memory->options.page_tokens;

    SP_ASSERT(held->n_pages == 0 && held->n_committed == 0 && held->n_reserved == 0);
    SP_ASSERT(n_tokens >= 0 && n_blocks <= held->pages_max);
    if (!memory->options.prefix_cache)
        return 0;
    held->place = sp_prefix_begin(&held->key);
    while (held->n_known < n_blocks) {
        int32_t page = sp_prefix_find(&memory->prefix, &held->key, held->place,
                                      next_block(memory, held, tokens));

        if (page < 0)
            break;
        sp_pages_share(&memory->pages, page);
        held->pages[held->n_pages++] = page;
        pass_known(memory, held, tokens, page);
    }
    held->n_committed = held->n_reserved = held->n_known * memory->options.page_tokens;
    memory->resumed_tokens += (uint64_t)held->n_committed;
    SP_ASSERT(sp_sequence_memory_is_consistent(memory));
    return held->n_committed;
}

/* Adds its next page, which is full, to the table, or replaces it by its equal there. */
static void remember_page(sp_sequence_memory *memory, sp_held_memory *held, const int32_t *tokens)
{
    const int32_t *block = next_block(memory, held, tokens);
    int32_t *page = &held->pages[held->n_known];
    int32_t twin;

    SP_ASSERT(sp_pages_is_private(&memory->pages, *page));
    if (held->n_known == 0)
        held->place = sp_prefix_begin(&held->key);
    twin = sp_prefix_find(&memory->prefix, &held->key, held->place, block);
    if (twin >= 0) {
        sp_pages_share(&memory->pages, twin);
        sp_pages_give(&memory->pages, *page);
        *page = twin;
    } else {
        sp_prefix_insert(&memory->prefix, &held->key, held->place, block, *page);
        sp_pages_set_known(&memory->pages, *page);
    }
    pass_known(memory, held, tokens, *page);
}

void sp_sequence_memory_commit(sp_sequence_memory *memory, sp_held_memory *held,
                               const int32_t *tokens, int32_t n_rows)
{
    SP_ASSERT(n_rows >= 0 && n_rows <= held->n_reserved - held->n_committed);
    held->n_committed += n_rows;
    sp_sequence_memory_rollback(memory, held);
    if (!memory->options.prefix_cache)
        return;
    while ((held->n_known + 1) * memory->options.page_tokens <= held->n_committed)
        remember_page(memory, held, tokens);
    SP_ASSERT(held->n_known <= held->n_pages);
}

/* ---- what there is ------------------------------------------------------------------------- */

bool sp_sequence_memory_has_room(const sp_sequence_memory *memory, int32_t n_tokens)
{
    return sp_pages_for(n_tokens, memory->options.page_tokens) <=
           sp_sequence_memory_available(memory);
}

int64_t sp_sequence_memory_capacity(const sp_sequence_memory *memory)
{
    return (int64_t)memory->pages.n_pages * memory->options.page_tokens;
}

/* The table's pages are known, and each comes after one that is held at least as often. */
static bool is_entry(const sp_sequence_memory *memory, int32_t page)
{
    const sp_pages *pages = &memory->pages;
    int32_t parent = memory->prefix.parents[page];

    return sp_prefix_has(&memory->prefix, page) &&
           (parent < 0 ||
            (sp_pages_is_known(pages, parent) && pages->holders[parent] >= pages->holders[page]));
}

bool sp_sequence_memory_is_consistent(const sp_sequence_memory *memory)
{
    const sp_pages *pages = &memory->pages;
    int32_t n_known = 0;

    if (!sp_pages_is_consistent(pages))
        return false;
    for (int32_t page = 0; page < pages->n_pages; page++) {
        if (!sp_pages_is_known(pages, page))
            continue;
        n_known++;
        if (!memory->options.prefix_cache || !is_entry(memory, page))
            return false;
    }
    return !memory->options.prefix_cache || sp_prefix_entries(&memory->prefix) == n_known;
}

bool sp_sequence_memory_may_write(const sp_sequence_memory *memory, const sp_held_memory *held)
{
    for (int32_t p = held->n_committed / memory->options.page_tokens; p < held->n_pages; p++)
        if (!sp_pages_is_private(&memory->pages, held->pages[p]))
            return false;
    return true;
}
