/*
 * audit.c: every tensor is identified and paired with its partner, or the adapter is refused.
 * Nothing is skipped silently: what is left out is on the receipt.
 */
#include "adapter/audit.h"

#include "base/alloc.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void sp_audit_ignore(sp_audit *audit, const char *tensor, const char *reason)
{
    sp_remarks *ignored = &audit->adapter->ignored;

    sp_text_add_bytes(&ignored->text, tensor, strlen(tensor) + 1);
    sp_text_add_bytes(&ignored->text, reason, strlen(reason) + 1);
    ignored->n++;
}

bool sp_reason_is_partial(const char *code)
{
    return strcmp(code, sp_reason_name(SP_REASON_UNSUPPORTED_MODULE)) == 0 ||
           strcmp(code, sp_reason_name(SP_REASON_UNMATCHED_TARGET)) == 0 ||
           strcmp(code, sp_reason_name(SP_REASON_UNKNOWN_PREFIX)) == 0;
}

bool sp_key_is_expert(const sp_module_key *key)
{
    return key->kind == SP_SITE_ROUTER || key->kind == SP_SITE_EXPERT;
}

bool sp_item_is_copy(const sp_item *item)
{
    return item->key.role == SP_ROLE_BASE_COPY || item->key.role == SP_ROLE_BIAS_COPY;
}

const char *sp_audit_table_name(const sp_audit *audit, sp_site_kind kind)
{
    return sp_geometry_table_name(audit->options->geometry, kind);
}

sp_module_set sp_audit_module_bit(const sp_adapter *adapter, const sp_module_key *key)
{
    if (key->site >= 0)
        return (sp_module_set)1 << sp_geometry_row(adapter->geometry, key->site)->module;
    return key->module >= 0 ? SP_MODULE_BIT(key->module) : 0;
}

/* ---- names ----------------------------------------------------------------------------------- */

static sp_status refuse_role(const sp_audit *audit, const char *name, sp_key_role role)
{
    if (role == SP_ROLE_MAGNITUDE)
        return sp_refuse(audit->error, SP_REASON_DORA, name, -1,
                         "%.200s is a magnitude vector: DoRA is not served", name);
    return sp_refuse(audit->error, SP_REASON_BIAS, name, -1,
                     "%.200s: trained biases are not served", name);
}

/* "[4, 64]" */
static void write_shape(const sp_tensor *tensor, char *out_text, size_t bytes)
{
    size_t at = (size_t)snprintf(out_text, bytes, "[");

    for (int32_t i = 0; i < tensor->n_dims && at + 24 < bytes; i++)
        at += (size_t)snprintf(out_text + at, bytes - at, "%s%lld", i > 0 ? ", " : "",
                               (long long)tensor->dims[i]);
    snprintf(out_text + at, bytes - at, "]");
}

static sp_status check_dtype(const sp_audit *audit, const sp_tensor *tensor, sp_item *item)
{
    int32_t n_dims = item->key.role == SP_ROLE_BIAS_COPY ? 1 : 2;
    char shape[128];

    write_shape(tensor, shape, sizeof shape);
    if (!sp_tensor_type_dtype(tensor->type, &item->dtype))
        return sp_refuse(audit->error, SP_REASON_UNSUPPORTED_DTYPE, tensor->name, -1,
                         "%.200s is stored as %s; F32, F16 and BF16 are served", tensor->name,
                         sp_tensor_type_name(tensor->type));
    if (tensor->bytes == 0)
        return sp_refuse(audit->error, SP_REASON_EMPTY_ADAPTER, tensor->name, -1,
                         "%.200s is %s: it has no elements", tensor->name, shape);
    if (tensor->n_dims != n_dims || tensor->dims[0] > INT32_MAX ||
        tensor->dims[n_dims - 1] > INT32_MAX)
        return sp_refuse(audit->error, SP_REASON_SHAPE_MISMATCH, tensor->name, -1,
                         "%.200s is %s, of %d dimensions; it must have %s", tensor->name, shape,
                         tensor->n_dims, n_dims == 1 ? "one" : "two");
    return SP_OK;
}

static sp_status check_experts_off(const sp_audit *audit, const sp_module_key *key,
                                   const char *name)
{
    if (!sp_key_is_expert(key) || !audit->options->experts_off)
        return SP_OK;
    return sp_refuse(audit->error, SP_REASON_EXPERTS_DISABLED, name, -1,
                     "%.200s: adapters of router and experts are switched off (experts)", name);
}

