/*
 * tables.c: whole rows of embed_tokens and lm_head: full tables, trainable tokens, and copies of
 * the base's own table that PEFT writes beside a pair. They are compared with the served table,
 * which the host gives or which is mapped just for that.
 */
#include "adapter/audit.h"
#include "adapter/values.h"

#include "base/alloc.h"
#include "base/file.h"
#include "base/grow.h"
#include "base/half.h"
#include "kernels/cpu/kernels.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#define CONVERTED_MAX 1024 /* elements of a row that are converted at a time */

/* The file's items for one of the two modules. */
typedef struct module_items {
    const sp_item *table, *tokens, *copy, *bias;
} module_items;

/* The same combined with config and base: which tokens replace which rows. */
typedef struct module_rows {
    sp_site_kind kind;
    const sp_item *table, *tokens, *copy, *bias;
    const sp_id_list *ids;
    int32_t own_rows; /* of the adapter's own vocabulary; 0: unknown */
} module_rows;

static module_items find_items(const sp_audit *audit, sp_site_kind kind)
{
    module_items found = {0};

    for (size_t i = 0; i < audit->n_items; i++) {
        const sp_item *item = &audit->items[i];

        if (item->key.kind != kind)
            continue;
        if (item->key.role == SP_ROLE_TABLE)
            found.table = item;
        if (item->key.role == SP_ROLE_TOKENS)
            found.tokens = item;
        if (item->key.role == SP_ROLE_BASE_COPY)
            found.copy = item;
        if (item->key.role == SP_ROLE_BIAS_COPY)
            found.bias = item;
    }
    return found;
}

/* The row of the embedding or the head; NULL: there is none, or no geometry. */
static const sp_site_row *table_row(const sp_audit *audit, sp_site_kind kind)
{
    const sp_geometry *geometry = audit->options->geometry;

    return geometry ? sp_geometry_row(geometry, sp_geometry_find_kind(geometry, kind)) : NULL;
}

static bool table_dims(const sp_audit *audit, sp_site_kind kind, int32_t *out_vocab,
                       int32_t *out_hidden)
{
    const sp_site_row *row = table_row(audit, kind);

    if (!row)
        return false;
    *out_vocab = kind == SP_SITE_EMBEDDING ? row->k_in : row->n_out;
    *out_hidden = kind == SP_SITE_EMBEDDING ? row->n_out : row->k_in;
    return true;
}

static bool is_tied(const sp_audit *audit)
{
    return audit->options->geometry && sp_geometry_is_tied(audit->options->geometry);
}

/* ---- the served table ------------------------------------------------------------------------ */

/* Finds the table by its path in the host's geometry. */
static const sp_tensor *find_by_path(const sp_audit *audit, const sp_checkpoint *base,
                                     sp_site_kind kind, const char *parameter)
{
    const sp_site_row *row = table_row(audit, kind);
    char name[SP_SITE_PATH_BYTES_MAX + 8];

    if (!row)
        return NULL;
    snprintf(name, sizeof name, "%s.%s", sp_geometry_path(audit->options->geometry, row),
             parameter);
    return sp_checkpoint_find(base, name);
}

/* "weight" or "bias" of the embedding or the head. */
static const sp_tensor *find_served(const sp_audit *audit, const sp_checkpoint *base,
                                    sp_site_kind kind, const char *parameter)
{
    static const char *const embed[] = {"model.embed_tokens", "model.language_model.embed_tokens",
                                        "language_model.model.embed_tokens", "embed_tokens"};
    static const char *const head[] = {"lm_head", "language_model.lm_head"};
    bool is_head = kind == SP_SITE_HEAD;
    size_t n = is_head ? sizeof head / sizeof *head : sizeof embed / sizeof *embed;
    const sp_tensor *found = sp_geometry_shape(audit->options->geometry)
                                 ? NULL
                                 : find_by_path(audit, base, kind, parameter);

    for (size_t i = 0; i < n && !found; i++) {
        char name[64];

        snprintf(name, sizeof name, "%s.%s", is_head ? head[i] : embed[i], parameter);
        found = sp_checkpoint_find(base, name);
    }
    return found;
}

