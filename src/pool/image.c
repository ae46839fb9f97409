/*
 * image.c: packs an adapter's tensors into the bytes of a slot. Everything that the adapter lacks
 * is zero, so that copying the image over a slot leaves nothing of an earlier adapter. Each byte is
 * written once, by the task of its place: a block of this size is fresh memory, and touching it
 * costs more than converting into it.
 */
#include "pool/image.h"

#include "adapter/values.h"
#include "base/alloc.h"
#include "base/error.h"
#include "base/half.h"
#include "base/hash.h"
#include "kernels/cpu/kernels.h"

#include <math.h>
#include <pthread.h>
#include <string.h>

/* What the tasks of one packing share: a task is one place of the layout. */
typedef struct pack_job {
    const sp_layout *layout;
    const sp_kernels *kernels;
    const sp_adapter_site **sites; /* [places] the site of each place, or NULL */
    char *data;                    /* of the image */
    sp_dtype dtype;

    pthread_mutex_t mutex; /* guards the fields below */
    int32_t failed_place;  /* the first one, whatever the threads; INT32_MAX: none */
    sp_status status;
    sp_error error;
} pack_job;

/* ---- conversion ---------------------------------------------------------------------------- */

#define CHUNK_ELEMENTS 8192 /* converted and checked while in the first-level cache */
#define STAGE_FLOATS   256

/* Elements as FP32, exactly. Stored tensors may be at any byte address. */
static void load_floats(sp_dtype dtype, const char *from, int64_t stride, int32_t n, float *out)
{
    uint16_t half;

    switch (dtype) {
    case SP_DTYPE_F32:
        for (int32_t i = 0; i < n; i++)
            memcpy(&out[i], from + 4 * stride * i, 4);
        break;
    case SP_DTYPE_BF16:
        for (int32_t i = 0; i < n; i++) {
            memcpy(&half, from + 2 * stride * i, 2);
            out[i] = sp_bf16_to_f32(half);
        }
        break;
    case SP_DTYPE_F16:
        for (int32_t i = 0; i < n; i++) {
            memcpy(&half, from + 2 * stride * i, 2);
            out[i] = sp_f16_to_f32(half);
        }
        break;
    }
}

/* The first of n converted elements that was finite before conversion and no longer is; n if there
 * is none. */
static int64_t first_overflow(sp_dtype to_type, const void *to, sp_dtype from_type,
                              const void *from, int64_t n)
{
    int64_t i = sp_values_find_bad(to, to_type, n, to_type);

    for (; i >= 0 && i < n; i++) {
        if (!isfinite(sp_values_at(to, to_type, i)) && isfinite(sp_values_at(from, from_type, i)))
            return i;
    }
    return n;
}

/* n contiguous elements, aligned to their type; returns the first that overflowed, or n. */
static int64_t convert_run(const pack_job *job, char *to, sp_dtype from_type, const char *from,
                           int64_t n)
{
    int64_t to_bytes = (int64_t)sp_dtype_bytes(job->dtype);
    int64_t from_bytes = (int64_t)sp_dtype_bytes(from_type);

    for (int64_t begin = 0; begin < n; begin += CHUNK_ELEMENTS) {
        int64_t count = n - begin < CHUNK_ELEMENTS ? n - begin : CHUNK_ELEMENTS;
        int64_t bad;

        job->kernels->convert(job->dtype, to + begin * to_bytes, from_type,
                              from + begin * from_bytes, count);
        if (from_type == job->dtype || job->dtype == SP_DTYPE_F32)
            continue; /* nothing can overflow */
        bad = first_overflow(job->dtype, to + begin * to_bytes, from_type,
                             from + begin * from_bytes, count);
        if (bad < count)
            return begin + bad;
    }
    return n;
}

/* One row of a view with strides of its own, or of data that is not aligned. */
static int64_t convert_strided_row(const pack_job *job, char *to, const sp_factor *factor,
                                   const char *from)
{
    int64_t from_bytes = (int64_t)sp_dtype_bytes(factor->dtype);
    int32_t n = factor->cols;
    float stage[STAGE_FLOATS];

    for (int32_t begin = 0; begin < n; begin += STAGE_FLOATS) {
        int32_t count = n - begin < STAGE_FLOATS ? n - begin : STAGE_FLOATS;
        int64_t bad;

        load_floats(factor->dtype, from + begin * factor->col_stride * from_bytes,
                    factor->col_stride, count, stage);
        bad = convert_run(job, to + (size_t)begin * sp_dtype_bytes(job->dtype), SP_DTYPE_F32,
                          (const char *)stage, count);
        if (bad < count)
            return begin + bad;
    }
    return n;
}

