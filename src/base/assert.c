#include "base/assert.h"

#include <stdio.h>
#include <stdlib.h>

void sp_assert_failed(const char *expression, const char *file, int line, const char *function)
{
    fprintf(stderr, "%s:%d: %s: %s does not hold\n", file, line, function, expression);
    abort();
}
