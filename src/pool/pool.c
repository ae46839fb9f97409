/*
 * pool.c: the slots, their states, and the tables that make them visible.
 *
 *     EMPTY    -> LOADING    load_begin
 *     READY    -> LOADING    load_begin, when it is the victim
 *     LOADING  -> READY      load_commit, after load_write
 *     LOADING  -> EMPTY      load_abort
 *     READY    -> EMPTY      drain without references
 *     READY    -> DRAINING   drain with references
 *     DRAINING -> EMPTY      the last release
 *
 * A slot is visible to a step exactly while its cells in the tables are set: from load_commit until
 * it is emptied or chosen as a victim. A draining slot stays visible to the requests that hold it.
 * Invariants: references > 0 only in READY and DRAINING; pinned only in READY; `written` only in
 * LOADING; a READY slot has a generation that no other slot ever had; an EMPTY slot has no extent.
 */
#include "base/alloc.h"
#include "base/assert.h"
#include "base/error.h"
#include "base/grow.h"
#include "device/step_streams.h"
#include "pool/expert_memory.h"
#include "pool/image.h"
#include "pool/overlay_memory.h"
#include "pool/room.h"
#include "pool/site_tables.h"
#include "pool/victim.h"

#include <sidepath/pool.h>

#include <stdatomic.h>
#include <string.h>

#define SLOTS_LIMIT 4096

/*
 * Generations and change numbers of all pools come from one sequence, so that neither a handle nor
 * what a plan remembers can match another pool, not even one created at the same address.
 */
static atomic_uint_fast64_t last_number;

static uint64_t next_number(void)
{
    return atomic_fetch_add_explicit(&last_number, 1, memory_order_relaxed) + 1;
}

/* What load_write wrote into a LOADING slot, so that commit cannot switch to something else. */
typedef struct slot_content {
    bool written;
    uint64_t opening; /* of the image whose bytes the slot's are; 0: none */
    uint64_t checksum;
    sp_digest digest;
} slot_content;

struct sp_pool {
    sp_layout *layout;
    sp_device *device;
    int32_t n_slots;
    uint64_t changes;    /* a new number after each event that may invalidate a handle */
    uint64_t use;        /* incremented with every use */
    sp_slot_info *slots; /* [n_slots] */
    slot_content *contents;
    char *memory;           /* device [n_slots][slot_bytes] */
    sp_stream *load_stream; /* for images, concurrent with steps; shared by loader threads */
    sp_site_tables tables;
    sp_overlay_memory overlays;
    sp_expert_memory experts;
    sp_pool_tables *site_views; /* [n_sites] what sp_pool_tables_at gives */
};

/* ---- life ---------------------------------------------------------------------------------- */

void sp_pool_options_default(sp_pool_options *out_options, size_t struct_bytes)
{
    const sp_pool_options defaults = {.struct_bytes = sizeof defaults, .slots = 8};

    sp_struct_default(out_options, struct_bytes, &defaults, sizeof defaults);
}

static sp_status allocate_slots(sp_pool *pool, sp_error *error)
{
    size_t slot_bytes = sp_layout_slot_bytes(pool->layout), bytes = 0;
    void *memory = NULL;
    bool overflow = __builtin_mul_overflow(slot_bytes, (size_t)pool->n_slots, &bytes);

    if (overflow || sp_device_alloc(pool->device, bytes, &memory, NULL) != SP_OK)
        return sp_fail(error, SP_ERR_MEMORY, NULL, "max-loras", -1,
                       "the adapter pool needs %d slots of %.1f MiB, which %s does not have; "
                       "lower max-loras, max-lora-rank or lora-modules",
                       (int)pool->n_slots, (double)slot_bytes / 0x1p20,
                       sp_device_name(pool->device));
    pool->memory = memory;
    return SP_OK;
}

static sp_status allocate_device(sp_pool *pool, sp_error *error)
{
    sp_status status = allocate_slots(pool, error);

    if (status != SP_OK)
        return status;
    status = sp_site_tables_create(pool->device, sp_layout_n_sites(pool->layout), pool->n_slots,
                                   &pool->tables, error);
    if (status != SP_OK)
        goto free_slots;
    status = sp_stream_create_apart(pool->device, &pool->load_stream, NULL);
    if (status != SP_OK) {
        sp_fail(error, status, NULL, sp_device_name(pool->device), -1,
                "a stream for the adapters cannot be made");
        goto destroy_tables;
    }
    return SP_OK;

destroy_tables:
    sp_site_tables_destroy(&pool->tables);
free_slots:
    sp_device_free(pool->device, pool->memory);
    return status;
}

