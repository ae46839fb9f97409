/*
 * expert_item.cuh: an item of an expert delta, or a tile of a router's, as a block has it in shared
 * memory, and the factors of one of its sites.
 */
#ifndef SP_KERNELS_CUDA_EXPERT_ITEM_CUH
#define SP_KERNELS_CUDA_EXPERT_ITEM_CUH

#include "kernels/cuda/expand.cuh"

#define ROWS SP_CUDA_TILE_ROWS

/* A unit's item, in shared memory. */
template <int TILES> struct delta_rows {
    int slot, expert, count, pad;
    int x[TILES * ROWS], y[TILES * ROWS];
    float request[TILES * ROWS], scale[TILES * ROWS]; /* scale 0: no row */
    char *to[TILES * ROWS];                           /* the row's output 0 */
};

/* A unit: what it adds to, and its factors. rank 0: nothing. */
typedef struct delta_unit {
    const uint16_t *a;
    work to;
    float scale;
} delta_unit;

/* ---- the item ------------------------------------------------------------------------------ */

template <int TILES>
static __device__ __forceinline__ void read_item(delta_rows<TILES> *rows,
                                                 const sp_cuda_expert_delta &d, int item)
{
    int j = (int)threadIdx.x;

    if (d.tiles != NULL) {
        const sp_cuda_tile *tile = &d.tiles[item];

        if (j < ROWS) {
            rows->x[j] = rows->y[j] = tile->row[j];
            rows->request[j] = tile->scale[j];
        }
        if (j == 0) {
            rows->slot = tile->slot;
            rows->expert = 0;
            rows->count = tile->count;
        }
    } else {
        int each = TILES == 1 ? ROWS : d.items.item_rows;

        if (j < each) {
            int64_t at = (int64_t)item * each + j;

            rows->y[j] = d.items.row[at];
            rows->x[j] = d.x_by_token ? d.items.token[at] : rows->y[j];
            rows->request[j] = d.items.scale[at];
        }
        if (j == 0) {
            sp_cuda_item head = d.items.item[item];

            rows->slot = head.slot;
            rows->expert = head.expert;
            rows->count = head.count;
        }
    }
    __syncthreads();
}

static __device__ __forceinline__ delta_unit unit_of(const sp_cuda_expert_site &site, int slot,
                                                     int expert)
{
    delta_unit unit = {};
    const char *factors;
    sp_cuda_expert_cell cell;

    unit.to.n_out = site.n_out;
    unit.to.y_is_f32 = site.y_is_f32 != 0;
    if (site.cells == NULL) {
        unit.to.rank = site.rank[slot];
        unit.a = (const uint16_t *)site.a[slot];
        unit.to.b = (const uint16_t *)site.b[slot];
        unit.scale = site.scale[slot];
    } else {
        const sp_cuda_expert_cell *cells = site.cells[slot];

        if (cells == NULL)
            return unit;
        factors = (const char *)site.factors[slot];
        *(uint4 *)&cell = *(const uint4 *)&cells[expert];
        unit.to.rank = cell.rank;
        unit.a = (const uint16_t *)(factors + (uint64_t)cell.a * 256);
        unit.to.b = (const uint16_t *)(factors + (uint64_t)cell.b * 256);
        unit.scale = cell.scale;
    }
    unit.to.b_stride = (unit.to.rank + 7) & ~7;
    return unit;
}

/* Where each row goes, and its scale. */
template <int TILES>
static __device__ __forceinline__ void aim_rows(delta_rows<TILES> *rows, const delta_unit &unit,
                                                const sp_cuda_expert_site &site)
{
    int j = (int)threadIdx.x, row;

    if (j >= TILES * ROWS)
        return;
    row = j < rows->count ? rows->y[j] : 0;
    rows->scale[j] = j < rows->count ? sp_scale_of_row(unit.scale, rows->request[j]) : 0.0f;
    rows->to[j] = (char *)site.y + row * site.y_stride * (site.y_is_f32 ? 4 : 2);
}

#endif
