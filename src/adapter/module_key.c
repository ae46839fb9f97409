#include "adapter/module_key.h"

#include "adapter/geometry.h"
#include "adapter/reason.h"

#include <stdio.h>
#include <string.h>

/* A piece of the name: [begin, begin + n). */
typedef struct span {
    const char *begin;
    size_t n;
} span;

static bool span_is(span s, const char *text)
{
    return s.n == strlen(text) && memcmp(s.begin, text, s.n) == 0;
}

static bool take_prefix(span *s, const char *prefix)
{
    size_t n = strlen(prefix);

    if (s->n < n || memcmp(s->begin, prefix, n) != 0)
        return false;
    s->begin += n;
    s->n -= n;
    return true;
}

static bool take_suffix(span *s, const char *suffix)
{
    size_t n = strlen(suffix);

    if (s->n < n || memcmp(s->begin + s->n - n, suffix, n) != 0)
        return false;
    s->n -= n;
    return true;
}

/* Consumes the part of a path up to the next dot, with the dot. */
static span take_part(span *s)
{
    const char *dot = memchr(s->begin, '.', s->n);
    span part = {s->begin, dot ? (size_t)(dot - s->begin) : s->n};
    size_t skip = part.n + (dot ? 1 : 0);

    s->begin += skip;
    s->n -= skip;
    return part;
}

/* Consumes the last part of a path, with the dot before it. */
static span take_last_part(span *s)
{
    size_t n = s->n;
    span part;

    while (n > 0 && s->begin[n - 1] != '.')
        n--;
    part = (span){s->begin + n, s->n - n};
    s->n = n > 0 ? n - 1 : 0;
    return part;
}

/* ---- the ending: role and adapter name ------------------------------------------------------- */

typedef enum ending_kind { ENDING_LORA, ENDING_EMBEDDING, ENDING_TABLE, ENDING_OTHER } ending_kind;

/*
 * Key suffixes as PEFT writes them: `marker`, an optional adapter name, `tail`; the longest match
 * first.
 */
static const struct {
    const char *marker, *tail;
    sp_key_role role;
    ending_kind kind;
} endings[] = {
    {".lora_A", ".weight", SP_ROLE_A, ENDING_LORA},
    {".lora_B", ".weight", SP_ROLE_B, ENDING_LORA},
    {".lora_embedding_A", "", SP_ROLE_A, ENDING_EMBEDDING},
    {".lora_embedding_B", "", SP_ROLE_B, ENDING_EMBEDDING},
    {".token_adapter.trainable_tokens_delta", "", SP_ROLE_TOKENS, ENDING_TABLE},
    {".modules_to_save", ".weight", SP_ROLE_TABLE, ENDING_TABLE},
    {".lora_magnitude_vector", ".weight", SP_ROLE_MAGNITUDE, ENDING_OTHER},
    {".lora_magnitude_vector", "", SP_ROLE_MAGNITUDE, ENDING_OTHER},
    {".lora_B", ".bias", SP_ROLE_BIAS, ENDING_OTHER},
};

/* The same for suffixes that cannot contain an adapter name. */
static const struct {
    const char *text;
    sp_key_role role;
    ending_kind kind;
} plain_endings[] = {
    {".token_adapter.base_layer.weight", SP_ROLE_TABLE, ENDING_TABLE},
    {".base_layer.weight", SP_ROLE_BASE_COPY, ENDING_TABLE},
    {".base_layer.bias", SP_ROLE_BIAS_COPY, ENDING_TABLE},
    {".bias", SP_ROLE_BIAS, ENDING_OTHER},
    {".weight", SP_ROLE_TABLE, ENDING_TABLE},
};

/* Consumes "<marker>[.NAME]<tail>" from the end. */
static bool take_ending(span *path, const char *marker, const char *tail, span *out_adapter)
{
    span rest = *path;
    span name;

    if (!take_suffix(&rest, tail))
        return false;
    *out_adapter = (span){0};
    if (take_suffix(&rest, marker)) {
        *path = rest;
        return true;
    }
    name = take_last_part(&rest);
    if (name.n == 0 || !take_suffix(&rest, marker))
        return false;
    *out_adapter = name;
    *path = rest;
    return true;
}

