/*
 * regex.c: a pattern's tree into a network with many ways for one text, and that into one with a
 * single way (the subset construction), which is what a rule gets.
 */
#include "grammar/regex.h"

#include "base/alloc.h"
#include "base/error.h"
#include "grammar/regex_tree.h"

#include <stdlib.h>
#include <string.h>

/* ---- characters as bytes ------------------------------------------------------------------- */

static int utf8_encode(int32_t character, uint8_t out[4])
{
    if (character < 0x80) {
        out[0] = (uint8_t)character;
        return 1;
    }
    if (character < 0x800) {
        out[0] = (uint8_t)(0xc0 | character >> 6);
        out[1] = (uint8_t)(0x80 | (character & 0x3f));
        return 2;
    }
    if (character < 0x10000) {
        out[0] = (uint8_t)(0xe0 | character >> 12);
        out[1] = (uint8_t)(0x80 | (character >> 6 & 0x3f));
        out[2] = (uint8_t)(0x80 | (character & 0x3f));
        return 3;
    }
    out[0] = (uint8_t)(0xf0 | character >> 18);
    out[1] = (uint8_t)(0x80 | (character >> 12 & 0x3f));
    out[2] = (uint8_t)(0x80 | (character >> 6 & 0x3f));
    out[3] = (uint8_t)(0x80 | (character & 0x3f));
    return 4;
}

/* Characters whose bytes are all pairs within the bytes of low and high. */
static void add_run(sp_net_builder *net, int32_t from, int32_t low, int32_t high, int32_t to)
{
    uint8_t first[4], last[4];
    int n = utf8_encode(low, first);

    utf8_encode(high, last);
    for (int i = 0; i < n; i++) {
        int32_t next = i + 1 < n ? sp_net_node_add(net) : to;

        sp_net_bytes(net, from, first[i], last[i], next);
        from = next;
    }
}

/* Splits a range of characters of one length until each part is such a run. */
static void add_same_length(sp_net_builder *net, int32_t from, int32_t low, int32_t high, int n,
                            int32_t to)
{
    for (int i = 1; i < n; i++) {
        int32_t mask = (1 << 6 * i) - 1;

        if ((low & ~mask) == (high & ~mask))
            break;
        if ((low & mask) != 0) {
            add_same_length(net, from, low, low | mask, n, to);
            add_same_length(net, from, (low | mask) + 1, high, n, to);
            return;
        }
        if ((high & mask) != mask) {
            add_same_length(net, from, low, (high & ~mask) - 1, n, to);
            add_same_length(net, from, high & ~mask, high, n, to);
            return;
        }
    }
    add_run(net, from, low, high, to);
}

static void add_characters(sp_net_builder *net, int32_t from, sp_code_range range, int32_t to)
{
    static const int32_t last_of_length[4] = {0x7f, 0x7ff, 0xffff, SP_CODE_POINT_MAX};
    int32_t low = range.low;

    for (int n = 1; n <= 4 && low <= range.high; n++) {
        int32_t high = range.high < last_of_length[n - 1] ? range.high : last_of_length[n - 1];

        if (low > high)
            continue;
        add_same_length(net, from, low, high, n, to);
        low = high + 1;
    }
}

/* A character that JSON has an escape for. U+0000 is left out: few readers take it. */
static void add_escaped(sp_net_builder *net, int32_t from, int32_t character, int32_t to)
{
    static const char letters[] = "btnfr\"\\", values[] = "\b\t\n\f\r\"\\";
    static const char digits[] = "0123456789abcdef";
    const char *found = character ? strchr(values, character) : NULL;
    char text[7] = "\\u00";
    size_t n = 6;

    if (character == 0)
        return;
    text[4] = digits[character >> 4];
    text[5] = digits[character & 15];
    if (found) {
        text[1] = letters[found - values];
        n = 2;
    }
    sp_net_nothing(net, sp_net_text(net, from, text, n), to);
}

