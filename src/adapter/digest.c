/*
 * digest.c: the adapter's identity: SHA-256 over one record per applied tensor, in the order of
 * places. Names, prefixes, the order in the file, shards and labels are not covered; every stored
 * bit is.
 *
 * A record is made of 32-bit little-endian numbers (place, role, how it is read, effective scale,
 * dtype, rows, columns) and the SHA-256 of the stored bytes, which read.c takes while it reads
 * them. A known place is hashed as layer, module and expert numbers, any other one as its path.
 */
#include "adapter/audit.h"
#include "base/half.h"
#include "base/hash.h"

#include <string.h>

static const char magic[] = "sidepath adapter 1";

static void add_number(sp_sha256 *hash, uint32_t number)
{
    uint8_t bytes[4];

    for (int i = 0; i < 4; i++)
        bytes[i] = (uint8_t)(number >> (8 * i));
    sp_sha256_update(hash, bytes, sizeof bytes);
}

/* Not a layer's number. The record of a place outside the table starts with it, so that it equals
 * no other, followed by the record's version. */
#define OTHER_PLACE   0x80000000u
#define OTHER_VERSION 1u

/* Its path without the trunk; the host's row numbers are not part of the adapter. */
static void add_other_place(sp_sha256 *hash, const sp_module_key *key)
{
    size_t trunk = sp_path_trunk_bytes(key->path, key->path_bytes);

    add_number(hash, OTHER_PLACE);
    add_number(hash, OTHER_VERSION);
    add_number(hash, (uint32_t)(key->path_bytes - trunk));
    sp_sha256_update(hash, key->path + trunk, key->path_bytes - trunk);
}

/* How a fused pair is read; 0 for every other tensor. */
static uint32_t reading_of(const sp_audit *audit, const sp_pair *pair)
{
    if (!pair || pair->a->key.fused == SP_FUSED_NONE)
        return 0;
    return 1u | (uint32_t)pair->is_down << 1 | (uint32_t)pair->is_swapped << 2 |
           (uint32_t)audit->config.columns << 3;
}

static void add_item(const sp_audit *audit, sp_sha256 *hash, const sp_item *item,
                     const sp_pair *pair)
{
    const sp_module_key *key = &item->key;

    if (key->module == SP_MODULE_OTHER) {
        add_other_place(hash, key);
    } else {
        add_number(hash, (uint32_t)key->layer);
        add_number(hash, (uint32_t)key->module);
        add_number(hash, (uint32_t)key->expert);
    }
    add_number(hash, (uint32_t)key->role);
    add_number(hash, reading_of(audit, pair));
    add_number(hash, pair ? sp_f32_bits(pair->scale) : 0);
    add_number(hash, (uint32_t)item->dtype);
    add_number(hash, (uint32_t)item->tensor->dims[0]);
    add_number(hash, (uint32_t)item->tensor->dims[1]);
    sp_sha256_update(hash, item->leaf, sizeof item->leaf);
}

static void add_ids(sp_sha256 *hash, const sp_id_list *list)
{
    add_number(hash, (uint32_t)list->n);
    for (int32_t i = 0; i < list->n; i++)
        add_number(hash, (uint32_t)list->ids[i]);
}

/* The pair that this item is part of, from `next` on; both lists have the same order. */
static const sp_pair *pair_of(const sp_audit *audit, const sp_item *item, size_t *next)
{
    const sp_pair *pair;

    if (*next >= audit->n_pairs)
        return NULL;
    pair = &audit->pairs[*next];
    if (pair->b == item)
        (*next)++;
    return pair->a == item || pair->b == item ? pair : NULL;
}

sp_status sp_audit_digest(sp_audit *audit)
{
    sp_sha256 *hash;
    size_t next = 0;
    sp_status status = sp_sha256_create(&hash);

    if (status != SP_OK)
        return sp_fail_memory(audit->error, 0, "a digest");
    sp_sha256_update(hash, magic, sizeof magic);
    for (size_t i = 0; i < audit->n_items; i++) {
        const sp_item *item = &audit->items[i];
        const sp_pair *pair = pair_of(audit, item, &next);

        if (item->data) /* else a copy of the base, which is not applied */
            add_item(audit, hash, item, pair);
    }
    add_ids(hash, &audit->config.tokens_embed);
    add_ids(hash, &audit->config.tokens_head);
    sp_sha256_finish(hash, audit->adapter->digest.bytes);
    audit->adapter->has_digest = true;
    for (size_t i = 0; i < audit->n_pairs; i++) {
        if (audit->pairs[i].a->key.fused != SP_FUSED_NONE && !audit->pairs[i].is_settled)
            audit->adapter->has_digest = false;
    }
    return SP_OK;
}