static sp_status read_options(const sp_pool_options *from, sp_pool_options *out, sp_error *error)
{
    sp_status status;

    sp_pool_options_default(out, sizeof *out);
    status = sp_struct_read(out, sizeof *out, from, "sp_pool_options", error);
    if (status != SP_OK)
        return status;
    if (out->layout == NULL || out->device == NULL)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "sp_pool_options", -1,
                       "the pool's options have no %s", out->layout == NULL ? "layout" : "device");
    if (out->slots < 1 || out->slots > SLOTS_LIMIT)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "max-loras", -1,
                       "the pool must have from 1 to %d slots, not %d", SLOTS_LIMIT,
                       (int)out->slots);
    return SP_OK;
}

/* Slots, their contents and the views of the tables, on the host. */
static sp_status allocate_host(sp_pool *pool, sp_error *error)
{
    size_t n_slots = (size_t)pool->n_slots, n_sites = (size_t)sp_layout_n_sites(pool->layout);

    pool->slots = sp_calloc(n_slots, sizeof *pool->slots);
    pool->contents = sp_calloc(n_slots, sizeof *pool->contents);
    pool->site_views = sp_calloc(n_sites, sizeof *pool->site_views);
    if (pool->slots == NULL || pool->contents == NULL || pool->site_views == NULL)
        return sp_fail_memory(error, n_slots * sizeof *pool->slots, "the pool's slots");
    for (size_t slot = 0; slot < n_slots; slot++)
        pool->slots[slot].struct_bytes = sizeof *pool->slots;
    return SP_OK;
}

static void free_host(sp_pool *pool)
{
    sp_free(pool->site_views);
    sp_free(pool->contents);
    sp_free(pool->slots);
    sp_free(pool);
}

static void fill_site_views(sp_pool *pool)
{
    for (int32_t i = 0; i < sp_layout_n_sites(pool->layout); i++) {
        const sp_layout_site *place = sp_layout_site_at(pool->layout, i);

        pool->site_views[i] = sp_site_tables_at(&pool->tables, i);
        if (place->apart)
            continue;
        pool->site_views[i].first_a = pool->memory + place->a_offset_bytes;
        pool->site_views[i].first_b = pool->memory + place->b_offset_bytes;
    }
}

sp_status sp_pool_create(const sp_pool_options *options, sp_pool **out_pool, sp_error *error)
{
    sp_pool_options own;
    sp_status status = read_options(options, &own, error);
    sp_pool *pool;

    if (status != SP_OK)
        return status;
    if (out_pool == NULL)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "out_pool", -1, "out_pool is NULL");
    pool = sp_calloc(1, sizeof *pool);
    if (pool == NULL)
        return sp_fail_memory(error, sizeof *pool, "the adapter pool");
    pool->layout = own.layout;
    pool->device = own.device;
    pool->n_slots = own.slots;
    pool->changes = next_number();
    status = allocate_host(pool, error);
    if (status != SP_OK)
        goto free_host;
    status = sp_overlay_memory_create(pool->device, pool->n_slots, own.overlay_bytes,
                                      &pool->overlays, error);
    if (status != SP_OK)
        goto free_host;
    status = sp_expert_memory_create(pool->device, pool->layout, pool->n_slots, own.expert_bytes,
                                     &pool->experts, error);
    if (status != SP_OK)
        goto destroy_overlays;
    status = allocate_device(pool, error);
    if (status != SP_OK)
        goto destroy_experts;
    fill_site_views(pool);
    sp_layout_retain(pool->layout);
    *out_pool = pool;
    return SP_OK;

destroy_experts:
    sp_expert_memory_destroy(&pool->experts);
destroy_overlays:
    sp_overlay_memory_destroy(&pool->overlays);
free_host:
    free_host(pool);
    return status;
}

void sp_pool_destroy(sp_pool *pool)
{
    if (pool == NULL)
        return;
    (void)sp_device_wait_all(pool->device, NULL);
    (void)sp_stream_wait(pool->load_stream, NULL);
    sp_stream_destroy(pool->load_stream);
    sp_site_tables_destroy(&pool->tables);
    sp_device_free(pool->device, pool->memory);
    sp_expert_memory_destroy(&pool->experts);
    sp_overlay_memory_destroy(&pool->overlays);
    sp_layout_release(pool->layout);
    free_host(pool);
}

/* ---- reading ------------------------------------------------------------------------------- */

int32_t sp_pool_slots(const sp_pool *pool)
{
    return pool->n_slots;
}

sp_layout *sp_pool_layout(const sp_pool *pool)
{
    return pool->layout;
}

sp_device *sp_pool_device(const sp_pool *pool)
{
    return pool->device;
}

size_t sp_pool_device_bytes(const sp_pool *pool)
{
    return (size_t)pool->n_slots * sp_layout_slot_bytes(pool->layout) +
           sp_site_tables_device_bytes(&pool->tables) +
           sp_overlay_memory_device_bytes(&pool->overlays) +
           sp_expert_memory_device_bytes(&pool->experts);
}

uint64_t sp_pool_changes(const sp_pool *pool)
{
    return pool->changes;
}

