#include "grammar/regex_tree.h"

#include "base/alloc.h"
#include "base/error.h"
#include "base/text.h"
#include "grammar/regex.h"

#include <stdlib.h>
#include <string.h>

#define GROUPS_MAX    64 /* one in another */
#define SURROGATE_LOW 0xd800
#define SURROGATE_END 0xdfff

typedef struct reader {
    const char *begin, *at, *end;
    sp_regex_tree *tree;
    sp_status status;
    sp_error *error;
    int groups;
} reader;

/* ---- failures ------------------------------------------------------------------------------ */

static void refuse(reader *in, const char *code, const char *what)
{
    if (in->status == SP_OK)
        in->status = sp_fail(in->error, SP_ERR_INPUT, code, NULL, in->at - in->begin,
                             "a pattern with %s, at its byte %td", what, in->at - in->begin);
}

static void malformed(reader *in, const char *what)
{
    refuse(in, SP_GRAMMAR_MALFORMED, what);
}

static void unsupported(reader *in, const char *what)
{
    refuse(in, SP_GRAMMAR_UNSUPPORTED, what);
}

/* ---- nodes --------------------------------------------------------------------------------- */

int32_t sp_regex_node_add(sp_regex_tree *tree, sp_regex_kind kind)
{
    if (!tree->failed && tree->n_nodes == tree->nodes_capacity) {
        int32_t capacity = tree->nodes_capacity ? tree->nodes_capacity * 2 : 32;
        sp_regex_node *grown = sp_realloc(tree->nodes, (size_t)capacity * sizeof *grown);

        tree->failed = !grown;
        if (grown) {
            tree->nodes = grown;
            tree->nodes_capacity = capacity;
        }
    }
    if (tree->failed)
        return 0;
    tree->nodes[tree->n_nodes] = (sp_regex_node){.kind = kind, .child = -1, .last = -1, .next = -1};
    return tree->n_nodes++;
}

void sp_regex_child_add(sp_regex_tree *tree, int32_t parent, int32_t child)
{
    sp_regex_node *nodes = tree->nodes;

    if (tree->failed)
        return;
    if (nodes[parent].last >= 0)
        nodes[nodes[parent].last].next = child;
    else
        nodes[parent].child = child;
    nodes[parent].last = child;
}

int32_t sp_regex_repeat_add(sp_regex_tree *tree, int32_t item, int32_t least, int32_t most)
{
    int32_t repeat = sp_regex_node_add(tree, SP_REGEX_REPEAT);

    sp_regex_child_add(tree, repeat, item);
    if (!tree->failed) {
        tree->nodes[repeat].least = least;
        tree->nodes[repeat].most = most;
    }
    return repeat;
}

void sp_regex_range_add(sp_regex_tree *tree, int32_t low, int32_t high)
{
    if (!tree->failed && tree->n_ranges == tree->ranges_capacity) {
        int32_t capacity = tree->ranges_capacity ? tree->ranges_capacity * 2 : 64;
        sp_code_range *grown = sp_realloc(tree->ranges, (size_t)capacity * sizeof *grown);

        tree->failed = !grown;
        if (grown) {
            tree->ranges = grown;
            tree->ranges_capacity = capacity;
        }
    }
    if (!tree->failed)
        tree->ranges[tree->n_ranges++] = (sp_code_range){low, high};
}

/* The same for a pattern's reader, which keeps the failure. */
static void keep_failure(reader *in)
{
    if (in->tree->failed && in->status == SP_OK)
        in->status = sp_fail_memory(in->error, 0, "a pattern");
}

static int32_t add_node(reader *in, sp_regex_kind kind)
{
    int32_t node = sp_regex_node_add(in->tree, kind);

    keep_failure(in);
    return node;
}

static void add_child(reader *in, int32_t parent, int32_t child)
{
    if (in->status == SP_OK)
        sp_regex_child_add(in->tree, parent, child);
}

static void add_range(reader *in, int32_t low, int32_t high)
{
    sp_regex_range_add(in->tree, low, high);
    keep_failure(in);
}

/* ---- classes ------------------------------------------------------------------------------- */

static int by_low(const void *left, const void *right)
{
    const sp_code_range *a = left, *b = right;

    return (a->low > b->low) - (a->low < b->low);
}

/* Puts ranges [first, n_ranges) in order and joins those that touch. */
static void settle(sp_regex_tree *tree, int32_t first)
{
    sp_code_range *ranges = tree->ranges;
    int32_t n = first;

    if (tree->n_ranges == first)
        return;
    qsort(ranges + first, (size_t)(tree->n_ranges - first), sizeof *ranges, by_low);
    for (int32_t i = first + 1; i < tree->n_ranges; i++) {
        if (ranges[i].low <= ranges[n].high + 1)
            ranges[n].high = ranges[i].high > ranges[n].high ? ranges[i].high : ranges[n].high;
        else
            ranges[++n] = ranges[i];
    }
    tree->n_ranges = n + 1;
}

