/*
 * Messages between hosts: bytes written by hand, proofs computed with Python's hmac, and what a
 * stranger may send instead.
 */
#include "peer/peer_wire.h"

#include "base/alloc.h"
#include "base/hash.h"
#include "support/test.h"

#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

/* ---- headers --------------------------------------------------------------------------------- */

/* PIECE, session 0x0807060504030201, request 9, offer 2, the image's bytes 4096 to 4352. */
static const uint8_t piece[SP_PEER_HEADER_BYTES] = {
    'S', 'P', 'P', 'R', 1, 0,    5, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 0, 0, 0,    0,
    0,   0,   0,   0,   0, 0,    0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0,    0,
    0,   0,   0,   0,   0, 0x10, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0xaa,
};

static void a_header_is_these_bytes(void **state)
{
    sp_peer_header header;
    uint8_t again[SP_PEER_HEADER_BYTES];
    sp_error error;

    (void)state;
    assert_ok(sp_peer_header_decode(piece, sizeof piece, "peer", &header, &error), &error);
    assert_int_equal(header.kind, SP_PEER_PIECE);
    assert_true(header.session == 0x0807060504030201u);
    assert_int_equal(header.request, 9);
    assert_int_equal(header.body_bytes, 0);
    assert_int_equal(header.offer, 2);
    assert_int_equal(header.part, SP_PEER_PART_IMAGE);
    assert_int_equal(header.offset, 4096);
    assert_int_equal(header.bytes, 256);
    assert_int_equal(header.tag[0], 0xaa);
    sp_peer_header_encode(&header, again);
    assert_memory_equal(again, piece, sizeof piece);
}

static void check_refused(const uint8_t *bytes, size_t n, int64_t position, const char *code)
{
    sp_peer_header header;
    sp_error error;

    assert_int_equal(sp_peer_header_decode(bytes, n, "10.0.0.7:4711", &header, &error),
                     SP_ERR_PEER_PROTOCOL);
    assert_string_equal(error.code, code);
    assert_string_equal(error.subject, "10.0.0.7:4711");
    assert_int_equal(error.position, position);
}

/* Each field of PIECE with a value that it may not have, and the byte that is reported. */
static void every_field_is_checked(void **state)
{
    static const struct {
        size_t at;
        uint8_t value;
        int64_t position;
        const char *code;
    } wrong[] = {
        {0, 'X', 0, "peer-protocol"}, {4, 2, 4, "peer-version"},    {5, 1, 4, "peer-version"},
        {6, 99, 6, "peer-protocol"},  {16, 0, 16, "peer-protocol"}, {24, 1, 24, "peer-protocol"},
        {32, 0, 32, "peer-protocol"}, {40, 2, 40, "peer-protocol"}, {44, 1, 44, "peer-protocol"},
        {54, 1, 48, "peer-protocol"}, {57, 0, 56, "peer-protocol"}, {59, 2, 56, "peer-protocol"},
    };
    uint8_t bytes[SP_PEER_HEADER_BYTES + 1] = {0};

    (void)state;
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        memcpy(bytes, piece, sizeof piece);
        bytes[wrong[i].at] = wrong[i].value;
        check_refused(bytes, sizeof piece, wrong[i].position, wrong[i].code);
    }
    memcpy(bytes, piece, sizeof piece);
    for (size_t n = 0; n <= sizeof bytes; n++)
        if (n != sizeof piece)
            check_refused(bytes, n, (int64_t)n, "peer-protocol");
}

static sp_status decode(const sp_peer_header *header, int64_t *out_position)
{
    uint8_t bytes[SP_PEER_HEADER_BYTES];
    sp_peer_header again;
    sp_error error = {.position = -1};
    sp_status status;

    sp_peer_header_encode(header, bytes);
    status = sp_peer_header_decode(bytes, sizeof bytes, "peer", &again, &error);
    *out_position = error.position;
    return status;
}

