/*
 * The interpreter, one construct at a time. What is expected was worked out by hand from Jinja's
 * rules; check_chat.py compares with Jinja itself.
 */
#include "support/test.h"

#include "base/alloc.h"
#include "base/json.h"
#include "chat/chat.h"

#include <string.h>

static const char variables[] =
    "{\"s\": \"abc\", \"blank\": \" \\t x \\n\", \"n\": 7, \"r\": 2.5, \"t\": true, \"z\": null,"
    " \"l\": [3, 1, 2], \"e\": [], \"m\": {\"a\": 1, \"b\": [true, null], \"items\": 5},"
    " \"o\": [{\"k\": \"x\", \"v\": 2}, {\"k\": \"y\"}], \"u\": \"\\u00e9\\u4e2d\\ud83d\\ude00\"}";

static sp_status render(const char *template, const char *kwargs, sp_text *out, sp_error *error)
{
    json_t *messages = json_loads("[{\"role\":\"user\",\"content\":\"hi\"}]", 0, NULL);
    json_t *root = json_loads(kwargs, 0, NULL);
    sp_chat_request request;
    sp_chat_prompt prompt = {0};
    sp_chat *chat = NULL;
    sp_status status = sp_chat_parse(template, strlen(template), "t", NULL, &chat, error);

    assert_non_null(root);
    sp_chat_request_default(&request);
    request.messages = messages;
    request.template_kwargs = root;
    request.unix_seconds = 1700000000; /* 2023-11-14 22:13:20 */
    if (status == SP_OK)
        status = sp_chat_render(chat, &request, &prompt, error);
    if (status == SP_OK)
        sp_text_add_bytes(out, prompt.text.data ? prompt.text.data : "", prompt.text.bytes);
    sp_chat_prompt_free(&prompt);
    sp_chat_close(chat);
    json_decref(root);
    json_decref(messages);
    return status;
}

typedef struct {
    const char *template, *want;
} row;

static void check(const row *rows, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        sp_text text = {0};
        sp_error error = {0};
        sp_status status = render(rows[i].template, variables, &text, &error);

        if (status != SP_OK)
            fail_msg("%s\n%s", rows[i].template, error.text);
        if (strcmp(text.data, rows[i].want) != 0)
            fail_msg("%s\ngives  \"%s\"\nwanted \"%s\"", rows[i].template, text.data, rows[i].want);
        sp_text_free(&text);
    }
}

#define CHECK(...)                               \
    do {                                         \
        static const row rows[] = {__VA_ARGS__}; \
        check(rows, sizeof rows / sizeof *rows); \
    } while (0)

static void test_white_space(void **state)
{
    (void)state;
    CHECK({"a\n", "a"}, {"a\n\n", "a\n"}, {"a\r\nb\rc", "a\nb\nc"},
          {"a{% if t %}\nb{% endif %}\nc", "abc"},      /* the newline behind a tag */
          {"a\n  {% if t %}b{% endif %}c", "a\nbc"},    /* the blanks before one */
          {"a  {% if t %}b{% endif %}c", "a  bc"},      /* which is first in its line */
          {"a\n  {%+ if t %}b{% endif %}c", "a\n  bc"}, /* unless it says + */
          {"a{% if t +%}\nb{% endif %}", "a\nb"},       /* here too */
          {"a \n {%- if t -%} \n b {%- endif -%} \n c", "abc"}, {"  {{ n }}\n", "  7"},
          {"a {{- n -}} b", "a7b"}, {"{{ n }}\nx", "7\nx"}, {"{# c #}\na", "a"},
          {"  {# c #}a", "a"}, {"a {#- c -#} b", "ab"}, {"{% raw %}{{ x }}{% endraw %}", "{{ x }}"},
          {"a{%- raw -%} {% x {%- endraw -%} b", "a{% xb"},
          {"{% if t %}\n  {% if t %}\n  x\n  {% endif %}\n{% endif %}\n", "  x\n"}, );
}

