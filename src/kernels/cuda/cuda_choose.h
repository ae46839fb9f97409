/*
 * cuda_choose.h: the launch configuration of each step, as pure host functions of the GPU's
 * multiprocessors, padded rows, slots and dimensions; never of the mix of adapters. Any thread may
 * call them. No choice changes a bit of the results (kernels_cuda.h).
 */
#ifndef SP_KERNELS_CUDA_CUDA_CHOOSE_H
#define SP_KERNELS_CUDA_CUDA_CHOOSE_H

#include "kernels/cuda/kernels_cuda.h"

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

#define SP_CUDA_CHUNK_K      512
#define SP_CUDA_GROUP_CHUNKS 4
/* Above this many rows a block takes a window of several tiles. */
#define SP_CUDA_DECODE_ROWS 256
/* Up to this many blocks of one chunk each (16 KB of weights); above, a block takes a group of
 * chunks. Numbers of blocks and steps are those of the GPU that they were measured on, and are
 * scaled to the multiprocessors of the one that runs (sp_cuda_scaled). */
#define SP_CUDA_MEASURED_ON   132
#define SP_CUDA_CHUNK_BLOCKS  10000
#define SP_CUDA_WINDOW_BLOCKS 160 /* the same for windows: below, smaller blocks */
#define SP_CUDA_SHRINK_WAVE   264 /* resident blocks of the small window kernels */
#define SP_CUDA_WAVE          528 /* resident blocks of the expand */
/* Blocks of the expand in decode, by the bound of tiles, up to which a block gets no more steps. */
#define SP_CUDA_DECODE_BLOCKS    740
#define SP_CUDA_DECODE_BLOCKS_64 396 /* 33 to 64 ranks, of which fewer are resident */
#define SP_CUDA_STEPS_MAX        8   /* of one expand block */
#define SP_CUDA_WINDOW_TILES     8
#define SP_CUDA_RING_RANKS       64   /* largest rank that the expand ring serves */
#define SP_CUDA_RING_STEPS       8192 /* decode: at least so many steps of 128 columns */
#define SP_CUDA_RING_WIDE        96   /* many rows above rank 32: at most so many steps */
#define SP_CUDA_ROUNDED_RANKS    64 /* many rows: from this rank on the expand reads a rounded xa */
#define SP_CUDA_WGMMA_ROWS       128  /* of a window of the expand through wgmma */
#define SP_CUDA_WGMMA_MANY       4096 /* rows, for which it pays at any rank */
#define SP_CUDA_WGMMA_UNITS      4    /* of a block, for which it pays with few rows */
#define SP_CUDA_FOLD_RANKS       64   /* largest rank that a product of the base folds in */
#define SP_CUDA_FOLD_ROWS        256  /* of a cluster of that product */

/* Tiles that n_rows rows of n_slots slots can need at most. */
static inline int32_t sp_cuda_tiles_bound(int32_t n_rows, int32_t n_slots)
{
    int32_t used = n_slots < n_rows ? n_slots : n_rows;
    int64_t bound = ((int64_t)n_rows + (int64_t)(SP_CUDA_TILE_ROWS - 1) * used) / SP_CUDA_TILE_ROWS;

    return (int32_t)(bound < n_rows ? bound : n_rows);
}

/* Items that n_rows rows of so many experts and slots can need at most. */
static inline int32_t sp_cuda_items_bound(int32_t n_rows, int32_t n_experts, int32_t n_slots,
                                          int32_t item_rows)
{
    int64_t groups = (int64_t)n_experts * n_slots, used = groups < n_rows ? groups : n_rows;
    int64_t bound = ((int64_t)n_rows + (int64_t)(item_rows - 1) * used) / item_rows;

    return (int32_t)(bound < n_rows ? bound : n_rows);
}

/* Rows of an item of an expert delta: many where the slots' experts have several rows each. */
#define SP_CUDA_ITEM_FEW       8
#define SP_CUDA_ITEM_SOME      16
#define SP_CUDA_ITEM_MANY      48
#define SP_CUDA_ITEM_FEW_ROWS  256
#define SP_CUDA_ITEM_SOME_ROWS 4096

