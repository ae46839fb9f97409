/*
 * geometry.c: every site of a base model, as rows that are found by path and by place.
 *
 * Rows, the text of their paths and two hash tables of row numbers grow as rows are added; 256
 * experts in 48 layers are 37,000 rows of some 100 bytes. Nothing changes after sp_geometry_finish.
 */
#include "adapter/geometry.h"
#include "base/alloc.h"
#include "base/error.h"
#include "base/grow.h"
#include "base/hash.h"
#include "base/text.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NO_ROW (-1)

struct sp_geometry {
    atomic_int references;
    int32_t layers, experts;
    bool has_shape, has_other; /* other: a site that is not exactly one of the table's */
    sp_model_shape shape;
    sp_layer_kind *kinds; /* [layers], or NULL */

    sp_site_row *rows;
    int32_t n_rows, row_capacity;
    char *text; /* paths, each with its NUL */
    size_t text_bytes, text_capacity;
    int32_t *by_core, *by_place; /* [table_size] row numbers, NO_ROW: free */
    size_t table_size;           /* a power of two, at least twice the rows */
    bool *in_layer;              /* [layers] some site is in it */

    sp_module_row modules[SP_MODULES_MAX];
    char *owned_names[SP_MODULES_MAX]; /* NULL where the name is static */
    int32_t n_modules;
    sp_module_set present,
        known;               /* modules with a site; known: those of the table, by its numbers */
    int32_t embedding, head; /* rows, or NO_ROW */
    bool tied;               /* the head's table is the embedding's */
    sp_text notes;           /* [n_notes] texts, each with its NUL */
    size_t n_notes;
};

/* ---- life ---------------------------------------------------------------------------------- */

/* The table's names with the table's numbers, static, in place of those that are owned. */
static void use_known_modules(sp_geometry *geometry)
{
    for (int32_t i = 0; i < geometry->n_modules; i++) {
        sp_free(geometry->owned_names[i]);
        geometry->owned_names[i] = NULL;
    }
    for (int32_t i = 0; i < SP_MODULE_COUNT; i++)
        geometry->modules[i] = (sp_module_row){sp_known_modules[i].name, sp_known_modules[i].kind,
                                               (sp_module)i, NO_ROW};
    geometry->n_modules = SP_MODULE_COUNT;
}

sp_status sp_geometry_start(bool known, sp_geometry **out_geometry, sp_error *error)
{
    sp_geometry *geometry = sp_calloc(1, sizeof *geometry);

    if (!geometry)
        return sp_fail_memory(error, sizeof *geometry, "a geometry");
    geometry->references = 1;
    geometry->embedding = geometry->head = NO_ROW;
    if (known)
        use_known_modules(geometry);
    *out_geometry = geometry;
    return SP_OK;
}

sp_geometry *sp_geometry_retain(sp_geometry *geometry)
{
    atomic_fetch_add_explicit(&geometry->references, 1, memory_order_relaxed);
    return geometry;
}

void sp_geometry_release(sp_geometry *geometry)
{
    if (!geometry || atomic_fetch_sub_explicit(&geometry->references, 1, memory_order_acq_rel) != 1)
        return;
    for (int32_t i = 0; i < geometry->n_modules; i++)
        sp_free(geometry->owned_names[i]);
    sp_free(geometry->rows);
    sp_free(geometry->text);
    sp_free(geometry->by_core);
    sp_free(geometry->by_place);
    sp_free(geometry->in_layer);
    sp_free(geometry->kinds);
    sp_text_free(&geometry->notes);
    sp_free(geometry);
}

void sp_geometry_set_shape(sp_geometry *geometry, const sp_model_shape *shape, sp_layer_kind *kinds)
{
    geometry->shape = *shape;
    geometry->has_shape = true;
    geometry->experts = shape->experts;
    geometry->kinds = kinds;
}

