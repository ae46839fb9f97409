/*
 * tables.c: whole rows of embed_tokens and lm_head: full tables, trainable tokens, and copies of
 * the base's own table that PEFT writes beside a pair. They are held against the served table,
 * which is mapped for that and for nothing else.
 */
#include "adapter/audit.h"
#include "adapter/values.h"

#include "base/alloc.h"
#include "base/file.h"
#include "base/half.h"
#include "kernels/kernels.h"

#include <stdlib.h>
#include <string.h>

#define PIECE_BYTES   ((size_t)1 << 20)
#define CONVERTED_MAX 1024 /* elements of a row that are converted at a time */

/* What the file holds for one of the two modules. */
typedef struct module_items {
    const sp_item *table, *tokens, *copy;
} module_items;

/* The served table of one module: elements [rows, cols] of the base's checkpoint. */
typedef struct served {
    sp_checkpoint *checkpoint;
    sp_mapping mapping;
    const void *data;
    sp_dtype dtype;
    int64_t rows, cols;
} served;

static module_items find_items(const sp_audit *audit, sp_module module)
{
    module_items found = {0};

    for (size_t i = 0; i < audit->n_items; i++) {
        const sp_item *item = &audit->items[i];

        if (item->key.module != module)
            continue;
        if (item->key.role == SP_ROLE_TABLE)
            found.table = item;
        if (item->key.role == SP_ROLE_TOKENS)
            found.tokens = item;
        if (item->key.role == SP_ROLE_BASE_COPY)
            found.copy = item;
    }
    return found;
}

/* ---- the served table ------------------------------------------------------------------------ */

static const sp_tensor *find_served(const sp_checkpoint *base, sp_module module, bool tied)
{
    static const char *const embed[] = {
        "model.embed_tokens.weight", "model.language_model.embed_tokens.weight",
        "language_model.model.embed_tokens.weight", "embed_tokens.weight"};
    static const char *const head[] = {"lm_head.weight", "language_model.lm_head.weight"};
    const sp_tensor *found = NULL;

    if (module == SP_MODULE_LM_HEAD && !tied) {
        for (size_t i = 0; i < sizeof head / sizeof *head && !found; i++)
            found = sp_checkpoint_find(base, head[i]);
        return found;
    }
    for (size_t i = 0; i < sizeof embed / sizeof *embed && !found; i++)
        found = sp_checkpoint_find(base, embed[i]);
    return found;
}

static void close_served(served *table)
{
    sp_file_unmap(&table->mapping);
    sp_checkpoint_destroy(table->checkpoint);
    *table = (served){0};
}

static sp_status refuse_base(const sp_audit *audit, sp_module module, const char *what)
{
    return sp_refuse(audit->error, SP_REASON_BASE_UNAVAILABLE, sp_module_name(module), -1,
                     "the adapter carries a table of %s, and the base model's own, which it must "
                     "be held against, %s",
                     sp_module_name(module), what);
}

static sp_status map_served(const sp_audit *audit, sp_module module, served *table)
{
    const sp_model_shape *shape = sp_geometry_shape(audit->options->geometry);
    const sp_tensor *tensor =
        find_served(table->checkpoint, module, shape && shape->tied_embeddings);
    int32_t hidden = 0, vocab = 0;
    bool embed = module == SP_MODULE_EMBED_TOKENS;
    sp_error local;
    sp_status status;

    sp_geometry_site(audit->options->geometry, -1, module, embed ? &vocab : &hidden,
                     embed ? &hidden : &vocab);
    if (!tensor || !sp_tensor_type_dtype(tensor->type, &table->dtype))
        return refuse_base(audit, module, "is not in its checkpoint as F32, F16 or BF16");
    if (tensor->n_dims != 2 || tensor->dims[0] != vocab || tensor->dims[1] != hidden)
        return refuse_base(audit, module, "has not the shape that config.json gives it");
    status =
        sp_file_map(sp_checkpoint_path(table->checkpoint, tensor->file), &table->mapping, &local);
    if (status != SP_OK || table->mapping.bytes < tensor->offset_bytes + tensor->bytes)
        return refuse_base(audit, module, "cannot be mapped");
    table->data = (const char *)table->mapping.data + tensor->offset_bytes;
    table->rows = vocab;
    table->cols = hidden;
    return SP_OK;
}

