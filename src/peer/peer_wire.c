#include "peer/peer_wire.h"

#include "base/error.h"

#include <string.h>

/* ---- numbers --------------------------------------------------------------------------------- */

static void put(uint8_t *at, uint64_t number, size_t n_bytes)
{
    for (size_t i = 0; i < n_bytes; i++)
        at[i] = (uint8_t)(number >> (8 * i));
}

static uint64_t get(const uint8_t *at, size_t n_bytes)
{
    uint64_t number = 0;

    for (size_t i = 0; i < n_bytes; i++)
        number |= (uint64_t)at[i] << (8 * i);
    return number;
}

/* Where each field is. */
enum {
    AT_MAGIC = 0,
    AT_VERSION = 4,
    AT_KIND = 6,
    AT_SESSION = 8,
    AT_REQUEST = 16,
    AT_BODY = 24,
    AT_OFFER = 32,
    AT_PART = 40,
    AT_ZERO = 44,
    AT_OFFSET = 48,
    AT_BYTES = 56,
    AT_TAG = 64,
};
_Static_assert(AT_TAG + SP_PEER_TAG_BYTES == SP_PEER_HEADER_BYTES, "the tag ends the header");

/* ---- headers --------------------------------------------------------------------------------- */

/* What a kind has, of the fields that not all kinds have. */
enum { HAS_SESSION = 1, HAS_OFFER = 2, HAS_RANGE = 4 };

typedef struct kind_row {
    sp_peer_kind kind;
    unsigned has;
    uint64_t body_min, body_max;
    uint32_t part_min, part_max;
} kind_row;

static const kind_row kinds[] = {
    {SP_PEER_HELLO, 0, SP_PEER_NONCE_BYTES, SP_PEER_NONCE_BYTES, 0, 0},
    {SP_PEER_PROOF, HAS_SESSION, SP_PEER_PROOF_BYTES, SP_PEER_PROOF_BYTES, 0, 0},
    {SP_PEER_LIST, HAS_SESSION, 0, 0, 0, 0},
    {SP_PEER_MANIFEST, HAS_SESSION, 1, SP_PEER_NAME_BYTES_MAX, SP_PEER_BY_NAME, SP_PEER_BY_DIGEST},
    {SP_PEER_PIECE, HAS_SESSION | HAS_OFFER | HAS_RANGE, 0, 0, SP_PEER_PART_TENSORS,
     SP_PEER_PART_IMAGE},
    {SP_PEER_RELEASE, HAS_SESSION | HAS_OFFER, 0, 0, 0, 0},
    {SP_PEER_CHALLENGE, HAS_SESSION, SP_PEER_NONCE_BYTES + SP_PEER_PROOF_BYTES,
     SP_PEER_NONCE_BYTES + SP_PEER_PROOF_BYTES, 0, 1},
    {SP_PEER_WELCOME, HAS_SESSION, 0, 0, 0, 0},
    {SP_PEER_LISTING, HAS_SESSION, 1, SP_PEER_LISTING_BYTES_MAX, 0, 0},
    {SP_PEER_OFFER, HAS_SESSION | HAS_OFFER, 1, SP_PEER_MANIFEST_BYTES_MAX, 0, 0},
    {SP_PEER_DATA, HAS_SESSION | HAS_OFFER | HAS_RANGE, 1, SP_PEER_PIECE_BYTES_MAX,
     SP_PEER_PART_TENSORS, SP_PEER_PART_IMAGE},
    {SP_PEER_FAILED, HAS_SESSION, 0, SP_PEER_TEXT_BYTES_MAX, SP_PEER_NOT_FOUND, SP_PEER_INTERNAL},
};

static const kind_row *row_of(uint64_t kind)
{
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++)
        if ((uint64_t)kinds[i].kind == kind)
            return &kinds[i];
    return NULL;
}

void sp_peer_header_encode(const sp_peer_header *header, uint8_t out_bytes[SP_PEER_HEADER_BYTES])
{
    memset(out_bytes, 0, SP_PEER_HEADER_BYTES);
    put(out_bytes + AT_MAGIC, SP_PEER_MAGIC, 4);
    put(out_bytes + AT_VERSION, SP_PEER_VERSION, 2);
    put(out_bytes + AT_KIND, (uint64_t)header->kind, 2);
    put(out_bytes + AT_SESSION, header->session, 8);
    put(out_bytes + AT_REQUEST, header->request, 8);
    put(out_bytes + AT_BODY, header->body_bytes, 8);
    put(out_bytes + AT_OFFER, header->offer, 8);
    put(out_bytes + AT_PART, header->part, 4);
    put(out_bytes + AT_OFFSET, header->offset, 8);
    put(out_bytes + AT_BYTES, header->bytes, 8);
    memcpy(out_bytes + AT_TAG, header->tag, SP_PEER_TAG_BYTES);
}

