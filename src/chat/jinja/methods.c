/* Methods of strings, lists and mappings, and what `object.name` and `object[index]` are. */
#include "chat/jinja/builtins.h"

#include <string.h>

typedef struct {
    sp_value_kind kind; /* of the values that have it */
    const char *name;
    sp_value (*call)(sp_render *render, const sp_value *self, const sp_value *arguments);
    const char *parameters[SP_PARAMETERS_MAX];
} method;

/* An argument that must be a text; empty, and a failure, when it is not. */
static const sp_str *need_text(sp_render *render, const sp_value *argument)
{
    if (argument->kind == SP_VALUE_TEXT)
        return argument->as.text;
    sp_render_fail(render, "a string is needed, not %s",
                   sp_given(argument) ? sp_value_kind_name(argument) : "nothing");
    return &sp_str_empty;
}

static const sp_str *text_or_null(sp_render *render, const sp_value *argument)
{
    if (!sp_given(argument) || argument->kind == SP_VALUE_NONE)
        return NULL;
    return need_text(render, argument);
}

static int64_t integer_or(sp_render *render, const sp_value *argument, int64_t otherwise)
{
    int64_t integer = otherwise;

    if (sp_given(argument) && !sp_value_integer(argument, &integer))
        sp_render_fail(render, "an integer is needed, not %s", sp_value_kind_name(argument));
    return integer;
}

/* --- Strings -------------------------------------------------------------------------------- */

static bool begins(const sp_str *text, const sp_str *part)
{
    return part->bytes <= text->bytes && sp_str_equal(part, text->data, part->bytes);
}

static bool ends(const sp_str *text, const sp_str *part)
{
    return part->bytes <= text->bytes &&
           sp_str_equal(part, text->data + text->bytes - part->bytes, part->bytes);
}

/* With one text, or a tuple of which any may fit. */
static sp_value any_fits(sp_render *render, const sp_value *self, const sp_value *argument,
                         bool (*fits)(const sp_str *text, const sp_str *part))
{
    if (argument->kind != SP_VALUE_LIST)
        return sp_value_bool(fits(self->as.text, need_text(render, argument)));
    for (size_t i = 0; i < argument->as.list->n && sp_render_spend(render, 1); i++)
        if (fits(self->as.text, need_text(render, &argument->as.list->items[i])))
            return sp_value_bool(true);
    return sp_value_bool(false);
}

static sp_value text_startswith(sp_render *render, const sp_value *self, const sp_value *arguments)
{
    return any_fits(render, self, &arguments[0], begins);
}

static sp_value text_endswith(sp_render *render, const sp_value *self, const sp_value *arguments)
{
    return any_fits(render, self, &arguments[0], ends);
}

static sp_value stripped(sp_render *render, const sp_value *self, const sp_value *arguments,
                         bool left, bool right)
{
    size_t begin, end;

    sp_render_spend(render, self->as.text->bytes / 64);
    sp_str_strip(self->as.text, text_or_null(render, &arguments[0]), left, right, &begin, &end);
    return sp_value_text(sp_str_slice(render, self->as.text, begin, end));
}

static sp_value text_strip(sp_render *render, const sp_value *self, const sp_value *arguments)
{
    return stripped(render, self, arguments, true, true);
}

static sp_value text_lstrip(sp_render *render, const sp_value *self, const sp_value *arguments)
{
    return stripped(render, self, arguments, true, false);
}

static sp_value text_rstrip(sp_render *render, const sp_value *self, const sp_value *arguments)
{
    return stripped(render, self, arguments, false, true);
}

static sp_value text_lower(sp_render *render, const sp_value *self, const sp_value *arguments)
{
    (void)arguments;
    return sp_value_text(sp_str_case(render, self->as.text, SP_CASE_LOWER));
}

static sp_value text_upper(sp_render *render, const sp_value *self, const sp_value *arguments)
{
    (void)arguments;
    return sp_value_text(sp_str_case(render, self->as.text, SP_CASE_UPPER));
}

static sp_value text_title(sp_render *render, const sp_value *self, const sp_value *arguments)
{
    (void)arguments;
    return sp_value_text(sp_str_case(render, self->as.text, SP_CASE_TITLE));
}

static sp_value text_capitalize(sp_render *render, const sp_value *self, const sp_value *arguments)
{
    (void)arguments;
    return sp_value_text(sp_str_case(render, self->as.text, SP_CASE_CAPITALIZE));
}

