#include "server/metrics/log.h"

#include "base/alloc.h"

#include <errno.h>
#include <limits.h>
#include <poll.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define LINE_BYTES_MAX  2048     /* of one that is made here */
#define PIECE_BYTES_MAX PIPE_BUF /* a pipe with any room takes as much without blocking */
#define NS_PER_MS       1000000L
#define NS_PER_S        1000000000L

/* Bytes wait in `waiting`, under the lock; the writer takes them all and owns what it has taken. */
struct sp_log {
    int fd;
    size_t bytes_max;
    pthread_t writer;
    pthread_mutex_t lock;
    pthread_cond_t filled, ended;
    sp_text waiting, taken;
    uint64_t dropped, reported; /* lines; the log itself has said so of the second */
    bool json;                  /* never changes once there are other threads */
    bool closing, has_ended;
    bool abandoned; /* the writer frees it, should it ever get so far */
};

static uint64_t count_lines(const char *data, size_t bytes)
{
    uint64_t n = 0;

    for (size_t i = 0; i < bytes; i++)
        n += data[i] == '\n';
    return n;
}

/* Under the lock. */
static void add(sp_log *log, const char *lines, size_t bytes)
{
    if (bytes <= log->bytes_max - log->waiting.bytes)
        sp_text_add_bytes(&log->waiting, lines, bytes);
    else
        log->dropped += count_lines(lines, bytes);
    if (log->waiting.failed) {
        log->dropped += count_lines(lines, bytes);
        log->waiting.failed = false;
    }
}

/* Whole lines where that is possible, so that those of other writers do not come between. */
static size_t piece_bytes(const char *data, size_t bytes)
{
    size_t most = bytes < PIECE_BYTES_MAX ? bytes : PIECE_BYTES_MAX;
    size_t n = most;

    while (n > 0 && data[n - 1] != '\n')
        n--;
    return n > 0 ? n : most;
}

/* Returns the lines that could not be written: the file is closed, or full. */
static uint64_t write_taken(const sp_log *log)
{
    const char *data = log->taken.data;
    size_t left = log->taken.bytes;

    while (left > 0) {
        struct pollfd ready = {.fd = log->fd, .events = POLLOUT};
        ssize_t n;

        if (poll(&ready, 1, -1) < 0)
            continue;
        n = write(log->fd, data, piece_bytes(data, left));
        if (n < 0 && (errno == EINTR || errno == EAGAIN))
            continue;
        if (n < 0)
            return count_lines(data, left);
        data += n;
        left -= (size_t)n;
    }
    return 0;
}

void sp_log_use_json(sp_log *log)
{
    log->json = true;
}

bool sp_log_is_json(const sp_log *log)
{
    return log && log->json;
}

void sp_log_begin_object(sp_text *out)
{
    struct timespec now;
    struct tm utc;
    char text[32];

    clock_gettime(CLOCK_REALTIME, &now);
    gmtime_r(&now.tv_sec, &utc);
    strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%S", &utc);
    sp_text_format(out, "{\"time\": \"%s.%03ldZ\"", text, now.tv_nsec / NS_PER_MS);
}

/* A plain line, without its line feed, as an object with one. */
static void wrap_line(const char *line, sp_text *out)
{
    size_t prefix = sizeof SP_LOG_PREFIX - 1;

    if (strncmp(line, SP_LOG_PREFIX, prefix) == 0)
        line += prefix;
    sp_log_begin_object(out);
    sp_text_add(out, ", \"message\": ");
    sp_text_json_string(out, line, strlen(line));
    sp_text_add(out, "}\n");
}

/* Under the lock: says once more how many are missing, where that is news. */
static void report_dropped(sp_log *log)
{
    char line[256];
    sp_text object = {0};
    int n;

    if (log->dropped == log->reported || log->bytes_max - log->waiting.bytes < sizeof line)
        return;
    n = snprintf(line, sizeof line,
                 SP_LOG_PREFIX "%llu lines of this log were dropped, because nobody read it",
                 (unsigned long long)(log->dropped - log->reported));
    log->reported = log->dropped;
    if (log->json) {
        wrap_line(line, &object);
        if (!object.failed)
            add(log, object.data, object.bytes);
        sp_text_free(&object);
    } else {
        line[n] = '\n';
        add(log, line, (size_t)n + 1);
    }
}

