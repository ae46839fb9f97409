/*
 * peer_manifest.c: manifests and listings as JSON. What is decoded is copied into one block whose
 * size the JSON limits, so that a short text cannot take much memory.
 */
#include "base/alloc.h"
#include "base/error.h"
#include "base/half.h"
#include "base/integer.h"
#include "base/json.h"
#include "checkpoint/tensor.h"
#include "peer/peer_wire.h"

#include <math.h>
#include <string.h>

#define FORM        1 /* of both texts */
#define IMAGE_SITES (1 << 24)
#define ENTRY_BYTES 32 /* no tensor's or adapter's entry is shorter */

/* What is being decoded. */
typedef struct reader {
    const char *code; /* `peer-manifest`, `peer-listing` */
    char *memory;     /* the block */
    size_t used, n_bytes;
    sp_error *error;
} reader;

/* ---- failures -------------------------------------------------------------------------------- */

static sp_status refuse(const reader *r, const char *field, int64_t position, const char *what)
{
    return sp_fail(r->error, SP_ERR_PEER_PROTOCOL, r->code, field, position, "\"%s\" %s", field,
                   what);
}

/* The getters of json.h blame the input: here that is a peer's. */
static sp_status of_peer(const reader *r, sp_status status, const sp_error *local)
{
    if (status == SP_OK || !r->error)
        return status == SP_ERR_INPUT ? SP_ERR_PEER_PROTOCOL : status;
    *r->error = *local;
    if (status == SP_ERR_INPUT)
        r->error->status = SP_ERR_PEER_PROTOCOL;
    return r->error->status;
}

/* ---- fields ---------------------------------------------------------------------------------- */

static sp_status check_fields(const reader *r, const json_t *object, const char *what,
                              const char *const *fields, size_t n_fields)
{
    const char *key;
    json_t *value;

    if (!json_is_object(object))
        return refuse(r, what, -1, "is no object");
    json_object_foreach((json_t *)object, key, value)
    {
        size_t i = 0;

        while (i < n_fields && strcmp(fields[i], key) != 0)
            i++;
        if (i == n_fields)
            return refuse(r, key, -1, "is a field that this version does not know");
    }
    return SP_OK;
}

static sp_status read_number(const reader *r, const json_t *object, const char *field,
                             uint64_t maximum, uint64_t *out_number)
{
    int64_t number = 0;
    sp_error local;
    sp_status status =
        sp_json_int(object, field, true, 0, (int64_t)maximum, 0, r->code, &number, &local);

    *out_number = (uint64_t)number;
    return of_peer(r, status, &local);
}

static sp_status read_text(const reader *r, const json_t *object, const char *field, bool required,
                           const char **out_text)
{
    sp_error local;

    return of_peer(r, sp_json_string(object, field, required, r->code, out_text, &local), &local);
}

