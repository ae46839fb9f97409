/*
 * docs/ADAPTERS.md against the code: its table of codes has each code once, with its status, and
 * no other; and every field that the config reader knows is named.
 */
#include "support/test.h"

#include "adapter/peft_config.h"
#include "adapter/reason.h"
#include "base/alloc.h"
#include "base/file.h"

#include <stdio.h>
#include <string.h>

static char document[1 << 17];

static int read_document(void **state)
{
    char *text;
    size_t bytes;
    sp_error error;

    (void)state;
    assert_ok(sp_file_read_all(SP_TEST_SOURCE "/docs/ADAPTERS.md", sizeof document - 1, &text,
                               &bytes, &error),
              &error);
    memcpy(document, text, bytes + 1);
    sp_free(text);
    return 0;
}

static int32_t find_code(const char *name, size_t n)
{
    for (int32_t i = 0; i < sp_reason_count(); i++) {
        if (strlen(sp_reason_name(i)) == n && memcmp(sp_reason_name(i), name, n) == 0)
            return i;
    }
    fail_msg("the document has the code %.*s, which does not exist", (int)n, name);
    return -1;
}

/* Each row: "| `code` | SP_STATUS | cause | what to do |". */
static void codes(void **state)
{
    const char *row = strstr(document, "\n## Codes\n");
    int seen[SP_REASON_COUNT] = {0};

    (void)state;
    assert_non_null(row);
    for (row = strstr(row, "\n| `"); row; row = strstr(row + 1, "\n| `")) {
        const char *name = row + 4;
        size_t n = strcspn(name, "`");
        int32_t code = find_code(name, n);
        const char *status = name + n + 4;
        const char *cause = strchr(status, '|');

        seen[code]++;
        assert_non_null(cause);
        if (strncmp(status, sp_status_name(sp_reason_status(code)), (size_t)(cause - 1 - status)) !=
            0)
            fail_msg("%.*s: its status is %s", (int)n, name,
                     sp_status_name(sp_reason_status(code)));
        assert_true(strcspn(cause + 1, "|") > 20);
    }
    for (int32_t i = 0; i < SP_REASON_COUNT; i++) {
        if (seen[i] != 1)
            fail_msg("%s stands %d times in the table of codes", sp_reason_name(i), seen[i]);
    }
}

static void fields(void **state)
{
    const char *name;

    (void)state;
    assert_non_null(sp_peft_config_field(0));
    for (size_t i = 0; (name = sp_peft_config_field(i)) != NULL; i++) {
        char quoted[128];

        snprintf(quoted, sizeof quoted, "`%s`", name);
        if (!strstr(document, quoted))
            fail_msg("the document does not name the field %s", name);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(codes),
        cmocka_unit_test(fields),
    };

    return cmocka_run_group_tests(tests, read_document, NULL);
}
