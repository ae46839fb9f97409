# The splitter's oracle is a real regex engine; nothing but this test links it.
pkg_check_modules(PCRE2 REQUIRED IMPORTED_TARGET libpcre2-8)
target_link_libraries(test_tokenizer_split PRIVATE PkgConfig::PCRE2)

set(check ${CMAKE_CURRENT_SOURCE_DIR}/engine/check_make_checkpoint.py)
add_test(NAME make_checkpoint
         COMMAND ${Python3_EXECUTABLE} -B ${check} $<TARGET_FILE:make_checkpoint>
                 ${CMAKE_BINARY_DIR}/check_make_checkpoint
                 ${CMAKE_SOURCE_DIR}/tests/fixtures/tokenizer512/tokenizer.json)
set_tests_properties(make_checkpoint PROPERTIES LABELS "quick;engine" TIMEOUT 300)
# The batching proof over many seeds; the number of seeds is its argument.
add_test(NAME soak_batching COMMAND test_batching 40)
set_tests_properties(soak_batching PROPERTIES LABELS soak TIMEOUT 3600)
