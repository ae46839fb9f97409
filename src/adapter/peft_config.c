#include "adapter/peft_config.h"

#include "adapter/geometry.h"
#include "adapter/reason.h"
#include "base/alloc.h"

#include <ctype.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#define RULES_MAX          16384
#define LAYERS_PATTERN_MAX 64

/* The arguments that all field readers share. */
typedef struct reader {
    sp_peft_config *config;
    const sp_adapter_options *options;
    const char *subject; /* the file */
    sp_remarks *remarks;
    sp_error *error;
} reader;

void sp_remark(sp_remarks *remarks, const char *format, ...)
{
    char text[SP_ERROR_TEXT_BYTES];
    va_list arguments;

    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    sp_text_add_bytes(&remarks->text, text, strlen(text) + 1);
    remarks->n++;
}

/* ---- fields ---------------------------------------------------------------------------------- */

static const json_t *field_of(const reader *r, const char *name)
{
    const json_t *value = json_object_get(r->config->root, name);

    return json_is_null(value) ? NULL : value;
}

static sp_status wrong_type(const reader *r, const char *field, const char *wanted)
{
    return sp_refuse(r->error, SP_REASON_CONFIG_MALFORMED, field, -1,
                     "%s: field \"%.100s\" is not %s", r->subject, field, wanted);
}

/* Absent and null mean false. */
static sp_status read_flag(const reader *r, const char *field, bool *out_value)
{
    const json_t *value = field_of(r, field);

    if (value && !json_is_boolean(value))
        return wrong_type(r, field, "true or false");
    *out_value = json_is_true(value);
    return SP_OK;
}

/* False for null, false, 0, "", [] and {}: a default without effect. */
static bool says_something(const json_t *value)
{
    switch (json_typeof(value)) {
    case JSON_NULL:
    case JSON_FALSE:
        return false;
    case JSON_INTEGER:
        return json_integer_value(value) != 0;
    case JSON_REAL:
        return json_real_value(value) != 0;
    case JSON_STRING:
        return json_string_length(value) > 0;
    case JSON_ARRAY:
        return json_array_size(value) > 0;
    case JSON_OBJECT:
        return json_object_size(value) > 0;
    case JSON_TRUE:
        break;
    }
    return true;
}

typedef enum field_kind {
    FIELD_READ,       /* has a reader of its own below */
    FIELD_LABEL,      /* may have any value: it has no effect here */
    FIELD_UNSUPPORTED /* refused unless it has no effect */
} field_kind;

static const struct {
    const char *name;
    field_kind kind;
} known_fields[] = {
    {"r", FIELD_READ},
    {"lora_alpha", FIELD_READ},
    {"peft_type", FIELD_READ},
    {"use_rslora", FIELD_READ},
    {"rank_pattern", FIELD_READ},
    {"alpha_pattern", FIELD_READ},
    {"target_modules", FIELD_READ},
    {"exclude_modules", FIELD_READ},
    {"layers_to_transform", FIELD_READ},
    {"layers_pattern", FIELD_READ},
    {"target_parameters", FIELD_READ},
    {"modules_to_save", FIELD_READ},
    {"trainable_token_indices", FIELD_READ},
    {"use_dora", FIELD_READ},
    {"bias", FIELD_READ},
    {"lora_bias", FIELD_READ},
    {"fan_in_fan_out", FIELD_READ},
    {"init_lora_weights", FIELD_READ},
    {"task_type", FIELD_READ},
    {"peft_version", FIELD_READ},
    {"lora_B_layout", FIELD_READ},
    {"unsloth_fused_expert_lora", FIELD_READ},
    {"base_model_name_or_path", FIELD_LABEL},
    {"revision", FIELD_LABEL},
    {"lora_dropout", FIELD_LABEL},
    {"inference_mode", FIELD_LABEL},
    {"auto_mapping", FIELD_LABEL},
    {"megatron_core", FIELD_LABEL},
    {"qalora_group_size", FIELD_LABEL},
    {"ensure_weight_tying", FIELD_READ},
    {"runtime_config", FIELD_LABEL},
    {"loftq_config", FIELD_LABEL}, /* the methods themselves are visible in init_lora_weights */
    {"eva_config", FIELD_LABEL},
    {"corda_config", FIELD_LABEL},
    {"lora_ga_config", FIELD_LABEL},
    {"alora_invocation_tokens", FIELD_UNSUPPORTED},
    {"layer_replication", FIELD_UNSUPPORTED},
    {"use_qalora", FIELD_UNSUPPORTED},
    {"megatron_config", FIELD_UNSUPPORTED},
    {"arrow_config", FIELD_UNSUPPORTED},
    {"use_bdlora", FIELD_UNSUPPORTED},
    {"kasa_config", FIELD_UNSUPPORTED},
    {"velora_config", FIELD_UNSUPPORTED},
    {"monteclora_config", FIELD_UNSUPPORTED},
};

