/*
 * adapter.c: opening an adapter, and what an open one answers.
 */
#include "adapter/audit.h"

#include "base/alloc.h"
#include "base/file.h"
#include "base/grow.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

#define CONFIG_BYTES_MAX ((size_t)16 << 20)

/* Expert matrices are packed with their rank rounded up, each from such a boundary. */
#define EXPERT_ALIGN_BYTES 256
#define EXPERT_RANK_STEP   8

void sp_adapter_options_default(sp_adapter_options *out_options, size_t struct_bytes)
{
    const sp_adapter_options defaults = {.struct_bytes = sizeof defaults,
                                         .pool_dtype = SP_DTYPE_BF16};

    sp_struct_default(out_options, struct_bytes, &defaults, sizeof defaults);
}

/* ---- the two files --------------------------------------------------------------------------- */

static bool ends_with(const char *text, const char *end)
{
    size_t n = strlen(text), length = strlen(end);

    return n >= length && strcmp(text + n - length, end) == 0;
}

/* The folder of a file's path, "." for a bare name. */
static char *folder_of(const char *path)
{
    const char *slash = strrchr(path, '/');

    if (!slash)
        return sp_strdup(".");
    return sp_strndup(path, slash > path ? (size_t)(slash - path) : 1);
}

static sp_status read_config(sp_audit *audit, const char *folder)
{
    char *path = sp_path_join(folder, "adapter_config.json");
    const char *shown;
    char *bytes;
    size_t n_bytes;
    sp_error local;
    sp_status status;

    if (!path)
        return sp_fail_memory(audit->error, strlen(folder), "a path");
    shown = sp_path_tail(path);
    status = sp_file_read_all(path, CONFIG_BYTES_MAX, &bytes, &n_bytes, &local);
    if (status == SP_OK) {
        status = sp_peft_config_parse(bytes, n_bytes, shown, audit->options, &audit->config,
                                      &audit->adapter->notes, audit->error);
        sp_free(bytes);
    } else if (status == SP_ERR_NOT_FOUND || status == SP_ERR_INPUT) {
        status = sp_refuse(audit->error, SP_REASON_CONFIG_MISSING, shown, -1, "%s", local.text);
    } else if (status == SP_ERR_TOO_LARGE || status == SP_ERR_TRUNCATED) {
        status = sp_refuse(audit->error, SP_REASON_CONFIG_MALFORMED, shown, -1, "%s", local.text);
    } else if (audit->error) {
        *audit->error = local;
    }
    sp_free(path);
    return status;
}

/* The one file goes before an index, as everywhere; but a folder with both was saved twice. */
static sp_status remark_two_saves(const sp_audit *audit, const char *folder)
{
    char *single = sp_path_join(folder, "adapter_model.safetensors");
    char *index = sp_path_join(folder, "adapter_model.safetensors.index.json");
    sp_status status = SP_OK;

    if (!single || !index)
        status = sp_fail_memory(audit->error, strlen(folder), "a path");
    else if (sp_path_exists(single) && sp_path_exists(index))
        sp_remark(&audit->adapter->notes,
                  "adapter_model.safetensors is read; the index of shards beside it is not");
    sp_free(single);
    sp_free(index);
    return status;
}

static sp_status open_weights(sp_audit *audit, const char *path, const char *folder, bool is_folder)
{
    static const char *const pickles[] = {".bin", ".pt", ".pth", ".pkl", ".ckpt"};

    if (is_folder) {
        sp_status status = remark_two_saves(audit, folder);

        if (status == SP_OK)
            status = sp_checkpoint_open(folder, "adapter_model", &audit->checkpoint, audit->error);
        return status;
    }
    for (size_t i = 0; i < sizeof pickles / sizeof *pickles; i++) {
        if (ends_with(path, pickles[i]))
            return sp_refuse(audit->error, SP_REASON_PICKLE_REFUSED, sp_path_tail(path), -1,
                             "%s is a pickle, which can run code when it is read; it was not "
                             "opened: save the weights as safetensors",
                             sp_path_tail(path));
    }
    return sp_checkpoint_open_file(path, &audit->checkpoint, audit->error);
}