static sp_value text_replace(sp_render *render, const sp_value *self, const sp_value *arguments)
{
    const sp_str *old = need_text(render, &arguments[0]), *new = need_text(render, &arguments[1]);

    return sp_value_text(
        sp_str_replace(render, self->as.text, old, new, integer_or(render, &arguments[2], -1)));
}

/* The last `part` that ends at or before `end`, or SIZE_MAX. What is compared is paid for. */
static size_t find_last(sp_render *render, const sp_str *text, const sp_str *part, size_t end)
{
    size_t at = end >= part->bytes ? end - part->bytes + 1 : 0;

    for (; at > 0 && sp_render_spend(render, part->bytes / 64); at--)
        if (sp_str_equal(part, text->data + at - 1, part->bytes))
            return at - 1;
    return SIZE_MAX;
}

/* A position in bytes as one in characters; -1 for none. */
static sp_value position(sp_render *render, const sp_str *text, size_t at)
{
    if (at == SIZE_MAX)
        return sp_value_int(-1);
    sp_render_spend(render, at / 64);
    return sp_value_int((int64_t)sp_str_length(&(sp_str){.data = text->data, .bytes = at}));
}

static sp_value text_find(sp_render *render, const sp_value *self, const sp_value *arguments)
{
    const sp_str *part = need_text(render, &arguments[0]);

    sp_render_spend(render, self->as.text->bytes / 64);
    return position(render, self->as.text, sp_str_find(self->as.text, part, 0));
}

static sp_value text_rfind(sp_render *render, const sp_value *self, const sp_value *arguments)
{
    const sp_str *part = need_text(render, &arguments[0]);

    sp_render_spend(render, self->as.text->bytes / 16);
    return position(render, self->as.text,
                    find_last(render, self->as.text, part, self->as.text->bytes));
}

static sp_value text_count(sp_render *render, const sp_value *self, const sp_value *arguments)
{
    const sp_str *text = self->as.text, *part = need_text(render, &arguments[0]);
    int64_t n = 0;

    if (part->bytes == 0)
        return sp_value_int((int64_t)sp_str_length(text) + 1);
    sp_render_spend(render, text->bytes / 64);
    for (size_t at = 0; (at = sp_str_find(text, part, at)) != SIZE_MAX; at += part->bytes)
        n++;
    return sp_value_int(n);
}

static bool is_blank_at(const sp_str *text, size_t at)
{
    const sp_str one = {.data = text->data + at, .bytes = sp_str_character(text, at)};
    size_t begin, end;

    sp_str_strip(&one, NULL, true, false, &begin, &end);
    return begin == end;
}

/* split() without a separator: runs of white space. */
static sp_value split_blanks(sp_render *render, const sp_str *text, int64_t most)
{
    sp_items items = {0};
    size_t begin, end, at;

    sp_str_strip(text, NULL, true, false, &begin, &end);
    while (begin < text->bytes && sp_render_spend(render, 1)) {
        if (most == 0) { /* the rest, except for the white space after it */
            sp_str_strip(text, NULL, false, true, &at, &end);
            sp_items_add(render, &items, sp_value_text(sp_str_slice(render, text, begin, end)));
            break;
        }
        for (at = begin; at < text->bytes && !is_blank_at(text, at);)
            at += sp_str_character(text, at);
        sp_render_spend(render, (at - begin) / 16);
        sp_items_add(render, &items, sp_value_text(sp_str_slice(render, text, begin, at)));
        most--;
        sp_str_strip(&(sp_str){.data = text->data + at, .bytes = text->bytes - at}, NULL, true,
                     false, &begin, &end);
        begin += at;
    }
    return sp_items_list(render, &items, false);
}

static sp_value text_split(sp_render *render, const sp_value *self, const sp_value *arguments)
{
    const sp_str *text = self->as.text, *part = text_or_null(render, &arguments[0]);
    int64_t most = integer_or(render, &arguments[1], -1);
    sp_items items = {0};
    size_t begin = 0, found;

    if (!part)
        return split_blanks(render, text, most);
    if (part->bytes == 0)
        sp_render_fail(render, "split by an empty string");
    sp_render_spend(render, text->bytes / 64);
    while (most != 0 && sp_render_spend(render, 1)) {
        found = sp_str_find(text, part, begin);
        if (found == SIZE_MAX)
            break;
        sp_items_add(render, &items, sp_value_text(sp_str_slice(render, text, begin, found)));
        begin = found + part->bytes;
        most--;
    }
    sp_items_add(render, &items, sp_value_text(sp_str_slice(render, text, begin, text->bytes)));
    return sp_items_list(render, &items, false);
}