/* Checks name, place and type: all that one tensor alone determines. */
static sp_status read_item(sp_audit *audit, const sp_tensor *tensor, sp_item *item)
{
    sp_status status =
        sp_module_key_read(audit->options->geometry, tensor->name, &item->key, audit->error);

    if (status != SP_OK)
        return status;
    item->tensor = tensor;
    if (item->key.role == SP_ROLE_MAGNITUDE || item->key.role == SP_ROLE_BIAS)
        return refuse_role(audit, tensor->name, item->key.role);
    status = check_experts_off(audit, &item->key, tensor->name);
    return status == SP_OK ? check_dtype(audit, tensor, item) : status;
}

static bool same_adapter_name(const sp_module_key *a, const sp_module_key *b)
{
    return a->adapter_name_bytes == b->adapter_name_bytes &&
           (a->adapter_name_bytes == 0 ||
            memcmp(a->adapter_name, b->adapter_name, a->adapter_name_bytes) == 0);
}

/* False for tables, which PEFT writes without an adapter name even where other keys have one. */
static bool can_have_name(const sp_module_key *key)
{
    return key->role == SP_ROLE_A || key->role == SP_ROLE_B || key->role == SP_ROLE_TOKENS ||
           key->adapter_name_bytes > 0;
}

static sp_status check_adapter_names(const sp_audit *audit)
{
    const sp_item *first = NULL;

    for (size_t i = 0; i < audit->n_items; i++) {
        const sp_item *item = &audit->items[i];

        if (!can_have_name(&item->key))
            continue;
        if (!first)
            first = item;
        if (!same_adapter_name(&first->key, &item->key))
            return sp_refuse(audit->error, SP_REASON_MIXED_ADAPTER_NAMES, item->tensor->name, -1,
                             "%.150s carries the adapter name \"%.*s\", %.150s \"%.*s\"",
                             item->tensor->name, (int)item->key.adapter_name_bytes,
                             item->key.adapter_name_bytes ? item->key.adapter_name : "",
                             first->tensor->name, (int)first->key.adapter_name_bytes,
                             first->key.adapter_name_bytes ? first->key.adapter_name : "");
    }
    return SP_OK;
}

static sp_status read_items(sp_audit *audit)
{
    size_t n = audit->n_tensors;
    sp_error *error = audit->error;
    sp_error local;

    if (n == 0)
        return sp_refuse(error, SP_REASON_EMPTY_ADAPTER, NULL, -1, "the adapter has no tensors");
    audit->items = sp_calloc(n, sizeof *audit->items);
    if (!audit->items)
        return sp_fail_memory(error, n * sizeof *audit->items, "a list of tensors");
    for (size_t i = 0; i < n; i++) {
        const sp_tensor *tensor = &audit->tensors[i];
        sp_status status;

        audit->error = &local;
        status = read_item(audit, tensor, &audit->items[audit->n_items]);
        audit->error = error;
        if (status == SP_OK) {
            audit->n_items++;
        } else if (audit->options->allow_partial && sp_reason_is_partial(local.code)) {
            sp_audit_ignore(audit, tensor->name, local.code);
        } else {
            if (error)
                *error = local;
            return status;
        }
    }
    if (audit->n_items == 0)
        return sp_refuse(error, SP_REASON_EMPTY_ADAPTER, NULL, -1,
                         "of the adapter's %zu tensors none can be applied", n);
    return SP_OK;
}

/* ---- order and twins ------------------------------------------------------------------------- */

/* Compares without the trunk, which carries no information. */
static int compare_paths(const sp_module_key *a, const sp_module_key *b)
{
    size_t a_trunk = sp_path_trunk_bytes(a->path, a->path_bytes);
    size_t b_trunk = sp_path_trunk_bytes(b->path, b->path_bytes);
    size_t a_bytes = a->path_bytes - a_trunk, b_bytes = b->path_bytes - b_trunk;
    int order = memcmp(a->path + a_trunk, b->path + b_trunk, a_bytes < b_bytes ? a_bytes : b_bytes);

    return order != 0 ? order : (a_bytes > b_bytes) - (a_bytes < b_bytes);
}

/* The digest's order: by the names, independent of the numbers of the host's rows. */
static int compare_places(const sp_module_key *a, const sp_module_key *b)
{
    if ((a->module == SP_MODULE_OTHER) != (b->module == SP_MODULE_OTHER))
        return a->module == SP_MODULE_OTHER ? 1 : -1;
    if (a->module == SP_MODULE_OTHER)
        return compare_paths(a, b);
    if (a->layer != b->layer)
        return a->layer < b->layer ? -1 : 1;
    if (a->module != b->module)
        return a->module < b->module ? -1 : 1;
    if (a->expert != b->expert)
        return a->expert < b->expert ? -1 : 1;
    return (a->fused > b->fused) - (a->fused < b->fused);
}

