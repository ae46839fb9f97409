/*
 * geometry.h: the internal view of a base model's geometry: its rows of sites, and the lookup of a
 * path. Immutable after sp_geometry_finish, and then readable from any thread. Only arguments that
 * say so may be NULL.
 *
 * A path is compared without the trunk that loaders put before the layers, the embedding and the
 * head ("model.", "model.language_model.", ..): the rest is the path's core, which is unique in a
 * geometry.
 */
#ifndef SP_ADAPTER_GEOMETRY_H
#define SP_ADAPTER_GEOMETRY_H

#include "adapter/known_module.h"
#include "checkpoint/shape.h"

/* ---- rows ---------------------------------------------------------------------------------- */

#define SP_MODULES_MAX 64 /* bits of sp_module_set */

/* One distinct name of modules. All its sites are of one kind. */
typedef struct sp_module_row {
    const char *name; /* static, or in memory of the geometry */
    sp_site_kind kind;
    sp_module known; /* SP_MODULE_OTHER: not in the table */
    int32_t first;   /* row; of modules that the host names only */
} sp_module_row;

typedef struct sp_site_row {
    uint32_t path_at; /* in the geometry's text, where it ends in a NUL */
    uint16_t core_at; /* in the path */
    uint16_t core_bytes;
    int32_t module; /* index of its name */
    int32_t layer, expert, k_in, n_out, group;
    sp_module known; /* the table's module for the core; SP_MODULE_OTHER: none */
} sp_site_row;

/* NULL for an index out of range. */
const sp_site_row *sp_geometry_row(const sp_geometry *geometry, int32_t site);
/* The path of a row, NUL-terminated; lives as long as the geometry. */
const char *sp_geometry_path(const sp_geometry *geometry, const sp_site_row *row);
/* `module` must be in range; the row lives as long as the geometry. */
const sp_module_row *sp_geometry_module_row(const sp_geometry *geometry, int32_t module);
/* The kind of a row's module. */
sp_site_kind sp_geometry_kind(const sp_geometry *geometry, const sp_site_row *row);

/* Whether every site is one of the table's, with the table's kind: then names follow the table's
 * grammar. */
bool sp_geometry_is_known(const sp_geometry *geometry);

/* The site of one of the table's modules, or -1. expert -1: any expert, represented by expert 0. */
int32_t sp_geometry_known_site(const sp_geometry *geometry, int32_t layer, sp_module module,
                               int32_t expert);

/* True when any layer has this module of the table. */
bool sp_geometry_has_known(const sp_geometry *geometry, sp_module module);

/* The name of the embedding's or the head's module; the table's, without a geometry or a site. */
const char *sp_geometry_table_name(const sp_geometry *geometry, sp_site_kind kind);

/* Index of the module with exactly this name of n bytes, or -1. */
int32_t sp_geometry_module_index(const sp_geometry *geometry, const char *name, size_t n);

/* True when the head's table is the embedding's. */
bool sp_geometry_is_tied(const sp_geometry *geometry);

/* True when any site is in this layer. */
bool sp_geometry_has_layer(const sp_geometry *geometry, int32_t layer);

/* As sp_geometry_find and sp_geometry_find_module, for texts of n bytes. */
int32_t sp_geometry_find_core(const sp_geometry *geometry, const char *core, size_t n);
/* The site of module index `module` in a layer (expert -1: not an expert), or -1. */
int32_t sp_geometry_find_place(const sp_geometry *geometry, int32_t layer, int32_t module,
                               int32_t expert);

/* Bytes of the trunk that a path of n bytes begins with; 0: none. */
size_t sp_path_trunk_bytes(const char *path, size_t n);

/* Digits without a leading zero, within int32; -1 otherwise. */
int32_t sp_path_number(const char *text, size_t n);

/* ---- building, for the files that make geometries ------------------------------------------- */

/* An empty geometry with one reference. `known` gives it the table's names of modules at once. */
sp_status sp_geometry_start(bool known, sp_geometry **out_geometry, sp_error *error);

/*
 * Adds one row. `site` has the current size, its path and module are copied, module is not NULL.
 * Invalid rows give named errors, in which `index` is the caller's number of the site.
 */
sp_status sp_geometry_add(sp_geometry *geometry, const sp_site *site, size_t index,
                          sp_error *error);

/* Completes the geometry, with at least `layers` layers, and checks the groups. */
sp_status sp_geometry_finish(sp_geometry *geometry, int32_t layers, sp_error *error);

/* Takes a copy; see sp_geometry_note. SP_ERR_MEMORY. */
sp_status sp_geometry_add_note(sp_geometry *geometry, const char *note, sp_error *error);

void sp_geometry_set_shape(sp_geometry *geometry, const sp_model_shape *shape,
                           sp_layer_kind *kinds); /* takes ownership of kinds, [shape->layers] */

#endif
