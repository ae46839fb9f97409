/*
 * image.c: an adapter's tensors as the bytes of a slot. The image starts as zeros, so everything
 * that the adapter lacks is absent in it, and copying it over a slot leaves nothing of an earlier
 * adapter behind.
 */
#include "pool/image.h"

#include "base/alloc.h"
#include "base/error.h"
#include "base/half.h"
#include "base/hash.h"

#include <math.h>
#include <string.h>

/* ---- conversion ---------------------------------------------------------------------------- */

#define STAGE_FLOATS 256

/* Elements as FP32, exactly. Stored tensors may lie at any byte address. */
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

/* Rounds to nearest even; returns the first index that was finite and is not any more, or n. */
static int32_t store_floats(sp_dtype dtype, void *to, const float *from, int32_t n)
{
    uint16_t *halves = to;
    int32_t bad = n;

    switch (dtype) {
    case SP_DTYPE_F32:
        memcpy(to, from, (size_t)n * 4);
        break;
    case SP_DTYPE_BF16:
        for (int32_t i = 0; i < n; i++)
            halves[i] = sp_f32_to_bf16(from[i]);
        for (int32_t i = n - 1; i >= 0; i--)
            bad = (halves[i] & 0x7f80u) == 0x7f80u && isfinite(from[i]) ? i : bad;
        break;
    case SP_DTYPE_F16:
        for (int32_t i = 0; i < n; i++)
            halves[i] = sp_f32_to_f16(from[i]);
        for (int32_t i = n - 1; i >= 0; i--)
            bad = (halves[i] & 0x7c00u) == 0x7c00u && isfinite(from[i]) ? i : bad;
        break;
    }
    return bad;
}

/* One row of n elements; returns the first index that overflowed, or n. */
static int32_t convert_row(sp_dtype to_type, char *to, const sp_factor *factor, int32_t row)
{
    size_t from_bytes = sp_dtype_bytes(factor->dtype);
    const char *from = (const char *)factor->data + row * factor->row_stride * (int64_t)from_bytes;
    int32_t n = factor->cols;
    float stage[STAGE_FLOATS];

    if (factor->dtype == to_type && factor->col_stride == 1) {
        memcpy(to, from, (size_t)n * from_bytes);
        return n;
    }
    for (int32_t begin = 0; begin < n; begin += STAGE_FLOATS) {
        int32_t count = n - begin < STAGE_FLOATS ? n - begin : STAGE_FLOATS;
        int32_t bad;

        load_floats(factor->dtype, from + begin * factor->col_stride * (int64_t)from_bytes,
                    factor->col_stride, count, stage);
        bad = store_floats(to_type, to + (size_t)begin * sp_dtype_bytes(to_type), stage, count);
        if (bad < count)
            return begin + bad;
    }
    return n;
}

/* Writes the factor's rows to `to`, whose rows are `stride` elements of the pool's type apart. */
static sp_status pack_factor(sp_dtype to_type, char *to, int32_t stride, const sp_factor *factor,
                             const char *subject, char letter, sp_error *error)
{
    size_t row_bytes = (size_t)stride * sp_dtype_bytes(to_type);

    for (int32_t row = 0; row < factor->rows; row++) {
        int32_t col = convert_row(to_type, to + (size_t)row * row_bytes, factor, row);

        if (col < factor->cols)
            return sp_fail(error, SP_ERR_REFUSED, "non-finite", subject,
                           (int64_t)row * factor->cols + col,
                           "lora_%c [%d, %d] is too large for %s", letter, (int)row, (int)col,
                           sp_dtype_name(to_type));
    }
    return SP_OK;
}

/* ---- checks -------------------------------------------------------------------------------- */

static const char *site_name(const sp_adapter_site *site)
{
    const char *name = sp_module_name(site->module);

    return name != NULL ? name : "unknown module";
}

static sp_status check_dims(const sp_layout_site *place, const sp_adapter_site *site,
                            sp_error *error)
{
    if (site->a.rows == site->rank && site->a.cols == place->k_in && site->b.rows == place->n_out &&
        site->b.cols == site->rank && site->rank >= 1)
        return SP_OK;
    return sp_fail(error, SP_ERR_MISMATCH, "shape-mismatch", site_name(site), site->layer,
                   "layer %d: lora_A [%d, %d] and lora_B [%d, %d] of rank %d do not fit a module "
                   "of %d inputs and %d outputs",
                   (int)site->layer, (int)site->a.rows, (int)site->a.cols, (int)site->b.rows,
                   (int)site->b.cols, (int)site->rank, (int)place->k_in, (int)place->n_out);
}

