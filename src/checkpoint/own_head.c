#include "checkpoint/own_head.h"

#include "base/file.h"

#include <sidepath/checkpoint.h>

#include <string.h>

static const sp_tensor *find_first(const sp_checkpoint *checkpoint, const char *const *names)
{
    const sp_tensor *found = NULL;

    for (; *names && !found; names++)
        found = sp_checkpoint_find(checkpoint, *names);
    return found;
}

static bool same_kind(const sp_tensor *a, const sp_tensor *b)
{
    return a->type == b->type && a->n_dims == b->n_dims && a->bytes == b->bytes &&
           memcmp(a->dims, b->dims, (size_t)a->n_dims * sizeof *a->dims) == 0;
}

/* Files that cannot be mapped are reported elsewhere. */
static bool same_bytes(const sp_checkpoint *checkpoint, const sp_tensor *a, const sp_tensor *b)
{
    sp_mapping first = {0}, second = {0};
    bool same = true;

    if (sp_file_map(sp_checkpoint_path(checkpoint, a->file), &first, NULL) == SP_OK &&
        sp_file_map(sp_checkpoint_path(checkpoint, b->file), &second, NULL) == SP_OK &&
        first.bytes >= a->offset_bytes + a->bytes && second.bytes >= b->offset_bytes + b->bytes)
        same = memcmp((const char *)first.data + a->offset_bytes,
                      (const char *)second.data + b->offset_bytes, (size_t)a->bytes) == 0;
    sp_file_unmap(&first);
    sp_file_unmap(&second);
    return same;
}

sp_status sp_has_own_head(const char *directory, bool *out_own, sp_error *error)
{
    static const char *const heads[] = {"lm_head.weight", "language_model.lm_head.weight", NULL};
    static const char *const embeddings[] = {
        "model.embed_tokens.weight", "model.language_model.embed_tokens.weight",
        "language_model.model.embed_tokens.weight", "embed_tokens.weight", NULL};
    const sp_tensor *head, *embedding;
    sp_checkpoint *checkpoint;
    sp_error local;
    sp_status status = sp_checkpoint_open(directory, "model", &checkpoint, &local);

    *out_own = false;
    if (status == SP_ERR_MEMORY && error)
        *error = local;
    if (status != SP_OK)
        return status == SP_ERR_MEMORY ? status : SP_OK;
    head = find_first(checkpoint, heads);
    embedding = find_first(checkpoint, embeddings);
    *out_own = head && embedding &&
               (!same_kind(head, embedding) || !same_bytes(checkpoint, head, embedding));
    sp_checkpoint_destroy(checkpoint);
    return SP_OK;
}
