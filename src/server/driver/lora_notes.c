#include "server/driver/lora_notes.h"

#include "base/alloc.h"
#include "base/json.h"
#include "base/text.h"

#include <string.h>

void sp_lora_notes_log(sp_log *log, const char *name, const char *receipt)
{
    json_t *root = NULL;
    size_t i;
    json_t *note;

    if (!log || !receipt ||
        sp_json_parse(receipt, strlen(receipt), "a receipt", NULL, NULL, &root, NULL) != SP_OK)
        return;
    json_array_foreach(json_object_get(root, "notes"), i, note)
    {
        char *text = sp_strdup(json_is_string(note) ? json_string_value(note) : "");

        /* Names of files and fields are untrusted text. */
        if (text) {
            sp_make_printable(text);
            sp_log_line(log, "sidepath serve: adapter \"%s\": %s", name, text);
        }
        sp_free(text);
    }
    json_decref(root);
}