/* Bodies at their limits, and one byte beyond. */
static void bodies_have_limits(void **state)
{
    static const struct {
        sp_peer_header header;
        uint64_t most;
    } kinds[] = {
        {{.kind = SP_PEER_HELLO, .request = 1}, 32},
        {{.kind = SP_PEER_PROOF, .session = 1, .request = 1}, 32},
        {{.kind = SP_PEER_LIST, .session = 1, .request = 1}, 0},
        {{.kind = SP_PEER_MANIFEST, .session = 1, .request = 1}, 255},
        {{.kind = SP_PEER_MANIFEST, .session = 1, .request = 1, .part = 1}, 32},
        {{.kind = SP_PEER_RELEASE, .session = 1, .request = 1, .offer = 1}, 0},
        {{.kind = SP_PEER_CHALLENGE, .session = 1, .request = 1, .part = 1}, 64},
        {{.kind = SP_PEER_WELCOME, .session = 1, .request = 1}, 0},
        {{.kind = SP_PEER_LISTING, .session = 1, .request = 1}, 16777216},
        {{.kind = SP_PEER_OFFER, .session = 1, .request = 1, .offer = 1}, 33554432},
        {{.kind = SP_PEER_FAILED, .part = 1}, 400},
    };
    int64_t position;

    (void)state;
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
        sp_peer_header header = kinds[i].header;

        header.body_bytes = kinds[i].most;
        assert_int_equal(decode(&header, &position), SP_OK);
        header.body_bytes++;
        assert_int_equal(decode(&header, &position), SP_ERR_PEER_PROTOCOL);
        assert_int_equal(position, 24);
    }
}

/* DATA says its length twice. */
static void data_agrees_with_its_body(void **state)
{
    sp_peer_header header = {.kind = SP_PEER_DATA,
                             .session = 1,
                             .request = 1,
                             .offer = 1,
                             .bytes = 1 << 24,
                             .body_bytes = 1 << 24};
    int64_t position;

    (void)state;
    assert_int_equal(decode(&header, &position), SP_OK);
    header.body_bytes--;
    assert_int_equal(decode(&header, &position), SP_ERR_PEER_PROTOCOL);
    assert_int_equal(position, 24);
    header.body_bytes = header.bytes = (1 << 24) + 1;
    assert_int_equal(decode(&header, &position), SP_ERR_PEER_PROTOCOL);
}

/* ---- the key --------------------------------------------------------------------------------- */

static void check_hex(const uint8_t *bytes, const char *want)
{
    char hex[2 * SP_SHA256_BYTES + 1];

    sp_hex(bytes, SP_SHA256_BYTES, hex);
    assert_string_equal(hex, want);
}

static void proofs_of_the_two_sides(void **state)
{
    sp_peer_key key = {.bytes = "correct horse battery staple", .n_bytes = 28}, connection;
    uint8_t client[SP_PEER_NONCE_BYTES], server[SP_PEER_NONCE_BYTES], proof[SP_PEER_PROOF_BYTES];

    (void)state;
    for (int i = 0; i < SP_PEER_NONCE_BYTES; i++) {
        client[i] = (uint8_t)i;
        server[i] = (uint8_t)(100 + i);
    }
    assert_int_equal(sp_peer_prove(&key, SP_PEER_SIDE_CLIENT, client, server, proof), SP_OK);
    check_hex(proof, "0c8c2ae197a62c34917951422c4c82130466a414b841b17f5c1c5c782baafbd6");
    assert_int_equal(sp_peer_prove(&key, SP_PEER_SIDE_SERVER, client, server, proof), SP_OK);
    check_hex(proof, "a497dc9cb11e25e1c7cb3592efe3a5a4caeb04f8e70acfb13145a62d1bf118aa");
    assert_int_equal(sp_peer_connection_key(&key, client, server, &connection), SP_OK);
    assert_int_equal(connection.n_bytes, SP_SHA256_BYTES);
    check_hex(connection.bytes, "a0aff6233daa6f0f6bff081acc7e4472f1b9337c00ba24d3bd566210b9e3ca0f");
    key.n_bytes = 0;
    assert_int_equal(sp_peer_connection_key(&key, client, server, &connection), SP_OK);
    assert_int_equal(connection.n_bytes, 0);
}

