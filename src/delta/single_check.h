/* single_check.h: what both single-adapter forms refuse. */
#ifndef SP_DELTA_SINGLE_CHECK_H
#define SP_DELTA_SINGLE_CHECK_H

#include <sidepath/delta.h>

/* SP_ERR_ARGUMENT, SP_ERR_STRIDE as in sp_delta_apply_single; reads no tensor. */
sp_status sp_delta_single_check(const sp_delta_single *args, sp_error *error);

#endif