/*
 * Converts the factor's rows to `to`, `stride` elements apart, with zeros after each up to the
 * next. Returns the first element that overflowed, in row-major order, or -1.
 */
static int64_t convert_factor(const pack_job *job, char *to, int32_t stride,
                              const sp_factor *factor)
{
    size_t from_bytes = sp_dtype_bytes(factor->dtype), to_bytes = sp_dtype_bytes(job->dtype);
    const char *from = factor->data;
    int64_t cols = factor->cols;
    bool plain = factor->col_stride == 1 && (uintptr_t)from % from_bytes == 0;

    if (plain && factor->row_stride == cols && stride == cols) {
        int64_t n = factor->rows * cols;
        int64_t bad = convert_run(job, to, factor->dtype, from, n);

        return bad < n ? bad : -1;
    }
    for (int32_t row = 0; row < factor->rows; row++) {
        int64_t bad = plain ? convert_run(job, to, factor->dtype, from, cols)
                            : convert_strided_row(job, to, factor, from);

        if (bad < cols)
            return row * cols + bad;
        memset(to + (size_t)cols * to_bytes, 0, (size_t)(stride - cols) * to_bytes);
        to += (size_t)stride * to_bytes;
        from += factor->row_stride * (int64_t)from_bytes;
    }
    return -1;
}

/* ---- checks -------------------------------------------------------------------------------- */

static const char *site_name(const sp_adapter_site *site)
{
    if (site->module != NULL)
        return site->module;
    return site->path != NULL ? site->path : "unknown module";
}

/* Checks against the whole site, of which the layout may hold a slice. */
static sp_status check_dims(const sp_layout *layout, const sp_layout_site *place,
                            const sp_adapter_site *site, sp_error *error)
{
    sp_site row = {.struct_bytes = sizeof row};

    (void)sp_geometry_site_at(sp_layout_geometry(layout), place->site, &row, NULL);
    if (site->a.rows == site->rank && site->a.cols == row.k_in && site->b.rows == row.n_out &&
        site->b.cols == site->rank && site->rank >= 1)
        return SP_OK;
    return sp_fail(error, SP_ERR_MISMATCH, "shape-mismatch", site_name(site), site->layer,
                   "layer %d: lora_A [%d, %d] and lora_B [%d, %d] of rank %d do not fit a module "
                   "of %d inputs and %d outputs",
                   (int)site->layer, (int)site->a.rows, (int)site->a.cols, (int)site->b.rows,
                   (int)site->b.cols, (int)site->rank, (int)row.k_in, (int)row.n_out);
}

/* Whether the layout holds the module with this name in any layer. */
static bool holds_module(const sp_layout *layout, const char *name)
{
    const sp_geometry *geometry = sp_layout_geometry(layout);

    for (int32_t m = 0; m < sp_geometry_n_modules(geometry); m++) {
        if (strcmp(sp_geometry_module_name(geometry, m), name) == 0)
            return (sp_layout_modules(layout) >> m & 1u) != 0;
    }
    return false;
}

/*
 * The place of one site, or why the pool cannot take it. By its path: the adapter may have been
 * opened with another geometry, or with none.
 */
