/* cpu_linear.c: linear maps that share their input, with the side paths of the rows' adapters. */
#include "base/assert.h"
#include "base/clock.h"
#include "base/spin.h"
#include "engine/ops/cpu_ops.h"
#include "kernels/cpu/gemm.h"

#include <sidepath/delta_pieces.h>

#include <stdatomic.h>

/* Up to so many elements are packed by the calling thread, without waking others. */
#define PACK_ALONE_ELEMENTS (1 << 15)
/* Pauses (some microseconds) to wait for a shrink that is nearly done before its expand is
 * deferred. */
#define EXPAND_PAUSES 256

typedef struct linear_job {
    sp_cpu_ops *cpu;
    sp_pack_job pack;
    sp_gemm_job gemm;
    sp_delta_pieces delta;
    atomic_int n_deferred; /* entries of cpu->deferred: pieces whose expand was deferred */
} linear_job;

int32_t sp_cpu_linear_pieces_max(int32_t threads)
{
    return threads * 32 + 64;
}

/* ---- phases -------------------------------------------------------------------------------- */

static void pack_task(void *user, int32_t task, int32_t thread)
{
    const linear_job *job = user;

    (void)thread;
    if (task < job->delta.pack)
        sp_delta_pieces_pack(job->cpu->delta, task);
    else
        sp_pack_job_run(&job->pack, task - job->delta.pack);
}

static bool expand(linear_job *job, const sp_gemm_piece *piece)
{
    return sp_delta_pieces_expand(job->cpu->delta, piece->gemm, piece->column_begin,
                                  piece->column_end);
}

static bool expand_soon(linear_job *job, const sp_gemm_piece *piece)
{
    for (int i = 0; i < EXPAND_PAUSES; i++) {
        if (expand(job, piece))
            return true;
        sp_spin_pause();
    }
    return false;
}

/* Whether the piece was the last of its strip: only then all rows of its columns are computed. */
static bool ends_strip(linear_job *job, const sp_gemm_piece *piece)
{
    return piece->strip_pieces == 1 ||
           atomic_fetch_add_explicit(&job->cpu->strip_done[piece->strip], 1, memory_order_acq_rel) +
                   1 ==
               piece->strip_pieces;
}

/* The shrinks come first and wait for nothing, so a piece of the base seldom waits for them, and
 * never for long: a host's executor may run tasks in any order, on one thread. */
static void gemm_task(void *user, int32_t task, int32_t thread)
{
    linear_job *job = user;
    int32_t number = task - job->delta.shrink;
    sp_gemm_piece piece;

    (void)thread;
    if (number < 0) {
        sp_delta_pieces_shrink(job->cpu->delta, task);
        return;
    }
    piece = sp_gemm_job_piece(&job->gemm, number);
    sp_gemm_job_run(&job->gemm, &piece);
    if (job->delta.shrink > 0 && ends_strip(job, &piece) && !expand_soon(job, &piece))
        job->cpu->deferred[atomic_fetch_add(&job->n_deferred, 1)] = number;
}

static void deferred_task(void *user, int32_t task, int32_t thread)
{
    linear_job *job = user;
    sp_gemm_piece piece = sp_gemm_job_piece(&job->gemm, job->cpu->deferred[task]);

    (void)thread;
    (void)expand(job, &piece); /* every shrink has returned */
}

/* Where all rows have the same adapter, the deltas read the base's packed x. */
static void share_packed_x(linear_job *job, sp_gemm_args *gemms)
{
    if (job->cpu->type != SP_DTYPE_BF16 || !job->delta.packed_x)
        return;
    job->pack.n_pieces = 0;
    for (int32_t i = 0; i < job->gemm.n_gemms; i++)
        gemms[i].packed_x = job->delta.packed_x;
}

static void run_pack(linear_job *job)
{
    int64_t elements = job->pack.rows * job->pack.k;
    int32_t tasks = job->delta.pack + job->pack.n_pieces;

    if (job->delta.pack > 0 && job->pack.n_pieces > 0)
        elements *= 2;
    if (elements > PACK_ALONE_ELEMENTS) {
        sp_exec_run(job->cpu->exec, pack_task, job, tasks);
        return;
    }
    for (int32_t task = 0; task < tasks; task++)
        pack_task(job, task, 0);
}

/* ---- the linear maps ----------------------------------------------------------------------- */