static void test_literals(void **state)
{
    (void)state;
    CHECK({"{{ 'a\\n\\t\\\\\\'\\x41\\u00e9' }}", "a\n\t\\'A\xc3\xa9"}, {"{{ \"a'\" 'b' }}", "a'b"},
          {"{{ 'a\\db' }}", "a\\db"}, {"{{ 12 }}{{ 1.50 }}", "121.5"},
          {"{{ true }}{{ False }}{{ none }}{{ None }}", "TrueFalseNoneNone"},
          {"{{ [1, 'a', none] }}", "[1, 'a', None]"},
          {"{{ {'a': 1, 'b': [2]} }}", "{'a': 1, 'b': [2]}"},
          {"{{ () }}{{ (1,) }}{{ (1, 2) }}", "()(1,)(1, 2)"}, {"{{ 1, 2 }}", "(1, 2)"},
          {"{{ ['it\\'s', 'q\"', '\\n\\x01'] }}", "[\"it's\", 'q\"', '\\n\\x01']"},
          {"{{ '%}' }}{{ '}}' }}", "%}}}"}, {"{{ {'a': {'b': 1}}}}", "{'a': {'b': 1}}"}, );
}

static void test_operators(void **state)
{
    (void)state;
    CHECK({"{{ 1 + 2 * 3 }}", "7"}, {"{{ (1 + 2) * 3 }}", "9"}, {"{{ 7 / 2 }}", "3.5"},
          {"{{ 4 / 2 }}", "2.0"}, {"{{ 7 // 2 }}{{ -7 // 2 }}", "3-4"},
          {"{{ 7 % 3 }}{{ -7 % 3 }}{{ 7 % -3 }}", "12-2"}, {"{{ 2 ** 10 }}", "1024"},
          {"{{ -2 ** 2 }}", "4"}, /* the sign binds tighter, unlike Python's */
          {"{{ 1 ~ 2 ~ 'x' }}", "12x"}, {"{{ 'a' + 1 ~ 2 + 'b' }}", "a12b"}, /* ~ before + */
          {"{{ 'a' + 'b' }}", "ab"}, {"{{ [1] + [2] }}", "[1, 2]"}, {"{{ 'ab' * 2 }}", "abab"},
          {"{{ 1 < 2 <= 2 < 3 }}", "True"}, {"{{ 1 < 2 > 3 }}", "False"},
          {"{{ 'a' < 'b' }}{{ 'B' < 'a' }}", "TrueTrue"},
          {"{{ 1 == 1.0 }}{{ 1 == true }}", "TrueTrue"},
          {"{{ [1, {'a': 2}] == [1, {'a': 2}] }}", "True"},
          {"{{ 'b' in s }}{{ 'x' in s }}", "TrueFalse"},
          {"{{ 1 in l }}{{ 9 not in l }}{{ 'a' in m }}", "TrueTrueTrue"},
          {"{{ not t }}{{ not e }}", "FalseTrue"}, {"{{ e or 'x' }}{{ s and n }}", "x7"},
          {"{{ 'y' if t else 'n' }}{{ 'y' if z }}", "y"},
          {"{{ 'a' if z else 'b' if z else 'c' }}", "c"},
          {"{{ 0.1 + 0.2 }} {{ 10.0 ** 16 }} {{ 1 / 3 }}",
           "0.30000000000000004 1e+16 0.3333333333333333"},
          {"{{ 10.0 ** -5 }} {{ 10.0 ** -4 }} {{ 123456.0 }}", "1e-05 0.0001 123456.0"}, );
}

static void test_attributes(void **state)
{
    (void)state;
    CHECK({"{{ m.a }}{{ m['a'] }}", "11"}, {"{{ m['items'] }}", "5"}, /* a key before a method */
          {"{{ m.items()|length }}", "3"},                            /* and the other way round */
          {"{{ m.x is defined }}{{ m['x'] is defined }}", "FalseFalse"}, {"{{ m.x }}", ""},
          {"{{ l[0] }}{{ l[-1] }}{{ l[9] }}{{ l.1 }}", "321"}, {"{{ s[1] }}{{ s[-1] }}", "bc"},
          {"{{ u[1] }}", "\xe4\xb8\xad"},
          {"{{ l[::-1] }}{{ l[1:] }}{{ l[:-1] }}", "[2, 1, 3][1, 2][3, 1]"},
          {"{{ s[::-1] }}{{ s[1:] }}{{ s[:-1] }}{{ s[5:] }}{{ s[-2:2] }}", "cbabcabb"},
          {"{{ u[1:] }}{{ u[::-1] }}",
           "\xe4\xb8\xad\xf0\x9f\x98\x80\xf0\x9f\x98\x80\xe4\xb8\xad\xc3\xa9"},
          {"{{ [1, 2, 3, 4, 5][1:4:2] }}{{ [1, 2, 3, 4][3:0:-2] }}", "[2, 4][4, 2]"},
          {"{{ messages[0].role }}:{{ messages[0]['content'] }}", "user:hi"}, );
}

