/*
 * layout.c: the offset of every matrix inside a slot. One walk over the geometry's rows is used for
 * measuring and building and, through sp_layout_find, for packing, tables and delta.
 */
#include "base/alloc.h"
#include "base/error.h"
#include "base/grow.h"
#include "pool/expert_places.h"
#include "pool/image.h"
#include "pool/slice.h"

#include <stdatomic.h>
#include <string.h>

struct sp_layout {
    atomic_int references;
    sp_geometry *geometry;
    sp_module_set modules;
    sp_dtype dtype;
    sp_served_table embed, head; /* data NULL: not served */
    sp_device *images_for;       /* borrowed, or NULL */
    int32_t rank_stride;
    int32_t n_sites, n_slot_sites;
    size_t slot_bytes;
    sp_digest fingerprint;
    sp_layout_site *sites; /* [n_sites] in slot order */
    int32_t *site_index;   /* [the geometry's sites]; -1 = not held */
    int32_t *row_maps;     /* those of all sites, concatenated */
    int32_t expert_rank;
    sp_expert_places experts;
};

/* ---- the walk ------------------------------------------------------------------------------ */

typedef struct region_cursor {
    size_t slot_bytes;   /* with every matrix aligned */
    size_t matrix_bytes; /* without padding */
    size_t element_bytes;
    int32_t rank_stride;
    bool overflow;
} region_cursor;

/* Places a matrix of rank_stride × n elements; returns its offset. */
static size_t place_matrix(region_cursor *cursor, int32_t n)
{
    size_t offset = cursor->slot_bytes;
    size_t bytes = 0, padded = 0;

    cursor->overflow |= __builtin_mul_overflow(
        (size_t)n, (size_t)cursor->rank_stride * cursor->element_bytes, &bytes);
    cursor->overflow |= __builtin_add_overflow(bytes, SP_POOL_ALIGN_BYTES - 1, &padded);
    padded &= ~(size_t)(SP_POOL_ALIGN_BYTES - 1);
    cursor->overflow |= __builtin_add_overflow(offset, padded, &cursor->slot_bytes);
    cursor->matrix_bytes += bytes; /* never more than slot_bytes */
    return offset;
}

/* Places every site; fills `sites` and `site_index` unless they are NULL. Returns the count. */
static int32_t place_sites(const sp_layout_options *options, sp_module_set modules,
                           region_cursor *cursor, sp_layout_site *sites, int32_t *site_index)
{
    int32_t n_rows = sp_geometry_n_sites(options->geometry), n_sites = 0;
    size_t next_slice = 0;

    for (int32_t i = 0; i < n_rows; i++) {
        sp_site row = {.struct_bytes = sizeof row};
        int32_t module = sp_geometry_site_module(options->geometry, i);
        sp_layout_site site;
        sp_site_part part;

        if (site_index != NULL)
            site_index[i] = -1;
        if ((modules >> module & 1u) == 0)
            continue;
        (void)sp_geometry_site_at(options->geometry, i, &row, NULL);
        part = sp_slices_part(options, i, &row, &next_slice);
        site = (sp_layout_site){
            .struct_bytes = sizeof site,
            .site = i,
            .layer = row.layer,
            .kind = row.kind,
            .module = module,
            .k_in = part.k_in,
            .n_out = part.n_out,
            .row_begin = part.row_begin,
            .col_begin = part.col_begin,
            .row_map = part.row_map,
        };
        site.a_offset_bytes = place_matrix(cursor, site.k_in);
        site.b_offset_bytes = place_matrix(cursor, site.n_out);
        if (site_index != NULL)
            site_index[i] = n_sites;
        if (sites != NULL)
            sites[n_sites] = site;
        n_sites++;
    }
    return n_sites;
}

/* The routers, after the sites of the slots. Returns the count of all. */
static int32_t place_routers(const sp_layout_options *options, int32_t n_sites,
                             sp_layout_site *sites, int32_t *site_index)
{
    int32_t n_rows = options->expert_rank > 0 ? sp_geometry_n_sites(options->geometry) : 0;
    sp_module_set routers = sp_geometry_kind_modules(options->geometry, SP_SITE_ROUTER);

    for (int32_t i = 0; i < n_rows; i++) {
        sp_site row = {.struct_bytes = sizeof row};
        int32_t module = sp_geometry_site_module(options->geometry, i);

        if ((routers >> module & 1u) == 0)
            continue;
        (void)sp_geometry_site_at(options->geometry, i, &row, NULL);
        if (site_index != NULL)
            site_index[i] = n_sites;
        if (sites != NULL)
            sites[n_sites] = (sp_layout_site){
                .struct_bytes = sizeof *sites,
                .site = i,
                .layer = row.layer,
                .kind = row.kind,
                .module = module,
                .k_in = row.k_in,
                .n_out = row.n_out,
                .apart = true,
            };
        n_sites++;
    }
    return n_sites;
}

