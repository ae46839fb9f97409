/*
 * peer_catalog.c: a directory's adapters, and the thread that reads them.
 *
 * Everything below is under the catalogue's lock, which is free while files are read. A slot is a
 * folder of the directory; its entry is the version that was read last. An entry that is no slot's
 * any more lives as long as somebody refers to it, and its bytes as long as they are pinned or
 * memory is not needed otherwise.
 */
#include "peer/peer_catalog.h"

#include "base/alloc.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/file.h"
#include "base/hash.h"
#include "peer/peer_digests.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define LINE_BYTES 768
#define CONFIG     "adapter_config.json"

struct sp_peer_entry {
    sp_peer_content content;
    struct slot *slot; /* NULL: not what its folder holds now */
    int32_t refs, pins;
    char *block; /* NULL: not in memory */
    void *registered;
    bool wanted; /* its bytes are, by somebody who waits */
    uint64_t last_used;
    sp_peer_entry *next; /* in the catalogue's list */
};

typedef enum slot_state { SLOT_UNREAD, SLOT_OFFERED, SLOT_REFUSED } slot_state;

typedef struct slot {
    char *name;
    uint64_t stamp; /* of its files */
    slot_state state;
    bool seen;    /* by the scan that is in progress */
    bool wanted;  /* somebody waits for it */
    bool starved; /* it waits for memory that is pinned */
    sp_peer_entry *entry;
    sp_error refusal;
} slot;

struct sp_peer_catalog {
    char *directory;
    sp_adapter_options audit;
    sp_peer_packer packer;
    bool has_packer;
    sp_peer_digests *digests; /* borrowed; NULL: none */
    uint64_t budget_bytes, rescan_ns;
    sp_peer_catalog_events events;

    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    bool stop, scanned;
    bool listed; /* by the last scan: the directory could be read */

    slot **slots; /* [n_slots] by name */
    size_t n_slots, capacity;
    sp_peer_entry *entries;
    uint64_t memory_bytes, uses;
    sp_peer_catalog_counts counts;
};

/* ---- telling --------------------------------------------------------------------------------- */

static void log_line(const sp_peer_catalog *catalog, const char *format, ...) SP_PRINTF(2, 3);
static void log_line(const sp_peer_catalog *catalog, const char *format, ...)
{
    char line[LINE_BYTES];
    va_list arguments;

    if (!catalog->events.log)
        return;
    va_start(arguments, format);
    (void)vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    sp_make_printable(line);
    catalog->events.log(catalog->events.user, line);
}

static void tell_changed(const sp_peer_catalog *catalog)
{
    if (catalog->events.changed)
        catalog->events.changed(catalog->events.user);
}

/* ---- memory ---------------------------------------------------------------------------------- */

static void drop_block(sp_peer_catalog *catalog, sp_peer_entry *entry)
{
    if (!entry->block)
        return;
    if (entry->registered && catalog->events.unregister_memory)
        catalog->events.unregister_memory(catalog->events.user, entry->registered);
    entry->registered = NULL;
    sp_aligned_free(entry->block);
    entry->block = NULL;
    catalog->memory_bytes -= entry->content.block_bytes;
}

static void give_block(sp_peer_catalog *catalog, sp_peer_entry *entry, char *block)
{
    entry->block = block;
    entry->last_used = ++catalog->uses;
    catalog->memory_bytes += entry->content.block_bytes;
    if (catalog->events.register_memory)
        entry->registered = catalog->events.register_memory(catalog->events.user, block,
                                                            (size_t)entry->content.block_bytes);
}

static void free_entry(sp_peer_catalog *catalog, sp_peer_entry *entry)
{
    sp_peer_entry **at = &catalog->entries;

    while (*at != entry)
        at = &(*at)->next;
    *at = entry->next;
    drop_block(catalog, entry);
    sp_peer_content_free(&entry->content);
    sp_free(entry);
}

static void unref(sp_peer_catalog *catalog, sp_peer_entry *entry)
{
    if (--entry->refs == 0)
        free_entry(catalog, entry);
}

