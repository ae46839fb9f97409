#include "grammar/schema.h"

#include "base/alloc.h"
#include "base/error.h"
#include "grammar/regex.h"

#include <stdio.h>
#include <string.h>

#define ONE_OF_MAX 64

/* ---- keywords ------------------------------------------------------------------------------ */

typedef enum keyword_use {
    USE_NOTE,  /* says nothing of values */
    USE_TYPE,  /* "type" */
    USE_ALONE, /* says all of a value: beside it stand notes only, or "type" beside constants */
    USE_PART,  /* of the values of some types */
    USE_FALSE  /* taken where it is false */
} keyword_use;

static const struct keyword {
    const char *name;
    keyword_use use;
    unsigned types; /* USE_PART: the types that it is about */
} keywords[] = {
    {"$schema", USE_NOTE, 0},
    {"$comment", USE_NOTE, 0},
    {"$defs", USE_NOTE, 0},
    {"definitions", USE_NOTE, 0},
    {"title", USE_NOTE, 0},
    {"description", USE_NOTE, 0},
    {"default", USE_NOTE, 0},
    {"examples", USE_NOTE, 0},
    {"example", USE_NOTE, 0},
    {"deprecated", USE_NOTE, 0},
    {"readOnly", USE_NOTE, 0},
    {"writeOnly", USE_NOTE, 0},
    {"discriminator", USE_NOTE, 0},
    {"contentEncoding", USE_NOTE, 0},
    {"contentMediaType", USE_NOTE, 0},
    {"type", USE_TYPE, 0},
    {"$ref", USE_ALONE, 0},
    {"anyOf", USE_ALONE, 0},
    {"oneOf", USE_ALONE, 0},
    {"allOf", USE_ALONE, 0},
    {"enum", USE_ALONE, 0},
    {"const", USE_ALONE, 0},
    {"minLength", USE_PART, SP_TYPE_STRING},
    {"maxLength", USE_PART, SP_TYPE_STRING},
    {"pattern", USE_PART, SP_TYPE_STRING},
    {"format", USE_PART, SP_TYPE_STRING},
    {"minimum", USE_PART, SP_TYPE_NUMBER | SP_TYPE_INTEGER},
    {"maximum", USE_PART, SP_TYPE_NUMBER | SP_TYPE_INTEGER},
    {"exclusiveMinimum", USE_PART, SP_TYPE_NUMBER | SP_TYPE_INTEGER},
    {"exclusiveMaximum", USE_PART, SP_TYPE_NUMBER | SP_TYPE_INTEGER},
    {"items", USE_PART, SP_TYPE_ARRAY},
    {"prefixItems", USE_PART, SP_TYPE_ARRAY},
    {"minItems", USE_PART, SP_TYPE_ARRAY},
    {"maxItems", USE_PART, SP_TYPE_ARRAY},
    {"uniqueItems", USE_FALSE, 0},
    {"properties", USE_PART, SP_TYPE_OBJECT},
    {"required", USE_PART, SP_TYPE_OBJECT},
    {"additionalProperties", USE_PART, SP_TYPE_OBJECT},
};

static const struct keyword *find_keyword(const char *name)
{
    for (size_t i = 0; i < sizeof keywords / sizeof *keywords; i++)
        if (strcmp(keywords[i].name, name) == 0)
            return &keywords[i];
    return NULL;
}

/* ---- the maker ----------------------------------------------------------------------------- */

sp_schema_maker sp_schema_maker_start(sp_error *error)
{
    return (sp_schema_maker){.error = error};
}

void sp_schema_maker_free(sp_schema_maker *maker)
{
    for (int32_t i = 0; i < maker->n_tasks; i++)
        sp_free(maker->tasks[i].path);
    sp_free(maker->tasks);
    sp_net_builder_free(&maker->net);
    *maker = (sp_schema_maker){0};
}