static sp_status locate(const sp_layout *layout, const sp_adapter_site *site, int32_t *out_index,
                        sp_error *error)
{
    bool unheld = site->kind == SP_SITE_EXPERT || site->kind == SP_SITE_ROUTER;
    int32_t index =
        sp_layout_find(layout, sp_geometry_find(sp_layout_geometry(layout), site->path));

    if (unheld)
        return sp_fail(error, SP_ERR_UNSUPPORTED, "engine-unsupported", site_name(site),
                       site->layer, "router and expert deltas cannot be held by this pool");
    if (index < 0 && holds_module(layout, site_name(site)))
        return sp_fail(error, SP_ERR_MISMATCH, "wrong-layer-kind", site_name(site), site->layer,
                       "layer %d of the base model has no %s", (int)site->layer, site_name(site));
    if (index < 0)
        return sp_fail(error, SP_ERR_REFUSED, "module-not-in-pool", site_name(site), site->layer,
                       "the adapter adapts %s, which the pool does not hold; add it to "
                       "lora-modules",
                       site_name(site));
    if (site->rank > sp_layout_rank_stride(layout))
        return sp_fail(error, SP_ERR_TOO_LARGE, "rank-exceeds-pool", site_name(site), site->layer,
                       "rank %d is above the pool's %d; raise max-lora-rank", (int)site->rank,
                       (int)sp_layout_rank_stride(layout));
    if (!isfinite(site->scale))
        return sp_fail(error, SP_ERR_REFUSED, "non-finite", site_name(site), site->layer,
                       "the scale of layer %d is not finite", (int)site->layer);
    *out_index = index;
    return check_dims(layout, sp_layout_site_at(layout, index), site, error);
}

sp_status sp_layout_check_site(const sp_layout *layout, const sp_adapter_site *site,
                               sp_error *error)
{
    int32_t index;

    return locate(layout, site, &index, error);
}

/* ---- packing ------------------------------------------------------------------------------- */

size_t sp_layout_image_bytes(const sp_layout *layout)
{
    size_t n_sites = (size_t)sp_layout_n_sites(layout);

    return sizeof(sp_image) + n_sites * (sizeof(int32_t) + sizeof(float)) +
           sp_layout_slot_bytes(layout);
}

void *sp_image_memory_create(sp_device *device, size_t bytes, sp_device **out_pinned)
{
    void *memory = NULL;

    *out_pinned = NULL;
    if (device == NULL || sp_device_get_kind(device) == SP_DEVICE_CPU)
        return sp_aligned_malloc(bytes, SP_POOL_ALIGN_BYTES);
    if (sp_device_alloc_pinned(device, bytes, &memory, NULL) != SP_OK)
        return NULL;
    *out_pinned = device;
    return memory;
}

void sp_image_memory_destroy(void *memory, sp_device *pinned)
{
    if (pinned != NULL)
        sp_device_free_pinned(pinned, memory);
    else
        sp_aligned_free(memory);
}

static const void *served_data(const sp_layout *layout, sp_site_kind kind)
{
    const sp_served_table *table = sp_layout_served(layout, kind);

    return table != NULL ? table->data : NULL;
}

bool sp_image_is_for(const sp_image *image, const sp_layout *layout)
{
    sp_digest wanted = sp_layout_fingerprint(layout);

    return memcmp(&image->fingerprint, &wanted, sizeof wanted) == 0 &&
           (image->overlay == NULL || (image->embed == served_data(layout, SP_SITE_EMBEDDING) &&
                                       image->head == served_data(layout, SP_SITE_HEAD)));
}

sp_status sp_image_create(const sp_layout *layout, sp_image **out_image, sp_error *error)
{
    size_t n_sites = (size_t)sp_layout_n_sites(layout);
    sp_image *image = sp_calloc(1, sizeof *image);

    if (image == NULL)
        return sp_fail_memory(error, sizeof *image, "an adapter's packed image");
    image->ranks = sp_calloc(n_sites, sizeof *image->ranks);
    image->scales = sp_calloc(n_sites, sizeof *image->scales);
    image->data = sp_image_memory_create(sp_layout_images_for(layout), sp_layout_slot_bytes(layout),
                                         &image->pinned);
    image->bytes = sp_layout_image_bytes(layout);
    image->fingerprint = sp_layout_fingerprint(layout);
    image->embed = served_data(layout, SP_SITE_EMBEDDING);
    image->head = served_data(layout, SP_SITE_HEAD);
    if (image->ranks == NULL || image->scales == NULL || image->data == NULL) {
        sp_image_destroy(image);
        return sp_fail_memory(error, sp_layout_image_bytes(layout), "an adapter's packed image");
    }
    *out_image = image;
    return SP_OK;
}

static sp_status bad_image(int32_t site, const char *what, sp_error *error)
{
    return sp_fail(error, SP_ERR_REFUSED, "bad-image", "image", site,
                   "a packed image that has %s is not taken", what);
}

