#include "server/driver/adapter_store.h"

#include "base/alloc.h"
#include "base/error.h"
#include "base/file.h"
#include "base/hash.h"
#include "base/json.h"
#include "base/text.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#define MARK            "store_of_sidepath"
#define VERSION         1
#define NAMES_FILE      "names.json"
#define NAMES_BYTES_MAX ((size_t)64 << 20)
#define CONTENT_PREFIX  "sha256-"
#define NEW_PREFIX      "new-"
#define CONTENT_BYTES   (sizeof CONTENT_PREFIX + 2 * SP_DIGEST_BYTES) /* with its NUL */
#define CONFIG_FILE     "adapter_config.json"
#define WEIGHTS_FILE    "adapter_model.safetensors"

struct sp_adapter_store {
    char *directory;
    int fd;                      /* of the directory, and its lock */
    sp_stored_adapter *adapters; /* [n] */
    size_t n;
    sp_digest *put; /* [n_put] that are not settled, one more than once where it was put so */
    size_t n_put;
    uint64_t n_new;
};

/* ---- paths --------------------------------------------------------------------------------- */

static void content_name(const sp_digest *digest, char out_name[CONTENT_BYTES])
{
    memcpy(out_name, CONTENT_PREFIX, sizeof CONTENT_PREFIX);
    sp_hex(digest->bytes, SP_DIGEST_BYTES, out_name + sizeof CONTENT_PREFIX - 1);
}

static char *content_path(const sp_adapter_store *store, const sp_digest *digest)
{
    char name[CONTENT_BYTES];

    content_name(digest, name);
    return sp_path_join(store->directory, name);
}

static sp_status no_memory(sp_error *error)
{
    return sp_fail_memory(error, 1, "the store of adapters");
}

static sp_status failed(sp_error *error, const char *what)
{
    return sp_fail(error, SP_ERR_IO, SP_CODE_STORE_FAILED, "adapter-store", -1,
                   "the adapter could not be kept in --adapter-store: %s: %s", what,
                   strerror(errno));
}

/* A folder of this store, with whatever of its two files is there. */
static void remove_folder(const sp_adapter_store *store, const char *name)
{
    static const char *const files[] = {CONFIG_FILE, WEIGHTS_FILE};
    int folder = openat(store->fd, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);

    if (folder < 0)
        return;
    for (size_t i = 0; i < sizeof files / sizeof *files; i++)
        unlinkat(folder, files[i], 0);
    close(folder);
    unlinkat(store->fd, name, AT_REMOVEDIR);
}

/* ---- the names ----------------------------------------------------------------------------- */

static sp_status invalid(sp_error *error, const char *why)
{
    return sp_fail(error, SP_ERR_INPUT, SP_CODE_STORE_INVALID, "adapter-store", -1,
                   NAMES_FILE " of --adapter-store %s; the store is left as it is", why);
}

static bool read_digest(const char *text, sp_digest *out_digest)
{
    char again[2 * SP_DIGEST_BYTES + 1];

    for (size_t i = 0; i < SP_DIGEST_BYTES; i++) {
        unsigned byte = 0;

        if (!text || strlen(text) != 2 * SP_DIGEST_BYTES || sscanf(text + 2 * i, "%2x", &byte) != 1)
            return false;
        out_digest->bytes[i] = (uint8_t)byte;
    }
    sp_hex(out_digest->bytes, SP_DIGEST_BYTES, again);
    return strcmp(again, text) == 0;
}

static sp_status take_entry(sp_adapter_store *store, const json_t *entry, sp_error *error)
{
    const char *name = json_string_value(json_object_get(entry, "name"));
    const char *digest = json_string_value(json_object_get(entry, "digest"));
    sp_stored_adapter *adapter = &store->adapters[store->n];

    if (!name || !read_digest(digest, &adapter->digest))
        return invalid(error, "has an adapter without \"name\" or \"digest\"");
    store->n++;
    adapter->pinned = json_is_true(json_object_get(entry, "pinned"));
    adapter->name = sp_strdup(name);
    adapter->folder = content_path(store, &adapter->digest);
    return adapter->name && adapter->folder ? SP_OK : no_memory(error);
}

