/*
 * adapter_wish.h: what a body, or a query, says of an adapter that is to be loaded. No I/O.
 */
#ifndef SP_SERVER_API_ADAPTER_WISH_H
#define SP_SERVER_API_ADAPTER_WISH_H

#include "server/api/body_fields.h"
#include "server/driver/lora_task.h"

typedef struct sp_adapter_wish {
    const char *name, *path; /* borrowed from the fields; NULL: absent */
    bool replace, pinned, unpinned;
    int64_t expected_generation; /* 0: any */
    bool has_shared;
    bool has_digest;
    sp_digest digest; /* of the content that is wanted */
} sp_adapter_wish;

/*
 * The fields of SP_FIELDS_LOAD, SP_FIELDS_NAME or SP_FIELDS_PUBLISH. `brings`: the adapter comes
 * with the request, so it has no path; from_peers: a path may be left out. SP_ERR_INPUT with the
 * field as subject; what was read before that is in *out_wish.
 */
sp_status sp_adapter_wish_read(const json_t *fields, sp_field_set set, bool brings, bool from_peers,
                               sp_adapter_wish *out_wish, sp_error *error);
/*
 * "shm": {"name", "offset", "bytes"} and "config", an object, into `published`. SP_ERR_INPUT,
 * SP_ERR_MEMORY.
 */
sp_status sp_adapter_wish_read_shared(const json_t *fields, sp_published *published,
                                      sp_error *error);
/* A load task of it; NULL: out of memory. `path` may be NULL. */
sp_lora_task *sp_adapter_wish_task(const sp_adapter_wish *wish, const char *path);

#endif
