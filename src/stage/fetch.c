/*
 * fetch.c: one adapter from one source, on a loader thread: described, audited, read in pieces,
 * packed. This is the only place that validates what a source says.
 */
#include "adapter/audit.h"
#include "adapter/intake_state.h"
#include "base/alloc.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/grow.h"
#include "pool/expert_image.h"
#include "pool/image.h"
#include "stage/stage_state.h"

#include <stdlib.h>
#include <string.h>

#define PIECE_BYTES ((size_t)256 << 10)
#define PIECE_STEP  4 /* an element size is a multiple of it, or divides it */

/* A fetch in progress. */
typedef struct stage_fetch {
    const sp_stage *stage;
    const sp_stage_source *source;
    stage_task *task;
    sp_source_request request;
    sp_source_description description;
    bool partial; /* tensors that are described are left out here */
} fetch;

/* ---- calls ----------------------------------------------------------------------------------- */

static bool is_over(const stage_task *task)
{
    uint64_t deadline_ns = atomic_load(&task->deadline_ns);

    return deadline_ns != 0 && sp_clock_ns() > deadline_ns;
}

bool sp_source_is_cancelled(const sp_source_request *request)
{
    const stage_task *task = request->token;

    return atomic_load(&task->cancelled) || is_over(task);
}

static uint64_t begin_call(const fetch *f)
{
    uint64_t max_ns = f->stage->call_ns_max;
    uint64_t deadline_ns = max_ns != 0 ? sp_clock_ns() + max_ns : 0;

    atomic_store(&f->task->deadline_ns, deadline_ns);
    return deadline_ns;
}

/* A call that exceeded its deadline has failed, whatever it returned. */
static sp_status end_call(const fetch *f, sp_status status, sp_error *error)
{
    bool over = is_over(f->task);

    atomic_store(&f->task->deadline_ns, 0);
    if (atomic_load(&f->task->cancelled))
        return sp_fail(error, SP_ERR_STATE, "load-cancelled", f->request.name, -1,
                       "\"%s\" was unloaded while it was being loaded", f->request.name);
    if (over)
        return sp_fail(error, SP_ERR_IO, "source-timeout", f->request.name, -1,
                       "the source of \"%s\" did not answer within %llu ms", f->request.name,
                       (unsigned long long)(f->stage->call_ns_max / 1000000));
    if (status > 0)
        return sp_fail(error, SP_ERR_IO, NULL, f->request.name, status,
                       "the source of \"%s\" answered with a status that is no failure",
                       f->request.name);
    if (status != SP_OK && error->text[0] == '\0')
        return sp_fail(error, status, NULL, f->request.name, -1,
                       "the source of \"%s\" failed and does not say why: %s", f->request.name,
                       sp_status_text(status));
    return status;
}

static sp_status fetch_piece(const fetch *f, size_t part, uint64_t offset, void *memory, size_t n,
                             sp_error *error)
{
    sp_source_piece piece = {sizeof piece, part, offset, memory, n, begin_call(f)};
    sp_status status =
        f->source->fetch(f->source->user, &f->request, f->description.handle, &piece, error);

    return end_call(f, status, error);
}

static size_t piece_bytes(const fetch *f)
{
    size_t bytes = f->source->piece_bytes;

    if (bytes == 0)
        return PIECE_BYTES;
    return bytes < PIECE_STEP ? PIECE_STEP : bytes - bytes % PIECE_STEP;
}

/* ---- tensors --------------------------------------------------------------------------------- */

typedef struct part {
    size_t index; /* in the description */
    size_t wanted;
} part;

static int by_index(const void *left, const void *right)
{
    const part *a = left;
    const part *b = right;

    return (a->index > b->index) - (a->index < b->index);
}

static sp_status fetch_part(const fetch *f, sp_intake *intake, const part *from, sp_error *error)
{
    uint64_t at = 0;
    void *memory;
    size_t room;
    sp_status status = sp_intake_next(intake, from->wanted, &memory, &room, error);

    while (status == SP_OK && room > 0) {
        size_t n = room < piece_bytes(f) ? room : piece_bytes(f);

        status = fetch_piece(f, from->index, at, memory, n, error);
        if (status == SP_OK)
            status = sp_intake_take(intake, from->wanted, n, error);
        at += n;
        if (status == SP_OK)
            status = sp_intake_next(intake, from->wanted, &memory, &room, error);
    }
    return status;
}

