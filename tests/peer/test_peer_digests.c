/*
 * Digests of an earlier run: used where nothing of a folder has changed, and only there; a file of
 * digests that is damaged, anywhere, is passed over; and what is sent is hashed all the same.
 */
#include "peer/peer_digests.h"

#include "base/alloc.h"
#include "base/clock.h"
#include "base/file.h"
#include "peer/peer_catalog.h"
#include "support/peer_world.h"
#include "support/test.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <unistd.h>

#define RANK    8
#define LAYERS  4
#define SETTLED 2100000 /* microseconds until a file is old enough */
#define WAIT_NS ((uint64_t)20 * 1000000000)

/* Adapters a, b and c and the bases `base` and `other` in a folder of their own, all old enough,
 * and a place for the file. */
typedef struct scene {
    peer_world world;
    char *bases;
    char file[600];
    size_t blocks;
} scene;

static scene shared;

static int setup(void **state)
{
    shared.blocks = sp_alloc_blocks();
    peer_world_create(&shared.world);
    for (int i = 0; i < 3; i++)
        peer_world_adapter(&shared.world, (const char *[]){"a", "b", "c"}[i], LAYERS, RANK,
                           (uint64_t)i + 1);
    snprintf(shared.file, sizeof shared.file, "%s/digests", shared.world.directory);
    shared.bases = sp_test_make_directory();
    for (int i = 0; i < 2; i++) {
        char base[700];

        snprintf(base, sizeof base, "%s/%s", shared.bases, i == 0 ? "base" : "other");
        assert_int_equal(mkdir(base, 0700), 0);
        sp_test_write_file(base, "config.json", "{}", 2);
    }
    usleep(SETTLED);
    *state = &shared;
    return 0;
}

static int teardown(void **state)
{
    scene *s = *state;

    peer_world_destroy(&s->world);
    sp_test_remove_tree(s->bases);
    sp_free(s->bases);
    assert_int_equal(sp_alloc_blocks(), s->blocks);
    return 0;
}

static sp_peer_digests *open_with_base(const scene *s, const char *settings, const char *base,
                                       bool has_note)
{
    char note[SP_PEER_DIGESTS_NOTE_BYTES];
    sp_peer_digests *digests;
    sp_error error;

    assert_ok(sp_peer_digests_open(s->file, settings, base, &digests, note, &error), &error);
    assert_int_equal(note[0] != '\0', has_note);
    return digests;
}

static sp_peer_digests *open_digests(const scene *s, const char *settings, bool has_note)
{
    return open_with_base(s, settings, NULL, has_note);
}

static void path_of(const scene *s, const char *name, char out_path[700])
{
    snprintf(out_path, 700, "%s/%s", s->world.directory, name);
}

static sp_digest key_of(const scene *s, sp_peer_digests *digests, const char *name)
{
    char path[700];
    sp_digest key;

    path_of(s, name, path);
    assert_true(sp_peer_digests_key(digests, path, &key));
    return key;
}

static bool is_same(const sp_digest *a, const sp_digest *b)
{
    return memcmp(a, b, sizeof *a) == 0;
}

/* ---- the file -------------------------------------------------------------------------------- */

static void what_is_saved_is_found_again(void **state)
{
    scene *s = *state;
    sp_peer_digests *digests = open_digests(s, "v1", false);
    const sp_digest digest = {{1, 2, 3}}, other = {{9}};
    sp_digest key = key_of(s, digests, "a"), found, again;
    sp_error error;

    assert_false(sp_peer_digests_is_changed(digests));
    assert_false(sp_peer_digests_find(digests, &key, &found));
    sp_peer_digests_put(digests, &key, &digest);
    sp_peer_digests_put(digests, &other, &digest);
    assert_true(sp_peer_digests_is_changed(digests));
    assert_ok(sp_peer_digests_save(digests, &error), &error);
    assert_false(sp_peer_digests_is_changed(digests));
    sp_peer_digests_close(digests);

    digests = open_digests(s, "v1", false);
    again = key_of(s, digests, "a");
    assert_true(is_same(&key, &again));
    assert_true(sp_peer_digests_find(digests, &key, &found));
    assert_true(is_same(&found, &digest));
    sp_peer_digests_put(digests, &key, &digest); /* nothing new, but `other` is of nobody */
    assert_true(sp_peer_digests_is_changed(digests));
    assert_ok(sp_peer_digests_save(digests, &error), &error);
    sp_peer_digests_close(digests);

    digests = open_digests(s, "v1", false);
    assert_false(sp_peer_digests_find(digests, &other, &found));
    assert_true(sp_peer_digests_find(digests, &key, &found));
    assert_false(sp_peer_digests_is_changed(digests));
    sp_peer_digests_close(digests);
    unlink(s->file);
}

