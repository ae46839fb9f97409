/*
 * archs.h: the adapters of fixtures/archs, whose modules have names that no family here has: their
 * geometries as rows of sites.json, and the served tables that stand in for the base's.
 */
#ifndef SP_TEST_SUPPORT_ARCHS_H
#define SP_TEST_SUPPORT_ARCHS_H

#include "support/golden.h"
#include "support/test.h"

#include <sidepath/adapter.h>

enum { N_ARCHS = 6 };
extern const char *const arch_names[N_ARCHS];

typedef struct arch {
    const char *name;
    sp_geometry *geometry; /* site i is row i of sites.json */
    int32_t n_sites;
    golden *adapter, *golden;
    char folder[512];     /* of the adapter */
    sp_served_table head; /* data NULL: none stands in for it */
} arch;

arch arch_open(const char *name);
void arch_close(arch *a);

/* Opens the adapter against the geometry. Asserts that it works. */
sp_adapter *arch_adapter(const arch *a, sp_dtype pool_dtype);

#endif