/* In the order of the description, which is the source's own. */
static sp_status fetch_parts(const fetch *f, sp_intake *intake, sp_error *error)
{
    size_t n = sp_intake_n_wanted(intake);
    part *parts =
        sp_malloc((n + 1) * sizeof *parts); /* at least one, since an empty block would be NULL */
    sp_status status = SP_OK;

    if (parts == NULL)
        return sp_fail_memory(error, n * sizeof *parts, "a list of tensors");
    for (size_t i = 0; i < n; i++) {
        sp_wanted_tensor tensor = {.struct_bytes = sizeof tensor};

        (void)sp_intake_wanted_at(intake, i, &tensor, NULL);
        parts[i] = (part){tensor.index, i};
    }
    qsort(parts, n, sizeof *parts, by_index);
    for (size_t i = 0; i < n && status == SP_OK; i++)
        status = fetch_part(f, intake, &parts[i], error);
    sp_free(parts);
    return status;
}

static sp_status pack(const sp_stage *stage, stage_task *task, const sp_adapter *adapter)
{
    sp_status status = sp_adapter_check_modules(adapter, stage->supported, &task->error);

    if (status == SP_OK)
        status = sp_stage_facts_of(stage->layout, adapter, &task->facts, &task->error);
    if (status == SP_OK)
        status = sp_layout_pack(stage->layout, adapter, NULL, &task->image, &task->error);
    return status;
}

/* Checks what is known of the pairs before gigabytes are read for nothing. */
static sp_status check_pairs(const sp_stage *stage, const sp_adapter *adapter, sp_error *error)
{
    sp_status status = sp_adapter_check_modules(adapter, stage->supported, error);

    for (size_t i = 0; i < sp_adapter_n_sites(adapter) && status == SP_OK; i++)
        status = sp_layout_check_site(stage->layout, sp_adapter_site_at(adapter, i), error);
    return status;
}

/* The audit of what is described, before any of it moves. */
static sp_status audit(const fetch *f, sp_intake **out_intake, sp_error *error)
{
    const sp_source_description *d = &f->description;
    sp_intake_origin origin = {d->config_name != NULL ? d->config_name : "adapter_config.json",
                               d->note};
    sp_adapter_options options = f->stage->audit;
    sp_intake *intake;
    sp_status status;

    options.name = f->request.name;
    status = sp_intake_describe(d->config, d->config_bytes, &origin, d->tensors, d->n_tensors,
                                &options, &intake, error);
    if (status != SP_OK)
        return status;
    status = check_pairs(f->stage, sp_intake_adapter(intake), error);
    if (status == SP_OK)
        *out_intake = intake;
    else
        sp_intake_destroy(intake);
    return status;
}

static sp_status fetch_tensors(fetch *f)
{
    sp_error *error = &f->task->error;
    sp_adapter *adapter = NULL;
    sp_intake *intake;
    sp_status status = audit(f, &intake, error);

    if (status != SP_OK)
        return status;
    f->partial = sp_intake_adapter(intake)->ignored.n > 0;
    status = fetch_parts(f, intake, error);
    if (status == SP_OK)
        status = sp_intake_finish(intake, &adapter, error);
    sp_intake_destroy(intake);
    if (status == SP_OK)
        status = pack(f->stage, f->task, adapter);
    sp_adapter_release(adapter);
    return status;
}

/* ---- images ---------------------------------------------------------------------------------- */

/* An adapter would lose what its image lacks in silence. */
static sp_status check_all_pairs(const fetch *f, int32_t n, size_t n_wanted, sp_error *error)
{
    if (n >= 0 && n_wanted <= (size_t)n)
        return SP_OK;
    return sp_fail(error, SP_ERR_REFUSED, "bad-image", f->request.name, -1,
                   "the image of \"%s\" has %d of its %zu pairs: its source has to give it as "
                   "tensors",
                   f->request.name, (int)n, n_wanted);
}

/* What is described beside the image is judged as if it were to come: an image may be the work of a
 * peer that allows more than this stage does. */
static sp_status audit_tensors_of(const fetch *f, const sp_packed_image *packed, sp_error *error)
{
    sp_intake *intake;
    sp_status status;

    if (f->description.config == NULL)
        return SP_OK;
    status = audit(f, &intake, error);
    if (status != SP_OK)
        return status;
    status =
        check_all_pairs(f, packed->pairs, sp_adapter_n_sites(sp_intake_adapter(intake)), error);
    sp_intake_destroy(intake);
    return status;
}

/* Pairs of experts have no rank in the label, and are counted when they are here. */
static sp_status check_label_pairs(const fetch *f, const sp_packed_image *packed, sp_error *error)
{
    int32_t n = 0;

    for (int32_t i = 0; i < packed->n_sites; i++)
        n += packed->ranks[i] > 0;
    return packed->expert_bytes > 0 ? SP_OK : check_all_pairs(f, n, (size_t)packed->pairs, error);
}