static void add_in_string(sp_net_builder *net, int32_t from, sp_code_range range, int32_t to)
{
    static const int32_t escaped[] = {'"', '\\'};
    int32_t low = range.low;

    for (; low < 0x20 && low <= range.high; low++)
        add_escaped(net, from, low, to);
    for (int i = 0; i < 2; i++) {
        if (escaped[i] < low || escaped[i] > range.high)
            continue;
        add_characters(net, from, (sp_code_range){low, escaped[i] - 1}, to);
        add_escaped(net, from, escaped[i], to);
        low = escaped[i] + 1;
    }
    add_characters(net, from, (sp_code_range){low, range.high}, to);
}

/* ---- the tree as a network ------------------------------------------------------------------ */

typedef struct emitter {
    sp_net_builder net; /* with many ways for one text */
    const sp_regex_tree *tree;
    sp_regex_form form;
} emitter;

static int32_t emit(emitter *out, int32_t node, int32_t from);

static void add_range(emitter *out, int32_t from, sp_code_range range, int32_t to)
{
    if (out->form == SP_REGEX_STRING)
        add_in_string(&out->net, from, range, to);
    else
        add_characters(&out->net, from, range, to);
}

static int32_t emit_class(emitter *out, const sp_regex_node *node, int32_t from)
{
    int32_t to = sp_net_node_add(&out->net);

    for (int32_t i = 0; i < node->n; i++)
        add_range(out, from, out->tree->ranges[node->first + i], to);
    return to;
}

static int32_t emit_repeat(emitter *out, const sp_regex_node *node, int32_t from)
{
    int32_t to;

    for (int32_t i = 0; i < node->least && out->net.status == SP_OK; i++)
        from = emit(out, node->child, from);
    to = sp_net_node_add(&out->net);
    sp_net_nothing(&out->net, from, to);
    if (node->most < 0)
        sp_net_nothing(&out->net, emit(out, node->child, to), to);
    for (int32_t i = node->least; i < node->most && out->net.status == SP_OK; i++) {
        from = emit(out, node->child, from);
        sp_net_nothing(&out->net, from, to);
    }
    return to;
}

/* Any characters, where a match may begin or end anywhere. */
static int32_t emit_anything(emitter *out, int32_t from)
{
    int32_t loop = sp_net_node_add(&out->net);

    sp_net_nothing(&out->net, from, loop);
    add_range(out, loop, (sp_code_range){0, 0xd7ff}, loop);
    add_range(out, loop, (sp_code_range){0xe000, SP_CODE_POINT_MAX}, loop);
    return loop;
}

static int32_t emit_choice(emitter *out, const sp_regex_node *node, int32_t from)
{
    int32_t to = sp_net_node_add(&out->net);
    bool search = out->form == SP_REGEX_STRING && node == &out->tree->nodes[out->tree->root];

    for (int32_t child = node->child; child >= 0 && out->net.status == SP_OK;
         child = out->tree->nodes[child].next) {
        int32_t at = sp_net_node_add(&out->net);

        sp_net_nothing(&out->net, from, at);
        if (search && !out->tree->nodes[child].from_start)
            at = emit_anything(out, at);
        at = emit(out, child, at);
        if (search && !out->tree->nodes[child].to_end)
            at = emit_anything(out, at);
        sp_net_nothing(&out->net, at, to);
    }
    return to;
}

static int32_t emit_call(emitter *out, const sp_regex_node *node, int32_t from)
{
    int32_t to = sp_net_node_add(&out->net);

    sp_net_call(&out->net, from, node->first, to);
    return to;
}

/* The node after what the tree's node matches. */
static int32_t emit(emitter *out, int32_t index, int32_t from)
{
    const sp_regex_node *node = &out->tree->nodes[index];

    if (out->net.status != SP_OK)
        return 0;
    switch (node->kind) {
    case SP_REGEX_CLASS:
        return emit_class(out, node, from);
    case SP_REGEX_REPEAT:
        return emit_repeat(out, node, from);
    case SP_REGEX_CHOICE:
        return emit_choice(out, node, from);
    case SP_REGEX_CALL:
        return emit_call(out, node, from);
    case SP_REGEX_SEQUENCE:
        break;
    }
    for (int32_t child = node->child; child >= 0; child = out->tree->nodes[child].next)
        from = emit(out, child, from);
    return from;
}

