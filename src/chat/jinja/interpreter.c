/*
 * The interpreter: walks the nodes of a template. Variables live in scopes that are searched from
 * the innermost: the body of a loop, of a macro and of a block have their own, an `if` has not, and
 * each pass of a loop starts afresh. That is Jinja's rule: what a loop sets is gone after it, and a
 * namespace is the way around that.
 */
#include "chat/jinja/interpreter.h"

#include "chat/jinja/builtins.h"

#include <string.h>

typedef struct entry {
    struct entry *next;
    int32_t name;
    sp_value value;
} entry;

typedef struct scope {
    struct scope *outer;
    entry *entries;
} scope;

struct sp_macro {
    const sp_node *node;
    scope *scope; /* where it was defined */
};

typedef enum { FLOW_ON, FLOW_BREAK, FLOW_CONTINUE } flow;

typedef struct {
    sp_render *render;
    const sp_template *template;
    const sp_value *globals; /* [template->n_names] */
    scope *scope;
    sp_build *out;
    const sp_str *captured; /* of the block that is being set */
} run;

static sp_value evaluate(run *now, const sp_node *node);
static flow execute(run *now, const sp_node *first);

static sp_value undefined(void)
{
    return sp_value_undefined(NULL);
}

/* --- Variables ------------------------------------------------------------------------------- */

static scope *open_scope(run *now, scope *outer)
{
    scope *inner = sp_render_take(now->render, 1, sizeof *inner);

    if (inner)
        inner->outer = outer;
    return inner;
}

static void assign(run *now, int32_t name, sp_value value)
{
    entry *at;

    for (at = now->scope->entries; at; at = at->next)
        if (at->name == name) {
            at->value = value;
            return;
        }
    at = sp_render_take(now->render, 1, sizeof *at);
    if (!at)
        return;
    *at = (entry){now->scope->entries, name, value};
    now->scope->entries = at;
}

static sp_value look_up(run *now, int32_t name)
{
    const sp_str *text = now->template->names[name];
    int32_t function;

    for (const scope *in = now->scope; in; in = in->outer)
        for (const entry *at = in->entries; at; at = at->next)
            if (at->name == name)
                return at->value;
    if (now->globals[name].kind != SP_VALUE_UNDEFINED)
        return now->globals[name];
    function = sp_function_find(text->data, text->bytes);
    if (function >= 0)
        return (sp_value){.kind = SP_VALUE_FUNCTION, .as.function = function};
    return sp_value_undefined(text);
}

/* `set ns.name = value` */
static void assign_attribute(run *now, const sp_node *target, sp_value value)
{
    sp_value object = evaluate(now, target->a);

    if (object.kind == SP_VALUE_NAMESPACE && target->kind == SP_NODE_ATTRIBUTE)
        sp_map_set(now->render, object.as.map, target->constant.as.text, value);
    else
        sp_render_fail(now->render, "only a namespace's attributes can be set");
}

static void assign_target(run *now, const sp_node *target, sp_value value)
{
    const sp_node *part;
    sp_list list;
    size_t n = 0;

    if (target->kind == SP_NODE_NAME) {
        assign(now, target->name, value);
        return;
    }
    if (target->kind != SP_NODE_LIST) {
        assign_attribute(now, target, value);
        return;
    }
    list = sp_value_items(now->render, &value);
    for (part = target->a; part && n < list.n; part = part->next)
        assign_target(now, part, list.items[n++]);
    if (part || n < list.n)
        sp_render_fail(now->render, "unpacking %zu items to another number of names", list.n);
}

/* --- Calls ----------------------------------------------------------------------------------- */

/* The values of argument nodes. */
static sp_args evaluate_arguments(run *now, const sp_node *first)
{
    size_t n = 0, n_keywords = 0;
    sp_value *values;
    const sp_str **keywords;

    for (const sp_node *at = first; at; at = at->next)
        *(at->constant.kind == SP_VALUE_TEXT ? &n_keywords : &n) += 1;
    if (n + n_keywords == 0)
        return (sp_args){0};
    values = sp_render_take(now->render, n + n_keywords, sizeof *values);
    keywords = sp_render_take(now->render, n_keywords, sizeof *keywords);
    if (!values || !keywords)
        return (sp_args){0};
    n_keywords = 0;
    for (const sp_node *at = first; at; at = at->next)
        if (at->constant.kind == SP_VALUE_TEXT)
            keywords[n_keywords++] = at->constant.as.text;
    n = n_keywords = 0;
    for (const sp_node *at = first; at; at = at->next)
        if (at->constant.kind != SP_VALUE_TEXT)
            values[n++] = evaluate(now, at->a);
    for (const sp_node *at = first; at; at = at->next)
        if (at->constant.kind == SP_VALUE_TEXT)
            values[n + n_keywords++] = evaluate(now, at->a);
    return (sp_args){values, n, keywords, values + n, n_keywords};
}