static sp_status check_image(const fetch *f, const sp_packed_image *packed, sp_error *error)
{
    if (!f->source->images_trusted)
        return sp_fail(error, SP_ERR_REFUSED, "image-not-trusted", f->request.name, -1,
                       "the source of \"%s\" gives an image that it has packed, and is not trusted "
                       "with that",
                       f->request.name);
    if (memcmp(&packed->fingerprint, &f->request.fingerprint, sizeof packed->fingerprint) != 0 ||
        packed->n_sites != sp_layout_n_sites(f->stage->layout))
        return sp_fail(error, SP_ERR_REFUSED, "other-layout", f->request.name, -1,
                       "the image of \"%s\" was packed for another layout than this pool's",
                       f->request.name);
    if (packed->ranks == NULL || packed->scales == NULL)
        return sp_fail(error, SP_ERR_REFUSED, "bad-image", f->request.name, -1,
                       "the image of \"%s\" comes without ranks or scales", f->request.name);
    return check_label_pairs(f, packed, error);
}

/* `bytes` of the image from `from` on. */
static sp_status fetch_bytes(const fetch *f, size_t from, char *data, size_t bytes, sp_error *error)
{
    sp_status status = SP_OK;

    for (size_t at = 0, n; at < bytes && status == SP_OK; at += n) {
        n = bytes - at < piece_bytes(f) ? bytes - at : piece_bytes(f);
        status = fetch_piece(f, 0, from + at, data + at, n, error);
    }
    return status;
}

static sp_status fetch_image_bytes(const fetch *f, sp_image *image, sp_error *error)
{
    size_t slot_bytes = sp_layout_slot_bytes(f->stage->layout);
    sp_status status = fetch_bytes(f, 0, image->data, slot_bytes, error);

    if (status == SP_OK && image->experts != NULL)
        status =
            fetch_bytes(f, slot_bytes, image->experts->data, image->experts->block_bytes, error);
    return status;
}

static sp_status packed_facts(const sp_packed_image *packed, sp_stage_facts *out_facts,
                              sp_error *error)
{
    *out_facts = (sp_stage_facts){.struct_bytes = sizeof *out_facts,
                                  .rank = packed->rank,
                                  .sites = packed->pairs,
                                  .file_bytes = packed->file_bytes,
                                  .row_macs = packed->row_macs};
    if (packed->receipt == NULL)
        return SP_OK;
    out_facts->receipt = sp_strdup(packed->receipt);
    return out_facts->receipt != NULL ? SP_OK
                                      : sp_fail_memory(error, strlen(packed->receipt), "a receipt");
}

static sp_status other_bytes(const fetch *f, const char *what, sp_error *error)
{
    return sp_fail(error, SP_ERR_PEER_CONTENT, "peer-content", f->request.name, -1,
                   "the %s of \"%s\" that came are not those that its source promised%s", what,
                   f->request.name,
                   f->partial ? ", or its digest is of tensors too that are left out here: a peer "
                                "must know the base (model, allow-partial)"
                              : "");
}

/* Completes the image, unless its bytes are others than those that were described. */
static sp_status seal_image(const fetch *f, const sp_packed_image *packed, sp_image *image,
                            sp_error *error)
{
    const stage_task *task = f->task;
    sp_status status = image == task->landing
                           ? sp_pool_load_seal(f->stage->pool, task->slot, image, packed, error)
                           : sp_image_take(image, f->stage->layout, packed, error);

    return status == SP_ERR_PEER_CONTENT ? other_bytes(f, "packed bytes", error) : status;
}

static sp_status create_image(const fetch *f, const sp_packed_image *packed, sp_image **out_image,
                              sp_error *error)
{
    sp_image *image;
    sp_status status = sp_image_create(f->stage->layout, &image, error);

    if (status != SP_OK)
        return status;
    if (packed->expert_bytes > 0)
        status = sp_image_add_experts(image, f->stage->layout, packed->expert_bytes, error);
    if (status != SP_OK) {
        sp_image_destroy(image);
        return status;
    }
    *out_image = image;
    return SP_OK;
}

/* What is described, before any of it moves. */
static sp_status admit_image(const fetch *f, sp_packed_image *out_packed, sp_error *error)
{
    sp_status status = sp_struct_read(out_packed, sizeof *out_packed, f->description.image,
                                      "sp_packed_image", error);

    if (status == SP_OK)
        status = check_image(f, out_packed, error);
    if (status == SP_OK)
        status = audit_tensors_of(f, out_packed, error);
    if (status == SP_OK) /* before memory is taken for what no slot can have */
        status = sp_pool_check_experts(f->stage->pool, out_packed->expert_bytes, error);
    return status;
}

