/*
 * metadata.h: the texts that a safetensors header carries beside its tensors, under "__metadata__".
 */
#ifndef SP_CHECKPOINT_METADATA_H
#define SP_CHECKPOINT_METADATA_H

#include <sidepath/checkpoint.h>

/* The text of that key, UTF-8 without a NUL inside, as long as the header lives; NULL: there is
 * none. Any thread. */
const char *sp_safetensors_metadata(const sp_safetensors *header, const char *key);

#endif
