#include "engine/tokenizer/tokenizer_settings.h"

#include "base/error.h"

#include <string.h>

#define META "\xe2\x96\x81" /* U+2581, the blank of a sentencepiece vocabulary */

sp_status sp_tokenizer_refuse(sp_error *error, const char *field, const char *why)
{
    return sp_fail(error, SP_ERR_INPUT, SP_TOKENIZER_UNSUPPORTED, field, -1, "%s: %s", field, why);
}

sp_status sp_tokenizer_malformed(sp_error *error, const char *subject, int64_t position,
                                 const char *why)
{
    return sp_fail(error, SP_ERR_INPUT, SP_TOKENIZER_MALFORMED, subject, position, "%s: %s",
                   subject, why);
}

bool sp_tokenizer_absent(const json_t *value)
{
    return !value || json_is_null(value);
}

static bool text_is(const json_t *object, const char *field, const char *text)
{
    const char *found = json_string_value(json_object_get(object, field));

    return found && strcmp(found, text) == 0;
}

static bool type_is(const json_t *object, const char *type)
{
    return text_is(object, "type", type);
}

/* --- Normaliser -------------------------------------------------------------------------- */

/* A step {"type":"Replace","pattern":{"String":from},"content":to}. */
static bool is_replace(const json_t *step, const char *from, const char *to)
{
    return type_is(step, "Replace") && text_is(json_object_get(step, "pattern"), "String", from) &&
           text_is(step, "content", to);
}

static sp_status read_normalizer(const json_t *root, sp_tokenizer *tokenizer, sp_error *error)
{
    const char *field = "normalizer";
    const json_t *normalizer = json_object_get(root, field);
    const json_t *steps = json_object_get(normalizer, "normalizers");
    const json_t *first = json_array_get(steps, 0);
    size_t n = json_array_size(steps);
    bool prepends = n == 2 && type_is(first, "Prepend") && text_is(first, "prepend", META);

    tokenizer->nfc = type_is(normalizer, "NFC");
    if (tokenizer->nfc || sp_tokenizer_absent(normalizer))
        return SP_OK;
    if (!type_is(normalizer, "Sequence") || (n == 2 && !prepends) || n < 1 || n > 2 ||
        !is_replace(json_array_get(steps, n - 1), " ", META))
        return sp_tokenizer_refuse(error, field,
                                   "only NFC, null, or a Sequence of Prepend U+2581 (or not) and "
                                   "Replace of a blank by U+2581");
    tokenizer->metaspace = SP_METASPACE_NORMALIZER;
    tokenizer->prepend = prepends ? SP_PREPEND_ALWAYS : SP_PREPEND_NEVER;
    return SP_OK;
}

/* --- Pre-tokenizer ----------------------------------------------------------------------- */

static const char pre_tokenizer[] = "pre_tokenizer";

/* Absent means true to the reference as well. */
static bool uses_regex(const json_t *byte_level)
{
    return !json_is_false(json_object_get(byte_level, "use_regex"));
}

static sp_status check_byte_level(const json_t *step, bool regex, sp_error *error)
{
    if (!type_is(step, "ByteLevel"))
        return sp_tokenizer_refuse(error, pre_tokenizer, "the second step must be ByteLevel");
    if (!json_is_false(json_object_get(step, "add_prefix_space")))
        return sp_tokenizer_refuse(error, pre_tokenizer, "add_prefix_space must be false");
    if (uses_regex(step) && !regex)
        return sp_tokenizer_refuse(error, pre_tokenizer, "use_regex must be false behind a Split");
    if (!uses_regex(step) && regex)
        return sp_tokenizer_refuse(error, pre_tokenizer, "use_regex must be true without a Split");
    return SP_OK;
}

static sp_status read_split(const json_t *step, const sp_split **out_split, sp_error *error)
{
    const char *pattern = json_string_value(json_object_get(json_object_get(step, "pattern"), //
                                                            "Regex"));

    if (!text_is(step, "behavior", "Isolated") || !json_is_false(json_object_get(step, "invert")))
        return sp_tokenizer_refuse(error, pre_tokenizer,
                                   "only an Isolated Split that is not inverted");
    *out_split = pattern ? sp_split_find(pattern) : NULL;
    if (!*out_split)
        return sp_tokenizer_refuse(error, pre_tokenizer,
                                   "the Split has another pattern than those that this build "
                                   "knows");
    return SP_OK;
}

/* Metaspace. Its settings are read as the reference reads old files: no scheme means always, no
 * split means true, and add_prefix_space must not contradict the scheme. */
