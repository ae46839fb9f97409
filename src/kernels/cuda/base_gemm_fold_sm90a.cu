/*
 * base_gemm_fold_sm90a.cu: the base's product of many rows with the deltas of a group folded in:
 *
 *     y[row, j] = T(fmaf(scale, (float)T(xa[row, :] · B[slot][j, :]), (float)T(x[row, :] · w[j,
 * :])))
 *
 * with the bits of base_gemm_sm90a.cu and an expand after it, so that y is written once and never
 * read again.
 *
 * Tiles, clusters and ring are those of base_gemm_wide.cuh. After the stages of k of a tile come
 * its passes, one for each slot that the rows of the cluster have, each a stage of the ring too: B
 * of the tile's columns in sets of 32 ranks, rows of 64 bytes, so that eight lanes read 128
 * adjacent bytes. The blocks of a cluster have the same passes, since they share the ring's stages;
 * one whose own rows lack the slot loads nothing. xa of the tile's rows is laid out likewise: where
 * the shrink has rounded it, it comes with B, else the warps beside the loading one sum and round
 * the partials while the tile is multiplied.
 *
 * The sums are packed to bf16, in half of their registers, then a warp of 16 rows multiplies those
 * of the slot: the accumulators of wgmma have in each warp the layout of mma m16n8k16. Rows of
 * another slot, or of none, keep what they have by a select.
 *
 * The kernel starts when x is complete (sp_cuda_group.folds), and only what follows from the shrink
 * waits for that. A pass takes about as long as two stages of k, so this is for rows of few slots
 * in long runs; for others it is right, and slow.
 */
#include "kernels/cuda/base_gemm_wide.cuh"
#include "kernels/cuda/cuda_choose.h"
#include "kernels/cuda/fold.cuh"
#include "kernels/cuda/partials.cuh"

#define SET_RANKS 32
#define SET_BYTES (SET_RANKS * 2) /* of a row */
#define NO_SLOT   INT32_MAX

typedef struct fold_maps {
    CUtensorMap xa[SP_CUDA_OUTPUTS_MAX], b[SP_CUDA_OUTPUTS_MAX]; /* of outputs that have a site */
} fold_maps;

typedef struct fold_shape {
    int site[SP_CUDA_OUTPUTS_MAX]; /* of the group, for each output; -1: none */
    partials_shape partials;
    int gathers; /* xa is summed and rounded here: no kernel has rounded it */
} fold_shape;

/* What a stage holds that is a pass. */
typedef struct alignas(16) fold_pass {
    int slot;
    int rank; /* 0: nothing to fold in this block */
    float stored;
    int more; /* another pass of the tile follows */
} fold_pass;

/* Named barriers; 0 is __syncthreads. */
#define XA_READY 1
#define XA_FREE  2
#define XA_RANKS 3 /* among the gatherers */

#define GATHERERS ((WARPGROUP / SP_WARP - 1) * SP_WARP) /* threads */

