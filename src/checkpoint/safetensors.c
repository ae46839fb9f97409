/*
 * safetensors.c: the header of one file, bytes in, a checked list of tensors out. No I/O.
 *
 * The header is one JSON object. It is cut into its entries here, by matching brackets outside of
 * strings, and each entry is then read by the JSON library: so memory stays in proportion to the
 * tensors, each entry has a byte position to name, and a hostile nesting is bounded by the size of
 * one entry.
 */
#include "base/alloc.h"
#include "base/text.h"
#include "checkpoint/file_reason.h"
#include "checkpoint/metadata.h"
#include "checkpoint/tensor.h"

#include <sidepath/checkpoint.h>

#include <stdlib.h>
#include <string.h>

#define LENGTH_BYTES 8

/* The public record comes first, so that a pointer to it is one to the entry. */
typedef struct entry {
    sp_tensor tensor;
    uint64_t position; /* of the entry's name in the file */
    size_t name_at;    /* offset of the name in `names` while that may still be reallocated */
} entry;

struct sp_safetensors {
    entry *entries; /* ascending by name once parsed */
    size_t n, capacity;
    char *names; /* all names, each with its NUL */
    size_t names_bytes, names_capacity;
    json_t *metadata; /* NULL: there is none */
};

/* The parser's state. Positions are offsets in the file. */
typedef struct cursor {
    const char *bytes; /* the file's first bytes */
    size_t at, end;    /* [at, end) is what is left of the header */
    uint64_t file_bytes;
    const char *subject;
    sp_error *error;
} cursor;

static const struct {
    const char *name;
    uint32_t bits;
} tensor_types[] = {
#define SP_TENSOR_TYPE_ROW(symbol, number, type_name, type_bits) \
    [symbol] = {.name = type_name, .bits = type_bits},
    SP_TENSOR_TYPE_LIST(SP_TENSOR_TYPE_ROW)
#undef SP_TENSOR_TYPE_ROW
};
#define N_TENSOR_TYPES (sizeof tensor_types / sizeof *tensor_types)

const char *sp_tensor_type_name(sp_tensor_type type)
{
    return (size_t)type < N_TENSOR_TYPES ? tensor_types[type].name : NULL;
}

bool sp_tensor_type_dtype(sp_tensor_type type, sp_dtype *out_dtype)
{
    static const sp_dtype dtypes[] = {[SP_TENSOR_F32] = SP_DTYPE_F32,
                                      [SP_TENSOR_BF16] = SP_DTYPE_BF16,
                                      [SP_TENSOR_F16] = SP_DTYPE_F16};

    if ((size_t)type >= sizeof dtypes / sizeof *dtypes)
        return false;
    if (out_dtype)
        *out_dtype = dtypes[type];
    return true;
}

/* ---- the length field ---------------------------------------------------------------------- */

static uint64_t little_endian_64(const unsigned char *bytes)
{
    uint64_t value = 0;

    for (int i = 7; i >= 0; i--)
        value = (value << 8) | bytes[i];
    return value;
}

/* Says what else the file may be, when its first eight bytes cannot be a header's length. */
static sp_status refuse_length(const unsigned char *bytes, uint64_t length, const char *subject,
                               sp_error *error)
{
    if (memcmp(bytes, "version ", LENGTH_BYTES) == 0)
        return sp_refuse_file(
            error, SP_REASON_LFS_POINTER, subject, 0,
            "%s is a Git LFS pointer, not the file itself; fetch it with git lfs pull", subject);
    if (memcmp(bytes, "PK\3\4", 4) == 0 || (bytes[0] == 0x80 && bytes[1] >= 2 && bytes[1] <= 5))
        return sp_refuse_file(
            error, SP_REASON_PICKLE_REFUSED, subject, 0,
            "%s is a pickle, which can run code when it is read; save it as safetensors", subject);
    if (bytes[0] == '{' || bytes[0] == '<')
        return sp_refuse_file(error, SP_REASON_HEADER_MALFORMED, subject, 0,
                              "%s begins like %s, not like a safetensors file", subject,
                              bytes[0] == '{' ? "a JSON text" : "a web page");
    return sp_refuse_file(error, SP_REASON_HEADER_MALFORMED, subject, 0,
                          "%s: a header of %llu bytes; it must have 2 to %d", subject,
                          (unsigned long long)length, SP_SAFETENSORS_HEADER_BYTES_MAX);
}