/* ---- options ------------------------------------------------------------------------------- */

void sp_layout_options_default(sp_layout_options *out_options, size_t struct_bytes)
{
    const sp_layout_options defaults = {
        .struct_bytes = sizeof defaults,
        .rank = 64,
        .dtype = SP_DTYPE_BF16,
        .expert_rank = 64,
    };

    sp_struct_default(out_options, struct_bytes, &defaults, sizeof defaults);
}

static int32_t lowest_module(sp_module_set modules)
{
    return modules != 0 ? __builtin_ctzll(modules) : -1;
}

/* Reads the caller's options and checks them; *out_modules is what the layout will hold. */
static sp_status resolve_options(const sp_layout_options *from, sp_layout_options *options,
                                 sp_module_set *out_modules, sp_error *error)
{
    sp_module_set wanted, present, apart;
    sp_status status;

    sp_layout_options_default(options, sizeof *options);
    status = sp_struct_read(options, sizeof *options, from, "sp_layout_options", error);
    if (status != SP_OK)
        return status;
    if (options->geometry == NULL)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "sp_layout_options", -1,
                       "the layout's options have no geometry");
    if (options->rank < 1 || options->rank > SP_POOL_RANK_MAX)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "max-lora-rank", -1,
                       "the pool's rank must be from 1 to %d, not %d", SP_POOL_RANK_MAX,
                       (int)options->rank);
    if (options->expert_rank < 0 || options->expert_rank > SP_POOL_RANK_MAX)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "max-lora-expert-rank", -1,
                       "the rank of router and expert pairs must be from 0 to %d, not %d",
                       SP_POOL_RANK_MAX, (int)options->expert_rank);
    if (sp_dtype_bytes(options->dtype) == 0)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, NULL, -1, "unknown element type %d",
                       (int)options->dtype);
    present = sp_geometry_modules(options->geometry);
    /* Factors of experts differ in size by adapter and have a memory of their own. */
    apart = sp_geometry_kind_modules(options->geometry, SP_SITE_ROUTER) |
            sp_geometry_kind_modules(options->geometry, SP_SITE_EXPERT);
    wanted = (options->modules & ~apart) != 0
                 ? options->modules & ~apart
                 : sp_geometry_kind_modules(options->geometry, SP_SITE_LINEAR);
    if ((wanted & ~present) != 0) {
        const char *name =
            sp_geometry_module_name(options->geometry, lowest_module(wanted & ~present));

        return sp_fail(error, SP_ERR_ARGUMENT, NULL, name != NULL ? name : "modules", -1,
                       "no layer of the base model has this module");
    }
    if (wanted == 0)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "modules", -1,
                       "the base model has no linear module that a pool could hold");
    *out_modules = wanted;
    return sp_slices_check(options, wanted, error);
}

static region_cursor start_cursor(const sp_layout_options *options)
{
    return (region_cursor){
        .element_bytes = sp_dtype_bytes(options->dtype),
        .rank_stride =
            (options->rank + SP_POOL_RANK_STEP - 1) / SP_POOL_RANK_STEP * SP_POOL_RANK_STEP,
    };
}

static sp_status fail_overflow(sp_error *error)
{
    return sp_fail(error, SP_ERR_TOO_LARGE, NULL, "max-lora-rank", -1,
                   "the bytes of one slot exceed the address space; lower max-lora-rank or "
                   "lora-modules");
}

sp_status sp_layout_measure(const sp_layout_options *options, size_t *out_slot_bytes,
                            size_t *out_matrix_bytes, sp_error *error)
{
    sp_layout_options own;
    sp_module_set modules = 0;
    region_cursor cursor;
    sp_status status = resolve_options(options, &own, &modules, error);

    if (status != SP_OK)
        return status;
    cursor = start_cursor(&own);
    place_sites(&own, modules, &cursor, NULL, NULL);
    if (cursor.overflow)
        return fail_overflow(error);
    if (out_slot_bytes != NULL)
        *out_slot_bytes = cursor.slot_bytes;
    if (out_matrix_bytes != NULL)
        *out_matrix_bytes = cursor.matrix_bytes;
    return SP_OK;
}

