/*
 * expert_image.c: one walk over an adapter's router and expert pairs gives every matrix its place;
 * estimating and packing both use it, so that they cannot differ.
 */
#include "pool/expert_image.h"

#include "base/alloc.h"
#include "base/error.h"
#include "base/half.h"
#include "base/integer.h"
#include "pool/image.h"
#include "pool/pack_check.h"

#include <math.h>
#include <string.h>

/* Neighbouring pairs of one task: fused experts share the cache lines of their B. */
#define TASK_PAIRS 16

int32_t sp_expert_rank_stride(int32_t rank)
{
    return (int32_t)round_up(rank, SP_POOL_RANK_STEP);
}

/* ---- the walk ------------------------------------------------------------------------------ */

/* The pairs, in their order. */
typedef struct pair_list {
    const void *from;
    const sp_adapter_site *(*at)(const void *from, size_t index);
} pair_list;

/*
 * Where the next pair goes. A run is all pairs of one module of a layer; `twin` walks along the run
 * before this one, in step with the experts.
 */
typedef struct pair_walk {
    pair_list list;
    sp_dtype dtype;
    size_t bytes; /* so far */
    size_t run_begin, twin, twin_end;
} pair_walk;

/* Offsets of one pair; twin: the pair whose A it shares, or SIZE_MAX. */
typedef struct pair_offsets {
    size_t a, b, twin;
} pair_offsets;

static bool same_run(const sp_adapter_site *a, const sp_adapter_site *b)
{
    return a->layer == b->layer && strcmp(sp_pack_site_name(a), sp_pack_site_name(b)) == 0;
}

static bool same_view(const sp_factor *a, const sp_factor *b)
{
    return a->data == b->data && a->dtype == b->dtype && a->rows == b->rows && a->cols == b->cols &&
           a->row_stride == b->row_stride && a->col_stride == b->col_stride;
}

/* The pair of the same expert in the run before, if their A is one view. */
static size_t find_twin(pair_walk *walk, size_t index)
{
    const sp_adapter_site *site = walk->list.at(walk->list.from, index), *twin;

    if (index == 0 || !same_run(site, walk->list.at(walk->list.from, index - 1))) {
        walk->twin = walk->run_begin;
        walk->twin_end = index;
        walk->run_begin = index;
    }
    while (walk->twin < walk->twin_end &&
           walk->list.at(walk->list.from, walk->twin)->expert < site->expert)
        walk->twin++;
    if (walk->twin >= walk->twin_end)
        return SIZE_MAX;
    twin = walk->list.at(walk->list.from, walk->twin);
    return twin->kind == SP_SITE_EXPERT && twin->layer == site->layer &&
                   twin->expert == site->expert && same_view(&twin->a, &site->a)
               ? walk->twin
               : SIZE_MAX;
}

static size_t take(pair_walk *walk, int64_t elements)
{
    size_t offset = walk->bytes;

    walk->bytes += align_up((size_t)elements * sp_dtype_bytes(walk->dtype), SP_POOL_ALIGN_BYTES);
    return offset;
}

/* Places pair `index`; pairs come in order. Where it shares A, `a` of the result is not set. */
static pair_offsets place_pair(pair_walk *walk, size_t index)
{
    const sp_adapter_site *site = walk->list.at(walk->list.from, index);
    int64_t stride = sp_expert_rank_stride(site->rank);
    pair_offsets offsets = {.twin = find_twin(walk, index)};

    if (offsets.twin == SIZE_MAX)
        offsets.a = take(walk, stride * site->a.cols);
    offsets.b = take(walk, stride * site->b.rows);
    return offsets;
}

/* ---- estimating ---------------------------------------------------------------------------- */

static const sp_adapter_site *site_of_adapter(const void *from, size_t index)
{
    return sp_adapter_site_at(from, index);
}

size_t sp_layout_expert_bytes(const sp_adapter *adapter, sp_dtype dtype)
{
    pair_walk walk = {.list = {adapter, site_of_adapter}, .dtype = dtype};

    for (size_t i = 0; i < sp_adapter_n_sites(adapter); i++) {
        sp_site_kind kind = sp_adapter_site_at(adapter, i)->kind;

        if (kind == SP_SITE_ROUTER || kind == SP_SITE_EXPERT)
            (void)place_pair(&walk, i);
    }
    return walk.bytes;
}

