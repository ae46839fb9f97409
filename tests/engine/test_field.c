/*
 * The mechanism of fields: every type of a row as it is written and stored, at its borders; lists
 * that replace each other; memory that runs out at any place.
 */
#include "support/test.h"

#include "base/alloc.h"
#include "engine/request/field.h"

#include <string.h>

typedef struct values {
    bool yes, no;
    int32_t whole;
    int64_t large;
    size_t size;
    uint64_t seed;
    float single;
    double number;
    const char *name;
    const char *const *texts;
    int32_t n_texts;
    const int32_t *ids;
    int32_t n_ids;
} values;

enum { HERE = 1, THERE = 2 };

#define AT(member) offsetof(values, member)

static const sp_field rows[] = {
    {.name = "yes", .type = SP_FIELD_BOOL, .forms = HERE, .offset = AT(yes)},
    {.name = "no", .type = SP_FIELD_NOT, .forms = HERE, .offset = AT(no), .defaults = {1, 0, 1}},
    {.name = "whole",
     .type = SP_FIELD_INT,
     .forms = HERE | THERE,
     .offset = AT(whole),
     .minimum = -2,
     .maximum = 2,
     .defaults = {1, -1, 2}},
    {.name = "large", .type = SP_FIELD_INT64, .offset = AT(large), .maximum = 1e12},
    {.name = "size", .type = SP_FIELD_SIZE, .offset = AT(size), .maximum = 1e12},
    {.name = "seed", .type = SP_FIELD_SEED, .forms = HERE, .offset = AT(seed)},
    {.name = "single",
     .type = SP_FIELD_FLOAT,
     .forms = HERE,
     .offset = AT(single),
     .maximum = 16,
     .defaults = {0.5, 0.5, 0.5}},
    {.name = "number", .type = SP_FIELD_DOUBLE, .forms = HERE, .offset = AT(number), .maximum = 1},
    {.name = "name", .type = SP_FIELD_STRING, .forms = HERE, .offset = AT(name)},
    {.name = "texts",
     .type = SP_FIELD_TEXTS,
     .forms = HERE,
     .offset = AT(texts),
     .count_offset = AT(n_texts),
     .maximum = 3,
     .item_bytes_max = 4},
    {.name = "ids",
     .type = SP_FIELD_IDS,
     .forms = HERE,
     .offset = AT(ids),
     .count_offset = AT(n_ids),
     .maximum = 3},
    {.name = "aside", .type = SP_FIELD_IGNORED, .forms = HERE},
    {.name = "never", .type = SP_FIELD_ONLY_FALSE, .forms = HERE},
    {.name = "always", .type = SP_FIELD_ONLY_TRUE, .forms = HERE},
    {.name = "single_one", .type = SP_FIELD_ONLY_ONE, .forms = HERE},
    {.name = "empty", .type = SP_FIELD_ONLY_EMPTY, .forms = HERE},
    {.name = "elsewhere", .type = SP_FIELD_ELSEWHERE, .forms = HERE},
};

static sp_field_part part_of(values *v)
{
    return (sp_field_part){rows, sizeof rows / sizeof *rows, v};
}

/* Reads over what is in *v; the object lives until the next call. */
static sp_status read_text(const char *text, unsigned form, values *v, sp_error *error)
{
    static json_t *object;
    const sp_field_part part = part_of(v);

    json_decref(object);
    object = json_loads(text, JSON_REJECT_DUPLICATES, NULL);
    assert_non_null(object);
    return sp_fields_read(object, form, &part, 1, error);
}

static void release(values *v)
{
    const sp_field_part part = part_of(v);

    sp_fields_free(&part);
}

static bool is_equal(double a, double b)
{
    return a >= b && a <= b;
}

static void test_every_type(void **state)
{
    values v = {.no = true};
    sp_error error;

    (void)state;
    assert_ok(read_text("{\"yes\": true, \"no\": true, \"whole\": -2, \"seed\": -1, "
                        "\"single\": 0.1, \"number\": 0.1, \"name\": \"n\", "
                        "\"texts\": [\"a\", \"bcde\"], \"ids\": [7, 2147483647]}",
                        HERE, &v, &error),
              &error);
    assert_true(v.yes && !v.no && v.whole == -2 && v.seed == UINT64_MAX);
    assert_true(is_equal((double)v.single, (double)0.1f) && is_equal(v.number, 0.1));
    assert_string_equal(v.name, "n");
    assert_int_equal(v.n_texts, 2);
    assert_string_equal(v.texts[1], "bcde");
    assert_int_equal(v.n_ids, 2);
    assert_int_equal(v.ids[1], INT32_MAX);
    /* What is absent or null stays; a list takes the place of the one before. */
    assert_ok(read_text("{\"yes\": null, \"texts\": \"z\", \"ids\": []}", HERE, &v, &error),
              &error);
    assert_true(v.yes && v.whole == -2);
    assert_int_equal(v.n_texts, 1);
    assert_string_equal(v.texts[0], "z");
    assert_int_equal(v.n_ids, 0);
    assert_null(v.ids);
    release(&v);
    assert_null(v.texts);
}

