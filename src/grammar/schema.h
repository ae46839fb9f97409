/*
 * schema.h: a JSON Schema into rules of a network. One rule for each place of the schema that is
 * reached, so that `$ref` may lead anywhere, back to where it is as well. Rules are made from a
 * list of tasks, not by recursion: a schema that is nested deep takes no stack.
 */
#ifndef SP_GRAMMAR_SCHEMA_H
#define SP_GRAMMAR_SCHEMA_H

#include "base/text.h"
#include "grammar/network.h"

#include <jansson.h>

/* Places of a schema that are compiled. */
#define SP_SCHEMA_PLACES_MAX 16384

/* Parts of JSON that need no schema; a rule each, made when it is first used. */
typedef enum sp_json_part {
    SP_JSON_BLANK,     /* nothing, a blank, or a line's end and its indent */
    SP_JSON_STRING,    /* with its quotes */
    SP_JSON_CHARACTER, /* one, of a string, without escapes by number */
    SP_JSON_NAME_REST, /* the rest of a string without escapes, and its quote */
    SP_JSON_INTEGER,
    SP_JSON_NUMBER,
    SP_JSON_VALUE,
    SP_JSON_OBJECT,
    SP_JSON_ARRAY,
    SP_JSON_PARTS
} sp_json_part;

typedef struct sp_schema_task {
    const json_t *schema;
    char *path; /* "#/properties/a", owned */
    int32_t rule;
} sp_schema_task;

typedef struct sp_schema_maker {
    sp_net_builder net;
    const json_t *root;    /* that `$ref` begins at; borrowed */
    sp_schema_task *tasks; /* [n_tasks] the first n_done are made */
    int32_t n_tasks, n_done, tasks_capacity;
    int32_t parts[SP_JSON_PARTS]; /* rule + 1; 0: not made */
    bool tagged; /* values stand between tags: "</" is in no string of JSON, but as "<\\/" */
    int64_t pattern_steps;
    sp_status status; /* the first failure; that of `net` is its own */
    sp_error *error;
} sp_schema_maker;

/* Zeros but for these; rule 0 is the caller's to make first. */
sp_schema_maker sp_schema_maker_start(sp_error *error);
/* Frees all; a network that was finished is not in it any more. */
void sp_schema_maker_free(sp_schema_maker *maker);

/* The rule of a part of JSON. */
int32_t sp_json_rule(sp_schema_maker *maker, sp_json_part part);
/* The rule of a schema at a path: made now or, by sp_schema_make_all, later. */
int32_t sp_schema_rule(sp_schema_maker *maker, const json_t *schema, const char *path);
/* Makes the rules of all schemas that were requested, with `root` as the document. */
sp_status sp_schema_make_all(sp_schema_maker *maker, const json_t *root);

/* ---- between the files of the schema compiler ------------------------------------------------ */

bool sp_schema_failed(const sp_schema_maker *maker);
void sp_schema_no_memory(sp_schema_maker *maker);
/* Keeps a failure at path/keyword (NULL: at the path): "PATH: TEXT". */
void sp_schema_refuse(sp_schema_maker *maker, const char *code, const char *path,
                      const char *keyword, const char *format, ...) SP_PRINTF(5, 6);
/* The rule of a pattern for the whole of a JSON value, or, `in_string`, for a string's content. */
int32_t sp_schema_pattern(sp_schema_maker *maker, const char *pattern, size_t bytes, bool in_string,
                          const char *path, const char *keyword);
/* The rule of a format's text, between quotes or without. */
int32_t sp_schema_format(sp_schema_maker *maker, const char *path, const json_t *format,
                         bool in_string);
/* A member that is a number of items, at least `otherwise` where it is absent. */
int64_t sp_schema_count(sp_schema_maker *maker, const sp_schema_task *task, const char *keyword,
                        int64_t otherwise);
/* `path`/`keyword`, and /`name` where it is not NULL, escaped as JSON pointers are. */
void sp_schema_path(sp_text *out, const char *path, const char *keyword, const char *name);

/* Each adds the values of one type from `start` to `end`. */
void sp_schema_add_object(sp_schema_maker *maker, const sp_schema_task *task, int32_t start,
                          int32_t end);
void sp_schema_add_array(sp_schema_maker *maker, const sp_schema_task *task, int32_t start,
                         int32_t end);
void sp_schema_add_number(sp_schema_maker *maker, const sp_schema_task *task, bool whole,
                          int32_t start, int32_t end);
void sp_schema_add_string(sp_schema_maker *maker, const sp_schema_task *task, int32_t start,
                          int32_t end);

/* Types as bits. */
#define SP_TYPE_NULL    1u
#define SP_TYPE_BOOLEAN 2u
#define SP_TYPE_INTEGER 4u
#define SP_TYPE_NUMBER  8u /* always with the bit before */
#define SP_TYPE_STRING  16u
#define SP_TYPE_ARRAY   32u
#define SP_TYPE_OBJECT  64u
#define SP_TYPE_ALL     127u

/* The bits of "integer" and so on; 0: no type's name. */
unsigned sp_schema_type_named(const char *name);
/* The schema that a `$ref` names; NULL: nothing is there, or it is no place in this document. */
const json_t *sp_schema_find(const json_t *root, const char *reference);
/* Whether no value can be valid under both, as far as types, constants and a constant member that
 * both require tell. */
bool sp_schema_are_disjoint(const json_t *root, const json_t *a, const json_t *b);

#endif
