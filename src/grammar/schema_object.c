/*
 * schema_object.c: objects. Members come in the order of "properties", then those that are required
 * and not in it, then any others where "additionalProperties" says what they are: it is "none"
 * where the schema has "properties" and does not say. The name of another member has no escape in
 * it and is none of the others'.
 */
#include "grammar/schema.h"

#include "base/alloc.h"

#include <stdlib.h>
#include <string.h>

#define NAME_BYTES_MAX 256

typedef struct member {
    const char *name;
    int32_t rule; /* of its value */
    bool required;
} member;

typedef struct object_shape {
    member *members; /* [n] owned */
    int32_t n, capacity;
    bool has_others; /* members of other names may follow */
    int32_t others;  /* the rule of their values */
} object_shape;

/* ---- members ------------------------------------------------------------------------------- */

static member *find_member(const object_shape *shape, const char *name)
{
    for (int32_t i = 0; i < shape->n; i++)
        if (strcmp(shape->members[i].name, name) == 0)
            return &shape->members[i];
    return NULL;
}

static void add_member(sp_schema_maker *maker, object_shape *shape, member one)
{
    if (shape->n == shape->capacity) {
        int32_t capacity = shape->capacity ? shape->capacity * 2 : 16;
        member *grown = sp_realloc(shape->members, (size_t)capacity * sizeof *grown);

        if (!grown) {
            sp_schema_no_memory(maker);
            return;
        }
        shape->members = grown;
        shape->capacity = capacity;
    }
    shape->members[shape->n++] = one;
}

static void read_properties(sp_schema_maker *maker, const sp_schema_task *task, object_shape *shape)
{
    json_t *properties = json_object_get(task->schema, "properties"), *schema;
    const char *name;

    if (properties && !json_is_object(properties))
        sp_schema_refuse(maker, SP_GRAMMAR_MALFORMED, task->path, "properties", "is not an object");
    json_object_foreach(properties, name, schema)
    {
        sp_text path = {0};

        if (sp_schema_failed(maker))
            return;
        sp_schema_path(&path, task->path, "properties", name);
        add_member(maker, shape,
                   (member){.name = name, .rule = sp_schema_rule(maker, schema, path.data)});
        sp_text_free(&path);
    }
}

static void read_others(sp_schema_maker *maker, const sp_schema_task *task, object_shape *shape)
{
    const json_t *others = json_object_get(task->schema, "additionalProperties");
    sp_text path = {0};

    if (json_is_false(others) || (!others && json_object_get(task->schema, "properties")))
        return;
    shape->has_others = true;
    if (!others || json_is_true(others)) {
        shape->others = sp_json_rule(maker, SP_JSON_VALUE);
        return;
    }
    sp_schema_path(&path, task->path, "additionalProperties", NULL);
    shape->others = sp_schema_rule(maker, others, path.data);
    sp_text_free(&path);
}

/* What is required and has no schema of its own is one of the others. */
static void read_required(sp_schema_maker *maker, const sp_schema_task *task, object_shape *shape)
{
    const json_t *required = json_object_get(task->schema, "required");
    bool closed = json_is_false(json_object_get(task->schema, "additionalProperties"));

    if (required && !json_is_array(required))
        sp_schema_refuse(maker, SP_GRAMMAR_MALFORMED, task->path, "required",
                         "is not a list of names");
    for (size_t i = 0; i < json_array_size(required) && !sp_schema_failed(maker); i++) {
        const char *name = json_string_value(json_array_get(required, i));
        member *one = name ? find_member(shape, name) : NULL;

        if (one)
            one->required = true;
        else if (!name)
            sp_schema_refuse(maker, SP_GRAMMAR_MALFORMED, task->path, "required",
                             "is not a list of names");
        else if (closed)
            sp_schema_refuse(maker, SP_GRAMMAR_UNSATISFIABLE, task->path, "required",
                             "names \"%.60s\", which no member may be called", name);
        else
            add_member(
                maker, shape,
                (member){name,
                         shape->has_others ? shape->others : sp_json_rule(maker, SP_JSON_VALUE),
                         true});
    }
}

/* ---- names of other members ------------------------------------------------------------------ */

/* Bytes that a name cannot have as they are. */
static bool is_special(int byte)
{
    return byte == '"' || byte == '\\';
}

/*
 * `at` is where members' names that begin alike have led to: another name differs in the next byte,
 * which is one of ASCII.
 */
static void add_other_bytes(sp_schema_maker *maker, const bool taken[256], int32_t at, int32_t end)
{
    sp_net_builder *net = &maker->net;
    int32_t rest = sp_net_node_add(net);

    sp_net_call(net, rest, sp_json_rule(maker, SP_JSON_NAME_REST), end);
    for (int low = 0x20, high; low < 0x7f; low = high + 1) {
        high = low;
        if (is_special(low) || taken[low])
            continue;
        while (high + 1 < 0x7f && !is_special(high + 1) && !taken[high + 1])
            high++;
        sp_net_bytes(net, at, (uint8_t)low, (uint8_t)high, rest);
    }
}