sp_status sp_image_seal(sp_image *image, const sp_layout *layout, const sp_image_label *label,
                        sp_error *error)
{
    int32_t n_sites = sp_layout_n_sites(layout);

    for (int32_t i = 0; i < n_sites; i++) {
        if (label->ranks[i] < 0 || label->ranks[i] > sp_layout_rank_stride(layout))
            return bad_image(i, "a rank beyond the pool's", error);
        if (!isfinite(label->scales[i]))
            return bad_image(i, "a scale that is not finite", error);
    }
    if (sp_xxh3(image->data, sp_layout_slot_bytes(layout)) != label->checksum)
        return bad_image(-1, "bytes of another checksum", error);
    memcpy(image->ranks, label->ranks, (size_t)n_sites * sizeof *image->ranks);
    memcpy(image->scales, label->scales, (size_t)n_sites * sizeof *image->scales);
    image->digest = label->digest;
    image->checksum = label->checksum;
    return SP_OK;
}

void sp_image_destroy(sp_image *image)
{
    if (image == NULL)
        return;
    sp_overlay_destroy(image->overlay);
    sp_image_memory_destroy(image->data, image->pinned);
    sp_free(image->scales);
    sp_free(image->ranks);
    sp_free(image);
}

/* Keeps the failure of the lowest place, so that threads do not decide what is reported. */
static void record_overflow(pack_job *job, int32_t place, const sp_adapter_site *site, char letter,
                            int64_t index)
{
    const sp_factor *factor = letter == 'A' ? &site->a : &site->b;

    pthread_mutex_lock(&job->mutex);
    if (place < job->failed_place) {
        job->failed_place = place;
        job->status =
            sp_fail(&job->error, SP_ERR_REFUSED, "non-finite", site_name(site), index,
                    "lora_%c [%d, %d] is too large for %s", letter, (int)(index / factor->cols),
                    (int)(index % factor->cols), sp_dtype_name(job->dtype));
    }
    pthread_mutex_unlock(&job->mutex);
}

/* Zeroes the region after a matrix of rows × stride elements at `begin`. */
static void clear_tail(const pack_job *job, size_t begin, size_t end, int32_t rows, int32_t stride)
{
    size_t bytes = (size_t)rows * (size_t)stride * sp_dtype_bytes(job->dtype);

    memset(job->data + begin + bytes, 0, end - begin - bytes);
}

/* `n` rows of B from row `first` on. */
static sp_factor rows_of(const sp_factor *b, int32_t first, int32_t n)
{
    sp_factor rows = *b;

    rows.data = (const char *)b->data + first * b->row_stride * (int64_t)sp_dtype_bytes(b->dtype);
    rows.rows = n;
    return rows;
}

/* The place's columns of A. Returns, as pack_b, the element of the whole matrix that overflowed, or
 * -1. */
static int64_t pack_a(const pack_job *job, const sp_layout_site *place, const sp_factor *a)
{
    sp_factor part = *a;
    int64_t bad;

    part.data = (const char *)a->data +
                place->col_begin * a->col_stride * (int64_t)sp_dtype_bytes(a->dtype);
    part.cols = place->k_in;
    bad = convert_factor(job, job->data + place->a_offset_bytes, place->k_in, &part);
    clear_tail(job, place->a_offset_bytes, place->b_offset_bytes, part.rows, place->k_in);
    return bad < 0 ? bad : bad / part.cols * a->cols + place->col_begin + bad % part.cols;
}

/* The place's rows of B, in its order, up to `end`. */
static int64_t pack_b(const pack_job *job, const sp_layout_site *place, size_t end,
                      const sp_factor *b)
{
    int32_t stride = sp_layout_rank_stride(job->layout),
            count = place->row_map != NULL ? 1 : place->n_out;
    size_t row_bytes = (size_t)stride * sp_dtype_bytes(job->dtype);

    for (int32_t i = 0; i < place->n_out; i += count) {
        int32_t first = place->row_map != NULL ? place->row_map[i] : place->row_begin;
        sp_factor part = rows_of(b, first, count);
        int64_t bad = convert_factor(job, job->data + place->b_offset_bytes + (size_t)i * row_bytes,
                                     stride, &part);

        if (bad >= 0)
            return (int64_t)first * b->cols + bad;
    }
    clear_tail(job, place->b_offset_bytes, end, place->n_out, stride);
    return -1;
}