/* ---- packing ------------------------------------------------------------------------------- */

typedef struct pair_item {
    const sp_adapter_site *site;
    sp_pack_target target;
    pair_offsets offsets;
} pair_item;

typedef struct expert_job {
    const sp_layout *layout;
    const sp_converter *converter;
    sp_expert_image *image;
    pair_item *items; /* [n] */
    size_t n;
    sp_pack_failure failure;
} expert_job;

static const sp_adapter_site *site_of_items(const void *from, size_t index)
{
    return ((const pair_item *)from)[index].site;
}

static sp_status list_items(expert_job *job, const sp_adapter_site *sites, size_t n_sites,
                            sp_error *error)
{
    job->items = sp_calloc(n_sites, sizeof *job->items);
    if (job->items == NULL)
        return sp_fail_memory(error, n_sites * sizeof *job->items, "the pairs of experts");
    for (size_t i = 0; i < n_sites; i++) {
        pair_item item = {.site = &sites[i]};
        sp_status status = sp_pack_locate(job->layout, &sites[i], &item.target, error);

        if (status != SP_OK)
            return status;
        if (item.target.apart)
            job->items[job->n++] = item;
    }
    return SP_OK;
}

static size_t place_items(expert_job *job)
{
    pair_walk walk = {.list = {job->items, site_of_items}, .dtype = job->converter->dtype};

    for (size_t i = 0; i < job->n; i++) {
        pair_offsets *offsets = &job->items[i].offsets;

        *offsets = place_pair(&walk, i);
        if (offsets->twin != SIZE_MAX)
            offsets->a = job->items[offsets->twin].offsets.a;
    }
    return walk.bytes;
}

static sp_expert_cell *cell_of(const expert_job *job, const sp_pack_target *target)
{
    const sp_expert_image *image = job->image;

    if (target->site >= 0)
        return &image->routers[target->site - sp_layout_n_slot_sites(job->layout)];
    return &image->cells[(size_t)target->place * (size_t)image->n_experts + (size_t)target->expert];
}

static sp_status fill_cells(const expert_job *job, sp_error *error)
{
    for (size_t i = 0; i < job->n; i++) {
        const pair_item *item = &job->items[i];
        sp_expert_cell *cell = cell_of(job, &item->target);

        if (cell->rank != 0)
            return sp_pack_twice(item->site, error);
        *cell = (sp_expert_cell){.a = (uint32_t)(item->offsets.a / SP_POOL_ALIGN_BYTES),
                                 .b = (uint32_t)(item->offsets.b / SP_POOL_ALIGN_BYTES),
                                 .rank = item->site->rank,
                                 .scale = item->site->scale};
        if (item->target.place >= 0)
            job->image->present[item->target.place] = true;
    }
    return SP_OK;
}

/* A matrix of `rows` rows of `stride` elements, of which the factor has the first; zeros up to the
 * next boundary. */
static int64_t pack_matrix(const expert_job *job, size_t offset, int32_t stride, int32_t rows,
                           const sp_factor *factor)
{
    size_t row_bytes = (size_t)stride * sp_dtype_bytes(job->converter->dtype);
    char *to = (char *)job->image->data + offset;
    size_t used = (size_t)factor->rows * row_bytes;

    memset(to + used, 0, align_up((size_t)rows * row_bytes, SP_POOL_ALIGN_BYTES) - used);
    return sp_convert_factor(job->converter, to, stride, factor);
}

static void pack_item(expert_job *job, size_t index)
{
    const pair_item *item = &job->items[index];
    const sp_adapter_site *site = item->site;
    int32_t stride = sp_expert_rank_stride(site->rank);
    int64_t bad = -1;

    if (item->offsets.twin == SIZE_MAX)
        bad = pack_matrix(job, item->offsets.a, site->a.cols, stride, &site->a);
    if (bad >= 0) {
        sp_pack_failure_overflow(&job->failure, (int64_t)index, site, 'A', bad,
                                 job->converter->dtype);
        return;
    }
    bad = pack_matrix(job, item->offsets.b, stride, site->b.rows, &site->b);
    if (bad >= 0)
        sp_pack_failure_overflow(&job->failure, (int64_t)index, site, 'B', bad,
                                 job->converter->dtype);
}

