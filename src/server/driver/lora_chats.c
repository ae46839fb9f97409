/*
 * lora_chats.c: what loaded adapters say of requests, by name, and the references to it.
 */
#include "base/alloc.h"
#include "server/driver/lora_chat.h"

#include <pthread.h>
#include <string.h>

sp_lora_chat *sp_lora_chat_retain(sp_lora_chat *chat)
{
    if (chat)
        atomic_fetch_add(&chat->references, 1);
    return chat;
}

void sp_lora_chat_release(sp_lora_chat *chat)
{
    if (chat && atomic_fetch_sub(&chat->references, 1) == 1)
        chat->destroy(chat);
}

/* ---- the table ----------------------------------------------------------------------------- */

struct sp_lora_entry {
    sp_lora_entry *next;
    char *name;
    sp_lora_chat *chat;
};

struct sp_lora_chats {
    char *base_name;
    pthread_mutex_t lock; /* of the rest; no work is done under it */
    sp_lora_entry *first;
    sp_lora_entry *active; /* one of them; NULL: the base */
};

sp_lora_chats *sp_lora_chats_create(const char *base_name)
{
    sp_lora_chats *chats = sp_calloc(1, sizeof *chats);

    if (chats)
        chats->base_name = sp_strdup(base_name);
    if (!chats || !chats->base_name) {
        sp_free(chats);
        return NULL;
    }
    pthread_mutex_init(&chats->lock, NULL);
    return chats;
}

void sp_lora_chats_destroy(sp_lora_chats *chats)
{
    if (!chats)
        return;
    while (chats->first) {
        sp_lora_entry *entry = chats->first;

        chats->first = entry->next;
        sp_lora_entry_destroy(entry);
    }
    pthread_mutex_destroy(&chats->lock);
    sp_free(chats->base_name);
    sp_free(chats);
}

sp_lora_entry *sp_lora_entry_create(const char *name, sp_lora_chat *chat)
{
    sp_lora_entry *entry = sp_calloc(1, sizeof *entry);

    if (entry)
        entry->name = sp_strdup(name);
    if (!entry || !entry->name) {
        sp_free(entry);
        return NULL;
    }
    entry->chat = chat;
    return entry;
}

void sp_lora_entry_destroy(sp_lora_entry *entry)
{
    if (!entry)
        return;
    sp_lora_chat_release(entry->chat);
    sp_free(entry->name);
    sp_free(entry);
}

/* Under the lock: the link to the entry of that name, or to the end. */
static sp_lora_entry **find_link(sp_lora_chats *chats, const char *name)
{
    sp_lora_entry **link = &chats->first;

    while (*link && strcmp((*link)->name, name) != 0)
        link = &(*link)->next;
    return link;
}

void sp_lora_chats_put(sp_lora_chats *chats, sp_lora_entry *entry)
{
    sp_lora_entry **link, *before;

    pthread_mutex_lock(&chats->lock);
    link = find_link(chats, entry->name);
    before = *link;
    entry->next = before ? before->next : NULL;
    *link = entry;
    if (before && chats->active == before)
        chats->active = entry;
    pthread_mutex_unlock(&chats->lock);
    sp_lora_entry_destroy(before);
}

void sp_lora_chats_remove(sp_lora_chats *chats, const char *name)
{
    sp_lora_entry **link, *entry;

    pthread_mutex_lock(&chats->lock);
    link = find_link(chats, name);
    entry = *link;
    if (entry)
        *link = entry->next;
    if (entry == chats->active)
        chats->active = NULL;
    pthread_mutex_unlock(&chats->lock);
    sp_lora_entry_destroy(entry);
}

void sp_lora_chats_set_active(sp_lora_chats *chats, const char *name)
{
    pthread_mutex_lock(&chats->lock);
    chats->active = name ? *find_link(chats, name) : NULL;
    pthread_mutex_unlock(&chats->lock);
}

bool sp_lora_chats_find(sp_lora_chats *chats, const char *name, sp_lora_chat **out_chat)
{
    const sp_lora_entry *entry;
    bool is_base = name && strcmp(name, chats->base_name) == 0;

    *out_chat = NULL;
    pthread_mutex_lock(&chats->lock);
    entry = is_base ? NULL : name ? *find_link(chats, name) : chats->active;
    if (entry)
        *out_chat = sp_lora_chat_retain(entry->chat);
    pthread_mutex_unlock(&chats->lock);
    return entry || is_base || !name;
}
