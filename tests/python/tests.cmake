# The Python package, put together from the tree: what needs cffi and numpy alone. What needs torch,
# peft or transformers besides is run by hand: docs/PYTHON.md says how. Not with sanitizers, whose
# run time would have to be in the interpreter.
if(NOT SIDEPATH_SANITIZE AND NOT CMAKE_CROSSCOMPILING)
  foreach(name declarations adapters delta engine routing client vllm)
    add_test(NAME python_${name}
             COMMAND ${Python3_EXECUTABLE} -B ${CMAKE_CURRENT_SOURCE_DIR}/python/check_package.py
                     $<TARGET_FILE:sidepath_cli> $<TARGET_FILE:sidepath_engine_shared>
                     ${CMAKE_C_COMPILER} test_${name})
    set_tests_properties(python_${name} PROPERTIES LABELS quick TIMEOUT 300 SKIP_RETURN_CODE 77)
  endforeach()
endif()