const char *sp_peft_config_field(size_t index)
{
    return index < sizeof known_fields / sizeof *known_fields ? known_fields[index].name : NULL;
}

static bool find_known(const char *name, field_kind *out_kind)
{
    for (size_t i = 0; i < sizeof known_fields / sizeof *known_fields; i++) {
        if (strcmp(name, known_fields[i].name) == 0) {
            *out_kind = known_fields[i].kind;
            return true;
        }
    }
    return false;
}

static sp_status check_other_fields(const reader *r)
{
    const char *name;
    json_t *value;

    json_object_foreach(r->config->root, name, value)
    {
        field_kind kind;
        bool known = find_known(name, &kind);

        if ((known && kind != FIELD_UNSUPPORTED) || !says_something(value))
            continue;
        if (known)
            return sp_refuse(r->error, SP_REASON_UNSUPPORTED_FIELD, name, -1,
                             "%s: \"%.100s\" is set; what it asks for is not served", r->subject,
                             name);
        if (!r->options->allow_unknown_fields)
            return sp_refuse(r->error, SP_REASON_UNKNOWN_FIELD, name, -1,
                             "%s: the field \"%.100s\" is not known and set; "
                             "allow-unknown-fields ignores it",
                             r->subject, name);
        sp_remark(r->remarks, "the unknown field \"%.100s\" is ignored, as was asked", name);
    }
    return SP_OK;
}

/* ---- what kind of adapter ------------------------------------------------------------------- */

static sp_status check_peft_type(const reader *r)
{
    const json_t *value = field_of(r, "peft_type");

    if (!value || (json_is_string(value) && strcasecmp(json_string_value(value), "LORA") == 0))
        return SP_OK;
    if (!json_is_string(value))
        return wrong_type(r, "peft_type", "a text");
    return sp_refuse(r->error, SP_REASON_PEFT_TYPE, "peft_type", -1,
                     "%s: the adapter is of type \"%.100s\"; LORA is served", r->subject,
                     json_string_value(value));
}

static sp_status check_task_type(const reader *r)
{
    const json_t *value = field_of(r, "task_type");

    if (!value || (json_is_string(value) && strcmp(json_string_value(value), "CAUSAL_LM") == 0))
        return SP_OK;
    if (!json_is_string(value))
        return wrong_type(r, "task_type", "a text");
    return sp_refuse(r->error, SP_REASON_TASK_TYPE, "task_type", -1,
                     "%s: the task is \"%.100s\"; CAUSAL_LM is served", r->subject,
                     json_string_value(value));
}

static sp_status check_bias(const reader *r)
{
    const json_t *value = field_of(r, "bias");
    bool lora_bias = false;
    sp_status status = read_flag(r, "lora_bias", &lora_bias);

    if (status != SP_OK)
        return status;
    if (value && !json_is_string(value))
        return wrong_type(r, "bias", "a text");
    if (value && strcmp(json_string_value(value), "none") != 0)
        return sp_refuse(r->error, SP_REASON_BIAS, "bias", -1,
                         "%s: bias is \"%.100s\"; trained biases are not served", r->subject,
                         json_string_value(value));
    if (lora_bias)
        return sp_refuse(r->error, SP_REASON_BIAS, "lora_bias", -1,
                         "%s: lora_bias is true; trained biases are not served", r->subject);
    return SP_OK;
}

