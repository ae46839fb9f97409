/*
 * The strict JSON reader: any bytes give a value or an error with a position inside the input. A
 * value that was read has no duplicate key and no string that is not UTF-8.
 */
#include "fuzz/target.h"

#include "base/json.h"
#include "base/text.h"

#include <string.h>

static void check_value(const json_t *value)
{
    const char *key;
    json_t *member;

    if (json_is_string(value))
        FUZZ_CHECK(sp_utf8_valid(json_string_value(value), json_string_length(value)));
    json_object_foreach((json_t *)(uintptr_t)value, key, member)
    {
        FUZZ_CHECK(sp_utf8_valid(key, strlen(key)));
        check_value(member);
    }
    for (size_t i = 0; i < json_array_size(value); i++)
        check_value(json_array_get(value, i));
}

static void read_fields(const json_t *object)
{
    sp_error error;
    int64_t number;
    double real;
    bool truth;
    const char *string;

    if (sp_json_int(object, "int", true, -5, 5, 0, NULL, &number, &error) == SP_OK)
        FUZZ_CHECK(number >= -5 && number <= 5);
    if (sp_json_double(object, "double", true, 0, NULL, &real, &error) == SP_OK)
        FUZZ_CHECK(real - real == 0); /* finite */
    (void)sp_json_bool(object, "bool", false, true, NULL, &truth, &error);
    if (sp_json_string(object, "string", true, NULL, &string, &error) == SP_OK)
        FUZZ_CHECK(string != NULL);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    sp_error error;
    json_t *root = NULL;
    bool duplicate;
    sp_status status =
        sp_json_parse((const char *)data, bytes, "input", NULL, &duplicate, &root, &error);

    if (status == SP_OK) {
        FUZZ_CHECK(!duplicate && sp_utf8_valid((const char *)data, bytes));
        check_value(root);
        if (json_is_object(root))
            read_fields(root);
        json_decref(root);
    } else {
        FUZZ_CHECK(status == SP_ERR_INPUT && root == NULL);
        FUZZ_CHECK(error.position >= 0 && (uint64_t)error.position <= bytes);
        FUZZ_CHECK(sp_utf8_valid(error.text, strlen(error.text)));
    }
    return 0;
}