/* ---- one way for one text ------------------------------------------------------------------- */

/* Sets of nodes of the first network, each a node of the second. */
typedef struct subsets {
    const sp_net_builder *net;
    int32_t *items; /* of all sets, one set after another */
    int32_t n_items, items_capacity;
    int32_t *firsts; /* [n_sets + 1] */
    int32_t n_sets;
    int32_t *cells; /* a hash table of sets */
    int32_t *seen;  /* [net->n_nodes] the last set that has it */
    int32_t *work;  /* [net->n_nodes] */
    int32_t n_seen; /* sets that were begun */
    int64_t *steps;
    sp_status status;
} subsets;

#define CELLS (4 * SP_REGEX_NODES_MAX)

static sp_status open_subsets(subsets *sets, const sp_net_builder *net, int64_t *steps)
{
    size_t n = (size_t)net->n_nodes;

    *sets = (subsets){.net = net, .steps = steps};
    sets->firsts = sp_calloc(SP_REGEX_NODES_MAX + 2, sizeof *sets->firsts);
    sets->cells = sp_malloc(CELLS * sizeof *sets->cells);
    sets->seen = sp_calloc(n, sizeof *sets->seen);
    sets->work = sp_calloc(n, sizeof *sets->work);
    if (!sets->firsts || !sets->cells || !sets->seen || !sets->work)
        return SP_ERR_MEMORY;
    memset(sets->cells, 0xff, CELLS * sizeof *sets->cells);
    return SP_OK;
}

static void close_subsets(subsets *sets)
{
    sp_free(sets->items);
    sp_free(sets->firsts);
    sp_free(sets->cells);
    sp_free(sets->seen);
    sp_free(sets->work);
}

static void count_step(subsets *sets)
{
    if (++*sets->steps > SP_REGEX_WORK_MAX && sets->status == SP_OK)
        sets->status = SP_ERR_TOO_LARGE;
}

static void add_item(subsets *sets, int32_t node)
{
    if (sets->n_items == sets->items_capacity) {
        int32_t capacity = sets->items_capacity ? sets->items_capacity * 2 : 1024;
        int32_t *grown = sp_realloc(sets->items, (size_t)capacity * sizeof *grown);

        if (!grown) {
            sets->status = SP_ERR_MEMORY;
            return;
        }
        sets->items = grown;
        sets->items_capacity = capacity;
    }
    sets->items[sets->n_items++] = node;
}

/* Nodes of which nothing but their edges without a byte matter are left out. */
static bool matters(const subsets *sets, int32_t node)
{
    if (sets->net->is_end[node])
        return true;
    for (int32_t at = sets->net->first[node]; at >= 0; at = sets->net->links[at].next)
        if (sets->net->links[at].edge.rule != SP_NET_NOTHING)
            return true;
    return false;
}

/* Adds a node, and what it leads to without a byte, to the set that is begun. */
static void add_reached(subsets *sets, int32_t node)
{
    int32_t n = 0;

    if (sets->seen[node] == sets->n_seen)
        return;
    sets->seen[node] = sets->n_seen;
    sets->work[n++] = node;
    while (n > 0 && sets->status == SP_OK) {
        node = sets->work[--n];
        if (matters(sets, node))
            add_item(sets, node);
        for (int32_t at = sets->net->first[node]; at >= 0; at = sets->net->links[at].next) {
            const sp_net_edge *edge = &sets->net->links[at].edge;

            count_step(sets);
            if (edge->rule != SP_NET_NOTHING || sets->seen[edge->to] == sets->n_seen)
                continue;
            sets->seen[edge->to] = sets->n_seen;
            sets->work[n++] = edge->to;
        }
    }
}

