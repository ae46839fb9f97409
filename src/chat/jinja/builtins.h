/*
 * builtins.h: what a template can call: filters, tests, methods of values and functions.
 *
 * Filters and tests are looked up when a template is read, so that a template with an unknown one
 * is refused before it serves. Methods and functions are found when they are called.
 */
#ifndef SP_CHAT_JINJA_BUILTINS_H
#define SP_CHAT_JINJA_BUILTINS_H

#include "chat/jinja/value.h"

#define SP_PARAMETERS_MAX 5

/* An entry of the table of filters. `parameters` are the names after the operand, in order. */
typedef struct sp_filter {
    const char *name;
    sp_value (*call)(sp_render *render, const sp_value *operand, const sp_value *arguments);
    const char *parameters[SP_PARAMETERS_MAX];
} sp_filter;

/* Those that take the name of another filter or test, and its arguments as they are. */
typedef struct sp_mapper {
    const char *name;
    sp_value (*call)(sp_render *render, const sp_value *operand, const sp_args *args);
} sp_mapper;

int32_t sp_filter_find(const char *name, size_t bytes); /* -1: unknown */
sp_value sp_filter_call(sp_render *render, int32_t which, const sp_value *operand,
                        const sp_args *args);

int32_t sp_test_find(const char *name, size_t bytes); /* -1: unknown */
bool sp_test_call(sp_render *render, int32_t which, const sp_value *operand, const sp_args *args);

/* The method of this name that values of this kind have, or -1. Fails for one that Python has and
 * this interpreter has not. */
int32_t sp_method_find(sp_render *render, const sp_value *self, const sp_str *name);
sp_value sp_method_call(sp_render *render, const sp_method *method, const sp_args *args);

/* range, dict, namespace, raise_exception, strftime_now; or -1. */
int32_t sp_function_find(const char *name, size_t bytes);
sp_value sp_function_call(sp_render *render, int32_t which, const sp_args *args);

/*
 * Sorts arguments into `out` [SP_PARAMETERS_MAX] by their parameters' names. What was not given is
 * SP_VALUE_UNDEFINED with as.why == &sp_not_given. Fails on one too many, twice, or unknown.
 */
extern const sp_str sp_not_given;
bool sp_args_sort(sp_render *render, const char *callee, const char *const *parameters,
                  const sp_args *args, sp_value *out);
bool sp_given(const sp_value *value);

/* `object.name` and `object[index]`; undefined when there is no such thing. */
sp_value sp_value_attribute(sp_render *render, const sp_value *object, const sp_str *name);
sp_value sp_value_item(sp_render *render, const sp_value *object, const sp_value *index);

/* Letters to another case: those of Latin, Greek and Cyrillic that become one letter. Fails on any
 * other that may have one. */
enum { SP_CASE_LOWER, SP_CASE_UPPER, SP_CASE_TITLE, SP_CASE_CAPITALIZE };
const sp_str *sp_str_case(sp_render *render, const sp_str *text, int which);

/* str.replace(); `count` below 0: all. */
const sp_str *sp_str_replace(sp_render *render, const sp_str *text, const sp_str *old,
                             const sp_str *new, int64_t count);
/* str.splitlines(). */
sp_value sp_str_lines(sp_render *render, const sp_str *text);
const sp_str *sp_str_reversed(sp_render *render, const sp_str *text);

/* A loop's state, for `loop.index` and the like. */
struct sp_loop {
    const sp_value *items;
    size_t n, index;
};

#endif
