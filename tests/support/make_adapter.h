/*
 * make_adapter.h: writes adapters of any keys, dtypes and shapes for tests, right or wrong. It is
 * independent of the reader: the bytes are put together here.
 */
#ifndef SP_TEST_SUPPORT_MAKE_ADAPTER_H
#define SP_TEST_SUPPORT_MAKE_ADAPTER_H

#include "support/test.h"

#include <stdbool.h>

typedef struct make_adapter make_adapter;

make_adapter *make_adapter_create(void);
void make_adapter_destroy(make_adapter *adapter);

/* The text of adapter_config.json. NULL: none is written. The default suits rank 2, alpha 4. */
void make_adapter_config(make_adapter *adapter, const char *text);

/* The default config with these members (", \"key\": value" or "") put in before its end. */
void make_adapter_config_with(make_adapter *adapter, const char *members);

/*
 * Adds a tensor; dtype is the format's word. Returns its data, zeroed, owned by the adapter.
 * n_dims dimensions follow as int.
 */
void *make_adapter_add(make_adapter *adapter, const char *name, const char *dtype, int n_dims, ...);

/* The same with seeded random values of BF16, so that every element is finite and not zero. */
void make_adapter_add_random(make_adapter *adapter, const char *name, int rows, int cols,
                             uint64_t seed);

/* "<path>.lora_A.weight" [rank, k_in] and "<path>.lora_B.weight" [n_out, rank], random BF16. */
void make_adapter_add_pair(make_adapter *adapter, const char *path, int rank, int k_in, int n_out,
                           uint64_t seed);

/* The data of a tensor that was added; fails the test when there is none. */
void *make_adapter_data(make_adapter *adapter, const char *name, size_t *out_bytes);

/* Turns the order of tensors in header and data around. */
void make_adapter_reverse(make_adapter *adapter);

/* The whole safetensors file; the caller frees it with sp_free. */
unsigned char *make_adapter_bytes(const make_adapter *adapter, size_t *out_bytes);

/* Writes config and weights into the directory, in `shards` files with an index when above 1. */
void make_adapter_write(const make_adapter *adapter, const char *directory, int shards);

/* Creates a directory under the test's and writes there; the caller frees the path. */
char *make_adapter_folder(const make_adapter *adapter);

#endif