sp_status sp_geometry_add_note(sp_geometry *geometry, const char *note, sp_error *error)
{
    sp_text_add_bytes(&geometry->notes, note, strlen(note) + 1);
    if (geometry->notes.failed)
        return sp_fail_memory(error, strlen(note), "a note");
    geometry->n_notes++;
    return SP_OK;
}

const char *sp_geometry_note(const sp_geometry *geometry, size_t index)
{
    const char *note = geometry->notes.data;

    if (index >= geometry->n_notes)
        return NULL;
    while (index-- > 0)
        note += strlen(note) + 1;
    return note;
}

/* ---- paths --------------------------------------------------------------------------------- */

static bool begins_with(const char *text, size_t n, const char *beginning)
{
    size_t length = strlen(beginning);

    return n >= length && memcmp(text, beginning, length) == 0;
}

static bool is_text(const char *text, size_t n, const char *whole)
{
    return n == strlen(whole) && memcmp(text, whole, n) == 0;
}

size_t sp_path_trunk_bytes(const char *path, size_t n)
{
    static const char *const trunks[] = {"model.language_model.", "language_model.model.",
                                         "model."};

    if (is_text(path, n, "language_model.lm_head"))
        return strlen("language_model.");
    for (size_t i = 0; i < sizeof trunks / sizeof *trunks; i++) {
        size_t length = strlen(trunks[i]);

        if (begins_with(path, n, trunks[i]) && (begins_with(path + length, n - length, "layers.") ||
                                                is_text(path + length, n - length, "embed_tokens")))
            return length;
    }
    return 0;
}

int32_t sp_path_number(const char *text, size_t n)
{
    int64_t number = 0;

    if (n == 0 || n > 10 || (n > 1 && text[0] == '0'))
        return -1;
    for (size_t i = 0; i < n; i++) {
        if (text[i] < '0' || text[i] > '9')
            return -1;
        number = number * 10 + (text[i] - '0');
    }
    return number <= INT32_MAX ? (int32_t)number : -1;
}

/* Consumes "NUMBER." from the start of the text; false if it is not there. */
static bool take_number(const char **text, size_t *n, int32_t number)
{
    const char *dot = memchr(*text, '.', *n);

    if (!dot || sp_path_number(*text, (size_t)(dot - *text)) != number)
        return false;
    *n -= (size_t)(dot + 1 - *text);
    *text = dot + 1;
    return true;
}

/* The table's module that this core names a place of. */
static sp_module known_of(const char *core, size_t n, int32_t layer, int32_t expert)
{
    static const char layers[] = "layers.", experts[] = "mlp.experts.";
    char name[64];

    if (layer < 0) {
        sp_module module = sp_module_find(core, n);

        return module >= SP_MODULE_EMBED_TOKENS ? module : SP_MODULE_OTHER;
    }
    if (!begins_with(core, n, layers))
        return SP_MODULE_OTHER;
    core += strlen(layers);
    n -= strlen(layers);
    if (!take_number(&core, &n, layer))
        return SP_MODULE_OTHER;
    if (expert < 0) {
        sp_module module = sp_module_find(core, n);

        return module < SP_MODULE_EXPERT_GATE_PROJ ? module : SP_MODULE_OTHER;
    }
    if (!begins_with(core, n, experts))
        return SP_MODULE_OTHER;
    core += strlen(experts);
    n -= strlen(experts);
    if (!take_number(&core, &n, expert) || n + sizeof experts > sizeof name)
        return SP_MODULE_OTHER;
    snprintf(name, sizeof name, "%s%.*s", experts, (int)n, core);
    return sp_module_find(name, strlen(name));
}

/* ---- finding ------------------------------------------------------------------------------- */

const sp_site_row *sp_geometry_row(const sp_geometry *geometry, int32_t site)
{
    return site >= 0 && site < geometry->n_rows ? &geometry->rows[site] : NULL;
}

const char *sp_geometry_path(const sp_geometry *geometry, const sp_site_row *row)
{
    return geometry->text + row->path_at;
}