static int digit(char c)
{
    return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

static sp_status read_hex(const reader *r, const json_t *object, const char *field,
                          uint8_t *out_bytes, size_t n_bytes)
{
    const char *text = NULL;
    sp_status status = read_text(r, object, field, true, &text);

    if (status != SP_OK)
        return status;
    if (strlen(text) != 2 * n_bytes)
        return refuse(r, field, (int64_t)strlen(text), "has another length");
    for (size_t i = 0; i < n_bytes; i++) {
        int high = digit(text[2 * i]), low = digit(text[2 * i + 1]);

        if (high < 0 || low < 0)
            return refuse(r, field, (int64_t)(2 * i), "is not hexadecimal in small letters");
        out_bytes[i] = (uint8_t)(high << 4 | low);
    }
    return SP_OK;
}

/* ---- the block ------------------------------------------------------------------------------- */

/* `bytes` more of the block; sizes were summed before, so it does not run out. */
static void *take(reader *r, size_t bytes)
{
    void *at = r->memory + r->used;

    r->used += align_up(bytes, 16);
    return r->used <= r->n_bytes ? at : NULL;
}

static char *take_text(reader *r, const char *text, size_t n_bytes)
{
    char *copy = take(r, n_bytes + 1);

    if (copy) {
        memcpy(copy, text, n_bytes);
        copy[n_bytes] = '\0';
    }
    return copy;
}

static sp_status create_block(reader *r, size_t n_bytes, const char *what)
{
    r->memory = sp_malloc(n_bytes);
    r->n_bytes = n_bytes;
    r->used = 0;
    return r->memory ? SP_OK : sp_fail_memory(r->error, n_bytes, what);
}

/* Room for the texts of a list of `n` and one more, each rounded up. */
static size_t texts_bytes(size_t n_bytes, size_t n)
{
    return n_bytes + (n + 4) * 32;
}

/* ---- names ----------------------------------------------------------------------------------- */

static sp_status check_name(const reader *r, const char *field, const char *name)
{
    size_t n = strlen(name);

    if (n == 0 || n > SP_PEER_NAME_BYTES_MAX)
        return refuse(r, field, (int64_t)n, "has 1 to 255 bytes");
    for (size_t i = 0; i < n; i++)
        if ((unsigned char)name[i] < 0x20 || name[i] == 0x7f)
            return refuse(r, field, (int64_t)i, "has a control character");
    return SP_OK;
}

/* ---- tensors --------------------------------------------------------------------------------- */

static bool find_type(const char *name, sp_tensor_type *out_type)
{
#define TYPE_ROW(symbol, number, text, bits) {symbol, text},
    static const struct {
        sp_tensor_type type;
        const char *name;
    } types[] = {SP_TENSOR_TYPE_LIST(TYPE_ROW)};
#undef TYPE_ROW

    for (size_t i = 0; i < sizeof types / sizeof types[0]; i++) {
        if (strcmp(types[i].name, name) == 0) {
            *out_type = types[i].type;
            return true;
        }
    }
    return false;
}

static sp_status read_shape(reader *r, const json_t *object, sp_tensor *out_tensor)
{
    const json_t *shape = json_object_get(object, "shape");
    size_t n = json_array_size(shape);

    if (!json_is_array(shape) || n > SP_TENSOR_DIMS_MAX)
        return refuse(r, "shape", (int64_t)n, "is no list of at most 8 numbers");
    out_tensor->n_dims = (int32_t)n;
    for (size_t i = 0; i < n; i++) {
        const json_t *dim = json_array_get(shape, i);

        if (!json_is_integer(dim) || json_integer_value(dim) < 0)
            return refuse(r, "shape", (int64_t)i, "is no list of numbers from 0 on");
        out_tensor->dims[i] = json_integer_value(dim);
    }
    return SP_OK;
}

/* One tensor whose bytes begin at `offset`. */
static sp_status read_tensor(reader *r, const json_t *object, uint64_t offset,
                             sp_tensor *out_tensor)
{
    static const char *const fields[] = {"name", "dtype", "shape", "offset", "bytes"};
    const char *type = NULL;
    uint64_t at = 0, measured = 0;
    sp_status status = check_fields(r, object, "tensors", fields, 5);

    if (status == SP_OK)
        status = read_text(r, object, "name", true, &out_tensor->name);
    if (status == SP_OK)
        status = read_text(r, object, "dtype", true, &type);
    if (status == SP_OK && !find_type(type, &out_tensor->type))
        status = refuse(r, type, -1, "is no type of tensors");
    if (status == SP_OK)
        status = read_shape(r, object, out_tensor);
    if (status == SP_OK)
        status = read_number(r, object, "offset", SP_PEER_DATA_BYTES_MAX, &at);
    if (status == SP_OK)
        status = read_number(r, object, "bytes", SP_PEER_DATA_BYTES_MAX, &out_tensor->bytes);
    if (status != SP_OK)
        return status;
    if (at != offset)
        return refuse(r, out_tensor->name, (int64_t)at, "does not follow the tensor before it");
    if (!sp_tensor_measure(out_tensor, &measured) || measured != out_tensor->bytes)
        return refuse(r, out_tensor->name, (int64_t)out_tensor->bytes,
                      "has another length than its shape and type");
    return SP_OK;
}

static sp_status take_tensor(reader *r, const sp_tensor *tensor, sp_tensor_desc *out_desc)
{
    size_t dims_bytes = sizeof(int64_t) * (size_t)tensor->n_dims;
    int64_t *dims = take(r, dims_bytes);
    char *name = take_text(r, tensor->name, strlen(tensor->name));

    if (!dims || !name)
        return sp_fail_memory(r->error, dims_bytes, "a manifest");
    memcpy(dims, tensor->dims, dims_bytes);
    *out_desc = (sp_tensor_desc){sizeof *out_desc, name, tensor->type, tensor->n_dims, dims};
    return SP_OK;
}

static sp_status read_tensors(reader *r, const json_t *list, sp_peer_manifest *m)
{
    uint64_t offset = 0;
    sp_status status = SP_OK;

    m->n_tensors = json_array_size(list);
    m->tensors = take(r, m->n_tensors * sizeof *m->tensors);
    m->offsets = take(r, (m->n_tensors + 1) * sizeof *m->offsets);
    for (size_t i = 0; i < m->n_tensors && status == SP_OK; i++) {
        sp_tensor tensor = {.struct_bytes = sizeof tensor};

        m->offsets[i] = offset;
        status = read_tensor(r, json_array_get(list, i), offset, &tensor);
        if (status == SP_OK && tensor.bytes > SP_PEER_DATA_BYTES_MAX - offset)
            status = refuse(r, tensor.name, -1, "goes beyond the limit of an adapter");
        if (status == SP_OK)
            status = take_tensor(r, &tensor, &m->tensors[i]);
        offset += tensor.bytes;
    }
    m->offsets[m->n_tensors] = m->data_bytes = offset;
    return status;
}

/* ---- images ---------------------------------------------------------------------------------- */

static sp_status read_site(const reader *r, const json_t *ranks, const json_t *bits, size_t i,
                           sp_peer_image *image)
{
    const json_t *rank = json_array_get(ranks, i), *scale = json_array_get(bits, i);

    if (!json_is_integer(rank) || json_integer_value(rank) < 0 ||
        json_integer_value(rank) > INT32_MAX)
        return refuse(r, "ranks", (int64_t)i, "has an entry that is no rank");
    if (!json_is_integer(scale) || json_integer_value(scale) < 0 ||
        json_integer_value(scale) > UINT32_MAX)
        return refuse(r, "scale_bits", (int64_t)i, "has an entry that is no number of 32 bits");
    image->ranks[i] = (int32_t)json_integer_value(rank);
    image->scales[i] = sp_f32_from_bits((uint32_t)json_integer_value(scale));
    if (!isfinite(image->scales[i]))
        return refuse(r, "scale_bits", (int64_t)i, "has an entry that is not finite");
    return SP_OK;
}

static sp_status read_sites(reader *r, const json_t *object, sp_peer_image *image)
{
    const json_t *ranks = json_object_get(object, "ranks");
    const json_t *bits = json_object_get(object, "scale_bits");
    size_t n = json_array_size(ranks);
    sp_status status = SP_OK;

    if (!json_is_array(ranks) || !json_is_array(bits) || json_array_size(bits) != n)
        return refuse(r, "ranks", (int64_t)n, "and \"scale_bits\" are no lists of one length");
    image->n_sites = (int32_t)n;
    image->ranks = take(r, n * sizeof *image->ranks);
    image->scales = take(r, n * sizeof *image->scales);
    for (size_t i = 0; i < n && status == SP_OK; i++)
        status = read_site(r, ranks, bits, i, image);
    return status;
}

static sp_status read_image_numbers(const reader *r, const json_t *object, sp_peer_image *image)
{
    uint64_t rank = 0, pairs = 0;
    uint8_t checksum[8];
    sp_error local;
    sp_status status = read_number(r, object, "bytes", SP_PEER_DATA_BYTES_MAX, &image->bytes);

    if (status == SP_OK && json_object_get(object, "expert_bytes"))
        status = read_number(r, object, "expert_bytes", image->bytes, &image->expert_bytes);
    if (status == SP_OK)
        status = read_hex(r, object, "checksum", checksum, sizeof checksum);
    if (status == SP_OK)
        status = read_number(r, object, "rank", INT32_MAX, &rank);
    if (status == SP_OK)
        status = read_number(r, object, "pairs", INT32_MAX, &pairs);
    if (status == SP_OK)
        status = read_number(r, object, "file_bytes", SP_PEER_DATA_BYTES_MAX, &image->file_bytes);
    if (status == SP_OK)
        status = of_peer(
            r, sp_json_double(object, "row_macs", true, 0, r->code, &image->row_macs, &local),
            &local);
    if (status == SP_OK && !(isfinite(image->row_macs) && image->row_macs >= 0))
        status = refuse(r, "row_macs", -1, "is no finite number from 0 on");
    if (status != SP_OK)
        return status;
    image->rank = (int32_t)rank;
    image->pairs = (int32_t)pairs;
    for (size_t i = 0; i < sizeof checksum; i++)
        image->checksum = image->checksum << 8 | checksum[i];
    return image->bytes > 0 ? SP_OK : refuse(r, "bytes", -1, "is 0");
}

static sp_status read_image(reader *r, const json_t *object, sp_peer_manifest *m)
{
    static const char *const fields[] = {"fingerprint", "seal",       "checksum", "bytes",
                                         "ranks",       "scale_bits", "rank",     "pairs",
                                         "file_bytes",  "row_macs",   "receipt",  "expert_bytes"};
    const char *receipt = NULL;
    sp_status status;

    if (!object)
        return SP_OK;
    m->image = take(r, sizeof *m->image);
    memset(m->image, 0, sizeof *m->image);
    status = check_fields(r, object, "image", fields, sizeof fields / sizeof fields[0]);
    if (status == SP_OK)
        status = read_hex(r, object, "fingerprint", m->image->fingerprint.bytes, SP_DIGEST_BYTES);
    if (status == SP_OK)
        status = read_hex(r, object, "seal", m->image->seal.bytes, SP_DIGEST_BYTES);
    if (status == SP_OK)
        status = read_image_numbers(r, object, m->image);
    if (status == SP_OK)
        status = read_sites(r, object, m->image);
    if (status == SP_OK)
        status = read_text(r, object, "receipt", false, &receipt);
    if (status == SP_OK && receipt)
        m->image->receipt = take_text(r, receipt, strlen(receipt));
    return status;
}

/* ---- manifests ------------------------------------------------------------------------------- */

/* The parsed text, whose form must be FORM; `field` says so. */
static sp_status parse(const reader *r, const void *bytes, size_t n_bytes, uint64_t n_bytes_max,
                       const char *code_too_large, const char *field, json_t **out_root)
{
    sp_error local;
    uint64_t form = 0;
    sp_status status;

    if (n_bytes > n_bytes_max)
        return sp_fail(r->error, SP_ERR_TOO_LARGE, code_too_large, NULL, -1,
                       "%zu bytes; at most %llu are taken", n_bytes,
                       (unsigned long long)n_bytes_max);
    status =
        of_peer(r, sp_json_parse(bytes, n_bytes, field, r->code, NULL, out_root, &local), &local);
    if (status != SP_OK)
        return status;
    if (!json_is_object(*out_root))
        status = refuse(r, field, -1, "is no object");
    if (status == SP_OK)
        status = read_number(r, *out_root, field, INT32_MAX, &form);
    if (status == SP_OK && form != FORM)
        status = sp_fail(r->error, SP_ERR_PEER_PROTOCOL, "peer-version", field, (int64_t)form,
                         "\"%s\" has version %llu, and this side reads version %d", field,
                         (unsigned long long)form, FORM);
    if (status != SP_OK)
        json_decref(*out_root);
    return status;
}

/* Before memory is taken for them. */
static sp_status check_lists(const reader *r, const json_t *root, size_t n_bytes)
{
    const json_t *tensors = json_object_get(root, "tensors");
    const json_t *ranks = json_object_get(json_object_get(root, "image"), "ranks");
    size_t n = json_array_size(tensors);

    if (!json_is_array(tensors) || n > SP_PEER_TENSORS_MAX || n > n_bytes / ENTRY_BYTES)
        return refuse(r, "tensors", (int64_t)n, "is no list, or one that is too long");
    if (json_array_size(ranks) > IMAGE_SITES)
        return refuse(r, "ranks", (int64_t)json_array_size(ranks), "is too long");
    return SP_OK;
}

/* Bytes of the block for a manifest whose JSON has n_bytes. */
static size_t manifest_bytes(const json_t *root, size_t n_bytes)
{
    const json_t *tensors = json_object_get(root, "tensors");
    const json_t *image = json_object_get(root, "image");
    size_t n = json_array_size(tensors);
    size_t n_sites = json_array_size(json_object_get(image, "ranks"));
    size_t dims = SP_TENSOR_DIMS_MAX * sizeof(int64_t);

    return texts_bytes(n_bytes, n) + (n + 1) * (sizeof(sp_tensor_desc) + sizeof(uint64_t) + dims) +
           n_sites * (sizeof(int32_t) + sizeof(float)) + sizeof(sp_peer_image) + 256;
}

static sp_status read_manifest(reader *r, const json_t *root, sp_peer_manifest *m)
{
    static const char *const fields[] = {"sidepath_manifest", "name", "digest", "config",
                                         "tensors",           "image"};
    const json_t *tensors = json_object_get(root, "tensors");
    const char *name = NULL, *config = NULL;
    sp_status status = check_fields(r, root, "manifest", fields, 6);

    if (status == SP_OK)
        status = read_text(r, root, "name", true, &name);
    if (status == SP_OK)
        status = check_name(r, "name", name);
    if (status == SP_OK)
        status = read_hex(r, root, "digest", m->digest.bytes, SP_DIGEST_BYTES);
    if (status == SP_OK)
        status = read_text(r, root, "config", true, &config);
    if (status != SP_OK)
        return status;
    m->name = take_text(r, name, strlen(name));
    m->config_bytes = strlen(config);
    m->config = take_text(r, config, m->config_bytes);
    status = read_tensors(r, tensors, m);
    return status == SP_OK ? read_image(r, json_object_get(root, "image"), m) : status;
}

sp_status sp_peer_manifest_decode(const void *bytes, size_t n_bytes, sp_peer_manifest *out_manifest,
                                  sp_error *error)
{
    reader r = {.code = "peer-manifest", .error = error};
    sp_peer_manifest manifest = {0};
    json_t *root;
    sp_status status = parse(&r, bytes, n_bytes, SP_PEER_MANIFEST_BYTES_MAX,
                             "peer-manifest-too-large", "sidepath_manifest", &root);

    if (status != SP_OK)
        return status;
    status = check_lists(&r, root, n_bytes);
    if (status == SP_OK)
        status = create_block(&r, manifest_bytes(root, n_bytes), "a manifest");
    if (status == SP_OK)
        status = read_manifest(&r, root, &manifest);
    json_decref(root);
    if (status != SP_OK) {
        sp_free(r.memory);
        return status;
    }
    manifest.memory = r.memory;
    *out_manifest = manifest;
    return SP_OK;
}

void sp_peer_manifest_free(sp_peer_manifest *manifest)
{
    sp_free(manifest->memory);
    memset(manifest, 0, sizeof *manifest);
}

/* ---- encoding -------------------------------------------------------------------------------- */

static void add_string(sp_text *text, const char *field, const char *value)
{
    sp_text_format(text, ", \"%s\": ", field);
    sp_text_json_string(text, value, strlen(value));
}

static void add_hex(sp_text *text, const char *field, const uint8_t *bytes, size_t n_bytes)
{
    sp_text_format(text, ", \"%s\": \"", field);
    for (size_t i = 0; i < n_bytes; i++)
        sp_text_format(text, "%02x", bytes[i]);
    sp_text_add(text, "\"");
}

static void add_number(sp_text *text, const char *field, uint64_t number)
{
    sp_text_format(text, ", \"%s\": %llu", field, (unsigned long long)number);
}

static void add_tensor(sp_text *text, const sp_tensor_desc *tensor, uint64_t offset, uint64_t bytes)
{
    sp_text_add(text, "{\"name\": ");
    sp_text_json_string(text, tensor->name, strlen(tensor->name));
    add_string(text, "dtype", sp_tensor_type_name(tensor->type));
    sp_text_add(text, ", \"shape\": [");
    for (int32_t i = 0; i < tensor->n_dims; i++)
        sp_text_format(text, "%s%lld", i > 0 ? ", " : "", (long long)tensor->shape[i]);
    sp_text_add(text, "]");
    add_number(text, "offset", offset);
    add_number(text, "bytes", bytes);
    sp_text_add(text, "}");
}

static void add_image(sp_text *text, const sp_peer_image *image)
{
    sp_text_format(text, ", \"image\": {\"bytes\": %llu", (unsigned long long)image->bytes);
    add_hex(text, "fingerprint", image->fingerprint.bytes, SP_DIGEST_BYTES);
    add_hex(text, "seal", image->seal.bytes, SP_DIGEST_BYTES);
    sp_text_format(text, ", \"checksum\": \"%016llx\"", (unsigned long long)image->checksum);
    sp_text_add(text, ", \"ranks\": [");
    for (int32_t i = 0; i < image->n_sites; i++)
        sp_text_format(text, "%s%d", i > 0 ? ", " : "", image->ranks[i]);
    sp_text_add(text, "], \"scale_bits\": [");
    for (int32_t i = 0; i < image->n_sites; i++)
        sp_text_format(text, "%s%u", i > 0 ? ", " : "", sp_f32_bits(image->scales[i]));
    sp_text_add(text, "]");
    add_number(text, "rank", (uint64_t)image->rank);
    add_number(text, "pairs", (uint64_t)image->pairs);
    add_number(text, "file_bytes", image->file_bytes);
    if (image->expert_bytes > 0)
        add_number(text, "expert_bytes", image->expert_bytes);
    sp_text_add(text, ", \"row_macs\": ");
    sp_text_json_double(text, image->row_macs);
    if (image->receipt)
        add_string(text, "receipt", image->receipt);
    sp_text_add(text, "}");
}

void sp_peer_manifest_encode(const sp_peer_manifest *manifest, sp_text *out_text)
{
    sp_text_format(out_text, "{\"sidepath_manifest\": %d", FORM);
    add_string(out_text, "name", manifest->name);
    add_hex(out_text, "digest", manifest->digest.bytes, SP_DIGEST_BYTES);
    sp_text_add(out_text, ", \"config\": ");
    sp_text_json_string(out_text, manifest->config, manifest->config_bytes);
    sp_text_add(out_text, ", \"tensors\": [");
    for (size_t i = 0; i < manifest->n_tensors; i++) {
        sp_text_add(out_text, i > 0 ? ", " : "");
        add_tensor(out_text, &manifest->tensors[i], manifest->offsets[i],
                   manifest->offsets[i + 1] - manifest->offsets[i]);
    }
    sp_text_add(out_text, "]");
    if (manifest->image)
        add_image(out_text, manifest->image);
    sp_text_add(out_text, "}");
}

/* ---- listings -------------------------------------------------------------------------------- */

static sp_status read_listed(reader *r, const json_t *object, sp_peer_listing *listing)
{
    static const char *const fields[] = {"name", "digest", "bytes", "packed"};
    sp_peer_listed *entry = &listing->adapters[listing->n_adapters];
    const char *name = NULL;
    sp_error local;
    sp_status status = check_fields(r, object, "adapters", fields, 4);

    if (status == SP_OK)
        status = read_text(r, object, "name", true, &name);
    if (status == SP_OK)
        status = check_name(r, "name", name);
    if (status == SP_OK)
        status = read_hex(r, object, "digest", entry->digest.bytes, SP_DIGEST_BYTES);
    if (status == SP_OK)
        status = read_number(r, object, "bytes", SP_PEER_DATA_BYTES_MAX, &entry->bytes);
    if (status == SP_OK)
        status =
            of_peer(r, sp_json_bool(object, "packed", true, false, r->code, &entry->packed, &local),
                    &local);
    if (status != SP_OK)
        return status;
    if (listing->n_adapters > 0 && strcmp(name, entry[-1].name) <= 0)
        return refuse(r, name, -1, "is not in order, or there twice");
    entry->name = take_text(r, name, strlen(name));
    listing->n_adapters++;
    return SP_OK;
}

static sp_status read_listing(reader *r, const json_t *root, size_t n_bytes,
                              sp_peer_listing *listing)
{
    static const char *const fields[] = {"sidepath_listing", "adapters"};
    const json_t *list = json_object_get(root, "adapters");
    size_t n = json_array_size(list);
    sp_status status = check_fields(r, root, "listing", fields, 2);

    if (status == SP_OK && (!json_is_array(list) || n > n_bytes / ENTRY_BYTES))
        status = refuse(r, "adapters", (int64_t)n, "is no list, or one that is too long");
    if (status == SP_OK)
        status = create_block(r, texts_bytes(n_bytes, n) + n * sizeof *listing->adapters,
                              "a list of adapters");
    if (status != SP_OK)
        return status;
    listing->adapters = take(r, n * sizeof *listing->adapters);
    for (size_t i = 0; i < n && status == SP_OK; i++)
        status = read_listed(r, json_array_get(list, i), listing);
    return status;
}

sp_status sp_peer_listing_decode(const void *bytes, size_t n_bytes, sp_peer_listing *out_listing,
                                 sp_error *error)
{
    reader r = {.code = "peer-listing", .error = error};
    sp_peer_listing listing = {0};
    json_t *root;
    sp_status status = parse(&r, bytes, n_bytes, SP_PEER_LISTING_BYTES_MAX,
                             "peer-listing-too-large", "sidepath_listing", &root);

    if (status != SP_OK)
        return status;
    status = read_listing(&r, root, n_bytes, &listing);
    json_decref(root);
    if (status != SP_OK) {
        sp_free(r.memory);
        return status;
    }
    listing.memory = r.memory;
    *out_listing = listing;
    return SP_OK;
}

void sp_peer_listing_free(sp_peer_listing *listing)
{
    sp_free(listing->memory);
    memset(listing, 0, sizeof *listing);
}

void sp_peer_listing_encode(const sp_peer_listing *listing, sp_text *out_text)
{
    sp_text_format(out_text, "{\"sidepath_listing\": %d, \"adapters\": [", FORM);
    for (size_t i = 0; i < listing->n_adapters; i++) {
        const sp_peer_listed *entry = &listing->adapters[i];

        sp_text_add(out_text, i > 0 ? ", {\"name\": " : "{\"name\": ");
        sp_text_json_string(out_text, entry->name, strlen(entry->name));
        add_hex(out_text, "digest", entry->digest.bytes, SP_DIGEST_BYTES);
        add_number(out_text, "bytes", entry->bytes);
        sp_text_format(out_text, ", \"packed\": %s}", entry->packed ? "true" : "false");
    }
    sp_text_add(out_text, "]}");
}