static const sp_value *keyword_of(const sp_args *args, const sp_str *name, size_t *n_used)
{
    for (size_t i = 0; i < args->n_keywords; i++)
        if (sp_str_equal(name, args->keywords[i]->data, args->keywords[i]->bytes)) {
            ++*n_used;
            return &args->keyword_values[i];
        }
    return NULL;
}

/* Sets the parameters in the macro's scope, which is open. */
static void bind_parameters(run *now, const sp_node *parameter, const sp_args *args)
{
    size_t n = 0, n_used = 0;

    for (; parameter; parameter = parameter->next) {
        const sp_str *name = now->template->names[parameter->name];
        const sp_value *value = keyword_of(args, name, &n_used);

        if (value && n < args->n)
            sp_render_fail(now->render, "a macro got %.*s twice", SP_STR_SHOWN(name));
        if (n < args->n)
            value = &args->positional[n++];
        assign(now, parameter->name,
               value          ? *value
               : parameter->b ? evaluate(now, parameter->b)
                              : sp_value_undefined(name));
    }
    if (n < args->n || n_used < args->n_keywords)
        sp_render_fail(now->render, "a macro got an argument that it does not have");
}

/* What a body writes, run in a scope of its own. `args` are those of a macro, or NULL. */
static const sp_str *capture(run *now, scope *outer, const sp_node *body, const sp_node *parameters,
                             const sp_args *args)
{
    run inner = *now;
    sp_build build = {0};

    inner.scope = open_scope(now, outer);
    inner.out = &build;
    if (!inner.scope || !sp_render_enter(now->render))
        return &sp_str_empty;
    if (args)
        bind_parameters(&inner, parameters, args);
    execute(&inner, body);
    now->render->depth--;
    return sp_build_finish(now->render, &build);
}

static sp_value call(run *now, const sp_node *node)
{
    sp_value callee = evaluate(now, node->a);
    sp_args args = evaluate_arguments(now, node->b);
    const sp_node *macro;

    if (now->render->failed != SP_OK)
        return undefined();
    now->render->line = node->line;
    switch (callee.kind) {
    case SP_VALUE_MACRO:
        macro = callee.as.macro->node;
        return sp_value_text(capture(now, callee.as.macro->scope, macro->b, macro->a, &args));
    case SP_VALUE_FUNCTION:
        return sp_function_call(now->render, callee.as.function, &args);
    case SP_VALUE_METHOD:
        return sp_method_call(now->render, callee.as.method, &args);
    case SP_VALUE_UNDEFINED:
        if (callee.as.why) {
            sp_render_fail(now->render, "%.*s is undefined", SP_STR_SHOWN(callee.as.why));
            return undefined();
        }
        /* fall through */
    default:
        sp_render_fail(now->render, "%s cannot be called", sp_value_kind_name(&callee));
        return undefined();
    }
}

/* --- Expressions ------------------------------------------------------------------------------ */

static sp_value make_list(run *now, const sp_node *node)
{
    sp_items items = {0};

    for (const sp_node *at = node->a; at; at = at->next)
        sp_items_add(now->render, &items, evaluate(now, at));
    return sp_items_list(now->render, &items, node->flag);
}

static sp_value make_map(run *now, const sp_node *node)
{
    sp_map *map = sp_map_create(now->render, 8);

    for (const sp_node *at = node->a; at && map; at = at->next->next) {
        sp_value key = evaluate(now, at), value = evaluate(now, at->next);

        if (key.kind != SP_VALUE_TEXT && now->render->failed == SP_OK)
            sp_render_unsupported(now->render, "a key that is %s", sp_value_kind_name(&key));
        if (now->render->failed != SP_OK)
            return undefined();
        sp_map_set(now->render, map, key.as.text, value);
    }
    return map ? (sp_value){.kind = SP_VALUE_MAP, .as.map = map} : undefined();
}

static sp_value evaluate_or_none(run *now, const sp_node *node)
{
    return node ? evaluate(now, node) : sp_value_none();
}

