/*
 * intake_state.h: the inside of an intake: the one way from headers and data to an adapter, whether
 * they come from files, from memory or from elsewhere.
 */
#ifndef SP_ADAPTER_INTAKE_STATE_H
#define SP_ADAPTER_INTAKE_STATE_H

#include "adapter/audit.h"

#include <sidepath/intake.h>

/* A tensor whose data is wanted. */
typedef struct sp_landing {
    sp_item *item;
    char *data;          /* all of it; of a copy of the base a window of window_bytes */
    size_t window_bytes; /* 0: data holds all */
    uint64_t taken;      /* bytes */
    sp_sha256 *hash;     /* between the first byte and the last */
    bool failed;         /* a piece was refused: there is no way on */
} sp_landing;

struct sp_intake {
    sp_audit audit;
    sp_adapter_options options; /* what outlives the call: the geometry is retained */
    sp_landing *landings;       /* [n_landings] in the items' order */
    size_t n_landings;
    char *windows; /* of the copies, one block */
    atomic_ullong hash_ns;
    bool audited; /* passed all that needs no data */
    /* of an intake from descriptions */
    sp_tensor *list; /* [n_tensors] ascending by name */
    size_t *order;   /* [n_tensors] where the caller has each */
    char *names;     /* one block */
};

/* What a config is called in texts, and notes for the receipt, one a line (NULL: none). */
typedef struct sp_intake_origin {
    const char *config_name;
    const char *note;
} sp_intake_origin;

/* The caller's options in today's size; the defaults for what it lacks. SP_ERR_ARGUMENT. */
sp_status sp_adapter_options_read(const sp_adapter_options *options,
                                  sp_adapter_options *out_options, sp_error *error);

/*
 * An intake without tensors: options are read and the config is. `name` is the adapter's where the
 * options have none. On failure nothing is left.
 */
sp_status sp_intake_begin(const char *config, size_t config_bytes, const sp_intake_origin *origin,
                          const sp_adapter_options *options, const char *name,
                          sp_intake **out_intake, sp_error *error);

/* Gives it the tensors, [n] ascending by name and borrowed as long as it lives, and audits them. */
sp_status sp_intake_audit(sp_intake *intake, const sp_tensor *tensors, size_t n, sp_error *error);

/* As sp_intake_create, with the origin. */
sp_status sp_intake_describe(const char *config, size_t config_bytes,
                             const sp_intake_origin *origin, const sp_tensor_desc *tensors,
                             size_t n_tensors, const sp_adapter_options *options,
                             sp_intake **out_intake, sp_error *error);

/*
 * Runs fill(user, i) for i in 0 .. n on the executor's threads (NULL: the caller alone). The
 * failure of the lowest i is the one that is returned, whatever the threads; what comes after it is
 * left.
 */
typedef sp_status (*sp_intake_fill_fn)(void *user, size_t i, sp_error *error);
sp_status sp_intake_run(sp_exec *exec, sp_intake_fill_fn fill, void *user, size_t n,
                        sp_error *error);

/* Reads all that is wanted from the files of a checkpoint, whose list the intake was made from. */
sp_status sp_intake_read_files(sp_intake *intake, const sp_checkpoint *checkpoint, sp_exec *exec,
                               sp_error *error);

/*
 * The adapter under audit: its sites are known once the headers are audited, its tables, digest
 * and effect are not. Borrowed.
 */
const sp_adapter *sp_intake_adapter(const sp_intake *intake);

#endif
