/* seeds.h: which lives a simulator runs: its command line is [FIRST_SEED N_SEEDS]. */
#ifndef SP_TEST_SUPPORT_SEEDS_H
#define SP_TEST_SUPPORT_SEEDS_H

#include <stdint.h>

typedef struct seed_range {
    uint64_t first, n;
} seed_range;

/* Without arguments: 1 .. n_default. */
seed_range seeds_of(int argc, char **argv, uint64_t n_default);

/* Runs one life for each. */
void seeds_run(const seed_range *seeds, void (*live)(uint64_t seed));

/* Whether there were enough of them that everything must have happened in some life. */
int seeds_are_many(const seed_range *seeds);

#endif
