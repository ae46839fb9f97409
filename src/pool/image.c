/*
 * image.c: packs an adapter's tensors into the bytes of a slot. Everything that the adapter lacks
 * is zero, so that copying the image over a slot leaves nothing of an earlier adapter. Each byte is
 * written once, by the task of its place: a block of this size is fresh memory, and touching it
 * costs more than converting into it.
 */
#include "pool/image.h"

#include "base/alloc.h"
#include "base/assert.h"
#include "base/error.h"
#include "base/half.h"
#include "base/hash.h"
#include "pool/expert_image.h"
#include "pool/pack_check.h"

#include <math.h>
#include <string.h>

/* What the tasks of one packing share: a task is one place of the slot. */
typedef struct pack_job {
    const sp_layout *layout;
    sp_converter converter;
    int32_t n_places;              /* of the slot */
    const sp_adapter_site **sites; /* [n_places] the site of each place, or NULL */
    char *data;                    /* of the image */
    sp_pack_failure failure;
} pack_job;

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

/* Everything but data. */
static sp_status create_lists(const sp_layout *layout, sp_image **out_image, sp_error *error)
{
    size_t n_sites = (size_t)sp_layout_n_sites(layout);
    sp_image *image = sp_calloc(1, sizeof *image);

    if (image == NULL)
        return sp_fail_memory(error, sizeof *image, "an adapter's packed image");
    image->ranks = sp_calloc(n_sites, sizeof *image->ranks);
    image->scales = sp_calloc(n_sites, sizeof *image->scales);
    image->bytes = sp_layout_image_bytes(layout);
    image->fingerprint = sp_layout_fingerprint(layout);
    image->embed = served_data(layout, SP_SITE_EMBEDDING);
    image->head = served_data(layout, SP_SITE_HEAD);
    if (image->ranks == NULL || image->scales == NULL) {
        sp_image_destroy(image);
        return sp_fail_memory(error, n_sites * sizeof(float), "an adapter's packed image");
    }
    *out_image = image;
    return SP_OK;
}

sp_status sp_image_create(const sp_layout *layout, sp_image **out_image, sp_error *error)
{
    sp_image *image;
    sp_status status = create_lists(layout, &image, error);

    if (status != SP_OK)
        return status;
    image->data = sp_image_memory_create(sp_layout_images_for(layout), sp_layout_slot_bytes(layout),
                                         &image->pinned);
    if (image->data == NULL) {
        sp_image_destroy(image);
        return sp_fail_memory(error, sp_layout_image_bytes(layout), "an adapter's packed image");
    }
    *out_image = image;
    return SP_OK;
}

sp_status sp_image_create_over(const sp_layout *layout, void *data, uint64_t opening,
                               sp_image **out_image, sp_error *error)
{
    sp_image *image;
    sp_status status = create_lists(layout, &image, error);

    SP_ASSERT(opening > 0);
    if (status != SP_OK)
        return status;
    image->data = data;
    image->opening = opening;
    image->bytes -= sp_layout_slot_bytes(layout);
    *out_image = image;
    return SP_OK;
}

sp_status sp_image_copy(const sp_layout *layout, const sp_image *from, sp_image **out_image,
                        sp_error *error)
{
    size_t n_sites = (size_t)sp_layout_n_sites(layout);
    sp_image *image;
    sp_status status = sp_image_create(layout, &image, error);

    SP_ASSERT(from->experts == NULL && from->overlay == NULL);
    SP_ASSERT(from->opening == 0 || from->sealed);
    if (status != SP_OK)
        return status;
    memcpy(image->data, from->data, sp_layout_slot_bytes(layout));
    memcpy(image->ranks, from->ranks, n_sites * sizeof *image->ranks);
    memcpy(image->scales, from->scales, n_sites * sizeof *image->scales);
    image->digest = from->digest;
    image->checksum = from->checksum;
    *out_image = image;
    return SP_OK;
}

static sp_status bad_image(int32_t site, const char *what, sp_error *error)
{
    return sp_fail(error, SP_ERR_REFUSED, "bad-image", "image", site,
                   "a packed image that has %s is not taken", what);
}