bool sp_schema_failed(const sp_schema_maker *maker)
{
    return maker->status != SP_OK || maker->net.status != SP_OK;
}

void sp_schema_no_memory(sp_schema_maker *maker)
{
    if (!sp_schema_failed(maker))
        maker->status = sp_fail_memory(maker->error, 0, "a schema");
}

static void add_pointer_part(sp_text *out, const char *part)
{
    sp_text_add(out, "/");
    for (; *part; part++) {
        if (*part == '~')
            sp_text_add(out, "~0");
        else if (*part == '/')
            sp_text_add(out, "~1");
        else
            sp_text_add_bytes(out, part, 1);
    }
}

void sp_schema_path(sp_text *out, const char *path, const char *keyword, const char *name)
{
    sp_text_add(out, path ? path : "#");
    if (keyword)
        add_pointer_part(out, keyword);
    if (name)
        add_pointer_part(out, name);
}

void sp_schema_refuse(sp_schema_maker *maker, const char *code, const char *path,
                      const char *keyword, const char *format, ...)
{
    sp_text place = {0}, why = {0};
    char text[256];
    va_list arguments;

    if (sp_schema_failed(maker))
        return;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    sp_schema_path(&place, path, keyword, NULL);
    sp_text_add(&why, text);
    if (place.failed || why.failed)
        sp_schema_no_memory(maker);
    else
        maker->status = sp_fail(maker->error, SP_ERR_INPUT, code, place.data, -1, "%.200s: %s",
                                place.data, why.data ? why.data : "");
    sp_text_free(&place);
    sp_text_free(&why);
}

int32_t sp_schema_pattern(sp_schema_maker *maker, const char *pattern, size_t bytes, bool in_string,
                          const char *path, const char *keyword)
{
    sp_error error;
    int32_t rule = 0;
    sp_status status;

    if (sp_schema_failed(maker))
        return 0;
    status = sp_regex_add(&maker->net, pattern, bytes, in_string ? SP_REGEX_STRING : SP_REGEX_WHOLE,
                          &maker->pattern_steps, &rule, &error);
    if (status == SP_OK || sp_schema_failed(maker))
        return rule;
    sp_schema_refuse(maker, error.code, path, keyword, "%s", error.text);
    maker->status = status;
    return 0;
}

int64_t sp_schema_count(sp_schema_maker *maker, const sp_schema_task *task, const char *keyword,
                        int64_t otherwise)
{
    const json_t *value = json_object_get(task->schema, keyword);
    double number = json_number_value(value);

    if (!value)
        return otherwise;
    if (!json_is_number(value) || !(number >= 0) || number > 1e15 ||
        (double)(int64_t)number < number) {
        sp_schema_refuse(maker, SP_GRAMMAR_MALFORMED, task->path, keyword,
                         "is not a whole number of 0 or more");
        return otherwise;
    }
    return (int64_t)number;
}

/* ---- tasks --------------------------------------------------------------------------------- */

static bool reserve_task(sp_schema_maker *maker, const char *path)
{
    int32_t capacity = maker->tasks_capacity ? maker->tasks_capacity * 2 : 32;
    sp_schema_task *grown;

    if (maker->n_tasks >= SP_SCHEMA_PLACES_MAX) {
        sp_schema_refuse(maker, SP_GRAMMAR_TOO_LARGE, path, NULL,
                         "the schema has more than %d places", SP_SCHEMA_PLACES_MAX);
        return false;
    }
    if (maker->n_tasks < maker->tasks_capacity)
        return true;
    grown = sp_realloc(maker->tasks, (size_t)capacity * sizeof *grown);
    if (!grown) {
        sp_schema_no_memory(maker);
        return false;
    }
    maker->tasks = grown;
    maker->tasks_capacity = capacity;
    return true;
}