static void test_statements(void **state)
{
    (void)state;
    CHECK(
        {"{% if e %}a{% elif n == 7 %}b{% else %}c{% endif %}", "b"},
        {"{% for x in l %}{{ x }}{% if not loop.last %},{% endif %}{% endfor %}", "3,1,2"},
        {"{% for x in e %}x{% else %}none{% endfor %}", "none"},
        {"{% for x in l if x > 1 %}{{ loop.index }}/{{ loop.length }}:{{ x }} {% endfor %}",
         "1/2:3 2/2:2 "},
        {"{% for k, v in m.items() %}{{ k }}={{ v }};{% endfor %}", "a=1;b=[True, None];items=5;"},
        {"{% for k in m %}{{ k }}{% endfor %}", "abitems"},
        {"{% for c in s %}<{{ c }}>{% endfor "
         "%}",
         "<a><b><c>"},
        {"{% for x in l %}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}"
         "{{ loop.first }}{{ loop.previtem }}{{ loop.nextitem }} {% endfor %}",
         "032True1 121False32 210False1 "},
        {"{% for x in l %}{% if x == 1 %}{% continue %}{% endif %}{{ x }}{% endfor %}", "32"},
        {"{% for x in l %}{% if x == 1 %}{% break %}{% endif %}{{ x }}{% endfor %}", "3"},
        {"{% set a, b = 1, 2 %}{{ a }}{{ b }}", "12"},
        {"{% set x = 1 %}{% for i in l %}{{ x }}{% set x = 2 %}{{ x }}{% endfor %}{{ x }}",
         "1212121"},
        {"{% set x = 1 %}{% if t %}{% set x = 2 %}{% endif %}{{ x }}", "2"},
        {"{% set ns = namespace(c=0) %}{% for i in l %}{% set ns.c = ns.c + i %}{% endfor %}"
         "{{ ns.c }}",
         "6"},
        {"{% set x %}a{{ n }}{% endset %}[{{ x }}]", "[a7]"},
        {"{% set x | upper | trim %} a{{ s }} {% endset %}[{{ x }}]", "[AABC]"},
        {"{% for i in l %}{% for j in l %}{{ loop.index }}{% endfor %}{{ loop.index }}{% endfor "
         "%}",
         "123112321233"},
        {"{% generation %}a{{ n }}{% endgeneration %}b", "a7b"},
        {"{% for x in nothing %}{% endfor %}ok", "ok"}, );
}

static void test_macros(void **state)
{
    (void)state;
    CHECK({"{% macro f(a, b='x') %}{{ a }}-{{ b }};{% endmacro %}{{ f(1) }}{{ f(1, 2) }}"
           "{{ f(b=3, a=4) }}{{ f() }}",
           "1-x;1-2;4-3;-x;"},
          {"{% macro f(n) %}{% if n > 0 %}{{ n }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(3) }}",
           "321"},
          {"{% macro f() %}{{ g }}{% endmacro %}{% set g = 5 %}{{ f() }}", "5"},
          {"{% macro f() -%} a {%- endmacro %}[{{ f()|upper }}]", "[A]"}, );
}