/* Into the open slot if there is one, else into memory of its own. */
static sp_status fetch_admitted(const fetch *f, const sp_packed_image *packed)
{
    stage_task *task = f->task;
    sp_image *image = packed->expert_bytes == 0 ? task->landing : NULL;
    sp_status status = SP_OK;

    if (image == NULL)
        status = create_image(f, packed, &image, &task->error);
    if (status != SP_OK)
        return status;
    status = fetch_image_bytes(f, image, &task->error);
    if (status == SP_OK)
        status = seal_image(f, packed, image, &task->error);
    if (status == SP_OK)
        status = packed_facts(packed, &task->facts, &task->error);
    if (image == task->landing)
        task->landed = status == SP_OK;
    else if (status == SP_OK)
        task->image = image;
    else
        sp_image_destroy(image);
    return status;
}

/* Whether the engine's thread is to open a slot first: then f is the task's, and is fetched when
 * the task comes again. */
static bool wait_for_slot(const fetch *f, const sp_packed_image *packed)
{
    stage_task *task = f->task;

    if (!task->may_land || task->landing != NULL || packed->expert_bytes > 0)
        return false;
    task->may_land = false; /* asked once */
    task->open = sp_malloc(sizeof *task->open);
    if (task->open == NULL)
        return false; /* it comes into memory of its own, or that fails too */
    *task->open = *f;
    return true;
}

static sp_status fetch_image(const fetch *f)
{
    sp_packed_image packed = {.struct_bytes = sizeof packed};
    sp_status status = admit_image(f, &packed, &f->task->error);

    if (status != SP_OK)
        return status;
    return wait_for_slot(f, &packed) ? SP_PENDING : fetch_admitted(f, &packed);
}

/* ---- one source ------------------------------------------------------------------------------ */

static bool is_digest(const sp_digest *digest, const sp_digest *wanted)
{
    return wanted == NULL || memcmp(digest, wanted, sizeof *digest) == 0;
}

static sp_status content_changed(const fetch *f, sp_error *error)
{
    return sp_fail(error, SP_ERR_MISMATCH, "content-changed", f->request.name, -1,
                   "what \"%s\" is now has another digest than the one that is wanted; load it "
                   "again",
                   f->request.name);
}

/* What came is what was wanted, and what the source has promised. */
static sp_status check_content(const fetch *f)
{
    stage_task *task = f->task;
    sp_digest digest = sp_image_digest(task->landed ? task->landing : task->image);
    sp_status status = SP_OK;

    if (!is_digest(&digest, f->description.digest))
        status = other_bytes(f, "bytes", &task->error);
    else if (!is_digest(&digest, task->digest))
        status = content_changed(f, &task->error);
    if (status == SP_OK)
        return SP_OK;
    sp_image_destroy(task->image);
    task->image = NULL;
    task->landed = false;
    return status;
}

/* Of a fetch whose bytes are here, or have failed to come. */
static sp_status end_fetch(const fetch *f, sp_status status)
{
    if (status == SP_OK)
        status = check_content(f);
    if (status != SP_OK)
        sp_stage_facts_clear(&f->task->facts);
    return status;
}

static sp_status fetch_described(fetch *f)
{
    stage_task *task = f->task;
    sp_status status;

    /* Nothing is moved that would not be taken. */
    if (f->description.digest != NULL && !is_digest(f->description.digest, task->digest))
        return content_changed(f, &task->error);
    status = f->description.image != NULL ? fetch_image(f) : fetch_tensors(f);
    return status == SP_PENDING ? status : end_fetch(f, status);
}

static void release(const fetch *f)
{
    if (f->source->release != NULL)
        f->source->release(f->source->user, &f->request, f->description.handle);
}

void sp_stage_fetch_end(stage_task *task)
{
    if (task->open == NULL)
        return;
    release(task->open);
    sp_free(task->open);
    task->open = NULL;
}

/* Of a task that has been to the engine's thread for a slot. */
static sp_status fetch_on(stage_task *task)
{
    const fetch *f = task->open;
    sp_packed_image packed = {.struct_bytes = sizeof packed};
    sp_status status = sp_struct_read(&packed, sizeof packed, f->description.image,
                                      "sp_packed_image", &task->error);

    if (status == SP_OK)
        status = end_call(f, SP_OK, &task->error); /* it may have been cancelled */
    if (status == SP_OK)
        status = fetch_admitted(f, &packed);
    status = end_fetch(f, status);
    sp_stage_fetch_end(task);
    return status;
}

