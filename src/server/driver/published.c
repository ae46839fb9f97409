#include "server/driver/published.h"

#include "base/alloc.h"

sp_published *sp_published_create(const char *content_type, sp_budget *budget)
{
    sp_published *created = sp_calloc(1, sizeof *created);

    if (!created)
        return NULL;
    created->budget = budget;
    created->content_type = sp_strdup(content_type);
    if (!created->content_type) {
        sp_published_destroy(created);
        return NULL;
    }
    return created;
}

void sp_published_drop_body(sp_published *published)
{
    sp_text_free(&published->body);
    sp_budget_hold(published->budget, SP_BUDGET_BODIES, &published->held, 0);
}

void sp_published_destroy(sp_published *published)
{
    if (!published)
        return;
    sp_published_drop_body(published);
    sp_adapter_release(published->adapter);
    sp_free(published->shared.name);
    sp_free(published->receipt);
    sp_free(published->config);
    sp_free(published->content_type);
    sp_free(published);
}
