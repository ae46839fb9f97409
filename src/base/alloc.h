/*
 * alloc.h: all host allocation goes through this file, so that tests can count bytes and make the
 * n-th allocation fail, and a host can give its own functions (sidepath/allocator.h). Sizes are
 * checked: count * size never overflows. Memory is zeroed by sp_calloc only. Thread-safe.
 */
#ifndef SP_BASE_ALLOC_H
#define SP_BASE_ALLOC_H

#include "base/private.h"

#include <stddef.h>
#include <stdint.h>

/* NULL when out of memory, when bytes = 0, and sp_calloc on overflow as well. */
SP_PRIVATE void *sp_malloc(size_t bytes);
SP_PRIVATE void *sp_calloc(size_t count, size_t element_bytes); /* zeroed */
SP_PRIVATE void *sp_realloc(void *memory, size_t bytes);        /* keeps the old block on failure */
SP_PRIVATE void sp_free(void *memory);                          /* NULL is allowed */
SP_PRIVATE char *sp_strdup(const char *text);
/* The first `bytes` bytes of text and a NUL; freed by sp_free. NULL: out of memory. */
SP_PRIVATE char *sp_strndup(const char *text, size_t bytes);

/* Large aligned blocks: `align` is a power of two; MADV_HUGEPAGE above 4 MiB. Zeroed. */
SP_PRIVATE void *sp_aligned_calloc(size_t bytes, size_t align);
SP_PRIVATE void *sp_aligned_malloc(size_t bytes, size_t align); /* the same, not zeroed */
SP_PRIVATE void sp_aligned_free(void *memory);

/* Bytes and blocks now allocated. A leak test compares them before and after. */
size_t sp_alloc_bytes(void);
size_t sp_alloc_blocks(void);

/*
 * Tests only: lets `n` more allocations succeed and fails the next one, once; -1 switches it off.
 * sp_alloc_failed says whether it has fired since it was set.
 */
void sp_alloc_fail_after(int64_t n);
int sp_alloc_failed(void);

#endif
