/*
 * tokenizer_settings.h: the settings of a tokenizer.json, apart from its tables. Each is supported,
 * or refused by the name of its field.
 */
#ifndef SP_ENGINE_TOKENIZER_TOKENIZER_SETTINGS_H
#define SP_ENGINE_TOKENIZER_TOKENIZER_SETTINGS_H

#include "base/json.h"
#include "engine/tokenizer/tokenizer_parts.h"

/* Sets the settings of *tokenizer; the ids of the template are not checked against the vocabulary
 * yet. SP_ERR_INPUT with a code of tokenizer.h. */
sp_status sp_tokenizer_read_settings(const json_t *root, sp_tokenizer *tokenizer, sp_error *error);

/* SP_ERR_INPUT with SP_TOKENIZER_UNSUPPORTED, or SP_TOKENIZER_MALFORMED; `error` may be NULL. */
sp_status sp_tokenizer_refuse(sp_error *error, const char *field, const char *why);
sp_status sp_tokenizer_malformed(sp_error *error, const char *subject, int64_t position,
                                 const char *why);
bool sp_tokenizer_absent(const json_t *value); /* NULL, or JSON's null */

#endif
