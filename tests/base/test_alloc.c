/* alloc: what is counted, what fails, and that both stay right with several threads. */
#include "base/alloc.h"

#include "support/test.h"

#include <pthread.h>
#include <sidepath/allocator.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define THREADS 4
#define ROUNDS  2000

static size_t start_bytes, start_blocks;

static int remember(void **state)
{
    (void)state;
    start_bytes = sp_alloc_bytes();
    start_blocks = sp_alloc_blocks();
    return 0;
}

/* Every test gives back all that it took. */
static int compare(void **state)
{
    (void)state;
    sp_alloc_fail_after(-1);
    return sp_alloc_bytes() == start_bytes && sp_alloc_blocks() == start_blocks ? 0 : -1;
}

static void counts_blocks_and_bytes(void **state)
{
    char *a, *b;

    (void)state;
    a = sp_malloc(1000);
    assert_int_equal(sp_alloc_blocks(), start_blocks + 1);
    assert_in_range(sp_alloc_bytes(), start_bytes + 1000, start_bytes + 1100);
    b = sp_strdup("text");
    assert_string_equal(b, "text");
    assert_int_equal(sp_alloc_blocks(), start_blocks + 2);
    memset(a, 7, 1000);
    a = sp_realloc(a, 100000);
    assert_int_equal(sp_alloc_blocks(), start_blocks + 2);
    assert_in_range(sp_alloc_bytes(), start_bytes + 100005, start_bytes + 101000);
    for (size_t i = 0; i < 1000; i++)
        assert_int_equal(a[i], 7);
    sp_free(a);
    sp_free(b);
    sp_free(NULL);
}

static void nothing_is_no_block(void **state)
{
    (void)state;
    assert_null(sp_malloc(0));
    assert_null(sp_calloc(0, 8));
    assert_null(sp_calloc(8, 0));
    assert_null(sp_realloc(NULL, 0));
    assert_null(sp_aligned_calloc(0, 64));
}

static void calloc_zeroes_and_checks(void **state)
{
    /* The product of the last pair is 2^64 + 8: it must not become 8 bytes. */
    static const size_t pairs[][2] = {
        {SIZE_MAX, 2}, {2, SIZE_MAX}, {SIZE_MAX / 2 + 1, 2}, {((size_t)1 << 61) + 1, 8}};
    unsigned char *data = sp_calloc(100, 3);

    (void)state;
    for (size_t i = 0; i < 300; i++)
        assert_int_equal(data[i], 0);
    sp_free(data);
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++)
        assert_null(sp_calloc(pairs[i][0], pairs[i][1]));
}

static void strndup_copies_that_many_bytes(void **state)
{
    char *copy = sp_strndup("abcdef", 3);

    (void)state;
    assert_string_equal(copy, "abc");
    sp_free(copy);
    copy = sp_strndup("", 0);
    assert_string_equal(copy, "");
    sp_free(copy);
}

static void aligned_blocks_are_aligned_and_zero(void **state)
{
    static const size_t aligns[] = {8, 16, 64, 256, 4096, 65536};
    static const size_t sizes[] = {1, 63, 64, 1000, 70000};

    (void)state;
    for (size_t i = 0; i < sizeof aligns / sizeof *aligns; i++) {
        for (size_t j = 0; j < sizeof sizes / sizeof *sizes; j++) {
            unsigned char *block = sp_aligned_calloc(sizes[j], aligns[i]);

            assert_int_equal((uintptr_t)block % aligns[i], 0);
            for (size_t k = 0; k < sizes[j]; k++)
                assert_int_equal(block[k], 0);
            memset(block, 0xff, sizes[j]); /* so that the next one is not zero by luck */
            sp_aligned_free(block);
        }
    }
    sp_aligned_free(NULL);
}

static void large_aligned_blocks_fit_huge_pages(void **state)
{
    size_t bytes = ((size_t)4 << 20) + 12345;
    unsigned char *block = sp_aligned_calloc(bytes, 64);

    (void)state;
    assert_int_equal((uintptr_t)block % ((size_t)2 << 20), 0);
    assert_int_equal(block[0], 0);
    assert_int_equal(block[bytes - 1], 0);
    sp_aligned_free(block);
    assert_null(sp_aligned_calloc(SIZE_MAX, 64));
    assert_null(sp_aligned_calloc(SIZE_MAX - 63, 64));
}

