/*
 * schema_array.c: arrays. Items by place ("prefixItems") come first; after them "items", from
 * "minItems" to "maxItems" in all.
 */
#include "grammar/schema.h"

#include <stdio.h>

typedef struct array_shape {
    const json_t *prefix; /* NULL: none */
    int64_t n_prefix;
    const json_t *items; /* NULL: none after the prefix; else a schema */
    bool any_items;      /* of any value */
    int64_t least, most; /* most -1: any number */
} array_shape;

static array_shape shape_of(sp_schema_maker *maker, const sp_schema_task *task)
{
    array_shape shape = {.prefix = json_object_get(task->schema, "prefixItems"),
                         .items = json_object_get(task->schema, "items")};

    if (shape.prefix && (!json_is_array(shape.prefix) || json_array_size(shape.prefix) == 0))
        sp_schema_refuse(maker, SP_GRAMMAR_MALFORMED, task->path, "prefixItems",
                         "is not a list of schemas");
    if (json_is_array(shape.items))
        sp_schema_refuse(maker, SP_GRAMMAR_UNSUPPORTED, task->path, "items",
                         "as a list is not supported: \"prefixItems\" is");
    shape.n_prefix = (int64_t)json_array_size(shape.prefix);
    shape.any_items = !shape.items && !shape.prefix;
    shape.least = sp_schema_count(maker, task, "minItems", 0);
    shape.most = sp_schema_count(maker, task, "maxItems", -1);
    if (json_is_false(shape.items) || (!shape.items && shape.prefix)) {
        shape.items = NULL;
        if (shape.most < 0 || shape.most > shape.n_prefix)
            shape.most = shape.n_prefix;
    }
    return shape;
}

static int32_t item_rule(sp_schema_maker *maker, const sp_schema_task *task,
                         const array_shape *shape, int64_t i)
{
    sp_text path = {0};
    int32_t rule;

    if (i >= shape->n_prefix && shape->any_items)
        return sp_json_rule(maker, SP_JSON_VALUE);
    if (i < shape->n_prefix) {
        char index[24];

        snprintf(index, sizeof index, "%lld", (long long)i);
        sp_schema_path(&path, task->path, "prefixItems", index);
        rule = sp_schema_rule(maker, json_array_get(shape->prefix, (size_t)i), path.data);
    } else {
        sp_schema_path(&path, task->path, "items", NULL);
        rule = sp_schema_rule(maker, shape->items, path.data);
    }
    sp_text_free(&path);
    return rule;
}

void sp_schema_add_array(sp_schema_maker *maker, const sp_schema_task *task, int32_t start,
                         int32_t end)
{
    sp_net_builder *net = &maker->net;
    array_shape shape = shape_of(maker, task);
    int32_t blank = sp_json_rule(maker, SP_JSON_BLANK), item = sp_net_node_add(net);
    int32_t close = sp_net_node_add(net), first = sp_net_node_add(net), after;
    /* Items that are told apart: those of the prefix and those that are counted. */
    int64_t counted = shape.most >= 0
                          ? shape.most
                          : (shape.least > shape.n_prefix ? shape.least : shape.n_prefix);

    sp_net_call(net, sp_net_literal(net, start, "[", 1), blank, first);
    sp_net_nothing(net, first, item);
    sp_net_bytes(net, close, ']', ']', end);
    if (shape.least == 0)
        sp_net_nothing(net, first, close);
    for (int64_t i = 0; i < counted && !sp_schema_failed(maker); i++) {
        after = sp_net_node_add(net);
        sp_net_call(net, item, item_rule(maker, task, &shape, i), after);
        if (i + 1 >= shape.least)
            sp_net_call(net, after, blank, close);
        item = sp_net_node_add(net);
        sp_net_call(net, sp_net_text(net, after, ",", 1), blank, item);
    }
    if (shape.most >= 0 || sp_schema_failed(maker))
        return;
    after = sp_net_node_add(net);
    sp_net_call(net, item, item_rule(maker, task, &shape, counted), after);
    sp_net_call(net, after, blank, close);
    sp_net_call(net, sp_net_text(net, after, ",", 1), blank, item);
}
