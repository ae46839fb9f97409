/* A peer that is killed at random moments of a dozen transfers; soak_peer_kills.c has a thousand.
 */
#include "support/peer_world.h"
#include "support/test.h"

static void a_killed_peer_costs_one_transfer(void **state)
{
    (void)state;
    peer_world_kill_often(12, 20261201);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(a_killed_peer_costs_one_transfer)};

    peer_world_need_ucx();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
