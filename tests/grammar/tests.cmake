# Outputs drawn from schemas, judged by PyPI's jsonschema: skipped by name where it is missing.
add_executable(schema_walk ${CMAKE_CURRENT_SOURCE_DIR}/grammar/schema_walk.c)
target_link_libraries(schema_walk PRIVATE sidepath_test_support)
sidepath_compile_options(schema_walk)
add_dependencies(quick_tests schema_walk)
set(check ${CMAKE_CURRENT_SOURCE_DIR}/grammar/check_schemas.py)
add_test(NAME grammar_schemas COMMAND ${Python3_EXECUTABLE} -B ${check} $<TARGET_FILE:schema_walk>
                                      300)
set_tests_properties(grammar_schemas PROPERTIES LABELS "quick;grammar" TIMEOUT 300
                                                SKIP_RETURN_CODE 77)
add_test(NAME soak_grammar_schemas
         COMMAND ${Python3_EXECUTABLE} -B ${check} $<TARGET_FILE:schema_walk> 20000)
set_tests_properties(soak_grammar_schemas PROPERTIES LABELS soak TIMEOUT 7200 SKIP_RETURN_CODE 77)

# Random text grammars against a recogniser of the check's own.
set(check ${CMAKE_CURRENT_SOURCE_DIR}/grammar/check_ebnf.py)
add_test(NAME grammar_ebnf COMMAND ${Python3_EXECUTABLE} -B ${check} $<TARGET_FILE:schema_walk> 250)
set_tests_properties(grammar_ebnf PROPERTIES LABELS "quick;grammar" TIMEOUT 300)
add_test(NAME soak_grammar_ebnf
         COMMAND ${Python3_EXECUTABLE} -B ${check} $<TARGET_FILE:schema_walk> 20000)
set_tests_properties(soak_grammar_ebnf PROPERTIES LABELS soak TIMEOUT 7200)