int32_t sp_schema_rule(sp_schema_maker *maker, const json_t *schema, const char *path)
{
    sp_schema_task task = {.schema = schema};

    if (!path)
        sp_schema_no_memory(maker);
    if (sp_schema_failed(maker))
        return 0;
    for (int32_t i = 0; i < maker->n_tasks; i++)
        if (maker->tasks[i].schema == schema && schema && !json_is_boolean(schema))
            return maker->tasks[i].rule;
    if (!reserve_task(maker, path))
        return 0;
    task.rule = sp_net_rule(&maker->net);
    task.path = sp_strdup(path);
    if (!task.path)
        sp_schema_no_memory(maker);
    else
        maker->tasks[maker->n_tasks++] = task;
    return task.rule;
}

/* ---- types --------------------------------------------------------------------------------- */

unsigned sp_schema_type_named(const char *name)
{
    static const struct {
        const char *name;
        unsigned type;
    } types[] = {
        {"null", SP_TYPE_NULL},       {"boolean", SP_TYPE_BOOLEAN},
        {"integer", SP_TYPE_INTEGER}, {"number", SP_TYPE_NUMBER | SP_TYPE_INTEGER},
        {"string", SP_TYPE_STRING},   {"array", SP_TYPE_ARRAY},
        {"object", SP_TYPE_OBJECT},
    };

    for (size_t i = 0; name && i < sizeof types / sizeof *types; i++)
        if (strcmp(types[i].name, name) == 0)
            return types[i].type;
    return 0;
}

/* What "type" says; without it the types that the other keywords are about, else all. */
static unsigned types_of(sp_schema_maker *maker, const sp_schema_task *task)
{
    const json_t *type = json_object_get(task->schema, "type");
    size_t n = json_is_array(type) ? json_array_size(type) : 1;
    unsigned types = 0;
    const char *name;
    json_t *value;

    for (size_t i = 0; type && i < n; i++) {
        const json_t *one = json_is_array(type) ? json_array_get(type, i) : type;
        unsigned named = sp_schema_type_named(json_string_value(one));

        if (named == 0)
            sp_schema_refuse(maker, SP_GRAMMAR_MALFORMED, task->path, "type",
                             "is not a type's name, or a list of them");
        types |= named;
    }
    if (type)
        return types;
    json_object_foreach((json_t *)(uintptr_t)task->schema, name, value)
    {
        const struct keyword *keyword = find_keyword(name);

        types |= keyword && keyword->use == USE_PART ? keyword->types : 0;
    }
    return types ? types : SP_TYPE_ALL;
}

static void add_types(sp_schema_maker *maker, const sp_schema_task *task, int32_t start,
                      int32_t end)
{
    static const char *const words[] = {"null", "true", "false"};
    sp_net_builder *net = &maker->net;
    unsigned types = types_of(maker, task);

    for (int i = 0; i < 3; i++)
        if (types & (i == 0 ? SP_TYPE_NULL : SP_TYPE_BOOLEAN))
            sp_net_nothing(net, sp_net_literal(net, start, words[i], strlen(words[i])), end);
    if (types & SP_TYPE_STRING)
        sp_schema_add_string(maker, task, start, end);
    if (types & (SP_TYPE_INTEGER | SP_TYPE_NUMBER))
        sp_schema_add_number(maker, task, !(types & SP_TYPE_NUMBER), start, end);
    if (types & SP_TYPE_OBJECT)
        sp_schema_add_object(maker, task, start, end);
    if (types & SP_TYPE_ARRAY)
        sp_schema_add_array(maker, task, start, end);
}

/* ---- keywords that say all ------------------------------------------------------------------- */

static unsigned type_of_value(const json_t *value)
{
    switch (json_typeof(value)) {
    case JSON_OBJECT:
        return SP_TYPE_OBJECT;
    case JSON_ARRAY:
        return SP_TYPE_ARRAY;
    case JSON_STRING:
        return SP_TYPE_STRING;
    case JSON_INTEGER:
        return SP_TYPE_INTEGER;
    case JSON_REAL:
        return SP_TYPE_NUMBER;
    case JSON_TRUE:
    case JSON_FALSE:
        return SP_TYPE_BOOLEAN;
    case JSON_NULL:
        break;
    }
    return SP_TYPE_NULL;
}

