/* Tests: what may follow "is". */
#include "chat/jinja/builtins.h"

#include <string.h>

typedef struct {
    const char *name;
    bool (*call)(sp_render *render, const sp_value *operand, const sp_value *argument);
    bool takes_argument;
} test;

static bool test_defined(sp_render *render, const sp_value *operand, const sp_value *argument)
{
    (void)render;
    (void)argument;
    return operand->kind != SP_VALUE_UNDEFINED;
}

static bool test_undefined(sp_render *render, const sp_value *operand, const sp_value *argument)
{
    return !test_defined(render, operand, argument);
}

static bool test_none(sp_render *render, const sp_value *operand, const sp_value *argument)
{
    (void)render;
    (void)argument;
    return operand->kind == SP_VALUE_NONE;
}

static bool test_boolean(sp_render *render, const sp_value *operand, const sp_value *argument)
{
    (void)render;
    (void)argument;
    return operand->kind == SP_VALUE_BOOL;
}

static bool test_true(sp_render *render, const sp_value *operand, const sp_value *argument)
{
    return test_boolean(render, operand, argument) && operand->as.truth;
}

static bool test_false(sp_render *render, const sp_value *operand, const sp_value *argument)
{
    return test_boolean(render, operand, argument) && !operand->as.truth;
}

static bool test_integer(sp_render *render, const sp_value *operand, const sp_value *argument)
{
    (void)render;
    (void)argument;
    return operand->kind == SP_VALUE_INT;
}

static bool test_float(sp_render *render, const sp_value *operand, const sp_value *argument)
{
    (void)render;
    (void)argument;
    return operand->kind == SP_VALUE_REAL;
}

static bool test_number(sp_render *render, const sp_value *operand, const sp_value *argument)
{
    (void)render;
    (void)argument;
    return sp_value_is_number(operand);
}

static bool test_string(sp_render *render, const sp_value *operand, const sp_value *argument)
{
    (void)render;
    (void)argument;
    return operand->kind == SP_VALUE_TEXT;
}

static bool test_mapping(sp_render *render, const sp_value *operand, const sp_value *argument)
{
    (void)render;
    (void)argument;
    return operand->kind == SP_VALUE_MAP;
}

/* Jinja requires a length and an index: a string and a mapping have both, and undefined too. */
static bool test_sequence(sp_render *render, const sp_value *operand, const sp_value *argument)
{
    (void)render;
    (void)argument;
    return operand->kind == SP_VALUE_LIST || operand->kind == SP_VALUE_TEXT ||
           operand->kind == SP_VALUE_MAP || operand->kind == SP_VALUE_UNDEFINED;
}

static bool test_callable(sp_render *render, const sp_value *operand, const sp_value *argument)
{
    (void)render;
    (void)argument;
    return operand->kind == SP_VALUE_MACRO || operand->kind == SP_VALUE_FUNCTION ||
           operand->kind == SP_VALUE_METHOD;
}

static bool test_eq(sp_render *render, const sp_value *operand, const sp_value *argument)
{
    return sp_value_equal(render, operand, argument);
}

static bool test_ne(sp_render *render, const sp_value *operand, const sp_value *argument)
{
    return !sp_value_equal(render, operand, argument);
}

static bool test_lt(sp_render *render, const sp_value *operand, const sp_value *argument)
{
    return sp_value_order(render, operand, argument) < 0;
}

static bool test_le(sp_render *render, const sp_value *operand, const sp_value *argument)
{
    return sp_value_order(render, operand, argument) <= 0;
}

static bool test_gt(sp_render *render, const sp_value *operand, const sp_value *argument)
{
    return sp_value_order(render, operand, argument) > 0;
}

static bool test_ge(sp_render *render, const sp_value *operand, const sp_value *argument)
{
    return sp_value_order(render, operand, argument) >= 0;
}

static bool test_in(sp_render *render, const sp_value *operand, const sp_value *argument)
{
    return sp_value_contains(render, argument, operand);
}

