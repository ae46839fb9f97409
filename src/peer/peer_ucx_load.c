#include "peer/peer_ucx_load.h"

#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#define LIBRARY     "libucp.so.0"
#define WHY_BYTES   256
#define SIGNALS_MAX 32

static pthread_once_t once = PTHREAD_ONCE_INIT;
static sp_ucx functions;
static char why[WHY_BYTES]; /* empty: loaded */

typedef ucs_status_t (*option_setter)(const char *name, const char *value);
typedef ucs_status_t (*option_getter)(const char *name, char *value, size_t max);

/* POSIX has dlsym give functions as object pointers. */
static bool find(void *library, const char *name, void *out_function)
{
    void *found = dlsym(library, name);

    memcpy(out_function, &found, sizeof found);
    return found != NULL;
}

/* UCX writes warnings to standard output, where results go. An operator who has chosen another
 * level keeps it. */
static void quieten(void *library)
{
    option_setter set = NULL;
    option_getter get = NULL;
    char level[32] = "";

    if (find(library, "ucs_global_opts_set_value", &set) &&
        find(library, "ucs_global_opts_get_value", &get) &&
        get("LOG_LEVEL", level, sizeof level) == UCS_OK &&
        (strcmp(level, "warn") == 0 || strcmp(level, "WARN") == 0))
        (void)set("LOG_LEVEL", "fatal");
}

/* When it is loaded, UCX takes the signals of faults and SIGHUP, which belong to the program. */
static void *open_library(void)
{
    struct sigaction before[SIGNALS_MAX] = {0};
    void *library;

    for (int i = 1; i < SIGNALS_MAX; i++)
        (void)sigaction(i, NULL, &before[i]);
    library = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL);
    for (int i = 1; i < SIGNALS_MAX; i++)
        if (i != SIGKILL && i != SIGSTOP)
            (void)sigaction(i, &before[i], NULL);
    return library;
}

static void load(void)
{
    void *library = open_library();

    if (!library) {
        const char *words = dlerror();

        snprintf(why, sizeof why, "UCX cannot be loaded: %.200s", words ? words : LIBRARY);
        return;
    }
#define SP_UCX_FIND(name)                                         \
    if (!find(library, #name, &functions.name) && why[0] == '\0') \
        snprintf(why, sizeof why, "%s lacks %s", LIBRARY, #name);
    SP_UCX_LIST(SP_UCX_FIND)
#undef SP_UCX_FIND
    quieten(library);
}

const sp_ucx *sp_ucx_load(const char **out_why)
{
    (void)pthread_once(&once, load);
    if (out_why)
        *out_why = why;
    return why[0] == '\0' ? &functions : NULL;
}