static int take_json(const char *bytes, size_t n, void *user)
{
    sp_text_add_bytes(user, bytes, n);
    return 0;
}

static void add_constant(sp_schema_maker *maker, const sp_schema_task *task, const json_t *value,
                         int32_t start, int32_t end)
{
    sp_net_builder *net = &maker->net;
    sp_text text = {0};

    if (json_object_get(task->schema, "type") && !(type_of_value(value) & types_of(maker, task)))
        return;
    if (json_dump_callback(value, take_json, &text, JSON_ENCODE_ANY | JSON_COMPACT) != 0 ||
        text.failed)
        sp_schema_no_memory(maker);
    else
        sp_net_nothing(net, sp_net_literal(net, start, text.data, text.bytes), end);
    sp_text_free(&text);
}

static void add_enum(sp_schema_maker *maker, const sp_schema_task *task, const json_t *list,
                     int32_t start, int32_t end)
{
    if (!json_is_array(list))
        sp_schema_refuse(maker, SP_GRAMMAR_MALFORMED, task->path, "enum", "is not a list");
    for (size_t i = 0; i < json_array_size(list) && !sp_schema_failed(maker); i++)
        add_constant(maker, task, json_array_get(list, i), start, end);
}

static void add_reference(sp_schema_maker *maker, const sp_schema_task *task,
                          const json_t *reference, int32_t start, int32_t end)
{
    const char *name = json_string_value(reference);
    const json_t *schema = sp_schema_find(maker->root, name);

    if (!schema)
        sp_schema_refuse(maker, SP_GRAMMAR_UNSUPPORTED, task->path, "$ref",
                         "\"%.100s\" is no place in this schema (\"#/..\")", name ? name : "");
    else
        sp_net_call(&maker->net, start, sp_schema_rule(maker, schema, name), end);
}

/* Alternatives of which exactly one must hold: each two must exclude each other by what is said of
 * them, because nothing here could count. */
static void check_one_of(sp_schema_maker *maker, const sp_schema_task *task, const json_t *list)
{
    size_t n = json_array_size(list);

    if (n > ONE_OF_MAX)
        sp_schema_refuse(maker, SP_GRAMMAR_TOO_LARGE, task->path, "oneOf",
                         "has more than %d alternatives", ONE_OF_MAX);
    for (size_t i = 0; i < n && !sp_schema_failed(maker); i++)
        for (size_t j = i + 1; j < n; j++)
            if (!sp_schema_are_disjoint(maker->root, json_array_get(list, i),
                                        json_array_get(list, j)))
                sp_schema_refuse(maker, SP_GRAMMAR_UNSUPPORTED, task->path, "oneOf",
                                 "is supported where types, constants or a required member with a "
                                 "constant tell all alternatives apart; %zu and %zu may both hold",
                                 i, j);
}

static void add_alternatives(sp_schema_maker *maker, const sp_schema_task *task,
                             const char *keyword, const json_t *list, int32_t start, int32_t end)
{
    bool all = strcmp(keyword, "allOf") == 0;

    if (!json_is_array(list) || json_array_size(list) == 0)
        sp_schema_refuse(maker, SP_GRAMMAR_MALFORMED, task->path, keyword,
                         "is not a list of schemas");
    if (all && json_array_size(list) > 1)
        sp_schema_refuse(maker, SP_GRAMMAR_UNSUPPORTED, task->path, keyword,
                         "of more than one schema is not supported");
    if (strcmp(keyword, "oneOf") == 0)
        check_one_of(maker, task, list);
    for (size_t i = 0; i < json_array_size(list) && !sp_schema_failed(maker); i++) {
        sp_text path = {0};
        char index[24];

        snprintf(index, sizeof index, "%zu", i);
        sp_schema_path(&path, task->path, keyword, index);
        sp_net_call(&maker->net, start, sp_schema_rule(maker, json_array_get(list, i), path.data),
                    end);
        sp_text_free(&path);
    }
}