static inline int32_t sp_cuda_item_rows(int32_t n_rows)
{
    if (n_rows <= SP_CUDA_ITEM_FEW_ROWS)
        return SP_CUDA_ITEM_FEW;
    return n_rows <= SP_CUDA_ITEM_SOME_ROWS ? SP_CUDA_ITEM_SOME : SP_CUDA_ITEM_MANY;
}

/* A number of blocks or steps for a GPU of so many multiprocessors; at least 1. */
static inline int64_t sp_cuda_scaled(int64_t measured, int32_t multiprocessors)
{
    int64_t scaled = measured * multiprocessors / SP_CUDA_MEASURED_ON;

    return scaled > 1 ? scaled : 1;
}

static inline int32_t sp_cuda_ceil(int32_t n, int32_t by)
{
    return (n + by - 1) / by;
}

/* Windows, of at most window_tiles tiles of one slot each, that they can need: each slot's last
 * window may be partly filled. */
static inline int32_t sp_cuda_windows_bound(int32_t n_rows, int32_t n_slots, int32_t window_tiles)
{
    int32_t used = n_slots < n_rows ? n_slots : n_rows;
    int64_t tiles = sp_cuda_tiles_bound(n_rows, n_slots);
    int64_t bound = (tiles + (int64_t)(window_tiles - 1) * used) / window_tiles;

    return (int32_t)(bound < tiles ? bound : tiles);
}

static inline int32_t sp_cuda_chunks(int32_t k_in)
{
    return sp_cuda_ceil(k_in, SP_CUDA_CHUNK_K);
}

typedef struct sp_cuda_shrink_choice {
    int32_t partial_chunks; /* chunks summed into one partial: 1, or SP_CUDA_GROUP_CHUNKS */
    int32_t n_partials;
    int32_t block_partials; /* partials that one window block computes in sequence */
    int32_t window_tiles;   /* per block: 1 in decode, else 4, 8 or 16 */
    int32_t rank_warps;     /* of 64 ranks each, over all sites; 1 to 3 */
} sp_cuda_shrink_choice;

/* Whether the shrink ends with xa rounded to the group's type, which the expand then reads in place
 * of the partials: a window's xa is read by many of its blocks. */
static inline bool sp_cuda_rounds_xa(int32_t n_rows, int32_t rank_stride)
{
    return n_rows > SP_CUDA_DECODE_ROWS && rank_stride >= SP_CUDA_ROUNDED_RANKS;
}

/*
 * Whether such an expand of BF16 goes through wgmma, where the GPU has it. n_chunks: of 64 columns,
 * of all sites. Measured on an H200 with 512, 2,048 and 8,192 rows of 4 and 16 slots: from rank 128
 * on it takes 0.84 to 1.00 of the pair's time, but 1.10 where a block has few units and they are of
 * two sites; at rank 64 0.84 to 0.96 of it with 8,192 rows, 0.79 to 0.98 with 32 rows a slot, and
 * 0.96 to 1.15 else.
 */
static inline bool sp_cuda_expands_by_wgmma(int32_t multiprocessors, int32_t n_rows,
                                            int32_t n_slots, int32_t n_sites, int32_t n_chunks,
                                            int32_t rank_stride)
{
    int64_t units = (int64_t)sp_cuda_ceil(n_rows, SP_CUDA_WGMMA_ROWS) * n_chunks;

    if (rank_stride < 2 * SP_CUDA_ROUNDED_RANKS)
        return n_rows >= SP_CUDA_WGMMA_MANY ||
               n_rows <= (int64_t)n_slots * (SP_CUDA_WGMMA_ROWS / 2);
    return n_sites == 1 || n_rows > 4 * SP_CUDA_WGMMA_ROWS ||
           units >= (int64_t)SP_CUDA_WGMMA_UNITS * multiprocessors;
}