/* sp_task_fn */
static void pack_items(void *user, int32_t index, int32_t thread)
{
    expert_job *job = user;
    size_t begin = (size_t)index * TASK_PAIRS;

    (void)thread;
    for (size_t i = begin; i < begin + TASK_PAIRS && i < job->n; i++)
        pack_item(job, i);
}

/* ---- life ---------------------------------------------------------------------------------- */

size_t sp_expert_cells_bytes(const sp_layout *layout)
{
    return (size_t)sp_layout_n_expert_places(layout) *
           (size_t)sp_geometry_experts(sp_layout_geometry(layout)) * sizeof(sp_expert_cell);
}

/* The cells are undefined. */
static sp_status allocate(const sp_layout *layout, size_t bytes, sp_expert_image **out_image,
                          sp_error *error)
{
    size_t cells_bytes = sp_expert_cells_bytes(layout);
    sp_expert_image *image = sp_calloc(1, sizeof *image);

    if (image == NULL)
        return sp_fail_memory(error, sizeof *image, "an adapter's experts");
    image->bytes = bytes;
    image->n_places = sp_layout_n_expert_places(layout);
    image->n_experts = sp_geometry_experts(sp_layout_geometry(layout));
    image->n_routers = sp_layout_n_sites(layout) - sp_layout_n_slot_sites(layout);
    image->block_bytes = bytes + cells_bytes + (size_t)image->n_routers * sizeof *image->routers;
    image->data =
        sp_image_memory_create(sp_layout_images_for(layout), image->block_bytes, &image->pinned);
    /* One more: an empty block would be NULL. */
    image->present = sp_calloc((size_t)image->n_places + 1, sizeof *image->present);
    if (image->data == NULL || image->present == NULL) {
        sp_status status = sp_fail_memory(error, image->block_bytes, "an adapter's packed experts");

        sp_expert_image_destroy(image);
        return status;
    }
    image->cells = (sp_expert_cell *)(void *)((char *)image->data + bytes);
    image->routers = (sp_expert_cell *)(void *)((char *)image->data + bytes + cells_bytes);
    image->host_bytes =
        sizeof *image + image->block_bytes + ((size_t)image->n_places + 1) * sizeof *image->present;
    *out_image = image;
    return SP_OK;
}

static sp_status fill(expert_job *job, sp_exec *exec, sp_error *error)
{
    sp_expert_image *image = job->image;
    sp_status status;

    memset(image->cells, 0, image->block_bytes - image->bytes); /* routers too */
    status = fill_cells(job, error);
    if (status != SP_OK)
        return status;
    sp_pack_failure_start(&job->failure);
    sp_exec_run(exec, pack_items, job, (int32_t)ceil_div((int64_t)job->n, TASK_PAIRS));
    return sp_pack_failure_end(&job->failure, error);
}

sp_status sp_expert_image_build(const sp_layout *layout, const sp_converter *converter,
                                const sp_adapter_site *sites, size_t n_sites, sp_exec *exec,
                                sp_expert_image **out_image, sp_error *error)
{
    expert_job job = {.layout = layout, .converter = converter};
    size_t bytes = 0;
    sp_status status = list_items(&job, sites, n_sites, error);

    if (status == SP_OK) {
        bytes = place_items(&job);
        if (bytes / SP_POOL_ALIGN_BYTES > UINT32_MAX)
            status = sp_fail(error, SP_ERR_TOO_LARGE, "experts-too-large", "expert-bytes", -1,
                             "the pairs of router and experts take %zu bytes, more than can be "
                             "addressed",
                             bytes);
    }
    if (status == SP_OK)
        status = allocate(layout, bytes, &job.image, error);
    if (status == SP_OK)
        status = fill(&job, exec, error);
    sp_free(job.items);
    if (status == SP_OK)
        *out_image = job.image;
    else
        sp_expert_image_destroy(job.image);
    return status;
}

