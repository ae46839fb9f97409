#include "delta/shrink_expand.h"

#include "base/integer.h"

#include <sidepath/route.h>

#include <string.h>

#define ALIGN_BYTES 64
/* One round has room for FEW_ITEMS adapters of up to TILE_ROWS rows each, also on a level that
 * packs a few rows as a full tile. */
#define FEW_ITEMS 32
#define TILE_ROWS 16
/* Multiply-adds below which a task is not worth its overhead, and tasks per thread. */
#define TASK_WORK_MIN    (1 << 15)
#define TASKS_PER_THREAD 4
#define LINE_BYTES       64
/* Adapters whose B an expand prefetches before it starts, and how much of each: what fits into a
 * cache.
 */
#define PREFETCHED_WORKS 32
#define FETCHED_BYTES    4096
/* A thread runs items alone where it gets so many of them, and so many of their rows at a time:
 * what is packed of these stays in its cache. */
#define ITEMS_PER_THREAD 4
#define LONE_ITEM_ROWS   32
/* Up to so many elements the calling thread packs alone instead of waking others. */
#define PACK_ALONE_ELEMENTS (1 << 14)

/* ---- scratch ------------------------------------------------------------------------------- */

static int32_t round_rows(int32_t rows_max)
{
    return rows_max < SP_LORA_ROUND_ROWS ? rows_max : SP_LORA_ROUND_ROWS;
}

/* Bytes for the packed rows of one round at the level that needs most. */
static size_t packed_budget(sp_dtype dtype, int32_t k, int32_t rows_max)
{
    int32_t rows = round_rows(rows_max);
    size_t budget = 0;

    for (const char *const *level = sp_kernels_levels(); *level != NULL; level++) {
        const sp_kernels *kernels;
        size_t bytes;

        if (sp_kernels_get(*level, &kernels, NULL) != SP_OK)
            continue;
        bytes = align_up(kernels->x_pack_bytes(dtype, dtype, rows, k), ALIGN_BYTES);
        budget = bytes > budget ? bytes : budget;
        for (int32_t few = 1; few <= TILE_ROWS && few <= rows; few++) {
            int64_t items = min64(ceil_div(rows, few), FEW_ITEMS);

            bytes =
                (size_t)items * align_up(kernels->x_pack_bytes(dtype, dtype, few, k), ALIGN_BYTES);
            budget = bytes > budget ? bytes : budget;
        }
    }
    return budget;
}

/* Takes `bytes` from the block; with a NULL block it only counts. */
static void *take(char *block, size_t *used, size_t bytes)
{
    void *taken = block != NULL ? block + *used : NULL;

    *used += align_up(bytes, ALIGN_BYTES);
    return taken;
}

static size_t cut(char *block, const sp_lora_sizes *sizes, sp_lora_scratch *out)
{
    size_t rows = (size_t)round_rows(sizes->rows_max), used = 0;
    size_t element = sp_dtype_bytes(sizes->dtype);

    out->round_rows = (int32_t)rows;
    out->x_bytes = packed_budget(sizes->dtype, sizes->k_max, sizes->rows_max);
    out->xa_bytes =
        SP_LORA_GROUP_MAX * packed_budget(sizes->dtype, sizes->rank_max, sizes->rows_max);
    out->packed_x = take(block, &used, out->x_bytes);
    out->packed_xa = take(block, &used, out->xa_bytes);
    out->xa = take(block, &used, SP_LORA_GROUP_MAX * rows * (size_t)sizes->rank_max * element);
    out->scale = take(block, &used, SP_LORA_GROUP_MAX * rows * sizeof *out->scale);
    out->works = take(block, &used, SP_LORA_GROUP_MAX * rows * sizeof *out->works);
    out->items = take(block, &used, rows * sizeof *out->items);
    out->first_pack = take(block, &used, rows * sizeof *out->first_pack);
    out->first_shrink = take(block, &used, SP_LORA_GROUP_MAX * rows * sizeof *out->first_shrink);
    out->first_expand = take(block, &used, SP_LORA_GROUP_MAX * rows * sizeof *out->first_expand);
    out->unready = take(block, &used, SP_LORA_GROUP_MAX * sizeof *out->unready);
    out->expands = take(block, &used, SP_LORA_GROUP_MAX * rows * sizeof *out->expands);
    out->rounded = NULL;
    if (sizes->x_f32 && sizes->dtype != SP_DTYPE_F32)
        out->rounded = take(block, &used, rows * (size_t)sizes->k_max * element);
    return used;
}