static size_t index_of(sp_site_kind kind)
{
    return kind == SP_SITE_HEAD;
}

static void close_served(sp_served *table)
{
    sp_file_unmap(&table->mapping);
    sp_checkpoint_destroy(table->checkpoint);
    *table = (sp_served){0};
}

void sp_audit_close_served(sp_audit *audit)
{
    for (size_t i = 0; i < sizeof audit->served / sizeof *audit->served; i++) {
        close_served(&audit->served[i]);
        close_served(&audit->biases[i]);
    }
}

static sp_status refuse_base(const sp_audit *audit, sp_site_kind kind, const char *what)
{
    return sp_refuse(
        audit->error, SP_REASON_BASE_UNAVAILABLE, sp_audit_table_name(audit, kind), -1,
        "the adapter carries a table or bias of %s, and the base model's own, which it must "
        "be held against, %s",
        sp_audit_table_name(audit, kind), what);
}

static sp_status map_tensor(const sp_audit *audit, sp_site_kind kind, const sp_tensor *tensor,
                            sp_served *table)
{
    sp_error local;
    sp_status status =
        sp_file_map(sp_checkpoint_path(table->checkpoint, tensor->file), &table->mapping, &local);

    if (status != SP_OK || table->mapping.bytes < tensor->offset_bytes + tensor->bytes)
        return refuse_base(audit, kind, "cannot be mapped");
    table->data = (const char *)table->mapping.data + tensor->offset_bytes;
    table->rows = tensor->dims[0];
    table->cols = tensor->n_dims == 2 ? tensor->dims[1] : 1;
    return SP_OK;
}

static sp_status map_served(const sp_audit *audit, sp_site_kind kind, sp_served *table)
{
    const sp_tensor *tensor =
        find_served(audit, table->checkpoint, is_tied(audit) ? SP_SITE_EMBEDDING : kind, "weight");
    int32_t hidden = 0, vocab = 0;

    table_dims(audit, kind, &vocab, &hidden);
    if (!tensor || !sp_tensor_type_dtype(tensor->type, &table->dtype))
        return refuse_base(audit, kind, "is not in its checkpoint as F32, F16 or BF16");
    if (tensor->n_dims != 2 || tensor->dims[0] != vocab || tensor->dims[1] != hidden)
        return refuse_base(audit, kind, "has not the shape that config.json gives it");
    return map_tensor(audit, kind, tensor, table);
}

/* The table that the host gave, if it gave this one. */
static sp_status take_given(const sp_audit *audit, sp_site_kind kind, const sp_served_table *given,
                            sp_served *out_table)
{
    int32_t vocab = 0, hidden = 0;

    table_dims(audit, kind, &vocab, &hidden);
    if (given->rows != vocab || given->hidden != hidden)
        return refuse_base(audit, kind, "was given with another shape than the geometry's");
    if (sp_dtype_bytes(given->dtype) == 0)
        return refuse_base(audit, kind, "was given with a type that is not known");
    *out_table = (sp_served){.data = given->data,
                             .dtype = given->dtype,
                             .rows = given->rows,
                             .cols = given->hidden,
                             .approximate = given->approximate};
    return SP_OK;
}

static sp_status open_base(const sp_audit *audit, sp_site_kind kind, sp_served *table)
{
    sp_error local;
    sp_status status;

    if (!audit->options->base_dir)
        return refuse_base(audit, kind, "was not given");
    status = sp_checkpoint_open(audit->options->base_dir, "model", &table->checkpoint, &local);
    if (status == SP_ERR_MEMORY) {
        if (audit->error)
            *audit->error = local;
        return status;
    }
    if (status != SP_OK)
        return sp_refuse(audit->error, SP_REASON_BASE_UNAVAILABLE, sp_audit_table_name(audit, kind),
                         -1, "the base model cannot be read: %s", local.text);
    return SP_OK;
}