/* A tile whose ring stages take a pass of 64 ranks. */
template <class W> struct fold_tile {
    static constexpr int XA_BYTES = W::ROWS * SET_BYTES, B_BYTES = W::COLUMNS * SET_BYTES;
    static constexpr int B_AT = 2 * XA_BYTES; /* in a stage */
    static constexpr int PASSES_AT = W::SHARED_BYTES;
    static constexpr int RANKS_AT = PASSES_AT + STAGES_MAX * (int)sizeof(fold_pass);
    static constexpr int GATHERED_AT = RANKS_AT + W::ROWS * (int)sizeof(int);
    static constexpr int SHARED_BYTES = GATHERED_AT + 2 * XA_BYTES;
    static constexpr int MEETING = W::CONSUMERS * WARPGROUP + GATHERERS;
    static constexpr int CLUSTER_ROWS = W::BLOCKS * W::ROWS;
    static constexpr int LANE_ROWS = CLUSTER_ROWS / SP_WARP, BLOCK_ROWS = W::ROWS / SP_WARP;

    static_assert(W::COLUMN_BLOCKS == 1, "the blocks of a cluster have the same output");
    static_assert(CLUSTER_ROWS == SP_CUDA_FOLD_ROWS, "the engine counts passes by clusters");
    static_assert(2 * (XA_BYTES + B_BYTES) <= W::STAGE_BYTES, "two sets of ranks are a stage");
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/* ---- passes -------------------------------------------------------------------------------- */

/* The lowest slot above `last` among the cluster's rows, of which a lane has every 32nd. */
template <int N> static __device__ __forceinline__ int slot_after(const int (&slot)[N], int last)
{
    unsigned lowest = NO_SLOT;

#pragma unroll
    for (int i = 0; i < N; i++)
        if (slot[i] > last)
            lowest = min(lowest, (unsigned)slot[i]);
    return (int)__reduce_min_sync(~0u, lowest);
}

/* One thread; the stage is empty. */
template <class W>
static __device__ __forceinline__ void load_pass(const wide_ring<W> &at, const fold_maps &maps,
                                                 const wide_place &place, const fold_pass &pass,
                                                 bool gathers)
{
    typedef fold_tile<W> tile;
    int sets = (pass.rank + SET_RANKS - 1) / SET_RANKS;

    if (sets > 0)
        barrier_expect(at.full(), sets * ((gathers ? 0 : tile::XA_BYTES) + tile::B_BYTES));
    barrier_arrive(at.full());
    for (int s = 0; s < sets; s++) {
        if (!gathers)
            tensor_load(at.data() + s * tile::XA_BYTES, &maps.xa[place.output], s * SET_RANKS,
                        place.row0, at.full());
        tensor_load_slot(at.data() + tile::B_AT + s * tile::B_BYTES, &maps.b[place.output],
                         s * SET_RANKS, place.n0, pass.slot, at.full());
    }
}

/* The slots of the cluster's rows. */
template <class W>
static __device__ __forceinline__ void read_slots(int (&slot)[fold_tile<W>::LANE_ROWS],
                                                  const sp_cuda_group &group, int row0)
{
#pragma unroll
    for (int i = 0; i < fold_tile<W>::LANE_ROWS; i++) {
        int row = row0 + i * SP_WARP + (int)(threadIdx.x & 31);

        slot[i] = row < group.n_rows ? group.plan.seq_slot[row] : -1;
    }
}

/* The pass of a slot in this block. */
template <class W>
static __device__ __forceinline__ fold_pass pass_of(const int (&slot)[fold_tile<W>::LANE_ROWS],
                                                    const sp_cuda_site &site, int number, int rank)
{
    fold_pass pass = {number, 0, 0.0f, 0};
    bool own = false;

#pragma unroll
    for (int i = 0; i < fold_tile<W>::LANE_ROWS; i++)
        own = own || (i / fold_tile<W>::BLOCK_ROWS == rank && slot[i] == number);
    if (number != NO_SLOT && __any_sync(~0u, own)) {
        pass.rank = site.rank[number];
        pass.stored = site.scale[number];
    }
    return pass;
}

/* All passes of a tile, by a whole warp, from `pass` on. */
template <class W>
static __device__ __forceinline__ void load_passes(wide_ring<W> *at, const fold_maps &maps,
                                                   const int (&slot)[fold_tile<W>::LANE_ROWS],
                                                   const sp_cuda_site &site,
                                                   const wide_place &place, fold_pass pass,
                                                   fold_pass *passes, int rank, bool gathers)
{
    do {
        int next = pass.slot == NO_SLOT ? NO_SLOT : slot_after(slot, pass.slot);

        pass.more = next != NO_SLOT;
        if ((threadIdx.x & 31) == 0) {
            barrier_wait(at->empty(), at->parity ^ 1);
            passes[at->stage] = pass;
            load_pass<W>(*at, maps, place, pass, gathers);
        }
        __syncwarp();
        at->advance();
        if (pass.more == 0)
            break;
        pass = pass_of<W>(slot, site, next, rank);
    } while (true);
}

/* One warp of the block. What passes need to know is read before the stages of k. x is complete
 * when this kernel starts (sp_cuda_group.folds), xa is not. */
template <class W>
static __device__ __forceinline__ void load_folding(wide_ring<W> at, const wide_maps &maps,
                                                    const sp_cuda_gemm &g, const wide_shape &s,
                                                    const fold_maps &deltas,
                                                    const sp_cuda_group &group, const fold_shape &f,
                                                    fold_pass *passes, int rank)
{
    const int clusters = (int)gridDim.x / W::BLOCKS;
    int number = (int)blockIdx.x / W::BLOCKS, ahead = min(W::STAGES, s.k_stages);
    bool loads = (threadIdx.x & 31) == 0;

    if (loads)
        load_ahead<W>(at, maps, g, s, rank, false);
    for (int i = 0; i < ahead; i++)
        at.advance();
    for (int from = ahead; number < s.items; number += clusters, from = 0) {
        wide_item item = item_of<W>(g, maps, s, number, rank);
        int index = f.site[item.place.output], slot[fold_tile<W>::LANE_ROWS];
        const sp_cuda_site &site = group.sites[max(index, 0)];
        fold_pass pass;

        read_slots<W>(slot, group, item.place.row0 - rank * W::ROWS);
        pass = pass_of<W>(slot, site, slot_after(slot, -1), rank);
        if (loads)
            load_stages<W>(at, maps, item, from, s.k_stages, rank);
        __syncwarp();
        for (int i = from; i < s.k_stages; i++)
            at.advance();
        wait_predecessor();
        if (index >= 0)
            load_passes<W>(&at, deltas, slot, site, item.place, pass, passes, rank, f.gathers != 0);
    }
}

/* ---- xa ------------------------------------------------------------------------------------ */

/* meet and arrive_at_meeting for a warp whose lanes may be apart. */
static __device__ __forceinline__ void join_and_meet(int barrier, int threads)
{
    __syncwarp();
    meet(barrier, threads);
}

static __device__ __forceinline__ void join_and_arrive(int barrier, int threads)
{
    __syncwarp();
    arrive_at_meeting(barrier, threads);
}

/* Rank of each row of the tile at the site. */
template <class W>
static __device__ __forceinline__ void read_ranks(int *ranks, const sp_cuda_group &group,
                                                  const sp_cuda_site &site, int row0, int self)
{
    for (int i = self; i < W::ROWS; i += GATHERERS) {
        int slot = row0 + i < group.n_rows ? group.plan.seq_slot[row0 + i] : -1;

        ranks[i] = slot < 0 ? 0 : site.rank[slot];
    }
}

/* xa of the tile's rows in sets of 32 ranks, rounded, zeros from the row's own rank up to a
 * multiple of 8. */
template <class W>
static __device__ __forceinline__ void gather_xa(char *to, const int *ranks,
                                                 const sp_cuda_group &group, const fold_shape &f,
                                                 int site, int row0, int self)
{
    enum { AT_ONCE = 2 };
    int fours = group.rank_stride / 4, row_floats = group.rank_stride * group.n_sites;
    const float *from = group.partials + (int64_t)row0 * row_floats + site * group.rank_stride;

    for (int first = self; first < W::ROWS * fours; first += AT_ONCE * GATHERERS) {
        const float *partial[AT_ONCE];
        float4 v[AT_ONCE];

#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            int at = first + i * GATHERERS, row = at / fours, c = at % fours * 4;

            partial[i] = row < W::ROWS && c < ranks[row] ? from + row * row_floats + c : NULL;
        }
        sum_several<AT_ONCE, PARTIALS_NOW>(v, partial, (int64_t)group.n_rows * row_floats,
                                           f.partials);
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            int at = first + i * GATHERERS, row = at / fours, c = at % fours * 4, left;

            if (row >= W::ROWS)
                break;
            left = ranks[row] - c;
            *(uint2 *)(to + c / SET_RANKS * fold_tile<W>::XA_BYTES + row * SET_BYTES +
                       c % SET_RANKS * 2) =
                make_uint2(narrow_two<0>(left > 0 ? v[i].x : 0.0f, left > 1 ? v[i].y : 0.0f),
                           narrow_two<0>(left > 2 ? v[i].z : 0.0f, left > 3 ? v[i].w : 0.0f));
        }
    }
}