/* sp_task_fn: everything between this place's first byte and the next place's. */
static void pack_place(void *user, int32_t index, int32_t thread)
{
    pack_job *job = user;
    const sp_layout_site *place = sp_layout_site_at(job->layout, index);
    const sp_layout_site *next = sp_layout_site_at(job->layout, index + 1);
    size_t end = next != NULL ? next->a_offset_bytes : sp_layout_slot_bytes(job->layout);
    const sp_adapter_site *site = job->sites[index];
    int64_t bad;

    (void)thread;
    if (site == NULL) {
        memset(job->data + place->a_offset_bytes, 0, end - place->a_offset_bytes);
        return;
    }
    bad = pack_a(job, place, &site->a);
    if (bad >= 0) {
        record_overflow(job, index, site, 'A', bad);
        return;
    }
    bad = pack_b(job, place, end, &site->b);
    if (bad >= 0)
        record_overflow(job, index, site, 'B', bad);
}

/* Finds the place of every site; all that can be wrong but values is found here. */
static sp_status place_sites(pack_job *job, const sp_adapter_site *sites, size_t n_sites,
                             sp_error *error)
{
    for (size_t i = 0; i < n_sites; i++) {
        int32_t index = -1;
        sp_status status = locate(job->layout, &sites[i], &index, error);

        if (status != SP_OK)
            return status;
        if (job->sites[index] != NULL)
            return sp_fail(error, SP_ERR_REFUSED, "duplicate-tensor", site_name(&sites[i]),
                           sites[i].layer, "layer %d has this module twice", (int)sites[i].layer);
        job->sites[index] = &sites[i];
    }
    return SP_OK;
}

/* Converts everything into the image; a value that overflows is refused. */
static sp_status fill_image(pack_job *job, sp_exec *exec, sp_image *image, sp_error *error)
{
    int32_t n = sp_layout_n_sites(job->layout);

    for (int32_t i = 0; i < n; i++) {
        image->ranks[i] = job->sites[i] != NULL ? job->sites[i]->rank : 0;
        image->scales[i] = job->sites[i] != NULL ? job->sites[i]->scale : 0;
    }
    job->data = image->data;
    pthread_mutex_init(&job->mutex, NULL);
    sp_exec_run(exec, pack_place, job, n);
    pthread_mutex_destroy(&job->mutex);
    if (job->status != SP_OK && error != NULL)
        *error = job->error;
    return job->status;
}

/* Checks every site before the image, which may be large, is allocated. */
sp_status sp_layout_pack_sites(const sp_layout *layout, const sp_adapter_site *sites,
                               size_t n_sites, const sp_digest *digest, sp_exec *exec,
                               sp_image **out_image, sp_error *error)
{
    pack_job job = {.layout = layout, .dtype = sp_layout_dtype(layout), .failed_place = INT32_MAX};
    size_t n_places = (size_t)sp_layout_n_sites(layout);
    sp_image *image;
    sp_status status = sp_kernels_get(NULL, &job.kernels, error);

    if (status != SP_OK)
        return status;
    job.sites = sp_calloc(n_places, sizeof *job.sites);
    if (job.sites == NULL)
        return sp_fail_memory(error, n_places * sizeof *job.sites, "the places of an adapter");
    status = place_sites(&job, sites, n_sites, error);
    if (status != SP_OK)
        goto free_sites;
    status = sp_image_create(layout, &image, error);
    if (status != SP_OK)
        goto free_sites;
    status = fill_image(&job, exec, image, error);
    if (status != SP_OK) {
        sp_image_destroy(image);
        goto free_sites;
    }
    image->digest = *digest;
    image->checksum = sp_xxh3(image->data, sp_layout_slot_bytes(layout));
    *out_image = image;
free_sites:
    sp_free(job.sites);
    return status;
}

/* ---- reading ------------------------------------------------------------------------------- */

sp_digest sp_image_digest(const sp_image *image)
{
    return image->digest;
}

sp_digest sp_image_fingerprint(const sp_image *image)
{
    return image->fingerprint;
}

size_t sp_image_bytes(const sp_image *image)
{
    return image->bytes;
}

size_t sp_image_overlay_bytes(const sp_image *image)
{
    return image->overlay != NULL ? image->overlay->bytes : 0;
}

uint64_t sp_image_checksum(const sp_image *image)
{
    return image->checksum;
}
