#include "support/seeds.h"

#include <stdlib.h>

#define MANY 100

seed_range seeds_of(int argc, char **argv, uint64_t n_default)
{
    if (argc != 3)
        return (seed_range){1, n_default};
    return (seed_range){strtoull(argv[1], NULL, 10), strtoull(argv[2], NULL, 10)};
}

void seeds_run(const seed_range *seeds, void (*live)(uint64_t seed))
{
    for (uint64_t i = 0; i < seeds->n; i++)
        live(seeds->first + i);
}

int seeds_are_many(const seed_range *seeds)
{
    return seeds->n >= MANY;
}