/* The warps beside the loading one: xa of each tile while it is multiplied. */
template <class W>
static __device__ __forceinline__ void gather_all(char *memory, const wide_shape &s,
                                                  const sp_cuda_group &group, const fold_shape &f,
                                                  int rank)
{
    typedef fold_tile<W> tile;
    const int clusters = (int)gridDim.x / W::BLOCKS;
    int self = (int)threadIdx.x - SP_WARP, *ranks = (int *)(memory + tile::RANKS_AT);
    bool used = false;

    for (int item = (int)blockIdx.x / W::BLOCKS; item < s.items; item += clusters) {
        wide_place place = find_place<W>(s, item, rank);
        int site = f.site[place.output];

        if (site < 0)
            continue;
        read_ranks<W>(ranks, group, group.sites[site], place.row0, self);
        join_and_meet(XA_RANKS, GATHERERS);
        if (used)
            join_and_meet(XA_FREE, tile::MEETING);
        else
            wait_predecessor();
        used = true;
        gather_xa<W>(memory + tile::GATHERED_AT, ranks, group, f, site, place.row0, self);
        join_and_arrive(XA_READY, tile::MEETING);
        join_and_meet(XA_RANKS, GATHERERS); /* all have read the ranks */
    }
    if (used)
        join_and_meet(XA_FREE, tile::MEETING);
}

