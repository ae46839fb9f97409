/*
 * option_rows.h: the numbers and switches of sp_engine_options, one row each: name, range, default,
 * flag and help. sp_engine_options_default, the check of sp_engine_open and the program's flags
 * read them. Options that are texts, or that only a host sets, have no row.
 */
#ifndef SP_ENGINE_OPTION_ROWS_H
#define SP_ENGINE_OPTION_ROWS_H

#include "engine/request/field.h"

#include <sidepath/engine.h>

/* The scope of an option: the forms of its row. */
typedef enum sp_option_of {
    SP_OPTION_OF_ENGINE = 1,
    SP_OPTION_OF_ADAPTER = 2, /* acceptance of one adapter */
    SP_OPTION_OF_KERNELS = 4
} sp_option_of;

/* The rank of a pool whose option and adapters say none. */
#define SP_POOL_RANK_DEFAULT 64

/* Offsets are those of sp_engine_options; `defaults` has the library's alone. */
extern const sp_field sp_option_rows[];
extern const size_t sp_n_option_rows;

/* The table over *options, borrowed as long as the part is used; NULL: for look-ups alone. Any
 * thread. */
sp_field_part sp_option_part(sp_engine_options *options);

#endif
