/*
 * choose.cu: a token of each row by the CPU's filters, and what logprobs need; choose_rules.h has
 * the numbers.
 *
 *     raw:    best, Σ e^(l - best), the n_top best ids
 *     change: bias and penalties of the row's list, then the row's mask
 *     cut:    the key of the last token that top-k keeps, then that top-p keeps of those
 *     draw:   of the tokens from the cut on with a weight of at least min_p, in the order of ids
 *
 * A cluster of 8 blocks has a row: each block keeps its part of the logits in shared memory, which
 * is read from there again and again; the row itself is read once. What the blocks find is combined
 * through distributed shared memory: all sums are of integers, and maxima of keys, so the order is
 * of no account.
 *
 * The cut is where the sum of the parts (1 each, or weights), best first, reaches a target. Bins
 * that are linear in the logit have the sums; the bin that the target falls in is divided again if
 * it has too many tokens for a list; the tokens of the list are compared with each other. Where
 * even that does not divide them (equal logits), the key is found bit by bit. Bound by the latency
 * of about twenty cluster barriers, and by the bytes of the logits where there are many rows.
 */
#include "kernels/cuda/choose_rules.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/ptx.cuh"

#define THREADS  512
#define WARPS    (THREADS / SP_WARP)
#define PARTS    8 /* blocks of a row */
#define BINS     1024
#define OWN      (BINS / PARTS) /* bins that one block sums up */
#define WORDS    3              /* of a sum in a bin, of 15 bits each before they are summed */
#define WORD     15
#define LIST     512
#define EACH     4     /* logits of one load */
#define JOINS    3     /* values that are combined at once */
#define FARTHEST 33.0f /* from there on below the best, a weight's part is 0 */

typedef unsigned long long u64;

typedef struct alignas(16) choose_shared {
    u64 out[2][JOINS]; /* for the other blocks, alternating */
    u64 warp[JOINS][WARPS];
    u64 list[LIST];              /* this block's tokens */
    u64 keys[LIST], parts[LIST]; /* those of all blocks */
    uint32_t bins[WORDS][BINS];
    sp_cuda_sample_row row;
    u64 cut;
    uint32_t n_list;
    int token;
} choose_shared;

static_assert(OWN == 4 * SP_WARP, "a warp looks through a block's bins, four a lane");
static_assert(SP_CUDA_SAMPLE_VOCAB_MAX <= PARTS << 16, "sums of words of 15 bits fit 32");
static_assert(SP_CUDA_SAMPLE_TOP_MAX <= LIST && OWN <= LIST && LIST <= THREADS, "they fit");

/* A block's part of a row: ids first .. first + n - 1. */
typedef struct choose_block {
    choose_shared *s;
    float *logits; /* [n] in shared memory, then NaN up to a multiple of EACH */
    int first, n, part, turn;
} choose_block;

/* What a scan of the row tells. */
typedef struct choose_scan {
    u64 key;            /* of the best token */
    float best, lowest; /* the largest and the smallest finite logit */
    int bad;            /* as in the result */
} choose_scan;

/* Which tokens are counted, and how. */
typedef struct choose_count {
    bool by_weight; /* else each is 1 */
    u64 limit;      /* only keys from here on */
    float least;    /* only logits from here on: a quick look that leaves out what `limit` or a
                       weight of 0 would */
    float best, inverse;
    float scale; /* bins per unit of the logit */
} choose_count;

/* A bin of all tokens, or (level 1) of those in bin `base`. */
typedef struct choose_bin {
    int level, base, bin;
    u64 above; /* the parts of better bins */
} choose_bin;

/* ---- the cluster --------------------------------------------------------------------------- */

static __device__ __forceinline__ u64 load_long_of_block(const u64 *at, int part)
{
    u64 value = 0;
#if __CUDA_ARCH__ >= 900
    asm volatile("{\n\t.reg .u32 there;\n\t"
                 "mapa.shared::cluster.u32 there, %1, %2;\n\t"
                 "ld.shared::cluster.u64 %0, [there];\n\t}"
                 : "=l"(value)
                 : "r"(shared_address(at)), "r"(part)
                 : "memory");
#endif
    return value;
}