static sp_status read_metaspace(const json_t *step, sp_tokenizer *tokenizer, sp_error *error)
{
    const json_t *scheme = json_object_get(step, "prepend_scheme");
    const json_t *prefix = json_object_get(step, "add_prefix_space");

    if (!text_is(step, "replacement", META))
        return sp_tokenizer_refuse(error, pre_tokenizer, "only a Metaspace of U+2581");
    if (tokenizer->nfc)
        return sp_tokenizer_refuse(error, "normalizer", "only null before a Metaspace");
    if (!scheme || text_is(step, "prepend_scheme", "always"))
        tokenizer->prepend = SP_PREPEND_ALWAYS;
    else if (text_is(step, "prepend_scheme", "first"))
        tokenizer->prepend = SP_PREPEND_FIRST;
    else if (text_is(step, "prepend_scheme", "never"))
        tokenizer->prepend = SP_PREPEND_NEVER;
    else
        return sp_tokenizer_refuse(error, pre_tokenizer,
                                   "prepend_scheme must be always, first or never");
    if (json_is_false(prefix) && tokenizer->prepend != SP_PREPEND_NEVER)
        return sp_tokenizer_refuse(error, pre_tokenizer,
                                   "add_prefix_space contradicts prepend_scheme");
    tokenizer->metaspace = SP_METASPACE_PIECES;
    tokenizer->blank_begins_piece = !json_is_false(json_object_get(step, "split"));
    return SP_OK;
}

static sp_status read_pre_tokenizer(const json_t *root, sp_tokenizer *tokenizer, sp_error *error)
{
    const json_t *outer = json_object_get(root, pre_tokenizer);
    const json_t *steps = json_object_get(outer, "pretokenizers");
    const json_t *first = json_array_get(steps, 0), *second = json_array_get(steps, 1);
    const bool pair = type_is(outer, "Sequence") && json_array_size(steps) == 2;
    sp_status status;

    if (tokenizer->metaspace == SP_METASPACE_NORMALIZER) {
        if (sp_tokenizer_absent(outer))
            return SP_OK;
        return sp_tokenizer_refuse(error, pre_tokenizer, "only null behind a Replace normalizer");
    }
    if (type_is(outer, "Metaspace"))
        return read_metaspace(outer, tokenizer, error);
    if (type_is(outer, "ByteLevel")) {
        tokenizer->split = sp_split_byte_level(false);
        return check_byte_level(outer, true, error);
    }
    if (pair && type_is(first, "Digits")) {
        if (!json_is_true(json_object_get(first, "individual_digits")))
            return sp_tokenizer_refuse(error, pre_tokenizer, "individual_digits must be true");
        tokenizer->split = sp_split_byte_level(true);
        return check_byte_level(second, true, error);
    }
    if (!pair || !type_is(first, "Split"))
        return sp_tokenizer_refuse(error, pre_tokenizer,
                                   "only Split and ByteLevel, Digits and ByteLevel, ByteLevel, or "
                                   "Metaspace");
    status = read_split(first, &tokenizer->split, error);
    return status == SP_OK ? check_byte_level(second, false, error) : status;
}

/* --- Decoder ----------------------------------------------------------------------------- */

static sp_status read_decoder(const json_t *root, sp_tokenizer *tokenizer, sp_error *error)
{
    const char *field = "decoder";
    const json_t *decoder = json_object_get(root, field);
    const json_t *steps = json_object_get(decoder, "decoders");
    const json_t *strip = json_array_get(steps, 3);
    size_t n = json_array_size(steps);
    json_int_t start = json_integer_value(json_object_get(strip, "start"));

    if (tokenizer->metaspace == SP_METASPACE_NONE) {
        if (type_is(decoder, "ByteLevel"))
            return SP_OK;
        return sp_tokenizer_refuse(error, field, "only ByteLevel, as the pre-tokenizer");
    }
    if (!type_is(decoder, "Sequence") || n < 3 || n > 4 ||
        !is_replace(json_array_get(steps, 0), META, " ") ||
        !type_is(json_array_get(steps, 1), "ByteFallback") ||
        !type_is(json_array_get(steps, 2), "Fuse") || (n == 4 && !type_is(strip, "Strip")))
        return sp_tokenizer_refuse(error, field,
                                   "only a Sequence of Replace of U+2581 by a blank, ByteFallback, "
                                   "Fuse and Strip (or not)");
    if (n == 4 && (!text_is(strip, "content", " ") || start < 0 || start > 1 ||
                   json_integer_value(json_object_get(strip, "stop")) != 0))
        return sp_tokenizer_refuse(error, field, "Strip of more than one blank in front");
    tokenizer->strip_first = n == 4 && start == 1;
    return SP_OK;
}

/* --- Post-processor ---------------------------------------------------------------------- */

static const char post_processor[] = "post_processor";

static sp_status add_template_ids(const json_t *ids, sp_tokenizer *tokenizer, int32_t *count,
                                  sp_error *error)
{
    const json_t *id;
    size_t i;

    if (json_array_size(ids) == 0)
        return sp_tokenizer_malformed(error, post_processor, -1,
                                      "special_tokens lacks a token of the template");
    json_array_foreach((json_t *)ids, i, id)
    {
        const int32_t n = tokenizer->n_before + tokenizer->n_after;

        if (n == SP_TEMPLATE_IDS_MAX)
            return sp_tokenizer_refuse(error, post_processor, "more than 16 tokens around a text");
        if (!json_is_integer(id) || json_integer_value(id) < 0 ||
            json_integer_value(id) >= SP_TOKENIZER_IDS_MAX)
            return sp_tokenizer_malformed(error, post_processor, -1, "a token id is out of range");
        tokenizer->template_ids[n] = (int32_t)json_integer_value(id);
        ++*count;
    }
    return SP_OK;
}

