#include "base/alloc.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/text.h"
#include "cli/bench.h"

#include <sidepath/device.h>

#include <string.h>
#include <sys/utsname.h>
#include <unistd.h>

#define READ_BYTES  ((size_t)1 << 30)
#define READ_ROUNDS 5
#define TASK_BYTES  ((size_t)4 << 20)
#define READ_LANES  16
#define COPY_BYTES  ((size_t)512 << 20)

typedef struct read_job {
    const uint64_t *data;
    uint64_t sums[READ_BYTES / TASK_BYTES]; /* kept, so that no read can be left out */
} read_job;

/* Independent sums, so that the reads do not wait for each other. */
static void read_task(void *user, int32_t task, int32_t thread)
{
    read_job *job = user;
    const uint64_t *data = job->data + (size_t)task * (TASK_BYTES / sizeof(uint64_t));
    uint64_t lanes[READ_LANES] = {0};
    uint64_t sum = 0;

    (void)thread;
    for (size_t i = 0; i < TASK_BYTES / sizeof(uint64_t); i += READ_LANES)
        for (size_t lane = 0; lane < READ_LANES; lane++)
            lanes[lane] += data[i + lane];
    for (size_t lane = 0; lane < READ_LANES; lane++)
        sum += lanes[lane];
    job->sums[task] = sum;
}

sp_status sp_bench_read_bandwidth(int32_t threads, double *out_bytes_per_second, sp_error *error)
{
    sp_exec_options options;
    read_job *job = sp_calloc(1, sizeof *job);
    uint64_t *data = sp_aligned_calloc(READ_BYTES, 4096);
    sp_exec *exec = NULL;
    double best = 0;
    sp_status status = SP_ERR_MEMORY;

    sp_exec_options_default(&options, sizeof options);
    options.threads = threads;
    if (job && data)
        status = sp_exec_create(&options, &exec, NULL);
    if (status != SP_OK) {
        sp_fail(error, status, NULL, NULL, -1, "cannot measure the read bandwidth: %s",
                sp_status_text(status));
        goto free_data;
    }
    job->data = data;
    for (int round = 0; round < READ_ROUNDS; round++) {
        double began = sp_clock_seconds();
        double rate;

        sp_exec_run(exec, read_task, job, (int32_t)(READ_BYTES / TASK_BYTES));
        rate = (double)READ_BYTES / (sp_clock_seconds() - began);
        best = rate > best ? rate : best;
    }
    *out_bytes_per_second = best;
    sp_exec_destroy(exec);
free_data:
    sp_aligned_free(data);
    sp_free(job);
    return status;
}

/* ---- a device ------------------------------------------------------------------------------ */

static sp_status time_copy(sp_device *device, char *memory, double *out_seconds, sp_error *error)
{
    sp_stream *stream = sp_device_main_stream(device);
    double began = sp_clock_seconds();
    sp_status status = sp_stream_copy(stream, memory, memory + COPY_BYTES, COPY_BYTES, error);

    if (status == SP_OK)
        status = sp_stream_wait(stream, error);
    *out_seconds = sp_clock_seconds() - began;
    return status;
}

sp_status sp_bench_device_bandwidth(const char *name, double *out_bytes_per_second, sp_error *error)
{
    sp_device *device;
    void *memory;
    double best = 0;
    sp_status status = sp_device_open(name, NULL, &device, error);

    if (status != SP_OK)
        return status;
    status = sp_device_alloc(device, 2 * COPY_BYTES, &memory, error);
    if (status != SP_OK)
        goto close_device;
    for (int round = 0; round < READ_ROUNDS && status == SP_OK; round++) {
        double seconds, rate;

        status = time_copy(device, memory, &seconds, error);
        rate = 2 * (double)COPY_BYTES / seconds;
        best = rate > best ? rate : best;
    }
    *out_bytes_per_second = best;
    sp_device_free(device, memory);
close_device:
    sp_device_close(device);
    return status;
}

/* ---- the machine --------------------------------------------------------------------------- */

static void add_cpu_model(sp_text *out)
{
    char line[512];
    const char *model = "unknown";
    FILE *info = fopen("/proc/cpuinfo", "r");

    while (info && fgets(line, sizeof line, info)) {
        const char *colon = strchr(line, ':');

        if (strncmp(line, "model name", 10) == 0 && colon) {
            line[strcspn(line, "\n")] = '\0';
            model = colon + 2;
            break;
        }
    }
    sp_text_json_string(out, model, strlen(model));
    if (info)
        fclose(info);
}

void sp_bench_print_machine(FILE *stream)
{
    struct utsname name;
    sp_text out = {0};

    sp_text_add(&out, "\"machine\": {\"cpu\": ");
    add_cpu_model(&out);
    sp_text_format(&out, ", \"cpus\": %ld", sysconf(_SC_NPROCESSORS_ONLN));
    if (uname(&name) == 0)
        sp_text_format(&out, ", \"system\": \"%s %s\"", name.sysname, name.machine);
    sp_text_add(&out, "}");
    fputs(out.data ? out.data : "\"machine\": {}", stream);
    sp_text_free(&out);
}
