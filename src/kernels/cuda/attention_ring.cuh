/*
 * attention_ring.cuh: the ring in shared memory through which a block of attention reads keys and
 * values. One warp fills its slots, K, V, K, V, ... of the key tiles in order, with bulk copies
 * from sm_90 on and with 16-byte copies before; the warps that compute wait for a slot, read it and
 * release it.
 *
 * A slot holds a tile, or half a tile for D = 256: 16 or 32 KiB, the atoms of its pages one after
 * the other, so that the 8 keys of group n begin at n * GROUP_BYTES.
 */
#ifndef SP_KERNELS_CUDA_ATTENTION_RING_CUH
#define SP_KERNELS_CUDA_ATTENTION_RING_CUH

#include "kernels/cuda/attention.cuh"
#include "kernels/cuda/bulk.cuh"

#define RING_SLOTS_MAX 8
#define ATOM_BYTES     1024 /* 8 keys by 64 dimensions */

template <int D> struct ring_of {
    static constexpr int PARTS = D > 128 ? 2 : 1; /* slots of a tile */
    static constexpr int PAGES = TILE_PAGES / PARTS;
    static constexpr int GROUPS = KEY_GROUPS / PARTS;
    static constexpr int GROUP_BYTES = D / 64 * ATOM_BYTES;
    static constexpr int PAGE_BYTES = 2 * GROUP_BYTES;
    static constexpr int SLOT_BYTES = PAGES * PAGE_BYTES;
};

#if __CUDA_ARCH__ >= 900
#define FILLERS 1 /* arrivals that a full slot has beside its bytes */
#else
#define FILLERS SP_WARP
#endif

static_assert(ring_of<64>::PAGE_BYTES == SP_CUDA_PAGE * 64 * 2, "a page is 2 rows of atoms");
static_assert(TILE_PAGES <= SP_WARP, "a lane copies a page");

typedef struct key_ring {
    uint32_t memory, full, empty; /* shared addresses; a barrier per slot */
    int slots, slot, parity;
} key_ring;

static __device__ __forceinline__ void ring_advance(key_ring *ring)
{
    if (++ring->slot == ring->slots) {
        ring->slot = 0;
        ring->parity ^= 1;
    }
}

/* By one thread, before the block's first barrier. `readers`: warps that release a slot. */
static __device__ __forceinline__ void ring_init(const key_ring &ring, int readers)
{
    for (int i = 0; i < ring.slots; i++) {
        barrier_init(ring.full + 8 * i, FILLERS);
        barrier_init(ring.empty + 8 * i, readers * SP_WARP);
    }
#if __CUDA_ARCH__ >= 900
    barrier_init_done();
#endif
}

/* A slot that a warp reads: shared addresses of its memory and barriers. */
typedef struct ring_slot {
    uint32_t memory, full, empty;
    int parity;
} ring_slot;

/* The next slot; the ring advances. */
template <int D> static __device__ __forceinline__ ring_slot ring_take(key_ring *ring)
{
    ring_slot slot = {ring->memory + ring->slot * ring_of<D>::SLOT_BYTES,
                      ring->full + 8 * ring->slot, ring->empty + 8 * ring->slot, ring->parity};

    ring_advance(ring);
    return slot;
}

/* Waits for the slot's keys or values. */
static __device__ __forceinline__ void ring_wait(const ring_slot &slot)
{
    barrier_wait(slot.full, slot.parity);
}

/* By a whole warp that has read the slot with ldmatrix. Without the fence the next bulk copy can
 * overtake reads that are still in flight. */
static __device__ __forceinline__ void ring_release(const ring_slot &slot)
{
#if __CUDA_ARCH__ >= 900
    copies_before_bulk();
#endif
    barrier_arrive(slot.empty);
}

/* ---- filling ------------------------------------------------------------------------------- */

/* The pages of one block: where the filling warp copies from. */
typedef struct page_source {
    const char *keys, *values, *zeros; /* keys and values of the kv head */
    const int32_t *pages;              /* of the sequence */
    int64_t page_bytes;                /* from one page to the next */
    int last;                          /* position of the last key that any row sees */
} page_source;

