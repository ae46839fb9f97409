/*
 * intake.c: from headers and data to an adapter. All that needs no data is checked first;
 * everything that is kept is in one block, and data is checked and hashed piece by piece as it is
 * stored there.
 */
#include "adapter/intake_state.h"
#include "adapter/values.h"

#include "base/alloc.h"
#include "base/clock.h"
#include "base/grow.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define PIECE_BYTES  ((size_t)256 << 10) /* checked and hashed while in the cache */
#define WINDOW_BYTES ((size_t)1 << 20)   /* of a copy of the base */
#define ALIGN_BYTES  64

/* ---- beginning and end ----------------------------------------------------------------------- */

static sp_status read_options(sp_intake *intake, const sp_adapter_options *options, sp_error *error)
{
    sp_status status = sp_adapter_options_read(options, &intake->options, error);

    if (status != SP_OK)
        return status;
    intake->options.exec = NULL;
    if (intake->options.geometry)
        sp_geometry_retain(intake->options.geometry);
    return SP_OK;
}

static sp_status create_adapter(sp_intake *intake, const char *name, sp_error *error)
{
    sp_adapter *adapter = sp_calloc(1, sizeof *adapter);

    if (!adapter)
        return sp_fail_memory(error, sizeof *adapter, "an adapter");
    adapter->references = 1;
    adapter->geometry =
        intake->options.geometry ? sp_geometry_retain(intake->options.geometry) : NULL;
    intake->audit.adapter = adapter;
    adapter->name = sp_strdup(intake->options.name ? intake->options.name : name);
    if (!adapter->name)
        return sp_fail_memory(error, strlen(name) + 1, "a name");
    intake->options.name = adapter->name;
    return SP_OK;
}

/* One for each line. */
static void add_notes(sp_remarks *notes, const char *lines)
{
    while (lines && *lines) {
        size_t bytes = strcspn(lines, "\n");

        sp_remark(notes, "%.*s", (int)bytes, lines);
        lines += bytes + (lines[bytes] == '\n');
    }
}

sp_status sp_intake_begin(const char *config, size_t config_bytes, const sp_intake_origin *origin,
                          const sp_adapter_options *options, const char *name,
                          sp_intake **out_intake, sp_error *error)
{
    sp_intake *intake = sp_calloc(1, sizeof *intake);
    sp_status status;

    if (!intake)
        return sp_fail_memory(error, sizeof *intake, "an adapter");
    status = read_options(intake, options, error);
    intake->audit.options = &intake->options;
    if (status == SP_OK)
        status = create_adapter(intake, name, error);
    if (status == SP_OK)
        status = sp_peft_config_parse(config, config_bytes, origin->config_name, &intake->options,
                                      &intake->audit.config, &intake->audit.adapter->notes, error);
    if (status != SP_OK) {
        sp_intake_destroy(intake);
        return status;
    }
    add_notes(&intake->audit.adapter->notes, origin->note);
    *out_intake = intake;
    return SP_OK;
}

void sp_intake_destroy(sp_intake *intake)
{
    if (!intake)
        return;
    for (size_t i = 0; i < intake->n_landings; i++)
        sp_sha256_abandon(intake->landings[i].hash);
    sp_free(intake->landings);
    sp_free(intake->windows);
    sp_audit_close_served(&intake->audit);
    sp_free(intake->audit.pairs);
    sp_free(intake->audit.items);
    sp_peft_config_clear(&intake->audit.config);
    sp_adapter_release(intake->audit.adapter);
    sp_geometry_release(intake->options.geometry);
    sp_free(intake->list);
    sp_free(intake->order);
    sp_free(intake->names);
    sp_free(intake);
}

/* ---- memory ---------------------------------------------------------------------------------- */

/* A copy of the base is compared piece by piece and not kept; without a base it is not read. */
static bool is_wanted(const sp_audit *audit, const sp_item *item)
{
    return !sp_item_is_copy(item) || audit->options->geometry;
}

static bool add_padded(size_t *sum, uint64_t bytes)
{
    uint64_t padded;

    if (__builtin_add_overflow(bytes, (uint64_t)ALIGN_BYTES - 1, &padded))
        return false;
    padded -= padded % ALIGN_BYTES;
    return !__builtin_add_overflow(*sum, padded, sum);
}