static __device__ __forceinline__ void cluster_sync(void)
{
    __syncwarp();
    cluster_arrive();
    cluster_wait();
}

template <int MAX> static __device__ __forceinline__ u64 join_two(u64 a, u64 b)
{
    return MAX ? max(a, b) : a + b;
}

template <int MAX> static __device__ __forceinline__ u64 join_warp(u64 v)
{
#pragma unroll
    for (int by = SP_WARP / 2; by > 0; by /= 2)
        v = join_two<MAX>(v, __shfl_xor_sync(0xffffffffu, v, by));
    return v;
}

/* Sums or maxima of N values over the block; written to `out` for the other blocks. */
template <int N, int MAX>
static __device__ __forceinline__ void publish(choose_block *b, const u64 *v)
{
    int warp = (int)threadIdx.x / SP_WARP, lane = (int)threadIdx.x % SP_WARP;

#pragma unroll
    for (int i = 0; i < N; i++) {
        u64 joined = join_warp<MAX>(v[i]);

        if (lane == 0)
            b->s->warp[i][warp] = joined;
    }
    __syncthreads();
    if (warp < N) {
        u64 joined = join_warp<MAX>(lane < WARPS ? b->s->warp[warp][lane] : 0);

        if (lane == 0)
            b->s->out[b->turn][warp] = joined;
    }
    cluster_sync();
}

/* What block `part` published last; the next turn writes elsewhere, and the one after that only
 * when all blocks have come to it. */
static __device__ __forceinline__ u64 published(const choose_block *b, int i, int part)
{
    return load_long_of_block(&b->s->out[b->turn][i], part);
}

/* The same over the cluster, into v of every thread. */
template <int N, int MAX> static __device__ __forceinline__ void join(choose_block *b, u64 *v)
{
    publish<N, MAX>(b, v);
#pragma unroll
    for (int i = 0; i < N; i++) {
        v[i] = 0;
#pragma unroll 4
        for (int part = 0; part < PARTS; part++)
            v[i] = join_two<MAX>(v[i], published(b, i, part));
    }
    b->turn ^= 1;
}

/* ---- scan ---------------------------------------------------------------------------------- */

template <int VEC>
static __device__ __forceinline__ void load_logits(choose_block *b, const float *row)
{
    const float *from = row + b->first;

#pragma unroll 4
    for (int i = (int)threadIdx.x * EACH; i < b->n; i += THREADS * EACH) {
        if (VEC && i + EACH <= b->n) {
            *(float4 *)(b->logits + i) = *(const float4 *)(from + i);
            continue;
        }
        for (int j = i; j < i + EACH; j++)
            b->logits[j] = j < b->n ? from[j] : NAN;
    }
    __syncthreads();
}

static __device__ __forceinline__ void four_logits(const choose_block *b, int i, float *to)
{
    float4 v = *(const float4 *)(b->logits + i);

    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
}

/* ~id of this thread's first bad logit, or 0. */
static __device__ __forceinline__ u64 find_bad(const choose_block *b)
{
    u64 bad = 0;

    for (int i = (int)threadIdx.x; i < b->n; i += THREADS)
        if (sp_choose_is_bad(b->logits[i]))
            bad = max(bad, (u64)(uint32_t) ~(b->first + i));
    return bad;
}

static __device__ __forceinline__ choose_scan scan_row(choose_block *b)
{
    u64 v[3] = {0, 0, 0}; /* best key, ~order of the lowest, ~id of the first bad one */
    float best = -INFINITY, lowest = INFINITY;
    choose_scan scan;
    bool good = true;
    int id = -1;

#pragma unroll 2
    for (int i = (int)threadIdx.x * EACH; i < b->n; i += THREADS * EACH) {
        float logit[EACH];

        four_logits(b, i, logit);
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            good &= logit[j] <= FLT_MAX || i + j >= b->n;
            id = logit[j] > best ? i + j : id;
            best = logit[j] > best ? logit[j] : best;
            lowest = logit[j] > -INFINITY && logit[j] < lowest ? logit[j] : lowest;
        }
    }
    good = __syncthreads_and(good) != 0;
    v[0] = id >= 0 ? sp_choose_key(best, b->first + id) : 0;
    v[1] = (uint32_t)~sp_choose_order(lowest);
    v[2] = good ? 0 : find_bad(b);
    join<3, 1>(b, v);
    scan.key = v[0];
    scan.best = v[0] != 0 ? sp_choose_key_logit(v[0]) : -INFINITY;
    scan.lowest = sp_choose_logit(~(uint32_t)v[1]);
    scan.bad = v[2] != 0 ? (int)~(uint32_t)v[2] : v[0] == 0 ? -2 : -1;
    return scan;
}

