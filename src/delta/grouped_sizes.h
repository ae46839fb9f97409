/* grouped_sizes.h: the part of the grouped GEMM's checks that needs no metadata. */
#ifndef SP_DELTA_GROUPED_SIZES_H
#define SP_DELTA_GROUPED_SIZES_H

#include <sidepath/grouped.h>

/* Reads the caller's parameters in the current size and checks what needs no metadata. No argument
 * but error may be NULL. SP_ERR_ARGUMENT and SP_ERR_UNSUPPORTED as in sp_grouped_lora_check. */
sp_status sp_grouped_read_params(const sp_grouped_lora_params *params,
                                 sp_grouped_lora_params *out_params, sp_error *error);

#endif
