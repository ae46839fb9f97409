/*
 * field.h: the mechanism of a request's fields. A table has for each its name, type, range,
 * defaults, help and the forms of a request that have it; the readers of JSON, the flags, the
 * defaults and the checks are loops over the rows, and a test compares the documents with them.
 *
 * A table of options consists of the same rows; it is never read from JSON.
 *
 * It owns how a field of each type is read and stored. It must not know: what a field means, HTTP,
 * the engine. Nothing here keeps state; any thread may call it.
 */
#ifndef SP_ENGINE_REQUEST_FIELD_H
#define SP_ENGINE_REQUEST_FIELD_H

#include <jansson.h>
#include <sidepath/status.h>

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define SP_CODE_UNKNOWN_FIELD     "unknown-field"
#define SP_CODE_UNSUPPORTED_FIELD "unsupported-field"

typedef enum sp_field_type {
    SP_FIELD_BOOL,       /* bool */
    SP_FIELD_NOT,        /* bool, which stores the negation of what is written */
    SP_FIELD_INT,        /* int32_t within [minimum, maximum] */
    SP_FIELD_INT64,      /* int64_t, likewise */
    SP_FIELD_SIZE,       /* size_t, likewise */
    SP_FIELD_SEED,       /* uint64_t, written as a signed number */
    SP_FIELD_FLOAT,      /* float within [minimum, maximum] */
    SP_FIELD_DOUBLE,     /* double within [minimum, maximum] */
    SP_FIELD_STRING,     /* const char *, borrowed from the object */
    SP_FIELD_TEXTS,      /* const char *const *, one owned block; a text or a list of `maximum` */
    SP_FIELD_IDS,        /* const int32_t *, owned; a list of at most `maximum` */
    SP_FIELD_OWN,        /* read by the row's `read` */
    SP_FIELD_ELSEWHERE,  /* known here, read by the server of the form */
    SP_FIELD_IGNORED,    /* accepted, has no effect on the answer */
    SP_FIELD_ONLY_FALSE, /* not supported: accepted with its neutral value alone */
    SP_FIELD_ONLY_TRUE,
    SP_FIELD_ONLY_ONE,
    SP_FIELD_ONLY_EMPTY /* "", [] or {} */
} sp_field_type;

#define SP_FIELD_DEFAULTS 3

typedef struct sp_field sp_field;
struct sp_field {
    const char *name;
    sp_field_type type;
    unsigned forms;                     /* bits that the table's owner defines */
    size_t offset;                      /* of the member in `values` */
    size_t count_offset;                /* of a list's int32_t length; 0: no list */
    double minimum, maximum;            /* of a number; maximum: the most items of a list */
    size_t item_bytes_max;              /* TEXTS: each has at least one byte */
    double defaults[SP_FIELD_DEFAULTS]; /* as written; the table's owner defines the index */
    const char *left_out;          /* the default in words, where it is no number; may be NULL */
    const char *value_name, *help; /* of its flag; NULL without one */
    sp_status (*read)(const sp_field *row, const json_t *value, void *values, sp_error *error);
};

/* A table, and the struct that its offsets refer to. */
typedef struct sp_field_part {
    const sp_field *rows;
    size_t n;
    void *values; /* NULL: for look-ups alone */
} sp_field_part;

/* The row of a name [bytes] in one of the forms; NULL: none. */
const sp_field *sp_field_find(const sp_field_part *part, const char *name, size_t bytes,
                              unsigned forms);

/* Sets the members that have numeric defaults; lists and strings are unchanged. `which` is an index
 * of `defaults`. */
void sp_fields_set_defaults(const sp_field_part *part, size_t which);

/*
 * Checks that every member of the object is a field of the form, and that no unsupported feature is
 * requested; null requests nothing. SP_ERR_INPUT with the field as subject and one of the codes
 * above.
 */
sp_status sp_fields_admit(const json_t *object, unsigned form, const sp_field_part *parts,
                          size_t n_parts, sp_error *error);

/*
 * Admits the object and reads it into the parts' values. Where a field is absent or null its member
 * is unchanged; a list replaces and frees the previous one. SP_ERR_INPUT with the field as subject,
 * SP_ERR_MEMORY: values stay valid, to be freed with sp_fields_free.
 */
sp_status sp_fields_read(const json_t *object, unsigned form, const sp_field_part *parts,
                         size_t n_parts, sp_error *error);

/* Checks numbers against their rows' ranges; NaN is in none. Returns `failure` with the field as
 * subject. */
sp_status sp_fields_check_ranges(const sp_field_part *part, sp_status failure, sp_error *error);

/* Frees the lists and sets them to NULL and 0; NULL lists are fine. */
void sp_fields_free(const sp_field_part *part);

/* Stores a number as written, checked against the row's range; 0 and 1 are false and true. For
 * BOOL, NOT, INT, INT64, SIZE, FLOAT and DOUBLE. SP_ERR_INPUT. */
sp_status sp_field_set_number(const sp_field *row, double number, void *values, sp_error *error);

/* Copies n (0 or more) texts into one owned block, which replaces and frees the previous one.
 * SP_ERR_INPUT, SP_ERR_MEMORY: the previous one is unchanged. */
sp_status sp_field_set_texts(const sp_field *row, const char *const *texts, size_t n, void *values,
                             sp_error *error);

/* A list of at least one token id. *out_tokens is owned by the caller (sp_free). SP_ERR_INPUT with
 * `field` as subject, SP_ERR_MEMORY. */
sp_status sp_field_read_ids(const json_t *list, const char *field, int32_t **out_tokens,
                            int32_t *out_n, sp_error *error);

/* Replaces the list of a row by `block`, whose ownership it takes, and frees the previous one; NULL
 * and 0: an empty list. */
void sp_field_take_list(const sp_field *row, void *block, int32_t n, void *values);

#endif