static void a_tag_covers_header_and_body(void **state)
{
    sp_peer_key key = {.bytes = "0123456789abcdef", .n_bytes = 16}, none = {.n_bytes = 0};
    uint8_t body[64] = {1, 2, 3};
    sp_peer_header header = {
        .kind = SP_PEER_OFFER, .session = 5, .request = 6, .offer = 7, .body_bytes = sizeof body};
    uint8_t zero[SP_PEER_TAG_BYTES] = {0};

    (void)state;
    assert_int_equal(sp_peer_sign(&key, &header, body), SP_OK);
    assert_true(sp_peer_is_signed(&key, &header, body));
    assert_false(sp_peer_is_signed(&none, &header, body));
    for (size_t i = 0; i < sizeof body; i++) {
        body[i] ^= 1;
        assert_false(sp_peer_is_signed(&key, &header, body));
        body[i] ^= 1;
    }
    header.offer++;
    assert_false(sp_peer_is_signed(&key, &header, body));
    header.offer--;
    key.bytes[15] ^= 1;
    assert_false(sp_peer_is_signed(&key, &header, body));
    assert_int_equal(sp_peer_sign(&none, &header, body), SP_OK);
    assert_memory_equal(header.tag, zero, sizeof zero);
    assert_true(sp_peer_is_signed(&none, &header, body));
}

static void check_key_file(const char *directory, const char *text, mode_t mode, sp_status want)
{
    char path[4096];
    sp_peer_key key = {.n_bytes = 0};
    sp_error error;

    sp_test_write_file(directory, "key", text, strlen(text));
    snprintf(path, sizeof path, "%s/key", directory);
    assert_int_equal(chmod(path, mode), 0);
    assert_int_equal(sp_peer_key_read(path, &key, &error), want);
    if (want == SP_OK) {
        assert_int_equal(key.n_bytes, 16);
        assert_memory_equal(key.bytes, "0123456789abcdef", 16);
    } else {
        assert_string_equal(error.code, "peer-key");
    }
}

static void a_key_is_a_line_that_nobody_else_reads(void **state)
{
    char *directory = sp_test_make_directory();

    (void)state;
    check_key_file(directory, "0123456789abcdef\n", 0600, SP_OK);
    check_key_file(directory, "0123456789abcdef", 0400, SP_OK);
    check_key_file(directory, "0123456789abcdef\r\nmore\n", 0600, SP_OK);
    check_key_file(directory, "0123456789abcde\n", 0600, SP_ERR_INPUT);
    check_key_file(directory, "0123456789abcdef\n", 0640, SP_ERR_INPUT);
    check_key_file(directory, "0123456789abcdef\n", 0604, SP_ERR_INPUT);
    sp_test_remove_tree(directory);
    sp_free(directory);
}

/* ---- manifests ------------------------------------------------------------------------------- */

static const char digest_text[] =
    "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff";

/* A manifest whose parts a test replaces. */
typedef struct parts {
    const char *version, *name, *digest, *tensors, *tail;
} parts;

static const char good_tensors[] =
    "{\"name\":\"a\",\"dtype\":\"BF16\",\"shape\":[8,16],\"offset\":0,\"bytes\":256},"
    "{\"name\":\"b\",\"dtype\":\"F32\",\"shape\":[4],\"offset\":256,\"bytes\":16}";
#define IMAGE(ranks, bits, bytes)                                                            \
    ",\"image\":{\"bytes\":" bytes                                                           \
    ",\"fingerprint\":\"00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff\"," \
    "\"seal\":\"ff112233445566778899aabbccddeeff00112233445566778899aabbccddeeff\","         \
    "\"checksum\":\"fedcba9876543210\",\"ranks\":" ranks ",\"scale_bits\":" bits             \
    ",\"rank\":8,\"pairs\":1,\"file_bytes\":272,\"row_macs\":12.5,\"receipt\":\"{}\"}"
#define EXPERTS(bytes) IMAGE("[8]", "[0]", "4096,\"expert_bytes\":" bytes)
static const char good_image[] = IMAGE("[8,0]", "[1073741824,0]", "4096");
static const parts good = {"1", "scripture", digest_text, good_tensors, ""};

static sp_status decode_parts(const parts *p, sp_peer_manifest *out_manifest, sp_error *error)
{
    sp_text text = {0};
    sp_status status;

    sp_text_format(&text,
                   "{\"sidepath_manifest\":%s,\"name\":\"%s\",\"digest\":\"%s\","
                   "\"config\":\"{\\\"r\\\": 8}\",\"tensors\":[%s]%s}",
                   p->version, p->name, p->digest, p->tensors, p->tail);
    assert_false(text.failed);
    status = sp_peer_manifest_decode(text.data, text.bytes, out_manifest, error);
    sp_text_free(&text);
    return status;
}