static sp_value text_rsplit(sp_render *render, const sp_value *self, const sp_value *arguments)
{
    const sp_str *text = self->as.text, *part = text_or_null(render, &arguments[0]);
    int64_t most = integer_or(render, &arguments[1], -1);
    sp_items items = {0};
    size_t end = text->bytes, found;

    if (!part && most >= 0)
        sp_render_unsupported(render, "rsplit by white space with a limit");
    if (!part || most < 0)
        return text_split(render, self, arguments);
    if (part->bytes == 0)
        sp_render_fail(render, "rsplit by an empty string");
    sp_render_spend(render, text->bytes / 16);
    while (most != 0 && sp_render_spend(render, 1)) {
        found = find_last(render, text, part, end);
        if (found == SIZE_MAX)
            break;
        sp_items_add(render, &items,
                     sp_value_text(sp_str_slice(render, text, found + part->bytes, end)));
        end = found;
        most--;
    }
    sp_items_add(render, &items, sp_value_text(sp_str_slice(render, text, 0, end)));
    for (size_t i = 0; i < items.n / 2; i++) {
        sp_value last = items.items[items.n - 1 - i];

        items.items[items.n - 1 - i] = items.items[i];
        items.items[i] = last;
    }
    return sp_items_list(render, &items, false);
}

static sp_value text_splitlines(sp_render *render, const sp_value *self, const sp_value *arguments)
{
    (void)arguments;
    return sp_str_lines(render, self->as.text);
}

static sp_value text_join(sp_render *render, const sp_value *self, const sp_value *arguments)
{
    sp_list list = sp_value_items(render, &arguments[0]);
    sp_build build = {0};

    for (size_t i = 0; i < list.n && sp_render_spend(render, 1); i++) {
        const sp_str *item = need_text(render, &list.items[i]);

        if (item->safe || self->as.text->safe)
            sp_render_unsupported(render, "joining texts behind the filter safe");
        if (i > 0)
            sp_build_add(render, &build, self->as.text);
        sp_build_add(render, &build, item);
    }
    return sp_value_text(sp_build_finish(render, &build));
}

static sp_value text_removeprefix(sp_render *render, const sp_value *self,
                                  const sp_value *arguments)
{
    const sp_str *text = self->as.text, *part = need_text(render, &arguments[0]);

    return sp_value_text(
        sp_str_slice(render, text, begins(text, part) ? part->bytes : 0, text->bytes));
}

static sp_value text_removesuffix(sp_render *render, const sp_value *self,
                                  const sp_value *arguments)
{
    const sp_str *text = self->as.text, *part = need_text(render, &arguments[0]);

    return sp_value_text(
        sp_str_slice(render, text, 0, text->bytes - (ends(text, part) ? part->bytes : 0)));
}

/* --- Lists and mappings --------------------------------------------------------------------- */

static sp_value list_index(sp_render *render, const sp_value *self, const sp_value *arguments)
{
    for (size_t i = 0; i < self->as.list->n && sp_render_spend(render, 1); i++)
        if (sp_value_equal(render, &self->as.list->items[i], &arguments[0]))
            return sp_value_int((int64_t)i);
    sp_render_fail(render, "index: there is no such item");
    return sp_value_undefined(NULL);
}

static sp_value list_count(sp_render *render, const sp_value *self, const sp_value *arguments)
{
    int64_t n = 0;

    for (size_t i = 0; i < self->as.list->n && sp_render_spend(render, 1); i++)
        n += sp_value_equal(render, &self->as.list->items[i], &arguments[0]);
    return sp_value_int(n);
}

static sp_value map_get(sp_render *render, const sp_value *self, const sp_value *arguments)
{
    const sp_value *found = NULL;

    if (arguments[0].kind == SP_VALUE_TEXT)
        found = sp_map_find(render, self->as.map, arguments[0].as.text->data,
                            arguments[0].as.text->bytes);
    if (found)
        return *found;
    return sp_given(&arguments[1]) ? arguments[1] : sp_value_none();
}

static sp_value map_items(sp_render *render, const sp_value *self, const sp_value *arguments)
{
    const sp_args none = {0};

    (void)arguments;
    return sp_filter_call(render, sp_filter_find("items", 5), self, &none);
}

static sp_value map_keys(sp_render *render, const sp_value *self, const sp_value *arguments)
{
    sp_list keys = sp_value_items(render, self);

    (void)arguments;
    return sp_value_list(render, keys.items, keys.n, false);
}

static sp_value map_values(sp_render *render, const sp_value *self, const sp_value *arguments)
{
    (void)arguments;
    return sp_value_list(render, self->as.map->values, self->as.map->n, false);
}