static sp_status take_root(sp_adapter_store *store, const json_t *root, sp_error *error)
{
    const json_t *version = json_object_get(root, MARK);
    const json_t *list = json_object_get(root, "adapters");
    sp_status status = SP_OK;
    size_t i;
    json_t *entry;

    if (!json_is_integer(version) || json_integer_value(version) != VERSION)
        return invalid(error, "is not of this version of sidepath");
    if (!json_is_array(list))
        return invalid(error, "has no list \"adapters\"");
    store->adapters = sp_calloc(json_array_size(list) + 1, sizeof *store->adapters);
    if (!store->adapters)
        return no_memory(error);
    json_array_foreach(list, i, entry)
    {
        if (status == SP_OK)
            status = take_entry(store, entry, error);
    }
    return status;
}

static sp_status read_names(sp_adapter_store *store, sp_error *error)
{
    char *path = sp_path_join(store->directory, NAMES_FILE), *bytes = NULL;
    size_t n = 0;
    json_t *root = NULL;
    sp_error why;
    sp_status status = path ? SP_OK : no_memory(error);

    if (status == SP_OK && faccessat(store->fd, NAMES_FILE, F_OK, 0) == 0) {
        status = sp_file_read_all(path, NAMES_BYTES_MAX, &bytes, &n, error);
        if (status == SP_OK &&
            sp_json_parse(bytes, n, NAMES_FILE, NULL, NULL, &root, &why) != SP_OK)
            status = invalid(error, "is not JSON");
        if (status == SP_OK)
            status = take_root(store, root, error);
    }
    json_decref(root);
    sp_free(bytes);
    sp_free(path);
    return status;
}

static sp_status write_names(sp_adapter_store *store, sp_error *error)
{
    char *path = sp_path_join(store->directory, NAMES_FILE);
    sp_text text = {0};
    sp_error why;
    sp_status status = path ? SP_OK : no_memory(error);

    sp_text_format(&text, "{\"" MARK "\": %d, \"adapters\": [", VERSION);
    for (size_t i = 0; i < store->n; i++) {
        const sp_stored_adapter *adapter = &store->adapters[i];
        char digest[2 * SP_DIGEST_BYTES + 1];

        sp_hex(adapter->digest.bytes, SP_DIGEST_BYTES, digest);
        sp_text_add(&text, i ? ",\n  {\"name\": " : "\n  {\"name\": ");
        sp_text_json_string(&text, adapter->name, strlen(adapter->name));
        sp_text_format(&text, ", \"digest\": \"%s\", \"pinned\": %s}", digest,
                       adapter->pinned ? "true" : "false");
    }
    sp_text_add(&text, "]}\n");
    if (status == SP_OK && text.failed)
        status = no_memory(error);
    if (status == SP_OK && sp_file_write_all(path, text.data, text.bytes, &why) != SP_OK)
        status = sp_fail(error, SP_ERR_IO, SP_CODE_STORE_FAILED, "adapter-store", -1,
                         "the adapter could not be kept in --adapter-store: %s", why.text);
    if (status == SP_OK && fsync(store->fd) != 0)
        status = failed(error, "its directory was not synced");
    sp_text_free(&text);
    sp_free(path);
    return status;
}

/* ---- life ---------------------------------------------------------------------------------- */

static void free_adapter(sp_stored_adapter *adapter)
{
    sp_free(adapter->name);
    sp_free(adapter->folder);
}

void sp_adapter_store_close(sp_adapter_store *store)
{
    if (!store)
        return;
    for (size_t i = 0; i < store->n; i++)
        free_adapter(&store->adapters[i]);
    sp_free(store->adapters);
    sp_free(store->put);
    sp_free(store->directory);
    if (store->fd >= 0)
        close(store->fd);
    sp_free(store);
}