static sp_status broken(sp_error *error, const char *subject, int64_t position, const char *what)
{
    return sp_fail(error, SP_ERR_PEER_PROTOCOL, "peer-protocol", subject, position,
                   "%s: not a message of this protocol (byte %lld: %s)", subject,
                   (long long)position, what);
}

/* The first eight bytes, which are the same in every version. */
static sp_status read_start(const uint8_t *at, size_t n_bytes, const char *subject,
                            const kind_row **out_row, sp_error *error)
{
    uint64_t version;

    if (n_bytes < AT_SESSION)
        return broken(error, subject, (int64_t)n_bytes, "it ends");
    if (get(at + AT_MAGIC, 4) != SP_PEER_MAGIC)
        return broken(error, subject, AT_MAGIC, "another magic number");
    version = get(at + AT_VERSION, 2);
    if (version != SP_PEER_VERSION)
        return sp_fail(error, SP_ERR_PEER_PROTOCOL, "peer-version", subject, AT_VERSION,
                       "%s speaks version %llu of the protocol, and this side version %d", subject,
                       (unsigned long long)version, SP_PEER_VERSION);
    *out_row = row_of(get(at + AT_KIND, 2));
    return *out_row ? SP_OK : broken(error, subject, AT_KIND, "an unknown kind");
}

static void read_fields(const uint8_t *at, const kind_row *row, sp_peer_header *out_header)
{
    out_header->kind = row->kind;
    out_header->session = get(at + AT_SESSION, 8);
    out_header->request = get(at + AT_REQUEST, 8);
    out_header->body_bytes = get(at + AT_BODY, 8);
    out_header->offer = get(at + AT_OFFER, 8);
    out_header->part = (uint32_t)get(at + AT_PART, 4);
    out_header->offset = get(at + AT_OFFSET, 8);
    out_header->bytes = get(at + AT_BYTES, 8);
    memcpy(out_header->tag, at + AT_TAG, SP_PEER_TAG_BYTES);
}

/* The first byte of a range that no message may have, or 0. */
static int64_t wrong_range(const sp_peer_header *header, const kind_row *row)
{
    bool has = (row->has & HAS_RANGE) != 0;

    if (!has)
        return header->offset != 0 ? AT_OFFSET : header->bytes != 0 ? AT_BYTES : 0;
    if (header->offset > SP_PEER_DATA_BYTES_MAX)
        return AT_OFFSET;
    if (header->bytes == 0 || header->bytes > SP_PEER_PIECE_BYTES_MAX)
        return AT_BYTES;
    return row->kind == SP_PEER_DATA && header->bytes != header->body_bytes ? AT_BODY : 0;
}

/* The first byte of a field that its kind does not allow, or 0. */
static int64_t wrong_field(const sp_peer_header *header, const kind_row *row)
{
    if (!(row->has & HAS_SESSION) && header->session != 0)
        return AT_SESSION;
    if (header->request == 0 && row->kind != SP_PEER_FAILED)
        return AT_REQUEST;
    if (header->body_bytes < row->body_min || header->body_bytes > row->body_max)
        return AT_BODY;
    if (((row->has & HAS_OFFER) != 0) != (header->offer != 0))
        return AT_OFFER;
    if (header->part < row->part_min || header->part > row->part_max)
        return AT_PART;
    if (row->kind == SP_PEER_MANIFEST && header->part == SP_PEER_BY_DIGEST &&
        header->body_bytes != SP_DIGEST_BYTES)
        return AT_BODY;
    return wrong_range(header, row);
}

sp_status sp_peer_header_decode(const void *bytes, size_t n_bytes, const char *subject,
                                sp_peer_header *out_header, sp_error *error)
{
    const kind_row *row = NULL;
    sp_peer_header header;
    int64_t position;
    sp_status status = read_start(bytes, n_bytes, subject, &row, error);

    if (status != SP_OK)
        return status;
    if (n_bytes != SP_PEER_HEADER_BYTES)
        return broken(error, subject, (int64_t)n_bytes, "a header of another length");
    if (get((const uint8_t *)bytes + AT_ZERO, 4) != 0)
        return broken(error, subject, AT_ZERO, "not zero");
    read_fields(bytes, row, &header);
    position = wrong_field(&header, row);
    if (position > 0)
        return broken(error, subject, position, "a field that its kind does not allow");
    *out_header = header;
    return SP_OK;
}