sp_status sp_safetensors_header_bytes(const void *bytes, size_t n_bytes, uint64_t file_bytes,
                                      const char *subject, size_t *out_bytes, sp_error *error)
{
    uint64_t length;
    sp_status status =
        SP_NEED(error, {"bytes", bytes}, {"subject", subject}, {"out_bytes", out_bytes});

    if (status != SP_OK)
        return status;
    if (file_bytes < LENGTH_BYTES || n_bytes < LENGTH_BYTES)
        return sp_refuse_file(error, SP_REASON_TRUNCATED, subject, (int64_t)file_bytes,
                              "%s has %llu bytes; the header's length alone takes %d", subject,
                              (unsigned long long)file_bytes, LENGTH_BYTES);
    length = little_endian_64(bytes);
    if (length < 2 || length > SP_SAFETENSORS_HEADER_BYTES_MAX)
        return refuse_length(bytes, length, subject, error);
    if (length > file_bytes - LENGTH_BYTES)
        return sp_refuse_file(error, SP_REASON_TRUNCATED, subject, (int64_t)file_bytes,
                              "%s ends at byte %llu, inside its header, which ends at byte %llu",
                              subject, (unsigned long long)file_bytes,
                              (unsigned long long)length + LENGTH_BYTES);
    *out_bytes = (size_t)length + LENGTH_BYTES;
    return SP_OK;
}

/* ---- cutting the object into entries ------------------------------------------------------- */

static sp_status malformed(const cursor *c, size_t at, const char *what)
{
    return sp_refuse_file(c->error, SP_REASON_HEADER_MALFORMED, c->subject, (int64_t)at,
                          "%s: %s (byte %zu)", c->subject, what, at);
}

static void skip_space(cursor *c)
{
    while (c->at < c->end && (c->bytes[c->at] == ' ' || c->bytes[c->at] == '\n' ||
                              c->bytes[c->at] == '\r' || c->bytes[c->at] == '\t'))
        c->at++;
}

/* The byte at the cursor after white space; NUL at the end (a NUL byte is never valid either). */
static char peek(cursor *c)
{
    skip_space(c);
    return c->at < c->end ? c->bytes[c->at] : '\0';
}

/* Moves past a string whose opening quote the cursor is on. */
static sp_status skip_string(cursor *c)
{
    size_t start = c->at++;

    for (; c->at < c->end; c->at++) {
        if (c->bytes[c->at] == '"') {
            c->at++;
            return SP_OK;
        }
        if (c->bytes[c->at] == '\\')
            c->at++;
    }
    c->at = c->end;
    return malformed(c, start, "a string that does not end");
}

/* Moves past an object whose opening brace the cursor is on. */
static sp_status skip_object(cursor *c, size_t bytes_max)
{
    size_t start = c->at;
    size_t depth = 0;

    while (c->at < c->end) {
        char byte = c->bytes[c->at];

        if (c->at - start >= bytes_max)
            return malformed(c, start, "an entry that is too long");
        if (byte == '"') {
            sp_status status = skip_string(c);
            if (status != SP_OK)
                return status;
            continue;
        }
        c->at++;
        if (byte == '{' || byte == '[')
            depth++;
        if ((byte == '}' || byte == ']') && --depth == 0)
            return SP_OK;
    }
    return malformed(c, start, "an object that does not end");
}

/* Reads [begin, end) of the file as JSON; a failure gets its position in the file. */
static sp_status read_json(const cursor *c, size_t begin, size_t end, json_t **out_value)
{
    return sp_reason_json(c->bytes + begin, end - begin, c->subject, SP_REASON_HEADER_MALFORMED,
                          (int64_t)begin, out_value, c->error);
}

/* ---- one entry ----------------------------------------------------------------------------- */

