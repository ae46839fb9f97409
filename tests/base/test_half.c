/* base/half.h against values worked out by hand from the formats' definitions. */
#include "support/test.h"

#include "base/half.h"

#include <math.h>

static void test_bf16_rounds_to_nearest_even(void **state)
{
    (void)state;
    assert_int_equal(sp_f32_to_bf16(1.0f), 0x3f80);
    assert_int_equal(sp_f32_to_bf16(-2.0f), 0xc000);
    /* 1 + 2^-8 lies midway between 0x3f80 and 0x3f81: even wins. */
    assert_int_equal(sp_f32_to_bf16(1.00390625f), 0x3f80);
    /* 1 + 3 * 2^-8 lies midway between 0x3f81 and 0x3f82. */
    assert_int_equal(sp_f32_to_bf16(1.01171875f), 0x3f82);
    assert_int_equal(sp_f32_to_bf16(sp_f32_from_bits(0x3f808001u)), 0x3f81);
    assert_int_equal(sp_f32_to_bf16(3.4028234e38f), 0x7f80); /* overflows to infinity */
    assert_int_equal(sp_f32_to_bf16(-INFINITY), 0xff80);
    assert_true(isnan(sp_bf16_to_f32(sp_f32_to_bf16(NAN))));
    /* A NaN whose payload lies in the low half only must not become infinity. */
    assert_true(isnan(sp_bf16_to_f32(sp_f32_to_bf16(sp_f32_from_bits(0x7f800001u)))));
}

static void test_f16_known_values(void **state)
{
    (void)state;
    assert_int_equal(sp_f32_to_f16(1.0f), 0x3c00);
    assert_int_equal(sp_f32_to_f16(65504.0f), 0x7bff);
    assert_int_equal(sp_f32_to_f16(65519.996f), 0x7bff);
    assert_int_equal(sp_f32_to_f16(65520.0f), 0x7c00);
    assert_int_equal(sp_f32_to_f16(0x1p-24f), 0x0001);
    assert_int_equal(sp_f32_to_f16(0x1p-25f), 0x0000); /* half of the smallest: ties to zero */
    assert_int_equal(sp_f32_to_f16(0x1.8p-25f), 0x0001);
    assert_int_equal(sp_f32_to_f16(0x1p-14f), 0x0400);
    assert_int_equal(sp_f32_to_f16(-0.0f), 0x8000);
    assert_true(isnan(sp_f16_to_f32(0x7e01)));
}

/* Every f16 is exact in FP32, so the way there and back must be the identity. */
static void test_f16_round_trip(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < 0x10000; i++) {
        float value = sp_f16_to_f32((uint16_t)i);

        if (isnan(value))
            continue;
        assert_int_equal(sp_f32_to_f16(value), i);
    }
}

/* The nearest f16, ties to even, checked in double against both neighbours. */
static void test_f16_is_the_nearest(void **state)
{
    uint32_t bits = 1;

    (void)state;
    for (int i = 0; i < 200000; i++) {
        float value;
        uint16_t got;
        double error, below, above;

        bits = bits * 1664525u + 1013904223u;
        value = sp_f32_from_bits((bits & 0x8fffffffu) | 0x30000000u); /* 2^-31 .. 1 */
        got = sp_f32_to_f16(value);
        error = fabs((double)sp_f16_to_f32(got) - (double)value);
        below = (got & 0x7fff) ? fabs((double)sp_f16_to_f32((uint16_t)(got - 1)) - value) : 1e9;
        above = fabs((double)sp_f16_to_f32((uint16_t)(got + 1)) - value);
        assert_true(error <= below && error <= above);
        if (error == below || error == above)
            assert_int_equal(got & 1, 0);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bf16_rounds_to_nearest_even),
        cmocka_unit_test(test_f16_known_values),
        cmocka_unit_test(test_f16_round_trip),
        cmocka_unit_test(test_f16_is_the_nearest),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
