#include "base/alloc.h"

#include <malloc.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* Above this an aligned block asks for huge pages. */
#define HUGE_PAGE_BLOCK_BYTES ((size_t)4 << 20)
#define HUGE_PAGE_BYTES       ((size_t)2 << 20)

static atomic_size_t allocated_bytes;
static atomic_size_t allocated_blocks;
static atomic_llong fail_countdown = -1;
static atomic_int fail_fired;

/* Counts one allocation against the test's limit; true when this one must fail. */
static int must_fail(void)
{
    long long left = atomic_load_explicit(&fail_countdown, memory_order_relaxed);

    if (left < 0)
        return 0;
    left = atomic_fetch_sub(&fail_countdown, 1);
    if (left != 0)
        return 0;
    atomic_store(&fail_fired, 1);
    return 1;
}

static void *counted(void *memory)
{
    if (memory) {
        atomic_fetch_add_explicit(&allocated_bytes, malloc_usable_size(memory),
                                  memory_order_relaxed);
        atomic_fetch_add_explicit(&allocated_blocks, 1, memory_order_relaxed);
    }
    return memory;
}

static void uncount(void *memory)
{
    atomic_fetch_sub_explicit(&allocated_bytes, malloc_usable_size(memory), memory_order_relaxed);
    atomic_fetch_sub_explicit(&allocated_blocks, 1, memory_order_relaxed);
}

void *sp_malloc(size_t bytes)
{
    if (bytes == 0 || must_fail())
        return NULL;
    return counted(malloc(bytes));
}

void *sp_calloc(size_t count, size_t element_bytes)
{
    if (count == 0 || element_bytes == 0 || count > SIZE_MAX / element_bytes || must_fail())
        return NULL;
    return counted(calloc(count, element_bytes));
}

void *sp_realloc(void *memory, size_t bytes)
{
    void *grown;
    size_t old_bytes;

    if (!memory)
        return sp_malloc(bytes);
    if (bytes == 0 || must_fail())
        return NULL;
    old_bytes = malloc_usable_size(memory);
    grown = realloc(memory, bytes);
    if (!grown)
        return NULL;
    atomic_fetch_sub_explicit(&allocated_bytes, old_bytes, memory_order_relaxed);
    atomic_fetch_add_explicit(&allocated_bytes, malloc_usable_size(grown), memory_order_relaxed);
    return grown;
}

void sp_free(void *memory)
{
    if (!memory)
        return;
    uncount(memory);
    free(memory);
}

char *sp_strdup(const char *text)
{
    return sp_strndup(text, strlen(text));
}

char *sp_strndup(const char *text, size_t bytes)
{
    char *copy = sp_malloc(bytes + 1);

    if (!copy)
        return NULL;
    memcpy(copy, text, bytes);
    copy[bytes] = '\0';
    return copy;
}

/* *out_bytes is what was taken: whole units of the alignment. */
static void *take_aligned(size_t bytes, size_t align, size_t *out_bytes)
{
    void *memory;

    if (bytes == 0 || must_fail())
        return NULL;
    if (bytes >= HUGE_PAGE_BLOCK_BYTES && align < HUGE_PAGE_BYTES)
        align = HUGE_PAGE_BYTES;
    if (bytes > SIZE_MAX - align)
        return NULL;
    bytes = (bytes + align - 1) & ~(align - 1);
    memory = counted(aligned_alloc(align, bytes));
    if (!memory)
        return NULL;
    if (bytes >= HUGE_PAGE_BLOCK_BYTES)
        madvise(memory, bytes, MADV_HUGEPAGE); /* a hint: failing costs speed only */
    *out_bytes = bytes;
    return memory;
}

void *sp_aligned_calloc(size_t bytes, size_t align)
{
    size_t taken;
    void *memory = take_aligned(bytes, align, &taken);

    if (memory)
        memset(memory, 0, taken);
    return memory;
}

void *sp_aligned_malloc(size_t bytes, size_t align)
{
    size_t taken;

    return take_aligned(bytes, align, &taken);
}

void sp_aligned_free(void *memory)
{
    sp_free(memory);
}

size_t sp_alloc_bytes(void)
{
    return atomic_load(&allocated_bytes);
}

size_t sp_alloc_blocks(void)
{
    return atomic_load(&allocated_blocks);
}

void sp_alloc_fail_after(int64_t n)
{
    atomic_store(&fail_fired, 0);
    atomic_store(&fail_countdown, n < 0 ? -1 : n);
}

int sp_alloc_failed(void)
{
    return atomic_load(&fail_fired);
}