/* Replaces ranges [first, n_ranges), which are settled, by all other characters. */
static void invert(sp_regex_tree *tree, int32_t first)
{
    int32_t n = tree->n_ranges, low = 0;

    for (int32_t i = first; i < n; i++) {
        const sp_code_range range = tree->ranges[i];

        if (range.low > low)
            sp_regex_range_add(tree, low, range.low - 1);
        low = range.high + 1;
    }
    if (low <= SP_CODE_POINT_MAX)
        sp_regex_range_add(tree, low, SP_CODE_POINT_MAX);
    if (tree->failed)
        return;
    memmove(tree->ranges + first, tree->ranges + n,
            (size_t)(tree->n_ranges - n) * sizeof *tree->ranges);
    tree->n_ranges -= n - first;
}

static void drop_surrogates(sp_regex_tree *tree, int32_t first)
{
    int32_t n = tree->n_ranges;

    for (int32_t i = first; i < n && !tree->failed; i++) {
        sp_code_range *range = &tree->ranges[i];
        int32_t high = range->high;

        if (range->low > SURROGATE_END || high < SURROGATE_LOW)
            continue;
        range->high = SURROGATE_LOW - 1;
        if (high > SURROGATE_END)
            sp_regex_range_add(tree, SURROGATE_END + 1, high);
    }
    for (int32_t i = n - 1; i >= first; i--) /* one that was all surrogates is empty now */
        if (tree->ranges[i].low > tree->ranges[i].high) {
            memmove(tree->ranges + i, tree->ranges + i + 1,
                    (size_t)(tree->n_ranges - i - 1) * sizeof *tree->ranges);
            tree->n_ranges--;
        }
    settle(tree, first);
}

int32_t sp_regex_class_add(sp_regex_tree *tree, int32_t first, bool inverted)
{
    int32_t node;

    if (tree->failed)
        return 0;
    settle(tree, first);
    if (inverted)
        invert(tree, first);
    drop_surrogates(tree, first);
    node = sp_regex_node_add(tree, SP_REGEX_CLASS);
    if (!tree->failed) {
        tree->nodes[node].first = first;
        tree->nodes[node].n = tree->n_ranges - first;
    }
    return node;
}

static int32_t end_class(reader *in, int32_t first, bool inverted)
{
    int32_t node = sp_regex_class_add(in->tree, first, inverted);

    keep_failure(in);
    return node;
}

/* The ranges of \d, \w, \s and of their negations. False: it is another letter. */
static bool add_shorthand(reader *in, char letter)
{
    int32_t first = in->tree->n_ranges;

    switch (letter | 0x20) {
    case 'd':
        add_range(in, '0', '9');
        break;
    case 'w':
        add_range(in, '0', '9');
        add_range(in, 'A', 'Z');
        add_range(in, '_', '_');
        add_range(in, 'a', 'z');
        break;
    case 's':
        add_range(in, '\t', '\r');
        add_range(in, ' ', ' ');
        break;
    default:
        return false;
    }
    if (in->status == SP_OK && !(letter & 0x20)) {
        invert(in->tree, first);
        keep_failure(in);
    }
    return true;
}

/* ---- characters ---------------------------------------------------------------------------- */