static const char *core_of(const sp_geometry *geometry, const sp_site_row *row)
{
    return geometry->text + row->path_at + row->core_at;
}

static uint64_t place_hash(int32_t layer, int32_t module, int32_t expert)
{
    const int32_t place[] = {layer, module, expert};

    return sp_xxh3(place, sizeof place);
}

int32_t sp_geometry_find_core(const sp_geometry *geometry, const char *core, size_t n)
{
    size_t mask = geometry->table_size - 1;

    if (geometry->table_size == 0 || n == 0)
        return NO_ROW;
    for (size_t at = sp_xxh3(core, n) & mask;; at = (at + 1) & mask) {
        int32_t found = geometry->by_core[at];
        const sp_site_row *row;

        if (found == NO_ROW)
            return NO_ROW;
        row = &geometry->rows[found];
        if (row->core_bytes == n && memcmp(core_of(geometry, row), core, n) == 0)
            return found;
    }
}

int32_t sp_geometry_find_place(const sp_geometry *geometry, int32_t layer, int32_t module,
                               int32_t expert)
{
    size_t mask = geometry->table_size - 1;

    if (geometry->table_size == 0)
        return NO_ROW;
    for (size_t at = place_hash(layer, module, expert) & mask;; at = (at + 1) & mask) {
        int32_t found = geometry->by_place[at];
        const sp_site_row *row;

        if (found == NO_ROW)
            return NO_ROW;
        row = &geometry->rows[found];
        if (row->layer == layer && row->module == module && row->expert == expert)
            return found;
    }
}

int32_t sp_geometry_known_site(const sp_geometry *geometry, int32_t layer, sp_module module,
                               int32_t expert)
{
    static const char experts[] = "mlp.experts.";
    const char *name = sp_module_name(module);
    char core[96];

    if (!name)
        return NO_ROW;
    if (sp_known_modules[module].kind == SP_SITE_EXPERT)
        snprintf(core, sizeof core, "layers.%d.%s%d.%s", layer, experts, expert < 0 ? 0 : expert,
                 name + strlen(experts));
    else if (layer >= 0)
        snprintf(core, sizeof core, "layers.%d.%s", layer, name);
    else
        snprintf(core, sizeof core, "%s", name);
    return sp_geometry_find_core(geometry, core, strlen(core));
}

bool sp_geometry_has_known(const sp_geometry *geometry, sp_module module)
{
    return module >= 0 && (geometry->known & SP_MODULE_BIT(module));
}

bool sp_geometry_is_known(const sp_geometry *geometry)
{
    return !geometry->has_other;
}

bool sp_geometry_has_layer(const sp_geometry *geometry, int32_t layer)
{
    return layer >= 0 && layer < geometry->layers && geometry->in_layer[layer];
}

/* ---- room ---------------------------------------------------------------------------------- */

static void enter(int32_t *table, size_t mask, uint64_t hash, int32_t row)
{
    size_t at = hash & mask;

    while (table[at] != NO_ROW)
        at = (at + 1) & mask;
    table[at] = row;
}

static void enter_row(const sp_geometry *geometry, int32_t index, int32_t *by_core,
                      int32_t *by_place, size_t size)
{
    const sp_site_row *row = &geometry->rows[index];

    enter(by_core, size - 1, sp_xxh3(core_of(geometry, row), row->core_bytes), index);
    enter(by_place, size - 1, place_hash(row->layer, row->module, row->expert), index);
}