/* Bytes of kept data and of the windows; false on overflow. */
static bool measure(const sp_intake *intake, size_t *out_kept, size_t *out_windows)
{
    const sp_audit *audit = &intake->audit;
    size_t kept = ALIGN_BYTES; /* at least one, since an empty block would be NULL */

    *out_windows = 0;
    for (size_t i = 0; i < audit->n_items; i++) {
        if (!is_wanted(audit, &audit->items[i]))
            continue;
        if (sp_item_is_copy(&audit->items[i]))
            *out_windows += WINDOW_BYTES;
        else if (!add_padded(&kept, audit->items[i].tensor->bytes))
            return false;
    }
    *out_kept = kept;
    return true;
}

static void place_items(sp_intake *intake)
{
    sp_audit *audit = &intake->audit;
    char *data = audit->adapter->data, *window = intake->windows;

    for (size_t i = 0; i < audit->n_items; i++) {
        sp_item *item = &audit->items[i];
        sp_landing *landing = &intake->landings[intake->n_landings];
        size_t padded = 0;

        if (!is_wanted(audit, item))
            continue;
        intake->n_landings++;
        landing->item = item;
        if (sp_item_is_copy(item)) {
            landing->window_bytes = WINDOW_BYTES;
            landing->data = window;
            window += WINDOW_BYTES;
            continue;
        }
        add_padded(&padded, item->tensor->bytes);
        item->data = landing->data = data;
        data += padded;
    }
}

static sp_status allocate_data(sp_audit *audit)
{
    sp_intake *intake = (sp_intake *)audit; /* its first member */
    size_t kept, windows;

    if (!measure(intake, &kept, &windows))
        return sp_fail_memory(audit->error, SIZE_MAX, "the tensors of an adapter");
    intake->landings = sp_calloc(audit->n_items, sizeof *intake->landings);
    if (!intake->landings)
        return sp_fail_memory(audit->error, audit->n_items * sizeof *intake->landings,
                              "a list of tensors");
    audit->adapter->data = sp_aligned_malloc(kept, ALIGN_BYTES);
    if (!audit->adapter->data)
        return sp_fail_memory(audit->error, kept, "the tensors of an adapter");
    if (windows > 0) {
        intake->windows = sp_malloc(windows);
        if (!intake->windows)
            return sp_fail_memory(audit->error, windows, "comparing a table");
    }
    place_items(intake);
    return SP_OK;
}

/* ---- the audit of headers -------------------------------------------------------------------- */

static sp_status check_not_empty(sp_audit *audit)
{
    for (size_t i = 0; i < audit->n_items; i++) {
        if (!sp_item_is_copy(&audit->items[i]))
            return SP_OK;
    }
    return sp_refuse(audit->error, SP_REASON_EMPTY_ADAPTER, NULL, -1,
                     "the adapter's tensors are copies of the base; there is nothing to apply");
}

sp_status sp_intake_audit(sp_intake *intake, const sp_tensor *tensors, size_t n, sp_error *error)
{
    static sp_status (*const steps[])(sp_audit *) = {
        sp_audit_parameters,   sp_audit_names,  sp_audit_targets, sp_audit_promised,
        sp_audit_table_shapes, check_not_empty, allocate_data,    sp_audit_sites,
    };
    sp_status status = SP_OK;

    intake->audit.tensors = tensors;
    intake->audit.n_tensors = n;
    intake->audit.error = error;
    for (size_t i = 0; status == SP_OK && i < sizeof steps / sizeof *steps; i++)
        status = steps[i](&intake->audit);
    intake->audit.error = NULL;
    intake->options.base_dir = NULL; /* both have been read */
    intake->options.served_embed = intake->options.served_head = NULL;
    intake->audited = status == SP_OK;
    return status;
}

const sp_adapter *sp_intake_adapter(const sp_intake *intake)
{
    return intake->audit.adapter;
}

/* ---- data ------------------------------------------------------------------------------------ */

size_t sp_intake_n_wanted(const sp_intake *intake)
{
    return intake->n_landings;
}

static sp_status no_tensor(size_t wanted, const sp_intake *intake, sp_error *error)
{
    return sp_fail(error, SP_ERR_ARGUMENT, NULL, "wanted", (int64_t)wanted,
                   "there is no wanted tensor %zu; there are %zu", wanted, intake->n_landings);
}

sp_status sp_intake_wanted_at(const sp_intake *intake, size_t wanted, sp_wanted_tensor *out_tensor,
                              sp_error *error)
{
    const sp_tensor *tensor;
    sp_wanted_tensor found = {.struct_bytes = sizeof found};

    if (!intake)
        return sp_fail_null(error, "intake");
    if (wanted >= intake->n_landings)
        return no_tensor(wanted, intake, error);
    tensor = intake->landings[wanted].item->tensor;
    found.index = (size_t)(tensor - intake->audit.tensors);
    if (intake->order)
        found.index = intake->order[found.index];
    found.bytes = tensor->bytes;
    return sp_struct_write(out_tensor, &found, sizeof found, "sp_wanted_tensor", error);
}

