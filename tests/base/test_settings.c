/* settings: where a value comes from, every type, every refusal, and the help as it is printed. */
#include "base/alloc.h"
#include "base/settings.h"

#include "support/test.h"

#include <stdlib.h>
#include <string.h>

typedef struct values {
    bool verbose, color;
    int64_t count, seed;
    double rate;
    const char *model, *isa, *order;
    sp_setting_list adapters;
} values;

static const sp_setting settings[] = {
    {.name = "verbose",
     .type = SP_SETTING_BOOL,
     .offset = offsetof(values, verbose),
     .default_text = "false",
     .help = "say more"},
    {.name = "color",
     .type = SP_SETTING_BOOL,
     .offset = offsetof(values, color),
     .default_text = "yes", /* help spells it as the others */
     .help = "color the output"},
    {.name = "max-count",
     .type = SP_SETTING_INT,
     .offset = offsetof(values, count),
     .default_text = "8",
     .minimum = 1,
     .maximum = 2000000,
     .value_name = "N",
     .help = "how many"},
    {.name = "seed",
     .type = SP_SETTING_INT,
     .offset = offsetof(values, seed),
     .minimum = -9.3e18,
     .maximum = 9.3e18,
     .value_name = "N",
     .help = "seed of the generator"},
    {.name = "rate",
     .type = SP_SETTING_DOUBLE,
     .offset = offsetof(values, rate),
     .default_text = "0.5",
     .minimum = 0,
     .maximum = 2,
     .value_name = "R",
     .help = "how fast"},
    {.name = "model",
     .type = SP_SETTING_STRING,
     .offset = offsetof(values, model),
     .value_name = "DIR",
     .help = "the base model",
     .flag_only = true},
    {.name = "cpu-isa",
     .type = SP_SETTING_CHOICE,
     .offset = offsetof(values, isa),
     .default_text = "auto",
     .choices = "auto|scalar|avx2",
     .help = "the instruction set"},
    {.name = "device-order",
     .type = SP_SETTING_CHOICE,
     .offset = offsetof(values, order),
     .choices = "cpu-first|cuda-first",
     .help = "what is tried first"},
    {.name = "adapter",
     .type = SP_SETTING_LIST,
     .offset = offsetof(values, adapters),
     .value_name = "NAME=DIR",
     .help = "an adapter; repeatable"},
};

#define N_SETTINGS (sizeof settings / sizeof *settings)

static const char *const variables[] = {"SIDEPATH_VERBOSE", "SIDEPATH_COLOR",  "SIDEPATH_MAX_COUNT",
                                        "SIDEPATH_SEED",    "SIDEPATH_RATE",   "SIDEPATH_MODEL",
                                        "SIDEPATH_CPU_ISA", "SIDEPATH_ADAPTER"};

static int clean(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof variables / sizeof *variables; i++)
        unsetenv(variables[i]);
    sp_alloc_fail_after(-1);
    return 0;
}

/* The arguments end with NULL; "program" stands before them. */
static sp_status parse(values *out, sp_setting_list *positional, sp_error *error, ...)
{
    static char *argv[32];
    int argc = 1;
    va_list arguments;
    char *next;

    argv[0] = (char[]){"program"};
    va_start(arguments, error);
    while ((next = va_arg(arguments, char *)) != NULL && argc < 31)
        argv[argc++] = next;
    va_end(arguments);
    argv[argc] = NULL;
    memset(out, 0xee, sizeof *out);
    memset(error, 0, sizeof *error);
    return sp_settings_parse(settings, N_SETTINGS, argc, argv, out, positional, error);
}

#define PARSE(...)   assert_ok(parse(&v, NULL, &error, __VA_ARGS__, NULL), &error)
#define REFUSED(...) parse(&v, NULL, &error, __VA_ARGS__, NULL)

static void release(values *v)
{
    sp_settings_free_lists(settings, N_SETTINGS, v, NULL);
}

static void defaults(void **state)
{
    values v;
    sp_error error;

    (void)state;
    assert_ok(parse(&v, NULL, &error, NULL), &error);
    assert_false(v.verbose);
    assert_true(v.color);
    assert_int_equal(v.count, 8);
    assert_int_equal(v.seed, 0); /* no default: zero, NULL, empty */
    assert_true(v.rate == 0.5);
    assert_null(v.model);
    assert_string_equal(v.isa, "auto");
    assert_int_equal(v.adapters.n, 0);
    release(&v);
}