sp_status sp_image_add_experts(sp_image *image, const sp_layout *layout, size_t bytes,
                               sp_error *error)
{
    sp_status status = sp_expert_image_create(layout, bytes, &image->experts, error);

    if (status == SP_OK)
        image->bytes += image->experts->host_bytes;
    return status;
}

/* A router's factors are apart, where its rank and scale are, too. */
static sp_status check_router(const sp_image *image, const sp_layout *layout,
                              const sp_image_label *label, int32_t site, sp_error *error)
{
    int32_t router = site - sp_layout_n_slot_sites(layout);
    const sp_expert_cell *cell = image->experts != NULL ? &image->experts->routers[router] : NULL;
    int32_t rank = cell != NULL ? cell->rank : 0;

    if (label->ranks[site] != rank)
        return bad_image(site, "other pairs of a router than it says", error);
    if (rank != 0 && sp_f32_bits(label->scales[site]) != sp_f32_bits(cell->scale))
        return bad_image(site, "another scale of a router than it says", error);
    return SP_OK;
}

static sp_status check_label_site(const sp_image *image, const sp_layout *layout,
                                  const sp_image_label *label, int32_t site, sp_error *error)
{
    if (!isfinite(label->scales[site]))
        return bad_image(site, "a scale that is not finite", error);
    if (sp_layout_site_at(layout, site)->apart)
        return check_router(image, layout, label, site, error);
    if (label->ranks[site] < 0 || label->ranks[site] > sp_layout_rank_stride(layout))
        return bad_image(site, "a rank beyond the pool's", error);
    return SP_OK;
}

sp_status sp_image_seal(sp_image *image, const sp_layout *layout, const sp_image_label *label,
                        int32_t *out_n_pairs, sp_error *error)
{
    int32_t n_sites = sp_layout_n_sites(layout), n_pairs = 0;
    sp_status status = SP_OK;

    for (int32_t i = 0; i < n_sites && status == SP_OK; i++)
        status = check_label_site(image, layout, label, i, error);
    if (status == SP_OK && image->experts != NULL)
        status = sp_expert_image_check(image->experts, layout, &n_pairs, error);
    if (status != SP_OK)
        return status;
    for (int32_t i = 0; i < sp_layout_n_slot_sites(layout); i++)
        n_pairs += label->ranks[i] > 0;
    if (sp_xxh3(image->data, sp_layout_slot_bytes(layout)) != label->checksum)
        return bad_image(-1, "bytes of another checksum", error);
    *out_n_pairs = n_pairs;
    memcpy(image->ranks, label->ranks, (size_t)n_sites * sizeof *image->ranks);
    memcpy(image->scales, label->scales, (size_t)n_sites * sizeof *image->scales);
    image->digest = label->digest;
    image->checksum = label->checksum;
    return SP_OK;
}

static const char binding[] = "sidepath image 1";

static void add_number(sp_sha256 *hash, uint64_t number)
{
    uint8_t bytes[8];

    for (int i = 0; i < 8; i++)
        bytes[i] = (uint8_t)(number >> (8 * i));
    sp_sha256_update(hash, bytes, sizeof bytes);
}

sp_status sp_image_bind(const sp_layout *layout, const sp_image_label *label, const void *data,
                        const sp_expert_image *experts, sp_digest *out_seal, sp_error *error)
{
    sp_digest fingerprint = sp_layout_fingerprint(layout);
    size_t bytes = sp_layout_slot_bytes(layout);
    int32_t n_sites = sp_layout_n_sites(layout);
    sp_sha256 *hash;

    if (sp_sha256_create(&hash) != SP_OK)
        return sp_fail_memory(error, 0, "the digest of an image");
    sp_sha256_update(hash, binding, sizeof binding);
    sp_sha256_update(hash, label->digest.bytes, sizeof label->digest.bytes);
    sp_sha256_update(hash, fingerprint.bytes, sizeof fingerprint.bytes);
    add_number(hash, (uint64_t)n_sites);
    for (int32_t i = 0; i < n_sites; i++) {
        add_number(hash, (uint64_t)label->ranks[i]);
        add_number(hash, sp_f32_bits(label->scales[i]));
    }
    add_number(hash, bytes);
    sp_sha256_update(hash, data, bytes);
    /* The record of an image without routers and experts ends here. */
    if (experts != NULL) {
        add_number(hash, experts->bytes);
        add_number(hash, experts->block_bytes);
        sp_sha256_update(hash, experts->data, experts->block_bytes);
    }
    sp_sha256_finish(hash, out_seal->bytes);
    return SP_OK;
}

