/*
 * bench_cuda_choice.c: the choice of the tokens of a decode step on a GPU, from logits on the
 * device to tokens and logprobs on the host: by the kernel, and by the host after a copy of the
 * rows, by exact sums and as the CPU's backend does. The host scores row by row, as an engine does.
 * Prints one JSON line per cell, of medians.
 *     bench_cuda_choice [ROWS [VOCAB]]
 */
#include "base/clock.h"
#include "cuda/rig.h"
#include "engine/ops/cuda_ops.h"
#include "engine/sampling/logprobs.h"

#include <stdio.h>

enum {
    ROWS_MAX = SP_LOGIT_ROWS_MAX,
    TOKENS = 1024,
    PROMPT = 512,
    TIMES = 21,
    TIMES_HOST = 5,
    N_TOP = 5
};

static struct {
    rig open;
    sp_cuda_ops cuda;
    sp_exec *exec;
    const sp_kernels *kernels;
    sp_sample_params params;
    sp_penalties penalties;
    sp_ends ends;
    int32_t tokens[ROWS_MAX][TOKENS];
    sp_choice choices[ROWS_MAX];
    sp_logprob top[N_TOP];
    int32_t rows, vocab;
} b;

static const struct {
    const char *name;
    double temperature, top_p, repetition;
    int32_t top_k, n_top;
} cells[] = {
    {"greedy", 0, 1, 1, 0, -1},
    {"greedy_logprobs", 0, 1, 1, 0, N_TOP},
    {"all", 1, 1, 1, 0, -1},
    {"top_p", 0.8, 0.95, 1, 0, -1},
    {"top_k_p", 0.8, 0.95, 1, 50, -1},
    {"top_k_p_logprobs", 0.8, 0.95, 1, 50, N_TOP},
    {"penalties", 0.8, 0.95, 1.1, 50, -1},
};

static sp_status place(void)
{
    sp_cuda_ops *cuda = &b.cuda;
    sp_cuda_window *window = &cuda->window;
    const sp_ops_options options = {.exec = b.exec, .kernels = b.kernels, .vocab = b.vocab};
    size_t index = (size_t)b.rows * 4, logits = index * (size_t)b.vocab;
    sp_status status = SP_OK;

    window->logits = sp_cuda_block(cuda, logits, &status, NULL);
    window->token = sp_cuda_block(cuda, index, &status, NULL);
    window->bad = sp_cuda_block(cuda, index, &status, NULL);
    window->greedy_scratch = sp_cuda_block(cuda, sp_cuda_greedy_bytes(b.rows), &status, NULL);
    window->host_logits = sp_cuda_pinned(cuda, logits, &status, NULL);
    window->host_token = sp_cuda_pinned(cuda, index, &status, NULL);
    window->host_bad = sp_cuda_pinned(cuda, index, &status, NULL);
    if (status == SP_OK && !sp_host_choice_create(&options, b.rows, &cuda->choice))
        status = SP_ERR_MEMORY;
    if (status == SP_OK)
        status = sp_cuda_samples_create(cuda, NULL);
    for (size_t i = 0; status == SP_OK && i < logits / 4; i++) {
        uint32_t hash = rig_hash((uint32_t)i);

        window->host_logits[i] = (float)((hash & 0xffff) + (hash >> 16)) * 0x1p-12f - 16;
    }
    return status == SP_OK
               ? sp_device_write(cuda->device, window->logits, window->host_logits, logits, NULL)
               : status;
}

static sp_status set_up(void)
{
    sp_cuda_ops *cuda = &b.cuda;
    sp_device *gpu = NULL;
    sp_exec_options options;
    sp_status status = sp_device_open("cuda", NULL, &gpu, NULL);

    if (status == SP_OK)
        status = rig_start(&b.open, gpu, NULL);
    if (status == SP_OK)
        status = sp_ops_cuda_get(gpu, &cuda->kernels, NULL);
    if (status == SP_OK)
        status = sp_kernels_get(NULL, &b.kernels, NULL);
    sp_exec_options_default(&options, sizeof options);
    if (status == SP_OK)
        status = sp_exec_create(&options, &b.exec, NULL);
    if (status != SP_OK)
        return status;
    cuda->device = gpu;
    cuda->gpu = b.open.gpu;
    cuda->stream = sp_device_main_stream(gpu);
    cuda->native = sp_stream_native(cuda->stream);
    cuda->vocab = b.vocab;
    cuda->ops.window = b.rows;
    cuda->attention.positions_max = 4096;
    return place();
}

