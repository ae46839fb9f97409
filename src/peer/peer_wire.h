/*
 * peer: adapters that another host serves. It owns the messages between a client and a peer, the
 * transport that carries them (UCX, opened at run time), a client that fetches, and a server with
 * the catalogue of a directory. It must not know slots, pools, stages, engines or HTTP: a client
 * writes to memory that its caller brings, and what a packed image means is left to those who pack
 * and load it.
 *
 * peer_wire.h: the messages as bytes, encoded and decoded without any I/O. All bytes that are
 * decoded here come from strangers: every length, number and name is checked before it is used.
 * Any thread, on distinct objects; pointers may not be NULL unless said so.
 *
 * A message is a header of SP_PEER_HEADER_BYTES and a body. Numbers are little-endian. The first
 * eight bytes (magic, version, kind) keep their meaning in every version. Fields that a kind does
 * not use are 0; anything else is refused.
 *
 *    0  magic   u32    "SPPR"
 *    4  version u16
 *    6  kind    u16    an sp_peer_kind
 *    8  session u64    random, chosen by the server for each connection; 0 in HELLO
 *   16  request u64    chosen by the client, above 0; an answer repeats it. 0 in a FAILED that
 *                      answers what could not be read
 *   24  body    u64    bytes of the body
 *   32  offer   u64
 *   40  part    u32    meaning by kind
 *   44  0       u32
 *   48  offset  u64
 *   56  bytes   u64
 *   64  tag     [32]   HMAC-SHA-256 of the 64 bytes before it and the body; 0 without a shared key.
 *                      DATA has the tag of its header alone: digests cover its body
 *
 * From the client, with the answer; each may also be answered by FAILED:
 *
 *   HELLO      body: nonce [32]                    CHALLENGE  body: nonce [32], proof [32];
 *                                                             part: 1 where a key is needed
 *   PROOF      body: proof [32]                    WELCOME
 *   LIST                                           LISTING    body: JSON
 *   MANIFEST   part: an sp_peer_selector;          OFFER      offer; body: JSON
 *              body: a name, or a digest [32]
 *   PIECE      offer, part: an sp_peer_part,       DATA       offer, part, offset, bytes as in the
 *              offset, bytes                                  request; body: the bytes
 *   RELEASE    offer                               (none)
 *                                                  FAILED     part: an sp_peer_failure; body: text
 */
#ifndef SP_PEER_PEER_WIRE_H
#define SP_PEER_PEER_WIRE_H

#include "base/text.h"

#include <sidepath/intake.h>

#define SP_PEER_MAGIC   0x52505053u /* "SPPR" */
#define SP_PEER_VERSION 1

#define SP_PEER_HEADER_BYTES 96
#define SP_PEER_NONCE_BYTES  32
#define SP_PEER_PROOF_BYTES  32
#define SP_PEER_TAG_BYTES    32

#define SP_PEER_NAME_BYTES_MAX     255
#define SP_PEER_TEXT_BYTES_MAX     400 /* of a failure */
#define SP_PEER_KEY_BYTES_MIN      16
#define SP_PEER_KEY_BYTES_MAX      1024
#define SP_PEER_PIECE_BYTES_MAX    ((uint64_t)16 << 20)
#define SP_PEER_MANIFEST_BYTES_MAX ((uint64_t)32 << 20)
#define SP_PEER_LISTING_BYTES_MAX  ((uint64_t)16 << 20)
#define SP_PEER_TENSORS_MAX        ((size_t)1 << 20)
#define SP_PEER_DATA_BYTES_MAX     ((uint64_t)1 << 44) /* of one part */

/* The numbers are stable; those of answers are above 64. */
#define SP_PEER_KIND_LIST(X) \
    X(SP_PEER_HELLO, 1)      \
    X(SP_PEER_PROOF, 2)      \
    X(SP_PEER_LIST, 3)       \
    X(SP_PEER_MANIFEST, 4)   \
    X(SP_PEER_PIECE, 5)      \
    X(SP_PEER_RELEASE, 6)    \
    X(SP_PEER_CHALLENGE, 65) \
    X(SP_PEER_WELCOME, 66)   \
    X(SP_PEER_LISTING, 67)   \
    X(SP_PEER_OFFER, 68)     \
    X(SP_PEER_DATA, 69)      \
    X(SP_PEER_FAILED, 70)

typedef enum sp_peer_kind {
#define SP_PEER_KIND_ENUM(name, number) name = number,
    SP_PEER_KIND_LIST(SP_PEER_KIND_ENUM)
#undef SP_PEER_KIND_ENUM
} sp_peer_kind;

