#include "bench/bench_machine.h"

#include "base/clock.h"
#include "kernels/cpu/cpu_features.h"

#include <stdio.h>
#include <string.h>

#if defined(__x86_64__)
#include "kernels/cpu/tiles_amx.h"

#include <immintrin.h>
#endif

#define READ_PIECE_BYTES ((size_t)1 << 20)
#define FMA_ROUNDS       2000000
#define FMA_CHAINS       12
#define READ_AHEAD_BYTES 8192
#define TILE_ROUNDS      20000 /* of four products */

#if defined(__clang__)
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

/* ---- reading ------------------------------------------------------------------------------- */

typedef struct read_job {
    const char *data;
    size_t bytes;
    uint64_t sums[256]; /* keeps the compiler from dropping the reads; one per thread and line */
} read_job;

#if defined(__x86_64__)
__attribute__((target("avx2"))) static uint64_t read_avx2(const char *data, size_t bytes)
{
    __m256i sums[4] = {_mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256(),
                       _mm256_setzero_si256()};
    uint64_t out[4];

    for (size_t i = 0; i + 128 <= bytes; i += 128)
        UNROLL
    for (size_t s = 0; s < 4; s++)
        sums[s] = _mm256_add_epi64(sums[s], _mm256_loadu_si256((const void *)(data + i + 32 * s)));
    sums[0] =
        _mm256_add_epi64(_mm256_add_epi64(sums[0], sums[1]), _mm256_add_epi64(sums[2], sums[3]));
    _mm256_storeu_si256((void *)out, sums[0]);
    return out[0] + out[1] + out[2] + out[3];
}
#endif

static uint64_t read_words(const char *data, size_t bytes)
{
    uint64_t sums[8] = {0}, word;

    for (size_t i = 0; i + 64 <= bytes; i += 64)
        for (size_t s = 0; s < 8; s++) {
            memcpy(&word, data + i + 8 * s, sizeof word);
            sums[s] += word;
        }
    return sums[0] + sums[1] + sums[2] + sums[3] + sums[4] + sums[5] + sums[6] + sums[7];
}

static void read_task(void *user, int32_t task, int32_t thread)
{
    read_job *job = user;
    size_t begin = (size_t)task * READ_PIECE_BYTES;
    size_t left = job->bytes - begin, bytes = left < READ_PIECE_BYTES ? left : READ_PIECE_BYTES;
    uint64_t *sum = &job->sums[(size_t)thread * 8 % 256];

#if defined(__x86_64__)
    if (sp_cpu_features_detect().avx2) {
        *sum += read_avx2(job->data + begin, bytes);
        return;
    }
#endif
    *sum += read_words(job->data + begin, bytes);
}

double sp_bench_read_rate(sp_exec *exec, const void *data, size_t bytes)
{
    read_job job = {.data = data, .bytes = bytes};
    double begin = sp_clock_seconds();

    sp_exec_run(exec, read_task, &job,
                (int32_t)((bytes + READ_PIECE_BYTES - 1) / READ_PIECE_BYTES));
    return (double)bytes / (sp_clock_seconds() - begin);
}

/* ---- multiplying --------------------------------------------------------------------------- */

typedef struct fma_job {
    double operations[256];
    float sink[256];
} fma_job;

#if defined(__x86_64__)
__attribute__((target("avx2,fma"))) static float fma_avx2(void)
{
    __m256 acc[FMA_CHAINS];
    __m256 factor = _mm256_set1_ps(0.999999f), term = _mm256_set1_ps(1e-6f);
    float out[8];

    UNROLL
    for (int c = 0; c < FMA_CHAINS; c++)
        acc[c] = _mm256_set1_ps((float)c);
    for (int i = 0; i < FMA_ROUNDS; i++) {
        UNROLL
        for (int c = 0; c < FMA_CHAINS; c++) {
            acc[c] = _mm256_fmadd_ps(acc[c], factor, term);
            __asm__("" : "+x"(acc[c]));
        }
    }
    UNROLL
    for (int c = 1; c < FMA_CHAINS; c++)
        acc[0] = _mm256_add_ps(acc[0], acc[c]);
    _mm256_storeu_ps(out, acc[0]);
    return out[0];
}

__attribute__((target("avx512f"))) static float fma_avx512(void)
{
    __m512 acc[FMA_CHAINS];
    __m512 factor = _mm512_set1_ps(0.999999f), term = _mm512_set1_ps(1e-6f);

    UNROLL
    for (int c = 0; c < FMA_CHAINS; c++)
        acc[c] = _mm512_set1_ps((float)c);
    for (int i = 0; i < FMA_ROUNDS; i++) {
        UNROLL
        for (int c = 0; c < FMA_CHAINS; c++) {
            acc[c] = _mm512_fmadd_ps(acc[c], factor, term);
            __asm__("" : "+v"(acc[c]));
        }
    }
    UNROLL
    for (int c = 1; c < FMA_CHAINS; c++)
        acc[0] = _mm512_add_ps(acc[0], acc[c]);
    return _mm512_cvtss_f32(acc[0]);
}
#endif