static void make_choices(int cell)
{
    b.params = (sp_sample_params){.temperature = cells[cell].temperature,
                                  .top_k = cells[cell].top_k,
                                  .top_p = cells[cell].top_p,
                                  .seed = 1};
    b.penalties = (sp_penalties){.repetition = cells[cell].repetition};
    for (int32_t i = 0; i < b.rows; i++) {
        for (int32_t t = 0; t < TOKENS; t++)
            b.tokens[i][t] = (int32_t)(rig_hash((uint32_t)(i * TOKENS + t)) % (uint32_t)b.vocab);
        b.choices[i] = (sp_choice){.sampling = &b.params,
                                   .penalties = &b.penalties,
                                   .ends = &b.ends,
                                   .tokens = b.tokens[i],
                                   .n_prompt = PROMPT,
                                   .n_tokens = TOKENS,
                                   .adjusted = sp_penalties_any(&b.penalties),
                                   .given = -1,
                                   .n_top = cells[cell].n_top};
    }
}

static sp_status score(int32_t index, float *out_logprob)
{
    const sp_choice *choice = &b.choices[index];

    if (b.cuda.samples.there || b.cuda.choice.exact)
        return sp_cuda_op_score(&b.cuda.ops, index, choice->token, choice->n_top, out_logprob,
                                b.top);
    return sp_logprobs(sp_cuda_op_read_logits(&b.cuda.ops, index), b.vocab, choice->token,
                       choice->n_top, out_logprob, b.top, NULL);
}

static sp_status choose(void)
{
    sp_status status = SP_OK;
    float logprob;

    memset(b.cuda.window.fetched, 0, sizeof b.cuda.window.fetched);
    memset(b.cuda.samples.n_top, -1, sizeof b.cuda.samples.n_top);
    sp_cuda_op_choose(&b.cuda.ops, b.choices, b.rows);
    for (int32_t i = 0; i < b.rows && status == SP_OK; i++) {
        status = b.choices[i].status;
        if (status == SP_OK && b.choices[i].n_top >= 0)
            status = score(i, &logprob);
    }
    return status;
}

static int ascending(const void *a, const void *c)
{
    double x = *(const double *)a, y = *(const double *)c;

    return (x > y) - (x < y);
}

/* Median microseconds of up to TIMES; negative after a failure. */
static double time_choice(int times)
{
    double seconds[TIMES];

    for (int i = 0; i < times; i++) {
        double began = sp_clock_seconds();

        if (choose() != SP_OK)
            return -1;
        seconds[i] = sp_clock_seconds() - began;
    }
    qsort(seconds, (size_t)times, sizeof *seconds, ascending);
    return seconds[times / 2] * 1e6;
}

static void run_cell(int cell)
{
    double device, exact, before;

    make_choices(cell);
    device = time_choice(TIMES);
    b.cuda.samples.there = false;
    b.cuda.choice.exact = true;
    exact = time_choice(TIMES_HOST);
    b.cuda.choice.exact = false;
    before = time_choice(TIMES_HOST);
    b.cuda.samples.there = true;
    printf("{\"cell\": \"%s\", \"rows\": %d, \"vocab\": %d, \"threads\": %d, \"device_us\": %.1f, "
           "\"host_exact_us\": %.1f, \"host_us\": %.1f}\n",
           cells[cell].name, b.rows, b.vocab, sp_exec_threads(b.exec), device, exact, before);
    (void)fflush(stdout);
}

int main(int argc, char **argv)
{
    sp_status status;

    b.rows = argc > 1 ? (int32_t)strtol(argv[1], NULL, 10) : 64;
    b.vocab = argc > 2 ? (int32_t)strtol(argv[2], NULL, 10) : 151936;
    if (b.rows < 1 || b.rows > ROWS_MAX || b.vocab < N_TOP)
        return 2;
    status = set_up();
    if (status != SP_OK || !b.cuda.samples.there) {
        fprintf(stderr, "bench_cuda_choice: %s\n",
                status == SP_OK ? "the GPU lacks the kernel" : sp_status_text(status));
        return 1;
    }
    for (int cell = 0; cell < (int)(sizeof cells / sizeof cells[0]); cell++)
        run_cell(cell);
    return 0;
}