/* Whether the path ends in a table's name, in any place: an unknown place is reported as such. */
static bool names_table(const sp_geometry *geometry, span path)
{
    span last = take_last_part(&path);

    return span_is(last, "embed_tokens") || span_is(last, "lm_head") ||
           span_is(last, sp_geometry_table_name(geometry, SP_SITE_EMBEDDING)) ||
           span_is(last, sp_geometry_table_name(geometry, SP_SITE_HEAD));
}

/* PEFT stores copies of base parameters only beside pairs of embedding and head. */
static bool can_end_so(const sp_geometry *geometry, span path, size_t plain)
{
    return plain_endings[plain].role != SP_ROLE_BIAS_COPY ||
           (take_suffix(&path, plain_endings[plain].text) && names_table(geometry, path));
}

static bool read_ending(const sp_geometry *geometry, span *path, sp_module_key *key,
                        ending_kind *out_kind)
{
    for (size_t i = 0; i < sizeof endings / sizeof *endings; i++) {
        span adapter;

        if (!take_ending(path, endings[i].marker, endings[i].tail, &adapter))
            continue;
        key->role = endings[i].role;
        key->adapter_name = adapter.begin;
        key->adapter_name_bytes = adapter.n;
        *out_kind = endings[i].kind;
        return true;
    }
    for (size_t i = 0; i < sizeof plain_endings / sizeof *plain_endings; i++) {
        if (!can_end_so(geometry, *path, i) || !take_suffix(path, plain_endings[i].text))
            continue;
        key->role = plain_endings[i].role;
        *out_kind = plain_endings[i].kind;
        return true;
    }
    return false;
}

/* ---- the place ------------------------------------------------------------------------------- */

static const char *const trunks[] = {"model.language_model.", "language_model.model.", "model.",
                                     ""};

/* The prefixes that torch.compile, distributed wrappers and a second PEFT model add to names. */
bool sp_path_is_wrapped(const char *path, size_t n)
{
    static const char *const wrappers[] = {"_orig_mod.", "module.", "_fsdp_wrapped_module.",
                                           "base_model."};

    span whole = {path, n};

    for (size_t i = 0; i < sizeof wrappers / sizeof *wrappers; i++) {
        if (take_prefix(&whole, wrappers[i]))
            return true;
    }
    return false;
}

sp_status sp_refuse_prefix(const char *name, const char *path, size_t n, sp_error *error)
{
    const char *layers = NULL;
    size_t trunk;

    for (size_t i = 0; i + 8 <= n && !layers; i++) {
        if (memcmp(path + i, ".layers.", 8) == 0)
            layers = path + i + 1;
    }
    trunk = layers ? (size_t)(layers - path) : n;
    if (sp_path_is_wrapped(path, n))
        return sp_refuse(error, SP_REASON_UNKNOWN_PREFIX, name, 0,
                         "%.200s: the model was wrapped (compiled, distributed, or by PEFT twice) "
                         "when it was saved; save the model inside of the wrapper",
                         name);
    return sp_refuse(error, SP_REASON_UNKNOWN_PREFIX, name, 0,
                     "%.200s: \"%.*s\" is not a place of the text model that is served; "
                     "allow-partial leaves it out",
                     name, (int)(trunk < 100 ? trunk : 100), path);
}

static sp_status refuse_module(const char *name, span module, sp_error *error)
{
    return sp_refuse(error, SP_REASON_UNSUPPORTED_MODULE, name, (int64_t)(module.begin - name),
                     "%.200s: \"%.*s\" is no module that an adapter can change here; "
                     "allow-partial leaves it out",
                     name, (int)(module.n < 100 ? module.n : 100), module.begin);
}