static sp_status fetch_from(const sp_stage *stage, stage_task *task)
{
    fetch f = {.stage = stage, .source = &stage->sources[task->source], .task = task};
    sp_status status, described;

    f.request = (sp_source_request){.struct_bytes = sizeof f.request,
                                    .id = task->id,
                                    .name = task->name,
                                    .location = task->location,
                                    .digest = task->digest,
                                    .fingerprint = sp_layout_fingerprint(stage->layout),
                                    .token = task};
    f.description.struct_bytes = sizeof f.description;
    task->error = (sp_error){.code = "", .position = -1};
    if (atomic_load(&task->cancelled))
        return end_call(&f, SP_OK, &task->error);
    begin_call(&f);
    described = f.source->describe(f.source->user, &f.request, &f.description, &task->error);
    status = end_call(&f, described, &task->error);
    if (status == SP_OK)
        status = fetch_described(&f);
    if (described == SP_OK && status != SP_PENDING)
        release(&f);
    return status;
}

static bool is_of_peer(sp_status status)
{
    return status <= SP_ERR_PEER_UNREACHABLE && status > SP_ERR_DEVICE;
}

/* Whether the next source may have what this one lacks or cannot give. What a name means is decided
 * by the first source that has it, so what is wrong with that ends the load; a content is the same
 * wherever it comes from. */
static bool may_go_on(const stage_task *task)
{
    bool lacking = task->status == SP_ERR_NOT_FOUND || is_of_peer(task->status);
    bool ends = task->status == SP_ERR_MEMORY || atomic_load(&task->cancelled);

    return (lacking || (task->digest != NULL && !ends)) && task->source < task->source_last;
}

/* The first one's answer is kept; a failure says more than that something is not there. */
static void keep_first(stage_task *task)
{
    if (task->first_status != SP_OK &&
        (task->first_status != SP_ERR_NOT_FOUND || task->status == SP_ERR_NOT_FOUND))
        return;
    task->first_status = task->status;
    task->first_error = task->error;
}

/* Whether the first answer is only that no directory was given, and the last one is of a source
 * that needs none. */
static bool first_says_less(const stage_task *task)
{
    return task->location[0] == '\0' && task->first_status == SP_ERR_NOT_FOUND &&
           task->first_error.code[0] == '\0' && task->error.code[0] != '\0';
}

bool sp_stage_fetch(const sp_stage *stage, stage_task *task)
{
    if (task->adapter != NULL) {
        task->status = pack(stage, task, task->adapter);
        return true;
    }
    task->status = task->open != NULL ? fetch_on(task) : fetch_from(stage, task);
    if (task->status == SP_OK || task->open != NULL)
        return true;
    if (may_go_on(task)) {
        keep_first(task);
        return false;
    }
    if (task->status == SP_ERR_NOT_FOUND && task->first_status != SP_OK && !first_says_less(task)) {
        task->status = task->first_status;
        task->error = task->first_error;
    }
    return true;
}

/* ---- the engine's side ----------------------------------------------------------------------- */

static void wake(const sp_stage *stage, const stage_task *task)
{
    for (int32_t i = 0; i < stage->n_sources; i++)
        if (stage->sources[i].cancel != NULL)
            stage->sources[i].cancel(stage->sources[i].user, task->id);
}

void sp_stage_cancel(const sp_stage *stage, stage_task *task)
{
    atomic_store(&task->cancelled, true);
    wake(stage, task);
}

static void check_deadline(const sp_stage *stage, stage_task *task)
{
    if (task->overdue || !is_over(task))
        return;
    task->overdue = true;
    wake(stage, task);
}

void sp_stage_check_deadlines(const sp_stage *stage)
{
    if (stage->call_ns_max == 0)
        return;
    for (stage_load *load = stage->loads; load != NULL; load = load->next)
        if (load->state == LOAD_FETCHING)
            check_deadline(stage, &load->task);
    for (stage_content *c = stage->contents; c != NULL; c = c->next)
        if (c->fetching)
            check_deadline(stage, &c->task);
}

void sp_stage_cancel_all(const sp_stage *stage)
{
    for (stage_load *load = stage->loads; load != NULL; load = load->next)
        if (load->state == LOAD_FETCHING)
            sp_stage_cancel(stage, &load->task);
    for (stage_content *c = stage->contents; c != NULL; c = c->next)
        if (c->fetching)
            sp_stage_cancel(stage, &c->task);
}
