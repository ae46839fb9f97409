/* bench.h: what the measurements share. */
#ifndef SP_CLI_BENCH_H
#define SP_CLI_BENCH_H

#include <sidepath/status.h>

#include <stdio.h>

/* Median of n values; sorts them in place. */
double sp_bench_median(double *values, size_t n);

/*
 * The best of several plain streaming reads of 1 GiB by `threads` threads (0: as many as the
 * process may use). SP_ERR_MEMORY, SP_ERR_THREAD.
 */
sp_status sp_bench_read_bandwidth(int32_t threads, double *out_bytes_per_second, sp_error *error);

/* "machine": {...}, without a comma behind it. */
void sp_bench_print_machine(FILE *stream);

/* `bench delta` */
int sp_bench_delta(int argc, char **argv);

/* `bench load` */
int sp_bench_load(int argc, char **argv);

#endif
