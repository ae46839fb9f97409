/* grouped_sizes.h: the part of the grouped GEMM's checks that needs no metadata. */
#ifndef SP_DELTA_GROUPED_SIZES_H
#define SP_DELTA_GROUPED_SIZES_H

#include <sidepath/grouped.h>

/* SP_ERR_ARGUMENT as in sp_grouped_lora_check; reads nothing that the pointers point to. */
sp_status sp_grouped_check_sizes(const sp_grouped_lora_params *params, sp_error *error);

#endif