static __device__ __forceinline__ u64 sum_softmax(choose_block *b, float best)
{
    u64 sum = 0;

#pragma unroll 2
    for (int i = (int)threadIdx.x * EACH; i < b->n; i += THREADS * EACH) {
        float logit[EACH];

        four_logits(b, i, logit);
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            u64 part = sp_choose_part(sp_exp_softmax(logit[j] - best));

            sum += i + j < b->n ? part : 0;
        }
    }
    join<1, 0>(b, &sum);
    return sum;
}

static __device__ __forceinline__ void change_row(choose_block *b, const sp_cuda_sample_row *row,
                                                  const sp_cuda_sample_change *changes)
{
    for (int i = (int)threadIdx.x; i < row->n_changes; i += THREADS) {
        sp_cuda_sample_change change = changes[row->first_change + i];
        int at = change.token - b->first;

        if (at >= 0 && at < b->n)
            b->logits[at] = sp_choose_change(row, &change, b->logits[at]);
    }
    __syncthreads();
}

static __device__ __forceinline__ void mask_row(choose_block *b, const uint32_t *mask)
{
    for (int i = (int)threadIdx.x; i < b->n; i += THREADS) {
        int id = b->first + i;

        if ((mask[id / 32] >> (id % 32) & 1) == 0 && !sp_choose_is_bad(b->logits[i]))
            b->logits[i] = -INFINITY;
    }
    __syncthreads();
}

/* ---- bins ---------------------------------------------------------------------------------- */

static __device__ __forceinline__ float weight_of(const choose_count &c, float logit)
{
    return sp_exp_scalar((logit - c.best) * c.inverse);
}

static __device__ __forceinline__ bool counts(const choose_count &c, float logit, int id)
{
    return logit >= c.least && (c.limit == 0 || sp_choose_key(logit, id) >= c.limit);
}

/* 0: not counted. */
static __device__ __forceinline__ u64 part_of(const choose_count &c, float logit, int id)
{
    u64 part = c.by_weight ? sp_choose_part(weight_of(c, logit)) : 1;

    return counts(c, logit, id) ? part : 0;
}

/* Whether any of four logits may count. */
static __device__ __forceinline__ bool any_counts(const choose_count &c, const float *logit)
{
    return fmaxf(fmaxf(logit[0], logit[1]), fmaxf(logit[2], logit[3])) >= c.least;
}

/* The bin of this level, or -1: not of the bin that is divided. */
static __device__ __forceinline__ int bin_of(const choose_count &c, const choose_bin &at,
                                             float logit)
{
    float place = (c.best - logit) * c.scale; /* NaN where all are equal: the last bin */
    int bin = (int)fminf(place, (float)(BINS - 1));

    if (at.level == 0)
        return bin;
    if (bin != at.base)
        return -1;
    return (int)fminf((place - (float)bin) * (float)BINS, (float)(BINS - 1));
}

static __device__ __forceinline__ void add_to_bin(choose_shared *s, int bin, u64 part)
{
#pragma unroll
    for (int w = 0; w < WORDS; w++) {
        uint32_t word = (uint32_t)(part >> (w * WORD));

        word = w < WORDS - 1 ? word & ((1u << WORD) - 1) : word;
        if (word > 0)
            atomicAdd(&s->bins[w][bin], word);
    }
}

