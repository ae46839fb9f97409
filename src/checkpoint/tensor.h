#ifndef SP_CHECKPOINT_TENSOR_H
#define SP_CHECKPOINT_TENSOR_H

#include <sidepath/checkpoint.h>

/* Bytes of a tensor's shape and type; false where they are not a whole number of bytes in 64 bits.
 * tensor->bytes is not read. Pure; no NULL. */
bool sp_tensor_measure(const sp_tensor *tensor, uint64_t *out_bytes);

#endif
