#include "engine/model/linear_group.h"

#include "base/clock.h"
#include "base/spin.h"
#include "kernels/cpu/gemm.h"

#include <sidepath/delta_pieces.h>

#include <stdatomic.h>

/* Elements that the calling thread packs itself rather than wake others. */
#define PACK_ALONE_ELEMENTS (1 << 15)
/* Pauses for a shrink that is nearly through, some microseconds, before its expand is put off. */
#define EXPAND_PAUSES 256

typedef struct project_job {
    sp_forward *forward;
    sp_pack_job pack;
    sp_gemm_job gemm;
    sp_delta_pieces delta;
    atomic_int n_waiting; /* entries of forward->waiting: pieces whose expand was put off */
} project_job;

int32_t sp_project_pieces_max(int32_t threads)
{
    return threads * 32 + 64;
}

/* ---- phases -------------------------------------------------------------------------------- */

static void pack_task(void *user, int32_t task, int32_t thread)
{
    const project_job *job = user;

    (void)thread;
    if (task < job->delta.pack)
        sp_delta_pieces_pack(job->forward->delta, task);
    else
        sp_pack_job_run(&job->pack, task - job->delta.pack);
}

static bool expand(project_job *job, const sp_gemm_piece *piece)
{
    return sp_delta_pieces_expand(job->forward->delta, piece->gemm, piece->column_begin,
                                  piece->column_end);
}

static bool expand_soon(project_job *job, const sp_gemm_piece *piece)
{
    for (int i = 0; i < EXPAND_PAUSES; i++) {
        if (expand(job, piece))
            return true;
        sp_spin_pause();
    }
    return false;
}

/* Whether the piece was the last of its strip: only then all rows of its columns are there. */
static bool ends_strip(project_job *job, const sp_gemm_piece *piece)
{
    return piece->strip_pieces == 1 ||
           atomic_fetch_add_explicit(&job->forward->strip_done[piece->strip], 1,
                                     memory_order_acq_rel) +
                   1 ==
               piece->strip_pieces;
}

/* The shrinks come first and wait for nothing, so a piece of the base seldom waits for them. It
 * does not wait long either: a host's executor may run tasks in any order, on one thread. */
static void gemm_task(void *user, int32_t task, int32_t thread)
{
    project_job *job = user;
    int32_t number = task - job->delta.shrink;
    sp_gemm_piece piece;

    (void)thread;
    if (number < 0) {
        sp_delta_pieces_shrink(job->forward->delta, task);
        return;
    }
    piece = sp_gemm_job_piece(&job->gemm, number);
    sp_gemm_job_run(&job->gemm, &piece);
    if (job->delta.shrink > 0 && ends_strip(job, &piece) && !expand_soon(job, &piece))
        job->forward->waiting[atomic_fetch_add(&job->n_waiting, 1)] = number;
}

static void waiting_task(void *user, int32_t task, int32_t thread)
{
    project_job *job = user;
    sp_gemm_piece piece = sp_gemm_job_piece(&job->gemm, job->forward->waiting[task]);

    (void)thread;
    (void)expand(job, &piece); /* every shrink has returned */
}

/* Where one adapter has all rows, the deltas' x is the base's. */
static void share_packed_x(project_job *job, sp_gemm_args *gemms)
{
    if (job->forward->type != SP_DTYPE_BF16 || !job->delta.packed_x)
        return;
    job->pack.n_pieces = 0;
    for (int32_t i = 0; i < job->gemm.n_gemms; i++)
        gemms[i].packed_x = job->delta.packed_x;
}

static void run_pack(project_job *job)
{
    int64_t elements = job->pack.rows * job->pack.k;
    int32_t tasks = job->delta.pack + job->pack.n_pieces;

    if (job->delta.pack > 0 && job->pack.n_pieces > 0)
        elements *= 2;
    if (elements > PACK_ALONE_ELEMENTS) {
        sp_exec_run(job->forward->exec, pack_task, job, tasks);
        return;
    }
    for (int32_t task = 0; task < tasks; task++)
        pack_task(job, task, 0);
}