/* ---- deltas -------------------------------------------------------------------------------- */

/* Two adjacent outputs with their deltas; scale 0: as they are. */
static __device__ __forceinline__ uint32_t fold_two_if(uint32_t y, uint32_t delta, float scale)
{
    return scale != 0.0f ? fold_two<0>(y, delta, scale) : y;
}

/* B of N eights of columns, in S sets of ranks; v stays as it is where the row has none. */
template <int N, int S, int B_BYTES>
static __device__ __forceinline__ void load_columns(uint4 (&v)[S][N], uint32_t from,
                                                    const bool (&has)[S])
{
#pragma unroll
    for (int s = 0; s < S; s++)
#pragma unroll
        for (int i = 0; i < N; i++)
            load_shared_if(&v[s][i], from + s * B_BYTES + i * 8 * SET_BYTES, has[s]);
}

/* The deltas of S sets of ranks into y, which has two columns of row g, then of row g + 8, of each
 * eight. xa: at this warp's first row; b: at the tile's first column. An mma that adds to another's
 * sums waits for it, so AT_ONCE eights of columns take turns, while the next are loaded. */
template <class W, int S>
static __device__ __forceinline__ void fold_ranks(uint32_t (&y)[W::COLUMNS / 4], uint32_t xa,
                                                  uint32_t b, int rank, float low, float high,
                                                  uint32_t zero)
{
    typedef fold_tile<W> tile;
    enum { AT_ONCE = 4 / S };
    uint32_t own = (threadIdx.x & 31) * 16; /* rows of 64 bytes, four lanes each */
    uint4 a[S][2] = {}, v[2][S][AT_ONCE] = {};
    bool has[S];

#pragma unroll
    for (int s = 0; s < S; s++) {
        has[s] = s * SET_RANKS + (int)(threadIdx.x & 3) * 8 < rank;
        load_shared_if(&a[s][0], xa + own + s * tile::XA_BYTES, has[s]);
        load_shared_if(&a[s][1], xa + own + s * tile::XA_BYTES + 8 * SET_BYTES, has[s]);
        pair_rows(a[s], zero);
    }
    load_columns<AT_ONCE, S, tile::B_BYTES>(v[0], b + own, has);
#pragma unroll
    for (int j = 0; j < W::COLUMNS / 8; j += AT_ONCE) {
        float acc[AT_ONCE][4] = {};
        int at = j / AT_ONCE % 2;

        if (j + AT_ONCE < W::COLUMNS / 8)
            load_columns<AT_ONCE, S, tile::B_BYTES>(v[at ^ 1],
                                                    b + own + (j + AT_ONCE) * 8 * SET_BYTES, has);
#pragma unroll
        for (int s = 0; s < S; s++) {
            const uint4 &p = a[s][0], &q = a[s][1];

#pragma unroll
            for (int i = 0; i < AT_ONCE; i++)
                mma<0>(acc[i], p.x, p.y, p.z, p.w, v[at][s][i].x, v[at][s][i].y);
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++)
                mma<0>(acc[i], q.x, q.y, q.z, q.w, v[at][s][i].z, v[at][s][i].w);
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            uint32_t *two = &y[2 * (j + i)];

            two[0] = fold_two_if(two[0], narrow_two<0>(acc[i][0], acc[i][1]), low);
            two[1] = fold_two_if(two[1], narrow_two<0>(acc[i][2], acc[i][3]), high);
        }
    }
}