/* The place of one site, or why the pool cannot take it. */
static sp_status locate(const sp_layout *layout, const sp_adapter_site *site, int32_t *out_index,
                        sp_error *error)
{
    bool unheld = site->expert >= 0 || site->module == SP_MODULE_ROUTER;
    int32_t index = sp_layout_find(layout, site->layer, site->module);

    if (unheld)
        return sp_fail(error, SP_ERR_UNSUPPORTED, "engine-unsupported", site_name(site),
                       site->layer, "router and expert deltas cannot be held by this pool");
    if (index < 0 && (sp_layout_modules(layout) >> site->module & 1u) != 0)
        return sp_fail(error, SP_ERR_MISMATCH, "wrong-layer-kind", site_name(site), site->layer,
                       "layer %d of the base model has no %s", (int)site->layer, site_name(site));
    if (index < 0)
        return sp_fail(error, SP_ERR_REFUSED, "module-not-in-pool", site_name(site), site->layer,
                       "the adapter adapts %s, which the pool does not hold; add it to "
                       "--lora-modules",
                       site_name(site));
    if (site->rank > sp_layout_rank_stride(layout))
        return sp_fail(error, SP_ERR_TOO_LARGE, "rank-exceeds-pool", site_name(site), site->layer,
                       "rank %d is above the pool's %d; raise --max-lora-rank", (int)site->rank,
                       (int)sp_layout_rank_stride(layout));
    if (!isfinite(site->scale))
        return sp_fail(error, SP_ERR_REFUSED, "non-finite", site_name(site), site->layer,
                       "the scale of layer %d is not finite", (int)site->layer);
    *out_index = index;
    return check_dims(sp_layout_site_at(layout, index), site, error);
}

/* ---- packing ------------------------------------------------------------------------------- */

size_t sp_layout_image_bytes(const sp_layout *layout)
{
    size_t n_sites = (size_t)sp_layout_n_sites(layout);

    return sizeof(sp_image) + n_sites * (sizeof(int32_t) + sizeof(float)) +
           sp_layout_slot_bytes(layout);
}

/* Zeros in either kind of memory. */
static void *create_data(const sp_layout *layout, sp_device **out_pinned)
{
    sp_device *device = sp_layout_images_for(layout);
    size_t bytes = sp_layout_slot_bytes(layout);
    void *data = NULL;

    if (device == NULL || sp_device_get_kind(device) == SP_DEVICE_CPU)
        return sp_aligned_calloc(bytes, SP_POOL_ALIGN_BYTES);
    if (sp_device_alloc_pinned(device, bytes, &data, NULL) != SP_OK)
        return NULL;
    memset(data, 0, bytes);
    *out_pinned = device;
    return data;
}

static sp_image *create_image(const sp_layout *layout)
{
    size_t n_sites = (size_t)sp_layout_n_sites(layout);
    sp_image *image = sp_calloc(1, sizeof *image);

    if (image == NULL)
        return NULL;
    image->ranks = sp_calloc(n_sites, sizeof *image->ranks);
    image->scales = sp_calloc(n_sites, sizeof *image->scales);
    image->data = create_data(layout, &image->pinned);
    image->bytes = sp_layout_image_bytes(layout);
    if (image->ranks != NULL && image->scales != NULL && image->data != NULL)
        return image;
    sp_image_destroy(image);
    return NULL;
}

void sp_image_destroy(sp_image *image)
{
    if (image == NULL)
        return;
    sp_overlay_destroy(image->overlay);
    if (image->pinned != NULL)
        sp_device_free_pinned(image->pinned, image->data);
    else
        sp_aligned_free(image->data);
    sp_free(image->scales);
    sp_free(image->ranks);
    sp_free(image);
}

static sp_status pack_site(const sp_layout *layout, const sp_adapter_site *site, sp_image *image,
                           sp_error *error)
{
    const sp_layout_site *place;
    sp_dtype dtype = sp_layout_dtype(layout);
    char *data = image->data;
    int32_t index;
    sp_status status = locate(layout, site, &index, error);

    if (status != SP_OK)
        return status;
    if (image->ranks[index] != 0)
        return sp_fail(error, SP_ERR_REFUSED, "duplicate-tensor", site_name(site), site->layer,
                       "layer %d has this module twice", (int)site->layer);
    place = sp_layout_site_at(layout, index);
    image->ranks[index] = site->rank;
    image->scales[index] = site->scale;
    status = pack_factor(dtype, data + place->a_offset_bytes, place->k_in, &site->a,
                         site_name(site), 'A', error);
    if (status == SP_OK)
        status = pack_factor(dtype, data + place->b_offset_bytes, sp_layout_rank_stride(layout),
                             &site->b, site_name(site), 'B', error);
    return status;
}

/* Checks every site before the image, which may be large, is allocated. */
sp_status sp_layout_pack_sites(const sp_layout *layout, const sp_adapter_site *sites,
                               size_t n_sites, const sp_digest *digest, sp_image **out_image,
                               sp_error *error)
{
    sp_status status = SP_OK;
    sp_image *image;
    int32_t index;

    for (size_t i = 0; i < n_sites && status == SP_OK; i++)
        status = locate(layout, &sites[i], &index, error);
    if (status != SP_OK)
        return status;
    image = create_image(layout);
    if (image == NULL)
        return sp_fail_memory(error, sp_layout_image_bytes(layout), "an adapter's packed image");
    for (size_t i = 0; i < n_sites && status == SP_OK; i++)
        status = pack_site(layout, &sites[i], image, error);
    if (status != SP_OK) {
        sp_image_destroy(image);
        return status;
    }
    image->digest = *digest;
    image->checksum = sp_xxh3(image->data, sp_layout_slot_bytes(layout));
    *out_image = image;
    return SP_OK;
}
