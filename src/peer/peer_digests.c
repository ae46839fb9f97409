/*
 * peer_digests.c: the file is text: a first line with its version, one line for each adapter, and a
 * last one with the checksum of all before it.
 */
#include "peer/peer_digests.h"

#include "base/alloc.h"
#include "base/confine.h"
#include "base/error.h"
#include "base/file.h"
#include "base/hash.h"
#include "base/text.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define FIRST_LINE     "sidepath digests 1\n"
#define LINE_BYTES     (4 * SP_DIGEST_BYTES + 2) /* two digests in hex, a space, a line's end */
#define LAST_BYTES     (4 + 16 + 1)              /* "sum " and a number in hex */
#define FILE_BYTES_MAX ((size_t)64 << 20)
#define FILES_MAX      4096       /* of a folder */
#define SETTLE_NS      2000000000 /* a change that is older shows in the times */

typedef struct known {
    sp_digest key, digest;
    bool used; /* found or put since the file was opened */
} known;

struct sp_peer_digests {
    char *path;
    char *audit_settings;
    sp_digest base; /* zeros: there is none */
    bool has_base;  /* or needs none */
    known *list;    /* [n] */
    size_t n, capacity;
    size_t n_saved; /* of what the file has */
    bool changed;
};

/* ---- the file -------------------------------------------------------------------------------- */