static sp_status check_dora(const reader *r)
{
    bool dora = false;
    sp_status status = read_flag(r, "use_dora", &dora);

    if (status == SP_OK && dora)
        return sp_refuse(r->error, SP_REASON_DORA, "use_dora", -1,
                         "%s: use_dora is true; DoRA is not served", r->subject);
    return status;
}

static bool is_harmless_init(const char *name)
{
    static const char *const harmless[] = {"gaussian", "eva", "orthogonal"};

    for (size_t i = 0; i < sizeof harmless / sizeof *harmless; i++) {
        if (strcasecmp(name, harmless[i]) == 0)
            return true;
    }
    return false;
}

static sp_status check_init(const reader *r)
{
    static const char *const changing[] = {"pissa", "olora", "corda", "loftq", "lora_ga"};
    const json_t *value = field_of(r, "init_lora_weights");
    const char *name = json_string_value(value);

    if (!value || json_is_boolean(value))
        return SP_OK;
    if (!name)
        return wrong_type(r, "init_lora_weights", "true, false or a text");
    for (size_t i = 0; i < sizeof changing / sizeof *changing; i++) {
        if (strncasecmp(name, changing[i], strlen(changing[i])) != 0)
            continue;
        if (!r->options->allow_base_changing_init)
            return sp_refuse(r->error, SP_REASON_BASE_CHANGING_INIT, "init_lora_weights", -1,
                             "%s: init_lora_weights is \"%.100s\", which changes the base before "
                             "training, so that this file is a difference to another base; "
                             "allow-base-changing-init takes it as it is",
                             r->subject, name);
        sp_remark(r->remarks,
                  "init_lora_weights is \"%.100s\": right only if the file was converted back to "
                  "the plain base",
                  name);
        return SP_OK;
    }
    if (!is_harmless_init(name))
        sp_remark(r->remarks,
                  "init_lora_weights is \"%.100s\", which is not known here: right only if it "
                  "leaves the base as it is",
                  name);
    return SP_OK;
}

static sp_status check_fan_in_fan_out(const reader *r)
{
    bool flag = false;
    sp_status status = read_flag(r, "fan_in_fan_out", &flag);

    if (status == SP_OK && flag)
        sp_remark(r->remarks, "fan_in_fan_out is true: PEFT ignores it on linear layers, and the "
                              "shapes fit as they are");
    return status;
}

static sp_status read_tying(const reader *r)
{
    return read_flag(r, "ensure_weight_tying", &r->config->ties_tables);
}

/* ---- rank and scale ------------------------------------------------------------------------- */

static bool is_rank(const json_t *value)
{
    return json_is_integer(value) && json_integer_value(value) >= 1 &&
           json_integer_value(value) <= INT32_MAX;
}

static bool is_alpha(const json_t *value)
{
    return json_is_number(value) && json_number_value(value) > 0 &&
           isfinite(json_number_value(value));
}

static sp_status read_rank(const reader *r)
{
    const json_t *value = field_of(r, "r");

    if (!value)
        return sp_refuse(r->error, SP_REASON_BAD_RANK, "r", -1,
                         "%s: \"r\" is missing; it must be the rank of the tensors", r->subject);
    if (!is_rank(value))
        return sp_refuse(r->error, SP_REASON_BAD_RANK, "r", -1,
                         "%s: \"r\" must be an integer of at least 1", r->subject);
    r->config->rank = (int32_t)json_integer_value(value);
    return SP_OK;
}

static sp_status read_alpha(const reader *r)
{
    const json_t *value = field_of(r, "lora_alpha");

    if (!value)
        return sp_refuse(r->error, SP_REASON_BAD_ALPHA, "lora_alpha", -1,
                         "%s: \"lora_alpha\" is missing; without it the scale is not known",
                         r->subject);
    if (!is_alpha(value))
        return sp_refuse(r->error, SP_REASON_BAD_ALPHA, "lora_alpha", -1,
                         "%s: \"lora_alpha\" must be a number above 0", r->subject);
    r->config->alpha = json_number_value(value);
    return SP_OK;
}

