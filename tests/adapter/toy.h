/*
 * toy.h: a small base model made by hand, and adapters for it: what most tests of opening start
 * from. Two layers, hidden 8; layer 0 attends, layer 1 is a gated delta net; both have experts.
 */
#ifndef SP_TESTS_ADAPTER_TOY_H
#define SP_TESTS_ADAPTER_TOY_H

#include "support/make_adapter.h"

#include <sidepath/adapter.h>

#define TOY_HIDDEN       8
#define TOY_INTERMEDIATE 3
#define TOY_EXPERTS      4
#define TOY_VOCAB        16

sp_geometry *toy_geometry(void);

/* q_proj and v_proj of layer 0 at rank 2, under "base_model.model.model." */
make_adapter *toy_adapter(void);

/* Options with the toy geometry; sp_geometry_release(options.geometry) is the caller's. */
sp_adapter_options toy_options(void);

/* Opens the adapter written into a folder that is removed again. */
sp_status toy_open(const make_adapter *adapter, const sp_adapter_options *options,
                   sp_adapter **out_adapter, sp_error *error);

/* Asserts that opening refuses with this code; `subject` and `word` (of the text) may be NULL. */
void toy_refused(const make_adapter *adapter, const sp_adapter_options *options, const char *code,
                 const char *subject, const char *word, const char *what);

/* Asserts that it opens; the caller releases it. */
sp_adapter *toy_opened(const make_adapter *adapter, const sp_adapter_options *options);

#endif