/* Whether a product of the base of so many rows may fold deltas in (sp_cuda_gemm.deltas). */
static inline bool sp_cuda_folds(int32_t n_rows, int32_t rank_stride)
{
    return n_rows > SP_CUDA_DECODE_ROWS && rank_stride <= SP_CUDA_FOLD_RANKS;
}

/* Many rows: the fewest partials that keep the device full, and few blocks, because each starts
 * with a chain of dependent loads. */
static inline void sp_cuda_choose_windows(sp_cuda_shrink_choice *choice, int32_t multiprocessors,
                                          int32_t tiles, int32_t chunks, int32_t rank_groups)
{
    int32_t groups = sp_cuda_ceil(chunks, SP_CUDA_GROUP_CHUNKS);
    int64_t wave = sp_cuda_scaled(SP_CUDA_SHRINK_WAVE, multiprocessors);
    int64_t least = sp_cuda_scaled(SP_CUDA_WINDOW_BLOCKS, multiprocessors);
    int32_t windows = sp_cuda_ceil(tiles, SP_CUDA_WINDOW_TILES), sets;
    int32_t sixty_fours = sp_cuda_ceil(rank_groups, 4);

    choice->window_tiles = SP_CUDA_WINDOW_TILES;
    choice->rank_warps = rank_groups <= 4 ? 1 : rank_groups <= 8 || rank_groups == 16 ? 2 : 3;
    if (windows * sp_cuda_ceil(sixty_fours, choice->rank_warps) * groups < least &&
        windows * sixty_fours * groups >= least)
        choice->rank_warps = 1;
    sets = sp_cuda_ceil(sixty_fours, choice->rank_warps);
    if (windows * sets * groups < least) {
        if (windows * sets * chunks < least)
            choice->window_tiles = SP_CUDA_WINDOW_TILES / 2;
        return;
    }
    choice->partial_chunks = SP_CUDA_GROUP_CHUNKS;
    choice->n_partials = groups;
    if ((rank_groups == 4 || rank_groups == 8) &&
        sp_cuda_ceil(tiles, 2 * SP_CUDA_WINDOW_TILES) * sixty_fours * groups >= wave / 2 - 4) {
        choice->window_tiles = 2 * SP_CUDA_WINDOW_TILES;
        choice->rank_warps = 1;
        windows = sp_cuda_ceil(tiles, choice->window_tiles);
        sets = sixty_fours;
    }
    if (choice->window_tiles > SP_CUDA_WINDOW_TILES || choice->rank_warps > 1)
        wave /= 2;
    while (choice->block_partials < groups &&
           windows * sets * sp_cuda_ceil(groups, choice->block_partials) > wave)
        choice->block_partials++;
}

/* A form of the windows for large ranks: its tiles and groups of 16 ranks, and the nanoseconds of a
 * chunk of a block, where the multiprocessor has one and where it has two. */
typedef struct sp_cuda_wide_form {
    int32_t tiles, groups, rank_warps, alone_ns, together_ns;
} sp_cuda_wide_form;

#define SP_CUDA_BLOCK_NS   3000 /* of a block, whatever its chunks */
#define SP_CUDA_PARTIAL_NS 330  /* to write a megabyte of partials, or to read it again */

/* The time of a form with partials of so many chunks, in nanoseconds. */
static inline int64_t sp_cuda_wide_ns(const sp_cuda_wide_form *form, int32_t multiprocessors,
                                      int32_t tiles, int32_t chunks, int32_t rank_groups,
                                      int32_t partial_chunks)
{
    int64_t partials = sp_cuda_ceil(chunks, partial_chunks);
    int64_t blocks = (int64_t)sp_cuda_ceil(tiles, form->tiles) *
                     sp_cuda_ceil(rank_groups, form->groups) * partials;
    bool pairs = form->together_ns > 0 && blocks > multiprocessors;
    int64_t wave = pairs ? 2 * (int64_t)multiprocessors : multiprocessors;
    int64_t bytes = partials * tiles * SP_CUDA_TILE_ROWS * rank_groups * 16 * 4;

    return (blocks + wave - 1) / wave *
               (SP_CUDA_BLOCK_NS + partial_chunks * (pairs ? form->together_ns : form->alone_ns)) +
           SP_CUDA_PARTIAL_NS * (bytes * 2 / 1000000);
}