const sp_pool_overlays *sp_pool_overlays_of(const sp_pool *pool, sp_site_kind kind)
{
    return kind == SP_SITE_EMBEDDING ? &pool->overlays.embed : &pool->overlays.head;
}

const sp_pool_experts *sp_pool_experts_at(const sp_pool *pool, int32_t place)
{
    return pool->experts.bytes > 0 && place >= 0 && place < pool->experts.n_places
               ? &pool->experts.views[place]
               : NULL;
}

int32_t sp_pool_expert_slots(const sp_pool *pool)
{
    return pool->experts.n_shown;
}

const sp_pool_tables *sp_pool_tables_at(const sp_pool *pool, int32_t site)
{
    return site >= 0 && site < sp_layout_n_sites(pool->layout) ? &pool->site_views[site] : NULL;
}

const uint64_t *sp_pool_generations(const sp_pool *pool)
{
    return sp_site_tables_generations(&pool->tables);
}

static sp_status find_slot(const sp_pool *pool, int32_t slot, sp_slot_info **out_info,
                           sp_error *error)
{
    if (pool == NULL)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "pool", -1, "no pool is given");
    if (slot < 0 || slot >= pool->n_slots)
        return sp_fail(error, SP_ERR_ARGUMENT, "slot-out-of-range", "slot", slot,
                       "the pool has no slot %d: its slots are 0 to %d", (int)slot,
                       (int)pool->n_slots - 1);
    *out_info = &pool->slots[slot];
    return SP_OK;
}

sp_status sp_pool_slot_info(const sp_pool *pool, int32_t slot, sp_slot_info *out_info,
                            sp_error *error)
{
    sp_slot_info *info = NULL;
    sp_status status = find_slot(pool, slot, &info, error);

    if (status != SP_OK)
        return status;
    return sp_struct_write(out_info, info, sizeof *info, "sp_slot_info", error);
}

sp_status sp_pool_find(const sp_pool *pool, const sp_digest *digest, sp_slot_handle *out_handle,
                       sp_error *error)
{
    if (pool == NULL || digest == NULL || out_handle == NULL)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, NULL, -1,
                       "pool, digest or out_handle is NULL");
    for (int32_t slot = 0; slot < pool->n_slots; slot++) {
        const sp_slot_info *info = &pool->slots[slot];

        if (info->state != SP_SLOT_READY || memcmp(&info->digest, digest, sizeof *digest) != 0)
            continue;
        *out_handle = (sp_slot_handle){slot, info->generation};
        return SP_OK;
    }
    return sp_fail(error, SP_ERR_NOT_FOUND, NULL, NULL, -1, "no slot holds this content");
}

/* ---- handles ------------------------------------------------------------------------------- */

/* The slot that holds the handle's version, READY or DRAINING. */
static sp_status find_version(const sp_pool *pool, sp_slot_handle handle, sp_slot_info **out_info,
                              sp_error *error)
{
    sp_slot_info *info = NULL;
    sp_status status = find_slot(pool, handle.slot, &info, error);

    if (status != SP_OK)
        return status;
    if (info->state == SP_SLOT_EMPTY)
        return sp_fail(error, SP_ERR_STATE, "slot-empty", "slot", handle.slot, "slot %d is empty",
                       (int)handle.slot);
    if (info->state == SP_SLOT_LOADING)
        return sp_fail(error, SP_ERR_STATE, "slot-loading", "slot", handle.slot,
                       "slot %d is being loaded", (int)handle.slot);
    if (info->generation != handle.generation)
        return sp_fail(error, SP_ERR_STATE, "handle-stale", "slot", handle.slot,
                       "slot %d holds generation %llu, the handle names %llu", (int)handle.slot,
                       (unsigned long long)info->generation, (unsigned long long)handle.generation);
    *out_info = info;
    return SP_OK;
}

static sp_status find_ready(const sp_pool *pool, sp_slot_handle handle, sp_slot_info **out_info,
                            sp_error *error)
{
    sp_slot_info *info = NULL;
    sp_status status = find_version(pool, handle, &info, error);

    if (status != SP_OK)
        return status;
    if (info->state != SP_SLOT_READY)
        return sp_fail(error, SP_ERR_STATE, "slot-draining", "slot", handle.slot,
                       "slot %d is draining", (int)handle.slot);
    *out_info = info;
    return SP_OK;
}

static sp_status find_held(const sp_pool *pool, sp_slot_handle handle, sp_slot_info **out_info,
                           sp_error *error)
{
    sp_slot_info *info = NULL;
    sp_status status = find_version(pool, handle, &info, error);

    if (status != SP_OK)
        return status;
    if (info->references < 1)
        return sp_fail(error, SP_ERR_STATE, "handle-released", "slot", handle.slot,
                       "nobody holds slot %d any more: acquire the handle again, or load anew",
                       (int)handle.slot);
    *out_info = info;
    return SP_OK;
}

