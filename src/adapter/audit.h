/*
 * audit.h: the steps from a folder to a checked adapter, and what they share. An audit is used by
 * one thread at a time, but for sp_audit_compare_copy, which tasks that read may call. Pointers may
 * not be NULL unless said so.
 *
 * The steps, each in its file: the config is read (peft_config.c), every tensor is identified
 * (module_key.c), paired and checked against config and geometry (audit.c, targets.c, promised.c,
 * fused.c), data is read and its values are checked (intake.c, values.c), tables are compared with
 * the base's (tables.c), and the content is hashed (digest.c).
 */
#ifndef SP_ADAPTER_AUDIT_H
#define SP_ADAPTER_AUDIT_H

#include "adapter/geometry.h"
#include "adapter/module_key.h"
#include "adapter/peft_config.h"
#include "adapter/reason.h"
#include "base/file.h"
#include "base/hash.h"

#include <sidepath/checkpoint.h>

#include <stdatomic.h>

/* One tensor of the file that is applied. */
typedef struct sp_item {
    const sp_tensor *tensor; /* in the audit's list */
    sp_module_key key;
    sp_dtype dtype;
    const void *data; /* as stored, filled while data is read; aligned to 64 bytes; NULL: a copy of
                         the base, which is not kept */
    uint8_t leaf[SP_SHA256_BYTES]; /* of the data, once it is complete */
} sp_item;

/* A and B of one place (a site, or the fused experts of a layer). */
typedef struct sp_pair {
    const sp_item *a, *b;
    int32_t rank; /* per expert where the pair is fused */
    float scale;
    /* fused experts only */
    bool is_down;    /* else gate_up */
    bool is_swapped; /* A of the file reads the output and B gives the input: a transposed delta */
    bool is_settled; /* parameter and orientation follow from the files */
    int32_t experts; /* 0 without a geometry */
} sp_pair;

/*
 * The served table of one module, or its bias (cols 1): elements [rows, cols], of the host or of
 * the base's checkpoint.
 */
typedef struct sp_served {
    sp_checkpoint *checkpoint; /* NULL: given by the host */
    sp_mapping mapping;
    const void *data; /* NULL: not needed */
    sp_dtype dtype;
    int64_t rows, cols;
    bool approximate;
} sp_served;

struct sp_adapter {
    atomic_int references;
    char *name;
    sp_geometry *geometry; /* one reference; NULL: audited without one */
    bool has_digest; /* false without a geometry where a fused pair's reading is not settled */
    sp_digest digest;
    void *data;  /* the kept tensors, one block */
    char *paths; /* of the sites, each with its NUL, where there is no geometry */
    sp_adapter_site *sites;
    size_t n_sites;
    sp_adapter_table tables[2];
    size_t n_tables;
    int32_t *token_ids[2];   /* owned lists that the tables point to */
    int32_t rows_changed[2]; /* of each table, compared with the served one; -1: not compared */
    int32_t rank_max, expert_rank_max;
    sp_module_set modules;
    size_t overlay_bytes;
    double hash_seconds;
    sp_remarks notes;
    sp_remarks ignored; /* texts, alternating: tensor, reason */
};

typedef struct sp_audit {
    const sp_adapter_options *options;
    sp_adapter *adapter; /* being built */
    sp_peft_config config;
    const sp_tensor *tensors; /* [n_tensors], ascending by name; borrowed */
    size_t n_tensors;
    sp_item *items; /* the table's places first: ascending by layer, module, expert, fused, role;
                       then the others by path and role */
    size_t n_items;
    sp_pair *pairs; /* in the items' order */
    size_t n_pairs;
    sp_served served[2]; /* of embed_tokens and lm_head, where the adapter has rows of them */
    sp_served biases[2]; /* of both, where it has a copy */
    sp_error *error;
} sp_audit;

/* Identifies and pairs all tensors: fills items and pairs, with shapes, ranks and scales
 * checked. */
sp_status sp_audit_names(sp_audit *audit);

/* Checks what target_parameters names: `unsupported-parameter`. Before sp_audit_names. */
sp_status sp_audit_parameters(sp_audit *audit);

/* Checks target_modules, exclude_modules, layers_to_transform and target_parameters against the
 * items. */
sp_status sp_audit_targets(sp_audit *audit);

/* Notes the places that target_modules covers and the file lacks. After sp_audit_targets. */
sp_status sp_audit_promised(sp_audit *audit);

/*
 * Decides how a fused pair is read, and checks its shapes. `sibling` is the layer's other fused
 * pair, or NULL.
 */
sp_status sp_audit_fused(sp_audit *audit, sp_pair *pair, const sp_pair *sibling);

/* The sites of one fused pair, experts × (gate and up, or down), as views of its tensors. */
size_t sp_fused_n_sites(const sp_pair *pair);
/* Writes those sites to out_sites [sp_fused_n_sites]; their factors borrow the pair's data. */
void sp_fused_sites(const sp_audit *audit, const sp_pair *pair, sp_adapter_site *out_sites);

/*
 * Checks the shapes and lists of tables, trainable tokens and copies of the base, and opens the
 * served tables that they will be compared with: before gigabytes of a wrong one are read.
 */
sp_status sp_audit_table_shapes(sp_audit *audit);

/* A copy of a base parameter beside a pair: it is compared and not applied. */
bool sp_item_is_copy(const sp_item *item);

/* Compares a piece of a copy of the base's table or bias, [n] bytes from byte `at` on, with the
 * served one. */
sp_status sp_audit_compare_copy(const sp_audit *audit, const sp_item *copy, uint64_t at,
                                const void *piece, size_t n, sp_error *error);

/* Compares full tables and trainable tokens with the served tables. After all data is read. */
sp_status sp_audit_tables(sp_audit *audit);

/* Releases the served tables and biases; may be called twice. */
void sp_audit_close_served(sp_audit *audit);

/* Fills the adapter's sites from the pairs. */
sp_status sp_audit_sites(sp_audit *audit);

/* Whether the product of any of its pairs, as a pool of this type holds them, is not zero.
 * SP_ERR_MEMORY. */
sp_status sp_sites_have_effect(const sp_adapter *adapter, sp_dtype pool, bool *out_effect,
                               sp_error *error);

/* `no-effect` unless some product is not zero or a row is replaced. */
sp_status sp_audit_effect(sp_audit *audit, bool has_rows);

/* Computes the adapter's digest from all items, whose leaves must be complete. SP_ERR_MEMORY. */
sp_status sp_audit_digest(sp_audit *audit);

/* The name of the embedding or the head in texts. */
const char *sp_audit_table_name(const sp_audit *audit, sp_site_kind kind);

/* The bit of this item's module in the adapter's set. */
sp_module_set sp_audit_module_bit(const sp_adapter *adapter, const sp_module_key *key);

/* Whether the key is of a router or expert, which are stored apart from the linear sites. */
bool sp_key_is_expert(const sp_module_key *key);

/* True for the codes that allow_partial turns into skipped tensors. */
bool sp_reason_is_partial(const char *code);

/* Adds a tensor to the receipt's list of ignored ones. */
void sp_audit_ignore(sp_audit *audit, const char *tensor, const char *reason);

/* The bf16, f16 or f32 element as a double, after conversion to `pool`. */
double sp_factor_value(const sp_factor *factor, int64_t row, int64_t col, sp_dtype pool);

#endif
