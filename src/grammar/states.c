#include "grammar/states.h"

#include "base/alloc.h"
#include "grammar/vocabulary.h"

#include <string.h>

#define CELLS_MIN 1024
/* A hole may be so deep that the limit does not count for what one token can open in it: a byte
 * opens two rules at most, or depth_max is larger. */
#define INNER_DEPTH_MAX 256
_Static_assert(INNER_DEPTH_MAX + 2 * SP_VOCABULARY_TOKEN_BYTES_MAX + SP_NET_HEIGHT_MAX <=
                   SP_NET_DEPTH_MAX,
               "the depth is limited below a hole");

int32_t sp_states_depth_for(int32_t opened)
{
    int32_t depth = INNER_DEPTH_MAX + SP_NET_HEIGHT_MAX;

    if (opened > (SP_NET_DEPTH_TOP - depth) / SP_VOCABULARY_TOKEN_BYTES_MAX)
        return -1;
    depth += opened * SP_VOCABULARY_TOKEN_BYTES_MAX;
    return depth > SP_NET_DEPTH_MAX ? depth : SP_NET_DEPTH_MAX;
}

/* ---- memory -------------------------------------------------------------------------------- */

/* False, and failed is set: there is no room for element n of an array. */
static bool reserve(sp_states *states, void **array, size_t element_bytes, int32_t n,
                    int32_t *capacity)
{
    int32_t wanted = *capacity ? *capacity * 2 : 256;
    void *grown;

    if (n < *capacity)
        return true;
    grown = sp_realloc(*array, (size_t)wanted * element_bytes);
    if (!grown) {
        states->failed = true;
        return false;
    }
    states->bytes += (size_t)(wanted - *capacity) * element_bytes;
    *array = grown;
    *capacity = wanted;
    return true;
}

static int32_t *new_cells(uint32_t n)
{
    int32_t *cells = sp_malloc((size_t)n * sizeof *cells);

    if (cells)
        memset(cells, 0xff, (size_t)n * sizeof *cells);
    return cells;
}

static void free_states(sp_states *states)
{
    for (int32_t i = 0; i < states->n_states; i++) {
        sp_free(states->states[i].next);
        sp_free(states->states[i].mask.bits);
        sp_free(states->states[i].mask.few);
        sp_free(states->states[i].mask.leaves);
    }
}

void sp_states_free(sp_states *states)
{
    free_states(states);
    sp_free(states->stacks);
    sp_free(states->states);
    sp_free(states->lists);
    sp_free(states->stack_cells);
    sp_free(states->state_cells);
    sp_free(states->work);
    *states = (sp_states){0};
}

sp_status sp_states_create(const sp_net *net, sp_states *out_states)
{
    sp_states states = {.net = net, .stack_mask = CELLS_MIN - 1, .state_mask = CELLS_MIN - 1};

    states.stack_cells = new_cells(CELLS_MIN);
    states.state_cells = new_cells(CELLS_MIN);
    states.bytes = 2 * CELLS_MIN * sizeof(int32_t);
    *out_states = states;
    if (states.stack_cells && states.state_cells)
        return SP_OK;
    sp_states_free(out_states);
    return SP_ERR_MEMORY;
}

sp_status sp_states_clear(sp_states *states)
{
    const sp_net *net = states->net;
    bool left_out = states->left_out;
    sp_status status;

    sp_states_free(states);
    status = sp_states_create(net, states);
    states->net = net;
    states->left_out = left_out;
    return status;
}

/* ---- stacks -------------------------------------------------------------------------------- */

static uint32_t mix(uint32_t hash, int32_t value)
{
    hash = (hash ^ (uint32_t)value) * 0x9e3779b1u;
    return hash ^ hash >> 15;
}

static uint32_t hash_of_stack(int32_t node, int32_t below)
{
    return mix(mix(1, node), below);
}

