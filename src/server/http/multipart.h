/*
 * multipart.h: the parts of a multipart/form-data body, without I/O: bytes in, places in them out.
 * As parse.h it repairs nothing: what two parsers could read differently is refused. A body begins
 * with its boundary and ends with it, lines end in CR LF, each part has a name of its own, and no
 * part has an encoding.
 */
#ifndef SP_SERVER_HTTP_MULTIPART_H
#define SP_SERVER_HTTP_MULTIPART_H

#include <sidepath/status.h>

#include <stdbool.h>

#define SP_MULTIPART_TYPE         "multipart/form-data"
#define SP_MULTIPART_PARTS_MAX    16
#define SP_MULTIPART_NAME_BYTES   64   /* of a part's name, with its NUL */
#define SP_MULTIPART_HEADER_BYTES 4096 /* the most of one part's headers */
#define SP_BOUNDARY_BYTES         71   /* with its NUL: RFC 2046 */

#define SP_CODE_MULTIPART "multipart-malformed"

typedef struct sp_multipart_part {
    char name[SP_MULTIPART_NAME_BYTES];
    const char *data; /* [bytes] in the body */
    size_t bytes;
} sp_multipart_part;

/* The boundary that the value of a Content-Type names. False: it is no multipart/form-data, or its
 * boundary is not one of RFC 2046. */
bool sp_multipart_boundary(const char *content_type, char out_boundary[SP_BOUNDARY_BYTES]);

/*
 * out_parts [SP_MULTIPART_PARTS_MAX], in their order; they point into body [bytes]. SP_ERR_INPUT
 * with SP_CODE_MULTIPART, and the position of the byte in the body.
 */
sp_status sp_multipart_parse(const char *body, size_t bytes, const char *boundary,
                             sp_multipart_part *out_parts, int32_t *out_n, sp_error *error);

#endif