sp_status sp_pool_check_handle(const sp_pool *pool, sp_slot_handle handle, sp_error *error)
{
    sp_slot_info *info = NULL;

    return find_held(pool, handle, &info, error);
}

/* ---- tables -------------------------------------------------------------------------------- */

static char *slot_memory(const sp_pool *pool, int32_t slot)
{
    return pool->memory + (size_t)slot * sp_layout_slot_bytes(pool->layout);
}

/* The cells of a slot's own sites, and those of its routers, whose factors are in its extent. */
static void fill_column(const sp_pool *pool, int32_t slot, const sp_image *image,
                        sp_site_column *column)
{
    int32_t n_in_slot = sp_layout_n_slot_sites(pool->layout);

    for (int32_t i = 0; i < sp_layout_n_sites(pool->layout); i++) {
        const sp_layout_site *site = sp_layout_site_at(pool->layout, i);
        const char *from = slot_memory(pool, slot);
        size_t a = site->a_offset_bytes, b = site->b_offset_bytes;

        if (image->ranks[i] == 0)
            continue;
        if (site->apart) {
            const sp_expert_cell *cell = &image->experts->routers[i - n_in_slot];

            SP_ASSERT(image->ranks[i] <= sp_layout_expert_rank(pool->layout));
            from = sp_expert_memory_at(&pool->experts, slot);
            a = (size_t)cell->a * SP_POOL_ALIGN_BYTES;
            b = (size_t)cell->b * SP_POOL_ALIGN_BYTES;
        }
        SP_ASSERT(image->ranks[i] > 0);
        SP_ASSERT(site->apart || image->ranks[i] <= sp_layout_rank_stride(pool->layout));
        column->a[i] = from + a;
        column->b[i] = from + b;
        column->scale[i] = image->scales[i];
        column->rank[i] = image->ranks[i];
    }
}

static sp_status show_slot(sp_pool *pool, int32_t slot, const sp_image *image, uint64_t generation)
{
    sp_site_column column;
    sp_status status = sp_site_tables_begin(&pool->tables, &column);

    SP_ASSERT(pool->slots[slot].state == SP_SLOT_LOADING);
    SP_ASSERT(generation > pool->slots[slot].generation);
    if (status != SP_OK)
        return status;
    *column.generation = generation;
    fill_column(pool, slot, image, &column);
    status = sp_site_tables_show(&pool->tables, slot);
    if (status == SP_OK)
        status = image->overlay != NULL
                     ? sp_overlay_memory_show(&pool->overlays, slot, image->overlay)
                     : sp_overlay_memory_hide(&pool->overlays, slot);
    if (status == SP_OK)
        status = image->experts != NULL
                     ? sp_expert_memory_show(&pool->experts, slot, image->experts)
                     : sp_expert_memory_hide(&pool->experts, slot);
    return status == SP_OK ? sp_device_others_follow(pool->device, NULL) : status;
}

/* Ordered between the steps before and after, on whatever streams they run. Continues after a
 * failed cell: as many as possible must be cleared. */
static sp_status hide_slot(sp_pool *pool, int32_t slot)
{
    sp_status first = sp_device_main_follows(pool->device, NULL);
    sp_status then = sp_overlay_memory_hide(&pool->overlays, slot);

    first = first != SP_OK ? first : then;
    then = sp_expert_memory_hide(&pool->experts, slot);
    first = first != SP_OK ? first : then;
    then = sp_site_tables_hide(&pool->tables, slot);
    first = first != SP_OK ? first : then;
    then = sp_device_others_follow(pool->device, NULL);
    return first != SP_OK ? first : then;
}

/* The generation stays: it tells "never loaded" from "empty again". */
static void reset_slot(sp_pool *pool, int32_t slot, sp_slot_state state)
{
    SP_ASSERT(slot >= 0 && slot < pool->n_slots);
    SP_ASSERT(pool->slots[slot].references == 0); /* nobody holds the version */
    SP_ASSERT(state == SP_SLOT_EMPTY || state == SP_SLOT_LOADING);
    pool->slots[slot] = (sp_slot_info){
        .struct_bytes = sizeof(sp_slot_info),
        .state = state,
        .generation = pool->slots[slot].generation,
    };
    pool->changes = next_number();
    pool->contents[slot] = (slot_content){.written = false};
    pool->overlays.extents[slot] = (sp_extent){0, 0};
    pool->experts.extents[slot] = (sp_extent){0, 0};
}

/* ---- loading ------------------------------------------------------------------------------- */

/* Why sp_pool_pick_victim found none. */
static sp_status no_victim(const sp_pool *pool, sp_status status, sp_error *error)
{
    if (status == SP_POOL_FULL)
        return sp_fail(error, status, NULL, "max-loras", -1,
                       "all %d adapter slots are in use; release one and try again, or raise "
                       "max-loras",
                       (int)pool->n_slots);
    return sp_fail(error, status, NULL, "max-loras", -1,
                   "all %d adapter slots are pinned; unpin one or raise max-loras",
                   (int)pool->n_slots);
}

