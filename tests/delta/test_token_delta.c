/*
 * Embeddings and logits of many slots in one plan against a reference in double: rows that a slot
 * replaces, pairs of embed_tokens and lm_head, both, neither. What no adapter touches keeps its
 * bytes, pads included.
 */
#include "base/alloc.h"
#include "kernels/kernels.h"
#include "support/token_world.h"

enum { HIDDEN = 37, PAD = 3 };

static void embed(token_world *w, void *y, size_t y_bytes)
{
    (void)y_bytes;
    assert_ok(sp_delta_embed(w->delta, w->plan, w->token, y, HIDDEN + PAD), NULL);
}

static void head(token_world *w, const void *x, float *logits, size_t logits_bytes)
{
    (void)logits_bytes;
    assert_ok(sp_delta_head(w->delta, w->plan, x, HIDDEN + PAD, logits, TOKEN_VOCAB + PAD), NULL);
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
    sp_delta_output output = {known_site(w->geometry, -1, SP_MODULE_EMBED_TOKENS), y, TOKEN_VOCAB,
                              SP_DTYPE_F32};

    (void)state;
    assert_true(y && zero);
    assert_true(sp_delta_has_tokens(w->delta, SP_SITE_EMBEDDING));
    assert_int_equal(sp_delta_embed(w->delta, w->plan, w->token, y, HIDDEN - 1), SP_ERR_STRIDE);
    assert_int_equal(sp_delta_head(w->delta, w->plan, y, HIDDEN - 1, y, TOKEN_VOCAB),
                     SP_ERR_STRIDE);
    assert_int_equal(sp_delta_head(w->delta, w->plan, y, HIDDEN, y, TOKEN_VOCAB - 1),
                     SP_ERR_STRIDE);
    w->token[3] = TOKEN_VOCAB; /* slot 3's row, whatever its scale: see below */
    w->row_scale[3] = 1.0f;
    hand_plan_rows(w->plan, w->pool, w->row_slot, w->row_scale, TOKEN_ROWS);
    assert_int_equal(sp_delta_embed(w->delta, w->plan, w->token, y, HIDDEN), SP_ERR_ARGUMENT);
    w->token[3] = -1;
    assert_int_equal(sp_delta_embed(w->delta, w->plan, w->token, y, HIDDEN), SP_ERR_ARGUMENT);
    w->token[3] = token;
    /* A token is no row of x: embed_tokens is no linear site. */
    assert_int_equal(sp_delta_apply(w->delta, w->plan, y, TOKEN_VOCAB, &output, 1),
                     SP_ERR_ARGUMENT);
    assert_memory_equal(y, zero, TOKEN_ROWS * TOKEN_VOCAB * sizeof *y);
    sp_free(zero);
    sp_free(y);
    token_world_destroy(w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_slots_match_the_reference),
        cmocka_unit_test(bad_calls_write_nothing),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
