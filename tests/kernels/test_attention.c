/* test_attention.c: the cases of attention_cases.h at every level of the machine. */
#define ATTENTION_KERNELS(state) kernels_or_skip(state)
#include "attention_cases.h"

/* What is wider than AVX2 only holds more of the same lanes. */
static void vector_levels_have_the_same_bits(void **state)
{
    const sp_kernels *kernels = kernels_or_skip(state), *narrow;
    static const int32_t shapes[][3] = {{40, 2, 128}, {101, 1, 13}, {77, 5, 64}, {33, 3, 48}};
    sp_test_random random = {15};
    layout at = {16, 2, 1};

    if (sp_kernels_get("avx2", &narrow, NULL) != SP_OK || strcmp(kernels->level, "scalar") == 0)
        skip();
    for (size_t c = 0; c < COUNT(shapes); c++) {
        sequence s = sequence_new(&random, SP_DTYPE_F32, shapes[c][0], shapes[c][1], shapes[c][2]);
        size_t bytes = (size_t)(s.tokens * s.group * s.head_dim) * sizeof(float);
        cache kv = cache_new(&s, at, s.tokens);
        void *out = malloc(bytes), *expected = malloc(bytes);

        assert_true(out && expected);
        attend(narrow, &s, &kv, at, 0, s.tokens, expected);
        attend(kernels, &s, &kv, at, 0, s.tokens, out);
        assert_memory_equal(out, expected, bytes);
        free(expected);
        free(out);
        cache_free(&kv);
        sequence_free(&s);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        FOR_EACH_LEVEL(matches_double),
        FOR_EACH_LEVEL(a_row_depends_on_its_keys_alone),
        FOR_EACH_LEVEL(vector_levels_have_the_same_bits),
        FOR_EACH_LEVEL(a_head_depends_on_nothing_around_it),
        FOR_EACH_LEVEL(non_finite_stays_in_its_row),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