static void fill(const sp_cpu_ops *cpu, const sp_projection *p, sp_gemm_args *out_gemm,
                 sp_delta_output *out_output)
{
    const sp_weight *weight = &p->linear->weight;

    *out_gemm = (sp_gemm_args){
        .packed_x = cpu->packed,
        .x_type = cpu->type,
        .w_type = weight->type,
        .y_type = cpu->types[p->y],
        .epilogue = SP_EPILOGUE_STORE,
        .rows = cpu->n_rows,
        .n = weight->rows,
        .k = weight->columns,
        .w = weight->placed,
        .w_stride = weight->columns,
        .bias = p->linear->bias.placed,
        .y = cpu->rows[p->y],
        .y_stride = cpu->widths[p->y],
    };
    *out_output = (sp_delta_output){.struct_bytes = sizeof *out_output,
                                    .site = p->linear->site,
                                    .y = cpu->rows[p->y],
                                    .y_stride = cpu->widths[p->y],
                                    .y_type = cpu->types[p->y]};
}

/* Begins the side paths in pieces; *out_apart: they do not fit and are applied after the base. */
static sp_status begin_delta(linear_job *job, const sp_delta_call *call, bool *out_apart)
{
    sp_cpu_ops *cpu = job->cpu;
    sp_status status = SP_OK;

    *out_apart = false;
    job->delta = (sp_delta_pieces){.struct_bytes = sizeof job->delta};
    if (!cpu->delta)
        return SP_OK;
    if (job->gemm.n_pieces <= sp_cpu_linear_pieces_max(sp_exec_threads(cpu->exec)))
        status = sp_delta_pieces_begin(cpu->delta, call, &job->delta, NULL);
    *out_apart = !job->delta.fits;
    for (int32_t i = 0; job->delta.shrink > 0 && i < job->gemm.n_strips; i++)
        atomic_store_explicit(&cpu->strip_done[i], 0, memory_order_relaxed);
    return status;
}

static sp_status apply_apart(const linear_job *job, const sp_delta_call *call)
{
    sp_cpu_ops *cpu = job->cpu;
    double began = sp_clock_seconds();
    sp_status status = sp_delta_apply(cpu->delta, call, NULL);

    cpu->ops.delta_seconds += sp_clock_seconds() - began;
    return status;
}

sp_status sp_cpu_linear(sp_ops *ops, sp_rows x, const sp_projection *projections, int32_t n)
{
    sp_cpu_ops *cpu = (sp_cpu_ops *)ops;
    int32_t threads = sp_exec_threads(cpu->exec);
    const sp_weight *first = &projections[0].linear->weight;
    sp_gemm_args gemms[SP_LINEAR_MAX];
    sp_delta_output outputs[SP_LINEAR_MAX];
    linear_job job = {
        .cpu = cpu,
        .pack = {.kernels = cpu->kernels,
                 .packed = cpu->packed,
                 .x_type = cpu->type,
                 .w_type = first->type,
                 .x = cpu->rows[x],
                 .x_stride = cpu->widths[x],
                 .rows = cpu->n_rows,
                 .k = first->columns},
    };
    const sp_delta_call call = {
        .struct_bytes = sizeof call,
        .plan = cpu->plan,
        .x = cpu->rows[x],
        .x_stride = cpu->widths[x],
        .x_type = cpu->type,
        .outputs = outputs,
        .n_outputs = n,
    };
    bool apart;
    sp_status status;

    SP_ASSERT(n > 0 && n <= SP_LINEAR_MAX);
    for (int32_t i = 0; i < n; i++) {
        SP_ASSERT(projections[i].linear->weight.columns == cpu->widths[x]);
        SP_ASSERT(projections[i].linear->weight.rows == cpu->widths[projections[i].y]);
        fill(cpu, &projections[i], &gemms[i], &outputs[i]);
    }
    sp_pack_job_cut(&job.pack, threads);
    sp_gemm_job_cut(cpu->kernels, threads, gemms, n, &job.gemm);
    status = begin_delta(&job, &call, &apart);
    if (status != SP_OK)
        return status;
    share_packed_x(&job, gemms);
    run_pack(&job);
    sp_exec_run(cpu->exec, gemm_task, &job, job.delta.shrink + job.gemm.n_pieces);
    sp_exec_run(cpu->exec, deferred_task, &job, atomic_load(&job.n_deferred));
    return apart ? apply_apart(&job, &call) : SP_OK;
}