static __device__ __forceinline__ void fill_bins(choose_block *b, const choose_count &c,
                                                 const choose_bin &at)
{
    for (int i = (int)threadIdx.x; i < WORDS * BINS; i += THREADS)
        (&b->s->bins[0][0])[i] = 0;
    __syncthreads();
    for (int i = (int)threadIdx.x * EACH; i < b->n; i += THREADS * EACH) {
        float logit[EACH];
        u64 part[EACH];

        four_logits(b, i, logit);
        if (!any_counts(c, logit))
            continue;
#pragma unroll
        for (int j = 0; j < EACH; j++)
            part[j] = part_of(c, logit[j], b->first + i + j);
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            int bin = part[j] > 0 ? bin_of(c, at, logit[j]) : -1;

            if (bin >= 0)
                add_to_bin(b->s, bin, part[j]);
        }
    }
    cluster_sync();
}

/* The sum of a bin over all blocks. */
static __device__ __forceinline__ u64 sum_of_bin(const choose_block *b, int bin, int words)
{
    u64 sum = 0;

    for (int w = 0; w < words; w++)
#pragma unroll
        for (int part = 0; part < PARTS; part++)
            sum += (u64)(uint32_t)load_of_block((const int *)&b->s->bins[w][bin], part)
                   << (w * WORD);
    return sum;
}

/* Of this block's own bins, whose sums are in keys: the one where `above` plus them reaches the
 * target, as bin + 1, and what is above it. By the first warp. */
static __device__ __forceinline__ void find_own_bin(choose_block *b, u64 target, u64 above, u64 *v)
{
    int lane = (int)threadIdx.x;
    u64 sum = 0, before;

    for (int i = 0; i < 4; i++)
        sum += b->s->keys[4 * lane + i];
    before = sum;
#pragma unroll
    for (int by = 1; by < SP_WARP; by *= 2) {
        u64 other = __shfl_up_sync(0xffffffffu, before, by);

        before += lane >= by ? other : 0;
    }
    above += before - sum;
    for (int i = 0; i < 4; i++) {
        u64 own = b->s->keys[4 * lane + i];

        if (above < target && above + own >= target) {
            v[0] = (u64)(b->part * OWN + 4 * lane + i + 1);
            v[1] = above;
        }
        above += own;
    }
}

/* The bin of a level that the target falls in; at->above is what is better than all its bins. With
 * share below 1 the target is that share of all parts, else *target. */
static __device__ __noinline__ void find_bin(choose_block *b, const choose_count &c, double share,
                                             u64 *target, choose_bin *at)
{
    u64 v[2] = {0, 0}, own = 0, above = at->above, here = 0, all = 0;

    fill_bins(b, c, *at);
    if (threadIdx.x < OWN) {
        own = sum_of_bin(b, b->part * OWN + (int)threadIdx.x, c.by_weight ? WORDS : 1);
        b->s->keys[threadIdx.x] = own;
    }
    publish<1, 0>(b, &own);
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
        u64 sum = published(b, 0, part);

        above += part < b->part ? sum : 0;
        here = part == b->part ? sum : here;
        all += sum;
    }
    b->turn ^= 1;
    if (share < 1)
        *target = sp_choose_target(share, all);
    if (threadIdx.x < SP_WARP && above < *target && above + here >= *target)
        find_own_bin(b, *target, above, v);
    join<2, 1>(b, v);
    at->bin = (int)v[0] - 1;
    at->above = v[1];
}

/* ---- list ---------------------------------------------------------------------------------- */

static __device__ __forceinline__ void list_key(choose_shared *s, u64 key)
{
    uint32_t place = atomicAdd(&s->n_list, 1u);

    if (place < LIST)
        s->list[place] = key;
}

/* Collects the counted tokens of a bin, and with `better` those of better bins, into keys of every
 * block; returns their number, above LIST if there are too many. */