/* TemplateProcessing: the tokens before and after the one sequence of "single". */
static sp_status read_template(const json_t *step, sp_tokenizer *tokenizer, sp_error *error)
{
    const json_t *single = json_object_get(step, "single"), *piece;
    const json_t *tokens = json_object_get(step, "special_tokens");
    bool seen = false;
    size_t i;

    json_array_foreach((json_t *)single, i, piece)
    {
        const json_t *sequence = json_object_get(piece, "Sequence");
        const char *name =
            json_string_value(json_object_get(json_object_get(piece, "SpecialToken"), "id"));
        int32_t *count = seen ? &tokenizer->n_after : &tokenizer->n_before;
        sp_status status;

        if (sequence && !seen && text_is(sequence, "id", "A")) {
            seen = true;
            continue;
        }
        if (!name)
            return sp_tokenizer_refuse(error, post_processor,
                                       "the template must be tokens around one sequence A");
        status = add_template_ids(json_object_get(json_object_get(tokens, name), "ids"), tokenizer,
                                  count, error);
        if (status != SP_OK)
            return status;
    }
    return seen ? SP_OK
                : sp_tokenizer_refuse(error, post_processor,
                                      "the template must be tokens around one sequence A");
}

/* ByteLevel changes offsets, which are not kept here. */
static sp_status read_post_processor(const json_t *root, sp_tokenizer *tokenizer, sp_error *error)
{
    const json_t *outer = json_object_get(root, post_processor), *step;
    const json_t *steps = json_object_get(outer, "processors");
    const size_t n = type_is(outer, "Sequence") ? json_array_size(steps) : 1;
    bool seen = false;

    if (sp_tokenizer_absent(outer))
        return SP_OK;
    for (size_t i = 0; i < n; i++) {
        sp_status status;

        step = type_is(outer, "Sequence") ? json_array_get(steps, i) : outer;
        if (type_is(step, "ByteLevel"))
            continue;
        if (!type_is(step, "TemplateProcessing") || seen)
            return sp_tokenizer_refuse(error, post_processor,
                                       "only ByteLevel and one TemplateProcessing");
        seen = true;
        status = read_template(step, tokenizer, error);
        if (status != SP_OK)
            return status;
    }
    return SP_OK;
}

/* --- Model ------------------------------------------------------------------------------- */

/* An affix that is absent, null or empty. */
static bool is_no_affix(const json_t *model, const char *field)
{
    const json_t *value = json_object_get(model, field);

    return sp_tokenizer_absent(value) || (json_is_string(value) && json_string_length(value) == 0);
}

static sp_status check_model(const json_t *model, sp_error *error)
{
    const json_t *dropout = json_object_get(model, "dropout");

    if (!json_is_object(model))
        return sp_tokenizer_malformed(error, "model", -1, "the field is missing or no object");
    if (!sp_tokenizer_absent(json_object_get(model, "type")) && !type_is(model, "BPE"))
        return sp_tokenizer_refuse(error, "model.type", "only BPE");
    if (!sp_tokenizer_absent(dropout) &&
        !(json_is_number(dropout) && json_number_value(dropout) == 0.0))
        return sp_tokenizer_refuse(error, "model.dropout",
                                   "ids must not be random: only null or 0");
    if (!is_no_affix(model, "continuing_subword_prefix"))
        return sp_tokenizer_refuse(error, "model.continuing_subword_prefix", "only null or empty");
    if (!is_no_affix(model, "end_of_word_suffix"))
        return sp_tokenizer_refuse(error, "model.end_of_word_suffix", "only null or empty");
    return SP_OK;
}

/* Checks the model's settings against the kind that the pre-tokenizer implies. */
static sp_status read_model(const json_t *model, sp_tokenizer *tokenizer, sp_error *error)
{
    const bool metaspace = tokenizer->metaspace != SP_METASPACE_NONE;

    tokenizer->ignore_merges = json_is_true(json_object_get(model, "ignore_merges"));
    if (metaspace && tokenizer->ignore_merges)
        return sp_tokenizer_refuse(error, "model.ignore_merges", "only false without ByteLevel");
    if (metaspace && !json_is_true(json_object_get(model, "byte_fallback")))
        return sp_tokenizer_refuse(error, "model.byte_fallback", "only true without ByteLevel");
    return SP_OK;
}

sp_status sp_tokenizer_read_settings(const json_t *root, sp_tokenizer *tokenizer, sp_error *error)
{
    const json_t *model = json_object_get(root, "model");
    sp_status status = check_model(model, error);

    if (status == SP_OK)
        status = read_normalizer(root, tokenizer, error);
    if (status == SP_OK)
        status = read_pre_tokenizer(root, tokenizer, error);
    if (status == SP_OK)
        status = read_model(model, tokenizer, error);
    if (status == SP_OK)
        status = read_decoder(root, tokenizer, error);
    return status == SP_OK ? read_post_processor(root, tokenizer, error) : status;
}
