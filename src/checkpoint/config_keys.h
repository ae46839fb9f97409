/*
 * config_keys.h: the keys of config.json against what this library knows of them. Every key is
 * read, is known to change nothing, is refused unless its value changes nothing, or is listed by
 * name: a base that runs slightly wrong is worse than one that does not start.
 */
#ifndef SP_CHECKPOINT_CONFIG_KEYS_H
#define SP_CHECKPOINT_CONFIG_KEYS_H

#include "base/json.h"
#include "base/text.h"

/*
 * Adds to *unused the names of keys that nothing here knows, with ", " between them; those of
 * text_config and of RoPE's object with these in front. SP_ERR_UNSUPPORTED with the key as subject:
 * it would change the mathematics. SP_ERR_MEMORY.
 */
sp_status sp_config_keys_check(const json_t *config, sp_text *unused, sp_error *error);

#endif