static __device__ __noinline__ int collect(choose_block *b, const choose_count &c,
                                           const choose_bin &at, bool better)
{
    int own[PARTS], n = 0;
    u64 total;

    if (threadIdx.x == 0)
        b->s->n_list = 0;
    __syncthreads();
    for (int i = (int)threadIdx.x * EACH; i < b->n; i += THREADS * EACH) {
        float logit[EACH];

        four_logits(b, i, logit);
        if (!any_counts(c, logit))
            continue;
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            int bin = bin_of(c, at, logit[j]), id = b->first + i + j;

            if ((better ? bin >= 0 && bin <= at.bin : bin == at.bin) && counts(c, logit[j], id))
                list_key(b->s, sp_choose_key(logit[j], id));
        }
    }
    __syncthreads();
    total = threadIdx.x == 0 ? b->s->n_list : 0;
    join<1, 0>(b, &total);
    if (total > LIST)
        return LIST + 1;
#pragma unroll
    for (int part = 0; part < PARTS; part++)
        own[part] = load_of_block((const int *)&b->s->n_list, part);
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
        if ((int)threadIdx.x < own[part])
            b->s->keys[n + threadIdx.x] = load_long_of_block(&b->s->list[threadIdx.x], part);
        n += own[part];
    }
    cluster_sync(); /* the lists are free again */
    return n;
}

static __device__ __forceinline__ u64 listed_part(const choose_count &c, u64 key)
{
    return part_of(c, sp_choose_key_logit(key), sp_choose_key_id(key));
}

/* The key of n listed ones at which the parts, best first, reach the target. */
static __device__ __forceinline__ u64 cut_list(choose_block *b, const choose_count &c, u64 target,
                                               u64 above, int n)
{
    int i = (int)threadIdx.x;
    u64 key = i < n ? b->s->keys[i] : 0, better = above, part = 0;

    if (i < n) {
        part = listed_part(c, key);
        b->s->parts[i] = part;
    }
    __syncthreads();
    for (int j = 0; i < n && j < n; j++)
        better += b->s->keys[j] > key ? b->s->parts[j] : 0;
    if (i < n && better < target && better + part >= target)
        b->s->cut = key;
    __syncthreads();
    key = b->s->cut;
    __syncthreads();
    return key;
}

/* The same of all tokens, bit by bit: the largest key from which on the parts reach the target. */
static __device__ __forceinline__ u64 cut_by_bits(choose_block *b, const choose_count &c,
                                                  u64 target)
{
    u64 cut = 0;

    for (int bit = 63; bit >= 0; bit--) {
        u64 trial = cut | 1ull << bit, sum = 0;

        for (int i = (int)threadIdx.x; i < b->n; i += THREADS) {
            float logit = b->logits[i];
            u64 part = part_of(c, logit, b->first + i);

            sum += sp_choose_key(logit, b->first + i) >= trial ? part : 0;
        }
        join<1, 0>(b, &sum);
        cut = sum >= target ? trial : cut;
    }
    return cut;
}

/* The key of the last token that is kept, which is in bin `at` of level 0. */
static __device__ __noinline__ u64 find_cut(choose_block *b, const choose_count &c, u64 target,
                                            choose_bin at)
{
    int n = collect(b, c, at, false);

    if (n > LIST) {
        at.level = 1;
        at.base = at.bin;
        find_bin(b, c, 1, &target, &at);
        n = collect(b, c, at, false);
    }
    return n <= LIST ? cut_list(b, c, target, at.above, n) : cut_by_bits(b, c, target);
}

/* ---- the steps of a choice ----------------------------------------------------------------- */

static __device__ __forceinline__ choose_count count_of(const choose_scan &scan, bool by_weight,
                                                        float inverse, u64 limit)
{
    choose_count c = {by_weight, limit,   -INFINITY,
                      scan.best, inverse, (float)BINS / (scan.best - scan.lowest)};

    if (by_weight) {
        c.scale = fmaxf(c.scale, (float)BINS / FARTHEST * inverse);
        c.least = scan.best - FARTHEST / inverse;
    }
    if (limit != 0)
        c.least = fmaxf(c.least, sp_choose_key_logit(limit));
    return c;
}