static sp_status grow(void **memory, size_t *capacity, size_t want, size_t element_bytes,
                      sp_error *error)
{
    size_t grown = *capacity ? *capacity : 64;
    void *moved;

    while (grown < want)
        grown *= 2;
    moved = sp_realloc(*memory, grown * element_bytes);
    if (!moved)
        return sp_fail_memory(error, grown * element_bytes, "a list of tensors");
    *memory = moved;
    *capacity = grown;
    return SP_OK;
}

static sp_status add_name(sp_safetensors *header, const cursor *c, const char *name, size_t n,
                          size_t *out_at)
{
    size_t want = header->names_bytes + n + 1;

    if (want > header->names_capacity) {
        void *names = header->names;
        sp_status status = grow(&names, &header->names_capacity, want, 1, c->error);

        if (status != SP_OK)
            return status;
        header->names = names;
    }
    *out_at = header->names_bytes;
    memcpy(header->names + header->names_bytes, name, n);
    header->names[header->names_bytes + n] = '\0';
    header->names_bytes = want;
    return SP_OK;
}

/* The entry's name, at the cursor. Only a name with an escape needs the JSON library. */
static sp_status read_name(sp_safetensors *header, cursor *c, size_t *out_at)
{
    size_t start = c->at;
    const char *raw = c->bytes + start + 1;
    sp_status status = skip_string(c);
    size_t n;

    if (status != SP_OK)
        return status;
    n = c->at - start - 2;
    if (memchr(raw, '\\', n)) {
        json_t *value;

        status = read_json(c, start, c->at, &value);
        if (status != SP_OK)
            return status;
        status = add_name(header, c, json_string_value(value), json_string_length(value), out_at);
        json_decref(value);
        return status;
    }
    for (size_t i = 0; i < n; i++) {
        if ((unsigned char)raw[i] < 0x20)
            return malformed(c, start + 1 + i, "a control character in a name");
    }
    if (!sp_utf8_valid(raw, n))
        return malformed(c, start, "a name that is not UTF-8");
    return add_name(header, c, raw, n, out_at);
}

static sp_status bad_entry(const cursor *c, const char *name, size_t at, const char *what)
{
    return sp_refuse_file(c->error, SP_REASON_HEADER_MALFORMED, name, (int64_t)at,
                          "%s: tensor %.200s: %s (entry at byte %zu)", c->subject, name, what, at);
}

/* A JSON integer that is not negative. */
static bool read_count(const json_t *value, uint64_t *out_count)
{
    if (!json_is_integer(value) || json_integer_value(value) < 0)
        return false;
    *out_count = (uint64_t)json_integer_value(value);
    return true;
}

static bool read_type(const json_t *value, sp_tensor_type *out_type)
{
    const char *name = json_string_value(value);

    for (size_t i = 0; name && i < N_TENSOR_TYPES; i++) {
        if (strcmp(name, tensor_types[i].name) == 0) {
            *out_type = (sp_tensor_type)i;
            return true;
        }
    }
    return false;
}

/* Elements × element size in *out_bytes; false when that is no whole number of bytes in 64 bits. */
bool sp_tensor_measure(const sp_tensor *tensor, uint64_t *out_bytes)
{
    uint64_t bits = tensor_types[tensor->type].bits;

    for (int32_t i = 0; i < tensor->n_dims; i++) {
        if (tensor->dims[i] == 0) {
            *out_bytes = 0;
            return true;
        }
    }
    for (int32_t i = 0; i < tensor->n_dims; i++) {
        if (__builtin_mul_overflow(bits, (uint64_t)tensor->dims[i], &bits))
            return false;
    }
    *out_bytes = bits / 8;
    return bits % 8 == 0;
}

static bool tensor_bytes_are(const sp_tensor *tensor, uint64_t wanted)
{
    uint64_t bytes;

    return sp_tensor_measure(tensor, &bytes) && bytes == wanted;
}

static sp_status read_shape(const cursor *c, const json_t *shape, const char *name, size_t at,
                            sp_tensor *tensor)
{
    size_t n = json_array_size(shape);

    if (!json_is_array(shape))
        return bad_entry(c, name, at, "\"shape\" is missing or no list");
    if (n > SP_TENSOR_DIMS_MAX)
        return bad_entry(c, name, at, "more than 8 dimensions");
    for (size_t i = 0; i < n; i++) {
        uint64_t count;

        if (!read_count(json_array_get(shape, i), &count))
            return bad_entry(c, name, at, "a dimension that is no count");
        tensor->dims[i] = (int64_t)count;
    }
    tensor->n_dims = (int32_t)n;
    return SP_OK;
}

