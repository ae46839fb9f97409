#include "server/driver/lora_notes.h"

#include "base/alloc.h"
#include "base/json.h"
#include "base/text.h"

#include <string.h>

/* Names of files and fields are untrusted text. */
static void log_note(sp_log *log, const char *name, const char *note, const char *code)
{
    char *text = sp_strdup(note);

    if (text) {
        sp_make_printable(text);
        sp_log_line(log, "sidepath serve: adapter \"%s\": %s%s%s%s", name, text, code ? " [" : "",
                    code ? code : "", code ? "]" : "");
    }
    sp_free(text);
}

static void log_notes(sp_log *log, const char *name, const char *receipt)
{
    json_t *root = NULL;
    size_t i;
    json_t *note;

    if (sp_json_parse(receipt, strlen(receipt), "a receipt", NULL, NULL, &root, NULL) != SP_OK)
        return;
    json_array_foreach(json_object_get(root, "notes"), i, note)
        log_note(log, name, json_is_string(note) ? json_string_value(note) : "", NULL);
    json_decref(root);
}

static void log_failure(sp_log *log, const char *name, const char *what, const sp_error *why)
{
    sp_text text = {0};

    if (why->status == SP_OK)
        return;
    sp_text_format(&text, "%s: %s", what, why->text);
    log_note(log, name, text.failed ? what : text.data, why->code);
    sp_text_free(&text);
}

static void log_ends(sp_log *log, const char *name, const sp_lora_chat *chat)
{
    sp_text text = {0};

    sp_text_add(&text, chat->n_ends > 0 ? "texts end at its own ids: " : "no id ends its texts");
    for (int32_t i = 0; i < chat->n_ends; i++)
        sp_text_format(&text, i ? ", %d" : "%d", chat->ends[i]);
    if (!text.failed)
        log_note(log, name, text.data, NULL);
    sp_text_free(&text);
}

void sp_lora_notes_log(sp_log *log, const char *name, const char *receipt, const sp_lora_chat *chat)
{
    sp_text text = {0};

    if (log && receipt)
        log_notes(log, name, receipt);
    if (!log || !chat)
        return;
    sp_text_format(&text, "chat by its own %s", chat->chat ? sp_chat_source(chat->chat) : "");
    if (chat->chat && !text.failed)
        log_note(log, name, text.data, NULL);
    sp_text_free(&text);
    if (chat->has_ends)
        log_ends(log, name, chat);
    log_failure(log, name, "warning: chat with it is refused", &chat->chat_error);
    log_failure(log, name, "warning: requests for it are refused", &chat->ends_error);
}
