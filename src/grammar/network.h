/*
 * grammar: which bytes an output may hold, and which tokens of a vocabulary may come next.
 *
 * Owns: grammars over bytes (a schema, a pattern, a list of texts, compiled into one network of
 * nodes), the states that an output can be in, and the masks of the tokens that each allows. It
 * must not know: models, requests, HTTP, how a token is chosen, where a vocabulary comes from.
 *
 * network.h: a grammar as a recursive transition network. A rule is a set of nodes with one start;
 * an edge takes a byte of a range, nothing at all, or a whole other rule. An output is in the
 * grammar when it leads from the start of the first rule to one of that rule's ends.
 *
 * A builder keeps its first failure, after which its functions do nothing and give node 0, so that
 * callers need no check per call. One thread per builder; a finished network never changes.
 */
#ifndef SP_GRAMMAR_NETWORK_H
#define SP_GRAMMAR_NETWORK_H

#include <sidepath/status.h>

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Reason codes (sp_error.code). */
#define SP_GRAMMAR_TOO_LARGE "grammar-too-large"
#define SP_GRAMMAR_UNSATISFIABLE \
    "grammar-unsatisfiable"                          /* no text is in it, or only the empty one */
#define SP_GRAMMAR_UNSUPPORTED "grammar-unsupported" /* a keyword or a construct, by its name */
#define SP_GRAMMAR_MALFORMED   "grammar-malformed"   /* no schema, no pattern */

#define SP_NET_NODES_MAX (1 << 18)
#define SP_NET_EDGES_MAX (1 << 20)
/* Rules that are open at once: JSON arrays are nested some 700 deep with these. A network of which
 * one byte may open more than two rules has more of them. */
#define SP_NET_DEPTH_MAX 768
#define SP_NET_DEPTH_TOP 4096
/* A node that cannot be left without so many more is none. */
#define SP_NET_HEIGHT_MAX 128

typedef struct sp_net_edge {
    int32_t to;
    int32_t rule; /* >= 0: the rule that comes before `to`; SP_NET_BYTES, SP_NET_NOTHING */
    uint8_t low, high;
} sp_net_edge;

#define SP_NET_BYTES   (-1)
#define SP_NET_NOTHING (-2)

typedef struct sp_net_node {
    int32_t first_edge, n_edges;
    int32_t height; /* rules that have to be opened on the way to its rule's end, one in another */
    bool is_end;    /* of its rule */
    bool has_bytes; /* an edge that takes a byte */
} sp_net_node;

typedef struct sp_net {
    sp_net_node *nodes; /* [n_nodes] owned, as are the others */
    sp_net_edge *edges;
    int32_t *starts; /* [n_rules] a node each; rule 0 is the grammar */
    int32_t n_nodes, n_rules;
    int32_t depth_max; /* rules that are open at once */
} sp_net;

/* An edge while the network is built. */
typedef struct sp_net_link {
    sp_net_edge edge;
    int32_t next; /* of the same node, in the order in which they were added; -1: none */
} sp_net_link;

typedef struct sp_net_builder {
    sp_net_link *links;
    int32_t *first, *last; /* [n_nodes] links of each node */
    bool *is_end;
    int32_t *starts;
    int32_t n_links, n_nodes, n_rules;
    int32_t links_capacity, nodes_capacity, rules_capacity;
    int32_t depth_max; /* 0: SP_NET_DEPTH_MAX; at most SP_NET_DEPTH_TOP */
    sp_status status;  /* the first failure: SP_ERR_MEMORY, SP_ERR_TOO_LARGE */
} sp_net_builder;

void sp_net_builder_free(sp_net_builder *builder); /* zeros are allowed */

int32_t sp_net_rule(sp_net_builder *builder); /* a rule with a start of its own */
int32_t sp_net_start(const sp_net_builder *builder, int32_t rule);
int32_t sp_net_node_add(sp_net_builder *builder);
void sp_net_end(sp_net_builder *builder, int32_t node);
void sp_net_bytes(sp_net_builder *builder, int32_t from, uint8_t low, uint8_t high, int32_t to);
void sp_net_nothing(sp_net_builder *builder, int32_t from, int32_t to);
void sp_net_call(sp_net_builder *builder, int32_t from, int32_t rule, int32_t to);
/* The end of these bytes after `from`, by nodes that other literals of the same `from` share. */
int32_t sp_net_literal(sp_net_builder *builder, int32_t from, const char *bytes, size_t n);
/* The same by new nodes. */
int32_t sp_net_text(sp_net_builder *builder, int32_t from, const char *bytes, size_t n);

/*
 * The finished network; the builder's memory is freed in any case. SP_ERR_MEMORY; SP_ERR_TOO_LARGE
 * (SP_GRAMMAR_TOO_LARGE); SP_ERR_INPUT (SP_GRAMMAR_UNSATISFIABLE).
 */
sp_status sp_net_finish(sp_net_builder *builder, sp_net *out_net, sp_error *error);
void sp_net_free(sp_net *net); /* zeros are allowed */
size_t sp_net_memory(const sp_net *net);

/* A rule that ends a rule so needs no place to come back to. */
static inline bool sp_net_is_bare_end(const sp_net *net, int32_t node)
{
    return net->nodes[node].is_end && net->nodes[node].n_edges == 0;
}

#endif