static sp_status open_served(sp_audit *audit, sp_site_kind kind)
{
    const sp_served_table *from =
        kind == SP_SITE_EMBEDDING ? audit->options->served_embed : audit->options->served_head;
    sp_served_table given = {.struct_bytes = sizeof given};
    sp_served *table = &audit->served[index_of(kind)];
    sp_status status = SP_OK;

    if (from)
        status = sp_struct_read(&given, sizeof given, from, "sp_served_table", audit->error);
    if (status != SP_OK)
        return status;
    if (given.data)
        return take_given(audit, kind, &given, table);
    status = open_base(audit, kind, table);
    return status == SP_OK ? map_served(audit, kind, table) : status;
}

/* Opens the base's bias, which only its checkpoint has. */
static sp_status open_bias(sp_audit *audit, sp_site_kind kind, const sp_item *copy)
{
    sp_served *bias = &audit->biases[index_of(kind)];
    sp_status status = open_base(audit, kind, bias);
    const sp_tensor *tensor;

    if (status != SP_OK)
        return status;
    tensor = find_served(audit, bias->checkpoint, kind, "bias");
    if (!tensor)
        return sp_refuse(audit->error, SP_REASON_BASE_COPY_DIFFERS, copy->tensor->name, -1,
                         "%.200s is a bias that the base model's %s has not: the adapter was made "
                         "for another base",
                         copy->tensor->name, sp_audit_table_name(audit, kind));
    if (tensor->n_dims != 1 || !sp_tensor_type_dtype(tensor->type, &bias->dtype))
        return refuse_base(audit, kind, "has a bias that is not [n] of F32, F16 or BF16");
    if (copy->tensor->dims[0] > tensor->dims[0])
        return sp_refuse(audit->error, SP_REASON_BASE_COPY_DIFFERS, copy->tensor->name, -1,
                         "%.200s is [%lld], the base model's bias [%lld]", copy->tensor->name,
                         (long long)copy->tensor->dims[0], (long long)tensor->dims[0]);
    return map_tensor(audit, kind, tensor, bias);
}

/* ---- comparing ------------------------------------------------------------------------------- */

static float rounded(float value, sp_dtype dtype)
{
    if (dtype == SP_DTYPE_BF16)
        return sp_bf16_to_f32(sp_f32_to_bf16(value));
    if (dtype == SP_DTYPE_F16)
        return sp_f16_to_f32(sp_f32_to_f16(value));
    return value;
}

/* Loads an element that may be unaligned, as in a mapped file. */
static float load(const void *data, sp_dtype dtype, int64_t index)
{
    const char *at = (const char *)data + index * (int64_t)sp_dtype_bytes(dtype);
    uint32_t word = 0;

    memcpy(&word, at, sp_dtype_bytes(dtype));
    return sp_values_at(&word, dtype, 0);
}

/*
 * Whether an element of a copy is the served one. A difference is accepted if rounding either to
 * the other's type explains it, which is how copies are made, or the noise of a quantised base.
 */
static bool same_value(float own, sp_dtype dtype, float theirs, const sp_served *table)
{
    if (table->approximate)
        return fabsf(own - theirs) <= SP_OVERLAY_NOISE_MAX;
    return sp_f32_bits(rounded(own, table->dtype)) == sp_f32_bits(theirs) ||
           sp_f32_bits(rounded(theirs, dtype)) == sp_f32_bits(own);
}