/* Many rows at large ranks: the form that takes the least time. Large blocks read x and A the
 * fewest times, small ones fill the device where there are few. */
static inline void sp_cuda_choose_wide(sp_cuda_shrink_choice *choice, int32_t multiprocessors,
                                       int32_t tiles, int32_t chunks, int32_t rank_groups)
{
    static const sp_cuda_wide_form forms[] = {{2 * SP_CUDA_WINDOW_TILES, 8, 2, 9900, 0},
                                              {2 * SP_CUDA_WINDOW_TILES, 4, 1, 6300, 0},
                                              {SP_CUDA_WINDOW_TILES, 8, 2, 6900, 0},
                                              {SP_CUDA_WINDOW_TILES, 4, 1, 6400, 6000}};
    int64_t least = INT64_MAX;

    for (int32_t i = 0; i < 8; i++) {
        const sp_cuda_wide_form *form = &forms[i % 4];
        int32_t partial_chunks = i < 4 ? SP_CUDA_GROUP_CHUNKS : 1;
        int64_t ns =
            sp_cuda_wide_ns(form, multiprocessors, tiles, chunks, rank_groups, partial_chunks);

        if (ns >= least)
            continue;
        least = ns;
        choice->window_tiles = form->tiles;
        choice->rank_warps = form->rank_warps;
        choice->partial_chunks = partial_chunks;
        choice->n_partials = sp_cuda_ceil(chunks, partial_chunks);
    }
}

static inline sp_cuda_shrink_choice sp_cuda_choose_shrink(int32_t multiprocessors, int32_t n_rows,
                                                          int32_t n_slots, int32_t k_in,
                                                          int32_t rank_stride, int32_t n_sites)
{
    int32_t chunks = sp_cuda_chunks(k_in), tiles = sp_cuda_tiles_bound(n_rows, n_slots);
    int32_t rank_groups = n_sites * sp_cuda_ceil(rank_stride, 16);
    sp_cuda_shrink_choice choice = {1, chunks, 1, 1, 1};

    if (sp_cuda_rounds_xa(n_rows, rank_stride)) {
        sp_cuda_choose_wide(&choice, multiprocessors, tiles, chunks, rank_groups);
    } else if (n_rows > SP_CUDA_DECODE_ROWS) {
        sp_cuda_choose_windows(&choice, multiprocessors, tiles, chunks, rank_groups);
    } else if ((int64_t)tiles * rank_groups * chunks >
               sp_cuda_scaled(SP_CUDA_CHUNK_BLOCKS, multiprocessors)) {
        choice.partial_chunks = SP_CUDA_GROUP_CHUNKS;
        choice.n_partials = sp_cuda_ceil(chunks, SP_CUDA_GROUP_CHUNKS);
    }
    return choice;
}

typedef struct sp_cuda_expand_choice {
    int32_t ranks;        /* of B that a block keeps in registers: 32, 64 or 128 */
    int32_t window_tiles; /* per block: 1 in decode, else 8 */
    int32_t steps_ahead;  /* steps of 128 columns in flight together */
    int32_t steps;        /* per block; a multiple of steps_ahead */
    /* Size of a ring stage (expand_ring.cu), which is preferred to the above on GPUs that have it;
     * 0: the ring is not used for this step. */
    int32_t ring_columns, ring_tiles;
} sp_cuda_expand_choice;

/* A ring block occupies a whole multiprocessor, so it pays where there is much data to move: many
 * rows, or in decode many columns of many tiles. A stage is 25 to 66 KB. At a large rank few
 * columns of B fit in a stage, and wide sites gain nothing. */