/* --- Finding -------------------------------------------------------------------------------- */

static const method methods[] = {
    {SP_VALUE_TEXT, "startswith", text_startswith, {"prefix"}},
    {SP_VALUE_TEXT, "endswith", text_endswith, {"suffix"}},
    {SP_VALUE_TEXT, "strip", text_strip, {"chars"}},
    {SP_VALUE_TEXT, "lstrip", text_lstrip, {"chars"}},
    {SP_VALUE_TEXT, "rstrip", text_rstrip, {"chars"}},
    {SP_VALUE_TEXT, "split", text_split, {"sep", "maxsplit"}},
    {SP_VALUE_TEXT, "rsplit", text_rsplit, {"sep", "maxsplit"}},
    {SP_VALUE_TEXT, "splitlines", text_splitlines, {0}},
    {SP_VALUE_TEXT, "join", text_join, {"iterable"}},
    {SP_VALUE_TEXT, "replace", text_replace, {"old", "new", "count"}},
    {SP_VALUE_TEXT, "find", text_find, {"sub"}},
    {SP_VALUE_TEXT, "rfind", text_rfind, {"sub"}},
    {SP_VALUE_TEXT, "count", text_count, {"sub"}},
    {SP_VALUE_TEXT, "lower", text_lower, {0}},
    {SP_VALUE_TEXT, "upper", text_upper, {0}},
    {SP_VALUE_TEXT, "title", text_title, {0}},
    {SP_VALUE_TEXT, "capitalize", text_capitalize, {0}},
    {SP_VALUE_TEXT, "removeprefix", text_removeprefix, {"prefix"}},
    {SP_VALUE_TEXT, "removesuffix", text_removesuffix, {"suffix"}},
    {SP_VALUE_LIST, "index", list_index, {"value"}},
    {SP_VALUE_LIST, "count", list_count, {"value"}},
    {SP_VALUE_MAP, "get", map_get, {"key", "default"}},
    {SP_VALUE_MAP, "items", map_items, {0}},
    {SP_VALUE_MAP, "keys", map_keys, {0}},
    {SP_VALUE_MAP, "values", map_values, {0}},
};

/* What else Python's values have: a template that uses it is refused, instead of getting
 * "undefined". */
static const struct {
    sp_value_kind kind;
    const char *names;
} absent[] = {
    {SP_VALUE_TEXT,
     " casefold center encode expandtabs format format_map index isalnum isalpha isascii "
     "isdecimal isdigit isidentifier islower isnumeric isprintable isspace istitle isupper ljust "
     "maketrans partition rindex rjust rpartition swapcase translate zfill "},
    {SP_VALUE_LIST, " append clear copy extend insert pop remove reverse sort "},
    {SP_VALUE_MAP, " clear copy fromkeys pop popitem setdefault update "},
    {SP_VALUE_INT, " bit_count bit_length conjugate denominator from_bytes imag is_integer "
                   "numerator real to_bytes as_integer_ratio "},
    {SP_VALUE_REAL, " conjugate fromhex hex imag is_integer real as_integer_ratio "},
};

static bool is_absent(sp_value_kind kind, const sp_str *name)
{
    for (size_t i = 0; i < sizeof absent / sizeof *absent; i++) {
        const char *names = absent[i].names;

        for (; absent[i].kind == kind && *names != '\0'; names += strcspn(names, " ") + 1)
            if (strcspn(names, " ") == name->bytes && name->bytes > 0 &&
                memcmp(names, name->data, name->bytes) == 0)
                return true;
    }
    return false;
}

int32_t sp_method_find(sp_render *render, const sp_value *self, const sp_str *name)
{
    for (size_t i = 0; i < sizeof methods / sizeof *methods; i++)
        if (methods[i].kind == self->kind && sp_str_is(name, methods[i].name))
            return (int32_t)i;
    if (is_absent(self->kind, name) || (name->bytes > 1 && memcmp(name->data, "__", 2) == 0))
        sp_render_unsupported(render, "the method %.*s of %s", SP_STR_SHOWN(name),
                              sp_value_kind_name(self));
    return -1;
}

sp_value sp_method_call(sp_render *render, const sp_method *call, const sp_args *args)
{
    const method *which = &methods[call->which];
    sp_value arguments[SP_PARAMETERS_MAX];

    if (!sp_args_sort(render, which->name, which->parameters, args, arguments))
        return sp_value_undefined(NULL);
    return which->call(render, &call->self, arguments);
}

/* --- Attributes and items --------------------------------------------------------------------- */

