/*
 * kernels.c: the tables of all levels, filled once. Each starts as a copy of the level below and is
 * overwritten by its own entries; levels that the machine lacks are not filled.
 */
#include "kernels/cpu/kernels.h"

#include "base/error.h"
#include "kernels/cpu/cpu_features.h"
#include "kernels/cpu/levels.h"

#include <pthread.h>
#include <string.h>

#define LEVELS 4

static const char *const level_names[LEVELS] = {"scalar", "avx2", "avx512", "amx"};

static sp_kernels tables[LEVELS];
static int n_levels; /* the first n_levels of level_names can run here */
static const char *runnable[LEVELS + 1];
static pthread_once_t once = PTHREAD_ONCE_INIT;

/* Opens the next level as a copy of the one below. */
static sp_kernels *add_level(void)
{
    sp_kernels *table = &tables[n_levels];

    if (n_levels > 0)
        *table = tables[n_levels - 1];
    table->level = level_names[n_levels];
    runnable[n_levels] = level_names[n_levels];
    n_levels++;
    return table;
}

static void fill_tables(void)
{
    sp_kernels_fill_scalar(add_level());
#if defined(__x86_64__)
    sp_cpu_features features = sp_cpu_features_detect();

    if (!features.avx2)
        return;
    sp_kernels_fill_avx2(add_level());
    if (!features.avx512)
        return;
    sp_kernels_fill_avx512(add_level());
    if (!features.amx || !sp_cpu_request_tiles())
        return;
    sp_kernels *amx = add_level();
    sp_kernels_fill_amx(amx, amx - 1);
    sp_kernels_fill_attention_amx(amx, amx - 1);
#endif
}

static int level_index(const char *name)
{
    for (int i = 0; i < LEVELS; i++)
        if (strcmp(name, level_names[i]) == 0)
            return i;
    return -1;
}

sp_status sp_kernels_get(const char *level, const sp_kernels **out_kernels, sp_error *error)
{
    int index;

    (void)pthread_once(&once, fill_tables);
    if (!level || strcmp(level, "auto") == 0) {
        *out_kernels = &tables[n_levels - 1];
        return SP_OK;
    }
    index = level_index(level);
    if (index < 0)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, level, -1,
                       "no instruction-set level has this name; the names are auto, scalar, avx2, "
                       "avx512 and amx");
    if (index >= n_levels)
        return sp_fail(error, SP_ERR_UNSUPPORTED, NULL, level, -1,
                       "this machine, its operating system or this build lacks the level; the "
                       "best one here is %s",
                       level_names[n_levels - 1]);
    *out_kernels = &tables[index];
    return SP_OK;
}

const char *const *sp_kernels_levels(void)
{
    (void)pthread_once(&once, fill_tables);
    return runnable;
}