static sp_status read_fields(const cursor *c, const json_t *fields, const char *name, size_t at,
                             sp_tensor *tensor)
{
    const json_t *type = json_object_get(fields, "dtype");
    const json_t *offsets = json_object_get(fields, "data_offsets");
    uint64_t begin, end, bytes;
    sp_status status;

    tensor->struct_bytes = sizeof *tensor;
    if (!json_is_string(type))
        return bad_entry(c, name, at, "\"dtype\" is missing or no text");
    if (!read_type(type, &tensor->type))
        return sp_refuse_file(c->error, SP_REASON_UNSUPPORTED_DTYPE, name, (int64_t)at,
                              "%s: tensor %.200s has the unknown dtype \"%.40s\"", c->subject, name,
                              json_string_value(type));
    status = read_shape(c, json_object_get(fields, "shape"), name, at, tensor);
    if (status != SP_OK)
        return status;
    if (json_array_size(offsets) != 2 || !read_count(json_array_get(offsets, 0), &begin) ||
        !read_count(json_array_get(offsets, 1), &end))
        return bad_entry(c, name, at, "\"data_offsets\" is missing or not two counts");
    if (json_object_size(fields) != 3)
        return bad_entry(c, name, at, "fields besides dtype, shape and data_offsets");
    if (begin > end)
        return bad_entry(c, name, at, "data_offsets that end before they begin");
    if (end > c->file_bytes - c->end && !tensor_bytes_are(tensor, end - begin))
        return bad_entry(c, name, at,
                         "data_offsets that end beyond the file, and do not fit the "
                         "shape");
    if (!sp_tensor_measure(tensor, &bytes))
        return bad_entry(c, name, at, "a shape whose size is no number of bytes");
    if (bytes != end - begin)
        return sp_refuse_file(
            c->error, SP_REASON_HEADER_MALFORMED, name, (int64_t)at,
            "%s: tensor %.200s: data_offsets span %llu bytes, shape and dtype make %llu "
            "(entry at byte %zu)",
            c->subject, name, (unsigned long long)(end - begin), (unsigned long long)bytes, at);
    tensor->offset_bytes = begin + c->end;
    tensor->bytes = bytes;
    return SP_OK;
}

/* "__metadata__": an object of strings, which no tensor depends on. */
static sp_status read_metadata(sp_safetensors *header, const cursor *c, size_t begin, size_t at)
{
    json_t *fields;
    const char *key;
    json_t *value;
    sp_status status = read_json(c, begin, c->at, &fields);

    if (status != SP_OK)
        return status;
    json_object_foreach(fields, key, value)
    {
        if (!json_is_string(value)) {
            status = bad_entry(c, "__metadata__", at, "a value that is no text");
            break;
        }
    }
    if (status == SP_OK && header->metadata)
        status = sp_refuse_file(c->error, SP_REASON_DUPLICATE_KEY, "__metadata__", (int64_t)at,
                                "%s: __metadata__ stands in the header twice", c->subject);
    if (status == SP_OK)
        header->metadata = fields;
    else
        json_decref(fields);
    return status;
}

static sp_status add_tensor(sp_safetensors *header, const cursor *c, size_t begin, size_t at,
                            size_t name_at)
{
    entry *added;
    json_t *fields;
    sp_status status;

    if (header->n == header->capacity) {
        void *entries = header->entries;

        status =
            grow(&entries, &header->capacity, header->n + 1, sizeof *header->entries, c->error);
        if (status != SP_OK)
            return status;
        header->entries = entries;
    }
    status = read_json(c, begin, c->at, &fields);
    if (status != SP_OK)
        return status;
    added = &header->entries[header->n];
    memset(added, 0, sizeof *added);
    added->position = at;
    added->name_at = name_at;
    status = read_fields(c, fields, header->names + name_at, at, &added->tensor);
    json_decref(fields);
    if (status == SP_OK)
        header->n++;
    return status;
}