static sp_status lock_directory(sp_adapter_store *store, sp_error *error)
{
    store->fd = open(store->directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (store->fd < 0)
        return sp_fail(error, SP_ERR_NOT_FOUND, NULL, "adapter-store", -1,
                       "--adapter-store %s cannot be opened: %s", store->directory,
                       strerror(errno));
    if (flock(store->fd, LOCK_EX | LOCK_NB) == 0)
        return SP_OK;
    return sp_fail(error, SP_ERR_STATE, SP_CODE_STORE_IN_USE, "adapter-store", -1,
                   "--adapter-store %s is another server's: %s", store->directory, strerror(errno));
}

sp_status sp_adapter_store_open(const char *directory, sp_adapter_store **out_store,
                                sp_error *error)
{
    sp_adapter_store *store = sp_calloc(1, sizeof *store);
    sp_status status;

    if (!store)
        return no_memory(error);
    store->fd = -1;
    store->directory = sp_strdup(directory);
    status = store->directory ? lock_directory(store, error) : no_memory(error);
    if (status == SP_OK)
        status = read_names(store, error);
    if (status != SP_OK) {
        sp_adapter_store_close(store);
        return status;
    }
    sp_adapter_store_tidy(store, NULL, 0);
    *out_store = store;
    return SP_OK;
}

size_t sp_adapter_store_n(const sp_adapter_store *store)
{
    return store->n;
}

const sp_stored_adapter *sp_adapter_store_at(const sp_adapter_store *store, size_t index)
{
    return &store->adapters[index];
}

/* ---- contents ------------------------------------------------------------------------------ */

static bool is_among(const sp_digest *list, size_t n, const char *content)
{
    char name[CONTENT_BYTES];

    for (size_t i = 0; i < n; i++) {
        content_name(&list[i], name);
        if (strcmp(name, content) == 0)
            return true;
    }
    return false;
}

static bool is_recorded(const sp_adapter_store *store, const char *content)
{
    for (size_t i = 0; i < store->n; i++)
        if (is_among(&store->adapters[i].digest, 1, content))
            return true;
    return false;
}

void sp_adapter_store_tidy(sp_adapter_store *store, const sp_digest *in_use, size_t n)
{
    int fd = openat(store->fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *listing = fd >= 0 ? fdopendir(fd) : NULL;
    const struct dirent *entry;

    if (!listing && fd >= 0)
        close(fd);
    while (listing && (entry = readdir(listing)) != NULL) {
        const char *name = entry->d_name;
        bool is_new = strncmp(name, NEW_PREFIX, sizeof NEW_PREFIX - 1) == 0;
        bool is_content = strncmp(name, CONTENT_PREFIX, sizeof CONTENT_PREFIX - 1) == 0;
        bool is_names = strncmp(name, NAMES_FILE ".", sizeof NAMES_FILE) == 0; /* half-written */

        if (is_names)
            unlinkat(store->fd, name, 0);
        else if (is_new ||
                 (is_content && !is_recorded(store, name) &&
                  !is_among(store->put, store->n_put, name) && !is_among(in_use, n, name)))
            remove_folder(store, name);
    }
    if (listing)
        closedir(listing);
}

static sp_status write_file(int folder, const char *name, const char *data, size_t bytes,
                            sp_error *error)
{
    int fd = openat(folder, name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    size_t at = 0;
    bool good = fd >= 0;

    while (good && at < bytes) {
        ssize_t n = write(fd, data + at, bytes - at);

        good = n >= 0 || errno == EINTR;
        at += n > 0 ? (size_t)n : 0;
    }
    good = good && fsync(fd) == 0;
    if (fd >= 0)
        good = close(fd) == 0 && good;
    return good ? SP_OK : failed(error, name);
}

/* The folder is new; on failure what is there is removed. */
static sp_status write_folder(const sp_adapter_store *store, const char *name, const char *config,
                              size_t config_bytes, const char *weights, size_t weights_bytes,
                              sp_error *error)
{
    int folder = -1;
    sp_status status = SP_OK;

    if (mkdirat(store->fd, name, 0777) != 0)
        return failed(error, "a folder");
    folder = openat(store->fd, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder < 0)
        status = failed(error, "a folder");
    if (status == SP_OK)
        status = write_file(folder, CONFIG_FILE, config, config_bytes, error);
    if (status == SP_OK)
        status = write_file(folder, WEIGHTS_FILE, weights, weights_bytes, error);
    if (status == SP_OK && fsync(folder) != 0)
        status = failed(error, "a folder was not synced");
    if (folder >= 0)
        close(folder);
    if (status != SP_OK)
        remove_folder(store, name);
    return status;
}

/* A content that is there already stays: it was written whole, with the same bytes. */
static sp_status move_in(const sp_adapter_store *store, const char *from, const sp_digest *digest,
                         sp_error *error)
{
    char name[CONTENT_BYTES];

    content_name(digest, name);
    if (renameat(store->fd, from, store->fd, name) != 0) {
        bool is_there = errno == ENOTEMPTY || errno == EEXIST;

        if (!is_there)
            failed(error, "a rename");
        remove_folder(store, from);
        if (!is_there)
            return SP_ERR_IO;
    }
    return fsync(store->fd) == 0 ? SP_OK : failed(error, "its directory was not synced");
}

static sp_status hold(sp_adapter_store *store, const sp_digest *digest, sp_error *error)
{
    sp_digest *grown = sp_realloc(store->put, (store->n_put + 1) * sizeof *grown);

    if (!grown)
        return no_memory(error);
    store->put = grown;
    store->put[store->n_put++] = *digest;
    return SP_OK;
}

void sp_adapter_store_settle(sp_adapter_store *store, const sp_digest *digest)
{
    for (size_t i = 0; i < store->n_put; i++) {
        if (memcmp(&store->put[i], digest, sizeof *digest) != 0)
            continue;
        store->put[i] = store->put[--store->n_put];
        return;
    }
}

sp_status sp_adapter_store_put(sp_adapter_store *store, const sp_digest *digest, const char *config,
                               size_t config_bytes, const char *weights, size_t weights_bytes,
                               char **out_folder, sp_error *error)
{
    char aside[48], *folder = content_path(store, digest);
    sp_status status = folder ? hold(store, digest, error) : no_memory(error);

    if (status != SP_OK) {
        sp_free(folder);
        return status;
    }
    snprintf(aside, sizeof aside, NEW_PREFIX "%llu", (unsigned long long)store->n_new++);
    status = write_folder(store, aside, config, config_bytes, weights, weights_bytes, error);
    if (status == SP_OK)
        status = move_in(store, aside, digest, error);
    if (status == SP_OK) {
        *out_folder = folder;
        return SP_OK;
    }
    sp_adapter_store_settle(store, digest);
    sp_free(folder);
    return status;
}

/* ---- recording ----------------------------------------------------------------------------- */

static size_t find_adapter(const sp_adapter_store *store, const char *name)
{
    size_t i = 0;

    while (i < store->n && strcmp(store->adapters[i].name, name) != 0)
        i++;
    return i;
}

bool sp_adapter_store_has(const sp_adapter_store *store, const char *name)
{
    return find_adapter(store, name) < store->n;
}

static sp_status forget(sp_adapter_store *store, size_t at, sp_error *error)
{
    sp_stored_adapter gone = store->adapters[at];
    sp_status status;

    memmove(&store->adapters[at], &store->adapters[at + 1],
            (store->n - at - 1) * sizeof *store->adapters);
    store->n--;
    status = write_names(store, error);
    if (status == SP_OK) {
        free_adapter(&gone);
        return SP_OK;
    }
    memmove(&store->adapters[at + 1], &store->adapters[at],
            (store->n - at) * sizeof *store->adapters);
    store->adapters[at] = gone;
    store->n++;
    return status;
}

/* `made` takes the place of the one at `at`, or is one more. */
static sp_status replace(sp_adapter_store *store, size_t at, sp_stored_adapter made,
                         sp_error *error)
{
    sp_stored_adapter before = {.name = NULL};
    sp_stored_adapter *grown;
    bool is_new = at == store->n;
    sp_status status;

    grown = is_new ? sp_realloc(store->adapters, (at + 1) * sizeof *grown) : store->adapters;
    if (!grown)
        return no_memory(error);
    store->adapters = grown;
    if (!is_new)
        before = grown[at];
    grown[at] = made;
    store->n += is_new;
    status = write_names(store, error);
    if (status == SP_OK) {
        free_adapter(&before);
        return SP_OK;
    }
    grown[at] = before;
    store->n -= is_new;
    return status;
}

sp_status sp_adapter_store_record(sp_adapter_store *store, const char *name,
                                  const sp_digest *digest, bool pinned, sp_error *error)
{
    size_t at = find_adapter(store, name);
    sp_stored_adapter made = {.pinned = pinned};
    sp_status status;

    if (!digest)
        return at < store->n ? forget(store, at, error) : SP_OK;
    made.digest = *digest;
    made.name = sp_strdup(name);
    made.folder = content_path(store, digest);
    status = made.name && made.folder ? replace(store, at, made, error) : no_memory(error);
    if (status != SP_OK)
        free_adapter(&made);
    return status;
}
