/* grow: structs of other sizes than today's, read and written at the end of a page. */
#include "base/grow.h"

#include "support/test.h"

#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef struct now {
    size_t struct_bytes;
    int32_t first, second;
    int64_t third;
} now;

static const now defaults = {sizeof(now), 11, 22, 33};

/* The last `bytes` bytes before a page that nothing may touch. */
static void *end_of_page(size_t bytes)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    char *pages = mmap(NULL, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    assert_true(pages != MAP_FAILED);
    assert_int_equal(mprotect(pages + page, page, PROT_NONE), 0);
    return pages + page - bytes;
}

static void a_shorter_struct_gets_the_defaults(void **state)
{
    char *host = end_of_page(12);
    size_t bytes = 12;
    int32_t first = 5;
    now own = defaults;

    (void)state;
    memcpy(host, &bytes, sizeof bytes);
    memcpy(host + 8, &first, sizeof first);
    assert_int_equal(sp_struct_read(&own, sizeof own, host, "now", NULL), SP_OK);
    assert_int_equal(own.struct_bytes, sizeof own);
    assert_int_equal(own.first, 5);
    assert_int_equal(own.second, 22);
    assert_int_equal(own.third, 33);
}

static void a_longer_struct_must_end_in_zeroes(void **state)
{
    struct {
        now known;
        unsigned char more[8];
    } host = {{sizeof host, 1, 2, 3}, {0}};
    now own = defaults;
    sp_error error;

    (void)state;
    assert_int_equal(sp_struct_read(&own, sizeof own, &host, "now", &error), SP_OK);
    assert_int_equal(own.third, 3);
    own = defaults;
    host.more[5] = 1;
    assert_int_equal(sp_struct_read(&own, sizeof own, &host, "now", &error), SP_ERR_UNSUPPORTED);
    assert_int_equal(error.position, sizeof(now) + 5);
    assert_string_equal(error.subject, "now");
    assert_memory_equal(&own, &defaults, sizeof own);
}

static void a_size_nobody_set_is_refused(void **state)
{
    static const size_t wrong[] = {0, 1, 7, SP_STRUCT_BYTES_MAX + 1, SIZE_MAX};
    now own = defaults, host = defaults;
    sp_error error;

    (void)state;
    assert_int_equal(sp_struct_read(&own, sizeof own, NULL, "now", &error), SP_ERR_ARGUMENT);
    assert_int_equal(sp_struct_write(NULL, &own, sizeof own, "now", &error), SP_ERR_ARGUMENT);
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        host.struct_bytes = wrong[i];
        assert_int_equal(sp_struct_read(&own, sizeof own, &host, "now", &error), SP_ERR_ARGUMENT);
        assert_int_equal(sp_struct_write(&host, &own, sizeof own, "now", &error), SP_ERR_ARGUMENT);
        assert_int_equal(host.struct_bytes, wrong[i]);
        assert_int_equal(host.first, 11);
    }
}

static void no_more_is_written_than_there_is_room(void **state)
{
    static const unsigned char zeroes[8];
    struct {
        now known;
        unsigned char more[8];
    } longer = {{sizeof longer, 0, 0, 0}, {1, 1, 1, 1, 1, 1, 1, 1}};
    char *host = end_of_page(12);
    size_t bytes = 12;

    (void)state;
    memcpy(host, &bytes, sizeof bytes);
    assert_int_equal(sp_struct_write(host, &defaults, sizeof defaults, "now", NULL), SP_OK);
    assert_memory_equal(host, &bytes, sizeof bytes);
    assert_memory_equal(host + 8, &defaults.first, 4);
    assert_int_equal(sp_struct_write(&longer, &defaults, sizeof defaults, "now", NULL), SP_OK);
    assert_int_equal(longer.known.struct_bytes, sizeof longer);
    assert_int_equal(longer.known.third, 33);
    assert_memory_equal(longer.more, zeroes, sizeof zeroes);
}

static void defaults_fit_every_size(void **state)
{
    char *host = end_of_page(20);
    size_t bytes = 20;

    (void)state;
    memset(host, 0x55, 20);
    sp_struct_default(host, 20, &defaults, sizeof defaults);
    assert_memory_equal(host, &bytes, sizeof bytes);
    assert_memory_equal(host + 8, &defaults.first, 12);
    sp_struct_default(NULL, 20, &defaults, sizeof defaults);
    sp_struct_default(host, 3, &defaults, sizeof defaults);
    assert_memory_equal(host, &bytes, sizeof bytes);
}

static void elements_are_as_far_apart_as_the_first_says(void **state)
{
    struct {
        size_t struct_bytes;
        int32_t first, second;
    } hosts[3] = {{sizeof *hosts, 1, 2}, {sizeof *hosts, 3, 4}, {sizeof *hosts, 5, 6}};
    now own = defaults;
    sp_error error;

    (void)state;
    assert_int_equal(sp_struct_read_at(&own, sizeof own, hosts, 2, "now", &error), SP_OK);
    assert_int_equal(own.first, 5);
    assert_int_equal(own.second, 6);
    assert_int_equal(own.third, 33);
    hosts[1].struct_bytes--;
    assert_int_equal(sp_struct_read_at(&own, sizeof own, hosts, 1, "now", &error), SP_ERR_ARGUMENT);
    assert_int_equal(error.position, 1);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_shorter_struct_gets_the_defaults),
        cmocka_unit_test(a_longer_struct_must_end_in_zeroes),
        cmocka_unit_test(a_size_nobody_set_is_refused),
        cmocka_unit_test(no_more_is_written_than_there_is_room),
        cmocka_unit_test(defaults_fit_every_size),
        cmocka_unit_test(elements_are_as_far_apart_as_the_first_says),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
