/*
 * arena.h: memory that is freed all at once: a parsed template, or one rendering. A budget bounds
 * it, because it runs untrusted templates.
 */
#ifndef SP_CHAT_JINJA_ARENA_H
#define SP_CHAT_JINJA_ARENA_H

#include <stdbool.h>
#include <stddef.h>

typedef struct sp_arena_block sp_arena_block;

typedef struct sp_arena {
    sp_arena_block *blocks;
    char *at; /* the free rest of the newest block */
    size_t left;
    size_t bytes, bytes_max; /* handed out so far, and the budget */
    bool over;               /* the budget is what was missing, not memory */
} sp_arena;

void sp_arena_start(sp_arena *arena, size_t bytes_max);
/* Zeroed, aligned for any scalar. NULL: over the budget, or out of memory. */
void *sp_arena_take(sp_arena *arena, size_t count, size_t element_bytes);
/* Frees everything at once. A zeroed arena is allowed. */
void sp_arena_free(sp_arena *arena);

#endif