static sp_status read_rslora(const reader *r)
{
    sp_status status = read_flag(r, "use_rslora", &r->config->rslora);

    if (status == SP_OK && !field_of(r, "use_rslora"))
        sp_remark(r->remarks, "use_rslora is absent: the scale is alpha / r");
    return status;
}

static sp_status read_rules(const reader *r, const char *field, bool ranks, sp_pattern_rules *rules)
{
    json_t *map = json_object_get(r->config->root, field);
    const char *key;
    json_t *value;
    size_t n = json_object_size(map);

    if (!map || json_is_null(map))
        return SP_OK;
    if (!json_is_object(map))
        return wrong_type(r, field, "a map");
    if (n == 0)
        return SP_OK;
    if (n > RULES_MAX)
        return sp_refuse(r->error, SP_REASON_UNSUPPORTED_PATTERN, field, -1,
                         "%s: %zu patterns in %s; at most %d are taken", r->subject, n, field,
                         RULES_MAX);
    rules->rules = sp_calloc(n, sizeof *rules->rules);
    if (!rules->rules)
        return sp_fail_memory(r->error, n * sizeof *rules->rules, field);
    json_object_foreach(map, key, value)
    {
        sp_status status;

        if (ranks ? !is_rank(value) : !is_alpha(value))
            return sp_refuse(r->error, ranks ? SP_REASON_BAD_RANK : SP_REASON_BAD_ALPHA, field, -1,
                             "%s: the value of \"%.150s\" in %s must be %s", r->subject, key, field,
                             ranks ? "an integer of at least 1" : "a number above 0");
        status = sp_pattern_create(key, SP_PATTERN_SUFFIX, field, &r->config->steps_left,
                                   &rules->rules[rules->n].pattern, r->error);
        if (status != SP_OK)
            return status;
        rules->rules[rules->n].key = key;
        rules->rules[rules->n++].value = json_number_value(value);
    }
    return SP_OK;
}

/* The value of the first rule that matches; `fallback` when none does. */
static sp_status apply_rules(const sp_pattern_rules *rules, const char *path, size_t n,
                             double fallback, double *out_value, sp_error *error)
{
    *out_value = fallback;
    for (size_t i = 0; i < rules->n; i++) {
        bool matches;
        sp_status status = sp_pattern_match(rules->rules[i].pattern, path, n, &matches, error);

        if (status != SP_OK)
            return status;
        if (matches) {
            *out_value = rules->rules[i].value;
            rules->rules[i].decides = true;
            break;
        }
    }
    return SP_OK;
}

static void remark_unused(const sp_pattern_rules *rules, const char *field, sp_remarks *remarks)
{
    const char *first = NULL;
    size_t n = 0;

    for (size_t i = 0; i < rules->n; i++) {
        if (rules->rules[i].decides)
            continue;
        if (n++ == 0)
            first = rules->rules[i].key;
    }
    if (n > 0)
        sp_remark(remarks, "%s: %zu of %zu keys decide no module of the file (first \"%.150s\")",
                  field, n, rules->n, first);
}

void sp_peft_config_remark_unused(const sp_peft_config *config, sp_remarks *remarks)
{
    remark_unused(&config->ranks, "rank_pattern", remarks);
    remark_unused(&config->alphas, "alpha_pattern", remarks);
}

sp_status sp_peft_config_scale(const sp_peft_config *config, const char *path, size_t n,
                               int32_t *out_rank, float *out_scale, sp_error *error)
{
    double rank, alpha, scale;
    sp_status status = apply_rules(&config->ranks, path, n, config->rank, &rank, error);

    if (status == SP_OK)
        status = apply_rules(&config->alphas, path, n, config->alpha, &alpha, error);
    if (status != SP_OK)
        return status;
    scale = config->rslora ? alpha / sqrt(rank) : alpha / rank;
    if (!((float)scale > 0) || !isfinite((float)scale))
        return sp_refuse(error, SP_REASON_BAD_ALPHA, "lora_alpha", -1,
                         "alpha %g at rank %g gives a scale that is no positive FP32 number", alpha,
                         rank);
    *out_rank = (int32_t)rank;
    *out_scale = (float)scale;
    return SP_OK;
}