static sp_status fail_switch(const sp_pool *pool, sp_status status, int32_t slot, sp_error *error)
{
    return sp_fail(error, status, NULL, "slot", slot, "switching the tables on %s failed",
                   sp_device_name(pool->device));
}

sp_status sp_pool_load_begin(sp_pool *pool, int32_t *out_slot, sp_error *error)
{
    int32_t slot;
    sp_status status;

    if (pool == NULL || out_slot == NULL)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, NULL, -1, "pool or out_slot is NULL");
    status = sp_pool_pick_victim(pool->slots, pool->n_slots, &slot, NULL);
    if (status != SP_OK)
        return no_victim(pool, status, error);
    if (pool->slots[slot].state == SP_SLOT_READY)
        status = hide_slot(pool, slot);
    SP_ASSERT(pool->slots[slot].state == SP_SLOT_EMPTY || sp_slot_is_idle(&pool->slots[slot]));
    reset_slot(pool, slot, status == SP_OK ? SP_SLOT_LOADING : SP_SLOT_EMPTY);
    if (status != SP_OK)
        return fail_switch(pool, status, slot, error);
    *out_slot = slot;
    return SP_OK;
}

/* slot -1: any slot, so none whose bytes the image's are. */
static sp_status check_image(const sp_pool *pool, int32_t slot, const sp_image *image,
                             sp_error *error)
{
    if (image == NULL)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "image", -1, "no image is given");
    if (image->opening != 0 && (slot < 0 || pool->contents[slot].opening != image->opening))
        return sp_fail(error, SP_ERR_ARGUMENT, "image-elsewhere", "image", slot,
                       "the bytes of this image are those of another slot, or were");
    if (sp_image_is_for(image, pool->layout))
        return SP_OK;
    return sp_fail(error, SP_ERR_ARGUMENT, "other-layout", "image", -1,
                   "the image was packed for another layout than this pool's: pack the adapter "
                   "for the pool's layout");
}

/* The second memories. */
enum { OVERLAYS, EXPERTS, MEMORIES };

static void room_needs(const sp_pool *pool, const sp_image *image, sp_room rooms[MEMORIES])
{
    rooms[OVERLAYS] = (sp_room){.extents = pool->overlays.extents,
                                .trial = pool->overlays.trial,
                                .block_bytes = pool->overlays.bytes,
                                .bytes = sp_image_overlay_bytes(image)};
    rooms[EXPERTS] = (sp_room){.extents = pool->experts.extents,
                               .trial = pool->experts.trial,
                               .block_bytes = pool->experts.bytes,
                               .bytes = sp_image_expert_bytes(image)};
}

static sp_extent extent_of(const sp_room *room)
{
    return (sp_extent){.offset_bytes = room->bytes > 0 ? room->offset_bytes : 0,
                       .bytes = room->bytes};
}

static bool overlaps(const sp_room rooms[MEMORIES], int32_t slot)
{
    for (int i = 0; i < MEMORIES; i++) {
        sp_extent extent = extent_of(&rooms[i]);

        if (sp_extents_overlap(&rooms[i].extents[slot], &extent))
            return true;
    }
    return false;
}

/* Takes what sp_room_find has found; idle slots in its way are emptied. */
static sp_status take_extents(sp_pool *pool, int32_t slot, const sp_room rooms[MEMORIES])
{
    for (int32_t i = 0; i < pool->n_slots; i++) {
        sp_status status;

        if (!overlaps(rooms, i))
            continue;
        SP_ASSERT(i != slot && sp_slot_is_idle(&pool->slots[i]));
        status = hide_slot(pool, i);
        reset_slot(pool, i, SP_SLOT_EMPTY);
        if (status != SP_OK)
            return status;
    }
    pool->overlays.extents[slot] = extent_of(&rooms[OVERLAYS]);
    pool->experts.extents[slot] = extent_of(&rooms[EXPERTS]);
    SP_ASSERT(rooms[OVERLAYS].bytes <=
              pool->overlays.bytes - pool->overlays.extents[slot].offset_bytes);
    SP_ASSERT(rooms[EXPERTS].bytes <=
              pool->experts.bytes - pool->experts.extents[slot].offset_bytes);
    return SP_OK;
}

/* Whether the slot's extents are of the image's sizes. */
static bool has_extents(const sp_pool *pool, int32_t slot, const sp_image *image)
{
    return pool->overlays.extents[slot].bytes == sp_image_overlay_bytes(image) &&
           pool->experts.extents[slot].bytes == sp_image_expert_bytes(image);
}

