/*
 * attention_world.h: sequences of random queries, keys and values, their cache on the GPU in pages
 * of any order, and steps over them: for the test and the bench of paged attention. The host keeps
 * what it wrote, to compute the same in double.
 */
#ifndef SP_TESTS_CUDA_ATTENTION_WORLD_H
#define SP_TESTS_CUDA_ATTENTION_WORLD_H

#include "base/half.h"
#include "cuda/rig.h"
#include "kernels/cuda/cache_layout.h"

#include <math.h>
#include <stdio.h>

#define WORLD_SEQUENCES_MAX 8
#define WORLD_SPARE_PAGES   7 /* that no sequence has */
#define WORLD_GUARD_ROWS    8 /* of y, beyond what is launched */

typedef struct world_span {
    int32_t sequence, first, rows; /* position of the first row */
} world_span;

typedef struct world {
    sp_device *device;
    sp_cuda_kernels kernels;
    sp_cuda_ops_kernels ops;
    int gpu;
    void *stream;
    sp_cuda_attention call;
    int32_t n_sequences, length[WORLD_SEQUENCES_MAX];
    int32_t first_page[WORLD_SEQUENCES_MAX]; /* in `pages` */
    uint16_t *q[WORLD_SEQUENCES_MAX];        /* bf16 [length, q_heads, head_dim] */
    uint16_t *k[WORLD_SEQUENCES_MAX], *v[WORLD_SEQUENCES_MAX]; /* [length, kv_heads, head_dim] */
    int32_t n_pages, *pages;                                   /* numbers, sequence by sequence */
    int32_t *tables; /* the step's, as they are on the device */
    size_t tables_bytes;
    void *device_tables;
    uint16_t *step_q, *step_y; /* [rows_max, q_heads, head_dim] */
    uint32_t random;
    bool say_wide; /* launch for long spans even where a step has none */
    int failed;    /* any call */
} world;

static inline uint32_t world_next(world *w)
{
    return w->random = rig_hash(w->random + 0x9e3779b9u);
}

/* About N(0, size). */
static inline uint16_t world_number(world *w, float size)
{
    uint32_t a = world_next(w), b = world_next(w);
    float sum = (float)(a & 0xffffu) + (float)(a >> 16) + (float)(b & 0xffffu) + (float)(b >> 16);

    return sp_f32_to_bf16((sum - 131070.0f) / 37837.0f * size);
}

static inline size_t world_row(const world *w)
{
    return (size_t)w->call.shape.q_heads * (size_t)w->call.shape.head_dim;
}

static inline uint16_t *world_numbers(world *w, size_t n, float size)
{
    uint16_t *numbers = calloc(n + 1, sizeof *numbers);

    for (size_t i = 0; i < n; i++)
        numbers[i] = world_number(w, size);
    return numbers;
}

static inline void *world_alloc(world *w, size_t bytes)
{
    void *memory = NULL;

    w->failed |= sp_device_alloc(w->device, bytes, &memory, NULL) != SP_OK;
    return memory;
}

static inline int32_t world_pages_of(int32_t length)
{
    return (length + SP_CUDA_PAGE - 1) / SP_CUDA_PAGE;
}

static inline size_t world_cache_elements(const world *w)
{
    return (size_t)w->n_pages * (size_t)w->call.shape.kv_heads * SP_CUDA_PAGE *
           (size_t)sp_cuda_page_dim(w->call.shape.head_dim);
}

/* Deals the pages out anew, in random order. */
static inline void world_shuffle(world *w)
{
    for (int32_t i = 0; i < w->n_pages; i++)
        w->pages[i] = i;
    for (int32_t i = w->n_pages - 1; i > 0; i--) {
        int32_t j = (int32_t)(world_next(w) % (uint32_t)(i + 1)), page = w->pages[i];

        w->pages[i] = w->pages[j];
        w->pages[j] = page;
    }
}

/* One token of one sequence into a cache in host memory. */
static inline void world_store(const world *w, uint16_t *cache, const uint16_t *tokens,
                               int32_t sequence, int32_t position)
{
    const sp_cuda_attention_shape *s = &w->call.shape;
    int32_t dim = sp_cuda_page_dim(s->head_dim);
    int32_t page = w->pages[w->first_page[sequence] + position / SP_CUDA_PAGE];

    for (int32_t h = 0; h < s->kv_heads; h++) {
        uint16_t *to =
            cache + ((size_t)page * (size_t)s->kv_heads + (size_t)h) * (size_t)(SP_CUDA_PAGE * dim);
        const uint16_t *from =
            tokens + ((size_t)position * (size_t)s->kv_heads + (size_t)h) * (size_t)s->head_dim;

        for (int32_t d = 0; d < dim; d++)
            to[sp_cuda_cache_offset(dim, position % SP_CUDA_PAGE, d)] =
                d < s->head_dim ? from[d] : 0;
    }
}

