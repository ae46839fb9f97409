/*
 * value.h: what a template computes with, and texts that remember who wrote them.
 *
 * Every byte of a text is the template's own or data's: data is whatever came with the request.
 * Slices, joins, trims and replacements keep that byte by byte, so that the finished prompt tells
 * a special token of the template from the same characters in a message.
 *
 * A value never changes after it was made, except a namespace. All memory is the rendering's arena.
 */
#ifndef SP_CHAT_JINJA_VALUE_H
#define SP_CHAT_JINJA_VALUE_H

#include "base/error.h"
#include "chat/jinja/arena.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct sp_node sp_node;
typedef struct sp_render sp_render;

typedef struct sp_str {
    const char *data; /* UTF-8 */
    size_t bytes;
    const uint8_t *own; /* [bytes] 1: the template's; NULL: every byte is as `literal` says */
    bool literal;
    bool safe; /* went through the filter `safe`: what is joined to it would be HTML-escaped */
} sp_str;

typedef enum sp_value_kind {
    SP_VALUE_UNDEFINED,
    SP_VALUE_NONE,
    SP_VALUE_BOOL,
    SP_VALUE_INT,
    SP_VALUE_REAL,
    SP_VALUE_TEXT,
    SP_VALUE_LIST,
    SP_VALUE_MAP,
    SP_VALUE_NAMESPACE,
    SP_VALUE_MACRO,
    SP_VALUE_FUNCTION, /* one of the interpreter's */
    SP_VALUE_METHOD,   /* a method of a value */
    SP_VALUE_LOOP,
} sp_value_kind;

typedef struct sp_list sp_list;
typedef struct sp_map sp_map;
typedef struct sp_macro sp_macro;
typedef struct sp_method sp_method;
typedef struct sp_loop sp_loop;

typedef struct sp_value {
    sp_value_kind kind;
    union {
        bool truth;
        int64_t integer;
        double real;
        const sp_str *text;
        const sp_list *list;
        sp_map *map; /* of a namespace too */
        const sp_macro *macro;
        const sp_method *method;
        sp_loop *loop;
        int32_t function;
        const sp_str *why; /* undefined: what was looked for, or NULL */
    } as;
} sp_value;

struct sp_list {
    sp_value *items;
    size_t n;
    bool tuple;
};

struct sp_map { /* in order of insertion */
    const sp_str **keys;
    sp_value *values;
    size_t n, capacity;
};

struct sp_method {
    sp_value self;
    int32_t which;
};

/* The arguments of a call, a filter or a test. */
typedef struct sp_args {
    const sp_value *positional; /* [n] */
    size_t n;
    const sp_str *const *keywords; /* [n_keywords] */
    const sp_value *keyword_values;
    size_t n_keywords;
} sp_args;

/* --- failing ------------------------------------------------------------------------------ */

/* Levels of active nodes and calls; each takes a few hundred bytes of stack. */
#define SP_RENDER_DEPTH_MAX 400

/*
 * A rendering fails once: the first failure is kept, later ones are dropped, and whatever is
 * evaluated afterwards is undefined and ignored. So callers check `failed` only where they loop.
 */
struct sp_render {
    sp_arena arena;
    sp_status failed; /* SP_OK so far */
    sp_error *error;
    const char *subject; /* the template's name */
    int32_t line;        /* of the current statement */
    int64_t steps_left;
    int depth;
    int64_t unix_seconds;
};

void sp_render_fail(sp_render *render, const char *format, ...) SP_PRINTF(2, 3);
/* A construct that this interpreter does not have. */
void sp_render_unsupported(sp_render *render, const char *format, ...) SP_PRINTF(2, 3);
/* The template's own raise_exception. */
void sp_render_raise(sp_render *render, const sp_str *message);
/* Takes n steps; false when there are not that many left. */
bool sp_render_spend(sp_render *render, size_t n);
/* Goes one level deeper; false at the bottom. Every true needs one `render->depth--`. */
bool sp_render_enter(sp_render *render);
void *sp_render_take(sp_render *render, size_t count, size_t element_bytes);

/* --- making ------------------------------------------------------------------------------- */