/* ---- life ---------------------------------------------------------------------------------- */

static sp_status allocate(const sp_layout_options *options, sp_module_set modules,
                          sp_layout **out_layout, sp_error *error)
{
    region_cursor cursor = start_cursor(options);
    int32_t n_in_slots = place_sites(options, modules, &cursor, NULL, NULL);
    size_t n_sites = (size_t)place_routers(options, n_in_slots, NULL, NULL);
    size_t n_cells = (size_t)sp_geometry_n_sites(options->geometry);
    sp_layout *layout;

    if (cursor.overflow)
        return fail_overflow(error);
    layout = sp_calloc(1, sizeof *layout);
    if (layout == NULL)
        return sp_fail_memory(error, sizeof *layout, "a slot layout");
    layout->sites = sp_calloc(n_sites, sizeof *layout->sites);
    if (layout->sites == NULL) {
        sp_fail_memory(error, n_sites * sizeof *layout->sites, "the sites of a slot layout");
        goto free_layout;
    }
    layout->site_index = sp_calloc(n_cells, sizeof *layout->site_index);
    if (layout->site_index == NULL) {
        sp_fail_memory(error, n_cells * sizeof *layout->site_index, "the index of a slot layout");
        goto free_sites;
    }
    *out_layout = layout;
    return SP_OK;

free_sites:
    sp_free(layout->sites);
free_layout:
    sp_free(layout);
    return SP_ERR_MEMORY;
}

/* The sites' row maps still belong to the caller: replaces them by copies. */
static sp_status keep_row_maps(sp_layout *layout, sp_error *error)
{
    size_t n = 0;
    int32_t *to;

    for (int32_t i = 0; i < layout->n_sites; i++)
        n += layout->sites[i].row_map != NULL ? (size_t)layout->sites[i].n_out : 0;
    if (n == 0)
        return SP_OK;
    layout->row_maps = to = sp_malloc(n * sizeof *to);
    if (to == NULL)
        return sp_fail_memory(error, n * sizeof *to, "the row maps of a slot layout");
    for (int32_t i = 0; i < layout->n_sites; i++) {
        sp_layout_site *site = &layout->sites[i];

        if (site->row_map == NULL)
            continue;
        memcpy(to, site->row_map, (size_t)site->n_out * sizeof *to);
        site->row_map = to;
        to += site->n_out;
    }
    return SP_OK;
}

static sp_status read_served(const sp_served_table *from, sp_served_table *out, sp_error *error)
{
    *out = (sp_served_table){.struct_bytes = sizeof *out};
    return from != NULL ? sp_struct_read(out, sizeof *out, from, "sp_served_table", error) : SP_OK;
}

/*
 * The same table on both sides is a tied head. A geometry that says otherwise would let trainable
 * tokens replace the embedding's rows alone, which no later check could notice.
 */
static sp_status check_tied(const sp_layout *layout, sp_error *error)
{
    int32_t head = sp_geometry_find_kind(layout->geometry, SP_SITE_HEAD);
    sp_site site = {.struct_bytes = sizeof site};

    if (layout->head.data == NULL || layout->head.data != layout->embed.data || head < 0)
        return SP_OK;
    sp_geometry_site_at(layout->geometry, head, &site, NULL);
    if (site.tied)
        return SP_OK;
    return sp_fail(error, SP_ERR_ARGUMENT, NULL, "served_head", -1,
                   "served_head is the memory of served_embed, and the geometry's head, %.200s, is "
                   "not tied",
                   site.path);
}