int32_t sp_regex_hex_digit(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    c |= 0x20;
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

static int32_t read_hex(reader *in, int digits)
{
    int32_t value = 0;

    for (int i = 0; i < digits; i++) {
        int32_t digit = in->at < in->end ? sp_regex_hex_digit(*in->at) : -1;

        if (digit < 0) {
            malformed(in, "an escape that is cut short");
            return 0;
        }
        value = value * 16 + digit;
        in->at++;
    }
    return value;
}

/* After the backslash: one character, for those escapes that are one. */
static int32_t read_escape(reader *in)
{
    static const char letters[] = "nrtfv0", values[] = "\n\r\t\f\v\0";
    const char *found;
    char c = *in->at++;

    if (c == 'x')
        return read_hex(in, 2);
    if (c == 'u')
        return read_hex(in, 4);
    found = c != '\0' ? strchr(letters, c) : NULL;
    if (found && c == '0' && in->at < in->end && *in->at >= '0' && *in->at <= '9')
        found = NULL;
    if (found)
        return values[found - letters];
    if ((unsigned char)c < 0x80 && c > ' ' && !((c | 0x20) >= 'a' && (c | 0x20) <= 'z') &&
        !(c >= '0' && c <= '9'))
        return c;
    in->at--;
    unsupported(in, c >= '1' && c <= '9' ? "a back reference" : "an escape that is not known here");
    in->at++;
    return 0;
}

int32_t sp_regex_code_point(const char **at, const char *end)
{
    const unsigned char *bytes = (const unsigned char *)*at;
    size_t n = sp_utf8_sequence_bytes(*at, (size_t)(end - *at));

    *at += n ? n : 1;
    switch (n) {
    case 1:
        return bytes[0];
    case 2:
        return (bytes[0] & 0x1f) << 6 | (bytes[1] & 0x3f);
    case 3:
        return (bytes[0] & 0x0f) << 12 | (bytes[1] & 0x3f) << 6 | (bytes[2] & 0x3f);
    case 4:
        return (bytes[0] & 0x07) << 18 | (bytes[1] & 0x3f) << 12 | (bytes[2] & 0x3f) << 6 |
               (bytes[3] & 0x3f);
    default:
        return -1;
    }
}

static int32_t read_code_point(reader *in)
{
    int32_t character = sp_regex_code_point(&in->at, in->end);

    if (character < 0)
        malformed(in, "bytes that are no UTF-8");
    return character < 0 ? 0 : character;
}

/* A member of a class that may begin or end a range; -1: it was a shorthand, whose ranges were
 * added. */
static int32_t read_member(reader *in)
{
    if (*in->at != '\\')
        return read_code_point(in);
    in->at++;
    if (in->at == in->end) {
        malformed(in, "a backslash at its end");
        return 0;
    }
    if (add_shorthand(in, *in->at)) {
        in->at++;
        return -1;
    }
    if (*in->at == 'b') { /* the backspace, in a class */
        in->at++;
        return '\b';
    }
    return read_escape(in);
}

static void read_class_range(reader *in)
{
    int32_t low, high;

    if (in->end - in->at > 1 && in->at[0] == '[' && in->at[1] == ':') {
        unsupported(in, "a class by name");
        return;
    }
    low = high = read_member(in);
    if (in->end - in->at > 1 && in->at[0] == '-' && in->at[1] != ']') {
        in->at++;
        high = read_member(in);
        if (in->status == SP_OK && (low < 0 || high < low))
            malformed(in, "a range that is in no order");
    }
    if (low >= 0)
        add_range(in, low, high);
}

/* After "[". */
static int32_t read_class(reader *in)
{
    int32_t first = in->tree->n_ranges;
    bool inverted = in->at < in->end && *in->at == '^';

    in->at += inverted;
    if (in->at < in->end && *in->at == ']')
        unsupported(in, "an empty class");
    while (in->status == SP_OK && in->at < in->end && *in->at != ']')
        read_class_range(in);
    if (in->status == SP_OK && in->at == in->end)
        malformed(in, "a class without its end");
    in->at++;
    if (in->status != SP_OK)
        return 0;
    return end_class(in, first, inverted);
}

static int32_t one_character(reader *in, int32_t character)
{
    int32_t first = in->tree->n_ranges;

    add_range(in, character, character);
    return in->status == SP_OK ? end_class(in, first, false) : 0;
}

/* ---- the expression ------------------------------------------------------------------------ */

static int32_t read_choice(reader *in);

/* After "(". */
static int32_t read_group(reader *in)
{
    int32_t node;

    if (in->end - in->at >= 2 && in->at[0] == '?' && in->at[1] == ':')
        in->at += 2;
    else if (in->at < in->end && *in->at == '?')
        unsupported(in, "a group that is more than a group (looking around, a name, a flag)");
    if (++in->groups > GROUPS_MAX)
        unsupported(in, "too many groups in one another");
    node = in->status == SP_OK ? read_choice(in) : 0;
    in->groups--;
    if (in->status == SP_OK && (in->at == in->end || *in->at != ')'))
        malformed(in, "a group without its end");
    in->at++;
    return node;
}

static int32_t read_atom_escape(reader *in)
{
    int32_t first = in->tree->n_ranges;

    if (in->at == in->end) {
        malformed(in, "a backslash at its end");
        return 0;
    }
    if (!add_shorthand(in, *in->at)) {
        int32_t character = read_escape(in);

        return in->status == SP_OK ? one_character(in, character) : 0;
    }
    in->at++;
    return in->status == SP_OK ? end_class(in, first, false) : 0;
}

static int32_t any_character(reader *in)
{
    int32_t first = in->tree->n_ranges;

    add_range(in, '\n', '\n');
    return in->status == SP_OK ? end_class(in, first, true) : 0;
}

static int32_t read_atom(reader *in)
{
    char c = *in->at;

    if (strchr("(.[\\", c) && c != '\0')
        in->at++;
    switch (c) {
    case '(':
        return read_group(in);
    case '[':
        return read_class(in);
    case '.':
        return any_character(in);
    case '\\':
        return read_atom_escape(in);
    case '^':
    case '$':
        unsupported(in, "an anchor inside");
        return 0;
    case '*':
    case '+':
    case '?':
        malformed(in, "a repetition of nothing");
        return 0;
    default: {
        int32_t character = read_code_point(in);

        return in->status == SP_OK ? one_character(in, character) : 0;
    }
    }
}

static int32_t read_number(reader *in)
{
    int32_t number = 0;
    const char *begin = in->at;

    while (in->at < in->end && *in->at >= '0' && *in->at <= '9' && number <= SP_REGEX_REPEAT_MAX)
        number = number * 10 + (*in->at++ - '0');
    if (in->at == begin)
        malformed(in, "braces without a number");
    if (number > SP_REGEX_REPEAT_MAX)
        unsupported(in, "a count above 2000");
    return number;
}

/* After "{". */
static void read_counts(reader *in, int32_t *least, int32_t *most)
{
    *least = *most = read_number(in);
    if (in->at < in->end && *in->at == ',') {
        in->at++;
        *most = in->at < in->end && *in->at == '}' ? -1 : read_number(in);
    }
    if (in->status == SP_OK && (in->at == in->end || *in->at != '}'))
        malformed(in, "braces that are no count");
    in->at++;
    if (in->status == SP_OK && *most >= 0 && *most < *least)
        malformed(in, "a count that is in no order");
}

/* False: no repetition comes next. */
static bool read_repetition(reader *in, int32_t *least, int32_t *most)
{
    char c = in->at < in->end ? *in->at : '\0';

    if (c != '*' && c != '+' && c != '?' && c != '{')
        return false;
    in->at++;
    *least = c == '+';
    *most = c == '?' ? 1 : -1;
    if (c == '{')
        read_counts(in, least, most);
    if (in->status == SP_OK && in->at < in->end && *in->at == '?')
        in->at++;
    else if (in->status == SP_OK && in->at < in->end && *in->at == '+')
        unsupported(in, "a repetition that gives nothing back");
    return true;
}

static int32_t repeated(reader *in, int32_t item, int32_t least, int32_t most)
{
    int32_t repeat = sp_regex_repeat_add(in->tree, item, least, most);

    keep_failure(in);
    return repeat;
}

static int32_t read_sequence(reader *in)
{
    int32_t node = add_node(in, SP_REGEX_SEQUENCE);
    bool outer = in->groups == 0, from_start = false, to_end = false;

    if (outer && in->at < in->end && *in->at == '^') {
        from_start = true;
        in->at++;
    }
    while (in->status == SP_OK && in->at < in->end && *in->at != '|' && *in->at != ')') {
        int32_t item, least, most;

        if (outer && *in->at == '$' && (in->at + 1 == in->end || in->at[1] == '|')) {
            to_end = true;
            in->at++;
            break;
        }
        item = read_atom(in);
        if (in->status == SP_OK && read_repetition(in, &least, &most))
            item = repeated(in, item, least, most);
        add_child(in, node, item);
    }
    if (in->status == SP_OK) {
        in->tree->nodes[node].from_start = from_start;
        in->tree->nodes[node].to_end = to_end;
    }
    return node;
}

static int32_t read_choice(reader *in)
{
    int32_t node = add_node(in, SP_REGEX_CHOICE);

    add_child(in, node, read_sequence(in));
    while (in->status == SP_OK && in->at < in->end && *in->at == '|') {
        in->at++;
        add_child(in, node, read_sequence(in));
    }
    return node;
}

sp_status sp_regex_tree_read(const char *pattern, size_t bytes, sp_regex_tree *out_tree,
                             sp_error *error)
{
    reader in = {
        .begin = pattern, .at = pattern, .end = pattern + bytes, .tree = out_tree, .error = error};

    *out_tree = (sp_regex_tree){0};
    if (bytes > SP_REGEX_BYTES_MAX)
        return sp_fail(error, SP_ERR_TOO_LARGE, SP_GRAMMAR_TOO_LARGE, NULL, -1,
                       "a pattern of %zu bytes; at most %d are read", bytes, SP_REGEX_BYTES_MAX);
    out_tree->root = read_choice(&in);
    if (in.status == SP_OK && in.at < in.end)
        malformed(&in, "a bracket that closes nothing");
    return in.status;
}

void sp_regex_tree_free(sp_regex_tree *tree)
{
    sp_free(tree->nodes);
    sp_free(tree->ranges);
    *tree = (sp_regex_tree){0};
}