/* Index of the first of n elements that is not the served table's, from `first` on; n if none. */
static int64_t first_difference(const void *data, sp_dtype dtype, const sp_served *table,
                                int64_t first, int64_t n)
{
    const char *base = (const char *)table->data + first * (int64_t)sp_dtype_bytes(table->dtype);

    if (dtype == table->dtype && memcmp(data, base, (size_t)n * sp_dtype_bytes(dtype)) == 0)
        return n;
    for (int64_t i = 0; i < n; i++) {
        if (!same_value(load(data, dtype, i), dtype, load(base, table->dtype, i), table))
            return i;
    }
    return n;
}

/* ---- copies of the base ---------------------------------------------------------------------- */

sp_status sp_audit_compare_copy(const sp_audit *audit, const sp_item *copy, uint64_t at,
                                const void *piece, size_t n, sp_error *error)
{
    bool is_bias = copy->key.role == SP_ROLE_BIAS_COPY;
    const sp_served *table = is_bias ? &audit->biases[index_of(copy->key.kind)]
                                     : &audit->served[index_of(copy->key.kind)];
    int64_t element_bytes = (int64_t)sp_dtype_bytes(copy->dtype);
    int64_t first = (int64_t)at / element_bytes, count = (int64_t)n / element_bytes;
    int64_t same = first_difference(piece, copy->dtype, table, first, count);

    if (same == count)
        return SP_OK;
    return sp_refuse(error, SP_REASON_BASE_COPY_DIFFERS, copy->tensor->name, first + same,
                     "%.200s is not the base model's %s (first in row %lld): the adapter was "
                     "made for another base",
                     copy->tensor->name, is_bias ? "bias" : "table",
                     (long long)((first + same) / table->cols));
}

/* A copy may be shorter than a padded table, as a tokenizer's ids are: only its rows are
 * compared. */
static sp_status check_copy_shape(const sp_audit *audit, const sp_item *copy,
                                  const sp_served *table)
{
    const sp_tensor *tensor = copy->tensor;

    if (tensor->dims[0] <= table->rows && tensor->dims[1] == table->cols)
        return SP_OK;
    return sp_refuse(audit->error, SP_REASON_BASE_COPY_DIFFERS, tensor->name, -1,
                     "%.200s is [%lld, %lld], the base model's table [%lld, %lld]", tensor->name,
                     (long long)tensor->dims[0], (long long)tensor->dims[1], (long long)table->rows,
                     (long long)table->cols);
}

/* ---- overridden rows ------------------------------------------------------------------------- */

/* Whether a difference exceeds quantisation noise. */
static bool exceeds_noise(const void *own, sp_dtype dtype, const void *theirs,
                          const sp_served *table)
{
    for (int64_t i = 0; i < table->cols; i++)
        if (!same_value(load(own, dtype, i), dtype, load(theirs, table->dtype, i), table))
            return true;
    return false;
}

/* Whether a row differs in any bit after conversion to the served type. */
static bool row_differs(const sp_kernels *kernels, const sp_item *item, const char *own,
                        const sp_served *table, const char *theirs)
{
    int64_t own_bytes = (int64_t)sp_dtype_bytes(item->dtype);
    int64_t bytes = (int64_t)sp_dtype_bytes(table->dtype);
    uint32_t converted[CONVERTED_MAX]; /* of either width */

    if (table->approximate)
        return exceeds_noise(own, item->dtype, theirs, table);
    if (item->dtype == table->dtype)
        return memcmp(own, theirs, (size_t)(table->cols * bytes)) != 0;
    for (int64_t begin = 0; begin < table->cols; begin += CONVERTED_MAX) {
        int64_t n = table->cols - begin < CONVERTED_MAX ? table->cols - begin : CONVERTED_MAX;

        kernels->convert(table->dtype, converted, item->dtype, own + begin * own_bytes, n);
        if (memcmp(converted, theirs + begin * bytes, (size_t)(n * bytes)) != 0)
            return true;
    }
    return false;
}

/* Marks in overridden [vocab] the rows of the full table that differ from the served ones. A table
 * may have fewer rows: a tokenizer has fewer ids than a base whose table is padded. */
