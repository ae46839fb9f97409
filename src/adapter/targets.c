/*
 * targets.c: checks what the config says it adapts against what the file holds. The tensors decide;
 * but a name that the config lists, the base has places for, and no tensor carries, means that the
 * file has lost something.
 */
#include "adapter/audit.h"

#include "base/alloc.h"

#include <stdio.h>
#include <string.h>

#define PATH_BYTES 512

/* True when `end` is a suffix of `whole` after a dot. */
static bool is_end_of(const char *whole, const char *end)
{
    size_t n = strlen(whole), length = strlen(end);

    return length > 0 && n >= length && strcmp(whole + n - length, end) == 0 &&
           (n == length || whole[n - length - 1] == '.');
}

/* ---- target_parameters ----------------------------------------------------------------------- */

static bool names_parameter(const char *listed, const char *parameter)
{
    return is_end_of(parameter, listed) || is_end_of(listed, parameter);
}

sp_status sp_audit_parameters(sp_audit *audit)
{
    sp_peft_config *config = &audit->config;

    for (size_t i = 0; i < config->target_parameters.n; i++) {
        const char *listed = config->target_parameters.names[i];
        bool gate_up = names_parameter(listed, "mlp.experts.gate_up_proj");
        bool down = names_parameter(listed, "mlp.experts.down_proj");
        bool router = strcmp(listed, "weight") != 0 && names_parameter(listed, "mlp.gate.weight");

        if (!gate_up && !down && !router)
            return sp_refuse(audit->error, SP_REASON_UNSUPPORTED_PARAMETER, "target_parameters",
                             (int64_t)i,
                             "target_parameters lists \"%.150s\"; mlp.experts.gate_up_proj, "
                             "mlp.experts.down_proj and mlp.gate.weight are served",
                             listed);
        config->lists_gate_up |= gate_up;
        config->lists_down |= down;
        config->lists_router |= router;
    }
    return SP_OK;
}

/* `unmatched-target` is a refusal, or with allow_partial a note. */
static sp_status refuse_unmatched(const sp_audit *audit, const char *field, const char *name)
{
    if (audit->options->allow_partial) {
        sp_remark(&audit->adapter->notes, "%s lists \"%.150s\", but the file has no tensor for it",
                  field, name);
        return SP_OK;
    }
    return sp_refuse(audit->error, SP_REASON_UNMATCHED_TARGET, name, -1,
                     "%s lists \"%.150s\", which the base model has, but the file has no tensor "
                     "for it; allow-partial takes what there is",
                     field, name);
}

static bool base_has(const sp_audit *audit, sp_module module)
{
    return audit->options->geometry && sp_geometry_has_known(audit->options->geometry, module);
}

static sp_status check_parameters(const sp_audit *audit)
{
    const sp_peft_config *config = &audit->config;
    bool gate_up = false, down = false, router = false;

    for (size_t i = 0; i < audit->n_pairs; i++) {
        const sp_pair *pair = &audit->pairs[i];
        sp_module module = pair->a->key.module;
        bool fused = pair->a->key.fused != SP_FUSED_NONE;

        router |= module == SP_MODULE_ROUTER;
        gate_up |= fused ? !pair->is_down : module == SP_MODULE_EXPERT_GATE_PROJ;
        down |= fused ? pair->is_down : module == SP_MODULE_EXPERT_DOWN_PROJ;
    }
    if (config->lists_gate_up && !gate_up && base_has(audit, SP_MODULE_EXPERT_GATE_PROJ))
        return refuse_unmatched(audit, "target_parameters", "mlp.experts.gate_up_proj");
    if (config->lists_down && !down && base_has(audit, SP_MODULE_EXPERT_DOWN_PROJ))
        return refuse_unmatched(audit, "target_parameters", "mlp.experts.down_proj");
    if (config->lists_router && !router && base_has(audit, SP_MODULE_ROUTER))
        return refuse_unmatched(audit, "target_parameters", "mlp.gate.weight");
    return SP_OK;
}

/* ---- paths ----------------------------------------------------------------------------------- */

/*
 * The paths that may name a pair: its own, and for a fused one those of the parameters that it
 * covers, so that a list of gate_proj, up_proj, down_proj finds them. Up to 4, NULL-terminated.
 */