static sp_status check_loading(const sp_pool *pool, int32_t slot, const sp_image *image,
                               sp_error *error)
{
    sp_slot_info *info = NULL;
    sp_status status = find_slot(pool, slot, &info, error);

    if (status != SP_OK)
        return status;
    if (image == NULL)
        return sp_fail_null(error, "image");
    if (info->state != SP_SLOT_LOADING)
        return sp_fail(error, SP_ERR_STATE, NULL, "slot", slot, "slot %d is not being loaded",
                       (int)slot);
    return check_image(pool, slot, image, error);
}

/* Names the memory that is short even where all of it that is idle is given. */
static sp_status no_room(const sp_pool *pool, sp_room rooms[MEMORIES], sp_error *error)
{
    if (!sp_room_find(&rooms[EXPERTS], 1, pool->slots, pool->n_slots))
        return sp_fail(error, SP_POOL_FULL, NULL, "expert-bytes", -1,
                       "no %zu bytes are free for the adapter's router and experts; try again, or "
                       "raise expert-bytes above %zu",
                       rooms[EXPERTS].bytes, pool->experts.bytes);
    return sp_fail(error, SP_POOL_FULL, NULL, "overlay-bytes", -1,
                   "no %zu bytes are free for the rows that the adapter replaces; try again, or "
                   "raise overlay-bytes above %zu",
                   rooms[OVERLAYS].bytes, pool->overlays.bytes);
}

/* The budget never changes, so any thread may ask. */
sp_status sp_pool_check_experts(const sp_pool *pool, size_t bytes, sp_error *error)
{
    if (bytes <= pool->experts.bytes)
        return SP_OK;
    return sp_fail(error, SP_ERR_TOO_LARGE, "experts-too-large", "expert-bytes", -1,
                   "the adapter's router and experts take %zu bytes, above the budget of %zu; "
                   "raise expert-bytes",
                   bytes, pool->experts.bytes);
}

static sp_status check_budgets(const sp_pool *pool, const sp_room rooms[MEMORIES], sp_error *error)
{
    if (rooms[OVERLAYS].bytes > pool->overlays.bytes)
        return sp_fail(error, SP_ERR_TOO_LARGE, "overlay-too-large", "overlay-bytes", -1,
                       "the rows of embed_tokens and lm_head that the adapter replaces take %zu "
                       "bytes, above the budget of %zu; raise overlay-bytes",
                       rooms[OVERLAYS].bytes, pool->overlays.bytes);
    return sp_pool_check_experts(pool, rooms[EXPERTS].bytes, error);
}

sp_status sp_pool_check_room(sp_pool *pool, const sp_image *image, sp_error *error)
{
    sp_room rooms[MEMORIES];
    sp_status status;

    if (pool == NULL || image == NULL)
        return sp_fail_null(error, pool != NULL ? "image" : "pool");
    room_needs(pool, image, rooms);
    status = check_budgets(pool, rooms, error);
    if (status == SP_OK && !sp_room_find(rooms, MEMORIES, pool->slots, pool->n_slots))
        status = no_room(pool, rooms, error);
    return status;
}

sp_status sp_pool_load_reserve(sp_pool *pool, int32_t slot, const sp_image *image, sp_error *error)
{
    sp_room rooms[MEMORIES];
    sp_status status = check_loading(pool, slot, image, error);

    if (status != SP_OK || has_extents(pool, slot, image))
        return status;
    pool->overlays.extents[slot].bytes = 0;
    pool->experts.extents[slot].bytes = 0;
    status = sp_pool_check_room(pool, image, error);
    if (status != SP_OK)
        return status;
    room_needs(pool, image, rooms);
    (void)sp_room_find(rooms, MEMORIES, pool->slots, pool->n_slots); /* as the check has found */
    status = take_extents(pool, slot, rooms);
    return status == SP_OK ? SP_OK : fail_switch(pool, status, slot, error);
}

/*
 * On the pool's own stream, after the last step that could read the slot's former adapter. The wait
 * for it is here, on the loader thread, while steps continue.
 */
static sp_status copy_image(sp_pool *pool, int32_t slot, const sp_image *image)
{
    sp_status status = sp_stream_wait_event(pool->load_stream, pool->tables.hidden, NULL), waited;

    if (status == SP_OK)
        status = sp_stream_copy(pool->load_stream, slot_memory(pool, slot), image->data,
                                sp_layout_slot_bytes(pool->layout), NULL);
    if (status == SP_OK && image->overlay != NULL)
        status = sp_overlay_memory_write(&pool->overlays, slot, image->overlay, pool->load_stream);
    if (status == SP_OK && image->experts != NULL)
        status = sp_expert_memory_write(&pool->experts, slot, image->experts, pool->load_stream);
    /* Also after a failure: copies in flight still read the image, which the caller may free. */
    waited = sp_stream_wait(pool->load_stream, NULL);
    return status == SP_OK ? waited : status;
}

