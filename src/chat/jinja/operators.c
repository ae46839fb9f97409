/* Operators between values, as Python's. */
#include "chat/jinja/interpreter.h"

#include <math.h>
#include <string.h>

/* --- Numbers -------------------------------------------------------------------------------- */

static sp_value too_large(sp_render *render)
{
    sp_render_unsupported(render, "an integer of more than 64 bits");
    return sp_value_undefined(NULL);
}

static sp_value divide_by_zero(sp_render *render)
{
    sp_render_fail(render, "division by zero");
    return sp_value_undefined(NULL);
}

/* Rounds down; the remainder has the sign of the divisor. */
static sp_value divide_integers(sp_render *render, sp_op op, int64_t a, int64_t b)
{
    int64_t quotient, rest;

    if (b == 0)
        return divide_by_zero(render);
    if (b == -1)
        return op == SP_OP_MODULO ? sp_value_int(0)
               : a == INT64_MIN   ? too_large(render)
                                  : sp_value_int(-a);
    quotient = a / b;
    rest = a % b;
    if (rest != 0 && (rest < 0) != (b < 0)) {
        quotient--;
        rest += b;
    }
    return sp_value_int(op == SP_OP_MODULO ? rest : quotient);
}

static sp_value power_of_integers(sp_render *render, int64_t base, int64_t exponent)
{
    int64_t result = 1;

    if (exponent < 0)
        return sp_value_real(pow((double)base, (double)exponent));
    if (base == 0 || base == 1 || base == -1)
        return sp_value_int(exponent == 0 ? 1 : base == -1 && exponent % 2 == 0 ? 1 : base);
    for (; exponent > 0; exponent--)
        if (__builtin_mul_overflow(result, base, &result))
            return too_large(render);
    return sp_value_int(result);
}

static sp_value integers(sp_render *render, sp_op op, int64_t a, int64_t b)
{
    int64_t result = 0;
    bool over;

    switch (op) {
    case SP_OP_ADD:
        over = __builtin_add_overflow(a, b, &result);
        break;
    case SP_OP_SUBTRACT:
        over = __builtin_sub_overflow(a, b, &result);
        break;
    case SP_OP_MULTIPLY:
        over = __builtin_mul_overflow(a, b, &result);
        break;
    case SP_OP_DIVIDE:
        return b == 0 ? divide_by_zero(render) : sp_value_real((double)a / (double)b);
    case SP_OP_POWER:
        return power_of_integers(render, a, b);
    default:
        return divide_integers(render, op, a, b);
    }
    return over ? too_large(render) : sp_value_int(result);
}

static sp_value reals(sp_render *render, sp_op op, double a, double b)
{
    double rest;

    if (b == 0.0 && (op == SP_OP_DIVIDE || op == SP_OP_FLOOR_DIVIDE || op == SP_OP_MODULO))
        return divide_by_zero(render);
    switch (op) {
    case SP_OP_ADD:
        return sp_value_real(a + b);
    case SP_OP_SUBTRACT:
        return sp_value_real(a - b);
    case SP_OP_MULTIPLY:
        return sp_value_real(a * b);
    case SP_OP_DIVIDE:
        return sp_value_real(a / b);
    case SP_OP_FLOOR_DIVIDE:
        return sp_value_real(floor(a / b));
    case SP_OP_MODULO:
        rest = fmod(a, b);
        return sp_value_real(rest != 0.0 && (rest < 0) != (b < 0) ? rest + b : rest);
    default:
        return sp_value_real(pow(a, b));
    }
}

/* --- Sequences ------------------------------------------------------------------------------ */

static sp_value join_lists(sp_render *render, const sp_list *left, const sp_list *right)
{
    sp_items items = {0};

    for (size_t i = 0; i < left->n && sp_render_spend(render, 1); i++)
        sp_items_add(render, &items, left->items[i]);
    for (size_t i = 0; i < right->n && sp_render_spend(render, 1); i++)
        sp_items_add(render, &items, right->items[i]);
    return sp_items_list(render, &items, left->tuple);
}

/* The same text, marked as safe or not. */
static sp_value marked(sp_render *render, const sp_str *text, bool safe)
{
    sp_str *copy = text->safe != safe ? sp_render_take(render, 1, sizeof *copy) : NULL;

    if (!copy)
        return sp_value_text(text);
    *copy = *text;
    copy->safe = safe;
    return sp_value_text(copy);
}

/* + between two texts of which one is marked as safe escapes the other, which must be one that
 * escaping leaves as it is. (~ joins without that.) */
static sp_value add_texts(sp_render *render, const sp_str *left, const sp_str *right)
{
    const sp_str *plain = left->safe ? right : left;

    for (size_t i = 0; left->safe != right->safe && i < plain->bytes; i++)
        if (plain->data[i] != '\0' && strchr("&<>'\"", plain->data[i]))
            sp_render_unsupported(render, "adding to a text behind the filter safe");
    return marked(render, sp_str_join(render, left, right), left->safe || right->safe);
}

static sp_value repeat(sp_render *render, const sp_str *text, int64_t n)
{
    sp_build build = {0};

    if (text->safe)
        sp_render_unsupported(render, "repeating a text behind the filter safe");
    for (int64_t i = 0; i < n && sp_render_spend(render, 1); i++)
        sp_build_add(render, &build, text);
    return sp_value_text(sp_build_finish(render, &build));
}

