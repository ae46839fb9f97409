/* Making and reading values; failing. Texts are in value_text.c, printing in value_print.c. */
#include "chat/jinja/value.h"

#include "chat/jinja/codes.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* --- Failing -------------------------------------------------------------------------------- */

/* Into sp_render.error, unless there was a failure before. */
static void fail_with(sp_render *render, sp_status status, const char *code, const char *text)
{
    if (render->failed == SP_OK)
        render->failed = sp_fail(render->error, status, code, render->subject, render->line,
                                 "%s, line %d: %s", render->subject, render->line, text);
}

void sp_render_fail(sp_render *render, const char *format, ...)
{
    char text[SP_ERROR_TEXT_BYTES];
    va_list arguments;

    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    fail_with(render, SP_ERR_INPUT, SP_CHAT_FAILED, text);
}

void sp_render_unsupported(sp_render *render, const char *format, ...)
{
    char text[SP_ERROR_TEXT_BYTES];
    va_list arguments;

    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    fail_with(render, SP_ERR_UNSUPPORTED, SP_CHAT_UNSUPPORTED, text);
}

void sp_render_raise(sp_render *render, const sp_str *message)
{
    char text[SP_ERROR_TEXT_BYTES];

    snprintf(text, sizeof text, "%.*s", (int)(message->bytes < 400 ? message->bytes : 400),
             message->data);
    if (render->failed == SP_OK)
        render->failed = sp_fail(render->error, SP_ERR_INPUT, SP_CHAT_RAISED, render->subject,
                                 render->line, "the chat template refuses: %s", text);
}

bool sp_render_spend(sp_render *render, size_t n)
{
    if (render->failed != SP_OK)
        return false;
    if (n < (size_t)render->steps_left) {
        render->steps_left -= (int64_t)n;
        return true;
    }
    fail_with(render, SP_ERR_TOO_LARGE, SP_CHAT_LIMIT, "the template takes too many steps");
    return false;
}

bool sp_render_enter(sp_render *render)
{
    if (!sp_render_spend(render, 1))
        return false;
    if (render->depth >= SP_RENDER_DEPTH_MAX) {
        fail_with(render, SP_ERR_TOO_LARGE, SP_CHAT_LIMIT, "the template nests too deep");
        return false;
    }
    render->depth++;
    return true;
}

void *sp_render_take(sp_render *render, size_t count, size_t element_bytes)
{
    void *memory =
        render->failed == SP_OK ? sp_arena_take(&render->arena, count, element_bytes) : NULL;

    if (memory || render->failed != SP_OK)
        return memory;
    if (render->arena.over)
        fail_with(render, SP_ERR_TOO_LARGE, SP_CHAT_LIMIT, "the template takes too much memory");
    else
        render->failed = sp_fail_memory(render->error, count * element_bytes, render->subject);
    return NULL;
}

/* --- Making --------------------------------------------------------------------------------- */

sp_value sp_value_undefined(const sp_str *why)
{
    return (sp_value){.kind = SP_VALUE_UNDEFINED, .as.why = why};
}

sp_value sp_value_none(void)
{
    return (sp_value){.kind = SP_VALUE_NONE};
}

sp_value sp_value_bool(bool truth)
{
    return (sp_value){.kind = SP_VALUE_BOOL, .as.truth = truth};
}

sp_value sp_value_int(int64_t integer)
{
    return (sp_value){.kind = SP_VALUE_INT, .as.integer = integer};
}

sp_value sp_value_real(double real)
{
    return (sp_value){.kind = SP_VALUE_REAL, .as.real = real};
}

sp_value sp_value_text(const sp_str *text)
{
    return (sp_value){.kind = text ? SP_VALUE_TEXT : SP_VALUE_UNDEFINED, .as.text = text};
}

sp_value sp_value_data(sp_render *render, const char *data, size_t bytes)
{
    sp_build build = {0};

    sp_build_add_data(render, &build, data, bytes);
    return sp_value_text(sp_build_finish(render, &build));
}

sp_value sp_value_list(sp_render *render, const sp_value *items, size_t n, bool tuple)
{
    sp_list *list = sp_render_take(render, 1, sizeof *list);
    sp_value *copy = sp_render_take(render, n, sizeof *copy);

    if (!list || !copy)
        return sp_value_undefined(NULL);
    if (n > 0)
        memcpy(copy, items, n * sizeof *copy);
    *list = (sp_list){copy, n, tuple};
    return (sp_value){.kind = SP_VALUE_LIST, .as.list = list};
}

void sp_items_add(sp_render *render, sp_items *items, sp_value value)
{
    if (items->n == items->capacity) {
        size_t capacity = items->capacity ? items->capacity * 2 : 8;
        sp_value *grown = sp_render_take(render, capacity, sizeof *grown);

        if (!grown)
            return;
        if (items->n > 0)
            memcpy(grown, items->items, items->n * sizeof *grown);
        items->items = grown;
        items->capacity = capacity;
    }
    items->items[items->n++] = value;
}

