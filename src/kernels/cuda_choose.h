/*
 * cuda_choose.h: which shape of launch serves which step, as pure host functions of padded rows,
 * slots and dimensions; never of the mix of adapters. No choice changes a bit (kernels_cuda.h).
 */
#ifndef SP_KERNELS_CUDA_CHOOSE_H
#define SP_KERNELS_CUDA_CHOOSE_H

#include "kernels/kernels_cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

#define SP_CUDA_CHUNK_K 512
/* Above this many rows a block takes several tiles. */
#define SP_CUDA_DECODE_ROWS 256
/* Blocks that keep the device busy; chosen for 132 multiprocessors and harmless elsewhere. */
#define SP_CUDA_BLOCKS_WANTED 512

/* Tiles that n_rows rows of n_slots slots can need at most. */
static inline int32_t sp_cuda_tiles_bound(int32_t n_rows, int32_t n_slots)
{
    int32_t used = n_slots < n_rows ? n_slots : n_rows;
    int64_t bound = ((int64_t)n_rows + (int64_t)(SP_CUDA_TILE_ROWS - 1) * used) / SP_CUDA_TILE_ROWS;

    return (int32_t)(bound < n_rows ? bound : n_rows);
}

static inline int32_t sp_cuda_chunks(int32_t k_in)
{
    return (k_in + SP_CUDA_CHUNK_K - 1) / SP_CUDA_CHUNK_K;
}

typedef struct sp_cuda_shrink_choice {
    int32_t chunks_per_block; /* all of them, or 1 */
    int32_t n_planes;         /* that the shrink writes: 1 finished one, or one for each chunk */
    int32_t tiles_per_block;
} sp_cuda_shrink_choice;

static inline sp_cuda_shrink_choice sp_cuda_choose_shrink(int32_t n_rows, int32_t n_slots,
                                                          int32_t k_in, int32_t rank_stride,
                                                          int32_t n_sites)
{
    int32_t chunks = sp_cuda_chunks(k_in);
    int64_t blocks =
        (int64_t)sp_cuda_tiles_bound(n_rows, n_slots) * n_sites * ((rank_stride + 15) / 16);
    sp_cuda_shrink_choice choice = {1, chunks, 1};

    if (blocks >= SP_CUDA_BLOCKS_WANTED || n_rows > SP_CUDA_DECODE_ROWS)
        choice.chunks_per_block = chunks;
    if (choice.chunks_per_block >= chunks)
        choice.n_planes = 1;
    if (n_rows > SP_CUDA_DECODE_ROWS && blocks >= 4 * SP_CUDA_BLOCKS_WANTED)
        choice.tiles_per_block = 4;
    return choice;
}

typedef struct sp_cuda_expand_choice {
    int32_t columns;         /* 128 or 256 outputs of a block */
    int32_t ranks;           /* of B that a block holds in registers: 32, 64 or 128 */
    int32_t tiles_per_block; /* consecutive tiles, B read once while the slot stays */
} sp_cuda_expand_choice;

static inline sp_cuda_expand_choice sp_cuda_choose_expand(int32_t n_rows, int32_t n_slots,
                                                          int32_t n_out_total, int32_t rank_stride)
{
    int64_t tiles = sp_cuda_tiles_bound(n_rows, n_slots);
    sp_cuda_expand_choice choice;

    choice.ranks = rank_stride <= 32 ? 32 : rank_stride <= 64 ? 64 : 128;
    choice.columns =
        choice.ranks < 128 && tiles * (n_out_total / 256) >= SP_CUDA_BLOCKS_WANTED ? 256 : 128;
    choice.tiles_per_block = n_rows > SP_CUDA_DECODE_ROWS ? 8 : 1;
    return choice;
}

/* Columns of one plane row: every site's own stretch. */
static inline int32_t sp_cuda_plane_columns(int32_t rank_stride, int32_t n_sites)
{
    return rank_stride * n_sites;
}

static inline size_t sp_cuda_planes_bytes(int32_t n_rows, int32_t n_slots, int32_t k_in,
                                          int32_t rank_stride, int32_t n_sites)
{
    sp_cuda_shrink_choice choice =
        sp_cuda_choose_shrink(n_rows, n_slots, k_in, rank_stride, n_sites);

    return (size_t)choice.n_planes * (size_t)n_rows *
           (size_t)sp_cuda_plane_columns(rank_stride, n_sites) * sizeof(float);
}

#ifdef __cplusplus
}
#endif
#endif