static int32_t mark_different_rows(const sp_kernels *kernels, const sp_item *item,
                                   const sp_served *table, bool *overridden)
{
    int32_t n = 0;
    int64_t cols = table->cols;
    int64_t rows = item->tensor->dims[0] < table->rows ? item->tensor->dims[0] : table->rows;

    for (int64_t row = 0; row < rows; row++) {
        const char *own =
            (const char *)item->data + row * cols * (int64_t)sp_dtype_bytes(item->dtype);
        const char *theirs =
            (const char *)table->data + row * cols * (int64_t)sp_dtype_bytes(table->dtype);

        if (!row_differs(kernels, item, own, table, theirs))
            continue;
        overridden[row] = true;
        n++;
    }
    return n;
}

static void remark_rows(sp_audit *audit, sp_site_kind kind, const sp_item *item, int32_t n,
                        const sp_served *table)
{
    sp_remarks *notes = &audit->adapter->notes;
    int64_t more = item->tensor->dims[0] - table->rows;

    if (n == 0)
        sp_remark(notes, "the table of %s equals the base model's",
                  sp_audit_table_name(audit, kind));
    else
        sp_remark(notes, "%d of %lld rows of %s differ from the base model's", n,
                  (long long)table->rows, sp_audit_table_name(audit, kind));
    if (more > 0)
        sp_remark(notes, "%lld rows of %s are beyond the served vocabulary and are dropped",
                  (long long)more, sp_audit_table_name(audit, kind));
    if (more < 0)
        sp_remark(notes, "the table of %s has %lld rows; the base model's %lld beyond them stay",
                  sp_audit_table_name(audit, kind), (long long)item->tensor->dims[0],
                  (long long)-more);
}

/* Checks that the adapter's tokens are among its own rows: those of its table, or the base's. */
static sp_status check_ids(const sp_audit *audit, sp_site_kind kind, const sp_id_list *list,
                           int32_t own_rows)
{
    int64_t vocab = audit->served[index_of(kind)].rows;
    int64_t adapter_rows = own_rows ? own_rows : vocab;

    for (int32_t i = 0; i < list->n; i++) {
        if (list->ids[i] >= adapter_rows)
            return sp_refuse(audit->error, SP_REASON_BAD_TOKEN_INDEX, "trainable_token_indices", i,
                             "token %d is not among the %lld rows of the adapter's %s",
                             list->ids[i], (long long)adapter_rows,
                             sp_audit_table_name(audit, kind));
    }
    return SP_OK;
}

static void mark_ids(sp_audit *audit, sp_site_kind kind, const sp_id_list *list, int32_t vocab,
                     bool *overridden)
{
    int32_t n_dropped = 0;

    for (int32_t i = 0; i < list->n; i++) {
        if (list->ids[i] < vocab)
            overridden[list->ids[i]] = true;
        else
            n_dropped++;
    }
    if (n_dropped > 0)
        sp_remark(&audit->adapter->notes,
                  "%d trainable tokens of %s are beyond the served vocabulary and are dropped",
                  n_dropped, sp_audit_table_name(audit, kind));
}

/* Bytes of the rows themselves, and of a map from every token to its row or none. */
static size_t overlay_bytes(const sp_audit *audit, int32_t rows, const sp_served *table)
{
    if (rows == 0)
        return 0;
    return (size_t)rows * (size_t)table->cols * sp_dtype_bytes(audit->options->pool_dtype) +
           (size_t)table->rows * sizeof(int32_t);
}