sp_status sp_pool_load_write(sp_pool *pool, int32_t slot, const sp_image *image, sp_error *error)
{
    slot_content *content;
    sp_status status = sp_pool_load_reserve(pool, slot, image, error);

    if (status != SP_OK)
        return status;
    if (image->opening != 0)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "image", slot,
                       "the image of an open slot is sealed, and never written");
    content = &pool->contents[slot];
    content->written = false;
    status = copy_image(pool, slot, image);
    if (status != SP_OK)
        return sp_fail(error, status, NULL, NULL, slot, "copying an adapter to %s failed",
                       sp_device_name(pool->device));
    *content = (slot_content){true, 0, image->checksum, image->digest};
    return SP_OK;
}

/* On the CPU steps are over when they return, so nobody reads the slot any more. */
sp_status sp_pool_load_open(sp_pool *pool, int32_t slot, sp_image **out_image, void **out_memory,
                            sp_error *error)
{
    uint64_t opening = next_number();
    sp_slot_info *info = NULL;
    sp_status status = SP_NEED(error, {"out_image", out_image}, {"out_memory", out_memory});

    if (status == SP_OK)
        status = find_slot(pool, slot, &info, error);
    if (status != SP_OK)
        return status;
    if (sp_device_get_kind(pool->device) != SP_DEVICE_CPU)
        return sp_fail(error, SP_ERR_UNSUPPORTED, NULL, "pool", -1,
                       "the slots are on %s: pack an image and write it",
                       sp_device_name(pool->device));
    if (info->state != SP_SLOT_LOADING)
        return sp_fail(error, SP_ERR_STATE, NULL, "slot", slot, "slot %d is not being loaded",
                       (int)slot);
    status = sp_image_create_over(pool->layout, slot_memory(pool, slot), opening, out_image, error);
    if (status != SP_OK)
        return status;
    pool->contents[slot] = (slot_content){.opening = opening};
    *out_memory = slot_memory(pool, slot);
    return SP_OK;
}

sp_status sp_pool_load_seal(sp_pool *pool, int32_t slot, sp_image *image,
                            const sp_packed_image *packed, sp_error *error)
{
    sp_packed_image own = {.struct_bytes = sizeof own};
    sp_status status = check_loading(pool, slot, image, error);
    slot_content *content;

    if (status == SP_OK)
        status = sp_struct_read(&own, sizeof own, packed, "sp_packed_image", error);
    if (status != SP_OK)
        return status;
    if (image->opening == 0)
        return sp_fail(error, SP_ERR_ARGUMENT, "image-elsewhere", "image", slot,
                       "the image has bytes of its own: sp_pool_load_open gives one of the slot's");
    content = &pool->contents[slot];
    content->written = image->sealed = false;
    status = sp_image_take(image, pool->layout, &own, error);
    if (status != SP_OK)
        return status;
    image->sealed = true;
    content->checksum = image->checksum;
    content->digest = image->digest;
    content->written = true;
    return SP_OK;
}

/* The image must be the one that was written. */
static sp_status check_written(const sp_pool *pool, int32_t slot, const sp_image *image,
                               sp_error *error)
{
    const slot_content *content = &pool->contents[slot];

    if (!content->written)
        return sp_fail(error, SP_ERR_STATE, NULL, "slot", slot,
                       "no image has been written to slot %d", (int)slot);
    if (content->checksum == image->checksum &&
        memcmp(&content->digest, &image->digest, sizeof image->digest) == 0 &&
        has_extents(pool, slot, image))
        return SP_OK;
    return sp_fail(error, SP_ERR_ARGUMENT, NULL, "image", slot,
                   "another image was written to slot %d", (int)slot);
}

sp_status sp_pool_load_commit(sp_pool *pool, int32_t slot, const sp_image *image,
                              sp_slot_handle *out_handle, sp_error *error)
{
    uint64_t generation = next_number();
    sp_slot_info *info = NULL;
    sp_status status;

    if (out_handle == NULL)
        return sp_fail_null(error, "out_handle");
    status = check_loading(pool, slot, image, error);
    if (status == SP_OK)
        status = check_written(pool, slot, image, error);
    if (status != SP_OK)
        return status;
    status = show_slot(pool, slot, image, generation);
    if (status != SP_OK) {
        hide_slot(pool, slot);
        return fail_switch(pool, status, slot, error);
    }
    info = &pool->slots[slot];
    SP_ASSERT(info->references == 0 && !info->pinned && !info->awaited);
    info->state = SP_SLOT_READY;
    info->generation = generation;
    info->references = 1;
    info->last_use = ++pool->use;
    info->digest = image->digest;
    pool->contents[slot] = (slot_content){.written = false};
    *out_handle = (sp_slot_handle){slot, info->generation};
    return SP_OK;
}