/* The best ids, best first. */
static __device__ __forceinline__ void tell_top(choose_block *b, const sp_cuda_sample &a, int row,
                                                int n_top, const choose_scan &scan)
{
    choose_count c = count_of(scan, false, 0.0f, 0);
    choose_bin at = {0, 0, 0, 0};
    u64 target = (u64)min(n_top, a.vocab), key;
    int i = (int)threadIdx.x, n, rank = 0;

    find_bin(b, c, 1, &target, &at);
    n = collect(b, c, at, true);
    if (n > LIST) {
        c = count_of(scan, false, 0.0f, find_cut(b, c, target, at));
        at = {0, 0, BINS - 1, 0};
        n = collect(b, c, at, true);
    }
    if (b->part == 0 && i < n) {
        key = b->s->keys[i];
        for (int j = 0; j < n; j++)
            rank += b->s->keys[j] > key;
        if (rank < (int)target) {
            a.top_token[row * SP_CUDA_SAMPLE_TOP_MAX + rank] = sp_choose_key_id(key);
            a.top_logit[row * SP_CUDA_SAMPLE_TOP_MAX + rank] = sp_choose_key_logit(key);
        }
    }
    __syncthreads();
}

/* Draws from n listed tokens, of which the k best count and then the best up to the target. Where
 * top_p is below 1 and the target is 0, it is that share of the k best. Every block does the same.
 */
static __device__ __forceinline__ int draw_from_list(choose_block *b, const choose_count &c, int n,
                                                     int k, u64 target)
{
    choose_shared *s = b->s;
    const sp_cuda_sample_row *row = &s->row;
    int i = (int)threadIdx.x, rank = 0, id = -1;
    u64 key = i < n ? s->keys[i] : 0, part = 0, better = 0, mass = 0, before = 0, point;
    float weight = 0.0f;

    for (int j = 0; i < n && j < n; j++)
        rank += s->keys[j] > key;
    if (i < n && rank < k) {
        weight = weight_of(c, sp_choose_key_logit(key));
        part = sp_choose_part(weight);
        id = sp_choose_key_id(key);
    }
    if (i < n)
        s->parts[i] = part;
    __syncthreads();
    for (int j = 0; i < n && j < n; j++) {
        mass += s->parts[j];
        better += s->keys[j] > key ? s->parts[j] : 0;
    }
    if (row->top_p < 1 && target == 0)
        target = sp_choose_target(row->top_p, mass);
    if ((row->top_p < 1 && better >= target) || weight < row->min_p)
        part = 0;
    __syncthreads();
    if (i < n)
        s->parts[i] = part;
    __syncthreads();
    mass = 0;
    for (int j = 0; i < n && j < n; j++) {
        mass += s->parts[j];
        before += sp_choose_key_id(s->keys[j]) < id ? s->parts[j] : 0;
    }
    point = sp_choose_point(mass, row->random);
    if (part > 0 && before <= point && point < before + part)
        s->token = id;
    __syncthreads();
    return s->token;
}

/* What a token has of the mass that is drawn from. */
static __device__ __forceinline__ u64 drawn_part(const choose_block *b, const choose_count &c,
                                                 float min_p, int i)
{
    float logit = b->logits[i], weight;

    if (!counts(c, logit, b->first + i))
        return 0;
    weight = weight_of(c, logit);
    return weight >= min_p ? sp_choose_part(weight) : 0;
}

static __device__ __forceinline__ u64 sum_before_lane(u64 own)
{
    int lane = (int)threadIdx.x % SP_WARP;
    u64 sum = own;

#pragma unroll
    for (int by = 1; by < SP_WARP; by *= 2) {
        u64 other = __shfl_up_sync(0xffffffffu, sum, by);

        sum += lane >= by ? other : 0;
    }
    return sum - own;
}

/* The id in [from, to) at which the running sum passes the point; by all lanes of a warp. */
static __device__ __forceinline__ int draw_between(const choose_block *b, const choose_count &c,
                                                   int from, int to, u64 sum, u64 point)
{
    int lane = (int)threadIdx.x % SP_WARP;

    for (int i = from; i < to; i += SP_WARP) {
        u64 own = i + lane < to ? drawn_part(b, c, b->s->row.min_p, i + lane) : 0;
        u64 up_to = sum + sum_before_lane(own) + own;
        unsigned found = __ballot_sync(0xffffffffu, up_to > point);

        if (found != 0)
            return b->first + i + __ffs((int)found) - 1;
        sum = __shfl_sync(0xffffffffu, up_to, SP_WARP - 1);
    }
    return -1;
}