typedef enum sp_peer_selector { SP_PEER_BY_NAME = 0, SP_PEER_BY_DIGEST = 1 } sp_peer_selector;

/* What a piece is of: all tensors, one after the other in the manifest's order, or the image. */
typedef enum sp_peer_part { SP_PEER_PART_TENSORS = 0, SP_PEER_PART_IMAGE = 1 } sp_peer_part;

/* Why a peer does not answer, with the status and reason code that the client gives it.
 *   X(name, number, status, code)    The numbers are stable; a foreign one is a broken protocol. */
#define SP_PEER_FAILURE_LIST(X)                                                          \
    X(SP_PEER_NOT_FOUND, 1, SP_ERR_NOT_FOUND, "peer-not-found") /* no such adapter */    \
    X(SP_PEER_WRONG_KEY, 2, SP_ERR_PEER_REFUSED, "peer-key")    /* or none */            \
    X(SP_PEER_OTHER_VERSION, 3, SP_ERR_PEER_REFUSED, "peer-version")                     \
    X(SP_PEER_OUT_OF_RANGE, 4, SP_ERR_PEER_REFUSED, "peer-out-of-range")                 \
    X(SP_PEER_GONE, 5, SP_ERR_PEER_LOST, "peer-offer-gone")        /* files changed */   \
    X(SP_PEER_OVERLOADED, 6, SP_ERR_PEER_REFUSED, "peer-busy")     /* try again later */ \
    X(SP_PEER_MALFORMED, 7, SP_ERR_PEER_REFUSED, "peer-malformed") /* the request */     \
    X(SP_PEER_INTERNAL, 8, SP_ERR_PEER_REFUSED, "peer-failed")     /* its disk, memory */

typedef enum sp_peer_failure {
#define SP_PEER_FAILURE_ENUM(name, number, status, code) name = number,
    SP_PEER_FAILURE_LIST(SP_PEER_FAILURE_ENUM)
#undef SP_PEER_FAILURE_ENUM
} sp_peer_failure;

/* ---- headers --------------------------------------------------------------------------------- */

typedef struct sp_peer_header {
    sp_peer_kind kind;
    uint64_t session, request, body_bytes, offer;
    uint32_t part;
    uint64_t offset, bytes;
    uint8_t tag[SP_PEER_TAG_BYTES];
} sp_peer_header;

void sp_peer_header_encode(const sp_peer_header *header, uint8_t out_bytes[SP_PEER_HEADER_BYTES]);

/*
 * SP_ERR_PEER_PROTOCOL, with error->position the byte: `peer-protocol` for another length, magic,
 * an unknown kind, a field that the kind does not use, a body or piece beyond its limit, bytes and
 * body that contradict each other; `peer-version` for another version. `subject` names the peer.
 */
sp_status sp_peer_header_decode(const void *bytes, size_t n_bytes, const char *subject,
                                sp_peer_header *out_header, sp_error *error);

/* ---- the shared key -------------------------------------------------------------------------- */

/*
 * With a key each side proves to the other that it has it, by an HMAC over both nonces that differs
 * by side, so that no answer can be sent back as a question. Every later message carries a tag made
 * with a key of that connection alone: who relays the connection cannot change a manifest.
 */
typedef struct sp_peer_key {
    uint8_t bytes[SP_PEER_KEY_BYTES_MAX];
    size_t n_bytes; /* 0: no key */
} sp_peer_key;

/* Reads a key from a file: its first line, of SP_PEER_KEY_BYTES_MIN bytes or more. SP_ERR_INPUT
 * with `peer-key`: shorter, longer, or a file that others may read. SP_ERR_NOT_FOUND, SP_ERR_IO. */
sp_status sp_peer_key_read(const char *path, sp_peer_key *out_key, sp_error *error);

typedef enum sp_peer_side { SP_PEER_SIDE_CLIENT, SP_PEER_SIDE_SERVER } sp_peer_side;

/* The proof of one side. SP_ERR_MEMORY. */
sp_status sp_peer_prove(const sp_peer_key *key, sp_peer_side side,
                        const uint8_t client_nonce[SP_PEER_NONCE_BYTES],
                        const uint8_t server_nonce[SP_PEER_NONCE_BYTES],
                        uint8_t out_proof[SP_PEER_PROOF_BYTES]);