static int by_place(const void *left, const void *right)
{
    const sp_item *a = left;
    const sp_item *b = right;
    int order = compare_places(&a->key, &b->key);

    if (order == 0)
        order = (a->key.role > b->key.role) - (a->key.role < b->key.role);
    return order != 0 ? order : strcmp(a->tensor->name, b->tensor->name);
}

static sp_status sort_items(sp_audit *audit)
{
    qsort(audit->items, audit->n_items, sizeof *audit->items, by_place);
    for (size_t i = 1; i < audit->n_items; i++) {
        const sp_item *twin = &audit->items[i];

        if (compare_places(&twin[-1].key, &twin->key) == 0 && twin[-1].key.role == twin->key.role)
            return sp_refuse(audit->error, SP_REASON_DUPLICATE_TENSOR, twin->tensor->name, -1,
                             "%.200s and %.200s stand for the same place", twin[-1].tensor->name,
                             twin->tensor->name);
    }
    return SP_OK;
}

/* ---- pairs ----------------------------------------------------------------------------------- */

static bool is_factor(const sp_item *item)
{
    return item->key.role == SP_ROLE_A || item->key.role == SP_ROLE_B;
}

static sp_status make_pairs(sp_audit *audit)
{
    audit->pairs = sp_calloc(audit->n_items, sizeof *audit->pairs);
    if (!audit->pairs)
        return sp_fail_memory(audit->error, audit->n_items * sizeof *audit->pairs, "pairs");
    for (size_t i = 0; i < audit->n_items; i++) {
        const sp_item *item = &audit->items[i];
        bool has_next = i + 1 < audit->n_items && is_factor(&item[1]) &&
                        compare_places(&item->key, &item[1].key) == 0;

        if (!is_factor(item))
            continue;
        if (!has_next || item->key.role != SP_ROLE_A)
            return sp_refuse(audit->error, SP_REASON_UNPAIRED_TENSOR, item->tensor->name, -1,
                             "%.200s has no lora_%c beside it", item->tensor->name,
                             item->key.role == SP_ROLE_A ? 'B' : 'A');
        audit->pairs[audit->n_pairs++] = (sp_pair){.a = item, .b = item + 1};
        i++;
    }
    return SP_OK;
}

static sp_status refuse_shape(const sp_audit *audit, const sp_item *item, const char *wanted)
{
    return sp_refuse(audit->error, SP_REASON_SHAPE_MISMATCH, item->tensor->name, -1,
                     "%.200s is [%lld, %lld]; the base model wants %s", item->tensor->name,
                     (long long)item->tensor->dims[0], (long long)item->tensor->dims[1], wanted);
}

static sp_status check_pair_shapes(const sp_audit *audit, const sp_pair *pair)
{
    char wanted[64];

    if (audit->options->geometry) {
        const sp_site_row *row = sp_geometry_row(audit->options->geometry, pair->a->key.site);

        snprintf(wanted, sizeof wanted, "[%d, %d]", pair->rank, row->k_in);
        if (pair->a->tensor->dims[1] != row->k_in)
            return refuse_shape(audit, pair->a, wanted);
        snprintf(wanted, sizeof wanted, "[%d, %d]", row->n_out, pair->rank);
        if (pair->b->tensor->dims[0] != row->n_out)
            return refuse_shape(audit, pair->b, wanted);
    }
    if (pair->a->tensor->dims[0] != pair->b->tensor->dims[1])
        return sp_refuse(audit->error, SP_REASON_SHAPE_MISMATCH, pair->b->tensor->name, -1,
                         "%.150s has rank %lld, but %.150s has rank %lld", pair->a->tensor->name,
                         (long long)pair->a->tensor->dims[0], pair->b->tensor->name,
                         (long long)pair->b->tensor->dims[1]);
    if (pair->a->tensor->dims[0] != pair->rank)
        return sp_refuse(audit->error, SP_REASON_RANK_MISMATCH, pair->a->tensor->name, -1,
                         "%.200s is [%lld, %lld]; adapter_config.json gives it rank %d",
                         pair->a->tensor->name, (long long)pair->a->tensor->dims[0],
                         (long long)pair->a->tensor->dims[1], pair->rank);
    return SP_OK;
}

