/* delta_call.h: the calls of sidepath/delta.h from arguments, for tests that make many. */
#ifndef SP_TEST_SUPPORT_DELTA_CALL_H
#define SP_TEST_SUPPORT_DELTA_CALL_H

#include <sidepath/delta.h>

static inline sp_delta_call hand_call(const sp_plan *plan, sp_dtype x_type, const void *x,
                                      int64_t x_stride, const sp_delta_output *outputs,
                                      int32_t n_outputs)
{
    return (sp_delta_call){
        .struct_bytes = sizeof(sp_delta_call),
        .plan = plan,
        .x = x,
        .x_stride = x_stride,
        .x_type = x_type,
        .outputs = outputs,
        .n_outputs = n_outputs,
    };
}

static inline sp_status hand_apply(sp_delta *delta, const sp_plan *plan, sp_dtype x_type,
                                   const void *x, int64_t x_stride, const sp_delta_output *outputs,
                                   int32_t n_outputs)
{
    sp_delta_call call = hand_call(plan, x_type, x, x_stride, outputs, n_outputs);

    return sp_delta_apply(delta, &call, NULL);
}

static inline sp_status hand_embed(sp_delta *delta, const sp_plan *plan, const int32_t *tokens,
                                   void *y, int64_t y_stride)
{
    const sp_delta_embed_call call = {
        .struct_bytes = sizeof call,
        .plan = plan,
        .tokens = tokens,
        .y = y,
        .y_stride = y_stride,
    };

    return sp_delta_embed(delta, &call, NULL);
}

static inline sp_status hand_head(sp_delta *delta, const sp_plan *plan, sp_dtype x_type,
                                  const void *x, int64_t x_stride, sp_dtype logits_type,
                                  void *logits, int64_t logits_stride)
{
    const sp_delta_head_call call = {
        .struct_bytes = sizeof call,
        .plan = plan,
        .x = x,
        .x_stride = x_stride,
        .x_type = x_type,
        .logits = logits,
        .logits_stride = logits_stride,
        .logits_type = logits_type,
    };

    return sp_delta_head(delta, &call, NULL);
}

/* One call of the single-adapter form, on an object made for it. */
static inline sp_status hand_single(const sp_delta_single_args *args, sp_exec *exec,
                                    const char *level, sp_error *error)
{
    sp_delta_single_options options;
    sp_delta_single *single = NULL;
    sp_status status;

    sp_delta_single_options_default(&options, sizeof options);
    options.exec = exec;
    options.cpu_isa = level;
    options.rows_max = args->rows > 0 ? args->rows : 1;
    options.k_in_max = args->k_in > 0 ? args->k_in : 1;
    options.rank_max = args->rank > 0 ? args->rank : 1;
    options.x_f32 = true;
    status = sp_delta_single_create(&options, &single, error);
    if (status == SP_OK)
        status = sp_delta_single_apply(single, args, error);
    sp_delta_single_destroy(single);
    return status;
}

#endif