static uint64_t room_of(const sp_landing *landing)
{
    uint64_t left = landing->item->tensor->bytes - landing->taken;

    return landing->window_bytes > 0 && left > landing->window_bytes ? landing->window_bytes : left;
}

static char *next_byte(const sp_landing *landing)
{
    return landing->data + (landing->window_bytes > 0 ? 0 : landing->taken);
}

sp_status sp_intake_next(sp_intake *intake, size_t wanted, void **out_memory, size_t *out_bytes,
                         sp_error *error)
{
    sp_status status =
        SP_NEED(error, {"intake", intake}, {"out_memory", out_memory}, {"out_bytes", out_bytes});

    if (status != SP_OK)
        return status;
    if (wanted >= intake->n_landings)
        return no_tensor(wanted, intake, error);
    *out_memory = next_byte(&intake->landings[wanted]);
    *out_bytes = (size_t)room_of(&intake->landings[wanted]);
    return SP_OK;
}

static sp_status refuse_value(const sp_intake *intake, const sp_item *item, const char *piece,
                              int64_t first, int64_t bad, sp_error *error)
{
    int64_t cols = item->tensor->dims[1], index = first + bad;

    return sp_refuse(error, SP_REASON_NON_FINITE, item->tensor->name, index,
                     "%.200s: element %lld (row %lld, column %lld) is %g, which is not finite in "
                     "%s",
                     item->tensor->name, (long long)index, (long long)(index / cols),
                     (long long)(index % cols), (double)sp_values_at(piece, item->dtype, bad),
                     sp_dtype_name(intake->options.pool_dtype));
}

/* n bytes from byte `at` of the tensor on. */
static sp_status check_piece(const sp_intake *intake, const sp_landing *landing, uint64_t at,
                             const char *piece, size_t n, sp_error *error)
{
    const sp_item *item = landing->item;
    int64_t element_bytes = (int64_t)sp_dtype_bytes(item->dtype), bad;

    if (sp_item_is_copy(item))
        return sp_audit_compare_copy(&intake->audit, item, at, piece, n, error);
    bad = sp_values_find_bad(piece, item->dtype, (int64_t)n / element_bytes,
                             intake->options.pool_dtype);
    return bad < 0 ? SP_OK
                   : refuse_value(intake, item, piece, (int64_t)at / element_bytes, bad, error);
}

static sp_status take_pieces(sp_intake *intake, sp_landing *landing, size_t n_bytes,
                             sp_error *error)
{
    const char *memory = next_byte(landing);
    uint64_t hash_ns = 0;
    sp_status status = SP_OK;

    for (size_t at = 0; at < n_bytes && status == SP_OK; at += PIECE_BYTES) {
        size_t n = n_bytes - at < PIECE_BYTES ? n_bytes - at : PIECE_BYTES;
        uint64_t began_ns;

        status = check_piece(intake, landing, landing->taken + at, memory + at, n, error);
        if (status != SP_OK || sp_item_is_copy(landing->item))
            continue;
        began_ns = sp_clock_ns();
        sp_sha256_update(landing->hash, memory + at, n);
        hash_ns += sp_clock_ns() - began_ns;
    }
    atomic_fetch_add_explicit(&intake->hash_ns, hash_ns, memory_order_relaxed);
    return status;
}

static sp_status check_take(const sp_intake *intake, size_t wanted, size_t n_bytes, sp_error *error)
{
    const sp_landing *landing;

    if (wanted >= intake->n_landings)
        return no_tensor(wanted, intake, error);
    landing = &intake->landings[wanted];
    if (landing->failed)
        return sp_fail(error, SP_ERR_STATE, NULL, landing->item->tensor->name, -1,
                       "a piece of this tensor was refused before");
    if (n_bytes > room_of(landing) || n_bytes % sp_dtype_bytes(landing->item->dtype) != 0)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, landing->item->tensor->name, (int64_t)n_bytes,
                       "a piece of %zu bytes is no whole number of elements, or more than the "
                       "%llu that there is room for",
                       n_bytes, (unsigned long long)room_of(landing));
    return SP_OK;
}

