/* cpu_rows.c: the row-wise ops: the embedding, norms, sums, the activation. */
#include "base/clock.h"
#include "engine/ops/cpu_ops.h"

/* The most rows of a task; few rows get a thread each, a single one runs on the caller's. */
#define ROWS_PER_TASK_MAX 4

typedef struct row_job {
    const sp_cpu_ops *cpu;
    sp_cpu_row_fn fn;
    const void *args;
    int32_t task_rows;
} row_job;

static void row_task(void *user, int32_t task, int32_t thread)
{
    const row_job *job = user;
    int32_t end = (task + 1) * job->task_rows;

    (void)thread;
    if (end > job->cpu->n_rows)
        end = job->cpu->n_rows;
    for (int32_t row = task * job->task_rows; row < end; row++)
        job->fn(job->cpu, job->args, row);
}

/* At least two tasks for each thread where there are enough rows. */
void sp_cpu_each_row(const sp_cpu_ops *cpu, sp_cpu_row_fn fn, const void *args)
{
    int32_t share = cpu->n_rows / (2 * sp_exec_threads(cpu->exec));
    row_job job = {.cpu = cpu, .fn = fn, .args = args};

    job.task_rows = share < 1 ? 1 : share < ROWS_PER_TASK_MAX ? share : ROWS_PER_TASK_MAX;
    sp_exec_run(cpu->exec, row_task, &job, (cpu->n_rows + job.task_rows - 1) / job.task_rows);
}

/* ---- the embedding ------------------------------------------------------------------------- */

typedef struct embed_args {
    const sp_weight *table;
    sp_rows y;
} embed_args;

static void embed_row(const sp_cpu_ops *cpu, const void *user, int32_t row)
{
    const embed_args *args = user;
    const sp_weight *table = args->table;
    size_t offset =
        (size_t)cpu->row_token[row] * (size_t)table->columns * sp_dtype_bytes(table->type);

    cpu->kernels->convert(cpu->type, sp_cpu_row(cpu, args->y, row), table->type,
                          (const char *)table->placed + offset, table->columns);
}

sp_status sp_cpu_embed(sp_ops *ops, const sp_weight *table, sp_rows y)
{
    sp_cpu_ops *cpu = (sp_cpu_ops *)ops;
    const embed_args args = {table, y};
    const sp_delta_embed_call call = {
        .struct_bytes = sizeof call,
        .plan = cpu->plan,
        .tokens = cpu->row_token,
        .y = cpu->rows[y],
        .y_stride = table->columns,
    };
    double began;
    sp_status status;

    sp_cpu_each_row(cpu, embed_row, &args);
    if (!cpu->delta || !sp_delta_has_tokens(cpu->delta, SP_SITE_EMBEDDING))
        return SP_OK;
    began = sp_clock_seconds();
    status = sp_delta_embed(cpu->delta, &call, NULL);
    ops->delta_seconds += sp_clock_seconds() - began;
    return status;
}

/* ---- norms and sums ------------------------------------------------------------------------ */

typedef struct norm_args {
    const sp_norm *norm;
    sp_rows sum, x, y;
} norm_args;

static void norm_row(const sp_cpu_ops *cpu, const void *user, int32_t row)
{
    const norm_args *args = user;
    const sp_norm *norm = args->norm;

    cpu->kernels->rmsnorm(cpu->type, sp_cpu_row(cpu, args->y, row), sp_cpu_row(cpu, args->sum, row),
                          norm->weight.placed, norm->offset, norm->weight.rows, norm->eps);
}

static void add_norm_row(const sp_cpu_ops *cpu, const void *user, int32_t row)
{
    const norm_args *args = user;

    cpu->kernels->add(cpu->type, sp_cpu_row(cpu, args->sum, row), sp_cpu_row(cpu, args->x, row),
                      cpu->widths[args->sum]);
    norm_row(cpu, user, row);
}

sp_status sp_cpu_norm(sp_ops *ops, sp_rows x, const sp_norm *norm, sp_rows y)
{
    const norm_args args = {.norm = norm, .sum = x, .y = y};

    sp_cpu_each_row((sp_cpu_ops *)ops, norm_row, &args);
    return SP_OK;
}

sp_status sp_cpu_add_norm(sp_ops *ops, sp_rows sum, sp_rows x, const sp_norm *norm, sp_rows y)
{
    const norm_args args = {.norm = norm, .sum = sum, .x = x, .y = y};

    sp_cpu_each_row((sp_cpu_ops *)ops, add_norm_row, &args);
    return SP_OK;
}

/* ---- the activation ------------------------------------------------------------------------ */

typedef struct silu_args {
    sp_rows gate, up;
} silu_args;

static void silu_row(const sp_cpu_ops *cpu, const void *user, int32_t row)
{
    const silu_args *args = user;
    void *gate = sp_cpu_row(cpu, args->gate, row);

    cpu->kernels->silu_mul(cpu->type, gate, gate, sp_cpu_row(cpu, args->up, row),
                           cpu->widths[args->gate]);
}

sp_status sp_cpu_silu_mul(sp_ops *ops, sp_rows gate, sp_rows up)
{
    const silu_args args = {gate, up};

    sp_cpu_each_row((sp_cpu_ops *)ops, silu_row, &args);
    return SP_OK;
}