/* A row's slot and the scale of its request; slot -1: none. */
typedef struct fold_row {
    int slot;
    float request;
} fold_row;

static __device__ __forceinline__ fold_row read_row(const sp_cuda_plan &plan, int row, int n_rows)
{
    if (row >= n_rows)
        return {-1, 0.0f};
    return {plan.seq_slot[row], plan.row_scale[row]};
}

static __device__ __forceinline__ float scale_in(const fold_pass &pass, const fold_row &row)
{
    return row.slot == pass.slot ? sp_scale_of_row(pass.stored, row.request) : 0.0f;
}

/* All passes of a tile; `low` and `high` are the rows g and g + 8 of this warp. */
template <class W>
static __device__ __forceinline__ void fold_passes(wide_ring<W> *at, uint32_t (&y)[W::COLUMNS / 4],
                                                   const fold_pass *passes, const fold_row &low,
                                                   const fold_row &high, uint32_t zero,
                                                   uint32_t gathered)
{
    uint32_t own = ((int)threadIdx.x - WARPGROUP) / SP_WARP * 16 * SET_BYTES;
    fold_pass pass;

    do {
        float low_scale, high_scale;

        barrier_wait(at->full(), at->parity);
        pass = passes[at->stage];
        low_scale = scale_in(pass, low);
        high_scale = scale_in(pass, high);
        if (pass.rank > 0 && __any_sync(~0u, low_scale != 0.0f || high_scale != 0.0f)) {
            uint32_t b = at->data() + fold_tile<W>::B_AT;
            uint32_t xa = own + (gathered != 0 ? gathered : at->data());

            if (pass.rank > SET_RANKS)
                fold_ranks<W, 2>(y, xa, b, pass.rank, low_scale, high_scale, zero);
            else
                fold_ranks<W, 1>(y, xa, b, pass.rank, low_scale, high_scale, zero);
        }
        __syncwarp();
        release_stage<W>(at->empty());
        at->advance();
    } while (pass.more);
}

/* ---- outputs ------------------------------------------------------------------------------- */

/* Two adjacent outputs. */
static __device__ __forceinline__ void store_halves(const sp_cuda_gemm_output &out, bool pairs,
                                                    int row, int n, uint32_t two)
{
    uint16_t *y = (uint16_t *)out.y + row * out.y_stride + n;

    if (pairs && n + 1 < out.n) {
        *(uint32_t *)y = two;
        return;
    }
    if (n < out.n)
        y[0] = (uint16_t)two;
    if (n + 1 < out.n)
        y[1] = (uint16_t)(two >> 16);
}

