/* The library's version against the headers it was built with. */
#include "support/test.h"

#include <sidepath/version.h>

static void the_library_says_what_the_headers_say(void **state)
{
    (void)state;
    assert_int_equal(sp_library_version(), SP_VERSION);
    assert_string_equal(sp_library_version_text(), "0.2.0");
}

static void versions_as_numbers_keep_their_order(void **state)
{
    (void)state;
    assert_int_equal(SP_VERSION_NUMBER(0, 2, 0), 200);
    assert_int_equal(SP_VERSION_NUMBER(1, 12, 3), 11203);
    assert_true(SP_VERSION_NUMBER(1, 0, 0) > SP_VERSION_NUMBER(0, 99, 99));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_library_says_what_the_headers_say),
        cmocka_unit_test(versions_as_numbers_keep_their_order),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
