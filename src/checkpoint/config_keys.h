/*
 * config_keys.h: checks the keys of config.json. Every key is read, is known to change nothing, is
 * refused unless its value changes nothing, or is listed by name: a base that runs slightly wrong
 * is worse than one that does not start.
 */
#ifndef SP_CHECKPOINT_CONFIG_KEYS_H
#define SP_CHECKPOINT_CONFIG_KEYS_H

#include "base/json.h"
#include "base/text.h"

/*
 * Appends to *unused the names of unknown keys, separated by ", "; those inside text_config and
 * RoPE's object with that prefix. No argument but error may be NULL. SP_ERR_UNSUPPORTED with the
 * key as subject: it would change the mathematics. SP_ERR_MEMORY.
 */
sp_status sp_config_keys_check(const json_t *config, sp_text *unused, sp_error *error);

#endif