static void flags_of_every_type(void **state)
{
    values v;
    sp_error error;

    (void)state;
    PARSE("--verbose", "--no-color", "--max-count", "12", "--seed=-5", "--rate", "1.25e0",
          "--model", "/some/dir", "--cpu-isa=avx2", "--adapter", "a=b", "--adapter=c=d=e");
    assert_true(v.verbose);
    assert_false(v.color);
    assert_int_equal(v.count, 12);
    assert_int_equal(v.seed, -5);
    assert_true(v.rate == 1.25);
    assert_string_equal(v.model, "/some/dir");
    assert_string_equal(v.isa, "avx2");
    assert_int_equal(v.adapters.n, 2);
    assert_string_equal(v.adapters.values[0], "a=b");
    assert_string_equal(v.adapters.values[1], "c=d=e");
    release(&v);
}

static void values_may_look_like_flags(void **state)
{
    values v;
    sp_error error;

    (void)state;
    PARSE("--seed", "-7", "--model", "--verbose", "--adapter", "");
    assert_int_equal(v.seed, -7);
    assert_string_equal(v.model, "--verbose");
    assert_false(v.verbose);
    assert_int_equal(v.adapters.n, 1);
    assert_string_equal(v.adapters.values[0], "");
    release(&v);
}

static void the_last_flag_wins(void **state)
{
    values v;
    sp_error error;

    (void)state;
    PARSE("--max-count=1", "--verbose", "--max-count=2", "--no-verbose", "--verbose=yes",
          "--color=off");
    assert_int_equal(v.count, 2);
    assert_true(v.verbose);
    assert_false(v.color);
    release(&v);
}

static void flags_beat_the_environment_beats_defaults(void **state)
{
    values v;
    sp_error error;

    (void)state;
    setenv("SIDEPATH_MAX_COUNT", "20", 1);
    setenv("SIDEPATH_RATE", "0.75", 1);
    setenv("SIDEPATH_VERBOSE", "on", 1);
    setenv("SIDEPATH_COLOR", "no", 1);
    setenv("SIDEPATH_CPU_ISA", "scalar", 1);
    setenv("SIDEPATH_ADAPTER", "from=environment", 1);
    setenv("SIDEPATH_MODEL", "/not/read", 1); /* flag_only */
    assert_ok(parse(&v, NULL, &error, NULL), &error);
    assert_int_equal(v.count, 20);
    assert_true(v.rate == 0.75);
    assert_true(v.verbose);
    assert_false(v.color);
    assert_string_equal(v.isa, "scalar");
    assert_int_equal(v.adapters.n, 1);
    assert_string_equal(v.adapters.values[0], "from=environment");
    assert_null(v.model);
    release(&v);
    PARSE("--max-count", "30", "--no-verbose", "--adapter", "a=1", "--adapter", "b=2");
    assert_int_equal(v.count, 30);
    assert_false(v.verbose);
    assert_int_equal(v.adapters.n, 2); /* the flags replace the variable, they do not add to it */
    assert_string_equal(v.adapters.values[0], "a=1");
    assert_string_equal(v.adapters.values[1], "b=2");
    release(&v);
}

static void a_listed_default_is_replaced_too(void **state)
{
    static const sp_setting listed[] = {
        {.name = "stop", .type = SP_SETTING_LIST, .default_text = "standard", .help = "a stop"}};
    static char program[] = "p", flag[] = "--stop", value[] = "mine";
    char *argv[] = {program, flag, value, NULL};
    sp_setting_list list;
    sp_error error;

    (void)state;
    assert_ok(sp_settings_parse(listed, 1, 1, argv, &list, NULL, &error), &error);
    assert_int_equal(list.n, 1);
    assert_string_equal(list.values[0], "standard");
    sp_settings_free_lists(listed, 1, &list, NULL);
    assert_ok(sp_settings_parse(listed, 1, 3, argv, &list, NULL, &error), &error);
    assert_int_equal(list.n, 1);
    assert_string_equal(list.values[0], "mine");
    sp_settings_free_lists(listed, 1, &list, NULL);
}