/* The drawn token, in every thread. A warp has neighbouring ids, and so has a lane. */
static __device__ __forceinline__ int draw(choose_block *b, const choose_count &c)
{
    int warp = (int)threadIdx.x / SP_WARP;
    int each = ((b->n + THREADS - 1) / THREADS) | 1; /* odd: no two lanes at one bank */
    int from = min(b->n, (int)threadIdx.x * each), to = min(b->n, from + each), token = -1;
    u64 own = 0, mass = 0, before = 0, point, v;

#pragma unroll 4
    for (int i = from; i < to; i++)
        own += drawn_part(b, c, b->s->row.min_p, i);
    publish<1, 0>(b, &own);
    for (int part = 0; part < PARTS; part++) {
        u64 sum = published(b, 0, part);

        before += part < b->part ? sum : 0;
        mass += sum;
    }
    b->turn ^= 1;
    point = sp_choose_point(mass, b->s->row.random);
    for (int i = 0; i < warp; i++)
        before += b->s->warp[0][i];
    if (before <= point && point < before + b->s->warp[0][warp]) {
        u64 lane_before = before + sum_before_lane(own);
        bool mine = lane_before <= point && point < lane_before + own;
        int owner = __ffs((int)__ballot_sync(0xffffffffu, mine)) - 1;

        token = draw_between(b, c, __shfl_sync(0xffffffffu, from, owner),
                             __shfl_sync(0xffffffffu, to, owner),
                             __shfl_sync(0xffffffffu, lane_before, owner), point);
    }
    __syncthreads(); /* warp[] was read */
    v = (u64)(token + 1);
    join<1, 1>(b, &v);
    return (int)v - 1;
}

/* Few tokens are left in most cases: they are drawn from a list, else from the row. */
static __device__ __forceinline__ int choose_token(choose_block *b, int vocab,
                                                   const choose_scan &scan)
{
    const sp_cuda_sample_row *row = &b->s->row;
    choose_count c = count_of(scan, true, row->inverse, 0);
    choose_bin at = {0, 0, 0, 0};
    u64 target = (u64)row->top_k;
    int n;

    if (!(row->inverse > 0) || row->top_k == 1)
        return sp_choose_key_id(scan.key);
    if (row->top_k > 0 && row->top_k < vocab) {
        choose_count ones = count_of(scan, false, 0.0f, 0);

        find_bin(b, ones, 1, &target, &at);
        n = row->top_k <= LIST ? collect(b, ones, at, true) : LIST + 1;
        if (n <= LIST)
            return draw_from_list(b, c, n, row->top_k, 0);
        c = count_of(scan, true, row->inverse, find_cut(b, ones, target, at));
    }
    if (row->top_p < 1) {
        at = {0, 0, 0, 0};
        find_bin(b, c, row->top_p, &target, &at);
        n = collect(b, c, at, true);
        if (n <= LIST)
            return draw_from_list(b, c, n, n, target);
        c = count_of(scan, true, row->inverse, find_cut(b, c, target, at));
    }
    return draw(b, c);
}

/* ---- kernel -------------------------------------------------------------------------------- */