/* One `"name": {…}` at the cursor. */
static sp_status read_entry(sp_safetensors *header, cursor *c)
{
    size_t at = c->at;
    size_t name_at, begin;
    bool metadata;
    sp_status status;

    if (peek(c) != '"')
        return malformed(c, c->at, "no name in quotes where one is due");
    at = c->at;
    status = read_name(header, c, &name_at);
    if (status != SP_OK)
        return status;
    if (peek(c) != ':')
        return malformed(c, c->at, "no colon behind a name");
    c->at++;
    if (peek(c) != '{')
        return bad_entry(c, header->names + name_at, at, "its value is no object");
    begin = c->at;
    metadata = strcmp(header->names + name_at, "__metadata__") == 0;
    status = skip_object(c, metadata ? SP_SAFETENSORS_METADATA_BYTES_MAX
                                     : SP_SAFETENSORS_ENTRY_BYTES_MAX);
    if (status != SP_OK)
        return status;
    return metadata ? read_metadata(header, c, begin, at)
                    : add_tensor(header, c, begin, at, name_at);
}

static sp_status read_entries(sp_safetensors *header, cursor *c)
{
    size_t start = c->at;
    sp_status status = SP_OK;

    if (c->bytes[c->at] != '{')
        return malformed(c, start, "the header does not begin with a brace");
    c->at++;
    if (peek(c) == '}') {
        c->at++;
    } else {
        for (;;) {
            char next;

            status = read_entry(header, c);
            if (status != SP_OK)
                return status;
            next = peek(c);
            if (next != ',' && next != '}')
                return malformed(c, c->at, "neither comma nor brace behind an entry");
            c->at++;
            if (next == '}')
                break;
        }
    }
    skip_space(c);
    if (c->at != c->end)
        return malformed(c, c->at, "bytes behind the header's closing brace");
    return SP_OK;
}

/* ---- the whole ----------------------------------------------------------------------------- */

static int by_name(const void *left, const void *right)
{
    const entry *a = left;
    const entry *b = right;
    int order = strcmp(a->tensor.name, b->tensor.name);

    if (order == 0)
        order = (a->position > b->position) - (a->position < b->position);
    return order;
}

static int by_offset(const void *left, const void *right)
{
    const sp_tensor *a = &(*(entry *const *)left)->tensor;
    const sp_tensor *b = &(*(entry *const *)right)->tensor;

    if (a->offset_bytes != b->offset_bytes)
        return a->offset_bytes > b->offset_bytes ? 1 : -1;
    if (a->bytes != b->bytes)
        return a->bytes > b->bytes ? 1 : -1;
    return strcmp(a->name, b->name);
}

static sp_status sort_by_name(sp_safetensors *header, const char *subject, sp_error *error)
{
    for (size_t i = 0; i < header->n; i++)
        header->entries[i].tensor.name = header->names + header->entries[i].name_at;
    if (header->n > 1)
        qsort(header->entries, header->n, sizeof *header->entries, by_name);
    for (size_t i = 1; i < header->n; i++) {
        const entry *twin = &header->entries[i];

        if (strcmp(twin[-1].tensor.name, twin->tensor.name) == 0)
            return sp_refuse_file(error, SP_REASON_DUPLICATE_KEY, twin->tensor.name,
                                  (int64_t)twin->position,
                                  "%s: tensor %.200s stands in the header twice (byte %llu)",
                                  subject, twin->tensor.name, (unsigned long long)twin->position);
    }
    return SP_OK;
}

