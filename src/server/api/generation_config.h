/*
 * generation_config.h: the base's generation_config.json, which says what its makers sample with.
 * Requests over HTTP that leave such a field out get its value. It takes a JSON object and gives
 * defaults; the file is read by the server.
 */
#ifndef SP_SERVER_API_GENERATION_CONFIG_H
#define SP_SERVER_API_GENERATION_CONFIG_H

#include "base/text.h"
#include "engine/request/request_table.h"
#include "server/driver/lora_chat.h"

/*
 * Takes the fields that have SP_FORM_CONFIG over into *defaults. Into *applied
 * and *unused go the names of those and of all other keys that say something about how to generate,
 * with ", " between them; eos_token_id is the engine's, and null says nothing. SP_ERR_INPUT with
 * SP_CODE_GENERATION_CONFIG and the key as subject: a value that no request may have either;
 * *defaults is unchanged then.
 */
sp_status sp_generation_config_take(const json_t *root, sp_request *defaults, sp_text *applied,
                                    sp_text *unused, sp_error *error);

#endif