/* ---- names ----------------------------------------------------------------------------------- */

static sp_status read_names(const reader *r, const char *field, const json_t *list,
                            sp_name_rule *rule)
{
    size_t n = json_array_size(list);

    rule->given = true;
    if (n == 0)
        return SP_OK;
    rule->names = sp_calloc(n, sizeof *rule->names);
    if (!rule->names)
        return sp_fail_memory(r->error, n * sizeof *rule->names, field);
    for (size_t i = 0; i < n; i++) {
        const char *name = json_string_value(json_array_get(list, i));

        if (!name)
            return wrong_type(r, field, "a list of names");
        rule->names[rule->n++] = name;
    }
    return sp_name_rule_sort(rule, field, r->error);
}

/* A list of names; where `regex` allows it also one text, which is a regular expression. */
static sp_status read_name_rule(const reader *r, const char *field, bool regex, sp_name_rule *rule)
{
    const json_t *value = field_of(r, field);

    if (!value)
        return SP_OK;
    if (json_is_array(value))
        return read_names(r, field, value, rule);
    if (!regex || !json_is_string(value))
        return wrong_type(r, field, regex ? "a list of names or a text" : "a list of names");
    rule->given = true;
    if (strcasecmp(json_string_value(value), "all-linear") == 0) {
        rule->all_linear = true;
        return SP_OK;
    }
    return sp_pattern_create(json_string_value(value), SP_PATTERN_WHOLE, field,
                             &r->config->steps_left, &rule->regex, r->error);
}

static bool ends_in(const char *path, const char *name)
{
    size_t n = strlen(path), length = strlen(name);

    return n >= length && strcmp(path + n - length, name) == 0 &&
           (n == length || path[n - length - 1] == '.');
}

/* The base's name for its embedding or head. */
static const char *table_name(const reader *r, sp_site_kind kind)
{
    return sp_geometry_table_name(r->options->geometry, kind);
}

static sp_status read_modules_to_save(const reader *r)
{
    sp_name_rule *rule = &r->config->modules_to_save;
    sp_status status = read_name_rule(r, "modules_to_save", false, rule);

    for (size_t i = 0; status == SP_OK && i < rule->n; i++) {
        if (!ends_in(rule->names[i], table_name(r, SP_SITE_EMBEDDING)) &&
            !ends_in(rule->names[i], table_name(r, SP_SITE_HEAD)))
            return sp_refuse(r->error, SP_REASON_MODULES_TO_SAVE, "modules_to_save", (int64_t)i,
                             "%s: modules_to_save lists \"%.100s\"; %.100s and %.100s are served",
                             r->subject, rule->names[i], table_name(r, SP_SITE_EMBEDDING),
                             table_name(r, SP_SITE_HEAD));
    }
    return status;
}

/* ---- lists of numbers ------------------------------------------------------------------------ */

/* One integer or a list of them, each from 0. `reason` and `what` say what is wrong otherwise. */
static sp_status read_ids(const reader *r, const char *field, const json_t *value, int32_t reason,
                          sp_id_list *list)
{
    bool single = json_is_integer(value);
    size_t n = single ? 1 : json_array_size(value);

    if (!single && !json_is_array(value))
        return wrong_type(r, field, "a list of integers");
    if (n == 0)
        return SP_OK;
    list->ids = sp_calloc(n, sizeof *list->ids);
    if (!list->ids)
        return sp_fail_memory(r->error, n * sizeof *list->ids, field);
    for (size_t i = 0; i < n; i++) {
        const json_t *id = single ? value : json_array_get(value, i);

        if (!json_is_integer(id))
            return wrong_type(r, field, "a list of integers");
        if (json_integer_value(id) < 0 || json_integer_value(id) > INT32_MAX)
            return sp_refuse(r->error, reason, field, (int64_t)i, "%s: entry %zu of %s is %lld",
                             r->subject, i, field, (long long)json_integer_value(id));
        list->ids[list->n++] = (int32_t)json_integer_value(id);
    }
    list->given = true;
    return SP_OK;
}

static int by_number(const void *left, const void *right)
{
    int32_t a = *(const int32_t *)left, b = *(const int32_t *)right;

    return (a > b) - (a < b);
}