static void check_image(const sp_peer_image *image)
{
    assert_non_null(image);
    assert_int_equal(image->bytes, 4096);
    assert_int_equal(image->fingerprint.bytes[1], 0x11);
    assert_int_equal(image->seal.bytes[0], 0xff);
    assert_true(image->checksum == 0xfedcba9876543210u);
    assert_int_equal(image->n_sites, 2);
    assert_int_equal(image->ranks[0], 8);
    assert_int_equal(image->ranks[1], 0);
    assert_true(image->scales[0] == 2.0f && image->scales[1] == 0.0f);
    assert_int_equal(image->rank, 8);
    assert_int_equal(image->pairs, 1);
    assert_int_equal(image->file_bytes, 272);
    assert_true(image->row_macs == 12.5);
    assert_int_equal(image->expert_bytes, 0);
    assert_string_equal(image->receipt, "{}");
}

static void a_manifest_is_read(void **state)
{
    size_t blocks = sp_alloc_blocks();
    parts p = good;
    sp_peer_manifest m;
    sp_error error;

    (void)state;
    p.tail = good_image;
    assert_ok(decode_parts(&p, &m, &error), &error);
    assert_string_equal(m.name, "scripture");
    assert_int_equal(m.digest.bytes[31], 0xff);
    assert_string_equal(m.config, "{\"r\": 8}");
    assert_int_equal(m.config_bytes, 8);
    assert_int_equal(m.n_tensors, 2);
    assert_string_equal(m.tensors[0].name, "a");
    assert_int_equal(m.tensors[0].type, SP_TENSOR_BF16);
    assert_int_equal(m.tensors[0].n_dims, 2);
    assert_int_equal(m.tensors[0].shape[0], 8);
    assert_int_equal(m.tensors[0].shape[1], 16);
    assert_int_equal(m.tensors[1].type, SP_TENSOR_F32);
    assert_int_equal(m.offsets[1], 256);
    assert_int_equal(m.offsets[2], 272);
    assert_int_equal(m.data_bytes, 272);
    check_image(m.image);
    sp_peer_manifest_free(&m);
    sp_peer_manifest_free(&m);
    assert_int_equal(sp_alloc_blocks(), blocks);
}

static void what_is_encoded_is_read_back(void **state)
{
    parts p = good;
    sp_peer_manifest m, again;
    sp_text text = {0};
    sp_error error;

    (void)state;
    p.tail = good_image;
    assert_ok(decode_parts(&p, &m, &error), &error);
    sp_peer_manifest_encode(&m, &text);
    assert_false(text.failed);
    assert_ok(sp_peer_manifest_decode(text.data, text.bytes, &again, &error), &error);
    assert_string_equal(again.name, "scripture");
    assert_memory_equal(again.digest.bytes, m.digest.bytes, SP_DIGEST_BYTES);
    assert_string_equal(again.tensors[1].name, "b");
    assert_int_equal(again.data_bytes, 272);
    check_image(again.image);
    sp_text_free(&text);
    sp_peer_manifest_free(&again);
    m.image->expert_bytes = 1024;
    sp_peer_manifest_encode(&m, &text);
    assert_ok(sp_peer_manifest_decode(text.data, text.bytes, &again, &error), &error);
    assert_int_equal(again.image->expert_bytes, 1024);
    assert_int_equal(again.image->bytes, 4096);
    sp_text_free(&text);
    sp_peer_manifest_free(&m);
    sp_peer_manifest_free(&again);
}

typedef struct forgery {
    parts text;
    const char *subject, *code;
} forgery;

