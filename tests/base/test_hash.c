/* hash: published test values. */
#include "base/hash.h"

#include "support/test.h"

#include <string.h>

static void check_sha256(const void *data, size_t bytes, const char *want)
{
    uint8_t digest[SP_SHA256_BYTES];
    char hex[2 * SP_SHA256_BYTES + 1];

    assert_int_equal(sp_sha256_of(data, bytes, digest), SP_OK);
    sp_hex(digest, sizeof digest, hex);
    assert_string_equal(hex, want);
}

/* FIPS 180-2, appendix B, and the empty message. */
static void sha256_of_the_standard(void **state)
{
    static char million[1000000];

    (void)state;
    check_sha256("", 0, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    check_sha256(NULL, 0, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    check_sha256("abc", 3, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    check_sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq", 56,
                 "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
    memset(million, 'a', sizeof million);
    check_sha256(million, sizeof million,
                 "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

static void sha256_in_pieces_is_the_same(void **state)
{
    static char data[300];
    uint8_t whole[SP_SHA256_BYTES], pieces[SP_SHA256_BYTES];

    (void)state;
    for (size_t i = 0; i < sizeof data; i++)
        data[i] = (char)(i * 7);
    assert_int_equal(sp_sha256_of(data, sizeof data, whole), SP_OK);
    for (size_t cut = 0; cut <= sizeof data; cut += 13) {
        sp_sha256 *hash;

        assert_int_equal(sp_sha256_create(&hash), SP_OK);
        sp_sha256_update(hash, data, cut);
        sp_sha256_update(hash, data + cut, sizeof data - cut);
        sp_sha256_finish(hash, pieces);
        assert_memory_equal(pieces, whole, sizeof whole);
    }
}

static void check_hmac(const void *key, size_t key_bytes, const char *text, const char *want)
{
    uint8_t tag[SP_SHA256_BYTES];
    char hex[2 * SP_SHA256_BYTES + 1];

    for (size_t cut = 0; cut <= strlen(text); cut++) {
        assert_int_equal(
            sp_hmac_sha256(key, key_bytes, text, cut, text + cut, strlen(text) - cut, tag), SP_OK);
        sp_hex(tag, sizeof tag, hex);
        assert_string_equal(hex, want);
    }
}

/* RFC 4231, cases 1, 2 and 6 (a key longer than a block). */
static void hmac_of_the_standard(void **state)
{
    uint8_t key[131];

    (void)state;
    memset(key, 0x0b, sizeof key);
    check_hmac(key, 20, "Hi There",
               "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
    check_hmac("Jefe", 4, "what do ya want for nothing?",
               "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
    memset(key, 0xaa, sizeof key);
    check_hmac(key, sizeof key, "Test Using Larger Than Block-Size Key - Hash Key First",
               "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
}

static void a_hash_may_be_abandoned(void **state)
{
    sp_sha256 *hash;

    (void)state;
    assert_int_equal(sp_sha256_create(&hash), SP_OK);
    sp_sha256_update(hash, "abc", 3);
    sp_sha256_abandon(hash);
    sp_sha256_abandon(NULL);
}

/* The values of the hash's own sanity check: one length for each path through it. */
static void xxh3_of_the_published_lengths(void **state)
{
    static const struct {
        size_t bytes;
        uint64_t hash;
    } table[] = {
        {0, 0x2d06800538d394c2},    {1, 0xc44bdff4074eecdb},    {6, 0x27b56a84cd2d7325},
        {12, 0xa713daf0dfbb77e7},   {24, 0xa3fe70bf9d3510eb},   {48, 0x397da259ecba1f11},
        {80, 0xbcdefbbb2c47c90a},   {195, 0xcd94217ee362ec3a},  {403, 0xcdeb804d65c6dea4},
        {512, 0x617e49599013cb6b},  {2048, 0xdd59e2c3a5f038e0}, {2240, 0x6e73a90539cf2948},
        {2367, 0xcb37aeb9e5d361ed},
    };
    uint8_t buffer[2367];
    uint64_t generator = 2654435761u;

    (void)state;
    for (size_t i = 0; i < sizeof buffer; i++) {
        buffer[i] = (uint8_t)(generator >> 56);
        generator *= 11400714785074694797u;
    }
    for (size_t i = 0; i < sizeof table / sizeof *table; i++)
        assert_true(sp_xxh3(buffer, table[i].bytes) == table[i].hash);
}

static void hex_is_lower_case(void **state)
{
    static const uint8_t data[] = {0x00, 0x0f, 0xa5, 0xff};
    char text[9] = "xxxxxxxx";

    (void)state;
    sp_hex(data, sizeof data, text);
    assert_string_equal(text, "000fa5ff");
    sp_hex(data, 0, text);
    assert_string_equal(text, "");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sha256_of_the_standard),
        cmocka_unit_test(sha256_in_pieces_is_the_same),
        cmocka_unit_test(hmac_of_the_standard),
        cmocka_unit_test(a_hash_may_be_abandoned),
        cmocka_unit_test(xxh3_of_the_published_lengths),
        cmocka_unit_test(hex_is_lower_case),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
