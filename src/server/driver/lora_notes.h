/*
 * lora_notes.h: logs the notes of an adapter's receipt when it is loaded: places that its config
 * promises, files beside its weights, whatever was decided about it without a refusal.
 */
#ifndef SP_SERVER_DRIVER_LORA_NOTES_H
#define SP_SERVER_DRIVER_LORA_NOTES_H

#include "server/driver/lora_chat.h"
#include "server/metrics/log.h"

/* One line for each note of `receipt` (JSON; NULL: none), and what requests for it have of its own
 * (`chat`, may be NULL). Any thread, never blocks. */
void sp_lora_notes_log(sp_log *log, const char *name, const char *receipt,
                       const sp_lora_chat *chat);

#endif