static bool grow_stack_cells(sp_states *states)
{
    uint32_t n = (states->stack_mask + 1) * 2;
    int32_t *cells = new_cells(n);

    if (!cells) {
        states->failed = true;
        return false;
    }
    for (int32_t i = 0; i < states->n_stacks; i++) {
        uint32_t at = hash_of_stack(states->stacks[i].node, states->stacks[i].below) & (n - 1);

        while (cells[at] >= 0)
            at = (at + 1) & (n - 1);
        cells[at] = i;
    }
    states->bytes += (size_t)n / 2 * sizeof *cells;
    sp_free(states->stack_cells);
    states->stack_cells = cells;
    states->stack_mask = n - 1;
    return true;
}

static int32_t depth_of(const sp_states *states, int32_t stack)
{
    return stack >= 0 ? states->stacks[stack].depth + 1 : 0;
}

/* The number of a stack; SP_STATE_NONE: out of memory. */
static int32_t stack_of(sp_states *states, int32_t node, int32_t below)
{
    uint32_t at = hash_of_stack(node, below) & states->stack_mask;

    for (; states->stack_cells[at] >= 0; at = (at + 1) & states->stack_mask) {
        const sp_stack *stack = &states->stacks[states->stack_cells[at]];

        if (stack->node == node && stack->below == below)
            return states->stack_cells[at];
    }
    if (!reserve(states, (void **)&states->stacks, sizeof *states->stacks, states->n_stacks,
                 &states->stacks_capacity))
        return SP_STATE_NONE;
    states->stacks[states->n_stacks] =
        (sp_stack){.node = node, .below = below, .depth = depth_of(states, below)};
    states->stack_cells[at] = states->n_stacks++;
    if ((uint32_t)states->n_stacks > states->stack_mask / 2 && !grow_stack_cells(states))
        return SP_STATE_NONE;
    return states->n_stacks - 1;
}

/* ---- expansion: what is reached without a byte ---------------------------------------------- */

/* Whether a stack of this node may stand here: there is room for the rules that it still needs. */
static bool fits(const sp_states *states, int32_t node, int32_t below)
{
    int32_t height = states->net->nodes[node].height;
    int32_t depth = depth_of(states, below);

    return height <= SP_NET_HEIGHT_MAX && depth + height <= states->net->depth_max;
}

/* Puts a stack on the list of those to look at. */
static void visit(sp_states *states, int32_t *n_work, int32_t node, int32_t below)
{
    int32_t stack;

    if (!fits(states, node, below))
        return;
    stack = stack_of(states, node, below);
    if (stack < 0 || states->stacks[stack].seen == states->expansion)
        return;
    states->stacks[stack].seen = states->expansion;
    if (reserve(states, (void **)&states->work, sizeof *states->work, *n_work,
                &states->work_capacity))
        states->work[(*n_work)++] = stack;
}

static void enter(sp_states *states, int32_t *n_work, const sp_net_edge *edge, int32_t below)
{
    int32_t back = below;

    if (!sp_net_is_bare_end(states->net, edge->to)) {
        if (!fits(states, edge->to, below))
            return;
        back = stack_of(states, edge->to, below);
        if (back == SP_STATE_NONE)
            return;
    }
    visit(states, n_work, states->net->starts[edge->rule], back);
}

static void leave(sp_states *states, int32_t *n_work, int32_t below)
{
    if (below == SP_STACK_BOTTOM)
        states->list_complete = true;
    else if (below == SP_STACK_HOLE)
        states->list_hole = true;
    else
        visit(states, n_work, states->stacks[below].node, states->stacks[below].below);
}

/* Looks at the stacks on the list, the last one first, and so at their edges from the last. */
static void expand(sp_states *states, int32_t n_work)
{
    const sp_net *net = states->net;

    while (n_work > 0 && !states->failed) {
        int32_t stack = states->work[--n_work], below = states->stacks[stack].below;
        const sp_net_node *node = &net->nodes[states->stacks[stack].node];

        if (node->has_bytes && states->n_list < SP_STATE_STACKS_MAX)
            states->list[states->n_list++] = stack;
        else if (node->has_bytes)
            states->left_out = true;
        if (node->is_end)
            leave(states, &n_work, below);
        for (int32_t i = node->n_edges - 1; i >= 0; i--) {
            const sp_net_edge *edge = &net->edges[node->first_edge + i];

            if (edge->rule == SP_NET_NOTHING)
                visit(states, &n_work, edge->to, below);
            else if (edge->rule >= 0)
                enter(states, &n_work, edge, below);
        }
    }
}

