#include "server/driver/publish_body.h"

#include "base/alloc.h"
#include "base/error.h"
#include "checkpoint/metadata.h"
#include "server/http/multipart.h"

#include <string.h>
#include <strings.h>

#define WEIGHTS_NAME "weights" /* the part, and the subject of errors */

/* ---- types --------------------------------------------------------------------------------- */

static bool is_type(const char *content_type, const char *type)
{
    size_t bytes = strlen(type);

    return strncasecmp(content_type, type, bytes) == 0 &&
           (content_type[bytes] == '\0' || strchr("; \t", content_type[bytes]) != NULL);
}

bool sp_publish_body_is_file(const char *content_type)
{
    return content_type && (is_type(content_type, "application/octet-stream") ||
                            is_type(content_type, "application/vnd.safetensors") ||
                            is_type(content_type, "application/x-safetensors"));
}

bool sp_publish_body_takes(const char *content_type)
{
    char boundary[SP_BOUNDARY_BYTES];

    return sp_publish_body_is_file(content_type) || sp_multipart_boundary(content_type, boundary);
}

/* ---- parts --------------------------------------------------------------------------------- */

static sp_status take_part(const sp_multipart_part *part, sp_publish_body *body, sp_error *error)
{
    if (strcmp(part->name, "config") == 0) {
        body->config = part->data;
        body->config_bytes = part->bytes;
    } else if (strcmp(part->name, WEIGHTS_NAME) == 0) {
        body->weights = part->data;
        body->weights_bytes = part->bytes;
    } else {
        return sp_fail(error, SP_ERR_INPUT, "unknown-field", part->name, -1,
                       "the part \"%s\" has no meaning here: \"config\" and \"weights\" are taken",
                       part->name);
    }
    return SP_OK;
}

static sp_status read_parts(const char *boundary, const char *bytes, size_t n_bytes,
                            sp_publish_body *body, sp_error *error)
{
    sp_multipart_part parts[SP_MULTIPART_PARTS_MAX];
    int32_t n = 0;
    sp_status status = sp_multipart_parse(bytes, n_bytes, boundary, parts, &n, error);

    for (int32_t i = 0; i < n && status == SP_OK; i++)
        status = take_part(&parts[i], body, error);
    if (status == SP_OK && !body->weights)
        status = sp_fail(error, SP_ERR_INPUT, SP_CODE_WEIGHTS_MISSING, WEIGHTS_NAME, -1,
                         "the body has no part \"weights\": the file adapter_model.safetensors");
    return status;
}

/* ---- the file ------------------------------------------------------------------------------ */

static sp_status read_header(sp_publish_body *body, sp_error *error)
{
    const char *text;
    sp_status status = sp_safetensors_parse(body->weights, body->weights_bytes, body->weights_bytes,
                                            WEIGHTS_NAME, &body->header, error);

    if (status != SP_OK || body->config)
        return status;
    text = sp_safetensors_metadata(body->header, SP_PUBLISH_CONFIG_KEY);
    if (!text)
        return sp_fail(error, SP_ERR_INPUT, SP_CODE_CONFIG_MISSING, "config", -1,
                       "there is no config: neither as a part \"config\" nor as "
                       "\"" SP_PUBLISH_CONFIG_KEY "\" in the metadata of the safetensors file");
    body->config = text;
    body->config_bytes = strlen(text);
    return SP_OK;
}

static sp_status make_views(sp_publish_body *body, sp_error *error)
{
    size_t n = sp_safetensors_n_tensors(body->header);

    body->views = sp_calloc(n + 1, sizeof *body->views); /* never an empty block */
    if (!body->views)
        return sp_fail_memory(error, n * sizeof *body->views, "a list of tensors");
    for (; body->n_views < n; body->n_views++) {
        const sp_tensor *tensor = sp_safetensors_at(body->header, body->n_views);

        body->views[body->n_views] = (sp_tensor_view){.struct_bytes = sizeof *body->views,
                                                      .name = tensor->name,
                                                      .data = body->weights,
                                                      .type = tensor->type,
                                                      .n_dims = tensor->n_dims,
                                                      .shape = tensor->dims,
                                                      .byte_offset = tensor->offset_bytes};
    }
    return SP_OK;
}

sp_status sp_publish_body_read(const char *content_type, const char *config, const char *bytes,
                               size_t n_bytes, sp_publish_body *out_body, sp_error *error)
{
    sp_publish_body body = {.config = config, .config_bytes = config ? strlen(config) : 0};
    char boundary[SP_BOUNDARY_BYTES];
    sp_status status = SP_OK;

    if (sp_multipart_boundary(content_type, boundary)) {
        status = read_parts(boundary, bytes, n_bytes, &body, error);
    } else {
        body.weights = bytes;
        body.weights_bytes = n_bytes;
    }
    if (status == SP_OK)
        status = read_header(&body, error);
    if (status == SP_OK)
        status = make_views(&body, error);
    if (status == SP_OK)
        *out_body = body;
    else
        sp_publish_body_free(&body);
    return status;
}

void sp_publish_body_free(sp_publish_body *body)
{
    sp_free(body->views);
    sp_safetensors_destroy(body->header);
    *body = (sp_publish_body){.config = NULL};
}
