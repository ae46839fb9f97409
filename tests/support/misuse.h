/* Calls that must be refused: a table of lines, each with the status and the argument's name. */
#ifndef SP_TEST_SUPPORT_MISUSE_H
#define SP_TEST_SUPPORT_MISUSE_H

#include "support/library_world.h"
#include "support/test.h"

#define MISUSE_FOREIGN 77 /* no enumerator anywhere has this number */

/* What the calls of a test report into, and the objects that they are made on. */
extern sp_error misuse_error;
extern library_world misuse_world;

/* The call gives the status and an error that says so and names the argument. All lines of a test
 * are tried; misuse_end fails it where one of them was wrong. */
void misuse_refused(const char *call, sp_status want, const char *named, sp_status got);
#define REFUSED(status, named, call) misuse_refused(#call, status, named, call)

int misuse_open_world(void **state);
int misuse_close_world(void **state);
int misuse_begin(void **state);
int misuse_end(void **state);
#define MISUSE(test) cmocka_unit_test_setup_teardown(test, misuse_begin, misuse_end)

#endif
