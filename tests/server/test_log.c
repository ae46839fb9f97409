/* The log: lines in order, a reader that does not read, one that comes back, one that is gone. */
#include "support/test.h"

#include "base/clock.h"
#include "server/metrics/log.h"

#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <unistd.h>

#define LINE       "0123456789abcdef0123456789abcde\n" /* 32 bytes */
#define LINE_BYTES 32
#define PIPE_BYTES 65536 /* what a pipe holds, on Linux */

static void open_pipe(int *out_fds)
{
    assert_int_equal(pipe2(out_fds, O_CLOEXEC), 0);
    assert_int_equal(fcntl(out_fds[0], F_SETPIPE_SZ, PIPE_BYTES), PIPE_BYTES);
}

/* All that comes until the writing side is closed. */
static size_t read_all(int fd, char *out_data, size_t bytes)
{
    size_t n = 0;
    ssize_t part;

    while (n < bytes && (part = read(fd, out_data + n, bytes - n)) > 0)
        n += (size_t)part;
    return n;
}

static void test_lines_come_in_order(void **state)
{
    static const char want[] = "one\ntwo\nnumber 3 of x\n";
    char got[64];
    sp_error error;
    sp_log *log;
    int fds[2];

    (void)state;
    open_pipe(fds);
    assert_ok(sp_log_open(fds[1], 1000, &log, &error), &error);
    sp_log_add(log, "one\ntwo\n", 8);
    sp_log_line(log, "number %d of %s", 3, "x");
    sp_log_add(NULL, "three\n", 6);
    sp_log_line(NULL, "four");
    assert_int_equal(sp_log_dropped(log), 0);
    assert_int_equal(sp_log_dropped(NULL), 0);
    sp_log_close(log, 10000);
    sp_log_close(NULL, 10000);
    close(fds[1]);
    assert_int_equal(read_all(fds[0], got, sizeof got), sizeof want - 1);
    assert_memory_equal(got, want, sizeof want - 1);
    close(fds[0]);
}

/* A line becomes the message of an object; the log's own prefix, quotes and bytes that are not
 * UTF-8 do not get into it as they are. */
static void test_json(void **state)
{
    static const char *const want[] = {"\", \"message\": \"say \\\"hi\\\"\"}\n{\"time\": \"20",
                                       "\"message\": \"bad \xef\xbf\xbd byte\"}\n{\"own\": 1}\n"};
    char got[512];
    size_t n;
    sp_error error;
    sp_log *log;
    int fds[2];

    (void)state;
    open_pipe(fds);
    assert_ok(sp_log_open(fds[1], 1000, &log, &error), &error);
    assert_false(sp_log_is_json(log));
    assert_false(sp_log_is_json(NULL));
    sp_log_use_json(log);
    assert_true(sp_log_is_json(log));
    sp_log_line(log, SP_LOG_PREFIX "say \"%s\"", "hi");
    sp_log_line(log, "bad \xff byte");
    sp_log_add(log, "{\"own\": 1}\n", 11);
    sp_log_close(log, 10000);
    close(fds[1]);
    n = read_all(fds[0], got, sizeof got - 1);
    got[n] = '\0';
    assert_memory_equal(got, "{\"time\": \"20", 12);
    assert_non_null(strstr(got, want[0]));
    assert_non_null(strstr(got, want[1]));
    close(fds[0]);
}

/* A pipe that takes no more. Returns the lines that it holds. */
static uint64_t open_full_pipe(int *out_fds)
{
    uint64_t n = 0;

    open_pipe(out_fds);
    assert_int_equal(fcntl(out_fds[1], F_SETFL, O_NONBLOCK), 0);
    while (write(out_fds[1], LINE, LINE_BYTES) == LINE_BYTES)
        n++;
    assert_int_equal(fcntl(out_fds[1], F_SETFL, 0), 0);
    return n;
}

/* Until the buffer is full, and what the writer has taken besides. Returns the lines. */
static uint64_t fill(sp_log *log)
{
    uint64_t n = 0;

    while (sp_log_dropped(log) < 10 && n < 1000000) {
        sp_log_add(log, LINE, LINE_BYTES);
        n++;
    }
    return n;
}

static void test_a_reader_that_does_not_read(void **state)
{
    static char got[2 * PIPE_BYTES];
    uint64_t began = sp_clock_ns(), n, n_before, n_kept;
    size_t bytes, n_lines = 0;
    sp_error error;
    sp_log *log;
    int fds[2];

    (void)state;
    n_before = open_full_pipe(fds);
    assert_ok(sp_log_open(fds[1], 4096, &log, &error), &error);
    n = fill(log);
    assert_true(n < 1000000);
    assert_true(sp_clock_ns() - began < 10000000000u);
    assert_int_equal(sp_log_dropped(log), 10);
    n_kept = n_before + n - 10;
    /* It reads again: what was kept comes whole, then the number of those that were not. */
    bytes = (size_t)read(fds[0], got, 4 * LINE_BYTES);
    while (bytes < n_kept * LINE_BYTES)
        bytes += (size_t)read(fds[0], got + bytes, sizeof got - bytes);
    sp_log_close(log, 10000);
    close(fds[1]);
    bytes += read_all(fds[0], got + bytes, sizeof got - bytes);
    close(fds[0]);
    while ((n_lines + 1) * LINE_BYTES <= bytes &&
           memcmp(got + n_lines * LINE_BYTES, LINE, LINE_BYTES) == 0)
        n_lines++;
    assert_int_equal(n_lines, n_kept);
    got[bytes] = '\0';
    assert_non_null(strstr(got + n_lines * LINE_BYTES, "10 lines of this log were dropped"));
}

/* Closing waits as long as it was told to; then what is stuck is left behind. */
static void test_closing_does_not_wait_for_ever(void **state)
{
    uint64_t began;
    sp_error error;
    sp_log *log;
    int fds[2];

    (void)state;
    open_full_pipe(fds);
    assert_ok(sp_log_open(fds[1], 4096, &log, &error), &error);
    fill(log);
    began = sp_clock_ns();
    sp_log_close(log, 50);
    assert_true(sp_clock_ns() - began >= 50000000u);
    assert_true(sp_clock_ns() - began < 5000000000u);
    close(fds[0]);  /* the writer's poll and write fail, and it frees the log */
    usleep(100000); /* its side of the pipe is left to it */
}

static void test_a_reader_that_is_gone(void **state)
{
    sp_error error;
    sp_log *log;
    int fds[2];

    (void)state;
    signal(SIGPIPE, SIG_IGN);
    open_pipe(fds);
    close(fds[0]);
    assert_ok(sp_log_open(fds[1], 4096, &log, &error), &error);
    sp_log_add(log, LINE LINE, 2 * LINE_BYTES);
    for (int i = 0; i < 1000 && sp_log_dropped(log) < 2; i++)
        usleep(10000);
    assert_int_equal(sp_log_dropped(log), 2);
    sp_log_close(log, 10000);
    close(fds[1]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_lines_come_in_order),
        cmocka_unit_test(test_json),
        cmocka_unit_test(test_a_reader_that_does_not_read),
        cmocka_unit_test(test_a_reader_that_is_gone),
        cmocka_unit_test(test_closing_does_not_wait_for_ever),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
