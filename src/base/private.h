/*
 * private.h: the mark of functions that libsidepath_engine uses although no public header declares
 * them. They are exported from the shared library under a node of their own that names the whole
 * version (SIDEPATH_PRIVATE_0.2.0): the engine loads with the library it was built with and with
 * no other, and a host that uses one of them does not link with the next version.
 */
#ifndef SP_BASE_PRIVATE_H
#define SP_BASE_PRIVATE_H

#include <sidepath/version.h>

#if defined(__GNUC__)
#define SP_PRIVATE __attribute__((visibility("default")))
#else
#define SP_PRIVATE
#endif

#endif