static int digit(char c)
{
    return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

static bool read_digest(const char *text, sp_digest *out_digest)
{
    for (size_t i = 0; i < SP_DIGEST_BYTES; i++) {
        int high = digit(text[2 * i]), low = digit(text[2 * i + 1]);

        if (high < 0 || low < 0)
            return false;
        out_digest->bytes[i] = (uint8_t)(high << 4 | low);
    }
    return true;
}

static known *add(sp_peer_digests *digests)
{
    if (digests->n == digests->capacity) {
        size_t capacity = 2 * digests->capacity + 64;
        known *list = sp_realloc(digests->list, capacity * sizeof *list);

        if (!list)
            return NULL;
        digests->list = list;
        digests->capacity = capacity;
    }
    digests->list[digests->n] = (known){.used = false};
    return &digests->list[digests->n++];
}

static void last_line(const char *data, size_t bytes, char out_line[LAST_BYTES + 1])
{
    (void)snprintf(out_line, LAST_BYTES + 1, "sum %016llx\n",
                   (unsigned long long)sp_xxh3(data, bytes));
}

static bool is_whole(const char *data, size_t bytes)
{
    char line[LAST_BYTES + 1];
    size_t first = strlen(FIRST_LINE);

    if (bytes < first + LAST_BYTES || memcmp(data, FIRST_LINE, first) != 0 ||
        (bytes - first - LAST_BYTES) % LINE_BYTES != 0)
        return false;
    last_line(data, bytes - LAST_BYTES, line);
    return memcmp(data + bytes - LAST_BYTES, line, LAST_BYTES) == 0;
}

static bool parse(sp_peer_digests *digests, const char *data, size_t bytes)
{
    const char *end = data + bytes - LAST_BYTES;

    for (const char *line = data + strlen(FIRST_LINE); line < end; line += LINE_BYTES) {
        known *one = add(digests);

        if (!one || !read_digest(line, &one->key) || line[2 * SP_DIGEST_BYTES] != ' ' ||
            !read_digest(line + 2 * SP_DIGEST_BYTES + 1, &one->digest) ||
            line[LINE_BYTES - 1] != '\n')
            return false;
    }
    return true;
}

static void read_file(sp_peer_digests *digests, char *out_note)
{
    char *data = NULL;
    size_t bytes = 0;
    sp_error error;
    sp_status status = sp_file_read_all(digests->path, FILE_BYTES_MAX, &data, &bytes, &error);

    if (status == SP_ERR_NOT_FOUND)
        return;
    if (status != SP_OK)
        (void)snprintf(out_note, SP_PEER_DIGESTS_NOTE_BYTES, "%.200s; every adapter is hashed",
                       error.text);
    else if (!is_whole(data, bytes) || !parse(digests, data, bytes)) {
        digests->n = 0;
        (void)snprintf(out_note, SP_PEER_DIGESTS_NOTE_BYTES,
                       "%.150s is damaged or of another version; every adapter is hashed",
                       sp_path_tail(digests->path));
    }
    digests->n_saved = digests->n;
    sp_free(data);
}

/* ---- keys ------------------------------------------------------------------------------------ */

/* One line for each file of a folder. */
typedef struct listing {
    char *lines[FILES_MAX];
    size_t n;
    int64_t newest_ns; /* of all times of change */
} listing;

static int64_t nanoseconds(struct timespec time)
{
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static bool add_file(listing *list, const char *name, const struct stat *info)
{
    char line[NAME_MAX + 160];
    int64_t modified_ns = nanoseconds(info->st_mtim), changed_ns = nanoseconds(info->st_ctim);
    int64_t newer_ns = modified_ns > changed_ns ? modified_ns : changed_ns;

    if (list->n == FILES_MAX)
        return false;
    (void)snprintf(line, sizeof line, "%s/%lld/%llu/%llu/%lld/%lld", name, (long long)info->st_size,
                   (unsigned long long)info->st_dev, (unsigned long long)info->st_ino,
                   (long long)modified_ns, (long long)changed_ns);
    list->lines[list->n] = sp_strdup(line);
    if (newer_ns > list->newest_ns)
        list->newest_ns = newer_ns;
    return list->lines[list->n++] != NULL;
}

static bool list_files(int fd, DIR *folder, listing *list)
{
    struct dirent *file;

    while ((file = readdir(folder)) != NULL) {
        struct stat info;

        if (fstatat(fd, file->d_name, &info, 0) != 0)
            return false;
        if (S_ISREG(info.st_mode) && !add_file(list, file->d_name, &info))
            return false;
    }
    return true;
}

static int by_text(const void *left, const void *right)
{
    return strcmp(*(char *const *)left, *(char *const *)right);
}

static bool has_settled(const listing *list)
{
    struct timespec now;

    clock_gettime(CLOCK_REALTIME, &now);
    return list->n > 0 && list->newest_ns < nanoseconds(now) - SETTLE_NS;
}

/* Texts end in their NUL, so that none can be taken for two. */
static void hash_text(sp_sha256 *hash, const char *text)
{
    sp_sha256_update(hash, text, strlen(text) + 1);
}

static void hash_list(sp_sha256 *hash, listing *list)
{
    qsort(list->lines, list->n, sizeof(char *), by_text);
    for (size_t i = 0; i < list->n; i++)
        hash_text(hash, list->lines[i]);
}

static bool list_folder(int fd, listing *list)
{
    DIR *directory = fd >= 0 ? fdopendir(fd) : NULL;
    bool ok = directory && list_files(fd, directory, list) && has_settled(list);

    if (directory)
        closedir(directory);
    else if (fd >= 0)
        close(fd);
    return ok;
}

static void free_list(listing *list)
{
    for (size_t i = 0; list && i < list->n; i++)
        sp_free(list->lines[i]);
    sp_free(list);
}

/* Of the files of a base, wherever they are: a base that was moved as a whole is the same one. */
static bool identify(const char *base, sp_digest *out_base)
{
    listing *list = sp_calloc(1, sizeof *list);
    struct stat info;
    sp_sha256 *hash;
    bool ok = list && stat(base, &info) == 0;

    if (ok && S_ISDIR(info.st_mode))
        ok = list_folder(open(base, O_RDONLY | O_DIRECTORY | O_CLOEXEC), list);
    else
        ok = ok && add_file(list, "", &info) && has_settled(list);
    ok = ok && sp_sha256_create(&hash) == SP_OK;
    if (ok) {
        hash_list(hash, list);
        sp_sha256_finish(hash, out_base->bytes);
    }
    free_list(list);
    return ok;
}

bool sp_peer_digests_key(const sp_peer_digests *digests, const char *folder, sp_digest *out_key)
{
    listing *list = sp_calloc(1, sizeof *list);
    sp_sha256 *hash;
    bool ok = list && digests->has_base &&
              list_folder(sp_confined_open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC), list) &&
              sp_sha256_create(&hash) == SP_OK;

    if (ok) {
        hash_text(hash, digests->audit_settings);
        sp_sha256_update(hash, digests->base.bytes, sizeof digests->base.bytes);
        hash_text(hash, folder);
        hash_list(hash, list);
        sp_sha256_finish(hash, out_key->bytes);
    }
    free_list(list);
    return ok;
}

/* ---- opening --------------------------------------------------------------------------------- */

sp_status sp_peer_digests_open(const char *path, const char *audit_settings, const char *base,
                               sp_peer_digests **out_digests,
                               char out_note[SP_PEER_DIGESTS_NOTE_BYTES], sp_error *error)
{
    sp_peer_digests *digests = sp_calloc(1, sizeof *digests);

    out_note[0] = '\0';
    if (digests) {
        digests->path = sp_strdup(path);
        digests->audit_settings = sp_strdup(audit_settings);
        digests->has_base = !base || identify(base, &digests->base);
    }
    if (!digests || !digests->path || !digests->audit_settings) {
        sp_peer_digests_close(digests);
        return sp_fail_memory(error, sizeof *digests, "known digests");
    }
    read_file(digests, out_note);
    *out_digests = digests;
    return SP_OK;
}

void sp_peer_digests_close(sp_peer_digests *digests)
{
    if (!digests)
        return;
    sp_free(digests->list);
    sp_free(digests->audit_settings);
    sp_free(digests->path);
    sp_free(digests);
}

void sp_peer_digests_check_base(sp_peer_digests *digests, const char *base)
{
    sp_digest now;

    if (digests && digests->has_base)
        digests->has_base = identify(base, &now) && memcmp(&now, &digests->base, sizeof now) == 0;
}

/* ---- what is known --------------------------------------------------------------------------- */

static known *find(const sp_peer_digests *digests, const sp_digest *key)
{
    for (size_t i = 0; i < digests->n; i++)
        if (memcmp(&digests->list[i].key, key, sizeof *key) == 0)
            return &digests->list[i];
    return NULL;
}

bool sp_peer_digests_find(sp_peer_digests *digests, const sp_digest *key, sp_digest *out_digest)
{
    known *one = find(digests, key);

    if (!one)
        return false;
    one->used = true;
    *out_digest = one->digest;
    return true;
}

void sp_peer_digests_put(sp_peer_digests *digests, const sp_digest *key, const sp_digest *digest)
{
    known *one = find(digests, key);

    if (one && memcmp(&one->digest, digest, sizeof *digest) == 0) {
        one->used = true;
        return;
    }
    if (!one)
        one = add(digests);
    if (!one)
        return;
    *one = (known){*key, *digest, true};
    digests->changed = true;
}

static size_t n_used(const sp_peer_digests *digests)
{
    size_t n = 0;

    for (size_t i = 0; i < digests->n; i++)
        n += digests->list[i].used;
    return n;
}

bool sp_peer_digests_is_changed(const sp_peer_digests *digests)
{
    return digests->changed || n_used(digests) != digests->n_saved;
}

static void add_line(sp_text *text, const known *one)
{
    char key[2 * SP_DIGEST_BYTES + 1], digest[2 * SP_DIGEST_BYTES + 1];

    sp_hex(one->key.bytes, SP_DIGEST_BYTES, key);
    sp_hex(one->digest.bytes, SP_DIGEST_BYTES, digest);
    sp_text_format(text, "%s %s\n", key, digest);
}

sp_status sp_peer_digests_save(sp_peer_digests *digests, sp_error *error)
{
    sp_text text = {0};
    char line[LAST_BYTES + 1];
    sp_status status;

    sp_text_add(&text, FIRST_LINE);
    for (size_t i = 0; i < digests->n; i++)
        if (digests->list[i].used)
            add_line(&text, &digests->list[i]);
    if (!text.failed) {
        last_line(text.data, text.bytes, line);
        sp_text_add(&text, line);
    }
    digests->changed = false;
    digests->n_saved = n_used(digests);
    status = text.failed ? sp_fail_memory(error, text.bytes, "known digests")
                         : sp_file_write_all(digests->path, text.data, text.bytes, error);
    sp_text_free(&text);
    return status;
}