/* Which rows of one module change, from its full table and its trainable tokens. */
static sp_status measure_rows(sp_audit *audit, const module_rows *rows, int32_t *out_rows)
{
    const sp_served *table = &audit->served[index_of(rows->kind)];
    int32_t vocab = (int32_t)table->rows;
    bool *overridden;
    const sp_kernels *kernels;
    sp_status status = sp_kernels_get(NULL, &kernels, audit->error);

    if (status != SP_OK)
        return status;
    overridden = sp_calloc((size_t)vocab, sizeof *overridden);
    if (!overridden)
        return sp_fail_memory(audit->error, (size_t)vocab, "the rows of a table");
    if (rows->table)
        remark_rows(audit, rows->kind, rows->table,
                    mark_different_rows(kernels, rows->table, table, overridden), table);
    mark_ids(audit, rows->kind, rows->ids, vocab, overridden);
    *out_rows = 0;
    for (int32_t i = 0; i < vocab; i++)
        *out_rows += overridden[i];
    audit->adapter->overlay_bytes += overlay_bytes(audit, *out_rows, table);
    sp_free(overridden);
    return SP_OK;
}

/* ---- config and shapes ----------------------------------------------------------------------- */

static sp_status check_shape(const sp_audit *audit, sp_site_kind kind, const sp_item *item)
{
    const int64_t *dims = item->tensor->dims;
    int32_t vocab = 0, hidden = 0;
    bool rows_fit;

    if (!table_dims(audit, kind, &vocab, &hidden))
        return SP_OK;
    rows_fit = item->key.role == SP_ROLE_TOKENS || dims[0] >= 1;
    if (rows_fit && dims[1] == hidden)
        return SP_OK;
    return sp_refuse(audit->error, SP_REASON_SHAPE_MISMATCH, item->tensor->name, -1,
                     "%.200s is [%lld, %lld]; the base model's table is [%d, %d]",
                     item->tensor->name, (long long)dims[0], (long long)dims[1], vocab, hidden);
}

static sp_status check_tokens(const sp_audit *audit, sp_site_kind kind, const sp_item *tokens,
                              const sp_id_list *list)
{
    static const char field[] = "trainable_token_indices";

    if (tokens && !list->given)
        return sp_refuse(audit->error, SP_REASON_BAD_TOKEN_INDEX, tokens->tensor->name, -1,
                         "%.200s has rows, but %s lists no tokens for %s", tokens->tensor->name,
                         field, sp_audit_table_name(audit, kind));
    if (!tokens && list->given)
        return sp_refuse(audit->error, SP_REASON_BAD_TOKEN_INDEX, field, -1,
                         "%s lists %d tokens for %s, but the file has no rows for them", field,
                         list->n, sp_audit_table_name(audit, kind));
    if (tokens && tokens->tensor->dims[0] != list->n)
        return sp_refuse(audit->error, SP_REASON_BAD_TOKEN_INDEX, tokens->tensor->name, -1,
                         "%.200s has %lld rows; %s lists %d tokens", tokens->tensor->name,
                         (long long)tokens->tensor->dims[0], field, list->n);
    return SP_OK;
}

static bool ends_with(const char *text, const char *ending)
{
    size_t n = strlen(text), n_ending = strlen(ending);

    return n >= n_ending && strcmp(text + n - n_ending, ending) == 0;
}

/* Checks that modules_to_save has its table. */
static sp_status check_saved(const sp_audit *audit, sp_site_kind kind, const sp_item *table)
{
    const sp_name_rule *rule = &audit->config.modules_to_save;
    const char *name = sp_audit_table_name(audit, kind);

    for (size_t i = 0; i < rule->n; i++) {
        if (table || !ends_with(rule->names[i], name))
            continue;
        if (!audit->options->allow_partial)
            return sp_refuse(audit->error, SP_REASON_UNMATCHED_TARGET, rule->names[i], -1,
                             "modules_to_save lists \"%.100s\", but the file has no table of it; "
                             "allow-partial takes what there is",
                             rule->names[i]);
        sp_remark(&audit->adapter->notes,
                  "modules_to_save lists \"%.100s\", but the file has no table of it",
                  rule->names[i]);
    }
    return SP_OK;
}

/*
 * ensure_weight_tying on a tied base: the two were trained as one table, and PEFT stores both. With
 * one of them alone the other side would keep the base's rows, which nobody trained.
 */