static sp_value method_of(sp_render *render, const sp_value *self, const sp_str *name)
{
    int32_t which = sp_method_find(render, self, name);
    sp_method *made = which >= 0 ? sp_render_take(render, 1, sizeof *made) : NULL;

    if (!made)
        return sp_value_undefined(name);
    *made = (sp_method){*self, which};
    return (sp_value){.kind = SP_VALUE_METHOD, .as.method = made};
}

static sp_value loop_attribute(sp_render *render, sp_loop *loop, const sp_str *name)
{
    int64_t index = (int64_t)loop->index, n = (int64_t)loop->n;
    const struct {
        const char *name;
        sp_value value;
    } attributes[] = {
        {"index", sp_value_int(index + 1)},    {"index0", sp_value_int(index)},
        {"revindex", sp_value_int(n - index)}, {"revindex0", sp_value_int(n - index - 1)},
        {"first", sp_value_bool(index == 0)},  {"last", sp_value_bool(index == n - 1)},
        {"length", sp_value_int(n)},           {"depth", sp_value_int(1)},
        {"depth0", sp_value_int(0)},
    };

    for (size_t i = 0; i < sizeof attributes / sizeof *attributes; i++)
        if (sp_str_is(name, attributes[i].name))
            return attributes[i].value;
    if (sp_str_is(name, "previtem"))
        return index > 0 ? loop->items[index - 1] : sp_value_undefined(NULL);
    if (sp_str_is(name, "nextitem"))
        return index + 1 < n ? loop->items[index + 1] : sp_value_undefined(NULL);
    sp_render_unsupported(render, "loop.%.*s", SP_STR_SHOWN(name));
    return sp_value_undefined(NULL);
}

static sp_value key_of(sp_render *render, const sp_value *object, const sp_str *name)
{
    const sp_value *found = sp_map_find(render, object->as.map, name->data, name->bytes);

    return found ? *found : sp_value_undefined(name);
}

static bool fails_on_undefined(sp_render *render, const sp_value *object)
{
    if (object->kind != SP_VALUE_UNDEFINED)
        return false;
    if (object->as.why)
        sp_render_fail(render, "%.*s is undefined", SP_STR_SHOWN(object->as.why));
    else
        sp_render_fail(render, "an undefined value has neither attributes nor items");
    return true;
}

/* A method takes precedence over a key here, and a key over a method in sp_value_item, as in
 * Jinja. */
sp_value sp_value_attribute(sp_render *render, const sp_value *object, const sp_str *name)
{
    sp_value value;

    if (fails_on_undefined(render, object))
        return *object;
    if (object->kind == SP_VALUE_LOOP)
        return loop_attribute(render, object->as.loop, name);
    if (object->kind == SP_VALUE_NAMESPACE)
        return key_of(render, object, name);
    value = method_of(render, object, name);
    if (object->kind == SP_VALUE_MAP && value.kind == SP_VALUE_UNDEFINED)
        return key_of(render, object, name);
    return value;
}

static sp_value text_item(sp_render *render, const sp_str *text, int64_t index)
{
    int64_t n = (int64_t)sp_str_length(text);
    size_t at = 0;

    sp_render_spend(render, text->bytes / 64);
    if (index < 0)
        index += n;
    if (index < 0 || index >= n)
        return sp_value_undefined(NULL);
    for (; index > 0; index--)
        at += sp_str_character(text, at);
    return sp_value_text(sp_str_slice(render, text, at, at + sp_str_character(text, at)));
}

static sp_value list_item(const sp_list *list, int64_t index)
{
    if (index < 0)
        index += (int64_t)list->n;
    if (index < 0 || index >= (int64_t)list->n)
        return sp_value_undefined(NULL);
    return list->items[index];
}

sp_value sp_value_item(sp_render *render, const sp_value *object, const sp_value *index)
{
    int64_t integer;
    sp_value value;

    if (fails_on_undefined(render, object))
        return *object;
    if (index->kind == SP_VALUE_TEXT) {
        if (object->kind == SP_VALUE_MAP) {
            value = key_of(render, object, index->as.text);
            if (value.kind != SP_VALUE_UNDEFINED)
                return value;
        }
        return sp_value_attribute(render, object, index->as.text);
    }
    if (sp_value_integer(index, &integer)) {
        if (object->kind == SP_VALUE_LIST)
            return list_item(object->as.list, integer);
        if (object->kind == SP_VALUE_TEXT)
            return text_item(render, object->as.text, integer);
    }
    return sp_value_undefined(NULL);
}