/* Call `number` of the six that fail; the others succeed. */
static void fails_call(int number)
{
    void *blocks[6] = {0};
    void *kept = sp_malloc(10);

    memcpy(kept, "kept", 5);
    sp_alloc_fail_after(number);
    assert_false(sp_alloc_failed());
    blocks[0] = sp_malloc(10);
    blocks[1] = sp_calloc(10, 10);
    blocks[2] = sp_realloc(NULL, 10);
    blocks[3] = sp_strdup("a");
    blocks[4] = sp_aligned_calloc(10, 64);
    blocks[5] = sp_realloc(kept, 20);
    assert_int_equal(sp_alloc_failed(), number < 6);
    for (int i = 0; i < 6; i++)
        assert_int_equal(blocks[i] == NULL, i == number);
    if (!blocks[5])
        assert_string_equal(kept, "kept"); /* a failed realloc leaves the block */
    sp_free(blocks[5] ? blocks[5] : kept);
    for (int i = 0; i < 5; i++)
        sp_free(blocks[i]);
}

static void fails_the_nth_once(void **state)
{
    (void)state;
    for (int i = 0; i < 7; i++)
        fails_call(i);
    sp_alloc_fail_after(0);
    assert_null(sp_malloc(1));
    sp_alloc_fail_after(-1);
    assert_false(sp_alloc_failed());
    fails_call(6);
}

static void refused_sizes_do_not_count_as_calls(void **state)
{
    void *block;

    (void)state;
    sp_alloc_fail_after(0);
    assert_null(sp_malloc(0));
    assert_false(sp_alloc_failed());
    block = sp_malloc(1);
    assert_null(block);
    assert_true(sp_alloc_failed());
}

static void *allocate_and_free(void *argument)
{
    size_t failed = 0;
    sp_test_random random = {(uintptr_t)argument};

    for (int i = 0; i < ROUNDS; i++) {
        void *block = sp_malloc(1 + sp_test_below(&random, 500));
        void *grown = block ? sp_realloc(block, 600) : NULL;

        failed += !block || !grown;
        sp_free(grown ? grown : block);
    }
    return (void *)failed;
}

static size_t run_threads(void)
{
    pthread_t threads[THREADS];
    size_t failed = 0;

    for (size_t i = 0; i < THREADS; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, allocate_and_free, (void *)(i + 1)), 0);
    for (size_t i = 0; i < THREADS; i++) {
        void *result;

        assert_int_equal(pthread_join(threads[i], &result), 0);
        failed += (size_t)result;
    }
    return failed;
}

static void threads_count_together(void **state)
{
    (void)state;
    assert_int_equal(run_threads(), 0);
    assert_int_equal(sp_alloc_bytes(), start_bytes);
    assert_int_equal(sp_alloc_blocks(), start_blocks);
}

static void one_failure_among_all_threads(void **state)
{
    (void)state;
    sp_alloc_fail_after(ROUNDS);
    assert_int_equal(run_threads(), 1);
    assert_true(sp_alloc_failed());
}

/* ---- the host's functions ------------------------------------------------------------------ */

typedef struct host_heap {
    size_t blocks, bytes, most_align;
    int64_t left; /* allocations before one fails */
} host_heap;

static void *heap_alloc(void *user, size_t bytes, size_t align_bytes)
{
    host_heap *heap = user;
    void *memory;

    if (heap->left-- <= 0)
        return NULL;
    memory = aligned_alloc(align_bytes, (bytes + align_bytes - 1) / align_bytes * align_bytes);
    assert_non_null(memory);
    memset(memory, 0xa5, bytes);
    heap->blocks++;
    heap->bytes += bytes + align_bytes;
    heap->most_align = align_bytes > heap->most_align ? align_bytes : heap->most_align;
    return memory;
}

static void heap_free(void *user, void *memory, size_t bytes, size_t align_bytes)
{
    host_heap *heap = user;

    heap->blocks--;
    heap->bytes -= bytes + align_bytes;
    memset(memory, 0x5a, bytes);
    free(memory);
}