sp_status sp_layout_create(const sp_layout_options *options, sp_layout **out_layout,
                           sp_error *error)
{
    sp_layout_options own;
    sp_module_set modules = 0;
    region_cursor cursor;
    sp_layout *layout = NULL;
    sp_status status = resolve_options(options, &own, &modules, error);

    if (status == SP_OK && out_layout == NULL)
        status = sp_fail(error, SP_ERR_ARGUMENT, NULL, "out_layout", -1, "out_layout is NULL");
    if (status == SP_OK)
        status = allocate(&own, modules, &layout, error);
    if (status != SP_OK)
        return status;
    cursor = start_cursor(&own);
    layout->n_slot_sites = place_sites(&own, modules, &cursor, layout->sites, layout->site_index);
    layout->n_sites = place_routers(&own, layout->n_slot_sites, layout->sites, layout->site_index);
    layout->expert_rank = own.expert_rank;
    layout->slot_bytes = cursor.slot_bytes;
    layout->rank_stride = cursor.rank_stride;
    layout->dtype = own.dtype;
    layout->images_for = own.images_for;
    layout->modules = modules;
    layout->geometry = sp_geometry_retain(own.geometry);
    atomic_init(&layout->references, 1);
    status = read_served(own.served_embed, &layout->embed, error);
    if (status == SP_OK)
        status = read_served(own.served_head, &layout->head, error);
    if (status == SP_OK)
        status = check_tied(layout, error);
    if (status == SP_OK)
        status = keep_row_maps(layout, error);
    if (status == SP_OK && own.expert_rank > 0)
        status = sp_expert_places_create(layout->geometry, &layout->experts, error);
    if (status == SP_OK)
        status = sp_layout_hash(layout, &layout->fingerprint, error);
    if (status != SP_OK) {
        sp_layout_release(layout);
        return status;
    }
    *out_layout = layout;
    return SP_OK;
}

sp_layout *sp_layout_retain(sp_layout *layout)
{
    atomic_fetch_add_explicit(&layout->references, 1, memory_order_relaxed);
    return layout;
}

void sp_layout_release(sp_layout *layout)
{
    if (layout == NULL)
        return;
    if (atomic_fetch_sub_explicit(&layout->references, 1, memory_order_acq_rel) != 1)
        return;
    sp_expert_places_destroy(&layout->experts);
    sp_geometry_release(layout->geometry);
    sp_free(layout->row_maps);
    sp_free(layout->site_index);
    sp_free(layout->sites);
    sp_free(layout);
}

/* ---- reading ------------------------------------------------------------------------------- */

size_t sp_layout_slot_bytes(const sp_layout *layout)
{
    return layout->slot_bytes;
}

int32_t sp_layout_rank_stride(const sp_layout *layout)
{
    return layout->rank_stride;
}

sp_dtype sp_layout_dtype(const sp_layout *layout)
{
    return layout->dtype;
}

sp_module_set sp_layout_modules(const sp_layout *layout)
{
    return layout->modules;
}

sp_geometry *sp_layout_geometry(const sp_layout *layout)
{
    return layout->geometry;
}

sp_device *sp_layout_images_for(const sp_layout *layout)
{
    return layout->images_for;
}

sp_digest sp_layout_fingerprint(const sp_layout *layout)
{
    return layout->fingerprint;
}

const sp_served_table *sp_layout_served(const sp_layout *layout, sp_site_kind kind)
{
    const sp_served_table *table = kind == SP_SITE_EMBEDDING ? &layout->embed : &layout->head;

    return table->data != NULL ? table : NULL;
}

int32_t sp_layout_n_sites(const sp_layout *layout)
{
    return layout->n_sites;
}

int32_t sp_layout_n_slot_sites(const sp_layout *layout)
{
    return layout->n_slot_sites;
}

const sp_layout_site *sp_layout_site_at(const sp_layout *layout, int32_t index)
{
    return index >= 0 && index < layout->n_sites ? &layout->sites[index] : NULL;
}

int32_t sp_layout_find(const sp_layout *layout, int32_t site)
{
    if (site < 0 || site >= sp_geometry_n_sites(layout->geometry))
        return -1;
    return layout->site_index[site];
}

/* ---- experts ------------------------------------------------------------------------------- */

int32_t sp_layout_expert_rank(const sp_layout *layout)
{
    return layout->expert_rank;
}

int32_t sp_layout_n_expert_places(const sp_layout *layout)
{
    return layout->experts.n;
}

const sp_expert_place *sp_layout_expert_place_at(const sp_layout *layout, int32_t index)
{
    return index >= 0 && index < layout->experts.n ? &layout->experts.places[index] : NULL;
}

int32_t sp_layout_find_expert_place(const sp_layout *layout, int32_t site)
{
    if (layout->experts.n == 0 || site < 0 || site >= sp_geometry_n_sites(layout->geometry))
        return -1;
    return layout->experts.of_site[site];
}