static void test_wrong(void **state)
{
    static const char *const bad[][2] = {
        {"{\"yes\": 1}", "yes"},
        {"{\"no\": \"true\"}", "no"},
        {"{\"whole\": 3}", "whole"},
        {"{\"whole\": -3}", "whole"},
        {"{\"whole\": 1.0}", "whole"},
        {"{\"whole\": 4294967297}", "whole"},
        {"{\"seed\": 1.5}", "seed"},
        {"{\"single\": 16.0000001}", "single"}, /* as it is written, not as it would round */
        {"{\"single\": true}", "single"},
        {"{\"number\": -5e-324}", "number"},
        {"{\"number\": \"1\"}", "number"},
        {"{\"name\": 1}", "name"},
        {"{\"texts\": [\"a\", \"b\", \"c\", \"d\"]}", "texts"},
        {"{\"texts\": [\"\"]}", "texts"},
        {"{\"texts\": \"abcde\"}", "texts"},
        {"{\"texts\": [null]}", "texts"},
        {"{\"texts\": {}}", "texts"},
        {"{\"ids\": [1, 2, 3, 4]}", "ids"},
        {"{\"ids\": [-1]}", "ids"},
        {"{\"ids\": [2147483648]}", "ids"},
        {"{\"ids\": 1}", "ids"},
        {"{\"never\": true}", "never"},
        {"{\"always\": false}", "always"},
        {"{\"single_one\": 2}", "single_one"},
        {"{\"empty\": [1]}", "empty"},
        {"{\"large\": 1}", "large"}, /* of no form */
        {"{\"Yes\": true}", "Yes"},
        {"{\"ye\": true}", "ye"},
        {"{\"\": 1}", ""},
    };
    size_t before = sp_alloc_bytes();

    (void)state;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        values v = {.whole = 1};
        sp_error error;

        if (read_text(bad[i][0], HERE, &v, &error) != SP_ERR_INPUT)
            fail_msg("%s is taken", bad[i][0]);
        assert_string_equal(error.subject, bad[i][1]);
        release(&v);
    }
    assert_int_equal(sp_alloc_bytes(), before);
}

static void test_forms(void **state)
{
    values v = {.whole = 1};
    sp_error error;

    (void)state;
    assert_ok(read_text("{\"whole\": 2}", THERE, &v, &error), &error);
    assert_int_equal(v.whole, 2);
    assert_int_equal(read_text("{\"yes\": true}", THERE, &v, &error), SP_ERR_INPUT);
    assert_string_equal(error.code, SP_CODE_UNKNOWN_FIELD);
    assert_int_equal(read_text("{\"never\": 0}", HERE, &v, &error), SP_ERR_INPUT);
    assert_string_equal(error.code, SP_CODE_UNSUPPORTED_FIELD);
    assert_ok(read_text("{\"aside\": [1], \"never\": false, \"always\": true, \"single_one\": 1.0, "
                        "\"empty\": \"\", \"elsewhere\": 5}",
                        HERE, &v, &error),
              &error);
}

static void test_defaults_and_ranges(void **state)
{
    values v = {.no = true};
    const sp_field_part part = part_of(&v);
    sp_error error;

    (void)state;
    sp_fields_set_defaults(&part, 0);
    assert_true(v.whole == 1 && !v.no && is_equal((double)v.single, 0.5));
    sp_fields_set_defaults(&part, 1);
    assert_true(v.whole == -1 && v.no);
    assert_ok(sp_fields_check_ranges(&part, SP_ERR_ARGUMENT, &error), &error);
    v.large = (int64_t)1e12 + 1;
    assert_int_equal(sp_fields_check_ranges(&part, SP_ERR_ARGUMENT, &error), SP_ERR_ARGUMENT);
    assert_string_equal(error.subject, "large");
    v.large = -1;
    assert_int_equal(sp_fields_check_ranges(&part, SP_ERR_INPUT, &error), SP_ERR_INPUT);
    v.large = 0;
    v.size = SIZE_MAX;
    assert_int_equal(sp_fields_check_ranges(&part, SP_ERR_INPUT, &error), SP_ERR_INPUT);
    assert_string_equal(error.subject, "size");
}

static void test_no_memory(void **state)
{
    size_t before = sp_alloc_bytes();
    sp_status status = SP_ERR_MEMORY;

    (void)state;
    for (int64_t n = 0; status == SP_ERR_MEMORY; n++) {
        values v = {.whole = 1};
        sp_error error;

        sp_alloc_fail_after(n);
        status = read_text("{\"texts\": [\"a\", \"b\"], \"ids\": [1, 2]}", HERE, &v, &error);
        sp_alloc_fail_after(-1);
        assert_true(status == SP_OK || status == SP_ERR_MEMORY);
        release(&v);
        assert_int_equal(sp_alloc_bytes(), before);
        assert_true(n < 10);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_type), cmocka_unit_test(test_wrong),
        cmocka_unit_test(test_forms),      cmocka_unit_test(test_defaults_and_ranges),
        cmocka_unit_test(test_no_memory),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
