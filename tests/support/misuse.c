#include "support/misuse.h"

#include <string.h>

sp_error misuse_error;
library_world misuse_world;

static bool failed;

void misuse_refused(const char *call, sp_status want, const char *named, sp_status got)
{
    const sp_error *error = &misuse_error;
    bool fits = got == want && error->status == want && error->text[0] != '\0' &&
                (strstr(error->text, named) || strstr(error->subject, named));

    if (!fits) {
        print_error("%s\n    gave %s [%s] \"%s\", not %s about %s\n", call, sp_status_name(got),
                    error->subject, error->text, sp_status_name(want), named);
        failed = true;
    }
    memset(&misuse_error, 0, sizeof misuse_error);
}

int misuse_open_world(void **state)
{
    (void)state;
    library_world_open(&misuse_world);
    return 0;
}

int misuse_close_world(void **state)
{
    (void)state;
    library_world_close(&misuse_world);
    return 0;
}

int misuse_begin(void **state)
{
    (void)state;
    failed = false;
    memset(&misuse_error, 0, sizeof misuse_error);
    return 0;
}

int misuse_end(void **state)
{
    (void)state;
    return failed ? -1 : 0;
}
