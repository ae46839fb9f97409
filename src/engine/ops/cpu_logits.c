/* cpu_logits.c: the logits of a window of rows, and logprobs from them. */
#include "base/assert.h"
#include "base/clock.h"
#include "engine/ops/cpu_ops.h"
#include "engine/sampling/logprobs.h"
#include "kernels/cpu/gemm.h"

#include <string.h>

/* ---- logits -------------------------------------------------------------------------------- */

/* Applies the rows' adapters to their logits. */
static sp_status adapt(sp_cpu_ops *cpu, sp_rows x, const int32_t *rows, int32_t n_rows)
{
    size_t row_bytes = (size_t)cpu->hidden * sp_dtype_bytes(cpu->type);
    const sp_delta_head_call call = {
        .struct_bytes = sizeof call,
        .plan = cpu->head_plan,
        .x = cpu->logit_rows,
        .x_stride = cpu->hidden,
        .x_type = cpu->type,
        .logits = cpu->logits,
        .logits_stride = cpu->vocab,
        .logits_type = SP_DTYPE_F32,
    };
    sp_status status = sp_plan_select(cpu->head_plan, cpu->plan, rows, n_rows, NULL);

    if (status != SP_OK)
        return status;
    for (int32_t i = 0; i < n_rows; i++)
        memcpy((char *)cpu->logit_rows + (size_t)i * row_bytes, sp_cpu_row(cpu, x, rows[i]),
               row_bytes);
    return sp_delta_head(cpu->delta, &call, NULL);
}

sp_status sp_cpu_logits(sp_ops *ops, sp_rows x, const sp_weight *head, const int32_t *rows,
                        int32_t n_rows)
{
    sp_cpu_ops *cpu = (sp_cpu_ops *)ops;
    double began;
    sp_status status;
    sp_gemm_args args = {
        .packed_x = cpu->packed,
        .x_type = cpu->type,
        .w_type = head->type,
        .y_type = SP_DTYPE_F32,
        .epilogue = SP_EPILOGUE_STORE,
        .rows = n_rows,
        .n = head->rows,
        .k = head->columns,
        .w = head->placed,
        .w_stride = head->columns,
        .y = cpu->logits,
        .y_stride = cpu->vocab,
    };

    SP_ASSERT(n_rows > 0 && n_rows <= SP_CPU_WINDOW);
    SP_ASSERT(head->rows == cpu->vocab && head->columns == cpu->hidden);
    sp_gemm_pack(cpu->kernels, cpu->exec, cpu->packed, cpu->type, head->type, cpu->rows[x],
                 cpu->widths[x], rows, n_rows, head->columns);
    sp_gemm_run(cpu->kernels, cpu->exec, &args, 1);
    if (!cpu->delta || !sp_delta_has_tokens(cpu->delta, SP_SITE_HEAD))
        return SP_OK;
    began = sp_clock_seconds();
    status = adapt(cpu, x, rows, n_rows);
    ops->delta_seconds += sp_clock_seconds() - began;
    return status;
}

const float *sp_cpu_read_logits(sp_ops *ops, int32_t index)
{
    const sp_cpu_ops *cpu = (const sp_cpu_ops *)ops;

    return cpu->logits + (size_t)index * (size_t)cpu->vocab;
}

sp_status sp_cpu_score(sp_ops *ops, int32_t index, int32_t token, int32_t n_top, float *out_logprob,
                       sp_logprob *out_top)
{
    const sp_cpu_ops *cpu = (const sp_cpu_ops *)ops;

    return sp_logprobs(sp_cpu_read_logits(ops, index), cpu->vocab, token, n_top, out_logprob,
                       out_top, NULL);
}

void sp_cpu_choose(sp_ops *ops, sp_choice *choices, int32_t n)
{
    const sp_cpu_ops *cpu = (const sp_cpu_ops *)ops;

    sp_host_choose(&cpu->choice, cpu->logits, choices, n);
}
