#include "server/metrics/refusals.h"

#include "base/alloc.h"

void sp_server_keep_refusal(void *user, const char *name, const sp_error *error)
{
    sp_server_refusals *refusals = user;
    sp_server_refusal *grown =
        sp_realloc(refusals->items, (refusals->n + 1) * sizeof *refusals->items);

    if (!grown)
        return;
    refusals->items = grown;
    grown[refusals->n] = (sp_server_refusal){sp_strdup(name), *error};
    refusals->n += grown[refusals->n].name != NULL;
}

void sp_server_refusals_free(sp_server_refusals *refusals)
{
    for (size_t i = 0; i < refusals->n; i++)
        sp_free(refusals->items[i].name);
    sp_free(refusals->items);
    *refusals = (sp_server_refusals){.items = NULL};
}