static void destroy(sp_log *log)
{
    sp_text_free(&log->waiting);
    sp_text_free(&log->taken);
    pthread_cond_destroy(&log->filled);
    pthread_cond_destroy(&log->ended);
    pthread_mutex_destroy(&log->lock);
    sp_free(log);
}

static void *write_lines(void *user)
{
    sp_log *log = user;
    bool abandoned;

    pthread_mutex_lock(&log->lock);
    while (!log->closing || log->waiting.bytes > 0) {
        sp_text empty = log->taken;
        uint64_t lost;

        if (log->waiting.bytes == 0) {
            pthread_cond_wait(&log->filled, &log->lock);
            continue;
        }
        sp_text_clear(&empty);
        log->taken = log->waiting;
        log->waiting = empty;
        pthread_mutex_unlock(&log->lock);
        lost = write_taken(log);
        pthread_mutex_lock(&log->lock);
        log->dropped += lost;
        if (lost == 0)
            report_dropped(log);
    }
    log->has_ended = true;
    abandoned = log->abandoned;
    pthread_cond_signal(&log->ended);
    pthread_mutex_unlock(&log->lock);
    if (abandoned)
        destroy(log);
    return NULL;
}

sp_status sp_log_open(int fd, size_t bytes_max, sp_log **out_log, sp_error *error)
{
    sp_log *log = sp_calloc(1, sizeof *log);
    pthread_condattr_t monotonic;

    if (!log)
        return sp_fail_memory(error, sizeof *log, "the log");
    log->fd = fd;
    log->bytes_max = bytes_max;
    pthread_mutex_init(&log->lock, NULL);
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&log->filled, NULL);
    pthread_cond_init(&log->ended, &monotonic);
    pthread_condattr_destroy(&monotonic);
    if (pthread_create(&log->writer, NULL, write_lines, log) != 0) {
        destroy(log);
        return sp_fail(error, SP_ERR_THREAD, NULL, NULL, -1, "cannot start the log's thread");
    }
    *out_log = log;
    return SP_OK;
}

void sp_log_add(sp_log *log, const char *lines, size_t bytes)
{
    if (!log || bytes == 0)
        return;
    pthread_mutex_lock(&log->lock);
    add(log, lines, bytes);
    pthread_cond_signal(&log->filled);
    pthread_mutex_unlock(&log->lock);
}

void sp_log_line(sp_log *log, const char *format, ...)
{
    char line[LINE_BYTES_MAX];
    va_list arguments;
    int n;

    va_start(arguments, format);
    n = vsnprintf(line, sizeof line - 1, format, arguments);
    va_end(arguments);
    if (n < 0)
        return;
    n = n < LINE_BYTES_MAX - 2 ? n : LINE_BYTES_MAX - 2;
    if (sp_log_is_json(log)) {
        sp_text object = {0};

        wrap_line(line, &object);
        if (!object.failed)
            sp_log_add(log, object.data, object.bytes);
        sp_text_free(&object);
        return;
    }
    line[n] = '\n';
    sp_log_add(log, line, (size_t)n + 1);
}

uint64_t sp_log_dropped(sp_log *log)
{
    uint64_t dropped;

    if (!log)
        return 0;
    pthread_mutex_lock(&log->lock);
    dropped = log->dropped;
    pthread_mutex_unlock(&log->lock);
    return dropped;
}

void sp_log_close(sp_log *log, int32_t wait_ms_max)
{
    struct timespec until;
    bool ended;

    if (!log)
        return;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += wait_ms_max / 1000;
    until.tv_nsec += wait_ms_max % 1000 * NS_PER_MS;
    if (until.tv_nsec >= NS_PER_S) {
        until.tv_nsec -= NS_PER_S;
        until.tv_sec++;
    }
    pthread_mutex_lock(&log->lock);
    log->closing = true;
    pthread_cond_signal(&log->filled);
    while (!log->has_ended && pthread_cond_timedwait(&log->ended, &log->lock, &until) == 0)
        continue;
    ended = log->has_ended;
    log->abandoned = !ended;
    if (!ended)
        pthread_detach(log->writer);
    pthread_mutex_unlock(&log->lock);
    if (!ended)
        return;
    pthread_join(log->writer, NULL);
    destroy(log);
}
