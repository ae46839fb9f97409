/*
 * device: where memory lives and who runs the work. It owns memory, copies and the thread
 * executor; it must not know numbers.
 *
 * cpus.h: how many processors this process may really use: its affinity mask, limited by the
 * cgroup's quota. A container with a quota of two on a machine of 64 must not start 64 threads,
 * because every spinning one takes time from the others. Any thread.
 */
#ifndef SP_DEVICE_CPUS_H
#define SP_DEVICE_CPUS_H

#include <stdint.h>

/* The number of usable processors, at least 1. Reads small files. */
int32_t sp_cpus_usable(void);

/*
 * The smallest CPU quota, in whole processors but at least 1, among the cgroups that
 * `membership` (the text of /proc/self/cgroup) names and their ancestors, below `root`
 * (/sys/fs/cgroup). Version 2 (cpu.max) and version 1 (cpu.cfs_quota_us) are read.
 * INT32_MAX: no limit, or nothing readable.
 */
int32_t sp_cpus_quota(const char *membership, const char *root);

#endif