/* The lane's page of a tile; -1: it has no key of the block. */
static __device__ __forceinline__ int page_of(const page_source &from, int tile, int tile_end)
{
    int page = tile * TILE_PAGES + (int)(threadIdx.x & (TILE_PAGES - 1));

    return tile < tile_end && page * SP_CUDA_PAGE <= from.last ? from.pages[page] : -1;
}

#if __CUDA_ARCH__ >= 900

/* Of a page with `keys` < SP_CUDA_PAGE keys: those, and zeros for the rest. P of a masked key is 0,
 * and 0 * NaN is NaN. */
template <int D>
static __device__ __forceinline__ void copy_part_of_page(uint32_t to, const char *from,
                                                         const char *zeros, int keys,
                                                         uint32_t barrier)
{
    for (int atom = 0; atom < 2 * (D / 64); atom++) {
        int valid = min(max(keys - 8 * (atom / (D / 64)), 0), 8) * 128, at = atom * ATOM_BYTES;

        if (valid > 0)
            bulk_load(to + at, from + at, valid, barrier);
        if (valid < ATOM_BYTES)
            bulk_load(to + at + valid, zeros, ATOM_BYTES - valid, barrier);
    }
}

/* Copies part `part` of a tile into a slot that is empty. `keys` of the lane's page are valid;
 * `values`: the others must be zeros, whereas scores of K beyond the end are masked. */
template <int D>
static __device__ __forceinline__ void copy_pages(uint32_t slot, uint32_t full,
                                                  const page_source &from, int part, int page,
                                                  int keys, bool values)
{
    using R = ring_of<D>;
    int lane = threadIdx.x & 31;
    uint32_t to = slot + lane % R::PAGES * R::PAGE_BYTES;
    const char *source = (values ? from.values : from.keys) + page * from.page_bytes;

    if (lane == 0) {
        barrier_expect(full, R::SLOT_BYTES);
        barrier_arrive(full);
    }
    __syncwarp();
    if (lane / R::PAGES != part)
        return;
    if (page < 0)
        bulk_load(to, from.zeros, R::PAGE_BYTES, full);
    else if (!values || keys >= SP_CUDA_PAGE)
        bulk_load(to, source, R::PAGE_BYTES, full);
    else
        copy_part_of_page<D>(to, source, from.zeros, keys, full);
}

#else

/* The same, 16 bytes at a time. */
template <int D>
static __device__ __forceinline__ void copy_pages(uint32_t slot, uint32_t full,
                                                  const page_source &from, int part, int page,
                                                  int keys, bool values)
{
    using R = ring_of<D>;
    int lane = threadIdx.x & 31;

    for (int i = 0; i < R::PAGES; i++) {
        int number = __shfl_sync(~0u, page, part * R::PAGES + i);
        int valid = __shfl_sync(~0u, keys, part * R::PAGES + i);
        const char *source = (values ? from.values : from.keys) + number * from.page_bytes;

#pragma unroll 4
        for (int at = lane * 16; at < R::PAGE_BYTES; at += SP_WARP * 16) {
            int key = at / R::GROUP_BYTES * 8 + at % ATOM_BYTES / 128;
            bool copied = number >= 0 && (!values || key < valid);

            copy_async_if(slot + i * R::PAGE_BYTES + at, copied ? source + at : from.zeros, copied);
        }
    }
    barrier_arrive_after_copies(full);
}

#endif

/* Fills the next slot. */
template <int D>
static __device__ __forceinline__ void fill_slot(key_ring *ring, const page_source &from, int part,
                                                 int page, int keys, bool values)
{
    barrier_wait(ring->empty + 8 * ring->slot, ring->parity ^ 1);
    copy_pages<D>(ring->memory + ring->slot * ring_of<D>::SLOT_BYTES, ring->full + 8 * ring->slot,
                  from, part, page, keys, values);
    ring_advance(ring);
}

