/*
 * ebnf.c: the trees of a text grammar into rules of a network, and what such rules may not do.
 */
#include "grammar/ebnf.h"

#include "base/alloc.h"
#include "base/error.h"
#include "grammar/states.h"

#include <string.h>

/* ---- beginnings ----------------------------------------------------------------------------- */

/*
 * What rules reach without a byte. A node is reached when a rule's start leads to it so, through
 * rules that may be empty; a link that calls another rule waits until that one may be.
 */
typedef struct beginnings {
    const sp_net_builder *net;
    int32_t *owner;      /* [n_nodes] the rule that reaches it; -1: none */
    int32_t *nodes;      /* [n_nodes] reached, in the order of that */
    int32_t *after;      /* [n_nodes] the next node of the same rule; -1: none */
    int32_t *first;      /* [n_rules] its nodes */
    int32_t *waiting;    /* [n_rules] links that call it from nodes that are reached */
    int32_t *next_link;  /* [n_links] the next of those */
    int32_t *link_owner; /* [n_links] the rule that it waits in */
    int32_t *opened;     /* [n_rules] rules that are opened, one in another, before a byte */
    int32_t *ways;       /* [n_rules] in which it may begin, at most SP_EBNF_WAYS_MAX + 1 */
    int32_t *path, *at;  /* [n_rules] of a walk: rules, and how far each of them is */
    int32_t *at_node;    /* [n_rules] the node whose links are looked at */
    uint8_t *color;      /* [n_rules] of the walk */
    bool *may_be_empty;  /* [n_rules] */
    int32_t n_nodes;
} beginnings;

enum { WHITE, GRAY, BLACK };

static int32_t *numbers(int32_t n)
{
    int32_t *made = sp_malloc(((size_t)n + 1) * sizeof *made);

    if (made)
        memset(made, 0xff, ((size_t)n + 1) * sizeof *made);
    return made;
}

static bool open_beginnings(beginnings *of, const sp_net_builder *net)
{
    *of = (beginnings){.net = net,
                       .owner = numbers(net->n_nodes),
                       .nodes = numbers(net->n_nodes),
                       .after = numbers(net->n_nodes),
                       .first = numbers(net->n_rules),
                       .waiting = numbers(net->n_rules),
                       .next_link = numbers(net->n_links),
                       .link_owner = numbers(net->n_links),
                       .opened = numbers(net->n_rules),
                       .ways = numbers(net->n_rules),
                       .path = numbers(net->n_rules),
                       .at = numbers(net->n_rules),
                       .at_node = numbers(net->n_rules),
                       .color = sp_calloc((size_t)net->n_rules + 1, sizeof *of->color),
                       .may_be_empty = sp_calloc((size_t)net->n_rules + 1, sizeof(bool))};
    return of->owner && of->nodes && of->after && of->first && of->waiting && of->next_link &&
           of->link_owner && of->opened && of->ways && of->path && of->at && of->at_node &&
           of->color && of->may_be_empty;
}

static void close_beginnings(beginnings *of)
{
    sp_free(of->owner);
    sp_free(of->nodes);
    sp_free(of->after);
    sp_free(of->first);
    sp_free(of->waiting);
    sp_free(of->next_link);
    sp_free(of->link_owner);
    sp_free(of->opened);
    sp_free(of->ways);
    sp_free(of->path);
    sp_free(of->at);
    sp_free(of->at_node);
    sp_free(of->color);
    sp_free(of->may_be_empty);
}

/* Nodes belong to one rule each, as rules share none. */
static void reach(beginnings *of, int32_t node, int32_t rule)
{
    if (of->owner[node] >= 0)
        return;
    of->owner[node] = rule;
    of->after[node] = of->first[rule];
    of->first[rule] = node;
    of->nodes[of->n_nodes++] = node;
}

static void let_be_empty(beginnings *of, int32_t rule)
{
    if (of->may_be_empty[rule])
        return;
    of->may_be_empty[rule] = true;
    for (int32_t link = of->waiting[rule]; link >= 0; link = of->next_link[link])
        reach(of, of->net->links[link].edge.to, of->link_owner[link]);
}

