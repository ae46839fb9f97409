#include "support/peer_world.h"

#include "base/alloc.h"
#include "base/clock.h"
#include "base/text.h"
#include "support/test.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define WIDTH      64
#define SKIPPED    77
#define LISTEN_MS  30000
#define LINE_BYTES 1024

extern char **environ;

void peer_world_need_ucx(void)
{
    const char *why;

    if (sp_peer_is_built(&why))
        return;
    fprintf(stderr, "skipped: %s\n", why);
    exit(SKIPPED);
}

/* ---- adapters -------------------------------------------------------------------------------- */

void *peer_world_bytes(int layers, int rank, uint64_t seed, size_t *out_bytes)
{
    size_t n = (size_t)layers * 2 * (size_t)rank * WIDTH;
    sp_test_random random = {seed};
    uint16_t *values = sp_malloc(n * sizeof *values);

    assert_non_null(values);
    for (size_t i = 0; i < n; i += 4) {
        uint64_t four = sp_test_next(&random) & 0x3f7f3f7f3f7f3f7fu; /* finite, below 2 */

        memcpy(values + i, &four, sizeof four);
    }
    *out_bytes = n * sizeof *values;
    return values;
}

static void add_header(sp_text *text, int layers, int rank)
{
    size_t offset = 0, bytes = (size_t)rank * WIDTH * 2;

    for (int i = 0; i < 2 * layers; i++) {
        sp_text_format(text,
                       "%c\"base_model.model.model.layers.%d.self_attn.q_proj.lora_%c.weight\":"
                       "{\"dtype\":\"BF16\",\"shape\":[%d,%d],\"data_offsets\":[%zu,%zu]}",
                       i == 0 ? '{' : ',', i / 2, i % 2 == 0 ? 'A' : 'B', i % 2 == 0 ? rank : WIDTH,
                       i % 2 == 0 ? WIDTH : rank, offset, offset + bytes);
        offset += bytes;
    }
    sp_text_add(text, "}");
}

static void replace_file(const char *directory, const char *name, const void *data, size_t bytes)
{
    char path[4096], other[4096];

    sp_test_write_file(directory, "new", data, bytes);
    snprintf(other, sizeof other, "%s/new", directory);
    snprintf(path, sizeof path, "%s/%s", directory, name);
    assert_int_equal(rename(other, path), 0);
}

void peer_world_adapter(const peer_world *world, const char *name, int layers, int rank,
                        uint64_t seed)
{
    char folder[4096], config[256];
    sp_text header = {0}, file = {0};
    size_t n_bytes;
    void *bytes = peer_world_bytes(layers, rank, seed, &n_bytes);
    uint64_t header_bytes;

    snprintf(folder, sizeof folder, "%s/%s", world->directory, name);
    assert_true(mkdir(folder, 0700) == 0 || errno == EEXIST);
    add_header(&header, layers, rank);
    header_bytes = header.bytes;
    sp_text_add_bytes(&file, (const char *)&header_bytes, sizeof header_bytes);
    sp_text_add_bytes(&file, header.data, header.bytes);
    sp_text_add_bytes(&file, bytes, n_bytes);
    assert_false(file.failed);
    replace_file(folder, "adapter_model.safetensors", file.data, file.bytes);
    snprintf(config, sizeof config,
             "{\"peft_type\":\"LORA\",\"r\":%d,\"lora_alpha\":16,\"target_modules\":[\"q_proj\"],"
             "\"task_type\":\"CAUSAL_LM\"}",
             rank);
    replace_file(folder, "adapter_config.json", config, strlen(config));
    sp_text_free(&header);
    sp_text_free(&file);
    sp_free(bytes);
}

/* ---- the process ----------------------------------------------------------------------------- */

void peer_world_create(peer_world *world)
{
    memset(world, 0, sizeof *world);
    world->directory = sp_test_make_directory();
    world->err = -1;
}

/* The next line of its standard error, without the line feed. */
static bool read_line(const peer_world *world, char *line, size_t bytes)
{
    size_t n = 0;

    while (n + 1 < bytes) {
        ssize_t got = read(world->err, line + n, 1);

        if (got == 0 || (got < 0 && errno != EINTR))
            return false;
        if (got == 1 && line[n++] == '\n')
            break;
    }
    line[n] = '\0';
    return true;
}