/* Routers and experts have their own memory, and another place in the description. */
static sp_status check_packed(const sp_image *image, const sp_layout *layout,
                              const sp_packed_image *packed, sp_error *error)
{
    size_t bytes = image->experts != NULL ? image->experts->bytes : 0;

    if (memcmp(&packed->fingerprint, &image->fingerprint, sizeof image->fingerprint) != 0 ||
        packed->n_sites != sp_layout_n_sites(layout))
        return sp_fail(error, SP_ERR_REFUSED, "other-layout", "image", -1,
                       "the image was packed for another layout than this pool's");
    if (packed->ranks == NULL || packed->scales == NULL)
        return bad_image(-1, "no ranks or scales", error);
    return packed->expert_bytes == bytes
               ? SP_OK
               : bad_image(-1, "pairs of routers or experts that have no memory here", error);
}

sp_status sp_image_take(sp_image *image, const sp_layout *layout, const sp_packed_image *packed,
                        sp_error *error)
{
    int32_t n_pairs = 0;
    sp_digest seal;
    sp_status status = check_packed(image, layout, packed, error);
    sp_image_label label;

    if (status != SP_OK)
        return status;
    label = (sp_image_label){packed->ranks, packed->scales, packed->digest, packed->checksum};
    status = sp_image_seal(image, layout, &label, &n_pairs, error);
    if (status == SP_OK && (packed->pairs < 0 || packed->pairs > n_pairs))
        status = bad_image(n_pairs, "fewer pairs than its adapter", error);
    if (status != SP_OK || packed->seal == NULL)
        return status;
    status = sp_image_bind(layout, &label, image->data, image->experts, &seal, error);
    if (status != SP_OK || memcmp(&seal, packed->seal, sizeof seal) == 0)
        return status;
    return sp_fail(error, SP_ERR_PEER_CONTENT, "peer-content", "image", -1,
                   "the packed bytes that came are not those that their seal was made of");
}

void sp_image_destroy(sp_image *image)
{
    if (image == NULL)
        return;
    sp_expert_image_destroy(image->experts);
    sp_overlay_destroy(image->overlay);
    if (image->opening == 0)
        sp_image_memory_destroy(image->data, image->pinned);
    sp_free(image->scales);
    sp_free(image->ranks);
    sp_free(image);
}

/* Zeroes the region after a matrix of rows × stride elements at `begin`. */
static void clear_tail(const pack_job *job, size_t begin, size_t end, int32_t rows, int32_t stride)
{
    size_t bytes = (size_t)rows * (size_t)stride * sp_dtype_bytes(job->converter.dtype);

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
    bad = sp_convert_factor(&job->converter, job->data + place->a_offset_bytes, place->k_in, &part);
    clear_tail(job, place->a_offset_bytes, place->b_offset_bytes, part.rows, place->k_in);
    return bad < 0 ? bad : bad / part.cols * a->cols + place->col_begin + bad % part.cols;
}

