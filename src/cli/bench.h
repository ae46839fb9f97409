/* bench.h: what the measurements share. */
#ifndef SP_CLI_BENCH_H
#define SP_CLI_BENCH_H

#include "base/settings.h"

#include <stdio.h>

/* Median of n values; sorts them in place. */
double sp_bench_median(double *values, size_t n);

/*
 * The best of several plain streaming reads of 1 GiB by `threads` threads (0: as many as the
 * process may use). SP_ERR_MEMORY, SP_ERR_THREAD.
 */
sp_status sp_bench_read_bandwidth(int32_t threads, double *out_bytes_per_second, sp_error *error);

/*
 * The best of several copies of 512 MiB on a device ("cuda:0"), bytes read and written. What
 * sp_device_open and sp_device_alloc return.
 */
sp_status sp_bench_device_bandwidth(const char *device, double *out_bytes_per_second,
                                    sp_error *error);

/* "machine": {...}, without a comma after it. */
void sp_bench_print_machine(FILE *stream);

/* A measurement: its settings are shared ones and its own. */
typedef struct sp_bench_verb {
    const char *usage;      /* above the flags in its help */
    unsigned uses;          /* the shared settings that it takes: see run_settings.h */
    const sp_setting *rows; /* [n_rows] its own */
    size_t n_rows;
    size_t bytes; /* of its state, which begins with the settings, and those with sp_run_settings */
    int (*run)(void *state); /* an exit status; its errors are printed */
    void (*close)(void *state);
} sp_bench_verb;

/* Parses the flags into a zeroed state and runs it, or prints its help. */
int sp_bench_main(const sp_bench_verb *verb, int argc, char **argv);

/* `bench delta` */
int sp_bench_delta(int argc, char **argv);

/* `bench load` */
int sp_bench_load(int argc, char **argv);

/* `bench speculative` */
int sp_bench_speculative(int argc, char **argv);

/* `bench structured` */
int sp_bench_structured(int argc, char **argv);

/* `bench swap` */
int sp_bench_swap(int argc, char **argv);

#endif