static void begin_list(sp_states *states)
{
    states->expansion++;
    states->n_list = 0;
    states->list_complete = states->list_hole = false;
}

static void add_to_list(sp_states *states, int32_t node, int32_t below)
{
    int32_t n_work = 0;

    visit(states, &n_work, node, below);
    expand(states, n_work);
}

/* ---- states -------------------------------------------------------------------------------- */

static uint32_t hash_of_list(const int32_t *list, int32_t n, bool complete, bool hole)
{
    uint32_t hash = 2u + complete + 2u * hole;

    for (int32_t i = 0; i < n; i++)
        hash = mix(hash, list[i]);
    return hash;
}

static uint32_t hash_of_state(const sp_states *states, const sp_state *state)
{
    return hash_of_list(states->lists + state->first, state->n, state->complete, state->hole);
}

static bool grow_state_cells(sp_states *states)
{
    uint32_t n = (states->state_mask + 1) * 2;
    int32_t *cells = new_cells(n);

    if (!cells) {
        states->failed = true;
        return false;
    }
    for (int32_t i = 0; i < states->n_states; i++) {
        uint32_t at = hash_of_state(states, &states->states[i]) & (n - 1);

        while (cells[at] >= 0)
            at = (at + 1) & (n - 1);
        cells[at] = i;
    }
    states->bytes += (size_t)n / 2 * sizeof *cells;
    sp_free(states->state_cells);
    states->state_cells = cells;
    states->state_mask = n - 1;
    return true;
}

static bool is_listed(const sp_states *states, const sp_state *state)
{
    return state->n == states->n_list && state->complete == states->list_complete &&
           state->hole == states->list_hole &&
           memcmp(states->lists + state->first, states->list,
                  (size_t)state->n * sizeof *states->list) == 0;
}

static bool keep_list(sp_states *states)
{
    for (int32_t i = 0; i < states->n_list; i++) {
        if (!reserve(states, (void **)&states->lists, sizeof *states->lists, states->n_lists,
                     &states->lists_capacity))
            return false;
        states->lists[states->n_lists++] = states->list[i];
    }
    return true;
}

/* The state of the list, which is made where it is new. */
static int32_t state_of_list(sp_states *states)
{
    uint32_t at =
        hash_of_list(states->list, states->n_list, states->list_complete, states->list_hole);
    int32_t first = states->n_lists;

    if (states->failed || (states->n_list == 0 && !states->list_complete && !states->list_hole))
        return SP_STATE_NONE;
    for (at &= states->state_mask; states->state_cells[at] >= 0; at = (at + 1) & states->state_mask)
        if (is_listed(states, &states->states[states->state_cells[at]]))
            return states->state_cells[at];
    if (!reserve(states, (void **)&states->states, sizeof *states->states, states->n_states,
                 &states->states_capacity) ||
        !keep_list(states))
        return SP_STATE_NONE;
    states->states[states->n_states] = (sp_state){.first = first,
                                                  .n = states->n_list,
                                                  .complete = states->list_complete,
                                                  .hole = states->list_hole,
                                                  .inner = SP_STATE_UNKNOWN,
                                                  .below = SP_STACK_BOTTOM};
    states->state_cells[at] = states->n_states++;
    if ((uint32_t)states->n_states > states->state_mask / 2 && !grow_state_cells(states))
        return SP_STATE_NONE;
    return states->n_states - 1;
}

int32_t sp_states_start(sp_states *states)
{
    begin_list(states);
    add_to_list(states, states->net->starts[0], SP_STACK_BOTTOM);
    return state_of_list(states);
}

