/*
 * states.h: the states that an output can be in, made as they are met and kept. A state is a list
 * of stacks: a node, and the nodes at which the rules around it go on. From a state each byte leads
 * to one other state, or nowhere; both are remembered, so that a walk over a vocabulary costs a
 * look-up per byte.
 *
 * Stacks and states are numbers in tables that hold each of them once. Which number a state has
 * depends on what was met before, its content and what it leads to do not: stacks are listed in the
 * order in which the network names them. More than SP_STATE_STACKS_MAX at once (a choice between
 * objects that begin alike, one in another) lose the last of them, which leaves a part of the
 * grammar out and keeps the rest.
 *
 * Rules are open at most depth_max of the network deep; a state exists only if its rules can be
 * ended within that.
 *
 * One thread at a time. A failure to allocate is kept: until sp_states_clear everything leads
 * nowhere.
 */
#ifndef SP_GRAMMAR_STATES_H
#define SP_GRAMMAR_STATES_H

#include "grammar/network.h"

#define SP_STATE_STACKS_MAX 512
#define SP_STATE_NONE       (-2) /* nothing that begins so is in the grammar */
#define SP_STATE_UNKNOWN    (-1)

/* What is below a stack: the end of the output, or a hole whose content is not known. */
#define SP_STACK_BOTTOM (-1)
#define SP_STACK_HOLE   (-3)

typedef struct sp_stack {
    int32_t node, below; /* below: the stack at which its rule ends, or one of the two above */
    int32_t depth;       /* stacks below it */
    uint32_t seen;       /* the last expansion that met it */
} sp_stack;

/* Tokens that stay inside of the hole's rule, and places of the vocabulary at which it is left. */
typedef struct sp_state_mask {
    bool made;
    uint32_t *bits; /* owned; NULL: few tokens are allowed, */
    int32_t *few;   /* [n_few] owned: these */
    int32_t n_few;
    int32_t *leaves; /* [n_leaves] owned: nodes of the vocabulary */
    int32_t n_leaves, leaves_capacity;
} sp_state_mask;

typedef struct sp_state {
    int32_t first, n;   /* stacks, in the table of lists */
    bool complete;      /* what was read is in the grammar */
    bool hole;          /* the hole is reached: what comes next is its own */
    int32_t *next;      /* [256] owned; NULL: no byte was looked up */
    int32_t inner;      /* the same over a hole; SP_STATE_UNKNOWN; itself where there is none */
    int32_t below;      /* the stack that the hole represents */
    sp_state_mask mask; /* of a state without a hole: never made */
} sp_state;

typedef struct sp_states {
    const sp_net *net; /* borrowed */
    sp_stack *stacks;
    sp_state *states;
    int32_t *lists; /* of stacks */
    int32_t *stack_cells, *state_cells;
    int32_t n_stacks, n_states, n_lists;
    int32_t stacks_capacity, states_capacity, lists_capacity;
    uint32_t stack_mask, state_mask; /* cells - 1 */
    uint32_t expansion;
    size_t bytes; /* of all this, masks included */
    bool failed;
    bool left_out;                /* some state would have more than SP_STATE_STACKS_MAX stacks */
    int32_t *work, work_capacity; /* of one expansion */
    int32_t list[SP_STATE_STACKS_MAX], n_list;
    bool list_complete, list_hole;
} sp_states;

sp_status sp_states_create(const sp_net *net, sp_states *out_states);
void sp_states_free(sp_states *states); /* zeros are allowed */
/* Forgets all of them; numbers of states are void. SP_ERR_MEMORY. */
sp_status sp_states_clear(sp_states *states);

/* The depth_max of a network of which a byte opens so many rules, one in another; -1: too many. */
int32_t sp_states_depth_for(int32_t opened);

/* The state before the first byte. */
int32_t sp_states_start(sp_states *states);
/* The state after a byte, or SP_STATE_NONE. `state` is a state. */
int32_t sp_states_next(sp_states *states, int32_t state, uint8_t byte);
/* The state over a hole at a node, which any call of its rule may come to. */
int32_t sp_states_at_node(sp_states *states, int32_t node);
/* The state of what a stack goes on with. */
int32_t sp_states_of_stack(sp_states *states, int32_t stack);
/* The state over a hole in the place of the deepest stack that all of its stacks stand on, which is
 * states[state].below; or the state itself, where they stand on nothing else or too deep. */
int32_t sp_states_inner(sp_states *states, int32_t state);
/* Whether any byte can follow. */
bool sp_states_goes_on(const sp_states *states, int32_t state);

#endif
