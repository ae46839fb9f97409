/*
 * assert: a live assertion that does not hold says which one it is and aborts; one that holds, or
 * one of a build without assertions, does nothing.
 */
#include "base/assert.h"

#include "support/test.h"

#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

static int evaluated;

static bool holds(bool value)
{
    evaluated++;
    return value;
}

/* The child of a failing assertion: what it printed goes to `text`, its wait status is returned. */
static int failing_child(char *text, size_t text_bytes)
{
    int pipe_fds[2];
    size_t n = 0;
    ssize_t got;
    int status;
    pid_t child;

    assert_int_equal(pipe(pipe_fds), 0);
    fflush(NULL);
    child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        setrlimit(RLIMIT_CORE, &(struct rlimit){0, 0});
        signal(SIGABRT, SIG_DFL);
        dup2(pipe_fds[1], STDERR_FILENO);
        SP_ASSERT_CHECKED(holds(1 + 1 == 3));
        _exit(0);
    }
    close(pipe_fds[1]);
    while (n + 1 < text_bytes && (got = read(pipe_fds[0], text + n, text_bytes - 1 - n)) > 0)
        n += (size_t)got;
    text[n] = 0;
    close(pipe_fds[0]);
    assert_int_equal(waitpid(child, &status, 0), child);
    return status;
}

static void a_live_assertion_that_fails_aborts_by_name(void **state)
{
    char text[1024];
    int status = failing_child(text, sizeof text);

    (void)state;
    assert_true(WIFSIGNALED(status));
    assert_int_equal(WTERMSIG(status), SIGABRT);
    assert_non_null(
        strstr(text, "test_assert.c:42: failing_child: holds(1 + 1 == 3) does not hold"));
}

static void a_live_assertion_that_holds_is_evaluated_once(void **state)
{
    (void)state;
    evaluated = 0;
    SP_ASSERT_CHECKED(holds(true));
    assert_int_equal(evaluated, 1);
}

static void an_assertion_that_is_not_live_is_not_evaluated(void **state)
{
    (void)state;
    evaluated = 0;
    SP_ASSERT_UNCHECKED(holds(false));
    assert_int_equal(evaluated, 0);
}

static void sanitizers_and_debug_builds_have_them_live(void **state)
{
    (void)state;
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    assert_true(SP_ASSERT_LIVE);
#endif
    evaluated = 0;
    SP_ASSERT(holds(true));
    assert_int_equal(evaluated, SP_ASSERT_LIVE);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_live_assertion_that_fails_aborts_by_name),
        cmocka_unit_test(a_live_assertion_that_holds_is_evaluated_once),
        cmocka_unit_test(an_assertion_that_is_not_live_is_not_evaluated),
        cmocka_unit_test(sanitizers_and_debug_builds_have_them_live),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
