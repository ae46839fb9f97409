/*
 * mapped.h: the files that are mapped now, by name. Touching a page that its file has no longer, or
 * that cannot be read, raises SIGBUS, which by itself ends a program without a word. A program that
 * maps files may have a handler here: it says which file it was.
 */
#ifndef SP_BASE_MAPPED_H
#define SP_BASE_MAPPED_H

#include "base/private.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Files beyond these are mapped without a name. */
#define SP_MAPPED_MAX 512

/*
 * Any thread. What it returns names the file in the other two; -1: there is no place left. `path`
 * is copied, its end where it is long.
 */
int32_t sp_mapped_add(const void *data, size_t bytes, const char *path);
void sp_mapped_remove(int32_t entry); /* -1 is allowed */
/* Whether a fault was survived in it: then all of it reads as zeros. */
SP_PRIVATE bool sp_mapped_has_faulted(int32_t entry);

typedef enum sp_fault {
    SP_FAULT_ENDS,    /* the program, after a line on standard error */
    SP_FAULT_SURVIVES /* the mapping reads as zeros from then on; whoever uses it has to ask */
} sp_fault;

/* Once, for a program; a library does not set handlers. Faults elsewhere end the program as ever.
 */
void sp_mapped_handle_faults(sp_fault fault);

#endif