/* ---- the projections ----------------------------------------------------------------------- */

static void fill(sp_forward *forward, int32_t k, const sp_projection *p, sp_gemm_args *out_gemm,
                 sp_delta_output *out_output)
{
    *out_gemm = (sp_gemm_args){
        .packed_x = forward->packed,
        .x_type = forward->type,
        .w_type = SP_DTYPE_BF16,
        .y_type = forward->type,
        .epilogue = SP_EPILOGUE_STORE,
        .rows = forward->n_rows,
        .n = p->n,
        .k = k,
        .w = p->weight,
        .w_stride = k,
        .bias = p->bias,
        .y = p->y,
        .y_stride = p->n,
    };
    *out_output = (sp_delta_output){.struct_bytes = sizeof *out_output,
                                    .site = p->site,
                                    .y = p->y,
                                    .y_stride = p->n,
                                    .y_type = forward->type};
}

/* Begins the side paths in pieces; what does not fit is applied afterwards. */
static sp_status begin_delta(project_job *job, const sp_delta_call *call, bool *out_apart)
{
    sp_forward *forward = job->forward;
    sp_status status = SP_OK;

    *out_apart = false;
    job->delta = (sp_delta_pieces){.struct_bytes = sizeof job->delta};
    if (!forward->delta)
        return SP_OK;
    if (job->gemm.n_pieces <= sp_project_pieces_max(sp_exec_threads(forward->exec)))
        status = sp_delta_pieces_begin(forward->delta, call, &job->delta, NULL);
    *out_apart = !job->delta.fits;
    for (int32_t i = 0; job->delta.shrink > 0 && i < job->gemm.n_strips; i++)
        atomic_store_explicit(&forward->strip_done[i], 0, memory_order_relaxed);
    return status;
}

static sp_status apply_apart(const project_job *job, const sp_delta_call *call)
{
    sp_forward *forward = job->forward;
    double began = sp_clock_seconds();
    sp_status status = sp_delta_apply(forward->delta, call, NULL);

    forward->delta_seconds += sp_clock_seconds() - began;
    return status;
}

sp_status sp_project(sp_forward *forward, const void *x, int32_t k,
                     const sp_projection *projections, int32_t n_projections)
{
    int32_t threads = sp_exec_threads(forward->exec);
    sp_gemm_args gemms[SP_PROJECTIONS_MAX];
    sp_delta_output outputs[SP_PROJECTIONS_MAX];
    project_job job = {
        .forward = forward,
        .pack = {.kernels = forward->kernels,
                 .packed = forward->packed,
                 .x_type = forward->type,
                 .w_type = SP_DTYPE_BF16,
                 .x = x,
                 .x_stride = k,
                 .rows = forward->n_rows,
                 .k = k},
    };
    const sp_delta_call call = {
        .struct_bytes = sizeof call,
        .plan = forward->plan,
        .x = x,
        .x_stride = k,
        .x_type = forward->type,
        .outputs = outputs,
        .n_outputs = n_projections,
    };
    bool apart;
    sp_status status;

    for (int32_t i = 0; i < n_projections; i++)
        fill(forward, k, &projections[i], &gemms[i], &outputs[i]);
    sp_pack_job_cut(&job.pack, threads);
    sp_gemm_job_cut(forward->kernels, threads, gemms, n_projections, &job.gemm);
    status = begin_delta(&job, &call, &apart);
    if (status != SP_OK)
        return status;
    share_packed_x(&job, gemms);
    run_pack(&job);
    sp_exec_run(forward->exec, gemm_task, &job, job.delta.shrink + job.gemm.n_pieces);
    sp_exec_run(forward->exec, waiting_task, &job, atomic_load(&job.n_waiting));
    return apart ? apply_apart(&job, &call) : SP_OK;
}
