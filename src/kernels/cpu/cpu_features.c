#include "kernels/cpu/cpu_features.h"

#include <stddef.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

/* Bits of CPUID and XCR0. */
#define LEAF1_ECX_FMA       (1u << 12)
#define LEAF1_ECX_OSXSAVE   (1u << 27)
#define LEAF1_ECX_AVX       (1u << 28)
#define LEAF1_ECX_F16C      (1u << 29)
#define LEAF7_EBX_AVX2      (1u << 5)
#define LEAF7_EBX_AVX512F   (1u << 16)
#define LEAF7_EBX_AVX512DQ  (1u << 17)
#define LEAF7_EBX_AVX512BW  (1u << 30)
#define LEAF7_EBX_AVX512VL  (1u << 31)
#define LEAF7_EDX_AMX_BF16  (1u << 22)
#define LEAF7_EDX_AMX_TILE  (1u << 24)
#define XCR0_XMM_YMM        0x6u
#define XCR0_MASK_ZMM       0xe0u
#define XCR0_TILE           0x60000u
#define ARCH_REQ_XCOMP_PERM 0x1023
#define XFEATURE_TILE_DATA  18

static bool has_all(uint64_t value, uint64_t bits)
{
    return (value & bits) == bits;
}

sp_cpu_features sp_cpu_features_from(const sp_cpuid *registers)
{
    sp_cpu_features features;

    features.avx2 = has_all(registers->leaf1_ecx,
                            LEAF1_ECX_OSXSAVE | LEAF1_ECX_AVX | LEAF1_ECX_FMA | LEAF1_ECX_F16C) &&
                    has_all(registers->leaf7_ebx, LEAF7_EBX_AVX2) &&
                    has_all(registers->xcr0, XCR0_XMM_YMM);
    features.avx512 = features.avx2 &&
                      has_all(registers->leaf7_ebx, LEAF7_EBX_AVX512F | LEAF7_EBX_AVX512DQ |
                                                        LEAF7_EBX_AVX512BW | LEAF7_EBX_AVX512VL) &&
                      has_all(registers->xcr0, XCR0_MASK_ZMM);
    features.amx = features.avx512 &&
                   has_all(registers->leaf7_edx, LEAF7_EDX_AMX_BF16 | LEAF7_EDX_AMX_TILE) &&
                   has_all(registers->xcr0, XCR0_TILE);
    return features;
}

sp_cpu_features sp_cpu_features_detect(void)
{
    sp_cpuid registers = {0};
#if defined(__x86_64__)
    uint32_t eax, ebx, ecx, edx;

    if (__get_cpuid(1, &eax, &ebx, &ecx, &edx))
        registers.leaf1_ecx = ecx;
    if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) {
        registers.leaf7_ebx = ebx;
        registers.leaf7_edx = edx;
    }
    if (registers.leaf1_ecx & LEAF1_ECX_OSXSAVE) {
        __asm__("xgetbv" : "=a"(eax), "=d"(edx) : "c"(0));
        registers.xcr0 = ((uint64_t)edx << 32) | eax;
    }
#endif
    return sp_cpu_features_from(&registers);
}

bool sp_cpu_request_tiles(void)
{
#if defined(__x86_64__) && defined(__linux__) && defined(SYS_arch_prctl)
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_TILE_DATA) == 0;
#else
    return false;
#endif
}
