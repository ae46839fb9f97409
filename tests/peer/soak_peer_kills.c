/* A peer that is killed at random moments of a thousand transfers. */
#include "support/peer_world.h"
#include "support/test.h"

static void a_killed_peer_costs_one_transfer(void **state)
{
    (void)state;
    peer_world_kill_often(1000, 20261201);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(a_killed_peer_costs_one_transfer)};

    peer_world_need_ucx();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
