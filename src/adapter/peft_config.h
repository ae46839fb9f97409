/*
 * peft_config.h: adapter_config.json, read and checked. What changes the mathematics and is not
 * supported is refused by name; labels are ignored; an unknown key is refused unless its value has
 * no effect. A config belongs to one thread at a time, because matching counts steps.
 */
#ifndef SP_ADAPTER_PEFT_CONFIG_H
#define SP_ADAPTER_PEFT_CONFIG_H

#include "adapter/name_rule.h"
#include "base/json.h"
#include "base/text.h"

#include <sidepath/adapter.h>

/* One row of rank_pattern or alpha_pattern, in the file's order. */
typedef struct sp_pattern_rule {
    sp_pattern *pattern;
    const char *key; /* borrowed from the config's JSON */
    double value;
    bool decides; /* this row has given some path its value */
} sp_pattern_rule;

typedef struct sp_pattern_rules {
    sp_pattern_rule *rules;
    size_t n;
} sp_pattern_rules;

typedef struct sp_id_list {
    int32_t *ids; /* in the order of the file; layers_to_transform ascends */
    int32_t n;
    bool given;
} sp_id_list;

typedef enum sp_expert_columns {
    SP_COLUMNS_RANK_MAJOR = 0,       /* column j * experts + e: what PEFT writes */
    SP_COLUMNS_GROUPED_BY_EXPERT = 1 /* column e * rank + j: what some trainers wrote, marked so */
} sp_expert_columns;

typedef enum sp_peft_orientation {
    SP_ORIENTATION_UNKNOWN = 0, /* no version in the file: the shapes must decide */
    SP_ORIENTATION_LINEAR = 1,  /* PEFT 0.19 and later: A reads the input, as in a linear layer */
    SP_ORIENTATION_SWAPPED = 2  /* PEFT 0.18 and before: transposed for 3-D parameters */
} sp_peft_orientation;

typedef struct sp_peft_config {
    json_t *root;       /* owns every borrowed string */
    int64_t steps_left; /* of all its regular expressions */
    int32_t rank;
    double alpha;
    bool rslora;
    sp_pattern_rules ranks, alphas;
    sp_name_rule target_modules, exclude_modules, target_parameters, modules_to_save;
    sp_name_rule layers_pattern;
    sp_id_list layers_to_transform;
    sp_id_list tokens_embed, tokens_head; /* trainable_token_indices */
    sp_expert_columns columns;
    sp_peft_orientation orientation;
    bool lists_gate_up, lists_down, lists_router; /* what target_parameters names */
    bool ties_tables; /* ensure_weight_tying: embed_tokens and lm_head were trained as one table */
} sp_peft_config;

/* Remarks for the receipt: texts, each with its NUL, concatenated. */
typedef struct sp_remarks {
    sp_text text;
    size_t n;
} sp_remarks;

/* Appends one formatted text. An allocation failure is kept in remarks->text. */
void sp_remark(sp_remarks *remarks, const char *format, ...) SP_PRINTF(2, 3);

/*
 * Parses the text of the file. *out_config is zeroed first and owned by the caller in every case
 * (sp_peft_config_clear). Only the two allow_ options of `options` that concern the config are
 * read. Pure: no I/O.
 */
sp_status sp_peft_config_parse(const char *bytes, size_t n_bytes, const char *subject,
                               const sp_adapter_options *options, sp_peft_config *out_config,
                               sp_remarks *remarks, sp_error *error);

/* Adds remarks for the rows of rank_pattern and alpha_pattern that no path has used. */
void sp_peft_config_remark_unused(const sp_peft_config *config, sp_remarks *remarks);

/* Name of known field `index`; NULL past the last. */
const char *sp_peft_config_field(size_t index);

/* Frees what the config owns and zeroes it. Zeros are allowed. */
void sp_peft_config_clear(sp_peft_config *config);

/*
 * Rank and scale of the module (or parameter) with this path, by the patterns; the scale is alpha /
 * r, or alpha / sqrt(r) with rsLoRA, in double, stored as float. The one function for every kind.
 */
sp_status sp_peft_config_scale(const sp_peft_config *config, const char *path, size_t n,
                               int32_t *out_rank, float *out_scale, sp_error *error);

/*
 * False when layers_to_transform is given and does not list the layer in `path`, as PEFT finds it
 * (layers_pattern, else the last ".word.number." of the path).
 */
bool sp_peft_config_layer_listed(const sp_peft_config *config, const char *path, size_t n);

#endif