size_t sp_lora_scratch_bytes(const sp_lora_sizes *sizes)
{
    sp_lora_scratch scratch;

    return cut(NULL, sizes, &scratch);
}

void sp_lora_scratch_cut(void *block, const sp_lora_sizes *sizes, sp_lora_scratch *out_scratch)
{
    cut(block, sizes, out_scratch);
}

/* ---- tasks --------------------------------------------------------------------------------- */

/* The owner of a task: the last of n whose first task is not above it. */
static int32_t owner_of(const int32_t *first_task, int32_t n, int32_t task)
{
    int32_t low = 0, high = n - 1;

    while (low < high) {
        int32_t middle = (low + high + 1) / 2;

        if (first_task[middle] <= task)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

/* Rows [begin, end) of the item, FP32, rounded to the job's type; returns row 0 of such rows. */
static const char *round_rows_of(const sp_lora_job *job, const sp_lora_item *item, int64_t begin,
                                 int64_t end)
{
    int64_t row_bytes = job->k_in * (int64_t)sp_dtype_bytes(job->dtype);
    char *rounded = job->scratch->rounded + item->first * row_bytes;

    for (int64_t i = begin; i < end; i++) {
        int64_t row = item->row_index != NULL ? item->row_index[i] : i;

        job->kernels->convert(job->dtype, rounded + i * row_bytes, SP_DTYPE_F32,
                              (const float *)item->x + row * job->x_stride, job->k_in);
    }
    return rounded;
}

/* Rows [begin, end) of the item's x. */
static void pack_rows(const sp_lora_job *job, const sp_lora_item *item, void *packed, int64_t begin,
                      int64_t end)
{
    if (job->x_type == job->dtype)
        job->kernels->x_pack(packed, job->dtype, job->dtype, item->x, job->x_stride,
                             item->row_index, item->rows, job->k_in, begin, end);
    else
        job->kernels->x_pack(packed, job->dtype, job->dtype, round_rows_of(job, item, begin, end),
                             job->k_in, NULL, item->rows, job->k_in, begin, end);
}

static void pack_task(void *user, int32_t task, int32_t thread)
{
    const sp_lora_job *job = user;
    int32_t index = owner_of(job->scratch->first_pack, job->n_items, task);
    const sp_lora_item *item = &job->scratch->items[index];
    int64_t begin = (task - job->scratch->first_pack[index]) * job->pack_rows;

    (void)thread;
    pack_rows(job, item, item->packed_x, begin, min64(begin + job->pack_rows, item->rows));
}

/* Runs task number `task` of a GEMM that was split this way. */
static void run_piece(const sp_kernels *kernels, const sp_gemm_args *args,
                      const sp_lora_split *split, int32_t task)
{
    int64_t row = task / split->column_tasks * split->rows;
    int64_t column = task % split->column_tasks * split->columns;

    kernels->gemm_nt(args, row, min64(row + split->rows, args->rows), column,
                     min64(column + split->columns, args->n));
}

/* The thread that finishes the last piece of an item's xa packs it for the expand, which saves a
 * barrier.
 */
static void shrink_task(void *user, int32_t task, int32_t thread)
{
    const sp_lora_job *job = user;
    const int32_t *first = job->scratch->first_shrink;
    int32_t index = owner_of(first, job->n_works, task);
    sp_lora_work *work = &job->scratch->works[index];
    const sp_gemm_args *shrink = &work->shrink;

    (void)thread;
    run_piece(job->kernels, shrink, &work->shrink_split, task - first[index]);
    if (job->half == SP_LORA_SHRINK)
        return;
    if (atomic_fetch_sub_explicit(&work->pending, 1, memory_order_acq_rel) != 1)
        return;
    job->kernels->x_pack(work->packed_xa, job->dtype, job->dtype, shrink->y, shrink->y_stride, NULL,
                         shrink->rows, shrink->n, 0, shrink->rows);
    if (job->in_pieces)
        (void)atomic_fetch_sub_explicit(&job->scratch->unready[work->target], 1,
                                        memory_order_acq_rel);
}

/* The rows of one work's xa, rounded to the job's type and packed for the expand. */
static void round_task(void *user, int32_t task, int32_t thread)
{
    const sp_lora_job *job = user;
    const sp_lora_work *work = &job->scratch->works[task];
    const sp_gemm_args *shrink = &work->shrink, *expand = &work->expand;
    const sp_lora_target *target = &job->targets[work->target];
    size_t row_bytes = (size_t)shrink->y_stride * sp_dtype_bytes(job->dtype);

    (void)thread;
    for (int64_t i = 0; i < shrink->rows; i++) {
        int64_t row = expand->row_index[i]; /* halves always have routed rows */

        job->kernels->convert(job->dtype, (char *)shrink->y + (size_t)i * row_bytes, SP_DTYPE_F32,
                              target->xa + row * target->xa_stride, shrink->n);
    }
    job->kernels->x_pack(work->packed_xa, job->dtype, job->dtype, shrink->y, shrink->y_stride, NULL,
                         shrink->rows, shrink->n, 0, shrink->rows);
}

static void expand_task(void *user, int32_t task, int32_t thread)
{
    const sp_lora_job *job = user;
    const int32_t *first = job->scratch->first_expand;
    int32_t index = owner_of(first, job->n_works, task);
    const sp_lora_work *work = &job->scratch->works[index];

    (void)thread;
    run_piece(job->kernels, &work->expand, &work->expand_split, task - first[index]);
}

/* ---- a round ------------------------------------------------------------------------------- */

/*
 * Cuts a GEMM into pieces of about `piece` multiply-adds. A shrink has few columns and long sums,
 * so it is split over rows first; an expand has many columns and short sums, so over columns first.
 */
static sp_lora_split split_gemm(const sp_kernels *kernels, const sp_gemm_args *args, int64_t piece,
                                bool rows_first)
{
    int64_t rows = args->rows, columns = args->n, k = max64(args->k, 1);
    sp_lora_split split;

    if (rows == 0) /* a shrink that another output does */
        return (sp_lora_split){.rows = 1, .columns = 1, .column_tasks = 1, .n_tasks = 0};
    if (rows * columns * k <= piece)
        return (sp_lora_split){.rows = rows, .columns = columns, .column_tasks = 1, .n_tasks = 1};
    if (rows_first) {
        rows = round_up(max64(piece / (k * columns), 1), kernels->gemm_rows);
        rows = min64(rows, args->rows);
    }
    columns = round_up(max64(piece / (k * rows), 1), kernels->gemm_columns);
    columns = min64(columns, args->n);
    split.rows = rows;
    split.columns = columns;
    split.column_tasks = (int32_t)ceil_div(args->n, columns);
    split.n_tasks = (int32_t)ceil_div(args->rows, rows) * split.column_tasks;
    return split;
}

static int64_t piece_work(const sp_lora_job *job, int64_t work)
{
    return max64(work / ((int64_t)sp_exec_threads(job->exec) * TASKS_PER_THREAD), TASK_WORK_MIN);
}

static void number_shrink_tasks(sp_lora_job *job)
{
    int64_t sum = 0, piece;

    for (int32_t i = 0; i < job->n_works; i++) {
        const sp_gemm_args *shrink = &job->scratch->works[i].shrink;

        sum += shrink->rows * shrink->n * shrink->k;
    }
    piece = piece_work(job, sum);
    job->n_shrink_tasks = 0;
    for (int32_t i = 0; i < job->n_works; i++) {
        sp_lora_work *work = &job->scratch->works[i];

        work->shrink_split = split_gemm(job->kernels, &work->shrink, piece, true);
        job->scratch->first_shrink[i] = job->n_shrink_tasks;
        job->n_shrink_tasks += work->shrink_split.n_tasks;
        atomic_store_explicit(&work->pending, work->shrink_split.n_tasks, memory_order_relaxed);
    }
}

static void number_expand_tasks(sp_lora_job *job)
{
    int64_t sum = 0, piece;

    for (int32_t i = 0; i < job->n_works; i++) {
        const sp_gemm_args *expand = &job->scratch->works[i].expand;

        sum += expand->rows * expand->n * expand->k;
    }
    piece = piece_work(job, sum);
    job->n_expand_tasks = 0;
    for (int32_t i = 0; i < job->n_works; i++) {
        sp_lora_work *work = &job->scratch->works[i];

        work->expand_split = split_gemm(job->kernels, &work->expand, piece, false);
        job->scratch->first_expand[i] = job->n_expand_tasks;
        job->n_expand_tasks += work->expand_split.n_tasks;
    }
}

static void number_pack_tasks(sp_lora_job *job)
{
    int64_t elements = (int64_t)job->n_rows * job->k_in;
    int64_t rows = job->n_rows;

    if (elements > PACK_ALONE_ELEMENTS)
        rows = ceil_div(rows, (int64_t)sp_exec_threads(job->exec) * TASKS_PER_THREAD);
    job->pack_rows = round_up(max64(rows, 1), job->kernels->x_pack_rows);
    job->n_pack_tasks = 0;
    for (int32_t i = 0; i < job->n_items; i++) {
        job->scratch->first_pack[i] = job->n_pack_tasks;
        job->n_pack_tasks += (int32_t)ceil_div(job->scratch->items[i].rows, job->pack_rows);
    }
}

static void pack_round(sp_lora_job *job)
{
    number_pack_tasks(job);
    if ((int64_t)job->n_rows * job->k_in > PACK_ALONE_ELEMENTS) {
        sp_exec_run(job->exec, pack_task, job, job->n_pack_tasks);
        return;
    }
    for (int32_t task = 0; task < job->n_pack_tasks; task++)
        pack_task(job, task, 0);
}

static size_t packed_bytes(const sp_lora_job *job, int32_t rows, int32_t k)
{
    return align_up(job->kernels->x_pack_bytes(job->dtype, job->dtype, rows, k), ALIGN_BYTES);
}

/* What a thread that runs items alone has of the packed forms: of x, and of one output's xa. */
static size_t lone_x_bytes(const sp_lora_job *job)
{
    return packed_bytes(job, job->item_rows_max, job->k_in);
}

static size_t lone_xa_bytes(const sp_lora_job *job)
{
    return packed_bytes(job, job->item_rows_max, job->rank_max);
}

/* The whole item; each thread has places of its own for what is packed. */
static void item_task(void *user, int32_t task, int32_t thread)
{
    const sp_lora_job *job = user;
    const sp_kernels *kernels = job->kernels;
    const sp_lora_item *item = &job->scratch->items[task];
    size_t xa_offset = (size_t)thread * (size_t)job->n_targets * lone_xa_bytes(job);
    char *x = job->scratch->packed_x + (size_t)thread * lone_x_bytes(job);

    pack_rows(job, item, x, 0, item->rows);
    for (int32_t i = item->first_work; i < item->first_work + item->n_works; i++) {
        const sp_lora_work *work = &job->scratch->works[i];
        char *xa = (char *)work->packed_xa + xa_offset;
        sp_gemm_args shrink = work->shrink, expand = work->expand;

        shrink.packed_x = x;
        expand.packed_x = xa;
        if (shrink.rows > 0) {
            kernels->gemm_nt(&shrink, 0, shrink.rows, 0, shrink.n);
            kernels->x_pack(xa, job->dtype, job->dtype, shrink.y, shrink.y_stride, NULL,
                            shrink.rows, shrink.n, 0, shrink.rows);
        }
        kernels->gemm_nt(&expand, 0, expand.rows, 0, expand.n);
    }
}

static void run_round(sp_lora_job *job)
{
    if (job->n_works > 0 && job->item_rows_max > 0) {
        sp_exec_run(job->exec, item_task, job, job->n_items);
    } else if (job->n_works > 0) {
        number_shrink_tasks(job);
        number_expand_tasks(job);
        if (job->half == SP_LORA_EXPAND) {
            sp_exec_run(job->exec, round_task, job, job->n_works);
        } else {
            pack_round(job);
            sp_exec_run(job->exec, shrink_task, job, job->n_shrink_tasks);
        }
        if (job->half != SP_LORA_SHRINK)
            sp_exec_run(job->exec, expand_task, job, job->n_expand_tasks);
    }
    job->n_rows = job->n_items = job->n_works = 0;
    job->x_used = job->xa_used = 0;
}

/* ---- adding -------------------------------------------------------------------------------- */

static const void *element_at(sp_dtype dtype, const void *base, int64_t index)
{
    return (const char *)base + index * (int64_t)sp_dtype_bytes(dtype);
}

static bool is_present(const sp_lora_pair *pair)
{
    return pair->rank > 0 && pair->scale != 0.0f;
}

/* Whether an item of so many rows fits into what is left of the round. */
static bool fits(const sp_lora_job *job, int32_t rows, const sp_lora_pair *pairs)
{
    size_t xa_bytes = job->xa_used;

    for (int32_t t = 0; t < job->n_targets; t++)
        if (is_present(&pairs[t]))
            xa_bytes += packed_bytes(job, rows, pairs[t].rank);
    return job->n_rows + rows <= job->scratch->round_rows &&
           job->x_used + packed_bytes(job, rows, job->k_in) <= job->scratch->x_bytes &&
           xa_bytes <= job->scratch->xa_bytes;
}

/* Effective scales of the item's rows at target t; returns their address. */
static const float *fill_scales(const sp_lora_job *job, int32_t t, const sp_lora_rows *rows,
                                int32_t first, int32_t n, float stored)
{
    const int32_t *order = rows->scale_order != NULL ? rows->scale_order : rows->order;
    float *scales = job->scratch->scale + t * job->scratch->round_rows + job->n_rows;

    for (int32_t i = 0; i < n; i++) {
        int32_t at = order != NULL ? order[first + i] : first + i;

        scales[i] =
            sp_effective_scale(stored, rows->row_scale != NULL ? rows->row_scale[at] : 1.0f);
    }
    return scales;
}

static void add_work(sp_lora_job *job, const sp_lora_item *item, int32_t t, int32_t first,
                     const float *scales, const sp_lora_pair *pair)
{
    const sp_lora_target *target = &job->targets[t];
    const sp_lora_scratch *scratch = job->scratch;
    sp_lora_work *work = &scratch->works[job->n_works++];
    int64_t xa_row = (int64_t)t * scratch->round_rows + job->n_rows;
    char *y = target->y;

    if (item->y_index == NULL)
        y += first * target->y_stride * (int64_t)sp_dtype_bytes(target->y_type);
    work->target = t;
    work->packed_xa = scratch->packed_xa +
                      (job->item_rows_max > 0 ? (size_t)t * lone_xa_bytes(job) : job->xa_used);
    work->shrink = (sp_gemm_args){
        .packed_x = item->packed_x,
        .x_type = job->dtype,
        .w_type = job->dtype,
        .y_type = job->dtype,
        .delta_type = job->dtype,
        .epilogue = SP_EPILOGUE_STORE,
        .rows = item->rows,
        .n = pair->rank,
        .k = job->k_in,
        .w = pair->a,
        .w_stride = pair->a_stride,
        .y = scratch->xa + xa_row * job->rank_max * (int64_t)sp_dtype_bytes(job->dtype),
        .y_stride = job->rank_max,
    };
    work->expand = (sp_gemm_args){
        .packed_x = work->packed_xa,
        .x_type = job->dtype,
        .w_type = job->dtype,
        .y_type = target->y_type,
        .delta_type = job->dtype,
        .epilogue = SP_EPILOGUE_FOLD,
        .rows = item->rows,
        .n = target->n_out,
        .k = pair->rank,
        .w = pair->b,
        .w_stride = pair->b_stride,
        .y = y,
        .y_stride = target->y_stride,
        .row_index = item->y_index,
        .scale = scales,
    };
    if (job->half == SP_LORA_SHRINK) {
        work->shrink.y = target->xa;
        work->shrink.y_stride = target->xa_stride;
        work->shrink.y_type = SP_DTYPE_F32;
        work->shrink.row_index = item->y_index;
    }
    if (job->item_rows_max == 0)
        job->xa_used += packed_bytes(job, item->rows, pair->rank);
}

/*
 * The work of an earlier output of the item with the same A, whose xa this one reads too (gate and
 * up of a fused pair); NULL: none. In pieces each output is told apart when its xa is ready.
 */
static const sp_lora_work *find_twin(const sp_lora_job *job, int32_t first_work,
                                     const sp_lora_pair *pair)
{
    if (job->half != SP_LORA_WHOLE || job->in_pieces)
        return NULL;
    for (int32_t i = first_work; i < job->n_works; i++) {
        const sp_gemm_args *shrink = &job->scratch->works[i].shrink;

        if (shrink->w == pair->a && shrink->w_stride == pair->a_stride && shrink->n == pair->rank)
            return &job->scratch->works[i];
    }
    return NULL;
}

/* Adds the output's work, without a shrink where another output has its xa. */
static void add_output(sp_lora_job *job, const sp_lora_item *item, int32_t first_work, int32_t t,
                       int32_t first, const float *scales, const sp_lora_pair *pair)
{
    const sp_lora_work *twin = find_twin(job, first_work, pair);
    size_t xa_used = job->xa_used;
    sp_lora_work *work = &job->scratch->works[job->n_works];

    add_work(job, item, t, first, scales, pair);
    if (twin == NULL)
        return;
    work->packed_xa = twin->packed_xa;
    work->expand.packed_x = twin->packed_xa;
    work->shrink.rows = 0;
    job->xa_used = xa_used;
}

static const int32_t *from(const int32_t *order, int32_t first)
{
    return order != NULL ? order + first : NULL;
}

/* Adds the next n rows from `first` on; they fit. */
static void add_item(sp_lora_job *job, const sp_lora_rows *rows, int32_t first, int32_t n,
                     const sp_lora_pair *pairs)
{
    sp_lora_item *item = &job->scratch->items[job->n_items++];
    const int32_t *x_order = rows->x_order != NULL ? rows->x_order : rows->order;
    int32_t first_work = job->n_works;

    *item = (sp_lora_item){
        .packed_x = job->scratch->packed_x + job->x_used,
        .x = x_order != NULL ? job->x : element_at(job->x_type, job->x, first * job->x_stride),
        .row_index = from(x_order, first),
        .y_index = from(rows->order, first),
        .rows = n,
        .first = job->n_rows,
        .first_work = first_work,
    };
    for (int32_t t = 0; t < job->n_targets; t++) {
        if (!is_present(&pairs[t]))
            continue;
        add_output(job, item, first_work, t, first,
                   fill_scales(job, t, rows, first, n, pairs[t].scale), &pairs[t]);
    }
    item->n_works = job->n_works - first_work;
    if (job->item_rows_max == 0)
        job->x_used += packed_bytes(job, n, job->k_in);
    job->n_rows += n;
}

/* Rows of the next item: as many as fit into the round; 0 when it must run first. */
static int32_t next_rows(const sp_lora_job *job, int32_t rows, const sp_lora_pair *pairs)
{
    int32_t room = job->scratch->round_rows - job->n_rows;

    rows = rows < room ? rows : room;
    if (job->item_rows_max > 0)
        return rows < job->item_rows_max ? rows : job->item_rows_max;
    /* A single row always fits into an empty round: see packed_budget. */
    while (rows > 1 && job->n_rows == 0 && !fits(job, rows, pairs))
        rows /= 2;
    return job->n_rows == 0 || fits(job, rows, pairs) ? rows : 0;
}

void sp_lora_job_expect(sp_lora_job *job, int32_t n_items)
{
    int32_t threads = sp_exec_threads(job->exec);

    job->item_rows_max = 0;
    if (n_items < threads * ITEMS_PER_THREAD)
        return;
    for (int32_t rows = LONE_ITEM_ROWS; rows > 0 && job->item_rows_max == 0; rows /= 2) {
        size_t x_bytes = packed_bytes(job, rows, job->k_in) * (size_t)threads;
        size_t xa_bytes =
            packed_bytes(job, rows, job->rank_max) * (size_t)(threads * job->n_targets);

        if (x_bytes <= job->scratch->x_bytes && xa_bytes <= job->scratch->xa_bytes)
            job->item_rows_max = rows;
    }
}

void sp_lora_job_add(sp_lora_job *job, const sp_lora_rows *rows, const sp_lora_pair *pairs)
{
    bool present = false;

    for (int32_t t = 0; t < job->n_targets; t++)
        present |= is_present(&pairs[t]);
    for (int32_t first = 0; present && first < rows->n && !job->too_large;) {
        int32_t count = next_rows(job, rows->n - first, pairs);

        if (count == 0 && job->in_pieces) {
            job->too_large = true;
        } else if (count == 0) {
            run_round(job);
        } else {
            add_item(job, rows, first, count, pairs);
            first += count;
        }
    }
}

void sp_lora_job_finish(sp_lora_job *job)
{
    run_round(job);
}

/* ---- in pieces ----------------------------------------------------------------------------- */

/* Lists each target's expands, so that a piece reads nothing of the others. */
static void list_expands(sp_lora_job *job)
{
    for (int32_t t = 0; t < job->n_targets; t++)
        job->n_expands[t] = job->n_lone[t] = 0;
    for (int lone = 1; lone >= 0; lone--)
        for (int32_t i = 0; i < job->n_works; i++) {
            const sp_lora_work *work = &job->scratch->works[i];
            int32_t t = work->target;

            if ((work->expand.rows == 1) != lone)
                continue;
            job->scratch->expands[t * job->scratch->round_rows + job->n_expands[t]++] =
                &work->expand;
            job->n_lone[t] += lone;
        }
    for (int32_t t = 0; t < job->n_targets; t++)
        atomic_store_explicit(&job->scratch->unready[t], job->n_expands[t], memory_order_relaxed);
}

void sp_lora_job_cut(sp_lora_job *job)
{
    job->n_pack_tasks = job->n_shrink_tasks = 0;
    list_expands(job);
    if (job->n_works == 0)
        return;
    number_shrink_tasks(job);
    number_pack_tasks(job);
}

const void *sp_lora_job_packed_x(const sp_lora_job *job, int32_t rows)
{
    const sp_lora_item *item = &job->scratch->items[0];

    if (job->n_items != 1 || item->rows != rows)
        return NULL;
    for (int32_t i = 0; item->row_index != NULL && i < rows; i++)
        if (item->row_index[i] != i)
            return NULL;
    return item->packed_x;
}

void sp_lora_job_pack(sp_lora_job *job, int32_t task)
{
    pack_task(job, task, 0);
}

void sp_lora_job_shrink(sp_lora_job *job, int32_t task)
{
    shrink_task(job, task, 0);
}

void sp_lora_job_run_shrinks(sp_lora_job *job)
{
    sp_lora_job_cut(job);
    sp_exec_run(job->exec, pack_task, job, job->n_pack_tasks);
    sp_exec_run(job->exec, shrink_task, job, job->n_shrink_tasks);
}

void sp_lora_job_set_y(sp_lora_job *job, int32_t target, void *y, int64_t y_stride, sp_dtype y_type)
{
    for (int32_t i = 0; i < job->n_works; i++) {
        sp_gemm_args *expand = &job->scratch->works[i].expand;

        if (job->scratch->works[i].target != target)
            continue;
        expand->y = y;
        expand->y_stride = y_stride;
        expand->y_type = y_type;
    }
}

void sp_lora_job_run_expands(sp_lora_job *job)
{
    number_expand_tasks(job);
    sp_exec_run(job->exec, expand_task, job, job->n_expand_tasks);
}

/*
 * Prefetches some columns of B for expands of several rows: each is a short run, too short for the
 * hardware prefetcher. Inlined, because a function that only prefetches may be left out as one
 * without effect.
 */
static inline __attribute__((always_inline)) void prefetch_b(const sp_gemm_args *const *expands,
                                                             int32_t n, int64_t column_begin,
                                                             int64_t column_end)
{
    for (int32_t i = 0; i < n && i < PREFETCHED_WORKS; i++) {
        int64_t row = expands[i]->w_stride * (int64_t)sp_dtype_bytes(expands[i]->w_type);
        int64_t bytes = (column_end - column_begin) * row;
        const char *b = (const char *)expands[i]->w + column_begin * row;

        for (int64_t at = 0; at < bytes && at < FETCHED_BYTES; at += LINE_BYTES)
            __builtin_prefetch(b + at, 0, 2);
    }
}

bool sp_lora_job_expand(sp_lora_job *job, int32_t target, int64_t column_begin, int64_t column_end)
{
    const sp_lora_scratch *scratch = job->scratch;
    const sp_gemm_args *const *expands = scratch->expands + target * scratch->round_rows;
    int32_t n_lone = job->n_lone[target], n = job->n_expands[target];

    if (atomic_load_explicit(&scratch->unready[target], memory_order_acquire) > 0)
        return false;
    job->kernels->gemm_nt_lone(expands, n_lone, column_begin, column_end);
    prefetch_b(expands + n_lone, n - n_lone, column_begin, column_end);
    for (int32_t i = n_lone; i < n; i++)
        job->kernels->gemm_nt(expands[i], 0, expands[i]->rows, column_begin, column_end);
    return true;
}