/* Tensors in file order must follow each other from the header's end to the file's. */
static sp_status check_tiling(entry *const *order, size_t n, uint64_t at, uint64_t file_bytes,
                              const char *subject, sp_error *error)
{
    for (size_t i = 0; i < n; i++) {
        const sp_tensor *tensor = &order[i]->tensor;
        uint64_t begin = tensor->offset_bytes;

        if (begin < at)
            return sp_refuse_file(error, SP_REASON_HEADER_OVERLAP, tensor->name, (int64_t)begin,
                                  "%s: tensors %.150s and %.150s overlap at byte %llu", subject,
                                  i > 0 ? order[i - 1]->tensor.name : "", tensor->name,
                                  (unsigned long long)begin);
        if (begin + tensor->bytes > file_bytes)
            return sp_refuse_file(
                error, SP_REASON_TRUNCATED, tensor->name, (int64_t)file_bytes,
                "%s: tensor %.200s ends at byte %llu, the file at byte %llu", subject, tensor->name,
                (unsigned long long)(begin + tensor->bytes), (unsigned long long)file_bytes);
        if (begin > at)
            return sp_refuse_file(error, SP_REASON_HEADER_MALFORMED, tensor->name, (int64_t)at,
                                  "%s: bytes %llu to %llu before tensor %.200s belong to no tensor",
                                  subject, (unsigned long long)at, (unsigned long long)begin,
                                  tensor->name);
        at = begin + tensor->bytes;
    }
    if (at != file_bytes)
        return sp_refuse_file(error, SP_REASON_HEADER_MALFORMED, subject, (int64_t)at,
                              "%s: %llu bytes behind the last tensor, from byte %llu", subject,
                              (unsigned long long)(file_bytes - at), (unsigned long long)at);
    return SP_OK;
}

static sp_status check_offsets(const sp_safetensors *header, uint64_t data_at, uint64_t file_bytes,
                               const char *subject, sp_error *error)
{
    entry **order = NULL;
    sp_status status;

    if (header->n > 0) {
        order = sp_malloc(header->n * sizeof *order);
        if (!order)
            return sp_fail_memory(error, header->n * sizeof *order, "a list of tensors");
        for (size_t i = 0; i < header->n; i++)
            order[i] = &header->entries[i];
        qsort(order, header->n, sizeof *order, by_offset);
    }
    status = check_tiling(order, header->n, data_at, file_bytes, subject, error);
    sp_free(order);
    return status;
}

sp_status sp_safetensors_parse(const void *bytes, size_t n_bytes, uint64_t file_bytes,
                               const char *subject, sp_safetensors **out_header, sp_error *error)
{
    sp_safetensors *header;
    cursor c = {.bytes = bytes,
                .at = LENGTH_BYTES,
                .file_bytes = file_bytes,
                .subject = subject,
                .error = error};
    sp_status status =
        out_header ? sp_safetensors_header_bytes(bytes, n_bytes, file_bytes, subject, &c.end, error)
                   : sp_fail_null(error, "out_header");

    if (status != SP_OK)
        return status;
    if (n_bytes < c.end)
        return sp_fail(error, SP_ERR_ARGUMENT, NULL, subject, (int64_t)n_bytes,
                       "%zu bytes are given of a header that takes %zu", n_bytes, c.end);
    header = sp_calloc(1, sizeof *header);
    if (!header)
        return sp_fail_memory(error, sizeof *header, subject);
    status = read_entries(header, &c);
    if (status == SP_OK)
        status = sort_by_name(header, subject, error);
    if (status == SP_OK)
        status = check_offsets(header, c.end, file_bytes, subject, error);
    if (status != SP_OK) {
        sp_safetensors_destroy(header);
        return status;
    }
    *out_header = header;
    return SP_OK;
}

void sp_safetensors_destroy(sp_safetensors *header)
{
    if (!header)
        return;
    json_decref(header->metadata);
    sp_free(header->entries);
    sp_free(header->names);
    sp_free(header);
}

const char *sp_safetensors_metadata(const sp_safetensors *header, const char *key)
{
    return json_string_value(json_object_get(header->metadata, key));
}

size_t sp_safetensors_n_tensors(const sp_safetensors *header)
{
    return header->n;
}

const sp_tensor *sp_safetensors_at(const sp_safetensors *header, size_t index)
{
    return index < header->n ? &header->entries[index].tensor : NULL;
}

static int name_against_entry(const void *name, const void *element)
{
    return strcmp(name, ((const entry *)element)->tensor.name);
}

const sp_tensor *sp_safetensors_find(const sp_safetensors *header, const char *name)
{
    const entry *found = NULL;

    if (header->n > 0)
        found =
            bsearch(name, header->entries, header->n, sizeof *header->entries, name_against_entry);
    return found ? &found->tensor : NULL;
}
