#ifndef SP_CHECKPOINT_TENSOR_H
#define SP_CHECKPOINT_TENSOR_H

#include <sidepath/checkpoint.h>

/* Bytes of shape and type; false where they are no number of bytes. `bytes` is not read. */
bool sp_tensor_measure(const sp_tensor *tensor, uint64_t *out_bytes);

#endif