/* Tables of `size` cells with every row so far. */
static sp_status grow_tables(sp_geometry *geometry, size_t size, sp_error *error)
{
    size_t bytes = size * sizeof(int32_t);
    int32_t *by_core = sp_malloc(bytes);
    int32_t *by_place = sp_malloc(bytes);

    if (!by_core || !by_place) {
        sp_free(by_core);
        sp_free(by_place);
        return sp_fail_memory(error, 2 * bytes, "a geometry");
    }
    memset(by_core, 0xff, bytes); /* NO_ROW */
    memset(by_place, 0xff, bytes);
    for (int32_t i = 0; i < geometry->n_rows; i++)
        enter_row(geometry, i, by_core, by_place, size);
    sp_free(geometry->by_core);
    sp_free(geometry->by_place);
    geometry->by_core = by_core;
    geometry->by_place = by_place;
    geometry->table_size = size;
    return SP_OK;
}

static sp_status grow_rows(sp_geometry *geometry, sp_error *error)
{
    int32_t capacity = geometry->row_capacity ? 2 * geometry->row_capacity : 64;
    sp_site_row *rows = sp_realloc(geometry->rows, (size_t)capacity * sizeof *rows);

    if (!rows)
        return sp_fail_memory(error, (size_t)capacity * sizeof *rows, "a geometry");
    geometry->rows = rows;
    geometry->row_capacity = capacity;
    return grow_tables(geometry, 2 * (size_t)capacity, error);
}

static sp_status reserve(sp_geometry *geometry, size_t path_bytes, sp_error *error)
{
    if (geometry->text_bytes + path_bytes > geometry->text_capacity) {
        size_t capacity = 2 * geometry->text_capacity + 4096 + path_bytes;
        char *text = sp_realloc(geometry->text, capacity);

        if (!text)
            return sp_fail_memory(error, capacity, "a geometry");
        geometry->text = text;
        geometry->text_capacity = capacity;
    }
    return geometry->n_rows == geometry->row_capacity ? grow_rows(geometry, error) : SP_OK;
}

/* ---- modules ------------------------------------------------------------------------------- */

int32_t sp_geometry_module_index(const sp_geometry *geometry, const char *name, size_t n)
{
    for (int32_t i = 0; i < geometry->n_modules; i++) {
        if (is_text(name, n, geometry->modules[i].name))
            return i;
    }
    return -1;
}

/* The number of this module's name; a new name gets a number. */
static sp_status number_of(sp_geometry *geometry, const sp_site *site, size_t index,
                           int32_t *out_module, sp_error *error)
{
    size_t n = strlen(site->module);
    int32_t module = sp_geometry_module_index(geometry, site->module, n);
    char *name;

    if (module >= 0 && geometry->modules[module].kind != site->kind)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, site->path, (int64_t)index,
                       "site %zu: %.200s is of kind %d, but \"%.100s\" was of kind %d before",
                       index, site->path, (int)site->kind, site->module,
                       (int)geometry->modules[module].kind);
    *out_module = module;
    if (module >= 0)
        return SP_OK;
    if (geometry->n_modules == SP_MODULES_MAX)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, site->path, (int64_t)index,
                       "site %zu: \"%.100s\" is the 65th name of a module; 64 are taken: name "
                       "alike what is alike in all layers (sp_site.module)",
                       index, site->module);
    name = sp_strdup(site->module);
    if (!name)
        return sp_fail_memory(error, n + 1, "a geometry");
    *out_module = geometry->n_modules;
    geometry->owned_names[geometry->n_modules] = name;
    geometry->modules[geometry->n_modules++] =
        (sp_module_row){name, site->kind, sp_module_find(name, n), geometry->n_rows};
    return SP_OK;
}

/* ---- adding -------------------------------------------------------------------------------- */

