#include "bench/peer_onednn.h"

#include "base/alloc.h"
#include "base/clock.h"

#ifdef SP_BENCH_ONEDNN

#include <omp.h>
#include <oneapi/dnnl/dnnl.h>

#define COPIES_MAX 64

struct sp_bench_peer {
    int32_t threads, n_copies;
    dnnl_engine_t engine;
    dnnl_stream_t stream;
    dnnl_primitive_desc_t description;
    dnnl_primitive_t matmul;
    dnnl_memory_t x, y, weights[COPIES_MAX];
};

bool sp_bench_peer_exists(void)
{
    return true;
}

static bool ok(dnnl_status_t status)
{
    return status == dnnl_success;
}

static bool describe(sp_bench_peer *peer, int64_t rows, int64_t n, int64_t k)
{
    dnnl_memory_desc_t x, w, y;
    dnnl_matmul_desc_t matmul;
    const dnnl_dims_t x_dims = {rows, k}, w_dims = {k, n}, y_dims = {rows, n};

    return ok(dnnl_memory_desc_init_by_tag(&x, 2, x_dims, dnnl_bf16, dnnl_ab)) &&
           ok(dnnl_memory_desc_init_by_tag(&w, 2, w_dims, dnnl_bf16, dnnl_format_tag_any)) &&
           ok(dnnl_memory_desc_init_by_tag(&y, 2, y_dims, dnnl_bf16, dnnl_ab)) &&
           ok(dnnl_matmul_desc_init(&matmul, &x, &w, NULL, &y)) &&
           ok(dnnl_primitive_desc_create(&peer->description, &matmul, NULL, peer->engine, NULL)) &&
           ok(dnnl_primitive_create(&peer->matmul, peer->description)) &&
           ok(dnnl_memory_create(&peer->x, &x, peer->engine, DNNL_MEMORY_NONE)) &&
           ok(dnnl_memory_create(&peer->y, &y, peer->engine, DNNL_MEMORY_NONE));
}

static bool execute(sp_bench_peer *peer, const_dnnl_primitive_t primitive, int n_args,
                    const dnnl_exec_arg_t *args)
{
    omp_set_num_threads(peer->threads);
    return ok(dnnl_primitive_execute(primitive, peer->stream, n_args, args)) &&
           ok(dnnl_stream_wait(peer->stream));
}

/* One copy of the weights in the layout that the matmul requires. */
static bool reorder(sp_bench_peer *peer, const dnnl_memory_desc_t *wanted, dnnl_memory_t plain,
                    const dnnl_memory_desc_t *plain_desc, dnnl_memory_t *out_copy)
{
    dnnl_primitive_desc_t description = NULL;
    dnnl_primitive_t primitive = NULL;
    bool done = ok(dnnl_memory_create(out_copy, wanted, peer->engine, DNNL_MEMORY_ALLOCATE)) &&
                ok(dnnl_reorder_primitive_desc_create(&description, plain_desc, peer->engine,
                                                      wanted, peer->engine, NULL)) &&
                ok(dnnl_primitive_create(&primitive, description));

    if (done) {
        const dnnl_exec_arg_t args[] = {{DNNL_ARG_FROM, plain}, {DNNL_ARG_TO, *out_copy}};

        done = execute(peer, primitive, 2, args);
    }
    if (primitive)
        (void)dnnl_primitive_destroy(primitive);
    if (description)
        (void)dnnl_primitive_desc_destroy(description);
    return done;
}

static bool reorder_all(sp_bench_peer *peer, int64_t n, int64_t k, const uint16_t *weights,
                        int32_t n_copies)
{
    const dnnl_memory_desc_t *wanted =
        dnnl_primitive_desc_query_md(peer->description, dnnl_query_weights_md, 0);
    const dnnl_dims_t dims = {k, n};
    dnnl_memory_desc_t plain_desc;
    dnnl_memory_t plain = NULL;
    bool done = wanted && n_copies <= COPIES_MAX &&
                ok(dnnl_memory_desc_init_by_tag(&plain_desc, 2, dims, dnnl_bf16, dnnl_ba)) &&
                ok(dnnl_memory_create(&plain, &plain_desc, peer->engine, DNNL_MEMORY_NONE)) &&
                ok(dnnl_memory_set_data_handle(plain, (void *)(uintptr_t)weights));

    for (; done && peer->n_copies < n_copies; peer->n_copies++)
        done = reorder(peer, wanted, plain, &plain_desc, &peer->weights[peer->n_copies]);
    if (plain)
        (void)dnnl_memory_destroy(plain);
    return done;
}

sp_bench_peer *sp_bench_peer_create(int32_t threads, int64_t rows, int64_t n, int64_t k,
                                    const uint16_t *weights, int32_t n_copies)
{
    sp_bench_peer *peer = sp_calloc(1, sizeof *peer);

    if (!peer)
        return NULL;
    peer->threads = threads;
    omp_set_num_threads(threads);
    if (ok(dnnl_engine_create(&peer->engine, dnnl_cpu, 0)) &&
        ok(dnnl_stream_create(&peer->stream, peer->engine, dnnl_stream_default_flags)) &&
        describe(peer, rows, n, k) && reorder_all(peer, n, k, weights, n_copies))
        return peer;
    sp_bench_peer_destroy(peer);
    return NULL;
}

void sp_bench_peer_destroy(sp_bench_peer *peer)
{
    if (!peer)
        return;
    for (int32_t i = 0; i < COPIES_MAX; i++)
        if (peer->weights[i])
            (void)dnnl_memory_destroy(peer->weights[i]);
    if (peer->x)
        (void)dnnl_memory_destroy(peer->x);
    if (peer->y)
        (void)dnnl_memory_destroy(peer->y);
    if (peer->matmul)
        (void)dnnl_primitive_destroy(peer->matmul);
    if (peer->description)
        (void)dnnl_primitive_desc_destroy(peer->description);
    if (peer->stream)
        (void)dnnl_stream_destroy(peer->stream);
    if (peer->engine)
        (void)dnnl_engine_destroy(peer->engine);
    sp_free(peer);
}

double sp_bench_peer_run(sp_bench_peer *peer, const uint16_t *x, uint16_t *y, int32_t copy)
{
    const dnnl_exec_arg_t args[] = {{DNNL_ARG_SRC, peer->x},
                                    {DNNL_ARG_WEIGHTS, peer->weights[copy % peer->n_copies]},
                                    {DNNL_ARG_DST, peer->y}};
    double begin;

    if (!ok(dnnl_memory_set_data_handle(peer->x, (void *)(uintptr_t)x)) ||
        !ok(dnnl_memory_set_data_handle(peer->y, y)))
        return -1;
    begin = sp_clock_seconds();
    return execute(peer, peer->matmul, 3, args) ? sp_clock_seconds() - begin : -1;
}

#else

bool sp_bench_peer_exists(void)
{
    return false;
}

sp_bench_peer *sp_bench_peer_create(int32_t threads, int64_t rows, int64_t n, int64_t k,
                                    const uint16_t *weights, int32_t n_copies)
{
    (void)threads, (void)rows, (void)n, (void)k, (void)weights, (void)n_copies;
    return NULL;
}

void sp_bench_peer_destroy(sp_bench_peer *peer)
{
    (void)peer;
}

double sp_bench_peer_run(sp_bench_peer *peer, const uint16_t *x, uint16_t *y, int32_t copy)
{
    (void)peer, (void)x, (void)y, (void)copy;
    return -1;
}

#endif