/* row0: this thread's first row. */
template <class W>
static __device__ __forceinline__ void store_outputs(const uint32_t (&y)[W::COLUMNS / 4],
                                                     const sp_cuda_gemm_output &out, int row0,
                                                     int n0, int rows)
{
    bool pairs = stores_pairs(out);
    bool fours = n0 + W::COLUMNS <= out.n && out.y_stride % 4 == 0 && (uintptr_t)out.y % 8 == 0;

#pragma unroll
    for (int half = 0; half < 2; half++) {
        int row = row0 + half * 8, n = n0 + (int)(threadIdx.x & 3) * 2;
        bool mine = row < rows;
        uint16_t *to = (uint16_t *)out.y + row * out.y_stride + n0;

#pragma unroll
        for (int j = 0; j < W::COLUMNS / 8; j += 2) {
            uint32_t low = y[2 * j + half], high = y[2 * j + 2 + half];

            if (fours) {
                store_sixteen(mine ? to + j * 8 : NULL, low, high);
            } else if (mine) {
                store_halves(out, pairs, row, n + j * 8, low);
                store_halves(out, pairs, row, n + j * 8 + 8, high);
            }
        }
    }
}

template <class W>
static __device__ __forceinline__ void multiply_folding(
    wide_ring<W> at, const sp_cuda_gemm &g, const wide_shape &s, const sp_cuda_group &group,
    const fold_shape &f, const fold_pass *passes, int rank, uint32_t gathered)
{
    const int clusters = (int)gridDim.x / W::BLOCKS;
    int lane = threadIdx.x & 31, row = ((int)threadIdx.x - WARPGROUP) / 32 * 16 + lane / 4;

    for (int item = (int)blockIdx.x / W::BLOCKS; item < s.items; item += clusters) {
        wide_place place = find_place<W>(s, item, rank);
        const sp_cuda_gemm_output &out = g.outputs[place.output];
        fold_row low = read_row(group.plan, place.row0 + row, g.rows);
        fold_row high = read_row(group.plan, place.row0 + row + 8, g.rows);
        float sum[W::COLUMNS / 2];
        uint32_t y[W::COLUMNS / 4];

        multiply_item<W>(sum, &at, s.k_stages);
        wait_predecessor();
        if (f.site[place.output] < 0) {
            store_sums<W>(sum, g, place);
            continue;
        }
#pragma unroll
        for (int i = 0; i < W::COLUMNS / 4; i++)
            y[i] = narrow_two<0>(sum[2 * i], sum[2 * i + 1]);
        if (gathered != 0)
            join_and_meet(XA_READY, fold_tile<W>::MEETING);
        fold_passes<W>(&at, y, passes, low, high, unknown_zero(group), gathered);
        if (gathered != 0)
            join_and_arrive(XA_FREE, fold_tile<W>::MEETING);
        store_outputs<W>(y, out, place.row0 + row, place.n0, g.rows);
    }
}

#endif

template <class W>
__global__ void __launch_bounds__(W::THREADS, 1)
    folding_kernel(const __grid_constant__ wide_maps maps, const __grid_constant__ fold_maps deltas,
                   const __grid_constant__ sp_cuda_gemm g, const __grid_constant__ wide_shape s,
                   const __grid_constant__ fold_shape f,
                   const __grid_constant__ sp_cuda_group group)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) char memory[];
    fold_pass *passes = (fold_pass *)(memory + fold_tile<W>::PASSES_AT);
    wide_ring<W> ring = {shared_address(memory), 0, 0};
    int rank = cluster_rank();

    if (threadIdx.x == 0)
        init_barriers<W>(ring);
    __syncwarp();
    cluster_arrive();
    cluster_wait();
    release_successor();
    if (threadIdx.x < WARPGROUP) {
        if (W::COLUMNS == 256)
            registers_down_to<72>();
        if (threadIdx.x < SP_WARP)
            load_folding<W>(ring, maps, g, s, deltas, group, f, passes, rank);
        else if (f.gathers != 0)
            gather_all<W>(memory, s, group, f, rank);
    } else {
        if (W::COLUMNS == 256)
            registers_up_to<216>();
        multiply_folding<W>(ring, g, s, group, f, passes, rank,
                            f.gathers != 0 ? shared_address(memory + fold_tile<W>::GATHERED_AT)
                                           : 0);
    }
    cluster_arrive();
    cluster_wait();