static sp_status check_new(const sp_geometry *geometry, const sp_site *site, const sp_site_row *row,
                           size_t index, sp_error *error)
{
    int32_t twin = sp_geometry_find_core(geometry, site->path + row->core_at, row->core_bytes);
    bool place = twin == NO_ROW;

    if (place)
        twin = sp_geometry_find_place(geometry, row->layer, row->module, row->expert);
    if (twin != NO_ROW)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, site->path, (int64_t)index,
                       place ? "site %zu: %.200s is the same module and layer as %.200s; tell them "
                               "apart by sp_site.module"
                             : "site %zu: %.200s stands for the same place as %.200s",
                       index, site->path,
                       sp_geometry_path(geometry, sp_geometry_row(geometry, twin)));
    if ((site->kind == SP_SITE_EMBEDDING && geometry->embedding != NO_ROW) ||
        (site->kind == SP_SITE_HEAD && geometry->head != NO_ROW))
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, site->path, (int64_t)index,
                       "site %zu: %.200s is a second %s; a geometry has one", index, site->path,
                       site->kind == SP_SITE_HEAD ? "head" : "embedding");
    return SP_OK;
}

static bool is_as_known(const sp_geometry *geometry, const sp_site_row *row)
{
    const sp_module_row *module = &geometry->modules[row->module];

    return row->known != SP_MODULE_OTHER && module->known == row->known &&
           module->kind == sp_known_modules[row->known].kind;
}

static void append(sp_geometry *geometry, const sp_site *site, const sp_site_row *row)
{
    int32_t index = geometry->n_rows;

    memcpy(geometry->text + geometry->text_bytes, site->path, strlen(site->path) + 1);
    geometry->text_bytes += strlen(site->path) + 1;
    geometry->rows[geometry->n_rows++] = *row;
    enter_row(geometry, index, geometry->by_core, geometry->by_place, geometry->table_size);
    geometry->present |= (sp_module_set)1 << row->module;
    if (row->known != SP_MODULE_OTHER)
        geometry->known |= SP_MODULE_BIT(row->known);
    geometry->has_other |= !is_as_known(geometry, row);
    if (row->layer >= geometry->layers)
        geometry->layers = row->layer + 1;
    if (row->expert >= geometry->experts)
        geometry->experts = row->expert + 1;
    if (site->kind == SP_SITE_EMBEDDING)
        geometry->embedding = index;
    if (site->kind == SP_SITE_HEAD)
        geometry->head = index;
    geometry->tied |= site->tied;
}

sp_status sp_geometry_add(sp_geometry *geometry, const sp_site *site, size_t index, sp_error *error)
{
    size_t n = strlen(site->path);
    size_t trunk = sp_path_trunk_bytes(site->path, n);
    sp_site_row row = {.core_at = (uint16_t)trunk,
                       .core_bytes = (uint16_t)(n - trunk),
                       .layer = site->layer,
                       .expert = site->expert,
                       .k_in = site->k_in,
                       .n_out = site->n_out,
                       .group = site->group};
    sp_status status = reserve(geometry, n + 1, error);

    if (status != SP_OK)
        return status;
    if (geometry->n_rows == SP_SITES_MAX)
        return sp_fail(error, SP_ERR_TOO_LARGE, NULL, site->path, (int64_t)index,
                       "more than %d sites", SP_SITES_MAX);
    row.path_at = (uint32_t)geometry->text_bytes;
    row.known = known_of(site->path + trunk, n - trunk, site->layer, site->expert);
    status = number_of(geometry, site, index, &row.module, error);
    if (status == SP_OK)
        status = check_new(geometry, site, &row, index, error);
    if (status == SP_OK)
        append(geometry, site, &row);
    return status;
}

/* ---- the end of adding --------------------------------------------------------------------- */

typedef struct group_cell {
    int32_t layer, group, k_in, row;
} group_cell;

static int by_group(const void *left, const void *right)
{
    const group_cell *a = left;
    const group_cell *b = right;

    if (a->layer != b->layer)
        return a->layer < b->layer ? -1 : 1;
    if (a->group != b->group)
        return a->group < b->group ? -1 : 1;
    return (a->row > b->row) - (a->row < b->row);
}

