/*
 * cpu_features.h: what this processor can do *and* its operating system has switched on. A virtual
 * machine may report an instruction set whose registers the OS does not save; such a feature counts
 * as absent.
 */
#ifndef SP_KERNELS_CPU_CPU_FEATURES_H
#define SP_KERNELS_CPU_CPU_FEATURES_H

#include <stdbool.h>
#include <stdint.h>

typedef struct sp_cpu_features {
    bool avx2;   /* AVX2, FMA and F16C, YMM state saved */
    bool avx512; /* F, BW, VL, DQ on top, ZMM and mask state saved */
    bool amx;    /* tiles with bf16 on top, tile state saved; see sp_cpu_request_tiles */
} sp_cpu_features;

/* The registers that decide. leaf7 is sub-leaf 0; all zero where CPUID lacks the leaf. */
typedef struct sp_cpuid {
    uint32_t leaf1_ecx, leaf7_ebx, leaf7_edx;
    uint64_t xcr0; /* 0 without OSXSAVE */
} sp_cpuid;

/* Pure, so that tests can describe any machine. No pointer may be NULL. */
sp_cpu_features sp_cpu_features_from(const sp_cpuid *registers);

/* This machine. */
sp_cpu_features sp_cpu_features_detect(void);

/*
 * Requests Linux's permission to use tile registers, for this process. False where it is refused,
 * for instance because an alternate signal stack is too small for the larger frames.
 */
bool sp_cpu_request_tiles(void);

#endif
