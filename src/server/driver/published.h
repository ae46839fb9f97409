/*
 * published.h: an adapter that came in a request, on its way to the engine: its bytes as they were
 * received, and the adapter that was made of them. It belongs to one load task.
 */
#ifndef SP_SERVER_DRIVER_PUBLISHED_H
#define SP_SERVER_DRIVER_PUBLISHED_H

#include "base/text.h"
#include "server/http/budget.h"

#include <sidepath/adapter.h>

/* A shared-memory object of this host. */
typedef struct sp_shared_name {
    char *name;             /* as shm_open takes it; NULL: none */
    uint64_t offset, bytes; /* bytes 0: all from the offset on */
} sp_shared_name;

typedef struct sp_published {
    char *content_type; /* of the body, or of what the shared memory holds */
    char *config;       /* where it comes beside the body; NULL: in it */
    sp_text body;
    size_t held; /* of the budget, for the body */
    sp_budget *budget;
    size_t bytes_max; /* of shared memory; a body was compared with it before */
    sp_shared_name shared;
    sp_adapter *adapter; /* one reference; NULL: not read yet, or given to the stage */
    sp_digest digest;    /* of the adapter, once it is read */
    bool stored;         /* it is in the store, which is told of the outcome */
    char *receipt;       /* in JSON, with the outcome; NULL: none */
} sp_published;

/* NULL: out of memory. The content type is copied. */
sp_published *sp_published_create(const char *content_type, sp_budget *budget);
void sp_published_destroy(sp_published *published); /* NULL is allowed */
/* Gives the bytes back, and what they hold of the budget. */
void sp_published_drop_body(sp_published *published);

#endif
