# The generator of random checkpoints, read back with Python's standard library alone.
set(check ${CMAKE_CURRENT_SOURCE_DIR}/engine/check_make_checkpoint.py)
add_test(NAME make_checkpoint
         COMMAND ${Python3_EXECUTABLE} -B ${check} $<TARGET_FILE:make_checkpoint>
                 ${PROJECT_BINARY_DIR}/check_make_checkpoint
                 ${PROJECT_SOURCE_DIR}/tests/fixtures/tokenizer512/tokenizer.json)
set_tests_properties(make_checkpoint PROPERTIES LABELS "quick;engine" TIMEOUT 300)
# The batching proof over many seeds; the number of seeds is its argument.
add_test(NAME soak_batching COMMAND test_batching 40)
set_tests_properties(soak_batching PROPERTIES LABELS soak TIMEOUT 3600)
# 500 adapters through 4 slots, 10,000 loads and unloads.
add_test(NAME soak_rotation COMMAND test_rotation soak)
set_tests_properties(soak_rotation PROPERTIES LABELS soak TIMEOUT 3600)
add_test(NAME soak_rotation_sim COMMAND test_rotation_sim 1 10000)
set_tests_properties(soak_rotation_sim PROPERTIES LABELS soak TIMEOUT 7200)
add_test(NAME soak_sequence_memory COMMAND test_sequence_memory_sim 1 10000)
set_tests_properties(soak_sequence_memory PROPERTIES LABELS soak TIMEOUT 7200)
# Each model with gated delta nets in each case and under each load.
add_test(NAME soak_hybrid_memory COMMAND test_hybrid_memory all)
set_tests_properties(soak_hybrid_memory PROPERTIES LABELS soak TIMEOUT 3600)
# Drafts over many seeds, each with 1,000 requests; the number of seeds is its argument.
add_test(NAME soak_speculative COMMAND test_speculative 40)
set_tests_properties(soak_speculative PROPERTIES LABELS soak TIMEOUT 7200)
# gcc 12 for aarch64 fails inside its vectoriser on a loop of this file.
if(CMAKE_SYSTEM_PROCESSOR STREQUAL aarch64)
  set_source_files_properties(${CMAKE_CURRENT_SOURCE_DIR}/engine/test_families.c
                              PROPERTIES COMPILE_OPTIONS -fno-tree-vectorize)
endif()