/* The first `positions` of each sequence (NULL: all) stand in the cache; all else is NaN. */
static inline void world_write_cache(world *w, const int32_t *positions)
{
    size_t bytes = world_cache_elements(w) * sizeof(uint16_t);
    uint16_t *keys = malloc(bytes), *values = malloc(bytes);

    memset(keys, 0xff, bytes);
    memset(values, 0xff, bytes);
    for (int32_t s = 0; s < w->n_sequences; s++)
        for (int32_t p = 0; p < (positions != NULL ? positions[s] : w->length[s]); p++) {
            world_store(w, keys, w->k[s], s, p);
            world_store(w, values, w->v[s], s, p);
        }
    w->failed |=
        sp_device_write(w->device, (void *)(uintptr_t)w->call.keys, keys, bytes, NULL) != SP_OK;
    w->failed |=
        sp_device_write(w->device, (void *)(uintptr_t)w->call.values, values, bytes, NULL) != SP_OK;
    free(keys);
    free(values);
}

static inline sp_status world_start(world *w, sp_device *device, sp_error *error)
{
    sp_status status;

    *w = (world){.device = device, .random = 1};
    w->gpu = sp_device_cuda_index(device);
    w->stream = sp_stream_native(sp_device_main_stream(device));
    status = sp_kernels_cuda_get(device, &w->kernels, error);
    return status == SP_OK ? sp_ops_cuda_get(device, &w->ops, error) : status;
}

/* Scratch, queries and the step's tables, for shape's rows_max and spans_max. */
static inline void world_make_step(world *w)
{
    const sp_cuda_attention_shape *s = &w->call.shape;
    size_t rows = (size_t)s->rows_max, spans = (size_t)s->spans_max, bytes = 0;
    size_t row_bytes = world_row(w) * sizeof(uint16_t);

    w->failed |= w->ops.attention_bytes(w->gpu, s, &bytes);
    w->call.scratch = world_alloc(w, bytes);
    w->failed |= sp_device_zero(w->device, w->call.scratch, bytes, NULL) != SP_OK;
    w->call.q = world_alloc(w, rows * row_bytes);
    w->call.y = world_alloc(w, rows * row_bytes);
    w->step_q = calloc(rows, row_bytes);
    w->step_y = calloc(rows, row_bytes);
    w->tables_bytes = (2 + 3 * rows + 2 * spans + 1) * sizeof(int32_t);
    w->tables = calloc(1, w->tables_bytes);
    w->device_tables = world_alloc(w, w->tables_bytes);
    w->call.step.counts = w->device_tables;
    w->call.step.token = w->call.step.counts + 2;
    w->call.step.position = w->call.step.token + rows;
    w->call.step.row_span = w->call.step.position + rows;
    w->call.step.span_row = w->call.step.row_span + rows;
    w->call.step.span_page = w->call.step.span_row + spans + 1;
}

static inline void world_write_pages(world *w)
{
    w->failed |= sp_device_write(w->device, (void *)(uintptr_t)w->call.step.pages, w->pages,
                                 (size_t)w->n_pages * sizeof(int32_t), NULL) != SP_OK;
}

/* After world_start. `size`: of the queries; larger ones make P uneven. */
static inline void world_make(world *w, const sp_cuda_attention_shape *shape,
                              const int32_t *lengths, int32_t n, float size)
{
    size_t bytes;

    w->call = (sp_cuda_attention){.shape = *shape};
    w->n_sequences = n;
    w->n_pages = 0;
    for (int32_t s = 0; s < n; s++) {
        size_t rows = (size_t)lengths[s], kv = (size_t)(shape->kv_heads * shape->head_dim);

        w->length[s] = lengths[s];
        w->first_page[s] = w->n_pages;
        w->n_pages += world_pages_of(lengths[s]);
        w->q[s] = world_numbers(w, rows * world_row(w), size);
        w->k[s] = world_numbers(w, rows * kv, 1.0f);
        w->v[s] = world_numbers(w, rows * kv, 1.0f);
    }
    w->n_pages += WORLD_SPARE_PAGES;
    w->pages = calloc((size_t)w->n_pages, sizeof *w->pages);
    bytes = world_cache_elements(w) * sizeof(uint16_t);
    w->call.keys = world_alloc(w, bytes);
    w->call.values = world_alloc(w, bytes);
    w->call.step.pages = world_alloc(w, (size_t)w->n_pages * sizeof(int32_t));
    world_make_step(w);
    world_shuffle(w);
    world_write_pages(w);
    world_write_cache(w, NULL);
}

