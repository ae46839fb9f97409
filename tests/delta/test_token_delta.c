/*
 * Embeddings and logits of many slots in one plan against a reference in double: rows that a slot
 * replaces, pairs of embed_tokens and lm_head, both, neither. What no adapter touches keeps its
 * bytes, pads included.
 */
#include "base/alloc.h"
#include "kernels/cpu/kernels.h"
#include "support/delta_call.h"
#include "support/token_world.h"

#include <string.h>

enum { HIDDEN = 37, PAD = 3 };

static void embed(token_world *w, void *y, size_t y_bytes)
{
    (void)y_bytes;
    assert_ok(hand_embed(w->delta, w->plan, w->token, y, HIDDEN + PAD), NULL);
}

static void head(token_world *w, const void *x, float *logits, size_t logits_bytes)
{
    (void)logits_bytes;
    assert_ok(hand_head(w->delta, w->plan, w->dtype, x, HIDDEN + PAD, SP_DTYPE_F32, logits,
                        TOKEN_VOCAB + PAD),
              NULL);
}

static void random_slots_match_the_reference(void **state)
{
    static const sp_dtype dtypes[] = {SP_DTYPE_F32, SP_DTYPE_BF16};
    uint64_t seed = 11;

    (void)state;
    for (const char *const *level = sp_kernels_levels(); *level; level++)
        for (int t = 0; t < 2; t++) {
            sp_test_random random = {seed++};
            size_t blocks = sp_alloc_blocks();
            token_world *w = token_world_create(NULL, dtypes[t], HIDDEN, PAD, *level, seed++);

            token_world_check_embeddings(w, embed, &random);
            token_world_check_logits(w, head, &random);
            token_world_destroy(w);
            assert_int_equal(sp_alloc_blocks(), blocks);
        }
}

/* ---- refusals ------------------------------------------------------------------------------ */

static void bad_calls_write_nothing(void **state)
{
    token_world *w = token_world_create(NULL, SP_DTYPE_F32, HIDDEN, PAD, "scalar", 5);
    float *y = sp_calloc(TOKEN_ROWS * TOKEN_VOCAB, sizeof *y);
    float *zero = sp_calloc(TOKEN_ROWS * TOKEN_VOCAB, sizeof *zero);
    int32_t token = w->token[3];
    sp_delta_output output = {sizeof(sp_delta_output),
                              known_site(w->geometry, -1, SP_MODULE_EMBED_TOKENS), y, TOKEN_VOCAB,
                              SP_DTYPE_F32};

    (void)state;
    assert_true(y && zero);
    assert_true(sp_delta_has_tokens(w->delta, SP_SITE_EMBEDDING));
    assert_int_equal(hand_embed(w->delta, w->plan, w->token, y, HIDDEN - 1), SP_ERR_STRIDE);
    assert_int_equal(
        hand_head(w->delta, w->plan, w->dtype, y, HIDDEN - 1, SP_DTYPE_F32, y, TOKEN_VOCAB),
        SP_ERR_STRIDE);
    assert_int_equal(
        hand_head(w->delta, w->plan, w->dtype, y, HIDDEN, SP_DTYPE_F32, y, TOKEN_VOCAB - 1),
        SP_ERR_STRIDE);
    w->token[3] = TOKEN_VOCAB; /* slot 3's row, whatever its scale: see below */
    w->row_scale[3] = 1.0f;
    hand_plan_rows(w->plan, w->pool, w->row_slot, w->row_scale, TOKEN_ROWS);
    assert_int_equal(hand_embed(w->delta, w->plan, w->token, y, HIDDEN), SP_ERR_ARGUMENT);
    w->token[3] = -1;
    assert_int_equal(hand_embed(w->delta, w->plan, w->token, y, HIDDEN), SP_ERR_ARGUMENT);
    w->token[3] = token;
    /* A token is no row of x: embed_tokens is no linear site. */
    assert_int_equal(hand_apply(w->delta, w->plan, w->dtype, y, TOKEN_VOCAB, &output, 1),
                     SP_ERR_ARGUMENT);
    assert_memory_equal(y, zero, TOKEN_ROWS * TOKEN_VOCAB * sizeof *y);
    sp_free(zero);
    sp_free(y);
    token_world_destroy(w);
}

/* ---- types --------------------------------------------------------------------------------- */

enum { STRIDE = HIDDEN + PAD, LOGITS = TOKEN_VOCAB + PAD };

/* x and logits of the world's rows, both exact in bf16. */
static void fill_logits(uint16_t *x, uint16_t *logits, float *wide)
{
    sp_test_random random = {21};

    for (int64_t i = 0; i < TOKEN_ROWS * STRIDE; i++)
        hand_store(SP_DTYPE_BF16, x, i, (double)sp_test_float(&random));
    for (int64_t i = 0; i < TOKEN_ROWS * LOGITS; i++) {
        hand_store(SP_DTYPE_BF16, logits, i, (double)sp_test_float(&random));
        wide[i] = (float)hand_load(SP_DTYPE_BF16, logits, i);
    }
}

static bool is_replaced_and_has_pairs(const token_world *w, int32_t row, int32_t token)
{
    int32_t slot = w->row_slot[row];

    return slot >= 0 && token < TOKEN_VOCAB && w->kinds[slot].pairs && w->is_replaced[slot][token];
}