void sp_expert_image_destroy(sp_expert_image *image)
{
    if (image == NULL)
        return;
    sp_image_memory_destroy(image->data, image->pinned);
    sp_free(image->present);
    sp_free(image);
}

/* ---- packed elsewhere ---------------------------------------------------------------------- */

static sp_status bad_image(int64_t position, const char *what, sp_error *error)
{
    return sp_fail(error, SP_ERR_REFUSED, "bad-image", "image", position,
                   "a packed image that has %s is not taken", what);
}

sp_status sp_expert_image_create(const sp_layout *layout, size_t bytes, sp_expert_image **out_image,
                                 sp_error *error)
{
    if (bytes == 0 || bytes % SP_POOL_ALIGN_BYTES != 0 || bytes / SP_POOL_ALIGN_BYTES > UINT32_MAX)
        return bad_image(-1, "a size that no pairs of routers and experts have", error);
    if (sp_layout_expert_rank(layout) == 0)
        return bad_image(-1, "pairs of routers or experts, which the pool does not take,", error);
    return allocate(layout, bytes, out_image, error);
}

/* Whether a matrix of so many elements fits at the offset. */
static bool fits(const sp_expert_image *image, uint32_t offset, int64_t elements, sp_dtype dtype)
{
    uint64_t begin = (uint64_t)offset * SP_POOL_ALIGN_BYTES;
    uint64_t bytes = (uint64_t)elements * sp_dtype_bytes(dtype);

    return begin <= image->bytes && bytes <= image->bytes - begin;
}

static bool is_zero(const sp_expert_cell *cell)
{
    return cell->a == 0 && cell->b == 0 && cell->rank == 0 && sp_f32_bits(cell->scale) == 0;
}

/* Counts the cell in *out_n_pairs if it has a pair. position: what the error names. */
static sp_status check_cell(const sp_expert_image *image, const sp_layout *layout,
                            const sp_expert_cell *cell, int32_t k_in, int32_t n_out,
                            int64_t position, int32_t *out_n_pairs, sp_error *error)
{
    sp_dtype dtype = sp_layout_dtype(layout);
    int64_t stride;

    if (is_zero(cell))
        return SP_OK;
    if (cell->rank < 1 || cell->rank > sp_layout_expert_rank(layout))
        return bad_image(position, "a rank beyond the pool's", error);
    if (!isfinite(cell->scale))
        return bad_image(position, "a scale that is not finite", error);
    stride = sp_expert_rank_stride(cell->rank);
    if (!fits(image, cell->a, stride * k_in, dtype) || !fits(image, cell->b, stride * n_out, dtype))
        return bad_image(position, "factors beyond its end", error);
    ++*out_n_pairs;
    return SP_OK;
}

static sp_status check_place(sp_expert_image *image, const sp_layout *layout, int32_t place,
                             int32_t *out_n_pairs, sp_error *error)
{
    const sp_expert_place *of = sp_layout_expert_place_at(layout, place);
    const sp_expert_cell *cells = image->cells + (size_t)place * (size_t)image->n_experts;
    int32_t before = *out_n_pairs;
    sp_status status = SP_OK;

    for (int32_t i = 0; i < image->n_experts && status == SP_OK; i++)
        status = check_cell(image, layout, &cells[i], of->k_in, of->n_out,
                            (int64_t)place * image->n_experts + i, out_n_pairs, error);
    image->present[place] = *out_n_pairs > before;
    return status;
}

sp_status sp_expert_image_check(sp_expert_image *image, const sp_layout *layout,
                                int32_t *out_n_pairs, sp_error *error)
{
    int32_t first_router = sp_layout_n_slot_sites(layout), n = 0;
    sp_status status = SP_OK;

    for (int32_t place = 0; place < image->n_places && status == SP_OK; place++)
        status = check_place(image, layout, place, &n, error);
    for (int32_t i = 0; i < image->n_routers && status == SP_OK; i++) {
        const sp_layout_site *site = sp_layout_site_at(layout, first_router + i);

        status = check_cell(image, layout, &image->routers[i], site->k_in, site->n_out,
                            first_router + i, &n, error);
    }
    if (status == SP_OK)
        *out_n_pairs = n;
    return status;
}