/* Each byte changed, and each shorter length; then a directory in its place. */
static void a_damaged_file_is_passed_over(void **state)
{
    scene *s = *state;
    sp_peer_digests *digests = open_digests(s, "v1", false);
    const sp_digest digest = {{1, 2, 3}};
    sp_digest key = key_of(s, digests, "a"), found;
    char *data;
    size_t bytes;
    sp_error error;

    sp_peer_digests_put(digests, &key, &digest);
    assert_ok(sp_peer_digests_save(digests, &error), &error);
    sp_peer_digests_close(digests);
    assert_ok(sp_file_read_all(s->file, 1 << 20, &data, &bytes, &error), &error);
    assert_int_equal(bytes, 19 + 130 + 21);
    for (size_t i = 0; i <= 2 * bytes; i++) {
        bool whole = i == 2 * bytes;
        FILE *file = fopen(s->file, "wb");

        assert_non_null(file);
        if (i < bytes)
            data[i] ^= 0x20;
        assert_int_equal(fwrite(data, 1, i < bytes || whole ? bytes : i - bytes, file),
                         i < bytes || whole ? bytes : i - bytes);
        if (i < bytes)
            data[i] ^= 0x20;
        fclose(file);
        digests = open_digests(s, "v1", !whole);
        assert_int_equal(sp_peer_digests_find(digests, &key, &found), whole);
        sp_peer_digests_close(digests);
    }
    sp_free(data);
    unlink(s->file);
    assert_int_equal(mkdir(s->file, 0700), 0); /* no file at all */
    digests = open_digests(s, "v1", true);
    assert_false(sp_peer_digests_find(digests, &key, &found));
    sp_peer_digests_put(digests, &key, &digest);
    assert_int_equal(sp_peer_digests_save(digests, &error), SP_ERR_INPUT);
    assert_false(sp_peer_digests_is_changed(digests)); /* not tried again for the same */
    sp_peer_digests_close(digests);
    rmdir(s->file);
}

/* ---- keys ------------------------------------------------------------------------------------ */

/* Writes one byte at the end of the weights and takes it away again, or not. */
static void touch(const scene *s, const char *name, int how)
{
    char path[700], file[800], copy[800];
    struct stat before;
    int fd;

    path_of(s, name, path);
    snprintf(file, sizeof file, "%s/adapter_model.safetensors", path);
    snprintf(copy, sizeof copy, "%s/copy", path);
    assert_int_equal(stat(file, &before), 0);
    if (how == 0) { /* its size */
        fd = open(file, O_WRONLY | O_APPEND);
        assert_int_equal(write(fd, "x", 1), 1);
        close(fd);
    } else if (how == 1) { /* its content, and the time of that set back */
        const struct timespec times[2] = {before.st_atim, before.st_mtim};

        fd = open(file, O_WRONLY);
        assert_int_equal(pwrite(fd, "\1", 1, before.st_size - 1), 1);
        assert_int_equal(futimens(fd, times), 0);
        close(fd);
    } else if (how == 2) { /* another file in its place */
        assert_int_equal(link(file, copy), 0);
        assert_int_equal(rename(copy, file), 0); /* of one inode: nothing happens */
        unlink(copy);
    } else { /* a file more */
        fd = open(copy, O_WRONLY | O_CREAT, 0600);
        close(fd);
    }
}