static int by_number(const void *left, const void *right)
{
    const int32_t *a = left, *b = right;

    return (*a > *b) - (*a < *b);
}

static bool is_set(const subsets *sets, int32_t set, int32_t first, int32_t n)
{
    return sets->firsts[set + 1] - sets->firsts[set] == n &&
           memcmp(sets->items + sets->firsts[set], sets->items + first,
                  (size_t)n * sizeof *sets->items) == 0;
}

/* Ends the set that was begun: its number, which it shares with an equal one; -1 where it is empty
 * or there are too many. */
static int32_t end_set(subsets *sets)
{
    int32_t first = sets->firsts[sets->n_sets], n = sets->n_items - first;
    uint32_t at = 1;

    if (sets->status != SP_OK || n == 0)
        return -1;
    qsort(sets->items + first, (size_t)n, sizeof *sets->items, by_number);
    for (int32_t i = first; i < sets->n_items; i++)
        at = ((at ^ (uint32_t)sets->items[i]) * 0x9e3779b1u) ^ at >> 15;
    for (at %= CELLS; sets->cells[at] >= 0; at = (at + 1) % CELLS)
        if (is_set(sets, sets->cells[at], first, n)) {
            sets->n_items = first;
            return sets->cells[at];
        }
    if (sets->n_sets == SP_REGEX_NODES_MAX) {
        sets->status = SP_ERR_TOO_LARGE;
        return -1;
    }
    sets->cells[at] = sets->n_sets;
    sets->firsts[++sets->n_sets] = sets->n_items;
    return sets->n_sets - 1;
}

static void begin_set(subsets *sets)
{
    sets->n_seen++;
}

static int32_t after_byte(subsets *sets, int32_t set, int byte)
{
    const int32_t last = sets->firsts[set + 1];

    begin_set(sets);
    for (int32_t i = sets->firsts[set]; i < last; i++)
        for (int32_t at = sets->net->first[sets->items[i]]; at >= 0;
             at = sets->net->links[at].next) {
            const sp_net_edge *edge = &sets->net->links[at].edge;

            count_step(sets);
            if (edge->rule == SP_NET_BYTES && edge->low <= byte && byte <= edge->high)
                add_reached(sets, edge->to);
        }
    return end_set(sets);
}

static int32_t after_call(subsets *sets, int32_t set, int32_t rule)
{
    const int32_t last = sets->firsts[set + 1];

    begin_set(sets);
    for (int32_t i = sets->firsts[set]; i < last; i++)
        for (int32_t at = sets->net->first[sets->items[i]]; at >= 0;
             at = sets->net->links[at].next) {
            const sp_net_edge *edge = &sets->net->links[at].edge;

            count_step(sets);
            if (edge->rule == rule)
                add_reached(sets, edge->to);
        }
    return end_set(sets);
}

/* Bytes at which some edge begins or has ended: between two of them all bytes are alike. */
static void find_cuts(const sp_net_builder *net, bool cuts[257])
{
    memset(cuts, 0, 257 * sizeof *cuts);
    cuts[0] = cuts[256] = true;
    for (int32_t i = 0; i < net->n_links; i++)
        if (net->links[i].edge.rule == SP_NET_BYTES)
            cuts[net->links[i].edge.low] = cuts[net->links[i].edge.high + 1] = true;
}

static bool has_end(const subsets *sets, int32_t set)
{
    for (int32_t i = sets->firsts[set]; i < sets->firsts[set + 1]; i++)
        if (sets->net->is_end[sets->items[i]])
            return true;
    return false;
}

typedef struct target {
    sp_net_builder *builder;
    int32_t *nodes; /* [SP_REGEX_NODES_MAX] of each set; -1: none yet */
    int32_t end;    /* after the closing quote; -1: the sets' nodes end the rule themselves */
    int32_t
        *called; /* [builder->n_rules] the last set + 1 that calls it; NULL: nothing is called */
} target;

static int32_t node_of(target *to, int32_t set)
{
    if (to->nodes[set] < 0)
        to->nodes[set] = sp_net_node_add(to->builder);
    return to->nodes[set];
}