static sp_value make_slice(run *now, const sp_node *node)
{
    sp_value object = evaluate(now, node->a), begin = evaluate_or_none(now, node->b);
    sp_value end = evaluate_or_none(now, node->c), step = evaluate_or_none(now, node->d);

    return sp_slice(now->render, &object, &begin, &end, &step);
}

static sp_value filter_or_test(run *now, const sp_node *node)
{
    sp_value operand = evaluate(now, node->a);
    sp_args args = evaluate_arguments(now, node->b);

    if (node->which < 0) {
        sp_render_unsupported(now->render, "no such %s: %.*s",
                              node->kind == SP_NODE_FILTER ? "filter" : "test",
                              SP_STR_SHOWN(node->constant.as.text));
        return undefined();
    }
    if (node->kind == SP_NODE_FILTER)
        return sp_filter_call(now->render, node->which, &operand, &args);
    return sp_value_bool(sp_test_call(now->render, node->which, &operand, &args));
}

static sp_value compare(run *now, const sp_node *node)
{
    sp_value left = evaluate(now, node->a);

    for (const sp_node *at = node->b; at && now->render->failed == SP_OK; at = at->next) {
        sp_value right = evaluate(now, at->a);

        if (now->render->failed != SP_OK || !sp_compare(now->render, at->op, &left, &right))
            return sp_value_bool(false);
        left = right;
    }
    return sp_value_bool(true);
}

static sp_value logic(run *now, const sp_node *node)
{
    sp_value value = evaluate(now, node->a);

    if (node->kind == SP_NODE_NOT)
        return sp_value_bool(!sp_value_truth(&value));
    if (node->kind == SP_NODE_CHOICE) {
        if (sp_value_truth(&value))
            return evaluate(now, node->b);
        return node->c ? evaluate(now, node->c) : undefined();
    }
    if (sp_value_truth(&value) == (node->kind == SP_NODE_OR))
        return value;
    return evaluate(now, node->b);
}

static sp_value arithmetic(run *now, const sp_node *node)
{
    sp_value left = evaluate(now, node->a), right;

    if (node->kind == SP_NODE_BINARY) {
        right = evaluate(now, node->b);
        return now->render->failed == SP_OK ? sp_binary(now->render, node->op, &left, &right)
                                            : undefined();
    }
    if (node->kind == SP_NODE_NEGATE)
        return sp_negate(now->render, &left);
    if (!sp_value_is_number(&left))
        sp_render_fail(now->render, "+ before %s", sp_value_kind_name(&left));
    return left;
}

static sp_value part(run *now, const sp_node *node)
{
    sp_value object = evaluate(now, node->a), index;

    if (now->render->failed != SP_OK)
        return undefined();
    if (node->kind == SP_NODE_ATTRIBUTE)
        return sp_value_attribute(now->render, &object, node->constant.as.text);
    index = evaluate(now, node->b);
    return sp_value_item(now->render, &object, &index);
}

static sp_value evaluate_node(run *now, const sp_node *node)
{
    switch (node->kind) {
    case SP_NODE_CONSTANT:
        return node->constant;
    case SP_NODE_CAPTURED:
        return sp_value_text(now->captured);
    case SP_NODE_NAME:
        return look_up(now, node->name);
    case SP_NODE_LIST:
        return make_list(now, node);
    case SP_NODE_MAP:
        return make_map(now, node);
    case SP_NODE_ATTRIBUTE:
    case SP_NODE_ITEM:
        return part(now, node);
    case SP_NODE_SLICE:
        return make_slice(now, node);
    case SP_NODE_CALL:
        return call(now, node);
    case SP_NODE_FILTER:
    case SP_NODE_TEST:
        return filter_or_test(now, node);
    case SP_NODE_NOT:
    case SP_NODE_AND:
    case SP_NODE_OR:
    case SP_NODE_CHOICE:
        return logic(now, node);
    case SP_NODE_COMPARE:
        return compare(now, node);
    default:
        return arithmetic(now, node);
    }
}

static sp_value evaluate(run *now, const sp_node *node)
{
    sp_value value;

    if (!sp_render_enter(now->render))
        return undefined();
    now->render->line = node->line;
    value = evaluate_node(now, node);
    now->render->depth--;
    return value;
}

/* --- Statements ------------------------------------------------------------------------------- */