/* Whatever changes: no key while it is fresh, and another one later. */
static void every_change_is_another_key(void **state)
{
    scene *s = *state;
    sp_peer_digests *digests = open_digests(s, "v1", false), *others;
    sp_digest keys[3][2], key;
    char path[700];

    for (int i = 0; i < 3; i++)
        keys[i][0] = key_of(s, digests, (const char *[]){"a", "b", "c"}[i]);
    others = open_digests(s, "v2", false);
    key = key_of(s, others, "a");
    assert_false(is_same(&key, &keys[0][0])); /* other settings of the audit */
    sp_peer_digests_close(others);
    for (int i = 0; i < 3; i++) {
        touch(s, (const char *[]){"a", "b", "c"}[i], i == 2 ? 3 : i);
        path_of(s, (const char *[]){"a", "b", "c"}[i], path);
        assert_false(sp_peer_digests_key(digests, path, &key));
    }
    usleep(SETTLED);
    for (int i = 0; i < 3; i++) {
        keys[i][1] = key_of(s, digests, (const char *[]){"a", "b", "c"}[i]);
        assert_false(is_same(&keys[i][0], &keys[i][1]));
    }
    path_of(s, "nobody", path);
    assert_false(sp_peer_digests_key(digests, path, &key));
    sp_peer_digests_close(digests);
}

static sp_digest key_with_base(const scene *s, const char *base)
{
    sp_peer_digests *digests = open_with_base(s, "v1", base, false);
    sp_digest key = key_of(s, digests, "a");

    sp_peer_digests_close(digests);
    return key;
}

/* What was audited against a base says nothing about another one at the same path. */
static void a_base_in_anothers_place_is_another_key(void **state)
{
    scene *s = *state;
    char base[700], other[700], old[700], config[800], path[700];
    sp_digest keys[5], fresh;
    sp_peer_digests *digests;

    snprintf(base, sizeof base, "%s/base", s->bases);
    snprintf(other, sizeof other, "%s/other", s->bases);
    snprintf(old, sizeof old, "%s/old", s->bases);
    keys[0] = key_with_base(s, NULL);
    keys[1] = key_with_base(s, base);
    keys[2] = key_with_base(s, base);
    assert_int_equal(rename(base, old) | rename(other, base), 0);
    keys[3] = key_with_base(s, base);
    snprintf(config, sizeof config, "%s/config.json", base);
    keys[4] = key_with_base(s, config);
    assert_true(is_same(&keys[1], &keys[2]));
    assert_false(is_same(&keys[0], &keys[1]) || is_same(&keys[1], &keys[3]) ||
                 is_same(&keys[0], &keys[3]) || is_same(&keys[0], &keys[4]) ||
                 is_same(&keys[3], &keys[4]));
    keys[4] = key_with_base(s, old); /* the first one, moved */
    assert_true(is_same(&keys[1], &keys[4]));

    path_of(s, "a", path);
    digests = open_with_base(s, "v1", base, false);
    sp_peer_digests_check_base(digests, base);
    assert_true(sp_peer_digests_key(digests, path, &fresh));
    sp_peer_digests_check_base(digests, old); /* swapped since the file was opened */
    assert_false(sp_peer_digests_key(digests, path, &fresh));
    sp_peer_digests_check_base(digests, base); /* too late */
    assert_false(sp_peer_digests_key(digests, path, &fresh));
    sp_peer_digests_close(digests);
    sp_peer_digests_check_base(NULL, base);
    sp_test_write_file(base, "config.json", "[]", 2); /* just now: it may change again */
    digests = open_with_base(s, "v1", base, false);
    assert_false(sp_peer_digests_key(digests, path, &fresh));
    sp_peer_digests_close(digests);
    digests = open_with_base(s, "v1", other, false); /* nobody's path */
    assert_false(sp_peer_digests_key(digests, path, &fresh));
    sp_peer_digests_close(digests);
}

/* ---- a catalogue ----------------------------------------------------------------------------- */