static inline void world_free(world *w)
{
    void *device[] = {(void *)(uintptr_t)w->call.keys,
                      (void *)(uintptr_t)w->call.values,
                      (void *)(uintptr_t)w->call.step.pages,
                      (void *)(uintptr_t)w->call.q,
                      w->call.y,
                      w->call.scratch,
                      w->device_tables};

    for (size_t i = 0; i < sizeof device / sizeof device[0]; i++)
        sp_device_free(w->device, device[i]);
    for (int32_t s = 0; s < w->n_sequences; s++)
        free(w->q[s]), free(w->k[s]), free(w->v[s]);
    free(w->pages), free(w->tables), free(w->step_q), free(w->step_y);
}

/* ---- steps --------------------------------------------------------------------------------- */

static inline int32_t world_rows_of(const world_span *spans, int32_t n)
{
    int32_t rows = 0;

    for (int32_t i = 0; i < n; i++)
        rows += spans[i].rows;
    return rows;
}

/* Rows of q and y that a step writes and reads: what is launched and a guard. */
static inline size_t world_step_rows(const world *w)
{
    int32_t rows = w->call.step.rows + WORLD_GUARD_ROWS;

    return (size_t)(rows < w->call.shape.rows_max ? rows : w->call.shape.rows_max);
}

/* Writes the tables of a step and, where the sequences have any, its queries; y is poisoned. What
 * is launched stays as it was. */
static inline void world_set_step(world *w, const world_span *spans, int32_t n)
{
    size_t rows_max = (size_t)w->call.shape.rows_max, spans_max = (size_t)w->call.shape.spans_max;
    int32_t *t = w->tables, *position = t + 2 + rows_max, *row_span = position + rows_max;
    int32_t *span_row = row_span + rows_max, *span_page = span_row + spans_max + 1, row = 0;
    size_t each = world_row(w), all = world_step_rows(w) * each * sizeof(uint16_t);

    memset(t, 0xff, w->tables_bytes);
    for (int32_t i = 0; i < n; i++) {
        span_row[i] = row;
        span_page[i] = w->first_page[spans[i].sequence];
        for (int32_t r = 0; r < spans[i].rows; r++, row++) {
            position[row] = spans[i].first + r;
            row_span[row] = i;
        }
        memcpy(w->step_q + (size_t)span_row[i] * each,
               w->q[spans[i].sequence] + (size_t)spans[i].first * each,
               (size_t)spans[i].rows * each * sizeof(uint16_t));
    }
    for (size_t i = (size_t)n; i <= spans_max; i++)
        span_row[i] = row;
    t[0] = row;
    t[1] = n;
    memset(w->step_q + (size_t)row * each, 0xff, all - (size_t)row * each * sizeof(uint16_t));
    memset(w->step_y, 0xa5, all);
    w->failed |= sp_device_write(w->device, w->device_tables, t, w->tables_bytes, NULL) != SP_OK;
    w->failed |=
        sp_device_write(w->device, (void *)(uintptr_t)w->call.q, w->step_q, all, NULL) != SP_OK;
    w->failed |= sp_device_write(w->device, w->call.y, w->step_y, all, NULL) != SP_OK;
}

static inline bool world_is_wide(const world_span *spans, int32_t n)
{
    for (int32_t i = 0; i < n; i++)
        if (spans[i].rows > SP_CUDA_NARROW_ROWS)
            return true;
    return false;
}

static inline void world_enqueue(world *w)
{
    w->failed |= w->ops.attention_plan(w->gpu, &w->call, w->stream);
    w->failed |= w->ops.attend_rows(w->gpu, &w->call, w->stream);
}

/* y is in step_y then. */
static inline void world_read(world *w)
{
    w->failed |= sp_stream_wait(sp_device_main_stream(w->device), NULL) != SP_OK;
    w->failed |= sp_device_read(w->device, w->step_y, w->call.y,
                                (size_t)w->call.shape.rows_max * world_row(w) * sizeof(uint16_t),
                                NULL) != SP_OK;
}

/* With so many launched rows and spans. */
static inline void world_run(world *w, const world_span *spans, int32_t n, int32_t rows,
                             int32_t n_spans)
{
    w->call.step.rows = rows;
    w->call.step.spans = n_spans;
    w->call.wide = w->say_wide || world_is_wide(spans, n);
    world_set_step(w, spans, n);
    world_enqueue(w);
    world_read(w);
}

#endif