static const forgery forgeries[] = {
    {{"2", "n", digest_text, good_tensors, ""}, "sidepath_manifest", "peer-version"},
    {{"\"1\"", "n", digest_text, good_tensors, ""}, "sidepath_manifest", "peer-manifest"},
    {{"1", "", digest_text, good_tensors, ""}, "name", "peer-manifest"},
    {{"1", "a\\u0007", digest_text, good_tensors, ""}, "name", "peer-manifest"},
    {{"1", "n", "00", good_tensors, ""}, "digest", "peer-manifest"},
    {{"1", "n", "GG112233445566778899aabbccddeeff00112233445566778899aabbccddeeff", good_tensors,
      ""},
     "digest",
     "peer-manifest"},
    {{"1", "n", digest_text, good_tensors, ",\"more\":1"}, "more", "peer-manifest"},
    {{"1", "n", digest_text, "1", ""}, "tensors", "peer-manifest"},
    /* a gap, an overlap, a length that the shape does not have, a shape that overflows */
    {{"1", "n", digest_text,
      "{\"name\":\"a\",\"dtype\":\"BF16\",\"shape\":[8],\"offset\":16,\"bytes\":16}", ""},
     "a",
     "peer-manifest"},
    {{"1", "n", digest_text,
      "{\"name\":\"a\",\"dtype\":\"BF16\",\"shape\":[8],\"offset\":0,\"bytes\":16},"
      "{\"name\":\"b\",\"dtype\":\"BF16\",\"shape\":[8],\"offset\":8,\"bytes\":16}",
      ""},
     "b",
     "peer-manifest"},
    {{"1", "n", digest_text,
      "{\"name\":\"a\",\"dtype\":\"BF16\",\"shape\":[8],\"offset\":0,\"bytes\":17}", ""},
     "a",
     "peer-manifest"},
    {{"1", "n", digest_text,
      "{\"name\":\"a\",\"dtype\":\"F64\",\"shape\":[4294967296,4294967296],\"offset\":0,"
      "\"bytes\":0}",
      ""},
     "a",
     "peer-manifest"},
    {{"1", "n", digest_text,
      "{\"name\":\"a\",\"dtype\":\"F8\",\"shape\":[8],\"offset\":0,\"bytes\":8}", ""},
     "F8",
     "peer-manifest"},
    {{"1", "n", digest_text,
      "{\"name\":\"a\",\"dtype\":\"U8\",\"shape\":[1,1,1,1,1,1,1,1,1],\"offset\":0,\"bytes\":1}",
      ""},
     "shape",
     "peer-manifest"},
    {{"1", "n", digest_text,
      "{\"name\":\"a\",\"dtype\":\"U8\",\"shape\":[-1],\"offset\":0,\"bytes\":1}", ""},
     "shape",
     "peer-manifest"},
    {{"1", "n", digest_text,
      "{\"name\":\"a\",\"dtype\":\"U8\",\"shape\":[8],\"offset\":0,\"bytes\":8,\"at\":0}", ""},
     "at",
     "peer-manifest"},
    {{"1", "n", digest_text, good_tensors, IMAGE("[8]", "[0,0]", "1")}, "ranks", "peer-manifest"},
    {{"1", "n", digest_text, good_tensors, IMAGE("[-8]", "[0]", "1")}, "ranks", "peer-manifest"},
    {{"1", "n", digest_text, good_tensors, IMAGE("[8]", "[4294967296]", "1")},
     "scale_bits",
     "peer-manifest"},
    /* infinity */
    {{"1", "n", digest_text, good_tensors, IMAGE("[8]", "[2139095040]", "1")},
     "scale_bits",
     "peer-manifest"},
    {{"1", "n", digest_text, good_tensors, IMAGE("[8]", "[0]", "0")}, "bytes", "peer-manifest"},
    {{"1", "n", digest_text, good_tensors, EXPERTS("4097")}, "expert_bytes", "peer-manifest"},
    {{"1", "n", digest_text, good_tensors, EXPERTS("-256")}, "expert_bytes", "peer-manifest"},
    {{"1", "n", digest_text, good_tensors, EXPERTS("\"256\"")}, "expert_bytes", "peer-manifest"},
};

static void a_forged_manifest_is_refused(void **state)
{
    size_t blocks = sp_alloc_blocks();

    (void)state;
    for (size_t i = 0; i < sizeof forgeries / sizeof forgeries[0]; i++) {
        sp_peer_manifest m;
        sp_error error;

        assert_int_equal(decode_parts(&forgeries[i].text, &m, &error), SP_ERR_PEER_PROTOCOL);
        assert_int_equal(error.status, SP_ERR_PEER_PROTOCOL);
        assert_string_equal(error.code, forgeries[i].code);
        assert_string_equal(error.subject, forgeries[i].subject);
        assert_int_equal(decode_parts(&forgeries[i].text, &m, NULL), SP_ERR_PEER_PROTOCOL);
    }
    assert_int_equal(sp_alloc_blocks(), blocks);
}