static sp_peer_entry *oldest_unpinned(const sp_peer_catalog *catalog)
{
    sp_peer_entry *oldest = NULL;

    for (sp_peer_entry *entry = catalog->entries; entry; entry = entry->next)
        if (entry->block && entry->pins == 0 && (!oldest || entry->last_used < oldest->last_used))
            oldest = entry;
    return oldest;
}

/* Whether so many bytes fit into the budget now, after evicting what is not in use. */
static bool make_room(sp_peer_catalog *catalog, uint64_t bytes)
{
    while (catalog->memory_bytes + bytes > catalog->budget_bytes) {
        sp_peer_entry *entry = oldest_unpinned(catalog);

        if (!entry)
            return false;
        drop_block(catalog, entry);
        catalog->counts.evictions++;
    }
    return true;
}

/* ---- slots ----------------------------------------------------------------------------------- */

static slot *find_slot(const sp_peer_catalog *catalog, const char *name)
{
    for (size_t i = 0; i < catalog->n_slots; i++)
        if (strcmp(catalog->slots[i]->name, name) == 0)
            return catalog->slots[i];
    return NULL;
}

static void retire_entry(sp_peer_catalog *catalog, slot *s)
{
    sp_peer_entry *entry = s->entry;

    s->entry = NULL;
    if (!entry)
        return;
    entry->slot = NULL;
    entry->wanted = false;
    unref(catalog, entry);
}

static void free_slot(sp_peer_catalog *catalog, slot *s)
{
    retire_entry(catalog, s);
    sp_free(s->name);
    sp_free(s);
}

/* In the order of names. */
static slot *add_slot(sp_peer_catalog *catalog, const char *name)
{
    size_t at = catalog->n_slots;
    slot *s;

    if (catalog->n_slots == catalog->capacity) {
        size_t capacity = 2 * catalog->capacity + 16;
        slot **slots = sp_realloc(catalog->slots, capacity * sizeof(slot *));

        if (!slots)
            return NULL;
        catalog->slots = slots;
        catalog->capacity = capacity;
    }
    s = sp_calloc(1, sizeof *s);
    if (s)
        s->name = sp_strdup(name);
    if (!s || !s->name) {
        sp_free(s);
        return NULL;
    }
    for (; at > 0 && strcmp(catalog->slots[at - 1]->name, name) > 0; at--)
        catalog->slots[at] = catalog->slots[at - 1];
    catalog->slots[at] = s;
    catalog->n_slots++;
    return s;
}

/* ---- scanning -------------------------------------------------------------------------------- */

/* What the files of a folder look like from outside; 0: it holds no adapter. The order in which a
 * directory lists its files does not matter. */