static void test_filters(void **state)
{
    (void)state;
    CHECK({"[{{ blank|trim }}]", "[x]"}, {"{{ 'xxaxx'|trim('x') }}", "a"},
          {"{{ s|length }}{{ u|length }}{{ m|count }}{{ nothing|length }}", "3330"},
          {"{{ l|join(', ') }}{{ o|join('+', attribute='k') }}", "3, 1, 2x+y"},
          {"{{ nothing|default('d') }}{{ ''|default('d') }}{{ ''|default('d', true) }}", "dd"},
          {"{{ z|d('x', boolean=true) }}", "x"}, {"{{ l|first }}{{ l|last }}{{ s|first }}", "32a"},
          {"{{ 'aB'|upper }}{{ 'aB'|lower }}{{ 'aB cD'|capitalize }}", "ABabAb cd"},
          {"{{ '\xc3\xa9\xd0\xb6\xc3\xbf'|upper }}", "\xc3\x89\xd0\x96\xc5\xb8"},
          {"{{ 'ab-cd e'|title }}|{{ 'a_bc d\\'e'.title() }}", "Ab-Cd E|A_Bc D'E"},
          {"{{ 'aXbX'|replace('X', '--') }}{{ 'aaa'|replace('a', 'b', 2) }}", "a--b--bba"},
          {"{{ l|sort }}{{ l|sort(reverse=true) }}{{ ['b', 'A']|sort }}",
           "[1, 2, 3][3, 2, 1]['A', 'b']"},
          {"{{ l|reverse|list }}{{ s|reverse }}", "[2, 1, 3]cba"},
          {"{{ o|map(attribute='k')|list }}{{ l|map('string')|join }}", "['x', 'y']312"},
          {"{{ o|map(attribute='v', default=0)|list }}", "[2, 0]"},
          {"{{ o|selectattr('v', 'defined')|map(attribute='k')|list }}", "['x']"},
          {"{{ o|rejectattr('k', 'equalto', 'x')|map(attribute='k')|first }}", "y"},
          {"{{ l|select('gt', 1)|list }}{{ l|reject('odd')|list }}", "[3, 2][2]"},
          {"{{ z|select('odd')|list }}{{ nothing|map('upper')|list }}", "[][]"},
          {"{{ [1, 2, 1]|unique|list }}", "[1, 2]"}, {"{{ l|min }}{{ l|max }}", "13"},
          {"{{ '12'|int }}{{ 'x'|int }}{{ 'x'|int(5) }}{{ 2.9|int }}{{ ' 3.7 '|int }}", "120523"},
          {"{{ '1.5'|float }}{{ 'x'|float }}{{ 3|float }}", "1.50.03.0"},
          {"{{ -3|abs }}{{ n|string ~ 'x' }}", "37x"},
          {"{{ 'a\nb\n\nc'|indent(2) }}", "a\n  b\n\n  c"},
          {"{{ 'a\nb'|indent(1, true) }}", " a\n b"},
          {"{{ {'b': 1, 'a': 2}|dictsort }}", "[('a', 2), ('b', 1)]"},
          {"{{ m|items|list }}", "[('a', 1), ('b', [True, None]), ('items', 5)]"},
          {"{{ '<b>'|safe }}{% set x = '<'|safe %}{{ x }}{{ x + x }}{{ 'a' ~ x }}", "<b><<<a<"},
          {"{{ 'a' ~ ' b '|trim ~ 'c' }}", "abc"}, );
}

static void test_tojson(void **state)
{
    (void)state;
    CHECK({"{{ m|tojson }}", "{\"a\": 1, \"b\": [true, null], \"items\": 5}"},
          {"{{ '<a> & \\'b\\' \"c\" \\\\ \\n \\x01'|tojson }}",
           "\"<a> & 'b' \\\"c\\\" \\\\ \\n \\u0001\""},
          {"{{ u|tojson }}", "\"\xc3\xa9\xe4\xb8\xad\xf0\x9f\x98\x80\""},
          {"{{ u|tojson(ensure_ascii=true) }}", "\"\\u00e9\\u4e2d\\ud83d\\ude00\""},
          {"{{ r|tojson }}{{ 1.0|tojson }}", "2.51.0"},
          {"{{ {'a': [1, {}], 'b': []}|tojson(indent=2) }}",
           "{\n  \"a\": [\n    1,\n    {}\n  ],\n  \"b\": []\n}"},
          {"{{ {'b': 1, 'a': 2}|tojson(sort_keys=true) }}", "{\"a\": 2, \"b\": 1}"},
          {"{{ {'b': 1, 'a': 2}|tojson(separators=(',', ':')) }}", "{\"b\":1,\"a\":2}"}, );
}

