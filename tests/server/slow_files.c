/*
 * slow_files.c: a file system that takes its time, for a server that is started with this in front
 * of its libraries (LD_PRELOAD): every opening below its directory of adapters waits for
 * SLOW_FILES_MS milliseconds.
 */
#include <dirent.h>
#include <dlfcn.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>

static void wait_a_while(void)
{
    const char *value = getenv("SLOW_FILES_MS");
    long ms = value ? strtol(value, NULL, 10) : 0;
    struct timespec pause = {ms / 1000, ms % 1000 * 1000000};

    nanosleep(&pause, NULL);
}

/* openat2 has no function of its own. */
long syscall(long number, ...)
{
    long (*next)(long number, ...) = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
    va_list arguments;
    long a[6];

    va_start(arguments, number);
    for (int i = 0; i < 6; i++)
        a[i] = va_arg(arguments, long);
    va_end(arguments);
    if (number == SYS_openat2)
        wait_a_while();
    return next(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