/* Reads what follows "mlp.experts": nothing, ".base_layer", or ".N.gate_proj" and the like. */
static sp_status read_expert(const char *name, span rest, sp_module_key *key, sp_error *error)
{
    span whole = rest, part;

    key->module = SP_MODULE_EXPERT_GATE_PROJ;
    if (rest.n == 0 || span_is(rest, ".base_layer")) {
        key->fused = rest.n == 0 ? SP_FUSED_OUTER : SP_FUSED_INNER;
        return SP_OK;
    }
    take_prefix(&rest, ".");
    part = take_part(&rest);
    if (span_is(rest, "gate_proj"))
        key->module = SP_MODULE_EXPERT_GATE_PROJ;
    else if (span_is(rest, "up_proj"))
        key->module = SP_MODULE_EXPERT_UP_PROJ;
    else if (span_is(rest, "down_proj"))
        key->module = SP_MODULE_EXPERT_DOWN_PROJ;
    else
        return refuse_module(name, whole, error);
    key->expert = sp_path_number(part.begin, part.n);
    if (key->expert < 0)
        return sp_refuse(error, SP_REASON_MALFORMED_EXPERT_INDEX, name,
                         (int64_t)(part.begin - name), "%.200s: \"%.*s\" is no number of an expert",
                         name, (int)(part.n < 40 ? part.n : 40), part.begin);
    return SP_OK;
}

/* Reads what follows "layers.". */
static sp_status read_layer(const char *name, span rest, sp_module_key *key, sp_error *error)
{
    span index = take_part(&rest);
    span experts = rest;

    key->layer = sp_path_number(index.begin, index.n);
    if (key->layer < 0)
        return sp_refuse(error, SP_REASON_MALFORMED_LAYER_INDEX, name,
                         (int64_t)(index.begin - name), "%.200s: \"%.*s\" is no number of a layer",
                         name, (int)(index.n < 40 ? index.n : 40), index.begin);
    if (take_prefix(&experts, "mlp.experts") && (experts.n == 0 || experts.begin[0] == '.'))
        return read_expert(name, experts, key, error);
    for (int32_t module = 0; module < SP_MODULE_EXPERT_GATE_PROJ; module++) {
        if (span_is(rest, sp_module_name((sp_module)module))) {
            key->module = (sp_module)module;
            return SP_OK;
        }
    }
    return refuse_module(name, rest, error);
}

static sp_status read_place(const char *name, span path, sp_module_key *key, sp_error *error)
{
    key->layer = -1;
    key->expert = -1;
    if (span_is(path, "lm_head") || span_is(path, "language_model.lm_head")) {
        key->module = SP_MODULE_LM_HEAD;
        return SP_OK;
    }
    for (size_t i = 0; i < sizeof trunks / sizeof *trunks; i++) {
        span rest = path;

        if (!take_prefix(&rest, trunks[i]))
            continue;
        if (span_is(rest, "embed_tokens")) {
            key->module = SP_MODULE_EMBED_TOKENS;
            return SP_OK;
        }
        if (take_prefix(&rest, "layers."))
            return read_layer(name, rest, key, error);
        if (!memchr(rest.begin, '.', rest.n)) /* "model.norm", "score" */
            return refuse_module(name, rest, error);
    }
    return sp_refuse_prefix(name, path.begin, path.n, error);
}

/* ---- the whole ------------------------------------------------------------------------------- */

/* Lower-case "lora" anywhere, or PEFT's own prefix: it is meant as an adapter's tensor. */
static bool looks_like_peft(const char *name)
{
    return strncmp(name, "base_model.model.", strlen("base_model.model.")) == 0 ||
           strstr(name, ".lora_") != NULL;
}

static sp_status refuse_ending(const char *name, sp_error *error)
{
    if (looks_like_peft(name))
        return sp_refuse(
            error, SP_REASON_UNRECOGNIZED_TENSOR, name, 0,
            "%.300s: the ending is neither lora_A.weight nor lora_B.weight, nor one of "
            "a table",
            name);
    return sp_refuse(error, SP_REASON_NOT_PEFT_KEY, name, 0,
                     "%.300s: not a name that PEFT gives to a tensor of an adapter", name);
}

static sp_status refuse_kind_of_pair(const char *name, sp_error *error)
{
    return sp_refuse(error, SP_REASON_UNRECOGNIZED_TENSOR, name, 0,
                     "%.300s: embed_tokens has lora_embedding_A and lora_embedding_B, every other "
                     "module lora_A.weight and lora_B.weight",
                     name);
}