/* PEFT identifies the router as a parameter by the parameter's path. */
static sp_status pair_scale(const sp_audit *audit, sp_pair *pair)
{
    static const char suffix[] = ".weight";
    const sp_module_key *key = &pair->a->key;
    const sp_name_rule *parameters = &audit->config.target_parameters;
    char path[512];
    bool listed = false;
    sp_status status = SP_OK;

    if (key->kind == SP_SITE_ROUTER && key->path_bytes + sizeof suffix <= sizeof path) {
        snprintf(path, sizeof path, "%.*s%s", (int)key->path_bytes, key->path, suffix);
        status = sp_name_rule_match(parameters, path, strlen(path), &listed, audit->error);
    }
    if (status == SP_OK && listed)
        return sp_peft_config_scale(&audit->config, path, strlen(path), &pair->rank, &pair->scale,
                                    audit->error);
    if (status == SP_OK)
        status = sp_peft_config_scale(&audit->config, key->path, key->path_bytes, &pair->rank,
                                      &pair->scale, audit->error);
    return status;
}

/* Router and experts have a limit of their own. */
static sp_status check_rank_limit(const sp_audit *audit, const sp_pair *pair)
{
    bool expert = sp_key_is_expert(&pair->a->key);
    int32_t limit = expert ? audit->options->expert_rank_max : audit->options->rank_max;
    int32_t *largest = expert ? &audit->adapter->expert_rank_max : &audit->adapter->rank_max;

    if (pair->rank > *largest)
        *largest = pair->rank;
    if (limit <= 0 || pair->rank <= limit)
        return SP_OK;
    if (expert)
        return sp_refuse(audit->error, SP_REASON_EXPERT_RANK_EXCEEDS_CAP, pair->a->tensor->name,
                         pair->rank,
                         "%.200s has rank %d for each expert; at most %d is taken: raise "
                         "max-lora-expert-rank",
                         pair->a->tensor->name, pair->rank, limit);
    return sp_refuse(audit->error, SP_REASON_RANK_EXCEEDS_POOL, pair->a->tensor->name, pair->rank,
                     "%.200s has rank %d; the pool takes at most %d (max-lora-rank)",
                     pair->a->tensor->name, pair->rank, limit);
}

/* The other fused pair of the layer, which is next to this one in the list; or NULL. */
static const sp_pair *fused_sibling(const sp_audit *audit, size_t i)
{
    const sp_pair *pair = &audit->pairs[i];
    const sp_pair *other = NULL;

    if (pair->a->key.fused == SP_FUSED_OUTER && i + 1 < audit->n_pairs)
        other = pair + 1;
    if (pair->a->key.fused == SP_FUSED_INNER && i > 0)
        other = pair - 1;
    if (!other || other->a->key.fused == SP_FUSED_NONE || other->a->key.layer != pair->a->key.layer)
        return NULL;
    return other;
}

static sp_status check_pairs(sp_audit *audit)
{
    for (size_t i = 0; i < audit->n_pairs; i++) {
        sp_pair *pair = &audit->pairs[i];
        sp_status status;

        if (pair->a->key.fused != SP_FUSED_NONE) {
            status = sp_audit_fused(audit, pair, fused_sibling(audit, i));
        } else {
            status = pair_scale(audit, pair);
            if (status == SP_OK)
                status = check_pair_shapes(audit, pair);
        }
        if (status == SP_OK)
            status = check_rank_limit(audit, pair);
        if (status != SP_OK)
            return status;
    }
    return SP_OK;
}

/* An inner pair alone: its outer one is missing. */
static sp_status check_nesting(const sp_audit *audit)
{
    for (size_t i = 0; i < audit->n_pairs; i++) {
        const sp_item *a = audit->pairs[i].a;

        if (a->key.fused == SP_FUSED_INNER && !fused_sibling(audit, i))
            return sp_refuse(audit->error, SP_REASON_UNPAIRED_TENSOR, a->tensor->name, -1,
                             "%.200s has no mlp.experts.lora_A outside of it", a->tensor->name);
    }
    return SP_OK;
}

sp_status sp_audit_names(sp_audit *audit)
{
    sp_status status = read_items(audit);

    if (status == SP_OK)
        status = check_adapter_names(audit);
    if (status == SP_OK)
        status = sort_items(audit);
    if (status == SP_OK)
        status = make_pairs(audit);
    if (status == SP_OK)
        status = check_nesting(audit);
    if (status == SP_OK)
        status = check_pairs(audit);
    return status;
}