/* The edges of one set that call rules: one for each rule. */
static void spread_calls(subsets *sets, int32_t set, target *to)
{
    const int32_t last = sets->firsts[set + 1];

    for (int32_t i = sets->firsts[set]; i < last; i++)
        for (int32_t at = sets->net->first[sets->items[i]]; at >= 0 && sets->status == SP_OK;
             at = sets->net->links[at].next) {
            int32_t rule = sets->net->links[at].edge.rule, next;

            if (rule < 0 || to->called[rule] == set + 1)
                continue;
            to->called[rule] = set + 1;
            next = after_call(sets, set, rule);
            if (next >= 0)
                sp_net_call(to->builder, node_of(to, set), rule, node_of(to, next));
        }
}

/* The edges of one set. */
static void spread(subsets *sets, int32_t set, const bool cuts[257], target *to)
{
    int32_t node = node_of(to, set);
    int low = 0;

    while (low < 256 && sets->status == SP_OK) {
        int32_t next = after_byte(sets, set, low);
        int high = low;

        while (!cuts[high + 1])
            high++;
        if (next >= 0)
            sp_net_bytes(to->builder, node, (uint8_t)low, (uint8_t)high, node_of(to, next));
        low = high + 1;
    }
    if (to->called)
        spread_calls(sets, set, to);
    if (!has_end(sets, set))
        return;
    if (to->end < 0)
        sp_net_end(to->builder, node);
    else
        sp_net_bytes(to->builder, node, '"', '"', to->end);
}

/* `start` is the node of the first set. */
static sp_status determine(subsets *sets, int32_t first_node, int32_t start, target *to)
{
    bool cuts[257];

    find_cuts(sets->net, cuts);
    to->nodes = sp_malloc(SP_REGEX_NODES_MAX * sizeof *to->nodes);
    if (!to->nodes)
        return SP_ERR_MEMORY;
    memset(to->nodes, 0xff, SP_REGEX_NODES_MAX * sizeof *to->nodes);
    begin_set(sets);
    add_reached(sets, first_node);
    if (end_set(sets) == 0)
        to->nodes[0] = start;
    for (int32_t set = 0; set < sets->n_sets && sets->status == SP_OK; set++)
        spread(sets, set, cuts, to);
    sp_free(to->nodes);
    return sets->status;
}

/* ---- rules --------------------------------------------------------------------------------- */

static sp_status add_rule(sp_net_builder *builder, const sp_net_builder *net, sp_regex_form form,
                          int64_t *work, int32_t *out_rule)
{
    subsets sets;
    target to = {.builder = builder, .end = -1};
    int32_t rule = sp_net_rule(builder), start = sp_net_start(builder, rule);
    sp_status status = open_subsets(&sets, net, work);

    if (form == SP_REGEX_STRING) {
        to.end = sp_net_node_add(builder);
        sp_net_end(builder, to.end);
        start = sp_net_text(builder, start, "\"", 1);
    }
    if (status == SP_OK && builder->status == SP_OK)
        status = determine(&sets, 0, start, &to);
    close_subsets(&sets);
    *out_rule = rule;
    return status;
}

sp_status sp_regex_add(sp_net_builder *builder, const char *pattern, size_t bytes,
                       sp_regex_form form, int64_t *work, int32_t *out_rule, sp_error *error)
{
    sp_regex_tree tree;
    emitter out = {.form = form};
    sp_status status = sp_regex_tree_read(pattern, bytes, &tree, error);

    if (status == SP_OK) {
        out.tree = &tree;
        sp_net_node_add(&out.net);
        sp_net_end(&out.net, emit(&out, tree.root, 0));
        status = out.net.status;
        if (status == SP_OK)
            status = add_rule(builder, &out.net, form, work, out_rule);
        if (status == SP_ERR_TOO_LARGE)
            sp_fail(error, status, SP_GRAMMAR_TOO_LARGE, NULL, -1,
                    "a pattern that needs more than %d states, or too long to make",
                    SP_REGEX_NODES_MAX);
        else if (status != SP_OK)
            sp_fail_memory(error, 0, "a pattern");
    }
    sp_net_builder_free(&out.net);
    sp_regex_tree_free(&tree);
    return status;
}

