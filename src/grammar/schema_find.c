/*
 * schema_find.c: places of a schema by name, and what two schemas exclude of each other.
 */
#include "grammar/schema.h"

#include <stdlib.h>
#include <string.h>

#define HOPS_MAX 8 /* of one reference to the next */

/* ---- references ---------------------------------------------------------------------------- */

/* The next part of a pointer, without its escapes; false: it is too long or malformed. */
static bool take_part(const char **at, char *out, size_t bytes)
{
    size_t n = 0;

    for (; **at && **at != '/'; (*at)++) {
        char c = **at;

        if (c == '~') {
            (*at)++;
            if (**at != '0' && **at != '1')
                return false;
            c = **at == '0' ? '~' : '/';
        }
        if (c == '%' || n + 1 == bytes)
            return false;
        out[n++] = c;
    }
    out[n] = '\0';
    return true;
}

static const json_t *child_of(const json_t *parent, const char *part)
{
    char *end;
    unsigned long index;

    if (!json_is_array(parent))
        return json_object_get(parent, part);
    index = strtoul(part, &end, 10);
    return *part >= '0' && *part <= '9' && *end == '\0' ? json_array_get(parent, index) : NULL;
}

const json_t *sp_schema_find(const json_t *root, const char *reference)
{
    char part[512];

    if (!reference || *reference++ != '#')
        return NULL;
    while (root && *reference == '/') {
        reference++;
        if (!take_part(&reference, part, sizeof part))
            return NULL;
        root = child_of(root, part);
    }
    return *reference == '\0' ? root : NULL;
}

static const json_t *resolve(const json_t *root, const json_t *schema)
{
    for (int hop = 0; hop < HOPS_MAX && schema; hop++) {
        const json_t *reference = json_object_get(schema, "$ref");

        if (!reference)
            return schema;
        schema = sp_schema_find(root, json_string_value(reference));
    }
    return NULL;
}

/* ---- exclusion ----------------------------------------------------------------------------- */

/* The constants that a value is limited to, as a list; a new reference. NULL: it is not. */
static json_t *constants_of(const json_t *schema)
{
    json_t *only = json_object_get(schema, "const"), *list = json_object_get(schema, "enum");

    if (only)
        return json_pack("[O]", only);
    return json_is_array(list) ? json_incref(list) : NULL;
}

static bool share_none(const json_t *a, const json_t *b)
{
    size_t i, j;
    json_t *one, *other;

    json_array_foreach((json_t *)(uintptr_t)a, i, one)
        json_array_foreach((json_t *)(uintptr_t)b, j,
                           other) if (json_equal(one, other) ||
                                      (json_is_number(one) && json_is_number(other))) return false;
    return true;
}

static bool constants_differ(const json_t *root, const json_t *a, const json_t *b)
{
    json_t *left = constants_of(resolve(root, a)), *right = constants_of(resolve(root, b));
    bool differ = left && right && share_none(left, right);

    json_decref(left);
    json_decref(right);
    return differ;
}

/* The types that "type" names; all where it does not say. */
static unsigned types_named(const json_t *schema)
{
    const json_t *type = json_object_get(schema, "type");
    unsigned types = 0;

    if (json_is_string(type))
        return sp_schema_type_named(json_string_value(type));
    for (size_t i = 0; i < json_array_size(type); i++)
        types |= sp_schema_type_named(json_string_value(json_array_get(type, i)));
    return types ? types : SP_TYPE_ALL;
}

static bool is_required(const json_t *schema, const char *name)
{
    const json_t *required = json_object_get(schema, "required");

    for (size_t i = 0; i < json_array_size(required); i++) {
        const char *one = json_string_value(json_array_get(required, i));

        if (one && strcmp(one, name) == 0)
            return true;
    }
    return false;
}

static bool members_differ(const json_t *root, const json_t *a, const json_t *b)
{
    json_t *left = json_object_get(a, "properties"), *right = json_object_get(b, "properties");
    const char *name;
    json_t *schema;

    if (types_named(a) != SP_TYPE_OBJECT || types_named(b) != SP_TYPE_OBJECT)
        return false;
    json_object_foreach(left, name, schema)
    {
        if (is_required(a, name) && is_required(b, name) &&
            constants_differ(root, schema, json_object_get(right, name)))
            return true;
    }
    return false;
}

bool sp_schema_are_disjoint(const json_t *root, const json_t *a, const json_t *b)
{
    a = resolve(root, a);
    b = resolve(root, b);
    if (!json_is_object(a) || !json_is_object(b))
        return json_is_false(a) || json_is_false(b);
    return !(types_named(a) & types_named(b)) || constants_differ(root, a, b) ||
           members_differ(root, a, b);
}
