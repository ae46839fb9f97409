#include "chat/jinja/arena.h"

#include "base/alloc.h"

#include <stdalign.h>
#include <stdint.h>

struct sp_arena_block {
    sp_arena_block *older;
    alignas(max_align_t) char data[];
};

/* Small enough for a short conversation to need one or two, large enough for a long one not to
 * need hundreds. */
#define BLOCK_BYTES ((size_t)32 << 10)
#define ALIGN       (alignof(max_align_t))

void sp_arena_start(sp_arena *arena, size_t bytes_max)
{
    *arena = (sp_arena){.bytes_max = bytes_max};
}

/* A block for `bytes` and, when they are few, for more after them. */
static bool grow(sp_arena *arena, size_t bytes)
{
    size_t capacity = bytes > BLOCK_BYTES ? bytes : BLOCK_BYTES;
    sp_arena_block *block = sp_calloc(1, sizeof *block + capacity);

    if (!block)
        return false;
    block->older = arena->blocks;
    arena->blocks = block;
    arena->at = block->data;
    arena->left = capacity;
    return true;
}

void *sp_arena_take(sp_arena *arena, size_t count, size_t element_bytes)
{
    size_t budget = arena->bytes_max - arena->bytes, bytes;
    void *memory;

    if (element_bytes != 0 && count > budget / element_bytes) {
        arena->over = true;
        return NULL;
    }
    bytes = (count * element_bytes + ALIGN - 1) / ALIGN * ALIGN;
    if (bytes == 0)
        bytes = ALIGN;
    if (bytes > budget) {
        arena->over = true;
        return NULL;
    }
    if (bytes > arena->left && !grow(arena, bytes))
        return NULL;
    memory = arena->at;
    arena->at += bytes;
    arena->left -= bytes;
    arena->bytes += bytes;
    return memory;
}

void sp_arena_free(sp_arena *arena)
{
    while (arena->blocks) {
        sp_arena_block *older = arena->blocks->older;

        sp_free(arena->blocks);
        arena->blocks = older;
    }
    arena->at = NULL;
    arena->left = 0;
}