/* ---- rules that call rules ------------------------------------------------------------------ */

/* What one node of a closure gives to the start that takes its place. */
static bool move_edges(sp_net_builder *net, int32_t node, int32_t start, int32_t rule, int32_t end)
{
    bool found = false;

    for (int32_t at = net->first[node]; at >= 0; at = net->links[at].next) {
        const sp_net_edge edge = net->links[at].edge;

        if (edge.rule == SP_NET_BYTES)
            sp_net_bytes(net, start, edge.low, edge.high, edge.to);
        else if (edge.rule == rule)
            sp_net_nothing(net, end, edge.to);
        else if (edge.rule >= 0)
            sp_net_call(net, start, edge.rule, edge.to);
        found |= edge.rule == rule;
    }
    if (node == end)
        sp_net_nothing(net, start, end);
    return found;
}

/*
 * a: a X | Y is Y X*: a new start without the calls of the rule itself, and what came after them
 * comes after the end. `list` [n] are the nodes that the old start, 0, leads to without a byte.
 */
static int32_t loop_at_end(sp_net_builder *net, const int32_t *list, int32_t n, int32_t rule,
                           int32_t end)
{
    int32_t start = sp_net_node_add(net);
    bool found = false;

    for (int32_t i = 0; i < n && net->status == SP_OK; i++)
        found |= move_edges(net, list[i], start, rule, end);
    return found ? start : 0;
}

static sp_status find_start(sp_net_builder *net, int32_t rule, int32_t end, int32_t *out_start)
{
    size_t n_nodes = (size_t)net->n_nodes;
    int32_t *list = sp_malloc(n_nodes * sizeof *list), n = 1;
    bool *listed = sp_calloc(n_nodes, sizeof *listed);

    *out_start = 0;
    if (list && listed) {
        list[0] = 0;
        listed[0] = true;
        for (int32_t i = 0; i < n; i++)
            for (int32_t at = net->first[list[i]]; at >= 0; at = net->links[at].next) {
                const sp_net_edge *edge = &net->links[at].edge;

                if (edge->rule != SP_NET_NOTHING || listed[edge->to])
                    continue;
                listed[edge->to] = true;
                list[n++] = edge->to;
            }
        *out_start = loop_at_end(net, list, n, rule, end);
    } else {
        net->status = SP_ERR_MEMORY;
    }
    sp_free(list);
    sp_free(listed);
    return net->status;
}

static sp_status fill_from(sp_net_builder *builder, const sp_net_builder *net, int32_t first,
                           int32_t rule, int64_t *work)
{
    subsets sets;
    target to = {.builder = builder, .end = -1};
    sp_status status = open_subsets(&sets, net, work);

    to.called = sp_calloc((size_t)builder->n_rules, sizeof *to.called);
    if (!to.called)
        status = SP_ERR_MEMORY;
    if (status == SP_OK)
        status = determine(&sets, first, sp_net_start(builder, rule), &to);
    sp_free(to.called);
    close_subsets(&sets);
    return status != SP_OK ? status : builder->status;
}

sp_status sp_regex_fill(sp_net_builder *builder, const sp_regex_tree *tree, int32_t root,
                        int32_t rule, int64_t *work)
{
    emitter out = {.tree = tree, .form = SP_REGEX_WHOLE};
    int32_t start = 0, end;
    sp_status status;

    sp_net_node_add(&out.net);
    end = emit(&out, root, 0);
    sp_net_end(&out.net, end);
    status = out.net.status;
    *work += out.net.n_nodes;
    if (status == SP_OK)
        status = find_start(&out.net, rule, end, &start);
    if (status == SP_OK)
        status = fill_from(builder, &out.net, start, rule, work);
    sp_net_builder_free(&out.net);
    return status;
}