static sp_status open_files(sp_audit *audit, const char *path)
{
    bool is_folder = sp_path_is_directory(path) || ends_with(path, "/") || !sp_path_exists(path);
    char *folder = is_folder ? sp_strdup(path) : folder_of(path);
    sp_status status;

    if (!folder)
        return sp_fail_memory(audit->error, strlen(path) + 1, "a path");
    status = read_config(audit, folder);
    if (status == SP_OK)
        status = open_weights(audit, path, folder, is_folder);
    sp_free(folder);
    return status;
}

/* The folder's last name, of the resolved path; the path itself when it cannot be resolved. */
static char *folder_name(const char *path)
{
    char real[PATH_MAX];
    char *folder = NULL;
    const char *slash;
    char *name;

    if (!realpath(path, real))
        return sp_strdup(path);
    if (!sp_path_is_directory(real)) {
        folder = folder_of(real);
        if (!folder)
            return NULL;
    }
    slash = strrchr(folder ? folder : real, '/');
    name = sp_strdup(slash && slash[1] != '\0' ? slash + 1 : path);
    sp_free(folder);
    return name;
}

/* ---- opening --------------------------------------------------------------------------------- */

static size_t matrix_bytes(int64_t elements, sp_dtype pool)
{
    size_t bytes = (size_t)elements * sp_dtype_bytes(pool);

    return (bytes + EXPERT_ALIGN_BYTES - 1) / EXPERT_ALIGN_BYTES * EXPERT_ALIGN_BYTES;
}

/* What packing the router and expert sites takes, from the audited sites. */
static size_t expert_bytes(const sp_adapter *adapter, sp_dtype pool)
{
    size_t bytes = 0;

    for (size_t i = 0; i < adapter->n_sites; i++) {
        const sp_adapter_site *site = &adapter->sites[i];
        int64_t stride =
            (site->rank + EXPERT_RANK_STEP - 1) / EXPERT_RANK_STEP * (int64_t)EXPERT_RANK_STEP;

        if (site->module >= SP_MODULE_ROUTER && site->module <= SP_MODULE_EXPERT_DOWN_PROJ)
            bytes += matrix_bytes(stride * site->a.cols, pool) +
                     matrix_bytes(stride * site->b.rows, pool);
    }
    return bytes;
}

static sp_status check_effect(sp_audit *audit)
{
    const sp_adapter *adapter = audit->adapter;
    bool has_rows = adapter->checked ? adapter->overlay_bytes > 0 : adapter->n_tables > 0;

    if (audit->n_pairs == 0 && adapter->n_tables == 0)
        return sp_refuse(audit->error, SP_REASON_EMPTY_ADAPTER, NULL, -1,
                         "the adapter's tensors are copies of the base; there is nothing to apply");
    return sp_audit_effect(audit, has_rows);
}

static sp_status run_audit(sp_audit *audit, const char *path)
{
    static sp_status (*const steps[])(sp_audit *) = {
        sp_audit_parameters,   sp_audit_names, sp_audit_targets,
        sp_audit_table_shapes, sp_audit_read,  sp_audit_sites,
        sp_audit_tables,       check_effect,   sp_audit_digest,
    };
    sp_status status = open_files(audit, path);

    for (size_t i = 0; status == SP_OK && i < sizeof steps / sizeof *steps; i++)
        status = steps[i](audit);
    if (status == SP_OK &&
        (audit->adapter->notes.text.failed || audit->adapter->ignored.text.failed))
        status = sp_fail_memory(audit->error, 0, "the receipt of an adapter");
    return status;
}