static inline void sp_cuda_choose_ring(int32_t multiprocessors, int32_t n_rows, int32_t tiles,
                                       int32_t total_steps, int32_t rank_stride,
                                       sp_cuda_expand_choice *choice)
{
    if (rank_stride > SP_CUDA_RING_RANKS || sp_cuda_rounds_xa(n_rows, rank_stride))
        return;
    if (n_rows > SP_CUDA_DECODE_ROWS) {
        if (rank_stride > 32 && total_steps > sp_cuda_scaled(SP_CUDA_RING_WIDE, multiprocessors))
            return;
        choice->ring_columns = rank_stride <= 32 ? 512 : 256;
        choice->ring_tiles = SP_CUDA_WINDOW_TILES / 2;
    } else if ((int64_t)tiles * total_steps >=
               sp_cuda_scaled(SP_CUDA_RING_STEPS, multiprocessors)) {
        choice->ring_columns = rank_stride <= 16 ? 1024 : rank_stride <= 32 ? 512 : 256;
        choice->ring_tiles = 1;
    }
}

/* total_steps: the sum over the sites of ceil(n_out / 128). */
static inline sp_cuda_expand_choice sp_cuda_choose_expand(int32_t multiprocessors, int32_t n_rows,
                                                          int32_t n_slots, int32_t total_steps,
                                                          int32_t rank_stride)
{
    int64_t wave = sp_cuda_scaled(SP_CUDA_WAVE, multiprocessors);
    int32_t tiles = sp_cuda_tiles_bound(n_rows, n_slots);
    sp_cuda_expand_choice choice = {0, 1, 1, 1, 0, 0};
    int64_t limit = 2 * wave; /* of blocks in the end, where this can be had */
    int32_t most;
    int64_t blocks;

    choice.ranks = rank_stride <= 32 ? 32 : rank_stride <= 64 ? 64 : 128;
    if (n_rows > SP_CUDA_DECODE_ROWS)
        choice.window_tiles = SP_CUDA_WINDOW_TILES;
    blocks = (int64_t)sp_cuda_ceil(tiles, choice.window_tiles) * total_steps;
    if (choice.window_tiles == 1 && choice.ranks < 128 && blocks > wave) {
        choice.steps_ahead = 2;
        limit = sp_cuda_scaled(
            choice.ranks == 64 ? SP_CUDA_DECODE_BLOCKS_64 : SP_CUDA_DECODE_BLOCKS, multiprocessors);
    }
    /* Fewer blocks while the device stays full: each starts with a chain of dependent loads. */
    choice.steps = choice.steps_ahead;
    most = choice.window_tiles == 1 && choice.ranks == 128 ? 2 : SP_CUDA_STEPS_MAX;
    while (choice.steps < most && blocks > choice.steps * limit)
        choice.steps *= 2;
    sp_cuda_choose_ring(multiprocessors, n_rows, tiles, total_steps, rank_stride, &choice);
    return choice;
}

/* Columns of one row of a partial: rank_stride for each site. */
static inline int32_t sp_cuda_partial_columns(int32_t rank_stride, int32_t n_sites)
{
    return rank_stride * n_sites;
}

/* Bytes of all split-K partials, and of a rounded xa after them. Not monotonic: fewer rows may be
 * split into more partials. */
static inline size_t sp_cuda_partials_bytes(int32_t multiprocessors, int32_t n_rows,
                                            int32_t n_slots, int32_t k_in, int32_t rank_stride,
                                            int32_t n_sites)
{
    sp_cuda_shrink_choice choice =
        sp_cuda_choose_shrink(multiprocessors, n_rows, n_slots, k_in, rank_stride, n_sites);
    size_t elements = (size_t)n_rows * (size_t)sp_cuda_partial_columns(rank_stride, n_sites);

    return elements * ((size_t)choice.n_partials * sizeof(float) +
                       (sp_cuda_rounds_xa(n_rows, rank_stride) ? sizeof(uint16_t) : 0));
}

#ifdef __cplusplus
}
#endif
#endif
