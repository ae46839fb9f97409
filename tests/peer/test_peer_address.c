/* Addresses of peers: what is one, and what is refused by name. */
#include "peer/peer_transport.h"

#include "support/test.h"

#include <string.h>

static void addresses_are_split(void **state)
{
    static const struct {
        const char *text, *host;
        int port;
    } good[] = {
        {"10.0.0.7:7480", "10.0.0.7", 7480},
        {"host.example:1", "host.example", 1},
        {"[::1]:65535", "::1", 65535},
        {"[fe80::1%eth0]:80", "fe80::1%eth0", 80},
    };

    (void)state;
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        char host[64];
        int port = 0;
        sp_error error;

        assert_ok(sp_peer_address_split(good[i].text, host, sizeof host, &port, &error), &error);
        assert_string_equal(host, good[i].host);
        assert_int_equal(port, good[i].port);
    }
}

static void others_are_refused(void **state)
{
    static const char *const bad[] = {
        "",         "host",
        ":80",      "host:",
        "host:0",   "host:65536",
        "host:8o",  "host:-1",
        "host: 80", "::1:80",
        "[::1]80",  "[::1:80",
        "[]:80",    "host:100000",
        "host:+8",  "a-name-that-is-longer-than-the-memory-that-the-caller-has-for-it:80",
    };

    (void)state;
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        char host[32];
        int port;
        sp_error error;

        assert_int_equal(sp_peer_address_split(bad[i], host, sizeof host, &port, &error),
                         SP_ERR_INPUT);
        assert_string_equal(error.code, "peer-address");
        assert_string_equal(error.subject, bad[i]);
    }
}

static void addresses_are_resolved_and_shown(void **state)
{
    static const struct {
        const char *host, *text;
        bool is_loopback;
    } hosts[] = {
        {"127.0.0.1", "127.0.0.1:7480", true},
        {"127.8.9.1", "127.8.9.1:7480", true},
        {"10.127.0.1", "10.127.0.1:7480", false},
        {"0.0.0.0", "0.0.0.0:7480", false},
        {"::1", "[::1]:7480", true},
        {"::2", "[::2]:7480", false},
    };
    sp_peer_address address;
    sp_error error;

    (void)state;
    for (size_t i = 0; i < sizeof hosts / sizeof hosts[0]; i++) {
        char text[SP_PEER_ADDRESS_BYTES];

        assert_ok(sp_peer_address_resolve(hosts[i].host, 7480, &address, &error), &error);
        sp_peer_address_text(&address, text);
        assert_string_equal(text, hosts[i].text);
        assert_true(sp_peer_address_is_loopback(&address) == hosts[i].is_loopback);
    }
    assert_int_equal(sp_peer_address_resolve("no host has this name", 1, &address, &error),
                     SP_ERR_PEER_UNREACHABLE);
    assert_string_equal(error.code, "peer-unreachable");
}

static void the_device_of_an_address_is_found(void **state)
{
    char name[SP_PEER_DEVICE_BYTES] = "";
    sp_peer_address address, local;
    sp_error error;

    (void)state;
    assert_ok(sp_peer_address_resolve("127.0.0.1", 80, &address, &error), &error);
    assert_true(sp_peer_address_device(&address, name));
    assert_string_equal(name, "lo");
    assert_true(sp_peer_address_local(&address, &local));
    assert_true(sp_peer_address_is_same(&address, &local));
    assert_ok(sp_peer_address_resolve("0.0.0.0", 80, &address, &error), &error);
    assert_false(sp_peer_address_is_same(&address, &local));
    assert_false(sp_peer_address_device(&address, name));
    assert_ok(sp_peer_address_resolve("192.0.2.1", 80, &address, &error),
              &error); /* of documents */
    assert_false(sp_peer_address_device(&address, name));
    assert_ok(sp_peer_address_resolve("::", 80, &address, &error), &error);
    assert_false(sp_peer_address_device(&address, name));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(addresses_are_split),
        cmocka_unit_test(others_are_refused),
        cmocka_unit_test(the_device_of_an_address_is_found),
        cmocka_unit_test(addresses_are_resolved_and_shown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