typedef struct path_list {
    char text[4][PATH_BYTES];
    int n;
} path_list;

static void add_path(path_list *list, const sp_module_key *key, size_t n, const char *end)
{
    snprintf(list->text[list->n++], PATH_BYTES, "%.*s%s", (int)(n < 400 ? n : 400), key->path, end);
}

static void paths_of(const sp_pair *pair, path_list *out_list)
{
    const sp_module_key *key = &pair->a->key;
    size_t n = key->path_bytes;

    out_list->n = 0;
    if (key->fused == SP_FUSED_NONE) {
        add_path(out_list, key, n, "");
        return;
    }
    if (key->fused == SP_FUSED_INNER)
        n -= strlen(".base_layer");
    if (pair->is_down) {
        add_path(out_list, key, n, ".down_proj");
        return;
    }
    add_path(out_list, key, n, ".gate_up_proj");
    add_path(out_list, key, n, ".gate_proj");
    add_path(out_list, key, n, ".up_proj");
}

/* ---- exclude_modules and layers_to_transform ------------------------------------------------- */

static sp_status check_not_excluded(const sp_audit *audit, const sp_pair *pair)
{
    const sp_peft_config *config = &audit->config;
    const sp_module_key *key = &pair->a->key;
    bool excluded = false, listed;
    sp_status status;

    if (key->fused != SP_FUSED_NONE)
        return SP_OK; /* neither rule reaches the parameters */
    status = sp_name_rule_match(&config->exclude_modules, key->path, key->path_bytes, &excluded,
                                audit->error);
    listed = key->layer < 0 || /* embedding and head are in no layer */
             sp_peft_config_layer_listed(config, key->path, key->path_bytes);
    if (status != SP_OK || (!excluded && listed))
        return status;
    return sp_refuse(audit->error, SP_REASON_LAYER_NOT_TARGETED, pair->a->tensor->name, key->layer,
                     "%.200s is in the file, but %s of adapter_config.json leaves it out",
                     pair->a->tensor->name, excluded ? "exclude_modules" : "layers_to_transform");
}

/* ---- target_modules -------------------------------------------------------------------------- */

/* Marks the listed names that match some pair or table of the file. */
static void mark_in_file(const sp_audit *audit, bool *marks)
{
    const sp_name_rule *rule = &audit->config.target_modules;

    for (size_t i = 0; i < audit->n_pairs; i++) {
        path_list paths;

        paths_of(&audit->pairs[i], &paths);
        for (int p = 0; p < paths.n; p++)
            sp_name_rule_mark(rule, paths.text[p], strlen(paths.text[p]), marks);
    }
    for (size_t i = 0; i < audit->n_items; i++) {
        const sp_module_key *key = &audit->items[i].key;

        if (key->role == SP_ROLE_TABLE || key->role == SP_ROLE_TOKENS)
            sp_name_rule_mark(rule, key->path, key->path_bytes, marks);
    }
}

/* Facts about the listed names, each [n_sorted]. */
typedef struct name_marks {
    bool *in_file; /* it matches some tensor */
    bool *wanted;  /* it matches some site of the base that the config does not exclude */
    bool *in_base; /* it matches some site of the base */
} name_marks;

/* Marks the names of one site of the base. */
static sp_status mark_site(const sp_audit *audit, const sp_site_row *row, const name_marks *marks)
{
    const char *path = sp_geometry_path(audit->options->geometry, row);
    bool excluded;
    sp_status status = sp_name_rule_match(&audit->config.exclude_modules, path, strlen(path),
                                          &excluded, audit->error);

    sp_name_rule_mark(&audit->config.target_modules, path, strlen(path), marks->in_base);
    if (status == SP_OK && !excluded &&
        (row->layer < 0 || sp_peft_config_layer_listed(&audit->config, path, strlen(path))))
        sp_name_rule_mark(&audit->config.target_modules, path, strlen(path), marks->wanted);
    return status;
}

static sp_status mark_in_base(const sp_audit *audit, const name_marks *marks)
{
    const sp_geometry *geometry = audit->options->geometry;

    sp_status status = SP_OK;

    for (int32_t i = 0; i < sp_geometry_n_sites(geometry) && status == SP_OK; i++) {
        const sp_site_row *row = sp_geometry_row(geometry, i);

        if (row->expert <= 0) /* one expert represents all */
            status = mark_site(audit, row, marks);
    }
    return status;
}