static sp_peer_catalog *open_catalog(const scene *s, sp_peer_digests *digests)
{
    sp_adapter_options audit;
    const sp_peer_catalog_options options = {.directory = s->world.directory,
                                             .audit = &audit,
                                             .digests = digests,
                                             .memory_bytes = 1 << 24,
                                             .rescan_ms = 10};
    sp_peer_catalog *catalog;
    sp_error error;

    sp_adapter_options_default(&audit, sizeof audit);
    assert_ok(sp_peer_catalog_create(&options, &catalog, &error), &error);
    return catalog;
}

static sp_peer_entry *find(sp_peer_catalog *catalog, const char *name)
{
    uint64_t end_ns = sp_clock_ns() + WAIT_NS;
    sp_peer_entry *entry = NULL;
    sp_error error;
    sp_status status;

    while ((status = sp_peer_catalog_find(catalog, name, NULL, &entry, &error)) == SP_PENDING &&
           sp_clock_ns() < end_ns)
        usleep(2000);
    assert_ok(status, &error);
    return entry;
}

static const char *pin(sp_peer_catalog *catalog, sp_peer_entry *entry)
{
    uint64_t end_ns = sp_clock_ns() + WAIT_NS;
    const char *block = NULL;
    void *registered;
    sp_status status;

    while ((status = sp_peer_entry_pin(catalog, entry, &block, &registered)) == SP_PENDING &&
           sp_clock_ns() < end_ns)
        usleep(2000);
    return status == SP_OK ? block : NULL;
}

static sp_peer_catalog_counts settle(sp_peer_catalog *catalog)
{
    uint64_t end_ns = sp_clock_ns() + WAIT_NS;
    sp_peer_catalog_counts counts = {0};

    do {
        usleep(20000);
        sp_peer_catalog_count(catalog, &counts);
    } while ((counts.reading > 0 || counts.offered + counts.refused < 3) && sp_clock_ns() < end_ns);
    usleep(50000); /* the digests are saved when nothing is left to be read */
    return counts;
}

static void a_catalogue_offers_what_it_knows_and_reads_it_later(void **state)
{
    scene *s = *state;
    sp_peer_digests *digests = open_digests(s, "v1", false);
    sp_peer_catalog *catalog = open_catalog(s, digests);
    sp_peer_catalog_counts counts = settle(catalog);
    sp_peer_entry *entry = find(catalog, "a");
    char *manifest = sp_strdup(sp_peer_entry_content(entry)->manifest.data);
    const char *block;
    size_t bytes;
    void *want;

    assert_non_null(manifest);
    assert_int_equal(counts.reads, 3);
    assert_int_equal(counts.known_digests, 0);
    sp_peer_entry_release(catalog, entry);
    sp_peer_catalog_destroy(catalog);
    sp_peer_digests_close(digests);

    digests = open_digests(s, "v1", false);
    catalog = open_catalog(s, digests);
    counts = settle(catalog);
    assert_int_equal(counts.offered, 3);
    assert_int_equal(counts.reads, 0);
    assert_int_equal(counts.known_digests, 3);
    assert_int_equal(counts.memory_bytes, 0);
    entry = find(catalog, "a");
    assert_string_equal(sp_peer_entry_content(entry)->manifest.data, manifest);
    block = pin(catalog, entry);
    assert_non_null(block);
    want = peer_world_bytes(LAYERS, RANK, 1, &bytes);
    assert_memory_equal(block, want, bytes);
    sp_free(want);
    sp_peer_entry_unpin(catalog, entry);
    sp_peer_entry_release(catalog, entry);
    sp_peer_catalog_count(catalog, &counts);
    assert_int_equal(counts.reads, 1);
    sp_peer_catalog_destroy(catalog);
    sp_peer_digests_close(digests);
    sp_free(manifest);
    unlink(s->file);
}