static void find_beginnings(beginnings *of, int32_t first_rule)
{
    const sp_net_builder *net = of->net;

    for (int32_t rule = first_rule; rule < net->n_rules; rule++)
        reach(of, net->starts[rule], rule);
    for (int32_t i = 0; i < of->n_nodes; i++) {
        int32_t node = of->nodes[i], rule = of->owner[node];

        if (net->is_end[node])
            let_be_empty(of, rule);
        for (int32_t link = net->first[node]; link >= 0; link = net->links[link].next) {
            int32_t called = net->links[link].edge.rule;

            if (called < 0)
                continue;
            of->link_owner[link] = rule;
            of->next_link[link] = of->waiting[called];
            of->waiting[called] = link;
            if (of->may_be_empty[called])
                reach(of, net->links[link].edge.to, rule);
        }
    }
}

/* 1 where the call has to come back, 0 where nothing is left to do after it. */
static int32_t cost_of(const sp_net_builder *net, int32_t link)
{
    int32_t to = net->links[link].edge.to;

    return !(net->is_end[to] && net->first[to] < 0);
}

/* ---- the walk over what begins with what ----------------------------------------------------- */

static void step_into(beginnings *of, int32_t depth, int32_t rule)
{
    of->path[depth] = rule;
    of->color[rule] = GRAY;
    of->opened[rule] = 0;
    of->ways[rule] = 1;
    of->at_node[depth] = of->first[rule];
    of->at[depth] = of->first[rule] >= 0 ? of->net->first[of->first[rule]] : -1;
}

/* The next link that the rule at this depth calls with before a byte; -1: no more. */
static int32_t next_call(beginnings *of, int32_t depth)
{
    const sp_net_builder *net = of->net;

    while (of->at_node[depth] >= 0) {
        while (of->at[depth] >= 0) {
            int32_t link = of->at[depth];

            of->at[depth] = net->links[link].next;
            if (net->links[link].edge.rule >= 0)
                return link;
        }
        of->at_node[depth] = of->after[of->at_node[depth]];
        of->at[depth] = of->at_node[depth] >= 0 ? net->first[of->at_node[depth]] : -1;
    }
    return -1;
}

static void count_opened(beginnings *of, int32_t rule, int32_t link)
{
    int32_t n = cost_of(of->net, link) + of->opened[of->net->links[link].edge.rule];

    if (n > of->opened[rule])
        of->opened[rule] = n;
    of->ways[rule] += of->ways[of->net->links[link].edge.rule];
    if (of->ways[rule] > SP_EBNF_WAYS_MAX)
        of->ways[rule] = SP_EBNF_WAYS_MAX + 1;
}

/* Counts what a rule opens. Returns a rule that comes back to its own beginning; -1: none does. */
static int32_t walk(beginnings *of, int32_t rule)
{
    int32_t depth = 0;

    step_into(of, depth, rule);
    while (depth >= 0) {
        int32_t here = of->path[depth], link = next_call(of, depth), called;

        if (link < 0) {
            of->color[here] = BLACK;
            depth--;
            continue;
        }
        called = of->net->links[link].edge.rule;
        if (of->color[called] == GRAY)
            return called;
        if (of->color[called] == BLACK) {
            count_opened(of, here, link);
            continue;
        }
        of->at[depth] = link; /* looked at again when it is counted */
        step_into(of, ++depth, called);
    }
    return -1;
}

/* Rules that one byte may open, one in another: the most of all calls. */
static int32_t most_opened(const beginnings *of)
{
    int32_t most = 0;

    for (int32_t link = 0; link < of->net->n_links; link++) {
        int32_t rule = of->net->links[link].edge.rule;

        if (rule >= 0 && of->opened[rule] + cost_of(of->net, link) > most)
            most = of->opened[rule] + cost_of(of->net, link);
    }
    return most;
}

/* Whether some node, also after a byte, leads to too many beginnings of rules. */
static bool has_many_ways(const beginnings *of)
{
    for (int32_t node = 0; node < of->net->n_nodes; node++) {
        int64_t n = 0;

        for (int32_t link = of->net->first[node]; link >= 0; link = of->net->links[link].next)
            n += of->net->links[link].edge.rule >= 0 ? of->ways[of->net->links[link].edge.rule] : 0;
        if (n > SP_EBNF_WAYS_MAX)
            return true;
    }
    return false;
}

/* ---- rules --------------------------------------------------------------------------------- */