/* By one whole warp: all tiles of a piece. The next tile's pages are loaded before the waits. */
template <int D>
static __device__ __forceinline__ void fill_ring(key_ring *ring, const page_source &from, int tile,
                                                 int tile_end)
{
    int page = page_of(from, tile, tile_end);

    for (; tile < tile_end; tile++) {
        int first = tile * ATTENTION_TILE + (int)(threadIdx.x & (TILE_PAGES - 1)) * SP_CUDA_PAGE;
        int next = page_of(from, tile + 1, tile_end);

        for (int part = 0; part < ring_of<D>::PARTS; part++)
            fill_slot<D>(ring, from, part, page, from.last - first + 1, false);
        for (int part = 0; part < ring_of<D>::PARTS; part++)
            fill_slot<D>(ring, from, part, page, from.last - first + 1, true);
        page = next;
    }
#if __CUDA_ARCH__ < 900
    copy_commit();
    copy_wait<0>();
#endif
}

template <int D>
static __device__ __forceinline__ page_source source_of(const attention_args &args,
                                                        const attention_piece &piece, int head)
{
    const sp_cuda_attention &a = args.a;
    int64_t at = (int64_t)head * ring_of<D>::PAGE_BYTES;

    return {(const char *)a.keys + at,
            (const char *)a.values + at,
            (const char *)args.zeros,
            a.step.pages + piece.page,
            (int64_t)a.shape.kv_heads * ring_of<D>::PAGE_BYTES,
            piece.position + piece.rows - 1};
}

/* ---- items --------------------------------------------------------------------------------- */

/* Of blocks that take items in turn: item i is piece i / kv_heads of the plan and kv head i %
 * kv_heads. The filling warp takes the block's number first and then whatever is next in the
 * launch, so it has filled the ring for the next item when the others end this one. */
typedef struct item_queue {
    uint64_t full[2], empty[2];
    attention_piece piece[2];
    int head[2]; /* -1: no more */
} item_queue;

/* By one thread, before the block's first barrier. */
static __device__ __forceinline__ void queue_init(item_queue *queue, int readers)
{
    for (int i = 0; i < 2; i++) {
        barrier_init(shared_address(&queue->full[i]), 1);
        barrier_init(shared_address(&queue->empty[i]), readers * SP_WARP);
    }
}

/* By the filling warp: number `n` of the block's items. */
static __device__ __forceinline__ void queue_put(item_queue *queue, int n,
                                                 const attention_piece &piece, int head)
{
    int at = n % 2;

    barrier_wait(shared_address(&queue->empty[at]), n / 2 % 2 ^ 1);
    if ((threadIdx.x & 31) == 0) {
        queue->piece[at] = piece;
        queue->head[at] = head;
        barrier_arrive(shared_address(&queue->full[at]));
    }
    __syncwarp();
}

/* By a warp that computes; returns the head, or -1. */
static __device__ __forceinline__ int queue_take(item_queue *queue, int n, attention_piece *out)
{
    int at = n % 2, head;

    barrier_wait(shared_address(&queue->full[at]), n / 2 % 2);
    *out = queue->piece[at];
    head = queue->head[at];
    barrier_arrive(shared_address(&queue->empty[at]));
    return head;
}

/* By one whole warp: all that the block works on. */
template <int D>
static __device__ __forceinline__ void fill_items(key_ring *ring, item_queue *queue,
                                                  const attention_args &args,
                                                  const attention_core &core)
{
    int kv_heads = args.a.shape.kv_heads, items = core.counts->pieces * kv_heads;
    int item = (int)blockIdx.x;
    attention_piece piece = {};

    for (int n = 0;; n++) {
        bool more = item < items;
        int head = more ? item % kv_heads : -1;

        if (more)
            piece = core.pieces[item / kv_heads];
        queue_put(queue, n, piece, head);
        if (!more)
            break;
        fill_ring<D>(ring, source_of<D>(args, piece, head), piece.tile, piece.tile_end);
        if ((threadIdx.x & 31) == 0)
            item = (int)gridDim.x + atomicAdd(&core.counts->taken, 1);
        item = __shfl_sync(~0u, item, 0);
    }
}

#endif