static sp_status open_served(const sp_audit *audit, sp_module module, served *out_table)
{
    sp_error local;
    sp_status status;

    *out_table = (served){0};
    if (!audit->options->base_dir)
        return refuse_base(audit, module, "was not given");
    status = sp_checkpoint_open(audit->options->base_dir, "model", &out_table->checkpoint, &local);
    if (status == SP_ERR_MEMORY) {
        if (audit->error)
            *audit->error = local;
        return status;
    }
    if (status != SP_OK)
        return sp_refuse(audit->error, SP_REASON_BASE_UNAVAILABLE, sp_module_name(module), -1,
                         "the base model cannot be read: %s", local.text);
    status = map_served(audit, module, out_table);
    if (status != SP_OK)
        close_served(out_table);
    return status;
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

/* An element that may not be aligned: a mapped file has its own idea of offsets. */
static float load(const void *data, sp_dtype dtype, int64_t index)
{
    const char *at = (const char *)data + index * (int64_t)sp_dtype_bytes(dtype);
    uint32_t word = 0;

    memcpy(&word, at, sp_dtype_bytes(dtype));
    return sp_values_at(&word, dtype, 0);
}

/*
 * Index of the first of n elements of a copy that is not the served one; n if none is. Rounding
 * either of them to the other's type may explain a difference: that is how a copy was made.
 */
static int64_t first_difference(const void *data, sp_dtype dtype, const void *base,
                                sp_dtype base_dtype, int64_t n)
{
    if (dtype == base_dtype && memcmp(data, base, (size_t)n * sp_dtype_bytes(dtype)) == 0)
        return n;
    for (int64_t i = 0; i < n; i++) {
        float own = load(data, dtype, i);
        float theirs = load(base, base_dtype, i);

        if (sp_f32_bits(rounded(own, base_dtype)) == sp_f32_bits(theirs))
            continue;
        if (sp_f32_bits(rounded(theirs, dtype)) == sp_f32_bits(own))
            continue;
        return i;
    }
    return n;
}

/* ---- copies of the base ---------------------------------------------------------------------- */

static sp_status refuse_copy_read(const sp_audit *audit, const sp_tensor *tensor,
                                  const sp_error *cause, sp_status status)
{
    if (status == SP_ERR_TRUNCATED)
        return sp_refuse(audit->error, SP_REASON_TRUNCATED, tensor->name, cause->position, "%s",
                         cause->text);
    return sp_fail(audit->error, status, NULL, tensor->name, cause->position, "%s", cause->text);
}

static sp_status compare_copy(const sp_audit *audit, const sp_item *copy, const served *table,
                              char *piece)
{
    const sp_tensor *tensor = copy->tensor;
    size_t element_bytes = sp_dtype_bytes(copy->dtype);
    sp_file file;
    sp_error local;
    sp_status status =
        sp_file_open(sp_checkpoint_path(audit->checkpoint, tensor->file), &file, &local);

    if (status != SP_OK)
        return refuse_copy_read(audit, tensor, &local, status);
    for (uint64_t at = 0; at < tensor->bytes && status == SP_OK; at += PIECE_BYTES) {
        uint64_t left = tensor->bytes - at;
        size_t bytes = left < PIECE_BYTES ? (size_t)left : PIECE_BYTES;
        int64_t first = (int64_t)(at / element_bytes);
        int64_t n = (int64_t)(bytes / element_bytes);
        int64_t same;

        status = sp_file_read(&file, tensor->offset_bytes + at, piece, bytes, &local);
        if (status != SP_OK) {
            status = refuse_copy_read(audit, tensor, &local, status);
            break;
        }
        same = first_difference(piece, copy->dtype,
                                (const char *)table->data +
                                    first * (int64_t)sp_dtype_bytes(table->dtype),
                                table->dtype, n);
        if (same < n)
            status =
                sp_refuse(audit->error, SP_REASON_BASE_COPY_DIFFERS, tensor->name, first + same,
                          "%.200s is not the base model's table (first in row %lld): the "
                          "adapter was made for another base",
                          tensor->name, (long long)((first + same) / table->cols));
    }
    sp_file_close(&file);
    return status;
}

static sp_status check_copy(sp_audit *audit, const sp_item *copy, const served *table)
{
    const sp_tensor *tensor = copy->tensor;
    char *piece;
    sp_status status;

    if (tensor->dims[0] != table->rows || tensor->dims[1] != table->cols)
        return sp_refuse(audit->error, SP_REASON_BASE_COPY_DIFFERS, tensor->name, -1,
                         "%.200s is [%lld, %lld], the base model's table [%lld, %lld]",
                         tensor->name, (long long)tensor->dims[0], (long long)tensor->dims[1],
                         (long long)table->rows, (long long)table->cols);
    piece = sp_malloc(PIECE_BYTES);
    if (!piece)
        return sp_fail_memory(audit->error, PIECE_BYTES, "comparing a table");
    status = compare_copy(audit, copy, table, piece);
    sp_free(piece);
    if (status == SP_OK)
        sp_audit_ignore(audit, tensor->name, "a copy of the base model's own table");
    return status;
}

/* ---- overridden rows ------------------------------------------------------------------------- */

/* Whether a row differs in any bit after conversion to the served type. */
static bool row_differs(const sp_kernels *kernels, const sp_item *item, const char *own,
                        const served *table, const char *theirs)
{
    int64_t own_bytes = (int64_t)sp_dtype_bytes(item->dtype);
    int64_t bytes = (int64_t)sp_dtype_bytes(table->dtype);
    uint32_t converted[CONVERTED_MAX]; /* of either width */

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

/* Marks in overridden [vocab] the rows of the full table that differ from the served ones. */
static int32_t mark_different_rows(const sp_kernels *kernels, const sp_item *item,
                                   const served *table, bool *overridden)
{
    int32_t n = 0;
    int64_t cols = table->cols;

    for (int64_t row = 0; row < table->rows; row++) {
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

static void remark_rows(sp_audit *audit, sp_module module, const sp_item *item, int32_t n,
                        const served *table)
{
    sp_remarks *notes = &audit->adapter->notes;
    int64_t more = item->tensor->dims[0] - table->rows;

    if (n == 0)
        sp_remark(notes, "the table of %s equals the base model's", sp_module_name(module));
    else
        sp_remark(notes, "%d of %lld rows of %s differ from the base model's", n,
                  (long long)table->rows, sp_module_name(module));
    if (more > 0)
        sp_remark(notes, "%lld rows of %s are beyond the served vocabulary and are dropped",
                  (long long)more, sp_module_name(module));
}

static sp_status check_ids(sp_audit *audit, sp_module module, const sp_id_list *list,
                           int32_t own_rows, int32_t vocab, bool *overridden)
{
    int32_t adapter_rows = own_rows ? own_rows : vocab;
    int32_t n_dropped = 0;

    for (int32_t i = 0; i < list->n; i++) {
        if (list->ids[i] >= adapter_rows)
            return sp_refuse(audit->error, SP_REASON_BAD_TOKEN_INDEX, "trainable_token_indices", i,
                             "token %d is not among the %d rows of the adapter's %s", list->ids[i],
                             adapter_rows, sp_module_name(module));
        if (list->ids[i] < vocab)
            overridden[list->ids[i]] = true;
        else
            n_dropped++;
    }
    if (n_dropped > 0)
        sp_remark(&audit->adapter->notes,
                  "%d trainable tokens of %s are beyond the served vocabulary and are dropped",
                  n_dropped, sp_module_name(module));
    return SP_OK;
}

/* The rows themselves, and a map from every token to its row or to none. */
static size_t overlay_bytes(const sp_audit *audit, int32_t rows, const served *table)
{
    if (rows == 0)
        return 0;
    return (size_t)rows * (size_t)table->cols * sp_dtype_bytes(audit->options->pool_dtype) +
           (size_t)table->rows * sizeof(int32_t);
}

/* Which rows of one module change, from its full table and its trainable tokens. */
static sp_status measure_rows(sp_audit *audit, sp_module module, const sp_item *table_item,
                              const sp_id_list *list, int32_t own_rows, const served *table,
                              int32_t *out_rows)
{
    int32_t vocab = (int32_t)table->rows;
    bool *overridden;
    const sp_kernels *kernels;
    sp_status status = sp_kernels_get(NULL, &kernels, audit->error);

    if (status != SP_OK)
        return status;
    overridden = sp_calloc((size_t)vocab, sizeof *overridden);
    if (!overridden)
        return sp_fail_memory(audit->error, (size_t)vocab, "the rows of a table");
    if (table_item)
        remark_rows(audit, module, table_item,
                    mark_different_rows(kernels, table_item, table, overridden), table);
    status = check_ids(audit, module, list, own_rows, vocab, overridden);
    *out_rows = 0;
    for (int32_t i = 0; i < vocab; i++)
        *out_rows += overridden[i];
    audit->adapter->overlay_bytes += overlay_bytes(audit, *out_rows, table);
    sp_free(overridden);
    return status;
}

/* ---- config and shapes ----------------------------------------------------------------------- */

static bool table_dims(const sp_audit *audit, sp_module module, int32_t *out_vocab,
                       int32_t *out_hidden)
{
    bool embed = module == SP_MODULE_EMBED_TOKENS;

    return audit->options->geometry &&
           sp_geometry_site(audit->options->geometry, -1, module, embed ? out_vocab : out_hidden,
                            embed ? out_hidden : out_vocab);
}

static sp_status check_shape(const sp_audit *audit, sp_module module, const sp_item *item)
{
    const int64_t *dims = item->tensor->dims;
    int32_t vocab = 0, hidden = 0;
    bool rows_fit;

    if (!table_dims(audit, module, &vocab, &hidden))
        return SP_OK;
    rows_fit = item->key.role == SP_ROLE_TOKENS || dims[0] >= vocab;
    if (rows_fit && dims[1] == hidden)
        return SP_OK;
    return sp_refuse(audit->error, SP_REASON_SHAPE_MISMATCH, item->tensor->name, -1,
                     "%.200s is [%lld, %lld]; the base model's table is [%d, %d]",
                     item->tensor->name, (long long)dims[0], (long long)dims[1], vocab, hidden);
}

static sp_status check_tokens(const sp_audit *audit, sp_module module, const sp_item *tokens,
                              const sp_id_list *list)
{
    static const char field[] = "trainable_token_indices";

    if (tokens && !list->given)
        return sp_refuse(audit->error, SP_REASON_BAD_TOKEN_INDEX, tokens->tensor->name, -1,
                         "%.200s has rows, but %s lists no tokens for %s", tokens->tensor->name,
                         field, sp_module_name(module));
    if (!tokens && list->given)
        return sp_refuse(audit->error, SP_REASON_BAD_TOKEN_INDEX, field, -1,
                         "%s lists %d tokens for %s, but the file has no rows for them", field,
                         list->n, sp_module_name(module));
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

/* modules_to_save promises a table. */
static sp_status check_saved(const sp_audit *audit, sp_module module, const sp_item *table)
{
    const sp_name_rule *rule = &audit->config.modules_to_save;
    const char *name = sp_module_name(module);

    for (size_t i = 0; i < rule->n; i++) {
        if (table || !ends_with(rule->names[i], name))
            continue;
        if (!audit->options->allow_partial)
            return sp_refuse(audit->error, SP_REASON_UNMATCHED_TARGET, rule->names[i], -1,
                             "modules_to_save lists \"%.100s\", but the file has no table of it; "
                             "--allow-partial takes what there is",
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
    const char *lacking = sp_module_name(has_embed ? SP_MODULE_LM_HEAD : SP_MODULE_EMBED_TOKENS);

    if (!audit->config.ties_tables || has_embed == has_head)
        return SP_OK;
    if (!audit->options->allow_partial)
        return sp_refuse(audit->error, SP_REASON_UNMATCHED_TARGET, lacking, -1,
                         "ensure_weight_tying is true, so that embed_tokens and lm_head have one "
                         "table, but the file has none for %s; --allow-partial takes what there is",
                         lacking);
    sp_remark(&audit->adapter->notes,
              "ensure_weight_tying is true, but the file has no table for %s, which stays as it is",
              lacking);
    return SP_OK;
}

/* ---- one module ------------------------------------------------------------------------------ */

static sp_status check_module(sp_audit *audit, sp_module module, const module_items *items,
                              const sp_id_list *list)
{
    const sp_item *own[] = {items->table, items->tokens};
    sp_status status = check_tokens(audit, module, items->tokens, list);

    if (status == SP_OK)
        status = check_saved(audit, module, items->table);
    for (size_t i = 0; i < 2 && status == SP_OK; i++) {
        if (own[i])
            status = check_shape(audit, module, own[i]);
    }
    return status;
}

/* Holds everything of one module against the served table. */
static sp_status compare_module(sp_audit *audit, sp_module module, const module_items *items,
                                const sp_id_list *list, int32_t own_rows, int32_t *out_rows)
{
    served table;
    sp_status status;

    *out_rows = -1;
    if (!items->table && !items->copy && list->n == 0)
        return SP_OK;
    if (!audit->options->geometry) {
        if (items->copy)
            sp_audit_ignore(audit, items->copy->tensor->name,
                            "a copy of the base's table, not compared without --model");
        return SP_OK;
    }
    status = open_served(audit, module, &table);
    if (status != SP_OK)
        return status;
    if (items->copy)
        status = check_copy(audit, items->copy, &table);
    if (status == SP_OK && (items->table || list->n > 0))
        status = measure_rows(audit, module, items->table, list, own_rows, &table, out_rows);
    close_served(&table);
    return status;
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

static sp_status add_table(sp_audit *audit, sp_module module, const sp_item *full,
                           const sp_item *tokens, const sp_id_list *list, int32_t own_rows,
                           int32_t rows_changed)
{
    sp_adapter *adapter = audit->adapter;
    size_t index = adapter->n_tables;
    int32_t *ids = NULL;

    if (!full && !tokens)
        return SP_OK;
    if (list->n > 0) {
        ids = sp_malloc((size_t)list->n * sizeof *ids);
        if (!ids)
            return sp_fail_memory(audit->error, (size_t)list->n * sizeof *ids, "token ids");
        memcpy(ids, list->ids, (size_t)list->n * sizeof *ids);
    }
    adapter->token_ids[index] = ids;
    adapter->rows_changed[index] = rows_changed;
    adapter->tables[index] = (sp_adapter_table){.module = module,
                                                .full = table_factor(full),
                                                .trainable = table_factor(tokens),
                                                .token_ids = ids,
                                                .n_ids = list->n,
                                                .rows = own_rows};
    adapter->modules |= SP_MODULE_BIT(module);
    adapter->n_tables++;
    return SP_OK;
}

/* Rows of the adapter's own vocabulary as this table gives them; 0: it gives none. */
static int32_t rows_of(const sp_item *table)
{
    return table ? (int32_t)table->tensor->dims[0] : 0;
}

sp_status sp_audit_table_shapes(sp_audit *audit)
{
    const sp_model_shape *shape =
        audit->options->geometry ? sp_geometry_shape(audit->options->geometry) : NULL;
    module_items embed = find_items(audit, SP_MODULE_EMBED_TOKENS);
    module_items head = find_items(audit, SP_MODULE_LM_HEAD);
    sp_status status =
        check_module(audit, SP_MODULE_EMBED_TOKENS, &embed, &audit->config.tokens_embed);

    if (status == SP_OK)
        status = check_module(audit, SP_MODULE_LM_HEAD, &head, &audit->config.tokens_head);
    if (status == SP_OK && shape && shape->tied_embeddings && !embed.tokens && !head.tokens)
        status = check_tied_tables(audit, embed.table != NULL, head.table != NULL);
    return status;
}

sp_status sp_audit_tables(sp_audit *audit)
{
    static const sp_id_list none = {0};
    const sp_model_shape *shape =
        audit->options->geometry ? sp_geometry_shape(audit->options->geometry) : NULL;
    module_items embed = find_items(audit, SP_MODULE_EMBED_TOKENS);
    module_items head = find_items(audit, SP_MODULE_LM_HEAD);
    const sp_id_list *embed_ids = &audit->config.tokens_embed;
    const sp_id_list *head_ids = &audit->config.tokens_head;
    const sp_item *head_tokens = head.tokens;
    int32_t embed_rows, head_rows;
    int32_t embed_own = rows_of(embed.table), head_own = rows_of(head.table);
    sp_status status;

    /* On a tied base trainable tokens move the head's rows too. */
    if (shape && shape->tied_embeddings && !head_tokens && embed.tokens) {
        head_tokens = embed.tokens;
        head_ids = embed_ids;
        head_own = embed_own;
    }
    if (!embed.tokens)
        embed_ids = &none;
    if (!head_tokens)
        head_ids = &none;
    status =
        compare_module(audit, SP_MODULE_EMBED_TOKENS, &embed, embed_ids, embed_own, &embed_rows);
    if (status == SP_OK)
        status = compare_module(audit, SP_MODULE_LM_HEAD, &head, head_ids, head_own, &head_rows);
    if (status == SP_OK)
        status = add_table(audit, SP_MODULE_EMBED_TOKENS, embed.table, embed.tokens, embed_ids,
                           embed_own, embed_rows);
    if (status == SP_OK)
        status = add_table(audit, SP_MODULE_LM_HEAD, head.table, head_tokens, head_ids, head_own,
                           head_rows);
    return status;
}