static void test_tests(void **state)
{
    (void)state;
    CHECK({"{{ s is string }}{{ n is string }}", "TrueFalse"},
          {"{{ m is mapping }}{{ l is mapping }}", "TrueFalse"},
          {"{{ l is iterable }}{{ s is iterable }}{{ n is iterable }}", "TrueTrueFalse"},
          {"{{ l is sequence }}{{ z is sequence }}", "TrueFalse"},
          {"{{ z is none }}{{ nothing is none }}{{ z is defined }}", "TrueFalseTrue"},
          {"{{ t is true }}{{ t is false }}{{ n is true }}", "TrueFalseFalse"},
          {"{{ t is boolean }}{{ n is boolean }}", "TrueFalse"},
          {"{{ n is number }}{{ r is number }}{{ s is number }}", "TrueTrueFalse"},
          {"{{ n is integer }}{{ r is float }}{{ t is integer }}", "TrueTrueFalse"},
          {"{{ n is odd }}{{ n is even }}{{ 9 is divisibleby 3 }}", "TrueFalseTrue"},
          {"{{ n is not none and n is not string }}", "True"},
          {"{{ nothing is undefined }}{{ n is eq 7 }}{{ n is in [7] }}", "TrueTrueTrue"},
          {"{{ range is callable }}{{ 'ab' is lower }}{{ 'ab' is upper }}", "TrueTrueFalse"},
          {"{{ not z is none }}", "False"}, );
}

static void test_methods(void **state)
{
    (void)state;
    CHECK(
        {"{{ s.startswith('ab') }}{{ s.endswith(('x', 'c')) }}", "TrueTrue"},
        {"{{ 'a,b,c'.split(',') }}{{ 'a,b,c'.split(',', 1) }}", "['a', 'b', 'c']['a', 'b,c']"},
        {"{{ 'a,b,c'.rsplit(',', 1) }}{{ ' a  b '.split() }}", "['a,b', 'c']['a', 'b']"},
        {"{{ ''.split(',') }}{{ ''.split() }}", "[''][]"},
        {"[{{ blank.strip() }}][{{ 'xax'.lstrip('x') }}][{{ 'xax'.rstrip('x') }}]", "[x][ax][xa]"},
        {"{{ '\\nab'.lstrip('\\n') }}{{ '[]a'.strip('[]') }}", "aba"},
        {"{{ 'aXb'.replace('X', '') }}{{ 'ab'.upper() }}{{ 'AB'.lower() }}", "abABab"},
        {"{{ 'ab'.replace('', '-') }}", "-a-b-"},
        {"{{ u.find('\xe4\xb8\xad') }}{{ s.find('x') }}", "1-1"},
        {"{{ 'a-a'.rfind('a') }}{{ 'aaa'.count('a') }}", "23"},
        {"{{ '/'.join(['a', 'b']) }}{{ 'a\\nb\\r\\nc'.splitlines() }}", "a/b['a', 'b', 'c']"},
        {"{{ 'abc'.removeprefix('a') }}{{ 'abc'.removesuffix('x') }}", "bcabc"},
        {"{{ m.get('a') }}{{ m.get('x') }}{{ m.get('x', 9) }}", "1None9"},
        {"{{ m.keys()|list }}{{ o[0].values()|list }}", "['a', 'b', 'items']['x', 2]"},
        {"{{ l.index(1) }}{{ l.count(3) }}", "11"}, );
}

static void test_functions(void **state)
{
    (void)state;
    CHECK({"{{ range(3)|list }}{{ range(1, 7, 3)|list }}{{ range(3, 0, -1)|list }}",
           "[0, 1, 2][1, 4][3, 2, 1]"},
          {"{{ dict(a=1, b='x') }}", "{'a': 1, 'b': 'x'}"},
          {"{{ strftime_now('%Y-%m-%d %H:%M:%S %d %b %A') }}",
           "2023-11-14 22:13:20 14 Nov Tuesday"}, );
}

