#include "cli/progress.h"

#include "base/clock.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define BAR_CELLS       24
#define BAR_INTERVAL_S  0.1
#define LINE_INTERVAL_S 5 /* and nothing is said of what takes less */
#define WHAT_BYTES      "weights"

sp_progress sp_progress_begin(sp_log *log, int fd)
{
    return (sp_progress){.log = log, .is_bar = isatty(fd) == 1 && !sp_log_is_json(log)};
}

static const char *unit_of(size_t bytes, double *out_size)
{
    static const char *const units[] = {"bytes", "KiB", "MiB", "GiB", "TiB"};
    size_t unit = 0;

    *out_size = 1;
    while (unit + 1 < sizeof units / sizeof *units && (double)bytes / *out_size >= 1024) {
        *out_size *= 1024;
        unit++;
    }
    return units[unit];
}

void sp_progress_format(size_t done, size_t total, bool in_bytes, char *out)
{
    double share = total > 0 ? (double)done / (double)total : 1;
    int cells = (int)(share * BAR_CELLS);
    char bar[BAR_CELLS + 1];
    double size = 1;
    const char *unit = in_bytes ? unit_of(total, &size) : "";

    memset(bar, ' ', BAR_CELLS);
    memset(bar, '#', (size_t)cells);
    bar[BAR_CELLS] = '\0';
    snprintf(out, SP_PROGRESS_BYTES, "[%s] %3d %%  %.*f of %.*f%s%s", bar, (int)(share * 100),
             in_bytes, (double)done / size, in_bytes, (double)total / size, in_bytes ? " " : "",
             unit);
}

static void draw_bar(sp_progress *progress, size_t done, size_t total)
{
    char text[SP_PROGRESS_BYTES], line[SP_PROGRESS_BYTES + 32];
    int n;

    sp_progress_format(done, total, strcmp(progress->what, WHAT_BYTES) == 0, text);
    n = snprintf(line, sizeof line, "\r%-8s %s%s", progress->what, text,
                 done == total ? "\033[K\n" : "\033[K");
    sp_log_add(progress->log, line, (size_t)n);
}

static void print_line(const sp_progress *progress, size_t done, size_t total, double now_s)
{
    sp_log_line(progress->log, SP_LOG_PREFIX "%s: %d %% after %.0f s", progress->what,
                (int)(total > 0 ? 100.0 * (double)done / (double)total : 100),
                now_s - progress->began_s);
}

void sp_progress_tell(void *user, const char *what, size_t done, size_t total)
{
    sp_progress *progress = user;
    double now_s = sp_clock_seconds();
    double interval_s = progress->is_bar ? BAR_INTERVAL_S : LINE_INTERVAL_S;

    if (!progress->what || strcmp(progress->what, what) != 0) {
        progress->what = what;
        progress->began_s = progress->shown_s = now_s;
    }
    if (progress->is_bar && (done == total || now_s - progress->shown_s >= interval_s)) {
        draw_bar(progress, done, total);
        progress->shown_s = now_s;
    } else if (!progress->is_bar && now_s - progress->shown_s >= interval_s) {
        print_line(progress, done, total, now_s);
        progress->shown_s = now_s;
    }
    if (done == total)
        progress->what = NULL;
}