/* Of none, true and false only: of other values Python's answer is an accident. */
static bool test_sameas(sp_render *render, const sp_value *operand, const sp_value *argument)
{
    if (argument->kind != SP_VALUE_NONE && argument->kind != SP_VALUE_BOOL)
        sp_render_unsupported(render, "sameas %s", sp_value_kind_name(argument));
    return operand->kind == argument->kind && sp_value_equal(render, operand, argument);
}

static bool test_divisibleby(sp_render *render, const sp_value *operand, const sp_value *argument)
{
    int64_t value, divisor;

    if (!sp_value_integer(operand, &value) || !sp_value_integer(argument, &divisor) ||
        divisor == 0) {
        sp_render_fail(render, "divisibleby needs two integers, the second not 0");
        return false;
    }
    return divisor == -1 || value % divisor == 0;
}

static bool test_odd(sp_render *render, const sp_value *operand, const sp_value *argument)
{
    const sp_value two = sp_value_int(2);

    (void)argument;
    return !test_divisibleby(render, operand, &two);
}

static bool test_even(sp_render *render, const sp_value *operand, const sp_value *argument)
{
    const sp_value two = sp_value_int(2);

    (void)argument;
    return test_divisibleby(render, operand, &two);
}

/* There is a letter, and none of the other case. */
static bool is_of_case(sp_render *render, const sp_value *operand, int which, int other)
{
    const sp_str *text = sp_value_str(render, operand);
    const sp_str *same = sp_str_case(render, text, which);
    const sp_str *changed = sp_str_case(render, text, other);

    return sp_str_equal(same, text->data, text->bytes) &&
           !sp_str_equal(changed, text->data, text->bytes);
}

static bool test_lower(sp_render *render, const sp_value *operand, const sp_value *argument)
{
    (void)argument;
    return is_of_case(render, operand, SP_CASE_LOWER, SP_CASE_UPPER);
}

static bool test_upper(sp_render *render, const sp_value *operand, const sp_value *argument)
{
    (void)argument;
    return is_of_case(render, operand, SP_CASE_UPPER, SP_CASE_LOWER);
}

static const test tests[] = {
    {"!=", test_ne, true},
    {"<", test_lt, true},
    {"<=", test_le, true},
    {"==", test_eq, true},
    {">", test_gt, true},
    {">=", test_ge, true},
    {"boolean", test_boolean, false},
    {"callable", test_callable, false},
    {"defined", test_defined, false},
    {"divisibleby", test_divisibleby, true},
    {"eq", test_eq, true},
    {"equalto", test_eq, true},
    {"even", test_even, false},
    {"false", test_false, false},
    {"float", test_float, false},
    {"ge", test_ge, true},
    {"greaterthan", test_gt, true},
    {"gt", test_gt, true},
    {"in", test_in, true},
    {"integer", test_integer, false},
    {"iterable", test_sequence, false},
    {"le", test_le, true},
    {"lessthan", test_lt, true},
    {"lower", test_lower, false},
    {"lt", test_lt, true},
    {"mapping", test_mapping, false},
    {"ne", test_ne, true},
    {"none", test_none, false},
    {"number", test_number, false},
    {"odd", test_odd, false},
    {"sameas", test_sameas, true},
    {"sequence", test_sequence, false},
    {"string", test_string, false},
    {"true", test_true, false},
    {"undefined", test_undefined, false},
    {"upper", test_upper, false},
};

int32_t sp_test_find(const char *name, size_t bytes)
{
    const sp_str text = {.data = name, .bytes = bytes};

    for (size_t i = 0; i < sizeof tests / sizeof *tests; i++)
        if (sp_str_is(&text, tests[i].name))
            return (int32_t)i;
    return -1;
}

bool sp_test_call(sp_render *render, int32_t which, const sp_value *operand, const sp_args *args)
{
    const sp_value none = sp_value_none();

    if (render->failed != SP_OK || which < 0)
        return false;
    if (args->n_keywords > 0 || args->n != (tests[which].takes_argument ? 1 : 0)) {
        sp_render_fail(render, "the test %s takes %d arguments", tests[which].name,
                       tests[which].takes_argument);
        return false;
    }
    return tests[which].call(render, operand, args->n > 0 ? &args->positional[0] : &none);
}