/* Adds remarks for names that match nothing in the base: another model's, or those of a part that
 * is not served. */
static void remark_unknown_names(const sp_audit *audit, const name_marks *marks)
{
    const sp_name_rule *rule = &audit->config.target_modules;
    const char *first = NULL;
    size_t n = 0;

    for (size_t i = 0; i < rule->n; i++) {
        size_t index = sp_name_rule_index(rule, rule->names[i]);

        if (index == rule->n_sorted || marks->in_file[index] || marks->in_base[index])
            continue;
        if (!first)
            first = rule->names[i];
        n++;
    }
    if (n > 0)
        sp_remark(&audit->adapter->notes,
                  "target_modules: %zu of %zu names fit no module of the base model that an "
                  "adapter can change (first \"%.150s\")",
                  n, rule->n, first);
}

/* The first listed name with places in the base and no tensor in the file. */
static sp_status check_marks(const sp_audit *audit, const name_marks *marks)
{
    const sp_name_rule *rule = &audit->config.target_modules;

    for (size_t i = 0; i < rule->n; i++) {
        size_t index = sp_name_rule_index(rule, rule->names[i]);
        sp_status status;

        if (index == rule->n_sorted || marks->in_file[index] || !marks->wanted[index])
            continue;
        status = refuse_unmatched(audit, "target_modules", rule->names[i]);
        if (status != SP_OK)
            return status;
    }
    return SP_OK;
}

static sp_status check_listed_names(const sp_audit *audit)
{
    size_t n = audit->config.target_modules.n_sorted;
    name_marks marks;
    sp_status status;

    if (n == 0 || !audit->options->geometry)
        return SP_OK;
    marks.in_file = sp_calloc(3 * n, sizeof *marks.in_file);
    if (!marks.in_file)
        return sp_fail_memory(audit->error, 3 * n * sizeof *marks.in_file, "target_modules");
    marks.wanted = marks.in_file + n;
    marks.in_base = marks.wanted + n;
    mark_in_file(audit, marks.in_file);
    status = mark_in_base(audit, &marks);
    if (status == SP_OK)
        status = check_marks(audit, &marks);
    if (status == SP_OK)
        remark_unknown_names(audit, &marks);
    sp_free(marks.in_file);
    return status;
}

/* Tensors that target_modules does not name are applied all the same, with a remark. */
static sp_status remark_unlisted(const sp_audit *audit)
{
    const sp_name_rule *rule = &audit->config.target_modules;
    size_t n_unlisted = 0, n = 0;

    for (size_t i = 0; i < audit->n_pairs; i++) {
        const sp_module_key *key = &audit->pairs[i].a->key;
        bool listed;
        sp_status status;

        if (key->fused != SP_FUSED_NONE ||
            (key->kind == SP_SITE_ROUTER && audit->config.lists_router))
            continue;
        status = sp_name_rule_match(rule, key->path, key->path_bytes, &listed, audit->error);
        if (status != SP_OK)
            return status;
        n++;
        n_unlisted += !listed;
    }
    if (rule->all_linear || !rule->given)
        return SP_OK;
    if (rule->n == 0 && !rule->regex)
        sp_remark(&audit->adapter->notes, "target_modules is an empty list");
    if (rule->regex && n_unlisted == n && n > 0)
        sp_remark(&audit->adapter->notes,
                  "the regular expression of target_modules fits none of the file's tensors");
    else if (n_unlisted > 0)
        sp_remark(&audit->adapter->notes,
                  "%zu of %zu modules in the file are not in target_modules; they are applied",
                  n_unlisted, n);
    return SP_OK;
}

sp_status sp_audit_targets(sp_audit *audit)
{
    sp_status status = SP_OK;

    for (size_t i = 0; status == SP_OK && i < audit->n_pairs; i++)
        status = check_not_excluded(audit, &audit->pairs[i]);
    if (status == SP_OK)
        status = check_listed_names(audit);
    if (status == SP_OK)
        status = check_parameters(audit);
    if (status == SP_OK)
        status = remark_unlisted(audit);
    if (status == SP_OK)
        sp_peft_config_remark_unused(&audit->config, &audit->adapter->notes);
    return status;
}
