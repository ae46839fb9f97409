/*
 * bench_machine.h: what the machine itself can do, measured in the same run as the kernels, so
 * that results are ratios and not numbers of somebody's computer.
 */
#ifndef SP_BENCH_MACHINE_H
#define SP_BENCH_MACHINE_H

#include <sidepath/device.h>

/* Bytes per second of a plain read loop over `bytes` at `data` (a multiple of 4096), one pass. */
double sp_bench_read_rate(sp_exec *exec, const void *data, size_t bytes);

/* FP32 multiply-add operations per second (two each) from registers, in the widest vectors. */
double sp_bench_fma_rate(sp_exec *exec);

/* BF16 operations per second (two a multiply-add) of products of tiles that stay in their
 * registers; 0 where the machine has no tiles. */
double sp_bench_tile_rate(sp_exec *exec);

/* Model name of the processor, "unknown" where the OS does not say. */
void sp_bench_processor_name(char *out_name, size_t bytes);

#endif
