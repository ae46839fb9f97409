/*
 * lora_chat.h: what an adapter's folder says of requests for it: a chat template of its own, and
 * the ids that end a text (generation_config.json). And the table of what is loaded, by name.
 *
 * The files are read where an adapter is looked up, understood there too, and travel with the load;
 * the engine's thread puts the outcome into the table when the load has succeeded. The HTTP thread
 * makes a prompt by what the table says, and the engine's thread admits it only while the name
 * still means that: a request that was overtaken by another version is made again.
 */
#ifndef SP_SERVER_DRIVER_LORA_CHAT_H
#define SP_SERVER_DRIVER_LORA_CHAT_H

#include "chat/chat.h"

#include <stdatomic.h>

#define SP_LORA_ENDS_MAX 8

/* The code of a generation_config.json that cannot be used, the base's or an adapter's. */
#define SP_CODE_GENERATION_CONFIG "generation-config-malformed"

/* Files of a folder, read and not yet understood. */
typedef struct sp_lora_files {
    sp_chat_folder chat;
    char *generation_config; /* [generation_bytes]; NULL: it is not there */
    size_t generation_bytes;
    sp_error chat_error, generation_error; /* SP_OK, or why one that is there cannot be read */
} sp_lora_files;

/* Immutable, and shared by all who hold a reference. */
typedef struct sp_lora_chat {
    atomic_int references;
    void (*destroy)(struct sp_lora_chat *chat);
    sp_chat *chat;                  /* its own template; NULL: the base's is used, unless */
    sp_error chat_error;            /* this is not SP_OK: its own cannot be used, nor is another */
    int32_t ends[SP_LORA_ENDS_MAX]; /* [n_ends] in place of the base's ids */
    int32_t n_ends;
    bool has_ends;
    sp_error ends_error; /* not SP_OK: they cannot be used, so no text can be ended as it should */
} sp_lora_chat;

/* What a folder's files are understood with. */
typedef struct sp_lora_chat_base {
    const sp_engine *engine;
    const json_t *tokenizer_config; /* the base's; may be NULL */
    bool overrules; /* --chat-template is given, and is for all: adapters' own are not looked at */
} sp_lora_chat_base;

/* Blocks on the file system. `path` is the adapter's, a folder or a file in it. SP_ERR_MEMORY. */
sp_status sp_lora_files_read(const char *path, sp_lora_files *out_files, sp_error *error);
void sp_lora_files_free(sp_lora_files *files);
/* *out_chat has one reference, the caller's; NULL: the folder says nothing. SP_ERR_MEMORY. */
sp_status sp_lora_chat_make(const sp_lora_files *files, const sp_lora_chat_base *base,
                            sp_lora_chat **out_chat, sp_error *error);
/* NULL is allowed, in the second too. */
sp_lora_chat *sp_lora_chat_retain(sp_lora_chat *chat);
void sp_lora_chat_release(sp_lora_chat *chat);

/* ---- the table ----------------------------------------------------------------------------- */

typedef struct sp_lora_chats sp_lora_chats;
typedef struct sp_lora_entry sp_lora_entry;

/* `base_name` is copied. NULL: out of memory. */
sp_lora_chats *sp_lora_chats_create(const char *base_name);
void sp_lora_chats_destroy(sp_lora_chats *chats); /* NULL is allowed */

/* A row for later, so that putting it in cannot fail; it takes the reference. NULL: out of memory,
 * and the reference is the caller's. */
sp_lora_entry *sp_lora_entry_create(const char *name, sp_lora_chat *chat);
void sp_lora_entry_destroy(sp_lora_entry *entry); /* NULL is allowed */
/* Takes the row, in place of one with its name. */
void sp_lora_chats_put(sp_lora_chats *chats, sp_lora_entry *entry);
void sp_lora_chats_remove(sp_lora_chats *chats, const char *name);
/* What requests without a name mean: a loaded name, or NULL for the base. */
void sp_lora_chats_set_active(sp_lora_chats *chats, const char *name);

/* Any thread. False: nothing of that name is loaded. `name` NULL: what is active. *out_chat is the
 * caller's reference; NULL: the base's template and ends. */
bool sp_lora_chats_find(sp_lora_chats *chats, const char *name, sp_lora_chat **out_chat);

#endif
