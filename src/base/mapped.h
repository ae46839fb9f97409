/*
 * mapped.h: the currently mapped files, by name. Touching a page that its file no longer has, or
 * that cannot be read, raises SIGBUS, which by default ends a program without a message. A program
 * that maps files may install a handler, which says which file it was.
 */
#ifndef SP_BASE_MAPPED_H
#define SP_BASE_MAPPED_H

#include "base/private.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Further files are mapped without a name. */
#define SP_MAPPED_MAX 512

/*
 * Any thread. Returns the entry for the other two calls; -1: no free entry. `path` is copied; of a
 * long one its end.
 */
int32_t sp_mapped_add(const void *data, size_t bytes, const char *path);
void sp_mapped_remove(int32_t entry); /* -1 is allowed */
/* Whether a fault in it was survived: then all of it reads as zeros. */
SP_PRIVATE bool sp_mapped_has_faulted(int32_t entry);

typedef enum sp_fault {
    SP_FAULT_ENDS,    /* the program, after a line on standard error */
    SP_FAULT_SURVIVES /* the mapping reads as zeros from then on; its user has to check */
} sp_fault;

/* Installs the handler, once, for a program; a library does not set handlers. Faults elsewhere
 * still end the program.
 */
void sp_mapped_handle_faults(sp_fault fault);

#endif
