#include "base/mapped.h"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define PATH_BYTES 256

/* Read by a signal handler, so nothing is ever freed: `begin` 0: a free entry. */
typedef struct mapped {
    atomic_uintptr_t begin;
    atomic_size_t bytes;
    atomic_bool faulted;
    char path[PATH_BYTES]; /* written before `begin` */
} mapped;

static mapped all[SP_MAPPED_MAX];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* for adding and removing */
static sp_fault mode;

int32_t sp_mapped_add(const void *data, size_t bytes, const char *path)
{
    size_t n = strlen(path);
    int32_t entry = 0;

    pthread_mutex_lock(&lock);
    while (entry < SP_MAPPED_MAX && atomic_load(&all[entry].begin) != 0)
        entry++;
    if (entry == SP_MAPPED_MAX || !data) {
        pthread_mutex_unlock(&lock);
        return -1;
    }
    path += n < PATH_BYTES ? 0 : n - (PATH_BYTES - 1);
    memcpy(all[entry].path, path, strlen(path) + 1);
    atomic_store(&all[entry].faulted, false);
    atomic_store(&all[entry].bytes, bytes);
    atomic_store(&all[entry].begin, (uintptr_t)data);
    pthread_mutex_unlock(&lock);
    return entry;
}

void sp_mapped_remove(int32_t entry)
{
    if (entry >= 0)
        atomic_store(&all[entry].begin, 0);
}

bool sp_mapped_has_faulted(int32_t entry)
{
    return entry >= 0 && atomic_load(&all[entry].faulted);
}

/* ---- the handler: nothing here but what a signal handler may call ---------------------------- */

static mapped *find(uintptr_t address)
{
    for (int32_t i = 0; i < SP_MAPPED_MAX; i++) {
        uintptr_t begin = atomic_load(&all[i].begin);

        if (begin != 0 && address >= begin && address - begin < atomic_load(&all[i].bytes))
            return &all[i];
    }
    return NULL;
}

/* Does not block on a standard error that is not read. */
static void say(const char *text)
{
    struct pollfd ready = {.fd = STDERR_FILENO, .events = POLLOUT};

    if (poll(&ready, 1, 0) == 1 && (ready.revents & POLLOUT) &&
        write(STDERR_FILENO, text, strlen(text)) < 0)
        return;
}

static bool read_as_zeros(mapped *file)
{
    void *begin = (void *)atomic_load(&file->begin);

    if (atomic_exchange(&file->faulted, true))
        return true; /* another thread has already done it */
    return mmap(begin, atomic_load(&file->bytes), PROT_READ,
                MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0) != MAP_FAILED;
}

/* Returning repeats the access: it now reads a zero, or faults again without a handler. */
static void on_fault(int number, siginfo_t *info, void *context)
{
    mapped *file = find((uintptr_t)info->si_addr);

    (void)context;
    if (file && mode == SP_FAULT_SURVIVES && read_as_zeros(file))
        return;
    if (file) {
        say("sidepath: ");
        say(file->path);
        say(" became shorter while it was mapped, or cannot be read\n");
    }
    signal(number, SIG_DFL);
}

void sp_mapped_handle_faults(sp_fault fault)
{
    struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO};

    mode = fault;
    sigemptyset(&action.sa_mask);
    sigaction(SIGBUS, &action, NULL);
}
