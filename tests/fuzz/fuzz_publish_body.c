/*
 * A body that publishes an adapter: any bytes, as two parts or as one file, are parsed into a
 * config and tensors within the body's bounds, or refused; a query is parsed into fields, or
 * refused.
 *
 * The first byte says which: bit 0, multipart with the boundary "b"; bit 1, the config comes beside
 * it; else one file.
 */
#include "fuzz/target.h"

#include "base/alloc.h"
#include "server/api/query.h"
#include "server/driver/publish_body.h"
#include "server/http/multipart.h"

#include <string.h>

#define TEXT_MAX 512

static void check_inside(const char *from, size_t n, const char *data, size_t bytes)
{
    FUZZ_CHECK(from >= data && n <= bytes && (size_t)(from - data) <= bytes - n);
}

static void check_body(const sp_publish_body *body, bool beside, const char *data, size_t bytes)
{
    check_inside(body->weights, body->weights_bytes, data, bytes);
    FUZZ_CHECK(body->config || body->config_bytes == 0);
    FUZZ_CHECK(!beside || strlen(body->config) == body->config_bytes ||
               (body->config >= data && body->config < data + bytes));
    for (size_t i = 0; i < body->n_views; i++) {
        const sp_tensor *tensor = sp_safetensors_at(body->header, i);

        FUZZ_CHECK(body->views[i].byte_offset + tensor->bytes <= body->weights_bytes);
    }
}

static void check_type(const uint8_t *data, size_t bytes)
{
    char text[TEXT_MAX], boundary[SP_BOUNDARY_BYTES];
    json_t *fields;
    sp_error error;

    bytes = bytes < TEXT_MAX - 1 ? bytes : TEXT_MAX - 1;
    memcpy(text, data, bytes);
    text[bytes] = '\0';
    if (sp_multipart_boundary(text, boundary))
        FUZZ_CHECK(boundary[0] != '\0' && strlen(boundary) < SP_BOUNDARY_BYTES);
    if (sp_query_read(text, "name", &fields, &error) == SP_OK) {
        FUZZ_CHECK(json_is_object(fields));
        json_decref(fields);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    const char *type;
    sp_publish_body body;
    sp_error error = {0};
    bool beside;
    char *copy;

    if (bytes == 0)
        return 0;
    type = data[0] & 1 ? "multipart/form-data; boundary=b" : "application/octet-stream";
    beside = (data[0] & 2) != 0;
    check_type(data + 1, bytes - 1);
    copy = sp_malloc(bytes); /* of its own, so that a sanitizer sees its end */
    if (!copy)
        return 0;
    memcpy(copy, data + 1, bytes - 1);
    if (sp_publish_body_read(type, beside ? "{}" : NULL, copy, bytes - 1, &body, &error) == SP_OK) {
        check_body(&body, beside, copy, bytes - 1);
        sp_publish_body_free(&body);
    } else {
        FUZZ_CHECK(error.text[0] != '\0');
    }
    sp_free(copy);
    return 0;
}
