#include "pool/expert_places.h"

#include "base/alloc.h"
#include "base/error.h"

/* [layers][modules] of places; -1: none yet. */
typedef struct place_grid {
    int32_t *cells;
    int32_t n_modules;
} place_grid;

static sp_status check_dims(const sp_expert_place *place, const sp_site *row, sp_error *error)
{
    if (row->k_in == place->k_in && row->n_out == place->n_out)
        return SP_OK;
    return sp_fail(error, SP_ERR_UNSUPPORTED, NULL, row->path, row->expert,
                   "%.200s is %d by %d, the experts before it %d by %d: experts of one module must "
                   "be of one size",
                   row->path, (int)row->n_out, (int)row->k_in, (int)place->n_out, (int)place->k_in);
}

/* One row of the geometry; with places NULL it is only counted. */
static sp_status add_row(const sp_geometry *geometry, int32_t site, const place_grid *grid,
                         sp_expert_places *places, sp_error *error)
{
    sp_site row = {.struct_bytes = sizeof row};
    int32_t module = sp_geometry_site_module(geometry, site);
    int32_t *cell;

    (void)sp_geometry_site_at(geometry, site, &row, NULL);
    if (places->of_site != NULL)
        places->of_site[site] = -1;
    if (row.kind != SP_SITE_EXPERT)
        return SP_OK;
    cell = &grid->cells[row.layer * grid->n_modules + module];
    if (*cell < 0) {
        *cell = places->n++;
        if (places->places != NULL)
            places->places[*cell] = (sp_expert_place){.struct_bytes = sizeof(sp_expert_place),
                                                      .layer = row.layer,
                                                      .module = module,
                                                      .k_in = row.k_in,
                                                      .n_out = row.n_out};
    }
    if (places->of_site != NULL)
        places->of_site[site] = *cell;
    return places->places != NULL ? check_dims(&places->places[*cell], &row, error) : SP_OK;
}

static sp_status walk(const sp_geometry *geometry, const place_grid *grid, sp_expert_places *places,
                      sp_error *error)
{
    int32_t n_cells = sp_geometry_layers(geometry) * grid->n_modules;
    sp_status status = SP_OK;

    places->n = 0;
    for (int32_t i = 0; i < n_cells; i++)
        grid->cells[i] = -1;
    for (int32_t i = 0; i < sp_geometry_n_sites(geometry) && status == SP_OK; i++)
        status = add_row(geometry, i, grid, places, error);
    return status;
}

sp_status sp_expert_places_create(const sp_geometry *geometry, sp_expert_places *out_places,
                                  sp_error *error)
{
    place_grid grid = {.n_modules = sp_geometry_n_modules(geometry)};
    size_t n_sites = (size_t)sp_geometry_n_sites(geometry);
    size_t n_cells = (size_t)sp_geometry_layers(geometry) * (size_t)grid.n_modules;
    sp_expert_places places = {0};
    sp_status status;

    *out_places = places;
    if (sp_geometry_kind_modules(geometry, SP_SITE_EXPERT) == 0)
        return SP_OK;
    grid.cells = sp_malloc(n_cells * sizeof *grid.cells);
    if (grid.cells == NULL)
        return sp_fail_memory(error, n_cells * sizeof *grid.cells, "the places of experts");
    status = walk(geometry, &grid, &places, error); /* counts */
    places.places = sp_calloc((size_t)places.n, sizeof *places.places);
    places.of_site = sp_calloc(n_sites, sizeof *places.of_site);
    if (places.places == NULL || places.of_site == NULL)
        status = sp_fail_memory(error, n_sites * sizeof *places.of_site, "the places of experts");
    if (status == SP_OK)
        status = walk(geometry, &grid, &places, error);
    sp_free(grid.cells);
    if (status == SP_OK)
        *out_places = places;
    else
        sp_expert_places_destroy(&places);
    return status;
}

void sp_expert_places_destroy(sp_expert_places *places)
{
    sp_free(places->of_site);
    sp_free(places->places);
    *places = (sp_expert_places){0};
}