sp_value sp_value_undefined(const sp_str *why);
sp_value sp_value_none(void);
sp_value sp_value_bool(bool truth);
sp_value sp_value_int(int64_t integer);
sp_value sp_value_real(double real);
sp_value sp_value_text(const sp_str *text); /* undefined for NULL, as after a failure */
sp_value sp_value_data(sp_render *render, const char *data, size_t bytes);              /* copied */
sp_value sp_value_list(sp_render *render, const sp_value *items, size_t n, bool tuple); /* copied */
sp_map *sp_map_create(sp_render *render, size_t capacity);
/* Replaces the value of a key that is there. */
void sp_map_set(sp_render *render, sp_map *map, const sp_str *key, sp_value value);
const sp_value *sp_map_find(sp_render *render, const sp_map *map, const char *key, size_t bytes);

/* A list that grows. */
typedef struct sp_items {
    sp_value *items;
    size_t n, capacity;
} sp_items;

void sp_items_add(sp_render *render, sp_items *items, sp_value value);
sp_value sp_items_list(sp_render *render, const sp_items *items, bool tuple);

/* --- texts -------------------------------------------------------------------------------- */

/* A text that grows, with the provenance of each byte. */
typedef struct sp_build {
    char *data;
    uint8_t *own;
    size_t bytes, capacity;
    bool has_own, has_data;
} sp_build;

void sp_build_add(sp_render *render, sp_build *build, const sp_str *text);
void sp_build_add_data(sp_render *render, sp_build *build, const char *data, size_t bytes);
void sp_build_add_slice(sp_render *render, sp_build *build, const sp_str *text, size_t begin,
                        size_t end);
const sp_str *sp_build_finish(sp_render *render, const sp_build *build); /* never NULL */

extern const sp_str sp_str_empty;

/* The arguments of "%.*s" for an error's text. */
#define SP_STR_SHOWN(text) (int)((text)->bytes < 60 ? (text)->bytes : 60), (text)->data

bool sp_str_equal(const sp_str *text, const char *data, size_t bytes);
bool sp_str_is(const sp_str *text, const char *string);
const sp_str *sp_str_slice(sp_render *render, const sp_str *text, size_t begin, size_t end);
const sp_str *sp_str_join(sp_render *render, const sp_str *left, const sp_str *right);
size_t sp_str_length(const sp_str *text); /* characters */
/* Bytes of the character at `at`. */
size_t sp_str_character(const sp_str *text, size_t at);
/* The first `needle` at or after `from`, or SIZE_MAX. */
size_t sp_str_find(const sp_str *text, const sp_str *needle, size_t from);
/* Where str.strip() with these characters (NULL: white space) would cut. */
void sp_str_strip(const sp_str *text, const sp_str *characters, bool left, bool right,
                  size_t *out_begin, size_t *out_end);
bool sp_code_is_space(uint32_t code); /* as Python's str.isspace */

/* --- reading ------------------------------------------------------------------------------ */

const char *sp_value_kind_name(const sp_value *value);
bool sp_value_truth(const sp_value *value);
bool sp_value_equal(sp_render *render, const sp_value *left, const sp_value *right);
/* -1, 0, 1; fails for kinds that have no order among them. */
int sp_value_order(sp_render *render, const sp_value *left, const sp_value *right);
bool sp_value_is_number(const sp_value *value); /* bool too */
double sp_value_number(const sp_value *value);
bool sp_value_integer(const sp_value *value, int64_t *out_integer); /* bool too */
/* As Python's str(): the text itself, or what printing the value would write. Never NULL. */
const sp_str *sp_value_str(sp_render *render, const sp_value *value);
/* The items that a loop over the value would see; fails for what is not iterable. */
sp_list sp_value_items(sp_render *render, const sp_value *value);
bool sp_value_contains(sp_render *render, const sp_value *container, const sp_value *item);

/* As json.dumps(). */
typedef struct sp_json_style {
    bool ensure_ascii, sort_keys;
    const sp_str *indent; /* NULL: on one line */
    const sp_str *item_separator, *key_separator;
} sp_json_style;

void sp_value_to_json(sp_render *render, sp_build *build, const sp_value *value,
                      const sp_json_style *style);

#endif