template <int VEC>
__global__ void __launch_bounds__(THREADS, 2) choose_kernel(const sp_cuda_sample a)
{
    extern __shared__ __align__(16) char shared[];
    int index = (int)blockIdx.y, slice = (a.vocab + 4 * PARTS - 1) / (4 * PARTS) * 4;
    const float *logits = a.logits + index * a.stride;
    choose_block b = {(choose_shared *)shared,
                      (float *)(shared + sizeof(choose_shared)),
                      0,
                      0,
                      (int)blockIdx.x,
                      0};
    sp_cuda_sample_result result = {0, 0.0f, 0.0f, -1, -1};
    const sp_cuda_sample_row *row = &b.s->row;
    choose_scan scan;

    release_successor();
    wait_predecessor();
    if (a.row[index].given == SP_CUDA_SAMPLE_NO_ROW)
        return;
    if (threadIdx.x == 0)
        b.s->row = a.row[index];
    b.first = min(a.vocab, b.part * slice);
    b.n = min(slice, a.vocab - b.first);
    load_logits<VEC>(&b, logits);
    scan = scan_row(&b);
    result.bad = scan.bad;
    result.best = scan.best;
    if (scan.bad == -1 && row->n_top >= 0)
        result.mass = sum_softmax(&b, scan.best);
    if (scan.bad == -1 && row->n_top > 0)
        tell_top(&b, a, index, row->n_top, scan);
    result.token = row->given;
    if (scan.bad == -1 && row->given < 0) {
        if (row->n_changes > 0 || row->mask > 0) {
            change_row(&b, row, a.changes);
            if (row->mask > 0)
                mask_row(&b, a.masks + (int64_t)(row->mask - 1) * ((a.vocab + 31) / 32));
            scan = scan_row(&b);
            result.bad = scan.bad;
        }
        if (scan.bad == -1)
            result.token = choose_token(&b, a.vocab, scan);
    }
    if (result.bad != -1)
        result.token = -1;
    if (b.part == 0 && threadIdx.x == 0) {
        result.logit = result.token >= 0 ? logits[result.token] : 0.0f;
        a.result[index] = result;
    }
    cluster_sync(); /* no block leaves while another one reads its memory */
}

/* ---- launch -------------------------------------------------------------------------------- */

static size_t shared_bytes(int vocab)
{
    return sizeof(choose_shared) + (size_t)((vocab + 4 * PARTS - 1) / (4 * PARTS) * 4) * 4;
}

static cudaLaunchConfig_t config_of(const sp_cuda_sample &a, cudaLaunchAttribute *attributes,
                                    cudaStream_t stream)
{
    dim3 grid(PARTS, (unsigned)a.rows);
    cudaLaunchConfig_t config =
        sp_cuda_overlapping(grid, THREADS, shared_bytes(a.vocab), &attributes[1], false, stream);

    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim.x = PARTS;
    attributes[0].val.clusterDim.y = 1;
    attributes[0].val.clusterDim.z = 1;
    config.attrs = attributes;
    config.numAttrs += 1;
    return config;
}

template <int VEC> static cudaError_t launch(const sp_cuda_sample &a, cudaStream_t stream)
{
    cudaLaunchAttribute attributes[2];
    cudaLaunchConfig_t config = config_of(a, attributes, stream);
    cudaFuncAttributes kernel;
    cudaError_t code = cudaFuncGetAttributes(&kernel, choose_kernel<VEC>);

    if (code != cudaSuccess)
        return code;
    if (!sp_cuda_overlaps() || /* code without clusters */
        (size_t)kernel.maxDynamicSharedSizeBytes < config.dynamicSmemBytes)
        return cudaErrorNotSupported;
    return a.rows == 0 ? cudaSuccess : cudaLaunchKernelEx(&config, choose_kernel<VEC>, a);
}

cudaError_t sp_cuda_choose_init(int gpu)
{
    int most = 0;
    cudaError_t code = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, gpu);

    code = code == cudaSuccess
               ? cudaFuncSetAttribute(choose_kernel<0>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      most)
               : code;
    return code == cudaSuccess
               ? cudaFuncSetAttribute(choose_kernel<1>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      most)
               : code;
}

extern "C" int sp_cuda_sample_rows(int gpu, const sp_cuda_sample *sample, void *stream)
{
    bool vec = (uintptr_t)sample->logits % 16 == 0 && sample->stride % 4 == 0;
    sp_cuda_current current(gpu);

    if (current.code != cudaSuccess)
        return (int)current.code;
    if (sample->vocab < 1 || sample->vocab > SP_CUDA_SAMPLE_VOCAB_MAX)
        return (int)cudaErrorInvalidValue;
    return (int)(vec ? launch<1>(*sample, (cudaStream_t)stream)
                     : launch<0>(*sample, (cudaStream_t)stream));
}