#endif
}

/* ---- launch -------------------------------------------------------------------------------- */

/* Boxes of `rows` rows by 32 ranks of a matrix [slots, n, ranks], slots 0: [n, ranks]; strides in
 * elements. */
static bool make_ranks_map(encode_fn encode, CUtensorMap *map, const void *data, int ranks, int n,
                           int64_t stride, int slots, int64_t slot_stride, int rows)
{
    cuuint64_t sizes[3] = {(cuuint64_t)ranks, (cuuint64_t)n, (cuuint64_t)slots};
    cuuint64_t strides[2] = {(cuuint64_t)stride * 2, (cuuint64_t)slot_stride * 2};
    cuuint32_t boxes[3] = {SET_RANKS, (cuuint32_t)rows, 1}, steps[3] = {1, 1, 1};

    return encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, slots > 0 ? 3 : 2, (void *)data, sizes,
                  strides, boxes, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
                  CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

template <class W>
static bool make_fold_maps(const base_gemm *state, fold_maps *maps, const sp_cuda_gemm *gemm,
                           const fold_shape &fold)
{
    const sp_cuda_group *group = gemm->deltas;
    encode_fn encode = (encode_fn)state->encode;
    bool made = true;

    for (int i = 0; made && i < gemm->n_outputs; i++) {
        const sp_cuda_site *site = &group->sites[max(fold.site[i], 0)];
        const uint16_t *xa = rounded_of(group);

        if (fold.site[i] < 0)
            continue;
        made = make_ranks_map(encode, &maps->b[i], site->b, group->rank_stride, site->n_out,
                              site->b_stride, group->n_slots, site->b_slot_stride, W::COLUMNS);
        if (made && !fold.gathers)
            made = make_ranks_map(encode, &maps->xa[i], xa + fold.site[i] * group->rank_stride,
                                  group->rank_stride, group->n_rows,
                                  group->rank_stride * group->n_sites, 0, 0, W::ROWS);
    }
    return made;
}

template <class W>
static cudaError_t launch_folding(const base_gemm *state, int clusters, const sp_cuda_gemm *gemm,
                                  const fold_shape &fold, cudaStream_t stream)
{
    wide_shape shape = shape_of<W>(gemm);
    wide_maps maps = {};
    fold_maps deltas = {};
    cudaLaunchAttribute attributes[2];
    cudaLaunchConfig_t config = config_of<W>(min(shape.items, clusters), attributes, stream);

    config.dynamicSmemBytes = fold_tile<W>::SHARED_BYTES;
    if (!make_maps<W>(state, &maps, gemm, shape.x_box) ||
        !make_fold_maps<W>(state, &deltas, gemm, fold))
        return cudaErrorNotSupported;
    return cudaLaunchKernelEx(&config, folding_kernel<W>, maps, deltas, *gemm, shape, fold,
                              *gemm->deltas);
}

template <class W> static cudaError_t init_folding(int *out_clusters)
{
    cudaLaunchAttribute attributes[2];
    cudaLaunchConfig_t config = config_of<W>(1, attributes, NULL);
    cudaError_t code = cudaFuncSetAttribute(
        folding_kernel<W>, cudaFuncAttributeMaxDynamicSharedMemorySize, fold_tile<W>::SHARED_BYTES);

    config.dynamicSmemBytes = fold_tile<W>::SHARED_BYTES;
    return code == cudaSuccess
               ? cudaOccupancyMaxActiveClusters(out_clusters, folding_kernel<W>, &config)
               : code;
}

/* ---- the choice of a tile ------------------------------------------------------------------ */

/* A tile of the forms from FIRST_FOLD on. `ns`: nanoseconds of 64 k of a tile, as WIDE_128_NS. */
typedef struct fold_kind {
    cudaError_t (*init)(int *out_clusters);
    cudaError_t (*launch)(const base_gemm *state, int clusters, const sp_cuda_gemm *gemm,
                          const fold_shape &fold, cudaStream_t stream);
    wide_shape (*shape)(const sp_cuda_gemm *gemm);
    int ns;
} fold_kind;

template <class W> static constexpr fold_kind kind_of(int ns)
{
    return {init_folding<W>, launch_folding<W>, shape_of<W>, ns};
}

static const fold_kind kinds[GEMM_FOLDS] = {kind_of<wide_128>(WIDE_128_NS),
                                            kind_of<wide_256>(WIDE_256_NS)};

cudaError_t sp_cuda_gemm_fold_init(base_gemm *state)
{
    cudaError_t code = cudaSuccess;

    for (int i = 0; i < GEMM_FOLDS && state->encode != NULL && code == cudaSuccess; i++)
        code = kinds[i].init(&state->folds[i]);
    return code;
}

/* The form that the GEMM names, or the best one; -1: none. */
static int find_kind(const base_gemm *state, const sp_cuda_gemm *gemm)
{
    int named = gemm->form - FIRST_FOLD;

    if (gemm->form == SP_CUDA_GEMM_CHOSEN)
        return choose_kind(kinds, state->folds, gemm);
    return named >= 0 && named < GEMM_FOLDS && state->folds[named] > 0 ? named : -1;
}

/* ---- what can be folded -------------------------------------------------------------------- */

static bool fits(const sp_cuda_group *group, const sp_cuda_site *site,
                 const sp_cuda_gemm_output *out)
{
    return site->rank != NULL && site->scale != NULL && !site->y_is_f32 && !out->y_is_f32 &&
           out->bias == NULL && site->n_out == out->n && site->y_stride == out->y_stride &&
           (uintptr_t)site->b % 16 == 0 && site->b_stride % 8 == 0 &&
           site->b_slot_stride % 8 == 0 && site->b_stride >= group->rank_stride;
}

/* Each site has an output, by its y. */
static bool find_sites(const sp_cuda_gemm *gemm, fold_shape *fold)
{
    const sp_cuda_group *group = gemm->deltas;
    int found = 0;

    for (int i = 0; i < SP_CUDA_OUTPUTS_MAX; i++) {
        fold->site[i] = -1;
        for (int j = 0; i < gemm->n_outputs && j < group->n_sites; j++)
            if (group->sites[j].y == gemm->outputs[i].y &&
                fits(group, &group->sites[j], &gemm->outputs[i])) {
                fold->site[i] = j;
                found++;
            }
    }
    return found == group->n_sites;
}

cudaError_t sp_cuda_gemm_folding(const base_gemm *state, const sp_cuda_gemm *gemm,
                                 cudaStream_t stream)
{
    const sp_cuda_group *group = gemm->deltas;
    fold_shape fold = {};
    int kind;

    if (state->encode == NULL || group->type != SP_DTYPE_BF16 || group->n_rows != gemm->rows ||
        !sp_cuda_folds(group->n_rows, group->rank_stride) || group->folds == 0 ||
        !find_sites(gemm, &fold))
        return cudaErrorNotSupported;
    fold.partials = partials_of(group);
    fold.gathers = rounded_of(group) == NULL;
    kind = find_kind(state, gemm);
    return kind < 0 ? cudaErrorNotSupported
                    : kinds[kind].launch(state, state->folds[kind], gemm, fold, stream);
}
