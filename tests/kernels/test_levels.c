/* test_levels.c: which level a processor gets, from made-up CPUID registers, and how it is named.
 */
#include "kernels/cpu/cpu_features.h"
#include "kernels/cpu/kernels.h"
#include "support/test.h"

#include <string.h>

/* As the manuals number them; written out again here so that a wrong bit in the source shows. */
#define FMA_F16C_AVX_OSXSAVE ((1u << 12) | (1u << 29) | (1u << 28) | (1u << 27))
#define AVX2                 (1u << 5)
#define AVX512_F_DQ_BW_VL    ((1u << 16) | (1u << 17) | (1u << 30) | (1u << 31))
#define AMX_BF16_TILE        ((1u << 22) | (1u << 24))

static const sp_cpuid everything = {FMA_F16C_AVX_OSXSAVE, AVX2 | AVX512_F_DQ_BW_VL, AMX_BF16_TILE,
                                    0x602e7};

static void assert_features(const sp_cpuid *registers, bool avx2, bool avx512, bool amx)
{
    sp_cpu_features features = sp_cpu_features_from(registers);

    assert_int_equal(features.avx2, avx2);
    assert_int_equal(features.avx512, avx512);
    assert_int_equal(features.amx, amx);
}

static void a_full_machine_has_all(void **state)
{
    (void)state;
    assert_features(&everything, true, true, true);
    assert_features(&(sp_cpuid){0}, false, false, false);
}

/* A processor that has the instructions under an OS that does not save the registers. */
static void the_os_must_save_the_registers(void **state)
{
    sp_cpuid registers = everything;

    (void)state;
    registers.xcr0 = 0xe7; /* no tiles */
    assert_features(&registers, true, true, false);
    registers.xcr0 = 0x20000 | 0xe7; /* tile configuration without tile data */
    assert_features(&registers, true, true, false);
    registers.xcr0 = 0x60007; /* no masks and upper halves */
    assert_features(&registers, true, false, false);
    registers.xcr0 = 0x67; /* not all of the three ZMM states */
    assert_features(&registers, true, false, false);
    registers.xcr0 = 0x3;
    assert_features(&registers, false, false, false);
    registers = everything;
    registers.leaf1_ecx &= ~(1u << 27);
    assert_features(&registers, false, false, false);
}

static void every_feature_of_a_level_counts(void **state)
{
    (void)state;
    for (int bit = 0; bit < 32; bit++) {
        sp_cpuid registers = everything;
        uint32_t mask = 1u << bit;

        registers.leaf1_ecx &= ~mask;
        if (FMA_F16C_AVX_OSXSAVE & mask)
            assert_features(&registers, false, false, false);
        else
            assert_features(&registers, true, true, true);
        registers = everything;
        registers.leaf7_ebx &= ~mask;
        if (AVX2 & mask)
            assert_features(&registers, false, false, false);
        else
            assert_features(&registers, true, !(AVX512_F_DQ_BW_VL & mask),
                            !(AVX512_F_DQ_BW_VL & mask));
        registers = everything;
        registers.leaf7_edx &= ~mask;
        assert_features(&registers, true, true, !(AMX_BF16_TILE & mask));
    }
}

static void levels_are_found_by_name(void **state)
{
    static const char *const names[] = {"scalar", "avx2", "avx512", "amx"};
    const char *const *levels = sp_kernels_levels();
    const sp_kernels *kernels = NULL, *best = NULL;
    sp_error error;
    size_t n = 0;

    (void)state;
    for (; levels[n]; n++) {
        assert_string_equal(levels[n], names[n]);
        assert_ok(sp_kernels_get(names[n], &kernels, &error), &error);
        assert_string_equal(kernels->level, names[n]);
    }
    assert_true(n >= 1);
    assert_ok(sp_kernels_get("auto", &best, &error), &error);
    assert_ptr_equal(best, kernels);
    assert_ok(sp_kernels_get(NULL, &best, &error), &error);
    assert_ptr_equal(best, kernels);
    for (size_t i = n; i < 4; i++) {
        assert_int_equal(sp_kernels_get(names[i], &kernels, &error), SP_ERR_UNSUPPORTED);
        assert_string_equal(error.subject, names[i]);
        assert_non_null(strstr(error.text, names[n - 1]));
    }
    assert_int_equal(sp_kernels_get("sse9", &kernels, &error), SP_ERR_ARGUMENT);
    assert_string_equal(error.subject, "sse9");
    assert_int_equal(sp_kernels_get("", &kernels, NULL), SP_ERR_ARGUMENT);
    assert_ptr_equal(kernels, best);
}

static void no_level_lacks_an_entry(void **state)
{
    const char *const *levels = sp_kernels_levels();

    (void)state;
    for (; *levels; levels++) {
        const sp_kernels *kernels = NULL;

        assert_int_equal(sp_kernels_get(*levels, &kernels, NULL), SP_OK);
        assert_true(kernels->x_pack_bytes && kernels->x_pack && kernels->gemm_nt);
        assert_true(kernels->rmsnorm && kernels->rmsnorm_rope && kernels->rope &&
                    kernels->silu_mul);
        assert_true(kernels->add_scaled && kernels->weighted_sum);
        assert_true(kernels->add && kernels->attention && kernels->attention_scratch_floats);
        assert_true(kernels->convert != NULL);
        assert_true(kernels->x_pack_rows >= 1 && kernels->gemm_rows >= 1);
        assert_true(kernels->gemm_columns >= 1);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_full_machine_has_all),
        cmocka_unit_test(the_os_must_save_the_registers),
        cmocka_unit_test(every_feature_of_a_level_counts),
        cmocka_unit_test(levels_are_found_by_name),
        cmocka_unit_test(no_level_lacks_an_entry),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