/* Root opens every directory; nobody opens one without permissions. */
static bool lose_permission(const char *directory)
{
    struct stat info;

    assert_int_equal(chmod(directory, 0), 0);
    if (geteuid() == 0 && seteuid(65534) != 0)
        return false;
    return stat(directory, &info) == 0 && open(directory, O_RDONLY) < 0;
}

static void regain_permission(const char *directory)
{
    if (geteuid() != getuid())
        assert_int_equal(seteuid(getuid()), 0);
    assert_int_equal(prctl(PR_SET_DUMPABLE, 1), 0); /* or LeakSanitizer cannot attach */
    assert_int_equal(chmod(directory, 0700), 0);
}

/* A directory that cannot be opened says nothing about its adapters: their digests are kept. */
static void digests_outlive_a_directory_that_cannot_be_opened(void **state)
{
    scene *s = *state, elsewhere = *s;
    sp_peer_digests *digests;
    sp_peer_catalog *catalog;
    bool lost;

    snprintf(elsewhere.file, sizeof elsewhere.file, "%s/digests", s->bases);
    digests = open_digests(&elsewhere, "v1", false);
    catalog = open_catalog(s, digests);
    assert_int_equal(settle(catalog).offered, 3);
    sp_peer_catalog_destroy(catalog);
    sp_peer_digests_close(digests);

    digests = open_digests(&elsewhere, "v1", false);
    assert_int_equal(chmod(s->bases, 0777), 0); /* where the file could be replaced */
    lost = lose_permission(s->world.directory);
    if (lost) {
        catalog = open_catalog(s, digests);
        usleep(100000); /* several scans */
        sp_peer_catalog_destroy(catalog);
    }
    regain_permission(s->world.directory);
    assert_true(sp_peer_digests_is_changed(digests)); /* none of them was used */
    sp_peer_digests_close(digests);
    if (!lost) {
        unlink(elsewhere.file);
        print_message("skipped: no user that may not open the directory reaches it\n");
        skip();
    }

    digests = open_digests(&elsewhere, "v1", false);
    catalog = open_catalog(s, digests);
    assert_int_equal(settle(catalog).known_digests, 3);
    sp_peer_catalog_destroy(catalog);
    sp_peer_digests_close(digests);
    unlink(elsewhere.file);
}

/* A digest that is not the files': its offer ends when the bytes are read, and the next is true. */
static void a_wrong_digest_never_sends_bytes(void **state)
{
    scene *s = *state;
    sp_peer_digests *digests = open_digests(s, "v1", false);
    const sp_digest wrong = {{7}};
    sp_digest key = key_of(s, digests, "b"), found = wrong;
    sp_peer_catalog *catalog;
    sp_peer_entry *entry;

    sp_peer_digests_put(digests, &key, &wrong);
    catalog = open_catalog(s, digests);
    settle(catalog);
    entry = find(catalog, "b");
    assert_true(is_same(&sp_peer_entry_content(entry)->digest, &wrong));
    assert_null(pin(catalog, entry)); /* another version is there now */
    sp_peer_entry_release(catalog, entry);
    entry = find(catalog, "b");
    assert_false(is_same(&sp_peer_entry_content(entry)->digest, &wrong));
    assert_non_null(pin(catalog, entry));
    sp_peer_entry_unpin(catalog, entry);
    sp_peer_entry_release(catalog, entry);
    settle(catalog);
    sp_peer_catalog_destroy(catalog);
    assert_true(sp_peer_digests_find(digests, &key, &found));
    assert_false(is_same(&found, &wrong));
    sp_peer_digests_close(digests);
    unlink(s->file);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_is_saved_is_found_again),
        cmocka_unit_test(a_damaged_file_is_passed_over),
        cmocka_unit_test(a_catalogue_offers_what_it_knows_and_reads_it_later),
        cmocka_unit_test(digests_outlive_a_directory_that_cannot_be_opened),
        cmocka_unit_test(a_wrong_digest_never_sends_bytes),
        cmocka_unit_test(a_base_in_anothers_place_is_another_key),
        cmocka_unit_test(every_change_is_another_key),
    };

    return cmocka_run_group_tests(tests, setup, teardown);
}