static void sort_ids(sp_id_list *list)
{
    if (list->n > 1)
        qsort(list->ids, (size_t)list->n, sizeof *list->ids, by_number);
}

static sp_status check_distinct(const reader *r, const char *field, const sp_id_list *list)
{
    sp_status status = SP_OK;
    int32_t *sorted;

    if (list->n < 2)
        return SP_OK;
    sorted = sp_malloc((size_t)list->n * sizeof *sorted);
    if (!sorted)
        return sp_fail_memory(r->error, (size_t)list->n * sizeof *sorted, field);
    memcpy(sorted, list->ids, (size_t)list->n * sizeof *sorted);
    qsort(sorted, (size_t)list->n, sizeof *sorted, by_number);
    for (int32_t i = 1; i < list->n && status == SP_OK; i++) {
        if (sorted[i] == sorted[i - 1])
            status = sp_refuse(r->error, SP_REASON_BAD_TOKEN_INDEX, field, sorted[i],
                               "%s: %s lists the id %d twice", r->subject, field, sorted[i]);
    }
    sp_free(sorted);
    return status;
}

static sp_status read_token_list(const reader *r, const char *module, const json_t *value)
{
    static const char field[] = "trainable_token_indices";
    sp_id_list *list = NULL;
    sp_status status;

    if (ends_in(module, table_name(r, SP_SITE_EMBEDDING)))
        list = &r->config->tokens_embed;
    else if (ends_in(module, table_name(r, SP_SITE_HEAD)))
        list = &r->config->tokens_head;
    if (!list || list->given)
        return sp_refuse(r->error, SP_REASON_BAD_TOKEN_INDEX, field, -1,
                         "%s: %s names \"%.100s\", which %s", r->subject, field, module,
                         list ? "it has already" : "is neither the embedding nor the head");
    if (!json_is_array(value))
        return wrong_type(r, field, "a list of integers, or a map of lists");
    status = read_ids(r, field, value, SP_REASON_BAD_TOKEN_INDEX, list);
    return status == SP_OK ? check_distinct(r, field, list) : status;
}

static sp_status read_tokens(const reader *r)
{
    json_t *value = json_object_get(r->config->root, "trainable_token_indices");
    const char *module;
    json_t *list;

    if (!value || json_is_null(value))
        return SP_OK;
    if (!json_is_object(value))
        return read_token_list(r, table_name(r, SP_SITE_EMBEDDING), value);
    json_object_foreach(value, module, list)
    {
        sp_status status = read_token_list(r, module, list);

        if (status != SP_OK)
            return status;
    }
    return SP_OK;
}

/* ---- layers ---------------------------------------------------------------------------------- */

static sp_status read_layers(const reader *r)
{
    const json_t *layers = field_of(r, "layers_to_transform");
    const json_t *pattern = field_of(r, "layers_pattern");
    sp_name_rule *rule = &r->config->layers_pattern;
    sp_status status = SP_OK;

    if (layers)
        status = read_ids(r, "layers_to_transform", layers, SP_REASON_CONFIG_MALFORMED,
                          &r->config->layers_to_transform);
    sort_ids(&r->config->layers_to_transform);
    if (status != SP_OK || !pattern)
        return status;
    if (json_is_array(pattern)) {
        status = read_names(r, "layers_pattern", pattern, rule);
    } else if (!json_is_string(pattern)) {
        status = wrong_type(r, "layers_pattern", "a text or a list of texts");
    } else if (json_string_length(pattern) > 0) {
        rule->names = sp_calloc(1, sizeof *rule->names);
        if (!rule->names)
            return sp_fail_memory(r->error, sizeof *rule->names, "layers_pattern");
        rule->names[rule->n++] = json_string_value(pattern);
    }
    if (status == SP_OK && rule->n > LAYERS_PATTERN_MAX)
        return sp_refuse(r->error, SP_REASON_UNSUPPORTED_PATTERN, "layers_pattern", -1,
                         "%s: %zu words in layers_pattern; at most %d are taken", r->subject,
                         rule->n, LAYERS_PATTERN_MAX);
    for (size_t i = 0; status == SP_OK && i < rule->n; i++) {
        for (const char *c = rule->names[i]; *c != '\0'; c++) {
            if (!isalnum((unsigned char)*c) && *c != '_')
                return sp_refuse(r->error, SP_REASON_UNSUPPORTED_PATTERN, "layers_pattern",
                                 (int64_t)(c - rule->names[i]),
                                 "%s: layers_pattern \"%.100s\" is no plain word", r->subject,
                                 rule->names[i]);
        }
    }
    return status;
}