static float multiply_add_scalar(void)
{
    float acc[FMA_CHAINS] = {0};

    for (int i = 0; i < FMA_ROUNDS; i++)
        for (int c = 0; c < FMA_CHAINS; c++)
            acc[c] = acc[c] * 0.999999f + 1e-6f;
    for (int c = 1; c < FMA_CHAINS; c++)
        acc[0] += acc[c];
    return acc[0];
}

static void fma_task(void *user, int32_t task, int32_t thread)
{
    fma_job *job = user;
    double lanes = 1.0;

    (void)thread;
#if defined(__x86_64__)
    sp_cpu_features features = sp_cpu_features_detect();

    if (features.avx512) {
        job->sink[task] = fma_avx512();
        lanes = 16.0;
    } else if (features.avx2) {
        job->sink[task] = fma_avx2();
        lanes = 8.0;
    } else
#endif
        job->sink[task] = multiply_add_scalar();
    job->operations[task] = 2.0 * lanes * FMA_CHAINS * FMA_ROUNDS;
}

double sp_bench_fma_rate(sp_exec *exec)
{
    static fma_job job;
    int32_t tasks = sp_exec_threads(exec) < 256 ? sp_exec_threads(exec) : 256;
    double begin = sp_clock_seconds(), operations = 0.0, seconds;

    sp_exec_run(exec, fma_task, &job, tasks);
    seconds = sp_clock_seconds() - begin;
    for (int32_t t = 0; t < tasks; t++)
        operations += job.operations[t];
    return operations / seconds;
}

/* ---- multiplying tiles --------------------------------------------------------------------- */

#if defined(__x86_64__)
/*
 * Four sums that never leave their tiles, as many as the products need to follow each other. The
 * operands are numbers of both signs: with zeroes a processor draws less power and runs faster than
 * it ever will on data.
 */
__attribute__((target("amx-tile,amx-bf16"))) static void multiply_tiles(void)
{
    static const uint16_t some[8] = {0x3f80, 0xbf12, 0x3e55, 0xbfa3,
                                     0xbe7d, 0x3f39, 0x3fe1, 0xbf66};
    uint16_t values[TILE_ROWS][TILE_BYTES / 2];
    tile_config config = tile_config_of(TILE_ROWS);

    for (int r = 0; r < TILE_ROWS; r++)
        for (int c = 0; c < TILE_BYTES / 2; c++)
            values[r][c] = some[(r * 5 + c * 3 + r * c) % 8];
    tile_configure(&config);
    tile_load(4, values, TILE_BYTES);
    tile_load(5, values, TILE_BYTES);
    tile_load(6, values, TILE_BYTES);
    tile_load(7, values, TILE_BYTES);
    tile_zero(0);
    tile_zero(1);
    tile_zero(2);
    tile_zero(3);
    for (int i = 0; i < TILE_ROUNDS; i++) {
        tile_dot(0, 4, 6);
        tile_dot(1, 4, 7);
        tile_dot(2, 5, 6);
        tile_dot(3, 5, 7);
    }
    tile_release();
}

static void tile_task(void *user, int32_t task, int32_t thread)
{
    (void)user;
    (void)task;
    (void)thread;
    multiply_tiles();
}
#endif

double sp_bench_tile_rate(sp_exec *exec)
{
#if defined(__x86_64__)
    const double operations = 4.0 * 2.0 * TILE_ROWS * TILE_ROWS * (TILE_BYTES / 2) * TILE_ROUNDS;
    int32_t threads = sp_exec_threads(exec);
    double begin;

    if (!sp_cpu_features_detect().amx || !sp_cpu_request_tiles())
        return 0.0;
    begin = sp_clock_seconds();
    sp_exec_run(exec, tile_task, NULL, threads);
    return operations * threads / (sp_clock_seconds() - begin);
#else
    (void)exec;
    return 0.0;
#endif
}

/* ---- the machine's name -------------------------------------------------------------------- */

void sp_bench_processor_name(char *out_name, size_t bytes)
{
    char line[512];
    FILE *file = fopen("/proc/cpuinfo", "re");

    (void)snprintf(out_name, bytes, "unknown");
    while (file && fgets(line, sizeof line, file)) {
        char *colon = strchr(line, ':');

        if (strncmp(line, "model name", 10) != 0 || !colon)
            continue;
        line[strcspn(line, "\n")] = '\0';
        (void)snprintf(out_name, bytes, "%s", colon + 2);
        break;
    }
    if (file)
        (void)fclose(file);
}
