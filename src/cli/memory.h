/* memory.h: what the process occupies, as the kernel says. */
#ifndef SP_CLI_MEMORY_H
#define SP_CLI_MEMORY_H

#include <stddef.h>

typedef struct sp_process_memory {
    size_t resident_bytes;       /* everything in RAM that is mapped here */
    size_t weights_bytes;        /* the part of it that is mapped from *.safetensors files */
    size_t beyond_weights_bytes; /* the rest */
} sp_process_memory;

/* All zero where /proc does not tell. */
sp_process_memory sp_process_memory_now(void);

#endif