/* Sites that share x have one width. */
static sp_status check_groups(const sp_geometry *geometry, sp_error *error)
{
    size_t n = 0;
    sp_status status = SP_OK;
    group_cell *cells = sp_calloc((size_t)geometry->n_rows, sizeof *cells);

    if (!cells)
        return sp_fail_memory(error, (size_t)geometry->n_rows * sizeof *cells, "a geometry");
    for (int32_t i = 0; i < geometry->n_rows; i++) {
        const sp_site_row *row = &geometry->rows[i];

        if (row->group >= 0)
            cells[n++] = (group_cell){row->layer, row->group, row->k_in, i};
    }
    qsort(cells, n, sizeof *cells, by_group);
    for (size_t i = 1; i < n && status == SP_OK; i++) {
        const sp_site_row *row = &geometry->rows[cells[i].row];

        if (cells[i].layer == cells[i - 1].layer && cells[i].group == cells[i - 1].group &&
            cells[i].k_in != cells[i - 1].k_in)
            status =
                sp_fail(error, SP_ERR_ARGUMENT, NULL, sp_geometry_path(geometry, row), cells[i].row,
                        "site %d: %.200s has %d inputs, the rest of group %d %d", cells[i].row,
                        sp_geometry_path(geometry, row), row->k_in, row->group, cells[i - 1].k_in);
    }
    sp_free(cells);
    return status;
}

/* A tied head's table [n_out, k_in] is the embedding's [k_in, n_out]. */
static sp_status check_tied(const sp_geometry *geometry, sp_error *error)
{
    const sp_site_row *embedding = sp_geometry_row(geometry, geometry->embedding);
    const sp_site_row *head = sp_geometry_row(geometry, geometry->head);

    if (!geometry->tied ||
        (embedding && embedding->k_in == head->n_out && embedding->n_out == head->k_in))
        return SP_OK;
    return sp_fail(error, SP_ERR_ARGUMENT, NULL, sp_geometry_path(geometry, head), geometry->head,
                   "site %d: %.200s is tied, and there is no embedding with %d tokens of %d",
                   geometry->head, sp_geometry_path(geometry, head), head->n_out, head->k_in);
}

/* If all rows are the table's, modules get its numbers, so that their sets equal those of a
 * config.json. */
static sp_status number_as_known(sp_geometry *geometry, sp_error *error)
{
    if (geometry->has_other)
        return SP_OK;
    use_known_modules(geometry);
    geometry->present = geometry->known;
    for (int32_t i = 0; i < geometry->n_rows; i++)
        geometry->rows[i].module = geometry->rows[i].known;
    return grow_tables(geometry, geometry->table_size, error);
}

sp_status sp_geometry_finish(sp_geometry *geometry, int32_t layers, sp_error *error)
{
    sp_status status = number_as_known(geometry, error);

    if (status != SP_OK)
        return status;
    if (layers > geometry->layers)
        geometry->layers = layers;
    geometry->in_layer = sp_calloc((size_t)geometry->layers + 1, sizeof *geometry->in_layer);
    if (!geometry->in_layer)
        return sp_fail_memory(error, (size_t)geometry->layers, "a geometry");
    for (int32_t i = 0; i < geometry->n_rows; i++) {
        if (geometry->rows[i].layer >= 0)
            geometry->in_layer[geometry->rows[i].layer] = true;
    }
    status = check_tied(geometry, error);
    return status == SP_OK ? check_groups(geometry, error) : status;
}

/* ---- asking -------------------------------------------------------------------------------- */

int32_t sp_geometry_layers(const sp_geometry *geometry)
{
    return geometry->layers;
}

int32_t sp_geometry_experts(const sp_geometry *geometry)
{
    return geometry->experts;
}

const sp_model_shape *sp_geometry_shape(const sp_geometry *geometry)
{
    return geometry->has_shape ? &geometry->shape : NULL;
}

sp_layer_kind sp_geometry_layer_kind(const sp_geometry *geometry, int32_t layer)
{
    if (layer < 0 || layer >= geometry->layers || !geometry->kinds)
        return SP_LAYER_FULL_ATTENTION;
    return geometry->kinds[layer];
}