/* The place's rows of B, in its order, up to `end`. */
static int64_t pack_b(const pack_job *job, const sp_layout_site *place, size_t end,
                      const sp_factor *b)
{
    int32_t stride = sp_layout_rank_stride(job->layout),
            count = place->row_map != NULL ? 1 : place->n_out;
    size_t row_bytes = (size_t)stride * sp_dtype_bytes(job->converter.dtype);

    for (int32_t i = 0; i < place->n_out; i += count) {
        int32_t first = place->row_map != NULL ? place->row_map[i] : place->row_begin;
        sp_factor part = rows_of(b, first, count);
        int64_t bad = sp_convert_factor(&job->converter,
                                        job->data + place->b_offset_bytes + (size_t)i * row_bytes,
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
    size_t end =
        index + 1 < job->n_places ? next->a_offset_bytes : sp_layout_slot_bytes(job->layout);
    const sp_adapter_site *site = job->sites[index];
    int64_t bad;

    (void)thread;
    if (site == NULL) {
        memset(job->data + place->a_offset_bytes, 0, end - place->a_offset_bytes);
        return;
    }
    bad = pack_a(job, place, &site->a);
    if (bad >= 0) {
        sp_pack_failure_overflow(&job->failure, index, site, 'A', bad, job->converter.dtype);
        return;
    }
    bad = pack_b(job, place, end, &site->b);
    if (bad >= 0)
        sp_pack_failure_overflow(&job->failure, index, site, 'B', bad, job->converter.dtype);
}

/* Finds the place of every site; all that can be wrong but values is found here. Returns in
 * *out_n_apart how many belong in the expert memory. */
static sp_status place_sites(pack_job *job, const sp_adapter_site *sites, size_t n_sites,
                             size_t *out_n_apart, sp_error *error)
{
    *out_n_apart = 0;
    for (size_t i = 0; i < n_sites; i++) {
        sp_pack_target target;
        sp_status status = sp_pack_locate(job->layout, &sites[i], &target, error);

        if (status != SP_OK)
            return status;
        if (target.apart) {
            ++*out_n_apart;
            continue;
        }
        if (job->sites[target.site] != NULL)
            return sp_pack_twice(&sites[i], error);
        job->sites[target.site] = &sites[i];
    }
    return SP_OK;
}

/* Converts the slot's pairs into the image; a value that overflows is refused. */
static sp_status fill_image(pack_job *job, sp_exec *exec, sp_image *image, sp_error *error)
{
    for (int32_t i = 0; i < job->n_places; i++) {
        image->ranks[i] = job->sites[i] != NULL ? job->sites[i]->rank : 0;
        image->scales[i] = job->sites[i] != NULL ? job->sites[i]->scale : 0;
    }
    job->data = image->data;
    sp_pack_failure_start(&job->failure);
    sp_exec_run(exec, pack_place, job, job->n_places);
    return sp_pack_failure_end(&job->failure, error);
}

static sp_status fill_experts(const pack_job *job, const sp_adapter_site *sites, size_t n_sites,
                              sp_exec *exec, sp_image *image, sp_error *error)
{
    sp_status status = sp_expert_image_build(job->layout, &job->converter, sites, n_sites, exec,
                                             &image->experts, error);

    if (status != SP_OK)
        return status;
    image->bytes += image->experts->host_bytes;
    for (int32_t i = job->n_places; i < sp_layout_n_sites(job->layout); i++) {
        image->ranks[i] = image->experts->routers[i - job->n_places].rank;
        image->scales[i] = image->experts->routers[i - job->n_places].scale;
    }
    return SP_OK;
}

/* Checks every site before the image, which may be large, is allocated. */
sp_status sp_layout_pack_sites(const sp_layout *layout, const sp_adapter_site *sites,
                               size_t n_sites, const sp_digest *digest, sp_exec *exec,
                               sp_image **out_image, sp_error *error)
{
    pack_job job = {.layout = layout,
                    .converter.dtype = sp_layout_dtype(layout),
                    .n_places = sp_layout_n_slot_sites(layout)};
    size_t n_apart = 0;
    sp_image *image;
    sp_status status = sp_kernels_get(NULL, &job.converter.kernels, error);

    if (status != SP_OK)
        return status;
    job.sites = sp_calloc((size_t)job.n_places, sizeof *job.sites);
    if (job.sites == NULL)
        return sp_fail_memory(error, (size_t)job.n_places * sizeof *job.sites,
                              "the places of an adapter");
    status = place_sites(&job, sites, n_sites, &n_apart, error);
    if (status != SP_OK)
        goto free_sites;
    status = sp_image_create(layout, &image, error);
    if (status != SP_OK)
        goto free_sites;
    status = fill_image(&job, exec, image, error);
    if (status == SP_OK && n_apart > 0)
        status = fill_experts(&job, sites, n_sites, exec, image, error);
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

size_t sp_image_expert_bytes(const sp_image *image)
{
    return image->experts != NULL ? image->experts->bytes : 0;
}