/* The key of one connection, for tags. SP_ERR_MEMORY. */
sp_status sp_peer_connection_key(const sp_peer_key *key,
                                 const uint8_t client_nonce[SP_PEER_NONCE_BYTES],
                                 const uint8_t server_nonce[SP_PEER_NONCE_BYTES],
                                 sp_peer_key *out_key);

/* Sets header->tag; zeros where the key is empty. body may be NULL where it has no bytes, and is
 * not read for DATA. SP_ERR_MEMORY. */
sp_status sp_peer_sign(const sp_peer_key *connection_key, sp_peer_header *header, const void *body);
/* Whether header->tag is the one that sp_peer_sign would set; false when out of memory too. */
bool sp_peer_is_signed(const sp_peer_key *connection_key, const sp_peer_header *header,
                       const void *body);

/* Compares in a time that does not depend on where two secrets differ. */
bool sp_peer_equal(const uint8_t *a, const uint8_t *b, size_t n_bytes);

/* ---- manifests ------------------------------------------------------------------------------- */

/* A packed image, as the one who packed it describes it. */
typedef struct sp_peer_image {
    uint64_t bytes;        /* of all: the slot's, then those of routers and experts */
    uint64_t expert_bytes; /* of the factors of these; 0: it has none */
    sp_digest fingerprint; /* of the layout that it was packed for */
    sp_digest seal;        /* binds bytes, content digest and fingerprint; made by the packer */
    uint64_t checksum;     /* XXH3 of its bytes */
    int32_t n_sites;
    int32_t *ranks; /* [n_sites] in the layout's order; 0: the site is not adapted */
    float *scales;  /* [n_sites], finite */
    int32_t rank, pairs;
    uint64_t file_bytes;
    double row_macs;
    char *receipt; /* NULL: none */
} sp_peer_image;

/* What a peer says of one adapter. */
typedef struct sp_peer_manifest {
    char *name; /* UTF-8 without control characters */
    sp_digest digest;
    char *config; /* text of adapter_config.json: [config_bytes] and a NUL */
    size_t config_bytes;
    sp_tensor_desc *tensors; /* [n_tensors] in the order of their bytes */
    uint64_t *offsets;       /* [n_tensors + 1] of each tensor's first byte in the tensors' part;
                                the last is data_bytes */
    size_t n_tensors;
    uint64_t data_bytes;
    sp_peer_image *image; /* NULL: not packed */
    void *memory;         /* what the texts and lists above are in; owned */
} sp_peer_manifest;

/*
 * The JSON of a manifest, appended to *out_text, which keeps a failure of memory. Names are UTF-8;
 * tensors and offsets fit each other. `memory` is not read.
 */
void sp_peer_manifest_encode(const sp_peer_manifest *manifest, sp_text *out_text);

/*
 * Decodes a manifest of n_bytes. Checked: its length before anything else, JSON without duplicate
 * keys, the version, no field missing or unknown, names, known tensor types, shape × element size =
 * length, that the tensors follow each other without gap or overlap from offset 0 on, numbers in
 * their ranges, and that lists are as long as they should be. What the config says is not read.
 * SP_ERR_PEER_PROTOCOL with `peer-manifest`, and error->subject the field; SP_ERR_TOO_LARGE with
 * `peer-manifest-too-large`; SP_ERR_MEMORY. *out_manifest is filled on success only; freed by
 * sp_peer_manifest_free.
 */
sp_status sp_peer_manifest_decode(const void *bytes, size_t n_bytes, sp_peer_manifest *out_manifest,
                                  sp_error *error);
void sp_peer_manifest_free(sp_peer_manifest *manifest); /* a zeroed one is allowed, and twice */

/* ---- listings -------------------------------------------------------------------------------- */

typedef struct sp_peer_listed {
    const char *name;
    sp_digest digest;
    uint64_t bytes; /* of its tensors */
    bool packed;    /* there is an image of it */
} sp_peer_listed;

typedef struct sp_peer_listing {
    sp_peer_listed *adapters; /* [n_adapters] by name, no name twice */
    size_t n_adapters;
    void *memory; /* what the texts above are in; owned */
} sp_peer_listing;

void sp_peer_listing_encode(const sp_peer_listing *listing, sp_text *out_text);
/* As sp_peer_manifest_decode, with `peer-listing` and `peer-listing-too-large`. */
sp_status sp_peer_listing_decode(const void *bytes, size_t n_bytes, sp_peer_listing *out_listing,
                                 sp_error *error);
void sp_peer_listing_free(sp_peer_listing *listing); /* a zeroed one is allowed, and twice */

#endif