/* A bf16 logit is the FP32 one, rounded once; but a replaced one is rounded before its pair, too.
 */
static void bf16_logits_are_the_rounded_ones(void **state)
{
    static uint16_t x[TOKEN_ROWS * STRIDE], logits[TOKEN_ROWS * LOGITS];
    static float wide[TOKEN_ROWS * LOGITS];

    (void)state;
    for (const char *const *level = sp_kernels_levels(); *level; level++) {
        token_world *w = token_world_create(NULL, SP_DTYPE_BF16, HIDDEN, PAD, *level, 31);
        int32_t n_checked = 0;

        fill_logits(x, logits, wide);
        assert_ok(
            hand_head(w->delta, w->plan, SP_DTYPE_BF16, x, STRIDE, SP_DTYPE_F32, wide, LOGITS),
            NULL);
        assert_ok(
            hand_head(w->delta, w->plan, SP_DTYPE_BF16, x, STRIDE, SP_DTYPE_BF16, logits, LOGITS),
            NULL);
        for (int32_t i = 0; i < TOKEN_ROWS * LOGITS; i++) {
            uint16_t want;

            if (is_replaced_and_has_pairs(w, i / LOGITS, i % LOGITS))
                continue;
            hand_store(SP_DTYPE_BF16, &want, 0, (double)wide[i]);
            assert_int_equal(logits[i], want);
            n_checked++;
        }
        assert_true(n_checked > TOKEN_ROWS * LOGITS / 2);
        token_world_destroy(w);
    }
}

static void an_f32_x_of_the_head_is_rounded_first(void **state)
{
    static uint16_t x[TOKEN_ROWS * STRIDE], unused[TOKEN_ROWS * LOGITS];
    static float wide_x[TOKEN_ROWS * STRIDE];
    static float want[TOKEN_ROWS * LOGITS], got[TOKEN_ROWS * LOGITS], start[TOKEN_ROWS * LOGITS];

    (void)state;
    for (const char *const *level = sp_kernels_levels(); *level; level++) {
        token_world *w = token_world_create(NULL, SP_DTYPE_BF16, HIDDEN, PAD, *level, 32);

        fill_logits(x, unused, want);
        memcpy(got, want, sizeof got);
        memcpy(start, want, sizeof start);
        for (int64_t i = 0; i < TOKEN_ROWS * STRIDE; i++) /* off by an eighth of a bf16's step */
            wide_x[i] = (float)(hand_load(SP_DTYPE_BF16, x, i) * (1 - 0x1p-10));
        assert_ok(
            hand_head(w->delta, w->plan, SP_DTYPE_BF16, x, STRIDE, SP_DTYPE_F32, want, LOGITS),
            NULL);
        assert_ok(
            hand_head(w->delta, w->plan, SP_DTYPE_F32, wide_x, STRIDE, SP_DTYPE_F32, got, LOGITS),
            NULL);
        assert_memory_equal(got, want, sizeof got);
        assert_memory_not_equal(got, start, sizeof got);
        token_world_destroy(w);
    }
}

static void refusals_say_what_was_expected(void **state)
{
    token_world *w = token_world_create(NULL, SP_DTYPE_BF16, HIDDEN, PAD, "scalar", 5);
    static uint16_t y[TOKEN_ROWS * STRIDE];
    static float logits[TOKEN_ROWS * LOGITS];
    sp_delta_embed_call embeds = {sizeof embeds, w->plan, w->token, y, STRIDE, NULL};
    sp_delta_head_call head_call = {
        sizeof head_call, w->plan, y, STRIDE, SP_DTYPE_BF16, logits, LOGITS, SP_DTYPE_F32, NULL};
    sp_error error;

    (void)state;
    embeds.tokens = NULL;
    assert_int_equal(sp_delta_embed(w->delta, &embeds, &error), SP_ERR_ARGUMENT);
    assert_string_equal(error.subject, "tokens");
    embeds.tokens = w->token;
    embeds.y_stride = HIDDEN - 1;
    assert_int_equal(sp_delta_embed(w->delta, &embeds, &error), SP_ERR_STRIDE);
    assert_string_equal(error.subject, "y_stride");
    assert_non_null(strstr(error.text, "37"));
    assert_int_equal(sp_delta_embed(w->delta, NULL, &error), SP_ERR_ARGUMENT);
    head_call.logits_type = SP_DTYPE_F16;
    assert_int_equal(sp_delta_head(w->delta, &head_call, &error), SP_ERR_ARGUMENT);
    assert_string_equal(error.subject, "logits_type");
    head_call.logits_type = SP_DTYPE_F32;
    head_call.x_type = SP_DTYPE_F16;
    assert_int_equal(sp_delta_head(w->delta, &head_call, &error), SP_ERR_ARGUMENT);
    assert_string_equal(error.subject, "x_type");
    head_call.x_type = SP_DTYPE_BF16;
    head_call.plan = NULL;
    assert_int_equal(sp_delta_head(w->delta, &head_call, &error), SP_ERR_ARGUMENT);
    assert_string_equal(error.subject, "plan");
    token_world_destroy(w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_slots_match_the_reference),
        cmocka_unit_test(bad_calls_write_nothing),
        cmocka_unit_test(bf16_logits_are_the_rounded_ones),
        cmocka_unit_test(an_f32_x_of_the_head_is_rounded_first),
        cmocka_unit_test(refusals_say_what_was_expected),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