/* "sidepath peer: listening on 127.0.0.1:PORT, …" */
static void wait_until_it_listens(peer_world *world)
{
    static const char begin[] = "sidepath peer: listening on 127.0.0.1:";
    char line[LINE_BYTES];

    while (read_line(world, line, sizeof line)) {
        if (strncmp(line, begin, sizeof begin - 1) == 0) {
            world->port = (int)strtol(line + sizeof begin - 1, NULL, 10);
            snprintf(world->address, sizeof world->address, "127.0.0.1:%d", world->port);
            return;
        }
        print_message("%s", line);
    }
    fail_msg("the peer has ended before it listened");
}

/* Processes of peers that have not been waited for. Those of a failed test are killed at exit. */
static pid_t running[8];

static void kill_the_rest(void)
{
    for (size_t i = 0; i < sizeof running / sizeof running[0]; i++)
        if (running[i] > 0)
            (void)kill(running[i], SIGKILL);
}

static void note_running(pid_t from, pid_t to)
{
    static bool noted;

    if (!noted)
        (void)atexit(kill_the_rest);
    noted = true;
    for (size_t i = 0; i < sizeof running / sizeof running[0]; i++)
        if (running[i] == from) {
            running[i] = to;
            return;
        }
}

/* The peer has none of this program's own pipes: whoever waits for the end of the program's output
 * does not wait for a peer that was left. */
static void spawn(peer_world *world, const char *command)
{
    char *const arguments[] = {"sh", "-c", (char *)(uintptr_t)command, NULL};
    posix_spawn_file_actions_t actions;
    int ends[2];

    assert_int_equal(pipe2(ends, O_CLOEXEC), 0);
    (void)fcntl(ends[1], F_SETPIPE_SZ, 1 << 20); /* nobody reads its later lines */
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
    posix_spawn_file_actions_adddup2(&actions, ends[1], STDERR_FILENO);
    assert_int_equal(posix_spawn(&world->pid, "/bin/sh", &actions, NULL, arguments, environ), 0);
    posix_spawn_file_actions_destroy(&actions);
    close(ends[1]);
    world->err = ends[0];
    note_running(0, world->pid);
}

/* LeakSanitizer's last search faults in a process that has UCX's shared memory (UCX 1.13). */
void peer_world_start(peer_world *world, const char *flags)
{
    const char *search = strstr(flags, "posix") != NULL ? "LSAN_OPTIONS=detect_leaks=0 " : "";
    sp_text command = {0};

    sp_text_format(&command,
                   "%sexec " SP_TEST_BINARY_DIR
                   "/sidepath peer --dir '%s' --port %d --rescan-ms 50 %s",
                   search, world->directory, world->port, flags);
    assert_false(command.failed);
    spawn(world, command.data);
    sp_text_free(&command);
    wait_until_it_listens(world);
}

static void print_rest(const peer_world *world)
{
    char line[LINE_BYTES];

    while (read_line(world, line, sizeof line))
        print_message("%s", line);
}

void peer_world_stop(peer_world *world)
{
    int state;

    assert_int_equal(kill(world->pid, SIGTERM), 0);
    assert_int_equal(waitpid(world->pid, &state, 0), world->pid);
    note_running(world->pid, 0);
    if (!WIFEXITED(state) || WEXITSTATUS(state) != 0)
        print_rest(world);
    assert_true(WIFEXITED(state));
    assert_int_equal(WEXITSTATUS(state), 0);
    close(world->err);
    world->pid = 0;
}

void peer_world_signal(peer_world *world, int number)
{
    assert_int_equal(kill(world->pid, number), 0);
    if (number == SIGSTOP) /* it runs on until the system has stopped it */
        assert_int_equal(waitpid(world->pid, NULL, WUNTRACED), world->pid);
    if (number != SIGKILL)
        return;
    assert_int_equal(waitpid(world->pid, NULL, 0), world->pid);
    note_running(world->pid, 0);
    close(world->err);
    world->pid = 0;
}

void peer_world_destroy(peer_world *world)
{
    if (world->pid != 0)
        peer_world_signal(world, SIGKILL);
    sp_test_remove_tree(world->directory);
    sp_free(world->directory);
}

/* ---- clients --------------------------------------------------------------------------------- */

sp_peer_calls peer_world_client(const peer_world *world, const sp_peer_key *key,
                                const char *transports)
{
    const sp_peer_client_options options = {
        .address = world->address, .key = key, .transports = transports};
    sp_peer_calls calls;
    sp_error error;

    assert_ok(sp_peer_client_create(&options, &calls, &error), &error);
    return calls;
}

