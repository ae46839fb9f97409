#include "engine/pages.h"

#include "base/alloc.h"

sp_status sp_pages_create(int32_t n_pages, sp_pages *out_pages)
{
    int32_t *free_pages = sp_calloc((size_t)n_pages, sizeof *free_pages);

    if (!free_pages)
        return SP_ERR_MEMORY;
    for (int32_t i = 0; i < n_pages; i++)
        free_pages[i] = n_pages - 1 - i;
    *out_pages = (sp_pages){.free_pages = free_pages, .n_free = n_pages, .n_pages = n_pages};
    return SP_OK;
}

void sp_pages_destroy(sp_pages *pages)
{
    sp_free(pages->free_pages);
    *pages = (sp_pages){0};
}

int32_t sp_pages_take(sp_pages *pages)
{
    int32_t used;

    if (pages->n_free == 0)
        return -1;
    pages->n_free--;
    used = pages->n_pages - pages->n_free;
    if (used > pages->used_max)
        pages->used_max = used;
    return pages->free_pages[pages->n_free];
}

void sp_pages_give(sp_pages *pages, int32_t page)
{
    pages->free_pages[pages->n_free++] = page;
}