/* The number in the part [begin, end) of a path, or -1. */
static int64_t part_number(const char *path, size_t begin, size_t end)
{
    int64_t number = 0;

    if (begin == end || end - begin > 9)
        return -1;
    for (size_t i = begin; i < end; i++) {
        if (path[i] < '0' || path[i] > '9')
            return -1;
        number = number * 10 + (path[i] - '0');
    }
    return number;
}

/* The number after the last part that equals `word` (NULL: any), if something follows it; or -1. */
static int64_t layer_after(const char *path, size_t n, const char *word)
{
    int64_t found = -1;
    size_t begin = 0, before = 0, before_end = 0;

    for (size_t at = 0; at < n; at++) {
        int64_t number;

        if (path[at] != '.')
            continue;
        number = begin > 0 ? part_number(path, begin, at) : -1;
        if (number >= 0 && (!word || (before_end - before == strlen(word) &&
                                      memcmp(path + before, word, before_end - before) == 0)))
            found = number;
        before = begin;
        before_end = at;
        begin = at + 1;
    }
    return found;
}

bool sp_peft_config_layer_listed(const sp_peft_config *config, const char *path, size_t n)
{
    int64_t layer = -1;
    int32_t number;

    if (!config->layers_to_transform.given)
        return true;
    if (config->layers_pattern.n == 0)
        layer = layer_after(path, n, NULL);
    for (size_t i = 0; i < config->layers_pattern.n && layer < 0; i++)
        layer = layer_after(path, n, config->layers_pattern.names[i]);
    number = (int32_t)layer;
    return layer >= 0 &&
           bsearch(&number, config->layers_to_transform.ids, (size_t)config->layers_to_transform.n,
                   sizeof number, by_number) != NULL;
}

/* ---- fused experts --------------------------------------------------------------------------- */

/* A release number decides; a development version may be from before or after the change. */
static void read_version(const reader *r)
{
    const char *version = json_string_value(field_of(r, "peft_version"));
    const char *dot = version ? strchr(version, '.') : NULL;
    long major, minor;

    if (!dot || !isdigit((unsigned char)version[0]) || !isdigit((unsigned char)dot[1]) ||
        strstr(version, "dev") || strstr(version, "rc"))
        return;
    major = strtol(version, NULL, 10);
    minor = strtol(dot + 1, NULL, 10);
    r->config->orientation =
        major == 0 && minor < 19 ? SP_ORIENTATION_SWAPPED : SP_ORIENTATION_LINEAR;
}

static sp_status read_columns_text(const reader *r, const json_t *value, sp_expert_columns *columns)
{
    const char *text = json_string_value(value);

    if (text && strcmp(text, "rank_major") == 0)
        *columns = SP_COLUMNS_RANK_MAJOR;
    else if (text && strcmp(text, "grouped_by_expert") == 0)
        *columns = SP_COLUMNS_GROUPED_BY_EXPERT;
    else
        return sp_refuse(r->error, SP_REASON_UNSUPPORTED_FIELD, "lora_B_layout", -1,
                         "%s: lora_B_layout must be \"rank_major\" or \"grouped_by_expert\"",
                         r->subject);
    return SP_OK;
}

/* Reads the marker that some trainers write, and its details for each parameter, which must agree
 * with it. */
