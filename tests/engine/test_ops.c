/*
 * What ops.h promises of every backend: the first failure of a step is kept and the ops after it do
 * nothing, the next step begins anew, and a weight that a model does not have is not placed.
 */
#include "support/test.h"

#include "engine/ops/ops.h"

typedef struct fake_ops {
    sp_ops ops;
    int norms, products, placed;
    sp_status of_norm;
} fake_ops;

static sp_status norm(sp_ops *ops, sp_rows x, const sp_norm *weights, sp_rows y)
{
    fake_ops *fake = (fake_ops *)ops;

    assert_int_equal(x, 3);
    assert_int_equal(y, 4);
    assert_null(weights);
    fake->norms++;
    return fake->of_norm;
}

static sp_status silu_mul(sp_ops *ops, sp_rows gate, sp_rows up)
{
    assert_int_equal(gate, 5);
    assert_int_equal(up, 6);
    ((fake_ops *)ops)->products++;
    return SP_ERR_MEMORY;
}

static sp_status step(sp_ops *ops, const sp_step *rows, sp_pass_fn pass, void *user)
{
    assert_null(rows);
    pass(user, ops);
    return ops->status;
}

static sp_status place(sp_ops *ops, sp_weight *weight, sp_error *error)
{
    assert_null(error);
    weight->placed = weight->host;
    ((fake_ops *)ops)->placed++;
    return SP_OK;
}

static const sp_op_table table = {.norm = norm, .silu_mul = silu_mul, .step = step, .place = place};

static void pass(void *user, sp_ops *ops)
{
    (void)user;
    sp_op_norm(ops, 3, NULL, 4);
    sp_op_norm(ops, 3, NULL, 4);
    sp_op_silu_mul(ops, 5, 6);
    sp_op_norm(ops, 3, NULL, 4);
}

static void the_first_failure_is_kept(void **state)
{
    fake_ops fake = {.ops = {.table = &table}, .of_norm = SP_ERR_MISMATCH};

    (void)state;
    assert_int_equal(sp_op_step(&fake.ops, NULL, pass, NULL), SP_ERR_MISMATCH);
    assert_int_equal(fake.norms, 1);
    assert_int_equal(fake.products, 0);
    fake.of_norm = SP_OK;
    assert_int_equal(sp_op_step(&fake.ops, NULL, pass, NULL), SP_ERR_MEMORY);
    assert_int_equal(fake.norms, 3);
    assert_int_equal(fake.products, 1);
}

static void absent_weights_are_not_placed(void **state)
{
    fake_ops fake = {.ops = {.table = &table}};
    sp_weight weight = {.rows = 1};

    (void)state;
    assert_int_equal(sp_op_place(&fake.ops, &weight, NULL), SP_OK);
    assert_null(weight.placed);
    weight.host = &weight;
    assert_int_equal(sp_op_place(&fake.ops, &weight, NULL), SP_OK);
    assert_ptr_equal(weight.placed, &weight);
    assert_int_equal(fake.placed, 1);
    sp_ops_destroy(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_first_failure_is_kept),
        cmocka_unit_test(absent_weights_are_not_placed),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