sp_value sp_items_list(sp_render *render, const sp_items *items, bool tuple)
{
    return sp_value_list(render, items->items, items->n, tuple);
}

sp_map *sp_map_create(sp_render *render, size_t capacity)
{
    sp_map *map = sp_render_take(render, 1, sizeof *map);

    if (!map)
        return NULL;
    map->keys = sp_render_take(render, capacity, sizeof *map->keys);
    map->values = sp_render_take(render, capacity, sizeof *map->values);
    map->capacity = capacity;
    return map->keys && map->values ? map : NULL;
}

static bool map_grow(sp_render *render, sp_map *map)
{
    size_t capacity = map->capacity * 2 + 4;
    const sp_str **keys = sp_render_take(render, capacity, sizeof *keys);
    sp_value *values = sp_render_take(render, capacity, sizeof *values);

    if (!keys || !values)
        return false;
    if (map->n > 0) {
        memcpy(keys, map->keys, map->n * sizeof *keys);
        memcpy(values, map->values, map->n * sizeof *values);
    }
    map->keys = keys;
    map->values = values;
    map->capacity = capacity;
    return true;
}

static sp_value *map_cell(sp_render *render, const sp_map *map, const char *key, size_t bytes)
{
    for (size_t i = 0; i < map->n; i++)
        if (sp_str_equal(map->keys[i], key, bytes))
            return sp_render_spend(render, i / 8) ? &map->values[i] : NULL;
    sp_render_spend(render, map->n / 8);
    return NULL;
}

void sp_map_set(sp_render *render, sp_map *map, const sp_str *key, sp_value value)
{
    sp_value *cell = map ? map_cell(render, map, key->data, key->bytes) : NULL;

    if (cell)
        *cell = value;
    if (cell || !map || render->failed != SP_OK)
        return;
    if (map->n == map->capacity && !map_grow(render, map))
        return;
    map->keys[map->n] = key;
    map->values[map->n++] = value;
}

const sp_value *sp_map_find(sp_render *render, const sp_map *map, const char *key, size_t bytes)
{
    return map_cell(render, map, key, bytes);
}

/* --- Reading -------------------------------------------------------------------------------- */

const char *sp_value_kind_name(const sp_value *value)
{
    static const char *const names[] = {
        [SP_VALUE_UNDEFINED] = "undefined",   [SP_VALUE_NONE] = "none",
        [SP_VALUE_BOOL] = "a boolean",        [SP_VALUE_INT] = "an integer",
        [SP_VALUE_REAL] = "a float",          [SP_VALUE_TEXT] = "a string",
        [SP_VALUE_LIST] = "a list",           [SP_VALUE_MAP] = "a mapping",
        [SP_VALUE_NAMESPACE] = "a namespace", [SP_VALUE_MACRO] = "a macro",
        [SP_VALUE_FUNCTION] = "a function",   [SP_VALUE_METHOD] = "a method",
        [SP_VALUE_LOOP] = "a loop",
    };

    return names[value->kind];
}

bool sp_value_truth(const sp_value *value)
{
    switch (value->kind) {
    case SP_VALUE_UNDEFINED:
    case SP_VALUE_NONE:
        return false;
    case SP_VALUE_BOOL:
        return value->as.truth;
    case SP_VALUE_INT:
        return value->as.integer != 0;
    case SP_VALUE_REAL:
        return value->as.real != 0.0;
    case SP_VALUE_TEXT:
        return value->as.text->bytes > 0;
    case SP_VALUE_LIST:
        return value->as.list->n > 0;
    case SP_VALUE_MAP:
        return value->as.map->n > 0;
    default:
        return true;
    }
}

bool sp_value_is_number(const sp_value *value)
{
    return value->kind == SP_VALUE_BOOL || value->kind == SP_VALUE_INT ||
           value->kind == SP_VALUE_REAL;
}

double sp_value_number(const sp_value *value)
{
    if (value->kind == SP_VALUE_REAL)
        return value->as.real;
    return value->kind == SP_VALUE_BOOL ? (double)value->as.truth : (double)value->as.integer;
}

bool sp_value_integer(const sp_value *value, int64_t *out_integer)
{
    *out_integer = value->kind == SP_VALUE_BOOL ? value->as.truth : value->as.integer;
    return value->kind == SP_VALUE_BOOL || value->kind == SP_VALUE_INT;
}

static bool lists_equal(sp_render *render, const sp_list *left, const sp_list *right)
{
    if (left->n != right->n || left->tuple != right->tuple)
        return false;
    for (size_t i = 0; i < left->n; i++)
        if (!sp_value_equal(render, &left->items[i], &right->items[i]))
            return false;
    return true;
}