static void add_alone(sp_schema_maker *maker, const sp_schema_task *task, const char *keyword,
                      int32_t start, int32_t end)
{
    const json_t *value = json_object_get(task->schema, keyword);

    if (strcmp(keyword, "$ref") == 0)
        add_reference(maker, task, value, start, end);
    else if (strcmp(keyword, "enum") == 0)
        add_enum(maker, task, value, start, end);
    else if (strcmp(keyword, "const") == 0)
        add_constant(maker, task, value, start, end);
    else
        add_alternatives(maker, task, keyword, value, start, end);
}

/* ---- one schema ---------------------------------------------------------------------------- */

/* A keyword that says all of a value must not stand beside one that says something else. */
static void check_beside(sp_schema_maker *maker, const sp_schema_task *task, const char *alone)
{
    bool constants = strcmp(alone, "enum") == 0 || strcmp(alone, "const") == 0;
    const char *name;
    json_t *value;

    json_object_foreach((json_t *)(uintptr_t)task->schema, name, value)
    {
        const struct keyword *keyword = find_keyword(name);

        if (!keyword || keyword->use == USE_NOTE || keyword->use == USE_FALSE ||
            strcmp(name, alone) == 0 || (constants && keyword->use == USE_TYPE))
            continue;
        sp_schema_refuse(maker, SP_GRAMMAR_UNSUPPORTED, task->path, name,
                         "beside \"%s\" is not supported", alone);
    }
}

/* Refuses what is not known. Returns the keyword that says all; NULL: there is none. */
static const char *check_keywords(sp_schema_maker *maker, const sp_schema_task *task)
{
    const char *name, *alone = NULL;
    json_t *value;

    json_object_foreach((json_t *)(uintptr_t)task->schema, name, value)
    {
        const struct keyword *keyword = find_keyword(name);
        bool is_root = strcmp(name, "$id") == 0 && task->schema == maker->root;

        if (keyword ? keyword->use == USE_FALSE && !json_is_false(value)
                    : !is_root && strncmp(name, "x-", 2) != 0)
            sp_schema_refuse(maker, SP_GRAMMAR_UNSUPPORTED, task->path, name,
                             "the keyword is not supported");
        if (keyword && keyword->use == USE_ALONE && !alone)
            alone = name;
    }
    if (alone)
        check_beside(maker, task, alone);
    return alone;
}

static void make_schema(sp_schema_maker *maker, const sp_schema_task *task)
{
    sp_net_builder *net = &maker->net;
    int32_t start = sp_net_start(net, task->rule), end = sp_net_node_add(net);
    const char *alone;

    sp_net_end(net, end);
    if (json_is_false(task->schema))
        return; /* it leads nowhere */
    if (json_is_true(task->schema)) {
        sp_net_call(net, start, sp_json_rule(maker, SP_JSON_VALUE), end);
        return;
    }
    if (!json_is_object(task->schema)) {
        sp_schema_refuse(maker, SP_GRAMMAR_MALFORMED, task->path, NULL, "is not a schema");
        return;
    }
    alone = check_keywords(maker, task);
    if (sp_schema_failed(maker))
        return;
    if (alone)
        add_alone(maker, task, alone, start, end);
    else
        add_types(maker, task, start, end);
}

sp_status sp_schema_make_all(sp_schema_maker *maker, const json_t *root)
{
    maker->root = root;
    while (maker->n_done < maker->n_tasks && !sp_schema_failed(maker)) {
        const sp_schema_task task = maker->tasks[maker->n_done++]; /* the list may move */

        make_schema(maker, &task);
    }
    return maker->status;
}
