/*
 * assert.h: SP_ASSERT states the code's own invariants: the order of its calls, an index that it
 * computed, a count that two structures share. It never judges input, which is refused with an
 * error, and it never has side effects, because a build without assertions does not evaluate it.
 *
 * Assertions are live where SP_ASSERT_LIVE is 1: in debug builds, under a sanitizer, in the fuzz
 * targets and wherever CMake is given SIDEPATH_ASSERT=ON, as a long run of a simulator does. What
 * is known when compiling is a _Static_assert instead.
 */
#ifndef SP_BASE_ASSERT_H
#define SP_BASE_ASSERT_H

#include "base/private.h"

#ifndef SP_ASSERT_LIVE
#define SP_ASSERT_LIVE 0
#endif

#if defined(__GNUC__)
#define SP_NORETURN __attribute__((noreturn, cold))
#else
#define SP_NORETURN
#endif

/*
 * Prints "FILE:LINE: FUNCTION: EXPRESSION does not hold" to standard error and aborts. The only
 * place of the library that ends the process, and called only by a live assertion. Any thread.
 */
SP_PRIVATE SP_NORETURN void sp_assert_failed(const char *expression, const char *file, int line,
                                             const char *function);

#define SP_ASSERT_CHECKED(expression) \
    ((expression) ? (void)0 : sp_assert_failed(#expression, __FILE__, __LINE__, __func__))

/* Not evaluated, but compiled: it cannot rot, and what it names counts as used. */
#define SP_ASSERT_UNCHECKED(expression) ((void)sizeof((expression) ? 1 : 0))

#if SP_ASSERT_LIVE
#define SP_ASSERT(expression) SP_ASSERT_CHECKED(expression)
#else
#define SP_ASSERT(expression) SP_ASSERT_UNCHECKED(expression)
#endif

#endif