/* The items of a loop, without those that its condition leaves out. */
static sp_list loop_items(run *now, const sp_node *node)
{
    sp_value iterable = evaluate(now, node->b);
    sp_list list = sp_value_items(now->render, &iterable);
    sp_items kept = {0};
    run inner = *now;

    if (!node->e)
        return list;
    for (size_t i = 0; i < list.n && now->render->failed == SP_OK; i++) {
        sp_value condition;

        inner.scope = open_scope(now, now->scope);
        if (!inner.scope)
            break;
        assign_target(&inner, node->a, list.items[i]);
        condition = evaluate(&inner, node->e);
        if (sp_value_truth(&condition))
            sp_items_add(now->render, &kept, list.items[i]);
    }
    return (sp_list){kept.items, kept.n, false};
}

static flow execute_for(run *now, const sp_node *node)
{
    sp_list list = loop_items(now, node);
    sp_loop *loop = sp_render_take(now->render, 1, sizeof *loop);
    run inner = *now;

    if (!loop)
        return FLOW_ON;
    if (list.n == 0)
        return execute(now, node->d);
    loop->items = list.items;
    loop->n = list.n;
    for (size_t i = 0; i < list.n && now->render->failed == SP_OK; i++) {
        loop->index = i;
        inner.scope = open_scope(now, now->scope);
        if (!inner.scope)
            break;
        assign(&inner, now->template->loop_name,
               (sp_value){.kind = SP_VALUE_LOOP, .as.loop = loop});
        assign_target(&inner, node->a, list.items[i]);
        if (execute(&inner, node->c) == FLOW_BREAK)
            break;
    }
    return FLOW_ON;
}

static void execute_set_block(run *now, const sp_node *node)
{
    sp_value value = sp_value_text(capture(now, now->scope, node->b, NULL, NULL));

    if (node->c) {
        run inner = *now;

        inner.captured = value.as.text;
        value = evaluate(&inner, node->c);
    }
    assign_target(now, node->a, value);
}

static void execute_macro(run *now, const sp_node *node)
{
    sp_macro *macro = sp_render_take(now->render, 1, sizeof *macro);

    if (!macro)
        return;
    *macro = (sp_macro){node, now->scope};
    assign(now, node->name, (sp_value){.kind = SP_VALUE_MACRO, .as.macro = macro});
}

static flow execute_if(run *now, const sp_node *node)
{
    sp_value condition = evaluate(now, node->a);

    if (now->render->failed != SP_OK)
        return FLOW_ON;
    return execute(now, sp_value_truth(&condition) ? node->b : node->c);
}

static flow execute_scope(run *now, const sp_node *node)
{
    run inner = *now;

    inner.scope = open_scope(now, now->scope);
    return inner.scope ? execute(&inner, node->a) : FLOW_ON;
}

static flow execute_one(run *now, const sp_node *node)
{
    sp_value value;

    switch (node->kind) {
    case SP_NODE_TEXT:
        sp_build_add(now->render, now->out, node->constant.as.text);
        return FLOW_ON;
    case SP_NODE_PRINT:
        value = evaluate(now, node->a);
        sp_build_add(now->render, now->out, sp_value_str(now->render, &value));
        return FLOW_ON;
    case SP_NODE_IF:
        return execute_if(now, node);
    case SP_NODE_FOR:
        return execute_for(now, node);
    case SP_NODE_SET:
        assign_target(now, node->a, evaluate(now, node->b));
        return FLOW_ON;
    case SP_NODE_SET_BLOCK:
        execute_set_block(now, node);
        return FLOW_ON;
    case SP_NODE_SCOPE:
        return execute_scope(now, node);
    case SP_NODE_MACRO:
        execute_macro(now, node);
        return FLOW_ON;
    default:
        return node->kind == SP_NODE_BREAK ? FLOW_BREAK : FLOW_CONTINUE;
    }
}

static flow execute(run *now, const sp_node *first)
{
    flow next = FLOW_ON;

    if (!first || !sp_render_enter(now->render))
        return FLOW_ON;
    for (const sp_node *node = first; node && next == FLOW_ON; node = node->next) {
        if (!sp_render_spend(now->render, 1))
            break;
        now->render->line = node->line;
        next = execute_one(now, node);
    }
    now->render->depth--;
    return next;
}

void sp_template_run(const sp_template *template, sp_render *render, const sp_value *globals,
                     sp_build *out)
{
    run now = {.render = render,
               .template = template,
               .globals = globals,
               .out = out,
               .captured = &sp_str_empty};

    now.scope = open_scope(&now, NULL);
    if (now.scope)
        execute(&now, template->body);
}
