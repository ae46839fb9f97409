/*
 * Adapters from memory: any config with any views gives an adapter or a named refusal, and no byte
 * outside of a view is read.
 *
 * The input is options, the config and the views, in the order in which they are read here. A view
 * gets a block of exactly the bytes that it spans; one that spans more than a test can give has no
 * memory; and one that cannot be right has a single byte, which must not be touched.
 */
#include "fuzz/target.h"

#include <sidepath/intake.h>

#include <string.h>

#define VIEWS_MAX  12
#define SPAN_MAX   ((uint64_t)1 << 16)
#define DIMS_MAX   3
#define NAME_BYTES 96

typedef struct cursor {
    const uint8_t *data;
    size_t left;
} cursor;

typedef struct fuzz_view {
    char name[NAME_BYTES];
    int64_t shape[DIMS_MAX], strides[DIMS_MAX];
    void *block;
} fuzz_view;

static uint8_t next_byte(cursor *c)
{
    if (c->left == 0)
        return 0;
    c->left--;
    return *c->data++;
}

/* A small number, or after 0xff one of 64 bits. */
static int64_t next_number(cursor *c)
{
    uint64_t number = next_byte(c);

    if (number != 0xff)
        return (int64_t)number;
    for (int i = 0; i < 8; i++)
        number = number << 8 | next_byte(c);
    return (int64_t)number;
}

/* Length, then bytes; cut to what there is and what fits. */
static size_t next_text(cursor *c, char *out_text, size_t room)
{
    size_t n = next_byte(c) | (size_t)next_byte(c) << 8;

    n = n < c->left ? n : c->left;
    n = n < room - 1 ? n : room - 1;
    memcpy(out_text, c->data, n);
    out_text[n] = '\0';
    c->data += n;
    c->left -= n;
    return n;
}

/* Bytes from data to the last element's end; UINT64_MAX where that is beyond SPAN_MAX. */
static uint64_t span_of(const sp_tensor_view *view, size_t element_bytes)
{
    uint64_t last = 0, dense = 1;

    for (int32_t i = 0; i < view->n_dims; i++) {
        if (view->shape[i] == 0)
            return 0;
    }
    for (int32_t i = view->n_dims - 1; i >= 0; i--) {
        int64_t stride = view->strides ? view->strides[i] : (int64_t)dense;

        if (view->shape[i] < 0 || (uint64_t)view->shape[i] > SPAN_MAX || stride < 0 ||
            (uint64_t)stride > SPAN_MAX)
            return UINT64_MAX;
        last += (uint64_t)(view->shape[i] - 1) * (uint64_t)stride;
        dense *= (uint64_t)view->shape[i];
        if (last > SPAN_MAX || dense > SPAN_MAX)
            return UINT64_MAX;
    }
    last = (last + 1) * element_bytes + view->byte_offset;
    return view->byte_offset <= SPAN_MAX && last <= SPAN_MAX ? last : UINT64_MAX;
}

/* No memory could make it right. */
static bool is_hopeless(const sp_tensor_view *view)
{
    const int64_t far = (int64_t)1 << 62;

    for (int32_t i = 0; i < view->n_dims; i++) {
        if (view->shape[i] < 0)
            return true;
        if (view->strides && view->shape[i] > 1 &&
            (view->strides[i] <= 0 || view->strides[i] > far))
            return true;
    }
    return false;
}

/* True where the block holds all that the view spans. */
static bool next_view(cursor *c, fuzz_view *own, sp_tensor_view *view)
{
    uint8_t flags = next_byte(c), seed;
    uint64_t span;

    memset(view, 0, sizeof *view);
    view->struct_bytes = sizeof *view;
    next_text(c, own->name, sizeof own->name);
    view->name = own->name;
    view->type = (sp_tensor_type)(next_byte(c) % 24); /* there are 20 */
    view->n_dims = flags % 4;
    for (int32_t i = 0; i < view->n_dims; i++)
        own->shape[i] = next_number(c);
    view->shape = own->shape;
    if (flags & 4) {
        for (int32_t i = 0; i < view->n_dims; i++)
            own->strides[i] = next_number(c);
        view->strides = own->strides;
    }
    if (flags & 8)
        view->byte_offset = (uint64_t)next_number(c);
    if (flags & 16)
        view->device_kind = (int32_t)next_number(c);
    seed = next_byte(c);
    span = span_of(view, view->type == SP_TENSOR_F32 ? 4 : 2);
    own->block = malloc(span == UINT64_MAX ? 1 : (size_t)span + 1);
    if (!own->block)
        abort();
    /* Small finite numbers of every type; seed 255: infinities and such. */
    for (uint64_t i = 0; span != UINT64_MAX && i < span; i++)
        ((uint8_t *)own->block)[i] = (uint8_t)(seed == 255 ? 0xffu
                                               : i % 2     ? 0x3cu + seed % 2u
                                                           : i * 37u + seed);
    if (!(flags & 32) && (span != UINT64_MAX || is_hopeless(view)))
        view->data = own->block;
    return span != UINT64_MAX;
}