int32_t sp_states_at_node(sp_states *states, int32_t node)
{
    begin_list(states);
    add_to_list(states, node, SP_STACK_HOLE);
    return state_of_list(states);
}

int32_t sp_states_of_stack(sp_states *states, int32_t stack)
{
    begin_list(states);
    add_to_list(states, states->stacks[stack].node, states->stacks[stack].below);
    return state_of_list(states);
}

static int32_t find_next(sp_states *states, const sp_state *state, uint8_t byte)
{
    const int32_t first = state->first, n = state->n;

    begin_list(states);
    for (int32_t i = 0; i < n && !states->failed; i++) {
        const sp_stack stack = states->stacks[states->lists[first + i]];
        const sp_net_node *node = &states->net->nodes[stack.node];

        for (int32_t e = 0; e < node->n_edges; e++) {
            const sp_net_edge *edge = &states->net->edges[node->first_edge + e];

            if (edge->rule == SP_NET_BYTES && edge->low <= byte && byte <= edge->high)
                add_to_list(states, edge->to, stack.below);
        }
    }
    return state_of_list(states);
}

static bool make_next(sp_states *states, sp_state *state)
{
    state->next = sp_malloc(256 * sizeof *state->next);
    if (!state->next) {
        states->failed = true;
        return false;
    }
    for (int i = 0; i < 256; i++)
        state->next[i] = SP_STATE_UNKNOWN;
    states->bytes += 256 * sizeof *state->next;
    return true;
}

int32_t sp_states_next(sp_states *states, int32_t state, uint8_t byte)
{
    sp_state *from = &states->states[state];
    int32_t next;

    if (from->next && from->next[byte] != SP_STATE_UNKNOWN)
        return from->next[byte];
    if (!from->next && !make_next(states, from))
        return SP_STATE_NONE;
    next = find_next(states, from, byte);
    if (!states->failed)
        states->states[state].next[byte] = next; /* the table may have moved */
    return next;
}

bool sp_states_goes_on(const sp_states *states, int32_t state)
{
    return states->states[state].n > 0;
}

/* ---- holes --------------------------------------------------------------------------------- */

/* The deepest stack that both stand on, themselves included. */
static int32_t common(const sp_states *states, int32_t a, int32_t b)
{
    while (a != b && a >= 0 && b >= 0) {
        if (states->stacks[a].depth >= states->stacks[b].depth)
            a = states->stacks[a].below;
        else
            b = states->stacks[b].below;
    }
    return a == b ? a : SP_STACK_BOTTOM;
}

/* The stack with the hole in the place of `below`. */
static int32_t over_hole(sp_states *states, int32_t stack, int32_t below)
{
    int32_t path[SP_NET_DEPTH_TOP + 1], n = 0, made = SP_STACK_HOLE;

    for (; stack != below; stack = states->stacks[stack].below)
        path[n++] = states->stacks[stack].node;
    while (n > 0 && made != SP_STATE_NONE)
        made = stack_of(states, path[--n], made);
    return made;
}

static int32_t make_inner(sp_states *states, const sp_state *state, int32_t below)
{
    const int32_t first = state->first, n = state->n;

    begin_list(states);
    for (int32_t i = 0; i < n && !states->failed; i++)
        states->list[states->n_list++] = over_hole(states, states->lists[first + i], below);
    return state_of_list(states);
}

int32_t sp_states_inner(sp_states *states, int32_t state)
{
    const sp_state *from = &states->states[state];
    int32_t below, inner = state;

    if (from->inner != SP_STATE_UNKNOWN)
        return from->inner;
    if (from->n == 0 || from->complete || from->hole)
        return state;
    below = states->stacks[states->lists[from->first]].below;
    for (int32_t i = 1; i < from->n; i++)
        below = common(states, below, states->stacks[states->lists[from->first + i]].below);
    if (below >= 0 && states->stacks[below].depth < INNER_DEPTH_MAX)
        inner = make_inner(states, from, below);
    if (states->failed)
        return SP_STATE_NONE;
    states->states[state].inner = inner;
    states->states[state].below = below;
    return inner;
}