/* Every template is refused with this code, and the text says this. */
static const struct {
    const char *template, *code, *says;
} refused[] = {
    {"a\n{% include 'x' %}", SP_CHAT_UNSUPPORTED, "line 2: the tag is not supported: include"},
    {"{% call f() %}{% endcall %}", SP_CHAT_UNSUPPORTED, "call"},
    {"{% nonsense %}", SP_CHAT_MALFORMED, "nonsense"},
    {"{{ x|wordwrap }}", SP_CHAT_UNSUPPORTED, "wordwrap"},
    {"{{ x is frozen }}", SP_CHAT_UNSUPPORTED, "frozen"},
    {"{% if t %}{{ s|wordwrap }}{% endif %}", SP_CHAT_UNSUPPORTED, "no such filter: wordwrap"},
    {"{{ '<' + s|safe }}", SP_CHAT_UNSUPPORTED, "safe"},
    {"{% set x = s|safe %}{{ x + '\\'' }}", SP_CHAT_UNSUPPORTED, "safe"},
    {"{{ (s|safe)|upper }}", SP_CHAT_UNSUPPORTED, "safe"},
    {"{% for x in l recursive %}{% endfor %}", SP_CHAT_UNSUPPORTED, "recursive"},
    {"{{ s.format(1) }}", SP_CHAT_UNSUPPORTED, "format"},
    {"{{ s.__class__ }}", SP_CHAT_UNSUPPORTED, "__class__"},
    {"{{ l.append(1) }}", SP_CHAT_UNSUPPORTED, "append"},
    {"{{ m.update(l) }}", SP_CHAT_UNSUPPORTED, "update"},
    {"{{ '%s' % s }}", SP_CHAT_UNSUPPORTED, "%"},
    {"{{ cycler(1) }}", SP_CHAT_UNSUPPORTED, "cycler"},
    {"{{ f(*l) }}", SP_CHAT_UNSUPPORTED, "unpacked"},
    {"{{ {1: 2} }}", SP_CHAT_UNSUPPORTED, "a key that is an integer"},
    {"{{ '\xc3\x9f'|upper }}", SP_CHAT_UNSUPPORTED, "case"},
    {"{{ 9223372036854775807 }}", SP_CHAT_UNSUPPORTED, "18 digits"},
    {"{{ 999999999999999999 * 99 }}", SP_CHAT_UNSUPPORTED, "64 bits"},
    {"{{ loop.cycle(1) }}{% for x in l %}{{ loop.cycle(1) }}{% endfor %}", SP_CHAT_FAILED,
     "loop is undefined"},
    {"{{ strftime_now('%Q') }}", SP_CHAT_UNSUPPORTED, "strftime_now"},
    {"{{ x", SP_CHAT_MALFORMED, "does not end"},
    {"{{ 'x }}", SP_CHAT_MALFORMED, "string"},
    {"{# x", SP_CHAT_MALFORMED, "comment"},
    {"{% if t %}", SP_CHAT_MALFORMED, "expected"},
    {"{% if t %}\n\n{% endfor %}", SP_CHAT_MALFORMED, "line 3: unexpected tag: endfor"},
    {"{% endif %}", SP_CHAT_MALFORMED, "endif"},
    {"{{ (1 }}", SP_CHAT_MALFORMED, "line 1"},
    {"{{ 1) }}", SP_CHAT_MALFORMED, "bracket"},
    {"{{ }}", SP_CHAT_MALFORMED, "expression"},
    {"{% break %}", SP_CHAT_MALFORMED, "loop"},
    {"{% raw %}", SP_CHAT_MALFORMED, "endraw"},
    {"{{ a b }}", SP_CHAT_MALFORMED, "line 1"},
    {"a\n\n{{ nothing.x }}", SP_CHAT_FAILED, "line 3: nothing is undefined"},
    {"{{ f() }}", SP_CHAT_FAILED, "f is undefined"},
    {"{{ 'a' + 1 }}", SP_CHAT_FAILED, "a string and an integer"},
    {"{{ 1 // 0 }}", SP_CHAT_FAILED, "zero"},
    {"{{ s < 1 }}", SP_CHAT_FAILED, "order"},
    {"{% for x in 5 %}{% endfor %}", SP_CHAT_FAILED, "iterable"},
    {"{% for a, b in l %}{% endfor %}", SP_CHAT_FAILED, "iterable"},
    {"{% set s.x = 1 %}", SP_CHAT_FAILED, "namespace"},
    {"{{ nothing|tojson }}", SP_CHAT_FAILED, "JSON"},
    {"{% macro f(a) %}{% endmacro %}{{ f(1, 2) }}", SP_CHAT_FAILED, "argument"},
    {"{{ raise_exception('no ' ~ n) }}", SP_CHAT_RAISED, "refuses: no 7"},
    {"{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", SP_CHAT_LIMIT, "deep"},
    {"{% for i in range(100000000) %}{% endfor %}", SP_CHAT_LIMIT, "line 1"},
    {"{{ 'abcdefgh' * 1000000000 }}", SP_CHAT_LIMIT, "line 1"},
};

