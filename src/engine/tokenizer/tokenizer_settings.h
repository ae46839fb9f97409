/*
 * tokenizer_settings.h: what a tokenizer.json asks for, apart from its tables. Each setting is
 * served, or refused by the name of its field.
 */
#ifndef SP_ENGINE_TOKENIZER_TOKENIZER_SETTINGS_H
#define SP_ENGINE_TOKENIZER_TOKENIZER_SETTINGS_H

#include "base/json.h"
#include "engine/tokenizer/tokenizer_parts.h"

/* Fills the settings of *tokenizer; the ids of the template are not held against the vocabulary
 * yet. SP_ERR_INPUT with a code of tokenizer.h. */
sp_status sp_tokenizer_read_settings(const json_t *root, sp_tokenizer *tokenizer, sp_error *error);

sp_status sp_tokenizer_refuse(sp_error *error, const char *field, const char *why);
sp_status sp_tokenizer_malformed(sp_error *error, const char *subject, int64_t position,
                                 const char *why);
bool sp_tokenizer_absent(const json_t *value); /* or null */

#endif