static sp_status check_options(const char *path, const sp_adapter_options *options,
                               sp_adapter **out_adapter, sp_error *error)
{
    if (!path || !options || !out_adapter)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, NULL, -1,
                       "no path, no options or no result given");
    if (options->struct_bytes != sizeof *options)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "struct_bytes", -1,
                       "the options have %zu bytes, %zu are wanted: use "
                       "sp_adapter_options_default",
                       options->struct_bytes, sizeof *options);
    if (sp_dtype_bytes(options->pool_dtype) == 0)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "pool_dtype", -1, "no such element type");
    return SP_OK;
}

sp_status sp_adapter_open(const char *path, const sp_adapter_options *options,
                          sp_adapter **out_adapter, sp_error *error)
{
    sp_audit audit = {.options = options, .error = error};
    sp_adapter *adapter;
    sp_status status = check_options(path, options, out_adapter, error);

    if (status != SP_OK)
        return status;
    adapter = sp_calloc(1, sizeof *adapter);
    if (!adapter)
        return sp_fail_memory(error, sizeof *adapter, "an adapter");
    adapter->references = 1;
    adapter->checked = options->geometry != NULL;
    audit.adapter = adapter;
    adapter->name = options->name ? sp_strdup(options->name) : folder_name(path);
    if (adapter->name)
        status = run_audit(&audit, path);
    else
        status = sp_fail_memory(error, strlen(path) + 1, "a name");
    sp_free(audit.pairs);
    sp_free(audit.items);
    sp_checkpoint_destroy(audit.checkpoint);
    sp_peft_config_clear(&audit.config);
    if (status != SP_OK) {
        sp_adapter_release(adapter);
        return status;
    }
    adapter->expert_bytes = expert_bytes(adapter, options->pool_dtype);
    *out_adapter = adapter;
    return SP_OK;
}

/* ---- an open adapter ------------------------------------------------------------------------- */

sp_adapter *sp_adapter_retain(sp_adapter *adapter)
{
    atomic_fetch_add_explicit(&adapter->references, 1, memory_order_relaxed);
    return adapter;
}

void sp_adapter_release(sp_adapter *adapter)
{
    if (!adapter || atomic_fetch_sub_explicit(&adapter->references, 1, memory_order_acq_rel) != 1)
        return;
    sp_free(adapter->name);
    sp_aligned_free(adapter->data);
    sp_free(adapter->sites);
    sp_free(adapter->token_ids[0]);
    sp_free(adapter->token_ids[1]);
    sp_text_free(&adapter->notes.text);
    sp_text_free(&adapter->ignored.text);
    sp_free(adapter);
}

const char *sp_adapter_name(const sp_adapter *adapter)
{
    return adapter->name;
}

sp_digest sp_adapter_digest(const sp_adapter *adapter)
{
    return adapter->digest;
}

size_t sp_adapter_n_sites(const sp_adapter *adapter)
{
    return adapter->n_sites;
}

const sp_adapter_site *sp_adapter_site_at(const sp_adapter *adapter, size_t index)
{
    return index < adapter->n_sites ? &adapter->sites[index] : NULL;
}

int32_t sp_adapter_rank_max(const sp_adapter *adapter)
{
    return adapter->rank_max;
}

sp_module_set sp_adapter_modules(const sp_adapter *adapter)
{
    return adapter->modules;
}

size_t sp_adapter_n_tables(const sp_adapter *adapter)
{
    return adapter->n_tables;
}

const sp_adapter_table *sp_adapter_table_at(const sp_adapter *adapter, size_t index)
{
    return index < adapter->n_tables ? &adapter->tables[index] : NULL;
}

size_t sp_adapter_expert_bytes(const sp_adapter *adapter)
{
    return adapter->expert_bytes;
}

size_t sp_adapter_overlay_bytes(const sp_adapter *adapter)
{
    return adapter->overlay_bytes;
}

double sp_adapter_hash_seconds(const sp_adapter *adapter)
{
    return adapter->hash_seconds;
}