static bool maps_equal(sp_render *render, sp_map *left, sp_map *right)
{
    if (left->n != right->n)
        return false;
    for (size_t i = 0; i < left->n; i++) {
        const sp_value *other =
            sp_map_find(render, right, left->keys[i]->data, left->keys[i]->bytes);

        if (!other || !sp_value_equal(render, &left->values[i], other))
            return false;
    }
    return true;
}

static bool numbers_equal(const sp_value *left, const sp_value *right)
{
    int64_t a, b;

    if (sp_value_integer(left, &a) && sp_value_integer(right, &b))
        return a == b;
    return sp_value_number(left) == sp_value_number(right);
}

static bool same_kind_equal(sp_render *render, const sp_value *left, const sp_value *right)
{
    switch (left->kind) {
    case SP_VALUE_UNDEFINED:
    case SP_VALUE_NONE:
        return true;
    case SP_VALUE_TEXT:
        return sp_str_equal(left->as.text, right->as.text->data, right->as.text->bytes);
    case SP_VALUE_LIST:
        return lists_equal(render, left->as.list, right->as.list);
    case SP_VALUE_MAP:
        return maps_equal(render, left->as.map, right->as.map);
    case SP_VALUE_NAMESPACE:
        return left->as.map == right->as.map;
    case SP_VALUE_MACRO:
        return left->as.macro == right->as.macro;
    case SP_VALUE_FUNCTION:
        return left->as.function == right->as.function;
    default:
        return left->as.loop == right->as.loop;
    }
}

bool sp_value_equal(sp_render *render, const sp_value *left, const sp_value *right)
{
    bool equal;

    if (sp_value_is_number(left) && sp_value_is_number(right))
        return numbers_equal(left, right);
    if (left->kind != right->kind || !sp_render_enter(render))
        return false;
    equal = same_kind_equal(render, left, right);
    render->depth--;
    return equal;
}

int sp_value_order(sp_render *render, const sp_value *left, const sp_value *right)
{
    int64_t a, b;

    if (sp_value_integer(left, &a) && sp_value_integer(right, &b))
        return (a > b) - (a < b);
    if (sp_value_is_number(left) && sp_value_is_number(right)) {
        double x = sp_value_number(left), y = sp_value_number(right);

        return (x > y) - (x < y);
    }
    if (left->kind == SP_VALUE_TEXT && right->kind == SP_VALUE_TEXT) {
        const sp_str *x = left->as.text, *y = right->as.text;
        int order = memcmp(x->data, y->data, x->bytes < y->bytes ? x->bytes : y->bytes);

        return order ? order : (x->bytes > y->bytes) - (x->bytes < y->bytes);
    }
    sp_render_fail(render, "%s and %s have no order", sp_value_kind_name(left),
                   sp_value_kind_name(right));
    return 0;
}

static sp_list characters(sp_render *render, const sp_str *text)
{
    sp_items items = {0};

    for (size_t at = 0, n; at < text->bytes && sp_render_spend(render, 1); at += n) {
        n = sp_str_character(text, at);
        sp_items_add(render, &items, sp_value_text(sp_str_slice(render, text, at, at + n)));
    }
    return (sp_list){items.items, items.n, false};
}

sp_list sp_value_items(sp_render *render, const sp_value *value)
{
    sp_items keys = {0};

    switch (value->kind) {
    case SP_VALUE_UNDEFINED:
        break;
    case SP_VALUE_LIST:
        return *value->as.list;
    case SP_VALUE_TEXT:
        return characters(render, value->as.text);
    case SP_VALUE_MAP:
        for (size_t i = 0; i < value->as.map->n && sp_render_spend(render, 1); i++)
            sp_items_add(render, &keys, sp_value_text(value->as.map->keys[i]));
        break;
    default:
        sp_render_fail(render, "%s is not iterable", sp_value_kind_name(value));
    }
    return (sp_list){keys.items, keys.n, false};
}

bool sp_value_contains(sp_render *render, const sp_value *container, const sp_value *item)
{
    sp_list list;

    if (container->kind == SP_VALUE_TEXT) {
        if (item->kind == SP_VALUE_TEXT) {
            sp_render_spend(render, container->as.text->bytes / 64);
            return sp_str_find(container->as.text, item->as.text, 0) != SIZE_MAX;
        }
        sp_render_fail(render, "%s cannot be looked for in a string", sp_value_kind_name(item));
        return false;
    }
    if (container->kind == SP_VALUE_MAP)
        return item->kind == SP_VALUE_TEXT &&
               sp_map_find(render, container->as.map, item->as.text->data, item->as.text->bytes);
    list = sp_value_items(render, container);
    for (size_t i = 0; i < list.n && sp_render_spend(render, 1); i++)
        if (sp_value_equal(render, &list.items[i], item))
            return true;
    return false;
}