static uint64_t stamp_of(int directory, const char *name)
{
    int fd = openat(directory, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *folder = fd >= 0 ? fdopendir(fd) : NULL;
    bool has_config = false;
    uint64_t stamp = 1;
    struct dirent *file;

    if (!folder) {
        if (fd >= 0)
            close(fd);
        return 0;
    }
    while ((file = readdir(folder)) != NULL) {
        char record[NAME_MAX + 128];
        struct stat info;
        int n;

        if (fstatat(fd, file->d_name, &info, 0) != 0 || !S_ISREG(info.st_mode))
            continue;
        has_config = has_config || strcmp(file->d_name, CONFIG) == 0;
        n = snprintf(record, sizeof record, "%s/%lld/%lld.%09ld/%llu", file->d_name,
                     (long long)info.st_size, (long long)info.st_mtim.tv_sec, info.st_mtim.tv_nsec,
                     (unsigned long long)info.st_ino);
        stamp += sp_xxh3(record, (size_t)n);
    }
    closedir(folder);
    return has_config ? stamp | 1 : 0;
}

static bool is_name(const char *name)
{
    size_t n = strlen(name);

    if (name[0] == '.' || n > SP_PEER_NAME_BYTES_MAX || !sp_utf8_valid(name, n))
        return false;
    for (size_t i = 0; i < n; i++)
        if ((unsigned char)name[i] < 0x20 || name[i] == 0x7f || name[i] == ':')
            return false;
    return true;
}

/* Under the lock. */
static void note_folder(sp_peer_catalog *catalog, const char *name, uint64_t stamp)
{
    slot *s = find_slot(catalog, name);

    if (!s)
        s = add_slot(catalog, name);
    if (!s)
        return; /* out of memory: the next scan may find it */
    s->seen = true;
    if (s->stamp != stamp) {
        s->stamp = stamp;
        s->state = SLOT_UNREAD;
        s->starved = false;
    }
}

static void scan_folders(sp_peer_catalog *catalog, DIR *listing, int fd)
{
    struct dirent *entry;

    while ((entry = readdir(listing)) != NULL) {
        uint64_t stamp = is_name(entry->d_name) ? stamp_of(fd, entry->d_name) : 0;

        if (stamp == 0)
            continue;
        pthread_mutex_lock(&catalog->lock);
        note_folder(catalog, entry->d_name, stamp);
        pthread_mutex_unlock(&catalog->lock);
    }
}

/* The slots whose folders are gone. Under the lock, which logging does without: a line is short. */
static void remove_unseen(sp_peer_catalog *catalog)
{
    size_t kept = 0;

    for (size_t i = 0; i < catalog->n_slots; i++) {
        slot *s = catalog->slots[i];

        if (s->seen) {
            s->seen = false;
            catalog->slots[kept++] = s;
        } else {
            if (s->state == SLOT_OFFERED)
                log_line(catalog, "\"%s\" is gone and no longer offered", s->name);
            free_slot(catalog, s);
        }
    }
    catalog->n_slots = kept;
}

static void scan(sp_peer_catalog *catalog)
{
    int fd = open(catalog->directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *listing = fd >= 0 ? fdopendir(fd) : NULL;

    if (listing) {
        scan_folders(catalog, listing, fd);
        closedir(listing);
    } else if (fd >= 0) {
        close(fd);
    }
    pthread_mutex_lock(&catalog->lock);
    if (listing)
        remove_unseen(catalog);
    catalog->scanned = true;
    catalog->listed = listing != NULL;
    pthread_mutex_unlock(&catalog->lock);
    tell_changed(catalog);
}

/* ---- reading --------------------------------------------------------------------------------- */

static void refuse_slot(sp_peer_catalog *catalog, slot *s, const sp_error *error)
{
    if (s->entry)
        retire_entry(catalog, s);
    s->state = SLOT_REFUSED;
    s->refusal = *error;
    log_line(catalog, "\"%s\" is not offered: %s%s%s%s", s->name, error->text,
             error->code[0] ? " [" : "", error->code, error->code[0] ? "]" : "");
}

static bool is_same(const sp_peer_content *a, const sp_peer_content *b)
{
    return a->manifest.bytes == b->manifest.bytes && a->block_bytes == b->block_bytes &&
           memcmp(a->manifest.data, b->manifest.data, a->manifest.bytes) == 0;
}

/* Takes the content. False: out of memory. */
static bool new_entry(sp_peer_catalog *catalog, slot *s, sp_peer_content *content, bool is_read)
{
    char hex[2 * SP_DIGEST_BYTES + 1];
    sp_peer_entry *entry = sp_calloc(1, sizeof *entry);

    if (!entry)
        return false;
    retire_entry(catalog, s);
    entry->content = *content;
    entry->refs = 1;
    entry->slot = s;
    entry->next = catalog->entries;
    catalog->entries = entry;
    s->entry = entry;
    sp_hex(entry->content.digest.bytes, SP_DIGEST_BYTES, hex);
    log_line(catalog, "\"%s\" is offered: rank %d, %.1f MiB%s, digest %.16s%s", s->name,
             (int)entry->content.rank, (double)entry->content.data_bytes / 0x1p20,
             entry->content.image_bytes ? " and an image" : "", hex,
             is_read ? "" : " of an earlier run");
    return true;
}

/* Under the lock again: what was read is the slot's, unless the folder changed or is gone. */
static void take_read(sp_peer_catalog *catalog, slot *s, sp_peer_content *content, char *block)
{
    sp_error error;

    catalog->counts.reads++;
    catalog->counts.read_bytes += content->data_bytes;
    if (s->entry && is_same(&s->entry->content, content)) {
        sp_peer_content_free(content);
    } else if (!new_entry(catalog, s, content, true)) {
        sp_peer_content_free(content);
        sp_aligned_free(block);
        sp_fail_memory(&error, sizeof *s->entry, "an adapter");
        refuse_slot(catalog, s, &error);
        return;
    }
    s->state = SLOT_OFFERED;
    s->wanted = s->entry->wanted = false;
    drop_block(catalog, s->entry);
    if (make_room(catalog, s->entry->content.block_bytes))
        give_block(catalog, s->entry, block);
    else
        sp_aligned_free(block);
}

/* Whether there is memory to read the slot now. Else it is refused, or waits until some is
 * unpinned. */
static bool may_read(sp_peer_catalog *catalog, slot *s, uint64_t bytes)
{
    sp_error error;

    if (s->entry && s->entry->content.block_bytes > bytes)
        bytes = s->entry->content.block_bytes;
    if (bytes > catalog->budget_bytes) {
        sp_fail(&error, SP_ERR_BUDGET, NULL, s->name, -1,
                "it takes %.1f MiB, and the budget is %.1f MiB", (double)bytes / 0x1p20,
                (double)catalog->budget_bytes / 0x1p20);
        refuse_slot(catalog, s, &error);
        return false;
    }
    if (make_room(catalog, bytes))
        return true;
    s->starved = true;
    return false;
}

/* ---- digests of an earlier run ----------------------------------------------------------------
 */

/* An adapter that is new here is offered by its headers, where its digest is known. Without the
 * lock, but to take it. */
static bool offer_known(sp_peer_catalog *catalog, slot *s, const char *path)
{
    sp_digest key, digest;
    sp_peer_content content;

    if (!catalog->digests || catalog->has_packer || s->entry ||
        !sp_peer_digests_key(catalog->digests, path, &key) ||
        !sp_peer_digests_find(catalog->digests, &key, &digest) ||
        sp_peer_content_describe(path, s->name, &catalog->audit, &digest, &content, NULL) != SP_OK)
        return false;
    pthread_mutex_lock(&catalog->lock);
    if (content.block_bytes <= catalog->budget_bytes && new_entry(catalog, s, &content, false)) {
        s->state = SLOT_OFFERED;
        s->wanted = false;
        catalog->counts.known_digests++;
    } else {
        sp_peer_content_free(&content); /* it is read, or refused by name, as any other */
    }
    pthread_mutex_unlock(&catalog->lock);
    return s->state == SLOT_OFFERED;
}

/* Files that were the same before and after they were read have this digest. Without the lock. */
static void note_digest(sp_peer_catalog *catalog, const char *path, const sp_digest *before,
                        const sp_digest *digest)
{
    sp_digest after;

    if (sp_peer_digests_key(catalog->digests, path, &after) &&
        memcmp(&after, before, sizeof after) == 0)
        sp_peer_digests_put(catalog->digests, before, digest);
}

/* When nothing is left to be read, so that what was found is whole. Without the lock. */
static void save_digests(const sp_peer_catalog *catalog)
{
    sp_error error;

    if (catalog->digests && catalog->listed && sp_peer_digests_is_changed(catalog->digests) &&
        sp_peer_digests_save(catalog->digests, &error) != SP_OK)
        log_line(catalog, "the digests cannot be kept: %s", error.text);
}

/* Slots are removed by this thread alone, so `s` stays while the lock is free. */
static void read_slot(sp_peer_catalog *catalog, slot *s)
{
    char *path = sp_path_join(catalog->directory, s->name);
    sp_digest key;
    bool has_key;
    uint64_t bytes = 0;
    sp_peer_content content;
    void *block = NULL;
    sp_error error;
    sp_status status;

    pthread_mutex_unlock(&catalog->lock);
    if (path && offer_known(catalog, s, path)) {
        sp_free(path);
        pthread_mutex_lock(&catalog->lock);
        return;
    }
    has_key = path && catalog->digests && sp_peer_digests_key(catalog->digests, path, &key);
    status =
        path ? sp_peer_content_measure(path, &bytes, &error) : sp_fail_memory(&error, 0, "a path");
    pthread_mutex_lock(&catalog->lock);
    if (status == SP_OK && !may_read(catalog, s, bytes)) {
        sp_free(path);
        return;
    }
    pthread_mutex_unlock(&catalog->lock);
    if (status == SP_OK)
        status = sp_peer_content_read(path, s->name, &catalog->audit,
                                      catalog->has_packer ? &catalog->packer : NULL, &content,
                                      &block, &error);
    if (status == SP_OK && has_key)
        note_digest(catalog, path, &key, &content.digest);
    pthread_mutex_lock(&catalog->lock);
    sp_free(path);
    if (status == SP_OK)
        take_read(catalog, s, &content, block);
    else
        refuse_slot(catalog, s, &error);
}

/* What somebody waits for comes first. */
static slot *next_slot(const sp_peer_catalog *catalog)
{
    slot *unread = NULL;

    for (size_t i = 0; i < catalog->n_slots; i++) {
        slot *s = catalog->slots[i];

        if (s->starved)
            continue;
        if (s->entry && s->entry->wanted && !s->entry->block)
            return s;
        if (s->state == SLOT_UNREAD && (!unread || (s->wanted && !unread->wanted)))
            unread = s;
    }
    return unread;
}

static void sleep_until(sp_peer_catalog *catalog, uint64_t end_ns)
{
    struct timespec end = {.tv_sec = (time_t)(end_ns / 1000000000),
                           .tv_nsec = (long)(end_ns % 1000000000)};

    (void)pthread_cond_timedwait(&catalog->wake, &catalog->lock, &end);
}

static void *run(void *user)
{
    sp_peer_catalog *catalog = user;
    uint64_t next_scan_ns = 0;

    pthread_mutex_lock(&catalog->lock);
    while (!catalog->stop) {
        uint64_t now_ns = sp_clock_ns();
        slot *s;

        if (now_ns >= next_scan_ns) {
            pthread_mutex_unlock(&catalog->lock);
            scan(catalog);
            next_scan_ns = sp_clock_ns() + catalog->rescan_ns;
            pthread_mutex_lock(&catalog->lock);
        } else if ((s = next_slot(catalog)) != NULL) {
            read_slot(catalog, s);
            pthread_mutex_unlock(&catalog->lock);
            tell_changed(catalog);
            pthread_mutex_lock(&catalog->lock);
        } else {
            pthread_mutex_unlock(&catalog->lock);
            save_digests(catalog);
            pthread_mutex_lock(&catalog->lock);
            if (!catalog->stop && !next_slot(catalog))
                sleep_until(catalog, next_scan_ns);
        }
    }
    pthread_mutex_unlock(&catalog->lock);
    return NULL;
}

/* ---- creating -------------------------------------------------------------------------------- */

static void free_catalog(sp_peer_catalog *catalog)
{
    for (size_t i = 0; i < catalog->n_slots; i++)
        free_slot(catalog, catalog->slots[i]);
    sp_free(catalog->slots);
    sp_geometry_release(catalog->audit.geometry);
    sp_free(catalog->directory);
    sp_free(catalog);
}

static sp_status check_directory(const char *directory, sp_error *error)
{
    struct stat info;

    if (stat(directory, &info) != 0)
        return sp_fail(error, errno == ENOENT ? SP_ERR_NOT_FOUND : SP_ERR_INPUT, NULL, directory,
                       -1, "%s: %s", sp_path_tail(directory), strerror(errno));
    if (!S_ISDIR(info.st_mode))
        return sp_fail(error, SP_ERR_INPUT, NULL, directory, -1, "%s is no directory",
                       sp_path_tail(directory));
    return SP_OK;
}

static sp_status start(sp_peer_catalog *catalog, sp_error *error)
{
    pthread_condattr_t monotonic;
    int code;

    pthread_mutex_init(&catalog->lock, NULL);
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&catalog->wake, &monotonic);
    pthread_condattr_destroy(&monotonic);
    code = pthread_create(&catalog->thread, NULL, run, catalog);
    if (code == 0)
        return SP_OK;
    pthread_cond_destroy(&catalog->wake);
    pthread_mutex_destroy(&catalog->lock);
    return sp_fail(error, SP_ERR_THREAD, NULL, NULL, -1, "a thread for the catalogue: %s",
                   strerror(code));
}

sp_status sp_peer_catalog_create(const sp_peer_catalog_options *options,
                                 sp_peer_catalog **out_catalog, sp_error *error)
{
    sp_peer_catalog *catalog;
    sp_status status = check_directory(options->directory, error);

    if (status != SP_OK)
        return status;
    catalog = sp_calloc(1, sizeof *catalog);
    if (!catalog)
        return sp_fail_memory(error, sizeof *catalog, "a catalogue");
    catalog->directory = sp_strdup(options->directory);
    catalog->audit = *options->audit;
    if (catalog->audit.geometry)
        sp_geometry_retain(catalog->audit.geometry);
    catalog->has_packer = options->packer != NULL;
    if (options->packer)
        catalog->packer = *options->packer;
    catalog->digests = options->digests;
    catalog->budget_bytes = options->memory_bytes;
    catalog->rescan_ns = options->rescan_ms * 1000000;
    catalog->events = options->events;
    status = catalog->directory ? start(catalog, error)
                                : sp_fail_memory(error, 0, "the name of a directory");
    if (status != SP_OK) {
        free_catalog(catalog);
        return status;
    }
    *out_catalog = catalog;
    return SP_OK;
}

void sp_peer_catalog_destroy(sp_peer_catalog *catalog)
{
    if (!catalog)
        return;
    pthread_mutex_lock(&catalog->lock);
    catalog->stop = true;
    pthread_cond_signal(&catalog->wake);
    pthread_mutex_unlock(&catalog->lock);
    pthread_join(catalog->thread, NULL);
    pthread_cond_destroy(&catalog->wake);
    pthread_mutex_destroy(&catalog->lock);
    free_catalog(catalog);
}

/* ---- asking ---------------------------------------------------------------------------------- */

static sp_status not_found(sp_error *error, const char *name)
{
    return sp_fail(error, SP_ERR_NOT_FOUND, "peer-not-found", name, -1,
                   name ? "there is no adapter \"%s\"" : "there is no adapter with this digest%s",
                   name ? name : "");
}

static sp_status answer_with(slot *s, sp_peer_entry **out_entry)
{
    s->entry->refs++;
    *out_entry = s->entry;
    return SP_OK;
}

static sp_status find_by_name(sp_peer_catalog *catalog, const char *name, sp_peer_entry **out_entry,
                              sp_error *error)
{
    slot *s = find_slot(catalog, name);

    if (!s)
        return catalog->scanned ? not_found(error, name) : SP_PENDING;
    if (s->state == SLOT_OFFERED)
        return answer_with(s, out_entry);
    if (s->state == SLOT_UNREAD) {
        s->wanted = true;
        pthread_cond_signal(&catalog->wake);
        return SP_PENDING;
    }
    return sp_fail(error, SP_ERR_REFUSED, s->refusal.code, name, -1, "%s", s->refusal.text);
}

static sp_status find_by_digest(sp_peer_catalog *catalog, const sp_digest *digest,
                                sp_peer_entry **out_entry, sp_error *error)
{
    bool complete = catalog->scanned;

    for (size_t i = 0; i < catalog->n_slots; i++) {
        slot *s = catalog->slots[i];

        complete = complete && s->state != SLOT_UNREAD;
        if (s->state == SLOT_OFFERED &&
            memcmp(s->entry->content.digest.bytes, digest->bytes, SP_DIGEST_BYTES) == 0)
            return answer_with(s, out_entry);
    }
    return complete ? not_found(error, NULL) : SP_PENDING;
}

sp_status sp_peer_catalog_find(sp_peer_catalog *catalog, const char *name, const sp_digest *digest,
                               sp_peer_entry **out_entry, sp_error *error)
{
    sp_status status;

    pthread_mutex_lock(&catalog->lock);
    status = name ? find_by_name(catalog, name, out_entry, error)
                  : find_by_digest(catalog, digest, out_entry, error);
    pthread_mutex_unlock(&catalog->lock);
    return status;
}

sp_peer_entry *sp_peer_entry_retain(sp_peer_catalog *catalog, sp_peer_entry *entry)
{
    pthread_mutex_lock(&catalog->lock);
    entry->refs++;
    pthread_mutex_unlock(&catalog->lock);
    return entry;
}

void sp_peer_entry_release(sp_peer_catalog *catalog, sp_peer_entry *entry)
{
    pthread_mutex_lock(&catalog->lock);
    unref(catalog, entry);
    pthread_mutex_unlock(&catalog->lock);
}

const sp_peer_content *sp_peer_entry_content(const sp_peer_entry *entry)
{
    return &entry->content;
}

static sp_status pin(sp_peer_catalog *catalog, sp_peer_entry *entry, const char **out_block,
                     void **out_registered)
{
    if (entry->block) {
        entry->pins++;
        entry->last_used = ++catalog->uses;
        *out_block = entry->block;
        *out_registered = entry->registered;
        return SP_OK;
    }
    if (!entry->slot)
        return SP_ERR_PEER_LOST;
    entry->wanted = true;
    pthread_cond_signal(&catalog->wake);
    return SP_PENDING;
}

sp_status sp_peer_entry_pin(sp_peer_catalog *catalog, sp_peer_entry *entry, const char **out_block,
                            void **out_registered)
{
    sp_status status;

    pthread_mutex_lock(&catalog->lock);
    status = pin(catalog, entry, out_block, out_registered);
    pthread_mutex_unlock(&catalog->lock);
    return status;
}

void sp_peer_entry_unpin(sp_peer_catalog *catalog, sp_peer_entry *entry)
{
    pthread_mutex_lock(&catalog->lock);
    if (--entry->pins == 0) {
        for (size_t i = 0; i < catalog->n_slots; i++)
            catalog->slots[i]->starved = false;
        pthread_cond_signal(&catalog->wake);
    }
    pthread_mutex_unlock(&catalog->lock);
}

/* ---- lists ----------------------------------------------------------------------------------- */

sp_status sp_peer_catalog_list(sp_peer_catalog *catalog, sp_text *out_text, bool *out_complete)
{
    sp_peer_listing listing = {0};
    bool complete;

    pthread_mutex_lock(&catalog->lock);
    complete = catalog->scanned;
    listing.adapters = sp_calloc(catalog->n_slots + 1, sizeof *listing.adapters);
    for (size_t i = 0; listing.adapters && i < catalog->n_slots; i++) {
        const slot *s = catalog->slots[i];

        complete = complete && s->state != SLOT_UNREAD;
        if (s->state == SLOT_OFFERED)
            listing.adapters[listing.n_adapters++] =
                (sp_peer_listed){s->name, s->entry->content.digest, s->entry->content.data_bytes,
                                 s->entry->content.image_bytes > 0};
    }
    if (listing.adapters)
        sp_peer_listing_encode(&listing, out_text);
    pthread_mutex_unlock(&catalog->lock);
    if (out_complete)
        *out_complete = complete;
    if (!listing.adapters || out_text->failed) {
        sp_free(listing.adapters);
        return SP_ERR_MEMORY;
    }
    sp_free(listing.adapters);
    return SP_OK;
}

void sp_peer_catalog_count(sp_peer_catalog *catalog, sp_peer_catalog_counts *out_counts)
{
    pthread_mutex_lock(&catalog->lock);
    *out_counts = catalog->counts;
    out_counts->memory_bytes = catalog->memory_bytes;
    for (size_t i = 0; i < catalog->n_slots; i++) {
        out_counts->offered += catalog->slots[i]->state == SLOT_OFFERED;
        out_counts->refused += catalog->slots[i]->state == SLOT_REFUSED;
        out_counts->reading += catalog->slots[i]->state == SLOT_UNREAD;
    }
    for (const sp_peer_entry *entry = catalog->entries; entry; entry = entry->next)
        out_counts->pinned_bytes += entry->pins > 0 ? entry->content.block_bytes : 0;
    pthread_mutex_unlock(&catalog->lock);
}