static bool has_no_place(const sp_module_key *key)
{
    return key->role == SP_ROLE_BIAS || key->role == SP_ROLE_MAGNITUDE;
}

/* Reads the suffix; the rest of the name is the path. */
static sp_status read_role(const sp_geometry *geometry, const char *name, sp_module_key *out_key,
                           ending_kind *out_kind, sp_error *error)
{
    span path = {name, strlen(name)};

    *out_key = (sp_module_key){.module = SP_MODULE_OTHER, .layer = -1, .expert = -1, .site = -1};
    take_prefix(&path, "base_model.model.");
    if (!read_ending(geometry, &path, out_key, out_kind))
        return refuse_ending(name, error);
    out_key->path = path.begin;
    out_key->path_bytes = path.n;
    return SP_OK;
}

/* Checks that this suffix is valid for the place, which was found or not (`status`). */
static sp_status check_ending(const sp_geometry *geometry, const char *name,
                              const sp_module_key *key, ending_kind kind, sp_status status,
                              sp_error *error)
{
    bool table = key->kind == SP_SITE_EMBEDDING || key->kind == SP_SITE_HEAD;
    span path = {key->path, key->path_bytes};

    if (kind == ENDING_TABLE && (status == SP_OK ? !table : !names_table(geometry, path)))
        return refuse_ending(name, error);
    if (status == SP_OK && kind != ENDING_TABLE &&
        (kind == ENDING_EMBEDDING) != (key->kind == SP_SITE_EMBEDDING))
        return refuse_kind_of_pair(name, error);
    return status;
}

/* Reads a place by the table's grammar; the kind is the table's. */
static sp_status read_known_place(const char *name, sp_module_key *key, sp_error *error)
{
    sp_status status = read_place(name, (span){key->path, key->path_bytes}, key, error);

    if (status == SP_OK)
        key->kind = sp_known_modules[key->module].kind;
    return status;
}

sp_status sp_module_key_parse(const char *name, sp_module_key *out_key, sp_error *error)
{
    sp_module_key key;
    ending_kind kind;
    sp_status status = read_role(NULL, name, &key, &kind, error);

    if (status == SP_OK && !has_no_place(&key)) {
        status = read_known_place(name, &key, error);
        status = check_ending(NULL, name, &key, kind, status, error);
    }
    if (status == SP_OK)
        *out_key = key;
    return status;
}

/* True for the fused experts of the table, which represent many sites. */
static bool reads_fused(const sp_geometry *geometry, const char *name, sp_module_key *key)
{
    sp_module_key known = *key;

    if (!sp_geometry_has_known(geometry, SP_MODULE_EXPERT_GATE_PROJ) ||
        read_known_place(name, &known, NULL) != SP_OK || known.fused == SP_FUSED_NONE)
        return false;
    *key = known;
    return true;
}

/* Reads a place in a model with names outside the table. */
static sp_status read_in_rows(const sp_geometry *geometry, const char *name, sp_module_key *out_key,
                              sp_error *error)
{
    sp_module_key key;
    ending_kind kind;
    sp_status status = read_role(geometry, name, &key, &kind, error);

    if (status == SP_OK && !has_no_place(&key)) {
        if (reads_fused(geometry, name, &key))
            status = sp_module_key_check(geometry, &key, name, error);
        else
            status = sp_module_key_find(geometry, &key, name, error);
        status = check_ending(geometry, name, &key, kind, status, error);
    }
    if (status == SP_OK)
        *out_key = key;
    return status;
}

sp_status sp_module_key_read(const sp_geometry *geometry, const char *name, sp_module_key *out_key,
                             sp_error *error)
{
    sp_module_key key;
    sp_status status;

    if (geometry && !sp_geometry_is_known(geometry))
        return read_in_rows(geometry, name, out_key, error);
    status = sp_module_key_parse(name, &key, error);
    if (status == SP_OK && geometry && !has_no_place(&key))
        status = sp_module_key_check(geometry, &key, name, error);
    if (status == SP_OK)
        *out_key = key;
    return status;
}