sp_value sp_binary(sp_render *render, sp_op op, const sp_value *left, const sp_value *right)
{
    int64_t a, b;

    if (op == SP_OP_JOIN)
        return marked(render,
                      sp_str_join(render, sp_value_str(render, left), sp_value_str(render, right)),
                      false);
    if (sp_value_integer(left, &a) && sp_value_integer(right, &b))
        return integers(render, op, a, b);
    if (sp_value_is_number(left) && sp_value_is_number(right))
        return reals(render, op, sp_value_number(left), sp_value_number(right));
    if (op == SP_OP_ADD && left->kind == SP_VALUE_TEXT && right->kind == SP_VALUE_TEXT)
        return add_texts(render, left->as.text, right->as.text);
    if (op == SP_OP_ADD && left->kind == SP_VALUE_LIST && right->kind == SP_VALUE_LIST &&
        left->as.list->tuple == right->as.list->tuple)
        return join_lists(render, left->as.list, right->as.list);
    if (op == SP_OP_MULTIPLY && left->kind == SP_VALUE_TEXT && sp_value_integer(right, &b))
        return repeat(render, left->as.text, b);
    if (op == SP_OP_MODULO && left->kind == SP_VALUE_TEXT)
        sp_render_unsupported(render, "formatting with %%");
    else
        sp_render_fail(render, "an operator between %s and %s", sp_value_kind_name(left),
                       sp_value_kind_name(right));
    return sp_value_undefined(NULL);
}

sp_value sp_negate(sp_render *render, const sp_value *value)
{
    const sp_value zero = sp_value_int(0);

    if (value->kind == SP_VALUE_REAL)
        return sp_value_real(-value->as.real);
    return sp_binary(render, SP_OP_SUBTRACT, &zero, value);
}

bool sp_compare(sp_render *render, sp_op op, const sp_value *left, const sp_value *right)
{
    switch (op) {
    case SP_OP_EQUAL:
        return sp_value_equal(render, left, right);
    case SP_OP_UNEQUAL:
        return !sp_value_equal(render, left, right);
    case SP_OP_IN:
        return sp_value_contains(render, right, left);
    case SP_OP_NOT_IN:
        return !sp_value_contains(render, right, left);
    case SP_OP_LESS:
        return sp_value_order(render, left, right) < 0;
    case SP_OP_LESS_EQUAL:
        return sp_value_order(render, left, right) <= 0;
    case SP_OP_GREATER:
        return sp_value_order(render, left, right) > 0;
    default:
        return sp_value_order(render, left, right) >= 0;
    }
}

/* --- Slices --------------------------------------------------------------------------------- */

/* One border of a slice of n items, moved into what can be reached. */
static int64_t border(sp_render *render, const sp_value *value, int64_t n, int64_t step,
                      int64_t otherwise)
{
    int64_t low = step > 0 ? 0 : -1, high = step > 0 ? n : n - 1, at;

    if (value->kind == SP_VALUE_NONE || value->kind == SP_VALUE_UNDEFINED)
        return otherwise;
    if (!sp_value_integer(value, &at)) {
        sp_render_fail(render, "a slice with %s", sp_value_kind_name(value));
        return otherwise;
    }
    if (at < 0)
        at += n;
    return at < low ? low : at > high ? high : at;
}

/* Bytes before the n-th character. */
static size_t offset_of(const sp_str *text, int64_t n)
{
    size_t at = 0;

    for (; n > 0 && at < text->bytes; n--)
        at += sp_str_character(text, at);
    return at;
}

static sp_value slice_text(sp_render *render, const sp_str *text, int64_t begin, int64_t end)
{
    size_t from = offset_of(text, begin), to = offset_of(text, end);

    sp_render_spend(render, text->bytes / 32);
    return sp_value_text(from < to ? sp_str_slice(render, text, from, to) : &sp_str_empty);
}

sp_value sp_slice(sp_render *render, const sp_value *object, const sp_value *begin,
                  const sp_value *end, const sp_value *step)
{
    int64_t n, from, to, by = 1;
    bool is_text = object->kind == SP_VALUE_TEXT;
    sp_build build = {0};
    sp_items items = {0};
    sp_list list = {0};

    if (!is_text && object->kind != SP_VALUE_LIST)
        sp_render_fail(render, "a slice of %s", sp_value_kind_name(object));
    if (step->kind != SP_VALUE_NONE && step->kind != SP_VALUE_UNDEFINED &&
        (!sp_value_integer(step, &by) || by == 0 || by == INT64_MIN))
        sp_render_fail(render, "the step of a slice is an integer other than 0");
    if (render->failed != SP_OK)
        return sp_value_undefined(NULL);
    n = is_text ? (int64_t)sp_str_length(object->as.text) : (int64_t)object->as.list->n;
    from = border(render, begin, n, by, by > 0 ? 0 : n - 1);
    to = border(render, end, n, by, by > 0 ? n : -1);
    if (is_text && by == 1)
        return slice_text(render, object->as.text, from, to);
    list = sp_value_items(render, object);
    while ((by > 0 ? from < to : from > to) && from < (int64_t)list.n &&
           sp_render_spend(render, 1)) {
        if (is_text)
            sp_build_add(render, &build, list.items[from].as.text);
        else
            sp_items_add(render, &items, list.items[from]);
        if (__builtin_add_overflow(from, by, &from))
            break;
    }
    return is_text ? sp_value_text(sp_build_finish(render, &build))
                   : sp_items_list(render, &items, object->as.list->tuple);
}
