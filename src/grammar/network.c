#include "grammar/network.h"

#include "base/alloc.h"
#include "base/error.h"

#include <string.h>

#define HEIGHT_NONE INT32_MAX

/* ---- building ------------------------------------------------------------------------------ */

void sp_net_builder_free(sp_net_builder *builder)
{
    sp_free(builder->links);
    sp_free(builder->first);
    sp_free(builder->last);
    sp_free(builder->is_end);
    sp_free(builder->starts);
    *builder = (sp_net_builder){0};
}

/* False, with a failure kept: no room for one more element of an array. */
static bool grow(sp_net_builder *builder, void **array, size_t element_bytes, int32_t capacity)
{
    void *grown = sp_realloc(*array, (size_t)capacity * element_bytes);

    if (!grown)
        builder->status = SP_ERR_MEMORY;
    else
        *array = grown;
    return grown != NULL;
}

static bool reserve_node(sp_net_builder *builder)
{
    int32_t capacity = builder->nodes_capacity ? builder->nodes_capacity * 2 : 256;

    if (builder->status != SP_OK)
        return false;
    if (builder->n_nodes >= SP_NET_NODES_MAX) {
        builder->status = SP_ERR_TOO_LARGE;
        return false;
    }
    if (builder->n_nodes < builder->nodes_capacity)
        return true;
    if (!grow(builder, (void **)&builder->first, sizeof *builder->first, capacity) ||
        !grow(builder, (void **)&builder->last, sizeof *builder->last, capacity) ||
        !grow(builder, (void **)&builder->is_end, sizeof *builder->is_end, capacity))
        return false;
    builder->nodes_capacity = capacity;
    return true;
}

int32_t sp_net_node_add(sp_net_builder *builder)
{
    int32_t node = builder->n_nodes;

    if (!reserve_node(builder))
        return 0;
    builder->first[node] = builder->last[node] = -1;
    builder->is_end[node] = false;
    builder->n_nodes++;
    return node;
}

int32_t sp_net_rule(sp_net_builder *builder)
{
    int32_t capacity = builder->rules_capacity ? builder->rules_capacity * 2 : 64;
    int32_t start = sp_net_node_add(builder);

    if (builder->status != SP_OK)
        return 0;
    if (builder->n_rules == builder->rules_capacity) {
        if (!grow(builder, (void **)&builder->starts, sizeof *builder->starts, capacity))
            return 0;
        builder->rules_capacity = capacity;
    }
    builder->starts[builder->n_rules] = start;
    return builder->n_rules++;
}

int32_t sp_net_start(const sp_net_builder *builder, int32_t rule)
{
    return builder->status == SP_OK ? builder->starts[rule] : 0;
}

void sp_net_end(sp_net_builder *builder, int32_t node)
{
    if (builder->status == SP_OK)
        builder->is_end[node] = true;
}

static void add_edge(sp_net_builder *builder, int32_t from, sp_net_edge edge)
{
    int32_t capacity = builder->links_capacity ? builder->links_capacity * 2 : 512;
    int32_t at = builder->n_links;

    if (builder->status != SP_OK)
        return;
    if (at >= SP_NET_EDGES_MAX) {
        builder->status = SP_ERR_TOO_LARGE;
        return;
    }
    if (at == builder->links_capacity) {
        if (!grow(builder, (void **)&builder->links, sizeof *builder->links, capacity))
            return;
        builder->links_capacity = capacity;
    }
    builder->links[at] = (sp_net_link){edge, -1};
    if (builder->last[from] >= 0)
        builder->links[builder->last[from]].next = at;
    else
        builder->first[from] = at;
    builder->last[from] = at;
    builder->n_links++;
}

void sp_net_bytes(sp_net_builder *builder, int32_t from, uint8_t low, uint8_t high, int32_t to)
{
    add_edge(builder, from,
             (sp_net_edge){.to = to, .rule = SP_NET_BYTES, .low = low, .high = high});
}

void sp_net_nothing(sp_net_builder *builder, int32_t from, int32_t to)
{
    add_edge(builder, from, (sp_net_edge){.to = to, .rule = SP_NET_NOTHING});
}

void sp_net_call(sp_net_builder *builder, int32_t from, int32_t rule, int32_t to)
{
    add_edge(builder, from, (sp_net_edge){.to = to, .rule = rule});
}

