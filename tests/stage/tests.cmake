# The long run of the simulator: the same program with more seeds.
add_test(NAME soak_stage_sim COMMAND test_stage_sim 1 10000)
set_tests_properties(soak_stage_sim PROPERTIES LABELS "soak;stage" TIMEOUT 7200)