sp_status peer_world_fetch(const sp_peer_calls *calls, const char *name, uint64_t ms_max,
                           void **out_bytes, size_t *out_n_bytes, sp_error *error)
{
    const sp_peer_query query = {.name = name};
    const sp_peer_wait wait = {.deadline_ns = sp_clock_ns() + ms_max * 1000000};
    sp_peer_range range = {.part = SP_PEER_PART_TENSORS};
    sp_peer_offer *offer;
    sp_status status = calls->describe(calls->user, &query, &wait, &offer, error);

    if (status != SP_OK)
        return status;
    range.bytes = offer->manifest.data_bytes;
    range.memory = sp_malloc((size_t)range.bytes);
    assert_non_null(range.memory);
    status = calls->fetch(calls->user, offer, &range, 1, &wait, error);
    calls->close(calls->user, offer);
    if (status != SP_OK) {
        sp_free(range.memory);
        return status;
    }
    *out_bytes = range.memory;
    *out_n_bytes = (size_t)range.bytes;
    return SP_OK;
}

/* ---- kills ----------------------------------------------------------------------------------- */

#define KILL_LAYERS 512 /* 2 MiB */
#define KILL_RANK   16
#define KILL_MS     20000

typedef struct killer {
    pid_t pid;
    useconds_t after_us;
} killer;

static void *kill_later(void *user)
{
    const killer *k = user;

    usleep(k->after_us);
    assert_int_equal(kill(k->pid, SIGKILL), 0);
    return NULL;
}

/* Whether all bytes came. */
static bool fetch_once(const sp_peer_calls *calls, const void *want, size_t want_n)
{
    void *bytes = NULL;
    size_t n = 0;
    sp_error error;
    sp_status status = peer_world_fetch(calls, "large", KILL_MS, &bytes, &n, &error);

    if (status != SP_OK) {
        assert_true(status == SP_ERR_PEER_LOST || status == SP_ERR_PEER_UNREACHABLE);
        assert_true(error.code[0] != '\0' && error.text[0] != '\0');
        return false;
    }
    assert_int_equal(n, want_n);
    assert_memory_equal(bytes, want, n);
    sp_free(bytes);
    return true;
}

static uint64_t time_one(const sp_peer_calls *calls, const void *want, size_t want_n)
{
    uint64_t begin_ns = sp_clock_ns();

    assert_true(fetch_once(calls, want, want_n));
    return (sp_clock_ns() - begin_ns) / 1000;
}

/* One transfer during which the peer dies, within the time that one takes. */
static bool fetch_and_kill(peer_world *world, const sp_peer_calls *calls, sp_test_random *random,
                           const void *want, size_t want_n)
{
    uint64_t took_us = time_one(calls, want, want_n);
    killer k = {world->pid, (useconds_t)sp_test_below(random, (uint32_t)(took_us + 100))};
    pthread_t thread;
    bool whole;

    assert_int_equal(pthread_create(&thread, NULL, kill_later, &k), 0);
    whole = fetch_once(calls, want, want_n);
    pthread_join(thread, NULL);
    peer_world_signal(world, SIGKILL);
    return whole;
}

void peer_world_kill_often(int rounds, uint64_t seed)
{
    sp_test_random random = {seed};
    size_t n, blocks;
    void *want;
    peer_world world;
    sp_peer_calls calls;
    int n_whole = 0;

    peer_world_create(&world);
    peer_world_adapter(&world, "large", KILL_LAYERS, KILL_RANK, 1);
    want = peer_world_bytes(KILL_LAYERS, KILL_RANK, 1, &n);
    peer_world_start(&world, "");
    blocks = sp_alloc_blocks();
    calls = peer_world_client(&world, NULL, NULL);
    for (int i = 0; i < rounds; i++) {
        n_whole += fetch_and_kill(&world, &calls, &random, want, n);
        peer_world_start(&world, "");
    }
    assert_true(fetch_once(&calls, want, n));
    calls.destroy(calls.user);
    assert_int_equal(sp_alloc_blocks(), blocks);
    print_message("%d kills, %d transfers were whole\n", rounds, n_whole);
    assert_true(n_whole < rounds);
    peer_world_stop(&world);
    sp_free(want);
    peer_world_destroy(&world);
}