static sp_status read_columns(const reader *r)
{
    const json_t *marker = field_of(r, "lora_B_layout");
    const json_t *details = field_of(r, "unsloth_fused_expert_lora");
    json_t *parameters = json_object_get(details, "parameters");
    const char *name;
    json_t *entry;
    sp_status status = SP_OK;

    if (marker)
        status = read_columns_text(r, marker, &r->config->columns);
    if (status != SP_OK || !parameters)
        return status;
    json_object_foreach(parameters, name, entry)
    {
        const json_t *layout = json_object_get(entry, "lora_B_layout");
        sp_expert_columns columns = r->config->columns;

        if (layout)
            status = read_columns_text(r, layout, &columns);
        if (status != SP_OK)
            return status;
        if (!marker || columns != r->config->columns)
            return sp_refuse(r->error, SP_REASON_UNSUPPORTED_FIELD, "unsloth_fused_expert_lora", -1,
                             "%s: the layout of parameter \"%.100s\" is not that of lora_B_layout",
                             r->subject, name);
    }
    return SP_OK;
}

/* ---- the whole ------------------------------------------------------------------------------- */

static sp_status read_root(const reader *r, const char *bytes, size_t n_bytes)
{
    sp_status status;

    if (n_bytes >= 3 && memcmp(bytes, "\xef\xbb\xbf", 3) == 0)
        return sp_refuse(r->error, SP_REASON_CONFIG_MALFORMED, r->subject, 0,
                         "%s begins with a byte order mark; save it as plain UTF-8", r->subject);
    status = sp_reason_json(bytes, n_bytes, r->subject, SP_REASON_CONFIG_MALFORMED, 0,
                            &r->config->root, r->error);
    if (status == SP_OK && !json_is_object(r->config->root))
        return sp_refuse(r->error, SP_REASON_CONFIG_MALFORMED, r->subject, 0,
                         "%s: the top level is no object", r->subject);
    return status;
}

static sp_status read_all(const reader *r)
{
    sp_peft_config *c = r->config;
    static sp_status (*const readers[])(const reader *) = {
        check_peft_type,      check_task_type,    check_dora,  check_bias,   check_init,
        check_fan_in_fan_out, check_other_fields, read_rank,   read_alpha,   read_rslora,
        read_modules_to_save, read_tokens,        read_layers, read_columns, read_tying,
    };
    sp_status status = SP_OK;

    for (size_t i = 0; status == SP_OK && i < sizeof readers / sizeof *readers; i++)
        status = readers[i](r);
    if (status == SP_OK)
        status = read_rules(r, "rank_pattern", true, &c->ranks);
    if (status == SP_OK)
        status = read_rules(r, "alpha_pattern", false, &c->alphas);
    if (status == SP_OK)
        status = read_name_rule(r, "target_modules", true, &c->target_modules);
    if (status == SP_OK)
        status = read_name_rule(r, "exclude_modules", true, &c->exclude_modules);
    if (status == SP_OK)
        status = read_name_rule(r, "target_parameters", false, &c->target_parameters);
    read_version(r);
    return status;
}

sp_status sp_peft_config_parse(const char *bytes, size_t n_bytes, const char *subject,
                               const sp_adapter_options *options, sp_peft_config *out_config,
                               sp_remarks *remarks, sp_error *error)
{
    reader r = {.config = out_config,
                .options = options,
                .subject = subject,
                .remarks = remarks,
                .error = error};
    sp_status status;

    *out_config = (sp_peft_config){.steps_left = SP_PATTERN_STEPS_MAX};
    status = read_root(&r, bytes, n_bytes);
    return status == SP_OK ? read_all(&r) : status;
}

static void clear_rules(sp_pattern_rules *rules)
{
    for (size_t i = 0; i < rules->n; i++)
        sp_pattern_destroy(rules->rules[i].pattern);
    sp_free(rules->rules);
}

void sp_peft_config_clear(sp_peft_config *config)
{
    clear_rules(&config->ranks);
    clear_rules(&config->alphas);
    sp_name_rule_clear(&config->target_modules);
    sp_name_rule_clear(&config->exclude_modules);
    sp_name_rule_clear(&config->target_parameters);
    sp_name_rule_clear(&config->modules_to_save);
    sp_name_rule_clear(&config->layers_pattern);
    sp_free(config->layers_to_transform.ids);
    sp_free(config->tokens_embed.ids);
    sp_free(config->tokens_head.ids);
    json_decref(config->root);
    *config = (sp_peft_config){0};
}
