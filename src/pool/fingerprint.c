/*
 * fingerprint.c: a digest of everything but the adapter that determines an image's bytes, so that
 * an image records which layout it was packed for.
 *
 * Numbers are 64-bit little-endian, texts end in their NUL.
 */
#include "base/error.h"
#include "base/hash.h"
#include "pool/image.h"

#include <string.h>

static const char magic[] = "sidepath layout 1";

static void add_number(sp_sha256 *hash, uint64_t number)
{
    uint8_t bytes[8];

    for (int i = 0; i < 8; i++)
        bytes[i] = (uint8_t)(number >> (8 * i));
    sp_sha256_update(hash, bytes, sizeof bytes);
}

static void add_text(sp_sha256 *hash, const char *text)
{
    sp_sha256_update(hash, text, strlen(text) + 1);
}

static void add_site(sp_sha256 *hash, const sp_geometry *geometry, const sp_layout_site *site)
{
    sp_site row = {.struct_bytes = sizeof row};

    (void)sp_geometry_site_at(geometry, site->site, &row, NULL);
    add_text(hash, row.path);
    add_number(hash, (uint64_t)site->k_in);
    add_number(hash, (uint64_t)site->n_out);
    add_number(hash, site->a_offset_bytes);
    add_number(hash, site->b_offset_bytes);
}

static bool is_slice(const sp_geometry *geometry, const sp_layout_site *site)
{
    sp_site row = {.struct_bytes = sizeof row};

    (void)sp_geometry_site_at(geometry, site->site, &row, NULL);
    return site->k_in != row.k_in || site->n_out != row.n_out || site->row_map != NULL;
}

/* For a layout of slices: the whole sites' sizes and the slices. The record of a layout of whole
 * sites ends before this. */
static void add_slices(sp_sha256 *hash, const sp_layout *layout)
{
    const sp_geometry *geometry = sp_layout_geometry(layout);

    for (int32_t i = 0; i < sp_layout_n_sites(layout); i++) {
        const sp_layout_site *site = sp_layout_site_at(layout, i);
        sp_site row = {.struct_bytes = sizeof row};

        if (!is_slice(geometry, site))
            continue;
        (void)sp_geometry_site_at(geometry, site->site, &row, NULL);
        add_number(hash, (uint64_t)i);
        add_number(hash, (uint64_t)row.k_in);
        add_number(hash, (uint64_t)row.n_out);
        add_number(hash, (uint64_t)site->col_begin);
        add_number(hash, (uint64_t)site->row_begin);
        add_number(hash, site->row_map != NULL);
        for (int32_t k = 0; site->row_map != NULL && k < site->n_out; k++)
            add_number(hash, (uint64_t)site->row_map[k]);
    }
}

/* For a geometry with experts. The record of others ends before this. */
static void add_experts(sp_sha256 *hash, const sp_layout *layout)
{
    const sp_geometry *geometry = sp_layout_geometry(layout);

    for (int32_t i = 0; i < sp_layout_n_expert_places(layout); i++) {
        const sp_expert_place *place = sp_layout_expert_place_at(layout, i);

        add_number(hash, (uint64_t)place->layer);
        add_text(hash, sp_geometry_module_name(geometry, place->module));
        add_number(hash, (uint64_t)place->k_in);
        add_number(hash, (uint64_t)place->n_out);
    }
    if (sp_layout_n_expert_places(layout) > 0)
        add_number(hash, (uint64_t)sp_geometry_experts(geometry));
}

static void add_served(sp_sha256 *hash, const sp_served_table *table)
{
    add_number(hash, table != NULL);
    if (table == NULL)
        return;
    add_number(hash, (uint64_t)table->dtype);
    add_number(hash, (uint64_t)table->rows);
    add_number(hash, (uint64_t)table->hidden);
    add_number(hash, table->approximate);
}

sp_status sp_layout_hash(const sp_layout *layout, sp_digest *out_fingerprint, sp_error *error)
{
    sp_sha256 *hash;
    sp_status status = sp_sha256_create(&hash);

    if (status != SP_OK)
        return sp_fail_memory(error, 0, "the fingerprint of a slot layout");
    sp_sha256_update(hash, magic, sizeof magic);
    add_number(hash, (uint64_t)sp_layout_rank_stride(layout));
    add_text(hash, sp_dtype_name(sp_layout_dtype(layout)));
    add_number(hash, sp_layout_slot_bytes(layout));
    add_number(hash, (uint64_t)sp_layout_n_sites(layout));
    for (int32_t i = 0; i < sp_layout_n_sites(layout); i++)
        add_site(hash, sp_layout_geometry(layout), sp_layout_site_at(layout, i));
    add_served(hash, sp_layout_served(layout, SP_SITE_EMBEDDING));
    add_served(hash, sp_layout_served(layout, SP_SITE_HEAD));
    add_slices(hash, layout);
    add_experts(hash, layout);
    sp_sha256_finish(hash, out_fingerprint->bytes);
    return SP_OK;
}