static sp_status check_tied_tables(const sp_audit *audit, bool has_embed, bool has_head)
{
    const char *lacking = sp_audit_table_name(audit, has_embed ? SP_SITE_HEAD : SP_SITE_EMBEDDING);

    if (!audit->config.ties_tables || has_embed == has_head)
        return SP_OK;
    if (!audit->options->allow_partial)
        return sp_refuse(audit->error, SP_REASON_UNMATCHED_TARGET, lacking, -1,
                         "ensure_weight_tying is true, so that embed_tokens and lm_head have one "
                         "table, but the file has none for %s; allow-partial takes what there is",
                         lacking);
    sp_remark(&audit->adapter->notes,
              "ensure_weight_tying is true, but the file has no table for %s, which stays as it is",
              lacking);
    return SP_OK;
}

/* ---- one module ------------------------------------------------------------------------------ */

static sp_status check_module(sp_audit *audit, sp_site_kind kind, const module_items *items,
                              const sp_id_list *list)
{
    const sp_item *own[] = {items->table, items->tokens};
    sp_status status = check_tokens(audit, kind, items->tokens, list);

    if (status == SP_OK)
        status = check_saved(audit, kind, items->table);
    for (size_t i = 0; i < 2 && status == SP_OK; i++) {
        if (own[i])
            status = check_shape(audit, kind, own[i]);
    }
    return status;
}

static bool needs_served(const module_rows *rows)
{
    return rows->table || rows->copy || rows->ids->n > 0;
}

/* Checks one module against the served table as far as possible without data. */
static sp_status open_module(sp_audit *audit, const module_rows *rows)
{
    sp_status status = SP_OK;

    if (rows->bias && audit->options->geometry)
        status = open_bias(audit, rows->kind, rows->bias);
    if (status != SP_OK || !needs_served(rows) || !audit->options->geometry)
        return status;
    status = open_served(audit, rows->kind);
    if (status == SP_OK && rows->copy)
        status = check_copy_shape(audit, rows->copy, &audit->served[index_of(rows->kind)]);
    if (status == SP_OK)
        status = check_ids(audit, rows->kind, rows->ids, rows->own_rows);
    return status;
}

/* The rest, with data. A copy that differs was refused when its data was read. */
static sp_status compare_module(sp_audit *audit, const module_rows *rows, int32_t *out_rows)
{
    bool checked = audit->options->geometry != NULL;

    *out_rows = -1;
    if (rows->copy)
        sp_audit_ignore(audit, rows->copy->tensor->name,
                        checked ? "a copy of the base model's own table"
                                : "a copy of the base's table, not compared without a base model");
    if (rows->bias)
        sp_audit_ignore(audit, rows->bias->tensor->name,
                        checked ? "a copy of the base model's own bias"
                                : "a copy of the base's bias, not compared without a base model");
    if (!checked || (!rows->table && rows->ids->n == 0))
        return SP_OK;
    return measure_rows(audit, rows, out_rows);
}

static sp_factor table_factor(const sp_item *item)
{
    if (!item)
        return (sp_factor){0};
    return (sp_factor){.data = item->data,
                       .dtype = item->dtype,
                       .rows = (int32_t)item->tensor->dims[0],
                       .cols = (int32_t)item->tensor->dims[1],
                       .row_stride = item->tensor->dims[1],
                       .col_stride = 1};
}

static sp_module_set table_bit(const sp_audit *audit, sp_site_kind kind)
{
    const sp_site_row *row = table_row(audit, kind);

    if (row)
        return (sp_module_set)1 << row->module;
    return SP_MODULE_BIT(kind == SP_SITE_HEAD ? SP_MODULE_LM_HEAD : SP_MODULE_EMBED_TOKENS);
}

