/*
 * intake_state.h: the internals of an intake: the single path from headers and data to an adapter,
 * whether they come from files, memory or elsewhere. Pointers may not be NULL unless said so.
 * Distinct intakes may be used by distinct threads; of one intake only pieces of distinct tensors
 * may be taken concurrently.
 */
#ifndef SP_ADAPTER_INTAKE_STATE_H
#define SP_ADAPTER_INTAKE_STATE_H

#include "adapter/audit.h"

#include <sidepath/intake.h>

/* A tensor whose data is needed. */
typedef struct sp_landing {
    sp_item *item;
    char *data;          /* all of it; of a copy of the base a window of window_bytes */
    size_t window_bytes; /* 0: data holds all */
    uint64_t taken;      /* bytes */
    sp_sha256 *hash;     /* while data is incomplete */
    bool failed;         /* a piece was refused: the intake cannot continue */
} sp_landing;

struct sp_intake {
    sp_audit audit;
    sp_adapter_options options; /* the parts that outlive the call; the geometry is retained */
    sp_landing *landings;       /* [n_landings] in the items' order */
    size_t n_landings;
    char *windows; /* of the copies, one block */
    atomic_ullong hash_ns;
    bool audited; /* passed all checks that need no data */
    /* of an intake from descriptions */
    sp_tensor *list; /* [n_tensors] ascending by name */
    size_t *order;   /* [n_tensors] index in the caller's list */
    char *names;     /* one block */
};

/* The config's name in texts, and notes for the receipt, one per line (NULL: none). */
typedef struct sp_intake_origin {
    const char *config_name;
    const char *note;
} sp_intake_origin;

/* Reads the caller's options in the current size, with defaults for missing fields; NULL: all
 * defaults. SP_ERR_ARGUMENT. */
sp_status sp_adapter_options_read(const sp_adapter_options *options,
                                  sp_adapter_options *out_options, sp_error *error);

/*
 * Creates an intake without tensors from options and config. `name` is used where the options have
 * none. On failure everything is released.
 */
sp_status sp_intake_begin(const char *config, size_t config_bytes, const sp_intake_origin *origin,
                          const sp_adapter_options *options, const char *name,
                          sp_intake **out_intake, sp_error *error);

/* Adds the tensors, [n] ascending by name and borrowed for the intake's life, and audits them. */
sp_status sp_intake_audit(sp_intake *intake, const sp_tensor *tensors, size_t n, sp_error *error);

/* As sp_intake_create, with the origin. */
sp_status sp_intake_describe(const char *config, size_t config_bytes,
                             const sp_intake_origin *origin, const sp_tensor_desc *tensors,
                             size_t n_tensors, const sp_adapter_options *options,
                             sp_intake **out_intake, sp_error *error);

/*
 * Runs fill(user, i) for i in 0 .. n on the executor's threads (NULL: the caller alone). The
 * failure of the lowest i is returned, independent of scheduling; later ones are skipped. Blocks.
 */
typedef sp_status (*sp_intake_fill_fn)(void *user, size_t i, sp_error *error);
/* exec NULL: on the calling thread alone. Blocks. */
sp_status sp_intake_run(sp_exec *exec, sp_intake_fill_fn fill, void *user, size_t n,
                        sp_error *error);

/* Reads all needed data from the files of the checkpoint whose list the intake was made from.
 * Blocks on file reads. */
sp_status sp_intake_read_files(sp_intake *intake, const sp_checkpoint *checkpoint, sp_exec *exec,
                               sp_error *error);

/*
 * The adapter under audit: its sites are known once the headers are audited, its tables, digest
 * and effect are not. Borrowed.
 */
const sp_adapter *sp_intake_adapter(const sp_intake *intake);

#endif