sp_status sp_intake_take(sp_intake *intake, size_t wanted, size_t n_bytes, sp_error *error)
{
    sp_landing *landing;
    sp_status status;

    if (!intake)
        return sp_fail_null(error, "intake");
    status = check_take(intake, wanted, n_bytes, error);
    if (status != SP_OK)
        return status;
    landing = &intake->landings[wanted];
    if (!landing->hash && !sp_item_is_copy(landing->item) && n_bytes > 0 &&
        sp_sha256_create(&landing->hash) != SP_OK)
        return sp_fail_memory(error, 0, "a digest");
    status = take_pieces(intake, landing, n_bytes, error);
    if (status != SP_OK) {
        landing->failed = true;
        return status;
    }
    landing->taken += n_bytes;
    if (landing->taken == landing->item->tensor->bytes && landing->hash) {
        sp_sha256_finish(landing->hash, landing->item->leaf);
        landing->hash = NULL;
    }
    return SP_OK;
}

/* ---- many tensors ---------------------------------------------------------------------------- */

/* What the tasks of one run share. */
typedef struct run_job {
    sp_intake_fill_fn fill;
    void *user;
    atomic_int failed_task; /* the first one, whatever the threads; INT32_MAX: none */

    pthread_mutex_t mutex; /* guards the fields below, and changes to failed_task */
    sp_status status;
    sp_error error;
} run_job;

/* sp_task_fn. Tasks after a failed one are skipped; those before it still run, as a lower one may
 * fail. */
static void run_task(void *user, int32_t task, int32_t thread)
{
    run_job *job = user;
    sp_error error;
    sp_status status;

    (void)thread;
    if (task > atomic_load(&job->failed_task))
        return;
    status = job->fill(job->user, (size_t)task, &error);
    if (status == SP_OK)
        return;
    pthread_mutex_lock(&job->mutex);
    if (task < atomic_load(&job->failed_task)) {
        atomic_store(&job->failed_task, task);
        job->status = status;
        job->error = error;
    }
    pthread_mutex_unlock(&job->mutex);
}

sp_status sp_intake_run(sp_exec *exec, sp_intake_fill_fn fill, void *user, size_t n,
                        sp_error *error)
{
    run_job job = {.fill = fill, .user = user, .failed_task = INT32_MAX};

    pthread_mutex_init(&job.mutex, NULL);
    sp_exec_run(exec, run_task, &job, (int32_t)n);
    pthread_mutex_destroy(&job.mutex);
    if (job.status != SP_OK && error)
        *error = job.error;
    return job.status;
}

/* ---- the audit of data ----------------------------------------------------------------------- */

static sp_status check_effect(sp_audit *audit)
{
    const sp_adapter *adapter = audit->adapter;

    return sp_audit_effect(audit,
                           adapter->geometry ? adapter->overlay_bytes > 0 : adapter->n_tables > 0);
}

static sp_status check_complete(const sp_intake *intake, sp_error *error)
{
    for (size_t i = 0; i < intake->n_landings; i++) {
        const sp_landing *landing = &intake->landings[i];
        const sp_tensor *tensor = landing->item->tensor;

        if (landing->taken < tensor->bytes)
            return sp_refuse(error, SP_REASON_TRUNCATED, tensor->name, (int64_t)landing->taken,
                             "of the %llu bytes of %.200s %llu have come",
                             (unsigned long long)tensor->bytes, tensor->name,
                             (unsigned long long)landing->taken);
    }
    return SP_OK;
}

static sp_status audit_data(sp_intake *intake, sp_error *error)
{
    static sp_status (*const steps[])(sp_audit *) = {sp_audit_tables, check_effect,
                                                     sp_audit_digest};
    const sp_adapter *adapter = intake->audit.adapter;
    sp_status status = check_complete(intake, error);

    intake->audit.error = error;
    for (size_t i = 0; status == SP_OK && i < sizeof steps / sizeof *steps; i++)
        status = steps[i](&intake->audit);
    intake->audit.error = NULL;
    if (status == SP_OK && (adapter->notes.text.failed || adapter->ignored.text.failed))
        status = sp_fail_memory(error, 0, "the receipt of an adapter");
    return status;
}

sp_status sp_intake_finish(sp_intake *intake, sp_adapter **out_adapter, sp_error *error)
{
    sp_adapter *adapter;
    sp_status status;

    if (!intake || !out_adapter)
        return sp_fail_null(error, intake ? "out_adapter" : "intake");
    adapter = intake->audit.adapter;
    if (!intake->audited)
        return sp_fail(error, SP_ERR_STATE, NULL, NULL, -1, "the intake was finished before");
    status = audit_data(intake, error);
    intake->audited = false;
    intake->audit.adapter = NULL;
    if (status != SP_OK) {
        sp_adapter_release(adapter);
        return status;
    }
    adapter->hash_seconds = (double)atomic_load(&intake->hash_ns) * 1e-9;
    *out_adapter = adapter;
    return SP_OK;
}