sp_status sp_pool_load_abort(sp_pool *pool, int32_t slot, sp_error *error)
{
    sp_slot_info *info = NULL;
    sp_status status = find_slot(pool, slot, &info, error);

    if (status != SP_OK)
        return status;
    if (info->state != SP_SLOT_LOADING)
        return sp_fail(error, SP_ERR_STATE, NULL, "slot", slot, "slot %d is not being loaded",
                       (int)slot);
    reset_slot(pool, slot, SP_SLOT_EMPTY);
    status = sp_stream_wait_event(pool->load_stream, pool->tables.hidden, NULL);
    if (status == SP_OK)
        status = sp_stream_zero(pool->load_stream, slot_memory(pool, slot),
                                sp_layout_slot_bytes(pool->layout), NULL);
    if (status != SP_OK)
        return sp_fail(error, status, NULL, "slot", slot, "clearing slot %d on %s failed",
                       (int)slot, sp_device_name(pool->device));
    return SP_OK;
}

sp_status sp_pool_load(sp_pool *pool, const sp_image *image, sp_slot_handle *out_handle,
                       sp_error *error)
{
    int32_t slot;
    sp_status status;

    if (pool == NULL || out_handle == NULL)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, NULL, -1, "pool or out_handle is NULL");
    status = check_image(pool, -1, image, error);
    if (status == SP_OK)
        status = sp_pool_check_room(pool, image, error);
    if (status == SP_OK)
        status = sp_pool_load_begin(pool, &slot, error);
    if (status != SP_OK)
        return status;
    status = sp_pool_load_write(pool, slot, image, error);
    if (status == SP_OK)
        status = sp_pool_load_commit(pool, slot, image, out_handle, error);
    if (status != SP_OK)
        (void)sp_pool_load_abort(pool, slot, NULL);
    return status;
}

/* ---- use ----------------------------------------------------------------------------------- */

sp_status sp_pool_acquire(sp_pool *pool, sp_slot_handle handle, sp_error *error)
{
    sp_slot_info *info = NULL;
    sp_status status = find_ready(pool, handle, &info, error);

    if (status != SP_OK)
        return status;
    if (info->references == INT32_MAX)
        return sp_fail(error, SP_ERR_STATE, NULL, "slot", handle.slot,
                       "slot %d has too many references", (int)handle.slot);
    SP_ASSERT(info->references >= 0);
    info->references++;
    info->last_use = ++pool->use;
    return SP_OK;
}

/* READY or DRAINING without references → EMPTY. */
static sp_status empty_slot(sp_pool *pool, int32_t slot, sp_error *error)
{
    sp_status status;

    reset_slot(pool, slot, SP_SLOT_EMPTY);
    status = hide_slot(pool, slot);
    return status == SP_OK ? SP_OK : fail_switch(pool, status, slot, error);
}

sp_status sp_pool_release(sp_pool *pool, sp_slot_handle handle, sp_error *error)
{
    sp_slot_info *info = NULL;
    sp_status status = find_held(pool, handle, &info, error);

    if (status != SP_OK)
        return status;
    if (--info->references > 0)
        return SP_OK;
    pool->changes = next_number();
    return info->state == SP_SLOT_DRAINING ? empty_slot(pool, handle.slot, error) : SP_OK;
}

void sp_pool_touch(sp_pool *pool, sp_slot_handle handle)
{
    sp_slot_info *info = NULL;

    if (find_version(pool, handle, &info, NULL) == SP_OK)
        info->last_use = ++pool->use;
}

sp_status sp_pool_drain(sp_pool *pool, sp_slot_handle handle, sp_error *error)
{
    sp_slot_info *info = NULL;
    sp_status status = find_version(pool, handle, &info, error);

    if (status != SP_OK)
        return status;
    if (info->pinned)
        return sp_fail(error, SP_ERR_STATE, "pinned", "slot", handle.slot,
                       "slot %d is pinned: unpin it first", (int)handle.slot);
    if (info->references == 0)
        return empty_slot(pool, handle.slot, error);
    SP_ASSERT(info->references > 0 && !info->pinned);
    info->state = SP_SLOT_DRAINING;
    info->awaited = false;
    return sp_fail(error, SP_BUSY, NULL, "slot", handle.slot,
                   "slot %d falls empty with its last reference", (int)handle.slot);
}

sp_status sp_pool_set_pinned(sp_pool *pool, sp_slot_handle handle, bool pinned, sp_error *error)
{
    sp_slot_info *info = NULL;
    sp_status status = find_ready(pool, handle, &info, error);

    if (status == SP_OK)
        info->pinned = pinned;
    return status;
}

sp_status sp_pool_set_awaited(sp_pool *pool, sp_slot_handle handle, bool awaited, sp_error *error)
{
    sp_slot_info *info = NULL;
    sp_status status = find_ready(pool, handle, &info, error);

    if (status == SP_OK)
        info->awaited = awaited;
    return status;
}
