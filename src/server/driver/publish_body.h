/*
 * publish_body.h: what a body that publishes an adapter holds: the text of its adapter_config.json,
 * and a file of tensors. Bytes to places in them, without I/O (fuzzed).
 *
 *     multipart/form-data       parts `config` and `weights`
 *     a type of safetensors     one file, its config in the metadata as `adapter_config`
 *
 * It must not know: HTTP, engines, where the bytes come from.
 */
#ifndef SP_SERVER_DRIVER_PUBLISH_BODY_H
#define SP_SERVER_DRIVER_PUBLISH_BODY_H

#include <sidepath/checkpoint.h>
#include <sidepath/intake.h>

#define SP_PUBLISH_CONFIG_KEY "adapter_config" /* in the metadata */

/* The codes of a body without one of the two. */
#define SP_CODE_CONFIG_MISSING  "config-missing"
#define SP_CODE_WEIGHTS_MISSING "weights-missing"

typedef struct sp_publish_body {
    const char *config; /* [config_bytes] */
    size_t config_bytes;
    const char *weights; /* [weights_bytes] as a file */
    size_t weights_bytes;
    sp_safetensors *header; /* of the weights, owned */
    sp_tensor_view *views;  /* [n_views] of its tensors in the weights, owned */
    size_t n_views;
} sp_publish_body;

/* Whether a body of that Content-Type (NULL: none) can be read: multipart, or a safetensors file.
 */
bool sp_publish_body_takes(const char *content_type);
/* Likewise, but a file alone: what no page of another site can make a browser send unasked. */
bool sp_publish_body_is_file(const char *content_type);

/*
 * `content_type` is one that is taken. `config` (may be NULL) is the config where it comes beside
 * the body. What is read points into bytes [n_bytes] and `config`. SP_ERR_INPUT with
 * `multipart-malformed`, `config-missing`, `weights-missing` or `unknown-field`, a part that has no
 * meaning; what sp_safetensors_parse returns; SP_ERR_MEMORY. *out_body is owned by the caller
 * (sp_publish_body_free).
 */
sp_status sp_publish_body_read(const char *content_type, const char *config, const char *bytes,
                               size_t n_bytes, sp_publish_body *out_body, sp_error *error);
void sp_publish_body_free(sp_publish_body *body); /* zeros are allowed */

#endif