bool sp_geometry_is_tied(const sp_geometry *geometry)
{
    return geometry->tied;
}

int32_t sp_geometry_n_sites(const sp_geometry *geometry)
{
    return geometry->n_rows;
}

sp_site_kind sp_geometry_kind(const sp_geometry *geometry, const sp_site_row *row)
{
    return geometry->modules[row->module].kind;
}

sp_status sp_geometry_site_at(const sp_geometry *geometry, int32_t site, sp_site *out_site,
                              sp_error *error)
{
    const sp_site_row *row = geometry ? sp_geometry_row(geometry, site) : NULL;
    sp_site found;

    if (!row)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, "site", site,
                       "there is no site %d; the geometry has %d", (int)site,
                       geometry ? (int)geometry->n_rows : 0);
    found = (sp_site){.struct_bytes = sizeof found,
                      .path = sp_geometry_path(geometry, row),
                      .module = geometry->modules[row->module].name,
                      .kind = geometry->modules[row->module].kind,
                      .layer = row->layer,
                      .expert = row->expert,
                      .k_in = row->k_in,
                      .n_out = row->n_out,
                      .group = row->group,
                      .tied = geometry->tied && site == geometry->head};
    return sp_struct_write(out_site, &found, sizeof found, "sp_site", error);
}

int32_t sp_geometry_find(const sp_geometry *geometry, const char *path)
{
    size_t n = path ? strlen(path) : 0;
    size_t trunk = n > 0 ? sp_path_trunk_bytes(path, n) : 0;

    return n > 0 ? sp_geometry_find_core(geometry, path + trunk, n - trunk) : NO_ROW;
}

int32_t sp_geometry_find_module(const sp_geometry *geometry, int32_t layer, const char *module,
                                int32_t expert)
{
    int32_t index = module ? sp_geometry_module_index(geometry, module, strlen(module)) : -1;

    return index >= 0 ? sp_geometry_find_place(geometry, layer, index, expert) : NO_ROW;
}

int32_t sp_geometry_find_kind(const sp_geometry *geometry, sp_site_kind kind)
{
    if (kind == SP_SITE_EMBEDDING)
        return geometry->embedding;
    if (kind == SP_SITE_HEAD)
        return geometry->head;
    for (int32_t i = 0; i < geometry->n_rows; i++) {
        if (sp_geometry_kind(geometry, &geometry->rows[i]) == kind)
            return i;
    }
    return NO_ROW;
}

const char *sp_geometry_table_name(const sp_geometry *geometry, sp_site_kind kind)
{
    int32_t site = geometry ? sp_geometry_find_kind(geometry, kind) : NO_ROW;

    if (site != NO_ROW)
        return geometry->modules[geometry->rows[site].module].name;
    return sp_module_name(kind == SP_SITE_HEAD ? SP_MODULE_LM_HEAD : SP_MODULE_EMBED_TOKENS);
}

const sp_module_row *sp_geometry_module_row(const sp_geometry *geometry, int32_t module)
{
    return module >= 0 && module < geometry->n_modules ? &geometry->modules[module] : NULL;
}

int32_t sp_geometry_site_module(const sp_geometry *geometry, int32_t site)
{
    const sp_site_row *row = sp_geometry_row(geometry, site);

    return row ? row->module : -1;
}

int32_t sp_geometry_n_modules(const sp_geometry *geometry)
{
    return geometry ? geometry->n_modules : SP_MODULE_COUNT;
}

sp_module_set sp_geometry_modules(const sp_geometry *geometry)
{
    return geometry->present;
}

sp_module_set sp_geometry_kind_modules(const sp_geometry *geometry, sp_site_kind kind)
{
    sp_module_set set = 0;

    for (int32_t i = 0; i < geometry->n_modules; i++) {
        if (geometry->modules[i].kind == kind)
            set |= (sp_module_set)1 << i;
    }
    return set & geometry->present;
}
