/*
 * runtime.cu: the device entries, one runtime call each. cudart is linked statically and libcuda
 * not at all, so that the object loads, and reports an error, where there is no driver.
 */
#include "device/cuda/current.cuh"
#include "device/device_cuda.h"

#include <stdio.h>

/* The GPU is current until the entry returns. */
#define SELECT(gpu)                   \
    sp_cuda_current selected(gpu);    \
    if (selected.code != cudaSuccess) \
    return failed(selected.code)

/* Clears the runtime's last error, or a later launch would report it. */
static int failed(cudaError_t code)
{
    if (code != cudaSuccess)
        (void)cudaGetLastError();
    return (int)code;
}

extern "C" {

int sp_cuda_error_text(int code, char *out_text, size_t bytes)
{
    snprintf(out_text, bytes, "%s: %s", cudaGetErrorName((cudaError_t)code),
             cudaGetErrorString((cudaError_t)code));
    return 0;
}

int sp_cuda_device_count(int *out_count)
{
    return failed(cudaGetDeviceCount(out_count));
}

int sp_cuda_device_open(int gpu, int *out_major, int *out_minor, int *out_multiprocessors)
{
    cudaError_t code = sp_cuda_current_init(gpu);

    if (code == cudaSuccess)
        code = cudaDeviceGetAttribute(out_major, cudaDevAttrComputeCapabilityMajor, gpu);
    if (code == cudaSuccess)
        code = cudaDeviceGetAttribute(out_minor, cudaDevAttrComputeCapabilityMinor, gpu);
    if (code == cudaSuccess)
        code = cudaDeviceGetAttribute(out_multiprocessors, cudaDevAttrMultiProcessorCount, gpu);
    return failed(code);
}

int sp_cuda_memory(int gpu, size_t *out_free, size_t *out_total)
{
    SELECT(gpu);
    return failed(cudaMemGetInfo(out_free, out_total));
}

int sp_cuda_alloc(int gpu, void **out_memory, size_t bytes)
{
    SELECT(gpu);
    return failed(cudaMalloc(out_memory, bytes));
}

int sp_cuda_release(int gpu, void *memory)
{
    SELECT(gpu);
    return failed(cudaFree(memory));
}

int sp_cuda_alloc_pinned(int gpu, void **out_memory, size_t bytes)
{
    SELECT(gpu);
    return failed(cudaHostAlloc(out_memory, bytes, cudaHostAllocDefault));
}

int sp_cuda_release_pinned(int gpu, void *memory)
{
    SELECT(gpu);
    return failed(cudaFreeHost(memory));
}

int sp_cuda_pin(int gpu, void *memory, size_t bytes)
{
    SELECT(gpu);
    return failed(cudaHostRegister(memory, bytes, cudaHostRegisterDefault));
}

int sp_cuda_unpin(int gpu, void *memory)
{
    SELECT(gpu);
    return failed(cudaHostUnregister(memory));
}

int sp_cuda_stream_create(int gpu, void **out_stream)
{
    SELECT(gpu);
    return failed(cudaStreamCreateWithFlags((cudaStream_t *)out_stream, cudaStreamNonBlocking));
}

int sp_cuda_stream_destroy(int gpu, void *stream)
{
    SELECT(gpu);
    return failed(cudaStreamDestroy((cudaStream_t)stream));
}

int sp_cuda_stream_wait(int gpu, void *stream)
{
    SELECT(gpu);
    return failed(cudaStreamSynchronize((cudaStream_t)stream));
}

int sp_cuda_stream_wait_event(int gpu, void *stream, void *event)
{
    SELECT(gpu);
    return failed(cudaStreamWaitEvent((cudaStream_t)stream, (cudaEvent_t)event, 0));
}

int sp_cuda_copy(int gpu, void *to, const void *from, size_t bytes, void *stream)
{
    SELECT(gpu);
    return failed(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, (cudaStream_t)stream));
}

int sp_cuda_copy_column(int gpu, void *to, size_t to_stride, const void *from, size_t from_stride,
                        size_t width, size_t height, void *stream)
{
    SELECT(gpu);
    return failed(cudaMemcpy2DAsync(to, to_stride, from, from_stride, width, height,
                                    cudaMemcpyDefault, (cudaStream_t)stream));
}

int sp_cuda_zero(int gpu, void *to, size_t bytes, void *stream)
{
    SELECT(gpu);
    return failed(cudaMemsetAsync(to, 0, bytes, (cudaStream_t)stream));
}

int sp_cuda_event_create(int gpu, void **out_event)
{
    SELECT(gpu);
    return failed(cudaEventCreate((cudaEvent_t *)out_event));
}

int sp_cuda_event_destroy(int gpu, void *event)
{
    SELECT(gpu);
    return failed(cudaEventDestroy((cudaEvent_t)event));
}

int sp_cuda_event_record(int gpu, void *event, void *stream)
{
    SELECT(gpu);
    return failed(cudaEventRecord((cudaEvent_t)event, (cudaStream_t)stream));
}

int sp_cuda_event_query(int gpu, void *event)
{
    SELECT(gpu);
    return failed(cudaEventQuery((cudaEvent_t)event));
}

int sp_cuda_event_wait(int gpu, void *event)
{
    SELECT(gpu);
    return failed(cudaEventSynchronize((cudaEvent_t)event));
}

int sp_cuda_event_elapsed(int gpu, void *from, void *to, float *out_ms)
{
    SELECT(gpu);
    return failed(cudaEventElapsedTime(out_ms, (cudaEvent_t)from, (cudaEvent_t)to));
}

int sp_cuda_graph_begin(int gpu, void *stream)
{
    SELECT(gpu);
    return failed(cudaStreamBeginCapture((cudaStream_t)stream, cudaStreamCaptureModeThreadLocal));
}

int sp_cuda_graph_end(int gpu, void *stream, void **out_graph)
{
    cudaGraph_t graph = NULL;
    cudaError_t code;

    SELECT(gpu);
    code = cudaStreamEndCapture((cudaStream_t)stream, &graph);
    if (code == cudaSuccess)
        code = cudaGraphInstantiate((cudaGraphExec_t *)out_graph, graph,
                                    cudaGraphInstantiateFlagUseNodePriority);
    if (graph != NULL)
        (void)cudaGraphDestroy(graph);
    return failed(code);
}

int sp_cuda_graph_launch(int gpu, void *graph, void *stream)
{
    SELECT(gpu);
    return failed(cudaGraphLaunch((cudaGraphExec_t)graph, (cudaStream_t)stream));
}

int sp_cuda_graph_destroy(int gpu, void *graph)
{
    SELECT(gpu);
    return failed(cudaGraphExecDestroy((cudaGraphExec_t)graph));
}

} /* extern "C" */