static void test_refusals(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        sp_text text = {0};
        sp_error error = {0};
        sp_status status = render(refused[i].template, variables, &text, &error);

        if (status == SP_OK)
            fail_msg("%s gives \"%s\"", refused[i].template, text.data ? text.data : "");
        if (strcmp(error.code, refused[i].code) != 0 || !strstr(error.text, refused[i].says))
            fail_msg("%s: %s: %s", refused[i].template, error.code, error.text);
        assert_int_equal(status, strcmp(refused[i].code, SP_CHAT_UNSUPPORTED) == 0
                                     ? SP_ERR_UNSUPPORTED
                                 : strcmp(refused[i].code, SP_CHAT_LIMIT) == 0 ? SP_ERR_TOO_LARGE
                                                                               : SP_ERR_INPUT);
        sp_text_free(&text);
    }
}

/* Nesting of every kind ends in a refusal, never on the stack. */
static void test_deep(void **state)
{
    static const char *const parts[][3] = {
        {"{{ ", "(", "1"},     {"{{ ", "[", "1"},
        {"{{ ", "-", "1"},     {"{{ ", "not ", "1"},
        {"{{ ", "f(", "1"},    {"{{ a", "[b", "1"},
        {"{{ ", "{'a':", "1"}, {"", "{% if t %}", ""},
        {"{{ ", "1 if ", "1"}, {"", "{% for x in l %}", ""},
    };

    (void)state;
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        sp_text source = {0}, text = {0};
        sp_error error = {0};

        sp_text_add(&source, parts[i][0]);
        for (int k = 0; k < 20000; k++)
            sp_text_add(&source, parts[i][1]);
        sp_text_add(&source, parts[i][2]);
        assert_int_not_equal(render(source.data, "{}", &text, &error), SP_OK);
        assert_true(error.code[0] == 'c');
        sp_text_free(&text);
        sp_text_free(&source);
    }
}

/* A long sum nests to the left: it is read in a loop, and refused when it runs. */
static void test_long_sum(void **state)
{
    sp_text source = {0}, text = {0};
    sp_error error = {0};

    (void)state;
    sp_text_add(&source, "{{ 1");
    for (int i = 0; i < 20000; i++)
        sp_text_add(&source, "+1");
    sp_text_add(&source, " }}");
    assert_int_equal(render(source.data, "{}", &text, &error), SP_ERR_TOO_LARGE);
    assert_string_equal(error.code, SP_CHAT_LIMIT);
    sp_text_free(&text);
    sp_text_free(&source);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_white_space), cmocka_unit_test(test_literals),
        cmocka_unit_test(test_operators),   cmocka_unit_test(test_attributes),
        cmocka_unit_test(test_statements),  cmocka_unit_test(test_macros),
        cmocka_unit_test(test_filters),     cmocka_unit_test(test_tojson),
        cmocka_unit_test(test_tests),       cmocka_unit_test(test_methods),
        cmocka_unit_test(test_functions),   cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_deep),        cmocka_unit_test(test_long_sum),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