/* 256 MB of a manifest are refused by their number; the bytes are not looked at. */
static void a_huge_manifest_is_refused_by_its_length(void **state)
{
    sp_peer_manifest m;
    sp_peer_listing listing;
    sp_error error;

    (void)state;
    assert_int_equal(sp_peer_manifest_decode("{}", (size_t)256 << 20, &m, &error),
                     SP_ERR_TOO_LARGE);
    assert_string_equal(error.code, "peer-manifest-too-large");
    assert_int_equal(sp_peer_listing_decode("{}", (size_t)256 << 20, &listing, &error),
                     SP_ERR_TOO_LARGE);
    assert_string_equal(error.code, "peer-listing-too-large");
}

/* Millions of entries that are none must not take memory for each. */
static void entries_that_are_none_take_no_memory(void **state)
{
    sp_text text = {0};
    sp_peer_manifest m;
    sp_error error;

    (void)state;
    sp_text_add(&text, "{\"sidepath_manifest\":1,\"tensors\":[0");
    for (int i = 0; i < 100000; i++)
        sp_text_add(&text, ",0");
    sp_text_add(&text, "]}");
    assert_int_equal(sp_peer_manifest_decode(text.data, text.bytes, &m, &error),
                     SP_ERR_PEER_PROTOCOL);
    assert_string_equal(error.subject, "tensors");
    sp_text_free(&text);
}

static void memory_fails_in_order(void **state)
{
    sp_status status = SP_ERR_MEMORY;

    (void)state;
    for (int64_t n = 0; status != SP_OK; n++) {
        size_t blocks = sp_alloc_blocks();
        sp_peer_manifest m;
        sp_text text = {0};
        sp_error error;

        sp_text_format(&text,
                       "{\"sidepath_manifest\":1,\"name\":\"n\",\"digest\":\"%s\",\"config\":\"\","
                       "\"tensors\":[%s]%s}",
                       digest_text, good_tensors, good_image);
        sp_alloc_fail_after(n);
        status = sp_peer_manifest_decode(text.data, text.bytes, &m, &error);
        sp_alloc_fail_after(-1);
        sp_text_free(&text);
        if (status == SP_OK)
            sp_peer_manifest_free(&m);
        else
            assert_int_equal(status, SP_ERR_MEMORY);
        assert_int_equal(sp_alloc_blocks(), blocks);
    }
}

/* ---- listings -------------------------------------------------------------------------------- */

static void a_listing_is_read_back(void **state)
{
    sp_peer_listed entries[] = {{.name = "a", .bytes = 12, .packed = true},
                                {.name = "b \"quoted\"", .bytes = 1u << 30}};
    sp_peer_listing listing = {entries, 2, NULL}, again;
    sp_text text = {0};
    sp_error error;

    (void)state;
    memset(entries[1].digest.bytes, 0x5a, SP_DIGEST_BYTES);
    sp_peer_listing_encode(&listing, &text);
    assert_ok(sp_peer_listing_decode(text.data, text.bytes, &again, &error), &error);
    assert_int_equal(again.n_adapters, 2);
    assert_string_equal(again.adapters[0].name, "a");
    assert_true(again.adapters[0].packed);
    assert_string_equal(again.adapters[1].name, "b \"quoted\"");
    assert_int_equal(again.adapters[1].bytes, 1u << 30);
    assert_int_equal(again.adapters[1].digest.bytes[7], 0x5a);
    assert_false(again.adapters[1].packed);
    sp_peer_listing_free(&again);
    sp_text_clear(&text);
    entries[1].name = "a"; /* twice */
    sp_peer_listing_encode(&listing, &text);
    assert_int_equal(sp_peer_listing_decode(text.data, text.bytes, &again, &error),
                     SP_ERR_PEER_PROTOCOL);
    assert_string_equal(error.code, "peer-listing");
    sp_text_free(&text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_header_is_these_bytes),
        cmocka_unit_test(every_field_is_checked),
        cmocka_unit_test(bodies_have_limits),
        cmocka_unit_test(data_agrees_with_its_body),
        cmocka_unit_test(proofs_of_the_two_sides),
        cmocka_unit_test(a_tag_covers_header_and_body),
        cmocka_unit_test(a_key_is_a_line_that_nobody_else_reads),
        cmocka_unit_test(a_manifest_is_read),
        cmocka_unit_test(what_is_encoded_is_read_back),
        cmocka_unit_test(a_forged_manifest_is_refused),
        cmocka_unit_test(a_huge_manifest_is_refused_by_its_length),
        cmocka_unit_test(entries_that_are_none_take_no_memory),
        cmocka_unit_test(memory_fails_in_order),
        cmocka_unit_test(a_listing_is_read_back),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
