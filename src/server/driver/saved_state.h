/*
 * saved_state.h: what of a server's adapters outlives it: the names that clients have loaded from
 * --adapter-dir, those that they have unloaded, and the active one. Bytes to structs and back,
 * without I/O (fuzzed); state_file.h writes them.
 *
 *     {"state_of_sidepath": 1, "active": "a" | null,
 *      "adapters": [{"name": "a", "path": "a-v2", "pinned": false}], "unloaded": ["b"]}
 *
 * Paths are relative to --adapter-dir, so the directory may move, and nothing outside it is named.
 */
#ifndef SP_SERVER_DRIVER_SAVED_STATE_H
#define SP_SERVER_DRIVER_SAVED_STATE_H

#include "base/text.h"

#include <sidepath/stage.h>

/* The code of a file that is no state of a server: it is refused, and left as it is. */
#define SP_CODE_STATE_FILE "state-file-invalid"

typedef struct sp_saved_adapter {
    char *name, *path;
    bool pinned;
    /* It was saved and is not there: it stays saved until a client loads or unloads its name. */
    bool missing;
    char *location; /* of one that is missing: where it would be; NULL: nowhere */
} sp_saved_adapter;

typedef struct sp_saved_state {
    char *active;               /* NULL: the base */
    bool active_missing;        /* likewise, until a client activates something */
    sp_saved_adapter *adapters; /* [n_adapters] in the order of loading */
    size_t n_adapters;
    char **unloaded; /* [n_unloaded] */
    size_t n_unloaded;
} sp_saved_state;

/*
 * `subject` names the file in errors. No bytes at all are an empty state. SP_ERR_INPUT with
 * SP_CODE_STATE_FILE: not JSON, another program's, a newer version's, a field of another type.
 * SP_ERR_MEMORY. *out_state is empty then, else owned by the caller (sp_saved_state_free).
 */
sp_status sp_saved_state_parse(const char *bytes, size_t n_bytes, const char *subject,
                               sp_saved_state *out_state, sp_error *error);
void sp_saved_state_free(sp_saved_state *state);

/* What is missing of that name; NULL: nothing. `state` may be NULL. */
sp_saved_adapter *sp_saved_state_missing(const sp_saved_state *state, const char *name);

/* The engine's thread: what its stage (NULL: no adapters) holds now, with what is missing of
 * `before` (may be NULL) and the names in `unloaded` [n_unloaded]. */
void sp_saved_state_write(const sp_stage *stage, const sp_saved_state *before,
                          char *const *unloaded, size_t n_unloaded, sp_text *out);

#endif