static sp_geometry *make_geometry(void)
{
    static const sp_site sites[] = {
        {.struct_bytes = sizeof(sp_site),
         .path = "model.layers.0.self_attn.q_proj",
         .expert = -1,
         .k_in = 8,
         .n_out = 12,
         .group = -1},
        {.struct_bytes = sizeof(sp_site),
         .path = "model.layers.0.mlp.gate_up_proj",
         .expert = -1,
         .k_in = 8,
         .n_out = 6,
         .group = -1},
        {.struct_bytes = sizeof(sp_site),
         .path = "lm_head",
         .kind = SP_SITE_HEAD,
         .layer = -1,
         .expert = -1,
         .k_in = 8,
         .n_out = 16,
         .group = -1},
    };
    sp_geometry *geometry;
    sp_error error;

    if (sp_geometry_create(sites, sizeof sites / sizeof *sites, &geometry, &error) != SP_OK)
        abort();
    return geometry;
}

static void check(sp_status status, const sp_error *error, sp_adapter *adapter)
{
    sp_digest digest;
    sp_digest none = {{0}};

    if (status != SP_OK) {
        FUZZ_CHECK(status < 0 && adapter == NULL && error->text[0] != '\0');
        FUZZ_CHECK(error->code[0] != '\0' || status == SP_ERR_ARGUMENT || status == SP_ERR_MEMORY);
        return;
    }
    digest = sp_adapter_digest(adapter);
    FUZZ_CHECK(memcmp(&digest, &none, sizeof digest) != 0);
    FUZZ_CHECK(sp_adapter_n_sites(adapter) + sp_adapter_n_tables(adapter) > 0);
    for (size_t i = 0; i < sp_adapter_n_sites(adapter); i++) {
        const sp_adapter_site *site = sp_adapter_site_at(adapter, i);

        FUZZ_CHECK(site->rank >= 1 && site->a.rows == site->rank && site->b.cols == site->rank);
        FUZZ_CHECK(site->scale > 0);
    }
    sp_adapter_release(adapter);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    static float head[16 * 8];
    const sp_served_table served = {sizeof served, head, SP_DTYPE_F32, 16, 8, false};
    cursor c = {data, bytes};
    fuzz_view own[VIEWS_MAX];
    sp_tensor_view views[VIEWS_MAX];
    char config[4096];
    uint8_t flags = next_byte(&c);
    size_t config_bytes = next_text(&c, config, sizeof config), n = 0;
    bool all_there = true;
    sp_adapter_options options;
    sp_adapter *adapter = NULL;
    sp_geometry *geometry = make_geometry();
    sp_error error;
    sp_status status;

    sp_adapter_options_default(&options, sizeof options);
    options.geometry = flags & 1 ? NULL : geometry;
    options.allow_partial = flags & 2;
    options.allow_no_effect = flags & 4;
    options.served_head = flags & 8 ? &served : NULL;
    options.rank_max = flags & 16 ? 2 : 0;
    while (n < VIEWS_MAX && c.left > 0) {
        all_there = next_view(&c, &own[n], &views[n]) && all_there;
        n++;
    }
    status = sp_adapter_from_tensors(config, config_bytes, views, n, &options, &adapter, &error);
    FUZZ_CHECK(all_there || status != SP_OK);
    check(status, &error, adapter);
    for (size_t i = 0; i < n; i++)
        free(own[i].block);
    sp_geometry_release(geometry);
    return 0;
}