/* The names [first, last) begin alike with `depth` bytes; they are in order. */
static void add_other_names(sp_schema_maker *maker, const char *const *names, int32_t first,
                            int32_t last, size_t depth, int32_t at, int32_t end)
{
    sp_net_builder *net = &maker->net;
    bool taken[256] = {false}, is_name = false;

    while (first < last && !sp_schema_failed(maker)) {
        unsigned char byte = (unsigned char)names[first][depth];
        int32_t until = first;

        while (until < last && (unsigned char)names[until][depth] == byte)
            until++;
        taken[byte] = true;
        if (byte == '\0') {
            is_name = true;
        } else if (byte >= 0x20 && byte < 0x7f && !is_special(byte)) {
            int32_t next = sp_net_text(net, at, (const char *)&byte, 1);

            add_other_names(maker, names, first, until, depth + 1, next, end);
        }
        first = until;
    }
    if (!is_name)
        sp_net_bytes(net, at, '"', '"', end);
    add_other_bytes(maker, taken, at, end);
}

static int by_text(const void *left, const void *right)
{
    const char *const *a = left, *const *b = right;

    return strcmp(*a, *b);
}

/* A name, with its quotes, that is no member's. */
static void add_other_name(sp_schema_maker *maker, const object_shape *shape, int32_t start,
                           int32_t end)
{
    const char **names = sp_calloc((size_t)shape->n + 1, sizeof *names);
    int32_t at = sp_net_text(&maker->net, start, "\"", 1);

    if (!names) {
        sp_schema_no_memory(maker);
        return;
    }
    for (int32_t i = 0; i < shape->n; i++) {
        names[i] = shape->members[i].name;
        if (strlen(names[i]) > NAME_BYTES_MAX)
            sp_schema_refuse(maker, SP_GRAMMAR_UNSUPPORTED, "#", NULL,
                             "beside other members a name has at most %d bytes", NAME_BYTES_MAX);
    }
    qsort(names, (size_t)shape->n, sizeof *names, by_text);
    if (!sp_schema_failed(maker))
        add_other_names(maker, names, 0, shape->n, 0, at, end);
    sp_free(names);
}

/* ---- the object ------------------------------------------------------------------------------ */

/* `"NAME": VALUE` from a node to another. */
static void add_pair(sp_schema_maker *maker, const member *one, int32_t from, int32_t to)
{
    sp_net_builder *net = &maker->net;
    int32_t value = sp_net_node_add(net), at;
    sp_text key = {0};

    sp_text_json_string(&key, one->name, strlen(one->name));
    sp_text_add(&key, ":");
    if (key.failed)
        sp_schema_no_memory(maker);
    at = sp_net_text(net, from, key.data ? key.data : "", key.bytes);
    sp_net_call(net, at, sp_json_rule(maker, SP_JSON_BLANK), value);
    sp_net_call(net, value, one->rule, to);
    sp_text_free(&key);
}

static void add_others(sp_schema_maker *maker, const object_shape *shape, int32_t from, int32_t to)
{
    sp_net_builder *net = &maker->net;
    int32_t named = sp_net_node_add(net), value = sp_net_node_add(net);

    add_other_name(maker, shape, from, named);
    sp_net_call(net, sp_net_text(net, named, ":", 1), sp_json_rule(maker, SP_JSON_BLANK), value);
    sp_net_call(net, value, shape->others, to);
}

static int32_t n_required_from(const object_shape *shape, int32_t i)
{
    int32_t n = 0;

    for (; i < shape->n; i++)
        n += shape->members[i].required;
    return n;
}

/*
 * Node i of `next` is where member i or a later one comes next, node i of `after` where member i -
 * 1 has just been: a comma leads from there to `next`, a brace to the end where nothing is required
 * any more.
 */
static void add_members(sp_schema_maker *maker, const object_shape *shape, int32_t open,
                        int32_t close)
{
    sp_net_builder *net = &maker->net;
    int32_t blank = sp_json_rule(maker, SP_JSON_BLANK), next = sp_net_node_add(net), after = -1;

    sp_net_nothing(net, open, next);
    if (n_required_from(shape, 0) == 0)
        sp_net_nothing(net, open, close);
    for (int32_t i = 0; i <= shape->n && !sp_schema_failed(maker); i++) {
        int32_t later = sp_net_node_add(net), now = sp_net_node_add(net);

        if (after >= 0) {
            sp_net_call(net, sp_net_text(net, after, ",", 1), blank, next);
            if (n_required_from(shape, i) == 0)
                sp_net_call(net, after, blank, close);
        }
        if (i == shape->n) {
            if (!shape->has_others)
                break;
            add_others(maker, shape, next, now);
            sp_net_call(net, sp_net_text(net, now, ",", 1), blank, next);
            sp_net_call(net, now, blank, close);
            break;
        }
        add_pair(maker, &shape->members[i], next, now);
        if (!shape->members[i].required)
            sp_net_nothing(net, next, later);
        /* Where a member was left out, the one before it goes on in the same way. */
        next = later;
        after = now;
    }
}

void sp_schema_add_object(sp_schema_maker *maker, const sp_schema_task *task, int32_t start,
                          int32_t end)
{
    sp_net_builder *net = &maker->net;
    object_shape shape = {0};
    int32_t open = sp_net_node_add(net), close = sp_net_node_add(net);

    read_properties(maker, task, &shape);
    read_others(maker, task, &shape);
    read_required(maker, task, &shape);
    if (!sp_schema_failed(maker)) {
        sp_net_call(net, sp_net_literal(net, start, "{", 1), sp_json_rule(maker, SP_JSON_BLANK),
                    open);
        sp_net_bytes(net, close, '}', '}', end);
        add_members(maker, &shape, open, close);
    }
    sp_free(shape.members);
}