static sp_status add_table(sp_audit *audit, const module_rows *rows, int32_t rows_changed)
{
    sp_adapter *adapter = audit->adapter;
    const sp_id_list *list = rows->ids;
    size_t index = adapter->n_tables;
    int32_t *ids = NULL;

    if (!rows->table && !rows->tokens)
        return SP_OK;
    if (list->n > 0) {
        ids = sp_malloc((size_t)list->n * sizeof *ids);
        if (!ids)
            return sp_fail_memory(audit->error, (size_t)list->n * sizeof *ids, "token ids");
        memcpy(ids, list->ids, (size_t)list->n * sizeof *ids);
    }
    adapter->token_ids[index] = ids;
    adapter->rows_changed[index] = rows_changed;
    adapter->tables[index] = (sp_adapter_table){.struct_bytes = sizeof(sp_adapter_table),
                                                .kind = rows->kind,
                                                .module = sp_audit_table_name(audit, rows->kind),
                                                .full = table_factor(rows->table),
                                                .trainable = table_factor(rows->tokens),
                                                .token_ids = ids,
                                                .n_ids = list->n,
                                                .rows = rows->own_rows};
    adapter->modules |= table_bit(audit, rows->kind);
    adapter->n_tables++;
    return SP_OK;
}

/* Rows of the adapter's vocabulary according to this table; 0: unknown. */
static int32_t rows_of(const sp_item *table)
{
    return table ? (int32_t)table->tensor->dims[0] : 0;
}

/* Embed_tokens and lm_head, in this order. */
static void resolve_rows(const sp_audit *audit, module_rows out_rows[2])
{
    static const sp_id_list none = {0};
    module_items embed = find_items(audit, SP_SITE_EMBEDDING);
    module_items head = find_items(audit, SP_SITE_HEAD);
    module_rows *rows = out_rows;

    rows[0] = (module_rows){SP_SITE_EMBEDDING,   embed.table, embed.tokens,
                            embed.copy,          embed.bias,  &audit->config.tokens_embed,
                            rows_of(embed.table)};
    rows[1] = (module_rows){SP_SITE_HEAD,       head.table, head.tokens,
                            head.copy,          head.bias,  &audit->config.tokens_head,
                            rows_of(head.table)};
    /* On a tied base trainable tokens replace the head's rows too. */
    if (is_tied(audit) && !head.tokens && embed.tokens) {
        rows[1].tokens = embed.tokens;
        rows[1].ids = rows[0].ids;
        rows[1].own_rows = rows[0].own_rows;
    }
    for (size_t i = 0; i < 2; i++) {
        if (!rows[i].tokens)
            rows[i].ids = &none;
    }
}

sp_status sp_audit_table_shapes(sp_audit *audit)
{
    module_items embed = find_items(audit, SP_SITE_EMBEDDING);
    module_items head = find_items(audit, SP_SITE_HEAD);
    module_rows rows[2];
    sp_status status = check_module(audit, SP_SITE_EMBEDDING, &embed, &audit->config.tokens_embed);

    if (status == SP_OK)
        status = check_module(audit, SP_SITE_HEAD, &head, &audit->config.tokens_head);
    if (status == SP_OK && is_tied(audit) && !embed.tokens && !head.tokens)
        status = check_tied_tables(audit, embed.table != NULL, head.table != NULL);
    resolve_rows(audit, rows);
    for (size_t i = 0; i < 2 && status == SP_OK; i++)
        status = open_module(audit, &rows[i]);
    return status;
}

sp_status sp_audit_tables(sp_audit *audit)
{
    module_rows rows[2];
    int32_t changed[2];
    sp_status status = SP_OK;

    resolve_rows(audit, rows);
    for (size_t i = 0; i < 2 && status == SP_OK; i++)
        status = compare_module(audit, &rows[i], &changed[i]);
    for (size_t i = 0; i < 2 && status == SP_OK; i++)
        status = add_table(audit, &rows[i], changed[i]);
    return status;
}