/* The node after one byte, where an edge for it alone is there already; -1: none. */
static int32_t after_byte(const sp_net_builder *builder, int32_t from, uint8_t byte)
{
    for (int32_t at = builder->first[from]; at >= 0; at = builder->links[at].next) {
        const sp_net_edge *edge = &builder->links[at].edge;

        if (edge->rule == SP_NET_BYTES && edge->low == byte && edge->high == byte)
            return edge->to;
    }
    return -1;
}

int32_t sp_net_literal(sp_net_builder *builder, int32_t from, const char *bytes, size_t n)
{
    for (size_t i = 0; i < n && builder->status == SP_OK; i++) {
        uint8_t byte = (uint8_t)bytes[i];
        int32_t to = after_byte(builder, from, byte);

        if (to < 0) {
            to = sp_net_node_add(builder);
            sp_net_bytes(builder, from, byte, byte, to);
        }
        from = to;
    }
    return from;
}

int32_t sp_net_text(sp_net_builder *builder, int32_t from, const char *bytes, size_t n)
{
    for (size_t i = 0; i < n && builder->status == SP_OK; i++) {
        int32_t to = sp_net_node_add(builder);

        sp_net_bytes(builder, from, (uint8_t)bytes[i], (uint8_t)bytes[i], to);
        from = to;
    }
    return from;
}

/* ---- finishing ----------------------------------------------------------------------------- */

static int32_t larger(int32_t a, int32_t b)
{
    return a > b ? a : b;
}

static int32_t height_through(const sp_net *net, const sp_net_edge *edge)
{
    int32_t after = net->nodes[edge->to].height, inside;

    if (edge->rule < 0 || after == HEIGHT_NONE)
        return after;
    inside = net->nodes[net->starts[edge->rule]].height;
    if (inside == HEIGHT_NONE)
        return HEIGHT_NONE;
    return sp_net_is_bare_end(net, edge->to) ? inside : larger(inside + 1, after);
}

static bool lower_height(const sp_net *net, sp_net_node *node)
{
    int32_t height = node->is_end ? 0 : HEIGHT_NONE;

    for (int32_t i = 0; i < node->n_edges; i++) {
        int32_t through = height_through(net, &net->edges[node->first_edge + i]);

        if (through < height)
            height = through;
    }
    if (height > SP_NET_HEIGHT_MAX || height >= node->height)
        return false;
    node->height = height;
    return true;
}

/* For each node those whose height depends on it. */
typedef struct dependents {
    int32_t *first; /* [n_nodes + 1] */
    int32_t *nodes;
    int32_t *work; /* nodes whose height has fallen, each at most once */
    bool *listed;
} dependents;

static void free_dependents(dependents *by)
{
    sp_free(by->first);
    sp_free(by->nodes);
    sp_free(by->work);
    sp_free(by->listed);
}

static void count_dependent(dependents *by, int32_t on)
{
    by->first[on + 1]++;
}

static void add_dependent(dependents *by, int32_t on, int32_t node)
{
    by->nodes[--by->first[on + 1]] = node;
}

static bool make_dependents(const sp_net *net, dependents *by)
{
    size_t n_edges = 0;

    for (int32_t i = 0; i < net->n_nodes; i++)
        n_edges += (size_t)net->nodes[i].n_edges;
    *by = (dependents){.first = sp_calloc((size_t)net->n_nodes + 2, sizeof *by->first),
                       .nodes = sp_calloc(2 * n_edges + 1, sizeof *by->nodes),
                       .work = sp_calloc((size_t)net->n_nodes, sizeof *by->work),
                       .listed = sp_calloc((size_t)net->n_nodes, sizeof *by->listed)};
    if (!by->first || !by->nodes || !by->work || !by->listed)
        return false;
    for (int pass = 0; pass < 2; pass++) {
        for (int32_t i = 0; i < net->n_nodes; i++)
            for (int32_t e = 0; e < net->nodes[i].n_edges; e++) {
                const sp_net_edge *edge = &net->edges[net->nodes[i].first_edge + e];
                int32_t start = edge->rule >= 0 ? net->starts[edge->rule] : -1;

                if (pass == 0) {
                    count_dependent(by, edge->to);
                    if (start >= 0)
                        count_dependent(by, start);
                } else {
                    add_dependent(by, edge->to, i);
                    if (start >= 0)
                        add_dependent(by, start, i);
                }
            }
        for (int32_t i = 1; pass == 0 && i <= net->n_nodes + 1; i++)
            by->first[i] += by->first[i - 1];
    }
    return true;
}

