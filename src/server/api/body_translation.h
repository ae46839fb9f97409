/*
 * body_translation.h: what the bodies of other APIs share on their way to one of
 * /v1/chat/completions: the first failure is kept, and after it nothing is added. No I/O.
 */
#ifndef SP_SERVER_API_BODY_TRANSLATION_H
#define SP_SERVER_API_BODY_TRANSLATION_H

#include <jansson.h>
#include <sidepath/status.h>

#include <stdbool.h>

typedef struct sp_translation {
    json_t *chat, *messages; /* the second is part of the first */
    sp_status status;
    sp_error *error;
} sp_translation;

/* Its "messages" are there, and empty. */
sp_translation sp_translation_start(sp_error *error);
/* *out_chat is a new reference, on success. */
sp_status sp_translation_end(sp_translation *to, json_t **out_chat);

/* `code` may be NULL: the value is not valid. */
void sp_translation_refuse(sp_translation *to, const char *code, const char *field,
                           const char *why);
/* These take the value, which may be NULL: out of memory. */
void sp_translation_set(sp_translation *to, json_t *object, const char *name, json_t *value);
void sp_translation_append(sp_translation *to, json_t *list, json_t *value);
/* null, false, 0: a field that is not served may say these. */
bool sp_translation_says_nothing(const json_t *value);

/* What becomes of a field that an API has, or that it names otherwise. */
typedef enum sp_translated {
    SP_TRANSLATED_APART,   /* by a function of its API */
    SP_TRANSLATED_IGNORED, /* changes no answer */
    SP_TRANSLATED_REFUSED, /* unless it says nothing */
    SP_TRANSLATED_RENAMED
} sp_translated;

typedef struct sp_translated_field {
    const char *name;
    sp_translated use;
    const char *renamed; /* SP_TRANSLATED_RENAMED: the field of a chat */
} sp_translated_field;

/* NULL: none of the n has this name. */
const sp_translated_field *sp_translation_find(const sp_translated_field *fields, size_t n,
                                               const char *name);
/* Adds a field of the body as its row says; without a row (NULL) it is the chat's own. */
void sp_translation_add(sp_translation *to, const sp_translated_field *field, const char *name,
                        json_t *value);

#endif