static sp_status refuse_rule(const sp_ebnf *grammar, int32_t rule, sp_status status,
                             const char *code, const char *what, sp_error *error)
{
    const sp_ebnf_rule *of = &grammar->rules[rule];

    return sp_ebnf_refuse(grammar, of->name, status, code, error, "the rule %.*s, which %s",
                          of->name_bytes < 60 ? (int)of->name_bytes : 60, of->name, what);
}

static sp_status check_beginnings(const sp_ebnf *grammar, sp_net_builder *builder,
                                  int32_t first_rule, beginnings *of, sp_error *error)
{
    int32_t depth;

    find_beginnings(of, first_rule);
    for (int32_t i = 0; i < grammar->n_rules; i++) {
        int32_t again = of->color[first_rule + i] == WHITE ? walk(of, first_rule + i) : -1;

        if (again >= 0)
            return refuse_rule(grammar, again - first_rule, SP_ERR_INPUT, SP_GRAMMAR_UNSUPPORTED,
                               "comes back to its beginning before a character (left recursion)",
                               error);
    }
    for (int32_t i = 0; i < grammar->n_rules; i++)
        if (of->ways[first_rule + i] > SP_EBNF_WAYS_MAX)
            return refuse_rule(grammar, i, SP_ERR_TOO_LARGE, SP_GRAMMAR_TOO_LARGE,
                               "may begin in more than 65536 ways", error);
    if (has_many_ways(of))
        return refuse_rule(grammar, 0, SP_ERR_TOO_LARGE, SP_GRAMMAR_TOO_LARGE,
                           "calls, or one of the others does, what begins in more than 65536 ways",
                           error);
    depth = sp_states_depth_for(most_opened(of));
    if (depth < 0)
        return refuse_rule(grammar, 0, SP_ERR_TOO_LARGE, SP_GRAMMAR_TOO_LARGE,
                           "is one of too many rules that begin with one another", error);
    builder->depth_max = depth;
    return SP_OK;
}

static sp_status check(const sp_ebnf *grammar, sp_net_builder *builder, int32_t first_rule,
                       sp_error *error)
{
    beginnings of;
    sp_status status = SP_OK;

    if (open_beginnings(&of, builder))
        status = check_beginnings(grammar, builder, first_rule, &of, error);
    else
        status = sp_fail_memory(error, 0, "a grammar");
    close_beginnings(&of);
    return status;
}

/* Rule i of the grammar becomes rule first + i of the network. */
static sp_status fill(sp_ebnf *grammar, sp_net_builder *builder, int32_t first, int64_t *work,
                      sp_error *error)
{
    for (int32_t i = 0; i < grammar->tree.n_nodes; i++)
        if (grammar->tree.nodes[i].kind == SP_REGEX_CALL)
            grammar->tree.nodes[i].first += first;
    for (int32_t i = 0; i < grammar->n_rules; i++) {
        sp_status status =
            sp_regex_fill(builder, &grammar->tree, grammar->rules[i].root, first + i, work);

        if (status == SP_ERR_TOO_LARGE)
            return refuse_rule(grammar, i, status, SP_GRAMMAR_TOO_LARGE,
                               "needs too many states, or is too long to make", error);
        if (status != SP_OK)
            return sp_fail_memory(error, 0, "a grammar");
    }
    return SP_OK;
}

sp_status sp_ebnf_add(sp_net_builder *builder, const char *text, size_t bytes, int64_t *work,
                      int32_t *out_rule, sp_error *error)
{
    sp_ebnf grammar;
    int32_t first = builder->n_rules;
    sp_status status = sp_ebnf_read(text, bytes, &grammar, error);

    *out_rule = 0;
    for (int32_t i = 0; status == SP_OK && i < grammar.n_rules; i++)
        sp_net_rule(builder);
    if (status == SP_OK && builder->status != SP_OK)
        status = sp_fail_memory(error, 0, "a grammar");
    if (status == SP_OK)
        status = fill(&grammar, builder, first, work, error);
    if (status == SP_OK)
        status = check(&grammar, builder, first, error);
    if (status == SP_OK)
        *out_rule = first + sp_ebnf_find(&grammar, "root", 4);
    sp_ebnf_free(&grammar);
    return status;
}