static void the_hosts_functions_serve_every_call(void **state)
{
    static const char zeroes[5000];
    host_heap heap = {.left = 100};
    const sp_host_allocator host = {sizeof host, &heap, heap_alloc, heap_free};
    sp_error error;
    char *a, *b, *c;

    (void)state;
    assert_int_equal(sp_host_allocator_set(&host, &error), SP_OK);
    a = sp_malloc(3);
    b = sp_calloc(50, 100);
    c = sp_aligned_calloc(5000, 4096);
    assert_true(a != NULL && b != NULL && c != NULL);
    assert_memory_equal(b, zeroes, 5000);
    assert_memory_equal(c, zeroes, 5000);
    assert_int_equal((uintptr_t)a % 16 + (uintptr_t)b % 16 + (uintptr_t)c % 4096, 0);
    assert_int_equal(heap.blocks, 3);
    assert_int_equal(heap.most_align, 4096);
    memcpy(a, "abc", 3);
    a = sp_realloc(a, 7777);
    assert_memory_equal(a, "abc", 3);
    a = sp_realloc(a, 2);
    assert_memory_equal(a, "ab", 2);
    assert_int_equal(heap.blocks, 3);
    assert_int_equal(sp_alloc_blocks(), start_blocks + 3);
    assert_int_equal(sp_host_allocator_set(NULL, &error), SP_ERR_STATE);
    assert_non_null(strstr(error.text, "3 blocks"));
    heap.left = 0;
    assert_null(sp_realloc(a, 100));
    assert_null(sp_malloc(1));
    assert_memory_equal(a, "ab", 2);
    sp_free(a);
    sp_free(b);
    sp_aligned_free(c);
    assert_int_equal(heap.blocks, 0);
    assert_int_equal(heap.bytes, 0);
    assert_int_equal(sp_host_allocator_set(NULL, &error), SP_OK);
    a = sp_malloc(1);
    assert_non_null(a);
    assert_int_equal(heap.blocks, 0);
    sp_free(a);
}

static void an_allocator_without_a_function_is_refused(void **state)
{
    host_heap heap = {.left = 100};
    sp_host_allocator host = {sizeof host, &heap, heap_alloc, NULL};
    sp_error error;

    (void)state;
    assert_int_equal(sp_host_allocator_set(&host, &error), SP_ERR_ARGUMENT);
    assert_string_equal(error.subject, "free");
    host.free = heap_free;
    host.alloc = NULL;
    assert_int_equal(sp_host_allocator_set(&host, &error), SP_ERR_ARGUMENT);
    assert_string_equal(error.subject, "alloc");
    host.struct_bytes = 0;
    assert_int_equal(sp_host_allocator_set(&host, &error), SP_ERR_ARGUMENT);
    assert_string_equal(error.subject, "sp_host_allocator");
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, remember, compare)

/* Pages in memory by the kernel's own count. */
static long resident_pages(void)
{
    FILE *file = fopen("/proc/self/statm", "r");
    long size, resident;

    assert_non_null(file);
    assert_int_equal(fscanf(file, "%ld %ld", &size, &resident), 2);
    fclose(file);
    return resident;
}

/* 256 MiB: what was written into the block before does not show, and none of it is in memory. */
static void a_large_block_is_zero_and_costs_what_is_used(void **state)
{
    size_t bytes = (size_t)256 << 20;
    long before, grown;
    char *block;

    (void)state;
    for (int round = 0; round < 2; round++) {
        before = resident_pages();
        block = sp_aligned_calloc(bytes, 64);
        assert_non_null(block);
        grown = resident_pages() - before;
        assert_true(grown * sysconf(_SC_PAGESIZE) < (long)bytes / 4);
        for (size_t at = 0; at < bytes; at += (size_t)1 << 20)
            assert_int_equal(block[at], 0);
        assert_int_equal(block[bytes - 1], 0);
        block[bytes / 2] = 1;
        sp_aligned_free(block);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_large_block_is_zero_and_costs_what_is_used),
        TEST(counts_blocks_and_bytes),
        TEST(nothing_is_no_block),
        TEST(the_hosts_functions_serve_every_call),
        TEST(an_allocator_without_a_function_is_refused),
        TEST(calloc_zeroes_and_checks),
        TEST(strndup_copies_that_many_bytes),
        TEST(aligned_blocks_are_aligned_and_zero),
        TEST(large_aligned_blocks_fit_huge_pages),
        TEST(fails_the_nth_once),
        TEST(refused_sizes_do_not_count_as_calls),
        TEST(threads_count_together),
        TEST(one_failure_among_all_threads),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