static void words_for_yes_and_no(void **state)
{
    static const char *const yes[] = {"1", "true", "yes", "on"};
    static const char *const no[] = {"0", "false", "no", "off"};
    values v;
    sp_error error;

    (void)state;
    for (size_t i = 0; i < 4; i++) {
        setenv("SIDEPATH_VERBOSE", yes[i], 1);
        setenv("SIDEPATH_COLOR", no[i], 1);
        assert_ok(parse(&v, NULL, &error, NULL), &error);
        assert_true(v.verbose);
        assert_false(v.color);
    }
}

static void positional_arguments(void **state)
{
    values v;
    sp_setting_list positional;
    sp_error error;

    (void)state;
    assert_ok(parse(&v, &positional, &error, "one", "--verbose", "-", "--", "--seed", "-x", NULL),
              &error);
    assert_true(v.verbose);
    assert_int_equal(v.seed, 0);
    assert_int_equal(positional.n, 4);
    assert_string_equal(positional.values[0], "one");
    assert_string_equal(positional.values[1], "-");
    assert_string_equal(positional.values[2], "--seed");
    assert_string_equal(positional.values[3], "-x");
    sp_settings_free_lists(settings, N_SETTINGS, &v, &positional);
    assert_int_equal(positional.n, 0);
    assert_int_equal(REFUSED("one"), SP_ERR_ARGUMENT);
    assert_string_equal(error.text, "unexpected argument \"one\"; try --help");
}

/* ---- refusals ------------------------------------------------------------------------------ */

static void check_value(const char *flag, const char *value, const char *text)
{
    values v;
    sp_error error;
    size_t blocks = sp_alloc_blocks();

    assert_int_equal(REFUSED("--adapter", "a=b", flag, value), SP_ERR_INPUT);
    assert_string_equal(error.text, text);
    assert_string_equal(error.subject, flag + 2);
    assert_int_equal(v.adapters.n, 0); /* freed */
    assert_int_equal(sp_alloc_blocks(), blocks);
}

static void wrong_values_name_their_source(void **state)
{
    values v;
    sp_error error;

    (void)state;
    check_value("--max-count", "many", "--max-count: \"many\" is not a whole number");
    check_value("--max-count", "", "--max-count: \"\" is not a whole number");
    check_value("--max-count", "7x", "--max-count: \"7x\" is not a whole number");
    check_value("--max-count", " 7", "--max-count: \" 7\" is not a whole number");
    check_value("--max-count", "1.5", "--max-count: \"1.5\" is not a whole number");
    check_value("--max-count", "0", "--max-count: 0 is out of range; it must be from 1 to 2000000");
    check_value("--max-count", "2000001",
                "--max-count: 2000001 is out of range; it must be from 1 to 2000000");
    check_value("--rate", "fast", "--rate: \"fast\" is not a number");
    check_value("--rate", "nan", "--rate: \"nan\" is not a number");
    check_value("--rate", "inf", "--rate: \"inf\" is not a number");
    check_value("--rate", "2.5", "--rate: 2.5 is out of range; it must be from 0 to 2");
    check_value("--rate", "-0.5", "--rate: -0.5 is out of range; it must be from 0 to 2");
    check_value("--cpu-isa", "sse", "--cpu-isa: \"sse\" is not one of auto|scalar|avx2");
    check_value("--cpu-isa", "auto|scalar",
                "--cpu-isa: \"auto|scalar\" is not one of auto|scalar|avx2");
    check_value("--cpu-isa", "", "--cpu-isa: \"\" is not one of auto|scalar|avx2");
    assert_int_equal(REFUSED("--verbose=maybe"), SP_ERR_INPUT);
    assert_string_equal(error.text, "--verbose: \"maybe\" is not a yes or no (1, true, yes, on; 0, "
                                    "false, no, off)");
    setenv("SIDEPATH_MAX_COUNT", "lots", 1);
    assert_int_equal(REFUSED("--verbose"), SP_ERR_INPUT);
    assert_string_equal(error.text, "SIDEPATH_MAX_COUNT: \"lots\" is not a whole number");
}

static void numbers_beyond_64_bits(void **state)
{
    values v;
    sp_error error;

    (void)state;
    PARSE("--seed", "9223372036854775807");
    assert_true(v.seed == INT64_MAX);
    PARSE("--seed", "-9223372036854775808");
    assert_true(v.seed == INT64_MIN);
    assert_int_equal(REFUSED("--seed", "9223372036854775808"), SP_ERR_INPUT);
    assert_non_null(strstr(error.text, "out of range"));
}