/* Heights only fall, from the ends backwards. False: out of memory. */
static bool find_heights(sp_net *net)
{
    dependents by;
    int32_t n_work = 0;
    bool made = make_dependents(net, &by);

    for (int32_t i = 0; made && i < net->n_nodes; i++) {
        net->nodes[i].height = net->nodes[i].is_end ? 0 : HEIGHT_NONE;
        by.listed[i] = net->nodes[i].is_end;
        if (by.listed[i])
            by.work[n_work++] = i;
    }
    while (made && n_work > 0) {
        int32_t node = by.work[--n_work];

        by.listed[node] = false;
        for (int32_t at = by.first[node + 1]; at < by.first[node + 2]; at++) {
            int32_t other = by.nodes[at];

            if (!lower_height(net, &net->nodes[other]) || by.listed[other])
                continue;
            by.listed[other] = true;
            by.work[n_work++] = other;
        }
    }
    free_dependents(&by);
    return made;
}

/* Edges that lead nowhere are left out, so that a state that exists can always be left. */
static void prune(sp_net *net)
{
    for (int32_t i = 0; i < net->n_nodes; i++) {
        sp_net_node *node = &net->nodes[i];
        sp_net_edge *edges = net->edges + node->first_edge;
        int32_t n = 0;

        for (int32_t e = 0; e < node->n_edges; e++) {
            if (height_through(net, &edges[e]) > SP_NET_HEIGHT_MAX)
                continue;
            node->has_bytes |= edges[e].rule == SP_NET_BYTES;
            edges[n++] = edges[e];
        }
        node->n_edges = n;
    }
}

static sp_status copy_out(const sp_net_builder *builder, sp_net *net)
{
    int32_t at = 0;

    net->nodes = sp_calloc((size_t)builder->n_nodes, sizeof *net->nodes);
    net->edges = sp_calloc((size_t)builder->n_links + 1, sizeof *net->edges);
    net->starts = sp_calloc((size_t)builder->n_rules, sizeof *net->starts);
    if (!net->nodes || !net->edges || !net->starts)
        return SP_ERR_MEMORY;
    for (int32_t i = 0; i < builder->n_nodes; i++) {
        sp_net_node *node = &net->nodes[i];

        node->first_edge = at;
        node->is_end = builder->is_end[i];
        for (int32_t link = builder->first[i]; link >= 0; link = builder->links[link].next)
            net->edges[at++] = builder->links[link].edge;
        node->n_edges = at - node->first_edge;
    }
    memcpy(net->starts, builder->starts, (size_t)builder->n_rules * sizeof *net->starts);
    net->n_nodes = builder->n_nodes;
    net->n_rules = builder->n_rules;
    net->depth_max = builder->depth_max ? builder->depth_max : SP_NET_DEPTH_MAX;
    return SP_OK;
}

static sp_status fail_building(sp_status status, sp_error *error)
{
    if (status == SP_ERR_TOO_LARGE)
        return sp_fail(error, status, SP_GRAMMAR_TOO_LARGE, NULL, -1,
                       "the grammar has more than %d nodes or %d edges", SP_NET_NODES_MAX,
                       SP_NET_EDGES_MAX);
    return sp_fail_memory(error, 0, "a grammar");
}

sp_status sp_net_finish(sp_net_builder *builder, sp_net *out_net, sp_error *error)
{
    sp_net net = {0};
    sp_status status = builder->status;

    if (status == SP_OK)
        status = copy_out(builder, &net);
    sp_net_builder_free(builder);
    if (status != SP_OK) {
        sp_net_free(&net);
        return fail_building(status, error);
    }
    if (!find_heights(&net)) {
        sp_net_free(&net);
        return fail_building(SP_ERR_MEMORY, error);
    }
    prune(&net);
    if (net.nodes[net.starts[0]].height > SP_NET_HEIGHT_MAX) {
        sp_net_free(&net);
        return sp_fail(error, SP_ERR_INPUT, SP_GRAMMAR_UNSATISFIABLE, NULL, -1,
                       "no text can satisfy it (or only one that is nested more than %d deep)",
                       SP_NET_HEIGHT_MAX);
    }
    *out_net = net;
    return SP_OK;
}

void sp_net_free(sp_net *net)
{
    sp_free(net->nodes);
    sp_free(net->edges);
    sp_free(net->starts);
    *net = (sp_net){0};
}

size_t sp_net_memory(const sp_net *net)
{
    size_t edges = 0;

    for (int32_t i = 0; i < net->n_nodes; i++)
        edges += (size_t)net->nodes[i].n_edges;
    return (size_t)net->n_nodes * sizeof *net->nodes + edges * sizeof *net->edges +
           (size_t)net->n_rules * sizeof *net->starts;
}
