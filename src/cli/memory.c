#include "cli/memory.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool ends_with(const char *line, const char *ending)
{
    size_t n = strcspn(line, "\n");
    size_t m = strlen(ending);

    return n >= m && memcmp(line + n - m, ending, m) == 0;
}

sp_process_memory sp_process_memory_now(void)
{
    sp_process_memory memory = {0};
    char line[4096];
    bool weights = false;
    FILE *maps = fopen("/proc/self/smaps", "r");

    if (!maps)
        return memory;
    while (fgets(line, sizeof line, maps)) {
        size_t bytes;

        /* A mapping begins with "address-address permissions ... path"; its fields follow. */
        if (strncmp(line, "Rss:", 4) != 0) {
            size_t address = strspn(line, "0123456789abcdef");

            if (address > 0 && line[address] == '-')
                weights = ends_with(line, ".safetensors");
            continue;
        }
        bytes = (size_t)strtoull(line + 4, NULL, 10) << 10; /* in KiB */
        memory.resident_bytes += bytes;
        if (weights)
            memory.weights_bytes += bytes;
    }
    fclose(maps);
    memory.beyond_weights_bytes = memory.resident_bytes - memory.weights_bytes;
    return memory;
}