static void check_unknown(const char *flag, const char *text)
{
    values v;
    sp_error error;

    assert_int_equal(REFUSED(flag), SP_ERR_ARGUMENT);
    assert_string_equal(error.text, text);
}

static void unknown_flags_suggest_the_nearest(void **state)
{
    char long_flag[200];
    values v;
    sp_error error;

    (void)state;
    check_unknown("--modle", "unknown flag --modle; did you mean --model?");
    check_unknown("--max_count=3", "unknown flag --max_count; did you mean --max-count?");
    check_unknown("--no-verbos", "unknown flag --no-verbos; did you mean --verbose?");
    check_unknown("--no-model", "unknown flag --no-model; did you mean --model?");
    check_unknown("--zzzzzz", "unknown flag --zzzzzz; try --help");
    check_unknown("--=3", "unknown flag --; try --help");
    check_unknown("-v", "unknown flag -v; flags have two dashes (try --help)");
    memset(long_flag, 'x', sizeof long_flag - 1);
    long_flag[0] = long_flag[1] = '-';
    long_flag[sizeof long_flag - 1] = '\0';
    assert_int_equal(REFUSED(long_flag), SP_ERR_ARGUMENT);
    assert_non_null(strstr(error.text, "try --help"));
}

static void a_missing_value_is_named(void **state)
{
    values v;
    sp_error error;

    (void)state;
    assert_int_equal(REFUSED("--verbose", "--model"), SP_ERR_ARGUMENT);
    assert_string_equal(error.text, "--model needs a value (DIR)");
    assert_int_equal(REFUSED("--cpu-isa"), SP_ERR_ARGUMENT);
    assert_string_equal(error.text, "--cpu-isa needs a value (auto|scalar|avx2)");
}

static void memory_may_run_out(void **state)
{
    values v;
    sp_setting_list positional;
    sp_error error;
    size_t blocks = sp_alloc_blocks();

    (void)state;
    for (int n = 0; n < 4; n++) {
        sp_alloc_fail_after(n);
        assert_int_equal(
            parse(&v, &positional, &error, "--adapter", "a", "one", "--adapter", "b", "two", NULL),
            SP_ERR_MEMORY);
        assert_int_equal(v.adapters.n + positional.n, 0);
        assert_int_equal(sp_alloc_blocks(), blocks);
    }
}

/* ---- help ---------------------------------------------------------------------------------- */

static void help_is_printed_exactly(void **state)
{
    static const char want[] =
        "  --verbose                   say more [false] (SIDEPATH_VERBOSE)\n"
        "  --[no-]color                color the output [true] (SIDEPATH_COLOR)\n"
        "  --max-count N               how many [8] (SIDEPATH_MAX_COUNT)\n"
        "  --seed N                    seed of the generator (SIDEPATH_SEED)\n"
        "  --rate R                    how fast [0.5] (SIDEPATH_RATE)\n"
        "  --model DIR                 the base model\n"
        "  --cpu-isa auto|scalar|avx2  the instruction set [auto] (SIDEPATH_CPU_ISA)\n"
        "  --device-order cpu-first|cuda-first\n"
        "                              what is tried first (SIDEPATH_DEVICE_ORDER)\n"
        "  --adapter NAME=DIR          an adapter; repeatable (SIDEPATH_ADAPTER)\n";
    char *text = NULL;
    size_t bytes;
    FILE *stream = open_memstream(&text, &bytes);

    (void)state;
    sp_settings_print_help(stream, settings, N_SETTINGS);
    fclose(stream);
    assert_string_equal(text, want);
    free(text);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, clean, clean)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(defaults),
        TEST(flags_of_every_type),
        TEST(values_may_look_like_flags),
        TEST(the_last_flag_wins),
        TEST(flags_beat_the_environment_beats_defaults),
        TEST(a_listed_default_is_replaced_too),
        TEST(words_for_yes_and_no),
        TEST(positional_arguments),
        TEST(wrong_values_name_their_source),
        TEST(numbers_beyond_64_bits),
        TEST(unknown_flags_suggest_the_nearest),
        TEST(a_missing_value_is_named),
        TEST(memory_may_run_out),
        TEST(help_is_printed_exactly),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
