#include "base/alloc.h"

#include "base/error.h"
#include "base/grow.h"

#include <sidepath/allocator.h>
#include <stdbool.h>

#include <malloc.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* Above this an aligned block requests huge pages. */
#define HUGE_PAGE_BLOCK_BYTES ((size_t)4 << 20)
#define HUGE_PAGE_BYTES       ((size_t)2 << 20)
#define LAZY_BLOCK_BYTES      ((size_t)64 << 20) /* zeroed by dropping pages, see drop_pages */
#define SMALL_ALIGN           ((size_t)16)       /* malloc's alignment */

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

/* ---- the system's memory or the host's ----------------------------------------------------- */

/* Precedes each block from the host's allocator: how it was allocated, which free needs. */
typedef struct host_header {
    size_t bytes, align; /* as passed to the host's alloc */
    size_t before;       /* bytes from the start of the allocation to the block */
    size_t wanted;       /* bytes of the block */
} host_header;

static sp_host_allocator host; /* alloc is NULL: there is none */

static host_header *header_of(void *memory)
{
    return (host_header *)memory - 1;
}

static void *take_from_host(size_t bytes, size_t align)
{
    host_header header = {.wanted = bytes};
    char *whole;

    header.align = align < SMALL_ALIGN ? SMALL_ALIGN : align;
    header.before = (sizeof header + header.align - 1) / header.align * header.align;
    if (bytes > SIZE_MAX - header.before)
        return NULL;
    header.bytes = bytes + header.before;
    whole = host.alloc(host.user, header.bytes, header.align);
    if (!whole)
        return NULL;
    *header_of(whole + header.before) = header;
    return whole + header.before;
}

static size_t bytes_of(void *memory)
{
    return host.alloc ? header_of(memory)->wanted : malloc_usable_size(memory);
}

static void *take(size_t bytes, size_t align)
{
    if (host.alloc)
        return take_from_host(bytes, align);
    return align <= SMALL_ALIGN ? malloc(bytes) : aligned_alloc(align, bytes);
}

static void give_back(void *memory)
{
    host_header header;

    if (!host.alloc) {
        free(memory);
        return;
    }
    header = *header_of(memory);
    host.free(host.user, (char *)memory - header.before, header.bytes, header.align);
}

sp_status sp_host_allocator_set(const sp_host_allocator *allocator, sp_error *error)
{
    sp_host_allocator own = {.struct_bytes = sizeof own};
    size_t blocks = sp_alloc_blocks();
    sp_status status = SP_OK;

    if (allocator)
        status = sp_struct_read(&own, sizeof own, allocator, "sp_host_allocator", error);
    if (status != SP_OK)
        return status;
    if (allocator && (!own.alloc || !own.free))
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, own.alloc ? "free" : "alloc", -1,
                       "%s of the host's allocator is NULL", own.alloc ? "free" : "alloc");
    if (blocks > 0)
        return sp_fail(error, SP_ERR_STATE, NULL, "sp_host_allocator", -1,
                       "the library holds %zu blocks of memory: set the allocator before its "
                       "first use, or after everything is destroyed",
                       blocks);
    host = own;
    return SP_OK;
}

/* ---- blocks -------------------------------------------------------------------------------- */

static void *counted(void *memory)
{
    if (memory) {
        atomic_fetch_add_explicit(&allocated_bytes, bytes_of(memory), memory_order_relaxed);
        atomic_fetch_add_explicit(&allocated_blocks, 1, memory_order_relaxed);
    }
    return memory;
}

static void uncount(void *memory)
{
    atomic_fetch_sub_explicit(&allocated_bytes, bytes_of(memory), memory_order_relaxed);
    atomic_fetch_sub_explicit(&allocated_blocks, 1, memory_order_relaxed);
}

void *sp_malloc(size_t bytes)
{
    if (bytes == 0 || must_fail())
        return NULL;
    return counted(take(bytes, SMALL_ALIGN));
}

void *sp_calloc(size_t count, size_t element_bytes)
{
    void *memory;

    if (count == 0 || element_bytes == 0 || count > SIZE_MAX / element_bytes || must_fail())
        return NULL;
    if (!host.alloc)
        return counted(calloc(count, element_bytes));
    memory = counted(take_from_host(count * element_bytes, SMALL_ALIGN));
    if (memory)
        memset(memory, 0, count * element_bytes);
    return memory;
}

/* For a host without realloc: allocates a new block and copies. */
static void *grow_on_host(void *memory, size_t bytes)
{
    size_t old_bytes = bytes_of(memory);
    void *grown = counted(take_from_host(bytes, SMALL_ALIGN));

    if (!grown)
        return NULL;
    memcpy(grown, memory, old_bytes < bytes ? old_bytes : bytes);
    sp_free(memory);
    return grown;
}

void *sp_realloc(void *memory, size_t bytes)
{
    void *grown;
    size_t old_bytes;

    if (!memory)
        return sp_malloc(bytes);
    if (bytes == 0 || must_fail())
        return NULL;
    if (host.alloc)
        return grow_on_host(memory, bytes);
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
    give_back(memory);
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

/* *out_bytes is the allocated size: a multiple of the alignment. */
static void *take_aligned(size_t bytes, size_t align, size_t *out_bytes)
{
    void *memory;

    if (bytes == 0 || must_fail())
        return NULL;
    if (bytes >= HUGE_PAGE_BLOCK_BYTES && align < HUGE_PAGE_BYTES && !host.alloc)
        align = HUGE_PAGE_BYTES;
    if (bytes > SIZE_MAX - align)
        return NULL;
    bytes = (bytes + align - 1) & ~(align - 1);
    memory = counted(take(bytes, align));
    if (!memory)
        return NULL;
    if (bytes >= HUGE_PAGE_BLOCK_BYTES && !host.alloc)
        madvise(memory, bytes, MADV_HUGEPAGE); /* a hint: failing costs speed only */
    *out_bytes = bytes;
    return memory;
}

/* Dropped private pages read as zero and are allocated again when touched: a large block costs only
 * what is used of it. Some emulators accept the advice and ignore it, so the first byte is
 * checked. */
static bool drop_pages(void *memory, size_t bytes)
{
    volatile char *first = memory;

    if ((uintptr_t)memory % HUGE_PAGE_BYTES != 0 || bytes % HUGE_PAGE_BYTES != 0)
        return false;
    *first = 1;
    return madvise(memory, bytes, MADV_DONTNEED) == 0 && *first == 0;
}

void *sp_aligned_calloc(size_t bytes, size_t align)
{
    size_t taken;
    void *memory = take_aligned(bytes, align, &taken);

    if (memory && !(taken >= LAZY_BLOCK_BYTES && !host.alloc && drop_pages(memory, taken)))
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
